"""The only file here that launches: recipes from a cache, buffers, and the order of kernels."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from biasflash.backends.backend import Gradients
from biasflash.backends.triton.backward_plan import BackwardPlan
from biasflash.backends.triton.forward_plan import forward_recipe
from biasflash.backends.triton.operands import Layout, device_facts
from biasflash.backends.triton.plans import contiguous_recipes
from biasflash.backends.triton.recipe import Recipe
from biasflash.problem import Problem


def _key(t: Tensor) -> tuple[tuple[int, ...], bool]:
    """The fields of a ``Layout``; plain tuples hash faster."""
    return t.stride(), t.data_ptr() % 16 == 0


@lru_cache(maxsize=1024)
def _forward_recipe(problem: Problem, precision: str, rows: tuple[Any, ...], terms: tuple[Any, ...]) -> Recipe:
    """``precision`` is torch's float32 setting, which the plan reads itself; as part of the key, a change is seen."""
    names = ("q", "k", "v", "out")
    layouts = {name: Layout(*key) for name, key in zip(names, rows, strict=True)}
    return forward_recipe(problem, device_facts(problem.device), layouts, [Layout(*key) for key in terms])


@lru_cache(maxsize=1024)
def _backward_recipe(
    problem: Problem,
    precision: str,
    rows: tuple[Any, ...],
    terms: tuple[Any, ...],
    grads: tuple[Any, ...],
    has_dlse: bool,
) -> Recipe:
    """As ``_forward_recipe``; ``rows`` and ``grads`` are pairs of name or term index and layout."""
    layouts = {name: Layout(*key) for name, key in rows}
    plan = BackwardPlan(
        problem,
        device_facts(problem.device),
        layouts,
        [Layout(*key) for key in terms],
        {i: Layout(*key) for i, key in grads},
        has_dlse,
    )
    return plan.recipe()


def _as_bytes(terms: Sequence[Tensor]) -> list[Tensor]:
    """Masks as bytes: the kernels test for non-zero."""
    return [t.view(torch.uint8) if t.dtype == torch.bool else t for t in terms]


def run_forward(
    problem: Problem, q: Tensor, k: Tensor, v: Tensor, terms: Sequence[Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    """``out``, ``lse`` and ``lse_low`` as the backend contract wants them."""
    p = problem
    out = q.new_empty((*p.batch, p.M, p.Hq, p.Dv))
    lse = q.new_empty((*p.batch, p.Hq, p.M), dtype=torch.float32)
    low = lse.new_empty(lse.shape if p.keeps_low else 0)
    if p.is_empty:
        return out.zero_(), lse.fill_(float("-inf")), low
    rows = _key(q), _key(k), _key(v), _key(out)
    recipe = _forward_recipe(problem, torch.get_float32_matmul_precision(), rows, tuple(map(_key, terms)))
    tensors = {"q": q, "k": k, "v": v, "out": out, "lse": lse, "low": low}
    tensors |= {f"bias{i}": t for i, t in enumerate(_as_bytes(terms))}
    for launch in recipe.launches:
        launch.run(tensors)
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
) -> None:
    """Fills ``gradients``."""
    wanted = {name: t for name, t in (("dq", gradients.q), ("dk", gradients.k), ("dv", gradients.v)) if t is not None}
    grads = {i: t for i, t in enumerate(gradients.terms) if t is not None}
    if problem.is_empty:
        for buffer in (*wanted.values(), *grads.values()):
            buffer.zero_()
        return
    if dout.stride(-1) != 1 or 0 in dout.stride():
        dout = (
            dout.contiguous()
        )  # out.sum() hands an expanded scalar; out's size once is cheaper than a strided load a tile
    named = {"q": q, "k": k, "v": v, "out": out, "dout": dout, **wanted}
    recipe = _backward_recipe(
        problem,
        torch.get_float32_matmul_precision(),
        tuple((name, _key(t)) for name, t in named.items()),
        tuple(map(_key, terms)),
        tuple((i, _key(t)) for i, t in grads.items()),
        dlse is not None,
    )
    tensors = {"dq": out, "dk": out, "dv": out, **named, "lse": _plain(lse), "low": _plain(lse_low)}
    tensors |= {f"bias{i}": t for i, t in enumerate(_as_bytes(terms))}
    tensors |= {f"grad{i}": t for i, t in grads.items()}
    if dlse is not None:
        tensors["dlse"] = _plain(dlse)
    for i in recipe.chunked:  # the sum over chunks is written in one run of elements
        grad = grads[i]
        tensors[f"dense_grad{i}"] = grad if grad.is_contiguous() else grad.new_empty(grad.shape)
    for name, count in recipe.scratch:
        tensors[name] = lse.new_empty(count)
    for launch in recipe.launches:
        launch.run(tensors)
    _finish(recipe, grads, tensors)


def _plain(rows: Tensor) -> Tensor:
    """Row statistics as kernels read them: float32, contiguous, aligned (hooks on saved tensors may return others)."""
    if rows.dtype == torch.float32 and rows.is_contiguous() and rows.data_ptr() % 16 == 0:
        return rows
    return rows.float().contiguous().clone()


def _finish(recipe: Recipe, grads: dict[int, Tensor], tensors: dict[str, Tensor]) -> None:
    """Reductions and copies of arrays that are small (or wanted twice), by torch."""
    for total in recipe.sums:
        grad = grads[total.grad]
        grad.copy_(tensors[total.scratch].view(total.shape).sum_to_size(grad.shape))
    for first, other in recipe.copies:
        grads[other].copy_(grads[first])
    for i in recipe.chunked:
        if tensors[f"dense_grad{i}"] is not grads[i]:
            grads[i].copy_(tensors[f"dense_grad{i}"])


def describe(problem: Problem) -> tuple[str, ...]:
    """One line a kernel, for a call of this problem with contiguous tensors."""
    recipes = contiguous_recipes(problem, device_facts(problem.device))
    lines = []
    for title, recipe in recipes.items():
        lines += [f"{title}:"] + [f"  {launch}" for launch in recipe.launches]
    return tuple(lines)
