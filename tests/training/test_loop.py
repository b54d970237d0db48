"""The loop: a run that is interrupted and gone on with is the run that was not interrupted."""

import dataclasses
import json
import os
import shutil
import signal

import numpy as np
import pytest

from tests.training.runs import arrays, assert_same_run, copy_until, metrics
from tests.training.small_run import EVERY_STEP, Scorer, config, evaluation, update
from twinkle_jax.data import read_jsonl
from twinkle_jax.reward import find_reward
from twinkle_jax.training import (
    OptimizerConfig,
    RolloutConfig,
    evaluate,
    export,
    load_policy,
    train,
)

UPDATES = 4  # a step
SHOWN = dataclasses.replace(EVERY_STEP, samples_every=2)


def own_config(folder, directory, **changes):
    settings = {
        "update": update(mini_batches=2, epochs=2),
        "evaluation": evaluation(folder, every=2),
        "optimizer": OptimizerConfig(learning_rate=1e-2, warmup_steps=3),
        "logging": SHOWN,
    }
    return config(folder, directory, **(settings | changes))


def interrupt(lengths, number=signal.SIGTERM):
    """Score as usual, but get the process a signal meanwhile."""
    os.kill(os.getpid(), number)
    return Scorer.usual(lengths)


def lines(directory):
    return [json.loads(line) for line in metrics(directory)]


JUDGE = """
def says_something(trajectories, truths):
    return [float(t["messages"][-1]["content"] != "") for t in trajectories]
"""


class Listener(Scorer):
    """Remembers what was said in each call."""

    def __init__(self):
        super().__init__()
        self.said = []

    def __call__(self, trajectories, truths):
        self.said.append([t["messages"] for t in trajectories])
        return super().__call__(trajectories, truths)


@pytest.fixture(scope="module")
def whole(folder):
    own, listener = own_config(folder, folder / "whole"), Listener()
    return own, train(own, reward=listener), listener.said


def test_a_run_leaves_all_that_there_is_to_know(folder, whole):
    _, summary, _ = whole
    run = folder / "whole"
    assert json.loads((run / "summary.json").read_text()) == summary
    assert summary["steps"] == 4
    assert summary["interrupted"] is False
    assert 0 <= summary["accuracy_after"] <= 1
    found = lines(run)
    assert [line["step"] for line in found] == [1, 2, 3, 4]
    names = {"reward", "reward_std", "frac_reward_zero_std", "kl", "entropy", "grad_norm", "loss"}
    names |= {"completions/mean_length", "sampling/logp_diff/max", "learning_rate", "num_tokens"}
    assert names <= set(found[0])
    rates = [line["learning_rate"] for line in found]
    assert rates == pytest.approx([1e-2 / 3, 2e-2 / 3, 1e-2, 1e-2])
    assert "eval/accuracy" in found[1]
    assert (run / "curves.png").stat().st_size > 5_000
    assert json.loads((run / "config.json").read_text())["steps"] == 4
    begun, ended = (load_policy(str(x)) for x in (folder / "model", run / "policy"))
    assert begun.config == ended.config
    export(run, folder / "exported", step=3)
    exported, policy = (x / "model.safetensors" for x in (folder / "exported", run / "policy"))
    assert exported.read_bytes() != policy.read_bytes()
    with pytest.raises(FileExistsError, match="--overwrite"):
        export(run, folder / "exported", step=4)
    export(run, folder / "exported", step=4, overwrite=True)
    assert exported.read_bytes() == policy.read_bytes()
    for step in (0, 3):
        (count,) = np.frombuffer(arrays(run, step)["['state'].step"][2], np.int32)
        assert count == step * UPDATES - sum(x["updates_without_signal"] for x in found[:step])


def test_what_is_judged_is_the_policy_as_it_is_by_then(folder, whole):
    """Before the first step, after the fourth and at the end; the sampled ones lie between."""
    own, _, said = whole
    prompts = read_jsonl(own.evaluation.path)[: own.evaluation.problems]
    for call, name in ((0, "model"), (6, "whole/policy"), (7, "whole/policy")):
        listener = Listener()
        evaluate(load_policy(str(folder / name)), prompts, listener, max_new_tokens=4)
        assert said[call] == listener.said[0]
    assert len(said) == 8 and said[0] not in (said[3], said[6])


def test_an_evaluation_may_have_a_reward_of_its_own(folder, tmp_path):
    """A policy may learn from what is easy to get, and be judged by what is wanted."""
    (tmp_path / "judge.py").write_text(JUDGE)
    asked, judge = Listener(), f"{tmp_path / 'judge.py'}:says_something"
    own = own_config(folder, tmp_path / "run", steps=2)
    own = dataclasses.replace(own, evaluation=dataclasses.replace(own.evaluation, reward=judge))
    summary = train(own, reward=asked)
    assert len(asked.said) == 2  # one call a step
    prompts = read_jsonl(own.evaluation.path)[: own.evaluation.problems]
    policy = load_policy(str(tmp_path / "run" / "policy"))
    found = evaluate(policy, prompts, find_reward(judge), max_new_tokens=4)
    assert summary["accuracy_after"] == lines(tmp_path / "run")[1]["eval/accuracy"]
    assert summary["accuracy_after"] == found["accuracy"] != summary["accuracy_before"]


@pytest.mark.parametrize(
    "after", [1, *(pytest.param(n, marks=pytest.mark.exhaustive) for n in (0, 3))]
)
def test_interrupted_and_resumed_it_is_the_same_run(folder, whole, tmp_path, after):
    _, summary, _ = whole
    own = own_config(folder, tmp_path / "run")
    evaluations = 1 + after // 2  # which score too
    reward = Scorer(**{f"call{evaluations + after + 1}": interrupt})
    assert train(own, reward=reward)["interrupted"]
    assert len(metrics(tmp_path / "run")) == after
    assert not (tmp_path / "run" / "summary.json").exists()
    resumed = train(dataclasses.replace(own, resume="auto"), reward=Scorer())
    assert resumed["steps"] == 4
    assert resumed["accuracy_before"] == summary["accuracy_before"]
    assert_same_run(tmp_path / "run", folder / "whole")


def test_killed_it_goes_on_from_what_was_saved_last(folder, whole, tmp_path):
    """What the metrics tell of later steps is done again, and stands there once."""
    own, *_ = whole
    copy_until(folder / "whole", tmp_path / "run", 2)
    changes = {"output_dir": str(tmp_path / "run"), "resume": "auto"}
    assert train(dataclasses.replace(own, **changes), reward=Scorer())["steps"] == 4
    assert_same_run(tmp_path / "run", folder / "whole")


def test_the_reference_is_the_policy_that_the_run_began_with(folder, whole, tmp_path):
    """Even if by then its directory holds another one, such as the one that was trained."""
    own, *_ = whole
    copy_until(folder / "whole", tmp_path / "run", 3)
    shutil.copytree(folder / "model", tmp_path / "kept")
    changes = {"output_dir": str(tmp_path / "run"), "resume": "auto"}
    try:
        shutil.copytree(folder / "whole" / "policy", folder / "model", dirs_exist_ok=True)
        train(dataclasses.replace(own, **changes), reward=Scorer())
    finally:
        shutil.copytree(tmp_path / "kept", folder / "model", dirs_exist_ok=True)
    assert_same_run(tmp_path / "run", folder / "whole")


def test_another_run_can_be_gone_on_with_elsewhere(folder, whole, tmp_path):
    own, *_ = whole
    changes = {"output_dir": str(tmp_path / "longer"), "resume": own.output_dir, "steps": 5}
    longer = dataclasses.replace(own, **changes)
    assert train(longer, reward=Scorer())["steps"] == 5
    assert json.loads((tmp_path / "longer" / "config.json").read_text())["steps"] == 5
    assert lines(tmp_path / "longer")[:4] == lines(folder / "whole")
    assert len(lines(folder / "whole")) == 4


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({}, FileExistsError, "output_dir"),
        ({"resume": "auto", "seed": 1}, ValueError, "seed"),
        (
            {
                "resume": "auto",
                "rollout": RolloutConfig(prompts=4, max_new_tokens=4, max_prompt_tokens=32),
            },
            ValueError,
            r"rollout.prompts",
        ),
        ({"resume": "nowhere"}, ValueError, "resume"),
    ],
)
def test_a_run_is_never_lost_by_accident(folder, whole, changes, error, message):
    own, *_ = whole
    before = sorted(p.name for p in (folder / "whole").rglob("*"))
    with pytest.raises(error, match=message):
        train(dataclasses.replace(own, **changes), reward=Scorer())
    assert sorted(p.name for p in (folder / "whole").rglob("*")) == before


def test_no_two_rollouts_share_noise(folder, tmp_path):
    """Of the same prompts, by a policy that does not change: two steps of two rollouts each."""
    lines = (folder / "task.jsonl").read_text().splitlines()[:2]
    (tmp_path / "two.jsonl").write_text("\n".join(lines))
    changes = {"task": str(tmp_path / "two.jsonl"), "steps": 2}
    changes |= {"update": update(dynamic_sampling=2, kl_beta=0.0)}
    flat = Listener()
    flat.usual = lambda lengths: [0.0] * len(lengths)
    train(config(folder, tmp_path / "run", **changes), reward=flat)
    said = [sorted(str(messages) for messages in call) for call in flat.said]
    assert len(said) == 4 and len(set(map(tuple, said))) == 4


def test_another_data_set_is_refused(folder, whole):
    own, *_ = whole
    original = (folder / "task.jsonl").read_text()
    (folder / "task.jsonl").write_text(original.replace("=", " =", 1))
    try:
        with pytest.raises(ValueError, match="data"):
            train(dataclasses.replace(own, resume="auto"), reward=Scorer())
    finally:
        (folder / "task.jsonl").write_text(original)


def test_overwrite_begins_anew_but_deletes_runs_alone(folder, tmp_path):
    own = config(folder, tmp_path / "run", steps=0)
    train(own, reward=Scorer())
    summary = train(dataclasses.replace(own, overwrite=True), reward=Scorer())
    assert summary["steps"] == 0
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter.txt").write_text("years of work")
    other = dataclasses.replace(own, output_dir=str(tmp_path / "thesis"), overwrite=True)
    with pytest.raises(FileExistsError, match="output_dir"):
        train(other, reward=Scorer())
    assert (tmp_path / "thesis" / "chapter.txt").exists()


def test_what_is_shown_says_who_answered_what(folder, capsys, tmp_path):
    train(own_config(folder, tmp_path / "run", steps=2), reward=Scorer())
    printed = capsys.readouterr().out
    assert "step 2/2  reward" in printed
    assert "step 2, completions of: " in printed
    assert "held-out accuracy" in printed
