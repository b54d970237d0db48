"""The command: its flags and files, and one line for what is wrong."""

import json

import pytest

from twinkle_jax.training import save_policy, small_policy
from twinkle_jax.training.command import main

TINY = ["--steps", "1", "--warm_start", "0", "--rollout.prompts", "4"]
TINY += ["--evaluation.problems", "8", "--level", "1"]


@pytest.mark.exhaustive
def test_train_with_a_file_and_flags_over_it(tmp_path, capsys):
    file = tmp_path / "run.yaml"
    file.write_text(
        "steps: 7\nseed: 3\nrollout:\n  num_samples: 2\noptimizer:\n  betas: [0.8, 0.9]\n"
    )
    run = tmp_path / "run"
    assert main(["train", "--config", str(file), *TINY, "--output_dir", str(run)]) == 0
    config = json.loads((run / "config.json").read_text())
    assert (config["steps"], config["seed"], config["rollout"]["num_samples"]) == (1, 3, 2)
    assert config["optimizer"]["betas"] == [0.8, 0.9]
    assert json.loads((run / "summary.json").read_text())["steps"] == 1
    capsys.readouterr()

    assert main(["sample", "--model", str(run), "1+2=", "--num_samples", "3"]) == 0
    assert len(capsys.readouterr().out.splitlines()) >= 3
    assert main(["evaluate", "--model", str(run), "--level", "1", "--problems", "8"]) == 0
    assert capsys.readouterr().out.startswith("accuracy 0.")
    assert main(["export", str(run), str(tmp_path / "exported")]) == 0
    exported = (tmp_path / "exported" / "model.safetensors").read_bytes()
    assert exported == (run / "policy" / "model.safetensors").read_bytes()

    assert main(["train", *TINY, "--output_dir", str(run)]) == 1
    error = capsys.readouterr().err
    assert error.startswith("twinkle-jax: output_dir must be empty or new")
    assert len(error.splitlines()) == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--task", "nowhere.jsonl", "--model", "MODEL"], "task must be arithmetic, gsm8k, gsm8k:"),
        (["--task", "x.jsonl"], "model must be a checkpoint for the task x.jsonl, got none"),
        (["--update.advantage", "grop"], "update.advantage must be one of dgpo, gdpo, grpo"),
        (["--update.loss", "grop"], "loss must be one of"),
        (["--level", "9"], "level must be one of"),
        (["--rollout.num_samples", "1"], "rollout.num_samples must be at least 2, got 1"),
    ],
)
def test_one_line_names_what_is_wrong(arguments, message, tmp_path, capsys):
    save_policy(small_policy(), str(tmp_path / "model"))
    arguments = [a.replace("MODEL", str(tmp_path / "model")) for a in arguments]
    run = tmp_path / "run"
    assert main(["train", *TINY, "--output_dir", str(run), *arguments]) == 1
    error = capsys.readouterr().err
    assert message in error
    assert len(error.splitlines()) == 1


def test_a_bad_record_is_refused_before_anything_is_trained(tmp_path, capsys):
    save_policy(small_policy(), str(tmp_path / "model"))
    task = tmp_path / "task.jsonl"
    task.write_text('{"prompt": "1+1=", "answer": "2"}\n{"prompt": "1+2="}\n')
    arguments = ["--model", str(tmp_path / "model"), "--task", str(task)]
    assert main(["train", *TINY, *arguments, "--output_dir", str(tmp_path / "run")]) == 1
    assert "line 2: record 2 must have an 'answer'" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments", [["--stepz", "3"], ["--steps", "many"], ["--dtype", "float8"]]
)
def test_an_unknown_flag_or_value_is_refused(arguments, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["train", *arguments])
    assert stopped.value.code != 0
    assert arguments[0].removeprefix("--") in capsys.readouterr().err
