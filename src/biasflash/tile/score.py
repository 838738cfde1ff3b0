"""The score of a (query, key) pair, and how its change flows back.

Forward (natural units if SCALED, else in units of the scale)::

    y = scale <q, k> + bias_1 + bias_2 + ...        hidden pairs: -inf

Backward, with ``p = exp(y - lse)`` and ``delta = <out, dout> - dlse``::

    ds = p (<dout, v> - delta)                      hidden pairs: 0
    dbias = ds      dq = scale ds k      dk = scale ds^T q      dv = p^T dout
"""

import triton
import triton.language as tl


@triton.jit
def add_dense(y, tile):
    """Kind "dense": an additive bias, widened here and nowhere else."""
    if tile.dtype == tl.float64:  # finite in float64 is finite in float32: the lowest number, not -inf
        finite = (tile != float("inf")) & (tile != float("-inf"))
        tile = tl.where(finite, tl.minimum(tl.maximum(tile, -3.4028234663852886e38), 3.4028234663852886e38), tile)
    return y + tile.to(tl.float32)


@triton.jit
def keep_only(y, tile):
    """Kind "keep": hidden pairs are selected away."""
    return tl.where(tile != 0, y, float("-inf"))


@triton.jit
def score_tile(
    product,
    tiles,
    q_pos,
    k_pos,
    k_in,
    scale,
    shift,
    TERMS: tl.constexpr,
    SCALED: tl.constexpr,
    IS_CAUSAL: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Product tile -> biased, masked score. MASKED: the tile crosses the causal diagonal or the end of the keys."""
    y = product
    if SCALED:
        y = y * scale
    for i in tl.static_range(len(TERMS)):
        y = TERMS[i][0](y, tiles[i])
    if MASKED:
        if IS_CAUSAL:
            y = tl.where((k_pos <= q_pos + shift) & k_in, y, float("-inf"))
        else:
            y = tl.where(k_in, y, float("-inf"))
    return y


@triton.jit
def score_grad_tile(p, dp, delta, HAS_KEEP: tl.constexpr):
    """Derivative of ``score_tile``: the change of a score, given the change ``dp`` of its weight.

    With masks, a hidden pair (p = 0) is selected away, since ``dp`` may be NaN there.
    """
    ds = p * (dp - delta)
    if HAS_KEEP:
        ds = tl.where(p == 0.0, 0.0, ds)
    return ds
