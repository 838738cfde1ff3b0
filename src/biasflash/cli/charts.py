"""The bench's rows as charts, against the best peer and against the floor: every provider, or this library alone."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from biasflash.cli.providers import OURS
from biasflash.cli.rows import Row
from biasflash.cli.tables import TITLES, advantage, best_peer, by_case, shown_providers, speed

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

#: This library stands out; the rivals share quieter tones, told apart by hue (safe for colour-blind readers).
OUR_COLOUR = "#d1495b"
PEER_COLOURS = ("#30638e", "#7fb2d9", "#00798c", "#8ac6a4", "#edae49", "#b8a1cf", "#8d6a4f", "#9a9a9a")
#: The two passes of this library where it stands alone.
PASS_COLOURS = {"fwd": OUR_COLOUR, "fwdbwd": "#30638e"}
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


def draw_ours(rows: Sequence[Row], against: str, path: Path, title: str) -> None:
    """Writes a PNG small enough for a page: one bar per case and pass, this library's alone.

    The PNG's text entry "Description" holds the figures, so that a reader or a test can ask the picture for them.

    Args:
        rows: a run, or a summary of one.
        against: ``"peer"``, the speed against the best peer, whose name stands beside the bar; or ``"floor"``, the
            fraction of the machine's floor.
        path: where to.
        title: first words of the headline.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    cases = by_case(rows)
    figure = Figure(figsize=(8.0, 1.1 + 0.33 * len(cases)), dpi=150, facecolor="white", layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for place, (mode, colour) in enumerate(PASS_COLOURS.items()):
        known = [(i, x) for i, x in enumerate(_values(rows, [OURS], mode, against)[OURS]) if x is not None]
        at = [i + (place - 0.5) * 0.4 for i, _ in known]
        bars = axes.barh(at, [x for _, x in known], 0.36, color=colour, label=TITLES[mode])
        words = _bar_labels(cases, [i for i, _ in known], mode, against)
        clear = {"facecolor": "white", "edgecolor": "none", "pad": 0.8}  # the line at 1 stops at a label
        axes.bar_label(bars, words, padding=4, fontsize=7.5, color=INK, bbox=clear)
    axes.set_ylim(len(cases) - 0.5, -0.5)
    axes.set_yticks(range(len(cases)), list(cases))
    axes.tick_params(length=0, labelsize=9, colors=INK)
    axes.axvline(1.0, color=INK, linewidth=1.2)
    axes.set_xlim(0, max(1.02, axes.dataLim.x1 * (1.22 if against == "peer" else 1.0)))
    axes.grid(axis="x", color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right", "left"]].set_visible(False)
    figure.legend(frameon=False, fontsize=9, loc="outside lower center", ncols=len(PASS_COLOURS))
    what = "times the speed of the fastest peer" if against == "peer" else "fraction of the machine's floor"
    axes.set_title(f"{title}: {what}", fontsize=11, color=INK, loc="left")
    _save_small(figure, path, describe(rows, against))


def _save_small(figure: Figure, path: Path, description: str) -> None:
    """A PNG of at most 64 colours, a third of the size that the full range takes."""
    from PIL import Image, PngImagePlugin

    drawn = io.BytesIO()
    figure.savefig(drawn, format="png")
    facts = PngImagePlugin.PngInfo()
    facts.add_text("Description", description)
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.open(drawn).convert("RGB").quantize(64).save(path, optimize=True, pnginfo=facts)


def _bar_labels(cases: dict[str, dict[str, Row]], places: Sequence[int], mode: str, against: str) -> list[str]:
    """The figure, and beside a ratio the name of the peer that it was taken against."""
    labels = []
    for found in [list(cases.values())[i] for i in places]:
        best, gain = best_peer(found, mode), advantage(found, OURS, mode)
        if against == "peer" and best and gain:
            labels.append(f"{gain:.2f}  {best[0]}")
        else:
            labels.append(f"{found[OURS].cells[mode].fraction:.2f}")
    return labels


def describe(rows: Sequence[Row], against: str) -> str:
    """The figures of ``draw_ours`` as text, one case a line: forward, then forward + backward."""
    columns = [_values(rows, [OURS], mode, against)[OURS] for mode in PASS_COLOURS]
    words = [["-" if x is None else f"{x:.2f}" for x in column] for column in columns]
    return "\n".join(" ".join((case, *figures)) for case, *figures in zip(by_case(rows), *words, strict=True))
