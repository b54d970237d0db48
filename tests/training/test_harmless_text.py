"""Nothing that a model writes does anything to a terminal."""

import unicodedata

import pytest

from twinkle_jax.training.display import harmless, one_line


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
