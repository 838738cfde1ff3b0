"""A bias copied to rows of whole 16 bytes, which bulk copies can read."""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["bias_b0", "bias_b1", "bias_h", "bias_m", "bias_n", "n1", "heads", "M", "N", "pitch"])
def align_rows_kernel(
    bias_ptr, aligned_ptr, bias_b0, bias_b1, bias_h, bias_m, bias_n, n1, heads, M, N, pitch,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """``aligned[b0, n1, heads, M, pitch]`` = bias ``[b0, b1, head, M, N]`` of any strides; past N nothing is written.

    The axes are those that the bias varies along; along the others they have size 1. ``aligned_ptr`` is scratch of
    another type. Grid: cdiv(M, ROWS) programs (fastest) for each plane.
    """
    tiles = tl.cdiv(M, ROWS)
    plane = tl.program_id(0) // tiles
    head, b = plane % heads, plane // heads
    base = bias_ptr + (b // n1).to(tl.int64) * bias_b0 + (b % n1).to(tl.int64) * bias_b1 + head.to(tl.int64) * bias_h
    to = aligned_ptr.to(tl.pointer_type(bias_ptr.dtype.element_ty), bitcast=True) + plane.to(tl.int64) * M * pitch
    row = (tl.program_id(0) % tiles * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    for start in range(0, N, COLUMNS):
        column = start + tl.arange(0, COLUMNS)[None, :]
        inside = (row < M) & (column < N)
        x = tl.load(base + row * bias_m + column.to(tl.int64) * bias_n, mask=inside)
        tl.store(to + row * pitch + column, x, mask=inside)
