"""One step: what it measures, what it learns from, and a wrong sampler that it notices."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tests.model.families import config_of, each
from tests.model.training import copied_state
from twinkle_jax.advantage import gdpo_advantage
from twinkle_jax.data import ArithmeticTask, PromptBatch
from twinkle_jax.loss import GRPOLoss
from twinkle_jax.model import LoraConfig, init_params, make_mesh, shard_like_params
from twinkle_jax.model.decoder import attention
from twinkle_jax.reward import FunctionReward, WeightedReward
from twinkle_jax.rollout import Episode, Rollout, has_signal
from twinkle_jax.training import (
    LoraSettings,
    OptimizerConfig,
    RolloutConfig,
    SamplerMismatchError,
    TrainConfig,
    UpdateConfig,
    add_adapter,
    begin_training,
    collect,
    learn,
    make_recipe,
    score_batch,
    small_policy,
    train_step,
)
from twinkle_jax.training.config import with_setting
from twinkle_jax.training.metrics import rollout_metrics
from twinkle_jax.training.step import (
    RECOMPUTED,
    credit,
    deal_rows,
    describe_mismatch,
    mini_batch_keys,
    score,
    score_rollout,
    takes_segments,
)

POLICY = small_policy(0)
PROMPTS = PromptBatch(ArithmeticTask(6, size=3)[:] + ArithmeticTask(1, size=1)[:])
SAMPLES = 4
ROLLOUT = RolloutConfig(prompts=4, num_samples=SAMPLES, max_new_tokens=6, max_prompt_tokens=64)
long_ones = FunctionReward(lambda text, truth: float(len(text) > 2))


def recipe(reward=long_ones, optimizer="sgd", rollout=ROLLOUT, reference=None, **update):
    # One line at a time, however many mini-batches there are: compiled once.
    settings = {"mini_batches": 2, "micro_batch_tokens": 70} | update
    config = TrainConfig(
        rollout=rollout,
        update=UpdateConfig(**settings),
        optimizer=OptimizerConfig(name=optimizer),
    )
    made = make_recipe(config, POLICY, reward)
    return made if reference is None else made._replace(reference=reference)


OPTIMIZER, ADAM = recipe().optimizer, recipe(optimizer="adam").optimizer


def fresh():
    return copied_state(POLICY.params, OPTIMIZER)


def take_step(made, drawn, *, state=None, rate=1e-3, seed=0, **options):
    state = fresh() if state is None else state
    return train_step(state, made, drawn, learning_rate=rate, seed=(0, seed), **options)


def with_batch(drawn, **changes):
    return drawn._replace(batch=drawn.batch._replace(**changes))


def sampled(of=None, key=0, params=None, **options):
    weights = POLICY.params if params is None else params
    return collect(of or recipe(), weights, lambda: PROMPTS, jax.random.key(key), **options)[0]


def test_a_step_moves_the_policy_towards_what_was_rewarded():
    drawn = sampled()
    state, metrics = take_step(recipe(), drawn, rate=0.03)
    after = score(recipe(), state.params, drawn.batch, drawn.row_lengths).logps
    change = np.asarray(after - drawn.batch.old_logps).sum(axis=1)  # of whole completions
    better, worse = drawn.advantages > 0, drawn.advantages < 0
    assert change[better].mean() > 0 > change[worse].mean()
    assert state.step == 2  # one update a mini-batch
    assert metrics["grad_norm"] > 0
    assert metrics["skipped_updates"] == 0


def test_a_step_without_tokens_changes_nothing_and_is_no_fault():
    """As when all completions were cut off, and those are left out."""
    drawn = sampled()
    nothing = jnp.full_like(drawn.batch.labels, -100)
    drawn = with_batch(drawn, labels=nothing)
    state, metrics = take_step(recipe(), drawn, rate=0.3)
    assert metrics["skipped_updates"] == 0
    jax.tree.map(np.testing.assert_array_equal, state.params, fresh().params)


def test_sampler_and_trainer_agree():
    _, metrics = take_step(recipe(), sampled())
    assert metrics["sampling/logp_diff/max"] < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("compare_all", [False, True])
def test_a_temperature_is_that_of_the_sampler_in_all_passes(compare_all):
    cool = recipe(rollout=dataclasses.replace(ROLLOUT, temperature=0.7))
    _, metrics = take_step(cool, sampled(cool), compare_all=compare_all)
    assert metrics["sampling/logp_diff/max"] < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("limit", [1e-3, 1e3])
def test_gradients_are_clipped_at_the_limit_of_the_run(limit):
    made = recipe(mini_batches=1)
    made = made._replace(config=with_setting(made.config, "optimizer.max_grad_norm", limit))
    state, metrics = take_step(made, sampled(), rate=0.5)
    change = jax.tree.map(jnp.subtract, state.params, POLICY.params)
    moved = np.sqrt(sum(float(jnp.sum(x**2)) for x in jax.tree.leaves(change)))
    assert 1e-3 < metrics["grad_norm"] < 1e3
    assert moved == pytest.approx(0.5 * min(metrics["grad_norm"], limit), rel=1e-3)


def with_adapter(made, dropout=0.5, *, rank=2, seed=0, mesh=None):
    """The recipe of a policy with an adapter, a new one unless rank is 0; and the adapter."""
    policy = add_adapter(POLICY, LoraConfig(r=2, lora_dropout=dropout), base="base")
    lora = LoraSettings(rank=rank, dropout=dropout if rank else 0.0)
    config = dataclasses.replace(made.config, lora=lora, seed=seed)
    return make_recipe(config, policy, long_ones, mesh=mesh), policy.params


@pytest.mark.slow
def test_adapters_drop_inputs_by_the_seed_of_the_run():
    batch = sampled().batch

    def trained(dropout, **changes):
        made, adapter = with_adapter(recipe(), dropout, **changes)
        state = copied_state(adapter, made.optimizer)
        state, _ = learn(state, batch, made, learning_rate=0.1, seed=(0, 0))
        return np.concatenate([np.ravel(x) for x in jax.tree.leaves(state.params)])

    dropped = trained(0.5)
    np.testing.assert_array_equal(dropped, trained(0.5))
    np.testing.assert_array_equal(dropped, trained(0.5, rank=0))  # an adapter that was read
    assert np.abs(dropped - trained(0.5, seed=1)).max() > 1e-6
    assert np.abs(dropped - trained(0.0)).max() > 1e-6


def learnt_with_dropout(budget=70, devices=1, rows=32, learning_rate=0.1, epochs=1):
    mesh = None if devices == 1 else make_mesh(data=devices)
    made = recipe(mini_batches=1, micro_batch_tokens=budget, epochs=epochs)
    made, adapter = with_adapter(made, mesh=mesh)
    if mesh is not None:
        frozen = jax.device_put(made.frozen, shard_like_params(made.frozen, mesh))
        made = made._replace(frozen=frozen)
    # B is 0 at the start, so that no input of A would matter.
    adapter = jax.tree.map(lambda x: x + 0.1, adapter)
    state = begin_training(adapter, made.optimizer, mesh)
    drawn = sampled()
    # Twice the rows: enough lines for the larger budget to put two into a micro-batch.
    batch = jax.tree.map(lambda x: jnp.tile(x, (2,) + (1,) * (x.ndim - 1))[:rows], drawn.batch)
    lengths = np.tile(drawn.row_lengths, 2)[:rows]
    return learn(state, batch, made, learning_rate=learning_rate, seed=(0, 0), row_lengths=lengths)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("budget", "devices"), [(4096, 1), pytest.param(70, 2, marks=pytest.mark.exhaustive)]
)
def test_dropout_does_not_depend_on_the_budget_or_the_mesh(budget, devices):
    expected, got = learnt_with_dropout()[0], learnt_with_dropout(budget, devices)[0]
    for one, other in zip(*map(jax.tree.leaves, (got.params, expected.params)), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)


def test_each_row_of_each_update_has_a_dropout_key_of_its_own():
    keys = [mini_batch_keys(jax.random.key(0), jnp.int32(seen), 4) for seen in (0, 4)]
    assert len({tuple(x) for pair in keys for x in np.asarray(jax.random.key_data(pair))}) == 8


@pytest.mark.slow
def test_each_update_drops_other_inputs():
    """Of one prompt, so that rows have the same order in both; nothing else changes."""
    _, learnt = learnt_with_dropout(rows=SAMPLES, learning_rate=0.0, epochs=2)
    first, second = (float(info.gradient_norm) for info in learnt.infos)
    assert abs(first - second) > 1e-3 * first > 0


@pytest.mark.slow
@pytest.mark.parametrize("mini_batches", each([2, 1]))
def test_dropout_is_no_mismatch(mini_batches):
    """The sampler has no dropout, and the trainer has none where the two are compared."""
    made, adapter = with_adapter(recipe(mini_batches=mini_batches))
    adapter = jax.tree.map(lambda x: x + 0.3, adapter)
    drawn = sampled(made, params=adapter)
    states = [copied_state(adapter, made.optimizer) for _ in range(2)]
    _, metrics = take_step(made, drawn, state=states[0])
    assert metrics["sampling/logp_diff/max"] < 1e-4
    assert metrics["sampling/token_sample_size"] == pytest.approx(1, abs=1e-4)
    _, learnt = learn(states[1], drawn.batch, made, learning_rate=1e-3, seed=(0, 0))
    assert learnt.mismatch is None  # not compared


def with_momentum(**changes):
    """A recipe of Adam, and a state whose moments are not zero."""
    adam = recipe(optimizer="adam", **changes)
    state = copied_state(POLICY.params, ADAM)
    state, _ = take_step(adam, sampled(), state=state)
    return adam, state, jax.tree.map(np.array, state)


@pytest.mark.slow
def test_a_sampler_with_other_weights_is_an_error_that_changes_nothing():
    adam, state, before = with_momentum()
    other = init_params(jax.random.key(99), POLICY.config)
    drawn = sampled(adam, params=other)
    with pytest.raises(SamplerMismatchError, match="log-probabilities") as caught:
        take_step(adam, drawn, state=state)
    jax.tree.map(np.testing.assert_array_equal, caught.value.state, before)


@pytest.mark.parametrize("loose", [{"max_outside_band": 1.0}, {"max_logp_diff": 10.0}])
def test_either_limit_stops_the_update(loose):
    adam, state, before = with_momentum(**loose)
    drawn = sampled(adam, params=state.params)
    shifted = with_batch(drawn, old_logps=drawn.batch.old_logps - 2)  # e^2 is outside [1/2, 2]
    with pytest.raises(SamplerMismatchError) as caught:
        take_step(adam, shifted, state=state)
    jax.tree.map(np.testing.assert_array_equal, caught.value.state, before)


@pytest.mark.slow
@pytest.mark.parametrize("position", range(4))
def test_all_rows_can_be_compared(position):
    """Of four updates the first tells of its own prompt; later ones come too late to tell."""
    four = recipe(mini_batches=4)
    prompt = np.random.default_rng([0, 0, 0]).permutation(4)[position]
    drawn = sampled()
    wrong = drawn.batch.old_logps.at[prompt * SAMPLES + 1].add(-0.5)
    drawn = with_batch(drawn, old_logps=wrong)
    for compare_all in (False, True):
        if compare_all or position == 0:
            with pytest.raises(SamplerMismatchError):
                take_step(four, drawn, compare_all=compare_all)
        else:
            _, metrics = take_step(four, drawn, compare_all=compare_all)
            assert metrics["sampling/logp_diff/max"] < 1e-4


def test_a_constant_reward_changes_nothing_moments_included():
    _, state, before = with_momentum()
    constant = recipe(FunctionReward(lambda text, truth: 0.1), optimizer="adam")
    drawn = sampled(constant, 1, state.params)
    assert not has_signal(drawn, SAMPLES).any()
    state, metrics = take_step(constant, drawn, state=state, rate=1.0)
    jax.tree.map(np.testing.assert_array_equal, state[:3], before[:3])
    assert (metrics["updates_without_signal"], metrics["skipped_updates"]) == (2, 0)
    assert metrics["grad_norm"] == 0


def test_an_entropy_bonus_is_a_reason_to_move():
    flat = FunctionReward(lambda text, truth: 0.1)
    made = recipe(flat, loss_options={"entropy_coef": 1.0})
    drawn = sampled(made)

    def entropy(params):
        scores = score_batch(params, drawn.batch, POLICY.config, with_entropy=True)
        return float(jnp.sum(scores.entropies))

    state, metrics = take_step(made, drawn, rate=0.1)
    assert metrics["updates_without_signal"] == 0
    assert entropy(state.params) > entropy(POLICY.params) + 0.1


@pytest.mark.slow
def test_only_updates_without_a_signal_are_left_out():
    adam, state, before = with_momentum(mini_batches=4)
    drawn = sampled(adam, 1, state.params)
    advantages = np.zeros(drawn.batch.tokens.shape, np.float32)
    advantages[:SAMPLES] = np.array([1, -1, 1, -1])[:, None]
    drawn = with_batch(drawn, advantages=jnp.asarray(advantages))
    state, metrics = take_step(adam, drawn, state=state)
    assert metrics["updates_without_signal"] == 3
    assert state.step == before.step + 1


@pytest.mark.slow
@pytest.mark.parametrize("rollouts", [1, 2])
def test_a_penalty_is_a_reason_to_move(rollouts):
    """Rewards are all the same, but the policy is not the one that it is held near."""
    _, state, before = with_momentum(kl_beta=0.5)
    flat = FunctionReward(lambda text, truth: 0.1)
    away = recipe(flat, optimizer="adam", kl_beta=0.5, dynamic_sampling=rollouts)
    drawn = sampled(away, 1, state.params)
    if rollouts == 1:  # else it is scored later
        of_the_reference = score(away, POLICY.params, drawn.batch, drawn.row_lengths).logps
        np.testing.assert_allclose(drawn.batch.ref_logps, of_the_reference, atol=1e-6)
        assert np.abs(drawn.batch.ref_logps - drawn.batch.old_logps).max() > 1e-3
    state, metrics = take_step(away, drawn, state=state)
    assert metrics["updates_without_signal"] == 0
    assert state.step == before.step + 2


@pytest.mark.slow
def test_later_updates_compare_with_the_policy_that_sampled():
    drawn, twice = sampled(), recipe(mini_batches=1, epochs=2)
    options = {"learning_rate": 0.1, "seed": (0, 0)}
    once, _ = learn(fresh(), drawn.batch, recipe(mini_batches=1), **options)
    logps = score(twice, once.params, drawn.batch, drawn.row_lengths).logps
    moved = logps - drawn.batch.old_logps
    ratios = np.exp(np.asarray(moved))[np.asarray(drawn.batch.labels) != -100]
    _, learnt = learn(fresh(), drawn.batch, twice, **options)
    first, second = (summary.metrics for summary in learnt.summaries)
    np.testing.assert_allclose([first.ratio_min, first.ratio_max], 1, atol=1e-5)
    assert ratios.max() > 1.01
    expected = [ratios.min(), ratios.max()]
    np.testing.assert_allclose([second.ratio_min, second.ratio_max], expected, rtol=1e-4)


def test_prompts_are_dealt_out_whole_and_anew_in_each_epoch():
    config = recipe(
        epochs=2, mini_batches=3, rollout=dataclasses.replace(ROLLOUT, prompts=6)
    ).config
    dealt = list(deal_rows(24, config, (0, 1)))
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
        take_step(recipe(), drawn, rate=0.1, seed=seed)[0].params for seed in (0, 0, 3)
    )
    jax.tree.map(np.testing.assert_array_equal, first, again)
    leaves = zip(jax.tree.leaves(first), jax.tree.leaves(other), strict=True)
    assert any(not np.array_equal(a, b) for a, b in leaves)


@pytest.mark.slow
def test_the_update_recomputes_what_the_configuration_says(monkeypatch):
    asked = []

    def keep_nothing(primitive, *_, **__):
        asked.append(str(primitive))
        return False

    monkeypatch.setitem(RECOMPUTED, "elementwise", keep_nothing)
    take_step(recipe(recompute="elementwise"), sampled(), rate=0.1)
    assert "dot_general" in asked


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "how",
    [{"micro_batch_tokens": 70}, {"recompute": "elementwise"}, {"recompute": "nothing"}],
    ids=["micro-batches", "products kept", "all kept"],
)
def test_how_gradients_are_computed_changes_nothing_but_rounding(how):
    drawn, unsplit = sampled(), recipe(micro_batch_tokens=9999)
    small = recipe(**{"micro_batch_tokens": 9999, **how})
    a, _ = take_step(unsplit, drawn, rate=0.1)
    b, _ = take_step(small, drawn, rate=0.1)
    for x, y in zip(jax.tree.leaves(a.params), jax.tree.leaves(b.params), strict=True):
        np.testing.assert_allclose(x, y, atol=1e-6)


@pytest.mark.exhaustive
def test_kl_from_a_reference_is_zero_at_first_and_pulls_back_later():
    held = recipe(kl_beta=0.5)
    assert held.loss == GRPOLoss(beta=0.5)
    _, metrics = take_step(held, sampled(), rate=0.1)
    assert abs(metrics["kl"]) < 1e-6
    moved = init_params(jax.random.key(5), POLICY.config)
    drawn = sampled(held, params=moved)
    state = copied_state(moved, OPTIMIZER)
    _, metrics = take_step(held, drawn, state=state, rate=0.1)
    assert metrics["kl"] > 0.01


def penalised(advantage, rollouts=1, **update):
    """A rollout of a policy that has left its reference, with the penalty in its rewards."""
    settings = {"advantage": advantage, "kl_beta": 0.5, "kl_in": "reward"} | update
    made = recipe(**settings, dynamic_sampling=rollouts)
    moved = jax.tree.map(lambda x: 1.5 * x, POLICY.params)
    rollout = sampled(made, params=moved)
    batch = rollout.batch
    expected = score_batch(POLICY.params, batch, POLICY.config).logps
    ratios = np.where(batch.labels != -100, batch.old_logps - expected, 0)
    assert np.abs(ratios).max() > 0.1
    return made, rollout, ratios


@pytest.mark.parametrize("rollouts", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_the_log_ratio_of_a_completion_is_subtracted_from_its_reward(rollouts):
    """And the loss has no penalty of its own."""
    made, rollout, ratios = penalised("rloo", rollouts, scale="none")
    np.testing.assert_allclose(
        rollout.advantages, rloo(rollout.scores - 0.5 * ratios.sum(axis=1)), rtol=1e-4, atol=1e-5
    )
    np.testing.assert_array_equal(rollout.batch.advantages[:, -1], rollout.advantages)
    assert made.loss == GRPOLoss()


def rloo(rewards):
    groups = rewards.reshape(-1, SAMPLES)
    others = (groups.sum(axis=1, keepdims=True) - groups) / (SAMPLES - 1)
    return (groups - others).reshape(-1)


def test_an_episode_of_several_rows_has_the_penalty_of_all():
    """Each of eight has two rows here."""
    made, rollout, ratios = penalised("rloo", scale="none")
    episodes = rollout._replace(lengths=rollout.lengths[:8], rewards=rollout.scores[:8])
    expected = rloo(episodes.scores - 0.5 * ratios.sum(axis=1).reshape(8, 2).sum(axis=1))
    found = credit(made, episodes)
    np.testing.assert_allclose(found, np.repeat(expected, 2), rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_the_log_ratio_of_a_token_is_subtracted_from_its_reward():
    """Of REINFORCE++, whose advantages are whitened sums of rewards from each token on."""
    _, rollout, ratios = penalised("reinforce_plus_plus")
    kept = np.asarray(rollout.batch.labels != -100)
    earned = -0.5 * ratios
    for row, mask, reward in zip(earned, kept, rollout.scores, strict=True):
        row[np.flatnonzero(mask)[-1]] += reward
    returns = np.cumsum(earned[:, ::-1], axis=1)[:, ::-1]
    expected = (returns - returns[kept].mean()) / returns[kept].std(ddof=1)
    found = np.asarray(rollout.batch.advantages)
    np.testing.assert_allclose(found[kept], expected[kept], rtol=1e-4, atol=1e-4)


def test_equal_rewards_do_not_make_rounding_count():
    """By default: the policy is still its reference, whose log-ratios are rounding alone."""
    update = UpdateConfig(kl_beta=0.5, kl_in="reward")
    config = TrainConfig(model="m", task="x.jsonl", rollout=ROLLOUT, update=update)
    made = make_recipe(config, POLICY, FunctionReward(lambda text, truth: 0.0))
    assert np.abs(sampled(made).advantages).max() < 1e-5


@pytest.mark.parametrize(
    ("options", "argument"),
    [
        ({"advantage": "maxrl"}, "update.kl_in must be loss with update.advantage='maxrl'"),
        ({"advantage": "gdpo"}, "update.kl_in must be loss with update.advantage='gdpo'"),
        ({"credit": "turn"}, "update.kl_in must be loss with update.credit='turn'"),
    ],
)
def test_penalties_that_cannot_be_in_rewards_are_refused(options, argument):
    with pytest.raises(ValueError, match=f"^{argument}"):
        TrainConfig(model="m", update=UpdateConfig(kl_beta=0.1, kl_in="reward", **options))
    assert TrainConfig(update=UpdateConfig(kl_in="reward")).update.advantage == "grpo"


@pytest.mark.slow
def test_only_tokens_of_high_entropy_have_an_advantage():
    """A quarter of all of the step; the others still count where the loss divides."""
    drawn, made = sampled(), recipe(top_entropy=0.25, micro_batch_tokens=70)
    state, metrics = take_step(made, drawn, rate=0.1)
    batch = drawn.batch
    kept = np.asarray(batch.labels != -100)
    entropies = score_batch(POLICY.params, batch, POLICY.config, with_entropy=True).entropies
    highest = np.sort(np.asarray(entropies)[kept])[::-1]
    learned = kept & (np.asarray(entropies) >= highest[(kept.sum() - 1) // 4])
    assert 0 < learned.sum() < kept.sum() / 3
    some = drawn._replace(batch=batch._replace(advantages=jnp.where(learned, batch.advantages, 0)))
    expected, whole = take_step(recipe(), some, rate=0.1)
    for x, y in zip(*map(jax.tree.leaves, (expected.params, state.params)), strict=True):
        np.testing.assert_allclose(y, x, atol=1e-6)
    assert metrics["loss"] == pytest.approx(whole["loss"], abs=1e-6)
    assert metrics["sampling/logp_diff/mean"] < 1e-5


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


def test_lines_hold_one_row_where_the_devices_attention_has_no_segments(monkeypatch):
    """As cuDNN's, which takes 16-bit types alone."""
    single = recipe()
    half = single._replace(config=dataclasses.replace(single.config, dtype="bfloat16"))
    assert takes_segments(single) and takes_segments(half)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(attention, "_capability", lambda mesh: 9.0)
    assert takes_segments(single) and not takes_segments(half)


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
        sampled(recipe(reward), check=Stop(after))
    assert bool(scored) == bool(after)


@pytest.mark.parametrize("tokens", [9999, 70])
def test_scores_do_not_depend_on_the_micro_batches(tokens):
    drawn = sampled()
    batch = drawn.batch
    made = recipe(micro_batch_tokens=tokens)
    in_parts = score(made, POLICY.params, batch, drawn.row_lengths).logps
    at_once = score_batch(POLICY.params, batch, POLICY.config).logps
    assert at_once.any()
    np.testing.assert_allclose(in_parts, at_once, atol=1e-6)


@pytest.mark.parametrize("rollouts", [1, 2])
def test_the_device_scores_by_the_reference_while_the_host_computes_rewards(rollouts):
    """Unless rows are still to be chosen: those that are left out would be scored for nothing."""
    made = recipe(kl_beta=0.5, dynamic_sampling=rollouts)
    seen = []

    class Source:
        def __getattr__(self, name):
            return getattr(made.source, name)

        def score(self, rollout):
            seen.append(rollout.batch.ref_logps is not None)
            return made.source.score(rollout)

    sampled(made._replace(source=Source()))
    assert seen[0] == (rollouts == 1)


def test_gdpo_compares_each_reward_by_itself():
    """Also with a weight, and a reward that does not apply to all completions."""

    def low(trajectories):
        texts = [t["messages"][-1]["content"] for t in trajectories]
        return [None if text < "4" else 4.0 * (text < "8") for text in texts]

    rewards = WeightedReward({"long": long_ones, "low": low}, {"long": 1.0, "low": 0.5})
    drawn = sampled(recipe(rewards, advantage="gdpo"))
    parts = np.stack([drawn.reward_parts["long"], drawn.reward_parts["low"]], axis=1)
    known = ~np.isnan(parts)
    assert not known.all()
    expected = gdpo_advantage(
        np.where(known, parts, 0), SAMPLES, where=known, reward_weights=[1.0, 0.5]
    )
    np.testing.assert_array_equal(drawn.advantages, expected)
    assert not np.allclose(expected, gdpo_advantage(drawn.scores, SAMPLES))


@pytest.mark.parametrize(
    ("advantage", "scale", "weight", "rollouts"),
    [
        ("gdpo", 2.0, 0.5, 1),
        ("gdpo", 1.0, 1.0, 2),  # normalised, they cancel
        ("gdpo", 2.0, 0.0, 1),
        ("grpo", 2.0, 0.5, 2),
    ],
)
def test_dynamic_sampling_looks_at_what_is_compared(advantage, scale, weight, rollouts):
    """Two rewards that add up to 1 with a weight of 1 / scale."""
    short_ones = FunctionReward(lambda text, truth: scale * (len(text) <= 2))
    rewards = {"long": long_ones, "short": short_ones}
    weighted = WeightedReward(rewards, {"long": 1.0, "short": weight})
    few = dataclasses.replace(ROLLOUT, prompts=1)
    made = recipe(weighted, rollout=few, advantage=advantage, dynamic_sampling=2, mini_batches=1)
    chosen, drawn = collect(made, POLICY.params, lambda: PROMPTS, jax.random.key(0))
    assert len(drawn) == rollouts
    assert np.any(chosen.advantages != 0) == (rollouts == 1)


def test_rewards_are_logged_one_by_one():
    both = WeightedReward(
        {"long": long_ones, "half": FunctionReward(lambda text, truth: 0.5)},
        {"long": 1.0, "half": 2.0},
    )
    made = recipe(both)
    drawn = sampled(made)
    np.testing.assert_allclose(drawn.rewards, drawn.reward_parts["long"] + 1.0)
    metrics = rollout_metrics([drawn], made.config, 0.0)
    assert metrics["rewards/half/mean"] == 0.5
    assert metrics["rewards/half/std"] == 0.0
    assert metrics["rewards/long/mean"] == pytest.approx(metrics["reward"] - 1.0)


@pytest.mark.slow
def test_a_rollout_costs_its_longest_row_not_the_longest_possible():
    roomy = recipe(
        rollout=dataclasses.replace(ROLLOUT, max_new_tokens=200, num_samples=2),
        micro_batch_tokens=300,
    )
    drawn = sampled(roomy)
    longest = drawn.row_lengths.max()
    assert drawn.batch.tokens.shape[1] < longest * 4 / 3 + 16 < 200
    kept = np.asarray(drawn.batch.labels) != -100
    np.testing.assert_array_equal(kept.sum(axis=1), drawn.lengths)


def test_a_corrected_step_learns_from_the_trainers_ratios():
    """The sampler's log-probabilities are off by 0.1; a correction takes the trainer's."""
    drawn = sampled()
    off = jnp.where(drawn.batch.labels != -100, drawn.batch.old_logps - 0.1, 0)
    drawn = with_batch(drawn, old_logps=off)
    made = recipe(correction="token_truncate", on_mismatch="warn")
    _, metrics = take_step(made, drawn, rate=1e-7)
    assert metrics["sampling/logp_diff/mean"] == pytest.approx(0.1, abs=1e-4)
    assert metrics["approx_kl"] == pytest.approx(0.0, abs=1e-6)


def test_a_correction_weighs_what_is_learnt():
    """All tokens are half as likely under the trainer: gradients are half as large."""
    drawn = sampled()
    twice = jnp.where(drawn.batch.labels != -100, drawn.batch.old_logps + jnp.log(2.0), 0)
    other = with_batch(drawn, old_logps=twice)
    norms, made = [], recipe(correction="token_truncate", on_mismatch="warn")
    for rollout in (drawn, other):
        _, metrics = take_step(made, rollout, rate=0.0)
        norms.append(metrics["grad_norm"])
    assert norms[1] == pytest.approx(norms[0] / 2, rel=1e-4)


@pytest.mark.slow
def test_updates_replay_the_experts_that_were_chosen_before_the_first():
    """By the trainer, or by the sampler in this process: the same ones."""
    config = config_of("qwen3_moe")
    config = dataclasses.replace(config, vocab_size=POLICY.config.vocab_size)
    policy = POLICY._replace(config=config, params=init_params(jax.random.key(0), config))
    settings = {"mini_batches": 2, "micro_batch_tokens": 140, "on_mismatch": "warn"}

    def made(**update):
        options = TrainConfig(rollout=ROLLOUT, update=UpdateConfig(**(settings | update)))
        return make_recipe(with_setting(options, "optimizer.name", "sgd"), policy, long_ones)

    def trained(update, drawn, rate=3.0):
        state = copied_state(policy.params, OPTIMIZER)
        return take_step(update, drawn, state=state, rate=rate)

    drawn = collect(made(), policy.params, lambda: PROMPTS, jax.random.key(0))[0]
    batch = drawn.batch
    recorded = score_batch(policy.params, batch, config, with_routing=True).routing
    expected, _ = trained(made(), with_batch(drawn, routing=recorded))
    live, _ = trained(made(), drawn)
    replayed, metrics = trained(made(replay_routing="trainer"), drawn)
    assert metrics["sampling/logp_diff/max"] < 1e-4

    def distance(a, b):
        return float(optax.tree.norm(jax.tree.map(jnp.subtract, a.params, b.params)))

    difference, changed = distance(replayed, expected), distance(live, expected)
    assert difference < 1e-4 < 1e-2 < changed
    update = made(replay_routing="sampler")
    drawn = collect(update, policy.params, lambda: PROMPTS, jax.random.key(0))[0]
    is_read = np.asarray(drawn.batch.labels) != -100  # and prompts, whose labels are masked
    is_read |= np.cumsum(is_read, axis=1) == 0
    np.testing.assert_array_equal(
        np.asarray(drawn.batch.routing)[is_read], np.asarray(recorded)[is_read]
    )
    assert distance(trained(update, drawn)[0], expected) < 1e-4


def test_a_mismatch_may_only_warn():
    other = init_params(jax.random.key(99), POLICY.config)
    warned = recipe(on_mismatch="warn")
    state, metrics = take_step(warned, sampled(params=other))
    assert metrics["sampling/logp_diff/mean"] > 0.01
    assert state.step == 2
    assert describe_mismatch(metrics, warned.config).startswith("the sampler's log-probabilities")
    metrics["sampling/logp_diff/mean"] = float("nan")
    assert "must be finite" in describe_mismatch(metrics, warned.config)


@pytest.mark.slow
def test_no_mini_batch_is_learnt_from_if_any_log_probability_is_nan():
    drawn = sampled()
    made = recipe(mini_batches=4)
    first, *_ = deal_rows(len(drawn.batch.tokens), made.config, (0, 0))
    other = next(row for row in range(len(drawn.batch.tokens)) if row not in first)
    logps = drawn.batch.old_logps.at[other, drawn.batch.labels[other] != -100].set(jnp.nan)
    with pytest.raises(SamplerMismatchError, match="must be finite") as caught:
        take_step(made, with_batch(drawn, old_logps=logps), compare_all=True)
    jax.tree.map(np.testing.assert_array_equal, caught.value.state.params, fresh().params)


def test_rows_that_mini_batches_cannot_share_equally_are_refused():
    """Of a last batch that is smaller, say; rows after the last whole prompt were left out."""
    for rows in (SAMPLES, 2 * SAMPLES + 1, 3 * SAMPLES):
        with pytest.raises(ValueError, match=rf"^batch must .* 4 \* 2, got {rows} rows"):
            list(deal_rows(rows, recipe().config, (0,)))


def test_one_token_far_off_does_not_end_a_run():
    """As in bfloat16, where single tokens may differ by a nat and the mean by hundredths."""
    drawn = sampled()
    made = recipe(max_logp_diff=0.2)
    first, *_ = deal_rows(len(drawn.batch.tokens), made.config, (0, 0))  # which are compared
    one = drawn.batch.old_logps.at[first[1], int(drawn.row_lengths[first[1]]) - 1].add(-1.0)
    drawn = with_batch(drawn, old_logps=one)
    _, metrics = take_step(made, drawn, rate=1e-7)
    assert metrics["sampling/logp_diff/max"] == pytest.approx(1.0, abs=1e-3)


class Source:
    """Adds rewards of any names to what an environment gave at the end, if there is one."""

    def score(self, rollout):
        episodes = rollout.episodes
        episodes = episodes and [dataclasses.replace(e, final_reward=3.0) for e in episodes]
        parts = {name: np.float32([i, 1]) for i, name in enumerate(["final", "sum", "part x", ""])}
        return rollout._replace(rewards=np.float32([7, 8]), reward_parts=parts, episodes=episodes)


@pytest.mark.parametrize("episodes", [None, [Episode([])] * 2], ids=["one turn", "many turns"])
def test_rewards_may_have_any_name(episodes):
    """One called `final` was taken for what episodes got at their end."""
    ones = np.ones(2, np.int32)
    drawn = Rollout(None, [{}] * 2, [None] * 2, ones, ones, ones == 0, episodes=episodes)
    scored = score_rollout(Source(), drawn, lambda: None)
    assert {name: part[0] for name, part in scored.reward_parts.items()} == {
        "final": 0,
        "sum": 1,
        "part x": 2,
        "": 3,
    }
    assert scored.rewards.tolist() == [7, 8]
    assert all(episode.final_reward == 3 for episode in scored.episodes or ())
