"""One step: what it measures, what it learns from, and a wrong sampler that it notices."""

import dataclasses
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from twinkle_jax.advantage import GRPOAdvantage, group_statistics
from twinkle_jax.data import ArithmeticTask, PromptBatch
from twinkle_jax.loss import GRPOLoss
from twinkle_jax.model import StepSummary, UpdateInfo, init_params, score_batch, train_state
from twinkle_jax.reward import FunctionReward
from twinkle_jax.sampler import Sampling
from twinkle_jax.training import (
    Learner,
    Recipe,
    learn,
    sample_and_score,
    small_policy,
    train_step,
)
from twinkle_jax.training.configuration.named_estimator import Estimator
from twinkle_jax.training.step.dynamic_sampling import fill_up, has_signal
from twinkle_jax.training.step.learner import Learnt, _mini_batches
from twinkle_jax.training.step.recipe import RECOMPUTED
from twinkle_jax.training.step.sample_metrics import sample_metrics
from twinkle_jax.training.step.train_step import StaleSamplerError
from twinkle_jax.training.step.update_metrics import update_metrics

POLICY = small_policy(0)
OPTIMIZER, ADAM = optax.sgd(1.0), optax.adam(1.0)
PROMPTS = PromptBatch(ArithmeticTask(6, size=3)[:] + ArithmeticTask(1, size=1)[:])
SAMPLES = 4
long_ones = FunctionReward(lambda text, truth: float(len(text) > 2))


def recipe(reward=long_ones, **changes):
    # Four rows at a time, however many mini-batches there are: compiled once.
    learner = Learner(POLICY.config, GRPOLoss(), OPTIMIZER, mini_batches=2, micro_batch_rows=4)
    plain = Recipe(
        learner=learner,
        template=POLICY.template,
        reward=reward,
        estimator=Estimator(GRPOAdvantage()),
        scale="group",
        sampling=Sampling(stop_tokens=POLICY.tokenizer.stop_token_ids),
        num_samples=SAMPLES,
        max_new_tokens=6,
        max_prompt_tokens=64,
    )
    return plain._replace(**changes)


def fresh():
    return train_state(jax.tree.map(jnp.copy, POLICY.params), OPTIMIZER)


def sampled(of=None, key=0):
    return sample_and_score(POLICY.params, of or recipe(), PROMPTS, jax.random.key(key))


@pytest.mark.exhaustive
def test_a_step_moves_the_policy_towards_what_was_rewarded():
    drawn = sampled()
    state, metrics = train_step(fresh(), recipe(), drawn, learning_rate=0.3, seed=(0, 0))
    before = sampled(key=1).rewards.mean()
    after = sample_and_score(state.params, recipe(), PROMPTS, jax.random.key(1)).rewards.mean()
    assert after > before + 0.1
    assert state.step == 2  # one update a mini-batch
    assert metrics["grad_norm"] > 0
    assert metrics["skipped_updates"] == 0


def test_a_step_without_tokens_changes_nothing_and_is_no_fault():
    """As when all completions were cut off, and those are left out."""
    drawn = sampled()
    nothing = jnp.full_like(drawn.batch.labels, -100)
    drawn = drawn._replace(batch=drawn.batch._replace(labels=nothing))
    state, metrics = train_step(fresh(), recipe(), drawn, learning_rate=0.3, seed=(0, 0))
    assert metrics["skipped_updates"] == 0
    jax.tree.map(np.testing.assert_array_equal, state.params, fresh().params)


def test_sampler_and_trainer_agree():
    _, metrics = train_step(fresh(), recipe(), sampled(), learning_rate=1e-3, seed=(0, 0))
    assert metrics["sampling/logp_diff/max"] < 1e-5


def with_momentum(**changes):
    """A recipe of Adam, and a state whose moments are not zero."""
    plain = recipe()
    adam = plain._replace(learner=plain.learner._replace(optimizer=ADAM, **changes))
    state = train_state(jax.tree.map(jnp.copy, POLICY.params), ADAM)
    state, _ = train_step(state, adam, sampled(), learning_rate=1e-3, seed=(0, 0))
    return adam, state, jax.tree.map(np.array, state)


def test_a_sampler_with_other_weights_is_an_error_that_changes_nothing():
    adam, state, before = with_momentum()
    other = init_params(jax.random.key(99), POLICY.config)
    drawn = sample_and_score(other, adam, PROMPTS, jax.random.key(0))
    with pytest.raises(
        StaleSamplerError, match="sampler's log-probabilities must be the trainer's"
    ) as caught:
        train_step(state, adam, drawn, learning_rate=1e-3, seed=(0, 0))
    jax.tree.map(np.testing.assert_array_equal, caught.value.state, before)


@pytest.mark.parametrize("position", range(4))
def test_all_rows_can_be_compared(position):
    """Of four updates the first tells of its own prompt; later ones come too late to tell."""
    plain = recipe()
    four = plain._replace(learner=plain.learner._replace(mini_batches=4))
    prompt = np.random.default_rng([0, 0, 0]).permutation(4)[position]
    drawn = sampled()
    wrong = drawn.batch.old_logps.at[prompt * SAMPLES + 1].add(-0.5)
    drawn = drawn._replace(batch=drawn.batch._replace(old_logps=wrong))
    for compare_all in (False, True):
        if compare_all or position == 0:
            with pytest.raises(StaleSamplerError, match=r"difference of 0\.5"):
                take_step(four, drawn, compare_all)
        else:
            assert take_step(four, drawn, compare_all)["sampling/logp_diff/max"] < 1e-4


def take_step(of, drawn, compare_all):
    options = {"learning_rate": 1e-7, "seed": (0, 0), "compare_all": compare_all}
    return train_step(fresh(), of, drawn, **options)[1]


def test_a_constant_reward_changes_nothing_moments_included():
    adam, state, before = with_momentum()
    constant = adam._replace(reward=FunctionReward(lambda text, truth: 0.1))
    drawn = sample_and_score(state.params, constant, PROMPTS, jax.random.key(1))
    assert not has_signal(drawn, constant).any()
    state, metrics = train_step(state, constant, drawn, learning_rate=1.0, seed=(0, 0))
    jax.tree.map(np.testing.assert_array_equal, state[:3], before[:3])
    assert (metrics["updates_without_signal"], metrics["skipped_updates"]) == (2, 0)
    assert metrics["grad_norm"] == 0


def test_only_updates_without_a_signal_are_left_out():
    adam, state, before = with_momentum(mini_batches=4)
    drawn = sample_and_score(state.params, adam, PROMPTS, jax.random.key(1))
    advantages = np.zeros(drawn.batch.tokens.shape, np.float32)
    advantages[:SAMPLES] = np.array([1, -1, 1, -1])[:, None]
    drawn = drawn._replace(batch=drawn.batch._replace(advantages=jnp.asarray(advantages)))
    state, metrics = train_step(state, adam, drawn, learning_rate=1e-3, seed=(0, 0))
    assert metrics["updates_without_signal"] == 3
    assert state.step == before.step + 1


@pytest.mark.parametrize("rollouts", [1, 2])
def test_a_penalty_is_a_reason_to_move(rollouts):
    """Rewards are all the same, but the policy is not the one that it is held near."""
    adam, state, before = with_momentum(loss=GRPOLoss(beta=0.5))
    flat = FunctionReward(lambda text, truth: 0.1)
    away = adam._replace(reward=flat, reference=POLICY.params, dynamic_sampling=rollouts)
    drawn = sample_and_score(state.params, away, PROMPTS, jax.random.key(1))
    if rollouts == 1:  # else it is scored later
        of_the_reference = away.learner.score(POLICY.params, drawn.batch)
        np.testing.assert_allclose(drawn.batch.ref_logps, of_the_reference, atol=1e-6)
        assert np.abs(drawn.batch.ref_logps - drawn.batch.old_logps).max() > 1e-3
    state, metrics = train_step(state, away, drawn, learning_rate=1e-3, seed=(0, 0))
    assert metrics["updates_without_signal"] == 0
    assert state.step == before.step + 2


def test_later_updates_compare_with_the_policy_that_sampled():
    drawn, plain = sampled(), recipe()
    learner = plain.learner._replace(mini_batches=1, epochs=2)
    options = {"group": SAMPLES, "learning_rate": 0.1, "seed": (0, 0)}
    once, _ = learn(fresh(), drawn.batch, learner._replace(epochs=1), **options)
    moved = learner.score(once.params, drawn.batch) - drawn.batch.old_logps
    ratios = np.exp(np.asarray(moved))[np.asarray(drawn.batch.labels) != -100]
    _, learnt = learn(fresh(), drawn.batch, learner, **options)
    first, second = (summary.metrics for summary in learnt.summaries)
    np.testing.assert_allclose([first.ratio_min, first.ratio_max], 1, atol=1e-5)
    assert ratios.max() > 1.01
    expected = [ratios.min(), ratios.max()]
    np.testing.assert_allclose([second.ratio_min, second.ratio_max], expected, rtol=1e-4)


def test_prompts_are_dealt_out_whole_and_anew_in_each_epoch():
    learner = recipe().learner._replace(epochs=2, mini_batches=3)
    dealt = list(_mini_batches(24, 4, learner, (0, 1)))
    for rows in dealt:
        groups = rows.reshape(-1, 4)
        np.testing.assert_array_equal(groups, groups[:, :1] + np.arange(4))
        assert not np.any(groups[:, 0] % 4)
    epochs = [np.concatenate(dealt[:3]), np.concatenate(dealt[3:])]
    for rows in epochs:
        assert sorted(rows) == list(range(24))
    assert np.any(epochs[0] != epochs[1])


def test_the_same_seed_gives_the_same_step_and_another_one_another():
    drawn = sampled()
    first, again, other = (
        train_step(fresh(), recipe(), drawn, learning_rate=0.1, seed=(0, seed))[0].params
        for seed in (0, 0, 3)
    )
    jax.tree.map(np.testing.assert_array_equal, first, again)
    leaves = zip(jax.tree.leaves(first), jax.tree.leaves(other), strict=True)
    assert any(not np.array_equal(a, b) for a, b in leaves)


def test_the_update_recomputes_what_the_learner_says():
    asked = []

    def keep_nothing(primitive, *_, **__):
        asked.append(str(primitive))
        return False

    plain = recipe()
    spying = plain._replace(learner=plain.learner._replace(remat=keep_nothing))
    train_step(fresh(), spying, sampled(), learning_rate=0.1, seed=(0, 0))
    assert "dot_general" in asked


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "how",
    [{"micro_batch_rows": 3}, {"remat": RECOMPUTED["elementwise"]}, {"remat": False}],
    ids=["micro-batches", "products kept", "all kept"],
)
def test_how_gradients_are_computed_changes_nothing_but_rounding(how):
    drawn, plain = sampled(), recipe()
    whole = plain._replace(learner=plain.learner._replace(micro_batch_rows=None))
    small = whole._replace(learner=whole.learner._replace(**how))
    a, _ = train_step(fresh(), whole, drawn, learning_rate=0.1, seed=(0, 0))
    b, _ = train_step(fresh(), small, drawn, learning_rate=0.1, seed=(0, 0))
    for x, y in zip(jax.tree.leaves(a.params), jax.tree.leaves(b.params), strict=True):
        np.testing.assert_allclose(x, y, atol=1e-6)


@pytest.mark.exhaustive
def test_kl_from_a_reference_is_zero_at_first_and_pulls_back_later():
    loss = GRPOLoss(beta=0.5)
    held = recipe(reference=POLICY.params)
    held = held._replace(learner=held.learner._replace(loss=loss))
    _, metrics = train_step(fresh(), held, sampled(), learning_rate=0.1, seed=(0, 0))
    assert abs(metrics["kl"]) < 1e-6
    moved = init_params(jax.random.key(5), POLICY.config)
    drawn = sample_and_score(moved, held, PROMPTS, jax.random.key(0))
    state = train_state(jax.tree.map(jnp.copy, moved), OPTIMIZER)
    _, metrics = train_step(state, held, drawn, learning_rate=0.1, seed=(0, 0))
    assert metrics["kl"] > 0.01


def test_dynamic_sampling_takes_prompts_whose_rewards_differ_from_further_rollouts():
    wants = recipe(dynamic_sampling=3)
    first, second = sampled(key=0), sampled(key=1)
    flat = np.repeat(first.rewards[::SAMPLES], SAMPLES)
    rewards = np.where(np.arange(16) < 8, flat, np.tile([0.0, 1.0], 8)).astype(np.float32)
    half = first._replace(rewards=rewards)  # two of four prompts have a signal
    full = second._replace(rewards=np.tile([0.0, 1.0], 8).astype(np.float32))
    assert has_signal(half, wants).tolist() == [False, False, True, True]
    chosen, drawn = fill_up(lambda number: [half, full, full][number], wants, 4)
    assert len(drawn) == 2
    assert has_signal(chosen, wants).all()
    np.testing.assert_array_equal(chosen.lengths[:8], first.lengths[8:])
    np.testing.assert_array_equal(chosen.lengths[8:], second.lengths[:8])
    np.testing.assert_array_equal(chosen.batch.labels[:8], first.batch.labels[8:])
    np.testing.assert_array_equal(chosen.batch.labels[8:], second.batch.labels[:8])
    assert fill_up(lambda number: half, recipe(), 4)[0] is half


def test_a_reward_is_told_what_is_right_for_each_completion():
    asked = []

    def reward(trajectories, truths):
        asked.extend(zip(trajectories, truths, strict=True))
        return [0.0] * len(truths)

    sampled(recipe(reward))
    for i, (trajectory, truth) in enumerate(asked):
        prompt = PROMPTS[i // SAMPLES]
        assert trajectory["messages"][:-1] == prompt["messages"]
        assert truth == PROMPTS.ground_truths[i // SAMPLES]
    assert len(asked) == len(PROMPTS) * SAMPLES


def test_truncated_completions_neither_vote_nor_learn():
    masked = recipe(mask_truncated=True)
    drawn = sampled(masked)
    assert drawn.truncated.any()
    assert (drawn.advantages[drawn.truncated] == 0).all()
    assert (np.asarray(drawn.batch.labels)[drawn.truncated] == -100).all()


def test_metrics_describe_all_that_was_sampled():
    drawn = sampled()
    metrics = sample_metrics([drawn], recipe(), 0.0)
    groups = drawn.rewards.reshape(-1, SAMPLES)
    assert metrics["reward"] == pytest.approx(drawn.rewards.mean())
    assert metrics["reward_std"] == pytest.approx(groups.std(axis=1, ddof=1).mean(), abs=1e-6)
    assert metrics["frac_reward_zero_std"] == (groups.max(axis=1) == groups.min(axis=1)).mean()
    assert metrics["completions/clipped_ratio"] == drawn.truncated.mean()
    assert metrics["completions/max_length"] == drawn.lengths.max() == 6


def test_updates_are_averaged_each_over_what_its_loss_divides_by():
    """Two sequences of five tokens in all, one of seven, and an update that had none."""
    numbers = [(6.0, 2.0, 5.0), (4.0, 1.0, 7.0), (0.0, 0.0, 0.0)]
    infos = [UpdateInfo(1.0, True), UpdateInfo(np.nan, False), UpdateInfo(0.0, False)]
    summaries = [StepSummary(*map(np.float32, x), metrics=None) for x in numbers]
    found = update_metrics(Learnt(summaries, infos, None))
    assert found["loss"] == (6 / 2 + 4 / 1 + 0) / 3
    assert (found["skipped_updates"], found["updates_without_signal"]) == (1, 1)


@dataclasses.dataclass
class Stop:
    after: int
    calls: int = 0

    def __call__(self):
        self.calls += 1
        if self.calls > self.after:
            raise InterruptedError


@pytest.mark.parametrize("after", [0, 1])
def test_a_step_can_be_ended_before_and_after_scoring(after):
    scored = []
    reward = FunctionReward(lambda text, truth: float(len(scored.append(text) or "x")))
    with pytest.raises(InterruptedError):
        sample_and_score(POLICY.params, recipe(reward), PROMPTS, jax.random.key(0), Stop(after))
    assert bool(scored) == bool(after)


@pytest.mark.parametrize("masked", [False, True])
def test_a_signal_is_seen_on_the_host_as_the_library_sees_it(masked):
    third = np.float32(1) / 3
    groups = [
        [0, 0, 0, 0],
        [0, 1, 0, 0],
        [0.1] * 4,
        [third, np.nextafter(third, 1, dtype="f4")] * 2,
    ]
    groups += [[third, third + 1e-5] * 2, [-2, -2, -2, 5], [1e-30, 2e-30, 0, 0], [3, 3, 3, 3]]
    truncated = np.zeros((8, 4), bool)
    truncated[1, 1] = truncated[5, :3] = truncated[7] = True
    truncated = truncated.reshape(-1)
    drawn = sampled()._replace(
        rewards=np.asarray(groups, np.float32).reshape(-1), truncated=truncated
    )
    where = ~truncated if masked else None
    expected = group_statistics(drawn.rewards, SAMPLES, where=where).has_signal
    got = has_signal(drawn, recipe(mask_truncated=masked))
    assert got.tolist() == expected.tolist()
    assert got.any() and not got.all()


@pytest.mark.parametrize("rows", [None, 3])
def test_scores_are_those_of_the_whole_batch_however_it_is_cut(rows):
    learner, batch = recipe().learner._replace(micro_batch_rows=rows), sampled().batch
    found = learner.score(POLICY.params, batch)
    whole = score_batch(POLICY.params, batch, POLICY.config).logps
    assert whole.any()
    np.testing.assert_allclose(found, whole, atol=1e-6)


SCORED = ["score_batch"] * 4  # four rows at a time


@pytest.mark.parametrize(
    ("rollouts", "expected"),
    [
        (1, ["generate", *SCORED, "read_texts", "compute_rewards"]),
        (2, ["generate", "read_texts", "compute_rewards", *SCORED]),
    ],
)
def test_the_device_scores_by_the_reference_while_the_host_computes_rewards(rollouts, expected):
    """Unless rows are still to be chosen: those that are left out would be scored for nothing."""
    held = recipe(reference=POLICY.params, dynamic_sampling=rollouts)
    called = []

    def note(frame, event, argument):
        code = frame.f_code
        if event == "call" and code.co_name in expected and "twinkle_jax" in code.co_filename:
            called.append(code.co_name)

    sys.setprofile(note)
    try:
        drawn = sampled(held)
        train_step(fresh(), held, drawn, learning_rate=1e-3, seed=(0, 0))
    finally:
        sys.setprofile(None)
    assert called == expected
