"""Torch operators: schemas, fakes and autograd. No kernel is loaded here; the plan is asked when an operator runs.

One operator pair serves every door. ``inputs`` are the tensors as the caller holds them, in one of three layouts:
``"q,k,v"`` (three tensors), ``"q,kv"`` (two) or ``"qkv"`` (one); packed tensors are read through strides and their
gradient is written as one packed tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from biasflash import problem as problems
from biasflash.problem import UnsupportedError

_SHARED = "Tensor[] inputs, Tensor[] terms, str kinds, str layout, str causal, float? scale, str? backend"
_lib = torch.library.Library("biasflash", "DEF")
_lib.define(f"forward({_SHARED}) -> (Tensor out, Tensor lse, Tensor lse_low)", tags=(torch.Tag.pt2_compliant_tag,))
_lib.define(
    f"backward(Tensor? dout, Tensor? dlse, {_SHARED}, Tensor out, Tensor lse, Tensor lse_low, bool[] wanted) -> Tensor[]",
    tags=(torch.Tag.pt2_compliant_tag,),
)


def unpack(inputs: Sequence[Tensor], layout: str) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v as views of the caller's tensors."""
    if layout == "q,k,v":
        q, k, v = inputs
    elif layout == "q,kv":
        q, kv = inputs
        k, v = kv.select(-3, 0), kv.select(-3, 1)
    else:
        (qkv,) = inputs
        q, k, v = qkv.select(-3, 0), qkv.select(-3, 1), qkv.select(-3, 2)
    return q, k, v


def _padded(terms: Sequence[Tensor], rank: int) -> list[Tensor]:
    return [t[(None,) * (rank - t.dim())] if t.dim() < rank else t for t in terms]


def _split(kinds: str) -> list[str]:
    return kinds.split(",") if kinds else []


def _forward(
    inputs: Sequence[Tensor],
    terms: Sequence[Tensor],
    kinds: str,
    layout: str,
    causal: str,
    scale: float | None,
    backend: str | None,
) -> tuple[Tensor, Tensor, Tensor]:
    from biasflash import backends, plan

    q, k, v = unpack(inputs, layout)
    problem = problems.build(q, k, v, terms, _split(kinds), causal, scale)
    chosen = backends.load(plan.choose(problem, backend).backend)
    return chosen.forward(problem, q, k, v, _padded(terms, q.dim()))


def _forward_fake(
    inputs: Sequence[Tensor],
    terms: Sequence[Tensor],
    kinds: str,
    layout: str,
    causal: str,
    scale: float | None,
    backend: str | None,
) -> tuple[Tensor, Tensor, Tensor]:
    q, _, v = unpack(inputs, layout)
    *batch, queries, heads, _ = q.shape
    out = q.new_empty((*batch, queries, heads, v.shape[-1]))
    lse = q.new_empty((*batch, heads, queries), dtype=lse_dtype(q))
    low = lse.new_empty(lse.shape if problems.keeps_low(q.dtype, q.device) else (0,))
    return out, lse, low


def lse_dtype(q: Tensor) -> torch.dtype:
    return torch.float64 if q.dtype == torch.float64 else torch.float32


def gradient_buffer(t: Tensor) -> Tensor:
    """Where the gradient of ``t`` is written: its shape and dtype, its strides if they are dense, else contiguous."""
    return torch.empty_like(t)


def _backward(
    dout: Tensor | None,
    dlse: Tensor | None,
    inputs: Sequence[Tensor],
    terms: Sequence[Tensor],
    kinds: str,
    layout: str,
    causal: str,
    scale: float | None,
    backend: str | None,
    out: Tensor,
    lse: Tensor,
    lse_low: Tensor,
    wanted: Sequence[bool],
) -> list[Tensor]:
    from biasflash import backends, plan
    from biasflash.backends.backend import Gradients

    q, k, v = unpack(inputs, layout)
    problem = problems.build(q, k, v, terms, _split(kinds), causal, scale)
    chosen = backends.load(plan.choose(problem, backend).backend)
    buffers = [gradient_buffer(t) if want else None for t, want in zip([*inputs, *terms], wanted, strict=True)]
    head = buffers[: len(inputs)]
    if layout == "q,k,v":
        dq, dk, dv = head
    elif layout == "q,kv":
        dq, dkv = head
        dk, dv = (None, None) if dkv is None else (dkv.select(-3, 0), dkv.select(-3, 1))
    else:
        dq, dk, dv = (None, None, None) if head[0] is None else unpack(head, layout)  # type: ignore[arg-type]
    dterms = [None if b is None else _padded([b], q.dim())[0] for b in buffers[len(inputs) :]]
    if dout is None:
        dout = torch.zeros_like(out)
    chosen.backward(
        problem,
        Gradients(q=dq, k=dk, v=dv, terms=tuple(dterms)),
        dout,
        dlse,
        q,
        k,
        v,
        _padded(terms, q.dim()),
        out,
        lse,
        lse_low,
    )
    return [b for b in buffers if b is not None]


def _backward_fake(
    dout: Tensor | None,
    dlse: Tensor | None,
    inputs: Sequence[Tensor],
    terms: Sequence[Tensor],
    kinds: str,
    layout: str,
    causal: str,
    scale: float | None,
    backend: str | None,
    out: Tensor,
    lse: Tensor,
    lse_low: Tensor,
    wanted: Sequence[bool],
) -> list[Tensor]:
    return [gradient_buffer(t) for t, want in zip([*inputs, *terms], wanted, strict=True) if want]


# ---------------------------------------------------------------------------------------------------------- autograd


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    tensors, terms, ctx.kinds, ctx.layout, ctx.causal, ctx.scale, ctx.backend = inputs
    ctx.counts = len(tensors), len(terms)
    ctx.save_for_backward(*tensors, *terms, *output)
    ctx.mark_non_differentiable(output[2])
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, dout: Tensor | None, dlse: Tensor | None, _dlow: Tensor | None) -> tuple[Any, ...]:
    n_inputs, n_terms = ctx.counts
    saved = ctx.saved_tensors
    inputs, terms = list(saved[:n_inputs]), list(saved[n_inputs : n_inputs + n_terms])
    wanted = [*ctx.needs_input_grad[0], *ctx.needs_input_grad[1]]
    if (dout is None and dlse is None) or not any(wanted):
        return [None] * n_inputs, [None] * n_terms, None, None, None, None, None
    shared = (inputs, terms, ctx.kinds, ctx.layout, ctx.causal, ctx.scale, ctx.backend)
    found = iter(torch.ops.biasflash.backward(dout, dlse, *shared, *saved[-3:], wanted))
    grads = [next(found) if want else None for want in wanted]
    return grads[:n_inputs], grads[n_inputs:], None, None, None, None, None


def _save_nothing(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    pass


def _refuse_second_derivative(ctx: Any, *grads: Any) -> Any:
    raise UnsupportedError(
        "biasflash computes first derivatives only; a second derivative (create_graph=True) was asked for. "
        "torch.nn.functional.scaled_dot_product_attention under SDPBackend.MATH has one"
    )


for _name, _run, _fake in (("forward", _forward, _forward_fake), ("backward", _backward, _backward_fake)):
    _lib.impl(_name, _run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"biasflash::{_name}", _fake, lib=_lib)
torch.library.register_autograd("biasflash::forward", _differentiate, setup_context=_save, lib=_lib)
torch.library.register_autograd("biasflash::backward", _refuse_second_derivative, setup_context=_save_nothing, lib=_lib)


def attend(
    inputs: list[Tensor],
    terms: list[Tensor],
    kinds: list[str],
    layout: str,
    causal: str,
    scale: float | None,
    backend: str | None,
) -> tuple[Tensor, Tensor]:
    """The operator as the doors call it: ``out`` and ``lse``."""
    out, lse, _ = torch.ops.biasflash.forward(inputs, terms, ",".join(kinds), layout, causal, scale, backend)
    return out, lse
