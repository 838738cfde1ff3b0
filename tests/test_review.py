"""Faults found by reading and attacking the code, each with the call that showed it."""

from __future__ import annotations

import types

import pytest
import torch

import biasflash
from biasflash import UnsupportedError
from biasflash.problem import gather_terms


# torch.func loads torch.jit, which warns of itself
@pytest.mark.filterwarnings("ignore:.torch.jit.script.*is:DeprecationWarning")
@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_forward_mode_is_refused_rather_than_zero(backend: str) -> None:
    q = torch.randn(1, 6, 2, 4)

    def call(bias: torch.Tensor) -> torch.Tensor:
        out = biasflash.attention(q, q, q, bias, backend=backend)
        assert isinstance(out, torch.Tensor)
        return out

    with pytest.raises(UnsupportedError, match="no forward-mode derivative"):
        torch.func.jvp(call, (torch.zeros(6, 6),), (torch.eye(6),))
    with torch.autograd.forward_ad.dual_level(), pytest.raises(UnsupportedError, match="no forward-mode derivative"):
        call(torch.autograd.forward_ad.make_dual(torch.zeros(6, 6), torch.eye(6)))


def test_masks_come_after_biases_whatever_their_order_in_a_list() -> None:
    q = torch.randn(1, 2, 6, 4)
    mask = torch.ones(6, 6, dtype=torch.bool)
    mask[0, 0] = False
    bias = torch.zeros(6, 6)
    bias[0, 0] = torch.nan
    found = [biasflash.scaled_dot_product_attention(q, q, q, order) for order in ([mask, bias], [bias, mask])]  # type: ignore[arg-type]
    assert torch.equal(found[0], found[1])
    assert not found[0].isnan().any()
    assert gather_terms([bias], [mask], q.transpose(1, 2), q.transpose(1, 2))[1] == ["dense", "keep"]


def test_every_gpu_is_planned_as_what_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    operands = pytest.importorskip("biasflash.backends.triton.operands", reason="needs Triton")
    a100 = types.SimpleNamespace(
        major=8, minor=0, shared_memory_per_block_optin=166912, multi_processor_count=108, total_memory=1
    )
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: a100)
    operands.device_facts.cache_clear()
    found = operands.device_facts(torch.device("cuda:0"))
    operands.device_facts.cache_clear()
    assert found == operands.Device(shared_memory=166912, multiprocessors=108, capability=80)
    assert operands.float32_products(80) == "tf32x3"
