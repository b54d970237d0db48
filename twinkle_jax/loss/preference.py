"""Losses of pairs of sequences, one chosen and one rejected.

The first four compare log-ratios to a reference policy, summed over tokens; SimPO, CPO and ORPO do
without a reference.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from twinkle_jax.loss.masked_inputs import Coefficient

PerPair = Float[Array, "*pairs"]
"""One number per pair of sequences."""

LARGEST_LOGPROB = -1e-7  # nats; at 0 the odds are infinite


def sigmoid_preference(
    chosen: PerPair,
    rejected: PerPair,
    *,
    beta: Coefficient = 0.1,
    label_smoothing: Coefficient = 0.0,
) -> PerPair:
    r"""Loss of DPO: the chosen sequence wins in a model of pairwise comparisons.

    $$\ell = -(1-\varepsilon) \log \sigma(\beta (\Delta_w - \Delta_l))
    - \varepsilon \log \sigma(-\beta (\Delta_w - \Delta_l)), \qquad
    \Delta = \sum_t \log \frac{\pi(a_t)}{\pi_{ref}(a_t)}$$

    Args:
        chosen: $\Delta_w$, log-ratio of the chosen sequence to the reference policy, in nats.
        rejected: $\Delta_l$, that of the rejected one.
        beta: how much a nat of difference counts, above 0.
        label_smoothing: $\varepsilon$, the share of pairs assumed to be mislabelled, below 0.5.

    Returns:
        Loss per pair.

    Raises:
        ValueError: if the shapes differ.
        TypeError: if a log-ratio is not floating point.

    References:
        [Direct Preference Optimization](https://arxiv.org/abs/2305.18290) (Rafailov et al., 2023);
        [A note on DPO with noisy preferences](https://ericmitchell.ai/cdpo.pdf) (Mitchell, 2023)

    Example:
        >>> print(sigmoid_preference(jnp.array([2.0]), jnp.array([2.0]))[0])
        0.6931472
    """
    margin = _margin(chosen, rejected, beta)
    smoothing = jnp.asarray(label_smoothing, margin.dtype)
    return -(1 - smoothing) * jax.nn.log_sigmoid(margin) - smoothing * jax.nn.log_sigmoid(-margin)


def hinge_preference(chosen: PerPair, rejected: PerPair, *, beta: Coefficient = 0.1) -> PerPair:
    r"""Loss of SLiC on the margin of DPO: 0, and without gradient, above a margin of 1.

    $$\ell = \max(0,\ 1 - \beta (\Delta_w - \Delta_l))$$

    Args:
        chosen: $\Delta_w$, log-ratio of the chosen sequence to the reference policy, in nats.
        rejected: $\Delta_l$, that of the rejected one.
        beta: how much a nat of difference counts, above 0.

    Returns:
        Loss per pair.

    Raises:
        ValueError: if the shapes differ.
        TypeError: if a log-ratio is not floating point.

    References:
        [SLiC-HF](https://arxiv.org/abs/2305.10425) (Zhao et al., 2023)

    Example:
        >>> hinge_preference(jnp.array([2.0]), jnp.array([1.0]), beta=0.25)
        Array([0.75], dtype=float32)
    """
    return jax.nn.relu(1 - _margin(chosen, rejected, beta))


def ipo_preference(chosen: PerPair, rejected: PerPair, *, beta: Coefficient = 0.1) -> PerPair:
    r"""Loss of IPO as in Twinkle: the squared distance of the margin from $1 / (2\beta)$.

    $$\ell = \left(\beta (\Delta_w - \Delta_l) - \frac{1}{2\beta}\right)^2$$

    The paper has no $\beta$ before the difference: the same loss at another $\beta$ and scale.

    Args:
        chosen: $\Delta_w$, log-ratio of the chosen sequence to the reference policy, in nats.
        rejected: $\Delta_l$, that of the rejected one.
        beta: how much a nat of difference counts, above 0.

    Returns:
        Loss per pair.

    Raises:
        ValueError: if the shapes differ.
        TypeError: if a log-ratio is not floating point.

    References:
        [A General Theoretical Paradigm to Understand Learning from Human
        Preferences](https://arxiv.org/abs/2310.12036) (Azar et al., 2023)

    Example:
        >>> ipo_preference(jnp.array([2.0]), jnp.array([1.0]), beta=0.5)
        Array([0.25], dtype=float32)
    """
    margin = _margin(chosen, rejected, beta)
    return jnp.square(margin - 0.5 / jnp.asarray(beta, margin.dtype))


def kto_pair_preference(chosen: PerPair, rejected: PerPair, *, beta: Coefficient = 0.1) -> PerPair:
    r"""Loss of KTO for pairs, without its baseline: chosen and rejected sequences count apart.

    $$\ell = 1 - \sigma(\beta \Delta_w) + \sigma(\beta \Delta_l)$$

    Args:
        chosen: $\Delta_w$, log-ratio of the chosen sequence to the reference policy, in nats.
        rejected: $\Delta_l$, that of the rejected one.
        beta: how much a nat of difference counts, above 0.

    Returns:
        Loss per pair.

    Raises:
        ValueError: if the shapes differ.
        TypeError: if a log-ratio is not floating point.

    References:
        [KTO](https://arxiv.org/abs/2402.01306) (Ethayarajh et al., 2024)

    Example:
        >>> kto_pair_preference(jnp.array([0.0]), jnp.array([0.0]))
        Array([1.], dtype=float32)
    """
    chosen, rejected = _checked(chosen, rejected)
    slope = jnp.asarray(beta, chosen.dtype)
    return 1 - jax.nn.sigmoid(slope * chosen) + jax.nn.sigmoid(slope * rejected)


def simpo_preference(
    chosen: PerPair, rejected: PerPair, *, beta: Coefficient = 2.5, gamma: Coefficient = 0.5
) -> PerPair:
    r"""Loss of SimPO: mean log-probabilities are compared, without a reference policy.

    $$\ell = -\log \sigma\left(\beta (\bar s_w - \bar s_l) - \gamma\right), \qquad
    \bar s = \frac{1}{T} \sum_{t=1}^{T} \log \pi(a_t)$$

    Args:
        chosen: $\bar s_w$, mean log-probability of the tokens of the chosen sequence, in nats.
        rejected: $\bar s_l$, that of the rejected one.
        beta: how much a nat per token counts, above 0; 2 to 10 in the paper.
        gamma: $\gamma$, the margin to reach, at least 0; 0.3 to 1.6 in the paper.

    Returns:
        Loss per pair.

    Raises:
        ValueError: if the shapes differ.
        TypeError: if a log-probability is not floating point.

    References:
        [SimPO](https://arxiv.org/abs/2405.14734) (Meng et al., 2024)

    Example:
        >>> print(simpo_preference(jnp.array([-1.0]), jnp.array([-1.25]), beta=2.0)[0])
        0.6931472
    """
    margin = _margin(chosen, rejected, beta)
    return -jax.nn.log_sigmoid(margin - jnp.asarray(gamma, margin.dtype))


def cpo_preference(chosen: PerPair, rejected: PerPair, *, beta: Coefficient = 0.1) -> PerPair:
    r"""Loss of CPO: that of DPO for a uniform reference policy, whose terms cancel.

    $$\ell = -\log \sigma(\beta (s_w - s_l)), \qquad s = \sum_t \log \pi(a_t)$$

    The paper adds the cross entropy of the chosen sequence, which keeps its probability from
    falling.

    Args:
        chosen: $s_w$, log-probability of the chosen sequence, in nats.
        rejected: $s_l$, that of the rejected one.
        beta: how much a nat of difference counts, above 0.

    Returns:
        Loss per pair.

    Raises:
        ValueError: if the shapes differ.
        TypeError: if a log-probability is not floating point.

    References:
        [Contrastive Preference Optimization](https://arxiv.org/abs/2401.08417) (Xu et al., 2024)

    Example:
        >>> print(cpo_preference(jnp.array([-2.0]), jnp.array([-2.0]))[0])
        0.6931472
    """
    return -jax.nn.log_sigmoid(_margin(chosen, rejected, beta))


def orpo_preference(chosen: PerPair, rejected: PerPair) -> PerPair:
    r"""Loss of ORPO: the odds of the chosen sequence against those of the rejected one.

    $$\ell = -\log \sigma\left(\log \frac{p_w}{1 - p_w} - \log \frac{p_l}{1 - p_l}\right), \qquad
    \log p = \frac{1}{T} \sum_{t=1}^{T} \log \pi(a_t)$$

    The paper adds a tenth of it to the cross entropy of the chosen sequence.

    Args:
        chosen: $\log p_w$, mean log-probability of the tokens of the chosen sequence, in nats.
        rejected: $\log p_l$, that of the rejected one.

    Returns:
        Loss per pair. $\log p$ counts as at most $-10^{-7}$ where odds would be infinite.

    Raises:
        ValueError: if the shapes differ.
        TypeError: if a log-probability is not floating point.

    References:
        [ORPO](https://arxiv.org/abs/2403.07691) (Hong et al., 2024)

    Example:
        >>> chosen, rejected = jnp.log(jnp.array([0.75])), jnp.log(jnp.array([0.5]))
        >>> print(jnp.exp(-orpo_preference(chosen, rejected))[0])  # odds of 3 and of 1
        0.75
    """
    chosen, rejected = _checked(chosen, rejected)
    return -jax.nn.log_sigmoid(_log_odds(chosen) - _log_odds(rejected))


def _log_odds(logprobs: PerPair) -> PerPair:
    return logprobs - jax.nn.log1mexp(-jnp.minimum(logprobs, LARGEST_LOGPROB))


def _margin(chosen: PerPair, rejected: PerPair, beta: Coefficient) -> PerPair:
    chosen, rejected = _checked(chosen, rejected)
    return jnp.asarray(beta, chosen.dtype) * (chosen - rejected)


def _checked(chosen: PerPair, rejected: PerPair) -> tuple[PerPair, PerPair]:
    chosen, rejected = jnp.asarray(chosen), jnp.asarray(rejected)
    for name, value in (("chosen", chosen), ("rejected", rejected)):
        if not jnp.issubdtype(value.dtype, jnp.floating):
            raise TypeError(f"{name} must be floating point, got {value.dtype}")
    if chosen.shape != rejected.shape:
        raise ValueError(
            f"rejected must have the shape of chosen, {chosen.shape}, got {rejected.shape}"
        )
    double = jnp.float64 in (chosen.dtype, rejected.dtype)
    dtype = jnp.float64 if double else jnp.float32
    return chosen.astype(dtype), rejected.astype(dtype)
