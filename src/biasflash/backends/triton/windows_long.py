# jit code is a language of its own: its names and types are Triton's
"""Windows of two tiles of keys: 128 and a tail of 16, 32 or 64 up to 192 tokens; backward also 64 and a tail.

Sides of tiles are powers of two, and 144 = 128 + 16 wastes nothing where 256 would waste 112. Both tiles of scores are
there before the softmax begins, so nothing is rescaled. Else as ``windows``.
"""

import triton
import triton.language as tl

from biasflash.backends.triton.windows import held_terms, load_keys, window_terms
from biasflash.tile.bias import term_bases
from biasflash.tile.memory import head_offset, inside, load_rows, local, owned, shifted, store_rows, wide_if
from biasflash.tile.score import score_tile
from biasflash.tile.softmax import LOG2E, finish, running_step


@triton.jit
def softmax_step(y, y_tail, unit, PAIR: tl.constexpr, LOW_RANGE: tl.constexpr):
    """``running_step`` over both tiles of one row of scores: ``(weights, weights of the tail, maximum, sum)``.

    Both start from the maximum of all, so the factors for what came before are 1.
    """
    m = tl.maximum(tl.max(y, 1), tl.max(y_tail, 1))
    p, _, m, l = running_step(y, m, tl.zeros_like(m), unit, 1, PAIR, LOW_RANGE)
    p_tail, _, m, l = running_step(y_tail, m, l, unit, 1, PAIR, LOW_RANGE)
    return p, p_tail, m, l


@triton.jit
def tiles_of_window(
    q_start, M, N, WIDE: tl.constexpr, SHORT_M: tl.constexpr, SHORT_N: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, TAIL: tl.constexpr,
):  # fmt: skip
    """Rows of a query tile, of the first keys and of the tail: ``(start, local, to load, own)``, as far as needed."""
    q_at = shifted(q_start, M, BLOCK_M, SHORT_M)
    q_local = local(BLOCK_M, WIDE)
    q_rows = inside(q_local, M, SHORT_M)
    q_own = owned(q_at, q_start, q_local, M, SHORT_M)
    k_local = local(BLOCK_N, WIDE)
    k_own = owned(0, 0, k_local, N, False)
    t_local = BLOCK_N + local(TAIL, WIDE)
    t_rows = inside(t_local, N, SHORT_N)
    t_own = owned(0, 0, t_local, N, SHORT_N)
    return (q_at, q_local, q_rows, q_own), (k_local, k_own), (t_local, t_rows, t_own)


@triton.jit(do_not_specialize=["M", "N", "heads", "batch", "step", "shift"])
def long_window_forward_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, low_ptr, term_ptrs, sizes, q_strides, k_strides, v_strides, out_strides,
    term_strides, M, N, heads, batch, step, shift, scale,
    TERMS: tl.constexpr, HELD: tl.constexpr, FOLD: tl.constexpr, COMPARE: tl.constexpr, SAME: tl.constexpr,
    SQUARE: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    Q_VEC: tl.constexpr, K_VEC: tl.constexpr, V_VEC: tl.constexpr, OUT_VEC: tl.constexpr, WIDE: tl.constexpr,
    WIDE_HEADS: tl.constexpr, EVEN_N: tl.constexpr, SHORT_M: tl.constexpr, SHORT_N: tl.constexpr,
    IS_CAUSAL: tl.constexpr, SCALED: tl.constexpr, PAIR: tl.constexpr, LOW_RANGE: tl.constexpr,
    KEEP_LOW: tl.constexpr, HIDES_KEYS: tl.constexpr, PRECISION: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, TAIL: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """``window_forward_kernel`` for more than BLOCK_N keys, up to BLOCK_N + TAIL; SHORT_N: the tail is not full.

    Grid: as there. (The last 16 queries of 144 in a tile of 16 of their own took 0.292 ms in place of 0.271.)
    """
    if EVEN_N:
        N = N // 8 * 8  # equal, and tells the compiler that keys come in eights
    if SQUARE:
        M = N
    all_strides = (q_strides, k_strides, v_strides, out_strides)
    k_strides, v_strides, out_strides = all_strides[SAME[1]], all_strides[SAME[2]], all_strides[SAME[3]]
    h = tl.program_id(0) % heads
    tiles = tl.cdiv(M, BLOCK_M)
    q_start = tl.program_id(0) // heads % tiles * BLOCK_M
    first = tl.program_id(0) // heads // tiles
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
        bases = term_bases(term_ptrs, term_strides, b, h, sizes, TERMS)
        q = load_rows(q_base, q_at, q_rows, q_strides, D, BLOCK_D, Q_VEC, WIDE)  # [M, D]
        k = load_rows(k_base, 0, k_local, k_strides, D, BLOCK_D, K_VEC, WIDE)  # [N, D]
        k_tail = load_rows(k_base, 0, t_rows, k_strides, D, BLOCK_D, K_VEC, WIDE)  # [TAIL, D]
        terms = window_terms(
            held, term_ptrs, term_strides, b, h, sizes, q_at, q_row, k_row, k_in, TERMS, HELD, WIDE, WIDE_HEADS, False
        )
        t_terms = window_terms(
            t_held, term_ptrs, term_strides, b, h, sizes, q_at, q_row, t_row, t_in, TERMS, HELD, WIDE, WIDE_HEADS,
            SHORT_N,
        )  # fmt: skip
        v = load_keys(
            v_base, k_local, v_strides, bases, term_strides, k_local, k_own, TERMS, DV, BLOCK_DV, V_VEC, WIDE, False,
            HIDES_KEYS,
        )  # fmt: skip # [N, Dv]
        v_tail = load_keys(
            v_base, t_rows, v_strides, bases, term_strides, t_local, t_own, TERMS, DV, BLOCK_DV, V_VEC, WIDE, SHORT_N,
            HIDES_KEYS,
        )  # fmt: skip # [TAIL, Dv]
        q_pos = (q_at + q_local)[:, None]
        s = tl.dot(q, tl.trans(k), input_precision=PRECISION)  # [M, N]
        s_tail = tl.dot(q, tl.trans(k_tail), input_precision=PRECISION)  # [M, TAIL]
        y = score_tile(s, terms, q_pos, k_row, k_in, scale, shift, TERMS, SCALED, IS_CAUSAL, IS_CAUSAL)
        y_tail = score_tile(s_tail, t_terms, q_pos, t_row, t_in, scale, shift, TERMS, SCALED, IS_CAUSAL, COMPARE)
        p, p_tail, m, l = softmax_step(y, y_tail, unit, PAIR, LOW_RANGE)
        acc_out = tl.dot(p.to(v.dtype), v, input_precision=PRECISION)  # [M, Dv]
        acc_out = tl.dot(p_tail.to(v.dtype), v_tail, acc_out, input_precision=PRECISION)
        inverse, lse, low = finish(m, l, 1.0 if SCALED else scale)
        out_base = out_ptr + head_offset(b, h, out_strides, sizes, OUT_VEC, WIDE_HEADS)
        store_rows(out_base, q_at, q_local, out_strides, q_own, acc_out * inverse[:, None], DV, BLOCK_DV, OUT_VEC, WIDE)
        at = wide_if(b * heads + h, WIDE_HEADS) * M + q_at + q_local
        tl.store(lse_ptr + at, lse, mask=q_own)
        if KEEP_LOW:
            tl.store(low_ptr + at, low, mask=q_own)
