"""The contract of the portable path: Triton kernels for every GPU that Triton compiles for."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from biasflash.backends.backend import Gradients, Promises
from biasflash.problem import MAX_WIDTH, Problem, short

PROMISES = Promises(
    devices="NVIDIA GPUs from compute capability 8.0",
    dtypes=(torch.float16, torch.bfloat16, torch.float32),
    max_width=MAX_WIDTH,
    deterministic=True,
    memory="O(M + N) a head",
    summary="fused kernels, bias gradients reduced inside them",
)


def interpreted() -> bool:
    """Whether Triton interprets kernels on CPU tensors (TRITON_INTERPRET=1), which is slow and meant for tests."""
    return os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "on", "yes")


def objections(problem: Problem) -> tuple[str, ...]:
    found = []
    if importlib.util.find_spec("triton") is None:
        found.append("Triton is not installed; pip install 'biasflash[gpu]'")
    if problem.device.type != "cuda" and not (problem.device.type == "cpu" and interpreted()):
        found.append(
            f"tensors are on {problem.device}; it takes CUDA tensors (or TRITON_INTERPRET=1 for tests on a CPU)"
        )
    if problem.dtype not in PROMISES.dtypes:
        found.append(f"dtype {short(problem.dtype)}; it takes {', '.join(map(short, PROMISES.dtypes))}")
    if problem.device.type == "cuda" and torch.cuda.is_available():
        major, minor = torch.cuda.get_device_capability(problem.device)
        if major < 8 and torch.version.hip is None:
            found.append(f"compute capability {major}.{minor}; it takes 8.0 and later")
    return tuple(found)


def on_device(device: torch.device) -> AbstractContextManager[object]:
    """Launches go to the tensors' GPU, which need not be the current one."""
    if device.type == "cuda" and device.index != torch.cuda.current_device():
        return torch.cuda.device(device)
    return nullcontext()


def reservations(problem: Problem) -> tuple[str, ...]:
    return ()


def describe(problem: Problem) -> tuple[str, ...]:
    from biasflash.backends.triton import launch

    return launch.describe(problem)


def forward(
    problem: Problem, q: Tensor, k: Tensor, v: Tensor, terms: Sequence[Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    from biasflash.backends.triton import launch

    with on_device(problem.device):
        return launch.run_forward(problem, q, k, v, terms)


def backward(
    problem: Problem,
    gradients: Gradients,
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    terms: Sequence[Tensor],
    out: Tensor,
    lse: Tensor,
    lse_low: Tensor,
) -> None:
    from biasflash.backends.triton import launch

    with on_device(problem.device):
        launch.run_backward(problem, gradients, dout, dlse, q, k, v, terms, out, lse, lse_low)
