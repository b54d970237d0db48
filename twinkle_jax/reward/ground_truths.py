"""What is right for each trajectory, wherever it is said."""

from collections.abc import Mapping, Sequence
from typing import Any

from twinkle_jax.data.trajectory import message_text, user_data_get


def align_ground_truths(
    trajectories: Sequence[Mapping[str, Any]], ground_truths: Sequence[Any] | None
) -> list[Any]:
    """Give each trajectory its ground truth, None where it has none."""
    if ground_truths is None:
        return [user_data_get(t.get("user_data"), "ground_truth") for t in trajectories]
    if isinstance(ground_truths, str | Mapping) or not hasattr(ground_truths, "__len__"):
        raise TypeError(f"ground_truths must be a list, got {ground_truths!r:.80}")
    count, truths = len(trajectories), [_read(x) for x in ground_truths]
    if count and (not truths or count % len(truths)):
        raise ValueError(
            f"ground_truths must be one for each of {count} trajectories, or for each prompt with "
            f"as many completions as the others, got {len(truths)}"
        )
    each = count // len(truths) if truths else 0
    return [truth for truth in truths for _ in range(each)]


def find_ground_truths(
    trajectories: Sequence[Mapping[str, Any]], ground_truths: Sequence[Any] | None
) -> list[str]:
    """Give each trajectory its ground truth as text, and refuse that there is none."""
    found = align_ground_truths(trajectories, ground_truths)
    texts = ["" if truth is None else str(truth).strip() for truth in found]
    for i, text in enumerate(texts):
        if not text:
            raise ValueError(
                f"ground_truths[{i}] must be an answer, got {found[i]!r}: pass ground_truths, or "
                "keep a 'ground_truth' in the user_data of each trajectory"
            )
    return texts


def _read(truth: Any) -> Any:
    """Take a trajectory's own ground truth, or else what is said last in it."""
    if not isinstance(truth, Mapping):
        return truth
    kept = user_data_get(truth.get("user_data"), "ground_truth")
    messages = truth.get("messages") or ()
    return message_text(messages[-1]) if kept is None and messages else kept
