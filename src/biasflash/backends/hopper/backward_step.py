"""One round of the backward passes: a few tiles of the other side met by the 64 rows of a warpgroup.

A CTA keeps 128 rows of its own side and meets tiles of the other side, which one warp copies into a ring::

    dq        S   = Q K^T    dP   = dO V^T    dq += dS K                        own: Q, dO    met: K, V
    dk, dv    S^T = K Q^T    dP^T = V dO^T    dv += P^T dO    dk += dS^T Q      own: K, V     met: Q, dO

KEYS tells the second from the first.
"""

from dataclasses import make_dataclass
from typing import Any

from triton import constexpr_function

from biasflash.backends.hopper.deal import locate
from biasflash.backends.hopper.gluon import (
    fence_async_shared,
    gl,
    jit,
    store_wait,
    tma_store,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from biasflash.backends.hopper.marks import last_key_of
from biasflash.backends.hopper.pieces import NEG_INF, added, minus_columns, replaced, widen
from biasflash.backends.hopper.pipeline import hand_back, wait_full
from biasflash.tile.softmax import LOG2E
from biasflash.tile.span import key_span, query_span

OWN = gl.constexpr(128)  # rows of a CTA: 64 for each of two warpgroups


Form: Any = make_dataclass("Form", ["IS_CAUSAL", "D_BLOCK", "DV_BLOCK", "ORDER", "BLOCK_M"], frozen=True)


@constexpr_function
def dealing(is_causal: Any, width: Any, width_v: Any, order: Any) -> Any:
    """What the deal of items depends on, beside their extent."""
    return Form(*(gl.constexpr(x) for x in (is_causal, width, width_v, order, 128)))


@jit
def own_extent(numbers, ROWS: gl.constexpr, KEYS: gl.constexpr):
    """(own rows, met rows, heads, batch items, shift) of the items to deal."""
    _, _, M, N, heads, group, batch, shift = numbers
    if KEYS:
        return N, M * group, heads // group, batch // ROWS, shift
    else:
        return M, N, heads, batch // ROWS, shift


@jit
def work_item(
    lot, turn, dealt, extent, numbers, mask, BLOCK: gl.constexpr, ROWS: gl.constexpr, TILES: gl.constexpr,
    KEYS: gl.constexpr, DEAL: gl.constexpr, HAS_KEEP: gl.constexpr,
):  # fmt: skip
    """Item -> (head, first batch item, first own row, first met row, met tiles, those among them that need a mask).

    Tiles come in whole rounds of TILES, those that need a mask first: dq walks down from the last key, dk and dv up
    from the first query. What a round adds lies past the end: hidden for dq, of weight times zero for dk and dv.

    HAS_KEEP: keys past the last visible one, of all ROWS items, are not met. Own keys past it meet nothing; the first
    met row is then past the last query.
    """
    inner, _, M, N, _, _, _, shift = numbers
    tile, b, h = locate(lot, turn, dealt, extent, DEAL)
    last = N
    if HAS_KEEP:
        last = last_key_of(b * ROWS, inner, N, mask, ROWS)
    if KEYS:
        if DEAL.IS_CAUSAL:  # the last queries have most to do, but the first keys
            tile = gl.cdiv(N, OWN) - 1 - tile
        own = tile * OWN
        start, full_start = query_span(own, M, shift, BLOCK, OWN, DEAL.IS_CAUSAL)
        tiles = gl.cdiv(gl.cdiv(M - start, BLOCK), TILES) * TILES
        masked = gl.minimum((full_start - start) // BLOCK, tiles)
        if HAS_KEEP:  # noqa: SIM102
            if own >= last:
                start, tiles, masked = gl.cdiv(M, BLOCK) * BLOCK, tiles * 0, masked * 0
    else:
        own = tile * OWN
        full_end, end = key_span(own, M, last, shift, OWN, BLOCK, DEAL.IS_CAUSAL)
        tiles = gl.cdiv(gl.cdiv(end, BLOCK), TILES) * TILES
        masked = tiles - full_end // BLOCK
        start = (tiles - 1) * BLOCK
    return h, b * ROWS, own, start, tiles, masked


@jit
def score_products(
    own, met, rows, met_full, own_at, use, D: gl.constexpr, DV: gl.constexpr, BLOCK: gl.constexpr,
    STAGES: gl.constexpr, FROM_DELTA: gl.constexpr, S: gl.constexpr,
):  # fmt: skip
    """Start S and dP (or their transposes) of 64 own rows and met tile ``use``; both [64, BLOCK].

    FROM_DELTA: dP^T - delta in place of dP^T, a sum that starts from minus the column's delta. Its loads then do not
    come behind the wait for dP^T, when shared memory is busy with products, and it takes no registers beside dP^T.
    Only where no product is in flight: the assembler would wait for it before it lets these registers be written.
    """
    slot = use % STAGES
    zero = gl.zeros([64, BLOCK], gl.float32, layout=S)
    wait_full(met_full, use, STAGES)
    met_1 = met[0].index(slot).reshape([BLOCK, D]).permute((1, 0))
    met_2 = met[1].index(slot).reshape([BLOCK, DV]).permute((1, 0))
    dp = zero
    if FROM_DELTA:
        dp = minus_columns(rows[1].index(slot).reshape([BLOCK]).load(gl.SliceLayout(0, S)), zero)
    s = warpgroup_mma(own[0].index(own_at).reshape([64, D]), met_1, zero, use_acc=False, is_async=True)
    dp = warpgroup_mma(own[1].index(own_at).reshape([64, DV]), met_2, dp, use_acc=FROM_DELTA, is_async=True)
    return s, dp


@jit
def store_ds(w: gl.constexpr, turn, ds, ds_desc, place_at, ds_tiles, BLOCK: gl.constexpr):
    """``ds`` [64 keys, BLOCK queries] to the bias gradient, the ``turn``-th of all; each warpgroup has places of its
    own, which it takes in turn."""
    SLOTS: gl.constexpr = ds_tiles.shape[0] // 2
    store_wait(SLOTS - 1)
    tile = ds_tiles.index(turn % SLOTS * 2 + w)
    tile.reshape([BLOCK, 64]).permute((1, 0)).store(ds)
    fence_async_shared()
    tma_store(ds_desc, place_at, tile)


@jit
def run_round(
    w: gl.constexpr, x_1, x_2, references, deltas, limits, own_at, met_use, bias_use, own_row, met_row, N, shift,
    scale, ds_desc, ds_place, own, met, bias, rows, ds_tiles, bars,
    D: gl.constexpr, DV: gl.constexpr, BLOCK: gl.constexpr, ROWS: gl.constexpr, TILES: gl.constexpr,
    STAGES: gl.constexpr, BIAS_STAGES: gl.constexpr, HAS_BIAS: gl.constexpr, IS_CAUSAL: gl.constexpr,
    MASKED: gl.constexpr, AHEAD: gl.constexpr, KEEP: gl.constexpr, KEYS: gl.constexpr, STORE_DS: gl.constexpr,
    HAS_KEEP: gl.constexpr, FIRST: gl.constexpr, S: gl.constexpr, P_1: gl.constexpr, P_2: gl.constexpr,
):  # fmt: skip
    """TILES met tiles for ROWS batch items: score products of the next step run while this step is computed.

    AHEAD starts them before this step's arithmetic (more registers), otherwise they start after it, ahead of this
    step's second products. A lone step of dk and dv starts dv before it waits for dP^T: that product needs the weights,
    so the assembler cannot lower the exponentials behind the wait. A met slot is handed back two steps later, when the
    wait for new scores has covered them; KEEP widens a bias tile once for the ROWS items and hands it back after the
    first. FIRST: references of met queries are read before their scores are waited for. HAS_KEEP: ``limits`` is what
    scores are cut to, a column for each item where own rows are keys, else a ring of lines beside the met tiles.
    """
    _, _, met_full, met_empty, bias_full, bias_empty = bars
    U: gl.constexpr = ROWS * TILES
    SECOND: gl.constexpr = 2 if KEYS else 1  # second products of a step
    ALONE: gl.constexpr = KEYS and U == 1
    s, dp = score_products(own, met, rows, met_full, own_at, met_use, D, DV, BLOCK, STAGES, KEYS, S)
    before = ()  # left operands of second products in flight: those of the step before the last, and of the last
    last = ()
    for u in gl.static_range(U):
        if AHEAD and u + 1 < U:
            next_at = own_at + (u + 1) % ROWS * 2
            s_next, dp_next = score_products(
                own, met, rows, met_full, next_at, met_use + u + 1, D, DV, BLOCK, STAGES, KEYS and not AHEAD, S
            )
        slot = (met_use + u) % STAGES
        if FIRST:
            reference = rows[0].index(slot).reshape([BLOCK]).load(gl.SliceLayout(0, S))[None, :]
        if ALONE:
            s = warpgroup_mma_wait(1, deps=(s,))
        else:
            deps = (s, dp)
            deps = deps + before
            scores = warpgroup_mma_wait((SECOND if u > 0 else 0) + (2 if AHEAD and u + 1 < U else 0), deps=deps)
            s = scores[0]
            dp = scores[1]
        if u > 1:
            hand_back(met_empty, met_use + u - 2, STAGES)
        unit = LOG2E
        if HAS_BIAS:
            use = bias_use + u // ROWS
            if u % ROWS == 0:
                wait_full(bias_full, use, BIAS_STAGES)
            if not KEEP or u % ROWS == 0:
                tile = bias.index(use % BIAS_STAGES * 2 + w)
                if KEYS:
                    dense = widen(tile.reshape([BLOCK, 64]).permute((1, 0)).load(S))
                else:
                    dense = widen(tile.reshape([64, BLOCK]).load(S))
            s = s * scale + dense
        else:
            unit = scale * LOG2E
        if not KEYS:
            reference = references[u % ROWS][:, None]
        elif not FIRST:
            reference = rows[0].index(slot).reshape([BLOCK]).load(gl.SliceLayout(0, S))[None, :]
        y = s * unit - reference
        if MASKED:
            row = own_row + w * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, S))
            column = gl.arange(0, BLOCK, layout=gl.SliceLayout(0, S))
            if KEYS:
                column = column + (met_row + u // ROWS * BLOCK + shift)
                y = gl.where(row[:, None] <= column[None, :], y, NEG_INF)
            else:
                column = column + (met_row - u // ROWS * BLOCK)
                seen = (column < N)[None, :]
                if IS_CAUSAL:
                    seen = seen & (column[None, :] <= (row + shift)[:, None])
                y = gl.where(seen, y, NEG_INF)
        if HAS_KEEP:
            if KEYS:
                limit = limits[u % ROWS][:, None]
            else:
                limit = limits.index(slot).reshape([BLOCK]).load(gl.SliceLayout(0, S))[None, :]
            y = gl.minimum(y, limit)  # NaN of a hidden key becomes -inf too
        p = gl.exp2(y)
        if KEYS:
            p_operand = gl.convert_layout(p.to(own[0].dtype), P_2)
        if ALONE:
            x = warpgroup_mma(p_operand, met[1].index(slot).reshape([BLOCK, DV]), x_2[0], is_async=True)
            x_2 = (x,)
            dp = warpgroup_mma_wait(1, deps=(dp,))
        if not KEYS:
            dp = dp - deltas[u % ROWS][:, None]
        elif AHEAD and u > 0:
            dp = dp - rows[1].index(slot).reshape([BLOCK]).load(gl.SliceLayout(0, S))[None, :]
        exact = p * dp
        ds = exact.to(own[0].dtype)
        operand = gl.convert_layout(ds, P_1)
        if not AHEAD and u + 1 < U:
            next_at = own_at + (u + 1) % ROWS * 2
            s_next, dp_next = score_products(
                own, met, rows, met_full, next_at, met_use + u + 1, D, DV, BLOCK, STAGES, KEYS and not AHEAD, S
            )
        before = last
        if KEYS:
            if not ALONE:
                x = warpgroup_mma(p_operand, met[1].index(slot).reshape([BLOCK, DV]), x_2[u % ROWS], is_async=True)
                x_2 = replaced(x_2, u % ROWS, x)
            last = (operand, p_operand)
        else:
            last = (operand,)
        x = warpgroup_mma(operand, met[0].index(slot).reshape([BLOCK, D]), x_1[u % ROWS], is_async=True)
        x_1 = replaced(x_1, u % ROWS, x)
        if HAS_BIAS and u % ROWS == (0 if KEEP else ROWS - 1):
            hand_back(bias_empty, bias_use + u // ROWS, BIAS_STAGES)  # no sooner: this step's weights came from it
        if STORE_DS:
            desc_row = met_row + u // ROWS * BLOCK
            place_at = [ds_place[0], ds_place[1], ds_place[2], desc_row, own_row + w * 64]
            store_ds(w, met_use + u, exact.to(ds_tiles.dtype), ds_desc, place_at, ds_tiles, BLOCK)
        if u + 1 < U:
            s = s_next
            dp = dp_next
    done = warpgroup_mma_wait(0, deps=x_1 + x_2 + last + before)
    x_1 = ()
    x_2_done = ()
    for g in gl.static_range(ROWS):
        x_1 = added(x_1, done[g])
        if KEYS:
            x_2_done = added(x_2_done, done[ROWS + g])
    if U > 1:
        hand_back(met_empty, met_use + U - 2, STAGES)
    hand_back(met_empty, met_use + U - 1, STAGES)
    return x_1, x_2_done
