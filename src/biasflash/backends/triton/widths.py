"""Head widths as kernels hold them: one power of two, or two strips where that saves enough. Data with reasons."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class StripRule:
    """When a width is held in two strips. The same in every kernel, for forward and backward must see the same scores.

    Each strip is a product, a load and an address of its own, so it has to earn them.
    """

    itemsize: int
    above: int  # narrower widths stay whole
    why: str
    capabilities: tuple[int, ...] | None = None  # major * 10 + minor; None: all
    least_spared: float = 0.25  # of the padded width: 48 is 32 + 16 instead of 64, but 112 stays 128
    least_strip: int = 16


#: Registers and spills are those that ptxas reports for a shared bias. Where tensor cores take their operands from
#: registers (sm_80 to sm_89, sm_120), strips cost more of them than they spare: D 80 in bfloat16 spills 72 bytes in dq
#: on sm_80, whole none. float32 up to 128 columns stays whole on Hopper too: of a forward kernel of two strips for a
#: width of 96, which needed every register, ptxas 12.8 made code that reads uniform registers nothing was written to
#: (``testing.descriptors``): NaN on an H200.
RULES: tuple[StripRule, ...] = (
    StripRule(
        itemsize=2,
        above=32,
        capabilities=(90, 100, 103),
        why="H200, 4 x 16 heads of 2k, shared bias, both passes: D 48 1.28 ms, whole 1.34; D 72 2.30 ms, whole 2.41",
    ),
    StripRule(
        itemsize=4,
        above=128,
        least_spared=0.0,
        least_strip=64,
        why="246 columns, read element by element, forward on sm_80: 392 bytes of a thread spilled, in strips 56; 144 "
        "columns with a strip of 16: up to 8.5 KB",
    ),
)


def padded(size: int) -> int:
    """The power of two, at least 16 (the least side of a product), that holds a width or a length.

    Without Triton's function of that name: the command line reads rules where Triton is not installed.
    """
    return max(16, 1 << (size - 1).bit_length())


def strips(width: int, itemsize: int, capability: int) -> tuple[int, ...]:
    """The widths of the strips that a head width is held in: powers of two, each at least 16, two at most."""
    whole = padded(width)
    half = whole // 2
    for rule in RULES:
        if rule.itemsize != itemsize or (rule.capabilities and capability not in rule.capabilities):
            continue
        two = half, max(rule.least_strip, padded(max(width - half, 1)))
        if width > rule.above and sum(two) <= (1 - rule.least_spared) * whole:
            return two
    return (whole,)


@dataclass(frozen=True, kw_only=True)
class ColumnsRule:
    """When products over the head width read and multiply a few columns at a time, in a loop (``tile.strips``).

    For scores the same in every kernel, as strips are. A sum in another order rounds differently, and a weight, being
    an exponential, is then off by as many units as its score is large: with 32 columns at a time in forward and all in
    dkdv a row with one key had a weight that was not 1.
    """

    itemsize: int
    above: int  # narrower widths are multiplied whole, or strip by strip
    columns: int
    has_table: bool  # whether measured tiles are in force, which may spill
    why: str
    capability: int | None = None  # major * 10 + minor; None: all


#: An operand of 256 columns of 16 queries is 128 registers of a thread, split into three of bfloat16 (sm_90) 192.
AT_ONCE: tuple[ColumnsRule, ...] = (
    ColumnsRule(
        itemsize=4,
        above=128,
        columns=32,
        has_table=True,
        why="H200, 4 x 8 heads of 1k, D 256, shared bias: forward 1.07 ms, 16 at a time 1.48; dbias 1.36 ms, 1.61",
    ),
    ColumnsRule(
        itemsize=4,
        above=64,
        columns=16,
        has_table=False,
        capability=90,
        why="dq and dbias of 128 columns spill 8 to 48 bytes with every tile if scores take all columns",
    ),
    ColumnsRule(
        itemsize=4, above=128, columns=16, has_table=False, why="dkdv spills nothing, 32 at a time 48 bytes on sm_80"
    ),
)


def at_once(width: int, itemsize: int, capability: int, has_table: bool) -> int:
    """Columns that a product over a head width takes at a time; 0: all of them."""
    for rule in AT_ONCE:
        fits = rule.itemsize == itemsize and width > rule.above and rule.has_table == has_table
        if fits and rule.capability in (None, capability):
            return rule.columns
    return 0
