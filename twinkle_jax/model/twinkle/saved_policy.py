"""The verbs that save a policy, load it, and go on with a run."""

from functools import partial
from pathlib import Path
from typing import Any

import jax
from jax.typing import DTypeLike

from twinkle_jax.model.huggingface.checkpoint_files import locate
from twinkle_jax.model.twinkle.training_files import (
    read_counters,
    read_training_state,
    remove_training_state,
    write_with_training_state,
)
from twinkle_jax.model.twinkle.update import UpdatedPolicy


class SavedPolicy(UpdatedPolicy):
    """A policy with files: exports for others, and checkpoints that a run goes on from."""

    def __init__(self, *arguments: Any, seed: int) -> None:
        super().__init__(*arguments)
        self.key = jax.random.key(seed)

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

        Everything takes its place in one step: an interrupted save leaves an older one whole.

        Args:
            name: directory to write; by default `checkpoint-step-` and the count of
                `forward_backward`.
            output_dir: where that directory lies; `"output"` if there is no name either.
            interval: write only if `cur_step` is a multiple of it.
            save_optimizer: whether to write what
                [`resume_from_checkpoint`][twinkle_jax.model.TransformersModel.resume_from_checkpoint]
                needs as well: the optimizer's state, accumulated gradients, counters and keys.
            consumed_train_samples: what to remember of the position in the data.
            merge: whether to add the adapter to the parameters and write a checkpoint of them.
            dtype: type of a checkpoint; by default that of the parameters.
            adapter_name: of the adapter, if there is one.

        Returns:
            The directory; None if the interval says that there is nothing to do.

        Raises:
            ValueError: if a checkpoint to go on from would be merged or rounded, or there is no
                optimizer to save.
        """
        self._check_name(adapter_name)
        if self.cur_step % interval:
            return None
        folder = Path("output") if name is None and output_dir is None else Path(output_dir or "")
        target = folder / (f"checkpoint-step-{self.cur_step}" if name is None else name)
        target = target.expanduser()
        write = partial(self._write, merge=merge, dtype=dtype)
        if not save_optimizer:
            remove_training_state(target)
            write(target)
            return target
        if merge or dtype is not None:
            raise ValueError(
                "save_optimizer must go without merge and dtype, so that a run goes on exactly, "
                f"got merge={merge}, dtype={dtype}"
            )
        self._check_optimizer()
        counters = {
            "cur_step": self.cur_step,
            "gradient_accumulation_steps": self.gradient_accumulation_steps,
            "consumed_train_samples": consumed_train_samples,
            "lr": self._lr,
            "lr_steps": self._lr_steps,
            "key_impl": str(jax.random.key_impl(self.key)),
        }
        write_with_training_state(target, write, self._training_state(), counters)
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
            output_dir: where the directory lies.
            load_optimizer: whether to go on with the run that saved it; otherwise optimizer state
                and gradients begin anew.
            adapter_name: of the adapter, if there is one.

        Raises:
            ValueError: for what `load_pretrained` refuses, and a model of another configuration,
                before anything that is held is given up.
        """
        self._check_name(adapter_name)
        place = name if output_dir is None else Path(output_dir) / name
        if load_optimizer:
            self.resume_from_checkpoint(place)
        else:
            self._load(place)

    def resume_from_checkpoint(
        self,
        checkpoint_dir: str | Path,
        *,
        resume_only_model: bool = False,
        adapter_name: str | None = None,
    ) -> dict[str, Any]:
        """Go on where a run stood when it called `save(…, save_optimizer=True)`.

        What follows is what would have followed: parameters, optimizer state, accumulated
        gradients, learning rate, counters and the noise of dropout are as they were. Choose
        optimizer and schedule as the run did, before this call.

        Args:
            checkpoint_dir: the directory.
            resume_only_model: whether to read the weights only.
            adapter_name: of the adapter, if there is one.

        Returns:
            `cur_step`, `consumed_train_samples` and `gradient_accumulation_steps` of the run.

        Raises:
            ValueError: if there is no such state, or it is one of another optimizer.
        """
        self._check_name(adapter_name)
        place = locate(checkpoint_dir)
        counters = read_counters(place)
        if not resume_only_model:
            self._check_optimizer()
        self._load(place)
        if not resume_only_model:
            self._resume(place, counters)
        names = ("cur_step", "consumed_train_samples", "gradient_accumulation_steps")
        return {name: counters[name] for name in names}

    def _resume(self, place: Path, counters: dict[str, Any]) -> None:
        like = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding),
            self._training_state(),
        )
        params = self.state.params
        self._drop_training_state()
        try:
            found = read_training_state(place, like)
        except BaseException:
            self._restart(params)
            raise
        key = jax.random.wrap_key_data(found.pop("key"), impl=counters["key_impl"])
        self.key, self.state = key, self.state._replace(**found)
        self.cur_step = counters["cur_step"]
        self.gradient_accumulation_steps = counters["gradient_accumulation_steps"]
        self._lr, self._lr_steps = counters["lr"], counters["lr_steps"]

    def _training_state(self) -> dict[str, Any]:
        state = self.state._asdict() | {"key": jax.random.key_data(self.key)}
        del state["params"]
        return state
