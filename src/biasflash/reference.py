"""The meaning of every call, in plain torch: about a page that anyone can audit. Memory grows with M x N.

Order of operations: product x scale -> + biases -> masks -> softmax. A query that sees no key gives out = 0,
lse = -inf and zero to every gradient; a finite bias, however low, never hides a key.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

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

    What no pair may read is cleared before the products, so that a NaN stored there cannot leak as 0 x NaN, forward or
    backward: keys and values that no query sees, and queries that see nothing.
    """
    group = q.shape[-2] // k.shape[-2]
    hidden = hidden_pairs(q, k, terms, kinds, shift)
    unseen = hidden.all(-2).unsqueeze(-1)  # #*B #Hq #N 1
    q = q.transpose(-3, -2).masked_fill(hidden.all(-1, keepdim=True), 0.0)  # *B Hq M D
    k = k.transpose(-3, -2).repeat_interleave(group, dim=-3).masked_fill(unseen, 0.0)  # *B Hq N D
    v = v.transpose(-3, -2).repeat_interleave(group, dim=-3).masked_fill(unseen, 0.0)  # *B Hq N Dv
    s = (q @ k.transpose(-1, -2)) * scale  # *B Hq M N
    for term, kind in zip(terms, kinds, strict=True):
        s = KINDS[kind].apply(s, term)
    s = s.masked_fill(hidden, float("-inf"))
    if s.shape[-1] == 0:
        return s, s.new_full(s.shape[:-1], float("-inf")), k, v
    top = s.detach().amax(-1, keepdim=True)
    empty = top == float("-inf")
    p = torch.exp(s - top.masked_fill(empty, 0.0))
    total = p.sum(-1, keepdim=True)
    lse = (top + total.masked_fill(empty, 1.0).log()).masked_fill(empty, float("-inf")).squeeze(-1)
    return p / total.masked_fill(empty, 1.0), lse, k, v


def hidden_pairs(q: Tensor, k: Tensor, terms: Sequence[Tensor], kinds: Sequence[str], shift: int | None) -> Tensor:
    """Pairs that some term (a mask, a bias of -inf) or the causal rule hides, boolean ``#*B #Hq #M #N``.

    Each term is asked alone: finite biases whose sum overflows hide nothing.
    """
    hidden = torch.zeros((1, 1), dtype=torch.bool, device=q.device)
    for term, kind in zip(terms, kinds, strict=True):
        alone = KINDS[kind].apply(torch.zeros(term.shape, dtype=q.dtype, device=q.device), term.detach())
        hidden = hidden | (alone == float("-inf"))
    if shift is not None:
        i = torch.arange(q.shape[-3], device=q.device)[:, None]
        hidden = hidden | (torch.arange(k.shape[-3], device=q.device) > i + shift)
    return hidden


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
    out = (p @ v).masked_fill((lse == float("-inf")).unsqueeze(-1), 0.0)  # also stops a NaN in such a row's gradient
    return out.transpose(-3, -2), lse


# ---------------------------------------------------------------------------------------------- the backend contract


def objections(problem: Problem) -> tuple[str, ...]:
    return ()


def reservations(problem: Problem) -> tuple[str, ...]:
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
    # a sum of finite biases may be beyond float32 where float64 still holds it: then there is no low part
    low = torch.where(torch.isfinite(lse), lse64 - lse, 0.0).to(lse.dtype)
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
    p, lse64, keys, values = weights(q64, k64, v64, terms64, kinds, problem.causal_shift, problem.scale)
    empty = (lse64 == float("-inf")).unsqueeze(-1)  # these rows give nothing, whatever is stored in q and dout
    queries = q64.transpose(-3, -2).masked_fill(empty, 0.0)  # *B Hq M D
    dout64 = dout.double().transpose(-3, -2).masked_fill(empty, 0.0)  # *B Hq M Dv
    dp = dout64 @ values.transpose(-1, -2)
    ds = p * (dp - (p * dp).sum(-1, keepdim=True) + (0.0 if dlse is None else dlse.double()[..., None]))
    ds = ds.masked_fill(p == 0, 0.0)
    group = (*problem.batch, problem.Hkv, problem.Hq // problem.Hkv)  # dk and dv are summed over a key head's group
    found: dict[str, Callable[[], Tensor]] = {
        "q": lambda: (ds @ keys * problem.scale).masked_fill(empty, 0.0).transpose(-3, -2),
        "k": lambda: (
            (ds.transpose(-1, -2) @ queries * problem.scale)
            .reshape(*group, problem.N, problem.D)
            .sum(-3)
            .transpose(-3, -2)
        ),
        "v": lambda: (p.transpose(-1, -2) @ dout64).reshape(*group, problem.N, problem.Dv).sum(-3).transpose(-3, -2),
    }
    for name, compute in found.items():
        buffer = getattr(gradients, name)
        if buffer is not None:
            buffer.copy_(compute())
    for buffer in gradients.terms:
        if buffer is not None:
            buffer.copy_(ds.sum_to_size(buffer.shape))
