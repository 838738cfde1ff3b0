"""The module form: what its parameters mean, and that it is the formula with projections around it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from biasflash import reference
from biasflash.nn import Attention, RelativePositionBias2d


def by_hand(layer: Attention, x: Tensor, terms: list[Tensor], kinds: list[str], shift: int | None = None) -> Tensor:
    """The layer in float64, its projections cut apart by hand."""
    D, heads, kv_heads = layer.width, layer.heads, layer.kv_heads
    y = x.double() @ layer.qkv.weight.double().T + layer.qkv.bias.double()
    q, k, v = y.split([heads * D, kv_heads * D, kv_heads * D], dim=-1)
    q, k, v = (t.unflatten(-1, (-1, D)) for t in (q, k, v))
    terms = [t.double() if t.is_floating_point() else t for t in terms]
    out, _ = reference.attend(q, k, v, terms, kinds, shift, D**-0.5)
    return out.flatten(-2) @ layer.out.weight.double().T + layer.out.bias.double()


def test_the_table_is_looked_up_by_offset() -> None:
    height, width, heads = 3, 4, 2
    bias = RelativePositionBias2d(height, width, heads)
    assert bias.table.shape == (heads, 5, 7)
    assert not bias().any()
    nn.init.normal_(bias.table)
    plane = bias()
    for i in range(height * width):
        for j in range(height * width):
            down, right = j // width - i // width, j % width - i % width
            assert torch.equal(plane[:, i, j], bias.table[:, height - 1 + down, width - 1 + right])


def test_the_gradient_of_the_table_counts_every_pair_of_its_offset() -> None:
    bias = RelativePositionBias2d(2, 3, 1)
    bias().sum().backward()
    assert bias.table.grad is not None
    assert bias.table.grad[0].tolist() == [[1, 2, 3, 2, 1], [2, 4, 6, 4, 2], [1, 2, 3, 2, 1]]


def test_the_lookup_is_not_saved_and_moves_along() -> None:
    bias = RelativePositionBias2d(2, 2, 1)
    assert list(bias.state_dict()) == ["table"]
    assert bias.to("meta")().device.type == "meta"
    assert bias.double()().dtype == torch.float64


@pytest.mark.parametrize("kv_heads", [None, 4, 2, 1])
@pytest.mark.parametrize("batch", [(), (2,), (2, 3)])
def test_attention_is_the_formula_between_two_projections(kv_heads: int | None, batch: tuple[int, ...]) -> None:
    own = RelativePositionBias2d(2, 3, 4)
    nn.init.normal_(own.table)
    layer = Attention(20, 4, kv_heads, own, causal="top-left")
    x = torch.randn(*batch, 6, 20, requires_grad=True)
    further = torch.randn(4, 1, 6, requires_grad=True)
    mask = torch.rand(6, 6) > 0.3
    leaves = [x, further, own.table, layer.qkv.weight, layer.out.weight]
    weight = torch.randn(*batch, 6, 20)
    got = layer(x, further, mask)
    wanted = by_hand(layer, x, [further, own(), mask], ["dense", "dense", "keep"], 0)
    torch.testing.assert_close(got.double(), wanted, rtol=1e-5, atol=1e-6)
    found = torch.autograd.grad((got * weight).sum(), leaves)
    truth = torch.autograd.grad((wanted * weight).sum(), leaves)
    for a, b in zip(found, truth, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_biases_may_be_a_list_and_need_no_module() -> None:
    layer = Attention(8, 2)
    x = torch.randn(3, 5, 8)
    a, b = torch.randn(5, 5), torch.randn(2, 1, 5)
    torch.testing.assert_close(layer(x, [a, b]), layer(x, a + b))
    torch.testing.assert_close(layer(x).double(), by_hand(layer, x, [], []), rtol=1e-5, atol=1e-6)
    assert not torch.allclose(layer(x), layer(x, a))


def test_it_names_itself() -> None:
    text = repr(Attention(8, 2, 1, RelativePositionBias2d(2, 3, 2), causal=True))
    assert "heads=2, kv_heads=1, width=4, causal=True" in text
    assert "height=2, width=3, heads=2" in text


def test_a_named_backend_runs_or_raises() -> None:
    x = torch.randn(2, 5, 8)
    layer = Attention(8, 2, backend="reference")
    torch.testing.assert_close(layer(x), by_hand(layer, x, [], []).float())
    with pytest.raises(ValueError, match="backend='none' is unknown"):
        Attention(8, 2, backend="none")(x)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((10, 4), "dim must be a positive multiple of heads, got dim=10, heads=4"),
        ((0, 4), "dim must be a positive multiple of heads"),
        ((8, 0), "dim must be a positive multiple of heads"),
        ((8, 4, 3), "heads must be a multiple of kv_heads, got heads=4, kv_heads=3"),
        ((8, 4, 0), "heads must be a multiple of kv_heads"),
    ],
)
def test_wrong_sizes_of_a_layer_are_refused(arguments: tuple[int, ...], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Attention(*arguments)  # type: ignore[arg-type]


@pytest.mark.parametrize(("sizes", "name"), [((0, 2, 2), "height"), ((2, -1, 2), "width"), ((2, 2, 0), "heads")])
def test_wrong_sizes_of_a_grid_are_refused(sizes: tuple[int, int, int], name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} must be at least 1"):
        RelativePositionBias2d(*sizes)


def test_a_bias_that_is_no_module_is_refused_at_once() -> None:
    with pytest.raises(TypeError, match="got bool; tensors go to forward"):
        Attention(16, 2, bias=True)  # type: ignore[arg-type]
