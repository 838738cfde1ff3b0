"""Tiles beside a float32 bias, in the order of ``config``: shared memory holds half as much of it.

Sizes are what fits, in 232,448 bytes, without spills: no two rows were raced.
"""

from __future__ import annotations

from biasflash.backends.hopper.config_kinds import (
    BackwardTile,
    ForwardTile,
    OwnerTile,
    SharedTile,
    backward_row,
    forward_row,
    shared_row,
)

FORWARD: tuple[ForwardTile, ...] = (
    forward_row(32, True, 2, 128, 4, 2, "205 KB"),
    forward_row(64, True, 2, 128, 2, 2, "213 KB"),
    forward_row(128, True, 2, 64, 3, 3, "230 KB; tiles of 128 keys leave room for one of the bias"),
)
SHARED: tuple[SharedTile, ...] = (
    shared_row(32, 2, 128, 4, 2, False, "230 KB", fixed=True),
    shared_row(64, 2, 64, 6, 2, True, "230 KB", fixed=True),
    shared_row(32, 2, 128, 4, 2, False, "230 KB", fixed=False),
    shared_row(64, 2, 64, 6, 2, True, "230 KB", fixed=False),
)
BACKWARD: tuple[BackwardTile, ...] = (
    backward_row("dq", 32, True, 64, (2, 1, 2, 6, 3), False, True, "two items read one bias tile"),
    backward_row("dq", 32, True, 64, (1, 2, 2, 6, 4), True, False, "200 registers, no spills"),
    backward_row("dq", 64, True, 64, (2, 1, 1, 5, 2), False, True, "two items read one bias tile"),
    backward_row("dq", 64, True, 64, (1, 2, 1, 5, 3), True, False, "215 KB"),
    backward_row("dq", 128, True, 64, (1, 2, 1, 3, 2), True, False, "231 KB"),
    backward_row("dkdv", 32, True, 64, (2, 1, 2, 6, 3), False, True, "two items read one bias tile", stores=False),
    backward_row("dkdv", 32, True, 64, (1, 2, 2, 6, 4), True, False, "211 registers, no spills", stores=False),
    backward_row("dkdv", 32, True, 64, (1, 2, 2, 6, 2), True, False, "217 KB with room for score gradients"),
    backward_row("dkdv", 64, True, 64, (1, 2, 2, 5, 2), True, False, "216 KB", stores=False),
    backward_row(
        "dkdv", 64, True, 64, (1, 1, 1, 4, 2), False, False, "232 KB with score gradients; two tiles a round spill"
    ),
    backward_row("dkdv", 128, True, 64, (1, 1, 1, 3, 2), False, False, "231 KB", stores=False),
    backward_row(
        "dkdv", 128, True, 64, (1, 1, 1, 2, 2), False, False, "231 KB with room for score gradients", ds_slots=1
    ),
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
