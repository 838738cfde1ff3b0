"""Which Hopper kernels a forward pass runs; the portable recipe where they do not serve."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import triton

from biasflash.backends.hopper import config, config_float32, forward, forward_shared, objections
from biasflash.backends.hopper.aligned import aligned_bias
from biasflash.backends.hopper.config_kinds import ForwardTile, SharedTile
from biasflash.backends.hopper.key_mask import key_mask, mask_arguments
from biasflash.backends.hopper.odd_bias import bulk_bias, no_odd_arguments, odd_arguments, odd_bias
from biasflash.backends.hopper.operands import (
    DescriptorLaunch,
    arguments_of,
    boxed,
    common_arguments,
    has_float32_bias,
    items_share_bias,
    no_tile,
    record,
)
from biasflash.backends.triton import forward_plan as portable
from biasflash.backends.triton.operands import Device, Launch, Layout, Operands, Slot
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
        found = found or [no_tile(ops)]
        return portable.forward_recipe(problem, device, rows, terms), found
    split = portable.choose_split(problem, ops.tile("forward")[0], device.multiprocessors, portable.RULE)
    if split is not None:
        return portable.forward_recipe(problem, device, rows, terms), [split.why]
    launches: list[Launch] = [_launch(ops, tile)]
    scratch: dict[str, int] = {}
    for prepared in (key_mask(ops), aligned_bias(ops)):
        if prepared is not None:
            launches[:0] = prepared.launches()
            scratch |= prepared.scratch()
    if isinstance(tile, SharedTile) and tile.fixed:
        flags = 2 * triton.cdiv(problem.M, tile.block_m)
        launches.append(portable.redo(ops, flags))
        scratch["redo"] = problem.batch_size * problem.Hq * flags
    return Recipe(launches=tuple(launches), scratch=tuple(scratch.items())), []


def _tile(ops: Operands) -> ForwardTile | SharedTile | None:
    p = ops.problem
    tables = config_float32 if has_float32_bias(ops) else config
    if p.Dv == p.D and odd_bias(ops) is None:
        # causal tiles of 128 keys have no registers left for what hides keys
        in_long_tiles = p.causal_shift is not None and key_mask(ops) is None
        shared = config.shared_tile(p.D, p.dtype == torch.bfloat16, in_long_tiles, tables.SHARED)
        if shared is not None and items_share_bias(ops, shared.rows):
            return shared
    return config.forward_tile(p.D, p.Dv, ops.has_dense, p.causal_shift is not None, tables.FORWARD)


def _launch(ops: Operands, tile: ForwardTile | SharedTile) -> DescriptorLaunch:
    p = ops.problem
    pieces, out_pieces = (1, 1) if isinstance(tile, SharedTile) else (tile.pieces, tile.out_pieces)
    wide, wide_v = 64 if pieces > 1 else config.padded(p.D), config.padded(p.Dv)
    wide_out = wide_v // out_pieces
    boxes = {
        "q": boxed(ops, "q", 64, wide),
        "k": boxed(ops, "k", tile.block_n, wide),
        "v": boxed(ops, "v", tile.block_n, wide_v),
        "out": boxed(ops, "out", 64, wide_out),
    }
    boxes["bias"] = bulk_bias(ops, 64, tile.block_n, boxes["k"])
    mask = key_mask(ops)
    at_once = tile.rows if isinstance(tile, SharedTile) else 1
    items = triton.cdiv(p.M, tile.block_m) * (p.batch_size // at_once) * p.Hq
    groups = 2 if isinstance(tile, SharedTile) else tile.warpgroups
    given: dict[str, Any] = {
        **common_arguments(ops, groups),
        **mask_arguments(mask),
        **no_odd_arguments(boxes["k"].box),
        **arguments_of(boxes),
        "caps_desc": mask.caps(tile.block_n) if mask else boxes["k"].box,
        "lse_ptr": Slot("lse"),
        "low_ptr": Slot("low" if p.keeps_low else "lse"),
        "items": items,
        "BLOCK_N": tile.block_n,
        "KV_STAGES": tile.kv_stages,
        "BIAS_STAGES": tile.bias_stages,
        "KEEP_LOW": p.keeps_low,
        "LOW_RANGE": ops.constants["LOW_RANGE"],
        "IN_TURNS": tile.in_turns and mask is None,  # beside what hides keys exponentials come out from under products
    }
    if isinstance(tile, SharedTile):
        kernel = forward_shared.shared_forward_kernel
        given |= {"ROWS": tile.rows, "Q_BUFFERS": tile.q_buffers, "AHEAD": tile.ahead}
        given |= {"FIXED": tile.fixed, "flag_ptr": Slot("redo" if tile.fixed else "lse")}
    else:
        kernel = forward.forward_kernel
        given |= {"WARPGROUPS": groups, "ODD_N": p.N % tile.block_n != 0, "PIECES": pieces}
        given |= {"D_BLOCK": wide, "DV_BLOCK": wide_v, "PINNED": tile.pinned or mask is not None}
        given |= {"OUT_APART": tile.out_apart or wide_out != wide}
    return record(ops, kernel, given | odd_arguments(ops, "forward"), tile)
