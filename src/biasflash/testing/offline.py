"""Compile kernels for a GPU that is not here: registers, spills, shared memory and machine code of a ``Launch``.

And know without compiling whether Triton would compile a launch anew: ``compile_key``.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import BaseBackend, GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import create_function_from_signature

from biasflash.backends.triton.ahead import meta_tensors as meta_tensors
from biasflash.backends.triton.operands import Launch

_POINTERS = {
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.float32: "*fp32",
    torch.float64: "*fp64",
    torch.uint8: "*u8",
}


@dataclass(frozen=True)
class Compiled:
    """What the compiler made of one launch."""

    name: str
    cubin: bytes
    shared: int

    def _cuobjdump(self, *flags: str) -> str:
        tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(self.cubin)
            file.flush()
            return subprocess.run([str(tool), *flags, file.name], check=True, capture_output=True, text=True).stdout

    @cached_property
    def resources(self) -> dict[str, int]:
        """REG, STACK (bytes spilled or indexed a thread), SHARED, LOCAL as the assembler counted them."""
        line = next(x for x in self._cuobjdump("--dump-resource-usage").splitlines() if "REG:" in x)
        return {name: int(value) for name, value in re.findall(r"(REG|STACK|SHARED|LOCAL):(\d+)", line)}

    @cached_property
    def sass(self) -> str:
        return self._cuobjdump("--dump-sass")


def _describe(value: Any, path: tuple[int, ...], attributes: dict[tuple[int, ...], list[list[object]]]) -> Any:
    """Triton's type word of an argument; notes 16-byte aligned addresses the way a launch would."""
    if isinstance(value, torch.Tensor):
        if value.data_ptr() % 16 == 0:
            attributes[path] = [["tt.divisibility", 16]]
        return _POINTERS[value.dtype]
    if isinstance(value, tuple):
        return tuple(_describe(item, (*path, i), attributes) for i, item in enumerate(value))
    if isinstance(value, float):
        return "fp32"
    return "i32" if -(2**31) <= value < 2**31 else "i64"


@cache
def _binder(kernel: Any) -> Any:
    """Triton's own function from a call's arguments to what it specialises on; the part that needs no driver."""
    return create_function_from_signature(kernel.signature, kernel.params, BaseBackend)


def compile_key(launch: Launch, tensors: Mapping[str, torch.Tensor]) -> tuple[tuple[str, object], ...]:
    """What Triton looks a compiled kernel up by: launches of equal keys share one, a new key is a new compile.

    Pairs of a name and what counts of it: ``kernel``, then every argument with its type word and what Triton looks at
    (the value of a constant, the alignment of a pointer, whether an integer is 1 or divisible by 16), then ``options``.
    ``tensors`` as in ``compile_launch``. Needs kernels that are compiled, not interpreted.
    """
    kernel = launch.kernel
    _, specialised, options = _binder(kernel)(*launch.values(tensors), **launch.options(capped=True))
    arguments = zip((p.name for p in kernel.params), specialised, strict=True)
    return ("kernel", kernel.__name__), *arguments, ("options", tuple(options.items()))


def compile_launch(launch: Launch, tensors: Mapping[str, torch.Tensor], capability: int) -> Compiled:
    """Compile ``launch`` for an NVIDIA GPU of ``capability`` (80, 90, 100) without a GPU.

    ``tensors`` fills its slots; ``meta_tensors`` makes them.
    """
    kernel = launch.kernel
    signature: dict[str, Any] = {}
    constants: dict[tuple[int, ...], Any] = {}
    attributes: dict[tuple[int, ...], list[list[object]]] = {}
    for i, (parameter, value) in enumerate(zip(kernel.params, launch.values(tensors), strict=True)):
        if parameter.is_constexpr:
            signature[parameter.name] = "constexpr"
            constants[(i,)] = value
        else:
            signature[parameter.name] = _describe(value, (i,), attributes)
    source = ASTSource(kernel, signature=signature, constexprs=constants, attrs=attributes)
    binary = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=launch.options(capped=True))
    return Compiled(name=kernel.__name__, cubin=binary.asm["cubin"], shared=binary.metadata.shared)
