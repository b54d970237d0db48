"""The policy of a run: a checkpoint or a small built-in decoder, with adapters or without."""

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.typing import DTypeLike

from twinkle_jax.data import (
    Template,
    Tokenizer,
    Trajectory,
    small_tokenizer,
)
from twinkle_jax.loss import CrossEntropyLoss
from twinkle_jax.model import (
    Decoder,
    DecoderConfig,
    LoraConfig,
    Params,
    init_params,
    load_adapter,
    load_pretrained,
    merge_adapter,
    merge_params,
    parse_config,
    partition_rules,
    save_adapter,
    save_pretrained,
    with_adapter,
)
from twinkle_jax.model.decoder.lora import init_adapter
from twinkle_jax.model.decoder.parameters import cast_params
from twinkle_jax.model.decoder.sharding import place_params
from twinkle_jax.model.huggingface.adapter_files import save_tokenizer
from twinkle_jax.model.huggingface.checkpoint_files import ADAPTER_CONFIG, CONFIG, locate, read_json
from twinkle_jax.model.huggingface.saving import names_path
from twinkle_jax.rollout import hosts
from twinkle_jax.sampler.jax_sampler import key_of_seed
from twinkle_jax.training.by_name import make_optimizer
from twinkle_jax.training.examples import example_rows
from twinkle_jax.training.gradient import grad_step
from twinkle_jax.training.run_directory import holds_run, started_in
from twinkle_jax.training.state import apply_gradients, begin_training

_CHARACTERS = "0123456789+-*()="
_SMALL = {
    "model_type": "qwen3",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}


class Policy(NamedTuple):
    """A decoder with its chat template and tokenizer.

    Attributes:
        params: the trained parameters: all, or those of adapters.
        config: the architecture; static.
        template: the chat template, with the tokenizer.
        frozen: parameters that `params` are merged over; None if all are trained.
        lora: configuration of the adapters; None without adapters.
        base: the checkpoint that adapters belong to; None without adapters.
        source: the directory that the decoder was read from; None if it was not.
    """

    params: Params
    config: DecoderConfig
    template: Template
    frozen: Params | None = None
    lora: LoraConfig | None = None
    base: str | None = None
    source: Path | None = None

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer of the template."""
        return self.template.tokenizer

    @property
    def weights(self) -> dict[str, Any]:
        """All parameters, adapters merged beside their kernels, without copies."""
        return merge_params(self.frozen, self.params)


def small_policy(seed: int = 0) -> Policy:
    """Make a Qwen3 of 114,000 random parameters that spells arithmetic, one token a character."""
    template = Template(small_tokenizer(_CHARACTERS), max_length=None)
    config = parse_config({**_SMALL, "vocab_size": len(template.tokenizer)})
    key = jax.random.fold_in(key_of_seed(seed), 0x1417)  # a different key from those of the run
    return Policy(init_params(key, config), config, template)


def load_policy(
    path_or_id: str,
    *,
    dtype: DTypeLike = "float32",
    mesh: Mesh | None = None,
    argument: str = "path_or_id",
    chat_template: str | None = None,
) -> Policy:
    """Read a policy and its tokenizer.

    Args:
        path_or_id: a Hugging Face checkpoint, or an adapter in PEFT's format, which names its base:
            a directory, or a hub id. A relative one is that of the current directory, as in PEFT,
            or else of the adapter's, or of the one that its run was started in. The built-in policy
            that a run's adapters belong to is in the directory of the run, or of its export,
            wherever that is now. A tokenizer beside an adapter that has a chat template replaces
            that of its base.
        dtype: of the parameters; those of an adapter are in float32.
        mesh: devices to place the parameters on; None for one device.
        argument: what errors call `path_or_id`.
        chat_template: for a tokenizer that has none.

    Returns:
        The policy.

    Raises:
        ValueError: if the checkpoint or the tokenizer is invalid, or the base is a revision of a
            hub id other than `main`.
    """
    place = locate(path_or_id, argument=argument)
    if not (place / ADAPTER_CONFIG).exists():
        return _load_checkpoint(path_or_id, dtype, mesh, argument, chat_template)
    tuned = Tokenizer.from_pretrained(place) if (place / "tokenizer.json").is_file() else None
    base, named = base_of(place)
    base_policy = _load_checkpoint(base, dtype, mesh, named, chat_template, tuned)
    lora, adapter = load_adapter(place, base_policy.config)
    return attach_adapter(base_policy, lora, adapter, base=base, dtype=dtype, mesh=mesh)


def base_of(place: Path) -> tuple[str, str]:
    """Find the base of the adapter in a directory, see `load_policy`; and what errors call it."""
    content = read_json(place, ADAPTER_CONFIG)
    base, revision = content.get("base_model_name_or_path"), content.get("revision")
    if not isinstance(base, str):
        raise ValueError(f"{place / ADAPTER_CONFIG} must name its base model, got {base!r}")
    if revision not in (None, "main") and not Path(base).expanduser().is_dir():
        raise ValueError(
            f"revision of {place / ADAPTER_CONFIG} must be 'main' or null, got {revision!r}: "
            f"download that revision of {base}, and name its directory as "
            "base_model_name_or_path"
        )
    named = f"base_model_name_or_path of {place / ADAPTER_CONFIG}"
    run = place.resolve().parent
    # The base of a run or an export may have been moved, and another be where it was.
    base_here = run / "base" if place.resolve() == run / "policy" else place.resolve() / "base"
    if Path(base).name == "base" and Path(base).is_absolute() and base_here.is_dir():
        base = str(base_here)
    elif not Path(base).expanduser().is_dir():
        places: list[str | Path | None] = [place]
        if place.resolve() == run / "policy" and holds_run(run):
            places.append(started_in(run))
        paths = [Path(directory, base).resolve() for directory in places if directory is not None]
        beside = next(filter(Path.is_dir, paths), None)
        if beside is not None:
            base = str(beside)
        elif not Path(base).is_absolute():
            named += f", looked for in {Path.cwd()} and in {place.resolve()},"
        elif Path(base).name == "base":
            named += f", looked for there and in {base_here},"
    return base, named


def _load_checkpoint(
    path_or_id: str,
    dtype: DTypeLike,
    mesh: Mesh | None,
    argument: str,
    chat_template: str | None,
    tuned: Tokenizer | None = None,
) -> Policy:
    """Read a checkpoint; `tuned` is the tokenizer that an adapter was trained with."""
    place = locate(path_or_id, argument=argument)
    if (place / "policy" / CONFIG).exists() and "model_type" not in read_json(place, CONFIG):
        raise ValueError(
            f"{argument} must be a checkpoint or an adapter, got the directory of a run, {place}: "
            f"its policy is {place / 'policy'}"
        )
    rules = None if mesh is None else partition_rules(mesh)
    decoder = load_pretrained(path_or_id, dtype=dtype, mesh=mesh, partition=rules)
    tokenizer = Tokenizer.from_pretrained(path_or_id, argument=argument)
    if tuned is not None and tuned.chat_template is not None:
        # PEFT leaves what ends a completion with the base.
        tuned.generation_config = tuned.generation_config or tokenizer.generation_config
        tokenizer = tuned
    size = decoder.config.vocab_size
    beyond = _tokens_beyond(tokenizer, size)
    if beyond:
        raise ValueError(
            f"{argument} must have a tokenizer with ids below {size}, the size of its embedding, "
            f"got {beyond[0]!r} beyond it in {path_or_id}"
        )
    # Runs have limits of their own for prompts and episodes.
    template = Template(
        tokenizer, max_length=None, chat_template=tokenizer.chat_template or chat_template
    )
    return Policy(decoder.params, decoder.config, template, source=decoder.source)


def _tokens_beyond(tokenizer: Tokenizer, size: int) -> list[str]:
    """Name the tokens that have no embedding, but that text or the chat template can have.

    Gemma 3 1B has a token for images without an embedding; text never becomes a special token.
    """
    added = tokenizer.backend.get_added_tokens_decoder()
    template = tokenizer.chat_template or ""
    used = (tokenizer.bos_token_id, tokenizer.eos_token_id)
    return [
        token
        for token, id_ in tokenizer.backend.get_vocab(with_added_tokens=True).items()
        if id_ >= size
        and (id_ not in added or not added[id_].special or id_ in used or token in template)
    ]


def add_adapter(
    policy: Policy,
    lora: LoraConfig,
    *,
    base: str,
    seed: int = 0,
    dtype: DTypeLike = "float32",
    mesh: Mesh | None = None,
) -> Policy:
    """Freeze a policy's parameters, and add adapters, which change nothing until trained.

    Args:
        policy: without adapters.
        lora: configuration of the adapters.
        base: the policy's checkpoint, which saved adapters name.
        seed: of the random A; B starts at 0.
        dtype: of the frozen parameters.
        mesh: devices; None for one.

    Raises:
        ValueError: if a target is no projection of this decoder.
    """
    adapter = init_adapter(key_of_seed(seed), policy.config, lora)
    return attach_adapter(policy, lora, adapter, base=base, dtype=dtype, mesh=mesh)


def attach_adapter(
    policy: Policy,
    lora: LoraConfig,
    adapter: Params,
    *,
    base: str,
    dtype: DTypeLike,
    mesh: Mesh | None,
) -> Policy:
    """Freeze a policy's parameters, and train adapters instead."""
    frozen = with_adapter(cast_params(policy.params, dtype), policy.config, lora)
    if mesh is not None:
        frozen, adapter = place_params(frozen, mesh), place_params(adapter, mesh)
    return policy._replace(params=adapter, frozen=frozen, lora=lora, base=base)


def save_policy(
    policy: Policy,
    directory: str | Path,
    *,
    merge: bool = False,
    dtype: DTypeLike | None = None,
) -> None:
    """Write a policy with its tokenizer and chat template, if it has them.

    A whole checkpoint keeps the tensors that are not trained of the one that the policy was read
    from: vision towers, heads that predict several tokens. See `save_pretrained`.

    Args:
        policy: with or without adapters.
        directory: where to write a checkpoint that transformers, vLLM and `load_policy` read; the
            adapters alone, in PEFT's format, if there are any.
        merge: True adds adapters to the kernels, and writes a whole checkpoint.
        dtype: type of a whole checkpoint; None for that of the parameters.
    """
    tokenizer: Any = policy.template
    if not isinstance(tokenizer, Template):  # scripts may have templates of other kinds
        tokenizer = getattr(tokenizer, "tokenizer", None)
    if policy.lora is not None and not merge:
        save_adapter(
            directory,
            policy.config,
            policy.lora,
            policy.params,
            base=policy.base,
            tokenizer=tokenizer,
        )
        return
    params = policy.weights
    if policy.lora is not None:
        params = merge_adapter(params)
    decoder = Decoder(policy.config, params, source=policy.source)
    save_pretrained(decoder, directory, dtype=dtype)
    if hosts.is_first():
        with names_path(Path(directory)):
            save_tokenizer(tokenizer, Path(directory).expanduser())


# Warm start: a policy that never gets a reward above 0 has no gradient.


@dataclasses.dataclass(frozen=True)
class WarmStart:
    """Supervised training of a small policy before reinforcement learning.

    Attributes:
        accuracy: held-out accuracy at which it stops.
        steps: maximum steps.
        check_every: steps between evaluations.
        rows: examples a step.
        learning_rate: of Adam.
    """

    accuracy: float = 0.3
    steps: int = 400
    check_every: int = 10
    rows: int = 128
    learning_rate: float = 3e-3


def warm_start(
    policy: Policy,
    examples: Sequence[Trajectory],
    accuracy: Callable[[Policy], float],
    settings: WarmStart,
    report: Callable[[int, float], None] = lambda step, accuracy: None,
    mesh: Mesh | None = None,
) -> Policy:
    """Train a policy on examples.

    Args:
        policy: to train.
        examples: prompts with ground truths, which are the answers; or conversations with turns of
            the assistant. Each is used once.
        accuracy: on held-out problems.
        settings: when to stop, and the optimizer's.
        report: called with the step and the accuracy of each evaluation.
        mesh: of the parameters; None for one device.

    Returns:
        The policy, once its accuracy reaches `settings.accuracy`, or after the last step or the
        last example.

    Raises:
        ValueError: if there are no examples.
    """
    if not len(examples):
        raise ValueError("examples must not be empty, got none")
    optimizer = make_optimizer("adam", b2=0.99)
    state = begin_training(policy.params, optimizer, mesh)
    for step in range(min(settings.steps, -(-len(examples) // settings.rows))):
        start = step * settings.rows
        batch, _ = example_rows(policy.template, examples[start : start + settings.rows])
        state, _ = grad_step(state, batch, policy.config, CrossEntropyLoss())
        rate = settings.learning_rate * min(1.0, (step + 1) / 20)
        state, _ = apply_gradients(state, optimizer, learning_rate=rate, max_grad_norm=1.0)
        if (step + 1) % settings.check_every == 0:
            reached = accuracy(policy._replace(params=state.params))
            report(step + 1, reached)
            if reached >= settings.accuracy:
                break
    return policy._replace(params=jax.tree.map(jnp.copy, state.params))
