"""Supervised learning in a run: examples of a file take the place of completions."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.data.chats import chatml_tokenizer
from tests.training import small_run
from tests.training.joined_runs import run_joined
from tests.training.options import config_of
from tests.training.test_hosts import assert_same_metrics
from twinkle_jax.command import main
from twinkle_jax.data import IGNORE, PromptBatch, Template, small_tokenizer
from twinkle_jax.data.batch import pad_rows
from twinkle_jax.model import hidden_states, make_mesh, output_logits
from twinkle_jax.model.decoder.sharding import place_params
from twinkle_jax.rollout.engine import LogitsError
from twinkle_jax.training import (
    EvaluationConfig,
    LoggingConfig,
    LoraSettings,
    MeshConfig,
    OptimizerConfig,
    RolloutConfig,
    TrainConfig,
    UpdateConfig,
    begin_training,
    collect,
    evaluation,
    load_policy,
    make_recipe,
    small_policy,
    start,
    train,
    train_step,
)
from twinkle_jax.training.config import with_steps
from twinkle_jax.training.examples import check_examples, example_rows
from twinkle_jax.training.memory import evaluation_memory, fit, update_memory
from twinkle_jax.training.run_directory import saved_settings
from twinkle_jax.training.task import make_task

POLICY = small_policy(0)
USER, ASSISTANT = "user", "assistant"


def conversation(*texts):
    """Turns of the user and of the assistant, one after the other."""
    roles = (USER, ASSISTANT)
    return {"messages": [{"role": roles[i % 2], "content": x} for i, x in enumerate(texts)]}


EXAMPLES = [
    conversation("1+2=", "3"),
    conversation("10*10=", "100"),
    conversation("2+2=", "4", "4*4=", "16"),
    conversation("1+1+1+1+1+1+1+1+1+1=", "10"),
]


def learning(mesh=None, **update):
    config = TrainConfig(
        model="m",
        examples="x.jsonl",
        rollout=RolloutConfig(prompts=4, max_episode_tokens=64),
        update=UpdateConfig(**{"micro_batch_tokens": 64} | update),
        optimizer=OptimizerConfig(name="sgd", max_grad_norm=1e9),
        mesh=MeshConfig() if mesh is None else MeshConfig(fsdp=2, tensor=2),
    )
    return make_recipe(config, POLICY, None, mesh=mesh)


def learnt(recipe, examples=EXAMPLES, params=POLICY.params):
    """Take one step of gradient descent with a rate of 1."""
    params = jax.tree.map(jnp.copy, params)
    state = begin_training(params, recipe.optimizer, recipe.mesh)
    rollout, drawn = collect(recipe, params, lambda: PromptBatch(examples), jax.random.key(0))
    assert drawn == [rollout]
    return train_step(state, recipe, rollout, learning_rate=1.0, seed=(0, 0))


def cross_entropy(params, examples=EXAMPLES, policy=POLICY):
    """Of tokens of the assistant's turns, and their ends."""
    logps, kept = label_logps(params, examples, policy)
    return -jnp.sum(logps) / float(kept.sum())


def label_logps(params, examples, policy):
    """Log-probabilities of labels from all logits, 0 without one; and where there is one."""
    rows = policy.template.batch_encode(examples)
    tokens = pad_rows([row["input_ids"] for row in rows], 0)
    labels = pad_rows([row["labels"] for row in rows], IGNORE)
    logits = output_logits(params, policy.config, hidden_states(params, policy.config, tokens))
    kept = labels != IGNORE
    logps = jax.nn.log_softmax(logits)
    taken = jnp.take_along_axis(logps, np.where(kept, labels, 0)[..., None], axis=-1)[..., 0]
    return jnp.where(kept, taken, 0), kept


def test_a_step_descends_the_cross_entropy_of_all_tokens_of_the_assistant():
    """Rows of different lengths are packed, and cut into micro-batches of a few."""
    value, gradient = jax.jit(jax.value_and_grad(cross_entropy))(POLICY.params)
    state, metrics = learnt(learning(micro_batch_tokens=64))
    assert metrics["loss"] == metrics["cross_entropy"] == pytest.approx(float(value), rel=1e-5)
    moved = jax.tree.map(lambda old, new: old - new, POLICY.params, state.params)
    for expected, found in zip(*map(jax.tree.leaves, (gradient, moved)), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=2e-6)
    lengths = [len(POLICY.template.encode(x)["input_ids"]) for x in EXAMPLES]
    assert sum(lengths) > 64  # more than one micro-batch


def test_examples_have_settings_of_their_own():
    config = TrainConfig(model="m", examples="x.jsonl")
    assert (config.task, config.update.mini_batches, config.group_size) == ("examples", 1, 1)
    assert config.optimizer.learning_rate == 1e-5
    longer = RolloutConfig(max_new_tokens=2048)  # in evaluations
    longer = TrainConfig(model="m", examples="x.jsonl", task="gsm8k", rollout=longer)
    assert config.longest_row == longer.longest_row == 4096
    sampled = TrainConfig(model="m")
    assert (sampled.update.mini_batches, sampled.optimizer.learning_rate) == (4, 1e-6)


def test_rows_are_as_long_as_their_examples():
    """Padding is neither packed nor computed."""
    rows, key = POLICY.template.batch_encode(EXAMPLES), jax.random.key(0)
    rollout, _ = collect(learning(), POLICY.params, lambda: PromptBatch(EXAMPLES), key)
    assert rollout.row_lengths.tolist() == [len(row["input_ids"]) for row in rows]
    assert rollout.lengths.tolist() == [np.sum(row["labels"] != IGNORE) for row in rows]


def test_each_turn_of_the_assistant_is_learned():
    batch, lengths = example_rows(POLICY.template, EXAMPLES)
    end = POLICY.tokenizer.eos_token_id
    for example, labels, tokens, length in zip(
        EXAMPLES, batch.labels, batch.tokens, lengths, strict=True
    ):
        said = [x["content"] for x in example["messages"] if x["role"] == ASSISTANT]
        expected = [token for text in said for token in [*POLICY.tokenizer.encode(text), end]]
        assert labels[labels != IGNORE].tolist() == expected
        assert tokens[:length].tolist() == POLICY.template.encode(example)["input_ids"].tolist()


@pytest.mark.slow
def test_several_updates_of_a_step_share_its_examples():
    """Of four examples in two mini-batches, the second update has the parameters of the first."""
    recipe = learning(mini_batches=2)
    state, metrics = learnt(recipe)
    assert state.step == 2
    assert metrics["cross_entropy"] != pytest.approx(float(cross_entropy(POLICY.params)), rel=1e-4)


@pytest.mark.slow
def test_devices_share_the_examples():
    mesh = make_mesh(fsdp=2, tensor=2)
    params = place_params(POLICY.params, mesh)
    expected, metrics = learnt(learning())
    state, on_mesh = learnt(learning(mesh), params=params)
    assert on_mesh["loss"] == pytest.approx(metrics["loss"], rel=1e-5)
    for x, y in zip(*map(jax.tree.leaves, (expected.params, state.params)), strict=True):
        np.testing.assert_allclose(y, x, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_evaluations_may_have_fewer_examples_than_updates_have_mini_batches():
    results = evaluation.evaluate_examples(
        learning(mini_batches=4), POLICY.template, POLICY.params, EXAMPLES[:3]
    )
    expected = float(cross_entropy(POLICY.params, EXAMPLES[:3]))
    assert results == {"cross_entropy": pytest.approx(expected, rel=1e-5)}


@pytest.mark.slow
def test_memory_is_that_of_updates_alone():
    """Nothing is sampled, so no slots are chosen."""
    recipe, notes = learning(), []
    state = begin_training(POLICY.params, recipe.optimizer, None)
    needed = update_memory(recipe, state)
    chosen = fit(recipe, state, needed, notes.append)
    assert chosen.update.micro_batch_tokens == 64 and chosen.rollout == recipe.config.rollout
    assert [note.split()[0] for note in notes] == ["update.recompute", "update.micro_batch_tokens"]


def test_what_makes_updates_fit_is_named():
    recipe = learning()
    state = begin_training(POLICY.params, recipe.optimizer, None)
    with pytest.raises(ValueError, match=r"^update\.micro.* a smaller max_episode_tokens takes"):
        fit(recipe, state, 1, lambda note: None)


@pytest.mark.slow
def test_evaluations_take_the_prompts_of_the_task_and_not_the_examples():
    recipe = learning()
    state = begin_training(POLICY.params, recipe.optimizer, None)

    def needed(**lengths):
        rollout = RolloutConfig(max_new_tokens=8, **lengths)
        config = dataclasses.replace(recipe.config, task="arithmetic", rollout=rollout)
        return evaluation_memory(recipe._replace(config=config), state)

    short = needed(max_prompt_tokens=24, max_episode_tokens=64)
    assert short == needed(max_prompt_tokens=24, max_episode_tokens=48)
    assert short < needed(max_prompt_tokens=56, max_episode_tokens=64)


# Runs.


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("examples")
    small_run.make_files(folder)
    sums = [(a, b) for a in range(4) for b in range(4)]
    lines = [json.dumps({"prompt": f"{a}+{b}=", "completion": str(a + b)}) for a, b in sums]
    (folder / "examples.jsonl").write_text("\n".join(lines[:12]))
    (folder / "others.jsonl").write_text("\n".join(lines[12:]))
    return folder


def config(files, directory, **changes):
    settings = {
        "model": str(files / "model"),
        "examples": str(files / "examples.jsonl"),
        "output_dir": str(files / directory),
        "steps": 6,
        "rollout": RolloutConfig(prompts=8, max_episode_tokens=64),
        "update": UpdateConfig(micro_batch_tokens=64),
        "optimizer": OptimizerConfig(learning_rate=1e-2, warmup_steps=1),
        "evaluation": EvaluationConfig(every=3, path=str(files / "others.jsonl")),
        "logging": LoggingConfig(checkpoint_every=3),
    }
    return TrainConfig(**(settings | changes))


def metrics(run):
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def test_a_run_learns_from_a_file_and_is_judged_by_another(files, capsys, monkeypatch):
    """By four examples, in batches of three."""
    monkeypatch.setattr(evaluation, "BATCH", 3)
    summary = train(config(files, "run"))
    rows = metrics(files / "run")
    assert [row["loss"] for row in rows] == [row["cross_entropy"] for row in rows]
    assert rows[-1]["cross_entropy"] < 0.8 * rows[0]["cross_entropy"]
    assert rows[0]["completions/max_length"] == 2  # a digit, and the end of the turn
    assert rows[0]["num_tokens"] == 16 and not any("reward" in row for row in rows)
    policy = load_policy(str(files / "run" / "policy"))
    others = make_task(config(files, "run")).held_out
    after = float(cross_entropy(policy.params, others, policy))
    assert summary["cross_entropy_after"] == pytest.approx(after, rel=1e-5)
    assert summary["cross_entropy_after"] < summary["cross_entropy_before"]
    assert rows[-1]["eval/cross_entropy"] == summary["cross_entropy_after"]
    assert summary["accuracy_before"] is summary["accuracy_after"] is None
    shown = " ".join(capsys.readouterr().out.split())
    assert "12 examples: a pass over them takes 2 steps" in shown
    before = summary["cross_entropy_before"]
    assert f"held-out cross-entropy before the first step: {before:.3f}" in shown
    assert f"held-out cross-entropy {before:.3f} before, {after:.3f} after 6 steps" in shown
    assert (files / "run" / "curves.png").stat().st_size > 1000


@pytest.mark.slow
def test_an_interrupted_run_goes_on_as_if_it_had_not_been(files, capsys):
    train(config(files, "whole"))
    train(config(files, "parts", steps=3))
    summary = train(config(files, "parts", resume="auto"))
    assert_same_metrics(files / "parts", files / "whole")
    trained = [files / name / "policy" / "model.safetensors" for name in ("whole", "parts")]
    assert trained[0].read_bytes() == trained[1].read_bytes()
    assert summary["cross_entropy_before"] is not None
    others = files / "examples.jsonl"
    again = config(
        files, "parts", steps=7, resume="auto", evaluation=EvaluationConfig(path=str(others))
    )
    assert train(again)["cross_entropy_before"] is None  # of other examples
    assert "cross_entropy_before is not known" in capsys.readouterr().out
    with pytest.raises(ValueError, match=r"^examples must be "):
        train(config(files, "parts", steps=8, resume="auto", examples=str(files / "others.jsonl")))


@pytest.mark.slow
def test_a_file_that_has_grown_since_the_run_began_is_named(files):
    grown = files / "grown.jsonl"
    grown.write_text((files / "examples.jsonl").read_text())
    train(config(files, "grown", examples=str(grown), steps=1))
    grown.write_text(grown.read_text() + "\n" + (files / "others.jsonl").read_text())
    with pytest.raises(ValueError, match=r"^examples must hold .*grown.jsonl': prompts must be 12"):
        train(config(files, "grown", examples=str(grown), resume="auto"))


@pytest.mark.slow
def test_a_run_whose_evaluation_is_not_finite_ends(files):
    """Otherwise its summary would hold NaN, which is no JSON."""
    huge = OptimizerConfig(name="sgd", learning_rate=1e30, warmup_steps=0, max_grad_norm=1e9)
    broken = config(files, "broken", steps=1, optimizer=huge)
    with pytest.raises(LogitsError, match=r"^after step 1, the policy's logits .*learning_rate"):
        train(broken)
    row = json.loads((files / "broken" / "metrics.jsonl").read_text())
    assert row["cross_entropy"] > 0 and not (files / "broken" / "policy").exists()


@pytest.mark.slow
def test_a_checkpoint_without_a_fingerprint_of_what_was_evaluated(files, capsys, monkeypatch):
    """Older ones have the result alone, which stays known."""
    monkeypatch.setattr(start, "prompts_fingerprint", lambda prompts: None)
    before = train(config(files, "older", steps=1))["cross_entropy_before"]
    monkeypatch.undo()
    after = train(config(files, "older", steps=2, resume="auto"))
    assert after["cross_entropy_before"] == before
    assert "is not known" not in capsys.readouterr().out


def test_fewer_examples_than_a_step_learns_from(files, capsys):
    first = (files / "examples.jsonl").read_text().splitlines()[:3]
    (files / "few.jsonl").write_text("\n".join(first))
    train(config(files, "few", examples=str(files / "few.jsonl"), steps=0))
    assert "3 examples: a step passes over them 2.67 times" in capsys.readouterr().out


def test_a_run_passes_three_times_over_its_examples(files):
    """Of twelve, eight a step: four steps and a half."""
    summary = train(config(files, "passes", steps=None, evaluation=EvaluationConfig(every=0)))
    assert summary["steps"] == 5 and saved_settings(files / "passes")["steps"] == 5
    halfway = OptimizerConfig(learning_rate=1.0, schedule="linear", warmup_steps=0)
    chosen = with_steps(config(files, "passes", steps=None, optimizer=halfway), 16)
    assert [chosen.learning_rate(step) for step in (0, 3)] == pytest.approx([1.0, 0.5])
    assert with_steps(config(files, "passes"), 10**6).steps == 6


def test_files_are_looked_for_where_the_run_was_started(files, monkeypatch):
    monkeypatch.chdir(files)
    train(config(files, "here", examples="examples.jsonl", steps=1))
    monkeypatch.chdir("/")
    assert saved_settings(files / "here")["examples"] == str(files / "examples.jsonl")


@pytest.mark.slow
def test_where_memory_is_known_slots_are_chosen_for_problems_alone(files, capsys):
    limited = {"mesh": MeshConfig(memory=4.0), "steps": 0}
    train(config(files, "by_examples", **limited))
    assert "evaluation.slots" not in (shown := capsys.readouterr().out)
    assert "update.micro_batch_tokens 64: takes" in shown
    answered = {"task": str(files / "task.jsonl"), "reward": "exact"}
    problems = EvaluationConfig(path=str(files / "held_out.jsonl"))
    train(config(files, "by_problems", evaluation=problems, **answered, **limited))
    assert "evaluation.slots all: takes" in capsys.readouterr().out


@pytest.mark.slow
def test_adapters_learn_and_problems_are_completed_to_evaluate(files):
    """Of a task with a reward, of which the run sees no prompt in training."""
    held_out = EvaluationConfig(every=0, path=str(files / "held_out.jsonl"), problems=4)
    summary = train(
        config(
            files,
            "adapters",
            task=str(files / "task.jsonl"),
            reward="exact",
            lora=LoraSettings(rank=2),
            evaluation=held_out,
        )
    )
    assert summary["accuracy_after"] is not None and summary["cross_entropy_after"] is None
    assert (files / "adapters" / "policy" / "adapter_model.safetensors").is_file()
    rows = metrics(files / "adapters")
    assert rows[-1]["cross_entropy"] < rows[0]["cross_entropy"]


@pytest.mark.slow
def test_the_command_evaluates_and_exports_such_a_run(files, capsys):
    """On a task, since it has no problems of its own."""
    run = str(files / "commanded")
    train(config(files, "commanded", steps=1))
    assert main(["evaluate", "--model", run]) != 0
    assert "task must be given" in capsys.readouterr().err
    problems = ["--task", str(files / "task.jsonl"), "--reward", "exact"]
    assert main(["evaluate", "--model", run, *problems]) == 0
    assert "accuracy" in capsys.readouterr().out
    assert main(["export", run, str(files / "exported")]) == 0
    exported = files / "exported" / "model.safetensors"
    assert exported.read_bytes() == (files / "commanded/policy/model.safetensors").read_bytes()


@pytest.mark.exhaustive
def test_two_processes_share_the_examples(files):
    options = {"mesh": MeshConfig(fsdp=8)}
    train(config(files, "one", **options))
    run_joined(files, config(files, "two", **options))
    assert_same_metrics(files / "two", files / "one")


def test_examples_are_trained_on_and_the_task_is_evaluated(files):
    few = EvaluationConfig(path=str(files / "others.jsonl"), problems=2)
    task = make_task(config(files, "none", evaluation=few, system="1+1"))
    assert (len(task.train), len(task.held_out), task.reward) == (12, 2, None)
    assert {x["messages"][0]["content"] for x in [*task.train, *task.held_out]} == {"1+1"}
    answered = {"task": str(files / "task.jsonl"), "reward": "exact"}
    problems = EvaluationConfig(path=str(files / "held_out.jsonl"))
    task = make_task(config(files, "none", evaluation=problems, **answered))
    assert task.train == make_task(config(files, "none")).train and len(task.held_out) == 4
    assert task.reward is not None


def test_tools_of_examples_reach_the_chat_template():
    template = Template(
        small_tokenizer("0123456789+="),
        chat_template="{% for t in tools or [] %}{{ t.function.name }}{% endfor %}"
        "{% for m in messages %}{{ m.content }}{% endfor %}",
    )
    tool = {"type": "function", "function": {"name": "777"}}
    plain, _ = example_rows(template, EXAMPLES[:1])
    batch, _ = example_rows(template, [{**EXAMPLES[0], "tools": [tool]}])
    assert batch.tokens[0, :3].tolist() == template.tokenizer.encode("777")
    assert plain.tokens[0, :3].tolist() == template.tokenizer.encode("1+2")


def test_an_answer_that_the_chat_template_leaves_open_ends_as_completions_do():
    template = Template(
        small_tokenizer("0123456789+-*()="),
        chat_template="{% for m in messages %}{{ m.content }}{% endfor %}",
    )
    batch, lengths = example_rows(template, EXAMPLES[:1])
    end = template.tokenizer.eos_token_id
    learned = [token for token in batch.labels[0].tolist() if token != IGNORE]
    assert learned == [*template.tokenizer.encode("3"), end]
    assert lengths.tolist() == [6]


# What is refused.

MODEL = {"model": "m", "examples": "x.jsonl"}


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"task": "examples"}, "examples"),
        ({"examples": "x.jsonl"}, "model"),
        ({**MODEL, "environment": "x.py:X"}, "environment"),
        ({**MODEL, "tools": "x.py"}, "tools"),
        ({**MODEL, "server.url": "http://localhost:8000"}, "server.url"),
        ({**MODEL, "teacher.model": "t"}, "teacher.model"),
        ({**MODEL, "rollout.prompts": 3, "mesh.fsdp": 2}, "mesh.data times mesh.fsdp"),
        ({**MODEL, "rollout.prompts": 3, "update.mini_batches": 2}, "update.mini_batches"),
        ({**MODEL, "update.micro_batch_tokens": 8}, "update.micro_batch_tokens"),
    ],
    ids=str,
)
def test_options_that_do_not_go_together(options, name):
    with pytest.raises(ValueError, match=rf"^{name} must "):
        config_of(options)


def test_long_examples_are_refused_before_the_first_step(files):
    short = config(files, "refused", rollout=RolloutConfig(prompts=8, max_episode_tokens=4))
    with pytest.raises(ValueError, match=r"^rollout\.max_episode_tokens .* 1 of examples$"):
        train(short)
    (files / "long.jsonl").write_text(json.dumps({"prompt": "1" * 64, "completion": "1"}))
    judged = EvaluationConfig(path=str(files / "long.jsonl"))
    with pytest.raises(ValueError, match=r"^rollout\.max_episode_tokens .* of evaluation\.path$"):
        train(config(files, "refused", overwrite=True, evaluation=judged))


def test_examples_without_tokens_to_learn_are_refused():
    """A chat template may leave out what the assistant says."""
    silent = (
        "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}{% endif %}{% endfor %}"
    )
    template = Template(small_tokenizer("0123456789+="), chat_template=silent)
    with pytest.raises(ValueError, match=r"^example 1 of evaluation\.path must have "):
        check_examples(template, EXAMPLES[:1], longest=64, argument="evaluation.path")


def test_an_example_that_the_chat_template_refuses_is_named():
    """One with an earlier thought, which the template leaves out; and one with a set, no JSON."""
    template = Template(chatml_tokenizer())
    thoughtful = conversation("2+2=", "<think>5</think>4", "3+3=", "6")
    odd = conversation("2+2=", "4")
    odd["messages"][0]["tags"] = {1}
    for refused, problem in ((thoughtful, "messages.1. must be"), (odd, "JSON's types")):
        with pytest.raises(ValueError, match=rf"^example 3 of examples must suit .* {problem}"):
            check_examples(template, [*EXAMPLES[:2], refused], longest=64, argument="examples")


def test_files_of_examples_are_named_by_their_options(files):
    with pytest.raises(ValueError, match=r"^examples must be a file, got .* was not found"):
        make_task(config(files, "refused", examples=str(files / "none.jsonl")))
    missing = EvaluationConfig(path=str(files))
    with pytest.raises(ValueError, match=r"^evaluation\.path must be a file, .* is a directory"):
        make_task(config(files, "refused", evaluation=missing))
    with pytest.raises(ValueError, match=r"^reward must be none"):
        make_task(config(files, "refused"), lambda trajectories, truths: [])


def test_no_run_deletes_its_examples(files):
    train(config(files, "twice", steps=0))
    inside = files / "twice" / "examples.jsonl"
    inside.write_text((files / "examples.jsonl").read_text())
    with pytest.raises(FileExistsError, match=r"must not hold examples"):
        train(config(files, "twice", steps=0, examples=str(inside), overwrite=True))
