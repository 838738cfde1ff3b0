"""Operands of products: rounding to TF32 against float64, and what calls in TF32 are off by."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

import biasflash
from biasflash.tile.products import operand


@triton.jit
def _operand_kernel(x_ptr, y_ptr, SIZE: tl.constexpr, PRECISION: tl.constexpr):
    at = tl.arange(0, SIZE)
    tl.store(y_ptr + at, operand(tl.load(x_ptr + at), PRECISION))


def _operands(x: Tensor, precision: str) -> Tensor:
    y = torch.empty_like(x)
    _operand_kernel[(1,)](x, y, SIZE=x.numel(), PRECISION=precision)
    return y


@contextmanager
def _matmul_precision(name: str) -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(name)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def test_float32_is_rounded_to_the_nearest_of_ten_bits() -> None:
    x = torch.randn(1024) * torch.logspace(-20, 20, 1024)
    found = _operands(x, "tf32").double()
    mantissa, exponent = torch.frexp(x.double())
    nearest = torch.ldexp(torch.sign(mantissa) * torch.floor(mantissa.abs() * 2**11 + 0.5) / 2**11, exponent)
    assert torch.equal(found, nearest)
    assert ((found / x.double() - 1).abs() <= 2**-11).all()
    assert ((found / x.double()).mean() - 1).abs() < 2**-14, "on the average nothing is lost, as cutting off would lose"


def test_ties_go_away_from_zero_and_what_is_not_finite_stays() -> None:
    tie, largest = 1 + 2**-11, float(torch.finfo(torch.float32).max)
    x = torch.tensor([tie, -tie, 0.0, -0.0, math.inf, -math.inf, math.nan, largest])
    x[6:7].view(torch.int32)[0] = 0x7FFFFFFF  # the NaN of CUDA's arithmetic
    found = _operands(x, "tf32")
    assert found[:6].tolist() == [1 + 2**-10, -1 - 2**-10, 0.0, 0.0, math.inf, -math.inf]
    assert found[6].isnan()
    assert found[7] == math.inf


@pytest.mark.parametrize("precision", ["bf16x6", "tf32x3", "ieee"])
def test_other_precisions_take_operands_as_they_are(precision: str) -> None:
    x = torch.randn(64)
    assert torch.equal(_operands(x, precision), x)
    half = torch.randn(64).half()
    assert torch.equal(_operands(half, "tf32"), half)


@pytest.mark.parametrize(("M", "N"), [(40, 40), (70, 150)], ids=["window", "general"])
@pytest.mark.parametrize("trained", [False, True])
def test_calls_in_tf32_are_off_by_its_rounding(M: int, N: int, trained: bool) -> None:
    generator = torch.Generator().manual_seed(3)
    shapes = ((2, M, 2, 32), (2, N, 2, 32), (2, N, 2, 32), (1, 2, M, N))
    given = [torch.randn(shape, generator=generator) for shape in shapes]
    dout = torch.randn((2, M, 2, 32), generator=generator)

    def results(backend: str, dtype: torch.dtype) -> list[Tensor]:
        leaves = [t.to(dtype).requires_grad_(trained or i < 3) for i, t in enumerate(given)]
        out = biasflash.attention(*leaves, backend=backend)
        assert isinstance(out, Tensor)
        return [out.detach(), *torch.autograd.grad(out, [t for t in leaves if t.requires_grad], dout.to(dtype))]

    truth = results("reference", torch.float64)
    with _matmul_precision("high"):
        found = results("triton", torch.float32)
    for x, y in zip(found, truth, strict=True):
        assert 1e-4 < float((x - y).norm() / y.norm()) < 1e-3
