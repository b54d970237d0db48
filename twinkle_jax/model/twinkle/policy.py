"""The base of a policy: parameters in a train state, an adapter, where they come from and go."""

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
from twinkle_jax.model.decoder.parameters import Params, merge_params
from twinkle_jax.model.decoder.sharding import partition_rules, shard_like_params
from twinkle_jax.model.huggingface.adapter_files import adapter_tensors, load_adapter, save_adapter
from twinkle_jax.model.huggingface.checkpoint_files import (
    ADAPTER_CONFIG,
    CONFIG,
    locate,
    read_json,
)
from twinkle_jax.model.huggingface.checkpoint_names import PREFIX
from twinkle_jax.model.huggingface.checkpoint_read import load_pretrained
from twinkle_jax.model.huggingface.checkpoint_write import list_tensors, save_pretrained
from twinkle_jax.model.huggingface.config_json import parse_config
from twinkle_jax.model.train_step.train_state import (
    TrainState,
    commit,
    init_optimizer,
    train_state,
)


class Policy:
    """Parameters in a train state, and the verbs that read, write, freeze and adapt them."""

    def __init__(self, model_id: str | Path | Decoder, dtype: DTypeLike, mesh: Mesh | None) -> None:
        self.model_id, self.dtype, self.mesh = model_id, jnp.dtype(dtype), mesh
        decoder = self._copy(model_id) if isinstance(model_id, Decoder) else self._read(model_id)
        self.config, self.source = decoder.config, decoder.source
        self._optimizer: optax.GradientTransformation | None = None
        self._adapter: tuple[str, LoraConfig] | None = None
        self._frozen: dict[str, Any] | None = None
        self.state = self._begin(decoder.params)

    @property
    def params(self) -> dict[str, Any]:
        """The whole tree of parameters, adapters included: what the decoder's functions take.

        `prefill` and `decode_step` sample from it, under LoRA too;
        [`merge_adapter`][twinkle_jax.model.merge_adapter] gives one without adapters. Nothing is
        copied, and the next `forward_backward` or `step` donates what is trained: ask again then.
        """
        return merge_params(self._frozen, self.state.params)

    def get_state_dict(self, *, adapter_name: str | None = None) -> dict[str, np.ndarray]:
        """Copy what is trained to the host, named and laid out as in a checkpoint."""
        self._check_name(adapter_name)
        if self._adapter is not None:
            return adapter_tensors(self.config, self.state.params)
        tensors = list_tensors(Decoder(self.config, self.state.params), PREFIX, None)
        return {tensor.name: tensor.fetch() for tensor in tensors}

    def _write(self, directory: Path, *, merge: bool, dtype: DTypeLike | None) -> None:
        """Write a checkpoint, or the adapter in PEFT's format where there is one."""
        if self._adapter is not None and not merge:
            place = self.source if isinstance(self.model_id, Decoder) else self.model_id
            base, lora = None if place is None else str(place), self._adapter[1]
            save_adapter(directory, self.config, lora, self.state.params, base=base)
            return
        params = jax.jit(merge_adapter)(self.params)
        save_pretrained(Decoder(self.config, params, source=self.source), directory, dtype=dtype)

    def _load(self, directory: Path | str) -> None:
        """Read parameters or an adapter; optimizer state and gradients begin anew."""
        place = locate(directory)
        if (place / ADAPTER_CONFIG).exists():
            if self._adapter is None:
                return self._load_adapter("default", place)
            lora, adapter = load_adapter(place, self.config)
            self._adapter = self._adapter[0], lora
            self._frozen = self._base(self._frozen or {}, lora)
            return self._restart(adapter)
        if self._adapter is not None:
            raise ValueError(f"{directory} must hold an adapter, got a whole checkpoint")
        if parse_config(read_json(place, CONFIG)) != self.config:
            raise ValueError(
                f"{directory} must hold a model of this configuration, got another configuration"
            )
        self._drop_training_state()  # the old one goes before the new one comes
        try:
            return self._restart(self._read(place).params)
        except BaseException:
            self._restart(self.state.params)
            raise

    def _add_adapter(self, name: str, config: Any, seed: int) -> None:
        lora = read_lora_config(config)
        self._set_adapter(name, lora, init_adapter(jax.random.key(seed), self.config, lora))

    def _load_adapter(self, name: str, directory: str | Path) -> None:
        self._set_adapter(name, *load_adapter(directory, self.config))

    def _set_adapter(self, name: str, lora: LoraConfig, adapter: Params) -> None:
        if self._adapter is not None:
            raise ValueError(
                f"a model must have one adapter, got {name!r} beside {self._adapter[0]!r}"
            )
        self._drop_training_state()
        self._frozen = self._base(self.state.params, lora)
        self._adapter = name, lora
        self._restart(adapter)

    def _base(self, params: Params, lora: LoraConfig) -> dict[str, Any]:
        frozen = jax.tree.map(lambda x: x.astype(self.dtype), params)
        return merge_params(frozen, adapter_scales(self.config, lora))

    def _check_name(self, adapter_name: str | None) -> None:
        """Take the name of the one adapter, which Twinkle's scripts give everywhere."""
        own = self._adapter[0] if self._adapter else None
        if adapter_name and adapter_name != own:
            raise ValueError(f"adapter_name must be {own!r} or left out, got {adapter_name!r}")

    def _read(self, directory: str | Path) -> Decoder:
        rules = None if self.mesh is None else partition_rules(self.mesh)
        return load_pretrained(directory, dtype="float32", mesh=self.mesh, partition=rules)

    def _copy(self, decoder: Decoder) -> Decoder:
        """Training donates its parameters, so a decoder of the caller's is copied."""
        shardings = None if self.mesh is None else shard_like_params(decoder.params, self.mesh)

        def copied(params: Params) -> Params:
            return jax.tree.map(lambda x: jnp.copy(x.astype(jnp.float32)), params)

        params = jax.jit(copied, out_shardings=shardings)(decoder.params)
        return Decoder(decoder.config, params, source=decoder.source)

    def _drop_training_state(self) -> None:
        self.state = self.state._replace(optimizer_state=None, gradient_sum=None)

    def _use_optimizer(self, optimizer: optax.GradientTransformation) -> None:
        """Begin anew with another optimizer, unless it cannot be used with these parameters."""
        jax.eval_shape(partial(init_optimizer, optimizer), self.state.params)
        self._optimizer = optimizer
        self._restart(self.state.params)

    def _restart(self, params: Params) -> None:
        rows = self.state.rows
        self._drop_training_state()
        self.state = self._begin(params)._replace(rows=rows)

    def _begin(self, params: Params) -> TrainState:
        """Make a train state around parameters, which are not copied where they lie right."""
        begin = partial(_without_params, optimizer=self._optimizer)
        shardings = None
        if self.mesh is not None:
            params = jax.device_put(params, shard_like_params(params, self.mesh))
            shardings = shard_like_params(jax.eval_shape(begin, params), self.mesh)
        start = jax.jit(_without_params, static_argnums=1, out_shardings=shardings)
        return commit(start(params, self._optimizer)._replace(params=params))


def _without_params(params: Params, optimizer: optax.GradientTransformation | None) -> TrainState:
    return train_state(params, optimizer)._replace(params=None)
