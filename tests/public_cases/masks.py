"""Rows that see nothing, hostile masks, and numbers used as if they were minus infinity."""

from __future__ import annotations

import math

import torch

from public_cases.case import BF16, F16, F32, Book, Built, Draw, Results, lengths_mask, lower_triangle

case = Book()
CASES = case.cases


@case("pytorch/pytorch#103749", wrong="a query whose mask is all False came back as NaN")
def padded_query_row(draw: Draw) -> Built:
    mask = torch.zeros(6, 10, dtype=torch.bool, device=draw.device)
    mask[:5, :5] = lower_triangle(5, 5, draw.device)
    return Built(leaves=draw.qkv(1, 6, 10, 2, 8), mask=mask, scale=0.125)


def _all_zero(_: Built, got: Results) -> None:
    for name, t in got.items():
        assert not t.any(), f"{name} is not all zero"


@case(
    "NVIDIA/cuEquivariance#204",
    wrong="with every token masked out was doubled and the value gradient was garbage",
    then=_all_zero,
)
def no_template_at_all(draw: Draw) -> Built:
    leaves = draw.qkv(4, 17, 17, 4, 32, dtype=BF16) | {"bias": draw(1, 4, 17, 17, dtype=BF16)}
    return Built(leaves=leaves, mask=torch.zeros(4, 1, 1, 17, dtype=torch.bool, device=draw.device))


@case(
    "huggingface/transformers#26572",
    "pytorch/pytorch#110213",
    wrong="left padding times a causal triangle leaves the first rows without keys: NaN on some backends",
)
def left_padded_generation(draw: Draw) -> Built:
    mask = lengths_mask([19, 11, 4], 19, draw.device, left=True) & lower_triangle(19, 19, draw.device)
    return Built(leaves=draw.qkv(3, 19, 19, 4, 16, dtype=BF16), mask=mask)


@case(
    "facebookresearch/Mask2Former#17",
    "open-mmlab/mmdetection#8155",
    wrong="an object missing from some frames, or from all, made losses NaN in half precision",
    big=True,
)
def instance_masks_of_one_level(draw: Draw) -> Built:
    levels = draw.chance(0.15, 1, 8, 20, 1280)  # all levels side by side; the call sees the middle one
    levels[:, :, 5, 160:450] = False
    levels[:, :, [3, 11]] = False
    return Built(leaves=draw.qkv(1, 20, 480, 8, 32, dtype=BF16), mask=levels[..., 160:640])


@case(
    "vllm-project/vllm#4405",
    "flagos-ai/FlagAttention#25",
    wrong="no row is empty, but whole tiles before a row's first key are, and a running maximum of -inf gave NaN",
    big=True,
)
def packed_documents(draw: Draw) -> Built:
    document = torch.arange(192, device=draw.device) // 64
    leaves = draw.qkv(1, 192, 192, 2, 32, dtype=BF16) | {"bias": draw(1, 2, 192, 192, dtype=BF16)}
    return Built(leaves=leaves, mask=document[:, None] == document)


@case("pytorch/pytorch#109517", wrong="128 leading columns of finfo.min made the fused kernel return NaN", big=True)
def whole_tiles_of_finfo_min(draw: Draw) -> Built:
    bias = torch.zeros(2, 3, 441, 441, device=draw.device)
    bias[..., :128] = torch.finfo(F32).min
    return Built(leaves=draw.qkv(2, 441, 441, 3, 64) | {"bias": bias}, frozen=("bias",))


def _uniform_over_the_low_row(built: Built, got: Results) -> None:
    mean = built.leaves["v"][2].double().mean(0)
    torch.testing.assert_close(got["out"][2].double(), mean.expand(32, 4, 64), atol=2e-3, rtol=1e-2)


@case(
    "huggingface/transformers#31035",
    wrong="batch items with padding of finfo(bf16).min came back as NaN",
    then=_uniform_over_the_low_row,
)
def encoder_padding_of_finfo_min(draw: Draw) -> Built:
    """The last item is all padding: a proper softmax over equally low scores, hence the mean of its values."""
    seen = lengths_mask([32, 9, 0], 32, draw.device)
    keys = torch.zeros(3, 1, 1, 32, dtype=BF16, device=draw.device).masked_fill(~seen, torch.finfo(BF16).min)
    leaves = draw.qkv(3, 32, 32, 4, 64, dtype=BF16)
    return Built(leaves=leaves, view=lambda t: t | {"bias": keys.expand(3, 1, 32, 32)})


@case("Dao-AILab/flash-attention#1288", wrong="five tokens of width five with a bias of 0 or -65504 were wrong")
def five_by_five_of_ones(draw: Draw) -> Built:
    bias = torch.full((1, 1, 5, 5), -65504.0)
    for row, key in ((0, 2), (0, 4), (1, 0), (2, 3), (3, 1)):  # nothing for the last row
        bias[0, 0, row, key] = 0.0
    ones = torch.ones(1, 5, 1, 5, dtype=F16, device=draw.device)
    v = torch.arange(1.0, 6.0)[None, :, None, None].expand(1, 5, 1, 5)
    leaves = {"q": ones, "k": ones.clone(), "v": v.to(F16).to(draw.device), "bias": bias.to(F16).to(draw.device)}
    return Built(leaves=leaves)


@case(
    "flashinfer-ai/flashinfer#4401",
    "tracel-ai/burn#4697",
    wrong="a running maximum that starts at a finite floor returned zeros for scores below it",
)
def every_score_is_very_low(draw: Draw) -> Built:
    leaves = draw.qkv(1, 40, 70, 2, 32)
    leaves["q"][..., 0] = 1.0
    leaves["k"][..., 0] = -5e4 * math.sqrt(32)
    return Built(leaves=leaves)


@case("pytorch/pytorch#147460", wrong="negative zeros in an additive mask of 0 and -65504 spoilt the output")
def negative_zeros_in_padding_rows(draw: Draw) -> Built:
    bias = torch.zeros(2, 1, 7, 7).masked_fill(torch.ones(7, 7).triu(1).bool(), -65504.0)
    bias[1, :, 3:, :3] = -65504.0
    bias[1, :, :3] = -0.0
    return Built(leaves=draw.qkv(2, 7, 7, 2, 16, dtype=F16) | {"bias": bias.to(F16).to(draw.device)}, frozen=("bias",))
