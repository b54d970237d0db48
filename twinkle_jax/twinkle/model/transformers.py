"""Twinkle's models: methods that call the training functions, and Megatron's names for them."""

import dataclasses
import math
from collections import UserDict
from collections.abc import Mapping, MutableMapping
from enum import Enum
from functools import partial
from typing import Any

import jax
import numpy as np
import optax
from jaxtyping import Array, Float

from twinkle_jax.data import Inputs, PerSequence, Piece
from twinkle_jax.data.features import LOSS_INPUTS, largest_logits
from twinkle_jax.loss import (
    ChunkedCrossEntropyLoss,
    CrossEntropyLoss,
    GKDLoss,
    Loss,
    LossFunction,
    get_loss,
)
from twinkle_jax.training import (
    FeatureRows,
    StepSummary,
    UpdateInfo,
    add_summaries,
    apply_gradients,
    clip_gradients,
    grad_features,
    loss_of_scores,
    score_features,
    train_state,
    zero_gradients,
)
from twinkle_jax.twinkle.model.files import SavedPolicy
from twinkle_jax.twinkle.model.optimizer import (
    DEFAULT_LEARNING_RATE,
    Factor,
    choose_optimizer,
    choose_schedule,
)
from twinkle_jax.twinkle.model.policy import OptimizerGroup
from twinkle_jax.twinkle.names import (
    IGNORED,
    PAGE,
    add_submodules,
    class_of,
    construct,
    warn_once,
)
from twinkle_jax.twinkle.processor import InputProcessor
from twinkle_jax.twinkle.template import make_template


class RouterReplayAction(Enum):
    """What a pass of a mixture of experts does with the experts of its tokens."""

    RECORD = "record"
    REPLAY_FORWARD = "replay_forward"
    REPLAY_BACKWARD = "replay_backward"  # the same here: both passes replay


class TransformersModel(SavedPolicy):
    """A policy with Twinkle's methods, over a [`TrainState`][twinkle_jax.training.TrainState].

    Batches are padded to buckets: the time axis to a [`bucket_size`][twinkle_jax.data.bucket_size]
    from 16 on, the rows to `micro_batch_size`, or to a bucket without it. Batches that fit in a
    bucket share what was compiled for it.

    `cur_step` counts calls of `forward_backward`. With `gradient_accumulation_steps=n`, `step` and
    the other methods that change the policy do nothing unless it is a multiple of n.
    `optimizer_group` holds, by the name of an adapter, what it is trained with. `adapter_name`
    chooses an adapter in each method; the default is the last that was added.

    Args:
        model_id: a directory with a Hugging Face checkpoint, a hub id, or a
            [`Decoder`][twinkle_jax.model.Decoder], whose parameters are copied. None: parameters
            are drawn at random.
        config: a configuration of transformers, or the dictionary in a `config.json`, instead of
            the checkpoint's; with fewer layers, the first ones are read.
        device_mesh: Twinkle's mesh; None for that of `initialize`.
        dtype: type to compute in, float32 by default, and of frozen parameters under adapters.
            Trained parameters are float32 in any case.
        mixed_precision: the same in Twinkle's words, `"no"` or `"bf16"`.
        mesh: a mesh from [`make_mesh`][twinkle_jax.model.make_mesh], instead of `device_mesh`.
        remat: as for [`hidden_states`][twinkle_jax.model.hidden_states].
        seed: of dropout, and of parameters drawn at random.
        tokenizer_id: a directory or hub id of the tokenizer for `set_template`; None for the
            checkpoint's.
        model_cls: unused, with a warning: the checkpoint's configuration names the architecture.
        remote_group: unused, with a warning: there are no groups of workers.
        enable_router_replay: whether the methods follow `router_replay_action`, in a model that
            has experts.
        options: Twinkle's options for kernels, memory and workers, which change nothing here.

    Raises:
        ValueError: for what `load_pretrained` refuses, and a mesh with other or explicit axes.
        TypeError: for an unknown option.
    """

    # Setting it up.

    def set_loss(
        self,
        loss_cls: str | type[Loss] | Loss | LossFunction,
        *,
        adapter_name: str | None = None,
        **options: Any,
    ) -> None:
        """Choose a loss, as [`get_loss`][twinkle_jax.loss.get_loss] takes it.

        Raises:
            ValueError: for an unknown name, and losses that need values or, except for `GKDLoss`,
                logits.
            TypeError: for what is no loss, and options that it does not have.
        """
        group = self.group(adapter_name)
        made = get_loss(loss_cls, **options)
        needs = "values" if made.require_values else "logits" if made.require_logits else None
        if needs and not isinstance(made, GKDLoss):
            raise ValueError(
                f"loss must need log-probabilities only, got {type(made).__name__}, "
                f"which needs {needs}; see {PAGE}"
            )
        group.loss = made

    def set_template(
        self, template_cls: Any, *, adapter_name: str | None = None, **options: Any
    ) -> None:
        """Choose what encodes trajectories.

        A name such as `"Qwen3_5Template"` or a class, with its options; an object with `encode`; or
        a function. Without `model_id` among the options, the tokenizer is `tokenizer_id`, or
        that of the model's checkpoint.
        """
        group = self.group(adapter_name)
        called = "model_id" if self.tokenizer_id == self.source else "tokenizer_id"
        template = make_template(template_cls, self.tokenizer_id, called, **options)
        if not callable(getattr(template, "encode", template)):
            raise TypeError(
                f"template must be a function or an object with 'encode', got {template!r}"
            )
        group.template = template

    def set_processor(
        self, processor_cls: Any, *, adapter_name: str | None = None, **options: Any
    ) -> None:
        """Accept Twinkle's `InputProcessor`, which changes nothing here, and refuse any other."""
        self.group(adapter_name)
        made = construct(processor_cls, "processor", **options)
        if type(made) is not InputProcessor:
            raise TypeError(
                f"processor_cls must be InputProcessor, got {made!r}: change the features before "
                f"they come here; see {PAGE}"
            )

    def set_optimizer(
        self,
        optimizer_cls: str | type | optax.GradientTransformation = "AdamW",
        lr: float | None = None,
        *,
        adapter_name: str | None = None,
        **options: Any,
    ) -> None:
        """Choose an optimizer, and reset its state.

        Args:
            optimizer_cls: PyTorch's name or class with its options and defaults, `'AdamW'`,
                `'Adam'`, `'SGD'`, `'Lion'` or `'Muon'`; the name of an Optax optimizer, with its
                options; or an Optax transformation. Norms and biases do not decay.
            lr: learning rate, by default 0.00001 for a name. It multiplies the updates of a
                transformation, which usually has its own rate: 1 by default.
            adapter_name: which adapter.
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
        # Fails before anything has changed.
        jax.eval_shape(partial(train_state, optimizer=chosen), group.state.params)
        group.optimizer, group.lr = chosen, float(lr)
        self.restart(group, group.state.params)

    def set_lr_scheduler(
        self, scheduler_cls: str | type | Factor, *, adapter_name: str | None = None, **options: Any
    ) -> None:
        """Choose a schedule, and begin it.

        Args:
            scheduler_cls: PyTorch's or Twinkle's name or class with its options,
                `'CosineAnnealingLR'`, `'CosineWarmupScheduler'`, `'LinearWarmupScheduler'`,
                `'ConstantLR'` or `'LambdaLR'`; or a function from the number of calls of `lr_step`
                to a factor of the learning rate.
            adapter_name: which adapter.
            options: `T_max`, `num_warmup_steps`, …

        Raises:
            ValueError: for an unknown name, or an option out of range.
            TypeError: for an option that is unknown or missing.
        """
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
        router_replay_action: RouterReplayAction | None = None,
    ) -> dict[str, np.ndarray]:
        """Score the labels of inputs, without gradients and without dropout.

        Args:
            inputs: input features, or trajectories once there is a template. Without `labels`,
                every token but the first is scored. A row may hold several sequences, whose
                `position_ids` start again at 0; each is computed as it is alone.
            return_logits: whether to return logits as well, which are large.
            return_entropy: whether to return entropies as well.
            micro_batch_size: sequences at a time; None for all.
            temperature: of log-probabilities and entropies.
            disable_lora: whether to leave the adapter out, as for a reference policy.
            adapter_name: which adapter.
            task: `"causal_lm"` or `"fused_lm_ce"`, which is the same here.
            router_replay_action: `RECORD` returns the experts that each token went through,
                `REPLAY_FORWARD` sends it through those in the inputs' `routed_experts`; None: the
                router chooses.

        Returns:
            `logps` [rows, time], in input order, padded with zeros on the right, and 0 where the
            label is −100. If requested, `entropies` of this shape, `logits` [rows, time,
            vocabulary] and `routed_experts` [rows, time, layers, chosen].
        """
        group = self.group(adapter_name)
        _check_task(task)
        rows, recorded = self._read(
            group, inputs, labels_needed=False, router_replay_action=router_replay_action
        )
        outputs = self._score(
            group,
            rows,
            {} if disable_lora and group.lora is not None else group.state.params,
            micro_batch_size=micro_batch_size,
            temperature=temperature,
            with_entropy=return_entropy,
            with_logits=return_logits,
            with_routing=recorded,
        )
        group.last_pass = rows, outputs, None
        group.add_pass(False, rows.features, outputs)
        return outputs

    def forward(
        self,
        *,
        inputs: Inputs,
        return_logits: bool = False,
        micro_batch_size: int | None = None,
        temperature: float = 1.0,
        adapter_name: str | None = None,
        task: str = "causal_lm",
        router_replay_action: RouterReplayAction | None = None,
    ) -> dict[str, np.ndarray]:
        """Score the labels of inputs that `calculate_loss` and `backward` train on.

        The three together give the gradient of `forward_backward`, which costs less: `backward`
        computes the pass again. Scores are without the dropout of adapters, gradients with it.

        Args:
            inputs: as for `forward_backward`.
            return_logits: whether to return logits as well.
            micro_batch_size: sequences at a time, in `backward` too.
            temperature: of the log-probabilities, in `backward` too.
            adapter_name: which adapter.
            task: as for `forward_only`.
            router_replay_action: as for `forward_only`; `backward` replays too.

        Returns:
            `logps`, and `entropies` if the loss needs them; `routed_experts` if they are recorded.
        """
        group = self.group(adapter_name)
        _check_task(task)
        rows, recorded = self._read(
            group, inputs, labels_needed=True, router_replay_action=router_replay_action
        )
        options: dict[str, Any] = {
            "micro_batch_size": micro_batch_size,
            "temperature": temperature,
        }
        outputs = self._score(
            group,
            rows,
            group.state.params,
            with_entropy=group.loss.require_entropy,
            with_logits=return_logits,
            with_routing=recorded,
            **options,
        )
        group.last_pass, group.pending = (rows, outputs, options), None
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
        """Compute the loss of the last `forward`, for `backward`, or of the last `forward_only`.

        The arguments are those of `forward_backward`. `calculate_metric(False)` averages the losses
        of `forward_only`.

        Raises:
            ValueError: without a pass, or if the loss needs more than log-probabilities.
        """
        group = self.group(adapter_name)
        loss_inputs = _read_loss_inputs(advantages, old_logps, ref_logps, ref_outputs)
        if group.last_pass is None:
            raise ValueError("inputs must have been scored first: call forward or forward_only")
        rows, outputs, options = group.last_pass
        loss = loss_of_scores(group.loss, rows, outputs, loss_inputs)
        if options is None:
            group.losses.append(loss)
        else:
            group.pending = rows, loss_inputs, options
        return loss

    def backward(
        self,
        *,
        gradient_accumulation_steps: int | None = None,
        adapter_name: str | None = None,
    ) -> None:
        """Add the gradient of the last `calculate_loss` to the accumulated gradients.

        Raises:
            ValueError: if there was no `forward` and `calculate_loss` since the last `backward`.
        """
        group = self.group(adapter_name)
        if group.pending is None:
            raise ValueError("loss must be calculated first: call forward, then calculate_loss")
        (rows, loss_inputs, options), group.pending = group.pending, None
        group.set_accumulation(gradient_accumulation_steps)
        self._add_gradient(group, rows, loss_inputs, group.loss, **options)

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
        positive_mask: Any = None,
        router_replay_action: RouterReplayAction | None = None,
    ) -> MutableMapping[str, Any]:
        """Compute the loss and add its gradient to the accumulated gradients.

        Several calls before a step act as one large batch: gradients and denominators are summed,
        and divided once.

        Args:
            inputs: input features with `labels`, or trajectories once there is a template. A row
                may hold several sequences, as for `forward_only`.
            advantages: one number for each row or sequence, labelled token, or position. Without
                them policy losses are 0.
            old_logps: log-probabilities when the tokens were sampled, one for each labelled token
                or position. None: on policy.
            ref_logps: the same under a reference policy.
            ref_outputs: instead, what `forward_only` of a reference policy returned.
            teacher_output: the next four arguments in a dictionary, such as what a teacher's
                `forward_only(return_logits=True)` returned.
            teacher_logits: for `GKDLoss`, logits [rows, time, vocabulary]; or
            teacher_topk_logprobs: log-probabilities [rows, time, k] of likely tokens, and
            teacher_topk_indices: their ids.
            topk: how many of the teacher's largest logits to compare; None: as the loss says, all
                by default.
            micro_batch_size: sequences at a time; None for all. It changes memory and time only,
                but for the cross entropy in losses of pairs, a mean over each micro-batch's tokens.
                A loss of pairs takes an even number.
            temperature: of the log-probabilities, as it was when sampling. Losses without them,
                such as `GKDLoss`, which has a temperature of its own, do not read it.
            gradient_accumulation_steps: how many calls make an update, from now on.
            adapter_name: which adapter.
            task: `"causal_lm"` or `"fused_lm_ce"`, which is the same here.
            positive_mask: unused, with a warning: no loss reads it, and none of Twinkle's does.
            router_replay_action: `REPLAY_FORWARD` sends each token through the experts in the
                inputs' `routed_experts`; None: the router chooses. `forward_only` records.

        Returns:
            `loss`, of these inputs, on the device, and their `logps` in the form of those of
            `forward_only`, which are moved to the host when they are read.
        """
        group = self.group(adapter_name)
        _check_task(task)
        if positive_mask is not None:
            warn_once("positive_mask changes nothing: no loss reads it, and none of Twinkle's does")
        group.set_accumulation(gradient_accumulation_steps)
        loss_inputs = _read_loss_inputs(advantages, old_logps, ref_logps, ref_outputs)
        loss_fn = group.loss
        if isinstance(loss_fn, GKDLoss):
            topk = loss_fn.topk if topk is None else topk
            loss_fn = dataclasses.replace(loss_fn, topk=None)  # read_teacher applies it
        rows, recorded = self._read(
            group, inputs, labels_needed=True, router_replay_action=router_replay_action
        )
        if recorded:
            raise ValueError(
                f"router_replay_action must be REPLAY_FORWARD or None, got {router_replay_action}: "
                "forward_only and forward record"
            )
        return self._add_gradient(
            group,
            rows,
            loss_inputs,
            loss_fn,
            teacher=read_teacher(
                teacher_output, teacher_logits, teacher_topk_logprobs, teacher_topk_indices, topk
            ),
            micro_batch_size=micro_batch_size,
            temperature=temperature,
        )

    def _score(
        self, group: OptimizerGroup, rows: FeatureRows, params: Any, **options: Any
    ) -> dict[str, np.ndarray]:
        outputs = score_features(
            params,
            rows,
            self.config,
            frozen=group.frozen,
            compute_dtype=self.dtype,
            mesh=self.mesh,
            **options,
        )
        if "routing" in outputs:
            outputs["routed_experts"] = outputs.pop("routing")
        return outputs

    def _add_gradient(
        self,
        group: OptimizerGroup,
        rows: FeatureRows,
        loss_inputs: dict[str, Any],
        loss_fn: Loss,
        **options: Any,
    ) -> MutableMapping[str, Any]:
        """Add the gradient of a batch, and report it to the metrics."""
        if not loss_fn.require_logps and options.get("temperature", 1.0) != 1:
            warn_once(
                f"temperature={options['temperature']} changes nothing: {type(loss_fn).__name__} "
                "reads no log-probabilities"
            )
        passes = grad_features(
            group.state,
            rows,
            self.config,
            loss_fn,
            loss_inputs=loss_inputs,
            frozen=group.frozen,
            **options,
            key=self.key if group.lora is not None and group.lora.lora_dropout else None,
            compute_dtype=self.dtype,
            remat=self.remat,
            mesh=self.mesh,
        )
        total: StepSummary | None = None
        logps: list[tuple[Any, list[Piece]]] = []
        for group.state, summary, pieces in passes:
            logps.append((summary.logps, pieces))
            total = summary if total is None else add_summaries(total, summary)
        assert total is not None
        outputs = _TrainOutputs(total.loss, rows, logps)
        group.cur_step += 1
        group.add_summary(total)
        facts = {
            "lr": group.learning_rate,
            "step": group.cur_step,
            "grad_norm": group.gradient_norm,
            "gradient_accumulation_steps": group.gradient_accumulation_steps,
            **{name: values for name, values in loss_inputs.items() if values is not None},
        }
        group.add_pass(True, rows.features, outputs, **facts)
        return outputs

    # Updates.

    def clip_grad_norm(
        self,
        max_grad_norm: float = 1.0,
        norm_type: float = 2,
        *,
        gradient_accumulation_steps: int | None = None,
        adapter_name: str | None = None,
    ) -> Float[Array, ""] | None:
        """Clip the accumulated gradients, and return their norm before clipping."""
        _check_norm(norm_type)
        group = self._due_group(adapter_name, gradient_accumulation_steps)
        if group is None:
            return None
        group.state, group.gradient_norm = clip_gradients(group.state, max_grad_norm)
        group.clipped = True
        return group.gradient_norm

    def step(
        self, *, gradient_accumulation_steps: int | None = None, adapter_name: str | None = None
    ) -> UpdateInfo | None:
        """Apply the accumulated gradients if they are finite, and clear them either way."""
        group = self._due_group(adapter_name, gradient_accumulation_steps)
        return None if group is None else self._apply(group, None)

    def zero_grad(
        self, *, gradient_accumulation_steps: int | None = None, adapter_name: str | None = None
    ) -> None:
        """Clear the accumulated gradients."""
        if group := self._due_group(adapter_name, gradient_accumulation_steps):
            group.state = zero_gradients(group.state)

    def lr_step(
        self, *, gradient_accumulation_steps: int | None = None, adapter_name: str | None = None
    ) -> None:
        """Take a step in the learning-rate schedule."""
        if group := self._due_group(adapter_name, gradient_accumulation_steps):
            group.lr_steps += 1

    def clip_grad_and_step(
        self,
        max_grad_norm: float = 1.0,
        norm_type: float = 2,
        *,
        gradient_accumulation_steps: int | None = None,
        adapter_name: str | None = None,
    ) -> UpdateInfo | None:
        """Clip, apply and clear the gradients, and take a step in the schedule.

        Returns:
            Gradient norm, and whether the update was applied; None while gradients are accumulated.
        """
        _check_norm(norm_type)
        group = self._due_group(adapter_name, gradient_accumulation_steps)
        if group is None:
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
                class, or a name in `twinkle_jax.twinkle.metric`. After `forward_backward` it is
                called with input features, `loss` and `logps`, and with `lr`, `step`, `grad_norm`
                and the loss's arguments as facts; after `forward_only` with all its outputs.
            is_training: True for training passes, False for `forward_only`, None for both.
            adapter_name: which adapter.
            options: arguments of the class.
        """
        group = self.group(adapter_name)
        if isinstance(metric_cls, str):
            metric_cls = class_of(metric_cls, "metric")
        group.add_metric(metric_cls, is_training, options)

    def calculate_metric(
        self, is_training: bool = True, *, adapter_name: str | None = None
    ) -> dict[str, Any]:
        """Summarise training passes, or scoring passes, since the last call."""
        return self.group(adapter_name).report(is_training)

    def _due_group(self, adapter_name: str | None, steps: int | None) -> OptimizerGroup | None:
        """Return a group whose policy may be changed now; None while gradients are accumulated."""
        group = self.group(adapter_name)
        return group if group.due(steps) else None

    def _read(
        self,
        group: OptimizerGroup,
        inputs: Inputs,
        *,
        labels_needed: bool,
        router_replay_action: RouterReplayAction | None,
    ) -> tuple[FeatureRows, bool]:
        """Read inputs, with experts if they are to be replayed; return whether to record them."""
        action = None if router_replay_action is None else RouterReplayAction(router_replay_action)
        if action is not None and not self.router_replay:
            warn_once(
                "router_replay_action changes nothing without experts and enable_router_replay=True"
            )
            action = None
        rows = FeatureRows.read(
            inputs, group.template, vocab_size=self.config.vocab_size, labels_needed=labels_needed
        )
        if action is None or action is RouterReplayAction.RECORD:
            for feature in (*rows.features, *(piece.feature for piece in rows.pieces)):
                feature.pop("routed_experts", None)
        elif missing := [i for i, x in enumerate(rows.features) if "routed_experts" not in x]:
            raise ValueError(
                f"inputs[{missing[0]}] must have 'routed_experts' to replay, got "
                f"{sorted(rows.features[missing[0]])}"
            )
        return rows, action is RouterReplayAction.RECORD

    def _apply(self, group: OptimizerGroup, max_grad_norm: float | None) -> UpdateInfo:
        optimizer = group.needed_optimizer()
        group.state, info = apply_gradients(
            group.state,
            optimizer,
            learning_rate=group.learning_rate,
            max_grad_norm=max_grad_norm,
            mesh=self.mesh,
        )
        if not group.clipped:
            group.gradient_norm = info.gradient_norm
        group.clipped = False
        group.updates.append(info)
        return info


class _TrainOutputs(UserDict[str, Any]):
    """`loss` and `logps` of a training pass; `logps` are moved to the host when they are read."""

    def __init__(
        self, loss: Array, rows: FeatureRows, logps: list[tuple[Any, list[Piece]]]
    ) -> None:
        super().__init__(loss=loss, logps=None)
        self._rows, self._logps = rows, logps

    def __getitem__(self, key: str) -> Any:
        if key == "logps" and self.data.get(key, ()) is None:
            written: dict[str, Any] = {}
            for values, pieces in self._logps:
                self._rows.write(written, key, values, pieces)
            self.data |= written
        return super().__getitem__(key)


def _read_loss_inputs(
    advantages: PerSequence | None,
    old_logps: PerSequence | None,
    ref_logps: PerSequence | None,
    ref_outputs: Mapping[str, Any] | None,
) -> dict[str, Any]:
    """Name what a loss is given besides outputs; `ref_outputs` hold the `ref_logps`."""
    if ref_outputs is not None:
        if ref_logps is not None:
            raise ValueError("ref_logps must be left out with ref_outputs, got both")
        if "logps" not in ref_outputs:
            raise ValueError(f"ref_outputs must have 'logps', got {list(ref_outputs)}")
        ref_logps = ref_outputs["logps"]
    return dict(zip(LOSS_INPUTS, (advantages, old_logps, ref_logps), strict=True))


def read_teacher(
    output: Mapping[str, Any] | None, logits: Any, logprobs: Any, indices: Any, topk: int | None
) -> tuple[Any, Any] | None:
    """Return a teacher's log-probabilities and their tokens: the largest ones of its logits."""
    if output is not None:
        if any(x is not None for x in (logits, logprobs, indices)):
            raise ValueError("teacher_output must be the only teacher, got another one too")
        named = {name.removeprefix("teacher_"): x for name, x in output.items()}
        names = ("logits", "topk_logprobs", "topk_indices")
        logits, logprobs, indices = (named.get(name) for name in names)
        topk = named.get("topk", topk)
    if logprobs is not None and indices is not None:
        return logprobs, indices
    if topk is not None and topk < 1:
        raise ValueError(f"topk must be at least 1, got {topk}")
    return None if logits is None else largest_logits(logits, topk)


def _check_norm(norm_type: float) -> None:
    if norm_type != 2:
        raise ValueError(f"norm_type must be 2, got {norm_type!r}; see {PAGE}")


def _check_task(task: str) -> None:
    if task not in ("causal_lm", "fused_lm_ce"):
        raise ValueError(f"task must be 'causal_lm', got {task!r}; see {PAGE}")


class MegatronModel(TransformersModel):
    """A [`TransformersModel`][twinkle_jax.twinkle.model.TransformersModel] with Megatron's options.

    `"default"` is AdamW in `set_optimizer`, and a cosine with warm-up in `set_lr_scheduler`, where
    its arguments are `lr_decay_steps`, `lr_warmup_steps`, `max_lr` and `min_lr`.
    """

    def __init__(
        self, model_id: Any = None, *, mixed_precision: Any = "bf16", **options: Any
    ) -> None:
        options = {key: x for key, x in options.items() if key not in IGNORED["MegatronModel"]}
        super().__init__(model_id, mixed_precision=mixed_precision, **options)

    def set_optimizer(
        self, optimizer_cls: Any = "default", lr: float | None = None, **options: Any
    ) -> None:
        """Choose an optimizer; `"default"` is AdamW."""
        name = "AdamW" if optimizer_cls == "default" else optimizer_cls
        super().set_optimizer(name, lr, **options)

    def set_lr_scheduler(self, scheduler_cls: Any = "default", **options: Any) -> None:
        """Choose a schedule; `"default"` warms up linearly, then falls as a cosine."""
        if scheduler_cls == "default":
            if "lr_decay_steps" not in options:
                raise TypeError("lr_decay_steps must be given for the schedule 'default', got none")
            steps, warmup = options.pop("lr_decay_steps"), options.pop("lr_warmup_steps", 0)
            peak, least = options.pop("max_lr", None), options.pop("min_lr", 0.0)
            group = self.group(options.get("adapter_name"))
            group.lr = group.lr if peak is None else peak
            names = {"num_warmup_steps": warmup, "num_training_steps": steps, "eta_min": least}
            scheduler_cls, options = "CosineWarmupScheduler", options | names
        super().set_lr_scheduler(scheduler_cls, **options)

    def forward_only(
        self,
        *,
        inputs: Inputs,
        adapter_name: str | None = None,
        advantages: PerSequence | None = None,
        old_logps: PerSequence | None = None,
        ref_logps: PerSequence | None = None,
        ref_outputs: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> dict[str, Any]:
        """Score inputs, and compute a cross entropy, or another loss whose arguments are given.

        The result then has a `loss`; `calculate_metric(False)` averages the losses.
        """
        outputs = super().forward_only(inputs=inputs, adapter_name=adapter_name, **options)
        loss_inputs: dict[str, Any] = {"advantages": advantages, "old_logps": old_logps}
        loss_inputs |= {"ref_logps": ref_logps, "ref_outputs": ref_outputs}
        loss_fn = self.group(adapter_name).loss
        supervised = isinstance(loss_fn, CrossEntropyLoss | ChunkedCrossEntropyLoss)
        if supervised or any(x is not None for x in loss_inputs.values()):
            loss = self.calculate_loss(adapter_name=adapter_name, **loss_inputs)
            return {**outputs, "loss": loss}
        return outputs

    def save(self, *args: Any, merge_lora: bool = False, **options: Any) -> Any:
        """Write a checkpoint, or an adapter; `merge_lora` is another name of `merge`."""
        return super().save(*args, **{"merge": merge_lora} | options)


MultiLoraMegatronModel = MegatronModel


add_submodules(__name__, "moe", "moe.router_replay")
