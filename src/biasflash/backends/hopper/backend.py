"""The contract of the Hopper path: kernels in Gluon for sm_90, portable ones wherever these do not serve."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

from biasflash.backends.backend import Gradients, Promises
from biasflash.backends.triton import backend as portable
from biasflash.problem import MAX_WIDTH, Problem

PROMISES = Promises(
    devices="NVIDIA GPUs of compute capability 9.0",
    dtypes=(torch.float16, torch.bfloat16),
    max_width=MAX_WIDTH,
    deterministic=True,
    memory="O(M + N) a head",
    summary="warp-specialised kernels, biases by bulk copies",
)


@cache
def _missing() -> str:
    """What of Gluon this Triton lacks, if anything."""
    try:
        importlib.import_module("biasflash.backends.hopper.gluon")
    except (ImportError, AttributeError) as error:
        return f"this Triton's Gluon cannot be used ({error}); it takes Triton 3.6 and later"
    return ""


def objections(problem: Problem) -> tuple[str, ...]:
    if importlib.util.find_spec("triton") is None:
        return ("Triton is not installed; pip install 'biasflash[gpu]'",)
    if problem.device.type != "cuda":
        return (f"tensors are on {problem.device}; it takes CUDA tensors",)
    if portable.interpreted():
        return ("TRITON_INTERPRET is set; its kernels cannot be interpreted",)
    if torch.version.hip is not None:
        return ("a ROCm build of torch; it takes CUDA",)
    if torch.cuda.is_available():
        major, minor = torch.cuda.get_device_capability(problem.device)
        if (major, minor) != (9, 0):
            return (f"compute capability {major}.{minor}; it takes 9.0",)
    missing = _missing()
    if missing:
        return (missing,)
    from biasflash.backends.hopper import objections as reasons

    return tuple(reasons.to_problem(problem))


def reservations(problem: Problem) -> tuple[str, ...]:
    from biasflash.backends.hopper import objections as reasons

    return tuple(reasons.to_size(problem))


def describe(problem: Problem) -> tuple[str, ...]:
    from biasflash.backends.hopper import launch

    return launch.describe(problem)


def forward(
    problem: Problem, q: Tensor, k: Tensor, v: Tensor, terms: Sequence[Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    from biasflash.backends.hopper import launch

    with portable.on_device(problem.device):
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
    from biasflash.backends.hopper import launch

    with portable.on_device(problem.device):
        launch.run_backward(problem, gradients, dout, dlse, q, k, v, terms, out, lse, lse_low)
