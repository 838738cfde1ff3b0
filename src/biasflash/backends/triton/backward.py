"""Backward passes over queries and keys: dk and dv (owner: a key tile), dq (owner: a query tile).

Scores are recomputed by the same pieces as in the forward pass. ``dkdv_kernel`` works on tiles of keys x queries, so
that weights and score gradients enter the products from registers; the others on queries x keys.
"""

import triton
import triton.language as tl

from biasflash.backends.triton.tiles import chosen, list_part, list_row
from biasflash.tile.bias import load_terms, seen_keys, store_term_grad, store_unseen, term_bases
from biasflash.tile.memory import head_offset, inside, local, owned, shifted, shifted_keys, wide
from biasflash.tile.redo import any_flag, any_of_planes, redo_share, tile_flag
from biasflash.tile.score import score_grad_tile, score_tile
from biasflash.tile.softmax import (
    LOG2E,
    extreme_flag,
    extreme_reference,
    head_flag,
    is_met_again,
    load_row_statistics,
    probability,
    row_reference,
    statistics_pitch,
    store_row_statistics,
)
from biasflash.tile.span import key_span, place, query_span
from biasflash.tile.strips import (
    add_dots,
    dot_heads,
    load_seen_strips,
    load_strips,
    row_products,
    scale_strips,
    store_strips,
    zero_strips,
)


@triton.jit
def dkdv_tile(
    tile, b, kv_head,
    q_ptr, k_ptr, v_ptr, dout_ptr, reference_ptr, lse_ptr, low_ptr, delta_ptr, rare_ptr, dk_ptr, dv_ptr, ds_ptr,
    column_ptr, term_ptrs,
    sizes, q_strides, k_strides, v_strides, dout_strides, dk_strides, dv_strides, ds_strides, term_strides,
    M, N, heads, group, shift, rare_tiles, scale, lists_ptr, plane_strides,
    TERMS: tl.constexpr, FULL_TERMS: tl.constexpr, UNLISTED: tl.constexpr, LISTS: tl.constexpr, D: tl.constexpr,
    DV: tl.constexpr, D_STRIPS: tl.constexpr, DV_STRIPS: tl.constexpr, Q_VEC: tl.constexpr, K_VEC: tl.constexpr,
    V_VEC: tl.constexpr, DOUT_VEC: tl.constexpr, DK_VEC: tl.constexpr, DV_VEC: tl.constexpr, DS_VEC: tl.constexpr,
    WANT_DK: tl.constexpr, WANT_DV: tl.constexpr, STORE_DS: tl.constexpr, SUM_COLUMNS: tl.constexpr, WIDE: tl.constexpr,
    EVEN_N: tl.constexpr, SHORT_M: tl.constexpr, SHORT_N: tl.constexpr, IS_CAUSAL: tl.constexpr, SCALED: tl.constexpr,
    PAIR: tl.constexpr, RARE: tl.constexpr, HAS_KEEP: tl.constexpr, IS_GROUPED: tl.constexpr, PRECISION: tl.constexpr,
    COLUMNS: tl.constexpr, DP_COLUMNS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """dk and dv of one key tile of one batch item and key head, see ``dkdv_kernel``."""
    k_start = tile * BLOCK_N
    k_at = shifted_keys(k_start, N, BLOCK_N, SHORT_N, EVEN_N)
    k_base = k_ptr + head_offset(b, kv_head, k_strides, sizes, K_VEC)
    v_base = v_ptr + head_offset(b, kv_head, v_strides, sizes, V_VEC)
    q_local = local(BLOCK_M, WIDE)
    k_local = local(BLOCK_N, WIDE)
    q_rows = inside(q_local, M, SHORT_M)
    k_rows = inside(k_local, N, SHORT_N)
    k_own = owned(k_at, k_start, k_local, N, SHORT_N)
    unit = LOG2E if SCALED else scale * LOG2E
    k = load_strips(k_base, k_at, k_rows, k_strides, D, D_STRIPS, K_VEC, WIDE)  # [N, D]
    v = load_strips(v_base, k_at, k_rows, v_strides, DV, DV_STRIPS, V_VEC, WIDE)  # [N, Dv]
    acc_dk = zero_strips(BLOCK_N, D_STRIPS)
    acc_dv = zero_strips(BLOCK_N, DV_STRIPS)
    start, full_start = query_span(k_at, M, shift, BLOCK_M, BLOCK_N, IS_CAUSAL)
    for member in range(0, group if IS_GROUPED else 1):
        h = kv_head * group + member
        head = wide(b) * heads + h
        reference_row = reference_ptr + head * statistics_pitch(M, BLOCK_M)
        delta_row = delta_ptr + head * statistics_pitch(M, BLOCK_M)
        low_row = low_ptr + head * M
        q_base = q_ptr + head_offset(b, h, q_strides, sizes, Q_VEC)
        dout_base = dout_ptr + head_offset(b, h, dout_strides, sizes, DOUT_VEC)
        bases = term_bases(term_ptrs, term_strides, b, h, sizes, TERMS)
        acc_column = tl.zeros([BLOCK_N], tl.float32)
        if STORE_DS:
            ds_base = ds_ptr + head_offset(b, h, ds_strides, sizes, DS_VEC)
            store_unseen(ds_base, ds_strides, start, k_at, q_local, k_local, k_own, M, DS_VEC, WIDE, BLOCK_M, BLOCK_N)
        flag = head_flag(rare_ptr + head * rare_tiles, rare_tiles, RARE)
        for phase in tl.static_range(3):
            if phase == 1 or (phase == 0 and (IS_CAUSAL or LISTS)) or (phase == 2 and RARE):
                lo = full_start if phase == 1 else start
                hi = M if phase else tl.minimum(full_start, M)
                if phase == 2:
                    hi = tl.where(flag > 0.0, M, start)
                    if STORE_DS:
                        tl.debug_barrier()  # other threads may have stored the zeros that are now overwritten
                if LISTS and phase != 2:
                    q_tiles = tl.cdiv(M, BLOCK_M)
                    listed = list_row(lists_ptr, plane_strides, b, h, tile, tl.cdiv(N, BLOCK_N), q_tiles, sizes)
                    entries, hi = list_part(listed, q_tiles, phase == 1)
                    lo = 0
                    entry = tl.load(entries)  # a step ahead, as in the forward pass
                if RARE and phase != 2:
                    hi = tl.where(flag > 1.0, lo, hi)
                met_bases = chosen(bases, UNLISTED) if phase == 1 else bases
                met_strides = chosen(term_strides, UNLISTED) if phase == 1 else term_strides
                for step in tl.range(
                    lo, hi, 1 if LISTS and phase != 2 else BLOCK_M, num_stages=1 if phase == 2 else STAGES
                ):
                    q_start = step
                    if LISTS and phase != 2:
                        q_start = entry * BLOCK_M
                        entry = tl.load(entries + step + 1)
                    q_at = shifted(q_start, M, BLOCK_M, SHORT_M)
                    q_own = owned(q_at, q_start, q_local, M, SHORT_M)
                    q = load_strips(q_base, q_at, q_rows, q_strides, D, D_STRIPS, Q_VEC, WIDE)  # [M, D]
                    terms = load_terms(
                        met_bases, met_strides, q_at, k_at, q_rows[None, :], k_local[:, None], k_own[:, None],
                        FULL_TERMS if phase == 1 else TERMS, WIDE, SHORT_N,
                    )  # fmt: skip
                    reference, delta = load_row_statistics(
                        reference_row, delta_row, q_start, q_rows, q_own, M, BLOCK_M, SHORT_M
                    )
                    low = delta
                    if PAIR or phase == 2:
                        low = tl.load(low_row + q_at + q_rows) * LOG2E
                    if phase == 2:
                        lse = tl.load(lse_ptr + head * M + q_at + q_rows)
                        q_own = q_own & is_met_again(lse, flag)
                        reference = tl.where(q_own, extreme_reference(lse, flag), float("inf"))
                    dout = load_strips(dout_base, q_at, q_rows, dout_strides, DV, DV_STRIPS, DOUT_VEC, WIDE)  # [M, Dv]
                    s = dot_heads(
                        k, k_base, k_at, k_rows, k_strides, q, q_base, q_at, q_rows, q_strides,
                        D, COLUMNS, K_VEC, Q_VEC, WIDE, PRECISION,
                    )  # [N, M]  # fmt: skip
                    y = score_tile(
                        s, terms, (q_at + q_local)[None, :], (k_at + k_local)[:, None], k_own[:, None], scale, shift,
                        FULL_TERMS if phase == 1 else TERMS, SCALED, IS_CAUSAL, phase != 1,
                    )  # [N, M]  # fmt: skip
                    p = probability(y, reference[None, :], low[None, :], unit, PAIR or phase == 2)
                    if WANT_DV:
                        acc_dv = add_dots(acc_dv, p.to(dout[0].dtype), dout, PRECISION)  # [N, Dv]
                    if WANT_DK or STORE_DS or SUM_COLUMNS:
                        dp = dot_heads(
                            v, v_base, k_at, k_rows, v_strides, dout, dout_base, q_at, q_rows, dout_strides,
                            DV, DP_COLUMNS, V_VEC, DOUT_VEC, WIDE, PRECISION,
                        )  # [N, M]  # fmt: skip
                        ds = score_grad_tile(p, dp, delta[None, :], HAS_KEEP)
                        if WANT_DK:
                            acc_dk = add_dots(acc_dk, ds.to(q[0].dtype), q, PRECISION)  # [N, D]
                        if SUM_COLUMNS:
                            acc_column += tl.sum(ds, 1)
                        if STORE_DS:
                            store_term_grad(
                                ds_base, ds_strides, q_at, k_at, q_local[None, :], k_local[:, None],
                                k_own[:, None] & q_own[None, :], ds, DS_VEC, WIDE,
                            )  # fmt: skip
        if SUM_COLUMNS:
            tl.store(column_ptr + head * N + k_at + k_local, acc_column, mask=k_own)
    if WANT_DK:
        dk_base = dk_ptr + head_offset(b, kv_head, dk_strides, sizes, DK_VEC)
        store_strips(dk_base, k_at, k_local, dk_strides, k_own, scale_strips(acc_dk, scale), D, D_STRIPS, DK_VEC, WIDE)
    if WANT_DV:
        dv_base = dv_ptr + head_offset(b, kv_head, dv_strides, sizes, DV_VEC)
        store_strips(dv_base, k_at, k_local, dv_strides, k_own, acc_dv, DV, DV_STRIPS, DV_VEC, WIDE)


@triton.jit(do_not_specialize=["M", "N", "heads", "kv_heads", "group", "batch", "shift", "rare_tiles"])
def dkdv_kernel(
    q_ptr, k_ptr, v_ptr, dout_ptr, reference_ptr, lse_ptr, low_ptr, delta_ptr, rare_ptr, dk_ptr, dv_ptr, ds_ptr,
    column_ptr, term_ptrs,
    sizes, q_strides, k_strides, v_strides, dout_strides, dk_strides, dv_strides, ds_strides, term_strides,
    M, N, heads, kv_heads, group, batch, shift, rare_tiles, scale, lists_ptr, plane_strides,
    TERMS: tl.constexpr, FULL_TERMS: tl.constexpr, UNLISTED: tl.constexpr, LISTS: tl.constexpr,
    D: tl.constexpr, DV: tl.constexpr, D_STRIPS: tl.constexpr, DV_STRIPS: tl.constexpr,
    Q_VEC: tl.constexpr, K_VEC: tl.constexpr, V_VEC: tl.constexpr, DOUT_VEC: tl.constexpr, DK_VEC: tl.constexpr,
    DV_VEC: tl.constexpr, DS_VEC: tl.constexpr, WANT_DK: tl.constexpr, WANT_DV: tl.constexpr, STORE_DS: tl.constexpr,
    SUM_COLUMNS: tl.constexpr, REDO: tl.constexpr, WIDE: tl.constexpr, EVEN_N: tl.constexpr,
    SHORT_M: tl.constexpr, SHORT_N: tl.constexpr, IS_CAUSAL: tl.constexpr, SCALED: tl.constexpr, PAIR: tl.constexpr,
    RARE: tl.constexpr, HAS_KEEP: tl.constexpr, IS_GROUPED: tl.constexpr, PRECISION: tl.constexpr,
    COLUMNS: tl.constexpr, DP_COLUMNS: tl.constexpr, ORDER: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """dk and dv of a key tile, summed over the group of query heads that share it, in order.

    Phases: query tiles on the diagonal, those that see every key of the tile, and extreme rows if there are any.
    STORE_DS also writes every score gradient into ``ds_ptr``, which is the gradient of a bias of full shape;
    SUM_COLUMNS writes its sums over queries, float32 ``(*B Hq N)``. Grid: one program per key tile, batch item and key
    head. LISTS: query tiles come from the lists of ``list_kernel``, as key tiles do in the forward pass. REDO: only
    key heads that have a query head with extreme rows, by a few programs (``redo_share``).
    """
    if EVEN_N:
        N = N // 8 * 8
    tiles = tl.cdiv(N, BLOCK_N)
    if REDO:  # the flags of a group's heads lie side by side
        span, planes = group * rare_tiles, batch * kv_heads
        first, stride, start, step = redo_share(planes, span, tiles)
        if any_of_planes(rare_ptr, first, planes, stride, span):
            for plane in range(first, planes, stride):
                if any_flag(rare_ptr + plane * span, span):
                    for tile in range(start, tiles, step):
                        dkdv_tile(
                            tile, plane // kv_heads, plane % kv_heads, q_ptr, k_ptr, v_ptr, dout_ptr, reference_ptr,
                            lse_ptr, low_ptr, delta_ptr, rare_ptr, dk_ptr, dv_ptr, ds_ptr, column_ptr, term_ptrs, sizes,
                            q_strides, k_strides, v_strides, dout_strides, dk_strides, dv_strides, ds_strides,
                            term_strides, M, N, heads, group, shift, rare_tiles, scale, lists_ptr, plane_strides, TERMS,
                            FULL_TERMS, UNLISTED, LISTS, D, DV, D_STRIPS, DV_STRIPS, Q_VEC, K_VEC, V_VEC, DOUT_VEC,
                            DK_VEC, DV_VEC, DS_VEC, WANT_DK, WANT_DV, STORE_DS, SUM_COLUMNS, WIDE, EVEN_N, SHORT_M,
                            SHORT_N, IS_CAUSAL, SCALED, PAIR, RARE, HAS_KEEP, IS_GROUPED, PRECISION, COLUMNS,
                            DP_COLUMNS, BLOCK_M, BLOCK_N, STAGES,
                        )  # fmt: skip
    else:
        tile, b, kv_head = place(tl.program_id(0), tiles, batch, kv_heads, ORDER)
        dkdv_tile(
            tile, b, kv_head, q_ptr, k_ptr, v_ptr, dout_ptr, reference_ptr, lse_ptr, low_ptr, delta_ptr, rare_ptr,
            dk_ptr, dv_ptr, ds_ptr, column_ptr, term_ptrs, sizes, q_strides, k_strides, v_strides, dout_strides,
            dk_strides, dv_strides, ds_strides, term_strides, M, N, heads, group, shift, rare_tiles, scale, lists_ptr,
            plane_strides, TERMS, FULL_TERMS, UNLISTED, LISTS, D, DV, D_STRIPS, DV_STRIPS, Q_VEC, K_VEC, V_VEC,
            DOUT_VEC, DK_VEC, DV_VEC, DS_VEC, WANT_DK, WANT_DV, STORE_DS, SUM_COLUMNS, WIDE, EVEN_N, SHORT_M, SHORT_N,
            IS_CAUSAL, SCALED, PAIR, RARE, HAS_KEEP, IS_GROUPED, PRECISION, COLUMNS, DP_COLUMNS, BLOCK_M, BLOCK_N,
            STAGES,
        )  # fmt: skip


@triton.jit
def dq_tile(
    tile, b, h,
    q_ptr, k_ptr, v_ptr, dout_ptr, out_ptr, lse_ptr, low_ptr, dlse_ptr, reference_ptr, delta_ptr, rare_ptr, dq_ptr,
    term_ptrs,
    sizes, q_strides, k_strides, v_strides, dout_strides, out_strides, dq_strides, term_strides,
    M, N, heads, group, shift, scale, lists_ptr, plane_strides,
    TERMS: tl.constexpr, FULL_TERMS: tl.constexpr, UNLISTED: tl.constexpr, LISTS: tl.constexpr, D: tl.constexpr,
    DV: tl.constexpr, D_STRIPS: tl.constexpr, DV_STRIPS: tl.constexpr, Q_VEC: tl.constexpr, K_VEC: tl.constexpr,
    V_VEC: tl.constexpr, DOUT_VEC: tl.constexpr, OUT_VEC: tl.constexpr, DQ_VEC: tl.constexpr, HAS_DLSE: tl.constexpr,
    REDO: tl.constexpr, WIDE: tl.constexpr, EVEN_N: tl.constexpr, SHORT_M: tl.constexpr, SHORT_N: tl.constexpr,
    IS_CAUSAL: tl.constexpr, SCALED: tl.constexpr, PAIR: tl.constexpr, RARE: tl.constexpr, HAS_KEEP: tl.constexpr,
    HIDES_KEYS: tl.constexpr, PRECISION: tl.constexpr, COLUMNS: tl.constexpr, DP_COLUMNS: tl.constexpr,
    TAIL: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """dq of one query tile of one batch item and head, see ``dq_kernel``."""
    tiles = tl.cdiv(M, BLOCK_M)
    q_start = tile * BLOCK_M
    q_at = shifted(q_start, M, BLOCK_M, SHORT_M)
    q_base = q_ptr + head_offset(b, h, q_strides, sizes, Q_VEC)
    k_base = k_ptr + head_offset(b, h // group, k_strides, sizes, K_VEC)
    v_base = v_ptr + head_offset(b, h // group, v_strides, sizes, V_VEC)
    dout_base = dout_ptr + head_offset(b, h, dout_strides, sizes, DOUT_VEC)
    bases = term_bases(term_ptrs, term_strides, b, h, sizes, TERMS)
    q_local = local(BLOCK_M, WIDE)
    k_local = local(BLOCK_N, WIDE)
    q_rows = inside(q_local, M, SHORT_M)
    k_rows = inside(k_local, N, SHORT_N)
    q_own = owned(q_at, q_start, q_local, M, SHORT_M)
    head = wide(b) * heads + h
    at = head * M + q_at + q_rows
    unit = LOG2E if SCALED else scale * LOG2E
    q = load_strips(q_base, q_at, q_rows, q_strides, D, D_STRIPS, Q_VEC, WIDE)  # [M, D]
    dout = load_strips(dout_base, q_at, q_rows, dout_strides, DV, DV_STRIPS, DOUT_VEC, WIDE)  # [M, Dv]
    lse = tl.load(lse_ptr + at)
    reference = row_reference(lse, PAIR, RARE)
    low = reference
    if PAIR:
        low = tl.load(low_ptr + at) * LOG2E
    out_base = out_ptr + head_offset(b, h, out_strides, sizes, OUT_VEC)
    out = load_strips(out_base, q_at, q_rows, out_strides, DV, DV_STRIPS, OUT_VEC, WIDE)
    delta = row_products(out, dout)
    if HAS_DLSE:
        delta -= tl.load(dlse_ptr + at)
    delta = tl.where(lse == float("-inf"), 0.0, delta)  # nothing was seen: dlse may be NaN there
    flag = 0.0
    if RARE:
        flag = extreme_flag(lse)
    if not REDO:
        if RARE:
            tl.store(rare_ptr + head * tiles + q_start // BLOCK_M, flag)
        head = head * statistics_pitch(M, TAIL)
        store_row_statistics(reference_ptr + head, delta_ptr + head, reference, delta, q_at + q_rows, q_own, M, TAIL)

    acc_dq = zero_strips(BLOCK_M, D_STRIPS)
    full_end, end = key_span(q_at, M, N, shift, BLOCK_M, BLOCK_N, IS_CAUSAL)
    for phase in tl.static_range(3 if RARE else 2):  # as in the forward pass, then extreme rows if there are any
        lo = full_end if phase == 1 else 0
        hi = end if phase else full_end
        if phase == 2:
            hi = tl.where(flag > 0.0, end, 0)
            reference = extreme_reference(lse, flag)
            low = tl.load(low_ptr + at) * LOG2E
        if LISTS and phase != 2:
            k_tiles = tl.cdiv(N, BLOCK_N)
            listed = list_row(lists_ptr, plane_strides, b, h, tile, tiles, k_tiles, sizes)
            entries, hi = list_part(listed, k_tiles, phase == 0)
            lo = 0
            entry = tl.load(entries)  # a step ahead, as in the forward pass
        if RARE and phase != 2:
            hi = tl.where(flag > 1.0, lo, hi)
        met_bases = bases if phase else chosen(bases, UNLISTED)
        met_strides = term_strides if phase else chosen(term_strides, UNLISTED)
        for step in tl.range(lo, hi, 1 if LISTS and phase != 2 else BLOCK_N, num_stages=1 if phase == 2 else STAGES):
            k_start = step
            if LISTS and phase != 2:
                k_start = entry * BLOCK_N
                entry = tl.load(entries + step + 1)
            k_start = tl.multiple_of(k_start, BLOCK_N)
            k_at = k_start
            if phase:
                k_at = shifted_keys(k_start, N, BLOCK_N, SHORT_N, EVEN_N)
            k_in = owned(k_at, k_start, k_local, N, SHORT_N)
            if HIDES_KEYS:
                seen = seen_keys(k_in, bases, term_strides, k_at, k_local, TERMS, WIDE, SHORT_N)
                k = load_seen_strips(k_base, k_at, k_rows, k_strides, seen, D, D_STRIPS, K_VEC, WIDE)  # [N, D]
            else:
                k = load_strips(k_base, k_at, k_rows, k_strides, D, D_STRIPS, K_VEC, WIDE)  # [N, D]
            terms = load_terms(
                met_bases, met_strides, q_at, k_at, q_rows[:, None], k_local[None, :], k_in[None, :],
                TERMS if phase else FULL_TERMS, WIDE, SHORT_N,
            )  # fmt: skip
            v = load_strips(v_base, k_at, k_rows, v_strides, DV, DV_STRIPS, V_VEC, WIDE)  # [N, Dv]
            s = dot_heads(
                q, q_base, q_at, q_rows, q_strides, k, k_base, k_at, k_rows, k_strides,
                D, COLUMNS, Q_VEC, K_VEC, WIDE, PRECISION,
            )  # [M, N]  # fmt: skip
            y = score_tile(
                s, terms, (q_at + q_local)[:, None], (k_at + k_local)[None, :], k_in[None, :],
                scale, shift, TERMS if phase else FULL_TERMS, SCALED, IS_CAUSAL, phase != 0,
            )  # [M, N]  # fmt: skip
            dp = dot_heads(
                dout, dout_base, q_at, q_rows, dout_strides, v, v_base, k_at, k_rows, v_strides,
                DV, DP_COLUMNS, DOUT_VEC, V_VEC, WIDE, PRECISION,
            )  # [M, N]  # fmt: skip
            p = probability(y, reference[:, None], low[:, None], unit, PAIR or phase == 2)
            ds = score_grad_tile(p, dp, delta[:, None], HAS_KEEP)
            acc_dq = add_dots(acc_dq, ds.to(k[0].dtype), k, PRECISION)  # [M, D]

    dq_base = dq_ptr + head_offset(b, h, dq_strides, sizes, DQ_VEC)
    store_strips(dq_base, q_at, q_local, dq_strides, q_own, scale_strips(acc_dq, scale), D, D_STRIPS, DQ_VEC, WIDE)


@triton.jit(do_not_specialize=["M", "N", "heads", "group", "batch", "shift", "rare_tiles"])
def dq_kernel(
    q_ptr, k_ptr, v_ptr, dout_ptr, out_ptr, lse_ptr, low_ptr, dlse_ptr, reference_ptr, delta_ptr, rare_ptr, dq_ptr,
    term_ptrs,
    sizes, q_strides, k_strides, v_strides, dout_strides, out_strides, dq_strides, term_strides,
    M, N, heads, group, batch, shift, rare_tiles, scale, lists_ptr, plane_strides,
    TERMS: tl.constexpr, FULL_TERMS: tl.constexpr, UNLISTED: tl.constexpr, LISTS: tl.constexpr,
    D: tl.constexpr, DV: tl.constexpr, D_STRIPS: tl.constexpr, DV_STRIPS: tl.constexpr,
    Q_VEC: tl.constexpr, K_VEC: tl.constexpr, V_VEC: tl.constexpr, DOUT_VEC: tl.constexpr, OUT_VEC: tl.constexpr,
    DQ_VEC: tl.constexpr, HAS_DLSE: tl.constexpr, REDO: tl.constexpr, WIDE: tl.constexpr,
    EVEN_N: tl.constexpr, SHORT_M: tl.constexpr, SHORT_N: tl.constexpr, IS_CAUSAL: tl.constexpr, SCALED: tl.constexpr,
    PAIR: tl.constexpr, RARE: tl.constexpr, HAS_KEEP: tl.constexpr, HIDES_KEYS: tl.constexpr,
    RARE_BLOCK: tl.constexpr, PRECISION: tl.constexpr, COLUMNS: tl.constexpr, DP_COLUMNS: tl.constexpr,
    TAIL: tl.constexpr, ORDER: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """dq = scale ds k of a query tile, scores recomputed.

    Computes delta first and stores it for the kernels that follow, which saves a launch and a pass over out and dout.
    Grid: one program per query tile, batch item, head. LISTS: as in the forward pass. REDO: only tiles with flags, by
    a few programs (``redo_share``), after a pass that stored delta and flags; one for every RARE_BLOCK rows.
    """
    if EVEN_N:
        N = N // 8 * 8
    tiles = tl.cdiv(M, BLOCK_M)
    if REDO:
        planes = batch * heads
        first, stride, start, step = redo_share(planes, rare_tiles, tiles)
        if any_of_planes(rare_ptr, first, planes, stride, rare_tiles):
            for plane in range(first, planes, stride):
                flags = rare_ptr + plane * rare_tiles
                if any_flag(flags, rare_tiles):
                    for tile in range(start, tiles, step):
                        if tile_flag(flags, rare_tiles, tile * BLOCK_M, RARE_BLOCK, BLOCK_M):
                            dq_tile(
                                tile, plane // heads, plane % heads, q_ptr, k_ptr, v_ptr, dout_ptr, out_ptr, lse_ptr,
                                low_ptr, dlse_ptr, reference_ptr, delta_ptr, rare_ptr, dq_ptr, term_ptrs, sizes,
                                q_strides, k_strides, v_strides, dout_strides, out_strides, dq_strides, term_strides, M,
                                N, heads, group, shift, scale, lists_ptr, plane_strides, TERMS, FULL_TERMS, UNLISTED,
                                LISTS, D, DV, D_STRIPS, DV_STRIPS, Q_VEC, K_VEC, V_VEC, DOUT_VEC, OUT_VEC, DQ_VEC,
                                HAS_DLSE, REDO, WIDE, EVEN_N, SHORT_M, SHORT_N, IS_CAUSAL, SCALED, PAIR, RARE, HAS_KEEP,
                                HIDES_KEYS, PRECISION, COLUMNS, DP_COLUMNS, TAIL, BLOCK_M, BLOCK_N, STAGES,
                            )  # fmt: skip
    else:
        tile, b, h = place(tl.program_id(0), tiles, batch, heads, ORDER)
        if IS_CAUSAL:
            tile = tiles - 1 - tile
        dq_tile(
            tile, b, h, q_ptr, k_ptr, v_ptr, dout_ptr, out_ptr, lse_ptr, low_ptr, dlse_ptr, reference_ptr, delta_ptr,
            rare_ptr, dq_ptr, term_ptrs, sizes, q_strides, k_strides, v_strides, dout_strides, out_strides, dq_strides,
            term_strides, M, N, heads, group, shift, scale, lists_ptr, plane_strides, TERMS, FULL_TERMS, UNLISTED,
            LISTS, D, DV, D_STRIPS, DV_STRIPS, Q_VEC, K_VEC, V_VEC, DOUT_VEC, OUT_VEC, DQ_VEC, HAS_DLSE, REDO, WIDE,
            EVEN_N, SHORT_M, SHORT_N, IS_CAUSAL, SCALED, PAIR, RARE, HAS_KEEP, HIDES_KEYS, PRECISION, COLUMNS,
            DP_COLUMNS, TAIL, BLOCK_M, BLOCK_N, STAGES,
        )  # fmt: skip
