"""Three rows to train on, and what a loss needs to know about them."""

import jax
import numpy as np

ROWS = [[5, 6, 7, 8, 9], [10, 11, 12], [13, 14, 15, 16]]
INPUTS = [
    {"input_ids": row, "labels": [-100, *row[2:], 3]}  # what follows, after a prompt of two
    for row in ROWS
]
OLD = [[-3.0, -2.0, -4.0, -3.5], [-3.0, -3.0], [-2.0, -3.0, -4.0]]
SIDE = {"advantages": [1.0, -0.5, 0.25], "old_logps": OLD}


def gradient(model):
    """The accumulated gradients, divided."""
    state = model.state
    return [np.asarray(g) / float(state.denominator) for g in jax.tree.leaves(state.gradient_sum)]


def teacher_of(responses):
    """The likely tokens behind each position, from scored prompts, as a teacher's are passed."""
    scored = [x.topk_prompt_logprobs[1:] for x in responses]  # what stands there was said before it
    parts = np.zeros((2, len(scored), max(map(len, scored)) + 1, len(scored[0][0])))
    for i, row in enumerate(scored):
        for t, pairs in enumerate(row):
            parts[1, i, t], parts[0, i, t] = zip(*pairs, strict=True)
    return {"teacher_topk_logprobs": parts[0], "teacher_topk_indices": parts[1].astype(int)}


def assert_same(actual, expected, tolerance=1e-6):
    for a, b in zip(actual, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=tolerance * np.abs(b).max() + 1e-8)


def assert_equal(actual, expected):
    """Bit by bit."""
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(a, b)
