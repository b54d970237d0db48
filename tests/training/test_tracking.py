"""`metrics.jsonl`: every line is JSON, each step once, no line half written; and the trackers."""

import json
import struct
import subprocess
import sys
import time
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from tests.limits import limited_files
from twinkle_jax.training.tracking import MetricsLog, Trackers

ROOT = Path(__file__).parents[2]


def strict(text):
    def refuse(constant):
        raise ValueError(constant)

    return [json.loads(line, parse_constant=refuse) for line in text.splitlines()]


def test_one_line_a_step_at_once(tmp_path):
    with MetricsLog(tmp_path / "deep" / "run") as log:
        path = tmp_path / "deep" / "run" / "metrics.jsonl"
        assert log.path == path and path.read_bytes() == b""
        log.write(0, {"reward": 0.1, "num_tokens": 2**60, "flag": True})
        assert (
            path.read_text()
            == '{"step": 0, "reward": 0.1, "num_tokens": 1152921504606846976, "flag": 1}\n'
        )
        log.write(
            7, {"kl": jnp.float32(0.5), "x": np.float32(0.1), "n": np.int64(3), "a": np.ones(())}
        )
        assert path.read_text().splitlines()[1] == (
            '{"step": 7, "kl": 0.5, "x": 0.10000000149011612, "n": 3.0, "a": 1.0}'
        )
        log.write(np.int64(8), {})
    assert [line["step"] for line in strict(path.read_text())] == [0, 7, 8]


def test_what_is_not_finite_is_null_with_a_note(tmp_path):
    values = {"a": float("nan"), "b": jnp.float32("inf"), "c": -np.inf, "d": 1.0}
    with MetricsLog(tmp_path) as log:
        log.write(1, values)
    assert strict((tmp_path / "metrics.jsonl").read_text()) == [
        {"step": 1, "a": None, "b": None, "c": None, "d": 1.0,
         "not_finite": {"a": "nan", "b": "inf", "c": "-inf"}}
    ]  # fmt: skip


@pytest.mark.parametrize("value", ["1", None, np.ones(1), jnp.ones((2, 2)), [1.0], 1j])
def test_only_numbers(tmp_path, value):
    with MetricsLog(tmp_path) as log:
        with pytest.raises(TypeError, match=r"(?s)metrics"):
            log.write(1, {"reward": 1.0, "loss": value})
        assert log.offset == 0
        log.write(1, {})  # the step is not taken


@pytest.mark.parametrize("name", ["step", "not_finite"])
def test_names_of_its_own(tmp_path, name):
    with MetricsLog(tmp_path) as log, pytest.raises(ValueError, match=f"'{name}'"):
        log.write(1, {name: 1.0})


def test_a_resumed_run_cuts_and_goes_on(tmp_path):
    with MetricsLog(tmp_path) as log:
        offsets = [log.offset]
        for step in (1, 2, 3):
            log.write(step, {"é": step})
            offsets.append(log.offset)
        assert offsets[0] == 0 and offsets[-1] == log.path.stat().st_size
        with pytest.raises(ValueError, match="step"):
            log.write(3, {})
    log_bytes = log.path.read_bytes()
    with MetricsLog(tmp_path) as log:
        assert log.offset == offsets[-1]
        with pytest.raises(ValueError, match="step"):
            log.write(2, {})
        log.truncate(offsets[1])
        assert log.offset == offsets[1]
        for step in (2, 3):
            log.write(step, {"é": step})
    assert log.path.read_bytes() == log_bytes
    with MetricsLog(tmp_path) as log:
        log.truncate(offsets[3])
        log.truncate(0)
        log.write(-5, {})
    assert log.path.read_text() == '{"step": -5}\n'


def test_offsets_where_no_line_ends(tmp_path):
    with MetricsLog(tmp_path) as log:
        log.write(1, {})
        for offset in (-1, 1, log.offset - 1, log.offset + 1):
            with pytest.raises(ValueError, match=r"offset .*put it back"):
                log.truncate(offset)
        assert log.offset == 12


@pytest.mark.parametrize("rest", [b'{"step": 2, "rew', b"x"])
def test_an_unfinished_line_goes(tmp_path, rest):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\n' + rest)
    with MetricsLog(tmp_path) as log:
        assert log.offset == 12
        log.write(2, {})
    assert path.read_text() == '{"step": 1}\n{"step": 2}\n'
    path.write_bytes(rest)
    MetricsLog(tmp_path).close()
    assert path.read_bytes() == b""


@pytest.mark.parametrize("line", ["{}", "7", "nonsense"])
def test_a_file_of_something_else_is_left_alone(tmp_path, line):
    path = tmp_path / "metrics.jsonl"
    path.write_text(f"{line}\nrest")
    with pytest.raises(ValueError, match=r"metrics.jsonl"):
        MetricsLog(tmp_path)
    assert path.read_text() == f"{line}\nrest"


@pytest.mark.filterwarnings("default")  # tensorboardX's own
def test_no_space_for_tensorboard_is_an_error(tmp_path):
    """tensorboardX's thread dies of it, and a step waits for the thread forever."""
    pytest.importorskip("tensorboardX", reason="pip install 'twinkle-jax[tensorboard]'")
    with MetricsLog(tmp_path, Trackers(tensorboard=True)) as log:
        log.write(1, {"a": 1})
        written = sum(path.stat().st_size for path in (tmp_path / "tensorboard").iterdir())
        with limited_files(max(written, 60)), pytest.raises(OSError, match=rf"{tmp_path}'$"):
            log.write(2, {})
    assert any(event.step == 1 for event in events(tmp_path / "tensorboard"))


NO_SPACE = """
import resource, signal, sys
from twinkle_jax.training.tracking import MetricsLog
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (30, 30))
log = MetricsLog(sys.argv[1])
log.write(1, {"a": 1})
for step in (2, 3):
    try:
        log.write(step, {"reward": 1.0})
    except OSError as error:
        print(error)
"""


def test_no_space_leaves_no_half_line(tmp_path):
    command = [sys.executable, "-c", NO_SPACE, str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    path = tmp_path / "metrics.jsonl"
    assert path.read_text() == '{"step": 1, "a": 1}\n'
    for step, line in zip((2, 3), done.stdout.splitlines(), strict=True):
        assert f"metrics of step {step} were not written" in line and str(path) in line


@pytest.mark.parametrize(
    ("tracker", "package"), [("tensorboard", "tensorboardX"), ("wandb", "wandb")]
)
def test_what_is_not_installed_is_named(tmp_path, monkeypatch, tracker, package):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ImportError, match=rf"{package} must be .* 'twinkle-jax\[{tracker}\]'"):
        MetricsLog(tmp_path / "run", Trackers(**{tracker: True}))
    assert not (tmp_path / "run").exists()


def events(directory):
    """All that the event files hold; a record is a length, its checksum, the bytes, a checksum."""
    from tensorboardX.proto.event_pb2 import Event

    for path in sorted(directory.iterdir()):
        content = path.read_bytes()
        while content:
            end = 12 + struct.unpack("<Q", content[:8])[0]
            yield Event.FromString(content[12:end])
            content = content[end + 4 :]


@pytest.mark.filterwarnings("default")  # tensorboardX's own
def test_tensorboard(tmp_path):
    pytest.importorskip("tensorboardX", reason="pip install 'twinkle-jax[tensorboard]'")
    for run, steps in (("a", (1, 2, 3)), ("b", (3, 4))):
        with MetricsLog(tmp_path / run, Trackers(tensorboard=True)) as log:
            for step in steps:
                numbers = {"completions/mean_length": step / 2, "kl": float("nan")}
                log.write(step, numbers | {"eval/pass@2": 0.25})
        seen = list(events(tmp_path / run / "tensorboard"))
        values = [(e.step, v.tag, v.simple_value) for e in seen for v in e.summary.value]
        length = [(s, x) for s, tag, x in values if tag == "completions/mean_length"]
        assert length == [(step, step / 2) for step in steps]
        assert [s for s, tag, x in values if tag == "kl" and x != x] == list(steps)
        assert [s for s, tag, x in values if tag == "eval/pass@2" and x == 0.25] == list(steps)
        # what a killed process wrote of this step and later ones does not count
        assert [e.step for e in seen if e.HasField("session_log")] == [steps[0]]


def test_a_run_goes_on_with_the_lines_of_another(tmp_path):
    first, second = tmp_path / "first", tmp_path / "second"
    with MetricsLog(first) as log:
        log.write(1, {"reward": 0.5})
        offset = log.offset
        log.write(2, {"reward": 0.5})
    lines = (first / "metrics.jsonl").read_bytes()
    with MetricsLog(second) as log:
        with pytest.raises(ValueError, match="first"):
            log.truncate(offset - 1, first)
        assert log.offset == 0
        log.truncate(offset, first)
        with pytest.raises(ValueError, match="step must be after 1"):
            log.write(1, {"reward": 0.5})
        log.write(2, {"reward": 0.5})
    assert (second / "metrics.jsonl").read_bytes() == lines
    assert (first / "metrics.jsonl").read_bytes() == lines


def test_tensorboard_keeps_the_steps_of_a_killed_process(tmp_path):
    """Those before its last checkpoint are not repeated; the file is complete within a second."""
    pytest.importorskip("tensorboardX", reason="pip install 'twinkle-jax[tensorboard]'")
    with MetricsLog(tmp_path, Trackers(tensorboard=True)) as log:
        log.write(1, {"reward": 0.5})
        time.sleep(0.2)
        log.write(2, {"reward": 1.0})
        deadline = time.monotonic() + 20
        while sum(len(e.summary.value) for e in events(tmp_path / "tensorboard")) < 2:
            assert time.monotonic() < deadline
            time.sleep(0.1)


def test_weights_and_biases(tmp_path, monkeypatch):
    pytest.importorskip("wandb", reason="pip install 'twinkle-jax[wandb]'")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    for steps in ((1, 2, 3), (2, 3, 4), (3, 4, 5)):  # resumed after the first, then the second
        with MetricsLog(tmp_path, Trackers(wandb=True)) as log:
            lines = log.path.read_bytes().splitlines(keepends=True)
            log.truncate(sum(map(len, lines[: steps[0] - 1])))
            for step in steps:
                log.write(step, {"reward": 1000.5 + step})
    identity = (tmp_path / "wandb_run.txt").read_text()

    def sent():
        files = sorted((tmp_path / "wandb").glob(f"offline-run-*/run-{identity}.wandb"))
        return [[s for s in range(1, 6) if b"%.1f" % (1000.5 + s) in x.read_bytes()] for x in files]

    expected, deadline = [[1, 2, 3], [4], [5]], time.monotonic() + 10
    while sent() != expected and time.monotonic() < deadline:  # it writes in the background
        time.sleep(0.1)
    assert sent() == expected
