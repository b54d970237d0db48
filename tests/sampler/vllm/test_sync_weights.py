"""Handing weights to a server, and proving that it has them."""

import json
import shutil
import threading
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.sampler.responses import gap
from tests.sampler.vllm import changed
from tests.sampler.vllm.fake_server import adapters_in, lose, send, write_checkpoint
from twinkle_jax.model import LongRopeScaling, LoraConfig, load_pretrained
from twinkle_jax.sampler import ServerError, vLLMSampler
from twinkle_jax.twinkle.model import TransformersModel

pytest.importorskip("safetensors", reason="pip install 'twinkle-jax[checkpoints]'")
pytest.importorskip("tokenizers", reason="pip install 'twinkle-jax[data]'")

RELOADING = ["/pause", "/collective_rpc", "/reset_prefix_cache", "/resume"]
ASK = {"max_tokens": 4, "seed": 1}


@pytest.fixture
def sampler(server, checkpoint, tmp_path):
    return vLLMSampler(
        model_id=checkpoint, base_url=server.url, shared_dir=tmp_path, timeout=60, retries=0
    )


def test_the_server_has_the_actors_weights(sampler, server, checkpoint):
    actor = changed(TransformersModel(model_id=checkpoint))
    assert gap(sampler.sample("12", ASK), actor) > 0.01
    server.asked = []
    sampler.sync_weights(actor)
    assert [path for path in server.paths() if not path.startswith("/v1/")] == RELOADING
    assert server.asked[1][0] == "/pause?mode=wait"
    assert gap(sampler.sample("12", ASK), actor) < 1e-5
    sampler.sync_weights(changed(actor))
    assert gap(sampler.sample("12", ASK), actor) < 1e-5


def test_weights_that_were_not_loaded_are_found_out(sampler, server, checkpoint):
    actor = changed(TransformersModel(model_id=checkpoint), 1e-2)
    sampler.sample("12", ASK)
    server.loads = False
    with pytest.raises(ServerError, match="actor's weights"):
        sampler.sync_weights(actor)
    assert server.paths().count("/resume") == 1
    with pytest.raises(ServerError, match="sync_weights"):
        sampler.sample("12", ASK)
    server.loads = True
    sampler.sync_weights(actor)
    sampler.sample("12", ASK)


@pytest.mark.slow
def test_weights_are_proved_whichever_log_probabilities_there_are(sampler, server, checkpoint):
    actor = TransformersModel(model_id=checkpoint)
    for mode in ("raw_logprobs", "processed_logprobs"):
        server.logprobs_mode = mode
        sampler.sync_weights(changed(actor))
        assert gap(sampler.sample("12", ASK), actor) < 1e-5
    sampler.sample("12", {**ASK, "temperature": 0.7})  # the mode is asked for after each sync
    server.logprobs_mode, server.shift = "raw_logits", -9.0
    with pytest.raises(ServerError, match="actor's weights"):
        sampler.sync_weights(actor)


@pytest.mark.exhaustive
def test_an_actor_of_another_type_writes_it_and_has_more_room(sampler, checkpoint, tmp_path):
    actor = changed(TransformersModel(model_id=checkpoint, dtype="bfloat16"))
    sampler.sync_weights(actor)
    written = json.loads((tmp_path / "checkpoint/config.json").read_text())
    assert written["dtype"] == "bfloat16"
    assert 1e-3 < gap(sampler.sample("12", ASK), actor) < 0.5


def test_how_close_is_close_enough_can_be_said(server, checkpoint, tmp_path):
    actor = changed(TransformersModel(model_id=checkpoint), 1e-2)
    server.loads = False
    place = {"model_id": checkpoint, "base_url": server.url, "shared_dir": tmp_path}
    vLLMSampler(**place, tolerance=5.0).sync_weights(actor)
    with pytest.raises(ServerError, match="1e-06"):
        vLLMSampler(**place, tolerance=1e-6).sync_weights(actor)


def test_the_checkpoint_that_is_trained_is_not_replaced(server, checkpoint, tmp_path):
    place = Path(shutil.copytree(checkpoint, tmp_path / "checkpoint"))
    before = (place / "model.safetensors").read_bytes()
    actor = changed(TransformersModel(model_id=place))
    sampler = vLLMSampler(model_id=checkpoint, base_url=server.url, shared_dir=tmp_path)
    with pytest.raises(ValueError, match="shared_dir must not hold"):
        sampler.sync_weights(actor)
    assert (place / "model.safetensors").read_bytes() == before


def test_a_server_that_began_anew_is_found_out(sampler, server, checkpoint):
    sampler.sync_weights(changed(TransformersModel(model_id=checkpoint)))
    server.models = {server.name: server.first}
    with pytest.raises(ServerError, match="last sync_weights"):
        sampler.sample("12", ASK)


@pytest.mark.parametrize("kind", ["checkpoint", "adapter"])
def test_a_server_that_began_anew_during_a_call_is_found_out(server, checkpoint, tmp_path, kind):
    """What was lost is sent again, and completed with the weights of its start."""
    place = {"model_id": checkpoint, "base_url": server.url, "shared_dir": tmp_path}
    sampler, actor = vLLMSampler(**place, retries=1), TransformersModel(model_id=checkpoint)
    if kind == "adapter":
        actor.add_adapter_to_model("default", LoraConfig(r=2))
    sampler.sync_weights(changed(actor))
    sampler.sample("12", ASK)
    lost = []

    def restart(handler):
        if lost or handler.body["max_tokens"] != ASK["max_tokens"]:
            return False
        lost.append(handler)
        server.restart()
        return lose(handler)

    server.take_over["/v1/completions"] = restart
    with pytest.raises(ServerError, match="last sync_weights"):
        sampler.sample("12", ASK)
    assert lost
    sampler.sync_weights(actor)
    assert gap(sampler.sample("12", ASK), actor) < 1e-5


@pytest.mark.parametrize("path", RELOADING[:3])
def test_the_server_goes_on_whatever_fails(sampler, server, checkpoint, path):
    actor = TransformersModel(model_id=checkpoint)
    server.take_over[path] = lambda handler: send(handler, 500, b"no") or True
    with pytest.raises(ServerError, match=f"{path}.* 500: no"):
        sampler.sync_weights(actor)
    assert server.paths()[-1] == "/resume"
    with pytest.raises(ServerError, match="last sync_weights"):
        sampler.sample("12", ASK)


@pytest.mark.slow
def test_the_server_goes_on_after_a_call_that_took_too_long(server, checkpoint, tmp_path):
    place = {"model_id": checkpoint, "base_url": server.url, "shared_dir": tmp_path}
    sampler, ended = vLLMSampler(**place, timeout=5, retries=0), threading.Event()
    server.take_over["/collective_rpc"] = lambda handler: ended.wait(20)
    with pytest.raises(ServerError, match="5 seconds"):
        sampler.sync_weights(TransformersModel(model_id=checkpoint))
    assert server.paths()[-1] == "/resume"
    ended.set()


def test_a_server_that_stays_paused_is_told_of(sampler, server, checkpoint):
    actor = TransformersModel(model_id=checkpoint)
    for path in ("/collective_rpc", "/resume"):
        server.take_over[path] = lambda handler: send(handler, 500, b"no") or True
    with pytest.raises(ServerError, match="POST /collective_rpc") as caught:
        sampler.sync_weights(actor)
    assert "It may be paused still" in caught.value.__notes__[0]
    del server.take_over["/collective_rpc"]
    with pytest.raises(ServerError, match="POST /resume"):
        sampler.sync_weights(actor)


def test_a_cache_that_is_not_emptied_is_an_error(sampler, server, checkpoint):
    server.alter["/reset_prefix_cache"] = lambda answer: {"success": False}
    with pytest.raises(ServerError, match="reset_prefix_cache"):
        sampler.sync_weights(TransformersModel(model_id=checkpoint))


def test_a_server_without_the_routes_is_told_how_to_start(sampler, server, checkpoint):
    actor = TransformersModel(model_id=checkpoint)
    gone = dict.fromkeys(
        ("/pause", "/v1/load_lora_adapter"),
        lambda handler: send(handler, 404, b"Not Found") or True,
    )
    server.take_over = gone
    with pytest.raises(ServerError, match="VLLM_SERVER_DEV_MODE=1"):
        sampler.sync_weights(actor)
    actor.add_adapter_to_model("default", LoraConfig(r=2))
    with pytest.raises(ServerError, match="--enable-lora"):
        sampler.sync_weights(actor)


def test_a_server_that_does_not_see_the_weights_is_told_where(
    sampler, server, checkpoint, tmp_path
):
    actor = TransformersModel(model_id=checkpoint)
    errors = {
        "/collective_rpc": (500, b"Internal Server Error"),
        "/v1/load_lora_adapter": (404, b'{"error": {"message": "No adapter found for /here"}}'),
    }
    for path, answer in errors.items():
        server.take_over[path] = lambda handler, answer=answer: send(handler, *answer) or True
    seen = rf"must see shared_dir, {tmp_path}, under the same"
    with pytest.raises(ServerError, match=f"500.*{seen}"):
        sampler.sync_weights(actor)
    actor.add_adapter_to_model("default", LoraConfig(r=2))
    with pytest.raises(ServerError, match=f"No adapter found.*{seen}"):
        sampler.sync_weights(actor)


@pytest.mark.exhaustive
def test_an_adapter_is_loaded_under_a_new_name_each_time(sampler, server, checkpoint, tmp_path):
    actor = TransformersModel(model_id=checkpoint)
    actor.add_adapter_to_model("default", LoraConfig(r=2, lora_alpha=4))
    names = []
    for _ in range(2):
        sampler.sync_weights(changed(actor))
        assert gap(sampler.sample("12", ASK), actor) < 1e-5
        names.append(server.asked[-1][1]["model"])
        assert list(server.models) == [server.name, names[-1]]
        assert adapters_in(tmp_path) == names[-1:]
    assert names[0] != names[1] and "/pause" not in server.paths()
    sampler.sync_weights(changed(actor), merge=True)
    assert gap(sampler.sample("12", ASK), actor) < 1e-5
    assert server.asked[-1][1]["model"] == server.name
    assert list(server.models) == [server.name] and adapters_in(tmp_path) == []


def test_an_adapter_on_another_base_is_found_out_and_forgotten(
    sampler, server, checkpoint, tmp_path
):
    actor = changed(TransformersModel(model_id=checkpoint))
    actor.add_adapter_to_model("default", LoraConfig(r=2))
    with pytest.raises(ServerError, match="actor's weights"):
        sampler.sync_weights(actor)
    assert list(server.models) == [server.name] and adapters_in(tmp_path) == []


@pytest.mark.exhaustive
def test_a_tied_head_is_written_apart(sampler, server, tmp_path):
    tied = write_checkpoint(tmp_path / "tied", tied=True)
    actor = changed(TransformersModel(model_id=tied))
    assert actor.config.tie_embeddings
    sampler.sync_weights(actor)
    assert gap(sampler.sample("12", ASK), actor) < 1e-5
    written = tmp_path / "checkpoint"
    assert not json.loads((written / "config.json").read_text())["tie_word_embeddings"]
    assert (written / "tokenizer.json").is_file()
    params = load_pretrained(written).params
    embedding = np.asarray(actor.params["embed_tokens"]["embedding"])
    np.testing.assert_array_equal(params["lm_head"]["kernel"], embedding.T)


def test_a_server_whose_rows_would_have_other_rotary_factors_is_refused(
    sampler, server, checkpoint
):
    """vLLM takes LongRoPE's second list for all rows if some may be longer than the first goes."""
    actor = TransformersModel(model_id=checkpoint)
    attention = replace(
        actor.config.attention, rope_scaling=LongRopeScaling((1.0,) * 4, (2.0,) * 4, 32, 64)
    )
    sampler.config = actor.config = replace(actor.config, attention=attention)
    with pytest.raises(ServerError, match=r"max_model_len of at most 32, got 64.*--max-model-len"):
        sampler.sync_weights(actor)
    assert "/collective_rpc" not in server.paths()


@pytest.mark.parametrize(
    ("folder", "root"),
    [("fp8", "{}/fp8"), ("fp8", "./fp8"), ("hub/models--us--a-FP8/snapshots/1", "us/a-FP8")],
)
def test_a_server_with_quantised_weights_is_refused(server, checkpoint, tmp_path, folder, root):
    """It may keep the old weights without an error. It can load adapters."""
    place, root = Path(shutil.copytree(checkpoint, tmp_path / folder)), root.format(tmp_path)
    content = json.loads((place / "config.json").read_text())
    content["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    (place / "config.json").write_text(json.dumps(content))
    actor = TransformersModel(model_id=place)
    own = {"id": server.name, "root": root, "max_model_len": 64}
    server.alter["/v1/models"] = lambda answer: {"data": [own, *answer["data"][1:]]}
    options = {"base_url": server.url, "shared_dir": tmp_path}
    sampler = vLLMSampler(model_id=place, served_name=server.name, **options)
    with pytest.raises(ServerError, match=f"16 or 32 bits .* got {root}, with a quantization_c"):
        sampler.sync_weights(actor)
    assert "/collective_rpc" not in server.paths()
    actor.add_adapter_to_model("default", LoraConfig(r=2))
    sampler.sync_weights(actor)
    server.alter.clear()  # another checkpoint
    sampler.sync_weights(actor, merge=True)


def test_what_cannot_be_written_never_reaches_the_server(sampler, server, checkpoint, tmp_path):
    actor = TransformersModel(model_id=checkpoint)
    params = jax.tree.map(lambda x: x * jnp.float32(jnp.nan), actor.state.params)
    actor.state = actor.state._replace(params=params)
    with pytest.raises(ValueError, match="finite"):
        sampler.sync_weights(actor)
    assert "/pause" not in server.paths()
    other = TransformersModel(model_id=write_checkpoint(tmp_path / "other", hidden=16))
    with pytest.raises(ValueError, match="actor must"):
        sampler.sync_weights(other)
    alone = vLLMSampler(model_id=checkpoint, base_url=server.url)
    with pytest.raises(ValueError, match="shared_dir must"):
        alone.sync_weights(actor)
