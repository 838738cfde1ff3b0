"""The public doors. Everything below them trusts that they checked."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NoReturn, TypeAlias

import torch
from torch import Tensor

from biasflash import hints, ops, plan, problem
from biasflash.plan import Explanation
from biasflash.problem import ATTENTION, AXES, Door

Terms: TypeAlias = Tensor | Sequence[Tensor] | None

QKVPACKED = Door(axes={"qkv": AXES["qkv"]}, layout="qkv")
KVPACKED = Door(axes={"q": AXES["q"], "kv": AXES["kv"]}, layout="q,kv")
TORCH = Door(
    axes={"query": "*B Hq M D", "key": "*B Hkv N D", "value": "*B Hkv N Dv"},
    layout="q,k,v",
    heads_first=True,
    bias="attn_mask",
    causal="is_causal",
    bool_bias_is_mask=True,
    hint="layout is (*B, heads, length, width); for (*B, length, heads, width) call biasflash.attention",
)
HISTORIC = dataclasses.replace(ATTENTION, scale="sm_scale", bool_bias_is_mask=True)
HISTORIC_QKVPACKED = dataclasses.replace(QKVPACKED, scale="sm_scale", bool_bias_is_mask=True)


def _shown(value: object) -> str:
    """A value in a message: tensors by dtype and shape, never by their elements."""
    if isinstance(value, Tensor):
        return f"{problem.short(value.dtype)} tensor of shape {tuple(value.shape)}"
    if isinstance(value, (list, tuple)) and any(isinstance(item, Tensor) for item in value):
        return f"{type(value).__name__} of {', '.join(map(_shown, value))}"
    return repr(value)


def _refuse_unbuilt(*, dropout_p: object, **options: object) -> None:
    """Options of the contract that no backend computes yet; each at its neutral value passes."""
    for name, value in options.items():
        if value is not None:
            raise problem.UnsupportedError(f"{name}={_shown(value)} is not built yet; accepted: {name}=None")
    if not isinstance(dropout_p, (int, float)) or dropout_p != 0.0:
        raise problem.UnsupportedError(f"dropout_p={_shown(dropout_p)} is not built yet; accepted: dropout_p=0.0")


def _autocast(tensors: list[Tensor]) -> list[Tensor]:
    """Under ``torch.autocast`` q, k and v go to the region's dtype, as in torch's own attention; biases stay."""
    device = tensors[0].device.type
    if device in ("cpu", "cuda") and torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        return [t.to(dtype) if t.is_floating_point() and t.dtype != torch.float64 else t for t in tensors]
    return tensors


def _check(
    door: Door,
    inputs: list[Tensor],
    bias: Terms,
    mask: Terms,
    causal: bool | str,
    scale: float | None,
    backend: str | None,
    grouped: bool,
) -> tuple[list[Tensor], list[Tensor], ops.Settings]:
    """Every check of a call: inputs with lengths before heads, terms in order, and what the operator is told."""
    plan.check_backend(backend)
    problem.check_inputs(door, inputs, grouped=grouped)
    if door.heads_first:
        inputs = [t.transpose(-3, -2) for t in inputs]
    q, k, _ = ops.unpack(inputs, door.layout)
    terms, kinds = problem.gather_terms(bias, mask, q, k, door)
    alignment, scale = problem.check_causal(causal), problem.check_scale(scale, door.scale)
    return inputs, terms, (",".join(kinds), door.layout, alignment, scale, backend)


#: calls that passed every check -> how they are computed; the key holds all that a check looks at
_passed: dict[tuple[object, ...], ops.Direct] = {}
#: types of ``causal``, ``scale`` and ``backend`` that a key may hold: 1, 1.0 and True are equal, their types are not
_OPTIONS = frozenset({bool, str, float, int, type(None)})
MOST_PASSED = 4096


def _listed(terms: Terms) -> Sequence[Tensor]:
    if terms is None:
        return ()
    return terms if isinstance(terms, (list, tuple)) else (terms,)


def _call(
    door: Door,
    values: list[Tensor],
    bias: Terms,
    mask: Terms,
    causal: bool | str,
    scale: float | None,
    return_lse: bool = False,
    backend: str | None = None,
    grouped: bool = True,
) -> Tensor | tuple[Tensor, Tensor]:
    """The checks and the operator; for plain tensors, a call like an earlier one goes straight to its backend."""
    biases, masks = _listed(bias), _listed(mask)
    types = type(causal), type(scale), type(backend)
    if not (ops.is_plain([*values, *biases, *masks]) and _OPTIONS.issuperset(types)):
        inputs = _autocast(problem.check_tensors(door, *values))
        out, lse = ops.attend(*_check(door, inputs, bias, mask, causal, scale, backend, grouped))
        return (out, lse) if return_lse else out
    inputs, terms = _autocast(values), [*biases, *masks]
    facts = [(t.shape, t.dtype, t.device, t.requires_grad) for t in (*inputs, *terms)]
    key = (door, grouped, causal, scale, backend, types, len(biases), *facts)
    way = _passed.get(key)
    if way is None:
        checked = _check(door, inputs, bias, mask, causal, scale, backend, grouped)
        if len(_passed) >= MOST_PASSED:
            _passed.clear()
        way = _passed[key] = ops.prepare(*checked)
    if door.heads_first:
        inputs = [t.transpose(-3, -2) for t in inputs]
    out, lse = ops.attend_directly(way, inputs, problem.masks_last(terms) if len(terms) > 1 else terms)
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
    **unknown: NoReturn,
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
        unknown: nothing; an argument as another library names it is refused with what to write here.

    Returns:
        ``out``: ``*B M Hq Dv`` in q's dtype; with ``return_lse`` also ``lse``: ``*B Hq M``, float32, natural log.
        A query that sees no key has ``out = 0`` and ``lse = -inf`` and contributes zero to every gradient.

    Raises:
        TypeError: a wrong kind or dtype of argument.
        ValueError: shapes, devices or values that do not fit, named axis by axis.
        UnsupportedError: meaningful, but not built.
    """
    if unknown:
        hints.refuse(attention, hints.OWN, unknown)
    _refuse_unbuilt(window=window, softcap=softcap, sinks=sinks, dropout_p=dropout_p, q_lens=q_lens, kv_lens=kv_lens)
    return _call(ATTENTION, [q, k, v], bias, mask, causal, scale, return_lse, backend)


def attention_qkvpacked(
    qkv: Tensor,
    bias: Terms = None,
    mask: Terms = None,
    *,
    causal: bool | str = False,
    scale: float | None = None,
    return_lse: bool = False,
    backend: str | None = None,
    **unknown: NoReturn,
) -> Tensor | tuple[Tensor, Tensor]:
    """``attention`` of one packed tensor ``qkv: *B L 3 H D``, read through strides; its gradient is one packed tensor.

    The other arguments, the results and the errors are those of ``attention`` with ``M = N = L`` and ``Hq = Hkv = H``.
    """
    if unknown:
        hints.refuse(attention_qkvpacked, hints.OWN, unknown)
    return _call(QKVPACKED, [qkv], bias, mask, causal, scale, return_lse, backend)


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
    **unknown: NoReturn,
) -> Tensor | tuple[Tensor, Tensor]:
    """``attention`` of ``q: *B M Hq D`` and packed ``kv: *B N 2 Hkv D``, read through strides; one packed gradient.

    The other arguments, the results and the errors are those of ``attention`` with ``Dv = D``.
    """
    if unknown:
        hints.refuse(attention_kvpacked, hints.OWN, unknown)
    return _call(KVPACKED, [q, kv], bias, mask, causal, scale, return_lse, backend)


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    **unknown: NoReturn,
) -> Tensor:
    """Torch's door: ``query: *B Hq M D``, ``key: *B Hkv N D``, ``value: *B Hkv N Dv`` -> ``*B Hq M Dv``.

    A boolean ``attn_mask`` keeps where True, a float one is added and may require a gradient; ``is_causal`` is
    top-left, as torch's is. Unlike torch, mask and ``is_causal`` may be combined, and a row that sees nothing is zero.
    """
    if unknown:
        hints.refuse(scaled_dot_product_attention, hints.TORCH, unknown)
    _refuse_unbuilt(dropout_p=dropout_p)
    if not isinstance(is_causal, bool):
        raise TypeError(f"is_causal must be True (top-left) or False, got {type(is_causal).__name__}")
    causal = "top-left" if is_causal else False
    out = _call(TORCH, [query, key, value], attn_mask, None, causal, scale, grouped=bool(enable_gqa))
    assert isinstance(out, Tensor)
    return out.transpose(-3, -2)


def flash_attention_fn(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None = None,
    causal: bool | str = False,
    sm_scale: float | None = None,
    **unknown: NoReturn,
) -> Tensor:
    """Historic name, kept for good: ``attention`` with positional arguments; a boolean ``bias`` is a mask."""
    if unknown:
        hints.refuse(flash_attention_fn, hints.HISTORIC, unknown)
    out = _call(HISTORIC, [q, k, v], bias, None, causal, sm_scale)
    assert isinstance(out, Tensor)
    return out


def flash_attention_qkvpacked_fn(
    qkv: Tensor,
    bias: Tensor | None = None,
    causal: bool | str = False,
    sm_scale: float | None = None,
    **unknown: NoReturn,
) -> Tensor:
    """Historic name, kept for good: ``attention_qkvpacked`` with positional arguments; a boolean ``bias`` is a mask."""
    if unknown:
        hints.refuse(flash_attention_qkvpacked_fn, hints.HISTORIC, unknown)
    out = _call(HISTORIC_QKVPACKED, [qkv], bias, None, causal, sm_scale)
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
    **unknown: NoReturn,
) -> Explanation:
    """Which backend ``attention`` would take for these arguments, which tiles, and why the others were passed over."""
    if unknown:
        hints.refuse(explain, hints.OWN, unknown)
    plan.check_backend(backend)
    q, k, v = problem.check_tensors(ATTENTION, q, k, v)
    problem.check_inputs(ATTENTION, (q, k, v))
    terms, kinds = problem.gather_terms(bias, mask, q, k)
    alignment, scale = problem.check_causal(causal), problem.check_scale(scale)
    return plan.explain(problem.build(q, k, v, terms, kinds, alignment, scale), backend)
