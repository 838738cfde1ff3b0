"""What every test starts from: one thread, one seed, fresh memory full of NaN, warnings as errors (pyproject)."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Iterator

# Before torch: a test process is one of several on a small machine, and sums have one order on one thread.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# cuBLAS is repeatable only with a workspace of fixed size; torch demands it in deterministic mode.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import pytest
import torch
from hypothesis import HealthCheck, settings

torch.set_num_threads(1)

# Shapes and layouts are drawn, not searched for slowness: the same draws every run, no per-example clock.
settings.register_profile(
    "repeatable", derandomize=True, deadline=None, database=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile("explore", parent=settings.get_profile("repeatable"), derandomize=False, print_blob=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "repeatable"))


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "fresh_memory_as_is: do not fill new memory with NaN in this test")


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(20240917)


@pytest.fixture(autouse=True)
def _environment_is_as_before() -> Iterator[None]:
    """Commands of the program set ``BIASFLASH_AHEAD`` for their process; here that is the tests'."""
    before = os.environ.get("BIASFLASH_AHEAD")
    yield
    if before is None:
        os.environ.pop("BIASFLASH_AHEAD", None)
    else:
        os.environ["BIASFLASH_AHEAD"] = before


@pytest.fixture(autouse=True)
def _fresh_memory_is_nan(request: pytest.FixtureRequest) -> Iterator[None]:
    """``torch.empty`` and its kin hand out NaN (integers: their largest value), so a value never written shows."""
    if request.node.get_closest_marker("fresh_memory_as_is"):
        yield
        return
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(autouse=True)
def _compiled_code_is_forgotten() -> Iterator[None]:
    """A graph that one test compiled must not be counted, or reused, by the next."""
    yield
    if "torch._dynamo.convert_frame" in sys.modules:  # loaded by the first compile
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # torch 2.11 imports a deprecated part of its own here
            torch._dynamo.reset()
