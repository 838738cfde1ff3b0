"""What to write instead: for arguments as other libraries name them, and for shapes of the usual slips."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

LAYOUT = "leave it out: lengths come before heads, in biasflash.scaled_dot_product_attention behind them"


def _of_masks(mask: str) -> dict[str, str]:
    """For what hides keys, at doors that take masks as ``mask``."""
    padded = f"not built yet: pad the batch and hide what pads with {mask}= of shape (B, 1, 1, N), True = may attend"
    return {
        "key_padding_mask": f"write {mask}=~key_padding_mask[:, None, None, :] if True hides; here True = may attend",
        "window_size": f"not built yet: hide keys outside the window with {mask}= of shape (M, N), True = may attend",
        **dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"), padded),
    }


#: argument -> what to write at the library's own doors
OWN: dict[str, str] = {
    "softmax_scale": "write scale=",
    "sm_scale": "write scale=",
    "is_causal": 'write causal="top-left", which is torch\'s alignment; causal=True is bottom-right',
    "attn_mask": "a boolean one (True = may attend) goes to mask=, a float one to bias=",
    "attention_mask": "a boolean one (True = may attend) goes to mask=, a float one to bias=",
    "attn_bias": "write bias=",
    **_of_masks("mask"),
    "alibi_slopes": "write bias= of minus slope times distance, (1, Hq, M, N)",
    "enable_gqa": "leave it out: fewer key heads than query heads are grouped",
    "dropout": "not built yet",
    "return_attn_probs": "weights are never stored; return_lse=True gives the log-sum-exp",
    "return_softmax_lse": "write return_lse=True",
    "deterministic": "leave it out: it is, always",
    "layout": LAYOUT,
    "tensor_layout": LAYOUT,
}

#: at the door of torch's name and the two historic ones
TORCH: dict[str, str] = {
    "bias": "write attn_mask=, which takes floats that are added, and may require a gradient",
    "mask": "write attn_mask= (a boolean one, True = may attend)",
    "causal": "write is_causal=True (top-left), or call biasflash.attention for bottom-right",
    "attn_bias": "write attn_mask=, which takes floats that are added, and may require a gradient",
    "attention_mask": "write attn_mask= (a boolean one, True = may attend, or floats that are added)",
    "alibi_slopes": "write attn_mask= of minus slope times distance, (1, Hq, M, N)",
    **_of_masks("attn_mask"),
    "return_lse": "call biasflash.attention",
}
HISTORIC: dict[str, str] = {
    "scale": "write sm_scale=",
    "softmax_scale": "write sm_scale=",
    "mask": "write bias=, which takes a boolean mask, too",
    "attn_mask": "write bias=, which takes a boolean mask (True = may attend), too",
    "attention_mask": "write bias=, which takes a boolean mask (True = may attend), too",
    "attn_bias": "write bias=",
    **_of_masks("bias"),
    "is_causal": 'write causal="top-left"',
    "return_lse": "call biasflash.attention",
}
_WRITTEN = re.compile(r"\b([a-z_]+)=")


def refuse(door: Callable[..., Any], words: Mapping[str, str], unknown: Mapping[str, object]) -> NoReturn:
    """Raises TypeError for the first argument that ``door`` does not take.

    ``words`` are the door's own; what is written at the library's own doors is offered as theirs where this one does
    not take it.
    """
    name = next(iter(unknown))
    code = door.__code__
    taken = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    way = words.get(name) or OWN.get(name) or f"it takes {', '.join(taken)}"
    if not set(taken).issuperset(_WRITTEN.findall(way)):
        way = f"at biasflash.attention {way}"
    raise TypeError(f"biasflash.{door.__name__} has no argument {name}: {way}")


def of_array(name: str, value: object, causal: str = "") -> str:
    """For an array of another library in place of a tensor, or a flag in place of a mask: ``causal`` is its name."""
    if causal and isinstance(value, bool):
        return f"; for causal attention write {causal}=True"
    return f"; write torch.as_tensor({name})" if hasattr(value, "__array__") and not isinstance(value, type) else ""


def of_number(name: str, value: object) -> str:
    """For what can be made a number, but is none of Python's."""
    try:
        float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, RuntimeError):
        return ""
    return "" if isinstance(value, (bool, str)) else f"; write float({name})"


def of_layout(name: str, is_nested: bool) -> str:
    """For a tensor without strides."""
    if is_nested:
        return f"write torch.nested.to_padded_tensor({name}, 0.0), and hide what pads with mask="
    return f"write {name}.to_dense()"


def _fits(shape: Sequence[int], full: Sequence[int]) -> bool:
    return len(shape) <= len(full) and all(a in (1, b) for a, b in zip(reversed(shape), reversed(full), strict=False))


def of_term(
    name: str, shape: tuple[int, ...], is_mask: bool, full: tuple[int, ...], exchanged: Sequence[int], layout: str
) -> str:
    """For a bias or mask that does not broadcast to ``full``, (*B, Hq, M, N).

    ``exchanged``: ``full`` if heads came before lengths in q and k, empty if they cannot; ``layout``: what to say then.
    """
    *batch, heads, queries, keys = full
    if len(batch) == 1 and shape == (*batch, keys):
        return f"; for a (B, N) key {'mask' if is_mask else 'bias'} write {name}[:, None, None, :]"
    if len(batch) == 1 and len(shape) == 3 and _fits(shape, (*batch, queries, keys)):
        return f"; for one {name} per batch item insert a head axis: {name}[:, None]"
    if len(shape) >= 3 and _fits((*shape[:-3], shape[-1], *shape[-3:-1]), full):
        return f"; heads come before queries and keys: {name}.movedim(-1, -3)"
    if len(batch) == 1 and len(shape) == 3 and _fits(shape, (batch[0] * heads, queries, keys)):
        return f"; batch and heads are two axes: {name}.unflatten(0, ({batch[0]}, {heads}))"
    if exchanged and len(shape) >= 3 and _fits(shape, exchanged):
        return f"; it would fit with heads before lengths: {layout}"
    return ""
