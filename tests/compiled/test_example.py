"""The example's whole step, from sampling to the update, as the compilers make it."""

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from tests.compiled.costs import costs
from tests.compiled.described import described_mesh
from tests.compiled.marks import compiled_by
from tests.examples import load
from twinkle_jax.advantage import grpo_advantage


def case(topology, platform):
    return pytest.param(topology, marks=compiled_by(platform))


@pytest.mark.usefixtures("as_users_compile")
@pytest.mark.parametrize(
    "topology",
    [
        *(case(topology, "tpu") for topology in ("v5e:2x2", "v5p:2x2x1", "v6e:2x2")),
        case("h100:1x4", "cuda"),
    ],
)
def test_devices_send_each_other_gradients_and_nothing_else(topology):
    example = load("policy_gradient")
    mesh = Mesh(described_mesh(topology, 4, 1, 1, bare=True).devices.reshape(4), ("data",))
    policy = nnx.eval_shape(lambda: example.Policy(nnx.Rngs(0)))
    graph, params = nnx.split(policy)
    run = example.Run(graph, mesh, grpo_advantage, "group", prompts=64, generations=8)
    everywhere = NamedSharding(mesh, PartitionSpec())
    begun = jax.eval_shape(
        lambda params, key: example.TrainState(
            params, example.OPTIMIZER.init(params), jnp.int32(0), key
        ),
        params,
        jax.random.key(0),
    )
    state = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=everywhere), begun
    )
    # Triton's products are chosen by trying them out; without a GPU one of these finds no tiles.
    options = {"xla_gpu_enable_triton_gemm": False} if topology.startswith("h100") else {}
    measured = costs(example.train_step.lower(state, run=run).compile(options), 4)
    gradient = sum(4 * x.size for x in jax.tree.leaves(params))
    assert set(measured.sent) == {"all-reduce"}
    assert measured.wire < 1.001 * 2 * 3 / 4 * gradient, (
        measured.wire / gradient,
        measured.largest[:5],
    )
    assert measured.peak < 64 * 2**20, measured.peak / 2**20
