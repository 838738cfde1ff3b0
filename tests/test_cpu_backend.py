"""The CPU backend against float64 mathematics: values, every gradient, hostile numbers, memory and repeatability."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

import biasflash
from biasflash import problem as problems
from biasflash import reference
from biasflash.backends import cpu
from biasflash.backends.backend import Gradients
from biasflash.backends.cpu import blocks

F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
INF = math.inf
LOWEST = torch.finfo(F32).min


@dataclass(frozen=True, kw_only=True)
class Case:
    """One call in a few numbers; ``masks`` are random but for queries that see nothing, which appear by chance."""

    name: str
    batch: tuple[int, ...] = (2,)
    M: int = 13
    N: int = 13
    Hq: int = 4
    Hkv: int = 4
    D: int = 8
    Dv: int = 8
    biases: tuple[tuple[int, ...], ...] = ()
    masks: tuple[tuple[int, ...], ...] = ()
    bias_dtype: torch.dtype | None = None
    causal: bool | str = False
    scale: float | None = None
    dlse: bool = False


def _broadcasts() -> list[Case]:
    """Every choice of full and absent axes of ``(B, Hq, M, N)``, for a bias and for a mask."""
    full = (3, 4, 7, 9)
    found = []
    for keep in itertools.product((False, True), repeat=4):
        shape = tuple(n if k else 1 for n, k in zip(full, keep, strict=True))
        name = "".join(axis if k else "1" for axis, k in zip("BHMN", keep, strict=True))
        found.append(Case(name=f"bias_{name}", batch=(3,), M=7, N=9, biases=(shape,), dlse=keep[0]))
        found.append(Case(name=f"mask_{name}", batch=(3,), M=7, N=9, masks=(shape,)))
    return found


CASES = [
    *_broadcasts(),
    Case(name="plain"),
    Case(name="no_batch_axis", batch=(), biases=((4, 13, 13),)),
    Case(name="missing_leading_axes", biases=((13,), (13, 1))),
    Case(name="one_by_one", M=1, N=1, biases=((1, 1),)),
    Case(name="digits", batch=(5,), M=65, N=65, D=16, Dv=16, biases=((1, 4, 65, 65),)),
    Case(name="cross", M=5, N=40, biases=((2, 1, 5, 40),)),
    Case(name="cross_long_queries", M=40, N=5, biases=((1, 4, 1, 5),), dlse=True),
    Case(name="three_biases_two_masks", biases=((4, 13, 13), (2, 1, 13, 1), (1, 13)), masks=((2, 1, 1, 13), (13, 13))),
    Case(name="lists_with_lse", biases=((4, 1, 13), (2, 4, 13, 13)), masks=((1, 4, 13, 13), (2, 1, 13, 1)), dlse=True),
    Case(name="triangle", batch=(2, 3), M=6, N=6, biases=((2, 1, 4, 6, 6),), masks=((2, 3, 1, 1, 6),)),
    Case(name="windows", batch=(2, 5), M=6, N=6, biases=((1, 1, 4, 6, 6),), masks=((1, 5, 1, 6, 6),)),
    Case(name="three_batch_axes", batch=(2, 1, 3), M=5, N=6, biases=((2, 1, 1, 1, 5, 6), (3, 4, 1, 6)), dlse=True),
    Case(name="causal_square", causal=True, biases=((1, 4, 13, 13),)),
    Case(name="causal_bottom_right_wide", M=6, N=17, causal="bottom-right", biases=((4, 6, 17),), dlse=True),
    Case(name="causal_bottom_right_tall", M=17, N=6, causal="bottom-right", biases=((2, 1, 17, 6),), dlse=True),
    Case(name="causal_top_left_wide", M=6, N=17, causal="top-left", masks=((2, 1, 1, 17),)),
    Case(name="causal_top_left_tall", M=17, N=6, causal="top-left", biases=((1, 1, 1, 6),)),
    Case(name="gqa", Hq=6, Hkv=2, biases=((6, 13, 13), (2, 1, 1, 13)), masks=((2, 1, 13, 13),), dlse=True),
    Case(name="mqa", Hq=5, Hkv=1, M=4, N=21, biases=((2, 5, 4, 1),), causal=True),
    Case(name="gqa_key_mask_differs_in_group", Hq=6, Hkv=2, masks=((2, 6, 1, 13),), biases=((1, 6, 13, 13),)),
    Case(name="wide_values", D=5, Dv=24, biases=((4, 13, 13),), dlse=True),
    Case(name="wide_keys", D=24, Dv=3, biases=((4, 13, 13),)),
    Case(name="widest", M=3, N=4, Hq=1, Hkv=1, D=256, Dv=256),
    Case(name="scale_zero", scale=0.0, biases=((4, 13, 13),)),
    Case(name="scale_negative", scale=-0.7),
    Case(name="bias_in_float32", biases=((1, 4, 13, 13), (2, 1, 1, 13)), bias_dtype=F32),
    Case(name="bias_in_bfloat16", biases=((1, 4, 13, 13), (2, 4, 13, 13)), bias_dtype=BF16),
    Case(name="bias_in_float64", batch=(3,), biases=((1, 4, 13, 13), (3, 4, 13, 13)), bias_dtype=F64),
]


@dataclass(kw_only=True)
class Inputs:
    q: Tensor
    k: Tensor
    v: Tensor
    biases: list[Tensor]
    masks: list[Tensor]
    dout: Tensor
    dlse: Tensor | None
    causal: bool | str
    scale: float | None

    def trained(self) -> dict[str, Tensor]:
        return {"q": self.q, "k": self.k, "v": self.v} | {f"bias[{i}]": b for i, b in enumerate(self.biases)}


def make(case: Case, dtype: torch.dtype) -> Inputs:
    def normal(*shape: int, of: torch.dtype = dtype) -> Tensor:
        return torch.randn(shape, dtype=F64).to(of).requires_grad_()

    B = case.batch
    return Inputs(
        q=normal(*B, case.M, case.Hq, case.D),
        k=normal(*B, case.N, case.Hkv, case.D),
        v=normal(*B, case.N, case.Hkv, case.Dv),
        biases=[normal(*shape, of=case.bias_dtype or dtype) for shape in case.biases],
        masks=[torch.rand(shape) < 0.7 for shape in case.masks],
        dout=normal(*B, case.M, case.Hq, case.Dv).detach(),
        dlse=normal(*B, case.Hq, case.M, of=F64 if dtype == F64 else F32).detach() if case.dlse else None,
        causal=case.causal,
        scale=case.scale,
    )


def gradients_of(out: Tensor, lse: Tensor, x: Inputs, tensors: Sequence[Tensor]) -> list[Tensor]:
    outputs, changes = [out], [x.dout.to(out.dtype)]
    if x.dlse is not None:
        outputs.append(lse)
        changes.append(x.dlse.to(lse.dtype))
    found = torch.autograd.grad(outputs, tensors, changes, allow_unused=True)
    return [torch.zeros_like(t) if g is None else g for g, t in zip(found, tensors, strict=True)]


def ours(x: Inputs) -> dict[str, Tensor]:
    out, lse = biasflash.attention(
        x.q, x.k, x.v, x.biases, x.masks, causal=x.causal, scale=x.scale, return_lse=True, backend="cpu"
    )
    found = gradients_of(out, lse, x, list(x.trained().values()))
    return {"out": out.detach(), "lse": lse.detach(), **dict(zip(x.trained(), found, strict=True))}


def _shift_and_scale(x: Inputs) -> tuple[int | None, float]:
    shift = problems.causal_shift(problems.check_causal(x.causal), x.q.shape[-3], x.k.shape[-3])
    return shift, x.q.shape[-1] ** -0.5 if x.scale is None else x.scale


def plain(x: Inputs, dtype: torch.dtype) -> dict[str, Tensor]:
    """The reference by autograd, everything in ``dtype``; float64 is the truth."""
    shift, scale = _shift_and_scale(x)
    names = list(x.trained())
    q, k, v, *biases = (t.detach().to(dtype).requires_grad_() for t in x.trained().values())
    kinds = ["dense"] * len(biases) + ["keep"] * len(x.masks)
    out, lse = reference.attend(q, k, v, [*biases, *x.masks], kinds, shift, scale)
    found = gradients_of(out, lse, x, [q, k, v, *biases])
    return {"out": out.detach(), "lse": lse.detach(), **dict(zip(names, found, strict=True))}


def mirrored(x: Inputs) -> dict[str, Tensor]:
    """The reference in float64 with the widths D and Dv read backwards: the same mathematics, rounded another way.

    Its distance from the truth is what float64 arithmetic is good for; the truth itself knows no better.
    """
    q, k, v = (t.detach().flip(-1).requires_grad_() for t in (x.q, x.k, x.v))
    found = plain(dataclasses.replace(x, q=q, k=k, v=v, dout=x.dout.flip(-1)), F64)
    return {name: t.flip(-1) if name in ("out", "q", "k", "v") else t for name, t in found.items()}


def magnitudes(x: Inputs) -> dict[str, Tensor]:
    """For every result the sum over the magnitudes of what is added up in it; rounding is relative to these."""
    shift, scale = _shift_and_scale(x)
    q, k, v, *biases = (t.detach().double() for t in x.trained().values())
    kinds = ["dense"] * len(biases) + ["keep"] * len(x.masks)
    p, lse, keys, values = reference.weights(q, k, v, [*biases, *x.masks], kinds, shift, scale)
    dout = x.dout.double().transpose(-3, -2)
    dp = dout.abs() @ values.abs().transpose(-1, -2)
    ds = p * (dp + (p * dp).sum(-1, keepdim=True) + (0.0 if x.dlse is None else x.dlse.double().abs()[..., None]))
    ones = [torch.ones_like(t) for t in (q, k, v)]
    group = (*q.shape[:-3], k.shape[-2], q.shape[-2] // k.shape[-2])
    dk = ds.transpose(-1, -2) @ q.abs().transpose(-3, -2) * abs(scale)
    dv = p.transpose(-1, -2) @ dout.abs()
    found = {
        "out": (p @ values.abs()).transpose(-3, -2),
        "lse": lse.abs(),
        "q": (ds @ keys.abs() * abs(scale)).transpose(-3, -2),
        "k": dk.reshape(*group, *dk.shape[-2:]).sum(-3).transpose(-3, -2),
        "v": dv.reshape(*group, *dv.shape[-2:]).sum(-3).transpose(-3, -2),
    }
    assert [found[n].shape for n in "qkv"] == [t.shape for t in ones]
    return found | {f"bias[{i}]": ds.sum_to_size(b.shape) for i, b in enumerate(x.biases)}


def assert_within_budget(got: dict[str, Tensor], x: Inputs) -> None:
    """Error at most twice plain torch's in the input dtype, plus rounding, for the maximum and for the mean.

    The rounding floor: the stored result rounds once (``eps`` of its dtype times truth), and float32 (float64)
    arithmetic rounds relative to the magnitudes it adds up.
    """
    dtype = x.q.dtype
    true, sizes = plain(x, F64), magnitudes(x)
    eager = mirrored(x) if dtype == F64 else plain(x, dtype)
    if dtype != F64:
        eager["lse"] = plain(x, F32)["lse"]  # lse is float32 whatever the inputs are
    compute = torch.finfo(F64 if dtype == F64 else F32).eps
    for name, found in got.items():
        want, finite = true[name], true[name].isfinite()
        assert found.shape == want.shape, name
        if name != "out" and name != "lse":
            assert found.dtype == x.trained()[name].dtype, name
        assert torch.equal(found.double().masked_fill(finite, 0.0), want.masked_fill(finite, 0.0)), name
        error = torch.where(finite, (found.double() - want).abs(), 0.0)
        allowed = torch.where(finite, (eager[name].double() - want).abs(), 0.0)
        floor = torch.where(finite, torch.finfo(found.dtype).eps * want.abs() + compute * sizes[name], 0.0)
        for measure in (torch.amax, torch.mean):
            assert measure(error) <= 2 * measure(allowed) + measure(floor), (name, measure.__name__)


#: The real size, in which small cases are one block; one that holds some heads; one that cuts queries and keys as well.
BLOCK_SIZES = {"default_blocks": blocks.BLOCK, "some_heads": 1500, "tiny_blocks": 40}


@pytest.fixture(params=BLOCK_SIZES)
def block_size(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    size = BLOCK_SIZES[request.param]
    monkeypatch.setattr(blocks, "BLOCK", size)
    monkeypatch.setattr(blocks, "MIN_ROWS", min(4, blocks.MIN_ROWS) if size < 100 else blocks.MIN_ROWS)
    return size


# ---------------------------------------------------------------------------------------------- values and gradients


@pytest.mark.parametrize(
    ("dtype", "block_size"),
    [(dtype, "default_blocks") for dtype in (F64, F32, BF16, F16)]
    + [(dtype, "tiny_blocks") for dtype in (F64, F32, BF16)]
    + [(F32, "some_heads")],
    indirect=["block_size"],
    ids=str,
)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_values_and_gradients(case: Case, dtype: torch.dtype, block_size: int) -> None:
    x = make(case, dtype)
    assert_within_budget(ours(x), x)


def test_small_blocks_are_several_along_every_axis(block_size: int) -> None:
    """The fixture would test nothing if the cases still fitted one block."""
    chosen = [(blocks.choose_blocks(p), p) for p in (_problem(make(c, F32)) for c in CASES)]
    by_keys = sum(b.keys < p.N for b, p in chosen)
    by_rows = sum(b.rows < p.M for b, p in chosen)
    by_heads = sum(1 < math.prod(b.heads) < p.batch_size * p.Hkv for b, p in chosen)
    if block_size == 40:
        assert by_keys >= 20
        assert by_rows >= 40
    elif block_size == 1500:
        assert by_heads >= 40
    else:
        assert by_keys == by_rows == by_heads == 0


def _problem(x: Inputs) -> problems.Problem:
    kinds = ["dense"] * len(x.biases) + ["keep"] * len(x.masks)
    return problems.build(x.q, x.k, x.v, [*x.biases, *x.masks], kinds, problems.check_causal(x.causal), x.scale)


def _expanded(t: Tensor) -> Tensor:
    return t[:1].expand(t.shape)


def _offset(t: Tensor) -> Tensor:
    return torch.cat([t.new_zeros(1), t.reshape(-1)])[1:].view(t.shape)


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "inner_transposed": lambda t: t.transpose(-1, -2).contiguous().transpose(-1, -2),
    "outer_transposed": lambda t: t.transpose(0, 1).contiguous().transpose(0, 1),
    "every_second": lambda t: t.repeat_interleave(2, -1)[..., ::2],
    "inside_a_larger_one": lambda t: torch.nn.functional.pad(t, (3, 2, 1, 1))[..., 1:-1, 3:-2],
    "one_number_off": _offset,
    "expanded_batch": _expanded,
}


def test_shared_gradients_are_added_in_float32_and_rounded_once(block_size: int) -> None:
    """A bfloat16 bias shared by 64 batch items: one rounding from truth, where plain torch is dozens away."""
    x = make(Case(name="shared", batch=(64,), M=5, N=11, biases=((1, 4, 5, 11), (1, 1))), BF16)
    got, true, sizes = ours(x), plain(x, F64), magnitudes(x)
    for name in ("bias[0]", "bias[1]"):
        rounding = 0.5 * torch.finfo(BF16).eps * true[name].abs() + 4 * torch.finfo(F32).eps * sizes[name]
        assert bool(((got[name].double() - true[name]).abs() <= rounding).all()), name


@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_strides(layout: str, block_size: int) -> None:
    x = make(Case(name="strides", Hq=4, Hkv=2, biases=((2, 4, 13, 13), (1, 4, 1, 13)), masks=((2, 1, 13, 13),)), F32)
    change = LAYOUTS[layout]
    if layout == "expanded_batch":
        x.biases[1] = torch.randn(2, 4, 1, 13)
    for name in ("q", "k", "v"):
        setattr(x, name, change(getattr(x, name).detach()).requires_grad_())
    x.biases = [change(b.detach()).requires_grad_() for b in x.biases]
    x.masks, x.dout = [change(m) for m in x.masks], change(x.dout)
    assert layout == "one_number_off" or not x.q.is_contiguous()
    assert_within_budget(ours(x), x)


def test_inputs_are_not_written_to(block_size: int) -> None:
    case = Case(name="inputs", biases=((4, 13, 13), (13, 13)), masks=((2, 1, 1, 13), (13, 1)), dlse=True)
    x = make(case, F32)
    tensors = [*x.trained().values(), *x.masks, x.dout, x.dlse]
    before = [t.detach().clone() for t in tensors if t is not None]
    ours(x)
    for t, b in zip(tensors, before, strict=True):
        assert t is not None
        assert torch.equal(t, b)


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_packed_doors(dtype: torch.dtype, block_size: int) -> None:
    x = make(Case(name="packed", biases=((4, 13, 13),)), dtype)
    bias = x.biases
    qkv = torch.stack([x.q, x.k, x.v], -3).detach().requires_grad_()
    kv = torch.stack([x.k, x.v], -3).detach().requires_grad_()
    want = ours(x)

    out = biasflash.attention_qkvpacked(qkv, bias, backend="cpu")
    assert isinstance(out, Tensor)
    dqkv, dbias = torch.autograd.grad(out, [qkv, *bias], x.dout)
    assert dqkv.shape == qkv.shape
    assert dqkv.is_contiguous()
    dq, dk, dv = dqkv.unbind(-3)
    assert_within_budget({"out": out.detach(), "q": dq, "k": dk, "v": dv, "bias[0]": dbias}, x)

    out = biasflash.attention_kvpacked(x.q, kv, bias, backend="cpu")
    assert isinstance(out, Tensor)
    dq, dkv, dbias = torch.autograd.grad(out, [x.q, kv, *bias], x.dout)
    dk, dv = dkv.unbind(-3)
    assert_within_budget({"out": out.detach(), "q": dq, "k": dk, "v": dv, "bias[0]": dbias}, x)
    assert torch.equal(dbias, want["bias[0]"])


def test_only_lse_is_differentiated(block_size: int) -> None:
    x = make(Case(name="lse", biases=((4, 13, 13),), masks=((2, 1, 13, 13),), dlse=True), F32)
    x.dout = torch.zeros_like(x.dout)
    _, lse = biasflash.attention(x.q, x.k, x.v, x.biases, x.masks, return_lse=True, backend="cpu")
    got = torch.autograd.grad(lse, [x.q, x.k, x.v, *x.biases], x.dlse)
    assert_within_budget(dict(zip(x.trained(), got, strict=True)), x)
    assert torch.count_nonzero(got[2]) == 0


CHECKED = ("triangle", "three_batch_axes", "gqa", "wide_values", "lists_with_lse", "causal_top_left_tall", "one_by_one")


@pytest.mark.parametrize("case", [c for c in CASES if c.name in CHECKED], ids=lambda case: case.name)
def test_gradcheck(case: Case) -> None:
    x = make(dataclasses.replace(case, dlse=True), F64)
    biases = len(x.biases)

    def call(q: Tensor, k: Tensor, v: Tensor, *terms: Tensor) -> Any:
        out, lse = biasflash.attention(
            q, k, v, list(terms[:biases]), x.masks, causal=x.causal, return_lse=True, backend="cpu"
        )
        return out, lse.masked_fill(lse == -INF, 0.0)  # a difference of -inf and -inf is no number

    assert torch.autograd.gradcheck(call, list(x.trained().values()), fast_mode=True)


# ------------------------------------------------------------------------------------------------- what is not done


class _Operations(TorchDispatchMode):
    """Counts operations by name, the bytes of the largest new storage, and the most bytes alive at once."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: dict[str, int] = {}
        self.largest = self.peak = 0
        self._known: set[int] = set()
        self._alive: dict[int, tuple[StorageWeakRef, int]] = {}

    def ignoring(self, *tensors: Tensor) -> _Operations:
        self._known = {t.untyped_storage()._cdata for t in tensors}
        return self

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        self.counts[name] = self.counts.get(name, 0) + 1
        self._alive = {key: entry for key, entry in self._alive.items() if not entry[0].expired()}
        for t in found if isinstance(found, (tuple, list)) else [found]:
            if isinstance(t, Tensor) and t.untyped_storage()._cdata not in self._known:
                storage = t.untyped_storage()
                self._alive[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
                self.largest = max(self.largest, storage.nbytes())
        self.peak = max(self.peak, sum(size for _, size in self._alive.values()))
        return found


def _operations(x: Inputs, wanted: Sequence[str]) -> tuple[_Operations, _Operations, dict[str, Tensor]]:
    """Forward and backward of the backend itself under watch, and the gradients that were wanted."""
    problem, terms = _problem(x), [*x.biases, *x.masks]
    terms = [t.detach()[(None,) * (x.q.dim() - t.dim())] for t in terms]
    q, k, v = x.q.detach(), x.k.detach(), x.v.detach()
    with torch.no_grad():
        with _Operations().ignoring(q, k, v, *terms) as forward:
            out, lse, low = cpu.forward(problem, q, k, v, terms)
        given = {"q": q, "k": k, "v": v} | {f"bias[{i}]": terms[i] for i in range(len(x.biases))}
        buffers = {name: torch.empty_like(t) for name, t in given.items() if name in wanted}
        found = Gradients(
            q=buffers.get("q"),
            k=buffers.get("k"),
            v=buffers.get("v"),
            terms=(*(buffers.get(f"bias[{i}]") for i in range(len(x.biases))), *(None for _ in x.masks)),
        )
        known = (q, k, v, *terms, out, lse, low, x.dout, *buffers.values())
        with _Operations().ignoring(*known) as backward:
            cpu.backward(problem, found, x.dout, x.dlse, q, k, v, terms, out, lse, low)
    return forward, backward, buffers


@pytest.mark.parametrize(
    ("wanted", "products"),
    [(("bias[0]",), 2), (("v",), 2), (("q",), 3), (("k",), 3), (("q", "k", "v", "bias[0]"), 5), (("bias[1]",), 2)],
    ids=str,
)
def test_unwanted_gradients_cost_nothing(wanted: tuple[str, ...], products: int) -> None:
    """Scores are one product, dp another, dq, dk and dv one each; a bias needs a sum and no product."""
    x = make(Case(name="wanted", biases=((4, 13, 13), (2, 1, 13, 13))), F32)
    _, backward, found = _operations(x, wanted)
    assert sum(backward.counts.get(name, 0) for name in ("baddbmm_", "baddbmm", "bmm")) == products
    of_rows = 0 if wanted == ("v",) else 2  # delta of the output, and what is left of it
    assert backward.counts.get("sum", 0) == of_rows + sum(name.startswith("bias") for name in wanted)
    want = ours(x)
    for name, grad in found.items():
        assert torch.equal(grad.view(want[name].shape), want[name])


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_no_array_of_m_by_n(dtype: torch.dtype) -> None:
    case = Case(name="long", batch=(1,), M=8192, N=8192, Hq=1, Hkv=1, D=16, Dv=16, biases=((8192,), (8192, 1)))
    forward, backward, _ = _operations(make(case, dtype), ("q", "k", "v", "bias[0]", "bias[1]"))
    block = blocks.BLOCK * 4
    assert max(forward.largest, backward.largest) <= block < 8192 * 8192 * 4 / 16
    assert forward.peak <= 2.5 * block
    assert backward.peak <= 3.5 * block


@pytest.mark.parametrize(
    "case",
    [
        Case(name="many_batches", batch=(65537,), M=3, N=2, Hq=1, Hkv=1, D=4, Dv=4, biases=((3, 2),)),
        Case(name="many_axes", batch=(3, 50, 41), M=9, N=9, Hq=4, Hkv=2, D=4, Dv=4, biases=((3, 1, 41, 4, 9, 9),)),
        Case(name="wide_rows_few_scores", batch=(9000,), M=1, N=1, Hq=1, Hkv=1, D=128, Dv=128, biases=((1, 1),)),
        Case(name="bfloat16_decode", batch=(4,), M=1, N=20000, Hq=8, Hkv=1, D=16, Dv=16, bias_dtype=F32),
    ],
    ids=lambda case: case.name,
)
def test_blocks_bound_memory_with_many_heads(case: Case) -> None:
    """Beyond outputs (lse is float32) nothing is alive but a few blocks, however many batch items there are."""
    x = make(case, BF16)
    forward, backward, found = _operations(x, ("q", "k", "v", "bias[0]"))
    results = x.dout.numel() * 2 + 2 * math.prod(case.batch) * case.Hq * case.M * 4
    own_terms = 4 * sum(b.numel() for b in x.biases)
    assert forward.peak - results <= 3.5 * blocks.BLOCK * 4
    assert backward.peak - own_terms <= 5 * blocks.BLOCK * 4
    assert_within_budget({name: g.view(x.trained()[name].shape) for name, g in found.items()}, x)


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_rows_longer_than_a_block(dtype: torch.dtype) -> None:
    """At the real block size: a running softmax over two key blocks, and delta in a pass of its own."""
    x = make(
        Case(name="long_rows", batch=(1,), M=40, N=33000, Hq=1, Hkv=1, D=4, Dv=3, biases=((33000,),), dlse=True), dtype
    )
    assert blocks.choose_blocks(_problem(x)).keys < 33000
    assert_within_budget(ours(x), x)


@pytest.mark.parametrize("dtype", [F32, BF16, F64], ids=str)
def test_same_bits_again(dtype: torch.dtype, block_size: int) -> None:
    case = Case(name="bits", batch=(3,), M=23, N=27, Hq=4, Hkv=2, biases=((4, 23, 27), (3, 1, 1, 27), (1, 1)))
    x = make(case, dtype)
    first = ours(x)
    for _ in range(3):
        again = ours(x)
        assert all(torch.equal(first[name], again[name]) for name in first)


# ------------------------------------------------------------------------------------------------- hostile numbers


@pytest.mark.parametrize("hidden_by", ["mask", "bias", "biases"])
def test_rows_that_see_nothing_contribute_nothing_whatever_they_hold(hidden_by: str, block_size: int) -> None:
    x = make(Case(name="empty", biases=((2, 4, 13, 13),), dlse=True), F32)
    mask = torch.rand(2, 1, 13, 13) < 0.7
    mask[:, :, 3], mask[1, :, 9] = False, False
    empty = ~mask.any(-1)[:, 0]  # B M
    if hidden_by == "mask":
        x.masks = [mask]
    elif hidden_by == "bias":
        x.biases = [x.biases[0].detach().masked_fill(~mask, -INF).requires_grad_()]
    else:
        x.biases.append(torch.zeros(mask.shape).masked_fill(~mask, -INF).requires_grad_())
    assert x.dlse is not None
    want = ours(x)
    assert torch.count_nonzero(want["out"][empty]) == 0
    assert bool((want["lse"].transpose(1, 2)[empty] == -INF).all())
    assert torch.count_nonzero(want["q"][empty]) == 0
    with torch.no_grad():
        x.q[empty] = math.nan
    x.dout[empty] = math.nan
    x.dlse.transpose(1, 2)[empty] = math.nan
    got = ours(x)
    assert all(torch.equal(got[name], want[name]) for name in want)


@pytest.mark.parametrize("hidden_by", ["bias", "mask", "causal"])
def test_everything_hidden(hidden_by: str) -> None:
    x = make(Case(name="void", M=3, N=4, biases=((3, 4),), dlse=True), F32)
    if hidden_by == "bias":
        x.biases = [torch.full((3, 4), -INF, requires_grad=True)]
    elif hidden_by == "mask":
        x.masks = [torch.zeros(2, 1, 1, 1, dtype=torch.bool)]
    else:
        x.q, x.k, x.v = x.q.detach().requires_grad_(), x.k[:, :0].detach().requires_grad_(), x.v[:, :0].detach()
        x.v.requires_grad_()
        x.biases, x.causal = [torch.zeros(3, 1, requires_grad=True)], True
    got = ours(x)
    assert bool((got.pop("lse") == -INF).all())
    assert all(torch.count_nonzero(t) == 0 for t in got.values())


def test_minus_infinity_in_a_bias_hides(block_size: int) -> None:
    x = make(Case(name="hide", biases=((2, 4, 13, 13), (4, 13, 13))), F32)
    hidden = torch.rand(2, 4, 13, 13) < 0.3
    hidden[0, 0, 5] = True
    x.biases[0] = x.biases[0].detach().masked_fill(hidden, -INF).requires_grad_()
    got = ours(x)
    assert_within_budget(got, x)
    assert torch.count_nonzero(got["bias[0]"][hidden]) == 0


def test_lowest_numbers_hide_nothing(block_size: int) -> None:
    """A row whose biases are all ``finfo.min`` is a proper softmax; beside ordinary ones such a key weighs nothing."""
    x = make(Case(name="lowest", biases=((2, 1, 13, 13),)), F32)
    bias = x.biases[0].detach().clone()
    bias[0, 0, 4] = bias[1, 0, 7, ::2] = LOWEST
    x.biases = [bias.requires_grad_()]
    got = ours(x)
    assert_within_budget({name: t for name, t in got.items() if name != "lse"}, x)
    assert torch.allclose(got["out"][0, 4], x.v[0].mean(0), rtol=1e-5, atol=1e-6)
    assert bool((got["lse"][0, :, 4] == LOWEST).all())


@pytest.mark.parametrize("other", [LOWEST, -INF])
def test_two_lowest_biases_add_up_without_hiding(other: float, block_size: int) -> None:
    """Their sum is past the end of float32; the row is uniform all the same, unless one of them really is -inf."""
    x = make(Case(name="sum"), F32)
    first, second = torch.zeros(13, 13), torch.zeros(13, 13)
    first[2], second[2] = LOWEST, LOWEST
    second[2, 6:] = other
    x.biases = [first.requires_grad_(), second.requires_grad_()]
    seen = x.v if other == LOWEST else x.v[:, :6]
    assert torch.allclose(ours(x)["out"][:, 2], seen.mean(1), rtol=1e-5, atol=1e-6)


def test_nan_in_a_row_leaves_low_biases_of_others_alone(block_size: int) -> None:
    x = make(Case(name="beside"), F32)
    x.biases = [torch.full((13, 13), LOWEST, requires_grad=True) for _ in range(2)]
    with torch.no_grad():
        x.q[:, 4] = math.nan
    out = ours(x)["out"]
    assert bool(out[:, 4].isnan().all())
    out[:, 4] = x.v.detach().mean(1)
    assert torch.allclose(out, x.v.mean(1, keepdim=True).expand_as(out), rtol=1e-5, atol=1e-6)


def test_a_low_float64_bias_hides_nothing_from_float32() -> None:
    x = make(Case(name="low64"), F32)
    x.biases = [torch.full((13, 13), -1e300, dtype=F64)]
    out = biasflash.attention(x.q, x.k, x.v, x.biases, backend="cpu")
    assert torch.allclose(out, x.v.mean(1, keepdim=True).expand_as(out), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("size", [8e6, -8e6])
def test_huge_logits_keep_their_weights(size: float, block_size: int) -> None:
    """float32 steps are 0.5 at 8e6: lse alone would be off by a quarter, the pair is not."""
    x = make(Case(name="huge", biases=((1, 4, 13, 13),)), F32)
    with torch.no_grad():
        x.q.zero_()
        x.biases[0].copy_(torch.randint(0, 4, (1, 4, 13, 13)) * 0.5 + size)
    got, true = ours(x), plain(x, F64)
    for name in ("out", "k", "v", "bias[0]"):
        assert (got[name] - true[name]).abs().max() <= 4e-6 * true[name].abs().max() + 1e-30, name


def test_nan_behind_key_masks_leaks_nowhere(block_size: int) -> None:
    x = make(Case(name="leak", Hq=6, Hkv=2, biases=((2, 6, 13, 13),), dlse=True), F32)
    tail = (torch.arange(13) < torch.tensor([9, 6])[:, None])[:, None, None]  # B 1 1 N
    rows = tail.expand(2, 6, 13, 13)  # the same fact with a query axis of stride 0
    heads = torch.ones(1, 6, 1, 13, dtype=torch.bool)
    heads[0, :3, 0, 2] = False  # hidden from the whole group of key head 0
    for masks in ([tail], [rows], [tail, heads]):
        x.masks = masks
        clean = ours(x)
        hidden = ~tail[:, 0, 0, :, None].expand(2, 13, 2)
        if len(masks) == 2:
            hidden = hidden.clone()
            hidden[:, 2, 0] = True
        dirty = dataclasses.replace(x, k=x.k.detach().clone(), v=x.v.detach().clone())
        dirty.k[hidden], dirty.v[hidden] = math.nan, INF
        dirty.k.requires_grad_(), dirty.v.requires_grad_()
        got = ours(dirty)
        assert all(torch.equal(got[name], clean[name]) for name in clean)
        assert torch.count_nonzero(got["k"][hidden]) == torch.count_nonzero(got["v"][hidden]) == 0


def test_nan_hidden_from_one_head_of_a_group_stays_with_the_others(block_size: int) -> None:
    x = make(Case(name="heads", Hq=4, Hkv=2), F32)
    mask = torch.ones(1, 4, 1, 13, dtype=torch.bool)
    mask[0, 0, 0, 5] = False
    x.masks = [mask]
    clean = ours(x)["out"]
    with torch.no_grad():
        x.v[:, 5, 0] = math.nan
    got = ours(x)
    assert torch.equal(got["out"][:, :, [0, 2, 3]], clean[:, :, [0, 2, 3]])
    assert bool(got["out"][:, :, 1].isnan().all())
    assert not bool(got["q"][:, :, [0, 2, 3]].isnan().any())


def test_keys_that_causal_hides_from_every_query_are_not_read(block_size: int) -> None:
    x = make(Case(name="beyond", M=6, N=17, causal="top-left", biases=((4, 6, 17),)), F32)
    clean = ours(x)
    with torch.no_grad():
        x.k[:, 6:], x.v[:, 6:] = math.nan, math.nan
    got = ours(x)
    assert all(torch.equal(got[name], clean[name]) for name in clean)


@pytest.mark.parametrize("name", ["q", "k", "v", "bias[0]", "dout"])
def test_visible_nan_propagates(name: str, block_size: int) -> None:
    x = make(Case(name="visible", biases=((2, 4, 13, 13),)), F32)
    with torch.no_grad():
        (x.dout if name == "dout" else x.trained()[name])[1, 2, 3, 4] = math.nan
    got, true = ours(x), plain(x, F64)
    assert any(bool(t.isnan().any()) for t in true.values())
    for key, t in got.items():
        assert torch.equal(t.isnan(), true[key].isnan()), key


@pytest.mark.parametrize("biases", [1, 2])
def test_nan_at_a_pair_that_a_bias_hides(biases: int, block_size: int) -> None:
    """A key of NaN that one query sees is selected away from the others, in both passes."""
    x = make(Case(name="pair", biases=((2, 4, 13, 13),) * biases), F32)
    hidden = torch.zeros(13, 13, dtype=torch.bool)
    hidden[:, 5] = torch.arange(13) != 2
    x.biases[0] = x.biases[0].detach().masked_fill(hidden, -INF).requires_grad_()
    with torch.no_grad():
        x.k[:, 5] = math.nan
    got, true = ours(x), plain(x, F64)
    for name in ("out", "lse", "bias[0]"):
        nan = true[name].isnan()
        assert 0 < nan.sum() < nan.numel()
        assert torch.equal(got[name].isnan(), nan), name


@pytest.mark.parametrize("causal", [False, True])
def test_differences_past_the_end_of_float32(causal: bool, block_size: int) -> None:
    """Products of dout and values are 3e38 or -3e38: every gradient is finite, but products less delta are not."""
    x = make(Case(name="ends", Dv=1, biases=((2, 4, 13, 13),), causal=causal), F32)
    with torch.no_grad():
        x.q.mul_(1e-3)
        x.k.mul_(1e-3)
        x.v.copy_(torch.where(torch.arange(13) % 2 == 0, 2e37, -2e37)[:, None, None])
    x.dout = torch.full_like(x.dout, 15.0)
    got, true, sizes = ours(x), plain(x, F64), magnitudes(x)
    for name in x.trained():  # by sizes: plain torch in float32 gives NaN here
        assert bool(((got[name] - true[name]).abs() <= 1e-6 * sizes[name]).all()), name


def test_hidden_pairs_have_no_gradient_where_dp_is_not_finite(block_size: int) -> None:
    """An infinite value that some queries may not see: the gradient of a bias at the hidden pairs is zero, not NaN."""
    x = make(Case(name="dp", biases=((2, 4, 13, 13),), causal=True), F32)
    with torch.no_grad():
        x.v[:, 7] = INF
    dbias = ours(x)["bias[0]"]
    assert torch.count_nonzero(dbias.masked_fill(torch.ones(13, 13).tril().bool(), 0.0)) == 0


# -------------------------------------------------------------------------------------------------- sizes and facts


@pytest.mark.parametrize("empty", ["B", "M", "N"])
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_zero_sizes(empty: str, dtype: torch.dtype) -> None:
    batch, M, N = (0 if empty == "B" else 2,), 0 if empty == "M" else 3, 0 if empty == "N" else 5
    case = Case(name="zero", batch=batch, M=M, N=N, biases=((4, M, N), (1, 1)), masks=((1, N),), dlse=True)
    got = ours(make(case, dtype))
    assert got["out"].shape == (*batch, M, 4, 8)
    assert bool((got.pop("lse") == -INF).all())
    assert all(torch.count_nonzero(t) == 0 for t in got.values())


def test_float32_products_inside_autocast() -> None:
    x = make(Case(name="autocast", biases=((4, 13, 13),)), F32)
    with torch.autocast("cpu", dtype=BF16):
        out = biasflash.attention(x.q, x.k, x.v, x.biases, backend="cpu")
        assert isinstance(out, Tensor)
        inside = torch.autograd.grad(out, [x.q, *x.biases], x.dout.to(out.dtype))
    q, k, v = (t.to(BF16) for t in (x.q, x.k, x.v))
    want = biasflash.attention(q, k, v, x.biases, backend="cpu")
    assert isinstance(want, Tensor)
    outside = torch.autograd.grad(want, [x.q, *x.biases], x.dout.to(want.dtype))
    assert torch.equal(out, want)
    assert all(torch.equal(a, b) for a, b in zip(inside, outside, strict=True))


@pytest.mark.parametrize("device", ["cuda", "meta"])
def test_other_devices_are_refused_in_words(device: str) -> None:
    problem = dataclasses.replace(_problem(make(CASES[0], F32)), device=torch.device(device))
    (reason,) = cpu.objections(problem)
    assert device in reason
    assert "device cpu only" in reason


@pytest.mark.parametrize("dtype", [F64, F32, BF16, F16], ids=str)
def test_every_dtype_is_welcome_and_described(dtype: torch.dtype) -> None:
    problem = _problem(make(CASES[0], dtype))
    assert cpu.objections(problem) == ()
    (line,) = cpu.describe(problem)
    assert "queries" in line
    assert ("float64" if dtype == F64 else "float32") in line


def test_unknown_dtypes_and_kinds_are_refused() -> None:
    problem = _problem(make(CASES[0], F32))
    term = problems.Term(kind="spiral", shape=(1, 1, 1, 1), dtype=F32, trainable=False)
    strange = dataclasses.replace(problem, dtype=torch.int8, terms=(term,))
    dtype, kind = cpu.objections(strange)
    assert "int8" in dtype
    assert "spiral" in kind


def test_blocks_fit_and_are_not_crumbs() -> None:
    lengths = (1, 7, 65, 1000, 9000, 70000)
    problem = _problem(make(CASES[0], F32))
    for M, N, group, batch in itertools.product(lengths, lengths, (1, 5, 64), ((), (3,), (65537,), (500, 7))):
        p = dataclasses.replace(problem, batch=batch, M=M, N=N, Hq=2 * group, Hkv=2)
        found = blocks.choose_blocks(p)
        size = math.prod(found.heads) * group * found.rows * found.keys
        assert size <= blocks.BLOCK
        assert all(1 <= h <= n for h, n in zip(found.heads, (*batch, 2), strict=True))
        assert 1 <= found.rows <= M
        assert 1 <= found.keys <= N
        parts = -(-M // found.rows) * -(-N // found.keys)
        assert parts * group * found.rows * found.keys <= 1.5 * group * M * N + blocks.BLOCK
        if group * M * N >= 2 * blocks.BLOCK:
            assert size >= blocks.BLOCK / 4


def test_gradients_that_cancel_are_nothing() -> None:
    """All scores 8e6 and all values alike: dq and dk are zero, whatever dout is. Rows in one part and in several."""
    for length in (50, 1500):
        leaves = [torch.full((1, length, 2, 64), 1000.0, requires_grad=True) for _ in range(3)]
        out = biasflash.attention(*leaves, backend="cpu")
        assert isinstance(out, Tensor)
        dq, dk, dv = torch.autograd.grad(out, leaves, torch.randn(out.shape))
        assert max(dq.abs().max(), dk.abs().max()) < 1e-4
        assert dv.isfinite().all()
