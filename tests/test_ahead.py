"""What a first call compiles in threads: the kernels that one thread would, and a failure where it belongs."""

from __future__ import annotations

import gc
import itertools
import logging
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="only Triton compiles kernels")
import triton
from triton.backends.compiler import GPUTarget

from biasflash.backends.backend import Gradients
from biasflash.backends.hopper import forward_plan as hopper
from biasflash.backends.triton import ahead, launch
from biasflash.backends.triton.operands import Facts, Launch
from biasflash.backends.triton.recipe import Recipe
from biasflash.problem import Problem
from biasflash.testing.offline import compile_launch, meta_tensors
from test_recompiles import H200, facts_of, plan_backward, plan_forward, problem

# ---------------------------------------------------------------------------------------------------- other lengths


def laid_out(p: Problem) -> dict[str, dict[str, Tensor]]:
    """Tensors of a call by name, in the layouts that callers have."""
    B, N, H, D = 2, p.N, 4, 64

    def empty(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=p.dtype, device="meta")

    packed = empty(B, N, 3, H, D).unbind(2)
    ways = {
        "contiguous": [empty(B, N, H, D) for _ in range(3)],
        "heads first": [empty(B, H, N, D).transpose(1, 2) for _ in range(3)],
        "packed": list(packed),
        "batch second": [empty(N, B, H, D).transpose(0, 1) for _ in range(3)],
        "expanded": [empty(1, N, H, D).expand(B, N, H, D) for _ in range(3)],
    }
    bias = {
        "contiguous": empty(1, H, N, N),
        "heads first": empty(1, N, N, H).permute(0, 3, 1, 2),
        "packed": empty(1, H, N, N).transpose(-1, -2),
        "batch second": empty(1, H, N, N),
        "expanded": empty(1, 1, N, N).expand(1, H, N, N),
    }
    return {way: {**dict(zip("qkv", rows, strict=True)), "bias0": bias[way]} for way, rows in ways.items()}


def facts(tensors: dict[str, Tensor]) -> Facts:
    return tuple(tensors), tuple(t.stride() for t in tensors.values()), (True,) * len(tensors)


@pytest.mark.parametrize("way", ["contiguous", "heads first", "packed", "batch second", "expanded"])
@pytest.mark.parametrize(("N", "other"), [(1000, 1001), (1001, 1008), (1000, 256)])
def test_tensors_of_another_length_lie_as_the_calls_own(way: str, N: int, other: int) -> None:
    p = problem(N, bias="1HMN")
    found, moved = ahead.at_length(p, facts(laid_out(p)[way]), other)
    assert found == problem(other, bias="1HMN")
    assert moved == facts(laid_out(found)[way])


def test_padded_rows_stay_padded() -> None:
    p = problem(1000, bias="1HMN")
    bias = torch.empty(1, 4, 1000, 1024, device="meta")[..., :1000]
    for length, step in ((1001, 1008), (1008, 1008), (2047, 2048)):
        _, (_, strides, _) = ahead.at_length(p, facts({"bias0": bias}), length)
        assert strides == ((4 * length * step, length * step, step, 1),)


@pytest.mark.parametrize("causal", [False, True])
def test_queries_stay_as_many_where_there_are_fewer_than_keys(causal: bool) -> None:
    p = problem(1000, bias="BHMN", M=7, causal=causal)
    assert ahead.at_length(p, facts_of(p, backward=True), 1001) == (
        problem(1001, bias="BHMN", M=7, causal=causal),
        facts_of(problem(1001, bias="BHMN", M=7, causal=causal), backward=True),
    )
    top_left = replace(p, causal_shift=0)
    assert ahead.at_length(top_left, facts_of(p, backward=False), 1001)[0].causal_shift == 0


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("bias", ["", "1HMN", "BHMN"])
def test_a_calls_own_tensors_can_be_planned_at_other_lengths(
    bias: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the facts that ``launch`` gathers, of scratch and empty tensors, too."""
    p = replace(problem(200, bias=bias, dtype=dtype), device=torch.device("cpu"))
    listed: list[list[ahead.Asked]] = []

    def note(recipe: Recipe, device: Any, tensors: Any, addresses: Any, beside: Callable[[], Any]) -> None:
        listed.append(list(beside()))

    monkeypatch.setattr(launch, "_launch", note)
    monkeypatch.setattr(launch, "_finish", lambda *given: None)
    q, k, v = (torch.empty(2, 200, 4, 64, dtype=dtype) for _ in range(3))
    terms = [torch.empty(term.shape, dtype=dtype) for term in p.terms]
    out, lse, low = launch.run_forward(p, q, k, v, terms, plan_forward)
    gradients = Gradients(q=q.clone(), k=k.clone(), v=v.clone(), terms=[t.clone() for t in terms])
    launch.run_backward(p, gradients, out, None, q, k, v, terms, out, lse, low, plan_backward)
    assert [bool(found) for found in listed] == [True, True]


def test_a_length_that_goes_to_other_kernels_is_compiled_for_as_well() -> None:
    """A full float32 bias of odd rows is too large for an aligned copy: there portable kernels serve on Hopper."""

    def plan(p: Problem, precision: str, facts: Facts) -> Recipe:
        rows, terms, _ = launch.layouts(facts, len(p.terms))
        return hopper.forward_recipe(p, H200, rows, terms)[0]

    p = problem(1000, bias="BHMN", B=8, H=8)
    p = replace(p, terms=(replace(p.terms[0], dtype=torch.float32),))
    facts = facts_of(p, backward=False)
    own = plan(p, "highest", facts)
    names = {x.kernel.__module__.split(".")[2] for x in own.launches}
    assert "hopper" in names
    found = {x.kernel.__module__.split(".")[2] for x, _ in ahead.others(own, p, "highest", facts, plan)}
    assert found == {"hopper", "triton"}


# ------------------------------------------------------------------------------------------------ a compiler of our own


class Away:
    """What Triton asks of a driver before it compiles, for a GPU that is not here."""

    def __init__(self, device: int) -> None:
        self._device = device

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return self._device

    def get_current_stream(self, device: int) -> int:
        return 0


_devices = itertools.count(1000)  # Triton's caches have an entry for each


class Compiler:
    """In place of Triton's ``compile``: notes what it is given, and by which thread; fails where it is told to."""

    def __init__(self) -> None:
        self.compiled: list[str] = []
        self.threads: set[str] = set()
        self.broken: Callable[[Any], bool] = lambda source: False

    def __call__(self, source: Any, target: Any, options: Any, _env_vars: Any = None) -> Any:
        self.threads.add(threading.current_thread().name)
        self.compiled.append(source.name.removesuffix("_kernel"))
        if self.broken(source):
            raise KeyError("no such register")
        return SimpleNamespace(run=None)


@pytest.fixture
def away(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    monkeypatch.delenv(ahead.VARIABLE, raising=False)
    device = next(_devices)
    monkeypatch.setattr(triton.runtime.driver, "_active", Away(device))
    yield device
    for kernel in known_kernels():
        kernel.device_caches.pop(device, None)


@pytest.fixture
def compiler(away: int, monkeypatch: pytest.MonkeyPatch) -> Compiler:
    found = Compiler()
    for kernel in known_kernels():
        _ = kernel.device_caches[away]
        monkeypatch.setattr(kernel, "compile", found)
    return found


def known_kernels() -> list[Any]:
    p = problem(1000, bias="1HMN")
    recipes = [plan(p, "highest", facts_of(p, backward=b)) for plan, b in ((plan_forward, 0), (plan_backward, 1))]
    kernels = [x.kernel for recipe in recipes for x in (*recipe.launches, *beside(p, recipe))]
    return list({id(kernel): kernel for kernel in kernels}.values())


def passes(p: Problem) -> list[Recipe]:
    """Fresh recipes of both passes."""
    return [
        plan_forward(p, "highest", facts_of(p, backward=False)),
        plan_backward(p, "highest", facts_of(p, backward=True)),
    ]


def beside(p: Problem, recipe: Recipe) -> list[Launch]:
    return [x for x, _ in asked(p, recipe)]


def asked(p: Problem, recipe: Recipe) -> list[ahead.Asked]:
    backward = not any("forward" in x.kernel.__name__ for x in recipe.launches)
    plan = plan_backward if backward else plan_forward
    return list(ahead.others(recipe, p, "highest", facts_of(p, backward=backward), plan))


def call(p: Problem) -> list[Recipe]:
    recipes = passes(p)
    for recipe in recipes:
        ahead.compile_together(recipe, meta_tensors(p, recipe), lambda recipe=recipe: asked(p, recipe))
    return recipes


def test_the_first_call_compiles_for_all_lengths(compiler: Compiler) -> None:
    first = call(problem(1000, bias="1HMN"))
    wanted = 2 * ["forward", "dq", "dkdv", "dbias"] + ["add_chunks"]
    assert sorted(compiler.compiled) == sorted(wanted)
    assert threading.current_thread().name not in compiler.threads
    assert not any(launch.must_compile for recipe in first for launch in recipe.launches)
    for length in (1001, 1004, 333, 2047):
        call(problem(length, bias="1HMN"))
    assert sorted(compiler.compiled) == sorted(wanted)


def test_a_plan_of_another_length_that_fails_does_not_fail_the_call(
    compiler: Compiler, caplog: pytest.LogCaptureFixture
) -> None:
    def broken() -> Iterator[ahead.Asked]:
        raise IndexError("tuple index out of range")
        yield

    p = problem(1000, bias="1HMN")
    with caplog.at_level(logging.DEBUG, logger="biasflash"):
        for recipe in passes(p):
            ahead.compile_together(recipe, meta_tensors(p, recipe), broken)
    assert sorted(compiler.compiled) == ["dbias", "dkdv", "dq", "forward"]
    assert "no other lengths are compiled ahead: IndexError: tuple index out of range" in caplog.text


def test_other_lengths_can_be_left_out(compiler: Compiler, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ahead.VARIABLE, "off")
    call(problem(1000, bias="1HMN"))
    assert sorted(compiler.compiled) == ["dbias", "dkdv", "dq", "forward"]


def test_a_call_that_needs_nothing_new_plans_nothing_else(compiler: Compiler) -> None:
    call(problem(1000, bias="1HMN"))
    p = problem(1007, bias="1HMN")
    (recipe, _) = passes(p)
    for _ in range(2):
        ahead.compile_together(recipe, meta_tensors(p, recipe), lambda: pytest.fail("planned"))
        assert not recipe.launches[0].must_compile


def test_another_lengths_kernel_that_does_not_compile_fails_where_it_is_called(
    compiler: Compiler, caplog: pytest.LogCaptureFixture
) -> None:
    place = (passes(problem(1000))[0].launches[0].kernel.arg_names.index("EVEN_N"),)
    compiler.broken = lambda source: source.name == "forward_kernel" and not source.constants[place]
    with caplog.at_level(logging.DEBUG, logger="biasflash"):
        recipe, _ = call(problem(1000, bias="1HMN"))
    assert not recipe.launches[0].must_compile
    (said,) = [record.getMessage() for record in caplog.records if record.levelno == logging.DEBUG]
    assert said.startswith("not compiled ahead, forward: ")
    assert said.endswith("KeyError: 'no such register'")
    with pytest.raises(KeyError, match="no such register"):
        call(problem(1001, bias="1HMN"))


def test_a_kernel_of_the_call_that_does_not_compile_raises_what_the_compiler_said(compiler: Compiler) -> None:
    compiler.broken = lambda source: source.name == "dkdv_kernel"
    for _ in range(2):
        with pytest.raises(KeyError, match="no such register"):
            call(problem(1000, bias="1HMN"))


def test_a_hopper_kernel_that_does_not_compile_says_so_in_its_own_way(away: int) -> None:
    pytest.importorskip("triton.experimental.gluon.language.nvidia.hopper", reason="no Gluon for Hopper")
    from biasflash.backends.hopper.operands import BuildError, DescriptorLaunch

    class Promise(triton.FutureKernel):
        def __init__(self) -> None:
            pass

        def result(self, ignore_errors: bool = False) -> Any:
            raise KeyError("no such register")

    kernel = SimpleNamespace(__name__="dq_kernel", warmup=lambda *given, **options: Promise())
    broken = DescriptorLaunch(kernel=kernel, grid=1, arguments={}, warps=4, stages=1)
    with pytest.raises(BuildError, match="dq_kernel: KeyError: 'no such register'"):
        ahead.compile_together(Recipe(launches=(broken,)), {})
    assert broken.must_compile


def test_inside_a_mode_of_the_callers_own_kernels_are_compiled_as_well(compiler: Compiler) -> None:
    with ThreadPoolExecutor(1) as pool, triton.AsyncCompileMode(pool):
        recipe, _ = call(problem(1000, bias="1HMN"))
        assert not recipe.launches[0].must_compile


def test_warnings_are_heard_and_garbage_is_collected_afterwards(compiler: Compiler) -> None:
    """Triton restores filters in the order in which threads end, which is not that in which they began."""
    before, collecting = list(warnings.filters), []

    def meddle(source: Any) -> bool:
        collecting.append(gc.isenabled())
        warnings.simplefilter("ignore")
        return False

    compiler.broken = meddle
    call(problem(1000, bias="1HMN"))
    assert warnings.filters == before
    assert gc.isenabled()
    assert sys.version_info[:2] != (3, 11) or not any(collecting)


def test_nothing_is_compiled_ahead_while_a_graph_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor where kernels are interpreted."""
    seen: list[str] = []
    monkeypatch.setattr(ahead, "compile_together", lambda *given: seen.append("compiled"))
    monkeypatch.setattr(Launch, "run", lambda self, tensors: seen.append("run"))
    recipe = Recipe(launches=passes(problem(1000))[0].launches)
    for capturing in (False, True):
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda capturing=capturing: capturing)
        launch._launch(recipe, torch.device("cuda"), {}, {})
    assert seen == ["compiled", "run", "run"]


def test_nothing_is_compiled_where_kernels_are_interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    ahead.compile_together(Recipe(launches=passes(problem(1000))[0].launches), {}, lambda: pytest.fail("asked"))


def test_threads_compile_what_one_does(away: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    """Machine code for sm_90, by the true compiler, of both alignments of a row that masks keys."""
    kept: list[Any] = []
    monkeypatch.setattr(Launch, "take", lambda self, kernel: kept.append(kernel.result()))
    monkeypatch.setattr(ahead, "_workers", lambda: 4)
    p, other = problem(1000, bias="B11N"), problem(1001, bias="B11N")
    recipe, sibling = passes(p)[0], passes(other)[0]
    with monkeypatch.context() as fresh:
        fresh.setattr(triton.knobs.cache, "dir", str(tmp_path / "threads"))
        ahead.compile_together(recipe, meta_tensors(p, recipe), lambda: asked(p, recipe))
        waiting = sibling.launches[0].ask(meta_tensors(other, sibling))
        assert not isinstance(waiting, triton.FutureKernel)
        fresh.setattr(triton.knobs.cache, "dir", str(tmp_path / "one"))
        for got, (of, planned) in zip((*kept, waiting), ((p, recipe), (other, sibling)), strict=True):
            wanted = compile_launch(planned.launches[0], meta_tensors(of, planned), 90)
            assert got.asm["cubin"] == wanted.cubin
