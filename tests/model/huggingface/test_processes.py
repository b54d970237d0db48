"""Two processes load one checkpoint and save one; their memory; errors of one reach both."""

import pathlib
import subprocess
import sys

import numpy as np
import pytest

from tests import processes
from tests.model.families import config_of, family, params_of, random_params
from tests.model.huggingface.tensors import assert_same, contents, rewrite
from twinkle_jax.model import Decoder, load_pretrained, parse_config, save_pretrained

pytestmark = pytest.mark.exhaustive
SCENARIOS = "tests.model.huggingface.scenarios"
MIB = 2**20


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


@pytest.mark.parametrize(("count", "devices"), [(1, 8), (2, 4), (4, 2)])
def test_what_several_processes_save_is_what_they_loaded(count, devices, directory):
    results = run("round_trip", directory, processes=count, devices=devices)
    for result in results:  # each has seen the whole export
        assert result["adapter"] and result["spread"] == (count > 1)
        assert result["names"] == sorted(p.name for p in (directory / "again").iterdir())
    assert_same(load_pretrained(directory / "again").params, params_of("qwen3"))


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


def test_processes_that_save_to_different_places_are_told(directory):
    for result in run("save_elsewhere", directory):
        assert result["error"].startswith("AssertionError") and "again-" in result["error"]
    assert not list(directory.glob("again-*"))


def test_a_writer_that_is_killed_ends_the_other(directory):
    before = contents(directory / "again")
    writer, other = processes.run(SCENARIOS, "save_killed", directory, seconds=150)
    assert writer.code == -9
    assert other.code not in (0, -9) or "error" in other.result, other
    assert contents(directory / "again") == before


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
