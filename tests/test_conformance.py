"""Every CPU backend over every tiny case, every wrong call, and proof that the judge itself can say no."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import biasflash
from biasflash import backends, reference
from biasflash.testing import memory, truth
from biasflash.testing.case import DTYPES, Bias, Case, Mask, floor_ms
from biasflash.testing.cases import CASES, WORKLOADS, select
from biasflash.testing.conformance import compute, run_case
from biasflash.testing.errors import BudgetError, judge, rounding_floor
from biasflash.testing.refusals import REFUSALS, provoke
from biasflash.testing.wrong_call import Refusal, RefusalError

SMOKE = select("smoke")


def _runs() -> list[Any]:
    dtypes = {"cpu": ("fp16", "bf16", "fp32"), "reference": ("fp16", "fp32")}
    return [
        pytest.param(backend, case, dtype, id=f"{backend}-{case.name}-{dtype}")
        for backend, wanted in dtypes.items()
        for case in SMOKE
        for dtype in wanted
        if dtype in case.dtypes
    ]


@pytest.mark.parametrize(("backend", "case", "dtype"), _runs())
def test_backend_keeps_the_budget(backend: str, case: Case, dtype: str) -> None:
    result = run_case(backend, case, "cpu", dtype)
    assert result.status == "passed", result.message
    wanted = {"out", "lse"} | {f"d{letter}" for letter in case.trained}
    wanted |= {f"dbias[{i}]" for i, bias in enumerate(case.biases) if bias.trained}
    assert {figure.tensor for figure in result.figures} == wanted


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("name", ["q", "k", "v", "bias"])
def test_nan_in_a_visible_place_propagates(backend: str, name: str) -> None:
    tensors = {"q": torch.randn(1, 5, 1, 8), "k": torch.randn(1, 6, 1, 8), "v": torch.randn(1, 6, 1, 8)}
    tensors["bias"] = torch.randn(1, 5, 6)
    tensors[name].view(-1)[0] = math.nan
    out = biasflash.attention(**tensors, backend=backend)
    assert isinstance(out, Tensor)
    seen = {"q": out[:, 0], "k": out, "v": out[..., 0], "bias": out[:, 0]}[name]
    assert bool(seen.isnan().all())
    if name in ("q", "bias"):
        assert not bool(out[:, 1:].isnan().any())


# ------------------------------------------------------------------------------------------------------- wrong calls


@pytest.mark.parametrize("refusal", REFUSALS.values(), ids=REFUSALS.keys())
def test_wrong_call_is_refused(refusal: Refusal) -> None:
    provoke(refusal)


def test_there_are_enough_wrong_calls() -> None:
    assert len(REFUSALS) >= 40
    assert {r.error for r in REFUSALS.values()} == {TypeError, ValueError, biasflash.UnsupportedError}


def _raise(error: Exception) -> Callable[[], object]:
    def call() -> object:
        raise error

    return call


def _chained() -> object:
    try:
        raise KeyError("inner")
    except KeyError as error:
        raise ValueError("wanted 1") from error


def _accepted() -> object:
    return biasflash.attention(*(torch.zeros(1, 2, 1, 4) for _ in range(3)))


@pytest.mark.parametrize(
    ("call", "complaint"),
    [
        (lambda: None, "accepted"),
        (_accepted, "launched"),
        (_raise(TypeError("wanted 1")), "TypeError instead of ValueError"),
        (_raise(ValueError("no")), "lacks"),
        (_chained, "follows another error"),
    ],
    ids=["accepted", "launched", "other type", "other words", "chained"],
)
def test_provoke_finds_bad_refusals(call: Callable[[], object], complaint: str) -> None:
    with pytest.raises(RefusalError, match=complaint):
        provoke(Refusal(name="x", call=call, error=ValueError, words=("wanted 1",)))


# --------------------------------------------------------------------------------------------------- the judge itself

_JUDGED = CASES["rows-empty"]


def _judged(dtype: str = "fp32") -> tuple[Any, dict[str, Tensor]]:
    call = _JUDGED.build("cpu", dtype)
    return call, compute(call, "reference")


@pytest.mark.parametrize("dtype", ["fp16", "bf16", "fp32"])
@pytest.mark.parametrize("name", ["out", "lse", "dq", "dk", "dv", "dbias[0]"])
@pytest.mark.parametrize("fault", ["one element", "all a little", "NaN", "infinity"])
def test_judge_finds_wrong_values(dtype: str, name: str, fault: str) -> None:
    call, got = _judged(dtype)
    judge(call, got)
    wrong = got[name].clone().contiguous()
    largest = int(torch.where(wrong.isfinite(), wrong.float().abs(), 0.0).argmax())
    if fault == "one element":
        wrong.view(-1)[largest] *= 1.1
    elif fault == "all a little":
        wrong *= 1 + {"fp16": 0.01, "bf16": 0.05, "fp32": 1e-4}[dtype]
    else:
        wrong.view(-1)[largest] = math.nan if fault == "NaN" else math.inf
    with pytest.raises(BudgetError, match=name.replace("[", r"\[")):
        judge(call, {**got, name: wrong})


@pytest.mark.parametrize("name", ["out", "lse", "dq", "dbias[0]"])
def test_judge_wants_exact_zeros(name: str) -> None:
    call, got = _judged()
    wrong = got[name].clone()
    # the first query of rows-empty sees nothing; a change far below any budget must still be found
    index = {"out": (0, 0, 0, 0), "dq": (0, 0, 0, 0), "lse": (0, 0, 0), "dbias[0]": (0, 0, 0, 0)}[name]
    assert wrong[index] == (-math.inf if name == "lse" else 0.0)
    wrong[index] = -1e30 if name == "lse" else 1e-30
    with pytest.raises(BudgetError, match=name.replace("[", r"\[")):
        judge(call, {**got, name: wrong})


def test_judge_names_a_wrong_shape() -> None:
    call, got = _judged()
    with pytest.raises(BudgetError, match="dq has shape"):
        judge(call, {**got, "dq": got["dq"][:, 1:]})


def test_judge_refuses_a_case_without_a_budget() -> None:
    call = dataclasses.replace(CASES["plain"], scale=1e6).build("cpu", "fp16")  # plain float16 scores overflow
    with pytest.raises(BudgetError, match="so there is no budget"):
        judge(call, compute(call, "reference"))


def test_rounding_floor_is_half_a_unit_in_the_last_place() -> None:
    true, size = torch.tensor([1.0, -3.0], dtype=torch.float64), torch.zeros(2)
    largest, mean = rounding_floor(torch.bfloat16, true, size)
    assert largest == pytest.approx(3 * 2**-8, rel=1e-6)
    assert mean == pytest.approx(2 * 2**-8, rel=1e-6)
    largest, _ = rounding_floor(torch.bfloat16, true, torch.tensor([0.0, 8.0]))
    assert largest == pytest.approx(3 * 2**-8 + 8 * 2**-23, rel=1e-9)


def test_unrepeatable_backend_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = iter(range(100))
    real = reference.forward

    def forward(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
        out, lse, low = real(*args)
        return torch.where(out == out.flatten()[next(calls)], out.nextafter(out + 1), out), lse, low

    monkeypatch.setattr(reference, "forward", forward)
    result = run_case("reference", CASES["plain"], "cpu", "fp32")
    assert (result.status, "not repeatable: out" in result.message) == ("failed", True), result.message


def test_gradient_that_is_never_written_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference, "backward", lambda *args: None)
    result = run_case("reference", CASES["plain"], "cpu", "fp32")
    assert result.status == "failed"
    assert "nan" in result.message or "not repeatable" in result.message


def test_backend_that_raises_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def forward(*args: Any) -> None:
        raise RuntimeError("out of registers")

    monkeypatch.setattr(reference, "forward", forward)
    result = run_case("reference", CASES["plain"], "cpu", "fp32")
    assert (result.status, result.message) == ("failed", "RuntimeError: out of registers")


def test_objection_is_a_skip_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference, "objections", lambda problem: ("needs a quantum computer",))
    result = run_case("reference", CASES["plain"], "cpu", "fp32")
    assert (result.status, result.message, result.figures) == ("skipped", "needs a quantum computer", ())


# ---------------------------------------------------------------------------------------------------- truth by slices


@pytest.mark.parametrize(
    "name", ["causal-everything", "triangle", "window-mask", "three-biases", "no-batch", "packed-kv"]
)
def test_truth_by_slices_is_the_truth(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    call = CASES[name].build("cpu", "fp32")
    whole = truth.truth(call)
    monkeypatch.setattr(truth, "SLICE", call.case.M * call.case.N)
    assert len(list(truth._cuts(call))) > 1
    parts = truth.truth(call)
    for key, value in whole.values.items():
        torch.testing.assert_close(parts.values[key], value, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(parts.sizes[key], whole.sizes[key], rtol=1e-5, atol=1e-6)
        assert torch.equal(parts.reached[key], whole.reached[key])


def test_truth_is_autograd_of_the_formula() -> None:
    call = CASES["causal-everything"].build("cpu", "fp64")
    q, k, v = (t.detach().transpose(1, 2).requires_grad_() for t in (call.q, call.k, call.v))
    bias = call.bias[0].detach().requires_grad_()
    keys, values = (t.repeat_interleave(2, dim=1) for t in (k, v))
    s = torch.einsum("bhmd,bhnd->bhmn", q, keys) * 0.3 + bias
    s = s.masked_fill(~(call.mask[0] & torch.ones(37, 37, dtype=torch.bool).tril()), -math.inf)
    out, lse = (torch.softmax(s, -1) @ values).transpose(1, 2), torch.logsumexp(s, -1)
    assert call.dlse is not None
    grads = torch.autograd.grad([out, lse], [q, k, v, bias], [call.dout, call.dlse])
    found = truth.solve(call, torch.float64)
    wanted = {"out": out, "lse": lse, "dq": grads[0].transpose(1, 2), "dk": grads[1].transpose(1, 2)}
    wanted |= {"dv": grads[2].transpose(1, 2), "dbias[0]": grads[3]}
    for name, value in wanted.items():
        torch.testing.assert_close(found[name], value.detach(), rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_a_slice_never_holds_more_than_its_share(case: Case) -> None:
    class Shape:
        """Stands for a call that is too big to build."""

    shape: Any = Shape()
    shape.case = case
    rows = case.corner or case.M
    one_head = rows * case.N * (case.Hq // case.Hkv)
    covered = 0
    for lead, keys, heads in truth._cuts(shape):
        items = math.prod(s.stop - s.start for s in lead)
        assert items * (heads.stop - heads.start) * rows * case.N <= max(truth.SLICE, one_head)
        covered += items * (keys.stop - keys.start)
    assert covered == math.prod(case.batch) * case.Hkv


def test_corner_judges_the_last_queries_and_wants_zeros_elsewhere() -> None:
    case = Case(
        name="corner",
        why="a big case in small",
        tags=frozenset(),
        batch=(2,),
        M=40,
        N=30,
        Hq=2,
        Hkv=1,
        D=8,
        Dv=8,
        biases=(Bias(shape="BHMN"), Bias(shape="B11N")),
        causal=True,
        corner=7,
        return_lse=True,
    )
    result = run_case("reference", case, "cpu", "fp32")
    assert result.status == "passed", result.message
    call = case.build("cpu", "fp32")
    got = compute(call, "reference")
    for name in ("dq", "dbias[0]"):
        wrong = got[name].clone()
        wrong[0, 0, 0, 0] = 1e-30
        with pytest.raises(BudgetError, match="queries without a gradient contribute"):
            judge(call, {**got, name: wrong})
    wrong = got["out"].clone()
    wrong[1, -1] *= 1.01
    with pytest.raises(BudgetError, match="out"):
        judge(call, {**got, "out": wrong})


# ---------------------------------------------------------------------------------------------------------- the cases


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_case_is_well_formed(case: Case) -> None:
    assert case.name in CASES
    assert len(case.why) > 8
    assert len(case.tags) == 1
    assert case.tags <= {"smoke", "check", "workload", "big"}
    assert case.Hq % case.Hkv == 0
    for term in (*case.biases, *case.masks):
        assert len(term.shape) <= len(case.batch) + 3
    if "smoke" in case.tags:
        assert case.M * case.N <= 10_000
        assert case.Hq * math.prod(case.batch) <= 24
    if "workload" in case.tags and case.causal:
        assert case.M == case.N


def test_every_bias_broadcast_has_a_case() -> None:
    shapes = {bias.shape for case in SMOKE for bias in case.biases}
    for index in range(16):
        assert "".join(axis if index >> i & 1 else "1" for i, axis in enumerate("BHMN")) in shapes


def test_same_seed_same_tensors_and_another_seed_others() -> None:
    case = CASES["bias-and-masks"]
    first, again, other = (case.build("cpu", "bf16", seed) for seed in (3, 3, 4))
    assert torch.equal(first.q, again.q)
    assert torch.equal(first.bias[0], again.bias[0])
    assert not torch.equal(first.q, other.q)


@pytest.mark.parametrize(
    "fill", ["random half", "key padding", "left padding", "window", "some rows empty", "all", "none"]
)
def test_mask_fills(fill: str) -> None:
    case = CASES["mask-bhmn"]
    keep = case._mask(Mask(shape="BHMN", fill=fill), torch.device("cpu"), torch.Generator().manual_seed(0))
    assert keep.shape == case.full()
    rows = keep.any(-1)
    if fill in ("random half", "key padding"):
        assert bool(keep[..., 0].all())
    if fill == "some rows empty":
        assert not bool(rows[..., ::3].any())
        assert bool(rows[..., 1::3].all())
    elif fill == "none":
        assert not bool(rows.any())
    else:
        assert bool(rows.all())
    if fill not in ("all", "none"):
        assert 0.1 < keep.float().mean() < 0.9


def test_layouts_keep_values_and_hide_nan_around_them() -> None:
    t = torch.randn(2, 5, 3, 4)
    strides = {}
    for name in memory.LAYOUTS:
        if name == "far":  # its memory is larger than a test machine's
            continue
        found = memory.lay_out(t, name)
        wanted = t[:1].expand_as(t) if name == "expanded" else t
        assert torch.equal(found, wanted)
        strides[name] = (found.stride(), found.storage_offset())
    assert strides["heads-first"] == ((60, 4, 20, 1), 0)
    assert strides["transposed"] == ((60, 12, 1, 3), 0)
    assert strides["sliced"] == ((105, 21, 7, 1), 1)
    assert strides["unaligned"] == ((60, 12, 4, 1), 1)
    assert strides["expanded"][0][0] == 0
    sliced = memory.lay_out(t, "sliced")
    around = sliced.as_strided((2, 5, 3, 7), (105, 21, 7, 1), 0)
    assert int(around.isnan().sum()) == 2 * 5 * 3 * 3


def test_poison_lies_exactly_behind_the_padding() -> None:
    call = CASES["padding-nan"].build("cpu", "fp32")
    hidden = ~call.mask[0][:, 0, 0]
    assert 0 < int(hidden.sum()) < hidden.numel()
    assert torch.equal(call.k.isnan().all(-1).all(-1), hidden)
    assert torch.equal(call.v.isnan().any(-1).any(-1), hidden)


def test_select_by_tag_glob_and_name() -> None:
    assert [c.name for c in select("workload")] == list(WORKLOADS)
    assert {c.name for c in select("bias-*n, plain")} >= {"bias-1hmn", "plain"}
    assert len(select("all")) == len(CASES)
    with pytest.raises(ValueError, match=r"no case has the name or tag 'smok'; tags: big, check, smoke, workload"):
        select("smok")


#: forward, forward + backward in milliseconds on an H200, worked out by hand from shapes and ceilings
FLOORS = {
    "plain-d128-4k": (0.768, 2.687),
    "causal-d128-16k": (1.536, 5.375),
    "gqa-causal-d128-8k": (1.536, 5.375),
    "mla-causal-d192-128": (0.240, 0.864),
    "bias-full-d64-2k": (0.140, 0.421),
    "bias-const-d64-2k": (0.140, 0.336),
    "t5-1hmn-d64-1k": (0.072, 0.252),
    "pair-1hmn-d32-512": (0.128, 0.336),
    "swin-1hmn-d32-64": (0.187, 0.562),
    "mask-bhmn-d32-100x16k": (0.112, 0.286),
    "bias-full-d64-2k-fp32": (0.070, 0.211),
}


@pytest.mark.parametrize("name", FLOORS)
def test_floors(name: str) -> None:
    for backward, wanted in zip((False, True), FLOORS[name], strict=True):
        assert floor_ms(WORKLOADS[name], backward) == pytest.approx(wanted, abs=6e-4)


def test_every_dtype_of_a_case_has_a_name() -> None:
    for case in CASES.values():
        assert {case.dtype, *case.dtypes} <= DTYPES.keys()
        assert case.dtype in case.dtypes or case.dtypes == ("fp32",)
    assert set(backends.ORDER) >= {"cpu", "reference", "triton"}
