"""A mask of keys written down for the kernels of this package, once a pass."""

import triton
import triton.language as tl

MARK = tl.constexpr(64)  # keys that one code is about


@triton.jit(do_not_specialize=["mask_b0", "mask_b1", "mask_n", "lines_1", "N", "pitch"])
def mark_keys_kernel(
    mask_ptr, caps_ptr, spans_ptr, mask_b0, mask_b1, mask_n, lines_1, N, pitch, BLOCK: tl.constexpr
):  # fmt: skip
    """What each key's scores are cut to: float32 ``caps_ptr[lines, pitch]``, inf, or -inf where it is hidden or none.

    And float32 ``spans_ptr[lines, 1 + pitch // 64]``: first how many tiles of 64 keys there are up to the last visible
    one, then a code for each tile: 1.0 if no key of it is hidden, else 0.0. (A minimum with inf or -inf is one
    instruction, which also takes NaN to -inf.)

    Grid: lines; ``lines_1`` of them for each index of the first batch axis. ``pitch`` is a multiple of 64.
    """
    line = tl.program_id(0)
    b0, b1 = (line // lines_1).to(tl.int64), (line % lines_1).to(tl.int64)
    mask_ptr += b0 * mask_b0 + b1 * mask_b1
    caps_ptr += line.to(tl.int64) * pitch
    spans_ptr += line.to(tl.int64) * (pitch // MARK + 1)
    end = 0
    for start in range(0, pitch, BLOCK):
        key = start + tl.arange(0, BLOCK)
        keep = tl.load(mask_ptr + key.to(tl.int64) * mask_n, mask=key < N, other=0) != 0
        tl.store(caps_ptr + key, tl.where(keep, float("inf"), float("-inf")), mask=key < pitch)
        tile = start // MARK + tl.arange(0, BLOCK // MARK)
        seen = tl.max(tl.reshape(keep.to(tl.int32), [BLOCK // MARK, MARK]), 1)
        whole = tl.min(tl.reshape((keep | (key >= N)).to(tl.int32), [BLOCK // MARK, MARK]), 1)
        tl.store(spans_ptr + 1 + tile, whole.to(tl.float32), mask=tile < pitch // MARK)
        end = tl.maximum(end, tl.max(seen * (tile + 1), 0))
    tl.store(spans_ptr, end.to(tl.float32))
