"""On which devices a run works: parameters and rows spread over a mesh, or all on one device."""

from functools import partial
from typing import Any

import jax
import optax
from jax.sharding import Mesh

from twinkle_jax.model import TrainState, make_mesh, shard_like_params, train_state
from twinkle_jax.model.decoder.parameters import Params
from twinkle_jax.model.train_step.train_state import commit
from twinkle_jax.training.configuration.train_config import TrainConfig


def run_mesh(config: TrainConfig) -> Mesh | None:
    """Make the mesh of a run; None where one device does it all.

    Raises:
        ValueError: if there are not so many devices.
    """
    mesh = config.mesh
    wanted = mesh.data * mesh.fsdp * mesh.tensor
    if wanted > jax.device_count():
        raise ValueError(
            f"mesh must take at most the {jax.device_count()} devices that there are, "
            f"got data={mesh.data}, fsdp={mesh.fsdp}, tensor={mesh.tensor}"
        )
    if wanted == 1:
        return None
    return make_mesh(data=mesh.data, fsdp=mesh.fsdp, tensor=mesh.tensor)


def row_shards(mesh: Mesh | None) -> int:
    """Over how many devices rows are spread: their number must be a multiple of it."""
    return 1 if mesh is None else int(mesh.shape["data"] * mesh.shape["fsdp"])


def place(params: Params, mesh: Mesh | None) -> Params:
    """Put parameters where they belong."""
    return params if mesh is None else jax.device_put(params, shard_like_params(params, mesh))


def begin_training(
    params: Params, optimizer: optax.GradientTransformation, mesh: Mesh | None
) -> TrainState:
    """Make a train state around parameters that lie where they belong."""
    if mesh is None:
        return commit(train_state(params, optimizer))
    begin = partial(_without_params, optimizer=optimizer)
    shardings = shard_like_params(jax.eval_shape(begin, params), mesh)
    return jax.jit(begin, out_shardings=shardings)(params)._replace(params=params)


def _without_params(params: Params, optimizer: optax.GradientTransformation) -> Any:
    return train_state(params, optimizer)._replace(params=None)


def fill_rows(prompts: list[Any], multiple: int) -> list[Any]:
    """Repeat the last prompt until the devices divide the prompts; those are to be dropped."""
    return [*prompts, *[prompts[-1]] * (-len(prompts) % multiple)]
