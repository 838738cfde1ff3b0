"""Jit pieces: the inner-loop mathematics, each sentence once, shared by every kernel in either orientation.

A piece receives positions already shaped to broadcast: the forward pass hands ``q [M, 1]`` and ``k [1, N]``, the pass
that owns keys hands ``q [1, M]`` and ``k [N, 1]``. No piece transposes, launches or knows torch.
"""
