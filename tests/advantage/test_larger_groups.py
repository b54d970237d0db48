"""Masked batches of groups of 8 to 16 samples, small and large, against the float64 references.

Large batches are reduced as unrolled columns, which make the largest fused loops of this package.
One compiler (jaxlib 0.12.0 on the CPU) got such loops wrong, in masked batches alone, where every
sample works out the maximum of its group again.
"""

import functools

import numpy as np
import pytest

from tests.advantage import family_reference
from tests.advantage.reference import reference
from twinkle_jax import advantage

SIZES = [(8, 8), (512, 8), (410, 10), (256, 16)]
SCALES = ("group", "batch", "none")
K = 3
pytestmark = pytest.mark.as_users_compile


def _draw(prompts, size):
    rng = np.random.default_rng(size)
    count = prompts * size
    return rng, rng.normal(size=count).astype(np.float32), rng.uniform(size=count) < 0.8


@pytest.mark.parametrize(("prompts", "size"), SIZES)
@pytest.mark.parametrize("scale", SCALES)
def test_grpo_and_rloo(prompts, size, scale):
    _, rewards, keep = _draw(prompts, size)
    for name in ("grpo", "rloo"):
        result = getattr(advantage, f"{name}_advantage")(rewards, size, scale, where=keep)
        expected = reference(rewards, size, scale, leave_one_out=name == "rloo", keep=keep)
        np.testing.assert_allclose(result, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("prompts", "size"), SIZES[:2])
def test_the_family(prompts, size):
    rng, rewards, keep = _draw(prompts, size)
    rewards = np.abs(rewards)  # what MaxRL asks for
    ids, lengths = np.repeat(np.arange(prompts), size), rng.integers(1, 30, prompts * size)
    cases = {
        "opo": ({"lengths": lengths}, functools.partial(family_reference.opo, lengths=lengths)),
        "maxrl": ({}, family_reference.maxrl),
        "dgpo": ({}, family_reference.dgpo),
        "mc_grpo": ({}, family_reference.mc_grpo),
        "pass_at_k": (
            {"k": K},
            functools.partial(family_reference.pass_at_k, coefficients={"k": K}),
        ),
        "pkpo": ({"k": K}, functools.partial(family_reference.pkpo, coefficients={"k": K})),
        "reinforce_plus_plus_baseline": (
            {"lengths": lengths},
            functools.partial(family_reference.reinforce_plus_plus_baseline, lengths=lengths),
        ),
    }
    for name, (more, expected) in cases.items():
        result = getattr(advantage, f"{name}_advantage")(
            rewards, num_generations=size, where=keep, **more
        )
        np.testing.assert_allclose(
            result, expected(rewards, ids, keep), rtol=1e-4, atol=1e-4, err_msg=name
        )
