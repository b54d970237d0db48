"""Gathers in two steps: what one gather gives, and what one device computes."""

import functools
import pathlib
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from twinkle_jax.model import make_mesh
from twinkle_jax.model.decoder.gather_steps import gather_in_steps, steps_of

ROOT = pathlib.Path(__file__).parents[3]


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
from tests.model.decoder.test_mesh_layout import assert_as_on_one_device, bare, spread
from twinkle_jax.model.decoder.mesh_layout import gather_weights

mesh = bare(1, 64, 2)
wide = jnp.arange(64.0 * 128).reshape(64, 128)
kernels = {"up_proj": {"kernel": wide}, "norm": {"kernel": wide}, "down_proj": {"kernel": wide.T}}
there = {"layers": {"0": {"mlp": jax.tree.map(lambda x: x[None], kernels)}}}
there = spread(there, mesh)["layers"]["0"]["mlp"]
gather = jax.jit(
    lambda x: gather_weights(jax.tree.map(lambda leaf: leaf[0], {"mlp": x}), "bfloat16", mesh)
)
text = gather.lower(there).compile().as_text()
found = gather(there)["mlp"]
for name, kernel in kernels.items():
    x = found[name]["kernel"]
    dtype = "float32" if name == "norm" else "bfloat16"
    np.testing.assert_array_equal(x, kernel["kernel"].astype(dtype))
    assert x.dtype == dtype
assert len(re.findall(r" all-gather\\(", text)) == 4  # two steps, of two kernels
assert found["down_proj"]["kernel"].sharding.shard_shape((128, 64)) == (64, 64)

assert_as_on_one_device("qwen3", bare(1, 64, 1), rows=64, hidden_size=64, intermediate_size=128)
"""


@pytest.mark.exhaustive
def test_64_devices_give_the_numbers_of_one():
    command = [sys.executable, "-c", MANY]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
