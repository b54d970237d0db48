"""Every estimator of the family as one call, for tests of what they have in common."""

import functools

import numpy as np

from tests.advantage import family_reference as reference
from twinkle_jax import advantage

# Four prompts of six samples; tests that need no other shapes use these, to compile once.
PROMPTS, SIZE = 4, 6
COUNT = PROMPTS * SIZE
IDS = np.repeat(np.arange(PROMPTS), SIZE)
LENGTHS = np.random.default_rng(7).integers(1, 30, COUNT)
GREEDY = np.float32([0.25, 1.0, -0.5, 0.0])
K = 3
ALL = np.ones(COUNT, bool)


def _fixed(name, **fixed):
    """The function `name` with fixed data, called as `call(rewards, num_generations, **kw)`.

    Without a `where`, a mask that keeps all is passed, so that one program serves most tests;
    `where=None` is for those of the program without a mask.
    """
    function = getattr(advantage, name)

    def call(rewards, size=SIZE, where=ALL, **kwargs):
        where = None if np.ndim(rewards) == 2 and where is ALL else where
        return function(rewards, num_generations=size, where=where, **{**fixed, **kwargs})

    return call


ROWS = {
    "remax": _fixed("remax_advantage", greedy_rewards=GREEDY),
    "opo": _fixed("opo_advantage", lengths=LENGTHS),
    "gdpo": _fixed("gdpo_advantage"),
    "maxrl": _fixed("maxrl_advantage"),
    "dgpo": _fixed("dgpo_advantage"),
    "mc_grpo": _fixed("mc_grpo_advantage"),
    "pass_at_k": _fixed("pass_at_k_advantage", k=K),
    "pkpo, mean": _fixed("pkpo_advantage", k=K),
    "pkpo, leave one out": _fixed("pkpo_advantage", k=K, baseline="leave_one_out"),
    "pkpo, minus one": _fixed("pkpo_advantage", k=K, baseline="leave_one_out_minus_one"),
    "reinforce++": _fixed("reinforce_plus_plus_baseline_advantage", lengths=LENGTHS),
}
# ReMax compares with its greedy completion, so equal rewards are a signal there.
GROUPED = {name: call for name, call in ROWS.items() if name != "remax"}


def _segments(name, **fixed):
    function = getattr(advantage, f"segment_{name}_advantage")
    return lambda rewards, ids, num_segments, where=ALL, **kwargs: function(
        rewards, segment_ids=ids, num_segments=num_segments, where=where, **{**fixed, **kwargs}
    )


SEGMENTS = {
    "opo": _segments("opo", lengths=LENGTHS),
    "gdpo": _segments("gdpo"),
    "maxrl": _segments("maxrl"),
    "dgpo": _segments("dgpo"),
    "reinforce++": _segments("reinforce_plus_plus_baseline", lengths=LENGTHS),
}


def _gdpo(rewards, ids, keep):
    return reference.gdpo(np.asarray(rewards)[:, None], ids, np.asarray(keep)[:, None])


def _remax(rewards, ids, keep):
    return reference.remax(rewards, keep, GREEDY, len(rewards) // len(GREEDY))


REFERENCES = {
    "remax": _remax,
    "opo": functools.partial(reference.opo, lengths=LENGTHS),
    "gdpo": _gdpo,
    "maxrl": reference.maxrl,
    "dgpo": reference.dgpo,
    "mc_grpo": reference.mc_grpo,
    "pass_at_k": functools.partial(reference.pass_at_k, coefficients={"k": K}),
    "pkpo, mean": functools.partial(reference.pkpo, coefficients={"k": K}),
    "pkpo, leave one out": functools.partial(
        reference.pkpo, coefficients={"k": K, "baseline": "leave_one_out"}
    ),
    "pkpo, minus one": functools.partial(
        reference.pkpo, coefficients={"k": K, "baseline": "leave_one_out_minus_one"}
    ),
    "reinforce++": functools.partial(reference.reinforce_plus_plus_baseline, lengths=LENGTHS),
}


def rewards_of(kind):
    """Binary, graded or real rewards, `[COUNT]`, at least zero; one prompt of each is constant."""
    rng = np.random.default_rng(3)
    drawn = {
        "binary": rng.integers(0, 2, COUNT),
        "graded": rng.integers(0, 5, COUNT) / 4,
        "real": rng.uniform(0, 2, COUNT),
    }[kind].astype(np.float32)
    drawn[SIZE : 2 * SIZE] = 0.1
    return drawn


KEEP = ALL.copy()
KEEP[[1, 8, 13, 14, 15, 16, 17]] = False  # the third prompt has one sample left
