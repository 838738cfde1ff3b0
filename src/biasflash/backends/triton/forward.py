"""Forward pass: one program owns a query tile of one head and walks over its keys with a running softmax."""

import triton
import triton.language as tl

from biasflash.backends.triton.tiles import chosen, list_part, list_row
from biasflash.tile.bias import load_terms, seen_keys, term_bases
from biasflash.tile.memory import (
    head_offset,
    inside,
    local,
    owned,
    shifted,
    shifted_keys,
    wide,
)
from biasflash.tile.pieces import store_piece
from biasflash.tile.redo import any_flag, any_of_planes, redo_share, tile_flag
from biasflash.tile.score import score_tile
from biasflash.tile.softmax import LOG2E, finish, running_step
from biasflash.tile.span import key_span, place
from biasflash.tile.strips import (
    add_dots,
    dot_heads,
    load_seen_strips,
    load_strips,
    scale_strips,
    store_strips,
    zero_strips,
)


@triton.jit
def piece_span(piece, piece_tiles, full_end, end, BLOCK_N: tl.constexpr):
    """``(first, full_end, end)`` of ``key_span``'s answer cut to one piece of the keys; it may hold none.

    Multiples of BLOCK_N are visible as such, or biases would not be fetched ahead.
    """
    first = piece * piece_tiles * BLOCK_N
    stop = first + piece_tiles * BLOCK_N
    return first, tl.maximum(tl.minimum(full_end, stop), first), tl.minimum(end, stop)


@triton.jit
def forward_tile(
    tile, b, h, piece,
    q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, low_ptr, term_ptrs,
    sizes, q_strides, k_strides, v_strides, out_strides, term_strides,
    M, N, heads, group, batch, shift, scale, piece_tiles, lists_ptr, plane_strides,
    TERMS: tl.constexpr, FULL_TERMS: tl.constexpr, UNLISTED: tl.constexpr, LISTS: tl.constexpr, D: tl.constexpr,
    DV: tl.constexpr, D_STRIPS: tl.constexpr, DV_STRIPS: tl.constexpr, Q_VEC: tl.constexpr, K_VEC: tl.constexpr,
    V_VEC: tl.constexpr, OUT_VEC: tl.constexpr, WIDE: tl.constexpr, EVEN_N: tl.constexpr, SHORT_M: tl.constexpr,
    SHORT_N: tl.constexpr, IS_CAUSAL: tl.constexpr, SCALED: tl.constexpr, PAIR: tl.constexpr, LOW_RANGE: tl.constexpr,
    KEEP_LOW: tl.constexpr, HIDES_KEYS: tl.constexpr, PRECISION: tl.constexpr, COLUMNS: tl.constexpr,
    SPLIT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """One query tile of one batch item and head, and one piece of its keys, see ``forward_kernel``."""
    tiles = tl.cdiv(M, BLOCK_M)
    q_start = tile * BLOCK_M
    q_at = shifted(q_start, M, BLOCK_M, SHORT_M)
    q_base = q_ptr + head_offset(b, h, q_strides, sizes, Q_VEC)
    k_base = k_ptr + head_offset(b, h // group, k_strides, sizes, K_VEC)
    v_base = v_ptr + head_offset(b, h // group, v_strides, sizes, V_VEC)
    bases = term_bases(term_ptrs, term_strides, b, h, sizes, TERMS)

    q_local = local(BLOCK_M, WIDE)
    k_local = local(BLOCK_N, WIDE)
    q_rows = inside(q_local, M, SHORT_M)
    k_rows = inside(k_local, N, SHORT_N)
    unit = LOG2E if SCALED else scale * LOG2E
    q = load_strips(q_base, q_at, q_rows, q_strides, D, D_STRIPS, Q_VEC, WIDE)  # [M, D]

    acc_out = zero_strips(BLOCK_M, DV_STRIPS)
    m = tl.full([BLOCK_M], float("-inf"), tl.float32)
    l = tl.zeros([BLOCK_M], tl.float32)
    first = 0
    full_end, end = key_span(q_at, M, N, shift, BLOCK_M, BLOCK_N, IS_CAUSAL)
    if SPLIT:
        first, full_end, end = piece_span(piece, piece_tiles, full_end, end, BLOCK_N)
    for phase in tl.static_range(2):  # tiles fully inside, then those that cross the diagonal or the end
        lo = full_end if phase else first
        hi = end if phase else full_end
        if LISTS:
            k_tiles = tl.cdiv(N, BLOCK_N)
            listed = list_row(lists_ptr, plane_strides, b, h, tile, tiles, k_tiles, sizes)
            entries, hi = list_part(listed, k_tiles, phase == 0)
            lo = 0
            entry = tl.load(entries)  # a step ahead, or keys would be fetched ahead by one step less
        met_bases = bases if phase else chosen(bases, UNLISTED)
        met_strides = term_strides if phase else chosen(term_strides, UNLISTED)
        for step in tl.range(lo, hi, 1 if LISTS else BLOCK_N, num_stages=STAGES):
            k_start = step
            if LISTS:
                k_start = entry * BLOCK_N
                entry = tl.load(entries + step + 1)
            k_start = tl.multiple_of(k_start, BLOCK_N)
            k_at = k_start
            if phase:
                k_at = shifted_keys(k_start, N, BLOCK_N, SHORT_N, EVEN_N)
            k_in = owned(k_at, k_start, k_local, N, SHORT_N)
            k = load_strips(k_base, k_at, k_rows, k_strides, D, D_STRIPS, K_VEC, WIDE)  # [N, D]
            terms = load_terms(
                met_bases,
                met_strides,
                q_at,
                k_at,
                q_rows[:, None],
                k_local[None, :],
                k_in[None, :],
                TERMS if phase else FULL_TERMS,
                WIDE,
                SHORT_N,
            )
            s = dot_heads(
                q, q_base, q_at, q_rows, q_strides, k, k_base, k_at, k_rows, k_strides,
                D, COLUMNS, Q_VEC, K_VEC, WIDE, PRECISION,
            )  # [M, N]  # fmt: skip
            y = score_tile(
                s,
                terms,
                (q_at + q_local)[:, None],
                (k_at + k_local)[None, :],
                k_in[None, :],
                scale,
                shift,
                TERMS if phase else FULL_TERMS,
                SCALED,
                IS_CAUSAL,
                phase == 1,
            )
            p, alpha, m, l = running_step(y, m, l, unit, 1, PAIR, LOW_RANGE)
            if HIDES_KEYS:
                seen = seen_keys(k_in, bases, term_strides, k_at, k_local, TERMS, WIDE, SHORT_N)
                v = load_seen_strips(v_base, k_at, k_rows, v_strides, seen, DV, DV_STRIPS, V_VEC, WIDE)  # [N, Dv]
            else:
                v = load_strips(v_base, k_at, k_rows, v_strides, DV, DV_STRIPS, V_VEC, WIDE)  # [N, Dv]
            acc_out = add_dots(scale_strips(acc_out, alpha[:, None]), p.to(v[0].dtype), v, PRECISION)  # [M, Dv]

    if SPLIT:
        at = ((piece * batch + b) * heads + h) * M + q_at + q_local  # far below 2^31: scratch is small
        store_piece(
            out_ptr, lse_ptr, low_ptr, at, owned(q_at, q_start, q_local, M, SHORT_M), acc_out, m, l, DV, DV_STRIPS
        )
    else:
        inverse, lse, low = finish(m, l, 1.0 if SCALED else scale)
        q_own = owned(q_at, q_start, q_local, M, SHORT_M)
        at = (wide(b) * heads + h) * M + q_at + q_local
        out_base = out_ptr + head_offset(b, h, out_strides, sizes, OUT_VEC)
        acc_out = scale_strips(acc_out, inverse[:, None])
        store_strips(out_base, q_at, q_local, out_strides, q_own, acc_out, DV, DV_STRIPS, OUT_VEC, WIDE)
        tl.store(lse_ptr + at, lse, mask=q_own)
        if KEEP_LOW:
            tl.store(low_ptr + at, low, mask=q_own)


@triton.jit(do_not_specialize=["M", "N", "heads", "group", "batch", "shift", "piece_tiles", "redo_pitch"])
def forward_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, low_ptr, term_ptrs,
    sizes, q_strides, k_strides, v_strides, out_strides, term_strides,
    M, N, heads, group, batch, shift, scale, piece_tiles, lists_ptr, plane_strides, redo_ptr, redo_pitch,
    TERMS: tl.constexpr, FULL_TERMS: tl.constexpr, UNLISTED: tl.constexpr, LISTS: tl.constexpr, D: tl.constexpr,
    DV: tl.constexpr, D_STRIPS: tl.constexpr, DV_STRIPS: tl.constexpr, Q_VEC: tl.constexpr, K_VEC: tl.constexpr,
    V_VEC: tl.constexpr, OUT_VEC: tl.constexpr, WIDE: tl.constexpr, EVEN_N: tl.constexpr, SHORT_M: tl.constexpr,
    SHORT_N: tl.constexpr, IS_CAUSAL: tl.constexpr, SCALED: tl.constexpr, PAIR: tl.constexpr, LOW_RANGE: tl.constexpr,
    KEEP_LOW: tl.constexpr, HIDES_KEYS: tl.constexpr, PRECISION: tl.constexpr, COLUMNS: tl.constexpr,
    ORDER: tl.constexpr, SPLIT: tl.constexpr, REDO: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """out = softmax(scale q k^T + biases, hidden pairs at -inf) v.

    Grid: one program per query tile, batch item and head. SPLIT: as many again for every piece of ``piece_tiles``
    key tiles, pieces slowest; ``out_ptr``, ``lse_ptr`` and ``low_ptr`` are then the scratch that
    ``merge_kernel`` adds up: sums, maxima and denominators, each ``[pieces, rows]``. LISTS: key tiles come from the
    lists of ``list_kernel``, those of the first loop without the masks that are in the lists (``UNLISTED`` marks the
    other terms, ``FULL_TERMS`` holds them). REDO: only tiles with a flag in ``redo_ptr``, one for every 64 rows and
    ``redo_pitch`` a head, by a few programs (``redo_share``).
    """
    if EVEN_N:
        N = N // 8 * 8  # equal, and tells the compiler that keys come in eights
    tiles = tl.cdiv(M, BLOCK_M)
    if REDO:
        planes = batch * heads
        first, stride, start, step = redo_share(planes, redo_pitch, tiles)
        if any_of_planes(redo_ptr, first, planes, stride, redo_pitch):
            for plane in range(first, planes, stride):
                flags = redo_ptr + plane * redo_pitch
                if any_flag(flags, redo_pitch):
                    for tile in range(start, tiles, step):
                        if tile_flag(flags, redo_pitch, tile * BLOCK_M, 64, BLOCK_M):
                            forward_tile(
                                tile, plane // heads, plane % heads, 0, q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, low_ptr,
                                term_ptrs, sizes, q_strides, k_strides, v_strides, out_strides, term_strides, M, N,
                                heads, group, batch, shift, scale, piece_tiles, lists_ptr, plane_strides, TERMS,
                                FULL_TERMS, UNLISTED, LISTS, D, DV, D_STRIPS, DV_STRIPS, Q_VEC, K_VEC, V_VEC, OUT_VEC,
                                WIDE, EVEN_N, SHORT_M, SHORT_N, IS_CAUSAL, SCALED, PAIR, LOW_RANGE, KEEP_LOW,
                                HIDES_KEYS, PRECISION, COLUMNS, SPLIT, BLOCK_M, BLOCK_N, STAGES,
                            )  # fmt: skip
    else:
        pid = tl.program_id(0)
        piece = 0
        if SPLIT:
            piece = pid // (tiles * batch * heads)
            pid = pid % (tiles * batch * heads)
        tile, b, h = place(pid, tiles, batch, heads, ORDER)
        if IS_CAUSAL:
            tile = tiles - 1 - tile  # the longest rows first
        forward_tile(
            tile, b, h, piece, q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, low_ptr, term_ptrs, sizes, q_strides, k_strides,
            v_strides, out_strides, term_strides, M, N, heads, group, batch, shift, scale, piece_tiles, lists_ptr,
            plane_strides, TERMS, FULL_TERMS, UNLISTED, LISTS, D, DV, D_STRIPS, DV_STRIPS, Q_VEC, K_VEC, V_VEC, OUT_VEC,
            WIDE, EVEN_N, SHORT_M, SHORT_N, IS_CAUSAL, SCALED, PAIR, LOW_RANGE, KEEP_LOW, HIDES_KEYS, PRECISION,
            COLUMNS, SPLIT, BLOCK_M, BLOCK_N, STAGES,
        )  # fmt: skip
