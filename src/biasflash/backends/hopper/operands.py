"""Tensors as the bulk copy engine takes them, and the launch of a kernel that is fed by it."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import Tensor

from biasflash.backends.hopper import config
from biasflash.backends.hopper.gluon import TensorDescriptor, gl
from biasflash.backends.triton.geometry import View
from biasflash.backends.triton.operands import Launch, Operands, Slot

_ELEMENTS = {torch.float16: gl.float16, torch.bfloat16: gl.bfloat16, torch.float32: gl.float32}
#: batch axes that a descriptor of rank 5 has beside head, row and column
MOST_BATCH_AXES = 2
#: sets of addresses whose arguments a launch keeps: the layers of a model, forward and backward
MOST_KNOWN = 128
#: what Triton 3.6 passes to a launcher's C function before the kernel's arguments, in the letters of Python's parser
CALL = "iiiKKppOOOOOO"


class Tile(Protocol):
    """What every tile of ``config`` has beside its words, ``str(tile)``."""

    @property
    def why(self) -> str: ...


class BuildError(RuntimeError):
    """A kernel of this package did not compile; portable kernels write everything anew."""


class _Located:
    """What Triton's launcher reads of a descriptor, for an address."""

    __slots__ = ("data_ptr", "shape", "strides")
    padding = "zero"
    round_f32_to_tf32 = False  # asked for by Triton 3.7 and later

    def __init__(self, address: int, shape: list[int], strides: list[int]) -> None:
        self.data_ptr: Callable[[], int] = lambda: address
        self.shape, self.strides = shape, strides

    @property
    def base(self) -> _Located:
        return self


@dataclass(frozen=True, kw_only=True)
class Box:
    """A tensor by name and the block of it that one bulk copy moves; outside of the tensor it reads zeros."""

    slot: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    block: tuple[int, ...]

    @cached_property
    def _layout(self) -> Any:
        return gl.NVMMASharedLayout.get_default_for(list(self.block), _ELEMENTS[self.dtype])

    @cached_property
    def _lists(self) -> tuple[list[int], list[int]]:
        return list(self.shape), list(self.strides)

    def over(self, base: Tensor | int) -> Any:
        """The descriptor of a tensor, or of an address for a kernel that is compiled already."""
        shape, strides = self._lists
        if isinstance(base, int):
            return _Located(base, shape, strides)
        if base.dtype != self.dtype:  # scratch is float32
            base = base.view(self.dtype)
        return TensorDescriptor(base, shape, strides, list(self.block), self._layout)


@dataclass(frozen=True, kw_only=True)
class Boxed:
    """A ``Box`` of rank 5, ``(b0, b1, head, row, column)``.

    ``moves``: the axes it moves along, bit 0 for b0, 1 for b1, 2 for head; along others it is broadcast.
    """

    box: Box
    moves: int


def batch_of(ops: Operands) -> tuple[int, int]:
    """Sizes of the two batch axes that descriptors have."""
    sizes = ops.sizes
    return (1, sizes[0]) if len(sizes) == 1 else (sizes[0], sizes[1])


def outer_steps(view: View) -> tuple[int, int, int]:
    """Strides along the axes b0, b1 and head, two batch axes at most."""
    *batch, head, _row, _column = view.strides
    b0, b1 = [0] * (MOST_BATCH_AXES - len(batch)) + batch
    return b0, b1, head


def has_float32_bias(ops: Operands) -> bool:
    return ops.has_dense and ops.problem.terms[0].dtype == torch.float32


def unit_of(dtype: torch.dtype) -> int:
    """Elements in the 16 bytes by which bulk copies step along rows."""
    return 16 // dtype.itemsize


def no_tile(ops: Operands) -> str:
    return "no tile for these widths" + (" beside a float32 bias" if has_float32_bias(ops) else "")


def items_share_bias(ops: Operands, count: int) -> bool:
    """Whether ``count`` neighbours along the last batch axis can stand around one tile of a bias that does not vary."""
    p = ops.problem
    return ops.has_dense and p.Hq == p.Hkv and ops.sizes[-1] % count == 0 and ops.term_views[0].strides[-4] == 0


def boxed(ops: Operands, name: str, rows: int, columns: int) -> Boxed:
    """The tensor ``name`` in blocks of ``rows`` x ``columns``; its view must have 16-byte rows (``View.vec``)."""
    p = ops.problem
    view = ops.views[name]
    steps, row = outer_steps(view), view.strides[-2]
    on_keys = name in ("k", "v", "dk", "dv")
    is_plane = name.startswith(("bias", "grad"))
    width = p.N if is_plane else p.D if name in ("q", "k", "dq", "dk") else p.Dv
    outer = (*batch_of(ops), p.Hkv if on_keys else p.Hq)
    term = p.terms[int(name[4:])] if is_plane else None
    dtype = term.dtype if term else p.dtype
    unit = unit_of(dtype)  # the engine wants a stride of whole 16 bytes even where it never moves
    return Boxed(
        box=Box(
            slot=name,
            dtype=dtype,
            shape=(*(n if s else 1 for n, s in zip(outer, steps, strict=True)), p.N if on_keys else p.M, width),
            strides=(*(s or unit for s in steps), row or unit, 1),
            block=(1, 1, 1, rows, columns),
        ),
        moves=sum(1 << axis for axis, s in enumerate(steps) if s),
    )


def statistics(ops: Operands, slot: str, pitch: int, rows: int) -> Box:
    """Float32 row statistics ``(b * heads + h, row)`` in blocks of ``rows``; zero behind the last query."""
    p = ops.problem
    heads = p.batch_size * p.Hq
    return Box(slot=slot, dtype=torch.float32, shape=(heads, p.M), strides=(pitch, 1), block=(1, rows))


def sums(slot: str, lines: int, length: int, width: int, columns: int) -> Box:
    """Float32 ``(line, row, column)`` of ``width`` columns in blocks of 64 rows x ``columns``."""
    strides = (length * width, width, 1)
    return Box(slot=slot, dtype=torch.float32, shape=(lines, length, width), strides=strides, block=(1, 64, columns))


@dataclass(frozen=True, kw_only=True)
class _Bare:
    """Triton's launcher as its handling of descriptors calls it, and what that makes of them.

    ``positions`` of descriptors among the arguments, ``facts`` of each, ``expand`` (descriptor, facts) -> arguments;
    ``known``: what was made of a descriptor before, by position and address.
    """

    launch: Callable[..., None]
    positions: frozenset[int]
    facts: tuple[Any, ...]
    flags: tuple[bool, bool]
    expand: Callable[[Any, Any], list[Any]]
    known: dict[tuple[int, int], list[Any]] = field(default_factory=dict)

    def _expanded(self, i: int, located: _Located, facts: Any) -> list[Any]:
        key = i, located.data_ptr()
        found = self.known.get(key)
        if found is None:  # never looked up twice: another thread may clear what is known in between
            if len(self.known) >= MOST_KNOWN * len(self.positions):
                self.known.clear()
            found = self.known[key] = self.expand(located, facts)
        return found

    def arguments(self, values: Sequence[Any]) -> tuple[Any, ...]:
        """Every value, descriptors as what stands for them."""
        found: list[Any] = []
        facts = iter(self.facts)
        for i, value in enumerate(values):
            found += self._expanded(i, value, next(facts)) if i in self.positions else (value,)
        return tuple(found)


@dataclass(kw_only=True)
class DescriptorLaunch(Launch):
    """A launch whose arguments may be ``Box``es; ``what`` is its tile in words."""

    what: str = ""
    _known: dict[tuple[int, ...], tuple[Any, ...]] = field(default_factory=dict, repr=False)

    @cached_property
    def _boxes(self) -> list[tuple[int, Box]]:
        return [(i, v) for i, v in enumerate(self.arguments.values()) if isinstance(v, Box)]

    def values(self, given: Mapping[str, Any]) -> list[Any]:
        filled = super().values(given)
        for i, box in self._boxes:
            filled[i] = box.over(given[box.slot])
        return filled

    @cached_property
    def _named(self) -> tuple[str, ...]:
        """What the launch takes an address of."""
        given = (v.slot if isinstance(v, Box) else v for v in self.arguments.values() if isinstance(v, (Box, Slot)))
        return tuple(map(str, given))

    @cached_property
    def _bare(self) -> _Bare | None:
        """Triton's launcher without its handling of descriptors; None where a Triton has it some other way."""
        try:
            driver = importlib.import_module("triton.backends.nvidia.driver")
            if driver._BASE_ARGS_FORMAT != CALL:  # gone from 3.7 on, where the kernel's arguments are one list
                return None
            launcher = self._compiled.run
            inner = launcher.launch
            held = dict(zip(inner.__code__.co_freevars, (c.cell_contents for c in inner.__closure__), strict=True))
            bare = _Bare(
                launch=held["launcher"],
                positions=frozenset(held["tensordesc_indices"]),
                facts=tuple(held["tensordesc_meta"]),
                flags=(launcher.launch_cooperative_grid, launcher.launch_pdl),
                expand=driver.make_tensordesc_arg,
            )
            needs_scratch = launcher.global_scratch_size or launcher.profile_scratch_size
        except (AttributeError, ImportError, KeyError, TypeError, ValueError):
            return None
        return None if needs_scratch else bare

    def start(self, stream: int, addresses: Mapping[str, int]) -> None:
        """As for any launch. What the addresses become is kept: encoding a descriptor takes longer than the rest."""
        bare = self._bare
        if bare is None or self.grid == 0:
            super().start(stream, addresses)
            return
        key = tuple([addresses[name] for name in self._named])
        arguments = self._known.get(key)
        if arguments is None:
            if len(self._known) >= MOST_KNOWN:
                self._known.clear()
            arguments = self._known[key] = bare.arguments(self.values(addresses))
        assert self._entry is not None
        _, function, metadata = self._entry
        bare.launch(self.grid, 1, 1, stream, function, *bare.flags, None, None, metadata, None, None, None, *arguments)

    @contextmanager
    def _building(self) -> Iterator[None]:
        """Whatever the compiler raises: the portable kernels serve the call."""
        try:
            yield
        except Exception as error:
            raise BuildError(f"{self.kernel.__name__}: {type(error).__name__}: {error}") from error

    def ask(self, tensors: Mapping[str, Tensor]) -> Any:
        with self._building():
            return super().ask(tensors)

    def take(self, asked: Any) -> None:
        with self._building():
            super().take(asked)

    def run(self, tensors: Mapping[str, Tensor]) -> None:
        if self.must_compile:
            self.take(self.ask(tensors))
        super().run(tensors)

    def __str__(self) -> str:
        return f"{self.kernel.__name__.removesuffix('_kernel')}: {self.grid} programs of {self.what} ({self.why})"


def arguments_of(boxes: Mapping[str, Boxed]) -> dict[str, Any]:
    """``x_desc`` and ``x_moves`` of every tensor ``x``."""
    descriptors = {f"{name}_desc": b.box for name, b in boxes.items()}
    return descriptors | {f"{name}_moves": b.moves for name, b in boxes.items()}


def common_arguments(ops: Operands, groups: int) -> dict[str, Any]:
    """Numbers and constants that kernels take by the same name; ``groups``: warpgroups that compute."""
    p = ops.problem
    n0, n1 = batch_of(ops)
    names = ("M", "N", "heads", "kv_heads", "group", "batch", "shift", "scale")
    return {
        **{name: ops.numbers[name] for name in names},
        **{"inner": n1, "n0": n0, "n1": n1},
        "D_BLOCK": config.padded(p.D),
        "DV_BLOCK": config.padded(p.Dv),
        "HAS_BIAS": ops.has_dense,
        "IS_CAUSAL": p.causal_shift is not None,
        "ORDER": ops.order,
        "CONSUMER_REGISTERS": config.CONSUMER_REGISTERS[groups],
        "PRODUCER_REGISTERS": config.PRODUCER_REGISTERS[groups],
        "HELPER_REGISTERS": config.PRODUCER_REGISTERS[groups],
    }


def record(ops: Operands, kernel: Any, given: Mapping[str, Any], tile: Tile) -> DescriptorLaunch:
    """The launch of ``kernel``, of whose arguments ``given`` may hold more than it declares.

    Programs are persistent: each takes ``items`` in strides.
    """
    return DescriptorLaunch(
        kernel=kernel,
        grid=min(given["items"], ops.device.multiprocessors),
        arguments={name: given[name] for name in kernel.arg_names},
        warps=4,
        stages=1,
        what=f"{tile}{', bias in lines of eight rows' if given.get('RAW_STAGES') else ''}",
        why=tile.why,
    )
