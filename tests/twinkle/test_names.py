"""Imports of a script for Twinkle, with `twinkle` renamed to `twinkle_jax.twinkle`."""

import ast
import importlib
import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).parents[2]
ROOM = ROOT / "twinkle_jax" / "twinkle"
INTERNAL = {"names", "infra", "model.files", "model.optimizer", "model.policy"}
USED_BY_OTHER_MODULES = {"Args", "make_template", "read_teacher"}

# Sub-modules that scripts import: in ours one file has the names of all.
SUBMODULES = {
    "agentic.envs.base": "Env StepResult",
    "agentic.protocol.base": "API",
    "agentic.protocol.openai": "OpenAI",
    "agentic.reward.f1": "CoTReward F1Reward ToolExploreReward",
    "agentic.rollout.bridge": "extend_with_bridge",
    "agentic.rollout.multi_turn": "MultiTurnRollout",
    "agentic.tools.base": "Tool",
    "agentic.tools.tool_manager": "ToolManager",
    "data_format.message": "Message Tool ToolCall",
    "data_format.sampling": "SampledSequence SampleResponse SamplingParams",
    "dataset.base": "Dataset DatasetMeta",
    "kernel.builtin": "npu_builtin",
    "model.megatron": "MegatronModel MultiLoraMegatronModel",
    "model.transformers": "TransformersModel",
    "preprocessor.base": "DataFilter Preprocessor",
    "preprocessor.llm": "GSM8KProcessor",
    "preprocessor.olympiad_bench": "OlympiadBenchProcessor",
    "reward.base": "Reward",
    "sampler.vllm_sampler": "vLLMSampler",
    "template.tools": "ClineParser HermesQwenParser ReActParser ToolCallRegistry",
    "utils.device_mesh": "DeviceMesh Platform",
    "utils.framework": "Torch",
}


@pytest.mark.parametrize("module", SUBMODULES)
def test_submodules_are_imported_by_twinkles_paths(module):
    names = SUBMODULES[module]
    exec(f"from twinkle_jax.twinkle.{module} import {names.replace(' ', ', ')}")  # noqa: S102


def _table():
    """Names by module, of the table in docs/from_twinkle.md."""
    page = (ROOT / "docs" / "from_twinkle.md").read_text(encoding="utf-8")
    table = {}
    for module, names in re.findall(r"^\| `(twinkle[\w.]*)` \| ([^|]+) \|", page, re.MULTILINE):
        table.setdefault(module, set()).update(re.findall(r"`(\w+)`", names))
    return table


def test_every_name_of_the_page_can_be_imported():
    for module, names in _table().items():
        path = module.replace("twinkle_agentic", "twinkle.agentic")
        imported = importlib.import_module(f"twinkle_jax.{path}")
        for name in names:
            assert hasattr(imported, name), f"{module}.{name}"


def test_the_page_has_every_name():
    listed = set().union(*_table().values())
    for path in ROOM.rglob("*.py"):
        module = ".".join(path.relative_to(ROOM).with_suffix("").parts).removesuffix("__init__")
        module = module.rstrip(".")
        tree = ast.parse(path.read_text(encoding="utf-8")).body
        kinds = (ast.ClassDef, ast.FunctionDef)
        defined = {x.name for x in tree if isinstance(x, kinds) and not x.name.startswith("_")}
        imported = importlib.import_module(f"twinkle_jax.twinkle.{module}".rstrip("."))
        names = set(getattr(imported, "__all__", ()))
        names |= set() if module in INTERNAL else defined
        assert names <= listed | USED_BY_OTHER_MODULES | {"JaxSampler"}, module
