"""Which implementation of attention is chosen, and that the choice reaches it."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from tests.model.families import config_of, params_of
from twinkle_jax.model import AttentionConfig, default_attention, hidden_states

HEADS = AttentionConfig(8, 2, head_dim=128, rotary_dim=128, rope_theta=1e6)


@pytest.mark.parametrize(
    ("head_dim", "dtype", "backend", "capability", "segmented", "expected"),
    [
        (128, "bfloat16", "gpu", 8.0, False, "cudnn"),
        (128, "float16", "gpu", 8.9, False, "cudnn"),
        (256, "bfloat16", "gpu", 9.0, False, "cudnn"),
        (64, "bfloat16", "gpu", 10.0, False, "cudnn"),
        (256, "bfloat16", "gpu", 8.9, False, "xla"),
        (264, "bfloat16", "gpu", 9.0, False, "xla"),
        (100, "bfloat16", "gpu", 9.0, False, "xla"),
        (128, "bfloat16", "gpu", 7.5, False, "xla"),
        (128, "float32", "gpu", 9.0, False, "xla"),
        (128, "bfloat16", "gpu", 9.0, True, "xla"),
        (128, "bfloat16", "tpu", None, False, "xla"),
        (128, "bfloat16", "cpu", None, False, "xla"),
        (128, "bfloat16", None, None, False, "xla"),
        # No number can be read off the devices here, as off other vendors' GPUs.
        (128, "bfloat16", "gpu", None, False, "xla"),
    ],
)
def test_choice(head_dim, dtype, backend, capability, segmented, expected):
    chosen = default_attention(
        dataclasses.replace(HEADS, head_dim=head_dim),
        dtype,
        segmented=segmented,
        backend=backend,
        compute_capability=capability,
    )
    assert chosen == expected


def test_cudnn_is_asked_for_when_it_is_named():
    """It cannot be traced without a GPU, and says so."""
    with pytest.raises(RuntimeError, match=r"(?i)cudnn|gpu"):
        jax.eval_shape(
            lambda p: hidden_states(
                p, config_of("qwen3"), jnp.ones((1, 2), jnp.int32), attention="cudnn"
            ),
            params_of("qwen3"),
        )
