"""A new sequence length is not a new compile: Triton's own cache keys of what calls of many lengths would launch.

No GPU and no compile: the keys come from Triton's own reading of the arguments (``offline.compile_key``). Below 128 a
tile shrinks with its axis, so lengths start there.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

import pytest
import torch

pytest.importorskip("triton", reason="only Triton compiles kernels")

from biasflash.backends.triton import forward_plan, geometry, operands, window_plan
from biasflash.backends.triton.operands import Device
from biasflash.backends.triton.plans import contiguous_recipes
from biasflash.problem import Problem, Term
from biasflash.testing.offline import compile_key, meta_tensors

BF16, F32 = torch.bfloat16, torch.float32
H200 = Device(shared_memory=232448, multiprocessors=132, gpu="NVIDIA H200")
ANY = (128, 129, 257, 333, 500, 777, 1000, 1023, 1500, 2047)
EIGHTS = (128, 136, 264, 328, 504, 776, 1000, 1024, 1504, 2040)

Key = tuple[tuple[str, object], ...]


def problem(
    length: int, bias: str = "", mask: str = "", dtype: torch.dtype = BF16, B: int = 2, H: int = 4, causal: bool = False
) -> Problem:
    """Self-attention, all trained; ``bias`` and ``mask`` are words of ``1`` and letters for ``(B, Hq, M, N)``."""

    def term(kind: str, word: str, dtype: torch.dtype) -> Term:
        shape = tuple(1 if c == "1" else n for c, n in zip(word, (B, H, length, length), strict=True))
        return Term(kind=kind, shape=shape, dtype=dtype, trainable=kind == "dense")

    terms = [term("dense", bias, dtype)] if bias else []
    terms += [term("keep", mask, torch.bool)] if mask else []
    return Problem(
        batch=(B,),
        M=length,
        N=length,
        Hq=H,
        Hkv=H,
        D=64,
        Dv=64,
        dtype=dtype,
        device=torch.device("cuda"),
        terms=tuple(terms),
        causal_shift=0 if causal else None,
        scale=0.125,
        trainable=(True, True, True),
    )


def keys_of(asked: Problem) -> list[Key]:
    """The keys of all launches of one forward and backward pass."""
    recipes = contiguous_recipes(asked, H200).values()
    return [compile_key(launch, meta_tensors(asked, r)) for r in recipes for launch in r.launches]


def kernel_of(key: Key) -> str:
    return str(key[0][1]).removesuffix("_kernel")


def new_kernels(lengths: tuple[int, ...], **asked: object) -> list[list[str]]:
    """For every length in a row, the kernels that it compiles."""
    assert os.environ.get("TRITON_INTERPRET", "0") == "0", "interpreted kernels are never compiled"
    seen: set[Key] = set()
    found = []
    for length in lengths:
        keys = dict.fromkeys(keys_of(problem(length, **asked)))  # type: ignore[arg-type]
        found.append([kernel_of(key) for key in keys if key not in seen])
        seen |= keys.keys()
    return found


@dataclass(frozen=True, kw_only=True)
class Family:
    """Calls alike but for their length. ``first``: kernels of the first length; ``later``: length -> what it adds."""

    name: str
    lengths: tuple[int, ...]
    first: tuple[str, ...]
    later: dict[int, tuple[str, ...]]
    bias: str = ""
    mask: str = ""
    dtype: torch.dtype = BF16
    causal: bool = False


PLAIN = ("forward", "dq", "dkdv")
FULL = ("forward", "delta", "dkdv", "dq_from_ds")
#: few tiles: the owner's sum is split into chunks, which are added up; many tiles: it is not, by the same kernel
SHARED = ("forward", "dq", "dkdv", "dbias", "add_chunks")
OTHER_CLASS = SHARED[:-1]  # adding up chunks knows no alignment

FAMILIES = [
    Family(name="no bias", lengths=ANY, first=PLAIN, later={}),
    Family(name="no bias, causal", lengths=ANY, first=PLAIN, later={}, causal=True),
    Family(name="no bias, float32", lengths=ANY, first=PLAIN, later={}, dtype=F32),
    Family(name="full bias", lengths=EIGHTS, first=FULL, later={}, bias="BHMN"),
    Family(name="full bias, causal", lengths=EIGHTS, first=FULL, later={}, bias="BHMN", causal=True),
    Family(name="full bias, float32", lengths=EIGHTS, first=FULL, later={}, bias="BHMN", dtype=F32),
    # delta reads no bias: one kernel for both classes of alignment
    Family(
        name="full bias, any length",
        lengths=ANY,
        first=FULL,
        later={129: ("forward", "dkdv", "dq_from_ds")},
        bias="BHMN",
    ),
    Family(name="shared bias", lengths=EIGHTS, first=SHARED, later={}, bias="1HMN"),
    Family(name="shared bias, float32", lengths=EIGHTS, first=SHARED, later={}, bias="1HMN", dtype=F32),
    Family(
        name="shared bias, any length",
        lengths=ANY,
        first=SHARED,
        later={129: OTHER_CLASS},
        bias="1HMN",
    ),
    Family(
        name="shared bias, key mask, any length",
        lengths=ANY,
        first=SHARED,
        later={129: OTHER_CLASS},
        bias="1HMN",
        mask="B11N",
    ),
    Family(name="key mask, any length", lengths=ANY, first=PLAIN, later={129: PLAIN}, mask="B11N"),
    Family(name="key bias, any length", lengths=ANY, first=PLAIN, later={129: PLAIN}, bias="B11N"),
    Family(name="row bias, any length", lengths=ANY, first=PLAIN, later={}, bias="1HM1"),
    # float32 has a third class, lengths divisible by 4 but not by 8: their rows are aligned, EVEN_N does not hold
    Family(
        name="shared bias, float32, any length",
        lengths=ANY,
        first=SHARED,
        later={129: OTHER_CLASS, 500: OTHER_CLASS},
        bias="1HMN",
        dtype=F32,
    ),
]


@pytest.fixture(autouse=True)
def _no_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sequences of 128 are windows, which have kernels of their own."""
    monkeypatch.setattr(window_plan, "is_window", lambda ops: False)


@pytest.mark.parametrize("family", FAMILIES, ids=lambda f: f.name)
def test_ten_lengths_in_a_row(family: Family) -> None:
    found = new_kernels(family.lengths, bias=family.bias, mask=family.mask, dtype=family.dtype, causal=family.causal)
    wanted = [family.first, *(family.later.get(length, ()) for length in family.lengths[1:])]
    assert found == [list(kernels) for kernels in wanted]


def test_pieces_compile_their_kernels_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few queries over any number of keys share them out; as many queries as keys never do (``FAMILIES``)."""
    monkeypatch.setattr(forward_plan, "RULE", forward_plan.SplitRule(keys_per_query=0))
    assert new_kernels(ANY) == [["forward", "dq", "dkdv"], *[[]] * 7, ["forward", "merge"], []]
    assert new_kernels((1023, 1500, 2047), H=16) == [["forward", "dq", "dkdv"], [], []]


def differing(a: Key, b: Key) -> set[str]:
    """Arguments by which two keys of one kernel differ."""
    return {name for (name, x), (_, y) in zip(a, b, strict=True) if x != y}


def compare(one: Problem, other: Problem) -> dict[str, set[str]]:
    """Kernel -> arguments for which it is compiled anew."""
    pairs = zip(keys_of(one), keys_of(other), strict=True)
    found = {kernel_of(a): differing(a, b) for a, b in pairs}
    return {kernel: names for kernel, names in found.items() if names}


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
