"""The contract of a kind: one way in which a tensor takes part in a score."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Kind:
    """One kind of score term.

    Attributes:
        name: the word for it in operator schemas, explanations and reports.
        argument: the public argument it is passed through.
        dtypes: dtypes the tensor may have.
        trainable: whether the tensor may require a gradient.
        apply: ``apply(scores, tensor) -> scores`` in plain torch, the meaning of the kind. ``scores`` is
            ``*B Hq M N`` in the compute dtype, ``tensor`` broadcasts to it.
    """

    name: str
    argument: str
    dtypes: tuple[torch.dtype, ...]
    trainable: bool
    apply: Callable[[Tensor, Tensor], Tensor]
