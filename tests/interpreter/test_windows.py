"""The window kernels, interpreted, through the public door against float64; and the pure choices around them.

Every call here is forced onto the window kernels: a plan that passes one on to the general kernels fails the test.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import pytest
import torch

import biasflash
from biasflash import problem
from biasflash.backends.triton import launch, tables, window_long_plan, window_plan
from biasflash.backends.triton.operands import Device, Layout, Operands
from biasflash.backends.triton.recipe import Recipe
from biasflash.problem import Problem
from biasflash.testing import conformance
from biasflash.testing.case import Bias, Case, Mask

#: so few programs that every program has several windows even at test sizes
FEW = Device(shared_memory=232448, multiprocessors=2, gpu="NVIDIA H200")


def window_forward(problem: Problem, device: Device, rows: Mapping[str, Layout], terms: Sequence[Layout]) -> Recipe:
    ops = Operands(problem, FEW, rows, terms)
    found = window_plan.forward_launch(ops) or window_long_plan.forward_launch(ops)
    assert found is not None, f"not a window: {problem}"
    return Recipe(launches=(found,))


def window_backward(
    problem: Problem,
    device: Device,
    rows: Mapping[str, Layout],
    terms: Sequence[Layout],
    grads: Mapping[int, Layout],
    has_dlse: bool,
) -> Recipe:
    names = ("dq", "dk", "dv")
    wanted = [name for name in names if name in rows]
    rows = {**rows, **{name: rows["out"] for name in names if name not in rows}}
    ops = Operands(problem, FEW, rows, terms, {f"grad{i}": layout for i, layout in grads.items()})
    asked = ops, has_dlse, wanted, list(grads)
    found = window_plan.backward_recipe(*asked) or window_long_plan.backward_recipe(*asked)
    assert found is not None, f"not a window: {problem}"
    return found


@pytest.fixture
def _windows_only(monkeypatch: pytest.MonkeyPatch, fresh_recipes: None) -> None:
    monkeypatch.setattr(launch, "forward_recipe", window_forward)
    monkeypatch.setattr(launch, "backward_recipe", window_backward)


def small(name: str, M: int, N: int, H: int = 2, **more: object) -> Case:
    shape: dict[str, object] = {"batch": (5,), "M": M, "N": N, "Hq": H, "Hkv": H, "D": 16, "Dv": 16}
    return Case(name=name, why="", tags=frozenset(), **(shape | more))  # type: ignore[arg-type]


SHARED = Bias(shape="1HMN")
CASES = [
    small("swin", 20, 20, biases=(SHARED,)),
    small("a whole tile", 16, 16, biases=(SHARED,)),
    small("no term", 20, 33),
    small("one query", 1, 40, biases=(SHARED,), return_lse=True),
    small("one key", 17, 1, biases=(SHARED,)),
    small("two query tiles", 70, 20, H=1, batch=(2,), biases=(SHARED,)),
    small("keys of two tiles", 16, 70, H=1, batch=(2,), biases=(SHARED,)),
    small("as long as a window may be", 128, 128, H=1, batch=(2,), biases=(SHARED,)),
    small("bias shared by heads too", 20, 20, biases=(Bias(shape="11MN"),)),
    small("bias of two axes", 20, 20, biases=(Bias(shape="MN"),)),
    small("bias of a head, one head", 20, 20, H=1, biases=(Bias(shape="BHMN"),)),
    small("bias of every window", 20, 20, biases=(Bias(shape="BHMN"),), return_lse=True),
    small("float32 bias of every window", 20, 20, biases=(Bias(shape="BHMN", dtype="fp32"),)),
    small("bfloat16 bias", 20, 20, biases=(Bias(shape="1HMN", dtype="bf16"),)),
    small("windows of two images", 20, 20, batch=(2, 3), biases=(Bias(shape="11HMN"),), masks=(Mask(shape="1B1MN"),)),
    small("bias of each window of an image", 20, 20, batch=(4, 3), biases=(Bias(shape="1BHMN"),)),
    small("the same for all heads", 20, 20, batch=(4, 3), biases=(Bias(shape="1B1MN"),)),
    small("keys of nobody", 20, 33, biases=(SHARED,), masks=(Mask(shape="B11N", fill="key padding"),), poison=True),
    small("one mask of keys for all", 20, 33, masks=(Mask(shape="111N", fill="key padding"),), poison=True),
    small("rows that see nothing", 20, 33, biases=(SHARED,), masks=(Mask(shape="1HMN", fill="some rows empty"),)),
    small("nothing is seen at all", 20, 20, masks=(Mask(shape="1111", fill="none"),), return_lse=True),
    small("bias of -inf", 20, 20, biases=(Bias(shape="1HMN", values="some -inf"),), return_lse=True),
    small("lowest bias", 20, 20, biases=(Bias(shape="1HMN", values="lowest"),)),
    small("large bias", 20, 20, biases=(Bias(shape="1HMN", values="large"),)),
    small("causal", 20, 33, biases=(SHARED,), causal=True, return_lse=True),
    small("causal, top-left, few keys", 33, 20, biases=(SHARED,), causal="top-left"),
    small("causal, bottom-right, few keys", 33, 20, causal=True, return_lse=True),
    small(
        "several terms",
        20,
        20,
        biases=(SHARED, Bias(shape="B1M1", trained=False), Bias(shape="111N", trained=False)),
        masks=(Mask(shape="BHMN"), Mask(shape="MN", fill="window")),
    ),
    small("only the bias is trained", 20, 20, biases=(SHARED,), trained=""),
    small("only keys", 20, 20, biases=(Bias(shape="1HMN", trained=False),), trained="k"),
    small("only values", 20, 20, trained="v"),
    small("widths apart", 20, 20, D=24, Dv=40, biases=(SHARED,)),
    small("odd widths", 20, 20, D=5, Dv=33, biases=(SHARED,)),
    small("packed", 20, 20, layout="qkv", biases=(SHARED,)),
    small("negative scale", 20, 20, scale=-0.3),
    small("expanded dout", 20, 20, biases=(SHARED,), dout="expanded"),
    *(
        small(f"strides {s}", 20, 24, biases=(Bias(shape="1HMN", strides=s),), strides=s)
        for s in ("transposed", "sliced", "unaligned", "heads-first")
    ),
]


LONG = [
    small("12 x 12", 144, 144, biases=(SHARED,)),
    small("a key more than one tile", 129, 129, H=1, batch=(3,), biases=(SHARED,)),
    small("a tail of 32", 150, 150, H=1, batch=(3,), biases=(SHARED,)),
    small("a tail of 64", 191, 191, H=1, batch=(3,), biases=(SHARED,)),
    small("whole tiles", 192, 192, H=1, batch=(2,), biases=(SHARED,)),
    small("no term", 130, 140, H=1, batch=(3,)),
    small("cross", 144, 160, H=1, batch=(3,), biases=(SHARED,)),
    small("few queries", 64, 144, H=1, batch=(3,), biases=(SHARED,)),
    small("one query", 1, 144, biases=(SHARED,), return_lse=True),
    small("queries of an odd number", 20, 150, batch=(3,), biases=(SHARED,)),
    small("bias shared by heads too", 144, 144, batch=(3,), biases=(Bias(shape="11MN"),)),
    small("bias of every window", 144, 144, H=1, batch=(3,), biases=(Bias(shape="BHMN"),), return_lse=True),
    small("float32 bias of every window", 130, 141, H=1, batch=(3,), biases=(Bias(shape="BHMN", dtype="fp32"),)),
    small("shifted windows", 144, 144, batch=(2, 3), biases=(Bias(shape="11HMN"),), masks=(Mask(shape="1B1MN"),)),
    small("bias of each window of an image", 144, 144, H=1, batch=(3, 2), biases=(Bias(shape="1BHMN"),)),
    small("the same for all heads", 144, 144, batch=(3, 2), biases=(Bias(shape="1B1MN"),)),
    small("too few windows to share", 144, 144, H=1, batch=(1,), biases=(SHARED,)),
    small("causal", 144, 150, H=1, batch=(3,), biases=(SHARED,), causal=True, return_lse=True),
    small("causal, few keys", 180, 144, H=1, batch=(3,), biases=(SHARED,), causal=True, return_lse=True),
    small("dlse", 144, 144, H=1, batch=(3,), biases=(SHARED,), return_lse=True),
    small("keys of nobody", 33, 150, biases=(SHARED,), masks=(Mask(shape="B11N", fill="key padding"),), poison=True),
    small("rows that see nothing", 33, 141, biases=(SHARED,), masks=(Mask(shape="1HMN", fill="some rows empty"),)),
    small("nothing is seen at all", 20, 144, masks=(Mask(shape="1111", fill="none"),), return_lse=True),
    small("bias of -inf", 40, 150, biases=(Bias(shape="1HMN", values="some -inf"),), return_lse=True),
    small("lowest bias", 40, 150, biases=(Bias(shape="1HMN", values="lowest"),)),
    small("bfloat16 bias, large", 40, 150, biases=(Bias(shape="1HMN", values="large", dtype="bf16"),)),
    small("only the bias is trained", 144, 144, H=1, batch=(3,), biases=(SHARED,), trained=""),
    small("only queries", 40, 144, biases=(Bias(shape="1HMN", trained=False),), trained="q"),
    small("only values", 40, 144, trained="v"),
    small("odd widths", 40, 144, D=5, Dv=31, biases=(SHARED,)),
    small("strides transposed", 40, 136, biases=(Bias(shape="1HMN", strides="transposed"),), strides="transposed"),
    small("strides unaligned", 40, 144, biases=(Bias(shape="1HMN", strides="unaligned"),), strides="unaligned"),
    # wider than 32 columns: tiles of keys are two above 64 keys, backward
    small("10 x 10, wide", 100, 100, H=1, batch=(3,), D=48, Dv=48, biases=(SHARED,)),
    small("a key more than one tile, wide", 65, 65, H=1, batch=(2,), D=40, Dv=64, biases=(SHARED,)),
    small("whole tiles, wide", 128, 128, H=1, batch=(2,), D=64, Dv=33, biases=(SHARED,)),
    small("a tail of 16, wide", 80, 80, batch=(3,), D=64, Dv=64, biases=(Bias(shape="11MN"),)),
    small("causal, wide", 100, 90, H=1, batch=(3,), D=40, Dv=40, biases=(SHARED,), causal=True, return_lse=True),
    small(
        "keys of nobody, wide", 33, 97, D=40, Dv=40, biases=(SHARED,), masks=(Mask(shape="B11N", fill="key padding"),)
    ),
    small("strides unaligned, wide", 40, 72, D=40, Dv=40, biases=(Bias(shape="1HMN", strides="unaligned"),)),
]


#: float32 windows of more than 64 tokens, and wider than 32, go to the general kernels
SHORT = [c for c in CASES if max(c.M, c.N) <= 64 and max(c.D, c.Dv) <= 32][::2]  # every other one: half the time


@pytest.mark.usefixtures("_windows_only")
@pytest.mark.parametrize("case", [*CASES, *LONG], ids=lambda c: f"{c.name} {c.M} {c.N}")
def test_float16(case: Case) -> None:
    result = conformance.run_case("triton", case, "cpu", "fp16")
    assert result.status == "passed", result.message


@pytest.mark.usefixtures("_windows_only")
@pytest.mark.parametrize("case", SHORT, ids=lambda c: c.name)
def test_float32(case: Case) -> None:
    result = conformance.run_case("triton", case, "cpu", "fp32")
    assert result.status == "passed", result.message


@pytest.mark.usefixtures("_windows_only")
@pytest.mark.parametrize("hold", [(), ("dense",), ("dense", "keep")], ids=lambda h: "+".join(h) or "nothing")
@pytest.mark.parametrize(
    "name",
    [
        "swin",
        "windows of two images",
        "rows that see nothing",
        "several terms",
        "causal",
        "shifted windows",
        "a tail of 32",
    ],
)
def test_what_is_held_does_not_change_results(
    monkeypatch: pytest.MonkeyPatch, name: str, hold: tuple[str, ...]
) -> None:
    rules = tuple(dataclasses.replace(rule, hold=hold) for rule in window_plan.MEASURED)
    monkeypatch.setattr(window_plan, "rules", lambda device: rules)
    case = next(c for c in [*CASES, *LONG] if c.name == name)
    result = conformance.run_case("triton", case, "cpu", "fp16")
    assert result.status == "passed", result.message


@pytest.mark.usefixtures("_windows_only")
@pytest.mark.parametrize("tokens", [20, 32, 130])
def test_scores_of_ten_thousands(tokens: int) -> None:
    """Weights of one key alone: the scores' gradient is 0, and no rounding of lse times a large q or k may stay."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(3, tokens, 2, 64) for _ in range(3))
    dout = torch.randn_like(v).half()
    leaves = [(150 * q).half().requires_grad_(), (100 * k).half().requires_grad_(), v.half().requires_grad_()]
    out = biasflash.attention(leaves[0], leaves[1], leaves[2], backend="triton")
    assert isinstance(out, torch.Tensor)
    dq, dk, dv = torch.autograd.grad(out, leaves, dout)
    exact = [t.detach().double().requires_grad_() for t in leaves]
    right = biasflash.attention(exact[0], exact[1], exact[2], backend="reference")
    assert isinstance(right, torch.Tensor)
    wanted = torch.autograd.grad(right, exact, dout.double())
    for ours, theirs in zip((dq, dk), wanted, strict=False):
        assert (ours.double() - theirs).abs().amax() < 1e-2
    assert (dv.double() - wanted[2]).abs().amax() < 1e-2 * wanted[2].abs().amax()


@pytest.mark.parametrize(
    "name", ["windows of two images", "keys of nobody", "bias of every window", "shifted windows", "cross"]
)
def test_64_bit_offsets(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """The instructions of tensors beyond 2^31 elements, on small ones."""
    monkeypatch.setattr(Operands, "_extent", lambda self, name, first_axis: 2**31)
    case = next(c for c in [*CASES, *LONG] if c.name == name)
    result = conformance.run_case("triton", case, "cpu", "fp16")
    assert result.status == "passed", result.message


# -------------------------------------------------------------------------------------------------------- pure choices


def operands(case: Case, dtype: torch.dtype = torch.bfloat16, device: Device = FEW) -> Operands:
    """Operands of a case, backward, all tensors contiguous, every bias trained."""
    meta = torch.device("meta")
    q = torch.empty(*case.batch, case.M, case.Hq, case.D, dtype=dtype, device=meta)
    k = torch.empty(*case.batch, case.N, case.Hkv, case.D, dtype=dtype, device=meta)
    v = torch.empty(*case.batch, case.N, case.Hkv, case.Dv, dtype=dtype, device=meta)
    terms = [torch.empty(case.term_shape(b.shape), dtype=dtype, device=meta) for b in case.biases]
    terms += [torch.empty(case.term_shape(m.shape), dtype=torch.bool, device=meta) for m in case.masks]
    terms = [t[(None,) * (q.dim() - t.dim())] for t in terms]
    kinds = ["dense"] * len(case.biases) + ["keep"] * len(case.masks)
    facts = problem.build(q, k, v, terms, kinds, problem.check_causal(case.causal), case.scale)
    out = q.new_empty(*case.batch, case.M, case.Hq, case.Dv)
    rows = {"q": q, "k": k, "v": v, "out": out, "dout": out, "dq": q, "dk": k, "dv": v}
    grads = {f"grad{i}": Layout(t.stride(), True) for i, t in enumerate(terms[: len(case.biases)])}
    layouts = {name: Layout(t.stride(), True) for name, t in rows.items()}
    return Operands(facts, device, layouts, [Layout(t.stride(), True) for t in terms], grads)


def backward(ops: Operands, grads: Sequence[int] = (0,)) -> Recipe | None:
    return window_plan.backward_recipe(ops, False, ("dq", "dk", "dv"), grads)


def long_backward(ops: Operands, grads: Sequence[int] = (0,)) -> Recipe | None:
    return window_long_plan.backward_recipe(ops, False, ("dq", "dk", "dv"), grads)


H200 = Device(shared_memory=232448, multiprocessors=132, gpu="NVIDIA H200")


def test_swin_takes_as_many_programs_as_fit_and_sums_them_in_order() -> None:
    swin = small("", 64, 64, H=6, batch=(8192,), D=32, Dv=32, biases=(SHARED,))
    ops = operands(swin, device=H200)
    forward, recipe = window_plan.forward_launch(ops), backward(ops)
    assert forward is not None
    assert recipe is not None
    assert forward.grid <= 132 * 4
    main, add = recipe.launches
    assert main.grid <= 132 * 2
    assert main.grid % 6 == 0
    assert (add.arguments["count"], add.arguments["chunks"]) == (6 * 64 * 64, main.grid // 6)
    assert recipe.scratch == (("partial0", main.grid * 64 * 64),)
    assert recipe.chunked == (0,)


def test_a_masks_period_is_met_where_that_is_cheap() -> None:
    shifted = small("", 64, 64, H=6, batch=(128, 64), D=32, Dv=32, biases=(SHARED,), masks=(Mask(shape="1B1MN"),))
    ops = operands(shifted, device=H200)
    (rule,) = (r for r in window_plan.MEASURED if r.kernel == "forward" and r.width == 32 and r.keys == 64)
    holds = dataclasses.replace(rule, hold=("dense", "keep"))
    step = window_plan.choose_step(ops, holds, columns=6)
    assert step % 64 == 0
    assert window_plan.choose_step(ops, rule, columns=6) % 64 != 0  # nothing asks for it


@pytest.mark.parametrize("columns", [1, 3, 6, 40])
@pytest.mark.parametrize("batch", [1, 2, 7, 100, 8192])
@pytest.mark.parametrize("every", [1, 2, 16])
def test_every_window_has_one_program_and_every_program_a_window(batch: int, columns: int, every: int) -> None:
    if batch < every:
        return
    step = window_plan.best_step(batch, columns, slots=132, every=every)
    assert step % every == 0
    assert 1 <= step <= batch
    plain = window_plan.cost(every, batch, columns, 132)
    assert window_plan.cost(step, batch, columns, 132) <= plain


def test_windows_of_144_tokens_sum_in_order_too() -> None:
    swin = small("", 144, 144, H=6, batch=(2048,), D=32, Dv=32, biases=(SHARED,))
    ops = operands(swin, device=H200)
    forward, recipe = window_long_plan.forward_launch(ops), long_backward(ops)
    assert window_plan.forward_launch(ops) is None
    assert backward(ops) is None
    assert forward is not None
    assert recipe is not None
    assert forward.arguments["TAIL"] == 16
    assert forward.grid <= 132 * 3
    assert forward.grid % 18 == 0  # 6 heads of three query tiles
    by_queries, by_keys, add = recipe.launches
    assert str(by_queries).startswith("long_window_dq: ")
    assert by_queries.grid % 30 == 0  # of 6 heads, two windows: two query tiles each, and one of the last rows of both
    assert by_keys.arguments["PIECES"] == ((64, False, False), (64, False, False), (16, False, True))
    assert (add.arguments["count"], add.arguments["chunks"]) == (6 * 144 * 144, by_keys.grid // 30 * 2)
    assert recipe.scratch[-1] == ("partial0", by_keys.grid // 30 * 12 * 144 * 144)
    assert recipe.chunked == (0,)


@pytest.mark.parametrize(("length", "D", "shape", "serves"), [
    (64, 64, "1HMN", False),  # the fused kernel
    (65, 64, "1HMN", True),
    (128, 33, "1HMN", True),
    (128, 32, "1HMN", False),  # the fused kernel
    (100, 64, "BHMN", False),  # stored: the general kernels are faster
])  # fmt: skip
def test_wide_windows_of_65_to_128_tokens_go_back_in_two_tiles_of_keys(
    length: int, D: int, shape: str, serves: bool
) -> None:
    ops = operands(small("", length, length, H=4, batch=(2048,), D=D, Dv=D, biases=(Bias(shape=shape),)), device=H200)
    assert window_plan.forward_launch(ops) is not None
    assert window_long_plan.forward_launch(ops) is None
    recipe = backward(ops) or long_backward(ops)
    names = [launch.kernel.__name__ for launch in recipe.launches] if recipe else []
    assert ("long_window_dq_kernel" in names) == serves
    if serves and recipe is not None:
        assert recipe.launches[0].arguments["TAIL"] == max(16, 1 << (length - 65).bit_length())


def test_measured_windows_belong_to_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(tables.VARIABLE, raising=False)
    for gpu, served in (("NVIDIA H200", True), ("NVIDIA H100", True), ("", False)):
        device = dataclasses.replace(H200, gpu=gpu)
        ops = operands(small("", 144, 144, H=6, batch=(2048,), D=64, Dv=64, biases=(SHARED,)), device=device)
        forward, recipe = window_long_plan.forward_launch(ops), long_backward(ops)
        assert (forward is not None, recipe is not None) == (served, served)
        if forward is not None:
            assert forward.why.startswith("measured on NVIDIA H200: ")
        with tables.using(None):
            assert window_plan.rules(device) == window_plan.RULES
    assert window_plan.rules(dataclasses.replace(H200, capability=80)) == window_plan.RULES


@pytest.mark.parametrize(
    ("capability", "length", "forward", "backward"),
    [
        (80, 144, True, False),
        (80, 160, False, False),
        (89, 144, True, False),
        (100, 144, True, True),
        (100, 160, True, True),
        (100, 150, False, False),
    ],
)
def test_rules_serve_longer_windows_where_no_tile_spills(
    capability: int, length: int, forward: bool, backward: bool
) -> None:
    device = dataclasses.replace(H200, capability=capability, gpu="")
    for D, wanted in ((32, (forward, backward)), (64, (False, False)), (30, (False, False))):
        ops = operands(small("", length, length, H=6, batch=(2048,), D=D, Dv=D, biases=(SHARED,)), device=device)
        found = window_long_plan.forward_launch(ops) is not None, long_backward(ops) is not None
        assert found == wanted


@pytest.mark.parametrize("length", [1, 16, 20, 63, 64, 65, 128, 129, 144, 160, 191, 192])
@pytest.mark.parametrize("side", [32, 64, 128])
def test_pieces_hold_all_queries_once(length: int, side: int) -> None:
    found = window_long_plan.pieces(length, side)
    starts = range(0, length, side)
    assert len(found) == len(starts)
    for start, (rows, is_short, is_turned) in zip(starts, found, strict=True):
        assert rows >= min(side, length - start)
        assert is_short == (start + rows > length)
        assert is_turned == (rows < 64)
    assert not any(is_short for _, is_short, _ in found[:-1])


@pytest.mark.parametrize("length", [64, 65, 80, 81, 129, 144, 145, 192])
@pytest.mark.parametrize("batch", [1, 2, 3, 100])
def test_short_last_tiles_are_dealt_apart(length: int, batch: int) -> None:
    ops = operands(small("", length, 144, H=1, batch=(batch,)), device=H200)
    (rule, *_) = (r for r in window_plan.MEASURED if r.kernel == "long dq")
    step, columns, dealt = window_long_plan.deal(ops, rule, length, 64)
    if dealt["SHARE"] == 1:
        assert (columns, dealt["LAST"]) == (-(-length // 64), 64)
        assert step <= batch
    else:
        assert length % 64 in range(1, 17)
        assert (columns, dealt["LAST"]) == (2 * (length // 64) + 1, 16)
        assert 2 * step <= batch


def test_a_plane_of_every_window_takes_the_room_of_a_stage() -> None:
    shared, own = (operands(small("", 144, 144, biases=(Bias(shape=shape),))) for shape in ("1HMN", "BHMN"))
    for kernel in ("long forward", "long dq", "long dkdv"):
        stages = [rule.tile.stages for rule in (window_long_plan.choose(o, kernel) for o in (shared, own)) if rule]
        assert stages == [3, 2]


def test_long_windows_keep_to_the_scratch(monkeypatch: pytest.MonkeyPatch) -> None:
    ops = operands(small("", 144, 144, H=6, batch=(2048,), biases=(SHARED,)), device=H200)
    found = long_backward(ops)
    assert found is not None
    count = dict(found.scratch)["partial0"]
    monkeypatch.setattr(window_plan, "SCRATCH_BYTES", 4 * count - 1)
    assert long_backward(ops) is None


REFUSED = [
    small("longer than a window", 129, 20),
    small("too many keys for any window", 20, 193),
    small("too many queries for any window", 193, 144),
    small("grouped heads, two tiles of keys", 144, 144, Hq=4, Hkv=2),
    small("one row of bias for all queries, two tiles of keys", 144, 144, biases=(Bias(shape="1H1N"),)),
    small("wide, two tiles of keys", 144, 144, D=128, biases=(SHARED,)),
    small("grouped heads", 20, 20, Hq=4, Hkv=2),
    small("one row of bias for all queries", 20, 20, biases=(Bias(shape="1H1N"),)),
    small("one column of bias for all keys", 20, 20, biases=(Bias(shape="1HM1"),)),
    small("shared inside, not outside", 20, 20, batch=(4, 3), biases=(Bias(shape="B1HMN"),)),
    small("of every window, shared by heads", 20, 20, biases=(Bias(shape="B1MN"),)),
    small("wide", 20, 20, D=128, biases=(SHARED,)),
]


@pytest.mark.parametrize("case", REFUSED, ids=lambda c: c.name)
def test_what_is_left_to_the_general_kernels(case: Case) -> None:
    ops = operands(case)
    assert backward(ops, range(len(case.biases))) is None
    assert long_backward(ops, range(len(case.biases))) is None


def test_two_trained_biases_are_left_to_the_general_kernels() -> None:
    case = small("", 20, 20, biases=(SHARED, SHARED))
    assert backward(operands(case), (0, 1)) is None
    assert backward(operands(case), (1,)) is not None


def test_partial_sums_stay_within_their_scratch(monkeypatch: pytest.MonkeyPatch) -> None:
    ops = operands(small("", 64, 64, H=6, batch=(8192,), biases=(SHARED,)), device=H200)
    found = backward(ops)
    assert found is not None
    ((_, count),) = found.scratch
    assert 4 * count <= window_plan.SCRATCH_BYTES
    monkeypatch.setattr(window_plan, "SCRATCH_BYTES", 4 * count - 1)
    assert backward(ops) is None
