"""Which kernels a forward pass runs, over which buffers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import triton

from biasflash.backends.triton import forward
from biasflash.backends.triton.operands import Device, Layout, Operands, Slot
from biasflash.backends.triton.recipe import Recipe
from biasflash.problem import Problem


def forward_recipe(problem: Problem, device: Device, rows: Mapping[str, Layout], terms: Sequence[Layout]) -> Recipe:
    """One kernel. ``rows`` holds q, k, v and out."""
    ops = Operands(problem, device, rows, terms)
    heads = problem.batch_size * problem.Hq
    launch = ops.launch(
        forward.forward_kernel,
        "forward",
        ("q", "k", "v", "out"),
        lambda tile: triton.cdiv(problem.M, tile.block_m) * heads,
        lse_ptr=Slot("lse"),
        low_ptr=Slot("low"),
    )
    return Recipe(launches=(launch,))
