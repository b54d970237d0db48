"""The policy-gradient example: the update, and the one compiled step around it."""

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

from tests.examples import load
from tests.examples.small_policy import RUN, example, policy_of, run_of, small, state_of

COLLECTIVE = re.compile(
    r" (all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute)(?:-start)?\("
)

pytestmark = pytest.mark.exhaustive


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
