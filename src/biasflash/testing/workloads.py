"""The timed workloads, exactly as the performance tables state them, and the cases that need a big GPU."""

from __future__ import annotations

from typing import Any

from biasflash.testing.case import Bias, Case, Mask

_FULL, _SHARED = Bias(shape="BHMN"), Bias(shape="1HMN")


def _workload(name: str, why: str, B: int, H: int, M: int, D: int, **more: Any) -> Case:
    shape: dict[str, Any] = {"batch": (B,), "M": M, "N": M, "Hq": H, "Hkv": H, "D": D, "Dv": D}
    return Case(name=name, why=why, tags=frozenset({"workload"}), **(shape | more))


_TIMED = [
    _workload("plain-d128-4k", "no bias, wide heads", 4, 16, 4096, 128),
    _workload("plain-d64-4k", "no bias, narrow heads", 4, 32, 4096, 64),
    _workload("causal-d128-16k", "language model, long context", 1, 16, 16384, 128, causal=True),
    _workload("causal-d64-4k", "language model, narrow heads", 4, 32, 4096, 64, causal=True),
    _workload("gqa-causal-d128-8k", "language model, grouped heads", 2, 32, 8192, 128, Hkv=8, causal=True),
    _workload("mla-causal-d192-128", "latent attention", 2, 16, 4096, 192, Dv=128, causal=True),
    _workload("plain-d256-4k", "the widest heads", 2, 16, 4096, 256),
    _workload("bias-full-d64-2k", "a trained bias per item and head", 4, 16, 2048, 64, biases=(_FULL,)),
    _workload("bias-full-d128-4k", "the same, longer and wider", 1, 16, 4096, 128, biases=(_FULL,)),
    _workload("bias-const-d64-2k", "a fixed bias", 4, 16, 2048, 64, biases=(Bias(shape="BHMN", trained=False),)),
    _workload("t5-1hmn-d64-1k", "relative positions, encoder", 16, 12, 1024, 64, biases=(_SHARED,)),
    _workload("t5-causal-1hmn-d64-4k", "relative positions, decoder", 4, 16, 4096, 64, causal=True, biases=(_SHARED,)),
    _workload("pair-1hmn-d32-512", "triangle attention, 512 residues", 512, 4, 512, 32, biases=(_SHARED,)),
    _workload("pair-1hmn-d64-768", "triangle attention, 768 residues", 768, 4, 768, 64, biases=(_SHARED,)),
    _workload("pair-1hmn-d32-1k", "triangle attention, 1024 residues", 256, 4, 1024, 32, biases=(_SHARED,)),
    _workload("swin-1hmn-d32-64", "windows of 8 x 8", 8192, 6, 64, 32, biases=(_SHARED,)),
    _workload("swin-1hmn-d32-49", "windows of 7 x 7", 8192, 6, 49, 32, biases=(_SHARED,)),
    _workload("swin-1hmn-d32-144", "windows of 12 x 12", 2048, 6, 144, 32, biases=(_SHARED,)),
    _workload("mask-bhmn-d32-100x16k", "object queries", 16, 8, 100, 32, N=16384, masks=(Mask(shape="BHMN"),)),
    _workload("mask-b11n-d64-2k", "padded batch", 16, 16, 2048, 64, masks=(Mask(shape="B11N", fill="key padding"),)),
    _workload("bias-full-d64-2k-fp32", "float32 training", 2, 8, 2048, 64, dtype="fp32", biases=(_FULL,)),
]

#: the timed workloads by name
WORKLOADS: dict[str, Case] = {case.name: case for case in _TIMED}


def _big(name: str, why: str, **more: Any) -> Case:
    shape: dict[str, Any] = {"batch": (1,), "Hq": 1, "Hkv": 1, "D": 64, "Dv": 64, "dtypes": ("bf16",)}
    return Case(name=name, why=why, tags=frozenset({"big"}), **(shape | more))


#: offsets past 2^31 and the longest trained bias
BIG: list[Case] = [
    _big(
        "big-bias",
        "a bias of more than 2^32 elements, judged at its far corner",
        M=65600,
        N=65600,
        biases=(_FULL,),
        corner=96,
    ),
    _big(
        "big-bias-16k",
        "a full trained bias of 4.3e9 elements",
        M=16384,
        N=16384,
        Hq=16,
        Hkv=16,
        biases=(_FULL,),
        corner=64,
    ),
    _big("big-queries", "queries of more than 2^31 elements", M=600_000, N=128, Hq=64, Hkv=64, corner=64),
    _big("big-strides", "batch entries 2^31 elements apart", batch=(2,), M=200, N=300, Hq=2, Hkv=2, strides="far"),
    _big(
        "big-bias-strides",
        "bias entries 2^31 elements apart",
        batch=(2,),
        M=200,
        N=300,
        biases=(Bias(shape="BHMN", strides="far"),),
        masks=(Mask(shape="B1MN", strides="far"),),
    ),
]
