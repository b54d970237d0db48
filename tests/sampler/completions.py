"""What tests of samplers share: prompts, and the trainer's opinion of completions."""

import jax.numpy as jnp
import numpy as np

from twinkle_jax.data import Batch
from twinkle_jax.training import score_batch

PROMPTS = [[5, 6, 7, 8, 9, 10], [12, 13, 14], [15], [16, 17, 18, 19, 20]]


def to_batch(prompts, drawn):
    """Lay completions out for training; prompts are lists, one for each row."""
    time = max(map(len, prompts)) + drawn.tokens.shape[1]
    tokens, labels = np.zeros((len(prompts), time), np.int32), np.full((len(prompts), time), -100)
    for i, prompt in enumerate(prompts):
        completion = np.asarray(drawn.tokens[i])[np.asarray(drawn.mask[i])]
        row = [*prompt, *completion]
        tokens[i, : len(row)] = row
        labels[i, len(prompt) - 1 : len(row) - 1] = completion
    return Batch(jnp.asarray(tokens), jnp.asarray(labels, jnp.int32))


def trainer_logprobs(params, config, prompts, drawn, temperature, **options):
    """Score completions as training does; [rows, new], 0 where there is no token."""
    batch = to_batch(prompts, drawn)
    scores = score_batch(params, batch, config, temperature=temperature, **options)
    result = np.zeros(drawn.tokens.shape, np.float32)
    for i in range(len(prompts)):
        result[i, np.asarray(drawn.mask[i])] = scores.logps[i][np.asarray(batch.labels[i]) != -100]
    return result
