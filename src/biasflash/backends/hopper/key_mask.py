"""A mask of keys as the Hopper kernels take it: the launches that write it down, and what the others are passed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from biasflash.backends.hopper import mark_keys
from biasflash.backends.hopper.operands import Box, batch_of, outer_steps
from biasflash.backends.triton.operands import Launch, Operands, Slot

#: keys that one code of ``mark_keys_kernel`` is about
MARK = int(mark_keys.MARK.value)
#: the most keys of a tile
LARGEST_TILE = MARK * int(mark_keys.TILES.value)


@dataclass(frozen=True, kw_only=True)
class KeyMask:
    """A mask that is the same for all heads and queries, as ``mark_keys_kernel`` writes it down for the others.

    ``lines`` of ``pitch`` keys, one for every batch item, or fewer where the mask is broadcast: item ``(b0, b1)`` has
    ``b0 * line_0 + b1 * line_1``. ``pitch`` is past the end of every tile of keys that a kernel walks over.
    """

    slot: str
    strides: tuple[int, int, int]  # of the mask along b0, b1 and keys
    sizes: tuple[int, int]  # lines along b0 and b1
    batch: tuple[int, int]  # items along b0 and b1
    keys: int
    heads: int  # of keys
    widths: tuple[int, int]  # D, Dv
    rows: dict[str, tuple[int, int, int, int]]  # of k and v: strides along b0, b1, head and keys

    @property
    def lines(self) -> int:
        return self.sizes[0] * self.sizes[1]

    @property
    def pitch(self) -> int:
        return (-(-self.keys // LARGEST_TILE) + 1) * LARGEST_TILE

    def scratch(self) -> dict[str, int]:
        return {"caps": self.lines * self.pitch, "spans": self.lines * (self.pitch // MARK + 1)}

    def launches(self) -> tuple[Launch, Launch]:
        return self._mark(), self._mark_unfit()

    def _mark(self) -> Launch:
        arguments = {
            "mask_ptr": Slot(self.slot),
            "caps_ptr": Slot("caps"),
            "spans_ptr": Slot("spans"),
            **dict(zip(("mask_b0", "mask_b1", "mask_n"), self.strides, strict=True)),
            **{"lines_1": self.sizes[1], "N": self.keys, "pitch": self.pitch, "BLOCK": 1024},
        }
        return Launch(kernel=mark_keys.mark_keys_kernel, grid=self.lines, arguments=arguments, warps=4, stages=1)

    def _mark_unfit(self) -> Launch:
        kernel = mark_keys.mark_unfit_kernel
        given: dict[str, Any] = {"k_ptr": Slot("k"), "v_ptr": Slot("v"), "caps_ptr": Slot("caps")}
        for name, strides in self.rows.items():
            steps = (stride // int(mark_keys.UNIT.value) for stride in strides)
            given |= dict(zip((f"{name}_{axis}" for axis in ("b0", "b1", "h", "n")), steps, strict=True))
        D, Dv = self.widths
        given |= {"spans_ptr": Slot("spans"), **self._line_steps(), "n1": self.batch[1], "heads": self.heads}
        given |= {"N": self.keys, "pitch": self.pitch, "D": D, "DV": Dv}
        groups = -(-self.keys // LARGEST_TILE)
        grid = groups * self.heads * self.batch[0] * self.batch[1]
        arguments = {name: given[name] for name in kernel.arg_names}
        return Launch(kernel=kernel, grid=grid, arguments=arguments, warps=4, stages=1)

    def _line_steps(self) -> dict[str, int]:
        return {
            "line_0": self.sizes[1] if self.sizes[0] > 1 else 0,
            "line_1": 1 if self.sizes[1] > 1 else 0,
        }

    def arguments(self) -> dict[str, Any]:
        return {
            "caps_ptr": Slot("caps"),
            "spans_ptr": Slot("spans"),
            "caps_pitch": self.pitch,
            **self._line_steps(),
            "HAS_KEEP": True,
        }

    def caps(self, keys: int) -> Box:
        """``caps`` in blocks of ``keys``."""
        shape, strides = (self.lines, self.pitch), (self.pitch, 1)
        return Box(slot="caps", dtype=torch.float32, shape=shape, strides=strides, block=(1, keys))


def key_mask(ops: Operands) -> KeyMask | None:
    """The mask of the call, if it has one."""
    for i, (term, view) in enumerate(zip(ops.problem.terms, ops.term_views, strict=True)):
        if term.kind == "keep":
            b0, b1, _head = outer_steps(view)
            n0, n1 = batch_of(ops)
            sizes = n0 if b0 else 1, n1 if b1 else 1
            p = ops.problem
            return KeyMask(
                slot=f"bias{i}",
                strides=(b0, b1, view.strides[-1]),
                sizes=sizes,
                batch=(n0, n1),
                keys=p.N,
                heads=p.Hkv,
                widths=(p.D, p.Dv),
                rows={name: (*outer_steps(ops.views[name]), ops.views[name].strides[-2]) for name in ("k", "v")},
            )
    return None


def mask_arguments(mask: KeyMask | None) -> dict[str, Any]:
    """What every kernel takes of the call's mask; without one what is never read."""
    if mask is not None:
        return mask.arguments()
    pointers = {"caps_ptr": Slot("lse"), "spans_ptr": Slot("lse")}
    return {**pointers, "caps_pitch": 0, "line_0": 0, "line_1": 0, "HAS_KEEP": False}
