"""The same values in other memory: layouts that a caller may hand over, and memory that is NaN before it is written."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor


def _heads_first(t: Tensor) -> Tensor:
    return t.transpose(-3, -2).contiguous().transpose(-3, -2)


def _transposed(t: Tensor) -> Tensor:
    return t.transpose(-2, -1).contiguous().transpose(-2, -1)


def _hostile(shape: tuple[int, ...], like: Tensor) -> Tensor:
    """Memory whose every element is wrong: NaN, or False for masks."""
    return like.new_full(shape, False if like.dtype == torch.bool else math.nan)


def _sliced(t: Tensor) -> Tensor:
    base = _hostile((*t.shape[:-1], t.shape[-1] + 3), t)
    view = base[..., 1 : 1 + t.shape[-1]]
    view.copy_(t)
    return view


def _unaligned(t: Tensor) -> Tensor:
    view = _hostile((t.numel() + 1,), t)[1:].view(t.shape)
    view.copy_(t)
    return view


def _expanded(t: Tensor) -> Tensor:
    return t[:1].expand_as(t)


def _far(t: Tensor) -> Tensor:
    inner = t[0].contiguous()
    step = 2**31 + 64
    flat = torch.empty((t.shape[0] - 1) * step + inner.numel(), dtype=t.dtype, device=t.device)
    view = flat.as_strided(t.shape, (step, *inner.stride()))
    view.copy_(t)
    return view


#: name -> the same values in that layout
LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": Tensor.contiguous,
    "heads-first": _heads_first,  # q, k, v stored as (*B, heads, length, width)
    "transposed": _transposed,  # the last axis is not the dense one
    "sliced": _sliced,  # rows of a wider array whose other entries are NaN; odd row stride and offset
    "unaligned": _unaligned,  # storage offset of one element
    "expanded": _expanded,  # leading axis with stride 0 (its first entry is repeated)
    "far": _far,  # entries of the leading axis more than 2^31 elements apart
}


def lay_out(t: Tensor, layout: str) -> Tensor:
    """``t``'s values, shape and dtype in the named layout, detached from any graph."""
    return LAYOUTS[layout](t.detach()).detach()


def poison_cache(device: torch.device, sizes: list[int]) -> None:
    """Leaves NaN in the blocks that the CUDA allocator will hand out next for requests of ``sizes`` bytes.

    Several blocks of every size are filled and released; the allocator reuses them. Nothing happens elsewhere: on a CPU
    ``torch.use_deterministic_algorithms`` makes fresh memory NaN by itself.
    """
    if device.type != "cuda":
        return
    blocks = [
        torch.full(((size + 3) // 4,), math.nan, dtype=torch.float32, device=device)
        for size in [*sizes, *sizes, 1 << 10, 1 << 16, 1 << 20, 1 << 24, 1 << 26]
        if size > 0
    ]
    del blocks
