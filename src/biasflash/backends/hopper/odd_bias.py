"""Biases whose rows are not in steps of 16 bytes, and that are not copied: read in lines of eight, see ``odd_rows``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from biasflash.backends.hopper import config, odd_rows
from biasflash.backends.hopper.aligned import aligned_bias, bias_boxed
from biasflash.backends.hopper.operands import MOST_BATCH_AXES, Box, Boxed, batch_of, outer_steps, unit_of
from biasflash.backends.triton.operands import Operands, Slot
from biasflash.problem import Problem, Term

LINE = int(odd_rows.LINE.value)
#: widest heads whose tiles leave room for raw ones of a 16-bit bias; of a float32 bias none do
MOST_WIDTH = 128
#: and beside a mask of keys
MOST_MASKED_WIDTH = 64


@dataclass(frozen=True, kw_only=True)
class OddBias:
    """Rows of all planes, ``pitch`` elements from each other, in ``lines`` that end before the last element does.

    ``steps``: rows from a plane to the next along b0, b1 and head; 0 where the bias does not vary.
    """

    dtype: torch.dtype
    pitch: int
    lines: int
    steps: tuple[int, int, int]

    def _box(self, columns: int) -> Box:
        line = LINE * self.pitch
        return Box(slot="bias0", dtype=self.dtype, shape=(self.lines, line), strides=(line, 1), block=(LINE, columns))

    def arguments(self, kernel: str, width: int) -> dict[str, Any]:
        """Over the other arguments of a launch; ``width``: the larger of D and Dv."""
        return {
            **config.odd_arguments(kernel, width),
            "bias_desc": self._box(int(odd_rows.CHUNK.value)),
            "ends_desc": self._box(int(odd_rows.VECTOR.value)),
            "odd_ptr": Slot("bias0"),
            "odd_pitch": self.pitch,
            "odd_whole": LINE * self.lines,
            **dict(zip(("odd_b0", "odd_b1", "odd_h"), self.steps, strict=True)),
        }


def has_room(problem: Problem, term: Term) -> bool:
    """Whether tiles of a bias of this dtype can be put in order in shared memory."""
    is_masked = any(t.kind == "keep" for t in problem.terms)
    most = MOST_MASKED_WIDTH if is_masked else MOST_WIDTH
    return term.dtype.itemsize == 2 and max(problem.D, problem.Dv) <= most


def odd_bias(ops: Operands) -> OddBias | None:
    """None where bulk copies read the bias, or a copy of it, as it is; or not even so."""
    p = ops.problem
    if not ops.has_dense or len(ops.sizes) > MOST_BATCH_AXES or aligned_bias(ops) is not None:
        return None
    if not has_room(p, p.terms[0]):
        return None
    view, dtype = ops.term_views[0], p.terms[0].dtype
    pitch, column = view.strides[-2:]
    if view.vec == unit_of(dtype) or column != 1 or not ops.is_aligned("bias0"):
        return None
    outer = outer_steps(view)
    if pitch < p.N or any(step % pitch for step in outer):  # rows that overlap, or planes that begin within a row
        return None
    steps = tuple(step // pitch for step in outer)
    rows = p.M + sum((n - 1) * step for n, step in zip((*batch_of(ops), p.Hq), steps, strict=True) if step)
    lines = ((rows - 1) * pitch + p.N) // (LINE * pitch)  # behind a slice's last row there may be no memory
    if lines < 1 or max(rows, LINE * pitch) + 64 >= 2**31:  # coordinates are 32 bits wide
        return None
    return OddBias(dtype=dtype, pitch=pitch, lines=lines, steps=(steps[0], steps[1], steps[2]))


def odd_arguments(ops: Operands, kernel: str) -> dict[str, Any]:
    """Over the other arguments of a launch of ``kernel``."""
    bias = odd_bias(ops)
    return {} if bias is None else bias.arguments(kernel, max(ops.problem.D, ops.problem.Dv))


def bulk_bias(ops: Operands, rows: int, columns: int, other: Boxed) -> Boxed:
    """The bias in blocks of ``rows`` x ``columns``; ``other`` where bulk copies bring none in one piece."""
    return bias_boxed(ops, rows, columns) if ops.has_dense and odd_bias(ops) is None else other


def no_odd_arguments(other: Box) -> dict[str, Any]:
    """What kernels take in place of ``odd_arguments``, and never read; ``other``: any box."""
    numbers = dict.fromkeys(("odd_pitch", "odd_whole", "odd_b0", "odd_b1", "odd_h", "RAW_STAGES"), 0)
    return {"ends_desc": other, "odd_ptr": Slot("lse"), **numbers}
