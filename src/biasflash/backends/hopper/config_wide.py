"""Tiles of the backward kernels of heads wider than 128 columns, as data with reasons; see ``config``."""

from __future__ import annotations

from dataclasses import dataclass

from biasflash.backends.hopper import config


@dataclass(frozen=True, kw_only=True)
class WideTile:
    """A program of wide_dkdv (64 keys stay) or wide_dq (128 queries stay); tiles of 64 rows stream, without a bias.

    Heads are pieces of ``piece`` columns. ``ring``: pieces of a slot, and slots, of queries or keys; ``ring_v``: of
    output gradients or values. ``held``: pieces of what stays that are kept in registers, of keys and values in
    wide_dkdv, of queries and output gradients in wide_dq.
    """

    kernel: str
    width: int  # columns of q and k, filled up with zeros
    width_v: int  # of v
    piece: int
    ring: tuple[int, int]
    ring_v: tuple[int, int]
    held: tuple[int, int]
    why: str
    is_causal: bool | None = None  # only for these; None: for all
    own_slots: int = 1  # of wide_dkdv: items whose keys and values are copied in at a time

    @property
    def own(self) -> int:
        return 64 if self.kernel == "dkdv" else 128

    def __str__(self) -> str:
        columns = f"{self.width} and {self.width_v} columns"
        return f"{self.own} x 64 of {columns}, 2 warpgroups, {self.ring[1]} and {self.ring_v[1]} slots"


def _tile(
    kernel: str,
    widths: tuple[int, int],
    piece: int,
    rings: tuple[int, int, int, int],
    held: tuple[int, int],
    why: str,
    is_causal: bool | None = None,
    own_slots: int = 1,
) -> WideTile:
    """``rings``: pieces of a slot and slots, of both rings."""
    return WideTile(
        kernel=kernel,
        width=widths[0],
        width_v=widths[1],
        piece=piece,
        ring=rings[:2],
        ring_v=rings[2:],
        held=held,
        why=why,
        is_causal=is_causal,
        own_slots=own_slots,
    )


#: A slot holds half a tile of 256 columns: more than two tiles do not fit, and with slots of whole ones a model of the
#: rings has the products idle for a fifth of the time. Score products of 64 columns read as many bytes of shared memory
#: as it delivers meanwhile; with the left operand in registers they read half of that.
WIDE: tuple[WideTile, ...] = (
    _tile("dkdv", (192, 128), 64, (3, 3, 2, 3), (3, 2), "2 x 16 heads of 4k, causal: 0.521 ms", own_slots=2),
    _tile("dkdv", (192, 192), 64, (3, 3, 3, 3), (3, 3), "no product is filled up with zeros"),
    _tile("dkdv", (256, 256), 128, (1, 5, 1, 4), (0, 0), "operands in registers spill", is_causal=True),
    _tile("dkdv", (256, 256), 128, (1, 5, 1, 4), (1, 0), "2 x 16 heads of 4k: 1.63 ms"),
    _tile("dq", (192, 128), 64, (3, 3, 2, 3), (2, 0), "2 x 16 heads of 4k, causal: 0.372 ms"),
    _tile("dq", (192, 192), 64, (3, 3, 3, 2), (2, 0), "no product is filled up with zeros"),
    _tile("dq", (256, 256), 128, (1, 4, 1, 2), (0, 0), "2 x 16 heads of 4k: 1.11 ms"),
)


def is_wide(width: int, width_v: int) -> bool:
    """Whether the kernels of ``config.BACKWARD`` have no room for these widths."""
    return max(width, width_v) > max(tile.width for tile in config.BACKWARD)


def wide_tile(kernel: str, width: int, width_v: int, is_causal: bool) -> WideTile:
    fits = (t for t in WIDE if t.kernel == kernel and width <= t.width and width_v <= t.width_v)
    return next(t for t in fits if t.is_causal in (None, is_causal))
