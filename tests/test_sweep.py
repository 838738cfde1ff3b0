"""``biasflash sweep``: shapes, the neighbour rule, the cliff rule, the spot check, the picture, a run on the CPU."""

from __future__ import annotations

import dataclasses
import json
import math
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from typer.testing import CliRunner

from biasflash.cli import gate, spot, sweep, sweep_chart, sweep_grid, timing
from biasflash.cli.main import app
from biasflash.cli.sweep_grid import CURVE, ERROR, GRID, NO_MEMORY, NO_TIME, OK, WRONG, Point, Sample
from biasflash.testing.case import H200, Bias, Call, Case

CPU = torch.device("cpu")


def sample(dim: int, length: int, per_flop: float, **more: Any) -> Sample:
    """A timed sample of the grid that takes ``per_flop`` ms per TFLOP, far from any floor."""
    given: dict[str, Any] = {"mode": "fwd", "status": OK, "floor_ms": None} | more
    part, bias = given.pop("part", GRID), given.pop("bias", False)
    point = Point(part=part, dim=dim, length=length, bias=bias, batch=2, heads=4)
    blank = Sample(point=point, **given)
    return dataclasses.replace(blank, ms=per_flop * blank.flops / 1e12 if given["status"] == OK else None)


# -------------------------------------------------------------------------------------------------------------- shapes


def test_the_grid_is_the_promised_one_at_equal_work() -> None:
    points = sweep_grid.grid(sweep_grid.DIMS, sweep_grid.LENGTHS)
    assert len({(p.dim, p.length, p.bias) for p in points}) == len(points) == 13 * 19 * 2
    for p in points:
        scores = p.batch * p.heads * p.length**2
        rows = p.batch * p.heads * p.length
        assert p.batch >= 2, "the bias is shared"
        assert scores < 2**29 + 1
        assert rows * p.dim <= sweep_grid.ELEMENTS
        if scores < 2**28:  # only where q would take more than it may
            assert (rows + p.heads * p.length) * p.dim > sweep_grid.ELEMENTS
            assert p.batch * p.heads >= 4096, "and even there the GPU is full"


def test_the_curve_doubles_from_1k_to_32k() -> None:
    points = sweep_grid.curve(sweep_grid.CURVE_DIMS, sweep_grid.CURVE_LENGTHS)
    assert [p.length for p in points[:6]] == [1024, 2048, 4096, 8192, 16384, 32768]
    assert {(p.dim, p.bias, p.batch, p.heads) for p in points} == {
        (d, bias, 1, 16) for d in (64, 128) for bias in (False, True)
    }
    assert max(p.bytes_needed() for p in points) < 80e9, "a bias of 32 GiB and its gradient"


def test_flops_are_those_of_true_sizes() -> None:
    s = sample(40, 65, 1.0)
    assert s.flops == 2 * (40 + 40) * 2 * 4 * 65 * 65
    assert dataclasses.replace(s, mode="fwdbwd").flops == s.flops * 3.5
    assert s.cost == pytest.approx(1.0)
    assert s.tflops == pytest.approx(1000.0)


# --------------------------------------------------------------------------------------------------------------- rules


def test_a_shape_is_slow_against_its_best_neighbour_only() -> None:
    grid = [sample(d, n, 1.0) for d in (16, 24, 32) for n in (33, 64, 65)]
    assert sweep_grid.slow_shapes(grid) == []
    grid[4] = sample(24, 64, 1.61)
    (slow,) = sweep_grid.slow_shapes(grid)
    assert (slow.sample.point.dim, slow.sample.point.length) == (24, 64)
    assert (slow.ratio, slow.floor_ratio) == (pytest.approx(1.61), 1.0)
    assert not slow.is_explained
    grid[4] = sample(24, 64, 1.59)
    assert sweep_grid.slow_shapes(grid) == []


def test_neighbours_are_next_in_one_axis_of_the_same_mode_and_bias() -> None:
    diagonal = [sample(16, 33, 1.0), sample(24, 64, 9.0)]
    assert sweep_grid.slow_shapes(diagonal) == []
    far = [sample(16, 33, 1.0), sample(24, 33, 1.5), sample(32, 33, 2.2)]
    assert sweep_grid.slow_shapes(far) == [], "1.5 and 1.47 times the next, though 2.2 times the first"
    for other in ({"mode": "fwdbwd"}, {"bias": True}, {"part": CURVE}):
        assert sweep_grid.slow_shapes([sample(16, 33, 1.0), sample(24, 33, 9.0, **other)]) == []


def test_a_shape_that_was_not_timed_is_no_neighbour() -> None:
    grid = [sample(16, 33, 1.0), sample(24, 33, 1.0, status=NO_TIME), sample(32, 33, 1.7)]
    (slow,) = sweep_grid.slow_shapes(grid)
    assert slow.neighbour.point.dim == 16, "the next that was timed"


def test_a_floor_that_differs_as_much_explains() -> None:
    near, far = sample(16, 33, 1.0), sample(16, 64, 2.0)
    for share, explained in ((1.5, True), (1.1, False), (0.5, False)):
        pair = [
            dataclasses.replace(near, floor_ms=near.flops * 1e-12),
            dataclasses.replace(far, floor_ms=far.flops * 1e-12 * share),
        ]
        (slow,) = sweep_grid.slow_shapes(pair)
        assert slow.floor_ratio == pytest.approx(max(1.0, share))
        assert slow.is_explained == explained


def test_a_cliff_is_more_than_15_percent_over_the_work() -> None:
    times = {1024: 1.0, 2048: 4.0, 4096: 18.0, 8192: 84.0}
    line = [dataclasses.replace(sample(64, n, 1.0, part=CURVE), ms=ms) for n, ms in sorted(times.items(), reverse=True)]
    found = sweep_grid.growths(line)
    assert [(g.after.point.length, g.times, g.work, g.is_cliff) for g in found] == [
        (2048, 4.0, 4.0, False),
        (4096, 4.5, 4.0, False),
        (8192, pytest.approx(84 / 18), 4.0, True),
    ]
    gap = [s for s in line if s.point.length != 2048]
    assert [(g.after.point.length, g.work) for g in sweep_grid.growths(gap)] == [(4096, 16.0), (8192, 4.0)]


# ---------------------------------------------------------------------------------------------------------- spot check


def call_of(bias: str | None, batch: int = 3) -> tuple[Call, torch.Tensor, dict[str, torch.Tensor]]:
    shape: dict[str, Any] = {"batch": (batch,), "M": 21, "N": 21, "Hq": 2, "Hkv": 2, "D": 8, "Dv": 8}
    biases = (Bias(shape=bias),) if bias else ()
    case = Case(name="x", why="", tags=frozenset(), dtype="fp32", biases=biases, **shape)
    call = case.build(CPU)
    return call, *sweep._both(call)


@pytest.mark.parametrize(("bias", "batch"), [(None, 3), ("1HMN", 3), ("1HMN", 1), ("BHMN", 2)])
@pytest.mark.parametrize("block", [2**26, 64])
def test_the_spot_check_passes_what_is_right(
    bias: str | None, batch: int, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spot, "BLOCK", block)
    call, out, gradients = call_of(bias, batch)
    found = spot.errors(call, out, gradients)
    assert set(found) == {"out", "dq", "dk", "dv"} | ({"dbias[0]"} if bias else set())
    assert gate.is_green(found, 1e-5), found


@pytest.mark.parametrize("name", ["out", "dq", "dk", "dv", "dbias[0]"])
def test_the_spot_check_sees_what_is_wrong(name: str) -> None:
    call, out, gradients = call_of("1HMN")
    found = {"out": out.detach().clone()} | {n: t.clone() for n, t in gradients.items()}
    found[name] = found[name].roll(1, -1)
    errors = spot.errors(call, found.pop("out"), found)
    assert [n for n, error in errors.items() if not error <= 0.1] == [name]


# ---------------------------------------------------------------------------------------------------------------- flow


POINT = sweep_grid.grid_point(16, 33, True, 2**13, "fp32")


def test_a_wrong_result_gets_no_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spot, "errors", lambda call, out, gradients: {"out": 1e-6, "dq": math.nan})
    found = sweep.sample_point(POINT, ("fwd", "fwdbwd"), CPU, H200, 1.0)
    assert [(s.status, s.ms, s.reason) for s in found] == [(WRONG, None, "dq is off by nan")] * 2
    assert sweep.exit_code(found) == 1
    json.dumps(sweep.make_report(found, CPU, H200, 1.0), allow_nan=False)


def test_points_say_why_they_have_no_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    def measured(point: Point, ready: str = "", deadline: float = 100.0) -> Sample:
        (found,) = next(sweep.measure([point], ("fwd",), CPU, H200, time.time() + deadline, lambda p: ready))
        return found

    assert measured(POINT, deadline=-1.0).status == NO_TIME
    assert measured(POINT, ready=NO_TIME).status == NO_TIME
    assert measured(POINT, ready="CompilationError").status == ERROR
    with monkeypatch.context() as patch:
        patch.setattr(sweep, "_free_bytes", lambda device: 1e6)
        assert (measured(POINT).status, measured(POINT).reason) == (NO_MEMORY, "needs 2 GiB")

    def broken(*args: Any) -> list[Sample]:
        raise RuntimeError("no such kernel")

    monkeypatch.setattr(sweep, "sample_point", broken)
    assert measured(POINT).reason == "RuntimeError: no such kernel"


def test_the_budget_is_used_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 5.0, 11.0])
    monkeypatch.setattr(sweep.time, "time", lambda: next(clock))
    monkeypatch.setattr(sweep, "sample_point", lambda point, *_: [sample(point.dim, point.length, 1.0)])
    found = list(sweep.measure([POINT] * 3, ("fwd",), CPU, H200, 10.0))
    assert [samples[0].status for samples in found] == [OK, OK, NO_TIME]


def test_a_run_on_the_cpu_writes_its_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "ceilings", lambda device: H200)
    figures, picture = tmp_path / "new" / "sweep.json", tmp_path / "sweep.png"
    found = CliRunner().invoke(
        app,
        ["sweep", "--device", "cpu", "--dims", "16,24", "--json", str(figures), "--chart", str(picture)],
        env={"COLUMNS": "200"},
    )
    assert found.exit_code == 0, found.output
    assert "time against length" in found.output
    report = json.loads(figures.read_text())
    assert report["schema"] == sweep.SCHEMA
    assert len(report["samples"]) == 2 * (2 * 2 * 3) * 2, "curve and grid, both modes"
    assert {s["status"] for s in report["samples"]} == {"ok"}
    assert all(s["ms"] > 0 and s["tflops"] > 0 and s["error"] < 1e-4 for s in report["samples"])
    with Image.open(picture) as drawn:
        assert drawn.text["Description"].startswith("48 of 48 timed")


def test_options_are_checked_before_anything_runs() -> None:
    for arguments, words in (
        (["--part", "plane"], "--part plane is unknown"),
        (["--mode", "bwd"], "--mode bwd is unknown"),
        (["--dims", "16,x"], "--dims 16,x: wanted numbers"),
        (["--lengths", "0"], "--lengths 0: wanted numbers"),
    ):
        found = CliRunner().invoke(app, ["sweep", "--device", "cpu", *arguments], env={"COLUMNS": "160"})
        assert found.exit_code == 2
        assert words in found.output


def test_help_is_enough_to_use_it() -> None:
    found = CliRunner().invoke(app, ["sweep", "--help"], env={"COLUMNS": "160"})
    assert found.exit_code == 0
    for word in ("--part", "--mode", "--dims", "--lengths", "--seconds", "--chart", "1.6 x", "15 %", "Exit code 1"):
        assert word in found.output, word


# ------------------------------------------------------------------------------------------------------------- picture


def test_the_picture_of_a_whole_run(tmp_path: Path) -> None:
    grid = [
        sample(d, n, 1.0 + (d == 80 and n == 300), mode=mode, bias=bias)
        for d in sweep_grid.DIMS
        for n in sweep_grid.LENGTHS
        for mode in ("fwd", "fwdbwd")
        for bias in (False, True)
    ]
    line = [sample(64, n, 1.0, part=CURVE, mode=mode) for n in sweep_grid.CURVE_LENGTHS for mode in ("fwd", "fwdbwd")]
    samples = [*grid, *line, sample(64, 1, 1.0, status=NO_TIME)]
    slow, growths = sweep_grid.slow_shapes(samples), sweep_grid.growths(samples)
    assert len(slow) == 4
    path = tmp_path / "sweep.png"
    sweep_chart.draw(samples, slow, growths, path, "a GPU")
    with Image.open(path) as drawn:
        assert min(drawn.size) > 800
        assert drawn.text["Description"] == "1000 of 1001 timed; 4 slow shapes, 4 not for their bytes; 0 cliffs"
        colours = {colour for _, colour in drawn.convert("RGB").getcolors(2**24) or []}
    assert (0xD1, 0x49, 0x5B) in colours, "slow shapes are framed"
    assert path.stat().st_size < 500_000


def test_a_part_may_be_drawn_alone(tmp_path: Path) -> None:
    sweep_chart.draw([sample(16, 33, 1.0)], [], [], tmp_path / "grid.png", "a GPU")
    sweep_chart.draw([sample(16, 33, 1.0, part=CURVE)], [], [], tmp_path / "curve.png", "a GPU")
    with pytest.raises(ValueError, match="nothing was timed"):
        sweep_chart.draw([sample(16, 33, 1.0, status=NO_TIME)], [], [], tmp_path / "no.png", "a GPU")
