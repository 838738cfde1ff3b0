"""What a named problem is: its shape, terms, memory layout and hostilities, and the tensors built from it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from biasflash import ops
from biasflash.testing.memory import lay_out

DTYPES: dict[str, torch.dtype] = {
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "fp32": torch.float32,
    "fp64": torch.float64,
}


@dataclass(frozen=True, kw_only=True)
class Bias:
    """One additive bias of a case.

    Attributes:
        shape: one character per axis of ``(*B, Hq, M, N)``, right-aligned: ``1`` for a broadcast axis, any letter for a
            full one. ``"B1HMN"`` belongs to two batch axes; ``"MN"`` is a tensor of two axes.
        dtype: ``"same"`` as q, or a name of ``DTYPES``.
        trained: whether its gradient is asked for.
        values: ``"normal"``; ``"some -inf"``: a fifth of all entries and every fifth query row hidden;
            ``"lowest"``: ``finfo.min`` in every second key of every row and in all keys of every third row;
            ``"large"``: row offsets of up to ten thousand.
        strides: a layout of ``testing.memory``; ``"expanded"`` presents broadcast axes at full size with stride 0.
    """

    shape: str
    dtype: str = "same"
    trained: bool = True
    values: str = "normal"
    strides: str = "contiguous"


@dataclass(frozen=True, kw_only=True)
class Mask:
    """One boolean mask of a case; ``shape`` and ``strides`` as in ``Bias``.

    ``fill`` is ``"random half"`` (key 0 stays visible), ``"key padding"`` (keys from a random length on are hidden),
    ``"left padding"`` (keys before a random one are), ``"window"`` (a band around the diagonal), ``"some rows empty"``
    (random half, every third query row sees nothing), ``"all"`` or ``"none"``.
    """

    shape: str
    fill: str = "random half"
    strides: str = "contiguous"


@dataclass(frozen=True, kw_only=True)
class Ceilings:
    """What a machine can do at most: matrix-product FLOP, bytes copied and exponentials, each per second."""

    products: float
    bytes: float
    exps: float


#: measured on an H200: bf16 products of 8192^3, a large copy, 16 exponentials a clock on 132 SMs
H200 = Ceilings(products=716e12, bytes=4.3e12, exps=4.2e12)


@dataclass(frozen=True, kw_only=True)
class Call:
    """The tensors of one case, ready to be passed to a door."""

    case: Case
    inputs: dict[str, Tensor]
    bias: list[Tensor]
    mask: list[Tensor]
    dout: Tensor
    dlse: Tensor | None

    @property
    def q(self) -> Tensor:
        return ops.unpack(list(self.inputs.values()), LAYOUTS[self.case.layout])[0]

    @property
    def k(self) -> Tensor:
        return ops.unpack(list(self.inputs.values()), LAYOUTS[self.case.layout])[1]

    @property
    def v(self) -> Tensor:
        return ops.unpack(list(self.inputs.values()), LAYOUTS[self.case.layout])[2]

    @property
    def causal(self) -> bool | str:
        return self.case.causal

    @property
    def scale(self) -> float | None:
        return self.case.scale

    def options(self) -> dict[str, Any]:
        """Keyword arguments that every door of the library takes."""
        options: dict[str, Any] = {"bias": self.bias or None, "mask": self.mask or None}
        options |= {"causal": self.causal, "scale": self.scale}
        if self.dlse is not None:
            options["return_lse"] = True
        return options

    def run(self, attention_fn: Callable[..., Any], **extra: Any) -> tuple[Tensor, Tensor | None]:
        """``out`` and, if the case asks for it, ``lse`` of ``attention_fn(q, k, v, bias=, mask=, causal=, ...)``.

        Packed inputs are passed as the three views of the packed leaf.
        """
        found = attention_fn(self.q, self.k, self.v, **self.options(), **extra)
        return (found[0], found[1]) if isinstance(found, tuple) else (found, None)

    def leaves(self) -> dict[str, Tensor]:
        """Tensors whose gradients are asked for: ``dq``, ``dk``, ``dv``, ``dkv`` or ``dqkv``, and ``dbias[i]``."""
        named = {f"d{name}": t for name, t in self.inputs.items()}
        named |= {f"dbias[{i}]": t for i, t in enumerate(self.bias)}
        return {name: t for name, t in named.items() if t.requires_grad}

    def gradients(self, out: Tensor, lse: Tensor | None) -> dict[str, Tensor]:
        """Gradients of ``sum(out * dout) + sum(lse * dlse)`` with respect to ``leaves``."""
        leaves = self.leaves()
        if not leaves:
            return {}
        outputs, seeds = [out], [self.dout]
        if lse is not None and self.dlse is not None:
            outputs, seeds = [out, lse], [self.dout, self.dlse]
        return dict(zip(leaves, torch.autograd.grad(outputs, list(leaves.values()), seeds), strict=True))


#: a case's layout -> the operator's word for it
LAYOUTS: dict[str, str] = {"separate": "q,k,v", "kv": "q,kv", "qkv": "qkv"}


@dataclass(frozen=True, kw_only=True)
class Case:
    """A named problem that tests, ``biasflash check``, benches and docs share.

    Attributes:
        name, why: what it is called, and the real situation it stands for.
        tags: ``smoke`` (tiny: runs in Triton's interpreter), ``check`` (medium), ``workload`` (timed), ``big`` (needs
            tens of GB on a GPU).
        batch, M, N, Hq, Hkv, D, Dv: the axes; ``batch`` are the leading ones, none or several.
        dtype, dtypes: the usual dtype of q, k and v, and all in which the case makes sense.
        biases, masks, causal, scale, return_lse: the arguments; ``return_lse`` also sends a gradient into lse.
        layout: ``separate``, ``kv`` or ``qkv`` packed.
        strides: memory layout of q, k and v, see ``testing.memory``.
        trained: which of the letters q, k, v want a gradient.
        dout: ``normal``, or ``expanded`` as ``out.sum().backward()`` sends it (stride 0).
        poison: store NaN in keys and values that the first mask hides from every query.
        corner: only the last so many queries get a gradient, so that truth need be computed for them alone.
    """

    name: str
    why: str
    tags: frozenset[str]
    batch: tuple[int, ...]
    M: int
    N: int
    Hq: int
    Hkv: int
    D: int
    Dv: int
    dtype: str = "bf16"
    dtypes: tuple[str, ...] = ("fp16", "bf16", "fp32")
    biases: tuple[Bias, ...] = ()
    masks: tuple[Mask, ...] = ()
    causal: bool | str = False
    scale: float | None = None
    return_lse: bool = False
    layout: str = "separate"
    strides: str = "contiguous"
    trained: str = "qkv"
    dout: str = "normal"
    poison: bool = False
    corner: int | None = None

    # -------------------------------------------------------------------------------------------------------- tensors

    def full(self) -> tuple[int, ...]:
        """``(*B, Hq, M, N)``."""
        return (*self.batch, self.Hq, self.M, self.N)

    def term_shape(self, pattern: str) -> tuple[int, ...]:
        """The shape that a pattern such as ``"1HMN"`` means here."""
        axes = self.full()[len(self.full()) - len(pattern) :]
        return tuple(1 if char == "1" else size for char, size in zip(pattern, axes, strict=True))

    def build(self, device: torch.device | str, dtype: torch.dtype | str | None = None, seed: int = 0) -> Call:
        """Tensors on ``device``: leaves (requiring gradients where trained), ``dout (*B M Hq Dv)``, ``dlse (*B Hq M)``.

        ``dtype`` is that of q, k, v and of biases with dtype ``"same"``; None takes the case's own.
        """
        device = torch.device(device)
        dtype = self.dtype if dtype is None else dtype
        real = DTYPES[dtype] if isinstance(dtype, str) else dtype
        source = torch.Generator(device).manual_seed(seed)
        mask = [self._mask(m, device, source) for m in self.masks]
        inputs = self._inputs(real, device, source, mask)
        bias = [self._bias(b, real, device, source) for b in self.biases]
        lse_dtype = torch.float64 if real == torch.float64 else torch.float32
        dlse = _normal((*self.batch, self.Hq, self.M), lse_dtype, device, source) if self.return_lse else None
        shape = (*self.batch, self.M, self.Hq, self.Dv)
        if self.dout == "expanded":
            dout = torch.ones((), dtype=real, device=device).expand(shape)
        else:
            dout = _normal(shape, real, device, source)
        if self.corner is not None:
            dout[..., : -self.corner, :, :] = 0.0
            if dlse is not None:
                dlse[..., : -self.corner] = 0.0
        return Call(case=self, inputs=inputs, bias=bias, mask=mask, dout=dout, dlse=dlse)

    def _inputs(
        self, dtype: torch.dtype, device: torch.device, source: torch.Generator, mask: Sequence[Tensor]
    ) -> dict[str, Tensor]:
        q = _normal((*self.batch, self.M, self.Hq, self.D), dtype, device, source)
        k = _normal((*self.batch, self.N, self.Hkv, self.D), dtype, device, source)
        v = _normal((*self.batch, self.N, self.Hkv, self.Dv), dtype, device, source)
        if self.poison:
            hidden = ~mask[0].transpose(-1, -3)  # *#B N 1 1, from *#B 1 1 N
            k, v = k.masked_fill(hidden, math.nan), v.masked_fill(hidden, math.nan)
        if self.layout == "qkv":
            found = {"qkv": torch.stack([q, k, v], dim=-3)}
        elif self.layout == "kv":
            found = {"q": q, "kv": torch.stack([k, v], dim=-3)}
        else:
            found = {"q": q, "k": k, "v": v}
        return {
            name: lay_out(t, self.strides).requires_grad_(any(letter in self.trained for letter in name))
            for name, t in found.items()
        }

    def _bias(self, bias: Bias, dtype: torch.dtype, device: torch.device, source: torch.Generator) -> Tensor:
        real = dtype if bias.dtype == "same" else DTYPES[bias.dtype]
        t = _normal(self.term_shape(bias.shape), real, device, source)
        if bias.values == "some -inf":
            hide = torch.rand(t.shape, device=device, generator=source) < 0.2
            if t.dim() > 1 and t.shape[-2] > 1:
                hide[..., ::5, :] = True
            t = t.masked_fill(hide, -math.inf)
        elif bias.values == "lowest":
            t[..., ::2] = torch.finfo(real).min
            t[..., ::3, :] = torch.finfo(real).min
        elif bias.values == "large":
            t += 1e4 * torch.linspace(-1, 1, t.shape[-2], device=device)[:, None].to(real)
        elif bias.values != "normal":
            raise ValueError(f"unknown bias values {bias.values!r}")
        return self._placed(t, bias.strides, len(bias.shape)).requires_grad_(bias.trained)

    def _mask(self, mask: Mask, device: torch.device, source: torch.Generator) -> Tensor:
        shape = self.term_shape(mask.shape)
        keep = torch.rand(shape, device=device, generator=source) < 0.5
        keys = torch.arange(shape[-1], device=device)
        if mask.fill == "random half":
            keep[..., :1] = True
        elif mask.fill == "key padding":
            lengths = torch.rand((*shape[:-1], 1), device=device, generator=source) * (shape[-1] - 1) + 1
            keep = keys < lengths
        elif mask.fill == "left padding":
            starts = torch.rand((*shape[:-1], 1), device=device, generator=source) * shape[-1]
            keep = keys >= starts.floor()
        elif mask.fill == "window":
            queries = torch.arange(shape[-2], device=device)[:, None]
            keep = ((queries - keys).abs() <= max(1, shape[-1] // 8)).expand(shape).contiguous()
        elif mask.fill == "some rows empty":
            keep[..., :1] = True
            keep[..., ::3, :] = False
        elif mask.fill in ("all", "none"):
            keep = torch.full(shape, mask.fill == "all", device=device)
        else:
            raise ValueError(f"unknown mask fill {mask.fill!r}")
        return self._placed(keep, mask.strides, len(mask.shape))

    def _placed(self, t: Tensor, strides: str, rank: int) -> Tensor:
        if strides == "expanded":
            return t.expand(self.full()[len(self.full()) - rank :])
        return lay_out(t, strides)

    # --------------------------------------------------------------------------------------------------------- floors

    @property
    def scores(self) -> float:
        """Scores that count as work: all of them, half of them under a causal mask (the timed ones have M == N)."""
        return math.prod(self.full()) * (0.5 if self.causal else 1.0)

    def flops(self, backward: bool) -> float:
        """Matrix-product FLOP of the forward pass, or of forward and backward together."""
        per_score = 2 * (self.D + self.Dv)
        if backward:
            per_score += 2 * (3 * self.D + 2 * self.Dv)
        return per_score * self.scores

    def exps(self, backward: bool) -> float:
        """Exponentials: one per score and pass."""
        return self.scores * (2 if backward else 1)

    def min_bytes(self, backward: bool) -> float:
        """Fewest bytes that must move: in each pass every operand and result once; lse and delta are not counted."""
        width = DTYPES[self.dtype].itemsize
        rows = math.prod(self.batch)
        sizes = {
            "q": rows * self.M * self.Hq * self.D * width,
            "k": rows * self.N * self.Hkv * self.D * width,
            "v": rows * self.N * self.Hkv * self.Dv * width,
        }
        out = rows * self.M * self.Hq * self.Dv * width
        terms = sum(math.prod(self.term_shape(m.shape)) for m in self.masks)
        terms += sum(self._bias_bytes(b) for b in self.biases)
        total = sum(sizes.values()) + out + terms
        if backward:
            total += sum(sizes.values()) + 2 * out + terms  # out and dout
            total += sum(size for name, size in sizes.items() if name in self.trained)
            total += sum(self._bias_bytes(b) for b in self.biases if b.trained)
        return float(total)

    def _bias_bytes(self, bias: Bias) -> int:
        dtype = self.dtype if bias.dtype == "same" else bias.dtype
        return math.prod(self.term_shape(bias.shape)) * DTYPES[dtype].itemsize


def floor_ms(case: Case, backward: bool, ceilings: Ceilings = H200) -> float:
    """The least time in milliseconds: the largest of products, bytes and exponentials at the machine's ceilings.

    With ``backward`` the figures of both passes are added up before the largest is taken.
    """
    return 1e3 * max(
        case.flops(backward) / ceilings.products,
        case.min_bytes(backward) / ceilings.bytes,
        case.exps(backward) / ceilings.exps,
    )


def _normal(shape: Sequence[int], dtype: torch.dtype, device: torch.device, source: torch.Generator) -> Tensor:
    return torch.randn(tuple(shape), dtype=dtype, device=device, generator=source)
