"""No kernel touches memory outside the tensors it was given: every address of every load and store is looked at.

On a GPU a stray access mostly goes unseen: the allocator's blocks are larger than the tensors. Tiles read past their
axis without a mask wherever that stays inside the tensor, so each of these layouts has its own way to go wrong.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from triton.runtime import interpreter

from biasflash import problem
from biasflash.backends.triton.operands import Launch, Slot, device_facts
from biasflash.backends.triton.plans import contiguous_recipes
from biasflash.testing.cases import CASES
from biasflash.testing.conformance import run_case

#: tensors that belong to the caller: no kernel writes to them
READ_ONLY = ("q", "k", "v", "dout", "dlse", "bias")


@dataclass(frozen=True)
class Region:
    """The bytes from a tensor's first element to the end of its last one."""

    name: str
    first: int
    end: int

    @classmethod
    def of(cls, name: str, t: Tensor, cut: int) -> Region:
        last = sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True))
        size = (last + 1) * t.element_size() if t.numel() else 0
        return cls(name, t.data_ptr(), t.data_ptr() + max(0, size - cut))


@dataclass
class Watch:
    """Looks at the accesses of each launch. ``cut``: bytes by which the region of a tensor is made too short."""

    cut: dict[str, int] = field(default_factory=dict)
    kernel: str = ""
    regions: list[Region] = field(default_factory=list)
    looked_at: int = 0
    faults: list[str] = field(default_factory=list)

    def begin(self, launch: Launch, tensors: Mapping[str, Tensor]) -> None:
        self.kernel = launch.kernel.__name__.removesuffix("_kernel")
        names: set[str] = set()
        for value in launch.arguments.values():
            names |= {x for x in (value if isinstance(value, tuple) else (value,)) if isinstance(x, Slot)}
        self.regions = [Region.of(name, tensors[name], self.cut.get(name, 0)) for name in sorted(names)]

    def allowed(self, kind: str, pointers: Any, mask: Any) -> np.ndarray[Any, np.dtype[np.bool_]]:
        """Which of ``pointers`` may be touched; those that are unmasked and may not are noted."""
        at = pointers.data.astype(np.int64)
        size = max(1, pointers.get_element_ty().primitive_bitwidth // 8)
        good = np.zeros(at.shape, dtype=bool)
        for region in self.regions:
            if kind == "load" or not region.name.startswith(READ_ONLY):
                good |= (at >= region.first) & (at + size <= region.end)
        wanted = np.broadcast_to(mask.data.astype(bool), at.shape)
        self.looked_at += int(wanted.sum())
        if (wanted & ~good).any():
            self.faults.append(f"{self.kernel}: a {kind} of {size} bytes {self._where(at[wanted & ~good])}")
        return wanted & good

    def _where(self, at: np.ndarray[Any, np.dtype[np.int64]]) -> str:
        """The address farthest from any tensor's end, as seen from the nearest tensor."""
        ends = [(int(np.abs(at - region.end).min()), region) for region in self.regions]
        nearest = min(ends, key=lambda pair: pair[0])[1]
        return f"at {int(at.max()) - nearest.end:+d} from the end of {nearest.name}, {at.size} addresses"


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Iterator[Watch]:
    """Every launch of the test is watched; what must not be touched is masked off, so that nothing crashes."""
    watch = Watch()
    builder, run = interpreter.InterpreterBuilder, Launch.run
    load, store = builder.create_masked_load, builder.create_masked_store

    def watched_run(self: Launch, tensors: Mapping[str, Tensor]) -> None:
        watch.begin(self, tensors)
        run(self, tensors)

    def watched_load(self: Any, pointers: Any, mask: Any, *rest: Any) -> Any:
        good = interpreter.TensorHandle(watch.allowed("load", pointers, mask), interpreter.tl.int1)
        return load(self, pointers, good, *rest)

    def watched_store(self: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        good = interpreter.TensorHandle(watch.allowed("store", pointers, mask), interpreter.tl.int1)
        return store(self, pointers, value, good, *rest)

    monkeypatch.setattr(Launch, "run", watched_run)
    monkeypatch.setattr(builder, "create_masked_load", watched_load)
    monkeypatch.setattr(builder, "create_masked_store", watched_store)
    yield watch
    assert watch.looked_at > 0, "nothing ran"


#: named case -> what it brings
WATCHED = {
    "one-query": "one row, an axis shorter than any tile",
    "one-key": "one key, a bias of one column",
    "width-33-7": "odd widths, a full bias: score gradients are stored and read back",
    "tile-plus-one": "the last tile moves back by all but one row",
    "causal-fewer-keys": "rows and tiles that see nothing",
    "causal-everything": "grouped heads, key padding, a shared bias, a gradient into lse",
    "bias-11mn": "the owner's sum in chunks",
    "bias-bhm1": "sums over keys",
    "bias-b11n": "sums over queries",
    "strides-expanded": "stride 0",
    "strides-sliced": "rows of a wider array",
    "strides-unaligned": "an odd storage offset",
    "bias-sliced": "a window of a larger table",
    "mask-sliced": "bytes at odd addresses",
    "dout-expanded": "a gradient of one element",
    "packed-qkv": "one tensor for q, k, v and one for their gradients",
    "grouped": "fewer key heads, lengths that share no tile",
}


@pytest.mark.usefixtures("general_kernels")
@pytest.mark.parametrize("name", WATCHED)
def test_every_access_lies_inside_a_tensor_of_the_launch(name: str, watch: Watch) -> None:
    result = run_case("triton", CASES[name], "cpu", "fp32")
    assert not watch.faults, f"{len(watch.faults)} stray accesses, the first: {watch.faults[0]}"
    assert result.status == "passed", result.message


@pytest.mark.parametrize("name", ["width-33-7", "causal-everything", "bias-11mn", "strides-unaligned", "mask-sliced"])
def test_every_access_of_windows_lies_inside_too(name: str, watch: Watch) -> None:
    result = run_case("triton", CASES[name], "cpu", "fp32")
    assert not watch.faults, f"{len(watch.faults)} stray accesses, the first: {watch.faults[0]}"
    assert result.status == "passed", result.message


@pytest.mark.parametrize("name", ["window-130", "window-191", "window-144-160", "window-64-144", "swin-144-shifted"])
def test_every_access_of_longer_windows_lies_inside_too(name: str, watch: Watch) -> None:
    case = CASES[name]
    result = run_case("triton", dataclasses.replace(case, batch=(*case.batch[:-1], 3)), "cpu", "fp16")
    assert not watch.faults, f"{len(watch.faults)} stray accesses, the first: {watch.faults[0]}"
    assert result.status == "passed", result.message


def kernels_reached() -> set[str]:
    reached = set()
    for name in WATCHED:
        call = CASES[name].build("cpu", "fp32")
        kinds = ["dense"] * len(call.bias) + ["keep"] * len(call.mask)
        causal = problem.check_causal(call.causal)
        facts = problem.build(call.q, call.k, call.v, [*call.bias, *call.mask], kinds, causal, call.scale)
        recipes = contiguous_recipes(facts, device_facts(torch.device("cpu")))
        reached |= {launch.kernel.__name__ for r in recipes.values() for launch in r.launches}
    return {name.removesuffix("_kernel") for name in reached}


@pytest.mark.usefixtures("general_kernels")
def test_the_cases_reach_every_general_kernel() -> None:
    assert kernels_reached() == {"forward", "delta", "dq", "dkdv", "dq_from_ds", "dbias", "add_chunks"}


def test_the_cases_reach_the_window_kernels() -> None:
    assert {"window_forward", "window_backward"} <= kernels_reached()


@pytest.mark.usefixtures("general_kernels")
@pytest.mark.parametrize(
    ("tensor", "kernel", "kind"),
    [("k", "forward", "load"), ("bias0", "forward", "load"), ("out", "forward", "store"), ("grad0", "dkdv", "store")],
)
def test_a_tensor_64_bytes_shorter_than_told_is_found(tensor: str, kernel: str, kind: str, watch: Watch) -> None:
    watch.cut = {tensor: 64}
    run_case("triton", CASES["bias-bhmn"], "cpu", "fp32")
    found = [fault for fault in watch.faults if fault.startswith(f"{kernel}: a {kind} ")]
    assert found, watch.faults
    assert found[0].endswith("addresses")


@pytest.mark.usefixtures("general_kernels")
def test_a_store_into_what_the_caller_owns_is_found(monkeypatch: pytest.MonkeyPatch, watch: Watch) -> None:
    run = Launch.run

    def into_q(self: Launch, tensors: Mapping[str, Tensor]) -> None:
        astray = {"out_ptr": Slot("q")} if self.kernel.__name__ == "forward_kernel" else {}
        run(dataclasses.replace(self, arguments=self.arguments | astray), tensors)

    monkeypatch.setattr(Launch, "run", into_q)
    run_case("triton", CASES["plain"], "cpu", "fp32")
    assert [fault for fault in watch.faults if fault.startswith("forward: a store ")]
