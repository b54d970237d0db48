"""Many devices give the numbers of one, each holds its share, and rows stay where they are."""

import functools
import importlib.util
import pathlib
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from tests.model.families import ALL, NAMES, config_of, each, family, params_of, random_params
from tests.model.training import ADAMW, fresh, random_batch, relative
from twinkle_jax.loss import GRPOLoss
from twinkle_jax.model import (
    Decoder,
    hidden_states,
    make_mesh,
    parameter_shapes,
    parse_config,
    partition_rules,
    save_pretrained,
    shard_like_params,
)
from twinkle_jax.model.decoder.sharding import (
    AXES,
    RULES,
    find_mesh,
    gather_in_steps,
    gather_weights,
    steps_of,
)
from twinkle_jax.training import grad_step, score_batch, train_state
from twinkle_jax.training.state import _apply
from twinkle_jax.twinkle.model import TransformersModel

ROOT = pathlib.Path(__file__).parents[3]
LOSS = GRPOLoss(beta=0.1, entropy_coef=0.01)
NEEDS_SAFETENSORS = pytest.mark.skipif(
    importlib.util.find_spec("safetensors") is None, reason="pip install 'twinkle-jax[checkpoints]'"
)


def trained(checkpoint, mesh):
    """Logits, the gradient of a batch, and parameters three updates later."""
    rng = np.random.default_rng(0)
    model = TransformersModel(checkpoint, mesh=mesh)
    model.set_loss(LOSS)
    model.set_optimizer("AdamW", lr=3e-4)
    inputs = [{"input_ids": rng.integers(1, 48, n)} for n in (7, 12, 16, 3, 9)]
    for feature in inputs:
        feature["labels"] = np.append(feature["input_ids"][1:], -100)
    logits = model.forward_only(inputs=inputs, return_logits=True)["logits"]
    gradient = None
    for _ in range(3):
        model.forward_backward(
            inputs=inputs,
            advantages=rng.normal(size=5),
            old_logps=[-3 - rng.random(16)[: len(x["labels"])] for x in inputs],
            ref_logps=[-3 - rng.random(16)[: len(x["labels"])] for x in inputs],
        )
        if gradient is None:
            gradient = jax.tree.map(np.asarray, model.state.gradient_sum)
        model.clip_grad_and_step()
    return logits, gradient, model.get_state_dict(), model


def assert_sharded_by_the_rules(model):
    """Parameters, gradients that wait and the optimizer's state alike."""
    expected = shard_like_params(model.state, model.mesh)
    same = jax.tree.map(lambda x, s: x.sharding.is_equivalent_to(s, x.ndim), model.state, expected)
    assert all(jax.tree.leaves(same))


@NEEDS_SAFETENSORS
@pytest.mark.exhaustive
@pytest.mark.parametrize("name", each(["qwen3", "qwen3_5_text"]))
def test_two_by_two_by_two_devices_give_the_numbers_of_one(name, tmp_path):
    save_pretrained(Decoder(config_of(name), params_of(name)), tmp_path / "in")
    logits, gradient, params, _ = trained(tmp_path / "in", None)
    many, spread, after, model = trained(tmp_path / "in", make_mesh(data=2, fsdp=2, tensor=2))
    np.testing.assert_allclose(many, logits, atol=1e-5 * np.abs(logits).max())
    for a, b in zip(jax.tree.leaves(spread), jax.tree.leaves(gradient), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5 * np.abs(b).max(), rtol=0)
    for path, x in params.items():
        np.testing.assert_allclose(after[path], x, atol=1e-5, rtol=0, err_msg=path)
    # What went in sharded came out sharded the same way, the optimizer's state too.
    kernel = model.state.params["layers"]["0"]["mlp"]["up_proj"]["kernel"]
    assert kernel.sharding.spec == PartitionSpec(None, "fsdp", "tensor")
    assert kernel.addressable_shards[0].data.size * 4 == kernel.size
    assert_sharded_by_the_rules(model)


@NEEDS_SAFETENSORS
def test_a_state_is_sharded_from_the_start(tmp_path):
    save_pretrained(Decoder(config_of("qwen3"), params_of("qwen3")), tmp_path)
    model = TransformersModel(tmp_path, mesh=make_mesh(data=2, fsdp=2, tensor=2))
    model.set_optimizer("AdamW", lr=3e-4)
    assert_sharded_by_the_rules(model)


def test_eight_ways_sharded_each_device_holds_an_eighth():
    config = parse_config(
        family(
            "qwen3",
            hidden_size=64,
            intermediate_size=128,
            vocab_size=512,
            num_attention_heads=8,
            num_key_value_heads=8,
        )
    )
    mesh = make_mesh(fsdp=8)
    shapes = parameter_shapes(config)
    begin = jax.jit(
        lambda: train_state(jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes), ADAMW),
        out_shardings=shard_like_params(
            jax.eval_shape(
                lambda: train_state(
                    jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes), ADAMW
                )
            ),
            mesh,
        ),
    )
    state = begin()

    def share(tree):
        leaves = jax.tree.leaves(tree)
        held = sum(x.addressable_shards[3].data.nbytes for x in leaves)
        return held / sum(x.nbytes for x in leaves)

    assert share(state.params) < 1.03 / 8
    assert share(state.optimizer_state) < 1.03 / 8
    assert share(state.gradient_sum) < 1.03 / 8

    def memory(state, mesh):
        one = jnp.float32(1)
        lowered = _apply.lower(state, one, one, None, optimizer=ADAMW, skip_zero=False, mesh=mesh)
        return lowered.compile().memory_analysis()

    many = memory(state, mesh)
    one = memory(jax.device_put(state, jax.devices()[0]), None)
    assert many.argument_size_in_bytes < 1.03 / 8 * one.argument_size_in_bytes
    assert many.temp_size_in_bytes < one.argument_size_in_bytes / 4
    # Donated: the new state takes the place of the old one.
    assert many.alias_size_in_bytes > 0.99 * many.output_size_in_bytes - 64


@pytest.mark.parametrize("name", NAMES)
def test_every_matrix_has_a_rule(name):
    """Only vectors that are small fall through to the last line of the table."""
    rule = partition_rules(make_mesh(data=2, fsdp=2, tensor=2))
    for path, leaf in jax.tree_util.tree_leaves_with_path(parameter_shapes(config_of(name))):
        spec = rule(jax.tree_util.keystr(path, simple=True, separator="/"), leaf.shape)
        stacked = path[0].key == "layers"
        if leaf.ndim - stacked >= 2:
            assert any(axis is not None for axis in spec), path
        assert not stacked or not spec or spec[0] is None
    assert RULES[-1] == ("", PartitionSpec())


@pytest.mark.parametrize("name", NAMES)
def test_a_layer_gathers_what_the_rules_spread(name):
    """In the compute type. Experts and routers of Gemma 4 lie beside `mlp`, not below it."""
    mesh, shapes = make_mesh(data=2, fsdp=2, tensor=2), parameter_shapes(config_of(name))
    rule = partition_rules(mesh)
    for member, stacked in shapes["layers"].items():
        layer = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), stacked)
        gathered = jax.eval_shape(lambda x: gather_weights(x, "bfloat16", mesh), layer)
        for path, leaf in jax.tree_util.tree_leaves_with_path(gathered):
            place = f"layers/{member}/{jax.tree_util.keystr(path, simple=True, separator='/')}"
            is_spread = "fsdp" in rule(place, (1, *leaf.shape))
            assert leaf.dtype == ("bfloat16" if is_spread else "float32"), place


def test_sinks_are_spread_with_their_heads_and_biases_with_their_experts():
    rule = partition_rules(make_mesh(fsdp=4, tensor=2))
    assert tuple(rule("layers/0/self_attn/sinks", (3, 4))) == (None, "tensor")
    for name in ("gate_up_proj", "down_proj"):
        spec = rule(f"layers/0/mlp/experts/{name}/bias", (3, 6, 24))
        assert tuple(spec) == (None, "tensor", None)


def test_axes_that_do_not_divide_are_left_out():
    rule = partition_rules(make_mesh(fsdp=2, tensor=4))
    name = "0/mu/layers/0/mlp/up_proj/kernel"
    assert rule(name, (3, 24, 40)) == PartitionSpec(None, "fsdp", "tensor")
    assert rule(name, (3, 25, 40)) == PartitionSpec(None, None, "tensor")
    assert rule(name, (3, 24, 42)) == PartitionSpec(None, "fsdp", None)
    assert rule("norm/scale", (24,)) == rule("count", ()) == PartitionSpec()


def test_meshes_that_are_refused():
    axes = (AxisType.Auto,) * 2
    with pytest.raises(ValueError, match="mesh"):
        partition_rules(jax.make_mesh((2, 4), ("data", "model"), axes))
    explicit = (AxisType.Explicit,) * 3
    with pytest.raises(ValueError, match="mesh"):
        partition_rules(jax.make_mesh((2, 2, 2), ("data", "fsdp", "tensor"), explicit))


@pytest.mark.parametrize("sizes", [{"fsdp": 0}, {"fsdp": -1}, {"tensor": 2.0}, {"data": 1000}])
def test_sizes_of_meshes_that_are_refused(sizes):
    assert make_mesh(fsdp=np.int64(2)).shape["fsdp"] == 2
    with pytest.raises(ValueError, match=r"fsdp and tensor must be positive|Number of devices"):
        make_mesh(**sizes)


def test_random_parameters_differ():
    """The comparison above would hold for anything if parameters were all alike."""
    kernel = random_params(config_of("qwen3"))["layers"]["0"]["mlp"]["up_proj"]["kernel"]
    assert np.std(kernel) > 0.1


def bare(*shape):
    """A mesh whose devices stand in an order that no device topology has."""
    devices = np.array(jax.devices()[: np.prod(shape)])[::-1]
    return Mesh(devices.reshape(shape), AXES)


def spread(tree, mesh):
    return jax.device_put(tree, shard_like_params(tree, mesh))


def large(collectives, elements):
    """The collectives of a compiled program with results of at least so many elements."""
    for line in collectives.splitlines():
        match = re.search(r" = (.+?) (all-reduce|all-gather|all-to-all)(-start)?\(", line)
        if match:
            shapes = re.findall(r"\w\[([\d,]+)\]", match[1])
            sizes = [np.prod([int(n) for n in shape.split(",")]) for shape in shapes]
            if max(sizes, default=0) >= elements:
                yield match[2], shapes


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


@pytest.mark.slow
def test_the_mesh_is_found_from_the_arrays(compilations):
    mesh, batch = make_mesh(data=2, fsdp=4), random_batch(rows=8)
    state = spread(fresh("qwen3"), mesh)
    named, _ = grad_step(state, batch, config_of("qwen3"), LOSS, mesh=mesh)
    before = len(compilations)
    state = spread(fresh("qwen3"), mesh)
    compiled = len(compilations) - before  # by making the state
    inferred, _ = grad_step(state, batch, config_of("qwen3"), LOSS)
    assert len(compilations) == before + compiled
    assert relative(inferred.gradient_sum, named.gradient_sum) == 0


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


@pytest.mark.slow
def test_parameters_are_gathered_in_the_compute_type_and_gradients_scattered_in_it():
    mesh, config = make_mesh(fsdp=8), config_of("qwen3")
    params = spread(random_params(config), mesh)

    def total(params):
        tokens = jnp.ones((8, 4), jnp.int32)
        out = hidden_states(params, config, tokens, mesh=mesh, compute_dtype="bfloat16")
        return jnp.sum(out.astype(jnp.float32))

    with jax.numpy_dtype_promotion("standard"):
        text = jax.jit(jax.grad(total)).lower(params).as_text()
    constraints = re.findall(r"sharding_constraint .*<@mesh, \[(.*?)\]> : tensor<24x40xbf16>", text)
    gathered = [where for where in constraints if "fsdp" not in where]
    # gate_proj and up_proj, forwards and backwards, each spread before it is gathered; and their
    # gradients, which are spread and nothing else
    assert (len(gathered), len(constraints)) == (4, 10)


def assert_as_on_one_device(name, mesh, rows=8, **changes):
    """The scores and the gradient of a batch; with linear layers, as far as one device knows it.

    These amplify rounding in the gradient of these rows: all parameters made larger or smaller by
    one rounding or two change it by up to 3e-4 on one device, more than a mesh does. Three times
    the largest such change is what a difference may come to there, where that is more than 1e-5.
    """
    config = parse_config(family(name, **changes))
    linear = config.delta_net is not None
    params, batch = random_params(config), random_batch(rows=rows, time=12)

    def results(params, where):
        state = train_state(jax.tree.map(jnp.copy, params), None)
        state = state if where is None else spread(state, where)
        scores = score_batch(state.params, batch, config, mesh=where)
        state, _ = grad_step(state, batch, config, LOSS, mesh=where)
        return jax.device_get((scores.logps, jax.tree.leaves(state.gradient_sum)))

    def rounded(steps):
        factor = jnp.float32(1 + steps * 2**-23)
        return results(jax.tree.map(lambda x: x * factor, params), None)[1]

    (values, there), (expected, here) = results(params, mesh), results(params, None)
    nearby = zip(*map(rounded, (1, -1, 2, -2) if linear else (1,)), strict=True)
    allowed = 1e-5 * np.abs(expected).max() if linear else 1e-4
    np.testing.assert_allclose(values, expected, rtol=0, atol=allowed)
    for x, y, near in zip(there, here, nearby, strict=True):
        known = max(1e-5 * np.abs(y).max(), linear * 3 * max(np.abs(z - y).max() for z in near))
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

    with pytest.raises(ValueError, match="batch"):
        score(6, 8, data=2, fsdp=2)
    with pytest.raises(ValueError, match="mesh"):
        score(8, 8, tensor=4)
    with pytest.raises(ValueError, match="batch"):
        score(8, 7, tensor=2)


def test_neighbourhoods_are_as_large_as_they_are_many():
    assert [steps_of(size) for size in (1, 8, 32)] == [(1, 1), (8, 1), (32, 1)]
    assert [steps_of(size) for size in (64, 96, 128, 256)] == [(8, 8), (8, 12), (8, 16), (16, 16)]
    assert steps_of(37) == (1, 37)


@pytest.mark.parametrize("dimension", [0, 1])
@pytest.mark.parametrize(("fsdp", "steps"), [(8, (2, 4)), (8, (4, 2)), (8, (1, 8)), (4, (2, 2))])
def test_two_steps_give_what_one_does(fsdp, steps, dimension):
    mesh = make_mesh(data=8 // fsdp, fsdp=fsdp)
    spread = PartitionSpec(*("fsdp" if axis == dimension else None for axis in range(2)))
    x = jnp.arange(16.0 * 24).reshape(16, 24)
    weights = jnp.sin(jnp.arange(8.0 * 16 * 24)).reshape(8, 16, 24)  # one part for each device

    def gathered(steps):
        @functools.partial(
            jax.shard_map,
            mesh=mesh,
            in_specs=(spread, PartitionSpec(("data", "fsdp"))),
            out_specs=PartitionSpec(("data", "fsdp")),
        )
        def products(x, weights):
            return gather_in_steps(x, "fsdp", dimension, steps)[None] * weights

        return lambda x: products(x, weights)

    one, two = (gathered(way) for way in ((fsdp, 1), steps))
    np.testing.assert_array_equal(jax.jit(two)(x), x[None] * weights)
    gradients = [jax.jit(jax.grad(lambda x, f=f: jnp.sum(jnp.tanh(f(x)))))(x) for f in (one, two)]
    np.testing.assert_allclose(*gradients, rtol=0, atol=1e-5)
    text = jax.jit(two).lower(x).compile().as_text()
    assert len(re.findall(r" all-gather\(", text)) == (1 if 1 in steps else 2)


MANY = """
import jax
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 128)
import re
import jax.numpy as jnp
import numpy as np
from tests.model.decoder.test_sharding import assert_as_on_one_device, bare, spread
from twinkle_jax.model.decoder.sharding import gather_weights

mesh = bare(1, 64, 2)
wide = jnp.arange(64.0 * 128).reshape(64, 128)
kernels = {"up_proj": {"kernel": wide}, "norm": {"kernel": wide}, "down_proj": {"kernel": wide.T}}
there = {"layers": {"0": {"mlp": jax.tree.map(lambda x: x[None], kernels)}}}
there = spread(there, mesh)["layers"]["0"]["mlp"]
gather = jax.jit(
    lambda x: gather_weights(jax.tree.map(lambda leaf: leaf[0], {"mlp": x}), "bfloat16", mesh)
)
text = gather.lower(there).compile().as_text()
gathered = gather(there)["mlp"]
for name, kernel in kernels.items():
    x = gathered[name]["kernel"]
    dtype = "float32" if name == "norm" else "bfloat16"
    np.testing.assert_array_equal(x, kernel["kernel"].astype(dtype))
    assert x.dtype == dtype
assert len(re.findall(r" all-gather\\(", text)) == 4  # two steps, of two kernels
assert gathered["down_proj"]["kernel"].sharding.shard_shape((128, 64)) == (64, 64)

assert_as_on_one_device("qwen3", bare(1, 64, 1), rows=64, hidden_size=64, intermediate_size=128)
"""


@pytest.mark.exhaustive
def test_64_devices_give_the_numbers_of_one():
    command = [sys.executable, "-c", MANY]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
