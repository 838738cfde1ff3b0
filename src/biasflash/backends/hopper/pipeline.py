"""Rings of buffers between the warp that copies and the warpgroups that compute.

The ``i``-th use of a ring of STAGES buffers takes slot ``i % STAGES``. Its ``full`` barrier completes when the copy has
landed, its ``empty`` barrier when every reader has handed the slot back; both flip a parity bit at each use.

A reader hands a slot back only once what it read is in registers or has gone through a finished product: an ``arrive``
does not wait for loads in flight, and a slot handed back too early is overwritten under them.
"""

from biasflash.backends.hopper.gluon import gl, jit, mbarrier


@jit
def ring_barriers(STAGES: gl.constexpr):
    """Uninitialised barriers of one ring."""
    return gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())


@jit
def start_ring(full, empty, STAGES: gl.constexpr, READERS: gl.constexpr):
    """One copy fills a slot, READERS warpgroups hand it back. A fence must follow before anyone waits."""
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=READERS)


@jit
def wait_full(full, i, STAGES: gl.constexpr):
    """Wait until use ``i`` has landed."""
    mbarrier.wait(full.index(i % STAGES), (i // STAGES) & 1)


@jit
def wait_full_if(full, i, wanted, STAGES: gl.constexpr):
    """``wait_full`` where ``wanted``."""
    mbarrier.wait(full.index(i % STAGES), (i // STAGES) & 1, pred=wanted)


@jit
def wait_empty(empty, i, STAGES: gl.constexpr):
    """Wait until the readers of use ``i - STAGES`` have handed the slot back; the first uses do not wait."""
    mbarrier.wait(empty.index(i % STAGES), ((i // STAGES) & 1) ^ 1)


@jit
def hand_back(empty, i, STAGES: gl.constexpr):
    """One reader is done with use ``i``; called by a whole warpgroup."""
    mbarrier.arrive(empty.index(i % STAGES), count=1)


@jit
def start_turns(turns, COUNT: gl.constexpr):
    """A barrier for each of COUNT warpgroups that take turns. A fence must follow before anyone waits."""
    for i in gl.static_range(COUNT):
        mbarrier.init(turns.index(i), count=1)


@jit
def wait_turn(w: gl.constexpr, turns, n):
    """Warpgroup ``w`` waits for its ``n``-th turn: after the one before it, the first after the last one's ``n - 1``.

    Warpgroups that meet the same tiles would else fall into step, and all of them want the same unit at a time.
    """
    mbarrier.wait(turns.index(w), (n + (1 if w == 0 else 0)) & 1)


@jit
def pass_turn(w: gl.constexpr, turns, COUNT: gl.constexpr):
    """The turn goes on to the warpgroup after ``w``."""
    mbarrier.arrive(turns.index((w + 1) % COUNT), count=1)


@jit
def at(b0, b1, head, row, column, moves):
    """Coordinates in a tensor ``(b0, b1, head, row, column)``.

    Bits 0, 1 and 2 of ``moves`` are for the first three axes: 0 where the tensor is broadcast.
    """
    return [b0 * (moves & 1), b1 * ((moves >> 1) & 1), head * ((moves >> 2) & 1), row, column]
