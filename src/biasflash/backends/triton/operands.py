"""The tensors of one call as kernels take them, and one kernel launch written down without any tensor."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from typing import Any, TypeAlias

import torch
import triton
from torch import Tensor

from biasflash.backends.backend import bias_pitch
from biasflash.backends.triton import config, geometry, widths
from biasflash.backends.triton.config import TileConfig
from biasflash.backends.triton.geometry import View
from biasflash.problem import Problem, Term
from biasflash.tile import score

#: a bias plane above this no longer stays in the L2 cache while batch items come by one after the other
L2_PLANE_BYTES = 16 * 2**20
#: programs a multiprocessor of a launch that redoes what another kernel left out: those of 255 registers run at once
REDO_PROGRAMS = 2
_APPLY = {"dense": score.add_dense, "keep": score.keep_only}
_KEY_SIDE = ("k", "v", "dk", "dv")

#: names of a call's tensors, their strides, and which of them start at a multiple of 16 bytes
Facts: TypeAlias = tuple[tuple[str, ...], tuple[tuple[int, ...], ...], tuple[bool, ...]]


@dataclass(frozen=True, kw_only=True)
class Device:
    """What tile choice and splitting look at."""

    shared_memory: int
    multiprocessors: int
    capability: int = 90  # major * 10 + minor
    gpu: str = ""  # its name, by which a table of tiles is found; empty: none


@cache
def device_facts(device: torch.device) -> Device:
    if device.type != "cuda" or not torch.cuda.is_available():  # interpreted or only explained: as on an H200
        return Device(shared_memory=232448, multiprocessors=132, gpu="NVIDIA H200")
    found = torch.cuda.get_device_properties(device)
    return Device(
        shared_memory=getattr(found, "shared_memory_per_block_optin", 65536),
        multiprocessors=found.multi_processor_count,
        capability=found.major * 10 + found.minor,
        gpu=getattr(found, "name", ""),
    )


@dataclass(frozen=True)
class Layout:
    """All that a plan knows of a tensor: torch's strides, and whether it starts at a multiple of 16 bytes."""

    strides: tuple[int, ...]
    aligned: bool


def gradient_strides(problem: Problem, term: Term) -> tuple[int, ...]:
    """Of the gradient of a contiguous term: rows of a full bias's lie ``bias_pitch`` apart."""
    *outer, columns = term.shape
    is_full = tuple(outer) == (*problem.batch, problem.Hq, problem.M)
    row = bias_pitch(columns, term.dtype.itemsize) if is_full else columns
    return tuple(geometry.plain_strides((*outer, row)))


class Slot(str):
    """The name of a tensor that a launch gets when it runs."""

    __slots__ = ()


@dataclass(kw_only=True)
class Launch:
    """One kernel launch written down: grid, arguments by name (tensors as ``Slot``), tile, and the reason for the tile.

    ``run`` takes tensors and compiles the kernel if need be. Then ``start`` goes straight to the compiled one with
    addresses, which spares Triton's look at every argument (alignment and integer types are facts of the plan, so they
    cannot differ), the driver's look at every address, and calls of hooks that nobody set.
    """

    kernel: Any
    grid: int
    arguments: dict[str, Any]
    warps: int
    stages: int
    registers: int | None = None
    tile: TileConfig | None = None
    why: str = ""
    _compiled: Any = field(default=None, repr=False)

    @cached_property
    def _slots(self) -> tuple[list[tuple[int, str]], list[tuple[int, tuple[str, ...]]]]:
        """Positions of tensors, and of tuples of tensors, among the arguments."""
        values = list(enumerate(self.arguments.values()))
        several = [(i, tuple(map(str, v))) for i, v in values if isinstance(v, tuple) and v and isinstance(v[0], Slot)]
        return [(i, str(v)) for i, v in values if isinstance(v, Slot)], several

    @cached_property
    def _constant(self) -> list[Any]:
        return list(self.arguments.values())

    def values(self, given: Mapping[str, Any]) -> list[Any]:
        """Arguments in the kernel's order, slots filled from ``given``."""
        filled = self._constant.copy()
        single, several = self._slots
        for i, slot in single:
            filled[i] = given[slot]
        for i, slots in several:
            filled[i] = tuple([given[slot] for slot in slots])
        return filled

    def run(self, tensors: Mapping[str, Tensor]) -> None:
        if self.grid == 0:
            return
        values = self.values(tensors)
        if self._compiled is not None:
            self._compiled[(self.grid, 1, 1)](*values)
            return
        self._compiled = self.kernel[(self.grid,)](*values, **self.options(capped=torch.version.hip is None))

    def ask(self, tensors: Mapping[str, Tensor]) -> Any:
        """Triton's kernel for such tensors, not launched; a promise of it inside ``triton.AsyncCompileMode``."""
        options = self.options(capped=torch.version.hip is None)
        return self.kernel.warmup(*self.values(tensors), grid=(self.grid,), **options)

    def take(self, asked: Any) -> None:
        """Waits for what ``ask`` gave, loads it and keeps it: ``run`` then compiles nothing."""
        kernel = asked.result() if isinstance(asked, triton.FutureKernel) else asked
        if kernel is not None:  # nothing: a hook of Triton's said no
            _ = kernel.run  # loads it: here it is told that a kernel does not fit the GPU
            self._compiled = kernel

    @property
    def must_compile(self) -> bool:
        return self.grid > 0 and self._compiled is None

    def options(self, *, capped: bool) -> dict[str, int]:
        """What the compiler is told beside the arguments; ``capped``: it is NVIDIA's, which knows register caps.

        Products and sums are fused (FMA): Triton up to 3.9 does so unasked, later ones no longer.
        """
        options = {"num_warps": self.warps, "num_stages": self.stages, "enable_fp_fusion": True}
        return options | {"maxnreg": self.registers} if capped and self.registers is not None else options

    @cached_property
    def _entry(self) -> tuple[Any, Any, Any] | None:
        """The compiled kernel's launcher and what it is told of the kernel, as Triton's own calls pass them."""
        try:
            return self._compiled.run, self._compiled.function, self._compiled.packed_metadata
        except AttributeError:  # a Triton that keeps them elsewhere
            return None

    @property
    def can_start(self) -> bool:
        return self.grid == 0 or (self._compiled is not None and self._entry is not None)

    def start(self, stream: int, addresses: Mapping[str, int]) -> None:
        """``run`` on a stream, without Triton's hooks, once ``can_start``; ``addresses`` are those of the tensors."""
        if self.grid == 0:
            return
        assert self._entry is not None
        launcher, function, metadata = self._entry
        launcher(self.grid, 1, 1, stream, function, metadata, None, None, None, *self.values(addresses))

    def __str__(self) -> str:
        name = self.kernel.__name__.removesuffix("_kernel")
        return f"{name}: {self.grid} programs" + (f" of {self.tile} ({self.why})" if self.tile else "")


def float32_products(capability: int) -> str:
    """How float32 operands are multiplied: at float32 accuracy where torch asks for it, else in one TF32 pass.

    Six passes over bfloat16 thirds keep 24 bits of each product at the rate of three TF32 passes, which keep 22. On
    Hopper only: elsewhere the thirds do not fit the registers (9 KiB of spills a thread on sm_80, no code on sm_100).
    """
    if torch.get_float32_matmul_precision() != "highest":
        return "tf32"
    if triton.knobs.runtime.interpret:
        return "ieee"
    return "bf16x6" if capability == 90 else "tf32x3"


class Operands:
    """Views of all tensors of one call; they share the merged batch axes.

    ``rows`` are ``(*B, length, heads, width)`` tensors by name, ``terms`` the padded terms in order, ``grads`` the
    gradients of terms by name.
    """

    def __init__(
        self,
        problem: Problem,
        device: Device,
        rows: Mapping[str, Layout],
        terms: Sequence[Layout],
        grads: Mapping[str, Layout] | None = None,
    ) -> None:
        self.problem, self.device = problem, device
        strides: dict[str, list[int]] = {}
        facts: dict[str, tuple[int, int, bool, bool]] = {}  # name -> itemsize, width, aligned, whether it is a term
        for name, layout in rows.items():
            strides[name] = geometry.rows_first(layout.strides)
            width = problem.D if name in ("q", "k", "dq", "dk") else problem.Dv
            facts[name] = problem.dtype.itemsize, width, layout.aligned, False
        named = [(f"bias{i}", layout, problem.terms[i]) for i, layout in enumerate(terms)]
        named += [(name, layout, problem.terms[int(name[4:])]) for name, layout in (grads or {}).items()]
        for name, layout, term in named:
            strides[name] = geometry.term_strides(term.shape, layout.strides)
            facts[name] = term.dtype.itemsize, term.shape[-1], layout.aligned, True
        self.sizes, merged = geometry.merge_batch(problem.batch, strides)
        self.views = {name: geometry.view(s, *facts[name]) for name, s in merged.items()}
        self.term_views = [self.views[f"bias{i}"] for i in range(len(terms))]
        self._aligned = {name: fact[2] for name, fact in facts.items()}

    def is_aligned(self, name: str) -> bool:
        """Whether a tensor starts at a multiple of 16 bytes."""
        return self._aligned[name]

    def _extent(self, name: str, first_axis: int) -> int:
        """Elements spanned by the axes from ``first_axis`` on; -2 is one head's plane."""
        p = self.problem
        rows, heads = (p.N, p.Hkv) if name in _KEY_SIDE else (p.M, p.Hq)
        columns = p.N if name.startswith(("bias", "grad")) else max(p.D, p.Dv)
        sizes = (*self.sizes, heads, rows, columns)[first_axis:]
        return sum((n - 1) * s for n, s in zip(sizes, self.views[name].strides[first_axis:], strict=True))

    @cached_property
    def has_dense(self) -> bool:
        return any(t.kind == "dense" for t in self.problem.terms)

    @cached_property
    def hides_keys(self) -> bool:
        """Whether some mask is the same for all queries: the keys it hides may hold anything."""
        views = zip(self.problem.terms, self.term_views, strict=True)
        return any(t.kind == "keep" and v.strides[-2] == 0 for t, v in views)

    @cached_property
    def has_unaligned_plane(self) -> bool:
        """Whether some bias or mask that varies along both axes is read element by element."""
        return any(v.vec <= 1 and v.is_plane for v in self.term_views)

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
            "term_ptrs": tuple(Slot(f"bias{i}") for i in range(len(p.terms))),
            "term_strides": tuple(v.codes for v in self.term_views),
            "redo_ptr": Slot("lse"),  # read only by launches that redo what another kernel left out
            "redo_pitch": 0,
        }

    @cached_property
    def constants(self) -> dict[str, Any]:
        """Compile-time facts that every kernel takes by the same name."""
        p = self.problem
        pair = p.dtype == torch.float32
        low_range = any(t.kind == "dense" and t.dtype != torch.float16 for t in p.terms)
        read = [n for n in self.views if not n.startswith("grad")]
        return {
            "TERMS": tuple(
                (_APPLY[t.kind], v.strides[-2] != 0, v.strides[-1] != 0, v.vec, t.kind == "keep")
                for t, v in zip(p.terms, self.term_views, strict=True)
            ),
            "D": p.D,
            "DV": p.Dv,
            "BLOCK_D": widths.padded(p.D),
            "BLOCK_DV": widths.padded(p.Dv),
            "D_STRIPS": widths.strips(p.D, p.dtype.itemsize, self.device.capability),
            "DV_STRIPS": widths.strips(p.Dv, p.dtype.itemsize, self.device.capability),
            "COLUMNS": self._at_once(p.D),
            "WIDE": any(self._extent(n, -2) >= 2**31 for n in self.views),
            "WIDE_HEADS": p.batch_size * p.Hq * (p.M + 256) >= 2**31 or any(self._extent(n, 0) >= 2**31 for n in read),
            "EVEN_N": p.N % 8 == 0 and any(v.strides[-1] != 0 for v in self.term_views),
            "IS_CAUSAL": p.causal_shift is not None,
            "IS_GROUPED": p.Hq != p.Hkv,
            "SCALED": self.has_dense or pair or p.scale <= 0,
            "PAIR": pair
            or p.dtype == torch.float16,  # float16 weights resolve what one FMA rounds away at scores of 1e5
            "LOW_RANGE": low_range,
            "KEEP_LOW": p.keeps_low,
            "USE_LOW": pair or low_range,
            "HAS_KEEP": any(t.kind == "keep" for t in p.terms),
            "HIDES_KEYS": self.hides_keys,
            "PRECISION": float32_products(self.device.capability) if pair else "tf32",
            "ORDER": self.order,
            "REDO": False,
        }

    @cached_property
    def order(self) -> str:
        """Which programs run side by side (see ``tile.span.place``)."""
        p = self.problem
        planes = [
            p.M * p.N * t.dtype.itemsize
            for t, v in zip(p.terms, self.term_views, strict=True)
            if v.is_plane and not any(v.strides[:-3])
        ]
        if not planes or p.batch_size == 1:
            return "tile,head,batch"
        return "batch,tile,head" if max(planes) > L2_PLANE_BYTES else "tile,batch,head"

    @property
    def _plane_bytes(self) -> int:
        """``config.Facts.bias_itemsize``: kernels copy every bias that varies along queries and keys ahead."""
        terms = list(zip(self.problem.terms, self.term_views, strict=True))
        sizes = [min(4, t.dtype.itemsize) for t, _ in terms]
        planes = [n for n, (t, view) in zip(sizes, terms, strict=True) if t.kind == "dense" and view.is_plane]
        return max(sum(planes), max(sizes, default=0))

    def _at_once(self, width: int) -> int:
        device = self.device
        return config.columns_at_once(width, self.problem.dtype.itemsize, device.gpu, device.capability)

    def tile(self, kernel: str) -> tuple[TileConfig, str]:
        p = self.problem
        held = [sum(self.constants[name]) for name in ("D_STRIPS", "DV_STRIPS")]
        facts = config.Facts(
            kernel=kernel,
            width=max(held),
            columns=sum(held),
            itemsize=p.dtype.itemsize,
            has_dense=self.has_dense,
            bias_itemsize=self._plane_bytes,
            is_unaligned=self.has_unaligned_plane,
            is_padded=held != [p.D, p.Dv],
            hides_pairs=self.constants["HAS_KEEP"] or self.constants["IS_CAUSAL"],
            shared_memory=self.device.shared_memory,
            capability=self.device.capability,
            gpu=self.device.gpu,
        )
        tile, why = config.choose_tile(facts)
        return config.shrink(tile, p.M, p.N), why

    def launch(
        self, kernel: Any, rule: str, names: Sequence[str], programs: Callable[[TileConfig], int], **own: Any
    ) -> Launch:
        """The record of one launch: tensors ``names`` become ``x_ptr``, ``x_strides`` and ``X_VEC``; ``own`` is added.

        ``programs(tile)`` is the grid, cut to a few with ``REDO``. Arguments that the kernel does not declare are left
        out.
        """
        p = self.problem
        tile, why = self.tile(rule)
        grid = programs(tile)
        if own.get("REDO"):  # nearly always nothing to do: few programs, in which unpipelined loops spill least
            tile = replace(config.uncapped(tile), stages=1)
            grid = min(grid, REDO_PROGRAMS * self.device.multiprocessors)
        given: dict[str, Any] = {**self.numbers, **self.constants}
        given |= {"BLOCK_M": tile.block_m, "BLOCK_N": tile.block_n, "STAGES": tile.stages}
        given["DP_COLUMNS"] = tile.columns or self._at_once(p.Dv)
        given |= {"SHORT_M": tile.block_m > p.M, "SHORT_N": tile.block_n > p.N}
        for name in names:
            view: View = self.views[name]
            given |= {f"{name}_ptr": Slot(name), f"{name}_strides": view.codes, f"{name.upper()}_VEC": view.vec}
        given |= own
        return Launch(
            kernel=kernel,
            grid=grid,
            arguments={name: given[name] for name in kernel.arg_names},
            warps=tile.warps,
            stages=tile.stages,
            registers=tile.registers,
            tile=tile,
            why=why,
        )
