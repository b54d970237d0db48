"""Learning from pairs: a chosen and a rejected answer to each prompt of a file."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.training import small_run
from tests.training.joined_runs import run_joined
from tests.training.options import config_of
from tests.training.test_examples import label_logps
from tests.training.test_hosts import assert_same_metrics
from twinkle_jax.data import Batch, PromptBatch, user_data_get
from twinkle_jax.model import make_mesh
from twinkle_jax.model.decoder.sharding import place_params
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
    memory,
    small_policy,
    step,
    train,
    train_step,
)
from twinkle_jax.training.config import make_loss
from twinkle_jax.training.examples import check_examples
from twinkle_jax.training.memory import fit, update_memory
from twinkle_jax.training.step import micro_batches
from twinkle_jax.training.task import make_task

POLICY = small_policy(0)
PAIRS = [("1+2=", "3", "4"), ("7=", "7", "0"), ("1+1+1=", "33333", "3"), ("8=", "8", "9")]


def messages(prompt, answer):
    return [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}]


EXAMPLES = [
    {"messages": messages(prompt, good), "user_data": [("rejected", messages(prompt, bad))]}
    for prompt, good, bad in PAIRS
]


def learning(loss, mesh=None, options=None, policy=POLICY, longest=32, **update):
    config = TrainConfig(
        model="m",
        examples="x.jsonl",
        rollout=RolloutConfig(prompts=4, max_episode_tokens=longest),
        update=UpdateConfig(
            **{"loss": loss, "micro_batch_tokens": 64, "loss_options": options or {}} | update
        ),
        optimizer=OptimizerConfig(name="sgd", max_grad_norm=1e9),
        mesh=MeshConfig() if mesh is None else MeshConfig(fsdp=2, tensor=2),
    )
    return make_recipe(config, policy, None, mesh=mesh)


MOVED = jax.tree.map(lambda x: 1.05 * x, POLICY.params)  # from the reference, POLICY


def learnt(recipe, params=MOVED):
    """Take one step of gradient descent with a rate of 1."""
    params = jax.tree.map(jnp.copy, params)
    state = begin_training(params, recipe.optimizer, recipe.mesh)
    rollout, _ = collect(recipe, params, lambda: PromptBatch(EXAMPLES), jax.random.key(0))
    return train_step(state, recipe, rollout, learning_rate=1.0, seed=(0, 0))


def sums(params):
    """Sums of log-probabilities, and lengths, from all logits: of chosen and rejected answers."""
    answers = [messages(prompt, answer) for prompt, *both in PAIRS for answer in both]
    logps, kept = label_logps(params, [{"messages": x} for x in answers], POLICY)
    return jnp.sum(logps, axis=1), kept.sum(axis=1).astype(np.float32)


def dpo(params):
    ratios = sums(params)[0] - jax.lax.stop_gradient(sums(POLICY.params)[0])
    return jnp.mean(jnp.log1p(jnp.exp(-0.1 * (ratios[::2] - ratios[1::2]))))


def simpo(params):
    logps, lengths = sums(params)
    means = logps / lengths
    return jnp.mean(jnp.log1p(jnp.exp(0.5 - 2.5 * (means[::2] - means[1::2]))))


def nll(params):
    """Of the chosen answers, over all their tokens."""
    logps, lengths = sums(params)
    return -jnp.sum(logps[::2]) / float(lengths[::2].sum())


def cpo(params):
    logps, _ = sums(params)
    return jnp.mean(jnp.log1p(jnp.exp(-0.1 * (logps[::2] - logps[1::2])))) + nll(params)


def orpo(params):
    logps, lengths = sums(params)
    means = logps / lengths
    odds = means - jnp.log(1 - jnp.exp(means))
    return nll(params) + 0.1 * jnp.mean(jnp.log1p(jnp.exp(odds[1::2] - odds[::2])))


def dpo_and_nll(params):
    return dpo(params) + 0.5 * nll(params)


SLOW = pytest.mark.slow
CASES = {
    "dpo": ("dpo", dpo, {}),
    "dpo_and_nll": ("dpo", dpo_and_nll, {"sft_weight": 0.5}),
    "simpo": ("simpo", simpo, {}),
    "cpo": ("cpo", cpo, {}),
    "orpo": ("orpo", orpo, {}),
}


@pytest.mark.parametrize("case", [x if x == "dpo" else pytest.param(x, marks=SLOW) for x in CASES])
@pytest.mark.parametrize("several", [True, pytest.param(False, marks=SLOW)])
def test_a_step_descends_the_loss_of_all_pairs(case, several, monkeypatch):
    """Of micro-batches of some pairs each, whose rows share a line, or have one each."""
    loss, expected_loss, options = CASES[case]
    monkeypatch.setattr(step, "takes_segments", lambda recipe: several)
    value, gradient = jax.jit(jax.value_and_grad(expected_loss))(MOVED)
    state, metrics = learnt(learning(loss, options=options))
    assert metrics["loss"] == metrics["preference_loss"] == pytest.approx(float(value), rel=1e-5)
    moved = jax.tree.map(lambda old, new: old - new, MOVED, state.params)
    for expected, found in zip(*map(jax.tree.leaves, (gradient, moved)), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=5e-6)
    assert "cross_entropy" not in metrics


def test_metrics_are_those_of_all_pairs():
    """Of micro-batches of one pair, one and two."""
    recipe, rows = learning("dpo"), np.arange(8, dtype=np.int32)
    rollout, _ = collect(recipe, MOVED, lambda: PromptBatch(EXAMPLES), jax.random.key(0))
    parts = micro_batches(recipe, rollout.batch, rows, rollout.row_lengths, together=2)
    assert sorted(int(part.rows.sum()) for part, _ in parts) == [2, 2, 4]
    _, metrics = learnt(recipe)
    ratios = 0.1 * np.asarray(sums(MOVED)[0] - sums(POLICY.params)[0])
    chosen, rejected = ratios[::2], ratios[1::2]
    assert metrics["rewards/chosen"] == pytest.approx(chosen.mean(), abs=1e-6)
    assert metrics["rewards/rejected"] == pytest.approx(rejected.mean(), abs=1e-6)
    assert metrics["rewards/margins"] == pytest.approx((chosen - rejected).mean(), abs=1e-6)
    assert metrics["rewards/accuracies"] == (chosen > rejected).mean()


def test_pairs_have_settings_of_their_own():
    pairs = TrainConfig(model="m", examples="x.jsonl", update=UpdateConfig(loss="dpo"))
    single = TrainConfig(model="m", examples="x.jsonl")
    assert (pairs.group_size, single.group_size, single.update.loss) == (2, 1, "cross_entropy")
    assert (pairs.optimizer.learning_rate, single.optimizer.learning_rate) == (1e-6, 1e-5)
    assert (pairs.least_budget, single.least_budget) == (8192, 4096)
    assert pairs.update.mini_batches == 1


@SLOW
@pytest.mark.parametrize("loss", ["dpo", "orpo"])
def test_devices_share_the_pairs(loss):
    mesh = make_mesh(fsdp=2, tensor=2)
    placed = POLICY._replace(params=place_params(POLICY.params, mesh))
    expected, metrics = learnt(learning(loss))
    recipe = learning(loss, mesh, policy=placed)
    state, on_mesh = learnt(recipe, params=place_params(MOVED, mesh))
    assert on_mesh["loss"] == pytest.approx(metrics["loss"], rel=1e-5)
    assert on_mesh["rewards/margins"] == pytest.approx(metrics["rewards/margins"], abs=1e-5)
    for x, y in zip(*map(jax.tree.leaves, (expected.params, state.params)), strict=True):
        np.testing.assert_allclose(y, x, rtol=1e-4, atol=1e-5)


@SLOW
def test_several_updates_of_a_step_share_its_pairs():
    state, metrics = learnt(learning("dpo", mini_batches=2))
    assert state.step == 2 and metrics["rewards/margins"] != 0


@SLOW
@pytest.mark.parametrize("loss", ["dpo", "simpo", "orpo"])
def test_evaluations_are_of_all_pairs(loss, monkeypatch):
    """In batches of three, with the reference policy where there is one."""
    monkeypatch.setattr(evaluation, "BATCH", 3)
    recipe = learning(loss, mini_batches=4)
    results = evaluation.evaluate_examples(recipe, POLICY.template, MOVED, EXAMPLES)
    expected = CASES[loss][1](MOVED)
    assert results["preference_loss"] == pytest.approx(float(expected), rel=1e-5)
    _, metrics = learnt(learning(loss))
    assert results["preference_margin"] == pytest.approx(metrics["rewards/margins"], abs=1e-6)
    assert results["preference_accuracy"] == metrics["rewards/accuracies"]


@SLOW
def test_memory_counts_the_reference_policy():
    recipe = learning("dpo")
    state = begin_training(POLICY.params, recipe.optimizer, None)
    needed = update_memory(recipe, state)
    free = update_memory(learning("dpo", options={"reference_free": True}), state)
    size = sum(x.nbytes for x in jax.tree.leaves(POLICY.params))
    assert size <= needed - free < 1.2 * size
    assert fit(recipe, state, needed, lambda note: None).update.micro_batch_tokens == 64
    with pytest.raises(ValueError, match=r"^update\.micro_batch_tokens: the smallest takes"):
        fit(recipe, state, 1, lambda note: None)


@pytest.mark.parametrize("several", [True, False])
def test_memory_is_that_of_the_longest_pairs(several, monkeypatch):
    """Of micro-batches as they are packed."""
    for module in (step, memory):
        monkeypatch.setattr(module, "takes_segments", lambda recipe: several)
    recipe = learning("dpo", longest=48, micro_batch_tokens=256)
    lengths = np.full(8, 48, np.int32)
    batch, expected = memory._longest_micro_batch(recipe)
    rows = Batch(tokens=np.zeros((8, 48), np.int32), labels=np.zeros((8, 48), np.int32))
    packed = micro_batches(recipe, rows, np.arange(8, dtype=np.int32), lengths, together=2)
    largest = max((packing.sources.shape for _, packing in packed), key=np.prod)
    assert expected.sources.shape == ((3, 96) if several else (6, 48))
    assert largest[1] == expected.sources.shape[1] and largest[0] <= expected.sources.shape[0]
    assert batch.tokens.shape == (8, 48)


# Runs.


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pairs")
    small_run.make_files(folder)
    added = [(a, b) for a in range(4) for b in range(4)]
    lines = [
        json.dumps({"prompt": f"{a}+{b}=", "chosen": str(a + b), "rejected": str(a + b + 1)})
        for a, b in added
    ]
    (folder / "pairs.jsonl").write_text("\n".join(lines[:12]))
    (folder / "others.jsonl").write_text("\n".join(lines[12:]))
    return folder


def config(files, directory, loss="dpo", **changes):
    settings = {
        "model": str(files / "model"),
        "examples": str(files / "pairs.jsonl"),
        "output_dir": str(files / directory),
        "steps": 6,
        "rollout": RolloutConfig(prompts=8, max_episode_tokens=32),
        "update": UpdateConfig(loss=loss, micro_batch_tokens=64),
        "optimizer": OptimizerConfig(learning_rate=1e-2, warmup_steps=1),
        "evaluation": EvaluationConfig(every=3, path=str(files / "others.jsonl")),
        "logging": LoggingConfig(checkpoint_every=3),
    }
    return TrainConfig(**(settings | changes))


def metrics_of(run):
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


@SLOW
def test_a_run_learns_to_prefer(files, capsys):
    summary = train(config(files, "run"))
    rows = metrics_of(files / "run")
    assert rows[0]["rewards/margins"] == pytest.approx(0, abs=1e-6)  # of the reference itself
    assert rows[0]["preference_loss"] == pytest.approx(np.log(2), abs=1e-6)
    assert rows[-1]["rewards/accuracies"] > 0.8 and rows[-1]["rewards/margins"] > 0.1
    assert rows[0]["num_tokens"] == 8 * 2 * 2  # a digit and an end, of two answers
    assert summary["preference_loss_before"] == pytest.approx(np.log(2), abs=1e-6)
    assert summary["preference_loss_after"] == rows[-1]["eval/preference_loss"]
    assert not any("reward" in row or "cross_entropy" in row for row in rows)
    shown = " ".join(capsys.readouterr().out.split())
    assert "12 pairs: a pass over them takes 2 steps" in shown
    assert "held-out preference loss before the first step: 0.693" in shown
    after = summary["preference_loss_after"]
    assert f"held-out preference loss 0.693 before, {after:.3f} after 6 steps" in shown
    assert (files / "run" / "curves.png").stat().st_size > 1000
    load_policy(str(files / "run" / "policy"))


@SLOW
def test_an_interrupted_run_goes_on_as_if_it_had_not_been(files):
    """With the reference policy that the run began with."""
    train(config(files, "whole"))
    train(config(files, "parts", steps=3))
    train(config(files, "parts", resume="auto"))
    assert_same_metrics(files / "parts", files / "whole")
    trained = [files / name / "policy" / "model.safetensors" for name in ("whole", "parts")]
    assert trained[0].read_bytes() == trained[1].read_bytes()


@SLOW
def test_adapters_prefer_and_problems_are_completed_to_evaluate(files):
    """Their base is the reference policy."""
    held_out = EvaluationConfig(every=0, path=str(files / "held_out.jsonl"), problems=4)
    summary = train(
        config(
            files,
            "adapters",
            task=str(files / "task.jsonl"),
            reward="exact",
            lora=LoraSettings(rank=2, dropout=0.1),
            evaluation=held_out,
        )
    )
    assert summary["accuracy_after"] is not None and summary["preference_loss_after"] is None
    rows = metrics_of(files / "adapters")
    assert rows[0]["preference_loss"] == pytest.approx(np.log(2), abs=1e-5)
    assert rows[-1]["rewards/margins"] > 0


@pytest.mark.exhaustive
def test_two_processes_share_the_pairs(files):
    options = {"mesh": MeshConfig(fsdp=8), "loss": "orpo"}
    train(config(files, "one", **options))
    run_joined(files, config(files, "two", **options))
    assert_same_metrics(files / "two", files / "one")


def test_a_chosen_and_a_rejected_conversation_of_each_record(files):
    task = make_task(config(files, "none", system="1+1"))
    assert (len(task.train), len(task.held_out), task.reward) == (12, 4, None)
    rejected = user_data_get(task.train[0]["user_data"], "rejected")
    for conversation, answer in ((task.train[0]["messages"], "0"), (rejected, "1")):
        assert [x["content"] for x in conversation] == ["1+1", "0+0=", answer]


# What is refused.

MODEL = {"model": "m", "examples": "x.jsonl", "update.loss": "dpo"}


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({**MODEL, "update.loss": "grpo"}, "update.loss"),
        ({**MODEL, "update.loss": "infonce"}, "update.loss"),
        ({"model": "m", "update.loss": "dpo"}, "update.loss"),
        ({**MODEL, "update.micro_batch_tokens": 8191}, "update.micro_batch_tokens"),
    ],
    ids=str,
)
def test_options_that_do_not_go_together(options, name):
    with pytest.raises(ValueError, match=rf"^{name} must "):
        config_of(options)


@pytest.mark.parametrize(
    ("loss", "options"),
    [
        ("dpo", {"beta": 0.0}),
        ("dpo", {"beta": "1"}),
        ("dpo", {"label_smoothing": 0.5}),
        ("dpo", {"label_smoothing": -0.1}),
        ("dpo", {"loss_type": "other"}),
        ("dpo", {"loss_type": "ipo", "label_smoothing": 0.1}),
        ("dpo", {"reference_free": "no"}),
        ("dpo", {"tokens_per_pair": 3.0}),
        ("dpo", {"ignore_index": 3}),
        ("simpo", {"gamma": float("nan")}),
        ("cross_entropy", {"reduction": "sum"}),
        ("cross_entropy", {"beta": 0.1}),
    ],
)
def test_options_of_losses_are_checked(loss, options):
    update = UpdateConfig(loss=loss, loss_options=options)
    with pytest.raises(ValueError, match=r"^update\.loss_options: "):
        TrainConfig(model="m", examples="x.jsonl", update=update)


def test_options_reach_the_loss():
    options = {"beta": 0.3, "loss_type": "hinge"}
    update = UpdateConfig(loss="DPOLoss", loss_options=options)
    loss = make_loss(TrainConfig(model="m", examples="x.jsonl", update=update))
    assert (loss.beta, loss.loss_type) == (0.3, "hinge")
    update = UpdateConfig(loss_options={"dft": True})
    assert make_loss(TrainConfig(model="m", examples="x.jsonl", update=update)).dft


def test_pairs_are_checked_in_both_answers():
    example = {**EXAMPLES[0], "user_data": [("rejected", messages("1=", "1" * 64))]}
    with pytest.raises(ValueError, match=r"^rollout\.max_episode_tokens .* example 5 of examples$"):
        check_examples(POLICY.template, [*EXAMPLES, example], longest=32, argument="examples")


@pytest.mark.parametrize(("loss", "named"), [("dpo", "'chosen'"), ("cross_entropy", "loss dpo")])
def test_files_of_the_other_kind_are_refused(files, loss, named):
    (files / "single.jsonl").write_text(json.dumps({"prompt": "1=", "completion": "1"}))
    file = files / ("single.jsonl" if loss == "dpo" else "pairs.jsonl")
    with pytest.raises(ValueError, match=rf"record 1 must have .*{named}"):
        make_task(config(files, "refused", loss, examples=str(file)))
