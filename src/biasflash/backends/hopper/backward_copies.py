"""The copying warp of dq and of dk and dv, and the warps that put the rows of a bias in order."""

from biasflash.backends.hopper.backward_step import own_extent, work_item
from biasflash.backends.hopper.deal import deal, first_lot, following
from biasflash.backends.hopper.gluon import gl, jit, mbarrier, tma_load
from biasflash.backends.hopper.marks import blank_hidden, is_fit, item_line
from biasflash.backends.hopper.odd_rows import VECTOR, copy_odd, first_row, hand_over
from biasflash.backends.hopper.pipeline import at, wait_empty


@jit
def load_pair(descs, moves, b, inner, h_1, row, bar, tiles, i):
    """Box ``row`` of two tensors into entry ``i`` of two rings."""
    b0 = b // inner
    b1 = b - b0 * inner
    tma_load(descs[0], at(b0, b1, h_1, row, 0, moves[0]), bar, tiles[0].index(i))
    tma_load(descs[1], at(b0, b1, h_1, row, 0, moves[1]), bar, tiles[1].index(i))


@jit
def blank_pair(tiles, i, line, row, mask, ROWS: gl.constexpr, D: gl.constexpr, DV: gl.constexpr):
    """``blank_hidden`` in entry ``i`` of the rings of K and V, whose tiles have ROWS keys."""
    blank_hidden(tiles[0].index(i).reshape([ROWS, D]), line, row, mask, ROWS, D)
    blank_hidden(tiles[1].index(i).reshape([ROWS, DV]), line, row, mask, ROWS, DV)


@jit
def are_fit(b, inner, own_row, mask, ROWS: gl.constexpr):
    """``is_fit`` of a CTA's own keys, for ROWS batch items from ``b`` on."""
    fit = is_fit(item_line(b, inner, mask), own_row, mask, 128)
    for g in gl.static_range(1, ROWS):
        fit = fit & is_fit(item_line(b + g, inner, mask), own_row, mask, 128)
    return fit


@jit
def bias_corner(own_row, met_row, KEYS: gl.constexpr):
    """First row and column of a bias tile, and what to add to them for that of the other warpgroup."""
    if KEYS:
        return met_row, own_row, 0, 64
    else:
        return own_row, met_row, 64, 0


@jit
def copy_odd_pair(
    use, bias_desc, b, inner, head, own_row, met_row, odd_parts,
    COLUMNS: gl.constexpr, KEYS: gl.constexpr, RAW_STAGES: gl.constexpr,
):  # fmt: skip
    """Start the copies of the ``use``-th bias tiles, one for each warpgroup, in lines of eight rows."""
    raw, raw_bars, ends_desc, odd = odd_parts
    row, column, down, right = bias_corner(own_row, met_row, KEYS)
    b0 = b // inner
    flat = first_row(b0, b - b0 * inner, head, row, odd)
    slot = use % RAW_STAGES
    wait_empty(raw_bars[1], use, RAW_STAGES)
    bar = raw_bars[0].index(slot)
    mbarrier.expect(bar, 2 * 2 * 64 * (COLUMNS + VECTOR))
    for w in range(2):
        at = slot * 2 + w
        copy_odd((bias_desc, ends_desc), flat + w * down, column + w * right, odd, bar, raw, at, COLUMNS)


@jit
def order_bias(
    bias, mask, odd_parts, bars, numbers,
    BLOCK: gl.constexpr, ROWS: gl.constexpr, TILES: gl.constexpr, BIAS_STAGES: gl.constexpr, KEYS: gl.constexpr,
    HAS_KEEP: gl.constexpr, RAW_STAGES: gl.constexpr, DEAL: gl.constexpr,
):  # fmt: skip
    """The four warps that put the rows of bias tiles in order, with RAW_STAGES."""
    raw, raw_bars, _ends_desc, odd = odd_parts
    inner, items, M, N, _, group, _, _ = numbers
    extent = own_extent(numbers, ROWS, KEYS)
    dealt = deal(items, extent, DEAL)
    lot, turn, use = first_lot(DEAL), 0, 0
    while lot < dealt[0]:
        h, b, own_row, start, tiles, _ = work_item(
            lot, turn, dealt, extent, numbers, mask, BLOCK, ROWS, TILES, KEYS, DEAL, HAS_KEEP
        )  # fmt: skip
        b0 = b // inner
        members = 1
        if KEYS:
            members = group
        for member in range(members):
            head = h * group + member if KEYS else h
            for j in range(tiles):
                met_row = start + j * BLOCK if KEYS else start - j * BLOCK
                row, column, down, right = bias_corner(own_row, met_row, KEYS)
                flat = first_row(b0, b - b0 * inner, head, row, odd)
                hand_over(
                    use, flat, row, column, down, right, M, N, odd, raw, raw_bars, bias, bars[4], bars[5], RAW_STAGES,
                    BIAS_STAGES, 64 if KEYS else BLOCK,
                )  # fmt: skip
                use += 1
        lot, turn = following(lot, turn, dealt, extent, DEAL)


@jit
def produce(
    own_descs, own_moves, met_descs, met_moves, bias_desc, bias_moves, row_descs, caps_desc, own, met, bias, rows,
    caps, mask, odd_parts, bars, numbers,
    D: gl.constexpr, DV: gl.constexpr, BLOCK: gl.constexpr, ROWS: gl.constexpr, TILES: gl.constexpr,
    A_BUFFERS: gl.constexpr, STAGES: gl.constexpr, BIAS_STAGES: gl.constexpr, HAS_BIAS: gl.constexpr,
    KEYS: gl.constexpr, HAS_KEEP: gl.constexpr, RAW_STAGES: gl.constexpr, DEAL: gl.constexpr,
):  # fmt: skip
    """The copying warp: own tiles of every item, then its met tiles, each with what belongs to it.

    HAS_KEEP: copies of K and V with hidden keys that are not fit are announced to the barrier behind the ring's, whose
    only reader is this warp. It blanks the keys and then completes the slot's barrier itself.
    """
    BLANKS_OWN: gl.constexpr = HAS_KEEP and KEYS
    BLANKS_MET: gl.constexpr = HAS_KEEP and not KEYS
    own_full, own_empty, met_full, met_empty, bias_full, bias_empty = bars
    inner, items, _, _, heads, group, _, _ = numbers
    row_bytes: gl.constexpr = 2 * row_descs[0].block_type.nbytes
    own_bytes: gl.constexpr = own_descs[0].block_type.nbytes + own_descs[1].block_type.nbytes
    pair_bytes: gl.constexpr = met_descs[0].block_type.nbytes + met_descs[1].block_type.nbytes
    met_bytes: gl.constexpr = pair_bytes + (caps_desc.block_type.nbytes if BLANKS_MET else 0)
    extent = own_extent(numbers, ROWS, KEYS)
    dealt = deal(items, extent, DEAL)
    lot, turn, own_use, met_use, bias_use, landed = first_lot(DEAL), 0, 0, 0, 0, 0
    while lot < dealt[0]:
        h, b, own_row, start, tiles, _ = work_item(
            lot, turn, dealt, extent, numbers, mask, BLOCK, ROWS, TILES, KEYS, DEAL, HAS_KEEP
        )  # fmt: skip
        met_head = h // group
        members = 1
        if KEYS:
            met_head = h * group
            members = group
        ready = own_use % A_BUFFERS
        if BLANKS_OWN:
            ready = gl.where((tiles == 0) | are_fit(b, inner, own_row, mask, ROWS), ready, A_BUFFERS)
        wait_empty(own_empty, own_use, A_BUFFERS)
        bar = own_full.index(ready)
        mbarrier.expect(bar, 2 * ROWS * (own_bytes + (0 if KEYS else row_bytes)))
        for g in gl.static_range(ROWS):
            for w in gl.static_range(2):
                i = ((own_use % A_BUFFERS) * ROWS + g) * 2 + w
                load_pair(own_descs, own_moves, b + g, inner, h, own_row + w * 64, bar, own, i)
                if not KEYS:
                    line = (b + g) * heads + h
                    tma_load(row_descs[0], [line, own_row + w * 64], bar, rows[0].index(i))
                    tma_load(row_descs[1], [line, own_row + w * 64], bar, rows[1].index(i))
        if BLANKS_OWN:  # noqa: SIM102
            if ready == A_BUFFERS:
                mbarrier.wait(own_full.index(A_BUFFERS), landed & 1)
                for x in range(2 * ROWS):
                    line = item_line(b + x // 2, inner, mask)
                    i = own_use % A_BUFFERS * (2 * ROWS) + x
                    blank_pair(own, i, line, own_row + x % 2 * 64, mask, 64, D, DV)
                mbarrier.arrive(own_full.index(own_use % A_BUFFERS), count=1)
                landed += 1
        own_use += 1
        for member in range(members):
            for j in range(tiles):
                met_row = start + j * BLOCK if KEYS else start - j * BLOCK
                if RAW_STAGES > 0:
                    head = met_head + member if KEYS else h
                    copy_odd_pair(
                        bias_use, bias_desc, b, inner, head, own_row, met_row, odd_parts, 64 if KEYS else BLOCK, KEYS,
                        RAW_STAGES,
                    )  # fmt: skip
                    bias_use += 1
                elif HAS_BIAS:
                    wait_empty(bias_empty, bias_use, BIAS_STAGES)
                    slot = bias_use % BIAS_STAGES
                    bar = bias_full.index(slot)
                    mbarrier.expect(bar, 2 * bias_desc.block_type.nbytes)
                    b0 = b // inner
                    b1 = b - b0 * inner
                    for w in gl.static_range(2):
                        if KEYS:
                            place_at = at(b0, b1, met_head + member, met_row, own_row + w * 64, bias_moves)
                        else:
                            place_at = at(b0, b1, h, own_row + w * 64, met_row, bias_moves)
                        tma_load(bias_desc, place_at, bar, bias.index(slot * 2 + w))
                    bias_use += 1
                for g in gl.static_range(ROWS):
                    slot = met_use % STAGES
                    ready = slot
                    if BLANKS_MET:
                        line = item_line(b + g, inner, mask)
                        ready = gl.where(is_fit(line, met_row, mask, BLOCK), slot, STAGES)
                    wait_empty(met_empty, met_use, STAGES)
                    bar = met_full.index(ready)
                    mbarrier.expect(bar, met_bytes + (row_bytes if KEYS else 0))
                    load_pair(met_descs, met_moves, b + g, inner, met_head + member, met_row, bar, met, slot)
                    if KEYS:
                        line = (b + g) * heads + met_head + member
                        tma_load(row_descs[0], [line, met_row], bar, rows[0].index(slot))
                        tma_load(row_descs[1], [line, met_row], bar, rows[1].index(slot))
                    if BLANKS_MET:
                        tma_load(caps_desc, [line, met_row], bar, caps.index(slot))
                        if ready == STAGES:
                            mbarrier.wait(met_full.index(STAGES), landed & 1)
                            blank_pair(met, slot, line, met_row, mask, BLOCK, D, DV)
                            mbarrier.arrive(met_full.index(slot), count=1)
                            landed += 1
                    met_use += 1
        lot, turn = following(lot, turn, dealt, extent, DEAL)
