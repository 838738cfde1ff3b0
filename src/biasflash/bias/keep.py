"""Boolean keep mask: True = may attend. Hidden scores are selected away, never "added minus a lot"."""

from __future__ import annotations

import torch
from torch import Tensor

from biasflash.bias.kind import Kind


def _select(scores: Tensor, keep: Tensor) -> Tensor:
    return scores.masked_fill(~keep, float("-inf"))


KEEP = Kind(name="keep", argument="mask", dtypes=(torch.bool,), trainable=False, apply=_select)
