"""Batches to train on, and gradients of them."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax

from tests.loss.cases import POLICY_LOSSES as OBJECTS
from tests.model.families import config_of, params_of
from twinkle_jax.data import Batch
from twinkle_jax.loss import Loss
from twinkle_jax.training import grad_step, train_state

SGD = optax.sgd(1.0)
ADAMW = optax.adamw(1.0)


@dataclasses.dataclass(frozen=True)
class Chosen(Loss):
    """One of all losses, by a number that is traced: so they share what is compiled."""

    which: jax.Array
    unit: str
    require_entropy = True

    @property
    def divides_by(self):
        return self.unit

    def __call__(self, inputs, outputs, **kwargs):
        def call(loss_fn):
            return lambda: loss_fn(inputs, outputs, **kwargs)

        return jax.lax.switch(self.which, [call(loss_fn) for loss_fn in OBJECTS.values()])


def chosen(name):
    return Chosen(jnp.int32(list(OBJECTS).index(name)), OBJECTS[name].divides_by)


def random_batch(rows=4, time=8, vocab=48, seed=0):
    """Rows of different lengths, padded on the right, with labels after a prompt."""
    rng = np.random.default_rng(seed)
    tokens = rng.integers(1, vocab, (rows, time + 1))
    columns = np.arange(time)[None]
    lengths = rng.integers(3, time + 1, (rows, 1))
    labelled = (columns >= 2) & (columns < lengths)
    labelled[0, 2:] = True
    if rows > 2:
        labelled[2] = False  # a sequence without tokens still counts as one
    logps = -rng.exponential(1.0, (4, rows, time))
    return Batch(
        tokens=jnp.asarray(np.where(columns < lengths, tokens[:, :-1], 0), jnp.int32),
        labels=jnp.asarray(np.where(labelled, tokens[:, 1:], -100), jnp.int32),
        advantages=jnp.asarray(
            np.broadcast_to(rng.normal(size=(rows, 1)), (rows, time)), "float32"
        ),
        old_logps=jnp.asarray(logps[0] - 3, jnp.float32),
        ref_logps=jnp.asarray(logps[1] - 3, jnp.float32),
    )


def take(batch, rows):
    return jax.tree.map(lambda x: x[rows], batch)


@jax.jit
def _divided(gradients, denominator):
    return jax.tree.map(lambda g: g / denominator, gradients)


@functools.partial(jax.jit, static_argnums=1)
def copied_state(params, optimizer=None):
    """A state of its own: what is donated must not be the parameters that tests share."""
    return train_state(jax.tree.map(jnp.copy, params), optimizer)


def fresh(name="qwen3", optimizer=None):
    return copied_state(params_of(name), optimizer)


def accumulate(loss_fn, batches, name="qwen3", **options):
    """Gradients divided once, and the summaries."""
    state, summaries = fresh(name), []
    for batch in batches:
        state, summary = grad_step(state, batch, config_of(name), loss_fn, **options)
        summaries.append(summary)
    return _divided(state.gradient_sum, state.denominator), summaries


def relative(a, b):
    """Distance of two trees over the length of the second."""
    flat = (np.concatenate([np.ravel(x).astype(float) for x in jax.tree.leaves(t)]) for t in (a, b))
    a, b = flat
    return np.linalg.norm(a - b) / np.linalg.norm(b)
