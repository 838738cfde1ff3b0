"""``biasflash explain``: which backend a call of given shapes would take, and why, without making a tensor."""

from __future__ import annotations

import dataclasses
from typing import Annotated

import torch
import typer
from rich.console import Console

from biasflash import plan, problem
from biasflash.cli.machine import pick_device
from biasflash.testing.case import DTYPES


def _sizes(name: str, text: str) -> tuple[int, ...]:
    try:
        found = tuple(int(part) for part in text.split(",")) if text else ()
    except ValueError:
        found = (-1,)
    if any(size < 0 for size in found):
        raise typer.BadParameter(f"{name}={text!r}: wanted sizes with commas between them, such as 2,128,8,64")
    return found


def _dtype(text: str) -> torch.dtype:
    if text not in DTYPES:
        raise typer.BadParameter(f"dtype {text!r} is unknown; accepted: {', '.join(DTYPES)}")
    return DTYPES[text]


def _bias(text: str, dtype: torch.dtype) -> torch.Tensor:
    """``"1,8,128,128"``, with ``:fp32`` and ``:frozen`` behind it as wanted."""
    sizes, *words = text.split(":")
    frozen = "frozen" in words
    for word in words:
        if word != "frozen":
            dtype = _dtype(word)
    return torch.empty(_sizes("--bias", sizes), dtype=dtype, device="meta", requires_grad=not frozen)


def _causal(text: str | None) -> bool | str:
    if text is None:
        return False
    if text not in problem.CAUSAL[1:]:
        raise typer.BadParameter(f"--causal={text!r}: wanted {' or '.join(problem.CAUSAL[1:])}")
    return text


def explain(
    q: Annotated[str, typer.Option(help="Shape of q, *B M Hq D: for example 2,128,8,64.")],
    k: Annotated[str | None, typer.Option(help="Shape of k, *B N Hkv D. Default: q's.")] = None,
    v: Annotated[str | None, typer.Option(help="Shape of v, *B N Hkv Dv. Default: k's.")] = None,
    bias: Annotated[
        list[str] | None,
        typer.Option(
            help="Shape of a bias, broadcast to *B Hq M N: 1,8,128,128; with :fp32 for its dtype and :frozen if it "
            "does not train. May be repeated."
        ),
    ] = None,
    mask: Annotated[list[str] | None, typer.Option(help="Shape of a boolean mask. May be repeated.")] = None,
    dtype: Annotated[str, typer.Option(help="fp16, bf16, fp32 or fp64.")] = "bf16",
    device: Annotated[str | None, typer.Option(help="cuda or cpu. Default: cuda if there is one.")] = None,
    causal: Annotated[str | None, typer.Option(help="bottom-right or top-left.")] = None,
    scale: Annotated[float | None, typer.Option(help="Factor on the products. Default: 1/sqrt(D).")] = None,
    grad: Annotated[bool, typer.Option(help="Whether q, k and v want gradients.")] = True,
    backend: Annotated[str | None, typer.Option(help="Ask for this backend. Default: biasflash chooses.")] = None,
) -> None:
    """Say which backend and which kernels a call of these shapes would take, and why the others were passed over.

    No tensor is made. Exit code 1 if no backend can compute the call, 2 if the call is wrong.

    Example: biasflash explain --q 2,128,8,64 --bias 1,8,128,128:fp32 --causal bottom-right
    """
    real = _dtype(dtype)
    place = pick_device(device)
    k = q if k is None else k
    shapes = [_sizes("--q", q), _sizes("--k", k), _sizes("--v", k if v is None else v)]
    query, key, value = (torch.empty(shape, dtype=real, device="meta", requires_grad=grad) for shape in shapes)
    biases = [_bias(text, real) for text in bias or ()]
    masks = [torch.empty(_sizes("--mask", text), dtype=torch.bool, device="meta") for text in mask or ()]
    try:
        plan.check_backend(backend)
        problem.check_inputs(problem.ATTENTION, (query, key, value))
        terms, kinds = problem.gather_terms(biases, masks, query, key)
        alignment = problem.check_causal(_causal(causal))
        facts = problem.build(query, key, value, terms, kinds, alignment, problem.check_scale(scale))
        facts = dataclasses.replace(facts, device=place)
    except (ValueError, TypeError, problem.UnsupportedError) as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(2) from error
    found = plan.explain(facts, backend)
    Console(soft_wrap=True, markup=False, highlight=False).print(str(found))
    if found.backend is None:
        raise typer.Exit(1)
