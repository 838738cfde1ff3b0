"""The pages say what the code does: their Python runs, their tables are the code's, their links lead somewhere."""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path

import pytest
import torch
from PIL import Image

from biasflash import problem, reference
from biasflash.backends import ORDER
from biasflash.bias import KINDS
from biasflash.cli import charts, summary, support, sweep_chart, sweep_grid
from biasflash.cli.rows import NOT_INSTALLED, OK, RED, Cell, Row
from biasflash.cli.tables import advantage, best_peer
from biasflash.testing.cases import WORKLOADS

ROOT = Path(__file__).parent.parent
SUMMARY = ROOT / "benchmarks" / "results" / "h200.json"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


def python_of(page: Path) -> str:
    """All Python blocks of a page, one after the other, each at its own lines so that a traceback points there."""
    found: list[str] = []
    inside, indent = False, 0
    for line in page.read_text(encoding="utf-8").splitlines():
        fence = line.strip().startswith("```")
        if fence:
            inside, indent = line.strip() == "```python", len(line) - len(line.lstrip())
        found.append(line[indent:] if inside and not fence else "")
    return "\n".join(found)


def run_page(page: Path) -> dict[str, object]:
    names: dict[str, object] = {"__name__": page.name}
    exec(compile(python_of(page), str(page), "exec"), names)
    return names


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_the_python_of_a_page_runs(page: Path) -> None:
    run_page(page)


def test_there_is_python_to_run() -> None:
    with_python = {page.name for page in PAGES if "attention(" in python_of(page)}
    assert with_python >= {"README.md", "semantics.md", "biases.md", "backends.md", "determinism.md", "compile.md"}


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_generated_blocks_are_what_the_code_says(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert support.fill(text) == text, "rewrite it with: make docs-tables"


def test_every_generated_block_is_on_a_page() -> None:
    text = "".join(page.read_text(encoding="utf-8") for page in PAGES)
    assert [name for name in support.BLOCKS if f"<!-- {name}:start -->" not in text] == []
    readme = PAGES[0].read_text(encoding="utf-8")
    assert "<!-- backends:start -->" in readme
    assert "<!-- kinds:start -->" in readme


def test_generated_tables_hold_every_backend_kind_and_tensor() -> None:
    for name in ORDER:
        assert f"| `{name}` |" in support.backends()
    for kind in KINDS.values():
        assert f"| `{kind.argument}=` | {kind.name} |" in support.kinds()
    for name, legend in problem.AXES.items():
        assert f"| `{name}` | `{legend}` |" in support.axes()


@pytest.mark.parametrize("lengths", [(3, 5), (5, 3), (4, 4)])
def test_causal_pictures_are_the_two_inequalities(lengths: tuple[int, int]) -> None:
    M, N = lengths
    i, j = torch.arange(M)[:, None], torch.arange(N)[None, :]
    assert torch.equal(support.seen("bottom-right", M, N), j <= i + N - M)
    assert torch.equal(support.seen(True, M, N), j <= i + N - M)
    assert torch.equal(support.seen("top-left", M, N), j <= i)


def test_a_block_without_an_end_is_refused() -> None:
    with pytest.raises(ValueError, match="has no"):
        support.fill("<!-- kinds:start -->\n")


def _anchor(heading: str) -> str:
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_somewhere(page: Path) -> None:
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if target.startswith("http"):
            continue
        path, _, anchor = target.partition("#")
        there = page if not path else (page.parent / path).resolve()
        assert there.is_file(), f"{name_of(page)} links to {target}"
        if anchor:
            headings = re.findall(r"^#+ (.+)$", there.read_text(encoding="utf-8"), flags=re.MULTILINE)
            assert anchor in map(_anchor, headings), f"{name_of(page)} links to {target}"


def test_the_readme_fits_two_screens() -> None:
    assert len(PAGES[0].read_text(encoding="utf-8").splitlines()) <= 110
    assert (ROOT / "docs" / "demo.png").stat().st_size < 200_000


# --------------------------------------------------------------------------------------------------- published figures


@pytest.fixture(scope="module")
def published() -> summary.Published:
    return summary.load(SUMMARY)


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_figures_on_a_page_are_those_of_the_summary(page: Path, published: summary.Published) -> None:
    text = page.read_text(encoding="utf-8")
    assert summary.fill(text, published) == text, f"rewrite it: python -m biasflash.cli.summary {name_of(SUMMARY)}"


def test_every_block_of_the_summary_is_on_its_page() -> None:
    readme, page = (path.read_text(encoding="utf-8") for path in (PAGES[0], ROOT / "docs" / "benchmarks.md"))
    assert "<!-- bench:start -->" in readme
    assert [name for name in summary.BLOCKS if name != "bench" and f"<!-- {name}:start -->" not in page] == []


def test_the_summary_is_small_and_whole(published: summary.Published) -> None:
    assert SUMMARY.stat().st_size < 60_000
    assert list(published.cases) == list(WORKLOADS)
    (providers,) = {tuple(of) for of in published.cases.values()}
    assert len(providers) >= 8
    assert not set(providers) & set(published.facts["absent"])
    for of in published.cases.values():
        assert [cell.status for cell in of["biasflash"].cells.values()] == [OK, OK]
        assert best_peer(of, "fwd")
        assert best_peer(of, "fwdbwd")


@pytest.mark.parametrize(("name", "against"), summary.CHARTS.items())
def test_charts_show_the_summary_and_stay_small(name: str, against: str, published: summary.Published) -> None:
    path = ROOT / "docs" / name
    assert path.stat().st_size < 150_000
    with Image.open(path) as picture:
        assert picture.height <= 1400
        assert picture.text["Description"] == charts.describe(published.rows, against)


#: without a bias, up to 128 columns
NARROW = ("plain-d128-4k", "plain-d64-4k", "causal-d128-16k", "causal-d64-4k", "gqa-causal-d128-8k")


@pytest.mark.parametrize(
    ("cases", "mode", "low", "high"),
    [
        (NARROW, "fwd", 0.92, 0.99),
        (NARROW, "fwdbwd", 0.83, 0.99),
        (("gqa-causal-d128-8k",), "fwdbwd", 0.83, 0.83),
        (("mla-causal-d192-128",), "fwdbwd", 1.05, 1.05),
        (("plain-d256-4k",), "fwdbwd", 1.16, 1.16),
    ],
)
def test_ranges_told_in_words(
    cases: tuple[str, ...], mode: str | None, low: float, high: float, published: summary.Published
) -> None:
    modes = [mode] if mode else ["fwd", "fwdbwd"]
    gains = [round(advantage(published.cases[c], "biasflash", m) or 0.0, 2) for c in cases for m in modes]
    assert (min(gains), max(gains)) == (low, high)


@pytest.mark.parametrize(("mode", "low", "high"), [("fwd", 1.00, 1.12), ("fwdbwd", 0.92, 1.05)])
def test_shares_of_the_speed_of_cudnn_told_in_words(
    mode: str, low: float, high: float, published: summary.Published
) -> None:
    gains = []
    for of in (published.cases[name] for name in NARROW):
        known = [of[peer].cells[mode].ms for peer in ("sdpa-cudnn", "cudnn-fe")]
        own = of["biasflash"].cells[mode].ms
        assert own
        gains.append(round(min(ms for ms in known if ms) / own, 2))
    assert (min(gains), max(gains)) == (low, high)


def test_how_often_no_peer_is_faster_is_told_in_words(published: summary.Published) -> None:
    biased = [name for name, case in WORKLOADS.items() if case.biases or case.masks]
    ahead = {
        m: sum((advantage(published.cases[c], "biasflash", m) or 0) > 1 for c in biased) for m in ("fwd", "fwdbwd")
    }
    assert (len(biased), ahead) == (14, {"fwd": 14, "fwdbwd": 14})
    assert all(of["flex"].cells[mode].ms for of in published.cases.values() for mode in ("fwd", "fwdbwd"))


def _parted(cell: str) -> list[float | None]:
    """``"0.364 / -"`` as figures of forward and of forward + backward; anything without a ``/`` is neither."""
    if "/" not in cell:
        return [None, None]
    return [None if part.strip() == "-" else float(part) for part in cell.split("/")]


def test_ratios_to_other_runs_are_those_of_the_summary(published: summary.Published) -> None:
    page = (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    section = page.partition("### From other runs\n")[2].partition("\n## ")[0]
    rows = [line.strip("| ").split(" | ") for line in section.splitlines() if line.startswith("| `")]
    compared = 0
    for name, *cells in rows:
        own = [published.cases[name.strip("`")]["biasflash"].cells[mode].ms for mode in ("fwd", "fwdbwd")]
        for theirs, told in zip(cells[::2], cells[1::2], strict=True):
            ratios = [ms and ms / ours for ms, ours in zip(_parted(theirs), own, strict=True) if ours]
            told_ratios = _parted(told)
            wanted = [r and round(r, 2 if r < 10 else 1 if r < 20 else 0) for r in ratios]
            assert told_ratios == wanted, name
            compared += sum(ratio is not None for ratio in ratios)
    assert compared == 33


SWEEPS = [SUMMARY.with_name(f"h200-{part}.json") for part in ("curve", "grid", "grid-wide")]


def test_the_picture_of_the_sweep_shows_its_reports(tmp_path: Path) -> None:
    pictures = ROOT / "docs" / "sweep.png", tmp_path / "sweep.png"
    sweep_chart.main([str(pictures[1]), *map(str, SWEEPS)])
    shown, again = (Image.open(path) for path in pictures)
    assert shown.text["Description"] == again.text["Description"]
    assert pictures[0].stat().st_size < 300_000


def test_times_against_length_are_those_of_the_sweep() -> None:
    samples = sweep_chart.samples_of(json.loads(SWEEPS[0].read_text(encoding="utf-8")))
    times = {(s.point.length, s.point.dim, s.point.bias, s.mode): s.ms or 0.0 for s in samples}
    page = (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    lines = [line.strip("| ").split(" | ") for line in page.splitlines() if re.match(r"\| \d+k \|", line)]
    assert [line[0] for line in lines] == ["1k", "2k", "4k", "8k", "16k", "32k"]
    for length, *cells in lines:
        for cell, (dim, bias) in zip(cells, itertools.product((64, 128), (False, True)), strict=True):
            own = [times[1024 * int(length[:-1]), dim, bias, mode] for mode in ("fwd", "fwdbwd")]
            assert _parted(cell) == [float(f"{ms:.3f}" if ms < 10 else f"{ms:.2f}") for ms in own]
    grown = max(g.times / g.work for g in sweep_grid.growths(samples) if g.before.point.length >= 4096)
    assert f"at most {grown:.2f} times what M x N does" in page


def _section(page: str, heading: str) -> str:
    return page.partition(f"{heading}\n")[2].partition("\n## ")[0]


def _rows(section: str) -> list[list[str]]:
    return [line.strip("| ").split(" | ") for line in section.splitlines() if line.startswith("| `")]


def test_the_parts_of_passes_are_of_workloads_and_add_up() -> None:
    page = (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    sums = {}
    for name, forward, backward in _rows(_section(page, "## The Hopper kernels, one by one")):
        known = backward.partition(" (timed")[0].partition(", the mask")[0]
        sums[name.strip("`")] = round(float(forward) + sum(map(float, re.findall(r"\d+\.\d+", known))), 2)
    assert sums.keys() <= WORKLOADS.keys()
    assert len(sums) == 14
    assert f"its kernels add up to {sums['t5-1hmn-d64-1k']} ms" in page


def test_without_a_bias_or_mask_the_best_peer_is_flash_attention_4(published: summary.Published) -> None:
    plain = [name for name, case in WORKLOADS.items() if not case.biases and not case.masks]
    best = {best_peer(published.cases[name], mode) for name in plain for mode in ("fwd", "fwdbwd")}
    assert {found[0] for found in best if found} == {"fa4"}


def test_a_summary_keeps_what_a_report_says(tmp_path: Path) -> None:
    fine = Cell(status=OK, ms=1.23456, fraction=0.5, errors={"out": 1e-3, "dq": 2e-3})
    wrong = Cell(status=RED, reason="dq is off", errors={"dq": 0.5})
    away = Cell(status=NOT_INSTALLED, reason="some-package")
    rows = [
        Row(case="plain-d128-4k", provider=provider, cells={"fwd": cell, "fwdbwd": cell}, peak_mib=peak)
        for provider, cell, peak in (("biasflash", fine, 1.0), ("eager", wrong, 2.0), ("fa4", away, None))
    ]
    report = {
        "biasflash": "1",
        "started": "2026-01-02T03:04:05",
        "seconds": 1.0,
        "machine": {"gpu": "a GPU", "secret": 1},
        "ceilings": {"products": 1e12, "bytes": 1e12, "exps": 1e12},
        "limits": {},
    }
    path = tmp_path / "summary.json"
    path.write_text(summary.dump(summary.summarise(report, rows)), encoding="utf-8")
    assert [entry["error"] for entry in json.loads(path.read_text())["rows"]] == [2e-3, 0.5]
    found = summary.load(path)
    assert found.facts["absent"] == {"fa4": "not installed some-package"}
    assert "secret" not in found.facts["machine"]
    ours, eager = found.rows
    assert (ours.cells["fwd"].ms, ours.cells["fwd"].fraction, ours.peak_mib) == (1.235, 0.5, 1.0)
    assert (eager.cells["fwd"].status, eager.cells["fwd"].ms) == (RED, None)
    assert summary.holes(found) == "- `eager`, red (dq is off): `plain-d128-4k`"
    assert summary.misses(found) == ""


def test_another_file_is_no_summary(tmp_path: Path) -> None:
    path = tmp_path / "other.json"
    path.write_text('{"schema": "other"}', encoding="utf-8")
    with pytest.raises(ValueError, match="is not a summary"):
        summary.load(path)


def test_a_block_of_the_summary_needs_its_end(published: summary.Published) -> None:
    with pytest.raises(ValueError, match="has no"):
        summary.fill("<!-- bench:start -->", published)


# ------------------------------------------------------------------------------------------- the walks of CONTRIBUTING


def test_the_kind_of_the_walk_multiplies_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    kind = run_page(ROOT / "CONTRIBUTING.md")["GATE"]
    monkeypatch.setitem(KINDS, "gate", kind)  # type: ignore[arg-type]
    q, k, v = (torch.randn(5, 2, 4, dtype=torch.float64) for _ in range(3))
    gate = torch.rand(5, 5)
    plain, *_ = reference.weights(q, k, v, [], [], None, 0.5)
    gated, *_ = reference.weights(q, k, v, [gate], ["gate"], None, 0.5)
    wanted = plain * gate
    torch.testing.assert_close(gated, wanted / wanted.sum(-1, keepdim=True))


def test_the_backend_of_the_walk_computes_and_objects() -> None:
    backend = run_page(ROOT / "CONTRIBUTING.md")
    q, k, v = (torch.randn(2, 7, 3, 8) for _ in range(3))
    facts = problem.build(q, k, v, [], [], "none", None)
    assert backend["objections"](facts) == ()  # type: ignore[operator]
    out, lse, low = backend["forward"](facts, q, k, v, [])  # type: ignore[operator]
    wanted, wanted_lse, _ = reference.forward(facts, q, k, v, [])
    torch.testing.assert_close(out, wanted)
    torch.testing.assert_close(lse, wanted_lse)
    assert low.shape == lse.shape
    refused = problem.build(q.double(), k.double(), v.double(), [torch.zeros(7, 7)], ["dense"], "top-left", None)
    assert len(backend["objections"](refused)) == 2  # type: ignore[operator]
