"""Windows of two tiles of keys, up to 192: when their kernels take a call, and their launches. Deciding is pure.

Above 128 keys the first tile has 128; up to there and wider than 32 columns, backward, it has 64.

Rules, distances between a program's windows and what is held are those of ``window_plan``.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

import triton

from biasflash.backends.triton import window_plan, windows_long, windows_long_backward, windows_long_keys
from biasflash.backends.triton.operands import Launch, Operands, Slot
from biasflash.backends.triton.recipe import Recipe
from biasflash.backends.triton.window_plan import Gradient
from biasflash.backends.triton.window_rules import WindowRule

LEAST = 16  # the smallest side of a tile; 144 tokens backward: 0.870 ms, padded to 192 rows and keys 0.939
SHARE = 2  # windows of a program that has such a tile, for one of a program that has another: 3 takes 0.952 ms


def choose(ops: Operands, kernel: str) -> WindowRule | None:
    """The rule of ``kernel`` for this call; None where a tile of it holds all keys, and where there is no rule."""
    rule = window_plan.choose(ops, kernel) if window_plan.is_window(ops) else None
    if rule is None or rule.tile.block_n >= ops.problem.N:
        return None
    if not _has_own_planes(ops):
        return rule
    return replace(rule, tile=replace(rule.tile, stages=min(rule.tile.stages, 2)))


def _has_own_planes(ops: Operands) -> bool:
    """Whether every window has a bias plane of its own: 18 KiB a stage, of which three leave room for one program."""
    terms = zip(ops.problem.terms, ops.term_views, strict=True)
    planes = [view for term, view in terms if term.kind == "dense" and view.is_plane]
    return any(window_plan.period(view, ops.sizes) is None for view in planes)


def tail(ops: Operands, rule: WindowRule) -> int:
    """The side of the tile of keys behind the rule's."""
    return window_plan.side(ops.problem.N - rule.tile.block_n)


def deal(ops: Operands, rule: WindowRule, length: int, side: int, needed: int = 1) -> tuple[int, int, dict[str, int]]:
    """``(step, columns, constants)``: how windows and tiles of ``side`` along ``length`` are dealt to programs.

    Backward, 144 is two tiles of 64 and one of 16, whose programs take SHARE times as many windows.
    """
    whole, rest = divmod(length, side)
    if whole and 0 < rest <= LEAST:
        columns = ops.problem.Hq * (SHARE * whole + 1)
        step = window_plan.choose_step(ops, rule, columns, needed)
        if SHARE * step <= ops.problem.batch_size:
            return step, columns, {"LAST": LEAST, "SHARE": SHARE}
    columns = ops.problem.Hq * triton.cdiv(length, side)
    return window_plan.choose_step(ops, rule, columns, needed), columns, {"LAST": side, "SHARE": 1}


def forward_launch(ops: Operands) -> Launch | None:
    """The forward pass, or None where another kernel takes the call."""
    rule = choose(ops, "long forward")
    if rule is None:
        return None
    columns = ops.problem.Hq * triton.cdiv(ops.problem.M, rule.tile.block_m)
    step = window_plan.choose_step(ops, rule, columns)
    names = {name: name for name in ("q", "k", "v", "out")}
    kernel = windows_long.long_window_forward_kernel
    return window_plan.window_launch(ops, kernel, rule, step, columns, names, tail(ops, rule))


def pieces(length: int, side: int) -> tuple[tuple[int, bool, bool], ...]:
    """Queries in pieces of ``side`` and a smaller one for the rest, as ``long_window_dkdv_kernel`` wants them."""
    whole, rest = divmod(length, side)
    found = [(side, False, side < 64)] * whole
    if rest:
        last = window_plan.side(rest)
        found.append((last, last > rest, last < 64))
    return tuple(found)


def backward_recipe(ops: Operands, has_dlse: bool, wanted: Collection[str], grads: Sequence[int]) -> Recipe | None:
    """The backward pass, or None where other kernels take the call; arguments as in ``window_plan.backward_recipe``.

    Two kernels: by queries for dq and delta, then by keys.
    """
    p = ops.problem
    by_queries, by_keys = choose(ops, "long dq"), choose(ops, "long dkdv")
    if by_queries is None or by_keys is None or len(grads) > 1:
        return None
    gradient = window_plan.bias_gradient(ops, grads[0]) if grads else None
    if grads and gradient is None:
        return None
    launches, statistics = [_by_queries(ops, by_queries, has_dlse, wanted, gradient)], p.batch_size * p.Hq * p.M
    scratch = [("reference", statistics), ("delta", statistics)]
    sums = gradient is not None and not gradient.stored
    if p.N <= window_plan.WHOLE and not sums:  # 128 tokens, D 64, one of each window: 0.853 ms, general kernels 0.728
        return None
    if sums or "dk" in wanted or "dv" in wanted:
        launch, count = _by_keys(ops, by_keys, wanted, gradient if sums else None)
        launches.append(launch)
        if gradient is not None and sums:
            if 4 * count > window_plan.SCRATCH_BYTES:
                return None
            launches.append(window_plan.sum_up(ops, gradient, count))
            scratch.append((f"partial{gradient.index}", count))
    chunked = (gradient.index,) if gradient is not None and sums else ()
    return Recipe(launches=tuple(launches), scratch=tuple(scratch), chunked=chunked)


def _names(wanted: Collection[str], *results: str) -> dict[str, str]:
    """Slots by the kernel's names; results that are not wanted become pointers that are never used."""
    names = {name: name for name in ("q", "k", "v", "dout")}
    return names | {name: name if name in wanted else "dout" for name in results}


def _by_queries(
    ops: Operands, rule: WindowRule, has_dlse: bool, wanted: Collection[str], gradient: Gradient | None
) -> Launch:
    p = ops.problem
    stored = gradient is not None and gradient.stored
    names = _names(wanted, "dq")
    names["dbias"] = f"grad{gradient.index}" if gradient is not None and stored else "dout"
    step, columns, dealt = deal(ops, rule, p.M, rule.tile.block_m)
    own: dict[str, Any] = {
        **dealt,
        "WANT_DQ": "dq" in wanted,
        "STORE_DS": stored,
        "reference_ptr": Slot("reference"),
        "delta_ptr": Slot("delta"),
        "dlse_ptr": Slot("dlse" if has_dlse else "lse"),
        "HAS_DLSE": has_dlse,
        "PAIR": ops.constants["USE_LOW"],  # weights of rows as low as finfo.min need both halves of lse
    }
    kernel = windows_long_backward.long_window_dq_kernel
    return window_plan.window_launch(ops, kernel, rule, step, columns, names, tail(ops, rule), **own)


def _by_keys(ops: Operands, rule: WindowRule, wanted: Collection[str], gradient: Gradient | None) -> tuple[Launch, int]:
    """The launch, and how many partial sums it leaves for ``gradient``."""
    p = ops.problem
    needed = gradient.period if gradient is not None else 1
    step, columns, dealt = deal(ops, rule, p.N, rule.tile.block_n, needed)
    own: dict[str, Any] = {
        **dealt,
        "WANT_DK": "dk" in wanted,
        "WANT_DV": "dv" in wanted,
        "SUM_DS": gradient is not None,
        "OWNS_HEAD": gradient is None or gradient.owns_head,
        "period": needed,
        "reference_ptr": Slot("reference"),
        "delta_ptr": Slot("delta"),
        "dbias_ptr": Slot("delta" if gradient is None else f"partial{gradient.index}"),
        "PIECES": pieces(p.M, rule.tile.block_m),
        "PAIR": ops.constants["USE_LOW"],
    }
    kernel = windows_long_keys.long_window_dkdv_kernel
    launch = window_plan.window_launch(ops, kernel, rule, step, columns, _names(wanted, "dk", "dv"), **own)
    return launch, dealt["SHARE"] * step * p.Hq * p.M * p.N
