"""The program: helps, explain, check with its report and exit codes, and what it says without its extra."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

from biasflash import __version__, reference
from biasflash.cli import check as check_command
from biasflash.cli import machine
from biasflash.cli.main import app
from biasflash.testing.cases import CASES
from biasflash.testing.conformance import Result
from biasflash.testing.refusals import REFUSALS
from biasflash.testing.wrong_call import Refusal

runner = CliRunner()


def _run(*args: str, columns: int = 160) -> Any:
    return runner.invoke(app, list(args), env={"COLUMNS": str(columns)})


# -------------------------------------------------------------------------------------------------------------- help


@pytest.mark.parametrize("command", ["check", "bench", "explain", "demo"])
def test_help_of_each_command(command: str) -> None:
    found = _run(command, "--help")
    assert found.exit_code == 0, found.output
    assert "Usage" in found.output
    assert "Exit code 1" in " ".join(found.output.split())


def test_help_lists_the_commands() -> None:
    found = _run("--help")
    assert found.exit_code == 0
    for command in ("check", "bench", "explain", "cases", "demo"):
        assert command in found.output


def test_commands_compile_no_kernels_of_other_lengths(monkeypatch: pytest.MonkeyPatch) -> None:
    for before, after in ((None, "off"), ("on", "on")):
        with monkeypatch.context() as patch:
            patch.delenv("BIASFLASH_AHEAD", raising=False)
            if before:
                patch.setenv("BIASFLASH_AHEAD", before)
            assert CliRunner().invoke(app, ["cases"]).exit_code == 0
            assert os.environ["BIASFLASH_AHEAD"] == after


def test_version() -> None:
    found = _run("--version")
    assert (found.exit_code, found.output.strip()) == (0, __version__)


@pytest.mark.parametrize("missing", ["typer", "rich"])
def test_without_the_extra_it_says_what_to_install(missing: str) -> None:
    code = f"import sys; sys.modules[{missing!r}] = None; from biasflash.cli.main import app; app()"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert found.returncode == 1
    assert found.stderr.strip().splitlines() == [
        f"the command line of biasflash needs {missing}; install it with: pip install 'biasflash[cli]'"
    ]


# ----------------------------------------------------------------------------------------------------------- explain


def test_explain_names_the_backend_and_every_objection() -> None:
    found = _run("explain", "--q", "2,128,8,64", "--bias", "1,8,128,128:fp32", "--mask", "2,1,1,128", "--device", "cpu")
    assert found.exit_code == 0, found.output
    assert "bias (1, 8, 128, 128) float32 trained; mask (2, 1, 1, 128) bool" in found.output
    assert "backend   cpu" in found.output
    assert "skipped   triton:" in found.output
    assert "skipped   reference: not needed, cpu comes first" in found.output


def test_explain_takes_cross_attention_and_a_frozen_bias() -> None:
    found = _run(
        *("explain", "--q", "3,10,8,64", "--k", "3,20,2,64", "--v", "3,20,2,32", "--bias", "20:frozen:fp16"),
        *("--causal", "top-left", "--dtype", "fp32", "--device", "cpu", "--backend", "reference"),
    )
    assert found.exit_code == 0, found.output
    assert "M=10 N=20 Hq=8 Hkv=2 D=64 Dv=32; float32 on cpu; bias (1, 1, 1, 20) float16; causal" in found.output
    assert "backend   reference" in found.output


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("--q", "2,128,8,64", "--bias", "1,8,128,12"), "axis N is 12, wanted 1 or 128"),
        (("--q", "128,64"), "too few axes: wanted (*B M Hq D)"),
        (("--q", "2,128,8,512"), "supported: 1 to 256"),
        (("--q", "2,x,8,64"), "wanted sizes with commas"),
        (("--q", "2,-1,8,64"), "wanted sizes with commas"),
        (("--q", "2,128,8,64", "--dtype", "int8"), "accepted: fp16, bf16, fp32, fp64"),
        (("--q", "2,128,8,64", "--bias", "1:fp8"), "accepted: fp16, bf16, fp32, fp64"),
        (("--q", "2,128,8,64", "--causal", "yes"), "bottom-right or top-left"),
        (("--q", "2,128,8,64", "--backend", "cuda"), "is unknown; accepted"),
        (("--q", "2,128,8,64", "--device", "tpu"), "accepted: cuda, cpu"),
    ],
)
def test_explain_refuses_with_exit_code_2(args: tuple[str, ...], words: str) -> None:
    device = () if "--device" in args else ("--device", "cpu")
    found = _run("explain", *args, *device)
    assert found.exit_code == 2, found.output
    assert words in " ".join(found.output.split())


def test_explain_exits_with_1_if_the_backend_objects() -> None:
    found = _run("explain", "--q", "1,8,1,16", "--dtype", "fp64", "--backend", "triton", "--device", "cpu")
    assert found.exit_code == 1, found.output
    assert "none: every backend objects" in found.output
    assert "float64" in found.output


# ------------------------------------------------------------------------------------------------------------- check


def _check(tmp_path: Path, *args: str) -> tuple[Any, dict[str, Any]]:
    report = tmp_path / "report.json"
    found = _run("check", "--device", "cpu", "--json", str(report), *args)
    return found, json.loads(report.read_text())


def test_check_passes_and_reports(tmp_path: Path) -> None:
    found, report = _check(tmp_path, "--cases", "plain,bias-1hmn,bias-large", "--backend", "cpu,reference")
    assert found.exit_code == 0, found.output
    runs = 2 * (3 + 3 + 1)  # bias-large is a float32 case
    assert report["counts"] == {
        "checked": runs + len(REFUSALS),
        "passed": runs + len(REFUSALS),
        "failed": 0,
        "skipped": 0,
    }
    assert len(report["results"]) == runs
    first = report["results"][0]
    assert (first["backend"], first["case"], first["dtype"], first["status"]) == ("cpu", "plain", "float16", "passed")
    assert {figure["tensor"] for figure in first["figures"]} == {"out", "lse", "dq", "dk", "dv"}
    assert all(0 <= figure["used"] <= 1 for figure in first["figures"])
    assert {"biasflash", "torch", "triton", "python", "gpu", "driver", "cuda", "date", "cpu"} <= report[
        "machine"
    ].keys()
    assert f"{runs + len(REFUSALS)} checked" in found.output


def test_check_counts_absent_hardware_as_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference, "objections", lambda problem: ("needs an abacus",))
    found, report = _check(tmp_path, "--cases", "plain", "--dtypes", "fp32")
    assert found.exit_code == 0, found.output
    assert report["backends_passed_over"]["reference"] == "needs an abacus"
    skipped = [r for r in report["results"] if r["status"] == "skipped"]
    assert report["counts"]["skipped"] == len(skipped) >= 1
    assert report["counts"]["checked"] == 1 + len(REFUSALS)
    assert "skipped backend reference: needs an abacus" in found.output


def test_check_fails_if_a_named_backend_does_not_run_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference, "objections", lambda problem: ("needs an abacus",))
    found, report = _check(tmp_path, "--cases", "plain", "--dtypes", "fp32", "--backend", "reference")
    assert found.exit_code == 1
    assert report["counts"]["failed"] == 0
    assert "nothing was checked" in found.output
    found, _ = _check(tmp_path, "--cases", "plain", "--dtypes", "fp32", "--backend", "cpu,reference")
    assert found.exit_code == 1


def test_check_fails_with_a_wrong_backend(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = reference.forward

    def forward(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
        out, lse, low = real(*args)
        return out * 1.01, lse, low

    monkeypatch.setattr(reference, "forward", forward)
    found, report = _check(tmp_path, "--cases", "plain", "--dtypes", "fp32", "--backend", "reference")
    assert found.exit_code == 1
    assert report["counts"]["failed"] == 1
    assert "over budget" in report["results"][0]["message"]
    assert "failed reference plain float32" in found.output


def test_check_fails_with_a_poor_refusal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    poor = Refusal(name="poor", call=lambda: None, error=ValueError, words=())
    monkeypatch.setattr(check_command, "REFUSALS", {"poor": poor})
    found, report = _check(tmp_path, "--cases", "plain", "--dtypes", "fp32", "--backend", "reference")
    assert found.exit_code == 1
    assert report["refusals"] == [{"call": "poor", "status": "failed", "message": "the wrong call was accepted"}]
    assert "failed wrong call poor" in found.output


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("--cases", "nonsense"), "no case has the name or tag 'nonsense'"),
        (("--dtypes", "fp64"), "dtype 'fp64' is unknown; accepted: fp16, bf16, fp32"),
        (("--backend", "cuda"), "backend 'cuda' is unknown; accepted: hopper, triton, cpu, reference"),
        (("--device", "meta"), "no backend runs there; accepted: cuda, cpu"),
    ],
)
def test_check_refuses_wrong_options(args: tuple[str, ...], words: str) -> None:
    found = _run("check", *(() if "--device" in args else ("--device", "cpu")), *args)
    assert found.exit_code == 2, found.output
    assert words in " ".join(found.output.split())


def test_check_in_several_processes_finds_the_same(tmp_path: Path) -> None:
    args = ("--cases", "plain,causal", "--dtypes", "fp32", "--backend", "reference")
    _, alone = _check(tmp_path, *args)
    found, together = _check(tmp_path, *args, "--jobs", "2")
    assert found.exit_code == 0, found.output
    for report in (alone, together):
        for result in report["results"]:
            del result["seconds"]
    assert [(r.pop("process"), r.pop("turn")) for r in alone["results"]] == [(0, 0), (0, 0)]
    assert {(r.pop("process"), r.pop("turn")) for r in together["results"]} <= {(1, 1), (1, 2), (2, 1), (2, 2)}
    assert alone["results"] == together["results"]


FAULT = "CUDA error: an illegal memory access was encountered"


@dataclass(frozen=True, kw_only=True)
class JobOnAnAccelerator(check_command._Job):
    """The backend faults in the case ``causal``, and as on a GPU every later call of the same process fails with it."""

    def run(self) -> Result:
        if self.case == "causal":

            def forward(*args: Any) -> Any:
                raise RuntimeError(FAULT)

            reference.forward = forward
        return super().run()


@dataclass(frozen=True, kw_only=True)
class JobThatEndsItsProcess(check_command._Job):
    """The case ``causal`` takes the whole process down."""

    def run(self) -> Result:
        return os._exit(9) if self.case == "causal" else super().run()


@dataclass(frozen=True, kw_only=True)
class JobThatFails(check_command._Job):
    """The backend refuses the case ``causal`` for a reason that says nothing about the device."""

    def run(self) -> Result:
        real = reference.forward

        def forward(*args: Any) -> Any:
            raise RuntimeError("out of patience")

        if self.case == "causal":
            reference.forward = forward
        try:
            return super().run()
        finally:
            reference.forward = real


@dataclass(frozen=True, kw_only=True)
class JobThatHangs(check_command._Job):
    """The case ``causal`` never ends, as a kernel that waits for what nobody sends."""

    def run(self) -> Result:
        if self.case == "causal":
            time.sleep(600)
        return super().run()


FIVE = ("--cases", "plain,causal,cross,bias-1hmn,one-key", "--dtypes", "fp32", "--backend", "reference")


def check_five(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, jobs: int, kind: type[check_command._Job]
) -> dict[str, dict[str, Any]]:
    """Five cases of which ``causal`` alone must fail; results by case."""
    monkeypatch.setattr(check_command, "_Job", kind)
    monkeypatch.setattr(check_command, "_may_lose_device", lambda device: True)
    found, report = _check(tmp_path, *FIVE, "--jobs", str(jobs))
    assert found.exit_code == 1
    assert found.output.count("failed reference causal float32") == 1
    by_case = {r["case"]: r for r in report["results"]}
    assert {name: r["status"] for name, r in by_case.items()} == {
        name: "failed" if name == "causal" else "passed"
        for name in ("plain", "causal", "cross", "bias-1hmn", "one-key")
    }
    return by_case


def test_a_fault_that_kills_the_device_is_one_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    results = check_five(tmp_path, monkeypatch, 1, JobOnAnAccelerator)
    fault = results["causal"]
    assert fault["message"] == f"RuntimeError: {FAULT}"
    alone = [name for name in results if name != "causal"]
    order = sorted((r["process"], r["turn"], name) for name, r in results.items())
    before = alone[: fault["turn"] - 1]
    assert [name for process, _, name in order if process == 1] == [*before, "causal"]
    assert [name for process, _, name in order if process == 2] == alone[len(before) :]


def test_a_process_that_dies_among_others_is_one_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    results = check_five(tmp_path, monkeypatch, 2, JobThatEndsItsProcess)
    assert results["causal"]["message"] == "the process that ran it died with exit code 9"


def test_a_case_that_hangs_is_one_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check_command, "PATIENCE", 30.0)  # starting a process is part of it
    results = check_five(tmp_path, monkeypatch, 2, JobThatHangs)
    assert results["causal"]["message"] == "no result after 30 s; the process was ended"


def test_cases_that_do_not_fit_the_time_are_skipped(tmp_path: Path) -> None:
    jobs = check_command._jobs(["cpu"], [CASES["causal"], CASES["plain"], CASES["bias-1hmn"]], ["fp32"], "cpu", 0)
    for processes, apart in ((1, False), (2, True)):
        found = list(check_command._work(jobs, processes, apart, deadline=time.monotonic() - 1.0))
        assert [(r.case, r.status, r.message) for r in found] == [
            (j.case, "skipped", "the time was used up") for j in jobs
        ]
    hanging = [JobThatHangs(**vars(job)) for job in jobs]
    found = list(check_command._spread(hanging, 1, itertools.count(1), time.monotonic() + 0.5))
    assert [r.message for r in found] == ["the time was used up while causal fp32 ran", *["the time was used up"] * 2]
    result = _run("check", "--device", "cpu", "--cases", "smoke", "--seconds", "1")
    assert result.exit_code == 1
    assert "the time was used up" in result.output


def test_other_failures_keep_their_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check_command, "_Job", JobThatFails)
    monkeypatch.setattr(check_command, "_may_lose_device", lambda device: True)
    _, report = _check(tmp_path, *FIVE, "--jobs", "1")
    assert report["counts"]["failed"] == 1
    assert {r["process"] for r in report["results"]} == {1}


# ------------------------------------------------------------------------------------------------------------- cases


def test_cases_are_listed_with_what_they_are() -> None:
    everything = _run("cases", columns=250)
    assert everything.exit_code == 0
    assert all(name in everything.output for name in CASES)
    some = _run("cases", "gqa-*,t5-causal-1hmn-*", columns=250).output
    assert "2 x 8192 x 32 x 128, Hkv 8" in some
    assert "bias 1HMN, causal" in some
    assert "relative positions, decoder" in some
    assert "swin" not in some
    unknown = _run("cases", "no-such-case")
    assert unknown.exit_code == 2
    assert "no case has the name or tag" in unknown.output


# ----------------------------------------------------------------------------------------------------------- machine


def test_a_gpu_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    found = _run("check", "--device", "cuda")
    assert found.exit_code == 2
    assert "torch sees no GPU here" in found.output
    assert machine.pick_device(None) == torch.device("cpu")
    assert machine.facts()["device_type"] == "cpu"


def test_driver_is_asked_of_the_system(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho 580.1.2\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    assert machine.facts("cpu")["driver"] == "580.1.2"
    program.write_text("#!/bin/sh\nexit 9\n")
    assert machine.facts("cpu")["driver"] is None


def test_a_glob_takes_no_gpu_sized_case_on_a_cpu() -> None:
    from biasflash.cli.check import _choose_cases

    assert not any(case.tags & {"workload", "big"} for case in _choose_cases("pair-*,*bias*", "cpu"))
    assert any("workload" in case.tags for case in _choose_cases("pair-*", "cuda"))
    assert [case.name for case in _choose_cases("pair-1hmn-d32-512", "cpu")] == ["pair-1hmn-d32-512"]
