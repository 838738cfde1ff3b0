"""The public doors. Everything below them trusts that they checked."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from biasflash import ops, plan, problem
from biasflash.plan import Explanation

Terms: TypeAlias = Tensor | Sequence[Tensor] | None


def _autocast(*tensors: Tensor) -> list[Tensor]:
    """Under ``torch.autocast`` q, k and v go to the region's dtype, as torch's own attention takes them; biases stay."""
    device = tensors[0].device.type
    if device in ("cpu", "cuda") and torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        return [t.to(dtype) if t.is_floating_point() and t.dtype != torch.float64 else t for t in tensors]
    return list(tensors)


def _call(
    inputs: list[Tensor],
    layout: str,
    bias: Terms,
    mask: Terms,
    causal: bool | str,
    scale: float | None,
    return_lse: bool,
    backend: str | None,
    bool_bias_is_mask: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    plan.check_backend(backend)
    inputs = _autocast(*inputs)
    q, k, v = ops.unpack(inputs, layout)
    problem.check_qkv(q, k, v)
    terms, kinds = problem.gather_terms(bias, mask, q, k.shape[-3], bool_bias_is_mask=bool_bias_is_mask)
    alignment, scale = problem.check_causal(causal), problem.check_scale(scale)
    out, lse = ops.attend(inputs, terms, kinds, layout, alignment, scale, backend)
    return (out, lse) if return_lse else out


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Terms = None,
    mask: Terms = None,
    *,
    causal: bool | str = False,
    scale: float | None = None,
    window: tuple[int | None, int | None] | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    dropout_p: float = 0.0,
    q_lens: Tensor | None = None,
    kv_lens: Tensor | None = None,
    return_lse: bool = False,
    backend: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    r"""Exact attention with any additive biases and boolean masks, all of them broadcast without a copy.

    .. math:: s_{hij} = \mathrm{scale}\, \langle q_{ih}, k_{jg} \rangle + \sum_t \mathrm{bias}^t_{hij}, \qquad
              \mathrm{out}_{ih} = \sum_{j\ \mathrm{kept}} e^{s_{hij} - \mathrm{lse}_{hi}}\, v_{jg}

    with ``g = h // (Hq / Hkv)`` the key head of query head ``h``.

    Args:
        q: ``*B M Hq D`` queries, any strides; float16, bfloat16, float32 or float64.
        k: ``*B N Hkv D`` keys. ``Hq`` is a multiple of ``Hkv``.
        v: ``*B N Hkv Dv`` values. ``D`` and ``Dv`` are 1 to 256 and may differ.
        bias: None, a float tensor that broadcasts (right-aligned) to ``*B Hq M N``, or a list of them, added up. May
            require a gradient, which comes back in its own shape and dtype, summed in float32 inside the kernels.
            ``-inf`` hides a key.
        mask: None, a boolean tensor that broadcasts to ``*B Hq M N`` (True = may attend), or a list of them.
        causal: False; True or ``"bottom-right"``: query ``i`` sees keys ``j <= i + N - M``; ``"top-left"``: ``j <= i``.
        scale: factor on the products; None means ``1 / sqrt(D)``.
        window, softcap, sinks, dropout_p, q_lens, kv_lens: not built yet; only their neutral values are accepted.
        return_lse: also return the log-sum-exp of the scores, which is differentiable.
        backend: None chooses; a name runs that backend or raises.

    Returns:
        ``out``: ``*B M Hq Dv`` in q's dtype; with ``return_lse`` also ``lse``: ``*B Hq M``, float32, natural log.
        A query that sees no key has ``out = 0`` and ``lse = -inf`` and contributes zero to every gradient.

    Raises:
        TypeError: a wrong kind or dtype of argument.
        ValueError: shapes, devices or values that do not fit, named axis by axis.
        UnsupportedError: meaningful, but not built.
    """
    problem.refuse_unbuilt(
        window=window, softcap=softcap, sinks=sinks, dropout_p=dropout_p, q_lens=q_lens, kv_lens=kv_lens
    )
    inputs = [problem.check_tensor(name, t) for name, t in (("q", q), ("k", k), ("v", v))]
    return _call(inputs, "q,k,v", bias, mask, causal, scale, return_lse, backend)


def attention_qkvpacked(
    qkv: Tensor,
    bias: Terms = None,
    mask: Terms = None,
    *,
    causal: bool | str = False,
    scale: float | None = None,
    return_lse: bool = False,
    backend: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """``attention`` of one packed tensor ``qkv: *B L 3 H D``, read through strides; its gradient is one packed tensor.

    The other arguments, the results and the errors are those of ``attention`` with ``M = N = L`` and ``Hq = Hkv = H``.
    """
    problem.check_packed("qkv", problem.check_tensor("qkv", qkv), 3)
    return _call([qkv], "qkv", bias, mask, causal, scale, return_lse, backend)


def attention_kvpacked(
    q: Tensor,
    kv: Tensor,
    bias: Terms = None,
    mask: Terms = None,
    *,
    causal: bool | str = False,
    scale: float | None = None,
    return_lse: bool = False,
    backend: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """``attention`` of ``q: *B M Hq D`` and packed ``kv: *B N 2 Hkv D``, read through strides; one packed gradient.

    The other arguments, the results and the errors are those of ``attention`` with ``Dv = D``.
    """
    problem.check_tensor("q", q)
    problem.check_packed("kv", problem.check_tensor("kv", kv), 2)
    return _call([q, kv], "q,kv", bias, mask, causal, scale, return_lse, backend)


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Torch's door: ``query: *B Hq M D``, ``key: *B Hkv N D``, ``value: *B Hkv N Dv`` -> ``*B Hq M Dv``.

    A boolean ``attn_mask`` keeps where True, a float one is added and may require a gradient; ``is_causal`` is
    top-left, as torch's is. Unlike torch, mask and ``is_causal`` may be combined, and a row that sees nothing is zero.
    """
    problem.refuse_unbuilt(dropout_p=dropout_p)
    tensors = [problem.check_tensor(n, t) for n, t in (("query", query), ("key", key), ("value", value))]
    for name, t in zip(("query", "key", "value"), tensors, strict=True):
        if t.dim() < 3:
            raise ValueError(f"{name} of shape {tuple(t.shape)} has too few axes: wanted (*B, heads, length, width)")
    if not enable_gqa and query.shape[-3] != key.shape[-3]:
        raise ValueError(
            f"query has {query.shape[-3]} heads and key has {key.shape[-3]}; pass enable_gqa=True for grouped heads"
        )
    inputs = [t.transpose(-3, -2) for t in tensors]
    causal = "top-left" if is_causal else False
    out = _call(inputs, "q,k,v", attn_mask, None, causal, scale, False, None, bool_bias_is_mask=True)
    assert isinstance(out, Tensor)
    return out.transpose(-3, -2)


def flash_attention_fn(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None = None,
    causal: bool | str = False,
    sm_scale: float | None = None,
) -> Tensor:
    """Historic name, kept for good: ``attention`` with positional arguments; a boolean ``bias`` is a mask."""
    inputs = [problem.check_tensor(name, t) for name, t in (("q", q), ("k", k), ("v", v))]
    out = _call(inputs, "q,k,v", bias, None, causal, sm_scale, False, None, bool_bias_is_mask=True)
    assert isinstance(out, Tensor)
    return out


def flash_attention_qkvpacked_fn(
    qkv: Tensor, bias: Tensor | None = None, causal: bool | str = False, sm_scale: float | None = None
) -> Tensor:
    """Historic name, kept for good: ``attention_qkvpacked`` with positional arguments; a boolean ``bias`` is a mask."""
    problem.check_packed("qkv", problem.check_tensor("qkv", qkv), 3)
    out = _call([qkv], "qkv", bias, None, causal, sm_scale, False, None, bool_bias_is_mask=True)
    assert isinstance(out, Tensor)
    return out


def explain(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Terms = None,
    mask: Terms = None,
    *,
    causal: bool | str = False,
    scale: float | None = None,
    backend: str | None = None,
) -> Explanation:
    """Which backend ``attention`` would take for these arguments, which tiles, and why the others were passed over."""
    plan.check_backend(backend)
    q, k, v = (problem.check_tensor(name, t) for name, t in (("q", q), ("k", k), ("v", v)))
    problem.check_qkv(q, k, v)
    terms, kinds = problem.gather_terms(bias, mask, q, k.shape[-3])
    alignment, scale = problem.check_causal(causal), problem.check_scale(scale)
    return plan.explain(problem.build(q, k, v, terms, kinds, alignment, scale), backend)
