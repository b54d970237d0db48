"""Runs that train tokens through the experts that the sampler in this process chose."""

import json

import pytest

from tests.model.families import each
from tests.sampler.vllm.fake_server import write_checkpoint
from tests.training.joined_runs import run_joined
from tests.training.options import config_of
from tests.training.test_hosts import assert_same_metrics
from tests.training.test_server import EPISODES, LENGTHS
from twinkle_jax.training import train

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
    place = tmp_path_factory.mktemp("mixture")
    write_checkpoint(place / "model", name="qwen3_moe", characters="0123456789+-*()=")
    rows = [{"prompt": f"{a}+2=", "answer": str(a + 2)} for a in range(6)]
    (place / "task.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return place


def settings(folder, directory, replayed, **changes):
    return {
        "model": str(folder / "model"),
        "task": str(folder / "task.jsonl"),
        "reward": LENGTHS,
        "steps": 2,
        "output_dir": str(directory),
        "rollout.prompts": 2,
        "rollout.num_samples": 4,
        "rollout.max_new_tokens": 8,
        "rollout.max_prompt_tokens": 32,
        "update.mini_batches": 2,
        "update.replay_routing": replayed,
        "optimizer.learning_rate": 3e-2,
        "evaluation.every": 0,
        "logging.samples_every": 0,
    } | {name.replace("__", "."): value for name, value in changes.items()}


@pytest.mark.slow
@pytest.mark.parametrize("variant", each(list(VARIANTS), default=2))
def test_experts_of_the_sampler_are_those_of_a_scoring_pass(folder, tmp_path, variant):
    """In float32; and in the second update of a step the router would choose others."""
    for replayed in ("none", "trainer", "sampler"):
        directory = tmp_path / replayed
        train(config_of(settings(folder, directory, replayed, **VARIANTS[variant])))
    assert_same_metrics(tmp_path / "sampler", tmp_path / "trainer")
    with pytest.raises(AssertionError):
        assert_same_metrics(tmp_path / "none", tmp_path / "trainer")


@pytest.mark.exhaustive
@pytest.mark.parametrize("variant", ["one turn", "episodes"])
def test_two_processes_record_as_one_does(folder, tmp_path, variant):
    # At a higher rate AdamW makes much of gradients that are nothing but rounding.
    changes = VARIANTS[variant] | {"mesh__fsdp": 8, "optimizer__learning_rate": 1e-3}
    places = tmp_path / "one", tmp_path / "two"
    one, two = (config_of(settings(folder, place, "sampler", **changes)) for place in places)
    train(one)
    run_joined(folder, two)
    assert_same_metrics(tmp_path / "two", tmp_path / "one")
