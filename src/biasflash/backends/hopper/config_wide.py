"""Tiles of the backward kernels of heads wider than 128 columns, as data with reasons; see ``config``."""

from __future__ import annotations

from dataclasses import dataclass

from biasflash.backends.hopper import config


@dataclass(frozen=True, kw_only=True)
class WideTile:
    """A program of wide_dkdv (64 keys stay) or wide_dq (128 queries stay); tiles of 64 rows stream, without a bias.

    Heads are pieces of ``piece`` columns. A ring has (pieces of a slot, slots): of queries or keys, and of output
    gradients or values.
    """

    kernel: str
    width: int  # columns of q and k, filled up with zeros
    width_v: int  # of v
    piece: int
    ring: tuple[int, int]
    ring_v: tuple[int, int]
    why: str
    held: tuple[int, int] = (0, 0)  # pieces of the keys and of the values of wide_dkdv that are kept in registers

    @property
    def own(self) -> int:
        return 64 if self.kernel == "dkdv" else 128

    def __str__(self) -> str:
        columns = f"{self.width} and {self.width_v} columns"
        return f"{self.own} x 64 of {columns}, 2 warpgroups, {self.ring[1]} and {self.ring_v[1]} slots"


_EXACT = "products are not filled up with zeros"
#: A slot holds half a tile of 256 columns: more than two tiles do not fit, and with slots of whole ones a model of the
#: rings has the products idle for a fifth of the time.
WIDE: tuple[WideTile, ...] = (
    WideTile(kernel="dkdv", width=192, width_v=128, piece=64, ring=(3, 4), ring_v=(2, 4), why=_EXACT),
    WideTile(kernel="dkdv", width=192, width_v=192, piece=64, ring=(3, 3), ring_v=(3, 3), why=_EXACT),
    WideTile(kernel="dkdv", width=256, width_v=256, piece=128, ring=(1, 5), ring_v=(1, 4), why="226 KB"),
    WideTile(kernel="dq", width=192, width_v=128, piece=64, ring=(3, 3), ring_v=(2, 3), why=_EXACT),
    WideTile(kernel="dq", width=192, width_v=192, piece=64, ring=(3, 3), ring_v=(3, 2), why=_EXACT),
    WideTile(kernel="dq", width=256, width_v=256, piece=128, ring=(1, 4), ring_v=(1, 2), why="226 KB"),
)


def is_wide(width: int, width_v: int) -> bool:
    """Whether the kernels of ``config.BACKWARD`` have no room for these widths."""
    return max(width, width_v) > max(tile.width for tile in config.BACKWARD)


def wide_tile(kernel: str, width: int, width_v: int) -> WideTile:
    return next(t for t in WIDE if t.kernel == kernel and width <= t.width and width_v <= t.width_v)
