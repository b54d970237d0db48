"""What a compiled program costs each device: memory, products, and what goes over the wire."""

import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from tests.compiled.program import Instruction, Program, read_program, trips

_BYTES = {"pred": 1, "bf16": 2, "f16": 2, "s4": 0.5, "u4": 0.5}
_COLLECTIVE = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")
_CALLS = ("calls", "to_apply", "true_computation")


class Costs(NamedTuple):
    """What one call of the program costs each device.

    Attributes:
        peak: most bytes of memory in use at once, arguments included.
        flops: of matrix products, loops counted as often as they run.
        sent: bytes over the wire, by kind of collective.
        times: collectives by kind, as often as they run.
        largest: the collectives, those that send most first, as (bytes, kind, times, shape).
        unknown_loops: loops whose trips depend on data.
    """

    peak: int
    flops: float
    sent: dict[str, float]
    times: dict[str, int]
    largest: list[tuple[float, str, int, str]]
    unknown_loops: int

    @property
    def wire(self) -> float:
        """Bytes over the wire in all."""
        return sum(self.sent.values())


def costs(compiled: Any, devices: int, *, unknown_trips: int = 1) -> Costs:
    """Add up what `jax.jit(…).lower(…).compile()` made.

    Args:
        compiled: the program.
        devices: on how many it runs.
        unknown_trips: how often a loop runs whose trips depend on data.
    """
    memory, program = compiled.memory_analysis(), read_program(compiled.as_text())
    flops, unknown, seen = 0.0, 0, []
    started = _started(program)
    for inside, one, times in visit(program, unknown_trips):
        if one.opcode == "while":
            unknown += trips(program, inside, one) is None
        elif one.opcode in ("dot", "convolution"):
            flops += times * product_flops(program, inside, one)
        elif one.opcode.removesuffix("-start") in _COLLECTIVE:
            kind = _kind(program, inside, one, started)
            if kind is not None and (size := _sent(program, inside, one, kind, devices)):
                seen.append((size * times, kind, times, re.sub(r"\{[^}]*\}", "", one.shape)))
    sent: defaultdict[str, float] = defaultdict(float)
    count: Counter[str] = Counter()
    for size, kind, times, _ in seen:
        sent[kind] += size
        count[kind] += times
    return Costs(
        peak=memory.peak_memory_in_bytes,
        flops=flops,
        sent=dict(sent),
        times=dict(count),
        largest=sorted(seen, reverse=True),
        unknown_loops=unknown,
    )


def visit(program: Program, unknown_trips: int) -> Iterator[tuple[str, Instruction, int]]:
    """Walk through what runs: the computation, the instruction, and how often it runs.

    Of a conditional, the branch for true.
    """

    def walk(name: str, times: int) -> Iterator[tuple[str, Instruction, int]]:
        for one in program.computations[name].instructions.values():
            yield name, one, times
            if one.opcode == "while":
                count = trips(program, name, one)
                count = unknown_trips if count is None else count
                yield from walk(one.called("body") or "", times * count)
            elif one.opcode in ("fusion", "call", "conditional", "async-start"):
                for called in _called(one):
                    yield from walk(called, times)

    yield from walk(program.entry, 1)


def _called(one: Instruction) -> list[str]:
    branches = re.search(r"branch_computations=\{([^}]*)\}", one.attributes)
    if branches:
        return re.findall(r"%([\w.\-]+)", branches[1])[-1:]
    return [name for name in map(one.called, _CALLS) if name]


def _started(program: Program) -> set[tuple[str, int | None]]:
    """Collectives that a fusion begins and a later one ends: both hold the instruction."""
    return {
        (one.opcode, one.number("channel_id"))
        for computation in program.computations.values()
        if _begins(computation.instructions)
        for one in computation.instructions.values()
        if one.opcode in _COLLECTIVE
    }


def _begins(instructions: dict[str, Instruction]) -> bool:
    return any("AsyncCollectiveStart" in one.attributes for one in instructions.values())


def _kind(
    program: Program, inside: str, one: Instruction, started: set[tuple[str, int | None]]
) -> str | None:
    """The kind of a collective; None for the second half of one that is counted already."""
    beside = program.computations[inside].instructions
    kind, key = one.opcode.removesuffix("-start"), (one.opcode, one.number("channel_id"))
    if inside != program.entry and key in started and not _begins(beside):
        return None
    # What a TPU calls a sum of which each device keeps its slice.
    sliced = any(other.opcode == "dynamic-slice" for other in beside.values())
    fused = not any(other.opcode in ("while", "fusion") for other in beside.values())
    return "reduce-scatter" if kind == "all-reduce" and sliced and fused else kind


def _sent(program: Program, inside: str, one: Instruction, kind: str, devices: int) -> float:
    """Bytes that a device sends in one run of a collective, around a ring."""
    beside = program.computations[inside].instructions
    taken = sum(size_of(beside[name].shape) for name in one.operands if name in beside)
    if kind == "collective-permute":
        return taken
    members = group_size(one.attributes, devices)
    if kind == "all-gather":
        return taken * (members - 1)
    share = (members - 1) / members
    return taken * share * (2 if kind == "all-reduce" else 1)


def group_size(attributes: str, devices: int) -> int:
    """How many devices take part in a collective."""
    if match := re.search(r"replica_groups=\{\{([\d,]+)\}", attributes):
        return match[1].count(",") + 1
    if match := re.search(r"replica_groups=\[\d+,(\d+)\]", attributes):
        return int(match[1])
    if match := re.search(r"replica_groups=mesh\[([^\]]*)\][^{]*\{([^}]*)\}", attributes):
        sizes = {name: int(size) for name, size in re.findall(r"'(\w+)'=(\d+)", match[1])}
        return math.prod(sizes[name] for name in re.findall(r"'(\w+)'", match[2]))
    if "replica_groups={}" in attributes:
        return devices
    raise ValueError(f"replica_groups must be in a form that is known, got {attributes[:200]!r}")


def arrays(shape: str) -> list[tuple[str, list[int]]]:
    """Type and extents of each array in a shape."""
    matches = re.findall(r"\b(pred|bf16|[suf]\d+|c\d+|f8\w+)\[([\d,]*)\]", shape)
    return [(kind, [int(n) for n in extents.split(",") if n]) for kind, extents in matches]


def element_bytes(kind: str) -> float:
    """Bytes of an entry."""
    if kind in _BYTES:
        return _BYTES[kind]
    return 1 if kind.startswith("f8") else int(kind[1:]) / 8


def size_of(shape: str) -> float:
    """Bytes of a shape."""
    return sum(element_bytes(kind) * math.prod(extents) for kind, extents in arrays(shape))


def product_flops(program: Program, inside: str, one: Instruction) -> float:
    """Two for each multiplication of entries; places that are padding or holes are free."""
    beside = program.computations[inside].instructions
    (_, left), (_, right) = (arrays(beside[name].shape)[0] for name in one.operands[:2])
    out = arrays(one.shape)[0][1]
    if one.opcode == "dot":
        summed = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", one.attributes)
        axes = summed[1].split(",") if summed and summed[1] else []
        return 2.0 * math.prod(out) * math.prod(left[int(axis)] for axis in axes)
    labels = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", one.attributes)
    assert labels is not None
    places = [
        dict(zip(word, extents, strict=True))
        for word, extents in zip(labels.groups(), (left, right, out), strict=True)
    ]
    flops = 2.0 * places[2]["b"] * places[2]["f"] * places[1]["i"]
    window = _window(one.attributes)
    for place, axis in enumerate(sorted(name for name in places[0] if name.isdigit())):
        lengths = places[0][axis], places[2][axis]
        flops *= _meetings(*lengths, {key: values[place] for key, values in window.items()})
    return flops / (one.number("batch_group_count") or 1)


def _window(attributes: str) -> dict[str, list[str]]:
    match = re.search(r"window=\{([^}]*)\}", attributes)
    pairs = (part.split("=") for part in match[1].split()) if match else ()
    return {key: value.split("x") for key, value in pairs}


def _meetings(length: int, steps: int, window: dict[str, str]) -> int:
    """Pairs of a place of the output and one of the kernel that meet an entry of the input."""
    size, stride, holes, spread = (
        int(window.get(key, 1)) for key in ("size", "stride", "lhs_dilate", "rhs_dilate")
    )
    before = int(window.get("pad", "0_0").split("_")[0])
    at = stride * np.arange(steps)[:, None] + spread * np.arange(size)[None] - before
    return int(np.sum((at >= 0) & (at <= (length - 1) * holes) & (at % holes == 0)))
