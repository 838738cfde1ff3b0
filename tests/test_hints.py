"""What messages tell a caller to write: taken at its word it is an argument of that door, or makes the call work."""

from __future__ import annotations

import inspect
import random
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

import biasflash
from biasflash import hints, problem

WORDS: dict[str, dict[str, str]] = {
    "attention": hints.OWN,
    "attention_qkvpacked": hints.OWN,
    "attention_kvpacked": hints.OWN,
    "explain": hints.OWN,
    "scaled_dot_product_attention": hints.TORCH,
    "flash_attention_fn": hints.HISTORIC,
    "flash_attention_qkvpacked_fn": hints.HISTORIC,
}
OTHER = "at biasflash.attention "


def arguments_of(door: Callable[..., Any]) -> set[str]:
    return {p.name for p in inspect.signature(door).parameters.values() if p.kind is not p.VAR_KEYWORD}


def told(door: str, name: str) -> str:
    """What a door says of an argument that it does not have."""
    q = torch.zeros(1, 2, 3, 1, 4) if "qkv" in door else torch.zeros(1, 2, 2, 1, 4)
    tensors = [q] if "qkv" in door else [torch.zeros(1, 2, 1, 4), q] if "kv" in door else [torch.zeros(1, 2, 1, 4)] * 3
    with pytest.raises(TypeError) as caught:
        getattr(biasflash, door)(*tensors, **{name: True})
    found = re.fullmatch(rf"biasflash\.{door} has no argument {name}: (.*)", str(caught.value))
    assert found, caught.value
    return found[1]


@pytest.mark.parametrize("door", WORDS)
def test_what_a_door_says_to_write_is_an_argument_of_it(door: str) -> None:
    own, attention = arguments_of(getattr(biasflash, door)), arguments_of(biasflash.attention)
    names = (hints.OWN.keys() | WORDS[door].keys()) - own
    assert len(names) > 15
    for name in names:
        way = told(door, name)
        way = way.partition(", or call biasflash.attention")[0]
        taken = attention if way.startswith((OTHER, "call biasflash.attention")) else own
        assert set(re.findall(r"\b([a-z_]+)=", way)) <= taken, (door, name, way)
        assert not (way.startswith(OTHER) and taken <= own), "it takes all of that itself"


@pytest.mark.parametrize(
    ("door", "name", "way"),
    [
        ("attention", "attn_bias", "write bias="),
        ("attention_qkvpacked", "return_softmax_lse", "write return_lse=True"),
        ("attention_kvpacked", "dropout_p", "it takes q, kv, bias, mask, causal, scale, return_lse, backend"),
        ("explain", "return_softmax_lse", "at biasflash.attention write return_lse=True"),
        ("explain", "return_lse", "it takes q, k, v, bias, mask, causal, scale, backend"),
        ("scaled_dot_product_attention", "sm_scale", "write scale="),
        (
            "scaled_dot_product_attention",
            "attention_mask",
            "write attn_mask= (a boolean one, True = may attend, or floats that are added)",
        ),
        (
            "scaled_dot_product_attention",
            "alibi_slopes",
            "write attn_mask= of minus slope times distance, (1, Hq, M, N)",
        ),
        ("flash_attention_fn", "attn_bias", "write bias="),
        ("flash_attention_fn", "attn_mask", "write bias=, which takes a boolean mask (True = may attend), too"),
        ("flash_attention_qkvpacked_fn", "softmax_scale", "write sm_scale="),
        ("flash_attention_qkvpacked_fn", "return_softmax_lse", "at biasflash.attention write return_lse=True"),
    ],
)
def test_what_a_door_says_word_by_word(door: str, name: str, way: str) -> None:
    assert told(door, name) == way


def test_no_door_has_words_for_an_argument_that_it_takes() -> None:
    for door, words in WORDS.items():
        spare = words.keys() & arguments_of(getattr(biasflash, door))
        assert words is hints.OWN or not spare, (door, spare)


def test_heads_before_lengths_is_said_where_it_makes_the_call_work() -> None:
    draw = random.Random(0)
    said = 0
    for _ in range(4000):
        B, x, y, n, m = 2, *(draw.choice((1, 2, 4, 6, 8)) for _ in range(4))
        q, k = torch.zeros(B, x, y, 4), torch.zeros(B, n, m, 4)
        shape = [
            draw.choice((1, size)) for size in (B, draw.choice((x, y)), draw.choice((x, y)), draw.choice((n, m, 7)))
        ]
        mask = torch.ones(shape[draw.choice((0, 1)) :], dtype=torch.bool)
        try:
            biasflash.attention(q, k, k, mask=mask, backend="cpu")
        except ValueError as error:
            if "it would fit with heads before lengths" in str(error):
                said += 1
                biasflash.scaled_dot_product_attention(q, k, k, mask, enable_gqa=True)
    assert said > 50


def test_of_what_is_no_number_nothing_is_said_to_write() -> None:
    for value in (torch.ones(4), float, "0.5", True):
        with pytest.raises(TypeError) as caught:
            problem.check_scale(value)
        assert "write float" not in str(caught.value)
    with pytest.raises(TypeError, match=r"write float\(scale\)"):
        problem.check_scale(torch.tensor(0.5))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_a_nested_tensor_is_told_how_to_be_padded(layout: torch.layout) -> None:
    nested = torch.nested.nested_tensor([torch.zeros(3, 2, 4), torch.zeros(5, 2, 4)], layout=layout)
    with pytest.raises(TypeError, match=r"q has layout .*, nested; .*write torch.nested.to_padded_tensor\(q, 0.0\)"):
        biasflash.attention(nested, nested, nested)
