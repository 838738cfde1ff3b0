"""Wide heads in float32, multiplied a few columns at a time: forward and backward must see the same scores."""

from __future__ import annotations

import pytest
import torch

from biasflash.backends.triton import launch, operands, plans, tables
from biasflash.cli.compiling import problem_of
from biasflash.testing import conformance
from biasflash.testing.case import Bias, Case, Mask

GPUS = {
    "sm_80": operands.Device(shared_memory=166912, multiprocessors=108, capability=80, gpu=""),
    "sm_90": operands.Device(shared_memory=232448, multiprocessors=132, capability=90, gpu=""),
    "H200": operands.Device(shared_memory=232448, multiprocessors=132, capability=90, gpu="NVIDIA H200"),
}


@pytest.fixture(params=GPUS)
def gpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, fresh_recipes: None) -> operands.Device:
    """Plans for this GPU, whatever is here."""
    device = GPUS[request.param]
    for module in (operands, launch):
        monkeypatch.setattr(module, "device_facts", lambda _: device)
    return device


def wide(D: int, **more: object) -> Case:
    shape: dict[str, object] = {"batch": (1,), "M": 20, "N": 40, "Hq": 1, "Hkv": 1, "D": D, "Dv": D, "scale": 1.0}
    return Case(name="wide", why="", tags=frozenset(), **(shape | more))  # type: ignore[arg-type]


@pytest.mark.usefixtures("general_kernels")
@pytest.mark.parametrize("D", [130, 256])
@pytest.mark.parametrize(
    "more",
    [
        {},
        {"N": 1, "M": 1},
        {"causal": True},
        {"N": 43, "biases": (Bias(shape="BHMN"),), "masks": (Mask(shape="B1MN"),)},
        {"batch": (3,), "biases": (Bias(shape="1HMN"),)},
    ],
    ids=str,
)
def test_large_scores_keep_their_weights(gpu: operands.Device, D: int, more: dict[str, object]) -> None:
    """Scores of some hundreds: a weight that backward takes from another sum than forward's is over its budget."""
    result = conformance.run_case("triton", wide(D, **more), "cpu", "fp32", 0)
    assert result.status == "passed", result.message


@pytest.mark.parametrize("D", [64, 128, 144, 256])
@pytest.mark.parametrize("Dv", [64, 256])
@pytest.mark.parametrize("device", GPUS.values(), ids=GPUS)
def test_every_kernel_sums_scores_in_one_order(device: operands.Device, D: int, Dv: int) -> None:
    case = wide(D, Dv=Dv, M=1024, N=1000, batch=(4,), Hq=4, Hkv=4, dtype="fp32", biases=(Bias(shape="1HMN"),))
    problem = problem_of(case, torch.device("cuda"))
    with tables.using(None if not device.gpu else tables.read(tables.SHIPPED / "nvidia_h200.json")):
        found = [x for recipe in plans.contiguous_recipes(problem, device).values() for x in recipe.launches]
    orders = {(x.arguments["COLUMNS"], x.arguments["D_STRIPS"]) for x in found if "COLUMNS" in x.arguments}
    assert len(orders) == 1
    assert len([x for x in found if "COLUMNS" in x.arguments]) >= 4
