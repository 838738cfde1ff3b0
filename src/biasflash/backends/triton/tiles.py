"""Which tiles of a mask hold anything: pairs counted once a call, then lists that the attention kernels walk along.

``count_kernel`` reads the mask in its own broadcast shape and writes how many pairs of every granule (a small tile) are
visible. ``list_kernel`` adds granules up to the tiles of one attention kernel and writes, for every tile of one axis,
which tiles of the other axis to meet: those that need the mask and those that are visible as a whole. One row of a
list, int32, is ``(mixed, full, mixed tiles ..., full tiles ...)`` with room for all tiles in both parts. The host never
looks at any of it.
"""

import triton
import triton.language as tl

from biasflash.backends.triton.backward_bias import split_index
from biasflash.tile.bias import load_term, term_bases
from biasflash.tile.memory import head_offset


@triton.jit
def integers(ptr):
    """Float32 scratch as int32."""
    return ptr.to(tl.pointer_type(tl.int32), bitcast=True)


@triton.jit
def chosen(values, CHOOSE: tl.constexpr):
    """The values of a tuple for which CHOOSE says True."""
    found = ()
    for i in tl.static_range(len(CHOOSE)):
        if CHOOSE[i]:
            found = found + (values[i],)  # noqa: RUF005
    return found


@triton.jit
def list_row(lists_ptr, plane_strides, b, h, tile, tiles, others, sizes):
    """The list of a tile, one of ``tiles``, in the mask plane of head ``h``; ``others`` tiles along the other axis."""
    plane = head_offset(b, h, plane_strides, sizes, 1)
    return integers(lists_ptr) + (plane * tiles + tile) * (2 * others + 2)


@triton.jit
def list_part(row, others, FULL: tl.constexpr):
    """``(pointer to the first entry, number of entries)`` of a part of a list."""
    if FULL:
        return row + 2 + others, tl.load(row + 1)
    else:
        return row + 2, tl.load(row)


@triton.jit
def visible_pairs(
    bases, strides, q_start, q_local, q_rows, k_start, k_local, N, shift,
    MASKS: tl.constexpr, WIDE: tl.constexpr, IS_CAUSAL: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """1 for every pair that all masks keep, ``[queries, granules, keys]``; MASKED: some keys may be past the end."""
    k_in = k_start + k_local < N
    keep = (q_local >= 0) & (k_local >= 0)
    if MASKED:
        keep = keep & k_in
    if IS_CAUSAL:
        keep = keep & (k_start + k_local <= q_start + q_local + shift)
    for i in tl.static_range(len(MASKS)):
        seen = load_term(
            bases[i], strides[i], q_start, k_start, q_rows, k_local, k_in, True, True, MASKS[i][3], WIDE, MASKED
        )
        keep = keep & (seen != 0)
    return keep.to(tl.int32)


@triton.jit(do_not_specialize=["M", "N", "heads", "shift"])
def count_kernel(
    counts_ptr, mask_ptrs, sizes, mask_strides,
    M, N, heads, shift,
    MASKS: tl.constexpr, OWNS: tl.constexpr, WIDE: tl.constexpr, EVEN_N: tl.constexpr, IS_CAUSAL: tl.constexpr,
    GRANULE_M: tl.constexpr, GRANULE_N: tl.constexpr, ABREAST: tl.constexpr,
):  # fmt: skip
    """Visible pairs of every granule, ``[planes, query granules, key granules]``: masks and causal order together.

    OWNS marks the axes ``(*batch, heads)`` that the masks vary along. Grid: one program per ABREAST granules of keys
    (fastest), granule of queries, and plane.
    """
    if EVEN_N:
        N = N // 8 * 8
    across = tl.cdiv(N, GRANULE_N)
    down = tl.cdiv(M, GRANULE_M)
    chunks = tl.cdiv(across, ABREAST)
    pid = tl.program_id(0)
    first = pid % chunks * ABREAST
    granule = pid // chunks % down
    plane = pid // chunks // down
    b, h = split_index(plane, 0, sizes, heads, OWNS)
    bases = term_bases(mask_ptrs, mask_strides, b, h, sizes, MASKS)
    q_start = granule * GRANULE_M
    k_start = first * GRANULE_N
    q_local = tl.arange(0, GRANULE_M)
    q_rows = tl.minimum(q_local, M - 1 - q_start)[:, None, None]
    number = tl.arange(0, ABREAST)
    k_local = (number[:, None] * GRANULE_N + tl.arange(0, GRANULE_N)[None, :])[None, :, :]
    if k_start + ABREAST * GRANULE_N <= N:
        seen = visible_pairs(
            bases, mask_strides, q_start, q_local[:, None, None], q_rows, k_start, k_local, N, shift,
            MASKS, WIDE, IS_CAUSAL, False,
        )  # fmt: skip
    else:
        seen = visible_pairs(
            bases, mask_strides, q_start, q_local[:, None, None], q_rows, k_start, k_local, N, shift,
            MASKS, WIDE, IS_CAUSAL, True,
        )  # fmt: skip
    rows = tl.sum(seen, 2)  # [queries, granules]
    count = tl.sum(tl.where((q_start + q_local < M)[:, None], rows, 0), 0)
    at = (plane * down + granule) * across + first + number
    tl.store(integers(counts_ptr) + at, count, mask=first + number < across)


@triton.jit(do_not_specialize=["own_granules", "other_granules", "own_step", "other_step", "own_tiles", "other_tiles"])
def list_kernel(
    counts_ptr, lists_ptr,
    own_granules, other_granules, own_step, other_step, own_tiles, other_tiles,
    OWN: tl.constexpr, OTHER: tl.constexpr, PAIRS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """One row of lists: tiles of OWN granules along one axis, and which tiles of OTHER granules they meet, ascending.

    A tile that ends beyond its axis has fewer than PAIRS pairs and so is never full. Grid: own tile (fastest), plane.
    """
    tile = tl.program_id(0) % own_tiles
    plane = tl.program_id(0) // own_tiles
    counts = integers(counts_ptr) + plane * (own_granules * other_granules)
    row = integers(lists_ptr) + (plane * own_tiles + tile) * (2 * other_tiles + 2)
    own = tile * OWN + tl.arange(0, OWN)[:, None, None]
    mixed = 0
    full = 0
    for start in range(0, other_tiles, CHUNK):
        other_tile = start + tl.arange(0, CHUNK)
        other = other_tile[None, :, None] * OTHER + tl.arange(0, OTHER)[None, None, :]
        there = (own < own_granules) & (other < other_granules)
        count = tl.load(counts + (own * own_step + other * other_step), mask=there, other=0)
        count = tl.sum(tl.sum(count, 2), 0)
        is_mixed = ((count > 0) & (count < PAIRS)).to(tl.int32)
        is_full = (count == PAIRS).to(tl.int32)
        tl.store(row + 2 + mixed + tl.cumsum(is_mixed, 0) - 1, other_tile, mask=is_mixed != 0)
        tl.store(row + 2 + other_tiles + full + tl.cumsum(is_full, 0) - 1, other_tile, mask=is_full != 0)
        mixed += tl.sum(is_mixed, 0)
        full += tl.sum(is_full, 0)
    tl.store(row, mixed)
    tl.store(row + 1, full)
