"""Launches that compute again what another kernel left out, where flags say so.

Nearly always no flag is raised. A program that returns at once costs about 2 ns, so a launch of one program a tile
would take 0.03 to 0.07 ms to do nothing. A redoing launch is therefore a few programs a multiprocessor. Each looks
through the flags of many planes (heads of batch items) at once, and walks over tiles only where one is raised.
"""

import triton
import triton.language as tl

#: flags that a program looks through at once
AT_ONCE = tl.constexpr(1024)


@triton.jit
def redo_share(planes, span, tiles):
    """What this program may have to redo of ``planes`` planes with ``span`` flags and ``tiles`` tiles each.

    ``(first, stride, start, step)``: every ``stride``-th plane from ``first`` on, of each the tiles ``start``,
    ``start + step`` ... Raised flags lie side by side (a padded batch item has them in all heads, a plane in many
    rows), so neighbours go to different programs, and as many programs share the tiles of a plane as can look through
    the flags of more planes at once.
    """
    programs = tl.num_programs(0)
    step = tl.minimum(tl.maximum(programs // tl.maximum(tl.cdiv(planes * span, AT_ONCE), 1), 1), tiles)
    stride = programs // step
    first = tl.program_id(0) // step
    return tl.where(first < stride, first, planes), stride, tl.program_id(0) % step, step


@triton.jit
def any_of_planes(flags, first, planes, stride, span):
    """Whether one of the float32 flags of every ``stride``-th plane from ``first`` on is above 0."""
    found = tl.zeros([AT_ONCE], tl.float32)
    count = tl.cdiv(planes - first, stride) * span
    for i in range(0, count, AT_ONCE):
        at = i + tl.arange(0, AT_ONCE)
        plane = first + at // span * stride
        found = tl.maximum(found, tl.load(flags + plane * span + at % span, mask=at < count, other=0.0))
    return tl.max(found, 0) > 0.0


@triton.jit
def any_flag(flags, count):
    """Whether one of ``count`` float32 flags is above 0."""
    found = tl.zeros([AT_ONCE], tl.float32)
    for i in range(0, count, AT_ONCE):
        at = i + tl.arange(0, AT_ONCE)
        found = tl.maximum(found, tl.load(flags + at, mask=at < count, other=0.0))
    return tl.max(found, 0) > 0.0


@triton.jit
def tile_flag(flags, count, q_start, FLAG_ROWS: tl.constexpr, BLOCK_M: tl.constexpr):
    """Whether a flag of the query tile at ``q_start`` is above 0: ``count`` flags a head, for FLAG_ROWS rows each."""
    COUNT: tl.constexpr = (BLOCK_M + FLAG_ROWS - 1) // FLAG_ROWS
    at = q_start // FLAG_ROWS + tl.arange(0, COUNT)
    return tl.max(tl.load(flags + at, mask=at < count, other=0.0), 0) > 0.0
