"""What ``biasflash tune`` tries: problems that reach every row of a table, and tiles one step from the rule's own."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from biasflash.backends.triton.config import RULES, Facts, TileConfig, choose_rule, shared_bytes
from biasflash.backends.triton.tables import Key, Row, key_of, row_of, shipped_for
from biasflash.testing.case import Bias, Case
from biasflash.testing.workloads import WORKLOADS

#: kernels whose tiles are chosen by measurement; ``delta`` is bound by memory whatever its tile
KERNELS = ("forward", "dkdv", "dq", "dq_from_ds", "dbias")
#: sides and warps that kernels take
SIDES, WARPS = (16, 32, 64, 128), (4, 8)
#: registers of a multiprocessor; a cap that does not let two programs in buys nothing
REGISTERS = 65536
#: register caps that buy a second or a third program of 4 warps on a multiprocessor
CAPS = (128, 168)
#: float32 accumulators a thread can hold beside what else it needs; more only spills
MAX_ACCUMULATORS = 256


def _shape(name: str, kind: str, D: int, dtype: str, Dv: int | None = None) -> Case:
    """A further shape: 2k for 16 bits, 1k for float32, with enough heads to fill a GPU."""
    length = 1024 if dtype == "fp32" else 2048
    biases = {"none": (), "shared": (Bias(shape="1HMN"),), "full": (Bias(shape="BHMN"),)}[kind]
    shape: dict[str, Any] = {"batch": (4,), "M": length, "N": length, "Hq": 8, "Hkv": 8, "D": D, "Dv": Dv or D}
    return Case(name=name, why="reaches rows of a table", tags=frozenset({"tune"}), dtype=dtype, biases=biases, **shape)


_FURTHER = [
    *(_shape(f"tune-{kind}-d32", kind, 32, "bf16") for kind in ("none", "full")),
    *(_shape(f"tune-shared-d{D}", "shared", D, "bf16") for D in (128, 256)),
    _shape("tune-full-d256", "full", 256, "bf16"),
    *(_shape(f"tune-{kind}-d192-128", kind, 192, "bf16", 128) for kind in ("shared", "full")),
    *(
        _shape(f"tune-{kind}-d{D}-fp32", kind, D, "fp32")
        for D in (32, 64, 128, 256)
        for kind in ("shared", "full", "none")
    ),
]
#: every problem that may be tuned on, by name
CASES: dict[str, Case] = WORKLOADS | {case.name: case for case in _FURTHER}

#: what is tuned on when nothing is named: case -> its kernels, ordered so that what most calls use comes first
DEFAULT: dict[str, tuple[str, ...]] = {
    "bias-full-d64-2k": ("forward", "dkdv", "dq_from_ds"),
    "t5-1hmn-d64-1k": ("forward", "dkdv", "dq", "dbias"),
    "plain-d64-4k": ("forward", "dkdv", "dq"),
    "bias-full-d128-4k": ("forward", "dkdv", "dq_from_ds"),
    "tune-shared-d128": ("dkdv", "dq", "dbias"),
    "plain-d128-4k": ("forward", "dkdv", "dq"),
    "pair-1hmn-d32-512": ("forward", "dkdv", "dq", "dbias"),
    "tune-full-d32": ("dq_from_ds",),
    "mask-bhmn-d32-100x16k": ("forward", "dkdv", "dq"),
    "tune-none-d32": ("forward", "dkdv", "dq"),
    "plain-d256-4k": ("forward", "dkdv", "dq"),
    "tune-shared-d256": ("forward", "dkdv", "dq", "dbias"),
    "tune-full-d256": ("dq_from_ds",),
    "mla-causal-d192-128": ("forward", "dkdv", "dq"),
    "tune-shared-d192-128": ("forward", "dkdv", "dq", "dbias"),
    "tune-full-d192-128": ("dq_from_ds",),
    "bias-full-d64-2k-fp32": ("forward", "dkdv", "dq_from_ds"),
    **{
        f"tune-{kind}-d{D}-fp32": kernels
        for D in (64, 32, 128, 256)
        for kind, kernels in (
            ("shared", ("forward", "dkdv", "dq", "dbias")),
            ("none", ("forward", "dkdv", "dq")),
            ("full", ("dq_from_ds",)),
        )
        if (kind, D) != ("full", 64)
    },
}


def choose(cases: str | None, kernels: str | None) -> dict[str, tuple[str, ...]]:
    """Case name -> kernels to tune on it. Cases that are named are tuned with every kernel that they run.

    Raises:
        ValueError: a glob matches no case or tag, or a kernel is unknown.
    """
    wanted = [word.strip() for word in (kernels or "").split(",") if word.strip()] or list(KERNELS)
    for kernel in wanted:
        if kernel not in KERNELS:
            raise ValueError(f"kernel {kernel!r} is unknown; known: {', '.join(KERNELS)}")
    found: dict[str, tuple[str, ...]] = {} if cases else dict(DEFAULT)
    for glob in [word.strip() for word in (cases or "").split(",") if word.strip()]:
        names = [n for n, case in CASES.items() if fnmatch.fnmatchcase(n, glob) or glob in case.tags]
        if not names:
            raise ValueError(f"no case matches {glob!r}; known: {', '.join(CASES)}, and the tags workload and tune")
        found |= dict.fromkeys(names, KERNELS)
    kept = {name: tuple(k for k in ks if k in wanted) for name, ks in found.items()}
    return {name: ks for name, ks in kept.items() if ks}


# --------------------------------------------------------------------------------------------------------------- tiles


@dataclass(frozen=True, kw_only=True)
class Forced:
    """In place of a table: one tile for one key, so that the real plans write down the launch that would run."""

    key: Key
    tile: TileConfig
    gpu: str = "a candidate"

    def find(self, facts: Any) -> Row | None:
        return row_of(self.key, self.tile, spill_bytes=0) if key_of(facts) == self.key else None


class Listener:
    """In place of a table: notes what plans ask for, and leaves every choice to the rules."""

    gpu = "nobody"

    def __init__(self) -> None:
        self.asked: dict[str, Facts] = {}

    def find(self, facts: Any) -> Row | None:
        self.asked[facts.kernel] = facts
        return None


def plain(tile: TileConfig) -> TileConfig:
    """Without what is no part of a tile that runs."""
    return replace(tile, spill_bytes=0, keeps_warps=False, keeps_sides=False)


def accumulators(facts: Facts, tile: TileConfig) -> int:
    """float32 values that a thread keeps from one step of its loop to the next."""
    narrow = facts.columns - facts.width
    kept = {
        "forward": tile.block_m * narrow,
        "dkdv": tile.block_n * facts.columns,
        "dq": tile.block_m * facts.width,
        "dq_from_ds": tile.block_m * facts.width,
        "dbias": tile.block_m * tile.block_n,
    }[facts.kernel]
    return (kept + tile.block_m * tile.block_n) // (32 * tile.warps)


def is_sane(facts: Facts, tile: TileConfig) -> bool:
    """Whether a tile fits shared memory and is not sure to spill."""
    return (
        tile.block_m in SIDES
        and tile.block_n in SIDES
        and tile.warps in WARPS
        and 1 <= tile.stages <= 4
        and (tile.registers is None or _cap_is_sane(facts, tile, tile.registers))
        and shared_bytes(facts, tile) <= facts.shared_memory
        and accumulators(facts, tile) <= MAX_ACCUMULATORS
    )


def _cap_is_sane(facts: Facts, tile: TileConfig, registers: int) -> bool:
    """Whether a register cap lets two programs in, and leaves a quarter of it to what is no accumulator."""
    lets_two_in = 2 * 32 * tile.warps * registers <= REGISTERS
    return facts.itemsize == 2 and lets_two_in and 4 * accumulators(facts, tile) <= 3 * registers


def _steps(tile: TileConfig) -> Iterator[TileConfig]:
    """Tiles one step away: a side doubled or halved (its warps, too), a stage more or less, another register cap."""
    sides = {"block_m": tile.block_m, "block_n": tile.block_n}
    for name, side in sides.items():
        longer: dict[str, Any] = {name: side * 2}
        yield replace(tile, **longer)
        yield replace(tile, warps=8, registers=None, **longer)
    for name, side in sides.items():
        shorter: dict[str, Any] = {name: side // 2}
        yield replace(tile, **shorter)
        yield replace(tile, warps=4, **shorter)
    yield replace(tile, stages=tile.stages + 1)
    yield replace(tile, stages=tile.stages - 1)
    for cap in (None, *CAPS):
        yield replace(tile, registers=cap)


def _shipped(facts: Facts) -> list[TileConfig]:
    """Tiles that the table of this GPU, or of one like it, has for the key: what a new run has to beat."""
    table = shipped_for(facts.gpu, facts.capability) if facts.gpu else None
    row = table.find(facts) if table else None
    return [plain(TileConfig(**fields)) for fields in row.tiles] if row else []


def candidates(facts: Facts) -> list[TileConfig]:
    """The rule's tile first, then what is one step from it, other rules' tiles for the kernel and element size, and the
    shipped table's."""
    first = plain(choose_rule(facts)[0])
    near = [
        rule
        for rule in RULES
        if (rule.kernel, rule.itemsize) == (facts.kernel, facts.itemsize)
        and facts.width <= rule.max_width <= 2 * facts.width
    ]
    own = [rule for rule in near if rule.capability == facts.capability] or [r for r in near if r.capability is None]
    found = dict.fromkeys([*_shipped(facts), *_steps(first), *(plain(rule.tile) for rule in own)])
    return [first, *(tile for tile in found if tile != first and is_sane(facts, tile))]
