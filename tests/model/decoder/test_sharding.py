"""Many devices: the same numbers as on one, and each holds its share."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec

from tests.model.families import NAMES, config_of, each, family, params_of, random_params
from tests.model.training import ADAMW
from twinkle_jax.loss import GRPOLoss
from twinkle_jax.model import (
    Decoder,
    make_mesh,
    parameter_shapes,
    parse_config,
    partition_rules,
    save_pretrained,
    shard_like_params,
)
from twinkle_jax.model.decoder.sharding import RULES
from twinkle_jax.training import train_state
from twinkle_jax.training.update import _apply
from twinkle_jax.twinkle.model import TransformersModel

pytest.importorskip("safetensors", reason="pip install 'twinkle-jax[checkpoints]'")


def trained(checkpoint, mesh):
    """Logits, the gradient of a batch, and parameters three updates later."""
    rng = np.random.default_rng(0)
    model = TransformersModel(checkpoint, mesh=mesh)
    model.set_loss(GRPOLoss(beta=0.1, entropy_coef=0.01))
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
        lowered = _apply.lower(state, one, one, None, optimizer=ADAMW, mesh=mesh)
        return lowered.compile().memory_analysis()

    many = memory(state, mesh)
    one = memory(jax.device_put(state, jax.devices()[0]), None)
    assert many.argument_size_in_bytes < 1.03 / 8 * one.argument_size_in_bytes
    assert many.temp_size_in_bytes < one.argument_size_in_bytes / 4
    # Donated: the new state takes the place of the old one.
    assert many.alias_size_in_bytes > 0.99 * many.output_size_in_bytes - 64


@pytest.mark.parametrize("name", each(NAMES))
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


def test_axes_that_do_not_divide_are_left_out():
    rule = partition_rules(make_mesh(fsdp=2, tensor=4))
    name = "0/mu/layers/0/mlp/up_proj/kernel"
    assert rule(name, (3, 24, 40)) == PartitionSpec(None, "fsdp", "tensor")
    assert rule(name, (3, 25, 40)) == PartitionSpec(None, None, "tensor")
    assert rule(name, (3, 24, 42)) == PartitionSpec(None, "fsdp", None)
    assert rule("norm/scale", (24,)) == rule("count", ()) == PartitionSpec()


def test_meshes_that_are_refused():
    axes = (AxisType.Auto,) * 2
    with pytest.raises(
        ValueError,
        match=r"mesh must have the axes \('data', 'fsdp', 'tensor'\), got \('data', 'model",
    ):
        partition_rules(jax.make_mesh((2, 4), ("data", "model"), axes))
    explicit = (AxisType.Explicit,) * 3
    with pytest.raises(ValueError, match="mesh must have automatic axes"):
        partition_rules(jax.make_mesh((2, 2, 2), ("data", "fsdp", "tensor"), explicit))


def test_random_parameters_differ():
    """The comparison above would hold for anything if parameters were all alike."""
    kernel = random_params(config_of("qwen3"))["layers"]["0"]["mlp"]["up_proj"]["kernel"]
    assert np.std(kernel) > 0.1
