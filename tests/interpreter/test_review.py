"""Faults of the kernels found by reading and attacking them, each with the call that showed it."""

from __future__ import annotations

import torch
from torch import Tensor

import biasflash


def gradients(backend: str, leaves: list[Tensor], biases: list[Tensor], dout: Tensor) -> list[Tensor]:
    leaves = [t.detach().clone().requires_grad_() for t in (*leaves, *biases)]
    out = biasflash.attention(*leaves[:3], leaves[3:], backend=backend)
    assert isinstance(out, Tensor)
    return list(torch.autograd.grad(out, leaves, dout))


def test_a_penalty_on_lse_that_spares_dead_rows_gives_no_nan() -> None:
    leaves = [torch.randn(1, m, 1, 4, requires_grad=True) for m in (6, 4, 4)]
    out, lse = biasflash.attention(*leaves, causal=True, return_lse=True, backend="triton")
    loss = out.sum() + (lse**2)[..., 2:].mean()  # the first two rows see nothing: 0 x 2 x -inf is NaN
    assert not any(g.isnan().any() for g in torch.autograd.grad(loss, leaves))


def test_score_gradients_are_stored_in_the_widest_dtype() -> None:
    leaves = [torch.randn(1, 8, 1, 4) for _ in range(3)]
    biases = [torch.zeros(1, 1, 8, 8, dtype=torch.float16), torch.zeros(1, 1, 8, 8)]
    dout = torch.full((1, 8, 1, 4), 1e-8) * torch.randn(1, 8, 1, 4)
    found, wanted = (gradients(backend, leaves, biases, dout)[-1] for backend in ("triton", "reference"))
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-13)


def test_a_finite_float64_bias_hides_nothing() -> None:
    q = torch.randn(1, 8, 1, 4)
    bias = torch.zeros(8, 8, dtype=torch.float64)
    bias[2] = torch.finfo(torch.float64).min
    out = biasflash.attention(q, q, torch.ones_like(q), bias, backend="triton")
    assert isinstance(out, Tensor)
    torch.testing.assert_close(out, torch.ones_like(out))


def test_saved_statistics_may_come_back_with_other_strides() -> None:
    leaves = [torch.randn(2, 8, 2, 4, requires_grad=True) for _ in range(3)]

    def permuted(t: Tensor) -> Tensor:
        return t.transpose(0, -1).contiguous().transpose(0, -1)

    found = []
    for unpack in (lambda t: t, permuted):
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t, unpack):
            out = biasflash.attention(*leaves, backend="triton")
        assert isinstance(out, Tensor)
        found.append(torch.autograd.grad(out.square().sum(), leaves))
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b)


def test_a_first_tile_whose_products_overflow_is_only_unseen() -> None:
    q, k = torch.full((1, 4, 1, 16), -1e19), torch.full((1, 128, 1, 16), 1e19)
    k[:, 64:] = 0
    out = biasflash.attention(q, k, torch.ones(1, 128, 1, 16), backend="triton")
    assert isinstance(out, Tensor)
    torch.testing.assert_close(out, torch.ones_like(out))
