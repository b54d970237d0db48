"""The tables of docs/scaling.md, printed.

python -m tests.compiled.table arithmetic
python -m tests.compiled.table compiled Qwen2.5-7B v5p:2x2x2 1,8,1 16 2048
python -m tests.compiled.table decoding Qwen2.5-0.5B v5e:2x2 256 2048
python -m tests.compiled.table decoding Qwen3-4B h100:1x4 64 2048 stacked
python -m tests.compiled.table decoding Qwen2.5-0.5B v5e:2x2 256 8192 1024
python -m tests.compiled.table groups Qwen2.5-0.5B v5e:2x2 256 8192 2048 8 1024
python -m tests.compiled.table rollout Qwen2.5-7B v5p:4x4x4 1,16,4 1024 512
"""

import sys
from typing import Any

import jax

from tests.compiled.arithmetic import CHIPS, ideal, least_seconds
from tests.compiled.models import MODELS, Setting, config_of, update_costs
from tests.compiled.rollout import rollout, wire

GIB = 2**30
SLICES = {  # chips by the extents of a slice
    "v5e": {4: "2x2", 16: "4x4", 64: "8x8", 256: "16x16"},
    "v5p": {4: "2x2x1", 8: "2x2x2", 64: "4x4x4", 256: "4x8x8"},
    "h100": {4: "1x4", 8: "1x8"},
}
TIME, ROWS = 2048, 2  # tokens in a row, rows of a device


def arithmetic() -> None:
    """Print what updates must cost at least, for all models and slices."""
    print("| model | slice | memory, GiB | fits | wire, GiB | products, ms | wire, ms |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    dense = [model for model in MODELS if config_of(model).experts is None]  # `ideal` knows these
    for model in dense:
        for kind, extents in SLICES.items():
            for chips, extent in extents.items():
                setting = Setting(f"{kind}:{extent}", 1, chips, 1, ROWS * chips, TIME)
                least = ideal(model, setting)
                seconds = least_seconds(CHIPS[kind], least.flops, least.wire)
                fits = "yes" if least.memory < CHIPS[kind].memory else "no"
                print(
                    f"| {model} | {setting.topology} | {least.memory / GIB:.1f} | {fits} "
                    f"| {least.wire / GIB:.1f} | {1e3 * seconds[0]:.0f} | {1e3 * seconds[1]:.0f} |"
                )


def compiled(model: str, setting: Setting) -> None:
    """Compile one update, and print what it costs beside the least it could."""
    measured, least = update_costs(model, setting), ideal(model, setting)
    print("| model | slice | rows × tokens | peak, GiB | wire, GiB | of the least | products |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    print(
        f"| {model} | {setting.topology} | {setting.rows} × {setting.time} "
        f"| {measured.peak / GIB:.1f} | {measured.wire / GIB:.1f} "
        f"| {measured.wire / least.wire:.2f} "
        f"| {measured.flops / (least.flops - least.attention):.2f} |"
    )


def decoding(model: str, topology: str, rows: int, capacity: int, **options: Any) -> None:
    """Compile a step of decoding on one chip, and print what it moves beside the least it could."""
    measured = rollout(model, topology, rows, capacity, **options)
    kinds = "weights | cache | filled | moved | by the kernel | of the least | temporary |"
    print(f"| model | chip of | rows × capacity | {kinds}")
    print("| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |")
    sizes = [
        f"{size / GIB:.2f}"
        for size in (
            measured.weights,
            measured.cache,
            measured.filled,
            measured.moved,
            measured.kernel,
        )
    ]
    print(
        f"| {model} | {topology} | {rows} × {capacity} | {' | '.join(sizes)} "
        f"| {measured.total / measured.least:.2f} | {measured.temporary / GIB:.2f} |"
    )
    print("", *measured.largest(), sep="\n")


def rollout_wire(model: str, setting: Setting) -> None:
    """Compile a rollout, and print what a device sends beside the least it could."""
    print("| model | slice | rows × prompt | part | sent, MiB | least, MiB | collectives |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for name, part in wire(model, setting).items():
        print(
            f"| {model} | {setting.topology} | {setting.rows} × {setting.time} | {name} "
            f"| {part.sent / 2**20:.4g} | {part.least / 2**20:.4g} | {part.costs.times} |"
        )
        print("", *part.costs.largest[:6], sep="\n")


def main(arguments: list[str]) -> None:
    """Print the table that is asked for."""
    match arguments:
        case ["arithmetic"]:
            return arithmetic()
        case ["compiled", model, topology, mesh, rows, time] if model in MODELS:
            numbers = (*mesh.split(","), rows, time)
            if len(numbers) == 5 and all(map(str.isdigit, numbers)):
                return compiled(model, Setting(topology, *map(int, numbers)))
        case ["rollout", model, topology, mesh, rows, time] if model in MODELS:
            numbers = (*mesh.split(","), rows, time)
            if len(numbers) == 5 and all(map(str.isdigit, numbers)):
                return rollout_wire(model, Setting(topology, *map(int, numbers)))
        case ["decoding", model, topology, rows, capacity, *rest] if model in MODELS:
            filled = int(rest[0]) if rest and rest[0].isdigit() else None
            if rows.isdigit() and capacity.isdigit() and (filled or rest in ([], ["stacked"])):
                stacked = rest == ["stacked"]
                options = {"stacked": stacked, "filled": filled}
                return decoding(model, topology, int(rows), int(capacity), **options)
        case ["groups", model, topology, *numbers] if model in MODELS:
            if len(numbers) == 5 and all(map(str.isdigit, numbers)):
                rows, capacity, filled, samples, prompt = map(int, numbers)
                options = {"filled": filled, "samples": samples, "prompt": prompt}
                for shared in (False, True):
                    decoding(model, topology, rows, capacity, **options, shared=shared)
                return None
    raise SystemExit(f"{__doc__}\nmodels: {', '.join(MODELS)}")


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    main(sys.argv[1:])
