"""Masks of keys inside the kernels: what ``mark_keys_kernel`` wrote down, read, and applied to keys in shared memory.

``mask``: ``(caps_ptr, spans_ptr, caps_pitch, line_0, line_1)``, see ``key_mask.KeyMask``.

A hidden key may hold anything, NaN too. Its scores are cut to -inf, so that its weights are 0; but 0 times NaN is NaN.
What a product multiplies weights or score gradients with is therefore made 0 where it lies in shared memory: by the
copying warp, before it hands a tile over whose hidden keys hold such things (``is_fit`` says of which none does).
"""

from biasflash.backends.hopper.gluon import fence_async_shared, gl, jit, mbarrier
from biasflash.backends.hopper.mark_keys import MARK


@jit
def line_of(b0, b1, mask):
    """The mask's line of a batch item."""
    return b0 * mask[3] + b1 * mask[4]


@jit
def item_line(b, inner, mask):
    """``line_of`` batch item ``b`` of all; ``inner``: size of the second batch axis."""
    b0 = b // inner
    return line_of(b0, b - b0 * inner, mask)


@jit
def last_key(line, N, mask):
    """The end of the last tile of 64 keys in which one is visible, N at most; 0 where none is."""
    _caps, spans_ptr, pitch, _, _ = mask
    tiles = gl.load(spans_ptr + line.to(gl.int64) * (pitch // MARK + 1)).to(gl.int32)
    return gl.minimum(tiles * MARK, N)


@jit
def last_key_of(b, inner, N, mask, ROWS: gl.constexpr):
    """The largest ``last_key`` of ROWS batch items from ``b`` on."""
    last = last_key(item_line(b, inner, mask), N, mask)
    for g in gl.static_range(1, ROWS):
        last = gl.maximum(last, last_key(item_line(b + g, inner, mask), N, mask))
    return last


@jit
def least_code(line, column, mask, BLOCK: gl.constexpr):
    """The least of the codes of ``mark_keys_kernel`` and ``mark_unfit_kernel`` for BLOCK keys from ``column`` on."""
    _caps, spans_ptr, pitch, _, _ = mask
    at = spans_ptr + line.to(gl.int64) * (pitch // MARK + 1) + 1 + column // MARK
    code = gl.load(at)
    for i in gl.static_range(1, BLOCK // MARK):
        code = gl.minimum(code, gl.load(at + i))
    return code


@jit
def is_whole(line, column, mask, BLOCK: gl.constexpr):
    """Whether no key from ``column`` to ``column + BLOCK - 1`` is hidden; ``column`` is a multiple of BLOCK."""
    return least_code(line, column, mask, BLOCK) > 0.0


@jit
def is_fit(line, column, mask, BLOCK: gl.constexpr):
    """Whether these keys may enter products as they are: a weight of 0 makes hidden ones 0."""
    return least_code(line, column, mask, BLOCK) >= 0.0


@jit
def cleared(x, caps):
    """16-bit ``x`` with zeros where float32 ``caps`` of the same shape is -inf; one instruction for two."""
    where: gl.constexpr = (
        "{ .reg .pred seen; setp.gt.f32 seen, $2, 0f00000000; selp.b32 $0, $1, 0, seen; }"  # a word lies in one row
    )
    return gl.inline_asm_elementwise(where, "=r,r,f,f", [x, caps], dtype=x.dtype, is_pure=True, pack=2)


@jit
def blank_hidden(tile, line, column, mask, BLOCK: gl.constexpr, WIDTH: gl.constexpr):
    """Zeros for hidden keys in ``tile`` [BLOCK, WIDTH], which begins with key ``column``; called by one warp.

    The tile's copy must have landed. A fence is included: what reads the tile next may be a product.
    """
    caps_ptr, _spans, pitch, _, _ = mask
    ROWS: gl.constexpr = 8  # the period of the swizzle
    COLUMNS: gl.constexpr = 64 if WIDTH > 64 else WIDTH  # the copying warp has 24 registers
    L: gl.constexpr = gl.BlockedLayout([1, 8], [256 // COLUMNS, COLUMNS // 8], [1, 1], [1, 0])
    caps_ptr += line.to(gl.int64) * pitch + column + gl.arange(0, ROWS, gl.SliceLayout(1, L))
    for i in gl.static_range(BLOCK // ROWS):
        seen = gl.load(caps_ptr + i * ROWS)[:, None]
        for c in gl.static_range(WIDTH // COLUMNS):
            piece = tile.slice(i * ROWS, ROWS, dim=0).slice(c * COLUMNS, COLUMNS, dim=1)
            x = piece.load(L)
            piece.store(cleared(x, gl.broadcast(seen, x)[0]))
    fence_async_shared()


@jit
def copied_blank(landed, turn, tile, line, column, mask, full, BLOCK: gl.constexpr, WIDTH: gl.constexpr):
    """Wait for the ``turn``-th copy that was announced to ``landed``, blank its tile and announce it to ``full``."""
    mbarrier.wait(landed, turn & 1)
    blank_hidden(tile, line, column, mask, BLOCK, WIDTH)
    mbarrier.arrive(full, count=1)
