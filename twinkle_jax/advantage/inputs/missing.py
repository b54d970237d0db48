"""Read None in a list of rewards as "missing"."""

from typing import Any

import numpy as np

from twinkle_jax.advantage.inputs.rewards import check_where


def split_missing(rewards: Any, where: Any) -> tuple[Any, Any]:
    """Fill in what is None in a (nested) list, and leave it out through the mask."""
    if not isinstance(rewards, list | tuple) or not any(map(_holds_none, rewards)):
        return rewards, where
    rows = [row for row in rewards if isinstance(row, list | tuple)]
    blank = [None] * len(rows[0]) if rows else None  # what a sample without any reward stands for
    cells = [blank if row is None else row for row in rewards]
    filled = [_each(row, lambda r: 0.0 if r is None else r) for row in cells]
    present = np.asarray([_each(row, lambda r: r is not None) for row in cells])
    if where is None:
        return filled, present
    mask = check_where(where, present.shape)
    if mask.ndim < present.ndim:
        mask = mask[:, None]
    return filled, mask & present


def _holds_none(row: Any) -> bool:
    return row is None or (isinstance(row, list | tuple) and any(r is None for r in row))


def _each(row: Any, change: Any) -> Any:
    return [change(r) for r in row] if isinstance(row, list | tuple) else change(row)
