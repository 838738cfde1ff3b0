"""Wrong calls and the one message each must give: what was asked, what is wrong, what would be accepted."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor

import biasflash
from biasflash import backends

Q, K, V = (2, 8, 4, 16), (2, 6, 2, 16), (2, 6, 2, 12)  # B 2, M 8, N 6, Hq 4, Hkv 2, D 16, Dv 12


class RefusalError(AssertionError):
    """A wrong call was not refused, or not as it should be."""


@dataclass(frozen=True, kw_only=True)
class Refusal:
    """A wrong call: its name, the call, the exception's exact type, and words that the message must hold.

    ``runs`` marks the one kind of call that can only be refused after a forward pass.
    """

    name: str
    call: Callable[[], object]
    error: type[Exception]
    words: tuple[str, ...]
    runs: bool = False


def _t(*shape: int, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Tensor:
    return torch.zeros(shape, dtype=dtype, device=device)


def _attend(q: Any = None, k: Any = None, v: Any = None, *terms: Any, **options: Any) -> object:
    """The library's own door with good q, k and v wherever none is given."""
    q = _t(*Q) if q is None else q
    k = _t(*K) if k is None else k
    v = _t(*V) if v is None else v
    return biasflash.attention(q, k, v, *terms, **options)


def _with(**options: Any) -> Callable[[], object]:
    return lambda: _attend(**options)


def _refuse(name: str, error: type[Exception], call: Callable[[], object], *words: str, runs: bool = False) -> Refusal:
    return Refusal(name=name, call=call, error=error, words=words, runs=runs)


def _second_derivative() -> object:
    q = torch.ones(Q, requires_grad=True)
    out = biasflash.attention(q, torch.ones(K), torch.ones(V))
    assert isinstance(out, Tensor)
    (dq,) = torch.autograd.grad(out.sum(), q, create_graph=True)
    return torch.autograd.grad(dq.sum(), q)


_KINDS = [
    _refuse("q is a list", TypeError, lambda: _attend([[1.0]]), "q must be a torch.Tensor", "*B M Hq D", "got list"),
    _refuse("k is text", TypeError, _with(k="keys"), "k must be a torch.Tensor", "*B N Hkv D", "got str"),
    _refuse("v is a number", TypeError, _with(v=1.0), "v must be a torch.Tensor", "*B N Hkv Dv", "got float"),
    _refuse("bias is a number", TypeError, _with(bias=1.0), "bias must be a torch.Tensor", "got float"),
    _refuse("bias is a dict", TypeError, _with(bias={}), "bias must be a torch.Tensor", "list", "got dict"),
    _refuse("a bias of the list is None", TypeError, _with(bias=[_t(8, 6), None]), "bias[1]", "got NoneType"),
    _refuse("a mask of the list is text", TypeError, _with(mask=["causal"]), "mask[0]", "got str"),
    _refuse("scale is text", TypeError, _with(scale="auto"), "scale must be a number or None", "got str"),
    _refuse("scale is a tensor", TypeError, _with(scale=_t()), "scale must be a number or None", "got Tensor"),
    _refuse("scale is a bool", TypeError, _with(scale=True), "scale must be a number or None", "got bool"),
    _refuse(
        "qkv is a tuple",
        TypeError,
        lambda: biasflash.attention_qkvpacked(()),  # type: ignore[arg-type]
        "qkv must be a torch.Tensor",
        "L 3 H D",
    ),
    _refuse(
        "kv is None",
        TypeError,
        lambda: biasflash.attention_kvpacked(_t(*Q), None),  # type: ignore[arg-type]
        "kv must be a torch.Tensor",
        "N 2 Hkv D",
    ),
    _refuse(
        "query is a list",
        TypeError,
        lambda: biasflash.scaled_dot_product_attention([], _t(2, 4, 8, 16), _t(2, 4, 8, 16)),  # type: ignore[arg-type]
        "query must be a torch.Tensor",
        "got list",
    ),
]

_DTYPES = [
    _refuse(
        "q of int64", TypeError, lambda: _attend(_t(*Q, dtype=torch.int64)), "q has dtype int64", "float16", "float32"
    ),
    _refuse("k of complex64", TypeError, _with(k=_t(*K, dtype=torch.complex64)), "k has dtype complex64", "bfloat16"),
    _refuse("v of bool", TypeError, _with(v=_t(*V, dtype=torch.bool)), "v has dtype bool", "accepted"),
    _refuse(
        "k of another dtype",
        TypeError,
        _with(k=_t(*K, dtype=torch.float16)),
        "share one dtype",
        "float16",
        ".to(q.dtype)",
    ),
    _refuse(
        "v of another dtype",
        TypeError,
        _with(v=_t(*V, dtype=torch.bfloat16)),
        "share one dtype",
        "bfloat16",
        ".to(q.dtype)",
    ),
    _refuse(
        "bias of bool", TypeError, _with(bias=_t(8, 6, dtype=torch.bool)), "bias is boolean", "mask=", "may attend"
    ),
    _refuse(
        "bias of bool in a list",
        TypeError,
        _with(bias=[_t(8, 6), _t(8, 6, dtype=torch.bool)]),
        "bias[1] is boolean",
        "mask=",
    ),
    _refuse("bias of int32", TypeError, _with(bias=_t(8, 6, dtype=torch.int32)), "bias has dtype int32", "bfloat16"),
    _refuse("bias of complex64", TypeError, _with(bias=_t(8, 6, dtype=torch.complex64)), "bias has dtype complex64"),
    _refuse("mask of float32", TypeError, _with(mask=_t(8, 6)), "mask has dtype float32", "accepted: bool", "bias="),
    _refuse("mask of int64", TypeError, _with(mask=_t(8, 6, dtype=torch.int64)), "mask has dtype int64", "!= 0"),
    _refuse("mask of uint8", TypeError, _with(mask=_t(8, 6, dtype=torch.uint8)), "mask has dtype uint8", "!= 0"),
    _refuse(
        "historic door, bias of int64",
        TypeError,
        lambda: biasflash.flash_attention_fn(_t(*Q), _t(*K), _t(*V), _t(8, 6, dtype=torch.int64)),
        "bias has dtype int64",
        "accepted",
    ),
]

_SHAPES = [
    _refuse("q of two axes", ValueError, lambda: _attend(_t(8, 16)), "q of shape (8, 16)", "too few axes", "*B M Hq D"),
    _refuse("v of one axis", ValueError, _with(v=_t(12)), "v of shape (12,)", "too few axes", "*B N Hkv Dv"),
    _refuse("another batch size", ValueError, _with(k=_t(3, 6, 2, 16)), "same batch axes", "(3, 6, 2, 16)"),
    _refuse("another number of batch axes", ValueError, lambda: _attend(_t(8, 4, 16)), "same batch axes", "(8, 4, 16)"),
    _refuse("k and v of other lengths", ValueError, _with(v=_t(2, 7, 2, 12)), "differ in axis N", "6 and 7"),
    _refuse("k and v of other heads", ValueError, _with(v=_t(2, 6, 4, 12)), "differ in axis Hkv", "2 and 4"),
    _refuse("q and k of other widths", ValueError, _with(k=_t(2, 6, 2, 15)), "differ in axis D", "16 and 15"),
    _refuse(
        "heads do not divide",
        ValueError,
        lambda: _attend(_t(2, 8, 3, 16)),
        "Hq = 3",
        "Hkv = 2",
        "multiple",
        "scaled_dot_product_attention",
    ),
    _refuse("no key heads", ValueError, _with(k=_t(2, 6, 0, 16), v=_t(2, 6, 0, 12)), "Hkv must be at least 1"),
    _refuse("keys of width 0", ValueError, lambda: _attend(_t(2, 8, 4, 0), _t(2, 6, 2, 0)), "axis D = 0", "1 to 256"),
    _refuse("values of width 0", ValueError, _with(v=_t(2, 6, 2, 0)), "axis Dv = 0", "1 to 256"),
    _refuse("bias, axis M", ValueError, _with(bias=_t(2, 4, 100, 6)), "(2, 4, 100, 6)", "axis M is 100, wanted 1 or 8"),
    _refuse("bias, axis N", ValueError, _with(bias=_t(2, 4, 8, 8)), "(2, 4, 8, 6)", "axis N is 8, wanted 1 or 6"),
    _refuse("bias, axis Hq", ValueError, _with(bias=_t(2, 2, 8, 6)), "axis Hq is 2, wanted 1 or 4"),
    _refuse("bias, a batch axis", ValueError, _with(bias=_t(3, 4, 8, 6)), "axis B[0] is 3, wanted 1 or 2"),
    _refuse("bias with too many axes", ValueError, _with(bias=_t(1, 2, 4, 8, 6)), "it has 5 axes, at most 4"),
    _refuse("bias without the head axis", ValueError, _with(bias=_t(2, 8, 6)), "axis Hq is 2", "bias[:, None]"),
    _refuse("bias of an empty axis", ValueError, _with(bias=_t(4, 0, 6)), "axis M is 0, wanted 1 or 8"),
    _refuse("second bias of a list", ValueError, _with(bias=[_t(8, 6), _t(6, 8)]), "bias[1] of shape (6, 8)"),
    _refuse(
        "mask of batch and keys",
        ValueError,
        _with(mask=_t(2, 6, dtype=torch.bool)),
        "axis M is 2, wanted 1 or 8",
        "mask[:, None, None, :]",
    ),
    _refuse("mask of queries alone", ValueError, _with(mask=_t(8, dtype=torch.bool)), "axis N is 8, wanted 1 or 6"),
    _refuse(
        "packed in two, not three",
        ValueError,
        lambda: biasflash.attention_qkvpacked(_t(2, 8, 2, 4, 16)),
        "is 2, wanted 3",
    ),
    _refuse("packed, too few axes", ValueError, lambda: biasflash.attention_qkvpacked(_t(8, 3, 16)), "too few axes"),
    _refuse(
        "packed in three, not two",
        ValueError,
        lambda: biasflash.attention_kvpacked(_t(*Q), _t(2, 6, 3, 2, 16)),
        "kv of shape (2, 6, 3, 2, 16)",
        "is 3, wanted 2",
    ),
    _refuse(
        "packed keys of another width",
        ValueError,
        lambda: biasflash.attention_kvpacked(_t(*Q), _t(2, 6, 2, 2, 8)),
        "differ in axis D",
        "16 and 8",
    ),
    _refuse(
        "torch's door, grouped heads unasked",
        ValueError,
        lambda: biasflash.scaled_dot_product_attention(_t(2, 4, 8, 16), _t(2, 2, 6, 16), _t(2, 2, 6, 16)),
        "Hq = 4",
        "Hkv = 2",
        "enable_gqa=True",
    ),
    _refuse(
        "torch's door, two axes",
        ValueError,
        lambda: biasflash.scaled_dot_product_attention(_t(8, 16), _t(8, 16), _t(8, 16)),
        "query of shape (8, 16)",
        "too few axes",
        "*B Hq M D",
    ),
    _refuse(
        "historic door, axis N",
        ValueError,
        lambda: biasflash.flash_attention_fn(_t(*Q), _t(*K), _t(*V), _t(1, 1, 8, 7)),
        "axis N is 7, wanted 1 or 6",
    ),
    _refuse(
        "historic packed door, axis M",
        ValueError,
        lambda: biasflash.flash_attention_qkvpacked_fn(_t(2, 8, 3, 4, 16), _t(9, 8)),
        "axis M is 9, wanted 1 or 8",
    ),
    _refuse(
        "explain, axis Hq",
        ValueError,
        lambda: biasflash.explain(_t(*Q), _t(*K), _t(*V), _t(3, 8, 6)),
        "axis Hq is 3, wanted 1 or 4",
    ),
]

_VALUES = [
    _refuse(
        "bias on another device", ValueError, _with(bias=_t(8, 6, device="meta")), "bias is on meta", ".to(q.device)"
    ),
    _refuse("k on another device", ValueError, _with(k=_t(*K, device="meta")), "one device", "meta"),
    _refuse("causal of unknown alignment", ValueError, _with(causal="upper"), "'upper'", "bottom-right", "top-left"),
    _refuse("causal None", ValueError, _with(causal=None), "causal must be False", "got None"),
    _refuse("causal 1", ValueError, _with(causal=1), "causal must be False", "got 1"),
    _refuse("scale infinite", ValueError, _with(scale=math.inf), "scale must be finite", "inf"),
    _refuse("sparse bias", TypeError, _with(bias=torch.eye(8).to_sparse()), "bias has layout torch.sparse_coo"),
    _refuse("scale NaN", ValueError, _with(scale=math.nan), "scale must be finite", "nan"),
    _refuse("unknown backend", ValueError, _with(backend="cuda"), "backend='cuda' is unknown", "'triton'", "'cpu'"),
]

_UNBUILT = [
    _refuse("window", biasflash.UnsupportedError, _with(window=(4, 0)), "window=(4, 0)", "accepted: window=None"),
    _refuse("softcap", biasflash.UnsupportedError, _with(softcap=30.0), "softcap=30.0", "accepted: softcap=None"),
    _refuse("sinks", biasflash.UnsupportedError, _with(sinks=_t(4)), "sinks=", "accepted: sinks=None"),
    _refuse("dropout", biasflash.UnsupportedError, _with(dropout_p=0.1), "dropout_p=0.1", "accepted: dropout_p=0.0"),
    _refuse("query lengths", biasflash.UnsupportedError, _with(q_lens=_t(2, dtype=torch.int32)), "q_lens=None"),
    _refuse("key lengths", biasflash.UnsupportedError, _with(kv_lens=_t(2, dtype=torch.int32)), "kv_lens=None"),
    _refuse(
        "torch's door, dropout",
        biasflash.UnsupportedError,
        lambda: biasflash.scaled_dot_product_attention(*(_t(2, 4, 8, 16),) * 3, dropout_p=0.5),
        "dropout_p=0.5",
        "accepted: dropout_p=0.0",
    ),
    _refuse(
        "keys of width 257",
        biasflash.UnsupportedError,
        lambda: _attend(_t(2, 8, 4, 257), _t(2, 6, 2, 257)),
        "axis D = 257",
        "1 to 256",
    ),
    _refuse("values of width 300", biasflash.UnsupportedError, _with(v=_t(2, 6, 2, 300)), "axis Dv = 300", "1 to 256"),
    _refuse(
        "a named backend that objects",
        biasflash.UnsupportedError,
        lambda: biasflash.attention(
            *(_t(*shape, dtype=torch.float64) for shape in (Q, K, V)),
            backend="triton",
        ),
        "cannot compute",
        "float64 on cpu",
        "backend triton:",
        "name no backend",
    ),
    _refuse(
        "a second derivative",
        biasflash.UnsupportedError,
        _second_derivative,
        "first derivatives only",
        "create_graph=True",
        runs=True,
    ),
]

#: every wrong call by name
REFUSALS: dict[str, Refusal] = {r.name: r for r in [*_KINDS, *_DTYPES, *_SHAPES, *_VALUES, *_UNBUILT]}


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
