"""Twinkle's `TransformersModel`: its verbs, each a call of the functions that train."""

import math
import shutil
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from twinkle_jax.data.batch import Batch, HostArray, micro_batches
from twinkle_jax.data.features import (
    LOSS_INPUTS,
    Feature,
    Inputs,
    PerSequence,
    Piece,
    align_loss_input,
    read_features,
    split_packed,
    write_pieces,
)
from twinkle_jax.loss import Loss, LossFunction, get_loss
from twinkle_jax.model import (
    Decoder,
    LoraConfig,
    load_pretrained,
    merge_adapter,
    merge_params,
    parse_config,
    partition_rules,
    save_pretrained,
    shard_like_params,
)
from twinkle_jax.model.decoder.forward import Remat
from twinkle_jax.model.decoder.lora import adapter_scales, init_adapter, read_lora_config
from twinkle_jax.model.decoder.parameters import Params
from twinkle_jax.model.decoder.sharding import batch_sharding
from twinkle_jax.model.huggingface.adapter_files import adapter_tensors, load_adapter, save_adapter
from twinkle_jax.model.huggingface.atomic_directory import check_target, replace_directory
from twinkle_jax.model.huggingface.checkpoint_files import (
    ADAPTER_CONFIG,
    CONFIG,
    locate,
    read_json,
)
from twinkle_jax.model.huggingface.checkpoint_names import PREFIX
from twinkle_jax.model.huggingface.checkpoint_write import list_tensors
from twinkle_jax.training.checkpoint import find_fault, read_checkpoint, write_checkpoint
from twinkle_jax.training.gradient import StepSummary, add_summaries, grad_step
from twinkle_jax.training.score import score_batch
from twinkle_jax.training.state import begin_training, init_optimizer
from twinkle_jax.training.update import (
    UpdateInfo,
    apply_gradients,
    clip_gradients,
    zero_gradients,
)
from twinkle_jax.twinkle.metric import MetricLog
from twinkle_jax.twinkle.optimizer import (
    DEFAULT_LEARNING_RATE,
    Factor,
    choose_optimizer,
    choose_schedule,
)

Precision = Literal["no", "bf16"]
_DTYPES = {"no": "float32", "bf16": "bfloat16"}
_TRAINING_STATE = "training_state"  # the directory of what a run goes on with besides weights
_OWN_FILES = ("*.safetensors", "*.safetensors.index.json", _TRAINING_STATE)  # replaced by a save
_COUNTERS = ("cur_step", "consumed_train_samples", "gradient_accumulation_steps")


class TransformersModel:
    """A policy with Twinkle's verbs.

    It holds a [`TrainState`][twinkle_jax.training.TrainState] and calls the functions of
    `twinkle_jax.training`: `score_batch`, `grad_step`, `clip_gradients`, `apply_gradients`. Batches
    are padded to the sizes of [`bucket_size`][twinkle_jax.data.bucket_size]: the time axis from 16
    on, the rows to `micro_batch_size`, or to a bucket without it. What was compiled for a bucket
    serves all batches that fit in it.

    `cur_step` counts calls of `forward_backward`. With `gradient_accumulation_steps` of n, the
    verbs that change the policy do nothing unless it is a multiple of n. `adapter_name` in any verb
    must be the name of the adapter, if there is one.

    Args:
        model_id: a directory with a Hugging Face checkpoint, a hub id, or a
            [`Decoder`][twinkle_jax.model.Decoder], whose parameters are copied.
        dtype: type to compute in, float32 by default. Trained parameters are float32 in any case;
            the frozen ones under adapters are in this type.
        mixed_precision: the same in Twinkle's words, `"no"` or `"bf16"`.
        mesh: devices to run on, from [`make_mesh`][twinkle_jax.model.make_mesh]; None for one.
        remat: as for [`hidden_states`][twinkle_jax.model.hidden_states].
        seed: of the noise of dropout.

    Raises:
        ValueError: for what `load_pretrained` refuses, and a mesh with other or explicit axes.
    """

    def __init__(
        self,
        model_id: str | Path | Decoder,
        *,
        dtype: DTypeLike | None = None,
        mixed_precision: Precision | None = None,
        mesh: Mesh | None = None,
        remat: Remat = True,
        seed: int = 0,
    ) -> None:
        self.model_id, self.mesh, self.remat = model_id, mesh, remat
        self.dtype = jnp.dtype(_compute_dtype(dtype, mixed_precision))
        decoder = self._copy(model_id) if isinstance(model_id, Decoder) else self._read(model_id)
        self.config, self.source = decoder.config, decoder.source
        self.key = jax.random.key(seed)
        self.cur_step, self.gradient_accumulation_steps = 0, 1
        self._optimizer: optax.GradientTransformation | None = None
        self._lr, self._lr_steps = 1.0, 0
        self._schedule = choose_schedule("ConstantLR", {})
        self._adapter: tuple[str, LoraConfig] | None = None
        self._frozen: dict[str, Any] | None = None
        self._loss: Loss | None = None
        self._template: Any = None
        self._log = MetricLog()
        self._norm: Float[Array, ""] | None = None
        self._updates: list[UpdateInfo] = []
        self.state = begin_training(decoder.params, None, mesh)

    # What it holds.

    @property
    def params(self) -> dict[str, Any]:
        """The whole tree of parameters, adapters included: what the decoder's functions take.

        `prefill` and `decode_step` sample from it, under LoRA too;
        [`merge_adapter`][twinkle_jax.model.merge_adapter] gives one without adapters. Nothing is
        copied, and the next `forward_backward` or `step` donates what is trained: ask again then.
        """
        return merge_params(self._frozen, self.state.params)

    @property
    def template(self) -> Any:
        """What `set_template` was given; None before that."""
        return self._template

    @property
    def learning_rate(self) -> float:
        """What the next step multiplies updates by."""
        return float(self._schedule(self._lr_steps, self._lr))

    def get_state_dict(self, *, adapter_name: str | None = None) -> dict[str, np.ndarray]:
        """Copy what is trained to the host, named and laid out as in a checkpoint."""
        self._check_name(adapter_name)
        if self._adapter is not None:
            return adapter_tensors(self.config, self.state.params)
        tensors = list_tensors(Decoder(self.config, self.state.params), PREFIX, None)
        return {tensor.name: tensor.fetch() for tensor in tensors}

    # Setting it up.

    def add_adapter_to_model(
        self,
        adapter_name: str,
        config_or_dir: Any,
        *,
        gradient_accumulation_steps: int | None = None,
        seed: int = 0,
    ) -> None:
        """Freeze the parameters, and train low-rank adapters instead.

        Args:
            adapter_name: a name for it; there can be one adapter.
            config_or_dir: a [`LoraConfig`][twinkle_jax.model.LoraConfig], or PEFT's; or a directory
                with an adapter. `lora_dropout` is applied while training, and only then.
            gradient_accumulation_steps: how many calls of `forward_backward` make an update.
            seed: of the random A; B starts at 0, so nothing changes yet.

        Raises:
            ValueError: if there is an adapter, or an option or target is not supported.
        """
        self._set_accumulation(gradient_accumulation_steps)
        if isinstance(config_or_dir, str | Path):
            self._set_adapter(adapter_name, *load_adapter(config_or_dir, self.config))
            return
        lora = read_lora_config(config_or_dir)
        adapter = init_adapter(jax.random.key(seed), self.config, lora)
        self._set_adapter(adapter_name, lora, adapter)

    def set_loss(
        self,
        loss: str | type[Loss] | Loss | LossFunction,
        *,
        adapter_name: str | None = None,
        **options: Any,
    ) -> None:
        """Choose a loss.

        Args:
            loss: a name, `'grpo'` or `'GRPOLoss'`; a class of `twinkle_jax.loss` or its object; or
                a function, as [`get_loss`][twinkle_jax.loss.get_loss] takes it.
            adapter_name: of the adapter, if there is one.
            options: arguments of the class.

        Raises:
            ValueError: for an unknown name, and losses that need values or logits.
            TypeError: for what is no loss, and arguments that it does not have.
        """
        self._check_name(adapter_name)
        made = get_loss(loss, **options)
        needs = "values" if made.require_values else "logits" if made.require_logits else None
        if needs:
            raise ValueError(
                f"loss must need log-probabilities only, got {type(made).__name__}, "
                f"which needs {needs}"
            )
        self._loss = made

    def set_template(
        self,
        template: Callable[[Any], Mapping[str, Any]] | Any,
        *,
        adapter_name: str | None = None,
    ) -> None:
        """Choose what makes an input feature of a trajectory: an object's `encode`, or a call."""
        self._check_name(adapter_name)
        if isinstance(template, str) or not callable(getattr(template, "encode", template)):
            raise TypeError(
                f"template must be a function or an object with 'encode', got {template!r}"
            )
        self._template = template

    def set_optimizer(
        self,
        optimizer: str | optax.GradientTransformation,
        lr: float | None = None,
        *,
        adapter_name: str | None = None,
        **options: Any,
    ) -> None:
        """Choose an optimizer, and begin its state anew.

        Args:
            optimizer: PyTorch's name with its options and defaults, `'AdamW'`, `'Adam'`, `'SGD'`,
                `'Lion'` or `'Muon'`; the name of an optimizer of Optax, with its; or any Optax
                transformation. Weight decay leaves norms and biases out, as in Twinkle.
            lr: learning rate; Twinkle's 0.00001 for a name. It multiplies the updates of a
                transformation, which brings its own as a rule: 1 there.
            adapter_name: of the adapter, if there is one.
            options: `betas`, `eps`, `weight_decay`, `momentum`, …

        Raises:
            ValueError: for an unknown name, or a learning rate that is negative or not finite.
            TypeError: for an unknown option.
        """
        self._check_name(adapter_name)
        chosen = choose_optimizer(optimizer, options)
        if lr is None:
            lr = DEFAULT_LEARNING_RATE if isinstance(optimizer, str) else 1.0
        if not 0 <= float(lr) < math.inf:
            raise ValueError(f"lr must be at least 0 and finite, got {lr}")
        jax.eval_shape(partial(init_optimizer, chosen), self.state.params)  # fail before it changes
        self._optimizer, self._lr = chosen, float(lr)
        self._restart(self.state.params)

    def set_lr_scheduler(
        self, scheduler: str | Factor, *, adapter_name: str | None = None, **options: Any
    ) -> None:
        """Choose a schedule: a name, or a function from the count of `lr_step` to a factor."""
        self._check_name(adapter_name)
        self._schedule = choose_schedule(scheduler, options)
        self._lr_steps = 0

    # Forward and backward.

    def forward_only(
        self,
        *,
        inputs: Inputs,
        return_logits: bool = False,
        return_entropy: bool = False,
        micro_batch_size: int | None = None,
        temperature: float = 1.0,
        disable_lora: bool = False,
        adapter_name: str | None = None,
    ) -> dict[str, np.ndarray]:
        """Score the labels of inputs, without gradients and without dropout.

        Args:
            inputs: input features, or trajectories once there is a template. Without `labels`,
                each token is scored that follows another one. A row may hold several sequences,
                whose `position_ids` start again at 0; each is computed as it is alone.
            return_logits: whether to return logits as well, which are large.
            return_entropy: whether to return entropies as well.
            micro_batch_size: sequences at a time; None for all.
            temperature: at which log-probabilities and entropies are taken.
            disable_lora: whether to leave adapters out, as for a reference policy.
            adapter_name: of the adapter, if there is one.

        Returns:
            `logps` [rows, time], in input order, padded with zeros on the right, and 0 where the
            label is −100; `entropies` likewise and `logits` [rows, time, vocabulary] when asked.
        """
        self._check_name(adapter_name)
        features = self._read_features(inputs, labels_needed=False)
        pieces = split_packed(features)
        adapter = {} if disable_lora and self._adapter else self.state.params
        shape = (len(features), max(len(feature["labels"]) for feature in features))
        outputs: dict[str, np.ndarray] = {}
        done = 0
        for batch, count in self._micro_batches(pieces, {}, micro_batch_size):
            scores = score_batch(
                adapter,
                batch,
                self.config,
                frozen=self._frozen,
                temperature=temperature,
                with_entropy=return_entropy,
                with_logits=return_logits,
                compute_dtype=self.dtype,
                mesh=self.mesh,
            )
            for name, values in scores._asdict().items():
                if values is not None:
                    out = outputs.setdefault(name, np.zeros(shape + values.shape[2:], np.float32))
                    write_pieces(out, np.asarray(values), pieces[done : done + count])
            done += count
        self._log.show(False, features, outputs)
        return outputs

    def forward_backward(
        self,
        *,
        inputs: Inputs,
        advantages: PerSequence | None = None,
        old_logps: PerSequence | None = None,
        ref_logps: PerSequence | None = None,
        micro_batch_size: int | None = None,
        temperature: float = 1.0,
        gradient_accumulation_steps: int | None = None,
        adapter_name: str | None = None,
    ) -> Float[Array, ""]:
        """Compute the loss and add its gradient to the accumulated gradients.

        Several calls before a step are one large batch: gradients and what they are divided by
        are summed, and divided once.

        Args:
            inputs: input features with `labels`, or trajectories once there is a template. A row
                may hold several sequences, as for `forward_only`.
            advantages: one a row or a sequence, or one a labelled token, or one a position. Without
                them policy losses are 0.
            old_logps: log-probabilities when the tokens were drawn, one a labelled token or one a
                position. None: on policy.
            ref_logps: the same under a reference policy.
            micro_batch_size: sequences at a time; None for all. It changes memory and time only.
            temperature: at which log-probabilities are taken, as the sampler did.
            gradient_accumulation_steps: how many such calls make an update, from now on.
            adapter_name: of the adapter, if there is one.

        Returns:
            The loss of these inputs.
        """
        self._check_name(adapter_name)
        self._set_accumulation(gradient_accumulation_steps)
        if self._loss is None:
            raise ValueError("a loss must be chosen first: call set_loss")
        features = self._read_features(inputs, labels_needed=True)
        pieces = split_packed(features)
        beside = dict(zip(LOSS_INPUTS, (advantages, old_logps, ref_logps), strict=True))
        aligned = {name: align_loss_input(name, x, features, pieces) for name, x in beside.items()}
        total: StepSummary | None = None
        for batch, _ in self._micro_batches(pieces, aligned, micro_batch_size):
            self.state, summary = grad_step(
                self.state,
                batch,
                self.config,
                self._loss,
                frozen=self._frozen,
                temperature=temperature,
                key=self.key if self._adapter and self._adapter[1].lora_dropout else None,
                compute_dtype=self.dtype,
                remat=self.remat,
                mesh=self.mesh,
            )
            total = summary if total is None else add_summaries(total, summary)
        assert total is not None
        self.cur_step += 1
        self._log.add_summary(total)
        facts = {"lr": self.learning_rate, "step": self.cur_step, "grad_norm": self._norm}
        self._log.show(True, features, {"loss": total.loss}, **facts)
        return total.loss

    # Updates.

    def clip_grad_norm(
        self,
        max_grad_norm: float = 1.0,
        *,
        gradient_accumulation_steps: int | None = None,
        adapter_name: str | None = None,
    ) -> Float[Array, ""] | None:
        """Clip the accumulated gradients; return their norm before that."""
        if not self._due(gradient_accumulation_steps, adapter_name):
            return None
        self.state, self._norm = clip_gradients(self.state, max_grad_norm)
        return self._norm

    def step(
        self, *, gradient_accumulation_steps: int | None = None, adapter_name: str | None = None
    ) -> UpdateInfo | None:
        """Apply the accumulated gradients if they are finite, and clear them in any case."""
        due = self._due(gradient_accumulation_steps, adapter_name)
        return self._apply(None) if due else None

    def zero_grad(
        self, *, gradient_accumulation_steps: int | None = None, adapter_name: str | None = None
    ) -> None:
        """Clear the accumulated gradients."""
        if self._due(gradient_accumulation_steps, adapter_name):
            self.state = zero_gradients(self.state)

    def lr_step(
        self, *, gradient_accumulation_steps: int | None = None, adapter_name: str | None = None
    ) -> None:
        """Go one step further in the learning-rate schedule."""
        if self._due(gradient_accumulation_steps, adapter_name):
            self._lr_steps += 1

    def clip_grad_and_step(
        self,
        max_grad_norm: float = 1.0,
        *,
        gradient_accumulation_steps: int | None = None,
        adapter_name: str | None = None,
    ) -> UpdateInfo | None:
        """Clip, apply and clear the gradients, and go on in the schedule.

        Args:
            max_grad_norm: the largest global norm of the gradients, above 0.
            gradient_accumulation_steps: how many calls of `forward_backward` make an update, from
                now on; by default as before, at first 1.
            adapter_name: of the adapter, if there is one.

        Returns:
            Gradient norm, and whether the update was applied; None where more calls are to come.
        """
        if not self._due(gradient_accumulation_steps, adapter_name):
            return None
        info = self._apply(max_grad_norm)
        self._lr_steps += 1
        return info

    # Metrics.

    def add_metric(
        self,
        metric: Any,
        is_training: bool | None = None,
        *,
        adapter_name: str | None = None,
        **options: Any,
    ) -> None:
        """Add a metric of your own, which `calculate_metric` reports.

        Args:
            metric: an object with `accumulate(inputs, outputs, **facts)` and `calculate()`, or its
                class. It sees the input features of each pass and its outputs: the `loss` of
                `forward_backward` with `lr`, `step` and `grad_norm`, or all of `forward_only`.
            is_training: True for training passes, False for `forward_only`, None for both.
            adapter_name: of the adapter, if there is one.
            options: arguments of the class.
        """
        self._check_name(adapter_name)
        self._log.add_metric(metric, is_training, options)

    def calculate_metric(
        self, is_training: bool = True, *, adapter_name: str | None = None
    ) -> dict[str, Any]:
        """Summarise what happened since the last call, as plain numbers.

        Args:
            is_training: False reports added metrics of `forward_only` alone.
            adapter_name: of the adapter, if there is one.
        """
        self._check_name(adapter_name)
        numbers = self._log.report(is_training)
        if not is_training:
            return numbers
        metrics = {"learning_rate": self.learning_rate, "step": float(self.state.step), **numbers}
        if self._norm is not None:
            metrics["grad_norm"] = float(self._norm)
        metrics["skipped_updates"] = float(sum(not info.applied for info in self._updates))
        self._norm, self._updates = None, []
        return metrics

    # Files.

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
                [`resume_from_checkpoint`][twinkle_jax.twinkle.model.TransformersModel.resume_from_checkpoint]
                needs as well: the optimizer's state, accumulated gradients, counters and keys, in
                `training_state/`, a checkpoint like those of a run.
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
        if not save_optimizer:
            _remove(target / _TRAINING_STATE)  # it belongs to older weights
            self._write(target, merge=merge, dtype=dtype)
            return target
        if merge or dtype is not None:
            raise ValueError(
                "save_optimizer must go without merge and dtype, so that a run goes on exactly, "
                f"got merge={merge}, dtype={dtype}"
            )
        self._check_optimizer()
        check_target(target)
        counters = {
            "cur_step": self.cur_step,
            "gradient_accumulation_steps": self.gradient_accumulation_steps,
            "consumed_train_samples": consumed_train_samples,
            "lr": self._lr,
            "lr_steps": self._lr_steps,
        }
        with replace_directory(target) as fresh:
            if target.exists():  # other files of the user's stay
                shutil.copytree(
                    target, fresh, dirs_exist_ok=True, ignore=shutil.ignore_patterns(*_OWN_FILES)
                )
            self._write_into(fresh)
            (fresh / _TRAINING_STATE).mkdir()
            write_checkpoint(fresh / _TRAINING_STATE, self._training_state(), counters)
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
        saved = place / _TRAINING_STATE
        if not saved.is_dir():
            raise ValueError(
                f"{place} must hold {_TRAINING_STATE}, got none: save(…, save_optimizer=True) "
                "writes it"
            )
        fault = find_fault(saved)
        if fault is not None:
            raise ValueError(f"{saved} must be whole: {fault}")
        if not resume_only_model:
            self._check_optimizer()
        self._load(place)
        counters = read_json(saved, "facts.json")
        if not resume_only_model:
            self._resume(saved, counters)
        return {name: counters[name] for name in _COUNTERS}

    # Inside.

    def _write(self, directory: Path, *, merge: bool, dtype: DTypeLike | None) -> None:
        """Write a checkpoint, or the adapter in PEFT's format where there is one."""
        if self._adapter is not None and not merge:
            place = self.source if isinstance(self.model_id, Decoder) else self.model_id
            base, lora = None if place is None else str(place), self._adapter[1]
            save_adapter(directory, self.config, lora, self.state.params, base=base)
            return
        params = jax.jit(merge_adapter)(self.params)
        save_pretrained(Decoder(self.config, params, source=self.source), directory, dtype=dtype)

    def _write_into(self, directory: Path) -> None:
        """Write weights to a directory that holds other files too."""
        weights = directory / ".weights"
        self._write(weights, merge=False, dtype=None)
        for path in weights.iterdir():
            path.rename(directory / path.name)
        weights.rmdir()

    def _load(self, directory: Path | str) -> None:
        """Read parameters or an adapter; optimizer state and gradients begin anew."""
        place = locate(directory)
        if (place / ADAPTER_CONFIG).exists():
            lora, adapter = load_adapter(place, self.config)
            if self._adapter is None:
                return self._set_adapter("default", lora, adapter)
            self._adapter = self._adapter[0], lora
            self._frozen = self._base(self._frozen or {}, lora)
            return self._restart(adapter)
        if self._adapter is not None:
            raise ValueError(f"{directory} must hold an adapter, got a whole checkpoint")
        if parse_config(read_json(place, CONFIG)) != self.config:
            raise ValueError(
                f"{directory} must hold a model of this configuration, got another configuration"
            )
        self._drop_training_state()  # its memory is free before the new parameters come
        try:
            return self._restart(self._read(place).params)
        except BaseException:
            self._restart(self.state.params)
            raise

    def _resume(self, saved: Path, counters: dict[str, Any]) -> None:
        like = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding),
            self._training_state(),
        )
        params = self.state.params
        self._drop_training_state()
        try:
            arrays, _ = read_checkpoint(saved, like)
        except (ValueError, TypeError) as error:
            self._restart(params)
            raise ValueError(f"{saved} must be of a run with this optimizer: {error}") from error
        except BaseException:
            self._restart(params)
            raise
        self.key = arrays.pop("key")
        self.state = self.state._replace(**arrays)
        self.cur_step = counters["cur_step"]
        self.gradient_accumulation_steps = counters["gradient_accumulation_steps"]
        self._lr, self._lr_steps = counters["lr"], counters["lr_steps"]

    def _training_state(self) -> dict[str, Any]:
        state = self.state._asdict() | {"key": self.key}
        del state["params"]
        return state

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

    def _restart(self, params: Params) -> None:
        """Begin optimizer state and gradients anew; rows go on, so that noise does not repeat."""
        rows = self.state.rows
        self._drop_training_state()
        self.state = begin_training(params, self._optimizer, self.mesh)._replace(rows=rows)

    def _set_accumulation(self, steps: int | None) -> None:
        if steps is None:
            return
        if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
            raise ValueError(f"gradient_accumulation_steps must be a positive int, got {steps!r}")
        self.gradient_accumulation_steps = steps

    def _due(self, steps: int | None, adapter_name: str | None) -> bool:
        self._check_name(adapter_name)
        self._set_accumulation(steps)
        n = self.gradient_accumulation_steps
        return n == 1 or (self.cur_step > 0 and self.cur_step % n == 0)

    def _check_optimizer(self) -> optax.GradientTransformation:
        if self._optimizer is None:
            raise ValueError("an optimizer must be chosen first: call set_optimizer")
        return self._optimizer

    def _apply(self, max_grad_norm: float | None) -> UpdateInfo:
        optimizer = self._check_optimizer()
        self.state, info = apply_gradients(
            self.state,
            optimizer,
            learning_rate=self.learning_rate,
            max_grad_norm=max_grad_norm,
            mesh=self.mesh,
        )
        self._norm = info.gradient_norm if self._norm is None else self._norm
        self._updates.append(info)
        return info

    def _read_features(self, inputs: Inputs, *, labels_needed: bool) -> list[Feature]:
        return read_features(
            inputs,
            self._template,
            vocab_size=self.config.vocab_size,
            labels_needed=labels_needed,
        )

    def _micro_batches(
        self, pieces: list[Piece], loss_inputs: dict[str, list[HostArray] | None], size: int | None
    ) -> Iterator[tuple[Batch, int]]:
        """Cut into micro-batches; on a mesh, spread the rows of each over it."""
        sequences = [piece.feature for piece in pieces]
        if self.mesh is None:
            yield from micro_batches(sequences, loss_inputs, size)
            return
        devices = self.mesh.shape["data"] * self.mesh.shape["fsdp"]
        for batch, count in micro_batches(
            sequences,
            loss_inputs,
            size,
            row_multiple=devices,
            time_multiple=self.mesh.shape["tensor"],
        ):
            yield jax.device_put(batch, batch_sharding(self.mesh)), count


def _compute_dtype(dtype: DTypeLike | None, mixed_precision: str | None) -> DTypeLike:
    if mixed_precision is None:
        return "float32" if dtype is None else dtype
    if mixed_precision not in _DTYPES:
        raise ValueError(f"mixed_precision must be 'no' or 'bf16', got {mixed_precision!r}")
    named = _DTYPES[mixed_precision]
    if dtype is not None and jnp.dtype(dtype) != jnp.dtype(named):
        raise ValueError(
            f"dtype must be {named} with mixed_precision={mixed_precision!r}, got {dtype}"
        )
    return named


def _remove(directory: Path) -> None:
    if directory.is_dir():
        shutil.rmtree(directory)
