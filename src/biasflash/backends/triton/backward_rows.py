"""Backward passes that recompute no scores: delta, and dq where score gradients were stored (owner: a query tile)."""

import triton
import triton.language as tl

from biasflash.tile.bias import load_term
from biasflash.tile.memory import head_offset, inside, local, owned, shifted, shifted_keys, wide
from biasflash.tile.softmax import extreme_flag, row_reference, statistics_pitch, store_row_statistics
from biasflash.tile.span import key_span, place
from biasflash.tile.strips import (
    add_dots,
    load_strips,
    row_products,
    scale_strips,
    store_strips,
    zero_strips,
)


@triton.jit(do_not_specialize=["M", "heads", "batch"])
def delta_kernel(
    out_ptr, dout_ptr, lse_ptr, dlse_ptr, reference_ptr, delta_ptr, rare_ptr,
    sizes, out_strides, dout_strides,
    M, heads, batch,
    DV: tl.constexpr, DV_STRIPS: tl.constexpr, OUT_VEC: tl.constexpr, DOUT_VEC: tl.constexpr, HAS_DLSE: tl.constexpr,
    WIDE: tl.constexpr, SHORT_M: tl.constexpr, PAIR: tl.constexpr, RARE: tl.constexpr, TAIL: tl.constexpr,
    BLOCK_M: tl.constexpr,
):  # fmt: skip
    """delta = <out, dout> - dlse and the reference of every row, float32; with RARE a flag for every tile of queries.

    Grid: one program per head (fastest), query tile and batch item.
    """
    pid = tl.program_id(0)
    tiles = tl.cdiv(M, BLOCK_M)
    h, tile, b = pid % heads, pid // heads % tiles, pid // heads // tiles
    q_start = tile * BLOCK_M
    q_at = shifted(q_start, M, BLOCK_M, SHORT_M)
    q_local = local(BLOCK_M, WIDE)
    q_rows = inside(q_local, M, SHORT_M)
    q_own = owned(q_at, q_start, q_local, M, SHORT_M)
    out_base = out_ptr + head_offset(b, h, out_strides, sizes, OUT_VEC)
    dout_base = dout_ptr + head_offset(b, h, dout_strides, sizes, DOUT_VEC)
    out = load_strips(out_base, q_at, q_rows, out_strides, DV, DV_STRIPS, OUT_VEC, WIDE)
    dout = load_strips(dout_base, q_at, q_rows, dout_strides, DV, DV_STRIPS, DOUT_VEC, WIDE)
    delta = row_products(out, dout)
    head = wide(b) * heads + h
    at = head * M + q_at + q_rows
    if HAS_DLSE:
        delta -= tl.load(dlse_ptr + at)
    lse = tl.load(lse_ptr + at)
    reference = row_reference(lse, PAIR, RARE)
    delta = tl.where(lse == float("-inf"), 0.0, delta)  # nothing was seen: dlse may be NaN there
    if RARE:
        tl.store(rare_ptr + head * tiles + tile, extreme_flag(lse))
    head = head * statistics_pitch(M, TAIL)
    store_row_statistics(reference_ptr + head, delta_ptr + head, reference, delta, q_at + q_rows, q_own, M, TAIL)


@triton.jit(do_not_specialize=["M", "N", "heads", "group", "batch", "shift"])
def dq_from_ds_kernel(
    ds_ptr, k_ptr, dq_ptr,
    sizes, ds_strides, k_strides, dq_strides,
    M, N, heads, group, batch, shift, scale,
    D: tl.constexpr, D_STRIPS: tl.constexpr, DS_VEC: tl.constexpr, K_VEC: tl.constexpr, DQ_VEC: tl.constexpr,
    WIDE: tl.constexpr, EVEN_N: tl.constexpr, SHORT_M: tl.constexpr, SHORT_N: tl.constexpr, IS_CAUSAL: tl.constexpr,
    PRECISION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """dq = scale ds k where ds was stored. Grid: one program per query tile, head and batch item."""
    if EVEN_N:
        N = N // 8 * 8
    tiles = tl.cdiv(M, BLOCK_M)
    tile, b, h = place(tl.program_id(0), tiles, batch, heads, "tile,head,batch")
    if IS_CAUSAL:
        tile = tiles - 1 - tile
    q_start = tile * BLOCK_M
    q_at = shifted(q_start, M, BLOCK_M, SHORT_M)
    ds_base = ds_ptr + head_offset(b, h, ds_strides, sizes, DS_VEC)
    k_base = k_ptr + head_offset(b, h // group, k_strides, sizes, K_VEC)
    q_local = local(BLOCK_M, WIDE)
    k_local = local(BLOCK_N, WIDE)
    q_rows = inside(q_local, M, SHORT_M)[:, None]
    k_rows = inside(k_local, N, SHORT_N)
    acc_dq = zero_strips(BLOCK_M, D_STRIPS)
    _, end = key_span(q_at, M, N, shift, BLOCK_M, BLOCK_N, IS_CAUSAL)
    whole = tl.minimum(
        N // BLOCK_N * BLOCK_N, end
    )  # hidden pairs were stored as zeros: only the last tile needs a mask
    for phase in tl.static_range(2):
        lo = whole if phase else 0
        hi = end if phase else whole
        for k_start in tl.range(lo, hi, BLOCK_N, num_stages=STAGES):
            k_start = tl.multiple_of(k_start, BLOCK_N)
            k_at = k_start
            if phase:
                k_at = shifted_keys(k_start, N, BLOCK_N, SHORT_N, EVEN_N)
            k_in = owned(k_at, k_start, k_local, N, SHORT_N)[None, :]
            ds = load_term(
                ds_base, ds_strides, q_at, k_at, q_rows, k_local[None, :], k_in, True, True, DS_VEC, WIDE, SHORT_N
            )  # [M, N]
            if phase:
                ds = tl.where(k_in, ds, 0.0)
            k = load_strips(k_base, k_at, k_rows, k_strides, D, D_STRIPS, K_VEC, WIDE)  # [N, D]
            acc_dq = add_dots(acc_dq, ds.to(k[0].dtype), k, PRECISION)  # [M, D]
    q_own = owned(q_at, q_start, q_local, M, SHORT_M)
    dq_base = dq_ptr + head_offset(b, h, dq_strides, sizes, DQ_VEC)
    store_strips(dq_base, q_at, q_local, dq_strides, q_own, scale_strips(acc_dq, scale), D, D_STRIPS, DQ_VEC, WIDE)
