"""Saving: a directory replaced in one step, and several processes that load and save together."""

import os
import pathlib
import subprocess
import sys

import numpy as np
import pytest

from tests import processes
from tests.limits import limited_files
from tests.model.families import config_of, family, params_of, random_params
from tests.model.huggingface.tensors import assert_same, contents, rewrite
from twinkle_jax.model import (
    Decoder,
    LoraConfig,
    RewardModel,
    load_pretrained,
    parse_config,
    save_pretrained,
)
from twinkle_jax.model.huggingface import saving
from twinkle_jax.model.huggingface.saving import replace_directory
from twinkle_jax.training import save_policy, small_policy
from twinkle_jax.training.policy import add_adapter
from twinkle_jax.training.run_directory import write_atomically

SCENARIOS = "tests.model.huggingface.scenarios"
MIB = 2**20


@pytest.fixture(params=["exchange", "two renames"])
def target(request, tmp_path, monkeypatch):
    if request.param == "two renames":
        monkeypatch.setattr(saving, "_exchange", lambda a, b: False)
    return tmp_path / "deep" / "target"


def test_new_and_replaced(target):
    for content in ("first", "second"):
        with replace_directory(target) as fresh:
            assert not list(fresh.iterdir()) and fresh.parent == target.parent
            (fresh / content).write_text(content)
        assert [p.name for p in target.iterdir()] == [content]
        assert [p.name for p in target.parent.iterdir()] == ["target"]


def interrupted(target):
    with replace_directory(target) as fresh:
        (fresh / "new").write_text("new")
        raise KeyboardInterrupt


def test_an_exception_changes_nothing(target):
    with replace_directory(target) as fresh:
        (fresh / "old").write_text("old")
    with pytest.raises(KeyboardInterrupt):
        interrupted(target)
    assert [p.name for p in target.iterdir()] == ["old"]
    assert [p.name for p in target.parent.iterdir()] == ["target"]


def test_a_full_disk_is_named(tmp_path):
    """Python's error about a write, and those of tokenizers and safetensors, name no file."""
    policy = small_policy(0)
    lora = LoraConfig(r=1, target_modules=("q_proj",))
    with limited_files(1000):
        for name, saved in (("policy", policy), ("adapter", add_adapter(policy, lora, base="x"))):
            with pytest.raises(OSError, match=str(tmp_path / name)):
                save_policy(saved, tmp_path / name)
        with pytest.raises(OSError, match="too large"):
            policy.tokenizer.save_pretrained(tmp_path)
        with pytest.raises(OSError, match=str(tmp_path / "config.json")):
            write_atomically(tmp_path / "config.json", "x" * 2000)


def test_a_failed_rename_puts_the_old_one_back(tmp_path, monkeypatch):
    monkeypatch.setattr(saving, "_exchange", lambda a, b: False)
    target = tmp_path / "target"
    target.mkdir()
    (target / "old").write_text("old")
    with pytest.raises(FileNotFoundError):
        saving._swap(tmp_path / "gone.partial", target)
    assert [p.name for p in target.iterdir()] == ["old"]


def test_links_are_followed(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    with replace_directory(tmp_path / "link") as fresh:
        (fresh / "file").write_text("")
    assert (tmp_path / "link").is_symlink() and (tmp_path / "real/file").exists()


def test_the_directory_has_ordinary_permissions(tmp_path):
    (tmp_path / "plain").mkdir()
    with replace_directory(tmp_path / "target"):
        pass
    assert (tmp_path / "target").stat().st_mode == (tmp_path / "plain").stat().st_mode


def test_a_save_that_is_under_way_is_left_alone(tmp_path):
    """Two at a time: neither takes the other's directory for remains, and the later one wins."""
    target = tmp_path / "target"
    with replace_directory(target) as first:
        (first / "a").write_text("a")
        with replace_directory(target) as second:
            (second / "b").write_text("b")
        assert (first / "a").exists() and (target / "b").exists()
    assert [p.name for p in target.iterdir()] == ["a"]
    assert [p.name for p in tmp_path.iterdir()] == ["target"]


def test_an_export_that_was_only_renamed_comes_back(tmp_path):
    """Killed between two renames, where the system has no exchange."""
    old = tmp_path / ".target.0123abcd.old"
    old.mkdir()
    (old / "good").write_text("good")
    with pytest.raises(KeyboardInterrupt):
        interrupted(tmp_path / "target")
    assert [p.name for p in (tmp_path / "target").iterdir()] == ["good"]
    (tmp_path / ".target.89abcdef.old").mkdir()  # and one whose successor is there goes
    with replace_directory(tmp_path / "target"):
        pass
    assert [p.name for p in tmp_path.iterdir()] == ["target"]


# Several processes.


@pytest.fixture
def directory(tmp_path):
    """A checkpoint `model`, an older export `again`, a file, and two that are damaged."""
    decoder = Decoder(config_of("qwen3"), params_of("qwen3"))
    save_pretrained(decoder, tmp_path / "model")
    save_pretrained(decoder, tmp_path / "again", dtype="bfloat16")
    (tmp_path / "file").write_text("")
    save_pretrained(decoder, tmp_path / "nan")
    embedding = np.array(decoder.params["embed_tokens"]["embedding"])
    embedding[0, -1] = np.nan  # in the last columns, which the second process holds
    rewrite(tmp_path / "nan", {"model.embed_tokens.weight": embedding})
    config = parse_config(family("qwen3", vocab_size=5_000, tie_word_embeddings=True))
    params = random_params(config)
    save_pretrained(Decoder(config, params), tmp_path / "untied")
    head = np.array(params["embed_tokens"]["embedding"])
    head[-1] += 1  # in the second part of the rows, which the second process compares
    rewrite(tmp_path / "untied", {"lm_head.weight": head})
    return tmp_path


def run(scenario, directory, **options):
    ended = processes.run(SCENARIOS, scenario, directory, **options)
    assert all(process.code == 0 for process in ended), ended
    return [process.result for process in ended]


@pytest.mark.exhaustive
@pytest.mark.parametrize(("count", "devices"), [(1, 8), (2, 4), (4, 2)])
def test_what_several_processes_save_is_what_they_loaded(count, devices, directory):
    results = run("round_trip", directory, processes=count, devices=devices)
    for result in results:  # each has seen the whole export
        assert result["adapter"] and result["spread"] == (count > 1)
        assert result["names"] == sorted(p.name for p in (directory / "again").iterdir())
    assert_same(load_pretrained(directory / "again").params, params_of("qwen3"))
    reward = RewardModel.from_pretrained(directory / "reward")
    np.testing.assert_array_equal(reward.head, np.arange(24))
    assert_same(reward.params, {k: x for k, x in params_of("qwen3").items() if k != "lm_head"})


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("scenario", "process", "name"),
    [
        ("load_nan", 1, r"model.embed_tokens.weight"),
        ("load_untied", 1, "tie_word_embeddings"),
        ("load_missing", 1, "path_or_id"),
        ("save_full_disk", 0, "no space left on device"),
        ("save_nan", 0, r"model.norm.weight"),
        ("save_over_a_file", 0, "directory"),
    ],
)
def test_an_error_of_one_process_reaches_both(scenario, process, name, directory):
    before = contents(directory / "again")
    results = run(scenario, directory)
    call = "load_pretrained" if "load" in scenario else "save_pretrained"
    assert name in results[process]["error"] and "on process" not in results[process]["error"]
    other = results[1 - process]["error"]
    assert other.startswith(f"RuntimeError: {call}") and f"failed on process {process}: " in other
    assert name in other
    assert contents(directory / "again") == before
    assert not list(directory.glob(".*"))


@pytest.mark.exhaustive
def test_processes_that_save_to_different_places_are_told(directory):
    for result in run("save_elsewhere", directory):
        assert result["error"].startswith("AssertionError") and "again-" in result["error"]
    assert not list(directory.glob("again-*"))


@pytest.mark.exhaustive
def test_a_writer_that_is_killed_ends_the_other(directory):
    before = contents(directory / "again")
    writer, other = processes.run(SCENARIOS, "save_killed", directory, seconds=150)
    assert writer.code == -9
    assert other.code not in (0, -9) or "error" in other.result, other
    assert contents(directory / "again") == before


@pytest.mark.exhaustive
@pytest.mark.skipif(not pathlib.Path("/proc/self/status").exists(), reason="reads /proc")
@pytest.mark.parametrize(("count", "devices"), [(1, 8), (2, 4)])
def test_a_host_holds_its_share_and_one_tensor(count, devices, directory):
    command = [sys.executable, "-m", SCENARIOS, "make", str(directory / "large")]
    subprocess.run(command, check=True, cwd=pathlib.Path(__file__).parents[3])
    (directory / "model").rename(directory / "large/small")
    results = run("memory", directory / "large", processes=count, devices=devices, seconds=400)
    for result in results:
        assert 240 * MIB / count < result["share"] < 260 * MIB / count
        assert result["loading"] > 0.9 * result["share"]  # the watch saw the load
        assert result["loading"] < 1.3 * result["share"] + 4 * MIB
        # The largest tensor has 4 MiB; gathered, each of the four devices has it too, and a buffer.
        assert result["saving"] < 48 * MIB


def test_errors_of_any_text_reach_the_other_processes():
    """One about a file whose name is not UTF-8 left them waiting."""
    message = saving._encode(OSError(os.fsdecode(b"no file called \xff")))
    with pytest.raises(RuntimeError, match=r"on process 1: OSError: no file called \?"):
        saving._raise_for("save_pretrained", 1, message)
