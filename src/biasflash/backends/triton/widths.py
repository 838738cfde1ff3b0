"""Head widths as kernels hold them: one power of two, or two strips where that saves enough. Data with reasons."""

from __future__ import annotations

from dataclasses import dataclass

import triton


@dataclass(frozen=True, kw_only=True)
class StripRule:
    """Which kernels hold widths that are not powers of two in two strips, and how much of the padding it must spare.

    Each strip is a product, a load and an address of its own, so it has to earn them: 48 is 32 + 16 (a quarter of 64
    spared), 112 stays 128.
    """

    kernel: str
    itemsize: int
    why: str
    least_spared: float = 0.25


RULES: tuple[StripRule, ...] = (
    StripRule(kernel="forward", itemsize=2, why="two products a score"),
    StripRule(kernel="delta", itemsize=2, why="as the kernels that follow"),
    StripRule(kernel="dkdv", itemsize=2, why="four products a score"),
    StripRule(kernel="dq", itemsize=2, why="three products a score"),
    StripRule(kernel="dq_from_ds", itemsize=2, why="one product"),
    StripRule(kernel="dbias", itemsize=2, why="two products a score"),
)


def padded(width: int) -> int:
    """The power of two, at least 16 (the least side of a product), that holds a width."""
    return max(16, int(triton.next_power_of_2(width)))


def strips(kernel: str, width: int, itemsize: int) -> tuple[int, ...]:
    """The widths of the strips that ``kernel`` holds a width in: powers of two, each at least 16, two at most."""
    whole = padded(width)
    half = whole // 2
    if width <= half or half < 16:
        return (whole,)
    two = half, padded(width - half)
    for rule in RULES:
        if (rule.kernel, rule.itemsize) == (kernel, itemsize) and sum(two) <= (1 - rule.least_spared) * whole:
            return two
    return (whole,)
