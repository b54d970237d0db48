"""Dropout of adapters: PEFT's meaning, and noise that belongs to a row alone."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.model.families import config_of, params_of
from twinkle_jax.model import Decoder, LoraConfig, make_mesh, save_pretrained, shard_like_params
from twinkle_jax.model.decoder.lora_dropout import KEYS, drop_out, with_dropout
from twinkle_jax.twinkle.model import TransformersModel

ROWS = [[5, 6, 7, 8, 9], [10, 11, 12], [13, 14, 15, 16]]
INPUTS = [{"input_ids": row, "labels": [*row[1:], -100]} for row in ROWS]
ADVANTAGES = [1.0, -1.0, 0.5]
LORA = LoraConfig(r=2, target_modules=("q_proj", "down_proj"), lora_dropout=0.5)


def dropped(x, rate, seeds):
    keys = jax.vmap(jax.random.key)(jnp.asarray(seeds, jnp.uint32))
    return np.asarray(drop_out(jnp.asarray(x), jnp.float32(rate), keys))


@pytest.mark.parametrize("rate", [0.25, 0.5])
def test_entries_are_dropped_at_the_rate_and_the_rest_is_scaled(rate):
    x = np.full((8 * 64, 32), 3.0, np.float32)
    found = dropped(x, rate, range(8))
    np.testing.assert_allclose(np.unique(found), [0, 3 / (1 - rate)], rtol=1e-6)
    assert abs(np.mean(found == 0) - rate) < 0.01  # of 16,384 draws, 3 deviations
    assert abs(found.mean() - 3) < 0.1


def test_a_rows_noise_is_its_own():
    x = np.ones((2 * 5, 7), np.float32)
    both = dropped(x, 0.5, [3, 4]).reshape(2, 5, 7)
    alone = dropped(x[:5], 0.5, [4])
    np.testing.assert_array_equal(both[1], alone)
    assert (both[0] != both[1]).any()
    longer = dropped(np.ones((9, 7), np.float32), 0.5, [4])  # padded to another bucket
    np.testing.assert_array_equal(longer[:5], alone)


def test_every_projection_layer_and_row_has_keys_of_its_own():
    tree = {"0": {"q": {"lora_dropout": jnp.ones(3)}, "v": {"lora_dropout": jnp.ones(3)}, "o": {}}}
    laid = with_dropout(tree, jax.random.key(0), jnp.arange(4, dtype=jnp.int32))
    keys = [jax.random.key_data(laid["0"][name][KEYS]) for name in ("q", "v")]
    assert keys[0].shape == (3, 4, 2) and KEYS not in laid["0"]["o"]
    assert len({tuple(key) for key in np.concatenate([k.reshape(-1, 2) for k in keys])}) == 24


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    pytest.importorskip("safetensors", reason="pip install 'twinkle-jax[checkpoints]'")
    directory = tmp_path_factory.mktemp("model") / "qwen3"
    save_pretrained(Decoder(config_of("qwen3"), params_of("qwen3")), directory)
    return directory


def adapted(checkpoint, lora=LORA, **options):
    model = TransformersModel(checkpoint, **options)
    model.add_adapter_to_model("default", lora)
    model.set_loss("grpo")
    model.set_optimizer("SGD", lr=0.1)
    rng = np.random.default_rng(0)
    params = jax.tree.map(
        lambda x: jax.device_put(rng.normal(size=x.shape).astype("float32") / 4, x.sharding),
        model.state.params,
    )
    model.state = model.state._replace(params=params)
    return model


def gradient(model, order=(0, 1, 2), size=None):
    model.zero_grad()
    model.forward_backward(
        inputs=[INPUTS[i] for i in order],
        advantages=[ADVANTAGES[i] for i in order],
        micro_batch_size=size,
    )
    return jax.tree.map(np.asarray, model.state.gradient_sum)


def test_adapters_are_spread_over_a_mesh(checkpoint):
    mesh = make_mesh(data=2, fsdp=2, tensor=2)
    model = adapted(checkpoint, mesh=mesh)
    expected = shard_like_params(model.state, mesh)
    same = jax.tree.map(lambda x, s: x.sharding.is_equivalent_to(s, x.ndim), model.state, expected)
    assert all(jax.tree.leaves(same))


def distance(a, b):
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return max(np.abs(x - y).max() / np.abs(y).max() for x, y in pairs)


@pytest.mark.exhaustive
def test_noise_depends_on_the_row_and_the_run_alone(checkpoint):
    first = gradient(adapted(checkpoint))
    assert distance(gradient(adapted(checkpoint), size=2), first) < 1e-5  # micro-batches
    assert distance(gradient(adapted(checkpoint, seed=1)), first) > 0.1
    model = adapted(checkpoint)
    assert distance(gradient(model), first) == 0
    assert distance(gradient(model), first) > 0.1  # the next rows of the run
    assert model.state.rows == 6  # those that fill up a batch do not count
    without = LoraConfig(r=2, target_modules=("q_proj", "down_proj"))
    assert distance(gradient(adapted(checkpoint, without)), first) > 0.1


@pytest.mark.exhaustive
def test_noise_is_the_same_on_many_devices(checkpoint):
    first = gradient(adapted(checkpoint))
    for mesh in (make_mesh(data=2), make_mesh(data=2, fsdp=2, tensor=2)):
        assert distance(gradient(adapted(checkpoint, mesh=mesh)), first) < 1e-5


def test_scores_are_without_dropout(checkpoint):
    model = adapted(checkpoint)
    scores = model.forward_only(inputs=INPUTS)["logps"]
    without = adapted(checkpoint, LoraConfig(r=2, target_modules=("q_proj", "down_proj")))
    np.testing.assert_array_equal(scores, without.forward_only(inputs=INPUTS)["logps"])


@pytest.mark.parametrize("rate", [1, 1.0, -0.1, float("nan"), True, "0.1", None])
def test_rates_that_are_refused(rate):
    with pytest.raises(ValueError, match=r"lora_dropout must be a number in \[0, 1\), got"):
        LoraConfig(lora_dropout=rate)


@pytest.mark.exhaustive
@pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning"
)
def test_peft_gives_the_same_gradient_with_the_same_noise(checkpoint, tmp_path):
    """PEFT's dropout module is asked to drop what ours does, and to scale as PyTorch's does."""
    get = "pip install 'twinkle-jax[test,oracle]'"
    peft = pytest.importorskip("peft", reason=get)
    torch = pytest.importorskip("torch", reason=get)
    transformers = pytest.importorskip("transformers", reason=get)
    model = adapted(checkpoint)
    model.save(tmp_path / "adapter")
    base = transformers.AutoModelForCausalLM.from_pretrained(checkpoint)
    theirs = peft.PeftModel.from_pretrained(base, tmp_path / "adapter", is_trainable=True)
    laid = with_dropout(model.params, model.key, jnp.arange(3, dtype=jnp.int32))

    class Drop(torch.nn.Module):
        def __init__(self, module, keys):
            super().__init__()
            self.rate, self.keys, self.row = module.p, keys, 0

        def forward(self, x):
            ones = jnp.ones(x.shape[1:], jnp.float32)
            kept = drop_out(ones, jnp.float32(0.5), self.keys[self.row : self.row + 1]) > 0
            return x * torch.from_numpy(np.array(kept)) / (1 - self.rate)

    drops = []
    for name, module in theirs.named_modules():
        if hasattr(module, "lora_dropout"):
            *_, layer, block, projection = name.split(".")
            keys = laid["layers"]["0"][block][projection][KEYS][int(layer)]
            drops.append(Drop(module.lora_dropout["default"], keys))
            assert drops[-1].rate == 0.5
            module.lora_dropout["default"] = drops[-1]
    theirs.train()
    total = 0
    for i, row in enumerate(ROWS):
        for drop in drops:
            drop.row = i
        logits = theirs(input_ids=torch.tensor([row])).logits[0, :-1]
        picked = torch.log_softmax(logits, -1).gather(-1, torch.tensor(row[1:])[:, None])
        total = total - ADVANTAGES[i] * picked.mean()  # on policy, the ratio is 1
    total.backward()
    ours = gradient(model)["layers"]["0"]
    for name, p in theirs.named_parameters():
        if p.grad is not None:
            *_, layer, block, projection, leaf, _, _ = name.split(".")
            found = ours[block][projection][leaf][int(layer)].T
            np.testing.assert_allclose(found, p.grad.numpy(), atol=1e-4 * np.abs(found).max())
