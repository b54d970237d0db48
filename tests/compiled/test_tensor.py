"""Layers that are split over tensor sum their rows, and move nothing else of that size."""

import pytest

from tests.compiled.arithmetic import ideal
from tests.compiled.costs import arrays
from tests.compiled.marks import compiled_by
from tests.compiled.models import Cut, Setting, update_costs

pytestmark = [*compiled_by("tpu"), pytest.mark.usefixtures("as_users_compile")]
ROWS, TIME = 4, 2048  # of a device; no parameter is as long as their product
SETTING = Setting("v5p:2x2x2", 1, 4, 2, 4 * ROWS, TIME)
LAYERS = 2


def of_rows(shape):
    """Whether a shape has an array with all tokens of a device."""
    return any(
        ROWS * TIME in extents or extents[:2] == [ROWS, TIME] for _, extents in arrays(shape)
    )


def test_each_pass_sums_rows_twice_in_a_layer_and_moves_no_others():
    cut = Cut(LAYERS, vocab=10240)
    measured, least = update_costs("Qwen2.5-7B", SETTING, cut), ideal("Qwen2.5-7B", SETTING, cut)
    assert measured.wire < 1.0 * least.wire, (measured.wire / least.wire, measured.largest)
    assert measured.flops < 1.05 * (least.flops - least.attention)
    inside = [
        (kind, times, shape)
        for _, kind, times, shape in measured.largest
        if times == LAYERS and of_rows(shape)
    ]
    assert {kind for kind, _, _ in inside} == {"all-reduce"}, inside
    # forwards, when that is done again, and backwards; a sum that nobody needs again is left out
    assert 5 <= len(inside) <= 6, inside
    width = 3584
    assert all(arrays(shape)[0][1][-1] == width for _, _, shape in inside), inside
