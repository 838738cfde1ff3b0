"""The host's part of a call: what is skipped the second time, what is never skipped, and a lid on what is left.

Kernels are replaced by a stub, so the Triton backend's whole host path runs here, on CPU tensors. Time is counted in
calls of functions, Python's and C's, which are the same on every machine; at about 0.1 to 1 us each they are the time.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode

import biasflash
from biasflash import api, ops, plan, problem
from biasflash.backends.triton import launch
from biasflash.backends.triton.operands import Launch

pytestmark = pytest.mark.fresh_memory_as_is  # which costs calls of its own


class Compiled:
    """What Triton's compiled kernel is to its callers: indexed by a grid, or ``run`` with all that it takes."""

    def __init__(self, kernel: str, seen: list[tuple[Any, ...]]) -> None:
        self.function, self.packed_metadata = kernel, (4, 1, 0)
        self.run = lambda *arguments: seen.append(arguments)

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return lambda *values: self.run(*grid, "public", *values)


def forget() -> None:
    api._passed.clear()
    for cached in (ops._prepared, plan.choose, launch._forward_recipe, launch._backward_recipe):
        cached.cache_clear()


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[Any, ...]]]:
    """What every launch handed to its compiled kernel; nothing is computed."""
    seen: list[tuple[Any, ...]] = []
    run = Launch.run

    def compile_or_run(self: Launch, tensors: dict[str, Tensor]) -> None:
        if self._compiled is None:
            self._compiled = Compiled(self.kernel.__name__, seen)
        run(self, tensors)

    streams = SimpleNamespace(get_current_stream=lambda index: 77)
    monkeypatch.setattr(Launch, "run", compile_or_run)
    monkeypatch.setattr(launch, "driver", SimpleNamespace(active=streams))
    monkeypatch.setenv("TRITON_INTERPRET", "1")  # the backend then takes CPU tensors
    forget()
    yield seen
    forget()


def leaves(*, wanted: bool = True) -> list[Tensor]:
    """q, k, v and a bias of full shape."""
    shapes = ((1, 200, 2, 16), (1, 200, 2, 16), (1, 200, 2, 16), (1, 2, 200, 200))
    return [torch.randn(s).half().requires_grad_(wanted) for s in shapes]


def attend(*tensors: Tensor, **options: Any) -> Any:
    return biasflash.attention(*tensors, backend="triton", **options)


# ------------------------------------------------------------------------------------------------------------- the lids


def calls_of(f: Callable[[], Any]) -> int:
    """Calls of Python and C functions in one run of ``f``, once it has run before."""
    found = 0

    def count(_frame: Any, event: str, _argument: Any) -> None:
        nonlocal found
        found += event in ("call", "c_call")

    f(), f()
    previous = sys.getprofile()
    sys.setprofile(count)
    try:
        f()
    finally:
        sys.setprofile(previous)
    return found


@pytest.mark.parametrize(
    ("terms", "wanted", "lid"),
    [(0, False, 105), (1, False, 115), (0, True, 112), (1, True, 122)],
    ids=["plain", "bias", "plain, grad", "bias, grad"],
)
def test_a_forward_call_stays_under_its_lid(
    launched: list[tuple[Any, ...]], terms: int, wanted: bool, lid: int
) -> None:
    tensors = leaves(wanted=wanted)[: 3 + terms]
    assert calls_of(lambda: attend(*tensors)) <= lid
    assert len(launched) == 3


def test_forward_and_backward_stay_under_their_lid(launched: list[tuple[Any, ...]]) -> None:
    tensors = leaves()
    dout = torch.randn(tensors[0].shape).half()
    assert calls_of(lambda: torch.autograd.grad(attend(*tensors), tensors, dout)) <= 375
    assert len(launched) % 3 == 0
    assert {x[3] for x in launched[len(launched) // 3 :]} == {77}


def test_calls_are_counted() -> None:
    assert calls_of(lambda: None) < calls_of(lambda: [abs(x) for x in (1, 2, 3)]) < 20


def test_the_second_call_checks_and_plans_nothing(
    launched: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = leaves()
    attend(*tensors).sum().backward()
    plans = ("forward_recipe", "backward_recipe")
    for where, names in ((problem, ("check_inputs", "gather_terms", "assemble")), (launch, plans)):
        for name in names:
            monkeypatch.setattr(where, name, None)
    attend(*tensors).sum().backward()


# ------------------------------------------------------------------------------------------- what a launch is handed


def test_kernels_get_addresses_and_the_stream_of_the_moment(
    launched: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = leaves(wanted=False)
    mask = torch.ones(200, 200, dtype=torch.bool)
    first, second = attend(*tensors, mask), attend(*tensors, mask)
    monkeypatch.setattr(launch.driver.active, "get_current_stream", lambda index: 78)
    third = attend(*tensors, mask)
    public, started, other = launched
    assert public[:4] == (public[0], 1, 1, "public")
    assert started[:9] == (public[0], 1, 1, 77, "forward_kernel", (4, 1, 0), None, None, None)
    assert other[3] == 78
    for out, values in ((second, started[9:]), (third, other[9:])):
        given = dict(zip(launch_arguments(), values, strict=True))
        assert [given[f"{x}_ptr"] for x in "qkv"] == [t.data_ptr() for t in tensors[:3]]
        assert given["out_ptr"] == out.data_ptr() != first.data_ptr()
        assert given["term_ptrs"] == (tensors[3].data_ptr(), mask.data_ptr())
    masks = dict(zip(launch_arguments(), public[4:], strict=True))["term_ptrs"]
    assert [t.dtype for t in masks] == [torch.float16, torch.uint8]
    differing = {n for n, a, b in zip(launch_arguments(), public[4:], started[9:], strict=True) if not same(a, b)}
    assert differing == {name for name in launch_arguments() if name.endswith(("_ptr", "_ptrs"))}


def launch_arguments() -> list[str]:
    from biasflash.backends.triton import forward

    return list(forward.forward_kernel.arg_names)


def same(a: Any, b: Any) -> bool:
    return type(a) is type(b) and (not isinstance(a, tuple) or all(map(same, a, b))) and bool(a == b)


@pytest.mark.parametrize("hook", ["launch_enter_hook", "launch_exit_hook"])
@pytest.mark.parametrize("chained", [True, False])
def test_someone_who_listens_to_launches_hears_all_of_them(
    launched: list[tuple[Any, ...]], hook: str, chained: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = leaves(wanted=False)
    attend(*tensors)
    given = SimpleNamespace(calls=[print]) if chained else print
    monkeypatch.setattr(triton.knobs.runtime, hook, given)
    attend(*tensors)
    assert [x[3] for x in launched] == ["public", "public"]


def test_a_compiled_kernel_without_the_known_attributes_is_called_the_public_way(
    launched: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Compiled, "packed_metadata", property(), raising=False)
    monkeypatch.setattr(
        Compiled, "__init__", lambda self, kernel, seen: setattr(self, "run", lambda *x: seen.append(x))
    )
    tensors = leaves(wanted=False)
    for _ in range(2):
        attend(*tensors)
    assert [x[3] for x in launched] == ["public", "public"]


# -------------------------------------------------------------------------------------- what a known call does not hide


def test_a_wrong_call_is_refused_after_a_right_one_that_looks_equal() -> None:
    q, k, v, bias = (t.float() for t in leaves(wanted=False))
    for causal in (True, False):
        biasflash.attention(q, k, v, bias, causal=causal, scale=1.0)
    for causal in (1, 0, 1.0, "True", None, [True]):
        with pytest.raises(ValueError, match="causal must be False, True"):
            biasflash.attention(q, k, v, bias, causal=causal, scale=1.0)  # type: ignore[arg-type]
    for scale in (True, "1.0", torch.tensor(1.0)):
        with pytest.raises(TypeError, match="scale must be a number or None"):
            biasflash.attention(q, k, v, bias, causal=True, scale=scale)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="backend='nearest' is unknown"):
        biasflash.attention(q, k, v, bias, causal=True, scale=1.0, backend="nearest")
    with pytest.raises(TypeError, match=r"bias\[1\] must be a torch.Tensor"):
        biasflash.attention(q, k, v, [bias, 1.0])  # type: ignore[list-item]
    biasflash.attention(q, k, v, bias)
    with pytest.raises(TypeError, match="mask has dtype float32"):
        biasflash.attention(q, k, v, mask=bias)
    biasflash.attention(q, k, v, mask=bias > 0)
    biasflash.flash_attention_fn(q, k, v, bias > 0)
    with pytest.raises(TypeError, match="bias is boolean"):
        biasflash.attention(q, k, v, bias > 0)
    rows = [t.transpose(1, 2) for t in (q, k[..., :1, :], v[..., :1, :])]
    biasflash.scaled_dot_product_attention(*rows, enable_gqa=True)
    with pytest.raises(ValueError, match="pass enable_gqa=True"):
        biasflash.scaled_dot_product_attention(*rows)


def test_terms_keep_their_places() -> None:
    """One tensor given twice, then two different ones of the same shapes; masks before, between and after biases."""
    q, k, v, one = (t.float() for t in leaves(wanted=False))
    two, keep = torch.randn_like(one), one > 0
    biasflash.attention(q, k, v, [one, one])
    torch.testing.assert_close(biasflash.attention(q, k, v, [one, two]), biasflash.attention(q, k, v, one + two))
    wanted = biasflash.attention(q, k, v, one, keep)
    for _ in range(2):
        heads_first = [t.transpose(1, 2) for t in (q, k, v)]
        assert torch.equal(biasflash.flash_attention_fn(q, k, v, [keep, one]), wanted)  # type: ignore[arg-type]
        assert torch.equal(biasflash.attention(q, k, v, one, [keep]), wanted)
        got = biasflash.scaled_dot_product_attention(*heads_first, one.masked_fill(~keep, -torch.inf))
        torch.testing.assert_close(got.transpose(1, 2), wanted)


def test_the_state_of_the_moment_counts() -> None:
    tensors = [t.float() for t in leaves(wanted=False)]
    wanted = biasflash.attention(*tensors)
    assert not wanted.requires_grad
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert biasflash.attention(*tensors).dtype == torch.bfloat16
    assert biasflash.attention(*tensors).dtype == torch.float32
    tensors[3].requires_grad_()
    assert biasflash.attention(*tensors).requires_grad
    with torch.no_grad():
        assert not biasflash.attention(*tensors).requires_grad
    with torch.inference_mode():
        assert not biasflash.attention(*tensors).requires_grad
    assert biasflash.attention(*tensors).requires_grad


def test_many_lengths_do_not_pile_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api, "MOST_PASSED", 8)
    for length in range(1, 30):
        q = torch.randn(1, length, 1, 4)
        biasflash.attention(q, q, q)
        assert len(api._passed) <= 8


# ------------------------------------------------------------------------------------------ who still sees the operator


class Listener(TorchDispatchMode):
    """Names of the operators that come by."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


class Named(torch.Tensor):
    """A subclass that only listens to functions."""


def test_dispatch_modes_see_both_operators_even_if_only_the_backward_runs_under_one() -> None:
    tensors = [t.detach().float().requires_grad_() for t in leaves()]
    biasflash.attention(*tensors)
    with Listener() as both:
        biasflash.attention(*tensors).sum().backward()
    out = biasflash.attention(*tensors)
    with Listener() as late:
        out.sum().backward()
    assert {"biasflash.forward.default", "biasflash.backward.default"} <= set(both.seen)
    assert "biasflash.backward.default" in late.seen


def test_profilers_see_the_operator() -> None:
    tensors = [t.float() for t in leaves(wanted=False)]
    biasflash.attention(*tensors)
    with torch.autograd.profiler.profile() as found:
        biasflash.attention(*tensors)
    assert "biasflash::forward" in {event.name for event in found.function_events}


def test_only_plain_tensors_are_plain() -> None:
    t = torch.randn(3)
    assert ops.is_plain([t, torch.nn.Parameter(t), t[1:], t > 0])
    with torch.inference_mode():
        assert ops.is_plain([t, torch.randn(3)])
    negated = torch.randn(3, dtype=torch.complex64).conj().imag
    assert negated.is_neg()
    for other in (negated, t.as_subclass(Named), torch.empty(3, device="meta"), t.to_sparse(), None, 1.0, [t]):
        assert not ops.is_plain([t, other])


def test_nothing_is_plain_where_something_watches() -> None:
    t = torch.randn(3)
    found: list[bool] = []

    def note(x: Tensor) -> Tensor:
        found.append(ops.is_plain([t]))
        return x * 2

    with Listener():
        note(t)
    with torch.autograd.profiler.profile():
        note(t)
    with torch.device("cpu"):
        note(t)
    with forward_ad.dual_level():
        note(t)
    with torch._C._AutoDispatchBelowAutograd():
        note(t)
    torch.vmap(note)(t)
    torch.func.grad(lambda x: note(x).sum())(t)
    torch.func.functionalize(note)(t)
    torch.fx.experimental.proxy_tensor.make_fx(note)(t)
    assert found == [False] * 9
    note(t)
    assert found[-1]


def test_a_lazily_negated_view_gives_its_own_values() -> None:
    q, k, v, _ = (t.float() for t in leaves(wanted=False))
    negated = torch.view_as_complex(torch.stack([q, q], -1)).conj().imag
    assert negated.is_neg()
    biasflash.attention(q, k, v)
    assert torch.equal(biasflash.attention(negated, k, v), biasflash.attention(-q, k, v))
