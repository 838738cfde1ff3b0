"""What a public case is, how it is run, and how its results are judged."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

import biasflash
from property_cases import Inputs, by_reference, floors, within

F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
Leaves = dict[str, Tensor]
Call = dict[str, Any]


class Draw:
    """Seeded normal numbers on a device; the same case has the same numbers on every device."""

    def __init__(self, device: str, seed: int) -> None:
        self.device, self.generator = device, torch.Generator().manual_seed(seed)

    def __call__(self, *shape: int, dtype: torch.dtype = F32, size: float = 1.0) -> Tensor:
        return (size * torch.randn(shape, generator=self.generator)).to(dtype).to(self.device)

    def chance(self, probability: float, *shape: int) -> Tensor:
        return (torch.rand(shape, generator=self.generator) < probability).to(self.device)

    def qkv(
        self,
        B: int,
        M: int,
        N: int,
        H: int,
        D: int,
        *,
        Hkv: int = 0,
        Dv: int = 0,
        dtype: torch.dtype = F32,
        size: float = 1.0,
    ) -> Leaves:
        """q ``B M H D``, k ``B N Hkv D`` and v ``B N Hkv Dv``; q and k of the given size."""
        Hkv, Dv = Hkv or H, Dv or D
        q, k = self(B, M, H, D, dtype=dtype, size=size), self(B, N, Hkv, D, dtype=dtype, size=size)
        return {"q": q, "k": k, "v": self(B, N, Hkv, Dv, dtype=dtype)}


def as_given(leaves: Leaves) -> Call:
    return dict(leaves)


@dataclass(kw_only=True)
class Built:
    """Tensors of one case. ``view`` turns the leaves, which gradients are taken of, into the arguments of the call."""

    leaves: Leaves
    view: Callable[[Leaves], Call] = as_given
    mask: Tensor | None = None
    causal: bool | str = False
    scale: float | None = None
    frozen: tuple[str, ...] = ()
    dout: str = "random"

    def fresh(self, dtype: torch.dtype | None = None) -> Leaves:
        """New leaves of the same values, in another dtype if one is given."""
        return {
            name: t.detach().clone().to(dtype or t.dtype).requires_grad_(name not in self.frozen)
            for name, t in self.leaves.items()
        }

    def call(self, leaves: Leaves) -> Call:
        return {"bias": None, "mask": self.mask, "causal": self.causal, "scale": self.scale} | self.view(leaves)


Attend = Callable[[Call], Tensor]
Results = dict[str, Tensor]


@dataclass(frozen=True, kw_only=True)
class Case:
    """One report: ``threads`` where it is told, ``wrong`` what happened there, ``make`` what rebuilds it.

    ``big`` marks more than 60,000 scores. ``then(built, got)`` asserts what the general rule cannot say.
    """

    name: str
    threads: tuple[str, ...]
    wrong: str
    build: Callable[[Draw], Built]
    big: bool = False
    then: Callable[[Built, Results], None] | None = None

    def make(self, device: str = "cpu") -> Built:
        return self.build(Draw(device, zlib.crc32(self.name.encode())))

    def __str__(self) -> str:
        return f"{self.name} ({', '.join(self.threads)})"


@dataclass
class Book:
    """The cases of one module, entered by decoration."""

    cases: list[Case] = field(default_factory=list)

    def __call__(self, *threads: str, wrong: str, **options: Any) -> Callable[[Callable[[Draw], Built]], Case]:
        def enter(build: Callable[[Draw], Built]) -> Case:
            case = Case(name=build.__name__, threads=threads, wrong=wrong, build=build, **options)
            self.cases.append(case)
            return case

        return enter


# ------------------------------------------------------------------------------------------------ running and judging


def on(backend: str | None) -> Attend:
    """The public door on one backend."""

    def attend(call: Call) -> Tensor:
        options = {name: call[name] for name in ("causal", "scale")}
        return biasflash.attention(
            call["q"], call["k"], call["v"], call["bias"], call["mask"], **options, backend=backend
        )

    return attend


def _inputs(call: Call, dout: Tensor) -> Inputs:
    given = {
        plural: [] if call[one] is None else [call[one]] for one, plural in (("bias", "biases"), ("mask", "masks"))
    }
    return Inputs(q=call["q"], k=call["k"], v=call["v"], dout=dout, dlse=None, **given)


def plain(call: Call) -> Tensor:
    """Plain torch in the dtype of the call, for autograd: the truth in float64, the yardstick in lower ones."""
    return by_reference(_inputs(call, call["v"]), call["causal"], call["scale"])[0]


def incoming(built: Built, out: Tensor) -> Tensor:
    """The gradient that arrives at ``out``, in the layout of the report."""
    draw = Draw(str(out.device), 7)
    B, M, H, Dv = out.shape
    if built.dout == "ones":  # what out.sum() sends
        return out.new_ones(()).expand(out.shape)
    if built.dout == "half_of_a_concatenation":
        return draw(B, M, 2 * H, Dv).to(out.dtype)[:, :, :H]
    return draw(B, M, H, Dv).to(out.dtype)


def gradients(built: Built, leaves: Leaves, out: Tensor, **options: Any) -> Results:
    wanted = {name: t for name, t in leaves.items() if t.requires_grad}
    found = torch.autograd.grad(out, list(wanted.values()), incoming(built, out), **options)
    return dict(zip(wanted, found, strict=True))


def run(built: Built, attend: Attend, dtype: torch.dtype | None = None) -> Results:
    """``out`` and the gradient of every leaf."""
    leaves = built.fresh(dtype)
    out = attend(built.call(leaves))
    return {"out": out.detach(), **(gradients(built, leaves, out) if out.requires_grad else {})}


def limits(built: Built) -> Results:
    """Rounding floors of ``out`` and of the leaves: those of the call's arguments, sent back through the views.

    The views are linear or products, so sending back absolute values at absolute leaves bounds what rounding may do.
    """
    leaves = built.fresh()
    call = built.call(leaves)
    dout = incoming(built, plain(call).detach())
    found = floors(_inputs(call, dout), built.causal, built.scale)
    sizes = {n: t.detach().double().abs().requires_grad_(t.requires_grad) for n, t in leaves.items()}
    ends = [
        (built.call(sizes)[n], found[key])
        for n, key in (("q", "q"), ("k", "k"), ("v", "v"), ("bias", "bias0"))
        if key in found
    ]
    ends = [(t, floor) for t, floor in ends if t.requires_grad]
    wanted = {n: t for n, t in sizes.items() if t.requires_grad}
    back = torch.autograd.grad([t for t, _ in ends], list(wanted.values()), [f for _, f in ends]) if wanted else ()
    return {"out": found["out"], **dict(zip(wanted, back, strict=True))}


def judge(built: Built, got: Results) -> None:
    """``out`` and every gradient against float64, with plain torch in the case's dtype as the yardstick."""
    truth, eager, floor = run(built, plain, F64), run(built, plain), limits(built)
    for name, value in got.items():
        assert value.dtype == eager[name].dtype, f"{name} is {value.dtype}, wanted {eager[name].dtype}"
        within(name, value, truth[name], eager[name], floor[name])


def check(case: Case, backend: str | None, device: str = "cpu") -> None:
    """Runs a case on a backend and raises if any result is wrong."""
    built = case.make(device)
    got = run(built, on(backend))
    trained = {n for n in built.leaves if n not in built.frozen}
    assert got.keys() == {"out"} | trained
    judge(built, got)
    if case.then is not None:
        case.then(built, got)


def lengths_mask(lengths: list[int], N: int, device: str, *, left: bool = False) -> Tensor:
    """``(B, 1, 1, N)``: True for the first ``lengths[b]`` keys of item ``b``, or the last with ``left``."""
    j = torch.arange(N, device=device)
    rows = [j >= N - n if left else j < n for n in lengths]
    return torch.stack(rows)[:, None, None, :]


def lower_triangle(M: int, N: int, device: str) -> Tensor:
    return torch.ones(M, N, dtype=torch.bool, device=device).tril()


def offsets_2d(side: int, device: str) -> Tensor:
    """For a square grid: the number of each pair's relative offset, ``(side^2, side^2)``, below (2 side - 1)^2."""
    y, x = (
        torch.arange(side * side, device=device).div(side, rounding_mode="floor"),
        torch.arange(side * side, device=device) % side,
    )
    dy, dx = y[:, None] - y, x[:, None] - x
    return (dy + side - 1) * (2 * side - 1) + dx + side - 1
