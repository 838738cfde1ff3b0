"""Which kernels a backward pass runs, in which order, over which buffers."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import triton

from biasflash.backends.triton import (
    backward,
    backward_bias,
    backward_rows,
    geometry,
    tile_plan,
    window_long_plan,
    window_plan,
)
from biasflash.backends.triton.operands import Device, Launch, Layout, Operands, Slot
from biasflash.backends.triton.recipe import Recipe, Sum, add_chunks
from biasflash.problem import Problem

#: a shared bias gradient is split into so much float32 scratch at most, all that is held beside lse and delta included
SCRATCH_BYTES = 64 * 2**20


@dataclass(frozen=True, kw_only=True)
class Share:
    """Who adds up the gradient of a shared bias: ``owners`` of a plane each, ``shared`` pairs of (batch item, head) in
    ``chunks`` of ``chunk``; ``count`` elements, ``view`` of their sums. ``owns``: axes that the bias varies along."""

    owns: tuple[bool, ...]
    owners: int
    shared: int
    chunk: int
    chunks: int
    count: int
    view: geometry.View


class BackwardPlan:
    """The backward pass. Which structure a bias gradient takes follows from its shape:

    * full shape: the dkdv kernel stores every score gradient into it, and dq is read back from it;
    * one query row for all: sums inside dkdv, float32 of length N a head, added up after;
    * one key column for all: no kernel, since score gradients of a row sum to the gradient of its log-sum-exp;
    * shared by batch items or heads: an owner kernel loops over them.

    ``rows`` holds q, k, v, out, dout and those of dq, dk, dv that are wanted; ``grads`` the wanted term gradients by
    index.
    """

    #: whether dq, where it runs, also writes delta and the flags of extreme rows
    DQ_COMPUTES_DELTA = True

    def __init__(
        self,
        problem: Problem,
        device: Device,
        rows: Mapping[str, Layout],
        terms: Sequence[Layout],
        grads: Mapping[int, Layout],
        has_dlse: bool,
    ) -> None:
        self.problem, self.has_dlse, self.grads = problem, has_dlse, tuple(grads)
        self.want = {name: name in rows for name in ("dq", "dk", "dv")}
        self.by_structure: dict[str, list[int]] = {"stored": [], "owned": [], "rows": [], "columns": []}
        for i in grads:
            self.by_structure[self._structure(i)].append(i)
        # score gradients are stored once, in the widest of the dtypes that want them
        self.by_structure["stored"].sort(key=lambda i: -problem.terms[i].dtype.itemsize)
        self.stored, self.owned = self.by_structure["stored"], self.by_structure["owned"]
        unwanted = {name: rows["out"] for name, want in self.want.items() if not want}  # pointers passed, never used
        self.ops = Operands(problem, device, {**rows, **unwanted}, terms, {f"grad{i}": x for i, x in grads.items()})
        self.heads = problem.batch_size * problem.Hq
        self.chunked: list[int] = []
        self.zeroed: dict[str, int] = {}
        self.reads_ds = (
            self.want["dq"]
            and bool(self.stored)
            and problem.terms[self.stored[0]].dtype in (problem.dtype, torch.float32)
            and not self.ops.hides_keys  # a key nobody sees may hold NaN, and 0 x NaN is NaN
        )
        self.tail = self.ops.tile("dkdv")[0].block_m  # see tile.softmax.store_row_statistics
        statistics = self.heads * (triton.cdiv(problem.M, self.tail) + 1) * self.tail
        self.scratch = {"delta": statistics, "reference": statistics}
        self.runs_dq = self.want["dq"] and not self.reads_ds
        self.rare_block = self.ops.tile("dq" if self.runs_dq and self.DQ_COMPUTES_DELTA else "delta")[0].block_m
        self.rare_tiles = triton.cdiv(problem.M, self.rare_block)
        self.rare = self.ops.constants["USE_LOW"] and problem.dtype != torch.float32
        if self.rare:
            self.scratch["rare"] = self.heads * self.rare_tiles

        self.runs_dkdv = self.want["dk"] or self.want["dv"] or bool(self.stored) or bool(self.by_structure["columns"])
        # score gradients are stored tile by tile, zeros too: no tile may be skipped
        self.lists = None if self.stored else self._lists()

    def _lists(self) -> tile_plan.TileLists | None:
        by_query = {"dq": self.ops.tile("dq")[0]} if self.runs_dq else {}
        by_key = {"dkdv": self.ops.tile("dkdv")[0]} if self.runs_dkdv else {}
        found = tile_plan.choose_lists(self.ops, by_query, by_key, tile_plan.RULE) if by_query or by_key else None
        if found is not None:
            self.scratch |= found.scratch()
        return found

    def _walk(self, kernel: str) -> dict[str, Any]:
        return self.lists.arguments(kernel) if self.lists else tile_plan.trivial_arguments(self.ops)

    def _listed(self, launch: Launch) -> Launch:
        return launch if self.lists is None else replace(launch, why=f"{launch.why}; {self.lists.why()}")

    def _structure(self, i: int) -> str:
        p = self.problem
        *batch, heads, rows, columns = p.terms[i].shape
        if rows == p.M and columns == p.N:
            return "stored" if (*batch, heads) == (*p.batch, p.Hq) else "owned"
        return "columns" if columns == p.N else "rows"

    def recipe(self) -> Recipe:
        p = self.problem
        windows = self._windows()
        if windows is not None:
            return windows
        if self.by_structure["columns"]:
            self.scratch["columns_sums"] = self.heads * p.N
        launches = tuple(self._launches())
        sums = []
        for i in self.by_structure["columns"]:
            sums.append(Sum(scratch="columns_sums", shape=(*p.batch, p.Hq, 1, p.N), grad=i))
        copies = tuple((self.stored[0], i) for i in self.stored[1:])
        return Recipe(
            launches=launches,
            scratch=tuple(self.scratch.items()),
            zeroed=tuple(self.zeroed.items()),
            sums=tuple(sums),
            rows=tuple(self.by_structure["rows"]),
            copies=copies,
            chunked=tuple(self.chunked),
        )

    def _windows(self) -> Recipe | None:
        wanted = [name for name, want in self.want.items() if want]
        asked = self.ops, self.has_dlse, wanted, self.grads
        return window_plan.backward_recipe(*asked) or window_long_plan.backward_recipe(*asked)

    def _launches(self) -> Iterator[Launch]:
        if self.lists is not None:
            yield from self.lists.launches()
        if self.runs_dq:
            yield self._listed(self._dq())
        else:
            yield self._delta()
        if self.runs_dkdv:
            yield self._listed(self._dkdv())
        if self.reads_ds:
            yield self._dq_from_ds()
        for i in self.owned:
            yield from self._dbias(i)

    def _statistics(self) -> dict[str, Any]:
        return {
            "lse_ptr": Slot("lse"),
            "low_ptr": Slot("low"),
            "reference_ptr": Slot("reference"),
            "delta_ptr": Slot("delta"),
            "dlse_ptr": Slot("dlse" if self.has_dlse else "lse"),
            "TAIL": self.tail,
            "PAIR": self.problem.dtype == torch.float32,
            "RARE": self.rare,  # rows as low as finfo.min need both halves of lse: a second pass
            "RARE_BLOCK": self.rare_block,
            "rare_ptr": Slot("rare" if self.rare else "delta"),
            "rare_tiles": self.rare_tiles,
            "HAS_DLSE": self.has_dlse,
        }

    def _ds(self) -> dict[str, Any]:
        """Where score gradients are stored: the gradient of the first bias of full shape (dq's pointer if none)."""
        name = f"grad{self.stored[0]}" if self.stored else "dq"
        view = self.ops.views[name]
        return {"ds_ptr": Slot(name), "ds_strides": view.codes, "DS_VEC": view.vec}

    def _delta(self) -> Launch:
        return self.ops.launch(
            backward_rows.delta_kernel,
            "delta",
            ("out", "dout"),
            lambda tile: triton.cdiv(self.problem.M, tile.block_m) * self.heads,
            **self._statistics(),
        )

    def _dq_from_ds(self) -> Launch:
        return self.ops.launch(
            backward_rows.dq_from_ds_kernel,
            "dq_from_ds",
            ("k", "dq"),
            lambda tile: triton.cdiv(self.problem.M, tile.block_m) * self.heads,
            **self._ds(),
        )

    def _dq(self, **redo: Any) -> Launch:
        return self.ops.launch(
            backward.dq_kernel,
            "dq",
            ("q", "k", "v", "dout", "out", "dq"),
            lambda tile: triton.cdiv(self.problem.M, tile.block_m) * self.heads,
            **self._walk("dq"),
            **self._statistics(),
            **redo,
        )

    def _dkdv(self, **redo: Any) -> Launch:
        p = self.problem
        sums = bool(self.by_structure["columns"])
        return self.ops.launch(
            backward.dkdv_kernel,
            "dkdv",
            ("q", "k", "v", "dout", "dk", "dv"),
            lambda tile: triton.cdiv(p.N, tile.block_n) * p.batch_size * p.Hkv,
            column_ptr=Slot("columns_sums" if sums else "delta"),
            WANT_DK=self.want["dk"],
            WANT_DV=self.want["dv"],
            STORE_DS=bool(self.stored),
            SUM_COLUMNS=sums,
            **self._walk("dkdv"),
            **self._ds(),
            **self._statistics(),
            **redo,
        )

    def _dbias(self, i: int) -> Iterator[Launch]:
        """The owner kernel of one shared bias, in fixed chunks if its tiles are too few to fill the GPU."""
        tile, _ = self.ops.tile("dbias")
        part = self._share(i, tile.block_m, tile.block_n, self._fill)
        yield self._owner(i, part)
        yield from self._total(i, part)

    def _fill(self, programs: int, shared: int, most: int) -> int:
        """Chunks that make four programs on each multiprocessor."""
        return min(most, -(-4 * self.ops.device.multiprocessors // programs))

    def _owned(self, i: int) -> tuple[tuple[bool, ...], list[int]]:
        """Which axes ``(*batch, heads)`` bias ``i`` varies along, and their sizes, 1 for the others."""
        owns = tuple(stride != 0 for stride in self.ops.views[f"grad{i}"].strides[:-2])
        axes = (*self.ops.sizes, self.problem.Hq)
        return owns, [size if own else 1 for size, own in zip(axes, owns, strict=True)]

    def _held(self, but: str) -> int:
        """Bytes beside lse and delta that are known so far, ``but`` one."""
        p = self.problem
        others = sum(count for name, count in self.scratch.items() if name not in ("delta", but))
        return 4 * int(others + (self.heads * p.M if p.keeps_low else 0))

    def _share(self, i: int, block_m: int, block_n: int, wanted: Callable[[int, int, int], int]) -> Share:
        """How the pairs of (batch item, head) that share bias ``i`` are cut into chunks: ``wanted(programs without
        chunks, pairs, the most chunks)``; at most as many as there are pairs and as sums of chunks fit the scratch."""
        p = self.problem
        owns, sizes = self._owned(i)
        owners = math.prod(sizes)
        shared, count = self.heads // owners, owners * p.M * p.N
        tiles = triton.cdiv(p.M, block_m) * triton.cdiv(p.N, block_n)
        most = max(1, min(shared, (SCRATCH_BYTES - self._held(f"partial{i}")) // (4 * count)))
        chunk = triton.cdiv(shared, wanted(tiles * owners, shared, most))
        chunks = triton.cdiv(shared, chunk)
        if chunks > 1:
            self.scratch[f"partial{i}"] = chunks * count
        view = geometry.view(geometry.contiguous_strides([*sizes, p.M, p.N]), 4, p.N, p.N % 8 == 0)
        return Share(owns=owns, owners=owners, shared=shared, chunk=chunk, chunks=chunks, count=count, view=view)

    def _owner(self, i: int, part: Share, **redo: Any) -> Launch:
        p, grad = self.problem, self.ops.views[f"grad{i}"]
        return self.ops.launch(
            backward_bias.dbias_kernel,
            "dbias",
            ("q", "k", "v", "dout"),
            lambda tile: triton.cdiv(p.M, tile.block_m) * triton.cdiv(p.N, tile.block_n) * part.owners * part.chunks,
            dbias_ptr=Slot(f"grad{i}"),
            dbias_strides=grad.codes,
            DBIAS_VEC=grad.vec,
            partial_ptr=Slot(f"partial{i}" if part.chunks > 1 else "delta"),
            partial_strides=part.view.codes,
            PARTIAL_VEC=part.view.vec,
            chunk_stride=(geometry.code(part.count // max(part.view.vec, 1)),),
            owners=part.owners,
            shared=part.shared,
            chunk=part.chunk,
            OWNS=part.owns,
            FIXED=self._fixed(part.owns),
            **self._statistics(),
            **redo,
        )

    def _total(self, i: int, part: Share) -> Iterator[Launch]:
        if part.chunks > 1:
            self.chunked.append(i)
            yield add_chunks(i, part.count, part.chunks, block=1024, warps=4)

    def _fixed(self, owns: tuple[bool, ...]) -> tuple[bool, ...]:
        """Which terms are the same for all (batch item, head) pairs that share one tile of the bias gradient."""
        return tuple(
            not any(stride for stride, own in zip(view.strides[:-2], owns, strict=True) if not own)
            for view in self.ops.term_views
        )


def backward_recipe(
    problem: Problem,
    device: Device,
    rows: Mapping[str, Layout],
    terms: Sequence[Layout],
    grads: Mapping[int, Layout],
    has_dlse: bool,
) -> Recipe:
    """The recipe of a ``BackwardPlan``."""
    return BackwardPlan(problem, device, rows, terms, grads, has_dlse).recipe()
