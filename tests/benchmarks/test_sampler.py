"""What sampling costs: `pytest -s tests/benchmarks/test_sampler.py` (extras oracle).

A small random Qwen3 completes 8 prompts of 16 tokens, 8 times each, by 32 tokens, in float32,
against transformers' `generate` and, where it is installed, Tunix 0.1.7's sampler; and many prompts
with limits from 8 to 256 tokens, through slots against one full batch after the other. Rounds are
interleaved, because a shared machine changes its speed; medians of tokens a second and our ratio
are printed.
"""

import importlib.util
import statistics
import time

import pytest

from tests.benchmarks.peers.task import COMPLETION, PROMPT, PROMPTS, SAMPLES, SHAPE

CONFIG = {"model_type": "qwen3", **SHAPE}


def ours(vocab, sampling):
    import jax

    from twinkle_jax.model import init_params, parse_config
    from twinkle_jax.sampler import generate

    config = parse_config({**CONFIG, "vocab_size": vocab})
    params = init_params(jax.random.key(0), config)
    prompts = jax.random.randint(jax.random.key(1), (PROMPTS, PROMPT), 0, vocab)
    options = {"num_samples": SAMPLES, "max_new_tokens": COMPLETION}
    calls = iter(range(1_000_000))

    def run():
        key = jax.random.key(next(calls))
        drawn = generate(params, config, prompts, None, key, sampling, **options)
        return int(jax.block_until_ready(drawn).lengths.sum())

    return run


def spread_of(vocab, temperature):
    """The entropy after each prompt, and the fewest tokens with nine tenths of the probability."""
    import jax
    import jax.numpy as jnp

    from twinkle_jax.model import hidden_states, init_params, output_matrix, parse_config

    config = parse_config({**CONFIG, "vocab_size": vocab})
    params = init_params(jax.random.key(0), config)
    prompts = jax.random.randint(jax.random.key(1), (PROMPTS, PROMPT), 0, vocab)
    logits = hidden_states(params, config, prompts)[:, -1] @ output_matrix(params) / temperature
    logprobs = jax.nn.log_softmax(logits)
    entropies = -jnp.sum(jnp.exp(logprobs) * logprobs, axis=-1)
    reached = jnp.cumsum(jnp.exp(jnp.sort(logprobs, axis=-1, descending=True)), axis=-1)
    return entropies.tolist(), (1 + jnp.sum(reached < 0.9, axis=-1)).tolist()


def theirs(vocab, **filters):
    import torch
    import transformers

    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(**CONFIG, vocab_size=vocab)
    model = transformers.AutoModelForCausalLM.from_config(config).float().eval()
    prompts = torch.randint(0, vocab, (PROMPTS, PROMPT))

    def run():
        with torch.no_grad():
            drawn = model.generate(
                prompts,
                attention_mask=torch.ones_like(prompts),
                do_sample=True,
                temperature=1.0,
                **{"top_k": 0, "top_p": 1.0, **filters},
                num_return_sequences=SAMPLES,
                max_new_tokens=COMPLETION,
                min_new_tokens=COMPLETION,
                eos_token_id=None,
                pad_token_id=0,
            )
        return drawn[:, PROMPT:].numel()

    return run


def tunix(vocab):
    """Tunix's own sampler: every one of the 64 rows reads its prompt."""
    from tunix.generate.sampler import CacheConfig, Sampler

    from tests.benchmarks.peers.task import make_tokenizer, prompts
    from tests.benchmarks.peers.tunix_grpo import Words, make_model

    sampler = Sampler(
        make_model(vocab),
        Words(make_tokenizer(vocab)),
        CacheConfig(
            cache_size=PROMPT + COMPLETION,
            num_layers=CONFIG["num_hidden_layers"],
            num_kv_heads=CONFIG["num_key_value_heads"],
            head_dim=CONFIG["head_dim"],
        ),
    )
    rows = [prompt for prompt in prompts(vocab)[:PROMPTS] for _ in range(SAMPLES)]
    calls = iter(range(1_000_000))

    def run():
        import jax

        drawn = sampler(
            rows,
            max_generation_steps=COMPLETION,
            max_prompt_length=PROMPT,
            temperature=1.0,
            top_p=1.0,
            seed=jax.random.PRNGKey(next(calls)),
            return_logprobs=True,
        )
        jax.block_until_ready(drawn.tokens)
        return len(rows) * COMPLETION

    return run


def interleaved(contestants, rounds, clock=time.perf_counter):
    """Tokens a second, median of rounds in which each contestant runs once."""
    for run in contestants.values():
        run()
        run()
    speeds = {name: [] for name in contestants}
    for _ in range(rounds):
        for name, run in contestants.items():
            start = clock()
            tokens = run()
            speeds[name].append(tokens / (clock() - start))
    return {name: statistics.median(values) for name, values in speeds.items()}


@pytest.mark.parametrize("vocab", [512, 32_768])
@pytest.mark.parametrize("filters", [{}, {"top_k": 50, "top_p": 0.9}], ids=["plain", "filtered"])
def test_tokens_a_second_against_transformers(vocab, filters):
    pytest.importorskip("transformers", reason="pip install 'twinkle-jax[oracle]'")
    from twinkle_jax.sampler import Sampling

    contestants = {
        "twinkle_jax": ours(vocab, Sampling(**filters)),
        "transformers": theirs(vocab, **filters),
    }
    if not filters and importlib.util.find_spec("tunix"):
        contestants["Tunix"] = tunix(vocab)
    speeds = interleaved(contestants, rounds=15 if vocab == 512 else 7)
    print(f"\nvocabulary {vocab} {filters}")
    for name, speed in speeds.items():
        print(f"| {name} | {speed:,.0f} tokens/s | {speeds['twinkle_jax'] / speed:.2f} |")


@pytest.mark.parametrize("vocab", [32_768, 151_936])
@pytest.mark.parametrize("temperature", [1.0, 0.07, 0.05])
def test_what_filters_cost(vocab, temperature):
    """In processor time. A random policy is nearly flat; at 0.05 it has some 3 nats of entropy."""
    from twinkle_jax.sampler import Sampling

    entropies, nuclei = spread_of(vocab, temperature)

    both = {"top_k": 50, "top_p": 0.9}
    filters = [{}, both, {"top_k": 50}, {"top_p": 0.9}, {"top_p": 0.95}, {"min_p": 0.05}]
    contestants = {
        str(case): ours(vocab, Sampling(temperature=temperature, **case)) for case in filters
    }
    speeds = interleaved(contestants, rounds=9, clock=time.process_time)
    print(
        f"\nvocabulary {vocab}, temperature {temperature}: {min(entropies):.1f} to "
        f"{max(entropies):.1f} nats, {min(nuclei)} to {max(nuclei)} tokens make up 0.9"
    )
    for name, speed in speeds.items():
        print(f"| {name} | {speed:,.0f} tokens/s | {speeds['{}'] / speed:.2f} times |")


def test_slots_against_one_batch_after_the_other():
    import jax
    import numpy as np

    from twinkle_jax.model import init_params, parse_config
    from twinkle_jax.sampler import generate, generate_many

    config = parse_config({**CONFIG, "vocab_size": 512})
    params = init_params(jax.random.key(0), config)
    rng = np.random.default_rng(0)
    rows, slots = 512, 64
    prompts = rng.integers(0, 512, (rows, PROMPT)).astype(np.int32)
    limits = rng.integers(8, 257, rows)
    keys = jax.random.split(jax.random.key(0), rows)

    def one_batch_after_the_other():
        drawn = [
            generate(
                params,
                config,
                prompts[i : i + slots],
                None,
                keys[i : i + slots],
                max_new_tokens=256,
                max_tokens=limits[i : i + slots],
            )
            for i in range(0, rows, slots)
        ]
        jax.block_until_ready(drawn)
        return int(limits.sum())

    def through_slots():
        lists = [list(map(int, prompt)) for prompt in prompts]
        options = {"max_new_tokens": 256, "max_tokens": limits, "slots": slots}
        return int(generate_many(params, config, lists, keys, **options).lengths.sum())

    speeds = interleaved({"slots": through_slots, "batches": one_batch_after_the_other}, rounds=3)
    ratio = speeds["slots"] / speeds["batches"]
    print(f"\nslots {speeds['slots']:,.0f}, batches {speeds['batches']:,.0f}: ratio {ratio:.2f}")


@pytest.mark.parametrize("rows", [8, 16, 64])
def test_layers_one_by_one_against_a_stack(rows):
    """Steps of decoding on a CPU, where XLA copies a layer out of a stack before it reads it."""
    import jax
    import jax.numpy as jnp

    from twinkle_jax.model import decode_step, init_params, parse_config, prefill, unstack_layers

    config, steps = parse_config({**CONFIG, "vocab_size": 512}), 20
    stacked = init_params(jax.random.key(0), config)
    tokens = jnp.ones((rows, PROMPT), jnp.int32)
    _, cache = prefill(stacked, config, tokens, max_length=64)

    def contestant(layout):
        @jax.jit
        def draw(params, cache):
            params, cache = layout(params), layout(cache)

            def step(_, carry):
                hidden, cache = decode_step(params, config, *carry)
                return jnp.argmax(hidden, axis=1).astype(jnp.int32), cache

            return jax.lax.fori_loop(0, steps, step, (tokens[:, 0], cache))

        def run():
            jax.block_until_ready(draw(stacked, cache))
            return rows * steps

        return run

    contestants = {"stack": contestant(lambda x: x), "one by one": contestant(unstack_layers)}
    speeds = interleaved(contestants, rounds=25)
    print(f"\n{rows} rows: {speeds['stack'] / speeds['one by one']:.2f} of the time in a stack")
