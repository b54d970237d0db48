"""`twinkle-jax sample`: completions of a prompt on the terminal."""

from typing import Any

import jax

from twinkle_jax.data import Message, Trajectory, message_text
from twinkle_jax.sampler import Sampling
from twinkle_jax.training.command.read_policy import add_policy, read_policy
from twinkle_jax.training.shown.harmless_text import harmless
from twinkle_jax.training.step.rollout import draw_rollout, encode_prompts, read_texts

DESCRIPTION = "Show completions of a prompt."


def add_options(parser: Any) -> None:
    """Add what is said, and how tokens are drawn."""
    add_policy(parser)
    parser.add_argument("prompt", help="what the user says")
    parser.add_argument("--system", default=None, help="what the system says first")
    parser.add_argument("--num_samples", type=int, default=4)
    parser.add_argument("--max_new_tokens", type=int, default=128)
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--top_k", type=int, default=0)
    parser.add_argument("--top_p", type=float, default=1.0)
    parser.add_argument("--min_p", type=float, default=0.0)


def run(given: Any) -> int:
    """Print the completions, harmlessly."""
    policy = read_policy(given.model)
    system = [Message(role="system", content=given.system)] if given.system else []
    prompt = Trajectory(messages=[*system, Message(role="user", content=given.prompt)])
    tokens, mask = encode_prompts(policy.template, [prompt], longest=1 << 20)
    sampling = Sampling(
        given.temperature,
        given.top_k,
        given.top_p,
        given.min_p,
        stop_tokens=policy.tokenizer.stop_token_ids,
    )
    rollout = draw_rollout(
        policy.params,
        policy.config,
        tokens,
        mask,
        jax.random.key(given.seed),
        sampling,
        num_samples=given.num_samples,
        max_new_tokens=given.max_new_tokens,
    )
    for said in read_texts(rollout, [prompt], policy.template).trajectories:
        print(harmless(message_text(said["messages"][-1])))  # noqa: T201
    return 0
