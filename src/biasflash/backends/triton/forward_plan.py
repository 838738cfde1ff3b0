"""Which kernels a forward pass runs, over which buffers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import triton

from biasflash.backends.triton import forward, merge, tile_plan, widths, window_long_plan, window_plan
from biasflash.backends.triton.config import TileConfig
from biasflash.backends.triton.operands import Device, Launch, Layout, Operands, Slot
from biasflash.backends.triton.recipe import Recipe
from biasflash.problem import Problem, Term


@dataclass(frozen=True, kw_only=True)
class SplitRule:
    """When the keys of a query tile are shared out among programs, and among how many.

    A wave is as many programs as find room on the GPU at once. Overlap comes from several programs on one
    multiprocessor, so a GPU that is far from holding a wave waits most of the time; one that holds it gains nothing.
    """

    fill: float = 0.75  # of a wave: with more programs than that, keys stay in one piece
    goal: float = 2.0  # waves to make: the second evens out what the first leaves idle
    most_resident: int = 4  # programs on a multiprocessor beyond which overlap grows no more
    least_keys: int = 1024  # 16 tiles of 64 keys; one query over 4096 takes 9 us in 16 pieces, 54 in one
    keys_per_query: int = 8  # at least: sums grow with queries; 8 heads of 1k x 1k take 11 us, in 4 pieces 27
    piece_keys: int = 256  # at least: four tiles for each time that a query tile is loaded and its sums are stored
    scratch_bytes: int = 32 * 2**20  # stays in the L2 cache of an H200 (50 MB) until it is read again

    def enough_keys(self, queries: int) -> int:
        """From how many keys on so many queries share them out."""
        return max(self.least_keys, self.keys_per_query * queries)


RULE = SplitRule()


@dataclass(frozen=True, kw_only=True)
class Split:
    """``pieces`` of ``tiles`` key tiles each."""

    pieces: int
    tiles: int
    why: str


def resident(problem: Problem, tile: TileConfig) -> int:
    """About how many programs of a tile find room on a multiprocessor, by its 65,536 registers.

    A thread holds its part of out, of the scores and of the weights, and about 40 more; offline compiles for sm_90
    take 128 registers for 64 x 64 at width 64 (here 128) and 205 for 128 x 64 with 8 warps at width 128 (here 163).
    """
    threads = 32 * tile.warps
    held = tile.block_m * (widths.padded(problem.Dv) + 1.5 * tile.block_n) / threads
    registers = tile.registers or (255 if problem.dtype.itemsize == 4 else min(255, 40 + 1.1 * held))
    return max(1, int(65536 / (registers * threads)))


def choose_split(problem: Problem, tile: TileConfig, multiprocessors: int, rule: SplitRule) -> Split | None:
    """How to share out the keys, or None where one program walks over all keys of its query tile."""
    p = problem
    reach = p.N if p.causal_shift is None else min(p.N, max(0, p.M + p.causal_shift))  # keys that any query sees
    programs = triton.cdiv(p.M, tile.block_m) * p.batch_size * p.Hq
    wave = multiprocessors * min(rule.most_resident, resident(p, tile))
    if programs >= rule.fill * wave or reach < rule.enough_keys(p.M):
        return None
    row_bytes = 4 * p.batch_size * p.Hq * p.M * (p.Dv + 2)
    wanted = math.ceil(rule.goal * wave / programs)
    pieces = min(wanted, reach // rule.piece_keys, rule.scratch_bytes // row_bytes)
    if pieces < 2:
        return None
    tiles = triton.cdiv(triton.cdiv(reach, pieces), tile.block_n)
    keys = tiles * tile.block_n
    why = f"{programs} query tiles would not fill {multiprocessors} multiprocessors: pieces of {keys} keys"
    return Split(pieces=triton.cdiv(reach, keys), tiles=tiles, why=why)


def packed(
    problem: Problem, rows: Mapping[str, Layout], terms: Sequence[Layout]
) -> tuple[Problem, dict[str, Layout], list[Layout]] | None:
    """A call of one query and grouped heads, seen as one whose queries are the heads of a group; None for others.

    One tile then holds all query heads that read the same keys, instead of a tile of one row each. It is another view
    of the same tensors: ``(*B, 1, Hkv * group, D)`` as ``(*B, group, Hkv, D)``, ``(*B, Hkv * group, 1, N)`` as
    ``(*B, Hkv, group, N)``; rows of lse keep their order. Not where heads have masks of their own: a key that one of
    them hides must not be read for it, whatever is stored there.
    """
    p = problem
    group = p.Hq // p.Hkv
    hides_from_heads = any(t.kind == "keep" and t.shape[-3] != 1 for t in p.terms)
    if p.M != 1 or group == 1 or hides_from_heads or (p.causal_shift is not None and p.causal_shift < p.N - 1):
        return None

    def split_rows(layout: Layout) -> Layout:
        *batch, _, head, column = layout.strides
        return replace(layout, strides=(*batch, head, group * head, column))

    def split_term(term: Term, layout: Layout) -> tuple[Term, Layout]:
        *batch, heads, _, columns = term.shape
        *steps, head, _, column = layout.strides
        if heads == 1:
            return term, layout
        term = replace(term, shape=(*batch, p.Hkv, group, columns))
        return term, replace(layout, strides=(*steps, group * head, head, column))

    parts = [split_term(*pair) for pair in zip(p.terms, terms, strict=True)]
    problem = replace(p, M=group, Hq=p.Hkv, terms=tuple(term for term, _ in parts), causal_shift=None)
    changed = {name: split_rows(rows[name]) for name in ("q", "out")}
    return problem, {**rows, **changed}, [layout for _, layout in parts]


def forward_recipe(problem: Problem, device: Device, rows: Mapping[str, Layout], terms: Sequence[Layout]) -> Recipe:
    """One kernel; two where keys are split, three where masks are listed. ``rows`` holds q, k, v and out."""
    if problem.is_empty:
        return _whole(Operands(problem, device, rows, terms), None)
    problem, rows, terms = packed(problem, rows, terms) or (problem, rows, terms)
    ops = Operands(problem, device, rows, terms)
    windows = window_plan.forward_launch(ops) or window_long_plan.forward_launch(ops)
    if windows is not None:
        return Recipe(launches=(windows,))
    tile, _ = ops.tile("forward")
    split = choose_split(problem, tile, device.multiprocessors, RULE)
    if split is not None:
        return _pieces(ops, split)
    return _whole(ops, tile_plan.choose_lists(ops, {"forward": tile}, {}, tile_plan.RULE))


def _whole(ops: Operands, lists: tile_plan.TileLists | None) -> Recipe:
    heads = ops.problem.batch_size * ops.problem.Hq
    launch = ops.launch(
        forward.forward_kernel,
        "forward",
        ("q", "k", "v", "out"),
        lambda tile: triton.cdiv(ops.problem.M, tile.block_m) * heads,
        lse_ptr=Slot("lse"),
        low_ptr=Slot("low"),
        piece_tiles=0,
        SPLIT=False,
        **(lists.arguments("forward") if lists else tile_plan.trivial_arguments(ops)),
    )
    if lists is None:
        return Recipe(launches=(launch,))
    launch.why = f"{launch.why}; {lists.why()}"
    return Recipe(launches=(*lists.launches(), launch), scratch=tuple(lists.scratch().items()))


def redo(ops: Operands, flags_per_head: int) -> Launch:
    """Query tiles computed again where another kernel raised a flag: ``redo``, float32, one for every 64 queries."""
    p = ops.problem
    launch = ops.launch(
        forward.forward_kernel,
        "forward",
        ("q", "k", "v", "out"),
        lambda tile: triton.cdiv(p.M, tile.block_m) * p.batch_size * p.Hq,
        lse_ptr=Slot("lse"),
        low_ptr=Slot("low"),
        piece_tiles=0,
        SPLIT=False,
        REDO=True,
        redo_ptr=Slot("redo"),
        redo_pitch=flags_per_head,
        **tile_plan.trivial_arguments(ops),
    )
    launch.why = "only where weights overflowed"
    return launch


def _pieces(ops: Operands, split: Split) -> Recipe:
    p = ops.problem
    heads = p.batch_size * p.Hq
    count = split.pieces * heads * p.M
    parts = ops.launch(
        forward.forward_kernel,
        "forward",
        ("q", "k", "v", "out"),
        lambda tile: triton.cdiv(p.M, tile.block_m) * heads * split.pieces,
        out_ptr=Slot("piece_sums"),
        lse_ptr=Slot("piece_maxima"),
        low_ptr=Slot("piece_denominators"),
        piece_tiles=split.tiles,
        SPLIT=True,
        **tile_plan.trivial_arguments(ops),
    )
    parts.why = f"{parts.why}; {split.why}"
    return Recipe(
        launches=(parts, _merge(ops, split.pieces)),
        scratch=(("piece_sums", count * p.Dv), ("piece_maxima", count), ("piece_denominators", count)),
    )


def _merge(ops: Operands, pieces: int) -> Launch:
    """Many pieces: one row a program, so that decoding spreads; few: several rows. Both read about 32 KiB at a time."""
    p = ops.problem
    at_once, rows = (64, 1) if pieces > 8 else (8, 4)
    given = {**ops.numbers, **ops.constants}
    given |= {"acc_ptr": Slot("piece_sums"), "m_ptr": Slot("piece_maxima"), "l_ptr": Slot("piece_denominators")}
    given |= {"out_ptr": Slot("out"), "lse_ptr": Slot("lse"), "low_ptr": Slot("low")}
    given |= {"out_strides": ops.views["out"].codes, "OUT_VEC": ops.views["out"].vec}
    given |= {"pieces": pieces, "PIECES": at_once, "ROWS": rows}
    warps = 8 if at_once * given["BLOCK_DV"] > 8192 else 4
    return Launch(
        kernel=merge.merge_kernel,
        grid=triton.cdiv(p.M, rows) * p.batch_size * p.Hq,
        arguments={name: given[name] for name in merge.merge_kernel.arg_names},
        warps=warps,
        stages=1,
        tile=TileConfig(block_m=rows, block_n=at_once, warps=warps, stages=1),
        why=f"adds {pieces} pieces of each row, in order",
    )
