"""How far log-probabilities of the sampler are from the trainer's: all families, both types.

    python -m pytest tests/benchmarks/test_logp_difference.py -s -p no:xdist

Decoding reads one token at a time, training whole rows: in bfloat16 their sums are rounded at
different places. Width 128, vocabulary 512, 64 completions of 32 tokens; random matrices of the
usual size, and of ten times it, which make distributions sharp. Printed are family, type, size,
temperature, and the mean, median, 99th percentile and maximum in nats.
"""

import jax
import numpy as np
import pytest

from tests.model.families import ALL, family
from tests.sampler.completions import trainer_logprobs
from twinkle_jax.model import init_params, parse_config
from twinkle_jax.rollout import training_batch
from twinkle_jax.sampler import Sampling, generate
from twinkle_jax.training import score_batch

WIDE = {"hidden_size": 128, "intermediate_size": 512, "vocab_size": 512}


def wide(name):
    """The keys of a family's `config.json`, for these sizes."""
    keys = family(name) | WIDE
    if "vocab_size_per_layer_input" in keys:
        keys["vocab_size_per_layer_input"] = keys["vocab_size"]
    return keys


def parameters(config, size):
    """Draw parameters as for training from scratch, with matrices of that many times the size."""

    def grow(path, leaf):
        return leaf * size if path[-1].key in ("kernel", "embedding") else leaf

    return jax.tree_util.tree_map_with_path(grow, init_params(jax.random.key(0), config))


@pytest.mark.parametrize("name", ["qwen3_moe", "qwen3_5_moe_text", "gpt_oss"])
def test_difference_with_the_experts_of_the_sampler(name):
    """In bfloat16, at temperature 1; printed too: the share of tokens with other experts."""
    config = parse_config(wide(name))
    prompts = np.random.default_rng(0).integers(3, 512, (64, 16)).astype(np.int32)
    mask = np.ones_like(prompts, bool)
    options = {"max_new_tokens": 32, "compute_dtype": "bfloat16", "keep_routing": True}
    for size in (1, 10):
        params = parameters(config, size)
        drawn = generate(params, config, prompts, mask, jax.random.key(1), Sampling(1.0), **options)
        replayed = training_batch(prompts, mask, drawn)
        for how, batch in (("", replayed._replace(routing=None)), (", replayed", replayed)):
            scores = score_batch(params, batch, config, compute_dtype="bfloat16", with_routing=True)
            is_drawn = np.asarray(batch.labels) != -100
            apart = np.abs(np.asarray(scores.logps) - np.asarray(batch.old_logps))[is_drawn]
            other = np.asarray(scores.routing) != np.asarray(replayed.routing)
            share = other[:, : prompts.shape[1] + 31].any(axis=(2, 3)).mean()
            mean, high, most = apart.mean(), *np.quantile(apart, [0.99, 1])
            print(
                f"\n| {name}{how} | {size} | {share:.2g} | {mean:.2g} | {high:.2g} | {most:.2g} |",
                end="",
            )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ALL)
def test_difference(name, dtype):
    config = parse_config(wide(name))
    prompts = np.random.default_rng(0).integers(3, 512, (64, 16)).astype(np.int32)
    for size in (1, 10):
        params = parameters(config, size)
        for temperature in (0.7, 1.0, 1.3):
            drawn = generate(
                params,
                config,
                prompts,
                None,
                jax.random.key(1),
                Sampling(temperature),
                max_new_tokens=32,
                compute_dtype=dtype,
            )
            expected = trainer_logprobs(
                params, config, prompts.tolist(), drawn, temperature, compute_dtype=dtype
            )
            apart = np.abs(np.asarray(drawn.logprobs) - expected)
            mean, middle, high, most = apart.mean(), *np.quantile(apart, [0.5, 0.99, 1])
            print(
                f"\n| {name} | {dtype} | {size} | {temperature} "
                f"| {mean:.2g} | {middle:.2g} | {high:.2g} | {most:.2g} |",
                end="",
            )
