r"""Twinkle's two training loops, with the imports renamed, on a small checkpoint.

    python examples/twinkle_loop.py --form responses --advantage grpo --steps 12

Both loops are those of Twinkle's documentation. One goes over responses and sequences, with GRPO on
4 samples of a prompt; the other takes `response.inputs`, `response.trajectories` and
`batch.ground_truths`, with RLOO on 8. With `--sampler jax`, the default, completions come from the
policy that is trained, and `sync_weights` has nothing to do. With `--sampler vllm` a server
samples:

    python examples/twinkle_loop.py --checkpoint policy --steps 0  # writes the checkpoint
    VLLM_SERVER_DEV_MODE=1 python -m vllm.entrypoints.openai.api_server --model policy \
        --dtype float32 --logprobs-mode processed_logprobs  # in an environment with vLLM
    python examples/twinkle_loop.py --checkpoint policy --sampler vllm \
        --base_url http://127.0.0.1:8000

The policy is a Qwen3 with random weights, and shorter answers get higher rewards, which it learns
in a few steps. With a checkpoint that can calculate, take `MathReward()` instead.

Left out: evaluation, checkpoints, and the rest of what `twinkle-jax train` does.
"""

import argparse
import tempfile
from collections.abc import Iterator
from pathlib import Path

import jax

from twinkle_jax.advantage import Advantage, get_advantage
from twinkle_jax.data import (
    ArithmeticTask,
    PromptBatch,
    PromptLoader,
    SamplingParams,
    Template,
    small_tokenizer,
)
from twinkle_jax.model import Decoder, init_params, parse_config, save_pretrained
from twinkle_jax.reward import FunctionReward
from twinkle_jax.sampler import JaxSampler, vLLMSampler
from twinkle_jax.twinkle.model import TransformersModel

Sampler = JaxSampler | vLLMSampler

ROOM = 8  # tokens of a completion
POLICY = {
    "model_type": "qwen3",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "head_dim": 32,  # vLLM has no smaller heads
    "max_position_embeddings": 64,
}
brevity = FunctionReward(lambda answer, truth: 1 - len(answer) / ROOM)


def write_checkpoint(directory: str | Path) -> None:
    """Write a policy of random weights, and a tokenizer of one token a character."""
    tokenizer = small_tokenizer("0123456789+-*()=")
    config = parse_config({**POLICY, "vocab_size": len(tokenizer)})
    save_pretrained(Decoder(config, init_params(jax.random.key(0), config)), directory)
    tokenizer.save_pretrained(directory)


def make_actor(checkpoint: str | Path) -> TransformersModel:
    """Load the policy, and set its loss and optimizer."""
    actor = TransformersModel(model_id=checkpoint, dtype="float32")
    actor.set_template(Template(checkpoint))
    actor.set_loss("grpo")
    actor.set_optimizer("AdamW", lr=3e-3)
    return actor


def make_sampler(actor: TransformersModel, checkpoint: Path, base_url: str | None) -> Sampler:
    """Sample from the actor itself, or from a server that has its checkpoint."""
    if base_url is None:
        return JaxSampler(model=actor)
    weights = checkpoint.with_name(checkpoint.name + "-weights")
    sampler = vLLMSampler(model_id=checkpoint, base_url=base_url, shared_dir=weights)
    sampler.sync_weights(actor)  # whatever an earlier run has left there
    return sampler


def over_responses(
    actor: TransformersModel,
    sampler: Sampler,
    batches: Iterator[PromptBatch],
    advantage_fn: Advantage,
    steps: int,
) -> list[float]:
    """Go over responses and their sequences; return the mean reward of every step."""
    params = SamplingParams(max_tokens=ROOM)
    history = []
    for _, batch in zip(range(steps), batches, strict=False):
        sample_response = sampler.sample(batch, params, num_samples=4)
        sequences = [s for response in sample_response for s in response.sequences]
        input_data = [sequence.new_input_feature for sequence in sequences]
        old_logps = [[pairs[0][1] for pairs in sequence.logprobs or ()] for sequence in sequences]
        rewards = brevity(sample_response.trajectories, batch.ground_truths)

        advantages = advantage_fn(rewards, num_generations=4)

        actor.forward_backward(inputs=input_data, advantages=advantages, old_logps=old_logps)
        actor.clip_grad_and_step()
        sampler.sync_weights(actor)
        history.append(sum(rewards) / len(rewards))
    return history


def whole_response(
    actor: TransformersModel,
    sampler: Sampler,
    batches: Iterator[PromptBatch],
    advantage_fn: Advantage,
    steps: int,
) -> list[float]:
    """Use `response.inputs` and `.trajectories`; return the mean reward of every step."""
    history = []
    for _, batch in zip(range(steps), batches, strict=False):
        response = sampler.sample(batch, SamplingParams(max_tokens=ROOM), num_samples=8)

        rewards = brevity(response.trajectories, batch.ground_truths)

        advantages = advantage_fn(rewards, num_generations=8)

        actor.forward_backward(inputs=response.inputs, advantages=advantages)
        actor.clip_grad_and_step()
        sampler.sync_weights(actor)
        history.append(sum(rewards) / len(rewards))
    return history


FORMS = {"responses": over_responses, "whole": whole_response}


def run(
    form: str,
    advantage: str,
    steps: int,
    *,
    checkpoint: Path | None = None,
    base_url: str | None = None,
) -> list[float]:
    """Train a checkpoint, one made on the spot by default, by one of the two loops."""
    with tempfile.TemporaryDirectory() as made:
        place = checkpoint or Path(made)
        if not (place / "config.json").exists():
            write_checkpoint(place)
        actor = make_actor(place)
        sampler = make_sampler(actor, place, base_url)
    batches = PromptLoader(ArithmeticTask(1), batch_size=8, seed=0)
    return FORMS[form](actor, sampler, batches, get_advantage(advantage), steps)


def main() -> None:
    """Read the command line, train, and show the rewards."""
    parser = argparse.ArgumentParser(description="Twinkle's training loops in JAX.")
    parser.add_argument("--form", choices=FORMS, default="responses")
    parser.add_argument("--advantage", default="grpo", help="grpo, rloo, ...")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--checkpoint", type=Path, help="where it is, or is to be written")
    parser.add_argument("--sampler", choices=("jax", "vllm"), default="jax")
    parser.add_argument("--base_url", help="where a vLLM server has the checkpoint")
    arguments = parser.parse_args()
    if (arguments.sampler == "vllm") != (arguments.base_url is not None):
        parser.error("--sampler vllm and --base_url must be given together")
    if arguments.base_url and not arguments.checkpoint:
        parser.error("--sampler vllm needs --checkpoint, the one that the server has")
    rewards = run(
        arguments.form,
        arguments.advantage,
        arguments.steps,
        checkpoint=arguments.checkpoint,
        base_url=arguments.base_url,
    )
    for step, reward in enumerate(rewards):
        print(f"step {step:2d}  reward {reward:.2f}")


if __name__ == "__main__":
    main()
