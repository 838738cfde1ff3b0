"""Named problems: tests, ``biasflash check``, ``biasflash bench`` and the docs walk these lists and no others."""

from __future__ import annotations

import fnmatch
import itertools
from typing import Any

from biasflash.testing.case import DTYPES, H200, Bias, Call, Case, Ceilings, Mask, floor_ms
from biasflash.testing.long_cases import LONG
from biasflash.testing.workloads import BIG, WORKLOADS

__all__ = [
    "CASES",
    "DTYPES",
    "H200",
    "WORKLOADS",
    "Bias",
    "Call",
    "Case",
    "Ceilings",
    "Mask",
    "floor_ms",
    "select",
]


def _smoke(name: str, why: str, M: int = 37, H: int = 2, D: int = 16, **more: Any) -> Case:
    """A tiny case: one batch axis of 2, M == N, Hkv == Hq, Dv == D unless told otherwise."""
    shape: dict[str, Any] = {"batch": (2,), "M": M, "N": M, "Hq": H, "Hkv": H, "D": D, "Dv": D}
    return Case(name=name, why=why, tags=frozenset({"smoke"}), **(shape | more))


def _medium(name: str, why: str, M: int, H: int, D: int, **more: Any) -> Case:
    shape: dict[str, Any] = {"batch": (2,), "M": M, "N": M, "Hq": H, "Hkv": H, "D": D, "Dv": D}
    return Case(name=name, why=why, tags=frozenset({"check"}), **(shape | more))


def _patterns() -> list[Case]:
    """Every way in which a bias may broadcast, and the ways in which a mask usually does."""
    found = []
    for axes in itertools.product("B1", "H1", "M1", "N1"):
        shape = "".join(axes)
        found.append(
            _smoke(
                f"bias-{shape.lower()}",
                f"a trained bias of broadcast {shape}; heads in groups",
                M=21,
                N=35,
                H=4,
                Hkv=2,
                biases=(Bias(shape=shape),),
            )
        )
    fills = {
        "BHMN": "random half",
        "1HMN": "random half",
        "B11N": "key padding",
        "11MN": "window",
        "BHM1": "some rows empty",
        "B1M1": "some rows empty",
        "1111": "all",
    }
    for shape, fill in fills.items():
        found.append(
            _smoke(
                f"mask-{shape.lower()}", f"a mask of broadcast {shape}: {fill}", masks=(Mask(shape=shape, fill=fill),)
            )
        )
    return found


_SHAPES = [
    _smoke("plain", "self-attention and nothing else"),
    _smoke("cross", "decoder reads an encoder; values wider than keys", M=17, N=70, D=24, Dv=40),
    _smoke("no-batch", "one sequence, no batch axis", batch=(), biases=(Bias(shape="HMN"),)),
    _smoke("one-query", "decoding step: a single query with a bias", M=1, N=70, biases=(Bias(shape="1H1N"),)),
    _smoke("one-key", "a single key: every weight is one, dq and dk cancel to zero", N=1, biases=(Bias(shape="BHM1"),)),
    _smoke("tile-exact", "lengths that fill tiles exactly", M=64, biases=(Bias(shape="1HMN"),)),
    _smoke("tile-plus-one", "one row and one key beyond a tile", M=65, N=65, H=1, biases=(Bias(shape="1HMN"),)),
    _smoke("multi-query", "all query heads share one key head", H=4, Hkv=1, biases=(Bias(shape="1HMN"),)),
    _smoke("grouped", "three query heads to a key head", H=6, Hkv=2, M=20, N=44, masks=(Mask(shape="B11N"),)),
    _smoke("width-1", "heads of width one", M=20, D=1, biases=(Bias(shape="1HMN"),)),
    _smoke("width-33-7", "odd widths, values narrower than keys", M=20, D=33, Dv=7, biases=(Bias(shape="BHMN"),)),
    _smoke("width-80", "vision heads of width 80", M=20, D=80, biases=(Bias(shape="1HMN"),)),
    _smoke("width-192-128", "latent attention's widths", M=20, H=1, D=192, Dv=128, causal=True),
    _smoke("width-256", "the widest heads", M=20, H=1, D=256, biases=(Bias(shape="BHMN"),)),
    _smoke("no-queries", "an empty batch entry: no queries", M=0, N=8, biases=(Bias(shape="1H1N"),)),
    _smoke("no-keys", "no keys: zero output, lse of -inf", M=8, N=0, biases=(Bias(shape="BHM1"),), return_lse=True),
    _smoke("no-batch-items", "an empty batch", batch=(0,), biases=(Bias(shape="1HMN"),)),
]

_TERMS = [
    _smoke(
        "triangle",
        "triangle attention: rows of a pair matrix share a bias, each has its key mask",
        batch=(2, 3),
        M=20,
        biases=(Bias(shape="B1HMN"),),
        masks=(Mask(shape="BB11N", fill="key padding"),),
    ),
    _smoke(
        "window-mask",
        "shifted windows: a mask per window, a bias per head, both shared over images",
        batch=(2, 3),
        M=16,
        biases=(Bias(shape="HMN"),),
        masks=(Mask(shape="1B1MN", fill="window"),),
    ),
    _smoke(
        "three-biases",
        "several biases, each of its own shape and dtype, one of them frozen",
        biases=(Bias(shape="1HMN"), Bias(shape="B11N", dtype="fp32"), Bias(shape="BHMN", dtype="fp16", trained=False)),
    ),
    _smoke(
        "bias-and-masks",
        "pair bias, key padding and a band mask at once",
        biases=(Bias(shape="1HMN"),),
        masks=(Mask(shape="B11N", fill="key padding"), Mask(shape="MN", fill="window")),
    ),
    _smoke("bias-fp32", "a float32 bias table beside 16-bit activations", biases=(Bias(shape="1HMN", dtype="fp32"),)),
    _smoke("bias-bf16", "a bf16 bias beside other dtypes", biases=(Bias(shape="BHMN", dtype="bf16"),)),
    _smoke("bias-frozen", "a fixed bias: no gradient for it", biases=(Bias(shape="1HMN", trained=False),)),
    _smoke("bias-only-trained", "fine-tuning the bias alone", trained="", biases=(Bias(shape="1HMN"),)),
    _smoke(
        "value-only-trained", "only values want a gradient", trained="v", biases=(Bias(shape="1HMN", trained=False),)
    ),
    _smoke(
        "query-only-trained", "only queries want a gradient", trained="q", biases=(Bias(shape="B11N", trained=False),)
    ),
]

_ORDER = [
    _smoke("causal", "language model", causal=True, M=65, biases=(Bias(shape="1HMN"),)),
    _smoke("causal-more-keys", "a chunk of queries behind a longer past", causal=True, M=20, N=50),
    _smoke(
        "causal-fewer-keys",
        "more queries than keys: the first rows see nothing",
        causal=True,
        M=50,
        N=20,
        return_lse=True,
    ),
    _smoke(
        "causal-top-left", "diagonal from the first key", causal="top-left", M=20, N=50, biases=(Bias(shape="1HMN"),)
    ),
    _smoke(
        "causal-everything",
        "causal, bias, padding, grouped heads, scale and a gradient into lse at once",
        causal=True,
        H=4,
        Hkv=2,
        scale=0.3,
        biases=(Bias(shape="1HMN"),),
        masks=(Mask(shape="B11N", fill="key padding"),),
        return_lse=True,
    ),
    _smoke(
        "lse-gradient",
        "a loss on the log-sum-exp, as merged attention needs",
        return_lse=True,
        biases=(Bias(shape="BHMN"),),
    ),
    _smoke("scale-zero", "the bias alone decides", scale=0.0, biases=(Bias(shape="1HMN"),)),
    _smoke("scale-negative", "attention to what is least alike", scale=-0.25, biases=(Bias(shape="1HMN"),)),
]

_HOSTILE = [
    _smoke(
        "rows-empty",
        "padded queries: rows that see nothing",
        masks=(Mask(shape="BHMN", fill="some rows empty"),),
        biases=(Bias(shape="BHMN"),),
        return_lse=True,
    ),
    _smoke("all-hidden", "nothing may be seen at all", masks=(Mask(shape="1111", fill="none"),), return_lse=True),
    _smoke("bias-inf", "a bias of -inf is a mask", biases=(Bias(shape="BHMN", values="some -inf"),), return_lse=True),
    _smoke(
        "bias-lowest",
        "masks written as finfo.min: still a proper softmax",
        biases=(Bias(shape="BHMN", values="lowest"),),
    ),
    _smoke("bias-large", "scores of ten thousand", dtypes=("fp32",), biases=(Bias(shape="1HMN", values="large"),)),
    _smoke(
        "padding-nan",
        "uninitialised memory behind the padding",
        masks=(Mask(shape="B11N", fill="key padding"),),
        biases=(Bias(shape="1HMN"),),
        poison=True,
    ),
    _smoke("strides-heads-first", "(B, H, L, D) memory, as torch's own attention has it", strides="heads-first", Hkv=1),
    _smoke("strides-transposed", "the width axis is not the dense one", strides="transposed", M=20),
    _smoke("strides-sliced", "columns of a wider projection, NaN beside them", strides="sliced", M=20, D=24),
    _smoke("strides-unaligned", "storage offset of one element", strides="unaligned", M=20),
    _smoke("strides-expanded", "one sequence repeated with stride 0", strides="expanded", M=20),
    _smoke("bias-transposed", "a bias made by a transposing layer", biases=(Bias(shape="BHMN", strides="transposed"),)),
    _smoke(
        "bias-sliced", "a window of a larger bias table, NaN around it", biases=(Bias(shape="1HMN", strides="sliced"),)
    ),
    _smoke("bias-unaligned", "a bias at an odd storage offset", biases=(Bias(shape="BHMN", strides="unaligned"),)),
    _smoke(
        "bias-expanded", "a bias expanded by the caller: stride 0", biases=(Bias(shape="1HM1", strides="expanded"),)
    ),
    _smoke(
        "mask-expanded",
        "a mask expanded by the caller",
        masks=(Mask(shape="B11N", fill="key padding", strides="expanded"),),
    ),
    _smoke("mask-sliced", "a window of a larger mask", masks=(Mask(shape="11MN", strides="sliced"),)),
    _smoke(
        "dout-expanded", "out.sum().backward(): a gradient of stride 0", dout="expanded", biases=(Bias(shape="1HMN"),)
    ),
    _smoke("packed-qkv", "one projection for q, k and v", layout="qkv", biases=(Bias(shape="1HMN"),)),
    _smoke(
        "packed-kv", "one projection for k and v", layout="kv", M=20, N=50, H=4, Hkv=2, biases=(Bias(shape="B11N"),)
    ),
]

_MEDIUM = [
    _medium(
        "vit", "vision transformer with a relative-position bias", 197, 6, 64, batch=(4,), biases=(Bias(shape="1HMN"),)
    ),
    _medium(
        "swin",
        "shifted windows of 7 x 7",
        49,
        3,
        32,
        batch=(4, 16),
        biases=(Bias(shape="HMN"),),
        masks=(Mask(shape="1B1MN", fill="window"),),
    ),
    _medium("swin-144", "windows of 12 x 12", 144, 2, 32, batch=(40,), biases=(Bias(shape="1HMN"),)),
    _medium(
        "swin-144-shifted",
        "shifted windows of 12 x 12, an odd number of them",
        144,
        2,
        32,
        batch=(5, 9),
        biases=(Bias(shape="HMN"),),
        masks=(Mask(shape="1B1MN", fill="window"),),
    ),
    _medium(
        "window-130",
        "two keys more than a tile has",
        130,
        2,
        32,
        batch=(40,),
        biases=(Bias(shape="1HMN", dtype="fp32"),),
    ),
    _medium(
        "window-191", "loss on the log-sum-exp", 191, 2, 32, batch=(24,), biases=(Bias(shape="1HMN"),), return_lse=True
    ),
    _medium("window-100-wide", "windows of 10 x 10, 64 columns", 100, 2, 64, batch=(40,), biases=(Bias(shape="1HMN"),)),
    _medium(
        "window-128-wide", "windows of 128 tokens, 40 columns", 128, 2, 40, batch=(40,), biases=(Bias(shape="1HMN"),)
    ),
    _medium("window-144-full", "a bias of every window", 144, 2, 32, batch=(24,), biases=(Bias(shape="BHMN"),)),
    _medium("window-160-causal", "windows of time", 160, 2, 32, batch=(24,), causal=True, biases=(Bias(shape="1HMN"),)),
    _medium(
        "window-144-160",
        "windows that look into larger ones",
        144,
        2,
        32,
        batch=(24,),
        N=160,
        biases=(Bias(shape="1HMN"),),
    ),
    _medium(
        "window-64-144",
        "8 x 8 queries over 12 x 12 keys with padding, wide heads",
        64,
        2,
        64,
        batch=(24,),
        N=144,
        biases=(Bias(shape="1HMN"),),
        masks=(Mask(shape="B11N", fill="key padding"),),
        poison=True,
    ),
    _medium(
        "t5",
        "relative-position bias shared over the batch",
        512,
        4,
        64,
        batch=(4,),
        scale=1.0,
        biases=(Bias(shape="1HMN"),),
    ),
    _medium("t5-causal", "its decoder", 768, 4, 64, causal=True, biases=(Bias(shape="1HMN"),), return_lse=True),
    _medium(
        "triangle-medium",
        "triangle attention of a structure predictor",
        129,
        4,
        32,
        batch=(1, 24),
        biases=(Bias(shape="B1HMN"),),
        masks=(Mask(shape="BB11N", fill="key padding"),),
    ),
    _medium("pair-full", "a bias for every pair, head and item", 640, 4, 64, biases=(Bias(shape="BHMN"),)),
    _medium("pair-full-d128", "the same with wide heads", 384, 4, 128, batch=(1,), biases=(Bias(shape="BHMN"),)),
    _medium(
        "frozen-bias", "distance penalties that do not train", 1024, 4, 64, biases=(Bias(shape="1HMN", trained=False),)
    ),
    _medium("long", "a long sequence without a bias", 2048, 2, 128, batch=(1,)),
    _medium("grouped-causal", "language model with grouped heads", 777, 8, 128, Hkv=2, causal=True),
    _medium("chunked-prefill", "queries at the end of a longer context", 200, 4, 128, N=1500, Hkv=1, causal=True),
    _medium("latent", "latent attention's widths", 520, 4, 192, Dv=128, causal=True),
    _medium("wide", "the widest heads", 300, 2, 256, biases=(Bias(shape="1HMN"),)),
    _medium("width-96", "width between two powers of two", 333, 3, 96, biases=(Bias(shape="BHMN", dtype="fp32"),)),
    _medium("width-40-72", "odd widths of a diffusion model", 256, 2, 40, N=77, Dv=72, biases=(Bias(shape="B11N"),)),
    _medium(
        "object-queries", "few queries over many pixels, a mask each", 100, 4, 32, N=4096, masks=(Mask(shape="BHMN"),)
    ),
    _medium(
        "padding",
        "padded batch with uninitialised memory behind the padding",
        512,
        4,
        64,
        batch=(4,),
        masks=(Mask(shape="B11N", fill="key padding"),),
        poison=True,
    ),
    _medium(
        "rows-empty-medium",
        "padded queries and keys",
        300,
        4,
        64,
        masks=(Mask(shape="B1MN", fill="some rows empty"),),
        biases=(Bias(shape="1HMN", dtype="fp32"),),
        return_lse=True,
    ),
    _medium(
        "row-and-key-biases",
        "biases of one axis each: long reductions",
        700,
        4,
        64,
        batch=(3,),
        biases=(Bias(shape="1HM1"), Bias(shape="B11N"), Bias(shape="1H11", dtype="fp32")),
    ),
    _medium(
        "many-items", "a bias gradient summed over a large batch", 96, 2, 32, batch=(96,), biases=(Bias(shape="11MN"),)
    ),
    _medium("packed", "one projection, one packed gradient", 450, 4, 64, layout="qkv", biases=(Bias(shape="1HMN"),)),
    _medium(
        "heads-first",
        "torch's own memory order, a sliced bias",
        450,
        4,
        64,
        strides="heads-first",
        biases=(Bias(shape="1HMN", strides="sliced"),),
    ),
]

#: every case by name
CASES: dict[str, Case] = {
    case.name: case
    for case in [*_patterns(), *_SHAPES, *_TERMS, *_ORDER, *_HOSTILE, *_MEDIUM, *LONG, *WORKLOADS.values(), *BIG]
}


def select(wanted: str) -> list[Case]:
    """Cases whose name or tag matches any of the comma-separated words, each of which may be a glob.

    Raises:
        ValueError: a word matches nothing; the message lists the tags.
    """
    words = [word.strip() for word in wanted.split(",") if word.strip()]
    found: dict[str, Case] = {}
    for word in words:
        hits = {
            name: case
            for name, case in CASES.items()
            if word == "all" or word in case.tags or fnmatch.fnmatchcase(name, word)
        }
        if not hits:
            tags = ", ".join(sorted({tag for case in CASES.values() for tag in case.tags}))
            raise ValueError(f"no case has the name or tag {word!r}; tags: {tags}; or a glob such as 'bias-*'")
        found |= hits
    return list(found.values())
