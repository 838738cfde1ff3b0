"""Backends by name, in order of preference; each is imported when first asked for."""

from __future__ import annotations

import importlib
from functools import cache
from typing import cast

from biasflash.backends.backend import Backend

#: name -> module; the first without objections runs
ORDER: dict[str, str] = {
    "hopper": "biasflash.backends.hopper.backend",
    "triton": "biasflash.backends.triton.backend",
    "cpu": "biasflash.backends.cpu",
    "reference": "biasflash.reference",
}


@cache
def load(name: str) -> Backend:
    return cast(Backend, importlib.import_module(ORDER[name]))
