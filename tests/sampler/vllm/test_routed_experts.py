"""The experts of each token, as a vLLM server reports them: what is read, and what is refused."""

import base64
import io

import numpy as np
import pytest

from tests.model.families import config_of
from tests.sampler.vllm.fake_server import in_base64
from twinkle_jax.data import SamplingParams
from twinkle_jax.sampler.requests import Stops
from twinkle_jax.sampler.vllm_server import CompletionSettings, Routing, completion_request

PROMPT, TOKENS = [5, 6, 7], [8, 9]
MODEL = Routing(layers=2, experts=6, chosen=2)
EXPERTS = np.array([[[0, 5], [2, 1]], [[3, 4], [5, 0]], [[1, 2], [0, 1]], [[5, 4], [4, 5]]])


def request(routing=MODEL):
    params = SamplingParams(max_tokens=2)
    settings = CompletionSettings(
        "model", PROMPT, 1, 2, None, params, Stops([], []), vocab=19, routing=routing
    )
    return completion_request(settings, "inputs[0]")


def read(routed_experts, routing=MODEL):
    choice = {
        "index": 0,
        "finish_reason": "length",
        "token_ids": TOKENS,
        "prompt_token_ids": PROMPT,
        "logprobs": {"token_logprobs": [-1.0, -2.0]},
        "routed_experts": routed_experts,
    }
    [drawn] = request(routing).read({"model": "model", "choices": [choice]}).drawn
    return drawn.routing


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.int32, np.dtype(">i8")])
def test_the_experts_of_all_tokens_but_the_last_are_read(dtype):
    routing = read(in_base64(EXPERTS.astype(dtype)))
    np.testing.assert_array_equal(routing, EXPERTS)
    assert routing.dtype == np.uint8


@pytest.mark.parametrize(("experts", "dtype"), [(255, np.uint8), (256, np.uint16)])
def test_their_type_has_a_number_that_no_expert_has(experts, dtype):
    routing = read(in_base64(EXPERTS), MODEL._replace(experts=experts))
    assert routing.dtype == dtype
    assert np.iinfo(dtype).max >= experts


@pytest.mark.parametrize("written", [0, 7, -1])
def test_of_dense_layers_nothing_is_read(written):
    """vLLM writes 0 for all experts of these."""
    experts = EXPERTS.copy()
    experts[:, 0] = written
    routing = read(in_base64(experts), MODEL._replace(dense=1))
    np.testing.assert_array_equal(routing[:, 1], EXPERTS[:, 1])
    assert not routing[:, 0].any()
    with pytest.raises(ValueError, match=r"routed_experts.*, got "):
        read(in_base64(experts[:, ::-1]), MODEL._replace(dense=1))
    assert Routing.of(config_of("glm4_moe")) == Routing(3, 6, 2, dense=1)
    assert Routing.of(config_of("qwen3_moe")) == Routing(2, 6, 2)


def test_they_are_not_read_where_nobody_asks():
    assert read("anything", None) is None


def declared(shape, dtype="|u1", content=b""):
    """A file that declares an array, and may not have it."""
    file = io.BytesIO()
    np.lib.format.write_array_header_1_0(
        file, {"shape": shape, "fortran_order": False, "descr": dtype}
    )
    return base64.b64encode(file.getvalue() + content).decode()


def with_header(header):
    size = len(header).to_bytes(2, "little")
    return base64.b64encode(b"\x93NUMPY\x01\x00" + size + header).decode()


def changed(place, value):
    array = EXPERTS.copy()
    array[place] = value
    return in_base64(array)


BAD = {
    "none": None,
    "a number": 7,
    "no base64": "not base64!",
    "no file": base64.b64encode(b"hello").decode(),
    "empty": "",
    "a token less": in_base64(EXPERTS[:-1]),
    "a layer less": in_base64(EXPERTS[:, :1]),
    "floats": in_base64(EXPERTS.astype(np.float32)),
    "by column": in_base64(np.asfortranarray(EXPERTS)),
    "pickled": in_base64(EXPERTS.astype(object)),
    "very large": declared((2**40, 2, 2)),
    "negative sizes": declared((-4, 2, 2)),
    "too short": declared((4, 2, 2), content=b"\0" * 15),
    "too long": declared((4, 2, 2), content=b"\0" * 17),
    "an open string as header": with_header(b"'''"),
    "a nested header": with_header(b"-" * 9000 + b"1"),
    "keys of two types": with_header(b"{1: 2, 'shape': 3}"),
    "no expert": changed((0, 0, 0), 6),
    "below 0": changed((0, 0, 0), -1),
    "twice the same": changed((0, 0), 5),
}


@pytest.mark.parametrize("text", BAD.values(), ids=list(BAD))
def test_what_cannot_be_experts_is_refused(text):
    with pytest.raises(ValueError, match=r"routed_experts.*, got "):
        read(text)


def test_a_server_without_them_is_told_its_option():
    with pytest.raises(ValueError, match="--enable-return-routed-experts"):
        read(None)


def test_an_answer_has_room_for_the_experts_of_a_large_model():
    large = Routing(layers=94, experts=512, chosen=22)
    text = in_base64(np.zeros((4, large.layers, large.chosen), np.int32))
    assert request(large).max_bytes - request(None).max_bytes > len(text)
