"""What is shown on a terminal and elsewhere."""

import io
import sys

import numpy as np
import pytest

pytest.importorskip("rich", reason="pip install 'twinkle-jax[training]'")

from rich.console import Console

from twinkle_jax.training.display import Display

METRICS = {
    "reward": 0.25, "completions/mean_length": 12.34, "kl": 0.00123, "tokens_per_second": 1234.5,
    "loss": 0.1, "grad_norm": 1.0,
}  # fmt: skip


def plain():
    return Console(file=io.StringIO(), width=60)


def terminal():
    return Console(file=io.StringIO(), width=80, force_terminal=True, legacy_windows=False)


def test_plain_lines_elsewhere():
    console = plain()
    with Display(10, console=console) as display:
        display.step(3, METRICS | {"eval/accuracy": 0.5})
        display.step(4, {"reward": float("nan")})
    with Display(console=console) as display:
        display.step(5, {})
    assert console.file.getvalue().splitlines() == [
        "step 3/10  reward 0.250  length 12.3  KL 0.0012  1,234 tok/s",
        "held-out accuracy after step 3: 0.500",
        "step 4/10  reward nan",
        "step 5",
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
    console = plain()
    flat, usual = {"frac_reward_zero_std": 1.0}, {"frac_reward_zero_std": 0.5}
    with Display(console=console) as display:
        for step, metrics in enumerate([usual, flat, flat, usual, flat]):
            display.step(step, metrics)
    lines = [line.split(":")[0] for line in console.file.getvalue().splitlines()]
    sentence = "Nothing to learn from in this step"
    assert lines == [
        "step 0", "step 1", sentence, "step 2", "step 3", "step 4", sentence
    ]  # fmt: skip


def trajectory(prompt, completion):
    user = {"role": "user", "content": prompt}
    return {"messages": [user, {"role": "assistant", "content": completion}]}


def show(samples, **keywords):
    console = plain()
    trajectories, rewards, advantages = zip(*samples, strict=True)
    with Display(console=console) as display:
        display.samples(7, trajectories, np.float32(rewards), np.float32(advantages), **keywords)
    return console.file.getvalue()


def test_a_table_of_one_prompt_whose_rewards_differ():
    samples = [(trajectory("same", f"flat{i}"), 1.0, 0.0) for i in range(3)]
    samples += [(trajectory("[b]2+2", f"said{i}"), i % 2, (-1.0, 1.0)[i % 2]) for i in range(6)]
    shown = show(samples)
    assert "step 7, completions of: [b]2+2" in shown
    assert [f"said{i}" in shown for i in range(6)] == [True] * 4 + [False] * 2
    assert "flat" not in shown
    row = next(line for line in shown.splitlines() if "said1" in line)
    assert "1.000" in row and "+1.000" in row
    assert "said4" in show(samples, rows=5)
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
    console = plain()
    with Display(console=console) as display:
        display.samples(1, [], [], [])
    assert console.file.getvalue() == ""


def test_notes_are_no_markup_and_lines_are_not_broken():
    console = plain()
    text = "[bold]a[/bold] " + "word " * 30 + "\x1b[0m :smile:"
    with Display(console=console) as display:
        display.note(text)
    assert console.file.getvalue() == text.replace("\x1b", "<U+001B>") + "\n"


def test_a_terminal_without_unicode():
    buffer = io.BytesIO()
    file = io.TextIOWrapper(buffer, encoding="ascii")
    with Display(console=Console(file=file)) as display:
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
    ],
)  # fmt: skip
def test_the_end(tmp_path, summary, line):
    console = plain()
    with Display(console=console) as display:
        display.summary(summary | {"steps": 40, "seconds": 12.3}, tmp_path)
    first, second = console.file.getvalue().splitlines()
    assert first == line and str(tmp_path) in second


def test_without_rich(monkeypatch):
    monkeypatch.setitem(sys.modules, "rich", None)
    with pytest.raises(ImportError, match="rich"):
        Display()
