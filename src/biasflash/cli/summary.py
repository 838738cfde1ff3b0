"""A bench run as it is published: a small summary in git, and the tables and sentences that pages quote from it.

``python -m biasflash.cli.summary SUMMARY`` rewrites the generated blocks and the charts of the pages from a summary;
with ``--report REPORT`` the summary itself is first made from a full report of ``biasflash bench --json REPORT``.
"""

from __future__ import annotations

import argparse
import json
import textwrap
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from biasflash.cli import charts, support
from biasflash.cli.providers import OURS, PORTABLE, PROVIDERS
from biasflash.cli.rows import MODES, NO_TIME, OK, Cell, Row
from biasflash.cli.tables import advantage, best_peer, by_case, milliseconds, shown_providers, speed
from biasflash.testing.case import Case
from biasflash.testing.cases import WORKLOADS

SCHEMA = "biasflash-bench-summary/1"
REASON_LENGTH = 80
WORDS = {"fwd": "forward", "fwdbwd": "forward + backward"}
#: facts of the machine that a reader needs, with their names on the page
MACHINE = {
    "gpu": "GPU",
    "gpu_memory_gib": "its memory, GiB",
    "gpu_processors": "its multiprocessors",
    "compute_capability": "its compute capability",
    "driver": "driver",
    "cuda": "CUDA",
    "torch": "torch",
    "triton": "Triton",
    "python": "Python",
    "system": "system",
    "cpu": "CPU",
    "cores": "its cores",
}


@dataclass(frozen=True, kw_only=True)
class Published:
    """A summary that was read back.

    ``facts`` is everything in it but the rows: version, date, seconds, machine, ceilings (per second), limits of the
    gate by dtype, and the providers that could not run (``absent``).
    """

    facts: dict[str, Any]
    rows: list[Row]

    @property
    def cases(self) -> dict[str, dict[str, Row]]:
        return by_case(self.rows)

    @property
    def title(self) -> str:
        return f"biasflash {self.facts['biasflash']} on {self.facts['machine']['gpu']}"


# ------------------------------------------------------------------------------------------------------------- summary


def _digits(value: float | None) -> float | None:
    """Four significant digits: more than two runs have in common."""
    return None if value is None else float(f"{value:.4g}")


def _cell(cell: Cell) -> dict[str, Any]:
    if cell.status == OK:
        return {"ms": _digits(cell.ms), "fraction": _digits(cell.fraction)}
    return {"status": cell.status, "reason": cell.reason[:REASON_LENGTH]}


def _row(row: Row) -> dict[str, Any]:
    errors = [error for cell in row.cells.values() for error in cell.errors.values()]
    return {
        "case": row.case,
        "provider": row.provider,
        "dtype": row.dtype,
        **{mode: _cell(cell) for mode, cell in row.cells.items()},
        "peak_mib": _digits(row.peak_mib),
        "results_mib": _digits(row.results_mib),
        "error": _digits(max(errors)) if errors else None,
    }


def summarise(report: dict[str, Any], rows: Sequence[Row]) -> dict[str, Any]:
    """The summary of a full report and its rows: one entry per case and provider that runs there.

    An entry has per mode the median in ms and the fraction of the floor, or why there is none; peak memory and results
    in MiB; and the largest relative error of any result.
    """
    shown, absent = shown_providers(rows)
    return {
        "schema": SCHEMA,
        "biasflash": report["biasflash"],
        "date": report["started"][:10],
        "seconds": report["seconds"],
        "machine": {name: report["machine"].get(name) for name in MACHINE},
        "ceilings": {name: _digits(value) for name, value in report["ceilings"].items()},
        "limits": report["limits"],
        "absent": absent,
        "rows": [_row(of[name]) for of in by_case(rows).values() for name in shown if name in of],
    }


def dump(summary: dict[str, Any]) -> str:
    """JSON with one row a line, so that a change of one figure is a change of one line."""
    facts = json.dumps({name: value for name, value in summary.items() if name != "rows"}, indent=1, allow_nan=False)
    rows = ",\n".join("  " + json.dumps(row, allow_nan=False) for row in summary["rows"])
    return f'{facts[:-2]},\n "rows": [\n{rows}\n ]\n}}\n'


def _read_row(entry: dict[str, Any]) -> Row:
    cells = {mode: Cell(**{"status": OK, **entry[mode]}) for mode in MODES if mode in entry}
    names = ("case", "provider", "dtype", "peak_mib", "results_mib")
    return Row(cells=cells, **{name: entry[name] for name in names})


def load(path: Path) -> Published:
    """Reads a summary.

    Raises:
        ValueError: the file is not one.
    """
    found = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(found, dict) or found.get("schema") != SCHEMA:
        raise ValueError(f"{path} is not a summary of schema {SCHEMA!r}")
    rows = [_read_row(entry) for entry in found.pop("rows")]
    return Published(facts=found, rows=rows)


# -------------------------------------------------------------------------------------------------------------- tables


def _table(header: Sequence[str], rows: Iterable[Sequence[str]], left: int = 1) -> str:
    """A Markdown table whose first ``left`` columns are text and whose others are numbers."""
    rule = ["---" if place < left else "---:" for place in range(len(header))]
    return "\n".join("| " + " | ".join(line) + " |" for line in (header, rule, *rows))


def _mib(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}"


def _terms(case: Case) -> str:
    words = [f"bias `{b.shape}`{'' if b.trained else ', not trained'}" for b in case.biases]
    words += [f"mask `{m.shape}`" for m in case.masks] + (["causal"] if case.causal else [])
    return ", ".join(words) or "none"


def workloads(found: Published) -> str:
    """What each workload is: its sizes, and what is added to its scores."""
    rows = []
    for name in found.cases:
        case = WORKLOADS[name]
        heads = f"{case.Hq}" if case.Hq == case.Hkv else f"{case.Hq} / {case.Hkv}"
        width = f"{case.D}" if case.Dv == case.D else f"{case.D} / {case.Dv}"
        batch = " x ".join(map(str, case.batch))
        rows.append((f"`{name}`", case.why, _terms(case), case.dtype, batch, heads, f"{case.M} x {case.N}", width))
    return _table(("workload", "stands for", "bias, mask", "dtype", "B", "Hq / Hkv", "M x N", "D / Dv"), rows, left=4)


def _speed_cells(of: dict[str, Row], mode: str) -> list[str]:
    """Ours, the best peer's name and time, the ratio in ours' favour, and the fraction of the floor."""
    own, best, gain = speed(of.get(OURS), mode), best_peer(of, mode), advantage(of, OURS, mode)
    fraction = of[OURS].cells[mode].fraction if own else None
    return [
        f"`{best[0]}`" if best else "-",
        milliseconds(best[1]) if best else "-",
        milliseconds(own) if own else "-",
        f"{gain:.2f}" if gain else "-",
        f"{fraction:.2f}" if fraction else "-",
    ]


def forward(found: Published) -> str:
    """The forward pass of every workload."""
    header = ("forward", "best peer", "its ms", "our ms", "ratio", "of the floor")
    return _table(header, [(f"`{name}`", *_speed_cells(of, "fwd")) for name, of in found.cases.items()], left=2)


def both(found: Published) -> str:
    """Forward and backward of every workload, and the memory they take."""
    rows = []
    for name, of in found.cases.items():
        best = best_peer(of, "fwdbwd")
        peer = of[best[0]].peak_mib if best else None
        memory = (_mib(of[OURS].results_mib), _mib(of[OURS].peak_mib), _mib(peer))
        rows.append((f"`{name}`", *_speed_cells(of, "fwdbwd"), *memory))
    times = ("forward + backward", "best peer", "its ms", "our ms", "ratio", "of the floor")
    return _table((*times, "out + gradients, MiB", "our peak, MiB", "its peak, MiB"), rows, left=2)


def portable(found: Published) -> str:
    """The portable kernels where others are the default, and how they stand to those and to the best peer."""
    lines = []
    for name, of in found.cases.items():
        cells = [f"`{name}`"]
        for mode in MODES:
            ms, own, gain = speed(of.get(PORTABLE), mode), speed(of.get(OURS), mode), advantage(of, PORTABLE, mode)
            cells += [milliseconds(ms) if ms else "-", f"{own / ms:.2f}" if ms and own else "-"]
            cells.append(f"{gain:.2f}" if gain else "-")
        if any(cell != "-" for cell in cells[1:]):
            lines.append(cells)
    header = ("`triton`", "forward, ms", "to default", "to peer", "forward + backward, ms", "to default", "to peer")
    return _table(header, lines)


def machine(found: Published) -> str:
    """Where and when it was measured, and what that machine does at best."""
    facts, top = found.facts, found.facts["ceilings"]
    rows = [("biasflash", facts["biasflash"]), ("date", facts["date"])]
    rows += [(label, str(facts["machine"][name])) for name, label in MACHINE.items()]
    rows += [
        ("products, bf16", f"{top['products'] / 1e12:.0f} TFLOP/s"),
        ("bytes copied", f"{top['bytes'] / 1e12:.2f} TB/s"),
        ("exponentials", f"{top['exps'] / 1e12:.2f} e12/s"),
    ]
    return _table(("machine", "value"), rows, left=2)


def _took_part(found: Published, provider: str) -> bool:
    return any(provider in of for of in found.cases.values())


def peers(found: Published) -> str:
    """Who was measured, and who was not."""
    absent = {name: "not asked for" for name in PROVIDERS if not _took_part(found, name)} | found.facts["absent"]
    rows = [(f"`{name}`", p.summary, absent.get(name, "yes")) for name, p in PROVIDERS.items()]
    return _table(("provider", "what it is", "measured"), rows, left=3)


# ----------------------------------------------------------------------------------------------------------- sentences


def misses(found: Published) -> str:
    """Every workload and pass in which some peer was faster."""
    lines = []
    for name, of in found.cases.items():
        for mode in MODES:
            gain, best = advantage(of, OURS, mode), best_peer(of, mode)
            if gain is not None and best and gain < 1:
                lines.append(f"- `{name}`, {WORDS[mode]}: {gain:.2f} x the speed of `{best[0]}`")
    return "\n".join(lines)


def holes(found: Published) -> str:
    """Every figure that is missing though the provider is installed: refusals, wrong results, a used-up budget."""
    grouped: dict[tuple[str, str], list[str]] = {}
    for row in found.rows:
        if row.provider == PORTABLE:  # it has a table of its own
            continue
        bad = {mode: cell for mode, cell in row.cells.items() if cell.status != OK}
        for cell in dict.fromkeys((cell.status, cell.reason) for cell in bad.values()):
            modes = [mode for mode, other in bad.items() if (other.status, other.reason) == cell]
            passes = "" if len(modes) == len(row.cells) else f" ({WORDS[modes[0]]})"
            key = (f"`{row.provider}`, {cell[0]}", cell[1])
            grouped.setdefault(key, []).append(f"`{row.case}`{passes}")
    return "\n".join(f"- {who} ({why}): {', '.join(where)}" for (who, why), where in grouped.items())


def _standing(found: Published, with_terms: bool, mode: str) -> str:
    """How often no peer is faster, and the range of ratios, over the workloads with a bias or mask or those without."""
    names = [name for name in found.cases if bool(WORKLOADS[name].biases or WORKLOADS[name].masks) == with_terms]
    gains = [gain for name in names if (gain := advantage(found.cases[name], OURS, mode)) is not None]
    level = sum(gain >= 1 for gain in gains)
    passes = "forward passes" if mode == "fwd" else WORDS[mode]
    return f"{level} of {len(gains)} {passes} ({min(gains):.2f} to {max(gains):.2f} x its speed)"


def headline(found: Published) -> str:
    """The chart and a few sentences, for the front page."""
    gpu = found.facts["machine"]["gpu"]
    untimed = {row.case for row in found.rows if row.provider == "flex" and row.cells["fwdbwd"].status == NO_TIME}
    workloads_without = f"{len(untimed)} workload{'' if len(untimed) == 1 else 's'}"
    fa4 = ", FlashAttention 4" if any(speed(of.get("fa4"), "fwd") for of in found.cases.values()) else ""
    plain = ", plain PyTorch" if _took_part(found, "eager") else ""
    hole = f", which got no figure on {workloads_without}" if untimed else ""
    text = (
        f"On one {gpu}, biasflash is at least level with the fastest peer **with a bias or a mask** in "
        f"{_standing(found, True, 'fwd')} and {_standing(found, True, 'fwdbwd')}; "
        f"**without**, in {_standing(found, False, 'fwd')} and {_standing(found, False, 'fwdbwd')}. "
        f"Peers are torch's SDPA kernels, cuDNN graphs{fa4}{plain} and FlexAttention"
        f"{hole}. [All figures, and where it is slower](docs/benchmarks.md)."
    )
    picture = f"![Speed on one {gpu} against the fastest peer](docs/bench-ratio.png)"
    return f"{picture}\n\n{textwrap.fill(text, 118, break_on_hyphens=False)}"


#: name of a generated block -> what writes it
BLOCKS: dict[str, Callable[[Published], str]] = {
    "bench": headline,
    "bench-machine": machine,
    "bench-peers": peers,
    "bench-workloads": workloads,
    "bench-fwd": forward,
    "bench-fwdbwd": both,
    "bench-portable": portable,
    "bench-misses": misses,
    "bench-holes": holes,
}
#: chart beside the pages -> what its bars are held against
CHARTS: dict[str, str] = {"bench-ratio.png": "peer", "bench-floor.png": "floor"}


def fill(text: str, found: Published) -> str:
    """The text of a page with every block of ``BLOCKS`` as the summary has it.

    Raises:
        ValueError: a block has a start and no end.
    """
    return support.fill(text, {name: partial(write, found) for name, write in BLOCKS.items()})


def main(arguments: Sequence[str] | None = None) -> None:
    """Makes the summary if a report is given, then rewrites charts and blocks."""
    from biasflash.cli.bench import load_rows

    parser = argparse.ArgumentParser(description="Rewrites charts and tables of the pages from a bench summary.")
    parser.add_argument("summary", type=Path, help="the summary in benchmarks/results/")
    parser.add_argument("--report", type=Path, help="a file of biasflash bench --json: make the summary from it first")
    parser.add_argument("--root", type=Path, default=Path(), help="the folder with README.md and docs/ (default: here)")
    asked = parser.parse_args(arguments)
    if asked.report:
        rows = load_rows(asked.report)
        text = dump(summarise(json.loads(asked.report.read_text(encoding="utf-8")), rows))
        asked.summary.write_text(text, encoding="utf-8")
    found = load(asked.summary)
    for name, against in CHARTS.items():
        charts.draw_ours(found.rows, against, asked.root / "docs" / name, found.title)
    for page in (asked.root / "README.md", asked.root / "docs" / "benchmarks.md"):
        page.write_text(fill(page.read_text(encoding="utf-8"), found), encoding="utf-8")


if __name__ == "__main__":
    main()
