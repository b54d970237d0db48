"""Rows a few at a time: how many, and that it changes nothing."""

import jax
import numpy as np
import pytest

import twinkle_jax.model.train_step.grad_step as module
from tests.loss.cases import OBJECTS
from tests.model.families import config_of, family, random_params
from tests.model.training import accumulate, fresh, random_batch, relative, take
from twinkle_jax.loss import GRPOLoss
from twinkle_jax.model import grad_step, make_mesh, parse_config, train_state
from twinkle_jax.model.train_step.grad_step import _grad_step
from twinkle_jax.model.train_step.loss_coefficients import split_loss, traced_scalar
from twinkle_jax.model.train_step.row_blocks import KEPT_BYTES, rows_together

SMALL = {
    "hidden_size": 128,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "head_dim": 32,
    "vocab_size": 512,
    "tie_word_embeddings": True,
}
DOTS = jax.checkpoint_policies.dots_with_no_batch_dims_saveable


@pytest.mark.parametrize(
    ("changes", "rows", "time", "remat", "expected"),
    [
        ({}, 64, 48, DOTS, 16),
        ({}, 64, 48, True, 16),
        ({}, 60, 48, DOTS, 15),
        ({}, 61, 48, DOTS, 61),  # a prime
        ({}, 16, 48, DOTS, 16),  # fits as a whole
        ({}, 64, 48, False, 64),  # too few would fit
        ({}, 2, 512, True, 1),
        ({}, 2, 4096, True, 2),  # one row alone does not fit
        ({"num_hidden_layers": 8}, 64, 48, DOTS, 64),
        ({"vocab_size": 32_768}, 64, 48, DOTS, 64),
        ({"hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 2}, 128, 32, DOTS, 64),
        ({"hidden_size": 256, "intermediate_size": 1024}, 64, 48, DOTS, 64),
    ],
)
def test_how_many(changes, rows, time, remat, expected):
    config = parse_config(family("qwen3", **{**SMALL, **changes}))
    assert rows_together(config, rows, time, remat) == expected


def test_accelerators_take_all(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert rows_together(parse_config(family("qwen3", **SMALL)), 64, 48, DOTS) == 64


@pytest.mark.parametrize("remat", [DOTS, True])
def test_the_memory_is_what_was_estimated(remat):
    config = parse_config(family("qwen3", **SMALL))
    rows = rows_together(config, 64, 48, remat)
    state = jax.eval_shape(lambda: train_state(random_params(config)))
    static, traced = split_loss(GRPOLoss())
    compiled = _grad_step.lower(
        state,
        random_batch(rows, 48),
        frozen=None,
        traced=traced,
        temperature=traced_scalar(1.0),
        config=config,
        loss=static,
        compute_dtype=None,
        attention="grouped",
        remat=remat,
        mesh=None,
    ).compile()
    memory = compiled.memory_analysis().temp_size_in_bytes
    assert KEPT_BYTES / 2 < memory < KEPT_BYTES


@pytest.mark.quick_compile
@pytest.mark.parametrize("loss", ["grpo", "gspo", "dapo"])
@pytest.mark.parametrize("rows", [1, 3, 4])
def test_blocks_change_nothing(loss, rows):
    """Three leaves one row over; four are all."""
    batch = random_batch()
    whole, (expected,) = accumulate(OBJECTS[loss], [batch], rows_at_once=9)
    gradient, (summary,) = accumulate(OBJECTS[loss], [batch], rows_at_once=rows)
    assert relative(gradient, whole) < 1e-6
    for a, b in zip(jax.tree.leaves(summary), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-6, atol=1e-7)


@pytest.mark.quick_compile
def test_what_is_chosen_is_used(monkeypatch):
    seen = []

    def record(*arguments):
        seen.append(arguments)
        return 2

    batch = random_batch()
    monkeypatch.setattr(module, "rows_together", record)
    accumulate(GRPOLoss(), [take(batch, slice(0, 2))], remat=False)
    before = _grad_step._cache_size()
    accumulate(GRPOLoss(), [batch], remat=False)
    assert _grad_step._cache_size() == before  # what was compiled for two rows did for four
    assert seen == [(config_of("qwen3"), rows, 8, False) for rows in (2, 4)]
    accumulate(GRPOLoss(), [batch], remat=False, mesh=make_mesh(data=4))
    assert len(seen) == 2  # on a mesh all rows are taken


@pytest.mark.parametrize("rows", [0, -1, True, 2.0])
def test_wrong_numbers(rows):
    with pytest.raises(ValueError, match=f"rows_at_once to be a positive int or None, got {rows}"):
        grad_step(fresh(), random_batch(), config_of("qwen3"), GRPOLoss(), rows_at_once=rows)
