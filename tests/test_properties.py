"""Random calls: any axes, strides, broadcasts, dtypes and wishes for gradients agree with float64."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings

from biasflash.backends.cpu import blocks
from property_cases import FLOATS, Call, calls, check

EVERY_FLOAT = (*FLOATS, torch.float64)


@settings(max_examples=200)
@given(call=calls(max_length=5, max_batch=2, max_width=9, dtypes=EVERY_FLOAT))
def test_reference_agrees_with_a_loop_over_queries(call: Call) -> None:
    check(call, "reference", truth="loop")


@settings(max_examples=600)
@given(call=calls())
def test_cpu_agrees_with_the_reference(call: Call) -> None:
    check(call, "cpu")


@settings(max_examples=60)
@given(call=calls(max_length=40, lengths=(127, 128, 129, 200, 257), max_batch=2, max_width=70, max_terms=2))
def test_cpu_agrees_with_the_reference_over_several_blocks(call: Call) -> None:
    check(call, "cpu")


@pytest.fixture(scope="module")
def _tiny_blocks() -> Iterator[None]:
    """Blocks of some forty scores, so that small calls are cut along heads, queries and keys."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blocks, "BLOCK", 40)
        patch.setattr(blocks, "MIN_ROWS", 3)
        yield


@pytest.mark.usefixtures("_tiny_blocks")
@settings(max_examples=150)
@given(call=calls(max_length=23, max_batch=2, max_width=5, dtypes=EVERY_FLOAT))
def test_cpu_agrees_with_the_reference_in_tiny_blocks(call: Call) -> None:
    check(call, "cpu")


@settings(max_examples=60)
@given(call=calls(max_width=256, max_batch=1, max_terms=1))
def test_cpu_agrees_with_the_reference_at_any_width(call: Call) -> None:
    check(call, "cpu")
