"""Operands in block order, and the one place where scores are made."""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from biasflash.backends.cpu.blocks import choose_blocks, compute_dtype
from biasflash.problem import Problem

HIDDEN = float("-inf")
Index = tuple[slice, ...]


def spans(length: int, extent: int) -> list[slice]:
    return [slice(start, min(start + extent, length)) for start in range(0, length, extent)]


def part(t: Tensor, index: Index) -> Tensor:
    """A block of a tensor whose axes of size 1 stand for every position."""
    return t[tuple(slice(None) if size == 1 else span for size, span in zip(t.shape, index, strict=True))]


@contextlib.contextmanager
def own_precision() -> Iterator[None]:
    """Inside an autocast region torch would take the products of float32 blocks in 16 bits."""
    if torch.is_autocast_enabled("cpu"):
        with torch.autocast("cpu", enabled=False):
            yield
    else:
        yield


class Call:
    """Views of one call's operands in block order, and the one place where scores are made."""

    def __init__(self, problem: Problem, q: Tensor, k: Tensor, v: Tensor, terms: Sequence[Tensor]) -> None:
        self.problem = problem
        self.blocks = choose_blocks(problem)
        self.dtype = compute_dtype(problem)
        self.q = self.grouped(q.transpose(-3, -2), -3)  # *B Hkv G M D
        self.k, self.v = k.transpose(-3, -2), v.transpose(-3, -2)  # *B Hkv N D, *B Hkv N Dv
        split = [self.grouped(t, -3) for t in terms]  # #*B #Hkv #G #M #N
        kinds = [t.kind for t in problem.terms]
        self.terms = split
        self.biases = [t for t, kind in zip(split, kinds, strict=True) if kind == "dense"]
        self.masks = [t for t, kind in zip(split, kinds, strict=True) if kind == "keep"]
        # Masks that hide a key from every query: the key's rows of k and v may hold anything, NaN included.
        self.key_masks = [t[..., :1, :] for t in self.masks if t.shape[-2] == 1 or t.stride(-2) == 0]
        # The sum of several finite biases can pass the end of float32, and so can one of float64.
        self.may_overflow = len(self.biases) > 1 or any(b.dtype.itemsize > self.dtype.itemsize for b in self.biases)
        group = problem.Hq // problem.Hkv
        # Where such a mask differs between the heads of a group, each head needs its own cleared keys.
        alone = any(t.shape[-3] > 1 and t.stride(-3) != 0 for t in self.key_masks)
        self.groups = spans(group, 1 if alone else group)
        self.row_spans = spans(problem.M, self.blocks.rows)

    def grouped(self, t: Tensor, axis: int) -> Tensor:
        """``Hq`` split into ``Hkv G``; an axis of size 1 into ``1 1``."""
        heads = self.problem.Hkv if t.shape[axis] == self.problem.Hq else 1
        axis += t.dim()
        return t.view(*t.shape[:axis], heads, t.shape[axis] // heads, *t.shape[axis + 1 :])

    def head_spans(self) -> Iterator[Index]:
        lengths = (*self.problem.batch, self.problem.Hkv)
        return itertools.product(*(spans(n, e) for n, e in zip(lengths, self.blocks.heads, strict=True)))

    def key_spans(self, rows: slice) -> list[slice]:
        """Key blocks that some query of ``rows`` may see under the causal mask."""
        shift = self.problem.causal_shift
        seen = self.problem.N if shift is None else min(self.problem.N, rows.stop + shift)
        return spans(max(seen, 0), self.blocks.keys)

    def flat(self, t: Tensor, index: Index) -> Tensor:
        """A block of ``*B Hkv G M width``, or of ``*B Hkv G M``, as ``P (G M) width`` in the compute dtype."""
        block = t[index].to(self.dtype)
        if t.dim() == len(index):
            block = block.unsqueeze(-1)
        pairs = math.prod(block.shape[:-3])
        return block.reshape(pairs, block.shape[-3] * block.shape[-2], block.shape[-1])

    def keys(self, heads: Index, group: slice) -> tuple[Tensor, Tensor]:
        """``k: P N D`` and ``v: P N Dv`` of some heads, in the compute dtype, cleared where no query may look."""
        hidden = [~part(t, (*heads, group, slice(None), slice(None)))[..., 0, 0, :] for t in self.key_masks]
        found = []
        for t in (self.k, self.v):
            block = t[heads].to(self.dtype)  # *B Hkv N width
            for h in hidden:
                block = block.masked_fill(h.unsqueeze(-1), 0.0)
            found.append(block.reshape(-1, *block.shape[-2:]))
        return found[0], found[1]

    def scores(self, q: Tensor, k: Tensor, index: Index) -> Tensor:
        """Scores ``P (G M) N`` at ``index = (*B, Hkv, G, M, N)``, from flat blocks of q and all keys of the heads."""
        rows, keys = index[-2:]
        k = k[:, keys]
        s = q.new_empty((q.shape[0], q.shape[1], k.shape[1]))
        s.baddbmm_(q, k.transpose(1, 2), beta=0, alpha=self.problem.scale)
        view = self.unflat(s, index)
        biases = [part(t, index) for t in self.biases]
        for bias in biases:
            view.add_(bias.to(self.dtype) if bias.dtype.itemsize < self.dtype.itemsize else bias)
        least = float(view.amin()) if biases else 0.0
        if math.isnan(least) or (self.may_overflow and least == HIDDEN):
            if self.may_overflow:
                view.clamp_(min=torch.finfo(self.dtype).min)  # a finite bias, however low, never hides a key
            for bias in biases:
                view.masked_fill_(bias == HIDDEN, HIDDEN)  # NaN + -inf is NaN
        for mask in self.masks:
            view.masked_fill_(~part(mask, index), HIDDEN)
        shift = self.problem.causal_shift
        if shift is not None and keys.stop - 1 > rows.start + shift:
            last = torch.arange(rows.start, rows.stop)[:, None] + shift
            view.masked_fill_(torch.arange(keys.start, keys.stop) > last, HIDDEN)
        return s

    def unflat(self, s: Tensor, index: Index) -> Tensor:
        """``P (G M) last`` seen as ``*B Hkv G M last`` for an index that starts with the first four of these."""
        extents = [span.stop - span.start for span in index[: len(self.problem.batch) + 3]]
        return s.view(*extents, s.shape[-1])
