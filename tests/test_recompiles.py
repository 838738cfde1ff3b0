"""A new sequence length is not a new compile: Triton's own cache keys of what calls of many lengths would launch.

No GPU and no compile: the keys come from Triton's own reading of the arguments (``offline.compile_key``), and what the
first call compiles along with its own kernels from ``ahead.others``, as in a call. Below 128 a tile shrinks with its
axis, so lengths start there.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass

import pytest
import torch

pytest.importorskip("triton", reason="only Triton compiles kernels")

from biasflash.backends.triton import ahead, geometry, launch, operands, window_plan
from biasflash.backends.triton.backward_plan import backward_recipe
from biasflash.backends.triton.forward_plan import forward_recipe
from biasflash.backends.triton.operands import Device, Facts, gradient_strides
from biasflash.backends.triton.plans import contiguous_recipes
from biasflash.backends.triton.recipe import Recipe
from biasflash.problem import Problem, Term
from biasflash.testing.offline import compile_key, meta_tensors

BF16, F32 = torch.bfloat16, torch.float32
H200 = Device(shared_memory=232448, multiprocessors=132, gpu="NVIDIA H200")
ANY = (128, 129, 257, 333, 500, 777, 1000, 1023, 1500, 2047)
EIGHTS = (128, 136, 264, 328, 504, 776, 1000, 1024, 1504, 2040)

Key = tuple[tuple[str, object], ...]


def problem(
    length: int,
    bias: str = "",
    mask: str = "",
    dtype: torch.dtype = BF16,
    B: int = 2,
    H: int = 4,
    causal: bool = False,
    M: int | None = None,
) -> Problem:
    """All trained, self-attention without ``M``; ``bias`` and ``mask`` are words of ``1`` and letters for
    ``(B, Hq, M, N)``."""
    M = length if M is None else M

    def term(kind: str, word: str, dtype: torch.dtype) -> Term:
        shape = tuple(1 if c == "1" else n for c, n in zip(word, (B, H, M, length), strict=True))
        return Term(kind=kind, shape=shape, dtype=dtype, trainable=kind == "dense")

    terms = [term("dense", bias, dtype)] if bias else []
    terms += [term("keep", mask, torch.bool)] if mask else []
    return Problem(
        batch=(B,),
        M=M,
        N=length,
        Hq=H,
        Hkv=H,
        D=64,
        Dv=64,
        dtype=dtype,
        device=torch.device("cuda"),
        terms=tuple(terms),
        causal_shift=length - M if causal else None,
        scale=0.125,
        trainable=(True, True, True),
    )


def keys_of(asked: Problem) -> list[Key]:
    """The keys of all launches of one forward and backward pass."""
    recipes = contiguous_recipes(asked, H200).values()
    return [compile_key(launch, meta_tensors(asked, r)) for r in recipes for launch in r.launches]


def kernel_of(key: Key) -> str:
    return str(key[0][1]).removesuffix("_kernel")


def facts_of(p: Problem, *, backward: bool) -> Facts:
    """What a pass is told of a call whose tensors are all contiguous; its gradients are as ``ops`` makes them."""
    q, out = ((*p.batch, p.M, p.Hq, width) for width in (p.D, p.Dv))
    k, v = ((*p.batch, p.N, p.Hkv, width) for width in (p.D, p.Dv))
    shapes = {"q": q, "k": k, "v": v, "out": out}
    if backward:
        shapes |= {"dout": out, "dq": q, "dk": k, "dv": v}
    shapes |= {"lse": (*p.batch, p.Hq, p.M), "low": (*p.batch, p.Hq, p.M) if p.keeps_low else (0,)}
    shapes |= {f"bias{i}": term.shape for i, term in enumerate(p.terms)}
    strides = {name: tuple(geometry.plain_strides(shape)) for name, shape in shapes.items()}
    if backward:
        strides |= {f"grad{i}": gradient_strides(p, term) for i, term in enumerate(p.terms) if term.trainable}
    return tuple(strides), tuple(strides.values()), (True,) * len(strides)


def plan_forward(p: Problem, precision: str, facts: Facts) -> Recipe:
    rows, terms, _ = launch.layouts(facts, len(p.terms))
    return forward_recipe(p, H200, rows, terms)


def plan_backward(p: Problem, precision: str, facts: Facts) -> Recipe:
    return backward_recipe(p, H200, *launch.layouts(facts, len(p.terms)), "dlse" in facts[0])


def compiled_by(p: Problem, seen: set[Key]) -> list[Key]:
    """What a forward and a backward call compile where ``seen`` is compiled; as ``ahead.compile_together`` decides."""
    found: dict[Key, None] = {}
    for plan in (plan_forward, plan_backward):
        facts = facts_of(p, backward=plan is plan_backward)
        recipe = plan(p, "highest", facts)
        tensors = meta_tensors(p, recipe)
        own = [compile_key(x, tensors) for x in recipe.launches]
        if not seen.issuperset(own):
            beside = ahead.others(recipe, p, "highest", facts, plan)
            found |= dict.fromkeys(key for key in (*own, *(compile_key(*asked) for asked in beside)) if key not in seen)
    return list(found)


def new_kernels(lengths: tuple[int, ...], **asked: object) -> list[list[str]]:
    """For every length in a row, the kernels that it compiles."""
    assert os.environ.get("TRITON_INTERPRET", "0") == "0", "interpreted kernels are never compiled"
    seen: set[Key] = set()
    found = []
    for length in lengths:
        keys = compiled_by(problem(length, **asked), seen)  # type: ignore[arg-type]
        found.append([kernel_of(key) for key in keys])
        seen.update(keys)
    return found


@dataclass(frozen=True, kw_only=True)
class Family:
    """Calls alike but for their length. ``first``: the kernels that the first of them compiles, whichever it is."""

    name: str
    first: tuple[str, ...]
    bias: str = ""
    mask: str = ""
    dtype: torch.dtype = BF16
    causal: bool = False


PLAIN = ("forward", "dq", "dkdv")
FULL = ("forward", "dkdv", "dq_from_ds")
SHARED = ("forward", "dq", "dkdv", "dbias")
#: delta reads no bias, and adding up chunks knows no alignment: one kernel for both classes. Few tiles: the owner's sum
#: is split into chunks, which are added up; many tiles: it is not, by the same kernel
DELTA, CHUNKS = ("delta",), ("add_chunks",)

FAMILIES = [
    Family(name="no bias", first=PLAIN),
    Family(name="no bias, causal", first=PLAIN, causal=True),
    Family(name="no bias, float32", first=PLAIN, dtype=F32),
    Family(name="row bias", first=PLAIN, bias="1HM1"),
    # rows in steps of 16 bytes, and others
    Family(name="full bias", first=2 * FULL + DELTA, bias="BHMN"),
    Family(name="full bias, causal", first=2 * FULL + DELTA, bias="BHMN", causal=True),
    Family(name="shared bias", first=2 * SHARED + CHUNKS, bias="1HMN"),
    Family(name="shared bias, key mask", first=2 * SHARED + CHUNKS, bias="1HMN", mask="B11N"),
    Family(name="key mask", first=2 * PLAIN, mask="B11N"),
    Family(name="key bias", first=2 * PLAIN, bias="B11N"),
    # float32 has a third class, lengths divisible by 4 but not by 8: their rows are aligned, EVEN_N does not hold; its
    # gradient's rows always are aligned
    Family(name="full bias, float32", first=2 * FULL + ("forward", "dkdv") + DELTA, bias="BHMN", dtype=F32),
    Family(name="shared bias, float32", first=3 * SHARED + CHUNKS, bias="1HMN", dtype=F32),
]
ORDERS = {"ascending": ANY, "descending": ANY[::-1], "eights first": EIGHTS + ANY}


@pytest.fixture(autouse=True)
def _no_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sequences of 128 are windows, which have kernels of their own."""
    monkeypatch.setattr(window_plan, "is_window", lambda ops: False)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("family", FAMILIES, ids=lambda f: f.name)
def test_ten_lengths_in_a_row(family: Family, order: str) -> None:
    first, *later = new_kernels(
        ORDERS[order], bias=family.bias, mask=family.mask, dtype=family.dtype, causal=family.causal
    )
    assert sorted(first) == sorted(family.first)
    assert not any(later)


@pytest.mark.parametrize("order", [1, -1], ids=["ascending", "descending"])
@pytest.mark.parametrize("bias", ["", "B11N"], ids=["no bias", "key bias"])
@pytest.mark.parametrize("M", [1, 100, 300])
def test_more_and_more_keys(M: int, bias: str, order: int) -> None:
    """Few queries over growing numbers of keys share them out from some number on; few pieces are added up otherwise
    than many. 300 queries do so only where a query has many keys."""
    lengths = (200, 333, 1000, 1001, 1023, 1024, 1500, 2047, 2304, 3001, 4096, 9001, 20000)
    first, *later = new_kernels(lengths[::order], bias=bias, M=M)
    assert {"forward", "merge"} <= set(first)
    assert first.count("forward") == (4 if bias else 2)
    assert not any(later)


def test_without_what_is_compiled_ahead_lengths_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or the tests above would prove nothing."""
    monkeypatch.setattr(ahead, "others", lambda *given: ())
    assert new_kernels((1000, 1001, 1024), bias="B11N") == [list(PLAIN), list(PLAIN), []]
    assert new_kernels((1000, 1024, 9001), M=1)[1:] == [["forward", "merge"], ["merge"]]


def test_windows_have_one_length(monkeypatch: pytest.MonkeyPatch) -> None:
    """A window's tile is as long as the window: other lengths are not compiled ahead."""
    monkeypatch.undo()
    assert [x for x in new_kernels((100,), bias="1HMN")[0] if "forward" in x] == ["window_forward"]


def differing(a: Key, b: Key) -> set[str]:
    """Arguments by which two keys of one kernel differ."""
    return {name for (name, x), (_, y) in zip(a, b, strict=True) if x != y}


def compare(one: Problem, other: Problem) -> dict[str, set[str]]:
    """Kernel -> arguments for which it is compiled anew."""
    pairs = zip(keys_of(one), keys_of(other), strict=True)
    found = {kernel_of(a): differing(a, b) for a, b in pairs}
    return {kernel: names for kernel, names in found.items() if names}


@pytest.mark.parametrize("capability", [80, 89, 90, 100])
@pytest.mark.parametrize("dtype", [BF16, F32], ids=["bfloat16", "float32"])
@pytest.mark.parametrize(("bias", "mask"), [("1HMN", ""), ("BHMN", ""), ("", "BHMN"), ("1HMN", "B11N")])
def test_gpus_without_a_table_compile_for_all_lengths_too(
    bias: str, mask: str, dtype: torch.dtype, capability: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their rules have other tiles for rows that are not in steps of 16 bytes."""
    shared = 166912 if capability == 80 else 101376 if capability == 89 else 232448
    device = Device(shared_memory=shared, multiprocessors=132, capability=capability, gpu="")
    monkeypatch.setattr(sys.modules[__name__], "H200", device)
    for lengths in ((1000, 1001, 333, 1004, 2047), (1001, 1000, 1004)):
        first, *later = new_kernels(lengths, bias=bias, mask=mask, dtype=dtype)
        assert first
        assert later == [[]] * len(later)


def test_a_shared_bias_that_outgrows_the_cache_turns_the_order_of_programs() -> None:
    """The one length that matters beside alignment and chunks: batch items no longer run side by side."""
    side = int((operands.L2_PLANE_BYTES / 2) ** 0.5) // 8 * 8
    found = compare(problem(side, bias="1HMN"), problem(side + 8, bias="1HMN"))
    assert found == {kernel: {"ORDER"} for kernel in ("forward", "dq", "dkdv")}


def test_a_key_holds_what_differs() -> None:
    """Lengths that share no tile, and strides that are not coded: keys that were blind to these would prove nothing."""
    found = compare(problem(128), problem(20))
    assert found.keys() == set(PLAIN)
    assert all({"BLOCK_N", "SHORT_N"} <= names for names in found.values())


def test_uncoded_strides_would_compile_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """Why strides and sizes are coded (``geometry.code``): Triton looks at integers inside tuples."""
    asked = problem(128, bias="BHMN"), problem(136, bias="BHMN")
    assert not compare(*asked)
    monkeypatch.setattr(geometry, "code", lambda value: value)
    found = compare(*asked)
    assert {"term_strides"} <= found["forward"]
    assert {"ds_strides"} <= found["dkdv"]
