"""The policy-gradient example: task, policy and sampler."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.examples.small_policy import RUN, example, policy_of, small, state_of


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


@pytest.mark.slow
def test_decoding_with_the_cache_is_the_full_forward_pass(params, sampled):
    sequence, expected_logits = whole_logits(params, *sampled[:2])
    cache = empty_cache(len(sequence))
    for position in range(small.CONTEXT):
        logits, cache = extend(params, sequence[:, position, None], cache, position)
        np.testing.assert_allclose(logits[:, 0], expected_logits[:, position], atol=5e-5)


@pytest.mark.slow
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
