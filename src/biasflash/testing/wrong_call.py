"""A wrong call, and short ways to write one: good tensors wherever none is given."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor

import biasflash

Q, K, V = (2, 8, 4, 16), (2, 6, 2, 16), (2, 6, 2, 12)  # B 2, M 8, N 6, Hq 4, Hkv 2, D 16, Dv 12


class Array:
    """An array of another library."""

    def __array__(self) -> NoReturn:
        raise AssertionError("a check read the array")


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


def t(*shape: int, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Tensor:
    return torch.zeros(shape, dtype=dtype, device=device)


def attend(q: Any = None, k: Any = None, v: Any = None, *terms: Any, **options: Any) -> object:
    """The library's own door with good q, k and v wherever none is given."""
    q = t(*Q) if q is None else q
    k = t(*K) if k is None else k
    v = t(*V) if v is None else v
    return biasflash.attention(q, k, v, *terms, **options)


def with_(**options: Any) -> Callable[[], object]:
    return lambda: attend(**options)


def refuse(name: str, error: type[Exception], call: Callable[[], object], *words: str, runs: bool = False) -> Refusal:
    return Refusal(name=name, call=call, error=error, words=words, runs=runs)
