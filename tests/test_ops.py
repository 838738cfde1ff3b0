"""The operator layer: schemas, fakes, autograd, compile, and what backends are handed."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, library
from torch.autograd import gradcheck
from torch.utils.checkpoint import checkpoint

import biasflash
from biasflash import backends, ops
from biasflash.backends.backend import Gradients
from biasflash.problem import Problem

LAYOUTS = ("q,k,v", "q,kv", "qkv")


def operands(layout: str, dtype: torch.dtype = torch.float32, L: int = 5, heads: int = 2, D: int = 4) -> list[Tensor]:
    """The inputs of one layout, batch 2, all wanting gradients."""
    shapes = {
        "q,k,v": [(2, L, heads, D), (2, L + 2, heads, D), (2, L + 2, heads, D + 1)],
        "q,kv": [(2, L, heads, D), (2, L + 2, 2, heads, D)],
        "qkv": [(2, L, 3, heads, D)],
    }
    return [torch.randn(s).to(dtype).requires_grad_() for s in shapes[layout]]


def keys_of(layout: str, L: int = 5) -> int:
    return L if layout == "qkv" else L + 2


def terms_for(N: int, dtype: torch.dtype, L: int = 5, heads: int = 2) -> tuple[list[Tensor], str]:
    """Two biases, one of them frozen and of another dtype, and two masks, one with a dead row."""
    bias = torch.randn(1, heads, L, N).to(dtype).requires_grad_()
    keep = torch.ones(2, 1, 1, N, dtype=torch.bool)
    keep[1, ..., 2:] = False
    rows = torch.ones(L, N, dtype=torch.bool)
    rows[1] = False
    return [bias, torch.randn(2, 1, 1, N), keep, rows], "dense,dense,keep,keep"


# ------------------------------------------------------------------------------------------------ schemas and fakes


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_forward_operator_passes_opcheck(layout: str, dtype: torch.dtype) -> None:
    terms, kinds = terms_for(keys_of(layout), dtype)
    arguments = (operands(layout, dtype), terms, kinds, layout, "bottom-right", 0.3, None)
    library.opcheck(torch.ops.biasflash.forward.default, arguments)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_backward_operator_passes_opcheck(layout: str, dtype: torch.dtype) -> None:
    terms, kinds = terms_for(keys_of(layout), dtype)
    inputs = [t.detach() for t in operands(layout, dtype)]
    terms = [t.detach() for t in terms]
    shared = (inputs, terms, kinds, layout, "none", None, None)
    out, lse, low = torch.ops.biasflash.forward(*shared)
    for wanted in ([True] * len(inputs), [False] * len(inputs)):
        arguments = (
            torch.randn_like(out),
            torch.randn_like(lse),
            *shared,
            out,
            lse,
            low,
            [*wanted, True, False, False, False],
        )
        library.opcheck(torch.ops.biasflash.backward.default, arguments)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_fake_outputs_have_the_shapes_dtypes_and_strides_of_real_ones(layout: str) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    inputs, (terms, kinds) = operands(layout, torch.bfloat16), terms_for(keys_of(layout), torch.float16)
    real = torch.ops.biasflash.forward(inputs, terms, kinds, layout, "none", None, None)
    with FakeTensorMode() as mode:
        fakes = [[mode.from_tensor(t) for t in ts] for ts in (inputs, terms)]
        fake = torch.ops.biasflash.forward(*fakes, kinds, layout, "none", None, None)
    for a, b in zip(real, fake, strict=True):
        assert (a.shape, a.dtype, a.stride()) == (b.shape, b.dtype, b.stride())


# ---------------------------------------------------------------------------------------------------------- gradcheck


def doubles(*shapes: tuple[int, ...]) -> list[Tensor]:
    return [torch.randn(s, dtype=torch.float64, requires_grad=True) for s in shapes]


@pytest.mark.parametrize("causal", [False, "bottom-right", "top-left"])
def test_gradcheck_of_attention(causal: bool | str) -> None:
    inputs = doubles((2, 3, 4, 3), (2, 4, 2, 3), (2, 4, 2, 2), (4, 1, 4), (2, 1, 3, 1))
    keep = torch.tensor([[[[True, True, False, True]]], [[[True, True, True, True]]]])

    def call(q: Tensor, k: Tensor, v: Tensor, one: Tensor, two: Tensor) -> Any:
        out, lse = biasflash.attention(q, k, v, [one, two], keep, causal=causal, return_lse=True)
        return out, lse.masked_fill(lse == -torch.inf, 0.0)

    assert gradcheck(call, inputs)


def test_gradcheck_of_the_packed_doors() -> None:
    qkv, bias = doubles((1, 3, 3, 2, 3), (1, 2, 3, 3))
    assert gradcheck(lambda t, b: biasflash.attention_qkvpacked(t, b, causal=True, return_lse=True), (qkv, bias))
    q, kv, bias = doubles((1, 2, 4, 3), (1, 3, 2, 2, 3), (2, 3))
    assert gradcheck(lambda q, kv, b: biasflash.attention_kvpacked(q, kv, b, return_lse=True), (q, kv, bias))


def test_gradcheck_of_torchs_door() -> None:
    inputs = doubles((1, 4, 3, 3), (1, 2, 4, 3), (1, 2, 4, 2), (4, 3, 4))
    assert gradcheck(
        lambda q, k, v, b: biasflash.scaled_dot_product_attention(q, k, v, b, is_causal=True, enable_gqa=True), inputs
    )


def test_gradcheck_of_the_historic_doors() -> None:
    q, k, v, bias = doubles((1, 3, 2, 3), (1, 3, 2, 3), (1, 3, 2, 3), (2, 3, 3))
    assert gradcheck(lambda q, k, v, b: biasflash.flash_attention_fn(q, k, v, b, True, 0.7), (q, k, v, bias))
    (qkv,) = doubles((1, 3, 3, 2, 3))
    assert gradcheck(lambda t, b: biasflash.flash_attention_qkvpacked_fn(t, b, False, -0.7), (qkv, bias))


# ----------------------------------------------------------------------------------------------------------- contexts


def small(dtype: torch.dtype = torch.float32, M: int = 7, N: int = 9) -> list[Tensor]:
    """q, k, v and a bias shared by the batch, all leaves."""
    return [torch.randn(s).to(dtype).requires_grad_() for s in ((2, M, 2, 8), (2, N, 2, 8), (2, N, 2, 8), (1, 2, M, N))]


def grads_of(out: Tensor, leaves: list[Tensor], **options: Any) -> list[Tensor]:
    return list(torch.autograd.grad(out.sin().sum(), leaves, **options))


def assert_equal(got: list[Tensor], wanted: list[Tensor]) -> None:
    for i, (a, b) in enumerate(zip(got, wanted, strict=True)):
        assert torch.equal(a, b), f"tensor {i} differs by {(a - b).abs().max():.3g}"


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoint_gives_the_same_bits(reentrant: bool) -> None:
    leaves = small()
    wanted = grads_of(biasflash.attention(*leaves), leaves)
    checkpoint(biasflash.attention, *leaves, use_reentrant=reentrant).sin().sum().backward()
    assert_equal([t.grad for t in leaves], wanted)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast_takes_q_k_v_and_leaves_the_bias(dtype: torch.dtype) -> None:
    leaves = small()
    with torch.autocast("cpu", dtype=dtype):
        out = biasflash.attention(*leaves)
    low = [t.detach().to(dtype) for t in leaves[:3]]
    assert out.dtype == dtype
    assert torch.equal(out, biasflash.attention(*low, leaves[3]))
    assert [g.dtype for g in grads_of(out, leaves)] == [torch.float32] * 4


def test_no_grad_and_inference_mode_keep_no_graph() -> None:
    leaves = small()
    with torch.no_grad():
        out, lse = biasflash.attention(*leaves, return_lse=True)
    with torch.inference_mode():
        again = biasflash.attention(*leaves)
    assert not out.requires_grad
    assert not lse.requires_grad
    assert torch.equal(out, again)


def test_backward_twice_through_one_graph() -> None:
    leaves = small()
    out = biasflash.attention(*leaves)
    first = grads_of(out, leaves, retain_graph=True)
    assert_equal(grads_of(out, leaves), first)
    with pytest.raises(RuntimeError, match="second time"):
        grads_of(out, leaves)


def test_gradients_accumulate_over_steps() -> None:
    leaves = small()
    once = grads_of(biasflash.attention(*leaves), leaves)
    for _ in range(2):
        biasflash.attention(*leaves).sin().sum().backward()
    assert_equal([t.grad for t in leaves], [2 * g for g in once])


class Layer(torch.nn.Module):
    """A module that holds the door itself and a trainable bias."""

    def __init__(self) -> None:
        super().__init__()
        self.attend = biasflash.attention
        self.bias = torch.nn.Parameter(torch.randn(1, 2, 7, 9))

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self.attend(q, k, v, self.bias)


def test_deepcopied_module_trains_apart() -> None:
    layer, (q, k, v, _) = Layer(), small()
    twin = copy.deepcopy(layer)
    twin(q, k, v).sin().sum().backward()
    assert layer.bias.grad is None
    layer(q, k, v).sin().sum().backward()
    assert torch.equal(layer.bias.grad, twin.bias.grad)


def test_second_derivative_is_refused_by_name() -> None:
    leaves = small()
    first = torch.autograd.grad(biasflash.attention(*leaves).sin().sum(), leaves, create_graph=True)
    with pytest.raises(biasflash.UnsupportedError, match="second derivative"):
        sum((g**2).sum() for g in first).backward()


def test_in_place_edit_of_out_is_caught_by_autograd() -> None:
    leaves = small()
    out = biasflash.attention(*leaves)
    out.mul_(2.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_in_place_edit_of_an_input_is_caught_by_autograd() -> None:
    leaves = small()
    q = leaves[0] * 1.0
    out = biasflash.attention(q, *leaves[1:])
    q.add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_gradient_of_lse_alone_is_the_softmax() -> None:
    """d lse / d bias are the weights, so they sum to one over the keys of every row."""
    q, k, v, _ = small()
    bias = torch.randn(2, 2, 7, 9, requires_grad=True)
    _, lse = biasflash.attention(q, k, v, bias, return_lse=True)
    dq, dbias = torch.autograd.grad(lse.sum(), [q, bias], retain_graph=True)
    torch.testing.assert_close(dbias.sum(-1), torch.ones(2, 2, 7))
    torch.testing.assert_close(dq, (torch.einsum("bhmn,bnhd->bmhd", dbias, k) * 8**-0.5).detach())
    (dv,) = torch.autograd.grad(lse.sum(), [v])
    assert not dv.any()


# --------------------------------------------------------------------------------------------- what backends are handed


@pytest.fixture
def handed(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Problem, Gradients, tuple[Tensor, ...]]]:
    """Every backward call of the reference backend: problem, buffers, and q, k, v."""
    seen: list[tuple[Problem, Gradients, tuple[Tensor, ...]]] = []
    chosen = backends.load("reference")
    real: Callable[..., None] = chosen.backward

    def spy(problem: Problem, gradients: Gradients, *rest: Any) -> None:
        seen.append((problem, gradients, rest[2:5]))
        real(problem, gradients, *rest)

    monkeypatch.setattr(chosen, "backward", spy)
    return seen


def test_only_the_bias_wanted_means_only_its_buffer(handed: list[Any]) -> None:
    q, k, v, bias = (t.detach() for t in small())
    bias.requires_grad_()
    biasflash.attention(q, k, v, bias, backend="reference").sum().backward()
    ((problem, gradients, _),) = handed
    assert (gradients.q, gradients.k, gradients.v) == (None, None, None)
    assert gradients.terms[0].shape == bias.shape
    assert problem.trainable == (False, False, False)


def test_frozen_bias_gets_no_buffer(handed: list[Any]) -> None:
    *leaves, bias = small()
    mask = torch.ones(7, 9, dtype=torch.bool)
    biasflash.attention(*leaves, [bias.detach(), bias], mask, backend="reference").sum().backward()
    ((_, gradients, _),) = handed
    assert gradients.terms[0] is None
    assert gradients.terms[1].shape == bias.shape
    assert gradients.terms[2] is None


def test_no_backward_call_when_nothing_flows(handed: list[Any]) -> None:
    leaves = small()
    out, lse = biasflash.attention(*leaves, return_lse=True, backend="reference")
    assert torch.autograd.grad(leaves[0].sum(), leaves[1], allow_unused=True) == (None,)
    lse.sum().backward()
    assert len(handed) == 1
    assert out.grad_fn is not None


def test_packed_qkv_is_read_and_written_through_views(handed: list[Any]) -> None:
    qkv = torch.randn(2, 6, 3, 2, 4, requires_grad=True)
    out = biasflash.attention_qkvpacked(qkv, backend="reference")
    (grad,) = torch.autograd.grad(out.sum(), qkv)
    ((_, g, inputs),) = handed
    assert grad.shape == qkv.shape
    for i, (t, d) in enumerate(zip(inputs, (g.q, g.k, g.v), strict=True)):
        assert t.data_ptr() == qkv[:, :, i].data_ptr()
        assert t.stride() == qkv[:, :, i].stride()
        assert d.data_ptr() == grad[:, :, i].data_ptr()
        assert d.stride() == grad[:, :, i].stride()


def test_packed_kv_is_read_and_written_through_views(handed: list[Any]) -> None:
    q, kv = torch.randn(2, 5, 4, 4, requires_grad=True), torch.randn(2, 6, 2, 2, 4, requires_grad=True)
    dq, dkv = torch.autograd.grad(biasflash.attention_kvpacked(q, kv, backend="reference").sum(), (q, kv))
    ((_, g, (_, k, v)),) = handed
    for i, (t, d) in enumerate(((k, g.k), (v, g.v))):
        assert t.data_ptr() == kv[:, :, i].data_ptr()
        assert d.data_ptr() == dkv[:, :, i].data_ptr()
    assert g.q.data_ptr() == dq.data_ptr()


def test_bias_views_arrive_uncopied_and_unexpanded(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen, seen = backends.load("reference"), []
    real = chosen.forward

    def spy(problem: Problem, q: Tensor, k: Tensor, v: Tensor, terms: list[Tensor]) -> Any:
        seen.extend(terms)
        return real(problem, q, k, v, terms)

    monkeypatch.setattr(chosen, "forward", spy)
    q, k, v, _ = small()
    table = torch.randn(7, 9, 2)
    vector = torch.randn(2, 15)
    biases = [table.permute(2, 0, 1), vector.unfold(-1, 9, 1)[None], torch.randn(9).expand(7, 9)]
    biasflash.attention(q, k, v, biases, backend="reference")
    assert [t.data_ptr() for t in seen] == [t.data_ptr() for t in biases]
    assert [tuple(t.shape) for t in seen] == [(1, 2, 7, 9), (1, 2, 7, 9), (1, 1, 7, 9)]
    assert [t.stride()[-2:] for t in seen] == [b.stride()[-2:] for b in biases]


def test_gradients_reach_the_base_of_bias_views() -> None:
    q, k, v, _ = (t.detach() for t in small())
    table, vector, row = (torch.randn(s, requires_grad=True) for s in ((7, 9, 2), (2, 15), (9,)))

    def views() -> list[Tensor]:
        return [table.permute(2, 0, 1), vector.unfold(-1, 9, 1)[None], row.expand(7, 9)]

    got = torch.autograd.grad(biasflash.attention(q, k, v, views()).sin().sum(), [table, vector, row])
    whole = torch.zeros(2, 2, 7, 9)
    for t in views():
        whole = whole + t.expand(2, 2, 7, 9)
    wanted = torch.autograd.grad(biasflash.attention(q, k, v, whole).sin().sum(), [table, vector, row])
    for a, b in zip(got, wanted, strict=True):
        torch.testing.assert_close(a, b)


def test_vmap_is_refused_by_torch_with_the_operators_name() -> None:
    q, k, v, bias = (t.detach()[None].expand(3, *t.shape) for t in small())
    with pytest.raises(RuntimeError, match="Batching rule not implemented for biasflash::forward"):
        torch.vmap(biasflash.attention)(q, k, v, bias)


def test_rows_of_a_full_biass_gradient_begin_at_16_bytes_on_a_gpu() -> None:
    full, shared = torch.zeros(2, 4, 7, 13), torch.zeros(4, 7, 13)
    for dtype, pitch in ((torch.bfloat16, 16), (torch.float32, 16), (torch.float64, 14)):
        found = ops.bias_buffer(full.to(dtype), 2 * 4 * 7)
        assert found.shape == full.shape
        assert found.stride() == (4 * 7 * pitch, 7 * pitch, pitch, 1)
        assert found.dtype == dtype
    assert ops.bias_buffer(shared, 2 * 4 * 7).is_contiguous()
    assert ops.bias_buffer(full, -1).is_contiguous()  # on a CPU
    assert ops.bias_buffer(full[..., :8], 2 * 4 * 7).is_contiguous()
    assert ops.bias_buffer(full.mT, 2 * 4 * 13).stride() == full.mT.stride()
    assert ops.bias_buffer(torch.zeros(()), 1).shape == ()
    assert ops.bias_buffer(torch.zeros(13), 1).shape == (13,)
