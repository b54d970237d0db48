"""What a step costs at real lengths, beside one whose completions are all of the same length.

`python -m pytest tests/benchmarks/test_lengths.py -p no:xdist`. A random Qwen3, 4 layers, width
128, 64 rows. Lengths are geometric with a mean of 32: 16 of the 512 tokens end a row. Two minutes.

`-k shapes -s` prints what the updates of the first steps take, in which shapes are compiled.
"""

import dataclasses
import statistics
import time

import jax
import jax.numpy as jnp
import numpy as np

from twinkle_jax.data import Message, PromptBatch, Template, Trajectory, small_tokenizer
from twinkle_jax.model import init_params, parse_config
from twinkle_jax.training import (
    Policy,
    RolloutConfig,
    TrainConfig,
    UpdateConfig,
    begin_training,
    collect,
    make_recipe,
    train_step,
)
from twinkle_jax.training.packing import plan

VOCABULARY, PROMPTS, SAMPLES, MEAN = 512, 16, 4, 32
ROOMS = (256, 1024, 2048)
WARM_UP, TURNS = 10, 7
SIZES = {
    "model_type": "qwen3",
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
}


def make_policy():
    template = Template(small_tokenizer("".join(chr(0x4E00 + i) for i in range(480))))
    config = parse_config({**SIZES, "vocab_size": VOCABULARY})
    return Policy(init_params(jax.random.key(0), config), config, template)


class Contestant:
    """Steps of one room, timed in two parts."""

    def __init__(self, policy, room, stops):
        rollout = RolloutConfig(
            prompts=PROMPTS, num_samples=SAMPLES, max_new_tokens=room, max_prompt_tokens=16
        )
        config = TrainConfig(rollout=rollout, update=UpdateConfig(mini_batches=1))
        reward = lambda trajectories, truths: np.arange(len(trajectories)) % 2  # noqa: E731
        self.recipe = make_recipe(config, policy, reward)
        source = self.recipe.source
        engine = dataclasses.replace(source.engine, stop_tokens=stops)
        self.recipe = self.recipe._replace(source=dataclasses.replace(source, engine=engine))
        self.prompts = PromptBatch(
            [
                Trajectory(messages=[Message(role="user", content=chr(0x4E00 + i) * 4)])
                for i in range(PROMPTS)
            ]
        )
        params = jax.tree.map(jnp.copy, policy.params)
        self.state = begin_training(params, self.recipe.optimizer, None)
        self.sampling, self.updating, self.tokens, self.processor = [], [], [], []

    def step(self, number):
        start = time.perf_counter()
        rollout, _ = collect(
            self.recipe, self.state.params, lambda: self.prompts, jax.random.key(number)
        )
        jax.block_until_ready(rollout.batch)
        middle, processor = time.perf_counter(), time.process_time()
        self.state, _ = train_step(
            self.state, self.recipe, rollout, learning_rate=0.0, seed=(0, number)
        )
        jax.block_until_ready(self.state)
        self.sampling.append(middle - start)
        self.updating.append(time.perf_counter() - middle)
        self.processor.append(time.process_time() - processor)
        self.tokens.append(int(rollout.lengths.sum()))


def test_a_step_costs_its_tokens(capsys):
    policy = make_policy()
    stops = tuple(range(VOCABULARY - 16, VOCABULARY))
    contestants = {"all 32, room 32": Contestant(policy, 32, ())}
    contestants |= {f"mean 32, room {room}": Contestant(policy, room, stops) for room in ROOMS}
    for turn in range(WARM_UP + TURNS):
        for contestant in contestants.values():
            contestant.step(turn)
    medians = {}
    with capsys.disabled():
        print()
        for name, contestant in contestants.items():
            parts = [
                statistics.median(x[WARM_UP:]) for x in (contestant.sampling, contestant.updating)
            ]
            medians[name] = sum(parts)
            tokens = statistics.median(contestant.tokens[WARM_UP:])
            ratio = medians[name] / medians["all 32, room 32"]
            print(
                f"{name}: {parts[0]:.2f} s sampling, {parts[1]:.2f} s updating, "
                f"{tokens:.0f} tokens, {ratio:.2f} times"
            )
    assert medians["mean 32, room 2048"] < 4 * medians["all 32, room 32"]


def packed(mean, room, seed):
    """Shapes of micro-batches in ten and a hundred steps, and places a token, by simulation."""
    rng, shapes, places, tokens, after_ten = np.random.default_rng(seed), set(), 0, 0, 0
    for step in range(100):
        lengths = (15 + np.minimum(rng.geometric(1 / mean, 64), room)).astype(np.int32)
        packings = [packing for _, packing in plan(lengths, int(lengths.max()), tokens=16_384)]
        shapes |= {packing.sources.shape for packing in packings}
        places += sum(packing.sources.size for packing in packings)
        tokens += lengths.sum()
        after_ten = len(shapes) if step == 9 else after_ten
    return after_ten, len(shapes), places / tokens


def test_shapes_of_updates(capsys):
    policy = make_policy()
    for mean, room in ((32, 256), (128, 1024), (1024, 8192)):
        counted = np.mean([packed(mean, room, seed) for seed in range(6)], axis=0)
        line = "{:.1f} shapes in 10 steps, {:.1f} in 100, {:.2f} places a token".format(*counted)
        if room < 8192:
            stops = tuple(range(VOCABULARY - VOCABULARY // mean, VOCABULARY))
            contestant = Contestant(policy, room, stops)
            for turn in range(24):
                contestant.step(turn)
            first, later = sum(contestant.processor[:10]), contestant.processor[12:]
            line += f"; first ten updates {first:.1f} s, then {statistics.median(later):.2f} s"
        with capsys.disabled():
            print(f"mean {mean}, room {room}: {line}, of processor time")
