"""The state of training: parameters, optimizer state and accumulated gradients."""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int

from twinkle_jax.model import Params, make_mesh, shard_like_params


class TrainState(NamedTuple):
    """Everything that the next step depends on.

    Attributes:
        params: trained parameters: a whole decoder, or adapters alone.
        optimizer_state: of the Optax transformation, in float32; None without one.
        step: updates applied so far.
        gradient_sum: gradients, summed over micro-batches and not yet divided; float32.
        denominator: of the sum: tokens or sequences, as the loss counts.
        tokens: number of labels in the sum; with 0 there is no update to apply.
        rows: total rows that `grad_step` has seen, which seed the noise of dropout.
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
    """Make a train state.

    Args:
        params: what to train. [`grad_step`][twinkle_jax.training.grad_step] donates the state, so
            do not use these arrays afterwards; copy what is needed elsewhere.
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
    zero = jnp.float32(0)
    return TrainState(
        params, optimizer_state, jnp.int32(0), zeros, zero, jnp.float32(0), jnp.int32(0)
    )


def begin_training(
    params: Params, optimizer: optax.GradientTransformation | None, mesh: Mesh | None
) -> TrainState:
    """Make a train state around parameters: moments and gradients are sharded as they are.

    Args:
        params: moved to their places on the mesh if necessary.
        optimizer: as for [`train_state`][twinkle_jax.training.train_state].
        mesh: devices; None for one.

    Returns:
        A state whose arrays are all committed to their devices: with uncommitted arrays among
        them, the second step would compile again.
    """
    shardings = None
    if mesh is not None:
        params = jax.device_put(params, shard_like_params(params, mesh))
        begin = partial(_without_params, optimizer=optimizer)
        shardings = shard_like_params(jax.eval_shape(begin, params), mesh)
    start = jax.jit(_without_params, static_argnums=1, out_shardings=shardings)
    state: TrainState = start(params, optimizer)._replace(params=params)
    return jax.device_put(state, jax.tree.map(lambda x: x.sharding, state))


def _without_params(params: Params, optimizer: optax.GradientTransformation | None) -> TrainState:
    return train_state(params, optimizer)._replace(params=None)


def init_optimizer(optimizer: optax.GradientTransformation, params: Params) -> Any:
    """Initialize an optimizer's state in float32, whatever the dtype of the parameters."""
    if not isinstance(optimizer, optax.GradientTransformation):
        raise TypeError(f"optimizer must be an Optax transformation, got {optimizer!r}")
    with jax.numpy_dtype_promotion("standard"):
        return optimizer.init(jax.tree.map(lambda x: x.astype(jnp.float32), params))


def find_devices(data: int, fsdp: int, tensor: int) -> Mesh | None:
    """Make the mesh of a run; None for one device.

    Raises:
        ValueError: if there are fewer devices; with several processes, also if there are more.
    """
    wanted, available, processes = data * fsdp * tensor, jax.device_count(), jax.process_count()
    if wanted > available or (wanted < available and processes > 1):
        which = "at most the" if processes == 1 else "all"
        of_all = "available" if processes == 1 else f"of the {processes} processes"
        raise ValueError(
            f"mesh must take {which} {available} devices {of_all}, "
            f"got data={data}, fsdp={fsdp}, tensor={tensor}"
        )
    return None if wanted == 1 else make_mesh(data=data, fsdp=fsdp, tensor=tensor)
