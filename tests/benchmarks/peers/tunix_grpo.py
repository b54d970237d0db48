"""Tunix: `python -m tests.benchmarks.peers.tunix_grpo CHECKPOINT ROOM ROWS`.

Gradients are computed for ROWS of the rows at a time, all drawn together.
"""

import sys

import jax
import numpy as np
import optax
from flax import nnx
from transformers import AutoTokenizer
from tunix.models.qwen3.model import ModelConfig, Qwen3
from tunix.models.qwen3.params import create_model_from_safe_tensors
from tunix.rl import rl_cluster
from tunix.rl.grpo.grpo_learner import GRPOConfig, GRPOLearner
from tunix.rl.rollout.base_rollout import RolloutConfig

from tests.benchmarks.peers.task import (
    LEARNING_RATE,
    PROMPT,
    PROMPTS,
    SAMPLES,
    SHAPE,
    STEPS,
    prompts,
)
from tests.benchmarks.peers.turns import Turns

ROLES = (rl_cluster.Role.ACTOR, rl_cluster.Role.REFERENCE, rl_cluster.Role.ROLLOUT)


class Words:
    """The tokenizer in the form that Tunix asks of one that is not of its own kinds."""

    def __init__(self, tokenizer):
        self._tokenizer = tokenizer

    def encode(self, text, **_):
        """Give the tokens of a text."""
        return self._tokenizer.encode(str(text), add_special_tokens=False)

    def decode(self, ids, **_):
        """Give the text of tokens."""
        return self._tokenizer.decode(np.asarray(ids).tolist())

    def bos_id(self):
        """Give the first token of a text: Tunix reads 0 as none."""
        return 0

    def eos_id(self):
        """Give the token that would end a completion."""
        return self._tokenizer.eos_token_id

    def pad_id(self):
        """Give the token that fills rows up."""
        return self._tokenizer.pad_token_id


def model_config(vocab):
    """Give the sizes of `task.SHAPE` as Tunix names them."""
    return ModelConfig(
        num_layers=SHAPE["num_hidden_layers"],
        vocab_size=vocab,
        embed_dim=SHAPE["hidden_size"],
        hidden_dim=SHAPE["intermediate_size"],
        num_heads=SHAPE["num_attention_heads"],
        head_dim=SHAPE["head_dim"],
        num_kv_heads=SHAPE["num_key_value_heads"],
        rope_theta=10_000,
        norm_eps=1e-6,
        use_tied_embedding=True,
    )


def make_model(vocab):
    """Make a policy with random parameters."""
    return Qwen3(model_config(vocab), rngs=nnx.Rngs(0))


def main(checkpoint, room, rows):
    """Train until nobody gives the go-ahead any more."""
    room, rows = int(room), int(rows)
    turns = Turns(room)
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    vocab = len(tokenizer)
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ("fsdp", "tp"))
    with mesh:
        actor = create_model_from_safe_tensors(checkpoint, model_config(vocab), mesh)
        cluster = rl_cluster.RLCluster(
            actor=actor,
            reference=None,
            tokenizer=Words(tokenizer),
            cluster_config=rl_cluster.ClusterConfig(
                role_to_mesh=dict.fromkeys(
                    (rl_cluster.Role.ACTOR, rl_cluster.Role.REFERENCE, rl_cluster.Role.ROLLOUT),
                    mesh,
                ),
                rollout_engine="vanilla",
                training_config=rl_cluster.RLTrainingConfig(
                    actor_optimizer=optax.adamw(LEARNING_RATE),
                    eval_every_n_steps=STEPS,
                    max_steps=STEPS,
                    mini_batch_size=PROMPTS,
                    train_micro_batch_size=rows // SAMPLES,
                    rollout_micro_batch_size=PROMPTS,
                    compute_logps_micro_batch_size=PROMPTS,
                ),
                rollout_config=RolloutConfig(
                    max_tokens_to_generate=room,
                    max_prompt_length=PROMPT,
                    kv_cache_size=PROMPT + room,
                    temperature=1.0,
                    top_p=1.0,
                ),
            ),
        )
        asked = prompts(vocab)
        batches = [
            {"prompts": np.array(asked[i : i + PROMPTS])} for i in range(0, len(asked), PROMPTS)
        ]
        GRPOLearner(
            rl_cluster=cluster,
            algo_config=GRPOConfig(num_generations=SAMPLES, beta=0.0),
            reward_fns=lambda prompts, completions, **_: turns(completions),
        ).train(batches)


if __name__ == "__main__":
    main(*sys.argv[1:])
