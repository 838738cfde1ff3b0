"""Trials of ``biasflash tune`` on kernels that really run: results are compared, and what is wrong is never timed."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from biasflash.backends.triton.config import TileConfig
from biasflash.backends.triton.operands import Device
from biasflash.cli import candidates, compiling, timing, trials
from biasflash.cli.timing import Timing, Work
from biasflash.cli.trials import GpuTrials, Job, Stage, WrongError
from biasflash.testing.case import Bias, Case

CPU = torch.device("cpu")
TARGET = compiling.Target(triton=None, device=Device(shared_memory=232448, multiprocessors=2), tiles=None)
SMALL = (TileConfig(block_m=32, block_n=32, warps=4, stages=1), TileConfig(block_m=16, block_n=32, warps=4, stages=1))


@pytest.fixture(autouse=True)
def _clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that runs what it times once and calls it a millisecond."""

    def once(work: Work, device: torch.device, budget_ms: float = 0.0) -> Timing:
        work()
        return Timing(ms=1.0, p20=1.0, p80=1.0, runs=1)

    monkeypatch.setattr(timing, "measure", once)


def jobs(*shapes: str, dtype: str = "fp32") -> dict[str, Job]:
    """Jobs by kernel; more than 192 keys are no window, so the kernels with tiles of their own run."""
    case = Case(
        name="tiny",
        why="",
        tags=frozenset(),
        **{"batch": (2,), "M": 24, "N": 200, "Hq": 1, "Hkv": 1, "D": 16, "Dv": 16, "dtype": dtype},
        biases=tuple(Bias(shape=shape) for shape in shapes),
    )
    found = trials.jobs_of(case, candidates.KERNELS, CPU, TARGET)
    return {job.kernel: dataclasses.replace(job, tiles=SMALL) for job in found}


@pytest.mark.parametrize(
    ("shapes", "dtype", "kernels"),
    [
        (("1HMN",), "fp32", {"forward", "dkdv", "dq", "dbias"}),
        (("BHMN",), "fp16", {"forward", "dkdv", "dq_from_ds"}),
        (("B11N", "BHM1"), "fp32", {"forward", "dkdv", "dq"}),
        ((), "fp16", {"forward", "dkdv", "dq"}),
    ],
)
def test_every_kernel_is_tried_under_every_tile(shapes: tuple[str, ...], dtype: str, kernels: set[str]) -> None:
    found = jobs(*shapes, dtype=dtype)
    assert set(found) == kernels
    first = next(iter(found.values()))
    stage = Stage(first.case, first.problem, CPU, TARGET)
    for job in found.values():
        outcome = trials.run_job(job, GpuTrials(job, stage), {})
        assert (outcome.failure, outcome.skipped) == ("", {}), job.kernel
        assert [t.tile for t in outcome.timed] == list(SMALL)


@pytest.mark.parametrize("kernel", ["forward", "dkdv", "dq", "dbias"])
def test_a_tile_with_other_results_is_wrong(kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    job = jobs("1HMN")[kernel]
    stage = Stage(job.case, job.problem, CPU, TARGET)
    trial = GpuTrials(job, stage)
    trial.try_tile(SMALL[0])
    stage.tensors["v"] = stage.tensors["v"].roll(1, -3)  # as if a tile read the wrong keys
    with pytest.raises(WrongError, match="is off by"):
        trial.try_tile(SMALL[1])


def test_a_rules_tile_that_leaves_something_out_is_wrong() -> None:
    job = jobs("1HMN")["dq"]
    stage = Stage(job.case, job.problem, CPU, TARGET)
    stage.tensors["k"][0, 3] = float("nan")
    outcome = trials.run_job(job, GpuTrials(job, stage), {})
    assert "NaN in" in outcome.failure
    assert outcome.timed == []
