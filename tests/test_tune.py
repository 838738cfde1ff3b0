"""``biasflash tune``: tables of tiles, what is tried, who wins, and the flow with a clock of our own."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

pytest.importorskip("triton", reason="tiles belong to the Triton backend")

from biasflash.backends.triton import config, tables
from biasflash.backends.triton.config import Facts, TileConfig
from biasflash.backends.triton.operands import Device
from biasflash.backends.triton.tables import Key, Row, Table
from biasflash.cli import candidates, compiling, trials, tune
from biasflash.cli.main import app
from biasflash.cli.trials import Job, Outcome, Timed
from biasflash.problem import Problem

H200 = Device(shared_memory=232448, multiprocessors=132, capability=90)
TARGET = compiling.Target(triton=None, device=H200, tiles=None)
GPU = torch.device("cuda:0")  # a name only: nothing here makes a tensor on it

FACTS = Facts(
    kernel="forward",
    width=64,
    columns=128,
    itemsize=2,
    has_dense=True,
    bias_itemsize=2,
    shared_memory=232448,
    capability=90,
)


def row_for(facts: Facts, **more: Any) -> Row:
    tile: dict[str, Any] = {"block_m": 32, "block_n": 128, "warps": 4, "stages": 2} | more
    return Row(key=tables.key_of(facts), measured={"some-case": (0.235, 0.298)}, **tile)


def table_of(*rows: Row, **more: Any) -> Table:
    return Table(**({"gpu": "NVIDIA H200", "capability": 90, "rows": {row.key: row for row in rows}} | more))


# ---------------------------------------------------------------------------------------------------------------- keys


def test_a_problem_has_one_key() -> None:
    keys = {
        tables.key_of(dataclasses.replace(FACTS, width=wide, columns=wide + narrow)).max_width: wide
        for wide, narrow in ((16, 16), (32, 16), (64, 64), (128, 32), (256, 256))
    }
    assert keys == {32: 32, 64: 64, 128: 128, 256: 256}
    mixed = tables.key_of(dataclasses.replace(FACTS, width=256, columns=384))
    assert (mixed.max_width, mixed.max_columns) == (256, 384)
    assert tables.key_of(dataclasses.replace(FACTS, width=256, columns=272)) == mixed
    assert tables.key_of(dataclasses.replace(FACTS, width=256, columns=512)).max_columns == 512
    assert "forward, 16 bits, width 256 of 384 columns, a bias" in str(mixed)


def test_what_decides_is_in_the_key() -> None:
    other = {"kernel": "dq", "width": 128, "itemsize": 4, "has_dense": False}
    keys = {tables.key_of(dataclasses.replace(FACTS, **{name: value})) for name, value in other.items()}
    assert len(keys | {tables.key_of(FACTS)}) == 5


# ---------------------------------------------------------------------------------------------------------------- file


def test_a_table_is_read_as_it_was_written(tmp_path: Path) -> None:
    kept = {tables.key_of(dataclasses.replace(FACTS, kernel="dq")): {"some-case": 1.5}}
    rows = row_for(FACTS, registers=128, spill_bytes=32), row_for(dataclasses.replace(FACTS, itemsize=4))
    table = table_of(*rows, kept=kept, facts={"date": "2026-01-02", "triton": "3.6.0"})
    path = tmp_path / "table.json"
    path.write_text(tables.dump(table), encoding="utf-8")
    assert tables.read(path) == table
    assert sum(line.startswith("  {") for line in path.read_text().splitlines()) == 3, "one row a line"


def test_an_empty_table_is_read_as_it_was_written() -> None:
    assert tables.parse(tables.dump(table_of())) == table_of()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "is not a table"),
        ("[]", "is not a table"),
        ('{"schema": "other"}', "schema 'other', wanted 'biasflash-tiles/1'"),
        ('{"schema": "biasflash-tiles/1", "gpu": "x", "capability": 90, "kept": []}', "no 'rows'"),
        (tables.dump(table_of(row_for(FACTS))).replace('"warps": 4', '"warp": 4'), "is not a table"),
    ],
)
def test_what_is_no_table_is_refused(text: str, words: str) -> None:
    with pytest.raises(ValueError, match="somewhere") as error:
        tables.parse(text, "somewhere")
    assert words in str(error.value)


def test_two_rows_of_one_key_are_refused() -> None:
    lines = tables.dump(table_of(row_for(FACTS))).splitlines()
    at = next(i for i, line in enumerate(lines) if line.startswith("  {"))
    twice = "\n".join([*lines[:at], lines[at] + ",", *lines[at:]])
    with pytest.raises(ValueError, match="two rows have one key"):
        tables.parse(twice)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"cannot read the table of tiles .*missing\.json"):
        tables.read(tmp_path / "missing.json")


# ------------------------------------------------------------------------------------------------------------- look-up


def test_a_row_comes_before_the_rule_and_says_why() -> None:
    with tables.using(table_of(row_for(FACTS))):
        tile, why = config.choose_tile(FACTS)
    assert (tile.block_m, tile.block_n) == (32, 128)
    assert why == "table of NVIDIA H200: some-case 0.235 ms, the rule's tile 0.298"


@pytest.mark.parametrize(
    "change", [{"kernel": "dq"}, {"width": 128, "columns": 256}, {"itemsize": 4}, {"has_dense": False}]
)
def test_another_key_takes_the_rule(change: dict[str, Any]) -> None:
    facts = dataclasses.replace(FACTS, **change)
    with tables.using(table_of(row_for(FACTS))):
        assert config.choose_tile(facts) == config.choose_rule(facts)


def test_another_capability_takes_the_rule() -> None:
    facts = dataclasses.replace(FACTS, capability=80)
    tile, why = config.choose_rule(facts)
    with tables.using(table_of(row_for(FACTS))):
        assert config.choose_tile(facts) == (tile, why)


def test_a_row_that_does_not_fit_takes_the_rule() -> None:
    wide_bias = dataclasses.replace(FACTS, bias_itemsize=4)
    row = row_for(FACTS, block_m=128, block_n=128, stages=3)
    with tables.using(table_of(row)):
        assert config.choose_tile(FACTS)[0].block_m == 128
        assert config.shared_bytes(wide_bias, TileConfig(**row.tile)) > FACTS.shared_memory
        assert config.choose_tile(wide_bias) == config.choose_rule(wide_bias)


def test_using_none_is_the_rules_alone_and_ends() -> None:
    with tables.using(table_of(row_for(FACTS))):
        inside = config.choose_tile(FACTS)
        with tables.using(None):
            assert config.choose_tile(FACTS) == config.choose_rule(FACTS)
        assert config.choose_tile(FACTS) == inside


def test_use_takes_a_file_for_good(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "_chosen", [])
    path = tmp_path / "mine.json"
    path.write_text(tables.dump(table_of(row_for(FACTS))), encoding="utf-8")
    tables.use(path)
    assert config.choose_tile(FACTS)[0].block_n == 128
    tables.use(None)
    assert config.choose_tile(FACTS) == config.choose_rule(FACTS)


def test_the_environment_names_a_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "mine.json"
    path.write_text(tables.dump(table_of(row_for(FACTS))), encoding="utf-8")
    monkeypatch.setenv(tables.VARIABLE, str(path))
    assert config.choose_tile(FACTS)[0].block_n == 128
    monkeypatch.setenv(tables.VARIABLE, "off")
    assert config.choose_tile(FACTS) == config.choose_rule(FACTS)
    monkeypatch.setenv(tables.VARIABLE, str(tmp_path / "missing.json"))
    with pytest.raises(ValueError, match=r"missing\.json"):
        config.choose_tile(FACTS)


def test_the_shipped_table_is_that_of_the_gpu_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert tables.file_name("NVIDIA H200") == "nvidia_h200.json"
    assert tables.file_name("NVIDIA GeForce RTX 4090 (48 GB)") == "nvidia_geforce_rtx_4090_48_gb.json"
    monkeypatch.setattr(tables, "SHIPPED", tmp_path)
    monkeypatch.delenv(tables.VARIABLE, raising=False)
    (tmp_path / "gpu_one.json").write_text(tables.dump(table_of(row_for(FACTS), gpu="GPU one")), encoding="utf-8")
    tables.shipped.cache_clear()
    tables.alike.cache_clear()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    for name, found in (("GPU one", True), ("GPU-one", False), ("GPU two", False)):  # GPU-one has the same file name
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda name=name: name)
        assert (tables.active() is not None) == found, name
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    assert tables.active() is None
    for name, rows in (("GPU one", 128), ("GPU two", 128), ("", 64), (None, 64)):
        assert config.choose_tile(dataclasses.replace(FACTS, gpu=name))[0].block_n == rows, name
    tables.shipped.cache_clear()
    tables.alike.cache_clear()


def test_another_gpu_of_the_same_capability_takes_the_shipped_table_and_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv(tables.VARIABLE, raising=False)
    for capability, words in ((90, "table of NVIDIA H200, the same compute capability: "), (100, "")):
        facts = dataclasses.replace(FACTS, width=128, columns=256, capability=capability)
        own, why = config.choose_tile(dataclasses.replace(facts, gpu="NVIDIA H200"))
        tile, reason = config.choose_tile(dataclasses.replace(facts, gpu="NVIDIA GH200 480GB"))
        assert tile == own
        assert reason == (why.replace("table of NVIDIA H200: ", words) if words else why)
    monkeypatch.setenv(tables.VARIABLE, "off")
    assert config.choose_tile(dataclasses.replace(FACTS, gpu="NVIDIA H100")) == config.choose_rule(FACTS)


def test_smaller_tiles_of_a_row_are_for_less_room(tmp_path: Path) -> None:
    row = row_for(FACTS, block_m=128, block_n=128, stages=3, against="128 x 64", smaller=((64, 32, 4, 2, 128, 8),))
    table = tables.parse(tables.dump(table_of(row)))
    assert table == table_of(row)
    with tables.using(table):
        assert config.choose_tile(FACTS)[1] == "table of NVIDIA H200: some-case 0.235 ms, 128 x 64 0.298"
        tile, why = config.choose_tile(dataclasses.replace(FACTS, bias_itemsize=4))
        assert (tile.block_m, tile.block_n, tile.registers, tile.spill_bytes) == (64, 32, 128, 8)
        assert why.endswith("0.298; a smaller one fits")
        unaligned = dataclasses.replace(FACTS, bias_itemsize=4, is_unaligned=True)
        assert config.choose_tile(unaligned)[0].registers is None


def faults(table: Table, name: str) -> list[str]:
    """What is wrong with a table that ships."""
    found = []
    if name != tables.file_name(table.gpu) or not {"date", "biasflash", "torch", "triton"} <= set(table.facts):
        found.append("its name, or facts that are missing")
    for key, row in table.rows.items():
        known = key.kernel in candidates.KERNELS and key.max_width in tables.WIDTHS and key.itemsize in (2, 4)
        if not known or not {row.block_m, row.block_n} <= {*candidates.SIDES} or row.warps not in candidates.WARPS:
            found.append(f"{key}: no tile or key that kernels know")
        gains = [math.log(rule / ms) for ms, rule in row.measured.values()]
        least = math.log(1 + tune.MARGIN) if row.against == tables.RULES_TILE else 0.0
        if not gains or sum(gains) / len(gains) < least - 1e-3:
            found.append(f"{key}: no gain")
    return found


def test_shipped_tables_are_sound() -> None:
    for path in tables.SHIPPED.glob("*.json"):
        assert faults(tables.read(path), path.name) == []


def test_the_check_of_shipped_tables_can_fail() -> None:
    facts = {"date": "", "biasflash": "", "torch": "", "triton": ""}
    assert faults(table_of(row_for(FACTS), facts=facts), "nvidia_h200.json") == []
    slow = dataclasses.replace(row_for(FACTS), measured={"some-case": (0.3, 0.298)})
    for bad in (slow, row_for(FACTS, block_m=24), row_for(FACTS, warps=3)):
        assert len(faults(table_of(bad, facts=facts), "nvidia_h200.json")) == 1
    assert len(faults(table_of(), "nvidia_h200.json")) == 1


# ---------------------------------------------------------------------------------------------------------- candidates


def all_jobs() -> list[Job]:
    return [
        job
        for name, kernels in candidates.choose(None, None).items()
        for job in trials.jobs_of(candidates.CASES[name], kernels, GPU, TARGET)
    ]


@pytest.fixture(scope="module")
def jobs() -> list[Job]:
    return all_jobs()


def test_the_default_cases_reach_every_key(jobs: list[Job]) -> None:
    wanted = {
        Key(kernel=kernel, itemsize=itemsize, max_width=width, max_columns=2 * width, dense=dense)
        for kernel in candidates.KERNELS
        for itemsize in (2, 4)
        for width in tables.WIDTHS
        for dense in ((True,) if kernel in ("dq_from_ds", "dbias") else (True, False))
    }
    found = {job.key for job in jobs}
    assert wanted <= found
    mixed = {key.kernel for key in found - wanted}
    assert mixed == set(candidates.KERNELS), "D 192 with Dv 128"
    asked = [(name, kernel) for name, kernels in candidates.DEFAULT.items() for kernel in kernels]
    assert [(job.case.name, job.kernel) for job in jobs] == asked, "every case runs the kernels it is listed for"


def test_candidates_start_with_the_rules_tile_and_are_sane(jobs: list[Job]) -> None:
    for job in jobs:
        first, *others = job.tiles
        assert first == candidates.plain(config.choose_rule(job.facts)[0])
        assert 2 <= len(others) <= 18, (job.case.name, job.kernel, len(others))
        assert len({*job.tiles}) == len(job.tiles)
        for tile in others:
            assert candidates.is_sane(job.facts, tile), tile


def test_a_tile_that_cannot_fit_is_no_candidate() -> None:
    assert not candidates.is_sane(FACTS, TileConfig(block_m=128, block_n=128, warps=4, stages=9))
    assert not candidates.is_sane(FACTS, TileConfig(block_m=8, block_n=64, warps=4, stages=1))
    wide = dataclasses.replace(FACTS, kernel="dkdv", width=256, columns=512)
    assert not candidates.is_sane(wide, TileConfig(block_m=16, block_n=128, warps=4, stages=1)), "512 accumulators"
    assert not candidates.is_sane(FACTS, TileConfig(block_m=64, block_n=64, warps=8, stages=2, registers=168))
    assert candidates.is_sane(FACTS, TileConfig(block_m=64, block_n=64, warps=4, stages=2, registers=168))


def test_a_forced_tile_is_planned_and_launches_that_depend_on_it_follow(jobs: list[Job]) -> None:
    job = next(j for j in jobs if j.case.name == "t5-1hmn-d64-1k" and j.kernel == "dkdv")
    for tile in job.tiles:
        recipe = compiling.recipes_of(job.problem, TARGET, job.forced(tile))["backward"]
        launch, dq = (trials.launch_of(recipe, name) for name in ("dkdv", "dq"))
        assert (launch.tile, launch.warps, launch.registers) == (tile, tile.warps, tile.registers)
        assert dq.arguments["TAIL"] == tile.block_m


def test_short_axes_leave_one_of_the_tiles_that_become_the_same() -> None:
    short = dataclasses.replace(candidates.CASES["tune-shared-d128"], M=30, N=300)
    (job,) = trials.jobs_of(short, ("dq",), GPU, TARGET)
    shown = [
        str(trials.launch_of(compiling.recipes_of(job.problem, TARGET, job.forced(t))["backward"], "dq").tile)
        for t in job.tiles
    ]
    assert len(set(shown)) == len(shown)


def test_cases_and_kernels_are_chosen_by_name() -> None:
    found = candidates.choose("pair-*,tune-none-d32", "dq")
    assert set(found) == {"pair-1hmn-d32-512", "pair-1hmn-d64-768", "pair-1hmn-d32-1k", "tune-none-d32"}
    assert set(found.values()) == {("dq",)}
    assert "dkdv" in candidates.choose("workload", None)["plain-d64-4k"]
    for cases, kernels, words in (("nothing-*", None, "no case matches"), (None, "dv", "kernel 'dv' is unknown")):
        with pytest.raises(ValueError, match=words):
            candidates.choose(cases, kernels)


# ------------------------------------------------------------------------------------------------------------- winners


def tile(block_m: int) -> TileConfig:
    return TileConfig(block_m=block_m, block_n=64, warps=4, stages=2)


def outcome(job: Job, name: str, *times: tuple[int, float], failure: str = "") -> Outcome:
    job = dataclasses.replace(job, case=dataclasses.replace(job.case, name=name))
    return Outcome(job=job, timed=[Timed(tile=tile(m), ms=ms, spill_bytes=m) for m, ms in times], failure=failure)


def test_a_winner_gains_more_than_the_margin(jobs: list[Job]) -> None:
    best, measured = tune.winner([outcome(jobs[0], "a", (64, 1.0), (32, 0.99), (128, 0.985))])
    assert (best, measured) == (None, {"a": (1.0, 1.0)})
    best, measured = tune.winner([outcome(jobs[0], "a", (64, 1.0), (32, 0.97), (128, 0.96))])
    assert best is not None
    assert (best.tile, measured) == (tile(128), {"a": (0.96, 1.0)})


def test_a_winner_of_several_cases_is_best_on_the_whole(jobs: list[Job]) -> None:
    one = outcome(jobs[0], "a", (64, 1.0), (32, 0.5), (128, 0.9))
    two = outcome(jobs[0], "b", (64, 10.0), (32, 30.0), (128, 9.0))
    best, measured = tune.winner([one, two])
    assert best is not None
    assert (best.tile, measured) == (tile(128), {"a": (0.9, 1.0), "b": (9.0, 10.0)})
    other = outcome(jobs[0], "b", (64, 10.0), (16, 5.0))
    assert tune.winner([one, other])[0] is None, "no tile was timed on both"


def test_a_table_has_winners_notes_of_the_rest_and_what_was_not_timed(jobs: list[Job]) -> None:
    first, second, third = list({job.key: job for job in reversed(jobs)}.values())[:3]
    earlier = table_of(row_for(FACTS), Row(key=third.key, block_m=16, block_n=16, warps=4, stages=1))
    found = [
        outcome(first, "a", (64, 1.0), (32, 0.5)),
        outcome(second, "b", (64, 1.0), (32, 1.5)),
        outcome(third, "c", failure="the rule's tile: wrong"),
    ]
    table = tune.make_table(found, "NVIDIA H200", 90, {"date": "today"}, earlier)
    assert table.rows[first.key].block_m == 32
    assert table.rows[first.key].spill_bytes == 32
    assert table.rows[first.key].measured == {"a": (0.5, 1.0)}
    assert table.kept == {second.key: {"b": 1.0}}
    assert third.key not in table.rows, "what failed gets no tile, not even an old one"
    assert (tables.key_of(FACTS) in table.rows) == (tables.key_of(FACTS) not in {first.key, second.key, third.key})
    other = tune.make_table(found, "NVIDIA H100", 90, {}, earlier)
    assert set(other.rows) == {first.key}, "another GPU's rows are not taken over"


# ---------------------------------------------------------------------------------------------------------------- flow


class FakeCompiler:
    """Refuses tiles of so many rows; after ``patience`` waits no time is left."""

    def __init__(self, patience: int = 10**6, refuses: int = 128) -> None:
        self.asked: list[tuple[str, Any]] = []
        self.patience, self.refuses = patience, refuses

    def submit(self, problem: Problem, title: str, tiles: Any = None) -> list[Any]:
        self.asked.append((title, tiles))
        return [tiles]

    def wait(self, keys: Sequence[Any], deadline: float) -> str:
        self.patience -= 1
        if self.patience < 0:
            return compiling.NO_TIME
        return "CompilationError: too large" if keys[0] is not None and keys[0].tile.block_m == self.refuses else ""


class FakeTrials:
    """Milliseconds by rows of the tile; what is not named is wrong. The second timing is 10 % slower than the first."""

    def __init__(self, times: dict[int, float]) -> None:
        self.times = times
        self.second: list[TileConfig] = []

    def try_tile(self, tile: TileConfig) -> Timed:
        if tile.block_m not in self.times:
            raise trials.WrongError("dq is off by 1.0e+00")
        return Timed(tile=tile, ms=self.times[tile.block_m])

    def again(self, tile: TileConfig) -> float:
        self.second.append(tile)
        return 1.1 * self.times[tile.block_m]


@pytest.fixture
def dq_job(jobs: list[Job]) -> Job:
    return dataclasses.replace(jobs[0], tiles=tuple(tile(m) for m in (64, 128, 32, 16)))


def test_the_flow_skips_what_fails_and_times_the_best_again(dq_job: Job) -> None:
    compiler, fake = FakeCompiler(), FakeTrials({64: 1.0, 32: 0.5})
    (found,) = tune.measure([dq_job], compiler, lambda job: fake, time.time() + 100)
    assert compiler.asked[0] == ("forward", None), "the forward pass is needed first"
    assert [(t.tile.block_m, t.ms) for t in found.timed] == [(64, 1.1), (32, 0.55)]
    assert {t.block_m: why for t, why in found.skipped.items()} == {
        128: "CompilationError: too large",
        16: "wrong: dq is off by 1.0e+00",
    }
    assert tune.report_skipped([found]) == [
        "1 of 4 candidates skipped: CompilationError",
        "1 of 4 candidates skipped: wrong",
    ]
    assert tune.exit_code([found], 1) == 1, "a wrong tile fails the run"


def test_only_the_rules_tile_and_the_two_best_are_timed_again(dq_job: Job) -> None:
    job = dataclasses.replace(dq_job, tiles=tuple(tile(m) for m in (64, 16, 32, 8)))
    fake = FakeTrials({64: 1.0, 16: 0.9, 32: 0.8, 8: 0.7})
    found = trials.run_job(job, fake, {})
    assert [t.tile.block_m for t in found.timed] == [64, 8, 32]
    assert [t.block_m for t in fake.second] == [64, 8, 32]


def test_without_the_rules_tile_there_is_no_outcome(dq_job: Job) -> None:
    found = trials.run_job(dq_job, FakeTrials({32: 0.5}), {})
    assert found.timed == []
    assert "the rule's tile" in found.failure
    assert tune.exit_code([found], 1) == 1
    found = trials.run_job(dq_job, FakeTrials({64: 1.0}), {dq_job.tiles[0]: "no code"})
    assert "no code" in found.failure


def test_what_does_not_fit_the_budget_says_so(dq_job: Job) -> None:
    job = dataclasses.replace(dq_job, tiles=(tile(64), tile(32)))
    fake = FakeTrials({64: 1.0, 32: 0.5})
    found = list(tune.measure([job, job], FakeCompiler(patience=3), lambda job: fake, time.time() + 100))
    assert [o.failure for o in found] == ["", compiling.NO_TIME]
    assert tune.exit_code(found, 2) == 0
    late = list(tune.measure([job], FakeCompiler(), lambda job: fake, time.time() - 1))
    assert [o.failure for o in late] == [compiling.NO_TIME]


def test_a_lost_gpu_ends_the_run(dq_job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trials, "is_lost", lambda: True)

    def broken(job: Job) -> FakeTrials:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    found = list(tune.measure([dq_job, dq_job], FakeCompiler(), broken, time.time() + 100))
    assert len(found) == 1
    assert "illegal memory access" in found[0].failure
    assert tune.exit_code(found, 2) == 1


# ----------------------------------------------------------------------------------------------------------- compiling


def test_the_pool_compiles_once_what_shares_a_key(jobs: list[Job]) -> None:
    class Workers:
        tasks: list[Any] = []  # noqa: RUF012

        def apply_async(self, function: Any, arguments: tuple[Any, ...]) -> None:
            self.tasks.append(arguments[0])

    pool = compiling.Pool(Workers(), TARGET, 60.0)
    job = next(j for j in jobs if j.case.name == "t5-1hmn-d64-1k" and j.kernel == "dbias")
    first = pool.submit(job.problem, job.title, job.forced(job.tiles[0]))
    assert len(pool) == len(first) == len(Workers.tasks)
    assert pool.submit(job.problem, job.title, job.forced(job.tiles[0])) == first
    assert len(pool) == len(first)
    second = pool.submit(job.problem, job.title, job.forced(job.tiles[1]))
    assert len(set(second) - set(first)) == 1, "only the kernel whose tile changed is compiled anew"


def test_a_process_compiles_without_a_gpu_what_a_launch_will_look_up(
    jobs: list[Job], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from triton.backends.compiler import GPUTarget

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    target = dataclasses.replace(TARGET, triton=GPUTarget("cuda", 90, 32))
    problem = compiling.problem_of(candidates.CASES["tune-none-d32"], GPU)
    with compiling.pool(target, 1) as pool:
        assert pool.wait(pool.submit(problem, "forward"), time.time() + 120) == ""
    assert list(tmp_path.rglob("forward_kernel.cubin"))


# ------------------------------------------------------------------------------------------------------------- command


def test_without_a_gpu_it_refuses_in_one_message(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    found = CliRunner().invoke(app, ["tune"], env={"COLUMNS": "160"})
    assert found.exit_code == 2
    assert "tune times kernels on a GPU, and torch sees none here" in found.output
    assert "Traceback" not in found.output


def test_the_command_writes_a_table_and_keeps_what_it_did_not_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of it but the GPU: forward tiles of 64 x 64 take half as long as any other, dq's are all alike."""

    class Even:
        def __init__(self, job: Job) -> None:
            self.gains = job.kernel == "forward"

        def try_tile(self, tile: TileConfig) -> Timed:
            return Timed(tile=tile, ms=self.again(tile))

        def again(self, tile: TileConfig) -> float:
            return 0.5 if self.gains and (tile.block_m, tile.block_n) == (64, 64) else 1.0

    @contextmanager
    def no_pool(target: compiling.Target, processes: int | None) -> Iterator[FakeCompiler]:
        yield FakeCompiler(refuses=0)

    monkeypatch.setattr(tune, "refuse_without_gpu", lambda: torch.device("cpu"))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Some GPU")
    monkeypatch.setattr(compiling, "here", lambda device: TARGET)
    monkeypatch.setattr(compiling, "pool", no_pool)
    monkeypatch.setattr(tune, "_Stages", lambda device, target: Even)
    path = tmp_path / "new" / "table.json"

    def run(*arguments: str) -> str:
        found = CliRunner().invoke(app, ["tune", "--table", str(path), *arguments], env={"COLUMNS": "200"})
        assert found.exit_code == 0, found.output
        return found.output

    output = run("--cases", "plain-d128-4k", "--kernels", "forward,dq")
    assert "(the rule's)" in output
    assert "+100%" in output
    table = tables.read(path)
    assert (table.gpu, table.capability) == ("Some GPU", 90)
    (row,) = table.rows.values()
    assert (row.key.kernel, row.block_m, row.block_n) == ("forward", 64, 64)
    assert row.measured == {"plain-d128-4k": (0.5, 1.0)}
    assert [(key.kernel, ms) for key, ms in table.kept.items()] == [("dq", {"plain-d128-4k": 1.0})]
    assert table.facts["torch"] == torch.__version__
    run("--cases", "plain-d64-4k", "--kernels", "dq")
    again = tables.read(path)
    assert again.rows == table.rows, "the first run's row is kept"
    assert len(again.kept) == 2


def test_help_is_enough_to_use_it() -> None:
    found = CliRunner().invoke(app, ["tune", "--help"], env={"COLUMNS": "160"})
    assert found.exit_code == 0
    for word in ("--cases", "--kernels", "--table", "--seconds", "BIASFLASH_TILES", "Exit code 1", "2 %"):
        assert word in found.output, word
