"""What kernels of several passes are made of: shared memory for boxes, tuples of tiles, 16-bit floats made wide."""

from biasflash.backends.hopper.gluon import gl, jit

NEG_INF = gl.constexpr(float("-inf"))


@jit
def slots(desc, COUNT: gl.constexpr):
    """Shared memory for COUNT boxes of a tensor."""
    return gl.allocate_shared_memory(desc.dtype, [COUNT] + desc.block_type.shape, desc.layout)  # noqa: RUF005


@jit
def added(values, value):
    """The tuple ``values`` and one entry more."""
    return values + (value,)  # noqa: RUF005 - what the compiler takes


@jit
def replaced(values, i: gl.constexpr, value):
    """The tuple ``values`` with entry ``i`` replaced."""
    out = ()
    for c in gl.static_range(len(values)):
        out = added(out, value if c == i else values[c])
    return out


@jit
def repeated(value, COUNT: gl.constexpr):
    """COUNT times the same value."""
    out = ()
    for _ in gl.static_range(COUNT):
        out = added(out, value)
    return out


@jit
def widen(tile):
    """16-bit floats -> float32. The two bfloat16 of a word are a shift and a mask away: one instruction each."""
    if tile.dtype == gl.bfloat16:
        halves: gl.constexpr = "shl.b32 $0, $2, 16;\n\tand.b32 $1, $2, 0xffff0000;"
        return gl.inline_asm_elementwise(halves, "=r,=r,r", [tile], dtype=gl.float32, is_pure=True, pack=2)
    else:
        return tile.to(gl.float32)


@jit
def minus_columns(x, like):
    """-x, a value for each column, in a tile as ``like``, which is 0: an accumulator to start from.

    Impure, so that no two registers become one: copies of them between two products would make the assembler wait for
    the first.
    """
    return gl.inline_asm_elementwise(
        "sub.rn.f32 $0, $2, $1;", "=f,f,f", [x[None, :], like], dtype=gl.float32, is_pure=False, pack=1
    )
