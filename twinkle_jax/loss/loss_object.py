"""Loss objects, which a train step calls, and how they read labels, outputs and sample values."""

import abc
import difflib
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, DTypeLike, Float, Int

from twinkle_jax.loss.per_token import Mask, PerToken, floats
from twinkle_jax.loss.policy_metrics import PolicyMetrics, PreferenceMetrics

LossUnit = Literal["tokens", "sequences", "pairs", "batches"]
"""What a loss is a mean over: see `Loss.divides_by`."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True, eq=False)
class LossOutput(Mapping[str, Any]):
    """The loss of a batch and its metrics, as attributes or by name, as in Twinkle's dictionary.

    A pytree, so `jit` and `jax.grad(..., has_aux=True)` may return it.

    Attributes:
        loss: the loss.
        metrics: metrics of the step; None where the loss has none.
        num_tokens: number of tokens to divide by if the loss is a sum; None for a mean.

    Example:
        >>> output = LossOutput(0.5)
        >>> output.loss, output["loss"], dict(output)
        (0.5, 0.5, {'loss': 0.5, 'metrics': None, 'num_tokens': None})
    """

    loss: Float[Array, ""]
    metrics: PolicyMetrics | PreferenceMetrics | None = None
    num_tokens: Float[Array, ""] | None = None

    def __getitem__(self, name: str) -> Any:
        if name not in self.__dataclass_fields__:
            raise KeyError(name)
        return getattr(self, name)

    def __iter__(self) -> Iterator[str]:
        return iter(self.__dataclass_fields__)

    def __len__(self) -> int:
        return len(self.__dataclass_fields__)


LOSSES: dict[str, type["Loss"]] = {}
"""Class of each loss by its short name. `get_loss` also knows them by the name of the class."""


class Loss(abc.ABC):
    """Base class of loss objects; subclass it to write a loss of your own.

    The flags say what the forward pass must put into `outputs`. `divides_by` says what the loss
    divides by, so that a training loop can sum over micro-batches and divide once. With a name,
    `class GRPOLoss(PolicyLoss, name="grpo")`, `get_loss` finds the class by it; a run too, if it is
    a `PolicyLoss`.
    """

    def __init_subclass__(cls, *, name: str | None = None, **kwargs: Any) -> None:
        """Register the class under its name, if it has one."""
        super().__init_subclass__(**kwargs)
        if name is not None:
            LOSSES[name] = cls

    require_logps: bool = True
    require_logits: bool = False
    require_values: bool = False

    @property
    def divides_by(self) -> LossUnit:
        """What the loss is a mean over, and what `denominator` counts.

        `'tokens'` with a label, `'sequences'`, or `'pairs'` of sequences. `'batches'`: the loss
        ignores `denominator`, and each micro-batch weighs the same.
        """
        return "tokens"

    @property
    def require_entropy(self) -> bool:
        """Whether `outputs['entropies']` is needed."""
        return False

    @abc.abstractmethod
    def __call__(
        self, inputs: Mapping[str, Any], outputs: Mapping[str, Any], **kwargs: Any
    ) -> LossOutput:
        """Compute the loss of a batch.

        Args:
            inputs: the batch that the model was called with, and its `labels`.
            outputs: outputs of the model, such as `logps`.
            **kwargs: further inputs, such as `advantages`.

        Returns:
            The loss and, if it has any, its metrics.
        """


LossFunction = Callable[..., Float[Array, ""] | Mapping[str, Any]]
"""A function `(inputs, outputs, ...)` that returns a loss, or a mapping with a `loss`."""


@dataclass(frozen=True)
class FunctionLoss(Loss):
    """A function `(inputs, outputs, ...)` as a loss object; see `get_loss`.

    Args:
        function: computes the loss; called with the keyword arguments that it names.
    """

    function: LossFunction

    @property
    def divides_by(self) -> LossUnit:
        """Tokens if the function takes a `denominator`, else micro-batches."""
        return "tokens" if "denominator" in self._parameters() else "batches"

    def _parameters(self) -> Mapping[str, inspect.Parameter]:
        return inspect.signature(self.function).parameters

    def __call__(
        self, inputs: Mapping[str, Any], outputs: Mapping[str, Any], **kwargs: Any
    ) -> LossOutput:
        """Call the function with the arguments that it names; with all if it takes `**kwargs`."""
        parameters = self._parameters()
        takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
        named = {k: v for k, v in kwargs.items() if takes_all or k in parameters}
        result = self.function(inputs, outputs, **named)
        loss, metrics = result, None
        if isinstance(result, Mapping) and "loss" in result:
            loss, metrics = result["loss"], result.get("metrics")
        if not isinstance(loss, float | np.floating | jax.Array) or jnp.ndim(loss):
            kind = getattr(loss, "shape", loss)
            raise TypeError(
                f"the loss function must return a float, or a mapping with a 'loss', got {kind}"
            )
        return LossOutput(jnp.asarray(loss), metrics)


def get_loss(loss: str | type[Loss] | Loss | LossFunction, **options: Any) -> Loss:
    """Make a loss object from its name, its class or a function.

    Args:
        loss: a name (`'grpo'`, or that of the class, `'GRPOLoss'`); a class; an object, which is
            returned as it is; or a function `(inputs, outputs, ...)` that returns a number, or a
            mapping with a `loss`. A function is called with the arguments that it names. If one of
            them is `denominator`, it must divide its sum over tokens by it; otherwise each
            micro-batch weighs the same.
        **options: arguments of the class.

    Returns:
        The loss object.

    Raises:
        ValueError: if no loss has this name.
        TypeError: if `loss` is none of these, or does not take one of the options.

    Example:
        >>> get_loss("grpo", epsilon=0.1).epsilon
        0.1
    """
    if isinstance(loss, str):
        by_name = {**LOSSES, **{cls.__name__: cls for cls in LOSSES.values()}}
        if loss not in by_name:
            known = ", ".join(map(repr, sorted(LOSSES)))
            raise ValueError(f"loss must be one of {known}, or the name of a class, got {loss!r}")
        return by_name[loss](**options)
    if isinstance(loss, type) and issubclass(loss, Loss):
        return loss(**options)
    if isinstance(loss, type) or not callable(loss):
        raise TypeError(f"loss must be a name, a loss or a function, got {loss!r}")
    if options:
        raise TypeError(f"options must be given to the class, not to {loss!r}, got {options}")
    return loss if isinstance(loss, Loss) else FunctionLoss(loss)


# What the losses share: how they read their inputs.

ARGUMENTS = (
    "old_logps",
    "ref_logps",
    "sampler_logps",
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


class InvalidLossInputError(ValueError, AssertionError):
    """An option or input of a loss object does not fit.

    Twinkle asserts the same conditions, so scripts that catch its `AssertionError` keep working.
    """


def refuse_unknown(kwargs: Mapping[str, object]) -> None:
    """Refuse arguments that no loss has; those of other losses are ignored, for easy swapping."""
    for name in kwargs:
        if name not in ARGUMENTS:
            matches = difflib.get_close_matches(name, ARGUMENTS, n=1)
            hint = f" (did you mean {matches[0]!r}?)" if matches else ""
            raise TypeError(f"arguments must be among {', '.join(ARGUMENTS)}, got {name!r}{hint}")


def entry(name: str, mapping: Mapping[str, Any], *keys: str) -> tuple[str, Any]:
    """Look up the first key that is present and not None; return it and its value."""
    if not isinstance(mapping, Mapping):
        raise TypeError(f"{name} must be a mapping, got {type(mapping).__name__}")
    for key in keys:
        if mapping.get(key) is not None:
            return key, mapping[key]
    expected = " or ".join(map(repr, keys))
    raise InvalidLossInputError(f"{name} must hold {expected}, got {sorted(mapping)}")


class Labels(NamedTuple):
    """Labels of a batch: the token at each position, and where it has a loss."""

    tokens: Int[Array, "batch time"]
    mask: Mask
    ignore_index: int
    concrete: np.ndarray[Any, Any] | None
    """The labels as NumPy, if they are not traced and on this host; else None."""

    def check(self, vocabulary: int | None = None) -> None:
        """Raise for labels that are not tokens, if they are concrete."""
        if self.concrete is None:
            return
        end = 2**31 if vocabulary is None else vocabulary  # labels are int32
        bad = (self.concrete != self.ignore_index) & ((self.concrete < 0) | (self.concrete >= end))
        if bad.any():
            row, column = (int(index) for index in np.argwhere(bad)[0])
            tokens = (
                "a token (0 to 2**31 - 1)" if vocabulary is None else f"a token below {vocabulary}"
            )
            raise ValueError(
                f"inputs['labels'][{row}, {column}] must be {tokens} or "
                f"ignore_index={self.ignore_index}, got {self.concrete[row, column]}"
            )


def read_labels(inputs: Mapping[str, Any], ignore_index: int) -> Labels:
    """Read the labels of a batch as a matrix, and check those that are concrete."""
    _, labels = entry("inputs", inputs, "labels")
    if not isinstance(labels, jax.Array):
        try:
            labels = np.asarray(labels)
        except ValueError as error:
            lengths = [len(row) for row in labels]
            raise ValueError(
                f"inputs['labels'] must have rows of equal length, got lengths {lengths}"
            ) from error
    if not jnp.issubdtype(labels.dtype, jnp.integer):
        raise TypeError(f"inputs['labels'] must be integers, got {labels.dtype}")
    if labels.ndim == 1:
        labels = labels[None]
    if labels.ndim != 2:
        raise ValueError(f"inputs['labels'] must be [batch, time], got shape {labels.shape}")
    tokens = jnp.asarray(labels).astype(jnp.int32)
    result = Labels(tokens, tokens != ignore_index, ignore_index, _concrete(labels))
    result.check()
    return result


def label_logprobs(outputs: Mapping[str, Any], labels: Labels) -> PerToken:
    """Read the log-probability of each label, from `logps` or from `logits`."""
    key, values = entry("outputs", outputs, "logps", "logits")
    if key == "logps":
        return per_position("outputs['logps']", values, labels.mask)
    logits = floating("outputs['logits']", values)
    if logits.ndim == 2:
        logits = logits[None]
    if logits.ndim != 3 or logits.shape[:2] != labels.mask.shape:
        raise ValueError(
            f"outputs['logits'] must be [batch, time, vocabulary] with inputs['labels'] of shape "
            f"{labels.mask.shape}, got {logits.shape}"
        )
    labels.check(vocabulary=logits.shape[-1])
    return _gathered(logits, labels.tokens, labels.mask)


def _gathered(
    logits: Float[Array, "batch time vocab"], tokens: Int[Array, "batch time"], mask: Mask
) -> PerToken:
    logprobs = jax.nn.log_softmax(jnp.where(mask[..., None], logits, 0))
    label_logprobs = jnp.take_along_axis(logprobs, tokens[..., None], axis=-1, mode="clip")[..., 0]
    # NaN for a traced label outside the vocabulary, which `clip` would turn into another token.
    in_vocabulary = (tokens >= 0) & (tokens < logits.shape[-1])
    return jnp.where(mask, jnp.where(in_vocabulary, label_logprobs, jnp.nan), 0)


def per_position(name: str, values: Any, mask: Mask) -> PerToken:
    """Read an output with one number per position, [batch, time] or [batch, time, 1]."""
    array = floating(name, values)
    if array.ndim == 1:
        array = array[None]
    if array.shape == (*mask.shape, 1):
        array = array[..., 0]
    if array.shape != mask.shape:
        raise ValueError(
            f"{name} must have the shape of inputs['labels'], {mask.shape}, got {array.shape}"
        )
    return array


def floating(name: str, values: Any) -> Float[Array, "..."]:
    """Convert to float32, or leave float64 as it is; refuse other types."""
    return floats(**{name: values})[0]


def _concrete(values: Any) -> np.ndarray[Any, Any] | None:
    """Return an array as NumPy; None if it is traced or partly on other hosts."""
    if isinstance(values, jax.core.Tracer):
        return None
    if isinstance(values, jax.Array) and not values.is_fully_addressable:
        return None
    return np.asarray(jax.device_get(values))


SampleArray = Array | np.ndarray[Any, Any]
SampleValues = SampleArray | Sequence[SampleArray | Sequence[float] | float]
"""Numbers for the samples of a batch: an array [batch, time], or one number or row per sample."""

Lengths = np.ndarray[Any, Any]


def aligned(
    name: str, data: SampleValues, labels: Labels, dtype: DTypeLike, *, per_sequence: bool = False
) -> PerToken:
    """Align numbers with the labels: [batch, time] from an array, or from rows as samplers return.

    Args:
        name: the argument's name, for errors.
        data: an array [batch, time]; or for each sequence a row, with a number for each position,
            or for each labelled position only. With `per_sequence` also one number per sequence.
        labels: the labels of the batch.
        dtype: type of the result.
        per_sequence: whether one number may stand for a sequence.

    Returns:
        An array [batch, time]; 0 at positions without a number.

    Raises:
        ValueError: if the number of rows or the length of a row does not fit.
        TypeError: if `data` is neither an array nor rows, or its numbers are not real.
    """
    batch, time = labels.mask.shape
    if not isinstance(data, list | tuple) and getattr(data, "shape", ()) == ():
        raise TypeError(f"{name} must be an array or a list of rows, got {type(data).__name__}")
    if len(data) != batch:
        raise InvalidLossInputError(
            f"{name} must have one row for each of {batch} sequences, got {len(data)}"
        )
    rows, lengths = _rectangle(name, data, dtype, per_sequence)
    if rows.shape == (batch, time) and (lengths == time).all():
        return rows
    if per_sequence and (lengths == 1).all():
        return jnp.broadcast_to(rows[:, :1], (batch, time))
    _check_lengths(name, lengths, labels)
    return _scattered(rows, lengths, labels.mask)


def _rectangle(
    name: str, data: Any, dtype: DTypeLike, per_sequence: bool
) -> tuple[Float[Array, "batch width"], Lengths]:
    """Pad the rows on the right to one array; return it and their lengths."""
    if hasattr(data, "dtype"):
        rows = _numbers(name, data)
        if per_sequence and rows.ndim == 1:
            rows = rows[:, None]
        if rows.ndim != 2:
            raise ValueError(f"{name} must have a row for each sequence, got shape {rows.shape}")
        return jnp.asarray(rows, dtype), np.full(rows.shape[0], rows.shape[1])
    ragged = [_numbers(f"{name}[{index}]", row) for index, row in enumerate(data)]
    if per_sequence and all(row.size == 1 for row in ragged):
        ragged = [row.reshape(1) for row in ragged]
    for index, row in enumerate(ragged):
        if row.ndim != 1:
            raise ValueError(f"{name}[{index}] must be a row of numbers, got shape {row.shape}")
    lengths = np.asarray([row.size for row in ragged], int)
    padding = [(0, int(lengths.max(initial=1)) - row.size) for row in ragged]
    if all(isinstance(row, np.ndarray) for row in ragged):
        padded = np.stack([np.pad(*pair) for pair in zip(ragged, padding, strict=True)])
        return jnp.asarray(padded, dtype), lengths
    pairs = zip(ragged, padding, strict=True)
    return jnp.stack([jnp.pad(jnp.asarray(row, dtype), width) for row, width in pairs]), lengths


def _numbers(name: str, values: Any) -> Any:
    """Convert to an array, to NumPy if nothing is traced: that compiles nothing."""
    if not hasattr(values, "dtype"):
        traced = any(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(values))
        items = values if isinstance(values, list | tuple) else [values]
        if any(item is None for item in items):  # which NumPy would make NaN
            raise TypeError(f"{name} must be real numbers, got None")
        values = jnp.asarray(values) if traced else np.asarray(values, dtype=float)
    elif not isinstance(values, jax.Array):
        values = np.asarray(values)
    if not jnp.isdtype(values.dtype, ("integral", "real floating")):
        raise TypeError(f"{name} must be real numbers, got {values.dtype}")
    return values


def _check_lengths(name: str, lengths: Lengths, labels: Labels) -> None:
    time = labels.mask.shape[1]
    for index, length in enumerate(lengths):
        count = None
        if labels.concrete is not None:
            count = int((labels.concrete[index] != labels.ignore_index).sum())
        if length > time or (length < time and count not in (None, length)):
            tokens = "" if count is None else f"{count} numbers (one per labelled token) or "
            raise InvalidLossInputError(
                f"{name}[{index}] must have {tokens}{time} numbers (one per position), got {length}"
            )


def _scattered(rows: Float[Array, "batch width"], lengths: Lengths, mask: Mask) -> PerToken:
    """Put the n-th number of a row at its n-th labelled position; rows of full length stay."""
    time = mask.shape[1]
    rows = jnp.pad(rows, ((0, 0), (0, time - rows.shape[1])))
    rank = jnp.maximum(jnp.cumsum(mask, axis=1) - 1, 0)
    spread = jnp.take_along_axis(rows, rank, axis=1)
    # With traced labels a wrong length is known only when the program runs: NaN then.
    fits = jnp.sum(mask, axis=1, keepdims=True) == lengths[:, None]
    spread = jnp.where(mask, jnp.where(fits, spread, jnp.nan), 0)
    return jnp.where(lengths[:, None] == time, rows, spread)
