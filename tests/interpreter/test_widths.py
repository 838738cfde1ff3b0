"""Head widths that are not powers of two, held in two strips: every kernel, gradient and way of reading rows."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

import biasflash
from biasflash.backends.triton import geometry, operands, plans, widths, window_plan
from biasflash.testing import conformance
from biasflash.testing.case import DTYPES, Bias, Case, Mask
from biasflash.tile.strips import (
    add_dots,
    dot_strips,
    load_seen_strips,
    load_strips,
    row_products,
    scale_strips,
    store_strips,
    zero_strips,
)

KERNELS = ("forward", "delta", "dkdv", "dq", "dq_from_ds", "dbias")

# ------------------------------------------------------------------------------------------------------------- the rule


def test_strips_hold_every_width_and_spare_what_the_rule_wants() -> None:
    for itemsize in (2, 4):
        for width in range(1, 257):
            found = widths.strips(width, itemsize, 90)
            assert width <= sum(found) <= widths.padded(width)
            assert all(w >= 16 and w & (w - 1) == 0 for w in found)
            assert len(found) == 1 or itemsize == 4 or sum(found) <= 0.75 * widths.padded(width)
            assert itemsize == 2 or found[0] <= 128, "float32 is held in strips of 128 columns at most"
            assert sum(found[:-1]) < width, "a strip without a column of its own"


@pytest.mark.parametrize("capability", [75, 80, 86, 89, 94, 120])
def test_widths_stay_whole_where_operands_lie_in_registers(capability: int) -> None:
    assert all(len(widths.strips(width, 2, capability)) == 1 for width in range(1, 257))
    assert all(len(widths.strips(width, 4, capability)) == 1 for width in range(1, 129))


#: the rule, written out
TWO = {40: (32, 16), 48: (32, 16), 72: (64, 16), 80: (64, 16), 96: (64, 32), 160: (128, 32), 192: (128, 64)}
ONE = {1: 16, 16: 16, 17: 32, 24: 32, 32: 32, 56: 64, 64: 64, 112: 128, 128: 128, 200: 256, 256: 256}


@pytest.mark.parametrize(("width", "wanted"), [*TWO.items(), *((w, (whole,)) for w, whole in ONE.items())])
def test_strips_of_a_width(every_width_in_strips: None, width: int, wanted: tuple[int, ...]) -> None:
    assert widths.strips(width, 2, 90) == widths.strips(width, 4, 90) == wanted


# ----------------------------------------------------------------------------------------------------------- the pieces


@triton.jit
def copy_kernel(
    into_ptr, from_ptr, squares_ptr, seen_ptr, into_strides, from_strides, WIDTH: tl.constexpr, STRIPS: tl.constexpr,
    INTO_VEC: tl.constexpr, FROM_VEC: tl.constexpr, WIDE: tl.constexpr, HIDES: tl.constexpr,
):  # fmt: skip
    rows = tl.arange(0, 16)
    if HIDES:
        seen = tl.load(seen_ptr + rows) != 0
        strips = load_seen_strips(from_ptr, 3, rows, from_strides, seen, WIDTH, STRIPS, FROM_VEC, WIDE)
    else:
        strips = load_strips(from_ptr, 3, rows, from_strides, WIDTH, STRIPS, FROM_VEC, WIDE)
    tl.store(squares_ptr + rows, row_products(strips, strips))
    store_strips(into_ptr, 1, rows, into_strides, rows < 13, scale_strips(strips, 2.0), WIDTH, STRIPS, INTO_VEC, WIDE)


def codes(row: int, column: int, vec: int) -> tuple[int, ...]:
    return (geometry.code(0), geometry.code(0), geometry.code(row // max(vec, 1)), geometry.code(column))


@pytest.mark.parametrize("hides", [False, True], ids=["all", "seen"])
@pytest.mark.parametrize("wide", [False, True], ids=["32 bits", "64 bits"])
@pytest.mark.parametrize(("vec", "row", "column"), [(8, 200, 1), (1, 201, 1), (0, 401, 2), (0, 1, 23)])
@pytest.mark.parametrize("width", [20, 40, 48, 65, 80, 96])
def test_rows_are_copied_strip_by_strip(
    width: int, vec: int, row: int, column: int, wide: bool, hides: bool, every_width_in_strips: None
) -> None:
    """What lies beside a row is NaN, neither read nor written: strips are zero past the width, and in hidden rows."""
    columns = torch.arange(width) * column
    where = (torch.arange(3, 19) * row)[:, None] + columns[None, :]
    source = torch.full((20 * max(row, column * 100),), float("nan"), dtype=torch.float16)
    values = torch.randint(-4, 5, (16, width)).half()
    seen = torch.ones(16, dtype=torch.uint8)
    source[where] = values
    if hides:
        seen[::3] = 0
        values[::3] = 0
        source[where[::3]] = float("nan")
    target, squares = torch.full_like(source, 7.0), torch.empty(16)
    strips = widths.strips(width, 2, 90)
    strides = codes(row, column, vec)
    copy_kernel[(1,)](
        target, source, squares, seen, strides, strides, WIDTH=width, STRIPS=strips, INTO_VEC=vec, FROM_VEC=vec,
        WIDE=wide, HIDES=hides,
    )  # fmt: skip
    wanted = torch.full_like(source, 7.0)
    wanted[((torch.arange(1, 14) * row)[:, None] + columns[None, :])] = 2 * values[:13]
    assert torch.equal(target, wanted)
    assert torch.equal(squares, values.float().square().sum(1))


@triton.jit
def products_kernel(
    a_ptr, b_ptr, scores_ptr, sums_ptr, rows_ptr, strides, WIDTH: tl.constexpr, STRIPS: tl.constexpr
):  # fmt: skip
    at = tl.arange(0, 16)
    a = load_strips(a_ptr, 0, at, strides, WIDTH, STRIPS, 1, False)
    b = load_strips(b_ptr, 0, at, strides, WIDTH, STRIPS, 1, False)
    scores = dot_strips(a, b, "ieee")
    sums = zero_strips(16, STRIPS)
    for _ in range(2):
        sums = add_dots(sums, scores, b, "ieee")
    tl.store(scores_ptr + at[:, None] * 16 + at[None, :], scores)
    store_strips(sums_ptr, 0, at, strides, at < 16, sums, WIDTH, STRIPS, 1, False)
    tl.store(rows_ptr + at, row_products(a, b))


@pytest.mark.parametrize("width", [24, 40, 48, 80, 96])
def test_products_over_strips_are_products_over_the_width(width: int, every_width_in_strips: None) -> None:
    a, b = torch.randint(-4, 5, (2, 16, width)).float()  # exact in any order
    scores, sums, rows = torch.empty(16, 16), torch.empty(16, width), torch.empty(16)
    strips = widths.strips(width, 4, 90)
    products_kernel[(1,)](a, b, scores, sums, rows, codes(width, 1, 1), WIDTH=width, STRIPS=strips)
    assert torch.equal(scores, a @ b.T)
    assert torch.equal(sums, 2 * (a @ b.T) @ b)
    assert torch.equal(rows, (a * b).sum(1))


# ----------------------------------------------------------------------------------------------- the backend in strips


@pytest.fixture
def every_width_in_strips(monkeypatch: pytest.MonkeyPatch, fresh_recipes: None) -> None:
    """Also narrow float32, which the rules leave whole.

    Windows have kernels of their own, which hold widths whole: they are left out.
    """
    rules = tuple(widths.StripRule(itemsize=size, above=0, capabilities=(90,), why="tested") for size in (2, 4))
    monkeypatch.setattr(widths, "RULES", rules)
    monkeypatch.setattr(window_plan, "rules", lambda device: ())


def launches(case: Case, dtype: str) -> dict[str, operands.Launch]:
    """What a case runs, by kernel."""
    call = case.build(torch.device("cpu"), DTYPES[dtype], 0)
    kinds = ["dense"] * len(call.bias) + ["keep"] * len(call.mask)
    causal = biasflash.problem.check_causal(call.causal)
    facts = biasflash.problem.build(call.q, call.k, call.v, [*call.bias, *call.mask], kinds, causal, call.scale)
    recipes = plans.contiguous_recipes(facts, operands.device_facts(facts.device)).values()
    return {x.kernel.__name__.removesuffix("_kernel"): x for r in recipes for x in r.launches}


def must_pass(case: Case, dtype: str) -> None:
    result = conformance.run_case("triton", case, "cpu", dtype)
    assert result.status == "passed", result.message


def small(name: str, D: int, Dv: int = 0, **more: object) -> Case:
    shape: dict[str, object] = {"batch": (2,), "M": 20, "N": 33, "Hq": 2, "Hkv": 2, "D": D, "Dv": Dv or D}
    return Case(name=name, why="", tags=frozenset(), **(shape | more))  # type: ignore[arg-type]


FULL, SHARED = Bias(shape="BHMN"), Bias(shape="1HMN")
EVERY_STRUCTURE = (FULL, SHARED, Bias(shape="BHM1"), Bias(shape="111N"))
MIXED = [(24, 40), (40, 24), (48, 80), (96, 16), (64, 96), (72, 64)]


def test_the_cases_below_reach_every_width_in_strips(every_width_in_strips: None) -> None:
    stored = launches(small("stored", 48, 80, biases=(FULL,)), "fp16")
    found = stored | launches(small("every structure", 48, 80, biases=EVERY_STRUCTURE), "fp16")
    found |= launches(small("shared", 48, 80, biases=(SHARED,)), "fp16")
    for kernel in set(KERNELS) - {"delta"}:
        assert found[kernel].arguments["D_STRIPS"] == (32, 16), kernel
    for kernel in set(KERNELS) - {"dq_from_ds"}:
        assert found[kernel].arguments["DV_STRIPS"] == (64, 16), kernel


@pytest.mark.parametrize(
    ("D", "Dv", "dtype"),
    [
        *((w, w, "fp16") for w in (24, 40, 48, 72, 80, 96)),
        *((*both, "fp16") for both in MIXED),
        (48, 80, "fp32"),
        (96, 16, "fp32"),
    ],
    ids=lambda x: str(x),
)
def test_every_structure_of_bias_gradient(D: int, Dv: int, dtype: str, every_width_in_strips: None) -> None:
    must_pass(small("every structure", D, Dv, biases=EVERY_STRUCTURE), dtype)


@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
@pytest.mark.parametrize(("D", "Dv"), [(40, 40), (48, 80), (96, 96)], ids=lambda width: str(width))
def test_dq_from_stored_score_gradients(D: int, Dv: int, dtype: str, every_width_in_strips: None) -> None:
    case = small("stored", D, Dv, biases=(FULL,), causal="top-left")
    assert "dq_from_ds" in launches(case, dtype)
    must_pass(case, dtype)


def test_widths_of_latent_attention(every_width_in_strips: None) -> None:
    case = small("latent", 192, 128, batch=(1,), M=17, N=18, Hq=1, Hkv=1, causal=True, return_lse=True)
    assert launches(case, "fp16")["dq"].arguments["D_STRIPS"] == (128, 64)
    must_pass(case, "fp16")


OTHERS = [
    small("grouped, causal", 48, 40, Hq=4, M=40, N=70, biases=(Bias(shape="1MN"),), causal=True, return_lse=True),
    small("several tiles", 80, 48, batch=(1,), M=130, N=140, Hq=1, Hkv=1, biases=(FULL,), return_lse=True),
    small("hidden keys", 48, 80, biases=(SHARED,), masks=(Mask(shape="B11N", fill="key padding"),), poison=True),
    small(
        "hidden keys of a full bias", 80, biases=(FULL,), masks=(Mask(shape="B11N", fill="key padding"),), poison=True
    ),
    small("empty rows", 40, masks=(Mask(shape="BHMN", fill="some rows empty"),), return_lse=True),
    small("sliced", 48, 40, strides="sliced", biases=(SHARED,)),
    small("unaligned", 48, 40, strides="unaligned", biases=(FULL,)),
    small("transposed", 48, 40, strides="transposed", biases=(SHARED,)),
    small("packed", 80, layout="qkv", N=20, biases=(SHARED,)),
    small("only the biases trained", 48, 80, trained="", biases=EVERY_STRUCTURE),
    small("one key", 48, 80, M=5, N=1, biases=(SHARED,)),
    *(
        small(f"extreme rows, {shape}", 48, 80, M=17, N=20, biases=(Bias(shape=shape, dtype="fp32", values="lowest"),))
        for shape in ("BHMN", "1HMN")
    ),
]


@pytest.mark.parametrize("dtype", ["fp16"])
@pytest.mark.parametrize("case", OTHERS, ids=lambda case: case.name)
def test_in_strips(case: Case, dtype: str, every_width_in_strips: None) -> None:
    must_pass(case, dtype)


@pytest.mark.parametrize("strides", ["contiguous", "transposed"])
def test_64_bit_offsets(strides: str, every_width_in_strips: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The instructions of tensors beyond 2^31 elements, on small ones."""
    monkeypatch.setattr(operands.Operands, "_extent", lambda self, name, first_axis: 2**31)
    must_pass(small("wide", 48, 80, strides=strides, biases=(SHARED,)), "fp16")


@pytest.mark.usefixtures("fresh_recipes")
@pytest.mark.parametrize(("dtype", "own", "wanted"), [("fp16", (64, 16), (32, 16)), ("fp32", (128,), (64,))])
def test_widths_under_the_rules_as_they_stand(dtype: str, own: tuple[int, ...], wanted: tuple[int, ...]) -> None:
    """No rule patched, more keys than a window has: what a user's call runs. One decision for all kernels."""
    case = small("as it stands", 80, 48, M=20, N=160, batch=(1,), biases=EVERY_STRUCTURE)
    for found in launches(case, dtype).values():
        assert found.arguments.get("D_STRIPS", own) == own
        assert found.arguments.get("DV_STRIPS", wanted) == wanted
    must_pass(case, dtype)
