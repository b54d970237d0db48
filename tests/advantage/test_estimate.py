"""What all estimators have in common: values, masks, no signal, laws, transformations."""

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.advantage.cases import (
    ALL,
    CASES,
    COUNT,
    DATA,
    GREEDY,
    IDS,
    INF,
    KEEP,
    LENGTHS,
    NAN,
    PROMPTS,
    ROWS,
    SEGMENT_COUNT,
    SEGMENTS,
    SIZE,
    K,
    close,
    obeying,
    rewards_of,
)
from tests.model.families import each
from twinkle_jax.advantage import (
    GRPOAdvantage,
    broadcast_to_tokens,
    dynamic_sampling_filter,
    gae_advantage,
    gdpo_advantage,
    group_statistics,
    grpo_advantage,
    kl_in_token_reward,
    opo_advantage,
    reinforce_plus_plus_advantage,
    remax_advantage,
)

BATCHES = np.random.default_rng(0).uniform(size=(3, COUNT)).astype(np.float32)
WHERES = np.random.default_rng(1).uniform(size=(3, COUNT)) < 0.8


def _relative(result, expected, roundings=64):
    """Within so many roundings of the largest number."""
    result, expected = np.asarray(result, np.float64), np.asarray(expected, np.float64)
    bound = roundings * 2.0**-23 * max(np.abs(expected).max(), np.abs(result).max())
    np.testing.assert_allclose(result, expected, rtol=0, atol=bound)


# --- values ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CASES)
def test_values(name):
    for kind in ("binary", "graded", "real"):
        rewards = rewards_of(kind)
        for where, keep in ((ALL, ALL), (KEEP, KEEP), (None, ALL)):
            expected = CASES[name].expected(rewards, IDS, keep)
            close(ROWS[name](rewards, where=where), expected)


@pytest.mark.parametrize("name", SEGMENTS)
def test_values_of_segments_in_any_order(name):
    ids = np.random.default_rng(5).integers(-1, 6, COUNT)
    inside = (ids >= 0) & (ids < SEGMENT_COUNT)
    for kind in ("binary", "graded", "real"):
        rewards = rewards_of(kind)
        for where, keep in ((~inside | KEEP, KEEP), (None, ALL)):
            expected = CASES[name].expected(rewards, np.where(inside, ids, 9), keep & inside)
            close(SEGMENTS[name](rewards, ids, where=where), expected)


@pytest.mark.parametrize("name", CASES)
def test_one_program_for_lists_and_arrays(name):
    rewards = np.arange(COUNT, dtype=np.float32) % 5 / 4
    expected = ROWS[name](jnp.asarray(rewards))
    np.testing.assert_array_equal(ROWS[name](rewards.tolist()), expected)
    np.testing.assert_array_equal(ROWS[name](rewards.astype(np.float64)), expected)


@pytest.mark.parametrize("name", obeying(shift=True))
def test_a_large_common_part_does_not_hurt(name):
    for offset in (1e3, -1e6, 12345678.0, 1e8):
        # differences of 100 units in the last place and more
        unit = float(np.spacing(np.float32(abs(offset))))
        steps = np.random.default_rng(3).integers(-400, 400, COUNT) * unit
        steps[::SIZE], steps[1::SIZE] = -100 * unit, 100 * unit
        rewards = np.float32(offset + steps)
        expected = CASES[name].expected(rewards, IDS, ALL)
        _relative(ROWS[name](rewards), expected, roundings=160)
        if name in SEGMENTS:
            _relative(SEGMENTS[name](rewards), expected, roundings=160)


@pytest.mark.parametrize("name", [*obeying(scale="equivariant"), *obeying(scale="invariant")])
def test_magnitudes(name):
    """Powers of two, so that nothing but overflow could make a difference; epsilon is 1e-8."""
    rewards = rewards_of("real")
    plain = np.asarray(ROWS[name](rewards))
    for factor in np.float32([2.0**-7, 2.0**33, 2.0**60]):
        data = {key: DATA[key] * factor for key in CASES[name].data if key != "lengths"}
        expected = plain * factor if CASES[name].scale == "equivariant" else plain
        _relative(ROWS[name](rewards * factor, **data), expected, roundings=160)


# --- masks and garbage ----------------------------------------------------------------------------


@pytest.mark.parametrize("name", CASES)
def test_garbage_under_the_mask_changes_no_bit(name):
    rewards, calls = rewards_of("real"), [ROWS[name]]
    calls += [SEGMENTS[name]] if name in SEGMENTS else []
    for call in calls:
        clean = call(jnp.where(KEEP, rewards, 0), where=KEEP)
        assert not np.asarray(clean)[~KEEP].any()
        for garbage in (NAN, INF, -INF, 1e30):
            dirty = jnp.where(KEEP, rewards, np.float32(garbage))
            np.testing.assert_array_equal(call(dirty, where=KEEP), clean)
        for garbage in (NAN, INF):
            nothing = call(jnp.full(COUNT, garbage, jnp.float32), where=np.zeros(COUNT, bool))
            assert nothing.tolist() == [0] * COUNT


def test_garbage_in_other_data_under_the_mask_changes_no_bit():
    rewards, lengths = rewards_of("real"), LENGTHS.astype(np.float32)
    dirty = np.where(KEEP, lengths, np.float32(NAN))
    for name in ("opo", "reinforce++"):
        expected = ROWS[name](rewards, where=KEEP)
        for given_lengths in (dirty, np.where(KEEP, lengths, -5), jnp.asarray(dirty)):
            result = ROWS[name](rewards, where=KEEP, lengths=given_lengths)
            np.testing.assert_array_equal(result, expected)
    # a prompt that is left out needs no greedy completion
    others = IDS != 2
    expected = ROWS["remax"](rewards, where=others)
    greedy = np.where(np.arange(PROMPTS) == 2, np.float32(NAN), GREEDY)
    for given_greedy in (greedy, jnp.asarray(greedy)):
        result = ROWS["remax"](rewards, where=others, greedy_rewards=given_greedy)
        np.testing.assert_array_equal(result, expected)


@pytest.mark.parametrize("name", obeying(grouped=True))
def test_equal_rewards_are_exactly_zero(name):
    constants = np.float32([0.1, 0.35, -0.7, 1e18])
    rewards = np.repeat(constants, SIZE)
    unit = np.sign(rewards) * np.spacing(np.abs(rewards))
    wobbly = rewards - unit * np.tile([0, 4, 1, 0, 3, 4], PROMPTS)
    for equal in (rewards, wobbly.astype(np.float32), np.full(COUNT, 0.1, np.float32)):
        results = [ROWS[name](equal), ROWS[name](np.where(KEEP, equal, 7), where=KEEP)]
        results += [SEGMENTS[name](equal)] if name in SEGMENTS else []
        for result in map(np.asarray, results):
            assert not result.any()
            assert not np.signbit(result).any()  # 0, not -0
    # one that is five units above the others is a signal
    five = rewards - unit * np.tile([0, 5, 5, 5, 5, 5], PROMPTS)
    if CASES[name].ordered:  # pass@k asks for success, and MaxRL for positive rewards
        result = np.asarray(ROWS[name](five.astype(np.float32))).reshape(PROMPTS, SIZE)
        assert result[constants > 0].any(axis=1).all()
    # beside prompts with a signal, and for a lone survivor
    mixed = rewards_of("real")
    mixed[:SIZE] = 0.1
    result = np.asarray(ROWS[name](mixed, where=KEEP)).reshape(PROMPTS, SIZE)
    assert not result[:3].any()
    if name != "pass_at_k":  # whose rewards may all lie on one side of the threshold
        assert result[3].any()


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("bad", [NAN, INF])
def test_unmasked_garbage_on_a_device_poisons_its_group_and_never_becomes_zero(name, bad):
    rewards = jnp.asarray(rewards_of("graded")).at[2].set(bad)
    result = np.asarray(ROWS[name](rewards)).reshape(PROMPTS, SIZE)
    equal = jnp.asarray(rewards_of("graded")).at[:SIZE].set(bad)
    assert not np.isfinite(np.asarray(ROWS[name](equal))[:SIZE]).any()
    if name in SEGMENTS:
        by_id = np.asarray(SEGMENTS[name](rewards))
        np.testing.assert_array_equal(np.isnan(by_id), np.isnan(result.ravel()))
    if CASES[name].batch_wide:
        assert np.isnan(result).all()
    elif not CASES[name].grouped:  # no sample has a part in another
        assert not np.isfinite(result[0, 2]) and np.isfinite(np.delete(result.ravel(), 2)).all()
    else:
        assert np.isnan(result[0]).all()
        assert np.isfinite(result[1:]).all()


def test_garbage_in_other_data_on_a_device():
    rewards = rewards_of("real")
    lengths = jnp.asarray(LENGTHS.astype(np.float32)).at[2].set(NAN)
    result = np.asarray(ROWS["opo"](rewards, lengths=lengths)).reshape(PROMPTS, SIZE)
    assert np.isnan(result[0]).all() and np.isfinite(result[1:]).all()
    assert np.isnan(ROWS["reinforce++"](rewards, lengths=lengths)).any()
    greedy = jnp.asarray(GREEDY).at[2].set(NAN)
    result = np.asarray(ROWS["remax"](rewards, greedy_rewards=greedy)).reshape(PROMPTS, SIZE)
    assert np.isnan(result[2]).all() and np.isfinite(np.delete(result, 2, axis=0)).all()
    both = remax_advantage(jnp.asarray([INF, 1.0]), jnp.asarray([INF]), 2)
    assert np.isnan(both[0]) and both[1] == -INF


def test_components_under_a_mask():
    rewards = [[1.0, NAN], [2.0, 3.0], [NAN, INF], [4.0, 1.0]]
    where = [[True, False], [True, True], [False, False], [True, True]]
    # sums 1, 5, missing, 5
    result = grpo_advantage(rewards, 4, "none", where=where)
    np.testing.assert_allclose(result, [-8 / 3, 4 / 3, 0, 4 / 3], rtol=1e-6)
    weighted = grpo_advantage(rewards, 4, "none", where=where, reward_weights=[2.0, 1.0])
    assert weighted.tolist() == [-4, 1, 0, 3]  # 2, 7, missing, 9: mean 6
    assert group_statistics(rewards, 4, where=where).count.tolist() == [3]
    by_sample = grpo_advantage(rewards, 2, "none", where=[False, True, False, True])
    assert by_sample.tolist() == [0, 0, 0, 0]
    # of 2, 1 and 1 tokens: baseline 12 / 4
    result = opo_advantage(rewards, [2, 1, -3, 1], 4, where=where)
    np.testing.assert_allclose(result, [-2, 2, 0, 2], rtol=1e-6)
    # columns 1 2 4 (mean 7/3, variance 7/3) and 3 1 (mean 2, variance 2)
    first, second = np.array([-4, -1, 0, 5]) / 3 / (7 / 3) ** 0.5, np.array([0, 1, 0, -1]) / 2**0.5
    sums = first + second
    expected = sums / sums[[0, 1, 3]].std(ddof=1)
    np.testing.assert_allclose(gdpo_advantage(rewards, 4, where=where), expected, rtol=1e-5)


def test_components_are_summed_with_weights():
    rewards = np.array([[0.0, 1.0], [2.0, 3.0], [4.0, 0.0], [8.0, 1.0]], np.float32)
    assert grpo_advantage(rewards, 2, "none").tolist() == [-2, 2, -2.5, 2.5]
    # 0 + 2, 2 + 6 | 4 + 0, 8 + 2
    for rows, weights in ((rewards, [1.0, 2.0]), (rewards.astype(int), np.array([1, 2]))):
        weighted = grpo_advantage(rows, 2, "none", reward_weights=weights)
        assert weighted.tolist() == [-3, 3, -3, 3]


# --- gradients ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["grpo, batch", "remax", "gdpo", "maxrl", "pkpo, mean", "mc_grpo"])
def test_no_gradient_flows_and_nothing_turns_nan(name):
    dirty = jnp.where(KEEP, rewards_of("real"), np.float32(NAN))

    def loss(rewards, logits):
        return jnp.sum(ROWS[name](rewards, where=KEEP) * jax.nn.log_softmax(logits))

    of_rewards, of_logits = jax.grad(loss, argnums=(0, 1))(dirty, jnp.linspace(-1.0, 1.0, COUNT))
    assert not np.asarray(of_rewards).any()
    assert np.isfinite(of_logits).all() and np.asarray(of_logits).any()


def test_no_gradient_flows_through_data_weights_and_coefficients():
    rewards = jnp.asarray(rewards_of("real"))

    def loss(lengths, greedy, weights, epsilon):
        pair = jnp.stack([rewards, jnp.square(rewards[::-1])], axis=1)
        more = {"reward_weights": weights, "epsilon": epsilon}
        return (
            jnp.sum(jnp.square(ROWS["opo"](rewards, lengths=lengths)))
            + jnp.sum(jnp.square(ROWS["reinforce++"](rewards, lengths=lengths, epsilon=epsilon)))
            + jnp.sum(jnp.square(ROWS["remax"](rewards, greedy_rewards=greedy)))
            + jnp.sum(gdpo_advantage(pair, SIZE, **more) * rewards)
            + jnp.sum(grpo_advantage(pair, SIZE, "batch", **more) * rewards)
            + jnp.sum(jnp.square(ROWS["dgpo"](rewards, epsilon=epsilon)))
        )

    arguments = jnp.asarray(LENGTHS, jnp.float32), jnp.asarray(GREEDY), jnp.ones(2)
    gradients = jax.grad(loss, argnums=range(4))(*arguments, jnp.float32(1e-3))
    assert not any(np.asarray(g).any() for g in gradients)


# --- laws -----------------------------------------------------------------------------------------


def graded():
    """Rewards of 0, 1/64, ... 4: their sums, and twice them, are exact."""
    cells = st.lists(st.integers(0, 256), min_size=COUNT, max_size=COUNT)
    return cells.map(lambda values: np.asarray(values, np.float32) / 64)


@given(graded())
def test_sums(rewards):
    for name in obeying(sums_to_zero=True):
        result = np.asarray(ROWS[name](rewards), np.float64).reshape(PROMPTS, SIZE)
        bound = 32 * 2.0**-23 * np.abs(result).sum(axis=1)
        assert np.all(np.abs(result.sum(axis=1)) <= bound), name
    weighted = np.asarray(ROWS["opo"](rewards), np.float64) * LENGTHS
    bound = 32 * 2.0**-23 * np.abs(weighted).reshape(PROMPTS, SIZE).sum(axis=1)
    assert np.all(np.abs(weighted.reshape(PROMPTS, SIZE).sum(axis=1)) <= bound)
    gained = np.asarray(ROWS["pkpo, minus one"](rewards))
    assert (gained >= 0).all()
    balanced = np.abs(ROWS["dgpo"](rewards)).reshape(PROMPTS, SIZE).sum(axis=1)
    assert np.all(np.isclose(balanced, SIZE, rtol=1e-5) | (balanced == 0))


@given(graded(), st.integers(-64, 64))
def test_adding_a_constant_changes_nothing(rewards, constant):
    for name in obeying(shift=True):
        _relative(ROWS[name](rewards + np.float32(constant)), ROWS[name](rewards))


@given(graded(), st.sampled_from([0.5, 2.0, 4.0]))
def test_scaling(rewards, factor):
    scaled = rewards * np.float32(factor)
    for name in obeying(scale="equivariant"):
        data = {key: DATA[key] * np.float32(factor) for key in CASES[name].data if key != "lengths"}
        _relative(ROWS[name](scaled, **data), factor * np.asarray(ROWS[name](rewards)))
    for name in obeying(scale="invariant"):
        _relative(ROWS[name](scaled), ROWS[name](rewards), roundings=256)


@given(graded(), st.permutations(range(SIZE)), st.permutations(range(PROMPTS)))
def test_order_of_samples_and_prompts(rewards, order, prompts):
    """A permuted group has permuted advantages; prompts do not see each other."""
    order, prompts = np.concatenate([order, np.arange(SIZE, COUNT)]), list(prompts)

    def move(values):
        return values.reshape(PROMPTS, -1)[prompts].ravel()

    for name, call in ROWS.items():
        plain = np.asarray(call(rewards))
        data = {"lengths": LENGTHS[order]} if "lengths" in CASES[name].data else {}
        _relative(call(rewards[order], **data), plain[order])
        if not CASES[name].batch_wide:
            data = {key: move(DATA[key]) for key in CASES[name].data}
            np.testing.assert_array_equal(call(move(rewards), **data), move(plain))


@given(graded())
def test_order_of_rewards_is_order_of_advantages(rewards):
    for name in obeying(grouped=True, ordered=True):
        advantages = np.asarray(ROWS[name](rewards)).reshape(PROMPTS, SIZE)
        for group, result in zip(rewards.reshape(PROMPTS, SIZE), advantages, strict=True):
            if CASES[name].batch_wide and not result.any():
                continue
            slack = 64 * 2.0**-23 * max(np.abs(result).max(), 1e-9)
            rising = result[np.argsort(group, kind="stable")]
            assert (np.diff(rising) >= -slack).all(), name


@given(graded())
def test_bounds_and_ratio_of_grpo_and_rloo(rewards):
    slack = 1 + 8 * 2.0**-23
    assert np.abs(ROWS["grpo, group"](rewards)).max() <= (SIZE - 1) / SIZE**0.5 * slack
    assert np.abs(ROWS["rloo, group"](rewards)).max() <= SIZE**0.5 * slack
    for scale in ("group", "batch", "none"):
        grpo = np.asarray(ROWS[f"grpo, {scale}"](rewards), np.float64)
        rloo = ROWS[f"rloo, {scale}"](rewards)
        np.testing.assert_allclose(rloo, SIZE / (SIZE - 1) * grpo, rtol=1e-6, atol=1e-30)


def test_pass_at_k_of_prompts_that_every_subset_passes():
    # More successes than K - k failures leave room for.
    rewards = np.zeros(COUNT, np.float32)
    rewards.reshape(PROMPTS, SIZE)[:, : SIZE - K + 1] = 1
    assert not np.asarray(ROWS["pass_at_k"](rewards)).any()
    rewards.reshape(PROMPTS, SIZE)[:, SIZE - K] = 0
    assert np.asarray(ROWS["pass_at_k"](rewards)).all()


@given(st.data())
def test_ragged_segments(data):
    rewards, booleans = data.draw(graded()), st.lists(st.booleans(), min_size=COUNT, max_size=COUNT)
    drawn = st.lists(st.integers(-2, SEGMENT_COUNT + 1), min_size=COUNT, max_size=COUNT)
    ids, keep = np.asarray(data.draw(drawn)), np.asarray(data.draw(booleans))
    inside = (ids >= 0) & (ids < SEGMENT_COUNT)
    for name, call in SEGMENTS.items():
        if name == "reinforce++" and not (keep & inside).any():
            continue  # no token to average over
        with np.errstate(invalid="ignore", divide="ignore"):
            expected = CASES[name].expected(rewards, np.where(inside, ids, 9), keep & inside)
        _relative(call(rewards, ids, where=keep), expected, roundings=512)


def test_segments_that_are_rows_in_any_order():
    rng = np.random.default_rng(0)
    rewards, order = rng.uniform(size=COUNT).astype(np.float32), rng.permutation(COUNT)
    ids = np.asarray([3, 0, 4, 2])[IDS]
    for name, call in SEGMENTS.items():
        data = {key: DATA[key][order] for key in CASES[name].data}
        result = call(rewards[order], ids[order], **data)
        _relative(result, np.asarray(ROWS[name](rewards))[order])


# --- transformations ------------------------------------------------------------------------------

# One that sorts, and one with components and statistics of the batch.
FIRST = ("mc_grpo", "gdpo")


@pytest.mark.parametrize("name", each([*FIRST, *(n for n in CASES if n not in FIRST)], len(FIRST)))
def test_jit_vmap_and_no_jit(name):
    @jax.jit
    def run(batches, wheres):
        return jax.vmap(lambda r, w: ROWS[name](r, where=w))(batches, wheres)

    mapped = run(BATCHES, WHERES)
    with jax.disable_jit():
        plain = ROWS[name](BATCHES[0], where=WHERES[0])
    np.testing.assert_allclose(mapped[0], plain, rtol=1e-5, atol=1e-6)
    for row in range(3):
        alone = ROWS[name](BATCHES[row], where=WHERES[row])
        np.testing.assert_allclose(mapped[row], alone, rtol=1e-5, atol=1e-6)


def test_vmap_over_data():
    lengths = np.stack([LENGTHS, LENGTHS[::-1], LENGTHS + 5])
    mapped = jax.vmap(lambda r, n: opo_advantage(r, n, SIZE))(BATCHES, lengths)
    for row in range(3):
        alone = opo_advantage(BATCHES[row], lengths[row], SIZE)
        np.testing.assert_allclose(mapped[row], alone, rtol=1e-5, atol=1e-6)


@pytest.mark.exhaustive
def test_other_values_compile_and_transfer_nothing(compilations):
    rewards = [jnp.asarray(row) for row in BATCHES]
    tokens = [jnp.asarray(row.reshape(PROMPTS, SIZE)) for row in BATCHES]
    on_device, ids = {key: jnp.asarray(value) for key, value in DATA.items()}, jnp.asarray(IDS)
    where = jnp.asarray(WHERES[0])
    pair, weights = jnp.stack([rewards[0]] * 2, axis=1), jnp.asarray([1.0, 2.0])

    def calls(i):
        for name, call in ROWS.items():
            call(rewards[i], where=None, **{key: on_device[key] for key in CASES[name].data})
        for name in ("maxrl", "grpo, batch", "rloo, none"):
            SEGMENTS[name](rewards[i], ids, PROMPTS, where=None)
        ROWS["grpo, batch"](rewards[i], where=where)
        ROWS["grpo, group"](pair, where=None, reward_weights=weights)
        gae_advantage(tokens[i], tokens[i - 1])
        reinforce_plus_plus_advantage(tokens[i])
        dynamic_sampling_filter(group_statistics(rewards[i], SIZE), SIZE)

    calls(0)
    assert compilations
    compilations.clear()
    with jax.transfer_guard("disallow"):
        calls(1)
        calls(2)
    assert not compilations
    for i in range(3):
        ROWS["rloo, group"](BATCHES[i].tolist(), where=None)
    compilations.clear()
    for epsilon in (1e-3, 1e-2):
        ROWS["rloo, group"](BATCHES[0].tolist(), where=None, epsilon=epsilon)
        ROWS["maxrl"](rewards[0], where=None, epsilon=epsilon)
        gae_advantage(tokens[0], tokens[1], gamma=1 - epsilon, gae_lambda=epsilon)
    assert not compilations


def test_lowers_for_every_platform():
    def step(rewards, tokens):
        mask = tokens > 0
        advantages = [call(rewards, where=rewards > 0.1) for call in ROWS.values()]
        advantages += [call(rewards, IDS, PROMPTS, where=None) for call in SEGMENTS.values()]
        earned = kl_in_token_reward(rewards, tokens, mask, coefficient=0.1)
        return (
            advantages,
            gae_advantage(earned, tokens, where=mask),
            reinforce_plus_plus_advantage(earned, where=mask),
            group_statistics(rewards, SIZE),
            broadcast_to_tokens(advantages[0], mask),
        )

    shapes = (COUNT,), (COUNT, 5)
    arguments = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    platforms = ("cpu", "cuda", "rocm", "tpu")
    exported = jax.export.export(jax.jit(step), platforms=platforms)(*arguments)
    assert exported.platforms == platforms
    assert "callback" not in exported.mlir_module()


def test_one_export_serves_any_number_of_prompts():
    (prompts,) = jax.export.symbolic_shape("prompts")

    def step(rewards):
        advantages = grpo_advantage(rewards, SIZE, "batch"), gdpo_advantage(rewards, SIZE)
        return advantages, group_statistics(rewards, SIZE)

    shape = jax.ShapeDtypeStruct((SIZE * prompts,), jnp.float32)
    exported = jax.export.export(jax.jit(step))(shape)
    for rewards in (BATCHES[0], BATCHES[1][: 2 * SIZE]):
        jax.tree.map(_relative, exported.call(rewards), step(rewards))


@pytest.mark.exhaustive
def test_inside_scan_and_remat():
    batches = jnp.asarray(BATCHES)

    @jax.checkpoint
    def body(total, rewards):
        return total, grpo_advantage(rewards, 4, "batch")

    _, scanned = jax.lax.scan(body, 0.0, batches)
    for row in range(3):
        alone = grpo_advantage(batches[row], 4, "batch")
        np.testing.assert_allclose(scanned[row], alone, rtol=1e-6, atol=1e-6)


def test_jit_over_the_function_and_the_object():
    static = jax.jit(grpo_advantage, static_argnames=("num_generations", "scale"))
    wrapped = jax.jit(lambda r: GRPOAdvantage()(r, num_generations=4))
    as_argument = jax.jit(lambda f, r: f(r, num_generations=4), static_argnums=0)
    expected = grpo_advantage(BATCHES[0], 4)
    for result in (
        static(BATCHES[0], 4),
        wrapped(BATCHES[0]),
        as_argument(GRPOAdvantage(), BATCHES[0]),
    ):
        np.testing.assert_allclose(result, expected, rtol=1e-6, atol=1e-6)
