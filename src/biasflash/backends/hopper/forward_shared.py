"""Forward pass for a bias that batch items share: one bias tile serves several of them, out of shared memory.

Units of work are (key tile, batch item), the items of one tile in turn. The scores of the next unit are issued before
the weights of this one are multiplied, across key tiles and across the items of a program as well (the last unit of
all issues scores that nobody reads). Rings: queries of ROWS batch items, one key and value tile of one of them, one
bias tile. Keys are walked from the last tile to the first: tiles that need a mask come first.

With FIXED a query row has one reference for all its keys and all ROWS items: no maxima, no factors of what was
accumulated, and the bias enters exponents with the reference in it. Weights of bfloat16 reach as far as float32: any
reference serves that is at most 44 above the log-sum-exp and 69 below. Flags say which 64 rows are to be done anew.
"""

from dataclasses import make_dataclass
from typing import Any

from triton import constexpr_function

from biasflash.backends.hopper import pipeline as ring
from biasflash.backends.hopper.forward_parts import (
    cut,
    far,
    key_tiles,
    keys_of,
    rounded,
    row_unit,
    store_statistics,
)
from biasflash.backends.hopper.forward_shared_copies import are_whole, copy_tiles, locate, widest
from biasflash.backends.hopper.gluon import (
    fence_async_shared,
    gl,
    jit,
    mbarrier,
    store_wait,
    tma_store,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from biasflash.backends.hopper.pieces import NEG_INF, repeated, replaced, slots, widen
from biasflash.tile.softmax import LOG2E

# FIXED: sums to be believed. Weights below 2**-126 are lost, 2**-62 of the least sum. The largest has a reciprocal;
# whether it was too much for values is looked at.
LEAST_SUM = gl.constexpr(2.0**-64)
LARGEST_SUM = gl.constexpr(2.0**100)

NAMES = [
    "D_BLOCK", "DV_BLOCK", "BLOCK_N", "ROWS", "Q_BUFFERS", "KV_STAGES", "BIAS_STAGES", "IS_CAUSAL", "AHEAD",
    "FIXED", "KEEP_LOW", "FAR", "ORDER", "HAS_KEEP", "IN_TURNS", "BLOCK_M", "HAS_BIAS", "REACH", "KEEP", "TWIN",
    "SCORES", "OUT",
]  # fmt: skip
Form: Any = make_dataclass("Form", NAMES, frozen=True)


@constexpr_function
def form(*parameters: Any) -> Any:
    """The kernel's parameters in one, with two layouts: of scores and of outputs.

    KEEP: a widened bias tile stays in registers for all ROWS items. It takes half a register a score, beside the
    outputs and one or two tiles of scores; where the three are more than 192 of 240, each item reads the tile anew.
    TWIN: tiles without hidden keys have code of their own. Where position hides keys as well, the two spill 50 to 100
    registers, but in tiles of 64 keys.
    REACH: how many units ahead of the softmax keys must have come, and how many scores may be in flight.
    """
    dv, n, rows, is_causal, ahead, is_masked = (parameters[i] for i in (1, 2, 3, 7, 8, 13))
    reach = 2 if ahead else 1
    keep = rows * dv + n * (1 + reach) <= 384
    twin = is_masked and not (is_causal and n > 64)
    layouts = (gl.NVMMADistributedLayout([3, 0], [4, 1], [16, width, 16]) for width in (n, dv))
    return Form(*(gl.constexpr(x) for x in (*parameters, 128, True, reach, keep, twin, *layouts)))


@jit
def score(w: gl.constexpr, g: gl.constexpr, q_tiles, k_tiles, done, u, FORM: gl.constexpr):
    """Start the product of batch item ``g``'s queries of use ``done`` of their ring and the keys of use ``u``."""
    q = q_tiles.index((done % FORM.Q_BUFFERS * FORM.ROWS + g) * 2 + w).reshape([64, FORM.D_BLOCK])
    k = k_tiles.index(u % FORM.KV_STAGES).reshape([FORM.BLOCK_N, FORM.D_BLOCK]).permute((1, 0))
    nothing = gl.zeros([64, FORM.BLOCK_N], gl.float32, layout=FORM.SCORES)
    return warpgroup_mma(q, k, nothing, use_acc=False, is_async=True)


@jit
def score_next(w: gl.constexpr, g: gl.constexpr, q_tiles, k_tiles, q_full, done, u, last, more, FORM: gl.constexpr):
    """``score`` of the unit after unit ``g`` of a key tile; after the ``last`` tile the first of the next item."""
    if g + 1 == FORM.ROWS:
        ring.wait_full_if(q_full, done + 1, last & more, FORM.Q_BUFFERS)
        done += last.to(gl.int32)
    return score(w, (g + 1) % FORM.ROWS, q_tiles, k_tiles, done, u + 1, FORM)


@jit
def lane_sums(p, COLUMNS: gl.constexpr):
    """Row sums in eight parts, as far as a thread can form them alone."""
    return gl.sum(p.reshape([64, COLUMNS // 8, 8]), 1)


@jit
def hide(x, end, FORM: gl.constexpr):
    """-inf from column ``end`` of each row on.

    Columns are 8 a + b with all a in one thread: comparisons are with constants.
    """
    x = x.reshape([64, FORM.BLOCK_N // 8, 8])
    PAIRS: gl.constexpr = gl.SliceLayout(1, x.type.layout)
    a = gl.arange(0, FORM.BLOCK_N // 8, layout=gl.SliceLayout(0, gl.SliceLayout(2, x.type.layout)))
    b = gl.arange(0, 8, layout=gl.SliceLayout(0, PAIRS))
    left = gl.convert_layout(end, gl.SliceLayout(1, PAIRS))[:, None] - b[None, :]
    x = gl.where(a[None, :, None] * 8 < left[:, None, :], x, NEG_INF)
    return gl.convert_layout(x.reshape([64, FORM.BLOCK_N]), FORM.SCORES)


@jit
def read_bias(w: gl.constexpr, uses, column, is_masked, limit, bias_tiles, FORM: gl.constexpr):
    """The bias of use ``uses``, from key ``column`` on."""
    tile = bias_tiles.index(uses % FORM.BIAS_STAGES * 2 + w)
    bias = widen(tile.reshape([64, FORM.BLOCK_N]).load(FORM.SCORES))
    if FORM.IS_CAUSAL or not FORM.HAS_KEEP:  # noqa: SIM102
        if is_masked:  # on the bias, once for ROWS items; on scores it spills 50 registers
            bias = hide(bias, limit + 1 - column, FORM)
    return bias


@jit
def first_reference(s, bias, m, scale, caps_tiles, u, FORM: gl.constexpr):
    """FIXED: ``m`` with the rows' reference, the maximum of the first scores of the first item, but 0 at least.

    Rows far below 0 there are mostly hidden: by position, or a bias of -100, -1e4, ``finfo.min`` or -inf.
    """
    x = s * scale + bias
    if FORM.HAS_KEEP:
        x = cut(x, caps_tiles, u, FORM)
    return replaced(m, 0, gl.maximum(gl.max(x, 1), 0.0))


@jit
def key_tile(w: gl.constexpr, s, out, m, l, spot, scale, buffers, rings, CUTS: gl.constexpr, FORM: gl.constexpr):
    """One key tile of ROWS batch items; returns ``(s, out, m, l)``. CUTS: a key may be hidden by a mask.

    On entry ``s`` holds the scores of the first of them and nothing is in flight; so it is on return, for the tile
    after. (The assembler serialises all products if one is in flight where a loop closes.) In between, oldest first:
    scores of this unit, weights of the unit before, and with AHEAD scores of the unit after.
    """
    q_tiles, k_tiles, v_tiles, bias_tiles, caps_tiles = buffers
    q_full, q_empty, kv_full, kv_empty, bias_full, bias_empty, _landed, turns = rings
    uses, j, tiles, masked, done, more, limit = spot
    KEEP: gl.constexpr = FORM.KEEP and not (CUTS and FORM.TWIN and FORM.FIXED)  # beside the caps it spills
    last = j + 1 == tiles
    p = s
    for g in gl.static_range(FORM.ROWS):
        u = uses * FORM.ROWS + g
        if FORM.AHEAD:
            s_next = score_next(w, g, q_tiles, k_tiles, q_full, done, u, last, more, FORM)
        if g == 0:
            ring.wait_full(bias_full, uses, FORM.BIAS_STAGES)
        if g == 0 or not KEEP:
            column = (tiles - 1 - j) * FORM.BLOCK_N
            bias = read_bias(w, uses, column, j < masked, limit, bias_tiles, FORM)
            if FORM.FIXED:
                if g == 0 and j == 0:
                    m = first_reference(s, bias, m, scale, caps_tiles, u, FORM)
                bias = bias * LOG2E - rounded(m[0], gl.full_like(m[0], LOG2E))[:, None]
        if g > 0:
            s = warpgroup_mma_wait(FORM.REACH, deps=(s,))
        if FORM.FIXED:
            y = s * (scale * LOG2E) + bias
            if CUTS:
                y = cut(y, caps_tiles, u, FORM)
        else:
            x = s * scale + bias
            if CUTS:
                x = cut(x, caps_tiles, u, FORM)
            top = gl.maximum(m[g], gl.max(x, 1))
            unit = row_unit(top, gl.full_like(top, LOG2E), FORM)
            reference = gl.where(top == NEG_INF, 0.0, rounded(top, unit))
            alpha = gl.exp2(rounded(m[g], unit) - reference)
            m = replaced(m, g, top)
        if g == 0 and (j == 0) & (done > 0):  # the output of the item before lies where its queries were
            store_wait(0)
            ring.hand_back(q_empty, done - 1, FORM.Q_BUFFERS)
        # The next keys are waited for here because a loop ends the basic block: it keeps the wait below where it is.
        ring.wait_full_if(kv_full, u + FORM.REACH, (g + FORM.REACH < FORM.ROWS) | ~last | more, FORM.KV_STAGES)
        if g > 0:
            o, p = warpgroup_mma_wait(FORM.REACH - 1, deps=(out[g - 1], p))
            out = replaced(out, g - 1, o)
            ring.hand_back(kv_empty, u - 1, FORM.KV_STAGES)
        if FORM.FIXED:
            weights = gl.exp2(y)
            l = replaced(l, g, l[g] + lane_sums(weights, FORM.BLOCK_N))
        else:
            weights = gl.exp2(x * unit[:, None] - reference[:, None])
            fade = gl.convert_layout(alpha, gl.SliceLayout(1, l[g].type.layout))
            l = replaced(l, g, l[g] * fade[:, None] + lane_sums(weights, FORM.BLOCK_N))
        p = gl.convert_layout(weights.to(q_tiles.dtype), gl.DotOperandLayout(0, FORM.OUT, 2))
        if FORM.IN_TURNS:
            ring.wait_turn(w, turns, u)
        if not FORM.AHEAD:
            s_next = score_next(w, g, q_tiles, k_tiles, q_full, done, u, last, more, FORM)
        v = v_tiles.index(u % FORM.KV_STAGES).reshape([FORM.BLOCK_N, FORM.DV_BLOCK])
        o = out[g]
        if not FORM.FIXED:
            o = o * gl.convert_layout(alpha, gl.SliceLayout(1, FORM.OUT))[:, None]
        o = warpgroup_mma(p, v, o, is_async=True)
        if FORM.IN_TURNS:
            ring.pass_turn(w, turns, 2)
        if g + 1 == FORM.ROWS:
            o, p, s_next = warpgroup_mma_wait(0, deps=(o, p, s_next))
            ring.hand_back(kv_empty, u, FORM.KV_STAGES)
        out = replaced(out, g, o)
        if g == (0 if KEEP else FORM.ROWS - 1):  # all of the tile has gone into weights whose product was issued
            ring.hand_back(bias_empty, uses, FORM.BIAS_STAGES)
        s = s_next
    return s, out, m, l


@jit
def row_sums(o, l, row, FORM: gl.constexpr):
    """The sums of weights in one part. FIXED: nan where a sum of values is not finite."""
    if FORM.FIXED:
        l += gl.convert_layout(lane_sums(o * 0.0, FORM.DV_BLOCK), l.type.layout)
    return gl.convert_layout(gl.sum(l, 1), row.type.layout)


@jit
def store_flags(out, l, row, limit, first, to, pitch, flag_ptr, inner, extent, mask, FORM: gl.constexpr):
    """1.0 for ROWS items where sums of a row are not to be believed.

    Nor is a sum of 0, unless position hides all keys or a mask all of the item's.
    """
    counts = gl.zeros_like(row)  # of such rows, up to 64: a byte for each item
    for g in gl.static_range(FORM.ROWS):
        total = row_sums(out[g], l[g], row, FORM)
        fine = (total >= LEAST_SUM) & (total <= LARGEST_SUM)
        dead = limit < 0
        if FORM.HAS_KEEP:
            dead = dead | (keys_of(first + g, inner, extent, mask) == 0)
        fine = fine | ((total == 0.0) & dead) | (row >= extent[0])
        counts += gl.where(fine, 0, 1 << (8 * g))
    counts = gl.sum(counts, 0)
    for g in gl.static_range(FORM.ROWS):
        gl.store(flag_ptr + to + g * pitch, gl.where(((counts >> (8 * g)) & 255) == 0, 0.0, 1.0))


@jit
def attend(
    w: gl.constexpr, out_desc, out_moves, row_ptrs, flag_ptr, buffers, rings, extent, items, inner, scale,
    mask, FORM: gl.constexpr,
):  # fmt: skip
    """Warpgroup ``w``: rows ``64 w`` to ``64 w + 63`` of every query tile."""
    ROW: gl.constexpr = gl.SliceLayout(1, FORM.SCORES)
    q_tiles, k_tiles = buffers[0], buffers[1]
    q_full, kv_full = rings[0], rings[2]
    M, N, heads, batch, shift = extent
    unit = gl.full([64], LOG2E, gl.float32, layout=ROW)
    no_sums = lane_sums(gl.zeros([64, FORM.BLOCK_N], gl.float32, layout=FORM.SCORES), FORM.BLOCK_N)
    ring.wait_full(q_full, 0, FORM.Q_BUFFERS)
    ring.wait_full(kv_full, 0, FORM.KV_STAGES)
    s = score(w, 0, q_tiles, k_tiles, 0, 0, FORM)
    s = warpgroup_mma_wait(0, deps=(s,))
    if FORM.AHEAD:
        ring.wait_full(kv_full, 1, FORM.KV_STAGES)
    n = N
    if FORM.HAS_KEEP:
        n = widest(locate(gl.program_id(0), items, extent, FORM)[1], inner, extent, mask, FORM)
    uses = 0  # of the bias ring; ROWS times as many of the key ring
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        tile, first, h = locate(item, items, extent, FORM)
        tiles, masked = key_tiles(tile * FORM.BLOCK_M, (M, n, heads, batch, shift), FORM.BLOCK_M, FORM)
        done = (item - gl.program_id(0)) // gl.num_programs(0)
        more = item + gl.num_programs(0) < items
        if FORM.HAS_KEEP:  # of the next item: on its way while this one is computed
            after = locate(gl.where(more, item + gl.num_programs(0), item), items, extent, FORM)[1]
            n = widest(after, inner, extent, mask, FORM)
        start = tile * FORM.BLOCK_M + w * 64
        row = start + gl.arange(0, 64, layout=ROW)
        limit = gl.full([64], N - 1, gl.int32, layout=ROW)  # the last key that a row sees
        if FORM.IS_CAUSAL:
            limit = gl.minimum(row + shift, limit)
        out = repeated(gl.zeros([64, FORM.DV_BLOCK], gl.float32, layout=FORM.OUT), FORM.ROWS)
        m = repeated(gl.full([64], NEG_INF, gl.float32, layout=ROW), FORM.ROWS)
        l = repeated(no_sums, FORM.ROWS)
        whole = False  # what lies past the last key is in the first tile
        for j in range(tiles):
            spot = (uses, j, tiles, masked, done, more, limit)
            if FORM.TWIN:
                next_whole = are_whole(first, gl.maximum(tiles - 2 - j, 0) * FORM.BLOCK_N, inner, mask, FORM)
                if whole:  # branches around the minimum alone, for each batch item, uncover exponentials
                    s, out, m, l = key_tile(w, s, out, m, l, spot, scale, buffers, rings, False, FORM)
                else:
                    s, out, m, l = key_tile(w, s, out, m, l, spot, scale, buffers, rings, True, FORM)
                whole = next_whole
            else:
                s, out, m, l = key_tile(w, s, out, m, l, spot, scale, buffers, rings, FORM.HAS_KEEP, FORM)
            uses += 1
        if FORM.FIXED:
            pitch = 2 * gl.cdiv(M, FORM.BLOCK_M)
            to = (first * heads + h) * pitch + 2 * tile + w
            store_flags(out, l, row, limit, first, to, heads * pitch, flag_ptr, inner, extent, mask, FORM)
        slot = done % FORM.Q_BUFFERS * FORM.ROWS
        for g in gl.static_range(FORM.ROWS):
            total = row_sums(out[g], l[g], row, FORM)
            head = (first + g) * heads + h
            inverse = store_statistics(m[0 if FORM.FIXED else g], total, unit, scale, row, head, M, row_ptrs, FORM)
            o = out[g] * gl.convert_layout(inverse, gl.SliceLayout(1, FORM.OUT))[:, None]
            q_tiles.index((slot + g) * 2 + w).reshape([64, FORM.DV_BLOCK]).store(o.to(q_tiles.dtype))
        fence_async_shared()
        for g in gl.static_range(FORM.ROWS):
            b0, b1 = (first + g) // inner, (first + g) % inner
            tma_store(out_desc, ring.at(b0, b1, h, start, 0, out_moves), q_tiles.index((slot + g) * 2 + w))
    store_wait(0)


@jit(do_not_specialize=["q_moves", "k_moves", "v_moves", "bias_moves", "out_moves", "inner", "items", "M", "N", "heads",
                        "group", "batch", "shift", "caps_pitch", "line_0", "line_1"])  # fmt: skip
def shared_forward_kernel(
    q_desc, k_desc, v_desc, bias_desc, out_desc, lse_ptr, low_ptr, flag_ptr,
    q_moves, k_moves, v_moves, bias_moves, out_moves, inner, items, M, N, heads, group, batch, shift, scale,
    caps_desc, caps_ptr, spans_ptr, caps_pitch, line_0, line_1,
    D_BLOCK: gl.constexpr, DV_BLOCK: gl.constexpr, BLOCK_N: gl.constexpr, ROWS: gl.constexpr,
    Q_BUFFERS: gl.constexpr, KV_STAGES: gl.constexpr, BIAS_STAGES: gl.constexpr, IS_CAUSAL: gl.constexpr,
    AHEAD: gl.constexpr, FIXED: gl.constexpr, KEEP_LOW: gl.constexpr, LOW_RANGE: gl.constexpr, ORDER: gl.constexpr,
    HAS_KEEP: gl.constexpr, IN_TURNS: gl.constexpr, CONSUMER_REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr,
):  # fmt: skip
    """out = softmax(scale q k^T + bias, hidden pairs at -inf) v, ROWS batch items around one bias tile.

    An item is a tile of 128 queries of one head and ROWS batch items in a row, which have the same bias. Grid: up to
    ``items`` = cdiv(M, 128) * (batch / ROWS) * heads persistent programs. Blocks: q ``[64, D_BLOCK]``, k ``[BLOCK_N,
    D_BLOCK]``, v ``[BLOCK_N, DV_BLOCK]``, bias ``[64, BLOCK_N]``, out ``[64, DV_BLOCK]``. Writes what
    ``forward_kernel`` writes, with two warpgroups. AHEAD: scores of the next unit are issued before this one's weights
    are formed, not after. FIXED (bfloat16): see above; writes ``flag_ptr[batch * heads, 2 cdiv(M, 128)]``, float32, 0.0
    or 1.0 for every 64 query rows. What a flagged tile of out, lse and low holds is of no use. HAS_KEEP: a mask hides
    keys, see ``marks``; ``caps_desc`` in blocks ``[1, BLOCK_N]``. IN_TURNS: the warpgroups issue products alternately.
    """
    FAR: gl.constexpr = far(LOW_RANGE and not FIXED, q_desc.dtype)
    FORM: gl.constexpr = form(D_BLOCK, DV_BLOCK, BLOCK_N, ROWS, Q_BUFFERS, KV_STAGES, BIAS_STAGES, IS_CAUSAL, AHEAD,
                              FIXED, KEEP_LOW, FAR, ORDER, HAS_KEEP, IN_TURNS)  # fmt: skip
    gl.static_assert(not FIXED or q_desc.dtype == gl.bfloat16, "float16 weights do not reach as far as float32")
    gl.static_assert(not FIXED or ROWS <= 4, "a byte for each item's flag")
    gl.static_assert(D_BLOCK == DV_BLOCK and D_BLOCK <= 64, "outputs take the queries' place")
    gl.static_assert(Q_BUFFERS >= 2 and BIAS_STAGES >= 2, "the next item's first scores are issued within this one")
    gl.static_assert(KV_STAGES >= 4 or not AHEAD, "a unit waits for keys two ahead before it hands back the one before")
    gl.static_assert(KV_STAGES >= 3, "a unit waits for the next keys before it hands back those of the one before")
    gl.static_assert(
        ROWS >= 2 or not AHEAD, "the only unit of a tile must not wait for queries before it hands any back"
    )
    q_tiles = slots(q_desc, Q_BUFFERS * ROWS * 2)
    k_tiles = slots(k_desc, KV_STAGES)
    v_tiles = slots(v_desc, KV_STAGES)
    bias_tiles = slots(bias_desc, BIAS_STAGES * 2)
    q_full, q_empty = ring.ring_barriers(Q_BUFFERS), ring.ring_barriers(Q_BUFFERS)
    kv_full, kv_empty = ring.ring_barriers(KV_STAGES), ring.ring_barriers(KV_STAGES)
    bias_full, bias_empty = ring.ring_barriers(BIAS_STAGES), ring.ring_barriers(BIAS_STAGES)
    ring.start_ring(q_full, q_empty, Q_BUFFERS, 2)
    ring.start_ring(kv_full, kv_empty, KV_STAGES, 2)
    ring.start_ring(bias_full, bias_empty, BIAS_STAGES, 2)
    turns = kv_full
    if IN_TURNS:
        turns = ring.ring_barriers(2)
        ring.start_turns(turns, 2)
    caps_tiles, landed = k_tiles, kv_full
    if HAS_KEEP:
        caps_tiles = slots(caps_desc, KV_STAGES)
        landed = ring.ring_barriers(1)
        mbarrier.init(landed.index(0), count=1)
    fence_async_shared()
    descs = (q_desc, k_desc, v_desc, bias_desc, caps_desc)
    moves = (q_moves, k_moves, v_moves, bias_moves)
    row_ptrs = (lse_ptr, low_ptr)
    mask = (caps_ptr, spans_ptr, caps_pitch, line_0, line_1)
    buffers = (q_tiles, k_tiles, v_tiles, bias_tiles, caps_tiles)
    rings = (q_full, q_empty, kv_full, kv_empty, bias_full, bias_empty, landed, turns)
    extent = (M, N, heads, batch, shift)
    gl.warp_specialize([
        (attend, (0, out_desc, out_moves, row_ptrs, flag_ptr, buffers, rings, extent, items, inner, scale, mask, FORM)),
        (attend, (1, out_desc, out_moves, row_ptrs, flag_ptr, buffers, rings, extent, items, inner, scale, mask, FORM)),
        (copy_tiles, (descs, moves, buffers, rings, extent, items, inner, group, mask, FORM)),
    ], [4, 1], [CONSUMER_REGISTERS, PRODUCER_REGISTERS])  # fmt: skip
