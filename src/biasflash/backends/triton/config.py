"""Tile choice as data with reasons: a row of the GPU's measured table if there is one, else the first rule that fits.

Deciding measures nothing: the same facts and the same table give the same tile, on every call and machine.

Figures are medians on an H200 (bf16, Triton 3.6) unless a row says otherwise. Triton waits for each score product at
once, so overlap comes from several programs on one multiprocessor: small tiles and capped registers beat big tiles.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from biasflash.backends.triton import tables
from biasflash.backends.triton.widths import at_once, padded


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What a rule may look at; ``kernel`` is forward, delta, dkdv, dq, dq_from_ds or dbias."""

    kernel: str
    width: int  # the larger of D and Dv as they are held (``widths.strips``)
    columns: int  # their sum
    itemsize: int  # bytes of an element of q
    has_dense: bool
    bias_itemsize: int  # bytes of a score's biases, or of its mask where there is none; 0 without either
    is_unaligned: bool = False  # whether a bias or mask along both axes is read element by element
    is_padded: bool = False  # whether heads are narrower than what they are held in, so that every load is masked
    hides_pairs: bool = False  # whether there is a mask or causal order
    shared_memory: int  # bytes a program may take
    capability: int = 90  # major * 10 + minor
    gpu: str | None = None  # whose table is looked into; None: the current GPU's, empty: no table

    @property
    def is_crowded(self) -> bool:
        """Whether addresses and masks, or the loops with them and without, take many registers beside the tiles."""
        loads = self.has_dense or (self.bias_itemsize > 0 and self.width > 64 and self.itemsize == 4)
        return self.is_unaligned or self.is_padded or (loads and self.hides_pairs)


@dataclass(frozen=True, kw_only=True)
class TileConfig:
    """One program's tile: queries x keys, warps, pipeline stages, and an optional register cap."""

    block_m: int
    block_n: int
    warps: int
    stages: int
    registers: int | None = None
    spill_bytes: int = 0  # of a thread, in tiles of tables that beat every tile without; 0 in those of rules
    columns: int = 0  # of dout and v that their product reads and multiplies at a time; 0: as ``widths.at_once`` says
    # where an axis is short; with fewer warps a thread holds more, and some smaller tiles spill
    keeps_warps: bool = False
    keeps_sides: bool = False

    def __str__(self) -> str:
        cap = f", registers <= {self.registers}" if self.registers else ""
        columns = f", {self.columns} columns at a time" if self.columns else ""
        return f"{self.block_m} x {self.block_n}, {self.warps} warps, {self.stages} stages{cap}{columns}"


@dataclass(frozen=True, kw_only=True)
class Rule:
    """When (kernel, widest width, element size) -> tile -> why. The first rule that matches and fits is taken."""

    kernel: str
    max_width: int
    itemsize: int
    tile: TileConfig
    why: str
    dense_only: bool = False
    crowded: bool | None = None  # what ``Facts.is_crowded`` must be, where it matters
    max_columns: int = 512
    capability: int | None = None  # only for this one


def _tile(m: int, n: int, warps: int, stages: int, registers: int | None = None, columns: int = 0) -> TileConfig:
    return TileConfig(
        block_m=m, block_n=n, warps=warps, stages=stages, registers=registers, columns=columns, keeps_warps=True
    )


def _rule(kernel: str, max_width: int, itemsize: int, tile: TileConfig, why: str, **more: Any) -> Rule:
    return Rule(kernel=kernel, max_width=max_width, itemsize=itemsize, tile=tile, why=why, **more)


#: for calls that are not crowded; a rule that says nothing of it serves both kinds
_ROOMY: dict[str, Any] = {"crowded": False}
#: Tiles that spill nothing. The reasons say what a thread of the next better one spills,
#: on sm_80 if nothing else is said, as ptxas counts it. A cap of 248 registers lifts a limit that ptxas sets itself
#: (168 with 4 warps, for three programs on a multiprocessor).
RULES: tuple[Rule, ...] = (
    # ------------------------------------------------------------------------------------------------ forward, 16 bits
    _rule("forward", 32, 2, _tile(64, 64, 4, 3), "141 to 168 registers on sm_80", **_ROOMY),
    _rule("forward", 32, 2, _tile(128, 64, 8, 1), "64 x 64 with 4 warps spills 16 bytes"),
    _rule("forward", 64, 2, _tile(128, 64, 8, 3), "199 registers on sm_80", **_ROOMY),
    _rule("forward", 64, 2, _tile(128, 32, 8, 2), "128 x 64 spills 112 bytes"),
    _rule(
        "forward",
        128,
        2,
        _tile(128, 64, 8, 3),
        "H200, 1 x 16 heads of 16k, causal: 2.21 ms, 128 x 128 takes 2.61",
        **_ROOMY,
    ),
    _rule("forward", 128, 2, _tile(128, 64, 8, 2), "fits 163 KiB of shared memory", **_ROOMY),
    _rule("forward", 128, 2, _tile(64, 64, 8, 1), "in two stages 24 bytes on sm_90", capability=90, crowded=True),
    _rule("forward", 128, 2, _tile(64, 64, 8, 2), "128 x 64 spills 648 bytes"),
    _rule(
        "forward",
        256,
        2,
        _tile(128, 64, 8, 2),
        "H200, 2 x 16 heads of 4k, D 256: 1.12 ms, 64 x 64 takes 1.58",
        dense_only=True,
        **_ROOMY,
    ),
    _rule("forward", 256, 2, _tile(64, 64, 8, 2), "with a mask 128 x 64 spills 96 on sm_90", capability=90, **_ROOMY),
    _rule("forward", 256, 2, _tile(64, 64, 8, 2), "with a mask 128 x 64 spills 8 on sm_100", capability=100, **_ROOMY),
    _rule("forward", 256, 2, _tile(64, 32, 8, 2), "in one stage 80 bytes on sm_90", capability=90, crowded=True),
    _rule("forward", 256, 2, _tile(32, 64, 4, 2), "fits 163 KiB of shared memory", **_ROOMY),
    _rule("forward", 256, 2, _tile(64, 32, 8, 1), "32 x 64 spills 272 bytes"),
    _rule("delta", 256, 2, _tile(64, 64, 4, 1), "memory bound; 32 to 128 rows measure the same"),
    _rule("delta", 256, 4, _tile(32, 32, 4, 1), "memory bound"),
    # --------------------------------------------------------------------------------------------------- dkdv, 16 bits
    _rule("dkdv", 32, 2, _tile(32, 128, 8, 3), "64 x 64 spills 40 bytes", dense_only=True, **_ROOMY),
    _rule("dkdv", 32, 2, _tile(64, 64, 4, 2), "255 registers on sm_80", **_ROOMY),
    _rule("dkdv", 32, 2, _tile(32, 128, 8, 1), "64 x 128 spills 8 bytes"),
    _rule("dkdv", 64, 2, _tile(32, 64, 4, 2, 248), "64 x 64: 56 on sm_90", dense_only=True, capability=90, **_ROOMY),
    _rule("dkdv", 64, 2, _tile(32, 64, 4, 2, 248), "uncapped: 8 on sm_100", dense_only=True, capability=100, **_ROOMY),
    _rule("dkdv", 64, 2, _tile(128, 32, 8, 2), "32 x 64 spills 16 bytes", dense_only=True, **_ROOMY),
    _rule("dkdv", 64, 2, _tile(32, 64, 4, 3), "255 registers on sm_80", **_ROOMY),
    _rule("dkdv", 64, 2, _tile(32, 64, 8, 1), "64 x 32 spills 256 bytes on sm_90", capability=90),
    _rule("dkdv", 64, 2, _tile(32, 64, 8, 1), "64 x 32 spills 256 bytes on sm_100", capability=100),
    _rule("dkdv", 64, 2, _tile(64, 32, 8, 2), "with 4 warps 168 bytes spilled, 128 x 32 8"),
    _rule("dkdv", 128, 2, _tile(32, 32, 8, 2), "32 x 64: 56 on sm_90", dense_only=True, capability=90, **_ROOMY),
    _rule("dkdv", 128, 2, _tile(32, 64, 8, 2), "with a bias 56 bytes on sm_90", capability=90, **_ROOMY),
    _rule("dkdv", 128, 2, _tile(16, 32, 8, 1), "32 x 32 spills 32 bytes on sm_90", capability=90),
    _rule("dkdv", 128, 2, _tile(32, 64, 8, 1, 248), "in two stages 104 bytes on sm_100", capability=100),
    _rule("dkdv", 128, 2, _tile(32, 64, 8, 2), "with 4 warps 16 bytes spilled", **_ROOMY),
    _rule("dkdv", 128, 2, _tile(32, 64, 8, 1), "in two stages 16 bytes spilled"),
    _rule("dkdv", 256, 2, _tile(32, 32, 8, 2), "64 x 32 with 4 warps spills 648 bytes", **_ROOMY),
    _rule("dkdv", 256, 2, _tile(16, 16, 8, 1), "16 x 32 spills 304 bytes on sm_90", capability=90, crowded=True),
    _rule("dkdv", 256, 2, _tile(16, 16, 8, 1), "16 x 32 spills 272 bytes on sm_100", capability=100, crowded=True),
    _rule("dkdv", 256, 2, _tile(16, 32, 8, 1), "32 x 32 spills 104 bytes"),
    # ----------------------------------------------------------------------------------------------------- dq, 16 bits
    _rule("dq", 32, 2, _tile(64, 64, 4, 3, 248), "uncapped 8 bytes spilled", dense_only=True, **_ROOMY),
    _rule("dq", 32, 2, _tile(64, 64, 4, 3), "178 registers on sm_80", **_ROOMY),
    _rule("dq", 32, 2, _tile(64, 64, 8, 1), "128 x 64 spills 32 bytes"),
    _rule("dq", 64, 2, _tile(128, 64, 8, 2, 248), "uncapped: 8 on sm_100", dense_only=True, capability=100, **_ROOMY),
    _rule("dq", 64, 2, _tile(128, 64, 8, 2), "64 x 64 with 4 warps spills 8 bytes", dense_only=True, **_ROOMY),
    _rule("dq", 64, 2, _tile(128, 64, 8, 3), "255 registers on sm_80", **_ROOMY),
    _rule("dq", 64, 2, _tile(128, 32, 8, 1, 248), "uncapped: 8 on sm_100", capability=100),
    _rule("dq", 64, 2, _tile(128, 32, 8, 1), "128 x 64 spills 128 bytes"),
    _rule("dq", 128, 2, _tile(64, 64, 8, 2), "with 4 warps 56 bytes spilled", dense_only=True, **_ROOMY),
    _rule("dq", 128, 2, _tile(64, 64, 4, 2), "255 registers on sm_80", **_ROOMY),
    _rule("dq", 128, 2, _tile(64, 32, 8, 2), "64 x 64 with 8 warps spills 64 bytes, 64 x 32 with 4 16"),
    _rule("dq", 256, 2, _tile(32, 32, 8, 1), "64 x 32 spills 296 bytes on sm_90", capability=90, **_ROOMY),
    _rule("dq", 256, 2, _tile(64, 32, 8, 1), "with 4 warps 80 bytes spilled", **_ROOMY),
    _rule("dq", 256, 2, _tile(16, 32, 8, 1), "32 x 32 spills 376 bytes on sm_90", capability=90),
    _rule("dq", 256, 2, _tile(16, 32, 8, 1), "32 x 32 spills 304 bytes on sm_100", capability=100, crowded=True),
    _rule("dq", 256, 2, _tile(32, 32, 8, 1), "64 x 32 spills 24 bytes"),
    _rule("dq_from_ds", 64, 2, _tile(128, 64, 4, 4, 248), "uncapped: 8 on sm_100", capability=100),
    _rule("dq_from_ds", 64, 2, _tile(128, 64, 4, 4), "H200, full bias 2k: 0.147 ms, 64 x 64 takes 0.150"),
    _rule("dq_from_ds", 128, 2, _tile(128, 64, 8, 3), "with 4 warps 8 bytes spilled, causal 288"),
    _rule("dq_from_ds", 128, 2, _tile(64, 64, 4, 2), "fits 99 KiB of shared memory"),
    _rule("dq_from_ds", 256, 2, _tile(128, 64, 8, 2), "64 x 64 with 4 warps spills 32 bytes", **_ROOMY),
    _rule("dq_from_ds", 256, 2, _tile(64, 128, 8, 1), "128 x 64 spills 24 bytes"),
    # -------------------------------------------------------------------------------------------------- dbias, 16 bits
    _rule("dbias", 32, 2, _tile(64, 64, 4, 3), "252 registers on sm_80", **_ROOMY),
    _rule("dbias", 32, 2, _tile(64, 64, 8, 1), "128 x 64 with 4 warps spills 464 bytes"),
    _rule("dbias", 64, 2, _tile(128, 64, 8, 2), "64 x 64 with 4 warps spills 24 bytes", **_ROOMY),
    _rule("dbias", 64, 2, _tile(128, 32, 8, 1), "64 x 64 spills 8 bytes"),
    _rule("dbias", 128, 2, _tile(64, 32, 4, 2), "64 x 64 spills 416 bytes", **_ROOMY),
    _rule("dbias", 128, 2, _tile(64, 32, 8, 1, 248), "uncapped: 16 on sm_100", capability=100, crowded=True),
    _rule("dbias", 128, 2, _tile(64, 32, 8, 1), "64 x 64 spills 504 bytes"),
    _rule(
        "dbias", 256, 2, replace(_tile(32, 64, 8, 1), keeps_sides=True), "with 4 warps 24 bytes spilled, 64 x 32 424"
    ),
    # ------------------------------------------------------- float32 on Hopper (six bfloat16 passes), spills on sm_90
    _rule("forward", 64, 4, _tile(64, 32, 8, 1), "255 registers", capability=90),
    _rule("forward", 128, 4, _tile(32, 32, 8, 1), "64 x 32 spills 96 bytes", capability=90),
    _rule("dkdv", 32, 4, _tile(32, 64, 8, 1), "32 x 32 spills 24 bytes", capability=90),
    _rule("dkdv", 64, 4, _tile(32, 32, 8, 1), "32 x 64 spills 16 bytes", capability=90),
    _rule("dkdv", 128, 4, _tile(16, 16, 8, 1), "16 x 32 spills 56 bytes", capability=90),
    _rule("dkdv", 256, 4, _tile(16, 16, 8, 1), "32 x 16 spills 8 bytes", capability=90),
    _rule("dq", 64, 4, _tile(64, 32, 8, 1), "255 registers", capability=90),
    _rule("dq", 128, 4, _tile(16, 32, 8, 1), "32 x 32 spills 24 bytes", capability=90),
    _rule("dbias", 64, 4, _tile(16, 32, 4, 1), "32 x 32 spills 16 bytes", capability=90),
    _rule("dq_from_ds", 64, 4, _tile(64, 32, 4, 2), "212 registers", capability=90),
    # ---------------------------------------------------------------------------- float32 (elsewhere three TF32 passes)
    _rule("forward", 64, 4, _tile(64, 32, 4, 1), "64 x 64 spills 856 bytes", **_ROOMY),
    _rule("forward", 64, 4, _tile(32, 64, 8, 1), "64 x 32 spills 8 bytes"),
    _rule("forward", 128, 4, _tile(32, 32, 8, 1), "32 x 64 with 4 warps spills 392 bytes", **_ROOMY),
    _rule("forward", 128, 4, _tile(16, 32, 8, 1), "32 x 32 spills 8 bytes on sm_100"),
    _rule("forward", 256, 4, _tile(32, 32, 8, 1), "64 x 32 spills 288 bytes", **_ROOMY),
    _rule("forward", 256, 4, _tile(16, 32, 8, 1), "32 x 32 spills 56 bytes"),
    _rule("dkdv", 64, 4, _tile(32, 32, 8, 1), "with 4 warps 32 bytes spilled"),
    _rule("dkdv", 128, 4, _tile(16, 16, 8, 1), "16 x 32 spills 120 bytes"),
    _rule("dkdv", 256, 4, _tile(32, 16, 8, 1), "16 x 32 spills 32 bytes", **_ROOMY),
    _rule("dkdv", 256, 4, _tile(16, 16, 8, 1), "32 x 16 spills 24 bytes"),
    _rule("dq", 64, 4, _tile(16, 32, 4, 1), "32 x 32 spills 8 bytes"),
    _rule("dq", 128, 4, _tile(16, 16, 8, 1), "16 x 32 spills 8 bytes", **_ROOMY),
    _rule("dq", 128, 4, _tile(16, 16, 8, 1, columns=32), "all columns of dout and v spill 8 bytes"),
    _rule("dq", 256, 4, _tile(16, 32, 8, 1), "32 x 32 spills 152 bytes"),
    _rule("dq_from_ds", 128, 4, _tile(32, 32, 4, 2), "232 registers on sm_80", **_ROOMY),
    _rule("dq_from_ds", 128, 4, _tile(32, 32, 8, 1), "with 4 warps 72 bytes spilled on sm_100"),
    _rule("dq_from_ds", 256, 4, _tile(16, 32, 8, 1), "with 4 warps 16 bytes spilled", capability=90),
    _rule("dq_from_ds", 256, 4, _tile(16, 32, 4, 1), "255 registers on sm_80"),
    _rule("dbias", 64, 4, _tile(16, 32, 4, 1), "32 x 32 with 4 warps spills 32 bytes, with 8 24"),
    _rule("dbias", 256, 4, _tile(32, 64, 8, 1, columns=16), "all 64 columns of dout and v 16 bytes", capability=90),
    _rule("dbias", 128, 4, _tile(16, 32, 4, 1), "255 registers on sm_80", **_ROOMY),
    _rule("dbias", 128, 4, _tile(16, 32, 8, 1, columns=16), "with 4 warps 616 bytes spilled"),
    _rule("dbias", 256, 4, _tile(64, 32, 4, 1, columns=16), "64 x 64 with 8 warps spills 448 bytes", **_ROOMY),
    _rule("dbias", 256, 4, _tile(32, 32, 8, 1), "with 4 warps 496 bytes spilled"),
)


def columns_at_once(width: int, itemsize: int, gpu: str | None, capability: int) -> int:
    """``widths.at_once`` on a GPU, with the table in force there or without one."""
    return at_once(width, itemsize, capability, tables.active(gpu, capability) is not None)


def shared_bytes(facts: Facts, tile: TileConfig) -> int:
    """Shared memory of a program, from above: the tiles that stay plus ``stages`` copies of the tiles that stream.

    Tiles that only meet in products over the width are there some columns at a time, twice: the next ones are fetched.
    """
    row = facts.width * facts.itemsize
    columns = columns_at_once(facts.width, facts.itemsize, facts.gpu, facts.capability)
    part = min(2 * columns * facts.itemsize, row) if columns else row
    bias = tile.block_m * tile.block_n * facts.bias_itemsize if tile.stages > 1 else 0  # else it stays in registers
    score = tile.block_m * tile.block_n * facts.itemsize
    stay, stream = {
        "forward": (tile.block_m * part, 2 * tile.block_n * row + bias),
        "dkdv": (2 * tile.block_n * part + 2 * score, 2 * tile.block_m * row + bias),
        "dq": (2 * tile.block_m * part + score, 2 * tile.block_n * row + bias),
        "delta": (0, 0),
        "dq_from_ds": (
            0,
            tile.block_n * row + tile.block_m * tile.block_n * max(min(facts.bias_itemsize, 4), facts.itemsize),
        ),
        "dbias": (0, 2 * (tile.block_m + tile.block_n) * part + bias),
    }[facts.kernel]
    return stay + stream * max(1, tile.stages)


def choose_tile(facts: Facts) -> tuple[TileConfig, str]:
    """The measured tile of the table in force (see ``tables.active``) if it has one that fits, else ``choose_rule``'s.

    Raises:
        LookupError: no rule fits; names the nearest one.
    """
    table = tables.active(facts.gpu, facts.capability)
    row = table.find(facts) if table else None
    if table and row:
        for i, fields in enumerate(row.tiles):
            tile = TileConfig(**fields)
            if shared_bytes(facts, tile) <= facts.shared_memory:
                why = f"{row.why(table.gpu)}; a smaller one fits" if i else row.why(table.gpu)
                return (uncapped(tile) if facts.is_unaligned else tile), why
    return choose_rule(facts)


def choose_rule(facts: Facts) -> tuple[TileConfig, str]:
    """The first rule for the kernel whose width covers the problem's and whose tile fits, with its reason.

    Raises:
        LookupError: no rule fits; names the nearest one.
    """
    nearest: Rule | None = None
    for rule in RULES:
        if rule.kernel != facts.kernel or rule.itemsize != facts.itemsize or rule.max_width < facts.width:
            continue
        if (rule.dense_only and not facts.has_dense) or rule.crowded not in (None, facts.is_crowded):
            continue
        if facts.columns > rule.max_columns:
            continue
        if rule.capability not in (None, facts.capability):
            continue
        nearest = rule
        if shared_bytes(facts, rule.tile) <= facts.shared_memory:
            return rule.tile, rule.why
    if nearest is not None:  # several biases: not copied ahead but read into registers
        tile = replace(nearest.tile, stages=1)
        if shared_bytes(facts, tile) <= facts.shared_memory:
            return tile, f"{nearest.why}; in one stage, as nothing else fits"
    raise LookupError(f"no tile rule fits {facts}; the nearest is {nearest}")


def uncapped(tile: TileConfig) -> TileConfig:
    """The tile without its register cap: those of tables were measured with loads of 16 bytes, else they spill."""
    return tile if tile.registers is None else replace(tile, registers=None)


def shrink(tile: TileConfig, M: int, N: int) -> TileConfig:
    """No side longer than the power of two that holds its axis: a sequence of 20 does not pay for 64 rows."""
    block_m, block_n = min(tile.block_m, padded(M)), min(tile.block_n, padded(N))
    if tile.keeps_sides or (block_m, block_n) == (tile.block_m, tile.block_n):
        return tile
    if tile.keeps_warps:
        return replace(tile, block_m=block_m, block_n=block_n)
    return replace(tile, block_m=block_m, block_n=block_n, warps=min(tile.warps, 4), registers=None)
