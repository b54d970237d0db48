"""What a run samples with: this process, or a vLLM server that loads the policy's weights."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from twinkle_jax.data import IGNORE, Batch
from twinkle_jax.data.batch import batch_width, pad_rows
from twinkle_jax.model import DecoderConfig, Params
from twinkle_jax.model.decoder.sharding import row_shards
from twinkle_jax.rollout import Engine, LocalEngine, hosts
from twinkle_jax.rollout.server_engine import ServerEngine, SharedClient, option_names
from twinkle_jax.sampler.vllm_sampler import ServedSampler
from twinkle_jax.sampler.vllm_server import Client, Routing
from twinkle_jax.sampler.vllm_weights import names_of
from twinkle_jax.training.config import TrainConfig
from twinkle_jax.training.policy import Policy, save_policy
from twinkle_jax.training.score import score_batch


def make_engine(
    config: TrainConfig,
    policy: Policy,
    mesh: Mesh | None = None,
    *,
    note: Callable[[str], None] = lambda sentence: None,
) -> Engine:
    """Make the engine of a run: `config.server`, or this process without one.

    Args:
        config: of the run, with its `dtype` chosen.
        policy: whose parameters, or later ones, each call is given.
        mesh: of the parameters; None for one device.
        note: shows a sentence to the user, such as that a server is waited for.

    Raises:
        ValueError: if a server cannot sample with these settings, `overlap` is set in a run of
            several processes whose episodes have several turns, or `update.replay_routing` for a
            policy without experts.
    """
    server, routing = config.server, replayed_routing(config, policy.config)
    replays_sampler = config.update.replay_routing == "sampler"
    if server.url is None:
        return LocalEngine(
            policy.config,
            policy.template,
            policy.frozen,
            config.dtype,
            mesh,
            keep_routing=replays_sampler,
        )
    if server.overlap and config.many_turns and hosts.several():
        # After each turn processes exchange what environments answered, between the updates'
        # own collectives.
        raise ValueError(
            "server.overlap must be false with an environment or tools in several processes, got "
            f"true in a run of {jax.process_count()}"
        )
    key = os.environ.get("VLLM_API_KEY") or None
    directory = (
        Path(server.shared_dir or Path(config.output_dir) / "weights").expanduser().resolve()
    )
    model = policy.base or config.model or ""
    names = names_of(model, server.served_name)
    if config.resume != "never" and server.served_name is None and Path(model).is_absolute():
        # The server may have the relative path that the run was started with elsewhere.
        parts = Path(model).parts
        names += [str(Path(*parts[start:])) for start in range(1, len(parts))]
    with option_names():
        served = ServedSampler(
            Client(server.url, api_key=key),
            names,
            policy.config.vocab_size,
            config.longest_row,
            tolerance=server.tolerance,
            timeout=server.timeout,
            loader=SharedClient(server.url, api_key=key) if hosts.several() else None,
            routing=routing if replays_sampler else None,
        )

    def actor(params: Params) -> PolicyActor:
        return PolicyActor(policy._replace(params=params), np.dtype(config.dtype), mesh)

    return ServerEngine(
        served,
        directory,
        actor,
        policy.template,
        config.rollout,
        mesh=mesh,
        seeded=server.seeded,
        patience=server.patience,
        note=note,
    )


def replayed_routing(config: TrainConfig, decoder: DecoderConfig) -> Routing | None:
    """Return the experts whose choice `update.replay_routing` replays; None if it is not set.

    Raises:
        ValueError: if it is set for a policy without experts.
    """
    replayed, routing = config.update.replay_routing, Routing.of(decoder)
    if replayed == "none":
        return None
    if routing is None or routing.dense >= routing.layers:
        raise ValueError(
            "update.replay_routing must be none for a policy without experts, got "
            f"{replayed} for {decoder.model_type!r}"
        )
    return routing


class PolicyActor:
    """A policy as `vLLMSampler.sync_weights` takes it; its weights are written in `dtype`."""

    def __init__(self, policy: Policy, dtype: np.dtype[Any], mesh: Mesh | None) -> None:
        self.policy, self.dtype, self.mesh = policy, dtype, mesh
        self.config, self.source, self.template = policy.config, policy.source, policy.template

    @property
    def params(self) -> Params:
        """All parameters, adapters included."""
        return self.policy.weights

    def save(self, name: Path, /) -> None:
        """Write the adapters, or the checkpoint if there are none."""
        save_policy(self.policy, name)

    def forward_only(self, *, inputs: Any) -> dict[str, np.ndarray]:
        """Score the tokens of each row after its first; `logps` [rows, time], 0 for padding."""
        rows = [np.asarray(feature["input_ids"], np.int32) for feature in inputs]
        mesh = self.mesh
        count = len(rows) + -len(rows) % row_shards(mesh)
        multiple = 1 if mesh is None else mesh.shape["tensor"]
        width = batch_width(max(map(len, rows)), multiple=multiple)
        following = [row[1:] for row in rows]
        arrays: Any = (
            pad_rows(rows, length=width, count=count, dtype=np.int32),
            pad_rows(following, IGNORE, length=width, count=count, dtype=np.int32),
        )
        scores = score_batch(
            self.policy.params,
            Batch(*arrays),
            self.config,
            frozen=self.policy.frozen,
            compute_dtype=self.dtype,
            mesh=mesh,
        )
        return {"logps": np.asarray(hosts.read_if_spread(scores.logps))[: len(rows)]}
