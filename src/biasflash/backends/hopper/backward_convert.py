"""Float32 sums of the one-pass backward -> dq in 16 bits."""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["dq_b0", "dq_b1", "dq_h", "dq_m", "inner", "heads", "M", "width"])
def convert_kernel(
    sum_ptr, dq_ptr, dq_b0, dq_b1, dq_h, dq_m, inner, heads, M, width, scale,
    D_BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """dq ``[b0, b1, heads, M, width]`` = scale sum ``[batch heads, M, D_BLOCK]``; strides of dq are multiples of 8.

    Grid: one program per ROWS queries (fastest), batch item and head.
    """
    tiles = tl.cdiv(M, ROWS)
    line = tl.program_id(0) // tiles
    h = line % heads
    b = line // heads
    rows = tl.program_id(0) % tiles * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, D_BLOCK)
    source = sum_ptr + line.to(tl.int64) * M * D_BLOCK
    at = rows[:, None] * D_BLOCK + columns[None, :]
    x = tl.load(source + at, mask=(rows < M)[:, None], other=0.0, eviction_policy="evict_first")
    y = (x * scale).to(dq_ptr.dtype.element_ty)
    # Eight columns are one store of 16 bytes if the compiler knows that rows start at whole eights, and that a mask is
    # the same for all of them; otherwise it stores one by one, which takes three times as long.
    start = (b // inner).to(tl.int64) * dq_b0 + (b % inner).to(tl.int64) * dq_b1 + h.to(tl.int64) * dq_h
    eights = start // 8 + rows.to(tl.int64) * (dq_m // 8)
    target = dq_ptr + eights[:, None] * 8 + columns[None, :]
    group = columns // 8
    tl.store(target, y, mask=(rows < M)[:, None] & (group < width // 8)[None, :])
    if width % 8 != 0:
        rest = (group == width // 8) & (columns < width)
        tl.store(target, y, mask=(rows < M)[:, None] & rest[None, :])
