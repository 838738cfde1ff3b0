"""Tables of measured tiles: one JSON file a GPU, written by ``biasflash tune``, read when a call is first planned.

A table is keyed like a rule. It is found among the files that ship with the package, by the GPU's name or else by its
compute capability, or named by the environment variable ``BIASFLASH_TILES`` (a path, or ``off``) or by ``use``. Without
one, the rules of ``config`` apply. Their tiles spill no registers; those of a table may, where that was faster.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any, Protocol

import torch

SCHEMA = "biasflash-tiles/1"
#: names a table to use instead of the shipped one, or ``off`` for none
VARIABLE = "BIASFLASH_TILES"
#: widths that rows are measured at; a problem takes the row of the next one
WIDTHS = (32, 64, 128, 256)
#: D 192 with Dv 128 (both padded: 256 + 128) has rows of its own; no other mixture of widths has
MIXED_COLUMNS = 384
SHIPPED = Path(__file__).parent / "tables"
RULES_TILE = "the rule's tile"
TILE = ("block_m", "block_n", "warps", "stages", "registers", "spill_bytes", "columns")


class Facts(Protocol):
    """What a table looks at, a part of ``config.Facts``."""

    @property
    def kernel(self) -> str: ...
    @property
    def width(self) -> int: ...
    @property
    def columns(self) -> int: ...
    @property
    def itemsize(self) -> int: ...
    @property
    def has_dense(self) -> bool: ...
    @property
    def capability(self) -> int: ...


@dataclass(frozen=True, kw_only=True, order=True)
class Key:
    """What a row is for. ``max_width`` is one of ``WIDTHS``; ``max_columns`` bounds the sum of both padded widths."""

    kernel: str
    itemsize: int
    max_width: int
    max_columns: int
    dense: bool

    def __str__(self) -> str:
        mixed = "" if self.max_columns == 2 * self.max_width else f" of {self.max_columns} columns"
        bias = "a bias" if self.dense else "no bias"
        return f"{self.kernel}, {8 * self.itemsize} bits, width {self.max_width}{mixed}, {bias}"


def key_of(facts: Facts) -> Key:
    """The one key that a problem's facts belong to."""
    width = next(w for w in WIDTHS if facts.width <= w)
    columns = MIXED_COLUMNS if width == 256 and facts.columns <= MIXED_COLUMNS else 2 * width
    return Key(
        kernel=facts.kernel, itemsize=facts.itemsize, max_width=width, max_columns=columns, dense=facts.has_dense
    )


@dataclass(frozen=True, kw_only=True)
class Row:
    """A tile and what it was measured on: workload -> (its milliseconds, those of ``against``).

    ``spill_bytes`` is what a thread spills in the variants that were looked at; others may spill more. ``smaller``: for
    calls whose biases leave less shared memory, in order, as ``TILE`` names their fields.
    """

    key: Key
    block_m: int
    block_n: int
    warps: int
    stages: int
    registers: int | None = None
    spill_bytes: int = 0
    columns: int = 0
    measured: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    against: str = RULES_TILE  # whose milliseconds are the second ones
    smaller: tuple[tuple[int | None, ...], ...] = ()

    @property
    def tile(self) -> dict[str, Any]:
        """Fields of a ``config.TileConfig``."""
        return {name: getattr(self, name) for name in TILE}

    @property
    def tiles(self) -> list[dict[str, Any]]:
        """``tile`` and the smaller ones; the first that fits shared memory is taken."""
        smaller = [fields if len(fields) == len(TILE) else (*fields, 0) for fields in self.smaller]  # without columns
        return [self.tile, *(dict(zip(TILE, fields, strict=True)) for fields in smaller)]

    def why(self, gpu: str) -> str:
        """The reason for the tile, as ``explain`` shows it."""
        figures = [f"{name} {ms:.3g} ms, {self.against} {other:.3g}" for name, (ms, other) in self.measured.items()]
        return f"table of {gpu}: {'; '.join(figures)}"


def row_of(key: Key, tile: Any, **more: Any) -> Row:
    """The row of a ``config.TileConfig``; ``more`` are further fields, or others than the tile's."""
    return Row(key=key, **({name: getattr(tile, name) for name in TILE} | more))


@dataclass(frozen=True, kw_only=True)
class Table:
    """Measured tiles of one GPU. ``kept`` are the keys where the rule's own tile stood: workload -> milliseconds."""

    gpu: str  # its name, as reasons say it
    capability: int
    rows: Mapping[Key, Row]
    kept: Mapping[Key, Mapping[str, float]] = field(default_factory=dict)
    facts: Mapping[str, Any] = field(default_factory=dict)  # versions, driver, date

    def find(self, facts: Facts) -> Row | None:
        """The row for a problem's kernel on a GPU of the table's compute capability, if there is one."""
        return self.rows.get(key_of(facts)) if facts.capability == self.capability else None


class Choices(Protocol):
    """What ``using`` takes: a table, or a stand-in of one."""

    @property
    def gpu(self) -> str: ...
    def find(self, facts: Facts) -> Row | None: ...


# ---------------------------------------------------------------------------------------------------------------- file


def dump(table: Table) -> str:
    """A table as JSON, one row a line, sorted."""
    head = {"schema": SCHEMA, "gpu": table.gpu, "capability": table.capability, **table.facts}
    rows = []
    for _, row in sorted(table.rows.items()):
        tile = {name: value for name, value in row.tile.items() if name != "columns" or value}
        shown = asdict(row.key) | tile | {"measured": {name: list(ms) for name, ms in row.measured.items()}}
        if row.against != RULES_TILE:
            shown["against"] = row.against
        if row.smaller:
            shown["smaller"] = list(row.smaller)
        rows.append(json.dumps(shown))
    kept = [json.dumps(asdict(key) | {"measured": dict(ms)}) for key, ms in sorted(table.kept.items())]
    lines = [f" {json.dumps(name)}: {json.dumps(value)}," for name, value in head.items()]
    for name, found, end in (("rows", rows, ","), ("kept", kept, "")):
        lines += [f' "{name}": [', ",\n".join(f"  {row}" for row in found), f" ]{end}"]
    return "\n".join(["{", *(line for line in lines if line), "}"]) + "\n"


def _key(entry: dict[str, Any]) -> Key:
    return Key(**{name: entry.pop(name) for name in ("kernel", "itemsize", "max_width", "max_columns", "dense")})


def _row(entry: dict[str, Any]) -> Row:
    measured = {name: (float(ms), float(other)) for name, (ms, other) in entry.pop("measured").items()}
    smaller = tuple(map(tuple, entry.pop("smaller", ())))
    return Row(key=_key(entry), measured=measured, smaller=smaller, **entry)


def parse(text: str, name: str = "the text") -> Table:
    """The table in a JSON text; ``name`` says in messages where it is from.

    Raises:
        ValueError: it is none, or holds two rows of one key.
    """
    try:
        found = json.loads(text)
        if found["schema"] != SCHEMA:
            raise ValueError(f"schema {found['schema']!r}, wanted {SCHEMA!r}")
        rows = [_row(dict(entry)) for entry in found["rows"]]
        kept = {_key(entry): entry["measured"] for entry in map(dict, found["kept"])}
        if len({row.key for row in rows} | set(kept)) != len(rows) + len(found["kept"]):
            raise ValueError("two rows have one key")
        known = ("schema", "gpu", "capability", "rows", "kept")
        return Table(
            gpu=str(found["gpu"]),
            capability=int(found["capability"]),
            rows={row.key: row for row in rows},
            kept=kept,
            facts={k: v for k, v in found.items() if k not in known},
        )
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        why = f"no {error}" if isinstance(error, KeyError) else str(error)
        raise ValueError(f"{name} is not a table of biasflash tune: {why}") from None


def read(path: Path | str) -> Table:
    """The table in a file.

    Raises:
        ValueError: there is none.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"cannot read the table of tiles {path}: {error}") from None
    return parse(text, str(path))


def file_name(gpu: str) -> str:
    """``"NVIDIA H200"`` -> ``"nvidia_h200.json"``."""
    return re.sub(r"[^a-z0-9]+", "_", gpu.lower()).strip("_") + ".json"


# ------------------------------------------------------------------------------------------------------------- choice

#: the innermost entry of ``using`` or else ``use``; outside of both, the environment and the shipped files decide
_chosen: list[Choices | None] = []


def use(table: Table | Path | str | None) -> None:
    """Takes tiles from this table (or the file of one) from now on, for the whole process; None: from the rules alone.

    Call it before the first attention call: what was planned already keeps its tiles.

    Raises:
        ValueError: the file holds no table.
    """
    found = read(table) if isinstance(table, (str, Path)) else table
    _chosen[:] = [found]


@contextmanager
def using(choices: Choices | None) -> Iterator[None]:
    """Takes tiles from ``choices`` inside the block, None: from the rules alone. For tools, not for threads."""
    before = list(_chosen)
    _chosen.append(choices)
    try:
        yield
    finally:
        _chosen[:] = before


@cache
def shipped(gpu: str) -> Table | None:
    """The table that comes with the package for a GPU of exactly this name."""
    path = SHIPPED / file_name(gpu)
    if not path.is_file():
        return None
    table = read(path)
    return table if table.gpu == gpu else None


@cache
def alike(capability: int) -> Table | None:
    """The shipped table of another GPU of this compute capability, the first by file name; its ``gpu`` says so."""
    for path in sorted(SHIPPED.glob("*.json")):
        table = read(path)
        if table.capability == capability:
            return replace(table, gpu=f"{table.gpu}, the same compute capability")
    return None


def shipped_for(gpu: str, capability: int | None) -> Table | None:
    """The GPU's own shipped table, else that of another one of its compute capability, if that is known."""
    return shipped(gpu) or (None if capability is None else alike(capability))


@cache
def _named(path: str) -> Table:
    return read(path)


def active(gpu: str | None = None, capability: int | None = None) -> Choices | None:
    """What tiles come from: ``using``, ``use``, ``BIASFLASH_TILES``, or a shipped table; None: the rules.

    A shipped table is that of ``gpu``, a name as torch gives it (None: the current GPU's; empty: there is none), else
    that of another GPU of the same ``capability`` (None: the current GPU's where that is asked for its name).

    Raises:
        ValueError: ``BIASFLASH_TILES`` names a file that holds no table.
    """
    if _chosen:
        return _chosen[-1]
    named = os.environ.get(VARIABLE, "")
    if named:
        return None if named == "off" else _named(named)
    # a plan without a GPU at hand must not start CUDA by asking for its name
    if gpu is None and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        gpu = torch.cuda.get_device_name()
        if capability is None:
            major, minor = torch.cuda.get_device_capability()
            capability = 10 * major + minor
    return shipped_for(gpu, capability) if gpu else None
