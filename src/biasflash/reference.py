"""The meaning of every call, in plain torch: about a page that anyone can audit. Memory grows with M x N.

Order of operations: product x scale -> + biases -> masks -> softmax. A query that sees no key gives out = 0,
lse = -inf and zero to every gradient; a finite bias, however low, never hides a key.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from biasflash.backends.backend import Gradients, Promises
from biasflash.bias import KINDS
from biasflash.problem import DTYPES, MAX_WIDTH, Problem

PROMISES = Promises(
    devices="any",
    dtypes=DTYPES,
    max_width=MAX_WIDTH,
    deterministic=True,
    memory="O(M N)",
    summary="the meaning, in float64; for tests, audits and float64 on a GPU",
)


def weights(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    terms: Sequence[Tensor],
    kinds: Sequence[str],
    shift: int | None,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Attention weights ``*B Hq M N``, ``lse *B Hq M``, and keys and values as the heads see them, ``*B Hq N D | Dv``.

    Keys and values that no query may see (a mask that does not vary over queries) are cleared, so that a NaN stored
    there cannot leak as 0 x NaN.
    """
    group = q.shape[-2] // k.shape[-2]
    q = q.transpose(-3, -2)  # *B Hq M D
    k = k.transpose(-3, -2).repeat_interleave(group, dim=-3)  # *B Hq N D
    v = v.transpose(-3, -2).repeat_interleave(group, dim=-3)  # *B Hq N Dv
    s = (q @ k.transpose(-1, -2)) * scale  # *B Hq M N
    unseen = torch.zeros((), dtype=torch.bool, device=q.device)
    for term, kind in zip(terms, kinds, strict=True):
        s = KINDS[kind].apply(s, term)
        if kind == "keep" and (term.dim() < 2 or term.shape[-2] == 1 or term.stride(-2) == 0):
            unseen = unseen | ~(term.unsqueeze(-1) if term.dim() < 2 else term[..., :1, :].transpose(-1, -2))
    k, v = k.masked_fill(unseen, 0.0), v.masked_fill(unseen, 0.0)
    if shift is not None:
        i = torch.arange(s.shape[-2], device=s.device)[:, None]
        s = s.masked_fill(torch.arange(s.shape[-1], device=s.device) > i + shift, float("-inf"))
    if s.shape[-1] == 0:
        return s, s.new_full(s.shape[:-1], float("-inf")), k, v
    top = s.detach().amax(-1, keepdim=True)
    empty = top == float("-inf")
    p = torch.exp(s - top.masked_fill(empty, 0.0))
    total = p.sum(-1, keepdim=True)
    lse = (top + total.masked_fill(empty, 1.0).log()).masked_fill(empty, float("-inf")).squeeze(-1)
    return p / total.masked_fill(empty, 1.0), lse, k, v


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    terms: Sequence[Tensor],
    kinds: Sequence[str],
    shift: int | None,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """``out (*B M Hq Dv)`` and natural-log ``lse (*B Hq M)``, computed in q's dtype and differentiable by autograd.

    In float64 this is the truth that errors are measured against; in the input dtype it is the plain PyTorch whose
    error sets the budget.
    """
    p, lse, _, v = weights(q, k, v, terms, kinds, shift, scale)
    return (p @ v).transpose(-3, -2), lse


# ---------------------------------------------------------------------------------------------- the backend contract


def objections(problem: Problem) -> tuple[str, ...]:
    return ()


def describe(problem: Problem) -> tuple[str, ...]:
    return ("plain torch in float64, the whole score matrix in memory",)


def _double(problem: Problem, tensors: Sequence[Tensor]) -> list[Tensor]:
    return [t.detach().double() if t.is_floating_point() else t for t in tensors]


def forward(
    problem: Problem, q: Tensor, k: Tensor, v: Tensor, terms: Sequence[Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    kinds = [t.kind for t in problem.terms]
    q64, k64, v64, *terms64 = _double(problem, [q, k, v, *terms])
    with torch.no_grad():
        out, lse64 = attend(q64, k64, v64, terms64, kinds, problem.causal_shift, problem.scale)
    lse = lse64 if problem.dtype == torch.float64 else lse64.float()
    low = torch.where(torch.isfinite(lse64), lse64 - lse, 0.0).to(lse.dtype)
    return out.to(q.dtype).contiguous(), lse.contiguous(), low.contiguous() if problem.keeps_low else lse.new_empty(0)


def backward(
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
    # Autograd is switched off inside an operator, so the derivative is spelt out: ds = p (dp - delta + dlse).
    kinds = [t.kind for t in problem.terms]
    q64, k64, v64, *terms64 = _double(problem, [q, k, v, *terms])
    dout64 = dout.double().transpose(-3, -2)  # *B Hq M Dv
    p, _, keys, values = weights(q64, k64, v64, terms64, kinds, problem.causal_shift, problem.scale)
    dp = dout64 @ values.transpose(-1, -2)
    ds = p * (dp - (p * dp).sum(-1, keepdim=True) + (0.0 if dlse is None else dlse.double()[..., None]))
    ds = ds.masked_fill(p == 0, 0.0)
    group = (*problem.batch, problem.Hkv, problem.Hq // problem.Hkv)  # dk and dv are summed over a key head's group
    found = {
        "q": lambda: (ds @ keys * problem.scale).transpose(-3, -2),
        "k": lambda: (ds.transpose(-1, -2) @ q64.transpose(-3, -2) * problem.scale)
        .reshape(*group, problem.N, problem.D)
        .sum(-3)
        .transpose(-3, -2),
        "v": lambda: (p.transpose(-1, -2) @ dout64).reshape(*group, problem.N, problem.Dv).sum(-3).transpose(-3, -2),
    }
    for name, compute in found.items():
        buffer = getattr(gradients, name)
        if buffer is not None:
            buffer.copy_(compute())
    for buffer in gradients.terms:
        if buffer is not None:
            buffer.copy_(ds.sum_to_size(buffer.shape))
