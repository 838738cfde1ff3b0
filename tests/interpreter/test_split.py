"""A forward pass whose keys are shared out among programs, and the kernel that adds the pieces up.

Rules are made to split at once, so that a few tiles of keys are several pieces; scratch starts as NaN.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import NamedTuple

import pytest
import torch
from test_bounds import Watch, watch  # noqa: F401  (a fixture)
from torch import Tensor

from biasflash import problem
from biasflash.backends.triton import forward_plan
from biasflash.backends.triton.config import TileConfig
from biasflash.backends.triton.forward_plan import RULE, SplitRule, choose_split, forward_recipe, packed, resident
from biasflash.backends.triton.operands import Device, Layout
from biasflash.backends.triton.recipe import Recipe
from biasflash.problem import Problem
from biasflash.testing import errors
from biasflash.testing.case import DTYPES, Bias, Call, Case, Mask

H200 = Device(shared_memory=232448, multiprocessors=132, gpu="NVIDIA H200")
#: pieces as small as two tiles of 64 keys, whatever the number of programs
EAGER = SplitRule(fill=10**6, goal=10**6, least_keys=1, keys_per_query=0, piece_keys=64)


class Found(NamedTuple):
    out: Tensor
    lse: Tensor
    low: Tensor


def described(call: Call) -> tuple[Problem, list[Tensor]]:
    """The call's problem, and its terms padded to full rank."""
    kinds = ["dense"] * len(call.bias) + ["keep"] * len(call.mask)
    causal = problem.check_causal(call.causal)
    facts = problem.build(call.q, call.k, call.v, [*call.bias, *call.mask], kinds, causal, call.scale)
    return facts, [t.detach()[(None,) * (call.q.dim() - t.dim())] for t in (*call.bias, *call.mask)]


def layout(t: Tensor) -> Layout:
    return Layout(t.stride(), t.data_ptr() % 16 == 0)


def run(call: Call) -> tuple[Found, Recipe]:
    """What the plan of the call computes, every buffer filled with NaN before."""
    p, terms = described(call)
    rows = {"q": call.q.detach(), "k": call.k.detach(), "v": call.v.detach()}
    rows["out"] = rows["q"].new_full((*p.batch, p.M, p.Hq, p.Dv), math.nan)
    lse = torch.full((*p.batch, p.Hq, p.M), math.nan)
    layouts = {name: layout(t) for name, t in rows.items()}
    recipe = forward_recipe(p, H200, layouts, [layout(t) for t in terms])
    low = lse.clone()
    tensors = {**rows, "lse": lse, "low": low}
    tensors |= {f"bias{i}": t.view(torch.uint8) if t.dtype == torch.bool else t for i, t in enumerate(terms)}
    tensors |= {name: torch.full((count,), math.nan) for name, count in recipe.scratch}
    with errors.float32_products():
        for launch in recipe.launches:
            launch.run(tensors)
    return Found(rows["out"], lse, low), recipe


def must_split(case: Case, dtype: str, pieces: int) -> Found:
    """Runs and judges the case, and sees that its keys really come in so many pieces; twice, for equal bits."""
    call = case.build("cpu", dtype)
    found, recipe = run(call)
    assert [x.kernel.__name__ for x in recipe.launches] == ["forward_kernel", "merge_kernel"]
    assert recipe.launches[1].arguments["pieces"] == pieces
    for first, again in zip(found, run(call)[0], strict=True):
        torch.testing.assert_close(again, first, rtol=0, atol=0, equal_nan=True)
    errors.judge(call, {"out": found.out, "lse": found.lse})
    return found


@pytest.fixture
def _eager(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forward_plan, "RULE", EAGER)


def small(name: str, M: int, N: int, H: int = 1, **more: object) -> Case:
    shape: dict[str, object] = {"batch": (1,), "M": M, "N": N, "Hq": H, "Hkv": H, "D": 16, "Dv": 16}
    return Case(name=name, why="keys in pieces", tags=frozenset(), **(shape | more))  # type: ignore[arg-type]


#: pieces of 128 keys: the last one of 300 keys is a tile shorter, and its last tile moves back
CASES = [
    (small("plain", 17, 300), 3),
    (small("whole pieces", 16, 256), 4),
    (small("three batch axes, odd widths", 5, 257, H=2, batch=(2, 1, 2), D=24, Dv=7), 3),
    (small("last piece of one key", 3, 257), 3),
    (small("causal, as many queries", 200, 200, causal=True), 2),
    (small("causal, fewer queries", 70, 300, causal=True), 3),
    (small("causal top-left, more keys", 300, 400, causal="top-left"), 3),
    (small("causal, more queries", 300, 200, causal=True), 2),
    (small("document", 40, 300, masks=(Mask(shape="BHMN", fill="window"),)), 3),
    (small("rows that see nothing", 40, 300, H=2, masks=(Mask(shape="1HMN", fill="some rows empty"),)), 3),
    (small("nobody sees anything", 4, 300, masks=(Mask(shape="11MN", fill="none"),)), 3),
    (small("padding", 9, 300, batch=(2,), masks=(Mask(shape="B11N", fill="key padding"),), poison=True), 3),
    (small("bias", 17, 296, H=2, batch=(2,), biases=(Bias(shape="1HMN"), Bias(shape="BH1N"))), 3),
    (small("bias of -inf", 17, 300, biases=(Bias(shape="BHMN", values="some -inf"),)), 3),
    (small("bias of the lowest number", 17, 300, biases=(Bias(shape="BHMN", values="lowest", dtype="fp32"),)), 3),
    (small("bias, mask, causal", 50, 300, biases=(Bias(shape="11MN"),), masks=(Mask(shape="MN"),), causal=True), 3),
    (small("grouped", 20, 300, Hq=4, Hkv=2), 3),
    (small("many pieces", 2, 1300), 11),
    (small("sliced", 17, 300, strides="sliced"), 3),
    (small("unaligned", 17, 300, strides="unaligned", Dv=8), 3),
]


#: one dtype a case: half the time, and every piece of code still runs in both
IN_TURN = [(case, pieces, ("fp32", "fp16")[i % 2]) for i, (case, pieces) in enumerate(CASES)]


@pytest.mark.usefixtures("_eager")
@pytest.mark.parametrize(("case", "pieces", "dtype"), IN_TURN, ids=lambda x: x.name if isinstance(x, Case) else str(x))
def test_pieces_add_up(case: Case, pieces: int, dtype: str) -> None:
    must_split(case, dtype, pieces)


@pytest.mark.usefixtures("_eager")
def test_more_pieces_than_are_added_at_a_time() -> None:
    must_split(small("seventy pieces", 1, 70 * 128 - 3), "fp32", 70)


@pytest.mark.usefixtures("_eager")
@pytest.mark.parametrize("case", [c for c, _ in CASES if c.masks or c.biases], ids=lambda c: c.name)
def test_lse_is_a_pair_of_floats(case: Case) -> None:
    """With scores of a million, whose last digits lse alone cannot hold: at most twice as far off as without pieces."""
    call = case.build("cpu", "fp32")
    far = torch.full((1, 1, 1, 1), 1.0e6)
    call = replace(call, bias=[*call.bias, far])
    wanted = errors.solve(call, torch.float64, backward=False)["lse"]
    split = run(call)[0]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(forward_plan, "RULE", RULE)
        whole, recipe = run(call)
    assert len(recipe.launches) == 1
    assert torch.equal(split.lse == -math.inf, wanted == -math.inf)
    seen = wanted > -1e30
    assert not split.low[wanted == -math.inf].any()

    def worst(found: Found) -> float:
        return float((found.lse.double() + found.low.double() - wanted)[seen].abs().max()) if seen.any() else 0.0

    assert worst(split) <= 2 * worst(whole) + 2.0**-24 * 1.0e6


# ----------------------------------------------------------------------------------------- one query, heads in groups

DECODE: dict[str, object] = {"Hq": 6, "Hkv": 2, "batch": (2,)}
PACKED = [
    small("no bias", 1, 300, **DECODE),
    small("causal", 1, 300, causal=True, **DECODE),
    small("bias of every head", 1, 296, biases=(Bias(shape="BHMN"), Bias(shape="1H11")), **DECODE),
    small("bias of all heads", 1, 300, biases=(Bias(shape="B11N"),), **DECODE),
    small("transposed", 1, 300, biases=(Bias(shape="BHMN", strides="transposed"),), strides="transposed", **DECODE),
    small("padding", 1, 300, masks=(Mask(shape="B11N", fill="key padding"),), poison=True, **DECODE),
]
APART = [
    small("heads with their own masks", 1, 300, masks=(Mask(shape="BHMN"),), **DECODE),
    small("top-left", 1, 300, causal="top-left", **DECODE),
    small("two queries", 2, 300, **DECODE),
]


def tile_of(recipe: Recipe) -> tuple[int, int]:
    """Query heads and query rows as the kernel counts them."""
    given = recipe.launches[0].arguments
    return given["heads"], given["M"]


@pytest.mark.usefixtures("_eager")
@pytest.mark.parametrize("dtype", ["fp16"])
@pytest.mark.parametrize("case", PACKED, ids=lambda c: c.name)
def test_heads_of_a_group_are_rows_of_one_tile(case: Case, dtype: str) -> None:
    must_split(case, dtype, 3)
    assert tile_of(run(case.build("cpu", dtype))[1]) == (2, 3)


@pytest.mark.usefixtures("_eager")
@pytest.mark.parametrize("case", APART, ids=lambda c: c.name)
def test_heads_that_stay_apart(case: Case) -> None:
    call = case.build("cpu", "fp32")
    found, recipe = run(call)
    assert tile_of(recipe) == (6, case.M)
    errors.judge(call, {"out": found.out, "lse": found.lse})


def test_without_pieces_groups_are_packed_too() -> None:
    call = PACKED[2].build("cpu", "fp32")
    found, recipe = run(call)
    assert len(recipe.launches) == 1
    assert tile_of(recipe) == (2, 3)
    errors.judge(call, {"out": found.out, "lse": found.lse})


@pytest.mark.usefixtures("_eager")
@pytest.mark.parametrize("name", ["last piece of one key", "bias, mask, causal", "grouped", "many pieces"])
def test_every_access_lies_inside_a_tensor(name: str, watch: Watch) -> None:  # noqa: F811
    case = next(c for c, _ in CASES if c.name == name)
    run(case.build("cpu", "fp32"))
    assert not watch.faults, f"{len(watch.faults)} stray accesses, the first: {watch.faults[0]}"


# --------------------------------------------------------------------------------------------------------- the rule

TILE = TileConfig(block_m=64, block_n=64, warps=4, stages=3)


def asked(M: int, N: int, B: int = 1, H: int = 8, D: int = 64, causal: bool | str = False, **more: object) -> Problem:
    case = small("rule", M, N, **({"batch": (B,), "Hq": H, "Hkv": H, "D": D, "Dv": D, "causal": causal} | more))
    q = torch.empty((*case.batch, M, case.Hq, D), dtype=DTYPES["bf16"], device="meta")
    k = torch.empty((*case.batch, N, case.Hkv, D), dtype=DTYPES["bf16"], device="meta")
    return problem.build(q, k, k, (), (), problem.check_causal(causal), None)


@pytest.mark.parametrize(
    ("p", "pieces", "keys"),
    [
        (asked(1, 65536), 128, 512),  # 132 pieces of 497 keys, rounded up to whole tiles
        (asked(100, 16384), 64, 256),  # 66 would fill it; at least 256 keys each
        (asked(100, 16384, B=16), 5, 3328),
        (asked(1024, 1024, B=2), None, None),  # as many queries as keys: sums cost more than they save
        (asked(64, 16384, causal="top-left"), None, None),  # 64 keys are seen
        (asked(4096, 4096, B=4), None, None),  # 2,048 programs
        (asked(64, 1000), None, None),  # too short
        (asked(4, 8192, B=30, H=4, D=256), 5, 1664),  # two programs of this width on a multiprocessor
        (asked(4096, 4096, H=7), None, None),  # 448 programs are nearly a wave
    ],
    ids=str,
)
def test_pieces_by_rule(p: Problem, pieces: int | None, keys: int | None) -> None:
    split = choose_split(p, TILE, 132, RULE)
    if pieces is None:
        assert split is None
        return
    assert split is not None
    assert (split.pieces, split.tiles * TILE.block_n) == (pieces, keys)
    assert (split.pieces - 1) * split.tiles * TILE.block_n < p.N <= split.pieces * split.tiles * TILE.block_n


def test_one_wave_of_large_tiles_is_enough() -> None:
    """128 x 64 with 8 warps at width 128: one program fills a multiprocessor, and 128 of them the GPU."""
    large = replace(TILE, block_m=128, warps=8)
    assert resident(asked(2048, 2048, D=128), large) == 1
    assert choose_split(asked(2048, 16384, D=128), large, 132, RULE) is None
    assert choose_split(asked(128, 2048, D=128), large, 132, RULE) is not None


@pytest.mark.parametrize("M", [1, 16, 100, 1000])
@pytest.mark.parametrize("B", [1, 3, 16])
@pytest.mark.parametrize("N", [1024, 5000, 65536])
def test_scratch_stays_small(M: int, N: int, B: int) -> None:
    p = asked(M, N, B=B)
    split = choose_split(p, TILE, 132, RULE)
    if split is not None:
        assert split.pieces >= 2
        assert 4 * split.pieces * B * 8 * M * (p.Dv + 2) <= RULE.scratch_bytes
        assert split.tiles * TILE.block_n >= RULE.piece_keys


def test_the_plan_says_so() -> None:
    p = asked(1, 65536, H=32, Hkv=8)
    shapes = {"q": (1, 1, 32, 64), "k": (1, 65536, 8, 64), "v": (1, 65536, 8, 64), "out": (1, 1, 32, 64)}
    rows = {name: layout(torch.empty(shape, device="meta")) for name, shape in shapes.items()}
    parts, merge = map(str, forward_recipe(p, H200, rows, ()).launches)
    assert parts.startswith("forward: 1024 programs of 16 x 64")
    assert parts.endswith("8 query tiles would not fill 132 multiprocessors: pieces of 512 keys)")
    assert merge.startswith("merge: 32 programs of 1 x 64")
    assert merge.endswith("adds 128 pieces of each row, in order)")


def test_packing_is_a_view() -> None:
    p = asked(1, 300, B=2, H=6, Hkv=2)
    rows = {"q": Layout((600, 999, 64, 1), True), "out": Layout((384, 384, 64, 1), True)}
    found = packed(p, rows, ())
    assert found is not None
    assert found[1]["q"].strides == (600, 64, 192, 1)
    assert (found[0].M, found[0].Hq, found[0].Hkv) == (3, 2, 2)
