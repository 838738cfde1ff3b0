"""Masks as lists of tiles: what the lists hold, and a forward pass that walks along them.

Rules are made to list at once; scratch starts as garbage, so that what is not written would be met.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, replace

import pytest
import torch
from test_bounds import Watch, watch  # noqa: F401  (a fixture)
from test_split import described, layout, small
from torch import Tensor

from biasflash.backends.triton import forward_plan, tile_plan, window_plan
from biasflash.backends.triton.config import TileConfig
from biasflash.backends.triton.forward_plan import SplitRule, forward_recipe
from biasflash.backends.triton.operands import Device, Operands, Slot
from biasflash.backends.triton.plans import contiguous_recipes
from biasflash.backends.triton.recipe import Recipe
from biasflash.backends.triton.tile_plan import RULE, ListRule, choose_lists, listed_masks
from biasflash.problem import Problem, Term
from biasflash.testing import errors
from biasflash.testing.case import Bias, Call, Case, Mask
from biasflash.testing.conformance import run_case

H200 = Device(shared_memory=232448, multiprocessors=132, gpu="NVIDIA H200")
NEVER = SplitRule(fill=0)
#: every mask with both axes
ALWAYS = ListRule(readers=0, scores=0, least_tiles=0)


@pytest.fixture(autouse=True)
def _eager(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forward_plan, "RULE", NEVER)
    monkeypatch.setattr(tile_plan, "RULE", ALWAYS)
    monkeypatch.setattr(window_plan, "rules", lambda device: ())  # windows of up to 192 keys walk along no lists


def prepare(call: Call) -> tuple[Recipe, dict[str, Tensor]]:
    """The plan of a call and its buffers: results are NaN, integers in scratch are huge."""
    p, terms = described(call)
    tensors = {"q": call.q.detach(), "k": call.k.detach(), "v": call.v.detach()}
    tensors["out"] = tensors["q"].new_full((*p.batch, p.M, p.Hq, p.Dv), math.nan)
    layouts = {name: layout(t) for name, t in tensors.items()}
    recipe = forward_recipe(p, H200, layouts, [layout(t) for t in terms])
    tensors["lse"] = torch.full((*p.batch, p.Hq, p.M), math.nan)
    tensors["low"] = tensors["lse"].clone()
    tensors |= {f"bias{i}": t.view(torch.uint8) if t.dtype == torch.bool else t for i, t in enumerate(terms)}
    tensors |= {name: torch.full((count,), math.nan) for name, count in recipe.scratch}
    return recipe, tensors


def run(call: Call) -> tuple[Recipe, dict[str, Tensor]]:
    recipe, tensors = prepare(call)
    with errors.float32_products():
        for each in recipe.launches:
            each.run(tensors)
    return recipe, tensors


def must_list(case: Case, dtype: str, mask: Tensor | None = None) -> None:
    """Runs and judges the case, twice for equal bits; ``mask`` takes the place of the case's own."""
    call = case.build("cpu", dtype)
    if mask is not None:
        assert mask.shape == call.mask[0].shape
        call = replace(call, mask=[mask, *call.mask[1:]])
    recipe, found = run(call)
    assert [x.kernel.__name__ for x in recipe.launches] == ["count_kernel", "list_kernel", "forward_kernel"]
    again = run(call)[1]
    for name in ("out", "lse", "low"):
        torch.testing.assert_close(again[name], found[name], rtol=0, atol=0, equal_nan=True)
    errors.judge(call, {"out": found["out"], "lse": found["lse"]})


def documents(M: int, N: int, *ends: int) -> Tensor:
    """``[M, N]``: each query sees the keys of its own document; ``ends`` are where documents end."""

    def number(length: int) -> Tensor:
        return (torch.arange(length)[:, None] >= torch.tensor(ends)).sum(-1)

    return number(M)[:, None] == number(N)


def blocks(M: int, N: int, share: float) -> Tensor:
    """``[M, N]``: random tiles of 64 x 64 are visible, others empty; every third row sees nothing."""
    tiles = torch.rand(-(-M // 64), -(-N // 64), generator=torch.Generator().manual_seed(3)) < share
    mask = tiles.repeat_interleave(64, 0).repeat_interleave(64, 1)[:M, :N].clone()
    mask[: M // 2 : 3] = False
    return mask


WINDOW, EMPTY_ROWS, NOTHING, EVERYTHING = (
    Mask(shape="11MN", fill=fill) for fill in ("window", "some rows empty", "none", "all")
)
CASES = [
    small("window", 200, 200, masks=(WINDOW,)),
    small("window, causal", 200, 200, masks=(WINDOW,), causal=True),
    small("all, causal, fewer queries", 130, 300, masks=(EVERYTHING,), causal=True),
    small("all, causal top-left, more keys", 130, 300, masks=(EVERYTHING,), causal="top-left"),
    small("all, causal, more queries", 300, 130, masks=(EVERYTHING,), causal=True),
    small("window, whole tiles", 128, 256, masks=(WINDOW,)),
    small("rows that see nothing", 130, 150, masks=(EMPTY_ROWS,)),
    small("nobody sees anything", 70, 130, masks=(NOTHING,)),
    small("everybody sees everything", 128, 200, masks=(EVERYTHING,)),
    small("shared by heads", 100, 130, H=3, batch=(2,), masks=(Mask(shape="B1MN", fill="window"),)),
    small("shared by the batch", 100, 130, H=2, batch=(3,), masks=(Mask(shape="1HMN", fill="window"),)),
    small("every axis", 100, 130, H=2, batch=(2,), masks=(Mask(shape="BHMN", fill="window"),)),
    small("two batch axes", 70, 130, H=2, batch=(2, 2), masks=(Mask(shape="B11MN", fill="window"),)),
    small("inner batch axis", 70, 130, H=2, batch=(2, 2), masks=(Mask(shape="1B1MN", fill="window"),)),
    small("grouped", 100, 130, Hq=4, Hkv=2, masks=(Mask(shape="1HMN", fill="window"),)),
    small("bias beside", 100, 136, H=2, batch=(2,), biases=(Bias(shape="1HMN"), Bias(shape="1H1N")), masks=(WINDOW,)),
    small("bias of -inf beside", 100, 130, H=2, biases=(Bias(shape="11MN", values="some -inf"),), masks=(WINDOW,)),
    small("lowest bias beside", 70, 130, H=2, biases=(Bias(shape="11MN", values="lowest"),), masks=(WINDOW,)),
    small("two masks that broadcast alike", 100, 200, masks=(WINDOW, Mask(shape="MN"))),
    small("two masks that do not", 100, 130, H=2, masks=(WINDOW, Mask(shape="1HMN", fill="window"))),
    small("rows and keys in masks of their own", 90, 130, masks=(Mask(shape="11M1"), Mask(shape="111N"), WINDOW)),
    small("transposed", 100, 130, masks=(Mask(shape="11MN", fill="window", strides="transposed"),)),
    small("unaligned", 100, 130, masks=(Mask(shape="11MN", fill="window", strides="unaligned"),)),
    small("expanded", 70, 130, H=2, batch=(2,), masks=(Mask(shape="11MN", fill="window", strides="expanded"),)),
    small("few queries, many keys", 5, 700, masks=(WINDOW,)),
]


#: one dtype a case: half the time, and every piece of code still runs in both
DTYPES_IN_TURN = [("fp32", "fp16")[i % 2] for i in range(len(CASES))]
IN_TURN = [pytest.param(c, d, id=f"{c.name}-{d}") for c, d in zip(CASES, DTYPES_IN_TURN, strict=True)]


@pytest.mark.parametrize(("case", "dtype"), IN_TURN)
def test_along_the_lists(case: Case, dtype: str) -> None:
    must_list(case, dtype)


PLANES = {
    "documents": documents(250, 250, 64, 100, 192, 240),
    "documents of one tile": documents(256, 256, 64, 128, 192),
    "sparse blocks": blocks(250, 250, 0.3),
    "dense blocks": blocks(250, 250, 0.9),
}


@pytest.mark.parametrize("causal", [False, "bottom-right", "top-left"])
@pytest.mark.parametrize("name", PLANES)
def test_sparse_masks(name: str, causal: bool | str) -> None:
    mask = PLANES[name]
    must_list(small(name, *mask.shape, H=2, masks=(Mask(shape="MN"),), causal=causal), "fp32", mask)


def test_keys_that_a_key_mask_hides_are_not_read() -> None:
    """The mask of keys comes first in the case, its keys hold NaN; the other mask is in the lists."""
    case = small("padding", 100, 200, masks=(Mask(shape="111N", fill="key padding"), WINDOW), poison=True)
    must_list(case, "fp32")


def test_empty_tiles_are_not_read_and_full_ones_not_masked() -> None:
    """Documents of whole tiles: NaN in values of others does no harm; once listed, the mask may say anything."""
    mask = PLANES["documents of one tile"]
    call = small("documents", *mask.shape, masks=(Mask(shape="MN"),)).build("cpu", "fp32")
    wanted = run(replace(call, mask=[mask]))[1]["out"]
    recipe, tensors = prepare(replace(call, mask=[mask.clone()]))
    tensors["v"][:, 64:] = math.nan
    *listing, forward = recipe.launches
    for each in listing:
        each.run(tensors)
    tensors["bias0"].zero_()
    with errors.float32_products():
        forward.run(tensors)
    assert torch.equal(tensors["out"][:, :64], wanted[:, :64])
    assert tensors["out"][:, 64:].isnan().all()


@pytest.mark.parametrize("name", ["window, causal", "every axis", "few queries, many keys", "two masks that do not"])
def test_every_access_lies_inside_a_tensor(name: str, watch: Watch) -> None:  # noqa: F811
    call = next(c for c in CASES if c.name == name).build("cpu", "fp32")
    recipe, tensors = prepare(call)
    tensors |= {n: t.zero_() for n, t in tensors.items() if n.endswith("lists")}
    for each in recipe.launches:
        each.run(tensors)
    assert not watch.faults, f"{len(watch.faults)} stray accesses, the first: {watch.faults[0]}"


# ------------------------------------------------------------------------------------------------------------ gradients


def walks_along_lists(case: Case) -> set[str]:
    """Names of the kernels of one forward and backward pass that take lists."""
    facts, _ = described(case.build("cpu", "fp32"))
    recipes = contiguous_recipes(facts, H200).values()
    return {x.kernel.__name__ for r in recipes for x in r.launches if x.arguments.get("LISTS")}


@pytest.mark.usefixtures("fresh_recipes")
@pytest.mark.parametrize(("case", "dtype"), IN_TURN)
def test_gradients(case: Case, dtype: str) -> None:
    assert walks_along_lists(case) == {"forward_kernel", "dq_kernel", "dkdv_kernel"}
    result = run_case("triton", replace(case, return_lse=True), "cpu", dtype)
    assert result.status == "passed", result.message


@pytest.mark.usefixtures("fresh_recipes")
def test_stored_score_gradients_skip_no_tile() -> None:
    case = small("full bias", 100, 136, biases=(Bias(shape="BHMN"),), masks=(WINDOW,))
    assert walks_along_lists(case) == {"forward_kernel"}
    result = run_case("triton", case, "cpu", "fp32")
    assert result.status == "passed", result.message


# ------------------------------------------------------------------------------------------------------ what lists hold

TILES = {
    "tall": TileConfig(block_m=64, block_n=32, warps=4, stages=1),
    "small": TileConfig(block_m=32, block_n=32, warps=4, stages=1),
    "wide": TileConfig(block_m=32, block_n=64, warps=4, stages=1),
}


def wanted_rows(keep: Tensor, tile: TileConfig, by_key: bool) -> list[list[list[int]]]:
    """``[plane][own tile] -> [mixed tiles, full tiles]`` of ``keep [planes, M, N]``, by plain slicing."""
    M, N = keep.shape[1:]
    rows, columns = range(0, M, tile.block_m), range(0, N, tile.block_n)
    found = []
    for plane in keep:
        cells = [[plane[i : i + tile.block_m, j : j + tile.block_n] for j in columns] for i in rows]
        if by_key:
            cells = [list(column) for column in zip(*cells, strict=True)]
        for line in cells:
            counts = [int(cell.sum()) for cell in line]
            full = [c == tile.block_m * tile.block_n for c in counts]
            mixed = [i for i, c in enumerate(counts) if c and not full[i]]
            found.append([mixed, [i for i, f in enumerate(full) if f]])
    return found  # type: ignore[return-value]


@dataclass(frozen=True)
class Listed:
    """A mask ``(*#B, #Hq, M, N)`` in a call of ``batch`` and ``heads``."""

    mask: Tensor
    batch: tuple[int, ...] = (1,)
    heads: int = 1
    causal_shift: int | None = None

    def problem(self) -> Problem:
        shape = tuple(self.mask.shape)
        return Problem(
            batch=self.batch,
            M=shape[-2],
            N=shape[-1],
            Hq=self.heads,
            Hkv=self.heads,
            D=16,
            Dv=16,
            dtype=torch.float32,
            device=torch.device("cpu"),
            terms=(Term(kind="keep", shape=shape, dtype=torch.bool, trainable=False),),
            causal_shift=self.causal_shift,
            scale=1.0,
            trainable=(True, True, True),
        )


def rows_of(p: Problem) -> dict[str, object]:
    q = torch.empty((*p.batch, p.M, p.Hq, p.D), device="meta")
    k = torch.empty((*p.batch, p.N, p.Hq, p.D), device="meta")
    return {"q": layout(q), "k": layout(k), "v": layout(k), "out": layout(q)}


RANDOM = torch.rand(2, 3, 150, 210, generator=torch.Generator().manual_seed(5)) < 0.5
LISTED = {
    "documents": Listed(documents(250, 250, 64, 100, 192, 240)[None, None]),
    "documents, causal": Listed(documents(250, 250, 64, 100, 192, 240)[None, None], causal_shift=0),
    "everything, causal": Listed(torch.ones(1, 1, 150, 210, dtype=torch.bool), causal_shift=60),
    "heads and batch": Listed(RANDOM & documents(150, 210, 70, 90), batch=(2,), heads=3),
    "heads": Listed((RANDOM | ~documents(150, 210, 70, 90))[:1], batch=(4,), heads=3),
    "batch": Listed((RANDOM | ~documents(150, 210, 70, 90))[:, :1], batch=(2,), heads=5),
    "more tiles than are sorted at a time": Listed(documents(40, 32 * 300, 4000, 9000)[None, None]),
}


@pytest.mark.parametrize("name", LISTED)
def test_what_the_lists_hold(name: str) -> None:
    listed = LISTED[name]
    p, mask = listed.problem(), listed.mask
    ops = Operands(p, H200, rows_of(p), [layout(mask)])  # type: ignore[arg-type]
    lists = choose_lists(ops, {"tall": TILES["tall"], "small": TILES["small"]}, {"wide": TILES["wide"]}, ALWAYS)
    assert lists is not None
    assert lists.granule == (32, 32)
    tensors = {n: torch.full((c,), math.nan) for n, c in lists.scratch().items()} | {"bias0": mask.view(torch.uint8)}
    for each in lists.launches():
        each.run(tensors)
    keep = mask.flatten(0, -3)
    if p.causal_shift is not None:
        keep = keep & (torch.arange(p.N) <= torch.arange(p.M)[:, None] + p.causal_shift)
    for kernel, tile in TILES.items():
        by_key = kernel == "wide"
        others = -(-p.M // tile.block_m) if by_key else -(-p.N // tile.block_n)
        rows = tensors[f"{kernel}_lists"].view(torch.int32)[:-1].view(-1, 2 * others + 2).tolist()
        found = [[row[2 : 2 + row[0]], row[2 + others : 2 + others + row[1]]] for row in rows]
        assert found == wanted_rows(keep, tile, by_key), kernel


@pytest.mark.parametrize("name", ["heads and batch", "heads", "batch"])
def test_which_plane_a_head_reads(name: str) -> None:
    p = LISTED[name].problem()
    ops = Operands(p, H200, rows_of(p), [layout(LISTED[name].mask)])  # type: ignore[arg-type]
    lists = choose_lists(ops, {"forward": TILES["small"]}, {}, ALWAYS)
    assert lists is not None
    *strides, _, _ = [(code - 3) // 2 for code in lists.arguments("forward")["plane_strides"]]
    B, H = LISTED[name].mask.shape[:2]
    for b, h in itertools.product(range(p.batch[0]), range(p.Hq)):
        assert b * strides[0] + h * strides[1] == (b if B > 1 else 0) * H + (h if H > 1 else 0)


# ------------------------------------------------------------------------------------------------------------- the rule


def asked(*masks: str, B: int = 4, H: int = 16, M: int = 4096, trained: bool = False) -> Operands:
    """Self-attention with masks as words of ``1`` and letters for ``(B, Hq, M, N)``."""
    sizes = (B, H, M, M)
    shapes = [tuple(1 if c == "1" else n for c, n in zip(word, sizes, strict=True)) for word in masks]
    terms = tuple(Term(kind="keep", shape=shape, dtype=torch.bool, trainable=False) for shape in shapes)
    p = replace(
        Listed(torch.empty(1, 1, M, M, dtype=torch.bool, device="meta"), (B,), H).problem(),
        terms=terms,
        trainable=(trained,) * 3,
    )
    planes = [torch.empty(shape, dtype=torch.bool, device="meta") for shape in shapes]
    return Operands(p, H200, rows_of(p), [layout(t) for t in planes])  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("ops", "masks"),
    [
        (asked("B1MN"), (0,)),  # 16 heads read each byte
        (asked("11MN"), (0,)),
        (asked("BHMN"), ()),  # one
        (asked("BHMN", trained=True), ()),  # three
        (asked("B1MN", H=2), ()),  # two
        (asked("B1MN", H=2, trained=True), (0,)),  # six
        (asked("B11N"), ()),
        (asked("B1M1"), ()),
        (asked("B11N", "B1MN"), (1,)),
        (asked("B1MN", "11MN", "B1MN"), (0, 2)),
        (asked("BHMN", "11MN"), (1,)),
        (asked("B1MN", M=512), ()),  # too short
    ],
    ids=range(12),
)
def test_masks_by_rule(ops: Operands, masks: tuple[int, ...]) -> None:
    assert listed_masks(ops, RULE) == masks


def test_few_tiles_are_not_listed() -> None:
    ops = asked("B1MN")
    wide = TileConfig(block_m=1024, block_n=64, warps=4, stages=1)
    assert choose_lists(ops, {"forward": TILES["wide"]}, {}, RULE) is not None
    assert choose_lists(ops, {"forward": wide}, {}, RULE) is None


def test_the_plan_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tile_plan, "RULE", RULE)
    ops = asked("B1MN")
    mask = layout(torch.empty(4, 1, 4096, 4096, dtype=torch.bool, device="meta"))
    recipe = forward_recipe(ops.problem, H200, rows_of(ops.problem), [mask])  # type: ignore[arg-type]
    count, entries, forward = map(str, recipe.launches)
    assert count.endswith("every mask byte once, 16 heads read it)")
    assert entries.startswith("list: 256 programs")
    assert forward.endswith("along lists of mask tiles that hold anything, read by 16 heads)")
    assert Slot("forward_lists") in recipe.launches[-1].arguments.values()
