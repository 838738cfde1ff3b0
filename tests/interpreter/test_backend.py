"""The whole Triton backend through the public door, kernels interpreted, against float64 under the measured budget.

bfloat16 is left to GPUs: the interpreter multiplies its bits as integers. A bfloat16 bias beside other inputs is fine.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given, settings

import property_cases
from biasflash import problem
from biasflash.backends.triton import backward_plan, operands, plans
from biasflash.testing import cases, conformance
from biasflash.testing.case import Bias, Case, Mask
from public_cases import SMALL
from public_cases.case import BF16, F16, Built, Draw
from public_cases.case import Case as PublicCase
from public_cases.case import check as check_public


def must_pass(case: Case, dtype: str) -> None:
    result = conformance.run_case("triton", case, "cpu", dtype)
    assert result.status == "passed", result.message


# ---------------------------------------------------------------------------------------------------------- named cases

SMOKE = cases.select("smoke")


@pytest.mark.usefixtures("general_kernels")
@pytest.mark.parametrize(
    ("case", "dtype"),
    [pytest.param(c, d, id=f"{c.name}-{d}") for c in SMOKE for d in ("fp32", "fp16") if d in c.dtypes],
)
def test_named_case(case: Case, dtype: str) -> None:
    must_pass(case, dtype)


def small(name: str, why: str, M: int, N: int, H: int = 1, **more: object) -> Case:
    shape: dict[str, object] = {"batch": (1,), "M": M, "N": N, "Hq": H, "Hkv": H, "D": 16, "Dv": 16}
    return Case(name=name, why=why, tags=frozenset(), **(shape | more))  # type: ignore[arg-type]


FULL = Bias(shape="BHMN")
EXTRA = [
    small(
        "several full biases",
        "the score gradient is stored once",
        20,
        33,
        H=2,
        biases=(FULL, Bias(shape="BHMN", dtype="fp32"), FULL),
    ),
    small(
        "full bias of another dtype",
        "dq cannot be read back from it",
        20,
        33,
        H=2,
        biases=(Bias(shape="BHMN", dtype="bf16"),),
    ),
    small(
        "full bias, key padding",
        "dq must not touch what is hidden",
        20,
        33,
        batch=(2,),
        biases=(FULL,),
        masks=(Mask(shape="B11N", fill="key padding"),),
        poison=True,
    ),
    small("full bias, causal", "tiles that nobody sees get a zero", 50, 80, biases=(FULL,), causal="top-left"),
    small("full bias, causal, few keys", "rows that nobody serves get a zero", 80, 50, biases=(FULL,), causal=True),
    small("only a full bias trained", "no dq, dk, dv", 20, 33, H=2, trained="", biases=(FULL,)),
    small("only a row bias trained", "no dq, dk, dv", 20, 33, H=2, trained="", biases=(Bias(shape="1HM1"),)),
    small("only a key bias trained", "no dq, dk, dv", 20, 33, H=2, trained="", biases=(Bias(shape="111N"),)),
    small("only keys trained", "no dq, dv", 20, 33, trained="k", biases=(Bias(shape="1HMN", trained=False),)),
    small(
        "every structure at once",
        "stored, owned, row and column gradients",
        20,
        33,
        H=2,
        batch=(2,),
        biases=(FULL, Bias(shape="1HMN"), Bias(shape="BHM1"), Bias(shape="111N")),
    ),
    small(
        "three batch axes",
        "each broadcast by itself",
        20,
        33,
        batch=(2, 2, 2),
        biases=(Bias(shape="1B11MN"), Bias(shape="B1BHMN")),
        masks=(Mask(shape="BB111N"),),
    ),
    small("bias without batch axes", "two axes alone", 17, 20, batch=(2, 2), biases=(Bias(shape="MN"),)),
    small("scalar bias", "one number for all", 20, 33, H=2, batch=(2,), biases=(Bias(shape="1111"),)),
    small(
        "shared bias, grouped, causal",
        "owner tiles above the diagonal get a zero",
        40,
        70,
        batch=(),
        Hq=4,
        Hkv=2,
        biases=(Bias(shape="1MN"),),
        causal="top-left",
    ),
]


@pytest.mark.usefixtures("general_kernels")
@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
@pytest.mark.parametrize("case", EXTRA, ids=lambda c: c.name)
def test_structure_of_bias_gradients(case: Case, dtype: str) -> None:
    must_pass(case, dtype)


LENGTHS = (1, 5, 16, 17, 63, 64, 65, 130)


@pytest.mark.usefixtures("general_kernels")
@pytest.mark.parametrize("causal", [False, True], ids=["all", "causal"])
@pytest.mark.parametrize(("M", "N"), list(zip(LENGTHS, LENGTHS[3:] + LENGTHS[:3], strict=True)))
def test_lengths_around_tiles(M: int, N: int, causal: bool) -> None:
    terms = {"biases": (Bias(shape="BHMN" if causal else "BH1N"),), "masks": () if causal else (Mask(shape="MN"),)}
    must_pass(small("lengths", "", M, N, causal=causal, return_lse=True, **terms), "fp16" if M % 2 else "fp32")


@pytest.mark.usefixtures("general_kernels")
@pytest.mark.parametrize("lowest", ["bf16", "fp32"])
def test_a_row_of_lowest_scores_is_a_proper_softmax(lowest: str) -> None:
    bias = Bias(shape="BHMN", dtype=lowest, values="lowest")
    must_pass(small("lowest", "masks written as finfo.min", 17, 20, biases=(bias,)), "fp16")


# ------------------------------------------------------------------------------ choices that small sizes do not make


def owner_launch(case: Case, dtype: str) -> operands.Launch:
    """The launch that owns a shared bias gradient, for contiguous tensors."""
    call = case.build(torch.device("cpu"), cases.DTYPES[dtype], 0)
    kinds = ["dense"] * len(call.bias) + ["keep"] * len(call.mask)
    causal = problem.check_causal(call.causal)
    facts = problem.build(call.q, call.k, call.v, [*call.bias, *call.mask], kinds, causal, call.scale)
    recipe = plans.contiguous_recipes(facts, operands.device_facts(facts.device))["backward"]
    (found,) = (x for x in recipe.launches if x.kernel.__name__ == "dbias_kernel")
    return found


@pytest.mark.usefixtures("general_kernels")
@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
@pytest.mark.parametrize("shape", ["11MN", "1HMN"])
@pytest.mark.parametrize(("chunks", "chunk"), [(1, 6), (2, 3), (3, 2), (6, 1)])
def test_a_shared_bias_gradient_in_chunks(
    monkeypatch: pytest.MonkeyPatch, shape: str, chunks: int, chunk: int, dtype: str
) -> None:
    """Six (batch item, head) pairs, or six items for each head, share a tile; the scratch allows so many chunks."""
    heads = 2 if shape == "1HMN" else 1
    case = small("chunks", "", 17, 19, H=heads, batch=(2, 3), biases=(Bias(shape=shape),))
    monkeypatch.setattr(backward_plan, "SCRATCH_BYTES", chunks * 4 * heads * 17 * 19)
    monkeypatch.setattr(backward_plan.BackwardPlan, "_held", lambda self, but: 0)
    found = owner_launch(case, dtype).arguments
    assert (found["shared"], found["chunk"]) == (6, chunk)
    must_pass(case, dtype)


@pytest.mark.usefixtures("general_kernels")
@pytest.mark.parametrize(
    ("name", "dtype"),
    [("causal-everything", "fp16"), ("cross", "fp32"), ("triangle", "fp16"), ("bias-transposed", "fp32")],
)
def test_64_bit_offsets(monkeypatch: pytest.MonkeyPatch, name: str, dtype: str) -> None:
    """The instructions of tensors beyond 2^31 elements, on small ones."""
    monkeypatch.setattr(operands.Operands, "_extent", lambda self, name, first_axis: 2**31)
    must_pass(cases.CASES[name], dtype)


# --------------------------------------------------------------------------------------------------------- public cases

#: name -> why the interpreter does not run it
LEFT_OUT = {"as_many_rows_as_heads": "252 batch items: half a minute"}
#: name -> why only the general rule is applied, not what the case asserts on top
GENERAL_RULE_ONLY = {
    "scores_of_eight_million": (
        "it also holds rounding noise, where truth is zero, to twice eager's; "
        "delta adds its 64 terms in another order than numpy's products do, and dk has 2.15 times eager's"
    )
}


def for_interpreter(case: PublicCase) -> PublicCase:
    """The case with float16 for bfloat16 leaves."""

    def build(draw: Draw) -> Built:
        built = case.build(draw)
        leaves = {name: t.to(F16) if t.dtype == BF16 else t for name, t in built.leaves.items()}
        return dataclasses.replace(built, leaves=leaves)

    return dataclasses.replace(case, build=build, then=None if case.name in GENERAL_RULE_ONLY else case.then)


@pytest.mark.parametrize("case", [c for c in SMALL if c.name not in LEFT_OUT], ids=str)
def test_public_case(case: PublicCase) -> None:
    check_public(for_interpreter(case), "triton")


def test_cases_named_here_exist() -> None:
    assert LEFT_OUT.keys() | GENERAL_RULE_ONLY.keys() <= {c.name for c in SMALL}


# --------------------------------------------------------------------------------------------------------- random calls


def few_programs(call: property_cases.Call) -> bool:
    items = 1
    for n in call.batch:
        items *= n
    return items * call.Hkv * call.group <= 6


@settings(max_examples=20)
@given(
    call=property_cases.calls(
        max_length=20, lengths=(63, 65), max_width=20, max_batch=2, dtypes=(torch.float32, F16), max_terms=2
    ).filter(few_programs)
)
def test_random_calls(call: property_cases.Call) -> None:
    property_cases.check(call, "triton")
