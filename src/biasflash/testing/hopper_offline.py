"""Compile launches of Hopper kernels without a GPU, and read the schedule of their loops out of the machine code."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend
from triton.runtime.jit import create_function_from_signature

from biasflash.backends.hopper.operands import DescriptorLaunch
from biasflash.testing.offline import Compiled

TARGET = GPUTarget("cuda", 90, 32)
_LINE = re.compile(r"^\s+/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\S+\s+)?([A-Z][\w.]*)\s*([^;]*);", re.MULTILINE)


@dataclass(frozen=True, kw_only=True)
class Loop:
    """An innermost loop around products: what one round of it executes."""

    start: int
    instructions: int
    products: int
    exponentials: int
    covered: int  # exponentials that run while a product is in flight
    spills: int  # instructions that store or load spilled registers
    waits: int  # for products

    def __str__(self) -> str:
        return (
            f"loop at {self.start:#x}: {self.instructions} instructions, {self.products} products, {self.covered} of "
            f"{self.exponentials} exponentials under one, {self.waits} waits, {self.spills} spill instructions"
        )


def packed(launch: DescriptorLaunch, tensors: Mapping[str, torch.Tensor]) -> tuple[Any, dict[str, Any], Any, Any]:
    """What Triton reads out of a launch's arguments: options, types by name, constants and attributes."""
    kernel, options = launch.kernel, launch.options(capped=False)
    backend: Any = make_backend(TARGET)
    bind: Any = create_function_from_signature(kernel.signature, kernel.params, backend)
    bound, specialised, _ = bind(*launch.values(tensors), **options)
    found: tuple[Any, dict[str, Any], Any, Any] = kernel._pack_args(backend, options, bound, specialised, options)
    return found


def compile_descriptor_launch(launch: DescriptorLaunch, tensors: Mapping[str, torch.Tensor]) -> Compiled:
    """Compile ``launch`` for an H200 the way a call on one would, descriptors included.

    ``tensors`` fills its slots and boxes; ``meta_tensors`` makes them. No driver is asked or replaced.
    """
    kernel = launch.kernel
    parsed, signature, constants, attributes = packed(launch, tensors)
    beside: Any = inspect.getmodule(type(kernel))  # Gluon's sources have a class of their own, next to its kernels'
    source = beside.GluonASTSource(kernel, signature, constants, attributes)
    binary = triton.compile(source, target=TARGET, options=parsed.__dict__)
    return Compiled(name=kernel.__name__, cubin=binary.asm["cubin"], shared=binary.metadata.shared)


def product_loops(sass: str) -> list[Loop]:
    """The innermost loops that issue warp-group products, in the order of the code.

    Waits for barriers spin behind the last EXIT and jump back: those jumps close no loop.
    """
    code = [(int(at, 16), word, rest) for at, word, rest in _LINE.findall(sass)]
    code = code[: max(i for i, line in enumerate(code) if line[1] == "EXIT")]
    spans = []
    for at, word, rest in code:
        target = re.fullmatch(r"(?:\S+, )?0x([0-9a-f]+)\s*", rest) if word.startswith("BRA") else None
        if target and int(target[1], 16) < at:
            spans.append((int(target[1], 16), at))
    bodies = {span: [line for line in code if span[0] <= line[0] <= span[1]] for span in spans}
    bodies = {span: body for span, body in bodies.items() if any(w.startswith("HGMMA") for _, w, _ in body)}
    inner = [a for a in bodies if not any(b != a and a[0] <= b[0] and b[1] <= a[1] for b in bodies)]
    return [_loop(start, bodies[start, end]) for start, end in sorted(inner)]


def _loop(start: int, body: list[tuple[int, str, str]]) -> Loop:
    """Two rounds, of which the second is counted: it starts with what the first leaves in flight."""
    flying = 0
    for _ in range(2):
        exponentials = covered = 0
        for _, word, rest in body:
            if word.startswith("HGMMA") and "gsb0" in rest:  # the last one of a product
                flying += 1
            elif word.startswith("WARPGROUP.DEPBAR"):
                flying = min(flying, int(rest.split(",")[1], 16))
            elif word.startswith("MUFU.EX2"):
                exponentials += 1
                covered += flying > 0
    return Loop(
        start=start,
        instructions=len(body),
        products=sum(word.startswith("HGMMA") for _, word, _ in body),
        exponentials=exponentials,
        covered=covered,
        spills=sum(word.startswith(("STL", "LDL")) for _, word, _ in body),
        waits=sum(word.startswith("WARPGROUP.DEPBAR") for _, word, _ in body),
    )
