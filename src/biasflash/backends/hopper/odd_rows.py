"""Tiles of a 16-bit bias whose rows are not in steps of 16 bytes, by bulk copies all the same.

The copy engine wants strides of whole 16 bytes, and boxes that begin at such: one that begins in between stops the
kernel ("illegal instruction" on an H200). Eight rows of any length are whole 16 bytes. So the bias is described as
lines of eight rows, ``[rows / 8, 8 pitch]``: a box of eight lines that begins in the ``i``-th of their rows, or up to
seven elements before it, holds rows i, i + 8, ..., i + 56. Eight such boxes are the 64 rows of a tile, sorted by their
number modulo 8, and one vector of 16 bytes more ends each row. They land in a place of their own; four warps put the
rows in order, shifted to where they begin, and hand the tile over. Who computes cannot tell it from one that came in
one copy.

What the engine cannot know: where a row ends (the next one follows in the same line), and what is in rows that do not
fill a line. Tiles at the edges are completed (``_complete``), with zeros outside of the bias as in any box.

``odd``: ``(bias_ptr, pitch, whole, step_0, step_1, step_h)``; ``pitch``: elements from a row to the next; ``whole``:
rows of the tensor, all planes counted, that lie in whole lines; steps: rows from one plane to the next along b0, b1 and
head, 0 where the bias is broadcast.
"""

from typing import Any

from triton import constexpr_function

from biasflash.backends.hopper.gluon import barrier, gl, jit, mbarrier, seen_as, tma_load
from biasflash.backends.hopper.pipeline import hand_back, wait_empty, wait_full

TILE = gl.constexpr(64)  # rows
LINE = gl.constexpr(8)  # rows of a line, and lines of a box
CHUNK = gl.constexpr(64)  # columns of a box: 128 bytes, the swizzle's width
WORDS = gl.constexpr(32)  # of two elements in as many columns
VECTOR = gl.constexpr(8)  # elements in 16 bytes


@constexpr_function
def _layout(shape: Any, dtype: Any) -> Any:
    return gl.NVMMASharedLayout.get_default_for([int(n) for n in shape], dtype)


@jit
def odd_slots(dtype: gl.constexpr, COUNT: gl.constexpr, COLUMNS: gl.constexpr):
    """Shared memory for COUNT tiles, as ``pieces.slots`` of boxes ``[1, 1, 1, 64, COLUMNS]``."""
    LAYOUT: gl.constexpr = _layout([1, 1, 1, TILE, COLUMNS], dtype)
    return gl.allocate_shared_memory(dtype, [COUNT, 1, 1, 1, TILE, COLUMNS], LAYOUT)


@jit
def raw_slots(dtype: gl.constexpr, COUNT: gl.constexpr, COLUMNS: gl.constexpr):
    """For COUNT tiles as they land: boxes, and the vectors that end their rows."""
    BOXES: gl.constexpr = COUNT * (COLUMNS // CHUNK) * LINE
    boxes = gl.allocate_shared_memory(dtype, [BOXES, LINE, CHUNK], _layout([LINE, CHUNK], dtype))
    ends = gl.allocate_shared_memory(dtype, [COUNT * LINE, LINE, VECTOR], _layout([LINE, VECTOR], dtype))
    return boxes, ends


@jit
def first_row(b0, b1, head, row, odd):
    """A row of a plane, counted over all planes."""
    return b0 * odd[3] + b1 * odd[4] + head * odd[5] + row


@jit
def copy_odd(descs, flat, column, odd, landed, raw, slot, COLUMNS: gl.constexpr):
    """Start the copies of rows ``flat`` to ``flat + 63``, counted over all planes, into the raw tile at ``slot``.

    ``landed`` must expect 64 rows of COLUMNS and a vector. By one warp.
    """
    boxes, ends = raw
    CHUNKS: gl.constexpr = COLUMNS // CHUNK
    for i in range(LINE):  # not unrolled: the coordinates of all copies at once do not fit the warp's registers
        line = (flat + i) >> 3
        start = (((flat + i) & 7) * odd[1] + column) & -VECTOR
        for c in gl.static_range(CHUNKS):
            tma_load(descs[0], [line, start + c * CHUNK], landed, boxes.index((slot * CHUNKS + c) * LINE + i))
        tma_load(descs[1], [line, start + COLUMNS], landed, ends.index(slot * LINE + i))


@jit
def _in_words(tiles, COUNT: gl.constexpr):
    """The same memory as COUNT chunks of 64 rows x 128 bytes."""
    return seen_as(tiles, gl.int32, [COUNT, TILE, WORDS], _layout([TILE, WORDS], gl.int32))


@constexpr_function
def _shift_code() -> str:
    """Of ``_shifted``, in PTX: outputs 0 to 7, words 8 to 15, those after the row 16 to 23, shift 24."""
    word = [f"${8 + k}" for k in range(8)] + [f"w{k}" for k in range(4)]
    code = [".reg .pred within, p;", ".reg .b32 w<4>, a<10>, f, s;"]
    for k in range(4):  # the first vector of the next lane, or after the last of four what follows the row
        code.append(f"shfl.sync.down.b32 w{k}|within, {word[k]}, 1, 0x1c1f, 0xffffffff;")
        code.append(f"shfl.sync.idx.b32 f, ${16 + k}, 0, 0x1c1f, 0xffffffff;")
        code.append(f"@!within mov.b32 w{k}, f;")
    code += ["and.b32 s, $24, 8;", "setp.ne.b32 p, s, 0;"]
    code += [f"selp.b32 a{k}, {word[k + 2]}, {word[k]}, p;" for k in range(10)]
    code += ["and.b32 s, $24, 4;", "setp.ne.b32 p, s, 0;"]
    code += [f"selp.b32 a{k}, a{k + 1}, a{k}, p;" for k in range(9)]
    code += ["shl.b32 s, $24, 3;"]
    code += [f"shf.r.wrap.b32 ${k}, a{k}, a{k + 1}, s;" for k in range(8)]
    return "{" + "\n".join(code) + "}"


@jit
def _shifted(x, after, shift):
    """Words [64, 32], eight neighbours a thread, each ``shift`` bytes further on in its row.

    After the last of a row come the first four of ``after``, words of the same shape.
    """
    CODE: gl.constexpr = _shift_code()
    OPERANDS: gl.constexpr = "=r,=r,=r,=r,=r,=r,=r,=r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r"
    return gl.inline_asm_elementwise(CODE, OPERANDS, [x, after, shift], dtype=gl.int32, is_pure=False, pack=8)


@jit
def order_odd(flat, row, column, M, N, odd, raw, raw_slot, tiles, slot, COLUMNS: gl.constexpr):
    """Put the raw tile at ``raw_slot`` in order at ``slot``; ``row`` of the plane is ``flat`` of all planes.

    By four warps.
    """
    CHUNKS: gl.constexpr = COLUMNS // CHUNK
    L: gl.constexpr = gl.BlockedLayout([1, 8], [8, 4], [4, 1], [1, 0])
    E: gl.constexpr = gl.BlockedLayout([1, 2, 4], [8, 4, 1], [4, 1, 1], [2, 1, 0])
    boxes, ends = raw
    lines = _in_words(boxes, boxes.shape[0] // LINE)
    last: gl.constexpr = ends.shape[0] // LINE
    vectors = seen_as(ends, gl.int32, [last, TILE, 1, 4], gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0]))
    rows = _in_words(tiles, tiles.shape[0] * CHUNKS)
    residue = gl.arange(0, TILE, layout=gl.SliceLayout(1, L)) // LINE
    first = ((flat + residue) & 7) * odd[1] + column
    shift = ((first & (VECTOR - 1)) * 2)[:, None] + gl.zeros([TILE, WORDS], gl.int32, layout=L)
    x = lines.index(raw_slot * CHUNKS).load(L)
    for c in gl.static_range(CHUNKS):
        if c + 1 < CHUNKS:
            after = lines.index(raw_slot * CHUNKS + c + 1).load(L)
        else:
            end = vectors.index(raw_slot).load(E) + gl.zeros([TILE, WORDS // 4, 4], gl.int32, layout=E)
            after = gl.convert_layout(end.reshape([TILE, WORDS]), L, assert_trivial=True)
        y = _shifted(x, after, shift).reshape([LINE, LINE, WORDS]).permute((1, 0, 2)).reshape([TILE, WORDS])
        rows.index(slot * CHUNKS + c).store(y)
        x = after
    if (row + TILE > M) | (column + COLUMNS > N) | (flat + TILE > odd[2]):
        _complete(flat, row, column, M, N, odd, tiles, slot, COLUMNS)


@jit
def _complete(flat, row, column, M, N, odd, tiles, slot, COLUMNS: gl.constexpr):
    """Zeros outside of the plane; rows that lie in no whole line are read element by element."""
    COUNT: gl.constexpr = TILE // LINE * (COLUMNS // CHUNK)
    L: gl.constexpr = gl.BlockedLayout([1, 4], [2, 16], [4, 1], [1, 0])
    ALL: gl.constexpr = tiles.shape[0] * COUNT
    parts = seen_as(tiles, tiles.dtype, [ALL, LINE, CHUNK], _layout([LINE, CHUNK], tiles.dtype))
    for i in range(COUNT):
        y = i % (TILE // LINE) * LINE + gl.arange(0, LINE, layout=gl.SliceLayout(1, L))
        n = column + i // (TILE // LINE) * CHUNK + gl.arange(0, CHUNK, layout=gl.SliceLayout(0, L))
        inside = (row + y < M)[:, None] & (n < N)[None, :]
        late = inside & (flat + y >= odd[2])[:, None]
        at = (flat + y).to(gl.int64) * odd[1]
        part = parts.index(slot * COUNT + i)
        x = gl.where(late, gl.load(odd[0] + (at[:, None] + n[None, :]), mask=late, other=0.0), part.load(L))
        part.store(gl.where(inside, x, 0.0))


@jit
def hand_over(
    use, flat, row, column, down, right, M, N, odd, raw, raw_bars, tiles, full, empty,
    RAW_STAGES: gl.constexpr, STAGES: gl.constexpr, COLUMNS: gl.constexpr,
):  # fmt: skip
    """The ``use``-th pair of tiles, put in order; the second begins ``down`` rows, ``right`` columns from the first."""
    wait_full(raw_bars[0], use, RAW_STAGES)
    wait_empty(empty, use, STAGES)
    for w in range(2):
        order_odd(
            flat + w * down, row + w * down, column + w * right, M, N, odd, raw, use % RAW_STAGES * 2 + w, tiles,
            use % STAGES * 2 + w, COLUMNS,
        )  # fmt: skip
    barrier()
    hand_back(raw_bars[1], use, RAW_STAGES)
    mbarrier.arrive(full.index(use % STAGES), count=1)
