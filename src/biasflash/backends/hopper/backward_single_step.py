"""Pieces of the one-pass backward: its form, its units of work, a round of query tiles, and turns among CTAs.

Keys are the rows of a score tile, so that P^T and dS^T go into their products from registers::

    S^T = K Q^T    dP^T = V dO^T    dv += P^T dO    dk += dS^T Q    dQ += dS K

Only dQ needs dS with queries as rows and keys of both warpgroups: it alone goes through shared memory.
"""

from dataclasses import make_dataclass
from typing import Any

from triton import constexpr_function

from biasflash.backends.hopper.backward_step import OWN
from biasflash.backends.hopper.gluon import fence_async_shared, gl, jit, warpgroup_mma, warpgroup_mma_wait
from biasflash.backends.hopper.pieces import NEG_INF, added, minus_columns, widen
from biasflash.backends.hopper.pipeline import hand_back, wait_empty, wait_full
from biasflash.tile.softmax import LOG2E
from biasflash.tile.span import query_span

L2_SHARE = gl.constexpr(1 << 25)  # bytes of queries and their gradients that programs share at a time, of 50 MB

NAMES = [
    "D", "DV", "BLOCK", "TILES", "A_BUFFERS", "STAGES", "BIAS_STAGES", "DS_SLOTS", "DQ_SLOTS", "HAS_BIAS", "IS_CAUSAL",
    "RESIDENT", "IN_REGISTERS", "DK_FIRST", "ORDER", "ROUND", "COLUMNS", "FROM_DELTA", "S", "K_OWN", "P_K", "P_V",
    "DK", "DV_ROWS", "DQ", "DS",
]  # fmt: skip
Form: Any = make_dataclass("Form", NAMES, frozen=True)


@constexpr_function
def form(*parameters: Any) -> Any:
    """The kernel's parameters in one, with the queries of a round, the columns of a dQ piece, and layouts.

    FROM_DELTA: the sum dP^T starts from minus delta (see ``backward_step.score_products``). 4 x 32 heads of 4k, 64
    columns: 3.07 ms in place of 3.10, causal 1.69 in place of 1.66; at 128 columns level.
    """
    d, dv, block, tiles = parameters[:4]
    columns = d if tiles == 2 else d // 2
    from_delta = not parameters[10]
    acc = [gl.NVMMADistributedLayout([3, 0], [4, 1], [16, n, 16]) for n in (block, d, dv, columns)]
    left = [gl.DotOperandLayout(operand_index=0, parent=x, k_width=2) for x in acc[:3]]
    tile = gl.NVMMASharedLayout.get_default_for([1, 1, 1, block, 64], gl.bfloat16)
    layouts = (acc[0], *left, *acc[1:], tile)
    return Form(*(gl.constexpr(x) for x in (*parameters, block * tiles, columns, from_delta, *layouts)))


@jit
def units_of(numbers, FORM: gl.constexpr):
    """Key tiles that this program goes through."""
    _, items, _, N, _, _, _, _ = numbers
    mine = gl.cdiv(items - gl.program_id(0), gl.num_programs(0))
    if FORM.RESIDENT:
        mine = mine * gl.cdiv(N, OWN)
    return mine


@jit
def section_of(lines, M, group, FORM: gl.constexpr):
    """How many (batch item, key head) pairs programs go through at a time: as many as share the cache.

    Programs of a pair follow each other over its queries, 1.5 us apart: the fewer of them start together, the less they
    wait. CAUSAL: two sections are at work, the second half of one of them.
    """
    pairs = L2_SHARE // (6 * FORM.D + 2 * FORM.DV) // (M * group)
    if FORM.IS_CAUSAL:
        pairs = gl.maximum(pairs // 2, 2)
    return gl.minimum(gl.maximum(pairs, 1), lines)


@jit
def rising(item, lines, blocks, section):
    """Item -> (key tile, line): the tiles of a section's lines one after the other."""
    first = item // (section * blocks) * section
    rest = item - first * blocks
    width = gl.minimum(section, lines - first)
    return rest // width, first + rest % width


@jit
def interleaved(item, lines, blocks, section):
    """As ``rising``, but the first half of a section's key tiles alternates with the second half of the one before.

    Of causal tiles the last are short. Programs that start on them together wait for each other, a query tile's sum
    going round at 1.5 us a program; beside long tiles fewer of them start at a time. By a model of 4 x 32 heads of 4k
    that takes 1.55 ms, ``rising`` 1.87 (which is what was measured), and 1.5 if nobody ever waited.
    """
    half = gl.cdiv(blocks, 2)
    number = gl.where(item < half * section, 0, 1 + (item - half * section) // (blocks * section))
    number = gl.minimum(number, gl.cdiv(lines, section) - 1)
    first = number * section
    before = gl.where(number > 0, section, 0)
    width = gl.minimum(section, lines - first)
    rest = item - first * blocks + before * (blocks - half)
    alone = rest - half * width - before * (blocks - half)  # behind the last section's first half
    step = rest // (width + before)
    rest = rest % (width + before)
    tile = gl.where(rest < width, step, half + step)
    line = gl.where(rest < width, first + rest, first - section + rest - width)
    return gl.where(alone < 0, tile, half + alone // width), gl.where(alone < 0, line, first + alone % width)


@jit
def unit(n, numbers, FORM: gl.constexpr):
    """This program's ``n``-th unit -> (key tile, key head, batch item, first key, first round, rounds, masked ones).

    RESIDENT: all key tiles of an item one after the other; an item is a (batch item, key head). Otherwise an item has a
    key tile too, and those of a (batch item, key head) come in rising order: programs take turns in that order, so
    nobody waits for an item behind its own.
    """
    _, _, M, N, heads, group, batch, shift = numbers
    blocks = gl.cdiv(N, OWN)
    kv_heads = heads // group
    lines = batch * kv_heads
    if FORM.RESIDENT:
        tile = n % blocks
        line = gl.program_id(0) + n // blocks * gl.num_programs(0)
    else:
        item = gl.program_id(0) + n * gl.num_programs(0)
        section = section_of(lines, M, group, FORM)
        if FORM.IS_CAUSAL:
            tile, line = interleaved(item, lines, blocks, section)
        else:
            tile, line = rising(item, lines, blocks, section)
    if FORM.ORDER == "tile,head,batch":
        b = line // kv_heads
        h = line - b * kv_heads
    else:
        h = line // batch
        b = line - h * batch
    own_row = tile * OWN
    start, full_start = query_span(own_row, M, shift, FORM.ROUND, OWN, FORM.IS_CAUSAL)
    if FORM.IS_CAUSAL:
        start = gl.where(tile == 0, 0, start)  # the first tile fills every query's sum
    rounds = gl.cdiv(M - start, FORM.ROUND)
    masked = gl.minimum((full_start - start) // FORM.ROUND, rounds)
    masked = gl.where(own_row + OWN > N, rounds, masked)
    return tile, h, b, own_row, start // FORM.ROUND, rounds, masked


@jit
def line_of(b, head, member, heads, group, FORM: gl.constexpr):
    """Line of the float32 dQ buffer: one for each (batch item, query head), or one for each member of a program."""
    if FORM.RESIDENT:
        return gl.program_id(0) * group + member
    else:
        return b * heads + head


@jit
def wait_turn(turn_ptr, turn):
    """Wait until ``turn`` programs have added to these queries; called by one warp."""
    gl.inline_asm_elementwise(
        """{
        .reg .pred early;
        await_turn:
        ld.acquire.gpu.global.b32 $0, [$1];
        setp.ne.b32 early, $0, $2;
        @early bra await_turn;
        bar.warp.sync 0xffffffff;
        fence.proxy.async;
        }""",
        "=&r,l,r",
        [turn_ptr, turn],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@jit
def wait_written():
    """Wait until everything this warp had copied out is written, not merely read; then its lanes agree on that."""
    gl.inline_asm_elementwise(
        """{
        cp.async.bulk.wait_group 0;
        bar.warp.sync 0xffffffff;
        fence.proxy.async;
        mov.b32 $0, 0;
        }""",
        "=r",
        [],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@jit
def pass_turn(turn_ptr, turn):
    """Turn ``turn`` is over: what was added before is seen by whoever sees the next number."""
    gl.inline_asm_elementwise(
        """{
        .reg .pred one;
        elect.sync _|one, 0xffffffff;
        @one st.release.gpu.global.b32 [$1], $2;
        mov.b32 $0, 0;
        }""",
        "=r,l,r",
        [turn_ptr, turn],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@jit
def own_operand(tile, WIDTH: gl.constexpr, FORM: gl.constexpr):
    """A left operand [64, WIDTH] of the score products: the tile itself, or its copy in registers."""
    rows = tile.reshape([64, WIDTH])
    if FORM.IN_REGISTERS:
        return rows.load(FORM.K_OWN)
    else:
        return rows


@jit
def delta_of(rows, slot, FORM: gl.constexpr):
    return rows[1].index(slot).reshape([FORM.BLOCK]).load(gl.SliceLayout(0, FORM.S))


@jit
def begin_scores(k, v, met, rows, met_full, use, FORM: gl.constexpr):
    """Start S^T and dP^T (FROM_DELTA: dP^T - delta) of 64 keys and query tile ``use``; both [64, BLOCK]."""
    slot = use % FORM.STAGES
    zero = gl.zeros([64, FORM.BLOCK], gl.float32, layout=FORM.S)
    wait_full(met_full, use, FORM.STAGES)
    q = met[0].index(slot).reshape([FORM.BLOCK, FORM.D]).permute((1, 0))
    dout = met[1].index(slot).reshape([FORM.BLOCK, FORM.DV]).permute((1, 0))
    dp = zero
    if FORM.FROM_DELTA:
        dp = minus_columns(delta_of(rows, slot, FORM), zero)
    s = warpgroup_mma(k, q, zero, use_acc=False, is_async=True)
    dp = warpgroup_mma(v, dout, dp, use_acc=FORM.FROM_DELTA, is_async=True)
    return s, dp


@jit
def weights(
    w: gl.constexpr, s, use, bias, rows, bias_full, own_row, row, N, shift, scale, MASKED: gl.constexpr,
    FORM: gl.constexpr,
):  # fmt: skip
    """P^T of query tile ``use``, whose first query is ``row``."""
    unit_scale = LOG2E
    if FORM.HAS_BIAS:
        wait_full(bias_full, use, FORM.BIAS_STAGES)
        tile = bias.index(use % FORM.BIAS_STAGES * 2 + w).reshape([FORM.BLOCK, 64]).permute((1, 0))
        s = s * scale + widen(tile.load(FORM.S))
    else:
        unit_scale = scale * LOG2E
    reference = rows[0].index(use % FORM.STAGES).reshape([FORM.BLOCK]).load(gl.SliceLayout(0, FORM.S))
    y = s * unit_scale - reference[None, :]
    if MASKED:
        key = own_row + w * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, FORM.S))
        seen = (key < N)[:, None]
        if FORM.IS_CAUSAL:
            last = row + shift + gl.arange(0, FORM.BLOCK, layout=gl.SliceLayout(0, FORM.S))
            seen = seen & (key[:, None] <= last[None, :])
        y = gl.where(seen, y, NEG_INF)
    return gl.exp2(y)


@jit
def run_round(
    w: gl.constexpr, dk, dv, k, v, own_at, use, own_row, row, N, shift, scale, own, met, bias, rows, ds_tiles, dq_tiles,
    bars, MASKED: gl.constexpr, FORM: gl.constexpr,
):  # fmt: skip
    """TILES query tiles from ``row`` on, against 64 keys; their dQ pieces are left to the adding warp.

    Both warpgroups' dS tiles make a dQ: of one tile each where a round has two, else of half the columns each. All
    rings of tiles count alike, by ``use``.
    """
    met_full, met_empty, bias_full, bias_empty, ds_full, ds_empty, dq_full, dq_empty = bars
    dtype: gl.constexpr = met[0].dtype
    s, dp = begin_scores(k, v, met, rows, met_full, use, FORM)
    held = ()  # left operands of products in flight
    for u in gl.static_range(FORM.TILES):
        i = use + u
        slot = i % FORM.STAGES
        s = warpgroup_mma_wait(2 if u > 0 else 1, deps=(s,))  # in flight: dP^T, and dk of the tile before
        p = weights(w, s, i, bias, rows, bias_full, own_row, row + u * FORM.BLOCK, N, shift, scale, MASKED, FORM)
        p_left = gl.convert_layout(p.to(dtype), FORM.P_V)
        # Before the wait for dP^T: it needs the weights, so that the assembler cannot lower the exponentials behind it.
        dv = warpgroup_mma(p_left, met[1].index(slot).reshape([FORM.BLOCK, FORM.DV]), dv, is_async=True)
        wait_empty(ds_empty, i, FORM.DS_SLOTS)
        dp = warpgroup_mma_wait(2 if u > 0 else 1, deps=(dp,))  # in flight: dk of the tile before, and dv
        if not FORM.FROM_DELTA:
            dp = dp - delta_of(rows, slot, FORM)[None, :]
        ds = (p * dp).to(dtype)
        ds_left = gl.convert_layout(ds, FORM.P_K)
        held = added(added(held, p_left), ds_left)
        if u + 1 < FORM.TILES:
            s, dp = begin_scores(k, v, met, rows, met_full, i + 1, FORM)
        if u + 1 < FORM.TILES or FORM.DK_FIRST:
            dk = warpgroup_mma(ds_left, met[0].index(slot).reshape([FORM.BLOCK, FORM.D]), dk, is_async=True)
        ds_tiles.index(i % FORM.DS_SLOTS * 2 + w).reshape([FORM.BLOCK, 64]).permute((1, 0)).store(ds)
        fence_async_shared()
        hand_back(ds_full, i, FORM.DS_SLOTS)
        if FORM.HAS_BIAS:
            hand_back(bias_empty, i, FORM.BIAS_STAGES)  # no sooner: this tile's weights came from it
    mine = use
    if FORM.TILES == 2:
        mine = use + w
    wait_full(ds_full, mine, FORM.DS_SLOTS)
    dq = gl.zeros([64, FORM.COLUMNS], gl.float32, layout=FORM.DQ)
    for half in gl.static_range(2):
        ds_tile = ds_tiles.index(mine % FORM.DS_SLOTS * 2 + half).reshape([FORM.BLOCK, 64])
        keys = own[0].index(own_at + half).reshape([64, FORM.D])
        if FORM.TILES == 1:
            keys = keys.slice(w * FORM.COLUMNS, FORM.COLUMNS, dim=1)
        dq = warpgroup_mma(ds_tile, keys, dq, use_acc=half > 0, is_async=True)
    if not FORM.DK_FIRST:
        last = (use + FORM.TILES - 1) % FORM.STAGES
        dk = warpgroup_mma(ds_left, met[0].index(last).reshape([FORM.BLOCK, FORM.D]), dk, is_async=True)
    done = warpgroup_mma_wait(0 if FORM.DK_FIRST else 1, deps=(dq, dv) + held)  # noqa: RUF005
    hand_back(ds_empty, mine, FORM.DS_SLOTS)
    piece = use // FORM.TILES * 2 + w
    wait_empty(dq_empty, piece, FORM.DQ_SLOTS)
    dq_tiles.index(piece % FORM.DQ_SLOTS).reshape([64, FORM.COLUMNS]).store(done[0])
    fence_async_shared()
    hand_back(dq_full, piece, FORM.DQ_SLOTS)
    dv = done[1]
    if FORM.DK_FIRST:
        dk = warpgroup_mma_wait(0, deps=(dk,))
    else:
        rest = warpgroup_mma_wait(0, deps=(dk, ds_left))
        dk = rest[0]
    for u in gl.static_range(FORM.TILES):
        hand_back(met_empty, use + u, FORM.STAGES)
    return dk, dv
