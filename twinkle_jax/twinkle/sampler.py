"""Twinkle's `sampler`: in this program, or on a server that you run."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from twinkle_jax.data import (
    LogprobsKind,
    SampleResponses,
    SamplingParams,
    Template,
)
from twinkle_jax.model import load_adapter, merge_params
from twinkle_jax.model.decoder.lora import adapter_scales
from twinkle_jax.sampler import JaxSampler
from twinkle_jax.sampler import vLLMSampler as ServedSampler
from twinkle_jax.sampler.requests import read_params
from twinkle_jax.twinkle.infra import DeviceMesh, mesh_of, note_group
from twinkle_jax.twinkle.names import (
    PAGE,
    add_submodules,
    construct,
    local_id,
    refuse,
    warn_once,
)


class vLLMSampler:  # noqa: N801  (Twinkle's name)
    """Twinkle's sampler: on a vLLM server with `base_url`, otherwise in this program.

    Without a server [`JaxSampler`][twinkle_jax.sampler.JaxSampler] draws, from the same
    distribution, and a warning says so once. It has parameters of its own, which `sync_weights`
    replaces.

    Args:
        model_id: a directory with a Hugging Face checkpoint, or a hub id.
        engine_args: of vLLM's options `max_model_len` and, in this program, `dtype` and
            `logprobs_mode="raw_logprobs"`, which is right at temperature 1 alone, are followed.
            Those about memory, caches and adapters change no result; a server has its own. Others
            are refused.
        device_mesh: over which parameters lie, in this program; None for that of `initialize`.
        remote_group: unused, and said once.
        base_url: where a server is, `http://HOST:PORT`.
        options: further arguments of [`vLLMSampler`][twinkle_jax.sampler.vLLMSampler], `shared_dir`
            for one, or of `JaxSampler`.

    Raises:
        ValueError: as those.
        TypeError: for an unknown option.
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
        place = local_id(model_id)
        self._sampler: JaxSampler | ServedSampler
        self._raw: str | None = None  # whether log-probabilities are those at temperature 1
        if base_url is not None:
            if engine:
                warn_once("engine_args are the server's, which is started with its own")
            self._sampler = ServedSampler(model_id=place, base_url=base_url, **options)
        else:
            options |= {"dtype": engine.pop("dtype")} if "dtype" in engine else {}
            self._raw = engine.pop("logprobs_mode", None)
            if self._raw not in (None, "raw_logprobs"):
                raise ValueError(
                    f"logprobs_mode must be 'raw_logprobs', got {self._raw!r}; see {PAGE}"
                )
            refuse("vLLMSampler", engine)
            warn_once("vLLMSampler without base_url samples in this program, without vLLM")
            self._sampler = JaxSampler(model_id=place, mesh=mesh_of(device_mesh), **options)

    @property
    def template(self) -> Template | None:
        """What makes tokens of conversations, and text of tokens."""
        return self._sampler.template

    def set_template(self, template_cls: Any, **options: Any) -> None:
        """Choose a template: a name with its arguments, a class, or an object."""
        self._sampler.set_template(construct(template_cls, "template", **options))

    def sample(
        self,
        inputs: Any,
        sampling_params: SamplingParams | Mapping[str, Any] | None = None,
        adapter_name: str = "",
        adapter_path: str | Path | None = None,
        *,
        num_samples: int = 1,
        logprobs_kind: LogprobsKind | None = "policy",
    ) -> SampleResponses:
        """Draw completions.

        Args:
            inputs: trajectories, input features or strings, or one of them.
            sampling_params: how to draw.
            adapter_name: unused: the weights are those of the last `sync_weights`, adapters
                included.
            adapter_path: a directory with an adapter in PEFT's format to sample with, in this
                program.
            num_samples: completions of each prompt; 1 leaves it to the parameters.
            logprobs_kind: as for [`JaxSampler.sample`][twinkle_jax.sampler.JaxSampler.sample].

        Raises:
            ValueError: as the samplers, and for an adapter on a server or upon another one.
        """
        temperature = read_params(sampling_params).temperature
        if self._raw and temperature not in (0, 1):
            raise ValueError(
                f"temperature must be 1 or 0 with logprobs_mode='raw_logprobs', got {temperature}"
            )
        sampler = self._sampler if adapter_path is None else self._with_adapter(adapter_path)
        responses = sampler.sample(
            inputs, sampling_params, num_samples=num_samples, logprobs_kind=logprobs_kind
        )
        self._sampler.calls = sampler.calls  # no two calls share noise
        for response in responses:
            response.topk_prompt_logprobs = likeliest(response.topk_prompt_logprobs)
        return responses

    def sync_weights(self, actor: Any, *, merge: bool = False) -> None:
        """Take over a policy's weights."""
        if isinstance(self._sampler, ServedSampler):
            self._sampler.sync_weights(actor, merge=merge)
        else:
            self._sampler.sync_weights(actor)

    def reset_prefix_cache(self) -> None:
        """Do nothing: no cache outlives a call here, and a server forgets its own with weights."""

    def reset_mm_cache(self) -> None:
        """Do nothing, likewise."""

    def reset_encoder_cache(self) -> None:
        """Do nothing, likewise."""

    def _with_adapter(self, place: str | Path) -> JaxSampler:
        """Return a sampler with an adapter over the parameters, which it shares."""
        sampler = self._sampler
        if not isinstance(sampler, JaxSampler):
            raise ValueError(
                "adapter_path must be left out with a server: sync_weights takes adapters there; "
                "see docs/from_twinkle.md"
            )
        paths, _ = jax.tree_util.tree_flatten_with_path(sampler.params)
        if any("lora_A" in jax.tree_util.keystr(path) for path, _ in paths):
            raise ValueError("adapter_path must be left out: sync_weights has brought an adapter")
        lora, adapter = load_adapter(local_id(place, "adapter_path"), sampler.config)
        return sampler.with_params(
            merge_params(
                merge_params(sampler.params, adapter_scales(sampler.config, lora)), adapter
            )
        )


def likeliest(rows: Sequence[Any] | None) -> list[Any] | None:
    """Order likely tokens by probability, as many at each position; servers add the token's own."""
    if rows is None:
        return None
    count = min((len(row) for row in rows if row), default=0)
    return [row and sorted(row, key=lambda pair: -pair[1])[:count] for row in rows]


__all__ = ["JaxSampler", "vLLMSampler"]

add_submodules(__name__, "base", "vllm_sampler", "vllm_sampler.vllm_sampler")
