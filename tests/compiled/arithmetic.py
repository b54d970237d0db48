"""What an update must cost at least, from the shapes alone: nothing here is compiled."""

import math
from typing import NamedTuple

import jax

from tests.compiled.models import WHOLE, Cut, Setting, config_of
from twinkle_jax.model import parameter_shapes
from twinkle_jax.training.score import Transfers


class Chip(NamedTuple):
    """Published peaks of a chip: operations in bfloat16, and its links to others."""

    flops: float
    links: float  # bytes per second that leave a chip, over all links together


CHIPS = {
    "v5e": Chip(197e12, 200e9),
    "v5p": Chip(459e12, 600e9),
    "v6e": Chip(918e12, 448e9),
    "h100": Chip(989e12, 450e9),
}


class Ideal(NamedTuple):
    """The least that a device can do in one update with full rematerialisation.

    Attributes:
        parameters: of the model, on all devices together.
        memory: bytes on one device: parameters, gradients summed and new, AdamW's two moments, all
            in float32; the rows between layers, the head and its gradient in bfloat16.
        wire: bytes sent, where parameters are gathered twice in bfloat16 and gradients summed and
            scattered once in float32; where layers are split over tensor, each sums its rows in
            bfloat16 twice forwards, twice again and twice backwards.
        flops: eight for each token and entry of a matrix, and attention's without the saving of a
            causal mask.
        attention: attention's alone, which costs does not count where it is a kernel.
    """

    parameters: int
    memory: float
    wire: float
    flops: float
    attention: float


def ideal(
    model: str, setting: Setting, cut: Cut = WHOLE, *, transfers: Transfers = "layers"
) -> Ideal:
    """Work out the least an update can cost.

    With `transfers` `once`, parameters are gathered once, gradients are summed in bfloat16, and a
    device holds all of both in bfloat16.
    """
    s, config = setting, config_of(model, cut)
    count = sum(math.prod(x.shape) for x in jax.tree.leaves(parameter_shapes(config)))
    looked_up = 0 if config.tie_embeddings else config.vocab_size * config.hidden_size
    heads = config.attention.query_heads * config.attention.head_dim
    tokens = s.rows * s.time / s.devices
    once = transfers == "once"
    wire = (2 + 2 if once else 2 + 2 + 4) * count / s.tensor * (s.fsdp - 1) / s.fsdp
    if s.data > 1:  # the shares of gradients are summed over the copies
        wire += 2 * (2 if once else 4) * count / s.tensor / s.fsdp * (s.data - 1) / s.data
    layers = config.repeats * len(config.block)
    sums = 6 * layers * tokens * s.tensor * config.hidden_size
    wire += 2 * 2 * sums * (s.tensor - 1) / s.tensor
    attention = 16 * layers * heads * s.time * tokens
    products = 8 * (count - looked_up) * tokens
    between = tokens * config.hidden_size * layers
    head = config.vocab_size * config.hidden_size
    memory = 20 * count / s.fsdp / s.tensor + 2 * between + 2 * 2 * (count if once else head)
    return Ideal(count, memory, wire, products + attention, attention)


def sampling_memory(model: str, setting: Setting) -> float:
    """Bytes of a device while it samples, before keys and values.

    Its share of the parameters, summed gradients and two moments in float32, and the parameters in
    bfloat16, which are split over tensor alone.
    """
    return ideal(model, setting).parameters / setting.tensor * (16 / setting.fsdp + 2)


def least_seconds(chip: Chip, flops: float, wire: float) -> tuple[float, float]:
    """Seconds that the products and the wire take at peak rates; the longer of them bounds."""
    return flops / chip.flops, wire / chip.links
