"""``biasflash sweep``: time against length, and every shape against its neighbours."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console, Group
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

import biasflash
from biasflash import __version__
from biasflash.cli import compiling, gate, machine, spot, sweep_chart, sweep_grid, timing
from biasflash.cli.rows import detached
from biasflash.cli.sweep_grid import (
    ERROR,
    NO_MEMORY,
    NO_TIME,
    OK,
    WRONG,
    Growth,
    Point,
    Sample,
    Slow,
    growths,
    slow_shapes,
)
from biasflash.cli.tables import milliseconds
from biasflash.testing.case import Call, Ceilings, floor_ms

SCHEMA = "biasflash-sweep/1"
MODES = {"fwd": ("fwd",), "fwdbwd": ("fwdbwd",), "both": ("fwd", "fwdbwd")}
PARTS = {"curve": ("curve",), "grid": ("grid",), "both": ("curve", "grid")}
#: milliseconds of one timing: the sweep has a thousand
TIMING_MS = 8.0
#: what a CPU gets through: scores of a shape, dims, lengths, and the curve's heads and lengths
SMALL_SCORES, SMALL_DIMS, SMALL_LENGTHS, SMALL_HEADS, SMALL_CURVE = 2**15, (16, 24, 32), (33, 64, 65), 2, (64, 128, 256)


# ----------------------------------------------------------------------------------------------------------- measuring


def _both(call: Call) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    out, _ = call.run(biasflash.attention)
    return out, call.gradients(out, None)


def _work(call: Call, mode: str) -> Callable[[], object]:
    if mode == "fwd":
        bare = detached(call)
        return lambda: bare.run(biasflash.attention)
    return lambda: _both(call)


def sample_point(
    point: Point, modes: Sequence[str], device: torch.device, ceilings: Ceilings, budget_ms: float = TIMING_MS
) -> list[Sample]:
    """Builds a shape, checks out and every gradient against float32 in part (see ``spot``), then times each mode."""
    case = point.case()
    call = case.build(device)
    out, gradients = _both(call) if "fwdbwd" in modes else (call.run(biasflash.attention)[0], {})
    found = spot.errors(call, out, gradients)
    del out, gradients
    limit = gate.limit_for(call.q.dtype, device)
    wrong = {name: error for name, error in found.items() if not error <= limit}
    worst = max(found.values(), key=lambda e: math.inf if math.isnan(e) else e)
    samples = []
    for mode in modes:
        floor = floor_ms(case, mode == "fwdbwd", ceilings)
        if wrong:
            words = ", ".join(f"{name} is off by {error:.1e}" for name, error in wrong.items())
            samples.append(Sample(point=point, mode=mode, status=WRONG, reason=words, floor_ms=floor, error=worst))
            continue
        with torch.set_grad_enabled(mode == "fwdbwd"):
            took = timing.measure(_work(call, mode), device, budget_ms)
        samples.append(Sample(point=point, mode=mode, status=OK, ms=took.ms, floor_ms=floor, error=worst))
    return samples


def _free_bytes(device: torch.device) -> float:
    """What may still be allocated, memory that torch keeps for itself included."""
    if device.type != "cuda":
        return math.inf
    cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return float(torch.cuda.mem_get_info(device)[0] + cached)


def measure(
    points: Sequence[Point],
    modes: Sequence[str],
    device: torch.device,
    ceilings: Ceilings,
    deadline: float,
    ready: Callable[[Point], str] = lambda point: "",
) -> Iterator[list[Sample]]:
    """Samples of every point in order. ``ready`` waits for a point's kernels: empty, or why they are not there.

    Points after the deadline, points that do not fit memory and points that fail say so and have no figures.
    """

    def without(point: Point, status: str, reason: str = "") -> list[Sample]:
        return [Sample(point=point, mode=mode, status=status, reason=reason) for mode in modes]

    for point in points:
        complaint = NO_TIME if time.time() >= deadline else ready(point)
        if complaint:
            yield without(point, NO_TIME if complaint == compiling.NO_TIME else ERROR, complaint)
        elif point.bytes_needed() > _free_bytes(device):
            yield without(point, NO_MEMORY, f"needs {point.bytes_needed() / 2**30:.0f} GiB")
        else:
            try:
                yield sample_point(point, modes, device, ceilings)
            except torch.OutOfMemoryError:
                yield without(point, NO_MEMORY)
            except Exception as error:
                yield without(point, ERROR, " ".join(f"{type(error).__name__}: {error}".split())[:200])


# -------------------------------------------------------------------------------------------------------------- report


def _words(point: Point) -> str:
    return f"{point.batch} x {point.heads} heads, D {point.dim}, {'with' if point.bias else 'no'} bias"


def curve_table(samples: Sequence[Sample], found: Sequence[Growth]) -> Table:
    """One line a length and mode: ms, TFLOP/s, and the growth from the length before."""
    table = Table(title="time against length", title_justify="left", pad_edge=False)
    for name in ("shape", "mode"):
        table.add_column(name, no_wrap=True)
    for name in ("M = N", "ms", "TFLOP/s", "of the floor", "growth", "M x N"):
        table.add_column(name, justify="right", no_wrap=True)
    by_after = {id(g.after): g for g in found}
    lines = [s for s in samples if s.point.part == sweep_grid.CURVE]
    for s in sorted(lines, key=lambda s: (s.point.dim, s.point.bias, s.mode, s.point.length)):
        head = (_words(s.point), s.mode, str(s.point.length))
        if s.ms is None or s.tflops is None:
            table.add_row(*head, Text(f"{s.status} {s.reason}".strip(), "dim"), "", "", "", "")
            continue
        growth = by_after.get(id(s))
        times = Text(f"{growth.times:.2f} x", "red" if growth.is_cliff else "") if growth else "-"
        share = f"{s.floor_ms / s.ms:.0%}" if s.floor_ms else "-"
        work = f"{growth.work:.0f} x" if growth else "-"
        table.add_row(*head, milliseconds(s.ms), f"{s.tflops:.3g}", share, times, work)
    return table


def slow_table(found: Sequence[Slow]) -> Table:
    """One line a shape that is slower per FLOP than its best neighbour allows."""
    title = f"slower per FLOP (true M, N, D) than {sweep_grid.NEIGHBOUR_LIMIT} x the best neighbour"
    table = Table(title=title, title_justify="left", pad_edge=False)
    for name in ("D", "M = N", "bias", "mode", "ms", "TFLOP/s", "neighbour", "its TFLOP/s", "ratio", "of floors", ""):
        table.add_column(name, justify="right", no_wrap=True)
    for slow in found:
        s, n = slow.sample, slow.neighbour
        table.add_row(
            *(str(s.point.dim), str(s.point.length), "yes" if s.point.bias else "no", s.mode),
            *(milliseconds(s.ms or 0.0), f"{s.tflops:.3g}", f"D {n.point.dim}, {n.point.length}", f"{n.tflops:.3g}"),
            *(f"{slow.ratio:.2f}", f"{slow.floor_ratio:.2f}", "its floor, too" if slow.is_explained else ""),
        )
    return table


def report(samples: Sequence[Sample]) -> Group:
    """All tables of a run, and what has no figure."""
    found, slow = growths(samples), slow_shapes(samples)
    parts: list[Any] = []
    if any(s.point.part == sweep_grid.CURVE for s in samples):
        parts.append(curve_table(samples, found))
    if slow:
        parts.append(slow_table(slow))
    counts: dict[str, int] = {}
    for s in samples:
        if s.status != OK and s.point.part == sweep_grid.GRID:
            counts[s.status] = counts.get(s.status, 0) + 1
    parts += [Text(f"{count} shapes and modes of the grid: {status}", "dim") for status, count in counts.items()]
    parts += [
        Text(f"{s.point.case().name} {s.mode}: {s.reason}", "red") for s in samples if s.status in (WRONG, ERROR)
    ][:40]
    parts.append(Text(sweep_chart.describe(samples, slow, found)))
    return Group(*parts)


def make_report(samples: Sequence[Sample], device: torch.device, ceilings: Ceilings, seconds: float) -> dict[str, Any]:
    """Everything a run found, ready for ``json.dumps``."""

    def plain(s: Sample) -> dict[str, Any]:
        error = s.error if s.error is None or math.isfinite(s.error) else str(s.error)
        own = {name: getattr(s, name) for name in ("mode", "status", "reason", "ms", "floor_ms", "tflops")}
        return dataclasses.asdict(s.point) | own | {"error": error}

    slow = [
        {"shape": x.sample.point.case().name, "mode": x.sample.mode, "neighbour": x.neighbour.point.case().name}
        | {"ratio": x.ratio, "floor_ratio": x.floor_ratio}
        for x in slow_shapes(samples)
    ]
    cliffs = [
        {"shape": g.after.point.case().name, "mode": g.after.mode, "growth": g.times, "work": g.work}
        for g in growths(samples)
        if g.is_cliff
    ]
    head = {"schema": SCHEMA, "seconds": round(seconds, 1), "machine": machine.facts(device)}
    head |= {"ceilings": dataclasses.asdict(ceilings), "neighbour_limit": sweep_grid.NEIGHBOUR_LIMIT}
    return head | {"slow": slow, "cliffs": cliffs, "samples": [plain(s) for s in samples]}


def exit_code(samples: Sequence[Sample]) -> int:
    """1 if anything was wrong or failed. Slow shapes and cliffs are findings, not failures."""
    return int(any(s.status in (WRONG, ERROR) for s in samples))


# ------------------------------------------------------------------------------------------------------------- command


def _numbers(option: str, text: str | None, default: Sequence[int]) -> tuple[int, ...]:
    if text is None:
        return tuple(default)
    try:
        found = tuple(int(word) for word in text.split(","))
    except ValueError:
        found = (0,)
    if min(found) < 1:
        raise typer.BadParameter(f"{option} {text}: wanted numbers with commas between them, such as 64,128")
    return found


def choose_points(parts: Sequence[str], device: torch.device, dims: str | None, lengths: str | None) -> list[Point]:
    """What is measured: everything on a GPU, a tiny version on a CPU; ``dims`` and ``lengths`` narrow both parts."""
    is_small = device.type == "cpu"
    dtype = "fp32" if is_small else "bf16"
    points: list[Point] = []
    if "curve" in parts:
        own = _numbers("--dims", dims, SMALL_DIMS[:1] if is_small else sweep_grid.CURVE_DIMS)
        along = _numbers("--lengths", lengths, SMALL_CURVE if is_small else sweep_grid.CURVE_LENGTHS)
        points += sweep_grid.curve(own, along, SMALL_HEADS if is_small else sweep_grid.CURVE_HEADS, dtype)
    if "grid" in parts:
        own = _numbers("--dims", dims, SMALL_DIMS if is_small else sweep_grid.DIMS)
        along = _numbers("--lengths", lengths, SMALL_LENGTHS if is_small else sweep_grid.LENGTHS)
        points += sweep_grid.grid(own, along, SMALL_SCORES if is_small else sweep_grid.SCORES, dtype)
    return points


def _prepare(
    points: Sequence[Point], device: torch.device, deadline: float, processes: int | None, stack: ExitStack
) -> Callable[[Point], str]:
    """Starts compiling every kernel of the points; the answer waits for those of one point."""
    if device.type != "cuda" or importlib.util.find_spec("triton") is None:
        return lambda point: ""
    pool = stack.enter_context(compiling.pool(compiling.here(device), processes))
    needed = {}
    for point in points:
        problem = compiling.problem_of(point.case(), device)
        needed[point] = pool.submit(problem, "forward") + pool.submit(problem, "backward")
    return lambda point: pool.wait(needed[point], deadline)


def _choice(option: str, word: str, known: dict[str, tuple[str, ...]]) -> tuple[str, ...]:
    if word not in known:
        raise typer.BadParameter(f"{option} {word} is unknown; accepted: {', '.join(known)}")
    return known[word]


def sweep(
    part: Annotated[str, typer.Option(help="curve (time against length), grid (dims x lengths) or both.")] = "both",
    mode: Annotated[str, typer.Option(help="fwd, fwdbwd (forward + backward, every gradient) or both.")] = "both",
    dims: Annotated[str | None, typer.Option(help="Head dims, with commas. Default: 16 to 256, curve 64, 128.")] = None,
    lengths: Annotated[
        str | None, typer.Option(help="Lengths, with commas. Default: 33 to 8193; curve: 1k to 32k, doubling.")
    ] = None,
    device: Annotated[str | None, typer.Option(help="cuda, or cpu for a tiny version. Default: cuda if any.")] = None,
    json_path: Annotated[Path | None, typer.Option("--json", help="Write every figure here.")] = None,
    chart: Annotated[Path | None, typer.Option(help="Write a PNG here.")] = None,
    seconds: Annotated[float, typer.Option(min=1.0, help="Time budget; shapes that do not fit say so.")] = 300.0,
    processes: Annotated[
        int | None, typer.Option(min=1, help="Processes that compile. Default: one fewer than there are cores.")
    ] = None,
) -> None:
    """Look for cliffs: time as lengths double, and time per FLOP of every shape against its neighbours.

    The curve has 16 heads of 1k to 32k queries and keys, without a bias and with a full one; a step that grows by more
    than 15 % over M x N is a cliff. The grid has 13 head dims x 19 lengths at equal work, without a bias and with one
    that the batch shares; a shape that takes more than 1.6 x as long per FLOP (of the true M, N and D) as its best
    neighbour in either direction is called slow. Results are checked in part before they are timed.

    Exit code 1 if a result is wrong or a call fails; slow shapes and cliffs are findings.

    Example: biasflash sweep --part grid --mode fwd --dims 64,72,80 --chart sweep.png
    """
    start = time.time()
    console = Console() if Console().is_terminal else Console(width=200)
    parts, modes = _choice("--part", part, PARTS), _choice("--mode", mode, MODES)
    if chart and importlib.util.find_spec("matplotlib") is None:
        raise typer.BadParameter("--chart needs matplotlib; install it with: pip install 'biasflash[cli]'")
    where = machine.pick_device(device)
    points = choose_points(parts, where, dims, lengths)
    samples: list[Sample] = []
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with ExitStack() as stack:
        ready = _prepare(points, where, start + seconds, processes, stack)
        top = timing.ceilings(where)
        progress = stack.enter_context(Progress(*columns, console=console, transient=True))
        bar = progress.add_task("compiling", total=len(points))
        for found in measure(points, modes, where, top, start + seconds, ready):
            samples += found
            progress.update(bar, advance=1, description=found[0].point.case().name)
    console.print(report(samples))
    took = time.time() - start
    _save(samples, make_report(samples, where, top, took), json_path, chart, console)
    console.print(f"{len(points)} shapes in {took:.0f} s", highlight=False)
    raise typer.Exit(exit_code(samples))


def _save(
    samples: Sequence[Sample], found: dict[str, Any], json_path: Path | None, chart: Path | None, console: Console
) -> None:
    """Writes the files that were asked for."""
    if json_path:
        json_path.parent.mkdir(parents=True, exist_ok=True)
        json_path.write_text(json.dumps(found, indent=1, allow_nan=False) + "\n")
        console.print(f"wrote {json_path}", highlight=False, soft_wrap=True)
    if chart:
        title = f"biasflash {__version__} on {found['machine']['device']}"
        try:
            sweep_chart.draw(samples, slow_shapes(samples), growths(samples), chart, title)
            console.print(f"wrote {chart}", highlight=False, soft_wrap=True)
        except ValueError as error:
            console.print(f"no chart: {error}", highlight=False)
