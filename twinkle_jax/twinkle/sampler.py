"""Twinkle's `sampler`: in this program, or on a server that you run."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from jax.sharding import Mesh

from twinkle_jax.data import (
    LogprobsKind,
    SampleResponses,
    SamplingParams,
    StopReason,
    Template,
)
from twinkle_jax.sampler import JaxSampler
from twinkle_jax.sampler import vLLMSampler as ServedSampler
from twinkle_jax.sampler.requests import read_params
from twinkle_jax.twinkle.infra import DeviceMesh, mesh_of, note_group
from twinkle_jax.twinkle.names import (
    PAGE,
    add_submodules,
    local_id,
    refuse,
    warn_once,
)
from twinkle_jax.twinkle.template import make_template


class vLLMSampler:  # noqa: N801  (Twinkle's name)
    """Samples on a vLLM server with `base_url`, otherwise in this program, with a warning.

    In this program a [`JaxSampler`][twinkle_jax.sampler.JaxSampler] with its own parameters, which
    `sync_weights` replaces, draws from the same distribution.

    Args:
        model_id: a directory with a Hugging Face checkpoint, or a hub id.
        engine_args: vLLM's `max_model_len` and `enable_return_routed_experts` and, in this program,
            `dtype` and `logprobs_mode="raw_logprobs"`, which is correct at temperature 1 only.
            Options for memory, caches and adapters change nothing; others are refused.
        device_mesh: mesh of the parameters, in this program; None for that of `initialize`.
        remote_group: unused, with a warning.
        base_url: `http://HOST:PORT` of a server.
        options: further arguments of [`vLLMSampler`][twinkle_jax.sampler.vLLMSampler], such as
            `shared_dir`, or of `JaxSampler`.
    """

    def __init__(
        self,
        model_id: str | Path,
        engine_args: Mapping[str, Any] | None = None,
        device_mesh: DeviceMesh | Mesh | None = None,
        *,
        remote_group: str | None = None,
        base_url: str | None = None,
        **options: Any,
    ) -> None:
        engine = dict(engine_args or {})
        options.setdefault("max_length", engine.pop("max_model_len", None))
        note_group(remote_group)
        self._model_id = model_id = local_id(model_id)
        self._sampler: JaxSampler | ServedSampler
        self._raw: str | None = None  # set: log-probabilities are expected at temperature 1
        if engine.pop("enable_return_routed_experts", False):
            options["return_routed_experts"] = True
        if base_url is not None:
            if engine:
                warn_once("engine_args are the server's, which is started with its own")
            self._sampler = ServedSampler(model_id=model_id, base_url=base_url, **options)
        else:
            options |= {"dtype": engine.pop("dtype")} if "dtype" in engine else {}
            self._raw = engine.pop("logprobs_mode", None)
            if self._raw not in (None, "raw_logprobs"):
                raise ValueError(
                    f"logprobs_mode must be 'raw_logprobs' or left out, got {self._raw!r}: sample "
                    f"chooses the distribution by logprobs_kind; see {PAGE}"
                )
            refuse("vLLMSampler", engine)
            warn_once("vLLMSampler without base_url samples in this program, without vLLM")
            self._sampler = JaxSampler(model_id=model_id, mesh=mesh_of(device_mesh), **options)

    @property
    def template(self) -> Template | None:
        """The template that `set_template` set, or the model's."""
        return self._sampler.template

    @property
    def max_length(self) -> int:
        """The most tokens of a row, prompt included."""
        return self._sampler.max_length

    def set_template(self, template_cls: Any, **options: Any) -> None:
        """Choose a template: a name or a class with its arguments, or an object.

        Without `model_id` among the arguments, the tokenizer is that of the sampler's checkpoint.
        """
        self._sampler.set_template(make_template(template_cls, self._model_id, **options))

    def sample(
        self,
        inputs: Any,
        sampling_params: SamplingParams | Mapping[str, Any] | None = None,
        adapter_name: str = "",
        adapter_path: str | Path | None = None,
        *,
        num_samples: int = 1,
        logprobs_kind: LogprobsKind | None = "policy",
        use_base_model: bool = False,
        return_encoded: bool = False,
    ) -> SampleResponses:
        """Sample completions, as [`JaxSampler.sample`][twinkle_jax.sampler.JaxSampler.sample].

        `adapter_name` changes nothing: the weights are those of the last `sync_weights`. Neither
        does `return_encoded`, as in Twinkle: sequences always have `new_input_feature`.
        `adapter_path` is a directory with an adapter in PEFT's format, and `use_base_model` leaves
        adapters out, in this program only.
        """
        temperature = read_params(sampling_params).temperature
        if self._raw and temperature not in (0, 1):
            raise ValueError(
                f"temperature must be 1 or 0 with logprobs_mode='raw_logprobs', got {temperature}"
            )
        sampler = self._sampler
        if use_base_model:
            sampler = self._in_process("use_base_model").without_adapter()
        elif adapter_path is not None:
            sampler = self._adapted("adapter_path", adapter_path)
        responses = sampler.sample(
            inputs, sampling_params, num_samples=num_samples, logprobs_kind=logprobs_kind
        )
        self._sampler.calls = sampler.calls  # no two calls share noise
        return responses

    def sample_stream(
        self,
        inputs: Any,
        sampling_params: SamplingParams | Mapping[str, Any] | None = None,
        adapter_name: str = "",
        adapter_path: str | Path | None = None,
    ) -> Iterator[tuple[str, StopReason | None]]:
        """Yield the text of a completion while it is drawn, in this program only.

        As [`JaxSampler.stream`][twinkle_jax.sampler.JaxSampler.stream]; the arguments are those of
        `sample`.
        """
        sampler = self._adapted("sample_stream", adapter_path)
        try:
            yield from sampler.stream(inputs, sampling_params)
        finally:
            self._sampler.calls = sampler.calls  # no two calls share noise

    def sync_weights(self, actor: Any, *, merge: bool = False) -> None:
        """Take over a policy's weights."""
        if isinstance(self._sampler, ServedSampler):
            self._sampler.sync_weights(actor, merge=merge)
        else:
            self._sampler.sync_weights(actor)

    def sleep(self, level: int = 1) -> None:
        """Free the devices' memory of the sampler's parameters, in this program only."""
        self._in_process("sleep").sleep(level)

    def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Bring the parameters back, unless `tags` are of something else."""
        if tags is None or "weights" in tags:
            self._in_process("wake_up").wake_up()

    def _adapted(self, name: str, adapter_path: str | Path | None) -> JaxSampler:
        sampler = self._in_process(name)
        if adapter_path is None:
            return sampler
        return sampler.with_adapter(local_id(adapter_path, "adapter_path"))

    def _in_process(self, name: str) -> JaxSampler:
        if isinstance(self._sampler, JaxSampler):
            return self._sampler
        raise ValueError(f"{name} must be left out with a server; see {PAGE}")

    def reset_prefix_cache(self) -> None:
        """Do nothing: no cache outlives a call here, and servers clear theirs with new weights."""

    def reset_mm_cache(self) -> None:
        """Do nothing."""

    def reset_encoder_cache(self) -> None:
        """Do nothing."""


__all__ = ["JaxSampler", "vLLMSampler"]

add_submodules(__name__, "base", "vllm_sampler", "vllm_sampler.vllm_sampler")
