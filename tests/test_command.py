"""The command: its flags and files, and one line for what is wrong."""

import dataclasses
import json
import pathlib
import re
import subprocess
import sys

import numpy as np
import pytest
import yaml

from twinkle_jax.command import main
from twinkle_jax.data import Batch
from twinkle_jax.rollout import RolloutConfig
from twinkle_jax.training import (
    EvaluationConfig,
    TrainConfig,
    load_policy,
    memory,
    save_policy,
    score_batch,
    small_policy,
)
from twinkle_jax.training.config import flat
from twinkle_jax.training.evaluation import held_out
from twinkle_jax.training.task import make_task

TINY = ["--steps", "1", "--warm_start", "0", "--rollout.prompts", "4"]
TINY += ["--evaluation.problems", "8"]


def test_train_with_a_file_and_flags_over_it(tmp_path, capsys, monkeypatch):
    file = tmp_path / "run.yaml"
    file.write_text(
        "steps: 7\nseed: 3\nrollout:\n  num_samples: 2\noptimizer:\n  options: {b1: 0.8}\n"
    )
    run = tmp_path / "run"
    assert (
        main(["train", "--config", str(file), *TINY, "--steps", "3", "--output_dir", str(run)]) == 0
    )
    config = json.loads((run / "config.json").read_text())
    assert (config["steps"], config["seed"], config["rollout"]["num_samples"]) == (3, 3, 2)
    assert config["optimizer"]["options"] == {"b1": 0.8}
    assert json.loads((run / "summary.json").read_text())["steps"] == 3
    capsys.readouterr()

    sample = ["sample", "--model", str(run), "1+2=", "--num_samples", "3", "--max_new_tokens", "8"]
    assert main(sample) == 0
    shown = capsys.readouterr().out
    assert [n for n in range(9) if f"--- {n} of 3: " in shown] == [1, 2, 3]
    assert len(set(re.split(r"--- .*\n", shown)[1:])) > 1
    assert main([*sample, "--top_k", "1"]) == 0
    assert len(set(re.split(r"--- .*\n", capsys.readouterr().out)[1:])) == 1
    assert main(["evaluate", "--model", str(run)]) == 0
    assert capsys.readouterr().out.startswith("accuracy 0.")
    monkeypatch.setattr(memory, "device_memory", lambda limit: 1 << 20)
    assert main(["evaluate", "--model", str(run), "--level", "1", "--problems", "2"]) == 1
    assert "slots: the smallest takes" in capsys.readouterr().err
    assert main(["export", str(run), str(tmp_path / "exported")]) == 0
    exported = (tmp_path / "exported" / "model.safetensors").read_bytes()
    assert exported == (run / "policy" / "model.safetensors").read_bytes()

    assert main(["train", *TINY, "--output_dir", str(run)]) == 1
    error = capsys.readouterr().err
    assert error.startswith("twinkle-jax: output_dir must be empty or new")
    assert len(error.splitlines()) == 1


@pytest.mark.parametrize("flag", ["--config={}", "--config {}"])
def test_flags_are_over_a_file_that_follows_them(flag, tmp_path, capsys):
    file = tmp_path / "run.yaml"
    file.write_text("steps: 7\nrollout: {prompts: 4, num_samples: 2}\n")
    arguments = ["--steps", "5", "--rollout.prompts=2", *flag.format(file).split()]
    with pytest.raises(SystemExit):
        main(["train", *arguments, "--print_config"])
    shown = yaml.safe_load(capsys.readouterr().out)
    assert shown["steps"] == 5 and shown["rollout"]["prompts"] == 2
    assert shown["rollout"]["num_samples"] == 2
    assert main(["train", "--config"]) == 2


@pytest.mark.parametrize("flag", ["--config={}", "--config {}"])
def test_a_file_must_have_each_setting_once(flag, tmp_path, capsys):
    """The first section was lost, and with it the learning rate."""
    file = tmp_path / "run.yaml"
    text = "optimizer: {learning_rate: 1e-5}\nsteps: 2\noptimizer: {name: sgd}\n"
    file.write_text(text)
    assert main(["train", *flag.format(file).split(), "--output_dir", str(tmp_path / "run")]) == 1
    error = capsys.readouterr().err
    assert error == f"twinkle-jax: {file} must have each setting once, got 'optimizer' twice\n"
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("text", ["# Be brief.", "\n# Hello\n", "---", "null", "3.50", "a: b"])
def test_text_that_is_a_comment_to_yaml_stays_text(text, tmp_path, capsys):
    """A system message that began with # was lost, from a file in quotes too."""
    file = tmp_path / "run.yaml"
    file.write_text(json.dumps({"system": text}))
    for arguments in ([f"--system={text}"], ["--config", str(file)]):
        with pytest.raises(SystemExit):
            main(["train", *arguments, "--print_config"])
        shown = yaml.safe_load(capsys.readouterr().out)["system"]
        assert shown == (None if text == "null" else text)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--task", "nowhere.jsonl", "--model", "MODEL"],
            "which was not found",
        ),
        (["--task", "x.jsonl"], "model"),
        (["--update.advantage", "grop"], r"update.advantage"),
        (["--update.loss", "grop"], "loss"),
        (["--level", "9"], "level"),
        (["--model", "nowhere"], "model must"),
        (["--rollout.num_samples", "1"], r"rollout.num_samples"),
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


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        (["evaluate", "--model", "nowhere"], "model"),
        (["evaluate", "--model", "nowhere", "--problems", "0"], "problems"),
        (["sample", "--model", "nowhere", "1+2="], "model"),
        (["evaluate", "--model", "nowhere", "--max_turns", "3"], "max_turns"),
        (["evaluate", "--model", "nowhere", "--max_failed", "0.5"], "max_failed"),
        (["evaluate", "--model", "nowhere", "--task", "x.jsonl", "--level", "3"], "level"),
        (["sample", "--model", "nowhere", "1+2=", "--seed", str(2**32)], "seed"),
        (["sample", "--model", "nowhere", "1+2=", "--max_turns", "3"], "max_turns"),
        (["sample", "--model", "nowhere", "1+2=", "--temperature", "1e308"], "temperature"),
        (["sample", "--model", "nowhere", "1+2=", f"--max_new_tokens={10**12}"], "max_new_tokens"),
        (["evaluate", "--model", "nowhere", f"--problems={10**20}"], "problems"),
        (
            ["sample", "--model", "nowhere", "--environment", "x.py:X", "--max_turns", "0"],
            "max_turns",
        ),
        (["export", "nowhere", "DIRECTORY"], "run"),
    ],
)
def test_errors_name_the_option(arguments, name, tmp_path, capsys):
    assert main([a.replace("DIRECTORY", str(tmp_path / "policy")) for a in arguments]) == 1
    assert capsys.readouterr().err.startswith(f"twinkle-jax: {name} must ")


def test_prompts_of_any_length_are_evaluated(tmp_path, capsys):
    save_policy(small_policy(), str(tmp_path / "model"))
    (tmp_path / "long.jsonl").write_text(f'{{"prompt": "{"1+" * 600}1=", "answer": "601"}}\n')
    long = ["evaluate", "--model", f"{tmp_path}/model", "--task", f"{tmp_path}/long.jsonl"]
    long += ["--reward", "exact", "--max_new_tokens", "2"]
    assert main(long) == 1
    assert "at most max_prompt_tokens=1024" in capsys.readouterr().err
    assert main([*long, "--max_prompt_tokens", "2048"]) == 0


@pytest.mark.slow
def test_what_is_no_finished_run_is_told(tmp_path, capsys):
    run = tmp_path / "run"
    assert main(["train", *TINY, "--steps", "0", "--output_dir", str(run)]) == 0
    assert main(["export", str(run / "policy"), str(tmp_path / "exported")]) == 1
    assert "run must be the directory of a run" in capsys.readouterr().err
    checkpoints = run / "checkpoints"
    (checkpoints / "step_00000000").rename(checkpoints / "step_00000002")  # as if continued
    assert main(["sample", "1+2=", "--model", str(run)]) == 1
    assert f"after step 0, whose policy {run / 'policy'} is" in capsys.readouterr().err
    assert main(["sample", "1+2=", "--model", str(run / "policy"), "--num_samples", "1"]) == 0
    (run / "policy").rename(tmp_path / "policy")
    capsys.readouterr()
    assert main(["sample", "1+2=", "--model", str(run)]) == 1
    assert f"twinkle-jax export {run} DIRECTORY" in capsys.readouterr().err


def test_a_bad_record_is_refused_before_anything_is_trained(tmp_path, capsys):
    save_policy(small_policy(), str(tmp_path / "model"))
    task = tmp_path / "task.jsonl"
    task.write_text('{"prompt": "1+1=", "answer": "2"}\n{"prompt": "1+2="}\n')
    arguments = ["--model", str(tmp_path / "model"), "--task", str(task)]
    assert main(["train", *TINY, *arguments, "--output_dir", str(tmp_path / "run")]) == 1
    assert "line 2" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--stepz", "3"], "unknown option --stepz"),
        (["--steps", "many"], "--steps must be int, got 'many'"),
        (["--warm_start.steps", "10"], "unknown option --warm_start.steps; did you mean --warm_st"),
        (["--reward.a=NestedArg(key='b'"], "unknown option --reward.a;"),
        (["--dtype", "float8"], "--dtype must be one of float32, bfloat16, got 'float8'"),
        (["--update.credit", "x"], "--update.credit must be one of episode, turn, mixed, got 'x'"),
        (["--optimizer.options", "b1"], "--optimizer.options must be dict, got 'b1'"),
        (["--reward_weights", "0.5"], "--reward_weights must be a list of float, got '0.5'"),
        (["--rollout", "{prompts: x}"], "--rollout.prompts must be int, got 'x'"),
        (["--server", "http://h"], "--server must be a dictionary of settings or a YAML file of"),
    ],
)
def test_an_unknown_flag_or_value_is_refused(arguments, message, capsys):
    assert main(["train", *arguments]) == 2
    assert capsys.readouterr().err.startswith(f"twinkle-jax: {message}")


@pytest.mark.parametrize(
    ("arguments", "names"),
    [("export", "RUN, DIRECTORY"), ("export run", "DIRECTORY"), ("sample 1+2=", "--model")],
)
def test_what_is_missing_is_named_as_it_is_typed(arguments, names, capsys):
    assert main(arguments.split()) == 2
    assert capsys.readouterr().err.endswith(f"required: {names}\n")


def test_auto_is_a_value_of_the_settings_that_help_shows_with_it(tmp_path, capsys):
    file = tmp_path / "run.yaml"
    file.write_text("optimizer: {schedule: auto}\nsteps: auto\nupdate: {recompute: auto}\n")
    options = ["--config", str(file), "--rollout.cohorts=auto", "--update.scale", "auto"]
    with pytest.raises(SystemExit):
        main(["train", *options, "--resume", "auto", "--task", "auto", "--print_config"])
    shown = flat(yaml.safe_load(capsys.readouterr().out))
    automatic = ("optimizer.schedule", "steps", "rollout.cohorts", "update.scale", "task")
    assert {shown[name] for name in automatic} == {None}
    assert (shown["resume"], shown["update.recompute"]) == ("auto", "auto")


def test_none_is_a_value_of_the_settings_that_may_be_left_out(tmp_path, capsys):
    """`--server.url none` was a server of that name; of other settings, none is a choice."""
    file = tmp_path / "run.yaml"
    file.write_text("system: none\nevaluation: {path: None}\nupdate: {correction: none}\n")
    options = ["--config", str(file), "--server.url", "none", "--rollout.slots=None"]
    with pytest.raises(SystemExit):
        main(["train", *options, "--update.scale", "none", "--print_config"])
    shown = flat(yaml.safe_load(capsys.readouterr().out))
    left_out = ("system", "evaluation.path", "server.url", "rollout.slots")
    assert {shown[name] for name in left_out} == {None}
    assert (shown["update.correction"], shown["update.scale"]) == ("none", "none")
    save_policy(small_policy(), str(tmp_path / "model"))
    evaluate = ["evaluate", "--model", str(tmp_path / "model"), "--problems", "8"]
    assert main([*evaluate, "--task", "none", "--max_new_tokens", "8"]) == 0


@pytest.mark.slow
def test_a_section_of_a_file_is_settings_or_empty(tmp_path, capsys):
    """All its lines may be comments; a number in its place ended in a traceback."""
    file, run = tmp_path / "run.yaml", tmp_path / "run"
    file.write_text(f"optimizer:\n  # options: {{b1: 0.8}}\nwarm_start: 0\noutput_dir: {run}\n")
    small = ["--evaluation.problems", "4", "--steps", "0"]
    assert main(["train", "--config", str(file), *small]) == 0
    assert json.loads((run / "config.json").read_text())["optimizer"]["name"] == "adamw"
    capsys.readouterr()
    file.write_text("rollout: 10\nsteps: 0\n")
    assert main(["train", "--config", str(file)]) == 1
    assert capsys.readouterr().err.startswith("twinkle-jax: rollout must be a dictionary of sett")


@pytest.mark.parametrize("content", [b"a: [", b"- 1\n- 2\n", b"\xff\xfe\x00", b"steps"])
def test_a_file_without_settings_is_named(tmp_path, capsys, content):
    (tmp_path / "run.yaml").write_bytes(content)
    assert main(["train", "--config", str(tmp_path / "run.yaml")]) == 2
    error = capsys.readouterr().err
    assert error.startswith("twinkle-jax: --config must be a file ")
    assert str(tmp_path / "run.yaml") in error


@pytest.mark.slow
def test_an_empty_file_of_settings_stands_for_the_defaults(tmp_path, capsys):
    (tmp_path / "run.yaml").write_text("# steps: 5\n")
    run = ["--output_dir", str(tmp_path / "run"), "--warm_start", "0", "--steps", "0"]
    small = ["--evaluation.problems", "4"]
    assert main(["train", "--config", str(tmp_path / "run.yaml"), *run, *small]) == 0


def test_every_option_says_what_it_is(capsys):
    """Each has a text of its own; what the run chooses is `auto`."""
    with pytest.raises(SystemExit) as ended:
        main(["train", "--help"])
    assert ended.value.code == 0
    text = capsys.readouterr().out
    for name in flat(dataclasses.asdict(TrainConfig())):
        option = re.search(rf"^  --{re.escape(name)}\b.*?(?=^  --|\Z)", text, re.M | re.S)
        assert option is not None, name
        words = re.sub(r"\(type: .*", "", option.group(0), flags=re.S)
        assert len(re.sub(r"--[\w.+]+ \S+", "", words).split()) >= 2, name
    assert re.search(r"--steps STEPS .*?default:\s+auto\)", text, re.S)


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        (["--rollout.promptz", "3"], "did you mean --rollout.prompts"),
        (["--num_samples", "3"], "--rollout.num_samples"),
        (["--num_generations", "3"], "did you mean --rollout.num_samples"),  # TRL's
        (["--actor.clip_ratio_low", "0.2"], "did you mean --update.epsilon?"),  # verl's
        (["--optimizer.lr", "3"], "did you mean --optimizer.learning_rate? "),
        (["--mod", "x"], "did you mean --model"),  # abbreviations are refused
    ],
)
def test_a_mistyped_option_gets_a_suggestion(arguments, hint, capsys):
    assert main(["train", *arguments]) == 2
    assert hint in capsys.readouterr().err


def test_a_mistyped_setting_in_a_file_gets_a_suggestion(tmp_path, capsys):
    (tmp_path / "run.yaml").write_text("optimizer: {learning_rat: 1e-3}")
    assert main(["train", "--config", str(tmp_path / "run.yaml")]) == 2
    assert "did you mean --optimizer.learning_rate" in capsys.readouterr().err


@pytest.mark.parametrize("value", ["-1e-4", "-0.0001", "-1E-04"])
def test_a_negative_number_is_a_value_and_no_option(value, capsys):
    assert main(["train", "--optimizer.learning_rate", value]) == 1
    assert "optimizer.learning_rate must be above 0" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "overwrite", "masked"),
    [
        ([], False, False),
        (["--overwrite"], True, False),
        (["--overwrite", "--update.mask_truncated", "--steps", "0"], True, True),
        (["--overwrite", "false", "--update.mask_truncated=true"], False, True),
    ],
)
def test_a_switch_needs_no_value(options, overwrite, masked, capsys):
    with pytest.raises(SystemExit):
        main(["train", *options, "--print_config"])
    shown = yaml.safe_load(capsys.readouterr().out)
    assert (shown["overwrite"], shown["update"]["mask_truncated"]) == (overwrite, masked)


@pytest.mark.parametrize(
    ("options", "got"),
    [
        ('{"b1": {"x": 1}}', r"optimizer.options: .*adamw must be .* got {'x': 1}"),
        ('{"mask": {"x": [true]}}', r"optimizer.options: .*adamw must be .* got {'x': \[True\]}"),
    ],
)
def test_options_of_an_optimizer_that_are_dictionaries_are_refused(options, got, capsys, tmp_path):
    """The parser put the whole text in their place, which a mask may be."""
    arguments = ["--optimizer.options", options, "--output_dir", str(tmp_path / "run")]
    assert main(["train", *arguments]) == 1
    assert re.search(got, capsys.readouterr().err)


def test_options_of_an_optimizer_may_be_lists_and_null(tmp_path):
    steps = [[3.0, -3.25, 1.25]] * 5  # a row for each step of Newton and Schulz
    run, options = tmp_path / "run", {"ns_coeffs": steps, "mu_dtype": None}
    small = [*TINY, "--steps", "0"]
    muon = ["--optimizer.name", "muon", "--optimizer.options", json.dumps(options)]
    assert main(["train", "--output_dir", str(run), *small, *muon]) == 0
    assert json.loads((run / "config.json").read_text())["optimizer"]["options"] == options


@pytest.mark.slow
def test_a_run_is_evaluated_in_its_own_type(tmp_path, capsys):
    """In float32 the greedy completions are others, and so were accuracy and reward."""
    (tmp_path / "own.py").write_text(
        "import zlib\n"
        "def score(completions, **columns):\n"
        "    return [zlib.crc32(x[-1]['content'].encode()) / 2**32 for x in completions]\n"
    )
    run, reward = tmp_path / "run", ["--reward", f"{tmp_path}/own.py:score"]
    options = ["--dtype", "bfloat16", "--rollout.max_new_tokens", "24", "--steps", "0"]
    problems = ["--evaluation.problems", "16"]
    assert main(["train", *TINY, *options, *problems, *reward, "--output_dir", str(run)]) == 0
    capsys.readouterr()
    config = TrainConfig(
        model=str(run),
        dtype="bfloat16",
        reward=reward[1],
        evaluation=EvaluationConfig(problems=16),
        rollout=RolloutConfig(max_new_tokens=24),
    )
    expected = held_out(config, make_task(config), load_policy(str(run / "policy")))["reward"]
    assert main(["evaluate", "--model", str(run)]) == 0
    assert f"reward {expected:.4f}\n" in capsys.readouterr().out
    evaluate = [*reward, "--max_new_tokens", "24", "--problems", "16"]
    assert main(["evaluate", "--model", str(run / "policy"), *evaluate]) == 0  # of a checkpoint
    assert f"reward {expected:.4f}\n" not in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["gsm8k:", pytest.param("", marks=pytest.mark.exhaustive)])
def test_a_run_is_evaluated_on_its_own_problems_and_rewards(kind, tmp_path, capsys):
    """All options that are not given are those of the run."""
    (tmp_path / "own.py").write_text(
        "def one(completions, **columns):\n    return [1.0] * len(completions)\n\n\n"
        "def system(prompts, completions, **columns):\n"
        "    return [float(len(x) == 2 and x[0]['content'] == '1+1=2') for x in prompts]\n\n\n"
        "def seven(completions, ground_truth, **columns):\n"
        "    return [float(x) for x in ground_truth]\n"
    )
    for name, answers in (("train", "123"), ("held_out", "7788")):
        records = [
            {"question": f"{i}+1=", "answer": f"so\n#### {x}" if kind else x}
            for i, x in enumerate(answers)
        ]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(x) + "\n" for x in records))
    run, own = tmp_path / "run", f"{tmp_path}/own.py"
    task = ["--task", f"{kind}{tmp_path}/train.jsonl", "--system", "1+1=2", "--seed", "3"]
    task += ["--evaluation.path", f"{tmp_path}/held_out.jsonl", "--evaluation.problems", "2"]
    rewards = [x for name in ("one", "system", "seven") for x in ("--reward", f"{own}:{name}")]
    save_policy(small_policy(0), tmp_path / "model")
    small = ["--model", f"{tmp_path}/model", "--steps", "0", "--lora.rank", "2"]
    limits = ["--rollout.max_new_tokens", "3", "--rollout.max_prompt_tokens", "30"]
    weights = ["--reward_weights", "[2, 4, 8]"]
    train = ["train", *task, *rewards, *weights, *small, *limits, "--output_dir", str(run)]
    assert main(train) == 0
    evaluate = ["evaluate", "--model", str(run)]
    for options, reward in (
        ([], 2 + 4 + 8 * 7),
        (["--problems", "4"], 2 + 4 + 8 * 7.5),
        (["--reward", f"{own}:seven", "--max_new_tokens", "1"], 7),
        (["--system", "none"], 2 + 8 * 7),
    ):
        capsys.readouterr()
        assert main([*evaluate, *options]) == 0
        assert f"reward {reward:.4f}\n" in capsys.readouterr().out
    # Rewards of evaluations have no weights, even if the run has the same rewards.
    same = ["--reward", f"{own}:seven", "--evaluation.reward", f"{own}:seven"]
    train = ["train", *task, *same, "--reward_weights", "[4]", *small, *limits]
    assert main([*train, "--output_dir", str(tmp_path / "apart")]) == 0
    capsys.readouterr()
    assert main(["evaluate", "--model", str(tmp_path / "apart")]) == 0
    assert "reward 7.0000\n" in capsys.readouterr().out
    shorter = ["--max_prompt_tokens", "3"]
    assert main([*evaluate, *shorter]) == 1
    assert "max_prompt_tokens" in capsys.readouterr().err


@pytest.mark.slow
def test_a_run_in_an_environment_is_evaluated_there(tmp_path, capsys, monkeypatch):
    run, game = tmp_path / "run", ["--environment", "tests.rollout.games:Guess"]
    limits = {"max_turns": "2", "max_new_tokens": "5", "max_prompt_tokens": "16"}
    own = [x for name, value in limits.items() for x in (f"--rollout.{name}", value)]
    own += ["--rollout.max_episode_tokens", "60", "--output_dir", str(run)]
    own += ["--evaluation.slots", "4"]
    assert main(["train", *TINY, "--steps", "0", *game, *own]) == 0
    evaluated = []

    def noted(config, task, policy):
        evaluated.append(config)
        return held_out(config, task, policy)

    monkeypatch.setattr("twinkle_jax.training.evaluation.held_out", noted)
    capsys.readouterr()
    assert main(["evaluate", "--model", str(run)]) == 0
    shown = capsys.readouterr().out
    assert "turns 1.0000\n" in shown
    given = [x for name, value in limits.items() for x in (f"--{name}", value)]
    policy = ["--model", str(run / "policy"), "--problems", "8"]
    assert main(["evaluate", *policy, *game, *given]) == 0
    assert capsys.readouterr().out == shown
    of_run, of_policy = evaluated
    for config in evaluated:
        assert config.environment == game[1] and config.evaluation.problems == 8
        assert {x: str(getattr(config.rollout, x)) for x in limits} == limits
    assert (of_run.rollout.max_episode_tokens, of_run.evaluation.slots) == (60, 4)
    assert of_policy.rollout.max_episode_tokens == 16 + 2 * 5


@pytest.mark.slow
def test_a_run_without_held_out_problems_needs_a_task(tmp_path, capsys):
    (tmp_path / "train.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n' * 2)
    save_policy(small_policy(0), tmp_path / "model")
    run, small = tmp_path / "run", ["--model", f"{tmp_path}/model", "--steps", "0"]
    task = ["--task", f"{tmp_path}/train.jsonl"]
    assert main(["train", *task, *small, "--output_dir", str(run)]) == 0
    evaluate = ["evaluate", "--model", str(run)]
    capsys.readouterr()
    assert main(evaluate) == 1
    assert "task must be given" in capsys.readouterr().err
    assert main([*evaluate, *task]) == 0
    assert main([*evaluate, "--task", "arithmetic", "--level", "3", "--problems", "4"]) == 0
    # The level of a run belongs to its problems.
    counted = ["--level", "3", "--output_dir", str(tmp_path / "counted")]
    assert main(["train", *small, *counted]) == 0
    assert main(["evaluate", "--model", str(tmp_path / "counted"), *task]) == 0


@pytest.mark.slow
def test_a_path_may_begin_with_the_home_directory(tmp_path, capsys, monkeypatch):
    """Of `--output_dir=~/run`, and in files, the shell expands nothing: a directory ~ was made."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    tiny = [*TINY, "--steps", "0", "--output_dir=~/run"]
    assert main(["train", *tiny]) == 0
    assert (tmp_path / "run" / "policy").is_dir() and not (tmp_path / "~").exists()
    assert main(["train", "--resume=~/run", "--output_dir=~/run"]) == 0
    capsys.readouterr()
    assert main(["train", *tiny, "--model=~/run/policy", "--overwrite"]) == 1
    assert "must not hold model" in capsys.readouterr().err
    assert main(["sample", "1+2=", "--model=~/run", "--num_samples", "1"]) == 0
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "1+2=", "answer": "3"}\n')
    (tmp_path / "own.py").write_text("def zero(completions, **columns):\n    return [0.0]\n")
    capsys.readouterr()
    options = ["--task=~/prompts.jsonl", "--reward=~/own.py:zero", "--max_new_tokens", "4"]
    assert main(["evaluate", "--model=~/run", *options]) == 0
    assert capsys.readouterr().out == "accuracy 0.0000\nreward 0.0000\n"


@pytest.mark.slow
def test_a_run_goes_on_without_its_options_being_repeated(tmp_path, capsys, monkeypatch):
    run = str(tmp_path / "run")
    tiny = [*TINY, "--evaluation.every", "0", "--optimizer.schedule", "constant"]
    assert main(["train", *tiny, "--output_dir", run, "--seed", "3", "--overwrite"]) == 0
    assert main(["train", "--resume", "auto", "--output_dir", run, "--steps", "2"]) == 0
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    assert (config["seed"], config["steps"], config["rollout"]["prompts"]) == (3, 2, 4)
    assert config["overwrite"] is False  # not inherited: it deletes
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) == 2
    # Killed after its last checkpoint, it would have left the summary of its first end. A relative
    # path to resume is the directory of the run, too.
    summary = tmp_path / "run" / "summary.json"
    summary.write_text(json.dumps(json.loads(summary.read_text()) | {"steps": 1}))
    monkeypatch.chdir(tmp_path)
    assert main(["train", "--resume", "run", "--output_dir", "run"]) == 0
    assert json.loads(summary.read_text())["steps"] == 2
    assert main(["train", "--resume", "auto", "--output_dir", run, "--mesh.tensor", "2"]) == 0
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    assert config["mesh"]["transfers"] == "layers"  # it was once, which is not for tensor
    capsys.readouterr()
    assert main(["train", "--resume", "auto", "--output_dir", run, "--seed", "4"]) == 1
    assert "seed must be 3 as in the run to resume, got 4" in capsys.readouterr().err


@pytest.mark.slow
def test_adapters_rewards_and_optimizers_from_the_command(tmp_path, capsys):
    """Three steps of the whole path: LoRA, two rewards, another optimizer, a penalty, a merge."""
    reward, run = tmp_path / "own.py", tmp_path / "run"
    reward.write_text("def short(completions, **columns):\n    return [0.5] * len(completions)\n")
    options = ["--lora.rank", "2", "--lora.dropout", "0.1", "--update.kl_beta", "0.01"]
    options += ["--optimizer.name", "lion", "--optimizer.schedule", "cosine", "--steps", "3"]
    options += ["--reward", "exact", "--reward", f"{reward}:short", "--reward_weights", "[1, 2]"]
    options += ["--rollout.repetition_penalty", "1.1", "--update.correction", "sequence_mask"]
    assert main(["train", *TINY, *options, "--output_dir", str(run)]) == 0
    line = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
    assert line["rewards/short/mean"] == 0.5
    assert line["reward"] == pytest.approx(line["rewards/exact/mean"] + 1.0)
    assert line["sampling/logp_diff/mean"] < 1e-5
    names = {path.name for path in (run / "policy").iterdir()}
    assert {"adapter_config.json", "adapter_model.safetensors", "tokenizer.json"} <= names
    capsys.readouterr()
    assert main(["sample", "--model", str(run), "1+2=", "--num_samples", "1"]) == 0
    merged = tmp_path / "merged"
    assert main(["export", str(run), str(merged), "--merge"]) == 0
    assert (merged / "model.safetensors").is_file()
    assert main(["export", str(run), str(merged)]) == 1
    assert "--overwrite" in capsys.readouterr().err
    # Every later use of the run would add its adapters a second time.
    assert main(["export", str(run), str(run / "base"), "--merge", "--overwrite"]) == 1
    assert "directory must not be the base" in capsys.readouterr().err
    one, other = load_policy(str(run / "policy")), load_policy(str(merged))
    prompt = np.asarray([[5, 6, 7, 8]])
    batch = Batch(prompt, np.roll(prompt, -1))
    scores = [score_batch(p.weights, batch, p.config).logps for p in (one, other)]
    np.testing.assert_allclose(scores[0], scores[1], atol=1e-5)

    # An export of the adapters has their base, and may be moved; it replaces an earlier one.
    for overwrite in ([], ["--overwrite"]):
        assert main(["export", str(run), str(tmp_path / "adapters"), *overwrite]) == 0
    run.rename(tmp_path / "elsewhere")
    copied = load_policy(str((tmp_path / "adapters").rename(tmp_path / "copied")))
    same = score_batch(copied.weights, batch, copied.config).logps
    np.testing.assert_array_equal(same, scores[0])


@pytest.mark.slow
def test_episodes_by_the_command(tmp_path, capsys, monkeypatch):
    """`evaluate` and `sample` play a game; without a prompt, the game says what comes first."""
    save_policy(small_policy(0), tmp_path / "model")
    game = ["--model", str(tmp_path / "model"), "--environment", "tests.rollout.games:Guess"]
    game += ["--max_turns", "2", "--max_new_tokens", "5"]
    with monkeypatch.context() as terminal:
        terminal.setattr(sys.stderr, "isatty", lambda: True)
        assert main(["evaluate", *game, "--problems", "8"]) == 0
    shown = capsys.readouterr()
    assert shown.err.startswith("evaluating on 8 problems")  # results alone go to the output
    results = dict(line.split() for line in shown.out.splitlines())
    assert set(results) == {"accuracy", "reward", "turns", "failed"}
    assert float(results["failed"]) == 0
    assert main(["sample", *game, "--num_samples", "2"]) == 0
    shown = capsys.readouterr().out
    assert [n for n in range(9) if f"--- {n} of 2: " in shown] == [1, 2]
    assert "user: 0-9=" in shown
    assert main(["sample", "--model", str(tmp_path / "model")]) == 1
    assert "PROMPT or --environment must be given" in capsys.readouterr().err
    assert main(["sample", "--model", str(tmp_path / "model"), "--prompt", "0-9="]) == 2
    assert "without --prompt: twinkle-jax sample PROMPT" in capsys.readouterr().err


@pytest.mark.slow
def test_tools_and_failures_by_the_command(tmp_path, capsys):
    """Tools go with a prompt of a task; an environment that fails is shown, and judges nothing."""
    save_policy(small_policy(0), tmp_path / "model")
    (tmp_path / "tools.py").write_text('def add(x: int) -> int:\n    """Add."""\n    return x\n')
    (tmp_path / "game.py").write_text(
        "from tests.rollout import games\n\n\n"
        "class Broken(games.Guess):\n"
        "    def reset(self, row, seed):\n"
        "        raise OSError('no\\x1b[31m')\n"
    )
    policy = ["--model", str(tmp_path / "model"), "--max_turns", "2", "--max_new_tokens", "5"]
    tools = [*policy, "--tools", str(tmp_path / "tools.py")]
    assert main(["evaluate", *tools, "--problems", "4", "--pass_k", "2"]) == 0
    results = dict(line.split() for line in capsys.readouterr().out.splitlines())
    assert set(results) == {"accuracy", "reward", "turns", "failed", "pass@2"}
    assert main(["sample", *tools, "1+2=", "--num_samples", "2"]) == 0
    shown = capsys.readouterr().out
    assert shown.count("user: 1+2=") == 2
    assert shown.count("assistant: ") == 2

    broken = [*policy, "--environment", f"{tmp_path}/game.py:Broken"]
    assert main(["evaluate", *broken, "--problems", "4"]) == 1
    error = capsys.readouterr().err
    assert error.startswith("twinkle-jax: at most max_failed=0.1 of the environments may fail")
    assert "\x1b" not in error
    assert len(error.splitlines()) == 1
    assert main(["evaluate", *broken, "--problems", "4", "--max_failed", "0.5"]) == 1
    assert "max_failed=0.5" in capsys.readouterr().err
    assert main(["sample", *broken, "--num_samples", "2"]) == 0
    shown = capsys.readouterr().out
    assert "\x1b" not in shown
    assert shown.count(" of 2: failed OSError: no") == 2


def test_more_than_the_memory_is_one_line(tmp_path, capsys):
    """It was a traceback of NumPy's."""
    save_policy(small_policy(0), tmp_path / "model")
    assert (
        main(["sample", "1+1=", "--model", str(tmp_path / "model"), f"--num_samples={10**14}"]) == 1
    )
    error = capsys.readouterr().err
    assert error.startswith("twinkle-jax: ")
    assert len(error.splitlines()) == 1


INTERRUPTED = """
import os, signal, sys

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background has it ignored


class Interrupt:
    def find_spec(self, name, path, target=None):
        if name == "jax":
            os.kill(os.getpid(), signal.SIGINT)


sys.meta_path.insert(0, Interrupt())
from twinkle_jax.__main__ import main
sys.exit(main())
"""


def test_ctrl_c_during_the_imports_is_one_line():
    """They take seconds, and were a traceback of some library."""
    root = pathlib.Path(__file__).parents[1]
    done = subprocess.run(
        [sys.executable, "-c", INTERRUPTED],
        cwd=root,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (130, "twinkle-jax: interrupted\n")


@pytest.mark.exhaustive
def test_memory_is_counted_before_the_first_step(tmp_path, capsys):
    run = tmp_path / "run"
    options = [*TINY, "--rollout.max_prompt_tokens", "32", "--output_dir", str(run)]
    assert main(["train", *options, "--mesh.memory", "0.000001"]) == 1
    assert "the smallest takes" in capsys.readouterr().err
    assert main(["train", *options, "--mesh.memory", "0.1"]) == 0
    chosen = json.loads((run / "config.json").read_text())["update"]["micro_batch_tokens"]
    assert 40 <= chosen < 16384
    assert f"update.micro_batch_tokens {chosen}: takes" in capsys.readouterr().out
