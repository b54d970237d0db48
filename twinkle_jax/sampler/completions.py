"""What a sampler returns, as arrays."""

from typing import NamedTuple

from jaxtyping import Array, Bool, Float, Int

STOP, LENGTH = 1, 2  # why a completion ended


class Completions(NamedTuple):
    """What was drawn. Rows are ordered by prompt, then by sample.

    Attributes:
        tokens: the completions, at the front of their rows, 0 behind them.
        mask: True for the tokens of a completion, the stop token that was drawn included.
        logprobs: log-probability of each token in the whole distribution at the temperature: what
            the trainer computes for the same token, and what a ratio of policies is made of.
        sampling_logprobs: log-probability in the distribution that was drawn from, behind penalty
            and filters. Without any, the same.
        finish_reasons: 1 (`STOP`) for a stop token, 2 (`LENGTH`) for the most tokens allowed.
        lengths: tokens in each completion.
    """

    tokens: Int[Array, "rows new"]
    mask: Bool[Array, "rows new"]
    logprobs: Float[Array, "rows new"]
    sampling_logprobs: Float[Array, "rows new"]
    finish_reasons: Int[Array, " rows"]
    lengths: Int[Array, " rows"]
