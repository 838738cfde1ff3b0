"""Tile rules: every supported problem has a tile on every supported GPU, and no rule stands where none reaches it."""

from __future__ import annotations

import dataclasses
import itertools
import re
from functools import cache

import pytest

pytest.importorskip("triton", reason="tile rules belong to the Triton backend")

from biasflash.backends.triton import config, tables
from biasflash.backends.triton.config import (
    RULES,
    Facts,
    Rule,
    TileConfig,
    choose_rule,
    choose_tile,
    shared_bytes,
    shrink,
)
from biasflash.problem import MAX_WIDTH

KERNELS = ("forward", "delta", "dkdv", "dq", "dq_from_ds", "dbias")
WIDTHS = (16, 32, 64, 128, 256)
#: shared memory that one program may take: consumer GPUs, A100, H100 and B200
SMALL, MIDDLE, LARGE = 99 * 1024, 163 * 1024, 227 * 1024

EVERYTHING = [
    Facts(
        kernel=kernel,
        width=width,
        columns=width + narrower,
        itemsize=itemsize,
        has_dense=dense,
        bias_itemsize=plane,
        is_padded=crowded,
        shared_memory=memory,
        capability=capability,
    )
    for kernel, width, narrower, itemsize, crowded, (memory, capability) in itertools.product(
        KERNELS, WIDTHS, WIDTHS, (2, 4), (False, True), ((SMALL, 86), (MIDDLE, 80), (LARGE, 90), (LARGE, 100))
    )
    if narrower <= width
    # no term; a mask; a bias of one row; a bias plane of 16 bits, of float32
    for dense, plane in ((False, 0), (False, 1), (True, 0), (True, 2), (True, 4))
]


def rule_of(facts: Facts) -> Rule:
    tile, why = choose_rule(facts)
    return next(r for r in RULES if r.kernel == facts.kernel and (r.tile, r.why) == (tile, why))


@cache
def chosen(*memories: int) -> frozenset[Rule]:
    """The rules that problems reach on GPUs of this much shared memory."""
    return frozenset(rule_of(facts) for facts in EVERYTHING if facts.shared_memory in memories)


def test_the_walk_covers_what_is_supported() -> None:
    assert max(WIDTHS) == MAX_WIDTH
    assert {rule.kernel for rule in RULES} == set(KERNELS)


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_tile_is_found_and_fits(kernel: str) -> None:
    for facts in EVERYTHING:
        if facts.kernel == kernel:
            for choose in (choose_rule, choose_tile):
                tile, why = choose(facts)
                assert shared_bytes(facts, tile) <= facts.shared_memory, facts
                assert why


@pytest.mark.parametrize("kernel", ["forward", "dkdv", "dq", "dbias"])
def test_many_biases_take_one_stage_before_nothing_fits(kernel: str) -> None:
    facts = dataclasses.replace(EVERYTHING[0], kernel=kernel, width=128, columns=256, has_dense=True, bias_itemsize=40)
    tile, _ = choose_rule(facts)
    assert tile.stages == 1
    assert shared_bytes(facts, tile) <= facts.shared_memory


def test_a_request_that_no_tile_fits_is_refused_with_the_nearest_rule() -> None:
    facts = dataclasses.replace(EVERYTHING[0], width=256, columns=512, itemsize=4, shared_memory=1024)
    with pytest.raises(LookupError, match=r"no tile rule fits .*the nearest is Rule\(kernel='forward'"):
        choose_tile(facts)


def test_without_a_table_the_rules_decide() -> None:
    with tables.using(None):
        for facts in EVERYTHING:
            assert choose_tile(facts) == choose_rule(facts)


def test_roomy_tiles_are_not_for_crowded_calls() -> None:
    roomy = Facts(kernel="dq", width=64, columns=128, itemsize=2, has_dense=True, bias_itemsize=2, shared_memory=LARGE)
    assert not roomy.is_crowded
    assert rule_of(roomy).crowded is False
    for more in ({"is_unaligned": True}, {"is_padded": True}, {"hides_pairs": True}):
        facts = dataclasses.replace(roomy, **more)
        assert facts.is_crowded
        assert rule_of(facts).crowded is None
    assert not dataclasses.replace(roomy, hides_pairs=True, has_dense=False).is_crowded


def test_every_rule_is_reached() -> None:
    unreached = [rule for rule in RULES if rule not in chosen(SMALL, MIDDLE, LARGE)]
    assert not unreached, f"never chosen: {unreached}"


def test_rules_for_less_shared_memory_say_so() -> None:
    """A rule that the largest GPUs never reach is a fall-back: its reason names the memory that it fits, truthfully.

    Or the largest have rules of their own there.
    """
    for rule in RULES:
        claim = re.fullmatch(r"fits (\d+) KiB of shared memory", rule.why)
        if claim is not None:
            assert rule in chosen(int(claim[1]) * 1024), rule
        elif rule not in chosen(LARGE):
            key = rule.kernel, rule.itemsize, rule.max_width
            own = {r.capability for r in RULES if (r.kernel, r.itemsize, r.max_width) == key}
            assert own >= {90, 100}, rule
            assert rule in chosen(MIDDLE), rule


@pytest.mark.parametrize(("kernel", "itemsize"), list(itertools.product(KERNELS, (2, 4))))
def test_rules_stand_in_order_of_width(kernel: str, itemsize: int) -> None:
    rules = [rule for rule in RULES if (rule.kernel, rule.itemsize) == (kernel, itemsize)]
    for capability in {rule.capability for rule in rules}:
        widths = [rule.max_width for rule in rules if rule.capability == capability]
        assert widths == sorted(widths)
    assert [rule.max_width for rule in rules if rule.capability is None][-1] == MAX_WIDTH


@pytest.mark.parametrize("rule", RULES, ids=lambda r: f"{r.kernel} {r.max_width} {r.itemsize} {r.tile}")
def test_tiles_are_what_kernels_can_take(rule: Rule) -> None:
    tile = rule.tile
    for side in (tile.block_m, tile.block_n):
        assert side >= 16, "tensor cores take tiles of 16 and more"
        assert side & (side - 1) == 0, "a power of two"
    assert tile.warps in (1, 2, 4, 8)
    assert tile.stages >= 1
    if tile.registers is not None:
        assert tile.registers % 8 == 0, "registers are handed out in eights"
        assert tile.registers * 32 * tile.warps <= 65536, "the register file of a multiprocessor"


@pytest.mark.parametrize(("M", "N"), list(itertools.product((1, 5, 16, 17, 33, 64, 65, 128, 4096), repeat=2)))
def test_shrunk_tiles_hold_short_axes_and_no_more(M: int, N: int) -> None:
    for tile in {rule.tile for rule in RULES}:
        if tile.keeps_sides:
            assert shrink(tile, M, N) == tile
            continue
        small = shrink(tile, M, N)
        for side, full, length in ((small.block_m, tile.block_m, M), (small.block_n, tile.block_n, N)):
            assert 16 <= side <= full
            assert side & (side - 1) == 0
            assert side == full or length <= side < max(2 * length, 32)
        if (small.block_m, small.block_n) == (tile.block_m, tile.block_n):
            assert small == tile
        else:
            assert (small.warps, small.stages) == (tile.warps, tile.stages)
            measured = shrink(dataclasses.replace(tile, keeps_warps=False), M, N)
            assert measured.registers is None, "a cap measured for another tile means nothing"
            assert measured.warps == min(tile.warps, 4)


def test_deciding_is_pure() -> None:
    """The same facts and table give the same tile; nothing is measured at call time."""
    few = EVERYTHING[::17]
    assert [choose_tile(f) for f in few] == [choose_tile(f) for f in few]
    assert isinstance(config.RULES, tuple)
    for rule in RULES:
        assert isinstance(rule.tile, TileConfig)
        assert hash(rule) == hash(rule)
