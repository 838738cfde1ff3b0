"""What a row of the tables of tiles holds, by kernel, and short ways to write one; see ``config``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class ForwardTile:
    """A program of the forward kernel: ``64 * warpgroups`` queries, keys in tiles of ``block_n``.

    ``pieces`` of 64 columns make up queries and keys where there are several: tensor sides are powers of two. The
    output goes out in ``out_pieces`` parts of its columns, one after the other through one place if ``out_apart``.
    """

    width: int  # the widest D that it serves
    has_bias: bool
    warpgroups: int
    block_n: int
    kv_stages: int
    bias_stages: int
    why: str
    is_causal: bool | None = None  # only for these; None: for all
    out_apart: bool = False
    pinned: bool = True
    pieces: int = 1
    out_pieces: int = 1
    width_v: int = 0  # the widest Dv; 0: as D
    in_turns: bool = False  # warpgroups issue products one after the other

    @property
    def block_m(self) -> int:
        return 64 * self.warpgroups

    def __str__(self) -> str:
        bias = f", {self.bias_stages} of the bias" if self.has_bias else ""
        return f"{self.block_m} x {self.block_n}, {self.warpgroups} warpgroups, {self.kv_stages} stages{bias}"


@dataclass(frozen=True, kw_only=True)
class SharedTile:
    """A program of the forward kernel of a bias that batch items share: 128 queries of ``rows`` items at a time."""

    width: int
    rows: int
    block_n: int
    q_buffers: int
    kv_stages: int
    bias_stages: int
    ahead: bool
    why: str
    fixed: bool = False  # rows keep the reference of their first keys; bfloat16 only
    is_causal: bool = False  # only for causal calls
    in_turns: bool = False  # warpgroups issue products one after the other
    block_m: int = 128

    def __str__(self) -> str:
        return f"{self.rows} items x 128 x {self.block_n}, 2 warpgroups, {self.kv_stages} stages"


@dataclass(frozen=True, kw_only=True)
class BackwardTile:
    """A program of dq or dkdv: 128 rows that stay, tiles of ``block`` rows that stream."""

    kernel: str
    width: int
    has_bias: bool
    block: int
    rows: int  # batch items around one tile of a shared bias
    tiles: int  # streamed tiles of one unrolled round
    a_buffers: int
    stages: int
    bias_stages: int
    ahead: bool
    keep: bool
    why: str
    stores: bool = True  # may also store score gradients
    ds_slots: int = 2  # places that each warpgroup has for what it stores
    reference_first: bool = False  # references of met queries are in registers before the scores are

    def __str__(self) -> str:
        items = f"{self.rows} items x " if self.rows > 1 else ""
        return f"{items}128 x {self.block}, 2 warpgroups, {self.stages} stages"


@dataclass(frozen=True, kw_only=True)
class OwnerTile:
    """A program of dbias: 128 queries x ``block_n * chunks_n`` keys."""

    width: int
    block_n: int
    chunks_n: int
    stages: int
    deep: int  # what runs under what, see ``dbias_kernel``
    why: str
    parts: int = 1  # copies that bring the keys of a tile

    @property
    def columns(self) -> int:
        return self.block_n * self.chunks_n

    def __str__(self) -> str:
        return f"128 x {self.columns}, 2 warpgroups, {self.stages} stages"


@dataclass(frozen=True, kw_only=True)
class SingleTile:
    """A program of dqkv: 128 keys that stay, ``tiles`` times 64 queries a round.

    ``resident``: it walks over all keys of a head, at most ``MOST_RESIDENT_KEYS``, and nobody takes turns.
    """

    width: int
    resident: bool
    tiles: int
    a_buffers: int
    stages: int
    bias_stages: int
    ds_slots: int
    dq_slots: int
    in_registers: bool
    dk_first: bool
    why: str
    has_bias: bool = False
    is_causal: bool = False

    def __str__(self) -> str:
        rounds = "all keys of a head" if self.resident else "128 keys in turns"
        return f"{rounds} x {64 * self.tiles}, 2 warpgroups, {self.stages} stages"


@dataclass(frozen=True, kw_only=True)
class PairTile:
    """A program of dq_dbias: 64 queries x all keys, at most ``2 * block_n * chunks_n``; keys come ``box`` at a time."""

    width: int
    block_n: int
    chunks_n: int
    box: int
    stages: int
    rows: int
    left: bool
    why: str

    @property
    def most_keys(self) -> int:
        return 2 * self.block_n * self.chunks_n

    def __str__(self) -> str:
        return f"64 x {self.most_keys}, 2 warpgroups, {self.stages} stages"


def forward_row(
    width: int, has_bias: bool, warpgroups: int, block_n: int, kv: int, bias: int, why: str, **more: Any
) -> ForwardTile:
    return ForwardTile(
        width=width,
        has_bias=has_bias,
        warpgroups=warpgroups,
        block_n=block_n,
        kv_stages=kv,
        bias_stages=bias,
        why=why,
        **more,
    )


def shared_row(
    width: int, rows: int, block_n: int, kv: int, bias: int, ahead: bool, why: str, **more: bool
) -> SharedTile:
    return SharedTile(
        width=width,
        rows=rows,
        block_n=block_n,
        q_buffers=2,
        kv_stages=kv,
        bias_stages=bias,
        ahead=ahead,
        why=why,
        **more,
    )


def backward_row(
    kernel: str,
    width: int,
    has_bias: bool,
    block: int,
    counts: tuple[int, int, int, int, int],
    ahead: bool,
    keep: bool,
    why: str,
    **more: Any,
) -> BackwardTile:
    """``counts``: items, streamed tiles of a round, buffers of what stays, stages, stages of the bias."""
    rows, tiles, a_buffers, stages, bias_stages = counts
    return BackwardTile(
        kernel=kernel,
        width=width,
        has_bias=has_bias,
        block=block,
        rows=rows,
        tiles=tiles,
        a_buffers=a_buffers,
        stages=stages,
        bias_stages=bias_stages,
        ahead=ahead,
        keep=keep,
        why=why,
        **more,
    )
