"""Calls drawn at random and the one check that all of them must pass, for any backend.

``calls(...)`` is a hypothesis strategy of ``Call``; ``check(call, backend)`` runs it through the public door and
compares ``out``, ``lse`` and every gradient with float64.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from hypothesis import strategies as st
from torch import Tensor

import biasflash
from biasflash import problem, reference

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
LAYOUTS = ("plain", "transposed", "heads_first", "sliced", "offset", "expanded")


@dataclass(frozen=True, kw_only=True)
class TermDraw:
    """One bias or mask: which axes of ``*B Hq M N`` it has in full, how many leading axes it leaves out."""

    kind: str
    full: tuple[bool, ...]
    left_out: int
    dtype: torch.dtype
    layout: str
    trainable: bool
    minus_inf: bool


@dataclass(frozen=True, kw_only=True)
class Call:
    """Everything that makes one call, as plain values: hypothesis can print and shrink it."""

    batch: tuple[int, ...]
    M: int
    N: int
    Hkv: int
    group: int
    D: int
    Dv: int
    dtype: torch.dtype
    layouts: tuple[str, str, str, str]
    terms: tuple[TermDraw, ...]
    causal: bool | str
    scale: float | None
    trainable: tuple[bool, bool, bool]
    lse_gradient: bool
    hidden_nan: bool
    seed: int


@dataclass(kw_only=True)
class Inputs:
    """A built call: tensors ready for ``biasflash.attention``."""

    q: Tensor
    k: Tensor
    v: Tensor
    biases: list[Tensor]
    masks: list[Tensor]
    dout: Tensor
    dlse: Tensor | None

    def leaves(self) -> dict[str, Tensor]:
        named = {"q": self.q, "k": self.k, "v": self.v} | {f"bias{i}": b for i, b in enumerate(self.biases)}
        return {name: t for name, t in named.items() if t.requires_grad}


# ----------------------------------------------------------------------------------------------------------- drawing


@st.composite
def _terms(draw: st.DrawFn, rank: int, dtypes: Sequence[torch.dtype]) -> TermDraw:
    kind = draw(st.sampled_from(("dense", "dense", "keep")))
    return TermDraw(
        kind=kind,
        full=tuple(draw(st.lists(st.booleans(), min_size=rank, max_size=rank))),
        left_out=draw(st.integers(0, rank)),
        dtype=draw(st.sampled_from(tuple(dtypes))) if kind == "dense" else torch.bool,
        layout=draw(st.sampled_from(LAYOUTS)),
        trainable=kind == "dense" and draw(st.booleans()),
        minus_inf=kind == "dense" and draw(st.integers(0, 3)) == 0,
    )


@st.composite
def calls(
    draw: st.DrawFn,
    *,
    max_length: int = 9,
    lengths: Sequence[int] = (),
    max_width: int = 20,
    max_batch: int = 3,
    dtypes: Sequence[torch.dtype] = FLOATS,
    max_terms: int = 3,
) -> Call:
    """Calls with M, N up to ``max_length`` (or of ``lengths``), D, Dv up to ``max_width``, at most three axes *B."""
    length = st.integers(0, max_length)
    if lengths:
        length = length | st.sampled_from(tuple(lengths))
    batch = tuple(draw(st.lists(st.integers(0, max_batch) | st.just(1), max_size=3)))
    rank = len(batch) + 3
    bias_dtypes = tuple(dict.fromkeys((*dtypes, *FLOATS)))
    return Call(
        batch=batch,
        M=draw(length),
        N=draw(length),
        Hkv=draw(st.integers(1, 3)),
        group=draw(st.integers(1, 3)),
        D=draw(st.integers(1, max_width)),
        Dv=draw(st.integers(1, max_width)),
        dtype=draw(st.sampled_from(tuple(dtypes))),
        layouts=draw(st.tuples(*[st.sampled_from(LAYOUTS)] * 4)),
        terms=tuple(draw(st.lists(_terms(rank, bias_dtypes), max_size=max_terms))),
        causal=draw(st.sampled_from((False, True, "bottom-right", "top-left"))),
        scale=draw(st.sampled_from((None, None, 0.0, -0.3, 1.5))),
        trainable=draw(st.tuples(st.booleans(), st.booleans(), st.booleans())),
        lse_gradient=draw(st.booleans()),
        hidden_nan=draw(st.booleans()),
        seed=draw(st.integers(0, 2**31)),
    )


def _junk(shape: tuple[int, ...], like: Tensor) -> Tensor:
    """What lies around a view: NaN, or True in a mask. Whoever reads past the view gets it."""
    return like.new_full(shape, True if like.dtype == torch.bool else math.nan)


def lay_out(t: Tensor, layout: str) -> Tensor:
    """The values of ``t`` under other strides; "expanded" also repeats the first entry of the first wide axis."""
    if layout == "transposed":
        return t.mT.contiguous().mT if t.dim() >= 2 else t
    if layout == "heads_first":
        return t.transpose(-3, -2).contiguous().transpose(-3, -2) if t.dim() >= 3 else t
    if layout == "sliced" and t.dim() >= 1:
        around = _junk((*[n + 1 for n in t.shape[:-1]], 2 * t.shape[-1] + 1), t)
        view = around[(*[slice(1, None)] * (t.dim() - 1), slice(1, None, 2))]
        return view.copy_(t)
    if layout == "offset":
        flat = _junk((t.numel() + 2,), t)
        return flat[1 : 1 + t.numel()].view(t.shape).copy_(t)
    if layout == "expanded":
        axis = next((a for a in range(t.dim()) if t.shape[a] > 1), None)
        return t if axis is None else t.narrow(axis, 0, 1).clone().expand(t.shape)
    return t


def _hidden_keys(call: Call, masks: list[Tensor]) -> Tensor:
    """``*B N Hkv 1``: keys that masks without a query axis hide from every head that would read them."""
    hidden = torch.zeros((*call.batch, call.Hkv * call.group, call.N), dtype=torch.bool)
    for mask in masks:
        if mask.dim() < 2 or mask.shape[-2] == 1:
            hidden |= ~mask.expand(*call.batch, call.Hkv * call.group, 1, call.N).squeeze(-2)
    return hidden.unflatten(-2, (call.Hkv, call.group)).all(-2).transpose(-2, -1).unsqueeze(-1)


def build(call: Call, device: str = "cpu") -> Inputs:
    """The tensors of a call; the same call gives the same numbers."""
    g = torch.Generator().manual_seed(call.seed)
    heads = call.Hkv * call.group

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=g).to(call.dtype)

    q = normal(*call.batch, call.M, heads, call.D)
    k, v = (normal(*call.batch, call.N, call.Hkv, width) for width in (call.D, call.Dv))
    biases, masks = [], []
    score = (*call.batch, heads, call.M, call.N)
    for term in call.terms:
        shape = tuple(n if full else 1 for n, full in zip(score, term.full, strict=True))[term.left_out :]
        if term.kind == "keep":
            masks.append(lay_out((torch.rand(shape, generator=g) < 0.7).to(device), term.layout))
            continue
        values = 2 * torch.randn(shape, generator=g)
        if term.minus_inf:
            values = values.masked_fill(torch.rand(shape, generator=g) < 0.2, -math.inf)
        biases.append(lay_out(values.to(term.dtype).to(device), term.layout).requires_grad_(term.trainable))
    if call.hidden_nan:
        hidden = _hidden_keys(call, [m.cpu() for m in masks])
        k, v = (
            t if layout == "expanded" else t.masked_fill(hidden, math.nan)
            for t, layout in zip((k, v), call.layouts[1:3], strict=True)
        )
    dout = normal(*call.batch, call.M, heads, call.Dv)
    q, k, v, dout = (lay_out(t.to(device), layout) for t, layout in zip((q, k, v, dout), call.layouts, strict=True))
    for t, wanted in zip((q, k, v), call.trainable, strict=True):
        t.requires_grad_(wanted)
    rows = torch.float64 if call.dtype == torch.float64 else torch.float32
    dlse = torch.randn((*call.batch, heads, call.M), generator=g).to(rows).to(device) if call.lse_gradient else None
    return Inputs(q=q, k=k, v=v, biases=biases, masks=masks, dout=dout, dlse=dlse)


# ---------------------------------------------------------------------------------------------------- two other ways


def by_loop(inputs: Inputs, causal: bool | str, scale: float | None) -> tuple[Tensor, Tensor]:
    """Out and lse one query at a time, over the list of keys it sees; shares no line with the library."""
    q, k, v = inputs.q, inputs.k, inputs.v
    *batch, M, heads, D = q.shape
    N, group = k.shape[-3], heads // k.shape[-2]
    biases = [b.expand(*batch, heads, M, N) for b in inputs.biases]
    masks = [m.expand(*batch, heads, M, N) for m in inputs.masks]
    factor = D**-0.5 if scale is None else scale
    last = {False: lambda i: N - 1, "top-left": lambda i: i}.get(causal, lambda i: i + N - M)
    outs, sums = [], []
    for *b, h, i in itertools.product(*map(range, (*batch, heads, M))):
        at = (*b, h, i)
        seen = [
            j
            for j in range(N)
            if j <= last(i) and all(m[(*at, j)] for m in masks) and all(x[(*at, j)] > -math.inf for x in biases)
        ]
        if not seen:
            outs.append(q.new_zeros(v.shape[-1]))
            sums.append(q.new_tensor(-math.inf))
            continue
        s = factor * (k[(*b, seen, h // group)] @ q[(*b, i, h)])
        for x in biases:
            s = s + x[at][seen]
        sums.append(torch.logsumexp(s, 0))
        outs.append(torch.softmax(s, 0) @ v[(*b, seen, h // group)])
    out = torch.stack(outs) if outs else q.new_zeros(0, v.shape[-1])
    lse = torch.stack(sums) if sums else q.new_zeros(0)
    return out.reshape(*batch, heads, M, v.shape[-1]).transpose(-3, -2), lse.reshape(*batch, heads, M)


def by_reference(inputs: Inputs, causal: bool | str, scale: float | None) -> tuple[Tensor, Tensor]:
    """Out and lse by ``reference.attend`` in the dtype of ``inputs``, for autograd."""
    q, k = inputs.q, inputs.k
    kinds = ["dense"] * len(inputs.biases) + ["keep"] * len(inputs.masks)
    shift = problem.causal_shift(problem.check_causal(causal), q.shape[-3], k.shape[-3])
    factor = q.shape[-1] ** -0.5 if scale is None else scale
    return reference.attend(q, k, inputs.v, [*inputs.biases, *inputs.masks], kinds, shift, factor)


def converted(inputs: Inputs, dtype: torch.dtype, *, biases: bool = True) -> Inputs:
    """A copy whose leaves are new leaves in another dtype, with 0 for NaN in keys and values that no query may see."""

    def turn(t: Tensor, change: bool = True) -> Tensor:
        return t.detach().to(dtype if change else t.dtype).clone().requires_grad_(t.requires_grad)

    def seen(t: Tensor) -> Tensor:
        return t.detach().to(dtype).masked_fill(t.isnan(), 0.0).requires_grad_(t.requires_grad)

    return Inputs(
        q=turn(inputs.q),
        k=seen(inputs.k),
        v=seen(inputs.v),
        biases=[turn(b, biases) for b in inputs.biases],
        masks=inputs.masks,
        dout=inputs.dout.to(dtype),
        dlse=None if inputs.dlse is None else inputs.dlse.to(dtype),
    )


def gradients(inputs: Inputs, out: Tensor, lse: Tensor) -> dict[str, Tensor]:
    """The gradient of every leaf under ``inputs.dout`` and ``inputs.dlse``."""
    leaves = inputs.leaves()
    ends = [(out, inputs.dout)] + ([(lse, inputs.dlse.to(lse.dtype))] if inputs.dlse is not None else [])
    ends = [(end, g) for end, g in ends if end.requires_grad]
    if not leaves:
        return {}
    if not ends:  # nothing was joined to a leaf (a loop over no query)
        return {name: torch.zeros_like(t) for name, t in leaves.items()}
    found = torch.autograd.grad([e for e, _ in ends], list(leaves.values()), [g for _, g in ends], allow_unused=True)
    return {n: torch.zeros_like(t) if g is None else g for (n, t), g in zip(leaves.items(), found, strict=True)}


# ---------------------------------------------------------------------------------------------------------- the check


def rounding(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).eps / 2


def floors(inputs: Inputs, causal: bool | str, scale: float | None) -> dict[str, Tensor]:
    """What rounding may do to each result, element by element, computed and not chosen.

    The weights and the stored result are each rounded once to the input dtype, and each score, a sum of large terms, to
    float32; each rounding is carried through the formula by absolute values. An entry into which nothing flows gets an
    exact 0: there the result must be 0 too.
    """
    x = converted(inputs, torch.float64)
    for t in (x.q, x.k, x.v, *x.biases):
        t.requires_grad_(False)
    kinds = ["dense"] * len(x.biases) + ["keep"] * len(x.masks)
    shift = problem.causal_shift(problem.check_causal(causal), x.q.shape[-3], x.k.shape[-3])
    factor = x.q.shape[-1] ** -0.5 if scale is None else scale
    p, lse, keys, values = reference.weights(x.q, x.k, x.v, [*x.biases, *x.masks], kinds, shift, factor)
    q, do = x.q.transpose(-3, -2).abs(), x.dout.transpose(-3, -2).abs()
    size = abs(factor) * (q @ keys.abs().mT)
    for b in x.biases:
        size = size + b.abs()
    size = size.masked_fill(p == 0, 0.0).amax(-1, keepdim=True) if p.shape[-1] else p.new_zeros((*p.shape[:-1], 1))
    compute = torch.float64 if inputs.q.dtype == torch.float64 else torch.float32
    rel_lse = rounding(compute) * (4 + size)
    rel = 2 * rounding(inputs.q.dtype) + rel_lse
    dp = do @ values.abs().mT
    ds = p * (dp + (p * dp).sum(-1, keepdim=True) + (0.0 if x.dlse is None else x.dlse.abs()[..., None]))
    heads = (*inputs.q.shape[:-3], inputs.k.shape[-2], -1 if p.numel() else q.shape[-3] // inputs.k.shape[-2])

    def grouped(t: Tensor) -> Tensor:
        return t.reshape(*heads, *t.shape[-2:]).sum(-3).transpose(-3, -2)

    found = {
        "out": (rel * (p @ values.abs())).transpose(-3, -2),
        "lse": (rel_lse.squeeze(-1) * (1 + lse.abs().nan_to_num(0.0, posinf=0.0))),
        "q": ((rel * ds) @ keys.abs() * abs(factor)).transpose(-3, -2),
        "k": grouped((rel * ds).mT @ q * abs(factor)),
        "v": grouped((rel * p).mT @ do),
    }
    for i, b in enumerate(inputs.biases):
        stored = rounding(b.dtype) * ds
        found[f"bias{i}"] = (rel * ds + stored).sum_to_size(b.shape) if b.dim() else (rel * ds + stored).sum()
    return found


def within(name: str, got: Tensor, truth: Tensor, plain: Tensor | None, floor: Tensor) -> None:
    """Raises unless ``got`` errs at most twice as much as ``plain`` does, plus the floor, at worst and on average."""
    assert got.shape == truth.shape, f"{name}: shape {tuple(got.shape)}, wanted {tuple(truth.shape)}"
    if got.numel() == 0:
        return
    truth, exact = truth.detach().double(), got.detach().double()
    infinite = torch.isinf(truth)
    assert torch.equal(exact[infinite], truth[infinite]), f"{name}: infinities differ"
    assert torch.isfinite(exact[~infinite]).all(), (
        f"{name}: {int((~torch.isfinite(exact[~infinite])).sum())} are not finite"
    )
    nothing = (floor == 0) & ~infinite
    assert not exact[nothing].any(), f"{name}: not exactly 0 where nothing flows"
    error = (exact - truth).masked_fill(infinite, 0.0).abs()
    allowed = torch.zeros_like(error)
    if plain is not None:
        miss = (plain.detach().double() - truth).masked_fill(infinite, 0.0).abs()
        allowed = miss if torch.isfinite(miss).all() else allowed
    for word, measure in (("max", Tensor.amax), ("mean", Tensor.mean)):
        limit = 2 * measure(allowed) + measure(floor)
        assert measure(error) <= limit, f"{name}: {word} error {measure(error):.3g} above {limit:.3g}"


def compare(
    inputs: Inputs, causal: bool | str, scale: float | None, got: dict[str, Tensor], *, truth: str = "reference"
) -> None:
    """``got`` ("out", "lse" if returned, gradients by leaf name) against float64, with plain torch as the yardstick."""
    way = by_loop if truth == "loop" else by_reference
    exact = converted(inputs, torch.float64)
    out, lse = way(exact, causal, scale)
    wanted = {"out": out, "lse": lse, **gradients(exact, out, lse)}
    low = converted(inputs, inputs.q.dtype, biases=False)
    out, lse = by_reference(low, causal, scale)
    plain = {"out": out, **gradients(low, out, lse)}
    if inputs.q.dtype in (torch.float32, torch.float64):
        plain["lse"] = lse
    else:  # lse is float32 for 16-bit inputs as well, so its yardstick is
        plain["lse"] = by_reference(converted(inputs, torch.float32), causal, scale)[1]
    limits = floors(inputs, causal, scale)
    for name, value in got.items():
        within(name, value, wanted[name], plain[name], limits[name])
    missing = inputs.leaves().keys() - got.keys()
    assert not missing, f"no gradient for {sorted(missing)}"


def check(call: Call, backend: str | None, *, device: str = "cpu", truth: str = "reference") -> None:
    """Runs the call on a backend; asserts shapes, dtypes, values and gradients (``truth``: "reference" or "loop")."""
    inputs = build(call, device)
    out, lse = biasflash.attention(
        inputs.q,
        inputs.k,
        inputs.v,
        inputs.biases,
        inputs.masks,
        causal=call.causal,
        scale=call.scale,
        return_lse=True,
        backend=backend,
    )
    heads = call.Hkv * call.group
    assert out.shape == (*call.batch, call.M, heads, call.Dv)
    assert out.dtype == call.dtype
    assert lse.shape == (*call.batch, heads, call.M)
    assert lse.dtype == (torch.float64 if call.dtype == torch.float64 else torch.float32)
    got = gradients(inputs, out, lse)
    for name, leaf in inputs.leaves().items():
        assert got[name].shape == leaf.shape, name
        assert got[name].dtype == leaf.dtype, name
    compare(inputs, call.causal, call.scale, {"out": out, "lse": lse, **got}, truth=truth)
