"""The host's part of a Hopper launch: arguments kept by address are those that Triton's own launcher would pass."""

from __future__ import annotations

import importlib
from dataclasses import fields, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="only Triton compiles kernels")
pytest.importorskip("triton.experimental.gluon.language.nvidia.hopper", reason="this Triton has no Gluon for Hopper")
import triton

from biasflash.backends.backend import Gradients
from biasflash.backends.hopper import operands
from biasflash.backends.hopper.operands import Box, DescriptorLaunch
from biasflash.backends.triton import launch as portable
from biasflash.backends.triton.operands import Launch, Slot
from biasflash.testing.hopper_offline import packed
from biasflash.testing.offline import meta_tensors
from test_hopper import SHARED, own, planned, problem

driver = importlib.import_module("triton.backends.nvidia.driver")


class Launcher:
    """Triton's launcher of a compiled kernel, but for the C function at its end."""

    global_scratch_size = profile_scratch_size = 0
    global_scratch_align = profile_scratch_align = num_ctas = 1
    launch_cooperative_grid = launch_pdl = False
    __call__ = driver.CudaLauncher.__call__

    def __init__(self, signature: dict[str, Any], seen: list[tuple[Any, ...]]) -> None:
        count = sum(isinstance(kind, str) and kind.startswith("tensordesc") for kind in signature.values())
        facts = {"swizzle": 3, "elem_size": 2, "elem_type": 5, "block_size": [64, 64], "fp4_padded": False}
        self.launch = driver.wrap_handle_tensordesc(lambda *given: seen.append(given), signature, [facts] * count)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """Descriptors that were encoded; each one is its arguments here, so that equal ones are equal."""
    found: list[tuple[Any, ...]] = []

    def encode(*facts: Any) -> tuple[Any, ...]:
        found.append(("descriptor", *(tuple(x) if isinstance(x, list) else x for x in facts)))
        return found[-1]

    monkeypatch.setattr(driver, "TMA_DTYPE_DEVICE_TO_HOST", {5: 5})
    utils = SimpleNamespace(fill_tma_descriptor=encode)
    monkeypatch.setattr(triton.runtime, "driver", SimpleNamespace(active=SimpleNamespace(utils=utils)))
    return found


def ready(name: str) -> tuple[DescriptorLaunch, list[tuple[Any, ...]], dict[str, int]]:
    """A launch whose kernel counts as compiled, what reaches its C function, and an address for every tensor."""
    p = problem(biases=SHARED)
    recipe = planned(p)[0]["backward" if name != "shared_forward" else "forward"]
    launched, tensors = own(recipe, name), meta_tensors(p, recipe)
    seen: list[tuple[Any, ...]] = []
    launcher = Launcher(packed(launched, tensors)[1], seen)
    launched._compiled = SimpleNamespace(run=launcher, function="function", packed_metadata="metadata")
    return launched, seen, {slot: 4096 * (i + 1) for i, slot in enumerate(tensors)}


@pytest.mark.parametrize("name", ["shared_forward", "dkdv", "dq", "dbias"])
def test_kept_arguments_are_those_that_triton_makes(name: str, made: list[tuple[Any, ...]]) -> None:
    launched, seen, addresses = ready(name)
    boxes = sum(isinstance(value, Box) for value in launched.arguments.values())
    Launch.start(launched, 7, addresses)
    assert len(made) == boxes > 0
    made.clear()
    for _ in range(3):
        launched.start(7, addresses)
    assert seen[1] == seen[2] == seen[3] == seen[0]
    assert len(made) == boxes, "encoded once"
    other = {slot: address + 2**20 for slot, address in addresses.items()}
    launched.start(8, other)
    assert len(made) == 2 * boxes
    Launch.start(launched, 8, other)
    assert seen[-1] == seen[-2] != seen[0]


def test_a_tensor_that_moves_costs_its_own_descriptors_only(made: list[tuple[Any, ...]]) -> None:
    launched, seen, addresses = ready("dq")
    launched.start(7, addresses)
    made.clear()
    moved = {**addresses, "q": addresses["q"] + 2**20}
    launched.start(7, moved)
    assert [x[1] for x in made] == [moved["q"]]
    Launch.start(launched, 7, moved)
    assert seen[-1] == seen[-2]


def test_what_is_kept_has_an_end(made: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operands, "MOST_KNOWN", 3)
    launched, seen, addresses = ready("dq")
    for step in range(10):
        launched.start(7, {slot: address + 2**20 * step for slot, address in addresses.items()})
        assert len(launched._known) <= 3
        assert launched._bare is not None
        assert len(launched._bare.known) <= 3 * len(launched._bare.positions)
    Launch.start(launched, 7, {slot: address + 2**20 * 9 for slot, address in addresses.items()})
    assert seen[-1] == seen[-2]


def test_a_launcher_that_is_built_some_other_way_is_called_as_triton_calls_it(made: list[tuple[Any, ...]]) -> None:
    launched, seen, addresses = ready("dq")
    inner = launched._compiled.run.launch
    launched._compiled.run.launch = lambda *given: inner(*given)
    launched.start(7, addresses)
    assert launched._bare is None
    assert len(seen) == 1


@pytest.mark.parametrize("form", [None, "iiiKKppOOOOOOO"], ids=["a list", "one more"])
def test_a_launcher_that_takes_other_arguments_is_called_as_triton_calls_it(
    form: str | None, made: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Triton 3.7 has the names of 3.6, but hands over the kernel's arguments in a list."""
    launched, seen, addresses = ready("dq")
    if form is None:
        monkeypatch.delattr(driver, "_BASE_ARGS_FORMAT")
    else:
        monkeypatch.setattr(driver, "_BASE_ARGS_FORMAT", form)
    launched.start(7, addresses)
    assert launched._bare is None
    assert len(seen) == 1


def test_what_stands_for_a_descriptor_has_what_triton_reads_of_one() -> None:
    located: Any = operands._Located(4096, [8, 64], [64, 1])
    read = {f.name for f in fields(operands.TensorDescriptor)} - {"block_shape", "layout"}  # facts of the kernel
    assert all(hasattr(located, name) for name in read), read


def test_a_kernel_that_wants_scratch_of_its_own_gets_it_from_triton(made: list[tuple[Any, ...]]) -> None:
    launched, _, _ = ready("dq")
    launched._compiled.run.profile_scratch_size = 1
    assert launched._bare is None


def test_scratch_is_one_piece_with_aligned_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = planned(problem(M=1000, biases=SHARED))[0]["backward"]
    size, parts = recipe.places
    assert [(name, count) for name, _, count in parts] == list(recipe.scratch)
    ends = [first + count for _, first, count in parts]
    assert all(first % 64 == 0 for _, first, _ in parts)
    assert all(end <= first for end, (_, first, _) in zip(ends, parts[1:], strict=False))
    assert ends[-1] <= size
    asked: dict[str, int] = {}
    for launched in recipe.launches:
        monkeypatch.setattr(type(launched), "can_start", True)
        monkeypatch.setattr(launched, "start", lambda stream, addresses: asked.update(addresses))
    streams = SimpleNamespace(get_current_stream=lambda index: 7)
    monkeypatch.setattr(portable, "driver", SimpleNamespace(active=streams))
    tensors: dict[str, torch.Tensor] = {}
    small = type(recipe)(launches=recipe.launches, scratch=tuple((name, 100) for name, _ in recipe.scratch))
    portable._launch(small, torch.device("cpu"), tensors, {})
    start = tensors["scratch"].data_ptr()
    assert {name: asked[name] - start for name, _ in small.scratch} == {
        name: 4 * first for name, first, _ in small.places[1]
    }
    assert all(isinstance(slot, str) for slot in asked)
    assert {str(v) for x in recipe.launches for v in x.arguments.values() if isinstance(v, Slot)} & asked.keys()


def test_sums_that_are_left_to_torch_are_found_where_addresses_suffice(monkeypatch: pytest.MonkeyPatch) -> None:
    """A trained bias of one query row: its columns are added up in scratch, from the second call on as well."""
    p = replace(problem(batch=(2,), M=128, biases=("b11N",)), device=torch.device("cpu"))
    monkeypatch.setattr(Launch, "can_start", True)
    monkeypatch.setattr(Launch, "start", lambda self, stream, addresses: None)
    streams = SimpleNamespace(get_current_stream=lambda index: 7)
    monkeypatch.setattr(portable, "driver", SimpleNamespace(active=streams))
    monkeypatch.setattr(torch, "empty", torch.ones)  # as if kernels had left ones
    q, bias = torch.zeros(2, 128, 8, 64, dtype=p.dtype), torch.zeros(2, 1, 1, 128, dtype=p.dtype)
    lse, total = torch.zeros(2, 8, 128), torch.empty_like(bias)
    into = Gradients(q=q.clone(), k=q.clone(), v=q.clone(), terms=(total,))
    portable.run_backward(p, into, q, None, q, q, q, [bias], q, lse, lse)
    assert bool(total.eq(8).all()), "eight heads"
