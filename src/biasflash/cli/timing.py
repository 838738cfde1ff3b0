"""Clocks of the bench: medians with spread, peak memory, the ceilings of the machine, and host time per call."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from biasflash.testing.case import Ceilings

#: What one measurement may take, its warm-up apart.
REPETITION_MS = 150.0
#: How long host times are warmed up.
SETTLE_S = 4.0
WARM_UP_MS = 40.0
MIN_RUNS, MAX_RUNS = 5, 2000
#: Written between two repetitions; larger than the L2 cache of any GPU sold (the largest is 126 MB).
FLUSH_BYTES = 256 * 2**20
#: Exponentials a multiprocessor finishes per clock (NVIDIA, compute capability 8.0 and later).
EXP_PER_CLOCK = 16

Work = Callable[[], object]


@dataclass(frozen=True, kw_only=True)
class Timing:
    """Milliseconds of one measurement: the median, the 20th and 80th percentile, and how many runs they come from."""

    ms: float
    p20: float
    p80: float
    runs: int


def summarise(samples: list[float]) -> Timing:
    """Median and percentiles (linear between neighbours) of a non-empty list of milliseconds."""
    if len(samples) == 1:
        return Timing(ms=samples[0], p20=samples[0], p80=samples[0], runs=1)
    fifths = statistics.quantiles(samples, n=5, method="inclusive")
    return Timing(ms=statistics.median(samples), p20=fifths[0], p80=fifths[3], runs=len(samples))


def synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _elapsed_ms(work: Work, device: torch.device, runs: int) -> float:
    """Average of a few runs back to back: only to choose the number of repetitions."""
    synchronise(device)
    start = time.perf_counter()
    for _ in range(runs):
        work()
    synchronise(device)
    return (time.perf_counter() - start) * 1e3 / runs


def measure(work: Work, device: torch.device, budget_ms: float = REPETITION_MS) -> Timing:
    """Times ``work`` for about ``budget_ms`` after a warm-up.

    On CUDA every run sits between two events of its own and finds a cold L2: a large buffer is written before it. The
    host runs ahead all the while, so launch costs show only where the kernels are shorter than their launches.
    On CPU the wall clock of each run is taken, caches as the previous run left them.
    """
    work()  # untimed: it may still compile, and an estimate from it would leave three runs to the median
    estimate = max(_elapsed_ms(work, device, 1), 1e-3)
    if estimate < budget_ms:
        estimate = max(_elapsed_ms(work, device, 3), 1e-3)
    for _ in range(min(MAX_RUNS, int(min(WARM_UP_MS, budget_ms) / estimate))):
        work()
    runs = max(MIN_RUNS if estimate < budget_ms else 3, min(MAX_RUNS, int(budget_ms / estimate)))
    return summarise(_cuda_samples(work, device, runs) if device.type == "cuda" else _cpu_samples(work, runs))


def _cpu_samples(work: Work, runs: int) -> list[float]:
    samples = []
    for _ in range(runs):
        start = time.perf_counter()
        work()
        samples.append((time.perf_counter() - start) * 1e3)
    return samples


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def _cuda_samples(work: Work, device: torch.device, runs: int) -> list[float]:
    with torch.cuda.device(device):
        flush = torch.empty(FLUSH_BYTES // 4, dtype=torch.int32, device=device)
        pairs = [(_event(), _event()) for _ in range(runs)]
        for start, stop in pairs:
            flush.zero_()
            start.record()
            work()
            stop.record()
        torch.cuda.synchronize(device)
        return [start.elapsed_time(stop) for start, stop in pairs]


def first_call_seconds(work: Callable[[], Any], device: torch.device) -> tuple[Any, float]:
    """Result and wall time of a call that may compile, waited for."""
    synchronise(device)
    start = time.perf_counter()
    result = work()
    synchronise(device)
    return result, time.perf_counter() - start


def peak_mib(work: Callable[[], Any], device: torch.device) -> tuple[Any, float | None]:
    """Result of ``work`` and the most memory it had at once beyond what was there before; None on CPU."""
    if device.type != "cuda":
        return work(), None
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    result = work()
    torch.cuda.synchronize(device)
    return result, (torch.cuda.max_memory_allocated(device) - before) / 2**20


# --------------------------------------------------------------------------------------------------------- ceilings


def _clock_hz(device: torch.device) -> float:
    """The highest clock of the multiprocessors: torch's figure, which older releases did not tell, else 1.7 GHz."""
    kilohertz = getattr(torch.cuda.get_device_properties(device), "clock_rate", None)
    return float(kilohertz) * 1e3 if kilohertz else 1.7e9


def ceilings(device: torch.device) -> Ceilings:
    """What the device does at best, measured now.

    Products: one large square product (bf16 of 8192 on CUDA, float32 of 1024 on CPU). Bytes: read plus written by a
    large copy. Exponentials: the special-function units at the highest clock on CUDA, ``torch.exp`` timed on CPU.
    """
    if device.type == "cuda":
        size, dtype, length = 8192, torch.bfloat16, 2**28
    else:
        size, dtype, length = 1024, torch.float32, 2**24
    a = torch.randn(size, size, device=device, dtype=dtype)
    b = torch.randn(size, size, device=device, dtype=dtype)
    product = measure(lambda: a @ b, device, 300.0).ms
    source = torch.randn(length, device=device)
    target = torch.empty_like(source)
    copy = measure(lambda: target.copy_(source), device, 200.0).ms
    if device.type == "cuda":
        count = torch.cuda.get_device_properties(device).multi_processor_count
        exponentials = count * EXP_PER_CLOCK * _clock_hz(device)
    else:
        exponentials = length / measure(lambda: torch.exp(source, out=target), device, 100.0).ms * 1e3
    return Ceilings(products=2e3 * size**3 / product, bytes=8e3 * length / copy, exps=exponentials)


# -------------------------------------------------------------------------------------------------------- host time


def settle(works: Sequence[Work], device: torch.device, seconds: float = SETTLE_S) -> None:
    """Calls all of them in turn for a while, so that what is timed next is not a process that has just begun.

    For about the first 3 s on an H200's host a call took twice as long as later: 66 us, then 32, beside 24 and 15 of
    torch's attention.
    """
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        for work in works:
            work()
        synchronise(device)


def host_us(work: Work, device: torch.device, calls: int = 200, rounds: int = 15) -> Timing:
    """Microseconds the host spends in one call of ``work``, from ``rounds`` averages over ``calls`` calls.

    Nothing is waited for inside a round, so on CUDA this is the cost of asking, not of computing; the queue is emptied
    between rounds so that it never fills up. On CPU it is the whole call. (The fields of the result are microseconds.)
    """
    for _ in range(20):
        work()
    samples = []
    for _ in range(rounds):
        synchronise(device)
        start = time.perf_counter()
        for _ in range(calls):
            work()
        samples.append((time.perf_counter() - start) * 1e6 / calls)
    synchronise(device)
    return summarise(samples)
