"""Which Hopper kernels a forward pass runs; the portable recipe where they do not serve."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import triton

from biasflash.backends.hopper import config, forward, forward_shared, objections
from biasflash.backends.hopper.operands import DescriptorLaunch, batch_of, boxed
from biasflash.backends.triton import forward_plan as portable
from biasflash.backends.triton.operands import Device, Layout, Operands, Slot
from biasflash.backends.triton.recipe import Recipe
from biasflash.problem import Problem


def forward_recipe(
    problem: Problem, device: Device, rows: Mapping[str, Layout], terms: Sequence[Layout]
) -> tuple[Recipe, list[str]]:
    """One kernel, and where rows keep a reference the portable one for those that outgrew it.

    Also the objections, if there are any: the recipe is then the portable one.
    """
    ops = Operands(problem, device, rows, terms)
    found = objections.to_layout(ops)
    tile = None if found else _tile(ops)
    if tile is None:
        found = found or ["no tile for these widths"]
        return portable.forward_recipe(problem, device, rows, terms), found
    split = portable.choose_split(problem, ops.tile("forward")[0], device.multiprocessors, portable.RULE)
    if split is not None:
        return portable.forward_recipe(problem, device, rows, terms), [split.why]
    launch = _launch(ops, tile)
    if not (isinstance(tile, config.SharedTile) and tile.fixed):
        return Recipe(launches=(launch,)), []
    flags = 2 * triton.cdiv(problem.M, tile.block_m)
    scratch = (("redo", problem.batch_size * problem.Hq * flags),)
    return Recipe(launches=(launch, portable.redo(ops, flags)), scratch=scratch), []


def _tile(ops: Operands) -> config.ForwardTile | config.SharedTile | None:
    p = ops.problem
    width = max(p.D, p.Dv)
    if ops.has_dense and p.Dv == p.D:
        shared = config.shared_tile(width, p.dtype == torch.bfloat16, p.causal_shift is not None)
        view = ops.term_views[0]
        alone = len(ops.sizes) == 1 and not any(view.strides[:-3])  # one batch axis, which the bias does not have
        if shared is not None and alone and p.batch_size % shared.rows == 0 and p.Hq == p.Hkv:
            return shared
    return config.forward_tile(width, ops.has_dense, p.causal_shift is not None)


def _launch(ops: Operands, tile: config.ForwardTile | config.SharedTile) -> DescriptorLaunch:
    p = ops.problem
    wide, wide_v = config.padded(p.D), config.padded(p.Dv)
    boxes = {
        "q": boxed(ops, "q", 64, wide),
        "k": boxed(ops, "k", tile.block_n, wide),
        "v": boxed(ops, "v", tile.block_n, wide_v),
        "out": boxed(ops, "out", 64, wide_v),
    }
    boxes["bias"] = boxed(ops, "bias0", 64, tile.block_n) if ops.has_dense else boxes["k"]
    at_once = tile.rows if isinstance(tile, config.SharedTile) else 1
    items = triton.cdiv(p.M, tile.block_m) * (p.batch_size // at_once) * p.Hq
    given: dict[str, Any] = {
        **{f"{name}_desc": b.box for name, b in boxes.items()},
        **{f"{name}_moves": b.moves for name, b in boxes.items()},
        "lse_ptr": Slot("lse"),
        "low_ptr": Slot("low" if p.keeps_low else "lse"),
        "inner": batch_of(ops)[1],
        "items": items,
        **{name: ops.numbers[name] for name in ("M", "N", "heads", "group", "batch", "shift", "scale")},
        "D_BLOCK": wide,
        "DV_BLOCK": wide_v,
        "BLOCK_N": tile.block_n,
        "KV_STAGES": tile.kv_stages,
        "BIAS_STAGES": tile.bias_stages,
        "IS_CAUSAL": p.causal_shift is not None,
        "KEEP_LOW": p.keeps_low,
        "LOW_RANGE": ops.constants["LOW_RANGE"],
        "ORDER": ops.order,
    }
    if isinstance(tile, config.SharedTile):
        kernel = forward_shared.shared_forward_kernel
        groups = 2
        given |= {"ROWS": tile.rows, "TILES": 1, "Q_BUFFERS": tile.q_buffers, "AHEAD": tile.ahead}
        given |= {"FIXED": tile.fixed, "flag_ptr": Slot("redo" if tile.fixed else "lse")}
    else:
        kernel = forward.forward_kernel
        groups = tile.warpgroups
        given |= {"WARPGROUPS": groups, "HAS_BIAS": ops.has_dense, "ODD_N": p.N % tile.block_n != 0}
        given |= {"OUT_APART": tile.out_apart or wide != wide_v, "PINNED": tile.pinned}
    given |= {
        "CONSUMER_REGISTERS": config.CONSUMER_REGISTERS[groups],
        "PRODUCER_REGISTERS": config.PRODUCER_REGISTERS[groups],
    }
    return DescriptorLaunch(
        kernel=kernel,
        grid=min(items, ops.device.multiprocessors),  # persistent: each takes items in strides
        arguments={name: given[name] for name in kernel.arg_names},
        warps=4,
        stages=1,
        what=str(tile),
        why=tile.why,
    )
