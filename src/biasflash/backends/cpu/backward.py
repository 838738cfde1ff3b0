"""Backward pass: weights made again from lse, then every gradient of a block while it is there."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from biasflash.backends.backend import Gradients
from biasflash.backends.cpu.scores import HIDDEN, Call, Index, own_precision, part
from biasflash.problem import Problem


def backward(
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
    buffers = (gradients.q, gradients.k, gradients.v, *gradients.terms)
    if problem.is_empty:
        for buffer in buffers:
            if buffer is not None:
                buffer.zero_()
        return
    with own_precision():
        call = Call(problem, q, k, v, terms)
        sinks = _Sinks(call, gradients)
        dout = call.grouped(dout.transpose(-3, -2), -3)
        needed = call.grouped(out.transpose(-3, -2), -3) if sinks.wants_ds else None
        lse, lse_low = call.grouped(lse, -2), call.grouped(lse_low, -2)
        dlse = None if dlse is None else call.grouped(dlse, -2)
        for heads in call.head_spans():
            sinks.open(heads)
            for group in call.groups:
                keys, values = call.keys(heads, group)
                for rows in call.row_spans:
                    index = (*heads, group, rows)
                    block = _Rows.load(call, index, dout, needed, dlse, lse, lse_low)
                    found = _score_gradients(call, block, keys, values, index)
                    sinks.take_rows(block, keys, index, found)
            sinks.close(heads)
        sinks.finish()


@dataclass(frozen=True, kw_only=True)
class _Rows:
    """What backward knows about a block of queries; rows that see nothing are cleared, whatever was stored there.

    ``exp(s - lse - lse_low)`` is kept as ``exp(s - lse) * factor``: the factor is applied to rows (``dout``, delta)
    instead of to scores.
    """

    q: Tensor  # P (G M) D
    dout: Tensor  # P (G M) Dv, times factor
    anchor: Tensor  # P (G M) 1, lse, or 0 in rows that see nothing
    factor: Tensor  # P (G M) 1, exp(-lse_low)
    near: Tensor | None  # P (G M) 1, delta of the rounded out, times factor; None: no score gradient is wanted
    dlse: Tensor | None  # P (G M) 1

    @staticmethod
    def load(
        call: Call, index: Index, dout: Tensor, out: Tensor | None, dlse: Tensor | None, lse: Tensor, low: Tensor
    ) -> _Rows:
        """``out``: None where no score gradient is wanted."""
        q, grad, anchor = call.flat(call.q, index), call.flat(dout, index), call.flat(lse, index)
        slope = None if dlse is None else call.flat(dlse, index)
        factor = torch.exp(-call.flat(low, index))
        empty = anchor == HIDDEN
        if bool(empty.any()):
            q, grad, anchor = (t.masked_fill(empty, 0.0) for t in (q, grad, anchor))
            slope = None if slope is None else slope.masked_fill(empty, 0.0)
        grad = grad * factor
        near = None
        if out is not None:
            near = (grad * call.flat(out, index)).sum(-1, keepdim=True)
            # Any value serves; up to half a step of the largest number (1e31) it takes no finite product past the end.
            info = torch.finfo(near.dtype)
            near = torch.where(near.abs() <= info.max * info.eps / 4, near, 0.0)
        return _Rows(q=q, dout=grad, anchor=anchor, factor=factor, near=near, dlse=slope)


def _score_gradients(
    call: Call, rows: _Rows, keys: Tensor, values: Tensor, index: Index
) -> Iterator[tuple[slice, Tensor, Tensor | None]]:
    """``(keys, exp(s - lse), ds or None)`` for every key block that the rows may see.

    delta is summed from the very weights it is subtracted from, not from the rounded ``out``: the sum of ds over a
    row is then zero to float32 rounding in every dtype. Rows in several parts take a pass of their own for it.
    Products of dout and values start from minus ``near``: what is left is of the size of their differences, and
    so is its rounding. (q, k and v of 1000 throughout: dk, which is 0, comes out as 3e-9; without, as 0.02.)
    """

    def weights(span: slice) -> Tensor:
        return call.scores(rows.q, keys, (*index, span)).sub_(rows.anchor).exp_()

    def weighted(near: Tensor, p: Tensor, span: slice) -> Tensor:
        return torch.baddbmm(near, rows.dout, values[:, span].transpose(1, 2), beta=-1).mul_(p)

    spans = call.key_spans(index[-1])
    delta: Tensor | None = None
    if rows.near is not None and len(spans) > 1:
        delta = torch.zeros_like(rows.anchor)
        for span in spans:
            delta.add_(weighted(rows.near, weights(span), span).sum(-1, keepdim=True))
    for span in spans:
        p = weights(span)
        if rows.near is None:
            yield span, p, None
            continue
        ds = weighted(rows.near, p, span)
        shared = ds.sum(-1, keepdim=True) if delta is None else delta
        shared = (shared if rows.dlse is None else shared - rows.dlse) * rows.factor
        ds.addcmul_(p, shared, value=-1)
        if not bool(shared.isfinite().all()):
            ds.masked_fill_(p == 0.0, 0.0)  # 0 x inf and 0 x NaN: a pair of weight zero has no gradient
        yield span, p, ds


@dataclass(frozen=True, kw_only=True)
class _TermSink:
    """Where one term's gradient is added up: in its own shape, at least in the compute dtype."""

    buffer: Tensor  # #*B #Hkv #G #M #N
    acc: Tensor  # the buffer itself, if nothing is rounded by adding there
    once: bool  # the term is broadcast along no axis, so every element is met at most once

    @staticmethod
    def of(call: Call, buffer: Tensor) -> _TermSink:
        p = call.problem
        once = buffer.numel() == p.batch_size * p.Hq * p.M * p.N
        buffer = call.grouped(buffer, -3)
        if once or buffer.dtype in (call.dtype, torch.float64):
            return _TermSink(buffer=buffer, acc=buffer.zero_(), once=once)
        return _TermSink(buffer=buffer, acc=torch.zeros(buffer.shape, dtype=call.dtype), once=once)

    def add(self, ds: Tensor, index: Index) -> None:
        target = part(self.acc, index)
        if self.once:
            target.copy_(ds)
        else:
            target.add_(ds.sum_to_size(target.shape))


class _Sinks:
    """Gradient accumulators: of the terms for the whole call, of k and v for some heads, of q for some rows."""

    def __init__(self, call: Call, gradients: Gradients) -> None:
        self.call = call
        dq, dk, dv = gradients.q, gradients.k, gradients.v
        self.dq = None if dq is None else call.grouped(dq.transpose(-3, -2), -3)
        self.dk = None if dk is None else dk.transpose(-3, -2)
        self.dv = None if dv is None else dv.transpose(-3, -2)
        self.terms = [_TermSink.of(call, b) for b in gradients.terms if b is not None]
        self.wants_ds = self.dq is not None or self.dk is not None or bool(self.terms)
        self.acc_dk: Tensor | None = None
        self.acc_dv: Tensor | None = None

    def _zeros(self, buffer: Tensor | None, heads: Index) -> Tensor | None:
        if buffer is None:
            return None
        shape = buffer[heads].shape
        return torch.zeros((math.prod(shape[:-2]), *shape[-2:]), dtype=self.call.dtype)

    def open(self, heads: Index) -> None:
        self.acc_dk, self.acc_dv = self._zeros(self.dk, heads), self._zeros(self.dv, heads)

    def take_rows(
        self, rows: _Rows, keys: Tensor, index: Index, found: Iterator[tuple[slice, Tensor, Tensor | None]]
    ) -> None:
        scale = self.call.problem.scale
        acc_dq = None if self.dq is None else torch.zeros_like(rows.q)
        for span, p, ds in found:
            if self.acc_dv is not None:
                self.acc_dv[:, span].baddbmm_(p.transpose(1, 2), rows.dout)
            if ds is None:
                continue
            if self.acc_dk is not None:
                self.acc_dk[:, span].baddbmm_(ds.transpose(1, 2), rows.q, alpha=scale)
            if acc_dq is not None:
                acc_dq.baddbmm_(ds, keys[:, span], alpha=scale)
            for term in self.terms:
                term.add(self.call.unflat(ds, index), (*index, span))
        if acc_dq is not None and self.dq is not None:
            self.dq[index].copy_(self.call.unflat(acc_dq, index))

    def close(self, heads: Index) -> None:
        for buffer, acc in ((self.dk, self.acc_dk), (self.dv, self.acc_dv)):
            if buffer is not None and acc is not None:
                target = buffer[heads]
                target.copy_(acc.view(target.shape))

    def finish(self) -> None:
        for term in self.terms:
            if term.acc is not term.buffer:
                term.buffer.copy_(term.acc)
