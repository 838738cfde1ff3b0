"""One row of the bench: a provider on a case, its results held against the reference first, then against the clock."""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from biasflash.cli import gate, timing
from biasflash.cli.providers import OURS, NotInstalled, Provider, Refused

if TYPE_CHECKING:
    from biasflash.testing.case import Call

#: "fwd" is the forward pass alone under no_grad; "fwdbwd" adds the backward pass with every gradient.
MODES = ("fwd", "fwdbwd")
OK, RED, REFUSED, NOT_INSTALLED, NEEDS_CUDA = "ok", "red", "refused", "not installed", "needs CUDA"
ERROR, NO_TIME = "error", "no time"
REASON_LENGTH = 200
OUT_OF_TIME = "the time budget was used up"
#: What a provider's next row may take is the slowest of so many rows before it: neighbouring cases are alike.
RECENT = 3


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One mode of one row. Speeds are None unless ``status`` is "ok"; ``errors`` are there whenever it ran.

    ``ms``, ``p20``, ``p80``: median and percentiles of ``runs`` repetitions. ``fraction``: floor over median.
    ``first_call_s``: preparation and first call, compilation included.
    """

    status: str
    reason: str = ""
    errors: dict[str, float] = field(default_factory=dict)
    first_call_s: float | None = None
    ms: float | None = None
    p20: float | None = None
    p80: float | None = None
    runs: int | None = None
    tflops: float | None = None
    floor_ms: float | None = None
    fraction: float | None = None


@dataclass(frozen=True, kw_only=True)
class Row:
    """A provider on a case. ``limit`` is the gate's; ``peak_mib`` is the most memory that forward and backward had at
    once beyond the inputs, of which ``results_mib`` are the output and the gradients."""

    case: str
    provider: str
    cells: dict[str, Cell]
    dtype: str | None = None
    limit: float | None = None
    peak_mib: float | None = None
    results_mib: float | None = None

    @property
    def is_red(self) -> bool:
        return any(cell.status == RED for cell in self.cells.values())


@dataclass(frozen=True, kw_only=True)
class Timely(Provider):
    """A provider that begins no row which would not be done by ``deadline`` (wall-clock time).

    ``took``: seconds of its rows so far, of those that ran at all. A provider without any begins its first one.
    """

    deadline: float
    took: list[float] = field(default_factory=list, compare=False)

    @property
    def is_late(self) -> bool:
        return time.time() + max(self.took[-RECENT:], default=0.0) > self.deadline


def until(provider: Provider, deadline: float) -> Timely:
    """The same provider, with a deadline."""
    return Timely(**vars(provider), deadline=deadline)


@dataclass(frozen=True, kw_only=True)
class Target:
    """What a row is measured on and against: the inputs, their reference, per mode FLOPs and floor (ms).

    ``is_small``: float64 truth is affordable, so this library's own results are also held to the conformance budget.
    """

    case: str
    call: Call
    flops: dict[str, float]
    floor_ms: dict[str, float]
    is_small: bool = False

    @functools.cached_property
    def truth(self) -> gate.Truth:
        """The reference, made once and only if some provider gave results."""
        return gate.reference(self.call)


@dataclass(kw_only=True)
class _Trial:
    """A mode under test: the function to time, and what it gave the first time."""

    work: Callable[[], Any]
    errors: dict[str, float]
    first_call_s: float
    complaint: str = ""
    peak_mib: float | None = None
    results_mib: float | None = None


def blank(case: str, provider: str, modes: tuple[str, ...], status: str, reason: str) -> Row:
    """A row with nothing in it but why."""
    return Row(case=case, provider=provider, cells={mode: Cell(status=status, reason=reason) for mode in modes})


def detached(call: Call) -> Call:
    """The same tensors without gradients, so that no provider plans for a backward pass."""
    inputs = {name: t.detach() for name, t in call.inputs.items()}
    return dataclasses.replace(call, inputs=inputs, bias=[t.detach() for t in call.bias])


def excuse(error: Exception) -> tuple[str, str]:
    """Status and reason of a provider that raised."""
    text = " ".join(str(error).split())[:REASON_LENGTH]
    if isinstance(error, NotInstalled):
        return NOT_INSTALLED, text
    if isinstance(error, (Refused, NotImplementedError)):
        return REFUSED, text
    if isinstance(error, torch.OutOfMemoryError):
        return ERROR, "out of memory"
    return ERROR, f"{type(error).__name__}: {text}"


def _forward_trial(provider: Provider, target: Target) -> _Trial:
    call = detached(target.call)
    device = call.q.device

    def start() -> tuple[Callable[[], Tensor], Tensor]:
        attend = provider.prepare(call)
        return attend, attend()

    with torch.no_grad():
        (attend, out), seconds = timing.first_call_seconds(start, device)
    found = {"out": out}
    return _Trial(work=attend, errors=gate.compare(found, target.truth), first_call_s=seconds)


def _both_trial(provider: Provider, target: Target) -> _Trial:
    call, leaves = target.call, target.call.leaves()
    device = call.q.device
    attends: list[Callable[[], Tensor]] = []

    def work() -> tuple[Tensor, ...]:
        out = attends[0]()
        return out.detach(), *torch.autograd.grad(out, list(leaves.values()), call.dout)

    def start() -> tuple[Tensor, ...]:
        attends.append(provider.prepare(call))
        return work()

    results, seconds = timing.first_call_seconds(start, device)
    peak = None
    if device.type == "cuda":  # once more: the first call may have tuned and compiled
        del results
        results, peak = timing.peak_mib(work, device)
    found = dict(zip(("out", *leaves), results, strict=True))
    trial = _Trial(work=work, errors=gate.compare(found, target.truth), first_call_s=seconds, peak_mib=peak)
    trial.results_mib = sum(t.numel() * t.element_size() for t in results) / 2**20
    if target.is_small and provider.name == OURS:
        trial.complaint = _over_budget(target.call, found)
    return trial


def _over_budget(call: Call, found: dict[str, Tensor]) -> str:
    """What the conformance budget (twice the error of plain PyTorch) has against the results; empty if nothing."""
    from biasflash.testing.errors import BudgetError, judge

    apart = dict(found)
    for packed, names in (("dqkv", ("dq", "dk", "dv")), ("dkv", ("dk", "dv"))):
        if packed in apart:
            apart |= dict(zip(names, apart.pop(packed).unbind(-3), strict=True))
    try:
        judge(call, apart)
    except BudgetError as error:
        return " ".join(str(error).split())[:REASON_LENGTH]
    return ""


def _timed(trial: _Trial, mode: str, target: Target, budget_ms: float) -> Cell:
    with torch.set_grad_enabled(mode == "fwdbwd"):
        took = timing.measure(trial.work, target.call.q.device, budget_ms)
    return Cell(
        status=OK,
        errors=trial.errors,
        first_call_s=trial.first_call_s,
        **dataclasses.asdict(took),
        tflops=target.flops[mode] / took.ms / 1e9,
        floor_ms=target.floor_ms[mode],
        fraction=target.floor_ms[mode] / took.ms,
    )


def _red_reason(trials: dict[str, _Trial], limit: float) -> str:
    """Why a row is red, or an empty text."""
    worst = {name: error for trial in trials.values() for name, error in trial.errors.items() if not error <= limit}
    if worst:
        return ", ".join(f"{name} is off by {error:.1e}" for name, error in worst.items()) + f" (limit {limit:.0e})"
    return next((trial.complaint for trial in trials.values() if trial.complaint), "")


def run_row(
    provider: Provider, target: Target, modes: tuple[str, ...] = MODES, budget_ms: float = timing.REPETITION_MS
) -> Row:
    """Gate, then clock. If any result of any mode is outside the limit, no mode gets a speed.

    A ``Timely`` provider with too little time left gets neither.
    """
    if not isinstance(provider, Timely):
        return _measured(provider, target, modes, budget_ms)
    if provider.is_late:
        return blank(target.case, provider.name, modes, NO_TIME, OUT_OF_TIME)
    start = time.time()
    row = _measured(provider, target, modes, budget_ms)
    if any(cell.first_call_s is not None for cell in row.cells.values()):  # refusals are quick, and foretell nothing
        provider.took.append(time.time() - start)
    return row


def _measured(provider: Provider, target: Target, modes: tuple[str, ...], budget_ms: float) -> Row:
    q = target.call.q
    limit = gate.limit_for(q.dtype, q.device)
    cells: dict[str, Cell] = {}
    trials: dict[str, _Trial] = {}
    for mode in modes:
        try:
            trials[mode] = (_forward_trial if mode == "fwd" else _both_trial)(provider, target)
        except Exception as error:
            status, reason = excuse(error)
            cells[mode] = Cell(status=status, reason=reason)
    red = _red_reason(trials, limit)
    for mode, trial in trials.items():
        if red:
            cells[mode] = Cell(status=RED, reason=red, errors=trial.errors, first_call_s=trial.first_call_s)
            continue
        try:
            cells[mode] = _timed(trial, mode, target, budget_ms)
        except Exception as error:
            status, reason = excuse(error)
            cells[mode] = Cell(status=status, reason=reason, errors=trial.errors, first_call_s=trial.first_call_s)
    both = trials.get("fwdbwd")
    return Row(
        case=target.case,
        provider=provider.name,
        dtype=str(q.dtype).removeprefix("torch."),
        limit=limit,
        cells={mode: cells[mode] for mode in modes},
        peak_mib=both.peak_mib if both else None,
        results_mib=both.results_mib if both else None,
    )
