"""Wrong calls and the one message each must give: what was asked, what is wrong, what would be accepted."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from fractions import Fraction
from typing import Any, NoReturn

import torch
from torch import Tensor

import biasflash
from biasflash import backends
from biasflash.testing.wrong_call import Array, K, Q, Refusal, RefusalError, V, attend, refuse, t, with_


def _second_derivative() -> object:
    q = torch.ones(Q, requires_grad=True)
    out = biasflash.attention(q, torch.ones(K), torch.ones(V))
    assert isinstance(out, Tensor)
    (dq,) = torch.autograd.grad(out.sum(), q, create_graph=True)
    return torch.autograd.grad(dq.sum(), q)


_KINDS = [
    refuse("q is a list", TypeError, lambda: attend([[1.0]]), "q must be a torch.Tensor", "*B M Hq D", "got list"),
    refuse("k is text", TypeError, with_(k="keys"), "k must be a torch.Tensor", "*B N Hkv D", "got str"),
    refuse("v is a number", TypeError, with_(v=1.0), "v must be a torch.Tensor", "*B N Hkv Dv", "got float"),
    refuse("bias is a number", TypeError, with_(bias=1.0), "bias must be a torch.Tensor", "got float"),
    refuse("bias is a dict", TypeError, with_(bias={}), "bias must be a torch.Tensor", "list", "got dict"),
    refuse("a bias of the list is None", TypeError, with_(bias=[t(8, 6), None]), "bias[1]", "got NoneType"),
    refuse("a mask of the list is text", TypeError, with_(mask=["causal"]), "mask[0]", "got str"),
    refuse("scale is text", TypeError, with_(scale="auto"), "scale must be a number or None", "got str"),
    refuse("scale is a tensor", TypeError, with_(scale=t()), "scale must be a number or None", "got Tensor"),
    refuse("scale is a fraction", TypeError, with_(scale=Fraction(1, 10)), "write float(scale)"),
    refuse("q is an array", TypeError, lambda: attend(Array()), "got Array", "torch.as_tensor(q)"),
    refuse("causal by position", TypeError, lambda: attend(None, None, None, None, True), "got bool", "causal=True"),
    refuse("scale is a bool", TypeError, with_(scale=True), "scale must be a number or None", "got bool"),
    refuse(
        "qkv is a tuple",
        TypeError,
        lambda: biasflash.attention_qkvpacked(()),  # type: ignore[arg-type]
        "qkv must be a torch.Tensor",
        "L 3 H D",
    ),
    refuse(
        "kv is None",
        TypeError,
        lambda: biasflash.attention_kvpacked(t(*Q), None),  # type: ignore[arg-type]
        "kv must be a torch.Tensor",
        "N 2 Hkv D",
    ),
    refuse(
        "query is a list",
        TypeError,
        lambda: biasflash.scaled_dot_product_attention([], t(2, 4, 8, 16), t(2, 4, 8, 16)),  # type: ignore[arg-type]
        "query must be a torch.Tensor",
        "got list",
    ),
]

_NAMES = [
    refuse("torch's attn_mask", TypeError, with_(attn_mask=t(8, 6)), "no argument attn_mask", "mask=", "bias="),
    refuse("torch's is_causal", TypeError, with_(is_causal=True), "no argument is_causal", 'causal="top-left"'),
    refuse("a factor by another name", TypeError, with_(softmax_scale=0.1), "softmax_scale", "write scale="),
    refuse("a window by another name", TypeError, with_(window_size=(4, 0)), "window_size", "not built yet", "mask="),
    refuse("packed lengths", TypeError, with_(cu_seqlens_q=t(3)), "cu_seqlens_q", "not built yet", "mask="),
    refuse("an unknown name", TypeError, with_(heads=4), "no argument heads", "it takes q, k, v, bias, mask, causal"),
    refuse(
        "torch's door, bias",
        TypeError,
        lambda: biasflash.scaled_dot_product_attention(*(t(2, 4, 8, 16),) * 3, bias=t(8, 8)),  # type: ignore[arg-type]
        "scaled_dot_product_attention has no argument bias",
        "attn_mask=",
    ),
    refuse(
        "torch's door, a flag as a mask",
        TypeError,
        lambda: biasflash.scaled_dot_product_attention(*(t(2, 4, 8, 16),) * 3, True),  # type: ignore[arg-type]
        "write is_causal=True",
    ),
    refuse(
        "torch's door, what it cannot give",
        TypeError,
        lambda: biasflash.scaled_dot_product_attention(*(t(2, 4, 8, 16),) * 3, return_softmax_lse=True),  # type: ignore[arg-type]
        "at biasflash.attention write return_lse=True",
    ),
    refuse(
        "historic door, a mask of torch's name",
        TypeError,
        lambda: biasflash.flash_attention_fn(t(*Q), t(*K), t(*V), attn_mask=t(8, 6)),  # type: ignore[arg-type]
        "flash_attention_fn has no argument attn_mask: write bias=",
    ),
    refuse(
        "historic door, scale",
        TypeError,
        lambda: biasflash.flash_attention_fn(t(*Q), t(*K), t(*V), scale=0.1),  # type: ignore[arg-type]
        "flash_attention_fn has no argument scale",
        "sm_scale=",
    ),
    refuse(
        "packed door, an unknown name",
        TypeError,
        lambda: biasflash.attention_qkvpacked(t(2, 8, 3, 4, 16), window=None),  # type: ignore[arg-type]
        "it takes qkv, bias, mask, causal, scale, return_lse, backend",
    ),
]

_DTYPES = [
    refuse(
        "q of int64", TypeError, lambda: attend(t(*Q, dtype=torch.int64)), "q has dtype int64", "float16", "float32"
    ),
    refuse("k of complex64", TypeError, with_(k=t(*K, dtype=torch.complex64)), "k has dtype complex64", "bfloat16"),
    refuse("v of bool", TypeError, with_(v=t(*V, dtype=torch.bool)), "v has dtype bool", "accepted"),
    refuse(
        "k of another dtype",
        TypeError,
        with_(k=t(*K, dtype=torch.float16)),
        "share one dtype",
        "float16",
        ".to(q.dtype)",
    ),
    refuse(
        "v of another dtype",
        TypeError,
        with_(v=t(*V, dtype=torch.bfloat16)),
        "share one dtype",
        "bfloat16",
        ".to(q.dtype)",
    ),
    refuse("bias of bool", TypeError, with_(bias=t(8, 6, dtype=torch.bool)), "bias is boolean", "mask=", "may attend"),
    refuse(
        "bias of bool in a list",
        TypeError,
        with_(bias=[t(8, 6), t(8, 6, dtype=torch.bool)]),
        "bias[1] is boolean",
        "mask=",
    ),
    refuse("bias of int32", TypeError, with_(bias=t(8, 6, dtype=torch.int32)), "bias has dtype int32", "bfloat16"),
    refuse("bias of complex64", TypeError, with_(bias=t(8, 6, dtype=torch.complex64)), "bias has dtype complex64"),
    refuse("mask of float32", TypeError, with_(mask=t(8, 6)), "mask has dtype float32", "accepted: bool", "bias="),
    refuse("mask of int64", TypeError, with_(mask=t(8, 6, dtype=torch.int64)), "mask has dtype int64", "!= 0"),
    refuse("mask of uint8", TypeError, with_(mask=t(8, 6, dtype=torch.uint8)), "mask has dtype uint8", "!= 0"),
    refuse(
        "historic door, bias of int64",
        TypeError,
        lambda: biasflash.flash_attention_fn(t(*Q), t(*K), t(*V), t(8, 6, dtype=torch.int64)),
        "bias has dtype int64",
        "accepted",
    ),
]

_SHAPES = [
    refuse("q of two axes", ValueError, lambda: attend(t(8, 16)), "q of shape (8, 16)", "too few axes", "*B M Hq D"),
    refuse("v of one axis", ValueError, with_(v=t(12)), "v of shape (12,)", "too few axes", "*B N Hkv Dv"),
    refuse("another batch size", ValueError, with_(k=t(3, 6, 2, 16)), "same batch axes", "(3, 6, 2, 16)"),
    refuse("another number of batch axes", ValueError, lambda: attend(t(8, 4, 16)), "same batch axes", "(8, 4, 16)"),
    refuse("k and v of other lengths", ValueError, with_(v=t(2, 7, 2, 12)), "differ in axis N", "6 and 7"),
    refuse("k and v of other heads", ValueError, with_(v=t(2, 6, 4, 12)), "differ in axis Hkv", "2 and 4"),
    refuse("q and k of other widths", ValueError, with_(k=t(2, 6, 2, 15)), "differ in axis D", "16 and 15"),
    refuse(
        "heads do not divide",
        ValueError,
        lambda: attend(t(2, 8, 3, 16)),
        "Hq = 3",
        "Hkv = 2",
        "multiple",
        "scaled_dot_product_attention",
    ),
    refuse("no key heads", ValueError, with_(k=t(2, 6, 0, 16), v=t(2, 6, 0, 12)), "Hkv must be at least 1"),
    refuse("keys of width 0", ValueError, lambda: attend(t(2, 8, 4, 0), t(2, 6, 2, 0)), "axis D = 0", "1 to 256"),
    refuse("values of width 0", ValueError, with_(v=t(2, 6, 2, 0)), "axis Dv = 0", "1 to 256"),
    refuse("bias, axis M", ValueError, with_(bias=t(2, 4, 100, 6)), "(2, 4, 100, 6)", "axis M is 100, wanted 1 or 8"),
    refuse("bias, axis N", ValueError, with_(bias=t(2, 4, 8, 8)), "(2, 4, 8, 6)", "axis N is 8, wanted 1 or 6"),
    refuse("bias, axis Hq", ValueError, with_(bias=t(2, 2, 8, 6)), "axis Hq is 2, wanted 1 or 4"),
    refuse("bias, a batch axis", ValueError, with_(bias=t(3, 4, 8, 6)), "axis B[0] is 3, wanted 1 or 2"),
    refuse("bias with too many axes", ValueError, with_(bias=t(1, 2, 4, 8, 6)), "it has 5 axes, at most 4"),
    refuse("bias without the head axis", ValueError, with_(bias=t(2, 8, 6)), "axis Hq is 2", "bias[:, None]"),
    refuse("bias, heads last", ValueError, with_(bias=t(8, 6, 4)), "bias.movedim(-1, -3)"),
    refuse("bias, batch and heads in one", ValueError, with_(bias=t(8, 8, 6)), "bias.unflatten(0, (2, 4))"),
    refuse(
        "heads before lengths",
        ValueError,
        lambda: attend(*(t(2, 4, 8, 16),) * 3, t(4, 8, 8)),
        "layout is (*B, length, heads, width)",
        "scaled_dot_product_attention",
    ),
    refuse("bias of an empty axis", ValueError, with_(bias=t(4, 0, 6)), "axis M is 0, wanted 1 or 8"),
    refuse("second bias of a list", ValueError, with_(bias=[t(8, 6), t(6, 8)]), "bias[1] of shape (6, 8)"),
    refuse(
        "mask of batch and keys",
        ValueError,
        with_(mask=t(2, 6, dtype=torch.bool)),
        "axis M is 2, wanted 1 or 8",
        "mask[:, None, None, :]",
    ),
    refuse("mask of queries alone", ValueError, with_(mask=t(8, dtype=torch.bool)), "axis N is 8, wanted 1 or 6"),
    refuse(
        "packed in two, not three",
        ValueError,
        lambda: biasflash.attention_qkvpacked(t(2, 8, 2, 4, 16)),
        "is 2, wanted 3",
    ),
    refuse("packed, too few axes", ValueError, lambda: biasflash.attention_qkvpacked(t(8, 3, 16)), "too few axes"),
    refuse(
        "packed in three, not two",
        ValueError,
        lambda: biasflash.attention_kvpacked(t(*Q), t(2, 6, 3, 2, 16)),
        "kv of shape (2, 6, 3, 2, 16)",
        "is 3, wanted 2",
    ),
    refuse(
        "packed keys of another width",
        ValueError,
        lambda: biasflash.attention_kvpacked(t(*Q), t(2, 6, 2, 2, 8)),
        "differ in axis D",
        "16 and 8",
    ),
    refuse(
        "torch's door, grouped heads unasked",
        ValueError,
        lambda: biasflash.scaled_dot_product_attention(t(2, 4, 8, 16), t(2, 2, 6, 16), t(2, 2, 6, 16)),
        "Hq = 4",
        "Hkv = 2",
        "enable_gqa=True",
    ),
    refuse(
        "torch's door, lengths before heads",
        ValueError,
        lambda: biasflash.scaled_dot_product_attention(t(2, 10, 4, 8), t(2, 7, 4, 8), t(2, 7, 4, 8)),
        "Hq = 10",
        "for (*B, length, heads, width) call biasflash.attention",
    ),
    refuse(
        "torch's door, two axes",
        ValueError,
        lambda: biasflash.scaled_dot_product_attention(t(8, 16), t(8, 16), t(8, 16)),
        "query of shape (8, 16)",
        "too few axes",
        "*B Hq M D",
    ),
    refuse(
        "historic door, axis N",
        ValueError,
        lambda: biasflash.flash_attention_fn(t(*Q), t(*K), t(*V), t(1, 1, 8, 7)),
        "axis N is 7, wanted 1 or 6",
    ),
    refuse(
        "historic packed door, axis M",
        ValueError,
        lambda: biasflash.flash_attention_qkvpacked_fn(t(2, 8, 3, 4, 16), t(9, 8)),
        "axis M is 9, wanted 1 or 8",
    ),
    refuse(
        "explain, axis Hq",
        ValueError,
        lambda: biasflash.explain(t(*Q), t(*K), t(*V), t(3, 8, 6)),
        "axis Hq is 3, wanted 1 or 4",
    ),
]

_VALUES = [
    refuse(
        "bias on another device", ValueError, with_(bias=t(8, 6, device="meta")), "bias is on meta", ".to(q.device)"
    ),
    refuse("k on another device", ValueError, with_(k=t(*K, device="meta")), "one device", "meta"),
    refuse("causal of unknown alignment", ValueError, with_(causal="upper"), "'upper'", "bottom-right", "top-left"),
    refuse("causal None", ValueError, with_(causal=None), "causal must be False", "got None"),
    refuse("causal 1", ValueError, with_(causal=1), "causal must be False", "got 1"),
    refuse("scale infinite", ValueError, with_(scale=math.inf), "scale must be finite", "inf"),
    refuse(
        "nested q",
        TypeError,
        lambda: attend(torch.nested.nested_tensor([t(3, 4, 16), t(5, 4, 16)], layout=torch.jagged)),
        "q has layout torch.jagged",
        "to_padded_tensor(q, 0.0)",
    ),
    refuse("sparse bias", TypeError, with_(bias=torch.eye(8).to_sparse()), "bias has layout torch.sparse_coo"),
    refuse("scale NaN", ValueError, with_(scale=math.nan), "scale must be finite", "nan"),
    refuse("unknown backend", ValueError, with_(backend="cuda"), "backend='cuda' is unknown", "'triton'", "'cpu'"),
]

_UNBUILT = [
    refuse("window", biasflash.UnsupportedError, with_(window=(4, 0)), "window=(4, 0)", "accepted: window=None"),
    refuse("softcap", biasflash.UnsupportedError, with_(softcap=30.0), "softcap=30.0", "accepted: softcap=None"),
    refuse("sinks", biasflash.UnsupportedError, with_(sinks=t(4)), "sinks=", "accepted: sinks=None"),
    refuse("dropout", biasflash.UnsupportedError, with_(dropout_p=0.1), "dropout_p=0.1", "accepted: dropout_p=0.0"),
    refuse("query lengths", biasflash.UnsupportedError, with_(q_lens=t(2, dtype=torch.int32)), "q_lens=None"),
    refuse("key lengths", biasflash.UnsupportedError, with_(kv_lens=t(2, dtype=torch.int32)), "kv_lens=None"),
    refuse(
        "torch's door, dropout",
        biasflash.UnsupportedError,
        lambda: biasflash.scaled_dot_product_attention(*(t(2, 4, 8, 16),) * 3, dropout_p=0.5),
        "dropout_p=0.5",
        "accepted: dropout_p=0.0",
    ),
    refuse(
        "keys of width 257",
        biasflash.UnsupportedError,
        lambda: attend(t(2, 8, 4, 257), t(2, 6, 2, 257)),
        "axis D = 257",
        "1 to 256",
    ),
    refuse("values of width 300", biasflash.UnsupportedError, with_(v=t(2, 6, 2, 300)), "axis Dv = 300", "1 to 256"),
    refuse(
        "a named backend that objects",
        biasflash.UnsupportedError,
        lambda: biasflash.attention(
            *(t(*shape, dtype=torch.float64) for shape in (Q, K, V)),
            backend="triton",
        ),
        "cannot compute",
        "float64 on cpu",
        "backend triton:",
        "name no backend",
    ),
    refuse(
        "a second derivative",
        biasflash.UnsupportedError,
        _second_derivative,
        "first derivatives only",
        "create_graph=True",
        runs=True,
    ),
]

#: every wrong call by name
REFUSALS: dict[str, Refusal] = {r.name: r for r in [*_KINDS, *_NAMES, *_DTYPES, *_SHAPES, *_VALUES, *_UNBUILT]}


def _launched(*args: object, **options: object) -> NoReturn:
    raise RefusalError("the wrong call was launched")


@contextlib.contextmanager
def _no_launches() -> Iterator[None]:
    """Inside the block no backend may run."""
    modules: list[Any] = [backends.load(name) for name in backends.ORDER]
    kept = [module.forward for module in modules]
    for module in modules:
        module.forward = _launched
    try:
        yield
    finally:
        for module, forward in zip(modules, kept, strict=True):
            module.forward = forward


def provoke(refusal: Refusal) -> str:
    """Makes the wrong call and returns its message.

    Raises:
        RefusalError: the call is accepted or launched, another type is raised, words are missing, or one error hides
            another.
    """
    guard = contextlib.nullcontext() if refusal.runs else _no_launches()
    try:
        with guard:
            refusal.call()
    except RefusalError:
        raise
    except Exception as error:
        message = str(error)
        if type(error) is not refusal.error:
            raise RefusalError(f"{type(error).__name__} instead of {refusal.error.__name__}: {message}") from error
        missing = [word for word in refusal.words if word not in message]
        if missing:
            raise RefusalError(f"the message lacks {missing}: {message}") from error
        if error.__cause__ is not None or error.__context__ is not None:
            raise RefusalError(f"the message follows another error: {message}") from error
        return message
    raise RefusalError("the wrong call was accepted")
