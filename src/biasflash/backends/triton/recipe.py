"""What a pass does, written down once per problem and layout: launches, scratch, and what torch adds up after."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import triton

from biasflash.backends.triton.backward_bias import add_chunks_kernel
from biasflash.backends.triton.operands import Launch, Slot

#: parts of the scratch start at multiples of this many elements, 256 bytes
PART = 64


@dataclass(frozen=True, kw_only=True)
class Sum:
    """A reduction left to torch after the launches: ``grad`` = ``scratch`` viewed as ``shape``, summed to its shape."""

    scratch: str
    shape: tuple[int, ...]
    grad: int


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Launches in order; float32 scratch by name and element count; what is summed or copied afterwards.

    ``zeroed`` is int32 scratch that holds zeros before the first launch.
    ``copies`` are pairs (from, to) of term indices; ``rows`` are the terms of one key column, whose gradient is that of
    the log-sum-exp (zero if nothing flows into it); ``chunked`` are the terms whose gradient is a sum of chunks.
    """

    launches: tuple[Launch, ...]
    scratch: tuple[tuple[str, int], ...] = ()
    zeroed: tuple[tuple[str, int], ...] = ()
    sums: tuple[Sum, ...] = ()
    rows: tuple[int, ...] = ()
    copies: tuple[tuple[int, int], ...] = ()
    chunked: tuple[int, ...] = ()

    @cached_property
    def places(self) -> tuple[int, tuple[tuple[str, int, int], ...]]:
        """All float32 scratch in one piece: its elements; and name, first element and count of each part."""
        parts, end = [], 0
        for name, count in self.scratch:
            parts.append((name, end, count))
            end += -(-count // PART) * PART
        return end, tuple(parts)


def add_chunks(index: int, count: int, chunks: int, *, block: int, warps: int) -> Launch:
    """The gradient of term ``index``, ``count`` elements, from the ``chunks`` float32 sums in ``partial{index}``."""
    return Launch(
        kernel=add_chunks_kernel,
        grid=triton.cdiv(count, block),
        arguments={
            "partial_ptr": Slot(f"partial{index}"),
            "total_ptr": Slot(f"dense_grad{index}"),
            "count": count,
            "chunks": chunks,
            "BLOCK": block,
        },
        warps=warps,
        stages=1,
    )
