"""Many turns: a policy talks to environments, and its episodes are rows to train on."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from twinkle_jax.data import Message, PromptBatch, Template, Trajectory
from twinkle_jax.model import Params
from twinkle_jax.reward import RewardFunction, compute_rewards
from twinkle_jax.rollout import hosts
from twinkle_jax.rollout.engine import Engine, TurnEngine
from twinkle_jax.rollout.environment import (
    Action,
    Call,
    CallPool,
    EnvironmentFactory,
    Reply,
    Session,
    ToolFormat,
    describe_failure,
    failure_cause,
)
from twinkle_jax.rollout.episode import Ended, Episode, TokenRow, Turn, lay_out_episodes
from twinkle_jax.rollout.rollout import Rollout
from twinkle_jax.sampler import LENGTH, Sampling

History = Literal["append", "template"]
"""How earlier turns are read: as they were sampled, or as the chat template renders them now."""

_ATTEMPTS = 2
_MANY_EPISODES = 64


class EnvironmentFailureError(RuntimeError):
    """Too many environments of a rollout failed."""


@dataclass(frozen=True)
class MultiTurn:
    """Lets a policy talk to environments, several episodes for each prompt.

    All episodes of a prompt are reset with the same seed, which follows from the key of the call.
    An environment that raises, does not answer in time, loses its connection, or answers what is no
    answer is tried once more with the same seed. If it fails again, its episode has no labels and
    no part in statistics. It never becomes an episode with reward 0.

    With several processes, each plays an equal share of the episodes with environments of its own,
    and tells the others what these answer. So every process knows all episodes, and asks the engine
    for the same turns.

    Attributes:
        engine: draws completions.
        environment: makes an environment for an episode.
        sampling: temperature, filters and stop tokens.
        num_samples: episodes of each prompt.
        reward: added to the environment's, from the whole conversation; None for nothing more.
        max_turns: the most turns; an episode that is not done then is truncated.
        max_episode_tokens: the most tokens of an episode; likewise.
        max_prompt_tokens: the most tokens before the first turn.
        max_new_tokens: the most tokens of a turn; one that has no end then ends the episode.
        history: how earlier turns are read. `append`: as they were sampled; what is new is
            appended, even if the chat template would now render them in another way. `template`: as
            the template renders them; where that does not extend what the policy has read, the
            episode goes on in a row of its own, and all its rows share the advantage.
        cohorts: parts in which the episodes of a call are played: while the environments of one are
            at work, a turn of the next is drawn. Which episodes are drawn together depends on
            nothing else, so that a run can be repeated byte for byte. None: see `default_cohorts`.
        timeout: seconds that an environment may take to answer.
        threads: environments that are called at a time.
        max_failed: share of failed episodes above which a rollout raises.
        max_observation: characters of an observation; of longer ones the middle is left out.
        tool_format: how tool calls are read.
        reward_timeout: seconds that the reward may take for the episodes of a call.
        mask_truncated: True takes episodes that a limit ended out of the loss.
        width_multiple: what the width of a batch must be a multiple of.
        discount: of rewards of later turns.
    """

    engine: Engine
    environment: EnvironmentFactory
    sampling: Sampling
    num_samples: int
    reward: RewardFunction | None = None
    max_turns: int = 6
    max_episode_tokens: int = 4096
    max_prompt_tokens: int = 1024
    max_new_tokens: int = 512
    history: History = "append"
    cohorts: int | None = None
    timeout: float = 60.0
    threads: int = 64
    max_failed: float = 0.1
    max_observation: int = 16384
    tool_format: ToolFormat = "any"
    reward_timeout: float = 600.0
    mask_truncated: bool = False
    width_multiple: int = 1
    discount: float = 1.0

    @property
    def rows_each(self) -> int:
        """Rows of a batch for each episode."""
        return 1 if self.history == "append" else self.max_turns

    def sample(self, params: Params, prompts: PromptBatch, key: jax.Array) -> Rollout:
        """Play episodes, and lay them out.

        Raises:
            EnvironmentFailureError: if too many environments failed.
        """
        samples = self.num_samples
        episodes = self.play(params, prompts, key, self.sampling, samples)
        check_failures(episodes, self.max_failed)
        laid_out = lay_out_episodes(
            episodes,
            rows_each=self.rows_each,
            mask_truncated=self.mask_truncated,
            multiple=self.width_multiple,
        )
        return Rollout(
            laid_out.batch,
            self._trajectories(episodes, prompts),
            [truth for truth in prompts.ground_truths for _ in range(samples)],
            np.asarray([episode.num_sampled for episode in episodes], np.int32),
            laid_out.row_lengths,
            np.asarray([episode.truncated for episode in episodes]),
            failed=np.asarray([episode.failed for episode in episodes]),
            episodes=episodes,
            turns=laid_out.turns,
            held=_held(len(episodes)),
        )

    def score(self, rollout: Rollout) -> Rollout:
        """Add up the rewards of each episode; the reward function sees those that did not fail.

        With several processes, each calls it for the episodes that it has played.
        """
        assert rollout.episodes is not None
        returns = self._returns(
            rollout.episodes, rollout.trajectories, rollout.ground_truths, rollout.held_rows
        )
        return rollout._replace(rewards=np.nan_to_num(returns, nan=0.0))

    def greedy_rewards(self, params: Params, prompts: PromptBatch) -> np.ndarray[Any, Any]:
        """Score the most probable episode of each prompt.

        Raises:
            EnvironmentFailureError: if an environment failed: there is nothing to compare with.
        """
        sampling = self.sampling._replace(temperature=0.0)
        returns, episodes = self.judge(params, prompts, jax.random.key(0), sampling, 1)
        check_failures(episodes, 0.0)
        return returns

    def judge(
        self,
        params: Params,
        prompts: PromptBatch,
        key: jax.Array,
        sampling: Sampling,
        num_samples: int,
    ) -> tuple[np.ndarray[Any, Any], list[Episode]]:
        """Play episodes and add up the rewards of each; NaN for failed ones."""
        episodes = self.play(params, prompts, key, sampling, num_samples)
        truths = [truth for truth in prompts.ground_truths for _ in range(num_samples)]
        held, trajectories = _held(len(episodes)), self._trajectories(episodes, prompts)

        def returns() -> dict[str, np.ndarray[Any, Any]]:
            return {"returns": self._returns(episodes, trajectories, truths, held)}

        return hosts.merge_rows("computing rewards", held, returns)["returns"], episodes

    def play(
        self,
        params: Params,
        prompts: Sequence[Trajectory],
        key: jax.Array,
        sampling: Sampling,
        num_samples: int,
    ) -> list[Episode]:
        """Play episodes to their end, those of a prompt next to each other.

        Args:
            params: what is trained, as it is now.
            prompts: rows of the task.
            key: of everything that is random: seeds of environments, and tokens.
            sampling: temperature, filters and stop tokens.
            num_samples: episodes of each prompt.

        Returns:
            Episodes, failed ones among them.

        Raises:
            ValueError: if a prompt is too long, or the chat template refuses a conversation.
        """
        seeds = np.asarray(_seeds(key, len(prompts)))
        keys = _episode_keys(key, len(prompts) * num_samples)
        pool = CallPool(self.threads, self.timeout)
        games = [
            _Game(
                self, pool, prompts[i // num_samples], int(seeds[i // num_samples]), i, bool(held)
            )
            for i, held in enumerate(_held(len(prompts) * num_samples))
        ]
        try:
            engine = self.engine.converse(
                params, len(games), sampling, max_length=self.max_episode_tokens
            )
            # Every cohort has rows on all devices.
            parts = min(self.cohorts or default_cohorts(len(games)), len(games))
            cohorts = [games[i::parts] for i in range(parts)]
            while any(game.stage != "ended" for game in games):
                for cohort in cohorts:
                    self._take_answers([game for game in cohort if game.stage == "asked"], pool)
                    if any(game.stage == "ready" for game in cohort):
                        self._draw(engine, games, cohort, keys)
            return [game.episode for game in games]
        finally:
            closing = [pool(session.close) for game in games for session in game.sessions]
            pool.wait(closing, len(closing))
            pool.close()

    def _take_answers(self, games: "list[_Game]", pool: CallPool) -> None:
        """Wait for environments, and let their episodes go on."""
        calls = [game.call for game in games if game.call is not None]
        pool.wait(calls, len(calls))
        answers = _of_all("playing environments", games, lambda held: [g.answer() for g in held])
        for game, answer in zip(games, answers, strict=True):
            game.take_answer(answer)
        self._read([game for game in games if game.stage == "told"])

    def _read(self, games: "list[_Game]") -> None:
        """Encode what environments said, for all episodes that go on, at once."""
        for game in games:
            game.join_messages()
        encoded = _of_all("encoding what environments said", games, self._encode)
        for game, tokens in zip(games, encoded, strict=True):
            if self._appends(game):
                game.read_more(tokens)
            else:
                game.read_again(tokens)

    def _appends(self, game: "_Game") -> bool:
        """Whether what the environment said is encoded alone, and not the whole conversation."""
        return self.history == "append" and bool(game.episode.turns)

    def _encode(self, games: "list[_Game]") -> list[list[int]]:
        """Give the tokens of whole conversations, or those that follow what the policy said."""
        template = self.engine.template
        later = [game for game in games if self._appends(game)]
        whole = [game for game in games if not self._appends(game)]
        turns = [
            {"messages": game.episode.messages, "new": game.new, "tools": game.tools}
            for game in later
        ]
        tokens = dict(
            zip([game.number for game in later], template.continuations(turns), strict=True)
        )
        for game, row in zip(whole, _encode(template, whole), strict=True):
            if not game.episode.turns and len(row) > self.max_prompt_tokens:
                raise ValueError(
                    "what comes before the first turn must have at most max_prompt_tokens="
                    f"{self.max_prompt_tokens} tokens, got {len(row)}"
                )
            tokens[game.number] = row
        return [tokens[game.number] for game in games]

    def _draw(
        self, engine: TurnEngine, games: "list[_Game]", cohort: "list[_Game]", keys: jax.Array
    ) -> None:
        """Draw a turn of each episode of a cohort that is ready for one."""
        ready = {game.number: game for game in cohort if game.stage == "ready"}
        rows = {i: game.episode.rows[-1].tokens for i, game in ready.items()}
        limits = {
            i: min(self.max_new_tokens, self.max_episode_tokens - len(row))
            for i, row in rows.items()
        }
        turns = np.asarray([len(game.episode.turns) for game in games], np.int32)
        drawn = engine.go_on(rows, _turn_keys(keys, turns), limits)
        for i, game in ready.items():
            length = drawn.lengths[i]
            tokens = drawn.tokens[i, :length].tolist()
            text = self.engine.template.tokenizer.decode(tokens)
            truncated = bool(drawn.finish_reasons[i] == LENGTH)
            game.act(tokens, drawn.logprobs[i, :length].tolist(), text, truncated=truncated)

    def _trajectories(
        self, episodes: Sequence[Episode], prompts: Sequence[Trajectory]
    ) -> list[Trajectory]:
        samples = len(episodes) // len(prompts)
        return [
            Trajectory({**prompts[i // samples], "messages": episode.messages})
            for i, episode in enumerate(episodes)
        ]

    def _returns(
        self,
        episodes: Sequence[Episode],
        trajectories: Sequence[Trajectory],
        ground_truths: Sequence[Any],
        held: hosts.RowMask,
    ) -> np.ndarray[Any, Any]:
        """Add the reward function's to what environments gave, and add up.

        NaN for failed episodes, and for those that another process has played.
        """
        played = [i for i in np.flatnonzero(held).tolist() if not episodes[i].failed]
        if self.reward is not None and played:
            rewards = compute_rewards(
                self.reward,
                [trajectories[i] for i in played],
                [ground_truths[i] for i in played],
                timeout=self.reward_timeout,
            )
            for i, reward in zip(played, rewards, strict=True):
                episodes[i].final_reward += reward
        returns = np.full(len(episodes), np.nan, np.float32)
        for i in played:
            returns[i] = episodes[i].returns(self.discount)[0]
        return returns


def default_cohorts(episodes: int) -> int:
    """Choose the number of cohorts: two on CPUs, for 64 episodes or more, otherwise one.

    On a CPU half of many rows take half the time, so that two cohorts cost nothing, and hide what
    environments take. A GPU or TPU reads all weights for each token, however few rows there are: it
    takes nearly as long for half of them, and with few rows a CPU does, too. Times are not
    measured, since log-probabilities would then differ in their last bit from run to run.
    """
    return 2 if jax.default_backend() == "cpu" and episodes >= _MANY_EPISODES else 1


def check_failures(episodes: Sequence[Episode], share: float) -> None:
    """Raise if more than a share of episodes failed.

    Raises:
        EnvironmentFailureError: with the number of failures and the first of them.
    """
    failed = [episode for episode in episodes if episode.failed]
    if len(failed) > share * len(episodes):
        message = (
            f"at most rollout.max_failed={share:g} of the environments may fail, got "
            f"{len(failed)} of {len(episodes)}; the first ({failed[0].cause}): {failed[0].error}"
        )
        hosts.fail(EnvironmentFailureError(message))


def _held(count: int) -> hosts.RowMask:
    """Say which of so many episodes this process plays."""
    held = np.zeros(count, bool)
    held[hosts.deal(count)] = True
    return held


def _of_all(
    call: str, games: "list[_Game]", compute: "Callable[[list[_Game]], list[Any]]"
) -> list[Any]:
    """Compute something for the episodes of each process, and give every process all of it."""
    held = [game for game in games if game.held]
    # Processes play consecutive episodes, so their parts are in order.
    return [x for part in hosts.share(call, lambda: compute(held)) for x in part]


class _Answer(NamedTuple):
    """What an environment answered, as other processes can be told it.

    Attributes:
        seconds: that it took.
        reply: a `Reply` as a list, or what is added at the end.
        cause: of a failure; empty where there is none.
        error: of a failure.
    """

    seconds: float
    reply: Any = None
    cause: str = ""
    error: str = ""


@dataclass
class _Game:
    """An episode while it is played.

    Attributes:
        held: whether this process plays it; of others it is told what happens.
        stage: `asked` while the environment is called, `told` when its answer is to be encoded,
            `ready` for the policy, `ended`.
    """

    source: MultiTurn
    pool: CallPool
    row: Trajectory
    seed: int
    number: int
    held: bool = True
    stage: Literal["asked", "told", "ready", "ended"] = "asked"
    call: Call | None = None
    new: list[Message] = field(default_factory=list)
    sessions: list[Session] = field(default_factory=list)
    seconds: float = 0.0

    def __post_init__(self) -> None:
        self._begin(1)

    def _begin(self, attempt: int) -> None:
        source = self.source
        self.episode = Episode(list(self.row["messages"]), self.seed, attempts=attempt)
        self._ending: Ended = ""
        self.session = Session(source.environment, source.max_observation, self.pool.run)
        self.sessions.append(self.session)
        self._ask(self.session.reset, self.row, self.seed)

    def _ask(self, function: Any, *args: Any) -> None:
        self.stage, self.call = "asked", self.pool(function, *args) if self.held else None

    @property
    def tools(self) -> list[Any]:
        """What the policy may call."""
        return [*(self.row.get("tools") or []), *self.session.tools]

    def answer(self) -> _Answer:
        """Take what the environment has answered."""
        call, self.call = self.call, None
        assert call is not None
        if call.error is None:
            return _Answer(call.seconds, call.value)
        error = call.error
        return _Answer(call.seconds, None, failure_cause(error), describe_failure(error))

    def take_answer(self, answer: Sequence[Any]) -> None:
        """Go on with what the environment has answered; a list where another process was told."""
        answer = _Answer(*answer)
        self.seconds += answer.seconds
        self.episode.seconds = self.seconds
        if answer.cause:
            self._fail(answer.cause, answer.error)
        elif self._ending:
            self.episode.final_reward = answer.reply
            self.episode.ended, self.stage = self._ending, "ended"
            self.pool(self.session.close)
        else:
            self._hear(Reply(*answer.reply))

    def _hear(self, reply: Reply) -> None:
        episode = self.episode
        self.new = reply.messages
        if episode.turns:
            errors = int(reply.info.get("tool_errors", 0))
            last = episode.turns[-1]
            episode.turns[-1] = last._replace(
                reward=reply.reward, tool_errors=last.tool_errors + errors
            )
            episode.info = {k: x for k, x in reply.info.items() if k != "tool_errors"}
            if reply.done or len(episode.turns) == self.source.max_turns:
                episode.messages += reply.messages  # to look at: the policy does not read them
                self._end("done" if reply.done else "max_turns")
                return
        self.stage = "told"

    def _end(self, ending: Ended) -> None:
        self._ending = ending
        self._ask(self.session.final_reward)

    def _fail(self, cause: str, error: str) -> None:
        self.pool(self.session.close)
        if self.episode.attempts < _ATTEMPTS:
            self._begin(self.episode.attempts + 1)
            return
        self.episode.ended, self.stage = "failed", "ended"
        self.episode.cause, self.episode.error = cause, error

    def join_messages(self) -> None:
        """Append what the environment says first to the user's last message."""
        episode = self.episode
        if episode.messages and self.new and not episode.turns:
            episode.messages, self.new = _joined(episode.messages, self.new)

    def read_again(self, tokens: list[int]) -> None:
        """Take the tokens of the whole conversation, as the chat template renders it now."""
        rows = self.episode.rows
        if rows and tokens[: len(rows[-1].tokens)] == rows[-1].tokens:
            tokens = tokens[len(rows[-1].tokens) :]
        else:
            rows.append(TokenRow())
        self._read(tokens)

    def read_more(self, tokens: list[int]) -> None:
        """Take the tokens that follow what was sampled."""
        last = self.episode.rows[-1].tokens[-1]
        # The assistant may have ended its turn itself.
        self._read(tokens[1:] if tokens and tokens[0] == last else tokens)

    def _read(self, tokens: list[int]) -> None:
        episode = self.episode
        episode.messages, self.new = [*episode.messages, *self.new], []
        if len(episode.rows[-1].tokens) + len(tokens) >= self.source.max_episode_tokens:
            if not episode.rows[-1].tokens:  # a row that nothing is sampled in
                episode.rows.pop()
            self._end("length")
            return
        episode.rows[-1].append(tokens)
        self.stage = "ready"

    def act(self, tokens: list[int], logprobs: list[float], text: str, *, truncated: bool) -> None:
        """Give what the policy said to the environment."""
        episode, row = self.episode, self.episode.rows[-1]
        action = Action(text, self.source.tool_format)
        start = len(row.tokens)
        row.append(tokens, logprobs)
        episode.turns.append(
            Turn(
                len(episode.rows) - 1,
                start,
                len(row.tokens),
                tool_calls=len(action.calls),
                tool_errors=len(action.errors),
            )
        )
        episode.messages = [*episode.messages, Message(role="assistant", content=text)]
        if truncated:
            self._end("length")
        else:
            self._ask(self.session.step, action)


def _encode(template: Template, games: Sequence[_Game]) -> list[list[int]]:
    """Encode whole conversations."""
    conversations: list[Mapping[str, Any]] = []
    for game in games:
        messages, new = game.episode.messages, game.new
        if not messages and not new:
            raise ValueError(
                "an episode must begin with a message: its row has none, and reset returned none"
            )
        conversations.append({"messages": [*messages, *new], "tools": game.tools or None})
    features = template.batch_encode(conversations, add_generation_prompt=True)
    return [[int(token) for token in feature["input_ids"]] for feature in features]


def _joined(messages: list[Message], new: list[Message]) -> tuple[list[Message], list[Message]]:
    """Append what an environment says first to the user's last message, if there is one."""
    last, first = messages[-1], new[0]
    if last["role"] != "user" or first["role"] != "user" or not isinstance(last["content"], str):
        return messages, new
    text = f"{last['content']}\n{first['content']}"
    return [*messages[:-1], Message(role="user", content=text)], new[1:]


@partial(jax.jit, static_argnums=1)
def _seeds(key: jax.Array, count: int) -> Int[Array, " prompts"]:
    bits = jax.random.bits(jax.random.fold_in(key, 0), (count,), jnp.uint32)
    return (bits >> 1).astype(jnp.int32)


@partial(jax.jit, static_argnums=1)
def _episode_keys(key: jax.Array, count: int) -> jax.Array:
    numbers = jnp.arange(count, dtype=jnp.int32)
    return jax.vmap(jax.random.fold_in, (None, 0))(jax.random.fold_in(key, 1), numbers)


@jax.jit
def _turn_keys(keys: jax.Array, turns: Int[Array, " episodes"]) -> jax.Array:
    return jax.vmap(jax.random.fold_in)(jax.random.clone(keys), turns)
