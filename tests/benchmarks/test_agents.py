"""What tools that take their time cost: 64 episodes of 6 turns, and tools of 0 to 200 ms.

`python -m pytest tests/benchmarks/test_agents.py -s -p no:xdist`. A random Qwen3, 4 layers, width
128; 32 tokens a turn on average. Pairs are interleaved: the same tokens with tools and without, in
several cohorts. In lockstep the slowest of 64 tools is waited for at every turn.
"""

import random
import statistics
import time

import jax

from tests.benchmarks.test_lengths import make_policy
from twinkle_jax.data import PromptBatch
from twinkle_jax.rollout import LocalEngine, MultiTurn, RolloutConfig

EPISODES, TURNS, NEW, SLOWEST, PAIRS = 64, 6, 128, 0.2, 5


class Tool:
    """Answers after a random time, which the seed and the turn decide."""

    slowest = 0.0

    def reset(self, row, seed):
        index = dict(row["user_data"])["index"]
        self.times = random.Random(index)
        return chr(0x4E00 + index)

    def step(self, action):
        time.sleep(self.times.uniform(0, Tool.slowest))
        return "一", 0.0, False, {}

    def close(self):
        pass


def test_tools_that_take_their_time(capsys):
    policy = make_policy()
    rows = PromptBatch([{"messages": [], "user_data": [("index", i)]} for i in range(EPISODES)])
    stops = list(range(16))  # of 512 tokens: a turn has 32 on average, and few have no end

    def run(cohorts, slowest):
        Tool.slowest = slowest
        source = MultiTurn(
            LocalEngine(policy.config, policy.template, stop_tokens=stops),
            Tool,
            RolloutConfig(
                num_samples=1,
                max_turns=TURNS,
                max_new_tokens=NEW,
                max_episode_tokens=1024,
                cohorts=cohorts,
            ),
        )
        began = time.perf_counter()
        episodes = source.play(policy.params, rows, jax.random.key(1))
        seconds = time.perf_counter() - began
        return seconds, sum(e.num_sampled for e in episodes), [len(e.turns) for e in episodes]

    for cohorts in (1, 2, 4):
        _, tokens, turns = run(cohorts, 0.0)  # what is compiled
    times = {cohorts: ([], []) for cohorts in (1, 2, 4)}
    for _ in range(PAIRS):
        for cohorts, (without, with_tools) in times.items():
            without.append(run(cohorts, 0.0)[0])
            with_tools.append(run(cohorts, SLOWEST)[0])
    with capsys.disabled():
        print(f"\n{tokens} tokens, {statistics.mean(turns):.1f} turns")
        print(
            "| cohorts | without tools | with | ratio to without, one cohort |\n|---|---|---|---|"
        )
        alone = statistics.median(times[1][0])
        for cohorts, pair in times.items():
            without, with_tools = map(statistics.median, pair)
            print(
                f"| {cohorts} | {without:.2f} s | {with_tools:.2f} s | {with_tools / alone:.2f} |"
            )
