"""Dynamic sampling: which prompts have a signal, and rollouts until enough of them have one."""

import jax
import numpy as np
import pytest

from tests.rollout.small_rollout import ENGINE, POLICY, PROMPTS, SAMPLES, SETTINGS
from twinkle_jax.advantage import group_statistics
from twinkle_jax.reward import FunctionReward
from twinkle_jax.rollout import SingleTurn, draw_until_signal, has_signal

SOURCE = SingleTurn(ENGINE, FunctionReward(lambda text, truth: float(len(text) > 2)), SETTINGS)


def sampled(key=0):
    return SOURCE.score(SOURCE.sample(POLICY.params, PROMPTS, jax.random.key(key)))


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
        rewards=np.asarray(groups, np.float32).reshape(-1), truncated=truncated
    )
    where = ~truncated if masked else None
    expected = group_statistics(drawn.rewards, SAMPLES, where=where).has_signal
    signal = has_signal(drawn, SAMPLES, mask_truncated=masked)
    assert signal.tolist() == expected.tolist()
    assert signal.any() and not signal.all()


def test_dynamic_sampling_takes_prompts_whose_rewards_differ_from_further_rollouts():
    first, second = sampled(key=0), sampled(key=1)
    flat = np.repeat(first.rewards[::SAMPLES], SAMPLES)
    rewards = np.where(np.arange(16) < 8, flat, np.tile([0.0, 1.0], 8)).astype(np.float32)
    half = first._replace(rewards=rewards)  # two of four prompts have a signal
    full = second._replace(rewards=np.tile([0.0, 1.0], 8).astype(np.float32))
    assert has_signal(half, SAMPLES).tolist() == [False, False, True, True]
    options = {"prompts": 4, "num_samples": SAMPLES}
    chosen, drawn = draw_until_signal(
        lambda number: [half, full, full][number], rollouts=3, **options
    )
    assert len(drawn) == 2
    assert has_signal(chosen, SAMPLES).all()
    np.testing.assert_array_equal(chosen.lengths[:8], first.lengths[8:])
    np.testing.assert_array_equal(chosen.lengths[8:], second.lengths[:8])
    assert chosen.trajectories == first.trajectories[8:] + second.trajectories[:8]
    for rows, batch in ((chosen.batch.labels[:8], first.batch.labels[8:]),
                        (chosen.batch.labels[8:], second.batch.labels[:8])):  # fmt: skip
        np.testing.assert_array_equal(rows[:, : batch.shape[1]], batch)
        assert (rows[:, batch.shape[1] :] == -100).all()
    assert draw_until_signal(lambda number: half, rollouts=1, **options)[0] is half
