"""Twinkle's `processor`: input features as arrays of one shape."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np

from twinkle_jax.data import pad_rows
from twinkle_jax.twinkle.infra import DeviceMesh
from twinkle_jax.twinkle.names import add_submodules, refuse

_PADDING = {"input_ids": 0, "attention_mask": 0, "labels": -100, "position_ids": -1}
_PADDING |= {"completion_mask": 0, "length": -1}


class InputProcessor:
    """Pads the features of a batch to one length, or joins them into one row (`padding_free`).

    In a joined row `position_ids` start again at 0. Models pad batches themselves, with the same
    results; `device_mesh` and `framework` change nothing.

    Example:
        >>> batch = InputProcessor()([{"input_ids": [1, 2]}, {"input_ids": [3]}])
        >>> batch["input_ids"].tolist()
        [[1, 2], [3, 0]]
    """

    def __init__(
        self,
        device_mesh: DeviceMesh | None = None,
        padding_free: bool = False,
        padding_side: Literal["right", "left"] = "right",
        framework: str = "transformers",
        **options: Any,
    ) -> None:
        refuse("InputProcessor", options)
        if padding_side not in ("right", "left"):
            raise ValueError(f"padding_side must be 'right' or 'left', got {padding_side!r}")
        self.padding_free, self.padding_side = padding_free, padding_side

    def __call__(self, inputs: Any) -> dict[str, Any]:
        """Pad or join a batch."""
        (batch,) = self.collate_fn([inputs] if isinstance(inputs, Mapping) else inputs)
        return batch

    def collate_fn(
        self,
        inputs: Sequence[Mapping[str, Any]],
        micro_batch_size: int | None = None,
        variable_seq_lengths: bool = False,
    ) -> list[dict[str, Any]]:
        """Pad micro-batches, all to one length unless `variable_seq_lengths`."""
        size = micro_batch_size or len(inputs)
        longest = 0 if variable_seq_lengths else max(len(x["input_ids"]) for x in inputs)
        return [self._collate(inputs[i : i + size], longest) for i in range(0, len(inputs), size)]

    def _collate(self, features: Sequence[Mapping[str, Any]], longest: int) -> dict[str, Any]:
        batch: dict[str, Any] = {}
        for key in features[0]:
            values = [feature[key] for feature in features]
            if key not in _PADDING or np.ndim(values[0]) == 0:
                batch[key] = values
                continue
            rows = [np.ravel(row) for row in values]
            if not self.padding_free:
                left = self.padding_side == "left"
                batch[key] = pad_rows(rows, _PADDING[key], left=left, length=longest)
            elif key != "attention_mask":
                batch[key] = np.concatenate(rows)[None]
        if self.padding_free and "position_ids" not in batch:
            counts = [np.arange(len(feature["input_ids"])) for feature in features]
            batch["position_ids"] = np.concatenate(counts)[None]
        return batch


add_submodules(__name__, "base")
