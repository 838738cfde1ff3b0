"""Running softmax in base 2: step, finish, and the weight recovered from the log-sum-exp.

``unit`` turns a score into base-2 units (``log2(e)``, times the scale where scores do not carry it). With PAIR
differences are taken before the unit is applied, and backward subtracts the log-sum-exp as two floats, ``lse + low``:
weights are then right for scores of 1e7 and for ``finfo.min``. Without it one FMA does both. Forward uses it for
float32 and float16 inputs (whose weights resolve what that FMA rounds away at scores of 1e5), backward for float32
inputs. Where a bias may be lower than float16 reaches, backward leaves rows with an extreme log-sum-exp out
(``is_extreme``) and meets them, if there are any, in a second pass with PAIR: the subtraction and the second half of
lse cost every row 8 to 12 % of a kernel's instructions.
"""

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
# Below this a score times log2(e) may overflow float32. Scores that low differ by 0 or by more than 1e30, so any
# smaller unit tells equal from lower.
LOWEST = tl.constexpr(-1.0e38)
COARSE = tl.constexpr(2.0**-30)
# One FMA rounds lse log2(e) to 24 bits: below this a weight is off by 1e-4 at most, a twentieth of bfloat16's rounding.
EXTREME = tl.constexpr(2048.0)
# Above this a score times log2(e) may overflow; its head then takes the second pass with all its rows.
HIGHEST = tl.constexpr(1.0e38)


@triton.jit
def running_step(y, m, l, unit, AXIS: tl.constexpr, PAIR: tl.constexpr, LOW_RANGE: tl.constexpr):
    """One tile of scores -> (weights, factor for what was accumulated, new maximum, new sum); keys lie along AXIS.

    LOW_RANGE: scores may be as low as ``finfo(float32).min``.
    """
    m_new = tl.maximum(m, tl.max(y, AXIS))
    m_ref = tl.where(m_new == float("-inf"), 0.0, m_new)  # nothing seen so far
    if PAIR:
        p = tl.exp2((y - tl.expand_dims(m_ref, AXIS)) * unit)
    elif LOW_RANGE:
        row_unit = tl.where(m_ref < LOWEST, COARSE, unit)
        p = tl.exp2(y * tl.expand_dims(row_unit, AXIS) - tl.expand_dims(m_ref * row_unit, AXIS))
    else:
        p = tl.exp2(y * unit - tl.expand_dims(m_ref * unit, AXIS))
    alpha = tl.exp2((m - m_ref) * unit)
    return p, alpha, m_new, l * alpha + tl.sum(p, AXIS)


@triton.jit
def finish(m, l, natural):
    """Running state -> (1 / sum, lse, low): natural log; ``natural`` turns a score into natural units.

    A row that saw nothing (l = 0) gets factor 1, lse = -inf and low = 0.
    """
    empty = l == 0.0
    log_sum = tl.log2(tl.where(empty, 1.0, l)) * LN2
    top = tl.where(empty, 0.0, m * natural)
    lse = top + log_sum
    low = (top - lse) + log_sum
    return 1.0 / tl.where(empty, 1.0, l), tl.where(empty, float("-inf"), lse), low


@triton.jit
def is_extreme(lse):
    """Rows whose weights need PAIR; not those that saw nothing."""
    return (tl.abs(lse) > EXTREME) & (lse != float("-inf"))


@triton.jit
def row_reference(lse, PAIR: tl.constexpr, RARE: tl.constexpr = False):
    """What backward subtracts from scores: lse, in base 2 without PAIR; +inf (weights of zero) if nothing was seen.

    RARE: +inf for extreme rows too.
    """
    reference = lse
    if not PAIR:
        reference = lse * LOG2E
    absent = lse == float("-inf")
    if RARE:
        absent = absent | is_extreme(lse)
    return tl.where(absent, float("inf"), reference)


@triton.jit
def extreme_flag(lse):
    """For a tile of rows: 0 if none is extreme, 2 if the scores of one may overflow in base 2, else 1 (float32)."""
    flag = is_extreme(lse).to(tl.float32) + ((lse > HIGHEST) & is_extreme(lse)).to(tl.float32)
    return tl.max(flag, 0)


@triton.jit
def is_met_again(lse, flag):
    """Rows of the second pass, given their tile's or head's flag."""
    return tl.where(flag > 1.0, True, is_extreme(lse))


@triton.jit
def extreme_reference(lse, flag):
    """``row_reference`` of the second pass: lse of its rows, +inf for others and for those that saw nothing."""
    met = is_met_again(lse, flag) & (lse != float("-inf"))
    return tl.where(met, lse, float("inf"))


@triton.jit
def head_flag(flags, tiles, RARE: tl.constexpr):
    """The largest of one head's ``tiles`` flags (see ``extreme_flag``); 0 without RARE."""
    found = 0.0
    if not RARE:
        return found
    for i in range(0, tiles, 64):
        at = i + tl.arange(0, 64)
        found = tl.maximum(found, tl.max(tl.load(flags + at, mask=at < tiles, other=0.0), 0))
    return found


@triton.jit
def statistics_pitch(M, TAIL: tl.constexpr):
    """Entries of one head's row statistics: whole tiles of TAIL rows, and one tile more. A multiple of TAIL."""
    return tl.cdiv(M, TAIL) * TAIL + TAIL


@triton.jit
def store_row_statistics(reference_ptr, delta_ptr, reference, delta, q_pos, q_own, M, TAIL: tl.constexpr):
    """Write ``reference`` and ``delta`` of rows ``q_pos`` for kernels that stream over queries in tiles of TAIL rows.

    The last TAIL rows are written a second time behind all others, with a reference of +inf for rows that belong to the
    tile before: a streaming kernel reads its last tile there (``load_row_statistics``), and rows that it has met
    already weigh nothing. No loop then compares positions, and every tile of statistics is aligned.
    """
    tl.store(reference_ptr + q_pos, reference, mask=q_own)
    tl.store(delta_ptr + q_pos, delta, mask=q_own)
    in_tail = q_own & (q_pos >= M - TAIL)
    behind = tl.cdiv(M, TAIL) * TAIL + TAIL - M
    again = tl.where(q_pos < M // TAIL * TAIL, float("inf"), reference)
    tl.store(reference_ptr + q_pos + behind, again, mask=in_tail)
    tl.store(delta_ptr + q_pos + behind, delta, mask=in_tail)


@triton.jit
def load_row_statistics(
    reference_ptr, delta_ptr, q_start, q_rows, q_own, M, BLOCK_M: tl.constexpr, SHORT_M: tl.constexpr
):
    """``(reference, delta)`` of the query tile at ``q_start``; BLOCK_M is the TAIL they were written with."""
    if SHORT_M:
        reference = tl.where(q_own, tl.load(reference_ptr + q_rows), float("inf"))
        return reference, tl.load(delta_ptr + q_rows)
    else:
        at = tl.where(q_start + BLOCK_M > M, tl.cdiv(M, BLOCK_M) * BLOCK_M, q_start)
        at = tl.multiple_of(at, BLOCK_M)
        return tl.load(reference_ptr + at + q_rows), tl.load(delta_ptr + at + q_rows)


@triton.jit
def probability(y, reference, low, unit, PAIR: tl.constexpr):
    """The weight of a score, ``exp(y - lse)``; ``reference`` and ``low`` (in base 2) are shaped to broadcast."""
    if PAIR:
        return tl.exp2((y - reference) * unit - low)
    else:
        return tl.exp2(y * unit - reference)
