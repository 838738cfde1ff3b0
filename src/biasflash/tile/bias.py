"""How the tiles of score terms arrive, and where the gradient of a bias leaves. No algebra here (see ``score.py``).

``TERMS`` is a compile-time tuple with one entry a term: ``(apply, HAS_M, HAS_N, VEC, IS_KEEP)``. ``apply`` is the
kind's jit function from ``score.py``; HAS_M and HAS_N say whether the term varies along queries and keys; VEC is 0 for
any strides, 1 for unit key stride, else the elements of 16 bytes by which every other stride is divisible.
"""

import triton
import triton.language as tl

from biasflash.tile.memory import head_offset, plain, step_of, wide_if


@triton.jit
def term_bases(ptrs, strides, b, h, sizes, TERMS: tl.constexpr):
    """One pointer a term: the plane of head ``h`` of batch item ``b``."""
    bases = ()
    for i in tl.static_range(len(TERMS)):
        bases = bases + (  # noqa: RUF005
            ptrs[i] + head_offset(b, h, strides[i], sizes, TERMS[i][3]),
        )
    return bases


@triton.jit
def term_pointers(
    base,
    strides,
    q_start,
    k_start,
    q_local,
    k_local,
    HAS_M: tl.constexpr,
    HAS_N: tl.constexpr,
    VEC: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Pointers of one tile; an axis along which the term does not vary has size 1 in the result."""
    NB: tl.constexpr = len(strides) - 3
    row = step_of(strides[NB + 1], VEC, WIDE)
    column = 1
    if VEC == 0:
        column = plain(strides[NB + 2])
    if HAS_M and HAS_N:
        return (base + wide_if(q_start, WIDE) * row + wide_if(k_start, WIDE) * column) + (
            q_local * row + k_local * column
        )
    elif HAS_M:
        return (base + wide_if(q_start, WIDE) * row) + q_local * row
    elif HAS_N:
        return (base + wide_if(k_start, WIDE) * column) + k_local * column
    else:
        return base


@triton.jit
def load_term(
    base,
    strides,
    q_start,
    k_start,
    q_local,
    k_local,
    k_in,
    HAS_M: tl.constexpr,
    HAS_N: tl.constexpr,
    VEC: tl.constexpr,
    WIDE: tl.constexpr,
    MASKED: tl.constexpr,
):
    """One term's tile. Every row is there to be read; MASKED: keys outside ``k_in`` are not, and read as 0."""
    pointers = term_pointers(base, strides, q_start, k_start, q_local, k_local, HAS_M, HAS_N, VEC, WIDE)
    if HAS_N and MASKED:
        # adding a zero of q's shape broadcasts the mask to the tile without naming an orientation
        inside = k_in & (q_local >= 0) if HAS_M else k_in
        return tl.load(pointers, mask=inside, other=0)
    else:
        return tl.load(pointers)


@triton.jit
def load_terms(
    bases,
    strides,
    q_start,
    k_start,
    q_local,
    k_local,
    k_in,
    TERMS: tl.constexpr,
    WIDE: tl.constexpr,
    MASKED: tl.constexpr,
):
    """The tiles of all terms, in order."""
    tiles = ()
    for i in tl.static_range(len(TERMS)):
        tile = load_term(
            bases[i],
            strides[i],
            q_start,
            k_start,
            q_local,
            k_local,
            k_in,
            TERMS[i][1],
            TERMS[i][2],
            TERMS[i][3],
            WIDE,
            MASKED,
        )
        tiles = tiles + (tile,)  # noqa: RUF005
    return tiles


@triton.jit
def seen_keys(k_in, bases, strides, k_start, k_local, TERMS: tl.constexpr, WIDE: tl.constexpr, MASKED: tl.constexpr):
    """Which keys any query may see, ``[BLOCK_N]``: in the sequence and kept by every mask that is one for all queries.

    Rows of k and v outside it are never read, so a NaN stored there cannot leak as 0 x NaN.
    """
    seen = k_in
    for i in tl.static_range(len(TERMS)):
        if TERMS[i][4] and not TERMS[i][1]:
            seen = seen & (
                load_term(
                    bases[i], strides[i], 0, k_start, 0, k_local, k_in, False, TERMS[i][2], TERMS[i][3], WIDE, MASKED
                )
                != 0
            )
    return seen


@triton.jit
def store_term_grad(
    base, strides, q_start, k_start, q_local, k_local, inside, tile, VEC: tl.constexpr, WIDE: tl.constexpr
):
    """Sink of a full tile of a bias gradient; rounds to the gradient's dtype."""
    pointers = term_pointers(base, strides, q_start, k_start, q_local, k_local, True, True, VEC, WIDE)
    tl.store(pointers, tile.to(base.dtype.element_ty), mask=inside)


@triton.jit
def store_unseen(
    ds_base, ds_strides, end, k_at, q_local, k_local, k_own, M,
    DS_VEC: tl.constexpr, WIDE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Zeros where score gradients are stored, for the queries before ``end``, which see none of these keys."""
    for q_start in range(0, end, BLOCK_M):
        inside_tile = k_own[:, None] & (q_start + q_local < M)[None, :]
        nothing = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
        store_term_grad(
            ds_base, ds_strides, q_start, k_at, q_local[None, :], k_local[:, None], inside_tile, nothing, DS_VEC, WIDE
        )
