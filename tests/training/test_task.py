"""Tasks by name; GSM8K through huggingface_hub, from a server here that answers as the hub does."""

import json

import pytest

from tests import hub_server
from twinkle_jax.data import user_data_get, write_rows
from twinkle_jax.reward import ExactMatchReward, GSM8KAccuracyReward, MathReward
from twinkle_jax.training import EvaluationConfig, TrainConfig
from twinkle_jax.training.task import EnvironmentRows, make_task

ID = "openai/gsm8k"
SCRIPT = """
import json, sys
from twinkle_jax.training import TrainConfig
from twinkle_jax.training.task import make_task
try:
    task = make_task(TrainConfig(model="m", task=sys.argv[1]))
    parts = task.train, task.held_out
    print(json.dumps([[x["user_data"][0][1] for x in part] for part in parts]))
except ValueError as error:
    sys.exit(str(error))
"""


def problems(numbers):
    return [{"question": f"{n}?", "answer": f"{n} is\n#### {n}"} for n in numbers]


def write_lines(path, numbers):
    path.write_text("\n".join(json.dumps(problem) for problem in problems(numbers)))


def answers(prompts):
    return [dict(prompt["user_data"])["ground_truth"] for prompt in prompts]


def test_gsm8k_from_files(tmp_path):
    train, test = tmp_path / "train.jsonl", tmp_path / "test.jsonl"
    write_lines(train, [1, 2, 3])
    write_lines(test, [4, 5, 6])
    evaluation = EvaluationConfig(path=str(test), problems=2)
    task = make_task(TrainConfig(model="m", task=f"gsm8k:{train}", evaluation=evaluation))
    assert answers(task.train) == ["1", "2", "3"]
    assert answers(task.held_out) == ["4", "5"]
    assert isinstance(task.reward, GSM8KAccuracyReward)
    other = make_task(TrainConfig(model="m", task=f"gsm8k:{train}", reward="exact"))
    assert len(other.held_out) == 0
    assert isinstance(other.reward, ExactMatchReward)


def test_a_table_is_a_task(tmp_path):
    pytest.importorskip("pyarrow", reason="pip install 'twinkle-jax[hub]'")
    path = str(tmp_path / "sums.parquet")
    write_rows([{"prompt": f"{n}+1=", "answer": n + 1} for n in range(3)], path)
    evaluation = EvaluationConfig(path=path, problems=2)
    task = make_task(TrainConfig(model="m", task=path, evaluation=evaluation))
    assert (answers(task.train), answers(task.held_out)) == (["1", "2", "3"], ["1", "2"])
    assert isinstance(task.reward, MathReward)


def test_a_directory_is_no_task(tmp_path):
    with pytest.raises(ValueError, match=r"^task must .* which is a directory"):
        make_task(TrainConfig(model="m", task=str(tmp_path)))


def test_the_system_message_of_arithmetic():
    task, plain = (make_task(TrainConfig(system=text)) for text in ("Be brief.", None))
    message = {"role": "system", "content": "Be brief."}
    for prompts, others in ((task.train, plain.train), (task.held_out, plain.held_out)):
        assert prompts[3]["messages"] == [message, *others[3]["messages"]]
        assert prompts[3]["user_data"] == others[3]["user_data"]
        assert prompts.fingerprint != others.fingerprint


def test_the_system_message_is_that_of_training_and_of_evaluation(tmp_path):
    path = tmp_path / "data.jsonl"
    path.write_text('{"prompt": "a", "answer": "b"}')
    evaluation = EvaluationConfig(path=str(path))
    task = make_task(
        TrainConfig(model="m", task=str(path), system="Be brief.", evaluation=evaluation)
    )
    for prompts in (task.train, task.held_out):
        assert prompts[0]["messages"][0] == {"role": "system", "content": "Be brief."}


def test_problems_are_those_of_the_seed():
    tasks = [make_task(TrainConfig(seed=seed)) for seed in (0, 0, 1)]
    for part in ("train", "held_out"):
        first, again, other = (getattr(task, part)[:20] for task in tasks)
        assert first == again != other


def test_rows_of_an_environment_are_trained_on_or_held_out():
    task = make_task(
        TrainConfig(
            environment="tests.rollout.games:Guess", evaluation=EvaluationConfig(problems=3)
        )
    )
    trained, held_out = (
        {dict(row["user_data"])["index"] for row in rows} for rows in (task.train, task.held_out)
    )
    assert len(held_out) == 3 and not trained & held_out


def test_rewards_are_weighted_as_given():
    config = TrainConfig(reward=["exact", "math"], reward_weights=[1.0, 0.25])
    assert list(make_task(config).reward.weights.values()) == [1.0, 0.25]


def test_the_reward_that_is_not_there_is_named_by_its_option():
    with pytest.raises(ValueError, match=r"^reward"):
        make_task(TrainConfig(reward="mathematics"))
    with pytest.raises(ValueError, match=r"^evaluation\.reward"):
        make_task(TrainConfig(evaluation=EvaluationConfig(reward="mathematics")))


def test_answers_are_needed_by_rewards_that_compare(tmp_path):
    path, reward = tmp_path / "data.jsonl", tmp_path / "reward.py"
    path.write_text('{"prompt": "a"}')
    reward.write_text("def score(trajectories, ground_truths): return [0.0] * len(trajectories)")
    task = make_task(TrainConfig(model="m", task=str(path), reward=f"{reward}:score"))
    assert task.train[0]["user_data"] == []
    reward.write_text(
        f"{reward.read_text()}\nfrom twinkle_jax.reward import FunctionReward\n"
        "equal = FunctionReward(lambda text, truth: float(text == truth))"
    )
    for name in ("math", "exact", "gsm8k", f"{reward}:equal"):
        with pytest.raises(ValueError, match=r"^task"):
            make_task(TrainConfig(model="m", task=str(path), reward=[f"{reward}:score", name]))
    evaluation = EvaluationConfig(path=str(path), reward="exact")
    with pytest.raises(ValueError, match=r"^evaluation\.path"):
        make_task(
            TrainConfig(model="m", evaluation=evaluation, task=str(path), reward=f"{reward}:score")
        )


def test_a_reward_of_the_caller_is_checked_in_place_of_the_one_that_fits_the_task(tmp_path):
    """Records without answers were refused, for the reward that would not be called."""
    path = tmp_path / "data.jsonl"
    path.write_text('{"prompt": "a"}')
    config = TrainConfig(model="m", task=str(path))
    task = make_task(config, lambda trajectories, truths: [0.0] * len(trajectories))
    assert task.reward([{"messages": []}], None) == [0.0]
    with pytest.raises(ValueError, match=r"^task must have an 'answer'"):
        make_task(config, ExactMatchReward())
    with pytest.raises(ValueError, match="got limit"):
        make_task(config, lambda completions, limit: [1.0])
    with pytest.raises(TypeError, match="reward must have the signature"):
        make_task(config, lambda a, b, c: [1.0])


def test_a_missing_answer_is_named(tmp_path):
    task = tmp_path / "task.jsonl"
    task.write_text('{"prompt": "a", "solution": "b"}')
    config = TrainConfig(model="m", task=str(task))
    with pytest.raises(ValueError, match=r"got ground_truth: the data set has neither 'answer'"):
        make_task(config, lambda completions, ground_truth: [1.0])


def test_columns_are_needed_by_rewards_that_name_them(tmp_path):
    """Some record must have one; the others give None. Episodes may add columns."""
    reward = tmp_path / "reward.py"
    reward.write_text("def score(completions, answer, limit):\n    return [1.0] * len(completions)")
    task, named = tmp_path / "task.jsonl", f"{reward}:score"
    task.write_text('{"prompt": "a", "answer": "b"}')
    for rewards in ([named], ["exact", named]):
        with pytest.raises(ValueError, match=r"score must take columns .*answer.* got limit"):
            make_task(TrainConfig(model="m", task=str(task), reward=rewards))
    task.write_text('{"prompt": "a", "answer": "b"}\n{"prompt": "c", "answer": "d", "limit": 3}')
    assert len(make_task(TrainConfig(model="m", task=str(task), reward=named)).train) == 2
    held_out = tmp_path / "held_out.jsonl"
    held_out.write_text('{"prompt": "a", "answer": "b"}')
    tools = tmp_path / "tools.py"
    tools.write_text('def ask(word: str) -> str:\n    """Ask."""\n    return word')
    make_task(TrainConfig(model="m", task=str(held_out), reward=named, tools=str(tools)))
    evaluation = EvaluationConfig(path=str(held_out))
    with pytest.raises(ValueError, match="got limit"):
        make_task(TrainConfig(model="m", task=str(task), reward=named, evaluation=evaluation))


@pytest.mark.parametrize("task", ["gsm8k:no/such/file", "nowhere.jsonl", "gsm8k:data/train.jsonl"])
def test_a_file_that_is_not_there_is_named(task):
    name = task.removeprefix("gsm8k:")
    with pytest.raises(ValueError, match=f"^task .*'{name}'"):
        make_task(TrainConfig(model="m", task=task))


def test_a_file_to_evaluate_on_that_is_not_there_is_named(tmp_path):
    path = tmp_path / "train.jsonl"
    write_lines(path, [1])
    evaluation = EvaluationConfig(path="none.jsonl")
    with pytest.raises(ValueError, match=r"^evaluation\.path"):
        make_task(TrainConfig(model="m", task=f"gsm8k:{path}", evaluation=evaluation))


@pytest.fixture
def hub(tmp_path):
    files = tmp_path / "repository"
    (files / "main").mkdir(parents=True)
    with hub_server.serve(files, "datasets", ID) as (address, _):
        yield files, address


def load(address, home, task="gsm8k", **environment):
    return hub_server.run(SCRIPT, task, address, home, **environment)


@pytest.mark.slow
def test_gsm8k_from_the_hub_is_judged_on_its_test_split(hub, tmp_path):
    get = "pip install 'twinkle-jax[hub]'"
    pyarrow = pytest.importorskip("pyarrow", reason=get)
    parquet = pytest.importorskip("pyarrow.parquet", reason=get)
    files, address = hub
    done = load(address, tmp_path / "none")
    assert done.returncode == 1
    assert "must be a data set with files main/train-*.parquet, got 'openai/gsm8k'" in done.stderr

    parts = {
        "train-00000-of-00002": [1, 2],
        "train-00001-of-00002": [3],
        "test-00000-of-00001": [4],
    }
    for name, numbers in parts.items():
        table = pyarrow.Table.from_pylist(problems(numbers))
        parquet.write_table(table, files / "main" / f"{name}.parquet")
    expected = [["1", "2", "3"], ["4"]]
    done = load(address, tmp_path / "home")
    assert done.returncode == 0, done.stderr[-2000:]
    assert json.loads(done.stdout.splitlines()[-1]) == expected
    again = load(address, tmp_path / "home", f"gsm8k:{ID}", HF_HUB_OFFLINE="1")
    assert again.returncode == 0, again.stderr[-2000:]
    assert json.loads(again.stdout.splitlines()[-1]) == expected


def test_rows_of_an_environment_are_numbered():
    rows = EnvironmentRows(3, system="Be brief.", first=10)
    assert [user_data_get(row["user_data"], "index") for row in rows] == [10, 11, 12]
    assert rows[1:] == [rows[1], rows[-1]]
    assert rows[0]["messages"] == [{"role": "system", "content": "Be brief."}]
    assert EnvironmentRows(1)[0]["messages"] == []
