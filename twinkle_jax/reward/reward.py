"""The interface of rewards: called on trajectories and ground truths, one number for each.

Functions in TRL's form are adapted here, and ground truths are matched with completions.
"""

import asyncio
import functools
import inspect
import threading
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import suppress
from typing import Any

from twinkle_jax.data import Message, Trajectory, completion_text, message_text, user_data_get
from twinkle_jax.data.rows import to_columns

GroundTruths = Sequence[Any] | None
"""Right answers, one for each trajectory or each prompt; None: those in `user_data`."""

RewardFunction = Callable[..., Sequence[float | None] | Awaitable[Sequence[float | None]]]
"""A `Reward`, or a function with a signature that `as_reward` takes."""

_FORMS = (
    "(trajectories, ground_truths), or TRL's (prompts, completions, **columns); FunctionReward "
    "takes a function of one completion's text and its ground truth"
)
_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
_VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


REWARDS: dict[str, Callable[[], "Reward"]] = {}
"""The classes that `find_reward` knows, by name."""


class Reward(ABC):
    """The base class of rewards.

    A plain function can be passed wherever a reward is taken, see `as_reward`. With a name,
    `class ExactMatchReward(Reward, name="exact")`, `find_reward` and `--reward` find the class.

    Attributes:
        needs_ground_truth: whether each trajectory must have a ground truth: a run then begins only
            if all records have answers.
    """

    needs_ground_truth: bool = False

    def __init_subclass__(cls, *, name: str | None = None, **kwargs: Any) -> None:
        """Enter the class under its name, if it has one."""
        super().__init_subclass__(**kwargs)
        if name is not None:
            REWARDS[name] = cls

    @abstractmethod
    def __call__(
        self, trajectories: Sequence[Trajectory], ground_truths: GroundTruths = None, **kwargs: Any
    ) -> list[float]:
        """Score the last assistant message of each trajectory.

        Args:
            trajectories: conversations that end with a completion.
            ground_truths: right answers: one for each trajectory; or one for each prompt, whose
                completions are adjacent. None: `'ground_truth'` in each trajectory's `user_data`.
                For a trajectory in this list, its ground truth, or else its last message, is used.
            kwargs: not used here; for rewards of your own.

        Returns:
            A float for each trajectory.
        """


class FunctionReward(Reward):
    """A reward of single completions, from a function.

    Args:
        function: takes a completion's text and its ground truth, returns a number. It gets ground
            truths that are numbers as text, lists and dictionaries as they are. An `async` one is
            called for all completions at once.
        needs_ground_truth: False passes None for the ground truth where there is none.

    Raises:
        TypeError: if the function is not callable.

    Example:
        >>> shorter = FunctionReward(lambda text, truth: float(len(text) < 5))
        >>> shorter([{"messages": [{"role": "assistant", "content": "2"}]}], ["2"])
        [1.0]
    """

    def __init__(
        self,
        function: Callable[[str, Any], float | Awaitable[float]],
        *,
        needs_ground_truth: bool = True,
    ) -> None:
        if not callable(function):
            raise TypeError(f"function must be callable, got {function!r}")
        self.function, self.needs_ground_truth = function, needs_ground_truth
        name = getattr(function, "__name__", "<lambda>")
        self.__name__ = type(self).__name__ if name == "<lambda>" else name

    def __call__(
        self, trajectories: Sequence[Trajectory], ground_truths: GroundTruths = None, **kwargs: Any
    ) -> list[float]:
        """Call the function on each completion and its ground truth."""
        if self.needs_ground_truth:
            truths = _present_truths(trajectories, ground_truths)
        else:
            aligned = align_ground_truths(trajectories, ground_truths)
            truths = [None if truth is None else _as_text(truth) for truth in aligned]
        pairs = zip(map(completion_text, trajectories), truths, strict=True)
        scores: list[Any] = [self.function(text, truth) for text, truth in pairs]
        if any(map(inspect.isawaitable, scores)):
            scores = result_of(_all_of(scores))
        return scores

    def __repr__(self) -> str:
        return f"FunctionReward({getattr(self.function, '__name__', self.function)})"


class ColumnsReward(Reward):
    """A function in TRL's form, called with the arguments that it names; made by `as_reward`."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self.__name__ = reward_name(function)
        parameters = inspect.signature(function).parameters.values()
        self._takes_all = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters)
        named = [p for p in parameters if p.kind not in _VARIADIC]
        self._names = {p.name for p in named}
        self._required = [p.name for p in named if p.default is inspect.Parameter.empty]

    def __call__(
        self, trajectories: Sequence[Trajectory], ground_truths: GroundTruths = None, **kwargs: Any
    ) -> list[float]:
        """Call the function with prompts, completions and the columns of the data set."""
        arguments = _columns(trajectories, align_ground_truths(trajectories, ground_truths))
        self.check_columns(arguments)
        if not self._takes_all:
            arguments = {name: x for name, x in arguments.items() if name in self._names}
        return self.function(**arguments)

    def check_columns(self, columns: Collection[str]) -> None:
        """Raise ValueError if the function needs a column that is not among these."""
        missing = [name for name in self._required if name not in columns]
        if missing:
            hint = ": the data set has neither 'answer' nor 'ground_truth'"
            raise ValueError(
                f"{self.__name__} must take columns that the data set has "
                f"({', '.join(columns)}), got {', '.join(missing)}"
                + (hint if {"answer", "ground_truth"} & set(missing) else "")
            )


def as_reward(function: RewardFunction, *, argument: str = "reward") -> RewardFunction:
    """Recognise the form of a reward by the names of its parameters.

    The first form is `(trajectories, ground_truths)`. The second parameter may be missing or have
    another name; the parameters of a `Reward` may have any names. `score_trajectories` and runs
    call a function with one ground truth for each trajectory, None where there is none, and a
    `Reward` with what they are given.

    The other form is TRL's: a function with a parameter `completions`, called by keyword. It gets

    * `prompts` and `completions`, lists of messages for each trajectory: those before the
      completion, and the assistant's last message;
    * each name in the trajectories' `user_data` as a column, a list with None where a trajectory
      has no value. All fields of a JSON Lines record are in `user_data`;
    * the ground truths as columns `ground_truth` and `answer`, unless the data set has an `answer`
      of its own.

    Without `**columns` in its signature it gets only what it names. It may return None for a
    trajectory that it does not apply to.

    Either may be `async`. All calls wait on one event loop, in a thread of its own, so that a
    client with open connections may be used in the next step again; a call that blocks, such as
    `time.sleep`, blocks all of them.

    Args:
        function: a `Reward`, or a function.
        argument: its name in errors.

    Returns:
        A function of trajectories and ground truths.

    Raises:
        TypeError: if it is not callable, or has another signature.

    Example:
        >>> def short(completions, limit, **columns):
        ...     return [float(len(c[0]["content"]) < n) for c, n in zip(completions, limit)]
        >>> answer = {"role": "assistant", "content": "42"}
        >>> as_reward(short)([{"messages": [answer], "user_data": [("limit", 3)]}])
        [1.0]
    """
    if isinstance(function, type) or not callable(function):
        raise TypeError(f"{argument} must be a function or a Reward, got {function!r:.80}")
    name = reward_name(function)
    if isinstance(function, Reward):
        return _AsyncReward(function) if _is_async(function) else function
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        raise TypeError(f"{argument} must show its signature, {_FORMS}; got {name}") from None
    parameters = list(signature.parameters.values())
    names = [parameter.name for parameter in parameters]
    form = f"{argument} must have the signature {_FORMS}; got {name}{signature}"
    if _is_async(function):
        function = _waiting(function)
    if "completions" in names and "trajectories" not in names:
        if any(p.kind is inspect.Parameter.POSITIONAL_ONLY for p in parameters):
            raise TypeError(form)
        return ColumnsReward(function)
    if not names or names[0] != "trajectories" or parameters[0].kind not in _POSITIONAL:
        raise TypeError(form)
    for arguments in ((None, None), (None,)):
        try:
            signature.bind(*arguments)
        except TypeError:
            continue
        return function if len(arguments) == 2 else _without_truths(function)
    raise TypeError(form)


# Asynchronous rewards.

_LOOP_THREAD = "event loop of rewards"
_STARTING = threading.Lock()


class _AsyncReward(Reward):
    """A reward whose call is `async`, as one that returns numbers."""

    def __init__(self, reward: Reward) -> None:
        self.__name__, self.needs_ground_truth = reward_name(reward), reward.needs_ground_truth
        self._call = _waiting(reward)

    def __call__(
        self, trajectories: Sequence[Trajectory], ground_truths: GroundTruths = None, **kwargs: Any
    ) -> list[float]:
        return self._call(trajectories, ground_truths, **kwargs)


def _is_async(function: Callable[..., Any]) -> bool:
    while isinstance(function, functools.partial):
        function = function.func
    call = function if inspect.isroutine(function) else getattr(function, "__call__", function)  # noqa: B004
    return inspect.iscoroutinefunction(call)


def _waiting(function: Callable[..., Any]) -> Callable[..., Any]:
    """Make a function that waits for what an `async` one returns."""

    def reward(*args: Any, **kwargs: Any) -> Any:
        return result_of(function(*args, **kwargs))

    reward.__name__ = reward_name(function)
    reward.__signature__ = inspect.signature(function)  # type: ignore[attr-defined]
    return reward


async def _all_of(scores: Sequence[Any]) -> list[Any]:
    waiting = {i: score for i, score in enumerate(scores) if inspect.isawaitable(score)}
    found = dict(zip(waiting, await asyncio.gather(*waiting.values()), strict=True))
    return [found.get(i, score) for i, score in enumerate(scores)]


def result_of(returned: Any) -> Any:
    """Wait for what an `async` reward returned; anything else is the result itself.

    Raises:
        RuntimeError: on the event loop of rewards, where nothing may wait.
    """
    if not inspect.isawaitable(returned):
        return returned
    if on_event_loop():
        if inspect.iscoroutine(returned):
            returned.close()
        raise RuntimeError(
            "an async reward must be awaited in another one, got a call that blocks the event "
            "loop of both: await the function itself"
        )

    async def outcome() -> tuple[Any, BaseException | None]:
        try:
            return await returned, None
        except BaseException as error:  # a future would replace timeouts, without their place
            return None, error

    value, error = asyncio.run_coroutine_threadsafe(outcome(), _event_loop()).result()
    if error is not None:
        raise error
    return value


def on_event_loop() -> bool:
    """Whether this is the thread of the event loop of all rewards."""
    return threading.current_thread().name == _LOOP_THREAD


def _event_loop() -> asyncio.AbstractEventLoop:
    """Return the event loop of all rewards, which threads may ask for at the same time."""
    with _STARTING:
        return _start_loop()


@functools.cache
def _start_loop() -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()

    def run() -> None:
        while True:
            with suppress(KeyboardInterrupt, SystemExit):  # the call of the reward raises them too
                loop.run_forever()

    threading.Thread(target=run, name=_LOOP_THREAD, daemon=True).start()
    return loop


def _without_truths(function: Callable[..., Any]) -> RewardFunction:
    """Let a function of trajectories alone be called with ground truths too."""

    def reward(trajectories: Sequence[Trajectory], ground_truths: GroundTruths = None) -> Any:
        return function(trajectories)

    reward.__name__ = reward_name(function)
    return reward


def reward_name(reward: Any) -> str:
    """The name of a reward in errors and metrics."""
    return str(getattr(reward, "__name__", None) or type(reward).__name__)


def completions_of(trajectories: Sequence[Mapping[str, Any]]) -> list[str]:
    """Read the text of each completion; raises for anything but a list of trajectories."""
    if isinstance(trajectories, Mapping | str) or not isinstance(trajectories, Sequence):
        raise TypeError(f"trajectories must be a list of trajectories, got {trajectories!r:.80}")
    for i, trajectory in enumerate(trajectories):
        if not isinstance(trajectory, Mapping):
            raise TypeError(f"trajectories[{i}] must be a dictionary, got {trajectory!r:.80}")
    return [completion_text(trajectory) for trajectory in trajectories]


def align_ground_truths(
    trajectories: Sequence[Mapping[str, Any]], ground_truths: GroundTruths
) -> list[Any]:
    """Match ground truths with trajectories; None for those without one."""
    if ground_truths is None:
        return [user_data_get(t.get("user_data"), "ground_truth") for t in trajectories]
    if isinstance(ground_truths, str | Mapping) or not hasattr(ground_truths, "__len__"):
        raise TypeError(f"ground_truths must be a list, got {ground_truths!r:.80}")
    count, truths = len(trajectories), [_read_truth(truth) for truth in ground_truths]
    if count and (not truths or count % len(truths)):
        raise ValueError(
            f"ground_truths must be one for each of {count} trajectories, or one for each prompt, "
            f"whose completions are of equal number, got {len(truths)}"
        )
    per_prompt = count // len(truths) if truths else 0
    return [truth for truth in truths for _ in range(per_prompt)]


def find_ground_truths(
    trajectories: Sequence[Mapping[str, Any]], ground_truths: GroundTruths
) -> list[str]:
    """Match ground truths with trajectories, as text; raises where one is missing, or is a list."""
    truths = _present_truths(trajectories, ground_truths)
    for i, truth in enumerate(truths):
        if not isinstance(truth, str):
            raise ValueError(f"ground_truths[{i}] must be text or a number, got {truth!r:.80}")
    return truths


def _present_truths(
    trajectories: Sequence[Mapping[str, Any]], ground_truths: GroundTruths
) -> list[Any]:
    """Match ground truths with trajectories, numbers as text; raises where one is missing."""
    truths = align_ground_truths(trajectories, ground_truths)
    present: list[Any] = []
    for i, truth in enumerate(truths):
        present.append("" if truth is None else _as_text(truth))
        if not len(present[i]):
            raise ValueError(
                f"ground_truths[{i}] must be an answer, got {truth!r}: pass ground_truths, or "
                "keep a 'ground_truth' in the user_data of each trajectory"
            )
    return present


def _as_text(truth: Any) -> Any:
    """Write a ground truth as text, unless it is a list, a dictionary or an array of several."""
    nested = isinstance(truth, Collection) and not isinstance(truth, str)
    nested = getattr(truth, "ndim", nested) > 0  # an array without axes is a number
    return truth if nested else str(truth).strip()


def _read_truth(truth: Any) -> Any:
    """A ground truth that is a trajectory: that in its `user_data`, or else its last message."""
    if not isinstance(truth, Mapping) or truth.keys().isdisjoint(("messages", "user_data")):
        return truth
    kept = user_data_get(truth.get("user_data"), "ground_truth")
    messages = truth.get("messages") or ()
    return message_text(messages[-1]) if kept is None and messages else kept


def _columns(trajectories: Sequence[Trajectory], truths: list[Any]) -> dict[str, list[Any]]:
    """Turn trajectories into columns, one list for each name, as TRL passes them."""
    completions_of(trajectories)  # for its checks
    records = []
    for trajectory in trajectories:
        pairs = trajectory.get("user_data") or ()
        pairs = pairs.items() if isinstance(pairs, Mapping) else pairs
        user_data_get(pairs, "")  # for its checks
        records.append(dict(reversed([(str(name), value) for name, value in pairs])))  # first wins
    columns = to_columns(records)
    if any(truth is not None for truth in truths):
        columns["ground_truth"] = truths
        columns.setdefault("answer", list(truths))
    parts = [_split(trajectory) for trajectory in trajectories]
    columns["prompts"] = [prompt for prompt, _ in parts]
    columns["completions"] = [completion for _, completion in parts]
    return columns


def _split(trajectory: Trajectory) -> tuple[list[Message], list[Message]]:
    """Split a conversation before the assistant's last message."""
    messages = list(trajectory.get("messages") or ())
    for i in range(len(messages) - 1, -1, -1):
        if messages[i].get("role") == "assistant":
            return messages[:i], messages[i:]
    return messages, [Message(role="assistant", content="")]
