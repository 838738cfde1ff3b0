"""The contract every backend keeps. A backend is a module (or package) with these functions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from biasflash.problem import Problem


@dataclass(frozen=True, kw_only=True)
class Promises:
    """What a backend guarantees; the support tables of README and docs are printed from it."""

    devices: str
    dtypes: tuple[torch.dtype, ...]
    max_width: int
    deterministic: bool
    memory: str
    summary: str


@dataclass(frozen=True, kw_only=True)
class Gradients:
    """Buffers that ``backward`` fills, in the shapes and dtypes of the inputs; None where no gradient is wanted.

    q, k, v may be strided views of one packed buffer. ``terms`` are padded like the terms themselves.
    """

    q: Tensor | None
    k: Tensor | None
    v: Tensor | None
    terms: tuple[Tensor | None, ...]


def bias_pitch(columns: int, itemsize: int) -> int:
    """Elements from row to row of a full bias's gradient on a GPU: rows begin at multiples of 16 bytes.

    It is stored tile by tile: by bulk copies, which take no other rows, or by vectors in place of single elements.
    """
    unit = max(1, 16 // itemsize)
    return -(-columns // unit) * unit


class Backend(Protocol):
    PROMISES: Promises

    def objections(self, problem: Problem) -> tuple[str, ...]:
        """Every reason why this backend cannot compute the problem; empty if it can."""

    def reservations(self, problem: Problem) -> tuple[str, ...]:
        """Why a later backend is likely faster, although this one can; heeded where the caller names none."""

    def describe(self, problem: Problem) -> tuple[str, ...]:
        """What it would run, and why: one line per kernel or stage, for ``explain``."""

    def forward(
        self, problem: Problem, q: Tensor, k: Tensor, v: Tensor, terms: Sequence[Tensor]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """``out (*B M Hq Dv)`` contiguous in q's dtype, ``lse`` and ``lse_low (*B Hq M)``, float32 or float64.

        Terms come padded to rank ``len(*B) + 3``. Without ``problem.keeps_low`` lse_low has shape ``(0,)``.
        """

    def backward(
        self,
        problem: Problem,
        gradients: Gradients,
        dout: Tensor,
        dlse: Tensor | None,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        terms: Sequence[Tensor],
        out: Tensor,
        lse: Tensor,
        lse_low: Tensor,
    ) -> None:
        """Fills ``gradients``. ``dout`` has any strides; ``dlse (*B Hq M)`` is the gradient of the returned lse."""
