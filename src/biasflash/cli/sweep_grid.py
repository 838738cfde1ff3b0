"""The shapes of ``biasflash sweep`` and its two rules: no shape slower than its neighbours, no cliff along the lengths.

FLOPs are those of the true M, N and D (see ``Case.flops``): what a kernel pads, it pays for.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from biasflash.testing.case import Bias, Case

DIMS = (16, 24, 32, 40, 48, 64, 72, 80, 96, 128, 160, 192, 256)
LENGTHS = (33, 64, 65, 127, 128, 129, 256, 300, 512, 513, 1000, 1024, 1025, 2048, 2049, 4096, 4097, 8192, 8193)
#: scores of every shape of the grid, enough to fill a GPU, and the most elements that q may take for it
SCORES, ELEMENTS = 2**28, 2**29
#: the curve: 16 heads of every length, at two widths
CURVE_DIMS, CURVE_LENGTHS, CURVE_HEADS = (64, 128), tuple(1024 << i for i in range(6)), 16

#: a shape may take this many times as long per FLOP as its best neighbour
NEIGHBOUR_LIMIT = 1.6
#: and twice the length this many times as long as M x N grows
CLIFF_LIMIT = 1.15

GRID, CURVE = "grid", "curve"
OK, WRONG, ERROR, NO_TIME, NO_MEMORY = "ok", "wrong", "error", "no time", "no memory"


@dataclass(frozen=True, kw_only=True)
class Point:
    """A shape: ``batch`` x ``heads`` of M = N = ``length``, with or without a trained bias ``(1, heads, M, N)``."""

    part: str  # GRID or CURVE
    dim: int
    length: int
    bias: bool
    batch: int
    heads: int
    dtype: str = "bf16"

    def case(self) -> Case:
        name = f"{self.part}-d{self.dim}-{self.length}{'-bias' if self.bias else ''}"
        shape: dict[str, Any] = {"batch": (self.batch,), "M": self.length, "N": self.length, "D": self.dim}
        shape |= {"Hq": self.heads, "Hkv": self.heads, "Dv": self.dim, "dtype": self.dtype}
        biases = (Bias(shape="1HMN"),) if self.bias else ()
        return Case(name=name, why="a shape of the sweep", tags=frozenset({"sweep"}), biases=biases, **shape)

    def bytes_needed(self) -> int:
        """About what a forward and backward pass and its check hold at once."""
        width = 4 if self.dtype == "fp32" else 2
        rows = self.batch * self.heads * self.length
        plane = self.heads * self.length * self.length * width if self.bias else 0
        return 10 * rows * self.dim * width + 2 * plane + 2**31


def grid_point(dim: int, length: int, bias: bool, scores: int = SCORES, dtype: str = "bf16") -> Point:
    """A shape of the grid: 4 heads (2 from 4k on), and a batch that makes up the scores; at least 2, to share the bias.

    Short sequences of wide heads stop at ``ELEMENTS`` of q, which still is thousands of heads.
    """
    heads = 2 if length >= 4096 else 4
    wanted = -(-scores // (heads * length * length))
    most = ELEMENTS // (heads * length * dim)
    return Point(
        part=GRID, dim=dim, length=length, bias=bias, heads=heads, batch=max(2, min(wanted, most)), dtype=dtype
    )


def grid(dims: Sequence[int], lengths: Sequence[int], scores: int = SCORES, dtype: str = "bf16") -> list[Point]:
    """Every dim x length, without a bias and with one; in the order in which they are measured."""
    return [grid_point(d, n, bias, scores, dtype) for d in dims for bias in (False, True) for n in lengths]


def curve(dims: Sequence[int], lengths: Sequence[int], heads: int = CURVE_HEADS, dtype: str = "bf16") -> list[Point]:
    """One batch item of every length; its bias is a full one."""
    return [
        Point(part=CURVE, dim=d, length=n, bias=bias, batch=1, heads=heads, dtype=dtype)
        for d in dims
        for bias in (False, True)
        for n in lengths
    ]


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One point in one mode ("fwd" or "fwdbwd"). Figures are None unless ``status`` is "ok".

    ``floor_ms``: the least time at the machine's ceilings (bytes, products, exponentials). ``error``: the largest
    relative error of a result against float32.
    """

    point: Point
    mode: str
    status: str
    reason: str = ""
    ms: float | None = None
    floor_ms: float | None = None
    error: float | None = None

    @property
    def flops(self) -> float:
        return self.point.case().flops(self.mode == "fwdbwd")

    @property
    def tflops(self) -> float | None:
        return self.flops / self.ms / 1e9 if self.ms else None

    @property
    def cost(self) -> float | None:
        """Milliseconds per TFLOP."""
        return self.ms / self.flops * 1e12 if self.ms else None


@dataclass(frozen=True, kw_only=True)
class Slow:
    """A shape that is slower per FLOP than its best neighbour allows.

    ``floor_ratio`` is how much more per FLOP its floor asks for than the neighbour's: above 1 where the shape moves
    more bytes (or takes more exponentials) per FLOP, which no kernel can help.
    """

    sample: Sample
    neighbour: Sample
    ratio: float
    floor_ratio: float

    @property
    def is_explained(self) -> bool:
        """Whether the floors alone account for what is above the limit."""
        return self.ratio <= NEIGHBOUR_LIMIT * self.floor_ratio


def slow_shapes(samples: Sequence[Sample], limit: float = NEIGHBOUR_LIMIT) -> list[Slow]:
    """Shapes of the grid that cost more than ``limit`` times their best neighbour per FLOP, the worst first.

    Neighbours are the next dim up and down at the same length and the next length up and down at the same dim, among
    those that were timed, in the same mode, with or without a bias alike.
    """
    found = []
    timed = [s for s in samples if s.point.part == GRID and s.status == OK]
    for mode, bias in sorted({(s.mode, s.point.bias) for s in timed}):
        own = {(s.point.dim, s.point.length): s for s in timed if (s.mode, s.point.bias) == (mode, bias)}
        dims, lengths = sorted({d for d, _ in own}), sorted({n for _, n in own})
        for (dim, length), sample in own.items():
            i, j = dims.index(dim), lengths.index(length)
            near = [(dims[a], length) for a in (i - 1, i + 1) if 0 <= a < len(dims)]
            near += [(dim, lengths[b]) for b in (j - 1, j + 1) if 0 <= b < len(lengths)]
            best = min((own[at] for at in near if at in own), key=lambda s: s.cost or 0.0, default=None)
            if best is None or not sample.cost or not best.cost:
                continue
            ratio = sample.cost / best.cost
            if ratio > limit:
                floors = (sample.floor_ms or 0.0) / sample.flops, (best.floor_ms or 0.0) / best.flops
                share = max(1.0, floors[0] / floors[1]) if floors[1] else 1.0
                found.append(Slow(sample=sample, neighbour=best, ratio=ratio, floor_ratio=share))
    return sorted(found, key=lambda slow: -slow.ratio)


@dataclass(frozen=True, kw_only=True)
class Growth:
    """Time of a length over that of the length before it on the curve, and what M x N grew by."""

    before: Sample
    after: Sample
    times: float
    work: float

    @property
    def is_cliff(self) -> bool:
        return self.times > CLIFF_LIMIT * self.work


def growths(samples: Sequence[Sample]) -> list[Growth]:
    """Growth from each timed length of the curve to the next, per mode, dim, and with or without a bias."""
    lines: dict[tuple[Any, ...], list[Sample]] = {}
    for s in samples:
        if s.point.part == CURVE and s.status == OK:
            lines.setdefault((s.mode, s.point.dim, s.point.bias), []).append(s)
    found = []
    for line in lines.values():
        line.sort(key=lambda s: s.point.length)
        for before, after in itertools.pairwise(line):
            work = (after.point.length / before.point.length) ** 2
            times = (after.ms or 0.0) / (before.ms or math.inf)
            found.append(Growth(before=before, after=after, times=times, work=work))
    return found
