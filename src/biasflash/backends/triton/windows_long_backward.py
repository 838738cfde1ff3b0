# jit code is a language of its own: its names and types are Triton's
"""Backward of windows of two tiles of keys, by queries: dq and delta. ``windows_long_keys`` has the rest.

No program holds the float32 sums of all pairs of a window (81 registers of 256 threads) beside its scores and their
gradients: 1360 bytes of spills, offline on sm_90. With delta known, the kernel by keys takes the queries in pieces: the
sums of all pieces stay, scores are there for one at a time.
"""

import triton
import triton.language as tl

from biasflash.backends.triton.windows import held_terms, load_keys, window_terms
from biasflash.backends.triton.windows_long import tiles_of_window
from biasflash.tile.bias import store_term_grad, term_bases
from biasflash.tile.memory import (
    head_offset,
    load_rows,
    store_rows,
    wide_if,
)
from biasflash.tile.score import score_grad_tile, score_tile
from biasflash.tile.softmax import LOG2E, probability, row_reference


@triton.jit
def row_delta(
    p, dp, p_tail, dp_tail, lse, dlse_ptr, at, PAIR: tl.constexpr, HAS_DLSE: tl.constexpr, HAS_KEEP: tl.constexpr
):
    """The row sums of p dp over both tiles of keys, p normalised, less what comes in for the log-sum-exp."""
    delta = tl.sum(score_grad_tile(p, dp, 0.0, HAS_KEEP), 1)
    delta += tl.sum(score_grad_tile(p_tail, dp_tail, 0.0, HAS_KEEP), 1)
    if not PAIR:  # weights add up to 1 but for the rounding of lse: 1e-3 at scores of 1e4, times q and k
        total = tl.sum(p, 1) + tl.sum(p_tail, 1)
        delta = delta / tl.where(total == 0.0, 1.0, total)
    if HAS_DLSE:
        delta -= tl.load(dlse_ptr + at)
        delta = tl.where(lse == float("-inf"), 0.0, delta)  # nothing was seen: dlse may be NaN there
    return delta


@triton.jit
def dq_tile(
    h, q_start, first, q_ptr, k_ptr, v_ptr, dout_ptr, lse_ptr, low_ptr, dlse_ptr, reference_ptr, delta_ptr, dq_ptr,
    dbias_ptr, term_ptrs, sizes, q_strides, k_strides, v_strides, dout_strides, dq_strides, dbias_strides,
    term_strides, M, N, heads, batch, step, shift, scale,
    TERMS: tl.constexpr, HELD: tl.constexpr, FOLD: tl.constexpr, COMPARE: tl.constexpr, D: tl.constexpr,
    DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, Q_VEC: tl.constexpr, K_VEC: tl.constexpr,
    V_VEC: tl.constexpr, DOUT_VEC: tl.constexpr, DQ_VEC: tl.constexpr, DBIAS_VEC: tl.constexpr,
    WANT_DQ: tl.constexpr, STORE_DS: tl.constexpr, HAS_DLSE: tl.constexpr, WIDE: tl.constexpr,
    WIDE_HEADS: tl.constexpr, SHORT_M: tl.constexpr, SHORT_N: tl.constexpr, IS_CAUSAL: tl.constexpr,
    SCALED: tl.constexpr, PAIR: tl.constexpr, HAS_KEEP: tl.constexpr, HIDES_KEYS: tl.constexpr,
    PRECISION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, TAIL: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """One query tile of the windows ``first, first + step, ...``, see ``long_window_dq_kernel``."""
    rows, keys, tail = tiles_of_window(q_start, M, N, WIDE, SHORT_M, SHORT_N, BLOCK_M, BLOCK_N, TAIL)
    q_at, q_local, q_rows, q_own = rows
    k_local, k_own = keys
    t_local, t_rows, t_own = tail
    q_row, k_row, k_in = q_rows[:, None], k_local[None, :], k_own[None, :]
    t_row, t_in = t_local[None, :], t_own[None, :]
    unit = LOG2E
    if not SCALED:
        unit = scale * LOG2E
    held = held_terms(term_ptrs, term_strides, first, h, sizes, q_at, q_row, k_row, k_in, TERMS, HELD, -1, WIDE, False)
    t_held = held_terms(
        term_ptrs, term_strides, first, h, sizes, q_at, q_row, t_row, t_in, TERMS, HELD, FOLD, WIDE, SHORT_N
    )
    for b in tl.range(first, batch, step, num_stages=STAGES):
        q_base = q_ptr + head_offset(b, h, q_strides, sizes, Q_VEC, WIDE_HEADS)
        k_base = k_ptr + head_offset(b, h, k_strides, sizes, K_VEC, WIDE_HEADS)
        v_base = v_ptr + head_offset(b, h, v_strides, sizes, V_VEC, WIDE_HEADS)
        dout_base = dout_ptr + head_offset(b, h, dout_strides, sizes, DOUT_VEC, WIDE_HEADS)
        bases = term_bases(term_ptrs, term_strides, b, h, sizes, TERMS)
        q = load_rows(q_base, q_at, q_rows, q_strides, D, BLOCK_D, Q_VEC, WIDE)  # [M, D]
        k = load_keys(
            k_base, k_local, k_strides, bases, term_strides, k_local, k_own, TERMS, D, BLOCK_D, K_VEC, WIDE, False,
            HIDES_KEYS,
        )  # fmt: skip # [N, D]
        k_tail = load_keys(
            k_base, t_rows, k_strides, bases, term_strides, t_local, t_own, TERMS, D, BLOCK_D, K_VEC, WIDE, SHORT_N,
            HIDES_KEYS,
        )  # fmt: skip # [TAIL, D]
        terms = window_terms(
            held, term_ptrs, term_strides, b, h, sizes, q_at, q_row, k_row, k_in, TERMS, HELD, WIDE, WIDE_HEADS, False
        )
        t_terms = window_terms(
            t_held, term_ptrs, term_strides, b, h, sizes, q_at, q_row, t_row, t_in, TERMS, HELD, WIDE, WIDE_HEADS,
            SHORT_N,
        )  # fmt: skip
        at = wide_if(b * heads + h, WIDE_HEADS) * M + q_at + q_rows
        lse = tl.load(lse_ptr + at)
        reference = row_reference(lse, PAIR)
        low = reference
        if PAIR:
            low = tl.load(low_ptr + at) * LOG2E
        dout = load_rows(dout_base, q_at, q_rows, dout_strides, DV, BLOCK_DV, DOUT_VEC, WIDE)  # [M, Dv]
        v = load_rows(v_base, 0, k_local, v_strides, DV, BLOCK_DV, V_VEC, WIDE)  # [N, Dv]
        v_tail = load_rows(v_base, 0, t_rows, v_strides, DV, BLOCK_DV, V_VEC, WIDE)  # [TAIL, Dv]
        q_pos = (q_at + q_local)[:, None]
        s = tl.dot(q, tl.trans(k), input_precision=PRECISION)  # [M, N]
        s_tail = tl.dot(q, tl.trans(k_tail), input_precision=PRECISION)  # [M, TAIL]
        y = score_tile(s, terms, q_pos, k_row, k_in, scale, shift, TERMS, SCALED, IS_CAUSAL, IS_CAUSAL)
        y_tail = score_tile(s_tail, t_terms, q_pos, t_row, t_in, scale, shift, TERMS, SCALED, IS_CAUSAL, COMPARE)
        p = probability(y, reference[:, None], low[:, None], unit, PAIR)
        p_tail = probability(y_tail, reference[:, None], low[:, None], unit, PAIR)
        dp = tl.dot(dout, tl.trans(v), input_precision=PRECISION)  # [M, N]
        dp_tail = tl.dot(dout, tl.trans(v_tail), input_precision=PRECISION)  # [M, TAIL]
        delta = row_delta(p, dp, p_tail, dp_tail, lse, dlse_ptr, at, PAIR, HAS_DLSE, HAS_KEEP)
        tl.store(reference_ptr + at, reference, mask=q_own)
        tl.store(delta_ptr + at, delta, mask=q_own)
        if WANT_DQ or STORE_DS:
            ds = score_grad_tile(p, dp, delta[:, None], HAS_KEEP)
            ds_tail = score_grad_tile(p_tail, dp_tail, delta[:, None], HAS_KEEP)
            if STORE_DS:
                ds_base = dbias_ptr + head_offset(b, h, dbias_strides, sizes, DBIAS_VEC)
                store_term_grad(
                    ds_base, dbias_strides, q_at, 0, q_local[:, None], k_row, q_own[:, None] & k_in, ds, DBIAS_VEC, WIDE
                )
                store_term_grad(
                    ds_base, dbias_strides, q_at, 0, q_local[:, None], t_row, q_own[:, None] & t_in, ds_tail, DBIAS_VEC,
                    WIDE,
                )  # fmt: skip
            if WANT_DQ:
                dq = tl.dot(ds.to(k.dtype), k, input_precision=PRECISION)  # [M, D]
                dq = tl.dot(ds_tail.to(k.dtype), k_tail, dq, input_precision=PRECISION)
                dq_base = dq_ptr + head_offset(b, h, dq_strides, sizes, DQ_VEC, WIDE_HEADS)
                store_rows(dq_base, q_at, q_local, dq_strides, q_own, dq * scale, D, BLOCK_D, DQ_VEC, WIDE)


@triton.jit(do_not_specialize=["M", "N", "heads", "batch", "step", "shift"])
def long_window_dq_kernel(
    q_ptr, k_ptr, v_ptr, dout_ptr, lse_ptr, low_ptr, dlse_ptr, reference_ptr, delta_ptr, dq_ptr, dbias_ptr,
    term_ptrs, sizes, q_strides, k_strides, v_strides, dout_strides, dq_strides, dbias_strides, term_strides, M, N,
    heads, batch, step, shift, scale,
    TERMS: tl.constexpr, HELD: tl.constexpr, FOLD: tl.constexpr, COMPARE: tl.constexpr, SAME: tl.constexpr,
    SQUARE: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    Q_VEC: tl.constexpr, K_VEC: tl.constexpr, V_VEC: tl.constexpr, DOUT_VEC: tl.constexpr, DQ_VEC: tl.constexpr,
    DBIAS_VEC: tl.constexpr, WANT_DQ: tl.constexpr, STORE_DS: tl.constexpr, HAS_DLSE: tl.constexpr,
    WIDE: tl.constexpr, WIDE_HEADS: tl.constexpr, EVEN_N: tl.constexpr, SHORT_M: tl.constexpr, SHORT_N: tl.constexpr,
    IS_CAUSAL: tl.constexpr, SCALED: tl.constexpr, PAIR: tl.constexpr, HAS_KEEP: tl.constexpr,
    HIDES_KEYS: tl.constexpr, PRECISION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    TAIL: tl.constexpr, LAST: tl.constexpr, SHARE: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """dq and delta of windows of more than BLOCK_N keys, up to BLOCK_N + TAIL; SHORT_N: the tail is not full.

    delta as in ``window_backward_kernel``. It and what is subtracted from scores (``row_reference``) are written for
    the kernel by keys, float32 ``(batch, heads, M)``. STORE_DS writes the score gradients of every window, the gradient
    of a bias of full shape.

    LAST: rows of the last query tile. Where that is less than BLOCK_M its programs are quicker: they take windows
    ``step`` apart, those of other tiles SHARE times as far apart. Grid: head (fastest), then the query tiles of SHARE
    windows, the last ones together.
    """
    if EVEN_N:
        N = N // 8 * 8
    if SQUARE:
        M = N
    all_strides = (q_strides, k_strides, v_strides, dout_strides, dq_strides)
    k_strides, v_strides = all_strides[SAME[1]], all_strides[SAME[2]]
    dout_strides, dq_strides = all_strides[SAME[3]], all_strides[SAME[4]]
    h = tl.program_id(0) % heads
    rest = tl.program_id(0) // heads
    if LAST == BLOCK_M:
        tiles = tl.cdiv(M, BLOCK_M)
        dq_tile(
            h, rest % tiles * BLOCK_M, rest // tiles, q_ptr, k_ptr, v_ptr, dout_ptr, lse_ptr, low_ptr, dlse_ptr,
            reference_ptr, delta_ptr, dq_ptr, dbias_ptr, term_ptrs, sizes, q_strides, k_strides, v_strides,
            dout_strides, dq_strides, dbias_strides, term_strides, M, N, heads, batch, step, shift, scale, TERMS,
            HELD, FOLD, COMPARE, D, DV, BLOCK_D, BLOCK_DV, Q_VEC, K_VEC, V_VEC, DOUT_VEC, DQ_VEC, DBIAS_VEC, WANT_DQ,
            STORE_DS, HAS_DLSE, WIDE, WIDE_HEADS, SHORT_M, SHORT_N, IS_CAUSAL, SCALED, PAIR, HAS_KEEP, HIDES_KEYS,
            PRECISION, BLOCK_M, BLOCK_N, TAIL, STAGES,
        )  # fmt: skip
    else:
        whole = M // BLOCK_M
        unit = rest // (SHARE * whole + 1)
        place = rest % (SHARE * whole + 1)
        if place < SHARE * whole:
            dq_tile(
                h, place % whole * BLOCK_M, unit * SHARE + place // whole, q_ptr, k_ptr, v_ptr, dout_ptr, lse_ptr,
                low_ptr, dlse_ptr, reference_ptr, delta_ptr, dq_ptr, dbias_ptr, term_ptrs, sizes, q_strides,
                k_strides, v_strides, dout_strides, dq_strides, dbias_strides, term_strides, M, N, heads, batch,
                SHARE * step, shift, scale, TERMS, HELD, FOLD, COMPARE, D, DV, BLOCK_D, BLOCK_DV, Q_VEC, K_VEC,
                V_VEC, DOUT_VEC, DQ_VEC, DBIAS_VEC, WANT_DQ, STORE_DS, HAS_DLSE, WIDE, WIDE_HEADS, False, SHORT_N,
                IS_CAUSAL, SCALED, PAIR, HAS_KEEP, HIDES_KEYS, PRECISION, BLOCK_M, BLOCK_N, TAIL, STAGES,
            )  # fmt: skip
        else:
            dq_tile(
                h, whole * BLOCK_M, unit, q_ptr, k_ptr, v_ptr, dout_ptr, lse_ptr, low_ptr, dlse_ptr, reference_ptr,
                delta_ptr, dq_ptr, dbias_ptr, term_ptrs, sizes, q_strides, k_strides, v_strides, dout_strides,
                dq_strides, dbias_strides, term_strides, M, N, heads, batch, step, shift, scale, TERMS, HELD, FOLD,
                COMPARE, D, DV, BLOCK_D, BLOCK_DV, Q_VEC, K_VEC, V_VEC, DOUT_VEC, DQ_VEC, DBIAS_VEC, WANT_DQ,
                STORE_DS, HAS_DLSE, WIDE, WIDE_HEADS, False, SHORT_N, IS_CAUSAL, SCALED, PAIR, HAS_KEEP, HIDES_KEYS,
                PRECISION, LAST, BLOCK_N, TAIL, STAGES,
            )  # fmt: skip
