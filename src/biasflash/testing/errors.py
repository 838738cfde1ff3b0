"""The error budget: measured on plain torch, never chosen. Comparing raises.

Truth is the reference in float64. For every tensor, the largest and the mean error against it may be at most

    2 x the error of plain torch (the same reference, run in the input dtype)  +  a rounding floor.

The floor is what arithmetic cannot avoid, and holds two terms:

* ``eps / 2`` of the result's own dtype times ``|truth|`` (plus half its smallest step near zero): the result must be
  stored, and that rounds once;
* ``eps`` of the accumulator (float32; float64 for float64) times the sum over *magnitudes* of the terms that made the
  result: where large terms cancel, plain torch may be exact by luck, as with a single key, whose dq is exactly zero.

For ``lse``, which is float32 whatever the inputs are, plain torch is the reference in float32. Results that no kept
pair reaches must be zero exactly (``lse``: -inf exactly), and NaN and infinities must be where truth has them.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from biasflash.testing.case import Call
from biasflash.testing.truth import Solution, solve, truth

FACTOR = 2.0
_CHUNK = 2**24


class BudgetError(AssertionError):
    """A result is further from truth than its budget allows, or not exactly zero where it must be."""


@dataclass(frozen=True, kw_only=True)
class Figure:
    """Error and budget of one tensor, for the maximum and the mean."""

    tensor: str
    max_error: float
    max_budget: float
    mean_error: float
    mean_budget: float

    @property
    def used(self) -> float:
        """The larger share of a budget that is used up: 1.0 is the limit."""
        pairs = ((self.max_error, self.max_budget), (self.mean_error, self.mean_budget))
        return max(0.0 if error == 0 else error / budget if budget > 0 else math.inf for error, budget in pairs)

    @property
    def within(self) -> bool:
        # written so that a NaN error fails
        return self.max_error <= self.max_budget and self.mean_error <= self.mean_budget

    def record(self) -> dict[str, float | str]:
        """For JSON."""
        return asdict(self) | {"used": self.used}


@contextlib.contextmanager
def float32_products() -> Iterator[None]:
    """float32 matrix products with float32 accuracy inside the block, whatever the process has chosen."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def _chunks(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    flat = [t.reshape(-1) for t in tensors]
    for i in range(0, flat[0].numel(), _CHUNK):
        yield tuple(t[i : i + _CHUNK] for t in flat)


def _error(name: str, found: Tensor, true: Tensor) -> tuple[float, float]:
    """Largest and mean error over the elements whose truth is finite; the others must be the same infinity or NaN."""
    largest, total = 0.0, 0.0
    for got, want in _chunks(found, true):
        got = got.double()
        finite = want.isfinite()
        same = finite | (got == want) | (got.isnan() & want.isnan())
        if not bool(same.all()):
            i = int((~same).nonzero()[0])
            raise BudgetError(
                f"{name}: {int((~same).sum())} of {same.numel()} elements are not the infinity or NaN that truth has, "
                f"e.g. {got[i].item()} for {want[i].item()}"
            )
        wrong = torch.where(finite, (got - want).abs(), 0.0)
        worst = float(wrong.max())
        largest = worst if math.isnan(worst) else max(largest, worst)
        total += float(wrong.sum())
        if math.isnan(largest):
            return math.nan, math.nan
    return largest, total / max(1, found.numel())


def _magnitude(t: Tensor) -> tuple[float, float]:
    """Largest and mean magnitude of the finite elements."""
    largest, total = 0.0, 0.0
    for (part,) in _chunks(t):
        part = torch.where(part.isfinite(), part.double().abs(), 0.0)
        largest, total = max(largest, float(part.max())), total + float(part.sum())
    return largest, total / max(1, t.numel())


def rounding_floor(dtype: torch.dtype, true: Tensor, size: Tensor) -> tuple[float, float]:
    """The part of the budget that no arithmetic in ``dtype`` can avoid, for the maximum and the mean."""
    info = torch.finfo(dtype)
    step = info.smallest_normal * info.eps  # distance of neighbours near zero
    accumulator = torch.finfo(torch.float64 if dtype == torch.float64 else torch.float32).eps
    (max_true, mean_true), (max_size, mean_size) = _magnitude(true), _magnitude(size)
    return (
        0.5 * (info.eps * max_true + step) + accumulator * max_size,
        0.5 * (info.eps * mean_true + step) + accumulator * mean_size,
    )


def compare(name: str, got: Tensor, true: Tensor, plain: Tensor, size: Tensor) -> Figure:
    """The figure of one tensor; all four have one shape, ``got`` in the dtype that it is delivered in.

    Raises:
        BudgetError: infinities or NaN differ from truth's, or plain torch itself cannot represent the result (then the
            case does not belong to this dtype).
    """
    if got.shape != true.shape:
        raise BudgetError(f"{name} has shape {tuple(got.shape)}, wanted {tuple(true.shape)}")
    max_error, mean_error = _error(name, got, true)
    max_plain, mean_plain = _error(f"plain torch's {name}", plain, true)
    if not math.isfinite(max_plain):
        raise BudgetError(f"{name}: plain torch gives NaN or infinity in {got.dtype}, so there is no budget")
    max_floor, mean_floor = rounding_floor(got.dtype, true, size)
    return Figure(
        tensor=name,
        max_error=max_error,
        max_budget=FACTOR * max_plain + max_floor,
        mean_error=mean_error,
        mean_budget=FACTOR * mean_plain + mean_floor,
    )


def check_zeros(got: Mapping[str, Tensor], solution: Solution) -> None:
    """What no kept pair reaches is zero exactly, and -inf exactly in lse.

    Raises:
        BudgetError: naming the tensor and how many elements are not.
    """
    for name, found in got.items():
        void = ~solution.reached[name].expand(found.shape)
        wanted = -math.inf if name == "lse" else 0.0
        wrong = int((void & (found != wanted)).sum())
        if wrong:
            raise BudgetError(f"{name}: {wrong} of {int(void.sum())} elements that nothing reaches are not {wanted}")


def _corner(call: Call, got: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The part of the results that truth covers: all, or the corner, after the rest was checked to be zero."""
    case = call.case
    found = dict(got)
    if case.corner is None:
        return found
    start = case.M - case.corner
    axes = {"out": -3, "dq": -3, "lse": -1}
    for name, t in got.items():
        axis = axes.get(name, -2 if name.startswith("dbias") else 0)
        if axis == 0 or t.shape[axis] == 1:
            continue
        if name.startswith("d") and int(torch.count_nonzero(t.narrow(axis, 0, start))):
            raise BudgetError(f"{name}: queries without a gradient contribute")
        found[name] = t.narrow(axis, start, case.corner)
    return found


def judge(call: Call, got: Mapping[str, Tensor]) -> tuple[Figure, ...]:
    """Judges results against truth.

    Args:
        call: the tensors that were passed.
        got: ``out``, ``lse`` and the gradients that the case asks for (``dq``, ``dk``, ``dv``, ``dbias[i]``); any may
            be left out.

    Returns:
        One figure for each tensor of ``got``.

    Raises:
        BudgetError: with every tensor over budget, its error and its budget.
    """
    rank = len(call.case.full())
    padded = {
        n: t.detach()[(None,) * (rank - t.dim())] if n.startswith("dbias") else t.detach() for n, t in got.items()
    }
    with float32_products():
        true = truth(call)
        plain = solve(call, call.q.dtype)
        if "lse" in got and call.q.dtype.itemsize == 2:
            plain["lse"] = solve(call, torch.float32, backward=False)["lse"]
    padded = _corner(call, padded)
    figures = tuple(compare(n, t, true.values[n], plain[n], true.sizes[n]) for n, t in padded.items())
    check_zeros(padded, true)
    over = [f for f in figures if not f.within]
    if over:
        lines = [
            f"{f.tensor}: max error {f.max_error:.3g} (budget {f.max_budget:.3g}), "
            f"mean error {f.mean_error:.3g} (budget {f.mean_budget:.3g})"
            for f in over
        ]
        raise BudgetError("over budget (2 x plain torch + rounding):\n  " + "\n  ".join(lines))
    return figures
