"""One table of all estimators over groups: how each is called, what it must return, what it obeys.

Tests of what estimators have in common run over `ROWS` and `SEGMENTS`, which are made of `CASES`. A
new estimator gets a line there and a function in `reference.py`, and so all of these tests.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from tests.advantage import reference
from twinkle_jax import advantage

NAN, INF = float("nan"), float("inf")

# Four prompts of six samples; tests that need no other shapes use these, to compile once.
PROMPTS, SIZE = 4, 6
COUNT = PROMPTS * SIZE
IDS = np.repeat(np.arange(PROMPTS), SIZE)
SEGMENT_COUNT = PROMPTS + 1  # one id that no sample has
LENGTHS = np.random.default_rng(7).integers(1, 30, COUNT)
GREEDY = np.float32([0.25, 1.0, -0.5, 0.0])
DATA = {"lengths": LENGTHS, "greedy_rewards": GREEDY}
K = 3
ALL = np.ones(COUNT, bool)
KEEP = ALL.copy()
KEEP[[1, 8, 13, 14, 15, 16, 17]] = False  # the third prompt has one sample left


@dataclasses.dataclass(frozen=True)
class Case:
    """An estimator with its settings."""

    name: str
    """As `get_advantage` takes it; the function is `{name}_advantage`."""
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    data: tuple[str, ...] = ()
    sums_to_zero: bool = False
    shift: bool = False
    """Adding a constant to all rewards changes nothing."""
    scale: str = ""
    """`equivariant`: twice the rewards, twice the advantages; `invariant`: no change."""
    batch_wide: bool = False
    """Takes statistics of the batch too, so that NaN spoils all of it."""
    ordered: bool = True
    """Higher rewards get higher advantages."""
    grouped: bool = True
    """Compares a sample with its group: equal rewards are no signal."""

    @property
    def function(self) -> Callable[..., Any]:
        return getattr(advantage, f"{self.name}_advantage")

    @property
    def segment_function(self) -> Callable[..., Any] | None:
        return getattr(advantage, f"segment_{self.name}_advantage", None)

    def expected(self, rewards, ids, keep, **data):
        """What the reference says, in float64."""
        data = {**self.settings, **{name: DATA[name] for name in self.data}, **data}
        rewards, keep = np.asarray(rewards, np.float64), np.asarray(keep)
        return getattr(reference, self.name)(rewards, np.asarray(ids), keep, **data)


_RELATIVE = {"sums_to_zero": True, "shift": True, "scale": "invariant"}
_PKPO = {"scale": "equivariant"}
CASES = {
    **{
        f"{name}, {scale}": Case(name, {"scale": scale}, **_RELATIVE | facts)
        for name in ("grpo", "rloo")
        for scale, facts in {
            "group": {}, "batch": {"batch_wide": True}, "none": {"scale": "equivariant"},
        }.items()
    },
    "reinforce": Case("reinforce", scale="equivariant", grouped=False),
    "remax": Case("remax", data=("greedy_rewards",), scale="equivariant", grouped=False),
    "opo": Case("opo", data=("lengths",), shift=True, scale="equivariant"),
    "gdpo": Case("gdpo", batch_wide=True, **_RELATIVE),
    "maxrl": Case("maxrl", sums_to_zero=True, scale="invariant"),
    "dgpo": Case("dgpo", **_RELATIVE),
    "mc_grpo": Case("mc_grpo", shift=True),
    "pass_at_k": Case("pass_at_k", {"k": K}, sums_to_zero=True, ordered=False),
    "pkpo, mean": Case(
        "pkpo", {"k": K, "baseline": "mean"}, sums_to_zero=True, shift=True, **_PKPO
    ),
    "pkpo, leave one out": Case("pkpo", {"k": K, "baseline": "leave_one_out"}, **_PKPO),
    "pkpo, minus one": Case(
        "pkpo", {"k": K, "baseline": "leave_one_out_minus_one"}, shift=True, **_PKPO
    ),
    "reinforce++": Case(
        "reinforce_plus_plus_baseline", data=("lengths",), shift=True, scale="invariant",
        batch_wide=True,
    ),
}  # fmt: skip


def obeying(**facts):
    """Labels of the cases with these facts."""
    return [
        label
        for label, case in CASES.items()
        if all(getattr(case, fact) == value for fact, value in facts.items())
    ]


def _call(function, case):
    """Call with the case's settings and data, and by default with a mask that keeps all.

    So that one program serves most tests; `where=None` is for those of the program without a mask.
    """
    fixed = {**case.settings, **{name: DATA[name] for name in case.data}}

    def call(rewards, where=ALL, **kwargs):
        where = None if where is ALL and getattr(rewards, "ndim", 1) == 2 else where
        return function(rewards, where=where, **{**fixed, **kwargs})

    return call


def _row_call(case):
    call = _call(case.function, case)
    return lambda rewards, size=SIZE, **kwargs: call(rewards, num_generations=size, **kwargs)


def _segment_call(case):
    call = _call(case.segment_function, case)
    return lambda rewards, ids=IDS, num_segments=SEGMENT_COUNT, **kwargs: call(
        rewards, segment_ids=ids, num_segments=num_segments, **kwargs
    )


ROWS = {label: _row_call(case) for label, case in CASES.items()}
SEGMENTS = {label: _segment_call(case) for label, case in CASES.items() if case.segment_function}
BY_NAME = {case.name: case for case in CASES.values()}
"""One case for each name: the last of its settings."""


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


def close(result, expected, roundings=32):
    """Within so many roundings of float32 of the largest number (of 1, if that is larger)."""
    expected = np.asarray(expected, np.float64)
    bound = roundings * 2.0**-23 * max(1.0, np.abs(expected).max())
    np.testing.assert_allclose(np.asarray(result, np.float64), expected, rtol=0, atol=bound)
