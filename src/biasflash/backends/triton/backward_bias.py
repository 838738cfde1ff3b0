"""Gradient of a bias that several batch items or heads share: its owner loops over them and adds in order.

No atomics and no scratch of the scores' size: one program owns one tile of the bias gradient, keeps it in float32
registers, and walks over the batch items and heads that read this tile.
"""

import triton
import triton.language as tl

from biasflash.tile.bias import load_term, load_terms, store_term_grad, term_bases
from biasflash.tile.memory import (
    head_offset,
    inside,
    local,
    owned,
    plain,
    shifted,
    shifted_keys,
    step_of,
    wide,
    wide_if,
)
from biasflash.tile.redo import any_flag, redo_share
from biasflash.tile.score import score_grad_tile, score_tile
from biasflash.tile.softmax import LOG2E, extreme_reference, probability, statistics_pitch
from biasflash.tile.strips import dot_heads, load_strips


@triton.jit
def split_index(owner, item, sizes, heads, OWNS: tl.constexpr):
    """``(batch item, head)``, given an index over the owned axes and one over the shared axes; last axis fastest.

    ``OWNS`` says for each of ``(*batch, heads)`` whether the bias varies along it. 32 bits: heads are counted here, not
    elements. Nothing is divided that varies in the loop when one batch axis is shared and heads are owned.
    """
    NB: tl.constexpr = len(sizes)
    if OWNS[NB]:
        h = owner % heads
        owner = owner // heads
    else:
        h = item % heads
        item = item // heads
    b = 0
    stride = 1
    for i in tl.static_range(NB):
        size = plain(sizes[NB - 1 - i])
        if OWNS[NB - 1 - i]:
            if i + 1 < NB:
                b += owner % size * stride
                owner = owner // size
            else:
                b += owner * stride
        else:
            if i + 1 < NB:
                b += item % size * stride
                item = item // size
            else:
                b += item * stride
        stride = stride * size
    return b, h


@triton.jit
def chunk_flag(
    flags, tiles, q_at, owner, first, last, sizes, heads,
    OWNS: tl.constexpr, RARE_BLOCK: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """The largest flag of a query tile among the (batch item, head) pairs from ``first`` to ``last``."""
    found = 0.0
    for i in range(first, last, 64):
        item = i + tl.arange(0, 64)
        b, h = split_index(owner, tl.minimum(item, last - 1), sizes, heads, OWNS)
        row = flags + (b * heads + h) * tiles
        for t in range(q_at // RARE_BLOCK, (q_at + BLOCK_M - 1) // RARE_BLOCK + 1):
            found = tl.maximum(found, tl.max(tl.load(row + tl.minimum(t, tiles - 1)), 0))
    return found


@triton.jit
def any_of_chunk(flags, tiles, owner, first, last, sizes, heads, OWNS: tl.constexpr):
    """Whether any of the (batch item, head) pairs from ``first`` to ``last`` has a flag; ``tiles`` flags a pair."""
    found = tl.zeros([1024], tl.float32)
    count = (last - first) * tiles
    for i in range(0, count, 1024):
        at = tl.minimum(i + tl.arange(0, 1024), count - 1)
        b, h = split_index(owner, first + at // tiles, sizes, heads, OWNS)
        found = tl.maximum(found, tl.load(flags + (b * heads + h) * tiles + at % tiles))
    return tl.max(found, 0) > 0.0


@triton.jit
def dbias_tile(
    tile, owner, part,
    q_ptr, k_ptr, v_ptr, dout_ptr, reference_ptr, lse_ptr, low_ptr, delta_ptr, rare_ptr, dbias_ptr, partial_ptr,
    term_ptrs, sizes, q_strides, k_strides, v_strides, dout_strides, dbias_strides, partial_strides, chunk_stride,
    term_strides,
    M, N, heads, group, shift, shared, chunk, rare_tiles, scale,
    TERMS: tl.constexpr, OWNS: tl.constexpr, FIXED: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    D_STRIPS: tl.constexpr, DV_STRIPS: tl.constexpr, Q_VEC: tl.constexpr, K_VEC: tl.constexpr, V_VEC: tl.constexpr,
    DOUT_VEC: tl.constexpr, DBIAS_VEC: tl.constexpr, PARTIAL_VEC: tl.constexpr, WIDE: tl.constexpr,
    WIDE_HEADS: tl.constexpr, EVEN_N: tl.constexpr, SHORT_M: tl.constexpr, SHORT_N: tl.constexpr,
    IS_CAUSAL: tl.constexpr, SCALED: tl.constexpr, PAIR: tl.constexpr, RARE: tl.constexpr, RARE_BLOCK: tl.constexpr,
    HAS_KEEP: tl.constexpr, PRECISION: tl.constexpr, COLUMNS: tl.constexpr, DP_COLUMNS: tl.constexpr,
    TAIL: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """One tile of one owned pair and chunk, see ``dbias_kernel``."""
    k_tiles = tl.cdiv(N, BLOCK_N)
    q_start = tile // k_tiles * BLOCK_M
    k_start = tile % k_tiles * BLOCK_N
    q_at = shifted(q_start, M, BLOCK_M, SHORT_M)
    k_at = shifted_keys(k_start, N, BLOCK_N, SHORT_N, EVEN_N)
    q_local = local(BLOCK_M, WIDE)
    k_local = local(BLOCK_N, WIDE)
    q_rows = inside(q_local, M, SHORT_M)
    k_rows = inside(k_local, N, SHORT_N)
    q_own = owned(q_at, q_start, q_local, M, SHORT_M)
    k_own = owned(k_at, k_start, k_local, N, SHORT_N)
    unit = LOG2E if SCALED else scale * LOG2E

    acc_ds = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    first = part * chunk
    last = tl.minimum(first + chunk, shared)
    if IS_CAUSAL:
        last = tl.where(k_at <= tl.minimum(q_at + BLOCK_M, M) - 1 + shift, last, first)  # else nothing is seen
    b, h = split_index(owner, first, sizes, heads, OWNS)
    fixed = load_terms(
        term_bases(term_ptrs, term_strides, b, h, sizes, TERMS), term_strides, q_at, k_at, q_rows[:, None],
        k_local[None, :], k_own[None, :], TERMS, WIDE, SHORT_N,
    )  # fmt: skip
    flag = 0.0
    if RARE:
        flag = chunk_flag(rare_ptr, rare_tiles, q_at, owner, first, last, sizes, heads, OWNS, RARE_BLOCK, BLOCK_M)
    for phase in tl.static_range(2 if RARE else 1):  # all rows, then extreme ones if there are any
        hi = last
        if RARE:
            hi = tl.where(flag > 0.0, last, first) if phase else tl.where(flag > 1.0, first, last)
        for item in tl.range(first, hi, num_stages=1 if phase else STAGES):
            b, h = split_index(owner, item, sizes, heads, OWNS)
            q_base = q_ptr + head_offset(b, h, q_strides, sizes, Q_VEC, WIDE_HEADS)
            k_base = k_ptr + head_offset(b, h // group, k_strides, sizes, K_VEC, WIDE_HEADS)
            v_base = v_ptr + head_offset(b, h // group, v_strides, sizes, V_VEC, WIDE_HEADS)
            dout_base = dout_ptr + head_offset(b, h, dout_strides, sizes, DOUT_VEC, WIDE_HEADS)
            q = load_strips(q_base, q_at, q_rows, q_strides, D, D_STRIPS, Q_VEC, WIDE)  # [M, D]
            k = load_strips(k_base, k_at, k_rows, k_strides, D, D_STRIPS, K_VEC, WIDE)  # [N, D]
            terms = ()
            for i in tl.static_range(len(TERMS)):
                if FIXED[i]:
                    terms = terms + (fixed[i],)  # noqa: RUF005
                else:
                    tile_base = term_ptrs[i] + head_offset(b, h, term_strides[i], sizes, TERMS[i][3], WIDE_HEADS)
                    tile_i = load_term(
                        tile_base, term_strides[i], q_at, k_at, q_rows[:, None], k_local[None, :], k_own[None, :],
                        TERMS[i][1], TERMS[i][2], TERMS[i][3], WIDE, SHORT_N,
                    )  # fmt: skip
                    terms = terms + (tile_i,)  # noqa: RUF005
            index = b * heads + h
            at = wide_if(index, WIDE_HEADS) * statistics_pitch(M, TAIL) + q_at + q_rows
            reference = tl.load(reference_ptr + at)
            delta = tl.load(delta_ptr + at)
            low = delta
            if PAIR or phase == 1:
                low = tl.load(low_ptr + wide_if(index, WIDE_HEADS) * M + q_at + q_rows) * LOG2E
            if phase:
                lse = tl.load(lse_ptr + wide_if(index, WIDE_HEADS) * M + q_at + q_rows)
                reference = extreme_reference(lse, flag)
            dout = load_strips(dout_base, q_at, q_rows, dout_strides, DV, DV_STRIPS, DOUT_VEC, WIDE)  # [M, Dv]
            v = load_strips(v_base, k_at, k_rows, v_strides, DV, DV_STRIPS, V_VEC, WIDE)  # [N, Dv]
            s = dot_heads(
                q, q_base, q_at, q_rows, q_strides, k, k_base, k_at, k_rows, k_strides,
                D, COLUMNS, Q_VEC, K_VEC, WIDE, PRECISION,
            )  # [M, N]  # fmt: skip
            y = score_tile(
                s,
                terms,
                (q_at + q_local)[:, None],
                (k_at + k_local)[None, :],
                k_own[None, :],
                scale,
                shift,
                TERMS,
                SCALED,
                IS_CAUSAL,
                IS_CAUSAL,
            )
            dp = dot_heads(
                dout, dout_base, q_at, q_rows, dout_strides, v, v_base, k_at, k_rows, v_strides,
                DV, DP_COLUMNS, DOUT_VEC, V_VEC, WIDE, PRECISION,
            )  # [M, N]  # fmt: skip
            p = probability(y, reference[:, None], low[:, None], unit, PAIR or phase == 1)
            acc_ds += score_grad_tile(p, dp, delta[:, None], HAS_KEEP)

    b, h = split_index(owner, 0, sizes, heads, OWNS)
    own = q_own[:, None] & k_own[None, :]
    if chunk < shared:
        sums = partial_ptr + wide(part) * step_of(chunk_stride[0], PARTIAL_VEC)
        sums += head_offset(b, h, partial_strides, sizes, PARTIAL_VEC)
        store_term_grad(
            sums, partial_strides, q_at, k_at, q_local[:, None], k_local[None, :], own, acc_ds, PARTIAL_VEC, WIDE
        )
    else:
        grad = dbias_ptr + head_offset(b, h, dbias_strides, sizes, DBIAS_VEC)
        store_term_grad(
            grad, dbias_strides, q_at, k_at, q_local[:, None], k_local[None, :], own, acc_ds, DBIAS_VEC, WIDE
        )


@triton.jit(
    do_not_specialize=["M", "N", "heads", "group", "shift", "owners", "shared", "chunk", "rare_tiles", "redo_pitch"]
)
def dbias_kernel(
    q_ptr, k_ptr, v_ptr, dout_ptr, reference_ptr, lse_ptr, low_ptr, delta_ptr, rare_ptr, dbias_ptr, partial_ptr,
    term_ptrs, sizes, q_strides, k_strides, v_strides, dout_strides, dbias_strides, partial_strides, chunk_stride,
    term_strides,
    M, N, heads, group, shift, owners, shared, chunk, rare_tiles, scale, redo_ptr, redo_pitch,
    TERMS: tl.constexpr, OWNS: tl.constexpr, FIXED: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    D_STRIPS: tl.constexpr, DV_STRIPS: tl.constexpr, Q_VEC: tl.constexpr, K_VEC: tl.constexpr, V_VEC: tl.constexpr,
    DOUT_VEC: tl.constexpr, DBIAS_VEC: tl.constexpr, PARTIAL_VEC: tl.constexpr, WIDE: tl.constexpr,
    WIDE_HEADS: tl.constexpr, EVEN_N: tl.constexpr, SHORT_M: tl.constexpr, SHORT_N: tl.constexpr,
    IS_CAUSAL: tl.constexpr, SCALED: tl.constexpr, PAIR: tl.constexpr, RARE: tl.constexpr, RARE_BLOCK: tl.constexpr,
    HAS_KEEP: tl.constexpr, REDO: tl.constexpr, PRECISION: tl.constexpr, COLUMNS: tl.constexpr,
    DP_COLUMNS: tl.constexpr, TAIL: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """dbias tile = sum of ds over the (batch item, head) pairs that share it.

    OWNS marks the axes ``(*batch, heads)`` that the bias varies along; ``shared`` is the product of the sizes of the
    others. Terms that are the same for all of those (FIXED) are loaded once. Where the shared pairs are split, each
    program takes ``chunk`` of them and writes float32 sums to ``partial_ptr``, ``chunk_stride`` apart. Grid: one
    program per tile of queries x keys (fastest), owned (batch item, head) pair, and chunk. REDO: only tiles with
    extreme rows, or all if one of the ``redo_pitch`` flags in ``redo_ptr`` is raised, by a few programs
    (``redo_share``).
    """
    if EVEN_N:
        N = N // 8 * 8
    k_tiles = tl.cdiv(N, BLOCK_N)
    tiles = tl.cdiv(M, BLOCK_M) * k_tiles
    if REDO:
        planes = owners * tl.cdiv(shared, chunk)
        raised = any_flag(redo_ptr, redo_pitch)
        first, stride, start, step = redo_share(planes, chunk * rare_tiles, tiles)
        for plane in range(first, planes, stride):
            owner, part = plane % owners, plane // owners
            pair, end = part * chunk, tl.minimum(part * chunk + chunk, shared)
            redone = raised
            if RARE:
                redone = redone | any_of_chunk(rare_ptr, rare_tiles, owner, pair, end, sizes, heads, OWNS)
            if redone:
                for tile in range(start, tiles, step):
                    met = raised
                    if RARE:
                        q_at = shifted(tile // k_tiles * BLOCK_M, M, BLOCK_M, SHORT_M)
                        flag = chunk_flag(
                            rare_ptr, rare_tiles, q_at, owner, pair, end, sizes, heads, OWNS, RARE_BLOCK, BLOCK_M
                        )
                        met = met | (flag > 0.0)
                    if met:
                        dbias_tile(
                            tile, owner, part, q_ptr, k_ptr, v_ptr, dout_ptr, reference_ptr, lse_ptr, low_ptr,
                            delta_ptr, rare_ptr, dbias_ptr, partial_ptr, term_ptrs, sizes, q_strides, k_strides,
                            v_strides, dout_strides, dbias_strides, partial_strides, chunk_stride, term_strides, M, N,
                            heads, group, shift, shared, chunk, rare_tiles, scale, TERMS, OWNS, FIXED, D, DV, D_STRIPS,
                            DV_STRIPS, Q_VEC, K_VEC, V_VEC, DOUT_VEC, DBIAS_VEC, PARTIAL_VEC, WIDE, WIDE_HEADS, EVEN_N,
                            SHORT_M, SHORT_N, IS_CAUSAL, SCALED, PAIR, RARE, RARE_BLOCK, HAS_KEEP, PRECISION, COLUMNS,
                            DP_COLUMNS, TAIL, BLOCK_M, BLOCK_N, STAGES,
                        )  # fmt: skip
    else:
        tile = tl.program_id(0) % tiles
        owner = tl.program_id(0) // tiles % owners
        part = tl.program_id(0) // tiles // owners
        dbias_tile(
            tile, owner, part, q_ptr, k_ptr, v_ptr, dout_ptr, reference_ptr, lse_ptr, low_ptr, delta_ptr, rare_ptr,
            dbias_ptr, partial_ptr, term_ptrs, sizes, q_strides, k_strides, v_strides, dout_strides, dbias_strides,
            partial_strides, chunk_stride, term_strides, M, N, heads, group, shift, shared, chunk, rare_tiles, scale,
            TERMS, OWNS, FIXED, D, DV, D_STRIPS, DV_STRIPS, Q_VEC, K_VEC, V_VEC, DOUT_VEC, DBIAS_VEC, PARTIAL_VEC,
            WIDE, WIDE_HEADS, EVEN_N, SHORT_M, SHORT_N, IS_CAUSAL, SCALED, PAIR, RARE, RARE_BLOCK, HAS_KEEP, PRECISION,
            COLUMNS, DP_COLUMNS, TAIL, BLOCK_M, BLOCK_N, STAGES,
        )  # fmt: skip


@triton.jit(do_not_specialize=["count", "chunks"])
def add_chunks_kernel(partial_ptr, total_ptr, count, chunks, BLOCK: tl.constexpr):
    """total = sum of ``chunks`` float32 arrays of ``count`` elements, in order; rounds to total's dtype."""
    at = wide(tl.program_id(0)) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    total = tl.zeros([BLOCK], tl.float32)
    for i in range(0, chunks):
        total += tl.load(partial_ptr + wide(i) * count + at, mask=inside, other=0.0)
    tl.store(total_ptr + at, total.to(total_ptr.dtype.element_ty), mask=inside)
