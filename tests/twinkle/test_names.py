"""Imports of a script for Twinkle, with `twinkle` renamed to `twinkle_jax.twinkle`."""

import ast
import importlib
import pathlib
import re

import pytest

NAMES = {
    "advantage": "Advantage GRPOAdvantage RLOOAdvantage",
    "loss": "CrossEntropyLoss DPOLoss GKDLoss GRPOLoss GSPOLoss Loss MSELoss SAPOLoss",
    "reward": "FormatReward GSM8KAccuracyReward GSM8KFormatReward MathReward Reward",
    "model": "TransformersModel",
    "sampler": "vLLMSampler",
    "data_format": "InputFeature Message SampledSequence SampleResponse SamplingParams Trajectory",
    "template": "Template",
    "metric": "Metric",
}


@pytest.mark.parametrize("module", NAMES)
def test_a_name_stands_where_twinkle_has_it(module):
    found = importlib.import_module(f"twinkle_jax.twinkle.{module}")
    for name in NAMES[module].split():
        assert isinstance(getattr(found, name), type)


ROOT = pathlib.Path(__file__).parents[2]
INTERNAL = {"names", "infra", "model.arguments", "model.files", "model.group", "model.optimizer"}
INTERNAL |= {"model.policy"}
FUNCTIONS = {
    "as_lists",
    "conversation",
    "likeliest",
    "pad_rows",
    "Args",
}  # what other modules of ours use


def _table():
    """Names by module, of the table in docs/from_twinkle.md."""
    page = (ROOT / "docs" / "from_twinkle.md").read_text(encoding="utf-8")
    table = {}
    for module, names in re.findall(r"^\| `(twinkle[\w.]*)` \| ([^|]+) \|", page, re.MULTILINE):
        table.setdefault(module, set()).update(re.findall(r"`(\w+)`", names))
    return table


def _renamed(module):
    path = module.replace("twinkle_agentic", "twinkle.agentic").removeprefix("twinkle")
    return importlib.import_module(f"twinkle_jax.twinkle{path}")


def test_every_name_of_the_page_is_where_it_says():
    for module, names in _table().items():
        for name in names:
            assert hasattr(_renamed(module), name), f"{module}.{name}"


def test_the_page_has_every_name():
    listed = set().union(*_table().values())
    room = ROOT / "twinkle_jax" / "twinkle"
    for path in room.rglob("*.py"):
        module = ".".join(path.relative_to(room).with_suffix("").parts).removesuffix("__init__")
        tree = ast.parse(path.read_text(encoding="utf-8")).body
        kinds = (ast.ClassDef, ast.FunctionDef)
        defined = {x.name for x in tree if isinstance(x, kinds) and not x.name.startswith("_")}
        exported = getattr(
            importlib.import_module(f"twinkle_jax.twinkle.{module}".rstrip(".")), "__all__", ()
        )
        names = set(exported) | (set() if module in INTERNAL else defined)
        assert names <= listed | FUNCTIONS | {"JaxSampler"}, module
