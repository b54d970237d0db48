"""What XLA makes of it: one cache, and the same completions on eight devices as on one."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.model.families import batch, config_of, each, family, params_of
from tests.sampler.completions import PROMPTS
from twinkle_jax.model import init_params, make_mesh, parse_config, shard_like_params
from twinkle_jax.sampler import Sampling, generate

OTHERS = ("qwen2", "qwen3_5_text", "youtu")


@pytest.mark.slow
def test_the_loop_carries_one_cache():
    """Temporary memory beyond one cache and one layer of it is small."""
    config = parse_config(family("qwen3", num_hidden_layers=16))
    params = jax.eval_shape(lambda: init_params(jax.random.key(0), config))
    prompts, samples, new = 4, 16, 500

    def run(params, tokens, key):
        return generate(
            params,
            config,
            tokens,
            None,
            key,
            num_samples=samples,
            max_new_tokens=new,
        )

    tokens = jax.ShapeDtypeStruct((prompts, 13), jnp.int32)
    compiled = (
        jax.jit(run).lower(params, tokens, jax.eval_shape(lambda: jax.random.key(0))).compile()
    )
    a = config.attention
    slots = prompts * samples * (12 + new)
    cache = slots * 2 * a.key_value_heads * a.head_dim * config.layers * 4
    temporary = compiled.memory_analysis().temp_size_in_bytes
    assert temporary < 1.3 * cache


OTHER_MESHES = [{"data": 8}, {"data": 2, "fsdp": 2, "tensor": 2}]


def run(params, *, name, mesh=None, slots=None):
    return generate(
        params,
        config_of(name),
        *batch(PROMPTS, 6, "left"),
        jax.random.key(0),
        Sampling(0.9, top_p=0.95, stop_tokens=[3]),
        num_samples=2,
        max_new_tokens=8,
        mesh=mesh,
        slots=slots,
    )


@functools.cache
def on_eight(name, *axes):
    """The program on a mesh, and what it draws."""
    mesh = make_mesh(**dict(axes))
    params = jax.device_put(params_of(name), shard_like_params(params_of(name), mesh))
    program = jax.jit(functools.partial(run, name=name, mesh=mesh)).lower(params).compile()
    return program, program(params)


@pytest.mark.parametrize("axes", each([{"fsdp": 8}, *OTHER_MESHES]), ids=str)
@pytest.mark.parametrize("name", each(("qwen3", *OTHERS)))
def test_eight_devices_draw_what_one_draws(name, axes):
    alone, (_, spread) = run(params_of(name), name=name), on_eight(name, *axes.items())
    np.testing.assert_array_equal(spread.tokens, alone.tokens)
    np.testing.assert_array_equal(spread.mask, alone.mask)
    np.testing.assert_allclose(spread.logprobs, alone.logprobs, atol=1e-4)


def test_parameters_are_gathered_before_the_loop():
    """On an fsdp mesh the loop over tokens moves six numbers, once every few tokens."""
    text = on_eight("qwen3", ("fsdp", 8))[0].as_text()
    moves = re.compile(r" (all-gather|all-to-all|collective-permute|all-reduce)(-start)?\(")
    [moved] = [x for x in text.splitlines() if "while/body" in x and moves.search(x)]
    assert " = s32[6]{0} all-reduce(" in moved
    assert "while/body/while/body" not in moved
    assert "all-gather(" in text


@pytest.mark.slow
def test_rows_that_devices_do_not_divide_are_drawn_too():
    mesh = make_mesh(data=8)
    alone, spread = (
        generate(
            params_of("qwen2"),
            config_of("qwen2"),
            *batch(PROMPTS, 6, "left"),
            jax.random.key(0),
            num_samples=3,
            max_new_tokens=4,
            mesh=where,
        )
        for where in (None, mesh)
    )
    np.testing.assert_array_equal(spread.tokens, alone.tokens)
    with pytest.raises(ValueError, match="slots must"):
        run(params_of("qwen2"), name="qwen2", mesh=mesh, slots=4)
