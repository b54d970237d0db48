"""Reward models: checkpoints with a head of one number, which scores a conversation."""

import dataclasses
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from twinkle_jax.data import Template, Trajectory, bucket_size
from twinkle_jax.data.batch import HostArray, batch_width, pad_rows
from twinkle_jax.model.decoder.config import DecoderConfig
from twinkle_jax.model.decoder.forward import hidden_states
from twinkle_jax.model.decoder.parameters import Params
from twinkle_jax.model.decoder.precision import exact_product
from twinkle_jax.model.decoder.sharding import check_mesh, partition_rules, row_shards
from twinkle_jax.model.huggingface.checkpoint import all_finite, read_config, read_params
from twinkle_jax.model.huggingface.checkpoint_files import (
    CONFIG,
    HEAD,
    locate,
    open_files,
    read_json,
    stored_tensors,
)
from twinkle_jax.reward import GroundTruths, Reward

_SCORE = "score.weight"  # the head of transformers' models for sequence classification
_TOKENS = 16384  # of a call of the decoder, padding included


class RewardModel(Reward):
    r"""A reward that a model computes: the score of a conversation by a trained head.

    $$r = w^\top h_T$$

    $h_T$ is the last hidden state of the conversation, in the chat template of the reward model,
    and $w$ its head. The numbers are those of `AutoModelForSequenceClassification` with one label.

    Args:
        config: the decoder.
        params: its parameters; a head for tokens is not needed.
        head: $w$.
        template: encodes conversations; what is too long for it is an error, or is cut.
        pad_token_id: as in the checkpoint's `config.json`: at the end of a conversation this token
            is not counted, so $T$ is the token before it. None counts all.
        compute_dtype: type of activations; None for that of the parameters.
        mesh: devices of the parameters, all of this process; None for one device.

    Raises:
        ValueError: if the head has another width than the decoder, or the template deletes or
            splits what is too long; when called, for a conversation that the template refuses, or
            scores that are not finite.

    References:
        [Fine-Tuning Language Models from Human Preferences](https://arxiv.org/abs/1909.08593)
        (Ziegler et al., 2019)

    Example:
        >>> import jax
        >>> from twinkle_jax.data import Template, small_tokenizer
        >>> from twinkle_jax.model import RewardModel, init_params, parse_config
        >>> template = Template(small_tokenizer("0123456789+="))
        >>> config = parse_config({
        ...     "model_type": "qwen2", "vocab_size": len(template.tokenizer), "hidden_size": 32,
        ...     "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
        ... })
        >>> params = init_params(jax.random.key(0), config)
        >>> reward = RewardModel(config, params, jax.numpy.ones(32), template)
        >>> question = {"role": "user", "content": "1+2="}
        >>> answers = [{"messages": [question, {"role": "assistant", "content": x}]} for x in "34"]
        >>> [type(score) for score in reward(answers)]
        [<class 'float'>, <class 'float'>]
    """

    def __init__(
        self,
        config: DecoderConfig,
        params: Params,
        head: Float[Array | np.ndarray, " width"],
        template: Template,
        *,
        pad_token_id: int | None = None,
        compute_dtype: DTypeLike | None = None,
        mesh: Mesh | None = None,
    ) -> None:
        if head.shape != (config.hidden_size,):
            raise ValueError(
                f"head must have the shape ({config.hidden_size},), the decoder's width, "
                f"got {head.shape}"
            )
        if template.truncation_strategy in ("delete", "split"):
            raise ValueError(
                "template must give one feature for each conversation, got truncation_strategy="
                f"{template.truncation_strategy!r}"
            )
        if mesh is not None:
            check_mesh(mesh)
        self.config = dataclasses.replace(config, logits_scaling=1.0)  # which scores do not have
        self.params, self.head, self.template = params, head, template
        self.pad_token_id, self.mesh = pad_token_id, mesh
        self.compute_dtype = compute_dtype

    @classmethod
    def from_pretrained(
        cls,
        path_or_id: str | Path,
        *,
        dtype: DTypeLike | None = None,
        mesh: Mesh | None = None,
        template: Template | None = None,
        argument: str = "path_or_id",
    ) -> Self:
        """Read a checkpoint of `AutoModelForSequenceClassification` with one label.

        Args:
            path_or_id: a directory or a hub id, of a family that `load_pretrained` reads.
            dtype: type of the parameters; None for that of the checkpoint, or float32 on a CPU,
                where bfloat16 is slow.
            mesh: devices to place the parameters on, all of this process; None for one.
            template: None for the checkpoint's own.
            argument: the user's name for `path_or_id` in errors.

        Raises:
            ValueError: as `load_pretrained`; if there is no `score.weight`, or it has several
                labels; if there is no chat template.
        """
        directory = locate(path_or_id, argument=argument)
        stored = stored_tensors(directory)
        config = read_config(directory)
        head = stored.pop(_SCORE, None)
        if head is None or head.shape != (1, config.hidden_size):
            got = "none" if head is None else f"one of the shape {head.shape}"
            raise ValueError(
                f"{argument} must be a reward model, with a tensor {_SCORE} of the shape "
                f"(1, {config.hidden_size}), got {got} in {directory}"
            )
        stored.pop(HEAD, None)
        config = dataclasses.replace(config, tie_embeddings=True)  # no head for tokens is read
        device = jax.local_devices()[0] if mesh is None else mesh.devices.flat[0]
        if dtype is None and device.platform == "cpu":
            dtype = "float32"
        with ExitStack() as stack:
            weights = open_files(stack, {_SCORE: head})[_SCORE].get_tensor(_SCORE)[0]
        if not all_finite(weights):
            raise ValueError(f"{_SCORE} must be finite, got NaN or infinity")
        if template is None:
            template = Template(directory, max_length=None)
        params = read_params(
            config,
            stored,
            dtype=dtype,
            mesh=mesh,
            partition=None if mesh is None else partition_rules(mesh),
        )
        content = read_json(directory, CONFIG)
        pad = content.get("text_config", content).get("pad_token_id")
        return cls(config, params, weights, template, pad_token_id=pad, mesh=mesh)

    def __call__(
        self, trajectories: Sequence[Trajectory], ground_truths: GroundTruths = None, **kwargs: Any
    ) -> list[float]:
        """Score each conversation; ground truths are not needed."""
        encoded = self.template.batch_encode(trajectories)
        rows = [self._without_padding(np.asarray(x["input_ids"])) for x in encoded]
        lengths = np.array([len(row) for row in rows], np.int32)
        scores = np.empty(len(rows), np.float32)
        shards = row_shards(self.mesh)
        multiple = 1 if self.mesh is None else self.mesh.shape["tensor"]
        for members, count, width in _batches(lengths, shards, multiple):
            values = _score(
                self.params,
                self.head,
                pad_rows([rows[i] for i in members], length=width, count=count, dtype=np.int32),
                pad_rows([lengths[members]], 1, length=count)[0],
                config=self.config,
                compute_dtype=self.compute_dtype,
                mesh=self.mesh,
            )
            scores[members] = np.asarray(values)[: len(members)]
        if not np.isfinite(scores).all():
            row = int(np.argmin(np.isfinite(scores)))
            raise ValueError(f"scores must be finite, got {scores[row]} for trajectory {row}")
        return [float(score) for score in scores]

    def _without_padding(self, tokens: HostArray) -> HostArray:
        """Leave out tokens for padding at the end; at least one token stays."""
        counted = np.flatnonzero(tokens != self.pad_token_id)
        return tokens[: counted[-1] + 1 if len(counted) else 1]


def _batches(
    lengths: HostArray, shards: int, multiple: int
) -> Iterator[tuple[HostArray, int, int]]:
    """Deal conversations of similar lengths to batches of few shapes, each of which is compiled.

    Yields:
        The conversations of a batch, its number of rows, and its width.
    """
    order = np.argsort(-lengths, kind="stable")
    while len(order):
        width = batch_width(int(lengths[order[0]]), multiple=multiple)
        most = max(_TOKENS // (width * shards), 1) * shards
        count = min(bucket_size(len(order), multiple=shards), most)
        yield order[:count], count, width
        order = order[count:]


@partial(jax.jit, static_argnames=("config", "compute_dtype", "mesh"))
def _score(
    params: Params,
    head: Float[Array, " width"],
    tokens: Int[Array, "rows time"],
    lengths: Int[Array, " rows"],
    *,
    config: DecoderConfig,
    compute_dtype: DTypeLike | None,
    mesh: Mesh | None,
) -> Float[Array, " rows"]:
    """Compute the score of each row at its last token; padding behind it has no effect."""
    hidden = hidden_states(
        params, config, tokens, compute_dtype=compute_dtype, remat=False, mesh=mesh
    )
    last = jnp.take_along_axis(hidden, lengths[:, None, None] - 1, axis=1)[:, 0]
    return exact_product(last.astype(jnp.float32), head.astype(jnp.float32)[:, None])[:, 0]
