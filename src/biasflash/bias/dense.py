"""Dense additive bias: ``s + bias``; its gradient is the score's, summed over the axes along which it was broadcast."""

from __future__ import annotations

import torch
from torch import Tensor

from biasflash.bias.kind import Kind


def _add(scores: Tensor, bias: Tensor) -> Tensor:
    return scores + bias.to(scores.dtype)


DENSE = Kind(
    name="dense",
    argument="bias",
    dtypes=(torch.float16, torch.bfloat16, torch.float32, torch.float64),
    trainable=True,
    apply=_add,
)
