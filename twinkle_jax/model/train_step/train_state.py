"""What training changes: parameters, the optimizer's state, and accumulated gradients."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Int

from twinkle_jax.model.decoder.parameters import Params


class TrainState(NamedTuple):
    """Everything that the next step depends on.

    Attributes:
        params: what is trained: a whole decoder, or the adapters alone.
        optimizer_state: of the Optax transformation, in float32; None without one.
        step: updates applied so far.
        gradient_sum: gradients, summed over micro-batches and not yet divided; float32.
        denominator: what the sum is to be divided by: tokens or sequences, as the loss counts.
        tokens: labels that the sum is made of; without any there is nothing to apply.
        rows: rows that `grad_step` has seen in all; they number the noise of dropout.
    """

    params: Any
    optimizer_state: Any
    step: Int[Array, ""]
    gradient_sum: Any
    denominator: Float[Array, ""]
    tokens: Float[Array, ""]
    rows: Int[Array, ""]


def train_state(
    params: Params, optimizer: optax.GradientTransformation | None = None
) -> TrainState:
    """Begin training.

    Args:
        params: what to train. [`grad_step`][twinkle_jax.model.grad_step] donates the state, so
            these arrays are gone afterwards; copy what is needed elsewhere.
        optimizer: any Optax transformation. `apply_gradients` multiplies its updates by a learning
            rate, so give it the learning rate 1 and pass yours there, where it is traced.

    Returns:
        A state without gradients. On a mesh, call it under `jax.jit`, with the shardings of
        [`shard_like_params`][twinkle_jax.model.shard_like_params].

    Example:
        >>> import jax.numpy as jnp
        >>> import optax
        >>> state = train_state({"scale": jnp.ones(3)}, optax.sgd(1.0))
        >>> print(state.step, state.gradient_sum["scale"])
        0 [0. 0. 0.]
    """
    optimizer_state = None if optimizer is None else init_optimizer(optimizer, params)
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), params)
    nothing = jnp.float32(0)
    return TrainState(
        params, optimizer_state, jnp.int32(0), zeros, nothing, jnp.float32(0), jnp.int32(0)
    )


def commit(state: TrainState) -> TrainState:
    """Bind all arrays to the devices where they lie, as an update does.

    To the compiler an array that is bound to its device is another argument than one that is not:
    with a state of both kinds, as loaded parameters and new zeros make one, the second step would
    be compiled like the first.
    """
    return jax.device_put(state, jax.tree.map(lambda x: x.sharding, state))


def init_optimizer(optimizer: optax.GradientTransformation, params: Params) -> Any:
    """Begin an optimizer's state, in float32 whatever the type of the parameters."""
    if not isinstance(optimizer, optax.GradientTransformation):
        raise TypeError(f"optimizer must be an Optax transformation, got {optimizer!r}")
    with jax.numpy_dtype_promotion("standard"):
        return optimizer.init(jax.tree.map(lambda x: x.astype(jnp.float32), params))
