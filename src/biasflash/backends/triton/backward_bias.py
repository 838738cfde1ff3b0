"""Gradient of a bias that several batch items or heads share: its owner loops over them and adds in order.

No atomics and no scratch of the scores' size: one program owns one tile of the bias gradient, keeps it in float32
registers, and walks over the batch items and heads that read this tile.
"""

import triton
import triton.language as tl

from biasflash.tile.bias import load_terms, store_term_grad, term_bases
from biasflash.tile.memory import head_offset, load_rows, local, plain, step_of, wide
from biasflash.tile.score import score_grad_tile, score_tile
from biasflash.tile.softmax import LOG2E, probability, row_reference


@triton.jit
def split_index(owned, shared, sizes, OWNS: tl.constexpr):
    """Linear index over all axes, given one over the owned axes and one over the shared ones; last axis fastest.

    ``OWNS`` says for each axis of ``sizes`` whether the bias varies along it.
    """
    index = wide(0)
    stride = wide(1)
    NA: tl.constexpr = len(sizes)
    for i in tl.static_range(NA):
        size = plain(sizes[NA - 1 - i])
        if OWNS[NA - 1 - i]:
            index += (owned % size) * stride
            owned = owned // size
        else:
            index += (shared % size) * stride
            shared = shared // size
        stride = stride * size
    return index


@triton.jit(do_not_specialize=["M", "N", "heads", "group", "shift", "owners", "shared", "chunk"])
def dbias_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    dout_ptr,
    lse_ptr,
    low_ptr,
    delta_ptr,
    dbias_ptr,
    term_ptrs,
    sizes,
    axes,
    q_strides,
    k_strides,
    v_strides,
    dout_strides,
    dbias_strides,
    chunk_stride,
    term_strides,
    M,
    N,
    heads,
    group,
    shift,
    owners,
    shared,
    chunk,
    scale,
    TERMS: tl.constexpr,
    OWNS: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    Q_VEC: tl.constexpr,
    K_VEC: tl.constexpr,
    V_VEC: tl.constexpr,
    DOUT_VEC: tl.constexpr,
    DBIAS_VEC: tl.constexpr,
    WIDE: tl.constexpr,
    EVEN_N: tl.constexpr,
    IS_CAUSAL: tl.constexpr,
    SCALED: tl.constexpr,
    PAIR: tl.constexpr,
    HAS_KEEP: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
):
    """dbias tile = sum of ds over the (batch item, head) pairs that share it.

    ``axes`` are ``(*batch, heads)`` sizes and OWNS marks those the bias varies along; ``shared`` is the product of the
    others. Where they are split, each program takes ``chunk`` of them and writes float32 partial sums, ``chunk_stride``
    apart. Grid: one program per tile of queries x keys (fastest), owned (batch item, head) pair, and chunk.
    """
    if EVEN_N:
        N = N // 16 * 16
    k_tiles = tl.cdiv(N, BLOCK_N)
    tiles = tl.cdiv(M, BLOCK_M) * k_tiles
    tile = tl.program_id(0) % tiles
    owned = tl.program_id(0) // tiles % owners
    part = tl.program_id(0) // tiles // owners
    q_start = tile // k_tiles * BLOCK_M
    k_start = tile % k_tiles * BLOCK_N
    q_local = local(BLOCK_M, WIDE)
    k_local = local(BLOCK_N, WIDE)
    q_in = q_start + q_local < M
    k_in = k_start + k_local < N
    q_clamped = tl.minimum(q_local, M - 1 - q_start)[:, None]
    unit = LOG2E
    if not SCALED:
        unit = scale * LOG2E

    acc_ds = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    first = part * chunk
    last = tl.minimum(first + chunk, shared)
    if IS_CAUSAL:
        last = tl.where(k_start <= tl.minimum(q_start + BLOCK_M, M) - 1 + shift, last, first)  # else nothing is seen
    for item in tl.range(first, last, num_stages=STAGES):
        index = split_index(wide(owned), wide(item), axes, OWNS)
        b, h = index // heads, index % heads
        bases = term_bases(term_ptrs, term_strides, b, h, sizes, TERMS)
        q_base = q_ptr + head_offset(b, h, q_strides, sizes, Q_VEC)
        k_base = k_ptr + head_offset(b, h // group, k_strides, sizes, K_VEC)
        v_base = v_ptr + head_offset(b, h // group, v_strides, sizes, V_VEC)
        dout_base = dout_ptr + head_offset(b, h, dout_strides, sizes, DOUT_VEC)
        q = load_rows(q_base, q_start, q_strides, q_in, D, BLOCK_M, BLOCK_D, Q_VEC, WIDE, True)  # [M, D]
        k = load_rows(k_base, k_start, k_strides, k_in, D, BLOCK_N, BLOCK_D, K_VEC, WIDE, True)  # [N, D]
        terms = load_terms(
            bases, term_strides, q_start, k_start, q_clamped, k_local[None, :], k_in[None, :], TERMS, True
        )
        at = index * M + q_start + q_local
        reference = row_reference(tl.load(lse_ptr + at, mask=q_in, other=0.0), q_in, PAIR)
        low = 0.0
        if PAIR:
            low = tl.load(low_ptr + at, mask=q_in, other=0.0)[:, None]
        dout = load_rows(dout_base, q_start, dout_strides, q_in, DV, BLOCK_M, BLOCK_DV, DOUT_VEC, WIDE, True)
        v = load_rows(v_base, k_start, v_strides, k_in, DV, BLOCK_N, BLOCK_DV, V_VEC, WIDE, True)  # [N, Dv]
        delta = tl.load(delta_ptr + at, mask=q_in, other=0.0)
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
            IS_CAUSAL,
        )
        dp = tl.dot(dout, tl.trans(v), input_precision=PRECISION)  # [M, N]
        p = probability(y, reference[:, None], low, unit, PAIR)
        acc_ds += score_grad_tile(p, dp, delta[:, None], HAS_KEEP)

    dbias_base = dbias_ptr + wide(part) * step_of(chunk_stride[0], DBIAS_VEC)
    owner = split_index(wide(owned), wide(0), axes, OWNS)
    dbias_base += head_offset(owner // heads, owner % heads, dbias_strides, sizes, DBIAS_VEC)
    store_term_grad(
        dbias_base,
        dbias_strides,
        q_start,
        k_start,
        q_local[:, None],
        k_local[None, :],
        q_in[:, None] & k_in[None, :],
        acc_ds,
        DBIAS_VEC,
    )


@triton.jit(do_not_specialize=["count", "chunks"])
def add_chunks_kernel(partial_ptr, total_ptr, count, chunks, BLOCK: tl.constexpr):
    """total = sum of ``chunks`` float32 arrays of ``count`` elements, in order; rounds to total's dtype."""
    at = wide(tl.program_id(0)) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    total = tl.zeros([BLOCK], tl.float32)
    for i in range(0, chunks):
        total += tl.load(partial_ptr + wide(i) * count + at, mask=inside, other=0.0)
    tl.store(total_ptr + at, total.to(total_ptr.dtype.element_ty), mask=inside)
