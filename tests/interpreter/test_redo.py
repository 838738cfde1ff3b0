"""Launches that redo what another kernel left out: rows far from zero are computed, all else is left as it was."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

import pytest
import torch
import triton
import triton.language as tl

from biasflash import problem as problems
from biasflash.backends.backend import Gradients
from biasflash.backends.triton import config, forward_plan, launch, operands
from biasflash.backends.triton.backward_plan import BackwardPlan
from biasflash.backends.triton.config import TileConfig
from biasflash.backends.triton.operands import Launch, Layout, Operands, Slot, device_facts
from biasflash.backends.triton.recipe import Recipe
from biasflash.reference import backward as right_backward
from biasflash.reference import forward as right_forward
from biasflash.tile.redo import any_of_planes, redo_share

FILL = 7.0


class _Redo(BackwardPlan):
    """Delta and flags of extreme rows, then only launches that redo; ``raised``: a sum of the owner is not believed."""

    DQ_COMPUTES_DELTA = False
    raised = False

    def _launches(self) -> Iterator[Launch]:
        yield self._delta()
        yield self._dkdv(REDO=True)
        if self.runs_dq:
            yield self._dq(REDO=True)
        for i in self.owned:
            part = self._share(i, 16, 16, lambda programs, shared, most: 1)
            pointer = Slot("lse" if self.raised else "dlse")  # of which some are above 0, and none is
            yield self._owner(i, part, REDO=True, redo_ptr=pointer, redo_pitch=self.heads)


def _run(
    shape: tuple[int, ...], causal: bool, extreme: bool, raised: bool, group: int = 1
) -> tuple[Mapping[str, torch.Tensor], ...]:
    """Gradients after the redoing launches alone, and the right ones; batch item 0 of head 0 may have extreme rows."""
    torch.manual_seed(0)
    B, N = 2, 64
    _, H, M, _ = shape
    q, k, v, dout = (torch.randn(B, n, h, 16).half() for n, h in ((M, H), (N, H // group), (N, H // group), (M, H)))
    bias = torch.randn(shape)
    if extreme:
        bias[0, 0, 3] -= 2.0e4
        bias[0, 0, M - 1] = torch.finfo(torch.float32).min
    bias.requires_grad_()
    leaves = [t.requires_grad_() for t in (q, k, v)]
    p = problems.build(*leaves, [bias], ["dense"], "bottom-right" if causal else "none", None)
    terms = [bias.detach()]
    q, k, v = (t.detach() for t in leaves)
    out, lse, low = launch.run_forward(p, q, k, v, terms)

    def plan(problem: problems.Problem, precision: str, facts: launch.Facts) -> Recipe:
        rows, layouts, grads = launch.layouts(facts, 1)
        device = replace(device_facts(problem.device), multiprocessors=1)
        made = _Redo(problem, device, rows, layouts, grads, True)
        made.raised = raised
        return made.recipe()

    ours = {"dq": torch.full_like(q, FILL), "dk": torch.full_like(k, FILL), "dv": torch.full_like(v, FILL)}
    ours["dbias"] = torch.full_like(terms[0], FILL)
    into = Gradients(q=ours["dq"], k=ours["dk"], v=ours["dv"], terms=(ours["dbias"],))
    launch.run_backward(p, into, dout, torch.zeros_like(lse), q, k, v, terms, out, lse, low, plan)
    right = {name: torch.empty_like(t) for name, t in ours.items()}
    into = Gradients(q=right["dq"], k=right["dk"], v=right["dv"], terms=(right["dbias"],))
    right_backward(p, into, dout, None, q, k, v, terms, *right_forward(p, q, k, v, terms))
    return ours, right


def _close(ours: torch.Tensor, right: torch.Tensor) -> bool:
    return bool((ours.double() - right.double()).abs().amax() <= 3e-3 * right.double().abs().amax())


@pytest.fixture(params=[3, 6])
def programs(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """How many programs a redoing launch has at most: fewer than the 4 planes, and more."""
    count: int = request.param
    monkeypatch.setattr(operands, "REDO_PROGRAMS", count)
    return count


def _tiles(monkeypatch: pytest.MonkeyPatch, **rows: int) -> None:
    """Tiles of so many queries by kernel, and of 16 keys (dkdv: keys and queries change places)."""

    def choose(facts: config.Facts) -> tuple[TileConfig, str]:
        return TileConfig(block_m=rows.get(facts.kernel, 16), block_n=16, warps=4, stages=1), "a test"

    monkeypatch.setattr(config, "choose_tile", choose)


@pytest.mark.usefixtures("general_kernels", "programs")
@pytest.mark.parametrize("causal", [False, True], ids=["", "causal"])
@pytest.mark.parametrize("shape", [(2, 2, 40, 64), (1, 2, 40, 64)], ids=["stored", "owned"])
def test_only_what_extreme_rows_touch_is_computed(shape: tuple[int, ...], causal: bool) -> None:
    ours, right = _run(shape, causal, extreme=True, raised=False)
    items = 1 if shape[0] == 2 else 2  # a shared bias makes the row extreme in both
    for name in ("dk", "dv"):
        assert _close(ours[name][:items, :, 0], right[name][:items, :, 0]), name
        assert (ours[name][:, :, 1] == FILL).all(), f"{name} of a head without extreme rows was written"
        assert (ours[name][items:] == FILL).all(), f"{name} of an item without extreme rows was written"
    if shape[0] == 2:
        assert _close(ours["dbias"][0, 0], right["dbias"][0, 0])
        assert (ours["dbias"][1] == FILL).all()
        assert (ours["dbias"][0, 1] == FILL).all()
    else:
        for row in (3, 39):
            assert _close(ours["dq"][:, row, 0], right["dq"][:, row, 0])
            assert _close(ours["dbias"][0, 0, row], right["dbias"][0, 0, row])
        assert (ours["dq"][:, :, 1] == FILL).all()
        assert (ours["dbias"][0, 1] == FILL).all()


@pytest.mark.usefixtures("general_kernels", "programs")
@pytest.mark.parametrize("blocks", [(16, 32), (32, 16)], ids=str)
def test_flags_stand_for_other_tiles_than_dq_has(blocks: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    _tiles(monkeypatch, dq=blocks[0], delta=blocks[1])
    ours, right = _run((1, 2, 90, 64), False, extreme=True, raised=False)  # rows 3 and 89
    for row in (3, 89):
        assert _close(ours["dq"][:, row, 0], right["dq"][:, row, 0])
        assert _close(ours["dbias"][0, 0, row], right["dbias"][0, 0, row])
    assert (ours["dq"][:, :, 1] == FILL).all()
    assert (ours["dq"][:, 32:64, 0] == FILL).all()
    assert (ours["dbias"][0, 0, 32:64] == FILL).all()
    assert (ours["dbias"][0, 1] == FILL).all()


@pytest.mark.usefixtures("general_kernels", "programs")
def test_a_key_head_is_redone_for_any_query_head_of_its_group() -> None:
    ours, right = _run((2, 4, 40, 64), False, extreme=True, raised=False, group=2)
    for name in ("dk", "dv"):
        assert _close(ours[name][0, :, 0], right[name][0, :, 0]), name
        assert (ours[name][:, :, 1] == FILL).all(), name
        assert (ours[name][1] == FILL).all(), name
    assert _close(ours["dbias"][0, :2], right["dbias"][0, :2])
    assert (ours["dbias"][0, 2:] == FILL).all()


@pytest.mark.usefixtures("general_kernels", "programs")
@pytest.mark.parametrize("raised", [(), ((0, 3, 0), (1, 1, 2))], ids=["none", "two"])
@pytest.mark.parametrize(("block", "causal"), [(16, True), (64, False), (128, True)], ids=str)
def test_forward_computes_only_flagged_tiles(
    block: int, causal: bool, raised: tuple[tuple[int, ...], ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Flags of 64 queries, in heads of two groups; the same bits as where every tile is computed."""
    _tiles(monkeypatch, forward=block)
    torch.manual_seed(0)
    B, M, N, H = 2, 150, 50, 4
    q, k, v = torch.randn(B, M, H, 16).half(), torch.randn(B, N, 2, 16).half(), torch.randn(B, N, 2, 16).half()
    bias = torch.randn(1, H, M, N)
    p = problems.build(q, k, v, [bias], ["dense"], "bottom-right" if causal else "none", None)
    whole = launch.run_forward(p, q, k, v, [bias])
    ours = [torch.full_like(t, FILL) for t in whole]
    flags = torch.zeros(B, H, 4)  # one more a head than there are
    tensors = {"q": q, "k": k, "v": v, "out": ours[0]}
    rows = {name: Layout(t.stride(), True) for name, t in tensors.items()}
    device = replace(device_facts(p.device), multiprocessors=1)
    ops = Operands(p, device, rows, [Layout(bias.stride(), True)])
    again = torch.zeros(B, H, M, dtype=torch.bool)
    for b, h, i in raised:
        flags[b, h, i] = 1.0
        again[b, h, i * 64 // block * block : -(-(i + 1) * 64 // block) * block] = True
    forward_plan.redo(ops, 4).run({**tensors, "bias0": bias, "lse": ours[1], "low": ours[2], "redo": flags})
    for found, right in zip(ours, whole, strict=True):
        written = again.transpose(1, 2)[..., None] if found.dim() == 4 else again
        assert torch.equal(found, torch.where(written, right, FILL))


@pytest.mark.usefixtures("general_kernels", "programs")
def test_nothing_is_computed_where_no_row_is_extreme() -> None:
    ours, _ = _run((1, 2, 40, 64), False, extreme=False, raised=False)
    assert all((t == FILL).all() for t in ours.values())


@pytest.mark.usefixtures("general_kernels", "programs")
def test_a_raised_flag_redoes_every_sum() -> None:
    ours, right = _run((1, 2, 40, 64), False, extreme=False, raised=True)
    assert _close(ours["dbias"], right["dbias"])
    assert (ours["dk"] == FILL).all()


@triton.jit
def _share(flags_ptr, marks_ptr, found_ptr, planes, span, tiles):
    first, stride, start, step = redo_share(planes, span, tiles)
    tl.store(found_ptr + tl.program_id(0), any_of_planes(flags_ptr, first, planes, stride, span).to(tl.float32))
    for plane in range(first, planes, stride):
        for tile in range(start, tiles, step):
            tl.store(marks_ptr + plane * tiles + tile, tl.load(marks_ptr + plane * tiles + tile) + 1.0)


@pytest.mark.parametrize("programs", [1, 7, 24])
@pytest.mark.parametrize(("planes", "span", "tiles"), [(1, 1, 1), (3, 2, 40), (40, 70, 5), (100, 3, 2), (5, 1500, 9)])
def test_every_tile_has_one_program_that_sees_its_flag(programs: int, planes: int, span: int, tiles: int) -> None:
    """Also where programs outnumber tiles, and where one program has more flags than it looks at once."""
    flags, found = torch.zeros(planes, span), torch.zeros(programs)
    marks = torch.zeros(planes, tiles)
    _share[(programs,)](flags, marks, found, planes, span, tiles)
    assert (marks == 1).all()
    assert not found.any()
    flags[planes // 2, span - 1] = 1.0
    _share[(programs,)](flags, marks, found, planes, span, tiles)
    assert 1 <= found.sum() <= tiles
