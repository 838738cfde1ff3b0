"""The rivals of the bench, one function each.

A provider takes a ``Call`` and returns a function without arguments that computes ``out (*B M Hq Dv)``. What a user
would prepare once (a block mask, a compiled function, a graph) is prepared before it returns; what a user would pay in
every call (merging bias and mask, casting a bias) stays in the returned function. Layouts are met by views only.
A provider that cannot serve a call raises ``Refused``; one whose package is absent raises ``NotInstalled``.
"""

from __future__ import annotations

import importlib.util
import math
import os
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import biasflash

if TYPE_CHECKING:
    from biasflash.testing.case import Call

Attend = Callable[[], Tensor]
Prepare = Callable[["Call"], Attend]


class Refused(Exception):
    """The provider has no way to compute this call. The text says why."""


class NotInstalled(Exception):
    """The provider's package is not there. The text names it."""


@dataclass(frozen=True, kw_only=True)
class Provider:
    """``name`` as the command line knows it; ``needs_cuda`` when its gradients do not exist on a CPU.

    ``package``: module and distribution that it comes from, if not from this library or torch.
    """

    name: str
    prepare: Prepare
    needs_cuda: bool
    summary: str
    package: tuple[str, str] | None = None

    def missing(self) -> str:
        """The distribution to install, or an empty text if it is there."""
        if self.package is None:
            return ""
        module, distribution = self.package
        try:
            return "" if importlib.util.find_spec(module) else distribution
        except ImportError:  # its parent package is not there, or breaks
            return distribution


#: The name of this library among its rivals.
OURS = "biasflash"
#: Its portable kernels, where others are the default: no rival.
PORTABLE = "biasflash-triton"
#: In the order they run in: when time runs out, the last ones go without.
PROVIDERS: dict[str, Provider] = {}


def register(provider: Provider) -> None:
    """Adds a provider, or replaces the one of that name."""
    PROVIDERS[provider.name] = provider


# ----------------------------------------------------------------------------------------------------- shared pieces


def _shift(call: Call) -> int | None:
    """Query ``i`` sees keys ``j <= i + shift``; None without a causal mask."""
    if not call.causal:
        return None
    return 0 if call.causal == "top-left" else call.k.shape[-3] - call.q.shape[-3]


def _scale(call: Call) -> float:
    return float(call.q.shape[-1] ** -0.5 if call.scale is None else call.scale)


def _is_grouped(call: Call) -> bool:
    return bool(call.q.shape[-2] != call.k.shape[-2])


def _only_top_left(call: Call) -> None:
    if _shift(call) not in (None, 0):
        raise Refused("its causal mask is aligned to the top left")


def _one_batch_axis(call: Call) -> None:
    if call.q.dim() != 4:
        raise Refused(f"wants exactly one batch axis, not {call.q.dim() - 3}")


def _no_terms(call: Call) -> None:
    if call.bias or call.mask:
        raise Refused("has no argument for a bias or a mask")


def merge_terms(bias: list[Tensor], mask: list[Tensor], dtype: torch.dtype) -> Tensor | None:
    """What a library with one ``attn_mask`` wants: biases added up in ``dtype``, masks joined, hidden places -inf."""
    keep = mask[0] if mask else None
    for other in mask[1:]:
        keep = keep & other if keep is not None else other
    if not bias:
        return keep
    total = bias[0].to(dtype)
    for plane in bias[1:]:
        total = total + plane.to(dtype)
    return total if keep is None else torch.where(keep, total, -math.inf)


def _heads_first(call: Call) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v as ``*B H L D``, the order torch wants: views, made once."""
    return call.q.transpose(-3, -2), call.k.transpose(-3, -2), call.v.transpose(-3, -2)


# -------------------------------------------------------------------------------------------------------------- ours


def prepare_biasflash(call: Call, backend: str | None = None) -> Attend:
    q, k, v, bias, mask = call.q, call.k, call.v, call.bias or None, call.mask or None
    causal, scale = call.causal, call.scale

    def attend() -> Tensor:
        out = biasflash.attention(q, k, v, bias, mask, causal=causal, scale=scale, backend=backend)
        assert isinstance(out, Tensor)
        return out

    return attend


def prepare_portable(call: Call) -> Attend:
    """The backend ``triton`` where the library would take another one on this GPU."""
    given = call.q, call.k, call.v, call.bias or None, call.mask or None
    if biasflash.explain(*given, causal=call.causal, scale=call.scale).backend == "triton":
        raise Refused(f"as {OURS}, which takes these kernels here")
    return prepare_biasflash(call, "triton")


# ------------------------------------------------------------------------------------------------ torch's own, by name


def _sdpa_reason(caught: list[warnings.WarningMessage], error: Exception) -> str:
    """Torch says why a backend was passed over in warnings, and then only that no kernel is available."""
    for warning in caught:
        text = str(warning.message).split(" (Triggered internally")[0].strip()
        if text and "not used because" not in text and "runtime disabled" not in text:  # the other backends are
            return text
    return str(error).splitlines()[0]


def _prepare_sdpa(backend: SDPBackend, call: Call) -> Attend:
    _one_batch_axis(call)
    _only_top_left(call)
    causal = bool(call.causal)
    if causal and backend is SDPBackend.MATH and (call.bias or call.mask):
        # the formula refuses a mask beside is_causal, so the triangle goes into the mask
        shape = (call.q.shape[-3], call.k.shape[-3])
        triangle = torch.ones(shape, dtype=torch.bool, device=call.q.device).tril()
        masks, causal = [*call.mask, triangle], False
    else:
        masks = call.mask
    scale, grouped, bias = _scale(call), _is_grouped(call), call.bias
    q, k, v = _heads_first(call)

    def attend() -> Tensor:
        plane = merge_terms(bias, masks, q.dtype)
        with sdpa_kernel(backend):
            out = F.scaled_dot_product_attention(
                q, k, v, attn_mask=plane, is_causal=causal, scale=scale, enable_gqa=grouped
            )
        return out.transpose(-3, -2)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            attend()
        except RuntimeError as error:
            if "out of memory" in str(error):
                raise
            raise Refused(_sdpa_reason(caught, error)) from None
    return attend


def prepare_sdpa_flash(call: Call) -> Attend:
    return _prepare_sdpa(SDPBackend.FLASH_ATTENTION, call)


def prepare_sdpa_efficient(call: Call) -> Attend:
    return _prepare_sdpa(SDPBackend.EFFICIENT_ATTENTION, call)


def prepare_sdpa_cudnn(call: Call) -> Attend:
    return _prepare_sdpa(SDPBackend.CUDNN_ATTENTION, call)


def prepare_sdpa_math(call: Call) -> Attend:
    return _prepare_sdpa(SDPBackend.MATH, call)


def prepare_eager(call: Call) -> Attend:
    """The softmax formula in plain PyTorch and the input dtype, every score in memory."""
    shift, scale, group = _shift(call), _scale(call), call.q.shape[-2] // call.k.shape[-2]
    q, k, v = _heads_first(call)
    hidden = None
    if shift is not None:
        hidden = ~torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool, device=q.device).tril(shift)

    def attend() -> Tensor:
        keys, values = (t.repeat_interleave(group, -3) if group > 1 else t for t in (k, v))
        s = q @ keys.transpose(-1, -2) * scale
        for plane in call.bias:
            s = s + plane.to(s.dtype)
        for keep in call.mask:
            s = s.masked_fill(~keep, -math.inf)
        if hidden is not None:
            s = s.masked_fill(hidden, -math.inf)
        return (s.softmax(-1) @ values).transpose(-3, -2)

    return attend


# ------------------------------------------------------------------------------------------------------ FlexAttention


def _score_rule(bias: list[Tensor], mask: list[Tensor]) -> Callable[..., Tensor] | None:
    """A score rule that reads every bias and mask where it is; axes of length one are read at index 0."""
    if len(bias) + len(mask) == 0:
        return None
    if len(bias) > 1 or len(mask) > 1:
        raise Refused("this bench writes its score rule for at most one bias and one mask")
    plane, keep = (bias[0] if bias else None), (mask[0] if mask else None)
    plane_at, keep_at = (None if t is None else [int(n > 1) for n in t.shape] for t in (plane, keep))

    def rule(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        if plane is not None and plane_at is not None:
            score = (
                score
                + plane[
                    b if plane_at[0] else 0, h if plane_at[1] else 0, i if plane_at[2] else 0, j if plane_at[3] else 0
                ]
            )
        if keep is not None and keep_at is not None:
            seen = keep[b if keep_at[0] else 0, h if keep_at[1] else 0, i if keep_at[2] else 0, j if keep_at[3] else 0]
            score = torch.where(seen, score, -math.inf)
        return score

    return rule


def prepare_flex(call: Call) -> Attend:
    """Compiled FlexAttention: the bias in its score rule, the causal triangle in its block mask."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    _one_batch_axis(call)
    padded = [t[(None,) * (4 - t.dim())] for t in (*call.bias, *call.mask)]
    rule = _score_rule(padded[: len(call.bias)], padded[len(call.bias) :])
    shift, scale, grouped = _shift(call), _scale(call), _is_grouped(call)
    q, k, v = _heads_first(call)
    blocks = None
    if shift is not None:
        offset = shift

        def visible(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            return i + offset >= j

        blocks = create_block_mask(visible, None, None, q.shape[-2], k.shape[-2], device=q.device)
    torch.compiler.reset()  # each call compiles its own: never a recompile that falls back to dynamic shapes
    compiled = torch.compile(flex_attention, dynamic=False)

    def attend() -> Tensor:
        out = compiled(q, k, v, score_mod=rule, block_mask=blocks, scale=scale, enable_gqa=grouped)
        assert isinstance(out, Tensor)
        return out.transpose(-3, -2)

    return attend


# ----------------------------------------------------------------------------------------------------- other packages


def prepare_fa4(call: Call) -> Attend:
    """The flash-attn-4 package; its causal mask is aligned to the bottom right."""
    os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "1")  # what was compiled ahead is found again
    try:
        from flash_attn.cute import flash_attn_func
    except ImportError as error:
        raise NotInstalled(f"flash-attn-4: {error}") from None
    _one_batch_axis(call)
    _no_terms(call)
    if _shift(call) not in (None, call.k.shape[-3] - call.q.shape[-3]):
        raise Refused("its causal mask is aligned to the bottom right")
    q, k, v, causal, scale = call.q, call.k, call.v, bool(call.causal), _scale(call)

    def attend() -> Tensor:
        out: Any = flash_attn_func(q, k, v, softmax_scale=scale, causal=causal)
        first = out[0] if isinstance(out, tuple) else out
        assert isinstance(first, Tensor)
        return first

    return attend


def prepare_cudnn_frontend(call: Call) -> Attend:
    """cuDNN through its own Python front end, which unlike SDPA's cuDNN backend has a gradient for the bias."""
    try:
        from biasflash.cli.cudnn_graphs import Graphs
    except ImportError as error:
        raise NotInstalled(f"nvidia-cudnn-frontend: {error}") from None
    _one_batch_axis(call)
    _only_top_left(call)
    return Graphs(call, _scale(call)).attend


for _provider in (
    Provider(name=OURS, prepare=prepare_biasflash, needs_cuda=False, summary="this library"),
    Provider(name=PORTABLE, prepare=prepare_portable, needs_cuda=True, summary="its portable kernels"),
    Provider(name="sdpa-cudnn", prepare=prepare_sdpa_cudnn, needs_cuda=True, summary="torch SDPA, cuDNN"),
    Provider(name="sdpa-flash", prepare=prepare_sdpa_flash, needs_cuda=False, summary="torch SDPA, FlashAttention"),
    Provider(name="sdpa-efficient", prepare=prepare_sdpa_efficient, needs_cuda=True, summary="torch SDPA, CUTLASS"),
    Provider(
        name="cudnn-fe",
        prepare=prepare_cudnn_frontend,
        needs_cuda=True,
        summary="cuDNN graphs",
        package=("cudnn", "nvidia-cudnn-frontend"),
    ),
    Provider(
        name="fa4",
        prepare=prepare_fa4,
        needs_cuda=True,
        summary="FlashAttention 4",
        package=("flash_attn.cute", "flash-attn-4"),
    ),
    Provider(name="eager", prepare=prepare_eager, needs_cuda=False, summary="the formula in plain PyTorch"),
    Provider(name="sdpa-math", prepare=prepare_sdpa_math, needs_cuda=False, summary="torch SDPA, formula"),
    Provider(name="flex", prepare=prepare_flex, needs_cuda=True, summary="compiled FlexAttention, score rule"),
):
    register(_provider)
