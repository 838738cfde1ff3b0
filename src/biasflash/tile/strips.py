"""Rows in strips: head widths that are not powers of two, as a tuple of tiles whose widths are.

A width of 96 is held in strips of 64 and 32 columns: arithmetic, registers and shared memory are those of 96 columns,
not of 128. STRIPS are the widths of the strips, one or two of them; only the last may reach past WIDTH, and is zero
there. With one strip the compiler sees what it would see without this file.
"""

import triton
import triton.language as tl

from biasflash.tile.memory import load_rows, load_seen_rows, plain, row_pointers, store_rows, wide_if
from biasflash.tile.products import operand


@triton.jit
def strip_base(base, strides, AT: tl.constexpr, VEC: tl.constexpr, WIDE: tl.constexpr):
    """``base`` of one head moved to column AT. Strips begin at multiples of 16 elements: aligned rows stay aligned."""
    NB: tl.constexpr = len(strides) - 3
    if AT == 0:
        return base
    elif VEC > 0:
        return base + AT
    else:
        return base + wide_if(plain(strides[NB + 2]), WIDE) * AT


@triton.jit
def load_strips(
    base, start, rows, strides, WIDTH: tl.constexpr, STRIPS: tl.constexpr, VEC: tl.constexpr, WIDE: tl.constexpr
):
    """Rows of one head, a tuple of ``[rows, strip]``."""
    strips = ()
    for i in tl.static_range(len(STRIPS)):
        at = strip_base(base, strides, STRIPS[0] if i else 0, VEC, WIDE)
        strip = load_rows(at, start, rows, strides, WIDTH - STRIPS[0] if i else WIDTH, STRIPS[i], VEC, WIDE)
        strips = strips + (strip,)  # noqa: RUF005
    return strips


@triton.jit
def load_seen_strips(
    base, start, rows, strides, seen, WIDTH: tl.constexpr, STRIPS: tl.constexpr, VEC: tl.constexpr, WIDE: tl.constexpr
):
    """``load_strips``, zero where ``seen [rows]`` is False: what is stored there is never read."""
    strips = ()
    for i in tl.static_range(len(STRIPS)):
        at = strip_base(base, strides, STRIPS[0] if i else 0, VEC, WIDE)
        strip = load_seen_rows(at, start, rows, strides, seen, WIDTH - STRIPS[0] if i else WIDTH, STRIPS[i], VEC, WIDE)
        strips = strips + (strip,)  # noqa: RUF005
    return strips


@triton.jit
def store_strips(
    base, start, rows, strides, row_in, strips, WIDTH: tl.constexpr, STRIPS: tl.constexpr, VEC: tl.constexpr,
    WIDE: tl.constexpr,
):  # fmt: skip
    """The counterpart of ``load_strips``, masked; rounds to the tensor's dtype."""
    for i in tl.static_range(len(STRIPS)):
        at = strip_base(base, strides, STRIPS[0] if i else 0, VEC, WIDE)
        store_rows(at, start, rows, strides, row_in, strips[i], WIDTH - STRIPS[0] if i else WIDTH, STRIPS[i], VEC, WIDE)


@triton.jit
def zeros(ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """A function of its own: only an argument turns an entry of a tuple of constants into a constant for a shape."""
    return tl.zeros([ROWS, WIDTH], tl.float32)


@triton.jit
def zero_strips(ROWS: tl.constexpr, STRIPS: tl.constexpr):
    """Accumulators, float32."""
    strips = ()
    for i in tl.static_range(len(STRIPS)):
        strips = strips + (zeros(ROWS, STRIPS[i]),)  # noqa: RUF005
    return strips


@triton.jit
def scale_strips(strips, factor):
    """Every strip times ``factor``."""
    scaled = ()
    for i in tl.static_range(len(strips)):
        scaled = scaled + (strips[i] * factor,)  # noqa: RUF005
    return scaled


@triton.jit
def dot_strips(a, b, PRECISION: tl.constexpr):
    """``a b^T`` over the whole width: ``[rows of a, rows of b]``, float32."""
    product = tl.dot(operand(a[0], PRECISION), tl.trans(operand(b[0], PRECISION)), input_precision=PRECISION)
    for i in tl.static_range(1, len(a)):
        left, right = operand(a[i], PRECISION), operand(b[i], PRECISION)
        product = tl.dot(left, tl.trans(right), product, input_precision=PRECISION)
    return product


@triton.jit
def load_columns(
    base, at, start, rows, strides, WIDTH: tl.constexpr, COLUMNS: tl.constexpr, VEC: tl.constexpr, WIDE: tl.constexpr
):
    """The columns ``at ... at + COLUMNS`` of rows of one head, ``[rows, COLUMNS]``; zero past WIDTH."""
    NB: tl.constexpr = len(strides) - 3
    if VEC > 0:
        base += at
    else:
        base += wide_if(plain(strides[NB + 2]), WIDE) * at
    pointers = row_pointers(base, start, rows, strides, COLUMNS, VEC, WIDE)
    if WIDTH % COLUMNS:
        return tl.load(pointers, mask=(at + tl.arange(0, COLUMNS) < WIDTH)[None, :], other=0.0)
    else:
        return tl.load(pointers)


@triton.jit
def dot_heads(
    a, a_base, a_start, a_rows, a_strides, b, b_base, b_start, b_rows, b_strides,
    WIDTH: tl.constexpr, COLUMNS: tl.constexpr, A_VEC: tl.constexpr, B_VEC: tl.constexpr, WIDE: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """``a b^T`` over the whole width of one head: ``[rows of a, rows of b]``, float32.

    COLUMNS: where operands of the whole width do not fit the registers, that many columns of both are read again and
    multiplied at a time, in a loop, from which the compiler cannot move them. 0: of the strips ``a`` and ``b``.
    """
    if COLUMNS:
        product = tl.zeros([a_rows.shape[0], b_rows.shape[0]], tl.float32)
        for at in tl.range(0, WIDTH, COLUMNS, num_stages=2):
            left = load_columns(a_base, at, a_start, a_rows, a_strides, WIDTH, COLUMNS, A_VEC, WIDE)
            right = load_columns(b_base, at, b_start, b_rows, b_strides, WIDTH, COLUMNS, B_VEC, WIDE)
            left, right = operand(left, PRECISION), operand(right, PRECISION)
            product = tl.dot(left, tl.trans(right), product, input_precision=PRECISION)
        return product
    else:
        return dot_strips(a, b, PRECISION)


@triton.jit
def add_dots(strips, weights, b, PRECISION: tl.constexpr):
    """``strips + weights b``, strip by strip; weights in the dtype of ``b``."""
    added = ()
    left = operand(weights, PRECISION)
    for i in tl.static_range(len(strips)):
        strip = tl.dot(left, operand(b[i], PRECISION), strips[i], input_precision=PRECISION)
        added = added + (strip,)  # noqa: RUF005
    return added


@triton.jit
def row_products(a, b):
    """``<a, b>`` of every row, float32."""
    total = tl.sum(a[0].to(tl.float32) * b[0].to(tl.float32), 1)
    for i in tl.static_range(1, len(a)):
        total += tl.sum(a[i].to(tl.float32) * b[i].to(tl.float32), 1)
    return total
