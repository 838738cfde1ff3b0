"""Rows whose log-sum-exp is far from zero take a second pass in backward; their gradients are as right as any."""

from __future__ import annotations

import pytest
import torch

import biasflash

LOWEST = torch.finfo(torch.float32).min


def _bias(*shape: int) -> torch.Tensor:
    """A float32 bias with ordinary rows, rows shifted far up or down, and rows (partly) at the lowest number."""
    bias = torch.randn(shape)
    M, N = shape[-2:]
    bias[..., 1 % M, :] += 1.0e4
    bias[..., 2 % M, :] -= 2.0e4
    bias[..., 4 % M, :] = LOWEST
    bias[..., 5 % M, : N // 2] = LOWEST
    bias[..., M - 1, :] = LOWEST
    bias[..., M - 1, N // 3 :] = -3.0e4
    return bias


CASES: dict[str, tuple[dict[str, int], tuple[int, ...], bool | str]] = {
    "stored": ({"batch": 2, "M": 40, "N": 50}, (2, 4, 40, 50), False),
    "owned": ({"batch": 3, "M": 40, "N": 50}, (1, 4, 40, 50), False),
    "owned, all heads": ({"batch": 2, "M": 70, "N": 33}, (2, 1, 70, 33), False),
    "causal, tiles to spare": ({"batch": 2, "M": 150, "N": 140}, (1, 4, 150, 140), True),
    "stored, causal": ({"batch": 1, "M": 70, "N": 140}, (1, 4, 70, 140), "top-left"),
    "column sums": ({"batch": 2, "M": 20, "N": 50}, (2, 4, 1, 50), False),
    "row sums": ({"batch": 2, "M": 20, "N": 50}, (1, 4, 20, 1), False),
}


@pytest.mark.usefixtures("general_kernels")
@pytest.mark.parametrize("highest", [False, True], ids=["", "and the highest number"])
@pytest.mark.parametrize("name", CASES)
def test_extreme_rows(name: str, highest: bool) -> None:
    """The highest number as "always attend": a score that overflows in base 2 sends all rows to the second pass."""
    sizes, shape, causal = CASES[name]
    torch.manual_seed(0)
    B, M, N = sizes["batch"], sizes["M"], sizes["N"]
    q, k, v = torch.randn(B, M, 4, 16), torch.randn(B, N, 2, 16), torch.randn(B, N, 2, 16)
    bias, dout, dlse = _bias(*shape), torch.randn(B, M, 4, 16).half(), torch.randn(B, 4, M)
    if highest:
        bias[..., 3 % shape[-2], 0] = torch.finfo(torch.float32).max
    found = []
    for backend in ("triton", "reference"):
        dtype = torch.float16 if backend == "triton" else torch.float64
        leaves = [t.half().to(dtype).requires_grad_() for t in (q, k, v)] + [bias.clone().requires_grad_()]
        out, lse = biasflash.attention(
            leaves[0], leaves[1], leaves[2], leaves[3], backend=backend, return_lse=True, causal=causal
        )
        dlse = dlse.masked_fill(torch.isinf(lse), 0.0)
        found.append(torch.autograd.grad([out, lse], leaves, [dout.to(dtype), dlse.to(lse.dtype)]))
    for label, ours, right in zip(("dq", "dk", "dv", "dbias"), *found, strict=True):
        error = (ours.double() - right.double()).abs().amax() / right.double().abs().amax()
        assert error < 3e-3, f"{label}: {error:.1e}"
    if shape[-2] == M and shape[-1] == N:  # row by row: an extreme row's gradient is no rounding of the others'
        scale = found[1][3].double().abs().amax(-1)
        error = (found[0][3].double() - found[1][3].double()).abs().amax(-1)
        assert (error <= 5e-3 * scale + 1e-4).all()


@pytest.mark.usefixtures("general_kernels")
def test_a_bias_of_one_key_column_moves_no_weight() -> None:
    """The same number for all keys of a row: its gradient is 0, not what rounding of ``out`` leaves of a sum."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 20, 2, 16).half().requires_grad_() for _ in range(3))
    bias = torch.randn(1, 2, 20, 1, requires_grad=True)
    out = biasflash.attention(q, k, v, bias, backend="triton")
    assert isinstance(out, torch.Tensor)
    (found,) = torch.autograd.grad(out, bias, torch.randn_like(out))
    assert not found.any()
