"""The pages say what the code does: their Python runs, their tables are the code's, their links lead somewhere."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from biasflash import problem, reference
from biasflash.backends import ORDER
from biasflash.bias import KINDS
from biasflash.cli import support

ROOT = Path(__file__).parent.parent
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
