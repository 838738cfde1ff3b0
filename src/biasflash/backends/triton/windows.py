# jit code is a language of its own: its names and types are Triton's
"""Windows: short sequences, many of them, all keys of one in one tile; forward, and one fused backward pass.

A program owns one head (and, forward, one query tile) and walks over windows ``first, first + step, ...`` of the
batch, so that what all its windows share stays in registers: the tiles of biases and masks (``HELD``), and the float32
sum of score gradients that becomes a shared bias's gradient. Scores, masks and softmax are the pieces of ``tile``, as
in the general kernels.
"""

import triton
import triton.language as tl

from biasflash.tile.bias import load_term, seen_keys, store_term_grad, term_bases
from biasflash.tile.memory import (
    head_offset,
    inside,
    load_rows,
    load_seen_rows,
    local,
    owned,
    shifted,
    store_rows,
    wide,
    wide_if,
)
from biasflash.tile.products import operand
from biasflash.tile.score import score_grad_tile, score_tile
from biasflash.tile.softmax import LOG2E, finish, probability, row_reference, running_step


@triton.jit
def held_terms(
    term_ptrs, strides, b, h, sizes, q_at, q_rows, k_local, k_own,
    TERMS: tl.constexpr, HELD: tl.constexpr, FOLD: tl.constexpr, WIDE: tl.constexpr, SHORT_N: tl.constexpr,
):  # fmt: skip
    """Tiles of the terms that are the same for every window of this program (HELD), biases already float32.

    Positions come shaped to broadcast: rows of queries and columns of keys, or the other way round.
    FOLD: the bias of this index also hides the keys past the end (-inf), which then costs nothing a window. The tiles
    of other terms are never used, and the compiler drops their loads.
    """
    tiles = ()
    bases = term_bases(term_ptrs, strides, b, h, sizes, TERMS)
    for i in tl.static_range(len(TERMS)):
        tile = load_term(
            bases[i],
            strides[i],
            q_at,
            0,
            q_rows,
            k_local,
            k_own,
            TERMS[i][1],
            TERMS[i][2],
            TERMS[i][3],
            WIDE,
            SHORT_N,
        )
        if HELD[i] and not TERMS[i][4]:
            widened = TERMS[i][0](tl.zeros([1, 1], tl.float32), tile)
            if i == FOLD:
                widened = tl.where(k_own, widened, float("-inf"))
            tiles = tiles + (widened,)  # noqa: RUF005
        else:
            tiles = tiles + (tile,)  # noqa: RUF005
    return tiles


@triton.jit
def window_terms(
    held, term_ptrs, strides, b, h, sizes, q_at, q_rows, k_local, k_own,
    TERMS: tl.constexpr, HELD: tl.constexpr, WIDE: tl.constexpr, WIDE_HEADS: tl.constexpr, SHORT_N: tl.constexpr,
):  # fmt: skip
    """The tiles of all terms for window ``b``: held ones from registers, the others from memory."""
    tiles = ()
    for i in tl.static_range(len(TERMS)):
        if HELD[i]:
            tiles = tiles + (held[i],)  # noqa: RUF005
        else:
            tile = load_term(
                term_ptrs[i] + head_offset(b, h, strides[i], sizes, TERMS[i][3], WIDE_HEADS),
                strides[i],
                q_at,
                0,
                q_rows,
                k_local,
                k_own,
                TERMS[i][1],
                TERMS[i][2],
                TERMS[i][3],
                WIDE,
                SHORT_N,
            )
            tiles = tiles + (tile,)  # noqa: RUF005
    return tiles


@triton.jit
def load_keys(
    base, rows, strides, bases, term_strides, k_local, k_own,
    TERMS: tl.constexpr, WIDTH: tl.constexpr, BLOCK_W: tl.constexpr, VEC: tl.constexpr, WIDE: tl.constexpr,
    SHORT_N: tl.constexpr, HIDES_KEYS: tl.constexpr,
):  # fmt: skip
    """All rows of k or v of one window, ``[N, BLOCK_W]``; zero where no query may see them."""
    if HIDES_KEYS:
        seen = seen_keys(k_own, bases, term_strides, 0, k_local, TERMS, WIDE, SHORT_N)
        return load_seen_rows(base, 0, rows, strides, seen, WIDTH, BLOCK_W, VEC, WIDE)
    else:
        return load_rows(base, 0, rows, strides, WIDTH, BLOCK_W, VEC, WIDE)


@triton.jit(do_not_specialize=["M", "N", "heads", "batch", "step", "shift"])
def window_forward_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, low_ptr, term_ptrs,
    sizes, q_strides, k_strides, v_strides, out_strides, term_strides,
    M, N, heads, batch, step, shift, scale,
    TERMS: tl.constexpr, HELD: tl.constexpr, FOLD: tl.constexpr, COMPARE: tl.constexpr, SAME: tl.constexpr,
    SQUARE: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    Q_VEC: tl.constexpr, K_VEC: tl.constexpr,
    V_VEC: tl.constexpr, OUT_VEC: tl.constexpr, WIDE: tl.constexpr, WIDE_HEADS: tl.constexpr, EVEN_N: tl.constexpr,
    SHORT_M: tl.constexpr, SHORT_N: tl.constexpr, IS_CAUSAL: tl.constexpr, SCALED: tl.constexpr, PAIR: tl.constexpr,
    LOW_RANGE: tl.constexpr, KEEP_LOW: tl.constexpr, HIDES_KEYS: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """out = softmax(scale q k^T + biases, hidden pairs at -inf) v for windows of at most BLOCK_N keys.

    COMPARE: positions are compared in every window (causal, or nothing else hides the keys past the end). SAME: for
    each of q, k, v and out the first of them that has its strides, SQUARE: M = N; offsets are then computed and kept
    once (95 registers instead of 127 for windows of 64 tokens). Grid: one program per head (fastest), query tile, and
    first window.
    """
    if EVEN_N:
        N = N // 8 * 8  # equal, and tells the compiler that keys come in eights
    if SQUARE:
        M = N
    all_strides = (q_strides, k_strides, v_strides, out_strides)
    k_strides, v_strides, out_strides = all_strides[SAME[1]], all_strides[SAME[2]], all_strides[SAME[3]]
    tiles = tl.cdiv(M, BLOCK_M)
    h = tl.program_id(0) % heads
    q_start = tl.program_id(0) // heads % tiles * BLOCK_M
    first = tl.program_id(0) // heads // tiles
    q_at = shifted(q_start, M, BLOCK_M, SHORT_M)
    q_local = local(BLOCK_M, WIDE)
    k_local = local(BLOCK_N, WIDE)
    q_rows = inside(q_local, M, SHORT_M)
    k_rows = inside(k_local, N, SHORT_N)
    q_own = owned(q_at, q_start, q_local, M, SHORT_M)
    k_own = owned(0, 0, k_local, N, SHORT_N)
    unit = LOG2E
    if not SCALED:
        unit = scale * LOG2E
    held = held_terms(
        term_ptrs, term_strides, first, h, sizes, q_at, q_rows[:, None], k_local[None, :], k_own[None, :], TERMS, HELD,
        FOLD, WIDE, SHORT_N,
    )  # fmt: skip
    for b in tl.range(first, batch, step, num_stages=STAGES):
        q_base = q_ptr + head_offset(b, h, q_strides, sizes, Q_VEC, WIDE_HEADS)
        k_base = k_ptr + head_offset(b, h, k_strides, sizes, K_VEC, WIDE_HEADS)
        v_base = v_ptr + head_offset(b, h, v_strides, sizes, V_VEC, WIDE_HEADS)
        bases = term_bases(term_ptrs, term_strides, b, h, sizes, TERMS)
        q = load_rows(q_base, q_at, q_rows, q_strides, D, BLOCK_D, Q_VEC, WIDE)  # [M, D]
        k = load_rows(k_base, 0, k_rows, k_strides, D, BLOCK_D, K_VEC, WIDE)  # [N, D]
        terms = window_terms(
            held, term_ptrs, term_strides, b, h, sizes, q_at, q_rows[:, None], k_local[None, :], k_own[None, :], TERMS,
            HELD, WIDE, WIDE_HEADS, SHORT_N,
        )  # fmt: skip
        v = load_keys(
            v_base, k_rows, v_strides, bases, term_strides, k_local, k_own, TERMS, DV, BLOCK_DV, V_VEC, WIDE, SHORT_N,
            HIDES_KEYS,
        )  # fmt: skip # [N, Dv]
        q, k = operand(q, PRECISION), operand(k, PRECISION)
        y = score_tile(
            tl.dot(q, tl.trans(k), input_precision=PRECISION),  # [M, N]
            terms,
            (q_at + q_local)[:, None],
            k_local[None, :],
            k_own[None, :],
            scale,
            shift,
            TERMS,
            SCALED,
            IS_CAUSAL,
            COMPARE,
        )
        nothing = tl.zeros([BLOCK_M], tl.float32)
        p, _, m, l = running_step(y, nothing + float("-inf"), nothing, unit, 1, PAIR, LOW_RANGE)
        weights = operand(p.to(v.dtype), PRECISION)
        acc_out = tl.dot(weights, operand(v, PRECISION), input_precision=PRECISION)  # [M, Dv]
        inverse, lse, low = finish(m, l, 1.0 if SCALED else scale)
        out_base = out_ptr + head_offset(b, h, out_strides, sizes, OUT_VEC, WIDE_HEADS)
        store_rows(out_base, q_at, q_local, out_strides, q_own, acc_out * inverse[:, None], DV, BLOCK_DV, OUT_VEC, WIDE)
        at = wide_if(b * heads + h, WIDE_HEADS) * M + q_at + q_local
        tl.store(lse_ptr + at, lse, mask=q_own)
        if KEEP_LOW:
            tl.store(low_ptr + at, low, mask=q_own)


@triton.jit(do_not_specialize=["M", "N", "heads", "batch", "step", "shift", "period"])
def window_backward_kernel(
    q_ptr, k_ptr, v_ptr, dout_ptr, lse_ptr, low_ptr, dlse_ptr, dq_ptr, dk_ptr, dv_ptr, dbias_ptr, term_ptrs,
    sizes, q_strides, k_strides, v_strides, dout_strides, dq_strides, dk_strides, dv_strides, dbias_strides,
    term_strides,
    M, N, heads, batch, step, shift, period, scale,
    TERMS: tl.constexpr, HELD: tl.constexpr, FOLD: tl.constexpr, COMPARE: tl.constexpr, SAME: tl.constexpr,
    SQUARE: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    Q_VEC: tl.constexpr, K_VEC: tl.constexpr,
    V_VEC: tl.constexpr, DOUT_VEC: tl.constexpr, DQ_VEC: tl.constexpr, DK_VEC: tl.constexpr, DV_VEC: tl.constexpr,
    DBIAS_VEC: tl.constexpr, WANT_DQ: tl.constexpr, WANT_DK: tl.constexpr, WANT_DV: tl.constexpr,
    STORE_DS: tl.constexpr, SUM_DS: tl.constexpr, OWNS_HEAD: tl.constexpr, HAS_DLSE: tl.constexpr,
    WIDE: tl.constexpr, WIDE_HEADS: tl.constexpr, EVEN_N: tl.constexpr, SHORT_M: tl.constexpr, SHORT_N: tl.constexpr,
    IS_CAUSAL: tl.constexpr, SCALED: tl.constexpr, PAIR: tl.constexpr, HAS_KEEP: tl.constexpr,
    HIDES_KEYS: tl.constexpr, PRECISION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """dq, dk, dv of windows that fit one tile, and the gradient of one bias.

    delta is the row sum of p dp, p normalised: all keys are in the tile, so nothing of out is read (and nothing of
    out's rounding enters). STORE_DS writes the score gradients of every window, which are the gradient of a bias of
    full shape; SUM_DS adds them up over the program's windows and writes float32 ``(M, N)`` partial sums, ordered
    ``(step, heads)`` with OWNS_HEAD and ``(step / period, heads, period)`` without: the order in which those of one
    bias element lie a constant distance apart. Grid: one program per head (fastest) and first window.
    """
    if EVEN_N:
        N = N // 8 * 8
    if SQUARE:
        M = N
    all_strides = (q_strides, k_strides, v_strides, dout_strides, dq_strides, dk_strides, dv_strides)
    k_strides, v_strides, dout_strides = all_strides[SAME[1]], all_strides[SAME[2]], all_strides[SAME[3]]
    dq_strides, dk_strides, dv_strides = all_strides[SAME[4]], all_strides[SAME[5]], all_strides[SAME[6]]
    h = tl.program_id(0) % heads
    first = tl.program_id(0) // heads
    q_local = local(BLOCK_M, WIDE)
    k_local = local(BLOCK_N, WIDE)
    q_rows = inside(q_local, M, SHORT_M)
    k_rows = inside(k_local, N, SHORT_N)
    q_own = owned(0, 0, q_local, M, SHORT_M)
    k_own = owned(0, 0, k_local, N, SHORT_N)
    pair_own = q_own[:, None] & k_own[None, :]
    unit = LOG2E
    if not SCALED:
        unit = scale * LOG2E
    held = held_terms(
        term_ptrs, term_strides, first, h, sizes, 0, q_rows[:, None], k_local[None, :], k_own[None, :], TERMS, HELD,
        FOLD, WIDE, SHORT_N,
    )  # fmt: skip
    acc_ds = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for b in tl.range(first, batch, step, num_stages=STAGES):
        q_base = q_ptr + head_offset(b, h, q_strides, sizes, Q_VEC, WIDE_HEADS)
        k_base = k_ptr + head_offset(b, h, k_strides, sizes, K_VEC, WIDE_HEADS)
        v_base = v_ptr + head_offset(b, h, v_strides, sizes, V_VEC, WIDE_HEADS)
        dout_base = dout_ptr + head_offset(b, h, dout_strides, sizes, DOUT_VEC, WIDE_HEADS)
        bases = term_bases(term_ptrs, term_strides, b, h, sizes, TERMS)
        q = load_rows(q_base, 0, q_rows, q_strides, D, BLOCK_D, Q_VEC, WIDE)  # [M, D]
        k = load_keys(
            k_base, k_rows, k_strides, bases, term_strides, k_local, k_own, TERMS, D, BLOCK_D, K_VEC, WIDE, SHORT_N,
            HIDES_KEYS,
        )  # fmt: skip # [N, D]
        terms = window_terms(
            held, term_ptrs, term_strides, b, h, sizes, 0, q_rows[:, None], k_local[None, :], k_own[None, :], TERMS,
            HELD, WIDE, WIDE_HEADS, SHORT_N,
        )  # fmt: skip
        at = wide_if(b * heads + h, WIDE_HEADS) * M + q_rows
        lse = tl.load(lse_ptr + at)
        reference = row_reference(lse, PAIR)
        if SHORT_M:  # rows past the end weigh nothing
            reference = tl.where(q_own, reference, float("inf"))
        low = reference
        if PAIR:
            low = tl.load(low_ptr + at) * LOG2E
        dout = load_rows(dout_base, 0, q_rows, dout_strides, DV, BLOCK_DV, DOUT_VEC, WIDE)  # [M, Dv]
        v = load_rows(v_base, 0, k_rows, v_strides, DV, BLOCK_DV, V_VEC, WIDE)  # [N, Dv]
        q, k = operand(q, PRECISION), operand(k, PRECISION)
        y = score_tile(
            tl.dot(q, tl.trans(k), input_precision=PRECISION),  # [M, N]
            terms,
            q_local[:, None],
            k_local[None, :],
            k_own[None, :],
            scale,
            shift,
            TERMS,
            SCALED,
            IS_CAUSAL,
            COMPARE,
        )
        p = probability(y, reference[:, None], low[:, None], unit, PAIR)
        dout = operand(dout, PRECISION)
        if WANT_DV:
            weights = operand(p.to(dout.dtype), PRECISION)
            dv = tl.dot(tl.trans(weights), dout, input_precision=PRECISION)  # [N, Dv]
            dv_base = dv_ptr + head_offset(b, h, dv_strides, sizes, DV_VEC, WIDE_HEADS)
            store_rows(dv_base, 0, k_local, dv_strides, k_own, dv, DV, BLOCK_DV, DV_VEC, WIDE)
        if WANT_DQ or WANT_DK or STORE_DS or SUM_DS:
            dp = tl.dot(dout, tl.trans(operand(v, PRECISION)), input_precision=PRECISION)  # [M, N]
            delta = tl.sum(score_grad_tile(p, dp, 0.0, HAS_KEEP), 1)
            if not PAIR:  # weights add up to 1 but for the rounding of lse: 1e-3 at scores of 1e4, times q and k
                total = tl.sum(p, 1)
                delta = delta / tl.where(total == 0.0, 1.0, total)
            if HAS_DLSE:
                delta -= tl.load(dlse_ptr + at)
                delta = tl.where(lse == float("-inf"), 0.0, delta)  # nothing was seen: dlse may be NaN there
            ds = score_grad_tile(p, dp, delta[:, None], HAS_KEEP)
            if SUM_DS:
                acc_ds += ds
            if STORE_DS:
                ds_base = dbias_ptr + head_offset(b, h, dbias_strides, sizes, DBIAS_VEC)
                store_term_grad(
                    ds_base, dbias_strides, 0, 0, q_local[:, None], k_local[None, :], pair_own, ds, DBIAS_VEC, WIDE
                )
            if WANT_DQ:
                dq = tl.dot(operand(ds.to(k.dtype), PRECISION), k, input_precision=PRECISION)  # [M, D]
                dq_base = dq_ptr + head_offset(b, h, dq_strides, sizes, DQ_VEC, WIDE_HEADS)
                store_rows(dq_base, 0, q_local, dq_strides, q_own, dq * scale, D, BLOCK_D, DQ_VEC, WIDE)
            if WANT_DK:
                change = operand(ds.to(q.dtype), PRECISION)
                dk = tl.dot(tl.trans(change), q, input_precision=PRECISION)  # [N, D]
                dk_base = dk_ptr + head_offset(b, h, dk_strides, sizes, DK_VEC, WIDE_HEADS)
                store_rows(dk_base, 0, k_local, dk_strides, k_own, dk * scale, D, BLOCK_D, DK_VEC, WIDE)
    if SUM_DS:
        place = first * heads + h
        if not OWNS_HEAD:
            place = (first // period * heads + h) * period + first % period
        tl.store(dbias_ptr + wide(place) * M * N + q_local[:, None] * N + k_local[None, :], acc_ds, mask=pair_own)
