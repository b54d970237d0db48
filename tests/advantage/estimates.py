"""Every estimate of a batch in one program, as inside a user's own step.

The estimates share their statistics, which so compile once instead of for each.
"""

import functools

import jax

from twinkle_jax import grpo_advantage, rloo_advantage
from twinkle_jax.advantage import segment_grpo_advantage, segment_rloo_advantage

SCALES = ("group", "batch", "none")
ROWS = {"grpo": grpo_advantage, "rloo": rloo_advantage}
SEGMENTS = {"grpo": segment_grpo_advantage, "rloo": segment_rloo_advantage}


@functools.partial(jax.jit, static_argnames="num_generations")
def every_estimate(rewards, num_generations, where=None):
    """By name and scale; RLOO only where there are others to compare with."""
    names = ROWS if num_generations > 1 else ("grpo",)
    return {
        (name, scale): ROWS[name](rewards, num_generations, scale, where=where)
        for name in names
        for scale in SCALES
    }


@functools.partial(jax.jit, static_argnames="num_groups")
def every_segment_estimate(rewards, group_ids, num_groups, where=None):
    """By name and scale."""
    return {
        (name, scale): segment(rewards, group_ids, num_groups, scale, where=where)
        for name, segment in SEGMENTS.items()
        for scale in SCALES
    }
