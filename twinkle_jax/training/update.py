"""The update: accumulated gradients are divided once, clipped, and applied if they are finite."""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Float

from twinkle_jax.loss import Coefficient
from twinkle_jax.model.decoder.sharding import constrain, find_mesh
from twinkle_jax.training.score import positive_scalar, traced_scalar
from twinkle_jax.training.state import TrainState, init_optimizer


class UpdateInfo(NamedTuple):
    """Gradient norm, and whether the update was applied.

    Attributes:
        gradient_norm: global norm of the gradients, before clipping.
        applied: False if there was no labelled token, if `when` was False, or if the norm, the
            learning rate or an updated parameter was not finite: then parameters, optimizer state
            and step are unchanged.
    """

    gradient_norm: Float[Array, ""]
    applied: Bool[Array, ""]


def apply_gradients(
    state: TrainState,
    optimizer: optax.GradientTransformation,
    *,
    learning_rate: Coefficient = 1.0,
    max_grad_norm: Coefficient | None = None,
    when: Bool[Array, ""] | None = None,
    mesh: Mesh | None = None,
) -> tuple[TrainState, UpdateInfo]:
    r"""Update parameters with the accumulated gradients; compiled, and the state is donated.

    $$g = G / N, \qquad g \leftarrow g \min(1, c / \|g\|), \qquad
      \theta \leftarrow \theta + \eta\, u(g)$$

    Args:
        state: with gradients from [`grad_step`][twinkle_jax.training.grad_step]; donated.
        optimizer: the Optax transformation $u$ that the state was made with.
        learning_rate: $\eta$, which multiplies the updates; traced. Leave it at 1 for a
            transformation that has its own.
        max_grad_norm: $c$, above 0 and traced; None clips nothing.
        when: False skips the update; may be a device array, which is not waited for. None: always.
        mesh: of the state. None: that of its arrays, or one device. Traced arrays do not have it:
            inside a compiled function of yours, pass it.

    Returns:
        The state without gradients, and their norm. The update is skipped where there was no
        labelled token, where `when` is False, and where the norm, the learning rate or a parameter
        after the update is NaN or infinite: parameters, optimizer state and step stay as they were.

    Raises:
        ValueError: if the state was made without an optimizer or with another one, or
            `max_grad_norm` is not above 0.
    """
    if state.optimizer_state is None:
        raise ValueError(
            "state must have an optimizer, got one without: make it with train_state(params, …)"
        )
    limit = np.inf if max_grad_norm is None else max_grad_norm
    return _apply(
        state,
        traced_scalar(learning_rate),
        positive_scalar("max_grad_norm", limit),
        when,
        optimizer=optimizer,
        mesh=find_mesh(mesh, state.params),
    )


@partial(jax.jit, static_argnames=("optimizer", "mesh"), donate_argnums=0)
def _apply(
    state: TrainState,
    learning_rate: Float[Array, ""],
    max_grad_norm: Float[Array, ""],
    when: Bool[Array, ""] | None,
    *,
    optimizer: optax.GradientTransformation,
    mesh: Mesh | None,
) -> tuple[TrainState, UpdateInfo]:
    _check_fit(optimizer, state)
    norm = gradient_norm(state)
    usable = jnp.isfinite(norm) & jnp.isfinite(learning_rate) & (max_grad_norm > 0)
    usable &= (state.denominator > 0) & (state.tokens > 0)
    usable = usable if when is None else usable & when
    factor = _clip_factor(norm, max_grad_norm) / jnp.maximum(state.denominator, 1)
    gradients = jax.tree.map(lambda g: jnp.where(usable, g * factor, 0), state.gradient_sum)
    wide = jax.tree.map(lambda x: x.astype(jnp.float32), state.params)
    with jax.numpy_dtype_promotion("standard"):
        updates, optimizer_state = optimizer.update(gradients, state.optimizer_state, wide)
        wide = jax.tree.map(lambda x, u: x + learning_rate * u, wide, updates)
    params = jax.tree.map(lambda x, old: x.astype(old.dtype), wide, state.params)
    applied = usable & _all_finite(params)

    def choose(new: Array, old: Array) -> Array:
        return jnp.where(applied, new.astype(old.dtype), old)

    new_state = _without_gradients(state)._replace(
        params=jax.tree.map(choose, params, state.params),
        optimizer_state=jax.tree.map(choose, optimizer_state, state.optimizer_state),
        step=state.step + applied.astype(state.step.dtype),
    )
    return constrain(new_state, mesh), UpdateInfo(norm, applied)


def _check_fit(optimizer: optax.GradientTransformation, state: TrainState) -> None:
    """Raise while tracing if the state was made with another optimizer."""

    def signature(tree: Any) -> Any:
        leaves, structure = jax.tree.flatten(tree)
        return structure, [(x.shape, x.dtype) for x in leaves]

    expected = jax.eval_shape(partial(init_optimizer, optimizer), state.params)
    if signature(expected) != signature(state.optimizer_state):
        raise ValueError(
            "optimizer must be the one that the state was made with, "
            f"got one whose state is {jax.tree.structure(expected)}"
        )


def _all_finite(params: Any) -> Bool[Array, ""]:
    return jnp.all(jnp.stack([jnp.all(jnp.isfinite(x)) for x in jax.tree.leaves(params)]))


def clip_gradients(
    state: TrainState, max_grad_norm: Coefficient
) -> tuple[TrainState, Float[Array, ""]]:
    """Clip the accumulated gradients by their global norm, without applying them.

    Args:
        state: with gradients; donated.
        max_grad_norm: the largest norm of the gradients once they are divided, above 0; traced.

    Returns:
        The state, and the norm before clipping. Gradients that are not finite stay so, and the
        update that follows is skipped.

    Raises:
        ValueError: if `max_grad_norm` is not above 0.
    """
    return _clip(state, positive_scalar("max_grad_norm", max_grad_norm))


@partial(jax.jit, donate_argnums=0)
def _clip(
    state: TrainState, max_grad_norm: Float[Array, ""]
) -> tuple[TrainState, Float[Array, ""]]:
    norm = gradient_norm(state)
    usable = jnp.isfinite(norm) & (max_grad_norm > 0)
    factor = jnp.where(usable, _clip_factor(norm, max_grad_norm), jnp.nan)
    clipped = jax.tree.map(lambda g: g * factor, state.gradient_sum)
    return state._replace(gradient_sum=clipped), norm


@partial(jax.jit, donate_argnums=0, keep_unused=True)  # the old sums are the new zeros' memory
def zero_gradients(state: TrainState) -> TrainState:
    """Reset the accumulated gradients; donates the state."""
    return _without_gradients(state)


def _without_gradients(state: TrainState) -> TrainState:
    return state._replace(
        gradient_sum=jax.tree.map(jnp.zeros_like, state.gradient_sum),
        denominator=jnp.zeros_like(state.denominator),
        tokens=jnp.zeros_like(state.tokens),
    )


def gradient_norm(state: TrainState) -> Float[Array, ""]:
    """Global norm of the gradients, divided by their denominator."""
    squares = [jnp.sum(jnp.square(g)) for g in jax.tree.leaves(state.gradient_sum)]
    return jnp.sqrt(jnp.sum(jnp.stack(squares))) / jnp.maximum(state.denominator, 1)


def _clip_factor(norm: Float[Array, ""], limit: Float[Array, ""]) -> Float[Array, ""]:
    return jnp.where(norm > limit, limit / norm, 1)
