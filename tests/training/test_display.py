"""What a run shows: progress, completions, explanations, text made harmless, and its curves."""

import io
import json
import math
import subprocess
import sys
import unicodedata

import numpy as np
import pytest

pytest.importorskip("matplotlib", reason="pip install 'twinkle-jax[training]'")
pytest.importorskip("rich", reason="pip install 'twinkle-jax[training]'")

import matplotlib.figure
from rich.console import Console

from twinkle_jax.training.display import (
    Display,
    draw_curves,
    explain,
    harmless,
    moving_average,
    one_line,
)

METRICS = {
    "reward": 0.25, "completions/mean_length": 12.34, "kl": 0.00123, "tokens_per_second": 1234.5,
    "loss": 0.1, "grad_norm": 1.0,
}  # fmt: skip


def plain():
    return Console(file=io.StringIO(), width=60)


def terminal():
    return Console(file=io.StringIO(), width=80, force_terminal=True, legacy_windows=False)


def test_the_time_left_is_known_for_slow_steps():
    display, now = Display(10, console=terminal()), [0.0]
    display._progress.get_time = lambda: now[0]
    for step in range(3, 6):  # a resumed run
        now[0] += 300
        display.step(step, {})
    assert display._progress.tasks[0].time_remaining == 5 * 300


def printed(show):
    """What a display prints while it is passed to a function."""
    console = plain()
    with Display(10, console=console) as display:
        show(display)
    return console.file.getvalue()


def test_plain_lines_elsewhere():
    def show(display):
        display.step(3, METRICS | {"eval/accuracy": 0.5})
        display.step(4, {"reward": float("nan")})
        display.step(5, {})

    assert printed(show).splitlines() == [
        "step 3/10  reward 0.250  length 12.3  KL 0.0012  1,234 tok/s",
        "held-out accuracy after step 3: 0.500",
        "step 4/10  reward nan",
        "step 5/10",
    ]


def test_a_bar_on_a_terminal():
    console = terminal()
    with Display(1000, console=console) as display:
        display.step(300, METRICS)
        display.note("in between")
    shown = console.file.getvalue()
    assert " 300/1000" in shown and "reward 0.250  length 12.3  KL 0.0012  1,234 tok/s" in shown
    assert "in between" in shown
    assert shown.rfind("\x1b[?25h") > shown.rfind("\x1b[?25l")  # the cursor is there again


def test_the_bar_ends_with_an_error():
    console = terminal()
    with pytest.raises(KeyError), Display(10, console=console):
        raise KeyError
    shown = console.file.getvalue()
    assert shown.rfind("\x1b[?25h") > shown.rfind("\x1b[?25l")


def test_a_terminal_that_cannot_move_a_bar(monkeypatch):
    monkeypatch.setenv("TERM", "dumb")
    console = terminal()
    with Display(10, console=console) as display:
        display.step(3, {"reward": 1.0})
    assert console.file.getvalue() == "step 3/10  reward 1.000\n"


def test_a_sentence_each_time_that_it_begins_to_hold():
    flat, usual = {"frac_reward_zero_std": 1.0}, {"frac_reward_zero_std": 0.5}

    def show(display):
        for step, metrics in enumerate([usual, flat, flat, usual, flat]):
            display.step(step, metrics)

    shown = [line.split("/")[0].split(":")[0] for line in printed(show).splitlines()]
    sentence = "Nothing to learn from in this step"
    assert shown == ["step 0", "step 1", sentence, "step 2", "step 3", "step 4", sentence]


def test_rewards_that_differ_only_where_completions_are_left_out():
    masked = {"frac_reward_zero_std": 1.0, "reward": -0.9, "reward_std": 0.1}
    assert list(explain(masked | {"completions/clipped_ratio": 0.5})) == ["masked"]
    assert list(explain(masked | {"reward_std": 0.0, "completions/clipped_ratio": 0.5})) == ["flat"]


def test_mean_rewards_that_are_not_the_accuracy():
    def show(display):
        display.step(3, {"eval/accuracy": 0.5, "eval/reward": 0.625})
        display.step(4, {"eval/accuracy": 0.5, "eval/reward": 0.5, "eval/pass@2": 0.75})

    assert printed(show).splitlines()[1::2] == [
        "held-out accuracy after step 3: 0.500, mean reward 0.625",
        "held-out accuracy after step 4: 0.500, pass@2 0.750",
    ]
    summary = {"steps": 4, "seconds": 2.0, "accuracy_before": 0.0, "accuracy_after": 0.5}
    summary |= {"reward_before": 0.25, "reward_after": 0.625}
    shown = printed(lambda display: display.summary(summary, "runs/mine")).splitlines()
    assert shown[1] == "held-out mean reward 0.250 before, 0.625 after"


def trajectory(prompt, completion):
    user = {"role": "user", "content": prompt}
    return {"messages": [user, {"role": "assistant", "content": completion}]}


def show(samples):
    trajectories, rewards, advantages = zip(*samples, strict=True)
    numbers = np.float32(rewards), np.float32(advantages)
    return printed(lambda display: display.samples(7, trajectories, *numbers))


def test_a_table_of_one_prompt_whose_rewards_differ():
    samples = [(trajectory("same", f"flat{i}"), 1.0, 0.0) for i in range(3)]
    samples += [(trajectory("[b]2+2", f"said{i}"), i % 2, (-1.0, 1.0)[i % 2]) for i in range(6)]
    shown = show(samples)
    assert "step 7, completions of: [b]2+2" in shown
    assert [f"said{i}" in shown for i in range(6)] == [True] * 4 + [False] * 2
    assert "flat" not in shown
    row = next(line for line in shown.splitlines() if "said1" in line)
    assert "1.000" in row and "+1.000" in row
    assert "flat0" in show(samples[:3])


def test_completions_do_nothing():
    shown = show(
        [
            (trajectory("p\x1b[2J", "[red]\x1b[31m[/red]\u202e\x9b1A[link=x]"), 0.0, -0.5),
            (trajectory("p\x1b[2J", "one\ntwo"), 1.0, 0.5),
        ]
    )
    assert "completions of: p<U+001B>[2J" in shown
    assert "[red]<U+001B>[31m[/red]<U+202E>" in shown.replace("\n", "")
    assert "one↵two" in shown
    assert not {"\x1b", "\x9b", "\u202e"} & set(shown)


def test_nothing_to_show():
    assert printed(lambda display: display.samples(1, [], [], [])) == ""


def test_notes_are_no_markup_and_lines_are_not_broken():
    text = "[bold]a[/bold] " + "word " * 30 + "\x1b[0m :smile:"
    note = printed(lambda display: display.note(text))
    assert note == text.replace("\x1b", "<U+001B>") + "\n"


def test_a_terminal_without_unicode():
    buffer = io.BytesIO()
    file = io.TextIOWrapper(buffer, encoding="ascii")
    with Display(10, console=Console(file=file)) as display:
        display.note("é")
        display.samples(1, [trajectory("漢", "a\nb")], [1.0], [0.0])
    file.flush()
    assert rb"\xe9" in buffer.getvalue() and rb"\u6f22" in buffer.getvalue()


@pytest.mark.parametrize(
    ("summary", "line"),
    [
        ({"accuracy_before": 0.25, "accuracy_after": 0.9375},
         "held-out accuracy 0.250 before, 0.938 after 40 steps in 12 s"),
        ({"accuracy_before": None, "accuracy_after": None}, "40 steps in 12 s"),
        ({"accuracy_before": None, "accuracy_after": 0.5}, "40 steps in 12 s"),
        ({"cross_entropy_before": 3.0, "cross_entropy_after": 2.0},
         "held-out cross-entropy 3.000 before, 2.000 after 40 steps in 12 s"),
        ({"cross_entropy_before": None, "cross_entropy_after": 2.0}, "40 steps in 12 s"),
    ],
)  # fmt: skip
def test_the_end(tmp_path, summary, line):
    summary = summary | {"steps": 40, "seconds": 12.3}
    assert printed(lambda display: display.summary(summary, tmp_path)).splitlines() == [
        line, f"the policy, metrics.jsonl and curves.png are in {tmp_path}"
    ]  # fmt: skip


def test_the_end_of_no_steps_has_no_curves(tmp_path):
    summary = {"steps": 0, "seconds": 0.0}
    *_, last = printed(lambda display: display.summary(summary, tmp_path)).splitlines()
    assert last == f"the policy and metrics.jsonl are in {tmp_path}"


def test_without_rich(monkeypatch):
    monkeypatch.setitem(sys.modules, "rich", None)
    with pytest.raises(ImportError, match="rich"):
        Display(10)


USUAL = {
    "loss": 0.02, "grad_norm": 0.5, "reward": 0.4, "frac_reward_zero_std": 0.75,
    "completions/clipped_ratio": 0.5, "skipped_updates": 0.0,
}  # fmt: skip


@pytest.mark.parametrize(
    ("metrics", "names"),
    [
        ({}, []),
        (USUAL, []),
        (USUAL | {"loss": 1e-9}, ["zero loss"]),
        (USUAL | {"loss": -1e-9}, ["zero loss"]),
        (USUAL | {"loss": 0.0, "grad_norm": 0.0}, []),
        ({"loss": 1e-9, "cross_entropy": 1e-9, "grad_norm": 0.5}, []),  # examples known by heart
        (USUAL | {"loss": 0.0, "frac_reward_zero_std": 1.0, "grad_norm": 0.0}, ["flat"]),
        (USUAL | {"frac_reward_zero_std": 1.0, "kl": 0.1}, ["flat"]),  # whose gradient it is
        (USUAL | {"frac_reward_zero_std": 1.0, "kl": 0.1, "teacher/kl": 0.2}, []),
        (USUAL | {"frac_reward_zero_std": 1.0}, []),  # as of an estimator without a baseline
        (USUAL | {"completions/clipped_ratio": 0.51}, ["cut"]),
        (USUAL | {"skipped_updates": 1.0, "loss": math.nan, "grad_norm": math.nan}, ["skipped"]),
    ],
)
def test_when(metrics, names):
    assert list(explain(metrics)) == names


@pytest.mark.parametrize(
    ("reward", "why"), [(0.0, "too hard"), (1.0, "solves"), (0.5, "temperature"), (None, "More")]
)
def test_why_nothing_is_learnt(reward, why):
    metrics = {"frac_reward_zero_std": 1.0} | ({} if reward is None else {"reward": reward})
    sentence = explain(metrics)["flat"]
    assert sentence.startswith("Nothing to learn from in this step: every completion of a prompt")
    assert why in sentence


def test_a_penalty_in_rewards_is_learnt_from():
    flat = {"frac_reward_zero_std": 1.0, "reward": 0.0, "kl": 0.1}
    assert not explain(flat | {"grad_norm": 0.5}, kl_in_reward=True)
    assert list(explain(flat | {"grad_norm": 0.0}, kl_in_reward=True)) == ["flat"]
    console = Console(file=io.StringIO(), width=200)
    with Display(1, console=console, kl_in_reward=True) as display:
        display.step(1, flat | {"grad_norm": 0.5})
    assert "Nothing to learn" not in console.file.getvalue()


def test_whether_the_policy_changed():
    flat = {"frac_reward_zero_std": 1.0, "updates_without_signal": 2.0, "grad_norm": 0.0}
    assert "No update was made: parameters" in explain(flat)["flat"]
    assert "No update" not in explain(flat | {"grad_norm": 0.5, "kl": 0.1})["flat"]


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain, ünïcode 漢字 👍 [red]", "plain, ünïcode 漢字 👍 [red]"),
        ("\x1b[31mred\x1b[0m", "<U+001B>[31mred<U+001B>[0m"),
        ("\x1b]0;title\x07", "<U+001B>]0;title<U+0007>"),
        ("a\x9b2Jb\x85", "a<U+009B>2Jb<U+0085>"),
        ("a\rb\x08\x7f\x00", "a<U+000D>b<U+0008><U+007F><U+0000>"),
        ("\u202egnp.exe\u2066", "<U+202E>gnp.exe<U+2066>"),
        ("zero\u200bwidth\ufeff\U000e0041", "zero<U+200B>width<U+FEFF><U+E0041>"),
        ("\ud83d half", "<U+D83D> half"),
        ("\u2028\u2029", "<U+2028><U+2029>"),
        ("one\r\ntwo\n\tthree", "one\ntwo\n\tthree"),
    ],
)
def test_what_is_active_is_shown(text, shown):
    assert harmless(text) == shown


def test_no_character_at_all_is_active():
    text = harmless("".join(map(chr, range(0x110000))))
    left = {c for c in text if unicodedata.category(c) in ("Cc", "Cf", "Cs", "Zl", "Zp")}
    assert left == {"\n", "\t"}


def test_characters_that_a_terminal_has_not():
    assert harmless("é漢", encoding="ascii") == r"\xe9\u6f22"
    assert harmless("é漢", encoding="latin-1") == r"é\u6f22"
    assert one_line("é\n", encoding="ascii") == r"\xe9\u21b5"


def test_one_line_keeps_both_ends():
    assert one_line("a\nb\r\nc\td\x1b") == "a↵b↵c d<U+001B>"
    text = "x" * 300 + "the answer is 7"
    shown = one_line(text, limit=90)
    assert shown == "x" * 60 + " … " + "x" * 15 + "the answer is 7"
    assert one_line("x" * 90, limit=90) == "x" * 90
    assert one_line("abc", limit=1) == "a … "


@pytest.fixture
def drawn(tmp_path, monkeypatch):
    """Draws, and gives the axes by their titles."""
    figures = []

    class Kept(matplotlib.figure.Figure):
        def __init__(self, *args, **keywords):
            super().__init__(*args, **keywords)
            figures.append(self)

    monkeypatch.setattr(matplotlib.figure, "Figure", Kept)

    def draw(rows, rest="", **ends):
        path = tmp_path / "metrics.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows) + rest)
        draw_curves(path, tmp_path / "curves.png", **ends)
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
    before = {"accuracy": 0.25, "cross_entropy": 3.0, "reward": None}
    after = {"accuracy": 0.5, "cross_entropy": 2.0, "reward": None}
    axes = drawn([{"step": 1}, {"step": 2, "reward": 1.0}], before=before, after=after)
    curves = {"held-out accuracy": [0.25, 0.5], "held-out cross-entropy, nats a token": [3, 2]}
    for title, (first, last) in curves.items():
        ends = [[0, first], [2, last]]
        np.testing.assert_array_equal(axes[title].lines[0].get_xydata(), ends)
    np.testing.assert_array_equal(axes["reward"].lines[0].get_xydata(), [[2, 1]])
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
    np.testing.assert_array_equal(moving_average(values, 3), expected)


@pytest.mark.parametrize("rows", [[], [{"step": 1, "reward": None}], [{"step": 1, "other": 1.0}]])
def test_nothing_to_draw(drawn, rows):
    with pytest.raises(ValueError, match="metrics"):
        drawn(rows)


def test_without_matplotlib(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match="matplotlib"):
        draw_curves(tmp_path / "metrics.jsonl", tmp_path / "curves.png")


@pytest.mark.slow
def test_drawing_keeps_nothing_of_pyplot(tmp_path):
    """In a process of its own, where nothing else can have imported it."""
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "reward": 0.5}\n')
    code = (
        "import sys; from twinkle_jax.training.display import draw_curves; "
        "draw_curves(sys.argv[1], sys.argv[2]); assert 'matplotlib.pyplot' not in sys.modules"
    )
    files = [str(tmp_path / name) for name in ("metrics.jsonl", "curves.png")]
    subprocess.run([sys.executable, "-c", code, *files], check=True, timeout=300)
