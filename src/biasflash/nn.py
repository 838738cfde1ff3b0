"""Module form of the doors: a multi-head attention layer, and a trainable relative-position bias to give it."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from biasflash.api import Terms, attention, attention_qkvpacked

__all__ = ["Attention", "RelativePositionBias2d"]


class RelativePositionBias2d(nn.Module):
    """A trainable bias that depends on the offset between two cells of a grid, one table per head.

    Cells are numbered row by row, so query ``i`` sits at ``(i // width, i % width)``. The table starts at zero, which
    is plain attention.

    Args:
        height: rows of the grid, at least 1.
        width: columns of the grid, at least 1.
        heads: number of query heads, at least 1.

    Attributes:
        table: parameter ``(heads, 2 height - 1, 2 width - 1)``. Its middle is "the key is the query's own cell";
            one step down in the table is a key one row below the query, one step right a key one column to the right.
    """

    cells: Tensor

    def __init__(self, height: int, width: int, heads: int) -> None:
        super().__init__()
        for name, size in (("height", height), ("width", width), ("heads", heads)):
            if size < 1:
                raise ValueError(f"{name} must be at least 1, got {size}")
        self.height, self.width, self.heads = height, width, heads
        self.table = nn.Parameter(torch.zeros(heads, 2 * height - 1, 2 * width - 1))
        rows = torch.arange(height).repeat_interleave(width)
        columns = torch.arange(width).repeat(height)
        down = rows[None, :] - rows[:, None] + height - 1  # [M, N], 0 .. 2 height - 2
        right = columns[None, :] - columns[:, None] + width - 1  # [M, N], 0 .. 2 width - 2
        self.register_buffer("cells", down * (2 * width - 1) + right, persistent=False)

    def forward(self) -> Tensor:
        """The bias ``(heads, N, N)`` with ``N = height * width``, ready to be passed as ``bias=``."""
        return self.table.flatten(1)[:, self.cells]

    def extra_repr(self) -> str:
        return f"height={self.height}, width={self.width}, heads={self.heads}"


class Attention(nn.Module):
    """Multi-head self-attention: one projection to q, k and v, ``biasflash.attention``, one projection back.

    Args:
        dim: width of the tokens, a multiple of ``heads``.
        heads: query heads ``Hq``; each is ``D = dim / heads`` wide.
        kv_heads: key and value heads ``Hkv``, a divisor of ``heads``; None means ``heads``.
        bias: None, or a module that takes no argument and returns a bias of a shape that broadcasts to
            ``*B Hq N N``, such as ``RelativePositionBias2d``. It is called once per forward pass and trained along.
        causal: as in ``biasflash.attention``.
        backend: as in ``biasflash.attention``.
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        kv_heads: int | None = None,
        bias: nn.Module | None = None,
        *,
        causal: bool | str = False,
        backend: str | None = None,
    ) -> None:
        super().__init__()
        kv_heads = heads if kv_heads is None else kv_heads
        if heads < 1 or dim < 1 or dim % heads != 0:
            raise ValueError(f"dim must be a positive multiple of heads, got dim={dim}, heads={heads}")
        if kv_heads < 1 or heads % kv_heads != 0:
            raise ValueError(f"heads must be a multiple of kv_heads, got heads={heads}, kv_heads={kv_heads}")
        if bias is not None and not isinstance(bias, nn.Module):
            raise TypeError(
                f"bias must be None or a module that returns a bias, got {type(bias).__name__}; tensors go to forward"
            )
        self.heads, self.kv_heads, self.width = heads, kv_heads, dim // heads
        self.causal, self.backend = causal, backend
        self.qkv = nn.Linear(dim, (heads + 2 * kv_heads) * self.width)
        self.out = nn.Linear(dim, dim)
        self.bias = bias

    def forward(self, x: Tensor, bias: Terms = None, mask: Terms = None) -> Tensor:
        """Tokens ``*B N dim`` to tokens ``*B N dim``.

        Args:
            x: ``*B N dim``.
            bias: further biases, added to the module's own; as in ``biasflash.attention``.
            mask: as in ``biasflash.attention``.
        """
        biases = [] if bias is None else [bias] if isinstance(bias, Tensor) else list(bias)
        if self.bias is not None:
            biases.append(self.bias())
        packed: Tensor = self.qkv(x).unflatten(-1, (-1, self.width))  # *B N (Hq + 2 Hkv) D
        if self.heads == self.kv_heads:
            qkv = torch.unflatten(packed, -2, (3, self.heads))
            found = attention_qkvpacked(qkv, biases, mask, causal=self.causal, backend=self.backend)
        else:
            q, k, v = torch.split(packed, [self.heads, self.kv_heads, self.kv_heads], dim=-2)
            found = attention(q, k, v, biases, mask, causal=self.causal, backend=self.backend)
        assert isinstance(found, Tensor)
        merged: Tensor = self.out(found.flatten(-2))
        return merged

    def extra_repr(self) -> str:
        return f"heads={self.heads}, kv_heads={self.kv_heads}, width={self.width}, causal={self.causal!r}"
