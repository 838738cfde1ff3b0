"""``biasflash check``: the named cases on this machine's backends against float64, and the wrong calls; a report."""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import os
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from biasflash.backends import ORDER
from biasflash.cli.machine import facts, pick_device
from biasflash.problem import short
from biasflash.testing.cases import CASES, DTYPES, Case, select
from biasflash.testing.conformance import Result, objections, run_case
from biasflash.testing.refusals import REFUSALS, provoke
from biasflash.testing.wrong_call import RefusalError

CHECKED_DTYPES = ("fp16", "bf16", "fp32")
#: seconds after which a case in a process of its own counts as hung; the slowest compiles for half a minute
PATIENCE = 180.0
#: what is said of cases that ``--seconds`` left out
NO_TIME = "the time was used up"


@dataclass(frozen=True, kw_only=True)
class _Job:
    """One backend, case and dtype to run."""

    backend: str
    case: str
    dtype: str
    device: str
    seed: int

    def run(self) -> Result:
        return run_case(self.backend, CASES[self.case], self.device, self.dtype, self.seed)

    def without_running(self, status: str, why: str) -> Result:
        dtype = short(DTYPES[self.dtype])
        return Result(backend=self.backend, case=self.case, dtype=dtype, device=self.device, status=status, message=why)


def _jobs(backends: Sequence[str], cases: Sequence[Case], dtypes: Sequence[str], device: str, seed: int) -> list[_Job]:
    return [
        _Job(backend=name, case=case.name, dtype=dtype, device=device, seed=seed)
        for name in backends
        for case in cases
        for dtype in dtypes
        if dtype in case.dtypes
    ]


def _serve(jobs: Connection, threads: int | None) -> None:
    """What a worker process does: answers each job with its result until the other end closes."""
    if threads is not None:
        torch.set_num_threads(threads)
    while True:
        try:
            job = jobs.recv()
        except EOFError:
            return
        jobs.send(job.run())


class _Worker:
    """A process of its own that runs one job at a time."""

    def __init__(self, number: int, threads: int | None) -> None:
        context = get_context("spawn")
        self.connection, theirs = context.Pipe()
        self.number, self.turn = number, 0
        self.process = context.Process(target=_serve, args=(theirs, threads), daemon=True)
        self.process.start()
        theirs.close()

    def start(self, job: _Job) -> None:
        self.job, self.turn, self.started = job, self.turn + 1, time.monotonic()
        with contextlib.suppress(OSError):  # it is dead, which finish() finds out
            self.connection.send(job)

    def finish(self) -> Result:
        """The result of the job; a process that dies instead is a lost device and a failure."""
        try:
            result: Result = self.connection.recv()
        except (EOFError, OSError):
            self.process.join()
            why = f"the process that ran it died with exit code {self.process.exitcode}"
            result = replace(self.job.without_running("failed", why), device_lost=True)
        return replace(result, process=self.number, turn=self.turn)

    def is_hung(self) -> bool:
        return time.monotonic() - self.started > PATIENCE

    def give_up(self) -> Result:
        """The failure of a job that does not end: a kernel that waits for ever, most likely."""
        why = f"no result after {PATIENCE:g} s; the process was ended"
        result = replace(self.job.without_running("failed", why), device_lost=True)
        return replace(result, process=self.number, turn=self.turn)

    def end(self, patience: float = 0.0) -> None:
        self.connection.close()
        self.process.join(patience)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()


def _spread(jobs: Sequence[_Job], processes: int, numbers: Iterator[int], deadline: float) -> Iterator[Result]:
    """Results as they come. A worker whose device is lost is replaced, so that one fault is one failure."""
    waiting, idle = deque(jobs), list[_Worker]()
    busy: dict[object, _Worker] = {}  # by their end of the pipe
    try:
        while waiting or busy:
            if time.monotonic() > deadline:
                for worker in busy.values():
                    about = f"{worker.job.case} {worker.job.dtype}"
                    yield worker.job.without_running("skipped", f"{NO_TIME} while {about} ran")
                yield from [job.without_running("skipped", NO_TIME) for job in waiting]
                return
            while waiting and len(busy) < processes:
                worker = idle.pop() if idle else _Worker(next(numbers), 1 if processes > 1 else None)
                busy[worker.connection] = worker
                worker.start(waiting.popleft())
            ready = wait([worker.connection for worker in busy.values()], timeout=1.0)
            hung = [worker.connection for worker in busy.values() if worker.is_hung()]
            for connection in dict.fromkeys([*ready, *hung]):
                worker = busy.pop(connection)
                result = worker.finish() if connection in ready else worker.give_up()
                if result.device_lost:
                    worker.end()
                else:
                    idle.append(worker)
                yield result
        for worker in idle:
            worker.end(patience=10.0)
    finally:
        for worker in [*idle, *busy.values()]:
            worker.end()


def _may_lose_device(device: str) -> bool:
    """Whether a faulting kernel takes the device from its process: then no case runs in this one."""
    return device.startswith("cuda")


def _work(jobs: Sequence[_Job], processes: int, apart: bool, deadline: float) -> Iterator[Result]:
    """Results as they come: small cases in ``processes`` processes, those that fill a GPU one by one afterwards.

    ``apart``: one process, too, is one of its own. ``deadline``, of the monotonic clock: what is not done by then is
    skipped; only a case in this process is waited for.
    """
    heavy = [job for job in jobs if CASES[job.case].tags & {"big", "workload"}]
    light = [job for job in jobs if job not in heavy]
    numbers = itertools.count(1)
    for some, side_by_side in ((light, min(processes, len(light))), (heavy, 1)):
        if apart or side_by_side > 1:
            yield from _spread(some, side_by_side, numbers, deadline)
        else:
            for job in some:
                is_late = time.monotonic() > deadline
                yield job.without_running("skipped", NO_TIME) if is_late else job.run()


def _refusals() -> list[dict[str, str]]:
    """Every wrong call with its message, or with what is wrong with the refusal."""
    found = []
    for refusal in REFUSALS.values():
        try:
            found.append({"call": refusal.name, "status": "passed", "message": provoke(refusal)})
        except RefusalError as error:
            found.append({"call": refusal.name, "status": "failed", "message": str(error)})
    return found


def _choose_backends(asked: str | None, device: str) -> tuple[list[str], dict[str, str]]:
    """Backends to run, and those that are passed over with their reasons."""
    names = list(ORDER) if asked is None else [name.strip() for name in asked.split(",")]
    for name in names:
        if name not in ORDER:
            raise typer.BadParameter(f"backend {name!r} is unknown; accepted: {', '.join(ORDER)}")
    reasons = {name: "; ".join(objections(name, device)) for name in names}
    return [n for n in names if not reasons[n]], {n: why for n, why in reasons.items() if why}


def _choose_cases(asked: str | None, device: str) -> list[Case]:
    on_gpu = device.startswith("cuda")
    wanted = asked if asked is not None else "smoke,check" if on_gpu else "smoke"
    try:
        found = select(wanted)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    if on_gpu:
        return found
    # a glob should not send hours of GPU-sized work to a CPU: it takes their name or their tag
    words = {word.strip() for word in wanted.split(",")}
    return [case for case in found if not case.tags & {"workload", "big"} or words & {case.name, *case.tags}]


def _choose_dtypes(asked: str) -> list[str]:
    found = [name.strip() for name in asked.split(",")]
    unknown = [name for name in found if name not in CHECKED_DTYPES]
    if unknown:
        raise typer.BadParameter(f"dtype {unknown[0]!r} is unknown; accepted: {', '.join(CHECKED_DTYPES)}")
    return found


def _summary(results: Sequence[Result], refusals: Sequence[dict[str, str]]) -> Table:
    """One row for each backend and dtype."""
    table = Table(title="against float64: error at most 2 x plain PyTorch's + rounding; every call twice, bit by bit")
    for column in ("backend", "dtype", "passed", "failed", "skipped", "closest to its budget"):
        table.add_column(column, justify="right" if column in ("passed", "failed", "skipped") else "left")
    for backend, dtype in dict.fromkeys((r.backend, r.dtype) for r in results):
        rows = [r for r in results if (r.backend, r.dtype) == (backend, dtype)]
        counts = [sum(r.status == status for r in rows) for status in ("passed", "failed", "skipped")]
        figures = [(f.used, f.tensor, r.case) for r in rows for f in r.figures]
        used, tensor, case = max(figures, default=(0.0, "", ""))
        closest = f"{used:.0%} {tensor} of {case}" if figures else "-"
        style = "red" if counts[1] else None
        table.add_row(backend, dtype, *map(str, counts), closest, style=style)
    good = sum(r["status"] == "passed" for r in refusals)
    table.add_row("wrong calls", "", str(good), str(len(refusals) - good), "0", "", style=None if good else "red")
    return table


def _report(
    device: str,
    results: Sequence[Result],
    refusals: Sequence[dict[str, str]],
    passed_over: dict[str, str],
    seconds: float,
) -> dict[str, Any]:
    """What ``--json`` writes."""
    statuses = [r.status for r in results] + [r["status"] for r in refusals]
    return {
        "machine": facts(device),
        "counts": {
            "checked": sum(status != "skipped" for status in statuses),
            "passed": statuses.count("passed"),
            "failed": statuses.count("failed"),
            "skipped": statuses.count("skipped"),
        },
        "backends_passed_over": passed_over,
        "seconds": round(seconds, 1),
        "results": [
            {
                "backend": r.backend,
                "case": r.case,
                "dtype": r.dtype,
                "status": r.status,
                "message": r.message,
                "seconds": round(r.seconds, 3),
                "process": r.process,
                "turn": r.turn,
                "figures": [f.record() for f in r.figures],
            }
            for r in results
        ],
        "refusals": list(refusals),
    }


def _processes(device: str) -> int:
    """One on a CPU; on a GPU as many as have cores to compile on and 8 GiB for a context and a slice of truth."""
    if not device.startswith("cuda"):
        return 1
    memory = torch.cuda.get_device_properties(torch.device(device)).total_memory
    return max(1, min(12, os.cpu_count() or 1, int(memory // 2**33)))


def _run(console: Console, jobs: Sequence[_Job], processes: int, deadline: float = math.inf) -> list[Result]:
    """All jobs behind a progress bar, in the order of ``jobs``."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    results = []
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("checking", total=len(jobs))
        for result in _work(jobs, processes, _may_lose_device(jobs[0].device) if jobs else False, deadline):
            results.append(result)
            progress.update(task, advance=1, description=f"{result.backend} {result.dtype} {result.case}")
            if result.status == "failed":
                about = f"{result.backend} {result.case} {result.dtype}"
                console.print(f"[bold red]failed[/] {escape(about)}: {escape(result.message)}")
    order = {(job.backend, job.case): i for i, job in enumerate(jobs)}
    return sorted(results, key=lambda r: order[r.backend, r.case])


def check(
    backend: Annotated[
        str | None, typer.Option(help="Comma-separated: " + ", ".join(ORDER) + ". Default: all that run on the device.")
    ] = None,
    device: Annotated[str | None, typer.Option(help="cuda or cpu. Default: cuda if there is one.")] = None,
    cases: Annotated[
        str | None,
        typer.Option(
            help="Comma-separated names, globs or tags (smoke, check, workload, big, all). "
            "Default: smoke,check on a GPU, smoke on a CPU."
        ),
    ] = None,
    dtypes: Annotated[str, typer.Option(help="Comma-separated, of q, k and v.")] = ",".join(CHECKED_DTYPES),
    json_path: Annotated[
        Path | None, typer.Option("--json", help="Write every figure and the machine's facts here.")
    ] = None,
    jobs: Annotated[
        int | None,
        typer.Option(
            min=1, help="Processes, so that kernels compile side by side. Default: up to 12 on a GPU, 1 on a CPU."
        ),
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of the random values.")] = 0,
    seconds: Annotated[
        float | None,
        typer.Option(min=1.0, help="Time budget; cases that do not fit are skipped and say so. Default: none."),
    ] = None,
) -> None:
    """Check this machine: every named case on every backend that runs here, against float64 mathematics.

    Values and gradients must be within a measured budget (twice the error of plain PyTorch in the same dtype, plus
    rounding), two runs of one call must agree bit by bit where the backend promises it, and wrong calls must be refused
    with the right message. Exit code 1 if anything fails, if nothing could be checked, if the time was used up before
    the last case, or if a backend that was named does not run here; the report says what was skipped and which
    hardware it would need.
    """
    console = Console()
    started = time.perf_counter()
    place = str(pick_device(device))
    chosen, wanted = _choose_cases(cases, place), _choose_dtypes(dtypes)
    names, passed_over = _choose_backends(backend, place)
    todo = _jobs(names, chosen, wanted, place, seed)
    processes = jobs or _processes(place)
    refusals = _refusals()
    results = _run(console, todo, processes, math.inf if seconds is None else time.monotonic() + seconds)
    for name, why in passed_over.items():
        results += [job.without_running("skipped", why) for job in _jobs([name], chosen, wanted, place, seed)]
    report = _report(place, results, refusals, passed_over, time.perf_counter() - started)
    _print(console, report, results, refusals)
    if json_path is not None:
        json_path.write_text(json.dumps(report, indent=1) + "\n")
        console.print(f"report: {escape(str(json_path))}")
    ran = any(r.status != "skipped" for r in results)
    is_cut = any(r.status == "skipped" and r.message.startswith(NO_TIME) for r in results)
    if report["counts"]["failed"] or not ran or is_cut or (backend is not None and passed_over):
        raise typer.Exit(1)


def _print(
    console: Console, report: dict[str, Any], results: Sequence[Result], refusals: Sequence[dict[str, str]]
) -> None:
    """The verdict for people."""
    machine, counts = report["machine"], report["counts"]
    console.print(_summary(results, refusals))
    for refusal in refusals:
        if refusal["status"] == "failed":
            console.print(f"[bold red]failed[/] wrong call {escape(refusal['call'])}: {escape(refusal['message'])}")
    for reason in dict.fromkeys(f"backend {r.backend}: {r.message}" for r in results if r.status == "skipped"):
        console.print(f"[yellow]skipped[/] {escape(reason)}")
    software = ", ".join(f"{name} {machine[name]}" for name in ("torch", "triton", "driver", "cuda", "python"))
    console.print(escape(f"biasflash {machine['biasflash']} on {machine['device']}, {software}"))
    if all(r.status == "skipped" for r in results):
        console.print("[bold red]nothing was checked[/]: no backend that was asked for runs here")
    console.print(
        f"{counts['checked']} checked, {counts['passed']} passed, {counts['failed']} failed, "
        f"{counts['skipped']} skipped, {report['seconds']} s"
    )
