"""Distillation: a teacher's log-probabilities are part of the advantage of each token."""

import dataclasses
import functools
import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import hub_server
from tests.model.families import each, family, random_params
from tests.sampler.vllm.fake_server import FakeServer, lose
from tests.training import small_run
from tests.training.joined_runs import run_joined
from tests.training.options import config_of
from tests.training.test_hosts import assert_same_metrics
from twinkle_jax.advantage import grpo_advantage
from twinkle_jax.data import IGNORE, ArithmeticTask, Batch, PromptBatch, Template, small_tokenizer
from twinkle_jax.model import (
    LoraConfig,
    hidden_states,
    make_mesh,
    output_logits,
    parse_config,
    shard_like_params,
)
from twinkle_jax.reward import FunctionReward
from twinkle_jax.rollout import Rollout, hosts, server_engine
from twinkle_jax.sampler import ServerError, vllm_server
from twinkle_jax.training import (
    MeshConfig,
    Policy,
    RolloutConfig,
    TeacherConfig,
    TrainConfig,
    UpdateConfig,
    add_adapter,
    begin_training,
    collect,
    export,
    make_recipe,
    save_policy,
    score_batch,
    small_policy,
    train,
    train_state,
    train_step,
)
from twinkle_jax.training.display import explain
from twinkle_jax.training.memory import fit, rollout_memory, update_memory
from twinkle_jax.training.run_directory import saved_settings
from twinkle_jax.training.step import credit, teacher_logps
from twinkle_jax.training.teacher import read_teacher

POLICY = small_policy(0)
CHARACTERS = "0123456789+-*()="
short = FunctionReward(lambda text, truth: float(len(text) < 3))


def a_teacher(name="qwen2", seed=3, characters=CHARACTERS, **sizes):
    """A policy of another family with the tokenizer of the policy."""
    template = Template(small_tokenizer(characters), max_length=None)
    widths = {"vocab_size": len(template.tokenizer), "hidden_size": 16, **sizes}
    config = parse_config(family(name, **widths))
    params = jax.tree.map(lambda x: 3 * x, random_params(config, seed))  # far from uniform
    return Policy(params, config, template)


TEACHER = a_teacher()


def distilling(
    teacher=TEACHER, policy=POLICY, reward=short, mesh=None, rollout=None, update=None, **settings
):
    config = TrainConfig(
        rollout=RolloutConfig(
            **{"prompts": 2, "num_samples": 4, "max_new_tokens": 4, "max_prompt_tokens": 32}
            | (rollout or {})
        ),
        update=UpdateConfig(**{"mini_batches": 1, "micro_batch_tokens": 64} | (update or {})),
        teacher=TeacherConfig(model="teacher", **settings),
    )
    return make_recipe(config, policy, reward, teacher=teacher, mesh=mesh)


def drawn(recipe, key=0):
    prompts = PromptBatch(ArithmeticTask(1, size=2)[:])
    return collect(recipe, POLICY.params, lambda: prompts, jax.random.key(key))[0]


@functools.partial(jax.jit, static_argnames="config")
def logits_of(params, config, tokens):
    return output_logits(params, config, hidden_states(params, config, tokens))


def expected_logps(teacher, batch, temperature=1.0):
    """Of labels, from all logits at once."""
    logits = logits_of(teacher.weights, teacher.config, batch.tokens) / temperature
    labels = jnp.where(batch.labels == IGNORE, 0, batch.labels)
    return jnp.take_along_axis(jax.nn.log_softmax(logits), labels[..., None], axis=-1)[..., 0]


def test_its_gradient_is_that_of_the_divergence_from_the_teacher():
    """Of completions of one token, of which all are enumerated."""
    recipe = distilling()
    vocab = POLICY.config.vocab_size
    prompt = jnp.tile(jnp.asarray([[3, 8, 17]], jnp.int32), (vocab, 1))
    labels = jnp.full_like(prompt, IGNORE).at[:, -1].set(jnp.arange(vocab, dtype=jnp.int32))
    batch = Batch(prompt, labels)
    old_logps = score_batch(POLICY.params, batch, POLICY.config).logps
    lengths = np.full(vocab, 3, np.int32)
    rollout = Rollout(batch._replace(old_logps=old_logps), [], [], lengths, lengths, lengths > 3)
    rollout = rollout._replace(teacher_logps=teacher_logps(recipe, rollout))
    weighted = (jnp.exp(old_logps) * credit(recipe, rollout))[:, -1]

    def surrogate(params):
        return jnp.sum(weighted * score_batch(params, batch, POLICY.config).logps[:, -1])

    def divergence(params):
        ours, theirs = (
            jax.nn.log_softmax(logits_of(weights, config, prompt[:1])[0, -1].astype(jnp.float32))
            for weights, config in ((params, POLICY.config), (TEACHER.params, TEACHER.config))
        )
        return jnp.sum(jnp.exp(ours) * (ours - theirs))

    got, expected = (jax.jit(jax.grad(f))(POLICY.params) for f in (surrogate, divergence))
    largest = max(float(jnp.abs(x).max()) for x in jax.tree.leaves(expected))
    assert largest > 1e-3
    for one, other in zip(*map(jax.tree.leaves, (got, expected)), strict=True):
        np.testing.assert_allclose(one, -other, atol=1e-5 * max(largest, 1))


@pytest.mark.parametrize("temperature", [0.7, pytest.param(1.0, marks=pytest.mark.slow)])
def test_each_token_gets_the_difference_of_log_probabilities(temperature):
    recipe = distilling(weight=0.5, rollout={"temperature": temperature})
    rollout = drawn(recipe)
    batch, kept = rollout.batch, np.asarray(rollout.batch.labels != IGNORE)
    difference = expected_logps(TEACHER, batch, temperature) - batch.old_logps
    np.testing.assert_allclose(
        batch.advantages, np.where(kept, 0.5 * np.asarray(difference), 0), atol=1e-5
    )
    means = np.where(kept, batch.advantages, 0).sum(axis=1) / kept.sum(axis=1)
    np.testing.assert_allclose(rollout.advantages, means, atol=1e-6)
    assert np.abs(means).max() > 0.1
    state = train_state(jax.tree.map(jnp.copy, POLICY.params), recipe.optimizer)
    _, metrics = train_step(state, recipe, rollout, learning_rate=1e-3, seed=(0, 0))
    divergence = -np.asarray(difference)[kept].mean()
    assert metrics["teacher/kl"] == pytest.approx(divergence, abs=1e-5)
    assert "kl" not in metrics


@pytest.mark.parametrize("mask_truncated", each([True, False], mark=pytest.mark.slow))
def test_rewards_are_added_with_their_weight(mask_truncated):
    options = {"advantage": "grpo", "scale": "none", "mask_truncated": mask_truncated}
    rollout = drawn(distilling(weight=0.5, reward_weight=3.0, update=options))
    assert np.ptp(rollout.rewards) > 0
    by_rewards = grpo_advantage(
        rollout.rewards, num_generations=4, scale="none", where=rollout.counted
    ).reshape(-1, 1)
    kept = np.asarray(rollout.batch.labels != IGNORE)
    taught = 0.5 * (expected_logps(TEACHER, rollout.batch) - rollout.batch.old_logps)
    expected = np.asarray(taught + 3.0 * by_rewards)
    np.testing.assert_allclose(
        np.asarray(rollout.batch.advantages)[kept], expected[kept], atol=1e-5
    )


@pytest.mark.slow
def test_with_dynamic_sampling_the_chosen_rows_are_judged():
    update = {"advantage": "grpo", "dynamic_sampling": 4}
    rollout = drawn(distilling(reward_weight=1.0, update=update, rollout={"num_samples": 2}), key=3)
    kept = np.asarray(rollout.batch.labels != IGNORE)
    expected = np.asarray(expected_logps(TEACHER, rollout.batch))
    np.testing.assert_allclose(np.asarray(rollout.teacher_logps)[kept], expected[kept], atol=1e-5)


@pytest.mark.slow
def test_a_teachers_own_router_chooses():
    """Not the experts of the sampler, which updates of the policy may replay."""
    teacher = a_teacher("qwen3_moe")
    recipe = distilling(teacher)
    rollout = drawn(recipe)
    batch, chosen = rollout.batch, teacher.config.experts.chosen
    shape = (*batch.tokens.shape, teacher.config.layers, chosen)
    routing = jnp.broadcast_to(jnp.arange(chosen, dtype=jnp.uint8)[None, None, None], shape)
    routed = rollout._replace(batch=batch._replace(routing=routing))
    np.testing.assert_array_equal(teacher_logps(recipe, routed), rollout.teacher_logps)


@pytest.mark.slow
def test_the_divergence_falls():
    recipe = distilling(
        teacher=small_policy(5),
        rollout={"prompts": 8, "num_samples": 8, "temperature": 1.0},
        update={"micro_batch_tokens": 2048},
    )
    prompts = PromptBatch(ArithmeticTask(1, size=8)[:])
    state = train_state(jax.tree.map(jnp.copy, POLICY.params), recipe.optimizer)
    divergences = []
    for step in range(16):
        rollout, _ = collect(recipe, state.params, lambda: prompts, jax.random.key(step))
        state, metrics = train_step(state, recipe, rollout, learning_rate=3e-3, seed=(0, step))
        divergences.append(metrics["teacher/kl"])
    assert divergences[-1] < 0.5 * divergences[0]


@pytest.mark.slow
def test_a_teacher_may_have_adapters_and_be_on_a_mesh():
    adapted = add_adapter(TEACHER, LoraConfig(r=2), base="base", seed=1)
    adapted = adapted._replace(params=jax.tree.map(lambda x: x + 0.1, adapted.params))
    expected = drawn(distilling(adapted))
    plain = drawn(distilling())
    assert np.abs(np.asarray(expected.teacher_logps - plain.teacher_logps)).max() > 1e-3
    mesh = make_mesh(data=2, fsdp=2)
    placed = {
        name: jax.device_put(tree, shard_like_params(tree, mesh))
        for name, tree in (("params", adapted.params), ("frozen", adapted.frozen))
    }
    params = jax.device_put(POLICY.params, shard_like_params(POLICY.params, mesh))
    recipe = distilling(
        adapted._replace(**placed), POLICY._replace(params=params), mesh=mesh,
    )  # fmt: skip
    prompts = PromptBatch(ArithmeticTask(1, size=2)[:])
    got, _ = collect(recipe, params, lambda: prompts, jax.random.key(0))
    np.testing.assert_array_equal(got.batch.tokens, expected.batch.tokens)
    np.testing.assert_allclose(got.batch.advantages, expected.batch.advantages, atol=1e-5)


@pytest.mark.slow
def test_its_memory_is_counted():
    plain = TrainConfig(
        rollout=RolloutConfig(prompts=2, num_samples=4, max_new_tokens=4, max_prompt_tokens=32),
        update=UpdateConfig(mini_batches=1, micro_batch_tokens=64),
    )
    alone, taught = make_recipe(plain, POLICY, short), distilling()
    state = begin_training(POLICY.params, alone.optimizer, None)
    size = sum(x.nbytes for x in jax.tree.leaves(TEACHER.params))
    for memory in (update_memory, rollout_memory):
        assert memory(taught, state) - memory(alone, state) == size
    with pytest.raises(ValueError, match=r"or a teacher on a server \(teacher\.url\)$"):
        fit(taught, state, 1, note=print)
    with pytest.raises(ValueError, match=r"or adapters \(lora\.rank\)$"):
        fit(alone, state, 1, note=print)
    wide = a_teacher(intermediate_size=16384)
    size = sum(x.nbytes for x in jax.tree.leaves(wide.params))
    grown = update_memory(distilling(wide), state) - update_memory(alone, state)
    assert grown > size + 64 * 16384 * 4  # more than the gradient of the small policy takes


# Whole runs.


@pytest.fixture
def files(tmp_path):
    small_run.make_files(tmp_path)
    save_policy(TEACHER, str(tmp_path / "teacher"))
    return tmp_path


def config(files, directory="run", teacher=None, **changes):
    settings = TeacherConfig(**{"model": str(files / "teacher")} | (teacher or {}))
    update = small_run.update(kl_beta=0.0, advantage="grpo", scale="group")
    defaults = {"update": update, "steps": 2, "teacher": settings}
    return small_run.config(files, files / directory, **(defaults | changes))


def metrics(directory):
    return [json.loads(x) for x in (directory / "metrics.jsonl").read_text().splitlines()]


def test_prompts_need_no_answers(files, capfd):
    prompts = [json.dumps({"prompt": f"{i}+1="}) for i in range(6)]
    (files / "task.jsonl").write_text("\n".join(prompts))
    logging = dataclasses.replace(small_run.EVERY_STEP, samples_every=1)
    summary = train(config(files, reward=None, logging=logging))
    rows = metrics(files / "run")
    assert ["teacher/kl" in row for row in rows] == [True, True]
    assert not [name for row in rows for name in row if "reward" in name]
    assert summary["accuracy_after"] is None
    printed = capfd.readouterr().out
    assert "teacher KL" in printed
    assert "none" in printed  # the reward, in the table of completions
    assert "Nothing to learn from" not in printed
    with pytest.raises(ValueError, match=r"^task must have an 'answer' in each record"):
        train(config(files, "other", {"reward_weight": 1.0}, reward=None))


@pytest.mark.slow
def test_answers_that_are_there_are_scored(files):
    evaluation = small_run.evaluation(files, every=1)
    train(config(files, reward=None, evaluation=evaluation, steps=1))
    [row] = metrics(files / "run")
    assert {"reward", "teacher/kl", "eval/accuracy"} <= row.keys()


@pytest.mark.slow
def test_an_evaluation_needs_answers_though_training_does_not(files):
    (files / "task.jsonl").write_text(json.dumps({"prompt": "1+1="}))
    rollout = RolloutConfig(prompts=1, num_samples=2, max_new_tokens=2, max_prompt_tokens=32)
    evaluation = small_run.evaluation(files, every=0)
    options = {"reward": None, "rollout": rollout, "evaluation": evaluation, "steps": 0}
    assert "accuracy_before" in train(config(files, **options))
    (files / "held_out.jsonl").write_text(json.dumps({"prompt": "1+1="}))
    with pytest.raises(ValueError, match=r"^evaluation\.path must have an 'answer'"):
        train(config(files, "other", **options))


@pytest.mark.slow
def test_a_run_with_a_teacher_is_resumed_to_the_bit(files, capfd):
    train(config(files, "whole", logging=small_run.EVERY_STEP, steps=3))
    train(config(files, "part", logging=small_run.EVERY_STEP, steps=2))
    changed = config(files, "part", logging=small_run.EVERY_STEP, steps=3, resume="auto")
    train(changed)
    whole, part = (
        [{k: x for k, x in row.items() if "time" not in k and "second" not in k} for row in rows]
        for rows in (metrics(files / "whole"), metrics(files / "part"))
    )
    assert whole == part
    assert "has changed" not in capfd.readouterr().out
    save_policy(a_teacher(seed=4), str(files / "teacher"))
    train(dataclasses.replace(changed, steps=4))
    assert "warning: the file of teacher.model has changed" in capfd.readouterr().out
    other = dataclasses.replace(changed.teacher, weight=2.0)
    with pytest.raises(ValueError, match=r"^teacher\.weight must be 1\.0 as in the run to resume"):
        train(dataclasses.replace(changed, teacher=other))


def test_a_relative_teacher_is_found_from_anywhere(files, monkeypatch):
    monkeypatch.chdir(files)
    train(config(files, teacher={"model": "teacher"}, steps=0))
    monkeypatch.chdir("/")
    assert saved_settings(files / "run")["teacher"]["model"] == str(files / "teacher")


def test_a_policy_is_exported_without_its_teacher(files):
    train(config(files, steps=1, logging=small_run.EVERY_STEP))
    shutil.rmtree(files / "teacher")
    export(files / "run", files / "exported")
    weights = [files / name / "model.safetensors" for name in ("exported", "run/policy")]
    assert weights[0].read_bytes() == weights[1].read_bytes()


def test_a_run_does_not_delete_its_teacher(files):
    settings = config(files)
    settings = dataclasses.replace(settings, output_dir=str(files), overwrite=True, model=None,
                                   task="arithmetic", reward=None)  # fmt: skip
    (files / "config.json").write_text(json.dumps(dataclasses.asdict(settings)))
    with pytest.raises(FileExistsError, match=r"must not hold teacher\.model"):
        train(settings)


def test_scores_that_are_not_finite_are_the_teachers(files, capfd):
    huge = TEACHER._replace(params=jax.tree.map(lambda x: 1e15 * x, TEACHER.params))
    save_policy(huge, str(files / "huge"))
    complaint = (
        r"2 steps in a row in which some were not \(nor were scores of teacher\.model='.*huge"
    )
    with pytest.raises(hosts.SharedError, match=complaint):
        train(config(files, teacher={"model": str(files / "huge")}))
    assert "The teacher's log-probabilities were not finite" in capfd.readouterr().out


def test_a_loss_of_0_is_not_explained_by_rewards():
    metrics = {"loss": 0.0, "grad_norm": 0.5}
    assert list(explain(metrics)) == ["zero loss"]
    assert not explain({**metrics, "teacher/kl": 0.0})


def test_a_teacher_needs_no_chat_template(files):
    settings = files / "teacher" / "tokenizer_config.json"
    content = json.loads(settings.read_text())
    del content["chat_template"]
    settings.write_text(json.dumps(content))
    train(config(files, steps=1))
    assert "teacher/kl" in metrics(files / "run")[0]
    (files / "teacher" / "tokenizer.json").unlink()
    with pytest.raises(ValueError, match=r"^teacher\.model must hold tokenizer\.json"):
        train(config(files, "other"))


@pytest.mark.parametrize("named", ["a run", "an adapter"])
def test_the_teacher_of_a_server_is_a_checkpoint(tmp_path, named):
    policy = add_adapter(TEACHER, LoraConfig(r=2), base="base", seed=1)
    save_policy(policy, str(tmp_path / "an adapter"))
    (tmp_path / "a run").mkdir()
    (tmp_path / "a run" / "config.json").write_text(json.dumps(dataclasses.asdict(TrainConfig())))
    teacher = TeacherConfig(model=str(tmp_path / named), url="http://localhost:1")
    with pytest.raises(ValueError, match=rf"^teacher\.model must be a checkpoint .*got {named},"):
        read_teacher(TrainConfig(teacher=teacher), POLICY)


@pytest.mark.parametrize(
    ("teacher", "complaint"),
    [
        ({"characters": "123456789+-*()=0"}, "must have the policy's tokenizer, got .* for 16 of"),
        ({"characters": "0123"}, "must have a vocabulary of at least 23 tokens"),
        ({"vocab_size": 40, "characters": CHARACTERS + "xyz"}, None),
    ],
    ids=["other tokens", "too few", "more"],
)
def test_a_teacher_has_the_tokens_of_the_policy(tmp_path, teacher, complaint):
    save_policy(a_teacher(**teacher), str(tmp_path / "teacher"))
    settings = TrainConfig(teacher=TeacherConfig(model=str(tmp_path / "teacher")))
    if complaint is None:
        settings = dataclasses.replace(settings, dtype="bfloat16")
        read = read_teacher(settings, POLICY)
        assert read.config.vocab_size == 40
        assert {x.dtype for x in jax.tree.leaves(read.params)} == {jnp.dtype("bfloat16")}
        return
    with pytest.raises(ValueError, match=rf"^teacher\.model {complaint}"):
        read_teacher(settings, POLICY)


def test_tokens_that_only_the_policy_has_are_warned_of(tmp_path):
    longer = a_teacher(characters=CHARACTERS + "!")
    size = len(longer.tokenizer)
    save_policy(a_teacher(vocab_size=size), str(tmp_path / "teacher"))
    settings, notes = TrainConfig(teacher=TeacherConfig(model=str(tmp_path / "teacher"))), []
    read_teacher(settings, longer, note=notes.append)
    assert notes == [
        "warning: the teacher's tokenizer lacks 1 tokens of the policy's, such as '!', which the "
        "teacher may not have been trained on"
    ]


def test_a_mesh_that_does_not_divide_the_teacher_is_refused(tmp_path):
    save_policy(TEACHER, str(tmp_path / "teacher"))
    teacher = TeacherConfig(model=str(tmp_path / "teacher"))
    settings = TrainConfig(teacher=teacher, mesh=MeshConfig(tensor=4, transfers="layers"))
    with pytest.raises(ValueError, match=r"^mesh\.tensor must divide the teacher's 2 key-value"):
        read_teacher(settings, POLICY, make_mesh(tensor=4))


def test_a_recipe_has_the_teacher_that_is_named():
    with pytest.raises(ValueError, match=r"^teacher must be the policy that teacher\.model names"):
        make_recipe(TrainConfig(), POLICY, short, teacher=TEACHER)
    with pytest.raises(ValueError, match=r"^teacher must be the policy that teacher\.model names"):
        distilling(teacher=None)


@pytest.mark.exhaustive
def test_two_processes_learn_from_a_teacher(files):
    options = {"mesh": MeshConfig(fsdp=8), "reward": "exact"}
    train(config(files, "one", **options))
    run_joined(files, config(files, "two", **options))
    assert_same_metrics(files / "two", files / "one")


@pytest.mark.exhaustive
def test_episodes_are_judged_where_the_policy_speaks(files):
    options = config_of(
        {
            "environment": "tests.rollout.games:Guess",
            "rollout.prompts": 2, "rollout.num_samples": 2, "rollout.max_new_tokens": 4,
            "rollout.max_turns": 2, "rollout.max_prompt_tokens": 32, "update.mini_batches": 1,
            "teacher.model": str(files / "teacher"), "steps": 2, "warm_start": 0.0,
            "evaluation.every": 0, "evaluation.problems": 2, "output_dir": str(files / "run"),
        }
    )  # fmt: skip
    train(options)
    assert all(row["teacher/kl"] > 0 for row in metrics(files / "run"))


# A teacher on a server.


@pytest.fixture
def server(files):
    with FakeServer(files / "teacher") as running:
        yield running


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [{}, {"fsdp": 2, "tensor": 2}], ids=str)
def test_a_server_scores_as_this_process_does(files, server, mesh):
    update = small_run.update(kl_beta=0.0, advantage="grpo", scale="group", mask_truncated=True)
    options = {"mesh": MeshConfig(**mesh), "update": update}
    train(config(files, "here", **options))
    train(config(files, "there", {"url": server.url}, **options))
    assert_same_metrics(files / "there", files / "here")
    sent = [body for path, body in server.asked if path == "/v1/completions"]
    assert {body["prompt_logprobs"] for body in sent if body["prompt_logprobs"] is not None} == {0}


@pytest.mark.slow
def test_the_weights_of_a_teacher_on_a_server_are_not_read(files, server):
    (files / "teacher" / "model.safetensors").unlink()
    train(config(files, teacher={"url": server.url}, steps=1))
    assert "teacher/kl" in metrics(files / "run")[0]


@pytest.mark.slow
def test_the_weights_of_a_teacher_on_a_server_are_not_downloaded(files, server, tmp_path):
    pytest.importorskip("huggingface_hub", reason="pip install 'twinkle-jax[checkpoints]'")
    server.max_model_len = 10_000
    script = """
import os, sys
from twinkle_jax.training import TeacherConfig, TrainConfig, small_policy
from twinkle_jax.training.teacher import read_teacher

places = {"url": os.environ["URL"], "served_name": os.environ["SERVED"]}
read_teacher(TrainConfig(teacher=TeacherConfig(model=sys.argv[1], **places)), small_policy())
"""
    with hub_server.serve(files / "teacher", "models", "some/teacher") as (address, asked):
        names = {"URL": server.url, "SERVED": server.name}
        done = hub_server.run(script, "some/teacher", address, tmp_path / "home", **names)
    assert done.returncode == 0, done.stderr[-2000:]
    assert any("tokenizer.json" in path for path in asked)
    assert not any("safetensors" in path for path in asked)


@pytest.mark.slow
def test_a_server_that_is_gone_is_waited_for(files, server, monkeypatch, capfd):
    monkeypatch.setattr(server_engine, "_PAUSE", 0.01)
    monkeypatch.setattr(vllm_server, "_PAUSES", (0.01,))
    lost = []

    def once(handler):
        if handler.body["prompt_logprobs"] is None or len(lost) == 30:
            return False
        lost.append(1)
        lose(handler)
        return True

    server.take_over["/v1/completions"] = once
    train(config(files, "there", {"url": server.url, "patience": 60.0}))
    server.take_over.clear()
    train(config(files, "undisturbed", {"url": server.url}))
    assert_same_metrics(files / "there", files / "undisturbed", atol=0)
    assert "for up to teacher.patience=60 seconds" in capfd.readouterr().out
    lost.clear()
    server.take_over["/v1/completions"] = lambda handler: once(handler) or lost.clear()
    with pytest.raises(ServerError, match=r"for teacher\.patience=0\.1 seconds$"):
        train(config(files, "gone", {"url": server.url, "patience": 0.1}))


def test_a_server_needs_room_for_a_token_more(files, server):
    server.max_model_len = 36  # of 32 and 4
    with pytest.raises(ServerError, match=r"^teacher\.url must be of a server with room for 37"):
        train(config(files, teacher={"url": server.url}))


def test_what_a_server_cannot_do_is_refused(files):
    rollout = RolloutConfig(temperature=0.7)
    with pytest.raises(ValueError, match=r"^rollout\.temperature must be 1 with teacher\.url"):
        TrainConfig(rollout=rollout, teacher=TeacherConfig(model="x", url="http://localhost:1"))
    with pytest.raises(ValueError, match=r"^teacher\.url must be http://HOST:PORT"):
        train(config(files, teacher={"url": "localhost:1"}))


@pytest.mark.exhaustive
def test_two_processes_share_the_rows_of_a_server(files, server):
    options = {"mesh": MeshConfig(fsdp=8), "reward": "exact"}
    train(config(files, "one", {"url": server.url}, **options))
    run_joined(files, config(files, "two", {"url": server.url}, **options))
    assert_same_metrics(files / "two", files / "one")
