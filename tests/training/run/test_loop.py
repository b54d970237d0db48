"""The loop: a run that is interrupted and gone on with is the run that was not interrupted."""

import dataclasses
import json
import os
import signal

import pytest

from twinkle_jax.data import ArithmeticTask
from twinkle_jax.reward import FunctionReward
from twinkle_jax.training import (
    EvaluationConfig,
    LoggingConfig,
    OptimizerConfig,
    RolloutConfig,
    TrainConfig,
    UpdateConfig,
    export,
    load_policy,
    save_policy,
    small_policy,
    train,
)

TIMES = ("time/sample", "step_time", "tokens_per_second")


def tiny(directory, **changes):
    """Six problems, four a step: an epoch ends within the second step."""
    model, task = directory / "model", directory / "task.jsonl"
    if not model.exists():
        save_policy(small_policy(1), str(model))
        problems = [ArithmeticTask(1, size=6).problem(i) for i in range(6)]
        lines = [json.dumps({"prompt": f"{p}=", "answer": a}) for p, a in problems]
        task.write_text("\n".join(lines))
    settings = {
        "model": str(model),
        "task": str(task),
        "reward": "exact",
        "steps": 4,
        "rollout": RolloutConfig(prompts=4, num_samples=4, max_new_tokens=4),
        "update": UpdateConfig(mini_batches=2, epochs=2, micro_batch_rows=4, kl_beta=0.01),
        "optimizer": OptimizerConfig(learning_rate=1e-2, warmup_steps=3),
        "evaluation": EvaluationConfig(every=2, problems=4, path=str(task)),
        "logging": LoggingConfig(checkpoint_every=1, keep_checkpoints=9, samples_every=2),
    }
    return TrainConfig(**(settings | changes))


def short_answers():
    return FunctionReward(lambda text, truth: float(len(text) < 3))


def interrupt_at(call, number=signal.SIGTERM):
    """A reward that gets the process a signal while it scores for the given time."""
    inner, calls = short_answers(), []

    def reward(trajectories, truths):
        calls.append(1)
        if len(calls) == call:
            os.kill(os.getpid(), number)
        return inner(trajectories, truths)

    return reward


def lines(directory):
    found = [json.loads(x) for x in (directory / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if k not in TIMES} for line in found]


def arrays(directory, step):
    """All files of a checkpoint's arrays that are told by their bytes: the exported parameters."""
    export(directory, directory / f"exported-{step}", step=step)
    return (directory / f"exported-{step}" / "model.safetensors").read_bytes()


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    config = tiny(folder, output_dir=str(folder / "whole"))
    return folder, config, train(config, reward=short_answers())


def test_a_run_leaves_all_that_there_is_to_know(whole):
    folder, _, summary = whole
    run = folder / "whole"
    assert json.loads((run / "summary.json").read_text()) == summary
    assert summary["steps"] == 4
    assert summary["interrupted"] is False
    assert 0 <= summary["accuracy_after"] <= 1
    metrics = lines(run)
    assert [line["step"] for line in metrics] == [1, 2, 3, 4]
    names = {"reward", "reward_std", "frac_reward_zero_std", "kl", "entropy", "grad_norm", "loss"}
    names |= {"completions/mean_length", "sampling/logp_diff/max", "learning_rate", "num_tokens"}
    assert names <= set(metrics[0])
    assert "eval/accuracy" in metrics[1]
    assert (run / "curves.png").stat().st_size > 5_000
    assert json.loads((run / "config.json").read_text())["steps"] == 4
    assert load_policy(str(run / "policy")).config.vocab_size == small_policy(1).config.vocab_size
    assert arrays(run, 4) == (run / "policy" / "model.safetensors").read_bytes()
    assert arrays(run, 3) != arrays(run, 4)


@pytest.mark.exhaustive
@pytest.mark.parametrize("after", [0, 1, 3])
def test_interrupted_and_resumed_it_is_the_same_run(whole, tmp_path, after):
    folder, config, summary = whole
    run = tmp_path / "run"
    config = dataclasses.replace(config, output_dir=str(run))
    evaluations = 1 + after // 2  # which score too
    reward = interrupt_at(evaluations + after + 1)
    assert train(config, reward=reward)["interrupted"]
    assert not (run / "summary.json").exists()
    resumed = train(dataclasses.replace(config, resume="auto"), reward=short_answers())
    assert resumed["steps"] == 4
    assert resumed["accuracy_before"] == summary["accuracy_before"]
    assert lines(run) == lines(folder / "whole")
    assert arrays(run, 4) == arrays(folder / "whole", 4)


def test_a_run_that_is_done_stays_as_it_is(whole, tmp_path):
    folder, config, _ = whole
    before = (folder / "whole" / "metrics.jsonl").read_bytes()
    again = train(dataclasses.replace(config, resume="auto"), reward=short_answers())
    assert again["steps"] == 4
    assert (folder / "whole" / "metrics.jsonl").read_bytes() == before


def test_another_run_can_be_gone_on_with_elsewhere(whole, tmp_path):
    folder, config, _ = whole
    longer = dataclasses.replace(
        config, output_dir=str(tmp_path / "longer"), resume=str(folder / "whole"), steps=5
    )
    assert train(longer, reward=short_answers())["steps"] == 5
    assert lines(tmp_path / "longer")[:4] == lines(folder / "whole")
    assert len(lines(folder / "whole")) == 4


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({}, FileExistsError, "output_dir must be empty or new"),
        ({"resume": "auto", "seed": 1}, ValueError, "seed must be 0, as it was, got 1"),
        (
            {"resume": "auto", "rollout": RolloutConfig(prompts=2, num_samples=4)},
            ValueError,
            "rollout.prompts must be 4, as it was, got 2",
        ),
        ({"resume": "nowhere"}, ValueError, "resume must be auto, never or the directory"),
    ],
)
def test_a_run_is_never_lost_by_accident(whole, changes, error, message):
    folder, config, _ = whole
    before = sorted(p.name for p in (folder / "whole").rglob("*"))
    with pytest.raises(error, match=message):
        train(dataclasses.replace(config, **changes), reward=short_answers())
    assert sorted(p.name for p in (folder / "whole").rglob("*")) == before


def test_another_data_set_is_refused(whole, tmp_path):
    folder, config, _ = whole
    original = (folder / "task.jsonl").read_text()
    (folder / "task.jsonl").write_text(original.replace("=", " =", 1))
    try:
        with pytest.raises(ValueError, match="data must be"):
            train(dataclasses.replace(config, resume="auto"), reward=short_answers())
    finally:
        (folder / "task.jsonl").write_text(original)


@pytest.mark.exhaustive
def test_overwrite_begins_anew_but_deletes_runs_alone(tmp_path):
    config = tiny(tmp_path, output_dir=str(tmp_path / "run"), steps=0)
    train(config, reward=short_answers())
    summary = train(dataclasses.replace(config, overwrite=True), reward=short_answers())
    assert summary["steps"] == 0
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter.txt").write_text("years of work")
    other = dataclasses.replace(config, output_dir=str(tmp_path / "thesis"), overwrite=True)
    with pytest.raises(FileExistsError, match="must hold a run to be overwritten"):
        train(other, reward=short_answers())
    assert (tmp_path / "thesis" / "chapter.txt").exists()


def test_what_is_shown_says_who_answered_what(whole, capsys, tmp_path):
    _, config, _ = whole
    config = dataclasses.replace(config, output_dir=str(tmp_path / "run"), steps=2)
    train(config, reward=short_answers())
    printed = capsys.readouterr().out
    assert "step 2/2  reward" in printed
    assert "step 2, completions of: " in printed
    assert "held-out accuracy" in printed
