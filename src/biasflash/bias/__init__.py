"""What may be added to a score, or hide it. ``KINDS`` is the list that operators, tests and docs walk."""

from __future__ import annotations

from biasflash.bias.dense import DENSE
from biasflash.bias.keep import KEEP
from biasflash.bias.kind import Kind

#: every kind by its name
KINDS: dict[str, Kind] = {kind.name: kind for kind in (DENSE, KEEP)}

__all__ = ["DENSE", "KEEP", "KINDS", "Kind"]
