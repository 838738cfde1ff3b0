"""A cheap check of a large call: one head of one batch item, and some rows of a shared bias's gradient, in float32."""

from __future__ import annotations

import torch
from torch import Tensor

from biasflash.cli import gate
from biasflash.testing.case import Call

#: scores held at once, and rows of a bias gradient that are checked
BLOCK, ROWS = 2**26, 8


def errors(call: Call, out: Tensor, gradients: dict[str, Tensor]) -> dict[str, float]:
    """Relative Frobenius error of ``out`` and of every gradient (named as in ``Call.leaves``), on the parts checked.

    For calls with one batch axis, one key head per query head, at most one bias ``(1, H, M, N)`` or ``(B, H, M, N)``,
    no mask, and not causal. The item and head are the last ones, so that a wrong offset shows.
    """
    with torch.no_grad(), gate.full_float32():
        truth = _one_head(call)
        found = {"out": out.detach()[-1, :, -1]}
        found |= {name: t[-1, :, -1] for name, t in gradients.items() if name in ("dq", "dk", "dv")}
        if "dbias[0]" in gradients:
            found["dbias[0]"] = gradients["dbias[0]"][-1, -1, -ROWS:]
            truth["dbias[0]"] = _bias_rows(call)
        return gate.compare(found, gate.Truth(tensors=truth))


def _scale(call: Call) -> float:
    return float(call.q.shape[-1] ** -0.5 if call.scale is None else call.scale)


def _one_head(call: Call) -> dict[str, Tensor]:
    """Results of the last batch item and head, a block of queries at a time."""
    q, k, v, dout = (t.detach()[-1, :, -1].float() for t in (call.q, call.k, call.v, call.dout))
    plane = call.bias[0].detach()[-1, -1] if call.bias else None
    scale, step = _scale(call), max(1, BLOCK // k.shape[0])
    truth = {"out": torch.empty_like(dout), "dq": torch.empty_like(q)}
    truth |= {"dk": torch.zeros_like(k), "dv": torch.zeros_like(v)}
    for start in range(0, q.shape[0], step):
        part = slice(start, start + step)
        s = (q[part] @ k.T).mul_(scale)
        if plane is not None:
            s += plane[part].float()
        p = s.softmax(-1)
        del s
        truth["out"][part] = p @ v
        delta = (truth["out"][part] * dout[part]).sum(-1, keepdim=True)
        truth["dv"] += p.T @ dout[part]
        ds = p.mul_((dout[part] @ v.T).sub_(delta))
        truth["dq"][part] = ds @ k * scale
        truth["dk"] += ds.T @ q[part] * scale
    return truth


def _bias_rows(call: Call) -> Tensor:
    """The last rows of the bias gradient's last head, ``(ROWS, N)``, summed over the batch if the bias is shared."""
    items = slice(None) if call.bias[0].shape[0] == 1 else slice(-1, None)
    q, dout = (t.detach()[items, -ROWS:, -1].float() for t in (call.q, call.dout))
    k, v = (t.detach()[items, :, -1].float() for t in (call.k, call.v))
    total = torch.zeros(q.shape[1], k.shape[1], device=q.device)
    plane = call.bias[0].detach()[-1, -1, -ROWS:].float()
    step = max(1, BLOCK // (q.shape[1] * k.shape[1]))
    for start in range(0, q.shape[0], step):
        part = slice(start, start + step)
        p = ((q[part] @ k[part].mT) * _scale(call) + plane).softmax(-1)
        delta = ((p @ v[part]) * dout[part]).sum(-1, keepdim=True)
        total += (p * (dout[part] @ v[part].mT - delta)).sum(0)
    return total
