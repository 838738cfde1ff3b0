"""Grids, buffers and the order of kernels of the portable path; the only file here that launches.

A pass is first written down as ``Launch`` records, which tests also compile for other GPUs, then run.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
from torch import Tensor

from biasflash.backends.backend import Gradients
from biasflash.backends.triton import backward, backward_bias, forward, geometry
from biasflash.backends.triton.operands import Device, Launch, Operands, device_facts
from biasflash.problem import Problem

#: a shared bias gradient is split into at most this much float32 scratch
SCRATCH_BYTES = 64 * 2**20


def forward_launches(
    problem: Problem,
    device: Device,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    terms: Sequence[Tensor],
    out: Tensor,
    lse: Tensor,
    lse_low: Tensor,
) -> list[Launch]:
    """The forward pass: one kernel."""
    ops = Operands(problem, device, {"q": q, "k": k, "v": v, "out": out}, _narrowed(terms))
    heads = problem.batch_size * problem.Hq
    return [
        ops.launch(
            forward.forward_kernel,
            "forward",
            ("q", "k", "v", "out"),
            lambda tile: triton.cdiv(problem.M, tile.block_m) * heads,
            lse_ptr=lse,
            low_ptr=lse_low,
        )
    ]


def _narrowed(terms: Sequence[Tensor]) -> list[Tensor]:
    """Terms with stride-0 axes cut to size 1: an expanded mask is the mask it was expanded from."""
    cut = []
    for t in terms:
        for axis, (size, stride) in enumerate(zip(t.shape, t.stride(), strict=True)):
            if size > 1 and stride == 0:
                t = t.narrow(axis, 0, 1)
        cut.append(t)
    return cut


@dataclass(frozen=True, kw_only=True)
class Statistics:
    """Row statistics of the forward pass, ``*B Hq M``, and the incoming gradient of the log-sum-exp."""

    lse: Tensor
    low: Tensor
    dlse: Tensor | None


class BackwardPass:
    """The backward pass written down. Which structure a bias gradient takes follows from its shape:

    * full shape: the dkdv kernel stores every score gradient into it, and dq is read back from it;
    * one query row (or one key column) for all: sums inside dkdv (dq), float32 of length N (M) a head, added up after;
    * shared by batch items or heads: an owner kernel loops over them.
    """

    def __init__(
        self,
        problem: Problem,
        device: Device,
        gradients: Gradients,
        dout: Tensor,
        statistics: Statistics,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        terms: Sequence[Tensor],
        out: Tensor,
    ) -> None:
        self.problem, self.gradients, self.statistics = problem, gradients, statistics
        tensors = {"q": q, "k": k, "v": v, "out": out, "dout": dout}
        for name, buffer in (("dq", gradients.q), ("dk", gradients.k), ("dv", gradients.v)):
            tensors[name] = out if buffer is None else buffer  # an unwanted gradient's pointer is passed but not used
        self.rows: list[int] = []
        self.columns: list[int] = []
        self.owned: list[int] = []
        self.stored: list[int] = []
        for i, buffer in enumerate(gradients.terms):
            if buffer is not None:
                self._structure(buffer).append(i)
                tensors[f"grad{i}"] = buffer
        self.ops = Operands(problem, device, tensors, _narrowed(terms))
        self.heads = problem.batch_size * problem.Hq
        self.copies: list[tuple[Tensor, Tensor]] = []
        stored_dtype = None if not self.stored else gradients.terms[self.stored[0]].dtype  # type: ignore[union-attr]
        self.reads_ds = (
            gradients.q is not None
            and stored_dtype in (problem.dtype, torch.float32)
            and not self.ops.hides_keys  # a key nobody sees may hold NaN, and 0 x NaN is NaN
        )
        self.runs_dq = (gradients.q is not None and not self.reads_ds) or bool(self.rows)
        self.tail = self.ops.tile("dkdv")[0].block_m  # see tile.softmax.store_row_statistics
        self.delta = self._scratch(self.heads * (problem.M + self.tail))
        self.reference = torch.empty_like(self.delta)
        self.row_sums = self._scratch(self.heads * problem.M) if self.rows else self.delta
        self.column_sums = self._scratch(self.heads * problem.N) if self.columns else self.delta

    def _scratch(self, count: int) -> Tensor:
        return torch.empty(count, dtype=torch.float32, device=self.problem.device)

    def _structure(self, buffer: Tensor) -> list[int]:
        p = self.problem
        *batch, heads, rows, columns = buffer.shape
        if rows == p.M and columns == p.N:
            return self.stored if (*batch, heads) == (*p.batch, p.Hq) else self.owned
        return self.columns if columns == p.N else self.rows

    def launches(self) -> Iterator[Launch]:
        """All launches in order."""
        g, p = self.gradients, self.problem
        if self.runs_dq:
            yield self._dq()
        else:
            yield self._delta()
        if g.k is not None or g.v is not None or self.stored or self.columns:
            yield self._dkdv()
        if self.reads_ds:
            yield self.ops.launch(
                backward.dq_from_ds_kernel,
                "dq_from_ds",
                ("k", "dq"),
                lambda tile: triton.cdiv(p.M, tile.block_m) * self.heads,
                **self._ds(),
            )
        for i in self.owned:
            yield from self._dbias(i)

    def finish(self) -> None:
        """What is left after the launches: sums of row and column sums over heads and batch, and copies."""
        p = self.problem
        for group, sums, shape in ((self.rows, self.row_sums, (p.M, 1)), (self.columns, self.column_sums, (1, p.N))):
            for i in group:
                buffer = self.gradients.terms[i]
                assert buffer is not None
                buffer.copy_(sums.view(*p.batch, p.Hq, *shape).sum_to_size(buffer.shape))
        for i in self.stored[1:]:
            first, other = self.gradients.terms[self.stored[0]], self.gradients.terms[i]
            assert first is not None and other is not None
            other.copy_(first)
        for buffer, total in self.copies:
            buffer.copy_(total)

    def _statistics(self) -> dict[str, Any]:
        s = self.statistics
        return {
            "lse_ptr": s.lse,
            "low_ptr": s.low,
            "reference_ptr": self.reference,
            "delta_ptr": self.delta,
            "TAIL": self.tail,
            "dlse_ptr": s.lse if s.dlse is None else s.dlse,
            "HAS_DLSE": s.dlse is not None,
        }

    def _ds(self) -> dict[str, Any]:
        """Where score gradients are stored: the gradient of the first bias of full shape (of dq's pointer if none)."""
        name = f"grad{self.stored[0]}" if self.stored else "dq"
        view = self.ops.views[name]
        return {"ds_ptr": self.ops.tensors[name], "ds_strides": view.codes, "DS_VEC": view.vec}

    def _delta(self) -> Launch:
        p = self.problem
        return self.ops.launch(
            backward.delta_kernel,
            "delta",
            ("out", "dout"),
            lambda tile: triton.cdiv(p.M, tile.block_m) * self.heads,
            **self._statistics(),
        )

    def _dq(self) -> Launch:
        return self.ops.launch(
            backward.dq_kernel,
            "dq",
            ("q", "k", "v", "dout", "out", "dq"),
            lambda tile: triton.cdiv(self.problem.M, tile.block_m) * self.heads,
            row_sum_ptr=self.row_sums,
            WANT_DQ=self.gradients.q is not None and not self.reads_ds,
            SUM_ROWS=bool(self.rows),
            **self._statistics(),
        )

    def _dkdv(self) -> Launch:
        p, g = self.problem, self.gradients
        return self.ops.launch(
            backward.dkdv_kernel,
            "dkdv",
            ("q", "k", "v", "dout", "dk", "dv"),
            lambda tile: triton.cdiv(p.N, tile.block_n) * p.batch_size * p.Hkv,
            column_ptr=self.column_sums,
            WANT_DK=g.k is not None,
            WANT_DV=g.v is not None,
            STORE_DS=bool(self.stored),
            SUM_COLUMNS=bool(self.columns),
            **self._ds(),
            **self._statistics(),
        )

    def _dbias(self, i: int) -> Iterator[Launch]:
        """The owner kernel of one shared bias, in fixed chunks if there are fewer tiles than programs that fit the GPU."""
        p, name = self.problem, f"grad{i}"
        buffer = self.ops.tensors[name]
        view = self.ops.views[name]
        axes = (*self.ops.sizes, p.Hq)
        owns = tuple(stride != 0 for stride in view.strides[:-2])
        owners = buffer.numel() // (p.M * p.N)
        shared = self.heads // owners
        tile, _ = self.ops.tile("dbias")
        tiles = triton.cdiv(p.M, tile.block_m) * triton.cdiv(p.N, tile.block_n)
        wanted = triton.cdiv(4 * self.ops.device.multiprocessors, tiles * owners)
        chunks = max(1, min(shared, wanted, SCRATCH_BYTES // (4 * buffer.numel())))
        chunk = triton.cdiv(shared, chunks)
        chunks = triton.cdiv(shared, chunk)
        sums = buffer
        if chunks > 1:
            sums = self._scratch(chunks * buffer.numel())
            sizes = [size if own else 1 for size, own in zip(axes, owns, strict=True)]
            strides = geometry.contiguous_strides([*sizes, p.M, p.N])
            view = geometry.view(strides, 4, p.N, aligned=buffer.numel() % 4 == 0)
        yield self.ops.launch(
            backward_bias.dbias_kernel,
            "dbias",
            ("q", "k", "v", "dout"),
            lambda tile: tiles * owners * chunks,
            dbias_ptr=sums,
            dbias_strides=view.codes,
            DBIAS_VEC=view.vec,
            chunk_stride=(geometry.code(buffer.numel() // max(view.vec, 1)),),
            owners=owners,
            shared=shared,
            chunk=chunk,
            OWNS=owns,
            FIXED=self._fixed(owns),
            **self._statistics(),
        )
        if chunks > 1:
            yield self._add_chunks(sums, buffer, chunks)

    def _fixed(self, owns: tuple[bool, ...]) -> tuple[bool, ...]:
        """Which terms are the same for all (batch item, head) pairs that share one tile of the bias gradient."""
        return tuple(
            not any(stride for stride, own in zip(view.strides[:-2], owns, strict=True) if not own)
            for view in self.ops.term_views
        )

    def _add_chunks(self, sums: Tensor, buffer: Tensor, chunks: int) -> Launch:
        total = buffer
        if not buffer.is_contiguous():
            total = torch.empty(buffer.shape, dtype=buffer.dtype, device=buffer.device)
            self.copies.append((buffer, total))
        return Launch(
            kernel=backward_bias.add_chunks_kernel,
            grid=triton.cdiv(buffer.numel(), 1024),
            arguments={
                "partial_ptr": sums,
                "total_ptr": total,
                "count": buffer.numel(),
                "chunks": chunks,
                "BLOCK": 1024,
            },
            warps=4,
            stages=1,
        )


def run_forward(
    problem: Problem, device: Device, q: Tensor, k: Tensor, v: Tensor, terms: Sequence[Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    """``out``, ``lse`` and ``lse_low`` as the backend contract wants them."""
    p = problem
    out = torch.empty((*p.batch, p.M, p.Hq, p.Dv), dtype=p.dtype, device=p.device)
    lse = torch.empty((*p.batch, p.Hq, p.M), dtype=torch.float32, device=p.device)
    low = torch.zeros_like(lse) if p.keeps_low else lse.new_empty(0)
    for launch in forward_launches(problem, device, q, k, v, terms, out, lse, low):
        launch.run()
    return out, lse, low


def run_backward(
    problem: Problem,
    device: Device,
    gradients: Gradients,
    dout: Tensor,
    statistics: Statistics,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    terms: Sequence[Tensor],
    out: Tensor,
) -> None:
    """Fills ``gradients``."""
    if problem.is_empty:
        for buffer in (gradients.q, gradients.k, gradients.v, *gradients.terms):
            if buffer is not None:
                buffer.zero_()
        return
    work = BackwardPass(problem, device, gradients, dout, statistics, q, k, v, terms, out)
    for launch in work.launches():
        launch.run()
    work.finish()


def describe(problem: Problem) -> tuple[str, ...]:
    """One line a kernel, for a contiguous call of this problem."""
    p = problem

    def like(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return torch.empty(tuple(shape), dtype=dtype, device="meta")

    q, out = like((*p.batch, p.M, p.Hq, p.D), p.dtype), like((*p.batch, p.M, p.Hq, p.Dv), p.dtype)
    k, v = like((*p.batch, p.N, p.Hkv, p.D), p.dtype), like((*p.batch, p.N, p.Hkv, p.Dv), p.dtype)
    terms = [like(t.shape, t.dtype) for t in p.terms]
    lse = like((*p.batch, p.Hq, p.M), torch.float32)
    meta = replace(p, device=torch.device("meta"))
    facts = device_facts(p.device)
    lines = ["forward:"] + [f"  {x}" for x in forward_launches(meta, facts, q, k, v, terms, out, lse, lse)]
    wanted = [t if want else None for t, want in zip((q, k, v), p.trainable, strict=True)]
    dterms = tuple(t if term.trainable else None for t, term in zip(terms, p.terms, strict=True))
    if any(b is not None for b in (*wanted, *dterms)) and not p.is_empty:
        gradients = Gradients(q=wanted[0], k=wanted[1], v=wanted[2], terms=dterms)
        statistics = Statistics(lse=lse, low=lse, dlse=None)
        work = BackwardPass(meta, facts, gradients, out, statistics, q, k, v, terms, out)
        lines += ["backward:"] + [f"  {x}" for x in work.launches()]
    return tuple(lines)
