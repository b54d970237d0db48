"""Which model a vLLM server has, and under which name."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from twinkle_jax.sampler.vllm.json_values import entries, integer, mapping, refuse
from twinkle_jax.sampler.vllm.request import Request


class Served(NamedTuple):
    """A model on a server: its name there, and the most tokens of a row."""

    name: str
    max_length: int


def models_request(names: Sequence[str]) -> Request:
    """Ask for the models of a server, of which one must have one of these names or places."""
    return Request("GET", "/v1/models", read=partial(_read, names))


def names_of(model_id: str | Path, served_name: str | None) -> list[str]:
    """List what a server may call a model."""
    if served_name is not None:
        return [served_name]
    place = Path(model_id).expanduser()
    return [str(model_id), str(place.resolve())] if place.is_dir() else [str(model_id)]


def _read(names: Sequence[str], answer: Any) -> Served:
    models = [
        mapping("models that are objects", x) for x in entries("data", mapping("an object", answer))
    ]
    for model in models:
        if model.get("id") in names or model.get("root") in names:
            length = integer("an integer as max_model_len", model.get("max_model_len"))
            return Served(str(model["id"]), length)
    return refuse(
        f"model {names[0]!r} among its models (served_name says what it is called there)",
        [model.get("id") for model in models],
    )
