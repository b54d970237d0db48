"""Twinkle's `TransformersModel`: its verbs around a state and the functions that change it."""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
from jax.sharding import Mesh
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from twinkle_jax import loss as losses
from twinkle_jax.data.batch import Batch
from twinkle_jax.data.features import LOSS_INPUTS, align_loss_input, read_features
from twinkle_jax.data.micro_batches import micro_batches
from twinkle_jax.loss import Loss
from twinkle_jax.model.decoder.forward import Remat
from twinkle_jax.model.decoder.sharding import batch_sharding
from twinkle_jax.model.train_step.apply_gradients import (
    UpdateInfo,
    apply_gradients,
    clip_gradients,
    zero_gradients,
)
from twinkle_jax.model.train_step.grad_step import StepSummary, add_summaries, grad_step
from twinkle_jax.model.train_step.score_batch import score_batch
from twinkle_jax.model.twinkle.held_policy import HeldPolicy
from twinkle_jax.model.twinkle.optimizers import named_optimizer
from twinkle_jax.model.twinkle.schedules import Schedule, named_schedule

LOSSES = tuple(name for name in losses.__all__ if name.endswith("Loss") and name != "Loss")


class TransformersModel(HeldPolicy):
    """A policy with Twinkle's verbs.

    It holds a [`TrainState`][twinkle_jax.model.TrainState] and calls the functions that are public
    beside it: `score_batch`, `grad_step`, `clip_gradients`, `apply_gradients`. Batches are padded
    to the sizes of [`bucket_size`][twinkle_jax.model.bucket_size]: the time axis from 16 on, the
    rows to `micro_batch_size`, or to a bucket without it. What was compiled for a bucket serves
    all batches that fit in it.

    Args:
        model_id: a directory with a Hugging Face checkpoint, or a hub id.
        dtype: type to compute in. Trained parameters are float32 in any case; the frozen ones under
            adapters are in this type.
        mesh: devices to run on, from [`make_mesh`][twinkle_jax.model.make_mesh]; None for one.
        remat: as for [`hidden_states`][twinkle_jax.model.hidden_states].

    Raises:
        ValueError: for what `load_pretrained` refuses, and a mesh with other or explicit axes.
    """

    def __init__(
        self,
        model_id: str | Path,
        *,
        dtype: DTypeLike = "float32",
        mesh: Mesh | None = None,
        remat: Remat = True,
    ) -> None:
        super().__init__(model_id, dtype, mesh)
        self.remat = remat
        self._lr, self._lr_steps = 1.0, 0
        self._schedule: Schedule = named_schedule("ConstantLR", {})
        self._loss: Any = None
        self._template: Any = None
        self._summary: StepSummary | None = None
        self._norm: Float[Array, ""] | None = None
        self._updates: list[UpdateInfo] = []

    # Passes over data.

    def forward_only(
        self,
        *,
        inputs: Any,
        return_logits: bool = False,
        return_entropy: bool = False,
        micro_batch_size: int | None = None,
        temperature: float = 1.0,
        disable_lora: bool = False,
    ) -> dict[str, np.ndarray]:
        """Score the labels of inputs, without gradients.

        Args:
            inputs: input features, or trajectories once there is a template. Without `labels`,
                each token is scored that follows another one.
            return_logits: whether to return logits as well, which are large.
            return_entropy: whether to return entropies as well.
            micro_batch_size: rows at a time; None for all.
            temperature: at which log-probabilities and entropies are taken.
            disable_lora: whether to leave adapters out, as for a reference policy.

        Returns:
            `logps` [rows, time], in input order, padded with zeros on the right, and 0 where the
            label is −100; `entropies` likewise and `logits` [rows, time, vocabulary] when asked.
        """
        features = self._features(inputs, labels_needed=False)
        adapter = {} if disable_lora and self._adapter else self.state.params
        time = max(len(feature["labels"]) for feature in features)
        parts: dict[str, list[np.ndarray]] = {}
        for batch, count in self._micro_batches(features, {}, micro_batch_size):
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
                    rows = np.asarray(values)[:count, :time]
                    room = [(0, 0), (0, time - rows.shape[1]), (0, 0)][: rows.ndim]
                    parts.setdefault(name, []).append(np.pad(rows, room))
        return {name: np.concatenate(rows) for name, rows in parts.items()}

    def forward_backward(
        self,
        *,
        inputs: Any,
        advantages: Any = None,
        old_logps: Any = None,
        ref_logps: Any = None,
        micro_batch_size: int | None = None,
        temperature: float = 1.0,
    ) -> Float[Array, ""]:
        """Compute the loss and add its gradient to what waits for `step`.

        Several calls before a step are one large batch: gradients and what they are divided by
        are summed, and divided once.

        Args:
            inputs: input features with `labels`, or trajectories once there is a template.
            advantages: one a sequence, or one a labelled token, or one a position. Without them
                policy losses are 0.
            old_logps: log-probabilities when the tokens were drawn, one a labelled token or one a
                position. None: on policy.
            ref_logps: the same under a reference policy.
            micro_batch_size: rows at a time; None for all. It changes memory and time only.
            temperature: at which log-probabilities are taken, as the sampler did.

        Returns:
            The loss of these inputs.
        """
        if self._loss is None:
            raise ValueError("expected a loss: call set_loss first")
        features = self._features(inputs, labels_needed=True)
        given = dict(zip(LOSS_INPUTS, (advantages, old_logps, ref_logps), strict=True))
        aligned = {name: align_loss_input(name, data, features) for name, data in given.items()}
        total: StepSummary | None = None
        for batch, _ in self._micro_batches(features, aligned, micro_batch_size):
            self.state, summary = grad_step(
                self.state,
                batch,
                self.config,
                self._loss,
                frozen=self._frozen,
                temperature=temperature,
                compute_dtype=self.dtype,
                remat=self.remat,
                mesh=self.mesh,
            )
            total = summary if total is None else add_summaries(total, summary)
        assert total is not None
        self._summary = total if self._summary is None else add_summaries(self._summary, total)
        return total.loss

    # Updates.

    def clip_grad_norm(self, max_grad_norm: float = 1.0) -> Float[Array, ""]:
        """Clip the gradients that wait; return their norm before that."""
        self.state, self._norm = clip_gradients(self.state, max_grad_norm)
        return self._norm

    def step(self) -> UpdateInfo:
        """Apply the gradients that wait, unless they are not finite; either way they are gone."""
        return self._apply(None)

    def zero_grad(self) -> None:
        """Forget the gradients that wait."""
        self.state = zero_gradients(self.state)

    def lr_step(self) -> None:
        """Go one step further in the learning-rate schedule."""
        self._lr_steps += 1

    def clip_grad_and_step(self, max_grad_norm: float = 1.0) -> UpdateInfo:
        """Clip, apply and forget the gradients, and go on in the schedule."""
        info = self._apply(max_grad_norm)
        self.lr_step()
        return info

    @property
    def learning_rate(self) -> float:
        """What the next step multiplies updates by."""
        return self._lr * float(self._schedule(self._lr_steps))

    # Settings.

    def set_optimizer(
        self, optimizer: str | optax.GradientTransformation, lr: float | None = None, **options: Any
    ) -> None:
        """Choose an optimizer, and begin its state anew.

        Args:
            optimizer: `'AdamW'`, `'Adam'`, `'SGD'` or `'Lion'`, with PyTorch's options and
                defaults; or any Optax transformation.
            lr: learning rate; 0.001 for a name. It multiplies the updates of a transformation,
                which brings its own as a rule: 1 there.
            options: `betas`, `eps`, `weight_decay`, `momentum`, …

        Raises:
            ValueError: for an unknown name.
            TypeError: for an unknown option.
        """
        if isinstance(optimizer, str):
            items = {k: tuple(v) if isinstance(v, list) else v for k, v in options.items()}
            self._optimizer = named_optimizer(optimizer, tuple(sorted(items.items())))
            self._lr = 1e-3 if lr is None else float(lr)
        elif hasattr(optimizer, "init") and hasattr(optimizer, "update") and not options:
            self._optimizer, self._lr = optimizer, 1.0 if lr is None else float(lr)
        else:
            raise TypeError(f"expected a name or an Optax transformation, got {optimizer!r}")
        self.state = self._begin(self.state.params)

    def set_lr_scheduler(self, scheduler: str | Schedule, **options: Any) -> None:
        """Choose a schedule: a name, or a function from the count of `lr_step` to a factor."""
        self._schedule = named_schedule(scheduler, options)
        self._lr_steps = 0

    def set_loss(self, loss: str | type[Loss] | Loss, **options: Any) -> None:
        """Choose a loss: an object, or a class or name of `twinkle_jax.loss` with its arguments."""
        if isinstance(loss, str):
            if loss not in LOSSES:
                raise ValueError(f"expected a loss of {', '.join(LOSSES)}, got {loss!r}")
            loss = getattr(losses, loss)
        made = loss(**options) if isinstance(loss, type) else loss
        if not isinstance(made, Loss):
            raise TypeError(f"expected a loss of twinkle_jax.loss, got {loss!r}")
        if made.require_values:
            raise ValueError(
                f"{type(made).__name__} needs values, and this model has no value head"
            )
        self._loss = made

    def set_template(self, template: Callable[[Any], Mapping[str, Any]] | Any) -> None:
        """Choose what makes an input feature of a trajectory: an object's `encode`, or a call."""
        if isinstance(template, str) or not callable(getattr(template, "encode", template)):
            raise TypeError(f"expected a function or an object with 'encode', got {template!r}")
        self._template = template

    # What it knows.

    def calculate_metric(self) -> dict[str, float]:
        """Summarise what happened since the last call, as plain numbers."""
        metrics = {"learning_rate": self.learning_rate, "step": float(self.state.step)}
        if self._summary is not None:
            metrics |= {"loss": float(self._summary.loss), "tokens": float(self._summary.tokens)}
            details = self._summary.metrics
            given = {} if details is None else details._asdict()
            metrics |= {name: float(x) for name, x in given.items() if x is not None}
        if self._norm is not None:
            metrics["grad_norm"] = float(self._norm)
        metrics["skipped_updates"] = float(sum(not info.applied for info in self._updates))
        self._summary, self._norm, self._updates = None, None, []
        return metrics

    # Inside.

    def _features(self, inputs: Any, *, labels_needed: bool) -> list[dict[str, np.ndarray]]:
        return read_features(
            inputs,
            self._template,
            vocab_size=self.config.vocab_size,
            labels_needed=labels_needed,
        )

    def _micro_batches(
        self,
        features: list[dict[str, np.ndarray]],
        loss_inputs: dict[str, list[np.ndarray] | None],
        size: int | None,
    ) -> Iterator[tuple[Batch, int]]:
        """Cut into micro-batches; on a mesh, spread the rows of each over it."""
        if self.mesh is None:
            yield from micro_batches(features, loss_inputs, size)
            return
        devices = self.mesh.shape["data"] * self.mesh.shape["fsdp"]
        for batch, count in micro_batches(
            features,
            loss_inputs,
            size,
            row_multiple=devices,
            time_multiple=self.mesh.shape["tensor"],
        ):
            yield jax.device_put(batch, batch_sharding(self.mesh)), count

    def _apply(self, max_grad_norm: float | None) -> UpdateInfo:
        if self._optimizer is None:
            raise ValueError("expected an optimizer: call set_optimizer first")
        self.state, info = apply_gradients(
            self.state,
            self._optimizer,
            learning_rate=self.learning_rate,
            max_grad_norm=max_grad_norm,
            mesh=self.mesh,
        )
        self._norm = info.gradient_norm if self._norm is None else self._norm
        self._updates.append(info)
        return info
