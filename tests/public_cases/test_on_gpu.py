"""Reports that only a GPU can repeat: offsets past 2^31, graph capture, memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import pytest
import torch
from torch import Tensor

import biasflash
from property_cases import rounding
from public_cases.case import BF16, F16, F32, Built, Draw, incoming, judge, on

GIB = 2**30


def _memory() -> int:
    return torch.cuda.get_device_properties(0).total_memory if torch.cuda.is_available() else 0


def needs(gib: int) -> pytest.MarkDecorator:
    return pytest.mark.skipif(_memory() < gib * GIB, reason=f"needs an NVIDIA GPU with {gib} GiB of memory")


pytestmark = pytest.mark.fresh_memory_as_is  # filling tens of gigabytes with NaN would take the time of the test


def normal(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="cuda").normal_()


def check_rows(
    leaves: list[Tensor], call: Callable[..., Tensor], rows: Iterable[tuple[int, int, int]], causal: bool = False
) -> None:
    """Only the picked rows ``(b, h, i)`` get an incoming gradient, so all gradients follow from them, in float64.

    ``leaves`` are q, k, v and perhaps a bias of four axes, in ``(B, length, H, width)``.
    """
    q, k, v, *bias = leaves
    for t in leaves:
        t.requires_grad_()
    out = call(*leaves)
    dout = torch.zeros_like(out)
    wanted: dict[tuple[int, tuple[int, ...]], Tensor] = {}
    bound = 24 * rounding(q.dtype)  # a handful of roundings of sums of order one; gross faults are what is sought
    for b, h, i in rows:
        do = torch.randn(v.shape[-1], device=q.device).to(q.dtype)
        dout[b, i, h] = do
        keys, values, query = k[b, :, h].detach().double(), v[b, :, h].detach().double(), q[b, i, h].detach().double()
        s = keys @ query * q.shape[-1] ** -0.5
        place = ()
        if bias:
            place = tuple(at if n > 1 else 0 for at, n in zip((b, h, i), bias[0].shape, strict=False))
            s = s + bias[0].detach()[place].double()
        if causal:
            s[i + 1 + k.shape[1] - q.shape[1] :] = -torch.inf
        p = s.softmax(0)
        torch.testing.assert_close(out[b, i, h].double(), p @ values, atol=bound, rtol=bound)
        ds = p * (values @ do.double() - do.double() @ (p @ values))
        scaled = ds * q.shape[-1] ** -0.5
        found = [((b, i, h), scaled @ keys), ((b, slice(None), h), torch.outer(scaled, query))]
        found += [((b, slice(None), h), torch.outer(p, do.double()))] + ([(place, ds)] if bias else [])
        for which, (at, value) in enumerate(found):
            key = (which, tuple(-1 if isinstance(x, slice) else x for x in at))
            wanted[key] = wanted.get(key, 0.0) + value
    grads = torch.autograd.grad(out, leaves, dout)
    for (which, at), value in wanted.items():
        got = grads[which][tuple(slice(None) if x == -1 else x for x in at)].double()
        torch.testing.assert_close(got, value, atol=bound * float(value.abs().max()), rtol=bound)


def test_the_row_check_itself_on_small_tensors_of_the_cpu() -> None:
    """It accepts what is right and sees a wrong row; the GPU tests below rest on it."""
    draw = Draw("cpu", 16)
    leaves = [draw(2, n, 3, 8, dtype=F32) for n in (5, 7, 7)] + [draw(1, 3, 5, 7)]
    rows = [(0, 0, 0), (1, 2, 4), (0, 2, 4), (1, 1, 0)]
    check_rows(leaves, lambda *t: biasflash.attention(*t, causal=True), rows, causal=True)
    shifted = lambda q, k, v, b: biasflash.attention(q, k, v, b.roll(1, -2), causal=True)  # noqa: E731
    with pytest.raises(AssertionError):
        check_rows([t.detach() for t in leaves], shifted, rows, causal=True)


@needs(48)
def test_bias_rows_past_two_to_the_31_and_32() -> None:
    """pytorch/pytorch#187225, #162588, #145040: rows past 2^32 / N silently read the wrong row of the bias."""
    S = 73728
    leaves = [normal(1, S, 1, 64, dtype=BF16) for _ in range(3)] + [normal(1, 1, S, S, dtype=BF16)]
    rows = [(0, 0, i) for i in (0, 2**31 // S, 2**32 // S, 2**32 // S + 1, 65536, S - 1)]
    check_rows(leaves, biasflash.attention, rows)


@needs(80)
def test_bias_of_eight_billion_entries() -> None:
    """pytorch/pytorch#145869: 16 x 32 x 4096 x 4096 entries overflowed 32-bit offsets."""
    leaves = [normal(16, 4096, 32, 64, dtype=BF16) for _ in range(3)] + [normal(16, 32, 4096, 4096, dtype=BF16)]
    check_rows(leaves, biasflash.attention, [(0, 0, 0), (3, 31, 4095), (4, 0, 0), (8, 0, 1), (15, 31, 4095)])


@needs(8)
def test_batch_past_65535() -> None:
    """facebookresearch/xformers#845, pytorch/pytorch#146704: a grid axis ends at 65535."""
    leaves = [normal(65537, 16, 1, 80, dtype=F16) for _ in range(3)]
    check_rows(leaves, biasflash.attention, [(0, 0, 0), (65535, 0, 15), (65536, 0, 3)])
    shared = normal(1, 1, 16, 16, dtype=F16)
    check_rows([*(t.detach() for t in leaves), shared], biasflash.attention, [(65535, 0, 15), (65536, 0, 3)])


@needs(16)
def test_row_strides_that_pass_two_to_the_31() -> None:
    """thu-ml/SageAttention#386: with a fused buffer, row index times row stride no longer fits 32 bits."""
    rows, width = 100_001, 3 * 56 * 128
    fused = torch.zeros(rows, width, dtype=F16, device="cuda")
    views = []
    for first in range(0, width, width // 3):
        fused[:, first : first + 128].normal_()
        views.append(fused[None, :, None, first : first + 128])
    edge = 2**31 // width
    check_rows(
        views, lambda *t: biasflash.attention(*t, causal=True), [(0, 0, i) for i in (0, edge, edge + 1, rows - 1)], True
    )


@needs(8)
def test_cuda_graph_capture_and_replay() -> None:
    """thu-ml/SageAttention#371, triton-lang/triton#10596: replays returned the numbers of the capture."""
    draw = Draw("cuda", 15)
    built = Built(leaves=draw.qkv(2, 65, 65, 2, 32, dtype=F16) | {"bias": draw(1, 2, 65, 65, dtype=F16)})
    leaves = built.fresh()
    warm = torch.cuda.Stream()
    warm.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(warm):
        for _ in range(3):
            out = on(None)(built.call(leaves))
            dout = incoming(built, out)
            torch.autograd.grad(out, list(leaves.values()), dout)
    torch.cuda.current_stream().wait_stream(warm)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = on(None)(built.call(leaves))
        grads = torch.autograd.grad(out, list(leaves.values()), dout)
    with torch.no_grad():
        for t in leaves.values():
            t.zero_()
        graph.replay()
        for name, t in leaves.items():
            t.copy_(built.leaves[name])
        graph.replay()
    torch.cuda.synchronize()
    judge(built, {"out": out.detach(), **dict(zip(leaves, grads, strict=True))})


@needs(8)
def test_triangle_attention_holds_no_gradient_per_row() -> None:
    """aqlaboratory/openfold-3#271, meta-pytorch/attention-gym#20: the bias gradient was stored per row, then summed.

    Stored so it would take 1 GiB; results and gradients of q, k, v and out take 256 MiB of the bound.
    """
    q, k, v = (normal(512, 512, 4, 32, dtype=BF16).requires_grad_() for _ in range(3))
    bias = normal(1, 4, 512, 512, dtype=BF16).requires_grad_()
    for _ in range(2):
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        out = biasflash.attention(q, k, v, bias)
        grads = torch.autograd.grad(out, [q, k, v, bias], torch.ones_like(out))
        torch.cuda.synchronize()
        assert torch.cuda.max_memory_allocated() - before < 500 * 2**20
        assert all(torch.isfinite(g).all() for g in grads)
        del out, grads
