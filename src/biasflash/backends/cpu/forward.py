"""Forward pass: one walk over the keys with a running softmax."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from biasflash.backends.cpu.blocks import compute_dtype
from biasflash.backends.cpu.scores import HIDDEN, Call, Index, own_precision
from biasflash.problem import Problem


def forward(
    problem: Problem, q: Tensor, k: Tensor, v: Tensor, terms: Sequence[Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    compute = compute_dtype(problem)
    out = q.new_zeros((*problem.batch, problem.M, problem.Hq, problem.Dv))
    lse = q.new_full((*problem.batch, problem.Hq, problem.M), HIDDEN, dtype=compute)
    low = torch.zeros_like(lse)
    if problem.is_empty:
        return out, lse, low
    with own_precision():
        call = Call(problem, q, k, v, terms)
        views = [call.grouped(out.transpose(-3, -2), -3), call.grouped(lse, -2), call.grouped(low, -2)]
        for heads in call.head_spans():
            for group in call.groups:
                keys, values = call.keys(heads, group)
                for rows in call.row_spans:
                    index = (*heads, group, rows)
                    if not call.key_spans(rows):
                        continue  # these queries see nothing: out and lse are already what they should be
                    found = _attend(call, keys, values, index)
                    for view, block in zip(views, found, strict=True):
                        target = view[index]
                        target.copy_(block.view(target.shape))
    return out, lse, low


def _attend(call: Call, keys: Tensor, values: Tensor, index: Index) -> tuple[Tensor, Tensor, Tensor]:
    """``out: P (G M) Dv``, ``lse`` and ``lse_low: P (G M) 1`` of some rows, in one pass over the keys they may see."""
    q = call.flat(call.q, index)
    state: tuple[Tensor, Tensor, Tensor] | None = None  # largest score, sum of exp(s - largest), weighted values
    for span in call.key_spans(index[-1]):
        s = call.scores(q, keys, (*index, span))
        top = s.amax(-1, keepdim=True)
        if state is not None:
            top = torch.maximum(top, state[0])
        anchor = top.masked_fill(top == HIDDEN, 0.0)
        p = s.sub_(anchor).exp_()
        total, acc = p.sum(-1, keepdim=True), torch.bmm(p, values[:, span])
        if state is not None:
            decay = torch.exp(state[0] - anchor)
            total.addcmul_(state[1], decay)
            acc.addcmul_(state[2], decay)
        state = top, total, acc
    assert state is not None
    top, total, acc = state
    empty = top == HIDDEN
    log_total = total.masked_fill_(empty, 1.0).log()
    lse = top + log_total
    low = ((top - lse) + log_total).masked_fill_(empty, 0.0)
    return acc.div_(total).masked_fill_(empty, 0.0), lse, low
