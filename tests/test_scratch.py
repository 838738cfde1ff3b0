"""What a backward pass holds beside its results: planned, without a GPU."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="only the GPU backends plan scratch")

from biasflash.backends.hopper.backward_plan import backward_recipe
from biasflash.backends.hopper.forward_plan import forward_recipe
from biasflash.backends.triton.operands import Device
from biasflash.backends.triton.plans import contiguous_recipes
from biasflash.backends.triton.recipe import Recipe
from biasflash.cli.compiling import problem_of
from biasflash.problem import Problem
from biasflash.testing.case import Bias
from biasflash.testing.cases import WORKLOADS

H200 = Device(shared_memory=232448, multiprocessors=132, gpu="NVIDIA H200")
SHARED = {name: case for name, case in WORKLOADS.items() if Bias(shape="1HMN") in case.biases}


def recipes(problem: Problem, backend: str) -> dict[str, Recipe]:
    """Those of contiguous tensors."""
    if backend == "triton":
        return contiguous_recipes(problem, H200)
    return contiguous_recipes(
        problem, H200, lambda *given: forward_recipe(*given)[0], lambda *given: backward_recipe(*given)[0]
    )


def beside_lse_and_delta(problem: Problem, backend: str) -> int:
    """Bytes of scratch and of what forward keeps for backward."""
    low = 4 * problem.batch_size * problem.Hq * problem.M if problem.keeps_low else 0
    scratch = recipes(problem, backend)["backward"].scratch
    return low + 4 * sum(count for name, count in scratch if name != "delta")


def test_there_are_workloads_of_a_shared_bias() -> None:
    assert len(SHARED) == 8


@pytest.mark.parametrize("backend", ["triton", "hopper"])
@pytest.mark.parametrize("name", SHARED)
def test_workloads_of_a_shared_bias_hold_64_mib_at_most(name: str, backend: str) -> None:
    problem = problem_of(SHARED[name], torch.device("cuda"))
    assert beside_lse_and_delta(problem, backend) <= 64 * 2**20


def test_sums_of_chunks_leave_room_for_row_statistics() -> None:
    """9 MiB a chunk; with 18 MiB of statistics 5 of them fit, without 7."""
    problem = problem_of(SHARED["pair-1hmn-d64-768"], torch.device("cuda"))
    chunk = 4 * 4 * 768 * 768
    held = dict(recipes(problem, "hopper")["backward"].scratch)
    assert 4 * held["partial0"] == 5 * chunk
