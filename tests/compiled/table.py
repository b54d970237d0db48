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

from tests.compiled.arithmetic import CHIPS, ideal, least_seconds, sampling_memory
from tests.compiled.models import MODELS, Setting, config_of, update_costs
from tests.compiled.rollout import rollout, wire

GIB = 2**30
COUNTS = (4, 8, 16, 64, 256)  # chips
KINDS = {"v5e": 256, "v5p": 256, "h100": 8}  # the most chips that its links join
SMALL = 2e9  # parameters; smaller models need no such mesh, and their costs are not printed
TIME, ROWS = 2048, 2  # tokens in a row, rows of a device


def arithmetic() -> None:
    """Print what fits, and what updates must cost at least, for all models and numbers of chips."""
    configs = {model: config_of(model) for model in MODELS}
    dense = [  # `ideal` knows these
        model
        for model, config in configs.items()
        if config.experts is None and config.attention.latent is None and config.delta_net is None
    ]
    settings = [Setting(f"{n} chips", 1, n, 1, ROWS * n, TIME) for n in COUNTS]
    columns = " | ".join(setting.topology for setting in settings)
    print(f"| model | GiB of a chip | {columns} |")
    print("| --- " * (2 + len(COUNTS)) + "|")
    for model in dense:
        update = [ideal(model, setting).memory for setting in settings]
        sampling = [sampling_memory(model, setting) for setting in settings]
        for name, sizes in (("update", update), ("sampling", sampling)):
            cells = " | ".join(f"{size / GIB:.1f}" for size in sizes)
            print(f"| {model} | {name} | {cells} |")
    print(f"\n| model | | products, ms | {columns} |")
    print("| --- " * (3 + len(COUNTS)) + "|")
    for model in dense:
        least = [ideal(model, setting) for setting in settings]
        if least[0].parameters < SMALL:
            continue
        print(f"| {model} | wire, GiB | | {' | '.join(f'{x.wire / GIB:.1f}' for x in least)} |")
        for kind, most in KINDS.items():
            times = [least_seconds(CHIPS[kind], x.flops, x.wire) for x in least]
            cells = [
                f"{1e3 * wire:.0f}" if n <= most else ""
                for n, (_, wire) in zip(COUNTS, times, strict=True)
            ]
            print(f"| {model} | {kind}, ms | {1e3 * times[0][0]:.0f} | {' | '.join(cells)} |")


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
