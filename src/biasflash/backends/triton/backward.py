"""Backward passes over queries and keys: delta, dk and dv (owner: a key tile), dq (owner: a query tile).

Scores are recomputed by the same pieces as in the forward pass. ``dkdv_kernel`` works on tiles of keys x queries so that
weights and score gradients enter the products from registers; the others on queries x keys.
"""

import triton
import triton.language as tl

from biasflash.tile.bias import load_terms, seen_keys, store_term_grad, term_bases
from biasflash.tile.memory import head_offset, load_rows, local, store_rows
from biasflash.tile.score import score_grad_tile, score_tile
from biasflash.tile.softmax import LOG2E, probability, row_reference
from biasflash.tile.span import key_span, place, query_span


@triton.jit(do_not_specialize=["M", "heads", "batch"])
def delta_kernel(
    out_ptr,
    dout_ptr,
    dlse_ptr,
    delta_ptr,
    sizes,
    out_strides,
    dout_strides,
    M,
    heads,
    batch,
    DV: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    OUT_VEC: tl.constexpr,
    DOUT_VEC: tl.constexpr,
    HAS_DLSE: tl.constexpr,
    WIDE: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """delta = <out, dout> - dlse, float32. Grid: one program per head, query tile and batch item, heads fastest."""
    pid = tl.program_id(0)
    tiles = tl.cdiv(M, BLOCK_M)
    h, tile, b = pid % heads, pid // heads % tiles, pid // heads // tiles
    q_local = local(BLOCK_M, WIDE)
    q_start = tile * BLOCK_M
    q_in = q_start + q_local < M
    out_base = out_ptr + head_offset(b, h, out_strides, sizes, OUT_VEC)
    dout_base = dout_ptr + head_offset(b, h, dout_strides, sizes, DOUT_VEC)
    out = load_rows(out_base, q_start, out_strides, q_in, DV, BLOCK_M, BLOCK_DV, OUT_VEC, WIDE, True)
    dout = load_rows(dout_base, q_start, dout_strides, q_in, DV, BLOCK_M, BLOCK_DV, DOUT_VEC, WIDE, True)
    delta = tl.sum(out.to(tl.float32) * dout.to(tl.float32), 1)
    at = ((tl.full([], 0, tl.int64) + b) * heads + h) * M + q_start + q_local
    if HAS_DLSE:
        delta -= tl.load(dlse_ptr + at, mask=q_in, other=0.0)
    tl.store(delta_ptr + at, delta, mask=q_in)


@triton.jit(do_not_specialize=["M", "N", "heads", "kv_heads", "group", "batch", "shift"])
def dkdv_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    dout_ptr,
    lse_ptr,
    low_ptr,
    delta_ptr,
    dk_ptr,
    dv_ptr,
    ds_ptr,
    column_ptr,
    term_ptrs,
    sizes,
    q_strides,
    k_strides,
    v_strides,
    dout_strides,
    dk_strides,
    dv_strides,
    ds_strides,
    term_strides,
    M,
    N,
    heads,
    kv_heads,
    group,
    batch,
    shift,
    scale,
    TERMS: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    Q_VEC: tl.constexpr,
    K_VEC: tl.constexpr,
    V_VEC: tl.constexpr,
    DOUT_VEC: tl.constexpr,
    DK_VEC: tl.constexpr,
    DV_VEC: tl.constexpr,
    DS_VEC: tl.constexpr,
    WANT_DK: tl.constexpr,
    WANT_DV: tl.constexpr,
    STORE_DS: tl.constexpr,
    SUM_COLUMNS: tl.constexpr,
    WIDE: tl.constexpr,
    EVEN_N: tl.constexpr,
    IS_CAUSAL: tl.constexpr,
    SCALED: tl.constexpr,
    PAIR: tl.constexpr,
    HAS_KEEP: tl.constexpr,
    IS_GROUPED: tl.constexpr,
    PRECISION: tl.constexpr,
    ORDER: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
):
    """dk and dv of a key tile, summed over the group of query heads that share it, in order.

    STORE_DS also writes every score gradient into ``ds_ptr``, which is the gradient of a bias of full shape;
    SUM_COLUMNS writes its sums over queries, float32 ``(*B Hq N)``. Grid: one program per key tile, batch item, key head.
    """
    if EVEN_N:
        N = N // 16 * 16
    tile, b, kv_head = place(tl.program_id(0), tl.cdiv(N, BLOCK_N), batch, kv_heads, ORDER)
    k_start = tile * BLOCK_N
    k_base = k_ptr + head_offset(b, kv_head, k_strides, sizes, K_VEC)
    v_base = v_ptr + head_offset(b, kv_head, v_strides, sizes, V_VEC)
    q_local = local(BLOCK_M, WIDE)
    k_local = local(BLOCK_N, WIDE)
    k_in = k_start + k_local < N
    unit = LOG2E
    if not SCALED:
        unit = scale * LOG2E
    k = load_rows(k_base, k_start, k_strides, k_in, D, BLOCK_N, BLOCK_D, K_VEC, WIDE, True)  # [N, D]
    v = load_rows(v_base, k_start, v_strides, k_in, DV, BLOCK_N, BLOCK_DV, V_VEC, WIDE, True)  # [N, Dv]
    acc_dk = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    acc_dv = tl.zeros([BLOCK_N, BLOCK_DV], tl.float32)
    start, full_start = query_span(k_start, M, shift, BLOCK_M, BLOCK_N, IS_CAUSAL)

    for member in range(0, group if IS_GROUPED else 1):
        h = kv_head * group + member
        row = (tl.full([], 0, tl.int64) + b) * heads + h
        q_base = q_ptr + head_offset(b, h, q_strides, sizes, Q_VEC)
        dout_base = dout_ptr + head_offset(b, h, dout_strides, sizes, DOUT_VEC)
        bases = term_bases(term_ptrs, term_strides, b, h, sizes, TERMS)
        acc_column = tl.zeros([BLOCK_N], tl.float32)
        if STORE_DS:
            ds_base = ds_ptr + head_offset(b, h, ds_strides, sizes, DS_VEC)
            for q_start in range(0, start, BLOCK_M):  # queries that see none of these keys
                store_term_grad(
                    ds_base,
                    ds_strides,
                    q_start,
                    k_start,
                    q_local[None, :],
                    k_local[:, None],
                    k_in[:, None] & (q_start + q_local < M)[None, :],
                    tl.zeros([BLOCK_N, BLOCK_M], tl.float32),
                    DS_VEC,
                )
        for phase in tl.static_range(2):  # query tiles on the diagonal, then those that see every key of the tile
            if phase or IS_CAUSAL:
                lo = full_start if phase else start
                hi = M if phase else tl.minimum(full_start, M)
                for q_start in tl.range(lo, hi, BLOCK_M, num_stages=STAGES):
                    q_start = tl.multiple_of(q_start, BLOCK_M)
                    q_in = q_start + q_local < M
                    q_clamped = tl.minimum(q_local, M - 1 - q_start)[None, :]
                    q = load_rows(q_base, q_start, q_strides, q_in, D, BLOCK_M, BLOCK_D, Q_VEC, WIDE, True)  # [M, D]
                    terms = load_terms(
                        bases, term_strides, q_start, k_start, q_clamped, k_local[:, None], k_in[:, None], TERMS, True
                    )
                    lse = tl.load(lse_ptr + row * M + q_start + q_local, mask=q_in, other=0.0)
                    reference = row_reference(lse, q_in, PAIR)
                    low = 0.0
                    if PAIR:
                        low = tl.load(low_ptr + row * M + q_start + q_local, mask=q_in, other=0.0)[None, :]
                    dout = load_rows(dout_base, q_start, dout_strides, q_in, DV, BLOCK_M, BLOCK_DV, DOUT_VEC, WIDE, True)
                    delta = tl.load(delta_ptr + row * M + q_start + q_local, mask=q_in, other=0.0)
                    y = score_tile(
                        tl.dot(k, tl.trans(q), input_precision=PRECISION),  # [N, M]
                        terms,
                        (q_start + q_local)[None, :],
                        (k_start + k_local)[:, None],
                        k_in[:, None],
                        scale,
                        shift,
                        TERMS,
                        SCALED,
                        IS_CAUSAL,
                        phase == 0,
                    )
                    p = probability(y, reference[None, :], low, unit, PAIR)
                    if WANT_DV:
                        acc_dv = tl.dot(p.to(dout.dtype), dout, acc_dv, input_precision=PRECISION)  # [N, Dv]
                    if WANT_DK or STORE_DS or SUM_COLUMNS:
                        dp = tl.dot(v, tl.trans(dout), input_precision=PRECISION)  # [N, M]
                        ds = score_grad_tile(p, dp, delta[None, :], HAS_KEEP)
                        if WANT_DK:
                            acc_dk = tl.dot(ds.to(q.dtype), q, acc_dk, input_precision=PRECISION)  # [N, D]
                        if SUM_COLUMNS:
                            acc_column += tl.sum(ds, 1)
                        if STORE_DS:
                            store_term_grad(
                                ds_base,
                                ds_strides,
                                q_start,
                                k_start,
                                q_local[None, :],
                                k_local[:, None],
                                k_in[:, None] & q_in[None, :],
                                ds,
                                DS_VEC,
                            )
        if SUM_COLUMNS:
            tl.store(column_ptr + row * N + k_start + k_local, acc_column, mask=k_in)

    if WANT_DK:
        dk_base = dk_ptr + head_offset(b, kv_head, dk_strides, sizes, DK_VEC)
        store_rows(dk_base, k_start, dk_strides, k_in, acc_dk * scale, D, BLOCK_N, BLOCK_D, DK_VEC, WIDE)
    if WANT_DV:
        dv_base = dv_ptr + head_offset(b, kv_head, dv_strides, sizes, DV_VEC)
        store_rows(dv_base, k_start, dv_strides, k_in, acc_dv, DV, BLOCK_N, BLOCK_DV, DV_VEC, WIDE)


@triton.jit(do_not_specialize=["M", "N", "heads", "group", "batch", "shift"])
def dq_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    dout_ptr,
    out_ptr,
    lse_ptr,
    low_ptr,
    dlse_ptr,
    delta_ptr,
    dq_ptr,
    row_sum_ptr,
    term_ptrs,
    sizes,
    q_strides,
    k_strides,
    v_strides,
    dout_strides,
    out_strides,
    dq_strides,
    term_strides,
    M,
    N,
    heads,
    group,
    batch,
    shift,
    scale,
    TERMS: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    Q_VEC: tl.constexpr,
    K_VEC: tl.constexpr,
    V_VEC: tl.constexpr,
    DOUT_VEC: tl.constexpr,
    OUT_VEC: tl.constexpr,
    DQ_VEC: tl.constexpr,
    WANT_DQ: tl.constexpr,
    MAKE_DELTA: tl.constexpr,
    HAS_DLSE: tl.constexpr,
    SUM_ROWS: tl.constexpr,
    WIDE: tl.constexpr,
    EVEN_N: tl.constexpr,
    IS_CAUSAL: tl.constexpr,
    SCALED: tl.constexpr,
    PAIR: tl.constexpr,
    HAS_KEEP: tl.constexpr,
    HIDES_KEYS: tl.constexpr,
    PRECISION: tl.constexpr,
    ORDER: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
):
    """dq = scale ds k of a query tile, scores recomputed.

    MAKE_DELTA computes delta first and stores it for the kernels that follow, which saves a launch and a pass;
    SUM_ROWS writes the sums of ds over keys, float32 ``(*B Hq M)``. Grid: one program per query tile, batch item, head.
    """
    if EVEN_N:
        N = N // 16 * 16
    tiles = tl.cdiv(M, BLOCK_M)
    tile, b, h = place(tl.program_id(0), tiles, batch, heads, ORDER)
    if IS_CAUSAL:
        tile = tiles - 1 - tile
    q_start = tile * BLOCK_M
    row = (tl.full([], 0, tl.int64) + b) * heads + h
    q_base = q_ptr + head_offset(b, h, q_strides, sizes, Q_VEC)
    k_base = k_ptr + head_offset(b, h // group, k_strides, sizes, K_VEC)
    v_base = v_ptr + head_offset(b, h // group, v_strides, sizes, V_VEC)
    dout_base = dout_ptr + head_offset(b, h, dout_strides, sizes, DOUT_VEC)
    bases = term_bases(term_ptrs, term_strides, b, h, sizes, TERMS)
    q_local = local(BLOCK_M, WIDE)
    k_local = local(BLOCK_N, WIDE)
    q_in = q_start + q_local < M
    q_clamped = tl.minimum(q_local, M - 1 - q_start)[:, None]
    at = row * M + q_start + q_local
    unit = LOG2E
    if not SCALED:
        unit = scale * LOG2E
    q = load_rows(q_base, q_start, q_strides, q_in, D, BLOCK_M, BLOCK_D, Q_VEC, WIDE, True)  # [M, D]
    dout = load_rows(dout_base, q_start, dout_strides, q_in, DV, BLOCK_M, BLOCK_DV, DOUT_VEC, WIDE, True)  # [M, Dv]
    reference = row_reference(tl.load(lse_ptr + at, mask=q_in, other=0.0), q_in, PAIR)
    low = 0.0
    if PAIR:
        low = tl.load(low_ptr + at, mask=q_in, other=0.0)[:, None]
    if MAKE_DELTA:
        out_base = out_ptr + head_offset(b, h, out_strides, sizes, OUT_VEC)
        out = load_rows(out_base, q_start, out_strides, q_in, DV, BLOCK_M, BLOCK_DV, OUT_VEC, WIDE, True)
        delta = tl.sum(out.to(tl.float32) * dout.to(tl.float32), 1)
        if HAS_DLSE:
            delta -= tl.load(dlse_ptr + at, mask=q_in, other=0.0)
        tl.store(delta_ptr + at, delta, mask=q_in)
    else:
        delta = tl.load(delta_ptr + at, mask=q_in, other=0.0)

    acc_dq = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    acc_row = tl.zeros([BLOCK_M], tl.float32)
    full_end, end = key_span(q_start, M, N, shift, BLOCK_M, BLOCK_N, IS_CAUSAL)
    for phase in tl.static_range(2):
        lo = full_end if phase else 0
        hi = end if phase else full_end
        for k_start in tl.range(lo, hi, BLOCK_N, num_stages=STAGES):
            k_start = tl.multiple_of(k_start, BLOCK_N)
            k_in = k_start + k_local < N
            seen = k_in
            if HIDES_KEYS:
                seen = seen_keys(k_in, bases, term_strides, k_start, k_local, TERMS, phase == 1)
            k = load_rows(
                k_base, k_start, k_strides, seen, D, BLOCK_N, BLOCK_D, K_VEC, WIDE, phase == 1 or HIDES_KEYS
            )  # [N, D]
            terms = load_terms(
                bases, term_strides, q_start, k_start, q_clamped, k_local[None, :], k_in[None, :], TERMS, phase == 1
            )
            v = load_rows(v_base, k_start, v_strides, k_in, DV, BLOCK_N, BLOCK_DV, V_VEC, WIDE, phase == 1)  # [N, Dv]
            y = score_tile(
                tl.dot(q, tl.trans(k), input_precision=PRECISION),  # [M, N]
                terms,
                (q_start + q_local)[:, None],
                (k_start + k_local)[None, :],
                k_in[None, :],
                scale,
                shift,
                TERMS,
                SCALED,
                IS_CAUSAL,
                phase == 1,
            )
            dp = tl.dot(dout, tl.trans(v), input_precision=PRECISION)  # [M, N]
            p = probability(y, reference[:, None], low, unit, PAIR)
            ds = score_grad_tile(p, dp, delta[:, None], HAS_KEEP)
            if SUM_ROWS:
                acc_row += tl.sum(ds, 1)
            if WANT_DQ:
                acc_dq = tl.dot(ds.to(k.dtype), k, acc_dq, input_precision=PRECISION)  # [M, D]

    if SUM_ROWS:
        tl.store(row_sum_ptr + at, acc_row, mask=q_in)
    if WANT_DQ:
        dq_base = dq_ptr + head_offset(b, h, dq_strides, sizes, DQ_VEC)
        store_rows(dq_base, q_start, dq_strides, q_in, acc_dq * scale, D, BLOCK_M, BLOCK_D, DQ_VEC, WIDE)


@triton.jit(do_not_specialize=["M", "N", "heads", "group", "batch", "shift"])
def dq_from_ds_kernel(
    ds_ptr,
    k_ptr,
    dq_ptr,
    sizes,
    ds_strides,
    k_strides,
    dq_strides,
    M,
    N,
    heads,
    group,
    batch,
    shift,
    scale,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    DS_VEC: tl.constexpr,
    K_VEC: tl.constexpr,
    DQ_VEC: tl.constexpr,
    WIDE: tl.constexpr,
    EVEN_N: tl.constexpr,
    IS_CAUSAL: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
):
    """dq = scale ds k where ds was stored. Grid: one program per query tile, head and batch item."""
    if EVEN_N:
        N = N // 16 * 16
    tiles = tl.cdiv(M, BLOCK_M)
    tile, b, h = place(tl.program_id(0), tiles, batch, heads, "tile,head,batch")
    if IS_CAUSAL:
        tile = tiles - 1 - tile
    q_start = tile * BLOCK_M
    ds_base = ds_ptr + head_offset(b, h, ds_strides, sizes, DS_VEC)
    k_base = k_ptr + head_offset(b, h // group, k_strides, sizes, K_VEC)
    q_local = local(BLOCK_M, WIDE)
    k_local = local(BLOCK_N, WIDE)
    q_in = q_start + q_local < M
    q_clamped = tl.minimum(q_local, M - 1 - q_start)[:, None]
    acc_dq = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    full_end, end = key_span(q_start, M, N, shift, BLOCK_M, BLOCK_N, IS_CAUSAL)
    for phase in tl.static_range(2):
        lo = tl.minimum(N // BLOCK_N * BLOCK_N, end) if phase else 0  # the diagonal was stored as zeros: no mask there
        hi = end if phase else tl.minimum(N // BLOCK_N * BLOCK_N, end)
        for k_start in tl.range(lo, hi, BLOCK_N, num_stages=STAGES):
            k_start = tl.multiple_of(k_start, BLOCK_N)
            k_in = k_start + k_local < N
            (ds,) = load_terms(
                (ds_base,),
                (ds_strides,),
                q_start,
                k_start,
                q_clamped,
                k_local[None, :],
                k_in[None, :],
                ((None, True, True, DS_VEC, False),),
                phase == 1,
            )
            k = load_rows(k_base, k_start, k_strides, k_in, D, BLOCK_N, BLOCK_D, K_VEC, WIDE, phase == 1)  # [N, D]
            acc_dq = tl.dot(ds.to(k.dtype), k, acc_dq, input_precision=PRECISION)  # [M, D]
    dq_base = dq_ptr + head_offset(b, h, dq_strides, sizes, DQ_VEC)
    store_rows(dq_base, q_start, dq_strides, q_in, acc_dq * scale, D, BLOCK_M, BLOCK_D, DQ_VEC, WIDE)
