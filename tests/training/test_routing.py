"""Runs that train tokens through the experts that the sampler in this process chose."""

import json

import numpy as np
import pytest
from safetensors.numpy import load_file

from tests.model.families import each, family
from tests.sampler.vllm.fake_server import write_checkpoint
from tests.training.joined_runs import run_joined
from tests.training.options import config_of
from tests.training.test_hosts import assert_same_metrics
from tests.training.test_server import EPISODES, settings
from twinkle_jax.model import parse_config
from twinkle_jax.training import train
from twinkle_jax.training.engine import replayed_routing

VARIANTS = {
    "one turn": {},
    "episodes": EPISODES,
    "episodes, read again": EPISODES | {"rollout__slots": 4},
    "mesh": {"mesh__fsdp": 4, "mesh__tensor": 2},
    "slots": {"rollout__slots": 4},
    "several rollouts": {"update__dynamic_sampling": 3},
    "adapter": {"lora__rank": 2, "update__kl_beta": 0.1},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A checkpoint with a mixture of experts, and six problems."""
    return write_folder(tmp_path_factory.mktemp("mixture"), "qwen3_moe")


def write_folder(place, name):
    write_checkpoint(place / "model", name=name, characters="0123456789+-*()=")
    rows = [{"prompt": f"{a}+2=", "answer": str(a + 2)} for a in range(6)]
    (place / "task.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return place


def run(folder, directory, replayed, **changes):
    """The configuration of a run in `directory`, in which a step has two updates."""
    changes = {"steps": 2, "update__replay_routing": replayed} | changes
    return config_of(settings(folder, None, directory, **changes))


def parameters(directory):
    [file] = (directory / "run" / "policy").glob("*.safetensors")
    return load_file(file)


@pytest.mark.slow
@pytest.mark.parametrize("variant", each(list(VARIANTS), default=2))
def test_experts_of_the_sampler_are_those_of_a_scoring_pass(folder, tmp_path, variant):
    """In float32; and in the second update of a step the router would choose others."""
    compare_replays(folder, tmp_path, VARIANTS[variant])


@pytest.mark.slow
@pytest.mark.parametrize("variant", each(["one turn", "episodes", "mesh", "adapter"]))
def test_experts_behind_dense_layers(tmp_path, variant):
    """Corrections are as they were, and the router was trained."""
    compare_replays(write_folder(tmp_path, "glm4_moe"), tmp_path, VARIANTS[variant])
    before = load_file(tmp_path / "model" / "model.safetensors")
    if variant == "adapter":
        return
    after = parameters(tmp_path / "trainer")
    corrections = [name for name in before if name.endswith("e_score_correction_bias")]
    assert len(corrections) == 2 and before.keys() == after.keys()
    for name in corrections:
        np.testing.assert_array_equal(after[name], before[name])
        router = name.replace("e_score_correction_bias", "weight")
        assert np.abs(after[router] - before[router]).max() > 1e-3


def compare_replays(folder, tmp_path, changes):
    for replayed in ("none", "trainer", "sampler"):
        directory = tmp_path / replayed
        changes = changes | {"optimizer__learning_rate": 3e-2}
        train(run(folder, directory, replayed, **changes))
    assert_same_metrics(tmp_path / "sampler" / "run", tmp_path / "trainer" / "run")
    routed, other = parameters(tmp_path / "trainer"), parameters(tmp_path / "none")
    assert max(np.abs(routed[name] - other[name]).max() for name in routed) > 1e-3


@pytest.mark.exhaustive
@pytest.mark.parametrize("variant", ["one turn", "episodes"])
def test_two_processes_record_as_one_does(folder, tmp_path, variant):
    # At a higher rate AdamW makes much of gradients that are nothing but rounding.
    changes = VARIANTS[variant] | {"mesh__fsdp": 8}
    one, two = tmp_path / "one", tmp_path / "two"
    two.mkdir()  # the outputs of its processes lie beside the run
    train(run(folder, one, "sampler", **changes))
    run_joined(folder, run(folder, two, "sampler", **changes))
    assert_same_metrics(two / "run", one / "run")


@pytest.mark.parametrize("replayed", ["sampler", "trainer"])
def test_a_policy_whose_layers_are_all_dense_has_no_experts_to_replay(replayed):
    config = config_of({"update.replay_routing": replayed})
    decoder = parse_config(family("glm4_moe", first_k_dense_replace=3))
    with pytest.raises(ValueError, match=r"update\.replay_routing .*'glm4_moe'"):
        replayed_routing(config, decoder)
    sparse = parse_config(family("glm4_moe", first_k_dense_replace=2))
    assert replayed_routing(config, sparse) is not None
