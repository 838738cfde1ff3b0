"""How a problem is cut into blocks: pure arithmetic."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from biasflash.problem import Problem

#: Numbers in one block of scores, 4 MiB of float32. Enough work for each call into torch (about 5 us) to vanish, small
#: enough for the last-level cache.
BLOCK = 2**20
#: Rows that a product should have at least, so that the keys it reads are used often enough; a block holds whole rows
#: of scores, and delta needs no pass of its own, up to N = BLOCK / MIN_ROWS = 32768.
MIN_ROWS = 32


def compute_dtype(problem: Problem) -> torch.dtype:
    return torch.float64 if problem.dtype == torch.float64 else torch.float32


@dataclass(frozen=True, kw_only=True)
class Blocks:
    """Extent of one block of scores: (batch, key head) pairs along each axis of ``(*B, Hkv)``, queries and keys."""

    heads: tuple[int, ...]
    rows: int
    keys: int


def _even(length: int, most: int) -> int:
    """The extent, at most ``most``, that cuts ``length`` into the fewest parts of nearly the same size."""
    parts = -(-length // max(1, min(length, most)))
    return -(-length // parts)


def choose_blocks(problem: Problem) -> Blocks:
    """Whole rows if they fit, then as many rows as fit, then as many heads as fit; for problems that are not empty."""
    group = problem.Hq // problem.Hkv
    rows = min(problem.M, -(-MIN_ROWS // group))
    keys = _even(problem.N, BLOCK // (group * rows))
    rows = _even(problem.M, BLOCK // (group * keys))
    # Operands count as well: a block of one query and one key has far larger rows of q, k and v than scores.
    head = group * rows * keys + (group * problem.M + problem.N) * (problem.D + problem.Dv)
    whole = rows == problem.M and keys == problem.N
    budget = BLOCK // head if whole else 1
    heads: list[int] = []
    for length in reversed((*problem.batch, problem.Hkv)):
        heads.insert(0, _even(length, budget))
        budget //= length
    return Blocks(heads=tuple(heads), rows=rows, keys=keys)
