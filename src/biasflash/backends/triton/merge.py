"""Adds up what the programs of a split forward pass left: every one walked over a piece of the keys of its rows."""

import triton
import triton.language as tl

from biasflash.tile.memory import head_offset, local, store_rows, wide
from biasflash.tile.pieces import merge_step
from biasflash.tile.softmax import LOG2E, finish
from biasflash.tile.span import place


@triton.jit(do_not_specialize=["M", "heads", "batch", "pieces"])
def merge_kernel(
    acc_ptr, m_ptr, l_ptr, out_ptr, lse_ptr, low_ptr,
    sizes, out_strides,
    M, heads, batch, pieces, scale,
    DV: tl.constexpr, BLOCK_DV: tl.constexpr, OUT_VEC: tl.constexpr, WIDE: tl.constexpr, SCALED: tl.constexpr,
    KEEP_LOW: tl.constexpr, ROWS: tl.constexpr, PIECES: tl.constexpr,
):  # fmt: skip
    """out, lse and lse_low from ``acc [pieces, rows, Dv]``, ``m`` and ``l [pieces, rows]``, rows as in lse, float32.

    Pieces are added PIECES at a time, always in the same order. Grid: one program per ROWS queries of a head.
    """
    tile, b, h = place(tl.program_id(0), tl.cdiv(M, ROWS), batch, heads, "tile,head,batch")
    q_start = tile * ROWS
    q_local = local(ROWS, WIDE)
    q_in = q_start + q_local < M
    head = (b * heads + h) * M  # the scratch of all pieces is below 2^31 elements, and so are its rows
    q_at = head + q_start + tl.arange(0, ROWS)
    columns = tl.arange(0, BLOCK_DV)
    unit = LOG2E
    if not SCALED:
        unit = scale * LOG2E
    acc = tl.zeros([ROWS, BLOCK_DV], tl.float32)
    m = tl.full([ROWS], float("-inf"), tl.float32)
    l = tl.zeros([ROWS], tl.float32)
    for first in range(0, pieces, PIECES):
        piece = first + tl.arange(0, PIECES)
        there = (piece < pieces)[:, None] & q_in[None, :]  # [P, M]
        at = piece[:, None] * (batch * heads * M) + q_at[None, :]
        piece_m = tl.load(m_ptr + at, mask=there, other=float("-inf"))
        piece_l = tl.load(l_ptr + at, mask=there, other=0.0)
        piece_acc = tl.load(
            acc_ptr + (at[:, :, None] * DV + columns[None, None, :]),
            mask=there[:, :, None] & (columns < DV)[None, None, :],
            other=0.0,
        )  # [P, M, Dv]
        weight, alpha, m, l = merge_step(piece_m, piece_l, m, l, unit)
        acc = acc * alpha[:, None] + tl.sum(piece_acc * weight[:, :, None], 0)

    inverse, lse, low = finish(m, l, 1.0 if SCALED else scale)
    out_base = out_ptr + head_offset(b, h, out_strides, sizes, OUT_VEC)
    store_rows(out_base, q_start, q_local, out_strides, q_in, acc * inverse[:, None], DV, BLOCK_DV, OUT_VEC, WIDE)
    rows = (wide(b) * heads + h) * M + q_start + q_local
    tl.store(lse_ptr + rows, lse, mask=q_in)
    if KEEP_LOW:
        tl.store(low_ptr + rows, low, mask=q_in)
