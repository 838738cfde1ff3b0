"""Dtypes, precision, scale, which inputs are trained, memory that holds NaN."""

from __future__ import annotations

import math

import torch

from public_cases.case import BF16, F16, Book, Built, Draw, Leaves, Results, incoming, lengths_mask, plain, run

case = Book()
CASES = case.cases

# --------------------------------------------------------------------------------------------------------------- dtypes


@case("pytorch/pytorch#191612", wrong="a float32 mask beside half-precision queries was read two bytes at a time")
def float32_triangle_beside_half(draw: Draw) -> Built:
    triangle = torch.full((32, 32), -math.inf, device=draw.device).triu(1)
    return Built(leaves=draw.qkv(2, 32, 32, 4, 16, dtype=F16) | {"bias": triangle}, frozen=("bias",))


@case("pytorch/pytorch#119131", wrong="products beyond 65504 overflowed before they were scaled")
def products_beyond_half_precision(draw: Draw) -> Built:
    leaves = {"q": draw(1, 32, 2, 64, size=150.0), "k": draw(1, 32, 2, 64, size=100.0), "v": draw(1, 32, 2, 64)}
    return Built(leaves={name: t.to(F16) for name, t in leaves.items()})


# ------------------------------------------------------------------------------------------------------------ precision


@case("meta-pytorch/segment-anything-fast#71", wrong="scores went to base two and the bias did not")
def bias_in_base_two(draw: Draw) -> Built:
    return Built(leaves=draw.qkv(1, 40, 40, 2, 32) | {"bias": draw(1, 2, 40, 40, size=3.0)})


@case("pytorch/pytorch#105202", wrong="a negative scale gave NaN, or lost its sign")
def negative_scale(draw: Draw) -> Built:
    leaves = draw.qkv(1, 37, 37, 2, 64, size=2.0) | {"bias": draw(1, 2, 37, 37)}
    return Built(leaves=leaves, scale=-0.125, causal=True)


def _no_worse_than_twice_eager(built: Built, got: Results) -> None:
    """Equal values everywhere: the true gradients of the scores are zero, so what comes back is all error."""
    eager = run(built, plain)
    for name in got.keys() & {"q", "k", "bias"}:
        assert got[name].abs().max() <= 2 * eager[name].abs().max(), name


@case(
    "ecmwf/anemoi-core#1027",
    wrong="a sharp softmax over equal values: gradients of up to 18 where the truth is zero",
    then=_no_worse_than_twice_eager,
)
def sharp_weights_over_equal_values(draw: Draw) -> Built:
    leaves = draw.qkv(1, 64, 64, 2, 32, dtype=BF16, size=6.0) | {"bias": draw(1, 2, 64, 64, dtype=BF16)}
    leaves["v"] = draw(1, 1, 2, 32, dtype=BF16).expand(1, 64, 2, 32).contiguous()
    return Built(leaves=leaves)


@case("Knowledgator/TurboT5#1", wrong="a bias gradient over a large batch was added up in 16 bits", big=True)
def gradient_of_512_terms(draw: Draw) -> Built:
    return Built(leaves=draw.qkv(512, 16, 16, 2, 16, dtype=BF16) | {"bias": draw(1, 2, 16, 16, dtype=BF16)})


@case("evintunador/triton_docs_tutorials#6", wrong="float32 products in reduced precision put gradients off by 0.7")
def float32_means_float32(draw: Draw) -> Built:
    return Built(leaves=draw.qkv(1, 128, 128, 1, 32), causal=True)


def _plain_mean(built: Built, got: Results) -> None:
    torch.testing.assert_close(got["out"], built.leaves["v"], rtol=1e-6, atol=0.0)
    each = incoming(built, got["out"]).double().sum(1, keepdim=True) / 50
    torch.testing.assert_close(got["v"].double(), each.expand(2, 50, 2, 64), rtol=1e-5, atol=1e-6)
    _no_worse_than_twice_eager(built, got)


@case(
    "pytorch/pytorch#119320",
    "pytorch/pytorch#125674",
    wrong="at scores of eight million the log-sum-exp is rounded by whole units, and so were the weights",
    then=_plain_mean,
)
def scores_of_eight_million(draw: Draw) -> Built:
    return Built(leaves={name: torch.full((2, 50, 2, 64), 1000.0, device=draw.device) for name in "qkv"})


# ------------------------------------------------------------------------------------------------ what wants a gradient


@case("pytorch/pytorch#148476", "pytorch/pytorch#188302", wrong="only the bias trained: nothing was saved for backward")
def only_the_bias_is_trained(draw: Draw) -> Built:
    return Built(leaves=draw.qkv(1, 64, 64, 1, 16) | {"bias": draw(1, 1, 64, 64)}, frozen=("q", "k", "v"))


@case("NVIDIA/TransformerEngine#3082", wrong="a frozen bias was taken for a trained one")
def frozen_bias(draw: Draw) -> Built:
    return Built(
        leaves=draw.qkv(2, 33, 33, 2, 24, dtype=F16) | {"bias": draw(1, 2, 33, 33, dtype=F16)}, frozen=("bias",)
    )


# ----------------------------------------------------------------------------------------------- lengths and old memory


@case("facebookresearch/xformers#719", wrong="a length above 32768 was cut to 16 bits", big=True)
def more_keys_than_16_bits(draw: Draw) -> Built:
    return Built(leaves=draw.qkv(1, 8, 33000, 1, 16, dtype=F16) | {"bias": draw(1, 1, 1, 33000, dtype=F16)})


@case("triton-lang/triton#4217", "triton-lang/triton#3004", "triton-lang/triton#5339", wrong="tuning left sums behind")
def first_call_of_a_new_shape(draw: Draw) -> Built:
    return Built(leaves=draw.qkv(2, 57, 91, 2, 32, dtype=F16) | {"bias": draw(1, 2, 57, 91, dtype=F16)})


@case(
    "fla-org/flash-linear-attention#892",
    "ROCm/aiter#3551",
    "hao-ai-lab/FastVideo#1460",
    wrong="rows that no kernel writes, or loads without a fill value, picked up an old NaN",
)
def odd_sizes_in_dirty_memory(draw: Draw) -> Built:
    leaves = draw.qkv(2, 33, 65, 3, 24, dtype=F16) | {"bias": draw(2, 3, 33, 65, dtype=F16)}
    return Built(leaves=leaves, mask=lengths_mask([65, 40], 65, draw.device))


@case("ROCm/aiter#3498", "huggingface/transformers#27931", wrong="a cache holds NaN beyond the part in use")
def slices_of_an_unfilled_cache(draw: Draw) -> Built:
    leaves = draw.qkv(1, 37, 64, 4, 32, Hkv=2, dtype=F16)
    for name in "kv":
        leaves[name][:, 37:] = math.nan

    def view(t: Leaves) -> dict[str, torch.Tensor]:
        return {"q": t["q"][:, 32:], "k": t["k"][:, :37], "v": t["v"][:, :37]}

    return Built(leaves=leaves, view=view, causal=True)
