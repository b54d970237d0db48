"""A plain sentence where a number of a training step would puzzle."""

from collections.abc import Mapping

_FLAT = (
    "Nothing to learn from in this step: every completion of a prompt got the same reward, so none "
    "is better than the others of its group, and all advantages are 0. "
)
_LEFT_OUT = "No update was made: parameters and the optimizer's moments are as before. "
_ALL_WRONG = (
    "All rewards are 0: the task may be too hard for this policy so far, or the reward does not "
    "find the answers; the table of completions shows which."
)
_ALL_RIGHT = "All rewards are 1: the policy solves these prompts, and harder ones would teach more."
_ALIKE = (
    "More samples for each prompt, a higher temperature, or prompts that are neither too easy nor "
    "too hard make rewards differ."
)
_ZERO_LOSS = (
    "The loss is 0, and that is right: the policy is still the one that sampled, and the "
    "advantages of a group add up to 0. The gradient is not 0; watch the reward."
)
_CUT = (
    "More than half of the completions were cut off at the limit of new tokens, before their end: "
    "a higher limit, or a penalty for length, may help."
)
_SKIPPED = "A gradient was not finite: that update was left out, and the parameters are as before."


def explain(metrics: Mapping[str, float]) -> dict[str, str]:
    """Say what puzzling numbers of a step mean.

    Args:
        metrics: of one step, by their names in `metrics.jsonl`.

    Returns:
        Sentences, each by a short name; none if there is nothing to explain.

    Example:
        >>> list(explain({"frac_reward_zero_std": 1.0, "reward": 0.0}))
        ['flat']
    """
    found = {}
    gradient = metrics.get("grad_norm", 0)
    if metrics.get("frac_reward_zero_std", 0) >= 1 and (gradient == 0 or "kl" in metrics):
        reward = metrics.get("reward")
        left_out = _LEFT_OUT if metrics.get("updates_without_signal", 0) and not gradient else ""
        found["flat"] = (
            _FLAT
            + left_out
            + (_ALL_WRONG if reward == 0 else _ALL_RIGHT if reward == 1 else _ALIKE)
        )
    elif abs(metrics.get("loss", 1)) < 1e-6 and gradient > 0:
        found["zero loss"] = _ZERO_LOSS
    if metrics.get("completions/clipped_ratio", 0) > 0.5:
        found["cut"] = _CUT
    if metrics.get("skipped_updates", 0) > 0:
        found["skipped"] = _SKIPPED
    return found
