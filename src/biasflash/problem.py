"""One call as a noun: the axis table, every check a caller can fail, and the frozen ``Problem`` that layers below trust."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from biasflash.bias import KINDS

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

    @property
    def batch_size(self) -> int:
        return math.prod(self.batch)

    @property
    def is_empty(self) -> bool:
        """No score exists: some axis of length zero."""
        return self.batch_size * self.M * self.N * self.Hq == 0

    @property
    def keeps_low(self) -> bool:
        """Whether ``lse`` is kept as a pair of floats (see ``keeps_low``)."""
        return keeps_low(self.dtype, self.device)

    def __str__(self) -> str:
        axes = f"*B={self.batch} M={self.M} N={self.N} Hq={self.Hq} Hkv={self.Hkv} D={self.D} Dv={self.Dv}"
        parts = [axes, f"{short(self.dtype)} on {self.device}"]
        parts += [
            f"{KINDS[t.kind].argument} {t.shape} {short(t.dtype)}{' trained' if t.trainable else ''}" for t in self.terms
        ]
        if self.causal_shift is not None:
            parts.append(f"causal j <= i + {self.causal_shift}")
        return "; ".join(parts)


def keeps_low(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether the forward pass also returns ``lse_low``, the part of the log-sum-exp that float32 rounds away.

    ``lse + lse_low`` is exact to about 48 bits, which keeps backward weights right for scores of 1e7 and of
    ``finfo.min``, where ``lse`` alone is off by whole units. 16-bit inputs on a GPU do without: their weights are
    rounded to 2^-9 anyway, which ``lse`` alone resolves up to magnitudes of about 4e4.
    """
    return device.type == "cpu" or dtype in (torch.float32, torch.float64)


def short(dtype: torch.dtype) -> str:
    """``torch.bfloat16`` -> ``bfloat16``."""
    return str(dtype).removeprefix("torch.")


def causal_shift(causal: str, M: int, N: int) -> int | None:
    """The shift of a causal alignment's diagonal: query ``i`` sees keys ``j <= i + shift``."""
    if causal == "none":
        return None
    return N - M if causal == "bottom-right" else 0


def build(
    q: Tensor, k: Tensor, v: Tensor, terms: Sequence[Tensor], kinds: Sequence[str], causal: str, scale: float | None
) -> Problem:
    """The ``Problem`` of tensors that passed ``check``."""
    *batch, M, Hq, D = q.shape
    N, Hkv, Dv = v.shape[-3:]
    rank = len(batch) + 3
    return Problem(
        batch=tuple(batch),
        M=M,
        N=N,
        Hq=Hq,
        Hkv=Hkv,
        D=D,
        Dv=Dv,
        dtype=q.dtype,
        device=q.device,
        terms=tuple(
            Term(kind=kind, shape=(1,) * (rank - t.dim()) + tuple(t.shape), dtype=t.dtype, trainable=t.requires_grad)
            for t, kind in zip(terms, kinds, strict=True)
        ),
        causal_shift=causal_shift(causal, M, N),
        scale=D**-0.5 if scale is None else scale,
        trainable=(q.requires_grad, k.requires_grad, v.requires_grad),
    )


# ------------------------------------------------------------------------------------------------------ user checks


def _shape(t: Tensor) -> tuple[int, ...]:
    return tuple(t.shape)


def check_tensor(name: str, value: object) -> Tensor:
    if not isinstance(value, Tensor):
        raise TypeError(f"{name} must be a torch.Tensor of axes ({AXES.get(name, '')}), got {type(value).__name__}")
    return value


def check_packed(name: str, packed: Tensor, count: int) -> None:
    """A packed tensor has its ``count`` members on the third axis from the right."""
    if packed.dim() < 4:
        raise ValueError(f"{name} of shape {_shape(packed)} has too few axes: wanted ({AXES[name]})")
    if packed.shape[-3] != count:
        raise ValueError(
            f"{name} of shape {_shape(packed)} must be ({AXES[name]}): the third axis from the right is "
            f"{packed.shape[-3]}, wanted {count}"
        )


def check_qkv(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Shapes, dtypes and devices of q, k and v against the axis table; raises with the axis at fault."""
    for name, t in (("q", q), ("k", k), ("v", v)):
        if t.dim() < 3:
            raise ValueError(f"{name} of shape {_shape(t)} has too few axes: wanted ({AXES[name]})")
        if t.dtype not in DTYPES:
            raise TypeError(f"{name} has dtype {short(t.dtype)}; accepted: {', '.join(short(d) for d in DTYPES)}")
    if not (q.dtype == k.dtype == v.dtype):
        raise TypeError(
            f"q, k and v must share one dtype, got {short(q.dtype)}, {short(k.dtype)}, {short(v.dtype)}; "
            "convert with .to(q.dtype)"
        )
    if not (q.device == k.device == v.device):
        raise ValueError(f"q, k and v must be on one device, got {q.device}, {k.device}, {v.device}")
    if q.dim() != k.dim() or q.dim() != v.dim() or q.shape[:-3] != k.shape[:-3] or q.shape[:-3] != v.shape[:-3]:
        raise ValueError(
            f"q, k and v must have the same batch axes *B; got q {_shape(q)} = ({AXES['q']}), "
            f"k {_shape(k)} = ({AXES['k']}), v {_shape(v)} = ({AXES['v']})"
        )
    if k.shape[-3] != v.shape[-3]:
        raise ValueError(f"k {_shape(k)} and v {_shape(v)} differ in axis N: {k.shape[-3]} and {v.shape[-3]}")
    if k.shape[-2] != v.shape[-2]:
        raise ValueError(f"k {_shape(k)} and v {_shape(v)} differ in axis Hkv: {k.shape[-2]} and {v.shape[-2]}")
    if q.shape[-1] != k.shape[-1]:
        raise ValueError(f"q {_shape(q)} and k {_shape(k)} differ in axis D: {q.shape[-1]} and {k.shape[-1]}")
    heads, kv_heads = q.shape[-2], k.shape[-2]
    if kv_heads == 0 or heads % kv_heads != 0:
        raise ValueError(
            f"the number of query heads must be a multiple of the number of key heads: q {_shape(q)} has Hq = {heads}, "
            f"k {_shape(k)} has Hkv = {kv_heads} (layout is (*B, length, heads, width); "
            "for (*B, heads, length, width) call biasflash.scaled_dot_product_attention)"
        )
    for name, t, axis in (("q", q, "D"), ("v", v, "Dv")):
        width = t.shape[-1]
        if width < 1:
            raise ValueError(f"{name} of shape {_shape(t)} has axis {axis} = 0; wanted 1 to {MAX_WIDTH}")
        if width > MAX_WIDTH:
            raise UnsupportedError(f"{name} of shape {_shape(t)} has axis {axis} = {width}; supported: 1 to {MAX_WIDTH}")


def check_term(name: str, term: Tensor, q: Tensor, keys: int) -> None:
    """A bias or mask must broadcast, right-aligned, to ``(*B, Hq, M, N)`` and live on q's device."""
    *batch, queries, heads, _ = q.shape
    full = (*batch, heads, queries, keys)
    if term.device != q.device:
        raise ValueError(f"{name} is on {term.device}, q is on {q.device}; move it with .to(q.device)")
    labels = tuple(f"B[{i}]" for i in range(len(batch))) + ("Hq", "M", "N")
    text = f"{name} of shape {_shape(term)} does not broadcast to (*B, Hq, M, N) = {full}"
    if term.dim() > len(full):
        raise ValueError(f"{text}: it has {term.dim()} axes, at most {len(full)} are possible")
    offset = len(full) - term.dim()
    for i in range(term.dim()):
        size, wanted = term.shape[i], full[offset + i]
        if size not in (1, wanted):
            hint = ""
            if term.dim() == len(full) - 1 and labels[offset + i] == "Hq":
                hint = f"; for one {name} per batch item insert a head axis: {name}[:, None]"
            elif name.startswith("mask") and term.dim() == 2 and len(full) > 2:
                hint = f"; for a (B, N) key mask write {name}[:, None, None, :]"
            raise ValueError(f"{text}: axis {labels[offset + i]} is {size}, wanted 1 or {wanted}{hint}")


def gather_terms(
    bias: object, mask: object, q: Tensor, keys: int, *, bool_bias_is_mask: bool = False
) -> tuple[list[Tensor], list[str]]:
    """The flat list of score terms and their kinds, checked; ``bias`` and ``mask`` are None, a tensor, or lists."""
    terms: list[Tensor] = []
    kinds: list[str] = []
    for kind in KINDS.values():
        given = bias if kind.argument == "bias" else mask
        if given is None:
            continue
        several = isinstance(given, (list, tuple))
        for i, value in enumerate(given if isinstance(given, (list, tuple)) else [given]):
            name = f"{kind.argument}[{i}]" if several else kind.argument
            if not isinstance(value, Tensor):
                raise TypeError(f"{name} must be a torch.Tensor (or {kind.argument} a list of them), got {type(value).__name__}")
            kind_name = kind.name
            if kind.argument == "bias" and value.dtype == torch.bool:
                if not bool_bias_is_mask:
                    raise TypeError(f"{name} is boolean; pass it as mask= (True = may attend)")
                kind_name = "keep"
            elif value.dtype not in kind.dtypes:
                accepted = ", ".join(short(d) for d in kind.dtypes)
                hint = ""
                if kind.argument == "mask":
                    hint = (
                        "; an additive float plane goes to bias="
                        if value.is_floating_point()
                        else f"; write {name} != 0 if non-zero means may attend"
                    )
                raise TypeError(f"{name} has dtype {short(value.dtype)}; accepted: {accepted}{hint}")
            check_term(name, value, q, keys)
            terms.append(value)
            kinds.append(kind_name)
    return terms, kinds


def check_causal(causal: object) -> str:
    """``False | True | "bottom-right" | "top-left"`` -> one of ``CAUSAL``; True means bottom-right."""
    if causal is False:
        return "none"
    if causal is True:
        return "bottom-right"
    if isinstance(causal, str) and causal in CAUSAL[1:]:
        return causal
    raise ValueError(f'causal must be False, True (= "bottom-right"), "bottom-right" or "top-left", got {causal!r}')


def check_scale(scale: object) -> float | None:
    if scale is None:
        return None
    if isinstance(scale, bool) or not isinstance(scale, (int, float)):
        raise TypeError(f"scale must be a number or None (= 1/sqrt(D)), got {type(scale).__name__}")
    if not math.isfinite(scale):
        raise ValueError(f"scale must be finite, got {scale}")
    return float(scale)


def refuse_unbuilt(**options: object) -> None:
    """Options of the contract that no backend computes yet; each at its neutral value passes."""
    for name, value in options.items():
        neutral = value is None or (name == "dropout_p" and value == 0.0)
        if not neutral:
            accepted = "0.0" if name == "dropout_p" else "None"
            raise UnsupportedError(f"{name}={value!r} is not built yet; accepted: {name}={accepted}")
