"""The update: divide the gradients once, clip them, apply them unless they are not finite."""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Float

from twinkle_jax.model.decoder.sharding import constrain
from twinkle_jax.model.train_step.loss_coefficients import traced_scalar
from twinkle_jax.model.train_step.train_state import TrainState

Scalar = float | Float[Array, ""]


class UpdateInfo(NamedTuple):
    """What became of the gradients.

    Attributes:
        gradient_norm: their global norm, before clipping.
        applied: False where they were not finite, or there were none: nothing but them changed.
    """

    gradient_norm: Float[Array, ""]
    applied: Bool[Array, ""]


def apply_gradients(
    state: TrainState,
    optimizer: optax.GradientTransformation,
    *,
    learning_rate: Scalar = 1.0,
    max_grad_norm: Scalar | None = None,
    mesh: Mesh | None = None,
) -> tuple[TrainState, UpdateInfo]:
    r"""Update parameters with the gradients that wait; compiled, and the state is donated.

    $$g = G / N, \qquad g \leftarrow g \min(1, c / \|g\|), \qquad
      \theta \leftarrow \theta + \eta\, u(g)$$

    Args:
        state: with gradients from [`grad_step`][twinkle_jax.model.grad_step]; gone afterwards.
        optimizer: the Optax transformation $u$ that the state was made with.
        learning_rate: $\eta$, which multiplies the updates; traced. Leave it at 1 for a
            transformation that has its own.
        max_grad_norm: $c$, traced; None clips nothing.
        mesh: what the state lives on; None for one device.

    Returns:
        The state without gradients, and their norm. Where the norm is NaN or infinite the update
        is skipped: parameters, optimizer state and step stay as they were.

    Raises:
        ValueError: if the state was made without an optimizer.
    """
    if state.optimizer_state is None:
        raise ValueError("expected a state with an optimizer: make it with train_state(params, …)")
    limit = np.inf if max_grad_norm is None else max_grad_norm
    return _apply(
        state, traced_scalar(learning_rate), traced_scalar(limit), optimizer=optimizer, mesh=mesh
    )


@partial(jax.jit, static_argnames=("optimizer", "mesh"), donate_argnums=0)
def _apply(
    state: TrainState,
    learning_rate: Float[Array, ""],
    max_grad_norm: Float[Array, ""],
    *,
    optimizer: optax.GradientTransformation,
    mesh: Mesh | None,
) -> tuple[TrainState, UpdateInfo]:
    norm = gradient_norm(state)
    applied = jnp.isfinite(norm) & (state.denominator > 0)
    factor = _clip_factor(norm, max_grad_norm) / jnp.maximum(state.denominator, 1)
    gradients = jax.tree.map(lambda g: jnp.where(applied, g * factor, 0), state.gradient_sum)
    params = jax.tree.map(lambda x: x.astype(jnp.float32), state.params)
    with jax.numpy_dtype_promotion("standard"):
        updates, optimizer_state = optimizer.update(gradients, state.optimizer_state, params)
        params = jax.tree.map(lambda x, u: x + learning_rate * u, params, updates)

    def choose(new: Array, old: Array) -> Array:
        return jnp.where(applied, new.astype(old.dtype), old)

    new_state = TrainState(
        params=jax.tree.map(choose, params, state.params),
        optimizer_state=jax.tree.map(choose, optimizer_state, state.optimizer_state),
        step=state.step + applied.astype(state.step.dtype),
        gradient_sum=jax.tree.map(jnp.zeros_like, state.gradient_sum),
        denominator=jnp.zeros_like(state.denominator),
    )
    return constrain(new_state, mesh), UpdateInfo(norm, applied)


def clip_gradients(state: TrainState, max_grad_norm: Scalar) -> tuple[TrainState, Float[Array, ""]]:
    """Clip the gradients that wait by their global norm, without applying them; donates the state.

    Args:
        state: with gradients.
        max_grad_norm: the largest norm of the gradients once they are divided; traced.

    Returns:
        The state, and the norm before clipping. Gradients that are not finite stay so, and the
        update that follows is skipped.
    """
    return _clip(state, traced_scalar(max_grad_norm))


@partial(jax.jit, donate_argnums=0)
def _clip(
    state: TrainState, max_grad_norm: Float[Array, ""]
) -> tuple[TrainState, Float[Array, ""]]:
    norm = gradient_norm(state)
    factor = jnp.where(jnp.isfinite(norm), _clip_factor(norm, max_grad_norm), jnp.nan)
    clipped = jax.tree.map(lambda g: g * factor, state.gradient_sum)
    return state._replace(gradient_sum=clipped), norm


@partial(jax.jit, donate_argnums=0, keep_unused=True)  # the old sums are the new zeros' memory
def zero_gradients(state: TrainState) -> TrainState:
    """Forget the gradients that wait; donates the state."""
    return state._replace(
        gradient_sum=jax.tree.map(jnp.zeros_like, state.gradient_sum),
        denominator=jnp.zeros_like(state.denominator),
    )


def gradient_norm(state: TrainState) -> Float[Array, ""]:
    """Compute the global norm of the gradients, divided."""
    squares = [jnp.sum(jnp.square(g)) for g in jax.tree.leaves(state.gradient_sum)]
    return jnp.sqrt(jnp.sum(jnp.stack(squares))) / jnp.maximum(state.denominator, 1)


def _clip_factor(norm: Float[Array, ""], limit: Float[Array, ""]) -> Float[Array, ""]:
    return jnp.where(norm > limit, limit / norm, 1)
