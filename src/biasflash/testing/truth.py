"""The reference run slice by slice over batch and heads, so that float64 truth of a long sequence fits in memory."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from biasflash import problem, reference
from biasflash.bias import KINDS
from biasflash.testing.case import Call

#: scores of one slice: a few float64 arrays of this many elements are alive at once
SLICE = 2**24


@dataclass(frozen=True, kw_only=True)
class Solution:
    """Results by name: ``out``, ``lse``, ``dq``, ``dk``, ``dv``, ``dbias[i]``.

    ``sizes`` are the same sums taken over magnitudes, the yardstick of what cancels; ``reached`` is True where at least
    one kept (query, key) pair contributes. Both are empty unless ``truth`` made the solution. In a case with a corner
    the query axis holds the last ``corner`` queries only.
    """

    values: dict[str, Tensor] = field(default_factory=dict)
    sizes: dict[str, Tensor] = field(default_factory=dict)
    reached: dict[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class _Slice:
    """One part of a call: tensors cut to some batch entries, some key heads and their query heads, and the corner."""

    where: dict[str, tuple[slice | int, ...]]
    q: Tensor
    k: Tensor
    v: Tensor
    terms: list[Tensor]
    dout: Tensor
    dlse: Tensor | None


def _terms(call: Call) -> tuple[list[Tensor], list[str]]:
    """Biases then masks, padded to full rank, and their kinds."""
    rank = len(call.case.full())
    terms = [t.detach()[(None,) * (rank - t.dim())] for t in [*call.bias, *call.mask]]
    return terms, ["dense"] * len(call.bias) + ["keep"] * len(call.mask)


def _cuts(call: Call) -> Iterator[tuple[tuple[slice, ...], slice, slice]]:
    """Slices of the batch axes, of the key heads and of their query heads, each with at most ``SLICE`` scores."""
    case = call.case
    group = case.Hq // case.Hkv
    per_head = max(1, (case.corner or case.M) * case.N * group)
    heads = min(case.Hkv, max(1, SLICE // per_head))
    axes: list[list[slice]] = []
    room = max(1, SLICE // (per_head * heads))
    for size in reversed(case.batch):
        step = min(max(size, 1), room)
        axes.insert(0, [slice(i, min(i + step, size)) for i in range(0, size, step)])
        room = max(1, room // step)
    for lead in itertools.product(*axes):
        for h in range(0, case.Hkv, heads):
            keys = slice(h, min(h + heads, case.Hkv))
            yield lead, keys, slice(keys.start * group, keys.stop * group)


def _cut(index: tuple[slice, ...], shape: Sequence[int]) -> tuple[slice, ...]:
    """``index`` where the axis is full, all of it where it is broadcast."""
    return tuple(slice(None) if size == 1 else cut for cut, size in zip(index, shape, strict=True))


def _slices(call: Call) -> Iterator[_Slice]:
    case = call.case
    terms, _ = _terms(call)
    rows = slice(case.M - case.corner if case.corner else 0, case.M)
    buffer_rows = slice(0, rows.stop - rows.start)
    every = slice(None)
    q, k, v = call.q.detach(), call.k.detach(), call.v.detach()
    if case.poison:
        k, v = k.nan_to_num(nan=0.0), v.nan_to_num(nan=0.0)  # what is stored behind the padding has no meaning
    for lead, keys, heads in _cuts(call):
        where: dict[str, tuple[slice | int, ...]] = {
            "out": (*lead, buffer_rows, heads),
            "lse": (*lead, heads, buffer_rows),
            "dq": (*lead, buffer_rows, heads),
            "dk": (*lead, every, keys),
            "dv": (*lead, every, keys),
        }
        for i, t in enumerate(terms[: len(call.bias)]):
            where[f"dbias[{i}]"] = _cut((*lead, heads, buffer_rows, every), t.shape)
        queries, members = (*lead, rows, heads), (*lead, every, keys)
        pairs = (*lead, heads, rows, every)
        yield _Slice(
            where=where,
            q=q[queries],
            k=k[members],
            v=v[members],
            terms=[t[_cut(pairs, t.shape)] for t in terms],
            dout=call.dout[queries],
            dlse=None if call.dlse is None else call.dlse[pairs[:-1]],
        )


def _shift_and_scale(call: Call) -> tuple[int | None, float]:
    """The causal shift of the rows that are computed, and the scale."""
    case = call.case
    shift = problem.causal_shift(problem.check_causal(case.causal), case.M, case.N)
    if shift is not None and case.corner:
        shift += case.M - case.corner
    return shift, case.D**-0.5 if case.scale is None else case.scale


def _shapes(call: Call) -> dict[str, tuple[int, ...]]:
    case = call.case
    rows = case.corner or case.M
    shapes: dict[str, tuple[int, ...]] = {
        "out": (*case.batch, rows, case.Hq, case.Dv),
        "lse": (*case.batch, case.Hq, rows),
        "dq": (*case.batch, rows, case.Hq, case.D),
        "dk": (*case.batch, case.N, case.Hkv, case.D),
        "dv": (*case.batch, case.N, case.Hkv, case.Dv),
    }
    for i, t in enumerate(_terms(call)[0][: len(call.bias)]):
        shapes[f"dbias[{i}]"] = (*t.shape[:-2], rows if t.shape[-2] > 1 else 1, t.shape[-1])
    return shapes


def _wanted(call: Call) -> list[str]:
    """Names of the gradients that the case asks for."""
    names = [f"d{letter}" for letter in "qkv" if getattr(call, letter).requires_grad]
    return names + [f"dbias[{i}]" for i, t in enumerate(call.bias) if t.requires_grad]


def _blank(call: Call, names: Sequence[str], dtype: torch.dtype) -> dict[str, Tensor]:
    shapes = _shapes(call)
    return {name: torch.zeros(shapes[name], dtype=dtype, device=call.q.device) for name in names}


def solve(call: Call, dtype: torch.dtype, *, backward: bool = True) -> dict[str, Tensor]:
    """``reference.attend`` and autograd in ``dtype``, biases in their own (in float64 all are float64).

    Gradients summed over several slices are added up in float32 (float64 in float64) and rounded once.
    """
    names = _wanted(call) if backward else []
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    found = _blank(call, ["out", "lse"], dtype) | _blank(call, names, wide)
    _, kinds = _terms(call)
    shift, scale = _shift_and_scale(call)
    for part in _slices(call):
        leaves: dict[str, Tensor] = {}
        for name, t in zip(("dq", "dk", "dv"), (part.q, part.k, part.v), strict=True):
            leaves[name] = t.to(dtype).requires_grad_(name in names)
        terms = []
        for i, t in enumerate(part.terms):
            if i < len(call.bias):
                t = (t.double() if dtype == torch.float64 else t.clone()).requires_grad_(f"dbias[{i}]" in names)
                leaves[f"dbias[{i}]"] = t
            terms.append(t)
        out, lse = reference.attend(leaves["dq"], leaves["dk"], leaves["dv"], terms, kinds, shift, scale)
        found["out"][part.where["out"]] = out.detach()
        found["lse"][part.where["lse"]] = lse.detach()
        if not names:
            continue
        seeds = [part.dout.to(out.dtype), torch.zeros_like(lse) if part.dlse is None else part.dlse.to(lse.dtype)]
        used = [i for i, t in enumerate((out, lse)) if t.requires_grad]
        outputs, seeds = [(out, lse)[i] for i in used], [seeds[i] for i in used]
        # lse does not depend on v, and without keys nothing depends on anything: such a gradient is zero
        grads = torch.autograd.grad(outputs, [leaves[n] for n in names], seeds, allow_unused=True)
        for name, grad in zip(names, grads, strict=True):
            if grad is not None:
                found[name][part.where[name]] += grad
    return found


def _magnitudes(part: _Slice, kinds: Sequence[str], shift: int | None, scale: float) -> dict[str, Tensor]:
    """The call's sums over magnitudes instead of signed terms, in float64."""
    q, k, v = part.q.double(), part.k.double(), part.v.double()
    dout = part.dout.double().abs().transpose(-3, -2)  # *B Hq M Dv
    terms = [t.double() if t.is_floating_point() else t for t in part.terms]
    p, _, keys, values = reference.weights(q, k, v, terms, kinds, shift, scale)
    queries, keys, values = q.abs().transpose(-3, -2), keys.abs(), values.abs()
    s = abs(scale) * (queries @ keys.transpose(-1, -2))
    for t, kind in zip(terms, kinds, strict=True):
        if kind == "dense":
            s = s + t.abs().masked_fill(t.isinf(), 0.0)
    dp = dout @ values.transpose(-1, -2)
    ds = p * (dp + (p * dp).sum(-1, keepdim=True) + (0.0 if part.dlse is None else part.dlse.double().abs()[..., None]))
    group = (*k.shape[:-3], k.shape[-2], q.shape[-2] // k.shape[-2], k.shape[-3])  # *B Hkv group N
    dk = (abs(scale) * ds.transpose(-1, -2) @ queries).reshape(*group, k.shape[-1])
    dv = (p.transpose(-1, -2) @ dout).reshape(*group, v.shape[-1])
    found = {
        "out": (p @ values).transpose(-3, -2),
        "lse": (p * s).sum(-1),
        "dq": (abs(scale) * ds @ keys).transpose(-3, -2),
        "dk": dk.sum(-3).transpose(-3, -2),
        "dv": dv.sum(-3).transpose(-3, -2),
    }
    for i in range(sum(kind == "dense" for kind in kinds)):
        found[f"dbias[{i}]"] = ds.sum_to_size(terms[i].shape)
    return found


def _keep(part: _Slice, kinds: Sequence[str], shift: int | None) -> Tensor:
    """``*B Hq M N``: the pairs that neither a mask nor the causal rule nor a bias of -inf hides."""
    *batch, rows, heads, _ = part.q.shape
    s = torch.zeros((*batch, heads, rows, part.k.shape[-3]), dtype=torch.float64, device=part.q.device)
    for t, kind in zip(part.terms, kinds, strict=True):
        s = KINDS[kind].apply(s, t)
    if shift is not None:
        i = torch.arange(rows, device=s.device)[:, None]
        s = s.masked_fill(torch.arange(s.shape[-1], device=s.device) > i + shift, -math.inf)
    return s > -math.inf


def truth(call: Call) -> Solution:
    """The call in float64, the sums of magnitudes beside it, and which elements any kept pair reaches."""
    values = solve(call, torch.float64)
    names = list(values)
    sizes = _blank(call, names, torch.float32)
    reached = _blank(call, names, torch.bool)
    _, kinds = _terms(call)
    shift, scale = _shift_and_scale(call)
    for part in _slices(call):
        keep = _keep(part, kinds, shift)
        rows = keep.any(-1)  # *B Hq M
        heads = (*keep.shape[:-3], part.k.shape[-2], keep.shape[-3] // part.k.shape[-2])
        keys = keep.any(-2).reshape(*heads, keep.shape[-1]).any(-2)  # *B Hkv N
        seen = {"out": rows.transpose(-2, -1)[..., None], "lse": rows}
        seen |= {"dq": seen["out"], "dk": keys.transpose(-2, -1)[..., None]}
        seen["dv"] = seen["dk"]
        for i in range(len(call.bias)):
            seen[f"dbias[{i}]"] = keep.to(torch.float32).sum_to_size(part.terms[i].shape) > 0
        size = _magnitudes(part, kinds, shift, scale)
        for name in names:
            sizes[name][part.where[name]] += size[name]
            reached[name][part.where[name]] |= seen[name]
    return Solution(values=values, sizes=sizes, reached=reached)
