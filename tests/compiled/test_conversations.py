"""What the TPU compiler says of conversations in pages: no program copies the cache of all rows."""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from tests.compiled.described import described_mesh
from tests.compiled.marks import compiled_by
from tests.compiled.models import config_of
from twinkle_jax.model import parameter_shapes
from twinkle_jax.model.decoder.sharding import AXES
from twinkle_jax.sampler import conversations
from twinkle_jax.sampler.sizes import Setup

pytestmark = [*compiled_by("tpu"), pytest.mark.usefixtures("as_users_compile")]
ROWS, LINES, PAGES, FULL, MEAN = 128, 8, 2560, 8192, 2048


class Compiled(NamedTuple):
    """What the compiler says of each program's memory, and the bytes of the cache of all rows."""

    memory: dict[str, Any]
    held: int


@pytest.fixture(scope="module")
def compiled():
    """Programs of 128 conversations with 2,048 tokens on average and room for 8,192."""
    config = config_of("Qwen2.5-0.5B")
    devices = described_mesh("v5e:2x2", 1, 4, 1, bare=True).devices
    mesh = Mesh(devices.reshape(-1)[:1].reshape(1, 1, 1), AXES)
    there = NamedSharding(mesh, PartitionSpec())
    setup = Setup(config, 1, 512, 1, jnp.dtype("bfloat16"), None, mesh, keeps_ended=True)
    setup = setup.in_pages(FULL)

    def on_chip(tree):
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=there), tree)

    def numbers(*shape, dtype="int32"):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=there)

    weights = on_chip(parameter_shapes(config, "bfloat16"))
    keys = on_chip(jax.eval_shape(lambda: jax.random.split(jax.random.key(0), ROWS)))
    line = numbers(LINES)
    with jax.numpy_dtype_promotion("standard"):
        empty = partial(conversations._empty, setup=setup, rows=ROWS, capacity=PAGES, full=FULL)
        cache = on_chip(jax.eval_shape(empty, weights))
        take = partial(conversations.take, setup=setup, capacity=FULL)
        start = partial(conversations.start, setup=setup, slots=ROWS, capacity=PAGES)
        whole = on_chip(jax.eval_shape(take, cache, line, line))
        row = numbers(ROWS)
        rows = (cache, numbers(ROWS, dtype="bool"), row, row, numbers(ROWS, FULL + 1), keys)
        state = on_chip(jax.eval_shape(start, *rows))
        programs = {
            "take": (take, (cache, line, line), ()),
            "read": (
                partial(conversations.read, setup=setup),
                (weights, whole, numbers(LINES, 64), numbers(LINES, 64, dtype="bool")),
                1,
            ),
            "put": (partial(conversations.put, setup=setup), (cache, whole, line, line), 0),
            "start": (start, rows, ()),
            "keep": (partial(conversations.keep, setup=setup), (cache, state.slots), 0),
        }
        memory = {}
        for name, (program, arguments, donated) in programs.items():
            lowered = jax.jit(program, donate_argnums=donated).lower(*arguments)
            memory[name] = lowered.compile().memory_analysis()
    return Compiled(memory, sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(cache.layers)))


def test_all_rows_take_what_their_tokens_take(compiled):
    """Whole rows would take 12 GiB. The cache is rounded up, by less than half."""
    tokens = 24 * 2 * 2 * 64 * 2  # bytes of a token: layers, keys and values, heads, bfloat16
    assert 1 < compiled.held / (ROWS * MEAN * tokens) < 1.5


def test_rows_are_replaced_in_place(compiled):
    """Half of the cache is copied while it is written to; there is no second one."""
    for name in ("put", "keep"):
        memory = compiled.memory[name]
        assert memory.alias_size_in_bytes >= compiled.held, name
        assert memory.temp_size_in_bytes < 0.55 * compiled.held, name


def test_few_rows_are_read_at_a_time(compiled):
    """Eight whole rows, and as much again as they are taken out of pages."""
    rows = compiled.held * LINES * FULL // (PAGES * 128)
    take, read = compiled.memory["take"], compiled.memory["read"]
    assert take.output_size_in_bytes < 1.01 * rows and take.temp_size_in_bytes < 1.01 * rows
    assert read.temp_size_in_bytes < 2.5 * rows


def test_a_turn_begins_with_one_copy(compiled):
    start = compiled.memory["start"]
    assert start.output_size_in_bytes < 1.01 * compiled.held
    assert start.temp_size_in_bytes < 0.01 * compiled.held
