"""Tiles beside a float32 bias, in the order of ``config``: shared memory holds half as much of it.

Nothing here was measured: sizes are what fits, in 232,448 bytes, without spills.
"""

from __future__ import annotations

from typing import Any

from biasflash.backends.hopper.config_kinds import BackwardTile, ForwardTile, OwnerTile, SharedTile


def _forward(width: int, block_n: int, kv: int, bias: int, why: str) -> ForwardTile:
    return ForwardTile(
        width=width, has_bias=True, warpgroups=2, block_n=block_n, kv_stages=kv, bias_stages=bias, why=why
    )


def _shared(width: int, block_n: int, kv: int, ahead: bool, fixed: bool) -> SharedTile:
    return SharedTile(
        width=width,
        rows=2,
        block_n=block_n,
        q_buffers=2,
        kv_stages=kv,
        bias_stages=2,
        ahead=ahead,
        fixed=fixed,
        why="230 KB",
    )


def _backward(
    kernel: str, width: int, counts: tuple[int, int, int, int, int], ahead: bool, keep: bool, why: str, **more: Any
) -> BackwardTile:
    """``counts``: items, streamed tiles of a round, buffers of what stays, stages, stages of the bias."""
    rows, tiles, a_buffers, stages, bias_stages = counts
    return BackwardTile(
        kernel=kernel,
        width=width,
        has_bias=True,
        block=64,
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


FORWARD: tuple[ForwardTile, ...] = (
    _forward(32, 128, 4, 2, "205 KB"),
    _forward(64, 128, 2, 2, "213 KB"),
    _forward(128, 64, 3, 3, "230 KB; tiles of 128 keys leave room for one of the bias"),
)
SHARED: tuple[SharedTile, ...] = (
    _shared(32, 128, 4, ahead=False, fixed=True),
    _shared(64, 64, 6, ahead=True, fixed=True),
    _shared(32, 128, 4, ahead=False, fixed=False),
    _shared(64, 64, 6, ahead=True, fixed=False),
)
BACKWARD: tuple[BackwardTile, ...] = (
    _backward("dq", 32, (2, 1, 2, 6, 3), False, True, "two items read one bias tile"),
    _backward("dq", 32, (1, 2, 2, 6, 4), True, False, "200 registers, no spills"),
    _backward("dq", 64, (2, 1, 1, 5, 2), False, True, "two items read one bias tile"),
    _backward("dq", 64, (1, 2, 1, 5, 3), True, False, "215 KB"),
    _backward("dq", 128, (1, 2, 1, 3, 2), True, False, "231 KB"),
    _backward("dkdv", 32, (2, 1, 2, 6, 3), False, True, "two items read one bias tile", stores=False),
    _backward("dkdv", 32, (1, 2, 2, 6, 4), True, False, "211 registers, no spills", stores=False),
    _backward("dkdv", 32, (1, 2, 2, 6, 2), True, False, "217 KB with room for score gradients"),
    _backward("dkdv", 64, (1, 2, 2, 5, 2), True, False, "216 KB", stores=False),
    _backward("dkdv", 64, (1, 1, 1, 4, 2), False, False, "232 KB with score gradients; two tiles a round spill"),
    _backward("dkdv", 128, (1, 1, 1, 3, 2), False, False, "231 KB", stores=False),
    _backward("dkdv", 128, (1, 1, 1, 2, 2), False, False, "231 KB with room for score gradients", ds_slots=1),
)
OWNER: tuple[OwnerTile, ...] = (
    OwnerTile(
        width=32,
        block_n=128,
        chunks_n=1,
        stages=4,
        deep=2,
        why="201 KB; with tiles of 256 keys two stages fit, which spill",
    ),
    OwnerTile(width=64, block_n=128, chunks_n=1, stages=2, deep=2, why="199 KB"),
    OwnerTile(
        width=128,
        block_n=32,
        chunks_n=4,
        stages=2,
        deep=0,
        parts=4,
        why="232 KB; tiles of 64 keys would read 12 bytes a score, these read 8",
    ),
)
