"""The tensors of one call as kernels take them, and one kernel launch written down."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import torch
import triton
from torch import Tensor

from biasflash.backends.triton import config, geometry
from biasflash.backends.triton.config import TileConfig
from biasflash.backends.triton.geometry import View
from biasflash.problem import Problem
from biasflash.tile import score

#: a bias plane above this no longer stays in the L2 cache while batch items come by one after the other
L2_PLANE_BYTES = 16 * 2**20
_APPLY = {"dense": score.add_dense, "keep": score.keep_only}


@dataclass(frozen=True, kw_only=True)
class Device:
    """What tile choice and splitting look at."""

    shared_memory: int
    multiprocessors: int


@lru_cache(maxsize=None)
def device_facts(device: torch.device) -> Device:
    if device.type != "cuda":  # the interpreter: an H200's figures
        return Device(shared_memory=232448, multiprocessors=132)
    found = torch.cuda.get_device_properties(device)
    return Device(
        shared_memory=getattr(found, "shared_memory_per_block_optin", 65536),
        multiprocessors=found.multi_processor_count,
    )


@dataclass(frozen=True, kw_only=True)
class Launch:
    """One kernel launch written down: grid, arguments by name, tile, and the reason for the tile."""

    kernel: Any
    grid: int
    arguments: dict[str, Any]
    warps: int
    stages: int
    registers: int | None = None
    tile: TileConfig | None = None
    why: str = ""

    def run(self) -> None:
        if self.grid == 0:
            return
        options: dict[str, Any] = {"num_warps": self.warps, "num_stages": self.stages}
        if self.registers is not None and torch.version.hip is None:
            options["maxnreg"] = self.registers
        self.kernel[(self.grid,)](**self.arguments, **options)

    def __str__(self) -> str:
        name = self.kernel.__name__.removesuffix("_kernel")
        return f"{name}: {self.grid} programs" + (f" of {self.tile} ({self.why})" if self.tile else "")


def _padded(width: int) -> int:
    return max(16, triton.next_power_of_2(width))


class Operands:
    """The tensors of one call as kernels take them; views of all of them share the merged batch axes."""

    def __init__(self, problem: Problem, device: Device, tensors: dict[str, Tensor], terms: Sequence[Tensor]) -> None:
        """``tensors`` are ``(*B, length, heads, width)``, except names starting with ``grad``: gradients of terms."""
        self.problem, self.device = problem, device
        self.terms = [t.view(torch.uint8) if t.dtype == torch.bool else t for t in terms]
        self.tensors = tensors
        strides = {
            n: geometry.term_strides(t) if n.startswith("grad") else geometry.rows_first(t) for n, t in tensors.items()
        }
        strides |= {f"bias{i}": geometry.term_strides(t) for i, t in enumerate(self.terms)}
        self.sizes, merged = geometry.merge_batch(problem.batch, strides)
        self.views = {name: self._view(name, s) for name, s in merged.items()}
        self.term_views = [self.views[f"bias{i}"] for i in range(len(self.terms))]

    def _view(self, name: str, strides: list[int]) -> View:
        t = self.terms[int(name[4:])] if name.startswith("bias") else self.tensors[name]
        return geometry.view(strides, t.element_size(), t.shape[-1], t.data_ptr() % 16 == 0)

    def _extent(self, name: str, first_axis: int) -> int:
        """Elements spanned by the axes from ``first_axis`` on; -2 is one head's plane."""
        p = self.problem
        rows, columns = p.N if name in ("k", "v", "dk", "dv") else p.M, max(p.D, p.Dv)
        if name.startswith(("bias", "grad")):
            columns = p.N
        heads = p.Hkv if name in ("k", "v", "dk", "dv") else p.Hq
        sizes = (*self.sizes, heads, rows, columns)[first_axis:]
        return sum(
            (size - 1) * stride for size, stride in zip(sizes, self.views[name].strides[first_axis:], strict=True)
        )

    @cached_property
    def has_dense(self) -> bool:
        return any(t.kind == "dense" for t in self.problem.terms)

    @cached_property
    def hides_keys(self) -> bool:
        return any(
            t.kind == "keep" and v.strides[-2] == 0 for t, v in zip(self.problem.terms, self.term_views, strict=True)
        )

    @cached_property
    def numbers(self) -> dict[str, Any]:
        """Run-time values that every kernel takes by the same name."""
        p = self.problem
        return {
            "sizes": tuple(geometry.code(s) for s in self.sizes),
            "M": p.M,
            "N": p.N,
            "heads": p.Hq,
            "kv_heads": p.Hkv,
            "group": p.Hq // p.Hkv,
            "batch": p.batch_size,
            "shift": 0 if p.causal_shift is None else p.causal_shift,
            "scale": p.scale,
            "term_ptrs": tuple(self.terms),
            "term_strides": tuple(v.codes for v in self.term_views),
        }

    @cached_property
    def constants(self) -> dict[str, Any]:
        """Compile-time facts that every kernel takes by the same name."""
        p = self.problem
        pair = p.dtype == torch.float32
        highest = torch.get_float32_matmul_precision() == "highest"
        return {
            "TERMS": tuple(
                (_APPLY[t.kind], v.strides[-2] != 0, v.strides[-1] != 0, v.vec, t.kind == "keep")
                for t, v in zip(p.terms, self.term_views, strict=True)
            ),
            "D": p.D,
            "DV": p.Dv,
            "BLOCK_D": _padded(p.D),
            "BLOCK_DV": _padded(p.Dv),
            "WIDE": any(self._extent(n, -2) >= 2**31 for n in self.views),
            "WIDE_HEADS": p.batch_size * p.Hq * (p.M + 256) >= 2**31
            or any(self._extent(n, 0) >= 2**31 for n in self.views if not n.startswith("grad")),
            "EVEN_N": bool(p.terms) and p.N % 16 == 0,
            "IS_CAUSAL": p.causal_shift is not None,
            "IS_GROUPED": p.Hq != p.Hkv,
            "SCALED": self.has_dense or pair or p.scale <= 0,
            "PAIR": pair,
            "LOW_RANGE": any(t.kind == "dense" and t.dtype != torch.float16 for t in p.terms),
            "HAS_KEEP": any(t.kind == "keep" for t in p.terms),
            "HIDES_KEYS": self.hides_keys,
            "PRECISION": "tf32x3" if pair and highest else "tf32",
            "ORDER": self.order,
        }

    @cached_property
    def order(self) -> str:
        """Which programs run side by side (see ``tile.span.place``)."""
        shared = [
            t
            for t, v in zip(self.terms, self.term_views, strict=True)
            if v.strides[-1] != 0 and v.strides[-2] != 0 and not any(v.strides[:-3])
        ]
        if not shared or self.problem.batch_size == 1:
            return "tile,head,batch"
        plane = max(t.shape[-1] * t.shape[-2] * t.element_size() for t in shared)
        return "batch,tile,head" if plane > L2_PLANE_BYTES else "tile,batch,head"

    def tile(self, kernel: str) -> tuple[TileConfig, str]:
        p = self.problem
        facts = config.Facts(
            kernel=kernel,
            width=max(_padded(p.D), _padded(p.Dv)),
            itemsize=p.dtype.itemsize,
            has_dense=self.has_dense,
            shared_memory=self.device.shared_memory,
        )
        tile, why = config.choose_tile(facts)
        return config.shrink(tile, p.M, p.N), why

    def launch(
        self, kernel: Any, rule: str, names: Sequence[str], programs: Callable[[TileConfig], int], **own: Any
    ) -> Launch:
        """The record of one launch: tensors ``names`` become ``x_ptr``, ``x_strides`` and ``X_VEC``; ``own`` comes on top.

        ``programs(tile)`` is the grid. Arguments the kernel does not declare are left out.
        """
        tile, why = self.tile(rule)
        p = self.problem
        given: dict[str, Any] = {**self.numbers, **self.constants}
        given |= {"BLOCK_M": tile.block_m, "BLOCK_N": tile.block_n, "STAGES": tile.stages}
        given |= {"SHORT_M": tile.block_m > p.M, "SHORT_N": tile.block_n > p.N}
        for name in names:
            given[f"{name}_ptr"] = self.tensors[name]
            given[f"{name}_strides"] = self.views[name].codes
            given[f"{name.upper()}_VEC"] = self.views[name].vec
        given |= own
        return Launch(
            kernel=kernel,
            grid=programs(tile),
            arguments={name: given[name] for name in kernel.arg_names},
            warps=tile.warps,
            stages=tile.stages,
            registers=tile.registers,
            tile=tile,
            why=why,
        )
