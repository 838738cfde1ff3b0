"""Running states of the softmax over pieces of the keys: stored by those who walk over a piece, merged later."""

import triton
import triton.language as tl


@triton.jit
def merge_step(piece_m, piece_l, m, l, unit):
    """Running states of several pieces of the keys, pieces along axis 0 -> (factor of each piece, factor for what was
    merged before, new maximum, new sum). A piece that saw nothing has m = -inf and counts 0."""
    m_new = tl.maximum(m, tl.max(piece_m, 0))
    m_ref = tl.where(m_new == float("-inf"), 0.0, m_new)
    weight = tl.exp2((piece_m - tl.expand_dims(m_ref, 0)) * unit)
    alpha = tl.exp2((m - m_ref) * unit)
    return weight, alpha, m_new, l * alpha + tl.sum(piece_l * weight, 0)


@triton.jit
def store_columns(ptr, at, own, tile, WIDTH: tl.constexpr, AT: tl.constexpr, BLOCK_W: tl.constexpr):
    """``tile [rows, BLOCK_W]`` into the columns from AT on of rows ``at``, which are WIDTH wide."""
    columns = AT + tl.arange(0, BLOCK_W)
    tl.store(ptr + (at[:, None] * WIDTH + columns[None, :]), tile, mask=own[:, None] & (columns < WIDTH)[None, :])


@triton.jit
def store_piece(acc_ptr, m_ptr, l_ptr, at, own, acc, m, l, WIDTH: tl.constexpr, STRIPS: tl.constexpr):
    """Running state of one piece of the keys, float32: ``acc``, in strips, into rows ``at`` of width WIDTH, ``m`` and
    ``l``."""
    for i in tl.static_range(len(STRIPS)):
        store_columns(acc_ptr, at, own, acc[i], WIDTH, STRIPS[0] if i else 0, STRIPS[i])
    tl.store(m_ptr + at, m, mask=own)
    tl.store(l_ptr + at, l, mask=own)
