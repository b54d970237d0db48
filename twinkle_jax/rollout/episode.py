"""Episodes: conversations of a policy with an environment, and their layout as rows to train on.

Tokens in, tokens out: sampled tokens are never decoded and encoded again; observations are encoded
once, as text, and appended. So the trainer computes the log-probabilities that the sampler drew
with, at every turn.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from twinkle_jax.data import IGNORE, Batch, Message
from twinkle_jax.data.batch import HostArray, batch_width

Ended = Literal["", "done", "max_turns", "length", "failed"]
"""Why an episode ended: `done` by the environment, a limit of turns or tokens, or a failure."""


class Turn(NamedTuple):
    """The tokens that the policy sampled in one turn, and their reward.

    Attributes:
        row: index of the episode's row that has the tokens.
        start: position of the first sampled token.
        end: position after the last one.
        reward: of the environment for this action.
        tool_calls: number of tool calls.
        tool_errors: number of tool calls that could not be parsed, or that failed.
    """

    row: int
    start: int
    end: int
    reward: float = 0.0
    tool_calls: int = 0
    tool_errors: int = 0


@dataclass
class TokenRow:
    """Tokens that the policy has read and sampled.

    Attributes:
        tokens: ids.
        sampled: True for tokens that the policy sampled.
        logprobs: of sampled tokens, under the policy that sampled them; 0 for others.
        routing: the experts of the tokens before the last sampled one, [time, layers, chosen], as
            they were when it was sampled; None where they are unknown.
    """

    tokens: list[int] = field(default_factory=list)
    sampled: list[bool] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    routing: HostArray | None = None

    def append(
        self,
        tokens: Sequence[int],
        logprobs: Sequence[float] | None = None,
        routing: HostArray | None = None,
    ) -> None:
        """Add tokens, with log-probabilities if they were sampled.

        Args:
            tokens: ids.
            logprobs: of sampled tokens.
            routing: the experts of all tokens of the row, from its first on, but the last new one;
                those of earlier turns are kept as they were then.
        """
        self.tokens += tokens
        self.sampled += [logprobs is not None] * len(tokens)
        self.logprobs += [0.0] * len(tokens) if logprobs is None else logprobs
        if routing is not None:
            known = routing[:0] if self.routing is None else self.routing
            self.routing = np.concatenate([known, routing[len(known) : len(self.tokens) - 1]])


@dataclass
class Episode:
    """One conversation of a policy with an environment.

    Attributes:
        messages: the conversation as text.
        seed: that the environment was reset with.
        rows: its tokens; several rows if `history` is `template` and the chat template renders
            earlier turns differently once others follow.
        turns: in order.
        final_reward: added at the end.
        ended: why it ended; empty before.
        cause: of a failure: `raised`, `timeout`, `connection`, `reply`, `died`.
        error: of the environment.
        attempts: how often it was started.
        info: numbers that the environment returned at its last step.
        seconds: spent in the environment.
    """

    messages: list[Message]
    seed: int = 0
    rows: list[TokenRow] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)
    final_reward: float = 0.0
    ended: Ended = ""
    cause: str = ""
    error: str = ""
    attempts: int = 1
    info: Mapping[str, Any] = field(default_factory=dict)
    seconds: float = 0.0

    @property
    def failed(self) -> bool:
        """Whether its environment failed; its rewards are then meaningless."""
        return self.ended == "failed"

    @property
    def truncated(self) -> bool:
        """Whether it ended at a limit of turns or tokens."""
        return self.ended in ("max_turns", "length")

    @property
    def rewards(self) -> list[float]:
        """The reward of each turn; the final reward is added to the last."""
        rewards = [turn.reward for turn in self.turns]
        if rewards:
            rewards[-1] += self.final_reward
        return rewards

    @property
    def num_sampled(self) -> int:
        """Number of sampled tokens."""
        return sum(turn.end - turn.start for turn in self.turns)

    def returns(self, discount: float = 1.0) -> list[float]:
        r"""Sum the rewards from each turn on: $G_k = \sum_{j \ge k} \gamma^{j-k} r_j$.

        Example:
            >>> turns = [Turn(0, 0, 1, reward=1.0), Turn(0, 2, 3, reward=2.0)]
            >>> Episode([], turns=turns, final_reward=2.0).returns(0.5)
            [3.0, 4.0]
        """
        total, returns = 0.0, []
        for reward in reversed(self.rewards):
            total = reward + discount * total
            returns.append(total)
        return returns[::-1]

    def as_record(self) -> dict[str, Any]:
        """Return the episode as JSON types, for a file of traces."""
        return {
            "seed": self.seed,
            "ended": self.ended,
            "rewards": self.rewards,
            "tokens": [turn.end - turn.start for turn in self.turns],
            "tool_calls": [turn.tool_calls for turn in self.turns],
            "tool_errors": [turn.tool_errors for turn in self.turns],
            "attempts": self.attempts,
            "cause": self.cause,
            "error": self.error,
            "messages": self.messages,
        }


class EpisodeBatch(NamedTuple):
    """Episodes laid out to train on.

    Attributes:
        batch: `rows_each` rows for each episode; unused rows are empty.
        row_lengths: columns of each row without padding.
        turns: for each position, the index of the turn that its label belongs to; -1 for no label.
    """

    batch: Batch
    row_lengths: np.ndarray[Any, Any]
    turns: np.ndarray[Any, Any]


def lay_out_episodes(
    episodes: Sequence[Episode],
    *,
    rows_each: int = 1,
    mask_truncated: bool = False,
    multiple: int = 1,
) -> EpisodeBatch:
    """Lay episodes out to train on: labels are sampled tokens, at the position before them.

    Rows of failed episodes have no labels, and losses do not count them. Observations have no
    labels, and so no gradient.

    Args:
        episodes: that have ended.
        rows_each: rows for each episode.
        mask_truncated: remove the labels of truncated episodes.
        multiple: the width is a multiple of this.

    Returns:
        The batch, [episodes * rows_each, width].

    Raises:
        ValueError: if an episode has more than `rows_each` rows, or there are no episodes.
    """
    if not episodes:
        raise ValueError("episodes must be at least one, got none")
    most = max(len(episode.rows) for episode in episodes)
    if most > rows_each:
        raise ValueError(
            f"rows_each must be at least {most}, the rows of an episode, got {rows_each}"
        )
    count = len(episodes) * rows_each
    row_lengths = np.ones(count, np.int32)
    for i, episode in enumerate(episodes):
        for j, row in enumerate(episode.rows):
            # The last token is a label, but not an input.
            row_lengths[i * rows_each + j] = max(len(row.tokens) - 1, 1)
    width = batch_width(int(row_lengths.max()), multiple=multiple)
    tokens, labels = np.zeros((count, width), np.int32), np.full((count, width), IGNORE, np.int32)
    logps, turns = np.zeros((count, width), np.float32), np.full((count, width), -1, np.int32)
    counted = np.zeros(count, bool)
    for i, episode in enumerate(episodes):
        for j, row in enumerate(episode.rows):
            place, n = i * rows_each + j, row_lengths[i * rows_each + j]
            tokens[place, :n] = row.tokens[:n]
            counted[place] = any(row.sampled) and not episode.failed
        if episode.failed or (mask_truncated and episode.truncated):
            continue
        for number, turn in enumerate(episode.turns):
            place, row = i * rows_each + turn.row, episode.rows[turn.row]
            columns = slice(turn.start - 1, turn.end - 1)
            labels[place, columns] = row.tokens[turn.start : turn.end]
            logps[place, columns] = row.logprobs[turn.start : turn.end]
            turns[place, columns] = number
    batch = Batch(
        tokens=jnp.asarray(tokens),
        labels=jnp.asarray(labels),
        rows=jnp.asarray(counted),
        old_logps=jnp.asarray(logps),
        routing=_lay_out_routing(episodes, rows_each, width),
    )
    return EpisodeBatch(batch, row_lengths, turns)


def _lay_out_routing(
    episodes: Sequence[Episode], rows_each: int, width: int
) -> Int[Array, "rows width layers chosen"] | None:
    """Lay the experts of tokens out; where they are unknown, a number that no expert has."""
    known = {
        i * rows_each + j: row.routing
        for i, episode in enumerate(episodes)
        for j, row in enumerate(episode.rows)
        if row.routing is not None
    }
    if not known:
        return None
    first = next(iter(known.values()))
    shape = len(episodes) * rows_each, width, *first.shape[1:]
    routing = np.full(shape, np.iinfo(first.dtype).max, first.dtype)
    for place, row in known.items():
        routing[place, : len(row)] = row
    return jnp.asarray(routing)


def episode_metrics(episodes: Sequence[Episode]) -> dict[str, float]:
    """Compute metrics of episodes; failed ones are counted, and excluded from the other metrics."""
    total = max(len(episodes), 1)
    causes: dict[str, int] = {}
    for episode in episodes:
        if episode.failed:
            causes[episode.cause] = causes.get(episode.cause, 0) + 1
    metrics = {
        "environment/failed": sum(causes.values()) / total,
        "environment/retried": sum(e.attempts > 1 for e in episodes) / total,
        "time/environment": sum(e.seconds for e in episodes),
    }
    metrics |= {f"environment/failed/{cause}": n / total for cause, n in sorted(causes.items())}
    played = [episode for episode in episodes if not episode.failed]
    if not played:
        return metrics

    def mean(values: Sequence[float]) -> float:
        with np.errstate(invalid="ignore", over="ignore"):  # environments may return such numbers
            return float(np.mean(np.asarray(values, np.float64)))

    observed = [sum(len(r.tokens) for r in e.rows) - e.num_sampled for e in played]
    metrics |= {
        "environment/turns": mean([len(e.turns) for e in played]),
        "environment/rows": mean([len(e.rows) for e in played]),
        "environment/tool_calls": mean([sum(t.tool_calls for t in e.turns) for e in played]),
        "environment/tool_errors": mean([sum(t.tool_errors for t in e.turns) for e in played]),
        "environment/read_tokens": mean(observed),
        **{f"environment/ended/{x}": mean([e.ended == x for e in played])
           for x in ("done", "max_turns", "length")},
    }  # fmt: skip
    names = sorted({name for e in played for name in e.info})
    for name in names:
        values = [e.info[name] for e in played if name in e.info]
        metrics[f"environment/info/{name}"] = mean(values)
    return metrics
