"""Twinkle's `TransformersModel`: its verbs, each a call of the functions that train."""

import math
import shutil
from collections.abc import Iterator, Mapping
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

from twinkle_jax.data import Inputs, PerSequence
from twinkle_jax.data.batch import Batch, HostArray, micro_batches
from twinkle_jax.data.features import (
    LOSS_INPUTS,
    Feature,
    Piece,
    align_loss_input,
    align_teacher,
    read_features,
    split_packed,
    write_pieces,
)
from twinkle_jax.loss import GKDLoss, Loss, LossFunction, get_loss
from twinkle_jax.model import (
    Decoder,
    LoraConfig,
    Params,
    Remat,
    load_adapter,
    load_pretrained,
    merge_params,
    partition_rules,
    shard_like_params,
)
from twinkle_jax.model.decoder.lora import adapter_scales, init_adapter, read_lora_config
from twinkle_jax.model.decoder.sharding import batch_sharding
from twinkle_jax.model.huggingface.adapter_files import adapter_tensors
from twinkle_jax.model.huggingface.checkpoint_names import PREFIX
from twinkle_jax.model.huggingface.checkpoint_write import list_tensors
from twinkle_jax.training.gradient import StepSummary, add_summaries, grad_step
from twinkle_jax.training.score import score_batch
from twinkle_jax.training.state import TrainState, begin_training, init_optimizer
from twinkle_jax.training.update import (
    UpdateInfo,
    apply_gradients,
    clip_gradients,
    zero_gradients,
)
from twinkle_jax.twinkle.infra import DeviceMesh, mesh_of, note_group
from twinkle_jax.twinkle.model.files import (
    TRAINING_STATE,
    read_weights,
    resume,
    save_run,
    write_weights,
)
from twinkle_jax.twinkle.model.group import OptimizerGroup
from twinkle_jax.twinkle.model.optimizer import (
    DEFAULT_LEARNING_RATE,
    Factor,
    choose_optimizer,
    choose_schedule,
)
from twinkle_jax.twinkle.names import class_of, construct, local_id, refuse, warn_once
from twinkle_jax.twinkle.processor import InputProcessor

Precision = Literal["no", "bf16"]
_DTYPES = {"no": "float32", "bf16": "bfloat16"}
_SPEED = (  # Twinkle's options that change neither what is computed nor in which type
    "attn_implementation",
    "ddp_config",
    "fsdp_config",
    "gradient_checkpointing",
    "low_cpu_mem_usage",
    "memory_efficient_init",
    "strategy",
    "tokenizer_id",
    "trust_remote_code",
)


class TransformersModel:
    """A policy with Twinkle's verbs.

    It holds a [`TrainState`][twinkle_jax.training.TrainState] and calls the functions of
    `twinkle_jax.training`: `score_batch`, `grad_step`, `clip_gradients`, `apply_gradients`. Batches
    are padded to the sizes of [`bucket_size`][twinkle_jax.data.bucket_size]: the time axis from 16
    on, the rows to `micro_batch_size`, or to a bucket without it. What was compiled for a bucket
    serves all batches that fit in it.

    `cur_step` counts calls of `forward_backward`. With `gradient_accumulation_steps` of n, the
    verbs that change the policy do nothing unless it is a multiple of n. `optimizer_group` has, by
    the name of an adapter, what it is trained with; `adapter_name` in a verb chooses one, and
    without it the last adapter added is meant.

    Args:
        model_id: a directory with a Hugging Face checkpoint, a hub id, or a
            [`Decoder`][twinkle_jax.model.Decoder], whose parameters are copied.
        device_mesh: Twinkle's mesh; None for that of `initialize`.
        dtype: type to compute in, float32 by default. Trained parameters are float32 in any case;
            the frozen ones under adapters are in this type.
        mixed_precision: the same in Twinkle's words, `"no"` or `"bf16"`.
        mesh: devices to run on, from [`make_mesh`][twinkle_jax.model.make_mesh], instead of
            `device_mesh`; None for one.
        remat: as for [`hidden_states`][twinkle_jax.model.hidden_states].
        seed: of the noise of dropout.
        model_cls: unused, and said once: the checkpoint's configuration names the architecture.
        remote_group: unused, and said once: there are no groups of workers.
        options: Twinkle's others about kernels, memory and workers have no effect on results, and
            none here.

    Raises:
        ValueError: for what `load_pretrained` refuses, and a mesh with other or explicit axes.
        TypeError: for an unknown option.
    """

    def __init__(
        self,
        model_id: str | Path | Decoder,
        *,
        device_mesh: DeviceMesh | None = None,
        dtype: DTypeLike | None = None,
        mixed_precision: Precision | None = None,
        mesh: Mesh | None = None,
        remat: Remat = True,
        seed: int = 0,
        model_cls: Any = None,
        remote_group: str | None = None,
        **options: Any,
    ) -> None:
        refuse("TransformersModel", {k: x for k, x in options.items() if k not in _SPEED})
        note_group(remote_group)
        if model_cls is not None:
            warn_once(
                "model_cls is not read: the checkpoint's configuration names the architecture"
            )
        model_id = local_id(model_id)
        self.model_id, self.remat = model_id, remat
        self.mesh = mesh_of(device_mesh) if mesh is None else mesh
        self.dtype = jnp.dtype(_compute_dtype(dtype, mixed_precision))
        decoder = self._copy(model_id) if isinstance(model_id, Decoder) else self.read(model_id)
        self.config, self.source = decoder.config, decoder.source
        self.key = jax.random.key(seed)
        self._base: Params | None = None  # the frozen parameters under adapters
        state = begin_training(decoder.params, None, self.mesh)
        self.optimizer_group = {"": OptimizerGroup("", state)}
        self.active_group = ""

    # What it holds.

    @property
    def params(self) -> dict[str, Any]:
        """All parameters, the active adapter included: what the decoder's functions take.

        `prefill` and `decode_step` sample from it, under LoRA too;
        [`merge_adapter`][twinkle_jax.model.merge_adapter] gives one without adapters. Nothing is
        copied, and the next `forward_backward` or `step` donates what is trained: ask again then.
        """
        return self.merged(self.group())

    @property
    def state(self) -> TrainState:
        """What the active adapter trains, or the parameters themselves."""
        return self.group().state

    @state.setter
    def state(self, state: TrainState) -> None:
        self.group().state = state

    @property
    def template(self) -> Any:
        """What `set_template` was given; None before that."""
        return self.group().template

    @property
    def learning_rate(self) -> float:
        """What the next step multiplies updates by."""
        return self.group().learning_rate

    @property
    def cur_step(self) -> int:
        """How often `forward_backward` was called."""
        return self.group().cur_step

    @property
    def has_adapters(self) -> bool:
        """Whether adapters are trained instead of the parameters."""
        return "" not in self.optimizer_group

    def group(self, adapter_name: str | None = None) -> OptimizerGroup:
        """Give what an adapter is trained with; by default the last one that was added.

        Raises:
            ValueError: if there is no such adapter.
        """
        name = adapter_name or self.active_group
        if name not in self.optimizer_group:
            names = sorted(filter(None, self.optimizer_group))
            known = " or ".join(map(repr, names)) if names else None
            raise ValueError(f"adapter_name must be {known} or left out, got {adapter_name!r}")
        return self.optimizer_group[name]

    def merged(self, group: OptimizerGroup) -> dict[str, Any]:
        """Lay what a group trains over the frozen parameters."""
        return merge_params(group.frozen, group.state.params)

    def get_state_dict(self, *, adapter_name: str | None = None) -> dict[str, np.ndarray]:
        """Copy what is trained to the host, named and laid out as in a checkpoint."""
        group = self.group(adapter_name)
        if group.lora is not None:
            return adapter_tensors(self.config, group.state.params)
        tensors = list_tensors(Decoder(self.config, group.state.params), PREFIX, None)
        return {tensor.name: tensor.fetch() for tensor in tensors}

    def get_train_configs(self, *, adapter_name: str | None = None) -> str:
        """Describe what is trained, and how."""
        group = self.group(adapter_name)
        trained = sum(leaf.size for leaf in jax.tree.leaves(group.state.params))
        total = sum(leaf.size for leaf in jax.tree.leaves(self.merged(group)))
        lines = [
            f"Adapter config: {group.lora}",
            f"Trainable params: {trained:,d} || all params: {total:,d} || "
            f"trainable%: {100 * trained / total:.4f}",
            f"Loss: {type(group.loss).__name__}",
            f"Learning rate: {group.learning_rate}",
            f"Gradient accumulation steps: {group.gradient_accumulation_steps}",
        ]
        return "\n".join(lines)

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
            adapter_name: a name for it; several adapters share the frozen parameters, and each is
                trained by itself.
            config_or_dir: a [`LoraConfig`][twinkle_jax.model.LoraConfig], or PEFT's; or a directory
                with an adapter. `lora_dropout` is applied while training, and only then.
            gradient_accumulation_steps: how many calls of `forward_backward` make an update.
            seed: of the random A; B starts at 0, so nothing changes yet.

        Raises:
            ValueError: if the name is taken, or an option or target is not supported.
        """
        if isinstance(config_or_dir, str | Path):
            lora, adapter = load_adapter(local_id(config_or_dir), self.config)
        else:
            lora = read_lora_config(config_or_dir)
            adapter = init_adapter(jax.random.key(seed), self.config, lora)
        self.add_group(adapter_name, lora, adapter)
        self.group(adapter_name).set_accumulation(gradient_accumulation_steps)

    def set_loss(
        self,
        loss_cls: str | type[Loss] | Loss | LossFunction,
        *,
        adapter_name: str | None = None,
        **options: Any,
    ) -> None:
        """Choose a loss; it is `CrossEntropyLoss` before that.

        Args:
            loss_cls: a name, `'grpo'` or `'GRPOLoss'`; a class of `twinkle_jax.loss` or its object;
                or a function, as [`get_loss`][twinkle_jax.loss.get_loss] takes it.
            adapter_name: of the adapter, if there is one.
            options: arguments of the class.

        Raises:
            ValueError: for an unknown name, and losses that need values or, except for `GKDLoss`,
                logits.
            TypeError: for what is no loss, and arguments that it does not have.
        """
        group = self.group(adapter_name)
        made = get_loss(loss_cls, **options)
        needs = "values" if made.require_values else "logits" if made.require_logits else None
        if needs and not isinstance(made, GKDLoss):
            raise ValueError(
                f"loss must need log-probabilities only, got {type(made).__name__}, "
                f"which needs {needs}"
            )
        group.loss = made

    def set_template(
        self, template_cls: Any, *, adapter_name: str | None = None, **options: Any
    ) -> None:
        """Choose what makes an input feature of a trajectory.

        Args:
            template_cls: a name, `"Qwen3_5Template"` or `"Template"`, or a class; an object with
                `encode`; or a function.
            adapter_name: of the adapter, if there is one.
            options: arguments of the class, `model_id` and `enable_thinking` for two.

        Raises:
            ValueError: for an unknown name.
            TypeError: for what does not encode.
        """
        group = self.group(adapter_name)
        template = construct(template_cls, "twinkle_jax.twinkle.template", **options)
        if not callable(getattr(template, "encode", template)):
            raise TypeError(
                f"template must be a function or an object with 'encode', got {template!r}"
            )
        group.template = template

    def set_processor(
        self, processor_cls: Any, *, adapter_name: str | None = None, **options: Any
    ) -> None:
        """Take Twinkle's `InputProcessor`, which changes nothing here: no result depends on layout.

        Raises:
            TypeError: for another processor, which might change what is computed.
        """
        self.group(adapter_name)
        made = construct(processor_cls, "twinkle_jax.twinkle.processor", **options)
        if type(made) is not InputProcessor:
            raise TypeError(
                f"processor_cls must be InputProcessor, got {made!r}: change the features before "
                "they come here; see docs/from_twinkle.md"
            )

    def set_optimizer(
        self,
        optimizer_cls: str | type | optax.GradientTransformation = "AdamW",
        lr: float | None = None,
        *,
        adapter_name: str | None = None,
        **options: Any,
    ) -> None:
        """Choose an optimizer, and begin its state anew.

        Args:
            optimizer_cls: PyTorch's name or class with its options and defaults, `'AdamW'`,
                `'Adam'`, `'SGD'`, `'Lion'` or `'Muon'`; the name of an optimizer of Optax, with
                its options; or any Optax transformation. Weight decay leaves norms and biases out,
                as in Twinkle.
            lr: learning rate; Twinkle's 0.00001 for a name. It multiplies the updates of a
                transformation, which brings its own as a rule: 1 there.
            adapter_name: of the adapter, if there is one.
            options: `betas`, `eps`, `weight_decay`, `momentum`, …

        Raises:
            ValueError: for an unknown name, or a learning rate that is negative or not finite.
            TypeError: for an unknown option.
        """
        group = self.group(adapter_name)
        chosen = choose_optimizer(optimizer_cls, options)
        if lr is None:
            lr = 1.0 if chosen is optimizer_cls else DEFAULT_LEARNING_RATE
        if not 0 <= float(lr) < math.inf:
            raise ValueError(f"lr must be at least 0 and finite, got {lr}")
        jax.eval_shape(
            partial(init_optimizer, chosen), group.state.params
        )  # fail before it changes
        group.optimizer, group.lr = chosen, float(lr)
        self.restart(group, group.state.params)

    def set_lr_scheduler(
        self, scheduler_cls: str | Factor, *, adapter_name: str | None = None, **options: Any
    ) -> None:
        """Choose a schedule: a name, or a function from the count of `lr_step` to a factor."""
        group = self.group(adapter_name)
        group.schedule = choose_schedule(scheduler_cls, options)
        group.lr_steps = 0

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
        task: str = "causal_lm",
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
            task: `"causal_lm"`; or `"fused_lm_ce"`, which is the same: no logits are held anyway.

        Returns:
            `logps` [rows, time], in input order, padded with zeros on the right, and 0 where the
            label is −100; `entropies` likewise and `logits` [rows, time, vocabulary] when asked.
        """
        group = self.group(adapter_name)
        _check_task(task)
        features = self._read_features(group, inputs, labels_needed=False)
        pieces = split_packed(features)
        adapter = {} if disable_lora and group.lora is not None else group.state.params
        shape = (len(features), max(len(feature["labels"]) for feature in features))
        outputs: dict[str, np.ndarray] = {}
        done = 0
        for batch, count in self._micro_batches(pieces, {}, micro_batch_size):
            scores = score_batch(
                adapter,
                batch,
                self.config,
                frozen=group.frozen,
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
        group.last_pass = features, pieces, outputs
        group.log.show(False, features, outputs)
        return outputs

    def calculate_loss(
        self,
        *,
        advantages: PerSequence | None = None,
        old_logps: PerSequence | None = None,
        ref_logps: PerSequence | None = None,
        ref_outputs: Mapping[str, Any] | None = None,
        adapter_name: str | None = None,
    ) -> float:
        """Compute the loss of the last `forward_only`, which `calculate_metric(False)` averages.

        Args:
            advantages: as for `forward_backward`.
            old_logps: likewise.
            ref_logps: likewise.
            ref_outputs: likewise.
            adapter_name: of the adapter, if there is one.

        Raises:
            ValueError: if there was no pass, or the loss needs more than log-probabilities.
        """
        group = self.group(adapter_name)
        if group.last_pass is None:
            raise ValueError("inputs must have been scored first: call forward_only")
        features, pieces, outputs = group.last_pass
        if isinstance(group.loss, GKDLoss) or (
            group.loss.require_entropy and "entropies" not in outputs
        ):
            raise ValueError(
                f"{type(group.loss).__name__} must be computed by forward_backward: "
                "it needs more than log-probabilities"
            )
        beside = _loss_inputs(advantages, old_logps, ref_logps, ref_outputs)
        aligned = {name: align_loss_input(name, x, features, pieces) for name, x in beside.items()}
        ((batch, count),) = micro_batches([p.feature for p in pieces], aligned, None)
        scores = {}
        for name in ("logps", "entropies"):
            if name in outputs:
                scores[name] = np.zeros(batch.tokens.shape, np.float32)
                for row, piece in zip(scores[name], pieces, strict=False):
                    values = outputs[name][piece.row, piece.columns]
                    row[: len(values)] = values
        arrays = {k: x[:count] for k, x in batch._asdict().items() if k in beside and x is not None}
        with jax.numpy_dtype_promotion("standard"):
            output = group.loss(
                {"labels": batch.labels[:count]},
                {name: x[:count] for name, x in scores.items()},
                **arrays,
            )
        loss = float(output.loss / (output.num_tokens or 1))
        group.log.add_loss(loss)
        return loss

    def forward_backward(
        self,
        *,
        inputs: Inputs,
        advantages: PerSequence | None = None,
        old_logps: PerSequence | None = None,
        ref_logps: PerSequence | None = None,
        ref_outputs: Mapping[str, Any] | None = None,
        teacher_output: Mapping[str, Any] | None = None,
        teacher_logits: Any = None,
        teacher_topk_logprobs: Any = None,
        teacher_topk_indices: Any = None,
        topk: int | None = None,
        micro_batch_size: int | None = None,
        temperature: float = 1.0,
        gradient_accumulation_steps: int | None = None,
        adapter_name: str | None = None,
        task: str = "causal_lm",
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
            ref_outputs: what `forward_only` of a reference policy returned, instead.
            teacher_output: the four arguments that follow, or some of them, in a dictionary; what
                `forward_only(return_logits=True)` of a teacher returned is such a one.
            teacher_logits: a teacher's logits [rows, time, vocabulary], for `GKDLoss`; or
            teacher_topk_logprobs: log-probabilities [rows, time, k] of its likely tokens, and
            teacher_topk_indices: ids of these.
            topk: how many of the logits to compare, the teacher's largest; None for all.
            micro_batch_size: sequences at a time; None for all. It changes memory and time only.
            temperature: at which log-probabilities are taken, as the sampler did.
            gradient_accumulation_steps: how many such calls make an update, from now on.
            adapter_name: of the adapter, if there is one.
            task: `"causal_lm"`; or `"fused_lm_ce"`, which is the same: no logits are held anyway.

        Returns:
            The loss of these inputs.
        """
        group = self.group(adapter_name)
        _check_task(task)
        group.set_accumulation(gradient_accumulation_steps)
        features = self._read_features(group, inputs, labels_needed=True)
        pieces = split_packed(features)
        beside = _loss_inputs(advantages, old_logps, ref_logps, ref_outputs)
        aligned: dict[str, Any] = {
            name: align_loss_input(name, x, features, pieces) for name, x in beside.items()
        }
        teacher = _teacher(
            teacher_output, teacher_logits, teacher_topk_logprobs, teacher_topk_indices, topk
        )
        if (teacher is None) == isinstance(group.loss, GKDLoss):
            raise ValueError(
                "teacher_logits or teacher_topk_logprobs must be given with GKDLoss and with no "
                f"other loss, got {type(group.loss).__name__}"
            )
        if teacher is not None:
            aligned |= align_teacher(*teacher, features, pieces)
        total: StepSummary | None = None
        shape = (len(features), max(len(feature["labels"]) for feature in features))
        logps = np.zeros(shape, np.float32) if group.log.sees_logps(True) else None
        done = 0
        for batch, count in self._micro_batches(pieces, aligned, micro_batch_size):
            group.state, summary = grad_step(
                group.state,
                batch,
                self.config,
                group.loss,
                frozen=group.frozen,
                temperature=temperature,
                key=self.key if group.lora is not None and group.lora.lora_dropout else None,
                compute_dtype=self.dtype,
                remat=self.remat,
                mesh=self.mesh,
            )
            if logps is not None and summary.logps is not None:
                write_pieces(logps, np.asarray(summary.logps), pieces[done : done + count])
            done += count
            total = summary if total is None else add_summaries(total, summary)
        assert total is not None
        group.cur_step += 1
        group.log.add_summary(total)
        outputs = {"loss": total.loss} | ({} if logps is None else {"logps": logps})
        facts: dict[str, Any] = {
            "lr": group.learning_rate,
            "step": group.cur_step,
            "grad_norm": group.gradient_norm,
            "gradient_accumulation_steps": group.gradient_accumulation_steps,
            **{name: values for name, values in beside.items() if values is not None},
        }
        group.log.show(True, features, outputs, **facts)
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
        group = self.group(adapter_name)
        if not group.due(gradient_accumulation_steps):
            return None
        group.state, group.gradient_norm = clip_gradients(group.state, max_grad_norm)
        return group.gradient_norm

    def step(
        self, *, gradient_accumulation_steps: int | None = None, adapter_name: str | None = None
    ) -> UpdateInfo | None:
        """Apply the accumulated gradients if they are finite, and clear them in any case."""
        group = self.group(adapter_name)
        return self._apply(group, None) if group.due(gradient_accumulation_steps) else None

    def zero_grad(
        self, *, gradient_accumulation_steps: int | None = None, adapter_name: str | None = None
    ) -> None:
        """Clear the accumulated gradients."""
        group = self.group(adapter_name)
        if group.due(gradient_accumulation_steps):
            group.state = zero_gradients(group.state)

    def lr_step(
        self, *, gradient_accumulation_steps: int | None = None, adapter_name: str | None = None
    ) -> None:
        """Go one step further in the learning-rate schedule."""
        group = self.group(adapter_name)
        if group.due(gradient_accumulation_steps):
            group.lr_steps += 1

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
        group = self.group(adapter_name)
        if not group.due(gradient_accumulation_steps):
            return None
        info = self._apply(group, max_grad_norm)
        group.lr_steps += 1
        return info

    # Metrics.

    def add_metric(
        self,
        metric_cls: Any,
        is_training: bool | None = None,
        *,
        adapter_name: str | None = None,
        **options: Any,
    ) -> None:
        """Add a metric, which `calculate_metric` reports.

        Args:
            metric_cls: an object with `accumulate(inputs, outputs, **facts)` and `calculate()`, its
                class, or the name of one of `twinkle_jax.twinkle.metric`. It sees the input
                features of each pass and its outputs: `loss` and `logps` of `forward_backward` with
                `lr`, `step`, `grad_norm` and what its loss was given, or all of `forward_only`.
            is_training: True for training passes, False for `forward_only`, None for both.
            adapter_name: of the adapter, if there is one.
            options: arguments of the class.
        """
        group = self.group(adapter_name)
        if isinstance(metric_cls, str):
            metric_cls = class_of(metric_cls, "twinkle_jax.twinkle.metric")
        group.log.add_metric(metric_cls, is_training, options)

    def calculate_metric(
        self, is_training: bool = True, *, adapter_name: str | None = None
    ) -> dict[str, Any]:
        """Summarise what happened since the last call, as plain numbers.

        Args:
            is_training: False reports the losses of `calculate_loss` and added metrics of
                `forward_only` alone.
            adapter_name: of the adapter, if there is one.
        """
        group = self.group(adapter_name)
        return group.metrics() if is_training else group.log.report(False)

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
        group = self.group(adapter_name)
        if group.cur_step % interval:
            return None
        folder = Path("output") if name is None and output_dir is None else Path(output_dir or "")
        target = folder / (f"checkpoint-step-{group.cur_step}" if name is None else name)
        target = target.expanduser()
        if not save_optimizer:
            if (target / TRAINING_STATE).is_dir():  # it belongs to older weights
                shutil.rmtree(target / TRAINING_STATE)
            write_weights(self, group, target, merge=merge, dtype=dtype)
        elif merge or dtype is not None:
            raise ValueError(
                "save_optimizer must go without merge and dtype, so that a run goes on exactly, "
                f"got merge={merge}, dtype={dtype}"
            )
        else:
            save_run(self, group, target, consumed_train_samples)
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
        place = local_id(name) if output_dir is None else Path(output_dir) / name
        if load_optimizer:
            resume(self, adapter_name, place, False)
        else:
            read_weights(self, adapter_name, place)

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
        return resume(self, adapter_name, checkpoint_dir, resume_only_model)

    # For the files beside this one.

    def add_group(self, name: str, lora: LoraConfig, adapter: Params) -> None:
        """Add an adapter; the first one freezes the parameters."""
        if not name or name in self.optimizer_group:
            raise ValueError(f"adapter_name must be new and not empty, got {name!r}")
        before = self.group()
        if not self.has_adapters:
            before.drop_training_state()
            self._base = jax.tree.map(lambda x: x.astype(self.dtype), before.state.params)
            del self.optimizer_group[""]
        state = begin_training(adapter, None, self.mesh)
        group = OptimizerGroup(name, state, lora, self.frozen_base(lora))
        group.template, group.loss = before.template, before.loss
        group.set_accumulation(before.gradient_accumulation_steps)
        self.optimizer_group[name], self.active_group = group, name

    def frozen_base(self, lora: LoraConfig) -> dict[str, Any]:
        """Give the frozen parameters with the scales of an adapter."""
        return merge_params(self._base, adapter_scales(self.config, lora))

    def restart(self, group: OptimizerGroup, params: Params) -> None:
        """Begin optimizer state and gradients anew; rows go on, so that noise does not repeat."""
        rows = group.state.rows
        group.drop_training_state()
        group.state = begin_training(params, group.optimizer, self.mesh)._replace(rows=rows)

    def read(self, directory: str | Path) -> Decoder:
        """Read a checkpoint onto the devices."""
        rules = None if self.mesh is None else partition_rules(self.mesh)
        return load_pretrained(directory, dtype="float32", mesh=self.mesh, partition=rules)

    def _copy(self, decoder: Decoder) -> Decoder:
        """Training donates its parameters, so a decoder of the caller's is copied."""
        shardings = None if self.mesh is None else shard_like_params(decoder.params, self.mesh)

        def copied(params: Params) -> Params:
            return jax.tree.map(lambda x: jnp.copy(x.astype(jnp.float32)), params)

        params = jax.jit(copied, out_shardings=shardings)(decoder.params)
        return Decoder(decoder.config, params, source=decoder.source)

    def _apply(self, group: OptimizerGroup, max_grad_norm: float | None) -> UpdateInfo:
        optimizer = group.needed_optimizer()
        group.state, info = apply_gradients(
            group.state,
            optimizer,
            learning_rate=group.learning_rate,
            max_grad_norm=max_grad_norm,
            mesh=self.mesh,
        )
        if group.gradient_norm is None:
            group.gradient_norm = info.gradient_norm
        group.updates.append(info)
        return info

    def _read_features(
        self, group: OptimizerGroup, inputs: Inputs, *, labels_needed: bool
    ) -> list[Feature]:
        return read_features(
            inputs,
            group.template,
            vocab_size=self.config.vocab_size,
            labels_needed=labels_needed,
            other_columns=True,
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


def _teacher(
    output: Mapping[str, Any] | None, logits: Any, logprobs: Any, indices: Any, topk: int | None
) -> tuple[Any, Any] | None:
    """Give a teacher's log-probabilities and their tokens, of logits the largest ones."""
    if output is not None:
        named = {"logits": logits, "topk_logprobs": logprobs, "topk_indices": indices}
        found = {name.removeprefix("teacher_"): x for name, x in output.items()}
        found = {"logits": None, **{k: x for k, x in found.items() if k in named}}
        if any(x is not None for x in (logits, logprobs, indices)):
            raise ValueError("teacher_output must be the only teacher, got another one too")
        logits, logprobs = found["logits"], found.get("topk_logprobs")
        indices, topk = found.get("topk_indices"), output.get("topk", topk)
    if logprobs is not None and indices is not None:
        return logprobs, indices
    if logits is None:
        return None
    values = np.asarray(logits, np.float32)
    # A constant added to a position's logits changes no distribution over them.
    order = np.argsort(-values, axis=-1, kind="stable")[..., :topk].astype(np.int32)
    return np.take_along_axis(values, order, axis=-1), order


def _check_task(task: str) -> None:
    if task not in ("causal_lm", "fused_lm_ce"):
        raise ValueError(f"task must be 'causal_lm', got {task!r}; see docs/from_twinkle.md")


def _loss_inputs(
    advantages: PerSequence | None,
    old_logps: PerSequence | None,
    ref_logps: PerSequence | None,
    ref_outputs: Mapping[str, Any] | None,
) -> dict[str, Any]:
    if ref_outputs is not None:
        if ref_logps is not None:
            raise ValueError("ref_logps must be left out with ref_outputs, got both")
        ref_logps = ref_outputs["logps"]
    return dict(zip(LOSS_INPUTS, (advantages, old_logps, ref_logps), strict=True))
