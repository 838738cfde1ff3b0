"""``attention`` in the shape that other people's case runners call: heads first, everything but q, k, v by keyword."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

import biasflash
from biasflash.api import Terms


class HeadsFirst(Protocol):
    """``(B, Hq, M, D)``, ``(B, Hkv, N, D)`` and ``(B, Hkv, N, Dv)`` to ``(B, Hq, M, Dv)``."""

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        bias: Terms = None,
        mask: Terms = None,
        causal: bool | str = False,
        scale: float | None = None,
    ) -> Tensor: ...


def heads_first(backend: str | None = None) -> HeadsFirst:
    """``biasflash.attention`` on a backend, or on the one it would choose, as a function of heads-first tensors.

    The transposes are views: no operand is copied. Errors are those of ``attention``; shapes in their messages are in
    its own layout, ``(*B, length, heads, width)``.
    """

    def attention(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        bias: Terms = None,
        mask: Terms = None,
        causal: bool | str = False,
        scale: float | None = None,
    ) -> Tensor:
        q, k, v = (t.transpose(-3, -2) if isinstance(t, Tensor) and t.dim() >= 3 else t for t in (q, k, v))
        out = biasflash.attention(q, k, v, bias, mask, causal=causal, scale=scale, backend=backend)
        assert isinstance(out, Tensor)
        return out.transpose(-3, -2)

    return attention


#: ready for runners that take a name, ``biasflash.testing.adapters:attention``
attention = heads_first()
