"""Biases and masks of every broadcast and layout, and where their gradients must arrive."""

from __future__ import annotations

import torch

from public_cases.case import BF16, F16, Book, Built, Draw, Leaves, Results, lengths_mask, offsets_2d

case = Book()
CASES = case.cases

# ------------------------------------------------------------------------------------ gradients of broadcast biases


@case("jax-ml/jax#30593", "jax-ml/jax#23701", "jax-ml/jax#27184", wrong="a bias gradient only for batch one", big=True)
def one_bias_for_a_batch(draw: Draw) -> Built:
    return Built(leaves=draw.qkv(16, 33, 33, 4, 16, dtype=BF16) | {"bias": draw(1, 4, 33, 33, dtype=BF16)})


@case("NVIDIA/TransformerEngine#677", "ROCm/TransformerEngine#90", wrong="no gradient for a bias shared by the heads")
def one_bias_for_all_heads(draw: Draw) -> Built:
    return Built(leaves=draw.qkv(3, 21, 45, 6, 32, dtype=F16) | {"bias": draw(3, 1, 21, 45, dtype=F16)})


def _no_drift(_: Built, got: Results) -> None:
    assert got["bias"].abs().max() < 3e-5


@case(
    "pengzhiliang/MAE-pytorch#52", wrong="softmax ignores what is constant along keys, yet it got noise", then=_no_drift
)
def bias_constant_along_keys(draw: Draw) -> Built:
    return Built(leaves=draw.qkv(2, 37, 52, 4, 16) | {"bias": draw(1, 4, 37, 1)})


@case("pytorch/pytorch#120810", wrong="a two-axis bias was expanded first and its gradient summed in low precision")
def bias_of_two_axes(draw: Draw) -> Built:
    return Built(leaves=draw.qkv(3, 20, 44, 2, 32, dtype=BF16) | {"bias": draw(20, 44, dtype=BF16)})


@case(
    "aqlaboratory/openfold-3#228",
    "aqlaboratory/openfold-3#271",
    wrong="triangle attention took the pair bias for one of batch size one without checking",
    big=True,
)
def triangle_attention(draw: Draw) -> Built:
    seen = draw.chance(0.8, 33, 1, 1, 33)
    seen[..., 0] = True
    leaves = draw.qkv(33, 33, 33, 4, 32, dtype=BF16) | {"bias": draw(1, 4, 33, 33, dtype=BF16)}
    return Built(leaves=leaves, mask=seen)


@case(
    "Project-MONAI/MONAI#8973",
    "zzd1992/FlashWindowAttention#1",
    "JingyunLiang/SwinIR#61",
    wrong="fused window attention lost the shift mask, or the gradient of the bias table",
)
def shifted_windows(draw: Draw) -> Built:
    """Two images of four 7 x 7 windows; in three of them the shift brings together what must not meet (-100)."""
    token = torch.arange(49, device=draw.device)
    low, right = (token >= 28).long(), (token % 7 >= 4).long()
    region = torch.stack([torch.zeros_like(token), low, right, 2 * low + right])
    shift = -100.0 * (region[:, :, None] != region[:, None, :])
    number = offsets_2d(7, draw.device)

    def view(t: Leaves) -> dict[str, torch.Tensor]:
        relative = t["table"][number].permute(2, 0, 1)
        bias = relative + shift.to(relative.dtype).repeat(2, 1, 1)[:, None]
        return {"q": t["q"], "k": t["k"], "v": t["v"], "bias": bias}

    return Built(leaves=draw.qkv(8, 49, 49, 3, 32, dtype=F16) | {"table": draw(169, 3, dtype=F16)}, view=view)


@case(
    "Dao-AILab/flash-attention#57", "Dao-AILab/flash-attention#17", wrong="mask and bias broadcast along different axes"
)
def key_mask_beside_pair_bias(draw: Draw) -> Built:
    leaves = draw.qkv(6, 24, 40, 4, 32, dtype=F16) | {"bias": draw(1, 4, 24, 40)}
    return Built(leaves=leaves, mask=lengths_mask([40, 33, 20, 9, 2, 40], 40, draw.device))


# ----------------------------------------------------------------------------------------- layouts of bias and mask


@case(
    "facebookresearch/xformers#813", "facebookresearch/xformers#683", wrong="rows of 43 entries: refused or misaligned"
)
def row_stride_not_a_multiple_of_eight(draw: Draw) -> Built:
    return Built(leaves=draw.qkv(2, 43, 43, 4, 16, dtype=BF16) | {"bias": draw(1, 4, 43, 43, dtype=BF16)})


@case("Dao-AILab/flash-attention#617", wrong="a bias off the 16-byte grid: misaligned address")
def bias_at_an_odd_offset(draw: Draw) -> Built:
    leaves = draw.qkv(2, 50, 77, 2, 32, dtype=F16) | {"flat": draw(1 + 2 * 50 * 77, dtype=F16)}

    def view(t: Leaves) -> dict[str, torch.Tensor]:
        return {"q": t["q"], "k": t["k"], "v": t["v"], "bias": t["flat"][1:].view(1, 2, 50, 77)}

    return Built(leaves=leaves, view=view)


@case(
    "huggingface/transformers#31053",
    "microsoft/Swin-Transformer#38",
    wrong="a gathered table with heads last has key stride H",
    big=True,
)
def class_token_and_patches(draw: Draw) -> Built:
    """A class token and 14 x 14 patches; the class token has three offsets of its own."""
    number = torch.full((197, 197), 731, device=draw.device)
    number[1:, 1:] = offsets_2d(14, draw.device)
    number[0, 1:], number[1:, 0] = 729, 730

    def view(t: Leaves) -> dict[str, torch.Tensor]:
        return {"q": t["q"], "k": t["k"], "v": t["v"], "bias": t["table"][number].permute(2, 0, 1)[None]}

    return Built(leaves=draw.qkv(2, 197, 197, 3, 64, dtype=F16) | {"table": draw(732, 3, dtype=F16)}, view=view)


@case("pytorch/pytorch#184180", wrong="a mask per item, shared by heads, was indexed as if it had every head")
def mask_of_the_other_item(draw: Draw) -> Built:
    mask = torch.ones(2, 1, 8, 8, dtype=torch.bool, device=draw.device)
    mask[0, 0, 4:, :4] = False
    return Built(leaves=draw.qkv(2, 8, 8, 4, 64), mask=mask)


@case("facebookresearch/xformers#1089", wrong="a query mask expanded along keys (last stride 0) was refused or misread")
def query_padding_mask(draw: Draw) -> Built:
    i = torch.arange(26, device=draw.device)
    rows = torch.stack([i < 20, i < 5])[:, None, :, None]
    return Built(leaves=draw.qkv(2, 26, 33, 3, 16, dtype=BF16), mask=rows.expand(2, 1, 26, 33))


@case("flagos-ai/FlagAttention#5", wrong="a bias kept with heads last and permuted has no unit key stride")
def bias_with_heads_last(draw: Draw) -> Built:
    leaves = draw.qkv(2, 22, 47, 5, 16, dtype=F16) | {"bias": draw(2, 22, 47, 5, dtype=F16)}
    return Built(leaves=leaves, view=lambda t: t | {"bias": t["bias"].permute(0, 3, 1, 2)})


@case("ROCm/aotriton#22", wrong="batch stride 0: the gradient was skipped, or several programs wrote the same place")
def bias_expanded_over_the_batch(draw: Draw) -> Built:
    leaves = draw.qkv(6, 30, 30, 4, 16, dtype=BF16) | {"bias": draw(1, 4, 30, 30, dtype=BF16)}
    return Built(leaves=leaves, view=lambda t: t | {"bias": t["bias"].expand(6, 4, 30, 30)})


@case("pytorch/pytorch#134802", wrong="an overlapping window view: row and key stride are both one")
def toeplitz_bias_without_a_gather(draw: Draw) -> Built:
    leaves = draw.qkv(2, 28, 41, 2, 16) | {"bias": draw(2, 28 + 41 - 1)}
    return Built(leaves=leaves, view=lambda t: t | {"bias": t["bias"].unfold(-1, 41, 1)[None]})
