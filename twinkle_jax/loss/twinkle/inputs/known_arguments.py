"""Keyword arguments of the losses: those of another loss are passed over, unknown ones refused."""

import difflib
from collections.abc import Mapping

ARGUMENTS = (
    "old_logps",
    "ref_logps",
    "advantages",
    "denominator",
    "num_items_in_batch",
    "old_values",
    "returns",
    "ref_outputs",
    "ref_chosen_logps",
    "ref_rejected_logps",
    "teacher_logits",
    "teacher_topk_logprobs",
    "teacher_topk_indices",
    "topk",
)


def refuse_unknown(kwargs: Mapping[str, object]) -> None:
    """Pass over the arguments of other losses, so that losses can be swapped; refuse the rest."""
    for name in kwargs:
        if name not in ARGUMENTS:
            near = difflib.get_close_matches(name, ARGUMENTS, n=1)
            hint = f" (did you mean {near[0]!r}?)" if near else ""
            raise TypeError(f"arguments must be of {', '.join(ARGUMENTS)}, got {name!r}{hint}")
