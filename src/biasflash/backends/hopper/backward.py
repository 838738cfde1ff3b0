"""Backward passes over queries and keys on Hopper: dq (owner: 128 queries) and dk, dv (owner: 128 keys).

Both are one skeleton (``backward_step``). Weights and score gradients go into their products from registers, nothing is
added in device memory, and every result has one writer: repeated runs agree in every bit. Programs are persistent;
which items they take, and in which order, is in ``deal``.

Boxes of descriptors have 64 own rows (own tiles, outputs, bias and dS tile of one warpgroup) or BLOCK met rows.
"""

from biasflash.backends.hopper.backward_copies import order_bias, produce
from biasflash.backends.hopper.backward_step import dealing, own_extent, run_round, work_item
from biasflash.backends.hopper.deal import deal, first_lot, following
from biasflash.backends.hopper.gluon import (
    fence_async_shared,
    gl,
    jit,
    mbarrier,
    store_wait,
    tma_store,
)
from biasflash.backends.hopper.marks import item_line
from biasflash.backends.hopper.odd_rows import odd_slots, raw_slots
from biasflash.backends.hopper.pieces import added, slots
from biasflash.backends.hopper.pipeline import at, hand_back, ring_barriers, start_ring, wait_full

NUMBERS = [
    "inner", "items", "M", "N", "heads", "kv_heads", "group", "batch", "shift", "caps_pitch", "line_0", "line_1",
    "odd_pitch", "odd_whole", "odd_b0", "odd_b1", "odd_h",
]  # fmt: skip
DQ_MOVES = ["q_moves", "dout_moves", "k_moves", "v_moves", "bias_moves", "dq_moves"]
DKDV_MOVES = ["k_moves", "v_moves", "q_moves", "dout_moves", "bias_moves", "ds_moves", "dk_moves", "dv_moves"]


@jit
def store_rows(tile, values, desc, place_at, WIDTH: gl.constexpr):
    """Start the copy of [64, WIDTH] ``values`` to device memory through ``tile``; its readers are done."""
    tile.reshape([64, WIDTH]).store(values)
    fence_async_shared()
    tma_store(desc, place_at, tile)


@jit
def consume(
    w: gl.constexpr, out_descs, out_moves, ds_desc, ds_moves, own, met, bias, rows, caps, mask, ds_tiles, bars, numbers,
    scale,
    D: gl.constexpr, DV: gl.constexpr, BLOCK: gl.constexpr, ROWS: gl.constexpr, TILES: gl.constexpr,
    A_BUFFERS: gl.constexpr, STAGES: gl.constexpr, BIAS_STAGES: gl.constexpr, HAS_BIAS: gl.constexpr,
    IS_CAUSAL: gl.constexpr, AHEAD: gl.constexpr, KEEP: gl.constexpr, KEYS: gl.constexpr, STORE_DS: gl.constexpr,
    HAS_KEEP: gl.constexpr, FIRST: gl.constexpr, DEAL: gl.constexpr,
):  # fmt: skip
    """A computing warpgroup: rows ``64 w`` to ``64 w + 63`` of the CTA's own side."""
    S: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BLOCK, 16])
    X_1: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, D, 16])
    X_2: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, DV, 16])
    P_1: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=X_1, k_width=2)
    P_2: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=X_2, k_width=2)
    own_full, own_empty, _, _, _, _ = bars
    inner, items, _, N, _, group, _, shift = numbers
    extent = own_extent(numbers, ROWS, KEYS)
    dealt = deal(items, extent, DEAL)
    lot, turn, own_use, met_use, bias_use = first_lot(DEAL), 0, 0, 0, 0
    while lot < dealt[0]:
        h, b, own_row, start, tiles, masked = work_item(
            lot, turn, dealt, extent, numbers, mask, BLOCK, ROWS, TILES, KEYS, DEAL, HAS_KEEP
        )  # fmt: skip
        limits = caps
        if HAS_KEEP and KEYS:
            limits = ()
            for g in gl.static_range(ROWS):
                limit_ptr = mask[0] + item_line(b + g, inner, mask).to(gl.int64) * mask[2] + own_row + w * 64
                limits = added(limits, gl.load(limit_ptr + gl.arange(0, 64, layout=gl.SliceLayout(1, S))))
        wait_full(own_full, own_use, A_BUFFERS)
        own_at = own_use % A_BUFFERS * ROWS * 2 + w
        x_1 = ()
        x_2 = ()
        references = ()
        deltas = ()
        for g in gl.static_range(ROWS):
            x_1 = added(x_1, gl.zeros([64, D], gl.float32, layout=X_1))
            if KEYS:
                x_2 = added(x_2, gl.zeros([64, DV], gl.float32, layout=X_2))
            else:
                references = added(references, rows[0].index(own_at + 2 * g).reshape([64]).load(gl.SliceLayout(1, S)))
                deltas = added(deltas, rows[1].index(own_at + 2 * g).reshape([64]).load(gl.SliceLayout(1, S)))
        b0 = b // inner
        b1 = b - b0 * inner
        members = 1
        if KEYS:
            members = group
        for member in range(members):
            ds_place = at(b0, b1, h * group + member, 0, 0, ds_moves)
            if STORE_DS and (IS_CAUSAL or HAS_KEEP):  # queries that see none of these keys
                store_wait(0)
                empty = gl.zeros([64, BLOCK], ds_tiles.dtype, layout=S)
                ds_tiles.index(w).reshape([BLOCK, 64]).permute((1, 0)).store(empty)
                fence_async_shared()
                for row in range(0, start, BLOCK):
                    place_at = [ds_place[0], ds_place[1], ds_place[2], row, own_row + w * 64]
                    tma_store(ds_desc, place_at, ds_tiles.index(w))
                store_wait(0)
            done = 0
            for phase in gl.static_range(2):
                if phase == 1 or IS_CAUSAL or not (KEYS or HAS_KEEP):
                    until = tiles if phase == 1 else masked
                    for j in range(done, until, TILES):
                        met_row = start + j * BLOCK if KEYS else start - j * BLOCK
                        x_1, x_2 = run_round(
                            w, x_1, x_2, references, deltas, limits, own_at, met_use, bias_use, own_row, met_row, N,
                            shift, scale, ds_desc, ds_place, own, met, bias, rows, ds_tiles, bars, D, DV, BLOCK, ROWS,
                            TILES, STAGES, BIAS_STAGES, HAS_BIAS, IS_CAUSAL, phase == 0, AHEAD, KEEP, KEYS, STORE_DS,
                            HAS_KEEP, FIRST, S, P_1, P_2,
                        )  # fmt: skip
                        met_use += ROWS * TILES
                        bias_use += TILES
                    done = gl.cdiv(masked, TILES) * TILES
        for g in gl.static_range(ROWS):
            c0 = (b + g) // inner
            c1 = b + g - c0 * inner
            place_at = at(c0, c1, h, own_row + w * 64, 0, out_moves[0])
            store_rows(own[0].index(own_at + 2 * g), (x_1[g] * scale).to(own[0].dtype), out_descs[0], place_at, D)
            if KEYS:
                place_at = at(c0, c1, h, own_row + w * 64, 0, out_moves[1])
                store_rows(own[1].index(own_at + 2 * g), x_2[g].to(own[0].dtype), out_descs[1], place_at, DV)
        store_wait(0)
        hand_back(own_empty, own_use, A_BUFFERS)
        own_use += 1
        lot, turn = following(lot, turn, dealt, extent, DEAL)


@jit
def launch(
    own_descs, own_moves, met_descs, met_moves, bias_desc, bias_moves, row_descs, caps_desc, mask, ends_desc, odd,
    ds_desc, ds_moves, out_descs, out_moves, numbers, scale,
    D: gl.constexpr, DV: gl.constexpr, BLOCK: gl.constexpr, ROWS: gl.constexpr, TILES: gl.constexpr,
    A_BUFFERS: gl.constexpr, STAGES: gl.constexpr, BIAS_STAGES: gl.constexpr, HAS_BIAS: gl.constexpr,
    IS_CAUSAL: gl.constexpr, AHEAD: gl.constexpr, KEEP: gl.constexpr, KEYS: gl.constexpr, STORE_DS: gl.constexpr,
    HAS_KEEP: gl.constexpr, ORDER: gl.constexpr, CONSUMER_REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr,
    DS_SLOTS: gl.constexpr, FIRST: gl.constexpr, RAW_STAGES: gl.constexpr, HELPER_REGISTERS: gl.constexpr,
):  # fmt: skip
    """Allocate the rings and start two computing warpgroups and the copying warp."""
    DEAL: gl.constexpr = dealing(IS_CAUSAL, D, DV, ORDER)
    U: gl.constexpr = ROWS * TILES
    gl.static_assert((U if U < 3 else 4 if AHEAD else 3) <= STAGES, "a step waits for a slot of its own round")
    gl.static_assert(not HAS_BIAS or BIAS_STAGES >= 2 or TILES == 1, "a step waits for a slot of its own round")
    OWN_TILES: gl.constexpr = A_BUFFERS * ROWS * 2
    LINES: gl.constexpr = STAGES if KEYS else OWN_TILES
    own = (slots(own_descs[0], OWN_TILES), slots(own_descs[1], OWN_TILES))
    met = (slots(met_descs[0], STAGES), slots(met_descs[1], STAGES))
    rows = (slots(row_descs[0], LINES), slots(row_descs[1], LINES))
    caps = met[0]
    if HAS_KEEP and not KEYS:
        caps = slots(caps_desc, STAGES)
    # One more for copies that are not ready when they have landed.
    own_full, own_empty = ring_barriers(A_BUFFERS + (1 if HAS_KEEP and KEYS else 0)), ring_barriers(A_BUFFERS)
    met_full, met_empty = ring_barriers(STAGES + (1 if HAS_KEEP and not KEYS else 0)), ring_barriers(STAGES)
    if HAS_KEEP:
        mbarrier.init(own_full.index(A_BUFFERS) if KEYS else met_full.index(STAGES), count=1)
    start_ring(own_full, own_empty, A_BUFFERS, 2)
    start_ring(met_full, met_empty, STAGES, 2)
    bias, bias_full, bias_empty, ds_tiles = met[0], met_full, met_empty, met[0]
    odd_parts = ()
    if RAW_STAGES > 0:
        gl.static_assert(BLOCK == 64 or not KEYS, "bias tiles have 64 rows")
        COLUMNS: gl.constexpr = 64 if KEYS else BLOCK
        bias = odd_slots(bias_desc.dtype, 2 * BIAS_STAGES, COLUMNS)
        raw = raw_slots(bias_desc.dtype, 2 * RAW_STAGES, COLUMNS)
        raw_bars = (ring_barriers(RAW_STAGES), ring_barriers(RAW_STAGES))
        start_ring(raw_bars[0], raw_bars[1], RAW_STAGES, 1)
        odd_parts = (raw, raw_bars, ends_desc, odd)
    elif HAS_BIAS:
        bias = slots(bias_desc, 2 * BIAS_STAGES)
    if HAS_BIAS:
        bias_full, bias_empty = ring_barriers(BIAS_STAGES), ring_barriers(BIAS_STAGES)
        start_ring(bias_full, bias_empty, BIAS_STAGES, 2)
    if STORE_DS:
        ds_tiles = slots(ds_desc, 2 * DS_SLOTS)
    fence_async_shared()
    bars = (own_full, own_empty, met_full, met_empty, bias_full, bias_empty)
    if RAW_STAGES > 0:
        gl.warp_specialize([
            (consume, (
                0, out_descs, out_moves, ds_desc, ds_moves, own, met, bias, rows, caps, mask, ds_tiles, bars, numbers,
                scale, D, DV, BLOCK, ROWS, TILES, A_BUFFERS, STAGES, BIAS_STAGES, HAS_BIAS, IS_CAUSAL, AHEAD, KEEP,
                KEYS, STORE_DS, HAS_KEEP, FIRST, DEAL,
            )),
            (consume, (
                1, out_descs, out_moves, ds_desc, ds_moves, own, met, bias, rows, caps, mask, ds_tiles, bars, numbers,
                scale, D, DV, BLOCK, ROWS, TILES, A_BUFFERS, STAGES, BIAS_STAGES, HAS_BIAS, IS_CAUSAL, AHEAD, KEEP,
                KEYS, STORE_DS, HAS_KEEP, FIRST, DEAL,
            )),
            (produce, (
                own_descs, own_moves, met_descs, met_moves, bias_desc, bias_moves, row_descs, caps_desc, own, met,
                bias, rows, caps, mask, odd_parts, bars, numbers, D, DV, BLOCK, ROWS, TILES, A_BUFFERS, STAGES,
                BIAS_STAGES, HAS_BIAS, KEYS, HAS_KEEP, RAW_STAGES, DEAL,
            )),
            (order_bias, (
                bias, mask, odd_parts, bars, numbers, BLOCK, ROWS, TILES, BIAS_STAGES, KEYS, HAS_KEEP, RAW_STAGES,
                DEAL,
            )),
        ], [4, 1, 4], [CONSUMER_REGISTERS, PRODUCER_REGISTERS, HELPER_REGISTERS])  # fmt: skip
    else:
        gl.warp_specialize([
            (consume, (
                0, out_descs, out_moves, ds_desc, ds_moves, own, met, bias, rows, caps, mask, ds_tiles, bars, numbers,
                scale, D, DV, BLOCK, ROWS, TILES, A_BUFFERS, STAGES, BIAS_STAGES, HAS_BIAS, IS_CAUSAL, AHEAD, KEEP,
                KEYS, STORE_DS, HAS_KEEP, FIRST, DEAL,
            )),
            (consume, (
                1, out_descs, out_moves, ds_desc, ds_moves, own, met, bias, rows, caps, mask, ds_tiles, bars, numbers,
                scale, D, DV, BLOCK, ROWS, TILES, A_BUFFERS, STAGES, BIAS_STAGES, HAS_BIAS, IS_CAUSAL, AHEAD, KEEP,
                KEYS, STORE_DS, HAS_KEEP, FIRST, DEAL,
            )),
            (produce, (
                own_descs, own_moves, met_descs, met_moves, bias_desc, bias_moves, row_descs, caps_desc, own, met,
                bias, rows, caps, mask, odd_parts, bars, numbers, D, DV, BLOCK, ROWS, TILES, A_BUFFERS, STAGES,
                BIAS_STAGES, HAS_BIAS, KEYS, HAS_KEEP, RAW_STAGES, DEAL,
            )),
        ], [4, 1], [CONSUMER_REGISTERS, PRODUCER_REGISTERS])  # fmt: skip


@jit(do_not_specialize=NUMBERS + DQ_MOVES)
def dq_kernel(
    q_desc, dout_desc, k_desc, v_desc, bias_desc, reference_desc, delta_desc, dq_desc, caps_desc, caps_ptr, spans_ptr,
    q_moves, dout_moves, k_moves, v_moves, bias_moves, dq_moves,
    inner, items, M, N, heads, group, batch, shift, caps_pitch, line_0, line_1,
    ends_desc, odd_ptr, odd_pitch, odd_whole, odd_b0, odd_b1, odd_h, scale,
    D_BLOCK: gl.constexpr, DV_BLOCK: gl.constexpr, BLOCK_N: gl.constexpr, ROWS: gl.constexpr, TILES: gl.constexpr,
    A_BUFFERS: gl.constexpr, STAGES: gl.constexpr, BIAS_STAGES: gl.constexpr, HAS_BIAS: gl.constexpr,
    IS_CAUSAL: gl.constexpr, AHEAD: gl.constexpr, KEEP: gl.constexpr, ORDER: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr, HAS_KEEP: gl.constexpr,
    RAW_STAGES: gl.constexpr, HELPER_REGISTERS: gl.constexpr,
):  # fmt: skip
    """dq = scale dS K of every query.

    ``q, dout, k, v, bias, dq`` are descriptors ``(b0, b1, head, row, column)``; boxes: 64 x D_BLOCK (q, dq),
    64 x DV_BLOCK (dout), BLOCK_N x D_BLOCK (k), BLOCK_N x DV_BLOCK (v), 64 x BLOCK_N (bias); ``reference, delta`` are
    ``(b heads + h, row)`` in float32, box 1 x 64. Items: tiles of 128 queries x batch // ROWS x heads; grid: up to
    items, which are dealt to the programs (``deal``). ROWS items of the batch share a bias tile that does not move
    along it. HAS_KEEP: a mask of keys, see ``marks``; ``caps`` are then its lines, box 1 x BLOCK_N. RAW_STAGES: as for
    ``forward_kernel``.
    """
    launch(
        (q_desc, dout_desc), (q_moves, dout_moves), (k_desc, v_desc), (k_moves, v_moves), bias_desc, bias_moves,
        (reference_desc, delta_desc), caps_desc, (caps_ptr, spans_ptr, caps_pitch, line_0, line_1), ends_desc,
        (odd_ptr, odd_pitch, odd_whole, odd_b0, odd_b1, odd_h), bias_desc, bias_moves, (dq_desc, dq_desc),
        (dq_moves, dq_moves), (inner, items, M, N, heads, group, batch, shift), scale, D_BLOCK, DV_BLOCK, BLOCK_N, ROWS,
        TILES, A_BUFFERS, STAGES, BIAS_STAGES, HAS_BIAS, IS_CAUSAL, AHEAD, KEEP, False, False, HAS_KEEP, ORDER,
        CONSUMER_REGISTERS, PRODUCER_REGISTERS, 0, False, RAW_STAGES, HELPER_REGISTERS,
    )  # fmt: skip


@jit(do_not_specialize=NUMBERS + DKDV_MOVES)
def dkdv_kernel(
    k_desc, v_desc, q_desc, dout_desc, bias_desc, reference_desc, delta_desc, ds_desc, dk_desc, dv_desc, caps_ptr,
    spans_ptr,
    k_moves, v_moves, q_moves, dout_moves, bias_moves, ds_moves, dk_moves, dv_moves,
    inner, items, M, N, heads, kv_heads, group, batch, shift, caps_pitch, line_0, line_1,
    ends_desc, odd_ptr, odd_pitch, odd_whole, odd_b0, odd_b1, odd_h, scale,
    D_BLOCK: gl.constexpr, DV_BLOCK: gl.constexpr, BLOCK_M: gl.constexpr, ROWS: gl.constexpr, TILES: gl.constexpr,
    A_BUFFERS: gl.constexpr, STAGES: gl.constexpr, BIAS_STAGES: gl.constexpr, HAS_BIAS: gl.constexpr,
    IS_CAUSAL: gl.constexpr, AHEAD: gl.constexpr, KEEP: gl.constexpr, ORDER: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr, STORE_DS: gl.constexpr,
    HAS_KEEP: gl.constexpr, DS_SLOTS: gl.constexpr, REFERENCE_FIRST: gl.constexpr, RAW_STAGES: gl.constexpr,
    HELPER_REGISTERS: gl.constexpr,
):  # fmt: skip
    """dk = scale dS^T Q and dv = P^T dO of every key; STORE_DS: also dS, the gradient of a bias of full shape.

    As ``dq_kernel``, sides exchanged; boxes: 64 x D_BLOCK (k, dk), 64 x DV_BLOCK (v, dv), BLOCK_M x D_BLOCK (q),
    BLOCK_M x DV_BLOCK (dout), BLOCK_M x 64 (bias, ds), 1 x BLOCK_M (reference, delta). Items: tiles of 128 keys x
    batch // ROWS x key heads; the query heads of a key head are summed in registers. With STORE_DS, ROWS is 1, and each
    warpgroup has DS_SLOTS blocks of shared memory for dS on its way out. REFERENCE_FIRST: 16 registers more.
    """
    launch(
        (k_desc, v_desc), (k_moves, v_moves), (q_desc, dout_desc), (q_moves, dout_moves), bias_desc, bias_moves,
        (reference_desc, delta_desc), reference_desc, (caps_ptr, spans_ptr, caps_pitch, line_0, line_1), ends_desc,
        (odd_ptr, odd_pitch, odd_whole, odd_b0, odd_b1, odd_h), ds_desc, ds_moves, (dk_desc, dv_desc),
        (dk_moves, dv_moves), (inner, items, M, N, heads, group, batch, shift), scale, D_BLOCK, DV_BLOCK, BLOCK_M, ROWS,
        TILES, A_BUFFERS, STAGES, BIAS_STAGES, HAS_BIAS, IS_CAUSAL, AHEAD, KEEP, True, STORE_DS, HAS_KEEP, ORDER,
        CONSUMER_REGISTERS, PRODUCER_REGISTERS, DS_SLOTS, REFERENCE_FIRST, RAW_STAGES, HELPER_REGISTERS,
    )  # fmt: skip
