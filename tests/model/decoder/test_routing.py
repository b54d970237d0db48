"""Experts that are named for a token, in place of those that its router would choose."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tests.model.families import (
    assert_close,
    batch,
    config_of,
    each,
    family,
    hidden,
    params_of,
    random_params,
)
from tests.model.reference import reference_hidden
from twinkle_jax.data import Batch
from twinkle_jax.loss import GRPOLoss
from twinkle_jax.model import hidden_states, make_mesh, parse_config, shard_like_params
from twinkle_jax.training import begin_training, grad_step, score_batch, train_state
from twinkle_jax.training.packing import plan

ROWS = [[5, 6, 7, 8, 9, 10, 11], [12, 13, 14], [15], [16, 17, 18, 19, 20]]
NAMES = (
    "qwen3_moe",
    "qwen3_5_moe_text",
    "gemma4_text mixture",
    "gemma4_text small",
    "gpt_oss",
    "glm4_moe",
)
EXTRA = {
    "glm4_moe": {"first_k_dense_replace": 2},
    "qwen3_5_moe_text": {"layer_types": ["linear_attention", "full_attention"] * 2},
    "gpt_oss": {"layer_types": ["sliding_attention", "full_attention"] * 2},
    # Experts also where layers reuse keys and values.
    "gemma4_text small": {
        "enable_moe_block": True,
        "num_experts": 6,
        "top_k_experts": 2,
        "moe_intermediate_size": 16,
    },
}


@functools.cache
def model_of(name):
    """Four layers: a block of several kinds of layers that is repeated, in one of the families."""
    config = parse_config(family(name, num_hidden_layers=4, **EXTRA.get(name, {})))
    return config, random_params(config)


def random_routing(config, shape, seed=0):
    """Different experts for each token and layer; a third of the tokens choose by themselves."""
    rng = np.random.default_rng(seed)
    numbers = rng.random((*shape, config.layers, config.experts.number)).argsort(-1)
    routing = numbers[..., : config.experts.chosen]
    return np.where(rng.random(shape)[..., None, None] < 1 / 3, -1, routing)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("name", each(NAMES, mark=pytest.mark.slow))
def test_equals_the_float64_reference(name, side):
    config, params = model_of(name)
    tokens, mask = batch(ROWS, 9, side)
    routing = random_routing(config, tokens.shape)
    got = hidden(params, config, tokens, mask, routing=jnp.asarray(routing))
    live = hidden(params, config, tokens, mask)
    for i, row in enumerate(ROWS):
        kept = np.asarray(mask[i])
        expected = reference_hidden(params, config, row, routing=routing[i][kept].copy())
        assert_close(got[i][kept], expected)
    assert float(jnp.max(jnp.abs(got - live))) > 0.1


@pytest.mark.slow
@pytest.mark.parametrize(("name", "kind"), [(NAMES[0], np.uint8), (NAMES[1], np.int32)])
def test_the_routers_own_choice_changes_nothing(name, kind):
    """Neither values nor gradients, that of the router among them."""
    config, params = model_of(name)
    row = ROWS[0]
    routing = np.full((1, len(row), config.layers, config.experts.chosen), -1)
    reference_hidden(params, config, row, routing=routing[0])
    assert routing.min() >= 0

    def loss(params, routing=None):
        out = hidden_states(params, config, jnp.asarray([row]), routing=routing)
        return jnp.sum(jnp.sin(out)), out

    run = jax.jit(jax.value_and_grad(loss, has_aux=True))
    (_, expected), live = run(params)
    (_, got), replayed = run(params, jnp.asarray(routing, kind))
    assert_close(got, expected, 1e-6)
    jax.tree.map(lambda a, b: assert_close(a, b, 1e-5), replayed, live)
    layer = replayed["layers"]["0"]
    router = layer["router"]["proj"] if "router" in layer else layer["mlp"]["gate"]
    assert float(jnp.abs(router["kernel"]).max()) > 1e-3


@pytest.mark.slow
def test_gradients_flow_through_the_named_experts_and_the_router():
    """Against differences of the float64 reference."""
    config, params = model_of("qwen3_moe")
    row, routing = ROWS[3], random_routing(model_of("qwen3_moe")[0], (1, 5))

    def loss(params):
        out = hidden_states(params, config, jnp.asarray([row]), routing=jnp.asarray(routing))
        return jnp.sum(jnp.sin(out))

    gradient = jax.jit(jax.grad(loss))(params)
    rng = np.random.default_rng(1)
    mlp = params["layers"]["0"]["mlp"]
    for path in (("gate", "kernel"), ("experts", "down_proj", "kernel")):
        leaf = functools.reduce(dict.get, path, mlp)
        direction = rng.normal(size=leaf.shape)

        def moved(step, path=path, leaf=leaf, direction=direction):
            changed = np.asarray(leaf, np.float64) + step * direction
            for name in reversed(path):
                changed = {name: changed}
            weights = {**params, "layers": {"0": merged(params["layers"]["0"], {"mlp": changed})}}
            return np.sin(reference_hidden(weights, config, row, routing=routing[0].copy())).sum()

        expected = (moved(1e-6) - moved(-1e-6)) / 2e-6
        got = functools.reduce(dict.get, path, gradient["layers"]["0"]["mlp"])
        assert np.sum(np.asarray(got) * direction) == pytest.approx(expected, rel=2e-3)


def merged(tree, changes):
    changed = {
        name: merged(tree[name], value) if isinstance(value, dict) else value
        for name, value in changes.items()
    }
    return {**tree, **changed}


# Packed, and on a mesh: log-probabilities, gradients and experts are what they are row by row.

LENGTHS = np.array([5, 17, 3, 9, 1, 20, 12, 6], np.int32)
INSIDE = np.arange(24) < LENGTHS[:, None]


def routed_batch(config):
    rng = np.random.default_rng(0)
    tokens, labels = rng.integers(1, config.vocab_size, (2, *INSIDE.shape))
    return Batch(
        tokens=jnp.asarray(np.where(INSIDE, tokens, 0), jnp.int32),
        labels=jnp.asarray(np.where(INSIDE, labels, -100), jnp.int32),
        advantages=jnp.asarray(rng.normal(size=INSIDE.shape), jnp.float32),
        routing=jnp.asarray(random_routing(config, INSIDE.shape) % 255, jnp.uint8),
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", each(NAMES))
def test_packing_changes_nothing(name):
    config, params = model_of(name)
    rows = routed_batch(config)
    expected = score_batch(params, rows, config).logps
    live = score_batch(params, rows._replace(routing=None), config).logps
    assert float(jnp.max(jnp.abs(expected - live))) > 0.1
    total = jnp.zeros(rows.tokens.shape)
    for members, packing in plan(LENGTHS, 24, tokens=64):
        part = rows._replace(labels=jnp.where(members[:, None], rows.labels, -100))
        total += score_batch(params, part, config, packing=packing).logps
    np.testing.assert_allclose(total, expected, rtol=2e-6, atol=2e-4)


def chosen_by_the_reference(params, config, row):
    """The experts of each token in ascending order, by the router of the float64 reference."""
    routing = np.full((len(row), config.layers, config.experts.chosen), -1)
    reference_hidden(params, config, row, routing=routing)
    assert routing.min() >= 0
    return np.sort(routing, axis=-1)


@pytest.mark.slow
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("name", NAMES)
def test_the_experts_of_each_token_are_recorded(name, side):
    config, params = model_of(name)
    tokens, mask = batch(ROWS, 9, side)
    rows = Batch(tokens, tokens, mask=mask)
    got = np.asarray(score_batch(params, rows, config, with_routing=True).routing)
    assert got.dtype == np.uint8
    assert not got[~np.asarray(mask)].any()
    for i, row in enumerate(ROWS):
        kept = got[i][np.asarray(mask[i])]
        np.testing.assert_array_equal(np.sort(kept), chosen_by_the_reference(params, config, row))


@pytest.mark.slow
@pytest.mark.parametrize("transfers", [None, "layers", "once"])
def test_packed_and_on_a_mesh_the_same_experts_are_recorded(transfers):
    """Those that a row is told to use are recorded as such, too."""
    config, params = model_of("qwen3_5_moe_text")
    rows = routed_batch(config)
    expected = score_batch(params, rows, config, with_routing=True)
    told = np.asarray(rows.routing).max(axis=(2, 3)) < config.experts.number
    assert 0 < told.mean() < 1
    np.testing.assert_array_equal(expected.routing[told], rows.routing[told])
    options = {}
    if transfers is not None:
        mesh = make_mesh(data=2, fsdp=2, tensor=2 if transfers == "layers" else 1)
        params = jax.device_put(params, shard_like_params(params, mesh))
        options = {"mesh": mesh, "transfers": transfers}
    [(_, packing)] = plan(LENGTHS, 24, tokens=4096, shards=4, multiple=2)
    got = score_batch(params, rows, config, with_routing=True, packing=packing, **options)
    np.testing.assert_array_equal(np.asarray(got.routing)[INSIDE], expected.routing[INSIDE])
    replayed = score_batch(params, rows._replace(routing=got.routing), config)
    np.testing.assert_allclose(replayed.logps, expected.logps, atol=2e-4)


@pytest.mark.slow
@pytest.mark.parametrize("transfers", ["layers", "once"])
@pytest.mark.parametrize("packed", [True, False])
def test_a_mesh_changes_nothing(transfers, packed):
    config = config_of("qwen3_moe")
    rows, sums = routed_batch(config), []
    tensor = 2 if transfers == "layers" else 1
    for mesh in (None, make_mesh(data=2, fsdp=2, tensor=tensor)):
        state = begin_training(jax.tree.map(jnp.copy, params_of("qwen3_moe")), optax.sgd(1.0), mesh)
        options = {"tokens": 4096, "shards": 4, "multiple": 2}
        [(_, packing)] = plan(LENGTHS, 24, **options)
        state, summary = grad_step(
            state,
            rows,
            config,
            GRPOLoss(),
            mesh=mesh,
            packing=packing if packed else None,
            transfers="layers" if mesh is None else transfers,
        )
        sums.append(jax.device_get((state.gradient_sum, summary.logps)))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=5e-5), *sums)


@pytest.mark.slow
def test_a_gradient_step_is_that_of_the_named_experts():
    """It is not the router's: experts that no token is sent to have no gradient."""
    config = config_of("qwen3_moe")
    rows = routed_batch(config)
    rows = rows._replace(routing=jnp.broadcast_to(jnp.asarray([3, 1], jnp.uint8), (8, 24, 2, 2)))
    state, _ = grad_step(
        train_state(jax.tree.map(jnp.copy, params_of("qwen3_moe"))), rows, config, GRPOLoss()
    )
    gradient = state.gradient_sum["layers"]["0"]["mlp"]["experts"]["down_proj"]["kernel"]
    trained = np.asarray(jnp.any(gradient != 0, axis=(0, 2, 3)))
    assert np.flatnonzero(trained).tolist() == [1, 3]


@pytest.mark.parametrize(
    ("change", "error", "named"),
    [
        (lambda x: x[..., :1], ValueError, "chosen"),
        (lambda x: x[:, :, :1], ValueError, "layers"),
        (lambda x: x[:, :3], ValueError, "time"),
        (lambda x: x.astype(jnp.float32), TypeError, "integers"),
    ],
)
def test_another_shape_or_type_is_refused(change, error, named):
    config, params = model_of("qwen3_moe")
    routing = jnp.asarray(random_routing(config, (1, 5)))
    with pytest.raises(error, match=f"routing.*{named}"):
        hidden_states(params, config, jnp.asarray([ROWS[3]]), routing=change(routing))


def test_a_decoder_without_experts_takes_none():
    with pytest.raises(ValueError, match="routing"):
        hidden_states(
            params_of("qwen3"),
            config_of("qwen3"),
            jnp.asarray([ROWS[3]]),
            routing=jnp.zeros((1, 5, 2, 2), jnp.int32),
        )


def test_a_decoder_without_experts_has_none_to_record():
    tokens = jnp.asarray([ROWS[3]])
    with pytest.raises(ValueError, match="with_routing"):
        score_batch(
            params_of("qwen3"), Batch(tokens, tokens), config_of("qwen3"), with_routing=True
        )


def test_the_rows_of_a_batch_are_checked():
    config = config_of("qwen3_moe")
    rows = routed_batch(config)
    with pytest.raises(ValueError, match="routing must have the shape"):
        score_batch(params_of("qwen3_moe"), rows._replace(routing=rows.routing[:, :5]), config)
