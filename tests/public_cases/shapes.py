"""Layouts of q, k, v and of the incoming gradient, odd lengths and widths, alignments, grouped heads."""

from __future__ import annotations

import torch

from public_cases.case import BF16, F16, Book, Built, Draw, Leaves, Results, lower_triangle

case = Book()
CASES = case.cases

# -------------------------------------------------------------------------------------------------- layouts of q, k, v


@case(
    "ROCm/flash-attention#122", wrong="dq was written with q's strides though q is a view of a packed tensor", big=True
)
def views_of_one_projection(draw: Draw) -> Built:
    def view(t: Leaves) -> dict[str, torch.Tensor]:
        q, k, v = t["qkv"].unbind(2)
        return {"q": q, "k": k, "v": v, "bias": t["bias"]}

    return Built(leaves={"qkv": draw(2, 197, 3, 3, 64, dtype=F16), "bias": draw(1, 3, 197, 197, dtype=F16)}, view=view)


@case("flagos-ai/FlagAttention#46", wrong="keys were addressed with the strides of the values")
def keys_and_values_of_different_strides(draw: Draw) -> Built:
    leaves = draw.qkv(2, 33, 40, 2, 32, dtype=F16) | {"k": draw(2, 80, 2, 32, dtype=F16)}
    return Built(leaves=leaves, view=lambda t: t | {"k": t["k"][:, ::2]})


@case("pytorch/pytorch#181133", "PriorLabs/TabPFN#888", wrong="three rows and three heads: swapped axes went unnoticed")
def as_many_rows_as_heads(draw: Draw) -> Built:
    leaves = {name: draw(84, 3, 3, 64) for name in "qkv"}
    return Built(leaves=leaves, view=lambda t: {name: x.transpose(1, 2) for name, x in t.items()})


@case("pytorch/pytorch#191085", wrong="one key head expanded to all: refused, or its gradient not summed")
def key_head_expanded_by_stride_zero(draw: Draw) -> Built:
    leaves = draw.qkv(2, 30, 30, 5, 32, Hkv=1, dtype=BF16)
    return Built(leaves=leaves, view=lambda t: t | {n: t[n].expand(2, 30, 5, 32) for n in "kv"})


# --------------------------------------------------------------------------------------------- the incoming gradient


@case(
    "fla-org/flash-linear-attention#1138", "ROCm/TransformerEngine#623", wrong="the gradient of out.sum() has strides 0"
)
def gradient_of_a_sum(draw: Draw) -> Built:
    return Built(leaves=draw.qkv(2, 29, 29, 2, 16) | {"bias": draw(1, 2, 29, 29)}, dout="ones")


@case("pytorch/pytorch#194719", wrong="a gradient that is half of a concatenation was read with the wrong batch stride")
def gradient_of_a_concatenation(draw: Draw) -> Built:
    return Built(leaves=draw.qkv(3, 31, 37, 2, 16), dout="half_of_a_concatenation")


# ---------------------------------------------------------------------------------------------------------- odd shapes


@case("Dao-AILab/flash-attention: notes in flash_attn_triton.py", wrong="late keys that no query sees spoilt backward")
def keys_beyond_the_triangle(draw: Draw) -> Built:
    leaves = draw.qkv(1, 113, 255, 2, 64, dtype=F16) | {"bias": draw(1, 2, 113, 255, dtype=F16)}
    return Built(leaves=leaves, mask=lower_triangle(113, 255, draw.device))


def _one_key_takes_all(built: Built, got: Results) -> None:
    assert torch.equal(got["out"], built.leaves["v"])
    for name in ("q", "k", "bias"):
        assert got[name].abs().max() < 3e-2, name


@case("Dao-AILab/flash-attention#334", wrong="one query and one key: dq was NaN", then=_one_key_takes_all)
def one_query_one_key(draw: Draw) -> Built:
    leaves = {name: draw(1, 1, 1, 16, dtype=F16, size=3.0) for name in "qkv"}
    return Built(leaves=leaves | {"bias": draw(1, 1, 1, 1, dtype=F16)})


@case(
    "jax-ml/jax#23819", "jax-ml/jax#27224", wrong="lengths off the tile grid: NaN at first, then slightly off", big=True
)
def two_tiles_and_four_rows(draw: Draw) -> Built:
    return Built(leaves=draw.qkv(1, 260, 260, 2, 32))


@case("Dao-AILab/flash-attention#1159", "pytorch/pytorch#195812", wrong="a branch that got no sample raised")
def batch_of_none(draw: Draw) -> Built:
    return Built(leaves=draw.qkv(0, 33, 16, 10, 64, dtype=F16) | {"bias": draw(1, 10, 33, 16, dtype=F16)})


@case("pytorch/pytorch#174950", wrong="a segment without queries ended the process")
def no_queries(draw: Draw) -> Built:
    return Built(leaves=draw.qkv(2, 0, 13, 3, 16, dtype=BF16), causal=True)


@case("pytorch/pytorch#108503", wrong="packed sequences with a gap differed from attending them one by one", big=True)
def documents_with_a_gap(draw: Draw) -> Built:
    mask = torch.zeros(600, 600, dtype=torch.bool, device=draw.device)
    for start, end in ((0, 128), (128, 256), (256, 384), (543, 600)):
        mask[start:end, start:end] = True
    return Built(leaves=draw.qkv(1, 600, 600, 2, 80, dtype=BF16), mask=mask)


# -------------------------------------------------------------------------------------------------------------- widths


@case("triton-lang/triton#621", wrong="of 128 channels only the first 64 were used")
def width_of_128(draw: Draw) -> Built:
    return Built(leaves=draw.qkv(2, 64, 64, 2, 128, dtype=F16))


@case("66RING/tiny-flash-attention#12", wrong="an odd width was wrong")
def width_of_63(draw: Draw) -> Built:
    return Built(leaves=draw.qkv(1, 65, 65, 3, 63, dtype=F16) | {"bias": draw(1, 1, 65, 65, dtype=F16)})


@case("XunhaoLai/native-sparse-attention-triton#27", wrong="values wider than keys lost channels in backward")
def values_wider_than_keys(draw: Draw) -> Built:
    return Built(leaves=draw.qkv(2, 50, 50, 2, 40, Dv=72, dtype=F16) | {"bias": draw(1, 2, 50, 50, dtype=F16)})


@case(
    "Dao-AILab/flash-attention#541",
    "meta-pytorch/attention-gym#14",
    wrong="backward at width 256 ran out of shared memory",
)
def width_of_256(draw: Draw) -> Built:
    return Built(leaves=draw.qkv(1, 48, 48, 2, 256) | {"bias": draw(1, 2, 48, 48)})


@case("zzd1992/FlashWindowAttention#4", wrong="30 channels per head were not accepted", big=True)
def width_of_30(draw: Draw) -> Built:
    return Built(leaves=draw.qkv(4, 64, 64, 6, 30, dtype=F16) | {"bias": draw(1, 6, 64, 64, dtype=F16)})


# ------------------------------------------------------------------------------------------ causal with M not equal N


def _newest_query_sees_all(built: Built, got: Results) -> None:
    assert (got["v"].abs().amax((0, 2, 3)) > 0).all()


@case(
    "pytorch/pytorch#144858",
    "pytorch/pytorch#103082",
    "lucidrains/x-transformers#187",
    wrong="one new query with a cache of eight keys saw only the oldest",
    then=_newest_query_sees_all,
)
def decoding_with_a_cache(draw: Draw) -> Built:
    return Built(leaves=draw.qkv(1, 1, 8, 2, 16), causal=True)


def _first_forty_rows_are_dead(_: Built, got: Results) -> None:
    for name in ("out", "q"):
        assert not got[name][:, :40].any(), name
    assert not got["bias"][:, :, :40].any()
    assert got["out"][:, 40:].any()


@case(
    "Dao-AILab/flash-attention#1778",
    "Dao-AILab/flash-attention#20",
    wrong="more queries than keys: illegal access or NaN in the rows that see nothing",
    then=_first_forty_rows_are_dead,
)
def more_queries_than_keys(draw: Draw) -> Built:
    leaves = draw.qkv(1, 70, 30, 2, 16, dtype=BF16) | {"bias": draw(1, 2, 70, 30, dtype=BF16)}
    return Built(leaves=leaves, causal=True)


def _no_future(built: Built, got: Results) -> None:
    assert not got["bias"].triu(1).any()


@case(
    "huggingface/transformers#48748",
    "jingyaogong/minimind#453",
    wrong="giving a bias switched causality off",
    then=_no_future,
)
def causal_and_bias_together(draw: Draw) -> Built:
    return Built(leaves=draw.qkv(2, 36, 36, 4, 16) | {"bias": draw(2, 4, 36, 36)}, causal=True)


# -------------------------------------------------------------------------------------------------------- grouped heads


@case("triton-lang/triton#4469", wrong="gradients of keys and values shared by several heads were wrong")
def four_heads_to_a_key_head(draw: Draw) -> Built:
    leaves = draw.qkv(2, 45, 45, 8, 32, Hkv=2, dtype=BF16) | {"bias": draw(1, 8, 45, 45, dtype=BF16)}
    return Built(leaves=leaves)


@case("onnx/onnx#7274", wrong="heads were tiled instead of repeated, so queries met the wrong key head")
def key_heads_that_differ_much(draw: Draw) -> Built:
    leaves = draw.qkv(1, 26, 50, 6, 16, Hkv=2) | {"bias": draw(1, 6, 1, 50)}
    leaves["v"][:, :, 1] += 5.0
    return Built(leaves=leaves)
