"""Biases that bulk copies cannot read as they are, and when a copy with aligned rows is worth its memory."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import triton

from biasflash.backends.backend import bias_pitch
from biasflash.backends.hopper.align_rows import align_rows_kernel
from biasflash.backends.hopper.operands import MOST_BATCH_AXES, Box, Boxed, batch_of, boxed, outer_steps, unit_of
from biasflash.backends.triton.operands import Launch, Operands, Slot
from biasflash.problem import Problem, Term

#: pairs of batch item and head for every plane of a bias that is copied: the copy is then small beside the scores
LEAST_PAIRS = 4
#: bytes of the largest copy
MOST_BYTES = 64 * 2**20


def may_copy(problem: Problem, term: Term) -> bool:
    """Whether a bias of this shape is shared by enough pairs, and small enough."""
    planes = math.prod(term.shape[:-2])
    pairs = problem.batch_size * problem.Hq
    size = planes * problem.M * (problem.N + unit_of(term.dtype)) * term.dtype.itemsize
    return planes * LEAST_PAIRS <= pairs and size <= MOST_BYTES


@dataclass(frozen=True, kw_only=True)
class AlignedBias:
    """The copy of a bias: ``sizes`` along (b0, b1, head), 1 where the bias does not vary, and its strides there."""

    sizes: tuple[int, int, int]
    strides: tuple[int, ...]  # of the bias along all five axes
    M: int
    N: int
    dtype: torch.dtype

    @property
    def pitch(self) -> int:
        return bias_pitch(self.N, self.dtype.itemsize)

    def scratch(self) -> dict[str, int]:
        return {"aligned": math.prod(self.sizes) * self.M * self.pitch * self.dtype.itemsize // 4}

    def launches(self) -> tuple[Launch, ...]:
        rows = 8
        arguments: dict[str, Any] = {
            "bias_ptr": Slot("bias0"),
            "aligned_ptr": Slot("aligned"),
            **dict(zip(("bias_b0", "bias_b1", "bias_h", "bias_m", "bias_n"), self.strides, strict=True)),
            **{"n1": self.sizes[1], "heads": self.sizes[2], "M": self.M, "N": self.N, "pitch": self.pitch},
            **{"ROWS": rows, "COLUMNS": 256},
        }
        grid = triton.cdiv(self.M, rows) * math.prod(self.sizes)
        return (Launch(kernel=align_rows_kernel, grid=grid, arguments=arguments, warps=4, stages=1),)

    def boxed(self, rows: int, columns: int) -> Boxed:
        """In blocks of ``rows`` x ``columns``."""
        steps, step = [unit_of(self.dtype)] * 3, self.M * self.pitch
        for axis in (2, 1, 0):
            if self.sizes[axis] > 1:
                steps[axis] = step
                step *= self.sizes[axis]
        box = Box(
            slot="aligned",
            dtype=self.dtype,
            shape=(*self.sizes, self.M, self.N),
            strides=(*steps, self.pitch, 1),
            block=(1, 1, 1, rows, columns),
        )
        return Boxed(box=box, moves=sum(1 << axis for axis in range(3) if self.sizes[axis] > 1))


def bias_boxed(ops: Operands, rows: int, columns: int) -> Boxed:
    """The call's only bias, or its copy, in blocks of ``rows`` x ``columns``."""
    copy = aligned_bias(ops)
    return copy.boxed(rows, columns) if copy is not None else boxed(ops, "bias0", rows, columns)


def aligned_bias(ops: Operands) -> AlignedBias | None:
    """The copy that kernels read in place of the bias; None where they can read it, or a copy would be too large.

    Rows or columns that the caller expanded are not copied either: nothing is laid out in its broadcast shape.
    """
    p = ops.problem
    if not ops.has_dense or len(ops.sizes) > MOST_BATCH_AXES or not may_copy(p, p.terms[0]):
        return None
    view, dtype = ops.term_views[0], p.terms[0].dtype
    if view.vec == unit_of(dtype) or not view.is_plane:
        return None
    steps = outer_steps(view)
    sizes = tuple(n if s else 1 for n, s in zip((*batch_of(ops), p.Hq), steps, strict=True))
    return AlignedBias(
        sizes=(sizes[0], sizes[1], sizes[2]),
        strides=(*steps, *view.strides[-2:]),
        M=p.M,
        N=p.N,
        dtype=dtype,
    )
