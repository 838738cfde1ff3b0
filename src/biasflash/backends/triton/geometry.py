"""Strides as kernels take them: batch axes merged, alignment found, integers encoded. Plain Python, no launches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class View:
    """One tensor as a kernel reads it: encoded strides ``(*batch, head, row, column)`` and its alignment class.

    ``vec`` is 0 for any strides, 1 for a unit last stride, else the elements in 16 bytes (at most 8), by which
    every other stride is divisible; strides are in units of it.
    """

    vec: int
    strides: tuple[int, ...]
    codes: tuple[int, ...]

    @property
    def is_plane(self) -> bool:
        """Whether a term varies along queries and keys."""
        return 0 not in self.strides[-2:]


def code(value: int) -> int:
    """``2 x + 3``, odd and above 1: Triton does not compile anew for each value (``tile.memory.plain``)."""
    return 2 * value + 3


def term_strides(shape: Sequence[int], strides: Sequence[int]) -> list[int]:
    """Strides of a padded term; 0 along axes of size 1, so that they broadcast."""
    return [0 if size == 1 else stride for size, stride in zip(shape, strides, strict=True)]


def rows_first(strides: Sequence[int]) -> list[int]:
    """Strides of ``(*B, length, heads, width)`` in the kernels' order ``(*B, head, row, column)``."""
    *batch, row, head, column = strides
    return [*batch, head, row, column]


def plain_strides(shape: Sequence[int]) -> list[int]:
    """Strides of a contiguous array of this shape."""
    strides: list[int] = []
    step = 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return strides[::-1]


def stretched(strides: Sequence[int], shape: Sequence[int], longer: Sequence[int]) -> list[int]:
    """Strides of a tensor of shape ``longer`` that lies as one of ``shape`` does.

    From the innermost axis out: dense where it was dense, the same step where nothing inside has grown (heads of a
    packed projection), else room for what has, in steps of 8 elements if the steps were (padded rows).
    """
    found = list(strides)
    end = new_end = 1
    for i in sorted(range(len(shape)), key=lambda i: (strides[i], shape[i])):
        if strides[i] == end:
            found[i] = new_end
        elif strides[i] and end != new_end:
            found[i] = -(-new_end // 8) * 8 if strides[i] % 8 == 0 else new_end
        if strides[i] and shape[i] != 1:
            end, new_end = strides[i] * shape[i], found[i] * longer[i]
    return found


def contiguous_strides(shape: Sequence[int]) -> list[int]:
    """``plain_strides`` with 0 along axes of size 1, so that they broadcast."""
    return term_strides(shape, plain_strides(shape))


def merge_batch(batch: Sequence[int], strides: dict[str, list[int]]) -> tuple[tuple[int, ...], dict[str, list[int]]]:
    """Fewest batch axes that describe every tensor: axes of size 1 vanish, axes that are one run in all tensors merge.

    At least one axis is left. Strides are ``(*batch, head, row, column)`` before and after.
    """
    sizes: list[int] = []
    merged: dict[str, list[int]] = {name: [] for name in strides}
    for axis, size in enumerate(batch):
        if size == 1:
            continue
        if sizes and all(merged[name][-1] == s[axis] * size for name, s in strides.items()):
            sizes[-1] *= size
            for name, s in strides.items():
                merged[name][-1] = s[axis]
        else:
            sizes.append(size)
            for name, s in strides.items():
                merged[name].append(s[axis])
    if not sizes:
        sizes = [1]
        for axes in merged.values():
            axes.append(0)
    return tuple(sizes), {name: [*merged[name], *s[len(batch) :]] for name, s in strides.items()}


def view(strides: Sequence[int], itemsize: int, width: int, aligned: bool, broadcasts: bool = True) -> View:
    """The ``View`` of a tensor whose last axis has ``width`` elements.

    ``aligned``: it starts at a multiple of 16 bytes. ``broadcasts``: a last stride of 0 is an axis along which
    kernels do not move at all (score terms); elsewhere it is a stride like any other.
    """
    *outer, last = strides
    if width > 1 and last != 1 and not (broadcasts and last == 0):
        vec = 0
    else:
        full = min(16 // itemsize, 8)  # bytes too move in eights, so that masks and biases share one alignment class
        vec = full if aligned and all(s % full == 0 for s in outer) else 1
    unit = max(vec, 1)
    codes = (*(code(s // unit) for s in outer), code(last if vec == 0 else 1))
    return View(vec=vec, strides=tuple(strides), codes=codes)
