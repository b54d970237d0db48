"""Writing weights where a vLLM server reads them, and having it load them."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import jax

from twinkle_jax.model.decoder.lora import merge_adapter
from twinkle_jax.model.decoder.module import Decoder
from twinkle_jax.model.huggingface.checkpoint_write import save_pretrained
from twinkle_jax.model.twinkle.transformers_model import TransformersModel
from twinkle_jax.sampler.vllm.budget import Budget
from twinkle_jax.sampler.vllm.json_values import mapping, refuse
from twinkle_jax.sampler.vllm.request import Request, ServerError
from twinkle_jax.sampler.vllm.server import Server

_DEV = ": start it with VLLM_SERVER_DEV_MODE=1 in its environment"
_LORA = ": start it with --enable-lora, and VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 in its environment"
_TO_RESUME = 60.0  # seconds, whatever the time before has been spent on


def save_for_server(model: TransformersModel, directory: Path) -> None:
    """Write a policy as a checkpoint that a server loads rightly, adapters added to the kernels.

    A head that is tied to the embedding becomes a tensor of its own: after `reload_weights` of a
    tied checkpoint, vLLM 0.32 on a CPU goes on with the old head.

    Raises:
        ValueError: as [`save_pretrained`][twinkle_jax.model.save_pretrained].
    """
    params: dict[str, Any] = jax.jit(merge_adapter)(model.params)
    if model.config.tie_embeddings:
        params["lm_head"] = {"kernel": params["embed_tokens"]["embedding"].T}
    config = replace(model.config, tie_embeddings=False)
    decoder = Decoder(config, params, source=model.source)
    save_pretrained(decoder, directory, dtype=model.dtype)


def load_checkpoint(server: Server, budget: Budget, directory: Path) -> None:
    """Have a server load a checkpoint between two requests, and forget what it has cached.

    Raises:
        ServerError: if it does not; the server is told to go on in any case.
    """
    reload = {"method": "reload_weights", "kwargs": {"weights_path": str(directory)}}
    try:
        server.call(budget, _post("/pause?mode=wait"))
        server.call(budget, _post("/collective_rpc", reload))
        server.call(budget, _post("/reset_prefix_cache", read=_succeeded))
    except BaseException as error:
        try:
            _resume(server)
        except ServerError as other:
            error.add_note(f"It may be paused still: {other}")
        raise
    _resume(server)


def load_adapter(server: Server, budget: Budget, name: str, directory: Path) -> None:
    """Have a server load an adapter under a name that it has not had yet."""
    body = {"lora_name": name, "lora_path": str(directory)}
    server.call(budget, Request("POST", "/v1/load_lora_adapter", body, hint=_LORA, repeat=False))


def unload_adapter(server: Server, budget: Budget, name: str) -> None:
    """Have a server forget an adapter."""
    path, body = "/v1/unload_lora_adapter", {"lora_name": name}
    server.call(budget, Request("POST", path, body, repeat=False))


def _resume(server: Server) -> None:
    with Budget(_TO_RESUME) as budget:
        server.call(budget, _post("/resume"))


def _post(path: str, body: Any = None, read: Any = None) -> Request:
    return Request("POST", path, body, read, hint=_DEV)


def _succeeded(answer: Any) -> None:
    done = mapping("an object", answer).get("success", True)
    if done is not True:
        refuse("success", done)
