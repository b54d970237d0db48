"""Values of `user_data` as Twinkle packs them."""

import datetime

import pytest

from twinkle_jax.twinkle.data_format import pack_value, user_data_get


def test_packed_values_are_decoded_and_others_stay():
    """The text of a packed value was returned."""
    day = datetime.date(2026, 1, 2)
    packed = [("list", [1, {"x": None}]), ("text", "é"), ("number", 0.5), ("day", day)]
    data = [(name, pack_value(value)) for name, value in packed]
    assert data[1] == ("text", '"é"')
    for name, value in packed[:3]:
        assert user_data_get(data, name) == value
    assert user_data_get(data, "day") == "2026-01-02"
    plain = [("answer", "007"), ("id", 7), ("answer", "8")]
    assert (user_data_get(plain, "answer"), user_data_get(plain, "id")) == ("007", 7)
    deep = "[" * 100_000  # which Python cannot parse
    assert user_data_get([("answer", deep)], "answer") == deep
    assert user_data_get(plain, "none", "3") == "3" and user_data_get(None, "none") is None
    with pytest.raises(ValueError, match="pairs"):
        user_data_get(["answer"], "answer")
