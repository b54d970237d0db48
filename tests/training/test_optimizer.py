"""Optimizers by name: what they leave out or treat apart in a decoder's parameters."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from twinkle_jax.training import make_optimizer
from twinkle_jax.training.optimizer import decayed


def test_muon_orthogonalizes_each_layers_matrices_and_leaves_the_rest_to_adam():
    rng = np.random.default_rng(0)
    shapes = {
        "embed_tokens": {"embedding": (6, 4)},
        "layers": {"0": {"q_proj": {"kernel": (2, 4, 8)}, "norm": {"scale": (2, 4)}}},
        "lm_head": {"kernel": (4, 6)},
        "projection": {"kernel": (4, 8)},
    }
    params = jax.tree.map(
        lambda shape: rng.normal(size=shape).astype(np.float32),
        shapes,
        is_leaf=lambda x: isinstance(x, tuple),
    )
    optimizer = make_optimizer("muon")
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        updates, _ = optimizer.update(params, optimizer.init(params), params)
    orthogonal = set()
    for path, update in jax.tree_util.tree_leaves_with_path(updates):
        if np.ptp(np.abs(update)) > 1e-3 * np.abs(update).max():  # Adam's first step is a sign
            values = np.linalg.svd(np.asarray(update), compute_uv=False)
            assert values.min() > 0.5 * values.max()
            orthogonal.add(jax.tree_util.keystr(path, simple=True, separator="."))
    assert orthogonal == {"layers.0.q_proj.kernel", "projection.kernel"}


DECAYED = {"embed_tokens": {"embedding": True}, "layers": {"0": {"up_proj": {"kernel": True}}}}
KEPT = {
    "norm": {"scale": False},
    "layers": {
        "0": {
            "q_proj": {"bias": False},
            "input_layernorm": {"scale": False},
            "self_attn": {"q_norm": {"scale": False}},
        }
    },
}


@pytest.mark.parametrize("expected", [DECAYED, KEPT])
def test_norms_and_biases_do_not_decay(expected):
    assert decayed(expected) == expected
    params = jax.tree.map(lambda _: jnp.ones(2), expected)
    optimizer = make_optimizer("adamw", weight_decay=0.5)
    with jax.numpy_dtype_promotion("standard"):
        zeros = jax.tree.map(jnp.zeros_like, params)
        updates, _ = optimizer.update(zeros, optimizer.init(params), params)
    moved = jax.tree.map(lambda u: bool((u != 0).all()), updates)
    assert moved == expected


def test_what_is_unknown_is_named():
    with pytest.raises(ValueError, match="adanw"):
        make_optimizer("adanw")
    with pytest.raises(TypeError, match="b3"):
        make_optimizer("adamw", b3=0.9)
