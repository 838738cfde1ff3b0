"""Why the Hopper kernels do not take a problem, or a call of it, in words."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import torch

from biasflash.backends.hopper.aligned import aligned_bias, may_copy
from biasflash.backends.hopper.odd_bias import has_room, odd_bias
from biasflash.backends.hopper.operands import unit_of
from biasflash.backends.triton.operands import Operands
from biasflash.problem import Problem, short

#: below this many queries or keys the portable path's small tiles and fused windows win
LEAST_QUERIES = 128
LEAST_KEYS = 192
#: tiles of 128 queries below which most of an H200's 132 multiprocessors would idle; portable tiles have 64
LEAST_TILES = 80


@dataclass(frozen=True, kw_only=True)
class ShortRule:
    """Keys below which calls without a bias are left to the portable kernels, whose tiles fill and turn over faster.

    Forward and backward are chosen together; figures are those of one H200, milliseconds portable / these kernels.
    """

    keys: int
    max_width: int  # of D and Dv
    is_causal: bool
    has_mask: bool
    trains_only: bool = False  # for calls with a backward pass
    why: str


SHORT: tuple[ShortRule, ...] = (
    ShortRule(
        keys=1536,
        max_width=64,
        is_causal=False,
        has_mask=False,
        why="D 64, 1,025 keys: 0.813 / 0.881 forward, 2.02 / 2.27 backward; 193 keys: 0.339 / 0.582, 0.821 / 1.13",
    ),
    ShortRule(
        keys=384,
        max_width=64,
        is_causal=False,
        has_mask=True,
        why="D 64, padding, 256 keys: 0.176 / 0.272 forward, 0.380 / 0.402 backward",
    ),
    ShortRule(
        keys=4096,
        max_width=32,
        is_causal=True,
        has_mask=False,
        why="D 32, 1,024 keys: 0.176 / 0.222 forward, 0.448 / 0.532 backward; 2,048 keys: 0.293 / 0.325, 0.754 / 0.789",
    ),
    ShortRule(
        keys=1536,
        max_width=64,
        is_causal=True,
        has_mask=False,
        trains_only=True,
        why="D 64, 1,024 keys: 0.240 / 0.222 forward, 0.601 / 0.668 backward",
    ),
)


def short_rule(problem: Problem) -> ShortRule | None:
    """The rule by which a call is short, if there is one."""
    p = problem
    if any(t.kind != "keep" for t in p.terms):
        return None
    facts = p.causal_shift is not None, bool(p.terms)
    for rule in SHORT:
        fits = facts == (rule.is_causal, rule.has_mask) and max(p.D, p.Dv) <= rule.max_width
        if fits and rule.keys > p.N and (any(p.trainable) or not rule.trains_only):
            return rule
    return None


def to_size(problem: Problem) -> list[str]:
    """Where the portable kernels are faster."""
    p = problem
    found = []
    short_of = short_rule(p)
    if short_of is not None:
        kind = f"{'a mask' if short_of.has_mask else 'no bias'}{', causal' if short_of.is_causal else ''}"
        of = f"width {max(p.D, p.Dv)}, {kind}"
        found.append(f"{p.N} keys of {of}; below {short_of.keys} the portable kernels are faster")
    if p.M < LEAST_QUERIES or p.N < LEAST_KEYS:
        least = f"{LEAST_QUERIES} x {LEAST_KEYS}"
        found.append(f"{p.M} queries x {p.N} keys; below {least} the portable kernels are faster")
    tiles = -(-p.M // 128) * p.batch_size * p.Hq
    if tiles < LEAST_TILES:
        found.append(f"{tiles} tiles of 128 queries; below {LEAST_TILES} the portable kernels are faster")
    return found


def to_problem(problem: Problem) -> list[str]:
    """Objections that shapes and dtypes raise."""
    p = problem
    found = []
    if p.is_empty:
        found.append("an axis of length 0")
    if p.dtype.itemsize != 2:
        found.append(f"dtype {short(p.dtype)}; its kernels take float16 and bfloat16")
    masks = [t for t in p.terms if t.kind == "keep"]
    if len(masks) > 1:
        found.append(f"{len(masks)} boolean masks; its kernels take one")
    for t in masks:
        if t.shape[-1] != p.N or any(n != 1 for n in t.shape[-3:-1]):
            found.append(f"a boolean mask of shape {t.shape}; its kernels take one that varies along batch and keys")
    dense = [t for t in p.terms if t.kind == "dense"]
    if len(dense) > 1:
        found.append(f"{len(dense)} biases; its kernels take one")
    for t in dense:
        if t.shape[-2:] != (p.M, p.N):
            found.append(f"a bias of shape {t.shape}; its kernels take one that varies along queries and keys")
        if t.dtype not in (p.dtype, torch.float32):
            beside = f"a {short(t.dtype)} bias beside {short(p.dtype)} queries"
            found.append(f"{beside}; its kernels take one of the same dtype or float32")
        unit = unit_of(t.dtype)
        if p.N % unit and not may_copy(p, t) and not has_room(p, t):
            why = "too large to copy, or shared by too few, and there is no room to put its rows in order"
            found.append(f"{p.N} keys; bulk copies of this bias need a multiple of {unit}, and it is {why}")
    if not dense and p.scale <= 0:
        found.append(f"scale {p.scale} without a bias; its kernels take positive ones")
    return found


def _dtype_of(name: str, problem: Problem) -> torch.dtype:
    """Of a tensor by its name: gradients of biases have their bias's, all others the queries'."""
    return problem.terms[int(name[4:])].dtype if name.startswith(("bias", "grad")) else problem.dtype


def to_layout(ops: Operands, by_pointer: Collection[str] = ()) -> list[str]:
    """Objections that strides and addresses raise: bulk copies move whole 16 bytes.

    Masks, biases that have an aligned copy and the tensors named in ``by_pointer`` are read or written some other way.
    """
    p = ops.problem
    others = {f"bias{i}" for i, t in enumerate(p.terms) if t.kind == "keep"} | set(by_pointer)
    if aligned_bias(ops) is not None or odd_bias(ops) is not None:
        others.add("bias0")
    copied = {name: view for name, view in ops.views.items() if name not in others}
    found = [
        f"{name} of strides {view.strides} or its address is not in steps of 16 bytes"
        for name, view in copied.items()
        if view.vec != unit_of(_dtype_of(name, p))
    ]
    for name, view in copied.items():
        rows = p.N if name in ("k", "v", "dk", "dv") else p.M
        if (rows > 1 and view.strides[-2] == 0) or view.strides[-1] == 0:  # descriptors have no stride of 0
            found.append(f"{name} of strides {view.strides} is expanded along rows or columns")
    if len(ops.sizes) > 2:
        found.append(f"batch axes {ops.sizes} do not merge into two")
    return found
