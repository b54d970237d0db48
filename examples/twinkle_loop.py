"""Twinkle's two training loops, with the imports renamed, on a checkpoint made on the spot.

    python examples/twinkle_loop.py --form responses --advantage grpo --steps 12

Both loops are those of Twinkle's documentation. One goes over responses and sequences, with GRPO on
4 samples of a prompt; the other takes `response.inputs`, `response.trajectories` and
`batch.ground_truths`, with RLOO on 8. The sampler reads the policy that is trained, so there are no
weights to hand over; `JaxSampler(model_id=…)` and `sync_weights(actor)` keep a copy instead.

The policy is a small Qwen3 with random weights, and an answer is worth the more the shorter it is,
which it learns in a few steps. With a checkpoint that can calculate, take `MathReward()` instead.

Left out: evaluation, checkpoints, everything that `twinkle-jax train` does besides.
"""

import argparse
import tempfile
from collections.abc import Iterator

from twinkle_jax.advantage import Advantage, get_advantage
from twinkle_jax.data import ArithmeticTask, PromptBatch, PromptLoader, SamplingParams, Template
from twinkle_jax.model import TransformersModel
from twinkle_jax.reward import FunctionReward
from twinkle_jax.sampler import JaxSampler
from twinkle_jax.training import save_policy, small_policy

ROOM = 8  # tokens of a completion
brevity = FunctionReward(lambda answer, truth: 1 - len(answer) / ROOM)


def make_actor(checkpoint: str) -> TransformersModel:
    """Load the policy, and say how it learns."""
    actor = TransformersModel(model_id=checkpoint, dtype="float32")
    actor.set_template(Template(checkpoint))
    actor.set_loss("grpo")
    actor.set_optimizer("AdamW", lr=3e-3)
    return actor


def over_responses(
    actor: TransformersModel, batches: Iterator[PromptBatch], advantage_fn: Advantage, steps: int
) -> list[float]:
    """Go over responses and their sequences; return the mean reward of every step."""
    sampler = JaxSampler(model=actor)
    params = SamplingParams(max_tokens=ROOM)
    history = []
    for _, batch in zip(range(steps), batches, strict=False):
        sample_response = sampler.sample(batch, params, num_samples=4)
        sequences = [s for response in sample_response for s in response.sequences]
        input_data = [sequence.new_input_feature for sequence in sequences]
        old_logps = [[own[0][1] for own in sequence.logprobs or ()] for sequence in sequences]
        rewards = brevity(sample_response.trajectories, batch.ground_truths)

        advantages = advantage_fn(rewards, num_generations=4)

        actor.forward_backward(inputs=input_data, advantages=advantages, old_logps=old_logps)
        actor.clip_grad_and_step()
        history.append(sum(rewards) / len(rewards))
    return history


def whole_response(
    actor: TransformersModel, batches: Iterator[PromptBatch], advantage_fn: Advantage, steps: int
) -> list[float]:
    """Take what the response gathers; return the mean reward of every step."""
    sampler = JaxSampler(model=actor)
    history = []
    for _, batch in zip(range(steps), batches, strict=False):
        response = sampler.sample(batch, SamplingParams(max_tokens=ROOM), num_samples=8)

        rewards = brevity(response.trajectories, batch.ground_truths)

        advantages = advantage_fn(rewards, num_generations=8)

        actor.forward_backward(inputs=response.inputs, advantages=advantages)
        actor.clip_grad_and_step()
        history.append(sum(rewards) / len(rewards))
    return history


FORMS = {"responses": over_responses, "whole": whole_response}


def run(form: str, advantage: str, steps: int) -> list[float]:
    """Make a checkpoint, and train it by one of the two loops."""
    with tempfile.TemporaryDirectory() as checkpoint:
        save_policy(small_policy(seed=0), checkpoint)
        actor = make_actor(checkpoint)
    batches = PromptLoader(ArithmeticTask(1), batch_size=8, seed=0)
    return FORMS[form](actor, batches, get_advantage(advantage), steps)


def main() -> None:
    """Read the command line, train, and show the rewards."""
    parser = argparse.ArgumentParser(description="Twinkle's training loops in JAX.")
    parser.add_argument("--form", choices=FORMS, default="responses")
    parser.add_argument("--advantage", default="grpo", help="grpo, rloo, ...")
    parser.add_argument("--steps", type=int, default=12)
    arguments = parser.parse_args()
    for step, reward in enumerate(run(arguments.form, arguments.advantage, arguments.steps)):
        print(f"step {step:2d}  reward {reward:.2f}")


if __name__ == "__main__":
    main()
