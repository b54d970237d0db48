"""Draw the score of an example's runs, between that of a random and that of the best player.

    python examples/guessing_game.py --seed 0 --output runs/guessing_0
    python examples/plot_scores.py guessing_game runs/guessing_0 --output guessing_game.png

Each line is a run: the moving average of the mean reward of its steps, over the pale line of single
steps. Draws `guessing_game`, `calculator`, `blackjack`, or any file here with RANDOM_SCORE and
BEST_SCORE.
"""

import argparse
import importlib.util
import json
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure


def load(name):
    """Import an example from its file."""
    specification = importlib.util.spec_from_file_location(
        name, Path(__file__).with_name(f"{name}.py")
    )
    example = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(example)
    return example


def rewards(run):
    """Read the mean reward of each step of a run."""
    lines = (Path(run) / "metrics.jsonl").read_text().splitlines()
    return np.asarray([json.loads(line)["reward"] for line in lines])


def plot(example, runs, path):
    """Draw the runs; each point of a line averages an eighth of the steps, but 9 at least."""
    figure = Figure(figsize=(5.6, 3.2), dpi=80, layout="constrained")
    axes = figure.subplots()
    axes.axhline(example.BEST_SCORE, color="black", linestyle="--", linewidth=1)
    axes.axhline(example.RANDOM_SCORE, color="black", linestyle=":", linewidth=1)
    for i, run in enumerate(runs):
        scores = rewards(run)
        steps = np.arange(1, len(scores) + 1)
        span = min(max(9, len(scores) // 8), len(scores))
        kernel = np.full(span, 1 / span)
        axes.plot(steps, scores, color=f"C{i}", alpha=0.2, linewidth=0.8)
        means = np.convolve(scores, kernel, "valid")
        centres = np.convolve(steps, kernel, "valid")
        axes.plot(centres, means, color=f"C{i}", label=Path(run).name.replace("_", " "))
    place = {"transform": axes.get_yaxis_transform(), "fontsize": 8, "ha": "right"}
    axes.text(0.99, example.BEST_SCORE, "best possible", va="bottom", **place)
    axes.text(0.99, example.RANDOM_SCORE, "random", va="bottom", **place)
    axes.set(xlabel="step", ylabel="mean reward of a step")
    axes.margins(y=0.12)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=8, loc="lower center")
    figure.savefig(path, pil_kwargs={"optimize": True})


def main(arguments=None):
    """Draw what the arguments say; return the path of the picture."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("example", help="name of the file, without .py")
    parser.add_argument("runs", nargs="+", help="directories of its runs")
    parser.add_argument("--output", default="scores.png")
    options = parser.parse_args(arguments)
    plot(load(options.example), options.runs, options.output)
    return options.output


if __name__ == "__main__":
    print(main())
