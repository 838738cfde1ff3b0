"""One call as a noun: the axis table, every check a caller can fail, the frozen ``Problem`` that layers below trust."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any, TypeAlias

import torch
from torch import Tensor

from biasflash import hints
from biasflash.bias import KINDS, Kind

#: Axis legend of every tensor. ``*B`` is any number of leading batch axes; ``#`` marks an axis that may also be 1.
AXES: dict[str, str] = {
    "q": "*B M Hq D",
    "k": "*B N Hkv D",
    "v": "*B N Hkv Dv",
    "qkv": "*B L 3 H D",
    "kv": "*B N 2 Hkv D",
    "bias": "#*B #Hq #M #N",
    "mask": "#*B #Hq #M #N",
    "out": "*B M Hq Dv",
    "lse": "*B Hq M",
}

#: dtypes q, k and v may share
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
MAX_WIDTH = 256
CAUSAL = ("none", "bottom-right", "top-left")


@dataclass(frozen=True, kw_only=True, eq=False)  # equal to itself alone, and hashed so
class Door:
    """One public door in its caller's own words, so that every message speaks of what the caller wrote.

    Attributes:
        axes: argument -> axis legend, in the door's order of arguments.
        layout: how the arguments hold q, k and v, in the operator's words.
        heads_first: heads come before lengths, as torch lays attention out.
        bias, scale, causal: the arguments that hold biases, the factor on the products, and causal attention.
        bool_bias_is_mask: a boolean tensor among the biases is a mask, not a mistake.
        hint: what to try when the number of heads looks like a length.
    """

    axes: Mapping[str, str]
    layout: str
    heads_first: bool = False
    bias: str = "bias"
    scale: str = "scale"
    causal: str = "causal"
    bool_bias_is_mask: bool = False
    hint: str = (
        "layout is (*B, length, heads, width); "
        "for (*B, heads, length, width) call biasflash.scaled_dot_product_attention"
    )


#: the library's own door
ATTENTION = Door(axes={name: AXES[name] for name in ("q", "k", "v")}, layout="q,k,v")


class UnsupportedError(NotImplementedError):
    """The call has a meaning, but nothing installed can compute it. The message says what would be accepted."""


@dataclass(frozen=True, kw_only=True)
class Term:
    """One bias or mask: its kind's name, its shape padded with ones to ``(*#B, #Hq, #M, #N)``, dtype and gradient."""

    kind: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    trainable: bool


@dataclass(frozen=True, kw_only=True)
class Problem:
    """Frozen facts of one call. Built after the checks; whoever holds one need not check again.

    ``causal_shift`` is None without a causal mask; otherwise query ``i`` sees keys ``j <= i + causal_shift``.
    ``trainable`` tells whether q, k, v want gradients; every term tells it for itself.
    """

    batch: tuple[int, ...]
    M: int
    N: int
    Hq: int
    Hkv: int
    D: int
    Dv: int
    dtype: torch.dtype
    device: torch.device
    terms: tuple[Term, ...]
    causal_shift: int | None
    scale: float
    trainable: tuple[bool, bool, bool]

    def __hash__(self) -> int:
        return self._hash

    @cached_property  # plans and launch tables look the same instance up several times a call
    def _hash(self) -> int:
        return hash(tuple(self.__getstate__().values()))

    def __getstate__(self) -> dict[str, object]:
        """The facts alone: the hash holds for this process only."""
        return {f.name: getattr(self, f.name) for f in fields(self)}

    @cached_property
    def batch_size(self) -> int:
        return math.prod(self.batch)

    @cached_property
    def is_empty(self) -> bool:
        """No score exists: some axis of length zero."""
        return self.batch_size * self.M * self.N * self.Hq == 0

    @cached_property
    def keeps_low(self) -> bool:
        """Whether ``lse`` is kept as a pair of floats (see the function of this name)."""
        return keeps_low(self.dtype, self.device, [t.dtype for t in self.terms])

    def __str__(self) -> str:
        axes = f"*B={self.batch} M={self.M} N={self.N} Hq={self.Hq} Hkv={self.Hkv} D={self.D} Dv={self.Dv}"
        parts = [axes, f"{short(self.dtype)} on {self.device}"]
        parts += [
            f"{KINDS[t.kind].argument} {t.shape} {short(t.dtype)}{' trained' if t.trainable else ''}"
            for t in self.terms
        ]
        if self.causal_shift is not None:
            parts.append(f"causal j <= i + {self.causal_shift}")
        return "; ".join(parts)


def keeps_low(dtype: torch.dtype, device: torch.device, term_dtypes: Sequence[torch.dtype]) -> bool:
    """Whether the forward pass also returns ``lse_low``, the part of the log-sum-exp that float32 rounds away.

    ``lse + lse_low`` is exact to about 48 bits, which keeps backward weights right for scores of 1e7 and of
    ``finfo.min``, where ``lse`` alone is off by whole units. 16-bit inputs on a GPU without a bias of that range do
    without: their weights are rounded to 2^-9 anyway, which ``lse`` alone resolves up to magnitudes of about 4e4.
    """
    wide_range = any(t not in (torch.bool, torch.float16) for t in term_dtypes)
    return device.type == "cpu" or dtype in (torch.float32, torch.float64) or wide_range


def short(dtype: torch.dtype) -> str:
    """``torch.bfloat16`` -> ``bfloat16``."""
    return str(dtype).removeprefix("torch.")


def causal_shift(causal: str, M: int, N: int) -> int | None:
    """The shift of a causal alignment's diagonal: query ``i`` sees keys ``j <= i + shift``."""
    if causal == "none":
        return None
    return N - M if causal == "bottom-right" else 0


#: of q, k and v: shape and whether a gradient is wanted; of every term also its dtype; then q's dtype and device
Facts: TypeAlias = tuple[tuple[Any, ...], tuple[Any, ...], torch.dtype, torch.device]


def facts(q: Tensor, k: Tensor, v: Tensor, terms: Sequence[Tensor]) -> Facts:
    """What ``assemble`` needs to know of the tensors, hashable."""
    shapes = tuple([(t.shape, t.requires_grad) for t in (q, k, v)])
    return shapes, tuple([(t.shape, t.requires_grad, t.dtype) for t in terms]), q.dtype, q.device


def assemble(
    shapes: tuple[Any, ...],
    term_facts: tuple[Any, ...],
    dtype: torch.dtype,
    device: torch.device,
    kinds: Sequence[str],
    causal: str,
    scale: float | None,
) -> Problem:
    """The ``Problem`` of tensors that passed the checks, from their ``facts``."""
    (q, q_trained), (_, k_trained), (v, v_trained) = shapes
    *batch, M, Hq, D = q
    N, Hkv, Dv = v[-3:]
    return Problem(
        batch=tuple(batch),
        M=M,
        N=N,
        Hq=Hq,
        Hkv=Hkv,
        D=D,
        Dv=Dv,
        dtype=dtype,
        device=device,
        terms=tuple(
            Term(kind=kind, shape=(1,) * (len(q) - len(shape)) + tuple(shape), dtype=term_dtype, trainable=trained)
            for kind, (shape, trained, term_dtype) in zip(kinds, term_facts, strict=True)
        ),
        causal_shift=causal_shift(causal, M, N),
        scale=D**-0.5 if scale is None else scale,
        trainable=(q_trained, k_trained, v_trained),
    )


def build(
    q: Tensor, k: Tensor, v: Tensor, terms: Sequence[Tensor], kinds: Sequence[str], causal: str, scale: float | None
) -> Problem:
    """``assemble`` of the tensors' own facts."""
    return assemble(*facts(q, k, v, terms), kinds, causal, scale)


# ------------------------------------------------------------------------------------------------------ user checks


def _shape(t: Tensor) -> tuple[int, ...]:
    return tuple(t.shape)


#: axis -> the first argument that has it, that tensor, and its size there
Bound: TypeAlias = dict[str, tuple[str, Tensor, int]]


def check_tensors(door: Door, *values: object) -> list[Tensor]:
    """The door's tensor arguments, every one a tensor."""
    tensors = []
    for (name, axes), value in zip(door.axes.items(), values, strict=True):
        if not isinstance(value, Tensor):
            found = f"got {type(value).__name__}{hints.of_array(name, value)}"
            raise TypeError(f"{name} must be a torch.Tensor of axes ({axes}), {found}")
        _check_layout(name, value)
        tensors.append(value)
    return tensors


def _check_layout(name: str, tensor: Tensor) -> None:
    if tensor.layout != torch.strided or tensor.is_nested:  # sparse, nested, MKL-DNN: no strides to read it by
        found = f"{name} has layout {tensor.layout}{', nested' if tensor.is_nested else ''}"
        raise TypeError(f"{found}; accepted: torch.strided ({hints.of_layout(name, tensor.is_nested)})")


def _listed(words: Sequence[str]) -> str:
    """``["q", "k", "v"]`` -> ``q, k and v``."""
    return " and ".join((", ".join(words[:-1]), words[-1])) if len(words) > 1 else words[0]


def check_inputs(door: Door, tensors: Sequence[Tensor], *, grouped: bool = True) -> None:
    """Shapes, dtypes and devices of a door's tensors against its axis legends; raises with the axis at fault.

    Without ``grouped`` as many key heads as query heads. Sizes may be symbols of a traced graph, compared one by one:
    ``in`` and ``==`` of containers would go by identity."""
    names, first = list(door.axes), tensors[0]
    batch = first.dim() - len(door.axes[names[0]].split()) + 1
    bound: Bound = {}
    for (name, axes), t in zip(door.axes.items(), tensors, strict=True):
        legend = axes.split()[1:]
        lead = t.dim() - len(legend)
        if lead < 0:
            raise ValueError(f"{name} of shape {_shape(t)} has too few axes: wanted ({axes})")
        if t.dtype not in DTYPES:
            raise TypeError(f"{name} has dtype {short(t.dtype)}; accepted: {', '.join(short(d) for d in DTYPES)}")
        if t.dtype != first.dtype:
            found = ", ".join(short(t.dtype) for t in tensors)
            raise TypeError(f"{_listed(names)} must share one dtype, got {found}; convert with .to({names[0]}.dtype)")
        if t.device != first.device:
            found = ", ".join(str(t.device) for t in tensors)
            raise ValueError(f"{_listed(names)} must be on one device, got {found}")
        if lead != batch or any(t.shape[i] != first.shape[i] for i in range(batch)):
            found = ", ".join(f"{n} {_shape(t)} = ({door.axes[n]})" for n, t in zip(names, tensors, strict=True))
            raise ValueError(f"{_listed(names)} must have the same batch axes *B; got {found}")
        for axis, size in zip(legend, t.shape[lead:], strict=True):
            if axis.isdigit():
                if size != int(axis):
                    raise ValueError(
                        f"{name} of shape {_shape(t)} must be ({axes}): the third axis from the right is {size}, "
                        f"wanted {axis}"
                    )
                continue
            other, o, wanted = bound.setdefault(axis, (name, t, size))
            if size != wanted:
                raise ValueError(
                    f"{other} {_shape(o)} and {name} {_shape(t)} differ in axis {axis}: {wanted} and {size}"
                )
    _check_sizes(door, bound, grouped)


def _check_sizes(door: Door, bound: Bound, grouped: bool) -> None:
    """Numbers of heads and widths that a call can have."""
    for axis in ("H", "Hkv"):
        if axis in bound and bound[axis][2] == 0:
            name, t, _ = bound[axis]
            raise ValueError(f"{name} of shape {_shape(t)} has {axis} = 0; {axis} must be at least 1")
    if "Hq" in bound:
        (name, t, heads), (other, o, kv_heads) = bound["Hq"], bound["Hkv"]
        found = f"{name} {_shape(t)} has Hq = {heads}, {other} {_shape(o)} has Hkv = {kv_heads}"
        if not grouped and heads != kv_heads and heads % kv_heads == 0:
            raise ValueError(f"{found}; pass enable_gqa=True for grouped heads ({door.hint})")
        if heads % kv_heads != 0:
            raise ValueError(
                f"the number of query heads must be a multiple of the number of key heads: {found} ({door.hint})"
            )
    for axis in ("D", "Dv"):
        if axis in bound:
            name, t, width = bound[axis]
            found = f"{name} of shape {_shape(t)} has axis {axis} = {width}"
            if width < 1:
                raise ValueError(f"{found}; wanted 1 to {MAX_WIDTH}")
            if width > MAX_WIDTH:
                raise UnsupportedError(f"{found}; supported: 1 to {MAX_WIDTH}")


def check_term(name: str, term: Tensor, q: Tensor, k: Tensor, door: Door = ATTENTION) -> None:
    """A bias or mask must broadcast, right-aligned, to ``(*B, Hq, M, N)`` and live on q's device."""
    *batch, queries, heads, _ = q.shape
    keys, key_heads = k.shape[-3:-1]
    full = (*batch, heads, queries, keys)
    _check_layout(name, term)
    if term.device != q.device:
        owner = next(iter(door.axes))
        raise ValueError(f"{name} is on {term.device}, {owner} is on {q.device}; move it with .to({owner}.device)")
    text = f"{name} of shape {_shape(term)} does not broadcast to (*B, Hq, M, N) = {full}"
    offset = len(full) - term.dim()
    if offset < 0:
        raise ValueError(f"{text}: it has {term.dim()} axes, at most {len(full)} are possible")
    for i in range(term.dim()):
        size, wanted = term.shape[i], full[offset + i]
        if size != 1 and size != wanted:  # one by one, as in check_inputs
            axis = [*(f"B[{b}]" for b in range(len(batch))), "Hq", "M", "N"][offset + i]
            exchanged = () if door.heads_first or keys < 1 or queries % keys else (*batch, queries, heads, key_heads)
            way = hints.of_term(name, _shape(term), term.dtype == torch.bool, full, exchanged, door.hint)
            raise ValueError(f"{text}: axis {axis} is {size}, wanted 1 or {wanted}{way}")


def gather_terms(
    bias: object, mask: object, q: Tensor, k: Tensor, door: Door = ATTENTION
) -> tuple[list[Tensor], list[str]]:
    """The flat list of score terms and their kinds, checked; ``bias`` and ``mask`` are None, a tensor, or lists."""
    terms: list[Tensor] = []
    kinds: list[str] = []
    for kind in KINDS.values():
        given = bias if kind.argument == "bias" else mask
        if given is None:
            continue
        argument = door.bias if kind.argument == "bias" else kind.argument
        several = isinstance(given, (list, tuple))
        for i, value in enumerate(given if isinstance(given, (list, tuple)) else [given]):
            name = f"{argument}[{i}]" if several else argument
            if not isinstance(value, Tensor):
                found = f"got {type(value).__name__}{hints.of_array(name, value, door.causal)}"
                raise TypeError(f"{name} must be a torch.Tensor (or {argument} a list of them), {found}")
            kind_name = _kind_of(name, value, kind, door)
            check_term(name, value, q, k, door)
            terms.append(value)
            kinds.append(kind_name)
    return masks_last(terms), sorted(kinds, key="keep".__eq__)


def masks_last(terms: Sequence[Tensor]) -> list[Tensor]:
    """The order of terms: a mask hides what biases add, NaN too."""
    return sorted(terms, key=lambda t: t.dtype == torch.bool)


def _kind_of(name: str, value: Tensor, kind: Kind, door: Door) -> str:
    """The kind that a tensor given as ``kind`` takes part as, by its dtype."""
    may_be_mask = kind.argument == "bias" and door.bool_bias_is_mask
    if value.dtype == torch.bool and kind.argument == "bias":
        if not may_be_mask:
            raise TypeError(f"{name} is boolean; pass it as mask= (True = may attend)")
        return "keep"
    if value.dtype not in kind.dtypes:
        accepted = ", ".join(short(d) for d in kind.dtypes) + (", bool (True = may attend)" if may_be_mask else "")
        hint = ""
        if kind.argument == "mask":
            hint = (
                "; an additive float plane goes to bias="
                if value.is_floating_point()
                else f"; write {name} != 0 if non-zero means may attend"
            )
        raise TypeError(f"{name} has dtype {short(value.dtype)}; accepted: {accepted}{hint}")
    return kind.name


def check_causal(causal: object) -> str:
    """``False | True | "bottom-right" | "top-left"`` -> one of ``CAUSAL``; True means bottom-right."""
    if isinstance(causal, bool):
        return "bottom-right" if causal else "none"
    if isinstance(causal, str) and causal in CAUSAL[1:]:
        return causal
    raise ValueError(f'causal must be False, True (= "bottom-right"), "bottom-right" or "top-left", got {causal!r}')


def check_scale(scale: object, name: str = "scale") -> float | None:
    """A finite number, or None; ``name`` is the argument's in the message."""
    if scale is None:
        return None
    if isinstance(scale, bool) or not isinstance(scale, (int, float)):
        found = f"got {type(scale).__name__}{hints.of_number(name, scale)}"
        raise TypeError(f"{name} must be a number or None (= 1/sqrt(D)), {found}")
    if not -math.inf < scale < math.inf:  # not math.isfinite: a traced graph holds scale as a symbol
        raise ValueError(f"{name} must be finite, got {scale}")
    return float(scale)
