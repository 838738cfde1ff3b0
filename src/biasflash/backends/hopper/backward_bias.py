"""Gradient of a bias that several batch items or heads share, on Hopper: one owner adds what they contribute.

A bias tile that does not change over the pairs ``(batch item, head)`` sharing it leaves their sum:

    dbias = exp(bias - r) * sum over pairs of exp(s + r - lse) * (dp - delta),   r = row maximum of the bias tile,

so the loop over pairs meets neither the bias nor a mask: two FMA, one addition and one exponential a score. Sums stay
in float32 registers and are added in a fixed order. The factored sum overflows where logits of one row spread by more
than about 88 within the tile; every tile says in a flag whether its sums can be believed.
"""

from biasflash.backends.hopper.gluon import fence_async_shared, gl, jit, mbarrier, store_wait, tma_load, tma_store
from biasflash.backends.hopper.gluon import warpgroup_mma as mma
from biasflash.backends.hopper.gluon import warpgroup_mma_wait as mma_wait
from biasflash.backends.hopper.pipeline import at, hand_back, ring_barriers, start_ring, wait_empty, wait_full

BLOCK_M = gl.constexpr(128)  # queries of a tile, 64 for each of the two consumer warpgroups
HALF_M = gl.constexpr(64)
LOG2E = gl.constexpr(1.4426950408889634)
NEG_INF = gl.constexpr(float("-inf"))
# A sum up to LARGE is right whatever its factor: where the factor is below SMALLEST and flushes to zero, the product
# is below 2^-36.
LARGE = gl.constexpr(2.0**90)
SMALLEST = gl.constexpr(2.0**-126)
FINITE = gl.constexpr(3.4028234663852886e38)


@jit
def split_index(owner, item, n1, heads, OWNS: gl.constexpr):
    """``(b0, b1, head)`` of an index over the owned axes and one over the shared axes; last axis fastest."""
    if OWNS[2]:
        head, owner = owner % heads, owner // heads
    else:
        head, item = item % heads, item // heads
    if OWNS[1]:
        b1, owner = owner % n1, owner // n1
    else:
        b1, item = item % n1, item // n1
    return owner if OWNS[0] else item, b1, head


@jit
def stair_size(rank, columns, R: gl.constexpr):
    """Tiles in the rows of rank 1 to ``rank`` of a staircase: row ``y`` has ``min(cdiv(y, R), columns)``."""
    rank = gl.maximum(rank, 0)
    low = gl.minimum(rank, columns * R)
    full = low // R
    return R * (full * (full + 1) // 2) + low % R * (full + 1) + (rank - low) * columns


@jit
def stair_tile(index, offset, columns, R: gl.constexpr):
    """``(row, column)`` of tile ``index`` of a staircase whose row 0 has rank ``offset + 1``."""
    index += stair_size(offset, columns, R)
    above = index - R * (columns * (columns + 1) // 2)
    if above >= 0:
        row, column = columns * R + above // columns, above % columns
    else:
        full = (gl.sqrt(index.to(gl.float32) * (2.0 / R) + 0.25) - 0.5).to(gl.int32)
        full += (R * ((full + 1) * (full + 2) // 2) <= index).to(gl.int32)  # the root may be off by one
        full -= (R * (full * (full + 1) // 2) > index).to(gl.int32)
        rest = index - R * (full * (full + 1) // 2)
        row, column = full * R + rest // (full + 1), rest % (full + 1)
    return row - offset, column


@jit
def place_tile(index, items, M, N, shift, BLOCK: gl.constexpr, IS_CAUSAL: gl.constexpr):
    """Item -> ``(tile_m, tile_n, plane)``, plane = chunk * owners + owner.

    Tiles of one plane stand side by side: they walk over the same pairs and share operands in L2. CAUSAL: tiles that
    see something come first, as a stride of programs over all tiles gives some programs 1.6 times the work of others.
    """
    rows = gl.cdiv(M, BLOCK_M)
    columns = gl.cdiv(N, BLOCK)
    tiles = rows * columns
    if IS_CAUSAL and BLOCK % BLOCK_M == 0:
        R: gl.constexpr = BLOCK // BLOCK_M
        offset = (shift + (BLOCK_M - 1)) // BLOCK_M
        if shift < 0:  # division truncates
            offset = -(-shift // BLOCK_M)
        count = stair_size(rows + offset, columns, R) - stair_size(offset, columns, R)
        hidden = index - count * (items // tiles)
        if hidden < 0:
            plane = index // count
            tile_m, tile_n = stair_tile(index - plane * count, offset, columns, R)
        else:  # seen from the opposite corner the hidden tiles are a staircase too
            plane = hidden // (tiles - count)
            opposite = columns * R - R - rows - offset
            tile_m, tile_n = stair_tile(hidden - plane * (tiles - count), opposite, columns, R)
            tile_m, tile_n = rows - 1 - tile_m, columns - 1 - tile_n
    else:
        plane = index // tiles
        tile_m, tile_n = index % tiles // columns, index % tiles % columns
    return tile_m, tile_n, plane


@jit
def pairs_of(plane, row0, col0, M, owners, shared, chunk, shift, IS_CAUSAL: gl.constexpr):
    """``(owner, first, count)``: the shared indices that a plane's chunk walks over; none if the tile sees nothing."""
    part = plane // owners
    first = part * chunk
    count = gl.maximum(gl.minimum(chunk, shared - first), 0)
    if IS_CAUSAL:  # noqa: SIM102
        if col0 > gl.minimum(row0 + BLOCK_M, M) - 1 + shift:
            count = count * 0
    return plane - part * owners, first, count


@jit
def widen(x):
    """16 bits -> float32; bfloat16 two at a time, as the halves of a word are one shift and one mask away."""
    if x.dtype == gl.bfloat16:
        halves: gl.constexpr = "shl.b32 $0, $2, 16;\n\tand.b32 $1, $2, 0xffff0000;"
        return gl.inline_asm_elementwise(halves, "=r,=r,r", [x], dtype=gl.float32, is_pure=True, pack=2)
    else:
        return x.to(gl.float32)


@jit
def visible(row, start, M, N, shift, BLOCK_N: gl.constexpr, S: gl.constexpr, IS_CAUSAL: gl.constexpr):
    """Which entries of a chunk of columns from ``start`` on exist and are seen."""
    col = start + gl.arange(0, BLOCK_N, gl.SliceLayout(0, S))
    seen = (row < M)[:, None] & (col < N)[None, :]
    if IS_CAUSAL:
        seen = seen & (col[None, :] <= (row + shift)[:, None])
    return seen


@jit
def with_entry(entries, i: gl.constexpr, x, COUNT: gl.constexpr):
    """A tuple with entry ``i`` replaced."""
    out = (x if i == 0 else entries[0],)
    for c in gl.static_range(1, COUNT):
        out = out + (x if i == c else entries[c],)  # noqa: RUF005
    return out


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
def slots(desc, COUNT: gl.constexpr):
    """COUNT buffers for the boxes of a descriptor."""
    return gl.allocate_shared_memory(desc.dtype, [COUNT] + desc.block_type.shape, desc.layout)  # noqa: RUF005


@jit
def issue(buffers, slot, w: gl.constexpr, c: gl.constexpr, D_BLOCK: gl.constexpr, DV_BLOCK: gl.constexpr,
          BLOCK_N: gl.constexpr, CHUNKS_N: gl.constexpr, S: gl.constexpr):  # fmt: skip
    """Start the products ``(q k', dout v')`` [64, BLOCK_N] of key chunk ``c``."""
    q_tiles, dout_tiles, k_tiles, v_tiles, _, _, _ = buffers
    zero = gl.zeros([HALF_M, BLOCK_N], gl.float32, S)
    q = q_tiles.index(slot).reshape([BLOCK_M, D_BLOCK]).slice(w * HALF_M, HALF_M, dim=0)
    k = k_tiles.index(slot).reshape([BLOCK_N * CHUNKS_N, D_BLOCK]).slice(c * BLOCK_N, BLOCK_N, dim=0)
    s = mma(q, k.permute((1, 0)), zero, use_acc=False, is_async=True)
    dout = dout_tiles.index(slot).reshape([BLOCK_M, DV_BLOCK]).slice(w * HALF_M, HALF_M, dim=0)
    v = v_tiles.index(slot).reshape([BLOCK_N * CHUNKS_N, DV_BLOCK]).slice(c * BLOCK_N, BLOCK_N, dim=0)
    dp = mma(dout, v.permute((1, 0)), zero, use_acc=False, is_async=True)
    return s, dp


@jit
def add_pairs(acc, top, used, unit, buffers, rings, w: gl.constexpr, D_BLOCK: gl.constexpr, DV_BLOCK: gl.constexpr,
              BLOCK_N: gl.constexpr, CHUNKS_N: gl.constexpr, STAGES: gl.constexpr, DEEP: gl.constexpr,
              ROWS: gl.constexpr, S: gl.constexpr):  # fmt: skip
    """Add the next ROWS pairs of the ring, ``used`` being the first, to the sums ``acc`` (one tile a key chunk).

    DEEP: the next chunk's products go out before this one is touched. None is in flight at the end, or ptxas would
    serialise them all.
    """
    reference_rows, delta_rows = buffers[5], buffers[6]
    full, empty = rings
    wait_full(full, used, STAGES)
    s, dp = issue(buffers, used % STAGES, w, 0, D_BLOCK, DV_BLOCK, BLOCK_N, CHUNKS_N, S)
    for x in gl.static_range(ROWS):
        slot = (used + x) % STAGES
        lift = top - reference_rows.index(slot).reshape([BLOCK_M]).slice(w * HALF_M, HALF_M).load(gl.SliceLayout(1, S))
        delta = delta_rows.index(slot).reshape([BLOCK_M]).slice(w * HALF_M, HALF_M).load(gl.SliceLayout(1, S))
        for c in gl.static_range(CHUNKS_N):
            if DEEP and c + 1 < CHUNKS_N:
                s_next, dp_next = issue(buffers, slot, w, c + 1, D_BLOCK, DV_BLOCK, BLOCK_N, CHUNKS_N, S)
            elif DEEP and x + 1 < ROWS:
                wait_full(full, used + x + 1, STAGES)
                s_next, dp_next = issue(buffers, (used + x + 1) % STAGES, w, 0, D_BLOCK, DV_BLOCK, BLOCK_N, CHUNKS_N, S)
            elif not DEEP and c + x > 0:
                if c == 0:
                    wait_full(full, used + x, STAGES)
                s, dp = issue(buffers, slot, w, c, D_BLOCK, DV_BLOCK, BLOCK_N, CHUNKS_N, S)
            # Statistics are operands of the wait: they are in registers when the slot is handed back.
            if DEEP and not (c + 1 == CHUNKS_N and x + 1 == ROWS):
                s, dp, lift, delta = mma_wait(2, deps=(s, dp, lift, delta))
            else:
                s, dp, lift, delta = mma_wait(0, deps=(s, dp, lift, delta))
            if c + 1 == CHUNKS_N:
                hand_back(empty, used + x, STAGES)
            p = gl.exp2(s * unit + lift[:, None])
            acc = with_entry(acc, c, acc[c] + p * (dp - delta[:, None]), CHUNKS_N)
            if DEEP and not (c + 1 == CHUNKS_N and x + 1 == ROWS):
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
            acc = with_entry(acc, c, gl.where(counts, acc[c], 0.0), CHUNKS_N)
        flag = gl.max(worst, 0).to(gl.float32)
    return acc, flag


@jit
def copy_operands(descs, moves, buffers, rings, bias_bars, sizes, BLOCK: gl.constexpr, STAGES: gl.constexpr,
                  OWNS: gl.constexpr, IS_CAUSAL: gl.constexpr):  # fmt: skip
    """The copying warp: for every item its bias tile, then the operands of its pairs."""
    q_desc, dout_desc, k_desc, v_desc, bias_desc, reference_desc, delta_desc = descs
    q_moves, dout_moves, k_moves, v_moves, bias_moves = moves
    q_tiles, dout_tiles, k_tiles, v_tiles, bias_tile, reference_rows, delta_rows = buffers
    full, empty = rings
    bias_full, bias_empty = bias_bars
    items, M, N, n1, heads, group, owners, shared, chunk, shift = sizes
    nbytes: gl.constexpr = (
        q_desc.block_type.nbytes + dout_desc.block_type.nbytes + k_desc.block_type.nbytes + v_desc.block_type.nbytes
        + reference_desc.block_type.nbytes + delta_desc.block_type.nbytes
    )  # fmt: skip
    used = 0
    met = 0
    for index in range(gl.program_id(0), items, gl.num_programs(0)):
        tile_m, tile_n, plane = place_tile(index, items, M, N, shift, BLOCK, IS_CAUSAL)
        row0, col0 = tile_m * BLOCK_M, tile_n * BLOCK
        owner, first, count = pairs_of(plane, row0, col0, M, owners, shared, chunk, shift, IS_CAUSAL)
        wait_empty(bias_empty, met, 1)
        if count > 0:
            mbarrier.expect(bias_full.index(0), 2 * bias_desc.block_type.nbytes)
            b0, b1, head = split_index(owner, 0 * owner, n1, heads, OWNS)
            for w in gl.static_range(2):
                where = at(b0, b1, head, row0 + w * HALF_M, col0, bias_moves)
                tma_load(bias_desc, where, bias_full.index(0), bias_tile.index(w))
        else:  # nothing is visible and what lies in the buffer is ignored; the phases go on
            mbarrier.arrive(bias_full.index(0), count=1)
        for i in range(first, first + count):
            b0, b1, head = split_index(owner, i, n1, heads, OWNS)
            slot, bar = used % STAGES, full.index(used % STAGES)
            wait_empty(empty, used, STAGES)
            mbarrier.expect(bar, nbytes)
            tma_load(q_desc, at(b0, b1, head, row0, 0, q_moves), bar, q_tiles.index(slot))
            tma_load(k_desc, at(b0, b1, head // group, col0, 0, k_moves), bar, k_tiles.index(slot))
            tma_load(dout_desc, at(b0, b1, head, row0, 0, dout_moves), bar, dout_tiles.index(slot))
            tma_load(v_desc, at(b0, b1, head // group, col0, 0, v_moves), bar, v_tiles.index(slot))
            line = (b0 * n1 + b1) * heads + head
            tma_load(reference_desc, [line, row0], bar, reference_rows.index(slot))
            tma_load(delta_desc, [line, row0], bar, delta_rows.index(slot))
            used += 1
        met += 1  # noqa: SIM113


@jit
def add_tiles(w: gl.constexpr, outs, buffers, rings, bias_bars, sizes, unit, D_BLOCK: gl.constexpr,
              DV_BLOCK: gl.constexpr, BLOCK_N: gl.constexpr, CHUNKS_N: gl.constexpr, STAGES: gl.constexpr,
              DEEP: gl.constexpr, ROWS: gl.constexpr, OWNS: gl.constexpr, SPLIT: gl.constexpr,
              IS_CAUSAL: gl.constexpr):  # fmt: skip
    """Consumer warpgroup ``w``: the 64 queries from ``64 w`` on of every tile."""
    BLOCK: gl.constexpr = BLOCK_N * CHUNKS_N
    S: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BLOCK_N, 16])
    dbias_desc, bias_moves, partial_ptr, flag_ptr = outs
    bias_tile = buffers[4]
    bias_full, bias_empty = bias_bars
    items, M, N, n1, heads, _, owners, shared, chunk, shift = sizes
    used = 0
    met = 0
    for index in range(gl.program_id(0), items, gl.num_programs(0)):
        tile_m, tile_n, plane = place_tile(index, items, M, N, shift, BLOCK, IS_CAUSAL)
        row0, col0 = tile_m * BLOCK_M, tile_n * BLOCK
        _, _, count = pairs_of(plane, row0, col0, M, owners, shared, chunk, shift, IS_CAUSAL)
        row = row0 + w * HALF_M + gl.arange(0, HALF_M, gl.SliceLayout(1, S))
        edge = (col0 + BLOCK > N) | (row0 + BLOCK_M > M)
        if IS_CAUSAL:
            edge = edge | (col0 + BLOCK - 1 > row0 + shift)
        tile = bias_tile.index(w).reshape([HALF_M, BLOCK])
        wait_full(bias_full, met, 1)
        top = bias_top(tile, row, col0, M, N, shift, edge, BLOCK_N, CHUNKS_N, S, IS_CAUSAL)
        zero = gl.zeros([HALF_M, BLOCK_N], gl.float32, S)
        acc = (zero,)
        for _ in gl.static_range(1, CHUNKS_N):
            acc = acc + (zero,)  # noqa: RUF005
        for _ in range(count // ROWS):
            acc = add_pairs(acc, top, used, unit, buffers, rings, w, D_BLOCK, DV_BLOCK, BLOCK_N, CHUNKS_N, STAGES,
                            DEEP, ROWS, S)  # fmt: skip
            used += ROWS
        if ROWS > 1:
            for _ in range(count % ROWS):
                acc = add_pairs(acc, top, used, unit, buffers, rings, w, D_BLOCK, DV_BLOCK, BLOCK_N, CHUNKS_N, STAGES,
                                DEEP, 1, S)  # fmt: skip
                used += 1
        acc, flag = check_sums(acc, tile, top, row, col0, M, N, shift, edge, BLOCK_N, CHUNKS_N, S, IS_CAUSAL)
        ordered = (plane * gl.cdiv(M, BLOCK_M) + tile_m) * gl.cdiv(N, BLOCK) + tile_n
        gl.store(flag_ptr + ordered * 2 + w, flag)
        for c in gl.static_range(CHUNKS_N):
            # Only a hidden entry is above the row's maximum; its sum is 0 and must not meet an infinite factor.
            dbias = acc[c] * gl.exp2(gl.minimum(bias_chunk(tile, c, BLOCK_N, S) * LOG2E - top[:, None], 0.0))
            if SPLIT:
                col = col0 + c * BLOCK_N + gl.arange(0, BLOCK_N, gl.SliceLayout(0, S))
                line = (plane.to(gl.int64) * M + row) * N
                inside = (row < M)[:, None] & (col < N)[None, :]
                gl.store(partial_ptr + (line[:, None] + col[None, :]), dbias, mask=inside)
            else:
                tile.slice(c * BLOCK_N, BLOCK_N, dim=1).store(dbias.to(bias_tile.dtype))
        if not SPLIT:
            b0, b1, head = split_index(plane % owners, 0 * plane, n1, heads, OWNS)
            fence_async_shared()
            tma_store(dbias_desc, at(b0, b1, head, row0 + w * HALF_M, col0, bias_moves), bias_tile.index(w))
            store_wait(0)
        hand_back(bias_empty, met, 1)
        met += 1  # noqa: SIM113


@jit(do_not_specialize=["q_moves", "dout_moves", "k_moves", "v_moves", "bias_moves", "n0", "n1", "items", "M", "N",
                        "heads", "group", "owners", "shared", "chunk", "shift", "scale"])  # fmt: skip
def dbias_kernel(
    q_desc, dout_desc, k_desc, v_desc, bias_desc, reference_desc, delta_desc, dbias_desc, partial_ptr, flag_ptr,
    q_moves, dout_moves, k_moves, v_moves, bias_moves, n0, n1, items, M, N, heads, group, owners, shared, chunk, shift,
    scale, D_BLOCK: gl.constexpr, DV_BLOCK: gl.constexpr, BLOCK_N: gl.constexpr, CHUNKS_N: gl.constexpr,
    STAGES: gl.constexpr, DEEP: gl.constexpr, ROWS: gl.constexpr, OWNS: gl.constexpr, SPLIT: gl.constexpr,
    IS_CAUSAL: gl.constexpr, CONSUMER_REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr,
):  # fmt: skip
    """dbias tile [128, BLOCK_N * CHUNKS_N] = sum of ds over the pairs (batch item, head) that share it.

    Axes ``(b0, b1, head)`` have sizes ``(n0, n1, heads)``; OWNS marks those that the bias varies along, ``owners`` and
    ``shared`` are the products of the sizes of those and of the others. ``bias_moves`` has no bit of shared axes and
    also serves ``dbias_desc``. Blocks: q and dout 128 rows, k and v as many rows as a tile has columns, bias and dbias
    [64, columns], statistics [1, 128].

    Items: tiles x owners x chunks, a chunk being ``chunk`` shared indices. Grid: any, items are taken in strides.
    One chunk: writes dbias. SPLIT: float32 partial sums ``partial_ptr[chunk, owner, M, N]``. Both: ``flag_ptr[chunk,
    owner, tile_m, tile_n, 2]``, float32, 1.0 where a half tile (64 queries) must be computed some other way.
    """
    buffers = (
        slots(q_desc, STAGES), slots(dout_desc, STAGES), slots(k_desc, STAGES), slots(v_desc, STAGES),
        slots(bias_desc, 2), slots(reference_desc, STAGES), slots(delta_desc, STAGES),
    )  # fmt: skip
    rings = (ring_barriers(STAGES), ring_barriers(STAGES))
    bias_bars = (ring_barriers(1), ring_barriers(1))
    start_ring(rings[0], rings[1], STAGES, 2)
    start_ring(bias_bars[0], bias_bars[1], 1, 2)
    fence_async_shared()

    descs = (q_desc, dout_desc, k_desc, v_desc, bias_desc, reference_desc, delta_desc)
    moves = (q_moves, dout_moves, k_moves, v_moves, bias_moves)
    outs = (dbias_desc, bias_moves, partial_ptr, flag_ptr)
    sizes = (items, M, N, n1, heads, group, owners, shared, chunk, shift)
    unit = scale * LOG2E
    gl.warp_specialize([
        (add_tiles, (0, outs, buffers, rings, bias_bars, sizes, unit, D_BLOCK, DV_BLOCK, BLOCK_N, CHUNKS_N, STAGES,
                     DEEP, ROWS, OWNS, SPLIT, IS_CAUSAL)),
        (add_tiles, (1, outs, buffers, rings, bias_bars, sizes, unit, D_BLOCK, DV_BLOCK, BLOCK_N, CHUNKS_N, STAGES,
                     DEEP, ROWS, OWNS, SPLIT, IS_CAUSAL)),
        (copy_operands, (descs, moves, buffers, rings, bias_bars, sizes, BLOCK_N * CHUNKS_N, STAGES, OWNS, IS_CAUSAL)),
    ], [4, 1], [CONSUMER_REGISTERS, PRODUCER_REGISTERS])  # fmt: skip
