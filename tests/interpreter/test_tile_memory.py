"""Where elements lie: encoded integers, head offsets, rows under any strides, tiles that move back, row statistics."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from biasflash.backends.triton import geometry
from biasflash.tile.bias import term_pointers
from biasflash.tile.memory import (
    head_offset,
    inside,
    load_rows,
    load_seen_rows,
    local,
    owned,
    plain,
    row_pointers,
    shifted,
    shifted_keys,
    store_rows,
)
from biasflash.tile.softmax import load_row_statistics, store_row_statistics

# ------------------------------------------------------------------------------------------------------- plain integers


@triton.jit
def plain_kernel(codes_ptr, values_ptr, codes, value_ptr):
    i = tl.program_id(0)
    tl.store(values_ptr + i, plain(tl.load(codes_ptr + i)))
    if i == 0:
        for j in tl.static_range(len(codes)):
            tl.store(value_ptr + j, plain(codes[j]))


def test_integers_come_back_from_their_codes() -> None:
    values = [*range(-70, 300), 2**20, 2**30 - 2, 2**31, 2**31 + 1, 2**40 + 16]
    codes = torch.tensor([geometry.code(v) for v in values])
    got, from_tuple = torch.empty(len(values), dtype=torch.int64), torch.empty(4, dtype=torch.int64)
    few = (0, 1, 16, 2**33)
    plain_kernel[(len(values),)](codes, got, tuple(map(geometry.code, few)), from_tuple)
    assert got.tolist() == values
    assert from_tuple.tolist() == list(few)


def test_codes_fall_into_one_class_of_specialisation() -> None:
    """Triton compiles anew for an integer of 1 and for one divisible by 16; no code of a stride or size is either."""
    codes = [geometry.code(v) for v in range(5000)]
    assert all(c % 2 == 1 and c > 1 for c in codes)


# --------------------------------------------------------------------------------------------------------- head offsets


@triton.jit
def head_offset_kernel(offsets_ptr, strides, sizes, heads, VEC: tl.constexpr, WIDE: tl.constexpr):
    i = tl.program_id(0)
    tl.store(offsets_ptr + i, head_offset(i // heads, i % heads, strides, sizes, VEC, WIDE))


def head_offsets(
    sizes: tuple[int, ...], heads: int, strides: tuple[int, ...], vec: int, wide: bool = True
) -> list[int]:
    """Of every (batch item, head), heads fastest; ``strides`` in elements, ``(*batch, head, row, column)``."""
    offsets = torch.empty(math.prod(sizes) * heads, dtype=torch.int64)
    codes = tuple(geometry.code(s // max(vec, 1)) for s in strides)
    head_offset_kernel[(len(offsets),)](offsets, codes, tuple(map(geometry.code, sizes)), heads, VEC=vec, WIDE=wide)
    return offsets.tolist()


@pytest.mark.parametrize("vec", [0, 1, 4, 8])
@pytest.mark.parametrize("sizes", [(1,), (5,), (2, 3), (3, 1, 2), (2, 2, 3, 2)], ids=str)
@pytest.mark.parametrize("wide", [False, True], ids=["32 bits", "64 bits"])
def test_a_head_lies_where_its_strides_say(sizes: tuple[int, ...], vec: int, wide: bool) -> None:
    heads, unit = 3, max(vec, 1)
    strides = (*(unit * s for s in (1000, 0, 77, 310, 13)[: len(sizes)]), unit * 11, unit * 40, 1)
    wanted = [
        sum(i * s for i, s in zip(at, strides, strict=False)) for at in itertools.product(*map(range, (*sizes, heads)))
    ]
    assert head_offsets(sizes, heads, strides, vec, wide) == wanted


@pytest.mark.parametrize("vec", [0, 8])
def test_heads_beyond_31_bits(vec: int) -> None:
    strides = (2**33, 2**31 + 8, 2**30, 64, 1)
    wanted = [
        sum(i * s for i, s in zip(at, strides, strict=False)) for at in itertools.product(range(3), range(2), range(3))
    ]
    assert head_offsets((3, 2), 3, strides, vec) == wanted


@triton.jit
def row_offset_kernel(
    base_ptr, offsets_ptr, strides, start, BLOCK: tl.constexpr, VEC: tl.constexpr, WIDE: tl.constexpr
):
    local_rows = local(BLOCK, WIDE)
    rows = row_pointers(base_ptr, start, local_rows, strides, 16, VEC, WIDE)
    term = term_pointers(
        base_ptr, strides, start, 0, local_rows[:, None], local(16, WIDE)[None, :], True, True, VEC, WIDE
    )
    at = offsets_ptr + tl.arange(0, BLOCK)[:, None] * 16 + tl.arange(0, 16)[None, :]
    tl.store(at, rows.to(tl.int64) - base_ptr.to(tl.int64))
    tl.store(at + BLOCK * 16, term.to(tl.int64) - base_ptr.to(tl.int64))


@pytest.mark.parametrize(
    ("vec", "row", "column"), [(0, 2**30, 3), (0, 2**31 + 8, 3), (1, 2**31 + 9, 1), (8, 2**31 + 8, 1)]
)
def test_rows_beyond_31_bits(vec: int, row: int, column: int) -> None:
    """Addresses of rows of q, k, v and of a bias, none of which is read."""
    base, offsets = torch.empty(1, dtype=torch.float16), torch.empty(2, 4, 16, dtype=torch.int64)
    codes = (geometry.code(0), geometry.code(0), geometry.code(row // max(vec, 1)), geometry.code(column))
    row_offset_kernel[(1,)](base, offsets, codes, 5, BLOCK=4, VEC=vec, WIDE=True)
    wanted = 2 * ((5 + torch.arange(4))[:, None] * row + torch.arange(16) * column)
    assert torch.equal(offsets, wanted.expand(2, 4, 16))


# ----------------------------------------------------------------------------------------------------------- rows


@triton.jit
def copy_rows_kernel(
    from_ptr,
    to_ptr,
    seen_ptr,
    from_strides,
    to_strides,
    start,
    rows,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_W: tl.constexpr,
    FROM_VEC: tl.constexpr,
    TO_VEC: tl.constexpr,
    WIDE: tl.constexpr,
    SEEN: tl.constexpr,
):
    local = tl.arange(0, BLOCK)
    inside_rows = tl.minimum(local, rows - 1 - start)
    if SEEN:
        seen = tl.load(seen_ptr + start + local, mask=start + local < rows, other=0) != 0
        tile = load_seen_rows(from_ptr, start, inside_rows, from_strides, seen, WIDTH, BLOCK_W, FROM_VEC, WIDE)
    else:
        tile = load_rows(from_ptr, start, inside_rows, from_strides, WIDTH, BLOCK_W, FROM_VEC, WIDE)
    beyond = tl.where(tl.arange(0, BLOCK_W)[None, :] < WIDTH, 0.0, tile.to(tl.float32))
    tl.static_assert(BLOCK_W >= WIDTH)
    tile = tile + tl.sum(beyond, 1)[:, None].to(tile.dtype)  # whatever was read past the width shows in every column
    store_rows(to_ptr, start, local, to_strides, start + local < rows, tile, WIDTH, BLOCK_W, TO_VEC, WIDE)


def row_layout(layout: str, rows: int, width: int) -> tuple[Tensor, Tensor]:
    """A view ``(rows, width)`` of half precision and the memory around it, all NaN."""
    if layout == "aligned":
        around = torch.full((rows + 2, 40), math.nan, dtype=torch.float16)
        return around[1 : rows + 1, :width], around
    if layout == "odd row stride":
        around = torch.full((rows + 2, width + 1), math.nan, dtype=torch.float16)
        return around[1 : rows + 1, :width], around
    if layout == "transposed":
        around = torch.full((width + 2, rows + 3), math.nan, dtype=torch.float16)
        return around[1 : width + 1, 1 : rows + 1].T, around
    around = torch.full((2 * rows, 2 * width), math.nan, dtype=torch.float16)
    return around[::2, ::2], around


LAYOUTS = ("aligned", "odd row stride", "transposed", "every second")


@pytest.mark.parametrize("wide", [False, True], ids=["32 bits", "64 bits"])
@pytest.mark.parametrize("width", [16, 13, 1])
@pytest.mark.parametrize(("source", "target"), list(itertools.product(LAYOUTS, LAYOUTS)))
def test_rows_are_read_and_written_where_they_lie(source: str, target: str, width: int, wide: bool) -> None:
    rows, start = 21, 8
    values = torch.randn(rows, width).half()
    given, _ = row_layout(source, rows, width)
    given.copy_(values)
    taken, around = row_layout(target, rows, width)
    views = [geometry.view([0, 0, *t.stride()], 2, width, t.data_ptr() % 16 == 0) for t in (given, taken)]
    seen = (torch.rand(rows) < 0.5).to(torch.uint8)
    copy_rows_kernel[(1,)](
        given,
        taken,
        seen,
        views[0].codes,
        views[1].codes,
        start,
        rows,
        WIDTH=width,
        BLOCK=16,
        BLOCK_W=16,
        FROM_VEC=views[0].vec,
        TO_VEC=views[1].vec,
        WIDE=wide,
        SEEN=False,
    )
    assert torch.equal(taken[start:], values[start:])
    assert taken[:start].isnan().all()
    assert int((~around.isnan()).sum()) == (rows - start) * width, "something outside the rows was written"


def test_rows_that_are_not_seen_read_as_zero() -> None:
    rows, width = 21, 13
    values, seen = torch.randn(rows, width), torch.rand(rows) < 0.5
    given = values.masked_fill(~seen[:, None], math.nan)
    taken = torch.empty(rows, width)
    view = geometry.view([0, 0, width, 1], 4, width, False)
    copy_rows_kernel[(1,)](
        given,
        taken,
        seen.to(torch.uint8),
        view.codes,
        view.codes,
        0,
        rows,
        WIDTH=width,
        BLOCK=32,
        BLOCK_W=16,
        FROM_VEC=view.vec,
        TO_VEC=view.vec,
        WIDE=False,
        SEEN=True,
    )
    assert torch.equal(taken, values.masked_fill(~seen[:, None], 0.0))


# ------------------------------------------------------------------------------------------- tiles that move back


@triton.jit
def count_kernel(
    counts_ptr, reads_ptr, length, KEYS: tl.constexpr, EVEN: tl.constexpr, SHORT: tl.constexpr, BLOCK: tl.constexpr
):
    """Counts how often each position is owned; notes the lowest and highest position that a tile reads."""
    tile = tl.program_id(0)
    start = tile * BLOCK
    local = tl.arange(0, BLOCK)
    at = shifted_keys(start, length, BLOCK, SHORT, EVEN) if KEYS else shifted(start, length, BLOCK, SHORT)
    own = owned(at, start, local, length, SHORT)
    read = at + inside(local, length, SHORT)
    tl.atomic_add(counts_ptr + at + local, 1, mask=own)
    tl.store(reads_ptr + 2 * tile, tl.min(read, 0))
    tl.store(reads_ptr + 2 * tile + 1, tl.max(read, 0))


@pytest.mark.parametrize("keys", [False, True], ids=["queries", "keys"])
@pytest.mark.parametrize("block", [16, 32])
def test_tiles_own_every_position_once_and_read_nothing_else(block: int, keys: bool) -> None:
    for length in (1, 2, 5, 15, 16, 17, 31, 32, 33, 47, 48, 63, 64, 65, 96, 100):
        tiles = triton.cdiv(length, block)
        counts, reads = torch.zeros(length + block, dtype=torch.int32), torch.empty(tiles, 2, dtype=torch.int32)
        count_kernel[(tiles,)](
            counts, reads, length, KEYS=keys, EVEN=length % 16 == 0, SHORT=block > length, BLOCK=block
        )
        assert counts.tolist() == [1] * length + [0] * block, length
        assert reads.min() >= 0, length
        assert reads.max() < length, length


# -------------------------------------------------------------------------------------------------- row statistics


@triton.jit
def write_statistics_kernel(
    values_ptr, reference_ptr, delta_ptr, M, TAIL: tl.constexpr, SHORT_M: tl.constexpr, BLOCK_M: tl.constexpr
):
    q_start = tl.program_id(0) * BLOCK_M
    q_at = shifted(q_start, M, BLOCK_M, SHORT_M)
    q_local = tl.arange(0, BLOCK_M)
    value = tl.load(values_ptr + q_at + inside(q_local, M, SHORT_M))
    q_own = owned(q_at, q_start, q_local, M, SHORT_M)
    store_row_statistics(reference_ptr, delta_ptr, value, -value, q_at + inside(q_local, M, SHORT_M), q_own, M, TAIL)


@triton.jit
def read_statistics_kernel(reference_ptr, delta_ptr, found_ptr, M, SHORT_M: tl.constexpr, BLOCK_M: tl.constexpr):
    """For each row of each tile: position, reference and delta."""
    q_start = tl.program_id(0) * BLOCK_M
    q_at = shifted(q_start, M, BLOCK_M, SHORT_M)
    q_local = tl.arange(0, BLOCK_M)
    q_own = owned(q_at, q_start, q_local, M, SHORT_M)
    reference, delta = load_row_statistics(
        reference_ptr, delta_ptr, q_start, inside(q_local, M, SHORT_M), q_own, M, BLOCK_M, SHORT_M
    )
    row = found_ptr + (q_start + q_local) * 3
    tl.store(row, (q_at + q_local).to(tl.float32))
    tl.store(row + 1, reference)
    tl.store(row + 2, delta)


@pytest.mark.parametrize(("writes", "reads"), [(16, 16), (64, 16), (64, 32), (32, 64), (16, 64)])
def test_every_row_weighs_once_in_a_stream_of_tiles(writes: int, reads: int) -> None:
    for M in (1, 5, 16, 17, 31, 32, 33, 63, 64, 65, 80, 100, 130):
        values = torch.randn(M)
        reference, delta = torch.full((2, triton.cdiv(M, reads) * reads + reads), math.nan)
        write_statistics_kernel[(triton.cdiv(M, writes),)](
            values, reference, delta, M, TAIL=reads, SHORT_M=writes > M, BLOCK_M=writes
        )
        assert torch.equal(reference[:M], values)
        tiles = triton.cdiv(M, reads)
        found = torch.full((tiles * reads, 3), math.nan)
        read_statistics_kernel[(tiles,)](reference, delta, found, M, SHORT_M=reads > M, BLOCK_M=reads)
        position, got, change = found.T
        counts = got < math.inf  # a reference of +inf gives a weight of zero
        assert not got.isnan().any(), M
        assert sorted(position[counts].tolist()) == list(range(M)), M
        assert torch.equal(got[counts], values[position[counts].long()]), M
        assert torch.equal(change[counts], -values[position[counts].long()]), M
        assert change.isfinite().all(), M
