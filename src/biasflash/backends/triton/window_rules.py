"""Tiles of the window kernels as data with reasons; see ``config.RULES`` for those of the general ones.

``MEASURED`` belongs to the tables of measured tiles: its tiles come first where such a table is in force.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from biasflash.backends.triton.config import TileConfig


@dataclass(frozen=True, kw_only=True)
class WindowRule:
    """When (pass, tile sides, widest width, element size) -> tile, programs, what is held -> why; the first that fits.

    ``tile`` gives upper limits of the sides: forward query tiles may be shorter than the sequence. ``programs`` are
    those that run on one multiprocessor at a time. ``hold`` names the kinds of terms whose tiles stay in registers
    where all windows of a program share them; others are read from memory (L1 or L2) for every window. Planes that
    are not aligned are held whatever their kind: read element by element they cost 32 loads a thread, and registers.
    ``exact``: only heads as wide as the columns that hold them. ``whole``: only sequences that fill their tiles, whose
    planes are aligned.
    """

    kernel: str
    queries: int
    keys: int
    width: int
    itemsize: int
    tile: TileConfig
    programs: int
    hold: tuple[str, ...]
    why: str
    capability: int | None = None
    exact: bool = False
    whole: bool = False


def _rule(
    kernel: str,
    limits: tuple[int, int, int, int],
    tile: tuple[int, int, int, int, int | None],
    programs: int,
    hold: tuple[str, ...],
    why: str,
    *,
    spill_bytes: int = 0,
    **more: Any,
) -> WindowRule:
    queries, keys, width, itemsize = limits
    m, n, warps, stages, registers = tile
    config = TileConfig(block_m=m, block_n=n, warps=warps, stages=stages, registers=registers, spill_bytes=spill_bytes)
    return WindowRule(
        kernel=kernel,
        queries=queries,
        keys=keys,
        width=width,
        itemsize=itemsize,
        tile=config,
        programs=programs,
        hold=hold,
        why=why,
        **more,
    )


_BIAS, _NONE = ("dense",), ()
_FULL: dict[str, Any] = {"exact": True, "whole": True}


def _measured(*given: Any, **more: Any) -> WindowRule:
    """A tile that was timed on an H200, and holds for GPUs of its capability."""
    rule = _rule(*given, capability=90, **more)
    return replace(rule, why=f"measured on NVIDIA H200: {rule.why}")


#: milliseconds are an H200's for 8192 x 6 windows (4096 of 128 tokens, 2048 of 144), bfloat16, a shared bias; spills
#: ptxas reports, of a thread
MEASURED: tuple[WindowRule, ...] = (
    # ------------------------------------------------------------------------------------------------ forward, 16 bits
    _measured(
        "forward",
        (128, 64, 32, 2),
        (64, 64, 4, 2, None),
        4,
        _BIAS,
        "64 tokens: 0.243 ms, 3 stages 0.269, not held 0.254",
    ),
    _measured("forward", (128, 64, 64, 2), (64, 64, 4, 2, None), 4, _BIAS, "64 tokens, D 64: 0.209 ms, not held 0.257"),
    _measured("forward", (128, 128, 64, 2), (64, 128, 4, 3, None), 3, _BIAS, "128 tokens: 0.141 ms, 2 stages 0.172"),
    _measured(
        "long forward",
        (192, 144, 32, 2),
        (64, 128, 4, 3, 168),
        3,
        _BIAS,
        "144 tokens: 0.271 ms; of what took 0.292 with it 2 stages 0.381, uncapped 0.314, 128 registers 0.298",
        spill_bytes=144,
    ),
    _measured("long forward", (192, 192, 32, 2), (64, 128, 4, 2, None), 2, _BIAS, "no spills up to 192 tokens"),
    _measured(
        "long forward",
        (192, 192, 64, 2),
        (64, 128, 4, 2, None),
        2,
        _BIAS,
        "no spills up to 192 tokens and D 64, where warp groups take operands from shared memory",
    ),
    # ----------------------------------------------------------------------------------------------- backward, 16 bits
    _measured(
        "backward",
        (64, 64, 32, 2),
        (64, 64, 4, 3, None),
        2,
        _BIAS,
        "64 tokens: 0.443 ms, 2 stages 0.546, not held 0.481; 49 tokens: 0.373, 2 stages 0.522",
    ),
    _measured(
        "backward",
        (64, 64, 64, 2),
        (64, 64, 4, 2, None),
        2,
        _BIAS,
        "64 tokens, D 64: 0.410 ms, 1 stage 0.427, not held 0.417",
    ),
    _measured(
        "backward",
        (128, 128, 32, 2),
        (128, 128, 8, 3, None),
        1,
        _NONE,
        "128 tokens: 0.360 ms, 2 stages 0.465, held 0.504",
        spill_bytes=272,
    ),
    _measured(
        "long dq",
        (192, 128, 64, 2),
        (64, 64, 4, 2, None),
        2,
        _BIAS,
        "4 heads of 128 tokens, D 64: with dk and dv 0.601 ms, general 0.851; 100 tokens 0.550, 1.127",
        spill_bytes=40,
    ),
    _measured(
        "long dq",
        (192, 144, 32, 2),
        (64, 128, 4, 3, None),
        2,
        _BIAS,
        "144 tokens, with dk and dv 0.870 ms; 2 stages 1.009, with 168 registers 1.056, 1 stage 1.309",
        spill_bytes=48,
    ),
    _measured(
        "long dq",
        (192, 192, 32, 2),
        (64, 128, 4, 1, None),
        2,
        _NONE,
        "160 tokens: 253 registers, held 104 bytes of spills, as unaligned planes are (384 at most)",
        spill_bytes=384,
    ),
    _measured(
        "long dq",
        (192, 192, 64, 2),
        (64, 128, 4, 1, None),
        2,
        _NONE,
        "as for D 32",
        spill_bytes=384,
    ),
    _measured(
        "long dkdv",
        (192, 128, 64, 2),
        (64, 64, 4, 2, None),
        2,
        _BIAS,
        "128 tokens, D 64: with dq 0.601 ms, not held 0.766, 1 stage 0.647, 3 stages 0.790",
        spill_bytes=288,
    ),
    _measured(
        "long dkdv",
        (192, 144, 32, 2),
        (64, 64, 4, 3, None),
        2,
        _BIAS,
        "144 tokens, with dq 0.870 ms; 2 stages 0.925, not held 0.927, 1 stage 1.41, 128 queries at a time 0.992",
        spill_bytes=264,
    ),
    _measured(
        "long dkdv",
        (192, 192, 32, 2),
        (64, 64, 4, 2, None),
        2,
        _NONE,
        "160 tokens: 48 bytes of spills, held 232, as unaligned planes are (320 at most)",
        spill_bytes=320,
    ),
    _measured(
        "long dkdv",
        (192, 192, 64, 2),
        (64, 64, 4, 1, None),
        2,
        _NONE,
        "two stages of D 64 take 130 KiB, room for one program; a causal mask or float32 bias spills up to 640",
        spill_bytes=200,
    ),
    # ------------------------------------------------------------------------------------------------- float32
    _measured("forward", (128, 64, 64, 4), (64, 64, 4, 1, None), 2, _NONE, "0.263 ms, general 0.274"),
    _measured(
        "backward",
        (64, 64, 32, 4),
        (64, 64, 4, 1, None),
        2,
        _NONE,
        "forward and backward 0.75 ms, general 1.21",
        spill_bytes=280,
    ),
)

#: tiles that spill nothing; in the reasons what a thread of the next better one spills, as ptxas counts it
RULES: tuple[WindowRule, ...] = (
    # ------------------------------------------------------------------------------------------------ forward, 16 bits
    _rule("forward", (128, 64, 32, 2), (64, 64, 4, 2, None), 4, _BIAS, "H200, 64 tokens: 0.243 ms", exact=True),
    _rule("forward", (128, 64, 32, 2), (64, 64, 8, 2, None), 2, _BIAS, "with 4 warps 128 bytes on sm_80"),
    _rule("forward", (128, 64, 64, 2), (64, 64, 8, 2, 248), 2, _BIAS, "with 4 warps 24 bytes", capability=100),
    _rule("forward", (128, 64, 64, 2), (64, 64, 8, 2, None), 2, _BIAS, "with 4 warps 8 bytes on sm_80"),
    _rule("forward", (128, 128, 64, 2), (64, 128, 8, 2, 248), 1, _BIAS, "with 4 warps 312 bytes", capability=100),
    _rule("forward", (128, 128, 64, 2), (64, 128, 8, 2, None), 1, _BIAS, "with 4 warps 16 bytes on sm_80", **_FULL),
    _rule("long forward", (192, 192, 32, 2), (64, 128, 4, 2, 248), 2, _BIAS, "255 registers", capability=100, **_FULL),
    _rule("long forward", (192, 144, 32, 2), (64, 128, 4, 2, None), 2, _BIAS, "160 keys spill 56 bytes", **_FULL),
    # ----------------------------------------------------------------------------------------------- backward, 16 bits
    _rule("backward", (64, 64, 32, 2), (64, 64, 8, 2, None), 1, _BIAS, "with 4 warps 48 bytes", capability=100),
    _rule("backward", (64, 64, 32, 2), (64, 64, 8, 1, None), 1, _BIAS, "in two stages 80 bytes on sm_80", exact=True),
    _rule("backward", (64, 64, 64, 2), (64, 64, 8, 1, 248), 1, _BIAS, "with 4 warps 8 bytes", capability=100),
    _rule(
        "backward",
        (64, 64, 64, 2),
        (64, 64, 8, 2, None),
        1,
        _BIAS,
        "narrower heads spill 96 bytes, every tile of sm_80 8 and more",
        capability=90,
        exact=True,
    ),
    _rule(
        "long dq", (192, 192, 32, 2), (64, 128, 8, 1, None), 1, _BIAS, "in two stages 8 bytes", capability=100, **_FULL
    ),
    _rule("long dkdv", (192, 192, 32, 2), (64, 64, 8, 2, None), 1, _BIAS, "225 registers", capability=100, **_FULL),
    # ------------------------------------------------------------------------------------------------- float32, Hopper
    _rule(
        "forward", (128, 64, 64, 4), (64, 64, 4, 1, None), 2, _NONE, "0.263 ms, general 0.274", capability=90, **_FULL
    ),
)
