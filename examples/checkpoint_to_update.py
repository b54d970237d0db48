"""From a Hugging Face checkpoint to a better one: load, sample, score, advantages, update, save.

    python examples/checkpoint_to_update.py --steps 100 --output trained

The policy is a tiny Qwen3 with random weights, written to disk as a checkpoint on the spot, so that
everything after that is the path of a real one: `load_pretrained` reads it, `prefill` and
`decode_step` sample from its cache, a function scores the completions, `grpo_advantage` compares
those of one prompt, `grad_step` and `apply_gradients` update it, `save_pretrained` writes it.

The task is to count: after the digit n, say n + 1, n + 2 and n + 3, modulo ten. A completion is
worth the share of its tokens that are right, and nothing else about the task reaches the policy.

Left out: a tokenizer (token i is the digit i), prompts and completions of different lengths, a
penalty that holds the policy near a reference, held-out prompts, resuming.
"""

import argparse
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Int

from twinkle_jax.advantage import grpo_advantage
from twinkle_jax.data import Batch
from twinkle_jax.loss import GRPOLoss
from twinkle_jax.model import (
    Decoder,
    DecoderConfig,
    decode_step,
    init_params,
    load_pretrained,
    output_logits,
    parse_config,
    prefill,
    save_pretrained,
    take_rows,
)
from twinkle_jax.training import apply_gradients, grad_step, train_state

START = 10  # the token that begins every prompt
PROMPTS, SAMPLES, LENGTH = 10, 16, 3
TINY_QWEN3 = {
    "model_type": "qwen3",
    "vocab_size": 11,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
}


@partial(jax.jit, static_argnames="config")
def sample(
    params: Any, prompts: Int[Array, "prompts time"], key: Array, *, config: DecoderConfig
) -> tuple[Int[Array, "rows length"], Float[Array, "rows length"]]:
    """Draw completions, and the log-probability of each of their tokens when it was drawn."""
    last, cache = prefill(params, config, prompts, max_length=prompts.shape[1] + LENGTH)
    rows = jnp.repeat(jnp.arange(len(prompts)), SAMPLES)  # each prompt is read only once

    def draw(carry: Any, position: Array) -> Any:
        hidden, cache = carry
        logprobs = jax.nn.log_softmax(output_logits(params, config, hidden))
        tokens = jax.random.categorical(jax.random.fold_in(key, position), logprobs)
        chosen = jnp.take_along_axis(logprobs, tokens[:, None], axis=1)[:, 0]
        return decode_step(params, config, tokens, cache), (tokens, chosen)

    _, (tokens, logprobs) = jax.lax.scan(
        draw, (last[rows], take_rows(cache, rows)), jnp.arange(LENGTH)
    )
    return tokens.T, logprobs.T


def reward(
    prompts: Int[Array, "rows time"], completions: Int[Array, "rows length"]
) -> Float[Array, " rows"]:
    """Give the share of tokens that count on from the prompt's last digit."""
    right = (prompts[:, -1:] + jnp.arange(1, LENGTH + 1)[None]) % 10
    return jnp.mean(completions == right, axis=1, dtype=jnp.float32)


def to_batch(
    prompts: Int[Array, "rows time"],
    completions: Int[Array, "rows length"],
    logprobs: Float[Array, "rows length"],
    advantages: Float[Array, " rows"],
) -> Batch:
    """Lay rows out for the update: at each position the label is the token that follows."""
    tokens = jnp.concatenate([prompts, completions[:, :-1]], axis=1)
    before = ((0, 0), (prompts.shape[1] - 1, 0))
    return Batch(
        tokens=tokens,
        labels=jnp.pad(completions, before, constant_values=-100),  # -100: no loss here
        advantages=jnp.broadcast_to(advantages[:, None], tokens.shape),
        old_logps=jnp.pad(logprobs, before),
    )


def train(checkpoint: Path, output: Path, steps: int, seed: int) -> list[float]:
    """Load the policy, train it, save it; return the mean reward of every step."""
    decoder = load_pretrained(checkpoint, dtype="float32")  # small updates are lost in 16 bits
    config, optimizer = decoder.config, optax.adam(1.0)  # the rate goes to apply_gradients
    state = train_state(decoder.params, optimizer)
    digits = jnp.arange(PROMPTS, dtype=jnp.int32)
    prompts = jnp.stack([jnp.full_like(digits, START), digits], axis=1)
    rows = jnp.repeat(prompts, SAMPLES, axis=0)  # the samples of a prompt are adjacent
    rewards = []
    for step in range(steps):
        key = jax.random.fold_in(jax.random.key(seed), step)  # no two steps share their noise
        completions, logprobs = sample(state.params, prompts, key, config=config)
        scores = reward(rows, completions)
        advantages = grpo_advantage(scores, num_generations=SAMPLES)
        batch = to_batch(rows, completions, logprobs, advantages)
        state, _ = grad_step(state, batch, config, GRPOLoss())
        state, _ = apply_gradients(state, optimizer, learning_rate=3e-3, max_grad_norm=1.0)
        rewards.append(float(jnp.mean(scores)))
        if step % 10 == 0 or step == steps - 1:
            print(f"step {step:3d}  reward {rewards[-1]:.2f}")
    save_pretrained(Decoder(config, state.params), output)
    return rewards


def main() -> None:
    """Read the command line, make the checkpoint, and train."""
    parser = argparse.ArgumentParser(description="Train a tiny checkpoint to count.")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, help="where to save what was trained")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        config = parse_config(TINY_QWEN3)
        first = Path(folder) / "tiny-qwen3"
        save_pretrained(Decoder(config, init_params(jax.random.key(1), config)), first)
        output = arguments.output or Path(folder) / "trained"
        train(first, output, arguments.steps, arguments.seed)
        kept = arguments.output is not None
        print(f"saved to {output}" if kept else "--output DIRECTORY keeps what was trained")


if __name__ == "__main__":
    main()
