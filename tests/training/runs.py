"""Runs of the command in processes of their own: how to begin them, and what they leave."""

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import orbax.checkpoint as ocp

ROOT = Path(__file__).parents[2]
COMMAND = (
    "import sys, tests.training.signal_at; from twinkle_jax.command import main; sys.exit(main())"
)
TIMES = ("time/sample", "time/environment", "step_time", "tokens_per_second")


def flags(folder, **changes):
    """Six problems, two a step, so that an epoch has three steps; four updates a step."""
    settings = {
        "model": folder / "model",
        "task": folder / "task.jsonl",
        "reward": "tests.training.recorded_reward:short_answers",
        "steps": 6,
        "rollout.prompts": 2,
        "rollout.num_samples": 4,
        "rollout.max_new_tokens": 4,
        "rollout.max_prompt_tokens": 32,
        "update.epochs": 2,
        "update.mini_batches": 2,
        "update.micro_batch_tokens": 64,
        "optimizer.learning_rate": 1e-2,
        "optimizer.warmup_steps": 4,
        "evaluation.every": 0,
        "logging.checkpoint_every": 1,
        "logging.keep_checkpoints": 99,
        "logging.samples_every": 0,
    }
    settings |= {name.replace("__", "."): value for name, value in changes.items()}
    return [f"--{name}={value}" for name, value in settings.items() if value is not None]


def environment(folder, **changes):
    """Compile as the tests do, and once for all runs in a folder."""
    defaults = {
        "JAX_PLATFORMS": "cpu",
        "JAX_NUM_CPU_DEVICES": "1",
        "JAX_DISABLE_MOST_OPTIMIZATIONS": os.environ.get("JAX_DISABLE_MOST_OPTIMIZATIONS", "1"),
        "JAX_COMPILATION_CACHE_DIR": str(folder / "compiled"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        "RECORD": str(folder / "record.jsonl"),
    }
    return os.environ | defaults | changes


def command(arguments):
    return [sys.executable, "-c", COMMAND, "train", *arguments]


def run(folder, directory, *, env=None, before=(), **changes):
    """Run `twinkle-jax train` in a process of its own, and give its status and output.

    Args:
        folder: of the policy and the task.
        directory: of the run.
        env: further variables of the environment.
        before: a command that starts the process.
        changes: of settings.
    """
    return subprocess.run(
        [*before, *command(flags(folder, output_dir=directory, **changes))],
        cwd=ROOT,
        env=environment(folder, RECORD=f"{directory}.record", **(env or {})),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def end_by_signal(folder, directory, moment, **changes):
    """Run the command until the signal of a moment ends it, which it must soon; see `signal_at`."""
    process = subprocess.Popen(
        command(flags(folder, output_dir=directory, **changes)),
        cwd=ROOT,
        env=environment(folder, RECORD=f"{directory}.record", SIGNAL_AT=moment),
        stdout=subprocess.PIPE,
        text=True,
    )
    with process:
        next(line for line in process.stdout if line.startswith("signal at"))
        assert process.wait(timeout=30) == 143


def wait_for(path, seconds=300):
    """Return once a file is there."""
    end = time.monotonic() + seconds
    while not path.exists():
        assert time.monotonic() < end, path
        time.sleep(0.01)


def damage_checkpoint(directory, step, damage):
    """Flip a bit in the largest file of a checkpoint, or remove it if `damage` is `missing`."""
    files = (p for p in (directory / "checkpoints" / f"step_{step:08d}").rglob("*") if p.is_file())
    path = max(files, key=lambda p: p.stat().st_size)
    if damage == "missing":
        path.unlink()
    else:
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 8
        path.write_bytes(content)
    return path


def copy_until(source, target, step):
    """The directory of a run that was killed after a step, and had written more metrics."""
    shutil.copytree(source, target)
    for path in (target / "checkpoints").iterdir():
        if int(path.name.removeprefix("step_")) > step:
            shutil.rmtree(path)
    for name in ("summary.json", "curves.png"):
        (target / name).unlink()
    shutil.rmtree(target / "policy")


def scored(directory):
    """The conversations that a run's reward was asked about, one list a call."""
    return [json.loads(line) for line in Path(f"{directory}.record").read_text().splitlines()]


def lines(directory):
    """Lines of `metrics.jsonl` without times, which no run repeats."""
    rows = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    return [{name: x for name, x in row.items() if name not in TIMES} for row in rows]


def metrics(directory):
    """The same as texts, to be compared to the digit."""
    return [json.dumps(line) for line in lines(directory)]


def steps(directory):
    return sorted(int(p.name.removeprefix("step_")) for p in (directory / "checkpoints").iterdir())


def facts(directory, step):
    path = directory / "checkpoints" / f"step_{step:08d}" / "facts.json"
    saved = json.loads(path.read_text())
    for name in ("seconds", "metrics_offset"):  # times, and their digits
        del saved["totals"][name]
    return {name: value for name, value in saved.items() if name != "config"}


def arrays(directory, step):
    """All arrays of a checkpoint by their names: type, shape and bytes."""
    path = directory / "checkpoints" / f"step_{step:08d}" / "arrays"
    with ocp.Checkpointer(ocp.StandardCheckpointHandler()) as reader:
        # On the host, whatever devices had the arrays: some were another process's.
        described = reader.metadata(path.absolute()).item_metadata
        like = {name: np.empty(x.shape, x.dtype) for name, x in described.items()}
        restore = ocp.args.StandardRestore(like)
        saved = reader.restore(path.absolute(), args=restore)
    return {name: (str(x.dtype), x.shape, x.tobytes()) for name, x in saved.items()}


def learnt(directory, step):
    """What updates change in a checkpoint: parameters, moments, the number of updates."""
    names = ("params", "optimizer", ".step")
    leaves = arrays(directory, step).items()
    return {name: x for name, x in leaves if any(part in name for part in names)}


def assert_same_run(got, expected):
    """All that two runs leave is the same, to the byte, but for times."""
    assert metrics(got) == metrics(expected)
    last = steps(expected)[-1]
    assert steps(got)[-1] == last
    assert facts(got, last) == facts(expected, last)
    one, other = arrays(got, last), arrays(expected, last)
    assert [name for name in other if one.get(name) != other[name]] == []
    assert one.keys() == other.keys()
    files = sorted(p.relative_to(expected) for p in (expected / "policy").rglob("*") if p.is_file())
    assert len(files) > 2
    assert [f for f in files if (got / f).read_bytes() != (expected / f).read_bytes()] == []
