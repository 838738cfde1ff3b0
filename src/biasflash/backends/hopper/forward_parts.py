"""What both forward kernels do: how many key tiles an item has, bases of weights, sums and what is written of a row."""

from typing import Any

from triton import constexpr_function

from biasflash.backends.hopper.gluon import gl, jit
from biasflash.backends.hopper.marks import last_key, line_of
from biasflash.backends.hopper.pieces import NEG_INF
from biasflash.tile.softmax import LN2
from biasflash.tile.span import key_span


@constexpr_function
def far(low_range: Any, dtype: Any) -> float:
    """From where on float32 scores are so far from each other that weights are those of equals or nothing, in any unit.

    Up to there a rounded reference is 32 off at most, or 16 for float16, whose weights reach no further. 0 where no
    score is as low as that.
    """
    return (2.0**28 if dtype == gl.float16 else 2.0**29) if low_range else 0.0


@jit
def key_tiles(row, extent, COUNT: gl.constexpr, FORM: gl.constexpr):
    """(key tiles, those of them at the end that need a mask) of COUNT query rows; at least one tile, to write zeros."""
    M, N, _heads, _batch, shift = extent
    full_end, end = key_span(row, M, N, shift, COUNT, FORM.BLOCK_N, FORM.IS_CAUSAL)
    tiles = gl.maximum(gl.cdiv(end, FORM.BLOCK_N), 1)
    return tiles, tiles - full_end // FORM.BLOCK_N


@jit
def keys_of(b, inner, extent, mask):
    """The end of the last 64 keys in which one is visible to a batch item; behind the last item that of the last."""
    b = gl.minimum(b, extent[3] - 1)
    return last_key(line_of(b // inner, b % inner, mask), extent[1], mask)


@jit
def cut(x, caps_tiles, u, FORM: gl.constexpr):
    """-inf for hidden keys of the ``u``-th tile, whatever ``x`` is there."""
    caps = caps_tiles.index(u % FORM.KV_STAGES).reshape([FORM.BLOCK_N]).load(gl.SliceLayout(0, FORM.SCORES))
    return gl.minimum(x, caps[None, :])


@jit
def rounded(x, y):
    """x * y, rounded: never half of an FMA."""
    return gl.inline_asm_elementwise("mul.rn.f32 $0, $1, $2;", "=f,f,f", [x, y], dtype=gl.float32, is_pure=True, pack=1)


@jit
def row_unit(top, unit, FORM: gl.constexpr):
    """What turns the scores of rows with maximum ``top`` into base 2.

    1 beyond FAR, where references are exact then, up to ``finfo.max``, which LOG2E takes to infinity. Before it what a
    reference is off is a factor of all weights of the row.
    """
    if FORM.FAR > 0:
        return gl.where(gl.abs(top) > FORM.FAR, 1.0, unit)
    else:
        return unit


@jit
def store_statistics(m, l, unit, scale, row, head, M, row_ptrs, FORM: gl.constexpr):
    """Write lse and what its rounding lost of a warpgroup's rows; return what sums are to be multiplied with."""
    lse_ptr, low_ptr = row_ptrs
    dead = l == 0.0
    sums = gl.where(dead, 1.0, l)
    m = gl.where(dead, 0.0, m)
    unit = row_unit(m, unit, FORM)
    log_sum = gl.log2(sums) - gl.fma(m, unit, -rounded(m, unit))  # sums are relative to the rounded reference
    top = m
    if not FORM.HAS_BIAS:
        top = rounded(m, gl.full_like(m, scale))
    lse = gl.fma(log_sum, LN2, top)
    to = head.to(gl.int64) * M + row
    gl.store(lse_ptr + to, gl.where(dead, NEG_INF, lse), mask=row < M)
    if FORM.KEEP_LOW:
        low = gl.fma(log_sum, LN2, top - lse)
        if not FORM.HAS_BIAS:
            low += gl.fma(m, scale, -top)
        gl.store(low_ptr + to, low, mask=row < M)
    return gl.where(dead, 0.0, 1.0 / sums)
