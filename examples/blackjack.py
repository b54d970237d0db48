"""Blackjack: draw another card or stand, against a dealer who shows one card.

The policy reads its total and the dealer's card, `(13)10=`; `*` marks a total in which an ace
counts 11. It writes `+` for another card or `-` to stand, and reads its new total, for at most
three turns: a hand stands by itself at 21 and with its fifth card. Over 21 is lost at once;
otherwise the dealer draws up to 17, and the higher total wins. Reward 1, 0 for a draw, or -1. Cards
come from an endless deck; hands of 21 are not dealt. `expected_score` computes exactly what a
player gets: -0.38 who draws or stands at random, -0.24 who always stands, -0.09 the best there is.

The small built-in policy first imitates players of whom one half draws below 14 and stands from
there on, and the other half acts at random: together they score -0.26. Begun with players of whom
none knows the game, it soon always stands, and no longer sees what drawing brings.

    python examples/blackjack.py

or, the same by the command:

    twinkle-jax train --environment examples/blackjack.py:Blackjack --rollout.max_turns 3
"""

import argparse
import functools
import json
import random
from pathlib import Path

from twinkle_jax.data import Message, Trajectory
from twinkle_jax.training import (
    EvaluationConfig,
    LoggingConfig,
    OptimizerConfig,
    RolloutConfig,
    TrainConfig,
    UpdateConfig,
    train,
)

CARDS = {card: (4 if card == 10 else 1) / 13 for card in range(1, 11)}  # an ace is 1
MOST_CARDS, DEALER_STANDS, IMITATED = 5, 17, 14


def add_card(hand, card):
    """Give a hand, a total and whether an ace counts 11 in it, another card."""
    total, soft = hand
    total, soft = (total + 11, True) if card == 1 and total < 11 else (total + card, soft)
    return (total - 10, False) if total > 21 and soft else (total, soft)


def outcome(total, dealer):
    """Give the reward of two totals."""
    if total > 21 or total < dealer <= 21:
        return -1.0
    return float(total > dealer or dealer > 21)


class Blackjack:
    """A hand of blackjack."""

    def reset(self, row, seed):
        """Deal; the same seed gives the same cards, whatever is done before they are drawn."""
        players, self.dealers = random.Random(seed), random.Random(seed + 1)
        self.draw = functools.partial(players.choices, list(CARDS), CARDS.values())
        self.hand, self.count, self.over = (21, False), 2, False
        while self.hand[0] == 21:
            self.hand = functools.reduce(add_card, self.draw(k=2), (0, False))
        (self.shown,) = self.draw()
        return self._told()

    def step(self, action):
        """Draw or stand."""
        if action not in ("+", "-"):
            return None, 0.0, True, {"readable": 0.0}
        if action == "+":
            self.hand, self.count = add_card(self.hand, self.draw()[0]), self.count + 1
            if self.hand[0] < 21 and self.count < MOST_CARDS:
                return self._told(), 0.0, False, {"readable": 1.0}
        hand, self.over = add_card((0, False), self.shown), True
        while hand[0] < DEALER_STANDS:
            hand = add_card(hand, self.dealers.choices(list(CARDS), CARDS.values())[0])
        return None, outcome(self.hand[0], hand[0]), True, {"readable": 1.0}

    def _told(self):
        return f"({self.hand[0]}{'*' * self.hand[1]}){self.shown}="

    def final_reward(self):
        """Who does not play to the end has lost: else a turn without an end would be a draw."""
        return 0.0 if self.over else -1.0

    def close(self):
        """Nothing is held."""

    @staticmethod
    def demonstrations(size, seed):
        """Make conversations of players: half of them know the game, half act at random."""
        generator, conversations = random.Random(seed), []
        for _ in range(size):
            game, done, knows = Blackjack(), False, generator.random() < 0.5
            messages = [Message(role="user", content=game.reset({}, generator.getrandbits(31)))]
            while not done:
                action = "+" if game.hand[0] < IMITATED else "-"
                action = action if knows else generator.choice("+-")
                messages.append(Message(role="assistant", content=action))
                told, _, done, _ = game.step(action)
                messages += [] if done else [Message(role="user", content=told)]
            conversations.append(Trajectory(messages=messages))
        return conversations


# What a player can get, exactly.


@functools.cache
def dealer_totals(hand):
    """Give the probability of each total that the dealer ends with."""
    if hand[0] >= DEALER_STANDS:
        return {hand[0]: 1.0}
    totals = {}
    for card, chance in CARDS.items():
        for total, share in dealer_totals(add_card(hand, card)).items():
            totals[total] = totals.get(total, 0.0) + chance * share
    return totals


def expected_score(choose):
    """Compute the mean reward of a player, over all cards.

    Args:
        choose: given the player's hand, its number of cards, the dealer's card, and what standing
            and drawing are worth, gives the worth of its choice; `max` of both is the best player.
    """

    @functools.cache
    def worth(hand, count, shown):
        ends = dealer_totals(add_card((0, False), shown)).items()
        stand = sum(chance * outcome(hand[0], total) for total, chance in ends)
        if hand[0] >= 21 or count == MOST_CARDS:
            return stand
        draw = sum(p * worth(add_card(hand, card), count + 1, shown) for card, p in CARDS.items())
        return choose(hand, count, shown, stand, draw)

    dealt = {}
    for first, p in CARDS.items():
        for second, q in CARDS.items():
            hand = add_card(add_card((0, False), first), second)
            dealt[hand] = dealt.get(hand, 0.0) + p * q * (hand[0] < 21)
    hands = sum(dealt.values())
    scores = (
        p * q * worth(h, 2, shown) for h, p in dealt.items() for shown, q in CARDS.items() if p
    )
    return sum(scores) / hands


RANDOM_SCORE = expected_score(lambda hand, count, shown, stand, draw: (stand + draw) / 2)
BEST_SCORE = expected_score(lambda hand, count, shown, stand, draw: max(stand, draw))


def main(arguments=None):
    """Train; return the score of each step."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", default="runs/blackjack")
    options = parser.parse_args(arguments)
    train(
        TrainConfig(
            environment=f"{__file__}:Blackjack",
            steps=options.steps,
            seed=options.seed,
            output_dir=options.output,
            overwrite=True,
            rollout=RolloutConfig(
                prompts=128,
                num_samples=8,
                max_turns=MOST_CARDS - 2,
                max_new_tokens=2,
                max_prompt_tokens=16,
                max_episode_tokens=48,
            ),
            update=UpdateConfig(scale="none", credit="turn"),
            optimizer=OptimizerConfig(learning_rate=6e-4),
            evaluation=EvaluationConfig(every=0, problems=1024),
            logging=LoggingConfig(samples_every=50),
        )
    )
    lines = (Path(options.output) / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["reward"] for line in lines]


if __name__ == "__main__":
    scores = main()
    print(f"random {RANDOM_SCORE:.2f}, best {BEST_SCORE:.2f}, last steps {scores[-1]:.3f}")
