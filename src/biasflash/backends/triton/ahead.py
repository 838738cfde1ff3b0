"""Kernels compiled side by side before their first launch, and with them those that other lengths of the call need.

A length is a run-time argument, but a few facts of it are not: whether rows of a bias are in steps of 16 bytes, whether
the last tile of keys is a whole one (on Hopper), whether few queries share out their keys. The first call of its kind
compiles for all of them, so that later ones find everything ready.
"""

from __future__ import annotations

import contextvars
import gc
import logging
import os
import sys
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, TypeAlias

import torch
import triton
from torch import Tensor

from biasflash.backends.triton.forward_plan import RULE, SplitRule
from biasflash.backends.triton.geometry import stretched
from biasflash.backends.triton.operands import Facts, Launch, gradient_strides
from biasflash.backends.triton.recipe import Recipe
from biasflash.problem import Problem, Term

log = logging.getLogger("biasflash")

#: set to ``off``, a call compiles its own kernels alone: for processes that make many kinds of call once each
VARIABLE = "BIASFLASH_AHEAD"
#: more threads than this share Python's lock, which a compile holds for about a third of its time
MOST_WORKERS = 8
#: kernels that only some lengths of a call need: sums of key pieces and of a bias gradient's chunks, a bias copied
PARTS = ("merge_kernel", "add_chunks_kernel", "align_rows_kernel")
#: constants by which lengths differ for another reason: one tile holds an axis, a bias outgrows the cache
REGIME = ("SHORT_M", "SHORT_N", "ORDER")
#: tiles shrink with an axis up to here; above, they differ where rows that are not aligned have a rule of their own
LONGEST_TILE = 128
#: a length at which every tile has its full size and the sum of a shared bias's gradient is cut into most chunks
SHORT = 256
#: keys that come in many pieces, if they come in pieces at all
MANY_PIECES = 8192

#: makes the recipe of a problem, torch's float32 setting, and facts of tensors
Plan: TypeAlias = Callable[[Problem, str, Facts], Recipe]
#: a launch and the tensors that it is asked for with
Asked: TypeAlias = tuple[Launch, Mapping[str, Tensor]]

_lock = threading.Lock()


def meta_tensors(problem: Problem, recipe: Recipe) -> dict[str, Tensor]:
    """A stand-in on the meta device for every slot a recipe of ``problem`` may name; only dtypes matter."""

    def like(dtype: torch.dtype) -> Tensor:
        return torch.empty(1, dtype=dtype, device="meta")

    tensors = {name: like(problem.dtype) for name in ("q", "k", "v", "out", "dout", "dq", "dk", "dv")}
    tensors |= {name: like(torch.float32) for name in ("lse", "low", "dlse", *(name for name, _ in recipe.scratch))}
    tensors |= {name: like(torch.int32) for name, _ in recipe.zeroed}
    for i, term in enumerate(problem.terms):
        tensors[f"bias{i}"] = like(torch.uint8 if term.dtype == torch.bool else term.dtype)
        tensors[f"grad{i}"] = tensors[f"dense_grad{i}"] = like(term.dtype)
    return tensors


# ----------------------------------------------------------------------------------------------------- other lengths


def at_length(problem: Problem, facts: Facts, length: int) -> tuple[Problem, Facts]:
    """The same call with ``length`` keys, and as many queries where it has as many; its tensors lie as they did."""
    p = problem
    M = length if p.M == p.N else p.M

    def grown(term: Term) -> Term:
        *outer, rows, columns = term.shape
        return replace(term, shape=(*outer, M if rows == p.M else rows, length if columns == p.N else columns))

    shift = p.causal_shift and length - M  # bottom-right; no shift stays none, and top-left is 0
    other = replace(p, M=M, N=length, terms=tuple(map(grown, p.terms)), causal_shift=shift)
    names, strides, aligned = facts
    moved = []
    for name, step in zip(names, strides, strict=True):
        own, new = _shape(p, name), _shape(other, name)
        if name.startswith("grad"):
            before, after = (gradient_strides(x, x.terms[int(name[4:])]) for x in (p, other))
            if step == before:
                moved.append(after)
                continue
        moved.append(tuple(stretched(step, own, new)) if len(step) == len(own) else step)  # else empty: ``low``, unused
    return other, (names, tuple(moved), aligned)


def _shape(problem: Problem, name: str) -> tuple[int, ...]:
    """The shape of a call's tensor, as ``launch`` names it."""
    p = problem
    if name.startswith(("bias", "grad")):
        return p.terms[int(name[4:])].shape
    if name in ("k", "v", "dk", "dv"):
        return (*p.batch, p.N, p.Hkv, p.D if name.endswith("k") else p.Dv)
    if name in ("q", "out", "dout", "dq"):
        return (*p.batch, p.M, p.Hq, p.D if name.endswith("q") else p.Dv)
    return (*p.batch, p.Hq, p.M)


def _near(length: int) -> set[int]:
    """Lengths that take the same tiles, on both sides of ``length``, as a border may lie between (``_kinds``).

    Of every alignment one: a multiple of 8, one of 4 (a float32 bias minds) and neither; and where there are several
    tiles, a length of whole ones and one that leaves a rest.
    """
    bases = {max(8, (length - 1) // 8 * 8), -(-length // 8) * 8}
    found = {base + more for base in bases for more in (0, 1, 4)}
    return found | {-(-length // 256) * 256} if length > LONGEST_TILE else found


def _edges(problem: Problem, rule: SplitRule) -> tuple[int, int, int]:
    """Numbers of keys of a call that may share them out: just too few, enough, and enough for many pieces."""
    queries = problem.M if problem.M > 1 else problem.Hq // problem.Hkv  # grouped heads of one query are rows of a tile
    enough = rule.enough_keys(queries)
    return enough - 16, enough, max(enough, MANY_PIECES)


def _kinds(recipe: Recipe, length: int) -> set[tuple[object, ...]]:
    """Kernels without ``PARTS``, the order of their programs, and the tiles of short lengths."""
    launches = [launch for launch in recipe.launches if launch.kernel.__name__ not in PARTS]
    names = REGIME if length > LONGEST_TILE else (*REGIME, "BLOCK_M", "BLOCK_N")
    return {(x.kernel.__module__, x.kernel.__name__, *map(x.arguments.get, names)) for x in launches}


def _packages(recipe: Recipe) -> set[str]:
    """Where its kernels are from. A Hopper plan has portable ones alone where rows of a large bias are not aligned."""
    return {launch.kernel.__module__.rpartition(".")[0] for launch in recipe.launches}


def others(recipe: Recipe, problem: Problem, precision: str, facts: Facts, plan: Plan) -> Iterator[Asked]:
    """Launches that the call of ``recipe`` has at other lengths; most are those of the recipe itself.

    None for windows, as a model has one length of them. Nor where a tensor starts between multiples of 16 bytes:
    stand-ins do not.
    """
    p = problem
    is_window = any("window" in launch.kernel.__name__ for launch in recipe.launches)
    if p.N == 1 or not all(facts[2]) or is_window:
        return

    def planned(length: int) -> tuple[Problem, Recipe]:
        other, moved = at_length(p, facts, length)
        return other, plan(other, precision, moved)

    lengths, for_parts = _near(p.N), []
    if p.M != p.N and "dout" not in facts[0]:
        few, enough, many = _edges(p, RULE)
        if any(launch.arguments.get("SPLIT") for launch in planned(enough)[1].launches):
            lengths |= _near(few) | _near(enough)
            for_parts.append(planned(many))
    elif any(launch.kernel.__name__ == "dbias_kernel" for launch in recipe.launches):
        for_parts.append(planned(SHORT))
    for other, found in for_parts:
        tensors = meta_tensors(other, found)
        yield from ((launch, tensors) for launch in found.launches if launch.kernel.__name__ in PARTS)
    for other, found in map(planned, sorted(lengths - {p.N})):
        shorter = min(p.N, other.N)
        if _kinds(found, shorter) == _kinds(recipe, shorter) or _packages(found) != _packages(recipe):
            tensors = meta_tensors(other, found)
            yield from ((launch, tensors) for launch in found.launches)


# ----------------------------------------------------------------------------------------------------------- compiling


def compile_together(
    recipe: Recipe, tensors: Mapping[str, Tensor], beside: Callable[[], Iterable[Asked]] = tuple
) -> None:
    """What ``recipe`` still has to compile, in threads; if any of it is new to Triton, also what ``beside`` lists.

    Raises what the compiler says of a launch of the recipe. What it says of others is logged at level DEBUG: it is
    raised where they are called.
    """
    if not triton.knobs.runtime.interpret and any(launch.must_compile for launch in recipe.launches):
        # no AsyncCompileMode of the caller's own: two cannot be nested
        contextvars.Context().run(partial(_compile, recipe, tensors, beside))


@contextmanager
def _safe_for_threads() -> Iterator[None]:
    """What Triton's walk through a kernel's source needs so that several threads may do it.

    It silences deprecations and restores the filters, in whatever order threads come by. And Python 3.11 counts the
    depth of ``ast.parse`` for all threads together: a collection in its middle lets another thread in, and one of them
    raises SystemError ("AST constructor recursion depth mismatch").
    """
    collects = sys.version_info[:2] == (3, 11) and gc.isenabled()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        warnings.simplefilter("ignore", PendingDeprecationWarning)
        if collects:
            gc.disable()
        try:
            yield
        finally:
            if collects:
                gc.enable()


def _compile(recipe: Recipe, tensors: Mapping[str, Tensor], beside: Callable[[], Iterable[Asked]]) -> None:
    """Triton's own mode does all but the compiling on this thread: its caches, keys and hooks meet no other."""
    waiting = [launch for launch in recipe.launches if launch.must_compile]
    with (
        _lock,
        _safe_for_threads(),
        ThreadPoolExecutor(_workers()) as pool,
        triton.AsyncCompileMode(pool, ignore_errors=True),
    ):
        asked = [launch.ask(tensors) for launch in waiting]
        spare: dict[Any, Launch] = {}
        is_new = any(isinstance(kernel, triton.FutureKernel) for kernel in asked)
        if is_new and os.environ.get(VARIABLE, "") != "off":
            for launch, given in _listed(beside):
                kernel = _try(launch, partial(launch.ask, given)) if launch.grid else None
                if isinstance(kernel, triton.FutureKernel):
                    spare.setdefault(kernel, launch)
        for launch, kernel in zip(waiting, asked, strict=True):
            launch.take(kernel)
        for kernel, launch in spare.items():
            _try(launch, kernel.result)


def _listed(beside: Callable[[], Iterable[Asked]]) -> list[Asked]:
    """What ``beside`` lists; nothing where planning calls that nobody made goes wrong: the call itself has its plan."""
    try:
        return list(beside())
    except Exception as error:
        log.debug("no other lengths are compiled ahead: %s: %s", type(error).__name__, error)
        return []


def _try(launch: Launch, step: Callable[[], Any]) -> Any:
    """A step of compiling a launch that nobody called."""
    try:
        return step()
    except Exception as error:
        log.debug("not compiled ahead, %s: %s: %s", launch, type(error).__name__, error)


def _workers() -> int:
    """As many as this process has processors."""
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(MOST_WORKERS, count)
