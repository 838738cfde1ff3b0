"""The law of the house, read by a machine: who imports whom, what loads when, and how long things may grow."""

from __future__ import annotations

import ast
import io
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

import biasflash
from biasflash.backends import ORDER
from biasflash.bias import KINDS
from biasflash.problem import AXES

HOUSE = Path(biasflash.__file__).parent
TESTS = Path(__file__).parent
FILES = sorted(HOUSE.rglob("*.py"))
KERNELS = (
    "tile/",
    *(
        f"backends/triton/{name}.py"
        for name in ("forward", "merge", "tiles", "backward", "backward_rows", "backward_bias")
    ),
    *(f"backends/triton/windows{name}.py" for name in ("", "_long", "_long_backward", "_long_keys")),
)
#: the one file that takes anything from Gluon
GLUON = "backends/hopper/gluon.py"

#: room -> rooms of the package it may import, at the top of a file or inside a function
MAY_IMPORT: dict[str, set[str]] = {
    "_version": set(),
    "bias": {"bias"},
    "hints": set(),
    "problem": {"bias", "hints"},
    "tile": {"tile"},
    "backends.backend": {"problem"},
    "backends": {"backends.backend"},
    "backends.cpu": {"backends.cpu", "backends.backend", "problem", "bias"},
    "backends.triton": {"backends.triton", "backends.backend", "problem", "bias", "tile"},
    "backends.hopper": {"backends.hopper", "backends.triton", "backends.backend", "problem", "bias", "tile"},
    "reference": {"backends.backend", "problem", "bias"},
    "plan": {"backends", "problem"},
    "ops": {"plan", "backends", "backends.backend", "problem"},
    "api": {"hints", "ops", "plan", "problem"},
    "nn": {"api", "bias"},
    "integrations": {"", "api"},
    "": {"_version", "api", "nn", "bias", "problem"},
}
#: the edge may import all of the package, but no one inside may import the edge, nor the tests' half the command line
EDGE = ("testing", "cli")
#: room -> what it may import beside the standard library
MAY_LOAD: dict[str, set[str]] = {
    "tile": {"triton"},
    "backends.triton": {"torch", "triton"},
    "backends.hopper": {"torch", "triton"},
    "testing": {"torch"},
}
#: the files of the edge that compile kernels, for targets that need not be here
COMPILES_KERNELS = ("testing/offline.py", "testing/hopper_offline.py")


def room(module: str) -> str:
    """``biasflash.backends.triton.launch`` -> ``backends.triton``: the longest name that the law knows."""
    parts = module.split(".")[1:]
    while parts and ".".join(parts) not in (*MAY_IMPORT, *EDGE):
        parts.pop()
    return ".".join(parts)


def module_of(path: Path) -> str:
    parts = ("biasflash", *path.relative_to(HOUSE).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(path: Path) -> Iterator[str]:
    """Full names of everything a file imports anywhere; ``from biasflash import ops`` is ``biasflash.ops``."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            source = HOUSE.parent / Path(*(node.module or "").split("."))
            for alias in node.names:
                is_module = (source / f"{alias.name}.py").exists() or (source / alias.name).is_dir()
                yield f"{node.module}.{alias.name}" if is_module else str(node.module)


def relative(path: Path) -> str:
    return path.relative_to(HOUSE).as_posix()


@pytest.mark.parametrize("path", FILES, ids=relative)
def test_a_file_imports_only_what_its_room_may(path: Path) -> None:
    here = room(module_of(path))
    for name in imports(path):
        top = name.split(".")[0]
        if top == "biasflash":
            there = room(name)
            if here in EDGE:
                assert not (here == "testing" and there == "cli"), f"testing imports {name}"
            else:
                assert there in MAY_IMPORT[here] or (there, here) == ("", ""), f"{here or 'the package'} imports {name}"
        elif top not in sys.stdlib_module_names and here != "cli":
            allowed = MAY_LOAD.get(here, {"torch"}) | ({"triton"} if relative(path) in COMPILES_KERNELS else set())
            assert top in allowed, f"{here or 'the package'} imports {name}"


@pytest.mark.parametrize("path", [p for p in FILES if room(module_of(p)) == "tile"], ids=relative)
def test_tile_knows_nothing_but_triton(path: Path) -> None:
    assert {name.split(".")[0] for name in imports(path)} <= {"__future__", "triton", "biasflash"}


def takes_from_gluon(path: Path) -> bool:
    """Whether a file imports anything of ``triton.experimental``, which moves between versions."""
    nodes = list(ast.walk(ast.parse(path.read_text())))
    names = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    names += [f"{n.module}.{alias.name}" for n in nodes if isinstance(n, ast.ImportFrom) for alias in n.names]
    return any(name.split(".")[:2] == ["triton", "experimental"] for name in names)


def test_one_file_meets_new_versions_of_gluon() -> None:
    assert [relative(p) for p in FILES if takes_from_gluon(p)] == [GLUON]
    assert not [p.name for p in TESTS.rglob("*.py") if takes_from_gluon(p)]


def test_every_room_of_the_law_is_a_room_of_the_house() -> None:
    """A misspelt room would forbid nothing."""
    built = {module_of(p).removeprefix("biasflash").removeprefix(".") for p in FILES}
    assert set(MAY_IMPORT) - {"integrations"} <= built
    assert {room(module_of(p)) for p in FILES} - {"integrations"} <= {*MAY_IMPORT, *EDGE}


# ------------------------------------------------------------------------------------------------------ what loads when


def run_fresh(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_importing_loads_no_partner_and_no_backend() -> None:
    """What ``import torch`` loads by itself is torch's own affair."""
    partners = ("triton", "numpy", "matplotlib", "typer", "rich", "sklearn", "cudnn", "flash_attn")
    loaded = run_fresh(
        "import sys, torch\nbefore = set(sys.modules)\nimport biasflash\n"
        "for name in sorted(set(sys.modules) - before): sys.stdout.write(name + '\\n')"
    ).split()
    assert "biasflash.api" in loaded
    assert not [name for name in loaded if name.split(".")[0] in partners]
    assert not [name for name in loaded if name in ORDER.values()]
    assert not [name for name in loaded if name.startswith(("biasflash.tile", "biasflash.testing", "biasflash.cli"))]


#: the start of a program on a machine without Triton
WITHOUT_TRITON = """
import importlib.machinery, sys
find = importlib.machinery.PathFinder.find_spec
def without_triton(name, path=None, target=None):
    return None if name.split(".")[0] == "triton" else find(name, path, target)
importlib.machinery.PathFinder.find_spec = without_triton
try:
    import triton
except ModuleNotFoundError:
    pass
"""


def test_a_cpu_call_works_where_triton_is_not_installed() -> None:
    answer = run_fresh(
        WITHOUT_TRITON
        + """
import torch, biasflash
q = torch.randn(1, 5, 2, 8, requires_grad=True)
bias = torch.randn(1, 2, 5, 5, requires_grad=True)
biasflash.attention(q, q, q, bias, causal=True).sum().backward()
report = biasflash.explain(q, q, q, bias)
sys.stdout.write(f"{report.backend} {torch.isfinite(bias.grad).all().item()} {'triton' in sys.modules}")
"""
    )
    assert answer == "cpu True False"


def test_the_command_line_works_where_triton_is_not_installed() -> None:
    """All of it: every module of ``cli`` and what they import, and commands that a CPU can run."""
    answer = run_fresh(
        WITHOUT_TRITON
        + """
import importlib, pkgutil
import biasflash.cli
for module in pkgutil.iter_modules(biasflash.cli.__path__):
    try:
        importlib.import_module(f"biasflash.cli.{module.name}")
    except ModuleNotFoundError as error:
        assert error.name == "cudnn", error  # a peer's module, loaded where the peer is
from typer.testing import CliRunner
from biasflash.cli.main import app
for words in ("--help", "cases", "explain --q 1,8,2,16", "check --backend cpu --cases plain --dtypes fp32 --jobs 1"):
    done = CliRunner().invoke(app, words.split())
    assert done.exit_code == 0, (words, done.output, done.exception)
sys.stdout.write(str("triton" in sys.modules))
"""
    )
    assert answer == "False"


# ----------------------------------------------------------------------------------------------------------------- lids


def is_kernel(path: Path) -> bool:
    """Triton's kernels by name, Gluon's by the decorator that a file takes."""
    takes_jit = re.search(rf"from {module_of(HOUSE / GLUON)} import (\([^)]*\bjit\b|.*\bjit\b)", path.read_text())
    return relative(path).startswith(KERNELS) or takes_jit is not None


def code_lines(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines of a function from ``def`` to its end, its docstring left out."""
    total = (node.end_lineno or node.lineno) - node.lineno + 1
    first = node.body[0]
    if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str):
        total -= (first.end_lineno or first.lineno) - first.lineno + 1
    return total


@pytest.mark.parametrize("path", FILES, ids=relative)
def test_lengths_stay_under_their_lids(path: Path) -> None:
    text, lid = path.read_text(), 120 if is_kernel(path) else 60
    assert len(text.splitlines()) <= 400
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            assert code_lines(node) <= lid, f"{node.name} has {code_lines(node)} lines, at most {lid}"


# ------------------------------------------------------------------------------------------------------- clean floors

STATEMENTS = (ast.Assign, ast.AugAssign, ast.Import, ast.ImportFrom, ast.Return, ast.FunctionDef, ast.Assert, ast.Raise)


def is_code(comment: str) -> bool:
    """Whether a comment would do something as a line of Python."""
    try:
        body = ast.parse(comment.lstrip("#").strip()).body
    except SyntaxError:
        return False
    return any(isinstance(n, STATEMENTS) or (isinstance(n, ast.Expr) and isinstance(n.value, ast.Call)) for n in body)


@pytest.mark.parametrize("path", FILES, ids=relative)
def test_no_line_is_commented_out_or_left_for_later(path: Path) -> None:
    text = path.read_text()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            assert not is_code(token.string), f"line {token.start[0]} is commented-out code: {token.string}"
    left = re.search(r"\b(" + "|".join(("TO" + "DO", "FIX" + "ME", "X" + "XX", "HA" + "CK")) + r")\b", text)
    assert left is None, left


def test_the_check_for_commented_out_code_can_fail() -> None:
    assert is_code("# x = compute(y)")
    assert is_code("# compute(y)")
    assert not is_code("# [M, N] tile of scores")
    assert not is_code("# why: the hardware adds in its own order")


@pytest.mark.parametrize("path", [p for p in FILES if room(module_of(p)) != "cli"], ids=relative)
def test_the_library_does_not_print(path: Path) -> None:
    calls = [n for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.Call)]
    assert not [n.lineno for n in calls if isinstance(n.func, ast.Name) and n.func.id == "print"]


@pytest.mark.parametrize("name", ["api.py", "problem.py"])
def test_callers_mistakes_are_never_asserts(name: str) -> None:
    """An assert may tell the type checker what is known (``isinstance``), nothing else."""
    for node in ast.walk(ast.parse((HOUSE / name).read_text())):
        if isinstance(node, ast.Assert):
            test = node.test
            narrows = isinstance(test, ast.Call) and isinstance(test.func, ast.Name) and test.func.id == "isinstance"
            assert narrows, f"line {node.lineno}: {ast.unparse(node)}"


# ----------------------------------------------------------------------------------------------------- tables and words


def test_docstrings_say_the_axes_of_the_table() -> None:
    for name in ("q", "k", "v", "out", "lse"):
        assert f"``{AXES[name]}``" in (biasflash.attention.__doc__ or ""), name
    assert f"``qkv: {AXES['qkv']}``" in (biasflash.attention_qkvpacked.__doc__ or "")
    assert f"``kv: {AXES['kv']}``" in (biasflash.attention_kvpacked.__doc__ or "")
    assert AXES["bias"].replace("#", "") in (biasflash.attention.__doc__ or "")


def test_every_kind_lives_in_a_file_of_its_own() -> None:
    files = {p.stem for p in (HOUSE / "bias").glob("*.py")} - {"__init__", "kind"}
    assert files == set(KINDS)
    assert all(name == kind.name for name, kind in KINDS.items())


def test_every_backend_keeps_the_whole_contract() -> None:
    """Loading triton's is lazy: its contract must be readable on a machine without a GPU."""
    from biasflash.backends import load
    from biasflash.backends.backend import Promises

    for name in ORDER:
        backend = load(name)
        assert isinstance(backend.PROMISES, Promises), name
        for member in ("objections", "reservations", "describe", "forward", "backward"):
            assert callable(getattr(backend, member)), f"{name}.{member}"


# ---------------------------------------------------------------------------------------------------------- jit code


JIT_FILES = [p for p in FILES if re.search(r"^@(triton\.)?jit", p.read_text(encoding="utf-8"), re.MULTILINE)]


def constants_that_a_loop_forgets(source: str) -> list[str]:
    """Names that a loop of the device reads before it sets them to a constant, as the code before the loop did.

    Triton 3.6 does not carry such a name round the loop: every round reads the first constant. (Loops over
    ``static_range`` are unrolled, and carry everything.)
    """
    found = []
    for function in (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef)):
        for loop in (node for node in ast.walk(function) if isinstance(node, ast.For | ast.While)):
            if isinstance(loop, ast.For) and "static_range" in ast.unparse(loop.iter):
                continue
            inside = [node for statement in loop.body for node in ast.walk(statement)]
            for node in inside:
                if not (isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)):
                    continue
                for target in (t for t in node.targets if isinstance(t, ast.Name)):
                    reads = [
                        x.lineno
                        for x in inside
                        if isinstance(x, ast.Name) and x.id == target.id and isinstance(x.ctx, ast.Load)
                    ]
                    sets = [
                        x.lineno
                        for x in inside
                        if isinstance(x, ast.Name) and x.id == target.id and isinstance(x.ctx, ast.Store)
                    ]
                    if reads and min(reads) <= min(sets):
                        found.append(f"{function.name}: {target.id}")
    return found


@pytest.mark.parametrize("path", JIT_FILES, ids=relative)
def test_no_loop_sets_a_carried_name_to_a_constant(path: Path) -> None:
    assert constants_that_a_loop_forgets(path.read_text(encoding="utf-8")) == []


def test_a_forgotten_constant_is_found() -> None:
    lines = "def f(n):\n    first = 1\n    for _ in range(n):\n        use(first)\n        first = 0\n"
    assert constants_that_a_loop_forgets(lines) == ["f: first"]
    assert constants_that_a_loop_forgets(lines.replace("range", "gl.static_range")) == []
    assert constants_that_a_loop_forgets(lines.replace("first = 0", "first += 1")) == []
