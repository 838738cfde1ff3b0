"""biasflash: exact, fused attention with biases and masks of any broadcast shape, and trainable biases."""

from __future__ import annotations

from biasflash._version import __version__
from biasflash.api import (
    attention,
    attention_kvpacked,
    attention_qkvpacked,
    explain,
    flash_attention_fn,
    flash_attention_qkvpacked_fn,
    scaled_dot_product_attention,
)
from biasflash.problem import UnsupportedError

__all__ = [
    "UnsupportedError",
    "__version__",
    "attention",
    "attention_kvpacked",
    "attention_qkvpacked",
    "explain",
    "flash_attention_fn",
    "flash_attention_qkvpacked_fn",
    "scaled_dot_product_attention",
]
