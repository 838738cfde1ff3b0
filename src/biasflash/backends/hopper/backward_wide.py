"""Backward passes of heads wider than 128 columns on Hopper: dk, dv (owner: 64 keys) and dq (owner: 128 queries).

The sums of 64 keys fill the registers of two warpgroups, so these share the work by kind and not by row::

    warpgroup 0    S^T  = K Q^T     P  = exp2(S^T - reference)    dv += P^T dO
    warpgroup 1    dP^T = V dO^T    dS = P (dP^T - delta)         dk += dS^T Q

P goes from one to the other in float32 through shared memory: four products a tile, none twice. In dq a sum of 64
queries fits one warpgroup, and there are two, 64 queries each. As in ``backward``, every result has one writer and
programs are persistent.
"""

from biasflash.backends.hopper.backward_step import own_extent
from biasflash.backends.hopper.backward_wide_step import (
    ROWS,
    added_products,
    await_sums,
    await_tile,
    copy_tile,
    form,
    held,
    no_sums,
    own_keys,
    own_queries,
    piece_ring,
    return_tile,
    scores,
    store_pieces,
    weights,
)
from biasflash.backends.hopper.deal import deal, first_lot, following
from biasflash.backends.hopper.gluon import fence_async_shared, gl, jit, warpgroup_mma_wait
from biasflash.backends.hopper.pieces import slots
from biasflash.backends.hopper.pipeline import hand_back, ring_barriers, start_ring, wait_empty, wait_full
from biasflash.tile.softmax import LOG2E

NUMBERS = ["inner", "items", "M", "N", "heads", "group", "batch", "shift"]
DKDV_MOVES = ["k_moves", "v_moves", "q_moves", "dout_moves", "dk_moves", "dv_moves"]
DQ_MOVES = ["q_moves", "dout_moves", "k_moves", "v_moves", "dq_moves"]


@jit
def copy_queries(descs, moves, row_descs, met, rows, use, b, inner, heads, head, row, FORM: gl.constexpr):
    """A tile of queries with their statistics, and of output gradients."""
    lines = (row_descs, rows, b * heads + head)
    copy_tile(descs[2], moves[2], b, inner, head, row, met[0], use, lines, FORM.FIRST, FORM)
    copy_tile(descs[3], moves[3], b, inner, head, row, met[1], use, (), FORM.SECOND, FORM)


@jit
def copy_for_keys(descs, moves, row_descs, own, met, rows, numbers, FORM: gl.constexpr):
    """The copying warp of dk and dv. The first queries of an item come before its keys and values, whose place still
    holds the results of the item before."""
    inner, items, _, _, heads, group, _, _ = numbers
    extent = own_extent(numbers, 1, True)
    dealt = deal(items, extent, FORM)
    lot, turn, item, use = first_lot(FORM), 0, 0, 0
    while lot < dealt[0]:
        h, b, own_row, start, tiles, _ = own_keys(lot, turn, dealt, extent, numbers, FORM)
        head = h * group
        copy_queries(descs, moves, row_descs, met, rows, use, b, inner, heads, head, start, FORM)
        copy_tile(descs[0], moves[0], b, inner, h, own_row, own[0], item, (), FORM.OWN_1, FORM)
        copy_tile(descs[1], moves[1], b, inner, h, own_row, own[1], item, (), FORM.OWN_2, FORM)
        for i in range(1, tiles * group):
            member = i // tiles
            row = start + (i - member * tiles) * ROWS
            copy_queries(descs, moves, row_descs, met, rows, use + i, b, inner, heads, head + member, row, FORM)
        use += tiles * group
        item += 1
        lot, turn = following(lot, turn, dealt, extent, FORM)


@jit
def hand_on(p, p_tile, p_bars, use):
    """Weights of the ``use``-th tile to the other warpgroup."""
    wait_empty(p_bars[1], use, 1)
    p_tile.store(p)
    hand_back(p_bars[0], use, 1)


@jit
def reference_of(rows, use, FORM: gl.constexpr):
    """A row statistic of query tile ``use`` for every column of transposed scores."""
    return rows.index(use % FORM.FIRST.LINES).reshape([ROWS]).load(gl.SliceLayout(0, FORM.S))[None, :]


@jit
def sum_dv(desc, moves, own, met, rows, p_tile, p_bars, numbers, scale, HELD: gl.constexpr, FORM: gl.constexpr):
    """Warpgroup 0. Weights of a tile are computed while dv of the tile before is summed."""
    inner, items, _, _, _, group, _, shift = numbers
    unit = scale * LOG2E
    key = gl.arange(0, ROWS, layout=gl.SliceLayout(1, FORM.S))[:, None]
    query = gl.arange(0, ROWS, layout=gl.SliceLayout(0, FORM.S))[None, :]
    extent = own_extent(numbers, 1, True)
    dealt = deal(items, extent, FORM)
    lot, turn, item, use = first_lot(FORM), 0, 0, 0
    while lot < dealt[0]:
        h, b, own_row, start, tiles, masked = own_keys(lot, turn, dealt, extent, numbers, FORM)
        await_tile(own[0], item, FORM.OWN_1)
        keys = held(own[0], item, HELD, FORM.OWN_1, FORM)
        sees = start + shift - own_row  # the last of these keys that the first query sees
        s = scores(own[0], item, keys, met[0], use, FORM.OWN_1, FORM.FIRST, FORM)
        s = warpgroup_mma_wait(0, deps=(s,))
        hides = masked > 0 if FORM.IS_CAUSAL else False
        p = weights(s, reference_of(rows[0], use, FORM), unit, key <= query + sees, hides, FORM)
        hand_on(p, p_tile, p_bars, use)
        operand = gl.convert_layout(p.to(FORM.DTYPE), FORM.P)
        x = no_sums(FORM.SECOND, FORM)
        j = 0
        for _ in range(1, tiles * group):
            j = gl.where(j + 1 < tiles, j + 1, 0)
            s = scores(own[0], item, keys, met[0], use + 1, FORM.OWN_1, FORM.FIRST, FORM)
            await_tile(met[1], use, FORM.SECOND)
            x = added_products(x, operand, met[1], use, FORM.SECOND, FORM)
            return_tile(met[0], use, FORM.FIRST)  # the product under way has taken in its weights and statistics
            s = warpgroup_mma_wait(FORM.SECOND.COUNT, deps=(s,))
            hides = j < masked if FORM.IS_CAUSAL else False
            seen = key <= query + (sees + j * ROWS)
            p = weights(s, reference_of(rows[0], use + 1, FORM), unit, seen, hides, FORM)
            hand_on(p, p_tile, p_bars, use + 1)
            x = await_sums(x, operand, met[1], use, 0, FORM.SECOND)
            operand = gl.convert_layout(p.to(FORM.DTYPE), FORM.P)
            use += 1
        await_tile(met[1], use, FORM.SECOND)
        x = added_products(x, operand, met[1], use, FORM.SECOND, FORM)
        return_tile(met[0], use, FORM.FIRST)
        x = await_sums(x, operand, met[1], use, 0, FORM.SECOND)
        use += 1
        store_pieces(x, 1.0, own[0], item, desc, moves, b, inner, h, own_row, FORM.OWN_1, FORM)
        return_tile(own[0], item, FORM.OWN_1)
        item += 1
        lot, turn = following(lot, turn, dealt, extent, FORM)


@jit
def score_gradients(dp, met, rows, p_tile, p_bars, use, FORM: gl.constexpr):
    """dS of query tile ``use`` as the left operand of dk's products."""
    wait_full(met[0][1], use * FORM.FIRST.USES, FORM.FIRST.SLOTS)  # row statistics come with the queries
    delta = reference_of(rows[1], use, FORM)
    wait_full(p_bars[0], use, 1)
    ds = p_tile.load(FORM.S) * (dp - delta)
    return gl.convert_layout(ds.to(FORM.DTYPE), FORM.P)


@jit
def sum_dk(desc, moves, own, met, rows, p_tile, p_bars, numbers, scale, HELD: gl.constexpr, FORM: gl.constexpr):
    """Warpgroup 1. dk of a tile comes before dP of the next one: its queries are held longest."""
    inner, items, _, _, _, group, _, _ = numbers
    extent = own_extent(numbers, 1, True)
    dealt = deal(items, extent, FORM)
    lot, turn, item, use = first_lot(FORM), 0, 0, 0
    while lot < dealt[0]:
        h, b, own_row, _start, tiles, _ = own_keys(lot, turn, dealt, extent, numbers, FORM)
        await_tile(own[1], item, FORM.OWN_2)
        values = held(own[1], item, HELD, FORM.OWN_2, FORM)
        dp = scores(own[1], item, values, met[1], use, FORM.OWN_2, FORM.SECOND, FORM)
        dp = warpgroup_mma_wait(0, deps=(dp,))
        return_tile(met[1], use, FORM.SECOND)
        operand = score_gradients(dp, met, rows, p_tile, p_bars, use, FORM)
        x = no_sums(FORM.FIRST, FORM)
        for _ in range(1, tiles * group):
            await_tile(met[0], use, FORM.FIRST)
            x = added_products(x, operand, met[0], use, FORM.FIRST, FORM)
            hand_back(p_bars[1], use, 1)  # no sooner: the product's operand was made of these weights
            dp = scores(own[1], item, values, met[1], use + 1, FORM.OWN_2, FORM.SECOND, FORM)
            x = await_sums(x, operand, met[0], use, FORM.SECOND.COUNT, FORM.FIRST)
            use += 1
            dp = warpgroup_mma_wait(0, deps=(dp,))
            return_tile(met[1], use, FORM.SECOND)
            operand = score_gradients(dp, met, rows, p_tile, p_bars, use, FORM)
        await_tile(met[0], use, FORM.FIRST)
        x = added_products(x, operand, met[0], use, FORM.FIRST, FORM)
        hand_back(p_bars[1], use, 1)
        x = await_sums(x, operand, met[0], use, 0, FORM.FIRST)
        use += 1
        store_pieces(x, scale, own[1], item, desc, moves, b, inner, h, own_row, FORM.OWN_2, FORM)
        return_tile(own[1], item, FORM.OWN_2)
        item += 1
        lot, turn = following(lot, turn, dealt, extent, FORM)


@jit(do_not_specialize=NUMBERS + DKDV_MOVES)
def wide_dkdv_kernel(
    k_desc, v_desc, q_desc, dout_desc, reference_desc, delta_desc, dk_desc, dv_desc,
    k_moves, v_moves, q_moves, dout_moves, dk_moves, dv_moves,
    inner, items, M, N, heads, group, batch, shift, scale,
    PIECES_1: gl.constexpr, GROUP_1: gl.constexpr, SLOTS_1: gl.constexpr, PIECES_2: gl.constexpr,
    GROUP_2: gl.constexpr, SLOTS_2: gl.constexpr, PIECE: gl.constexpr, IS_CAUSAL: gl.constexpr, ORDER: gl.constexpr,
    OWN_SLOTS: gl.constexpr, HELD_1: gl.constexpr, HELD_2: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr,
):  # fmt: skip
    """dk = scale dS^T Q and dv = P^T dO of every key, without a bias.

    All but row statistics are descriptors ``(b0, b1, head, row, column)`` with boxes of 64 x PIECE; ``reference,
    delta`` are ``(b heads + h, row)`` in float32, box 1 x 64. PIECES_1 of q, k and dk, PIECES_2 of v, dout and dv; a
    ring of SLOTS slots has GROUP pieces in each. OWN_SLOTS: items whose keys and values are copied in at a time; HELD
    pieces of them go to registers. Items: tiles of 64 keys x batch x key heads; the query heads of a key head are
    summed in registers.
    """
    FORM: gl.constexpr = form(IS_CAUSAL, ORDER, 64, PIECE, PIECES_1, GROUP_1, SLOTS_1, PIECES_2, GROUP_2, SLOTS_2,
                              OWN_SLOTS, q_desc.dtype)  # fmt: skip
    gl.static_assert(2 * FORM.FIRST.USES <= SLOTS_1, "two query tiles are held at a time")
    gl.static_assert(2 * FORM.SECOND.USES <= SLOTS_2, "two tiles of output gradients are held at a time")
    own = (piece_ring(k_desc, FORM.OWN_1, 1), piece_ring(v_desc, FORM.OWN_2, 1))
    met = (piece_ring(q_desc, FORM.FIRST, 2), piece_ring(dout_desc, FORM.SECOND, 2))
    row_descs = (reference_desc, delta_desc)
    rows = (slots(reference_desc, FORM.FIRST.LINES), slots(delta_desc, FORM.FIRST.LINES))
    # a row of 64 is eight chunks of 32 bytes: exchanged by row, threads of a quarter warp meet in no bank
    layout: gl.constexpr = gl.SwizzledSharedLayout(vec=8, per_phase=1, max_phase=8, order=[1, 0])
    p_tile = gl.allocate_shared_memory(gl.float32, [64, 64], layout)
    p_bars = (ring_barriers(1), ring_barriers(1))
    start_ring(p_bars[0], p_bars[1], 1, 1)
    fence_async_shared()
    numbers = (inner, items, M, N, heads, group, batch, shift)
    descs = (k_desc, v_desc, q_desc, dout_desc)
    moves = (k_moves, v_moves, q_moves, dout_moves)
    gl.warp_specialize(
        [
            (sum_dv, (dv_desc, dv_moves, own, met, rows, p_tile, p_bars, numbers, scale, HELD_1, FORM)),
            (sum_dk, (dk_desc, dk_moves, own, met, rows, p_tile, p_bars, numbers, scale, HELD_2, FORM)),
            (copy_for_keys, (descs, moves, row_descs, own, met, rows, numbers, FORM)),
        ],
        [4, 1],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )


@jit
def copy_keys(descs, moves, met, use, b, inner, head, row, FORM: gl.constexpr):
    """A tile of keys and one of values."""
    copy_tile(descs[2], moves[2], b, inner, head, row, met[0], use, (), FORM.FIRST, FORM)
    copy_tile(descs[3], moves[3], b, inner, head, row, met[1], use, (), FORM.SECOND, FORM)


@jit
def copy_for_queries(descs, moves, row_descs, own, met, rows, numbers, FORM: gl.constexpr):
    """The copying warp of dq. What an item keeps comes after its first keys: its place is handed back last of all."""
    inner, items, _, _, heads, group, _, _ = numbers
    extent = own_extent(numbers, 1, False)
    dealt = deal(items, extent, FORM)
    lot, turn, item, use = first_lot(FORM), 0, 0, 0
    while lot < dealt[0]:
        h, b, own_row, start, tiles, _ = own_queries(lot, turn, dealt, extent, numbers, FORM)
        copy_keys(descs, moves, met, use, b, inner, h // group, start, FORM)
        for w in gl.static_range(2):
            copy_tile(descs[1], moves[1], b, inner, h, own_row + w * ROWS, own[1][w], item, (), FORM.OWN_2, FORM)
        for w in gl.static_range(2):
            lines = (row_descs, rows[w], b * heads + h)
            copy_tile(descs[0], moves[0], b, inner, h, own_row + w * ROWS, own[0][w], item, lines, FORM.OWN_1, FORM)
        for j in range(1, tiles):
            copy_keys(descs, moves, met, use + j, b, inner, h // group, start - j * ROWS, FORM)
        use += tiles
        item += 1
        lot, turn = following(lot, turn, dealt, extent, FORM)


@jit
def query_gradients(s, dp, statistics, met, use, unit, seen, hides, FORM: gl.constexpr):
    """dS of key tile ``use`` as the left operand of dq's products: weights are computed while dP is under way."""
    reference, delta = statistics
    p = weights(s, reference, unit, seen, hides, FORM)
    # Long since landed: its loop ends the basic block, so that the assembler cannot lift the wait for dP above the
    # exponentials.
    await_tile(met[1], use, FORM.SECOND)
    dp = warpgroup_mma_wait(0, deps=(dp,))
    return_tile(met[1], use, FORM.SECOND)
    return gl.convert_layout((p * (dp - delta)).to(FORM.DTYPE), FORM.P)


@jit
def sum_dq(
    w: gl.constexpr, desc, moves, own, met, rows, numbers, scale, HELD_1: gl.constexpr, HELD_2: gl.constexpr,
    FORM: gl.constexpr,
):  # fmt: skip
    """A computing warpgroup of dq: 64 of the queries. A tile's dq is summed before the next tile's scores."""
    inner, items, _, N, _, _, _, shift = numbers
    unit = scale * LOG2E
    query = gl.arange(0, ROWS, layout=gl.SliceLayout(1, FORM.S))[:, None]
    key = gl.arange(0, ROWS, layout=gl.SliceLayout(0, FORM.S))[None, :]
    q_ring = own[0][w]
    dout_ring = own[1][w]
    extent = own_extent(numbers, 1, False)
    dealt = deal(items, extent, FORM)
    lot, turn, item, use = first_lot(FORM), 0, 0, 0
    while lot < dealt[0]:
        h, b, own_row, start, tiles, masked = own_queries(lot, turn, dealt, extent, numbers, FORM)
        last = N - 1  # key that a row sees
        if FORM.IS_CAUSAL:
            last = gl.minimum(query + (own_row + w * ROWS + shift), last)
        await_tile(q_ring, item, FORM.OWN_1)
        await_tile(dout_ring, item, FORM.OWN_2)
        queries = held(q_ring, item, HELD_1, FORM.OWN_1, FORM)
        gradients = held(dout_ring, item, HELD_2, FORM.OWN_2, FORM)
        reference = rows[w][0].index(0).reshape([ROWS]).load(gl.SliceLayout(1, FORM.S))[:, None]
        delta = rows[w][1].index(0).reshape([ROWS]).load(gl.SliceLayout(1, FORM.S))[:, None]
        statistics = (reference, delta)
        s_0 = scores(q_ring, item, queries, met[0], use, FORM.OWN_1, FORM.FIRST, FORM)
        dp_0 = scores(dout_ring, item, gradients, met[1], use, FORM.OWN_2, FORM.SECOND, FORM)
        s_0 = warpgroup_mma_wait(FORM.SECOND.COUNT, deps=(s_0,))
        operand = query_gradients(s_0, dp_0, statistics, met, use, unit, key + start <= last, masked > 0, FORM)
        x = no_sums(FORM.FIRST, FORM)
        for j in range(1, tiles):
            x = added_products(x, operand, met[0], use, FORM.FIRST, FORM)
            s = scores(q_ring, item, queries, met[0], use + 1, FORM.OWN_1, FORM.FIRST, FORM)
            x = await_sums(x, operand, met[0], use, FORM.FIRST.COUNT, FORM.FIRST)
            use += 1
            dp = scores(dout_ring, item, gradients, met[1], use, FORM.OWN_2, FORM.SECOND, FORM)
            s = warpgroup_mma_wait(FORM.SECOND.COUNT, deps=(s,))
            hides = j < masked if FORM.IS_CAUSAL else False  # the last keys came first
            seen = key + (start - j * ROWS) <= last
            operand = query_gradients(s, dp, statistics, met, use, unit, seen, hides, FORM)
        x = added_products(x, operand, met[0], use, FORM.FIRST, FORM)
        x = await_sums(x, operand, met[0], use, 0, FORM.FIRST)
        use += 1
        return_tile(dout_ring, item, FORM.OWN_2)
        store_pieces(x, scale, q_ring, item, desc, moves, b, inner, h, own_row + w * ROWS, FORM.OWN_1, FORM)
        return_tile(q_ring, item, FORM.OWN_1)
        item += 1
        lot, turn = following(lot, turn, dealt, extent, FORM)


@jit(do_not_specialize=NUMBERS + DQ_MOVES)
def wide_dq_kernel(
    q_desc, dout_desc, k_desc, v_desc, reference_desc, delta_desc, dq_desc,
    q_moves, dout_moves, k_moves, v_moves, dq_moves,
    inner, items, M, N, heads, group, batch, shift, scale,
    PIECES_1: gl.constexpr, GROUP_1: gl.constexpr, SLOTS_1: gl.constexpr, PIECES_2: gl.constexpr,
    GROUP_2: gl.constexpr, SLOTS_2: gl.constexpr, PIECE: gl.constexpr, IS_CAUSAL: gl.constexpr, ORDER: gl.constexpr,
    HELD_1: gl.constexpr, HELD_2: gl.constexpr, CONSUMER_REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr,
):  # fmt: skip
    """dq = scale dS K of every query, without a bias. As ``wide_dkdv_kernel``; items: tiles of 128 queries x batch x
    heads."""
    FORM: gl.constexpr = form(IS_CAUSAL, ORDER, 128, PIECE, PIECES_1, GROUP_1, SLOTS_1, PIECES_2, GROUP_2, SLOTS_2,
                              1, q_desc.dtype)  # fmt: skip
    gl.static_assert(2 * FORM.FIRST.USES <= SLOTS_1, "two key tiles are held at a time")
    gl.static_assert(FORM.SECOND.USES <= SLOTS_2, "a tile of values waits for its own slot")
    own = (
        (piece_ring(q_desc, FORM.OWN_1, 1), piece_ring(q_desc, FORM.OWN_1, 1)),
        (piece_ring(dout_desc, FORM.OWN_2, 1), piece_ring(dout_desc, FORM.OWN_2, 1)),
    )
    met = (piece_ring(k_desc, FORM.FIRST, 2), piece_ring(v_desc, FORM.SECOND, 2))
    row_descs = (reference_desc, delta_desc)
    rows = ((slots(reference_desc, 1), slots(delta_desc, 1)), (slots(reference_desc, 1), slots(delta_desc, 1)))
    fence_async_shared()
    numbers = (inner, items, M, N, heads, group, batch, shift)
    descs = (q_desc, dout_desc, k_desc, v_desc)
    moves = (q_moves, dout_moves, k_moves, v_moves)
    gl.warp_specialize(
        [
            (sum_dq, (0, dq_desc, dq_moves, own, met, rows, numbers, scale, HELD_1, HELD_2, FORM)),
            (sum_dq, (1, dq_desc, dq_moves, own, met, rows, numbers, scale, HELD_1, HELD_2, FORM)),
            (copy_for_queries, (descs, moves, row_descs, own, met, rows, numbers, FORM)),
        ],
        [4, 1],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )
