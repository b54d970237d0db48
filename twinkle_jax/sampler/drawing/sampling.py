"""How tokens are drawn: temperature, filters and stop tokens, checked and made arrays."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

_STOP_SLOTS = 8  # stop tokens are padded to a multiple of this, so that their number is traced

Real = float | np.floating[Any] | Float[Array, ""]
Whole = int | np.integer[Any] | Int[Array, ""]


class Sampling(NamedTuple):
    """How the next token is chosen. All values are traced: none of them compiles anything anew.

    The penalty comes first, then the temperature, then top-k, top-p and min-p, each on what the
    ones before have left, as in `transformers`; vLLM drops by min-p before it looks at the other
    two. Nothing is sorted; tokens that tie with the last one kept are all kept.

    Attributes:
        temperature: what logits are divided by; 0 takes the most probable token.
        top_k: how many of the most probable tokens to keep; 0 or -1 keeps all.
        top_p: the fewest of the most probable tokens that together have this probability are
            kept; in (0, 1].
        min_p: tokens less probable than this times the most probable one are dropped; in [0, 1].
        repetition_penalty: positive logits of tokens that the prompt or the completion already
            has are divided by it, negative ones multiplied.
        stop_tokens: a row ends with the first of these that it draws; the token belongs to it.
    """

    temperature: Real = 1.0
    top_k: Whole = 0
    top_p: Real = 1.0
    min_p: Real = 0.0
    repetition_penalty: Real = 1.0
    stop_tokens: Sequence[int] | np.ndarray | Int[Array, " stops"] = ()


def traced_sampling(sampling: Sampling) -> Sampling:
    """Check what the host knows, and turn everything into arrays of one type and shape each.

    What is on the host stays there: the compiled call takes it along.
    """
    checks = {
        "temperature": ("finite and at least 0", lambda x: 0 <= x < math.inf),
        "top_p": ("in (0, 1]", lambda x: 0 < x <= 1),
        "min_p": ("in [0, 1]", lambda x: 0 <= x <= 1),
        "repetition_penalty": ("finite and above 0", lambda x: 0 < x < math.inf),
        "top_k": ("at least -1", lambda x: x >= -1),
    }
    arrays: dict[str, Any] = {}
    for name, (what, holds) in checks.items():
        value = getattr(sampling, name)
        whole = name == "top_k"
        array = np.asarray(value) if not isinstance(value, jax.Array) else value
        kind = jnp.integer if whole else jnp.number
        if array.shape != () or not jnp.issubdtype(array.dtype, kind):
            word = "one integer" if whole else "one number"
            raise TypeError(f"{name} must be {word}, got {value!r}")
        if not isinstance(value, jax.Array) and not holds(value):
            raise ValueError(f"{name} must be {what}, got {value!r}")
        arrays[name] = array.astype(np.int32 if whole else np.float32)
    return Sampling(**arrays, stop_tokens=_padded_stops(sampling.stop_tokens))


def _padded_stops(stop_tokens: Any) -> np.ndarray | Int[Array, " slots"]:
    host = not isinstance(stop_tokens, jax.Array)
    stops = np.asarray(stop_tokens, None if len(stop_tokens) else np.int32) if host else stop_tokens
    if stops.ndim != 1 or not jnp.issubdtype(stops.dtype, jnp.integer):
        raise TypeError(f"stop_tokens must be a list of token ids, got {stop_tokens!r}")
    if host and np.any(stops < 0):
        raise ValueError(f"stop_tokens must be at least 0, got {int(np.min(stops))}")
    room = -len(stops) % _STOP_SLOTS if len(stops) else _STOP_SLOTS
    if host:  # padded there, so that no number of them compiles anything
        return np.pad(stops, (0, room), constant_values=-1).astype(np.int32)
    return jnp.pad(stops.astype(jnp.int32), (0, room), constant_values=-1)
