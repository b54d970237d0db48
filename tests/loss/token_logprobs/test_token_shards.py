"""Tokens on eight devices: the same scores and gradients, wherever the arrays are."""

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from tests.loss.token_logprobs.scores import Case, assert_close, compute, make
from twinkle_jax.loss import token_logprobs

CASE = make(48, 4, 100, kept=0.5)


@pytest.fixture(scope="module")
def expected():
    return compute(CASE, chunk_size=5)


def make_mesh(*kinds):
    return jax.make_mesh((4, 2), ("data", "model"), axis_types=kinds)


def put(array, mesh, *spec):
    return jax.device_put(array, NamedSharding(mesh, P(*spec)))


def spread(mesh, head, tokens="data"):
    """Put the case on a mesh, its tokens split along one axis or two."""
    return Case(
        put(CASE.hidden, mesh, tokens, None),
        put(CASE.head, mesh, *head),
        *(put(array, mesh, tokens) for array in CASE[2:5]),
        put(CASE.weights, mesh, None, tokens),
    )


def test_automatic_axes(expected):
    case = spread(make_mesh(AxisType.Auto, AxisType.Auto), P("data", "model"))
    assert_close(compute(case, chunk_size=5), expected)


@pytest.mark.parametrize(
    ("tokens", "head"),
    [
        ("data", P("model", "data")),
        pytest.param(("data", "model"), P(None, "model"), marks=pytest.mark.exhaustive),
        pytest.param(None, P("model", None), marks=pytest.mark.exhaustive),
    ],
)
def test_explicit_axes(expected, tokens, head):
    case = spread(make_mesh(AxisType.Explicit, AxisType.Explicit), head, tokens)
    (scores, entropies), gradients = actual = compute(case, chunk_size=5)
    assert_close(actual, expected)
    assert scores.sharding.spec == entropies.sharding.spec == P(tokens)
    arguments = case.hidden, case.head, case.temperature
    for gradient, argument in zip(gradients, arguments, strict=True):
        assert gradient.sharding.is_equivalent_to(argument.sharding, gradient.ndim)


@pytest.mark.exhaustive
def test_explicit_axes_beside_automatic_ones(expected):
    case = spread(make_mesh(AxisType.Explicit, AxisType.Auto), P(None, "model"))
    assert_close(compute(case, chunk_size=5), expected)


@pytest.mark.exhaustive
def test_only_hidden_states_are_spread(expected):
    mesh = make_mesh(AxisType.Explicit, AxisType.Explicit)
    case = CASE._replace(hidden=put(CASE.hidden, mesh, "data", None))
    actual = compute(case, chunk_size=5)
    assert_close(actual, expected)
    assert actual[0][0].sharding.spec == P("data")


@pytest.mark.exhaustive
def test_each_device_works_on_its_own_tokens():
    case = spread(make_mesh(AxisType.Explicit, AxisType.Explicit), P(None, None), ("data", "model"))
    text = compute.lower(case).compile().as_text()
    # a tile has a third of a device's six tokens, not of all 48
    assert re.search(r"f32\[2,100\]", text)
    assert not re.search(r"f32\[(6|12|16|24|48),100\]", text)
    # The gradient of the head is added up once, when it is complete.
    sums = [line for line in text.splitlines() if re.search(r"all-reduce(-start)?\(", line)]
    assert sum("f32[4,100]" in line for line in sums) == 1


@pytest.mark.parametrize(
    ("check_vma", "temperature"),
    [
        (True, None),
        pytest.param(False, None, marks=pytest.mark.exhaustive),
        pytest.param(True, np.float32(0.75), marks=pytest.mark.exhaustive),
    ],
)
def test_inside_shard_map(expected, check_vma, temperature):
    mesh, shared = make_mesh(AxisType.Auto, AxisType.Auto), temperature is not None
    if shared:
        expected = compute(CASE._replace(temperature=np.full(48, temperature)), chunk_size=5)
        scores, (*gradients, d_temperature) = expected
        expected = scores, (*gradients, jnp.sum(d_temperature))
    tokens, specs = P("data"), (P("data"), P(), P("data"), P("data"), P() if shared else P("data"))

    @partial(jax.shard_map, mesh=mesh, in_specs=specs, out_specs=tokens, check_vma=check_vma)
    def score(hidden, head, tokens, mask, temperature):
        keywords = {"mask": mask, "temperature": temperature, "chunk_size": 5}
        return token_logprobs(hidden, head, tokens, with_entropy=True, **keywords)

    def loss(hidden, head, temperature):
        results = score(hidden, head, CASE.tokens, CASE.mask, temperature)
        return jnp.sum(CASE.weights * jnp.stack(results)), results

    temperature = temperature if shared else CASE.temperature
    gradients, results = jax.jit(jax.grad(loss, (0, 1, 2), has_aux=True))(
        CASE.hidden, CASE.head, temperature
    )
    assert_close((results, gradients), expected)
