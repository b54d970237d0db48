"""Estimators over time: Twinkle's numbers, the loop, masks, no signal, laws, types and errors."""

import json
import pathlib

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.advantage import reference
from tests.advantage.cases import INF, NAN
from tests.model.families import each
from twinkle_jax.advantage import (
    GAE,
    GAEAdvantage,
    ReinforcePlusPlusAdvantage,
    discounted_returns,
    gae_advantage,
    reinforce_plus_plus_advantage,
)

GOLDEN = json.loads((pathlib.Path(__file__).parents[1] / "golden/advantage_cases.json").read_text())
ROWS, TIME = 5, 12
RNG = np.random.default_rng(0)
REWARDS, VALUES = RNG.normal(size=(2, ROWS, TIME)).astype(np.float32)
LAST = RNG.normal(size=ROWS).astype(np.float32)
KEEP = RNG.uniform(size=(ROWS, TIME)) < 0.7
KEEP[1], KEEP[2], KEEP[3, -5:] = False, True, False
EVERY = np.ones_like(KEEP)


def _padded(array, fill):
    """Bring a golden case to the shape of the rest of this file: padding is masked."""
    out = np.full((ROWS, TIME), fill, np.asarray(array).dtype)
    out[: len(array), : len(array[0])] = array
    return out


@pytest.mark.parametrize("case", GOLDEN["gae"], ids=lambda c: f"{len(c['rewards'][0])} steps")
def test_golden_numbers_of_twinkle(case):
    settings = {name: case[name] for name in ("gamma", "gae_lambda", "normalize")}
    overridden = settings | {"normalize": not case["normalize"]}
    arguments = _padded(case["rewards"], NAN), _padded(case["values"], INF)
    mask = _padded(case["mask"], False)
    for result in (
        GAEAdvantage(**settings)(*map(jnp.asarray, arguments), masks=mask),
        GAEAdvantage(**overridden)(*arguments, masks=mask, normalize=case["normalize"]),
        gae_advantage(*arguments, where=mask, **settings),
    ):
        for part, name in zip(result, ("advantages", "returns"), strict=True):
            np.testing.assert_allclose(part, _padded(case[name], 0.0), **GOLDEN["tolerance"])


def test_golden_numbers_as_lists():
    case = GOLDEN["gae"][1]
    estimator = GAEAdvantage(case["gamma"], case["gae_lambda"])
    advantages, returns = estimator(case["rewards"], case["values"], masks=case["mask"])
    np.testing.assert_allclose(advantages, case["advantages"], **GOLDEN["tolerance"])
    np.testing.assert_allclose(returns, case["returns"], **GOLDEN["tolerance"])


def test_by_hand():
    # gamma 1/2, lambda 1/2; errors 1 + 2 - 2 = 1, 0 + 0 - 4 = -4; 1 - 4 / 4 = 0
    result = gae_advantage([[1.0, 0.0]], [[2.0, 4.0]], gamma=0.5, gae_lambda=0.5, normalize=False)
    assert isinstance(result, GAE)
    assert result.advantages.tolist() == [[0, -4]]
    assert result.returns.tolist() == [[2, 0]]
    # what follows the last step is worth 8: errors 1, 0 + 4 - 4 = 0
    result = gae_advantage(
        [[1.0, 0.0]], [[2.0, 4.0]], gamma=0.5, gae_lambda=0.5, normalize=False, bootstrap_values=[8]
    )
    assert result.advantages.tolist() == [[1, 0]]
    # over one axis; the middle is skipped: errors 1 + 4/2 - 2 = 1, -4
    result = gae_advantage(
        [1.0, NAN, 0.0],
        [2.0, INF, 4.0],
        where=[True, False, True],
        gamma=0.5,
        gae_lambda=0.5,
        normalize=False,
    )
    assert result.advantages.tolist() == [0, 0, -4]
    assert result.returns.tolist() == [2, 0, 0]
    # advantages -1, -3 (mean -2, population standard deviation 1)
    result = gae_advantage([[0.0, 0.0]], [[1.0, 3.0]], gae_lambda=0.0, gamma=0.0)
    np.testing.assert_allclose(result.advantages, [[1, -1]], rtol=1e-6)
    assert result.returns.tolist() == [[0, 0]]


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("last", [None, LAST])
def test_against_the_loop(masked, last):
    keep = KEEP if masked else EVERY
    where = KEEP if masked else None
    for gamma, trace_decay in ((1.0, 0.95), (0.9, 0.8), (0.99, 1.0), (1.0, 0.0), (0.0, 0.5)):
        settings = {"gamma": gamma, "gae_lambda": trace_decay, "bootstrap_values": last}
        expected, targets = reference.gae(REWARDS, VALUES, keep, gamma, trace_decay, last)
        for normalize in (False, True):
            result = gae_advantage(REWARDS, VALUES, where=where, normalize=normalize, **settings)
            np.testing.assert_allclose(result.returns, targets, rtol=1e-5, atol=2e-5)
            whitened = reference.whiten(expected, keep, 0) if normalize else expected
            np.testing.assert_allclose(result.advantages, whitened, rtol=1e-5, atol=2e-5)
        returns = discounted_returns(REWARDS, where=where, gamma=gamma, bootstrap_values=last)
        np.testing.assert_allclose(
            returns, reference.returns(REWARDS, keep, gamma, last), rtol=1e-5, atol=2e-5
        )


def test_reinforce_plus_plus():
    # returns 3 1 and 1: mean 5/3, squares 16/9 4/9 4/9, over 2: 4/3
    result = reinforce_plus_plus_advantage(
        [[2.0, 1.0], [1.0, NAN]], where=[[True, True], [True, False]]
    )
    expected = np.array([[4, -2], [-2, 0]]) / 3 / (4 / 3) ** 0.5
    np.testing.assert_allclose(result, expected, rtol=1e-6)
    for gamma in (1.0, 0.9):
        for where, keep in ((None, EVERY), (KEEP, KEEP)):
            returns = reference.returns(REWARDS, keep, gamma)
            expected = reference.whiten(returns, keep, 1)
            result = reinforce_plus_plus_advantage(REWARDS, where=where, gamma=gamma)
            np.testing.assert_allclose(result, expected, rtol=1e-5, atol=1e-5)
            wrapped = ReinforcePlusPlusAdvantage(gamma)(REWARDS, masks=where)
            np.testing.assert_array_equal(wrapped, result)
    halved = reinforce_plus_plus_advantage([[2.0, 1.0]], epsilon=2**0.5)  # returns 3 1
    np.testing.assert_allclose(halved, [[0.5**0.5 / 2, -(0.5**0.5) / 2]], rtol=1e-6)


def test_garbage_under_the_mask_changes_no_bit():
    clean = [np.where(KEEP, x, 0) for x in (REWARDS, VALUES)]
    expected = jax.tree.leaves(gae_advantage(*clean, where=KEEP))
    expected += [discounted_returns(clean[0], where=KEEP, gamma=0.9)]
    expected += [reinforce_plus_plus_advantage(clean[0], where=KEEP)]
    for garbage in (NAN, INF, -INF, 1e30):
        dirty = [np.where(KEEP, x, np.float32(garbage)) for x in (REWARDS, VALUES)]
        for rewards, values in (dirty, map(jnp.asarray, dirty)):
            result = jax.tree.leaves(gae_advantage(rewards, values, where=KEEP))
            result += [discounted_returns(rewards, where=KEEP, gamma=0.9)]
            result += [reinforce_plus_plus_advantage(rewards, where=KEEP)]
            for one, other in zip(result, expected, strict=True):
                np.testing.assert_array_equal(one, other)
                assert not np.asarray(one)[~KEEP].any()


def test_nothing_left_is_zero_never_nan():
    nothing, garbage = np.zeros_like(KEEP), jnp.full(KEEP.shape, NAN)
    results = jax.tree.leaves(gae_advantage(garbage, garbage, where=nothing))
    results += [discounted_returns(garbage, where=nothing, bootstrap_values=LAST)]
    results += [reinforce_plus_plus_advantage(garbage, where=nothing)]
    for result in results:
        assert not np.asarray(result).any()


def test_unmasked_garbage_reaches_what_came_before_and_never_becomes_zero():
    rewards = REWARDS.copy()
    rewards[0, 6] = NAN
    rewards = jnp.asarray(rewards)
    for result in (
        np.asarray(discounted_returns(rewards, gamma=0.9)),
        np.asarray(gae_advantage(rewards, VALUES, gamma=0.9, normalize=False).advantages),
    ):
        assert np.isnan(result[0, :7]).all()
        assert np.isfinite(result[0, 7:]).all()
        assert np.isfinite(result[1:]).all()
    assert np.isnan(gae_advantage(rewards, VALUES).advantages).all()
    assert np.isnan(reinforce_plus_plus_advantage(rewards)).all()
    unknown = gae_advantage(REWARDS, VALUES, gamma=jnp.float32(NAN))
    assert np.isnan(np.asarray(unknown.returns)[:, :-1]).all()


@pytest.mark.parametrize("value", [0.0, 0.1, 0.7, 1e6 + 0.5])
def test_equal_advantages_normalise_to_zero(value):
    rewards = np.full((3, 4), value, np.float32)
    zeros = np.zeros_like(rewards)
    result = gae_advantage(rewards, zeros, gamma=0.0)
    assert result.advantages.tolist() == zeros.tolist()
    assert result.returns.tolist() == rewards.tolist()
    assert reinforce_plus_plus_advantage(rewards, gamma=0.0).tolist() == zeros.tolist()
    # a critic that is right everywhere, up to rounding: nothing is learnt from it
    ahead = np.cumsum(rewards, axis=1)[:, ::-1]
    assert not np.asarray(gae_advantage(rewards, ahead, epsilon=0.0).advantages).any()
    constant = gae_advantage(zeros, rewards, bootstrap_values=rewards[:, 0], epsilon=0.0)
    assert constant.advantages.tolist() == zeros.tolist()
    single = gae_advantage([[3.0, 5.0]], [[1.0, 2.0]], where=[[False, True]])
    assert single.advantages.tolist() == [[0, 0]]


@pytest.mark.parametrize("where", [None, KEEP])
def test_the_rounding_of_large_values_is_no_signal(where):
    # rewards are 5.1 more than the values, up to the rounding of numbers near 1000
    values = np.float32(1000) + 20 * np.abs(VALUES)
    rewards = values + np.float32(5.1)
    noisy = gae_advantage(rewards, values, where=where, gamma=0.0, normalize=False)
    assert len(np.unique(np.asarray(noisy.advantages)[KEEP])) > 1
    result = gae_advantage(rewards, values, where=where, gamma=0.0, epsilon=0.0)
    assert not np.asarray(result.advantages).any()
    # a critic that predicts exactly what comes
    right = discounted_returns(REWARDS, where=where, gamma=0.9)
    result = gae_advantage(REWARDS, right, where=where, gamma=0.9, epsilon=0.0)
    assert not np.asarray(result.advantages).any()


@pytest.mark.parametrize("sign", [1, -1])
def test_a_small_signal_beside_large_values_is_kept(sign):
    # 8 units in the last place of 1024 are 2**-10; an advantage of 2**-8 is real
    values = np.full((4, 16), 1024, np.float32)
    rewards = np.zeros((4, 16), np.float32)
    rewards[0, 1] = sign * 2**-8
    settings = {"bootstrap_values": values[:, 0], "gae_lambda": 0.0}
    result = gae_advantage(rewards, values, **settings)
    expected = reference.whiten(rewards, np.ones((4, 16), bool), 0)
    np.testing.assert_allclose(result.advantages, expected, rtol=1e-4)
    # what counts is how far they are from the mean: here 6 units on either side, there 9
    for units, signal in ((6, False), (9, True)):
        rewards = np.tile(np.float32([1, -1]) * units * 2.0**-13, (4, 8)).astype(np.float32)
        result = gae_advantage(rewards, values, **settings)
        assert np.asarray(result.advantages).any() == signal


def test_rounding_is_told_by_the_values_too():
    # returns of 6 units in the last place of 1024 about 0, less values of 1024
    values = np.full((4, 16), 1024, np.float32)
    settings = {"bootstrap_values": values[:, 0], "gae_lambda": 0.0}
    rewards = np.tile(np.float32([1, -1]) * 6 * 2.0**-13, (4, 8)).astype(np.float32) - values
    result = gae_advantage(rewards, values, normalize=False, **settings)
    assert np.abs(result.returns).max() < 1e-3 and np.ptp(result.advantages) > 0
    assert not np.asarray(gae_advantage(rewards, values, **settings).advantages).any()


# Blocks of eight steps, eight of these, and so on: lengths at which one begins or ends.
FURTHER = (2, 7, 8, 63, 64, 71, 512)


@pytest.mark.parametrize("lengths", each([(1, 9, 65, 513), FURTHER]))
def test_every_length(lengths):
    rng = np.random.default_rng(3)
    rewards = rng.integers(-4, 5, (3, 513)).astype(np.float32)
    keep = rng.uniform(size=rewards.shape) < 0.8
    last = np.float32([64, -32, 16])

    @jax.jit
    def run(gamma):
        return [
            discounted_returns(rewards[:, :n], where=keep[:, :n], gamma=gamma, bootstrap_values=end)
            for n in lengths
            for end in (last, None)
        ]

    for gamma in (1.0, 0.5, 0.9):  # sums of whole numbers are exact
        results = iter(run(gamma))
        for n in lengths:
            for end in (last, None):
                expected = reference.returns(rewards[:, :n], keep[:, :n], gamma, end)
                tolerance = 0 if gamma == 1 else 1e-6
                np.testing.assert_allclose(next(results), expected, rtol=0, atol=40 * tolerance)


def test_long_sequences_stay_accurate():
    rewards = np.random.default_rng(1).normal(size=(2, 4096)).astype(np.float32)
    keep = np.random.default_rng(2).uniform(size=(2, 4096)) < 0.9
    for gamma in (1.0, 0.99):
        expected = reference.returns(rewards, keep, gamma)
        result = discounted_returns(rewards, gamma=gamma, where=keep)
        np.testing.assert_allclose(result, expected, atol=2e-6 * np.abs(expected).max())


@given(st.integers(0, 2**32 - 1), st.sampled_from([1.0, 0.9]), st.sampled_from([0.0, 0.5, 1.0]))
def test_laws(seed, gamma, trace_decay):
    rng = np.random.default_rng(seed)
    rewards, values = rng.normal(size=(2, ROWS, TIME)).astype(np.float32)
    keep = rng.uniform(size=(ROWS, TIME)) < 0.6
    settings = {"gamma": gamma, "gae_lambda": trace_decay, "normalize": False}
    result = gae_advantage(rewards, values, where=keep, **settings)
    # with lambda 1, the returns are the discounted rewards, whatever the critic says
    if trace_decay == 1:
        returns = discounted_returns(rewards, where=keep, gamma=gamma)
        np.testing.assert_allclose(result.returns, returns, rtol=1e-4, atol=1e-4)
    # masked steps may as well not be there
    row = int(rng.integers(ROWS))
    short = np.zeros((1, TIME), np.float32), np.zeros((1, TIME), np.float32)
    count = int(keep[row].sum())
    short[0][0, :count], short[1][0, :count] = rewards[row, keep[row]], values[row, keep[row]]
    padded = [np.repeat(x, ROWS, axis=0) for x in short]
    compact = gae_advantage(*padded, where=np.tile(np.arange(TIME) < count, (ROWS, 1)), **settings)
    np.testing.assert_allclose(
        compact.advantages[0, :count], result.advantages[row, keep[row]], rtol=1e-5, atol=1e-5
    )
    # linear in rewards and values together
    doubled = gae_advantage(2 * rewards, 2 * values, where=keep, **settings)
    np.testing.assert_array_equal(doubled.advantages, 2 * np.asarray(result.advantages))


def test_types():
    as_half = [jnp.asarray(x).astype(jnp.bfloat16) for x in (REWARDS, VALUES)]
    result = gae_advantage(*as_half, where=KEEP)
    assert result.advantages.dtype == result.returns.dtype == jnp.float32
    wide = [x.astype(jnp.float32) for x in as_half]
    np.testing.assert_array_equal(result.advantages, gae_advantage(*wide, where=KEEP).advantages)
    integers = discounted_returns([[1, 2], [3, 4]])
    assert integers.dtype == jnp.float32 and integers.tolist() == [[3, 2], [7, 4]]


@pytest.mark.parametrize("place", each([np.asarray, jnp.asarray]))
@pytest.mark.parametrize("wide", range(3))
def test_one_wide_array_makes_all_wide(wide, place):
    # Also gamma and lambda: 0.9 and 0.95 of float32 would be wrong in the eighth digit.
    arrays = [REWARDS, VALUES, LAST]
    advantages, returns = reference.gae(*arrays[:2], KEEP, 0.9, 0.95, LAST)
    arrays[wide] = arrays[wide].astype(np.float64)
    with jax.enable_x64(True):
        rewards, values, last = (place(x) for x in arrays)
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
    @jax.jit
    @chex.assert_max_traces(n=1)
    def run(rewards, values, keep, gamma, trace_decay):
        return gae_advantage(rewards, values, where=keep, gamma=gamma, gae_lambda=trace_decay)

    for gamma, trace_decay in ((0.9, 0.95), (1.0, 0.5)):
        result = run(REWARDS, VALUES, KEEP, gamma, trace_decay)
        alone = gae_advantage(REWARDS, VALUES, where=KEEP, gamma=gamma, gae_lambda=trace_decay)
        np.testing.assert_allclose(result.advantages, alone.advantages, rtol=1e-5, atol=1e-5)


def test_more_axes_and_vmap():
    keep = np.stack([KEEP, ~KEEP])
    pair = [np.stack([x, -x]) for x in (REWARDS, VALUES)]
    stacked = gae_advantage(*pair, where=keep, normalize=False)
    mapped = jax.vmap(lambda r, v, k: gae_advantage(r, v, where=k, normalize=False))(*pair, keep)
    for row in range(2):
        alone = gae_advantage(pair[0][row], pair[1][row], where=keep[row], normalize=False)
        for result in (stacked, mapped):
            np.testing.assert_allclose(
                result.advantages[row], alone.advantages, rtol=1e-5, atol=1e-6
            )
            np.testing.assert_allclose(result.returns[row], alone.returns, rtol=1e-5, atol=1e-6)
    normalised = gae_advantage(*pair, where=keep)
    named = jax.vmap(
        lambda r, v, k: gae_advantage(r, v, where=k, axis_name="batch"), axis_name="batch"
    )(*pair, keep)
    np.testing.assert_allclose(named.advantages, normalised.advantages, rtol=1e-5, atol=1e-6)


def _bad_calls():
    good = (np.zeros((2, 3), np.float32),) * 2
    return [
        ("values", lambda: gae_advantage(good[0], np.zeros((2, 4)))),
        ("where", lambda: gae_advantage(*good, where=[True, True])),
        ("masks", lambda: GAEAdvantage()(*good, masks=np.ones((2, 1), bool))),
        ("bootstrap_values", lambda: gae_advantage(*good, bootstrap_values=np.zeros((2, 1)))),
        ("bootstrap_values", lambda: discounted_returns([[1.0]], bootstrap_values=[INF])),
        ("rewards", lambda: gae_advantage(1.0, 1.0)),
        ("rewards", lambda: discounted_returns(np.zeros((2, 0)))),
        ("rewards", lambda: gae_advantage([[1.0, NAN]], [[0.0, 0.0]])),
        ("values", lambda: gae_advantage([[1.0, 0.0]], [[0.0, NAN]])),
        ("gamma", lambda: discounted_returns(good[0], gamma=np.ones(2))),
    ]


@pytest.mark.parametrize(("argument", "call"), _bad_calls())
def test_shapes_and_values_that_do_not_fit(argument, call):
    with pytest.raises(ValueError, match=rf"^{argument}\b"):
        call()


@pytest.mark.parametrize(
    ("argument", "call"),
    [
        ("where", lambda r: gae_advantage(r, r, where=r)),
        ("masks", lambda r: GAEAdvantage()(r, r, masks=r)),
        ("masks", lambda r: ReinforcePlusPlusAdvantage()(r, masks=r)),
        ("normalize", lambda r: gae_advantage(r, r, normalize="no")),
        ("gae_lambda", lambda r: gae_advantage(r, r, gae_lambda="0.9")),
        ("epsilon", lambda r: gae_advantage(r, r, epsilon=jnp.int32(1))),
        ("rewards", lambda r: discounted_returns(jax.lax.complex(r, r))),
    ],
)
def test_wrong_types_raise_while_tracing(argument, call):
    with pytest.raises(TypeError, match=rf"^{argument}\b"):
        jax.eval_shape(call, jax.ShapeDtypeStruct((2, 3), jnp.float32))


def test_objects_are_values():
    assert GAEAdvantage(0.9) == GAEAdvantage(gamma=0.9) != GAEAdvantage()
    assert repr(GAEAdvantage()) == "GAEAdvantage(gamma=1.0, gae_lambda=0.95, normalize=True)"
    assert hash(ReinforcePlusPlusAdvantage()) == hash(ReinforcePlusPlusAdvantage(1.0))
    with pytest.raises(TypeError):
        GAEAdvantage()(REWARDS, VALUES, mask=KEEP)
