"""Pieces of the backward passes of wide heads: rings of column pieces, products over pieces, items and arithmetic.

A head width is COUNT pieces of PIECE columns: tensor sides are powers of two, and 192 columns are three pieces of 64. A
slot of a ring holds GROUP pieces, so that half a tile can be copied in while the other half is in use.
"""

from dataclasses import make_dataclass
from typing import Any

from triton import constexpr_function

from biasflash.backends.hopper.deal import locate
from biasflash.backends.hopper.gluon import (
    fence_async_shared,
    gl,
    jit,
    mbarrier,
    store_wait,
    tma_load,
    tma_store,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from biasflash.backends.hopper.pieces import NEG_INF, added, slots
from biasflash.backends.hopper.pipeline import at, hand_back, ring_barriers, start_ring, wait_empty, wait_full
from biasflash.tile.span import key_span, query_span

ROWS = gl.constexpr(64)  # of a tile, owned or met

Side: Any = make_dataclass("Side", ["COUNT", "GROUP", "SLOTS", "USES", "LINES", "X"], frozen=True)
NAMES = [
    "IS_CAUSAL", "ORDER", "BLOCK_M", "D_BLOCK", "DV_BLOCK", "PIECE", "FIRST", "SECOND", "OWN_1", "OWN_2", "S", "P",
    "OWN", "DTYPE",
]  # fmt: skip
Form: Any = make_dataclass("Form", NAMES, frozen=True)


@constexpr_function
def form(
    is_causal: Any, order: Any, own: Any, piece: Any, count_1: Any, group_1: Any, slots_1: Any, count_2: Any,
    group_2: Any, slots_2: Any, own_slots: Any, dtype: Any,
) -> Any:  # fmt: skip
    """Constants of a kernel. FIRST: of q and k (width D), SECOND: of v and dout (width Dv); OWN_*: tiles that stay.

    A side has COUNT pieces in a tile, GROUP in a slot, SLOTS slots in its ring, USES slots for a tile, and row
    statistics of LINES tiles: one of them is free when the tile's first slot is. S, X, P, OWN: layouts of scores,
    of a sum of one piece, of the left operand that goes into that, and of one that goes into scores.
    """
    s, x = (gl.NVMMADistributedLayout([3, 0], [4, 1], [16, n, 16]) for n in (64, piece))
    p, left = (gl.DotOperandLayout(operand_index=0, parent=acc, k_width=2) for acc in (x, s))
    counts = ((count_1, group_1, slots_1), (count_2, group_2, slots_2))
    counts += ((count_1, count_1, own_slots), (count_2, count_2, own_slots))
    uses = [n // group for n, group, _ in counts]
    lines = [-(-slots // n) for (_, _, slots), n in zip(counts, uses, strict=True)]
    sides = [
        Side(*(gl.constexpr(v) for v in (*count, n, line, x)))
        for count, n, line in zip(counts, uses, lines, strict=True)
    ]
    plain = (is_causal, order, own, piece * count_1, piece * count_2, piece, *sides, s, p, left, dtype)
    return Form(*(gl.constexpr(v) for v in plain))


@jit
def own_keys(lot, turn, dealt, extent, numbers, FORM: gl.constexpr):
    """Item of dk and dv -> (key head, batch item, first key, first query, query tiles, those of them to mask).

    At least one tile: queries past the end weigh nothing and write zeros.
    """
    _, _, M, N, _, _, _, shift = numbers
    tile, b, h = locate(lot, turn, dealt, extent, FORM)
    if FORM.IS_CAUSAL:  # the last queries have most to do, but the first keys
        tile = gl.cdiv(N, FORM.BLOCK_M) - 1 - tile
    own = tile * FORM.BLOCK_M
    start, full_start = query_span(own, M, shift, ROWS, FORM.BLOCK_M, FORM.IS_CAUSAL)
    tiles = gl.maximum(gl.cdiv(M - start, ROWS), 1)
    return h, b, own, start, tiles, gl.minimum((full_start - start) // ROWS, tiles)


@jit
def own_queries(lot, turn, dealt, extent, numbers, FORM: gl.constexpr):
    """Item of dq -> (head, batch item, first query, first key of the last tile, key tiles, those of them to mask).

    Keys are walked from the last tile down. At least one tile, all hidden, to write zeros.
    """
    _, _, M, N, _, _, _, shift = numbers
    tile, b, h = locate(lot, turn, dealt, extent, FORM)
    own = tile * FORM.BLOCK_M
    full_end, end = key_span(own, M, N, shift, FORM.BLOCK_M, ROWS, FORM.IS_CAUSAL)
    tiles = gl.maximum(gl.cdiv(end, ROWS), 1)
    return h, b, own, (tiles - 1) * ROWS, tiles, tiles - full_end // ROWS


@jit
def piece_ring(desc, SIDE: gl.constexpr, READERS: gl.constexpr):
    """(pieces, full, empty) of a ring; a fence must follow."""
    tiles = slots(desc, SIDE.SLOTS * SIDE.GROUP)
    full, empty = ring_barriers(SIDE.SLOTS), ring_barriers(SIDE.SLOTS)
    start_ring(full, empty, SIDE.SLOTS, READERS)
    return tiles, full, empty


@jit
def piece_of(ring, tile, c: gl.constexpr, SIDE: gl.constexpr, FORM: gl.constexpr):
    """Piece ``c`` of a tile: the ``tile``-th use of the ring."""
    slot = (tile * SIDE.USES + c // SIDE.GROUP) % SIDE.SLOTS
    return ring[0].index(slot * SIDE.GROUP + c % SIDE.GROUP).reshape([ROWS, FORM.PIECE])


@jit
def copy_tile(desc, moves, b, inner, h, row, ring, tile, lines, SIDE: gl.constexpr, FORM: gl.constexpr):
    """The copying warp: 64 rows from ``row`` on into their slots.

    ``lines``: nothing, or what comes along: descriptors of row statistics, their shared tiles and their line.
    """
    b0 = b // inner
    b1 = b - b0 * inner
    tiles, full, empty = ring
    row_bytes: gl.constexpr = 2 * lines[0][0].block_type.nbytes if len(lines) > 0 else 0
    for n in gl.static_range(SIDE.USES):
        use = tile * SIDE.USES + n
        wait_empty(empty, use, SIDE.SLOTS)
        slot = use % SIDE.SLOTS
        bar = full.index(slot)
        mbarrier.expect(bar, SIDE.GROUP * desc.block_type.nbytes + (row_bytes if n == 0 else 0))
        for c in gl.static_range(SIDE.GROUP):
            place_at = at(b0, b1, h, row, (n * SIDE.GROUP + c) * FORM.PIECE, moves)
            tma_load(desc, place_at, bar, tiles.index(slot * SIDE.GROUP + c))
        if n == 0 and len(lines) > 0:
            for i in gl.static_range(2):
                tma_load(lines[0][i], [lines[2], row], bar, lines[1][i].index(tile % SIDE.LINES))


@jit
def return_tile(ring, tile, SIDE: gl.constexpr):
    """Hand back every slot of a tile."""
    for n in gl.static_range(SIDE.USES):
        hand_back(ring[2], tile * SIDE.USES + n, SIDE.SLOTS)


@jit
def await_tile(ring, tile, SIDE: gl.constexpr):
    """Wait until every slot of a tile has landed."""
    for n in gl.static_range(SIDE.USES):
        wait_full(ring[1], tile * SIDE.USES + n, SIDE.SLOTS)


@jit
def held(own, item, COUNT: gl.constexpr, SIDE: gl.constexpr, FORM: gl.constexpr):
    """The first COUNT pieces of an item's own rows in registers."""
    out = ()
    for c in gl.static_range(COUNT):
        out = added(out, piece_of(own, item, c, SIDE, FORM).load(FORM.OWN))
    return out


@jit
def scores(own, item, kept, ring, tile, OWN: gl.constexpr, SIDE: gl.constexpr, FORM: gl.constexpr):
    """Start an item's own rows times a met tile, transposed, in COUNT products. ``kept``: own pieces in registers."""
    s = gl.zeros([ROWS, ROWS], gl.float32, layout=FORM.S)
    for c in gl.static_range(SIDE.COUNT):
        if c % SIDE.GROUP == 0:
            wait_full(ring[1], tile * SIDE.USES + c // SIDE.GROUP, SIDE.SLOTS)
        met = piece_of(ring, tile, c, SIDE, FORM).permute((1, 0))
        left = kept[c] if c < len(kept) else piece_of(own, item, c, OWN, FORM)
        s = warpgroup_mma(left, met, s, use_acc=c > 0, is_async=True)
    return s


@jit
def added_products(x, operand, ring, tile, SIDE: gl.constexpr, FORM: gl.constexpr):
    """Start ``x`` += ``operand`` times a met tile that has landed, one product a piece."""
    out = ()
    for c in gl.static_range(SIDE.COUNT):
        out = added(out, warpgroup_mma(operand, piece_of(ring, tile, c, SIDE, FORM), x[c], is_async=True))
    return out


@jit
def await_sums(x, operand, ring, tile, BEHIND: gl.constexpr, SIDE: gl.constexpr):
    """Wait for ``added_products``, behind which BEHIND products were started, and hand back its tile slot by slot."""
    out = ()
    for n in gl.static_range(SIDE.USES):
        deps = x[n * SIDE.GROUP : (n + 1) * SIDE.GROUP] + (operand,)  # noqa: RUF005
        done = warpgroup_mma_wait(BEHIND + (SIDE.USES - 1 - n) * SIDE.GROUP, deps=deps)
        out = out + done[: SIDE.GROUP]
        hand_back(ring[2], tile * SIDE.USES + n, SIDE.SLOTS)
    return out


@jit
def no_sums(SIDE: gl.constexpr, FORM: gl.constexpr):
    """Zeros for every piece."""
    x = ()
    for _ in gl.static_range(SIDE.COUNT):
        x = added(x, gl.zeros([ROWS, FORM.PIECE], gl.float32, layout=SIDE.X))
    return x


@jit
def weights(s, reference, unit, seen, hides, FORM: gl.constexpr):
    """exp2 of scores over their reference, 0 where ``hides`` and not ``seen``."""
    y = s * unit - reference
    if hides:
        y = gl.where(seen, y, NEG_INF)
    return gl.exp2(y)


@jit
def store_pieces(x, factor, own, item, desc, moves, b, inner, h, row, SIDE: gl.constexpr, FORM: gl.constexpr):
    """Write sums to device memory through the item's own rows, whose readers are done."""
    b0 = b // inner
    b1 = b - b0 * inner
    for c in gl.static_range(len(x)):
        if c >= SIDE.COUNT:
            store_wait(SIDE.COUNT - 1)
        tile = own[0].index(item % SIDE.SLOTS * SIDE.COUNT + c % SIDE.COUNT)
        tile.reshape([ROWS, FORM.PIECE]).store((x[c] * factor).to(FORM.DTYPE))
        fence_async_shared()
        tma_store(desc, at(b0, b1, h, row, c * FORM.PIECE, moves), tile)
    store_wait(0)
