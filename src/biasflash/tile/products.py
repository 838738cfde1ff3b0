# jit code is a language of its own: its names and types are Triton's
"""Operands of products on tensor cores."""

import triton
import triton.language as tl


@triton.jit
def to_tf32(x):
    """float32 ``x`` with 10 bits behind the leading one: to nearest, ties away from zero, as ``cvt.rna.tf32`` rounds.

    Tensor cores cut the other 13 bits off. All operands are then too small, and of 2 x 8 heads of 2k dq is off by
    2.2e-3, in PyTorch's own products, which round, by 5.2e-4.
    """
    bits = (x.to(tl.uint32, bitcast=True) + 0x1000) & 0xFFFFE000
    return tl.where(x == x, bits.to(tl.float32, bitcast=True), x)  # a NaN of all ones would become -0


@triton.jit
def operand(x, PRECISION: tl.constexpr):
    """``x`` as products of this ``input_precision`` want it."""
    if PRECISION == "tf32" and x.dtype == tl.float32:
        return to_tf32(x)
    else:
        return x
