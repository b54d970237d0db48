"""Pictures of scores: small, and of the runs that are named."""

import json

import numpy as np

from tests.examples import load

plot_scores = load("plot_scores")


def test_a_small_picture_of_two_runs(tmp_path):
    for seed in (0, 1):
        (tmp_path / f"seed_{seed}").mkdir()
        lines = [json.dumps({"step": n + 1, "reward": n / 60 - seed}) for n in range(60)]
        (tmp_path / f"seed_{seed}/metrics.jsonl").write_text("\n".join(lines) + "\n")
    np.testing.assert_allclose(plot_scores.rewards(tmp_path / "seed_0"), np.arange(60) / 60)
    runs = [str(tmp_path / f"seed_{seed}") for seed in (0, 1)]
    picture = tmp_path / "scores.png"
    assert plot_scores.main(["blackjack", *runs, "--output", str(picture)]) == str(picture)
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert picture.stat().st_size < 60_000
