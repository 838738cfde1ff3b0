"""Scores, their derivative and the softmax pieces, as queries x keys and as keys x queries, against plain torch."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from biasflash.backends.triton import geometry
from biasflash.tile.bias import load_terms, seen_keys, store_term_grad, term_bases
from biasflash.tile.score import add_dense, keep_only, score_grad_tile, score_tile
from biasflash.tile.softmax import LOG2E, finish, probability, row_reference, running_step

M, N = 16, 32
ROUNDING = torch.finfo(torch.float32).eps / 2
BOTH_WAYS = pytest.mark.parametrize("keys_first", [False, True], ids=["queries x keys", "keys x queries"])


@triton.jit
def positions(BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, KEYS_FIRST: tl.constexpr):
    """Positions of queries and keys, shaped for the orientation."""
    if KEYS_FIRST:
        return tl.arange(0, BLOCK_M)[None, :], tl.arange(0, BLOCK_N)[:, None]
    else:
        return tl.arange(0, BLOCK_M)[:, None], tl.arange(0, BLOCK_N)[None, :]


def normal(*shape: int, size: float = 1.0) -> Tensor:
    return size * torch.randn(shape)


def broadcast_strides(t: Tensor) -> list[int]:
    return [0 if size == 1 else stride for size, stride in zip(t.shape, t.stride(), strict=True)]


def codes(t: Tensor) -> tuple[int, ...]:
    """Strides of a term of four axes as kernels take them, for any strides (VEC 0)."""
    return tuple(map(geometry.code, broadcast_strides(t)))


def padded(t: Tensor) -> Tensor:
    return (t.view(torch.uint8) if t.dtype == torch.bool else t)[None, None]


# --------------------------------------------------------------------------------------------------------- score_tile


@triton.jit
def score_kernel(
    product_ptr,
    y_ptr,
    term_ptrs,
    term_strides,
    sizes,
    keys,
    scale,
    shift,
    TERMS: tl.constexpr,
    SCALED: tl.constexpr,
    IS_CAUSAL: tl.constexpr,
    MASKED: tl.constexpr,
    KEYS_FIRST: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    q_pos, k_pos = positions(BLOCK_M, BLOCK_N, KEYS_FIRST)
    at = q_pos * BLOCK_N + k_pos
    k_in = k_pos < keys
    bases = term_bases(term_ptrs, term_strides, 0, 0, sizes, TERMS)
    tiles = load_terms(bases, term_strides, 0, 0, q_pos, k_pos, k_in, TERMS, False, MASKED)
    y = score_tile(tl.load(product_ptr + at), tiles, q_pos, k_pos, k_in, scale, shift, TERMS, SCALED, IS_CAUSAL, MASKED)
    tl.store(y_ptr + at, y)


def scores(
    product: Tensor,
    biases: list[Tensor],
    masks: list[Tensor],
    *,
    keys_first: bool,
    scale: float = 1.0,
    scaled: bool = True,
    shift: int | None = None,
    keys: int = N,
) -> Tensor:
    """One tile of scores, ``(M, N)``, by the kernels' pieces."""
    terms = [padded(t) for t in (*biases, *masks)]
    strides = [broadcast_strides(t) for t in terms]
    kinds = [add_dense] * len(biases) + [keep_only] * len(masks)
    y = torch.empty(M, N)
    score_kernel[(1,)](
        product,
        y,
        tuple(terms),
        tuple(codes(t) for t in terms),
        (geometry.code(1),),
        keys,
        scale,
        0 if shift is None else shift,
        TERMS=tuple((f, s[-2] != 0, s[-1] != 0, 0, f is keep_only) for f, s in zip(kinds, strides, strict=True)),
        SCALED=scaled,
        IS_CAUSAL=shift is not None,
        MASKED=shift is not None or keys < N,
        KEYS_FIRST=keys_first,
        BLOCK_M=M,
        BLOCK_N=N,
    )
    return y


def plain_scores(
    product: Tensor, biases: list[Tensor], masks: list[Tensor], scale: float, shift: int | None, keys: int = N
) -> Tensor:
    """The formula, one operation after the other, in the dtype of ``product``."""
    y = scale * product
    for bias in biases:
        y = y + bias.to(y.dtype)
    hidden = (torch.arange(N) >= keys).expand(M, N)
    for mask in masks:
        hidden = hidden | ~mask
    if shift is not None:
        hidden = hidden | (torch.arange(N) > torch.arange(M)[:, None] + shift)
    return y.masked_fill(hidden, -math.inf)


@BOTH_WAYS
@pytest.mark.parametrize("shape", [(M, N), (M, 1), (1, N), (1, 1)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_a_bias_of_any_shape_is_added_in_float32(keys_first: bool, shape: tuple[int, int], dtype: torch.dtype) -> None:
    product, bias = normal(M, N), normal(*shape).to(dtype)
    wanted = plain_scores(product, [bias], [], 0.3, None)
    assert torch.equal(scores(product, [bias], [], scale=0.3, keys_first=keys_first), wanted)


@BOTH_WAYS
@pytest.mark.parametrize("shape", [(M, N), (M, 1), (1, N), (1, 1)], ids=str)
def test_a_mask_of_any_shape_selects(keys_first: bool, shape: tuple[int, int]) -> None:
    product, mask = normal(M, N), torch.rand(shape) < 0.6
    product = product.masked_fill(~mask, math.nan)  # what is hidden must not be computed with
    got = scores(product, [], [mask], scale=0.3, keys_first=keys_first)
    assert torch.equal(got, plain_scores(product, [], [mask], 0.3, None))


@BOTH_WAYS
@pytest.mark.parametrize("shift", [0, 5, -5, -M, N], ids="shift {}".format)
def test_several_terms_under_the_diagonal(keys_first: bool, shift: int) -> None:
    product = normal(M, N)
    biases, masks = [normal(M, N).half(), normal(1, N)], [torch.rand(M, N) < 0.7, torch.rand(M, 1) < 0.9]
    got = scores(product, biases, masks, scale=0.3, shift=shift, keys_first=keys_first)
    assert torch.equal(got, plain_scores(product, biases, masks, 0.3, shift))


@BOTH_WAYS
@pytest.mark.parametrize("shift", [None, 3])
def test_keys_past_the_end_are_hidden_and_their_terms_not_read(keys_first: bool, shift: int | None) -> None:
    product, bias = normal(M, N), normal(M, N)
    bias[:, 20:] = math.inf
    got = scores(product, [bias], [], shift=shift, keys=20, keys_first=keys_first)
    assert torch.equal(got, plain_scores(product, [bias], [], 1.0, shift, keys=20))


@BOTH_WAYS
def test_without_a_bias_scores_may_stay_in_units_of_the_scale(keys_first: bool) -> None:
    product, mask = normal(M, N), torch.rand(M, N) < 0.7
    got = scores(product, [], [mask], scale=0.3, scaled=False, keys_first=keys_first)
    assert torch.equal(got, product.masked_fill(~mask, -math.inf))


# ---------------------------------------------------------------------- running softmax, finish, and the weights again


@triton.jit
def softmax_kernel(
    y_ptr,
    v_ptr,
    out_ptr,
    lse_ptr,
    low_ptr,
    weight_ptr,
    keys,
    unit,
    natural,
    PAIR: tl.constexpr,
    LOW_RANGE: tl.constexpr,
    KEYS_FIRST: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Scores ``(BLOCK_M, keys)`` in tiles -> out for values of width one, log-sum-exp in two parts, weights."""
    AXIS: tl.constexpr = 0 if KEYS_FIRST else 1
    q_pos, k_pos = positions(BLOCK_M, BLOCK_N, KEYS_FIRST)
    m = tl.full([BLOCK_M], float("-inf"), tl.float32)
    l = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M], tl.float32)
    for start in range(0, keys, BLOCK_N):
        y = tl.load(y_ptr + q_pos * keys + start + k_pos)
        p, alpha, m, l = running_step(y, m, l, unit, AXIS, PAIR, LOW_RANGE)
        acc = acc * alpha + tl.sum(p * tl.load(v_ptr + start + k_pos), AXIS)
    inverse, lse, low = finish(m, l, natural)
    rows = tl.arange(0, BLOCK_M)
    tl.store(out_ptr + rows, acc * inverse)
    tl.store(lse_ptr + rows, lse)
    tl.store(low_ptr + rows, low)
    reference = tl.expand_dims(row_reference(lse, PAIR), AXIS)
    low = tl.expand_dims(low * LOG2E, AXIS)
    for start in range(0, keys, BLOCK_N):
        y = tl.load(y_ptr + q_pos * keys + start + k_pos)
        p = probability(y, reference, low, unit, PAIR)
        tl.store(weight_ptr + q_pos * keys + start + k_pos, p)


def softmax(
    y: Tensor,
    v: Tensor,
    *,
    keys_first: bool,
    pair: bool,
    scale: float | None = None,
    low_range: bool = False,
) -> dict[str, Tensor]:
    """Out, lse and low ``(M)``, weights ``(M, keys)``, of scores ``y (M, keys)``, in units of ``scale`` if given."""
    rows, keys = y.shape
    found = {name: torch.empty(rows) for name in ("out", "lse", "low")} | {"weights": torch.empty(rows, keys)}
    softmax_kernel[(1,)](
        y,
        v,
        *found.values(),
        keys,
        LOG2E.value * (1.0 if scale is None else scale),
        1.0 if scale is None else scale,
        PAIR=pair,
        LOW_RANGE=low_range,
        KEYS_FIRST=keys_first,
        BLOCK_M=rows,
        BLOCK_N=16,
    )
    return found


def check_softmax(got: dict[str, Tensor], y: Tensor, v: Tensor) -> None:
    """Against float64. Every score is rounded once a multiplication and a subtraction, every sum once an addition."""
    y, v = y.double(), v.double()
    lse = torch.logsumexp(y, 1)
    empty = lse == -math.inf
    weights = torch.exp(y - lse.masked_fill(empty, 0.0)[:, None])
    size = y.masked_fill(y == -math.inf, 0.0).abs().amax(1, keepdim=True)
    bound = ROUNDING * (3 * size + y.shape[1] + 4)
    assert torch.equal(got["lse"] == -math.inf, empty)
    assert not got["out"][empty].any()
    assert not got["low"][empty].any()
    assert not got["weights"][y == -math.inf].any()
    assert ((got["weights"] - weights).abs() <= bound * weights).all()
    assert ((got["out"] - weights @ v).abs() <= bound[:, 0] * (weights @ v.abs())).all()
    assert ((got["lse"] - lse).abs() <= bound[:, 0] * (1 + lse.abs()))[~empty].all()


SOFTMAX = pytest.mark.parametrize("pair", [False, True], ids=["one float", "pair"])


@BOTH_WAYS
@SOFTMAX
def test_softmax_over_several_tiles(keys_first: bool, pair: bool) -> None:
    y, v = normal(M, 64, size=4.0), normal(64)
    check_softmax(softmax(y, v, keys_first=keys_first, pair=pair), y, v)


@BOTH_WAYS
def test_softmax_of_scores_in_units_of_the_scale(keys_first: bool) -> None:
    y, v = normal(M, 64, size=9.0), normal(64)
    check_softmax(softmax(y, v, keys_first=keys_first, pair=False, scale=0.3), 0.3 * y.double(), v)


@BOTH_WAYS
@SOFTMAX
@pytest.mark.parametrize("low_range", [False, True])
def test_rows_and_tiles_that_see_nothing(keys_first: bool, pair: bool, low_range: bool) -> None:
    y, v = normal(M, 64), normal(64)
    y = y.masked_fill(torch.rand(M, 64) < 0.3, -math.inf)
    y[3] = -math.inf  # nothing at all
    y[5, :32], y[6, 16:32], y[7, 48:] = -math.inf, -math.inf, -math.inf  # nothing in the first, a middle, the last tile
    y[8] = -math.inf
    y[8, 40] = 2.0  # one key
    check_softmax(softmax(y, v, keys_first=keys_first, pair=pair, low_range=low_range), y, v)


def low_rows(lowest: float) -> Tensor:
    """Rows: all keys lowest; one visible lowest key; ordinary keys among lowest ones, early and late; half hidden."""
    y = torch.full((M, 64), lowest)
    y[1] = -math.inf
    y[1, 50] = lowest
    y[2, :10], y[3, 50:] = normal(10), normal(14)
    y[4, ::2] = -math.inf
    return y


@BOTH_WAYS
@SOFTMAX
def test_the_lowest_half_precision_number_is_a_score_like_any_other(keys_first: bool, pair: bool) -> None:
    y, v = low_rows(torch.finfo(torch.float16).min), normal(64)
    check_softmax(softmax(y, v, keys_first=keys_first, pair=pair), y, v)


@BOTH_WAYS
@SOFTMAX
@pytest.mark.parametrize("lowest", [torch.finfo(torch.float32).min, torch.finfo(torch.bfloat16).min, -1e38], ids=str)
def test_the_lowest_float_is_a_score_like_any_other(keys_first: bool, pair: bool, lowest: float) -> None:
    """Every weight of a row is 0 or 1 / n, whatever the rounding of scores that large. One float holds the log-sum-exp
    but not the weights behind it; a pair does."""
    y, v = low_rows(lowest), normal(64)
    got = softmax(y, v, keys_first=keys_first, pair=pair, low_range=True)
    lse, weights = torch.logsumexp(y.double(), 1), torch.softmax(y.double(), 1)
    assert (got["out"] - weights @ v.double()).abs().max() <= 64 * ROUNDING * v.abs().max()
    assert ((got["lse"] - lse).abs() <= 4 * ROUNDING * lse.abs() + 64 * ROUNDING).all()
    if pair:
        assert (got["weights"] - weights).abs().max() <= 64 * ROUNDING


@BOTH_WAYS
def test_a_pair_resolves_scores_of_ten_million(keys_first: bool) -> None:
    """Around 1e7 float32 counts in whole units; the log-sum-exp does not fall on them, its two parts together do."""
    y, v = (1e7 + torch.randint(-4, 4, (M, 64))).float(), normal(64)
    got = softmax(y, v, keys_first=keys_first, pair=True)
    weights = torch.softmax(y.double(), 1)
    assert (got["weights"] - weights).abs().max() <= 80 * ROUNDING
    assert (got["lse"].double() + got["low"] - torch.logsumexp(y.double(), 1)).abs().max() <= 80 * ROUNDING


# ----------------------------------------------------------------------------------------------------- its derivative


@triton.jit
def score_grad_kernel(
    y_ptr,
    lse_ptr,
    dp_ptr,
    delta_ptr,
    ds_ptr,
    HAS_KEEP: tl.constexpr,
    KEYS_FIRST: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    AXIS: tl.constexpr = 0 if KEYS_FIRST else 1
    q_pos, k_pos = positions(BLOCK_M, BLOCK_N, KEYS_FIRST)
    at = q_pos * BLOCK_N + k_pos
    rows = tl.arange(0, BLOCK_M)
    reference = tl.expand_dims(row_reference(tl.load(lse_ptr + rows), False), AXIS)
    p = probability(tl.load(y_ptr + at), reference, reference, LOG2E, False)
    delta = tl.expand_dims(tl.load(delta_ptr + rows), AXIS)
    tl.store(ds_ptr + at, score_grad_tile(p, tl.load(dp_ptr + at), delta, HAS_KEEP))


@BOTH_WAYS
@pytest.mark.parametrize("has_keep", [False, True])
def test_the_derivative_is_that_of_autograd(keys_first: bool, has_keep: bool) -> None:
    product, v, dout, dlse = normal(M, N), normal(N, 8), normal(M, 8), normal(M)
    mask = torch.rand(M, N) < 0.7
    mask[4] = False
    hidden = ~mask if has_keep else torch.zeros(M, N, dtype=torch.bool)
    y = product.masked_fill(hidden, -math.inf)

    s = product.double().requires_grad_()
    lse = torch.logsumexp(s.masked_fill(hidden, -math.inf), 1)
    seen = lse > -math.inf
    p = torch.exp(s - lse.masked_fill(~seen, 0.0)[:, None]).masked_fill(hidden, 0.0)
    out = p @ v.double()
    loss = (out * dout.double()).sum() + (lse * dlse.double())[seen].sum()
    (wanted,) = torch.autograd.grad(loss, s)

    dp = (dout @ v.T).masked_fill(hidden, math.nan)  # values of hidden keys may be anything
    delta = (out.detach() * dout.double()).sum(1).float() - dlse
    ds = torch.empty(M, N)
    score_grad_kernel[(1,)](
        y, lse.detach().float(), dp, delta, ds, HAS_KEEP=has_keep, KEYS_FIRST=keys_first, BLOCK_M=M, BLOCK_N=N
    )
    assert not ds[hidden].any()
    size = (y.masked_fill(hidden, 0.0).abs() + lse.detach().masked_fill(~seen, 0.0).abs()[:, None] + 12) * 2
    flow = p.detach() * (
        (dout.abs() @ v.abs().T) + (dout.abs() @ v.abs().T).amax(1, keepdim=True) + dlse.abs()[:, None]
    )
    assert ((ds - wanted).abs() <= ROUNDING * size * flow).all()


# --------------------------------------------------------------------------------------- masks over keys, gradient sink


@triton.jit
def seen_kernel(term_ptrs, term_strides, sizes, keys, seen_ptr, TERMS: tl.constexpr, BLOCK_N: tl.constexpr):
    bases = term_bases(term_ptrs, term_strides, 0, 0, sizes, TERMS)
    k_local = tl.arange(0, BLOCK_N)
    seen = seen_keys(k_local < keys, bases, term_strides, 0, k_local, TERMS, False, True)
    tl.store(seen_ptr + k_local, seen.to(tl.uint8))


def test_keys_are_seen_unless_a_mask_without_queries_hides_them() -> None:
    bias, over_all, over_keys, one = normal(M, N), torch.rand(M, N) < 0.5, torch.rand(1, N) < 0.5, torch.ones(1, 1) > 0
    terms = [padded(t) for t in (bias, over_all, over_keys, one)]
    strides = [broadcast_strides(t) for t in terms]
    kinds: list[Any] = [add_dense, keep_only, keep_only, keep_only]
    seen = torch.empty(N, dtype=torch.uint8)
    seen_kernel[(1,)](
        tuple(terms),
        tuple(codes(t) for t in terms),
        (geometry.code(1),),
        20,
        seen,
        TERMS=tuple((f, s[-2] != 0, s[-1] != 0, 0, f is keep_only) for f, s in zip(kinds, strides, strict=True)),
        BLOCK_N=N,
    )
    assert torch.equal(seen.bool(), over_keys[0] & (torch.arange(N) < 20))


@triton.jit
def sink_kernel(
    tile_ptr,
    grad_ptr,
    strides,
    q_start,
    k_start,
    rows,
    keys,
    VEC: tl.constexpr,
    WIDE: tl.constexpr,
    KEYS_FIRST: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    q_pos, k_pos = positions(BLOCK_M, BLOCK_N, KEYS_FIRST)
    inside = (q_start + q_pos < rows) & (k_start + k_pos < keys)
    tile = tl.load(tile_ptr + q_pos * BLOCK_N + k_pos)
    store_term_grad(grad_ptr, strides, q_start, k_start, q_pos, k_pos, inside, tile, VEC, WIDE)


@BOTH_WAYS
@pytest.mark.parametrize("wide", [False, True], ids=["32 bits", "64 bits"])
@pytest.mark.parametrize("layout", ["contiguous", "transposed", "sliced"])
def test_a_tile_of_gradients_lands_in_its_place_rounded(keys_first: bool, layout: str, wide: bool) -> None:
    around = torch.full((90, 90), 7.0, dtype=torch.float16)
    grad = {"contiguous": around[:25, :40].contiguous(), "transposed": around[:40, :25].T, "sliced": around[::2, ::2]}[
        layout
    ][:25, :40]
    view = geometry.view(grad[None, None].stride(), 2, 40, grad.data_ptr() % 16 == 0)
    tile = normal(M, N)
    sink_kernel[(1,)](
        tile,
        grad,
        view.codes,
        12,
        16,
        25,
        40,
        VEC=view.vec,
        WIDE=wide,
        KEYS_FIRST=keys_first,
        BLOCK_M=M,
        BLOCK_N=N,
    )
    wanted = torch.full((25, 40), 7.0, dtype=torch.float16)
    wanted[12:25, 16:40] = tile[:13, :24].half()
    assert torch.equal(grad, wanted)
    if layout != "contiguous":
        assert int((around != 7.0).sum()) == int((wanted != 7.0).sum()), "something outside the gradient was written"
