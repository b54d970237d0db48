"""One rollout: prompts to completions on the device, and their text on the host."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Int

from twinkle_jax.data import Message, Template, Trajectory, bucket_size
from twinkle_jax.model import DecoderConfig
from twinkle_jax.model.decoder.parameters import Params
from twinkle_jax.sampler import Completions, Sampling, generate

OUT_OF_ROOM = 2  # what `Completions.finish_reasons` says of a completion that ran out of room


class Rollout(NamedTuple):
    """Completions of some prompts.

    Attributes:
        prompts: their tokens, padded on the left, one row a prompt.
        prompt_mask: True for tokens.
        completions: rows of a prompt stand next to each other; on the device.
    """

    prompts: Int[Array, "prompts time"]
    prompt_mask: Bool[Array, "prompts time"]
    completions: Completions


class Texts(NamedTuple):
    """What a rollout says, on the host.

    Attributes:
        trajectories: the prompts' conversations, each with a completion as its last message.
        lengths: tokens of each completion.
        truncated: True for completions that ran out of room.
    """

    trajectories: list[Trajectory]
    lengths: np.ndarray[Any, Any]
    truncated: np.ndarray[Any, Any]


def encode_prompts(
    template: Template, prompts: Sequence[Trajectory], *, longest: int
) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Make token ids of prompts, padded on the left to a bucket of lengths, and their mask.

    Args:
        template: of the policy.
        prompts: conversations that end before the assistant speaks.
        longest: the most tokens of a prompt.

    Returns:
        Tokens and mask, [prompts, time].

    Raises:
        ValueError: if a prompt is longer; the message says which.
    """
    rows = [template.encode(p, add_generation_prompt=True)["input_ids"] for p in prompts]
    lengths = [len(row) for row in rows]
    if max(lengths) > longest:
        worst = int(np.argmax(lengths))
        raise ValueError(
            f"prompts must have at most max_prompt_tokens={longest} tokens, got {lengths[worst]} "
            f"in prompt {worst}"
        )
    time = bucket_size(max(lengths), smallest=8)
    tokens, mask = np.zeros((len(rows), time), np.int32), np.zeros((len(rows), time), bool)
    for i, row in enumerate(rows):
        tokens[i, time - len(row) :] = row
        mask[i, time - len(row) :] = True
    return tokens, mask


def draw_rollout(
    params: Params,
    config: DecoderConfig,
    prompts: np.ndarray[Any, Any],
    mask: np.ndarray[Any, Any],
    key: jax.Array,
    sampling: Sampling,
    *,
    num_samples: int,
    max_new_tokens: int,
    compute_dtype: DTypeLike | None = None,
    mesh: Mesh | None = None,
) -> Rollout:
    """Draw `num_samples` completions of each prompt; nothing comes back to the host."""
    completions = generate(
        params,
        config,
        prompts,
        mask,
        key,
        sampling,
        num_samples=num_samples,
        max_new_tokens=max_new_tokens,
        compute_dtype=compute_dtype,
        mesh=mesh,
    )
    return Rollout(jnp.asarray(prompts), jnp.asarray(mask), completions)


def read_texts(rollout: Rollout, prompts: Sequence[Trajectory], template: Template) -> Texts:
    """Bring completions to the host, all in one transfer, and decode them."""
    drawn = rollout.completions
    tokens, lengths, reasons = jax.device_get((drawn.tokens, drawn.lengths, drawn.finish_reasons))
    num_samples = len(tokens) // len(prompts)
    said = []
    for i, (row, length) in enumerate(zip(tokens, lengths, strict=True)):
        prompt = prompts[i // num_samples]
        text = template.tokenizer.decode(row[:length].tolist())
        answer = Message(role="assistant", content=text)
        said.append(Trajectory({**prompt, "messages": [*prompt["messages"], answer]}))
    return Texts(said, lengths, reasons == OUT_OF_ROOM)
