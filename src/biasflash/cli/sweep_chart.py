"""The sweep as a picture: heat maps of TFLOP/s over dims and lengths, and time against length.

``python -m biasflash.cli.sweep_chart PICTURE REPORT...`` draws it again from files of ``biasflash sweep --json``.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from biasflash.cli.charts import GRID as LINES
from biasflash.cli.charts import INK
from biasflash.cli.sweep_grid import CURVE, GRID, OK, Growth, Point, Sample, Slow, growths, slow_shapes
from biasflash.cli.tables import TITLES

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SLOW_COLOUR, EXPLAINED_COLOUR = "#d1495b", "#ffffff"
CURVE_COLOURS = ("#30638e", "#d1495b", "#00798c", "#edae49")


def _heat(axes: Axes, samples: Sequence[Sample], slow: Sequence[Slow], top: float) -> None:
    """TFLOP/s by colour, one number a cell; cells that are slower than the rule allows are framed."""
    from matplotlib.patches import Rectangle

    dims, lengths = (sorted({getattr(s.point, name) for s in samples}) for name in ("dim", "length"))
    values = [[math.nan] * len(lengths) for _ in dims]
    for s in samples:
        if s.tflops is not None:
            values[dims.index(s.point.dim)][lengths.index(s.point.length)] = s.tflops
    axes.imshow(values, aspect="auto", cmap="viridis", vmin=0, vmax=top)
    for i, row in enumerate(values):
        for j, value in enumerate(row):
            if not math.isnan(value):
                colour = INK if value > 0.6 * top else "white"
                axes.text(j, i, f"{value:.3g}", ha="center", va="center", fontsize=5.5, color=colour)
    for found in slow:
        at = dims.index(found.sample.point.dim), lengths.index(found.sample.point.length)
        colour = EXPLAINED_COLOUR if found.is_explained else SLOW_COLOUR
        corner = (at[1] - 0.46, at[0] - 0.46)
        axes.add_patch(Rectangle(corner, 0.92, 0.92, fill=False, edgecolor=colour, linewidth=1.4))
    axes.set_xticks(range(len(lengths)), [str(n) for n in lengths], rotation=60)
    axes.set_yticks(range(len(dims)), [str(d) for d in dims])
    axes.tick_params(length=0, labelsize=7, colors=INK)
    axes.set_ylabel("D", fontsize=8, color=INK)
    axes.set_xlabel("M = N", fontsize=8, color=INK)


def _curve(axes: Axes, samples: Sequence[Sample], grown: Sequence[Growth]) -> None:
    """Milliseconds against length, both logarithmic, beside a line that grows four-fold; cliffs are marked."""
    lines: dict[tuple[int, bool], list[Sample]] = {}
    for s in samples:
        lines.setdefault((s.point.dim, s.point.bias), []).append(s)
    for colour, ((dim, bias), line) in zip(CURVE_COLOURS, sorted(lines.items()), strict=False):
        line.sort(key=lambda s: s.point.length)
        known = [(s.point.length, s.ms) for s in line if s.ms]
        label = f"D {dim}, {'full bias' if bias else 'no bias'}"
        axes.plot([n for n, _ in known], [ms for _, ms in known], marker="o", color=colour, label=label, markersize=3)
    ends = sorted((s.point.length, s.ms) for s in samples if s.ms)
    if ends:
        (first, least), (last, _) = ends[0], ends[-1]
        axes.plot([first, last], [least, least * (last / first) ** 2], "--", color="#999999", label="M x N")
    for growth in grown:
        if growth.is_cliff and growth.after.ms:
            axes.plot(growth.after.point.length, growth.after.ms, marker="x", color=SLOW_COLOUR, markersize=9)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xlabel("M = N", fontsize=8, color=INK)
    axes.set_ylabel("ms", fontsize=8, color=INK)
    axes.tick_params(labelsize=7, colors=INK)
    axes.grid(color=LINES, linewidth=0.6)
    axes.legend(frameon=False, fontsize=7)


def describe(samples: Sequence[Sample], slow: Sequence[Slow], grown: Sequence[Growth]) -> str:
    """What the picture shows, in words: the PNG's text entry "Description"."""
    timed = sum(s.status == OK for s in samples)
    real = sum(not found.is_explained for found in slow)
    cliffs = sum(growth.is_cliff for growth in grown)
    return f"{timed} of {len(samples)} timed; {len(slow)} slow shapes, {real} not for their bytes; {cliffs} cliffs"


def draw(samples: Sequence[Sample], slow: Sequence[Slow], grown: Sequence[Growth], path: Path, title: str) -> None:
    """Writes a PNG: for each mode and with or without a bias a heat map; below, per mode, time against length.

    Raises:
        ValueError: nothing was timed.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    timed = [s for s in samples if s.status == OK]
    if not timed:
        raise ValueError("nothing was timed: there is nothing to draw")
    modes = [mode for mode in TITLES if any(s.mode == mode for s in timed)]
    figure = Figure(figsize=(15.0, 4.1 * 3), dpi=96, facecolor="white", layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(3, 2, squeeze=False)
    top = max((s.tflops or 0.0 for s in timed if s.point.part == GRID), default=1.0)
    for row, bias in enumerate((False, True)):
        for column, mode in enumerate(TITLES):
            axes = panels[row][column]
            shown = [s for s in timed if (s.point.part, s.mode, s.point.bias) == (GRID, mode, bias)]
            if not shown:
                axes.set_axis_off()
                continue
            own = [x for x in slow if (x.sample.mode, x.sample.point.bias) == (mode, bias)]
            _heat(axes, shown, own, top)
            words = "a trained bias shared by the batch" if bias else "no bias"
            axes.set_title(f"{TITLES[mode]}, {words}: TFLOP/s", fontsize=9, color=INK, loc="left")
    for column, mode in enumerate(TITLES):
        axes = panels[2][column]
        shown = [s for s in timed if (s.point.part, s.mode) == (CURVE, mode)]
        if mode not in modes or not shown:
            axes.set_axis_off()
            continue
        _curve(axes, shown, [g for g in grown if g.after.mode == mode])
        heads = shown[0].point.heads
        axes.set_title(f"{TITLES[mode]}, {heads} heads: time against length", fontsize=9, color=INK, loc="left")
    words = "red frame: more than 1.6 x the time per FLOP of the best neighbour; white: so does its floor"
    figure.suptitle(f"{title} ({words})", fontsize=10, color=INK, x=0.01, ha="left")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Description": describe(samples, slow, grown)})


def samples_of(report: dict[str, Any]) -> list[Sample]:
    """The samples in a report of ``biasflash sweep``."""

    def fields(kind: type) -> set[str]:
        return {field.name for field in dataclasses.fields(kind)}

    def read(entry: dict[str, Any]) -> Sample:
        point = Point(**{name: entry[name] for name in fields(Point)})
        own = {name: entry[name] for name in fields(Sample) - {"point", "error"}}
        return Sample(point=point, error=None if entry["error"] is None else float(entry["error"]), **own)

    return [read(entry) for entry in report["samples"]]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Draws the picture of one or more sweeps from their reports.")
    parser.add_argument("picture", type=Path, help="the PNG to write")
    parser.add_argument("reports", type=Path, nargs="+", help="files of biasflash sweep --json")
    asked = parser.parse_args(arguments)
    reports = [json.loads(path.read_text(encoding="utf-8")) for path in asked.reports]
    samples = [sample for report in reports for sample in samples_of(report)]
    facts = reports[0]["machine"]
    title = f"biasflash {facts['biasflash']} on {facts['device']}"
    draw(samples, slow_shapes(samples), growths(samples), asked.picture, title)


if __name__ == "__main__":
    main()
