"""Which key tiles a query tile meets, the transposed question, and the order in which programs take tiles."""

import triton
import triton.language as tl


@triton.jit
def key_span(q_start, M, N, shift, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, IS_CAUSAL: tl.constexpr):
    """``(full_end, end)``: every query of the tile sees the keys below full_end, none sees those from end on."""
    end = N
    full_end = N // BLOCK_N * BLOCK_N
    if IS_CAUSAL:
        last_query = tl.minimum(q_start + BLOCK_M, M) - 1
        end = tl.minimum(N, tl.maximum(last_query + shift + 1, 0))
        full_end = tl.minimum(full_end, tl.maximum(q_start + shift + 1, 0) // BLOCK_N * BLOCK_N)
    return full_end, end


@triton.jit
def query_span(k_start, M, shift, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, IS_CAUSAL: tl.constexpr):
    """``(start, full_start)``: queries before start see no key of the tile, those from full_start on see all."""
    start = 0
    full_start = 0
    if IS_CAUSAL:
        start = tl.minimum(tl.maximum(k_start - shift, 0), M) // BLOCK_M * BLOCK_M
        first_full = tl.minimum(tl.maximum(k_start + BLOCK_N - 1 - shift, 0), M)
        full_start = tl.maximum(start, tl.cdiv(first_full, BLOCK_M) * BLOCK_M)
    return start, full_start


@triton.jit
def place(pid, tiles, batch, heads, ORDER: tl.constexpr):
    """Program index -> (tile, batch item, head). ORDER names the axes from fastest to slowest.

    Programs that run together should share what is expensive to fetch: keys and values (tile first), or the tile of
    a bias that several batch items share (batch first, or heads last).
    """
    if ORDER == "tile,head,batch":
        return pid % tiles, pid // tiles // heads, pid // tiles % heads
    elif ORDER == "tile,batch,head":
        return pid % tiles, pid // tiles % batch, pid // tiles // batch
    else:
        tl.static_assert(ORDER == "batch,tile,head")
        return pid // batch % tiles, pid % batch, pid // batch // tiles
