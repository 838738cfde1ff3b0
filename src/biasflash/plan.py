"""Which backend computes a problem, and why; nothing falls back silently."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import lru_cache

from biasflash.backends import ORDER, load
from biasflash.problem import Problem, UnsupportedError

log = logging.getLogger("biasflash")


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The chosen backend's name, and the objections of every backend that was asked before it."""

    backend: str
    objections: tuple[tuple[str, tuple[str, ...]], ...]


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """Why a call runs where it runs. ``str()`` of it is a readable report."""

    problem: Problem
    backend: str | None
    choices: tuple[str, ...]
    objections: tuple[tuple[str, tuple[str, ...]], ...]

    def __str__(self) -> str:
        lines = [f"problem   {self.problem}", f"backend   {self.backend or 'none: every backend objects'}"]
        lines += [f"          {line}" for line in self.choices]
        for name, reasons in self.objections:
            lines += [f"skipped   {name}: {reason}" for reason in reasons]
        return "\n".join(lines)


def _objections(name: str, problem: Problem, is_named: bool) -> tuple[str, ...]:
    """Why a backend is passed over; reservations count only where the caller did not name it."""
    backend = load(name)
    return backend.objections(problem) or (() if is_named else backend.reservations(problem))


def check_backend(backend: str | None) -> None:
    if backend is not None and backend not in ORDER:
        raise ValueError(f"backend={backend!r} is unknown; accepted: None (choose), {', '.join(map(repr, ORDER))}")


@lru_cache(maxsize=4096)
def choose(problem: Problem, backend: str | None = None) -> Plan:
    """The named backend, or else the first without objections.

    Raises:
        UnsupportedError: the named backend objects, or all of them do; with every objection.
    """
    asked: list[tuple[str, tuple[str, ...]]] = []
    for name in [backend] if backend is not None else ORDER:
        reasons = _objections(name, problem, backend is not None)
        if not reasons:
            log.info("biasflash runs on backend %s: %s", name, problem)
            return Plan(backend=name, objections=tuple(asked))
        asked.append((name, reasons))
    text = "\n".join(f"  backend {name}: {reason}" for name, reasons in asked for reason in reasons)
    way_out = "name no backend to let biasflash choose" if backend is not None else "see biasflash.explain(...)"
    raise UnsupportedError(f"cannot compute {problem}\n{text}\n  try: {way_out}")


def explain(problem: Problem, backend: str | None = None) -> Explanation:
    """What ``choose`` would answer, with the chosen backend's own account and the objections of all the others."""
    try:
        chosen: str | None = choose(problem, backend).backend
    except UnsupportedError:
        chosen = None
    others = [name for name in ORDER if name != chosen]
    objections = []
    for name in others:
        reasons = _objections(name, problem, False)
        if not reasons:
            reasons = (f"not needed, {chosen} comes first" if chosen else "not asked for",)
        objections.append((name, reasons))
    choices = load(chosen).describe(problem) if chosen else ()
    return Explanation(problem=problem, backend=chosen, choices=choices, objections=tuple(objections))
