"""Optimizers by name: what they leave out or treat apart in a decoder's parameters."""

import jax
import numpy as np

from twinkle_jax.training import make_optimizer


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
