"""When masks are turned into lists of tiles, which masks, and the launches that write the lists."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import triton

from biasflash.backends.triton import geometry, tiles
from biasflash.backends.triton.config import TileConfig
from biasflash.backends.triton.operands import Launch, Operands, Slot
from biasflash.problem import Problem


@dataclass(frozen=True, kw_only=True)
class ListRule:
    """When it pays to look at a mask before the attention kernels do.

    Nobody knows beforehand whether tiles are empty or full, so the worst case must be cheap: counting reads every byte
    of the mask once, about 0.25 ps each from memory, where a score costs 0.65 ps in each kernel that reads the mask.
    """

    readers: int = 4  # heads and batch items that share a byte, times kernels: at worst a tenth of their time is added
    scores: int = 2**27  # about 90 us of one kernel: two more launches cost 6 to 10 us
    least_tiles: int = 8  # along either axis, or next to no tile can be skipped


RULE = ListRule()

#: mask bytes that one program of ``count_kernel`` takes (128 a thread), and tiles that ``list_kernel`` sorts at a time
COUNTED, CHUNK = 16384, 128


def listed_masks(ops: Operands, rule: ListRule) -> tuple[int, ...]:
    """Indices of the masks whose conjunction is worth lists: the largest by rule, and those that broadcast like it."""
    p = ops.problem
    heads = p.batch_size * p.Hq
    passes = 3 if any(p.trainable) or any(t.trainable for t in p.terms) else 1  # forward, dkdv, dq
    if heads * p.M * p.N < rule.scores:
        return ()
    found: dict[tuple[bool, ...], list[int]] = {}
    for i, (term, view) in enumerate(zip(p.terms, ops.term_views, strict=True)):
        *outer, row, column = view.strides
        if term.kind == "keep" and row != 0 and column != 0:
            found.setdefault(tuple(stride != 0 for stride in outer), []).append(i)
    worth = [owns for owns in found if heads * passes >= rule.readers * _planes(ops, owns)]
    return tuple(found[max(worth, key=lambda owns: _planes(ops, owns))]) if worth else ()


def _planes(ops: Operands, owns: Sequence[bool]) -> int:
    axes = (*ops.sizes, ops.problem.Hq)
    return math.prod(size for size, own in zip(axes, owns, strict=True) if own)


def trivial_arguments(ops: Operands) -> dict[str, Any]:
    """What an attention kernel takes where it has no lists."""
    terms = ops.constants["TERMS"]
    return {
        "lists_ptr": Slot("lse"),
        "plane_strides": (),
        "LISTS": False,
        "UNLISTED": (True,) * len(terms),
        "FULL_TERMS": terms,
    }


@dataclass(frozen=True)
class TileLists:
    """Lists of one pass, for kernels with the tiles ``by_query`` and ``by_key`` (name -> tile)."""

    ops: Operands
    masks: tuple[int, ...]
    by_query: dict[str, TileConfig]
    by_key: dict[str, TileConfig]

    @cached_property
    def granule(self) -> tuple[int, int]:
        """The largest tile that divides those of all kernels (all are powers of two)."""
        kernels = [*self.by_query.values(), *self.by_key.values()]
        return min(t.block_m for t in kernels), min(t.block_n for t in kernels)

    @cached_property
    def owns(self) -> tuple[bool, ...]:
        """Which of the axes ``(*batch, heads)`` the masks vary along."""
        return tuple(stride != 0 for stride in self.ops.term_views[self.masks[0]].strides[:-2])

    @cached_property
    def planes(self) -> int:
        return _planes(self.ops, self.owns)

    def _shape(self, tile: TileConfig) -> tuple[int, int]:
        p = self.ops.problem
        return triton.cdiv(p.M, tile.block_m), triton.cdiv(p.N, tile.block_n)

    @property
    def _granules(self) -> tuple[int, int]:
        p, (m, n) = self.ops.problem, self.granule
        return triton.cdiv(p.M, m), triton.cdiv(p.N, n)

    def scratch(self) -> dict[str, int]:
        """Elements of 4 bytes by name; a kernel reads one entry more than it walks along."""
        down, across = self._granules
        found = {"pair_counts": self.planes * down * across}
        for name, tile in self.by_query.items():
            own, other = self._shape(tile)
            found[f"{name}_lists"] = self.planes * own * (2 * other + 2) + 1
        for name, tile in self.by_key.items():
            other, own = self._shape(tile)
            found[f"{name}_lists"] = self.planes * own * (2 * other + 2) + 1
        return found

    def launches(self) -> tuple[Launch, ...]:
        """Counting, then the lists of every kernel."""
        lists = [self._list(name, tile, 0) for name, tile in self.by_query.items()]
        return (self._count(), *lists, *(self._list(name, tile, 1) for name, tile in self.by_key.items()))

    def arguments(self, name: str) -> dict[str, Any]:
        """What the attention kernel ``name`` takes so as to walk along its lists."""
        terms = self.ops.constants["TERMS"]
        sizes = (*self.ops.sizes, self.ops.problem.Hq)
        strides = geometry.contiguous_strides([size if own else 1 for size, own in zip(sizes, self.owns, strict=True)])
        unlisted = tuple(i not in self.masks for i in range(len(terms)))
        return {
            "lists_ptr": Slot(f"{name}_lists"),
            "plane_strides": tuple(map(geometry.code, (*strides, 0, 0))),
            "LISTS": True,
            "UNLISTED": unlisted,
            "FULL_TERMS": tuple(term for term, free in zip(terms, unlisted, strict=True) if free),
        }

    def why(self) -> str:
        named = "masks" if len(self.masks) > 1 else "mask"
        return f"along lists of {named} tiles that hold anything, read by {self._readers} heads"

    @property
    def _readers(self) -> int:
        return self.ops.problem.batch_size * self.ops.problem.Hq // self.planes

    def _count(self) -> Launch:
        p: Problem = self.ops.problem
        (m, n), (down, across) = self.granule, self._granules
        abreast = max(1, COUNTED // (m * n))
        views = [self.ops.term_views[i] for i in self.masks]
        given = {**self.ops.numbers, **self.ops.constants}
        given |= {"counts_ptr": Slot("pair_counts"), "OWNS": self.owns}
        given |= {"mask_ptrs": tuple(Slot(f"bias{i}") for i in self.masks)}
        given |= {"mask_strides": tuple(view.codes for view in views)}
        given |= {"MASKS": tuple(self.ops.constants["TERMS"][i] for i in self.masks)}
        given |= {"GRANULE_M": m, "GRANULE_N": n, "ABREAST": abreast}
        return Launch(
            kernel=tiles.count_kernel,
            grid=self.planes * down * triton.cdiv(across, abreast),
            arguments={name: given[name] for name in tiles.count_kernel.arg_names},
            warps=4,
            stages=1,
            tile=TileConfig(block_m=m, block_n=n * abreast, warps=4, stages=1),
            why=f"every mask byte once, {p.batch_size * p.Hq // self.planes} heads read it",
        )

    def _list(self, name: str, tile: TileConfig, axis: int) -> Launch:
        """``axis``: 0 for one list a query tile, 1 for one a key tile."""
        granules, shape = self._granules, self._shape(tile)
        steps = (granules[1], 1)
        factors = tile.block_m // self.granule[0], tile.block_n // self.granule[1]
        return Launch(
            kernel=tiles.list_kernel,
            grid=self.planes * shape[axis],
            arguments={
                "counts_ptr": Slot("pair_counts"),
                "lists_ptr": Slot(f"{name}_lists"),
                "own_granules": granules[axis],
                "other_granules": granules[1 - axis],
                "own_step": steps[axis],
                "other_step": steps[1 - axis],
                "own_tiles": shape[axis],
                "other_tiles": shape[1 - axis],
                "OWN": factors[axis],
                "OTHER": factors[1 - axis],
                "PAIRS": tile.block_m * tile.block_n,
                "CHUNK": CHUNK,
            },
            warps=4,
            stages=1,
        )


def choose_lists(
    ops: Operands, by_query: dict[str, TileConfig], by_key: dict[str, TileConfig], rule: ListRule
) -> TileLists | None:
    """The lists of a pass whose kernels take these tiles, or None where the masks are not worth them."""
    masks = listed_masks(ops, rule)
    found = TileLists(ops, masks, by_query, by_key)
    if not masks or min(min(found._shape(t)) for t in (*by_query.values(), *by_key.values())) < rule.least_tiles:
        return None
    return found
