"""The policy of a run: a checkpoint, or a small decoder made on the spot."""

from typing import NamedTuple

import jax
from jax.sharding import Mesh

from twinkle_jax.data import Template, Tokenizer, small_tokenizer
from twinkle_jax.model import (
    Decoder,
    DecoderConfig,
    init_params,
    load_pretrained,
    parse_config,
    partition_rules,
    save_pretrained,
)
from twinkle_jax.model.decoder.parameters import Params

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
    """A decoder, and how it reads and writes text.

    Attributes:
        params: its parameters.
        config: its architecture; static.
        template: turns conversations into tokens; holds the tokenizer.
    """

    params: Params
    config: DecoderConfig
    template: Template

    @property
    def tokenizer(self) -> Tokenizer:
        """What turns tokens into text."""
        return self.template.tokenizer


def small_policy(seed: int = 0) -> Policy:
    """Make a Qwen3 of 114,000 random parameters that spells arithmetic, one token a character."""
    template = Template(small_tokenizer(_CHARACTERS))
    config = parse_config({**_SMALL, "vocab_size": len(template.tokenizer)})
    key = jax.random.fold_in(jax.random.key(seed), 0x1417)  # apart from the keys of the run
    return Policy(init_params(key, config), config, template)


def load_policy(path_or_id: str, *, mesh: Mesh | None = None) -> Policy:
    """Read a policy and its tokenizer from a Hugging Face checkpoint; parameters in float32.

    Args:
        path_or_id: a directory, or a hub id.
        mesh: devices that the parameters are read to; None for one device.

    Returns:
        The policy.

    Raises:
        ValueError: if the checkpoint or the tokenizer is not what it should be.
    """
    rules = None if mesh is None else partition_rules(mesh)
    decoder = load_pretrained(path_or_id, dtype="float32", mesh=mesh, partition=rules)
    template = Template(path_or_id)
    if len(template.tokenizer) > decoder.config.vocab_size:
        raise ValueError(
            f"the tokenizer of {path_or_id} must have at most the model's "
            f"{decoder.config.vocab_size} tokens, got {len(template.tokenizer)}"
        )
    return Policy(decoder.params, decoder.config, template)


def save_policy(policy: Policy, directory: str) -> None:
    """Write a checkpoint that transformers, vLLM and `load_policy` read, tokenizer included."""
    save_pretrained(Decoder(policy.config, policy.params), directory)
    policy.tokenizer.save_pretrained(directory)
