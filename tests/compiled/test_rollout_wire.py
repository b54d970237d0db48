"""What compilers say a rollout of Qwen2.5-7B on 64 chips sends, beside the least."""

import pytest

from tests.compiled.marks import compiled_by
from tests.compiled.models import Setting
from tests.compiled.rollout import wire

pytestmark = [*compiled_by("tpu"), pytest.mark.usefixtures("as_users_compile")]
ROWS, PROMPT = 1024, 512


def check_fsdp(topology):
    """Parameters are gathered once, and tokens send nothing."""
    measured = wire("Qwen2.5-7B", Setting(topology, 1, 64, 1, ROWS, PROMPT))
    assert measured["layout"].sent == pytest.approx(measured["layout"].least)
    assert set(measured["layout"].costs.sent) == {"all-gather"}
    assert measured["prefill"].sent == 0
    assert measured["token"].sent < 100  # whether all rows have ended


def check_tensor(topology):
    """A token sums its row twice in a layer; its logits stay where they are."""
    measured = wire("Qwen2.5-7B", Setting(topology, 1, 16, 4, ROWS, PROMPT))
    assert measured["layout"].sent == pytest.approx(measured["layout"].least)
    assert measured["prefill"].sent < 1.05 * measured["prefill"].least
    token = measured["token"]  # beyond the least, sums of blocks of the vocabulary, and one block
    assert token.sent < 1.05 * token.least, (token.sent / token.least, token.costs.largest)


def test_parameters_are_gathered_once_and_tokens_send_nothing():
    check_fsdp("v5p:4x4x4")


def test_split_over_tensor_a_token_sums_its_row_twice_in_a_layer():
    check_tensor("v5p:4x4x4")
