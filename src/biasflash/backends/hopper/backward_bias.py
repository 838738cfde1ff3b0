"""Gradient of a bias that several batch items or heads share, on Hopper: one owner adds what they contribute.

A bias tile that does not change over the pairs ``(batch item, head)`` sharing it leaves their sum:

    dbias = exp(bias - r) * sum over pairs of exp(s + r - lse) * (dp - delta),   r = row maximum of the bias tile,

so the loop over pairs meets neither the bias nor what hides entries for all pairs alike: two FMA, one addition and one
exponential a score, and a minimum where there is a mask of keys. Sums stay in float32 registers and are added in a
fixed order. The factored sum overflows where logits of one row spread by more than about 88 within the tile; every
program says in a flag whether all its sums can be believed.

Operands change with every pair, so that reading them from the L2 cache sets the pace of wide heads: at D = 64 a tile of
128 x 128 reads 4 bytes a score, one of 128 x 256 3 bytes.
"""

from biasflash.backends.hopper.gluon import fence_async_shared, gl, jit, mbarrier, store_wait, tma_store
from biasflash.backends.hopper.gluon import warpgroup_mma as mma
from biasflash.backends.hopper.gluon import warpgroup_mma_wait as mma_wait
from biasflash.backends.hopper.marks import MARK
from biasflash.backends.hopper.owner_tiles import (
    BLOCK_M,
    HALF_M,
    copy_operands,
    pairs_of,
    pairs_seen,
    place_tile,
    seen_pair,
    split_index,
    store_partial,
    visible,
)
from biasflash.backends.hopper.pieces import NEG_INF, added, repeated, replaced, slots, widen
from biasflash.backends.hopper.pipeline import at, hand_back, ring_barriers, start_ring, wait_full
from biasflash.tile.softmax import LOG2E

# A sum up to LARGE is right whatever its factor: where the factor is below SMALLEST and flushes to zero, the product
# is below 2^-36.
LARGE = gl.constexpr(2.0**90)
SMALLEST = gl.constexpr(2.0**-126)
FINITE = gl.constexpr(3.4028234663852886e38)
SHARED_MEMORY = gl.constexpr(232448)  # bytes of one program


@jit
def bias_chunk(tile, c: gl.constexpr, BLOCK_N: gl.constexpr, S: gl.constexpr):
    """Columns ``[c * BLOCK_N, (c + 1) * BLOCK_N)`` of a bias tile [64, columns], float32."""
    return widen(tile.slice(c * BLOCK_N, BLOCK_N, dim=1).load(S))


@jit
def bias_top(tile, row, col0, M, N, shift, edge, BLOCK_N: gl.constexpr, CHUNKS_N: gl.constexpr, S: gl.constexpr,
             IS_CAUSAL: gl.constexpr):  # fmt: skip
    """Row maxima [64] of what is visible of a bias tile, in base 2; 0 for rows that see nothing.

    Hidden entries must not count: one that is far above the visible ones would make their sums overflow.
    """
    top = gl.full([HALF_M], NEG_INF, gl.float32, gl.SliceLayout(1, S))
    if edge:
        for c in gl.static_range(CHUNKS_N):
            seen = visible(row, col0 + c * BLOCK_N, M, N, shift, BLOCK_N, S, IS_CAUSAL)
            top = gl.maximum(top, gl.max(gl.where(seen, bias_chunk(tile, c, BLOCK_N, S), NEG_INF), 1))
    else:
        for c in gl.static_range(CHUNKS_N):
            top = gl.maximum(top, gl.max(bias_chunk(tile, c, BLOCK_N, S), 1))
    top = top * LOG2E
    return gl.where(top == NEG_INF, 0.0, top)


@jit
def own_rows(tiles, slot, w: gl.constexpr, D_BLOCK: gl.constexpr):
    """One warpgroup's rows [64, D_BLOCK] of q or dout, the left operand of a product."""
    return tiles.index(slot).reshape([BLOCK_M, D_BLOCK]).slice(w * HALF_M, HALF_M, dim=0)


@jit
def issue(q, dout, buffers, key_slot, start: gl.constexpr, D_BLOCK: gl.constexpr, DV_BLOCK: gl.constexpr,
          BLOCK_N: gl.constexpr, KEYS: gl.constexpr, S: gl.constexpr):  # fmt: skip
    """Start the products ``(q k', dout v')`` [64, BLOCK_N] of the keys from ``start`` on of a slot of KEYS keys."""
    zero = gl.zeros([HALF_M, BLOCK_N], gl.float32, S)
    k = buffers[2].index(key_slot).reshape([KEYS, D_BLOCK]).slice(start, BLOCK_N, dim=0)
    s = mma(q, k.permute((1, 0)), zero, use_acc=False, is_async=True)
    v = buffers[3].index(key_slot).reshape([KEYS, DV_BLOCK]).slice(start, BLOCK_N, dim=0)
    dp = mma(dout, v.permute((1, 0)), zero, use_acc=False, is_async=True)
    return s, dp


@jit
def statistics(buffers, slot, top, w: gl.constexpr, S: gl.constexpr):
    """``(top - reference, delta)`` of one warpgroup's rows."""
    reference = buffers[5].index(slot).reshape([BLOCK_M]).slice(w * HALF_M, HALF_M).load(gl.SliceLayout(1, S))
    delta = buffers[6].index(slot).reshape([BLOCK_M]).slice(w * HALF_M, HALF_M).load(gl.SliceLayout(1, S))
    return top - reference, delta


@jit
def caps_of(caps, slot, start: gl.constexpr, BLOCK_N: gl.constexpr, KEYS: gl.constexpr, PARTS: gl.constexpr,
            S: gl.constexpr):  # fmt: skip
    """What a pair's scores of the keys from ``start`` on are cut to.

    ``caps``: a ring of all KEYS of a tile; if these come in parts, nothing fits beside them and it is a pointer.
    """
    if PARTS == 1:
        return caps.index(slot).reshape([KEYS]).slice(start, BLOCK_N).load(gl.SliceLayout(0, S))
    else:
        return gl.load(caps + start + gl.arange(0, BLOCK_N, gl.SliceLayout(0, S)))


@jit
def weights(s, unit, lift, limit, HAS_KEEP: gl.constexpr):
    """``exp2(s unit + lift)``, 0 for hidden keys whatever their scores are."""
    y = s * unit + lift[:, None]
    if HAS_KEEP:
        y = gl.minimum(y, limit[None, :])
    return gl.exp2(y)


@jit
def add_pair(acc, top, used, unit, caps, buffers, rings, w: gl.constexpr, D_BLOCK: gl.constexpr, DV_BLOCK: gl.constexpr,
             BLOCK_N: gl.constexpr, CHUNKS_N: gl.constexpr, STAGES: gl.constexpr, KEY_STAGES: gl.constexpr,
             PARTS: gl.constexpr, EARLY: gl.constexpr, HAS_KEEP: gl.constexpr, S: gl.constexpr):  # fmt: skip
    """Add pair ``used`` of the ring to the sums ``acc`` (one tile a key chunk).

    Keys come in PARTS, in their own ring unless that is 1. EARLY: exponentials run under the product ``dout v'``.
    """
    full, empty, keys_full, keys_empty = rings
    KEYS: gl.constexpr = BLOCK_N * CHUNKS_N // PARTS
    EACH: gl.constexpr = CHUNKS_N // PARTS
    slot = used % STAGES
    wait_full(full, used, STAGES)
    lift, delta = statistics(buffers, slot, top, w, S)
    q = own_rows(buffers[0], slot, w, D_BLOCK)
    dout = own_rows(buffers[1], slot, w, DV_BLOCK)
    for c in gl.static_range(CHUNKS_N):
        part = used * PARTS + c // EACH
        key_slot = slot if PARTS == 1 else part % KEY_STAGES
        if PARTS > 1 and c % EACH == 0:
            wait_full(keys_full, part, KEY_STAGES)
        s, dp = issue(q, dout, buffers, key_slot, c % EACH * BLOCK_N, D_BLOCK, DV_BLOCK, BLOCK_N, KEYS, S)
        limit = lift
        if HAS_KEEP:
            limit = caps_of(caps, slot, c * BLOCK_N, BLOCK_N, BLOCK_N * CHUNKS_N, PARTS, S)
        # Statistics are operands of the wait: they are in registers when the slot is handed back.
        if EARLY:
            s, lift = mma_wait(1, deps=(s, lift))
            p = weights(s, unit, lift, limit, HAS_KEEP)
            wait_full(full, used, STAGES)  # long over; a spin loop, as ptxas moves the wait below over exponentials
            dp, delta, p = mma_wait(0, deps=(dp, delta, p))
        else:
            s, dp, lift, delta = mma_wait(0, deps=(s, dp, lift, delta))
        if PARTS > 1 and (c + 1) % EACH == 0:
            hand_back(keys_empty, part, KEY_STAGES)
        if not EARLY and HAS_KEEP:
            p = weights(s, unit, lift, limit, True)
            if PARTS == 1:
                dp, p = mma_wait(0, deps=(dp, p))  # long over: the weights, and so their limits, are in registers
        if c + 1 == CHUNKS_N:
            hand_back(empty, used, STAGES)
        if not EARLY and not HAS_KEEP:
            p = weights(s, unit, lift, limit, False)
        acc = replaced(acc, c, acc[c] + p * (dp - delta[:, None]))
    return acc


@jit
def add_pair_deep(acc, top, used, unit, caps, buffers, rings, w: gl.constexpr, D_BLOCK: gl.constexpr,
                  DV_BLOCK: gl.constexpr, BLOCK_N: gl.constexpr, CHUNKS_N: gl.constexpr, STAGES: gl.constexpr,
                  HAS_KEEP: gl.constexpr, S: gl.constexpr):  # fmt: skip
    """``add_pair`` where the next chunk's products go out before this one is touched.

    None is in flight at the end, or ptxas would serialise them all.
    """
    full, empty, _, _ = rings
    KEYS: gl.constexpr = BLOCK_N * CHUNKS_N
    slot = used % STAGES
    wait_full(full, used, STAGES)
    q = own_rows(buffers[0], slot, w, D_BLOCK)
    dout = own_rows(buffers[1], slot, w, DV_BLOCK)
    s, dp = issue(q, dout, buffers, slot, 0, D_BLOCK, DV_BLOCK, BLOCK_N, KEYS, S)
    lift, delta = statistics(buffers, slot, top, w, S)
    for c in gl.static_range(CHUNKS_N):
        if c + 1 < CHUNKS_N:
            s_next, dp_next = issue(q, dout, buffers, slot, (c + 1) * BLOCK_N, D_BLOCK, DV_BLOCK, BLOCK_N, KEYS, S)
        s, dp, lift, delta = mma_wait(2 if c + 1 < CHUNKS_N else 0, deps=(s, dp, lift, delta))
        limit = lift
        if HAS_KEEP:
            limit = caps_of(caps, slot, c * BLOCK_N, BLOCK_N, KEYS, 1, S)
        if not HAS_KEEP and c + 1 == CHUNKS_N:
            hand_back(empty, used, STAGES)
        p = weights(s, unit, lift, limit, HAS_KEEP)
        if HAS_KEEP and c + 1 == CHUNKS_N:
            dp, p = mma_wait(0, deps=(dp, p))  # long over: the weights, and so their limits, are in registers
            hand_back(empty, used, STAGES)
        acc = replaced(acc, c, acc[c] + p * (dp - delta[:, None]))
        if c + 1 < CHUNKS_N:
            s, dp = s_next, dp_next
    return acc


@jit
def check_sums(acc, tile, top, row, col0, M, N, shift, edge, BLOCK_N: gl.constexpr, CHUNKS_N: gl.constexpr,
               S: gl.constexpr, IS_CAUSAL: gl.constexpr):  # fmt: skip
    """``(acc, flag)``: sums with zeros where nothing is visible, and 1.0 if a visible one is not to be believed.

    Tiles without an edge whose rows all sum to LARGE at most, nearly all, are through after one addition a score.
    """
    size = gl.sum(gl.abs(acc[0]), 1)
    for c in gl.static_range(1, CHUNKS_N):
        size += gl.sum(gl.abs(acc[c]), 1)
    wild = gl.max(gl.where(size <= LARGE, 0, 1), 0) > 0  # also if it is NaN
    flag = 0.0
    if wild | edge:
        worst = gl.zeros([HALF_M], gl.int32, gl.SliceLayout(1, S))
        for c in gl.static_range(CHUNKS_N):
            seen = visible(row, col0 + c * BLOCK_N, M, N, shift, BLOCK_N, S, IS_CAUSAL)
            bias = bias_chunk(tile, c, BLOCK_N, S)
            counts = seen & (bias * LOG2E != NEG_INF)
            limit = gl.where(gl.exp2(bias * LOG2E - top[:, None]) < SMALLEST, LARGE, FINITE)
            worst = gl.maximum(worst, gl.max((counts & ((gl.abs(acc[c]) <= limit) == 0)).to(gl.int32), 1))
            acc = replaced(acc, c, gl.where(counts, acc[c], 0.0))
        flag = gl.max(worst, 0).to(gl.float32)
    return acc, flag


@jit
def add_tiles(w: gl.constexpr, outs, buffers, rings, bias_bars, sizes, mask, unit, D_BLOCK: gl.constexpr,
              DV_BLOCK: gl.constexpr, BLOCK_N: gl.constexpr, CHUNKS_N: gl.constexpr, STAGES: gl.constexpr,
              KEY_STAGES: gl.constexpr, PARTS: gl.constexpr, BIAS_SLOTS: gl.constexpr, DEEP: gl.constexpr,
              OWNS: gl.constexpr, SPLIT: gl.constexpr, IS_CAUSAL: gl.constexpr, HAS_KEEP: gl.constexpr):  # fmt: skip
    """Consumer warpgroup ``w``: the 64 queries from ``64 w`` on of every tile."""
    BLOCK: gl.constexpr = BLOCK_N * CHUNKS_N
    S: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BLOCK_N, 16])
    dbias_desc, bias_moves, partial_ptr, flag_ptr = outs
    bias_tiles = buffers[4]
    bias_full, bias_empty = bias_bars
    items, M, N, n1, heads, _, owners, shared, chunk, shift = sizes
    used = 0
    met = 0
    raised = 0.0
    for index in range(gl.program_id(0), items, gl.num_programs(0)):
        tile_m, tile_n, plane = place_tile(index, items, M, N, shift, BLOCK, IS_CAUSAL)
        row0, col0 = tile_m * BLOCK_M, tile_n * BLOCK
        owner, first, count = pairs_of(plane, row0, col0, M, owners, shared, chunk, shift, IS_CAUSAL)
        if HAS_KEEP:
            count = pairs_seen(owner, first, count, col0, n1, heads, mask, OWNS)
        row = row0 + w * HALF_M + gl.arange(0, HALF_M, gl.SliceLayout(1, S))
        edge = (col0 + BLOCK > N) | (row0 + BLOCK_M > M)
        if IS_CAUSAL:
            edge = edge | (col0 + BLOCK - 1 > row0 + shift)
        boxed = bias_tiles.index(met % BIAS_SLOTS * 2 + w)
        tile = boxed.reshape([HALF_M, BLOCK])
        wait_full(bias_full, met, BIAS_SLOTS)
        acc = repeated(gl.zeros([HALF_M, BLOCK_N], gl.float32, S), CHUNKS_N)
        if count > 0:
            top = bias_top(tile, row, col0, M, N, shift, edge, BLOCK_N, CHUNKS_N, S, IS_CAUSAL)
            if DEEP == 1:
                for _i in range(count):
                    acc = add_pair_deep(acc, top, used, unit, buffers[7], buffers, rings, w, D_BLOCK, DV_BLOCK, BLOCK_N,
                                        CHUNKS_N, STAGES, HAS_KEEP, S)  # fmt: skip
                    used += 1
            elif HAS_KEEP and PARTS > 1:
                item = first
                for _i in range(count):
                    item, line = seen_pair(item, owner, col0, n1, heads, N, mask, OWNS)
                    caps = mask[0] + line.to(gl.int64) * (mask[2] // MARK) * MARK + col0  # aligned, as it says
                    acc = add_pair(acc, top, used, unit, caps, buffers, rings, w, D_BLOCK, DV_BLOCK, BLOCK_N, CHUNKS_N,
                                   STAGES, KEY_STAGES, PARTS, DEEP == 2, True, S)  # fmt: skip
                    item += 1
                    used += 1
            else:
                for _i in range(count):
                    acc = add_pair(acc, top, used, unit, buffers[7], buffers, rings, w, D_BLOCK, DV_BLOCK, BLOCK_N,
                                   CHUNKS_N, STAGES, KEY_STAGES, PARTS, DEEP == 2, HAS_KEEP, S)  # fmt: skip
                    used += 1
            acc, flag = check_sums(acc, tile, top, row, col0, M, N, shift, edge, BLOCK_N, CHUNKS_N, S, IS_CAUSAL)
            raised = gl.maximum(raised, flag)
            for c in gl.static_range(CHUNKS_N):
                # Only a hidden entry is above the row's maximum; its sum is 0 and must not meet an infinite factor.
                factor = gl.exp2(gl.minimum(bias_chunk(tile, c, BLOCK_N, S) * LOG2E - top[:, None], 0.0))
                acc = replaced(acc, c, acc[c] * factor)
        for c in gl.static_range(CHUNKS_N):
            if SPLIT:
                store_partial(partial_ptr, acc[c], plane, row, col0 + c * BLOCK_N, M, N, BLOCK_N, S)
            else:
                tile.slice(c * BLOCK_N, BLOCK_N, dim=1).store(acc[c].to(bias_tiles.dtype))
        if not SPLIT:
            b0, b1, head = split_index(plane % owners, 0 * plane, n1, heads, OWNS)
            fence_async_shared()
            tma_store(dbias_desc, at(b0, b1, head, row0 + w * HALF_M, col0, bias_moves), boxed)
            store_wait(0)
        hand_back(bias_empty, met, BIAS_SLOTS)
        met += 1  # noqa: SIM113
    gl.store(flag_ptr + gl.program_id(0) * 2 + w, raised)


@jit(do_not_specialize=["q_moves", "dout_moves", "k_moves", "v_moves", "bias_moves", "n0", "n1", "items", "M", "N",
                        "heads", "group", "owners", "shared", "chunk", "shift", "scale", "caps_pitch", "line_0",
                        "line_1"])  # fmt: skip
def dbias_kernel(
    q_desc, dout_desc, k_desc, v_desc, bias_desc, reference_desc, delta_desc, dbias_desc, caps_desc, partial_ptr,
    flag_ptr, caps_ptr, spans_ptr,
    q_moves, dout_moves, k_moves, v_moves, bias_moves, n0, n1, items, M, N, heads, group, owners, shared, chunk, shift,
    scale, caps_pitch, line_0, line_1,
    D_BLOCK: gl.constexpr, DV_BLOCK: gl.constexpr, BLOCK_N: gl.constexpr, CHUNKS_N: gl.constexpr,
    STAGES: gl.constexpr, DEEP: gl.constexpr, OWNS: gl.constexpr, SPLIT: gl.constexpr,
    IS_CAUSAL: gl.constexpr, CONSUMER_REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr,
    HAS_KEEP: gl.constexpr,
):  # fmt: skip
    """dbias tile [128, BLOCK_N * CHUNKS_N] = sum of ds over the pairs (batch item, head) that share it.

    Axes ``(b0, b1, head)`` have sizes ``(n0, n1, heads)``; OWNS marks those that the bias varies along, ``owners`` and
    ``shared`` are the products of the sizes of those and of the others. ``bias_moves`` has no bit of shared axes and
    also serves ``dbias_desc``. Blocks: q and dout 128 rows; k and v as many rows as a tile has columns, or an even part
    of these that holds whole chunks; bias and dbias [64, columns], statistics [1, 128]. HAS_KEEP: a mask of keys, see
    ``marks``; ``caps`` are then its lines, as many columns as k has rows.

    DEEP: 0 nothing overlaps within a warpgroup; 1 products of the next chunk of keys are under way; 2 exponentials run
    under the product ``dout v'``. Keys in parts: 0 or 2.

    Items: tiles x owners x chunks, a chunk being ``chunk`` shared indices. Grid: any, items are taken in strides.
    One chunk: writes dbias. SPLIT: sums of chunks ``partial_ptr[chunk, owner, M, N]``, in its dtype. Both: float32
    ``flag_ptr[programs, 2]``, 1.0 where sums of some item of a program must be computed some other way. Few flags: who
    comes after reads them all.
    """
    PARTS: gl.constexpr = BLOCK_N * CHUNKS_N // k_desc.block_type.shape[3]
    gl.static_assert(CHUNKS_N % PARTS == 0 and (PARTS == 1 or DEEP != 1))
    rows_bytes: gl.constexpr = q_desc.block_type.nbytes + dout_desc.block_type.nbytes + 2 * delta_desc.block_type.nbytes
    row_bytes: gl.constexpr = rows_bytes + (caps_desc.block_type.nbytes if HAS_KEEP and PARTS == 1 else 0)
    key_bytes: gl.constexpr = k_desc.block_type.nbytes + v_desc.block_type.nbytes
    bias_bytes: gl.constexpr = 2 * bias_desc.block_type.nbytes
    LEFT: gl.constexpr = SHARED_MEMORY - 512 - STAGES * row_bytes - bias_bytes  # 512 for barriers and alignment
    KEY_STAGES: gl.constexpr = STAGES * PARTS if STAGES * PARTS * key_bytes <= LEFT else LEFT // key_bytes
    gl.static_assert(KEY_STAGES == STAGES or PARTS > 1)
    # A second bias tile where it fits: copies of the next item start while this one is worked on.
    BIAS_SLOTS: gl.constexpr = 2 if KEY_STAGES * key_bytes + bias_bytes <= LEFT else 1
    buffers = (
        slots(q_desc, STAGES), slots(dout_desc, STAGES), slots(k_desc, KEY_STAGES), slots(v_desc, KEY_STAGES),
        slots(bias_desc, 2 * BIAS_SLOTS), slots(reference_desc, STAGES), slots(delta_desc, STAGES),
    )  # fmt: skip
    caps = buffers[6]
    if HAS_KEEP and PARTS == 1:
        caps = slots(caps_desc, STAGES)
    buffers = added(buffers, caps)
    # One more for copies that are not ready when they have landed.
    FULL: gl.constexpr = STAGES + (1 if HAS_KEEP and PARTS == 1 else 0)
    KEYS_FULL: gl.constexpr = KEY_STAGES + (1 if HAS_KEEP and PARTS > 1 else 0)
    rings = (ring_barriers(FULL), ring_barriers(STAGES), ring_barriers(KEYS_FULL), ring_barriers(KEY_STAGES))
    if HAS_KEEP:
        mbarrier.init(rings[0].index(STAGES) if PARTS == 1 else rings[2].index(KEY_STAGES), count=1)
    bias_bars = (ring_barriers(BIAS_SLOTS), ring_barriers(BIAS_SLOTS))
    start_ring(rings[0], rings[1], STAGES, 2)
    start_ring(rings[2], rings[3], KEY_STAGES, 2)
    start_ring(bias_bars[0], bias_bars[1], BIAS_SLOTS, 2)
    fence_async_shared()

    descs = (q_desc, dout_desc, k_desc, v_desc, bias_desc, reference_desc, delta_desc, caps_desc)
    moves = (q_moves, dout_moves, k_moves, v_moves, bias_moves)
    outs = (dbias_desc, bias_moves, partial_ptr, flag_ptr)
    sizes = (items, M, N, n1, heads, group, owners, shared, chunk, shift)
    mask = (caps_ptr, spans_ptr, caps_pitch, line_0, line_1)
    unit = scale * LOG2E
    gl.warp_specialize([
        (add_tiles, (0, outs, buffers, rings, bias_bars, sizes, mask, unit, D_BLOCK, DV_BLOCK, BLOCK_N, CHUNKS_N,
                     STAGES, KEY_STAGES, PARTS, BIAS_SLOTS, DEEP, OWNS, SPLIT, IS_CAUSAL, HAS_KEEP)),
        (add_tiles, (1, outs, buffers, rings, bias_bars, sizes, mask, unit, D_BLOCK, DV_BLOCK, BLOCK_N, CHUNKS_N,
                     STAGES, KEY_STAGES, PARTS, BIAS_SLOTS, DEEP, OWNS, SPLIT, IS_CAUSAL, HAS_KEEP)),
        (copy_operands, (descs, moves, buffers, rings, bias_bars, sizes, mask, BLOCK_N * CHUNKS_N, DV_BLOCK, STAGES,
                         KEY_STAGES, PARTS, BIAS_SLOTS, OWNS, IS_CAUSAL, HAS_KEEP)),
    ], [4, 1], [CONSUMER_REGISTERS, PRODUCER_REGISTERS])  # fmt: skip
