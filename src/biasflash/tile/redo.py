"""Launches that compute again what another kernel left out, where flags say so.

Nearly always no flag is raised. A program that returns at once costs about 2 ns, so a launch of one program a tile
would take 0.03 to 0.07 ms to do nothing. A redoing launch is therefore a few programs a multiprocessor. Each looks
through the flags of many planes (heads of batch items) at once, and walks over tiles only where one is raised.
"""

import triton
import triton.language as tl


@triton.jit
def redo_share(planes):
    """``(first, last, start, step)``: planes of this program, of whose tiles it takes every ``step``-th from ``start``.

    As many planes for every program as there are more planes than programs; else several programs share a plane.
    """
    programs = tl.num_programs(0)
    step = tl.maximum(programs // planes, 1)
    each = tl.cdiv(planes, programs)
    first = tl.minimum(tl.program_id(0) // step * each, planes)
    return first, tl.minimum(first + each, planes), tl.program_id(0) % step, step


@triton.jit
def any_flag(flags, count):
    """Whether one of ``count`` float32 flags is above 0."""
    found = tl.zeros([1024], tl.float32)
    for i in range(0, count, 1024):
        at = i + tl.arange(0, 1024)
        found = tl.maximum(found, tl.load(flags + at, mask=at < count, other=0.0))
    return tl.max(found, 0) > 0.0


@triton.jit
def tile_flag(flags, count, q_start, FLAG_ROWS: tl.constexpr, BLOCK_M: tl.constexpr):
    """Whether a flag of the query tile at ``q_start`` is above 0: ``count`` flags a head, for FLAG_ROWS rows each."""
    COUNT: tl.constexpr = (BLOCK_M + FLAG_ROWS - 1) // FLAG_ROWS
    at = q_start // FLAG_ROWS + tl.arange(0, COUNT)
    return tl.max(tl.load(flags + at, mask=at < count, other=0.0), 0) > 0.0
