"""What a micro-batch adds up to, and how several become one."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from twinkle_jax.loss import PolicyMetrics


class StepSummary(NamedTuple):
    """What a micro-batch adds up to.

    Attributes:
        loss_sum: the loss before it is divided.
        denominator: what to divide it by.
        tokens: positions with a label.
        metrics: means over these tokens; None where the loss has none.
    """

    loss_sum: Float[Array, ""]
    denominator: Float[Array, ""]
    tokens: Float[Array, ""]
    metrics: PolicyMetrics | None

    @property
    def loss(self) -> Float[Array, ""]:
        """The loss; 0 where there is nothing to divide by."""
        return divided(self.loss_sum, self.denominator)


@jax.jit
def divided(total: Float[Array, ""], count: Float[Array, ""]) -> Float[Array, ""]:
    """Divide, and let nothing over nothing be nothing."""
    return total / jnp.where(count == 0, 1, count)


@jax.jit
def add_summaries(a: StepSummary, b: StepSummary) -> StepSummary:
    """Add up two micro-batches; their means weigh as many tokens as they are of."""
    metrics = None
    if a.metrics is not None and b.metrics is not None:
        tokens = a.tokens + b.tokens

        def mean(x: Float[Array, ""], y: Float[Array, ""]) -> Float[Array, ""]:
            return divided(x * a.tokens + y * b.tokens, tokens)

        def extreme(pick: Callable[..., Array], x: Array, y: Array) -> Array:
            """Leave out the ratio of 1 that stands where there are no tokens."""
            return jnp.where(a.tokens == 0, y, jnp.where(b.tokens == 0, x, pick(x, y)))

        metrics = jax.tree.map(mean, a.metrics, b.metrics)._replace(
            ratio_min=extreme(jnp.minimum, a.metrics.ratio_min, b.metrics.ratio_min),
            ratio_max=extreme(jnp.maximum, a.metrics.ratio_max, b.metrics.ratio_max),
        )
    return StepSummary(
        a.loss_sum + b.loss_sum, a.denominator + b.denominator, a.tokens + b.tokens, metrics
    )
