"""Divergence of a student from a teacher at each token, over the vocabulary."""

from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from twinkle_jax.loss.masked_inputs import Coefficient, Mask, PerToken, checked_mask

Logits = Float[Array, "*batch time vocab"]
Logprobs = Float[Array, "chunk vocab"]
LEAST_LOGPROB = -1000.0  # nats


def generalised_jsd(
    student_logits: Logits,
    teacher_logits: Logits,
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

    def chunks(logits: Logits) -> Float[Array, "chunks chunk vocab"]:
        scaled = logits.reshape(tokens, vocab) / jnp.asarray(temperature, logits.dtype)
        return jnp.pad(scaled, ((0, fill), (0, 0))).reshape(-1, size, vocab)

    @jax.checkpoint
    def divergence(pair: tuple[Logprobs, Logprobs]) -> Float[Array, " chunk"]:
        # A token of probability 0 gets a finite logarithm, since 0 * inf is NaN.
        student, teacher = (jnp.maximum(jax.nn.log_softmax(x), LEAST_LOGPROB) for x in pair)
        return _divergence(student, teacher, beta)

    losses = jax.lax.map(divergence, (chunks(student), chunks(teacher)))
    return jnp.where(mask, losses.reshape(-1)[:tokens].reshape(mask.shape), 0)


def _cleaned(student: Logits, teacher: Logits, mask: Mask) -> tuple[Logits, Logits]:
    arrays = {"student_logits": jnp.asarray(student), "teacher_logits": jnp.asarray(teacher)}
    vocab = arrays["student_logits"].shape[-1:]
    for name, logits in arrays.items():
        if not jnp.issubdtype(logits.dtype, jnp.floating):
            raise TypeError(f"{name} must be floating point, got {logits.dtype}")
        if logits.shape != (*mask.shape, *vocab):
            raise ValueError(f"{name} must have shape {(*mask.shape, *vocab)}, got {logits.shape}")
    double = any(logits.dtype == jnp.float64 for logits in arrays.values())
    dtype = jnp.float64 if double else jnp.float32
    cleaned = (jnp.where(mask[..., None], x, 0).astype(dtype) for x in arrays.values())
    student, teacher = cleaned
    return student, jax.lax.stop_gradient(teacher)


def _divergence(student: Logprobs, teacher: Logprobs, beta: Coefficient) -> Float[Array, " chunk"]:
    def relative_entropy(of: Logprobs, to: Logprobs) -> Float[Array, " chunk"]:
        return jnp.sum(jnp.exp(of) * (of - to), axis=-1)

    def mixed() -> Float[Array, " chunk"]:
        weight = jnp.asarray(beta, student.dtype)
        mixture = jnp.logaddexp(student + jnp.log1p(-weight), teacher + jnp.log(weight))
        of_teacher = relative_entropy(teacher, mixture)
        return weight * of_teacher + (1 - weight) * relative_entropy(student, mixture)

    forward = partial(relative_entropy, teacher, student)
    reverse = partial(relative_entropy, student, teacher)
    if isinstance(beta, int | float):
        return forward() if beta == 0 else reverse() if beta == 1 else mixed()
    branch = jnp.where(beta == 0, 0, jnp.where(beta == 1, 1, 2))
    return jax.lax.switch(branch, [forward, reverse, mixed])
