"""Where an element lies: integers as arguments, offsets of heads, tiles of rows, 64-bit promotion."""

import triton
import triton.language as tl


@triton.jit
def plain(code):
    """The integer behind ``code = 2 x + 3``.

    Triton compiles a kernel anew when an integer inside a tuple is 1 or changes its divisibility by 16. Odd codes above
    1 all fall in one class, so strides and sizes stay run-time values whatever they are.
    """
    return (code - 3) >> 1


@triton.jit
def wide(x):
    """A scalar (program index or loop variable) as int64: offsets pass 2^31 elements."""
    return tl.full([], 0, tl.int64) + x


@triton.jit
def wide_if(x, WIDE: tl.constexpr):
    """A scalar as int64 where the offsets it leads to may pass 2^31. Narrow is worth it: a 64-bit product in a loop
    costs four instructions and its registers a program on the multiprocessor."""
    if WIDE:
        return wide(x)
    else:
        return x


@triton.jit
def local(BLOCK: tl.constexpr, WIDE: tl.constexpr):
    """Positions inside a tile; 64 bits where offsets inside one head may pass 2^31."""
    pos = tl.arange(0, BLOCK)
    if WIDE:
        pos = pos.to(tl.int64)
    return pos


@triton.jit
def step_of(code, VEC: tl.constexpr, WIDE: tl.constexpr = True):
    """A stride in elements. Strides travel in units of VEC, so the product shows the compiler its alignment."""
    return wide_if(plain(code), WIDE) * (VEC if VEC > 0 else 1)


@triton.jit
def head_offset(b, h, strides, sizes, VEC: tl.constexpr, WIDE: tl.constexpr = True):
    """Elements from the tensor's start to head ``h`` of batch item ``b``; strides: ``(*batch, head, row, column)``."""
    NB: tl.constexpr = len(sizes)
    offset = wide_if(h, WIDE) * step_of(strides[NB], VEC, WIDE)
    rest = b
    for i in tl.static_range(NB):
        if i + 1 < NB:
            offset += wide_if(rest % plain(sizes[NB - 1 - i]), WIDE) * step_of(strides[NB - 1 - i], VEC, WIDE)
            rest = rest // plain(sizes[NB - 1 - i])
        else:
            offset += wide_if(rest, WIDE) * step_of(strides[0], VEC, WIDE)
    return offset


@triton.jit
def shifted(start, length, BLOCK: tl.constexpr, SHORT: tl.constexpr):
    """Where the tile at ``start`` is really read: the last one moves back so that it ends with the sequence.

    No load in a loop then needs a mask. Positions before ``start`` belong to the tile before and must not count twice
    (``owned``). SHORT: the whole sequence is shorter than a tile.
    """
    if SHORT:
        return start
    else:
        return tl.minimum(start, length - BLOCK)


@triton.jit
def shifted_keys(start, length, BLOCK: tl.constexpr, SHORT: tl.constexpr, EVEN: tl.constexpr):
    """``shifted`` along the axis that bias rows are contiguous in; EVEN: the length is a multiple of 8."""
    at = shifted(start, length, BLOCK, SHORT)
    if EVEN:
        at = tl.multiple_of(at, 8)
    return at


@triton.jit
def owned(at, start, positions, length, SHORT: tl.constexpr):
    """Which positions ``at + positions`` count, for a tile at ``start`` that is read at ``at = shifted(start)``."""
    if SHORT:
        return at + positions < length
    else:
        return at + positions >= start


@triton.jit
def inside(positions, length, SHORT: tl.constexpr):
    """Rows to read: with SHORT those past the end become the last row, read twice and then ignored."""
    if SHORT:
        return tl.minimum(positions, length - 1)
    else:
        return positions


@triton.jit
def row_pointers(base, start, rows, strides, BLOCK_W: tl.constexpr, VEC: tl.constexpr, WIDE: tl.constexpr):
    """Pointers of the rows ``start + rows`` of one head: ``[rows, BLOCK_W]``."""
    NB: tl.constexpr = len(strides) - 3
    row = step_of(strides[NB + 1], VEC, WIDE)
    if VEC > 0:
        offsets = rows[:, None] * row + tl.arange(0, BLOCK_W)[None, :]
    else:
        offsets = rows[:, None] * row + local(BLOCK_W, WIDE)[None, :] * plain(strides[NB + 2])
    return (base + wide_if(start, WIDE) * row) + offsets  # one addition a pointer in a loop: the offsets stay


@triton.jit
def load_rows(
    base, start, rows, strides, WIDTH: tl.constexpr, BLOCK_W: tl.constexpr, VEC: tl.constexpr, WIDE: tl.constexpr
):
    """Rows of one head, ``[rows, BLOCK_W]``; zero past WIDTH."""
    pointers = row_pointers(base, start, rows, strides, BLOCK_W, VEC, WIDE)
    if WIDTH < BLOCK_W:
        return tl.load(pointers, mask=(tl.arange(0, BLOCK_W) < WIDTH)[None, :], other=0.0)
    else:
        return tl.load(pointers)


@triton.jit
def load_seen_rows(
    base, start, rows, strides, seen, WIDTH: tl.constexpr, BLOCK_W: tl.constexpr, VEC: tl.constexpr, WIDE: tl.constexpr
):
    """``load_rows``, zero where ``seen [rows]`` is False: what is stored there is never read."""
    pointers = row_pointers(base, start, rows, strides, BLOCK_W, VEC, WIDE)
    return tl.load(pointers, mask=seen[:, None] & (tl.arange(0, BLOCK_W) < WIDTH)[None, :], other=0.0)


@triton.jit
def store_rows(
    base,
    start,
    rows,
    strides,
    row_in,
    tile,
    WIDTH: tl.constexpr,
    BLOCK_W: tl.constexpr,
    VEC: tl.constexpr,
    WIDE: tl.constexpr,
):
    """The counterpart of ``load_rows``, masked; rounds to the tensor's dtype."""
    pointers = row_pointers(base, start, rows, strides, BLOCK_W, VEC, WIDE)
    mask = row_in[:, None] & (tl.arange(0, BLOCK_W) < WIDTH)[None, :]
    tl.store(pointers, tile.to(base.dtype.element_ty), mask=mask)
