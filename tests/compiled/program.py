"""The text of a compiled program, read: computations, their instructions, how often loops run."""

import re
from typing import Any, NamedTuple


class Instruction(NamedTuple):
    """One line of a computation."""

    name: str
    shape: str
    opcode: str
    operands: tuple[str, ...]
    literal: str  # what stands in the parentheses
    attributes: str  # what stands behind them

    def called(self, key: str) -> str | None:
        """Name of the computation that an attribute names."""
        match = re.search(rf"\b{key}=%?([\w.\-]+)", self.attributes)
        return match[1] if match else None

    def number(self, key: str) -> int | None:
        """The number that an attribute holds."""
        match = re.search(rf"\b{key}=(\d+)", self.attributes)
        return int(match[1]) if match else None


class Computation(NamedTuple):
    """Instructions by name, and the one whose result is the computation's."""

    instructions: dict[str, Instruction]
    root: list[str]


class Program(NamedTuple):
    """All computations by name, and the one that is run."""

    computations: dict[str, Computation]
    entry: str


_BEGIN = re.compile(r"^(ENTRY )?%([\w.\-]+) \(.*\{$")
_LINE = re.compile(r"^\s+(ROOT )?%([\w.\-]+) = (.+?) ([a-z][a-z0-9\-]*)\((.*)$")


def read_program(text: str) -> Program:
    """Read what `compiled.as_text()` gives."""
    computations: dict[str, Computation] = {}
    entry, now = "", Computation({}, [])
    for line in text.splitlines():
        if begin := _BEGIN.match(line):
            now = computations[begin[2]] = Computation({}, [])
            entry = begin[2] if begin[1] else entry
        elif match := _LINE.match(line):
            root, name, shape, opcode, rest = match.groups()
            end = _closing(rest)
            operands = tuple(re.findall(r"%([\w.\-]+)", rest[:end]))
            now.instructions[name] = Instruction(
                name, shape, opcode, operands, rest[:end], rest[end + 1 :]
            )
            if root:
                now.root.append(name)
    return Program(computations, entry)


def _closing(rest: str) -> int:
    """Where the parenthesis that is open before the text closes."""
    depth = 1
    for place, character in enumerate(rest):
        depth += (character == "(") - (character == ")")
        if not depth:
            return place
    return len(rest)


Value = tuple[Any, ...]  # ("constant", 3), ("element", 0), ("add", a, b), ("compare", "LT", a, b)
_Callers = tuple[tuple[str, tuple[str, ...]], ...]
_SAME = ("copy", "bitcast", "convert", "reshape", "broadcast")


def _value(program: Program, inside: str, name: str, callers: _Callers = ()) -> Value | None:
    """What a scalar is, seen through copies and fusions, in terms of the loop's state."""
    here = program.computations[inside].instructions[name]
    if here.opcode == "constant":
        integer = re.fullmatch(r"-?\d+", here.literal)
        return ("constant", int(here.literal)) if integer else None
    if here.opcode in _SAME:
        return _value(program, inside, here.operands[0], callers)
    if here.opcode == "parameter" and callers:
        outside, operands = callers[-1]
        return _value(program, outside, operands[int(here.literal)], callers[:-1])
    if here.opcode == "fusion":
        return _fused(program, inside, here, None, callers)
    if here.opcode == "get-tuple-element":
        source = program.computations[inside].instructions[here.operands[0]]
        if source.opcode == "fusion":
            return _fused(program, inside, source, here.number("index"), callers)
        return ("element", here.number("index")) if source.opcode == "parameter" else None
    if here.opcode in ("add", "compare"):
        sides = tuple(_value(program, inside, side, callers) for side in here.operands)
        return (here.opcode, here.called("direction"), *sides)
    return None


def _fused(
    program: Program, inside: str, fusion: Instruction, index: int | None, callers: _Callers
) -> Value | None:
    name = fusion.called("calls") or ""
    root = program.computations[name].root[0]
    made = program.computations[name].instructions[root]
    if index is not None and made.opcode == "tuple":
        root = made.operands[index]
    return _value(program, name, root, (*callers, (inside, fusion.operands)))


def trips(program: Program, inside: str, loop: Instruction) -> int | None:
    """How often a while loop runs; None where that depends on data."""
    known = re.search(r'known_trip_count\D*"n":"(\d+)"', loop.attributes)
    if known:
        return int(known[1])
    condition, body = loop.called("condition") or "", loop.called("body") or ""
    test = _value(program, condition, program.computations[condition].root[0])
    if test is None or test[:2] != ("compare", "LT") or (test[2] or "?")[0] != "element":
        return None
    counter, bound = test[2][1], test[3]
    start = _at_start(program, inside, loop, counter) or 0
    if bound is not None and bound[0] == "element":
        bound = ("constant", _at_start(program, inside, loop, bound[1]))
    if bound is None or bound[0] != "constant" or bound[1] is None:
        return None
    return -(-(bound[1] - start) // _growth(program, body, counter))


def _at_start(program: Program, inside: str, loop: Instruction, index: int) -> int | None:
    """The constant that an element of the loop's state begins with."""
    state = program.computations[inside].instructions[loop.operands[0]]
    if state.opcode != "tuple":
        return None
    value = _value(program, inside, state.operands[index])
    return value[1] if value is not None and value[0] == "constant" else None


def _growth(program: Program, body: str, counter: int) -> int:
    """By how much a trip moves the counter."""
    root = program.computations[body].instructions[program.computations[body].root[0]]
    if root.opcode != "tuple":
        return 1
    value = _value(program, body, root.operands[counter])
    sides = value[2:] if value is not None and value[0] == "add" else ()
    return next((side[1] for side in sides if side is not None and side[0] == "constant"), 1)
