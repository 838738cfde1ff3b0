"""A mask of keys written down for the kernels of this package, once a pass: which are hidden, and what these hold."""

import triton
import triton.language as tl

from biasflash.tile.memory import wide

MARK = tl.constexpr(64)  # keys that one code is about
TILES = tl.constexpr(4)  # codes of the largest tile of keys that a kernel copies
UNIT = tl.constexpr(8)  # elements in the 16 bytes by which keys and values step: strides come in these, which shows it


@triton.jit(do_not_specialize=["mask_b0", "mask_b1", "mask_n", "lines_1", "N", "pitch"])
def mark_keys_kernel(
    mask_ptr, caps_ptr, spans_ptr, mask_b0, mask_b1, mask_n, lines_1, N, pitch, BLOCK: tl.constexpr
):  # fmt: skip
    """What each key's scores are cut to: float32 ``caps_ptr[lines, pitch]``, inf, or -inf where it is hidden or none.

    And float32 ``spans_ptr[lines, 1 + pitch // 64]``: first how many tiles of 64 keys there are up to the last visible
    one, then a code for each tile: 1.0 if no key of it is hidden; else 0.0 if ``mark_unfit_kernel`` looks at it, which
    may make that -1.0, and -1.0 if not. A tile behind the item's own last one is met where two items of different
    lengths go together. (A minimum with inf or -inf is one instruction, which also takes NaN to -inf.)

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
        end = tl.maximum(end, tl.max(tl.where(keep, key // MARK + 1, 0), 0))
    tl.store(spans_ptr, end.to(tl.float32))
    looked_at = tl.cdiv(tl.maximum(end, 1), TILES) * TILES
    for start in range(0, pitch, BLOCK):
        key = start + tl.arange(0, BLOCK)
        keep = tl.load(mask_ptr + key.to(tl.int64) * mask_n, mask=key < N, other=1) != 0
        whole = tl.min(tl.reshape(keep.to(tl.int32), [BLOCK // MARK, MARK]), 1)
        tile = start // MARK + tl.arange(0, BLOCK // MARK)
        code = tl.where(whole != 0, 1.0, tl.where(tile < looked_at, 0.0, -1.0))
        tl.store(spans_ptr + 1 + tile, code, mask=tile < pitch // MARK)


#: Of an entry of a key or value: a weight of 0 times anything up to it is 0, and score gradients are 0, too, because
#: products with up to 2^80 stay finite. What models leave in padding is below it, what memory holds by chance need not.
LARGEST = tl.constexpr(2.0**40)


@triton.jit
def plane(ptr, b0, b1, h, step_0, step_1, step_h):
    """Where a head begins."""
    return ptr + (b0 * step_0 + b1 * step_1 + h * step_h) * UNIT


@triton.jit
def holds_unfit(base, row_step, hidden, WIDTH: tl.constexpr):
    """Whether one of the MARK rows from ``base`` on that are ``hidden`` holds NaN, inf, or more than LARGEST."""
    COLUMNS: tl.constexpr = 32  # at a time: 16 values of a thread
    rows = base + tl.arange(0, MARK).to(tl.int64)[:, None] * row_step * UNIT
    found = 0
    for at in range(0, WIDTH, COLUMNS):
        column = at + tl.arange(0, COLUMNS)[None, :]
        x = tl.load(rows + column, mask=hidden[:, None] & (column < WIDTH), other=0.0).to(tl.float32)
        fit = tl.abs(x) <= LARGEST  # false of NaN
        found = tl.maximum(found, tl.max(tl.max(1 - fit.to(tl.int32), 1), 0))
    return found > 0


@triton.jit(do_not_specialize=["k_b0", "k_b1", "k_h", "k_n", "v_b0", "v_b1", "v_h", "v_n", "line_0", "line_1", "n1",
                               "heads", "N", "pitch"])  # fmt: skip
def mark_unfit_kernel(
    k_ptr, v_ptr, caps_ptr, spans_ptr, k_b0, k_b1, k_h, k_n, v_b0, v_b1, v_h, v_n, line_0, line_1, n1, heads, N, pitch,
    D: tl.constexpr, DV: tl.constexpr,
):  # fmt: skip
    """Code -1.0 for tiles of 64 keys of which a hidden one holds what 0 does not make 0, in any head of any batch item.

    Only these are made 0 where they lie in shared memory (``marks.blank_hidden``), which takes longer than the tile's
    products. Reads hidden keys and values as far as kernels may copy them: up to the end of the largest tile around the
    last visible key, the first one if there is none. Several programs may write one code, all of them -1.0.

    Grid: one program per TILES tiles of keys (fastest), key head, batch item; item ``(b0, b1)`` has line
    ``b0 * line_0 + b1 * line_1``. The last axis of k and v is dense, their strides along others are in steps of UNIT.
    """
    groups = tl.cdiv(N, MARK * TILES)
    group = tl.program_id(0) % groups
    h = (tl.program_id(0) // groups % heads).to(tl.int64)
    b = tl.program_id(0) // groups // heads
    b0, b1 = (b // n1).to(tl.int64), (b % n1).to(tl.int64)
    line = b0 * line_0 + b1 * line_1
    caps_ptr += line * pitch
    spans_ptr += line * (pitch // MARK + 1)
    first = group * TILES
    last = tl.maximum(tl.load(spans_ptr).to(tl.int32), 1)
    for tile in range(first, tl.where(first < last, first + TILES, first)):
        if tl.load(spans_ptr + 1 + tile) < 1.0:
            key = tile * MARK + tl.arange(0, MARK)
            hidden = (tl.load(caps_ptr + key) < 0.0) & (key < N)
            at = wide(tile) * MARK
            k = plane(k_ptr, b0, b1, h, k_b0, k_b1, k_h) + at * k_n * UNIT
            v = plane(v_ptr, b0, b1, h, v_b0, v_b1, v_h) + at * v_n * UNIT
            if holds_unfit(k, k_n, hidden, D) | holds_unfit(v, v_n, hidden, DV):
                tl.store(spans_ptr + 1 + tile, -1.0)
