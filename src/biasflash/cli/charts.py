"""The bench's rows as a chart: every provider against the best peer, and against the floor of the machine."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from biasflash.cli.providers import OURS
from biasflash.cli.rows import Row
from biasflash.cli.tables import TITLES, advantage, by_case, shown_providers, speed

if TYPE_CHECKING:
    from matplotlib.axes import Axes

#: This library stands out; the rivals share quieter tones, told apart by hue (safe for colour-blind readers).
OUR_COLOUR = "#d1495b"
PEER_COLOURS = ("#30638e", "#7fb2d9", "#00798c", "#8ac6a4", "#edae49", "#b8a1cf", "#8d6a4f", "#9a9a9a")
INK, GRID = "#2b2b2b", "#dddddd"
#: Inches: one bar, the air between two cases, and what titles and labels take.
BAR, GAP, MARGIN = 0.095, 0.2, 1.7


def _values(rows: Sequence[Row], names: Sequence[str], mode: str, against: str) -> dict[str, list[float | None]]:
    """Per provider one figure a case: the speed relative to the best peer, or the fraction of the floor."""
    values: dict[str, list[float | None]] = {name: [] for name in names}
    for found in by_case(rows).values():
        for name in names:
            row = found.get(name)
            if against == "peer":
                values[name].append(advantage(found, name, mode))
            else:
                values[name].append(row.cells[mode].fraction if row and speed(row, mode) is not None else None)
    return values


def _panel(axes: Axes, cases: Sequence[str], values: dict[str, list[float | None]], colours: dict[str, str]) -> None:
    """Horizontal bars, one group a case, the first case on top; a provider without a figure leaves its place empty."""
    height = BAR / (BAR * len(values) + GAP)
    for place, (name, figures) in enumerate(values.items()):
        at = [i + (place - (len(values) - 1) / 2) * height for i in range(len(cases))]
        known = [(y, x) for y, x in zip(at, figures, strict=True) if x is not None]
        bars = axes.barh([y for y, _ in known], [x for _, x in known], height * 0.92, color=colours[name])
        if name == OURS:
            axes.bar_label(bars, fmt="%.2f", padding=2, fontsize=7, color=INK)
    axes.set_ylim(len(cases) - 0.5, -0.5)
    axes.set_yticks(range(len(cases)), cases)
    axes.tick_params(length=0, labelsize=8, colors=INK)
    axes.grid(axis="x", color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    for i in range(1, len(cases)):
        axes.axhline(i - 0.5, color=GRID, linewidth=0.6)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)


def draw(rows: Sequence[Row], modes: Sequence[str], path: Path, title: str) -> None:
    """Writes a PNG: for each mode the speed against the best peer, and beside it the fraction of the floor.

    Raises:
        ValueError: no row has a speed.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.patches import Patch

    modes = [mode for mode in modes if any(speed(row, mode) is not None for row in rows)]
    if not modes:
        raise ValueError("no row has a speed: there is nothing to draw")
    timed = {row.provider for row in rows if any(speed(row, mode) is not None for mode in modes)}
    names = [name for name in shown_providers(rows)[0] if name in timed]
    quiet = iter(PEER_COLOURS * (1 + len(names) // len(PEER_COLOURS)))
    colours = {name: OUR_COLOUR if name == OURS else next(quiet) for name in names}
    cases = list(by_case(rows))
    size = (2.0 + 7.6 * len(modes), MARGIN + len(cases) * (BAR * len(names) + GAP))
    figure, grid = plt.subplots(1, 2 * len(modes), figsize=size, squeeze=False, sharey=True, layout="constrained")
    for mode, ratio, share in zip(modes, grid[0][::2], grid[0][1::2], strict=True):
        for axes, against, label in (
            (ratio, "peer", "speed against the best PyTorch peer"),
            (share, "floor", "fraction of the machine's floor"),
        ):
            _panel(axes, cases, _values(rows, names, mode, against), colours)
            axes.axvline(1.0, color=INK, linewidth=1.0)
            axes.set_xlim(0, max(1.12, 1.08 * axes.get_xlim()[1]))
            axes.set_title(f"{TITLES[mode]}\n{label}", fontsize=9, color=INK, loc="left")
        ratio.set_xlabel("1 = that peer; longer is faster", fontsize=8, color=INK)
        share.set_xlabel("1 = nothing can be faster", fontsize=8, color=INK)
    patches = [Patch(color=colours[name], label=name) for name in names]
    figure.legend(handles=patches, loc="outside lower center", ncols=len(names), frameon=False, fontsize=9)
    figure.suptitle(title, fontsize=12, color=INK, x=0.01, ha="left")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150, facecolor="white")
    plt.close(figure)
