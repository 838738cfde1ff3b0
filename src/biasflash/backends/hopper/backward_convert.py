"""Float32 sums of the one-pass backward -> dq in 16 bits."""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["inner", "heads", "M", "width"])
def convert_kernel(
    sum_ptr, dq_ptr, dq_b0, dq_b1, dq_h, dq_m, inner, heads, M, width, scale,
    D_BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """dq ``[b0, b1, heads, M, width]`` = scale sum ``[batch heads, M, D_BLOCK]``.

    Grid: one program per ROWS queries (fastest), batch item and head.
    """
    tiles = tl.cdiv(M, ROWS)
    line = tl.program_id(0) // tiles
    h = line % heads
    b = line // heads
    rows = tl.program_id(0) % tiles * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, D_BLOCK)
    target = dq_ptr + (b // inner).to(tl.int64) * dq_b0 + (b % inner).to(tl.int64) * dq_b1 + h.to(tl.int64) * dq_h
    source = sum_ptr + line.to(tl.int64) * M * D_BLOCK
    x = tl.load(source + rows[:, None] * D_BLOCK + columns[None, :], mask=(rows < M)[:, None], other=0.0)
    here = (rows < M)[:, None] & (columns < width)[None, :]
    at = rows.to(tl.int64)[:, None] * dq_m + columns[None, :]
    tl.store(target + at, (x * scale).to(dq_ptr.dtype.element_ty), mask=here)
