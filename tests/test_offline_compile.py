"""Every kernel variant compiled for GPUs that are not here: it fits, spills nothing, and tensor cores do the products.

Compiling needs no GPU. What is compiled is what the plans would launch, tile and register cap included. Tiles of rules
spill nothing; those of a table of measured tiles may, as many bytes as their row says.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="only Triton compiles kernels")

from biasflash.backends.triton import config, tables, window_rules
from biasflash.backends.triton.operands import Device, Launch
from biasflash.backends.triton.plans import contiguous_recipes
from biasflash.problem import Problem, Term
from biasflash.testing.descriptors import Descriptor, descriptors
from biasflash.testing.offline import Compiled, compile_launch, meta_tensors

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
#: bytes of shared memory that one program may take, and multiprocessors: A100, H200, B200
DEVICES = {
    80: Device(shared_memory=166912, multiprocessors=108, capability=80),
    90: Device(shared_memory=232448, multiprocessors=132),
    100: Device(shared_memory=232448, multiprocessors=148, capability=100),
}
H200 = replace(DEVICES[90], gpu="NVIDIA H200")  # with its table of measured tiles


@dataclass(frozen=True, kw_only=True)
class Asked:
    """One problem; a bias or mask is a word of ``1`` and letters for ``(B, Hq, M, N)``, biases are trained."""

    name: str
    D: int = 64
    Dv: int = 0
    M: int = 1024
    N: int = 0
    dtype: torch.dtype = BF16
    B: int = 32  # enough to fill a GPU: keys are not shared out among programs
    Hq: int = 4
    Hkv: int = 4
    causal: bool = False
    biases: tuple[str, ...] = ()
    masks: tuple[str, ...] = ()
    bias_dtype: torch.dtype | None = None
    trained: tuple[bool, bool, bool] = (True, True, True)

    def problem(self) -> Problem:
        N = self.N or self.M
        sizes = (self.B, self.Hq, self.M, N)

        def term(kind: str, word: str, dtype: torch.dtype) -> Term:
            shape = tuple(1 if letter == "1" else size for letter, size in zip(word, sizes, strict=True))
            return Term(kind=kind, shape=shape, dtype=dtype, trainable=kind == "dense")

        return Problem(
            batch=(self.B,),
            M=self.M,
            N=N,
            Hq=self.Hq,
            Hkv=self.Hkv,
            D=self.D,
            Dv=self.Dv or self.D,
            dtype=self.dtype,
            device=torch.device("cuda"),
            terms=(
                *(term("dense", word, self.bias_dtype or self.dtype) for word in self.biases),
                *(term("keep", word, torch.bool) for word in self.masks),
            ),
            causal_shift=N - self.M if self.causal else None,
            scale=self.D**-0.5,
            trainable=self.trained,
        )


#: kernels that multiply no matrices
WITHOUT_PRODUCTS = ("delta_kernel", "add_chunks_kernel", "merge_kernel", "count_kernel", "list_kernel")
FULL, SHARED = ("BHMN",), ("1HMN",)
ON_H200 = [
    Asked(name="plain d64"),
    Asked(name="plain d256", D=256),
    Asked(name="causal grouped d128", D=128, causal=True, Hkv=1),
    Asked(name="latent d192 dv128", D=192, Dv=128, causal=True),
    Asked(name="full bias d32", D=32, biases=FULL),
    Asked(name="full bias d64", biases=FULL),
    Asked(name="full bias half precision odd width d80", D=80, dtype=F16, biases=FULL, bias_dtype=F32),
    Asked(name="full bias d128", D=128, biases=FULL),
    Asked(name="full bias d256", D=256, biases=FULL),
    Asked(name="shared bias d32", D=32, biases=SHARED),
    Asked(name="shared bias d48", D=48, biases=SHARED),
    Asked(name="shared bias d64", biases=SHARED),
    Asked(name="shared bias causal grouped d80 dv72", D=80, Dv=72, causal=True, Hkv=2, biases=SHARED),
    Asked(name="shared bias d128", D=128, biases=SHARED),
    Asked(name="shared bias causal d64", biases=SHARED, causal=True),
    Asked(name="shared bias odd lengths d64", M=777, N=1003, biases=SHARED),
    Asked(name="shared bias short d64", M=20, biases=SHARED),
    Asked(name="row and key biases d64", biases=("1HM1", "B11N")),
    Asked(name="key mask d64", masks=("B11N",)),
    Asked(name="key mask, shared bias d128", D=128, masks=("B11N",), biases=SHARED),
    Asked(name="any mask d64", masks=("BHMN",)),
    Asked(name="few queries, many keys d32, any mask", D=32, M=100, N=16384, B=1, masks=("BHMN",)),
    Asked(name="few queries, many keys d64, shared bias", M=100, N=16384, B=1, biases=SHARED),
    Asked(name="few queries, many keys d256", D=256, M=100, N=16384, B=1, causal=True, trained=(False, False, False)),
    Asked(name="one query, grouped d128", D=128, M=1, N=16384, B=1, Hkv=1),
    Asked(name="listed mask d64", M=4096, B=8, masks=("B1MN",)),
    Asked(name="listed mask d128, causal", D=128, M=4096, B=8, masks=("B1MN",), causal=True),
    Asked(name="listed mask d64, odd lengths", M=4001, B=9, masks=("B1MN",)),
    Asked(name="window of 100 d64", M=100, B=2048, biases=SHARED),
    Asked(name="window of 144", M=144, D=32, Hq=6, Hkv=6, B=2048, biases=SHARED),
    Asked(name="window of 144, mask", M=144, D=32, Hq=6, Hkv=6, B=2048, biases=SHARED, masks=("B1MN",)),
    Asked(name="window of 144, full bias d64", M=144, B=2048, biases=FULL),
    Asked(name="window of 160, causal", M=160, D=32, B=2048, biases=SHARED, causal=True),
    Asked(name="window of 150 over 191, half precision", M=150, N=191, D=32, B=2048, dtype=F16, biases=SHARED),
    Asked(name="float32 d64", dtype=F32, biases=SHARED),
    Asked(name="float32 d80", D=80, dtype=F32, biases=SHARED),
    Asked(name="float32 d128", D=128, dtype=F32, biases=FULL),
    Asked(name="float32 d256", D=256, dtype=F32),
]
#: what tiles of rules are compiled for, on every capability
BY_RULE = [
    Asked(name="causal grouped d128", D=128, causal=True, Hkv=1),
    Asked(name="plain d256", D=256),
    Asked(name="shared bias d32", D=32, biases=SHARED),
    Asked(name="shared bias d48", D=48, biases=SHARED),
    Asked(name="shared bias causal grouped d80 dv72", D=80, Dv=72, causal=True, Hkv=2, biases=SHARED),
    Asked(name="shared bias odd lengths d64", M=777, N=1003, biases=SHARED),
    Asked(name="shared bias, few keys d256", D=256, N=20, biases=SHARED),
    Asked(name="full bias d128", D=128, biases=FULL),
    Asked(name="full bias half precision d64", dtype=F16, biases=FULL, bias_dtype=F32),
    Asked(name="row and key biases d64", biases=("1HM1", "B11N")),
    Asked(name="listed mask d64, causal", M=4096, B=8, masks=("B1MN",), causal=True),
    Asked(name="window of 49, mask", M=49, D=32, B=2048, biases=SHARED, masks=("B1MN",)),
    Asked(name="window of 64, d64", M=64, B=2048, biases=SHARED),
    Asked(name="window of 128", M=128, D=32, B=2048, biases=SHARED),
    Asked(name="window of 144", M=144, D=32, B=2048, biases=SHARED),
    Asked(name="float32 d64, full bias", dtype=F32, biases=FULL),
    Asked(name="float32 d128, shared bias", D=128, dtype=F32, biases=SHARED),
    Asked(name="float32 d128, any mask, few queries", D=128, dtype=F32, M=100, N=16384, B=1, masks=("BHMN",)),
    Asked(
        name="float32 d118 dv106, mask, odd lengths",
        D=118,
        Dv=106,
        dtype=F32,
        M=777,
        N=1003,
        biases=FULL,
        masks=("B1MN",),
    ),
    Asked(name="float32 d256", D=256, dtype=F32),
    Asked(name="float32 d256, full bias", D=256, dtype=F32, biases=FULL),
    Asked(name="float32 d256, shared bias, causal grouped", D=256, dtype=F32, biases=SHARED, causal=True, Hkv=2),
    Asked(
        name="float32 d246 dv234, odd lengths, causal",
        D=246,
        Dv=234,
        dtype=F32,
        M=777,
        N=1003,
        biases=SHARED,
        causal=True,
    ),
    Asked(name="float32 d192 dv64, mask", D=192, Dv=64, dtype=F32, masks=("B1MN",)),
    Asked(name="float32 d144 dv256", D=144, Dv=256, dtype=F32),
    Asked(name="float32 d129, shared bias", D=129, dtype=F32, biases=SHARED),
]


def planned(asked: Asked, device: Device) -> list[tuple[Launch, dict[str, torch.Tensor]]]:
    """What a call runs, forward and backward, with stand-ins for its tensors."""
    problem = asked.problem()
    recipes = contiguous_recipes(problem, device)
    return [(launch, meta_tensors(problem, r)) for r in recipes.values() for launch in r.launches]


def variants() -> Iterator[object]:
    """Every launch of every problem once: those that differ in run-time values alone are one kernel."""
    seen = set()
    for asked, device in [*((a, d) for d in DEVICES.values() for a in BY_RULE), *((a, H200) for a in ON_H200)]:
        capability = device.capability
        for launch, tensors in planned(asked, device):
            constants = tuple(
                launch.arguments[p.name] for p in launch.kernel.params if p.is_constexpr and p.name in launch.arguments
            )
            dtypes = tuple(str(x.dtype) for x in launch.values(tensors) if isinstance(x, torch.Tensor))
            options = tuple(launch.options(capped=True).values())
            identity = (capability, launch.kernel.__name__, str(constants), dtypes, options)
            if identity not in seen:
                seen.add(identity)
                name = launch.kernel.__name__.removesuffix("_kernel")
                whose = "H200" if device.gpu else f"sm_{capability}"
                yield pytest.param(launch, tensors, capability, id=f"{whose} {name}: {asked.name}")


@pytest.fixture(scope="module", autouse=True)
def _empty_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Nothing compiled on another day is taken for today's."""
    with pytest.MonkeyPatch.context() as patch:
        directory = tmp_path_factory.mktemp("triton")
        patch.setenv("TRITON_CACHE_DIR", str(directory))
        yield directory


def allowed_spills(launch: Launch) -> int:
    """Bytes a thread may spill: none by a rule; by a table what its row says."""
    if launch.why.startswith("table of "):  # a row says what the case it was timed on spills; causal ones spill more
        return launch.tile.spill_bytes + 96 if launch.tile else 0
    if launch.why.startswith("measured on "):
        return launch.tile.spill_bytes if launch.tile else 0
    return 0


def tensor_core_words(launch: Launch, capability: int) -> tuple[str, ...]:
    """Instructions one of which must appear: warp-group products on sm_90 where a tile has the 64 rows they take."""
    if launch.kernel.__name__ in WITHOUT_PRODUCTS:
        return ()
    assert launch.tile is not None
    rows = launch.tile.block_n if launch.kernel.__name__ == "dkdv_kernel" else launch.tile.block_m
    if capability == 90 and rows >= 64 and launch.warps >= 4:
        return ("HGMMA",)
    return ("UTCHMMA", "HMMA") if capability == 100 else ("HMMA",)


def complaints(launch: Launch, compiled: Compiled, capability: int) -> list[str]:
    """Everything that is wrong with what the compiler made."""
    found = []
    limit = DEVICES[capability].shared_memory
    if compiled.shared > limit:
        found.append(f"{compiled.shared} bytes of shared memory, the GPU has {limit}")
    allowed = allowed_spills(launch)
    stack, local = compiled.resources["STACK"], compiled.resources["LOCAL"]
    if stack > allowed or local > 0:
        found.append(f"spills: stack {stack} bytes a thread (allowed {allowed}), local {local}")
    words = tensor_core_words(launch, capability)
    if words and not re.search(rf"\b({'|'.join(words)})\b", compiled.sass):
        found.append(f"no {' or '.join(words)} in the machine code")
    found += [f"reads shared memory it does not have: {d}" for d in astray(compiled)] if capability == 90 else []
    return found


def astray(compiled: Compiled) -> list[Descriptor]:
    """Operands of Hopper's products that do not lie in the program's shared memory."""
    return [d for d in descriptors(compiled.sass) if not d.is_inside(compiled.shared)]


L40 = Device(shared_memory=101376, multiprocessors=142, capability=89)


@pytest.mark.parametrize(
    ("device", "asked"),
    [
        (H200, Asked(name="192 tokens", M=192, B=2048, biases=FULL * 3, bias_dtype=F32)),
        (H200, Asked(name="128 tokens", M=128, B=2048, biases=FULL * 3, bias_dtype=F32)),
        (H200, Asked(name="general", D=128, B=64, biases=FULL * 2, bias_dtype=F32)),
        (DEVICES[80], Asked(name="144 tokens", M=144, D=32, B=2048, biases=FULL * 4, bias_dtype=F32)),
        (L40, Asked(name="192 tokens", M=192, B=2048, biases=FULL, bias_dtype=F32)),
        (L40, Asked(name="144 tokens", M=144, D=32, B=2048, biases=FULL * 2)),
        (L40, Asked(name="128 tokens", M=128, B=2048, biases=FULL)),
        (L40, Asked(name="general", D=128, B=64, biases=FULL * 3)),
    ],
    ids=lambda x: x.name if isinstance(x, Asked) else f"sm_{x.capability}",
)
def test_several_or_wide_biases_fit_too(device: Device, asked: Asked) -> None:
    """Every bias of the scores' own shape is copied ahead: fewer stages, smaller tiles."""
    problem = replace(asked.problem(), terms=tuple(replace(t, trainable=False) for t in asked.problem().terms))
    for recipe in contiguous_recipes(problem, device).values():
        for launch in recipe.launches:
            compiled = compile_launch(launch, meta_tensors(problem, recipe), device.capability)
            assert compiled.shared <= device.shared_memory, launch


@pytest.mark.parametrize("device", [DEVICES[90], H200], ids=["rules", "table"])
@pytest.mark.parametrize("biases", [(), SHARED], ids=["plain", "shared bias"])
def test_kernels_in_tf32_fit_too(biases: tuple[str, ...], device: Device) -> None:
    """They take the tiles of float32 and round their operands."""
    torch.set_float32_matmul_precision("high")
    try:
        launches = planned(Asked(name="float32 d64", dtype=F32, biases=biases), device)
    finally:
        torch.set_float32_matmul_precision("highest")
    found = [(x, tensors) for x, tensors in launches if x.kernel.__name__ not in WITHOUT_PRODUCTS]
    assert {x.arguments["PRECISION"] for x, _ in found} == {"tf32"}
    for launch, tensors in found:
        assert complaints(launch, compile_launch(launch, tensors, 90), 90) == []


@pytest.mark.parametrize(("launch", "tensors", "capability"), list(variants()))
def test_kernel_fits_does_not_spill_and_uses_tensor_cores(
    launch: Launch, tensors: dict[str, torch.Tensor], capability: int
) -> None:
    assert os.environ.get("TRITON_INTERPRET", "0") == "0", "interpreted kernels are never compiled"
    compiled = compile_launch(launch, tensors, capability)
    found = complaints(launch, compiled, capability)
    assert not found, f"{launch}, {compiled.resources}: {'; '.join(found)}"


def test_no_rule_allows_spills() -> None:
    assert {rule.tile.spill_bytes for rule in (*config.RULES, *window_rules.RULES)} == {0}
    assert any(row.spill_bytes for row in tables.read(tables.SHIPPED / "nvidia_h200.json").rows.values())


def test_the_list_reaches_every_kernel_and_gpu() -> None:
    reached = {(p.values[2], p.values[0].kernel.__name__) for p in variants()}  # type: ignore[attr-defined]
    kernels = {"forward", "delta", "dq", "dkdv", "dq_from_ds", "dbias", "add_chunks", "merge", "count", "list"}
    kernels |= {"window_forward", "window_backward", "long_window_forward", "long_window_dq", "long_window_dkdv"}
    assert {name for capability, name in reached if capability == 90} == {f"{kernel}_kernel" for kernel in kernels}
    assert {capability for capability, _ in reached} == set(DEVICES)
