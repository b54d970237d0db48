"""`twinkle_agentic.protocol`: models on a server that answer conversations."""

import os
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

from twinkle_jax.data import Message, SamplingParams, Trajectory
from twinkle_jax.sampler.vllm_server import Client, Deadline, Request, read_list, read_object
from twinkle_jax.twinkle.names import PAGE, add_submodules, refuse

_SAME = ("temperature", "top_p", "max_tokens", "seed")  # SamplingParams and OpenAI's body
_MISSING = {"top_k": -1, "min_p": 0.0, "include_stop_str_in_output": False, "prompt_logprobs": None}


class API(ABC):
    """A model that answers conversations."""

    @abstractmethod
    def __call__(
        self, trajectory: Trajectory, sampling_params: SamplingParams, **kwargs: Any
    ) -> Message | list[Message]:
        """Return the assistant's message; a list of `num_samples` if that is not 1."""


class OpenAI(API):
    """A model behind `/v1/chat/completions`: OpenAI's, vLLM's or any other.

    Requests are sent again after lost connections and errors of the server; proxies of the
    environment are not used. May be called by several threads.

    Args:
        model: its name there.
        api_key: None for `OPENAI_API_KEY` of the environment, if it is set.
        base_url: such as `http://localhost:8000/v1`; None for `OPENAI_BASE_URL`, or OpenAI's.
        client_kwargs: `timeout`, seconds of a call, 600 by default; `max_retries`, 2 by default.
    """

    def __init__(
        self,
        model: str,
        api_key: str | None = None,
        base_url: str | None = None,
        client_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        options = dict(client_kwargs or {})
        url = base_url or os.environ.get("OPENAI_BASE_URL") or "https://api.openai.com/v1"
        self.model, self._timeout = model, float(options.pop("timeout", 600))
        self._client = Client(
            url,
            api_key=api_key or os.environ.get("OPENAI_API_KEY") or None,
            retries=options.pop("max_retries", 2),
        )
        refuse("OpenAI", options)
        version = "/v1" if url.rstrip("/").endswith("/v1") else ""  # which the client leaves out
        self._path = f"{version}/chat/completions"

    def __call__(
        self, trajectory: Trajectory, sampling_params: SamplingParams, **kwargs: Any
    ) -> Message | list[Message]:
        """Ask for completions of a conversation.

        Args:
            trajectory: `messages`, and `tools` if there are any.
            sampling_params: `repetition_penalty - 1` becomes `frequency_penalty`, as in Twinkle.
                What the protocol does not have is refused.
            kwargs: further fields of the request, which win; `extra_body`, a dictionary of more;
                and `timeout`.

        Returns:
            The assistant's message, with those of `content`, `reasoning_content`, `tool_calls` and
            `finish_reason` that the answer has; a list of messages if `num_samples` is not 1.

        Raises:
            ServerError: for a server that cannot be reached, or an invalid answer.
            ValueError: for sampling parameters that the protocol does not have.
        """
        seconds = float(kwargs.pop("timeout", self._timeout))
        body = self._build_request(trajectory, sampling_params, kwargs)
        request = Request("POST", self._path, body, _read_messages, "a completion", 2**26)
        messages: list[Message] = self._client.send_request(Deadline(seconds), request)
        return messages[0] if sampling_params.num_samples == 1 else messages

    def _build_request(
        self, trajectory: Trajectory, params: SamplingParams, fields: Mapping[str, Any]
    ) -> dict[str, Any]:
        for name, default in _MISSING.items():
            if getattr(params, name) != default:
                raise ValueError(
                    f"{name} must be left out, which the protocol does not have, got "
                    f"{getattr(params, name)!r}: pass extra_body if the server knows it; see {PAGE}"
                )
        stops = [params.stop] if isinstance(params.stop, str) else list(params.stop or ())
        if any(isinstance(stop, int) for stop in stops):
            raise ValueError(f"stop must be strings, got token ids {stops}; see {PAGE}")
        body: dict[str, Any] = {"model": self.model, "messages": list(trajectory["messages"])}
        body |= {name: getattr(params, name) for name in _SAME if getattr(params, name) is not None}
        body["n"] = params.num_samples
        if tools := trajectory.get("tools"):
            body["tools"] = list(tools)
        if stops:
            body["stop"] = stops
        if params.logprobs is not None:
            body |= {"logprobs": True, "top_logprobs": params.logprobs}
        if params.repetition_penalty != 1:
            body["frequency_penalty"] = params.repetition_penalty - 1
        refused = {
            name: fields[name] for name in ("extra_headers", "extra_query") if name in fields
        }
        refuse("OpenAI", refused)
        more = {name: value for name, value in fields.items() if name != "extra_body"}
        return body | more | dict(fields.get("extra_body") or {})


def _read_messages(answer: Any) -> list[Message]:
    choices = read_list("choices", read_object("an object", answer))
    if not choices:
        raise ValueError("at least one choice, got none")
    return [_read_message(read_object("choices that are objects", choice)) for choice in choices]


def _read_message(choice: Mapping[str, Any]) -> Message:
    answer = read_object("a message in each choice", choice.get("message"))
    message: Any = {"role": "assistant"}
    if answer.get("content") is not None:
        message["content"] = answer["content"]
    if answer.get("reasoning_content"):
        message["reasoning_content"] = answer["reasoning_content"]
    if answer.get("tool_calls"):
        message["tool_calls"] = [_read_call(call) for call in read_list("tool_calls", answer)]
    if choice.get("finish_reason") is not None:
        message["finish_reason"] = choice["finish_reason"]
    return message


def _read_call(value: Any) -> dict[str, Any]:
    call = read_object("tool_calls that are objects", value)
    function = read_object("a function in each tool call", call.get("function"))
    named = {name: function.get(name) for name in ("name", "arguments")}
    return {"id": call.get("id"), "type": "function", "function": named}


add_submodules(__name__, "base", "openai")
