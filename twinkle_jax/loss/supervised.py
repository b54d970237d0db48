"""Losses with a target: the next token, a teacher's distribution, the returns for a critic."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from jax.typing import ArrayLike
from jaxtyping import Array, Float

from twinkle_jax.loss.loss_object import (
    InvalidLossInputError,
    Loss,
    LossOutput,
    SampleValues,
    aligned,
    entry,
    floating,
    label_logprobs,
    per_position,
    read_labels,
    refuse_unknown,
)
from twinkle_jax.loss.per_token import (
    Coefficient,
    Mask,
    PerToken,
    checked_mask,
    floats,
    masked_inputs,
    one_number,
    token_mean,
)


def cross_entropy(logprobs: PerToken, mask: Mask) -> PerToken:
    r"""Loss of supervised fine-tuning: the negative log-probability.

    $$\ell_t = -\log \pi(a_t \mid s_t)$$

    Args:
        logprobs: $\log \pi$ of the tokens to learn, in nats.
        mask: True where a token is to be learned. Padding may hold anything.

    Returns:
        Loss per token in nats, zero where masked out.

    Raises:
        ValueError: if the shapes differ.
        TypeError: if `logprobs` is not floating point, or the mask not boolean.

    References:
        [Training language models to follow instructions](https://arxiv.org/abs/2203.02155)
        (Ouyang et al., 2022), supervised fine-tuning

    Example:
        >>> cross_entropy(jnp.array([-1.0, -2.0]), jnp.array([True, False]))
        Array([1., 0.], dtype=float32)
    """
    (logprobs,) = masked_inputs(mask, logprobs=logprobs)
    return jnp.where(mask, -logprobs, 0)


def dynamic_fine_tuning(logprobs: PerToken, mask: Mask) -> PerToken:
    r"""Loss of dynamic fine-tuning: cross entropy weighted by the probability of the token.

    $$\ell_t = -\mathrm{sg}[\pi(a_t \mid s_t)]\, \log \pi(a_t \mid s_t)$$

    with sg a stopped gradient.

    Args:
        logprobs: $\log \pi$ of the tokens to learn, in nats.
        mask: True where a token is to be learned. Padding may hold anything.

    Returns:
        Loss per token in nats, zero where masked out.

    Raises:
        ValueError: if the shapes differ.
        TypeError: if `logprobs` is not floating point, or the mask not boolean.

    References:
        [On the Generalization of SFT](https://arxiv.org/abs/2508.05629) (Wu et al., 2025), DFT

    Example:
        >>> print(dynamic_fine_tuning(jnp.log(jnp.array([0.5])), jnp.array([True]))[0])
        0.3465736
    """
    (logprobs,) = masked_inputs(mask, logprobs=logprobs)
    return jnp.where(mask, -jax.lax.stop_gradient(jnp.exp(logprobs)) * logprobs, 0)


TokenLogits = Float[Array, "*batch time vocab"]
VocabLogprobs = Float[Array, "chunk vocab"]
LEAST_LOGPROB = -1000.0  # nats
# Of (e^d - 1 - d) / d^2: for |d| < 1/2 exact in float64.
_EXP_SERIES = [1 / math.factorial(n) for n in range(15, 1, -1)]


def generalised_jsd(
    student_logits: Float[Array, "*batch time vocab"],
    teacher_logits: Float[Array, "*batch time vocab"],
    mask: Mask,
    *,
    beta: Coefficient = 0.5,
    temperature: Coefficient = 1.0,
    chunk_size: int = 512,
) -> PerToken:
    r"""Loss of on-policy distillation (GKD): the generalised Jensen-Shannon divergence.

    $$\ell_t = \beta D_{KL}(T \,\|\, M) + (1-\beta) D_{KL}(S \,\|\, M), \qquad
    M = \beta T + (1-\beta) S$$

    with the distributions $T$ of the teacher and $S$ of the student at `temperature`. At
    $\beta = 0$ it is $D_{KL}(T \,\|\, S)$, at $\beta = 1$ it is $D_{KL}(S \,\|\, T)$. Tokens are
    computed in chunks, and once more for the gradient, to save memory.

    Args:
        student_logits: logits under the policy being trained.
        teacher_logits: logits of the teacher, over the same vocabulary; receive no gradient.
        mask: True where a token counts. Padding may hold anything.
        beta: $\beta$, weight of the teacher, in [0, 1].
        temperature: divides both logits, above 0.
        chunk_size: tokens per chunk.

    Returns:
        Divergence per token in nats, zero where masked out.

    Raises:
        ValueError: if the shapes differ, or `chunk_size` is not positive.
        TypeError: if logits are not floating point, or the mask not boolean.

    References:
        [On-Policy Distillation of Language Models](https://arxiv.org/abs/2306.13649)
        (Agarwal et al., 2024), GKD

    Example:
        >>> logits, mask = jnp.log(jnp.array([[0.5, 0.5]])), jnp.array([True])
        >>> generalised_jsd(logits, logits, mask)
        Array([0.], dtype=float32)
    """
    mask = checked_mask(mask)
    student, teacher = _cleaned(student_logits, teacher_logits, mask)
    if chunk_size < 1:
        raise ValueError(f"chunk_size must be at least 1, got {chunk_size}")
    tokens, vocab = mask.size, student.shape[-1]
    size = max(1, min(chunk_size, tokens))
    fill = -tokens % size

    def per_token(
        student: TokenLogits, teacher: TokenLogits, temperature: Coefficient, beta: Coefficient
    ) -> PerToken:
        def chunks(logits: TokenLogits) -> Float[Array, "chunks chunk vocab"]:
            scaled = logits.reshape(tokens, vocab) / jnp.asarray(temperature, logits.dtype)
            return jnp.pad(scaled, ((0, fill), (0, 0))).reshape(-1, size, vocab)

        @jax.checkpoint
        def divergence(pair: tuple[VocabLogprobs, VocabLogprobs]) -> Float[Array, " chunk"]:
            # A token of probability 0 gets a finite logarithm, since 0 * inf is NaN.
            student, teacher = (jnp.maximum(jax.nn.log_softmax(x), LEAST_LOGPROB) for x in pair)
            return _divergence(student, teacher, beta)

        losses = jax.lax.map(divergence, (chunks(student), chunks(teacher)))
        return losses.reshape(-1)[:tokens].reshape(mask.shape)

    losses = _on_any_mesh(per_token, student, teacher, temperature, beta)
    return jnp.where(mask, losses, 0)


def _on_any_mesh(per_token: Callable[..., PerToken], logits: TokenLogits, *others: Any) -> PerToken:
    """Call a function that reshapes; along axes that are explicit, the compiler spreads chunks."""
    sharding = jax.typeof(logits).sharding
    kinds = zip(sharding.mesh.axis_names, sharding.mesh.axis_types, strict=True)
    explicit = tuple(name for name, kind in kinds if kind == AxisType.Explicit)
    if not explicit:
        return per_token(logits, *others)
    spread = NamedSharding(sharding.mesh, PartitionSpec(*sharding.spec[:-1]))
    losses: PerToken = jax.sharding.auto_axes(per_token, axes=explicit, out_sharding=spread)(
        logits, *others
    )
    return losses


def _cleaned(
    student: TokenLogits, teacher: TokenLogits, mask: Mask
) -> tuple[TokenLogits, TokenLogits]:
    student, teacher = floats(student_logits=student, teacher_logits=teacher)
    shape = (*mask.shape, *student.shape[-1:])
    for name, logits in (("student_logits", student), ("teacher_logits", teacher)):
        if logits.shape != shape:
            raise ValueError(f"{name} must have shape {shape}, got {logits.shape}")
    student, teacher = (jnp.where(mask[..., None], logits, 0) for logits in (student, teacher))
    return student, jax.lax.stop_gradient(teacher)


def _divergence(
    student: VocabLogprobs, teacher: VocabLogprobs, beta: Coefficient
) -> Float[Array, " chunk"]:
    log_ratio = teacher - student

    def mixed() -> Float[Array, " chunk"]:
        weight = jnp.asarray(beta, student.dtype)
        log_weight, log_rest = jnp.log(weight), jnp.log1p(-weight)
        of_teacher = _relative_entropy(teacher, jnp.logaddexp(log_weight, log_rest - log_ratio))
        of_student = _relative_entropy(student, jnp.logaddexp(log_rest, log_weight + log_ratio))
        return weight * of_teacher + (1 - weight) * of_student

    forward = partial(_relative_entropy, teacher, -log_ratio)
    reverse = partial(_relative_entropy, student, log_ratio)
    if isinstance(beta, int | float):
        return forward() if beta == 0 else reverse() if beta == 1 else mixed()
    branch = jnp.where(beta == 0, 0, jnp.where(beta == 1, 1, 2))
    return jax.lax.switch(branch, [forward, reverse, mixed])


def _relative_entropy(of: VocabLogprobs, log_ratio: VocabLogprobs) -> Float[Array, " chunk"]:
    r"""Compute $D_{KL}(P \,\|\, Q)$ from $\log P$ and $d = \log Q - \log P$.

    As $\sum P (e^d - 1 - d)$, since $\sum P e^d = \sum Q = 1$. No term is negative: those of
    $-\sum P d$ cancel to rounding where the distributions hardly differ.
    """
    near = jnp.abs(log_ratio) < 0.5
    d = jnp.where(near, log_ratio, 0)
    series = jnp.square(d) * jnp.polyval(jnp.asarray(_EXP_SERIES, d.dtype), d)
    beyond = jnp.exp(of + log_ratio) - jnp.exp(of) * (1 + log_ratio)
    return jnp.sum(jnp.where(near, jnp.exp(of) * series, beyond), axis=-1)


def clipped_value_loss(
    values: PerToken,
    behaviour_values: PerToken,
    returns: PerToken,
    mask: Mask,
    *,
    epsilon: Coefficient = 0.2,
) -> PerToken:
    r"""Squared error of a critic that may not move far in one step (PPO).

    $$\ell_t = \tfrac{1}{2} \max\left((V_t - R_t)^2,\
    (\bar V_t + \mathrm{clip}(V_t - \bar V_t, -\epsilon, \epsilon) - R_t)^2\right)$$

    The clip is not in the paper, but in the first implementation of PPO.

    Args:
        values: $V$, predicted by the critic being trained, in units of reward.
        behaviour_values: $\bar V$, predicted when the tokens were drawn; no gradient.
        returns: $R$, what the critic should predict; no gradient.
        mask: True where the policy chose the token. Padding may hold anything.
        epsilon: how far a value may move from `behaviour_values`, in units of reward.

    Returns:
        Loss per token, zero where masked out.

    Raises:
        ValueError: if the shapes differ.
        TypeError: if an array is not floating point, or the mask not boolean.

    References:
        [Proximal Policy Optimization](https://arxiv.org/abs/1707.06347) (Schulman et al., 2017);
        [Implementation Matters in Deep Policy Gradients](https://arxiv.org/abs/2005.12729)
        (Engstrom et al., 2020)

    Example:
        >>> values, returns = jnp.array([1.0, 2.0]), jnp.array([0.0, 3.0])
        >>> clipped_value_loss(values, jnp.array([1.0, 1.0]), returns, values > 0, epsilon=0.5)
        Array([0.5  , 1.125], dtype=float32)
    """
    values, behaviour_values, returns = masked_inputs(
        mask, values=values, behaviour_values=behaviour_values, returns=returns
    )
    behaviour_values, returns = jax.lax.stop_gradient((behaviour_values, returns))
    reach = jnp.asarray(epsilon, values.dtype)
    step = values - behaviour_values
    error = jnp.square(values - returns)
    held_back = jnp.square(behaviour_values + jnp.clip(step, -reach, reach) - returns)
    # Inside the range both errors are the same up to rounding, which must not stop the gradient.
    # Negated, so that NaN counts as clipped and stays visible.
    clipped = ~(jnp.abs(step) <= reach) & ~(held_back <= error)
    return jnp.where(clipped, held_back, error) / 2


@dataclass(frozen=True)
class CrossEntropyLoss(Loss, name="cross_entropy"):
    """Negative log-probability of the labels, `token_mean`.

    See `cross_entropy` and `dynamic_fine_tuning`, which this calls. Immutable, equal when its
    fields are, hashable.

    Args:
        ignore_index: the label that means "no loss here".
        reduction: `'mean'`, or `'sum'` with `num_tokens` in the output, to divide by later.
        dft: whether to weigh tokens by their probability.

    Raises:
        ValueError: if the reduction is unknown.

    References:
        [On the Generalization of SFT](https://arxiv.org/abs/2508.05629) (Wu et al., 2025), DFT

    Example:
        >>> outputs = {"logps": jnp.array([[-1.0, -2.0, 0.0]])}
        >>> CrossEntropyLoss()({"labels": jnp.array([[5, 6, -100]])}, outputs).loss
        Array(1.5, dtype=float32)
    """

    ignore_index: int = -100
    reduction: str = "mean"
    dft: bool = False

    def __post_init__(self) -> None:
        if self.reduction not in ("mean", "sum"):
            raise InvalidLossInputError(
                f"reduction must be one of 'mean', 'sum', got {self.reduction!r}"
            )

    def __call__(
        self,
        inputs: Mapping[str, Any],
        outputs: Mapping[str, Any],
        *,
        denominator: Coefficient | None = None,
        **kwargs: Any,
    ) -> LossOutput:
        """Compute the loss of a batch.

        Args:
            inputs: `labels` [batch, time], or [time], with `ignore_index` where there is no loss.
            outputs: `logps` of that shape, or `logits` of that shape and the vocabulary.
            denominator: for gradient accumulation, the labelled tokens in the whole batch.
            **kwargs: arguments of other losses are ignored, so that losses can be swapped.

        Returns:
            The loss, differentiable in `logps` or `logits`; with `'sum'` also `num_tokens`.

        Raises:
            ValueError: if a shape does not fit, or a label that is not traced is no token.
            TypeError: if labels are not integers, or an argument is unknown.
        """
        refuse_unknown(kwargs)
        labels = read_labels(inputs, self.ignore_index)
        logprobs = label_logprobs(outputs, labels)
        per_token = dynamic_fine_tuning if self.dft else cross_entropy
        losses = per_token(logprobs, labels.mask)
        if self.reduction == "mean":
            return LossOutput(token_mean(losses, labels.mask, denominator=denominator))
        divisor = 1.0 if denominator is None else denominator
        tokens = jnp.maximum(jnp.sum(labels.mask, dtype=losses.dtype), 1)
        return LossOutput(token_mean(losses, labels.mask, denominator=divisor), num_tokens=tokens)


@dataclass(frozen=True)
class ChunkedCrossEntropyLoss(Loss, name="chunked_cross_entropy"):
    """`CrossEntropyLoss` under another name: compiled, it needs no chunks.

    Twinkle computes it in chunks of logits to save memory. Here `CrossEntropyLoss` holds only the
    logits and their gradient when compiled. `token_logprobs` saves more: it never holds all logits.

    Args:
        chunk_size: for Twinkle's signature; has no effect.
        ignore_index: the label that means "no loss here".
        reduction: `'mean'`, or `'sum'` with `num_tokens` in the output, to divide by later.
        dft: whether to weigh tokens by their probability.

    Raises:
        ValueError: if the chunk size is below 1, or the reduction is unknown.

    References:
        [On the Generalization of SFT](https://arxiv.org/abs/2508.05629) (Wu et al., 2025), DFT

    Example:
        >>> import jax.numpy as jnp
        >>> outputs = {"logits": jnp.zeros((1, 3, 8))}
        >>> ChunkedCrossEntropyLoss()({"labels": jnp.array([[5, 6, -100]])}, outputs).loss
        Array(2.0794415, dtype=float32)
    """

    chunk_size: int = 1024
    ignore_index: int = -100
    reduction: str = "mean"
    dft: bool = False

    def __post_init__(self) -> None:
        if self.chunk_size < 1:
            raise InvalidLossInputError(f"chunk_size must be at least 1, got {self.chunk_size}")
        self._unchunked()  # raises for an unknown reduction

    def __call__(
        self,
        inputs: Mapping[str, Any],
        outputs: Mapping[str, Any],
        *,
        denominator: Coefficient | None = None,
        **kwargs: Any,
    ) -> LossOutput:
        """Compute the loss of a batch: see `CrossEntropyLoss`."""
        return self._unchunked()(inputs, outputs, denominator=denominator, **kwargs)

    def _unchunked(self) -> CrossEntropyLoss:
        return CrossEntropyLoss(self.ignore_index, self.reduction, self.dft)


@dataclass(frozen=True)
class LigerFusedLinearCrossEntropyLoss(CrossEntropyLoss, name="liger_fused_linear_cross_entropy"):
    """`CrossEntropyLoss` under another name: no loss needs all logits here.

    Twinkle calls Liger's kernel, so that logits are never in memory. Here `token_logprobs`, which
    the train step calls, does so for every loss.

    Args:
        ignore_index: the label that means "no loss here".
        reduction: `'sum'` with `num_tokens` in the output, to divide by later, or `'mean'`.
        dft: whether to weigh tokens by their probability.
        label_smoothing: must be 0.
        softcap: must be None: the model's configuration sets it.

    Raises:
        ValueError: if the reduction is unknown, or `label_smoothing` or `softcap` is set.

    References:
        [Liger Kernel](https://arxiv.org/abs/2410.10989) (Hsu et al., 2024)

    Example:
        >>> outputs = {"logps": jnp.array([[-1.0, -2.0, 0.0]])}
        >>> inputs = {"labels": jnp.array([[5, 6, -100]])}
        >>> output = LigerFusedLinearCrossEntropyLoss()(inputs, outputs)
        >>> print(output.loss, output.num_tokens)
        3.0 2.0
    """

    reduction: str = "sum"
    label_smoothing: float = 0.0
    softcap: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.label_smoothing != 0:
            raise ValueError(f"label_smoothing must be 0, got {self.label_smoothing}")
        if self.softcap is not None:
            raise ValueError(
                f"softcap must be None, since the model's configuration sets it, got {self.softcap}"
            )


@dataclass(frozen=True)
class GKDLoss(Loss, name="gkd"):
    """Divergence of a student from its teacher, `token_mean`.

    See `generalised_jsd`, which this calls. Immutable, equal when its fields are, hashable.

    Args:
        beta: weight of the teacher, in [0, 1]: 0 for the divergence of the teacher from the student
            (mode-covering), 1 for the reverse (mode-seeking).
        temperature: what both logits are divided by, above 0.
        ignore_index: the label that means "no loss here".
        chunk_size: tokens to compute at a time.
        topk: of `teacher_logits`, compare the most likely tokens only, this many; None for all.

    Raises:
        ValueError: if a number is out of its range.

    References:
        [On-Policy Distillation of Language Models](https://arxiv.org/abs/2306.13649)
        (Agarwal et al., 2024)

    Example:
        >>> logits = jnp.zeros((1, 2, 4))
        >>> inputs, outputs = {"labels": jnp.array([[1, -100]])}, {"logits": logits}
        >>> GKDLoss()(inputs, outputs, teacher_logits=logits).loss
        Array(0., dtype=float32)
    """

    require_logps = False
    require_logits = True

    beta: Coefficient = 0.5
    temperature: Coefficient = 1.0
    ignore_index: int = -100
    chunk_size: int = 512
    topk: int | None = None

    def __post_init__(self) -> None:
        if isinstance(self.beta, int | float) and not 0 <= self.beta <= 1:
            raise ValueError(f"beta must be in [0, 1], got {self.beta}")
        if isinstance(self.temperature, int | float) and not self.temperature > 0:
            raise ValueError(f"temperature must be above 0, got {self.temperature}")
        if self.chunk_size < 1:
            raise ValueError(f"chunk_size must be at least 1, got {self.chunk_size}")
        if self.topk is not None and self.topk < 1:
            raise ValueError(f"topk must be at least 1, got {self.topk}")

    def __call__(
        self,
        inputs: Mapping[str, Any],
        outputs: Mapping[str, Any],
        *,
        teacher_logits: ArrayLike | None = None,
        teacher_topk_logprobs: ArrayLike | None = None,
        teacher_topk_indices: ArrayLike | None = None,
        topk: int | None = None,
        denominator: Coefficient | None = None,
        **kwargs: Any,
    ) -> LossOutput:
        """Compute the loss of a batch.

        Args:
            inputs: `labels` [batch, time], with `ignore_index` where there is no loss.
            outputs: `logits` [batch, time, vocabulary] of the student; or `teacher_token_logits`
                [batch, time, k], those of the teacher's tokens alone.
            teacher_logits: logits of the teacher, of that shape; or
            teacher_topk_logprobs: log-probabilities [batch, time, k] of the teacher's most
                likely tokens, as servers return them, and
            teacher_topk_indices: ids of these tokens. Both distributions are renormalised over
                them.
            topk: overrides the `topk` of the loss.
            denominator: for gradient accumulation, the labelled tokens in the whole batch.
            **kwargs: arguments of other losses are ignored, so that losses can be swapped.

        Returns:
            The loss, differentiable in `logits`.

        Raises:
            ValueError: if a shape or `topk` does not fit, there is no teacher, or only one of
                `teacher_topk_logprobs` and `teacher_topk_indices` is given.
            TypeError: if an argument is unknown, or labels are not integers.
        """
        refuse_unknown(kwargs)
        if (teacher_topk_logprobs is None) != (teacher_topk_indices is None):
            missing = "logprobs" if teacher_topk_logprobs is None else "indices"
            raise InvalidLossInputError(
                f"teacher_topk_{missing} must be given with the other of teacher_topk_logprobs "
                "and teacher_topk_indices, got None"
            )
        labels = read_labels(inputs, self.ignore_index)
        key, values = entry("outputs", outputs, "teacher_token_logits", "logits")
        student = floating(f"outputs[{key!r}]", values)
        if student.ndim != 3 or student.shape[:2] != labels.mask.shape:
            raise ValueError(
                f"outputs[{key!r}] must be [batch, time, vocabulary] with inputs['labels'] of "
                f"shape {labels.mask.shape}, got {student.shape}"
            )
        if teacher_topk_logprobs is not None and teacher_topk_indices is not None:
            teacher = floating("teacher_topk_logprobs", teacher_topk_logprobs)
            if key == "logits":
                student = _at_teacher_tokens(student, jnp.asarray(teacher_topk_indices), teacher)
        elif teacher_logits is not None:
            teacher = floating("teacher_logits", teacher_logits)
            count = self.topk if topk is None else topk
            if count is not None:
                _check_topk(count, teacher, student)
                teacher, indices = jax.lax.top_k(teacher, count)
                student = _at_teacher_tokens(student, indices, teacher)
        else:
            raise InvalidLossInputError(
                "teacher_logits, or teacher_topk_logprobs and teacher_topk_indices, must be given "
                "to GKDLoss, got None"
            )
        losses = generalised_jsd(
            student,
            teacher,
            labels.mask,
            beta=self.beta,
            temperature=self.temperature,
            chunk_size=self.chunk_size,
        )
        return LossOutput(token_mean(losses, labels.mask, denominator=denominator))


def _check_topk(count: int, teacher: TokenLogits, student: TokenLogits) -> None:
    if teacher.shape != student.shape:
        raise ValueError(f"teacher_logits must have shape {student.shape}, got {teacher.shape}")
    if not 1 <= count <= teacher.shape[-1]:
        raise ValueError(f"topk must be from 1 to {teacher.shape[-1]}, the vocabulary, got {count}")


def _at_teacher_tokens(student: TokenLogits, indices: Array, teacher: TokenLogits) -> TokenLogits:
    """Gather the student's logits of the teacher's tokens."""
    if not jnp.issubdtype(indices.dtype, jnp.integer):
        raise TypeError(f"teacher_topk_indices must be integers, got {indices.dtype}")
    if indices.shape != teacher.shape or indices.shape[:2] != student.shape[:2]:
        raise ValueError(
            f"teacher_topk_indices must have shape {(*student.shape[:2], teacher.shape[-1])}, that "
            f"of teacher_topk_logprobs, got {indices.shape}"
        )
    return jnp.take_along_axis(student, indices, axis=-1, mode="fill", fill_value=jnp.nan)


@dataclass(frozen=True)
class MSELoss(Loss, name="mse"):
    r"""Mean squared error of `outputs['logits']` against `inputs['labels']`, for regression.

    $$L = \frac{1}{N} \sum_n (y_n - \hat y_n)^2$$

    Immutable and hashable; all instances are equal.

    References:
        [Learning to summarize from human feedback](https://arxiv.org/abs/2009.01325) (Stiennon et
        al., 2020), for models that predict a number

    Example:
        >>> outputs = {"logits": jnp.array([[1.0, 2.0]])}
        >>> MSELoss()({"labels": jnp.array([[3.0, 5.0]])}, outputs).loss
        Array(6.5, dtype=float32)
    """

    require_logps = False
    require_logits = True

    def __call__(
        self,
        inputs: Mapping[str, Any],
        outputs: Mapping[str, Any],
        *,
        denominator: Coefficient | None = None,
        **kwargs: Any,
    ) -> LossOutput:
        """Compute the loss of a batch.

        Args:
            inputs: `labels`, the numbers to predict, of any shape.
            outputs: `logits`, the predictions, of that shape.
            denominator: for gradient accumulation, $N$, the numbers in the whole batch.
            **kwargs: arguments of other losses are ignored, so that losses can be swapped.

        Returns:
            The loss, differentiable in `logits`.

        Raises:
            ValueError: if the shapes differ.
            TypeError: if predictions are not floating point, or an argument is unknown.
        """
        refuse_unknown(kwargs)
        predictions = floating("outputs['logits']", entry("outputs", outputs, "logits")[1])
        targets = jnp.asarray(entry("inputs", inputs, "labels")[1]).astype(predictions.dtype)
        if targets.shape != predictions.shape:
            raise ValueError(
                f"outputs['logits'] must have the shape of inputs['labels'], {targets.shape}, got "
                f"{predictions.shape}"
            )
        errors = jnp.square(predictions - jax.lax.stop_gradient(targets))
        count = max(1, errors.size) if denominator is None else denominator
        return LossOutput(jnp.sum(errors) / one_number("denominator", count, errors.dtype))


@dataclass(frozen=True)
class PPOValueLoss(Loss, name="ppo_value"):
    """Clipped squared error of a critic, `token_mean`.

    See `clipped_value_loss`, which this calls. Immutable, equal when its fields are, hashable.

    Args:
        epsilon: how far a value may move from the old one, in units of reward.
        ignore_index: the label that means "no loss here".

    References:
        [Proximal Policy Optimization](https://arxiv.org/abs/1707.06347) (Schulman et al., 2017)

    Example:
        >>> import jax.numpy as jnp
        >>> outputs = {"values": jnp.array([[0.0, 1.0, 10.0]])}
        >>> inputs = {"labels": jnp.array([[5, 6, -100]])}
        >>> PPOValueLoss()(inputs, outputs, old_values=[[0.0, 1.0]], returns=[[1.0, 1.0]]).loss
        Array(0.25, dtype=float32)
    """

    require_logps = False
    require_values = True

    epsilon: Coefficient = 0.2
    ignore_index: int = -100

    def __call__(
        self,
        inputs: Mapping[str, Any],
        outputs: Mapping[str, Any],
        *,
        old_values: SampleValues | None = None,
        returns: SampleValues | None = None,
        denominator: Coefficient | None = None,
        **kwargs: Any,
    ) -> LossOutput:
        """Compute the loss of a batch.

        Args:
            inputs: `labels` [batch, time], with `ignore_index` where there is no loss.
            outputs: `values` [batch, time] or [batch, time, 1].
            old_values: required; values when the tokens were drawn: an array [batch, time]; or for
                each sequence a list, of its labelled tokens or of all positions; or one number.
            returns: required; what the critic should predict, in the same forms.
            denominator: for gradient accumulation, the labelled tokens in the whole batch.
            **kwargs: arguments of other losses are ignored, so that losses can be swapped.

        Returns:
            The loss, differentiable in `values`; without metrics.

        Raises:
            ValueError: if a shape or a row does not fit.
            TypeError: if labels are not integers, or an argument is missing or unknown.
        """
        refuse_unknown(kwargs)
        if old_values is None or returns is None:
            missing = "old_values" if old_values is None else "returns"
            raise TypeError(f"{missing} must be given to PPOValueLoss, got None")
        labels = read_labels(inputs, self.ignore_index)
        mask = labels.mask
        _, values = entry("outputs", outputs, "values")
        values = per_position("outputs['values']", values, mask)
        old_values = aligned("old_values", old_values, labels, values.dtype, per_sequence=True)
        returns = aligned("returns", returns, labels, values.dtype, per_sequence=True)
        losses = clipped_value_loss(values, old_values, returns, mask, epsilon=self.epsilon)
        return LossOutput(token_mean(losses, mask, denominator=denominator))
