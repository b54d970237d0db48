"""A policy that is held and changed: its parameters, an adapter, where they come from and go to."""

from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh
from jax.typing import DTypeLike

from twinkle_jax.model.decoder.lora import (
    LoraConfig,
    adapter_scales,
    init_adapter,
    merge_adapter,
    read_lora_config,
)
from twinkle_jax.model.decoder.module import Decoder
from twinkle_jax.model.decoder.sharding import partition_rules, shard_like_params
from twinkle_jax.model.huggingface.adapter_files import CONFIG as ADAPTER_CONFIG
from twinkle_jax.model.huggingface.adapter_files import adapter_tensors, load_adapter, save_adapter
from twinkle_jax.model.huggingface.checkpoint_files import locate
from twinkle_jax.model.huggingface.checkpoint_names import PREFIX
from twinkle_jax.model.huggingface.checkpoint_read import load_pretrained
from twinkle_jax.model.huggingface.checkpoint_write import save_pretrained
from twinkle_jax.model.huggingface.export_tensors import list_tensors
from twinkle_jax.model.train_step.train_state import TrainState, merge_params, train_state


class HeldPolicy:
    """Parameters in a train state, and the verbs that read, write, freeze and adapt them."""

    def __init__(self, model_id: str | Path, dtype: DTypeLike, mesh: Mesh | None) -> None:
        self.model_id, self.dtype, self.mesh = model_id, jnp.dtype(dtype), mesh
        decoder = self._read(model_id)
        self.config, self.source = decoder.config, decoder.source
        self._optimizer: optax.GradientTransformation | None = None
        self._adapter: tuple[str, LoraConfig] | None = None
        self._frozen: dict[str, Any] | None = None
        self.state = self._begin(decoder.params)

    def add_adapter_to_model(self, name: str, config: Any, *, seed: int = 0) -> None:
        """Freeze the parameters, and train low-rank adapters instead.

        Args:
            name: of the adapter; there can be one.
            config: a [`LoraConfig`][twinkle_jax.model.LoraConfig], or PEFT's.
            seed: of the random A; B starts at 0, so nothing changes yet.

        Raises:
            ValueError: if there is an adapter, or an option or target is not supported.
        """
        lora = read_lora_config(config)
        self._add_adapter(name, lora, init_adapter(jax.random.key(seed), self.config, lora))

    def get_state_dict(self) -> dict[str, np.ndarray]:
        """Copy what is trained to the host, named and laid out as in a checkpoint."""
        if self._adapter is not None:
            return adapter_tensors(self.config, self.state.params)
        tensors = list_tensors(Decoder(self.config, self.state.params), PREFIX, None)
        return {tensor.name: tensor.fetch() for tensor in tensors}

    def save(
        self, directory: str | Path, *, merge: bool = False, dtype: DTypeLike | None = None
    ) -> None:
        """Write a checkpoint, or the adapter in PEFT's format where there is one.

        Args:
            directory: where to; an interrupted save leaves an older one whole.
            merge: whether to add the adapter to the parameters and write a checkpoint of them.
            dtype: type of a checkpoint; by default that of the parameters.
        """
        if self._adapter is not None and not merge:
            base, lora = str(self.model_id), self._adapter[1]
            save_adapter(directory, self.config, lora, self.state.params, base=base)
            return
        params = jax.jit(merge_adapter)(merge_params(self._frozen, self.state.params))
        save_pretrained(Decoder(self.config, params, source=self.source), directory, dtype=dtype)

    def load(self, directory: str | Path) -> None:
        """Read parameters or, where there is an `adapter_config.json`, an adapter.

        Optimizer state and gradients begin anew.
        """
        if (locate(directory) / ADAPTER_CONFIG).exists():
            lora, adapter = load_adapter(directory, self.config)
            if self._adapter is None:
                return self._add_adapter("default", lora, adapter)
            self._adapter = self._adapter[0], lora
            self._frozen = self._base(self._frozen or {}, lora)
            self.state = self._begin(adapter)
            return None
        if self._adapter is not None:
            raise ValueError(f"expected an adapter in {directory}, got a whole checkpoint")
        decoder = self._read(directory)
        if decoder.config != self.config:
            raise ValueError(f"{directory} holds a model with another configuration")
        self.state = self._begin(decoder.params)
        return None

    def _read(self, directory: str | Path) -> Decoder:
        rules = None if self.mesh is None else partition_rules(self.mesh)
        return load_pretrained(directory, dtype="float32", mesh=self.mesh, partition=rules)

    def _begin(self, params: Any) -> TrainState:
        shardings = None
        if self.mesh is not None:
            begin = partial(train_state, optimizer=self._optimizer)
            shardings = shard_like_params(jax.eval_shape(begin, params), self.mesh)
        start = jax.jit(train_state, static_argnums=1, out_shardings=shardings)
        return start(params, self._optimizer)

    def _add_adapter(self, name: str, lora: LoraConfig, adapter: Any) -> None:
        if self._adapter is not None:
            raise ValueError(f"expected no adapter yet, got {self._adapter[0]!r} and {name!r}")
        self._frozen = self._base(self.state.params, lora)
        self._adapter = name, lora
        self.state = self._begin(adapter)

    def _base(self, params: Any, lora: LoraConfig) -> dict[str, Any]:
        frozen = jax.tree.map(lambda x: x.astype(self.dtype), params)
        return merge_params(frozen, adapter_scales(self.config, lora))
