"""The policy that a sampler draws from or copies, as an interface."""

from pathlib import Path
from typing import Any, Protocol

import numpy as np
from jax.sharding import Mesh

from twinkle_jax.model.decoder.config import DecoderConfig
from twinkle_jax.model.decoder.parameters import Params


class Actor(Protocol):
    """A policy that is trained: what samplers need of Twinkle's `TransformersModel`.

    Attributes:
        config: the decoder.
        source: directory of the checkpoint that it was read from; None if there is none.
        dtype: type to compute in.
        mesh: devices that its parameters are on; None for one.
    """

    config: DecoderConfig
    source: Path | None
    dtype: np.dtype[Any]
    mesh: Mesh | None

    @property
    def template(self) -> Any:
        """What turns conversations into tokens; None before it is set."""

    @property
    def params(self) -> Params:
        """All parameters, adapters included, as they are now."""

    def save(self, name: Path, /) -> Any:
        """Write the adapter in PEFT's format, or a checkpoint where there is no adapter."""

    def forward_only(self, *, inputs: Any) -> dict[str, np.ndarray]:
        """Score the tokens of input features; `logps` [rows, time]."""
