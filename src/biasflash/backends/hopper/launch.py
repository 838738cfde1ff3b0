"""Recipes of Hopper kernels from a cache, and the portable recipe where one of them does not compile."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import lru_cache

from torch import Tensor

from biasflash.backends.backend import Gradients
from biasflash.backends.hopper.backward_plan import backward_recipe
from biasflash.backends.hopper.forward_plan import forward_recipe
from biasflash.backends.hopper.operands import BuildError
from biasflash.backends.triton import launch as portable
from biasflash.backends.triton.operands import Facts, device_facts
from biasflash.backends.triton.plans import contiguous_recipes
from biasflash.backends.triton.recipe import Recipe
from biasflash.problem import Problem

log = logging.getLogger("biasflash")


def _tell(problem: Problem, stage: str, reasons: Sequence[str]) -> None:
    if reasons:
        log.info("hopper: portable kernels run the %s of %s: %s", stage, problem, "; ".join(reasons))


def _plan_forward(problem: Problem, precision: str, facts: Facts) -> tuple[Recipe, list[str]]:
    rows, terms, _ = portable.layouts(facts, len(problem.terms))
    return forward_recipe(problem, device_facts(problem.device), rows, terms)


def _plan_backward(problem: Problem, precision: str, facts: Facts) -> tuple[Recipe, list[str]]:
    rows, terms, grads = portable.layouts(facts, len(problem.terms))
    return backward_recipe(problem, device_facts(problem.device), rows, terms, grads, "dlse" in facts[0])


@lru_cache(maxsize=1024)
def _forward(problem: Problem, precision: str, facts: Facts) -> Recipe:
    recipe, reasons = _plan_forward(problem, precision, facts)
    _tell(problem, "forward pass", reasons)
    return recipe


@lru_cache(maxsize=1024)
def _backward(problem: Problem, precision: str, facts: Facts) -> Recipe:
    recipe, reasons = _plan_backward(problem, precision, facts)
    _tell(problem, "backward pass", reasons)
    return recipe


#: passes that a kernel did not compile for
_broken: set[tuple[str, Problem]] = set()


def _break(stage: str, problem: Problem, error: BuildError) -> None:
    _broken.add((stage, problem))
    log.warning("hopper: a kernel did not compile, portable kernels run every %s of %s: %s", stage, problem, error)


def run_forward(
    problem: Problem, q: Tensor, k: Tensor, v: Tensor, terms: Sequence[Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    """As the portable function of this name."""
    if not _broken or ("forward pass", problem) not in _broken:
        try:
            return portable.run_forward(problem, q, k, v, terms, _forward, lambda *key: _plan_forward(*key)[0])
        except BuildError as error:
            _break("forward pass", problem, error)
    return portable.run_forward(problem, q, k, v, terms)


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
    """As the portable function of this name."""
    given = problem, gradients, dout, dlse, q, k, v, terms, out, lse, lse_low
    if not _broken or ("backward pass", problem) not in _broken:
        try:
            return portable.run_backward(*given, _backward, lambda *key: _plan_backward(*key)[0])
        except BuildError as error:
            _break("backward pass", problem, error)
    return portable.run_backward(*given)


def describe(problem: Problem) -> tuple[str, ...]:
    """One line a kernel, for a call of this problem with contiguous tensors, and why a pass is portable if it is."""
    told: list[str] = []

    def kept(title: str, answer: tuple[Recipe, list[str]]) -> Recipe:
        told.extend(f"{title} is portable: {reason}" for reason in answer[1])
        return answer[0]

    recipes = contiguous_recipes(
        problem,
        device_facts(problem.device),
        lambda *given: kept("forward", forward_recipe(*given)),
        lambda *given: kept("backward", backward_recipe(*given)),
    )
    return (*portable.lines_of(recipes), *told)
