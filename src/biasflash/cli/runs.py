"""A run of the bench: every provider on every case, in this process or in processes of their own."""

from __future__ import annotations

import dataclasses
import multiprocessing
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection

import torch

from biasflash.cli import rows, timing
from biasflash.cli.providers import Provider
from biasflash.cli.rows import Row, Target
from biasflash.testing.case import Case, Ceilings, floor_ms

#: A provider's process that gives no row for so long is ended. (A cold compile of the slowest rival takes under 60 s.)
SILENCE_S = 150.0
#: A provider whose processes ended early this often gets no further one.
MAX_PROCESSES = 6
#: Up to so many scores this library's results are also judged by the budget of ``biasflash check`` (in float64).
SMALL_SCORES = {"cuda": 1e8, "cpu": 5e6}


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What every row of a run shares. ``deadline`` is wall-clock time; rows after it are given up."""

    device: str
    modes: tuple[str, ...]
    ceilings: Ceilings
    deadline: float
    budget_ms: float = timing.REPETITION_MS
    silence_s: float = SILENCE_S


def make_target(case: Case, settings: Settings) -> Target:
    """Random inputs of a case, and the figures its times are read against."""
    call = dataclasses.replace(case.build(settings.device), dlse=None)  # no rival takes a gradient into lse
    return Target(
        case=case.name,
        call=call,
        flops={mode: case.flops(mode == "fwdbwd") for mode in settings.modes},
        floor_ms={mode: floor_ms(case, mode == "fwdbwd", settings.ceilings) for mode in settings.modes},
        is_small=case.scores <= SMALL_SCORES[torch.device(settings.device).type],
    )


def run_case(case: Case, providers: Sequence[Provider], settings: Settings) -> Iterator[Row]:
    """All providers on one case in this process; the inputs and the reference are made once."""

    def blank(provider: Provider, status: str, reason: str) -> Row:
        return rows.blank(case.name, provider.name, settings.modes, status, reason)

    target: Target | None = None
    failure = ""
    for provider in providers:
        if provider.needs_cuda and not settings.device.startswith("cuda"):
            yield blank(provider, rows.NEEDS_CUDA, "")
            continue
        if time.time() > settings.deadline:
            yield blank(provider, rows.NO_TIME, "the time budget was used up")
            continue
        if target is None and not failure:
            try:
                target = make_target(case, settings)
            except torch.OutOfMemoryError:
                failure = "no memory for the inputs"
        yield (
            rows.run_row(provider, target, settings.modes, settings.budget_ms)
            if target
            else blank(provider, rows.ERROR, failure)
        )
        if settings.device.startswith("cuda"):
            torch.cuda.empty_cache()


def _worker(pipe: Connection, provider: Provider, cases: Sequence[Case], settings: Settings) -> None:
    """Body of a provider's process: one message per row, or None when it cannot go on (its CUDA context is lost)."""
    for case in cases:
        sent = False
        try:
            for row in run_case(case, [provider], settings):
                pipe.send(row)
                sent = True
            timing.synchronise(torch.device(settings.device))
        except Exception as error:
            if not sent:
                pipe.send(rows.blank(case.name, provider.name, settings.modes, *rows.excuse(error)))
            pipe.send(None)
            return


def _receive(pipe: Connection, patience: float) -> Row | str | None:
    """A row; None if the sender cannot go on; or a text that says what became of it."""
    try:
        if not pipe.poll(patience):
            return f"gave no answer within {patience:.0f} s"
        message = pipe.recv()
    except EOFError:
        return "its process ended"
    assert message is None or isinstance(message, Row)
    return message


def _rows_of_one_process(provider: Provider, cases: Sequence[Case], settings: Settings) -> Iterator[Row]:
    """Rows of a fresh process until it has done all, crashes or hangs; the case at fault gets a row that says so."""
    context = multiprocessing.get_context("spawn")
    receive, send = context.Pipe(duplex=False)
    # not a daemon: compilers start processes of their own, which daemons may not
    process = context.Process(target=_worker, args=(send, provider, list(cases), settings))
    process.start()
    send.close()
    try:
        for case in cases:
            patience = max(1.0, min(settings.silence_s, settings.deadline + 30.0 - time.time()))
            message = _receive(receive, patience)
            if message is None:
                break
            if isinstance(message, str):
                if message == "its process ended":
                    process.join(10.0)
                    message += f" with exit code {process.exitcode}"
                yield rows.blank(case.name, provider.name, settings.modes, rows.ERROR, message)
                process.kill()
                break
            yield message
        process.join(10.0)
    finally:
        process.kill()
        process.join()
        receive.close()


def isolated(provider: Provider, cases: Sequence[Case], settings: Settings) -> Iterator[Row]:
    """One provider on all cases in a process of its own; a new one for the cases that follow a crash or a hang."""
    done = 0
    for _ in range(MAX_PROCESSES):
        for row in _rows_of_one_process(provider, cases[done:], settings):
            done += 1
            yield row
        if done == len(cases):
            return
    for case in cases[done:]:
        reason = f"not run: {MAX_PROCESSES} processes of this provider ended early"
        yield rows.blank(case.name, provider.name, settings.modes, rows.ERROR, reason)


def run(cases: Sequence[Case], providers: Sequence[Provider], settings: Settings, *, isolate: bool) -> Iterator[Row]:
    """Every row of a run: provider by provider in processes of their own, or else case by case in this one."""
    present = []
    for provider in providers:
        missing = provider.missing()
        if not missing:
            present.append(provider)
        for case in cases if missing else ():
            yield rows.blank(case.name, provider.name, settings.modes, rows.NOT_INSTALLED, missing)
    if isolate:
        for provider in present:
            yield from isolated(provider, cases, settings)
    else:
        for case in cases:
            yield from run_case(case, present, settings)
