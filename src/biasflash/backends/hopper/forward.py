"""Forward pass: warpgroups of 64 query rows each, fed by one warp that copies query, key, value and bias tiles.

Every warpgroup keeps two products in flight: the scores of a key tile and the previous tile's weights times values;
the softmax runs under the latter. Keys are walked from the last tile to the first: tiles that need a mask come first.
Programs are persistent: tiles of the next item are copied while the warpgroups finish an item, so the rings count their
uses over all items.
"""

from dataclasses import make_dataclass
from typing import Any

from triton import constexpr_function

from biasflash.backends.hopper import pipeline as ring
from biasflash.backends.hopper.deal import deal, first_lot, following, locate
from biasflash.backends.hopper.forward_copies import ROWS, copy_tiles, order_tiles
from biasflash.backends.hopper.forward_parts import (
    cut,
    far,
    key_tiles,
    keys_of,
    rounded,
    row_unit,
    store_statistics,
)
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
from biasflash.backends.hopper.marks import is_whole, line_of
from biasflash.backends.hopper.odd_rows import odd_slots, raw_slots
from biasflash.backends.hopper.pieces import NEG_INF, slots, widen
from biasflash.tile.softmax import LOG2E

NAMES = [
    "D_BLOCK", "DV_BLOCK", "WARPGROUPS", "BLOCK_N", "KV_STAGES", "BIAS_STAGES", "HAS_BIAS", "IS_CAUSAL", "ODD_N",
    "KEEP_LOW", "FAR", "OUT_APART", "PINNED", "ORDER", "HAS_KEEP", "PIECES", "OUT_PIECES", "IN_TURNS", "RAW_STAGES",
    "BLOCK_M", "SCORES", "OUT", "SUMS", "WIDE_BIAS",
]  # fmt: skip
Form: Any = make_dataclass("Form", NAMES, frozen=True)


@constexpr_function
def form(is_wide: Any, *parameters: Any) -> Any:
    """The kernel's parameters in one, with the rows of a query tile and layouts: of scores, output and row sums.

    ``is_wide``: a float32 bias is added straight from the loads, which the assembler lets fly past a hand-over that
    follows the sum; its tile is handed back once weights were formed of it.
    """
    layouts = (gl.NVMMADistributedLayout([3, 0], [4, 1], [16, n, 16]) for n in (parameters[3], parameters[1], 8))
    return Form(*(gl.constexpr(x) for x in (*parameters, 64 * parameters[2], *layouts, is_wide)))


@jit
def score(w: gl.constexpr, q_tiles, k_tiles, u, FORM: gl.constexpr):
    """Start the product of the warpgroup's queries and the ``u``-th key tile: PIECES products, one sum."""
    s = gl.zeros([ROWS, FORM.BLOCK_N], gl.float32, layout=FORM.SCORES)
    for c in gl.static_range(FORM.PIECES):
        q = q_tiles.index(w * FORM.PIECES + c).reshape([ROWS, FORM.D_BLOCK])
        k = k_tiles.index(u % FORM.KV_STAGES * FORM.PIECES + c).reshape([FORM.BLOCK_N, FORM.D_BLOCK])
        s = warpgroup_mma(q, k.permute((1, 0)), s, use_acc=c > 0, is_async=True)
    return s


@jit
def add_values(p, v_tiles, u, o, FORM: gl.constexpr):
    """Start adding the product of weights and the ``u``-th value tile."""
    v = v_tiles.index(u % FORM.KV_STAGES).reshape([FORM.BLOCK_N, FORM.DV_BLOCK])
    return warpgroup_mma(p, v, o, is_async=True)


@jit
def read_bias(w: gl.constexpr, u, bias_tiles, bias_full, FORM: gl.constexpr):
    """The warpgroup's part of the ``u``-th bias tile."""
    ring.wait_full(bias_full, u, FORM.BIAS_STAGES)
    return bias_tiles.index(u % FORM.BIAS_STAGES * FORM.WARPGROUPS + w).reshape([ROWS, FORM.BLOCK_N]).load(FORM.SCORES)


@jit
def hide(x, limit, column, FORM: gl.constexpr):
    """-inf for keys behind the row's last visible one."""
    keys = gl.arange(0, FORM.BLOCK_N, layout=gl.SliceLayout(0, FORM.SCORES))
    return gl.where(keys[None, :] <= (limit - column)[:, None], x, NEG_INF)


@jit
def weigh(x, m, l, unit, dtype: gl.constexpr, GUARD: gl.constexpr, FORM: gl.constexpr):
    """One tile of scores -> (weights, maximum, sum, factor for what was accumulated).

    The reference ``m * unit`` is rounded once: weights and factors are exact relative to it. Sums are kept in eight
    parts a row: no conversion here moves anything, and threads add up at the end. GUARD: a row may have seen nothing.
    """
    top = gl.maximum(m, gl.max(x, 1))
    unit = row_unit(top, unit, FORM)
    reference = rounded(top, unit)
    if GUARD:
        reference = gl.where(top == NEG_INF, 0.0, reference)
    p = gl.exp2(x * gl.expand_dims(unit, 1) - gl.expand_dims(reference, 1))
    alpha = gl.exp2(rounded(m, unit) - reference)  # 0 where only one of the maxima is beyond FAR: in either unit
    parts = gl.convert_layout(gl.sum(gl.reshape(p, [ROWS, FORM.BLOCK_N // 8, 8]), 1), FORM.SUMS)
    l = l * gl.expand_dims(gl.convert_layout(alpha, gl.SliceLayout(1, FORM.SUMS)), 1) + parts
    return gl.convert_layout(p.to(dtype), gl.DotOperandLayout(0, FORM.OUT, 2)), top, l, alpha


@jit
def step(
    w: gl.constexpr, q_tiles, o, p, m, l, u, turn, full, end, limit, unit, scale, buffers, rings, line, mask,
    FORM: gl.constexpr,
):  # fmt: skip
    """Scores of tile ``u``, and the sum over tile ``u - 1`` under whose product their softmax runs.

    IN_TURNS: this is the warpgroup's ``turn``-th step.

    CAUSAL: tiles before ``full`` need a mask. That is a branch and not a loop of its own: between two loops weights of
    two bytes are unpacked and packed at every tile, 64 instructions beside 460.
    """
    k_tiles, v_tiles, bias_tiles, caps_tiles = buffers
    k_full, k_empty, v_full, v_empty, bias_full, bias_empty, _landed, turns = rings
    if FORM.HAS_KEEP:
        whole = is_whole(line, (end - 1 - u) * FORM.BLOCK_N, mask, FORM.BLOCK_N)
    EARLY: gl.constexpr = FORM.WARPGROUPS == 2  # a bias tile in registers before the scores are: not with 160 of them
    if not FORM.PINNED:
        ring.wait_full(k_full, u, FORM.KV_STAGES)
    if FORM.IN_TURNS:
        ring.wait_turn(w, turns, turn)
    s = score(w, q_tiles, k_tiles, u, FORM)
    ring.wait_full(v_full, u - 1, FORM.KV_STAGES)
    o = add_values(p, v_tiles, u - 1, o, FORM)
    if FORM.IN_TURNS:
        ring.pass_turn(w, turns, FORM.WARPGROUPS)
    if FORM.HAS_BIAS and EARLY:
        bias = read_bias(w, u, bias_tiles, bias_full, FORM)
    s = warpgroup_mma_wait(1, deps=(s,))
    if FORM.HAS_BIAS:
        if not EARLY:
            bias = read_bias(w, u, bias_tiles, bias_full, FORM)
        s = s * scale + widen(bias)
        if not FORM.WIDE_BIAS:
            ring.hand_back(bias_empty, u, FORM.BIAS_STAGES)
    if FORM.HAS_KEEP:  # noqa: SIM102
        if not whole:
            s = cut(s, caps_tiles, u, FORM)
    ring.hand_back(k_empty, u, FORM.KV_STAGES)
    if FORM.IS_CAUSAL:  # noqa: SIM102
        if u < full:
            s = hide(s, limit, (end - 1 - u) * FORM.BLOCK_N, FORM)
    weights, m, l, alpha = weigh(s, m, l, unit, k_tiles.dtype, FORM.IS_CAUSAL or FORM.HAS_BIAS or FORM.HAS_KEEP, FORM)
    if FORM.PINNED:
        # The assembler lifts the wait for the product above the exponentials where both sit in one basic block. The
        # wait for the next keys is due anyway; here its loop ends the block.
        ring.wait_full_if(k_full, u + 1, u + 1 < end, FORM.KV_STAGES)
    if FORM.WIDE_BIAS:
        ring.hand_back(bias_empty, u, FORM.BIAS_STAGES)
    o, p = warpgroup_mma_wait(0, deps=(o, p))
    ring.hand_back(v_empty, u - 1, FORM.KV_STAGES)
    return o * gl.expand_dims(gl.convert_layout(alpha, gl.SliceLayout(1, FORM.OUT)), 1), weights, m, l


@jit
def store_out(w: gl.constexpr, o, out_parts, b, inner, h, start, FORM: gl.constexpr):
    """Write the warpgroup's rows, in OUT_PIECES of their columns: through one place of their own, or the queries'."""
    out_desc, out_moves, out_tiles = out_parts
    COLUMNS: gl.constexpr = FORM.DV_BLOCK // FORM.OUT_PIECES
    parts = (o,)
    if FORM.OUT_PIECES == 2:
        parts = gl.split(gl.permute(gl.reshape(o, [ROWS, 2, COLUMNS]), (0, 2, 1)))
    for c in gl.static_range(FORM.OUT_PIECES):
        if FORM.OUT_APART:
            store_wait(0)  # of the piece before
            place = out_tiles.index(w)
        else:
            place = out_tiles.index(w * FORM.PIECES + c)
        place.reshape([ROWS, COLUMNS]).store(parts[c].to(out_tiles.dtype))
        fence_async_shared()
        tma_store(out_desc, ring.at(b // inner, b % inner, h, start, c * COLUMNS, out_moves), place)


@jit
def attend(
    w: gl.constexpr, q_parts, out_parts, row_ptrs, buffers, rings, extent, items, inner, scale, mask,
    FORM: gl.constexpr,
):  # fmt: skip
    """Warpgroup ``w``."""
    ROW: gl.constexpr = gl.SliceLayout(1, FORM.SCORES)
    HIDES: gl.constexpr = FORM.IS_CAUSAL or (FORM.ODD_N and not FORM.HAS_KEEP)  # caps end with the keys
    q_tiles, q_full, q_empty, _desc, _moves = q_parts
    k_tiles, v_tiles, bias_tiles, caps_tiles = buffers
    k_full, k_empty, v_full, v_empty, bias_full, bias_empty, _landed, _turns = rings
    M, N, heads, batch, shift = extent
    unit = gl.full([ROWS], LOG2E if FORM.HAS_BIAS else scale * LOG2E, gl.float32, layout=ROW)
    dealt = deal(items, extent, FORM)
    lot, turn, done, base = first_lot(FORM), 0, 0, 0
    n = N
    if FORM.HAS_KEEP:
        n = keys_of(locate(lot, turn, dealt, extent, FORM)[1], inner, extent, mask)
    while lot < dealt[0]:
        tile, b, h = locate(lot, turn, dealt, extent, FORM)
        seen = (M, n, heads, batch, shift)
        line = 0
        if FORM.HAS_KEEP:
            line = line_of(b // inner, b % inner, mask)
            # of the next item: on its way while this one is computed
            next_lot, next_turn = following(lot, turn, dealt, extent, FORM)
            n = keys_of(locate(next_lot, next_turn, dealt, extent, FORM)[1], inner, extent, mask)
        tiles, masked = key_tiles(tile * FORM.BLOCK_M, seen, FORM.BLOCK_M, FORM)
        start = tile * FORM.BLOCK_M + w * ROWS
        first = base
        end = base + tiles
        if FORM.IS_CAUSAL:  # tiles that only later rows see
            own, masked = key_tiles(start, seen, ROWS, FORM)
            first = end - own
            for u in range(base, first):
                ring.wait_full(k_full, u, FORM.KV_STAGES)  # an earlier hand-over would count for the tile before
                ring.hand_back(k_empty, u, FORM.KV_STAGES)
                if FORM.HAS_BIAS:
                    ring.wait_full(bias_full, u, FORM.BIAS_STAGES)
                    ring.hand_back(bias_empty, u, FORM.BIAS_STAGES)
                ring.wait_full(v_full, u, FORM.KV_STAGES)
                ring.hand_back(v_empty, u, FORM.KV_STAGES)
        row = start + gl.arange(0, ROWS, layout=ROW)
        limit = gl.minimum(row + (shift if FORM.IS_CAUSAL else N), N - 1)

        mbarrier.wait(q_full.index(w), done & 1)
        ring.wait_full(k_full, first, FORM.KV_STAGES)
        s = score(w, q_tiles, k_tiles, first, FORM)
        s = warpgroup_mma_wait(0, deps=(s,))
        if not FORM.HAS_KEEP:
            ring.hand_back(k_empty, first, FORM.KV_STAGES)
        if FORM.HAS_BIAS:
            s = s * scale + widen(read_bias(w, first, bias_tiles, bias_full, FORM))
            if not FORM.WIDE_BIAS:
                ring.hand_back(bias_empty, first, FORM.BIAS_STAGES)
        if FORM.HAS_KEEP:
            s = cut(s, caps_tiles, first, FORM)
            ring.hand_back(k_empty, first, FORM.KV_STAGES)
        if HIDES:
            s = hide(s, limit, (end - 1 - first) * FORM.BLOCK_N, FORM)
        m = gl.full([ROWS], NEG_INF, gl.float32, layout=ROW)
        l = gl.zeros([ROWS, 8], gl.float32, layout=FORM.SUMS)
        p, m, l, _alpha = weigh(s, m, l, unit, k_tiles.dtype, HIDES or FORM.HAS_BIAS or FORM.HAS_KEEP, FORM)
        o = gl.zeros([ROWS, FORM.DV_BLOCK], gl.float32, layout=FORM.OUT)
        ring.wait_full_if(k_full, first + 1, first + 1 < end, FORM.KV_STAGES)
        if FORM.WIDE_BIAS:
            ring.hand_back(bias_empty, first, FORM.BIAS_STAGES)
        full = first + 1
        if FORM.IS_CAUSAL:
            full = first + gl.minimum(gl.maximum(masked, 1), end - first)
        for u in range(first + 1, end):
            o, p, m, l = step(
                w, q_tiles, o, p, m, l, u, u - 1 - done, full, end, limit, unit, scale, buffers, rings, line, mask, FORM
            )

        if FORM.OUT_APART:
            mbarrier.arrive(q_empty.index(w), count=1)
        ring.wait_full(v_full, end - 1, FORM.KV_STAGES)
        o = add_values(p, v_tiles, end - 1, o, FORM)
        l = gl.convert_layout(gl.sum(l, 1), ROW)
        inverse = store_statistics(m, l, unit, scale, row, b * heads + h, M, row_ptrs, FORM)
        o, p = warpgroup_mma_wait(0, deps=(o, p))
        ring.hand_back(v_empty, end - 1, FORM.KV_STAGES)
        o = o * gl.expand_dims(gl.convert_layout(inverse, gl.SliceLayout(1, FORM.OUT)), 1)
        store_out(w, o, out_parts, b, inner, h, start, FORM)
        if not FORM.OUT_APART:  # the queries' place, free once the copy has read it
            store_wait(0)
            mbarrier.arrive(q_empty.index(w), count=1)
        base = end
        done += 1
        lot, turn = following(lot, turn, dealt, extent, FORM)
    store_wait(0)


@jit(do_not_specialize=["q_moves", "k_moves", "v_moves", "bias_moves", "out_moves", "inner", "items", "M", "N", "heads",
                        "group", "batch", "shift", "caps_pitch", "line_0", "line_1", "odd_pitch", "odd_whole", "odd_b0",
                        "odd_b1", "odd_h"])  # fmt: skip
def forward_kernel(
    q_desc, k_desc, v_desc, bias_desc, out_desc, lse_ptr, low_ptr,
    q_moves, k_moves, v_moves, bias_moves, out_moves, inner, items, M, N, heads, group, batch, shift, scale,
    caps_desc, caps_ptr, spans_ptr, caps_pitch, line_0, line_1,
    ends_desc, odd_ptr, odd_pitch, odd_whole, odd_b0, odd_b1, odd_h,
    D_BLOCK: gl.constexpr, DV_BLOCK: gl.constexpr, WARPGROUPS: gl.constexpr, BLOCK_N: gl.constexpr,
    KV_STAGES: gl.constexpr, BIAS_STAGES: gl.constexpr, HAS_BIAS: gl.constexpr, IS_CAUSAL: gl.constexpr,
    ODD_N: gl.constexpr, KEEP_LOW: gl.constexpr, LOW_RANGE: gl.constexpr, ORDER: gl.constexpr,
    HAS_KEEP: gl.constexpr, CONSUMER_REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr,
    OUT_APART: gl.constexpr, PINNED: gl.constexpr, PIECES: gl.constexpr, IN_TURNS: gl.constexpr,
    RAW_STAGES: gl.constexpr, HELPER_REGISTERS: gl.constexpr,
):  # fmt: skip
    """out = softmax(scale q k^T + bias, hidden pairs at -inf) v, with lse ``[batch, heads, M]``.

    Grid: up to ``items`` = cdiv(M, 64 WARPGROUPS) * batch * heads persistent programs. Blocks: q ``[64, D_BLOCK]``,
    k ``[BLOCK_N, D_BLOCK]``, PIECES of each side by side, v ``[BLOCK_N, DV_BLOCK]``, bias ``[64, BLOCK_N]``, out
    ``[64, DV_BLOCK]`` or half of these columns. OUT_APART: the output has shared memory of its own, a block for each
    warpgroup, else it takes the queries' place (blocks as theirs). KEEP_LOW: ``low_ptr`` gets what lse's rounding lost.
    LOW_RANGE: a bias may be as low as ``finfo.min``. PINNED: exponentials stay under the product (needs two KV_STAGES).
    HAS_KEEP: keys are hidden by a mask, see ``marks``; ``caps_desc`` ``[1, BLOCK_N]``. IN_TURNS: warpgroups issue
    their products one after the other. RAW_STAGES: the bias comes in lines of eight rows, see ``odd_rows``, through as
    many raw places; ``bias_desc`` then has boxes ``[8, 64]``, ``ends_desc`` ``[8, 8]``. ``*_moves``: ``pipeline.at``.
    """
    FAR: gl.constexpr = far(LOW_RANGE, q_desc.dtype)
    WIDE_BIAS: gl.constexpr = HAS_BIAS and bias_desc.dtype == gl.float32
    FORM: gl.constexpr = form(WIDE_BIAS, D_BLOCK, DV_BLOCK, WARPGROUPS, BLOCK_N, KV_STAGES, BIAS_STAGES, HAS_BIAS,
                              IS_CAUSAL, ODD_N, KEEP_LOW, FAR, OUT_APART, PINNED, ORDER, HAS_KEEP, PIECES,
                              DV_BLOCK // out_desc.block_type.shape[4], IN_TURNS, RAW_STAGES)  # fmt: skip
    gl.static_assert(FORM.OUT_PIECES <= 2, "the output is halved once")
    IN_PLACE: gl.constexpr = FORM.OUT_PIECES <= PIECES and FORM.OUT_PIECES * D_BLOCK == DV_BLOCK
    gl.static_assert(OUT_APART or IN_PLACE, "the output does not fit in the queries' place")
    gl.static_assert(HAS_BIAS or not LOW_RANGE, "only a bias is that low")
    gl.static_assert(PINNED or not WIDE_BIAS, "a loop must part the sums of a float32 bias from its hand-over")
    gl.static_assert(not (IN_TURNS and IS_CAUSAL), "later warpgroups take more steps: turns would not come round")
    gl.static_assert(KV_STAGES > 1 or not PINNED, "waiting early for the next keys needs a second slot")
    q_tiles = slots(q_desc, WARPGROUPS * PIECES)
    k_tiles = slots(k_desc, KV_STAGES * PIECES)
    v_tiles = slots(v_desc, KV_STAGES)
    out_tiles = slots(out_desc, WARPGROUPS) if OUT_APART else q_tiles
    q_full, q_empty = ring.ring_barriers(WARPGROUPS), ring.ring_barriers(WARPGROUPS)
    k_full, k_empty = ring.ring_barriers(KV_STAGES), ring.ring_barriers(KV_STAGES)
    v_full, v_empty = ring.ring_barriers(KV_STAGES), ring.ring_barriers(KV_STAGES)
    ring.start_ring(q_full, q_empty, WARPGROUPS, 1)
    ring.start_ring(k_full, k_empty, KV_STAGES, WARPGROUPS)
    ring.start_ring(v_full, v_empty, KV_STAGES, WARPGROUPS)
    bias_tiles, bias_full, bias_empty = k_tiles, k_full, k_empty
    odd_parts = ()
    if RAW_STAGES > 0:
        bias_tiles = odd_slots(bias_desc.dtype, BIAS_STAGES * WARPGROUPS, BLOCK_N)
        raw = raw_slots(bias_desc.dtype, RAW_STAGES * WARPGROUPS, BLOCK_N)
        raw_bars = (ring.ring_barriers(RAW_STAGES), ring.ring_barriers(RAW_STAGES))
        ring.start_ring(raw_bars[0], raw_bars[1], RAW_STAGES, 1)
        odd_parts = (raw, raw_bars, ends_desc, (odd_ptr, odd_pitch, odd_whole, odd_b0, odd_b1, odd_h))
    elif HAS_BIAS:
        bias_tiles = slots(bias_desc, BIAS_STAGES * WARPGROUPS)
    if HAS_BIAS:
        bias_full, bias_empty = ring.ring_barriers(BIAS_STAGES), ring.ring_barriers(BIAS_STAGES)
        ring.start_ring(bias_full, bias_empty, BIAS_STAGES, WARPGROUPS)
    turns = k_full
    if IN_TURNS:
        turns = ring.ring_barriers(WARPGROUPS)
        ring.start_turns(turns, WARPGROUPS)
    caps_tiles, landed = k_tiles, k_full
    if HAS_KEEP:
        caps_tiles = slots(caps_desc, KV_STAGES)
        landed = ring.ring_barriers(1)
        mbarrier.init(landed.index(0), count=1)
    fence_async_shared()

    # tuples hold runtime values only: a constexpr in one would become a tensor
    buffers = (k_tiles, v_tiles, bias_tiles, caps_tiles)
    rings = (k_full, k_empty, v_full, v_empty, bias_full, bias_empty, landed, turns)
    q_parts = (q_tiles, q_full, q_empty, q_desc, q_moves)
    out_parts = (out_desc, out_moves, out_tiles)
    row_ptrs = (lse_ptr, low_ptr)
    extent = (M, N, heads, batch, shift)
    descs = (k_desc, v_desc, bias_desc, caps_desc)
    mask = (caps_ptr, spans_ptr, caps_pitch, line_0, line_1)
    moves = (k_moves, v_moves, bias_moves)
    if RAW_STAGES > 0:
        gl.static_assert(WARPGROUPS == 2, "no registers are left for more")
        gl.warp_specialize([
            (attend, (0, q_parts, out_parts, row_ptrs, buffers, rings, extent, items, inner, scale, mask, FORM)),
            (attend, (1, q_parts, out_parts, row_ptrs, buffers, rings, extent, items, inner, scale, mask, FORM)),
            (copy_tiles, (q_parts, descs, moves, buffers, rings, extent, items, inner, group, mask, odd_parts, FORM)),
            (order_tiles, (bias_tiles, rings, extent, items, inner, mask, odd_parts, FORM)),
        ], [4, 1, 4], [CONSUMER_REGISTERS, PRODUCER_REGISTERS, HELPER_REGISTERS])  # fmt: skip
    elif WARPGROUPS == 2:
        gl.warp_specialize([
            (attend, (0, q_parts, out_parts, row_ptrs, buffers, rings, extent, items, inner, scale, mask, FORM)),
            (attend, (1, q_parts, out_parts, row_ptrs, buffers, rings, extent, items, inner, scale, mask, FORM)),
            (copy_tiles, (q_parts, descs, moves, buffers, rings, extent, items, inner, group, mask, odd_parts, FORM)),
        ], [4, 1], [CONSUMER_REGISTERS, PRODUCER_REGISTERS])  # fmt: skip
    else:
        gl.static_assert(WARPGROUPS == 3)
        gl.warp_specialize([
            (attend, (0, q_parts, out_parts, row_ptrs, buffers, rings, extent, items, inner, scale, mask, FORM)),
            (attend, (1, q_parts, out_parts, row_ptrs, buffers, rings, extent, items, inner, scale, mask, FORM)),
            (attend, (2, q_parts, out_parts, row_ptrs, buffers, rings, extent, items, inner, scale, mask, FORM)),
            (copy_tiles, (q_parts, descs, moves, buffers, rings, extent, items, inner, group, mask, odd_parts, FORM)),
        ], [4, 4, 1], [CONSUMER_REGISTERS, CONSUMER_REGISTERS, PRODUCER_REGISTERS])  # fmt: skip
