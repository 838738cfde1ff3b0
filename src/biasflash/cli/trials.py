"""One kernel under several tiles: built by the real plans, run, held against the rule's tile, then timed alone."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from biasflash.backends.triton.config import Facts, TileConfig
from biasflash.backends.triton.tables import Key, key_of
from biasflash.cli import candidates, gate, timing
from biasflash.cli.compiling import Target, problem_of, recipes_of
from biasflash.problem import Problem
from biasflash.testing.case import Case

#: milliseconds of one timing: of every candidate, then of the best ones again
FIRST_MS, AGAIN_MS = 12.0, 60.0


@dataclass(frozen=True, kw_only=True)
class Job:
    """One kernel on one case, and the tiles to try; the first is the rule's."""

    case: Case
    problem: Problem
    kernel: str
    title: str  # the pass it belongs to
    facts: Facts
    tiles: tuple[TileConfig, ...]

    @property
    def key(self) -> Key:
        return key_of(self.facts)

    def forced(self, tile: TileConfig) -> candidates.Forced:
        return candidates.Forced(key=self.key, tile=tile)


def name_of(launch: Any) -> str:
    """``dkdv`` for a launch of ``dkdv_kernel``."""
    return str(launch.kernel.__name__).removesuffix("_kernel")


def launch_of(recipe: Any, kernel: str) -> Any:
    """The first launch of a kernel in a recipe, or None."""
    return next((launch for launch in recipe.launches if name_of(launch) == kernel), None)


def jobs_of(case: Case, kernels: Sequence[str], device: torch.device, target: Target) -> list[Job]:
    """Jobs of the kernels that a case runs. Tiles that become the same launch, short axes considered, are one."""
    problem, listener = problem_of(case, device), candidates.Listener()
    jobs = []
    for title, recipe in recipes_of(problem, target, listener).items():
        for kernel in kernels:
            if launch_of(recipe, kernel) is None or kernel not in listener.asked:
                continue
            facts = listener.asked[kernel]
            distinct: dict[str, TileConfig] = {}
            for tile in candidates.candidates(facts):
                forced = candidates.Forced(key=key_of(facts), tile=tile)
                launch = launch_of(recipes_of(problem, target, forced)[title], kernel)
                distinct.setdefault(str(launch.tile), tile)
            tiles = tuple(distinct.values())
            jobs.append(Job(case=case, problem=problem, kernel=kernel, title=title, facts=facts, tiles=tiles))
    return jobs


# ------------------------------------------------------------------------------------------------------------- outcome


@dataclass(frozen=True, kw_only=True)
class Timed:
    """A tile that was right, its time, and the bytes of local memory that a thread of its kernel uses."""

    tile: TileConfig
    ms: float
    spill_bytes: int = 0


@dataclass(kw_only=True)
class Outcome:
    """What came of a job: times in the order of its tiles, the rule's tile first; skipped tiles with the reason."""

    job: Job
    timed: list[Timed] = field(default_factory=list)
    skipped: dict[TileConfig, str] = field(default_factory=dict)
    failure: str = ""  # why there are no times at all


class Trials(Protocol):
    """What a job is tried on: a GPU, or a stand-in of one."""

    def try_tile(self, tile: TileConfig) -> Timed:
        """Runs a tile, compares, times. Raises ``WrongError`` if its results are not the rule's tile's."""

    def again(self, tile: TileConfig) -> float:
        """Milliseconds of a tile that was tried, with more repetitions."""


class WrongError(Exception):
    """A tile's results differ from those of the rule's tile by more than rounding."""


def run_job(job: Job, trials: Trials, complaints: Mapping[TileConfig, str]) -> Outcome:
    """Tries every tile without a complaint (of the compiler), then times the rule's and the two best once more.

    The figures of the second round replace the first's, and the others are dropped: the best of ten noisy figures is
    too good to be true.
    """
    outcome = Outcome(job=job, skipped={t: why for t, why in complaints.items() if why})
    for tile in job.tiles:
        if tile in outcome.skipped:
            continue
        try:
            outcome.timed.append(trials.try_tile(tile))
        except WrongError as error:
            outcome.skipped[tile] = f"wrong: {error}"
        except Exception as error:
            outcome.skipped[tile] = words(error)
            if is_lost():
                outcome.failure = outcome.skipped[tile]
                break
        if tile == job.tiles[0] and tile in outcome.skipped:
            break
    if job.tiles[0] in outcome.skipped:
        outcome.failure = f"the rule's tile {job.tiles[0]}: {outcome.skipped[job.tiles[0]]}"
    if outcome.failure:
        return Outcome(job=job, skipped=outcome.skipped, failure=outcome.failure)
    first, *others = outcome.timed
    chosen = [first, *sorted(others, key=lambda t: t.ms)[:2]]
    outcome.timed = [replace(t, ms=trials.again(t.tile)) for t in chosen]
    return outcome


def words(error: Exception) -> str:
    """An exception in one short line."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:200]


def is_lost() -> bool:
    """Whether a kernel's fault took the GPU from this process: then nothing more can be measured in it."""
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return False
    try:
        torch.cuda.synchronize()
    except Exception:
        return True
    return False


# ----------------------------------------------------------------------------------------------------------------- GPU


class Stage:
    """The tensors of one case on a device, as kernels get them, with the forward pass done."""

    def __init__(self, case: Case, problem: Problem, device: torch.device, target: Target) -> None:
        p = self.problem = problem
        self.device, self.target = device, target
        call = case.build(device)
        rows = {"q": call.q, "k": call.k, "v": call.v, "dout": call.dout}
        self.tensors = {name: t.detach() for name, t in rows.items()}
        for i, (term, t) in enumerate(zip(p.terms, [*call.bias, *call.mask], strict=True)):
            plane = t.detach().view(term.shape)
            self.tensors[f"bias{i}"] = plane.view(torch.uint8) if t.dtype == torch.bool else plane
            if term.trainable:
                self.tensors[f"grad{i}"] = self.tensors[f"dense_grad{i}"] = torch.empty_like(plane)
        q = self.tensors["q"]
        self.tensors["out"] = q.new_empty((*p.batch, p.M, p.Hq, p.Dv))
        self.tensors["lse"] = q.new_empty((*p.batch, p.Hq, p.M), dtype=torch.float32)
        self.tensors["low"] = torch.empty_like(self.tensors["lse"]) if p.keeps_low else q.new_empty(0).float()
        self.tensors |= {f"d{name}": torch.empty_like(self.tensors[name]) for name in ("q", "k", "v")}
        self.run(recipes_of(problem, target)["forward"])

    def scratch(self, recipe: Any) -> dict[str, Tensor]:
        """All tensors of a recipe, its own scratch among them."""
        lse = self.tensors["lse"]
        zeroed = {name: lse.new_zeros(count, dtype=torch.int32) for name, count in recipe.zeroed}
        return self.tensors | zeroed | {name: lse.new_empty(count) for name, count in recipe.scratch}

    def run(self, recipe: Any) -> dict[str, Tensor]:
        tensors = self.scratch(recipe)
        for launch in recipe.launches:
            launch.run(tensors)
        return tensors


class GpuTrials:
    """Tiles of one job on a stage. The first tile that is tried is the yardstick of all others."""

    def __init__(self, job: Job, stage: Stage) -> None:
        self.job, self.stage = job, stage
        self._ready: dict[TileConfig, tuple[Any, dict[str, Tensor]]] = {}
        self._truth: dict[str, Tensor] | None = None

    def _results(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        if self.job.title == "forward":
            return {name: tensors[name] for name in ("out", "lse")}
        p = self.job.problem
        wanted = {f"d{name}" for name, trained in zip("qkv", p.trainable, strict=True) if trained}
        wanted |= {f"grad{i}" for i, term in enumerate(p.terms) if term.trainable}
        wanted -= {f"grad{i}" for i, term in enumerate(p.terms) if 1 in term.shape[-2:]}  # their sums stand for them
        return {name: t for name, t in tensors.items() if name in wanted or name.endswith("_sums")}

    def try_tile(self, tile: TileConfig) -> Timed:
        recipe = recipes_of(self.job.problem, self.stage.target, self.job.forced(tile))[self.job.title]
        tensors = self.stage.scratch(recipe)
        results = self._results(tensors)
        for t in results.values():
            t.fill_(math.nan)  # what a tile leaves out shows
        for launch in recipe.launches:
            launch.run(tensors)
        self._compare(results)
        launch = launch_of(recipe, self.job.kernel)
        self._ready[tile] = launch, tensors
        measured = timing.measure(lambda: launch.run(tensors), self.stage.device, FIRST_MS)
        return Timed(tile=tile, ms=measured.ms, spill_bytes=4 * int(getattr(launch._compiled, "n_spills", 0) or 0))

    def _compare(self, results: dict[str, Tensor]) -> None:
        if self._truth is None:
            broken = [name for name, t in results.items() if bool(t.isnan().any())]
            if broken:
                raise WrongError(f"NaN in {', '.join(broken)}")
            self._truth = {name: t.float().clone() for name, t in results.items()}
            return
        limit = gate.limit_for(self.job.problem.dtype, self.stage.device)
        errors = gate.compare(results, gate.Truth(tensors=self._truth))
        worst = {name: error for name, error in errors.items() if not error <= limit}
        if worst:
            raise WrongError(", ".join(f"{name} is off by {error:.1e}" for name, error in worst.items()))

    def again(self, tile: TileConfig) -> float:
        launch, tensors = self._ready[tile]
        return timing.measure(lambda: launch.run(tensors), self.stage.device, AGAIN_MS).ms
