"""Which Hopper kernels a backward pass runs, among the portable ones that are as fast; see ``BackwardPlan``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import triton

from biasflash.backends.hopper import (
    backward,
    backward_bias,
    backward_convert,
    backward_pair,
    backward_single,
    backward_wide,
    config,
    config_float32,
    config_wide,
    objections,
)
from biasflash.backends.hopper.aligned import aligned_bias, bias_boxed
from biasflash.backends.hopper.config_kinds import BackwardTile, OwnerTile, PairTile, SingleTile
from biasflash.backends.hopper.key_mask import KeyMask, key_mask, mask_arguments
from biasflash.backends.hopper.odd_bias import bulk_bias, no_odd_arguments, odd_arguments, odd_bias
from biasflash.backends.hopper.operands import (
    Box,
    Boxed,
    DescriptorLaunch,
    arguments_of,
    batch_of,
    boxed,
    common_arguments,
    has_float32_bias,
    items_share_bias,
    no_tile,
    record,
    statistics,
    sums,
    unit_of,
)
from biasflash.backends.triton import geometry
from biasflash.backends.triton.backward_plan import BackwardPlan, Share
from biasflash.backends.triton.operands import Device, Launch, Layout, Slot
from biasflash.backends.triton.recipe import Recipe
from biasflash.problem import Problem


class HopperBackward(BackwardPlan):
    """The structures of ``BackwardPlan`` with Hopper kernels: delta first, then dk and dv, dq, shared biases.

    Extreme rows weigh nothing in Hopper kernels; where there can be any, portable kernels follow that compute what such
    rows touch. A shared bias is also redone where its factored sum overflowed.
    """

    DQ_COMPUTES_DELTA = False

    def objections(self) -> list[str]:
        """Why the portable plan serves the call instead, if it does."""
        found = objections.to_layout(self.ops, self._by_pointer)
        if found:
            return found
        if self.by_structure["columns"]:
            found.append("a trained bias of one query row; the portable dkdv kernel adds its columns up")
        if self.runs_dkdv and not (self.want["dk"] and self.want["dv"]):
            found.append("dk or dv is not wanted; its kernel computes both")
        if self.owned and odd_bias(self.ops) is not None:
            found.append("a trained bias that items share, with rows not in steps of 16 bytes and too large to copy")
        for i in self.owned:  # its kernels take one set of axes to move along for both
            given, grad = ([s != 0 for s in self.ops.views[f"{x}{i}"].strides[:-2]] for x in ("bias", "grad"))
            if given != grad:
                found.append("a trained bias that is expanded along an axis of its gradient")
        p = self.problem
        if self._is_wide and p.terms:
            kind = "bias" if self.ops.has_dense else "mask"
            found.append(f"a {kind} beside heads of width {max(p.D, p.Dv)}; its backward takes one up to 128")
        elif not self._tiles():
            found.append(no_tile(self.ops))
        return found

    @property
    def _is_wide(self) -> bool:
        return config_wide.is_wide(self.problem.D, self.problem.Dv)

    def _tiles(self) -> bool:
        if self._is_wide:
            return True
        kernels = [name for name, runs in (("dkdv", self.runs_dkdv), ("dq", self.runs_dq)) if runs]
        has_owner = not self.owned or self._pair is not None or self._owner_tile is not None
        return has_owner and all(self._single or self._tile(name) for name in kernels)

    def _tile(self, kernel: str) -> BackwardTile | None:
        p, ops = self.problem, self.ops
        is_shared = odd_bias(ops) is None and items_share_bias(ops, 2)
        stores = kernel == "dkdv" and bool(self.stored)
        rows = config_float32.BACKWARD if has_float32_bias(ops) else config.BACKWARD
        return config.backward_tile(kernel, max(p.D, p.Dv), ops.has_dense, is_shared and not stores, stores, rows)

    @property
    def _owner_tile(self) -> OwnerTile | None:
        tables = config_float32 if has_float32_bias(self.ops) else config
        return config.owner_tile(max(self.problem.D, self.problem.Dv), tables.OWNER)

    def _windows(self) -> None:
        return None

    def _lists(self) -> None:
        return None

    @cached_property
    def _by_pointer(self) -> tuple[str, ...]:
        """Gradients of shared biases whose rows are not in steps of 16 bytes: their owners write element by element."""
        p, found = self.problem, []
        for i in self.owned:
            view = self.ops.views[f"grad{i}"]
            dense = geometry.contiguous_strides([*self._owned(i)[1], p.M, p.N])
            if view.vec != unit_of(p.terms[i].dtype) and list(view.strides) == dense:
                found.append(f"grad{i}")
        return tuple(found)

    @cached_property
    def _mask(self) -> KeyMask | None:
        return key_mask(self.ops)

    def _launches(self) -> Iterator[Launch]:
        for prepared in (aligned_bias(self.ops), self._mask):
            if prepared is not None:
                self.scratch |= prepared.scratch()
                yield from prepared.launches()
        yield self._delta()
        if self._single is not None:
            yield from self._hopper_dqkv(self._single)
        elif self.runs_dkdv:
            yield self._wide("dkdv") if self._is_wide else self._hopper_dkdv()
        if self.runs_dkdv and self.rare:
            yield self._again(self._dkdv(REDO=True))
        if self._pair is not None:
            yield from self._dq_dbias(self.owned[0], self._pair)
        elif self.runs_dq and self._single is None:
            yield self._wide("dq") if self._is_wide else self._hopper_dq()
        if (self.runs_dq or self._single is not None) and self.rare:
            yield self._again(self._dq(REDO=True))
        if self.reads_ds and self._single is None:
            yield self._dq_from_ds()
        for i in self.owned if self._pair is None else ():
            yield from self._shared(i)

    @staticmethod
    def _again(launch: Launch) -> Launch:
        launch.why = "only where rows are extreme"
        return launch

    @cached_property
    def _single(self) -> SingleTile | None:
        """The tile of the kernel that computes dq, dk and dv in one pass."""
        p = self.problem
        if not all(self.want.values()) or config.padded(p.D) != config.padded(p.Dv):
            return None
        if self._mask is not None:  # two kernels skip hidden keys; in one pass their turn must be taken all the same
            return None
        if p.Hq != p.Hkv and p.causal_shift is not None:
            # 2 x 32 over 8 heads of 8k: 6.0 ms in turns; 1 x 16 heads of 16k, as many scores: 5.0 in two kernels
            return None
        if self.stored or has_float32_bias(self.ops) or odd_bias(self.ops) is not None:
            return None  # score gradients are read back for dq; the other biases' tiles leave too few stages
        facts = self.ops.has_dense, bool(self.owned) or items_share_bias(self.ops, 2), p.causal_shift is not None
        return config.single_tile(max(p.D, p.Dv), p.N, p.batch_size * p.Hkv, *facts)

    @cached_property
    def _pair(self) -> PairTile | None:
        """The tile of the kernel that computes dq and the gradient of a shared bias in one pass, where all keys fit."""
        p = self.problem
        if self._single is not None or not self.runs_dq or len(self.owned) != 1:
            return None
        if p.causal_shift is not None or self._mask is not None:
            return None  # it walks over hidden tiles too
        if has_float32_bias(self.ops):  # 64 queries x 512 keys of it are 128 KiB
            return None
        return config.pair_tile(max(p.D, p.Dv), p.N)

    def _rows(self, slot: str, rows: int) -> Box:
        pitch = (triton.cdiv(self.problem.M, self.tail) + 1) * self.tail
        return statistics(self.ops, slot, pitch, rows)

    def _caps(self, keys: int, boxes: Mapping[str, Boxed]) -> Box:
        """What scores of ``keys`` keys at a time are cut to; any other box without a mask."""
        return self._mask.caps(keys) if self._mask is not None else boxes["k"].box

    def _given(self, boxes: dict[str, Boxed], tile: BackwardTile, items: int, rows: int) -> dict[str, Any]:
        """What dq and dkdv take by the same name; ``rows``: queries of one copy of row statistics."""
        return {
            **self._common(boxes, items, rows),
            **no_odd_arguments(boxes["k"].box),
            "caps_desc": self._caps(tile.block, boxes),
            "ROWS": tile.rows,
            "TILES": tile.tiles,
            "A_BUFFERS": tile.a_buffers,
            "STAGES": tile.stages,
            "BIAS_STAGES": tile.bias_stages,
            "AHEAD": tile.ahead,
            "KEEP": tile.keep,
        }

    def _common(self, boxes: dict[str, Boxed], items: int, rows: int) -> dict[str, Any]:
        """What all kernels take by the same name; two warpgroups compute in each."""
        return {
            **common_arguments(self.ops, 2),
            **mask_arguments(self._mask),
            **arguments_of(boxes),
            "reference_desc": self._rows("reference", rows),
            "delta_desc": self._rows("delta", rows),
            "items": items,
        }

    def _hopper_dq(self) -> DescriptorLaunch:
        p, ops, tile = self.problem, self.ops, self._tile("dq")
        assert tile is not None
        wide, wide_v = config.padded(p.D), config.padded(p.Dv)
        boxes = {
            "q": boxed(ops, "q", 64, wide),
            "dout": boxed(ops, "dout", 64, wide_v),
            "k": boxed(ops, "k", tile.block, wide),
            "v": boxed(ops, "v", tile.block, wide_v),
            "dq": boxed(ops, "dq", 64, wide),
        }
        boxes["bias"] = bulk_bias(ops, 64, tile.block, boxes["k"])
        items = triton.cdiv(p.M, 128) * p.batch_size // tile.rows * p.Hq
        given = self._given(boxes, tile, items, 64) | {"BLOCK_N": tile.block}
        return record(ops, backward.dq_kernel, given | odd_arguments(ops, "dq"), tile)

    def _hopper_dkdv(self) -> DescriptorLaunch:
        p, ops, tile = self.problem, self.ops, self._tile("dkdv")
        assert tile is not None
        wide, wide_v = config.padded(p.D), config.padded(p.Dv)
        boxes = {
            "k": boxed(ops, "k", 64, wide),
            "v": boxed(ops, "v", 64, wide_v),
            "q": boxed(ops, "q", tile.block, wide),
            "dout": boxed(ops, "dout", tile.block, wide_v),
            "dk": boxed(ops, "dk", 64, wide),
            "dv": boxed(ops, "dv", 64, wide_v),
        }
        boxes["bias"] = bulk_bias(ops, tile.block, 64, boxes["q"])
        boxes["ds"] = boxed(ops, f"grad{self.stored[0]}", tile.block, 64) if self.stored else boxes["bias"]
        items = triton.cdiv(p.N, 128) * p.batch_size // tile.rows * p.Hkv
        given = self._given(boxes, tile, items, tile.block)
        given |= {"BLOCK_M": tile.block, "STORE_DS": bool(self.stored), "DS_SLOTS": tile.ds_slots}
        given["REFERENCE_FIRST"] = tile.reference_first and self._mask is None  # beside what hides keys they spill
        return record(ops, backward.dkdv_kernel, given | odd_arguments(ops, "dkdv"), tile)

    def _wide(self, kernel: str) -> DescriptorLaunch:
        """dk and dv, or dq, of heads that take their columns in pieces."""
        p, ops = self.problem, self.ops
        tile = config_wide.wide_tile(kernel, p.D, p.Dv, p.causal_shift is not None)
        names = ("q", "k", "v", "dout", *(("dk", "dv") if kernel == "dkdv" else ("dq",)))
        boxes = {name: boxed(ops, name, 64, tile.piece) for name in names}
        length, heads = (p.N, p.Hkv) if kernel == "dkdv" else (p.M, p.Hq)
        given = {
            **self._common(boxes, triton.cdiv(length, tile.own) * p.batch_size * heads, 64),
            "PIECE": tile.piece,
            "PIECES_1": tile.width // tile.piece,
            "GROUP_1": tile.ring[0],
            "SLOTS_1": tile.ring[1],
            "PIECES_2": tile.width_v // tile.piece,
            "GROUP_2": tile.ring_v[0],
            "SLOTS_2": tile.ring_v[1],
            "OWN_SLOTS": tile.own_slots,
            "HELD_1": tile.held[0],
            "HELD_2": tile.held[1],
        }
        kernels = {"dkdv": backward_wide.wide_dkdv_kernel, "dq": backward_wide.wide_dq_kernel}
        return record(ops, kernels[kernel], given, tile)

    def _balance(self, programs: int, shared: int, most: int) -> int:
        """Chunks that keep persistent programs busy to the end; an item costs about three pairs to begin with."""
        most = max(1, min(8, shared // 8, most))
        rounds = {n: triton.cdiv(programs * n, self.ops.device.multiprocessors) for n in range(1, most + 1)}
        return min(rounds, key=lambda n: rounds[n] * (triton.cdiv(shared, n) + 3))

    def _hopper_dqkv(self, tile: SingleTile) -> Iterator[Launch]:
        p, ops = self.problem, self.ops
        wide, wide_v = config.padded(p.D), config.padded(p.Dv)
        widths = {"k": wide, "v": wide_v, "q": wide, "dout": wide_v, "dk": wide, "dv": wide_v, "dq": wide}
        boxes = {name: boxed(ops, name, 64, width) for name, width in widths.items()}
        boxes["bias"] = bias_boxed(ops, 64, 64) if ops.has_dense else boxes["q"]
        lines, programs_of_heads = p.batch_size * p.Hkv, min(p.batch_size * p.Hkv, ops.device.multiprocessors)
        items = lines if tile.resident else triton.cdiv(p.N, 128) * lines
        rows_of_sum = programs_of_heads * (p.Hq // p.Hkv) if tile.resident else self.heads
        self.scratch["sums"] = rows_of_sum * p.M * wide
        if not tile.resident:
            self.zeroed["turns"] = self.heads * triton.cdiv(p.M, 64 * tile.tiles)
        given = {
            **self._common(boxes, items, 64),
            "sum_desc": sums("sums", rows_of_sum, p.M, wide, wide if tile.tiles == 2 else wide // 2),
            "sum_ptr": Slot("sums"),
            "turn_ptr": Slot("sums" if tile.resident else "turns"),
            "BLOCK_M": 64,
            "TILES": tile.tiles,
            "A_BUFFERS": tile.a_buffers,
            "STAGES": tile.stages,
            "BIAS_STAGES": tile.bias_stages,
            "DS_SLOTS": tile.ds_slots,
            "DQ_SLOTS": tile.dq_slots,
            "RESIDENT": tile.resident,
            "IN_REGISTERS": tile.in_registers,
            "DK_FIRST": tile.dk_first,
        }
        launch = record(ops, backward_single.dqkv_kernel, given, tile)
        launch.grid = programs_of_heads if tile.resident else items
        yield launch
        if not tile.resident:
            yield self._convert(wide)

    def _convert(self, wide: int) -> Launch:
        p, ops = self.problem, self.ops
        *batch, head, row, _ = ops.views["dq"].strides
        given = {
            "sum_ptr": Slot("sums"),
            "dq_ptr": Slot("dq"),
            **{"dq_b0": batch[-2] if len(batch) > 1 else 0, "dq_b1": batch[-1], "dq_h": head, "dq_m": row},
            **{"inner": batch_of(ops)[1], "heads": p.Hq, "M": p.M, "width": p.D, "scale": p.scale},
            **{"D_BLOCK": wide, "ROWS": 64},
        }
        return Launch(
            kernel=backward_convert.convert_kernel,
            grid=triton.cdiv(p.M, 64) * self.heads,
            arguments=given,
            warps=4,
            stages=1,
        )

    def _shared(self, i: int) -> Iterator[Launch]:
        p = self.problem
        tile = self._owner_tile
        assert tile is not None
        part = self._share(i, 128, tile.columns, self._balance)
        items = triton.cdiv(p.M, 128) * triton.cdiv(p.N, tile.columns) * part.owners * part.chunks
        given = self._owner_arguments(i, part, items, 128, tile.columns // tile.parts, tile.columns)
        given |= {"BLOCK_N": tile.block_n, "CHUNKS_N": tile.chunks_n, "STAGES": tile.stages, "DEEP": tile.deep}
        given |= {"flag_ptr": Slot(f"overflow{i}")}
        launch = record(self.ops, backward_bias.dbias_kernel, given, tile)
        flags = self.scratch[f"overflow{i}"] = 2 * launch.grid
        yield launch
        again = self._owner(i, part, REDO=True, redo_ptr=Slot(f"overflow{i}"), redo_pitch=flags)
        again.why = "only where rows are extreme or a sum overflowed"
        yield again
        yield from self._total(i, part)

    def _dq_dbias(self, i: int, tile: PairTile) -> Iterator[Launch]:
        p = self.problem
        part = self._share(i, 64, tile.most_keys, self._balance)
        items = triton.cdiv(p.M, 64) * part.owners * part.chunks
        given = self._owner_arguments(i, part, items, 64, tile.box, tile.box)
        dq = boxed(self.ops, "dq", 64, config.padded(p.D))
        given |= {"dq_desc": dq.box, "dq_moves": dq.moves, "BLOCK_N": tile.block_n, "CHUNKS_N": tile.chunks_n}
        given |= {"STAGES": tile.stages, "ROWS": tile.rows, "LEFT": tile.left}
        yield record(self.ops, backward_pair.dq_dbias_kernel, given, tile)
        if self.rare:
            yield self._again(self._owner(i, part, REDO=True))
        yield from self._total(i, part)

    def _owner_arguments(self, i: int, part: Share, items: int, rows: int, keys: int, columns: int) -> dict[str, Any]:
        """What the kernels that own tiles of bias ``i`` take by the same name; ``rows``: queries of one copy."""
        p, ops = self.problem, self.ops
        wide, wide_v = config.padded(p.D), config.padded(p.Dv)
        by_pointer = f"grad{i}" in self._by_pointer
        boxes = {
            "q": boxed(ops, "q", rows, wide),
            "dout": boxed(ops, "dout", rows, wide_v),
            "k": boxed(ops, "k", keys, wide),
            "v": boxed(ops, "v", keys, wide_v),
            "bias": bias_boxed(ops, 64, columns),
        }
        return {
            **self._common(boxes, items, rows),
            "caps_desc": self._caps(keys, boxes),
            "dbias_desc": boxes["bias"].box if by_pointer else boxed(ops, f"grad{i}", 64, columns).box,
            "partial_ptr": Slot(f"partial{i}" if part.chunks > 1 else f"grad{i}" if by_pointer else "delta"),
            **{"owners": part.owners, "shared": part.shared, "chunk": part.chunk},
            "OWNS": (False,) * (3 - len(part.owns)) + part.owns,
            "SPLIT": part.chunks > 1 or by_pointer,
        }


def backward_recipe(
    problem: Problem,
    device: Device,
    rows: Mapping[str, Layout],
    terms: Sequence[Layout],
    grads: Mapping[int, Layout],
    has_dlse: bool,
) -> tuple[Recipe, list[str]]:
    """The recipe, and the objections if there are any; the recipe is then the portable one."""
    plan = HopperBackward(problem, device, rows, terms, grads, has_dlse)
    found = plan.objections()
    if found:
        return BackwardPlan(problem, device, rows, terms, grads, has_dlse).recipe(), found
    return plan.recipe(), []
