"""Kernels compiled ahead of their first call, many at once: processes that fill Triton's cache and touch no GPU.

The commands that time many kernels use it; a call of the library never does.
"""

from __future__ import annotations

import dataclasses
import multiprocessing
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from biasflash import problem as problems
from biasflash.problem import Problem
from biasflash.testing.case import DTYPES, Case

#: what ``Pool.wait`` says when the deadline came first
NO_TIME = "no time"


@dataclass(frozen=True, kw_only=True)
class Target:
    """The GPU that is compiled for: Triton's description of it, what plans look at, and the table of tiles in force."""

    triton: Any  # triton.backends.compiler.GPUTarget
    device: Any  # backends.triton.operands.Device
    tiles: Any  # backends.triton.tables.Choices, or None


def here(device: torch.device) -> Target:
    """The target of this process's GPU."""
    import triton

    from biasflash.backends.triton import tables
    from biasflash.backends.triton.operands import device_facts

    with torch.cuda.device(device):
        found = device_facts(device)
        return Target(triton=triton.runtime.driver.active.get_current_target(), device=found, tiles=tables.active())


def problem_of(case: Case, device: torch.device) -> Problem:
    """The problem of a case's call with contiguous tensors on ``device``, without making one."""

    def meta(shape: Sequence[int], dtype: torch.dtype, trained: bool = False) -> torch.Tensor:
        return torch.empty(tuple(shape), dtype=dtype, device="meta", requires_grad=trained)

    own = DTYPES[case.dtype]
    q = meta((*case.batch, case.M, case.Hq, case.D), own, "q" in case.trained)
    k = meta((*case.batch, case.N, case.Hkv, case.D), own, "k" in case.trained)
    v = meta((*case.batch, case.N, case.Hkv, case.Dv), own, "v" in case.trained)
    biases = [
        meta(case.term_shape(b.shape), own if b.dtype == "same" else DTYPES[b.dtype], b.trained) for b in case.biases
    ]
    masks = [meta(case.term_shape(m.shape), torch.bool) for m in case.masks]
    terms, kinds = problems.gather_terms(biases, masks, q, k)
    found = problems.build(q, k, v, terms, kinds, problems.check_causal(case.causal), case.scale)
    return dataclasses.replace(found, device=device)


def recipes_of(problem: Problem, target: Target, tiles: Any = None) -> dict[str, Any]:
    """Both passes of a problem as they would be planned with ``tiles`` (None: the target's) in force."""
    from biasflash.backends.triton import tables
    from biasflash.backends.triton.plans import contiguous_recipes

    with tables.using(target.tiles if tiles is None else tiles):
        return contiguous_recipes(problem, target.device)


@dataclass(frozen=True, kw_only=True)
class Task:
    """One launch to compile: the ``index``-th of pass ``title`` of a problem, planned with ``tiles`` in force."""

    problem: Problem
    title: str
    index: int
    tiles: Any = None  # None: the target's


def compile_task(task: Task, target: Target) -> None:
    """Compiles one launch into Triton's cache, under the key that the launch itself will look up."""
    from biasflash.testing.offline import meta_tensors

    recipe = recipes_of(task.problem, target, task.tiles)[task.title]
    launch = recipe.launches[task.index]
    options = launch.options(capped=target.triton.backend == "cuda")
    launch.kernel.warmup(*launch.values(meta_tensors(task.problem, recipe)), grid=(launch.grid,), **options)


class _Away:
    """What Triton asks of a driver before it compiles, answered for a GPU that this process does not open."""

    def __init__(self, target: Any) -> None:
        self._target = target

    def get_current_target(self) -> Any:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


_target: Target | None = None


def _start(target: Target) -> None:
    """A worker's first act. One thread: there are as many workers as cores."""
    import triton

    global _target
    _target = target
    torch.set_num_threads(1)
    triton.runtime.driver.set_active(_Away(target.triton))


def _attempt(task: Task) -> str:
    """Empty, or in a few words why the launch does not compile."""
    assert _target is not None
    try:
        compile_task(task, _target)
    except Exception as error:
        return " ".join(f"{type(error).__name__}: {error}".split())[:200]
    return ""


class Pool:
    """Launches being compiled by processes of their own, in the order in which they were asked for."""

    def __init__(self, workers: Any, target: Target, patience: float) -> None:
        self._workers, self._target, self._patience = workers, target, patience
        self._pending: dict[Any, Any] = {}  # compile key -> result to come

    def __len__(self) -> int:
        """How many different launches were asked for."""
        return len(self._pending)

    def submit(self, problem: Problem, title: str, tiles: Any = None) -> list[Any]:
        """Asks for every launch of a pass; launches that share a compile key are compiled once. What to wait for."""
        from biasflash.testing.offline import compile_key, meta_tensors

        recipe = recipes_of(problem, self._target, tiles)[title]
        tensors = meta_tensors(problem, recipe)
        keys = [compile_key(launch, tensors) for launch in recipe.launches]
        for index, key in enumerate(keys):
            if key not in self._pending:
                task = Task(problem=problem, title=title, index=index, tiles=tiles)
                self._pending[key] = self._workers.apply_async(_attempt, (task,))
        return keys

    def wait(self, keys: Sequence[Any], deadline: float) -> str:
        """Empty once all of ``keys`` are compiled, else why one is not. Nothing is waited for after ``deadline``."""
        for key in keys:
            patience = min(self._patience, deadline - time.time())
            try:
                complaint = str(self._pending[key].get(timeout=max(0.0, patience)))
            except multiprocessing.TimeoutError:
                complaint = NO_TIME if time.time() >= deadline else f"not compiled after {self._patience:.0f} s"
            if complaint:
                return complaint
        return ""


@contextmanager
def pool(target: Target, processes: int | None = None, patience: float = 60.0) -> Iterator[Pool]:
    """Processes that compile; on exit they are ended, whatever they do.

    Args:
        target: what is compiled for.
        processes: how many; None: one fewer than there are cores, for the one that measures.
        patience: seconds after which a launch that is waited for is given up.
    """
    count = processes or max(1, (os.cpu_count() or 2) - 1)
    with multiprocessing.get_context("spawn").Pool(count, _start, (target,)) as workers:
        yield Pool(workers, target, patience)
