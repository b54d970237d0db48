"""What a mesh means inside the decoder: rows stay where they are, and parameters come to them."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from tests.model.families import ALL, config_of, family, random_params
from tests.model.training import fresh, random_batch, relative
from twinkle_jax.loss import GRPOLoss
from twinkle_jax.model import hidden_states, make_mesh, parse_config, shard_like_params
from twinkle_jax.model.decoder.sharding import AXES, find_mesh
from twinkle_jax.training import grad_step, score_batch, train_state

LOSS = GRPOLoss(beta=0.1, entropy_coef=0.01)


def bare(*shape):
    """A mesh whose devices stand in an order that no device topology has."""
    devices = np.array(jax.devices()[: np.prod(shape)])[::-1]
    return Mesh(devices.reshape(shape), AXES)


def spread(tree, mesh):
    return jax.device_put(tree, shard_like_params(tree, mesh))


def large(collectives, elements):
    """The collectives of a compiled program with results of at least so many elements."""
    for line in collectives.splitlines():
        found = re.search(r" = (.+?) (all-reduce|all-gather|all-to-all)(-start)?\(", line)
        if found:
            shapes = re.findall(r"\w\[([\d,]+)\]", found[1])
            sizes = [np.prod([int(n) for n in shape.split(",")]) for shape in shapes]
            if max(sizes, default=0) >= elements:
                yield found[2], shapes


def test_no_activation_leaves_its_device():
    """Not even when the batch arrives whole, and nobody names the mesh at the layers' doors."""
    mesh, config = bare(1, 8, 1), config_of("qwen3")
    batch = random_batch(rows=64, time=128)  # 8,192 tokens are more than any parameter has entries
    batch = jax.device_put(batch, NamedSharding(mesh, PartitionSpec()))
    state = spread(fresh("qwen3"), mesh)

    def step(state, batch):
        return grad_step(state, batch, config, LOSS, mesh=mesh)

    text = jax.jit(step).lower(state, batch).compile().as_text()
    moved = [kind for kind, shapes in large(text, 8192 * 8) if kind != "all-to-all"]
    assert not moved
    assert list(large(text, 24 * 40))  # the parameters' own are seen


def test_the_mesh_is_found_from_the_arrays(compilations):
    mesh, batch = make_mesh(data=2, fsdp=4), random_batch(rows=8)
    state = spread(fresh("qwen3"), mesh)
    named, _ = grad_step(state, batch, config_of("qwen3"), LOSS, mesh=mesh)
    before = len(compilations)
    state = spread(fresh("qwen3"), mesh)
    compiled = len(compilations) - before  # by making the state
    found, _ = grad_step(state, batch, config_of("qwen3"), LOSS)
    assert len(compilations) == before + compiled
    assert relative(found.gradient_sum, named.gradient_sum) == 0


def test_meshes_that_are_not_ours_are_not_found():
    params = config_of("qwen3"), jnp.ones(8), np.ones(3)
    assert find_mesh(None, params) is None
    other = jax.make_mesh((8,), ("data",), (jax.sharding.AxisType.Auto,))
    assert (
        find_mesh(None, jax.device_put(jnp.ones(8), NamedSharding(other, PartitionSpec()))) is None
    )
    ours = make_mesh(fsdp=8)
    there = jax.device_put(jnp.ones(8), NamedSharding(ours, PartitionSpec("fsdp")))
    assert find_mesh(None, [jnp.ones(2), there]) is ours
    assert find_mesh(make_mesh(data=8), there) is not ours
    jax.eval_shape(lambda x: np.testing.assert_equal(find_mesh(None, x), None), there)


@pytest.mark.exhaustive
def test_gradients_leave_a_layer_spread_and_in_the_type_of_the_parameters():
    config, tokens = config_of("qwen3"), jnp.ones((8, 4), jnp.int32)

    def gradient(mesh):
        def total(params):
            out = hidden_states(params, config, tokens, mesh=mesh, compute_dtype="bfloat16")
            return jnp.sum(out.astype(jnp.float32))

        params = random_params(config) if mesh is None else spread(random_params(config), mesh)
        with jax.numpy_dtype_promotion("standard"):  # attention in 16 bits needs it
            return jax.jit(jax.grad(total))(params)["layers"]

    there = gradient(make_mesh(fsdp=8))
    assert relative(there, gradient(None)) < 0.05
    kernel = there["0"]["mlp"]["up_proj"]["kernel"]
    assert kernel.dtype == jnp.float32
    assert kernel.addressable_shards[0].data.size * 8 == kernel.size


def test_parameters_are_gathered_in_the_compute_type_and_gradients_scattered_in_it():
    mesh, config = make_mesh(fsdp=8), config_of("qwen3")
    params = spread(random_params(config), mesh)

    def total(params):
        tokens = jnp.ones((8, 4), jnp.int32)
        out = hidden_states(params, config, tokens, mesh=mesh, compute_dtype="bfloat16")
        return jnp.sum(out.astype(jnp.float32))

    with jax.numpy_dtype_promotion("standard"):
        text = jax.jit(jax.grad(total)).lower(params).as_text()
    said = re.findall(r"sharding_constraint .*<@mesh, \[(.*?)\]> : tensor<24x40xbf16>", text)
    whole = [where for where in said if "fsdp" not in where]
    # gate_proj and up_proj, forwards and backwards, each spread before it is gathered; and their
    # gradients, which are spread and nothing else
    assert (len(whole), len(said)) == (4, 10)


def assert_as_on_one_device(name, mesh, rows=8, **changes):
    """The scores and the gradient of a batch; with linear layers, as far as one device knows it.

    These amplify rounding in the gradient of these rows: all parameters made larger by one rounding
    change it by 2e-4 on one device, more than a mesh does. Three times such a change is what a
    difference may come to there, where that is more than 1e-5.
    """
    linear = name == "qwen3_5_text"
    config = parse_config(family(name, **changes))
    params, batch = random_params(config), random_batch(rows=rows, time=12)

    def results(params, where):
        state = train_state(jax.tree.map(jnp.copy, params), None)
        state = state if where is None else spread(state, where)
        scores = score_batch(state.params, batch, config, mesh=where)
        state, _ = grad_step(state, batch, config, LOSS, mesh=where)
        return jax.device_get((scores.logps, jax.tree.leaves(state.gradient_sum)))

    rounded = jax.tree.map(lambda x: x * jnp.float32(1 + 2**-23), params)
    (values, there), (expected, here), (_, nearby) = (
        results(params, mesh),
        results(params, None),
        results(rounded, None),
    )
    allowed = 1e-5 * np.abs(expected).max() if linear else 1e-4
    np.testing.assert_allclose(values, expected, rtol=0, atol=allowed)
    for x, y, z in zip(there, here, nearby, strict=True):
        known = max(1e-5 * np.abs(y).max(), linear * 3 * np.abs(z - y).max())
        np.testing.assert_allclose(x, y, rtol=0, atol=known)


@pytest.mark.exhaustive
def test_tied_embeddings_on_a_bare_mesh():
    assert_as_on_one_device("qwen2", bare(2, 2, 2), tie_word_embeddings=True)


@pytest.mark.exhaustive
@pytest.mark.parametrize("shape", [(1, 8, 1), (2, 2, 2)])
@pytest.mark.parametrize("name", ALL)
def test_families_on_bare_meshes(name, shape):
    assert_as_on_one_device(name, bare(*shape), tie_word_embeddings=True)


def test_what_does_not_fit_is_refused():
    config, params = config_of("qwen3"), fresh("qwen3").params

    def score(rows, time, **axes):
        batch = random_batch(rows=rows, time=time)
        return jax.eval_shape(
            lambda p: score_batch(p, batch, config, mesh=make_mesh(**axes)), params
        )

    with pytest.raises(ValueError, match="batch must have a multiple of 4 rows, data times fsdp"):
        score(6, 8, data=2, fsdp=2)
    with pytest.raises(ValueError, match=r"divides the 2 key-value heads, one of \[1, 2\], got 4"):
        score(8, 8, tensor=4)
    with pytest.raises(ValueError, match=r"length is a multiple of 2, .* got 7"):
        score(8, 7, tensor=2)
