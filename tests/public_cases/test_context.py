"""Reports whose point is the surroundings of the call: compile, accumulation, copies, determinism, DDP."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import biasflash
from public_cases.case import BF16, F64, Attend, Built, Call, Draw, check, gradients, incoming, judge, on, run
from public_cases.numeric import only_the_bias_is_trained

BACKENDS = ("reference", "cpu")


def plain_case(N: int = 24, *, B: int = 2, H: int = 2, seed: int = 5, dtype: torch.dtype = torch.float32) -> Built:
    draw = Draw("cpu", seed)
    return Built(leaves=draw.qkv(B, N, N, H, 16, dtype=dtype) | {"bias": draw(1, H, N, N, dtype=dtype)})


def compiled(attend: Attend) -> Attend:
    return torch.compile(attend, backend="aot_eager", fullgraph=True)


@pytest.mark.parametrize("backend", BACKENDS)
def test_compiled_region_that_transposes_around_the_call(backend: str) -> None:
    """NVIDIA/cuEquivariance#223, vllm-project/vllm#58182: a fake promised strides that the kernel did not deliver."""

    def region(call: Call) -> Tensor:
        q, k, v = (call[n].transpose(1, 2).contiguous().transpose(1, 2) for n in "qkv")
        out = on(backend)(call | {"q": q, "k": k, "v": v})
        assert out.stride() == (33 * 3 * 16, 3 * 16, 16, 1)
        return (out.reshape(2, 33, 48) * 1.0).view(2, 33, 3, 16)

    built = plain_case(33, H=3)
    judge(built, run(built, compiled(region)))


@pytest.mark.parametrize("backend", BACKENDS)
def test_bias_made_by_a_network_inside_the_compiled_region(backend: str) -> None:
    """pytorch/pytorch#157677, pytorch/pytorch#145869: a bias that is no leaf tripped an assertion."""
    draw = Draw("cpu", 11)
    leaves = draw.qkv(2, 20, 20, 3, 16) | {"feature": draw(2, 8), "weight": draw(8, 3 * 20 * 20, size=0.3)}

    def view(t: dict[str, Tensor]) -> dict[str, Any]:
        return {n: t[n] for n in "qkv"} | {"bias": (t["feature"] @ t["weight"]).view(2, 3, 20, 20)}

    built = Built(leaves=leaves, view=view)
    fresh = built.fresh()
    out = torch.compile(lambda t: on(backend)(built.call(t)), backend="aot_eager", fullgraph=True)(fresh)
    judge(built, {"out": out.detach(), **gradients(built, fresh, out)})


@pytest.mark.parametrize("backend", BACKENDS)
def test_gating_the_output_in_place_is_never_silently_wrong(backend: str) -> None:
    """deepspeedai/DeepSpeed#6802: the saved output was edited in place, and gradients changed without a word."""
    built = plain_case(25)
    leaves = built.fresh()
    out = on(backend)(built.call(leaves)).mul_(2.0)
    with pytest.raises(RuntimeError, match="inplace"):
        gradients(built, leaves, out)


@pytest.mark.parametrize("backend", BACKENDS)
def test_vmap_over_an_ensemble_is_refused(backend: str) -> None:
    """pytorch/pytorch#188764, #151558: an operand without the mapped axis got the wrong batch size; here: an error."""
    draw = Draw("cpu", 12)
    q, k, v = (draw(3, 2, 13, 2, 16) for _ in range(3))
    bias, mask = draw(1, 2, 13, 13), draw.chance(0.7, 2, 1, 1, 13)
    with pytest.raises(RuntimeError, match="biasflash::forward"):
        torch.vmap(lambda q, k, v: biasflash.attention(q, k, v, bias, mask, backend=backend))(q, k, v)


@pytest.mark.parametrize("backend", BACKENDS)
def test_gradient_penalty_is_refused(backend: str) -> None:
    """pytorch/pytorch#116350, learnables/learn2learn#429: the second derivative was silently zero; here: an error."""
    built = plain_case(11)
    leaves = built.fresh()
    out = on(backend)(built.call(leaves))
    first = torch.autograd.grad(out.sin().sum(), [leaves["q"], leaves["bias"]], create_graph=True)
    assert all(g.requires_grad for g in first)
    with pytest.raises(biasflash.UnsupportedError, match="second derivative"):
        torch.autograd.grad(sum((g**2).sum() for g in first), list(leaves.values()))


@pytest.mark.parametrize("backend", BACKENDS)
def test_same_bits_every_run(backend: str) -> None:
    """pytorch/pytorch#197771, #91979, Dao-AILab/flash-attention#746: bias gradients differed from run to run."""
    built = plain_case(33, B=24)
    runs = [run(built, on(backend)) for _ in range(3)]
    for later in runs[1:]:
        for name, value in runs[0].items():
            assert torch.equal(later[name], value), name
    judge(built, runs[0])


class Layer(torch.nn.Module):
    """Holds the function it calls and a bias of shape ``(M, N, H)``, as some models store it."""

    def __init__(self, attend: Attend, bias: Tensor) -> None:
        super().__init__()
        self.attend, self.bias = attend, torch.nn.Parameter(bias.clone())

    def forward(self, call: Call) -> Tensor:
        return self.attend(call | {"bias": self.bias.permute(2, 0, 1)[None]})


def heads_last_case() -> Built:
    draw = Draw("cpu", 13)
    leaves = draw.qkv(2, 24, 24, 3, 16) | {"bias": draw(24, 24, 3)}
    return Built(leaves=leaves, view=lambda t: t | {"bias": t["bias"].permute(2, 0, 1)[None]})


@pytest.mark.parametrize("backend", BACKENDS)
def test_deepcopy_of_a_module_that_holds_the_function(backend: str) -> None:
    """facebookresearch/xformers#290, #203: copies for moving averages of weights failed."""
    built = heads_last_case()
    leaves = built.fresh()
    copied = copy.deepcopy(Layer(on(backend), leaves["bias"].detach()))
    leaves["bias"] = copied.bias
    out = copied({n: leaves[n] for n in "qkv"} | {"mask": None, "causal": False, "scale": None})
    judge(built, {"out": out.detach(), **gradients(built, leaves, out)})


@pytest.fixture
def _one_process_group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.usefixtures("_one_process_group")
def test_distributed_data_parallel_takes_the_gradient_as_it_is(backend: str) -> None:
    """pytorch/pytorch#47163, XPixelGroup/HAT#154: gradient strides unlike the parameter's gave warnings and copies.

    Warnings are errors here, so the one about strides would fail the test.
    """
    built = heads_last_case()
    leaves = built.fresh()
    layer = torch.nn.parallel.DistributedDataParallel(Layer(on(backend), leaves["bias"].detach()))
    for _ in range(2):
        layer.zero_grad()
        for name in "qkv":
            leaves[name].grad = None
        out = layer({n: leaves[n] for n in "qkv"} | {"mask": None, "causal": False, "scale": None})
        out.backward(incoming(built, out))
    bias = layer.module.bias
    assert bias.grad.stride() == bias.stride()
    judge(built, {"out": out.detach(), "bias": bias.grad, **{n: leaves[n].grad for n in "qkv"}})


@pytest.mark.parametrize("backend", BACKENDS)
def test_accumulation_over_micro_batches(backend: str) -> None:
    """triton-lang/triton#5339, #6524: a second run changed results, since a buffer was used again."""
    built = plain_case(40)
    leaves = built.fresh()
    for factor in (1.0, -0.5):
        out = on(backend)(built.call(leaves))
        out.backward(factor * incoming(built, out))
    judge(built, {"out": out.detach(), **{n: 2 * t.grad for n, t in leaves.items()}})


@pytest.mark.parametrize("backend", BACKENDS)
def test_evaluation_of_a_trained_bias(backend: str) -> None:
    """facebookresearch/xformers#783, #636: requires_grad of the bias alone made the call fail."""
    built = plain_case(30, dtype=BF16)
    with torch.no_grad():
        out = on(backend)(built.call(built.fresh()))
    assert not out.requires_grad
    judge(built, {"out": out})


def test_gradcheck_in_float64() -> None:
    """latkins/trifast#5, SHI-Labs/NATTEN#191: no float64, or gradcheck failed. The backend is the one chosen."""
    draw = Draw("cpu", 14)
    leaves = [draw(1, n, 2, w, dtype=F64).requires_grad_() for n, w in ((3, 3), (4, 3), (4, 2))]
    bias, mask = draw(1, 2, 3, 4, dtype=F64).requires_grad_(), torch.tensor([True, True, False, True])
    assert torch.autograd.gradcheck(lambda q, k, v, b: biasflash.attention(q, k, v, b, mask), (*leaves, bias))


def test_tuning_only_the_bias_twice_through_one_graph() -> None:
    """pytorch/pytorch#148476: what backward needs must be kept though q, k and v want nothing."""
    built = only_the_bias_is_trained.make()
    leaves = built.fresh()
    out = on("cpu")(built.call(leaves))
    for keep in (True, False):
        judge(built, {"out": out.detach(), **gradients(built, leaves, out, retain_graph=keep)})
    check(only_the_bias_is_trained, "cpu")
