"""Every name this package takes from Gluon, so that a new Triton version is met in one file.

Names that moved between Triton 3.6 and 3.9: bulk copies are ``tma.async_load`` and ``tma.async_store`` from 3.8 on;
adding to memory (``tma.async_atomic_add``) is public from 3.8 on, 3.6 only has it in its builder. Shared memory is
seen as other tiles by ``_reinterpret``, later ``reinterpret``; warps meet at ``thread_barrier``, later ``barrier``.
"""

from __future__ import annotations

from typing import Any

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

__all__ = [
    "TensorDescriptor",
    "barrier",
    "builtin",
    "fence_async_shared",
    "gl",
    "jit",
    "mbarrier",
    "seen_as",
    "store_wait",
    "tma_add",
    "tma_load",
    "tma_store",
    "warpgroup_mma",
    "warpgroup_mma_wait",
]

jit: Any = gluon.jit
tma_load: Any = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
tma_store: Any = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global
store_wait: Any = tma.store_wait
#: of the warps of a partition
barrier: Any = getattr(gl, "thread_barrier", None) or gl.barrier


def _add(desc: Any, coord: Any, src: Any, _semantic: Any = None) -> None:
    from triton._C.libtriton import ir

    at = _semantic._convert_to_ir_values(coord, require_i64=False)
    _semantic.builder.create_async_tma_reduce(ir.DESCRIPTOR_REDUCE_KIND.ADD, desc.handle, at, src.handle)


def _seen_as(memory: Any, dtype: Any, shape: Any, layout: Any, _semantic: Any = None) -> Any:
    way = getattr(memory, "reinterpret", None) or memory._reinterpret
    return way(dtype, shape, layout, _semantic=_semantic)


#: shared memory as tiles of another type, shape and layout
seen_as: Any = builtin(_seen_as)
#: adds a tile in shared memory to device memory
tma_add: Any = getattr(tma, "async_atomic_add", None) or builtin(_add)
