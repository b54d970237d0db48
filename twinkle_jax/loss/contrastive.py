"""Contrastive loss of embeddings: InfoNCE, as a function and under Twinkle's name; its metrics."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from twinkle_jax.loss.loss_object import (
    InvalidLossInputError,
    Loss,
    LossOutput,
    entry,
    floating,
    read_labels,
    refuse_unknown,
)
from twinkle_jax.loss.per_token import Coefficient, masked_inputs, token_mean
from twinkle_jax.loss.token_logprobs import product_precision

Embeddings = Float[Array, "row feature"]


def info_nce(
    similarities: Float[Array, "query candidate"],
    positives: Int[Array, " query"],
    mask: Bool[Array, "query candidate"],
    *,
    temperature: Coefficient = 0.1,
) -> Float[Array, " query"]:
    r"""Loss of contrastive learning (InfoNCE): find the positive among all candidates.

    $$\ell_i = -\log \frac{\exp(s_{i,p_i} / \tau)}{\sum_{j \in M_i} \exp(s_{ij} / \tau)}$$

    Args:
        similarities: $s$, of each query and each candidate, dot products or cosines.
        positives: $p$, which candidate is the positive of each query; the mask must keep it.
        mask: True where a candidate counts for a query; elsewhere the similarity may be anything.
        temperature: $\tau$, above 0.

    Returns:
        Loss of each query in nats; NaN where the mask leaves out its positive.

    Raises:
        ValueError: if the shapes do not fit.
        TypeError: if similarities are not floating point, the mask not boolean, or positives not
            integers.

    References:
        [Contrastive Predictive Coding](https://arxiv.org/abs/1807.03748) (van den Oord et al.,
        2018)

    Example:
        >>> similarities = jnp.array([[0.5, 0.5], [0.0, 9.0]])
        >>> mask = jnp.array([[True, True], [True, False]])
        >>> print(info_nce(similarities, jnp.array([0, 0]), mask))
        [0.6931472 0.       ]
    """
    values, column = _checked(similarities, positives, mask)
    scaled = values / jnp.asarray(temperature, values.dtype)
    total = jax.nn.logsumexp(scaled, axis=-1, where=mask)
    chosen = jnp.take_along_axis(scaled, column, axis=-1, mode="clip")[:, 0]
    has_positive = jnp.take_along_axis(mask, column, axis=-1, mode="fill", fill_value=False)[:, 0]
    return jnp.where(has_positive, total - chosen, jnp.nan)


def _checked(
    similarities: Float[Array, "query candidate"],
    positives: Int[Array, " query"],
    mask: Bool[Array, "query candidate"],
) -> tuple[Float[Array, "query candidate"], Int[Array, "query 1"]]:
    """Return similarities, 0 under the mask, and positives as a column."""
    positives = jnp.asarray(positives)
    if not jnp.issubdtype(positives.dtype, jnp.integer):
        raise TypeError(f"positives must be integers, got {positives.dtype}")
    (values,) = masked_inputs(mask, similarities=similarities)
    if values.ndim != 2 or positives.shape != values.shape[:1]:
        raise ValueError(
            f"positives must have one number for each row of similarities, {values.shape}, "
            f"got shape {positives.shape}"
        )
    return values, positives[:, None]


class ContrastiveMetrics(NamedTuple):
    """Similarities of queries to their positives and to other candidates."""

    accuracy: Float[Array, ""]
    """Share of queries to which no other candidate is more similar than the positive."""
    positive_mean: Float[Array, ""]
    """Mean similarity to the positive."""
    positive_min: Float[Array, ""]
    """Smallest similarity to the positive."""
    positive_max: Float[Array, ""]
    """Largest similarity to the positive."""
    negative_mean: Float[Array, ""]
    """Mean similarity to the other candidates; 0 if there are none."""


def contrastive_metrics(
    similarities: Float[Array, "query candidate"],
    positives: Int[Array, " query"],
    mask: Bool[Array, "query candidate"],
) -> ContrastiveMetrics:
    r"""Compute how well similarities tell the positive from the other candidates.

    $$\overline{[s_{i,p_i} \ge \max_{j \in M_i} s_{ij}]}, \quad \overline{s_{i,p_i}}, \quad
    \min_i s_{i,p_i}, \quad \max_i s_{i,p_i}, \quad \overline{s_{ij}}, \ j \ne p_i$$

    Args:
        similarities: $s$, of each query and each candidate, dot products or cosines.
        positives: $p$, which candidate is the positive of each query; the mask must keep it.
        mask: True where a candidate counts for a query; elsewhere the similarity may be anything.

    Returns:
        The metrics of at least one query, without gradient.

    Raises:
        ValueError: if the shapes do not fit.
        TypeError: if similarities are not floating point, the mask not boolean, or positives not
            integers.

    Example:
        >>> similarities = jnp.array([[1.0, 0.5], [0.75, 0.25]])
        >>> metrics = contrastive_metrics(similarities, jnp.array([0, 1]), jnp.ones((2, 2), bool))
        >>> print(metrics.accuracy, metrics.positive_mean, metrics.negative_mean)
        0.5 0.625 0.625
    """
    values, column = _checked(similarities, positives, mask)
    values = jax.lax.stop_gradient(values)
    positive = jnp.take_along_axis(values, column, axis=-1, mode="clip")[:, 0]
    others = mask & (jnp.arange(values.shape[1])[None] != column)
    nearest = jnp.max(values, axis=-1, where=others, initial=-jnp.inf)
    return ContrastiveMetrics(
        jnp.mean(positive >= nearest, dtype=values.dtype),
        jnp.mean(positive),
        jnp.min(positive),
        jnp.max(positive),
        token_mean(values, others),
    )


@dataclass(frozen=True)
class InfonceLoss(Loss, name="infonce"):
    """InfoNCE of embeddings that come in groups: an anchor, its positive, and its negatives.

    Calls `info_nce`, averaged over anchors. Immutable, equal when its fields are, hashable.

    Args:
        temperature: what similarities are divided by, above 0.
        use_batch: whether the rows of other groups are negatives too.
        hard_negatives: keep this many negatives of each group, the first ones; None for all.
        mask_fake_negative: whether to leave out candidates that are more similar to the anchor
            than its positive is, by more than the margin; with `use_batch`.
        fake_neg_margin: that margin, above 0.
        include_qq: whether the other anchors are negatives too; with `use_batch`.
        include_dd: whether to add the similarities of the positive to all other rows that are not
            anchors, as in Qwen3-Embedding; with `use_batch`.

    Raises:
        ValueError: if the margin is not above 0, or there are no hard negatives.

    References:
        [Contrastive Predictive Coding](https://arxiv.org/abs/1807.03748) (van den Oord et al.,
        2018)
        [Qwen3 Embedding](https://arxiv.org/abs/2506.05176) (Zhang et al., 2025), the other terms

    Example:
        >>> outputs = {"embeddings": jnp.array([[1.0], [0.0], [1.0], [0.0]])}
        >>> print(InfonceLoss()({"labels": jnp.array([1, 0, 1, 0])}, outputs).loss)
        0.6931472
    """

    divides_by = "batches"  # each micro-batch has its own candidates
    require_logps = False
    require_logits = True

    temperature: Coefficient = 0.1
    use_batch: bool = True
    hard_negatives: int | None = None
    mask_fake_negative: bool = False
    fake_neg_margin: float = 0.1
    include_qq: bool = False
    include_dd: bool = False

    def __post_init__(self) -> None:
        if self.mask_fake_negative and not self.fake_neg_margin > 0:
            raise ValueError(f"fake_neg_margin must be above 0, got {self.fake_neg_margin}")
        if self.hard_negatives is not None and self.hard_negatives < 1:
            raise ValueError(f"hard_negatives must be at least 1, got {self.hard_negatives}")

    def __call__(
        self, inputs: Mapping[str, Any], outputs: Mapping[str, Any], **kwargs: Any
    ) -> LossOutput:
        """Compute the loss of a batch.

        Args:
            inputs: `labels`, 1 for each row that is an anchor and 0 for the others. The row after
                an anchor is its positive, and those up to the next anchor are its negatives.
            outputs: `embeddings` [rows, features]; or `logits` of that shape, or [rows, time,
                features], whose first position is taken.
            **kwargs: arguments of other losses are ignored, so that losses can be swapped.

        Returns:
            The loss, differentiable in the embeddings; 0 without anchors.

        Raises:
            ValueError: if rows and labels do not fit, or an anchor has no positive.
            TypeError: if labels are not integers, or an argument is unknown.
        """
        refuse_unknown(kwargs)
        labels = read_labels(inputs, ignore_index=-100)
        key, values = entry("outputs", outputs, "embeddings", "logits")
        rows = floating(f"outputs[{key!r}]", values)
        rows = rows[:, 0] if rows.ndim == 3 else rows
        is_anchor = labels.tokens.reshape(-1) > 0
        if rows.ndim != 2 or len(rows) != len(is_anchor):
            raise InvalidLossInputError(
                f"outputs[{key!r}] must have a row for each of {len(is_anchor)} labels, "
                f"got shape {rows.shape}"
            )
        if labels.concrete is not None:
            anchors = labels.concrete.reshape(-1) > 0
            if (anchors & np.append(anchors[1:], True)).any():
                raise InvalidLossInputError(
                    "inputs['labels'] must have a 0, the positive, after each 1, the anchor, "
                    f"got {labels.concrete.reshape(-1)}"
                )
        losses = self._losses(rows, is_anchor)
        count = jnp.maximum(jnp.sum(is_anchor, dtype=losses.dtype), 1)
        return LossOutput(jnp.sum(jnp.where(is_anchor, losses, 0)) / count)

    def _losses(self, rows: Embeddings, is_anchor: Bool[Array, " row"]) -> Float[Array, " row"]:
        """Return the loss of each row as if it were an anchor; use those of anchors only."""
        numbers = jnp.arange(len(rows))
        group = jnp.cumsum(is_anchor)  # from 1; rows before the first anchor are in no group
        place = numbers - jax.lax.cummax(jnp.where(is_anchor, numbers, 0))  # 1 for the positive
        positives = jnp.minimum(numbers + 1, len(rows) - 1)
        is_candidate = (group > 0) & ~is_anchor
        if self.hard_negatives is not None:
            is_candidate &= place < self.hard_negatives + 2
        mask = jnp.broadcast_to(is_candidate, (len(rows), len(rows)))
        # Accelerators would round the factors, and a temperature divides what that adds.
        product = partial(jnp.matmul, precision=product_precision(rows.dtype))
        products = product(jnp.where(is_anchor[:, None], rows, 0), rows.T)
        blocks = [(products, mask if self.use_batch else mask & (group[:, None] == group[None]))]
        if self.use_batch and self.include_qq:
            blocks.append((products, is_anchor[None] & (numbers[:, None] != numbers[None])))
        if self.use_batch and self.mask_fake_negative:
            limit = jnp.take_along_axis(products, positives[:, None], axis=1)
            near = products <= jax.lax.stop_gradient(limit) + self.fake_neg_margin
            blocks = [(block, kept & near) for block, kept in blocks]
        if self.use_batch and self.include_dd:
            others = mask & (numbers[None] != positives[:, None])
            blocks.append((product(rows[positives], rows.T), others))
        similarities = jnp.concatenate([block for block, _ in blocks], axis=1)
        kept = jnp.concatenate([kept for _, kept in blocks], axis=1)
        # A row that is not an anchor gets a single candidate, so that its gradient is 0, not NaN.
        alone = jnp.arange(kept.shape[1])[None] == positives[:, None]
        kept = jnp.where(is_anchor[:, None], kept, alone)
        return info_nce(similarities, positives, kept, temperature=self.temperature)
