"""The bench's rows as tables for a terminal."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from biasflash.cli.providers import OURS, PORTABLE
from biasflash.cli.rows import NEEDS_CUDA, NOT_INSTALLED, OK, RED, Cell, Row

TITLES = {"fwd": "forward", "fwdbwd": "forward + backward, every gradient"}
#: Below this a change against a baseline counts as noise.
NOISE = 0.03


def milliseconds(ms: float) -> str:
    """Three or four significant digits, never an exponent."""
    return f"{ms:.3f}" if ms < 10 else f"{ms:.2f}" if ms < 100 else f"{ms:.0f}"


def by_case(rows: Iterable[Row]) -> dict[str, dict[str, Row]]:
    """case -> provider -> row, both in order of appearance."""
    found: dict[str, dict[str, Row]] = {}
    for row in rows:
        found.setdefault(row.case, {})[row.provider] = row
    return found


def speed(row: Row | None, mode: str) -> float | None:
    """The median in ms, if the row has one."""
    cell = row.cells.get(mode) if row else None
    return cell.ms if cell and cell.status == OK else None


def best_peer(case_rows: dict[str, Row], mode: str) -> tuple[str, float] | None:
    """Name and median of the fastest green provider that is not this library."""
    timed = {name: speed(row, mode) for name, row in case_rows.items() if name not in (OURS, PORTABLE)}
    known = {name: ms for name, ms in timed.items() if ms is not None}
    return min(known.items(), key=lambda item: item[1]) if known else None


def advantage(case_rows: dict[str, Row], provider: str, mode: str) -> float | None:
    """How many times as fast as the best peer a provider is; above 1 is faster."""
    best, own = best_peer(case_rows, mode), speed(case_rows.get(provider), mode)
    return best[1] / own if best and own else None


def shown_providers(rows: Iterable[Row]) -> tuple[list[str], dict[str, str]]:
    """Providers that ran at all, in order; and for the others why they did not."""
    names: dict[str, None] = {}
    absent: dict[str, str] = {}
    for row in rows:
        names.setdefault(row.provider)
        for cell in row.cells.values():
            if cell.status in (NOT_INSTALLED, NEEDS_CUDA):
                absent[row.provider] = f"{cell.status} {cell.reason}".strip()
            else:
                absent.pop(row.provider, None)
    return [name for name in names if name not in absent], absent


class Notes:
    """Numbers for reasons too long for a cell; the same reason keeps its number."""

    def __init__(self) -> None:
        self.numbers: dict[str, int] = {}

    def mark(self, cell: Cell) -> str:
        if not cell.reason:
            return cell.status
        return f"{cell.status} [{self.numbers.setdefault(cell.reason, len(self.numbers) + 1)}]"

    def lines(self) -> list[Text]:
        return [Text(f"[{number}] {reason}", style="dim") for reason, number in self.numbers.items()]


def _cell(cell: Cell | None, is_best: bool, notes: Notes) -> Text:
    if cell is None:
        return Text("-", style="dim")
    if cell.status == OK and cell.ms is not None:
        text = milliseconds(cell.ms)
        if cell.fraction is not None:
            text += f" {cell.fraction:4.0%}"
        return Text(text, style="bold" if is_best else "")
    return Text(notes.mark(cell), style="red" if cell.status == RED else "dim")


def speeds(rows: Sequence[Row], mode: str, notes: Notes) -> Table:
    """One line per case: every provider's median (ms) and fraction of the floor; this library against the best peer."""
    names, _ = shown_providers(rows)
    table = Table(title=f"{TITLES[mode]}: median ms, fraction of the floor", title_justify="left", pad_edge=False)
    table.add_column("case", no_wrap=True)
    table.add_column("floor", justify="right", no_wrap=True)
    for name in names:
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("best peer", no_wrap=True)
    table.add_column("ours against it", justify="right", no_wrap=True)
    for case, found in by_case(rows).items():
        best = best_peer(found, mode)
        timed = [ms for ms in (speed(row, mode) for row in found.values()) if ms is not None]
        floors = [row.cells[mode].floor_ms for row in found.values() if mode in row.cells]
        floor = next((ms for ms in floors if ms is not None), None)
        gain = advantage(found, OURS, mode)
        ratio = Text(
            "-" if gain is None else f"{gain:.2f} x", style="" if gain is None else "green" if gain >= 1 else "yellow"
        )
        cells = [
            _cell(
                found[name].cells.get(mode) if name in found else None,
                speed(found.get(name), mode) == min(timed, default=-1),
                notes,
            )
            for name in names
        ]
        table.add_row(case, milliseconds(floor) if floor else "-", *cells, best[0] if best else "-", ratio)
    return table


def memory(rows: Sequence[Row]) -> Table | None:
    """Most memory beyond the inputs during forward and backward, in MiB; None where nobody measured it."""
    if all(row.peak_mib is None for row in rows):
        return None
    names, _ = shown_providers(rows)
    table = Table(title="peak memory beyond the inputs, forward + backward, MiB", title_justify="left", pad_edge=False)
    table.add_column("case", no_wrap=True)
    table.add_column("out + gradients", justify="right", no_wrap=True)
    for name in names:
        table.add_column(name, justify="right", no_wrap=True)
    for case, found in by_case(rows).items():
        results = next((row.results_mib for row in found.values() if row.results_mib is not None), None)
        peaks = [found[name].peak_mib if name in found else None for name in names]
        table.add_row(case, *("-" if mib is None else f"{mib:,.0f}" for mib in (results, *peaks)))
    return table


def host(entries: Sequence[dict[str, Any]]) -> Table:
    """Host time per forward call, in microseconds."""
    table = Table(title="host time per forward call, microseconds", title_justify="left", pad_edge=False)
    for name in ("call", "provider"):
        table.add_column(name, no_wrap=True)
    for name in ("median", "p20", "p80"):
        table.add_column(name, justify="right")
    for entry in entries:
        table.add_row(entry["call"], entry["provider"], *(f"{entry[key]:.1f}" for key in ("us", "p20", "p80")))
    return table


def changes(rows: Sequence[Row], baseline: Sequence[Row]) -> Table:
    """What became of every speed that an earlier run had; a speed that is gone is named as such."""
    table = Table(title="change against the baseline (time)", title_justify="left", pad_edge=False)
    for name in ("case", "provider", "mode"):
        table.add_column(name, no_wrap=True)
    for name in ("before ms", "now ms", "change"):
        table.add_column(name, justify="right", no_wrap=True)
    now = by_case(rows)
    for old in baseline:
        for mode in old.cells:
            before = speed(old, mode)
            row = now.get(old.case, {}).get(old.provider)
            if before is None or row is None or mode not in row.cells:
                continue
            after = speed(row, mode)
            if after is None:
                table.add_row(
                    old.case, old.provider, mode, milliseconds(before), row.cells[mode].status, Text("lost", "red")
                )
                continue
            change = after / before - 1
            style = "dim" if abs(change) < NOISE else "green" if change < 0 else "red"
            table.add_row(
                old.case, old.provider, mode, milliseconds(before), milliseconds(after), Text(f"{change:+.1%}", style)
            )
    return table


def report(rows: Sequence[Row], modes: Sequence[str]) -> Group:
    """All tables of one run, and the reasons behind its empty cells."""
    notes = Notes()
    parts: list[Any] = [speeds(rows, mode, notes) for mode in modes]
    table = memory(rows)
    parts += [table] if table is not None else []
    parts += notes.lines()
    parts += [Text(f"{name}: {why}", style="dim") for name, why in shown_providers(rows)[1].items()]
    return Group(*parts)
