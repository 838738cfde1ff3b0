"""``biasflash tune``: times tiles on this GPU and writes the table that calls take them from."""

from __future__ import annotations

import importlib.util
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Protocol

import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table as Shown

from biasflash.backends.triton import tables
from biasflash.backends.triton.config import TileConfig
from biasflash.backends.triton.tables import Key, Row, Table, row_of
from biasflash.cli import candidates, compiling, machine, trials
from biasflash.cli.compiling import NO_TIME, Target
from biasflash.cli.trials import GpuTrials, Job, Outcome, Stage, Timed, Trials
from biasflash.problem import Problem

#: a winner is faster than the rule's tile by more than this; less is noise
MARGIN = 0.02
#: facts of the machine that a table carries
_FACTS = ("date", "biasflash", "torch", "triton", "cuda", "driver")


# ------------------------------------------------------------------------------------------------------------- winners


def winner(outcomes: Sequence[Outcome]) -> tuple[Timed | None, dict[str, tuple[float, float]]]:
    """The best tile of one key over all cases it was timed on, and case -> (its ms, the rule's ms).

    Best is the least geometric mean of times relative to the rule's tile, over the tiles that every case timed twice.
    None if no tile gains more than ``MARGIN``.
    """
    rule = {o.job.case.name: o.timed[0] for o in outcomes}
    found = [{t.tile: t for t in o.timed[1:]} for o in outcomes]
    best, least = None, 1.0 / (1.0 + MARGIN)
    for tile in set(found[0]).intersection(*found[1:]):
        ratios = [math.log(f[tile].ms / r.ms) for f, r in zip(found, rule.values(), strict=True)]
        mean = math.exp(sum(ratios) / len(ratios))
        if mean < least:
            best, least = tile, mean
    if best is None:
        return None, {name: (t.ms, t.ms) for name, t in rule.items()}
    return (
        max((f[best] for f in found), key=lambda t: t.spill_bytes),
        {name: (f[best].ms, t.ms) for f, (name, t) in zip(found, rule.items(), strict=True)},
    )


def make_table(
    outcomes: Iterable[Outcome], gpu: str, capability: int, facts: dict[str, Any], earlier: Table | None = None
) -> Table:
    """The table of a run: a row where a tile won, a note where the rule's stood.

    Keys that this run did not time keep what ``earlier``, a table of the same GPU or None, says of them. A key with a
    failed outcome gets no row.
    """
    by_key: dict[Key, list[Outcome]] = {}
    for outcome in outcomes:
        by_key.setdefault(outcome.job.key, []).append(outcome)
    rows: dict[Key, Row] = {}
    kept: dict[Key, Mapping[str, float]] = {}
    if earlier is not None and (earlier.gpu, earlier.capability) == (gpu, capability):
        rows = {key: row for key, row in earlier.rows.items() if key not in by_key}
        kept = {key: ms for key, ms in earlier.kept.items() if key not in by_key}
    for key, found in by_key.items():
        if any(o.failure for o in found):
            continue
        best, measured = winner(found)
        figures = {name: (round(a, 4), round(b, 4)) for name, (a, b) in measured.items()}
        if best is None:
            kept[key] = {name: ms for name, (ms, _) in figures.items()}
            continue
        rows[key] = row_of(key, best.tile, spill_bytes=best.spill_bytes, measured=figures)
    return Table(gpu=gpu, capability=capability, rows=rows, kept=kept, facts=facts)


# ---------------------------------------------------------------------------------------------------------------- flow


class Compiler(Protocol):
    """What compiles the launches of jobs: a ``compiling.Pool``, or a stand-in of one."""

    def submit(self, problem: Problem, title: str, tiles: Any = None) -> list[Any]: ...
    def wait(self, keys: Sequence[Any], deadline: float) -> str: ...


def measure(
    jobs: Sequence[Job], compiler: Compiler, open_trials: Callable[[Job], Trials], deadline: float
) -> Iterator[Outcome]:
    """Outcomes of jobs in order. All tiles are handed to the compiler first; each job then waits for its own.

    Jobs that are not compiled by the ``deadline`` are left out, each with a failure that says so. Ends early if the GPU
    is lost.
    """
    waiting = []
    for job in jobs:
        needed = compiler.submit(job.problem, "forward")
        keys = {tile: compiler.submit(job.problem, job.title, job.forced(tile)) for tile in job.tiles}
        waiting.append((job, needed, keys))
    for job, needed, keys in waiting:
        complaints = {tile: compiler.wait(keys[tile], deadline) for tile in job.tiles}
        failure = compiler.wait(needed, deadline)
        if time.time() >= deadline or NO_TIME in complaints.values():
            failure = NO_TIME
        if failure:
            yield Outcome(job=job, failure=failure)
            continue
        try:
            yield trials.run_job(job, open_trials(job), complaints)
        except Exception as error:
            yield Outcome(job=job, failure=trials.words(error))
        if trials.is_lost():
            return


class _Stages:
    """Opens trials on the GPU; the tensors of one case at a time."""

    def __init__(self, device: torch.device, target: Target) -> None:
        self._device, self._target = device, target
        self._stage: Stage | None = None

    def __call__(self, job: Job) -> Trials:
        if self._stage is None or self._stage.problem != job.problem:
            self._stage = None  # its memory goes before the next one's comes
            self._stage = Stage(job.case, job.problem, self._device, self._target)
        return GpuTrials(job, self._stage)


def _shown(table: Table, outcomes: Sequence[Outcome]) -> Shown:
    """What was found, a line a key."""
    shown = Shown(title="tiles, ms against the rule's tile", title_justify="left", pad_edge=False)
    for name in ("for", "tile", "measured", "gain"):
        shown.add_column(name, no_wrap=name != "measured", justify="right" if name == "gain" else "left")
    for key in dict.fromkeys(o.job.key for o in outcomes):
        rule = next(o.job.tiles[0] for o in outcomes if o.job.key == key)
        if key in table.rows:
            row = table.rows[key]
            figures = [f"{name} {ms:.4g} / {of:.4g}" for name, (ms, of) in row.measured.items()]
            gain = math.prod(of / ms for ms, of in row.measured.values()) ** (1 / len(row.measured))
            spills = f", {row.spill_bytes} bytes spilled" if row.spill_bytes else ""
            shown.add_row(str(key), f"{TileConfig(**row.tile)}{spills}", "; ".join(figures), f"{gain - 1:+.0%}")
        elif key in table.kept:
            figures = [f"{name} {ms:.4g}" for name, ms in table.kept[key].items()]
            shown.add_row(str(key), f"{rule} (the rule's)", "; ".join(figures), "")
        else:
            why = "; ".join(f"{o.job.case.name}: {o.failure}" for o in outcomes if o.job.key == key and o.failure)
            shown.add_row(str(key), "not measured", why, "")
    return shown


def report_skipped(outcomes: Sequence[Outcome]) -> list[str]:
    """How many candidates were skipped, by the first words of the reason."""
    counts: dict[str, int] = {}
    for outcome in outcomes:
        for why in outcome.skipped.values():
            kind = why.split(":")[0]
            counts[kind] = counts.get(kind, 0) + 1
    tried = sum(len(o.job.tiles) for o in outcomes)
    return [f"{count} of {tried} candidates skipped: {kind}" for kind, count in counts.items()]


def exit_code(outcomes: Sequence[Outcome], jobs: int) -> int:
    """1 if some job failed for another reason than time, or the GPU was lost before the last one."""
    broken = [o for o in outcomes if o.failure and o.failure != NO_TIME]
    wrong = [why for o in outcomes for why in o.skipped.values() if why.startswith("wrong")]
    return int(bool(broken or wrong) or len(outcomes) < jobs)


def refuse_without_gpu() -> torch.device:
    """The GPU that is tuned.

    Raises:
        typer.BadParameter: there is none, or Triton is missing.
    """
    if not torch.cuda.is_available():
        raise typer.BadParameter("tune times kernels on a GPU, and torch sees none here")
    if importlib.util.find_spec("triton") is None:
        raise typer.BadParameter("tune needs Triton; install it with: pip install 'biasflash[gpu]'")
    return torch.device("cuda", torch.cuda.current_device())


def tune(
    cases: Annotated[
        str | None,
        typer.Option(help="Comma-separated names, globs or tags (workload, tune). Default: one or two cases a row."),
    ] = None,
    kernels: Annotated[
        str | None, typer.Option(help="Comma-separated: forward, dkdv, dq, dq_from_ds, dbias. Default: all.")
    ] = None,
    table: Annotated[
        Path | None, typer.Option(help="Write here. Default: the place in the package where calls on this GPU look.")
    ] = None,
    seconds: Annotated[float, typer.Option(min=1.0, help="Time budget; what does not fit keeps its tile.")] = 300.0,
    processes: Annotated[
        int | None, typer.Option(min=1, help="Processes that compile. Default: one fewer than there are cores.")
    ] = None,
) -> None:
    """Time tiles on this GPU and write a table of the winners, which later calls take their tiles from.

    For every kernel, width, element size, and with or without a bias: the rule's own tile, tiles one step from it, and
    those of neighbouring rules, each compiled in a pool of processes, run, compared with the rule's tile, and timed
    alone (median of CUDA-event timings, cold L2 cache). A tile wins if it is right, and more than 2 % faster in a
    second, longer timing. Keys that a run leaves out keep what the file said before.

    Use a table that lies elsewhere with the environment variable BIASFLASH_TILES=PATH; BIASFLASH_TILES=off goes back to
    the rules. Exit code 1 if some tile gives wrong results or the rule's own fails.

    Example: biasflash tune --kernels dq,dkdv --cases 'pair-*' --table my_gpu.json
    """
    start = time.time()
    device = refuse_without_gpu()
    console = Console() if Console().is_terminal else Console(width=200)
    try:
        wanted = candidates.choose(cases, kernels)
        gpu = torch.cuda.get_device_name(device)
        path = table or tables.SHIPPED / tables.file_name(gpu)
        earlier = tables.read(path) if path.is_file() else None
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    with tables.using(None):
        target = compiling.here(device)
    jobs = [job for name, ks in wanted.items() for job in trials.jobs_of(candidates.CASES[name], ks, device, target)]
    tried = sum(len(job.tiles) for job in jobs)
    console.print(f"{gpu}: {len(jobs)} kernels and cases, {tried} candidates", highlight=False)
    outcomes: list[Outcome] = []
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with compiling.pool(target, processes) as pool, Progress(*columns, console=console, transient=True) as progress:
        bar = progress.add_task("compiling", total=len(jobs))
        for outcome in measure(jobs, pool, _Stages(device, target), start + seconds):
            outcomes.append(outcome)
            progress.update(bar, advance=1, description=f"{outcome.job.kernel} on {outcome.job.case.name}")
    facts = machine.facts(device)
    found = make_table(outcomes, gpu, target.device.capability, {name: facts[name] for name in _FACTS}, earlier)
    console.print(_shown(found, outcomes))
    for line in report_skipped(outcomes):
        console.print(line, highlight=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(tables.dump(found), encoding="utf-8")
    console.print(f"wrote {path} after {time.time() - start:.0f} s", highlight=False, soft_wrap=True)
    raise typer.Exit(exit_code(outcomes, len(jobs)))
