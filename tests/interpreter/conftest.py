"""Tests that run kernels in Triton's interpreter, on CPU tensors: ``TRITON_INTERPRET=1 pytest tests/interpreter``."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

if os.environ.get("TRITON_INTERPRET") != "1":  # read by @triton.jit when a kernel's module is imported
    raise pytest.UsageError(
        "tests/interpreter needs the environment variable TRITON_INTERPRET=1 from the start of the process; "
        "leave the folder out with --ignore=tests/interpreter"
    )

from triton.runtime import interpreter

HERE = Path(__file__).parent

#: numpy's own warnings inside the interpreter; on a GPU the same instructions are silent
NUMPY_WARNINGS = (
    # the interpreter's scalars are arrays of one element
    "ignore:Conversion of an array with ndim > 0 to a scalar is deprecated:DeprecationWarning",
    # NaN that stands behind a mask: computed with, then selected away
    "ignore:invalid value encountered in (subtract|multiply|matmul):RuntimeWarning",
    # scores of finfo.min in base-2 units are -inf; pairs past the end of a short axis are computed and never stored
    "ignore:overflow encountered in (multiply|subtract|exp2|matmul):RuntimeWarning",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            for line in NUMPY_WARNINGS:
                item.add_marker(pytest.mark.filterwarnings(line))


@pytest.fixture(scope="session", autouse=True)
def _quick_interpreter() -> Iterator[None]:
    """Leaves out what costs three quarters of the interpreter's time and changes no result.

    It swaps ``tl.*`` for its own functions anew at every call of a jit function by another: inside one launch the first
    swap of a module holds. And it checks every integer operation for overflow, which the compiled kernels do not.
    """
    swap, launch = interpreter._patch_lang, interpreter.GridExecutor.__call__
    options = interpreter.interpreter_builder.options
    options = dataclasses.replace(
        options,
        sanitize_overflow=False,
        # names that the compiler knows and the interpreter does not look at: it multiplies in float32
        allowed_dot_input_precisions=(*options.allowed_dot_input_precisions, "bf16x3", "bf16x6"),
    )
    modules: dict[str, tuple[bool, ...]] = {}  # of a jit function's module: which language modules it can name
    done: set[tuple[bool, ...]] = set()

    def once(fn: Callable[..., Any]) -> Any:
        if fn.__module__ not in modules:
            named = list(fn.__globals__.values())
            modules[fn.__module__] = tuple(any(x is m for x in named) for m in (interpreter.tl, interpreter.tl.core))
        if modules[fn.__module__] in done:
            return None
        done.add(modules[fn.__module__])
        return swap(fn)

    def fresh(*args: Any, **kwargs: Any) -> Any:
        done.clear()
        return launch(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter, "_patch_lang", once)
        patch.setattr(interpreter.GridExecutor, "__call__", fresh)
        patch.setattr(interpreter.interpreter_builder, "options", options)
        yield


@pytest.fixture
def fresh_recipes() -> Iterator[None]:
    """Recipes are cached by problem; one made under a patched rule must not outlive it, or come from before."""
    from biasflash.backends.triton import launch

    caches = (launch._forward_recipe, launch._backward_recipe)
    for cached in caches:
        cached.cache_clear()
    yield
    for cached in caches:
        cached.cache_clear()


@pytest.fixture
def general_kernels(monkeypatch: pytest.MonkeyPatch, fresh_recipes: None) -> None:
    """Short sequences on the general kernels, which the window kernels would take otherwise (``test_windows``)."""
    from biasflash.backends.triton import window_plan

    monkeypatch.setattr(window_plan, "rules", lambda device: ())
