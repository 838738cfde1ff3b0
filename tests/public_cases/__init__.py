"""Failures that people reported in public threads about fused attention, rebuilt as tests of this library."""

from __future__ import annotations

from public_cases import biases, masks, numeric, shapes
from public_cases.case import Case

#: every case whose right answer is a value
CASES: tuple[Case, ...] = (*masks.CASES, *biases.CASES, *shapes.CASES, *numeric.CASES)
#: those with at most 60,000 scores, for slow machines and interpreters
SMALL: tuple[Case, ...] = tuple(c for c in CASES if not c.big)
