"""Reading conversations: texts, completions, and what a user keeps beside them."""

import pytest

from twinkle_jax.data import Trajectory, completion_text, message_text, user_data_get


def test_trajectories_are_dictionaries():
    trajectory = Trajectory(messages=[{"role": "user", "content": "hi"}], user_data=[("a", 1)])
    assert trajectory == {
        "messages": [{"role": "user", "content": "hi"}],
        "user_data": [("a", 1)],
    }


@pytest.mark.parametrize("data", [[("a", 1), ("b", 2), ("a", 3)], {"a": 1, "b": 2}, [["a", 1]]])
def test_user_data_is_pairs_or_a_dictionary(data):
    assert user_data_get(data, "a") == 1
    assert user_data_get(data, "c", "none") == "none"
    assert user_data_get(None, "a") is None


@pytest.mark.parametrize("data", [["ab"], [("a",)], [5]])
def test_user_data_that_is_not_pairs(data):
    with pytest.raises(ValueError, match=r"^user_data"):
        user_data_get(data, "a")


def test_the_text_of_a_message():
    parts = [{"type": "text", "text": "a"}, "b", {"text": "c"}]
    assert message_text({"content": parts}) == "abc"
    assert message_text({"content": None}) == message_text({}) == ""
    with pytest.raises(ValueError, match="content"):
        message_text({"content": [{"type": "image"}]})


def test_the_completion_is_the_last_of_the_assistant():
    turns = [
        {"role": "assistant", "content": "one"},
        {"role": "assistant", "content": "two"},
        {"role": "user", "content": "three"},
    ]
    assert completion_text({"messages": turns}) == "two"
    assert completion_text({"messages": turns[2:]}) == ""
    assert completion_text({}) == ""
