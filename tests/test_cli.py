"""The program: helps, explain, check with its report and exit codes, and what it says without its extra."""

from __future__ import annotations

import json
import subprocess
import sys
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
from biasflash.testing.refusals import REFUSALS, Refusal

runner = CliRunner()


def _run(*args: str) -> Any:
    return runner.invoke(app, list(args), env={"COLUMNS": "160"})


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
    for command in ("check", "bench", "explain", "demo"):
        assert command in found.output


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
    assert "passed    triton:" in found.output
    assert "passed    reference: not needed, cpu comes first" in found.output


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
        (("--backend", "cuda"), "backend 'cuda' is unknown; accepted: triton, cpu, reference"),
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
    assert alone["results"] == together["results"]


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
