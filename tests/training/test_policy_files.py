"""The train step is compiled here for machines that are not here."""

import jax
import pytest

from tests.model.families import config_of, each, params_of
from tests.model.training import ADAMW, random_batch
from twinkle_jax.loss import GRPOLoss
from twinkle_jax.training import apply_gradients, grad_step, train_state


@pytest.mark.parametrize("name", each(["qwen3", "qwen3_5_text"]))
def test_the_update_exports_for_tpu_and_cuda(name):
    def update(params, batch):
        state = train_state(params, ADAMW)
        state, summary = grad_step(
            state, batch, config_of(name), GRPOLoss(beta=0.1), attention="xla"
        )
        state, info = apply_gradients(state, ADAMW, learning_rate=1e-3, max_grad_norm=1.0)
        return state, summary.loss, info

    exported = jax.export.export(jax.jit(update), platforms=("tpu", "cuda"))(
        params_of(name), random_batch()
    )
    assert exported.platforms == ("tpu", "cuda")
    # A while loop over the layers forwards and one backwards, whatever their number.
    assert exported.mlir_module().count("stablehlo.while") >= 2
