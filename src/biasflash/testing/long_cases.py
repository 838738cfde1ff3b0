"""Named problems of a few hundred queries and keys in 16 bits: several tiles of the largest kernels on both axes."""

from __future__ import annotations

from typing import Any

from biasflash.testing.case import Bias, Case, Mask


def _long(name: str, why: str, M: int = 260, N: int = 264, H: int = 2, D: int = 64, **more: Any) -> Case:
    """Past one tile of the largest kernels on both axes; 16 bits, since float32 takes the small ones' way."""
    shape: dict[str, Any] = {"batch": (2,), "M": M, "N": N, "Hq": H, "Hkv": H, "D": D, "Dv": D}
    return Case(name=name, why=why, tags=frozenset({"check"}), dtypes=("fp16", "bf16"), **(shape | more))


def _keys(fill: str = "key padding", shape: str = "B11N") -> tuple[Mask, ...]:
    return (Mask(shape=shape, fill=fill),)


_FULL, _SHARED = (Bias(shape="BHMN"),), (Bias(shape="1HMN"),)
_FIXED = (Bias(shape="BHMN", trained=False),)

#: masks of keys, alone and beside a bias; ``poison``: NaN in hidden keys and values
_KEYS: list[Case] = [
    _long("keys-one-tile", "every hidden key in the first tile", M=130, N=193, masks=_keys(), poison=True),
    _long("keys-padding", "a batch of many lengths", M=333, N=700, batch=(5,), masks=_keys(), poison=True),
    _long("keys-padding-32", "the same, narrow", M=200, N=520, D=32, batch=(5,), masks=_keys(), poison=True),
    _long("keys-padding-128", "the same, wide", M=200, N=513, D=128, batch=(5,), masks=_keys(), poison=True),
    _long("keys-padding-256", "the widest heads", M=140, N=300, D=256, masks=_keys(), poison=True),
    _long("keys-left", "padding on the left", N=500, batch=(5,), masks=_keys("left padding"), poison=True),
    _long(
        "keys-left-causal",
        "rows that causality and padding leave nothing",
        M=400,
        N=400,
        batch=(5,),
        causal=True,
        masks=_keys("left padding"),
        poison=True,
        return_lse=True,
    ),
    _long("keys-random", "holes in every tile", M=333, N=700, masks=_keys("random half"), poison=True),
    _long("keys-none", "no key at all", masks=_keys("none"), poison=True, return_lse=True),
    _long("keys-fit", "hidden keys that may enter products", M=333, N=700, masks=_keys("random half")),
    _long("keys-fit-128", "the same, wide, causal, grouped", N=520, D=128, H=6, Hkv=2, causal=True, masks=_keys()),
    _long("keys-fit-256", "the same, the widest heads", M=140, N=300, D=256, masks=_keys("random half")),
    _long("keys-fit-full", "and a bias for each item", N=520, biases=_FULL, masks=_keys("random half")),
    _long("keys-fit-shared", "and a shared one", N=712, batch=(6,), biases=_SHARED, masks=_keys("random half")),
    _long("keys-fit-shared-128", "the same, wide", N=520, D=128, batch=(4,), biases=_SHARED, masks=_keys()),
    _long("keys-every", "every key, in the last tile none past the end", M=300, N=333, masks=_keys("all")),
    _long("keys-causal", "more keys than queries", M=257, N=1000, D=128, causal=True, masks=_keys(), poison=True),
    _long("keys-causal-rows", "more queries than keys", M=700, N=264, causal=True, masks=_keys(), poison=True),
    _long("keys-grouped", "grouped heads, causal", M=300, N=520, H=6, Hkv=2, causal=True, masks=_keys(), poison=True),
    _long("keys-item", "one mask for all items", N=600, batch=(3,), masks=_keys(shape="111N"), poison=True),
    _long(
        "keys-axes",
        "two batch axes, a mask along the second",
        batch=(2, 3),
        masks=_keys(shape="1B11N"),
        poison=True,
    ),
    _long("keys-axes-first", "along the first", D=32, batch=(3, 2), masks=_keys(shape="B111N"), poison=True),
    _long("keys-full", "a bias for each item", N=520, biases=_FULL, masks=_keys(), poison=True),
    _long("keys-full-128", "the same, wide, causal", D=128, causal=True, biases=_FULL, masks=_keys(), poison=True),
    _long("keys-shared-32", "pairs of items of two lengths", D=32, batch=(6,), biases=_SHARED, masks=_keys()),
    _long("keys-shared-64", "the same, wider", N=712, batch=(6,), biases=_SHARED, masks=_keys(), poison=True),
    _long("keys-shared-128", "the same, wide", N=520, D=128, batch=(4,), biases=_SHARED, masks=_keys(), poison=True),
    _long("keys-shared-odd", "an odd number of items", batch=(5,), biases=_SHARED, masks=_keys(), poison=True),
    _long(
        "keys-shared-random",
        "holes beside a shared bias",
        N=520,
        D=32,
        batch=(4,),
        biases=_SHARED,
        masks=_keys("random half"),
        poison=True,
    ),
    _long(
        "keys-shared-causal",
        "a shared bias, causal, padding on the left",
        M=300,
        N=400,
        batch=(4,),
        causal=True,
        biases=_SHARED,
        masks=_keys("left padding"),
        poison=True,
    ),
    _long(
        "keys-shared-causal-32",
        "the same, narrow",
        M=300,
        N=400,
        D=32,
        batch=(4,),
        causal=True,
        biases=_SHARED,
        masks=_keys(),
        poison=True,
    ),
    _long(
        "keys-shared-none",
        "no key at all, a shared bias",
        batch=(4,),
        biases=_SHARED,
        masks=_keys("none"),
        poison=True,
    ),
    _long(
        "keys-triangle",
        "rows of a pair matrix, each with its length",
        N=384,
        M=384,
        D=32,
        H=4,
        batch=(2, 4),
        biases=(Bias(shape="B1HMN"),),
        masks=_keys(shape="BB11N"),
        poison=True,
    ),
]

#: biases whose rows bulk copies cannot read: copied first where many share them, else read as lines of eight rows
_ROWS: list[Case] = [
    _long("rows-odd-64", "a class token beside 16 x 16 patches", M=257, N=257, batch=(6,), biases=_SHARED),
    _long("rows-odd-32", "the same, narrow", M=333, N=333, D=32, batch=(6,), biases=_SHARED),
    _long("rows-odd-128", "the same, wide, causal", M=300, N=333, D=128, batch=(4,), causal=True, biases=_SHARED),
    _long("rows-odd-axes", "two batch axes", N=301, D=32, batch=(2, 4), H=2, biases=(Bias(shape="B1HMN"),)),
    _long("rows-odd-keys", "and a mask of keys", N=301, batch=(4,), biases=_SHARED, masks=_keys(), poison=True),
    _long("rows-sliced", "a slice of a larger bias", batch=(4,), biases=(Bias(shape="1HMN", strides="sliced"),)),
    _long("rows-full-64", "one for each item, rows that fill no line at the end", M=333, N=301, biases=_FULL),
    _long("rows-full-32", "the same, narrow", M=257, N=257, D=32, biases=_FULL),
    _long("rows-full-128", "the same, wide, causal", M=301, N=333, D=128, causal=True, biases=_FULL),
    _long("rows-full-80", "the same, a width between", M=200, N=203, D=80, biases=_FULL, return_lse=True),
    _long("rows-full-twos", "rows of an even length", M=270, N=302, biases=_FULL),
    _long("rows-full-fours", "rows in steps of 8 bytes", M=270, N=300, D=128, biases=_FULL),
    _long("rows-full-fixed-64", "a fixed one for each item", M=333, N=301, biases=_FIXED),
    _long("rows-full-fixed-32", "fixed, narrow", M=257, N=257, D=32, biases=_FIXED),
    _long("rows-full-fixed-128", "fixed, wide", M=301, N=333, D=128, biases=_FIXED),
    _long("rows-full-causal", "more queries than keys", M=700, N=265, causal=True, biases=_FULL),
    _long("rows-full-top-left", "the other alignment", M=300, N=521, causal="top-left", biases=_FULL),
    _long("rows-full-grouped", "grouped heads", M=333, N=301, H=6, Hkv=2, biases=_FULL),
    _long("rows-full-axes", "two batch axes", M=130, N=199, batch=(2, 3), biases=(Bias(shape="BBHMN"),)),
    _long("rows-full-keys", "and a mask of keys", M=333, N=601, biases=_FULL, masks=_keys(), poison=True),
    _long("rows-full-inf", "rows and entries of -inf", M=300, N=301, biases=(Bias(shape="BHMN", values="some -inf"),)),
    _long("rows-full-lowest", "finfo.min", M=300, N=301, biases=(Bias(shape="BHMN", values="lowest"),)),
    _long("rows-full-item", "one for each item, all heads", M=300, N=301, biases=(Bias(shape="B1MN", trained=False),)),
]


def _float32(shape: str = "1HMN", **more: Any) -> tuple[Bias, ...]:
    return (Bias(shape=shape, dtype="fp32", **more),)


#: a float32 bias beside 16 bits, as ``torch.autocast`` leaves it
_FLOAT32: list[Case] = [
    _long("f32-full-32", "a bias for each item, narrow", N=520, D=32, biases=_float32("BHMN")),
    _long("f32-full-64", "the same, wider, rows in steps of 16 bytes alone", M=333, N=516, biases=_float32("BHMN")),
    _long("f32-full-128", "the same, wide", N=516, D=128, biases=_float32("BHMN")),
    _long("f32-full-fixed-32", "the same, fixed", N=520, D=32, biases=_float32("BHMN", trained=False)),
    _long("f32-full-fixed-64", "fixed, wider", M=333, N=516, biases=_float32("BHMN", trained=False)),
    _long("f32-full-fixed-128", "fixed, wide", N=516, D=128, biases=_float32("BHMN", trained=False)),
    _long("f32-full-causal", "more keys than queries", M=300, N=708, causal=True, biases=_float32("BHMN")),
    _long("f32-full-causal-32", "more queries than keys", M=700, N=264, D=32, causal=True, biases=_float32("BHMN")),
    _long("f32-full-causal-128", "the same, wide", M=520, N=264, D=128, causal=True, biases=_float32("BHMN")),
    _long("f32-grouped", "grouped heads", H=4, Hkv=2, biases=_float32("BHMN"), return_lse=True),
    _long("f32-shared-32", "pairs of items around a bias tile", M=333, N=712, D=32, batch=(6,), biases=_float32()),
    _long("f32-shared-64", "the same, wider", M=333, N=712, batch=(6,), biases=_float32()),
    _long("f32-shared-128", "the same, wide", M=333, N=712, D=128, batch=(4,), biases=_float32()),
    _long("f32-shared-odd", "an odd number of items", N=520, batch=(5,), biases=_float32(), return_lse=True),
    _long("f32-shared-fixed", "a fixed one", N=520, D=32, batch=(4,), biases=_float32(trained=False)),
    _long("f32-shared-causal-32", "narrow, causal", M=400, N=400, D=32, batch=(4,), causal=True, biases=_float32()),
    _long("f32-shared-causal-64", "causal, wider", M=300, N=520, batch=(4,), causal=True, biases=_float32()),
    _long("f32-shared-causal-128", "causal, wide", M=520, D=128, batch=(4,), causal=True, biases=_float32()),
    _long("f32-axes", "two batch axes, a bias along the first", D=32, batch=(2, 4), biases=_float32("B1HMN")),
    _long("f32-axes-second", "along the second", batch=(3, 2), biases=_float32("1BHMN")),
    _long("f32-heads", "a bias shared by heads", M=500, N=648, H=3, biases=_float32("B1MN")),
    _long("f32-keys-full", "and a mask of keys", N=520, biases=_float32("BHMN"), masks=_keys(), poison=True),
    _long("f32-keys-32", "shared, narrow", N=520, D=32, batch=(6,), biases=_float32(), masks=_keys(), poison=True),
    _long("f32-keys-64", "one for all items", N=712, batch=(6,), biases=_float32(), masks=_keys(), poison=True),
    _long("f32-keys-128", "shared, wide", N=520, D=128, batch=(4,), biases=_float32(), masks=_keys(), poison=True),
    _long("f32-odd-64", "rows that are copied first", M=257, N=257, batch=(6,), biases=_float32()),
    _long("f32-odd-32", "the same, narrow", M=333, N=333, D=32, batch=(6,), biases=_float32()),
    _long("f32-odd-128", "the same, wide, causal", N=333, D=128, batch=(4,), causal=True, biases=_float32()),
    _long("f32-sliced", "a slice of a larger bias", batch=(4,), biases=_float32(strides="sliced")),
    _long("f32-lowest", "masks written as finfo.min", biases=_float32("BHMN", values="lowest"), return_lse=True),
    _long("f32-shared-lowest", "the same for all items", batch=(4,), biases=_float32(values="lowest")),
    _long("f32-shared-inf", "a bias of -inf", batch=(4,), D=32, biases=_float32(values="some -inf")),
    _long("f32-spread", "scores of a row spread by hundreds", batch=(4,), scale=9.0, biases=_float32()),
]

#: heads wider than 128
_WIDE: list[Case] = [
    _long("wide-256", "the widest, one tile of queries", M=128, N=192, D=256),
    _long("wide-256-odd", "no length fills its tiles", M=333, N=457, D=256),
    _long("wide-256-causal", "more queries than keys", M=500, N=300, D=256, causal=True),
    _long("wide-256-grouped", "grouped heads", M=200, N=264, H=4, Hkv=1, D=256, causal=True),
    _long("wide-latent", "latent attention", M=400, N=520, D=192, Dv=128, causal=True, return_lse=True),
    _long("wide-latent-odd", "the same, not causal", M=333, N=457, D=192, Dv=128),
    _long("wide-latent-grouped", "the same, grouped", M=300, N=300, H=8, Hkv=2, D=192, Dv=128, causal=True),
    _long("wide-192", "equal widths", M=257, N=400, D=192, causal=True),
    _long("wide-160", "columns that fill no piece", M=257, N=400, D=160),
    _long("wide-keys", "keys wider than values", M=257, N=300, D=136, Dv=64),
    _long("wide-values", "values wider than keys", M=257, N=300, D=64, Dv=200, causal=True),
    _long("wide-queries", "queries alone are trained", D=256, trained="q"),
    _long("wide-keys-alone", "keys and values alone are trained", D=192, Dv=128, trained="kv"),
]

#: every one is part of ``biasflash check`` on a GPU
LONG: list[Case] = [
    _long("long-plain", "no length fills its tiles", M=333, N=257),
    _long("long-cross", "few queries, three key tiles", M=130, N=400, D=32),
    _long("long-grouped", "grouped heads with a bias for all items", H=6, Hkv=2, biases=(Bias(shape="1HMN"),)),
    _long("long-fixed", "a fixed bias for each item", M=600, N=712, biases=_FIXED),
    _long("long-fixed-32", "the same, narrow", M=300, N=520, D=32, biases=_FIXED, return_lse=True),
    _long("long-fixed-grouped", "the same, grouped heads", H=4, Hkv=2, biases=_FIXED),
    _long("long-fixed-inf", "-inf in a fixed bias", biases=(Bias(shape="BHMN", values="some -inf", trained=False),)),
    _long("long-grouped-full", "grouped heads, a bias for each item", H=4, Hkv=2, D=128, biases=(Bias(shape="BHMN"),)),
    _long("long-causal-more-keys", "queries at the end of a past", M=257, N=1000, D=128, causal=True),
    _long("long-causal-fewer-keys", "whole tiles see nothing", M=700, N=264, causal=True, return_lse=True),
    _long("long-causal-top-left", "the diagonal from the first key", M=300, N=520, causal="top-left"),
    _long("long-causal-full", "a causal bias for each item", M=200, N=328, causal=True, biases=(Bias(shape="BHMN"),)),
    _long(
        "long-causal-shared",
        "causal, a bias for all items, more queries than keys",
        M=520,
        N=264,
        D=32,
        causal=True,
        biases=(Bias(shape="1HMN"),),
    ),
    _long("long-shared", "pairs of items around one bias tile", M=333, D=32, batch=(6,), biases=(Bias(shape="1HMN"),)),
    _long("long-shared-odd", "an odd number of items", M=333, batch=(5,), biases=(Bias(shape="1HMN"),)),
    _long("long-shared-heads", "a bias shared by heads", M=500, N=648, H=3, D=32, biases=(Bias(shape="B1MN"),)),
    _long("long-shared-all", "a bias shared by items and heads", D=128, H=3, biases=(Bias(shape="11MN"),)),
    _long(
        "long-triangle", "rows of a pair matrix share a bias", D=32, batch=(2, 3), biases=(Bias(shape="B1HMN"),), H=4
    ),
    _long("long-triangle-pairs", "pairs of rows around a bias tile", D=32, batch=(2, 4), biases=(Bias(shape="B1HMN"),)),
    _long("long-windows", "a bias for each window", D=32, batch=(3, 2), biases=(Bias(shape="1BHMN"),)),
    _long("long-widths", "values wider than keys", D=48, Dv=80, biases=(Bias(shape="1HMN"),)),
    _long("long-width-96", "a width between two tiles", D=96, causal=True),
    _long("long-latent", "latent attention's widths", D=192, Dv=128, biases=(Bias(shape="BHMN"),)),
    _long("long-widest", "the widest heads, causal", D=256, causal=True),
    _long(
        "long-frozen",
        "a fixed bias, keys that want no gradient",
        trained="qv",
        biases=(Bias(shape="1HMN", trained=False),),
    ),
    _long("long-bias-only", "the bias alone is trained", trained="", biases=(Bias(shape="1HMN"),)),
    _long("long-bias-only-full", "a full bias alone is trained", trained="", biases=(Bias(shape="BHMN"),)),
    _long("long-lse", "a gradient into lse", D=128, return_lse=True, biases=(Bias(shape="1HMN"),)),
    _long("long-bias-inf", "a bias of -inf", biases=(Bias(shape="BHMN", values="some -inf"),), return_lse=True),
    _long(
        "long-shared-inf", "the same for all items", batch=(4,), D=32, biases=(Bias(shape="1HMN", values="some -inf"),)
    ),
    _long("long-lowest", "masks written as finfo.min", biases=(Bias(shape="BHMN", values="lowest"),), return_lse=True),
    _long("long-shared-lowest", "the same for all items", batch=(4,), biases=(Bias(shape="1HMN", values="lowest"),)),
    _long("long-shared-lowest-32", "the same, narrow", batch=(4,), D=32, biases=(Bias(shape="1HMN", values="lowest"),)),
    _long("long-spread", "scores of a row spread by hundreds", batch=(4,), scale=9.0, biases=(Bias(shape="1HMN"),)),
    _long("long-spread-32", "the same, narrow", batch=(4,), D=32, scale=12.0, biases=(Bias(shape="1HMN"),)),
    _long("long-negative-scale", "what is least alike", scale=-0.2, biases=(Bias(shape="1HMN"),)),
    _long("long-sliced", "NaN beside every tensor", strides="sliced", biases=(Bias(shape="1HMN", strides="sliced"),)),
    _long("long-expanded", "one sequence repeated with stride 0", strides="expanded"),
    _long("long-packed", "one packed gradient", M=264, layout="qkv", biases=(Bias(shape="BHMN"),)),
    _long("long-packed-kv", "one projection for k and v", H=4, Hkv=2, layout="kv", causal=True),
    *_KEYS,
    *_ROWS,
    *_FLOAT32,
    *_WIDE,
]
