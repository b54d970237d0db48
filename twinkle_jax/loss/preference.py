"""Losses of pairs of sequences, one chosen and one rejected (DPO and its kin)."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from twinkle_jax.loss.masked_inputs import Scalar

PerPair = Float[Array, "*pairs"]


def sigmoid_preference(
    chosen: PerPair, rejected: PerPair, *, beta: Scalar = 0.1, label_smoothing: Scalar = 0.0
) -> PerPair:
    r"""Loss of DPO: the chosen sequence wins in a model of pairwise comparisons.

    $$\ell = -(1-\varepsilon) \log \sigma(\beta (\Delta_w - \Delta_l))
    - \varepsilon \log \sigma(-\beta (\Delta_w - \Delta_l)), \qquad
    \Delta = \sum_t \log \frac{\pi(a_t)}{\pi_{ref}(a_t)}$$

    Args:
        chosen: $\Delta_w$, log-ratio of the chosen sequence to the reference policy, in nats.
        rejected: $\Delta_l$, that of the rejected one.
        beta: how much a nat of difference counts, above 0.
        label_smoothing: $\varepsilon$, the share of pairs taken to be the wrong way around, below
            one half.

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


def hinge_preference(chosen: PerPair, rejected: PerPair, *, beta: Scalar = 0.1) -> PerPair:
    r"""Loss of SLiC on the margin of DPO: nothing more to learn beyond a margin of 1.

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


def ipo_preference(chosen: PerPair, rejected: PerPair, *, beta: Scalar = 0.1) -> PerPair:
    r"""Loss of IPO as Twinkle has it: the margin is to be $1 / (2\beta)$, and no more.

    $$\ell = \left(\beta (\Delta_w - \Delta_l) - \frac{1}{2\beta}\right)^2$$

    The paper has $\Delta_w - \Delta_l$ without $\beta$ before it, which is this loss at another
    $\beta$ and another scale.

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


def kto_pair_preference(chosen: PerPair, rejected: PerPair, *, beta: Scalar = 0.1) -> PerPair:
    r"""Loss of KTO for pairs, without its estimate of the divergence: each sequence by itself.

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


def _margin(chosen: PerPair, rejected: PerPair, beta: Scalar) -> PerPair:
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
