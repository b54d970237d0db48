"""JSON: what Python's reader lets through and this one refuses."""

import pytest

from twinkle_jax.data.strict_json import parse_json


def test_values_are_those_of_json():
    text = ' {"a": [1, -2.5e3, "é\\ud83d\\ude00", true, null], "b": {"a": 12345678901234567890}} '
    expected = {"a": [1, -2500.0, "é😀", True, None], "b": {"a": 12345678901234567890}}
    assert parse_json(text) == expected


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{", "Expecting"),
        ("", "Expecting"),
        ("1 2", "Extra data"),
        ("NaN", "NaN"),
        ("[-Infinity]", "Infinity"),
        ("[1e400]", "1e400"),
        ('{"x": {"a": 1, "b": 2, "a": 1}}', "duplicate key 'a'"),
        ("[" * 100_000, "nested too deeply"),
        ("1" * 5000, "digits"),
        ('{"a": ["b\\uD83d"]}', "unpaired surrogate"),
        ('{"\ud83d": 1}', "unpaired surrogate"),
    ],
)
def test_what_is_refused(text, reason):
    with pytest.raises(ValueError, match=reason):
        parse_json(text)
