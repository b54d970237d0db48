"""Runs: what they leave, and that an interrupted and resumed one is the uninterrupted one."""

import dataclasses
import json
import os
import shutil
import signal

import jax
import numpy as np
import pytest

from tests.model.families import each
from tests.training.runs import (
    arrays,
    assert_same_run,
    copy_until,
    end_by_signal,
    flags,
    learnt,
    lines,
    metrics,
    run,
    steps,
)
from tests.training.small_run import EVERY_STEP, Scorer, config, evaluation, update
from twinkle_jax.command import main
from twinkle_jax.data import read_jsonl
from twinkle_jax.reward import find_reward
from twinkle_jax.training import (
    EvaluationConfig,
    LoraSettings,
    OptimizerConfig,
    RolloutConfig,
    evaluate,
    export,
    load_policy,
    save_policy,
    start,
    tracking,
    train,
)
from twinkle_jax.training.config import from_dict, with_setting
from twinkle_jax.training.run_directory import prepare_directory, saved_settings

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


JUDGE = """
def says_something(trajectories, truths):
    return [float(t["messages"][-1]["content"] != "") for t in trajectories]
"""


class Listener(Scorer):
    """Remembers what was said in each call."""

    def __init__(self):
        super().__init__()
        self.heard = []

    def __call__(self, trajectories, truths):
        self.heard.append([t["messages"] for t in trajectories])
        return super().__call__(trajectories, truths)


@pytest.fixture(scope="module")
def uninterrupted(folder):
    run_config, listener = own_config(folder, folder / "whole"), Listener()
    return run_config, train(run_config, reward=listener), listener.heard


def test_a_run_leaves_all_that_there_is_to_know(folder, uninterrupted):
    _, summary, _ = uninterrupted
    run = folder / "whole"
    assert json.loads((run / "summary.json").read_text()) == summary
    assert summary["steps"] == 4
    assert summary["interrupted"] is False
    assert 0 <= summary["accuracy_after"] <= 1
    records = lines(run)
    assert [line["step"] for line in records] == [1, 2, 3, 4]
    names = {"reward", "reward_std", "frac_reward_zero_std", "kl", "entropy", "grad_norm", "loss"}
    names |= {"completions/mean_length", "sampling/logp_diff/max", "learning_rate", "num_tokens"}
    assert names <= set(records[0])
    rates = [line["learning_rate"] for line in records]
    assert rates == pytest.approx([1e-2 / 3, 2e-2 / 3, 1e-2, 1e-2])
    assert "eval/accuracy" in records[1]
    sampled = [8 * line["completions/mean_length"] for line in records]  # 8 completions a step
    assert [line["num_tokens"] for line in records] == pytest.approx(np.cumsum(sampled))
    timed = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert summary["seconds"] == pytest.approx(sum(x["step_time"] for x in timed), abs=1e-3)
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
        assert count == step * UPDATES - sum(x["updates_without_signal"] for x in records[:step])


@pytest.mark.slow
def test_what_is_judged_is_the_policy_as_it_is_by_then(folder, uninterrupted):
    """Before the first step and once after the fourth, the last; the sampled ones lie between."""
    run_config, _, calls = uninterrupted
    prompts = read_jsonl(run_config.evaluation.path)[: run_config.evaluation.problems]
    for call, name in ((0, "model"), (6, "whole/policy")):
        listener = Listener()
        evaluate(load_policy(str(folder / name)), prompts, listener, run_config.rollout)
        assert calls[call] == listener.heard[0]
    assert len(calls) == 7 and calls[0] not in (calls[3], calls[6])


def test_adapters_go_on_with_the_base_that_they_were_trained_on(folder, tmp_path):
    """Its files may be overwritten, or downloaded anew after a commit on the hub."""
    shutil.copytree(folder / "model", tmp_path / "model")
    settings = {"model": str(tmp_path / "model"), "lora": LoraSettings(rank=1)}
    train(config(folder, tmp_path / "run", steps=0, **settings), reward=Scorer())
    other = load_policy(str(tmp_path / "model"))
    other = other._replace(params=jax.tree.map(lambda x: x + 1, other.params))
    save_policy(other, tmp_path / "model")
    with pytest.raises(ValueError, match=r"^model must have the parameters"):
        train(config(folder, tmp_path / "run", steps=1, resume="auto", **settings), reward=Scorer())
    with pytest.raises(ValueError, match=r"^model must have the parameters"):
        export(tmp_path / "run", tmp_path / "merged", merge=True)


@pytest.mark.slow
def test_before_the_first_step_other_problems_are_measured_again(folder, tmp_path):
    def first_is_right(trajectories, truths):
        return [float(i == 0) for i in range(len(trajectories))]

    for problems, expected in ((4, 0.25), (2, 0.5)):
        (tmp_path / "run" / "summary.json").unlink(missing_ok=True)
        settings = dataclasses.replace(evaluation(folder, 0), problems=problems)
        changes = {"evaluation": settings, "steps": 0, "resume": "auto"}
        summary = train(config(folder, tmp_path / "run", **changes), reward=first_is_right)
        assert summary["accuracy_before"] == summary["accuracy_after"] == expected
        assert summary["reward_before"] == summary["reward_after"] == expected


@pytest.mark.slow
def test_an_evaluation_may_have_a_reward_of_its_own(folder, tmp_path):
    """A policy may learn from what is easy to get, and be judged by what is wanted."""
    (tmp_path / "judge.py").write_text(JUDGE)
    asked, judge = Listener(), f"{tmp_path / 'judge.py'}:says_something"
    run_config = own_config(folder, tmp_path / "run", steps=2)
    run_config = with_setting(run_config, "evaluation.reward", judge)
    summary = train(run_config, reward=asked)
    assert len(asked.heard) == 2  # one call a step
    prompts = read_jsonl(run_config.evaluation.path)[: run_config.evaluation.problems]
    policy = load_policy(str(tmp_path / "run" / "policy"))
    held_out_metrics = evaluate(policy, prompts, find_reward(judge), run_config.rollout)
    assert summary["accuracy_after"] == lines(tmp_path / "run")[1]["eval/accuracy"]
    assert summary["accuracy_after"] == held_out_metrics["accuracy"] != summary["accuracy_before"]
    assert summary["reward_after"] == held_out_metrics["reward"]


@pytest.mark.parametrize("after", each([1, 0, 3]))
def test_interrupted_and_resumed_is_uninterrupted(folder, uninterrupted, tmp_path, after):
    _, summary, _ = uninterrupted
    run_config = own_config(folder, tmp_path / "run")
    evaluations = 1 + after // 2  # which score too
    reward = Scorer(**{f"call{evaluations + after + 1}": interrupt})
    assert train(run_config, reward=reward)["interrupted"]
    assert len(metrics(tmp_path / "run")) == after
    assert not (tmp_path / "run" / "summary.json").exists()
    resumed = train(dataclasses.replace(run_config, resume="auto"), reward=Scorer())
    assert resumed["steps"] == 4
    assert resumed["accuracy_before"] == summary["accuracy_before"]
    assert_same_run(tmp_path / "run", folder / "whole")


def test_a_killed_run_resumes_from_the_last_checkpoint(folder, uninterrupted, tmp_path):
    """What the metrics tell of later steps is done again, and stands there once."""
    run_config, *_ = uninterrupted
    copy_until(folder / "whole", tmp_path / "run", 2)
    changes = {"output_dir": str(tmp_path / "run"), "resume": "auto"}
    assert train(dataclasses.replace(run_config, **changes), reward=Scorer())["steps"] == 4
    assert_same_run(tmp_path / "run", folder / "whole")


def test_the_reference_is_the_policy_that_the_run_began_with(folder, uninterrupted, tmp_path):
    """Even if by then its directory holds another one, such as the one that was trained."""
    run_config, *_ = uninterrupted
    copy_until(folder / "whole", tmp_path / "run", 3)
    shutil.copytree(folder / "model", tmp_path / "kept")
    changes = {"output_dir": str(tmp_path / "run"), "resume": "auto"}
    try:
        shutil.copytree(folder / "whole" / "policy", folder / "model", dirs_exist_ok=True)
        train(dataclasses.replace(run_config, **changes), reward=Scorer())
    finally:
        shutil.copytree(tmp_path / "kept", folder / "model", dirs_exist_ok=True)
    assert_same_run(tmp_path / "run", folder / "whole")


@pytest.mark.slow
def test_another_run_can_be_gone_on_with_elsewhere(folder, uninterrupted, tmp_path):
    run_config, *_ = uninterrupted
    changes = {"output_dir": str(tmp_path / "longer"), "resume": run_config.output_dir, "steps": 5}
    longer = dataclasses.replace(run_config, **changes)
    assert train(longer, reward=Scorer())["steps"] == 5
    assert json.loads((tmp_path / "longer" / "config.json").read_text())["steps"] == 5
    assert lines(tmp_path / "longer")[:4] == lines(folder / "whole")
    assert len(lines(folder / "whole")) == 4


@pytest.mark.slow
def test_a_run_with_relative_paths_goes_on_from_anywhere(folder, tmp_path, monkeypatch):
    monkeypatch.chdir(folder)
    judged = EvaluationConfig(every=0, problems=4, path="held_out.jsonl")
    names = {"model": "model", "task": "task.jsonl", "evaluation": judged}
    names["lora"] = LoraSettings(rank=2)
    relative = config(folder, tmp_path / "run", steps=1, **names)
    before = train(relative, reward=Scorer())["accuracy_before"]
    monkeypatch.chdir(tmp_path)
    settings = from_dict(saved_settings(tmp_path / "run"))
    assert settings.task == str(folder / "task.jsonl")
    resumed = train(dataclasses.replace(settings, steps=2, resume="auto"), reward=Scorer())
    assert (resumed["steps"], resumed["accuracy_before"]) == (2, before)
    monkeypatch.chdir(folder)
    assert train(dataclasses.replace(relative, steps=3, resume="auto"), reward=Scorer())
    monkeypatch.chdir(tmp_path)
    export(tmp_path / "run", tmp_path / "exported")
    for adapter in (tmp_path / "run" / "policy", tmp_path / "exported"):
        assert load_policy(str(adapter)).base == str(folder / "model")


def test_the_setting_that_the_user_has_changed_is_named(folder, tmp_path):
    """Not one that has no effect without it."""
    (tmp_path / "tools.py").write_text('def now() -> str:\n    """Tell the time."""\n')
    turns = RolloutConfig(prompts=2, num_samples=4, max_new_tokens=4, max_turns=2)
    changes = {"rollout": turns, "steps": 0, "update": update(micro_batch_tokens=2048)}
    run_config = config(folder, tmp_path / "run", tools=str(tmp_path / "tools.py"), **changes)
    train(run_config, reward=Scorer())
    with pytest.raises(ValueError, match=r"^tools must be .* as in the run to resume, got None"):
        train(dataclasses.replace(run_config, tools=None, resume="auto"), reward=Scorer())


def test_a_resumed_run_says_that_the_file_of_its_tools_has_changed(folder, tmp_path, capsys):
    tools, run = tmp_path / "tools.py", tmp_path / "run"
    tools.write_text('def now() -> str:\n    """Tell the time."""\n')
    turns = RolloutConfig(prompts=2, num_samples=4, max_new_tokens=4, max_turns=2)
    changes = {"rollout": turns, "steps": 0, "update": update(micro_batch_tokens=2048)}
    run_config = config(folder, run, tools=str(tools), **changes)
    again = dataclasses.replace(run_config, resume="auto")
    train(run_config, reward=Scorer())
    train(again, reward=Scorer())
    assert "changed" not in capsys.readouterr().out
    tools.write_text(tools.read_text().replace("time", "date"))
    train(again, reward=Scorer())
    assert "warning: the file of tools has changed" in capsys.readouterr().out


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
def test_a_run_is_never_lost_by_accident(folder, uninterrupted, changes, error, message):
    run_config, *_ = uninterrupted
    before = sorted(p.name for p in (folder / "whole").rglob("*"))
    with pytest.raises(error, match=message):
        train(dataclasses.replace(run_config, **changes), reward=Scorer())
    assert sorted(p.name for p in (folder / "whole").rglob("*")) == before


@pytest.mark.slow
def test_other_held_out_problems_under_the_same_name_are_noticed(folder, tmp_path):
    """The accuracy before the first step was that of the problems before."""
    shutil.copy(folder / "held_out.jsonl", tmp_path)
    settings = config(folder, tmp_path / "run", steps=1, evaluation=evaluation(tmp_path, every=0))
    assert train(settings, reward=Scorer())["accuracy_before"] is not None
    path = tmp_path / "held_out.jsonl"
    path.write_text("\n".join(reversed(path.read_text().splitlines())))
    more = dataclasses.replace(settings, steps=2, resume="auto")
    assert train(more, reward=Scorer())["accuracy_before"] is None


def test_a_directory_whose_name_is_not_utf8_is_refused_before_anything(folder, tmp_path):
    """Checkpoints cannot be written there, which the first one found with a traceback."""
    with pytest.raises(ValueError, match="output_dir must be in UTF-8"):
        train(config(folder, tmp_path / os.fsdecode(b"caf\xe9")), reward=Scorer())
    assert not list(tmp_path.iterdir())


def test_a_long_prompt_ends_a_run_before_its_first_step(folder, tmp_path, monkeypatch):
    """The first step draws two of the seven prompts, and no seed is sure to draw the long one."""
    monkeypatch.setattr(start, "_ENCODED_AT_ONCE", 4)
    lines = [*(folder / "task.jsonl").read_text().splitlines(), '{"prompt": "%s", "answer": 9}']
    (tmp_path / "long.jsonl").write_text("\n".join(lines) % ("1+" * 20))
    changes = {"task": str(tmp_path / "long.jsonl"), "steps": 1}
    scorer = Scorer()
    with pytest.raises(ValueError, match=r"max_prompt_tokens=32 .* in prompt 6, '1\+1\+"):
        train(config(folder, tmp_path / "run", **changes), reward=scorer)
    held_out = EvaluationConfig(every=0, path=str(tmp_path / "long.jsonl"))
    with pytest.raises(ValueError, match=r"^held-out prompts must .* in prompt 6, '1\+1\+"):
        train(config(folder, tmp_path / "run", evaluation=held_out), reward=scorer)
    assert scorer.calls == 0
    assert not (tmp_path / "run" / "checkpoints").exists()


@pytest.mark.parametrize("text", ["{", "{}", '{"rollout": {}, "update": {}, "optimizer": {}}'])
def test_settings_that_are_damaged_are_named(folder, tmp_path, text):
    run_config = config(folder, tmp_path / "run", steps=0)
    train(run_config, reward=Scorer())
    path = tmp_path / "run" / "config.json"
    path.write_text(text)
    arguments = [*flags(folder, output_dir=tmp_path / "run", steps=1), "--resume", "auto"]
    with pytest.raises(ValueError, match=rf"^{path} must hold a run's settings"):
        train(dataclasses.replace(run_config, resume="auto", steps=1), reward=Scorer())
    assert main(["train", *arguments]) == 1


@pytest.mark.slow
def test_no_two_rollouts_share_noise(folder, tmp_path):
    """Of the same prompts, by a policy that does not change: two steps of two rollouts each."""
    lines = (folder / "task.jsonl").read_text().splitlines()[:2]
    (tmp_path / "two.jsonl").write_text("\n".join(lines))
    changes = {"task": str(tmp_path / "two.jsonl"), "steps": 2}
    changes |= {"update": update(dynamic_sampling=2, kl_beta=0.0)}
    flat = Listener()
    flat.usual = lambda lengths: [0.0] * len(lengths)
    train(config(folder, tmp_path / "run", **changes), reward=flat)
    calls = [sorted(str(messages) for messages in call) for call in flat.heard]
    assert len(calls) == 4 and len(set(map(tuple, calls))) == 4


@pytest.mark.slow
def test_another_data_set_is_refused(folder, uninterrupted):
    run_config, *_ = uninterrupted
    original = (folder / "task.jsonl").read_text()
    (folder / "task.jsonl").write_text(original.replace("=", " =", 1))
    try:
        with pytest.raises(ValueError, match="data"):
            train(dataclasses.replace(run_config, resume="auto"), reward=Scorer())
    finally:
        (folder / "task.jsonl").write_text(original)


def test_overwrite_begins_anew_but_deletes_runs_alone(folder, tmp_path):
    run_config = config(folder, tmp_path / "run", steps=0)
    train(run_config, reward=Scorer())
    summary = train(dataclasses.replace(run_config, overwrite=True), reward=Scorer())
    assert summary["steps"] == 0
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter.txt").write_text("years of work")
    other = dataclasses.replace(run_config, output_dir=str(tmp_path / "thesis"), overwrite=True)
    for overwrite in (True, False):
        with pytest.raises(FileExistsError, match=r"^output_dir must .* which holds no run"):
            train(dataclasses.replace(other, overwrite=overwrite), reward=Scorer())
    assert (tmp_path / "thesis" / "chapter.txt").exists()


def test_overwrite_deletes_neither_checkpoints_nor_what_the_run_reads(folder, tmp_path):
    """A Hugging Face checkpoint has a config.json as well, and was taken for a run."""
    model = tmp_path / "model"
    shutil.copytree(folder / "model", model)
    (model / "checkpoints").mkdir()
    kept = sorted(model.rglob("*"))
    run_config = config(folder, model, steps=0, overwrite=True)
    with pytest.raises(FileExistsError, match=r"^output_dir must .* which holds no run"):
        train(run_config, reward=Scorer())
    assert sorted(model.rglob("*")) == kept

    run = tmp_path / "run"
    train(dataclasses.replace(run_config, output_dir=str(run)), reward=Scorer())
    shutil.copytree(run, tmp_path / "copy")
    shutil.move(tmp_path / "copy", run / "earlier")
    shutil.copy(folder / "task.jsonl", run / "task.jsonl")
    (run / "mine.py").write_text("class Game:\n    pass\n")
    code = f"{run / 'mine.py'}:Game"
    kept = sorted(run.rglob("*"))
    for name, changes in {
        "model": {"model": str(run / "policy")},
        "task": {"task": str(run / "task.jsonl")},
        "evaluation.path": {"evaluation": EvaluationConfig(path=str(run / "task.jsonl"))},
        "resume": {"resume": str(run / "earlier")},
        "reward": {"reward": ["exact", code]},
        "evaluation.reward": {"evaluation": EvaluationConfig(reward=code)},
        "environment": {"environment": f"trl:{code}"},
        "tools": {"tools": code.removesuffix(":Game")},
    }.items():
        again = dataclasses.replace(run_config, output_dir=str(run), **changes)
        with pytest.raises(FileExistsError, match=rf"^output_dir must not hold {name}, "):
            prepare_directory(again, run)
    assert sorted(run.rglob("*")) == kept


def test_what_is_shown_says_who_answered_what(folder, capsys, tmp_path):
    train(own_config(folder, tmp_path / "run", steps=2), reward=Scorer())
    printed = capsys.readouterr().out
    assert "step 2/2  reward" in printed
    assert "step 2, completions of: " in printed
    before, after = printed.split("step 1/2  reward")
    assert "held-out accuracy before the first step: " in before
    assert "held-out accuracy" in after


def test_pass_at_k_of_the_last_evaluation_is_in_the_summary(folder, tmp_path, capsys):
    """Where no step has an evaluation after it, `metrics.jsonl` has none."""
    at_the_ends = EvaluationConfig(every=0, problems=2, path=str(folder / "task.jsonl"), pass_k=2)
    summary = train(config(folder, tmp_path / "run", steps=0, evaluation=at_the_ends))
    chance = summary["pass@2_after"]
    assert json.loads((tmp_path / "run" / "summary.json").read_text()) == summary
    printed = capsys.readouterr().out
    assert f", pass@2 {chance:.3f}\n" in printed.split("held-out accuracy before the first step")[1]
    assert f"held-out pass@2 {chance:.3f} after\n" in printed


# Rewards without a signal: the policy stays as it is, and the run says so.

DECAYING = OptimizerConfig(learning_rate=1e-2, warmup_steps=1, options={"weight_decay": 0.1})


def decaying_config(folder, directory, **changes):
    settings = {"update": update(advantage="grpo", scale="group", kl_beta=0.0)}
    settings |= {"optimizer": DECAYING, "logging": EVERY_STEP}
    return config(folder, directory, **(settings | changes))


def column(directory, name):
    return [line[name] for line in lines(directory)]


@pytest.mark.slow
@pytest.mark.parametrize("advantage", ["grpo", "rloo"])
def test_a_constant_reward_changes_nothing(folder, tmp_path, capsys, advantage):
    asked = update(advantage=advantage, scale="group", kl_beta=0.0)
    run_config = decaying_config(folder, tmp_path / "run", update=asked, steps=3)
    train(run_config, reward=lambda trajectories, truths: [0.7] * len(trajectories))
    before = learnt(tmp_path / "run", 0)
    assert len(before) > 20
    assert learnt(tmp_path / "run", 3) == before
    trained = tmp_path / "run" / "policy" / "model.safetensors"
    assert trained.read_bytes() == (folder / "model" / "model.safetensors").read_bytes()
    assert column(tmp_path / "run", "frac_reward_zero_std") == [1, 1, 1]
    assert column(tmp_path / "run", "updates_without_signal") == [1, 1, 1]
    printed = " ".join(capsys.readouterr().out.split())
    assert "No update was made: parameters and the optimizer's moments are as before" in printed


def rewards_of_steps(*, first):
    """Short answers are liked, but in steps 2 and 3 all answers are."""
    calls = iter(range(first, 9))

    def reward(trajectories, truths):
        flat = next(calls) in (2, 3)
        return [float(flat or len(t["messages"][-1]["content"]) < 3) for t in trajectories]

    return reward


@pytest.mark.slow
def test_a_run_resumes_exactly_among_steps_without_a_signal(folder, tmp_path):
    run_config = decaying_config(folder, tmp_path / "whole")
    train(run_config, reward=rewards_of_steps(first=1))
    assert column(tmp_path / "whole", "updates_without_signal")[1:3] == [1, 1]
    assert learnt(tmp_path / "whole", 3) == learnt(tmp_path / "whole", 1)
    assert learnt(tmp_path / "whole", 1) != learnt(tmp_path / "whole", 0)

    run_config = dataclasses.replace(run_config, output_dir=str(tmp_path / "cut"), steps=2)
    train(run_config, reward=rewards_of_steps(first=1))
    run_config = dataclasses.replace(run_config, steps=4, resume="auto")
    train(run_config, reward=rewards_of_steps(first=3))
    assert arrays(tmp_path / "cut", 4) == arrays(tmp_path / "whole", 4)
    assert metrics(tmp_path / "cut") == metrics(tmp_path / "whole")


class Lines:
    """A tracker that ends the run after a step."""

    def __init__(self, last=None):
        self.lines, self.last, self.closed = [], last, 0

    def write(self, step, numbers):
        self.lines.append({"step": step, **numbers})
        if step == self.last:
            raise StopIteration("that is enough")

    def close(self):
        self.closed += 1


@pytest.mark.slow
def test_trackers_of_a_caller_have_all_metrics_and_may_end_a_run(folder, tmp_path):
    tracker, other = Lines(last=2), Lines()
    with pytest.raises(StopIteration, match="that is enough"):
        train(own_config(folder, tmp_path / "run"), trackers=[tracker])
    assert steps(tmp_path / "run")[-1] == 2
    train(own_config(folder, tmp_path / "run", resume="auto"), trackers=[other])
    rows = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    # The last line of the first is written again: it was not known to be complete.
    assert tracker.lines[:1] + other.lines == [json.loads(row) for row in rows]
    assert [len(tracker.lines), tracker.closed, other.closed] == [2, 1, 1]


def test_what_is_no_tracker_is_refused(folder, tmp_path):
    for tracker in (Lines, print, object()):
        with pytest.raises(TypeError, match=r"^trackers\[1\] must be an object with write"):
            train(own_config(folder, tmp_path / "run"), trackers=[Lines(), tracker])
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_an_error_of_a_tracker_loses_no_step(folder, uninterrupted, tmp_path, monkeypatch):
    """All steps since the last checkpoint were lost; the step's line is written again."""
    rarely = dataclasses.replace(SHOWN, checkpoint_every=50, tensorboard=True)
    run_config = own_config(folder, tmp_path, logging=rarely)
    wrote = tracking.TensorBoard.write

    def write(self, step, numbers):
        if step == 3:
            raise ConnectionError("the tracker is gone")
        wrote(self, step, numbers)

    with monkeypatch.context() as patch:
        patch.setattr(tracking.TensorBoard, "write", write)
        with pytest.raises(ConnectionError, match="the tracker is gone"):
            train(run_config, reward=Scorer())
    assert steps(tmp_path) == [0, 3]
    train(dataclasses.replace(run_config, resume="auto"), reward=Scorer())
    assert metrics(tmp_path) == metrics(folder / "whole")
    assert arrays(tmp_path, 4) == arrays(folder / "whole", 4)


# A signal during an evaluation ends it; the resumed run repeats it.

EVERY = 2  # steps from one evaluation to the next


def judged_config(folder, directory, **changes):
    """Each evaluation calls the reward twice, once for the most probable completions."""
    task = str(folder / "task.jsonl")
    often = EvaluationConfig(every=EVERY, problems=2, path=task, pass_k=2)
    return config(folder, directory, **({"evaluation": often} | changes))


@pytest.fixture(scope="module")
def judged(folder):
    reward = Scorer()
    train(judged_config(folder, folder / "judged"), reward=reward)
    # 2 before the first step; 1 a step; 2 after steps 2 and 4, the last, which is not judged twice
    assert reward.calls == 2 + 4 + 2 * 2
    assert "eval/accuracy" in metrics(folder / "judged")[1]
    return folder / "judged"


# In the first part of the evaluation after step 2, and of that after the last step; in a second
# part, which is the last thing to be done, so that it is finished.
MOMENTS = [(5, 2, 1), (9, 4, 3), (10, 4, 4), (6, 2, 2)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("call", "step", "lines"),
    [pytest.param(*m, marks=[pytest.mark.exhaustive] if m[0] != 9 else []) for m in MOMENTS],
)
def test_an_interrupted_evaluation_is_repeated(folder, judged, tmp_path, capsys, call, step, lines):
    run_config, reward = (
        judged_config(folder, tmp_path / "run"),
        Scorer(**{f"call{call}": interrupt}),
    )
    summary = train(run_config, reward=reward)
    assert (summary["interrupted"], summary["steps"]) == (True, step)
    assert reward.calls == call  # and no batch later
    assert steps(tmp_path / "run") == [0, step]
    assert len(metrics(tmp_path / "run")) == lines
    assert f"interrupted after step {step}, which is saved" in capsys.readouterr().out
    resumed = train(dataclasses.replace(run_config, resume="auto"), reward=Scorer())
    assert resumed["steps"] == 4
    assert_same_run(tmp_path / "run", judged)
    again = train(dataclasses.replace(run_config, resume="auto", steps=5), reward=Scorer())
    assert again["steps"] == 5
    assert metrics(tmp_path / "run")[:4] == metrics(judged)


@pytest.mark.exhaustive
def test_an_interrupted_evaluation_at_the_end_is_repeated(folder, tmp_path):
    """Of a run whose last step is not evaluated by itself."""
    run_config, reward = judged_config(folder, tmp_path / "run", steps=3), Scorer(call8=interrupt)
    assert train(run_config, reward=reward)["interrupted"]
    assert (reward.calls, len(metrics(tmp_path / "run"))) == (8, 3)
    resumed = train(dataclasses.replace(run_config, resume="auto"), reward=Scorer())
    whole = train(judged_config(folder, tmp_path / "whole", steps=3), reward=Scorer())
    names = ("accuracy_before", "accuracy_after", "reward_before", "reward_after", "steps")
    assert [resumed[name] for name in names] == [whole[name] for name in names]
    assert_same_run(tmp_path / "run", tmp_path / "whole")


@pytest.mark.exhaustive
def test_an_interrupted_evaluation_may_be_left_out_when_resuming(folder, judged, tmp_path):
    run_config = judged_config(folder, tmp_path / "run")
    train(run_config, reward=Scorer(call5=interrupt))
    without = dataclasses.replace(run_config, resume="auto", evaluation=EvaluationConfig(every=0))
    train(without, reward=Scorer())
    assert "eval/accuracy" not in "".join(metrics(tmp_path / "run"))
    assert arrays(tmp_path / "run", 4) == arrays(judged, 4)


@pytest.mark.exhaustive
def test_the_signal_handler_ends_a_long_evaluation(folder, tmp_path):
    evaluated = {"evaluation.every": EVERY, "evaluation.path": folder / "task.jsonl"}
    rarely = evaluated | {"logging.checkpoint_every": 4, "steps": 4}
    done = run(folder, tmp_path / "whole", **rarely)
    assert done.returncode == 0, done.stderr
    end_by_signal(folder, tmp_path / "run", "reward:4:SIGTERM:600", **rarely)
    assert steps(tmp_path / "run") == [0, EVERY]
    assert len(metrics(tmp_path / "run")) == EVERY - 1
    resumed = run(folder, tmp_path / "run", resume="auto", **rarely)
    assert resumed.returncode == 0, resumed.stderr
    assert_same_run(tmp_path / "run", tmp_path / "whole")
