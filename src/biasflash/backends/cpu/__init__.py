"""Exact attention on the CPU: blockwise over heads, queries and keys, in torch's own multi-threaded operations.

A block of scores is laid out as ``*B Hkv G M N`` (``G`` the query heads of one key head), so that every term is
sliced as it is and broadcasts by itself; for the products the leading axes fold into one and ``G`` into the queries:

    s  = scale * q k^T + biases, hidden keys selected to -inf         ``P (G M) N``, P the (batch, key head) pairs
    p  = exp(s - lse)                                                 lse an exact pair of floats
    ds = p * (dout v^T - delta + dlse),  delta = rowsum(p * dout v^T)

No array larger than one block grows with ``M x N``, except the gradient of a term that itself has that shape.
"""

from __future__ import annotations

import math

from biasflash.backends.backend import Promises
from biasflash.backends.cpu.backward import backward
from biasflash.backends.cpu.blocks import BLOCK, choose_blocks, compute_dtype
from biasflash.backends.cpu.forward import forward
from biasflash.problem import DTYPES, MAX_WIDTH, Problem, short

__all__ = ["PROMISES", "backward", "describe", "forward", "objections"]

PROMISES = Promises(
    devices="cpu",
    dtypes=DTYPES,
    max_width=MAX_WIDTH,
    deterministic=True,
    memory="O(M + N)",
    summary="blockwise on torch's own CPU operations; fit for training small models",
)


def objections(problem: Problem) -> tuple[str, ...]:
    found = []
    if problem.device.type != "cpu":
        found.append(f"tensors are on {problem.device}; it computes on device cpu only")
    if problem.dtype not in DTYPES:
        found.append(f"dtype is {short(problem.dtype)}; it computes {', '.join(short(d) for d in DTYPES)}")
    unknown = sorted({t.kind for t in problem.terms} - {"dense", "keep"})
    if unknown:
        found.append(f"terms of kind {', '.join(unknown)}; it knows dense biases and keep masks")
    return tuple(found)


def reservations(problem: Problem) -> tuple[str, ...]:
    return ()


def describe(problem: Problem) -> tuple[str, ...]:
    if problem.is_empty:
        return ("nothing to compute: an axis has length zero",)
    blocks = choose_blocks(problem)
    group = problem.Hq // problem.Hkv
    size = math.prod(blocks.heads) * group * blocks.rows * blocks.keys
    pairs = f"{math.prod(blocks.heads)} of {problem.batch_size * problem.Hkv} (batch, key head) pairs"
    compute = compute_dtype(problem)
    mib = size * compute.itemsize / 2**20
    delta = "whole rows, so delta costs no pass of its own"
    if blocks.keys < problem.N:
        delta = "rows in parts, so backward sums delta in a pass of its own"
    return (
        f"blocks of {pairs} x {group} x {blocks.rows} queries x {blocks.keys} keys: {mib:.2f} MiB of {short(compute)} "
        f"scores, near {BLOCK * compute.itemsize / 2**20:.0f} MiB at most; {delta}",
    )
