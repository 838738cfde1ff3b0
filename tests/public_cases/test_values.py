"""Every reported case with a right value, on every backend of the CPU."""

from __future__ import annotations

import pytest

from public_cases import CASES
from public_cases.case import Case, check, judge, on, run

BACKENDS = ("reference", "cpu")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_value(case: Case, backend: str) -> None:
    check(case, backend)


@pytest.mark.parametrize("name", ["two_tiles_and_four_rows", "first_call_of_a_new_shape", "odd_sizes_in_dirty_memory"])
def test_every_call_is_right_not_only_the_first(name: str) -> None:
    """jax-ml/jax#23819, triton-lang/triton#4217, fla-org/flash-linear-attention#892: first and later calls differed."""
    built = next(c for c in CASES if c.name == name).make()
    for _ in range(3):
        judge(built, run(built, on("cpu")))


def test_the_books_are_in_order() -> None:
    assert len({c.name for c in CASES}) == len(CASES)
    for case in CASES:
        built = case.make()
        call = built.call(built.leaves)
        B, M, H, _ = call["q"].shape
        assert (B * M * H * call["k"].shape[1] > 60_000) == case.big, case.name
        assert case.threads, case.name
