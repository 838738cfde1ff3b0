"""The small kernels that prepare masks and biases for Hopper's large ones, in the interpreter against torch."""

from __future__ import annotations

import math

import pytest
import torch

from biasflash.backends.hopper.align_rows import align_rows_kernel
from biasflash.backends.hopper.mark_keys import mark_keys_kernel


@pytest.mark.parametrize("N", [1, 63, 64, 65, 200, 1024, 1100])
@pytest.mark.parametrize("layout", ["plain", "every other key", "one line"])
def test_masks_of_keys_are_written_down(N: int, layout: str) -> None:
    batch = (3, 2)
    keep = torch.rand(*batch, N) < 0.7
    keep[0, 0] = False
    keep[0, 1] = True
    keep[1, 0] = torch.arange(N) < N // 2
    keep[1, 1] = torch.arange(N) >= N // 2
    if layout == "every other key":
        keep = keep.repeat_interleave(2, -1)[..., ::2]
    if layout == "one line":
        batch, keep = (1, 1), keep[2:, :1]
    lines, pitch = math.prod(batch), (-(-N // 256) + 1) * 256
    caps, spans = torch.empty(lines, pitch), torch.empty(lines, 1 + pitch // 64)
    mask = keep.view(torch.uint8)
    mark_keys_kernel[(lines,)](mask, caps, spans, *mask.stride(), batch[1], N, pitch, BLOCK=1024)
    flat = keep.reshape(lines, N)
    assert torch.equal(caps[:, :N] > 0, flat)
    assert (caps.abs() == math.inf).all()
    assert (caps[:, N:] < 0).all()
    padded = torch.nn.functional.pad(flat, (0, pitch - N))
    tiles = padded.reshape(lines, -1, 64)
    ends = [int(row.any(-1).nonzero().max()) + 1 if row.any() else 0 for row in tiles]
    assert spans[:, 0].tolist() == ends
    whole = torch.nn.functional.pad(flat, (0, pitch - N), value=True).reshape(lines, -1, 64).all(-1)
    assert torch.equal(spans[:, 1:] > 0, whole)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("layout", ["plain", "transposed", "sliced", "expanded rows"])
@pytest.mark.parametrize(("b0", "b1", "heads", "M", "N"), [(1, 1, 3, 17, 13), (2, 3, 1, 9, 300), (1, 2, 2, 8, 256)])
def test_biases_are_copied_to_aligned_rows(
    b0: int, b1: int, heads: int, M: int, N: int, layout: str, dtype: torch.dtype
) -> None:
    bias = torch.randn(b0, b1, heads, M, N).to(dtype)
    if layout == "transposed":
        bias = bias.mT.contiguous().mT
    elif layout == "sliced":
        bias = torch.nn.functional.pad(bias, (3, 4))[..., 3:-4]
    elif layout == "expanded rows":
        bias = bias[..., :1, :].expand(bias.shape)
    pitch, rows = -(-N // 8) * 8, 4
    copy = torch.full((b0 * b1 * heads * M * pitch // 2,), math.nan)
    grid = (-(-M // rows) * b0 * b1 * heads,)
    align_rows_kernel[grid](bias, copy, *bias.stride(), b1, heads, M, N, pitch, ROWS=rows, COLUMNS=64)
    found = copy.view(dtype).view(b0, b1, heads, M, pitch)
    assert torch.equal(found[..., :N], bias)
