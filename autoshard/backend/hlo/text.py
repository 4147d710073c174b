"""Parses HLO text into computations and instructions, and names of element types: the part of the grammar that this
package needs."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

_HEADER = re.compile(r"^(ENTRY )?%?([\w.\-]+) .*\{$")
_ASSIGN = re.compile(r"^\s+(ROOT )?%?([\w.\-]+) = ")
_CALLED = re.compile(
    r"\b(calls|body|condition|to_apply|branch_computations|true_computation|false_computation|called_computations)"
    r"=(?:\{([^}]*)\}|%?([\w.\-]+))"
)
_FRAME_ID = re.compile(r"\bstack_frame_id=(\d+)")
_PARENT = re.compile(r"\bparent_frame_id=(\d+)")
_SOURCE = re.compile(r'\bsource_file="([^"]*)"(?: source_line=(\d+))?')
_KERNEL_METADATA = re.compile(r"\bkernel_metadata=\{\n(?:[^}\n].*\n)*\}")
"""What a Pallas kernel says of itself: the one attribute that is printed on several lines."""
_PARTITIONS = re.compile(r"^HloModule .*\bnum_partitions=(\d+)", re.MULTILINE)
_OPERATION = re.compile(r'\bop_name="([^"]*)"')
_ARRAY = re.compile(r"\b([a-z][a-z0-9]*)\[([\d,]*)\]")
_TABLES = ("FileNames", "FunctionNames", "FileLocations", "StackFrames")
PEAK_DTYPES = {
    "bf16": "bfloat16",
    "f16": "float16",
    "f32": "float32",
    "f64": "float64",
    "f8e4m3fn": "float8_e4m3fn",
    "f8e5m2": "float8_e5m2",
    "s8": "int8",
    "u8": "int8",
}
"""By HLO name, the dtype under which `autoshard.machine.mesh.Hardware` has the peak FLOP/s."""


@dataclass(frozen=True, slots=True)
class Instruction:
    """``name = shape opcode(operands), attributes``."""

    name: str
    shape: str
    opcode: str
    operands: str
    """The text between the parentheses: operands, a constant's literal, or a parameter's number."""
    attributes: str

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the operands, which may be printed with or without shapes."""
        marked = re.findall(r"%([\w.\-]+)", self.operands)
        return tuple(marked or (part.split()[-1] for part in self.operands.split(", ") if part.strip()))


@dataclass(frozen=True, slots=True)
class Computation:
    """Instructions by name, in the order of the text."""

    name: str
    instructions: dict[str, Instruction]
    root: str


@dataclass(frozen=True, slots=True)
class Module:
    """Computations by name, the entry computation's name, ``file:line`` by stack frame, by frame the one around it, and
    the number of devices that the program is partitioned for, those of one slice where there are several; 0 if the text
    does not say."""

    computations: dict[str, Computation]
    entry: str
    frames: dict[str, str]
    around: dict[str, str] = field(default_factory=dict[str, str])
    partitions: int = 0

    def source(self, instruction: Instruction) -> str:
        """``file:line`` of the user's code that an instruction comes from; empty if unknown."""
        if frame := _FRAME_ID.search(instruction.attributes):
            return self.frames.get(frame[1], "")
        if named := _SOURCE.search(instruction.attributes):
            return f"{named[1]}:{named[2]}" if named[2] else named[1]
        return ""

    def source_outside(self, instruction: Instruction, folder: str) -> str:
        """`source`, of the innermost frame whose file is not in ``folder``; empty if unknown."""
        found = _FRAME_ID.search(instruction.attributes)
        frame = found[1] if found else ""
        while frame and self.frames.get(frame, "").startswith(folder):
            frame = self.around.get(frame, "")
        return self.frames.get(frame, "") if frame else ""

    def operation(self, instruction: Instruction) -> str:
        """JAX's ``op_name`` of an instruction, such as ``jit(step)/jvp()/dot_general``; empty if unknown."""
        named = _OPERATION.search(instruction.attributes)
        return named[1] if named else ""

    def caller_sources(self) -> dict[str, str]:
        """By computation, ``file:line`` of the first instruction that calls it; empty if unknown."""
        found: dict[str, str] = {}
        for computation in self.computations.values():
            for instruction in computation.instructions.values():
                for _, name in called(instruction):
                    found.setdefault(name, self.source(instruction))
        return found


def called(instruction: Instruction) -> Iterator[tuple[str, str]]:
    """(attribute, computation) for each computation that an instruction calls: ``("calls", "fused_computation")``."""
    for key, several, one in _CALLED.findall(instruction.attributes):
        for name in re.findall(r"[\w.\-]+", several or one):
            yield key, name


def parse_hlo(text: str) -> Module:
    """Parses HLO text; lines that it does not recognise are skipped."""
    computations: dict[str, Computation] = {}
    tables: dict[str, dict[str, str]] = {name: {} for name in _TABLES}
    entry, table, instructions, name, root = "", "", dict[str, Instruction](), "", ""
    for line in _KERNEL_METADATA.sub(lambda found: found[0].replace("\n", " "), text).splitlines():
        if name:
            if line.startswith("}"):
                computations[name] = Computation(name, instructions, root)
                name = ""
            elif assign := _ASSIGN.match(line):
                instruction = _instruction(assign[2], line[assign.end() :])
                instructions[instruction.name] = instruction
                root = instruction.name if assign[1] else root
        elif line in _TABLES:
            table = line
        elif table and line[:1].isdigit():
            key, _, row = line.partition(" ")
            tables[table][key] = row
        elif (header := _HEADER.match(line)) and not line.startswith("HloModule"):
            name, instructions, root = header[2], {}, ""
            entry = header[2] if header[1] else entry
    rows = tables["StackFrames"].items()
    around = {key: str(int(found[1]) - 1) for key, row in rows if (found := _PARENT.search(row))}  # printed plus one
    partitions = _PARTITIONS.search(text)
    devices = int(partitions[1]) if partitions else 0
    return Module(computations, entry or next(reversed(computations), ""), _frames(tables), around, devices)


def _frames(tables: dict[str, dict[str, str]]) -> dict[str, str]:
    """``file:line`` by stack frame, from the tables at the top of the module."""
    places: dict[str, str] = {}
    for key, row in tables["FileLocations"].items():
        if place := re.search(r"file_name_id=(\d+).*?\bline=(\d+)", row):
            places[key] = f"{tables['FileNames'].get(place[1], '').strip('"')}:{place[2]}"
    frames: dict[str, str] = {}
    for key, row in tables["StackFrames"].items():
        if location := re.search(r"file_location_id=(\d+)", row):
            frames[key] = places.get(location[1], "")
    return frames


def _instruction(name: str, rest: str) -> Instruction:
    """The instruction ``name``; ``rest`` is the text after the equals sign."""
    end = _closing(rest) if rest.startswith("(") else rest.find(" ")
    shape, rest = rest[:end].strip(), rest[end:].strip()
    opcode, _, rest = rest.partition("(")
    end = _closing("(" + rest) - 1
    return Instruction(name, shape, opcode, rest[: end - 1], rest[end:])


def _closing(text: str) -> int:
    """Index after the parenthesis that matches the one at the start of ``text``."""
    depth = 0
    for match in re.finditer(r"[()]", text):
        depth += 1 if match[0] == "(" else -1
        if depth == 0:
            return match.end()
    return len(text)


def arrays(shape: str) -> list[tuple[str, list[int]]]:
    """The element type and the dimensions of each array in a shape, such as of ``(bf16[4,8]{1,0}, s32[])``."""
    return [(dtype, numbers(dims)) for dtype, dims in _ARRAY.findall(shape)]


def numbers(text: str) -> list[int]:
    """Of ``4,8``; of an empty text none."""
    return [int(part) for part in text.split(",") if part]


def element_bits(name: str) -> int:
    """Bits per element as stored: 4 for ``s4``, 8 for ``f8e4m3fn`` and ``pred``, 0 for ``token``."""
    if name == "pred":
        return 8
    digits = re.search(r"\d+", name)
    return int(digits[0]) if digits else 0


def peak_dtype(name: str) -> str:
    """The dtype whose peak FLOP/s products of this type have; an unknown name is returned as it is."""
    return PEAK_DTYPES.get(name, name)
