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
def local(BLOCK: tl.constexpr, WIDE: tl.constexpr):
    """Positions inside a tile; 64 bits where a stride times a tile side may pass 2^31."""
    pos = tl.arange(0, BLOCK)
    if WIDE:
        pos = pos.to(tl.int64)
    return pos


@triton.jit
def step_of(code, VEC: tl.constexpr):
    """A stride in elements. Strides travel in units of VEC, so the product shows the compiler its alignment."""
    return plain(code) * (VEC if VEC > 0 else 1)


@triton.jit
def head_offset(b, h, strides, sizes, VEC: tl.constexpr):
    """Elements from the tensor's start to head ``h`` of batch item ``b``; strides are ``(*batch, head, row, column)``."""
    NB: tl.constexpr = len(sizes)
    offset = wide(h) * step_of(strides[NB], VEC)
    rest = b
    for i in tl.static_range(NB):
        if i + 1 < NB:
            offset += wide(rest % plain(sizes[NB - 1 - i])) * step_of(strides[NB - 1 - i], VEC)
            rest = rest // plain(sizes[NB - 1 - i])
        else:
            offset += wide(rest) * step_of(strides[0], VEC)
    return offset


@triton.jit
def row_pointers(base, start, strides, BLOCK: tl.constexpr, BLOCK_W: tl.constexpr, VEC: tl.constexpr, WIDE: tl.constexpr):
    """Pointers of rows ``start .. start + BLOCK`` of one head: ``[BLOCK, BLOCK_W]``."""
    NB: tl.constexpr = len(strides) - 3
    row = step_of(strides[NB + 1], VEC)
    pointers = base + wide(start) * row + local(BLOCK, WIDE)[:, None] * row
    if VEC > 0:
        pointers += tl.arange(0, BLOCK_W)[None, :]
    else:
        pointers += local(BLOCK_W, WIDE)[None, :] * plain(strides[NB + 2])
    return pointers


@triton.jit
def load_rows(
    base,
    start,
    strides,
    row_in,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_W: tl.constexpr,
    VEC: tl.constexpr,
    WIDE: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Rows of one head, ``[BLOCK, BLOCK_W]``; zero where ``row_in [BLOCK]`` is False (read only if MASKED) or past WIDTH."""
    pointers = row_pointers(base, start, strides, BLOCK, BLOCK_W, VEC, WIDE)
    if MASKED and WIDTH < BLOCK_W:
        return tl.load(pointers, mask=row_in[:, None] & (tl.arange(0, BLOCK_W) < WIDTH)[None, :], other=0.0)
    elif MASKED:
        return tl.load(pointers, mask=row_in[:, None], other=0.0)
    elif WIDTH < BLOCK_W:
        return tl.load(pointers, mask=(tl.arange(0, BLOCK_W) < WIDTH)[None, :], other=0.0)
    else:
        return tl.load(pointers)


@triton.jit
def store_rows(
    base,
    start,
    strides,
    row_in,
    tile,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_W: tl.constexpr,
    VEC: tl.constexpr,
    WIDE: tl.constexpr,
):
    """The counterpart of ``load_rows``, always masked; rounds to the tensor's dtype."""
    pointers = row_pointers(base, start, strides, BLOCK, BLOCK_W, VEC, WIDE)
    tl.store(
        pointers,
        tile.to(base.dtype.element_ty),
        mask=row_in[:, None] & (tl.arange(0, BLOCK_W) < WIDTH)[None, :],
    )
