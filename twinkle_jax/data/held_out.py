"""Which problems are for evaluation: decided by what they say, so never trained on."""

import hashlib

HELD_OUT = 5  # one problem in so many


def is_held_out(problem: str) -> bool:
    """Whether a problem is for evaluation."""
    digest = hashlib.sha256(problem.encode()).digest()
    return int.from_bytes(digest[:8], "big") % HELD_OUT == 0
