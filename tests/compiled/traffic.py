"""What a compiled program reads from a chip's memory and writes to it, as arrays lie there.

A compiler's cost analysis counts the body of a loop once, and all of an array of which a slice is
read. Here loops count as often as they run; of what is sliced or updated in its place, only that.
"""

import math
import re
from collections.abc import Iterator

from tests.compiled.costs import element_bytes
from tests.compiled.program import Instruction, Program, trips

_ARRAY = re.compile(r"\b(pred|bf16|[suf]\d+|c\d+|f8\w+)\[([\d,]*)\](\{[^}]*\})?")
_FREE = {
    *("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all"),
    *("copy-done", "slice-done", "dynamic-slice-done", "partition-id", "optimization-barrier"),
}
_STARTS = ("copy-start", "slice-start", "dynamic-slice-start")
_PARTS = ("dynamic-slice", "slice", "gather")
_UPDATES = {"dynamic-update-slice": 1, "scatter": 2}  # and the operand that is written


def lying(shape: str) -> float:
    """Bytes that the arrays of a shape take in memory, tiles padded; those on the chip, none."""
    return sum(_lying(*match) for match in _ARRAY.findall(shape) if not _on_chip(match[2]))


def _on_chip(layout: str) -> bool:
    return re.search(r"S\([1-9]", layout) is not None


def _lying(kind: str, extents: str, layout: str) -> float:
    sizes = [int(n) for n in extents.split(",") if n]
    order, tile = re.match(r"\{([\d,]+)", layout), re.search(r"T\(([\d,]+)\)", layout)
    if order and tile:
        for axis, size in zip(order[1].split(","), reversed(tile[1].split(",")), strict=False):
            sizes[int(axis)] = -(-sizes[int(axis)] // int(size)) * int(size)
    return element_bytes(kind) * math.prod(sizes)


def traffic(
    program: Program, name: str, times: float = 1, true_share: float = 1
) -> Iterator[tuple[float, Instruction]]:
    """Walk through a computation: each instruction with the bytes that it moves, in all its runs.

    A loop whose trips depend on data runs once. Of a conditional, the branch for true runs in
    `true_share` of the cases. Of what a kernel updates in its place nothing is counted: how much it
    touches, the text does not say.
    """
    for one in program.computations[name].instructions.values():
        if one.opcode == "while":
            count = trips(program, name, one) or 1
            yield from traffic(program, one.called("body") or "", times * count, true_share)
        elif one.opcode == "conditional":
            branches = re.search(r"branch_computations=\{([^}]*)\}", one.attributes)
            names = [one.called("false_computation") or "", one.called("true_computation") or ""]
            if branches:
                names = re.findall(r"%([\w.\-]+)", branches[1])
            for branch, share in ((names[0], 1 - true_share), (names[-1], true_share)):
                if share:
                    yield from traffic(program, branch, times * share, true_share)
        elif one.opcode == "call":
            yield from traffic(program, one.called("to_apply") or "", times, true_share)
        elif moved := _moved(program, name, one):
            yield moved * times, one


def _moved(program: Program, inside: str, one: Instruction) -> float:
    """Bytes that one instruction reads and writes."""
    beside = program.computations[inside].instructions
    shapes = [beside[name].shape for name in one.operands if name in beside]
    if one.opcode in _FREE:
        return 0
    if one.opcode == "fusion":
        read = (_read(program, one, place, lying(shape)) for place, shape in enumerate(shapes))
        return sum(read) + _written(program, one)
    if one.opcode in _STARTS:  # their shape holds both ends, in memory or not
        ends = _ARRAY.findall(one.shape)[:2]
        return min(_lying(*end) for end in ends) * sum(not _on_chip(end[2]) for end in ends)
    if one.opcode in _PARTS:
        return 2 * min(lying(one.shape), lying(shapes[0]))
    if one.opcode in _UPDATES:
        return 2 * lying(shapes[_UPDATES[one.opcode]])
    if one.opcode == "custom-call":
        kept = re.findall(r"\{[\d,]*\}: \((\d+)", one.attributes)
        aliased = sum(lying(shapes[int(place)]) for place in kept)
        return sum(map(lying, shapes)) + lying(one.shape) - 2 * aliased
    return sum(map(lying, shapes)) + lying(one.shape)


def _read(program: Program, fusion: Instruction, place: int, size: float) -> float:
    """Bytes that a fusion reads of one of its operands."""
    read, passed_on = _read_inside(program, fusion.called("calls") or "", place, size)
    return size if passed_on else min(read, size)


def _read_inside(program: Program, name: str, place: int, size: float) -> tuple[float, bool]:
    """Bytes that a fused computation reads of a parameter, and whether its result is that array."""
    inside, root = program.computations[name]
    parameters = (one for one in inside.values() if one.opcode == "parameter")
    names = [one.name for one in parameters if int(one.literal) == place]
    total, passed_on = 0.0, False
    while names:
        name = names.pop()
        passed_on |= name in root
        for user in inside.values():
            for at in (at for at, operand in enumerate(user.operands) if operand == name):
                if user.opcode == "fusion":
                    read, same = _read_inside(program, user.called("calls") or "", at, size)
                    total += read
                    names += [user.name] * same
                elif user.opcode in ("bitcast", "copy", "reshape"):
                    names.append(user.name)
                elif user.opcode in _PARTS and at == 0:
                    total += lying(user.shape)
                elif user.opcode not in _UPDATES or at:  # what is not updated stays where it is
                    total += size
    return total, passed_on


def _written(program: Program, fusion: Instruction) -> float:
    """Bytes that a fusion writes: where it updates an array in its place, the update."""
    inside, root = program.computations[fusion.called("calls") or ""]
    end, arrays = inside[root[0]], [match[0] for match in _ARRAY.finditer(fusion.shape)]
    ends = [inside[name] for name in end.operands] if end.opcode == "tuple" else [end]
    if len(ends) != len(arrays):  # one instruction has several results
        return lying(fusion.shape)
    total = 0.0
    for end, shape in zip(ends, arrays, strict=True):
        if end.opcode in _UPDATES:
            update = inside[end.operands[_UPDATES[end.opcode]]].shape
            total += min(lying(shape), lying(update))
        else:
            total += lying(shape)
    return total


def loop_of_steps(program: Program) -> str:
    """Name the body of the loop whose trips depend on data."""
    for one in program.computations[program.entry].instructions.values():
        if one.opcode == "while" and trips(program, program.entry, one) is None:
            return one.called("body") or ""
    raise ValueError("program must have a loop whose trips depend on data, got none")
