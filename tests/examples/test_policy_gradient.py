"""The policy-gradient example: task, policy, sampler and train step."""

import re
from collections import Counter
from functools import partial

import chex
import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType

from tests.examples import load

example = load("policy_gradient")
COLLECTIVE = re.compile(
    r" (all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute)(?:-start)?\("
)


# A smaller policy, a reward that it often gets untrained, and an optimizer without memory: steps
# compile in a third of the time, and without Adam a tiny gradient makes a tiny difference.

small = load("policy_gradient")
small.LAYERS, small.HEADS, small.WIDTH = 1, 2, 8
small.OPTIMIZER = optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(1.0))
small.exact_match = lambda prompts, tokens, mask: (tokens[:, 0] % 2).astype(jnp.float32)


def run_of(module, *, devices=8, estimator=example.grpo_advantage, scale="group", prompts=16):
    return module.Run(
        graph=nnx.graphdef(nnx.eval_shape(lambda: module.Policy(nnx.Rngs(0)))),
        mesh=jax.make_mesh(
            (devices,), ("data",), (AxisType.Auto,), devices=jax.devices()[:devices]
        ),
        estimator=estimator,
        scale=scale,
        prompts=prompts,
        generations=4,
    )


def state_of(module, run):
    params = module.initial_params(jax.random.key(3))
    # A bolder head than a fresh one, so that tokens, and mistakes about them, are not near ties.
    params["head"]["kernel"][...] = 5 * params["head"]["kernel"][...]
    return module.begin(params, jax.random.key(5), run=run)


RUN = run_of(small, devices=1)


def policy_of(params):
    return nnx.merge(RUN.graph, params)


def empty_cache(rows):
    empty = jnp.zeros((rows, small.CONTEXT, small.HEADS, small.WIDTH // small.HEADS))
    return [(empty, empty)] * small.LAYERS


@jax.jit
def sample(params, prompts, key, temperature=1.0):
    return small.sample(policy_of(params), prompts, 4, key, temperature)


@jax.jit
def extend(params, tokens, cache, start):
    return policy_of(params)(tokens, cache, start)


@jax.jit
def completion_logprobs(params, prompts, tokens):
    return small.completion_logprobs(policy_of(params), prompts, tokens)


@pytest.fixture(scope="module")
def params():
    return state_of(small, RUN).params


@pytest.fixture(scope="module")
def sampled(params):
    prompts = small.draw_prompts(jax.random.key(1), 32)
    return prompts, *sample(params, prompts, jax.random.key(2))


# Prompts, answers and the reward.


def test_held_out_prompts_share_no_prompt_and_no_answer_with_training():
    drawn = {
        held_out: np.asarray(example.draw_prompts(jax.random.key(7), 20_000, held_out=held_out))
        for held_out in (False, True)
    }
    assert np.all(drawn[True].sum(axis=1) % 10 == 0)
    assert np.all(drawn[False].sum(axis=1) % 10 != 0)
    answers = {key: {tuple(row) for row in np.sort(rows)} for key, rows in drawn.items()}
    assert not answers[True] & answers[False]


@pytest.mark.parametrize("held_out", [False, True])
def test_prompts_are_drawn_uniformly(held_out):
    prompts = np.asarray(example.draw_prompts(jax.random.key(8), 20_000, held_out=held_out))
    assert prompts.shape == (20_000, 6)
    for position in range(6):
        frequencies = np.bincount(prompts[:, position], minlength=10) / 20_000
        # The standard deviation of a frequency is sqrt(0.1 * 0.9 / 20000) = 0.002.
        np.testing.assert_allclose(frequencies, 0.1, atol=0.01)
    remainders = np.bincount(prompts.sum(axis=1) % 10, minlength=10) / 20_000
    expected = [1] + 9 * [0] if held_out else [0] + 9 * [1 / 9]
    np.testing.assert_allclose(remainders, expected, atol=0.01)


def test_a_prompt_depends_on_the_key_and_its_number_alone():
    few, many = (example.draw_prompts(jax.random.key(9), count) for count in (4, 40))
    np.testing.assert_array_equal(few, many[:4])
    other = example.draw_prompts(jax.random.key(10), 4)
    assert np.any(np.asarray(few) != np.asarray(other))


def test_an_answer_is_the_sorted_digits_and_the_end_token():
    answers = example.answers(jnp.array([[9, 0, 3, 3, 1, 0], [5, 5, 5, 5, 5, 5]]))
    np.testing.assert_array_equal(answers, [[0, 0, 1, 3, 3, 9, 11], [5, 5, 5, 5, 5, 5, 11]])


def test_reward_is_one_for_every_token_right_and_zero_otherwise():
    prompts = jnp.array([[2, 1, 0, 0, 0, 0], [9, 8, 7, 7, 7, 7]])
    tokens = jnp.array(
        [
            [0, 0, 0, 0, 1, 2, 11],  # right
            [0, 0, 0, 0, 2, 1, 11],  # two digits swapped
            [0, 0, 0, 0, 1, 2, 2],  # does not stop
            [7, 7, 7, 7, 8, 9, 11],  # right
            [7, 7, 7, 7, 8, 11, 11],  # stops early
            [0, 0, 0, 0, 1, 2, 11],  # right for the other prompt
        ]
    )
    rewards = example.exact_match(prompts, tokens, jnp.full(tokens.shape, True))
    np.testing.assert_array_equal(rewards, [1, 0, 0, 1, 0, 0])
    assert rewards.dtype == jnp.float32
    unsampled = jnp.full(tokens.shape, True).at[0, 6].set(False)
    assert example.exact_match(prompts, tokens, unsampled)[0] == 0


# The policy and its cache.


def whole_logits(params, prompts, tokens):
    """Logits after every token but the last, from one pass without a cache to speak of."""
    prompts = jnp.repeat(prompts, len(tokens) // len(prompts), axis=0)
    ask = jnp.full((len(tokens), 1), small.ASK)
    sequence = jnp.concatenate([prompts, ask, tokens[:, :-1]], axis=1)
    return sequence, extend(params, sequence, empty_cache(len(sequence)), 0)[0]


def test_decoding_with_the_cache_is_the_full_forward_pass(params, sampled):
    sequence, whole = whole_logits(params, *sampled[:2])
    cache = empty_cache(len(sequence))
    for position in range(small.CONTEXT):
        logits, cache = extend(params, sequence[:, position, None], cache, position)
        np.testing.assert_allclose(logits[:, 0], whole[:, position], atol=5e-5)


def test_a_token_changes_no_earlier_logits_and_all_later_ones(params, sampled):
    prompts, tokens, _, _ = sampled
    changed = tokens.at[:, 2].set((tokens[:, 2] + 1) % 10)
    (_, first), (_, second) = (whole_logits(params, prompts, each) for each in (tokens, changed))
    after = small.DIGITS + 3
    np.testing.assert_array_equal(first[:, :after], second[:, :after])
    assert np.all(np.any(np.asarray(first[:, after:] != second[:, after:]), axis=2))


def test_sampler_and_trainer_see_the_log_probabilities_of_the_full_forward_pass(params, sampled):
    prompts, tokens, _, logprobs = sampled
    _, logits = whole_logits(params, prompts, tokens)
    expected = jax.nn.log_softmax(logits[:, small.DIGITS :])
    expected = jnp.take_along_axis(expected, tokens[..., None], axis=2)[..., 0]
    trained = completion_logprobs(params, prompts, tokens)
    np.testing.assert_allclose(trained, expected, atol=5e-5)
    np.testing.assert_allclose(logprobs, expected, atol=5e-5)


# The sampler.


def test_the_mask_ends_with_the_sampled_end_token_and_filler_follows(sampled):
    _, tokens, mask, _ = (np.asarray(each) for each in sampled)
    ends = tokens == small.END
    np.testing.assert_array_equal(mask, np.cumsum(ends, axis=1) - ends == 0)
    assert np.all(tokens[~mask] == small.END)
    assert np.any(~mask), "no row stopped early: the sample shows nothing"
    assert np.any(~np.any(ends, axis=1)), "every row stopped: the sample shows little"


def test_a_row_is_what_it_is_whatever_else_is_sampled(params, sampled):
    prompts, tokens, _, _ = sampled
    alone = sample(params, prompts[:1], jax.random.key(2))
    np.testing.assert_array_equal(alone[0], tokens[:4])
    others = prompts.at[:5].set(0).at[6:].set(9)
    among_others = sample(params, others, jax.random.key(2))
    np.testing.assert_array_equal(among_others[0][20:24], tokens[20:24])
    assert np.any(np.asarray(among_others[0][:20] != tokens[:20]))


def test_rows_and_positions_draw_noise_of_their_own(params):
    params = jax.tree.map(jnp.copy, params)
    params["head"]["kernel"][...] = 0 * params["head"]["kernel"][...]  # all tokens equally likely
    prompts = jnp.zeros((32, small.DIGITS), jnp.int32)
    drawn = [sample(params, prompts, jax.random.key(seed)) for seed in range(24)]
    tokens, mask = (np.concatenate([each[part] for each in drawn]) for part in (0, 1))
    assert len(np.unique(tokens, axis=0)) > 2000
    for position in range(small.ANSWER):
        kept = tokens[mask[:, position], position]
        frequencies = np.bincount(kept, minlength=small.VOCABULARY) / len(kept)
        # With at least 1700 rows the standard deviation of a frequency is below 0.007.
        np.testing.assert_allclose(frequencies, 1 / small.VOCABULARY, atol=0.03)
    both = mask[:, 1]
    assert abs(np.corrcoef(tokens[both, 0], tokens[both, 1])[0, 1]) < 0.1


def test_temperature_zero_takes_the_likeliest_token(params, sampled):
    prompts = sampled[0]
    tokens, mask, logprobs = sample(params, prompts, jax.random.key(0), 0.0)
    _, logits = whole_logits(params, prompts, tokens)
    likeliest = np.max(jax.nn.log_softmax(logits[:, small.DIGITS :]), axis=-1)
    np.testing.assert_allclose(np.asarray(logprobs)[mask], likeliest[mask], atol=5e-5)


# The update.


PROMPTS = small.draw_prompts(jax.random.key(1), 4)
TOKENS = small.answers(PROMPTS)
ALL = jnp.full(TOKENS.shape, True)


@jax.jit
def update(state, prompts, tokens, mask, advantages):
    """Take the step; measure how likely the kept tokens are before and after it."""

    def likelihood(params):
        logprobs = small.completion_logprobs(policy_of(params), prompts, tokens)
        return jnp.sum(logprobs, where=mask)

    after = small.update(state, RUN, prompts, tokens, mask, advantages)
    return after, likelihood(state.params), likelihood(after.params)


@pytest.fixture(scope="module")
def state():
    return state_of(small, RUN)


def test_an_end_token_is_learnt_and_the_filler_after_it_is_not(state):
    tokens = jnp.full_like(TOKENS, small.END)
    mask = jnp.full_like(ALL, False).at[:, 0].set(True)
    after, before_likelihood, after_likelihood = update(state, PROMPTS, tokens, mask, jnp.ones(4))
    assert after_likelihood > before_likelihood + 0.1
    other_filler, _, _ = update(state, PROMPTS, tokens.at[:, 1:].set(3), mask, jnp.ones(4))
    chex.assert_trees_all_equal(after.params, other_filler.params)


@pytest.mark.parametrize("sign", [1, -1])
def test_the_sign_of_the_advantage_is_the_direction(state, sign):
    _, before, after = update(state, PROMPTS, TOKENS, ALL, sign * jnp.full(4, 0.25))
    assert sign * (after - before) > 0.1


def test_no_advantage_is_no_step(state):
    after, _, _ = update(state, PROMPTS, TOKENS, ALL, jnp.zeros(4))
    chex.assert_trees_all_equal(after.params, state.params)
    assert after.step == 1


def test_the_step_is_the_clipped_gradient_of_the_mean_over_kept_tokens(state):
    mask = ALL.at[1, 2:].set(False)
    advantages = jnp.array([1.0, -2.0, 0.5, 0.0])

    @jax.jit
    @jax.grad
    def slope(params):
        logprobs = small.completion_logprobs(policy_of(params), PROMPTS, TOKENS)
        weights = jnp.where(mask, advantages[:, None], 0)
        return -jnp.vdot(weights, logprobs) / 23  # 4 * 7 tokens, less 5

    gradient = slope(state.params)
    norm = optax.tree.norm(gradient)
    assert norm > 1, "nothing to clip"
    expected = jax.tree.map(lambda param, slope: param - slope / norm, state.params, gradient)
    after, _, _ = update(state, PROMPTS, TOKENS, mask, advantages)
    chex.assert_trees_all_close(after.params, expected, atol=1e-6)


def test_gradients_are_clipped_before_adam():
    gradient = jnp.full(4, 1e6)
    with jax.numpy_dtype_promotion("standard"):
        _, optimizer = example.OPTIMIZER.update(gradient, example.OPTIMIZER.init(gradient))
    # Adam's first moment is a tenth of the gradient: 1/2 each once the norm is 1.
    np.testing.assert_allclose(optax.tree.get(optimizer, "mu"), 0.05, rtol=1e-6)


# The compiled step.


def constant(rewards, num_generations, scale):
    """Stand where an estimator stands, without looking at the rewards."""
    return jnp.ones_like(rewards)


@pytest.fixture(scope="module")
def compiled():
    """Steps by estimator, scale and number of devices, each compiled once."""

    def compile_step(estimator, scale="group", devices=8):
        run = run_of(small, devices=devices, estimator=estimator, scale=scale)
        lowered = small.train_step.lower(state_of(small, run), run=run)
        # Poorer machine code in half the time, from the same optimised program.
        return run, lowered.compile(compiler_options={"xla_backend_optimization_level": 0})

    return {
        "group": compile_step(small.grpo_advantage),
        "batch": compile_step(small.grpo_advantage, "batch"),
        "constant": compile_step(constant),
        "one device": compile_step(small.grpo_advantage, devices=1),
    }


def test_eight_devices_compute_what_one_computes(compiled):
    outcomes = []
    for name in ("group", "one device"):
        run, step = compiled[name]
        outcomes.append(jax.device_get(step(state_of(small, run))))
    (eight, eight_rollout), (one, one_rollout) = outcomes
    for name in ("prompts", "tokens", "mask", "rewards"):
        np.testing.assert_array_equal(getattr(eight_rollout, name), getattr(one_rollout, name))
    np.testing.assert_allclose(eight_rollout.logprobs, one_rollout.logprobs, atol=5e-5)
    np.testing.assert_allclose(eight_rollout.advantages, one_rollout.advantages, atol=1e-6)
    chex.assert_trees_all_close(eight.params, one.params, atol=1e-5)


@pytest.mark.parametrize("scale", ["group", "batch"])
def test_the_step_trains_on_what_it_sampled_judged_and_compared(compiled, scale):
    run, step = compiled[scale]
    after, (prompts, tokens, mask, _, rewards, advantages) = step(state_of(small, run))
    np.testing.assert_array_equal(rewards, np.asarray(tokens)[:, 0] % 2)
    expected = example.grpo_advantage(np.asarray(rewards), 4, scale)
    np.testing.assert_allclose(advantages, expected, atol=1e-6)
    assert np.any(np.asarray(advantages) > 0)

    state = state_of(small, RUN)
    expected, _, _ = update(state, *jax.device_get((prompts, tokens, mask, advantages)))
    chex.assert_trees_all_close(jax.device_get(after.params), expected.params, atol=1e-5)
    moved = jax.tree.map(
        lambda old, new: jnp.max(jnp.abs(new - old)), state.params, expected.params
    )
    assert max(jax.tree.leaves(moved)) > 0.01


def test_accuracy_is_measured_on_held_out_prompts():
    watched = load("policy_gradient")
    watched.LAYERS, watched.HEADS, watched.WIDTH = 1, 1, 2

    def count(prompts, tokens, mask):
        assert len(prompts) == len(tokens) == 1024
        return jnp.sum(prompts, axis=1) % 10 == 0

    watched.exact_match = count
    run = run_of(watched)
    assert watched.held_out_accuracy(watched.initial_params(jax.random.key(0)), run=run) == 1


def test_the_batch_is_spread_over_the_devices_and_the_state_is_on_all(compiled):
    run, step = compiled["group"]
    state, rollout = step(state_of(small, run))
    for leaf in rollout:
        assert len(leaf.sharding.device_set) == 8
        assert leaf.addressable_shards[0].data.shape[0] == leaf.shape[0] // 8
    assert all(leaf.is_fully_replicated for leaf in jax.tree.leaves(state))


def test_steps_share_no_prompt_and_the_state_they_start_from_is_donated(compiled):
    run, step = compiled["group"]
    first_state = state_of(small, run)
    second_state, first = step(first_state)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(first_state.params))
    second_state = jax.tree.map(jnp.copy, second_state)
    assert second_state.step == 1
    _, second = step(second_state)
    assert not {tuple(row) for row in np.asarray(first.prompts)} & {
        tuple(row) for row in np.asarray(second.prompts)
    }


def test_the_advantage_adds_no_collective_and_nothing_leaves_the_device(compiled):
    text = {name: step.as_text() for name, (_, step) in compiled.items()}
    collectives = {name: Counter(COLLECTIVE.findall(each)) for name, each in text.items()}
    calls = {
        name: set(re.findall(r'custom_call_target="(.*?)"', each)) for name, each in text.items()
    }
    assert collectives["constant"]["all-reduce"] > 0, "the gradient has to be summed over devices"
    assert collectives["group"] == collectives["constant"]
    gained = collectives["batch"] - collectives["constant"]
    assert set(gained) <= {"all-reduce"} and gained["all-reduce"] <= 3
    assert not collectives["one device"]
    for name in text:
        assert calls[name] == calls["constant"]
        assert not re.search(r"callback|infeed|outfeed|\b(send|recv)\(", text[name])


@pytest.mark.parametrize("platform", ["tpu", "cuda"])
@pytest.mark.parametrize("estimator", [example.grpo_advantage, example.rloo_advantage])
def test_the_step_lowers_for_accelerators(platform, estimator):
    run = run_of(example, devices=1, estimator=estimator)
    state = jax.eval_shape(partial(state_of, example, run))
    exported = jax.export.export(example.train_step, platforms=[platform])(state, run=run)
    assert exported.platforms == (platform,)
    assert "callback" not in exported.mlir_module()
