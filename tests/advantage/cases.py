"""One table of all estimators over groups: how each is called, what it must return, what it obeys.

Tests of what estimators have in common run over `ROWS` and `SEGMENTS`, which are made of `CASES`. A
new estimator gets a line there, and so all of these tests.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from tests.advantage import reference, sweep_reference
from twinkle_jax import advantage

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
    reference: Callable[..., np.ndarray]
    """`(rewards, ids, keep, **data) -> advantages`, slow, float64."""
    sweep: Callable[..., np.ndarray] | None = None
    """The same for half a million samples."""
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


def _group_relative(name):
    """GRPO and RLOO at each scale."""
    leave_one_out = name == "rloo"
    return {
        f"{name}, {scale}": Case(
            name,
            reference.group_relative(scale, leave_one_out=leave_one_out),
            sweep_reference.group_relative(scale, leave_one_out),
            {"scale": scale},
            sums_to_zero=True,
            shift=True,
            scale="equivariant" if scale == "none" else "invariant",
            batch_wide=scale == "batch",
        )
        for scale in ("group", "batch", "none")
    }


def _pkpo(baseline, **facts):
    settings = {"k": K, "baseline": baseline}
    slow = functools.partial(reference.pkpo, coefficients=settings)
    fast = functools.partial(sweep_reference.pkpo, baseline=baseline)
    return Case("pkpo", slow, fast, settings, scale="equivariant", **facts)


def _gdpo(rewards, ids, keep):
    return reference.gdpo(np.asarray(rewards)[:, None], ids, np.asarray(keep)[:, None])


def _remax(rewards, ids, keep, *, greedy_rewards):
    del ids
    return reference.remax(rewards, keep, greedy_rewards, len(rewards) // len(greedy_rewards))


CASES = {
    **_group_relative("grpo"),
    **_group_relative("rloo"),
    "reinforce": Case("reinforce", reference.reinforce, scale="equivariant"),
    "remax": Case("remax", _remax, data=("greedy_rewards",), scale="equivariant"),
    "opo": Case(
        "opo", reference.opo, sweep_reference.opo, data=("lengths",), shift=True,
        scale="equivariant",
    ),
    "gdpo": Case(
        "gdpo", _gdpo, sums_to_zero=True, shift=True, scale="invariant", batch_wide=True,
    ),
    "maxrl": Case(
        "maxrl", reference.maxrl, sweep_reference.maxrl, sums_to_zero=True, scale="invariant",
    ),
    "dgpo": Case(
        "dgpo", reference.dgpo, sweep_reference.dgpo, sums_to_zero=True, shift=True,
        scale="invariant",
    ),
    "mc_grpo": Case("mc_grpo", reference.mc_grpo, sweep_reference.mc_grpo, shift=True),
    "pass_at_k": Case(
        "pass_at_k", functools.partial(reference.pass_at_k, coefficients={"k": K}),
        sweep_reference.pass_at_k, {"k": K}, sums_to_zero=True, ordered=False,
    ),
    "pkpo, mean": _pkpo("mean", sums_to_zero=True, shift=True),
    "pkpo, leave one out": _pkpo("leave_one_out"),
    "pkpo, minus one": _pkpo("leave_one_out_minus_one", shift=True),
    "reinforce++": Case(
        "reinforce_plus_plus_baseline", reference.reinforce_plus_plus_baseline,
        sweep_reference.reinforce_plus_plus_baseline, data=("lengths",), shift=True,
        scale="invariant", batch_wide=True,
    ),
}  # fmt: skip


def obeying(**facts):
    """Labels of the cases with these facts."""
    return [
        label
        for label, case in CASES.items()
        if all(getattr(case, fact) == value for fact, value in facts.items())
    ]


def expected(label, rewards, ids, keep):
    """What the slow reference says."""
    case = CASES[label]
    return case.reference(rewards, ids, keep, **{name: DATA[name] for name in case.data})


def _row_call(case):
    """Call as `call(rewards, num_generations, **kw)`.

    Without a `where`, a mask that keeps all is passed, so that one program serves most tests;
    `where=None` is for those of the program without a mask.
    """
    function = getattr(advantage, f"{case.name}_advantage")
    fixed = {**case.settings, **{name: DATA[name] for name in case.data}}

    def call(rewards, size=SIZE, where=ALL, **kwargs):
        where = None if np.ndim(rewards) == 2 and where is ALL else where
        return function(rewards, num_generations=size, where=where, **{**fixed, **kwargs})

    return call


def _segment_call(case):
    function = getattr(advantage, f"segment_{case.name}_advantage")
    fixed = {**case.settings, **{name: DATA[name] for name in case.data}}
    return lambda rewards, ids, num_segments, where=ALL, **kwargs: function(
        rewards, segment_ids=ids, num_segments=num_segments, where=where, **{**fixed, **kwargs}
    )


ROWS = {label: _row_call(case) for label, case in CASES.items()}
# ReMax compares with its greedy completion and REINFORCE with nothing: equal rewards are a signal
# there.
UNGROUPED = ("remax", "reinforce")
GROUPED = {label: call for label, call in ROWS.items() if label not in UNGROUPED}
SEGMENTS = {
    label: _segment_call(case)
    for label, case in CASES.items()
    if f"segment_{case.name}_advantage" in advantage.__all__
}
ESTIMATORS = {case.name: case for case in CASES.values()}
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
