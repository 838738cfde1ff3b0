"""Compilers' caches filled before the clock runs: every case once through the providers that compile, side by side.

Triton and Inductor keep what they compiled on disk, so that the process which measures finds it there. Results and
failures are of no interest here: the gate meets both again.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Sequence

import torch

from biasflash.cli import rows
from biasflash.cli.providers import OURS, PORTABLE, PROVIDERS
from biasflash.testing.case import Case

#: providers that compile kernels at their first call
COMPILING = ("flex", OURS, PORTABLE, "fa4")
#: what one process may need: a CUDA context, inputs, results and gradients of the largest workload
PROCESS_BYTES = 8 * 2**30


def processes_for(device: torch.device) -> int:
    """As many as cores and the GPU's free memory allow, at most 14; 0 without a GPU, where little is compiled."""
    if device.type != "cuda":
        return 0
    free, _ = torch.cuda.mem_get_info(device)
    return min(14, max(1, (os.cpu_count() or 2) - 2), int(free // PROCESS_BYTES))


def _start() -> None:
    """A worker's first act: Inductor compiles in the worker itself, which may not start processes of its own.

    A signal to the whole process group, as ``timeout`` sends it, passes workers by: one that dies while it waits for
    work takes the queue's lock along, and the pool could not be ended any more. The pool ends each by its id.
    """
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
    if hasattr(os, "setpgrp"):  # not on Windows
        os.setpgrp()
    torch.set_num_threads(1)


def once(case: Case, provider: str, modes: Sequence[str], device: str) -> str:
    """One forward pass, and one with its backward pass; an empty text, or what went wrong in a few words."""
    complaint = ""
    for mode in modes:
        try:
            call = case.build(device)
            prepare = PROVIDERS[provider].prepare
            if mode == "fwd":
                with torch.no_grad():
                    prepare(rows.detached(call))()
            else:
                torch.autograd.grad(prepare(call)(), list(call.leaves().values()), call.dout)
        except Exception as error:
            complaint = rows.excuse(error)[1]
    return complaint


def warm(
    cases: Sequence[Case], providers: Sequence[str], modes: Sequence[str], device: str, processes: int, deadline: float
) -> int:
    """Runs ``once`` for every case and every one of ``providers`` that compiles; how many were done by ``deadline``."""
    jobs = [
        (case, name, tuple(modes), device)
        for name in COMPILING
        if name in providers and not PROVIDERS[name].missing()
        for case in cases
    ]
    if not jobs or processes < 1:
        return 0
    done = 0
    # a fresh process after every few cases: what a compiler keeps in memory adds up
    count = min(processes, len(jobs))
    with multiprocessing.get_context("spawn").Pool(count, _start, maxtasksperchild=4) as pool:
        pending = [pool.apply_async(once, job) for job in jobs]
        for result in pending:
            try:
                result.get(timeout=max(0.0, deadline - time.time()))
            except multiprocessing.TimeoutError:
                break
            done += 1
    return done
