"""The bench's correctness gate: a lean float32 reference, and how far from it a provider may be.

This gate must work at sizes where the conformance budget (float64, whole score matrices) does not fit, so it asks for
less: a relative Frobenius error within a few units of rounding of the input dtype. A wrong index, a wrong reduction or
a wrong mask is off by far more; telling good rounding from mediocre rounding is ``biasflash check``'s job.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from biasflash.testing.case import Call

#: Largest relative Frobenius error by input dtype. 16-bit: weights, outputs and the gradients' operands are each
#: rounded once, which gives about 0.3 eps (2.5e-3 for bfloat16, eps = 2^-7); allowed are 1.3 eps and 2 eps.
#: float32: sums over thousands of keys in another order give about 1e-6; allowed is 1e-4.
LIMITS = {torch.bfloat16: 1e-2, torch.float16: 2e-3, torch.float32: 1e-4, torch.float64: 1e-4}
#: float32 inputs while ``torch.get_float32_matmul_precision()`` allows TF32, whose products are rounded like float16's.
TF32_LIMIT = 2e-3
#: Elements of a score block the reference holds at once (about six such float32 blocks are alive).
BLOCK = {"cuda": 2 * 10**8, "cpu": 4 * 10**6}


@dataclass(frozen=True, kw_only=True)
class Truth:
    """float32 results of one call: out, and the gradient of every leaf by ``Call.leaves``' names.

    ``sizes`` holds a yardstick for gradients that are zero by nature: a bias that is constant over the keys moves no
    weight, so its gradient is a sum that cancels, and is judged by the norm of the same sum over magnitudes.
    """

    tensors: dict[str, Tensor]
    sizes: dict[str, float] = field(default_factory=dict)


def limit_for(dtype: torch.dtype, device: torch.device) -> float:
    if dtype == torch.float32 and device.type == "cuda" and torch.get_float32_matmul_precision() != "highest":
        return TF32_LIMIT
    return LIMITS[dtype]


def relative_error(found: Tensor, truth: Tensor, size: float = 0.0) -> float:
    """``|found - truth| / max(|truth|, size)`` in the Frobenius norm.

    NaN anywhere gives NaN; a zero truth without a size wants exact zeros.
    """
    difference = float(torch.linalg.vector_norm(found.float() - truth, dtype=torch.float64))
    norm = max(size, float(torch.linalg.vector_norm(truth, dtype=torch.float64)))
    if norm == 0.0:
        return 0.0 if difference == 0.0 else math.nan if math.isnan(difference) else math.inf
    return difference / norm


def compare(found: dict[str, Tensor], truth: Truth) -> dict[str, float]:
    """Relative error of every result. A shape that differs is an error of its own kind: infinite."""
    errors = {}
    for name, tensor in found.items():
        wanted, size = truth.tensors[name], truth.sizes.get(name, 0.0)
        errors[name] = relative_error(tensor, wanted, size) if tensor.shape == wanted.shape else math.inf
    return errors


def is_green(errors: dict[str, float], limit: float) -> bool:
    """All errors within the limit; NaN is not."""
    return all(error <= limit for error in errors.values())


# --------------------------------------------------------------------------------------------------------- reference


@contextmanager
def full_float32() -> Iterator[None]:
    """float32 products in float32, whatever the session allows elsewhere."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


Index = tuple[int | slice, ...]


def _blocks(batch: tuple[int, ...], scores: int, device: str) -> Iterator[Index]:
    """Indices that cut the batch into blocks of few enough scores: a number on every axis but a slice on the last."""
    step = max(1, BLOCK[device] // max(1, scores))
    for outer in itertools.product(*(range(n) for n in batch[:-1])):
        for start in range(0, batch[-1], step):
            yield (*outer, slice(start, min(batch[-1], start + step)))


def _at(term: Tensor, block: Index, head: int) -> Tensor:
    """The part of a term (``*#B #Hq #M #N``, padded) that meets one block and head: ``(#b, #M, #N)``, a view."""
    where: list[int | slice] = []
    for size, index in zip(term.shape, block, strict=False):
        if isinstance(index, int):
            where.append(index if size > 1 else 0)
        else:
            where.append(index if size > 1 else slice(0, 1))
    where.append(head if term.shape[-3] > 1 else 0)
    return term[tuple(where)]


def _weights(
    q: Tensor, k: Tensor, planes: list[Tensor], masks: list[Tensor], scale: float, shift: int | None
) -> Tensor:
    """Softmax weights ``(b, M, N)`` of one head; a row that sees nothing has only zeros."""
    s = (q @ k.transpose(-1, -2)).mul_(scale)
    for plane in planes:
        s += plane.float()
    for keep in masks:
        s.masked_fill_(~keep, -math.inf)
    if shift is not None:
        s.masked_fill_(~torch.ones(s.shape[-2:], dtype=torch.bool, device=s.device).tril(shift), -math.inf)
    empty = s.amax(-1, keepdim=True) == -math.inf
    return s.softmax(-1).masked_fill_(empty, 0.0)


def _cleared(t: Tensor, masks: list[Tensor]) -> Tensor:
    """Keys or values ``(b, N, width)`` without those that a mask hides from every query: NaN may be stored there."""
    for keep in masks:
        if keep.shape[-2] == 1:
            t = t.masked_fill(~keep.transpose(-1, -2), 0.0)
    return t


def _reduce(ds: Tensor, totals: list[Tensor | None], block: Index, head: int) -> None:
    """Adds the score gradients ``(b, M, N)`` of one block and head to every total, over its broadcast axes."""
    for total in totals:
        if total is not None:
            target = _at(total, block, head)
            target += ds.sum_to_size(target.shape)


@torch.no_grad()
def reference(call: Call) -> Truth:
    """Output and every wanted gradient in float32, one head and one slice of the batch at a time.

    Memory beyond the results is a handful of float32 blocks of ``BLOCK`` scores (at least one ``M x N``).
    """
    q, k, v, dout = (t[None] if t.dim() == 3 else t for t in (call.q, call.k, call.v, call.dout))
    planes = [t[(None,) * (q.dim() - t.dim())] for t in call.bias]
    masks = [t[(None,) * (q.dim() - t.dim())] for t in call.mask]
    *batch, M, heads, D = q.shape
    N, group = k.shape[-3], heads // k.shape[-2]
    scale = D**-0.5 if call.scale is None else call.scale
    shift = None if not call.causal else 0 if call.causal == "top-left" else N - M
    out = torch.zeros(dout.shape, device=q.device)
    dq, dk, dv = (torch.zeros(t.shape, device=q.device) for t in (q, k, v))
    dplanes = [torch.zeros(t.shape, device=q.device) if t.requires_grad else None for t in planes]
    magnitudes = [torch.zeros_like(t) if t is not None and t.shape[-1] == 1 else None for t in dplanes]
    with full_float32():
        for block, head in itertools.product(_blocks(tuple(batch), M * N, q.device.type), range(heads)):
            own, shared = (*block, ..., head, slice(None)), (*block, ..., head // group, slice(None))
            keeps = [_at(t, block, head) for t in masks]
            q_, do_ = q[own].float(), dout[own].float()
            k_, v_ = (_cleared(t[shared].float(), keeps) for t in (k, v))
            p = _weights(q_, k_, [_at(t, block, head) for t in planes], keeps, scale, shift)
            o_ = p @ v_
            out[own] = o_
            dv[shared] += p.transpose(-1, -2) @ do_
            ds = (do_ @ v_.transpose(-1, -2)).sub_((o_ * do_).sum(-1, keepdim=True)).mul_(p)
            del p
            dq[own] = (ds @ k_).mul_(scale)
            dk[shared] += (ds.transpose(-1, -2) @ q_).mul_(scale)
            _reduce(ds, dplanes, block, head)
            if any(t is not None for t in magnitudes):
                _reduce(ds.abs_(), magnitudes, block, head)
            del ds
    found = {"dq": dq, "dk": dk, "dv": dv} | {f"dbias[{i}]": d for i, d in enumerate(dplanes) if d is not None}
    found |= {"dqkv": torch.stack((dq, dk, dv), -3)} if call.case.layout == "qkv" else {}
    found |= {"dkv": torch.stack((dk, dv), -3)} if call.case.layout == "kv" else {}
    wanted = {name: found[name].view(leaf.shape) for name, leaf in call.leaves().items()}
    sizes = {f"dbias[{i}]": float(torch.linalg.vector_norm(t)) for i, t in enumerate(magnitudes) if t is not None}
    return Truth(tensors={"out": out.view(call.dout.shape), **wanted}, sizes=sizes)
