"""``biasflash bench``: named workloads x providers; correctness first, then time against best peer and floor."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import fnmatch
import importlib.util
import json
import math
import os
import signal
import threading
import time
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

import biasflash
from biasflash import __version__
from biasflash.cli import charts, gate, rows, tables, timing, warm
from biasflash.cli.machine import facts
from biasflash.cli.providers import OURS, PROVIDERS, Provider
from biasflash.cli.rows import MODES, Cell, Row
from biasflash.cli.runs import Settings, run
from biasflash.testing.case import DTYPES, Case
from biasflash.testing.cases import select

SCHEMA = "biasflash-bench/1"
MODE_CHOICES: dict[str, tuple[str, ...]] = {"fwd": ("fwd",), "fwdbwd": ("fwdbwd",), "both": MODES}
#: What is timed when nothing is named: the workloads on a GPU, else cases that a CPU gets through in a minute.
DEFAULT_CASES = {"cuda": "workload", "cpu": "vit,t5,t5-causal,pair-full,frozen-bias,object-queries,latent"}


# -------------------------------------------------------------------------------------------------------------- report


def _plain(value: Any) -> Any:
    """JSON has no NaN and no infinity: they become words."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, (list, tuple)) else value


def make_report(
    found: Sequence[Row],
    settings: Settings,
    machine: dict[str, Any],
    start: float,
    host: Sequence[dict[str, Any]] = (),
    complete: bool = False,
) -> dict[str, Any]:
    """Everything a run that began at ``start`` found, ready for ``json.dumps``; ``load_rows`` reads its rows back.

    ``complete``: no row is still to come.
    """
    report = {
        "schema": SCHEMA,
        "complete": complete,
        "biasflash": __version__,
        "started": datetime.datetime.fromtimestamp(start, datetime.timezone.utc).isoformat(timespec="seconds"),
        "seconds": round(time.time() - start, 1),
        "machine": machine,
        "device": settings.device,
        "ceilings": dataclasses.asdict(settings.ceilings),
        "limits": {str(dtype).removeprefix("torch."): limit for dtype, limit in gate.LIMITS.items()},
        "repetition_ms": settings.budget_ms,
        "rows": [dataclasses.asdict(row) for row in found],
        "host": list(host),
    }
    plain = _plain(report)
    assert isinstance(plain, dict)
    return plain


def write(report: dict[str, Any], path: Path) -> None:
    """Writes a report as JSON; whoever looks finds the earlier file or all of this one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.part")
    part.write_text(json.dumps(report, indent=1, allow_nan=False) + "\n")
    os.replace(part, path)


def load_rows(path: Path) -> list[Row]:
    """Rows of an earlier report.

    Raises:
        typer.BadParameter: the file is not such a report.
    """
    try:
        report = json.loads(path.read_text())
        if report["schema"] != SCHEMA:
            raise ValueError(f"schema {report['schema']!r}, wanted {SCHEMA!r}")
        return [
            Row(**(row | {"cells": {mode: Cell(**cell) for mode, cell in row["cells"].items()}}))
            for row in report["rows"]
        ]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise typer.BadParameter(f"{path} is not a report of biasflash bench: {error}") from None


def host_section(device: torch.device) -> list[dict[str, Any]]:
    """Host microseconds per forward call on a tiny problem: this library beside torch's own choice."""
    entries: list[dict[str, Any]] = []
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    q = torch.randn(1, 64, 4, 64, device=device, dtype=dtype)
    bias = torch.randn(1, 4, 64, 64, device=device, dtype=dtype)
    heads_first = q.transpose(1, 2)
    torchs = torch.nn.functional.scaled_dot_product_attention
    works: dict[tuple[str, str], timing.Work] = {
        ("no bias", OURS): lambda: biasflash.attention(q, q, q),
        ("no bias", "torch SDPA"): lambda: torchs(heads_first, heads_first, heads_first),
        ("with a bias", OURS): lambda: biasflash.attention(q, q, q, bias),
        ("with a bias", "torch SDPA"): lambda: torchs(heads_first, heads_first, heads_first, bias),
    }
    with torch.no_grad():
        if device.type == "cuda":
            timing.settle(list(works.values()), device)
        for (call, provider), work in works.items():
            took = timing.host_us(work, device, calls=200 if device.type == "cuda" else 20)
            entries.append({"call": call, "provider": provider, "us": took.ms, "p20": took.p20, "p80": took.p80})
    return entries


# ------------------------------------------------------------------------------------------------------------- command


def choose_providers(wanted: str) -> list[Provider]:
    """Providers whose name matches any of the comma-separated globs, in their own order.

    Raises:
        typer.BadParameter: a glob matches none.
    """
    globs = [word.strip() for word in wanted.split(",") if word.strip()]
    for glob in globs:
        if not fnmatch.filter(PROVIDERS, glob):
            raise typer.BadParameter(f"no provider matches {glob!r}; known: {', '.join(PROVIDERS)}")
    return [p for name, p in PROVIDERS.items() if any(fnmatch.fnmatchcase(name, glob) for glob in globs)]


def choose_cases(wanted: str | None, device: torch.device, dtype: str | None) -> list[Case]:
    """The named cases, in ``dtype`` if given; a CPU takes float32 where nothing is said.

    Raises:
        typer.BadParameter: a name, tag or dtype is unknown.
    """
    if dtype is not None and dtype not in DTYPES:
        raise typer.BadParameter(f"--dtype {dtype} is unknown; accepted: {', '.join(DTYPES)}")
    dtype = dtype or ("fp32" if device.type == "cpu" else None)
    try:
        found = select(DEFAULT_CASES[device.type] if wanted is None else wanted)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    return [dataclasses.replace(case, dtype=dtype) if dtype else case for case in found]


def choose_device(name: str | None) -> torch.device:
    """``--device``, or CUDA if there is one, else the CPU."""
    device = torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))
    if device.type not in DEFAULT_CASES:
        raise typer.BadParameter(f"--device {name}: accepted are cpu and cuda")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise typer.BadParameter("--device cuda: torch sees no CUDA device here")
    return device


class Stopped(BaseException):
    """SIGTERM came. No ``Exception``: a row that catches what its provider raises lets it pass."""


class Sigterm:
    """Inside of ``with``, the first SIGTERM raises ``Stopped``; further ones, and any after ``is_over``, do nothing."""

    def __init__(self) -> None:
        self.came = self.is_over = False

    def _handle(self, *_: object) -> None:
        if not (self.came or self.is_over):
            self.came = True
            raise Stopped

    def __enter__(self) -> Sigterm:
        # only the main thread may handle signals
        self._in_main = threading.current_thread() is threading.main_thread()
        if self._in_main:
            self._before = signal.signal(signal.SIGTERM, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        if self._in_main:
            signal.signal(signal.SIGTERM, self._before)


def timely_rows(
    cases: Sequence[Case], providers: Sequence[Provider], settings: Settings, isolate: bool
) -> Generator[Row, None, None]:
    """The rows of ``run``, of which none is begun too late; nor is a process that would give its first row too late."""
    timely = [rows.until(provider, settings.deadline) for provider in providers]
    if not isolate:
        yield from run(cases, timely, settings, isolate=False)
        return
    first: list[float] = []  # seconds to the first row of each process
    for provider in timely:
        if provider.missing():
            yield from run(cases, [provider], settings, isolate=True)
            continue
        done, start = 0, time.time()
        if start + min(first, default=0.0) <= settings.deadline:
            for done, row in enumerate(run(cases, [provider], settings, isolate=True), start=1):
                if done == 1:
                    first.append(time.time() - start)
                yield row
                if time.time() > settings.deadline:
                    break
        for case in cases[done:]:
            yield rows.blank(case.name, provider.name, settings.modes, rows.NO_TIME, rows.OUT_OF_TIME)


def _collect(
    found: list[Row], coming: Generator[Row, None, None], total: int, keep: Callable[[], None], console: Console
) -> None:
    """Appends rows as they come and calls ``keep`` after each, with a progress bar that names the last one."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True) as progress, contextlib.closing(coming):
        task = progress.add_task("measuring", total=total)
        for row in coming:
            found.append(row)
            keep()
            progress.update(task, advance=1, description=f"{row.provider} on {row.case}")


def exit_code(found: Sequence[Row]) -> int:
    """1 if this library was wrong or broke anywhere, else 0. Rivals, refusals and a used-up budget fail no run."""
    ours = [cell.status for row in found if row.provider == OURS for cell in row.cells.values()]
    return int(any(status in (rows.RED, rows.ERROR) for status in ours))


def _publish(
    report: dict[str, Any],
    found: Sequence[Row],
    settings: Settings,
    earlier: Sequence[Row],
    json_path: Path | None,
    chart: Path | None,
    console: Console,
) -> None:
    """Prints the tables, and writes the files that were asked for."""
    console.print(tables.report(found, settings.modes))
    if report["host"]:
        console.print(tables.host(report["host"]))
    if earlier:
        console.print(tables.changes(found, earlier))
    if json_path:
        write(report, json_path)
        console.print(f"wrote {json_path}")
    if chart:
        try:
            charts.draw(found, settings.modes, chart, f"biasflash {__version__} on {report['machine']['device']}")
            console.print(f"wrote {chart}")
        except ValueError as error:
            console.print(f"no chart: {error}")


def _console() -> Console:
    """The terminal, or 240 columns for a file or a pipe: no reason to fold a table there."""
    console = Console()
    return console if console.is_terminal else Console(width=240)


Seconds = Annotated[
    float,
    typer.Option(min=1.0, help="Time budget, a third of it at most to compile ahead; rows that do not fit say so."),
]
Jobs = Annotated[
    int | None,
    typer.Option(
        min=0,
        help="Processes that call flex and biasflash once before anything is timed, so that compiling does not eat "
        "the budget. Default: by cores and memory on CUDA.",
    ),
]


def _compile_ahead(
    cases: Sequence[Case], providers: Sequence[Provider], settings: Settings, jobs: int | None, seconds: float
) -> int:
    """Calls that filled the compilers' caches within so many seconds."""
    count = warm.processes_for(torch.device(settings.device)) if jobs is None else jobs
    names = [p.name for p in providers]
    return warm.warm(cases, names, settings.modes, settings.device, count, time.time() + seconds)


def _measure(
    cases: Sequence[Case],
    providers: Sequence[Provider],
    settings: Settings,
    start: float,
    sigterm: Sigterm,
    isolate: bool,
    jobs: int | None,
    host: bool,
    json_path: Path | None,
    console: Console,
) -> tuple[list[Row], dict[str, Any]]:
    """Rows and report of a run that began at ``start``; if SIGTERM ends it, what there is by then."""
    found: list[Row] = []
    times: list[dict[str, Any]] = []
    machine, total, ahead = facts(settings.device), len(cases) * len(providers), time.time()

    def keep() -> None:
        if json_path:
            write(make_report(found, settings, machine, start), json_path)

    with contextlib.suppress(Stopped):
        if compiled := _compile_ahead(cases, providers, settings, jobs, (settings.deadline - start) / 3):
            console.print(f"compiled ahead: {compiled} calls in {time.time() - ahead:.0f} s")
        _collect(found, timely_rows(cases, providers, settings, isolate), total, keep, console)
        times = host_section(torch.device(settings.device)) if host else []
        sigterm.is_over = True
    if sigterm.came:
        console.print(f"ended by SIGTERM after {len(found)} of {total} rows")
    return found, make_report(found, settings, machine, start, times, complete=not sigterm.came)


def bench(
    cases: Annotated[
        str | None,
        typer.Option(
            help="Comma-separated case names, globs or tags. Default: every workload (on a CPU: a few medium cases)."
        ),
    ] = None,
    providers: Annotated[str, typer.Option(help="Comma-separated names or globs: " + ", ".join(PROVIDERS) + ".")] = "*",
    device: Annotated[str | None, typer.Option(help="cuda or cpu. Default: cuda if there is one.")] = None,
    dtype: Annotated[
        str | None, typer.Option(help="fp16, bf16 or fp32 for every case. Default: the case's own (on a CPU: fp32).")
    ] = None,
    mode: Annotated[str, typer.Option(help="fwd, fwdbwd (forward + backward, every gradient) or both.")] = "both",
    json_path: Annotated[
        Path | None,
        typer.Option("--json", help="Write every figure and the machine's facts here, anew after every row."),
    ] = None,
    chart: Annotated[Path | None, typer.Option(help="Write a PNG chart here.")] = None,
    baseline: Annotated[
        Path | None, typer.Option(help="A JSON of an earlier run: print what changed against it.")
    ] = None,
    seconds: Seconds = 450.0,
    isolate: Annotated[
        bool | None,
        typer.Option(
            "--isolate/--no-isolate",
            help="Each provider in its own process, so that a crash spoils one row. Default: on CUDA.",
        ),
    ] = None,
    jobs: Jobs = None,
    host: Annotated[bool, typer.Option("--host", help="Also measure host time per call beside torch's SDPA.")] = False,
) -> None:
    """Time attention providers side by side: correctness gate first, no speed for a wrong result.

    Forward alone, and forward + backward with every gradient: median of CUDA-event timings with a cold L2 cache, the
    fraction of the floor (the largest of products, bytes and exponentials at this machine's measured ceilings), and the
    ratio to the best other provider. A result counts as right when its relative Frobenius error against float32 is
    within 1e-2 (bf16), 2e-3 (fp16) or 1e-4 (fp32). Exit code 1 if biasflash itself is wrong or fails anywhere.
    """
    start = time.time()
    console = _console()
    if mode not in MODE_CHOICES:
        raise typer.BadParameter(f"--mode {mode} is unknown; accepted: {', '.join(MODE_CHOICES)}")
    if chart and importlib.util.find_spec("matplotlib") is None:
        raise typer.BadParameter("--chart needs matplotlib; install it with: pip install 'biasflash[cli]'")
    where = choose_device(device)
    chosen, rivals = choose_cases(cases, where, dtype), choose_providers(providers)
    earlier = load_rows(baseline) if baseline else []
    top = timing.ceilings(where)
    if where.type == "cuda":
        torch.cuda.empty_cache()  # the measuring process keeps nothing from the providers' processes
    figures = f"{top.products / 1e12:.3g} TFLOP/s, {top.bytes / 1e12:.3g} TB/s, {top.exps:.2g} exponentials/s"
    console.print(f"ceilings measured on {where}: {figures}")
    settings = Settings(device=str(where), modes=MODE_CHOICES[mode], ceilings=top, deadline=start + seconds)
    apart = where.type == "cuda" if isolate is None else isolate
    with Sigterm() as sigterm:
        found, report = _measure(chosen, rivals, settings, start, sigterm, apart, jobs, host, json_path, console)
        _publish(report, found, settings, earlier, json_path, chart, console)
    raise typer.Exit(exit_code(found))
