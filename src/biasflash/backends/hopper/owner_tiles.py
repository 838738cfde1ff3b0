"""Items of the owner kernel: tiles of the bias gradient, the pairs whose sum they take, and the warp that copies."""

from biasflash.backends.hopper.gluon import gl, jit, mbarrier, tma_load
from biasflash.backends.hopper.marks import MARK, copied_blank, is_fit, last_key, line_of
from biasflash.backends.hopper.pipeline import at, wait_empty

BLOCK_M = gl.constexpr(128)  # queries of a tile
HALF_M = gl.constexpr(64)  # of these for each of the two consumer warpgroups


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
def pairs_seen(owner, first, count, col0, n1, heads, mask, OWNS: gl.constexpr):
    """How many of the ``count`` pairs have a visible key from column ``col0`` on; called by a warpgroup.

    The copying warp asks the same for each pair (``marks.last_key``) and leaves the others out.
    """
    _caps, spans_ptr, pitch, _, _ = mask
    L: gl.constexpr = gl.BlockedLayout([4], [32], [4], [0])  # the same in every warp: a sum without shared memory
    seen = count * 0
    for start in range(first, first + count, 128):
        item = start + gl.arange(0, 128, L)
        b0, b1, _head = split_index(owner, item, n1, heads, OWNS)
        span = spans_ptr + (line_of(b0, b1, mask) + item * 0).to(gl.int64) * (pitch // MARK + 1)
        tiles = gl.load(span, mask=item < first + count, other=0.0).to(gl.int32)
        seen += gl.sum((tiles * MARK > col0).to(gl.int32), 0)
    return seen


@jit
def seen_pair(item, owner, col0, n1, heads, N, mask, OWNS: gl.constexpr):
    """``(index, line of the mask)`` of the first pair from ``item`` on that ``pairs_seen`` counts; there is one."""
    b0, b1, _head = split_index(owner, item, n1, heads, OWNS)
    line = line_of(b0, b1, mask)
    while col0 >= last_key(line, N, mask):
        item += 1
        b0, b1, _head = split_index(owner, item, n1, heads, OWNS)
        line = line_of(b0, b1, mask)
    return item, line


@jit
def visible(row, start, M, N, shift, BLOCK_N: gl.constexpr, S: gl.constexpr, IS_CAUSAL: gl.constexpr):
    """Which entries of a chunk of columns from ``start`` on exist and are seen."""
    col = start + gl.arange(0, BLOCK_N, gl.SliceLayout(0, S))
    seen = (row < M)[:, None] & (col < N)[None, :]
    if IS_CAUSAL:
        seen = seen & (col[None, :] <= (row + shift)[:, None])
    return seen


@jit
def store_partial(partial_ptr, sums, plane, row, start, M, N, BLOCK_N: gl.constexpr, S: gl.constexpr):
    """Write a chunk of sums, whose columns begin with ``start``, to ``partial_ptr[plane, M, N]``."""
    col = start + gl.arange(0, BLOCK_N, gl.SliceLayout(0, S))
    line = (plane.to(gl.int64) * M + row) * N
    inside = (row < M)[:, None] & (col < N)[None, :]
    to = partial_ptr + (line[:, None] + col[None, :])
    gl.store(to, sums.to(partial_ptr.dtype.element_ty), mask=inside)


@jit
def copy_pair(descs, moves, buffers, rings, used, landed, b0, b1, head, line, row0, col0, sizes, mask,
              BLOCK: gl.constexpr, DV_BLOCK: gl.constexpr, STAGES: gl.constexpr, KEY_STAGES: gl.constexpr,
              PARTS: gl.constexpr, HAS_KEEP: gl.constexpr):  # fmt: skip
    """Copy the operands of one pair; returns ``landed``, the copies so far whose hidden values were blanked.

    Those are announced to the barrier behind the ring's, whose only reader is this warp.
    """
    q_desc, dout_desc, k_desc, v_desc, _, reference_desc, delta_desc, caps_desc = descs
    q_moves, dout_moves, k_moves, v_moves, _ = moves
    q_tiles, dout_tiles, k_tiles, v_tiles, _, reference_rows, delta_rows, caps_rows = buffers
    full, empty, keys_full, keys_empty = rings
    _, _, _, n1, heads, group, _, _, _, _ = sizes
    KEYS: gl.constexpr = BLOCK // PARTS
    caps_bytes: gl.constexpr = caps_desc.block_type.nbytes if HAS_KEEP and PARTS == 1 else 0
    key_bytes: gl.constexpr = k_desc.block_type.nbytes + v_desc.block_type.nbytes
    row_bytes: gl.constexpr = (
        q_desc.block_type.nbytes + dout_desc.block_type.nbytes + 2 * reference_desc.block_type.nbytes
    )
    slot = used % STAGES
    ready = slot
    if HAS_KEEP and PARTS == 1:
        ready = gl.where(is_fit(line, col0, mask, BLOCK), slot, STAGES)
    bar = full.index(ready)
    row_line = (b0 * n1 + b1) * heads + head
    wait_empty(empty, used, STAGES)
    mbarrier.expect(bar, row_bytes + caps_bytes + (key_bytes if PARTS == 1 else 0))
    tma_load(q_desc, at(b0, b1, head, row0, 0, q_moves), bar, q_tiles.index(slot))
    if PARTS == 1:
        tma_load(k_desc, at(b0, b1, head // group, col0, 0, k_moves), bar, k_tiles.index(slot))
    tma_load(dout_desc, at(b0, b1, head, row0, 0, dout_moves), bar, dout_tiles.index(slot))
    if PARTS == 1:
        tma_load(v_desc, at(b0, b1, head // group, col0, 0, v_moves), bar, v_tiles.index(slot))
    tma_load(reference_desc, [row_line, row0], bar, reference_rows.index(slot))
    tma_load(delta_desc, [row_line, row0], bar, delta_rows.index(slot))
    if HAS_KEEP and PARTS == 1:
        tma_load(caps_desc, [line, col0], bar, caps_rows.index(slot))
        if ready == STAGES:
            v = v_tiles.index(slot).reshape([KEYS, DV_BLOCK])
            copied_blank(full.index(STAGES), landed, v, line, col0, mask, full.index(slot), KEYS, DV_BLOCK)
            landed += 1
    if PARTS > 1:
        for c in gl.static_range(PARTS):
            part = used * PARTS + c
            column = col0 + c * KEYS
            key_slot = part % KEY_STAGES
            ready = key_slot
            if HAS_KEEP:
                ready = gl.where(is_fit(line, column, mask, KEYS), key_slot, KEY_STAGES)
            key_bar = keys_full.index(ready)
            wait_empty(keys_empty, part, KEY_STAGES)
            mbarrier.expect(key_bar, key_bytes)
            tma_load(k_desc, at(b0, b1, head // group, column, 0, k_moves), key_bar, k_tiles.index(key_slot))
            tma_load(v_desc, at(b0, b1, head // group, column, 0, v_moves), key_bar, v_tiles.index(key_slot))
            if HAS_KEEP:  # noqa: SIM102
                if ready == KEY_STAGES:
                    v = v_tiles.index(key_slot).reshape([KEYS, DV_BLOCK])
                    copied_blank(keys_full.index(KEY_STAGES), landed, v, line, column, mask, keys_full.index(key_slot),
                                 KEYS, DV_BLOCK)  # fmt: skip
                    landed += 1
    return landed


@jit
def copy_operands(descs, moves, buffers, rings, bias_bars, sizes, mask, BLOCK: gl.constexpr, DV_BLOCK: gl.constexpr,
                  STAGES: gl.constexpr, KEY_STAGES: gl.constexpr, PARTS: gl.constexpr, BIAS_SLOTS: gl.constexpr,
                  OWNS: gl.constexpr, IS_CAUSAL: gl.constexpr, HAS_KEEP: gl.constexpr):  # fmt: skip
    """The copying warp: for every item its bias tile, then the operands of its pairs.

    HAS_KEEP: of those pairs that have a visible key from the tile's first column on.
    """
    bias_desc, bias_moves, bias_tiles = descs[4], moves[4], buffers[4]
    bias_full, bias_empty = bias_bars
    items, M, N, n1, heads, _, owners, shared, chunk, shift = sizes
    used = 0
    met = 0
    landed = 0
    for index in range(gl.program_id(0), items, gl.num_programs(0)):
        tile_m, tile_n, plane = place_tile(index, items, M, N, shift, BLOCK, IS_CAUSAL)
        row0, col0 = tile_m * BLOCK_M, tile_n * BLOCK
        owner, first, count = pairs_of(plane, row0, col0, M, owners, shared, chunk, shift, IS_CAUSAL)
        bias_slot, bias_bar = met % BIAS_SLOTS, bias_full.index(met % BIAS_SLOTS)
        wait_empty(bias_empty, met, BIAS_SLOTS)
        if count > 0:
            mbarrier.expect(bias_bar, 2 * bias_desc.block_type.nbytes)
            b0, b1, head = split_index(owner, 0 * owner, n1, heads, OWNS)
            for w in gl.static_range(2):
                where = at(b0, b1, head, row0 + w * HALF_M, col0, bias_moves)
                tma_load(bias_desc, where, bias_bar, bias_tiles.index(2 * bias_slot + w))
        else:  # nothing is visible and what lies in the buffer is ignored; the phases go on
            mbarrier.arrive(bias_bar, count=1)
        for i in range(first, first + count):
            b0, b1, head = split_index(owner, i, n1, heads, OWNS)
            if HAS_KEEP:
                line = line_of(b0, b1, mask)
                if col0 < last_key(line, N, mask):
                    landed = copy_pair(descs, moves, buffers, rings, used, landed, b0, b1, head, line, row0, col0,
                                       sizes, mask, BLOCK, DV_BLOCK, STAGES, KEY_STAGES, PARTS, True)  # fmt: skip
                    used += 1
            else:
                copy_pair(descs, moves, buffers, rings, used, landed, b0, b1, head, head, row0, col0, sizes, mask,
                          BLOCK, DV_BLOCK, STAGES, KEY_STAGES, PARTS, False)  # fmt: skip
                used += 1
        met += 1  # noqa: SIM113
