"""Settings of rollouts; dynamic sampling: rollouts until enough prompts have a signal."""

from functools import partial

import jax
import numpy as np
import pytest

from tests.rollout import games
from tests.rollout.small_rollout import ENGINE, POLICY, PROMPTS, SAMPLES, SETTINGS
from twinkle_jax.advantage import group_statistics
from twinkle_jax.data import PromptBatch
from twinkle_jax.reward import FunctionReward
from twinkle_jax.rollout import (
    LocalEngine,
    MultiTurn,
    RolloutConfig,
    SingleTurn,
    draw_until_signal,
    has_signal,
)
from twinkle_jax.sampler import Sampling

SOURCE = SingleTurn(ENGINE, FunctionReward(lambda text, truth: float(len(text) > 2)), SETTINGS)


def sampled(key=0):
    return SOURCE.score(SOURCE.sample(POLICY.params, PROMPTS, jax.random.key(key)))


def test_auto_values_follow_from_the_others():
    settings = RolloutConfig().resolved()
    assert (settings.max_new_tokens, settings.max_episode_tokens) == (512, 1024 + 6 * 512)
    assert RolloutConfig().resolved(max_new_tokens=8).max_episode_tokens == 1024 + 6 * 8
    short = RolloutConfig(max_prompt_tokens=10, max_turns=3, max_new_tokens=5).resolved(8)
    assert (short.max_new_tokens, short.max_episode_tokens) == (5, 10 + 3 * 5)
    assert RolloutConfig(max_episode_tokens=99).resolved().max_episode_tokens == 99
    assert short.resolved() == short


def test_every_filter_is_a_setting():
    settings = RolloutConfig(temperature=0.5, top_k=3, top_p=0.9, min_p=0.1, repetition_penalty=1.2)
    assert settings.sampling([7]) == Sampling(0.5, 3, 0.9, 0.1, 1.2, stop_tokens=[7])


@pytest.mark.parametrize(
    ("name", "value", "error"),
    [
        ("history", "none", ValueError),
        ("temperature", -1.0, ValueError),
        ("temperature", "1", TypeError),
        ("num_samples", 0, ValueError),
        ("max_new_tokens", "8", TypeError),
        ("slots", 0, ValueError),
        ("top_p", 0.0, ValueError),
        ("max_failed", 2.0, ValueError),
    ],
)
def test_sources_refuse_settings_by_name(name, value, error):
    settings = RolloutConfig(**{name: value})
    for make in (partial(MultiTurn, ENGINE, games.Guess), partial(SingleTurn, ENGINE, len)):
        with pytest.raises(error, match=rf"^{name} must"):
            make(settings)
        with pytest.raises(error, match=rf"^{name} must"):
            make(RolloutConfig()).with_settings(**{name: value})


def test_no_prompts_are_refused():
    with pytest.raises(ValueError, match=r"^prompts must not be empty"):
        SOURCE.sample(POLICY.params, PromptBatch([]), jax.random.key(0))


def test_an_episode_may_take_a_row_a_turn():
    assert RolloutConfig(max_turns=4).rows_each == 1
    assert RolloutConfig(max_turns=4, history="template").rows_each == 4


def test_sources_resolve_their_settings_and_change_them_in_a_copy():
    engine = LocalEngine(None, None)
    for source in (MultiTurn(engine, games.Guess), SingleTurn(engine, None)):
        assert source.settings == RolloutConfig().resolved()
        greedy = source.with_settings(temperature=0.0, num_samples=1)
        assert (greedy.settings.temperature, greedy.settings.num_samples) == (0.0, 1)
        assert source.settings.temperature == 1.0


@pytest.mark.parametrize("masked", [False, True])
def test_a_signal_is_computed_on_the_host_by_the_rule_of_group_statistics(masked):
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
        rewards=np.asarray(groups, np.float32).reshape(-1),
        counted=~truncated if masked else None,
    )
    expected = group_statistics(drawn.rewards, SAMPLES, where=drawn.counted).has_signal
    signal = has_signal(drawn, SAMPLES)
    assert signal.tolist() == expected.tolist()
    with pytest.raises(ValueError, match="num_samples must divide the 32 trajectories, got 3"):
        has_signal(drawn, 3)
    assert signal.any() and not signal.all()


def test_dynamic_sampling_takes_prompts_whose_rewards_differ_from_further_rollouts():
    first, second = sampled(key=0), sampled(key=1)
    flat = np.repeat(first.rewards[::SAMPLES], SAMPLES)
    rewards = np.where(np.arange(16) < 8, flat, np.tile([0.0, 1.0], 8)).astype(np.float32)
    counted = np.arange(16) % SAMPLES > 0
    half = first._replace(rewards=rewards, counted=counted)  # two of four prompts have a signal
    rewards = np.tile([0.0, 1.0], 8).astype(np.float32)
    full = second._replace(rewards=rewards, counted=counted)
    assert has_signal(half, SAMPLES).tolist() == [False, False, True, True]
    options = {"prompts": 4, "num_samples": SAMPLES}
    chosen, drawn = draw_until_signal(
        lambda number: [half, full, full][number], rollouts=3, **options
    )
    assert len(drawn) == 2
    assert has_signal(chosen, SAMPLES).all()
    np.testing.assert_array_equal(chosen.counted, counted)
    np.testing.assert_array_equal(chosen.lengths[:8], first.lengths[8:])
    np.testing.assert_array_equal(chosen.lengths[8:], second.lengths[:8])
    assert chosen.trajectories == first.trajectories[8:] + second.trajectories[:8]
    for rows, batch in ((chosen.batch.labels[:8], first.batch.labels[8:]),
                        (chosen.batch.labels[8:], second.batch.labels[:8])):  # fmt: skip
        np.testing.assert_array_equal(rows[:, : batch.shape[1]], batch)
        assert (rows[:, batch.shape[1] :] == -100).all()
    assert draw_until_signal(lambda number: half, rollouts=1, **options)[0] is half
