"""Rows that see nothing may hold anything, and biases whose sum leaves float32: the kernels beside the cpu backend.

What is stored in a dead row of q, or arrives for it in dout or dlse, must not matter: every result has the bits of the
same call with ordinary numbers there.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

import biasflash
from biasflash import reference

B, M, N, Hq, Hkv, D, Dv = 2, 21, 35, 4, 2, 16, 8
DEAD = torch.zeros(M, dtype=torch.bool)
DEAD[[0, 3, 4, 20]] = True
SEEN = torch.rand(M, N, generator=torch.Generator().manual_seed(1)) < 0.7
SEEN[:, 5] = True
BACKENDS = pytest.mark.parametrize("backend", ["triton", "cpu"])


@dataclass(frozen=True, kw_only=True)
class Situation:
    """Terms and order of a call whose rows ``dead`` see nothing, by these terms or by the order alone."""

    biases: tuple[Tensor, ...] = ()
    masks: tuple[Tensor, ...] = ()
    causal: bool | str = False
    dead: Tensor = DEAD
    queries: int = M


def infinities(hidden: Tensor) -> Tensor:
    return torch.zeros(hidden.shape).masked_fill(hidden, -math.inf)


def plane(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(2))


FULL = (B, Hq, M, N)
EARLY = torch.arange(N + 6) < 6  # bottom-right, six queries more than keys

SITUATIONS = {
    "mask of rows": Situation(masks=(~DEAD[:, None],)),
    "mask of rows and keys": Situation(masks=(SEEN & ~DEAD[:, None],)),
    "mask of every pair": Situation(masks=((SEEN & ~DEAD[:, None]).expand(FULL),)),
    "mask, shared bias": Situation(masks=(~DEAD[:, None],), biases=(plane(1, Hq, M, N),)),
    "mask, full bias": Situation(masks=(SEEN & ~DEAD[:, None],), biases=(plane(*FULL),)),
    "mask, row and key biases": Situation(masks=(~DEAD[:, None],), biases=(plane(Hq, M, 1), plane(B, 1, 1, N))),
    "two masks": Situation(masks=(SEEN & ~DEAD[:, None], ~SEEN | (torch.arange(N) == 5)), dead=DEAD),
    "row bias": Situation(biases=(infinities(DEAD[:, None]),)),
    "shared bias": Situation(biases=(plane(1, Hq, M, N) + infinities(~SEEN | DEAD[:, None]),)),
    "full bias": Situation(biases=(plane(*FULL) + infinities(~SEEN | DEAD[:, None]),)),
    "causal": Situation(causal="bottom-right", dead=EARLY, queries=N + 6),
    "causal, shared bias": Situation(
        causal="bottom-right", dead=EARLY, queries=N + 6, biases=(plane(1, Hq, N + 6, N),)
    ),
    "causal, full bias": Situation(causal="bottom-right", dead=EARLY, queries=N + 6, biases=(plane(B, Hq, N + 6, N),)),
}


def solve(
    backend: str, situation: Situation, inputs: dict[str, Tensor], seeds: tuple[Tensor, Tensor], dtype: torch.dtype
) -> dict[str, Tensor]:
    """``out``, ``lse`` and the gradients of q, k, v and every bias."""
    leaves = {name: t.detach().to(dtype).requires_grad_() for name, t in inputs.items()}
    biases = [t.detach().to(dtype).requires_grad_() for t in situation.biases]
    out, lse = biasflash.attention(
        *leaves.values(), biases, list(situation.masks), causal=situation.causal, return_lse=True, backend=backend
    )
    wanted = leaves | {f"bias{i}": t for i, t in enumerate(biases)}
    grads = torch.autograd.grad((out, lse), list(wanted.values()), (seeds[0].to(dtype), seeds[1]))
    return {"out": out.detach(), "lse": lse.detach()} | {f"d{n}": g for n, g in zip(wanted, grads, strict=True)}


def tensors(queries: int) -> tuple[dict[str, Tensor], Tensor, Tensor]:
    inputs = {"q": torch.randn(B, queries, Hq, D), "k": torch.randn(B, N, Hkv, D), "v": torch.randn(B, N, Hkv, Dv)}
    return inputs, torch.randn(B, queries, Hq, Dv), torch.randn(B, Hq, queries)


def check_dead_rows(found: dict[str, Tensor], dead: Tensor) -> None:
    assert (found["out"][:, dead] == 0).all()
    assert (found["lse"][..., dead] == -math.inf).all()
    assert (found["dq"][:, dead] == 0).all()
    for name, grad in found.items():
        if name.startswith("dbias") and grad.shape[-2] == len(dead):
            assert (grad[..., dead, :] == 0).all(), name


def poisoned(t: Tensor, dead: Tensor, poison: float) -> Tensor:
    """``t (B, M, ...)`` with ``poison`` in every dead row."""
    return t.masked_fill(dead.view(-1, *[1] * (t.dim() - 2)), poison)


#: a score of NaN stays NaN beside a bias of -inf, unlike beside a mask or the causal order
BY_BIAS = ("row bias", "shared bias", "full bias")


@pytest.mark.parametrize("name", SITUATIONS)
def test_what_a_dead_row_holds_reaches_nothing(name: str) -> None:
    """The cpu backend clears dead rows; the Triton kernels do not (docs/semantics.md says what is promised)."""
    situation, backend, dtype = SITUATIONS[name], "cpu", torch.float32
    dead = situation.dead
    inputs, dout, dlse = tensors(situation.queries)
    wanted = solve(backend, situation, inputs, (dout, dlse), dtype)
    check_dead_rows(wanted, dead)
    assert not any(t.isnan().any() for t in wanted.values())
    complaints = []
    for where, poison in (("q", math.nan), ("dout", math.nan), ("dlse", math.nan), ("all three", math.inf)):
        every = where == "all three"
        if name in BY_BIAS and (every or where == "q"):
            continue
        found = solve(
            backend,
            situation,
            inputs | ({"q": poisoned(inputs["q"], dead, poison)} if every or where == "q" else {}),
            (
                poisoned(dout, dead, poison) if every or where == "dout" else dout,
                poisoned(dlse.mT, dead, poison).mT if every or where == "dlse" else dlse,
            ),
            dtype,
        )
        changed = [what for what, value in found.items() if not torch.equal(value, wanted[what])]
        if changed:
            complaints.append(f"{poison} in {where} changes {', '.join(changed)}")
    assert not complaints, "; ".join(complaints)


def check_close(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    for what, exact in wanted.items():
        torch.testing.assert_close(found[what], exact.float(), rtol=1e-5, atol=1e-5, msg=lambda m, w=what: f"{w}: {m}")


@BACKENDS
@pytest.mark.parametrize("name", SITUATIONS)
def test_living_rows_are_as_in_float64(name: str, backend: str) -> None:
    situation = SITUATIONS[name]
    inputs, dout, dlse = tensors(situation.queries)
    found = solve(backend, situation, inputs, (dout, dlse), torch.float32)
    wanted = solve("reference", situation, inputs, (dout, dlse.double()), torch.float64)
    check_close(found, wanted)


# ------------------------------------------------------------------------------------- finite biases, infinite sums

LOWEST = torch.finfo(torch.float32).min
#: rows that see lowest scores alone; in the others every second key has one
LOW = plane(*FULL).masked_fill(DEAD[:, None] | (torch.arange(N) % 2 == 0), LOWEST)
KEY_LOW = torch.full((1, 1, 1, N), LOWEST)
OVERFLOWS = {
    "every score": Situation(biases=(KEY_LOW, KEY_LOW)),
    "some rows, full biases": Situation(biases=(LOW, LOW)),
    "some rows, shared biases": Situation(biases=(LOW[:1], LOW[1:])),
    "some rows, beside a mask": Situation(biases=(LOW, LOW), masks=(SEEN,)),
    "some rows, beside a bias of -inf": Situation(biases=(LOW, LOW, infinities(~SEEN))),
    "some rows, causal": Situation(biases=(LOW, LOW), causal="top-left"),
}


#: the overflow is the point; results are looked at
QUIET = pytest.mark.filterwarnings(
    "ignore:overflow encountered in add:RuntimeWarning", "ignore:invalid value encountered in reduce:RuntimeWarning"
)


@QUIET
@pytest.mark.parametrize("name", OVERFLOWS)
def test_finite_biases_whose_sum_overflows_hide_nothing(name: str) -> None:
    """In float64 the sum is finite: a row of such scores alone is a proper softmax (whose lse float32 cannot hold).

    The cpu backend saturates; the Triton kernels take a sum of -inf as hidden (docs/semantics.md).
    """
    situation = OVERFLOWS[name]
    inputs, dout, dlse = tensors(M)
    found = solve("cpu", situation, inputs, (dout, dlse), torch.float32)
    leaves = {n: t.double().requires_grad_() for n, t in inputs.items()}
    biases = [t.double().requires_grad_() for t in situation.biases]
    kinds = ["dense"] * len(biases) + ["keep"] * len(situation.masks)
    shift = 0 if situation.causal else None
    terms = [*biases, *(m.expand(FULL) for m in situation.masks)]
    out, lse = reference.attend(*leaves.values(), terms, kinds, shift, D**-0.5)
    wanted = leaves | {f"bias{i}": t for i, t in enumerate(biases)}
    grads = torch.autograd.grad((out, lse), list(wanted.values()), (dout.double(), dlse.double()))
    check_close(found, {"out": out.detach()} | {f"d{n}": g for n, g in zip(wanted, grads, strict=True)})


@QUIET
def test_scores_on_both_sides_of_the_end_of_float32_are_a_proper_softmax() -> None:
    """float32 need not tell scores of twice and of once the lowest number apart; the weights still add up to one."""
    inputs, dout, dlse = tensors(M)
    inputs["v"] = torch.ones_like(inputs["v"])
    found = solve("cpu", Situation(biases=(LOW, KEY_LOW)), inputs, (dout, dlse), torch.float32)
    torch.testing.assert_close(found["out"], torch.ones_like(found["out"]))
    assert not any(t.isnan().any() for t in found.values())
