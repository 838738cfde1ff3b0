"""Where the items of the owner kernel lie: tiles of the bias gradient, and the pairs whose sum they take."""

from biasflash.backends.hopper.gluon import gl, jit
from biasflash.backends.hopper.marks import MARK, last_key, line_of

BLOCK_M = gl.constexpr(128)  # queries of a tile, 64 for each of the two consumer warpgroups


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
