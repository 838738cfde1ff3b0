"""The copying warp of the forward kernel."""

from biasflash.backends.hopper import pipeline as ring
from biasflash.backends.hopper.deal import deal, first_lot, following, locate
from biasflash.backends.hopper.forward_parts import key_tiles, keys_of
from biasflash.backends.hopper.gluon import gl, jit, mbarrier, tma_load
from biasflash.backends.hopper.marks import copied_blank, is_fit, line_of
from biasflash.backends.hopper.odd_rows import VECTOR, copy_odd, first_row, hand_over

ROWS = gl.constexpr(64)  # of one warpgroup


@jit
def copy_pieces(desc, b0, b1, head, row, moves, barrier, tiles, slot, FORM: gl.constexpr):
    """Copy PIECES blocks that lie side by side, from ``row`` on: queries or keys."""
    for c in gl.static_range(FORM.PIECES):
        to = ring.at(b0, b1, head, row, c * FORM.D_BLOCK, moves)
        tma_load(desc, to, barrier, tiles.index(slot * FORM.PIECES + c))


@jit
def copy_values(slot, to, v_desc, v_tiles, barrier):
    """Copy a tile of values; the barrier completes with it."""
    mbarrier.expect(barrier, v_desc.block_type.nbytes)
    tma_load(v_desc, to, barrier, v_tiles.index(slot))


@jit
def load_values(u, blanks, to, line, v_desc, v_tiles, v_full, landed, mask, FORM: gl.constexpr):
    """Copy the ``u``-th tile of values, from ``to`` on; returns how many had hidden keys that were made 0."""
    slot = u % FORM.KV_STAGES
    if FORM.HAS_KEEP:
        if not is_fit(line, to[3], mask, FORM.BLOCK_N):
            copy_values(slot, to, v_desc, v_tiles, landed.index(0))
            tile = v_tiles.index(slot).reshape([FORM.BLOCK_N, FORM.DV_BLOCK])
            copied_blank(
                landed.index(0), blanks, tile, line, to[3], mask, v_full.index(slot), FORM.BLOCK_N, FORM.DV_BLOCK
            )
            blanks += 1
        else:
            copy_values(slot, to, v_desc, v_tiles, v_full.index(slot))
    else:
        copy_values(slot, to, v_desc, v_tiles, v_full.index(slot))
    return blanks


@jit
def load_keys(u, i, blanks, tiles, spot, descs, moves, buffers, rings, mask, odd_parts, FORM: gl.constexpr):
    """Copy the ``i``-th tile of an item (the ``u``-th of all): keys, biases, values, in the order they are needed.

    Returns ``blanks`` with the tiles counted whose values were blanked.
    """
    k_desc, v_desc, bias_desc, caps_desc = descs
    k_moves, v_moves, bias_moves = moves
    k_tiles, v_tiles, bias_tiles, caps_tiles = buffers
    k_full, k_empty, v_full, v_empty, bias_full, bias_empty, landed, _turns = rings
    b0, b1, h, kv_head, row = spot
    column = (tiles - 1 - i) * FORM.BLOCK_N
    slot = u % FORM.KV_STAGES
    ring.wait_empty(k_empty, u, FORM.KV_STAGES)
    if FORM.HAS_KEEP:
        mbarrier.expect(k_full.index(slot), FORM.PIECES * k_desc.block_type.nbytes + caps_desc.block_type.nbytes)
        tma_load(caps_desc, [line_of(b0, b1, mask), column], k_full.index(slot), caps_tiles.index(slot))
    else:
        mbarrier.expect(k_full.index(slot), FORM.PIECES * k_desc.block_type.nbytes)
    copy_pieces(k_desc, b0, b1, kv_head, column, k_moves, k_full.index(slot), k_tiles, slot, FORM)
    if FORM.RAW_STAGES > 0:
        raw, raw_bars, ends_desc, odd = odd_parts
        stage = u % FORM.RAW_STAGES
        ring.wait_empty(raw_bars[1], u, FORM.RAW_STAGES)
        mbarrier.expect(raw_bars[0].index(stage), 2 * FORM.WARPGROUPS * ROWS * (FORM.BLOCK_N + VECTOR))
        for part in range(FORM.WARPGROUPS):
            flat = first_row(b0, b1, h, row + part * ROWS, odd)
            to = stage * FORM.WARPGROUPS + part
            copy_odd((bias_desc, ends_desc), flat, column, odd, raw_bars[0].index(stage), raw, to, FORM.BLOCK_N)
    elif FORM.HAS_BIAS:
        stage = u % FORM.BIAS_STAGES
        ring.wait_empty(bias_empty, u, FORM.BIAS_STAGES)
        mbarrier.expect(bias_full.index(stage), FORM.WARPGROUPS * bias_desc.block_type.nbytes)
        for w in gl.static_range(FORM.WARPGROUPS):
            to = bias_tiles.index(stage * FORM.WARPGROUPS + w)
            tma_load(bias_desc, ring.at(b0, b1, h, row + w * ROWS, column, bias_moves), bias_full.index(stage), to)
    ring.wait_empty(v_empty, u, FORM.KV_STAGES)
    to = ring.at(b0, b1, kv_head, column, 0, v_moves)
    return load_values(u, blanks, to, line_of(b0, b1, mask), v_desc, v_tiles, v_full, landed, mask, FORM)


@jit
def copy_tiles(
    q_parts, descs, moves, buffers, rings, extent, items, inner, group, mask, odd_parts, FORM: gl.constexpr
):  # fmt: skip
    """The copying warp."""
    q_tiles, q_full, q_empty, q_desc, q_moves = q_parts
    M, n, heads, batch, shift = extent
    dealt = deal(items, extent, FORM)
    lot, turn, done, base, blanks = first_lot(FORM), 0, 0, 0, 0
    while lot < dealt[0]:
        tile, b, h = locate(lot, turn, dealt, extent, FORM)
        row = tile * FORM.BLOCK_M
        spot = (b // inner, b % inner, h, h // group, row)
        if FORM.HAS_KEEP:
            n = keys_of(b, inner, extent, mask)
        tiles, _masked = key_tiles(row, (M, n, heads, batch, shift), FORM.BLOCK_M, FORM)
        blanks = load_keys(base, 0, blanks, tiles, spot, descs, moves, buffers, rings, mask, odd_parts, FORM)
        for w in gl.static_range(FORM.WARPGROUPS):  # after the first keys: queries are handed back last of all
            mbarrier.wait(q_empty.index(w), (done & 1) ^ 1)
            mbarrier.expect(q_full.index(w), FORM.PIECES * q_desc.block_type.nbytes)
            own_row = row + w * ROWS
            copy_pieces(q_desc, b // inner, b % inner, h, own_row, q_moves, q_full.index(w), q_tiles, w, FORM)
        for i in range(1, tiles):
            blanks = load_keys(base + i, i, blanks, tiles, spot, descs, moves, buffers, rings, mask, odd_parts, FORM)
        base += tiles
        done += 1
        lot, turn = following(lot, turn, dealt, extent, FORM)


@jit
def order_tiles(bias_tiles, rings, extent, items, inner, mask, odd_parts, FORM: gl.constexpr):
    """The four warps that put the rows of bias tiles in order, with RAW_STAGES."""
    raw, raw_bars, _ends_desc, odd = odd_parts
    M, n, heads, batch, shift = extent
    dealt = deal(items, extent, FORM)
    lot, turn, u = first_lot(FORM), 0, 0
    while lot < dealt[0]:
        tile, b, h = locate(lot, turn, dealt, extent, FORM)
        row = tile * FORM.BLOCK_M
        if FORM.HAS_KEEP:
            n = keys_of(b, inner, extent, mask)
        tiles, _masked = key_tiles(row, (M, n, heads, batch, shift), FORM.BLOCK_M, FORM)
        flat = first_row(b // inner, b % inner, h, row, odd)
        for i in range(tiles):
            column = (tiles - 1 - i) * FORM.BLOCK_N
            hand_over(
                u, flat, row, column, ROWS, 0, M, extent[1], odd, raw, raw_bars, bias_tiles, rings[4], rings[5],
                FORM.RAW_STAGES, FORM.BIAS_STAGES, FORM.BLOCK_N,
            )  # fmt: skip
            u += 1
        lot, turn = following(lot, turn, dealt, extent, FORM)
