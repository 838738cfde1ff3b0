# jit code is a language of its own: its names and types are Triton's
"""Backward of windows of two tiles of keys, by keys: dk, dv, a shared bias's sums; after ``windows_long_backward``.

With delta known no row of scores need be there as a whole. Queries come in pieces: the sums of all pieces stay, scores
and their gradients are there for one at a time.
"""

import triton
import triton.language as tl

from biasflash.backends.triton.windows import held_terms, window_terms
from biasflash.tile.memory import (
    head_offset,
    inside,
    load_rows,
    local,
    owned,
    shifted_keys,
    store_rows,
    wide,
    wide_if,
)
from biasflash.tile.score import score_grad_tile, score_tile
from biasflash.tile.softmax import LOG2E, probability
from biasflash.tile.strips import zeros


@triton.jit
def piece_zeros(M: tl.constexpr, N: tl.constexpr, TURNED: tl.constexpr):
    """Sums for one piece of queries."""
    if TURNED:
        return zeros(N, M)
    else:
        return zeros(M, N)


@triton.jit
def query_piece(
    acc_dk, acc_dv, k, v, held, b, h, q_local, k_local, k_own,
    q_ptr, dout_ptr, reference_ptr, low_ptr, delta_ptr, term_ptrs, sizes, q_strides, dout_strides, term_strides,
    M, heads, shift, scale, unit,
    TERMS: tl.constexpr, HELD: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr, Q_VEC: tl.constexpr, DOUT_VEC: tl.constexpr, WANT_DK: tl.constexpr, WANT_DV: tl.constexpr,
    SUM_DS: tl.constexpr, WIDE: tl.constexpr, WIDE_HEADS: tl.constexpr, SHORT_M: tl.constexpr, TURNED: tl.constexpr,
    IS_CAUSAL: tl.constexpr, SCALED: tl.constexpr, PAIR: tl.constexpr, HAS_KEEP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """What one piece of queries adds to dk and dv of a tile of keys, and its score gradients.

    TURNED: they are keys x queries, else queries x keys.
    """
    q_rows = inside(q_local, M, SHORT_M)
    q_base = q_ptr + head_offset(b, h, q_strides, sizes, Q_VEC, WIDE_HEADS)
    dout_base = dout_ptr + head_offset(b, h, dout_strides, sizes, DOUT_VEC, WIDE_HEADS)
    q = load_rows(q_base, 0, q_rows, q_strides, D, BLOCK_D, Q_VEC, WIDE)  # [M, D]
    k_pos, k_in = tl.expand_dims(k_local, TURNED), tl.expand_dims(k_own, TURNED)
    terms = window_terms(
        held, term_ptrs, term_strides, b, h, sizes, 0, tl.expand_dims(q_rows, 1 - TURNED), k_pos, k_in, TERMS, HELD,
        WIDE, WIDE_HEADS, False,
    )  # fmt: skip
    at = wide_if(b * heads + h, WIDE_HEADS) * M + q_rows
    reference = tl.load(reference_ptr + at)
    if SHORT_M:  # rows past the end weigh nothing
        reference = tl.where(q_local < M, reference, float("inf"))
    low = reference
    if PAIR:
        low = tl.load(low_ptr + at) * LOG2E
    dout = load_rows(dout_base, 0, q_rows, dout_strides, DV, BLOCK_DV, DOUT_VEC, WIDE)  # [M, Dv]
    if TURNED:
        s = tl.dot(k, tl.trans(q), input_precision=PRECISION)  # [N, M]
    else:
        s = tl.dot(q, tl.trans(k), input_precision=PRECISION)  # [M, N]
    q_pos = tl.expand_dims(q_local, 1 - TURNED)
    y = score_tile(s, terms, q_pos, k_pos, k_in, scale, shift, TERMS, SCALED, IS_CAUSAL, IS_CAUSAL)
    p = probability(y, tl.expand_dims(reference, 1 - TURNED), tl.expand_dims(low, 1 - TURNED), unit, PAIR)
    if WANT_DV:
        weights = p.to(dout.dtype)
        acc_dv = tl.dot(weights if TURNED else tl.trans(weights), dout, acc_dv, input_precision=PRECISION)  # [N, Dv]
    ds = p
    if WANT_DK or SUM_DS:
        delta = tl.load(delta_ptr + at)
        if TURNED:
            dp = tl.dot(v, tl.trans(dout), input_precision=PRECISION)  # [N, M]
        else:
            dp = tl.dot(dout, tl.trans(v), input_precision=PRECISION)  # [M, N]
        ds = score_grad_tile(p, dp, tl.expand_dims(delta, 1 - TURNED), HAS_KEEP)
        if WANT_DK:
            change = ds.to(q.dtype)
            acc_dk = tl.dot(change if TURNED else tl.trans(change), q, acc_dk, input_precision=PRECISION)  # [N, D]
    return acc_dk, acc_dv, ds


@triton.jit
def keys_tile(
    h, k_start, first, q_ptr, k_ptr, v_ptr, dout_ptr, reference_ptr, low_ptr, delta_ptr, dk_ptr, dv_ptr, dbias_ptr,
    term_ptrs, sizes, q_strides, k_strides, v_strides, dout_strides, dk_strides, dv_strides, term_strides, M, N,
    heads, batch, step, shift, period, scale,
    TERMS: tl.constexpr, HELD: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr, Q_VEC: tl.constexpr, K_VEC: tl.constexpr, V_VEC: tl.constexpr, DOUT_VEC: tl.constexpr,
    DK_VEC: tl.constexpr, DV_VEC: tl.constexpr, WANT_DK: tl.constexpr, WANT_DV: tl.constexpr, SUM_DS: tl.constexpr,
    OWNS_HEAD: tl.constexpr, WIDE: tl.constexpr, WIDE_HEADS: tl.constexpr, EVEN_N: tl.constexpr,
    IS_CAUSAL: tl.constexpr, SCALED: tl.constexpr, PAIR: tl.constexpr, HAS_KEEP: tl.constexpr,
    PRECISION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PIECES: tl.constexpr,
    SHARE: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """One key tile of the windows ``first, first + step, ...``, see ``long_window_dkdv_kernel``."""
    k_at = shifted_keys(k_start, N, BLOCK_N, False, EVEN_N)
    k_local = local(BLOCK_N, WIDE)
    k_own = owned(k_at, k_start, k_local, N, False)
    k_pos = k_at + k_local
    unit = LOG2E
    if not SCALED:
        unit = scale * LOG2E
    held = ()
    sums = ()
    for i in tl.static_range(len(PIECES)):
        q_rows = inside(i * BLOCK_M + local(PIECES[i][0], WIDE), M, PIECES[i][1])
        tiles_of_terms = held_terms(
            term_ptrs, term_strides, first, h, sizes, 0, tl.expand_dims(q_rows, 1 - PIECES[i][2]),
            tl.expand_dims(k_pos, PIECES[i][2]), tl.expand_dims(k_own, PIECES[i][2]), TERMS, HELD, -1, WIDE, False,
        )  # fmt: skip
        held = held + (tiles_of_terms,)  # noqa: RUF005
        sums = sums + (piece_zeros(PIECES[i][0], BLOCK_N, PIECES[i][2]),)  # noqa: RUF005
    for b in tl.range(first, batch, step, num_stages=STAGES):
        k_base = k_ptr + head_offset(b, h, k_strides, sizes, K_VEC, WIDE_HEADS)
        v_base = v_ptr + head_offset(b, h, v_strides, sizes, V_VEC, WIDE_HEADS)
        k = load_rows(k_base, k_at, k_local, k_strides, D, BLOCK_D, K_VEC, WIDE)  # [N, D]
        v = load_rows(v_base, k_at, k_local, v_strides, DV, BLOCK_DV, V_VEC, WIDE)  # [N, Dv]
        dk = zeros(BLOCK_N, BLOCK_D)
        dv = zeros(BLOCK_N, BLOCK_DV)
        new_sums = ()
        for i in tl.static_range(len(PIECES)):
            q_local = i * BLOCK_M + local(PIECES[i][0], WIDE)
            dk, dv, ds = query_piece(
                dk, dv, k, v, held[i], b, h, q_local, k_pos, k_own, q_ptr, dout_ptr, reference_ptr, low_ptr, delta_ptr,
                term_ptrs, sizes, q_strides, dout_strides, term_strides, M, heads, shift, scale, unit, TERMS, HELD, D,
                DV, BLOCK_D, BLOCK_DV, Q_VEC, DOUT_VEC, WANT_DK, WANT_DV, SUM_DS, WIDE, WIDE_HEADS, PIECES[i][1],
                PIECES[i][2], IS_CAUSAL, SCALED, PAIR, HAS_KEEP, PRECISION,
            )  # fmt: skip
            new_sums = new_sums + (sums[i] + ds,)  # noqa: RUF005
        if SUM_DS:
            sums = new_sums
        if WANT_DV:
            dv_base = dv_ptr + head_offset(b, h, dv_strides, sizes, DV_VEC, WIDE_HEADS)
            store_rows(dv_base, k_at, k_local, dv_strides, k_own, dv, DV, BLOCK_DV, DV_VEC, WIDE)
        if WANT_DK:
            dk_base = dk_ptr + head_offset(b, h, dk_strides, sizes, DK_VEC, WIDE_HEADS)
            store_rows(dk_base, k_at, k_local, dk_strides, k_own, dk * scale, D, BLOCK_D, DK_VEC, WIDE)
    if SUM_DS:
        for share in tl.static_range(SHARE):  # the first plane takes the sums, the others have none of these keys
            owner = first + share * step
            place = owner * heads + h
            if not OWNS_HEAD:
                place = (owner // period * heads + h) * period + owner % period
            for i in tl.static_range(len(PIECES)):
                q_row = tl.expand_dims(i * BLOCK_M + local(PIECES[i][0], WIDE), 1 - PIECES[i][2])
                k_row, k_in = tl.expand_dims(k_pos, PIECES[i][2]), tl.expand_dims(k_own, PIECES[i][2])
                total = sums[i] if share == 0 else tl.zeros_like(sums[i])
                tl.store(dbias_ptr + wide(place) * M * N + q_row * N + k_row, total, mask=k_in & (q_row < M))


@triton.jit(do_not_specialize=["M", "N", "heads", "batch", "step", "shift", "period"])
def long_window_dkdv_kernel(
    q_ptr, k_ptr, v_ptr, dout_ptr, reference_ptr, low_ptr, delta_ptr, dk_ptr, dv_ptr, dbias_ptr, term_ptrs, sizes,
    q_strides, k_strides, v_strides, dout_strides, dk_strides, dv_strides, term_strides, M, N, heads, batch, step,
    shift, period, scale,
    TERMS: tl.constexpr, HELD: tl.constexpr, SAME: tl.constexpr, SQUARE: tl.constexpr, D: tl.constexpr,
    DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, Q_VEC: tl.constexpr, K_VEC: tl.constexpr,
    V_VEC: tl.constexpr, DOUT_VEC: tl.constexpr, DK_VEC: tl.constexpr, DV_VEC: tl.constexpr, WANT_DK: tl.constexpr,
    WANT_DV: tl.constexpr, SUM_DS: tl.constexpr, OWNS_HEAD: tl.constexpr, WIDE: tl.constexpr,
    WIDE_HEADS: tl.constexpr, EVEN_N: tl.constexpr, IS_CAUSAL: tl.constexpr, SCALED: tl.constexpr,
    PAIR: tl.constexpr, HAS_KEEP: tl.constexpr, PRECISION: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, PIECES: tl.constexpr, LAST: tl.constexpr, SHARE: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """dk, dv of windows, and the sum of score gradients over a program's windows (see ``window_backward_kernel``).

    Queries come in PIECES of BLOCK_M, the last one perhaps smaller: ``(side, whether it is not full, whether its tile
    is keys x queries)``. A thread has the statistics of two rows where queries are rows, of 16 for 64 queries where
    keys are (54 more loads a window); but less than 64 queries are no rows for Hopper's products. LAST, SHARE and the
    grid as in ``long_window_dq_kernel``, for tiles of keys.
    """
    if EVEN_N:
        N = N // 8 * 8
    if SQUARE:
        M = N
    all_strides = (q_strides, k_strides, v_strides, dout_strides, dk_strides, dv_strides)
    k_strides, v_strides, dout_strides = all_strides[SAME[1]], all_strides[SAME[2]], all_strides[SAME[3]]
    dk_strides, dv_strides = all_strides[SAME[4]], all_strides[SAME[5]]
    h = tl.program_id(0) % heads
    rest = tl.program_id(0) // heads
    if LAST == BLOCK_N:
        tiles = tl.cdiv(N, BLOCK_N)
        keys_tile(
            h, rest % tiles * BLOCK_N, rest // tiles, q_ptr, k_ptr, v_ptr, dout_ptr, reference_ptr, low_ptr,
            delta_ptr, dk_ptr, dv_ptr, dbias_ptr, term_ptrs, sizes, q_strides, k_strides, v_strides, dout_strides,
            dk_strides, dv_strides, term_strides, M, N, heads, batch, step, shift, period, scale, TERMS, HELD, D, DV,
            BLOCK_D, BLOCK_DV, Q_VEC, K_VEC, V_VEC, DOUT_VEC, DK_VEC, DV_VEC, WANT_DK, WANT_DV, SUM_DS, OWNS_HEAD,
            WIDE, WIDE_HEADS, EVEN_N, IS_CAUSAL, SCALED, PAIR, HAS_KEEP, PRECISION, BLOCK_M, BLOCK_N, PIECES, 1, STAGES,
        )  # fmt: skip
    else:
        whole = N // BLOCK_N
        unit = rest // (SHARE * whole + 1)
        place = rest % (SHARE * whole + 1)
        if place < SHARE * whole:
            keys_tile(
                h, place % whole * BLOCK_N, unit * SHARE + place // whole, q_ptr, k_ptr, v_ptr, dout_ptr,
                reference_ptr, low_ptr, delta_ptr, dk_ptr, dv_ptr, dbias_ptr, term_ptrs, sizes, q_strides, k_strides,
                v_strides, dout_strides, dk_strides, dv_strides, term_strides, M, N, heads, batch, SHARE * step,
                shift, period, scale, TERMS, HELD, D, DV, BLOCK_D, BLOCK_DV, Q_VEC, K_VEC, V_VEC, DOUT_VEC, DK_VEC,
                DV_VEC, WANT_DK, WANT_DV, SUM_DS, OWNS_HEAD, WIDE, WIDE_HEADS, EVEN_N, IS_CAUSAL, SCALED, PAIR,
                HAS_KEEP, PRECISION, BLOCK_M, BLOCK_N, PIECES, 1, STAGES,
            )  # fmt: skip
        else:
            keys_tile(
                h, whole * BLOCK_N, unit, q_ptr, k_ptr, v_ptr, dout_ptr, reference_ptr, low_ptr, delta_ptr, dk_ptr,
                dv_ptr, dbias_ptr, term_ptrs, sizes, q_strides, k_strides, v_strides, dout_strides, dk_strides,
                dv_strides, term_strides, M, N, heads, batch, step, shift, period, scale, TERMS, HELD, D, DV,
                BLOCK_D, BLOCK_DV, Q_VEC, K_VEC, V_VEC, DOUT_VEC, DK_VEC, DV_VEC, WANT_DK, WANT_DV, SUM_DS,
                OWNS_HEAD, WIDE, WIDE_HEADS, EVEN_N, IS_CAUSAL, SCALED, PAIR, HAS_KEEP, PRECISION, BLOCK_M, LAST,
                PIECES, SHARE, STAGES,
            )  # fmt: skip
