"""Twinkle's `initialize`, meshes and groups: one program over all of JAX's devices."""

import logging
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Self

import jax
import numpy as np
from jax.sharding import Mesh

from twinkle_jax.model import make_mesh
from twinkle_jax.twinkle.names import PAGE, refuse, warn_once

_AXES = {"dp": "data", "fsdp": "fsdp", "tp": "tensor"}
_INSTEAD = {  # unsupported axes, and what to use instead
    **dict.fromkeys(("pp", "vpp"), "use fsdp_size or tp_size"),
    **dict.fromkeys(
        ("cp", "ulysses"), "sequences are not split; use tp_size, or a smaller micro_batch_size"
    ),
    **dict.fromkeys(("ep", "ep_fsdp", "etp"), "tp_size spreads experts over devices"),
}


class DeviceMesh:
    """Twinkle's mesh: `dp`, `fsdp` and `tp` shard the policy over JAX's devices.

    `mesh` is an array of the ranks 0, 1, 2, …, whose axes are named `dp`, `fsdp` or `tp`; Twinkle's
    other axes must be of size 1. `device_type` is only shown. `dp_world_size` and the like are the
    sizes. Ranks are refused: a script sees the rows of all devices, and would lose the others if it
    kept the share of one rank.

    Example:
        >>> DeviceMesh.from_sizes(dp_size=1, fsdp_size=1).world_size
        1
    """

    def __init__(
        self,
        mesh: Any,
        mesh_dim_names: Sequence[str],
        device_type: str | None = None,
        **sizes: Any,
    ) -> None:
        self.mesh = np.asarray(mesh)
        self.mesh_dim_names = tuple(mesh_dim_names)
        self.device_type = device_type or jax.default_backend()
        if self.mesh.ndim != len(self.mesh_dim_names):
            raise ValueError(
                f"mesh_dim_names must name {self.mesh.ndim} axes, got {self.mesh_dim_names}"
            )
        self.sizes = dict(zip(self.mesh_dim_names, self.mesh.shape, strict=True))
        for name, size in {**self.sizes, **sizes}.items():
            axis = name.removesuffix("_size")
            if axis not in (*_AXES, *_INSTEAD):
                refuse("DeviceMesh", {name: size})
            elif axis in _INSTEAD and (size or 1) > 1:
                raise ValueError(
                    f"{axis}_size must be 1, got {size}: policies are sharded over dp, fsdp and "
                    f"tp; {_INSTEAD[axis]}; see {PAGE}"
                )
        if self.world_size > jax.device_count():
            raise ValueError(
                f"world_size must be at most {jax.device_count()}, the devices that JAX has, "
                f"got {self.world_size}"
            )
        if self.mesh.ravel().tolist() != list(range(self.world_size)):
            raise ValueError(f"mesh must hold the ranks 0, 1, 2, …, got {self.mesh.tolist()}")

    @classmethod
    def from_sizes(
        cls,
        *,
        world_size: int = 1,
        dp_size: int | None = 1,
        fsdp_size: int | None = None,
        tp_size: int | None = None,
        device_type: str | None = None,
        **sizes: Any,
    ) -> Self:
        """Make a mesh of these sizes; a `world_size` of 1 stands for their product."""
        axes = {"fsdp": fsdp_size, "dp": dp_size, "tp": tp_size}
        known = {name: size for name, size in axes.items() if size is not None}
        product = int(np.prod(list(known.values())))
        if world_size not in (1, product):
            raise ValueError(
                f"world_size must be {product}, the product of {known}, got {world_size}"
            )
        shape = tuple(known.values())
        return cls(np.arange(product).reshape(shape), tuple(known), device_type, **sizes)

    def __getattr__(self, name: str) -> int:
        axis = name.removesuffix("_world_size")
        if axis != name and axis in (*_AXES, *_INSTEAD):
            return self.sizes.get(axis, 0)  # as Twinkle has it: no such axis
        reason = "no such attribute"
        if "rank" in name or name == "get_slice":
            reason = f"one program sees the rows of all devices, not a rank's share; see {PAGE}"
        raise AttributeError(f"DeviceMesh has no {name!r}: {reason}", name=name, obj=self)

    @property
    def world_size(self) -> int:
        """Number of devices."""
        return self.mesh.size

    @property
    def data_world_size(self) -> int:
        """Number of devices that the rows of a batch are sharded over."""
        return self.sizes.get("dp", 1) * self.sizes.get("fsdp", 1)

    def jax_mesh(self) -> Mesh | None:
        """Return the mesh that models run on; None for one device."""
        if self.world_size == 1:
            return None
        return make_mesh(**{ours: self.sizes.get(name, 1) for name, ours in _AXES.items()})


@dataclass
class DeviceGroup:
    """Twinkle's group of ranks, which `get_device_placement` shows; it places nothing."""

    name: str
    ranks: list[int] | int
    device_type: str
    gpus_per_worker: int = 1
    visible_devices: Any = None


class Platform:
    """The kind of JAX's devices: `Platform.get_platform().device_prefix()`."""

    @staticmethod
    def get_platform() -> "Platform":
        """Return the platform of this program."""
        return Platform()

    @staticmethod
    def device_prefix() -> str:
        """Return `cpu`, `gpu` or `tpu`."""
        return jax.default_backend()


@dataclass
class Settings:
    """The arguments of `initialize`."""

    mode: str = "local"
    seed: int = 42
    device_mesh: DeviceMesh | None = None
    groups: list[DeviceGroup] = field(default_factory=list)


settings = Settings()


def initialize(
    mode: Literal["local", "ray"] = "local",
    nproc_per_node: int = 8,
    ncpu_proc_per_node: int = 8,
    seed: int | None = 42,
    full_determinism: bool = False,
    groups: list[DeviceGroup] | None = None,
    global_device_mesh: DeviceMesh | None = None,
    lazy_collect: bool = True,
    name: str | None = None,
    **options: Any,
) -> None:
    """Set the seed of loaders that shuffle, and the default mesh of models, samplers and loaders.

    `mode="ray"` starts nothing, with a warning; loaders then leave out a last batch that is not
    full, and have no default mesh, as in Twinkle. `groups` are shown by `get_device_placement`. The
    other arguments change nothing: JAX runs one process a host, and computes arrays asynchronously.
    """
    refuse("initialize", options)
    if mode not in ("local", "ray"):
        raise ValueError(f"mode must be 'local' or 'ray', got {mode!r}")
    if mode == "ray":
        warn_once(
            "mode='ray' starts no workers: one program runs over all devices of JAX, which the "
            "model and its sampler share; ranks and groups place nothing"
        )
    settings.mode, settings.seed = mode, 42 if seed is None else seed
    settings.device_mesh, settings.groups = global_device_mesh, list(groups or ())


def get_device_placement(device_group: Any = None) -> str:
    """Describe the devices and the default mesh."""
    lines = [f"devices: {jax.device_count()} {jax.devices()[0].device_kind}"]
    if settings.device_mesh is not None:
        sizes = settings.device_mesh.sizes.items()
        lines.append("mesh: " + ", ".join(f"{name} {size}" for name, size in sizes))
    names = [group.name for group in device_group or settings.groups]
    if names:
        lines.append(f"groups, which share all devices: {', '.join(names)}")
    return "\n".join(lines)


def mesh_of(device_mesh: DeviceMesh | Mesh | None) -> Mesh | None:
    """Return JAX's mesh for a `device_mesh` argument; the default mesh for None."""
    device_mesh = settings.device_mesh if device_mesh is None else device_mesh
    return device_mesh.jax_mesh() if isinstance(device_mesh, DeviceMesh) else device_mesh


def note_group(remote_group: str | None) -> None:
    """Warn once that groups place nothing."""
    if remote_group is not None:
        warn_once("remote_group places nothing: the model and its sampler share all devices")


def get_logger(name: str = "twinkle", **options: Any) -> logging.Logger:
    """Return a logger that writes to the standard error stream, on the first host alone."""
    refuse("get_logger", options)
    logger = logging.getLogger(name)
    if not logger.handlers:
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(logging.Formatter("[%(asctime)s][%(levelname)s:%(name)s] %(message)s"))
        logger.addHandler(handler)
        logger.setLevel(logging.INFO if is_master() else logging.ERROR)
        logger.propagate = False
    return logger


def is_master() -> bool:
    """Whether this process is the first."""
    return jax.process_index() == 0
