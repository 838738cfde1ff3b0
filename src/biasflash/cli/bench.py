"""``biasflash bench``: named workloads x providers; correctness first, then time against best peer and floor."""

from __future__ import annotations

import dataclasses
import datetime
import fnmatch
import importlib.util
import json
import math
import time
from collections.abc import Sequence
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
    found: Sequence[Row], settings: Settings, host: Sequence[dict[str, Any]], seconds: float
) -> dict[str, Any]:
    """Everything a run found, ready for ``json.dumps``; ``load_rows`` reads its rows back."""
    report = {
        "schema": SCHEMA,
        "biasflash": __version__,
        "started": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "seconds": round(seconds, 1),
        "machine": facts(settings.device),
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
    for call, plane in (("no bias", None), ("with a bias", bias)):

        def ours(plane: torch.Tensor | None = plane) -> object:
            return biasflash.attention(q, q, q, plane)

        def torchs(plane: torch.Tensor | None = plane) -> object:
            return torch.nn.functional.scaled_dot_product_attention(heads_first, heads_first, heads_first, plane)

        for provider, work in ((OURS, ours), ("torch SDPA", torchs)):
            with torch.no_grad():
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


def _collect(
    cases: Sequence[Case], providers: Sequence[Provider], settings: Settings, isolate: bool, console: Console
) -> list[Row]:
    """All rows, with a progress bar that names the row in work."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    found = []
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("measuring", total=len(cases) * len(providers))
        for row in run(cases, providers, settings, isolate=isolate):
            found.append(row)
            progress.update(task, advance=1, description=f"{row.provider} on {row.case}")
    return found


def exit_code(found: Sequence[Row]) -> int:
    """1 if this library was wrong or broke anywhere, else 0. Rivals, refusals and a used-up budget fail no run."""
    ours = [cell.status for row in found if row.provider == OURS for cell in row.cells.values()]
    return int(any(status in (rows.RED, rows.ERROR) for status in ours))


def _save(
    report: dict[str, Any],
    found: Sequence[Row],
    settings: Settings,
    json_path: Path | None,
    chart: Path | None,
    console: Console,
) -> None:
    """Writes the files that were asked for."""
    if json_path:
        json_path.parent.mkdir(parents=True, exist_ok=True)
        json_path.write_text(json.dumps(report, indent=1, allow_nan=False) + "\n")
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


Jobs = Annotated[
    int | None,
    typer.Option(
        min=0,
        help="Processes that call flex and biasflash once before anything is timed, so that compiling does not eat "
        "the budget. Default: by cores and memory on CUDA.",
    ),
]


def _compile_ahead(
    cases: Sequence[Case], providers: Sequence[Provider], modes: tuple[str, ...], where: torch.device, jobs: int | None
) -> int:
    """Calls that filled the compilers' caches, in a third of a usual budget at most."""
    count = warm.processes_for(where) if jobs is None else jobs
    return warm.warm(cases, [p.name for p in providers], modes, str(where), count, time.time() + 150.0)


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
        Path | None, typer.Option("--json", help="Write every figure and the machine's facts here.")
    ] = None,
    chart: Annotated[Path | None, typer.Option(help="Write a PNG chart here.")] = None,
    baseline: Annotated[
        Path | None, typer.Option(help="A JSON of an earlier run: print what changed against it.")
    ] = None,
    seconds: Annotated[float, typer.Option(min=1.0, help="Time budget; rows that do not fit say so.")] = 450.0,
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
    if compiled := _compile_ahead(chosen, rivals, MODE_CHOICES[mode], where, jobs):
        console.print(f"compiled ahead: {compiled} calls in {time.time() - start:.0f} s")
    figures = f"{top.products / 1e12:.3g} TFLOP/s, {top.bytes / 1e12:.3g} TB/s, {top.exps:.2g} exponentials/s"
    console.print(f"ceilings measured on {where}: {figures}")
    settings = Settings(device=str(where), modes=MODE_CHOICES[mode], ceilings=top, deadline=start + seconds)
    found = _collect(chosen, rivals, settings, where.type == "cuda" if isolate is None else isolate, console)
    times = host_section(where) if host else []
    console.print(tables.report(found, settings.modes))
    if times:
        console.print(tables.host(times))
    if earlier:
        console.print(tables.changes(found, earlier))
    _save(make_report(found, settings, times, time.time() - start), found, settings, json_path, chart, console)
    raise typer.Exit(exit_code(found))
