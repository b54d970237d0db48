"""GAE and discounted returns: types, the transformations of JAX, and what they refuse."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.advantage.per_token import reference
from tests.advantage.per_token.token_rewards import INF, KEEP, LAST, NAN, REWARDS, VALUES
from twinkle_jax.advantage import (
    GAEAdvantage,
    ReinforcePlusPlusAdvantage,
    discounted_returns,
    gae_advantage,
    reinforce_plus_plus_advantage,
)


def test_types():
    as_half = [jnp.asarray(x).astype(jnp.bfloat16) for x in (REWARDS, VALUES)]
    result = gae_advantage(*as_half, where=KEEP)
    assert result.advantages.dtype == result.returns.dtype == jnp.float32
    wide = [x.astype(jnp.float32) for x in as_half]
    np.testing.assert_array_equal(result.advantages, gae_advantage(*wide, where=KEEP).advantages)
    integers = discounted_returns([[1, 2], [3, 4]])
    assert integers.dtype == jnp.float32 and integers.tolist() == [[3, 2], [7, 4]]


@pytest.mark.parametrize(
    "place", [np.asarray, pytest.param(jnp.asarray, marks=pytest.mark.exhaustive)]
)
@pytest.mark.parametrize("wide", range(3))
def test_one_wide_array_makes_all_wide(wide, place):
    # Also gamma and lambda: 0.9 and 0.95 of float32 would be wrong in the eighth digit.
    given = [REWARDS, VALUES, LAST]
    advantages, returns = reference.gae(*given[:2], KEEP, 0.9, 0.95, LAST)
    given[wide] = given[wide].astype(np.float64)
    with jax.enable_x64(True):
        rewards, values, last = (place(x) for x in given)
        settings = {"where": KEEP, "gamma": 0.9, "bootstrap_values": last}
        result = gae_advantage(rewards, values, **settings)
        assert result.advantages.dtype == result.returns.dtype == jnp.float64
        whitened = reference.whiten(advantages, KEEP, 0, 1e-8)
        np.testing.assert_allclose(result.advantages, whitened, rtol=1e-12, atol=1e-13)
        np.testing.assert_allclose(result.returns, returns, rtol=1e-12, atol=1e-13)
        if wide != 1:  # the ones without a critic
            result = discounted_returns(rewards, **settings)
            assert result.dtype == jnp.float64
            expected = reference.returns(REWARDS, KEEP, 0.9, LAST)
            np.testing.assert_allclose(result, expected, rtol=1e-12, atol=1e-13)


def test_the_scan_over_time_is_no_loop():
    tokens = jax.ShapeDtypeStruct((4, 64), jnp.float32)
    mask = jax.ShapeDtypeStruct((4, 64), jnp.bool_)
    program = jax.jit(lambda r, v, m: gae_advantage(r, v, where=m)).lower(tokens, tokens, mask)
    assert "while(" not in program.compile().as_text()


def test_lists():
    lists = gae_advantage(REWARDS.tolist(), VALUES.tolist(), where=KEEP.tolist())
    for one, other in zip(lists, gae_advantage(REWARDS, VALUES, where=KEEP), strict=True):
        np.testing.assert_array_equal(one, other)


def test_tensors():
    torch = pytest.importorskip("torch", reason="pip install 'twinkle-jax[test,oracle]'")
    rewards, values = torch.tensor(REWARDS, requires_grad=True), torch.tensor(VALUES)
    tensors = GAEAdvantage()(rewards, values, masks=torch.tensor(KEEP))
    for one, other in zip(tensors, gae_advantage(REWARDS, VALUES, where=KEEP), strict=True):
        np.testing.assert_array_equal(one, other)


def test_no_gradient_flows():
    def loss(rewards, values, last, gamma, trace_decay):
        settings = {"where": KEEP, "gamma": gamma, "bootstrap_values": last}
        result = gae_advantage(rewards, values, gae_lambda=trace_decay, **settings)
        returns = discounted_returns(rewards, **settings)
        whitened = reinforce_plus_plus_advantage(rewards, where=KEEP, gamma=gamma)
        return sum(jnp.sum(jnp.square(x)) for x in (*result, returns, whitened))

    dirty = jnp.where(KEEP, REWARDS, np.float32(NAN))
    arguments = dirty, jnp.asarray(VALUES), jnp.asarray(LAST), jnp.float32(0.9), jnp.float32(0.8)
    for gradient in jax.grad(loss, argnums=range(5))(*arguments):
        assert not np.asarray(gradient).any()


def test_other_values_compile_nothing():
    traces = 0

    @jax.jit
    def run(rewards, values, keep, gamma, trace_decay):
        nonlocal traces
        traces += 1
        return gae_advantage(rewards, values, where=keep, gamma=gamma, gae_lambda=trace_decay)

    for gamma, trace_decay in ((0.9, 0.95), (1.0, 0.5)):
        result = run(REWARDS, VALUES, KEEP, gamma, trace_decay)
        alone = gae_advantage(REWARDS, VALUES, where=KEEP, gamma=gamma, gae_lambda=trace_decay)
        np.testing.assert_allclose(result.advantages, alone.advantages, rtol=1e-5, atol=1e-5)
    assert traces == 1


def test_more_axes_and_vmap():
    keep = np.stack([KEEP, ~KEEP])
    pair = [np.stack([x, -x]) for x in (REWARDS, VALUES)]
    whole = gae_advantage(*pair, where=keep, normalize=False)
    mapped = jax.vmap(lambda r, v, k: gae_advantage(r, v, where=k, normalize=False))(*pair, keep)
    for row in range(2):
        alone = gae_advantage(pair[0][row], pair[1][row], where=keep[row], normalize=False)
        for result in (whole, mapped):
            np.testing.assert_allclose(
                result.advantages[row], alone.advantages, rtol=1e-5, atol=1e-6
            )
            np.testing.assert_allclose(result.returns[row], alone.returns, rtol=1e-5, atol=1e-6)
    normalised = gae_advantage(*pair, where=keep)
    named = jax.vmap(
        lambda r, v, k: gae_advantage(r, v, where=k, axis_name="batch"), axis_name="batch"
    )(*pair, keep)
    np.testing.assert_allclose(named.advantages, normalised.advantages, rtol=1e-5, atol=1e-6)


def _errors():
    good = (np.zeros((2, 3), np.float32),) * 2
    mask = np.ones((2, 3), bool)
    return {
        "values must have the shape of rewards, (2, 3), got (2, 4)": lambda: gae_advantage(
            good[0], np.zeros((2, 4))
        ),
        "where must have the shape of rewards, (2, 3), got (2,)": lambda: gae_advantage(
            *good, where=[True, True]
        ),
        "masks must have the shape of rewards, (2, 3), got (2, 1)": lambda: GAEAdvantage()(
            *good, masks=mask[:, :1]
        ),
        "bootstrap_values must have shape (2,), one for each row of rewards": lambda: gae_advantage(
            *good, bootstrap_values=np.zeros((2, 1))
        ),
        "rewards must be [..., time] with at least one step, got shape ()": lambda: gae_advantage(
            1.0, 1.0
        ),
        "rewards must be [..., time] with at least one step, got shape (2, 0)": lambda: (
            discounted_returns(np.zeros((2, 0)))
        ),
        "gamma must be a scalar, got shape (2,)": lambda: discounted_returns(
            good[0], gamma=np.ones(2)
        ),
        "rewards must be finite": lambda: gae_advantage([[1.0, NAN]], [[0.0, 0.0]]),
        "got nan at index (0, 1)": lambda: gae_advantage([[1.0, 0.0]], [[0.0, NAN]]),
        "bootstrap_values must be finite": lambda: discounted_returns(
            [[1.0]], bootstrap_values=[INF]
        ),
    }


@pytest.mark.parametrize("message", _errors())
def test_shapes_and_values_that_do_not_fit(message):
    with pytest.raises(ValueError, match=re.escape(message)):
        _errors()[message]()


@pytest.mark.parametrize(
    ("message", "call"),
    [
        ("where must be boolean (True = keep)", lambda r: gae_advantage(r, r, where=r)),
        ("masks != 0", lambda r: GAEAdvantage()(r, r, masks=r)),
        ("masks must be boolean", lambda r: ReinforcePlusPlusAdvantage()(r, masks=r)),
        ("normalize must be True or False", lambda r: gae_advantage(r, r, normalize="no")),
        ("gae_lambda must be a number", lambda r: gae_advantage(r, r, gae_lambda="0.9")),
        ("epsilon must be a real number", lambda r: gae_advantage(r, r, epsilon=jnp.int32(1))),
        ("rewards must be real", lambda r: discounted_returns(jax.lax.complex(r, r))),
    ],
)
def test_wrong_types_raise_while_tracing(message, call):
    with pytest.raises(TypeError, match=re.escape(message)):
        jax.eval_shape(call, jax.ShapeDtypeStruct((2, 3), jnp.float32))


def test_wrappers_are_values():
    assert GAEAdvantage(0.9) == GAEAdvantage(gamma=0.9) != GAEAdvantage()
    assert repr(GAEAdvantage()) == "GAEAdvantage(gamma=1.0, gae_lambda=0.95, normalize=True)"
    assert hash(ReinforcePlusPlusAdvantage()) == hash(ReinforcePlusPlusAdvantage(1.0))
    with pytest.raises(TypeError):
        GAEAdvantage()(REWARDS, VALUES, mask=KEEP)
