"""Imports: folders in one order, no circles, and two folders that need only JAX and NumPy."""

import ast
import functools
import graphlib
import pathlib
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[1]
PACKAGE = ROOT / "twinkle_jax"
ROOMS = (
    "advantage",
    "loss",
    "data",
    "reward",
    "model",
    "sampler",
    "rollout",
    "training",
    "command.py",
    "twinkle",
)


def _file(name):
    """Find the file of a module of this repository; None for other modules."""
    path = ROOT.joinpath(*name.split("."))
    places = path.with_suffix(".py"), path / "__init__.py"
    return next((place for place in places if place.is_file()), None)


def _imported(path):
    """Find the modules that a file imports, those for types and inside functions included."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path}: relative import"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            yield from (name if _file(name) else node.module for name in names)


PATHS = list(PACKAGE.rglob("*.py"))
FOLDERS = sorted({path.parent for path in PATHS})


@functools.cache  # not when this file is imported, which every process of a test run does
def _names():
    return {path: set(_imported(path)) for path in PATHS}


@functools.cache
def _imports():
    return {path: {_file(name) for name in names} - {None} for path, names in _names().items()}


def _entries(folder):
    """Map each entry of a folder (a file, or a sub-folder as a whole) to those it imports."""
    entries = {}
    for path, files in _imports().items():
        if folder in path.parents:
            entry = path.relative_to(folder).parts[0]
            imported = {p.relative_to(folder).parts[0] for p in files if folder in p.parents}
            entries[entry] = entries.get(entry, set()) | imported - {entry}
    return entries


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: str(folder.relative_to(ROOT)))
def test_no_imports_in_a_circle(folder):
    graphlib.TopologicalSorter(_entries(folder)).prepare()  # raises for a circle


def test_folders_import_only_those_above_them():
    entries = _entries(PACKAGE)
    folders = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    assert set(ROOMS) == folders | {"command.py"}
    assert entries["__main__.py"] == {"command.py"}
    for place, room in enumerate(ROOMS):
        assert entries[room] <= {*ROOMS[:place], "_package.py"}, room
    assert not entries["advantage"] | entries["loss"]


@pytest.mark.parametrize("room", ["advantage", "loss"])
def test_arithmetic_needs_jax_numpy_and_jaxtyping_alone(room):
    inside = [names for path, names in _names().items() if PACKAGE / room in path.parents]
    packages = {name.split(".")[0] for names in inside for name in names}
    assert packages - sys.stdlib_module_names - {"twinkle_jax"} <= {"jax", "jaxtyping", "numpy"}
