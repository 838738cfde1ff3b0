"""Tile choice as data with reasons: a row of the GPU's measured table if there is one, else the first rule that fits.

Deciding measures nothing: the same facts and the same table give the same tile, on every call and machine.

Figures are medians on an H200 (bf16, Triton 3.6) unless a row says otherwise. Triton waits for each score product at
once, so overlap comes from several programs on one multiprocessor: small tiles and capped registers beat big tiles.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from biasflash.backends.triton import tables


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What a rule may look at; ``kernel`` is forward, delta, dkdv, dq, dq_from_ds or dbias."""

    kernel: str
    width: int  # the larger of D and Dv as they are held (``widths.strips``)
    columns: int  # their sum
    itemsize: int  # bytes of an element of q
    has_dense: bool
    bias_itemsize: int  # bytes of a score's biases, or of its mask where there is none; 0 without either
    shared_memory: int  # bytes a program may take
    capability: int = 90  # major * 10 + minor
    gpu: str | None = None  # whose table is looked into; None: the current GPU's, empty: no table


@dataclass(frozen=True, kw_only=True)
class TileConfig:
    """One program's tile: queries x keys, warps, pipeline stages, and an optional register cap."""

    block_m: int
    block_n: int
    warps: int
    stages: int
    registers: int | None = None
    # spills allowed a thread, the pass over extreme rows included; above 0 where that beat every tile without
    spill_bytes: int = 0

    def __str__(self) -> str:
        cap = f", registers <= {self.registers}" if self.registers else ""
        return f"{self.block_m} x {self.block_n}, {self.warps} warps, {self.stages} stages{cap}"


@dataclass(frozen=True, kw_only=True)
class Rule:
    """When (kernel, widest width, element size) -> tile -> why. The first rule that matches and fits is taken."""

    kernel: str
    max_width: int
    itemsize: int
    tile: TileConfig
    why: str
    dense_only: bool = False
    max_columns: int = 512
    capability: int | None = None  # only for this one


def _tile(m: int, n: int, warps: int, stages: int, registers: int | None = None, spill_bytes: int = 0) -> TileConfig:
    return TileConfig(block_m=m, block_n=n, warps=warps, stages=stages, registers=registers, spill_bytes=spill_bytes)


def _rule(kernel: str, max_width: int, itemsize: int, tile: TileConfig, why: str, **more: Any) -> Rule:
    return Rule(kernel=kernel, max_width=max_width, itemsize=itemsize, tile=tile, why=why, **more)


RULES: tuple[Rule, ...] = (
    # ------------------------------------------------------------------------------------------------ forward, 16 bits
    _rule("forward", 32, 2, _tile(64, 64, 4, 3, 128), "512 x 4 heads of 512, shared bias: 0.393 ms, uncapped 0.426"),
    _rule("forward", 64, 2, _tile(128, 64, 8, 3, 128, 32), "full bias 2k: 0.235 ms, uncapped 0.298", dense_only=True),
    _rule("forward", 64, 2, _tile(64, 64, 4, 3), "4 x 32 heads of 4k, no bias: 1.18 ms, 128 x 64 takes 1.27"),
    _rule("forward", 128, 2, _tile(128, 64, 8, 3), "1 x 16 heads of 16k, causal: 2.21 ms, 128 x 128 takes 2.61"),
    _rule("forward", 128, 2, _tile(64, 64, 4, 2), "fits 99 KiB of shared memory"),
    _rule("forward", 256, 2, _tile(128, 64, 8, 2), "2 x 16 heads of 4k, D 256: 1.12 ms, 64 x 64 takes 1.58"),
    _rule("forward", 256, 2, _tile(64, 32, 4, 2), "fits 163 KiB of shared memory"),
    _rule("forward", 256, 2, _tile(64, 32, 4, 1), "fits 99 KiB of shared memory"),
    _rule("delta", 256, 2, _tile(64, 64, 4, 1), "memory bound; 32 to 128 rows measure the same"),
    _rule("delta", 256, 4, _tile(32, 32, 4, 1), "memory bound"),
    # --------------------------------------------------------------------------------------------------- dkdv, 16 bits
    _rule(
        "dkdv", 32, 2, _tile(64, 64, 4, 2, 168, 40), "512 x 4 heads of 512: 0.755 ms, uncapped 1.00", dense_only=True
    ),
    _rule("dkdv", 32, 2, _tile(64, 64, 4, 2, 128, 96), "16 x 8 heads, 100 over 16k, mask: 0.547 ms, uncapped 0.755"),
    _rule(
        "dkdv",
        64,
        2,
        _tile(32, 64, 4, 2, 128, 184),
        "16 x 12 heads of 1k: 0.355 ms, 64 x 64 takes 0.426",
        dense_only=True,
    ),
    _rule("dkdv", 64, 2, _tile(32, 64, 4, 3, 128, 64), "4 x 32 heads of 4k, no bias: 2.53 ms, 64 x 64 takes 2.64"),
    _rule("dkdv", 128, 2, _tile(32, 64, 4, 2, None, 160), "full bias 4k: 0.932 ms, 64 x 64 takes 1.14"),
    _rule(
        "dkdv", 256, 2, _tile(32, 128, 8, 2, None, 144), "D 192, Dv 128, 4k: 1.07 ms, next best 1.62", max_columns=384
    ),
    _rule("dkdv", 256, 2, _tile(64, 32, 4, 1, None, 464), "2 x 16 heads of 4k, D 256: 5.83 ms, 32 x 64 takes 6.06"),
    _rule("dkdv", 256, 2, _tile(16, 32, 8, 1), "fits 99 KiB of shared memory"),
    # ----------------------------------------------------------------------------------------------------- dq, 16 bits
    _rule("dq", 32, 2, _tile(64, 64, 4, 3, 128), "512 x 4 heads of 512: 0.415 ms, uncapped 0.451", dense_only=True),
    _rule("dq", 32, 2, _tile(64, 64, 4, 3), "16 x 8 heads, 100 over 16k, mask: 0.244 ms, capped 0.248"),
    _rule("dq", 64, 2, _tile(128, 64, 8, 3, 128, 64), "4 x 32 heads of 4k, no bias: 1.36 ms, 64 x 64 takes 1.46"),
    _rule("dq", 64, 2, _tile(64, 64, 4, 2), "fits 99 KiB of shared memory"),
    _rule("dq", 128, 2, _tile(64, 64, 4, 2, None, 8), "1 x 16 heads of 16k, causal: 2.97 ms, 128 x 64 takes 3.40"),
    _rule("dq", 128, 2, _tile(64, 32, 4, 2), "fits 99 KiB of shared memory"),
    _rule("dq", 256, 2, _tile(128, 64, 8, 1, None, 232), "2 x 16 heads of 4k, D 256: 1.79 ms, 64 x 64 takes 1.95"),
    _rule("dq", 256, 2, _tile(64, 32, 4, 1), "fits 163 KiB of shared memory"),
    _rule("dq", 256, 2, _tile(32, 32, 4, 1), "fits 99 KiB of shared memory"),
    _rule("dq_from_ds", 64, 2, _tile(128, 64, 4, 4), "full bias 2k: 0.147 ms, 64 x 64 takes 0.150"),
    _rule("dq_from_ds", 128, 2, _tile(128, 128, 8, 3, None, 32), "full bias 4k: 0.158 ms, 128 x 64 with 4 warps 0.159"),
    _rule("dq_from_ds", 128, 2, _tile(64, 64, 4, 2), "fits 99 KiB of shared memory"),
    _rule("dq_from_ds", 256, 2, _tile(128, 64, 8, 3), "2 x 8 heads of 2k, D 256: 0.065 ms, 64 x 64 takes 0.088"),
    _rule("dq_from_ds", 256, 2, _tile(64, 64, 4, 2), "fits 163 KiB of shared memory"),
    # -------------------------------------------------------------------------------------------------- dbias, 16 bits
    _rule("dbias", 32, 2, _tile(64, 64, 4, 3, 168), "512 x 4 heads of 512: 0.339 ms, uncapped 0.352"),
    _rule("dbias", 64, 2, _tile(64, 64, 4, 3, None, 24), "16 x 12 heads of 1k: 0.187 ms, 128 x 64 takes 0.217"),
    _rule("dbias", 64, 2, _tile(64, 64, 4, 2), "fits 99 KiB of shared memory"),
    _rule("dbias", 128, 2, _tile(128, 64, 8, 2, None, 56), "4 x 8 heads of 2k: 0.311 ms, 64 x 64 takes 0.390"),
    _rule("dbias", 128, 2, _tile(64, 64, 4, 1), "fits 163 KiB of shared memory"),
    _rule("dbias", 256, 2, _tile(128, 64, 8, 1, None, 456), "4 x 8 heads of 2k, D 256: 0.637 ms, 64 x 64 takes 0.918"),
    _rule("dbias", 256, 2, _tile(64, 32, 4, 1), "fits 163 KiB of shared memory"),
    # --------------------------------------- float32 on Hopper (2 x 8 heads of 2k with a bias, six bfloat16 passes)
    _rule("forward", 64, 4, _tile(64, 64, 4, 1, None, 96), "0.355 ms, 128 x 64 takes 0.367", capability=90),
    _rule("forward", 128, 4, _tile(64, 32, 4, 2, None, 160), "0.699 ms, 128 x 32 takes 0.752", capability=90),
    _rule("forward", 256, 4, _tile(128, 16, 8, 1, None, 672), "2.51 ms, 64 x 32 takes 3.13", capability=90),
    _rule("dkdv", 64, 4, _tile(64, 128, 8, 1, None, 288), "0.619 ms, 32 x 64 takes 0.678", capability=90),
    _rule("dkdv", 128, 4, _tile(16, 64, 4, 1, None, 608), "2.11 ms, 32 x 64 takes 2.61", capability=90),
    _rule("dkdv", 256, 4, _tile(16, 16, 4, 1, None, 608), "10.4 ms, 16 x 64 takes 20.3", capability=90),
    _rule("dq", 64, 4, _tile(64, 64, 4, 1, None, 160), "0.453 ms, 64 x 32 takes 0.532", capability=90),
    _rule("dq", 128, 4, _tile(64, 16, 4, 1, None, 320), "1.34 ms, 64 x 32 takes 1.43", capability=90),
    _rule("dq", 256, 4, _tile(64, 16, 4, 1, None, 1664), "5.05 ms, 16 x 16 takes 8.35", capability=90),
    _rule("dbias", 64, 4, _tile(64, 64, 4, 1, None, 168), "0.433 ms, 64 x 32 takes 0.583", capability=90),
    _rule("dbias", 128, 4, _tile(64, 32, 4, 1, None, 672), "1.27 ms, 64 x 16 takes 1.90", capability=90),
    _rule(
        "dbias",
        256,
        4,
        _tile(64, 16, 4, 1, None, 1600),
        "12.0 ms; everything smaller takes 100 and more",
        capability=90,
    ),
    _rule("dq_from_ds", 64, 4, _tile(128, 32, 4, 2), "0.201 ms, 32 x 32 takes 0.255", capability=90),
    # ----------------------------------------- float32 elsewhere (three TF32 passes): the largest tiles without spills
    _rule("forward", 64, 4, _tile(64, 32, 4, 1), "255 registers on sm_80; 64 x 64 spills 856 bytes"),
    _rule("forward", 128, 4, _tile(16, 32, 4, 1), "32 x 64 spills 392 bytes"),
    _rule("forward", 256, 4, _tile(16, 32, 8, 1, None, 64), "operands of 1 KiB a row"),
    _rule("dkdv", 64, 4, _tile(32, 32, 4, 1, None, 32), "255 registers on sm_80; 32 x 64 spills 496 bytes"),
    _rule("dkdv", 128, 4, _tile(16, 32, 8, 1, None, 64), "four split products of 128 columns"),
    _rule("dkdv", 256, 4, _tile(16, 16, 8, 1, None, 256), "operands of 1 KiB a row"),
    _rule("dq", 64, 4, _tile(32, 32, 4, 1, None, 32), "254 registers on sm_80; 64 x 32 spills 472 bytes"),
    _rule("dq", 128, 4, _tile(16, 32, 4, 1), "64 x 16 spills 312 bytes"),
    _rule("dq", 256, 4, _tile(16, 16, 8, 1, None, 256), "operands of 1 KiB a row"),
    _rule("dq_from_ds", 128, 4, _tile(32, 32, 4, 2), "one split product"),
    _rule("dq_from_ds", 256, 4, _tile(16, 32, 4, 1), "operands of 1 KiB a row"),
    _rule("dbias", 64, 4, _tile(32, 32, 4, 1), "255 registers on sm_80; 64 x 32 spills 32 bytes"),
    _rule("dbias", 128, 4, _tile(16, 32, 4, 1), "two split products of 128 columns"),
    _rule("dbias", 256, 4, _tile(16, 16, 8, 1, None, 256), "operands of 1 KiB a row"),
)


def shared_bytes(facts: Facts, tile: TileConfig) -> int:
    """Shared memory of a program, from above: the tiles that stay plus ``stages`` copies of the tiles that stream."""
    row = facts.width * facts.itemsize
    bias = tile.block_m * tile.block_n * facts.bias_itemsize if tile.stages > 1 else 0  # else it stays in registers
    score = tile.block_m * tile.block_n * facts.itemsize
    stay, stream = {
        "forward": (tile.block_m * row, 2 * tile.block_n * row + bias),
        "dkdv": (2 * tile.block_n * row + 2 * score, 2 * tile.block_m * row + bias),
        "dq": (2 * tile.block_m * row + score, 2 * tile.block_n * row + bias),
        "delta": (0, 0),
        "dq_from_ds": (
            0,
            tile.block_n * row + tile.block_m * tile.block_n * max(min(facts.bias_itemsize, 4), facts.itemsize),
        ),
        "dbias": (0, 2 * (tile.block_m + tile.block_n) * row + bias),
    }[facts.kernel]
    return stay + stream * max(1, tile.stages)


def choose_tile(facts: Facts) -> tuple[TileConfig, str]:
    """The measured tile of the table in force (see ``tables.active``) if it has one that fits, else ``choose_rule``'s.

    Raises:
        LookupError: no rule fits; names the nearest one.
    """
    table = tables.active(facts.gpu)
    row = table.find(facts) if table else None
    if table and row:
        tile = TileConfig(**row.tile)
        if shared_bytes(facts, tile) <= facts.shared_memory:
            return tile, row.why(table.gpu)
    tile, why = choose_rule(facts)
    return (tile if facts.capability == 90 else uncapped(tile)), why


def choose_rule(facts: Facts) -> tuple[TileConfig, str]:
    """The first rule for the kernel whose width covers the problem's and whose tile fits, with its reason.

    Raises:
        LookupError: no rule fits; names the nearest one.
    """
    nearest: Rule | None = None
    for rule in RULES:
        if rule.kernel != facts.kernel or rule.itemsize != facts.itemsize or rule.max_width < facts.width:
            continue
        if (rule.dense_only and not facts.has_dense) or facts.columns > rule.max_columns:
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
    """The tile without its register cap. Those of rules were measured on Hopper with 16-byte loads; else they spill."""
    return tile if tile.registers is None else replace(tile, registers=None)


def shrink(tile: TileConfig, M: int, N: int) -> TileConfig:
    """No side longer than the power of two that holds its axis: a sequence of 20 does not pay for 64 rows."""
    block_m = min(tile.block_m, max(16, _power_of_two(M)))
    block_n = min(tile.block_n, max(16, _power_of_two(N)))
    if (block_m, block_n) == (tile.block_m, tile.block_n):
        return tile
    return replace(tile, block_m=block_m, block_n=block_n, warps=min(tile.warps, 4), registers=None)


def _power_of_two(length: int) -> int:
    return 1 << max(0, length - 1).bit_length()
