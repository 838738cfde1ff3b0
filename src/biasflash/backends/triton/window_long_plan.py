"""Windows of 129 to 192 keys: when their kernels take a call, and their launches. Deciding is pure.

Rules, distances between a program's windows and what is held are those of ``window_plan``.
"""

from __future__ import annotations

import triton

from biasflash.backends.triton import window_plan, windows_long
from biasflash.backends.triton.operands import Launch, Operands
from biasflash.backends.triton.window_rules import WindowRule


def choose(ops: Operands, kernel: str) -> WindowRule | None:
    """The rule of ``kernel`` for this call; None for keys that one tile holds, and where there is no rule."""
    if not window_plan.is_window(ops) or ops.problem.N <= window_plan.WHOLE:
        return None
    return window_plan.choose(ops, kernel)


def tail(length: int) -> int:
    """The side of the tile behind the first 128."""
    return window_plan.side(length) - window_plan.WHOLE


def forward_launch(ops: Operands) -> Launch | None:
    """The forward pass, or None where another kernel takes the call."""
    rule = choose(ops, "long forward")
    if rule is None:
        return None
    columns = ops.problem.Hq * triton.cdiv(ops.problem.M, rule.tile.block_m)
    step = window_plan.choose_step(ops, rule, columns)
    names = {name: name for name in ("q", "k", "v", "out")}
    kernel = windows_long.long_forward_kernel
    return window_plan.window_launch(ops, kernel, rule, step, columns, names, tail(ops.problem.N))
