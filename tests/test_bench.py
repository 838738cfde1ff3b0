"""The bench on a CPU with tiny cases: its reference, its gate, its rows, its files and its figures."""

from __future__ import annotations

import dataclasses
import json
import math
import multiprocessing
import os
import signal
import threading
import time
import warnings
from pathlib import Path

import pytest
import torch
import typer
from rich.console import Console
from typer.testing import CliRunner

from biasflash.cli import bench, charts, gate, providers, rows, runs, summary, tables, timing, warm
from biasflash.cli.providers import OURS, PORTABLE, PROVIDERS, NotInstalled, Provider, Refused
from biasflash.cli.rows import Cell, Row
from biasflash.testing.case import Bias, Call, Case, Ceilings, Mask, floor_ms
from biasflash.testing.cases import WORKLOADS
from biasflash.testing.truth import solve


def tiny(name: str, **more: object) -> Case:
    base: dict[str, object] = {"batch": (2,), "M": 12, "N": 20, "Hq": 4, "Hkv": 4, "D": 8, "Dv": 8, "dtype": "fp32"}
    return Case(name=name, why="a test of the bench", tags=frozenset(), **(base | more))  # type: ignore[arg-type]


BIASED = tiny("biased", biases=(Bias(shape="1HMN"),))
CASES = [
    BIASED,
    tiny("no-batch", batch=(), biases=(Bias(shape="HMN"),)),
    tiny("two-axes", batch=(2, 3), biases=(Bias(shape="B1HMN"), Bias(shape="1B11N", trained=False))),
    tiny("grouped-causal", Hkv=2, causal=True, biases=(Bias(shape="B1MN"),)),
    tiny("top-left", causal="top-left", Dv=5, biases=(Bias(shape="1H1N"),)),
    tiny("constant-over-keys", biases=(Bias(shape="1HM1"),)),
    tiny("masked", masks=(Mask(shape="B11N", fill="key padding"), Mask(shape="BHMN"))),
    tiny("rows-empty", masks=(Mask(shape="BHMN", fill="some rows empty"),), biases=(Bias(shape="BHMN"),)),
    tiny("poisoned", masks=(Mask(shape="B11N", fill="key padding"),), poison=True),
    tiny("packed", N=12, layout="qkv", scale=0.3, biases=(Bias(shape="MN"),)),
    tiny("frozen", trained="v", biases=(Bias(shape="1HMN"),)),
]
SETTINGS = runs.Settings(
    device="cpu",
    modes=rows.MODES,
    ceilings=Ceilings(products=1e11, bytes=1e10, exps=1e9),
    deadline=math.inf,
    budget_ms=2.0,
)


def attend(call: Call) -> torch.Tensor:
    return PROVIDERS["eager"].prepare(call)()


def fake(name: str, prepare: providers.Prepare) -> Provider:
    return Provider(name=name, prepare=prepare, needs_cuda=False, summary="made up")


def slightly_large(call: Call) -> providers.Attend:
    return lambda: attend(call) * 1.01


class _WrongGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, t: torch.Tensor) -> torch.Tensor:
        return t.clone()

    @staticmethod
    def backward(ctx: object, *grads: torch.Tensor) -> torch.Tensor:
        return grads[0] * 1.01


def wrong_gradient(call: Call) -> providers.Attend:
    return lambda: _WrongGradient.apply(attend(call))


def one_row(provider: Provider, case: Case = BIASED, **more: object) -> Row:
    (row,) = runs.run_case(case, [provider], dataclasses.replace(SETTINGS, **more))  # type: ignore[arg-type]
    return row


# ------------------------------------------------------------------------------------------------------------ the gate


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("block", [1, 10**6], ids=["blocks of one row", "one block"])
def test_reference_is_the_float64_truth(case: Case, block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(gate.BLOCK, "cpu", block)
    call = dataclasses.replace(case.build("cpu"), dlse=None)
    found = dict(gate.reference(call).tensors)
    if "dqkv" in found:
        found |= dict(zip(("dq", "dk", "dv"), found.pop("dqkv").unbind(-3), strict=True))
    wanted = solve(call, torch.float64)
    del wanted["lse"]
    assert set(found) == set(wanted)
    for name, true in wanted.items():
        true = true.view(found[name].shape)
        torch.testing.assert_close(found[name].double(), true, rtol=1e-5, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")


def test_relative_error() -> None:
    ones = torch.ones(4)
    assert gate.relative_error(ones * 1.5, ones) == 0.5
    assert gate.relative_error(ones * 1.5, ones, size=8.0) == 0.125
    assert gate.relative_error(ones * 1.5, ones, size=0.1) == 0.5
    assert gate.relative_error(torch.zeros(4), torch.zeros(4)) == 0.0
    assert gate.relative_error(ones, torch.zeros(4)) == math.inf
    assert math.isnan(gate.relative_error(ones * math.nan, ones))


def test_limits_follow_the_dtype_and_tf32() -> None:
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    assert gate.limit_for(torch.bfloat16, cuda) == 1e-2
    assert gate.limit_for(torch.float16, cpu) == 2e-3
    assert gate.limit_for(torch.float32, cuda) == 1e-4
    torch.set_float32_matmul_precision("high")
    try:
        assert gate.limit_for(torch.float32, cuda) == 2e-3
        assert gate.limit_for(torch.float32, cpu) == 1e-4
    finally:
        torch.set_float32_matmul_precision("highest")


def test_reference_ignores_and_restores_the_matmul_precision() -> None:
    torch.set_float32_matmul_precision("medium")
    try:
        with gate.full_float32():
            assert torch.get_float32_matmul_precision() == "highest"
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision("highest")


def test_a_gradient_that_cancels_is_judged_by_what_cancels() -> None:
    call = tiny("constant-over-keys", biases=(Bias(shape="1HM1"), Bias(shape="1HMN"))).build("cpu")
    truth = gate.reference(call)
    assert set(truth.sizes) == {"dbias[0]"}
    zero = torch.zeros_like(call.bias[0])
    assert gate.compare({"dbias[0]": zero}, truth)["dbias[0]"] < 1e-6
    assert gate.compare({"dbias[0]": zero + 1.0}, truth)["dbias[0]"] > 0.1


@pytest.mark.parametrize(
    ("prepare", "tensor"),
    [
        (slightly_large, "out"),
        (wrong_gradient, "dbias[0]"),
        (lambda call: lambda: attend(call) * math.nan, "out"),
        (lambda call: lambda: attend(call).transpose(-3, -2), "out"),
    ],
    ids=["output off by 1 %", "gradients off by 1 %", "NaN", "another layout"],
)
def test_a_wrong_provider_gets_no_speed(prepare: providers.Prepare, tensor: str) -> None:
    row = one_row(fake("wrong", prepare))
    timed = [cell for cell in row.cells.values() if cell.ms is not None or cell.tflops is not None]
    assert timed == []
    red = [cell for cell in row.cells.values() if cell.status == rows.RED]
    assert red
    assert tensor in red[0].reason


def test_a_wrong_gradient_also_takes_the_forward_speed() -> None:
    row = one_row(fake("wrong", wrong_gradient))
    assert row.cells["fwd"].status == row.cells["fwdbwd"].status == rows.RED
    assert row.cells["fwdbwd"].errors["dq"] == pytest.approx(0.01, rel=0.01)
    assert row.cells["fwdbwd"].errors["out"] < 1e-5


def test_forward_alone_does_not_look_at_gradients() -> None:
    row = one_row(fake("wrong", wrong_gradient), modes=("fwd",))
    assert row.cells["fwd"].status == rows.OK


def test_this_library_is_also_held_to_the_conformance_budget() -> None:
    def nearly(call: Call) -> providers.Attend:
        return lambda: attend(call) * (1 + 3e-5)  # within 1e-4, but far over twice the error of plain PyTorch

    assert one_row(fake("rival", nearly)).cells["fwdbwd"].status == rows.OK
    row = one_row(fake(OURS, nearly))
    assert row.cells["fwdbwd"].status == rows.RED
    assert "over budget" in row.cells["fwdbwd"].reason


# ------------------------------------------------------------------------------------------------------------ the rows


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_provider_is_right_or_says_why_not(case: Case) -> None:
    found = {row.provider: row for row in runs.run_case(case, list(PROVIDERS.values()), SETTINGS)}
    assert list(found) == list(PROVIDERS)
    poisoned = case.poison  # the formula multiplies NaN by zero there: the gate has to see it
    for name, row in found.items():
        for cell in row.cells.values():
            if PROVIDERS[name].needs_cuda:
                assert cell.status == rows.NEEDS_CUDA
            elif name == OURS:
                assert cell.status == rows.OK, (name, cell)
            elif poisoned or case.name == "rows-empty":
                assert cell.status in (rows.RED, rows.REFUSED, rows.OK)
            else:
                assert cell.status in (rows.OK, rows.REFUSED), (name, cell)
    if not poisoned and case.name != "rows-empty":
        assert found["eager"].cells["fwdbwd"].status == rows.OK
    if poisoned:
        assert found["eager"].is_red


def test_what_a_row_holds() -> None:
    row = one_row(PROVIDERS["eager"])
    assert (row.case, row.provider, row.dtype, row.limit) == ("biased", "eager", "float32", 1e-4)
    assert row.peak_mib is None
    results = 2 * 12 * 4 * 8 + (2 * 12 * 4 * 8 + 2 * 2 * 20 * 4 * 8 + 4 * 12 * 20)  # out; dq, dk and dv, dbias
    assert row.results_mib == 4 * results / 2**20
    assert set(row.cells["fwd"].errors) == {"out"}
    assert set(row.cells["fwdbwd"].errors) == {"out", "dq", "dk", "dv", "dbias[0]"}
    scores = 2 * 4 * 12 * 20
    for mode, per_score in (("fwd", 2 * 16), ("fwdbwd", 2 * 16 + 2 * (3 * 8 + 2 * 8))):
        cell = row.cells[mode]
        assert cell.ms is not None
        assert cell.p20 is not None
        assert cell.p80 is not None
        assert 0 < cell.p20 <= cell.ms <= cell.p80
        assert cell.tflops == pytest.approx(per_score * scores / cell.ms / 1e9)
        assert cell.floor_ms == floor_ms(BIASED, mode == "fwdbwd", SETTINGS.ceilings)
        assert cell.fraction == pytest.approx(cell.floor_ms / cell.ms)
        assert cell.first_call_s is not None
        assert cell.first_call_s > 0


def test_forward_runs_without_gradients_and_both_with_them() -> None:
    seen = []

    def spy(call: Call) -> providers.Attend:
        def run() -> torch.Tensor:
            out = attend(call)
            seen.append((call.q.requires_grad, torch.is_grad_enabled(), out.requires_grad))
            return out

        return run

    assert one_row(fake("spy", spy)).cells["fwdbwd"].status == rows.OK
    assert set(seen) == {(False, False, False), (True, True, True)}


@pytest.mark.parametrize(
    ("error", "status", "reason"),
    [
        (NotInstalled("some-package"), rows.NOT_INSTALLED, "some-package"),
        (Refused("has no mask"), rows.REFUSED, "has no mask"),
        (NotImplementedError("not there"), rows.REFUSED, "not there"),
        (torch.OutOfMemoryError("tried to allocate"), rows.ERROR, "out of memory"),
        (RuntimeError("two\nlines"), rows.ERROR, "RuntimeError: two lines"),
    ],
)
def test_a_provider_that_raises_says_so_in_its_cells(error: Exception, status: str, reason: str) -> None:
    def raising(call: Call) -> providers.Attend:
        raise error

    cells = one_row(fake("raising", raising)).cells
    assert {(cell.status, cell.reason, cell.ms) for cell in cells.values()} == {(status, reason, None)}


def test_a_provider_without_a_backward_pass_keeps_its_forward_speed() -> None:
    def no_gradient(call: Call) -> providers.Attend:
        if torch.is_grad_enabled():
            raise Refused("has no gradient")
        return lambda: attend(call)

    cells = one_row(fake("half", no_gradient)).cells
    assert cells["fwd"].ms is not None
    assert cells["fwdbwd"] == Cell(status=rows.REFUSED, reason="has no gradient")


@pytest.mark.parametrize("module", ["no_such_module", "no_such_module.inner", "json.no_such_module"])
def test_packages_that_are_not_there_say_so_without_being_run(module: str) -> None:
    absent = dataclasses.replace(fake("absent", crashing), package=(module, "some-package"))
    (row,) = runs.run([BIASED], [absent], SETTINGS, isolate=False)
    assert row.cells == {mode: Cell(status=rows.NOT_INSTALLED, reason="some-package") for mode in rows.MODES}
    assert dataclasses.replace(absent, package=("json.decoder", "json")).missing() == ""


def test_no_reference_is_made_where_nobody_gave_a_result(monkeypatch: pytest.MonkeyPatch) -> None:
    def refusing(call: Call) -> providers.Attend:
        raise Refused("never")

    monkeypatch.setattr(gate, "reference", lambda call: pytest.fail("made a reference"))
    assert one_row(fake("refusing", refusing)).cells["fwd"].status == rows.REFUSED


def test_rows_after_the_deadline_are_given_up() -> None:
    row = one_row(PROVIDERS["eager"], deadline=time.time() - 1)
    assert {cell.status for cell in row.cells.values()} == {rows.NO_TIME}


@pytest.mark.parametrize(
    ("took", "left", "status"),
    [
        ([], 5.0, rows.OK),
        ([], -1.0, rows.NO_TIME),
        ([1.0], 5.0, rows.OK),
        ([9.0], 5.0, rows.NO_TIME),
        ([9.0, 1.0, 1.0], 5.0, rows.NO_TIME),
        ([9.0, 1.0, 1.0, 1.0], 5.0, rows.OK),  # the first one's compilers and start-up are long past
    ],
)
def test_a_row_is_begun_only_if_rows_like_it_took_less_than_is_left(
    took: list[float], left: float, status: str
) -> None:
    given_up = one_row(PROVIDERS["eager"], deadline=0.0).cells
    provider = dataclasses.replace(rows.until(PROVIDERS["eager"], time.time() + left), took=list(took))
    row = one_row(provider)
    assert {cell.status for cell in row.cells.values()} == {status}
    assert len(provider.took) == len(took) + (status == rows.OK)
    if status == rows.NO_TIME:
        assert row.cells == given_up  # in the same words


def test_a_refusal_foretells_nothing() -> None:
    def refusing(call: Call) -> providers.Attend:
        raise Refused("never")

    provider = rows.until(fake("refusing", refusing), math.inf)
    assert one_row(provider).cells["fwd"].status == rows.REFUSED
    assert provider.took == []


def one_process_per_provider(monkeypatch: pytest.MonkeyPatch, seconds: float) -> list[str]:
    """Replaces the clock and the processes: every row takes so many seconds; returns who was started."""
    now, started = [0.0], []

    def isolated(provider: Provider, cases: list[Case], settings: runs.Settings) -> object:
        started.append(provider.name)
        for case in cases:
            now[0] += seconds
            yield rows.blank(case.name, provider.name, settings.modes, rows.OK, "")

    monkeypatch.setattr(bench.time, "time", lambda: now[0])
    monkeypatch.setattr(runs, "isolated", isolated)
    return started


@pytest.mark.parametrize(
    ("deadline", "begun", "timed"),
    [
        (100.0, "abc", ["a1", "a2", "b1", "b2", "c1", "c2"]),
        (35.0, "ab", ["a1", "a2", "b1", "b2"]),
        (25.0, "a", ["a1", "a2"]),  # the second one's first row would come at 30
        (5.0, "a", ["a1"]),
    ],
)
def test_no_process_is_begun_or_waited_for_when_time_is_up(
    monkeypatch: pytest.MonkeyPatch, deadline: float, begun: str, timed: list[str]
) -> None:
    started = one_process_per_provider(monkeypatch, 10.0)
    several, cases = [fake(name, attend) for name in "abc"], [tiny("1"), tiny("2")]
    settings = dataclasses.replace(SETTINGS, deadline=deadline)
    found = list(bench.timely_rows(cases, several, settings, isolate=True))
    assert "".join(started) == begun
    assert [row.provider + row.case for row in found] == ["a1", "a2", "b1", "b2", "c1", "c2"]
    assert [row.provider + row.case for row in found if row.cells["fwd"].status == rows.OK] == timed
    assert {row.cells["fwd"].status for row in found} <= {rows.OK, rows.NO_TIME}


def test_the_reference_is_made_once_for_all_providers(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    real = gate.reference
    monkeypatch.setattr(gate, "reference", lambda call: made.append(call.case.name) or real(call))
    cpu = [p for p in PROVIDERS.values() if not p.needs_cuda]
    assert len(cpu) >= 3
    assert len(list(runs.run([BIASED], cpu, SETTINGS, isolate=False))) == len(cpu)
    assert made == ["biased"]


def test_compilers_are_called_ahead_in_processes_of_their_own() -> None:
    assert warm.once(BIASED, "biasflash", rows.MODES, "cpu") == ""
    assert "axis D = 300" in warm.once(tiny("wide", D=300, Dv=300), "biasflash", rows.MODES, "cpu")
    late, soon = time.time() - 1, time.time() + 60
    assert warm.warm([BIASED], ["biasflash", "eager"], rows.MODES, "cpu", 2, soon) == 1
    assert warm.warm([BIASED], ["biasflash"], rows.MODES, "cpu", 1, late) == 0
    assert warm.warm([BIASED], ["eager"], rows.MODES, "cpu", 2, soon) == 0  # nothing of it is compiled
    assert warm.processes_for(torch.device("cpu")) == 0


def test_a_signal_to_the_group_passes_by_those_who_compile() -> None:
    with multiprocessing.get_context("spawn").Pool(1, warm._start) as pool:
        assert pool.apply(os.getpgrp) != os.getpgrp()


def crashing(call: Call) -> providers.Attend:
    if call.case.name == "biased":
        os._exit(7)
    return lambda: attend(call)


def test_a_crash_spoils_only_its_own_row() -> None:
    cases = [BIASED, tiny("after")]
    found = list(runs.isolated(fake("crashing", crashing), cases, SETTINGS))
    assert [row.case for row in found] == ["biased", "after"]
    assert {cell.status for cell in found[0].cells.values()} == {rows.ERROR}
    assert "exit code 7" in found[0].cells["fwd"].reason
    assert {cell.status for cell in found[1].cells.values()} == {rows.OK}


def hanging(call: Call) -> providers.Attend:
    time.sleep(60.0)
    return lambda: attend(call)


def test_a_hang_is_ended() -> None:
    (row,) = runs.isolated(fake("hanging", hanging), [BIASED], dataclasses.replace(SETTINGS, silence_s=0.5))
    assert {(cell.status, cell.reason) for cell in row.cells.values()} == {(rows.ERROR, "gave no answer within 1 s")}


class _Mailbox(list[object]):
    """The worker's end of a pipe, read in this process."""

    send = list.append


def test_a_worker_that_lost_its_device_sends_its_row_and_asks_for_another_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def lost(device: torch.device) -> None:
        raise RuntimeError("an illegal memory access was encountered")

    box = _Mailbox()
    monkeypatch.setattr(rows.timing, "first_call_seconds", lambda work, device: (work(), 0.1))
    monkeypatch.setattr(bench.timing, "synchronise", lost)
    runs._worker(box, PROVIDERS["eager"], [BIASED, tiny("after")], SETTINGS)  # type: ignore[arg-type]
    first, last = box
    assert isinstance(first, Row)
    assert first.case == "biased"
    assert last is None


def test_processes_that_keep_ending_are_not_replaced_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    started = []
    monkeypatch.setattr(
        runs, "_rows_of_one_process", lambda provider, cases, settings: started.append(cases) or iter(())
    )
    found = list(runs.isolated(PROVIDERS["eager"], [BIASED], SETTINGS))
    assert len(started) == runs.MAX_PROCESSES
    assert [cell.status for cell in found[0].cells.values()] == [rows.ERROR] * 2


def test_the_reason_of_a_passed_over_backend_is_its_own() -> None:
    texts = [
        "Memory efficient kernel not used because: (Triggered internally at sdp_utils.cpp:1.)",
        "Memory Efficient attention has been runtime disabled. (Triggered internally at sdp_utils.h:2.)",
        "Flash attention kernel not used because: (Triggered internally at sdp_utils.cpp:3.)",
        "Flash Attention does not support non-null attn_mask. (Triggered internally at sdp_utils.h:4.)",
    ]
    caught = [warnings.WarningMessage(UserWarning(text), UserWarning, "torch", 1) for text in texts]
    error = RuntimeError("No available kernel. Aborting execution.")
    assert providers._sdpa_reason(caught, error) == "Flash Attention does not support non-null attn_mask."
    assert providers._sdpa_reason([], error) == "No available kernel. Aborting execution."


# ---------------------------------------------------------------------------------------------------------- the clocks


def test_summarise() -> None:
    took = timing.summarise([5.0, 1.0, 2.0, 3.0, 4.0, 6.0])
    assert took == timing.Timing(ms=3.5, p20=2.0, p80=5.0, runs=6)
    assert timing.summarise([2.0]) == timing.Timing(ms=2.0, p20=2.0, p80=2.0, runs=1)


def test_measure_finds_the_length_of_a_nap() -> None:
    took = timing.measure(lambda: time.sleep(0.004), torch.device("cpu"), 40.0)
    assert 4.0 <= took.p20 <= took.ms <= took.p80
    assert took.ms < 40.0
    assert 5 <= took.runs <= 10


def test_a_call_that_still_compiles_is_not_the_estimate() -> None:
    naps = iter([0.3])
    took = timing.measure(lambda: time.sleep(next(naps, 0.002)), torch.device("cpu"), 40.0)
    assert took.runs >= timing.MIN_RUNS
    assert took.p80 < 40.0


def test_host_time_is_in_microseconds() -> None:
    took = timing.host_us(lambda: time.sleep(0.002), torch.device("cpu"), calls=3, rounds=3)
    assert 2000.0 <= took.ms < 40_000.0
    assert took.runs == 3


def test_every_call_settles_before_host_time_is_taken() -> None:
    called = [0, 0]

    def first() -> None:
        called[0] += 1

    def second() -> None:
        called[1] += 1

    start = time.perf_counter()
    timing.settle([first, second], torch.device("cpu"), seconds=0.02)
    assert time.perf_counter() - start >= 0.02
    assert called[0] == called[1] > 1


# ------------------------------------------------------------------------------------------------- figures of workloads

#: (workload, forward, forward and backward): FLOP by hand, 2 (D + Dv) and 2 (3 D + 2 Dv) more per score
FLOPS = [
    ("plain-d128-4k", 512 * 4 * 16 * 4096**2, (512 + 1280) * 4 * 16 * 4096**2),
    ("causal-d128-16k", 256 * 16 * 16384**2, (256 + 640) * 16 * 16384**2),
    ("mla-causal-d192-128", 320 * 2 * 16 * 4096**2, (320 + 832) * 2 * 16 * 4096**2),
    ("pair-1hmn-d32-512", 128 * 512 * 4 * 512**2, (128 + 320) * 512 * 4 * 512**2),
]
#: (workload, forward, forward and backward): floors in ms at 716 TFLOP/s, 4.3 TB/s and 4.2e12 exponentials/s
FLOORS = [
    ("plain-d128-4k", 0.768, 2.687),  # products
    ("causal-d64-4k", 0.384, 1.344),  # products
    ("gqa-causal-d128-8k", 1.536, 5.375),  # products
    ("mla-causal-d192-128", 0.240, 0.864),  # products
    ("bias-full-d64-2k", 0.140, 0.421),  # bytes: q, k, v, out of 16.8 MB each and a bias of 537 MB
    ("bias-const-d64-2k", 0.140, 0.336),  # bytes, then products
    ("pair-1hmn-d32-512", 0.128, 0.336),  # exponentials, then products
    ("swin-1hmn-d32-64", 0.187, 0.562),  # bytes: q, k, v, out of 201 MB each
    ("mask-b11n-d64-2k", 0.384, 1.344),  # products
]


@pytest.mark.parametrize(("name", "forward", "both"), FLOPS)
def test_flops_by_hand(name: str, forward: int, both: int) -> None:
    assert (WORKLOADS[name].flops(False), WORKLOADS[name].flops(True)) == (forward, both)


@pytest.mark.parametrize(("name", "forward", "both"), FLOORS)
def test_floors_by_hand(name: str, forward: float, both: float) -> None:
    ceilings = Ceilings(products=716e12, bytes=4.3e12, exps=4.2e12)
    case = WORKLOADS[name]
    assert floor_ms(case, False, ceilings) == pytest.approx(forward, abs=6e-4)
    assert floor_ms(case, True, ceilings) == pytest.approx(both, abs=6e-4)


def test_a_slower_product_rate_raises_only_the_floors_it_bounds() -> None:
    slow = Ceilings(products=701e12, bytes=4.3e12, exps=4.2e12)
    assert floor_ms(WORKLOADS["plain-d128-4k"], False, slow) == pytest.approx(0.784, abs=6e-4)
    assert floor_ms(WORKLOADS["bias-full-d64-2k"], False, slow) == pytest.approx(0.140, abs=6e-4)


# ------------------------------------------------------------------------------------------------- tables, chart, JSON


def made_up(case: str, provider: str, forward: float | None, both: float | None = None) -> Row:
    cells = {}
    for mode, ms in (("fwd", forward), ("fwdbwd", both)):
        if ms is None:
            cells[mode] = Cell(status=rows.RED, reason=f"{provider} is off")
        else:
            cells[mode] = Cell(
                status=rows.OK, ms=ms, p20=ms, p80=ms, runs=5, floor_ms=0.5, fraction=0.5 / ms, tflops=1.0
            )
    return Row(case=case, provider=provider, dtype="float32", limit=1e-4, cells=cells)


MADE_UP = [
    made_up("a", OURS, 1.0, 4.0),
    made_up("a", "eager", 3.0, 6.0),
    made_up("a", "sdpa-math", 2.0, 8.0),
    made_up("b", OURS, 1.0),
    made_up("b", "eager", None, 5.0),
    made_up("b", "sdpa-math", None, None),
]


def test_ratios_are_against_the_best_green_peer() -> None:
    found = tables.by_case(MADE_UP)
    assert tables.best_peer(found["a"], "fwd") == ("sdpa-math", 2.0)
    assert tables.best_peer(found["a"], "fwdbwd") == ("eager", 6.0)
    assert tables.advantage(found["a"], OURS, "fwd") == 2.0
    assert tables.advantage(found["a"], "eager", "fwd") == pytest.approx(2 / 3)
    assert tables.best_peer(found["b"], "fwd") is None
    assert tables.advantage(found["b"], OURS, "fwd") is None
    assert tables.advantage(found["b"], OURS, "fwdbwd") is None


def rendered(what: object) -> str:
    console = Console(width=200, record=True, file=open(os.devnull, "w"))  # noqa: SIM115
    console.print(what)
    console.file.close()
    return console.export_text()


def test_the_tables_show_ratios_and_reasons_but_no_red_speed() -> None:
    absent = Row(case="a", provider="fa4", cells={"fwd": Cell(status=rows.NOT_INSTALLED, reason="flash-attn-4")})
    text = rendered(tables.report([*MADE_UP, absent], rows.MODES))
    assert "2.00 x" in text
    assert "1.50 x" in text
    assert "50%" in text
    assert "red [1]" in text
    assert "[1] eager is off" in text
    assert "fa4: not installed flash-attn-4" in text


def test_changes_name_faster_slower_and_lost() -> None:
    now = [made_up("a", OURS, 1.1, 3.0), made_up("a", "eager", None, 6.0)]
    text = rendered(tables.changes(now, MADE_UP))
    assert "+10.0%" in text
    assert "-25.0%" in text
    assert "lost" in text
    assert "+0.0%" in text


def test_the_chart_is_a_png_with_our_colour_in_it(tmp_path: Path) -> None:
    import matplotlib.image  # here, so that the processes of the crash test need not

    path = tmp_path / "deep" / "chart.png"
    charts.draw(MADE_UP, rows.MODES, path, "a title")
    assert path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    pixels = (matplotlib.image.imread(path)[..., :3] * 255).round().astype(int)
    assert min(pixels.shape[:2]) > 200
    for colour in (charts.OUR_COLOUR, *charts.PEER_COLOURS[:2]):
        wanted = [int(colour[i : i + 2], 16) for i in (1, 3, 5)]
        assert (pixels == wanted).all(-1).sum() > 500


def test_a_chart_of_nothing_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="nothing to draw"):
        charts.draw([made_up("b", "sdpa-math", None)], rows.MODES, tmp_path / "chart.png", "a title")
    assert not (tmp_path / "chart.png").exists()


# --------------------------------------------------------------------------------------------------------- the command


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch) -> typer.Typer:
    """``bench`` over two tiny cases, quickly, as an application of its own."""
    cases = {case.name: case for case in (BIASED, tiny("masked", masks=(Mask(shape="B11N"),)))}
    monkeypatch.setattr(bench, "select", lambda wanted: [cases[name] for name in wanted.split(",")])
    monkeypatch.setattr(bench.timing, "ceilings", lambda device: SETTINGS.ceilings)
    monkeypatch.setattr(bench.timing, "REPETITION_MS", 2.0)
    app = typer.Typer()
    app.command()(bench.bench)
    return app


def test_the_command_writes_a_report_that_reads_back(command: typer.Typer, tmp_path: Path) -> None:
    path, chart = tmp_path / "bench.json", tmp_path / "bench.png"
    options = ["--device", "cpu", "--cases", "biased,masked", "--json", str(path), "--chart", str(chart), "--host"]
    result = CliRunner().invoke(command, options)
    assert result.exit_code == 0, result.output
    assert chart.read_bytes()[1:4] == b"PNG"
    report = json.loads(path.read_text())
    assert report["schema"] == bench.SCHEMA
    assert set(report["ceilings"]) == {"products", "bytes", "exps"}
    assert report["machine"]
    assert len(report["rows"]) == 2 * len(PROVIDERS)
    assert {row["provider"] for row in report["rows"]} == set(PROVIDERS)
    assert {entry["provider"] for entry in report["host"]} == {OURS, "torch SDPA"}
    assert all(entry["us"] > 0 for entry in report["host"])
    found = bench.load_rows(path)
    assert [dataclasses.asdict(row) for row in found] == report["rows"]
    assert tables.speed(tables.by_case(found)["biased"][OURS], "fwdbwd")
    again = CliRunner().invoke(
        command, ["--device", "cpu", "--cases", "biased", "--providers", "eager", "--baseline", str(path)]
    )
    assert again.exit_code == 0, again.output
    assert "change against the baseline" in again.output


def test_the_command_shows_red_for_a_wrong_rival_and_fails_for_a_wrong_us(
    command: typer.Typer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = tmp_path / "bench.json"
    options = ["--device", "cpu", "--cases", "biased", "--providers", f"wrong,{OURS}", "--json", str(path)]
    monkeypatch.setitem(PROVIDERS, "wrong", fake("wrong", slightly_large))
    result = CliRunner().invoke(command, options)
    assert result.exit_code == 0, result.output
    assert "red [1]" in result.output
    by_name = {row.provider: row for row in bench.load_rows(path)}
    assert all(cell.ms is None for cell in by_name["wrong"].cells.values())
    assert all(cell.ms is not None for cell in by_name[OURS].cells.values())
    monkeypatch.setitem(PROVIDERS, OURS, fake(OURS, slightly_large))
    assert CliRunner().invoke(command, options).exit_code == 1


def test_a_killed_run_keeps_the_rows_it_had(
    command: typer.Typer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path, seen = tmp_path / "deep" / "bench.json", []

    def looking(call: Call) -> providers.Attend:
        if path.exists():
            seen.append((json.loads(path.read_text())["complete"], [row.case for row in bench.load_rows(path)]))
        return lambda: attend(call)

    monkeypatch.setitem(PROVIDERS, "looking", fake("looking", looking))
    options = ["--device", "cpu", "--cases", "biased,masked", "--providers", "looking", "--mode", "fwd"]
    assert CliRunner().invoke(command, [*options, "--json", str(path)]).exit_code == 0
    assert seen == [(False, ["biased"])]
    assert json.loads(path.read_text())["complete"] is True
    assert [p.name for p in path.parent.iterdir()] == [path.name]


def test_half_a_file_is_never_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "bench.json"
    bench.write({"rows": 1}, path)
    monkeypatch.setattr(bench.os, "replace", lambda part, whole: pytest.fail(Path(part).read_text()))
    with pytest.raises(pytest.fail.Exception, match='"rows": 2'):
        bench.write({"rows": 2}, path)
    assert json.loads(path.read_text()) == {"rows": 1}


@pytest.mark.parametrize(("prepare", "code"), [(attend, 0), (slightly_large, 1)], ids=["right", "wrong"])
def test_sigterm_ends_a_run_with_what_there_is(
    command: typer.Typer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, prepare: providers.Prepare, code: int
) -> None:
    path, before = tmp_path / "bench.json", signal.getsignal(signal.SIGTERM)

    def ended(call: Call) -> providers.Attend:
        if call.case.name == "masked":
            os.kill(os.getpid(), signal.SIGTERM)
            pytest.fail("went on")
        return prepare(call) if prepare is slightly_large else lambda: attend(call)

    monkeypatch.setitem(PROVIDERS, OURS, fake(OURS, ended))
    options = ["--device", "cpu", "--cases", "biased,masked", "--providers", OURS, "--host", "--json", str(path)]
    result = CliRunner().invoke(command, options)
    assert result.exit_code == code, result.output
    assert "ended by SIGTERM after 1 of 2 rows" in result.output
    assert "median ms, fraction of the floor" in result.output
    assert json.loads(path.read_text())["complete"] is False
    assert [row.case for row in bench.load_rows(path)] == ["biased"]
    assert signal.getsignal(signal.SIGTERM) == before


def test_sigterm_ends_the_process_in_work(command: typer.Typer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PROVIDERS, "hanging", fake("hanging", hanging))
    timer = threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGTERM))
    start = time.time()
    options = ["--device", "cpu", "--cases", "biased", "--providers", "hanging", "--isolate"]
    timer.start()
    try:
        result = CliRunner().invoke(command, options)
    finally:
        timer.cancel()
    assert result.exit_code == 0, result.output
    assert "ended by SIGTERM after 0 of 1 rows" in result.output
    assert time.time() - start < 30.0
    assert multiprocessing.active_children() == []


def test_a_second_sigterm_does_not_spoil_the_end() -> None:
    with bench.Sigterm() as sigterm:  # ``timeout`` sends it to the process, and then to its group
        with pytest.raises(bench.Stopped):
            os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)
    assert sigterm.came


def test_sigterm_after_the_last_row_changes_nothing() -> None:
    with bench.Sigterm() as sigterm:
        sigterm.is_over = True
        os.kill(os.getpid(), signal.SIGTERM)
    assert not sigterm.came


def test_compiling_ahead_is_part_of_the_budget(command: typer.Typer, monkeypatch: pytest.MonkeyPatch) -> None:
    until, deadlines = [], []

    def warmed(*arguments: object) -> int:
        until.append(arguments[-1])
        time.sleep(0.5)
        return 3

    def rows_of(cases: object, chosen: object, settings: runs.Settings, **more: object) -> object:
        deadlines.append(settings.deadline)
        return runs.run(cases, chosen, settings, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(bench.warm, "warm", warmed)
    monkeypatch.setattr(bench, "run", rows_of)
    start = time.time()
    options = ["--device", "cpu", "--cases", "biased", "--providers", "eager", "--jobs", "1", "--seconds", "30"]
    result = CliRunner().invoke(command, options)
    took = time.time() - start
    assert result.exit_code == 0, result.output
    assert "compiled ahead: 3 calls" in result.output
    assert start + 10.0 <= until[0] <= start + 10.0 + took
    assert start + 30.0 <= deadlines[0] <= start + 30.0 + took - 0.5


def test_portable_kernels_are_held_against_peers_and_are_none() -> None:
    case = "bias-full-d64-2k"
    found = [made_up(case, OURS, 1.0, 4.0), made_up(case, PORTABLE, 1.25, 5.0), made_up(case, "flex", 2.0, 10.0)]
    assert tables.best_peer(tables.by_case(found)[case], "fwd") == ("flex", 2.0)
    published = summary.Published(facts={}, rows=found)
    (line,) = [x for x in summary.portable(published).splitlines() if case in x]
    assert [cell.strip() for cell in line.split("|")[2:-1]] == ["1.250", "0.80", "1.60", "5.000", "0.80", "2.00"]


@pytest.mark.parametrize(
    ("untimed", "clause"),
    [
        (0, "and FlexAttention. [All"),
        (1, "FlexAttention, which got no figure on 1 workload. [All"),
        (2, "on 2 workloads. [All"),
    ],
)
def test_the_front_page_names_missing_figures_only_where_there_are_any(untimed: int, clause: str) -> None:
    found = []
    for place, case in enumerate(("bias-full-d64-2k", "plain-d128-4k")):
        found += [made_up(case, OURS, 1.0, 4.0), made_up(case, "sdpa-math", 2.0, 8.0)]
        status = rows.NO_TIME if place < untimed else rows.REFUSED
        found.append(rows.blank(case, "flex", rows.MODES, status, "a reason"))
    text = summary.headline(summary.Published(facts={"machine": {"gpu": "GPU"}}, rows=found))
    assert clause in " ".join(text.split())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--mode", "backward"], "accepted: fwd, fwdbwd, both"),
        (["--providers", "nobody"], "no provider matches 'nobody'"),
        (["--dtype", "int8"], "accepted: fp16, bf16, fp32"),
        (["--device", "mps"], "accepted are cpu and cuda"),
        (["--baseline", "missing.json"], "is not a report"),
    ],
)
def test_wrong_options_are_told_what_is_accepted(command: typer.Typer, options: list[str], message: str) -> None:
    result = CliRunner().invoke(command, ["--device", "cpu", "--cases", "biased", *options], env={"COLUMNS": "300"})
    assert result.exit_code == 2
    assert message in " ".join(result.output.split())


def test_figures_that_json_lacks_become_words() -> None:
    assert bench._plain({"a": [math.nan, -math.inf, 1.0], "b": (2,)}) == {"a": ["nan", "-inf", 1.0], "b": [2]}
