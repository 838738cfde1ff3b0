"""Which items a persistent program of the forward kernel takes, and in which order.

Items are dealt in lots. Without CAUSAL each item is one. With it, the items of a lot are all query tiles of some (batch
item, head) pairs, the longest first, and the program's item of round ``turn`` is at ``position`` of the lot.
"""

from biasflash.backends.hopper.gluon import gl, jit
from biasflash.tile.span import place

L2_SHARE = gl.constexpr(1 << 24)  # bytes of the keys and values of a lot, or a little more: a Hopper caches 50 MB


@jit
def deal(items, extent, FORM: gl.constexpr):
    """``(lots, pairs in a lot, lots with one pair more)``.

    CAUSAL: lots hold what fits in the cache, two rounds of the grid at least, and their number is even.
    """
    if not FORM.IS_CAUSAL:
        return items, 1, 0
    else:
        M, N, heads, batch, _shift = extent
        pairs = batch * heads
        least = gl.cdiv(2 * gl.num_programs(0), gl.cdiv(M, FORM.BLOCK_M))
        lots = pairs // gl.maximum(L2_SHARE // (2 * (FORM.D_BLOCK + FORM.DV_BLOCK)) // N, least)
        lots = gl.maximum(lots // 2 * 2, 1)
        return lots, pairs // lots, pairs % lots


@jit
def position(lot, turn):
    """Where in a lot the program's item of round ``turn`` is.

    Every second round is dealt backwards, so that a short item follows a long one; in every second lot the other
    rounds are, so that the incomplete last ones fall to other programs. The fullest program then has 0 to 4 % more than
    the mean; dealt on and on through all lots it may have 30 to 70 % more.
    """
    last = gl.num_programs(0) - 1
    return turn * (last + 1) + gl.where((lot + turn) % 2 == 1, last - gl.program_id(0), gl.program_id(0))


@jit
def first_lot(FORM: gl.constexpr):
    """The lot of the program's first item."""
    if FORM.IS_CAUSAL:
        return gl.program_id(0) * 0
    else:
        return gl.program_id(0)


@jit
def following(lot, turn, dealt, extent, FORM: gl.constexpr):
    """(lot, round) of the program's next item."""
    if not FORM.IS_CAUSAL:
        return lot + gl.num_programs(0), turn
    else:
        _lots, width, wider = dealt
        size = (width + (lot < wider).to(gl.int32)) * gl.cdiv(extent[0], FORM.BLOCK_M)
        over = position(lot, turn + 1) >= size
        return lot + over.to(gl.int32), gl.where(over, 0, turn + 1)


@jit
def locate(lot, turn, dealt, extent, FORM: gl.constexpr):
    """(query tile, batch item, head) of an item."""
    M, _N, heads, batch, _shift = extent
    tiles = gl.cdiv(M, FORM.BLOCK_M)
    if not FORM.IS_CAUSAL:
        return place(lot, tiles, batch, heads, FORM.ORDER)
    else:
        _lots, width, wider = dealt
        first = lot * width + gl.minimum(lot, wider)
        width += (lot < wider).to(gl.int32)
        at = position(lot, turn)
        tile, pair = tiles - 1 - at // width, first + at % width
        if FORM.ORDER == "tile,head,batch":
            return tile, pair // heads, pair % heads
        else:
            return tile, pair % batch, pair // batch
