"""Forward pass: one program owns a query tile of one head and walks over its keys with a running softmax."""

import triton
import triton.language as tl

from biasflash.tile.bias import load_terms, seen_keys, term_bases
from biasflash.tile.memory import head_offset, load_rows, local, store_rows
from biasflash.tile.score import score_tile
from biasflash.tile.softmax import LOG2E, finish, running_step
from biasflash.tile.span import key_span, place


@triton.jit(do_not_specialize=["M", "N", "heads", "group", "batch", "shift"])
def forward_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    lse_ptr,
    low_ptr,
    term_ptrs,
    sizes,
    q_strides,
    k_strides,
    v_strides,
    out_strides,
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
    OUT_VEC: tl.constexpr,
    WIDE: tl.constexpr,
    EVEN_N: tl.constexpr,
    IS_CAUSAL: tl.constexpr,
    SCALED: tl.constexpr,
    PAIR: tl.constexpr,
    LOW_RANGE: tl.constexpr,
    HIDES_KEYS: tl.constexpr,
    PRECISION: tl.constexpr,
    ORDER: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
):
    """out = softmax(scale q k^T + biases, hidden pairs at -inf) v. Grid: one program per query tile, batch item and head."""
    if EVEN_N:
        N = N // 16 * 16  # equal, and tells the compiler that key masks come in sixteens
    tiles = tl.cdiv(M, BLOCK_M)
    tile, b, h = place(tl.program_id(0), tiles, batch, heads, ORDER)
    if IS_CAUSAL:
        tile = tiles - 1 - tile  # the longest rows first
    q_start = tile * BLOCK_M
    q_base = q_ptr + head_offset(b, h, q_strides, sizes, Q_VEC)
    k_base = k_ptr + head_offset(b, h // group, k_strides, sizes, K_VEC)
    v_base = v_ptr + head_offset(b, h // group, v_strides, sizes, V_VEC)
    bases = term_bases(term_ptrs, term_strides, b, h, sizes, TERMS)

    q_local = local(BLOCK_M, WIDE)
    k_local = local(BLOCK_N, WIDE)
    q_in = q_start + q_local < M
    q_clamped = tl.minimum(q_local, M - 1 - q_start)[:, None]  # rows past the end read the last row, and are not stored
    unit = LOG2E
    if not SCALED:
        unit = scale * LOG2E
    q = load_rows(q_base, q_start, q_strides, q_in, D, BLOCK_M, BLOCK_D, Q_VEC, WIDE, True)  # [M, D]

    acc_out = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    m = tl.full([BLOCK_M], float("-inf"), tl.float32)
    l = tl.zeros([BLOCK_M], tl.float32)
    full_end, end = key_span(q_start, M, N, shift, BLOCK_M, BLOCK_N, IS_CAUSAL)
    for phase in tl.static_range(2):  # tiles fully inside, then those that cross the diagonal or the end
        lo = full_end if phase else 0
        hi = end if phase else full_end
        for k_start in tl.range(lo, hi, BLOCK_N, num_stages=STAGES):
            k_start = tl.multiple_of(k_start, BLOCK_N)
            k_in = k_start + k_local < N
            k = load_rows(k_base, k_start, k_strides, k_in, D, BLOCK_N, BLOCK_D, K_VEC, WIDE, phase == 1)  # [N, D]
            terms = load_terms(
                bases, term_strides, q_start, k_start, q_clamped, k_local[None, :], k_in[None, :], TERMS, phase == 1
            )
            product = tl.dot(q, tl.trans(k), input_precision=PRECISION)  # [M, N]
            y = score_tile(
                product,
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
            p, alpha, m, l = running_step(y, m, l, unit, 1, PAIR, IS_CAUSAL or len(TERMS) > 0, LOW_RANGE)
            seen = k_in
            if HIDES_KEYS:
                seen = seen_keys(k_in, bases, term_strides, k_start, k_local, TERMS, phase == 1)
            v = load_rows(
                v_base, k_start, v_strides, seen, DV, BLOCK_N, BLOCK_DV, V_VEC, WIDE, phase == 1 or HIDES_KEYS
            )  # [N, Dv]
            acc_out = tl.dot(p.to(v.dtype), v, acc_out * alpha[:, None], input_precision=PRECISION)  # [M, Dv]

    inverse, lse, low = finish(m, l, 1.0 if SCALED else scale)
    row = (tl.full([], 0, tl.int64) + b) * heads + h
    out_base = out_ptr + head_offset(b, h, out_strides, sizes, OUT_VEC)
    store_rows(out_base, q_start, out_strides, q_in, acc_out * inverse[:, None], DV, BLOCK_M, BLOCK_DV, OUT_VEC, WIDE)
    tl.store(lse_ptr + row * M + q_start + q_local, lse, mask=q_in)
    if PAIR:
        tl.store(low_ptr + row * M + q_start + q_local, low, mask=q_in)
