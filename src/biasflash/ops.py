"""Torch operators: schemas, fakes and autograd. No kernel is loaded here; the plan is asked when an operator runs.

One operator pair serves every door. ``inputs`` are the tensors as the caller holds them, in one of three layouts:
``"q,k,v"`` (three tensors), ``"q,kv"`` (two) or ``"qkv"`` (one); packed tensors are read through strides and their
gradient is written as one packed tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeAlias

import torch
from torch import Tensor, library
from torch.autograd import forward_ad

from biasflash import problem as problems
from biasflash.backends.backend import Backend, Gradients, bias_pitch
from biasflash.problem import Problem, UnsupportedError

_SHARED = "Tensor[] inputs, Tensor[] terms, str kinds, str layout, str causal, float? scale, str? backend"
_OUTPUT = "Tensor out, Tensor lse, Tensor lse_low"
_TAGS = (torch.Tag.pt2_compliant_tag,)
_lib: Any = library.Library("biasflash", "DEF")  # type: ignore[no-untyped-call]
_lib.define(f"forward({_SHARED}) -> ({_OUTPUT})", tags=_TAGS)
_lib.define(f"backward(Tensor? dout, Tensor? dlse, {_SHARED}, {_OUTPUT}, bool[] wanted) -> Tensor[]", tags=_TAGS)


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


#: kinds of the terms joined by commas, layout, causal alignment, scale, backend: what the operators take beside tensors
Settings: TypeAlias = tuple[str, str, str, float | None, str | None]


@lru_cache(maxsize=4096)
def _prepared(facts: problems.Facts, settings: Settings, trained: bool) -> Direct:
    """The problem and the backend that computes it, made once for each set of facts."""
    from biasflash import backends, plan

    kinds, _, causal, scale, backend = settings
    problem = problems.assemble(*facts, _split(kinds), causal, scale)
    return Direct(settings, problem, backends.load(plan.choose(problem, backend).backend), trained)


def prepare(inputs: Sequence[Tensor], terms: Sequence[Tensor], settings: Settings) -> Direct:
    """How tensors that passed the checks are computed; the same for all that share shapes, dtypes, device, gradients.

    Raises:
        UnsupportedError: no backend computes it, or not the named one.
    """
    trained = any(t.requires_grad for t in (*inputs, *terms))
    return _prepared(problems.facts(*unpack(inputs, settings[1]), terms), settings, trained)


@dataclass(frozen=True)
class Dispatched:
    """The operators called through torch's dispatcher: what compilers, dispatch modes and tensor subclasses see."""

    settings: Settings

    def forward(self, inputs: list[Tensor], terms: list[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        with torch._C._AutoDispatchBelowAutograd():
            output: tuple[Tensor, Tensor, Tensor] = torch.ops.biasflash.forward(inputs, terms, *self.settings)
        return output

    def backward(
        self,
        dout: Tensor | None,
        dlse: Tensor | None,
        inputs: list[Tensor],
        terms: list[Tensor],
        output: Sequence[Tensor],
        wanted: list[bool],
    ) -> list[Tensor]:
        found: list[Tensor] = torch.ops.biasflash.backward(dout, dlse, inputs, terms, *self.settings, *output, wanted)
        return found


@dataclass(frozen=True)
class Direct:
    """A prepared problem and its backend, called without the dispatcher; for tensors that are ``is_plain``.

    ``trained`` tells whether any tensor of the call wants a gradient.
    """

    settings: Settings
    problem: Problem
    backend: Backend
    trained: bool

    def forward(self, inputs: Sequence[Tensor], terms: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = unpack(inputs, self.settings[1])
        return self.backend.forward(self.problem, q, k, v, _padded(terms, q.dim()))

    def backward(
        self,
        dout: Tensor | None,
        dlse: Tensor | None,
        inputs: list[Tensor],
        terms: list[Tensor],
        output: Sequence[Tensor],
        wanted: list[bool],
    ) -> list[Tensor]:
        """As if dispatched, if what autograd hands over is no longer plain or the derivative's derivative is wanted."""
        given = [t for t in (dout, dlse, *inputs, *terms, *output) if t is not None]
        if torch.is_grad_enabled() or not is_plain(given):
            return Dispatched(self.settings).backward(dout, dlse, inputs, terms, output, wanted)
        return self.gradients(dout, dlse, inputs, terms, output, wanted)

    def gradients(
        self,
        dout: Tensor | None,
        dlse: Tensor | None,
        inputs: Sequence[Tensor],
        terms: Sequence[Tensor],
        output: Sequence[Tensor],
        wanted: Sequence[bool],
    ) -> list[Tensor]:
        layout = self.settings[1]
        q, k, v = unpack(inputs, layout)
        rank = q.dim()
        buffers = gradient_buffers(inputs, terms, wanted, output[1])
        head = buffers[: len(inputs)]
        if layout == "q,k,v":
            dq, dk, dv = head
        elif layout == "q,kv":
            dq, dkv = head
            dk, dv = (None, None) if dkv is None else (dkv.select(-3, 0), dkv.select(-3, 1))
        else:
            dq, dk, dv = (None, None, None) if head[0] is None else unpack(head, layout)  # type: ignore[arg-type]
        dterms = tuple([None if b is None else _padded([b], rank)[0] for b in buffers[len(inputs) :]])
        out, lse, low = output
        if dout is None:
            dout = torch.zeros_like(out)
        into = Gradients(q=dq, k=dk, v=dv, terms=dterms)
        self.backend.backward(self.problem, into, dout, dlse, q, k, v, _padded(terms, rank), out, lse, low)
        return [b for b in buffers if b is not None]


def _forward(
    inputs: Sequence[Tensor],
    terms: Sequence[Tensor],
    kinds: str,
    layout: str,
    causal: str,
    scale: float | None,
    backend: str | None,
) -> tuple[Tensor, Tensor, Tensor]:
    return prepare(inputs, terms, (kinds, layout, causal, scale, backend)).forward(inputs, terms)


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
    low = lse.new_empty(lse.shape if problems.keeps_low(q.dtype, q.device, [t.dtype for t in terms]) else (0,))
    return out, lse, low


def lse_dtype(q: Tensor) -> torch.dtype:
    return torch.float64 if q.dtype == torch.float64 else torch.float32


def gradient_buffers(
    inputs: Sequence[Tensor], terms: Sequence[Tensor], wanted: Sequence[bool], lse: Tensor
) -> list[Tensor | None]:
    """Where gradients are written: shapes and dtypes of the tensors, their strides if they are dense, else contiguous;
    on a GPU rows of a full bias (as many as ``lse`` has entries) ``bias_pitch`` apart."""
    count = len(inputs)
    rows = [torch.empty_like(t) if want else None for t, want in zip(inputs, wanted[:count], strict=True)]
    full = lse.numel() if lse.is_cuda else -1
    return [*rows, *(bias_buffer(t, full) if want else None for t, want in zip(terms, wanted[count:], strict=True))]


def bias_buffer(t: Tensor, full: int) -> Tensor:
    """Where a bias's gradient is written; rows are ``bias_pitch`` apart where it has ``full`` of them."""
    if t.dim() < 2 or t.stride(-1) != 1 or t.numel() != full * t.shape[-1]:
        return torch.empty_like(t)
    *outer, columns = t.shape
    return t.new_empty((*outer, bias_pitch(columns, t.itemsize)))[..., :columns]


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
    direct = prepare(inputs, terms, (kinds, layout, causal, scale, backend))
    return direct.gradients(dout, dlse, inputs, terms, (out, lse, lse_low), wanted)


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
    return [b for b in gradient_buffers(inputs, terms, wanted, lse) if b is not None]


# ---------------------------------------------------------------------------------------------------------- autograd
# Written as autograd functions of a flat list of tensors: torch's own register_autograd walks lists of tensors
# through pytree, which costs more host time than everything else in a call together.


class _Attend(torch.autograd.Function):
    """The forward of ``way`` with its backward as derivative. Tensors are ``count`` inputs, then the terms."""

    @staticmethod
    def forward(ctx: Any, way: Dispatched | Direct, count: int, *tensors: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        output = way.forward(list(tensors[:count]), list(tensors[count:]))
        ctx.way, ctx.count = way, count
        ctx.save_for_backward(*tensors, *output)
        ctx.mark_non_differentiable(output[2])
        ctx.set_materialize_grads(False)
        return output

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None, _dlow: Tensor | None) -> tuple[Any, ...]:
        wanted = list(ctx.needs_input_grad[2:])
        if (dout is None and dlse is None) or not any(wanted):
            return (None, None, *[None for _ in wanted])
        saved = ctx.saved_tensors
        inputs, terms = list(saved[: ctx.count]), list(saved[ctx.count : -3])
        found = iter(ctx.way.backward(dout, dlse, inputs, terms, saved[-3:], wanted))
        return (None, None, *[next(found) if want else None for want in wanted])


class _NoSecondDerivative(torch.autograd.Function):
    """``backward``, whose own derivative is refused rather than silently zero."""

    @staticmethod
    def forward(ctx: Any, arguments: tuple[Any, ...], *_tensors: Tensor) -> tuple[Tensor, ...]:
        with torch._C._AutoDispatchBelowAutograd():
            return tuple(torch.ops.biasflash.backward(*arguments))

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise UnsupportedError(
            "biasflash computes first derivatives only; a second derivative (create_graph=True) was asked for. "
            "torch.nn.functional.scaled_dot_product_attention under SDPBackend.MATH has one"
        )


def _refuse_tangents(tensors: Sequence[Tensor | None]) -> None:
    """Forward-mode differentiation would silently lose the tangents: the operators have no rule for it."""
    if forward_ad._current_level < 0:
        return
    given = [t for t in tensors if t is not None]
    if any(forward_ad.unpack_dual(t).tangent is not None for t in given):  # type: ignore[no-untyped-call]
        raise UnsupportedError(
            "biasflash has no forward-mode derivative (torch.func.jvp, jacfwd, make_dual); use reverse mode: "
            "out.backward() or torch.autograd.grad"
        )


def _wants_graph(tensors: Sequence[Tensor | None]) -> bool:
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)


def _forward_autograd(inputs: list[Tensor], terms: list[Tensor], *settings: Any) -> tuple[Tensor, Tensor, Tensor]:
    _refuse_tangents([*inputs, *terms])
    if _wants_graph([*inputs, *terms]):
        attended: tuple[Tensor, Tensor, Tensor] = _Attend.apply(  # type: ignore[no-untyped-call]
            Dispatched(settings), len(inputs), *inputs, *terms
        )
        return attended
    return Dispatched(settings).forward(inputs, terms)


def _backward_autograd(
    dout: Tensor | None, dlse: Tensor | None, inputs: list[Tensor], terms: list[Tensor], *rest: Any
) -> list[Tensor]:
    arguments = (dout, dlse, inputs, terms, *rest)
    tensors = [dout, dlse, *inputs, *terms]
    _refuse_tangents(tensors)
    if _wants_graph(tensors):
        given = [t for t in tensors if t is not None]
        return list(_NoSecondDerivative.apply(arguments, *given))  # type: ignore[no-untyped-call]
    with torch._C._AutoDispatchBelowAutograd():
        found: list[Tensor] = torch.ops.biasflash.backward(*arguments)
    return found


for _name, _run, _fake, _autograd in (
    ("forward", _forward, _forward_fake, _forward_autograd),
    ("backward", _backward, _backward_fake, _backward_autograd),
):
    _lib.impl(_name, _run, "CompositeExplicitAutograd")
    _lib.impl(_name, _autograd, "Autograd")
    library.register_fake(f"biasflash::{_name}", _fake, lib=_lib)


# --------------------------------------------------------------------------------------------------------- ways to call


def _bits(*keys: str) -> int:
    """A set of dispatch keys as torch writes it in one integer."""
    found = 0
    for key in keys:
        found |= torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, key)).raw_repr()
    return found


#: keys that are on in a thread which runs eagerly: outside and inside of inference mode
_EAGER = frozenset({_bits("BackendSelect", "ADInplaceOrView"), _bits("BackendSelect")})
#: keys of an ordinary dense tensor, made outside and inside of inference mode
_DENSE = frozenset(
    _bits(device, f"Autocast{device}", *autograd)
    for device in ("CPU", "CUDA")
    for autograd in (("ADInplaceOrView", f"Autograd{device}"), ())
)
_AUTOGRAD = torch._C.DispatchKey.AutogradFunctionality
_TYPES = frozenset({Tensor, torch.nn.Parameter})
#: ``Function.apply`` without its look at functorch, which ``is_plain`` took; that is a third of its time
_attend: Any = super(torch.autograd.Function, _Attend).apply


def is_plain(tensors: Sequence[Any]) -> bool:
    """Whether the dispatcher, asked with these tensors, would find nothing to do but call this file's functions.

    Then they may be called directly, which spares 20 us a call. Not so where something traces, profiles, transforms or
    counts calls, or where a tensor is of a kind of its own (a subclass, a wrapper, a lazily negated view).
    """
    if torch.compiler.is_compiling() or forward_ad._current_level >= 0:
        return False
    c = torch._C
    if c._dispatch_tls_local_include_set().raw_repr() not in _EAGER or c._is_torch_function_mode_enabled():
        return False
    if c._autograd._profiler_enabled():  # the operators are to be seen by name
        return False
    if torch.is_grad_enabled() and c._dispatch_tls_is_dispatch_key_excluded(_AUTOGRAD):
        return False  # inside the implementation of an operator that has a derivative of its own
    found = [type(t) in _TYPES and c._dispatch_keys(t).raw_repr() in _DENSE for t in tensors]
    return all(found)


def attend(inputs: list[Tensor], terms: list[Tensor], settings: Settings) -> tuple[Tensor, Tensor]:
    """The operator as the doors call it: ``out`` and ``lse``."""
    out, lse, _ = torch.ops.biasflash.forward(inputs, terms, *settings)
    return out, lse


def attend_directly(way: Direct, inputs: list[Tensor], terms: list[Tensor]) -> tuple[Tensor, Tensor]:
    """``attend`` of tensors that are plain, with what ``prepare`` found for tensors like them."""
    if way.trained and torch.is_grad_enabled():
        out, lse, _ = _attend(way, len(inputs), *inputs, *terms)
    else:
        out, lse, _ = way.forward(inputs, terms)
    return out, lse
