"""Short sequences, many of them: when the fused window kernels take a call, and their launches. Deciding is pure."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import triton

from biasflash.backends.triton import tables, windows
from biasflash.backends.triton.geometry import View
from biasflash.backends.triton.operands import Device, Launch, Operands, Slot
from biasflash.backends.triton.recipe import Recipe, add_chunks
from biasflash.backends.triton.widths import padded
from biasflash.backends.triton.window_rules import MEASURED, RULES, WindowRule
from biasflash.problem import Term

WHOLE = 128  # longest sequence in one tile; beyond, keys are a tile of that many and a tail (``window_long_plan``)
MAX_LENGTH = WHOLE + 64  # longest sequence that is a window
SCRATCH_BYTES = 64 * 2**20  # partial sums of a shared bias's gradient take at most so much float32 scratch
START_COST = 2  # what starting a program costs, in windows
MAX_ROUNDS = 4  # programs may come in at most so many rounds over the GPU


def side(length: int) -> int:
    """What holds an axis: a power of two, at least 16; above 128 that many and a tail."""
    if length > WHOLE:
        return WHOLE + side(length - WHOLE)
    return padded(length)


def rules(device: Device) -> tuple[WindowRule, ...]:
    """What a device's windows take the first match of: measured tiles come with the table that is in force."""
    table = tables.active(device.gpu, device.capability)
    return (*MEASURED, *RULES) if getattr(table, "capability", None) == device.capability else RULES


def choose(ops: Operands, kernel: str) -> WindowRule | None:
    """The first rule of ``kernel`` for this call, its tile no larger than the sequences; None where there is none."""
    p, capability = ops.problem, ops.device.capability
    queries, keys = side(p.M), side(p.N)
    for rule in rules(ops.device):
        if rule.kernel != kernel or rule.itemsize != p.dtype.itemsize or rule.capability not in (None, capability):
            continue
        if queries <= rule.queries and keys <= rule.keys and _serves(rule, ops):
            fitted = _in_memory(ops, _fitted(rule, queries, keys), queries, keys)
            if fitted is not None:
                return fitted
    return None


def _serves(rule: WindowRule, ops: Operands) -> bool:
    """Whether the rule is for such heads and sequences."""
    held = ops.constants["BLOCK_D"], ops.constants["BLOCK_DV"]
    p = ops.problem
    if max(held) > rule.width or (rule.exact and held != (p.D, p.Dv)):
        return False
    is_whole = side(p.M) == p.M and side(p.N) == p.N and not ops.has_unaligned_plane
    return is_whole or not rule.whole


def _in_memory(ops: Operands, rule: WindowRule, queries: int, keys: int) -> WindowRule | None:
    """The rule with as many stages as fit the GPU's shared memory, counted from above; None where one does not.

    There, a window's rows have a place for every stage, planes of terms that may not stay in registers and row
    statistics one less, and weights that change their layout one.
    """
    c, tile, itemsize = ops.constants, rule.tile, rule.itemsize
    rows, columns = (tile.block_n, queries) if rule.kernel == "long dkdv" else (tile.block_m, keys)
    width = c["BLOCK_D"] + c["BLOCK_DV"]
    own = c["BLOCK_D"] if rule.kernel.endswith("forward") else width
    streamed = (rows * own + columns * width) * itemsize
    score = rows * columns * itemsize
    terms = zip(ops.problem.terms, ops.term_views, strict=True)
    planes = [
        rows * columns * term.dtype.itemsize
        for term, view in terms
        if view.is_plane and not (_is_holdable(term, view, rule) and period(view, ops.sizes) == 1)
    ]
    statistics = 0 if rule.kernel.endswith("forward") else 8 * queries
    for stages in range(tile.stages, 0, -1):
        needed = stages * streamed + (stages - 1) * (sum(planes) + statistics) + score
        if needed <= ops.device.shared_memory:
            return replace(rule, tile=replace(tile, stages=stages))
    return None


def _fitted(rule: WindowRule, queries: int, keys: int) -> WindowRule:
    """The rule with its tile cut to the sequence: as many rows for a warp, and as many more programs.

    Backward counts keys too, the rows of dk and dv. Register caps are those of whole tiles.
    """
    tile = rule.tile
    block_m, block_n = min(tile.block_m, queries), min(tile.block_n, keys)
    full, rows = (_rows(rule.kernel, *sides) for sides in ((tile.block_m, tile.block_n), (block_m, block_n)))
    warps = max(1, tile.warps * rows // full)
    registers = tile.registers if (block_m, block_n) == (tile.block_m, tile.block_n) else None
    tile = replace(tile, block_m=block_m, block_n=block_n, warps=warps, registers=registers)
    return replace(rule, tile=tile, programs=rule.programs * rule.tile.warps // warps)


def _rows(kernel: str, block_m: int, block_n: int) -> int:
    return {"backward": max(block_m, block_n), "long dkdv": block_n}.get(kernel, block_m)


def is_window(ops: Operands) -> bool:
    """Whether the kernels take calls of this kind at all."""
    p = ops.problem
    if p.is_empty or max(p.M, p.N) > MAX_LENGTH:
        return False
    return p.Hq == p.Hkv  # a program owns one query head; grouped heads share dk and dv among programs


# ------------------------------------------------------------------------------------------- which program takes what


def period(view: View, sizes: Sequence[int]) -> int | None:
    """After how many windows a term repeats; 1 if all share it, None if it never does (it varies on the first axis)."""
    varies = [i for i, stride in enumerate(view.strides[: len(sizes)]) if stride != 0]
    if not varies:
        return 1
    return math.prod(sizes[varies[0] :]) if varies[0] > 0 else None


def cost(step: int, batch: int, columns: int, slots: int) -> int:
    """Windows that pass one after the other when ``step * columns`` programs run in rounds of ``slots``."""
    rounds, each = triton.cdiv(step * columns, slots), triton.cdiv(batch, step)
    return int(rounds * (each + START_COST))


def best_step(batch: int, columns: int, slots: int, every: int = 1) -> int:
    """Programs per head and query tile (``columns`` of those): the cheapest multiple of ``every`` up to ``batch``."""
    most = batch // every * every
    steps = {min(most, max(every, rounds * slots // (columns * every) * every)) for rounds in range(1, MAX_ROUNDS + 1)}
    step = min(sorted(steps), key=lambda s: cost(s, batch, columns, slots))
    each = triton.cdiv(batch, step)  # windows of the busiest program: no more programs than that takes
    return int(triton.cdiv(triton.cdiv(batch, each), every) * every)


def choose_step(ops: Operands, rule: WindowRule, columns: int, needed: int = 1) -> int:
    """The distance between a program's windows.

    It is a multiple of ``needed``, and of the period of terms that could then be held if that costs at most a tenth
    more windows per program.
    """
    batch, slots = ops.problem.batch_size, ops.device.multiprocessors * rule.programs
    step = best_step(batch, columns, slots, needed)
    terms = zip(ops.problem.terms, ops.term_views, strict=True)
    found = [period(view, ops.sizes) for term, view in terms if _is_holdable(term, view, rule)]
    wished = max((x for x in found if x is not None), default=1)  # periods are nested: the longest holds for all
    if wished > needed and wished <= batch:
        longer = best_step(batch, columns, slots, wished)
        if 10 * cost(longer, batch, columns, slots) <= 11 * cost(step, batch, columns, slots):
            return longer
    return step


def _is_holdable(term: Term, view: View, rule: WindowRule) -> bool:
    return term.kind in rule.hold or (view.is_plane and view.vec <= 1)


def _held(ops: Operands, rule: WindowRule, step: int) -> tuple[bool, ...]:
    """Which terms stay in registers: the same for windows ``step`` apart, and worth it."""
    held = []
    for term, view in zip(ops.problem.terms, ops.term_views, strict=True):
        repeats = period(view, ops.sizes)
        held.append(_is_holdable(term, view, rule) and repeats is not None and step % repeats == 0)
    return tuple(held)


# ----------------------------------------------------------------------------------------------------------- launches


def _end(ops: Operands, held: tuple[bool, ...], short: bool) -> dict[str, Any]:
    """How keys past the end of a short tile are hidden.

    A mask that varies over keys reads 0 there and hides them at no cost. A held bias can carry -inf there; with masks
    or a causal diagonal it may not, since a query that sees nothing may hold NaN, and NaN + -inf is NaN. Else positions
    are compared, one comparison and one select a score.
    """
    terms, causal = ops.constants["TERMS"], ops.constants["IS_CAUSAL"]
    if causal:
        return {"FOLD": -1, "COMPARE": True}
    if not short or any(is_keep and has_n for _, _, has_n, _, is_keep in terms):
        return {"FOLD": -1, "COMPARE": False}
    folds = [i for i, (_, _, has_n, _, _) in enumerate(terms) if held[i] and has_n]
    if folds and not ops.constants["HAS_KEEP"]:
        return {"FOLD": folds[0], "COMPARE": False}
    return {"FOLD": -1, "COMPARE": True}


def _same(ops: Operands, names: Mapping[str, str]) -> tuple[int, ...]:
    """For each tensor of rows the position of the first one with its strides."""
    views = [ops.views[slot] for name, slot in names.items() if name != "dbias"]
    return tuple(next(i for i, v in enumerate(views) if (v.vec, v.codes) == (x.vec, x.codes)) for x in views)


def window_launch(
    ops: Operands,
    kernel: Any,
    rule: WindowRule,
    step: int,
    columns: int,
    names: Mapping[str, str],
    tail: int = 0,
    **own: Any,
) -> Launch:
    """One launch; ``names`` maps the kernel's names of tensors to slots (and views) of the call.

    ``tail``: keys in a second tile.
    """
    p, tile = ops.problem, rule.tile
    held = _held(ops, rule, step)
    short = tile.block_n + tail > p.N
    given: dict[str, Any] = {**ops.numbers, **ops.constants, **_end(ops, held, short)}
    given |= {"BLOCK_M": tile.block_m, "BLOCK_N": tile.block_n, "TAIL": tail, "STAGES": tile.stages}
    given |= {"SHORT_M": tile.block_m > p.M, "SHORT_N": short, "step": step, "HELD": held}
    given |= {"lse_ptr": Slot("lse"), "low_ptr": Slot("low")}
    given |= {"SQUARE": p.M == p.N, "SAME": _same(ops, names)}
    for name, slot in names.items():
        view = ops.views[slot]
        given |= {f"{name}_ptr": Slot(slot), f"{name}_strides": view.codes, f"{name.upper()}_VEC": view.vec}
    given |= own
    return Launch(
        kernel=kernel,
        grid=step * columns,
        arguments={name: given[name] for name in kernel.arg_names},
        warps=tile.warps,
        stages=tile.stages,
        registers=tile.registers,
        tile=tile,
        why=rule.why,
    )


def forward_launch(ops: Operands) -> Launch | None:
    """The forward pass of windows, or None where the general kernel takes the call.

    Slots: q, k, v, out, lse, low, and every term.
    """
    rule = choose(ops, "forward") if is_window(ops) else None
    if rule is None:
        return None
    columns = ops.problem.Hq * triton.cdiv(ops.problem.M, rule.tile.block_m)
    step = choose_step(ops, rule, columns)
    names = {name: name for name in ("q", "k", "v", "out")}
    return window_launch(ops, windows.window_forward_kernel, rule, step, columns, names)


@dataclass(frozen=True, kw_only=True)
class Gradient:
    """Where the gradient of the one trained bias goes: stored window by window, or summed up in partial sums."""

    index: int
    stored: bool
    period: int = 1  # windows that have their own sums
    owns_head: bool = True


def bias_gradient(ops: Operands, i: int) -> Gradient | None:
    """None for a size-1 query or key axis, and where the shared batch axes are not the leading ones."""
    p, view = ops.problem, ops.views[f"grad{i}"]
    if p.terms[i].shape[-2:] != (p.M, p.N):
        return None  # sums over rows or columns: the general dkdv and dq kernels have them
    if p.terms[i].shape[:-2] == (*p.batch, p.Hq):
        return Gradient(index=i, stored=True)
    batch = view.strides[: len(ops.sizes)]
    owned = [i for i, stride in enumerate(batch) if stride != 0]
    if owned != list(range(len(batch) - len(owned), len(batch))):
        return None  # partial sums of one bias element would not lie a constant distance apart
    repeats = period(view, ops.sizes)
    if repeats is None:
        return None  # owned by every window, shared by heads: nothing to sum up inside a program
    return Gradient(index=i, stored=False, period=repeats, owns_head=p.Hq == 1 or view.strides[len(batch)] != 0)


def sum_up(ops: Operands, gradient: Gradient, count: int) -> Launch:
    """Adds ``count`` partial sums of a shared bias's gradient up."""
    p = ops.problem
    total = gradient.period * (p.Hq if gradient.owns_head else 1) * p.M * p.N
    return add_chunks(gradient.index, total, count // total, block=256, warps=2)


def backward_recipe(ops: Operands, has_dlse: bool, wanted: Collection[str], grads: Sequence[int]) -> Recipe | None:
    """The backward pass of windows, or None where the general kernels take the call.

    Args:
        ops: with views of q, k, v, dout, the wanted of dq, dk, dv, and ``grad{i}`` of every i in ``grads``.
        has_dlse: whether a gradient of lse comes in.
        wanted: names among dq, dk, dv.
        grads: terms whose gradient is asked for.
    """
    p = ops.problem
    rule = choose(ops, "backward") if is_window(ops) else None
    if rule is None or len(grads) > 1:  # several sums of score gradients do not fit the registers
        return None
    gradient = bias_gradient(ops, grads[0]) if grads else None
    if grads and gradient is None:
        return None
    sums = gradient is not None and not gradient.stored
    needed = gradient.period if gradient is not None else 1
    if not sums and rule.tile.warps <= 4:
        rule = replace(rule, programs=2 * rule.programs)  # 106 to 124 registers without sums: twice as many fit
    step = choose_step(ops, rule, p.Hq, needed)
    count = step * p.Hq * p.M * p.N
    if sums and 4 * count > SCRATCH_BYTES:
        return None
    names = {name: name for name in ("q", "k", "v", "dout")}
    names |= {name: name if name in wanted else "dout" for name in ("dq", "dk", "dv")}  # pointers that are never used
    names["dbias"] = f"grad{gradient.index}" if gradient is not None else "dout"
    own: dict[str, Any] = {f"WANT_{name.upper()}": name in wanted for name in ("dq", "dk", "dv")}
    own |= {
        "STORE_DS": gradient is not None and gradient.stored,
        "SUM_DS": sums,
        "OWNS_HEAD": gradient is None or gradient.owns_head,
        "period": needed,
        "dlse_ptr": Slot("dlse" if has_dlse else "lse"),
        "HAS_DLSE": has_dlse,
        "PAIR": ops.constants["USE_LOW"],  # weights of rows as low as finfo.min need both halves of lse
    }
    if not sums or gradient is None:
        return Recipe(launches=(window_launch(ops, windows.window_backward_kernel, rule, step, p.Hq, names, **own),))
    partial = f"partial{gradient.index}"
    own["dbias_ptr"] = Slot(partial)
    launch = window_launch(ops, windows.window_backward_kernel, rule, step, p.Hq, names, **own)
    return Recipe(
        launches=(launch, sum_up(ops, gradient, count)),
        scratch=((partial, count),),
        chunked=(gradient.index,),
    )
