"""Between completions and tokens: advantages per token, and the divergence in the reward."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.advantage.cases import INF, NAN
from twinkle_jax.advantage import broadcast_to_tokens, kl_in_reward, kl_in_token_reward

MASK = np.asarray([[1, 1, 0, 1], [0, 0, 0, 0], [0, 1, 1, 0]], bool)
KL = np.asarray([[0.5, 1.0, 9.0, -2.0], [1.0, 1.0, 1.0, 1.0], [7.0, 0.25, 0.5, 7.0]], np.float32)
REWARDS = np.asarray([1.0, 2.0, 3.0], np.float32)


def test_broadcast_to_tokens():
    result = broadcast_to_tokens(REWARDS, MASK)
    assert result.tolist() == [[1, 1, 0, 1], [0, 0, 0, 0], [0, 3, 3, 0]]
    assert broadcast_to_tokens(2.0, MASK[0]).tolist() == [2, 2, 0, 2]
    assert broadcast_to_tokens([[1], [2]], MASK[:2, None]).shape == (2, 1, 4)
    assert broadcast_to_tokens(jnp.ones(3, jnp.bfloat16), MASK).dtype == jnp.float32
    poisoned = np.asarray(broadcast_to_tokens(jnp.asarray([1.0, NAN, NAN]), MASK))
    assert np.isnan(poisoned).tolist() == [[False] * 4, [False] * 4, [False, True, True, False]]
    gradient = jax.grad(lambda a: jnp.sum(broadcast_to_tokens(a, MASK)))(jnp.asarray(REWARDS))
    assert gradient.tolist() == [0, 0, 0]
    with pytest.raises(ValueError, match=r"^advantages"):
        jax.eval_shape(lambda a: broadcast_to_tokens(a, MASK), jnp.zeros(4))
    with pytest.raises(TypeError, match=r"^mask"):
        broadcast_to_tokens(REWARDS, MASK.astype(int))
    with pytest.raises(TypeError, match=r"^mask"):
        broadcast_to_tokens(REWARDS, None)
    with pytest.raises(ValueError, match=r"^advantages"):
        broadcast_to_tokens([1.0, NAN, 2.0], MASK)
    with pytest.raises(ValueError, match=r"^mask"):
        broadcast_to_tokens(1.0, True)


def test_kl_per_completion():
    # 1 - (0.5 + 1 - 2) / 2; no tokens; 3 - (0.25 + 0.5) / 2
    assert kl_in_reward(REWARDS, KL, MASK, coefficient=0.5).tolist() == [1.25, 2, 2.625]
    assert kl_in_reward(REWARDS, KL, MASK, coefficient=0.0).tolist() == [1, 2, 3]
    assert kl_in_reward(1.0, KL[0], MASK[0], coefficient=jnp.float32(0.5)).tolist() == 1.25


def test_kl_per_token():
    result = kl_in_token_reward(REWARDS, KL, MASK, coefficient=0.5)
    assert result.tolist() == [[-0.25, -0.5, 0, 1 + 1], [0] * 4, [0, -0.125, 3 - 0.25, 0]]
    alone = kl_in_token_reward(REWARDS, KL, MASK, coefficient=0)
    assert alone.tolist() == [[0, 0, 0, 1], [0] * 4, [0, 0, 3, 0]]
    total = kl_in_reward(REWARDS, KL, MASK, coefficient=0.5)
    np.testing.assert_allclose(result.sum(axis=1)[::2], total[::2], rtol=1e-6)


@pytest.mark.parametrize("function", [kl_in_reward, kl_in_token_reward])
def test_kl_masks_gradients_and_errors(function):
    expected = function(REWARDS, KL, MASK, coefficient=0.5)
    for garbage in (NAN, INF, 1e30):
        dirty = np.where(MASK, KL, np.float32(garbage))
        for kl in (dirty, jnp.asarray(dirty)):
            result = function(REWARDS, kl, MASK, coefficient=0.5)
            np.testing.assert_array_equal(result, expected)

    def loss(rewards, kl, coefficient):
        return jnp.sum(jnp.square(function(rewards, kl, MASK, coefficient=coefficient)))

    dirty = jnp.where(MASK, KL, np.float32(NAN))
    for gradient in jax.grad(loss, argnums=(0, 1, 2))(jnp.asarray(REWARDS), dirty, jnp.float32(1)):
        assert not np.asarray(gradient).any()
    narrow = function(jnp.asarray(REWARDS, jnp.bfloat16), KL, MASK, coefficient=0.5)
    assert narrow.dtype == jnp.float32
    with jax.enable_x64(True):
        wide_rewards, wide_kl = REWARDS.astype(np.float64), KL.astype(np.float64)
        exact = function(wide_rewards, wide_kl, MASK, coefficient=0.1)
        for pair in ((wide_rewards, KL), (REWARDS, wide_kl)):
            for place in (np.asarray, jnp.asarray):
                result = function(*(place(x) for x in pair), MASK, coefficient=0.1)
                assert result.dtype == jnp.float64
                np.testing.assert_allclose(result, exact, rtol=1e-14)
    with pytest.raises(ValueError, match=r"^mask"):
        function(REWARDS, KL, MASK[:, :3], coefficient=0.5)
    with pytest.raises(ValueError, match=r"^rewards"):
        jax.eval_shape(lambda r: function(r, KL, MASK, coefficient=0.5), jnp.zeros((3, 4)))
    with pytest.raises(ValueError, match=r"^kl"):
        function(REWARDS, np.full((3, 4), NAN), MASK, coefficient=0.5)
    with pytest.raises(ValueError, match=r"^rewards"):
        function([1.0, INF, 2.0], KL, MASK, coefficient=0.5)
    with pytest.raises(TypeError, match=r"^coefficient"):
        function(REWARDS, KL, MASK, coefficient="0.1")
