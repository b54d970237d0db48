"""Completions: the trainer's log-probabilities, where rows end, and that each is by itself."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.model.families import NAMES, batch, config_of, each, nudged, params_of
from tests.sampler.completions import PROMPTS, trainer_logprobs
from twinkle_jax.model import init_params
from twinkle_jax.sampler import LENGTH, STOP, Sampling, generate


def root():
    """Keys remember that they were used, so every call gets one of its own."""
    return jax.random.key(0)


def complete(name, rows=PROMPTS, key=None, sampling=None, *, params=None, **options):
    """Compiled once for a number of rows: four prompts, two samples, six and eight tokens."""
    return generate(
        params_of(name) if params is None else params,
        config_of(name),
        *batch(rows, 6, options.pop("side", "left")),
        root() if key is None else key,
        Sampling() if sampling is None else sampling,
        **{"max_new_tokens": 8, "num_samples": 2} | options,
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", each(NAMES, 2))
def test_log_probabilities_are_the_trainers(name):
    """To 1e-5, or for linear attention to what a rounding of the embeddings changes, four times."""
    config = config_of(name)
    likely = init_params(jax.random.key(7), config)
    likely = jax.tree.map(lambda x: 4 * x if x.ndim > 2 else x, likely)
    rows = [p for p in PROMPTS for _ in range(2)]
    for temperature in (0.7, 1.0, 1.3):
        for params in (likely, params_of(name)):
            drawn = complete(name, params=params, sampling=Sampling(temperature))
            expected = trainer_logprobs(params, config, rows, drawn, temperature)
            most = 1e-5
            if params is not likely and config.delta_net is not None:
                for factor in (1 + 2**-23, 1 - 2**-23):
                    near = nudged(params, factor)
                    moved = trainer_logprobs(near, config, rows, drawn, temperature)
                    most = max(most, 4 * np.abs(moved - expected).max())
            np.testing.assert_allclose(drawn.logprobs, expected, rtol=0, atol=most)
            np.testing.assert_array_equal(drawn.sampling_logprobs, drawn.logprobs)
            assert np.all(drawn.mask) and np.all(drawn.finish_reasons == LENGTH)


@pytest.mark.slow
def test_filters_draw_from_what_is_left_and_say_so():
    """Beside the trainer's log-probability stands that of the distribution drawn from."""
    from tests.model.reference import reference_logits

    sampling = Sampling(0.8, top_k=6, top_p=0.9, min_p=0.05, repetition_penalty=1.2)
    drawn = complete("qwen3", sampling=sampling)
    rows = [p for p in PROMPTS for _ in range(2)]
    params, config = params_of("qwen3"), config_of("qwen3")
    expected = trainer_logprobs(params, config, rows, drawn, 0.8)
    np.testing.assert_allclose(drawn.logprobs, expected, rtol=0, atol=1e-5)
    for i, prompt in enumerate(rows[::3]):
        completion = np.asarray(drawn.tokens[3 * i]).tolist()
        logits = reference_logits(params, config, prompt + completion)
        for t, token in enumerate(completion):
            z = logits[len(prompt) + t - 1] / 0.8
            for old in {*prompt, *completion[:t]}:
                z[old] = z[old] / 1.2 if z[old] > 0 else z[old] * 1.2
            order = np.argsort(-z)[:6]
            p = np.exp(z[order]) / np.exp(z[order]).sum()
            order = order[np.concatenate([[0], np.cumsum(p)[:-1]]) < 0.9]
            order = order[z[order] >= z[order[0]] + np.log(0.05)]
            assert token in order
            left = z[token] - np.log(np.exp(z[order]).sum())
            np.testing.assert_allclose(drawn.sampling_logprobs[3 * i, t], left, atol=5e-5)


@pytest.mark.parametrize("name", each(NAMES))
def test_a_row_is_completed_as_it_would_be_alone(name):
    """At another index, in a larger batch, on the other side of its padding: its key decides."""
    keys = jax.random.split(root(), 8)
    together = complete(name, key=keys)
    for i in (1, 6):
        alone = complete(name, [PROMPTS[i // 2]], keys[i : i + 1], num_samples=1, side="right")
        np.testing.assert_array_equal(alone.tokens[0], together.tokens[i])
        np.testing.assert_allclose(alone.logprobs[0], together.logprobs[i], atol=1e-4)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", NAMES)
def test_a_row_is_completed_among_many_as_among_few(name):
    keys = jax.random.split(root(), 8)
    order = np.random.default_rng(0).integers(0, 8, 64)
    many = complete(name, [PROMPTS[i // 2] for i in order], keys[order], num_samples=1)
    together = complete(name, key=keys)
    np.testing.assert_array_equal(many.tokens, np.asarray(together.tokens)[order])


def test_rows_draw_from_their_own_noise_and_calls_from_their_own_key():
    prompts = [PROMPTS[0]] * 4
    rows = complete("qwen3", prompts).tokens
    assert len({tuple(row) for row in np.asarray(rows).tolist()}) == 8
    keys = jax.vmap(jax.random.fold_in, (None, 0))(root(), jnp.arange(8))
    np.testing.assert_array_equal(complete("qwen3", prompts, keys).tokens, rows)
    other = complete("qwen3", prompts, jax.random.key(1)).tokens
    assert not np.any(np.all(np.asarray(other) == np.asarray(rows), axis=1))


@pytest.mark.parametrize("impl", ["rbg", "unsafe_rbg"])
def test_keys_of_other_kinds_give_every_row_noise_of_its_own(impl):
    """Under `vmap` these draw by the key of the first row, which stays the same once it ends."""
    flat = jax.tree.map(jnp.zeros_like, params_of("qwen3"))
    limits = np.array([1, 8, 8, 8, 8, 8, 8, 8])
    together = complete("qwen3", key=jax.random.key(0, impl=impl), params=flat, max_tokens=limits)
    tokens = np.asarray(together.tokens)
    assert np.mean(tokens[1:, 1:] == tokens[1:, :-1]) < 0.2  # was 6/7: the same one again and again
    own = jnp.stack([jax.random.fold_in(jax.random.key(0, impl=impl), i) for i in range(8)])
    np.testing.assert_array_equal(complete("qwen3", key=own, params=flat).tokens[1:], tokens[1:])


def test_a_stop_token_ends_its_row_and_belongs_to_it():
    free = complete("qwen3")
    tokens = np.asarray(free.tokens)
    stops = [int(tokens[0, 3]), int(tokens[1, 5]), int(tokens[2, 0])]
    drawn = complete("qwen3", sampling=Sampling(stop_tokens=stops))
    for row, end in enumerate(tokens):
        hits = np.flatnonzero(np.isin(end, stops))
        length = hits[0] + 1 if hits.size else 8
        assert drawn.lengths[row] == length
        assert drawn.finish_reasons[row] == (STOP if hits.size else LENGTH)
        np.testing.assert_array_equal(drawn.mask[row], np.arange(8) < length)
        np.testing.assert_array_equal(drawn.tokens[row, :length], end[:length])
        assert not np.any(drawn.tokens[row, length:]) and not np.any(drawn.logprobs[row, length:])
        assert np.all(np.asarray(drawn.logprobs[row, :length]) < 0)


def test_a_stop_token_at_the_limit_is_a_stop():
    row = np.asarray(complete("qwen3").tokens[0]).tolist()
    assert row[7] not in row[:7]
    drawn = complete("qwen3", sampling=Sampling(stop_tokens=[row[7]]))
    assert drawn.finish_reasons[0] == STOP and drawn.lengths[0] == 8


def test_token_0_is_a_token_like_any_other():
    """What pads completions may be drawn; only the mask says what is padding."""
    zeros = 0
    for seed in range(4):
        drawn = complete("qwen3", key=jax.random.key(seed))
        zeros += np.count_nonzero(np.asarray(drawn.tokens) == 0)
        assert np.all(drawn.mask) and np.all(np.asarray(drawn.logprobs) < 0)
    assert zeros


def test_every_row_may_have_its_own_limit():
    free = complete("qwen3")
    by_prompt = complete("qwen3", max_tokens=[1, 8, 3, 5])
    np.testing.assert_array_equal(by_prompt.lengths, [1, 1, 8, 8, 3, 3, 5, 5])
    limits = np.array([2, 3, 4, 5, 6, 7, 8, 1])
    by_row = complete("qwen3", max_tokens=limits)
    np.testing.assert_array_equal(by_row.lengths, limits)
    assert np.all(complete("qwen3", max_tokens=2).lengths == 2)
    np.testing.assert_array_equal(by_row.tokens, np.where(by_row.mask, free.tokens, 0))


def test_greedy_is_certain_and_repeats():
    drawn = complete("qwen3", sampling=Sampling(0.0, top_k=3))
    np.testing.assert_array_equal(drawn.tokens[0], drawn.tokens[1])
    assert not np.any(drawn.sampling_logprobs)
    likeliest = complete("qwen3", sampling=Sampling(top_k=1))
    np.testing.assert_array_equal(likeliest.tokens, drawn.tokens)
    np.testing.assert_allclose(likeliest.logprobs, drawn.logprobs, atol=1e-6)


def test_no_value_compiles_anything_anew(compilations):
    values = [
        Sampling(),
        Sampling(0, top_k=3, stop_tokens=[1, 2, 3]),
        Sampling(jnp.float32(1.3), -1, 0.5, 0.1, 1.5, np.array([7])),
        Sampling(np.float64(0.7), np.int64(4), jnp.float32(0.9)),
    ]
    warm = [complete("qwen3", sampling=s, max_tokens=m) for s in values for m in (3, [1, 2, 3, 4])]
    jax.block_until_ready(warm)
    compilations.clear()
    for sampling in values:
        changed = sampling._replace(temperature=0.9, top_k=7, min_p=0.01, stop_tokens=[5, 6])
        jax.block_until_ready(complete("qwen3", sampling=changed, max_tokens=5))
    assert not compilations


def test_what_a_device_holds_is_not_looked_at_but_gives_nan():
    rows = [[5, 6], [5, 7], [5, 99], []]
    drawn = complete("qwen3", rows)
    assert np.all(np.isfinite(drawn.logprobs[:4])) and np.all(np.isnan(drawn.logprobs[4:]))
    filtered = complete("qwen3", rows, sampling=Sampling(top_p=0.5))
    assert np.all(np.isnan(filtered.sampling_logprobs[4:]))


def test_adapters_are_laid_over_the_frozen_parameters():
    params = params_of("qwen3")
    top = {"norm": params["norm"]}
    rest = {name: tree for name, tree in params.items() if name != "norm"}
    drawn = complete("qwen3", params=top, frozen=rest)
    np.testing.assert_array_equal(drawn.tokens, complete("qwen3").tokens)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["qwen3", "qwen3_5_text"])
def test_in_bfloat16_the_difference_to_the_trainer_is_small(name):
    drawn = complete(name, compute_dtype="bfloat16")
    rows = [p for p in PROMPTS for _ in range(2)]
    expected = trainer_logprobs(
        params_of(name), config_of(name), rows, drawn, 1.0, compute_dtype="bfloat16"
    )
    difference = np.abs(np.asarray(drawn.logprobs) - expected)
    assert np.median(difference) < 0.05 and drawn.logprobs.dtype == np.float32


BAD = [
    ({"prompts": np.zeros((2, 2))}, TypeError),
    ({"prompts": [1, 2]}, ValueError),
    ({"prompts": [[1, 2], [3, 48]]}, ValueError),
    ({"prompts": [[1, 2], [3, 4]], "prompt_mask": [[True] * 2, [False] * 2]}, ValueError),
    ({"prompt_mask": [[True], [True]]}, ValueError),
    ({"prompt_mask": [[1, 1], [1, 1]]}, TypeError),
    ({"key": 0}, TypeError),
    ({"key": jax.random.split(root(), 3)}, ValueError),
    ({"max_new_tokens": 0}, ValueError),
    ({"num_samples": 0}, ValueError),
    ({"max_tokens": 5}, ValueError),
    ({"max_tokens": [1, 0]}, ValueError),
    ({"max_tokens": [1.0, 2.0]}, TypeError),
    ({"max_tokens": [1, 2, 3]}, ValueError),
    ({"temperature": -0.5}, ValueError),
    ({"temperature": float("nan")}, ValueError),
    ({"temperature": "hot"}, TypeError),
    ({"top_p": 0.0}, ValueError),
    ({"top_p": 1.5}, ValueError),
    ({"top_k": -2}, ValueError),
    ({"top_k": 1.5}, TypeError),
    ({"min_p": 2.0}, ValueError),
    ({"repetition_penalty": 0.0}, ValueError),
    ({"stop_tokens": [-1]}, ValueError),
    ({"stop_tokens": [1.5]}, TypeError),
    ({"stop_tokens": [2**32 + 5]}, ValueError),
    ({"stop_tokens": None}, TypeError),
    ({"prompts": [[1, 2], [3]]}, ValueError),
    ({"num_samples": 2.5}, TypeError),
    ({"max_new_tokens": True}, TypeError),
    ({"slots": "2"}, TypeError),
    ({"refill": 1.5}, TypeError),
]


@pytest.mark.parametrize(("change", "error"), BAD, ids=str)
def test_errors_name_the_argument(change, error):
    arguments = {"prompts": [[1, 2], [3, 4]], "prompt_mask": None, "key": root(), **change}
    settings = {name: arguments.pop(name) for name in Sampling._fields if name in arguments}
    arguments = {"max_new_tokens": 4, **arguments, "sampling": Sampling(**settings)}
    with pytest.raises(error, match=f"{next(iter(change))} must"):
        generate(params_of("qwen3"), config_of("qwen3"), **arguments)


def test_a_top_k_beyond_int32_keeps_all():
    """Cast to int32 it was 1."""
    drawn = complete("qwen3", sampling=Sampling(top_k=2**32 + 1))
    np.testing.assert_array_equal(drawn.tokens, complete("qwen3", sampling=Sampling()).tokens)
