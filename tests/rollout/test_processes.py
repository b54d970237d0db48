"""Tools and environments in processes of their own: what they may take, and what ends them."""

import datetime
import decimal
import json
import os
import resource
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from tests.rollout import games
from tests.rollout.test_multi_turn import ROWS, check_scores, sample
from twinkle_jax.data import PromptBatch
from twinkle_jax.rollout import Action, ProcessLimits, episode_metrics, find_environment
from twinkle_jax.rollout.environment import ProcessFailedError, failure_cause

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="processes are forked")
TOOLS = f"{os.path.dirname(__file__)}/wild_tools.py"


@pytest.fixture(scope="module")
def tools():
    return find_environment(None, TOOLS, limits=ProcessLimits(1.0, 256))


def call(environment, name, **arguments):
    text = json.dumps({"name": name, "arguments": arguments})
    messages, _, _, info = environment.step(Action(f"<tool_call>{text}</tool_call>"))
    return messages[0]["content"], info["tool_errors"]


def test_tools_are_found_after_a_change_of_the_directory(tmp_path, monkeypatch):
    """By a reward or an environment: the process starts at the first call, and again if it dies."""
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "where.py").write_text("import os\n\n\ndef where():\n    return os.getcwd()\n")
    for name in ("where.py", "~/where.py:where"):
        monkeypatch.chdir(tmp_path)
        environment = find_environment(None, name, limits=ProcessLimits(5.0, 256))()
        monkeypatch.chdir("/")
        assert call(environment, "where") == (str(tmp_path), 0)


def alive(path):
    lines = path.read_text().split()
    return [pid for pid in lines if is_alive(pid)], lines


def is_alive(pid):
    return os.path.exists(f"/proc/{pid}") and _state(pid) != "Z"


def end(*pids):
    """Whether processes end within a few seconds."""
    deadline = time.monotonic() + 5
    while any(map(is_alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not any(map(is_alive, pids))


def children(pid):
    with open(f"/proc/{pid}/task/{pid}/children") as file:
        return file.read().split()


def _state(pid):
    with open(f"/proc/{pid}/stat") as file:
        return file.read().rpartition(")")[2].split()[0]


@pytest.mark.parametrize(
    ("name", "arguments", "answer", "errors"),
    [
        ("add", {"x": 2}, "3", 0),
        ("later", {"text": "é"}, "é", 0),
        ("count", {}, "1", 0),
        ("show", {}, "{1, 2}", 0),
        ("measure", {}, '{"counts": [1, 2]}', 0),
        ("garbage", {}, "\ufffd\ufffd1", 0),
        ("half_character", {}, "\ud800", 0),
        ("divide", {}, "Error: ZeroDivisionError: division by zero", 1),
        ("recurse", {}, "Error: RecursionError", 1),
        ("add", {"z": 2}, "Error: add: missing", 1),
        ("gone", {}, "Error: there is no tool", 1),
    ],
)
def test_answers_and_errors_that_are_the_policys(tools, name, arguments, answer, errors):
    for _ in range(2):  # no call sees what another has changed
        text, count = call(tools(), name, **arguments)
        assert text.startswith(answer)
        assert count == errors


def test_a_process_ends_with_its_answer(tools):
    processes = {call(tools(), "identify")[0] for _ in range(3)}
    assert len(processes) == 3
    assert end(*processes)


def test_a_result_of_100_megabytes_is_shortened(tools):
    assert 1000 < len(call(tools(), "flood")[0]) <= 1 << 20


@pytest.mark.parametrize(
    ("name", "cause"),
    [
        ("hang", "timeout"),
        ("spin", "timeout"),
        ("die", "died"),
        ("crash", "died"),
        ("leave", "died"),
        ("close_all", "died"),
        ("quit_python", "raised"),
        ("eat", "raised"),
        ("lose_connection", "connection"),
        ("forge", "reply"),
        ("kill_all", "died"),
    ],
)
def test_failures_are_no_answers(tools, name, cause):
    began = time.monotonic()
    with pytest.raises(ProcessFailedError) as caught:
        call(tools(), name)
    assert failure_cause(caught.value) == cause
    assert time.monotonic() - began < 9
    assert call(tools(), "add", x=1) == ("2", 0)  # the next call finds a process


ROOMY = """
class Roomy:
    def reset(self, row, seed):
        return "1"

    def step(self, action):
        return "2", 1.0, True, {}

    def close(self):
        pass
"""
CROWDED = """
import os, resource, sys
if sys.argv[0].endswith("process_worker.py"):  # not in the process of the tests
    most = len(os.listdir("/proc/self/fd")) + 12
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
"""


def started(path, count):
    made = find_environment(f"{path}:Roomy", environment_in="process")
    environments = [made() for _ in range(count)]
    for environment in environments:
        environment.reset({"messages": []}, 0)
        yield environment


@pytest.mark.slow
def test_there_may_be_more_environments_than_open_files_by_default(tmp_path):
    """1,024 of both are the defaults: all episodes failed, since their process had ended."""
    (tmp_path / "roomy.py").write_text(ROOMY)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, limits[1]))
    try:
        environments = list(started(tmp_path / "roomy.py", 64))
        assert {environment.step(Action("1"))[1] for environment in environments} == {1.0}
        for environment in environments:
            environment.close()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="/proc is Linux's")
def test_one_too_many_fails_alone_and_says_why(tmp_path):
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    (tmp_path / "crowded.py").write_text(CROWDED + ROOMY)
    environments = []
    with pytest.raises(ProcessFailedError, match="Too many open files") as caught:
        environments.extend(started(tmp_path / "crowded.py", 64))
    assert failure_cause(caught.value) == "raised"
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == limits
    assert environments[0].step(Action("1"))[1] == 1.0
    for environment in environments:
        environment.close()


NO_SANDBOX = """
from twinkle_jax.rollout import SandboxUnavailableError

def python(code: str) -> str:
    raise SandboxUnavailableError("no namespaces here")
"""


@pytest.mark.slow
def test_a_system_without_a_sandbox_is_no_answer(tmp_path):
    """The policy read of it as of a mistake of its own."""
    (tmp_path / "tools.py").write_text(NO_SANDBOX)
    environment = find_environment(None, str(tmp_path / "tools.py"))()
    with pytest.raises(ProcessFailedError, match="no namespaces here") as caught:
        call(environment, "python", code="print(1)")
    assert failure_cause(caught.value) == "raised"


@pytest.mark.parametrize("name", ["fork_and_hang", "fork_and_return"])
def test_what_a_tool_starts_ends_with_it(tools, name, tmp_path):
    path = tmp_path / "pids"
    path.touch()
    if name == "fork_and_hang":
        with pytest.raises(ProcessFailedError, match="in time"):
            call(tools(), name, path=str(path))
    else:
        assert call(tools(), name, path=str(path)) == ("parent", 0)
    time.sleep(0.2)
    living, begun = alive(path)
    assert len(begun) == (3 if name == "fork_and_hang" else 1)
    assert not living


def test_calls_run_at_the_same_time_and_get_their_own_answers(tools):
    call(tools(), "add", x=0)
    began = time.monotonic()
    with ThreadPoolExecutor(24) as threads:
        hanging = [threads.submit(call, tools(), "hang") for _ in range(24)]
        answers = list(threads.map(lambda x: call(tools(), "add", x=x)[0], range(64)))
        assert all(isinstance(x.exception(), ProcessFailedError) for x in hanging)
    assert answers == [str(x + 1) for x in range(64)]
    assert time.monotonic() - began < 20  # 24 times a second, one after the other


def test_a_file_that_cannot_be_imported_there_is_said_so(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text("def f(): return 1\n")
    environment = find_environment(None, str(path))()
    path.write_text("raise OSError('not here')")
    with pytest.raises(RuntimeError, match="not here"):
        environment._functions["f"]()


def test_tools_by_attribute_and_index(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text("def make(n):\n    def f(): return n\n    f.__name__ = f'f{n}'\n    return f\n"
                    "TOOLS = [make(1), make(2)]\nONE = make(3)\n")  # fmt: skip
    several = find_environment(None, f"{path}:TOOLS")
    assert [call(several(), name)[0] for name in ("f1", "f2")] == ["1", "2"]
    assert call(find_environment(None, f"{path}:ONE")(), "f3") == ("3", 0)
    assert call(find_environment(None, f"{path}:ONE", tools_in="thread")(), "f3") == ("3", 0)


@pytest.mark.slow
def test_nothing_is_left_when_what_asked_is_gone(tmp_path):
    """The process ends with the environment's factory, and so does a runner that is at work."""
    path = tmp_path / "pids"
    path.touch()
    code = (
        "import json, threading, time\n"
        "from twinkle_jax.rollout import Action, find_environment\n"
        f"factory = find_environment(None, {TOOLS!r})\n"
        "text = json.dumps({'name': 'fork_and_hang', 'arguments': {'path': %r}})\n"
        "step = factory().step\n"
        "action = Action(f'<tool_call>{text}</tool_call>')\n"
        "threading.Thread(target=step, args=(action,), daemon=True).start()\n"
        "while open(%r).read().count('\\n') < 3: time.sleep(0.05)\n"
    ) % (str(path), str(path))
    subprocess.run([os.sys.executable, "-c", code], check=True, timeout=60)
    time.sleep(0.2)
    living, begun = alive(path)
    assert len(begun) == 3
    assert not living


# Environments.


@pytest.fixture(scope="module")
def wild():
    return find_environment(
        f"{games.__name__}:Wild", environment_in="process", limits=ProcessLimits(1.5, 512)
    )


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="descendants are found on Linux")
def test_what_an_environment_starts_lives_as_long_as_its_episode():
    """Also if it left the environment's session, and if another episode ends meanwhile."""
    factory = find_environment(f"{games.__name__}:Keeps", environment_in="process")
    one, other = factory(), factory()
    [kept], [others] = (x.reset({"user_data": []}, 0) for x in (one, other))
    assert is_alive(kept["content"])
    other.close()
    assert end(others["content"])
    [told], *_ = one.step(Action(""))
    assert told["content"] == "True"
    one.close()
    assert end(kept["content"])


@pytest.mark.slow
def test_a_row_is_the_same_in_a_process(tmp_path):
    """Dates, which Parquet files hold, became text; NumPy's arrays became lists."""
    (tmp_path / "shown.py").write_text(
        "class Shown:\n"
        "    def reset(self, row, seed):\n"
        "        return repr(row)\n"
        "    def step(self, action):\n"
        "        return '', 0.0, True, {}\n"
        "    def close(self):\n"
        "        pass\n"
    )
    make = find_environment(f"{tmp_path}/shown.py:Shown", environment_in="process")
    environment = make()
    columns = {"level": np.int64(3), "numbers": np.arange(2), "price": decimal.Decimal("1.50")}
    columns |= {"day": datetime.date(2024, 2, 29), "bytes": b"\0", "by_number": {1: ("a", None)}}
    columns |= {"instant": datetime.datetime(2024, 2, 29, 12, tzinfo=datetime.UTC)}
    row = {"messages": [], "user_data": list(columns.items())}
    (message,) = environment.reset(row, 0)
    assert message["content"] == repr(row)
    environment.close()


def test_an_action_is_the_same_in_a_process(tmp_path):
    (tmp_path / "counts.py").write_text(
        "class Counts:\n"
        "    def reset(self, row, seed):\n"
        "        return None\n"
        "    def step(self, action):\n"
        "        return f'{action} {len(action.calls)}', 0.0, False, {}\n"
        "    def close(self):\n"
        "        pass\n"
    )
    environment = find_environment(f"{tmp_path}/counts.py:Counts", environment_in="process")()
    environment.reset({"messages": [], "user_data": []}, 0)
    cline = "<f><x>1</x></f>"
    for action, calls in (
        (Action(cline), 1),
        (Action(cline, "react"), 0),
        (Action(cline, thinking=True), 0),
    ):
        [told], *_ = environment.step(action)
        assert told["content"] == f"{cline} {calls}"
    environment.close()


def test_a_cause_that_a_process_invents_is_not_counted():
    assert failure_cause(ProcessFailedError("", "forged")) == "raised"
    assert failure_cause(ProcessFailedError("reward", "forged")) == "raised"


def play(factory, fault):
    rows = PromptBatch({**row, "user_data": [("fault", fault)]} for row in ROWS)
    return sample(factory, rows, max_failed=1.0)


@pytest.mark.slow
def test_episodes_are_those_of_a_thread(wild):
    here, there = play(games.Wild, ""), play(wild, "")
    assert [e.as_record() for e in here.episodes] == [e.as_record() for e in there.episodes]
    assert [e.info for e in here.episodes] == [e.info for e in there.episodes]
    assert max(len(e.turns) for e in there.episodes) > 2
    assert wild().tools == []
    assert [e.final_reward for e in there.episodes] == [0.25] * 8
    time.sleep(0.3)
    server = wild.args[0].worker.process.pid
    assert not children(server)  # no episode's process is left
    games.OPEN.clear()


@pytest.mark.slow
@pytest.mark.parametrize("fault", games.WILD)
def test_a_fault_is_no_episode_and_no_thread_is_left(wild, fault):
    play(wild, "")
    before = threading.active_count()
    rollout = play(wild, fault)
    cause = games.WILD[fault][1]
    if cause:
        assert rollout.failed.any()
        assert {e.cause for e in rollout.episodes if e.failed} == {cause}
        assert not rollout.failed.all()
        assert episode_metrics(rollout.episodes)[f"environment/failed/{cause}"] > 0
        failed = np.asarray(rollout.failed)
        assert (np.asarray(rollout.batch.labels)[failed] == -100).all()
    else:
        assert not rollout.failed.any()
    check_scores(rollout)
    time.sleep(0.3)
    assert threading.active_count() <= before
