"""The verbs that change a policy: gradients clipped, applied and forgotten, at a learning rate."""

import math
from typing import Any

import optax
from jaxtyping import Array, Float

from twinkle_jax.model.train_step.apply_gradients import (
    UpdateInfo,
    apply_gradients,
    clip_gradients,
    zero_gradients,
)
from twinkle_jax.model.twinkle.optimizers import DEFAULT_LEARNING_RATE, choose_optimizer
from twinkle_jax.model.twinkle.policy import Policy
from twinkle_jax.model.twinkle.schedules import Factor, Schedule, choose_schedule


class UpdatedPolicy(Policy):
    """A policy with an optimizer and a learning-rate schedule.

    `cur_step` counts calls of `forward_backward`. With `gradient_accumulation_steps` of n, the
    verbs below do nothing unless it is a multiple of n.
    """

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.cur_step, self.gradient_accumulation_steps = 0, 1
        self._lr, self._lr_steps = 1.0, 0
        self._schedule: Schedule = choose_schedule("ConstantLR", {})
        self._norm: Float[Array, ""] | None = None
        self._updates: list[UpdateInfo] = []

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
            optimizer: `'AdamW'`, `'Adam'`, `'SGD'` or `'Lion'`, with PyTorch's options and
                defaults, but as in Twinkle no weight decay on norms and biases; or any Optax
                transformation.
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
        self._use_optimizer(chosen)
        self._lr = float(lr)

    def set_lr_scheduler(
        self, scheduler: str | Factor, *, adapter_name: str | None = None, **options: Any
    ) -> None:
        """Choose a schedule: a name, or a function from the count of `lr_step` to a factor."""
        self._check_name(adapter_name)
        self._schedule = choose_schedule(scheduler, options)
        self._lr_steps = 0

    @property
    def learning_rate(self) -> float:
        """What the next step multiplies updates by."""
        return float(self._schedule(self._lr_steps, self._lr))

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
        """Apply the accumulated gradients, if that is finite; either way they are gone."""
        due = self._due(gradient_accumulation_steps, adapter_name)
        return self._apply(None) if due else None

    def zero_grad(
        self, *, gradient_accumulation_steps: int | None = None, adapter_name: str | None = None
    ) -> None:
        """Forget the accumulated gradients."""
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
        """Clip, apply and forget the gradients, and go on in the schedule.

        Args:
            max_grad_norm: the largest global norm of the gradients, above 0.
            gradient_accumulation_steps: how many calls of `forward_backward` make an update, from
                now on; by default as before, at first 1.
            adapter_name: of the adapter, if there is one.

        Returns:
            What became of the gradients; None where more are to come.
        """
        if not self._due(gradient_accumulation_steps, adapter_name):
            return None
        info = self._apply(max_grad_norm)
        self._lr_steps += 1
        return info

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
