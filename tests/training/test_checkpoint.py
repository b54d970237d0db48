"""Checkpoints come back byte for byte, or not at all, whatever happens to the process or disk."""

import logging
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from tests.training.checkpoint_loop import state
from twinkle_jax.rollout import hosts
from twinkle_jax.training.checkpoint import (
    RunCheckpoints,
    find_fault,
    find_state,
    has_state,
    read_checkpoint,
    write_manifest,
    write_with_state,
)
from twinkle_jax.training.state import shapes_of

ROOT = Path(__file__).parents[2]


def content(leaf):
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return str(leaf.dtype), str(jax.random.key_impl(leaf)), content(jax.random.key_data(leaf))
    return str(leaf.dtype), leaf.shape, np.asarray(leaf).tobytes()


def assert_same(got, expected):
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        assert content(a) == content(b)
        assert a.sharding == b.sharding and a.committed == b.committed


def peculiar():
    """A tree with all that is easily lost."""
    odd = np.array([np.nan, -0.0, np.inf, 1e-45], np.float32)
    odd.view(np.uint32)[0] ^= 0xABC  # a NaN with something in it
    weights = {"w": jnp.ones((3, 2)), "b": jnp.zeros(2, jnp.bfloat16)}
    return {
        "params": nnx.state(nnx.Linear(3, 2, rngs=nnx.Rngs(0))),
        "opt": optax.adamw(1e-3).init(weights),
        "key": jax.random.key(3),
        "keys": jax.random.split(jax.random.key(4, impl="rbg"), (2, 3)),
        "odd": jnp.asarray(odd),
        "bfloat16": jnp.asarray(np.arange(2**16, dtype=np.uint16).view(jnp.bfloat16)),
        "float8": jnp.arange(8).astype(jnp.float8_e4m3fn),
        "bits": (jnp.array([True, False]), jnp.uint8(255), jnp.int32(-7)),
        "none": (None, jnp.zeros((0, 3), jnp.float16)),
        "a.b": {"a/b": jnp.ones(1), "..": jnp.ones(2), "": jnp.ones(3), "[0]": jnp.ones(4)},
    }


def test_everything_comes_back_as_it_was(tmp_path):
    arrays = peculiar()
    facts = {"position": 7, "config": {"rate": 1e-3, "name": "é\n"}, "list": [None, True]}
    directory = RunCheckpoints(tmp_path / "deep" / "run").save(40, arrays, facts)
    assert directory == tmp_path / "deep" / "run" / "step_00000040"
    jax.random.normal(arrays["key"])  # saving has not used it up
    checkpoints = RunCheckpoints(str(tmp_path / "deep" / "run"))
    restored = checkpoints.restore(jax.tree.map(jnp.zeros_like, arrays))
    assert (restored.step, restored.facts) == (40, facts)
    assert_same(restored.arrays, arrays)
    described = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), arrays)
    assert_same(checkpoints.restore(described).arrays, arrays)


def test_what_is_written_in_the_background_is_what_was_there(tmp_path):
    checkpoints, arrays = RunCheckpoints(tmp_path, keep=2), peculiar()
    change = jax.jit(lambda x: jax.tree.map(jnp.add, x, x), donate_argnums=0)
    for step in (1, 2, 3):
        large = jnp.full((1 << 20,), step, jnp.float32)
        target = checkpoints.save(step, arrays | {"large": large}, {"step": step}, wait=False)
        assert step - 1 in {0, *checkpoints.steps()}  # the one before is there
        jax.block_until_ready(change(large))  # its memory may be another array's now
    checkpoints.finish()
    assert target in tmp_path.iterdir()
    for step in (2, 3):
        expected = arrays | {"large": jnp.full((1 << 20,), step, jnp.float32)}
        restored = checkpoints.restore(jax.tree.map(jnp.zeros_like, expected), step=step)
        assert_same(restored.arrays, expected)
        assert restored.facts == {"step": step}


def test_looking_after_a_save_in_the_background_is_enough(tmp_path):
    checkpoints = RunCheckpoints(tmp_path)
    checkpoints.poll()
    checkpoints.save(1, {"x": jnp.ones(3)}, {}, wait=False)
    while checkpoints.steps() != [1]:
        checkpoints.poll()
    checkpoints.finish()
    assert [path.name for path in tmp_path.iterdir()] == ["step_00000001"]


@pytest.mark.parametrize("arrays", [{}, {"none": jnp.zeros((2, 0))}])
def test_nothing_to_write(tmp_path, arrays):
    checkpoints = RunCheckpoints(tmp_path)
    checkpoints.save(0, arrays, {})
    assert_same(checkpoints.restore(arrays).arrays, arrays)


def test_arrays_come_back_to_their_devices(tmp_path):
    mesh = jax.make_mesh((4, 2), ("data", "model"))

    def put(x, *axes):
        return jax.device_put(x, NamedSharding(mesh, PartitionSpec(*axes)))

    arrays = {
        "split": put(jnp.arange(64.0).reshape(8, 8), "data", "model"),
        "part": put(jnp.arange(16).astype(jnp.bfloat16), "model"),
        "whole": put(jnp.arange(3.0)),
        "keys": put(jax.random.split(jax.random.key(0), 8), "data"),
        "one": jax.device_put(jnp.arange(4.0), jax.devices()[5]),
        "empty": put(jnp.zeros((0, 2)), None, "model"),
        "anywhere": jnp.arange(5.0),
    }
    checkpoints = RunCheckpoints(tmp_path)
    checkpoints.save(1, arrays, {})
    got = checkpoints.restore(arrays).arrays
    assert_same(got, arrays)
    jax.jit(lambda a, b: a.sum() + b.sum())(got["split"], got["anywhere"])  # meets the mesh
    elsewhere = {name: jnp.zeros_like(x) for name, x in arrays.items()} | {
        "split": put(jnp.zeros((8, 8)), None, "data"),
        "whole": jnp.zeros(3),
    }
    moved = checkpoints.restore(elsewhere).arrays
    for name, leaf in elsewhere.items():
        assert content(moved[name]) == content(arrays[name])
        assert moved[name].sharding == leaf.sharding and moved[name].committed == leaf.committed


def test_shapes_dtypes_and_names_must_be_those_saved(tmp_path):
    checkpoints = RunCheckpoints(tmp_path)
    saved = {"a": jnp.ones(3), "b": jnp.ones(3)}
    checkpoints.save(1, saved, {})
    for like, error, message in (
        ({"a": jnp.ones(3)}, ValueError, r"^like .*\['b'\]"),
        (saved | {"c": jnp.ones(1)}, ValueError, r"^like .*\['c'\]"),
        (saved | {"b": jnp.ones(4)}, ValueError, r"^like .*\['b'\] .*shape"),
        (saved | {"b": jnp.ones(3, jnp.bfloat16)}, TypeError, r"^like .*\['b'\] .*dtype"),
        (saved | {"b": jax.random.key(0)}, ValueError, r"^like .*\['b'\] .*shape"),
    ):
        with pytest.raises(error, match=message):
            checkpoints.restore(like)
    checkpoints.save(2, {"key": jax.random.key(0, impl="rbg")}, {})
    with pytest.raises(TypeError, match=r"^like .*dtype"):
        checkpoints.restore({"key": jax.random.key(0, impl="unsafe_rbg")})


@jax.tree_util.register_pytree_with_keys_class
class SameName:
    def tree_flatten_with_keys(self):
        key = jax.tree_util.GetAttrKey("x")
        return [(key, jnp.ones(1)), (key, jnp.ones(2))], None

    def tree_unflatten(self, children):
        return SameName()


@pytest.mark.parametrize(
    ("arrays", "error", "message"),
    [
        ({"a": np.ones(3)}, TypeError, r"^arrays .*\['a'\]"),
        ({"a": 1.0}, TypeError, r"^arrays .*\['a'\]"),
        ({"a": jnp.asarray(1.0)}, TypeError, r"^arrays .*\['a'\]"),
        (SameName(), ValueError, r"^arrays .*\.x"),
    ],
)
def test_what_cannot_come_back_is_not_saved(tmp_path, arrays, error, message):
    with pytest.raises(error, match=message):
        RunCheckpoints(tmp_path).save(1, arrays, {})
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "facts", [{"x": float("nan")}, {"x": float("inf")}, {1: 2}, {"x": (1, 2)}, {"x": {1}}]
)
def test_facts_are_json(tmp_path, facts):
    with pytest.raises(ValueError, match="facts"):
        RunCheckpoints(tmp_path / "run").save(1, {}, facts)
    assert not (tmp_path / "run").exists()


def test_old_steps_go_once_a_new_one_is_there(tmp_path):
    checkpoints = RunCheckpoints(tmp_path, keep=2)
    for step in (0, 5, 10, 100_000_000):
        checkpoints.save(step, {}, {"step": step})
        (tmp_path / "step_notes").mkdir(exist_ok=True)  # of someone else
    assert checkpoints.steps() == [10, 100_000_000]
    assert checkpoints.restore({}, step=10).facts == {"step": 10}
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["step_00000010", "step_100000000", "step_notes"]


def test_only_the_first_process_deletes_old_steps(tmp_path, monkeypatch):
    checkpoints = RunCheckpoints(tmp_path, keep=1)
    checkpoints.save(1, {}, {})
    for step, is_first in ((2, False), (3, True)):
        checkpoints.save(step, {}, {}, wait=False)
        while step not in checkpoints.steps():
            time.sleep(0.01)
        monkeypatch.setattr(hosts, "is_first", lambda first=is_first: first)
        checkpoints.finish()
        assert checkpoints.steps() == ([3] if is_first else [1, 2])
        monkeypatch.undo()


def test_remains_of_ended_saves_go_and_what_others_do_stays(tmp_path):
    fcntl = pytest.importorskip("fcntl", reason="no locks on this system, where remains stay")
    remains = [tmp_path / f".step_00000040.0123abc{i}.partial" for i in range(2)]
    for path in remains:
        (path / "arrays").mkdir(parents=True)
    other = tmp_path / ".other.01234567.partial"
    other.mkdir()
    (tmp_path / "step_00000099").write_text("no directory")
    locked = os.open(remains[1], os.O_RDONLY)
    fcntl.flock(locked, fcntl.LOCK_EX)  # someone is saving there
    checkpoints = RunCheckpoints(tmp_path)
    checkpoints.save(50, {}, {})
    os.close(locked)
    assert [path.exists() for path in (*remains, other)] == [False, True, True]
    assert checkpoints.steps() == [50]


def test_logging_is_left_as_it_was(tmp_path):
    logger = logging.getLogger("absl")
    level = logger.level
    logger.setLevel(logging.INFO)
    try:
        checkpoints = RunCheckpoints(tmp_path)
        checkpoints.save(1, {"x": jnp.ones(1)}, {})
        checkpoints.restore({"x": jnp.ones(1)})
        assert logger.level == logging.INFO
    finally:
        logger.setLevel(level)


def test_a_step_is_never_silently_skipped(tmp_path):
    first = RunCheckpoints(tmp_path, keep=3)
    for step in (10, 20, 30):
        first.save(step, {}, {"by": "first"})
    first.save(30, {}, {"by": "first again"})
    assert first.restore({}).facts == {"by": "first again"}
    with pytest.raises(ValueError, match="step"):
        first.save(20, {}, {})
    for step in (20, 30):
        with pytest.raises(ValueError, match=f"^step .* got {step}"):
            RunCheckpoints(tmp_path).save(step, {}, {})
    second = RunCheckpoints(tmp_path, keep=3)
    assert second.restore({}, step=10).step == 10
    second.save(15, {}, {"by": "second"})  # 20 and 30 are of the run that was left
    assert second.steps() == [10, 15]
    assert RunCheckpoints(tmp_path).restore({}) == (15, {}, {"by": "second"})


def test_bad_arguments(tmp_path):
    checkpoints = RunCheckpoints(tmp_path / "none")
    assert checkpoints.steps() == []
    with pytest.raises(FileNotFoundError, match=r"^directory must .*none"):
        checkpoints.restore({})
    with pytest.raises(ValueError, match="step"):
        checkpoints.save(-1, {}, {})
    with pytest.raises(ValueError, match="step"):
        checkpoints.restore({}, step=3)


def two_steps(tmp_path):
    checkpoints = RunCheckpoints(tmp_path)
    for step in (1, 2):
        checkpoints.save(step, state(step), {"step": step})
    files = [path for path in checkpoints.path(2).rglob("*") if path.is_file()]
    assert len(files) > 8
    return checkpoints, files


def assert_falls_back(checkpoints, path):
    with pytest.warns(UserWarning, match=f"step 2 .*{re.escape(str(path))}"):
        restored = checkpoints.restore(state(0))
    assert (restored.step, restored.facts) == (1, {"step": 1})
    assert_same(restored.arrays, state(1))
    with pytest.raises(ValueError, match=f"^step must .* got 2: {re.escape(str(path))}"):
        checkpoints.restore(state(0), step=2)


def test_one_flipped_bit_in_any_file(tmp_path):
    checkpoints, files = two_steps(tmp_path)
    rng = np.random.default_rng(0)
    for path in files:
        undamaged = path.read_bytes()
        bits = bytearray(undamaged)
        bits[rng.integers(len(bits))] ^= 1 << rng.integers(8)
        path.write_bytes(bits)
        assert_falls_back(checkpoints, path)
        path.write_bytes(undamaged)
    assert checkpoints.restore(state(0)).step == 2


@pytest.mark.parametrize("damage", ["cut", "emptied", "longer", "removed"])
def test_files_cut_short_and_missing(tmp_path, damage):
    checkpoints, files = two_steps(tmp_path)
    for path in files:
        undamaged = path.read_bytes()
        changed = {
            "cut": undamaged[:-1],
            "emptied": b"",
            "longer": undamaged + b"\n",
            "removed": b"",
        }
        path.write_bytes(changed[damage])
        if damage == "removed":
            path.unlink()
        assert_falls_back(checkpoints, path)
        path.write_bytes(undamaged)


def test_any_flipped_bit_in_the_manifest(tmp_path):
    (tmp_path / "deep").mkdir()
    for name in ("a", "deep/é"):
        (tmp_path / name).write_bytes(name.encode())
    write_manifest(tmp_path)
    assert find_fault(tmp_path) is None
    (tmp_path / "of someone else").touch()
    assert find_fault(tmp_path) is None
    path = tmp_path / "manifest.json"
    manifest_bytes = path.read_bytes()
    for bit in range(0, 8 * len(manifest_bytes), 5):
        bits = bytearray(manifest_bytes)
        bits[bit // 8] ^= 1 << bit % 8
        path.write_bytes(bits)
        assert str(find_fault(tmp_path)).startswith(f"{path} is corrupt"), bit


def test_all_damaged_is_an_error_and_saving_anew_is_deliberate(tmp_path):
    checkpoints, _ = two_steps(tmp_path)
    checkpoints = RunCheckpoints(tmp_path)
    for step in (1, 2):
        (checkpoints.path(step) / "facts.json").write_text("{}")
    with pytest.warns(UserWarning, match="is skipped"), pytest.raises(FileNotFoundError):
        checkpoints.restore(state(0))
    with pytest.raises(ValueError, match="step"):
        checkpoints.save(1, {}, {})


def test_a_damaged_newest_step_is_replaced_when_the_run_gets_there_again(tmp_path):
    _, files = two_steps(tmp_path)
    files[0].unlink()
    again = RunCheckpoints(tmp_path)
    with pytest.warns(UserWarning, match="step 2"):
        again.restore(state(0))
    again.save(2, state(2), {"step": 2})
    assert_same(RunCheckpoints(tmp_path).restore(state(0)).arrays, state(2))


MOMENTS = [pytest.param(x, marks=() if x < 1 else pytest.mark.exhaustive) for x in range(10)]


@pytest.mark.slow
@pytest.mark.parametrize("moment", MOMENTS)
def test_killed_while_saving(tmp_path, moment):
    how = "background" if moment % 2 == 0 else "at once"
    loop = [sys.executable, "-m", "tests.training.checkpoint_loop"]
    command = [*loop, str(tmp_path / "run"), how]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.stdout.readline()  # a step is there
        time.sleep(np.random.default_rng(moment).random())
        process.send_signal(signal.SIGKILL)
        told = [1, *map(int, process.stdout.read().split(b"\n")[:-1])]
    checkpoints = RunCheckpoints(tmp_path / "run", keep=2)
    step, arrays, facts = checkpoints.restore(state(0))  # with a warning the test would fail
    assert told[-1] <= step <= told[-1] + 2 and facts == {"step": step}
    assert_same(arrays, state(step))
    checkpoints.save(step + 1, state(step + 1), {"step": step + 1})
    names = sorted(path.name for path in (tmp_path / "run").iterdir())
    assert names == [f"step_{s:08d}" for s in (step, step + 1)]


DISK_FULL = """
import resource, signal, sys
import jax.numpy as jnp
from twinkle_jax.training.checkpoint import RunCheckpoints
checkpoints = RunCheckpoints(sys.argv[1])
checkpoints.save(1, {"x": jnp.arange(9.0)}, {})
many = {f"x{i}": jnp.arange(100_000) + i for i in range(40)}
big, small = {"x": jnp.arange(500_000)}, {"x": jnp.arange(5)}
states = [(big, {}), (small, {"x": "y" * 300_000}), (many, {})]
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, 200_000))
for arrays, facts in states:
    try:
        checkpoints.save(2, arrays, facts)
    except OSError as error:
        print(error)
for later in (checkpoints.finish, lambda: checkpoints.save(3, small, {})):
    checkpoints.save(2, big, {}, wait=False)
    try:
        later()
    except OSError as error:
        print(error)
checkpoints.save(2, big, {}, wait=False)
try:
    while True:
        checkpoints.poll()
except OSError as error:
    print(error)
"""


@pytest.mark.exhaustive
def test_no_space(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", DISK_FULL, str(tmp_path)],
        cwd=ROOT, capture_output=True, text=True, check=True, timeout=200,
    )  # fmt: skip
    for line in done.stdout.splitlines():
        assert "step 2 was not saved: " in line and "File too large" in line
        assert str(tmp_path / "step_00000002") in line
    assert len(done.stdout.splitlines()) == 6 and "Traceback" not in done.stderr
    assert [p.name for p in tmp_path.iterdir()] == ["step_00000001"]
    like = {"x": jnp.zeros(9)}
    assert_same(RunCheckpoints(tmp_path).restore(like).arrays, {"x": jnp.arange(9.0)})


def test_system_errors_of_other_arrays_are_not_logged(tmp_path, caplog):
    """Orbax logs those of arrays that it has given up on whenever their tasks are collected."""
    RunCheckpoints(tmp_path).save(1, {"x": jnp.zeros(3)}, {})
    full = ValueError("Failed to write 9 bytes to file 5: File too large [os_error_code='27']")
    for name in ("absl", "asyncio"):
        logging.getLogger(name).error("Task exception was never retrieved", exc_info=full)
        logging.getLogger(name).error("something else", exc_info=ValueError("else"))
    assert [record.getMessage() for record in caplog.records] == ["something else"] * 2


def test_weights_with_the_state_of_their_training(tmp_path):
    """Both are replaced at once, other files stay, and a failure changes nothing."""
    place, arrays = tmp_path / "policy", {"m": jnp.arange(3.0), "key": jax.random.key(1)}

    def weights(name, error=None):
        def write(directory):
            directory.mkdir()
            (directory / name).write_text("weights")
            if error is not None:
                raise error

        return write

    def files():
        return {
            path.relative_to(place).as_posix(): path.read_bytes()
            for path in place.rglob("*")
            if path.is_file()
        }

    with pytest.raises(ValueError, match="saving"):
        find_state(place, "saving")
    write_with_state(place, weights("model-1.safetensors"), arrays, {"step": 1})
    (place / "notes").mkdir()
    (place / "notes" / "mine.txt").write_text("mine")
    (place / "training_state" / "old").write_text("of the first")
    write_with_state(place, weights("model.safetensors"), arrays, {"step": 2})
    before = files()
    assert {name for name in before if "training_state" not in name} == {
        "notes/mine.txt",
        "model.safetensors",
    }
    assert "training_state/old" not in before
    read, facts = read_checkpoint(find_state(place, "saving"), shapes_of(arrays))
    assert facts == {"step": 2} and (read["m"] == arrays["m"]).all()
    assert jnp.array_equal(jax.random.key_data(read["key"]), jax.random.key_data(arrays["key"]))
    for write, facts in ((weights("x", OSError("full")), {}), (weights("x"), {"step": {1}})):
        with pytest.raises((OSError, ValueError), match=r"full|JSON"):
            write_with_state(place, write, arrays, facts)
    assert files() == before and [path.name for path in tmp_path.iterdir()] == ["policy"]
    with pytest.raises(ValueError, match=r"directory .*model\.safetensors"):
        write_with_state(place / "model.safetensors", weights("x"), arrays, {})
    (place / "training_state" / "facts.json").write_text("{}")
    with pytest.raises(ValueError, match="training_state"):
        find_state(place, "saving")
    assert has_state(place)
    write_with_state(place, weights("model-2.safetensors"), None, {})
    assert not has_state(place)
    assert set(files()) == {"notes/mine.txt", "model-2.safetensors"}


def test_shapes_keep_the_place_of_arrays():
    place = NamedSharding(jax.make_mesh((2,), ("x",)), PartitionSpec("x"))
    described = shapes_of({"a": jax.device_put(np.zeros((2, 3), np.int32), place), "b": np.ones(4)})
    assert (described["a"].shape, described["a"].dtype) == ((2, 3), np.int32)
    assert described["a"].sharding == place and described["b"].sharding is None
