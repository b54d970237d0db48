"""A tool: multiply numbers that the policy cannot multiply in its head, with a calculator.

The policy reads `37*58=`. It may answer at once, or write `(37*58)`, which the calculator answers
with `=2146`, and then give its answer. Reward 1 for the right one. Guessing scores 0; asking the
calculator and copying its answer scores 1. The small built-in policy first imitates players, of
whom one in four asks and the others guess:

    python examples/calculator.py
"""

import argparse
import json
import random
import re
from pathlib import Path

from twinkle_jax.data import Message, Trajectory
from twinkle_jax.training import (
    EvaluationConfig,
    LoggingConfig,
    OptimizerConfig,
    RolloutConfig,
    TrainConfig,
    train,
)

RANDOM_SCORE, BEST_SCORE, ASKING = 0.0, 1.0, 0.25
_CALL = re.compile(r"\((\d{1,4})\*(\d{1,4})\)")


class Calculator:
    """Ask for a product; multiply numbers in brackets; take anything else for the answer."""

    def reset(self, row, seed):
        """Choose two numbers of two digits."""
        generator = random.Random(seed)
        self.x, self.y = generator.randint(10, 99), generator.randint(10, 99)
        return f"{self.x}*{self.y}="

    def step(self, action):
        """Calculate, or compare with the product."""
        call = _CALL.fullmatch(action)
        if call is not None:
            return f"={int(call[1]) * int(call[2])}", 0.0, False, {"asked": 1.0}
        return None, float(action == str(self.x * self.y)), True, {}

    def close(self):
        """Nothing to release."""

    @staticmethod
    def demonstrations(size, seed):
        """Make conversations of players, of whom some ask the calculator and most guess."""
        generator = random.Random(seed)
        conversations = []
        for _ in range(size):
            game = Calculator()
            messages = [Message(role="user", content=game.reset({}, generator.getrandbits(31)))]
            answer = str(generator.randint(100, 9801))
            if generator.random() < ASKING:
                call = f"({game.x}*{game.y})"
                messages.append(Message(role="assistant", content=call))
                messages.append(Message(role="user", content=game.step(call)[0]))
                answer = str(game.x * game.y)
            messages.append(Message(role="assistant", content=answer))
            conversations.append(Trajectory(messages=messages))
        return conversations


def main(arguments=None):
    """Train; return the score of each step."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", default="runs/calculator")
    options = parser.parse_args(arguments)
    train(
        TrainConfig(
            environment=f"{__file__}:Calculator",
            steps=options.steps,
            seed=options.seed,
            output_dir=options.output,
            overwrite=True,
            rollout=RolloutConfig(
                prompts=64,
                num_samples=8,
                max_turns=2,
                max_new_tokens=9,
                max_prompt_tokens=16,
                max_episode_tokens=48,
            ),
            optimizer=OptimizerConfig(learning_rate=1e-3),
            evaluation=EvaluationConfig(every=20),
            logging=LoggingConfig(samples_every=20),
        )
    )
    lines = (Path(options.output) / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["reward"] for line in lines]


if __name__ == "__main__":
    scores = main()
    print(f"random {RANDOM_SCORE:.2f}, best {BEST_SCORE:.2f}, last steps {scores[-1]:.3f}")
