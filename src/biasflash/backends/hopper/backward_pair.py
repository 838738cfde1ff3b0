"""dq and the gradient of a bias that many pairs share, in one pass, on Hopper: for short keys (pair bias of folding).

A CTA owns 64 queries, all keys and one bias tile, which stays in shared memory, and walks over the pairs (batch item,
head) that share the tile. Each of two warpgroups has one half of the keys:

    S = Q K'    dP = dO V'    dS = exp(S scale + bias - lse) (dP - delta)    dbias += dS (registers)    dq = dS K

Three products and one exponential a score instead of the five and two of a dq and a dbias kernel. What is hidden by
position is made -inf in the resident bias tile, once an item: the loop over pairs has no mask. The halves of dq meet in
shared memory, where a warp of its own adds, rounds and sends them. Every sum has one order: runs agree in every bit.
"""

from biasflash.backends.hopper.gluon import fence_async_shared, gl, jit, mbarrier, store_wait, tma_load, tma_store
from biasflash.backends.hopper.gluon import warpgroup_mma as mma
from biasflash.backends.hopper.gluon import warpgroup_mma_wait as mma_wait
from biasflash.backends.hopper.owner_tiles import pairs_of, split_index, store_partial, visible
from biasflash.backends.hopper.pieces import NEG_INF, repeated, replaced, slots, widen
from biasflash.backends.hopper.pipeline import at, hand_back, ring_barriers, start_ring, wait_empty, wait_full
from biasflash.tile.softmax import LOG2E

ROWS_M = gl.constexpr(64)  # queries of a tile
STEP = gl.constexpr(8)  # rows of dq that the sending warp adds at a time: the period of the swizzle
NUMBERS = ["n0", "n1", "items", "M", "N", "heads", "group", "owners", "shared", "chunk", "shift", "scale"]
MOVES = ["q_moves", "dout_moves", "k_moves", "v_moves", "bias_moves", "dq_moves"]


@jit
def item_of(index, M, owners, shared, chunk):
    """Item -> ``(row0, plane, owner, first, count)``; the tiles of a plane stand side by side and share keys in L2."""
    tiles = gl.cdiv(M, ROWS_M)
    plane = index // tiles
    row0 = (index - plane * tiles) * ROWS_M
    owner, first, count = pairs_of(plane, row0, 0, M, owners, shared, chunk, 0, False)
    return row0, plane, owner, first, count


@jit
def key_chunk(tiles, first, c: gl.constexpr, WIDTH: gl.constexpr, BLOCK_N: gl.constexpr, BOX: gl.constexpr):
    """Chunk ``c`` [BLOCK_N, WIDTH] of the keys that begin in buffer ``first``, BOX keys to a buffer."""
    return tiles.index(first + c * BLOCK_N // BOX).reshape([BOX, WIDTH]).slice(c * BLOCK_N % BOX, BLOCK_N, dim=0)


@jit
def bias_slice(tiles, w: gl.constexpr, c: gl.constexpr, BLOCK_N: gl.constexpr, CHUNKS_N: gl.constexpr,
               BOX: gl.constexpr):  # fmt: skip
    """Shared chunk ``c`` [64, BLOCK_N] of warpgroup ``w``'s half of the bias tile."""
    tile = tiles.index(w * (BLOCK_N * CHUNKS_N // BOX) + c * BLOCK_N // BOX).reshape([ROWS_M, BOX])
    return tile.slice(c * BLOCK_N % BOX, BLOCK_N, dim=1)


@jit
def statistic(rows, slot, S: gl.constexpr):
    """One value a query [64, 1]."""
    return rows.index(slot).reshape([ROWS_M]).load(gl.SliceLayout(1, S))[:, None]


@jit
def left(tiles, slot, WIDTH: gl.constexpr, LEFT: gl.constexpr, S: gl.constexpr):
    """Q or dO as a left operand: LEFT loads it into registers, otherwise products read it from shared memory."""
    tile = tiles.index(slot).reshape([ROWS_M, WIDTH])
    if LEFT:
        return tile.load(gl.DotOperandLayout(operand_index=0, parent=S, k_width=2))
    else:
        return tile


@jit
def give_dq(w: gl.constexpr, dq, use, buffers, rings, STAGES: gl.constexpr):
    """Pass a half of dq on; its products are done, and with them the last reads of the pair's slot."""
    hand_back(rings[1], use, STAGES)
    wait_empty(rings[4], use, 1)
    buffers[7].index(w).store(dq)
    hand_back(rings[3], use, 1)


@jit
def run_pairs(w: gl.constexpr, acc, used, scale, buffers, rings, D_BLOCK: gl.constexpr, DV_BLOCK: gl.constexpr,
              BLOCK_N: gl.constexpr, CHUNKS_N: gl.constexpr, BOX: gl.constexpr, STAGES: gl.constexpr,
              ROWS: gl.constexpr, LEFT: gl.constexpr, S: gl.constexpr):  # fmt: skip
    """ROWS pairs of the ring, ``used`` being the first: dq of each, and ``acc`` (one tile a key chunk) with their dS.

    A step is a key chunk. Its dP runs under its exponentials, the next step's S under the rest of its arithmetic, and
    its dq is waited for two steps later.
    """
    q_tiles, dout_tiles, k_tiles, v_tiles, bias_tiles, reference_rows, delta_rows, _ = buffers
    X: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, D_BLOCK, 16])
    P: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=X, k_width=2)
    BOXES: gl.constexpr = BLOCK_N * CHUNKS_N // BOX
    zero = gl.zeros([ROWS_M, BLOCK_N], gl.float32, S)
    ds = gl.convert_layout(zero.to(q_tiles.dtype), P)
    before = ds  # left operand of the last dq but one
    dq = gl.zeros([ROWS_M, D_BLOCK], gl.float32, X)
    wait_full(rings[0], used, STAGES)
    slot = used % STAGES
    keys = (slot * 2 + w) * BOXES
    q = left(q_tiles, slot, D_BLOCK, LEFT, S)
    dout = left(dout_tiles, slot, DV_BLOCK, LEFT, S)
    k = key_chunk(k_tiles, keys, 0, D_BLOCK, BLOCK_N, BOX).permute((1, 0))
    v = key_chunk(v_tiles, keys, 0, DV_BLOCK, BLOCK_N, BOX).permute((1, 0))
    s = mma(q, k, zero, use_acc=False, is_async=True)
    dp = mma(dout, v, zero, use_acc=False, is_async=True)
    reference = statistic(reference_rows, slot, S)
    delta = statistic(delta_rows, slot, S)
    for x in gl.static_range(ROWS):
        for c in gl.static_range(CHUNKS_N):
            # In flight, oldest first: S and dP of this step, dq of the last.
            if x + c > 1:
                s, before = mma_wait(2, deps=(s, before))
            else:
                s = mma_wait(1 if x + c == 0 else 2, deps=(s,))
            bias = widen(bias_slice(bias_tiles, w, c, BLOCK_N, CHUNKS_N, BOX).load(S))
            p = gl.exp2((s * scale + bias) * LOG2E - reference)
            now = keys
            if c + 1 < CHUNKS_N:
                k = key_chunk(k_tiles, keys, c + 1, D_BLOCK, BLOCK_N, BOX).permute((1, 0))
                s = mma(q, k, zero, use_acc=False, is_async=True)
            elif x + 1 < ROWS:
                wait_full(rings[0], used + x + 1, STAGES)
                slot = (used + x + 1) % STAGES
                keys = (slot * 2 + w) * BOXES
                q = left(q_tiles, slot, D_BLOCK, LEFT, S)
                k = key_chunk(k_tiles, keys, 0, D_BLOCK, BLOCK_N, BOX).permute((1, 0))
                s = mma(q, k, zero, use_acc=False, is_async=True)
            if x + c == 0:
                dp = mma_wait(1 if c + 1 < CHUNKS_N or x + 1 < ROWS else 0, deps=(dp,))
            elif x == 0 or c > 0:
                dp = mma_wait(2 if c + 1 < CHUNKS_N or x + 1 < ROWS else 1, deps=(dp,))
            else:
                dp, dq, ds = mma_wait(1 if c + 1 < CHUNKS_N or x + 1 < ROWS else 0, deps=(dp, dq, ds))
            if x > 0 and c == 0:
                give_dq(w, dq, used + x - 1, buffers, rings, STAGES)
            g = p * (dp - delta)
            acc = replaced(acc, c, acc[c] + g)
            if x + c > 0:
                before = ds
            ds = gl.convert_layout(g.to(q_tiles.dtype), P)
            if c + 1 < CHUNKS_N:
                v = key_chunk(v_tiles, keys, c + 1, DV_BLOCK, BLOCK_N, BOX).permute((1, 0))
                dp = mma(dout, v, zero, use_acc=False, is_async=True)
            elif x + 1 < ROWS:
                dout = left(dout_tiles, slot, DV_BLOCK, LEFT, S)
                reference = statistic(reference_rows, slot, S)
                delta = statistic(delta_rows, slot, S)
                v = key_chunk(v_tiles, keys, 0, DV_BLOCK, BLOCK_N, BOX).permute((1, 0))
                dp = mma(dout, v, zero, use_acc=False, is_async=True)
            dq = mma(ds, key_chunk(k_tiles, now, c, D_BLOCK, BLOCK_N, BOX), dq, use_acc=c > 0, is_async=True)
    dq, ds = mma_wait(0, deps=(dq, ds))
    give_dq(w, dq, used + ROWS - 1, buffers, rings, STAGES)
    return acc


@jit
def copy_operands(descs, moves, buffers, rings, bias_bars, sizes, BOX: gl.constexpr, BOXES: gl.constexpr,
                  STAGES: gl.constexpr, OWNS: gl.constexpr):  # fmt: skip
    """The copying warp: for every item its bias tile, then the operands of its pairs."""
    q_desc, dout_desc, k_desc, v_desc, bias_desc, reference_desc, delta_desc = descs
    q_moves, dout_moves, k_moves, v_moves, bias_moves = moves
    q_tiles, dout_tiles, k_tiles, v_tiles, bias_tiles, reference_rows, delta_rows, _ = buffers
    full, empty, q_empty, _, _ = rings
    bias_full, bias_empty = bias_bars
    items, M, _, n1, heads, group, owners, shared, chunk, _ = sizes
    nbytes: gl.constexpr = (
        q_desc.block_type.nbytes + dout_desc.block_type.nbytes + reference_desc.block_type.nbytes
        + delta_desc.block_type.nbytes + 2 * BOXES * (k_desc.block_type.nbytes + v_desc.block_type.nbytes)
    )  # fmt: skip
    used = 0
    met = 0
    for index in range(gl.program_id(0), items, gl.num_programs(0)):
        row0, _, owner, first, count = item_of(index, M, owners, shared, chunk)
        b0, b1, head = split_index(owner, 0 * owner, n1, heads, OWNS)
        wait_empty(bias_empty, met, 1)
        mbarrier.expect(bias_full.index(0), 2 * BOXES * bias_desc.block_type.nbytes)
        for i in gl.static_range(2 * BOXES):
            tma_load(bias_desc, at(b0, b1, head, row0, i * BOX, bias_moves), bias_full.index(0), bias_tiles.index(i))
        for pair in range(first, first + count):
            b0, b1, head = split_index(owner, pair, n1, heads, OWNS)
            slot, bar = used % STAGES, full.index(used % STAGES)
            wait_empty(empty, used, STAGES)
            mbarrier.expect(bar, nbytes)
            for i in gl.static_range(2 * BOXES):
                buffer = slot * (2 * BOXES) + i
                tma_load(k_desc, at(b0, b1, head // group, i * BOX, 0, k_moves), bar, k_tiles.index(buffer))
                tma_load(v_desc, at(b0, b1, head // group, i * BOX, 0, v_moves), bar, v_tiles.index(buffer))
            line = (b0 * n1 + b1) * heads + head
            tma_load(dout_desc, at(b0, b1, head, row0, 0, dout_moves), bar, dout_tiles.index(slot))
            tma_load(reference_desc, [line, row0], bar, reference_rows.index(slot))
            tma_load(delta_desc, [line, row0], bar, delta_rows.index(slot))
            wait_empty(q_empty, used, STAGES)
            tma_load(q_desc, at(b0, b1, head, row0, 0, q_moves), bar, q_tiles.index(slot))
            used += 1
        met += 1  # noqa: SIM113


@jit
def send_dq(dq_desc, dq_moves, buffers, rings, sizes, scale, D_BLOCK: gl.constexpr, STAGES: gl.constexpr,
            OWNS: gl.constexpr):  # fmt: skip
    """A warp that adds the halves of dq and sends the sum through the slot of Q, whose readers are done by then."""
    L: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D_BLOCK, D_BLOCK // 8], [1, 1], [1, 0])
    q_tiles, halves = buffers[0], buffers[7]
    _, _, q_empty, filled, taken = rings
    items, M, _, n1, heads, _, owners, shared, chunk, _ = sizes
    used = 0
    for index in range(gl.program_id(0), items, gl.num_programs(0)):
        row0, _, owner, first, count = item_of(index, M, owners, shared, chunk)
        for pair in range(first, first + count):
            wait_full(filled, used, 1)
            tile = q_tiles.index(used % STAGES)
            for i in gl.static_range(ROWS_M // STEP):
                part = halves.index(0).slice(i * STEP, STEP, dim=0).load(L)
                dq = (part + halves.index(1).slice(i * STEP, STEP, dim=0).load(L)) * scale
                tile.reshape([ROWS_M, D_BLOCK]).slice(i * STEP, STEP, dim=0).store(dq.to(q_tiles.dtype))
            fence_async_shared()
            hand_back(taken, used, 1)
            b0, b1, head = split_index(owner, pair, n1, heads, OWNS)
            tma_store(dq_desc, at(b0, b1, head, row0, 0, dq_moves), tile)
            store_wait(0)
            hand_back(q_empty, used, STAGES)
            used += 1


@jit
def add_tiles(w: gl.constexpr, outs, buffers, rings, bias_bars, sizes, scale, D_BLOCK: gl.constexpr,
              DV_BLOCK: gl.constexpr, BLOCK_N: gl.constexpr, CHUNKS_N: gl.constexpr, BOX: gl.constexpr,
              STAGES: gl.constexpr, ROWS: gl.constexpr, LEFT: gl.constexpr, OWNS: gl.constexpr, SPLIT: gl.constexpr,
              IS_CAUSAL: gl.constexpr):  # fmt: skip
    """Computing warpgroup ``w``: keys ``[w, w + 1) * BLOCK_N * CHUNKS_N``."""
    S: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BLOCK_N, 16])
    HALF_N: gl.constexpr = BLOCK_N * CHUNKS_N
    BOXES: gl.constexpr = HALF_N // BOX
    dbias_desc, bias_moves, partial_ptr = outs
    tiles = buffers[4]
    bias_full, bias_empty = bias_bars
    items, M, N, n1, heads, _, owners, shared, chunk, shift = sizes
    used = 0
    met = 0
    for index in range(gl.program_id(0), items, gl.num_programs(0)):
        row0, plane, owner, _, count = item_of(index, M, owners, shared, chunk)
        row = row0 + gl.arange(0, ROWS_M, gl.SliceLayout(1, S))
        edge = (row0 + ROWS_M > M) | (w * HALF_N + HALF_N > N)
        if IS_CAUSAL:
            edge = edge | (w * HALF_N + HALF_N - 1 > row0 + shift)
        wait_full(bias_full, met, 1)
        if edge:
            for c in gl.static_range(CHUNKS_N):
                seen = visible(row, w * HALF_N + c * BLOCK_N, M, N, shift, BLOCK_N, S, IS_CAUSAL)
                entries = bias_slice(tiles, w, c, BLOCK_N, CHUNKS_N, BOX)
                entries.store(gl.where(seen, widen(entries.load(S)), NEG_INF).to(tiles.dtype))
        acc = repeated(gl.zeros([ROWS_M, BLOCK_N], gl.float32, S), CHUNKS_N)
        for _ in range(count // ROWS):
            acc = run_pairs(w, acc, used, scale, buffers, rings, D_BLOCK, DV_BLOCK, BLOCK_N, CHUNKS_N, BOX, STAGES,
                            ROWS, LEFT, S)  # fmt: skip
            used += ROWS
        if ROWS > 1:
            for _ in range(count % ROWS):
                acc = run_pairs(w, acc, used, scale, buffers, rings, D_BLOCK, DV_BLOCK, BLOCK_N, CHUNKS_N, BOX, STAGES,
                                1, LEFT, S)  # fmt: skip
                used += 1
        for c in gl.static_range(CHUNKS_N):
            if SPLIT:
                store_partial(partial_ptr, acc[c], plane, row, w * HALF_N + c * BLOCK_N, M, N, BLOCK_N, S)
            else:
                bias_slice(tiles, w, c, BLOCK_N, CHUNKS_N, BOX).store(acc[c].to(tiles.dtype))
        fence_async_shared()  # the tile was written here, by dbias or by -inf, and a copy is next
        if not SPLIT:
            b0, b1, head = split_index(owner, 0 * owner, n1, heads, OWNS)
            for i in gl.static_range(BOXES):
                column = w * HALF_N + i * BOX
                tma_store(dbias_desc, at(b0, b1, head, row0, column, bias_moves), tiles.index(w * BOXES + i))
            store_wait(0)
        hand_back(bias_empty, met, 1)
        met += 1  # noqa: SIM113


@jit(do_not_specialize=NUMBERS + MOVES)
def dq_dbias_kernel(
    q_desc, dout_desc, k_desc, v_desc, bias_desc, reference_desc, delta_desc, dbias_desc, dq_desc, partial_ptr,
    q_moves, dout_moves, k_moves, v_moves, bias_moves, dq_moves, n0, n1, items, M, N, heads, group, owners, shared,
    chunk, shift, scale, D_BLOCK: gl.constexpr, DV_BLOCK: gl.constexpr, BLOCK_N: gl.constexpr, CHUNKS_N: gl.constexpr,
    STAGES: gl.constexpr, ROWS: gl.constexpr, LEFT: gl.constexpr, OWNS: gl.constexpr, SPLIT: gl.constexpr,
    IS_CAUSAL: gl.constexpr, CONSUMER_REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr,
):  # fmt: skip
    """dq = scale dS K and dbias = sum of dS over the pairs (batch item, head) that share it; N <= 2 BLOCK_N CHUNKS_N.

    Axes ``(b0, b1, head)`` have sizes ``(n0, n1, heads)``; OWNS marks those that the bias varies along, ``owners`` and
    ``shared`` are the products of the sizes of those and of the others. ``bias_moves`` is 0 along shared axes and also
    serves ``dbias_desc``. Boxes: q, dout, dq 64 rows; k and v BOX rows, bias and dbias [64, BOX], where BOX divides
    BLOCK_N CHUNKS_N and is a multiple of BLOCK_N; statistics [1, 64].

    Items: cdiv(M, 64) x owners x chunks, a chunk being ``chunk`` shared indices. Grid: any, items are taken in strides.
    Writes dq, and dbias or (SPLIT) sums of chunks ``partial_ptr[chunk, owner, M, N]``, in its dtype.
    """
    BOX: gl.constexpr = k_desc.block_type.shape[3]
    BOXES: gl.constexpr = BLOCK_N * CHUNKS_N // BOX
    HALF_DQ: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 4, order=[1, 0])
    gl.static_assert(BOX * BOXES == BLOCK_N * CHUNKS_N and BOX % BLOCK_N == 0, "boxes of keys hold whole chunks")
    gl.static_assert(bias_desc.block_type.shape[4] == BOX, "bias tiles and keys come in the same boxes")
    gl.static_assert(ROWS <= STAGES, "a round waits for a slot of its own")
    buffers = (
        slots(q_desc, STAGES), slots(dout_desc, STAGES), slots(k_desc, 2 * BOXES * STAGES),
        slots(v_desc, 2 * BOXES * STAGES), slots(bias_desc, 2 * BOXES), slots(reference_desc, STAGES),
        slots(delta_desc, STAGES), gl.allocate_shared_memory(gl.float32, [2, ROWS_M, D_BLOCK], HALF_DQ),
    )  # fmt: skip
    # full, empty: a pair's operands; q_empty: its Q, whose slot dq leaves by; filled, taken: the halves of dq.
    rings = (
        ring_barriers(STAGES), ring_barriers(STAGES), ring_barriers(STAGES), ring_barriers(1), ring_barriers(1)
    )  # fmt: skip
    bias_bars = (ring_barriers(1), ring_barriers(1))
    start_ring(rings[0], rings[1], STAGES, 2)
    for i in gl.static_range(STAGES):
        mbarrier.init(rings[2].index(i), count=1)
    start_ring(rings[4], rings[3], 1, 2)  # two warpgroups fill it, one warp takes
    start_ring(bias_bars[0], bias_bars[1], 1, 2)
    fence_async_shared()

    descs = (q_desc, dout_desc, k_desc, v_desc, bias_desc, reference_desc, delta_desc)
    moves = (q_moves, dout_moves, k_moves, v_moves, bias_moves)
    outs = (dbias_desc, bias_moves, partial_ptr)
    sizes = (items, M, N, n1, heads, group, owners, shared, chunk, shift)
    gl.warp_specialize([
        (add_tiles, (0, outs, buffers, rings, bias_bars, sizes, scale, D_BLOCK, DV_BLOCK, BLOCK_N, CHUNKS_N, BOX,
                     STAGES, ROWS, LEFT, OWNS, SPLIT, IS_CAUSAL)),
        (add_tiles, (1, outs, buffers, rings, bias_bars, sizes, scale, D_BLOCK, DV_BLOCK, BLOCK_N, CHUNKS_N, BOX,
                     STAGES, ROWS, LEFT, OWNS, SPLIT, IS_CAUSAL)),
        (copy_operands, (descs, moves, buffers, rings, bias_bars, sizes, BOX, BOXES, STAGES, OWNS)),
        (send_dq, (dq_desc, dq_moves, buffers, rings, sizes, scale, D_BLOCK, STAGES, OWNS)),
    ], [4, 1, 1], [CONSUMER_REGISTERS, PRODUCER_REGISTERS, PRODUCER_REGISTERS])  # fmt: skip
