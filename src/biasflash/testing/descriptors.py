"""Where Hopper's matrix products read shared memory, followed through the machine code of one kernel.

ptxas 12.8 was seen to hand the products of float32 kernels that fill all registers descriptors made of the wrong
uniform register, or of one that nothing was ever written to: an illegal access or NaN on the GPU, and nothing at all in
an interpreter. So the scalar registers of a listing are evaluated here, in order, and every descriptor is looked at.

A descriptor's low word holds the address in units of 16 bytes (bits 0 to 13) and the leading offset (from bit 16 on);
its high word the stride offset in units of 16 bytes (bits 0 to 13) and the swizzle mode (bits 30 and 31): PTX ISA,
"Matrix Descriptor Format" of ``wgmma``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

_WORD = 0xFFFFFFFF
_FIRST_BYTE = 0x400  # shared memory starts behind 1 KiB that the system keeps
_STRIDES = tuple(2**i for i in range(8))
#: what a uniform register holds that is read before anything was written to it
NOTHING = -1
_INSTRUCTION = re.compile(r"/\*([0-9a-f]{4,})\*/\s+(@!?U?P\w+\s+)?([A-Z0-9_.]+)\s*(.*?)\s*;")


@dataclass(frozen=True)
class Descriptor:
    """One operand of one product: where in the code, and its two words (None: not followed, ``NOTHING``)."""

    at: str
    low: int | None
    high: int | None

    def is_inside(self, shared: int) -> bool:
        """Whether what is known points into ``shared`` bytes of shared memory, with a stride that a tile can have."""
        if NOTHING in (self.low, self.high):
            return False
        fits = self.low is None or _FIRST_BYTE <= (self.low & 0x3FFF) << 4 < _FIRST_BYTE + shared
        return fits and (self.high is None or (not self.high & 0x3FFF0000 and self.high & 0x3FFF in _STRIDES))


@dataclass
class _Registers:
    """Values of scalar registers as far as they are known, and of the carries between halves of 64-bit sums."""

    values: dict[str, int | None] = field(default_factory=dict)
    carries: dict[str, int | None] = field(default_factory=dict)

    def read(self, operand: str) -> int | None:
        name = operand.replace(".reuse", "")
        if name in ("URZ", "RZ"):
            return 0
        if re.fullmatch(r"-?0x[0-9a-f]+", name):
            return int(name, 16) & _WORD
        value = self._held(name.removeprefix("-"))
        if value is None or value == NOTHING:
            return value
        return -value & _WORD if name.startswith("-") else value

    def _held(self, name: str) -> int | None:
        return self.values.get(name, NOTHING if re.fullmatch(r"UR\d+", name) else None)

    def read_pair(self, operand: str) -> int | None:
        """A 64-bit operand: a constant, or a register and its successor."""
        if re.fullmatch(r"-?0x[0-9a-f]+", operand):
            return int(operand, 16)
        if operand == "URZ":
            return 0
        if not re.fullmatch(r"U?R\d+", operand):
            return None
        low, high = (self._held(name) for name in _pair(operand))
        if NOTHING in (low, high):
            return NOTHING
        return None if low is None or high is None else low | high << 32


def _pair(register: str) -> tuple[str, str]:
    found = re.fullmatch(r"(U?R)(\d+)", register)
    assert found is not None, register
    return register, f"{found[1]}{int(found[2]) + 1}"


def _instructions(sass: str) -> Iterator[tuple[str, bool, str, list[str]]]:
    for line in sass.splitlines():
        found = _INSTRUCTION.search(line)
        if found:
            yield found[1], bool(found[2]), found[3], [x.strip() for x in found[4].split(",")]


def _add(registers: _Registers, operation: str, operands: list[str]) -> int | None:
    """The sum of three operands; a carry goes to, or comes from, a predicate."""
    rest = list(operands)
    outputs = []
    while rest and re.fullmatch(r"UP\w", rest[0]):
        outputs.append(rest.pop(0))
    terms = [registers.read(x) for x in rest[:3]]
    if operation.endswith(".X"):
        terms += [registers.carries.get(x) for x in rest[3:] if re.fullmatch(r"UP\d", x)]
    known = [x for x in terms if x is not None]
    total = sum(known) if len(known) == len(terms) else None
    for name in outputs:
        registers.carries[name] = None if total is None else total >> 32
    return None if total is None else total & _WORD


def _logic(values: list[int | None], table: int) -> int | None:
    """Bitwise function of three words by its table of eight bits."""
    known = [x for x in values if x is not None]
    if len(known) < 3:
        return None
    result = 0
    for row in range(8):
        if table >> row & 1:
            term = _WORD
            for value, bit in zip(known, (4, 2, 1), strict=True):
                term &= value if row & bit else ~value & _WORD
            result |= term
    return result


def _evaluate(registers: _Registers, operation: str, operands: list[str]) -> int | None:
    """What an instruction writes, if it is one of those that descriptors are made with."""
    read, inputs = registers.read, operands[1:]
    if NOTHING in map(read, inputs):
        return NOTHING
    if operation in ("UMOV", "MOV", "R2UR", "IMAD.MOV.U32"):
        return read(operands[-1])
    if operation == "S2UR":
        return 0  # the block's index in its cluster of one
    if operation == "IMAD.U32" and inputs[:2] == ["RZ", "RZ"]:
        return read(inputs[2])
    if operation == "ULEA" and len(inputs) == 3:
        low, base = read(inputs[0]), read(inputs[1])
        return None if low is None or base is None else ((low << int(inputs[2], 16)) + base) & _WORD
    if operation in ("UIADD3", "UIADD3.X"):
        return _add(registers, operation, inputs)
    if operation == "USHF.R.U32.HI" and inputs[0] == "URZ":
        value = read(inputs[2])
        return None if value is None else value >> int(inputs[1], 16)
    if operation == "USGXT.U32":
        value = read(inputs[0])
        return None if value is None else value & ((1 << int(inputs[1], 16)) - 1)
    if operation == "ULOP3.LUT":
        return _logic([read(x) for x in inputs[:3]], int(inputs[3], 16))
    return None


def _step(registers: _Registers, guarded: bool, operation: str, operands: list[str]) -> None:
    target = operands[0] if operands else ""
    if not re.fullmatch(r"U?R\d+", target):
        return
    wide = operation.endswith((".WIDE", ".WIDE.U32", ".64"))
    if operation == "UIADD3.64":
        low, high = _pair(target)
        terms = [registers.read_pair(x) for x in operands[1:4]]
        if NOTHING in terms:
            registers.values[low] = registers.values[high] = NOTHING
            return
        known = [x for x in terms if x is not None]
        total = sum(known) % 2**64 if len(known) == len(terms) and not guarded else None
        registers.values[low] = None if total is None else total & _WORD
        registers.values[high] = None if total is None else total >> 32
        return
    try:
        registers.values[target] = None if guarded or wide else _evaluate(registers, operation, operands)
    except (ValueError, IndexError):  # an operand of a form that no descriptor is made with
        registers.values[target] = None
    if wide:
        registers.values[_pair(target)[1]] = None


def descriptors(sass: str) -> list[Descriptor]:
    """Descriptors of all ``HGMMA`` instructions of a listing by cuobjdump, as far as they can be followed.

    Instructions are taken in the order of their addresses, once: values that change from one turn of a loop to the
    next are seen at their first.
    """
    registers = _Registers()
    found = []
    for at, guarded, operation, operands in _instructions(sass):
        if not operation.startswith("HGMMA"):
            _step(registers, guarded, operation, operands)
            continue
        for operand in operands:
            group = re.search(r"gdesc\[UR(\d+)\]", operand)
            if group is None:
                continue
            first = int(group[1])  # two words of the first operand (unless it is in registers), two of the second
            for low in (first + 2,) if operands[1].startswith("R") else (first, first + 2):
                words = (registers.read(f"UR{low}"), registers.read(f"UR{low + 1}"))
                found.append(Descriptor(at, *words))
    return found
