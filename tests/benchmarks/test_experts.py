"""What the chosen experts of each token cost, beside all experts for all tokens.

`python -m pytest tests/benchmarks/test_experts.py -s -p no:xdist`. A layer of experts on a CPU, in
float32: tokens sorted into blocks of an expert each, against a loop over all experts. Rounds are
interleaved; medians. Two minutes.
"""

import statistics
import time
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.model.families import family
from twinkle_jax.model import parse_config
from twinkle_jax.model.decoder import feed_forward

ROUNDS = 7
SIZES = {"width": 512, "inner": 192, "number": 128, "chosen": 8}


def all_experts(config, x, routed, experts):
    """Apply an expert after the other to all tokens."""

    @jax.checkpoint
    def add(total, expert):
        number, gate_up, down = expert
        gate, up = jnp.split(x @ gate_up, 2, axis=-1)
        weight = jnp.sum(jnp.where(routed.chosen == number, routed.share, 0), axis=1, keepdims=True)
        return total + (jax.nn.silu(gate) * up) @ down * weight, None

    numbers = jnp.arange(config.experts.number, dtype=jnp.int32)
    matrices = experts.gate_up[0], experts.down[0]
    return jax.lax.scan(add, jnp.zeros_like(x), (numbers, *matrices))[0]


def layer(config, mix, x, router, gate_up, down):
    routed = feed_forward._route(x, router, config.experts)
    return mix(config, x, routed, feed_forward._Experts(gate_up, down, jnp.int32(0)))


@pytest.mark.parametrize("tokens", [1, 8, 64, 512, 2048])
def test_experts(tokens):
    config = parse_config(
        family(
            "qwen3_moe",
            hidden_size=SIZES["width"],
            moe_intermediate_size=SIZES["inner"],
            num_experts=SIZES["number"],
            num_experts_per_tok=SIZES["chosen"],
        )
    )
    rng = np.random.default_rng(0)
    shapes = [
        (tokens, SIZES["width"]),
        (SIZES["width"], SIZES["number"]),
        (1, SIZES["number"], SIZES["width"], 2 * SIZES["inner"]),
        (1, SIZES["number"], SIZES["inner"], SIZES["width"]),
    ]
    arrays = [jnp.asarray(rng.normal(size=x) / x[-2] ** 0.5, jnp.float32) for x in shapes]
    ways = {"chosen": feed_forward._in_blocks, "all": all_experts}
    ratios = []
    for gradient in (False, True):
        programs = {}
        for name, mix in ways.items():
            run = partial(layer, config, mix)
            square = jax.grad(lambda *x, run=run: jnp.sum(run(*x) ** 2), argnums=(0, 1, 2, 3))
            programs[name] = jax.jit(square if gradient else run)
        results = [jax.tree.leaves(jax.block_until_ready(f(*arrays))) for f in programs.values()]
        for here, there in zip(*results, strict=True):
            np.testing.assert_allclose(here, there, atol=1e-4 * float(jnp.max(jnp.abs(there))))
        times = {name: [] for name in ways}
        for _ in range(ROUNDS):
            for name, program in programs.items():
                start = time.perf_counter()
                jax.block_until_ready(program(*arrays))
                times[name].append(time.perf_counter() - start)
        chosen, everything = (1e3 * statistics.median(times[name]) for name in ways)
        ratios.append(everything / chosen)
        print(
            f"\n{tokens} tokens, {'gradient' if gradient else 'forward'}: "
            f"{chosen:.1f} ms, all experts {everything:.1f} ms, {ratios[-1]:.1f} times"
        )
    assert min(ratios) > (2 if tokens >= 512 else 0.5)
