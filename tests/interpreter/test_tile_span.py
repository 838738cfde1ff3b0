"""Which tiles meet which, by brute force over positions, and the orders in which programs take tiles."""

from __future__ import annotations

import itertools

import pytest
import torch
import triton
import triton.language as tl

from biasflash.tile.span import key_span, place, query_span

LENGTHS = (1, 2, 7, 16, 17, 32, 33, 50)
BLOCKS = list(itertools.product((16, 32), (16, 32)))


@triton.jit
def key_span_kernel(asked_ptr, found_ptr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, IS_CAUSAL: tl.constexpr):
    asked, found = asked_ptr + tl.program_id(0) * 4, found_ptr + tl.program_id(0) * 2
    q_start, M, N, shift = tl.load(asked), tl.load(asked + 1), tl.load(asked + 2), tl.load(asked + 3)
    full_end, end = key_span(q_start, M, N, shift, BLOCK_M, BLOCK_N, IS_CAUSAL)
    tl.store(found, full_end)
    tl.store(found + 1, end)


@triton.jit
def query_span_kernel(asked_ptr, found_ptr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, IS_CAUSAL: tl.constexpr):
    asked, found = asked_ptr + tl.program_id(0) * 4, found_ptr + tl.program_id(0) * 2
    k_start, M, shift = tl.load(asked), tl.load(asked + 1), tl.load(asked + 3)
    start, full_start = query_span(k_start, M, shift, BLOCK_M, BLOCK_N, IS_CAUSAL)
    tl.store(found, start)
    tl.store(found + 1, full_start)


def shifts(M: int, N: int) -> list[int]:
    return sorted({0, N - M, -3, 5, -M - 2, N + 2})


def tile_starts(length: int, block: int) -> list[int]:
    """Where the tiles of an axis are read: the last one moves back, unless it is the only one."""
    return [max(0, min(start, length - block)) for start in range(0, length, block)]


def asked_and_found(
    kernel: object, cases: list[tuple[int, ...]], causal: bool, block: tuple[int, int]
) -> list[list[int]]:
    found = torch.empty(len(cases), 2, dtype=torch.int32)
    asked = torch.tensor(cases, dtype=torch.int32)
    kernel[(len(cases),)](asked, found, BLOCK_M=block[0], BLOCK_N=block[1], IS_CAUSAL=causal)  # type: ignore[index]
    return found.tolist()


@pytest.mark.parametrize("block", BLOCKS, ids=str)
@pytest.mark.parametrize("causal", [False, True], ids=["all", "causal"])
def test_keys_that_a_query_tile_meets(block: tuple[int, int], causal: bool) -> None:
    BLOCK_M, BLOCK_N = block
    cases = [
        (q_start, M, N, shift)
        for M, N in itertools.product(LENGTHS, LENGTHS)
        for shift in (shifts(M, N) if causal else [0])
        for q_start in tile_starts(M, BLOCK_M)
    ]
    for case, (full_end, end) in zip(cases, asked_and_found(key_span_kernel, cases, causal, block), strict=True):
        q_start, M, N, shift = case
        queries = torch.arange(q_start, min(q_start + BLOCK_M, M))[:, None]
        seen = (torch.arange(N) <= queries + shift) if causal else torch.ones(len(queries), N, dtype=torch.bool)
        met = seen.any(0).nonzero().flatten()
        assert end == (0 if met.numel() == 0 else int(met[-1]) + 1), case
        whole = 0  # key tiles, from the left, that lie inside the sequence and that every query sees
        while (whole + 1) * BLOCK_N <= N and seen[:, whole * BLOCK_N : (whole + 1) * BLOCK_N].all():
            whole += 1
        assert full_end == whole * BLOCK_N, case
        assert full_end <= end, case


@pytest.mark.parametrize("block", BLOCKS, ids=str)
@pytest.mark.parametrize("causal", [False, True], ids=["all", "causal"])
def test_queries_that_meet_a_key_tile(block: tuple[int, int], causal: bool) -> None:
    BLOCK_M, BLOCK_N = block
    cases = [
        (k_start, M, N, shift)
        for M, N in itertools.product(LENGTHS, LENGTHS)
        for shift in (shifts(M, N) if causal else [0])
        for k_start in tile_starts(N, BLOCK_N)
    ]
    for case, (start, full_start) in zip(cases, asked_and_found(query_span_kernel, cases, causal, block), strict=True):
        k_start, M, _, shift = case
        keys = torch.arange(k_start, k_start + BLOCK_N)
        queries = torch.arange(M)[:, None]
        seen = (keys <= queries + shift) if causal else torch.ones(M, BLOCK_N, dtype=torch.bool)
        met = seen.any(1).nonzero().flatten()
        first = M if met.numel() == 0 else int(met[0])
        assert start == first // BLOCK_M * BLOCK_M, case
        partial = (~seen.all(1)).nonzero().flatten()
        last_partial = 0 if partial.numel() == 0 else int(partial[-1]) + 1
        assert full_start == max(start, triton.cdiv(last_partial, BLOCK_M) * BLOCK_M), case
        assert full_start % BLOCK_M == 0, case


@triton.jit
def place_kernel(found_ptr, tiles, batch, heads, ORDER: tl.constexpr):
    pid = tl.program_id(0)
    tile, b, h = place(pid, tiles, batch, heads, ORDER)
    tl.store(found_ptr + pid * 3, tile)
    tl.store(found_ptr + pid * 3 + 1, b)
    tl.store(found_ptr + pid * 3 + 2, h)


@pytest.mark.parametrize("sizes", [(1, 1, 1), (3, 4, 5), (1, 6, 2), (5, 1, 3), (4, 3, 1)], ids=str)
@pytest.mark.parametrize("order", ["tile,head,batch", "tile,batch,head", "batch,tile,head"])
def test_an_order_is_a_walk_over_all_places(order: str, sizes: tuple[int, int, int]) -> None:
    size = dict(zip(("tile", "batch", "head"), sizes, strict=True))
    found = torch.empty(sizes[0] * sizes[1] * sizes[2], 3, dtype=torch.int32)
    place_kernel[(len(found),)](found, *sizes, ORDER=order)
    fastest_last = order.split(",")[::-1]
    walk = [
        dict(zip(fastest_last, at, strict=True)) for at in itertools.product(*(range(size[a]) for a in fastest_last))
    ]
    assert found.tolist() == [[at["tile"], at["batch"], at["head"]] for at in walk]
