"""What only a Hopper GPU can tell of its kernels: random problems against float64, and many repetitions of a pass."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

import biasflash
from biasflash import problem
from biasflash.testing.case import DTYPES, Bias, Case
from biasflash.testing.conformance import run_case
from property_cases import Call, TermDraw, check

config = pytest.importorskip("biasflash.backends.hopper.config")
odd_bias = pytest.importorskip("biasflash.backends.hopper.odd_bias")
launch = pytest.importorskip("biasflash.backends.hopper.launch", reason="only Triton compiles kernels")

IS_HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
pytestmark = pytest.mark.skipif(not IS_HOPPER, reason="needs an NVIDIA GPU of compute capability 9.0")

#: mostly as bulk copies take them; the others go to portable kernels of the same backend
LAYOUTS = ("plain",) * 8 + ("heads_first", "heads_first", "sliced", "expanded")
WIDTHS = (8, 16, 32, 40, 64, 80, 96, 128, 192, 256)


@pytest.fixture(autouse=True, scope="module")
def _no_other_lengths() -> Iterator[None]:
    """Every problem is another one: kernels of its other lengths would double what is compiled."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("BIASFLASH_AHEAD", "off")
        yield


@st.composite
def _bias(draw: st.DrawFn, axes: int, dtype: torch.dtype) -> TermDraw:
    return TermDraw(
        kind="dense",
        full=(*draw(st.tuples(*[st.booleans()] * (axes + 1))), True, True),
        left_out=0,
        dtype=draw(st.sampled_from((dtype, torch.float32))),
        layout=draw(st.sampled_from(LAYOUTS)),
        trainable=draw(st.booleans()),
        minus_inf=draw(st.integers(0, 3)) == 0,
    )


@st.composite
def _key_mask(draw: st.DrawFn, axes: int) -> TermDraw:
    return TermDraw(
        kind="keep",
        full=(*draw(st.tuples(*[st.booleans()] * axes)), False, False, True),
        left_out=0,
        dtype=torch.bool,
        layout=draw(st.sampled_from(("plain", "sliced"))),
        trainable=False,
        minus_inf=False,
    )


@st.composite
def hopper_calls(draw: st.DrawFn, dtype: torch.dtype, causal: bool | str) -> Call:
    """Problems to which the backend has no objection: a bias, a mask of keys, both or neither."""
    batch = tuple(draw(st.lists(st.integers(1, 3), min_size=1, max_size=2)))
    biases = draw(st.lists(_bias(len(batch), dtype), max_size=1))
    masks = draw(st.lists(_key_mask(len(batch)), max_size=1))
    N = draw(st.integers(1, 700))
    D = draw(st.sampled_from(WIDTHS))
    Dv = draw(st.sampled_from((D, D, *WIDTHS)))
    most = odd_bias.MOST_MASKED_WIDTH if masks else odd_bias.MOST_WIDTH
    if biases and (biases[0].dtype == torch.float32 or max(D, Dv) > most or draw(st.booleans())):
        N = max(8, N // 8 * 8)
    return Call(
        batch=batch,
        M=draw(st.integers(1, 700)),
        N=N,
        Hkv=draw(st.integers(1, 2)),
        group=draw(st.integers(1, 2)),
        D=D,
        Dv=Dv,
        dtype=dtype,
        layouts=draw(st.tuples(*[st.sampled_from(LAYOUTS)] * 4)),
        terms=(*biases, *masks),
        causal=causal,
        scale=draw(st.sampled_from((None, None, 1.5))),
        trainable=draw(st.sampled_from(((True, True, True),) * 3 + ((True, False, False), (False, True, True)))),
        lse_gradient=draw(st.booleans()),
        hidden_nan=draw(st.booleans()),
        seed=draw(st.integers(0, 2**31)),
    )


@pytest.mark.parametrize("causal", [False, True, "top-left"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@settings(max_examples=34, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_random_problems_agree_with_float64(data: st.DataObject, dtype: torch.dtype, causal: bool | str) -> None:
    check(data.draw(hopper_calls(dtype, causal)), "hopper", device="cuda")


@pytest.mark.parametrize(
    ("batch", "M", "heads", "D", "planes", "options"),
    [
        (2, 1024, 8, 64, 0, {}),
        (2, 1024, 8, 128, 0, {"causal": True}),
        (8, 512, 4, 64, 1, {}),
        (40, 384, 4, 32, 1, {}),
        (140, 640, 4, 32, 1, {}),
        (2, 1024, 8, 64, 2, {}),
        (8, 512, 4, 64, 1, {"bias_dtype": torch.float32}),
        (40, 384, 4, 32, 1, {"bias_dtype": torch.float32}),
        (2, 1024, 8, 64, 2, {"bias_dtype": torch.float32}),
        (2, 1024, 8, 128, 2, {"bias_dtype": torch.float32}),
        (2, 1001, 8, 64, 2, {}),
        (2, 1001, 8, 128, 2, {}),
    ],
    ids=["one pass", "one pass, causal", "shared bias", "pair bias", "pair bias, resident", "full bias",
         "float32 shared bias", "float32 pair bias", "float32 full bias", "float32 full bias, wide",
         "odd rows", "odd rows, wide"],
)  # fmt: skip
def test_a_thousand_backward_passes_have_the_same_bits(
    batch: int, M: int, heads: int, D: int, planes: int, options: dict[str, Any]
) -> None:
    def normal(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.randn(shape, device="cuda", dtype=dtype)

    options = dict(options)
    dtype = options.pop("bias_dtype", torch.bfloat16)
    leaves = [normal(batch, M, heads, D) for _ in range(3)]
    leaves += [normal(planes, heads, M, M, dtype=dtype)] if planes else []
    for t in leaves:
        t.requires_grad_()
    out = biasflash.attention(*leaves, backend="hopper", **options)
    dout = normal(*out.shape)

    def run() -> tuple[Tensor, ...]:
        return torch.autograd.grad(out, leaves, dout, retain_graph=True)

    first = run()
    for turn in range(1000):
        got = run()
        torch.cuda.synchronize()
        changed = [(a.view(torch.int16) != b.view(torch.int16)).nonzero() for a, b in zip(first, got, strict=True)]
        where = {
            name: (len(at), at.amin(0).tolist(), at.amax(0).tolist())
            for name, at in zip(("dq", "dk", "dv", "dbias"), changed, strict=False)
            if len(at)
        }
        assert not where, f"run {turn} changed, elements from and to: {where}"


@pytest.mark.parametrize(
    ("M", "N", "group"), [(640, 640, 1), (513, 520, 1), (300, 1000, 1), (700, 584, 2), (65, 904, 3)], ids=str
)
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_whole_heads_in_one_pass_agree_with_float64(
    M: int, N: int, group: int, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(config, "LEAST_LINES", 1)
    case = Case(
        name="resident",
        why="one pass over the keys of a head",
        tags=frozenset(),
        batch=(3,),
        M=M,
        N=N,
        Hq=2 * group,
        Hkv=2,
        D=32,
        Dv=32,
        biases=(Bias(shape="1HMN"),),
        return_lse=True,
    )
    call = case.build("cuda", DTYPES[dtype])
    terms = [*call.bias, *call.mask]
    facts = problem.build(call.q, call.k, call.v, terms, ["dense"], "none", call.scale)
    assert any(line.strip().startswith("dqkv") for line in launch.describe(facts)), launch.describe(facts)
    result = run_case("hopper", case, "cuda", dtype)
    assert result.status == "passed", result.message
