"""Losses towards a target: the next token, a teacher's distribution, the returns of a critic."""

from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from twinkle_jax.loss.masked_inputs import Coefficient, Mask, PerToken, checked_mask, masked_inputs


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
