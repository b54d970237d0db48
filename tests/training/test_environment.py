"""Runs with environments: credit by turn, metrics, resumption, failures that end a run."""

import dataclasses
import itertools
import json
import os
import shutil

import jax
import numpy as np
import pytest

from tests.rollout import games
from tests.training import small_run
from tests.training.runs import lines, steps
from twinkle_jax.data import Batch, PromptBatch
from twinkle_jax.rollout import Episode, Rollout, Turn
from twinkle_jax.training import (
    EvaluationConfig,
    LoggingConfig,
    OptimizerConfig,
    RolloutConfig,
    TrainConfig,
    UpdateConfig,
    begin_training,
    collect,
    learn,
    make_recipe,
    small_policy,
    train,
)
from twinkle_jax.training.metrics import rollout_metrics
from twinkle_jax.training.step import credit

GAMES = "tests.rollout.games"
EPISODES = {"prompts": 2, "num_samples": 4, "max_turns": 3, "max_new_tokens": 4}
EPISODES |= {"max_prompt_tokens": 16, "max_episode_tokens": 32}


def config(folder, directory, environment="Guess", *, rollout=None, **changes):
    settings = {
        "environment": f"{GAMES}:{environment}",
        "task": "environment",
        "reward": None,
        "rollout": RolloutConfig(**(EPISODES | (rollout or {}))),
        "update": small_run.update(kl_beta=0.0),
        "logging": LoggingConfig(checkpoint_every=1, samples_every=1, traces_every=1),
    }
    return small_run.config(folder, directory, **(settings | changes))


def parameters(path):
    return (path / "policy/model.safetensors").read_bytes()


@pytest.mark.slow
def test_a_run_that_goes_on_is_the_run_that_was_not_interrupted(folder, tmp_path, capsys):
    """Byte for byte: metrics, traces and parameters after 4 steps, at once or as 2 and 2."""
    changes = {"optimizer": OptimizerConfig(learning_rate=1e-2, schedule="constant")}
    changes["evaluation"] = EvaluationConfig(every=2, problems=4)
    train(config(folder, tmp_path / "whole", **changes))
    train(config(folder, tmp_path / "parts", steps=2, **changes))
    train(config(folder, tmp_path / "parts", resume="auto", **changes))
    uninterrupted, parts = tmp_path / "whole", tmp_path / "parts"
    assert lines(uninterrupted) == lines(parts)
    assert parameters(uninterrupted) == parameters(parts)
    traces = sorted((uninterrupted / "traces").iterdir())
    assert [path.name for path in traces] == [f"{n:06d}.jsonl" for n in (1, 2, 3, 4)]
    for path in traces:
        assert path.read_bytes() == (parts / "traces" / path.name).read_bytes()
    record = json.loads(traces[0].read_text().splitlines()[0])
    assert record["messages"][0] == {"role": "user", "content": "0-9="}
    assert len(record["rewards"]) == len(record["tokens"])
    assert record["reward"] == pytest.approx(sum(record["rewards"]))
    line = lines(uninterrupted)[1]
    assert 1 <= line["environment/turns"] <= 3
    assert line["environment/failed"] == 0
    assert line["eval/failed"] == 0
    endings = [line[f"environment/ended/{x}"] for x in ("done", "max_turns", "length")]
    assert sum(endings) == pytest.approx(1)
    assert line["sampling/logp_diff/mean"] < 1e-5
    shown = capsys.readouterr().out
    assert "0-9=" in shown  # episodes are shown as conversations
    assert "rollout.cohorts 1\n" in shown


@pytest.mark.exhaustive
def test_a_run_in_two_cohorts_goes_on_byte_for_byte(folder, tmp_path, capsys):
    """64 episodes a step: two cohorts, which nothing measures, are said, saved and kept."""
    changes = {"rollout": {"prompts": 16}, "steps": 2, "environment": "Never"}
    train(config(folder, tmp_path / "whole", **changes))
    assert "rollout.cohorts 2\n" in capsys.readouterr().out
    train(config(folder, tmp_path / "parts", **(changes | {"steps": 1})))
    train(config(folder, tmp_path / "parts", resume="auto", **changes))
    uninterrupted, parts = tmp_path / "whole", tmp_path / "parts"
    assert json.loads((parts / "config.json").read_text())["rollout"]["cohorts"] == 2
    assert lines(uninterrupted) == lines(parts)
    assert parameters(uninterrupted) == parameters(parts)


@pytest.mark.slow
def test_an_environment_may_change_the_working_directory(folder, tmp_path, monkeypatch):
    """The run goes on to write where it began."""
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)

    class Wanders(games.Guess):
        def step(self, action):
            os.chdir(tmp_path / "elsewhere")
            return super().step(action)

    monkeypatch.setattr(games, "Wanders", Wanders, raising=False)
    train(config(folder, "run", "Wanders", steps=1))
    assert not [*(tmp_path / "elsewhere").iterdir()]
    names = {"traces", "policy", "summary.json", "metrics.jsonl", "checkpoints"}
    assert names <= {path.name for path in (tmp_path / "run").iterdir()}


@pytest.fixture
def breaks(monkeypatch):
    """Makes `games.Breaks`, whose resets of some numbers fail; they count from 1."""

    def make(broken):
        numbers = itertools.count(1)

        class Breaks(games.Guess):
            def reset(self, row, seed):
                if next(numbers) in broken:
                    raise OSError("no more")
                return super().reset(row, seed)

        monkeypatch.setattr(games, "Breaks", Breaks, raising=False)

    yield make
    games.OPEN.clear()


FOUR = EvaluationConfig(every=0, problems=4)


@pytest.mark.slow
def test_too_many_failures_end_a_run_with_the_last_step_saved(folder, tmp_path, breaks):
    """4 episodes are evaluated, then 8 a step; the third step's fail, and the second is saved."""
    breaks(range(4 + 2 * 8 + 1, 1000))
    with pytest.raises(RuntimeError, match="max_failed"):
        train(config(folder, tmp_path / "run", "Breaks", evaluation=FOUR))
    assert len(lines(tmp_path / "run")) == 2
    assert steps(tmp_path / "run")[-1] == 2


@pytest.mark.slow
def test_why_environments_failed_is_printed_once(folder, tmp_path, capsys, breaks):
    """All 8 of a step, twice, in two steps; 4 are evaluated before and after."""
    breaks(range(5, 5 + 2 * 8 * 2))
    rollout = {"max_failed": 1.0}
    train(config(folder, tmp_path, "Breaks", steps=2, rollout=rollout, evaluation=FOUR))
    (note,) = [line for line in capsys.readouterr().out.splitlines() if "no more" in line]
    assert note.startswith("step 1: 8 of 8 environments failed")
    assert "(raised): OSError: no more" in note


def rollout_of(rewards, failed=()):
    """Episodes with these rewards by turn; each turn has one token, two apart."""
    width = 8
    turns = np.full((len(rewards), width), -1, np.int32)
    episodes = []
    for i, row in enumerate(rewards):
        turns[i, : 2 * len(row) : 2] = np.arange(len(row))
        episode = Episode([], turns=[Turn(0, 1, 2, reward=r) for r in row], ended="done")
        if i in failed:
            episode.ended, episode.cause = "failed", "raised"
            turns[i] = -1
        episodes.append(episode)
    labels = np.where(turns >= 0, 3, -100)
    batch = Batch(tokens=np.zeros_like(turns), labels=labels, old_logps=np.zeros(turns.shape))
    return Rollout(
        jax.tree.map(jax.numpy.asarray, batch),
        [{"messages": []}] * len(rewards),
        [None] * len(rewards),
        np.asarray([len(r) for r in rewards]),
        np.full(len(rewards), width),
        np.zeros(len(rewards), bool),
        rewards=np.asarray([0.0 if e.failed else e.returns()[0] for e in episodes], np.float32),
        counted=np.asarray([not e.failed for e in episodes]),
        episodes=episodes,
        turns=turns,
    )


def credited(rollout, **update):
    settings = TrainConfig(
        environment=f"{GAMES}:Guess",
        rollout=RolloutConfig(prompts=1, num_samples=len(rollout.lengths), max_turns=3),
        update=UpdateConfig(**({"advantage": "rloo", "scale": "none", "mini_batches": 1} | update)),
    )
    recipe = make_recipe(settings, small_policy(0), None, environment=object)
    return np.asarray(credit(recipe, rollout))


def test_credit_of_episodes_and_of_turns_by_hand():
    """Two episodes: returns 3 and 1; from turn 1 on 2 and 1 (with discount 1), from turn 2 on 2.

    RLOO subtracts the mean of the others: 3 - 1 = 2 for episodes and first turns, 2 - 1 = 1 for
    second ones, and 0 for a third turn that is compared with none.
    """
    rollout = rollout_of([[1.0, 0.0, 2.0], [0.0, 1.0]])
    np.testing.assert_array_equal(credited(rollout), [2.0, -2.0])
    by_turn = credited(rollout, credit="turn")
    np.testing.assert_array_equal(by_turn[0, 0:6:2], [2.0, 1.0, 0.0])
    np.testing.assert_array_equal(by_turn[1, 0:4:2], [-2.0, -1.0])
    mixed = credited(rollout, credit="mixed")
    np.testing.assert_array_equal(mixed[0, 0:6:2], [2.0, 1.5, 1.0])
    # Half of what comes a turn later: 1 + 0 + 2/4 against 0 + 1/2, then 0 + 2/2 against 1.
    halved = credited(rollout, credit="turn", discount=0.5)
    np.testing.assert_array_equal(halved[0, 0:6:2], [1.0, 0.0, 0.0])


def test_remax_compares_episodes_with_a_greedy_one_of_the_same_seed():
    """In each rollout of a step: environments may make their problem from the seed alone."""
    seeds = []

    class Seen(games.Never):
        def reset(self, row, seed):
            seeds.append(seed)
            return super().reset(row, seed)

    settings = TrainConfig(
        environment=f"{GAMES}:Never",
        rollout=RolloutConfig(prompts=2, num_samples=2, max_turns=1, max_prompt_tokens=16),
        update=UpdateConfig(advantage="remax", mini_batches=1, dynamic_sampling=2),
    )
    policy = small_policy(0)
    recipe = make_recipe(settings, policy, None, environment=Seen)
    prompts = PromptBatch({"messages": [], "user_data": []} for _ in range(2))
    collect(recipe, policy.params, lambda: prompts, jax.random.key(0))
    first, greedy, second, greedy_again = (
        set(seeds[i:j]) for i, j in ((0, 4), (4, 6), (6, 10), (10, 12))
    )
    assert greedy == first and greedy_again == second
    assert len(seeds) == 12 and len(first | second) == 4


@pytest.mark.parametrize(("credit_of", "rollouts"), [("episode", 2), ("turn", 1), ("mixed", 1)])
def test_dynamic_sampling_looks_at_turns_if_these_are_credited(credit_of, rollouts):
    """Both episodes have the return 1, but from the second turn on 0 and 1."""

    class Source:
        def sample(self, params, prompts, key):
            return rollout_of([[1.0, 0.0], [0.0, 1.0]])

        def score(self, rollout):
            return rollout

    settings = TrainConfig(
        environment=f"{GAMES}:Guess",
        rollout=RolloutConfig(prompts=1, num_samples=2, max_turns=3),
        update=UpdateConfig(advantage="rloo", credit=credit_of, mini_batches=1, dynamic_sampling=2),
    )
    recipe = make_recipe(settings, small_policy(0), None, environment=object)
    recipe = recipe._replace(source=Source())
    _, drawn = collect(recipe, {}, lambda: None, jax.random.key(0))
    assert len(drawn) == rollouts


def test_gdpo_does_not_take_the_sum_of_an_environments_reward_and_another():
    settings = TrainConfig(
        environment=f"{GAMES}:Guess",
        rollout=RolloutConfig(**EPISODES),
        update=UpdateConfig(advantage="gdpo", mini_batches=1),
    )
    with pytest.raises(ValueError, match=r"^update\.advantage must not be gdpo"):
        make_recipe(settings, small_policy(0), small_run.Scorer(), environment=games.Guess)
    make_recipe(settings, small_policy(0), None, environment=games.Guess)


def test_lengths_of_turns_weigh_the_rewards_of_turns():
    """OPO: of the first turns, returns 3 and 1 over 3 tokens and 1, whose mean is 10 / 4."""
    rollout = rollout_of([[1.0, 0.0, 2.0], [0.0, 1.0]])
    rollout.episodes[0].turns[0] = Turn(0, 1, 4, reward=1.0)
    by_turn = credited(rollout, advantage="opo", credit="turn")
    np.testing.assert_array_equal(by_turn[0, 0:6:2], [0.5, 0.5, 0.0])
    np.testing.assert_array_equal(by_turn[1, 0:4:2], [-1.5, -0.5])


def test_gae_over_turns_by_hand():
    """Returns 3, 2, 2 and 1, 1; values 2, 1.5 and 2, for the third turn is compared with none.

    With lambda 1/2: R = 2 for the third turn, 0 + (2 + 2) / 2 = 2 for the second and
    1 + (2 + 1.5) / 2 = 2.75 for the first; 1 and 0 + (1 + 1.5) / 2 = 1.25 of the other episode.
    """
    rollout = rollout_of([[1.0, 0.0, 2.0], [0.0, 1.0]])
    by_turn = credited(rollout, credit="turn", gae_lambda=0.5)
    np.testing.assert_array_equal(by_turn[0, 0:6:2], [1.5, 1.0, 0.0])
    np.testing.assert_array_equal(by_turn[1, 0:4:2], [-1.5, -1.0])
    mixed = credited(rollout, credit="mixed", gae_lambda=0.5)
    np.testing.assert_array_equal(mixed[0, 0:6:2], [1.75, 1.5, 1.0])
    failed = credited(rollout_of([[1.0], [9.0, 9.0], [3.0]], failed=[1]), credit="turn",
                      gae_lambda=0.5)  # fmt: skip
    np.testing.assert_array_equal(failed[:, 0], [-2.0, 0.0, 2.0])


def test_observations_get_no_gradient():
    """Advantages of what the environment said move nothing; those of what was sampled do."""
    settings = TrainConfig(
        environment=f"{GAMES}:Guess",
        rollout=RolloutConfig(**(EPISODES | {"prompts": 1})),
        update=UpdateConfig(advantage="rloo", mini_batches=1, on_mismatch="warn"),
        optimizer=OptimizerConfig(warmup_steps=0),
    )
    policy = small_policy(0)
    recipe = make_recipe(settings, policy, None, environment=games.Guess)
    prompts = PromptBatch([{"messages": [], "user_data": []}])
    rollout = recipe.source.sample(policy.params, prompts, jax.random.key(3))
    observed = rollout.turns < 0
    spoken = np.asarray(rollout.batch.tokens) > 0
    assert (observed & spoken).sum() > 20  # what the environment said, and marks of roles

    def trained_with(advantages, logprobs):
        batch = rollout.batch._replace(
            advantages=jax.numpy.asarray(advantages, jax.numpy.float32),
            old_logps=jax.numpy.asarray(logprobs, jax.numpy.float32),
        )
        params = jax.tree.map(jax.numpy.copy, policy.params)
        state = begin_training(params, recipe.optimizer, None)
        state, _ = learn(state, batch, recipe, learning_rate=1e-2, seed=(0,))
        return state.params

    logprobs = np.asarray(rollout.batch.old_logps)
    before = jax.tree.leaves(policy.params)
    still = trained_with(np.where(observed, 100.0, 0.0), np.where(observed, -50.0, logprobs))
    for x, y in zip(before, jax.tree.leaves(still), strict=True):
        np.testing.assert_array_equal(x, y)
    moved = trained_with(np.where(observed, 0.0, 1.0), logprobs)
    assert any((x != y).any() for x, y in zip(before, jax.tree.leaves(moved), strict=True))


def test_failed_episodes_have_no_part_in_statistics():
    rollout = rollout_of([[1.0], [3.0], [9.0], [5.0]], failed=[2])
    advantages = credited(rollout)
    np.testing.assert_array_equal(advantages, [-3.0, 0.0, 0.0, 3.0])  # 1 - 4, 3 - 3, -, 5 - 2
    assert credited(rollout, credit="turn")[2].max() == 0
    settings = TrainConfig(
        environment=f"{GAMES}:Guess",
        rollout=RolloutConfig(prompts=4, num_samples=4, max_turns=3),
    )
    metrics = rollout_metrics([rollout], settings, 0.0)
    assert metrics["reward"] == 3.0
    assert metrics["reward_std"] == 2.0
    assert metrics["environment/failed"] == metrics["environment/failed/raised"] == 0.25


def test_rows_of_failed_episodes_count_in_no_mean():
    """GRPO averages over sequences: of four episodes one failed, so it divides by three."""
    rollout = rollout_of([[1.0], [3.0], [9.0], [5.0]], failed=[2])
    counted = np.asarray([True, True, False, True])
    batch = rollout.batch._replace(
        rows=jax.numpy.asarray(counted), advantages=jax.numpy.ones(rollout.turns.shape)
    )
    settings = TrainConfig(
        environment=f"{GAMES}:Guess",
        rollout=RolloutConfig(prompts=1, num_samples=4, max_turns=3),
        update=UpdateConfig(mini_batches=1, on_mismatch="warn"),
    )
    policy = small_policy(0)
    recipe = make_recipe(settings, policy, None, environment=object)
    state = begin_training(policy.params, recipe.optimizer, None)
    state, learnt = learn(state, batch, recipe, learning_rate=1e-3, seed=(0,))
    assert float(learnt.summaries[0].denominator) == 3
    assert int(state.rows) == 3


@pytest.mark.slow
def test_a_chat_template_that_hides_tools_is_said(folder, tmp_path, capsys):
    (tmp_path / "tools.py").write_text(
        'def ask(word: str) -> str:\n    """Ask."""\n    return word'
    )
    tools = {"tools": str(tmp_path / "tools.py"), "steps": 0}
    train(small_run.config(folder, tmp_path / "hidden", **tools))
    assert "chat template does not show tools" in capsys.readouterr().out
    task = tmp_path / "rows.jsonl"
    tool = {"type": "function", "function": {"name": "ask"}}
    task.write_text(json.dumps({"prompt": "2+2=", "answer": "4", "tools": [tool]}) + "\n")
    column = {"task": str(task), "steps": 0}
    train(small_run.config(folder, tmp_path / "column", **column))
    assert "chat template does not show tools" in capsys.readouterr().out
    model = tmp_path / "model"
    shutil.copytree(folder / "model", model)
    tokenizer = json.loads((model / "tokenizer_config.json").read_text())
    tokenizer["chat_template"] += (
        "{% for tool in tools or [] %}{{ tool.function.name }}{% endfor %}"
    )
    (model / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    train(small_run.config(folder, tmp_path / "shown", model=str(model), **tools))
    train(small_run.config(folder, tmp_path / "shown too", model=str(model), **column))
    shown = capsys.readouterr().out
    assert "does not show tools" not in shown
    assert "writes tool calls in a form" not in shown
    without_calls = tokenizer["chat_template"]
    tokenizer["chat_template"] += (  # as Llama 3 writes them
        '{% for call in messages[-1].tool_calls or [] %}{"name": "{{ call.function.name }}", '
        '"parameters": {{ call.function.arguments | tojson }}}{% endfor %}'
    )
    (model / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    train(small_run.config(folder, tmp_path / "calls", model=str(model), **tools))
    assert "writes tool calls in a form" not in capsys.readouterr().out
    settings = small_run.config(folder, tmp_path / "set", model=str(model), **tools)
    chosen = dataclasses.replace(settings.rollout, tool_format="react")
    train(dataclasses.replace(settings, rollout=chosen))
    assert "is not read with --rollout.tool_format react" in capsys.readouterr().out
    tokenizer["chat_template"] = without_calls + (  # as gpt-oss writes them, arguments as text
        "{% for call in messages[-1].tool_calls or [] %}to=functions.{{ call.function.name }} json"
        "{{ call.function.arguments + '' }}{% endfor %}"
    )
    (model / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    train(small_run.config(folder, tmp_path / "other calls", model=str(model), **tools))
    assert "writes tool calls in a form" in capsys.readouterr().out


def test_settings_that_follow_from_others():
    made = TrainConfig(environment="x.py:Y")
    assert made.task == "environment"
    assert made.rollout.max_episode_tokens == 1024 + 6 * 8
    assert TrainConfig().task == "arithmetic"
    assert TrainConfig(tools="x.py").task == "arithmetic"
