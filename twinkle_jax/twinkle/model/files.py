"""Checkpoints, adapters and training states that a model writes and reads."""

from pathlib import Path
from typing import Any

from jax.typing import DTypeLike

from twinkle_jax.model import Decoder, load_adapter, parse_config, with_adapter
from twinkle_jax.model.huggingface.checkpoint_files import (
    ADAPTER_CONFIG,
    CONFIG,
    locate,
    read_json,
)
from twinkle_jax.training.checkpoint import (
    find_state,
    has_state,
    read_checkpoint,
    read_facts,
    write_with_state,
)
from twinkle_jax.training.policy import Policy, save_policy
from twinkle_jax.training.state import shapes_of
from twinkle_jax.twinkle.model.policy import AdapterPolicy, OptimizerGroup
from twinkle_jax.twinkle.names import local_id

_OF_THE_GROUP = ("cur_step", "gradient_accumulation_steps", "lr", "lr_steps")
_REPORTED = ("cur_step", "consumed_train_samples", "gradient_accumulation_steps")


class SavedPolicy(AdapterPolicy):
    """Weights of a policy, and the state of its training, in files."""

    def save(
        self,
        name: str | Path | None = None,
        output_dir: str | Path | None = None,
        *,
        interval: int = 1,
        save_optimizer: bool = False,
        consumed_train_samples: int = 0,
        merge: bool = False,
        dtype: DTypeLike | None = None,
        adapter_name: str | None = None,
    ) -> Path | None:
        """Write a checkpoint, or the adapter in PEFT's format where there is one.

        The tokenizer of the template is written too. Without a template, a checkpoint has that of
        the one that the model was read from, and an adapter has none.
        The directory is replaced at once: an interrupted save leaves the older one complete.

        Args:
            name: directory to write, by default `checkpoint-step-` and `cur_step`.
            output_dir: its parent; `"output"` if there is no name either.
            interval: write only if `cur_step` is a multiple of it.
            save_optimizer: whether to write the state for
                [`resume_from_checkpoint`][twinkle_jax.twinkle.model.TransformersModel.resume_from_checkpoint],
                too: optimizer, accumulated gradients, counters and keys, in `training_state/`.
            consumed_train_samples: position in the data, which that method returns.
            merge: whether to merge the adapter into the parameters, and write a checkpoint.
            dtype: type of a checkpoint; by default that of the parameters.
            adapter_name: which adapter.

        Returns:
            The directory; None between intervals.

        Raises:
            ValueError: if `interval` is below 1, a checkpoint to resume from would be merged or
                rounded, there is no optimizer to save, or the directory holds an adapter where a
                checkpoint is written, or the reverse: both would be loaded.
        """
        if interval < 1:
            raise ValueError(f"interval must be at least 1, got {interval}")
        group = self.group(adapter_name)
        if group.cur_step % interval:
            return None
        folder = Path("output") if name is None and output_dir is None else Path(output_dir or "")
        target = folder / (f"checkpoint-step-{group.cur_step}" if name is None else name)
        target = target.expanduser()

        def write_weights(directory: Path) -> None:
            save_policy(self._policy(group), directory, merge=merge, dtype=dtype)

        if not save_optimizer:
            if has_state(target):  # of the older weights, which goes with them
                write_with_state(target, write_weights, None, {})
            else:
                write_weights(target)
            return target
        if merge or dtype is not None:
            raise ValueError(
                "save_optimizer must go without merge and dtype, so that a run resumes exactly, "
                f"got merge={merge}, dtype={dtype}"
            )
        group.needed_optimizer()
        counters = {name: getattr(group, name) for name in _OF_THE_GROUP}
        write_with_state(
            target,
            write_weights,
            self._training_state(group),
            counters | {"consumed_train_samples": consumed_train_samples},
        )
        return target

    def load(
        self,
        name: str | Path,
        output_dir: str | Path | None = None,
        *,
        load_optimizer: bool = False,
        adapter_name: str | None = None,
    ) -> None:
        """Read parameters or, where there is an `adapter_config.json`, an adapter.

        Args:
            name: directory of the checkpoint, or a hub id.
            output_dir: its parent.
            load_optimizer: whether to resume the run that saved it; otherwise optimizer state and
                gradients are reset.
            adapter_name: which adapter.

        Raises:
            ValueError: for what `load_pretrained` refuses, and a model of another configuration;
                then nothing has changed.
        """
        path = local_id(name) if output_dir is None else Path(output_dir) / name
        if load_optimizer:
            self.resume_from_checkpoint(path, adapter_name=adapter_name)
        else:
            self._read_weights(adapter_name, path)

    def resume_from_checkpoint(
        self,
        checkpoint_dir: str | Path,
        *,
        resume_only_model: bool = False,
        adapter_name: str | None = None,
    ) -> dict[str, Any]:
        """Continue from what `save(…, save_optimizer=True)` wrote, exactly as without the stop.

        Choose optimizer and schedule as the run did, before this call. `resume_only_model` reads
        the weights only.

        Returns:
            `cur_step`, `consumed_train_samples` and `gradient_accumulation_steps` of the run.

        Raises:
            ValueError: if there is no such state, or it is of another optimizer.
        """
        path = locate(checkpoint_dir, argument="checkpoint_dir")
        saved = find_state(path, "save(…, save_optimizer=True)")
        if not resume_only_model:
            self.group(adapter_name).needed_optimizer()
        self._read_weights(adapter_name, path)
        if resume_only_model:
            counters = read_facts(saved)
        else:
            counters = self._read_training_state(self.group(adapter_name), saved)
        return {key: counters[key] for key in _REPORTED}

    def _policy(self, group: OptimizerGroup) -> Policy:
        """Return a group's parameters, with its template, as `save_policy` takes them."""
        base = self.source if isinstance(self.model_id, Decoder) else self.model_id
        return Policy(
            group.state.params,
            self.config,
            group.template,
            group.frozen,
            group.lora,
            None if base is None else str(base),
            self.source,
        )

    def _read_weights(self, name: str | None, directory: Path | str) -> None:
        """Read parameters or an adapter; optimizer state and gradients are reset."""
        path = locate(directory, argument="name")
        if (path / ADAPTER_CONFIG).exists():
            lora, adapter = load_adapter(path, self.config)
            if not self.has_adapters:
                return self.add_group(name or "default", lora, adapter)
            group = self.group(name)
            group.lora, group.frozen = lora, with_adapter(self.base, self.config, lora)
            return self.restart(group, adapter)
        group = self.group(name)
        if group.lora is not None:
            raise ValueError(
                f"{directory} must hold an adapter, got a checkpoint of all parameters"
            )
        if parse_config(read_json(path, CONFIG)) != self.config:
            raise ValueError(
                f"{directory} must hold a model of this configuration, got another configuration"
            )
        group.drop_training_state()  # free its memory for the new parameters
        try:
            return self.restart(group, self.read(path).params)
        except BaseException:
            self.restart(group, group.state.params)
            raise

    def _training_state(self, group: OptimizerGroup) -> dict[str, Any]:
        """Collect the arrays that the next step depends on, besides the parameters."""
        state = group.state._asdict() | {"key": self.key}
        del state["params"]
        return state

    def _read_training_state(self, group: OptimizerGroup, saved: Path) -> dict[str, Any]:
        """Read arrays and counters in the place of the group's; return the counters."""
        like, params = shapes_of(self._training_state(group)), group.state.params
        group.drop_training_state()  # free its memory for the new state
        try:
            arrays, counters = read_checkpoint(saved, like)
        except BaseException as error:
            self.restart(group, params)
            if not isinstance(error, ValueError | TypeError):
                raise
            raise ValueError(f"{saved} must be of a run with this optimizer: {error}") from error
        self.key = arrays.pop("key")
        group.state = group.state._replace(**arrays)
        for name in _OF_THE_GROUP:
            setattr(group, name, counters[name])
        return counters
