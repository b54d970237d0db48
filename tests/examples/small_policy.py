"""The policy-gradient example, and a smaller one of the same code that tests can afford."""

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import AxisType

from tests.examples import load

example = load("policy_gradient")

# A smaller policy, a reward that it often gets untrained, and an optimizer without memory: steps
# compile in a third of the time, and without Adam a tiny gradient makes a tiny difference.

small = load("policy_gradient")
small.LAYERS, small.HEADS, small.WIDTH = 1, 2, 8
small.OPTIMIZER = optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(1.0))
small.exact_match = lambda prompts, tokens, mask: (tokens[:, 0] % 2).astype(jnp.float32)


def run_of(module, *, devices=8, estimator=example.grpo_advantage, scale="group", prompts=16):
    return module.Run(
        graph=nnx.graphdef(nnx.eval_shape(lambda: module.Policy(nnx.Rngs(0)))),
        mesh=jax.make_mesh(
            (devices,), ("data",), (AxisType.Auto,), devices=jax.devices()[:devices]
        ),
        estimator=estimator,
        scale=scale,
        prompts=prompts,
        generations=4,
    )


def state_of(module, run):
    params = module.initial_params(jax.random.key(3))
    # A bolder head than a fresh one, so that tokens, and mistakes about them, are not near ties.
    params["head"]["kernel"][...] = 5 * params["head"]["kernel"][...]
    return module.begin(params, jax.random.key(5), run=run)


RUN = run_of(small, devices=1)


def policy_of(params):
    return nnx.merge(RUN.graph, params)
