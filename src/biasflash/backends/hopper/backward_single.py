"""One-pass backward on Hopper: dq, dk and dv of a score tile from five products.

A program owns 128 keys; two warpgroups of 64 keys each walk over the queries, from the last to the first. One warp
copies tiles in, another one adds float32 dQ tiles to device memory, always in the same order: results agree in every
bit from run to run.
"""

from biasflash.backends.hopper.backward import store_rows
from biasflash.backends.hopper.backward_copies import load_pair
from biasflash.backends.hopper.backward_single_step import (
    form,
    line_of,
    own_operand,
    pass_turn,
    run_round,
    unit,
    units_of,
    wait_turn,
    wait_written,
)
from biasflash.backends.hopper.backward_step import OWN
from biasflash.backends.hopper.gluon import (
    fence_async_shared,
    gl,
    jit,
    mbarrier,
    store_wait,
    tma_add,
    tma_load,
    tma_store,
)
from biasflash.backends.hopper.pieces import slots
from biasflash.backends.hopper.pipeline import at, hand_back, ring_barriers, start_ring, wait_empty, wait_full

NUMBERS = ["inner", "items", "M", "N", "heads", "group", "batch", "shift"]
MOVES = ["k_moves", "v_moves", "q_moves", "dout_moves", "bias_moves", "dk_moves", "dv_moves", "dq_moves"]


@jit
def produce(
    own_descs, own_moves, met_descs, met_moves, bias_desc, bias_moves, row_descs, own, met, bias, rows, bars, numbers,
    FORM: gl.constexpr,
):  # fmt: skip
    """The copying warp: keys and values of a unit, then query tiles, each with what belongs to it."""
    own_full, own_empty, met_full, met_empty, bias_full, bias_empty = bars
    inner, _, _, _, heads, group, _, _ = numbers
    own_bytes: gl.constexpr = own_descs[0].block_type.nbytes + own_descs[1].block_type.nbytes
    met_bytes: gl.constexpr = met_descs[0].block_type.nbytes + met_descs[1].block_type.nbytes
    row_bytes: gl.constexpr = 2 * row_descs[0].block_type.nbytes
    use = 0
    for n in range(units_of(numbers, FORM)):
        _, h, b, own_row, first, rounds, _ = unit(n, numbers, FORM)
        wait_empty(own_empty, n, FORM.A_BUFFERS)
        bar = own_full.index(n % FORM.A_BUFFERS)
        mbarrier.expect(bar, 2 * own_bytes)
        for w in gl.static_range(2):
            load_pair(own_descs, own_moves, b, inner, h, own_row + w * 64, bar, own, n % FORM.A_BUFFERS * 2 + w)
        b0 = b // inner
        b1 = b - b0 * inner
        for member in range(group):
            head = h * group + member
            for j in range(rounds * FORM.TILES):
                row = (first + rounds - 1 - j // FORM.TILES) * FORM.ROUND + j % FORM.TILES * FORM.BLOCK
                wait_empty(met_empty, use, FORM.STAGES)
                slot = use % FORM.STAGES
                bar = met_full.index(slot)
                mbarrier.expect(bar, met_bytes + row_bytes)
                load_pair(met_descs, met_moves, b, inner, head, row, bar, met, slot)
                tma_load(row_descs[0], [b * heads + head, row], bar, rows[0].index(slot))
                tma_load(row_descs[1], [b * heads + head, row], bar, rows[1].index(slot))
                if FORM.HAS_BIAS:
                    wait_empty(bias_empty, use, FORM.BIAS_STAGES)
                    slot = use % FORM.BIAS_STAGES
                    bar = bias_full.index(slot)
                    mbarrier.expect(bar, 2 * bias_desc.block_type.nbytes)
                    for w in gl.static_range(2):
                        place_at = at(b0, b1, head, row, own_row + w * 64, bias_moves)
                        tma_load(bias_desc, place_at, bar, bias.index(slot * 2 + w))
                use += 1


@jit
def add(sum_desc, turn_ptr, dq_tiles, bars, numbers, FORM: gl.constexpr):
    """The adding warp: dQ pieces to the float32 buffer.

    A piece is added when its turn has come: the key tiles before have added to these queries. The first key tile meets
    all queries, and stores. RESIDENT: this program alone adds to its buffer, and only has to see a key tile's pieces
    written before the next one's.
    """
    dq_full, dq_empty, done = bars
    _, _, M, N, heads, group, _, _ = numbers
    per_line = gl.cdiv(M, FORM.ROUND)
    use = 0
    for n in range(units_of(numbers, FORM)):
        tile, h, b, own_row, first, rounds, _ = unit(n, numbers, FORM)
        for member in range(group):
            head = h * group + member
            line = line_of(b, head, member, heads, group, FORM)
            for j in range(rounds):
                number = first + rounds - 1 - j
                row = number * FORM.ROUND
                if not FORM.RESIDENT:
                    wait_turn(turn_ptr + line * per_line + number, tile)
                for w in gl.static_range(2):
                    piece = use * 2 + w
                    wait_full(dq_full, piece, FORM.DQ_SLOTS)
                    place_at = [line, row, w * FORM.COLUMNS]
                    if FORM.TILES == 2:
                        place_at = [line, row + w * FORM.BLOCK, 0]
                    if tile == 0:
                        tma_store(sum_desc, place_at, dq_tiles.index(piece % FORM.DQ_SLOTS))
                    else:
                        tma_add(sum_desc, place_at, dq_tiles.index(piece % FORM.DQ_SLOTS))
                if FORM.RESIDENT:
                    store_wait(0)
                else:
                    wait_written()
                    pass_turn(turn_ptr + line * per_line + number, tile + 1)
                hand_back(dq_empty, use * 2, FORM.DQ_SLOTS)
                hand_back(dq_empty, use * 2 + 1, FORM.DQ_SLOTS)
                use += 1
        if FORM.RESIDENT:
            wait_written()
            if own_row + OWN >= N:
                mbarrier.arrive(done, count=1)
    wait_written()


@jit
def sums_at(sum_ptr, start, M, FORM: gl.constexpr):
    """Rows ``start`` to ``start + 63`` of a line of the float32 buffer, past the first-level cache."""
    L: gl.constexpr = gl.BlockedLayout([1, 4], [128 // FORM.D, FORM.D // 4], [4, 1], [1, 0])
    row = start + gl.arange(0, 64, layout=gl.SliceLayout(1, L))[:, None]
    column = gl.arange(0, FORM.D, layout=gl.SliceLayout(0, L))[None, :]
    return gl.load(sum_ptr + row * FORM.D + column, mask=row < M, other=0.0, cache_modifier=".cg")


@jit
def convert_rows(w: gl.constexpr, sum_ptr, dq_desc, dq_moves, tile, b0, b1, h, scale, numbers, FORM: gl.constexpr):
    """RESIDENT: this program's sums to dq, by way of ``tile``; a warpgroup takes the rows that it made itself."""
    _, _, M, _, _, group, _, _ = numbers
    for member in range(group):
        source = sum_ptr + (gl.program_id(0) * group + member).to(gl.int64) * M * FORM.D
        x = sums_at(source, w * 64, M, FORM)
        for start in range(w * 64, M, FORM.ROUND):
            y = sums_at(source, start + FORM.ROUND, M, FORM)
            store_wait(0)
            place_at = at(b0, b1, h * group + member, start, 0, dq_moves)
            store_rows(tile, (x * scale).to(tile.dtype), dq_desc, place_at, FORM.D)
            x = y


@jit
def consume(
    w: gl.constexpr, out_descs, out_moves, sum_ptr, own, met, bias, rows, ds_tiles, dq_tiles, own_bars, bars, done,
    numbers, scale, FORM: gl.constexpr,
):  # fmt: skip
    """A computing warpgroup: keys ``64 w`` to ``64 w + 63`` of the unit."""
    own_full, own_empty = own_bars
    inner, _, _, N, _, group, _, shift = numbers
    use = 0
    for n in range(units_of(numbers, FORM)):
        _, h, b, own_row, first, rounds, masked = unit(n, numbers, FORM)
        b0 = b // inner
        b1 = b - b0 * inner
        own_at = n % FORM.A_BUFFERS * 2
        wait_full(own_full, n, FORM.A_BUFFERS)
        k = own_operand(own[0].index(own_at + w), FORM.D, FORM)
        v = own_operand(own[1].index(own_at + w), FORM.DV, FORM)
        dk = gl.zeros([64, FORM.D], gl.float32, layout=FORM.DK)
        dv = gl.zeros([64, FORM.DV], gl.float32, layout=FORM.DV_ROWS)
        for _member in range(group):
            for MASKED in gl.static_range(2):
                begin = rounds - masked if MASKED else 0
                end = rounds if MASKED else rounds - masked
                for j in range(begin, end):
                    row = (first + rounds - 1 - j) * FORM.ROUND
                    dk, dv = run_round(
                        w, dk, dv, k, v, own_at, use, own_row, row, N, shift, scale, own, met, bias, rows, ds_tiles,
                        dq_tiles, bars, MASKED == 1, FORM,
                    )  # fmt: skip
                    use += FORM.TILES
        place_at = at(b0, b1, h, own_row + w * 64, 0, out_moves[1])
        store_rows(own[1].index(own_at + w), dv.to(own[0].dtype), out_descs[1], place_at, FORM.DV)
        # the other warpgroup reads these keys for its last dQ: its dS tile must have come back
        other: gl.constexpr = 1 - w if FORM.TILES == 2 else 0
        wait_empty(bars[5], use - FORM.TILES + other + FORM.DS_SLOTS, FORM.DS_SLOTS)
        place_at = at(b0, b1, h, own_row + w * 64, 0, out_moves[0])
        store_rows(own[0].index(own_at + w), (dk * scale).to(own[0].dtype), out_descs[0], place_at, FORM.D)
        if FORM.RESIDENT and own_row + OWN >= N:
            mbarrier.wait(done, n // gl.cdiv(N, OWN) & 1)
            convert_rows(
                w, sum_ptr, out_descs[2], out_moves[2], own[0].index(own_at + w), b0, b1, h, scale, numbers, FORM
            )
        store_wait(0)
        hand_back(own_empty, n, FORM.A_BUFFERS)


@jit(do_not_specialize=NUMBERS + MOVES)
def dqkv_kernel(
    k_desc, v_desc, q_desc, dout_desc, bias_desc, reference_desc, delta_desc, dk_desc, dv_desc, dq_desc,
    sum_desc, sum_ptr, turn_ptr,
    # scale here: items, M and what follows begin at whole 8 bytes, and load in twos
    k_moves, v_moves, q_moves, dout_moves, bias_moves, scale, dk_moves, dv_moves, dq_moves,
    inner, items, M, N, heads, group, batch, shift,
    D_BLOCK: gl.constexpr, DV_BLOCK: gl.constexpr, BLOCK_M: gl.constexpr, TILES: gl.constexpr, A_BUFFERS: gl.constexpr,
    STAGES: gl.constexpr, BIAS_STAGES: gl.constexpr, DS_SLOTS: gl.constexpr, DQ_SLOTS: gl.constexpr,
    HAS_BIAS: gl.constexpr, IS_CAUSAL: gl.constexpr, RESIDENT: gl.constexpr, IN_REGISTERS: gl.constexpr,
    DK_FIRST: gl.constexpr, ORDER: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr, HELPER_REGISTERS: gl.constexpr,
):  # fmt: skip
    """dv = P^T dO, dk = scale dS^T Q and the sums dS K.

    Descriptors are ``(b0, b1, head, row, column)``, with boxes 64 x D_BLOCK (k, q, dk, dq), 64 x DV_BLOCK (v, dout, dv)
    and 64 x 64 (bias), but ``(b heads + h, row)`` in float32, box 1 x 64, for reference and delta, and ``(line, M,
    D_BLOCK)`` in float32 for sum: box 1 x 64 x D_BLOCK, half as wide with TILES = 1. Nothing has to be in sum.

    RESIDENT: items are batch x key heads, a program adds all of an item's key tiles to its own ``group`` lines of
    ``sum`` (at ``sum_ptr``) and writes dq itself. Otherwise items are key tiles x batch x key heads, lines are
    ``b heads + h``, nothing is written to dq, and ``turn_ptr`` holds zeros, int32 ``[lines, cdiv(M, 64 TILES)]``.

    Grid: RESIDENT: any, each program takes every grid-th item. Otherwise ``items``: a program may wait for programs
    before it, which have been started, since programs start in rising order; of a smaller grid they would have to be on
    the device all at once, which another kernel can prevent.
    """
    FORM: gl.constexpr = form(D_BLOCK, DV_BLOCK, BLOCK_M, TILES, A_BUFFERS, STAGES, BIAS_STAGES, DS_SLOTS, DQ_SLOTS,
                              HAS_BIAS, IS_CAUSAL, RESIDENT, IN_REGISTERS, DK_FIRST, ORDER)  # fmt: skip
    gl.static_assert(TILES <= 2 and TILES <= STAGES and TILES <= DS_SLOTS and DS_SLOTS % TILES == 0)
    gl.static_assert(DQ_SLOTS % 2 == 0 and BLOCK_M == 64 and (TILES == 2 or not RESIDENT))
    gl.static_assert(TILES == 2 or D_BLOCK == 128)  # half of 64 columns is no whole 128-byte row of keys: wrong sums
    own = (slots(k_desc, 2 * A_BUFFERS), slots(v_desc, 2 * A_BUFFERS))
    met = (slots(q_desc, STAGES), slots(dout_desc, STAGES))
    rows = (slots(reference_desc, STAGES), slots(delta_desc, STAGES))
    ds_tiles = gl.allocate_shared_memory(q_desc.dtype, [2 * DS_SLOTS, 1, 1, 1, BLOCK_M, 64], FORM.DS)
    dq_tiles = slots(sum_desc, DQ_SLOTS)
    own_full, own_empty = ring_barriers(A_BUFFERS), ring_barriers(A_BUFFERS)
    met_full, met_empty = ring_barriers(STAGES), ring_barriers(STAGES)
    ds_full, ds_empty = ring_barriers(DS_SLOTS), ring_barriers(DS_SLOTS)
    dq_full, dq_empty = ring_barriers(DQ_SLOTS), ring_barriers(DQ_SLOTS)
    done = ring_barriers(1).index(0)
    start_ring(own_full, own_empty, A_BUFFERS, 2)
    start_ring(met_full, met_empty, STAGES, 2)
    start_ring(dq_full, dq_empty, DQ_SLOTS, 1)
    for i in gl.static_range(DS_SLOTS):  # both warpgroups fill; whoever makes a dQ of it hands back
        mbarrier.init(ds_full.index(i), count=2)
        mbarrier.init(ds_empty.index(i), count=1 if TILES == 2 else 2)
    mbarrier.init(done, count=1)
    bias, bias_full, bias_empty = met[0], met_full, met_empty
    if HAS_BIAS:
        bias = slots(bias_desc, 2 * BIAS_STAGES)
        bias_full, bias_empty = ring_barriers(BIAS_STAGES), ring_barriers(BIAS_STAGES)
        start_ring(bias_full, bias_empty, BIAS_STAGES, 2)
    fence_async_shared()
    numbers = (inner, items, M, N, heads, group, batch, shift)
    out_descs, out_moves = (dk_desc, dv_desc, dq_desc), (dk_moves, dv_moves, dq_moves)
    own_bars = (own_full, own_empty)
    bars = (met_full, met_empty, bias_full, bias_empty, ds_full, ds_empty, dq_full, dq_empty)
    gl.warp_specialize(
        [
            (consume, (0, out_descs, out_moves, sum_ptr, own, met, bias, rows, ds_tiles, dq_tiles, own_bars, bars,
                       done, numbers, scale, FORM)),
            (consume, (1, out_descs, out_moves, sum_ptr, own, met, bias, rows, ds_tiles, dq_tiles, own_bars, bars,
                       done, numbers, scale, FORM)),
            (produce, ((k_desc, v_desc), (k_moves, v_moves), (q_desc, dout_desc), (q_moves, dout_moves), bias_desc,
                       bias_moves, (reference_desc, delta_desc), own, met, bias, rows,
                       (own_full, own_empty, met_full, met_empty, bias_full, bias_empty), numbers, FORM)),
            (add, (sum_desc, turn_ptr, dq_tiles, (dq_full, dq_empty, done), numbers, FORM)),
        ],
        [4, 1, 1],
        [CONSUMER_REGISTERS, HELPER_REGISTERS, HELPER_REGISTERS],
    )  # fmt: skip
