"""Reports where a wrong argument was accepted, or refused without saying which: here the message names it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import biasflash

#: name, threads, what went wrong there, (B, M, N, Hq, Hkv, D), arguments, error, words of its message
WRONG: tuple[tuple[Any, ...], ...] = (
    (
        "mask_of_batch_and_keys",
        "facebookresearch/xformers#790, hyunwoongko/transformer#32",
        (2, 5, 7, 3, 3, 8),
        {"mask": torch.ones(2, 7, dtype=torch.bool)},
        ValueError,
        (r"mask of shape \(2, 7\)", r"mask\[:, None, None, :\]"),
    ),
    (
        "bias_padded_to_a_multiple_of_eight",
        "facebookresearch/xformers#808",
        (1, 77, 77, 2, 2, 8),
        {"bias": torch.zeros(1, 2, 77, 80)},
        ValueError,
        (r"bias of shape \(1, 2, 77, 80\)", "axis N is 80, wanted 1 or 77"),
    ),
    (
        "bias_of_a_larger_batch",
        "pytorch/pytorch#188764",
        (2, 10, 10, 2, 2, 8),
        {"bias": torch.zeros(4, 1, 10, 10)},
        ValueError,
        (r"bias of shape \(4, 1, 10, 10\)", "is 4, wanted 1 or 2"),
    ),
    (
        "queries_and_keys_of_two_widths",
        "NVIDIA/TransformerEngine#2950",
        (1, 10, 10, 2, 2, 16),
        {"q": torch.zeros(1, 10, 2, 24)},
        ValueError,
        (r"q \(1, 10, 2, 24\) and k \(1, 10, 2, 16\) differ in axis D: 24 and 16",),
    ),
    (
        "mask_per_item_without_a_head_axis",
        "pytorch/pytorch#64706, pytorch/pytorch#177482",
        (3, 12, 14, 4, 4, 8),
        {"mask": torch.ones(3, 12, 14, dtype=torch.bool)},
        ValueError,
        (r"mask of shape \(3, 12, 14\)", "axis Hq is 3, wanted 1 or 4", r"mask\[:, None\]"),
    ),
    (
        "bias_per_key_head",
        "pytorch/pytorch#177482",
        (1, 20, 20, 8, 2, 16),
        {"bias": torch.zeros(1, 2, 20, 20)},
        ValueError,
        (r"bias of shape \(1, 2, 20, 20\)", "axis Hq is 2, wanted 1 or 8"),
    ),
    (
        "tokenizer_mask_of_integers",
        "seal-rg/recurrent-pretraining#23",
        (2, 20, 20, 2, 2, 16),
        {"mask": torch.ones(2, 1, 1, 20, dtype=torch.int64)},
        TypeError,
        ("mask has dtype int64; accepted: bool", "mask != 0"),
    ),
    (
        "additive_plane_as_mask",
        "huggingface/transformers#38094, nishide-dev/unturtle#56, huggingface/transformers#48843",
        (2, 20, 20, 2, 2, 16),
        {"mask": torch.zeros(2, 1, 1, 20)},
        TypeError,
        ("mask has dtype float32; accepted: bool", "bias="),
    ),
)


@pytest.mark.parametrize(
    ("axes", "wrong", "error", "words"),
    [c[2:] for c in WRONG],
    ids=[f"{name} ({threads})" for name, threads, *_ in WRONG],
)
def test_refusal_names_the_argument(
    axes: tuple[int, ...], wrong: dict[str, torch.Tensor], error: type[Exception], words: tuple[str, ...]
) -> None:
    B, M, N, Hq, Hkv, D = axes
    given = {"q": torch.zeros(B, M, Hq, D), "k": torch.zeros(B, N, Hkv, D), "v": torch.zeros(B, N, Hkv, D)} | wrong
    for word in words:
        with pytest.raises(error, match=word):
            biasflash.attention(**given)
