"""Parameters and gradients moved at once are those that are moved layer by layer."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tests.compiled.costs import visit
from tests.compiled.program import read_program
from tests.model.families import family
from twinkle_jax.data import Batch
from twinkle_jax.loss import ChunkedCrossEntropyLoss, GRPOLoss
from twinkle_jax.model import (
    LoraConfig,
    init_params,
    make_mesh,
    parse_config,
    shard_like_params,
    with_adapter,
)
from twinkle_jax.model.decoder.lora import init_adapter
from twinkle_jax.sampler.slots import lay_out_weights
from twinkle_jax.training import apply_gradients, grad_step, score_batch
from twinkle_jax.training.packing import plan
from twinkle_jax.training.state import begin_training
from twinkle_jax.training.step import on_all_devices

ROWS, TIME, VOCABULARY = 8, 12, 48
MESHES = {"fsdp": {"fsdp": 4}, "data": {"data": 4}, "both": {"data": 2, "fsdp": 2}}
KINDS = {"all-gather", "all-reduce", "reduce-scatter"}


def decoder(model_type="qwen3", **changes):
    return parse_config(family(model_type, num_hidden_layers=3, **changes))


def batch(seed=0):
    rng = np.random.default_rng(seed)
    tokens = rng.integers(1, VOCABULARY, (ROWS, TIME)).astype(np.int32)
    lengths = rng.integers(4, TIME + 1, ROWS)
    labels = np.where(np.arange(TIME) < lengths[:, None] - 1, np.roll(tokens, -1, 1), -100)
    logps = rng.normal(-3, 0.3, (ROWS, TIME)).astype(np.float32)
    advantages = np.repeat(rng.normal(size=(ROWS, 1)), TIME, 1).astype(np.float32)
    made = Batch(tokens, labels.astype(np.int32), advantages=advantages, old_logps=logps)
    return made, lengths.astype(np.int32)


def placed(params, mesh):
    return jax.device_put(params, shard_like_params(params, mesh))


def gradients(mesh, transfers, *, config=None, packed=False, dtype=None, loss=None, lora=None):
    config = decoder() if config is None else config
    params = init_params(jax.random.key(0), config)
    frozen, key = None, None
    if lora is not None:
        adapters = init_adapter(jax.random.key(1), config, lora)
        frozen = placed(with_adapter(params, config, lora), mesh)
        # B is 0 at the start, so that A would have no gradient.
        params = jax.tree.map(lambda x: x + 0.1, adapters)
        key = jax.random.key(7)
    state = begin_training(params, optax.sgd(1.0), mesh)
    rows, lengths = batch()
    packing = None
    if packed:
        [(_, packing)] = plan(lengths, TIME, tokens=10_000, shards=4)
    state, summary = grad_step(
        state, rows, config, GRPOLoss(beta=0.0) if loss is None else loss,
        mesh=mesh, transfers=transfers, packing=packing,
        compute_dtype=dtype, frozen=frozen, key=key,
    )  # fmt: skip
    return state, summary


def assert_same(got, expected, tolerance=1e-6):
    (state, summary), (other, reference) = got, expected
    assert summary.loss_sum == pytest.approx(float(reference.loss_sum), rel=1e-4, abs=tolerance)
    np.testing.assert_allclose(summary.logps, reference.logps, atol=10 * tolerance)
    pairs = zip(
        jax.tree.leaves_with_path(state.gradient_sum),
        jax.tree.leaves(other.gradient_sum),
        strict=True,
    )
    for (path, one), same in pairs:
        assert one.sharding.is_equivalent_to(same.sharding, one.ndim), path
        scale = float(jnp.abs(same).max())
        assert scale > 0, path
        np.testing.assert_allclose(one, same, atol=tolerance * max(scale, 1), err_msg=str(path))


def further(case):
    return pytest.param(case, marks=pytest.mark.exhaustive)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", MESHES)
def test_gradients_are_the_same(mesh):
    mesh = make_mesh(**MESHES[mesh])
    assert_same(gradients(mesh, "once"), gradients(mesh, "layers"))


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [
        {"packed": True},
        further({"config": {"tie_word_embeddings": True, "model_type": "qwen2"}}),
        further({"config": {"hidden_size": 18}}),  # which fsdp does not divide
        further({"loss": ChunkedCrossEntropyLoss()}),
        {"lora": LoraConfig(r=2, target_modules="all-linear", lora_dropout=0.5)},
        further({"lora": LoraConfig(r=2, lora_dropout=0.5), "packed": True}),
    ],
    ids=["packed", "tied", "not divided", "supervised", "adapters", "adapters, packed"],
)
def test_whatever_is_trained_has_the_same_gradient(case):
    case = case | ({"config": decoder(**case["config"])} if "config" in case else {})
    mesh = make_mesh(fsdp=4)
    assert_same(gradients(mesh, "once", **case), gradients(mesh, "layers", **case))


@pytest.mark.slow
def test_bfloat16_gathers_and_sums_in_bfloat16():
    mesh = make_mesh(fsdp=4)
    with jax.numpy_dtype_promotion("standard"):
        got = gradients(mesh, "once", dtype=jnp.bfloat16)
        assert_same(got, gradients(mesh, "layers", dtype=jnp.bfloat16), tolerance=0.02)


EXPECTED = {  # scores of all lines are gathered, to be put into rows; then the parameters
    "fsdp": ["all-gather", "all-gather", "reduce-scatter"],
    "data": ["all-gather", "all-reduce"],
    "both": ["all-gather", "all-gather", "all-reduce", "reduce-scatter"],
}


@pytest.mark.slow
@pytest.mark.parametrize("name", MESHES)
def test_an_update_makes_few_transfers(name):
    mesh, config = make_mesh(**MESHES[name]), decoder()
    state = begin_training(init_params(jax.random.key(0), config), None, mesh)
    rows, lengths = batch()
    [(_, packing)] = plan(lengths, TIME, tokens=10_000, shards=4)

    def step(state):
        options = {"mesh": mesh, "transfers": "once", "packing": packing}
        return grad_step(state, rows, config, GRPOLoss(beta=0.0), **options)

    assert collectives(jax.jit(step).lower(state)) == EXPECTED[name]


@pytest.mark.slow
def test_scores_are_those_of_training():
    """The ratio of a policy to itself is 1: scoring and training run the same programs."""
    mesh, config = make_mesh(fsdp=4), decoder()
    _, summary = gradients(mesh, "once")
    params = placed(init_params(jax.random.key(0), config), mesh)
    scored = score_batch(params, batch()[0], config, transfers="once", with_entropy=True)
    np.testing.assert_allclose(scored.logps, summary.logps, atol=1e-6)
    layered = score_batch(params, batch()[0], config, with_entropy=True)
    np.testing.assert_allclose(scored.entropies, layered.entropies, atol=1e-5)


def test_a_mesh_with_tensor_is_refused():
    with pytest.raises(ValueError, match="transfers"):
        gradients(make_mesh(fsdp=2, tensor=2), "once")


def test_an_unknown_name_is_refused():
    config = decoder()
    params = init_params(jax.random.key(0), config)
    with pytest.raises(ValueError, match="transfers must be 'layers' or 'once', got 'layer'"):
        score_batch(params, batch()[0], config, transfers="layer")
    state = begin_training(params, optax.sgd(1.0), None)
    with pytest.raises(ValueError, match="transfers"):
        grad_step(state, batch()[0], config, GRPOLoss(), transfers="layer")


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [{}, *MESHES.values(), {"data": 2, "tensor": 2}], ids=str)
def test_what_is_summed_over_all_parameters(sizes):
    """The norm counts each entry once, and one that is not finite is seen wherever it lies."""
    mesh = make_mesh(**sizes)
    start = init_params(jax.random.key(0), decoder())
    expected = np.sqrt(sum(float(jnp.sum(x**2)) for x in jax.tree.leaves(start)))
    bad = {name: jax.tree.map(lambda x: x, start) for name in ("norm", "last column")}
    bad["norm"]["norm"] = {"scale": start["norm"]["scale"].at[-1].set(jnp.inf)}
    embedding = start["embed_tokens"]["embedding"].at[-1, -1].set(jnp.nan)
    bad["last column"]["embed_tokens"] = {"embedding": embedding}
    for params, applied in ((start, True), *((x, False) for x in bad.values())):
        state = begin_training(jax.tree.map(jnp.copy, params), optax.sgd(1.0), mesh)
        gradients = placed(jax.tree.map(jnp.copy, start), mesh)
        ones = {"denominator": jnp.float32(2), "tokens": jnp.float32(2)}
        _, info = apply_gradients(
            state._replace(gradient_sum=gradients, **ones), optax.sgd(1.0), mesh=mesh
        )
        assert info.gradient_norm == pytest.approx(expected / 2, rel=1e-5)
        assert bool(info.applied) is applied


@pytest.mark.slow
@pytest.mark.parametrize(
    ("value", "applied"), [(0.0, False), (1e-30, True), (np.nan, False)], ids=str
)
def test_one_entry_is_a_gradient(value, applied):
    """Its square is 0, and it is on one of the devices; without an entry the update is skipped."""
    mesh = make_mesh(fsdp=4)
    params = init_params(jax.random.key(0), decoder())
    state = begin_training(params, optax.sgd(1.0), mesh)
    zeros = jax.tree.map(jnp.zeros_like, state.params)
    zeros["lm_head"]["kernel"] = zeros["lm_head"]["kernel"].at[-1, 0].set(value)
    ones = {"denominator": jnp.float32(1), "tokens": jnp.float32(1)}
    state = state._replace(gradient_sum=placed(zeros, mesh), **ones)
    _, info = apply_gradients(state, optax.sgd(1.0), skip_zero=True, mesh=mesh)
    assert bool(info.applied) is applied
    assert np.isnan(info.gradient_norm) == np.isnan(value)


def collectives(lowered):
    program = read_program(lowered.compile().as_text())
    opcodes = [one.opcode for _, one, times in visit(program, 1) for _ in range(times)]
    return sorted(kind for kind in opcodes if kind in KINDS)


@pytest.mark.slow
@pytest.mark.parametrize("name", MESHES)
def test_what_follows_an_update_makes_few_transfers(name):
    """The norm with the number of entries, and whether all is finite; rows for the next update."""
    mesh = make_mesh(**MESHES[name])
    optimizer = optax.adam(1.0)
    state = begin_training(init_params(jax.random.key(0), decoder()), optimizer, mesh)

    def update(state):
        return apply_gradients(state, optimizer, max_grad_norm=1.0, skip_zero=True, mesh=mesh)

    assert collectives(jax.jit(update).lower(state)) == ["all-reduce"] * (2 * (name != "data"))
    spread = jax.device_put(batch()[0], jax.NamedSharding(mesh, jax.P(("data", "fsdp"))))
    assert collectives(on_all_devices.lower(spread, mesh)) == ["all-gather"]
    for got, expected in zip(on_all_devices(spread, mesh), spread, strict=True):
        np.testing.assert_array_equal(got, expected) if expected is not None else None


def test_a_rollout_gathers_small_parameters_at_once():
    mesh = make_mesh(fsdp=4)
    params = placed(init_params(jax.random.key(0), decoder()), mesh)
    lay_out = jax.jit(lay_out_weights, static_argnums=(1, 2))
    with jax.numpy_dtype_promotion("standard"):
        assert collectives(lay_out.lower(params, None, mesh)) == ["all-gather"]
    for got, expected in zip(
        jax.tree.leaves(lay_out(params, None, mesh)), jax.tree.leaves(params), strict=True
    ):
        np.testing.assert_array_equal(got, expected)
        assert got.sharding.is_fully_replicated


@pytest.mark.exhaustive
def test_a_device_draws_the_dropout_of_its_own_tokens():
    mesh, config = make_mesh(fsdp=4), decoder()
    lora = LoraConfig(r=2, target_modules="all-linear", lora_dropout=0.5)
    state = begin_training(init_adapter(jax.random.key(1), config, lora), None, mesh)
    frozen = placed(with_adapter(init_params(jax.random.key(0), config), config, lora), mesh)
    rows, lengths = batch()
    [(_, packing)] = plan(lengths, TIME, tokens=10_000, shards=4)

    def step(state, frozen, key):
        options = {"frozen": frozen, "key": key, "mesh": mesh, "packing": packing}
        return grad_step(state, rows, config, GRPOLoss(beta=0.0), **options)

    keys = jax.random.split(jax.random.key(7), ROWS)
    text = jax.jit(step).lower(state, frozen, keys).compile().as_text()
    sizes = [np.prod([int(n) for n in x.split(",")]) for x in re.findall(r"u32\[([\d,]+)\]", text)]
    # Bits for the widest projection, of a quarter of the places.
    widest = config.intermediate_size
    assert max(sizes) == packing.sources.size // 4 * widest
