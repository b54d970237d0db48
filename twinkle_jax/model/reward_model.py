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
from twinkle_jax.model.decoder.families import FAMILIES
from twinkle_jax.model.decoder.forward import Decoder, Remat, decoder_inputs, run
from twinkle_jax.model.decoder.parameters import Params, check_decoder
from twinkle_jax.model.decoder.precision import exact_product
from twinkle_jax.model.decoder.sharding import check_mesh, partition_rules, row_shards
from twinkle_jax.model.huggingface.adapter_files import save_tokenizer
from twinkle_jax.model.huggingface.checkpoint import (
    ScoreHead,
    all_finite,
    converted,
    read_config,
    read_params,
    save_checkpoint,
)
from twinkle_jax.model.huggingface.checkpoint_files import (
    CONFIG,
    HEADS,
    SCORE,
    locate,
    read_json,
    stored_tensors,
)
from twinkle_jax.model.huggingface.quantized import open_files
from twinkle_jax.reward import GroundTruths, Reward

_TOKENS = 16384  # of a call of the decoder, padding included


class RewardModel(Reward):
    r"""A reward that a model computes: the score of a conversation by a trained head.

    $$r = w^\top h_T$$

    $h_T$ is the last hidden state of the conversation, in the chat template of the reward model,
    and $w$ its head. The numbers are those of `AutoModelForSequenceClassification` with one label.

    To train it, follow gradients of [`reward_scores`][twinkle_jax.model.reward_scores], and assign
    the trained parameters and head to the attributes `params` and `head`.

    Args:
        config: the decoder.
        params: its parameters; a head for tokens is not needed.
        head: $w$.
        template: encodes conversations; those that are too long for it are an error, or are cut.
        pad_token_id: as in the checkpoint's `config.json`: at the end of a conversation this token
            is not counted, so $T$ is the token before it. None counts all.
        compute_dtype: type of activations; None for that of the parameters.
        mesh: devices of the parameters, all of this process; None for one device.

    Raises:
        ValueError: if the head has another width than the decoder, the template deletes or splits
            what is too long, or `pad_token_id` is not an int; when called, for a conversation that
            the template refuses, or scores that are not finite.

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
        if pad_token_id is not None and type(pad_token_id) is not int:
            raise ValueError(f"pad_token_id must be None or an int, got {pad_token_id!r:.80}")
        if mesh is not None:
            check_mesh(mesh)
        self.config, self.params, self.head, self.template = config, params, head, template
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
        new_head: bool = False,
        argument: str = "path_or_id",
    ) -> Self:
        """Read a checkpoint of `AutoModelForSequenceClassification` with one label, or a policy's.

        Args:
            path_or_id: a directory or a hub id, of a family that `load_pretrained` reads.
            dtype: type of the parameters; None for that of the checkpoint, or float32 on a CPU,
                where bfloat16 is slow.
            mesh: devices to place the parameters on, all of this process; None for one.
            template: None for the checkpoint's own.
            new_head: True begins with a head of zeros, to be trained, on the decoder of a policy.
                All scores are 0 then: the first update moves the head alone, and no random numbers
                are drawn. Without a `pad_token_id` in `config.json`, it is the tokenizer's.
            argument: the user's name for `path_or_id` in errors.

        Raises:
            ValueError: as `load_pretrained`; if there is no `score.weight`, or it has several
                labels; if there is one, with `new_head`; if there is no chat template.
        """
        directory = locate(path_or_id, argument=argument)
        stored = stored_tensors(directory)
        config = read_config(directory)
        stored = converted(stored, config, directory)
        head = stored.pop(SCORE, None)
        if new_head and head is not None:
            raise ValueError(
                f"new_head must be False for a checkpoint with a tensor {SCORE}, got True for "
                f"{directory}"
            )
        if not new_head and (head is None or head.shape != (1, config.hidden_size)):
            got = "none" if head is None else f"one of the shape {head.shape}"
            raise ValueError(
                f"{argument} must be a reward model, with a tensor {SCORE} of the shape "
                f"(1, {config.hidden_size}), got {got} in {directory}"
            )
        for name in HEADS:
            stored.pop(name, None)
        config = dataclasses.replace(config, tie_embeddings=True)  # no head for tokens is read
        device = jax.local_devices()[0] if mesh is None else mesh.devices.flat[0]
        if dtype is None and device.platform == "cpu":
            dtype = "float32"
        weights = np.zeros(config.hidden_size, np.float32)
        if head is not None:
            with ExitStack() as stack:
                stored_head = open_files(stack, {SCORE: head})[SCORE].get_tensor(SCORE)[0]
            with np.errstate(over="ignore"):
                weights = np.asarray(stored_head, np.float32)
        if not all_finite(weights):
            raise ValueError(f"{SCORE} must be finite, got NaN or infinity")
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
        if new_head and pad is None:
            pad = template.tokenizer.pad_token_id
        return cls(config, params, weights, template, pad_token_id=pad, mesh=mesh)

    def __call__(
        self, trajectories: Sequence[Trajectory], ground_truths: GroundTruths = None, **kwargs: Any
    ) -> list[float]:
        """Score each conversation; ground truths are not needed."""
        rows = self.encode(trajectories)
        lengths = np.array([len(row) for row in rows], np.int32)
        scores = np.empty(len(rows), np.float32)
        shards = row_shards(self.mesh)
        multiple = 1 if self.mesh is None else self.mesh.shape["tensor"]
        for members, count, width in _batches(lengths, shards, multiple):
            values = _score(
                self.params,
                self.head,
                self.config,
                pad_rows([rows[i] for i in members], length=width, count=count, dtype=np.int32),
                pad_rows([lengths[members]], 1, length=count)[0],
                compute_dtype=self.compute_dtype,
                remat=False,
                mesh=self.mesh,
            )
            scores[members] = np.asarray(values)[: len(members)]
        if not np.isfinite(scores).all():
            row = int(np.argmin(np.isfinite(scores)))
            raise ValueError(f"scores must be finite, got {scores[row]} for trajectory {row}")
        return [float(score) for score in scores]

    def encode(self, trajectories: Sequence[Trajectory]) -> list[HostArray]:
        """Return the tokens of each conversation that are scored, the last of them for the score.

        They are those of the chat template, without `pad_token_id` at the end; at least one stays.
        """
        rows = []
        for feature in self.template.batch_encode(trajectories):
            tokens = np.asarray(feature["input_ids"], np.int32)
            counted = np.flatnonzero(tokens != self.pad_token_id)
            rows.append(tokens[: counted[-1] + 1 if len(counted) else 1])
        return rows

    def save_pretrained(
        self,
        directory: str | Path,
        *,
        dtype: DTypeLike | None = None,
        max_shard_size: int = 5_000_000_000,
    ) -> None:
        """Write a checkpoint that `from_pretrained` and `AutoModelForSequenceClassification` read.

        It has one label, this `pad_token_id`, and the template's tokenizer and chat template; no
        head for tokens, and of a vision-language checkpoint the text model alone. transformers has
        no such class for Granite, OLMoE, ERNIE 4.5, Solar Open, Gemma 4, GLM-4.5 to GLM-4.7,
        Youtu-LLM and the mixtures of experts of Qwen3.5.
        Without a `pad_token_id` it scores one conversation at a time.

        Directories, types, files and processes are as for
        [`save_pretrained`][twinkle_jax.model.save_pretrained].

        Args:
            directory: where to write; an earlier checkpoint there is replaced in one step.
            dtype: type to write; by default that of each parameter, and of the head.
            max_shard_size: bytes of tensors per file; several files get an index.

        Raises:
            ValueError: as the function `save_pretrained`; also for a head that is not finite.
            RuntimeError: on other processes, for an error of process 0.
            ImportError: if safetensors is not installed.
        """
        family = FAMILIES[self.config.model_type].architecture.removesuffix("ForCausalLM")
        text = "Text" if self.config.model_type.endswith("_text") else ""
        entries = {
            "architectures": [f"{family}{text}ForSequenceClassification"],
            "num_labels": 1,
            "id2label": {"0": "LABEL_0"},
            "label2id": {"LABEL_0": 0},
            "pad_token_id": self.pad_token_id,
        }
        # Tied, so that a head for tokens is not written.
        decoder = Decoder(dataclasses.replace(self.config, tie_embeddings=True), self.params)
        save_checkpoint(
            decoder,
            directory,
            dtype=dtype,
            max_shard_size=max_shard_size,
            head=ScoreHead(jnp.asarray(self.head), entries, partial(save_tokenizer, self.template)),
        )


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


def reward_scores(
    params: Params,
    head: Float[Array | np.ndarray, " width"],
    config: DecoderConfig,
    tokens: Int[Array, "rows time"],
    lengths: Int[Array, " rows"],
    *,
    compute_dtype: DTypeLike | None = None,
    remat: Remat = True,
    mesh: Mesh | None = None,
) -> Float[Array, " rows"]:
    r"""Score rows of tokens as `RewardModel` does; differentiable in parameters and head.

    $$r = w^\top h_T$$

    Args:
        params: the decoder's parameters; a head for tokens is not needed.
        head: $w$.
        config: the decoder; static under `jax.jit`.
        tokens: token ids, as `RewardModel.encode` returns them, padded at the end. Padding may hold
            anything, and has no effect.
        lengths: $T$, the tokens of each row without padding, at least 1; another number makes its
            score NaN.
        compute_dtype: as for [`hidden_states`][twinkle_jax.model.hidden_states].
        remat: likewise.
        mesh: likewise.

    Returns:
        A float32 score for each row.

    Raises:
        ValueError: if shapes differ, or the mesh does not divide the rows or the key-value heads.
        TypeError: if tokens or lengths are not integers.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from twinkle_jax.model import init_params, parse_config, reward_scores
        >>> config = parse_config({
        ...     "model_type": "qwen2", "vocab_size": 64, "hidden_size": 32,
        ...     "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
        ... })
        >>> params, head = init_params(jax.random.key(0), config), jnp.zeros(32)
        >>> tokens, lengths = jnp.array([[5, 6, 7], [8, 0, 0]]), jnp.array([3, 1])
        >>> print(reward_scores(params, head, config, tokens, lengths))
        [0. 0.]
    """
    check_decoder(params, config)
    tokens, lengths = jnp.asarray(tokens), jnp.asarray(lengths)  # NumPy's may have 64 bits
    if head.shape != (config.hidden_size,):
        raise ValueError(f"head must have the shape ({config.hidden_size},), got {head.shape}")
    if lengths.shape != tokens.shape[:1]:
        raise ValueError(f"lengths must have the shape {tokens.shape[:1]}, got {lengths.shape}")
    if not jnp.issubdtype(lengths.dtype, jnp.integer):
        raise TypeError(f"lengths must be integers, got {lengths.dtype}")
    config = dataclasses.replace(config, logits_scaling=1.0)  # which scores do not have
    time = tokens.shape[-1]
    kept = jnp.arange(time, dtype=lengths.dtype)[None] < lengths[:, None]
    inputs = decoder_inputs(config, tokens, kept)
    hidden, *_ = run(params, config, inputs, compute_dtype, None, remat, mesh=mesh)
    last = jnp.take_along_axis(hidden, jnp.clip(lengths, 1, time)[:, None, None] - 1, axis=1)[:, 0]
    weights = jnp.asarray(head, jnp.float32)[:, None]
    scores = exact_product(last.astype(jnp.float32), weights)[:, 0]
    return jnp.where((lengths >= 1) & (lengths <= time), scores, jnp.nan)


_score = jax.jit(reward_scores, static_argnames=("config", "compute_dtype", "remat", "mesh"))
