"""The copying warp of the forward kernel of a shared bias, and the order in which programs take its items."""

from biasflash.backends.hopper import pipeline as ring
from biasflash.backends.hopper.forward_parts import key_tiles, keys_of
from biasflash.backends.hopper.gluon import gl, jit, mbarrier, tma_load
from biasflash.backends.hopper.marks import copied_blank, is_fit, is_whole, line_of
from biasflash.tile.span import place


@jit
def locate(item, items, extent, FORM: gl.constexpr):
    """Item -> (query tile, first batch item, head).

    CAUSAL: the longest first, and every second round of the grid is dealt backwards, so that a short item follows a
    long one; items of one bias tile stay together.
    """
    M, _N, heads, batch, _shift = extent
    tiles = gl.cdiv(M, FORM.BLOCK_M)
    groups = batch // FORM.ROWS
    if FORM.IS_CAUSAL:
        dealt = item - gl.program_id(0)
        back = dealt + gl.minimum(gl.num_programs(0), items - dealt) - 1 - gl.program_id(0)
        index = gl.where((dealt // gl.num_programs(0)) % 2 == 1, back, item)
        pair = index % (groups * heads)
        return tiles - 1 - index // (groups * heads), pair % groups * FORM.ROWS, pair // groups
    else:
        tile, b, h = place(item, tiles, groups, heads, FORM.ORDER)
        return tile, b * FORM.ROWS, h


@jit
def widest(first, inner, extent, mask, FORM: gl.constexpr):
    """``keys_of`` of ROWS batch items, the most."""
    n = keys_of(first, inner, extent, mask)
    for g in gl.static_range(1, FORM.ROWS):
        n = gl.maximum(n, keys_of(first + g, inner, extent, mask))
    return n


@jit
def are_whole(first, column, inner, mask, FORM: gl.constexpr):
    """``is_whole`` for ROWS batch items."""
    found = is_whole(line_of(first // inner, first % inner, mask), column, mask, FORM.BLOCK_N)
    for g in gl.static_range(1, FORM.ROWS):
        line = line_of((first + g) // inner, (first + g) % inner, mask)
        found = found & is_whole(line, column, mask, FORM.BLOCK_N)
    return found


@jit
def copy_unit(u, b, head, key, to, inner, descs, moves, buffers, barrier, mask, FORM: gl.constexpr):
    """Copy keys and values from ``to`` on, and what ``mask`` says from ``key`` on; ``barrier`` completes with them."""
    _, k_desc, v_desc, _, caps_desc = descs
    _, k_moves, v_moves, _ = moves
    _, k_tiles, v_tiles, _, caps_tiles = buffers
    slot = u % FORM.KV_STAGES
    b0, b1 = b // inner, b % inner
    if FORM.HAS_KEEP:
        nbytes: gl.constexpr = k_desc.block_type.nbytes + v_desc.block_type.nbytes + caps_desc.block_type.nbytes
        mbarrier.expect(barrier, nbytes)
        tma_load(caps_desc, [line_of(b0, b1, mask), key], barrier, caps_tiles.index(slot))
    else:
        mbarrier.expect(barrier, k_desc.block_type.nbytes + v_desc.block_type.nbytes)
    tma_load(k_desc, ring.at(b0, b1, head, to, 0, k_moves), barrier, k_tiles.index(slot))
    tma_load(v_desc, ring.at(b0, b1, head, to, 0, v_moves), barrier, v_tiles.index(slot))


@jit
def load_unit(u, blanks, b, head, key, inner, extent, descs, moves, buffers, rings, mask, FORM: gl.constexpr):
    """``copy_unit`` with hidden values made 0; returns ``blanks``, the tiles where that took a hand, counted on.

    Tiles behind the item's last visible key come from behind the tensors, where copies read zeros.
    """
    kv_full, landed = rings[2], rings[6]
    slot = u % FORM.KV_STAGES
    if FORM.HAS_KEEP:
        line = line_of(b // inner, b % inner, mask)
        is_seen = key < keys_of(b, inner, extent, mask)
        to = gl.where(is_seen, key, key + mask[2])
        if is_seen & (not is_fit(line, key, mask, FORM.BLOCK_N)):
            copy_unit(u, b, head, key, to, inner, descs, moves, buffers, landed.index(0), mask, FORM)
            v = buffers[2].index(slot).reshape([FORM.BLOCK_N, FORM.DV_BLOCK])
            copied_blank(landed.index(0), blanks, v, line, key, mask, kv_full.index(slot), FORM.BLOCK_N, FORM.DV_BLOCK)
            blanks += 1
        else:
            copy_unit(u, b, head, key, to, inner, descs, moves, buffers, kv_full.index(slot), mask, FORM)
    else:
        copy_unit(u, b, head, key, key, inner, descs, moves, buffers, kv_full.index(slot), mask, FORM)
    return blanks


@jit
def copy_tiles(descs, moves, buffers, rings, extent, items, inner, group, mask, FORM: gl.constexpr):
    """The copying warp: an item's queries, then for every key tile the bias and each batch item's keys and values."""
    q_desc, bias_desc = descs[0], descs[3]
    q_moves, bias_moves = moves[0], moves[3]
    q_tiles, bias_tiles = buffers[0], buffers[3]
    q_full, q_empty, _kv_full, kv_empty, bias_full, bias_empty, _landed, _turns = rings
    M, n, heads, batch, shift = extent
    uses, blanks = 0, 0  # uses of the bias ring
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        tile, first, h = locate(item, items, extent, FORM)
        if FORM.HAS_KEEP:
            n = widest(first, inner, extent, mask, FORM)
        tiles, _masked = key_tiles(tile * FORM.BLOCK_M, (M, n, heads, batch, shift), FORM.BLOCK_M, FORM)
        done = (item - gl.program_id(0)) // gl.num_programs(0)
        slot = done % FORM.Q_BUFFERS
        ring.wait_empty(q_empty, done, FORM.Q_BUFFERS)
        mbarrier.expect(q_full.index(slot), 2 * FORM.ROWS * q_desc.block_type.nbytes)
        for i in gl.static_range(2 * FORM.ROWS):
            b = first + i // 2
            to = ring.at(b // inner, b % inner, h, tile * FORM.BLOCK_M + i % 2 * 64, 0, q_moves)
            tma_load(q_desc, to, q_full.index(slot), q_tiles.index(slot * FORM.ROWS * 2 + i))
        for j in range(tiles):
            key = (tiles - 1 - j) * FORM.BLOCK_N
            slot = uses % FORM.BIAS_STAGES
            ring.wait_empty(bias_empty, uses, FORM.BIAS_STAGES)
            mbarrier.expect(bias_full.index(slot), 2 * bias_desc.block_type.nbytes)
            for w in gl.static_range(2):
                to = ring.at(first // inner, first % inner, h, tile * FORM.BLOCK_M + w * 64, key, bias_moves)
                tma_load(bias_desc, to, bias_full.index(slot), bias_tiles.index(slot * 2 + w))
            for g in gl.static_range(FORM.ROWS):
                u = uses * FORM.ROWS + g
                ring.wait_empty(kv_empty, u, FORM.KV_STAGES)
                blanks = load_unit(
                    u, blanks, first + g, h // group, key, inner, extent, descs, moves, buffers, rings, mask, FORM
                )
            uses += 1
