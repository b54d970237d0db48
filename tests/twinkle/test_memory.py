"""What lives at once: the old training state goes before the new one comes."""

import gc

import jax
import numpy as np
import optax
import pytest

from tests.model.families import config_of, family, fill, params_of
from tests.twinkle.rows import INPUTS, SIDE, assert_equal
from twinkle_jax.model import (
    Decoder,
    LoraConfig,
    init_params,
    merge_adapter,
    parse_config,
    save_pretrained,
)
from twinkle_jax.twinkle.model import TransformersModel


def live():
    gc.collect()
    return sum(x.nbytes for x in jax.live_arrays())


def watched(seen):
    """Adam that notes how much lives when its state is about to be made."""
    adam = optax.adam(1.0)

    def init(params):
        seen.append(live())
        return adam.init(params)

    return optax.GradientTransformation(init, adam.update)


@pytest.fixture(scope="module")
def larger(tmp_path_factory):
    """Large enough for other tests' small arrays not to matter."""
    config = parse_config(family("qwen3", vocab_size=4096, hidden_size=64))
    directory = tmp_path_factory.mktemp("memory") / "model"
    save_pretrained(Decoder(config, init_params(jax.random.key(0), config)), directory)
    return directory


@pytest.mark.exhaustive
def test_at_the_peak_of_set_optimizer_only_parameters_live(larger):
    before = live()
    model = TransformersModel(larger)
    size = sum(x.nbytes for x in jax.tree.leaves(model.state.params))
    assert live() - before < 2.1 * size  # parameters and gradients
    for _ in range(2):  # the second call has a state to give up
        seen = []
        model.set_optimizer(watched(seen))
        assert seen[-1] - before < 1.1 * size
        assert live() - before < 4.1 * size


@pytest.mark.exhaustive
def test_load_reads_when_only_the_old_parameters_live(larger):
    """They stay until the new ones are known to be whole."""
    seen = []

    class Watched(TransformersModel):
        def read(self, *args):
            seen.append(live())
            return super().read(*args)

    before = live()
    model = Watched(larger)
    size = sum(x.nbytes for x in jax.tree.leaves(model.state.params))
    model.set_optimizer("Adam", lr=0.1)
    assert live() - before > 3.9 * size
    model.load(larger)
    assert len(seen) == 2 and seen[1] - before < 1.1 * size
    assert live() - before < 4.1 * size


@pytest.mark.exhaustive
def test_a_load_that_fails_leaves_the_model_as_it_was(model, tmp_path):
    config = config_of("qwen2")
    save_pretrained(Decoder(config, params_of("qwen2")), tmp_path / "other")
    model.set_optimizer("AdamW", lr=0.1)
    model.forward_backward(inputs=INPUTS, **SIDE)
    state = jax.tree.map(np.array, model.state)
    with pytest.raises(ValueError, match="another configuration"):
        model.load(tmp_path / "other")
    with pytest.raises(ValueError, match="nothing"):
        model.load(tmp_path / "nothing")
    assert_equal(model.state, state)
    # A damaged file shows late; then parameters stay, and the rest begins anew.
    save_pretrained(Decoder(config_of("qwen3"), params_of("qwen3")), tmp_path / "same")
    file = tmp_path / "same" / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[-4:] = np.float32(np.nan).tobytes()
    file.write_bytes(content)
    with pytest.raises(ValueError, match="NaN"):
        model.load(tmp_path / "same")
    assert_equal(model.state.params, state.params)
    assert model.state.tokens == 0 and model.state.optimizer_state is not None
    model.forward_backward(inputs=INPUTS, **SIDE)
    assert model.clip_grad_and_step().applied


def test_an_optimizer_that_cannot_begin_takes_nothing(model):
    def init(params):
        raise RuntimeError("of init")

    old = model.state
    with pytest.raises(RuntimeError, match="of init"):
        model.set_optimizer(optax.GradientTransformation(init, init))
    assert model.state is old


def test_a_decoder_of_the_callers_is_copied():
    decoder = Decoder(config_of("qwen3"), params_of("qwen3"))
    model = TransformersModel(decoder)
    jax.tree.map(lambda x: x.delete(), model.params)  # as an update does, which donates them
    assert not any(x.is_deleted() for x in jax.tree.leaves(decoder.params))
    again = TransformersModel(decoder)
    np.testing.assert_array_equal(again.params["norm"]["scale"], decoder.params["norm"]["scale"])


def test_params_are_what_a_sampler_takes(checkpoint):
    model = TransformersModel(checkpoint)
    model.add_adapter_to_model("default", LoraConfig(r=2, lora_dropout=0.5))
    model.state = model.state._replace(
        params=jax.tree.map(lambda x: x + 0.1, model.state.params)  # so that it changes something
    )
    tokens = np.array([[5, 6, 7]], np.int32)
    expected = model.forward_only(inputs=[{"input_ids": [5, 6, 7]}], return_logits=True)
    for params in (model.params, merge_adapter(model.params)):
        hidden, _ = fill(params, model.config, jax.numpy.asarray(tokens), max_length=4)
        logits = hidden @ params["lm_head"]["kernel"]
        np.testing.assert_allclose(logits, expected["logits"][:, 2], atol=1e-4)
