"""The reference itself: what hidden places may not do to results and gradients, and the limits of its numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck

import biasflash
from biasflash import reference

B, M, N, Hq, Hkv, D, Dv = 2, 5, 7, 4, 2, 3, 2
SEEN = 4  # keys 0 .. 3 are seen, the others hidden
ALIVE = [0, 2, 4]  # queries that see something where rows are hidden
DEAD = [1, 3]
SCALE = 0.7
HOSTILE = [torch.nan, torch.inf]


def tensors(queries: int = M, keys: int = N, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    shapes = ((B, queries, Hq, D), (B, keys, Hkv, D), (B, keys, Hkv, Dv))
    return [torch.randn(s, dtype=torch.float64).to(dtype) for s in shapes]


def by_attend(q: Tensor, k: Tensor, v: Tensor, terms: list[Tensor], kinds: list[str], causal: str) -> Any:
    shift = {"none": None, "bottom-right": k.shape[1] - q.shape[1], "top-left": 0}[causal]
    return reference.attend(q, k, v, terms, kinds, shift, SCALE)


def by_backend(q: Tensor, k: Tensor, v: Tensor, terms: list[Tensor], kinds: list[str], causal: str) -> Any:
    biases = [t for t, kind in zip(terms, kinds, strict=True) if kind == "dense"]
    masks = [t for t, kind in zip(terms, kinds, strict=True) if kind == "keep"]
    aligned = False if causal == "none" else causal
    return biasflash.attention(
        q, k, v, biases, masks, causal=aligned, scale=SCALE, return_lse=True, backend="reference"
    )


WAYS = pytest.mark.parametrize("way", [by_attend, by_backend], ids=["autograd", "backend"])


def solve(
    way: Callable[..., Any],
    inputs: list[Tensor],
    terms: list[Tensor],
    kinds: list[str],
    causal: str,
    seeds: tuple[Tensor, Tensor],
) -> dict[str, Tensor]:
    """Results and gradients of q, k, v and every bias."""
    leaves = [t.clone().requires_grad_() for t in inputs]
    terms = [t.clone().requires_grad_(t.is_floating_point()) for t in terms]
    out, lse = way(*leaves, terms, kinds, causal)
    wanted = [*leaves, *(t for t in terms if t.requires_grad)]
    grads = torch.autograd.grad((out, lse), wanted, seeds)
    names = ["q", "k", "v", *(f"bias{i}" for i in range(len(wanted) - 3))]
    return {"out": out.detach(), "lse": lse.detach()} | dict(zip(names, grads, strict=True))


def seeds_of(queries: int) -> tuple[Tensor, Tensor]:
    return torch.randn(B, queries, Hq, Dv).double(), torch.randn(B, Hq, queries).double()


def key_hider(how: str) -> tuple[list[Tensor], list[str], str]:
    """Terms that hide keys ``SEEN`` and later from every query."""
    keep = torch.arange(N) < SEEN
    if how == "mask of keys":
        return [keep], ["keep"], "none"
    if how == "mask of batch and keys":
        return [keep.expand(B, 1, 1, N)], ["keep"], "none"
    if how == "expanded mask":
        return [keep.expand(M, N)], ["keep"], "none"
    if how == "two masks":
        return [keep | (torch.arange(N) == N - 1), keep | (torch.arange(N) == SEEN)], ["keep", "keep"], "none"
    assert how == "bias"
    return [torch.zeros(N, dtype=torch.float64).masked_fill(~keep, -torch.inf)], ["dense"], "none"


@WAYS
@pytest.mark.parametrize("poison", HOSTILE)
@pytest.mark.parametrize("how", ["mask of keys", "mask of batch and keys", "expanded mask", "two masks", "bias"])
def test_what_is_stored_in_hidden_keys_reaches_nothing(how: str, poison: float, way: Callable[..., Any]) -> None:
    q, k, v = tensors()
    k[:, SEEN:], v[:, SEEN:] = poison, -poison
    seeds = seeds_of(M)
    plane = torch.randn(Hq, M, N).double()
    terms, kinds, causal = key_hider(how)
    found = solve(way, [q, k, v], [plane, *terms], ["dense", *kinds], causal, seeds)
    short = [q, k[:, :SEEN], v[:, :SEEN]]
    wanted = solve(way, short, [plane[..., :SEEN]], ["dense"], "none", seeds)
    for name in ("out", "lse", "q"):
        torch.testing.assert_close(found[name], wanted[name])
    for name in ("k", "v"):
        torch.testing.assert_close(found[name][:, :SEEN], wanted[name])
        assert (found[name][:, SEEN:] == 0).all(), name
    torch.testing.assert_close(found["bias0"][..., :SEEN], wanted["bias0"])
    assert (found["bias0"][..., SEEN:] == 0).all()


@WAYS
@pytest.mark.parametrize("poison", HOSTILE)
@pytest.mark.parametrize("how", ["mask", "bias"])
def test_a_row_that_sees_nothing_gives_nothing_whatever_it_holds(
    how: str, poison: float, way: Callable[..., Any]
) -> None:
    q, k, v = tensors()
    dout, dlse = seeds_of(M)
    q[:, DEAD], dout[:, DEAD], dlse[..., DEAD] = poison, poison, poison
    alive = torch.ones(M, 1, dtype=torch.bool)
    alive[DEAD] = False
    hider = alive if how == "mask" else torch.zeros(M, 1, dtype=torch.float64).masked_fill(~alive, -torch.inf)
    plane = torch.randn(1, M, N).double()
    found = solve(way, [q, k, v], [plane, hider], ["dense", "keep" if how == "mask" else "dense"], "none", (dout, dlse))
    wanted = solve(way, [q[:, ALIVE], k, v], [plane[:, ALIVE]], ["dense"], "none", (dout[:, ALIVE], dlse[..., ALIVE]))
    for name in ("k", "v"):
        torch.testing.assert_close(found[name], wanted[name])
    for name in ("out", "q"):
        torch.testing.assert_close(found[name][:, ALIVE], wanted[name])
        assert (found[name][:, DEAD] == 0).all(), name
    torch.testing.assert_close(found["lse"][..., ALIVE], wanted["lse"])
    assert (found["lse"][..., DEAD] == -torch.inf).all()
    torch.testing.assert_close(found["bias0"][:, ALIVE], wanted["bias0"])
    assert (found["bias0"][:, DEAD] == 0).all()


@WAYS
def test_rows_before_the_first_key_of_a_causal_call_give_nothing(way: Callable[..., Any]) -> None:
    """Bottom-right with more queries than keys: the first ``M - keys`` queries see nothing."""
    keys = 3
    q, k, v = tensors(keys=keys)
    dout, dlse = seeds_of(M)
    early = slice(0, M - keys)
    q[:, early], dout[:, early], dlse[..., early] = torch.nan, torch.nan, torch.nan
    found = solve(way, [q, k, v], [], [], "bottom-right", (dout, dlse))
    late = slice(M - keys, None)
    wanted = solve(way, [q[:, late], k, v], [], [], "top-left", (dout[:, late], dlse[..., late]))
    torch.testing.assert_close(found["k"], wanted["k"])
    torch.testing.assert_close(found["v"], wanted["v"])
    assert (found["out"][:, early] == 0).all()
    assert (found["q"][:, early] == 0).all()


@WAYS
def test_a_dead_row_stays_dead_beside_infinite_keys_and_values(way: Callable[..., Any]) -> None:
    """0 x inf must not turn a hidden score, or an output without weights, into NaN."""
    q, k, v = tensors()
    k[:, 0], v[:, 0] = torch.inf, torch.inf
    hider = torch.zeros(M, 1, dtype=torch.float64)
    hider[DEAD] = -torch.inf
    found = solve(way, [q, k, v], [hider], ["dense"], "none", seeds_of(M))
    assert (found["out"][:, DEAD] == 0).all()
    assert (found["lse"][..., DEAD] == -torch.inf).all()
    assert (found["q"][:, DEAD] == 0).all()


@WAYS
def test_a_nan_in_a_visible_place_propagates(way: Callable[..., Any]) -> None:
    for which in range(3):
        inputs = tensors()
        inputs[which][0, 1] = torch.nan
        found = solve(way, inputs, [torch.arange(N) < SEEN], ["keep"], "none", seeds_of(M))
        assert found["out"][0, 1].isnan().all()
        assert not found["out"][1].isnan().any()


def test_two_finite_biases_below_float32_leave_no_infinity_in_the_low_part() -> None:
    """Their sum is finite in float64: a proper softmax, though the rounded lse is -inf."""
    low_bias = torch.full((1, N), torch.finfo(torch.float32).min)
    q, k, v = tensors(dtype=torch.float32)
    shared = ([q, k, v], [low_bias, low_bias], "dense,dense", "q,k,v", "none", 0.0, "reference")
    out, lse, low = torch.ops.biasflash.forward(*shared)
    assert (lse == -torch.inf).all()
    assert (low == 0).all()
    means = v.mean(1, keepdim=True).repeat_interleave(Hq // Hkv, dim=2).expand_as(out)
    torch.testing.assert_close(out, means)


def test_the_low_part_is_what_rounding_took() -> None:
    inputs = tensors(dtype=torch.float32)
    bias = torch.full((1,), 1e7)
    _, lse, low = torch.ops.biasflash.forward(inputs, [bias], "dense", "q,k,v", "none", SCALE, "reference")
    _, exact = reference.attend(*(t.double() for t in inputs), [bias.double()], ["dense"], None, SCALE)
    assert (low != 0).any()
    torch.testing.assert_close(lse.double() + low.double(), exact, rtol=2.0**-46, atol=0.0)


def test_finite_biases_hide_nothing_each_for_itself() -> None:
    """``hidden_pairs`` asks each term alone, so a sum that overflows float32 hides no pair."""
    q, k, _ = tensors(dtype=torch.float32)
    low_bias = torch.full((1, N), torch.finfo(torch.float32).min)
    assert not reference.hidden_pairs(q, k, [low_bias, low_bias], ["dense", "dense"], None).any()
    low_bias[0, 2] = -torch.inf
    hidden = reference.hidden_pairs(q, k, [low_bias], ["dense"], -1)
    i, j = torch.arange(M)[:, None], torch.arange(N)
    assert torch.equal(hidden, (j == 2) | (j >= i))


def test_gradcheck_with_hidden_keys_and_dead_rows() -> None:
    leaves = [t.requires_grad_() for t in tensors()]
    keep = torch.ones(M, N, dtype=torch.bool)
    keep[DEAD], keep[:, SEEN:] = False, False

    def call(q: Tensor, k: Tensor, v: Tensor) -> Any:
        out, lse = reference.attend(q, k, v, [keep], ["keep"], None, SCALE)
        return out, lse[..., ALIVE]

    assert gradcheck(call, leaves)
