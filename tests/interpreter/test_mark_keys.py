"""A mask of keys written down for the Hopper kernels: codes of tiles against the same found with torch."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from biasflash.backends.hopper.mark_keys import LARGEST, MARK, TILES, mark_keys_kernel, mark_unfit_kernel

TILE, GROUP = int(MARK.value), int(TILES.value)


def marked(mask: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """``(caps, spans)`` of a mask [lines, N], k [B, N, H, D] and v [B, N, H, Dv]; one line may serve all items."""
    lines, N = mask.shape
    batch, _, heads, D = k.shape
    pitch = (-(-N // 256) + 1) * 256
    caps, spans = torch.full((lines, pitch), math.nan), torch.full((lines, pitch // TILE + 1), math.nan)
    mark_keys_kernel[(lines,)](mask.view(torch.uint8), caps, spans, 0, mask.stride(0), 1, lines, N, pitch, BLOCK=1024)
    groups = -(-N // (TILE * GROUP))
    steps = [(0, t.stride(0) // 8, t.stride(2) // 8, t.stride(1) // 8) for t in (k, v)]
    mark_unfit_kernel[(groups * heads * batch,)](
        k, v, caps, spans, *steps[0], *steps[1], 0, int(lines > 1), batch, heads, N, pitch,
        D=D, DV=v.shape[-1],
    )  # fmt: skip
    return caps, spans


def wanted(mask: Tensor, k: Tensor, v: Tensor) -> list[list[float]]:
    """For each line the number of tiles up to the last visible key, and the codes of all tiles of keys."""
    N = mask.shape[1]
    unfit = torch.cat((k, v), -1).float().abs().nan_to_num(math.inf).amax((2, 3)) > float(LARGEST.value)
    rows = []
    for line, keep in enumerate(mask):
        last = -(-(int(keep.nonzero().max()) + 1) // TILE) if keep.any() else 0
        bad = unfit if mask.shape[0] == 1 else unfit[line : line + 1]
        codes = []
        for at in range(0, N, TILE):
            hidden = ~keep[at : at + TILE]
            copied = at // (TILE * GROUP) * GROUP < max(last, 1)  # in one of the largest tiles that kernels copy
            leaks = copied and bool((bad[:, at : at + TILE] & hidden).any())
            codes.append(-1.0 if leaks or (hidden.any() and not copied) else float(not hidden.any()))
        rows.append([float(last), *codes])
    return rows


@pytest.mark.parametrize("lines", [1, 3])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 2.0**41, -(2.0**41), 2.0**39], ids=str)
def test_tiles_whose_hidden_keys_do_not_vanish_are_marked(lines: int, value: float) -> None:
    torch.manual_seed(0)
    B, N, H, D, Dv = 3, 333, 2, 24, 16
    k, v = torch.randn(B, N, H, D), torch.randn(B, N, H, Dv)
    mask = torch.ones(lines, N, dtype=torch.bool)
    mask[:, 70:75] = False
    mask[:, 130] = False
    mask[lines - 1, 192:260] = False
    mask[:, 300:] = False
    k[1, 72, 1, 23] = value  # hidden
    v[2, 200, 0, 15] = value  # hidden in the last line
    v[0, 10, 1, 3] = value  # visible: what it does is the caller's
    v[0, 131, 0, 0] = value  # visible, beside a hidden one
    _, spans = marked(mask, k, v)
    expected = wanted(mask, k, v)
    assert [row[: len(expected[0])].tolist() for row in spans] == expected
    found = {code for row in expected for code in row[1:]}
    assert found == ({0.0, 1.0} if abs(value) < float(LARGEST.value) else {-1.0, 0.0, 1.0})


def test_keys_are_looked_at_as_far_as_kernels_copy_them() -> None:
    k = torch.full((3, 600, 1, 16), math.nan)
    mask = torch.zeros(3, 600, dtype=torch.bool)
    mask[1, :64] = True
    mask[2, :257] = True
    caps, spans = marked(mask, k, k)
    assert [row[:11].tolist() for row in spans] == [
        [0.0, *[-1.0] * 10],
        [1.0, 1.0, *[-1.0] * 9],
        [5.0, *[1.0] * 4, *[-1.0] * 6],
    ]
    assert torch.equal(caps[:, :600] > 0, mask)
    _, spans = marked(mask, k.nan_to_num(), k.nan_to_num())
    assert [row[:11].tolist() for row in spans] == [
        [0.0, *[0.0] * 4, *[-1.0] * 6],  # the first tile is met all the same
        [1.0, 1.0, *[0.0] * 3, *[-1.0] * 6],
        [5.0, *[1.0] * 4, *[0.0] * 4, -1.0, -1.0],  # what nobody looked at counts as unfit
    ]
