"""The Hopper backend as far as it can be tested without a GPU: its plans, its words, and its kernels' machine code."""

from __future__ import annotations

import importlib.util
import logging
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="only Triton compiles kernels")
pytest.importorskip("triton.experimental.gluon.language.nvidia.hopper", reason="this Triton has no Gluon for Hopper")

import biasflash
from biasflash import plan
from biasflash.backends.hopper import backend, config, config_float32, config_wide, launch, objections
from biasflash.backends.hopper.backward_plan import backward_recipe
from biasflash.backends.hopper.forward_plan import forward_recipe
from biasflash.backends.hopper.operands import Box, BuildError, DescriptorLaunch
from biasflash.backends.triton import geometry
from biasflash.backends.triton.operands import Device, Layout, Operands
from biasflash.backends.triton.plans import contiguous_recipes
from biasflash.backends.triton.recipe import Recipe
from biasflash.problem import Problem, Term
from biasflash.testing.descriptors import Descriptor, descriptors
from biasflash.testing.hopper_offline import Loop, compile_descriptor_launch, product_loops
from biasflash.testing.offline import Compiled, compile_launch, meta_tensors

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
H200 = Device(shared_memory=232448, multiprocessors=132, gpu="NVIDIA H200")


def problem(
    *,
    batch: tuple[int, ...] = (16,),
    M: int = 1024,
    N: int = 0,
    Hq: int = 8,
    Hkv: int = 0,
    D: int = 64,
    Dv: int = 0,
    dtype: torch.dtype = BF16,
    biases: Sequence[str] = (),
    bias_dtype: torch.dtype | None = None,
    masks: Sequence[str] = (),
    causal: bool = False,
    trained: tuple[bool, bool, bool] = (True, True, True),
    bias_trained: bool = True,
    scale: float | None = None,
) -> Problem:
    """Biases and masks are words of ``1`` and letters: a lower-case letter for each batch axis, then H, M, N."""
    N = N or M

    def term(kind: str, word: str, dtype: torch.dtype) -> Term:
        sizes = (*batch, Hq, M, N)
        shape = tuple(1 if letter == "1" else size for letter, size in zip(word, sizes, strict=True))
        return Term(kind=kind, shape=shape, dtype=dtype, trainable=kind == "dense" and bias_trained)

    terms = [term("dense", word, bias_dtype or dtype) for word in biases]
    return Problem(
        batch=batch,
        M=M,
        N=N,
        Hq=Hq,
        Hkv=Hkv or Hq,
        D=D,
        Dv=Dv or D,
        dtype=dtype,
        device=torch.device("cuda"),
        terms=(*terms, *(term("keep", word, torch.bool) for word in masks)),
        causal_shift=N - M if causal else None,
        scale=D**-0.5 if scale is None else scale,
        trainable=trained,
    )


def planned(p: Problem) -> tuple[dict[str, Recipe], dict[str, list[str]]]:
    """The recipes of a call on an H200 with contiguous tensors, and why a pass is portable if it is."""
    told: dict[str, list[str]] = {}

    def keep(name: str, answer: tuple[Recipe, list[str]]) -> Recipe:
        told[name] = answer[1]
        return answer[0]

    recipes = contiguous_recipes(
        p,
        H200,
        lambda *given: keep("forward", forward_recipe(*given)),
        lambda *given: keep("backward", backward_recipe(*given)),
    )
    return recipes, told


def names(recipe: Recipe) -> list[str]:
    """Kernels in order; Hopper kernels in capitals."""
    found = [(x, x.kernel.__name__.removesuffix("_kernel")) for x in recipe.launches]
    return [name.upper() if isinstance(x, DescriptorLaunch) else name for x, name in found]


def own(recipe: Recipe, name: str) -> DescriptorLaunch:
    found = [x for x in recipe.launches if isinstance(x, DescriptorLaunch) and x.kernel.__name__ == f"{name}_kernel"]
    assert len(found) == 1, names(recipe)
    return found[0]


# ------------------------------------------------------------------------------------------------------------ compiled


@dataclass(frozen=True)
class Asked:
    """One problem, and those of its kernels that are compiled."""

    name: str
    problem: Problem
    kernels: tuple[str, ...]


FULL, SHARED, KEYS = ("bHMN",), ("1HMN",), ("b11N",)
ASKED = [
    Asked("causal d32", problem(D=32, causal=True), ("forward",)),
    Asked("shared bias d32", problem(D=32, biases=SHARED), ("shared_forward", "dkdv", "dq", "dbias")),
    Asked("shared bias d32, half precision", problem(D=32, dtype=F16, biases=SHARED), ("shared_forward",)),
    Asked("shared bias d32, 512 keys", problem(M=512, D=32, biases=SHARED), ("dq_dbias",)),
    Asked("shared bias d32, many heads", problem(batch=(64,), D=32, biases=SHARED), ("dqkv",)),
    Asked("plain d64", problem(), ("forward", "dqkv")),
    Asked("causal d64", problem(causal=True), ("forward", "dqkv")),
    Asked("causal d64, queries alone", problem(causal=True, trained=(True, False, False)), ("dq",)),
    Asked("causal d64, keys and values alone", problem(causal=True, trained=(False, True, True)), ("dkdv",)),
    Asked("full bias d64", problem(biases=FULL), ("forward", "dkdv")),
    Asked("fixed bias d64", problem(biases=FULL, bias_trained=False), ("dqkv",)),
    Asked("shared bias d64", problem(biases=SHARED), ("shared_forward", "dkdv", "dq", "dbias")),
    Asked("shared bias d64, half precision", problem(dtype=F16, biases=SHARED), ("shared_forward",)),
    Asked("two batch axes, bias of one d48", problem(batch=(2, 3), D=48, biases=("1bHMN",)), ("dq",)),
    Asked("full bias half precision d80, odd length", problem(D=80, N=1000, dtype=F16, biases=FULL), ("forward",)),
    *(
        Asked(f"full bias d{D}, odd rows", problem(N=1001, D=D, biases=FULL), ("forward", "dkdv"))
        for D in (32, 64, 128)
    ),
    *(
        Asked(f"fixed bias d{D}, odd rows", problem(N=1001, D=D, biases=FULL, bias_trained=False), ("dq", "dkdv"))
        for D in (32, 64, 128)
    ),
    Asked("full bias d64, odd rows, a mask",
          problem(N=1001, dtype=F16, biases=FULL, masks=KEYS, bias_trained=False), ("forward", "dkdv", "dq")),
    Asked("plain d128", problem(D=128), ("dqkv",)),
    Asked("causal d128", problem(D=128, causal=True), ("dqkv",)),
    Asked("causal grouped d128", problem(D=128, causal=True, Hkv=2), ("forward",)),
    Asked("causal d128, queries alone", problem(D=128, causal=True, trained=(True, False, False)), ("dq",)),
    Asked("causal d128, keys and values alone", problem(D=128, causal=True, trained=(False, True, True)), ("dkdv",)),
    Asked("shared bias d128", problem(D=128, biases=SHARED), ("dkdv", "dq", "dbias")),
    Asked("latent d192 dv128", problem(D=192, Dv=128, causal=True), ("forward", "wide_dkdv", "wide_dq")),
    Asked("latent half precision d192 dv128, odd length", problem(D=192, Dv=128, N=1000, Hkv=2, dtype=F16),
          ("forward",)),
    Asked("plain d192", problem(D=192), ("forward",)),
    Asked("full bias d256", problem(D=256, biases=FULL), ("forward",)),
    Asked("keys d64", problem(masks=KEYS), ("dkdv", "dq")),
    Asked("keys, causal d64", problem(masks=KEYS, causal=True), ("dkdv", "dq")),
    Asked("keys d128", problem(D=128, masks=KEYS), ("dkdv", "dq")),
    Asked("keys, causal grouped d128", problem(D=128, masks=KEYS, causal=True, Hkv=2), ("dkdv", "dq")),
    Asked("keys, full bias d64", problem(masks=KEYS, biases=FULL), ("dkdv", "dq")),
    Asked("keys, shared bias d32", problem(D=32, masks=KEYS, biases=SHARED), ("dkdv", "dq", "dbias")),
    Asked("keys, shared bias d64", problem(masks=KEYS, biases=SHARED), ("dkdv", "dq", "dbias")),
    Asked("keys, shared bias d128", problem(D=128, masks=KEYS, biases=SHARED), ("dkdv", "dq", "dbias")),
    Asked("plain d256", problem(D=256), ("wide_dkdv", "wide_dq")),
    Asked("causal d256", problem(D=256, causal=True), ("wide_dkdv", "wide_dq")),
    Asked(
        "grouped half precision d192, odd length", problem(D=192, N=1000, Hkv=2, dtype=F16), ("wide_dkdv", "wide_dq")
    ),
    Asked("masked d64", problem(masks=KEYS), ("forward",)),
    Asked("masked causal d64", problem(masks=KEYS, causal=True), ("forward",)),
    Asked("masked d128", problem(D=128, masks=KEYS), ("forward",)),
    Asked("masked latent d192 dv128", problem(D=192, Dv=128, masks=KEYS), ("forward",)),
    Asked("masked latent d192 dv128, causal", problem(D=192, Dv=128, masks=KEYS, causal=True), ("forward",)),
    Asked("masked d256", problem(D=256, masks=KEYS), ("forward",)),
    Asked("masked, full bias d64", problem(biases=FULL, masks=KEYS), ("forward",)),
    Asked("masked, shared bias d32", problem(D=32, biases=SHARED, masks=KEYS), ("shared_forward",)),
    Asked("masked, shared bias d32, half precision", problem(D=32, dtype=F16, biases=SHARED, masks=KEYS),
          ("shared_forward",)),
    Asked("masked, shared bias d32, causal", problem(D=32, biases=SHARED, masks=KEYS, causal=True),
          ("shared_forward",)),
    Asked("masked, shared bias d64", problem(biases=SHARED, masks=KEYS), ("shared_forward",)),
    Asked("masked, shared bias d64, causal", problem(biases=SHARED, masks=KEYS, causal=True), ("shared_forward",)),
    *(
        Asked(f"float32 full bias d{D}", problem(D=D, biases=FULL, bias_dtype=F32), ("forward", "dkdv"))
        for D in (32, 64, 128)
    ),
    *(
        Asked(f"float32 shared bias d{D}", problem(D=D, biases=SHARED, bias_dtype=F32), kernels)
        for D, kernels in (
            (32, ("shared_forward", "dkdv", "dq", "dbias")),
            (64, ("shared_forward", "dkdv", "dq", "dbias")),
            (128, ("dkdv", "dq", "dbias")),
        )
    ),
    Asked("float32 bias of each item d32", problem(batch=(2, 3), D=32, biases=("1bHMN",), bias_dtype=F32),
          ("dkdv", "dq")),
    Asked("float32 bias of each item d64", problem(batch=(2, 3), biases=("1bHMN",), bias_dtype=F32), ("dq",)),
    Asked("float32 shared bias d64, half precision", problem(dtype=F16, biases=SHARED, bias_dtype=F32),
          ("shared_forward", "dkdv", "dq", "dbias")),
    Asked("masked, float32 full bias d64, causal", problem(biases=FULL, bias_dtype=F32, masks=KEYS, causal=True),
          ("forward", "dkdv")),
    *(
        Asked(f"masked, float32 shared bias d{D}", problem(D=D, biases=SHARED, bias_dtype=F32, masks=KEYS), kernels)
        for D, kernels in (
            (32, ("shared_forward", "dkdv", "dq", "dbias")),
            (64, ("shared_forward", "dkdv", "dq", "dbias")),
            (128, ("forward", "dkdv", "dq", "dbias")),
        )
    ),
]  # fmt: skip
#: bytes of stack a thread: addresses and counters that are kept outside of the main loops
STACK = 128
#: and what the copying warp needs, of 24 registers, to blank hidden keys
BLANKING = 32


def identity(launched: DescriptorLaunch) -> tuple[object, ...]:
    """What Triton compiles anew for: constants and blocks; lengths and strides are run-time values."""
    pairs = zip(launched.kernel.params, launched.arguments.values(), strict=True)
    found = [(v.dtype, v.block) if isinstance(v, Box) else v if p.is_constexpr else None for p, v in pairs]
    return launched.kernel.__name__, *found


def compiled_cases() -> Iterator[object]:
    for asked in ASKED:
        recipes, _ = planned(asked.problem)
        for recipe in recipes.values():
            for launched in recipe.launches:
                name = launched.kernel.__name__.removesuffix("_kernel")
                if isinstance(launched, DescriptorLaunch) and name in asked.kernels:
                    tensors = meta_tensors(asked.problem, recipe)
                    yield pytest.param(launched, tensors, id=f"{name}: {asked.name}")


#: spill instructions of a main loop, where that build beat every one without; by kernel, unrolled tiles, mask of keys
SPILLS = {
    ("dq_dbias_kernel", 8, False): 12,  # 512 x 4 heads of 512: 0.483 ms, without spills 0.524
    ("dqkv_kernel", 1, False): 6,  # 2 x 16 heads of 4k, D 128: 1.44 ms, two kernels without take 1.47
    ("wide_dkdv_kernel", None, False): 1,  # causal, D 256: one word of 424 instructions
    ("dkdv_kernel", 1, True): 1,  # a mask of keys, two items x 128 x 64, D 32: one word of 669 instructions
    ("dq_kernel", 1, True): 4,  # a mask of keys, two items x 128 x 128: two words of 1170 instructions
}


#: as much, beside warps that put rows in order: 16 of 240 registers fewer
ODD_SPILLS = {("dkdv_kernel", 2): 11, ("dkdv_kernel", 1): 11, ("dq_kernel", 2): 4}


def spills_allowed(launched: DescriptorLaunch) -> int:
    has = launched.arguments
    build = launched.kernel.__name__, has.get("CHUNKS_N", has.get("TILES")), bool(has.get("HAS_KEEP"))
    if has.get("RAW_STAGES"):
        return ODD_SPILLS.get(build[:2], 0)
    return SPILLS.get(build, 0)


def least_covered(launched: DescriptorLaunch) -> float:
    """The share of a round's exponentials that a warpgroup must run under its own products, by the kernel's build."""
    has = launched.arguments
    if launched.kernel.__name__ in ("dqkv_kernel", "dq_dbias_kernel"):
        return 0.0  # in the order of products that they need, the other warpgroup fills the gap
    if launched.kernel.__name__ in ("wide_dkdv_kernel", "wide_dq_kernel"):
        return 0.95
    if launched.kernel.__name__ == "forward_kernel":
        return 0.95 if has["PINNED"] else 0.0  # left to the assembler where that was faster
    if launched.kernel.__name__ == "dbias_kernel":
        return 0.7 if has["DEEP"] else 0.0  # else the other warpgroup's products fill the gap
    less = 0.15 if has.get("HAS_KEEP") else 0.05  # a mask: of two loops in one
    return 0.95 if has["AHEAD"] else (has["ROWS"] - 1) / has["ROWS"] - less  # items after the first


def complaints(launched: DescriptorLaunch, compiled: Compiled) -> list[str]:
    """Everything that is wrong with what the compiler made."""
    found = []
    if compiled.shared > H200.shared_memory:
        found.append(f"{compiled.shared} bytes of shared memory, the GPU has {H200.shared_memory}")
    stack = STACK + 8 * spills_allowed(launched) + (BLANKING if launched.arguments.get("HAS_KEEP") else 0)
    if compiled.resources["STACK"] > stack:
        found.append(f"{compiled.resources['STACK']} bytes of stack a thread, at most {stack}")
    unordered = "HMMA|RED|ATOMG?" if launched.kernel.__name__ == "dqkv_kernel" else "HMMA|RED|ATOMG?|UTMAREDG"
    if re.search(rf"\b({unordered})\b", compiled.sass):  # dqkv adds by turns
        found.append("products that are not asynchronous, or sums in no fixed order")
    loops = product_loops(compiled.sass)
    if len(loops) < 2:
        found.append(f"{len(loops)} loops of HGMMA; every warpgroup has one")
    found += [str(loop) for loop in loops if loop.spills > spills_allowed(launched)]
    least = least_covered(launched)
    found += [f"{loop}, {least:.2f} of them expected" for loop in loops if loop.covered < least * loop.exponentials]
    found += [
        f"{loop}, {other.waits} in another warpgroup" for loop, other in pairs_of(loops) if loop.waits != other.waits
    ]
    found += [f"reads shared memory it does not have: {d}" for d in astray(compiled)]
    return found


def pairs_of(loops: list[Loop]) -> list[tuple[Loop, Loop]]:
    """The same loop in two warpgroups. The assembler adds waits where it does not see that registers are free: to one
    warpgroup's code and not to another's, as far as was seen."""
    groups = next(
        n for n in (3, 2, 1) if len(loops) % n == 0 and len({x.products for x in loops[:: len(loops) // n]}) == 1
    )
    each = len(loops) // groups
    return [(x, y) for at in range(each, len(loops), each) for x, y in zip(loops, loops[at : at + each], strict=False)]


def astray(compiled: Compiled) -> list[Descriptor]:
    """Operands of products that do not lie in the program's shared memory."""
    return [d for d in descriptors(compiled.sass) if not d.is_inside(compiled.shared)]


@pytest.fixture
def _empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing compiled on another day is taken for today's."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


@pytest.mark.usefixtures("_empty_cache")
@pytest.mark.parametrize(("launched", "tensors"), list(compiled_cases()))
def test_a_kernel_fits_and_its_exponentials_run_under_products(
    launched: DescriptorLaunch, tensors: Mapping[str, Tensor]
) -> None:
    compiled = compile_descriptor_launch(launched, tensors)
    found = complaints(launched, compiled)
    assert not found, f"{launched}, {compiled.resources}: {'; '.join(found)}"


def test_every_kernel_is_compiled() -> None:
    reached = [p.values[0] for p in compiled_cases()]  # type: ignore[attr-defined]
    assert {x.kernel.__name__ for x in reached} == {
        f"{name}_kernel"
        for name in ("forward", "shared_forward", "dkdv", "dq", "dbias", "dq_dbias", "dqkv", "wide_dkdv", "wide_dq")
    }
    assert len({identity(x) for x in reached}) == len(reached) == sum(len(a.kernels) for a in ASKED)


LISTING = """
        /*0000*/                   MOV R1, c[0x0][0x28] ;
        /*0010*/                   WARPGROUP.ARRIVE ;
        /*0020*/                   HGMMA.64x128x16.F32.BF16 R24, gdesc[UR8], !UPT ;
        /*0030*/                   HGMMA.64x128x16.F32.BF16 R24, gdesc[UR12], R24, gsb0 ;
        /*0040*/                   HGMMA.64x64x16.F32.BF16 R88, R4, gdesc[UR4], R88, gsb0 ;
        /*0050*/                   WARPGROUP.DEPBAR.LE gsb0, 0x1 ;
        /*0060*/              @!P0 BRA 0x00d0 ;
        /*0070*/                   {first} ;
        /*0080*/                   {second} ;
        /*0090*/                   STL [R1+0x8], R3 ;
        /*00a0*/               @P1 BRA 0x0010 ;
        /*00b0*/                   EXIT ;
        /*00c0*/                   SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR4], R2 ;
        /*00d0*/              @!P0 BRA 0x00c0 ;
        /*00e0*/                   BRA 0x0070 ;
"""


def test_a_wait_that_was_lifted_above_the_exponentials_is_seen() -> None:
    parts = ("MUFU.EX2 R3, R3", "WARPGROUP.DEPBAR.LE gsb0, 0x0")
    for (first, second), covered in ((parts, 1), (parts[::-1], 0)):
        (loop,) = product_loops(LISTING.format(first=first, second=second))
        assert (loop.start, loop.products, loop.exponentials, loop.covered, loop.spills) == (0x10, 3, 1, covered, 1)
        assert loop.waits == 1 + ("DEPBAR" in first + second)
        assert f"{covered} of 1 exponentials" in str(loop)


# ---------------------------------------------------------------------------------------------------------- objections


@pytest.mark.parametrize(
    ("p", "words"),
    [
        (problem(dtype=F32), "dtype float32; its kernels take float16 and bfloat16"),
        (problem(masks=("bH1N",)), "a boolean mask of shape (16, 8, 1, 1024); its kernels take one that varies along"),
        (problem(masks=("11MN",)), "a boolean mask of shape (1, 1, 1024, 1024)"),
        (problem(masks=("b11N", "111N")), "2 boolean masks; its kernels take one"),
        (problem(biases=("1HMN", "bHMN")), "2 biases; its kernels take one"),
        (problem(biases=("bH1N",)), "a bias of shape (16, 8, 1, 1024)"),
        (problem(biases=("1HM1",)), "a bias of shape (1, 8, 1024, 1)"),
        (problem(biases=FULL, bias_dtype=F16), "a float16 bias beside bfloat16 queries; its kernels take one of the"),
        (problem(D=256, biases=FULL, N=1004), "1004 keys; bulk copies of this bias need a multiple of 8"),
        (problem(biases=FULL, N=1002, bias_dtype=F32), "1002 keys; bulk copies of this bias need a multiple of 4"),
        (problem(scale=-0.5), "scale -0.5 without a bias"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_an_objection_is_worded(p: Problem, words: str) -> None:
    assert any(words in reason for reason in objections.to_problem(p)), objections.to_problem(p)
    assert any(words in reason for reason in backend.objections(p))


@pytest.mark.parametrize(
    "p",
    [
        problem(),
        problem(N=1003),
        problem(causal=True, Hkv=2, dtype=F16),
        problem(biases=FULL, scale=-0.5),
        problem(N=1003, biases=SHARED),
        problem(N=1004, biases=FULL, bias_dtype=F32),
        problem(N=1003, biases=SHARED, bias_dtype=F32, dtype=F16),
        problem(batch=(2, 3, 4), biases=("1bcHMN",)),
        problem(D=192, Dv=128),
    ],
    ids=str,
)
def test_what_its_kernels_take_raises_no_objection(p: Problem) -> None:
    assert not backend.objections(p)


@pytest.mark.parametrize(
    ("p", "words"),
    [
        (problem(M=100, N=4096), "100 queries x 4096 keys; below 128 x 192"),
        (problem(M=4096, N=100), "4096 queries x 100 keys; below 128 x 192"),
        (problem(batch=(1,), Hq=2), "16 tiles of 128 queries; below 80"),
        (problem(M=1535, N=1535), "1535 keys of width 64, no bias; below 1536"),
        (problem(D=32, M=4096, N=4095, causal=True), "4095 keys of width 32, no bias, causal; below 4096"),
        (problem(M=1000, causal=True), "1000 keys of width 64, no bias, causal; below 1536"),
        (problem(M=320, masks=("b11N",)), "320 keys of width 64, a mask; below 384"),
    ],
)
def test_small_problems_go_to_the_portable_kernels_unless_this_backend_is_named(p: Problem, words: str) -> None:
    assert not backend.objections(p)
    assert any(words in reason for reason in backend.reservations(p))
    plan.choose.cache_clear()
    free, named = plan.choose(p), plan.choose(p, "hopper")
    assert (free.backend, named.backend) == ("triton", "hopper")
    assert any(words in reason for reason in dict(free.objections)["hopper"])


@pytest.mark.parametrize(
    "p",
    [
        problem(M=1536),
        problem(D=128, M=512),
        problem(M=512, biases=FULL),
        problem(M=512, biases=SHARED, masks=("b11N",)),
        problem(M=384, masks=("b11N",)),
        problem(M=1000, masks=("b11N",), causal=True),
        problem(M=1000, causal=True, trained=(False, False, False)),
    ],
    ids=repr,
)
def test_short_calls_that_these_kernels_do_faster_stay(p: Problem) -> None:
    assert not backend.reservations(p)


def test_it_is_chosen_first() -> None:
    assert plan.choose(problem(biases=SHARED)).backend == "hopper"
    assert plan.choose(problem(biases=SHARED), "triton").backend == "triton"


def test_cpu_tensors_go_past_it() -> None:
    x = torch.zeros(1, 8, 1, 16)
    report = str(biasflash.explain(x, x, x))
    assert "skipped   hopper: tensors are on cpu; it takes CUDA tensors" in report
    with pytest.raises(biasflash.UnsupportedError, match="backend hopper: tensors are on cpu"):
        biasflash.attention(x, x, x, backend="hopper")


@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (10, 0), (12, 0)], ids=str)
def test_other_gpus_go_past_it(capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert backend.objections(problem()) == (f"compute capability {capability[0]}.{capability[1]}; it takes 9.0",)


def test_a_machine_without_triton_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "triton" else find(name))
    (reason,) = backend.objections(problem())
    assert reason.startswith("Triton is not installed")


def test_it_leaves_interpreted_runs_to_the_portable_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert backend.objections(problem()) == ("TRITON_INTERPRET is set; its kernels cannot be interpreted",)


def test_a_triton_whose_gluon_has_other_names_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(name: str) -> None:
        raise AttributeError("module 'tma' has no attribute 'async_load'")

    backend._missing.cache_clear()
    monkeypatch.setattr(backend.importlib, "import_module", broken)
    (reason,) = backend.objections(problem())
    backend._missing.cache_clear()
    assert reason.startswith("this Triton's Gluon cannot be used (module 'tma'")


def layouts(p: Problem, **other: Layout) -> tuple[dict[str, Layout], list[Layout]]:
    """Contiguous tensors of a forward pass, but for those named."""

    def flat(*shape: int) -> Layout:
        return Layout(tuple(geometry.plain_strides(shape)), True)

    rows = {"q": flat(*p.batch, p.M, p.Hq, p.D), "out": flat(*p.batch, p.M, p.Hq, p.Dv)}
    rows |= {"k": flat(*p.batch, p.N, p.Hkv, p.D), "v": flat(*p.batch, p.N, p.Hkv, p.Dv)}
    terms = [other.pop(f"bias{i}", flat(*t.shape)) for i, t in enumerate(p.terms)]
    return {**rows, **other}, terms


ODD_ROWS = Layout((1024 * 8 * 65, 8 * 65, 65, 1), True)


@pytest.mark.parametrize(
    ("other", "words"),
    [
        ({"q": ODD_ROWS}, "q of strides"),
        ({"v": Layout((1024 * 8 * 64, 8 * 64, 64, 1), False)}, "v of strides"),
        ({"bias0": Layout((8 * 1024 * 1024, 1024 * 1024, 1, 1024), True)}, "bias0 of strides"),
        ({"bias0": Layout((8 * 1024 * 1028, 1024 * 1028, 1028, 1), False)}, "bias0 of strides"),
        ({"bias0": Layout((8 * 1024 * 1028, 1024 * 1028 + 4, 1028, 1), True)}, "bias0 of strides"),
        ({"bias0": Layout((8 * 1024 * 1020, 1024 * 1020, 1020, 1), True)}, "bias0 of strides"),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else "",
)
def test_a_layout_that_bulk_copies_do_not_take_runs_portable(other: dict[str, Layout], words: str) -> None:
    p = problem(biases=FULL)
    rows, terms = layouts(p, **other)
    recipe, reasons = forward_recipe(p, H200, rows, terms)
    assert [r for r in reasons if r.startswith(words)], reasons
    assert names(recipe) == ["forward"]
    rows["dout"] = rows["out"]
    rows |= {f"d{name}": rows[name] for name in "qkv"}
    recipe, reasons = backward_recipe(p, H200, rows, terms, {0: layouts(p)[1][0]}, False)
    assert [r for r in reasons if r.startswith(words)], reasons
    assert not [name for name in names(recipe) if name.isupper()]


def backward_of(p: Problem, **other: Layout) -> tuple[Recipe, list[str]]:
    """Backward of contiguous tensors, but for those named; gradients are contiguous."""
    rows, terms = layouts(p, **other)
    rows["dout"] = rows["out"]
    rows |= {f"d{name}": layouts(p)[0][name] for name in "qkv"}
    grads = {i: layouts(p)[1][i] for i, term in enumerate(p.terms) if term.trainable}
    return backward_recipe(p, H200, rows, terms, grads, False)


@pytest.mark.parametrize(
    ("word", "name", "strides"),
    [
        ("b1MN", "bias0", (1024, 1024, 0, 1)),  # a mask of keys expanded to all queries
        ("b1MN", "bias0", (8, 8, 0, 0)),
        ("b1MN", "k", (512, 0, 64, 1)),  # one key repeated
        ("b1MN", "q", (0, 0, 64, 1)),
    ],
    ids=str,
)
def test_rows_that_the_caller_expanded_run_portable(word: str, name: str, strides: tuple[int, ...]) -> None:
    """Descriptors have no stride of 0 along rows or columns."""
    p, other = problem(biases=(word,)), {name: Layout(strides, True)}
    rows, terms = layouts(p, **other)
    for recipe, reasons in (forward_recipe(p, H200, rows, terms), backward_of(p, **other)):
        assert [r for r in reasons if r.startswith(name) and "expanded along rows" in r], reasons
        assert not [found for found in names(recipe) if found.isupper()]


def test_a_single_row_has_no_stride() -> None:
    p = problem(M=1, N=512, biases=FULL)
    rows, terms = layouts(p, q=Layout((512, 0, 64, 1), True))
    assert forward_recipe(p, H200, rows, terms)[1] == []


def test_items_that_the_caller_expanded_are_read_once() -> None:
    p = problem(biases=FULL, Hkv=8)
    untrained = replace(p, terms=tuple(replace(term, trainable=False) for term in p.terms))
    other = {"bias0": Layout((0, 1024 * 1024, 1024, 1), True), "k": Layout((0, 512, 64, 1), True)}
    rows, terms = layouts(untrained, **other)
    recipe, reasons = forward_recipe(untrained, H200, rows, terms)
    assert reasons == []
    has = own(recipe, "shared_forward").arguments
    assert (has["bias_moves"], has["k_moves"], has["v_moves"], has["out_moves"]) == (0b100, 0b100, 0b110, 0b110)
    assert has["bias_desc"].shape == (1, 1, 8, 1024, 1024)
    assert all(step * 2 % 16 == 0 and step > 0 for step in has["bias_desc"].strides[:-1])
    has = own(backward_of(p, **other)[0], "dkdv").arguments
    assert (has["bias_moves"], has["ds_moves"]) == (0b100, 0b110), "a gradient for each item"


def test_a_trained_bias_that_the_caller_expanded_to_the_items_runs_portable() -> None:
    """Its gradient has an axis that it does not move along."""
    p = problem(biases=("b1MN",))
    assert "DBIAS" in names(backward_of(p)[0])
    recipe, reasons = backward_of(p, bias0=Layout((0, 0, 1024, 1), True))
    assert reasons == ["a trained bias that is expanded along an axis of its gradient"]
    assert not [found for found in names(recipe) if found.isupper()]


def test_batch_axes_that_do_not_merge_into_two_run_portable() -> None:
    p = problem(batch=(2, 3, 2, 3), biases=("a1c1HMN",))
    _, told = planned(p)
    assert all("do not merge into two" in reasons[0] for reasons in told.values())
    rows, terms = layouts(p)
    assert len(Operands(p, H200, rows, terms).sizes) > 2


@pytest.mark.parametrize(
    "terms", [{"biases": ("a1c1MN",)}, {"biases": ("1b11MN",), "masks": ("a1c11N",)}], ids=["bias", "bias and mask"]
)
def test_a_bias_for_a_copy_runs_portable_where_batch_axes_do_not_merge_into_two(terms: dict[str, Any]) -> None:
    """A copy has two batch axes, as descriptors do."""
    p = problem(batch=(2, 3, 5), M=257, Hq=4, **terms)
    assert not backend.objections(p)
    recipes, told = planned(p)
    for reasons in told.values():
        assert any("do not merge into two" in reason for reason in reasons), told
    assert not [name for recipe in recipes.values() for name in names(recipe) if name.isupper() or name == "align_rows"]


# --------------------------------------------------------------------------------------------------------------- plans


@pytest.mark.parametrize(("D", "round_of"), [(32, 128), (64, 128), (128, 64)])
def test_a_call_without_a_bias_has_one_pass_back(D: int, round_of: int) -> None:
    recipes, told = planned(problem(M=1000, N=1096, D=D))
    assert told == {"forward": [], "backward": []}
    assert names(recipes["forward"]) == ["FORWARD"]
    assert names(recipes["backward"]) == ["delta", "DQKV", "convert"]
    turns = dict(recipes["backward"].zeroed)["turns"]
    assert turns == 16 * 8 * -(-1000 // round_of), "a turn for every head and round of queries"
    assert dict(recipes["backward"].scratch)["sums"] == 16 * 8 * 1000 * D
    launched = own(recipes["backward"], "dqkv")
    assert launched.grid == 9 * 16 * 8, "one program an item: a program may wait for those before it"


@pytest.mark.parametrize(
    ("more", "one_pass"),
    [
        ({}, True),
        ({"D": 32, "Dv": 24}, True),
        ({"Hkv": 2}, True),
        ({"D": 128}, False),
        ({"causal": True}, False),
        ({"biases": SHARED}, False),
        ({"masks": KEYS}, False),
        ({"trained": (True, False, False)}, False),
        ({"bias_trained": True}, False),
    ],
    ids=str,
)
def test_a_fixed_bias_of_each_item_has_one_pass_back(more: dict[str, Any], one_pass: bool) -> None:
    recipes, told = planned(problem(**{"biases": FULL, "bias_trained": False, **more}))
    assert told == {"forward": [], "backward": []}
    assert ("DQKV" in names(recipes["backward"])) == one_pass
    assert ("DQ" in names(recipes["backward"]) or "dq_from_ds" in names(recipes["backward"])) != one_pass


@pytest.mark.parametrize(
    ("batch", "word", "shared"),
    [((4,), "1HMN", True), ((2, 4), "b1HMN", True), ((2, 3), "b1HMN", False), ((4, 2), "1bHMN", False)],
    ids=str,
)
def test_neighbours_along_the_last_batch_axis_share_a_bias_tile(
    batch: tuple[int, ...], word: str, shared: bool
) -> None:
    recipes, told = planned(problem(batch=batch, biases=(word,)))
    assert told == {"forward": [], "backward": []}
    assert ("SHARED_FORWARD" in names(recipes["forward"])) == shared
    assert own(recipes["backward"], "dq").arguments["ROWS"] == (2 if shared else 1)


ODD = {"M": 1025, "biases": SHARED}


@pytest.mark.parametrize(
    ("p", "other", "by_pointer"),
    [
        (problem(**ODD), {}, True),
        (problem(**ODD, D=32, batch=(64,)), {}, True),
        (problem(M=333, D=32, batch=(64,), biases=SHARED), {}, True),
        (problem(batch=(2, 4), M=333, biases=("b1HMN",)), {}, True),
        (problem(biases=SHARED), {"bias0": Layout((0, 1024 * 1028, 1028, 1), True)}, False),
        (problem(biases=SHARED), {"bias0": Layout((0, 1024 * 1024, 1, 1024), True)}, False),
        (problem(biases=SHARED), {"bias0": Layout((0, 1024 * 1024, 1024, 1), False)}, False),
    ],
    ids=str,
)
def test_a_shared_bias_in_other_rows_is_copied_first(p: Problem, other: dict[str, Layout], by_pointer: bool) -> None:
    rows, terms = layouts(p, **other)
    forward, reasons = forward_recipe(p, H200, rows, terms)
    assert not reasons
    assert names(forward)[:2] == ["align_rows", "SHARED_FORWARD"]
    backward, reasons = backward_of(p, **other)
    assert not reasons
    assert names(backward)[:2] == ["align_rows", "delta"]
    pitch = -(-p.N // 8) * 8
    assert dict(backward.scratch)["aligned"] * 2 == math.prod(p.terms[0].shape[:-1]) * pitch
    for launched in (own(forward, "shared_forward"), *(x for x in backward.launches if "dbias_desc" in x.arguments)):
        box = launched.arguments["bias_desc"]
        assert (box.slot, box.shape[-2:], box.strides[-2:]) == ("aligned", (p.M, p.N), (pitch, 1))
    (owner,) = [x for x in backward.launches if "dbias_desc" in x.arguments]
    target = owner.arguments["partial_ptr"] if owner.arguments["SPLIT"] else owner.arguments["dbias_desc"].slot
    assert target in ("grad0", "partial0")
    assert by_pointer <= owner.arguments["SPLIT"]


@pytest.mark.parametrize(
    ("p", "words"),
    [
        (problem(D=192, biases=FULL, N=1004), "too large to copy, or shared by too few"),  # as large as the scores
        (problem(batch=(64,), D=192, M=4100, biases=SHARED), "too large to copy, or shared by too few"),  # 269 MB
        (problem(D=128, biases=FULL, N=1001, masks=KEYS), "no room to put its rows in order"),
        (problem(biases=FULL, N=1001, bias_dtype=F32), "no room to put its rows in order"),
    ],
)
def test_a_large_bias_is_not_copied(p: Problem, words: str) -> None:
    assert any(words in reason for reason in objections.to_problem(p))


def test_a_large_bias_in_odd_rows_is_read_in_lines_of_eight() -> None:
    p = problem(batch=(3,), M=333, N=1001, biases=FULL)
    assert not objections.to_problem(p)
    recipes, told = planned(p)
    assert told == {"forward": [], "backward": []}
    assert names(recipes["forward"]) == ["FORWARD"]
    assert names(recipes["backward"]) == ["delta", "DKDV", "dkdv", "dq_from_ds"]
    for launched in (own(recipes["forward"], "forward"), own(recipes["backward"], "dkdv")):
        has = launched.arguments
        rows = 3 * 8 * 333  # in lines of eight: all of them, in no line a part
        assert has["RAW_STAGES"] > 0
        assert "bias in lines of eight rows" in str(launched)
        assert (has["odd_pitch"], has["odd_whole"], has["odd_b1"], has["odd_h"]) == (1001, rows, 8 * 333, 333)
        assert (has["bias_desc"].shape, has["bias_desc"].strides) == ((rows // 8, 8008), (8008, 1))
    assert own(recipes["backward"], "dkdv").arguments["ds_desc"].strides[-2:] == (1008, 1)  # rows in steps of 16 bytes


@pytest.mark.parametrize(("pitch", "lines"), [(1001, 333), (1002, 332), (1337, 332)])
def test_lines_of_eight_rows_end_before_the_bias_does(pitch: int, lines: int) -> None:
    p = problem(batch=(1,), M=333, N=1001, biases=FULL)
    bias = Layout((8 * 333 * pitch, 333 * pitch, pitch, 1), True)
    rows, terms = layouts(p, bias0=bias)
    recipe, reasons = forward_recipe(p, H200, rows, terms)
    assert not reasons
    has = own(recipe, "forward").arguments
    assert (has["bias_desc"].shape[0], has["odd_whole"]) == (lines, 8 * lines)
    assert 8 * lines * pitch <= (8 * 333 - 1) * pitch + p.N


def test_a_shared_bias_in_odd_rows_too_large_to_copy_is_trained_by_portable_kernels() -> None:
    recipes, told = planned(problem(batch=(4,), M=2049, Hq=16, biases=SHARED))
    assert told["forward"] == []
    assert names(recipes["forward"]) == ["FORWARD"]
    (reason,) = told["backward"]
    assert reason.startswith("a trained bias that items share, with rows not in steps of 16 bytes")
    recipes, told = planned(problem(batch=(4,), M=2049, Hq=16, biases=SHARED, bias_trained=False))
    assert told == {"forward": [], "backward": []}
    assert names(recipes["backward"]) == ["delta", "DKDV", "dkdv", "DQ", "dq"]


@pytest.mark.parametrize("D", [64, 128])
def test_a_causal_call_has_one_pass_back(D: int) -> None:
    for sizes in ({}, {"M": 1000}, {"M": 1024, "N": 2048}):
        found = names(planned(problem(D=D, causal=True, **sizes))[0]["backward"])
        assert found == ["delta", "DQKV", "convert"]
    grouped = names(planned(problem(D=D, causal=True, Hkv=2))[0]["backward"])
    assert grouped == ["delta", "DKDV", "DQ"]


@pytest.mark.parametrize(
    ("trained", "kernels"),
    [
        ((True, False, False), ["delta", "DQ"]),
        ((False, True, True), ["delta", "DKDV"]),
    ],
    ids=str,
)
def test_what_is_not_wanted_is_not_computed(trained: tuple[bool, bool, bool], kernels: list[str]) -> None:
    recipes, told = planned(problem(trained=trained))
    assert told["backward"] == []
    assert names(recipes["backward"]) == kernels
    recipes, told = planned(problem(trained=(True, False, True)))
    assert told["backward"] == ["dk or dv is not wanted; its kernel computes both"]
    assert names(recipes["backward"]) == ["dq", "dkdv"]


@pytest.mark.parametrize(
    ("p", "resident"),
    [
        (problem(batch=(64,), D=32, biases=SHARED), True),
        (problem(batch=(64,), D=16, M=520, biases=FULL), False),  # its score gradients are stored
        (problem(batch=(63,), D=32, biases=SHARED), False),  # 504 programs
        (problem(batch=(64,), D=32, M=1152, biases=SHARED), False),
        (problem(batch=(64,), D=32, M=1000, biases=SHARED), True),
        (problem(batch=(64,), D=32, M=512, biases=SHARED), False),  # dq goes with the bias's gradient
        (problem(batch=(64,), D=32, biases=SHARED, causal=True), False),
        (problem(batch=(64,), D=48, biases=SHARED), False),
    ],
    ids=str,
)
def test_one_pass_under_a_bias_is_for_many_short_heads(p: Problem, resident: bool) -> None:
    backward = planned(p)[0]["backward"]
    assert ("DQKV" in names(backward)) == resident
    if resident:
        launched = own(backward, "dqkv")
        assert launched.arguments["RESIDENT"]
        assert launched.grid == H200.multiprocessors
        assert dict(backward.scratch)["sums"] == launched.grid * p.M * 32, "a line for every program"
        assert {"turns", "convert"}.isdisjoint({*dict(backward.zeroed), *names(backward)})


def test_rows_that_outgrow_a_fixed_reference_are_done_anew() -> None:
    """bfloat16 alone: weights of float16 do not reach far enough."""
    p = problem(M=1000, biases=SHARED)
    recipe = planned(p)[0]["forward"]
    assert names(recipe) == ["SHARED_FORWARD", "forward"]
    assert own(recipe, "shared_forward").arguments["FIXED"]
    assert dict(recipe.scratch)["redo"] == 16 * 8 * 16, "a flag for every 64 rows, up to a whole tile of 128"
    assert recipe.launches[1].arguments["redo_pitch"] == 16
    recipe = planned(problem(M=1000, dtype=F16, biases=SHARED))[0]["forward"]
    assert names(recipe) == ["SHARED_FORWARD"]
    assert not own(recipe, "shared_forward").arguments["FIXED"]


def test_dq_and_a_shared_bias_go_together_where_all_keys_fit() -> None:
    found = names(planned(problem(M=512, D=32, biases=SHARED))[0]["backward"])
    assert "DQ_DBIAS" in found
    assert not {"DQ", "DBIAS"} & set(found)
    for other in (problem(M=520, D=32, biases=SHARED), problem(M=512, D=32, biases=SHARED, causal=True)):
        assert {"DQ", "DBIAS"} <= set(names(planned(other)[0]["backward"]))


def test_a_full_bias_is_stored_by_dkdv_and_read_back_for_dq() -> None:
    recipes, _ = planned(problem(biases=FULL))
    assert names(recipes["backward"])[:2] == ["delta", "DKDV"]
    assert own(recipes["backward"], "dkdv").arguments["STORE_DS"]
    assert "dq_from_ds" in names(recipes["backward"])


def boxes_of(recipe: Recipe, slot: str) -> list[Box]:
    """Every block in which kernels of bulk copies read or write a tensor."""
    launches = [x for x in recipe.launches if isinstance(x, DescriptorLaunch)]
    return [v for x in launches for v in x.arguments.values() if isinstance(v, Box) and v.slot == slot]


@pytest.mark.parametrize("D", [32, 64, 128])
@pytest.mark.parametrize(
    ("biases", "N", "forward", "backward"),
    [
        (FULL, 516, ["FORWARD"], ["delta", "DKDV", "dkdv", "dq_from_ds"]),
        (SHARED, 512, ["SHARED_FORWARD", "forward"], ["delta", "DKDV", "dkdv", "DQ", "dq", "DBIAS", "dbias"]),
    ],
    ids=["full", "shared"],
)
def test_a_float32_bias_is_read_and_its_gradient_written_as_it_is(
    D: int, biases: tuple[str, ...], N: int, forward: list[str], backward: list[str]
) -> None:
    """Also up to 512 keys of width 32, which a bias of 16 bits walks over in one pass."""
    recipes, told = planned(problem(D=D, N=N, biases=biases, bias_dtype=F32))
    assert told == {"forward": [], "backward": []}
    assert names(recipes["forward"]) == (forward if D < 128 else ["FORWARD"])
    assert names(recipes["backward"]) == backward
    for recipe, slot in ((recipes["forward"], "bias0"), (recipes["backward"], "bias0"), (recipes["backward"], "grad0")):
        found = boxes_of(recipe, slot)
        assert found
        assert all((box.dtype, box.shape[-2:]) == (F32, (1024, N)) for box in found)
        assert all(step * 4 % 16 == 0 for box in found for step in box.strides[:-1])


def test_a_float32_bias_in_other_rows_is_copied_to_steps_of_four() -> None:
    for recipe in planned(problem(M=1025, biases=SHARED, bias_dtype=F32))[0].values():
        assert names(recipe)[0] == "align_rows"
        assert dict(recipe.scratch)["aligned"] == 8 * 1025 * 1028
        assert all((box.dtype, box.strides[-2:]) == (F32, (1028, 1)) for box in boxes_of(recipe, "aligned"))
    assert own(recipe, "dbias").arguments["SPLIT"]


def test_heads_too_wide_for_a_float32_bias_run_portable() -> None:
    recipes, told = planned(problem(D=192, biases=FULL, bias_dtype=F32))
    assert told["forward"] == ["no tile for these widths beside a float32 bias"]
    assert told["backward"] == ["a bias beside heads of width 192; its backward takes one up to 128"]
    assert not [name for recipe in recipes.values() for name in names(recipe) if name.isupper()]


def test_a_shared_bias_has_a_kernel_of_its_own() -> None:
    found = names(planned(problem(biases=SHARED))[0]["backward"])
    assert {"delta", "DKDV", "DQ", "DBIAS"} <= set(found)
    p = problem(biases=SHARED)
    untrained = replace(p, terms=tuple(replace(term, trainable=False) for term in p.terms))
    assert "DBIAS" not in names(planned(untrained)[0]["backward"])


@pytest.mark.parametrize(
    ("p", "at_once"),
    [
        (problem(biases=SHARED), True),
        (problem(batch=(15,), biases=SHARED), False),  # items come in twos
        (problem(biases=("b1MN",)), False),  # heads share it, batch items do not
        (problem(batch=(1,), M=4096, biases=SHARED), False),
        (problem(biases=SHARED, Hkv=4), False),
        (problem(batch=(2, 8), biases=("1bHMN",)), False),  # two axes, one of which the bias has
        (problem(batch=(2, 8), biases=("11HMN",)), True),  # both merge into one
    ],
    ids=str,
)
def test_batch_items_stand_around_one_bias_tile_where_they_can(p: Problem, at_once: bool) -> None:
    recipes, told = planned(p)
    assert told == {"forward": [], "backward": []}
    assert ("SHARED_FORWARD" in names(recipes["forward"])) == at_once
    for recipe in recipes.values():
        for launched in recipe.launches:
            if isinstance(launched, DescriptorLaunch):
                rows = launched.arguments.get("ROWS", 1)
                assert p.batch_size % rows == 0
                assert at_once or rows == 1


def test_few_queries_and_many_keys_are_left_to_the_kernel_that_splits_keys() -> None:
    recipes, told = planned(problem(batch=(1,), Hq=2, M=128, N=16384, trained=(False, False, False)))
    assert told["forward"]
    assert names(recipes["forward"]) == ["forward", "merge"]


def test_a_gradient_that_its_kernel_does_not_leave_out_is_said() -> None:
    _, told = planned(problem(trained=(True, True, False)))
    assert told["backward"] == ["dk or dv is not wanted; its kernel computes both"]


@pytest.mark.parametrize(
    ("D", "Dv", "columns"),
    [
        (192, 128, (192, 128)),
        (136, 64, (192, 128)),
        (160, 160, (192, 192)),
        (256, 256, (256, 256)),
        (64, 200, (256, 256)),
    ],
)
def test_wide_heads_have_kernels_of_their_own(D: int, Dv: int, columns: tuple[int, int]) -> None:
    recipes, told = planned(problem(M=1000, N=1090, D=D, Dv=Dv, Hkv=2))
    assert told == {"forward": [], "backward": []}
    assert names(recipes["backward"]) == ["delta", "WIDE_DKDV", "WIDE_DQ"]
    for name, items in (("wide_dkdv", 18 * 16 * 2), ("wide_dq", 8 * 16 * 8)):
        launched = own(recipes["backward"], name)
        has = launched.arguments
        assert (has["PIECES_1"] * has["PIECE"], has["PIECES_2"] * has["PIECE"]) == columns
        assert (has["items"], launched.grid) == (items, H200.multiprocessors)
        assert has["PIECES_1"] % has["GROUP_1"] == has["PIECES_2"] % has["GROUP_2"] == 0


@pytest.mark.parametrize(
    ("D", "Dv", "blocks"),
    [
        (128, 128, ((64, 128), (128, 128), (128, 128), (64, 128))),
        (64, 128, ((64, 64), (128, 64), (128, 128), (64, 128))),
        (192, 128, ((64, 64), (128, 64), (128, 128), (64, 64))),
        (136, 32, ((64, 64), (128, 64), (128, 32), (64, 16))),
        (192, 192, ((64, 64), (64, 64), (64, 256), (64, 128))),
        (128, 192, ((64, 128), (64, 128), (64, 256), (64, 256))),
        (256, 128, ((64, 256), (64, 256), (64, 128), (64, 128))),
    ],
)
def test_blocks_of_a_forward_pass(D: int, Dv: int, blocks: tuple[tuple[int, int], ...]) -> None:
    """Of q, k, v and out; 192 columns of q and k are three blocks side by side."""
    has = own(planned(problem(M=1000, N=1090, D=D, Dv=Dv, Hkv=2))[0]["forward"], "forward").arguments
    assert tuple(has[f"{name}_desc"].block[3:] for name in ("q", "k", "v", "out")) == blocks
    assert (has["D_BLOCK"], has["DV_BLOCK"]) == (blocks[0][1], blocks[2][1])
    assert has["D_BLOCK"] * has["PIECES"] >= D
    assert has["OUT_APART"] or blocks[0] == blocks[3], "the output does not fit in the queries' place"


def test_every_tile_of_the_tables_can_be_chosen() -> None:
    widths, flags = range(1, 257), (False, True)
    pairs, two = list(product(widths, (32, 128, 192, 256))), list(product(flags, repeat=2))
    for tables in (config, config_float32):
        forward = {config.forward_tile(*pair, *x, tables.FORWARD) for pair in pairs for x in two}
        assert forward - {None} == set(tables.FORWARD)
        shared = {config.shared_tile(w, *x, tables.SHARED) for w in widths for x in two}
        assert shared - {None} == set(tables.SHARED)
    assert {config.pair_tile(w, n) for w in widths for n in range(64, 1025, 64)} - {None} == set(config.PAIR)
    asked = product(widths, (512, 1024, 4096), (100, 1000), flags, flags, flags)
    assert {config.single_tile(*x) for x in asked} - {None} == set(config.SINGLE)
    for tables in (config, config_float32):
        assert {config.owner_tile(w, tables.OWNER) for w in widths} - {None} == set(tables.OWNER)
        backward = {
            config.backward_tile(kernel, w, *x, tables.BACKWARD)
            for kernel in ("dq", "dkdv")
            for w in widths
            for x in product(flags, repeat=3)
        }
        assert backward - {None} == set(tables.BACKWARD)
    pairs = [(a, b) for a, b in product(range(64, 257, 64), repeat=2) if config_wide.is_wide(a, b)]
    wide = {config_wide.wide_tile(name, *pair, causal) for name in ("dq", "dkdv") for pair in pairs for causal in flags}
    assert wide == set(config_wide.WIDE)


@pytest.mark.parametrize(
    "p",
    [
        problem(batch=(16,), M=1024, D=64, masks=("b11N",)),
        problem(batch=(4,), M=500, N=333, D=80, Dv=64, masks=("b11N",), dtype=F16),
        problem(batch=(2, 3), M=300, D=128, biases=("11HMN",), masks=("1111N",)),
    ],
    ids=repr,
)
def test_kernels_that_prepare_a_pass_fit(p: Problem) -> None:
    recipes, told = planned(p)
    assert not any(told.values()), told
    for recipe in recipes.values():
        prepared = [x for x in recipe.launches if x.kernel.__name__.startswith(("mark", "align"))]
        assert [x.kernel.__name__ for x in prepared][-2:] == ["mark_keys_kernel", "mark_unfit_kernel"]
        for x in prepared:
            assert list(x.arguments) == x.kernel.arg_names, "arguments are passed by position"
            assert compile_launch(x, meta_tensors(p, recipe), 90).resources["STACK"] == 0, x


def test_a_new_length_compiles_nothing() -> None:
    """But for whether the last tile of keys is a whole one."""
    for biases, M in product(((), FULL, SHARED), (1024, 2048)):
        a, b = (planned(problem(M=m, biases=biases))[0] for m in (M, M + 768))
        for name in a:
            pairs = zip(a[name].launches, b[name].launches, strict=True)
            found = [(x, y) for x, y in pairs if isinstance(x, DescriptorLaunch) and isinstance(y, DescriptorLaunch)]
            assert found
            assert all(identity(x) == identity(y) for x, y in found)


def test_its_account_of_a_call_names_every_kernel_and_what_is_portable() -> None:
    lines = backend.describe(problem(biases=SHARED))
    assert [line for line in lines if not line.startswith(" ")] == ["forward:", "backward:"]
    assert any(re.fullmatch(r"  shared_forward: \d+ programs of 2 items x 128 x \d+, .*", line) for line in lines), (
        lines
    )
    assert any(line.startswith("  dbias: ") for line in lines)
    report = str(plan.explain(problem(biases=SHARED)))
    assert "backend   hopper" in report
    assert "skipped   triton: not needed, hopper comes first" in report
    words = "backward is portable: a bias beside heads of width 256; its backward takes one up to 128"
    assert words in backend.describe(problem(M=4096, D=256, biases=FULL))


# --------------------------------------------------------------------------------------------------------- fallen back


def test_a_kernel_that_does_not_compile_falls_back_with_one_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The portable function runs twice: with this backend's recipe, which fails, then with its own."""

    tried = []

    def warmup(*args: object, **options: object) -> None:
        tried.append(True)
        raise RuntimeError("an operation that this compiler does not know")

    broken = DescriptorLaunch(
        kernel=SimpleNamespace(__name__="forward_kernel", warmup=warmup), grid=1, arguments={}, warps=4, stages=1
    )
    monkeypatch.setattr(launch, "_forward", lambda *given: Recipe(launches=(broken,)))
    real, answer = launch.portable.run_forward, tuple(torch.zeros(3))

    def run_forward(*given: Any) -> Any:
        return real(*given) if len(given) > 5 else answer

    monkeypatch.setattr(launch.portable, "run_forward", run_forward)
    monkeypatch.setattr(launch, "_broken", set())
    on_cpu = replace(problem(), device=torch.device("cpu"))
    q = torch.zeros(16, 1024, 8, 64, dtype=BF16)
    with caplog.at_level(logging.WARNING, logger="biasflash"):
        assert launch.run_forward(on_cpu, q, q, q, ()) is answer
        assert launch.run_forward(on_cpu, q, q, q, ()) is answer
    assert tried == [True], "a kernel that did not compile was compiled again"
    (said,) = [record.getMessage() for record in caplog.records]
    assert said.startswith("hopper: a kernel did not compile, portable kernels run every forward pass of *B=(16,) ")
    assert said.endswith("forward_kernel: RuntimeError: an operation that this compiler does not know")


def test_a_kernel_that_does_not_fit_the_gpu_falls_back_too() -> None:
    """Triton says so where it loads a kernel, not where it compiles it."""

    class TooLarge:
        @property
        def run(self) -> None:
            raise RuntimeError("out of resource: shared memory")

    launched = DescriptorLaunch(
        kernel=SimpleNamespace(__name__="dq_kernel", warmup=lambda *args, **options: TooLarge()),
        grid=1,
        arguments={},
        warps=4,
        stages=1,
    )
    for _ in range(2):
        with pytest.raises(BuildError, match="dq_kernel: RuntimeError: out of resource"):
            launched.run({})


def test_what_the_compiler_raises_becomes_one_kind_of_error() -> None:
    def warmup(*args: object, **options: object) -> None:
        raise KeyError("sm_90a")

    broken = DescriptorLaunch(
        kernel=SimpleNamespace(__name__="dq_kernel", warmup=warmup), grid=1, arguments={}, warps=4, stages=1
    )
    with pytest.raises(BuildError, match="dq_kernel: KeyError: 'sm_90a'"):
        broken.run({})
