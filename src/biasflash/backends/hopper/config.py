"""Tile choice on Hopper as data with reasons; the first row that covers a problem is taken.

Registers: two consumer warpgroups get 240 each, the copying warp 24; three get 160 and 32. Figures without another word
are medians on an H200 (bf16, Triton 3.6). Tiles beside a float32 bias are in ``config_float32``.
"""

from __future__ import annotations

from collections.abc import Sequence

from biasflash.backends.hopper.config_kinds import (
    BackwardTile,
    ForwardTile,
    OwnerTile,
    PairTile,
    SharedTile,
    SingleTile,
    backward_row,
    forward_row,
    shared_row,
)


def _single(width: int, counts: tuple[int, ...], why: str, early: bool = False, **more: bool) -> SingleTile:
    """In turns. ``counts``: tiles, buffers of what stays, stages, of a bias, slots of ds and of dq.

    ``early``: operands that stay are kept in registers, and dk's product comes first.
    """
    tiles, a_buffers, stages, bias_stages, ds_slots, dq_slots = counts
    return SingleTile(
        width=width,
        resident=False,
        tiles=tiles,
        a_buffers=a_buffers,
        stages=stages,
        bias_stages=bias_stages,
        ds_slots=ds_slots,
        dq_slots=dq_slots,
        in_registers=early,
        dk_first=early,
        why=why,
        **more,
    )


def _pair(width: int, chunks_n: int, box: int, stages: int, rows: int, left: bool, why: str) -> PairTile:
    return PairTile(width=width, block_n=32, chunks_n=chunks_n, box=box, stages=stages, rows=rows, left=left, why=why)


CONSUMER_REGISTERS = {2: 240, 3: 160}
PRODUCER_REGISTERS = {2: 24, 3: 32}

FORWARD: tuple[ForwardTile, ...] = (
    forward_row(32, False, 3, 128, 4, 1, "three warpgroups take turns"),
    forward_row(32, True, 2, 128, 4, 2, "three warpgroups spill"),
    forward_row(64, False, 2, 128, 3, 1, "4 x 32 heads of 4k: 0.633 ms; three warpgroups spill", is_causal=True),
    forward_row(
        64, False, 3, 128, 3, 1, "4 x 32 heads of 4k: 1.11 ms, out of turn 1.14, two warpgroups 1.27", in_turns=True
    ),
    forward_row(64, True, 2, 128, 2, 3, "full bias 2k: 0.221 ms, three warpgroups take 0.237"),
    forward_row(128, False, 2, 128, 2, 1, "2 x 16 heads of 4k: 0.399 ms", out_apart=True),
    forward_row(128, True, 2, 128, 2, 2, "full bias 4k: 0.262 ms"),
    forward_row(
        192,
        False,
        2,
        128,
        2,
        1,
        "2 x 16 heads of 4k, causal: 0.256 ms, padded to 256 0.306",
        width_v=128,
        pieces=3,
        out_apart=True,
        out_pieces=2,
    ),
    forward_row(192, False, 2, 64, 2, 1, "values are padded", pieces=3, out_apart=True, out_pieces=2, pinned=False),
    forward_row(256, False, 2, 64, 2, 1, "2 x 16 heads of 4k, D 256: 0.731 ms", pinned=False),
    forward_row(256, True, 2, 64, 2, 2, "230 KB"),
)
SHARED: tuple[SharedTile, ...] = (
    shared_row(
        32,
        2,
        128,
        5,
        2,
        False,
        "512 x 4 heads of 512: 0.339 ms, out of turn 0.346, with a running maximum 0.383",
        fixed=True,
        in_turns=True,
    ),
    shared_row(64, 2, 128, 3, 2, False, "4 x 16 heads of 4k: 0.406 ms", fixed=True, is_causal=True),
    shared_row(64, 2, 64, 5, 3, True, "768 x 4 heads of 768: 1.22 ms, tiles of 128 keys take 1.31", fixed=True),
    shared_row(32, 2, 128, 5, 2, False, "512 x 4 heads of 512: 0.383 ms, 4 items x 64 keys take 0.479"),
    shared_row(64, 2, 64, 5, 3, True, "768 x 4 heads of 768: 1.43 ms, tiles of 128 keys take 1.64"),
)
BACKWARD: tuple[BackwardTile, ...] = (
    # ------------------------------------------------------------------------------------------------------- dq
    backward_row("dq", 32, True, 128, (2, 1, 2, 4, 2), False, False, "two items read one bias tile"),
    backward_row("dq", 32, True, 64, (1, 2, 2, 6, 3), True, False, "185 registers, no spills"),
    backward_row("dq", 32, False, 64, (1, 2, 2, 6, 1), True, False, "169 registers, no spills"),
    backward_row("dq", 64, True, 64, (2, 1, 1, 5, 3), False, True, "two items read one bias tile"),
    backward_row("dq", 64, True, 64, (1, 2, 2, 5, 3), True, False, "200 registers, no spills"),
    backward_row("dq", 64, False, 64, (1, 2, 2, 5, 1), True, False, "186 registers, no spills"),
    backward_row("dq", 128, True, 64, (1, 2, 1, 3, 3), True, False, "215 KB"),
    backward_row("dq", 128, False, 64, (1, 2, 1, 4, 1), True, False, "227 registers, no spills"),
    # ----------------------------------------------------------------------------------------------------- dkdv
    backward_row(
        "dkdv",
        32,
        True,
        64,
        (2, 1, 2, 6, 3),
        False,
        True,
        "two items read one bias tile; references late, backward of 512 x 4 heads of 512 takes 0.967 ms, not 0.961",
        reference_first=True,
    ),
    backward_row("dkdv", 32, True, 64, (1, 2, 2, 6, 3), True, False, "216 registers, no spills"),
    backward_row("dkdv", 32, False, 64, (1, 2, 2, 6, 1), True, False, "210 registers, no spills"),
    backward_row("dkdv", 64, True, 64, (1, 2, 2, 5, 3), True, False, "200 KB", stores=False),
    backward_row("dkdv", 64, True, 64, (1, 2, 1, 4, 3), True, False, "183 KB with room for score gradients"),
    backward_row("dkdv", 64, False, 64, (1, 2, 2, 5, 1), True, False, "4 x 32 heads of 4k, causal: 1.02 ms"),
    backward_row("dkdv", 128, True, 64, (1, 1, 1, 2, 2), False, False, "198 KB with room for score gradients"),
    backward_row(
        "dkdv",
        128,
        False,
        64,
        (1, 1, 1, 4, 1),
        False,
        False,
        "199 KB; backward of 2 x 32 / 8 causal heads of 8k: 5.79 ms, references late 5.92",
        reference_first=True,
    ),
)
OWNER: tuple[OwnerTile, ...] = (
    OwnerTile(width=32, block_n=32, chunks_n=8, stages=3, deep=1, why="512 x 4 heads of 512: 0.245 ms"),
    OwnerTile(
        width=64,
        block_n=128,
        chunks_n=1,
        stages=2,
        deep=2,
        why="16 x 12 heads of 1k: 0.137 ms",
    ),
    OwnerTile(
        width=128,
        block_n=64,
        chunks_n=2,
        stages=2,
        deep=0,
        parts=2,
        why="4 x 8 heads of 2k: 0.181 ms",
    ),
)
PAIR: tuple[PairTile, ...] = (
    _pair(32, 4, 128, 4, 1, True, "no spills, 216 KB"),
    _pair(32, 6, 64, 2, 2, True, "no spills"),
    _pair(32, 8, 256, 2, 1, True, "512 x 4 heads of 512: 0.483 ms, two kernels take 0.594"),
)
#: in one pass where a program takes all keys of a head: its float32 dq stays in the L2 cache
MOST_RESIDENT_KEYS = 1024
#: up to here dq goes with a shared bias's gradient instead (``PAIR``)
LEAST_RESIDENT_KEYS = 512
#: heads below which programs of whole heads leave too many of an H200's 132 multiprocessors idle in the last round
LEAST_LINES = 512
#: with a wider bias that items share two kernels win: 16 x 12 heads of 1k: 0.421 ms, one pass 0.438; with one whose
#: gradient is stored too: 4 x 16 heads of 2k: 0.559, one that also stores 0.697; D 128, 16 heads of 4k: 0.634, 0.978
SINGLE: tuple[SingleTile, ...] = (
    _single(64, (2, 1, 4, 1, 2, 4), "4 x 32 heads of 4k: 2.85 ms, two kernels take 3.35", early=True),
    _single(64, (2, 1, 4, 1, 2, 4), "4 x 32 heads of 4k: 1.60 ms, two kernels take 1.76", early=True, is_causal=True),
    _single(128, (1, 1, 2, 1, 2, 2), "2 x 16 heads of 4k: 1.30 ms, two kernels take 1.40"),
    _single(128, (1, 1, 2, 1, 2, 4), "1 x 16 heads of 16k: 4.93 ms, two kernels take 4.99", is_causal=True),
    SingleTile(
        width=32,
        has_bias=True,
        resident=True,
        tiles=2,
        a_buffers=2,
        stages=6,
        bias_stages=2,
        ds_slots=4,
        dq_slots=4,
        in_registers=True,
        dk_first=True,
        why="256 x 4 heads of 1k: 1.38 ms, two kernels take 1.41",
    ),
    _single(
        64,
        (2, 1, 3, 2, 2, 4),
        "4 x 16 heads of 2k, fixed bias: 0.532 ms, two kernels take 0.550; D 32: 0.435, 0.476",
        early=True,
        has_bias=True,
    ),
)


def single_tile(
    width: int, keys: int, lines: int, has_bias: bool, is_shared: bool, is_causal: bool
) -> SingleTile | None:
    """``lines``: batch items times key heads; ``is_shared``: a bias is (trained, or several items stand around it)."""
    for tile in SINGLE:
        if width > tile.width or has_bias != tile.has_bias or is_causal != tile.is_causal:
            continue
        if tile.resident and LEAST_RESIDENT_KEYS < keys <= MOST_RESIDENT_KEYS and lines >= LEAST_LINES:
            return tile
        if not tile.resident and not is_shared:
            return tile
    return None


def pair_tile(width: int, keys: int) -> PairTile | None:
    return next((tile for tile in PAIR if width <= tile.width and keys <= tile.most_keys), None)


def odd_arguments(kernel: str, width: int) -> dict[str, int]:
    """Of kernels with four warps that put the rows of a bias in order, rows that are not in steps of 16 bytes.

    Stages of bias tiles in order and of raw ones: what fits in 227 KB. Registers: four warpgroups have 512 together.
    """
    is_forward = kernel == "forward"
    stages, raw = (2, 2) if width <= 64 else (1, 1) if is_forward else (2, 1)
    consumer, producer, helper = (208, 40, 56) if is_forward else (224, 24, 40)
    return {
        "BIAS_STAGES": stages,
        "RAW_STAGES": raw,
        "CONSUMER_REGISTERS": consumer,
        "PRODUCER_REGISTERS": producer,
        "HELPER_REGISTERS": helper,
    }


def padded(width: int) -> int:
    """Columns of a block that holds a head width: 32, 64, 128 or 256; copies fill it up with zeros."""
    return next(w for w in (32, 64, 128, 256) if width <= w)


def forward_tile(
    width: int, width_v: int, has_bias: bool, is_causal: bool, rows: Sequence[ForwardTile] = FORWARD
) -> ForwardTile | None:
    for tile in rows:
        fits = 64 * (tile.pieces - 1) < width <= tile.width and width_v <= (tile.width_v or tile.width)
        if fits and tile.has_bias == has_bias and tile.is_causal in (None, is_causal):
            return tile
    return None


def shared_tile(width: int, may_fix: bool, is_causal: bool, rows: Sequence[SharedTile] = SHARED) -> SharedTile | None:
    """``may_fix``: weights have the exponents of float32, so that rows need not follow their maximum."""
    for tile in rows:
        if width <= tile.width and (may_fix or not tile.fixed) and (is_causal or not tile.is_causal):
            return tile
    return None


def backward_tile(
    kernel: str, width: int, has_bias: bool, is_shared: bool, stores: bool, rows: Sequence[BackwardTile] = BACKWARD
) -> BackwardTile | None:
    """``is_shared``: several batch items may stand around one bias tile; ``stores``: score gradients are stored."""
    for tile in rows:
        fits = tile.kernel == kernel and width <= tile.width and tile.has_bias == has_bias
        if fits and (is_shared or tile.rows == 1) and (tile.stores or not stores):
            return tile
    return None


def owner_tile(width: int, rows: Sequence[OwnerTile] = OWNER) -> OwnerTile | None:
    return next((tile for tile in rows if width <= tile.width), None)
