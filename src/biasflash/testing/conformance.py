"""Suites: a backend over a case, judged by the measured budget, for repeatability and for the form of its gradients."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

import biasflash
from biasflash import backends, problem
from biasflash.testing.case import DTYPES, Call, Case
from biasflash.testing.errors import BudgetError, Figure, float32_products, judge
from biasflash.testing.memory import poison_cache

#: the gradient of a packed tensor -> the gradients of its members
_PACKED = {"dqkv": ("dq", "dk", "dv"), "dkv": ("dk", "dv")}

#: words of torch's and Triton's errors for a device, not for a call
_DEVICE_ERRORS = ("CUDA error", "Triton Error [CUDA]", "HIP error", "Triton Error [HIP]")


@dataclass(frozen=True, kw_only=True)
class Result:
    """What came out of one backend, case and dtype.

    ``status`` is ``passed``, ``failed`` or ``skipped``; ``message`` says why it is not ``passed``. After a result with
    ``device_lost`` nothing that this process computes on the device means anything. ``process`` and ``turn`` count
    from 1 where a runner spreads cases over processes, and say what ran before in the same one; 0: in the caller's own.
    """

    backend: str
    case: str
    dtype: str
    device: str
    status: str
    message: str = ""
    figures: tuple[Figure, ...] = ()
    seconds: float = 0.0
    device_lost: bool = False
    process: int = 0
    turn: int = 0

    @property
    def used(self) -> float:
        """The largest share of a budget that any tensor used up."""
        return max((f.used for f in self.figures), default=0.0)


def objections(backend: str, device: torch.device | str, call: Call | None = None) -> tuple[str, ...]:
    """Why ``backend`` cannot compute ``call`` on ``device``; None: neither a small problem in float32 nor a larger one
    in float16."""
    if call is None:
        found: tuple[str, ...] = ()
        for length, dtype in ((8, torch.float32), (512, torch.float16)):
            t = torch.zeros(1, length, 1, 64, device=device, dtype=dtype)
            found = backends.load(backend).objections(problem.build(t, t, t, (), (), "none", None))
            if not found:
                break
        return found
    kinds = ["dense"] * len(call.bias) + ["keep"] * len(call.mask)
    causal = problem.check_causal(call.causal)
    facts = problem.build(call.q, call.k, call.v, [*call.bias, *call.mask], kinds, causal, call.scale)
    return backends.load(backend).objections(facts)


@contextlib.contextmanager
def nan_memory(device: torch.device, sizes: list[int]) -> Iterator[None]:
    """Fresh memory inside the block is NaN: whoever reads what was never written is found out."""
    if device.type == "cuda":
        poison_cache(device, sizes)
        yield
        return
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)  # fills what torch.empty returns
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])


def compute(call: Call, backend: str) -> dict[str, Tensor]:
    """The call through the door of its layout: ``out``, ``lse``, ``dq``, ``dk``, ``dv``, ``dbias[i]`` as asked for.

    Raises:
        BudgetError: a gradient's shape or dtype is not its input's.
    """
    doors = {
        "separate": biasflash.attention,
        "kv": biasflash.attention_kvpacked,
        "qkv": biasflash.attention_qkvpacked,
    }
    options = call.options() | {"backend": backend, "return_lse": True}
    out, lse = doors[call.case.layout](*call.inputs.values(), **options)  # type: ignore[operator]
    grads = call.gradients(out, lse if call.dlse is not None else None)
    for name, leaf in call.leaves().items():
        grad = grads[name]
        if grad.shape != leaf.shape or grad.dtype != leaf.dtype:
            raise BudgetError(f"{name} is {tuple(grad.shape)} {grad.dtype}, its input {tuple(leaf.shape)} {leaf.dtype}")
    found = {"out": out.detach(), "lse": lse.detach()}
    for name, grad in grads.items():
        found |= {name: grad} if name not in _PACKED else dict(zip(_PACKED[name], grad.unbind(-3), strict=True))
    return found


def _same_bits(a: Tensor, b: Tensor) -> bool:
    words = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
    return torch.equal(a.contiguous().view(words), b.contiguous().view(words))


def _examine(backend: str, call: Call) -> tuple[Figure, ...]:
    case = call.case
    sizes = [t.numel() * t.element_size() for t in [*call.leaves().values(), call.dout]]
    sizes.append(4 * math.prod(case.batch) * case.Hq * case.M)  # lse, delta
    with float32_products():
        with nan_memory(call.q.device, sizes):
            got = compute(call, backend)
        again = compute(call, backend)
    if backends.load(backend).PROMISES.deterministic:
        changed = [name for name in got if not _same_bits(got[name], again[name])]
        if changed:
            raise BudgetError(f"not repeatable: {', '.join(changed)} changed between two runs of the same call")
    del again
    return judge(call, got)


def _is_device_lost(error: Exception, device: torch.device) -> bool:
    """Whether ``error`` leaves the process without its device: after a fault in a kernel every later call fails too."""
    if isinstance(error, RuntimeError) and any(words in str(error) for words in _DEVICE_ERRORS):
        return True
    if device.type != "cuda":
        return False
    try:
        torch.cuda.synchronize(device)  # a fault may have shown itself as something else
    except RuntimeError:
        return True
    return False


def run_case(
    backend: str, case: Case, device: torch.device | str, dtype: torch.dtype | str | None = None, seed: int = 0
) -> Result:
    """Runs ``case`` twice on ``backend`` and judges values, gradients, their form and their repeatability.

    Never raises for what it finds: whatever goes wrong, an exception of the backend included, is a failed result.
    A backend that objects to the problem gives a skipped one.

    Args:
        backend: a name of ``backends.ORDER``.
        case: from ``testing.cases`` or your own.
        device: where the tensors are made.
        dtype: of q, k, v; None takes the case's own.
        seed: of the random values.
    """
    device = torch.device(device)
    real = DTYPES[dtype or case.dtype] if not isinstance(dtype, torch.dtype) else dtype
    result = partial(Result, backend=backend, case=case.name, dtype=problem.short(real), device=str(device))
    started = time.perf_counter()
    status, message, lost = "passed", "", False
    figures: tuple[Figure, ...] = ()
    try:
        call = case.build(device, real, seed)
        reasons = objections(backend, device, call)
        if reasons:
            return result(status="skipped", message="; ".join(reasons))
        figures = _examine(backend, call)
    except Exception as error:
        status, message, lost = "failed", f"{type(error).__name__}: {error}", _is_device_lost(error, device)
    seconds = time.perf_counter() - started
    return result(status=status, message=message, figures=figures, seconds=seconds, device_lost=lost)
