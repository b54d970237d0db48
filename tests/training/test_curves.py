"""The picture of a run holds what was measured, and the values are where they belong."""

import json
import subprocess
import sys

import numpy as np
import pytest

pytest.importorskip("matplotlib", reason="pip install 'twinkle-jax[training]'")

import matplotlib.figure

from twinkle_jax.training import curves
from twinkle_jax.training.curves import draw_curves


@pytest.fixture
def drawn(tmp_path, monkeypatch):
    """Draws, and gives the axes by their titles."""
    figures = []

    class Kept(matplotlib.figure.Figure):
        def __init__(self, *args, **keywords):
            super().__init__(*args, **keywords)
            figures.append(self)

    monkeypatch.setattr(matplotlib.figure, "Figure", Kept)

    def draw(rows, rest=""):
        path = tmp_path / "metrics.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows) + rest)
        draw_curves(path, tmp_path / "curves.png")
        content = (tmp_path / "curves.png").read_bytes()
        assert content[:8] == b"\x89PNG\r\n\x1a\n" and len(content) > 5000
        return {ax.get_title("left").split("  ")[0]: ax for ax in figures[-1].axes}

    return draw


def test_all_that_there_is_and_no_more(drawn):
    rows = [
        {
            "step": step, "reward": step / 4, "reward_std": 0.5, "completions/mean_length": 9.0,
            "completions/min_length": 5.0, "completions/max_length": 12.0, "grad_norm": 1.0,
        }
        for step in range(1, 5)
    ]  # fmt: skip
    rows[1]["eval/accuracy"], rows[3]["eval/accuracy"] = 0.25, 0.75
    rows[2]["grad_norm"] = None
    axes = drawn(rows, rest='{"step": 5, "rew')
    assert list(axes) == ["reward", "held-out accuracy", "tokens of a completion",
                          "norm of the gradient"]  # fmt: skip
    np.testing.assert_array_equal(
        axes["reward"].lines[0].get_xydata(), [[1, 0.25], [2, 0.5], [3, 0.75], [4, 1]]
    )
    np.testing.assert_array_equal(
        axes["held-out accuracy"].lines[0].get_xydata(), [[2, 0.25], [4, 0.75]]
    )
    np.testing.assert_array_equal(axes["norm of the gradient"].lines[0].get_xdata(), [1, 2, 4])
    for name, low, high in (("reward", -0.25, 1.5), ("tokens of a completion", 5, 12)):
        (band,) = axes[name].collections
        edges = band.get_paths()[0].vertices[:, 1]
        assert (edges.min(), edges.max()) == (low, high)
    assert {ax.get_xlim() for ax in axes.values()} == {(1 - 0.09, 4 + 0.09)}
    assert axes["norm of the gradient"].get_yscale() == "linear"
    more = drawn([{"step": 1, "reward": 1.0, "kl": 0.1, "entropy": 0.2}])
    assert list(more) == ["reward", "KL divergence from the reference policy",
                          "entropy, nats a token"]  # fmt: skip


def test_many_steps_are_smoothed(drawn):
    rng = np.random.default_rng(0)
    values = rng.normal(1.0, 0.1, 200)
    values[17] = 1000.0
    (ax,) = drawn({"step": i, "grad_norm": x} for i, x in enumerate(values)).values()
    raw, smooth = (line.get_ydata() for line in ax.lines)
    np.testing.assert_array_equal(raw, values)
    np.testing.assert_allclose(smooth[100], values[96:105].mean())
    np.testing.assert_allclose(smooth[0], values[:5].mean())
    assert ax.get_yscale() == "log"


def test_missing_values_do_not_count_in_averages():
    values = np.array([1.0, np.nan, 3.0, np.nan, np.nan, np.nan, 5.0])
    expected = [1.0, 2.0, 3.0, 3.0, np.nan, 5.0, 5.0]
    np.testing.assert_array_equal(curves.moving_average(values, 3), expected)


@pytest.mark.parametrize("rows", [[], [{"step": 1, "reward": None}], [{"step": 1, "other": 1.0}]])
def test_nothing_to_draw(drawn, rows):
    with pytest.raises(ValueError, match="metrics"):
        drawn(rows)


def test_without_matplotlib(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match="matplotlib"):
        draw_curves(tmp_path / "metrics.jsonl", tmp_path / "curves.png")


def test_drawing_keeps_nothing_of_pyplot(tmp_path):
    """In a process of its own, where nothing else can have imported it."""
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "reward": 0.5}\n')
    code = (
        "import sys; from twinkle_jax.training.curves import draw_curves; "
        "draw_curves(sys.argv[1], sys.argv[2]); assert 'matplotlib.pyplot' not in sys.modules"
    )
    files = [str(tmp_path / name) for name in ("metrics.jsonl", "curves.png")]
    subprocess.run([sys.executable, "-c", code, *files], check=True, timeout=300)
