"""The only file here that launches: recipes from a cache, buffers, and the order of kernels."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, lru_cache

import torch
import triton
from torch import Tensor
from triton.runtime import driver

from biasflash.backends.backend import Gradients
from biasflash.backends.triton import ahead
from biasflash.backends.triton.backward_plan import backward_recipe
from biasflash.backends.triton.forward_plan import forward_recipe
from biasflash.backends.triton.operands import Facts, Layout, device_facts
from biasflash.backends.triton.plans import contiguous_recipes
from biasflash.backends.triton.recipe import Recipe
from biasflash.problem import Problem

_ROWS = ("q", "k", "v", "out", "dout", "dq", "dk", "dv")


def _facts(tensors: Mapping[str, Tensor], addresses: Mapping[str, int]) -> Facts:
    """What a recipe needs to know of the tensors, hashable; plain tuples hash faster than a ``Layout``."""
    strides = tuple([t.stride() for t in tensors.values()])
    return tuple(tensors), strides, tuple([address % 16 == 0 for address in addresses.values()])


def layouts(facts: Facts, count: int) -> tuple[dict[str, Layout], list[Layout], dict[int, Layout]]:
    """The layouts of rows by name, of the ``count`` terms, and of the gradients of terms by index."""
    found = {name: Layout(strides, aligned) for name, strides, aligned in zip(*facts, strict=True)}
    rows = {name: found[name] for name in _ROWS if name in found}
    terms = [found[name] for name in _names("bias", count)]
    return rows, terms, {i: found[name] for i, name in enumerate(_names("grad", count)) if name in found}


@lru_cache(maxsize=1024)
def _forward_recipe(problem: Problem, precision: str, facts: Facts) -> Recipe:
    """``precision`` is torch's float32 setting, which the plan reads itself; as part of the key, a change is seen."""
    rows, terms, _ = layouts(facts, len(problem.terms))
    return forward_recipe(problem, device_facts(problem.device), rows, terms)


@lru_cache(maxsize=1024)
def _backward_recipe(problem: Problem, precision: str, facts: Facts) -> Recipe:
    """As ``_forward_recipe``."""
    rows, terms, grads = layouts(facts, len(problem.terms))
    has_dlse = "dlse" in facts[0]
    return backward_recipe(problem, device_facts(problem.device), rows, terms, grads, has_dlse)


@cache
def _names(role: str, count: int) -> tuple[str, ...]:
    return tuple([f"{role}{i}" for i in range(count)])


def _addresses(tensors: Mapping[str, Tensor]) -> dict[str, int]:
    return {name: t.data_ptr() for name, t in tensors.items()}


def _is_hooked() -> bool:
    """Whether someone, a profiler say, wants to hear of every launch."""
    runtime = triton.knobs.runtime
    hooks = runtime.launch_enter_hook, runtime.launch_exit_hook
    return any(getattr(hook, "calls", hook) for hook in hooks)  # None, a chain of calls, or one call


def _launch(
    recipe: Recipe,
    device: torch.device,
    tensors: dict[str, Tensor],
    addresses: dict[str, int],
    beside: Callable[[], Iterable[ahead.Asked]] = tuple,
) -> None:
    """All launches in order, with new scratch; masks as bytes, since the kernels test for non-zero.

    The addresses suffice once all kernels are compiled. Streams are asked for at every call: they may change.
    ``beside``: what is compiled along with them (``ahead.compile_together``); not while a CUDA graph is captured.
    """
    size, parts = recipe.places
    if size:
        tensors["scratch"] = scratch = torch.empty(size, dtype=torch.float32, device=device)
        start = scratch.data_ptr()
        for name, first, _ in parts:
            addresses[name] = start + 4 * first
    for name, count in recipe.zeroed:
        tensors[name] = scratch = torch.zeros(count, dtype=torch.int32, device=device)
        addresses[name] = scratch.data_ptr()
    if all(launch.can_start for launch in recipe.launches) and not _is_hooked():
        stream = driver.active.get_current_stream(device.index)
        for launch in recipe.launches:
            launch.start(stream, addresses)
        return
    for name, first, count in parts:
        tensors[name] = tensors["scratch"].narrow(0, first, count)
    as_bytes = {name: t.view(torch.uint8) if t.dtype == torch.bool else t for name, t in tensors.items()}
    if device.type != "cuda" or not torch.cuda.is_current_stream_capturing():
        ahead.compile_together(recipe, as_bytes, beside)
    for launch in recipe.launches:
        launch.run(as_bytes)


def run_forward(
    problem: Problem,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    terms: Sequence[Tensor],
    plan: ahead.Plan = _forward_recipe,
    silent: ahead.Plan | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """``out``, ``lse`` and ``lse_low`` as the backend contract wants them.

    ``silent``: plans calls that nobody made, for what is compiled ahead; None: ``plan``, which says nothing either.
    """
    p = problem
    heads = *p.batch, p.Hq, p.M
    out = torch.empty((*p.batch, p.M, p.Hq, p.Dv), dtype=p.dtype, device=p.device)
    lse = torch.empty(heads, dtype=torch.float32, device=p.device)
    low = torch.empty(heads if p.keeps_low else 0, dtype=torch.float32, device=p.device)
    if p.is_empty:
        return out.zero_(), lse.fill_(float("-inf")), low
    tensors = {"q": q, "k": k, "v": v, "out": out, "lse": lse, "low": low}
    if terms:
        tensors.update(zip(_names("bias", len(terms)), terms, strict=True))
    addresses = _addresses(tensors)
    key = p, torch.get_float32_matmul_precision(), _facts(tensors, addresses)
    recipe = plan(*key)
    _launch(recipe, p.device, tensors, addresses, lambda: ahead.others(recipe, *key, silent or plan))
    return out, lse, low


def run_backward(
    problem: Problem,
    gradients: Gradients,
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    terms: Sequence[Tensor],
    out: Tensor,
    lse: Tensor,
    lse_low: Tensor,
    plan: ahead.Plan = _backward_recipe,
    silent: ahead.Plan | None = None,
) -> None:
    """Fills ``gradients``; ``silent`` as in ``run_forward``."""
    rows = {"dq": gradients.q, "dk": gradients.k, "dv": gradients.v}
    wanted = {name: t for name, t in rows.items() if t is not None}
    grads = {i: t for i, t in enumerate(gradients.terms) if t is not None}
    if problem.is_empty:
        for buffer in (*wanted.values(), *grads.values()):
            buffer.zero_()
        return
    strides = dout.stride()
    if strides[-1] != 1 or 0 in strides:
        # out.sum() hands an expanded scalar; out's size once is cheaper than a strided load a tile
        dout = dout.contiguous()
    tensors = {"q": q, "k": k, "v": v, "out": out, "dout": dout, **wanted, "lse": _plain(lse), "low": _plain(lse_low)}
    if terms:
        tensors.update(zip(_names("bias", len(terms)), terms, strict=True))
    if grads:
        names = _names("grad", len(terms))
        tensors.update([(names[i], t) for i, t in grads.items()])
    if dlse is not None:
        tensors["dlse"] = _plain(dlse)
    addresses = _addresses(tensors)
    key = problem, torch.get_float32_matmul_precision(), _facts(tensors, addresses)
    recipe = plan(*key)
    for name in rows:
        if name not in wanted:  # passed, never used
            tensors[name], addresses[name] = out, addresses["out"]
    for i in recipe.chunked:  # the sum over chunks is written in one run of elements
        grad = grads[i]
        dense = grad if grad.is_contiguous() else grad.new_empty(grad.shape)
        tensors[f"dense_grad{i}"], addresses[f"dense_grad{i}"] = dense, dense.data_ptr()
    _launch(recipe, problem.device, tensors, addresses, lambda: ahead.others(recipe, *key, silent or plan))
    _finish(recipe, grads, tensors)


def _plain(rows: Tensor) -> Tensor:
    """Row statistics as kernels read them: float32, contiguous, aligned (hooks on saved tensors may return others)."""
    if rows.dtype == torch.float32 and rows.is_contiguous() and rows.data_ptr() % 16 == 0:
        return rows
    return rows.float().contiguous().clone()


def _finish(recipe: Recipe, grads: dict[int, Tensor], tensors: dict[str, Tensor]) -> None:
    """Reductions and copies of arrays that are small (or wanted twice), by torch."""
    for total in recipe.sums:
        first, count = next(place for name, *place in recipe.places[1] if name == total.scratch)
        grad, part = grads[total.grad], tensors["scratch"].narrow(0, first, count)
        grad.copy_(part.view(total.shape).sum_to_size(grad.shape))
    for i in recipe.rows:
        if "dlse" in tensors:
            dlse = torch.where(tensors["lse"] == float("-inf"), 0.0, tensors["dlse"])  # nothing seen: it may be NaN
            grads[i].copy_(dlse[..., None].sum_to_size(grads[i].shape))
        else:
            grads[i].zero_()
    for first, other in recipe.copies:
        grads[other].copy_(grads[first])
    for i in recipe.chunked:
        if tensors[f"dense_grad{i}"] is not grads[i]:
            grads[i].copy_(tensors[f"dense_grad{i}"])


def describe(problem: Problem) -> tuple[str, ...]:
    """One line a kernel, for a call of this problem with contiguous tensors."""
    return lines_of(contiguous_recipes(problem, device_facts(problem.device)))


def lines_of(recipes: Mapping[str, Recipe]) -> tuple[str, ...]:
    """Titles, and one line a launch."""
    lines = []
    for title, recipe in recipes.items():
        lines += [f"{title}:"] + [f"  {launch}" for launch in recipe.launches]
    return tuple(lines)
