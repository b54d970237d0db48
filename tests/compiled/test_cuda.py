"""What CUDA's compiler says of H100s: updates send what they must, and decoding copies no layers.

Without a GPU it tries no kernels out, so that others may run on a real one.
"""

import pytest

from tests.compiled.arithmetic import ideal
from tests.compiled.costs import arrays
from tests.compiled.described import described_mesh
from tests.compiled.marks import compiled_by
from tests.compiled.models import Cut, Setting, compiled_update, update_costs
from tests.compiled.rollout import rollout
from tests.compiled.test_rollout_wire import check_fsdp, check_tensor

pytestmark = [*compiled_by("cuda"), pytest.mark.usefixtures("as_users_compile")]
SMALL = Cut(layers=2, vocab=8192)
GIB = 2**30
# The model, where it runs, and the most that a device may use of memory.
BUDGETS = {
    "4 GPUs": ("Qwen2.5-0.5B", Setting("h100:1x4", 1, 4, 1, 16, 1024), 0.5),
    "8 GPUs": ("Qwen2.5-7B", Setting("h100:1x8", 1, 8, 1, 16, 2048), 2.6),
    "2 hosts": ("Qwen3-4B", Setting("h100:2x8", 1, 16, 1, 32, 2048), 1.1),
    "8 hosts": ("Qwen2.5-7B", Setting("h100:8x8", 1, 64, 1, 128, 2048), 1.6),
    "copies": ("Qwen2.5-0.5B", Setting("h100:1x4", 2, 2, 1, 16, 1024), 0.65),
    "tensor": ("Qwen2.5-7B", Setting("h100:1x8", 1, 4, 2, 16, 2048), 2.6),
}


@pytest.mark.parametrize("case", BUDGETS)
def test_an_update_costs_what_it_must(case):
    model, setting, memory = BUDGETS[case]
    measured, least = update_costs(model, setting, SMALL), ideal(model, setting, SMALL)
    assert measured.wire < 1.0 * least.wire, (measured.wire / least.wire, measured.largest)
    assert measured.flops < 1.05 * (least.flops - least.attention)  # a kernel's are not counted
    assert measured.peak < memory * GIB, measured.peak / GIB
    if setting.fsdp == setting.devices:  # then gradients are scattered, and only small sums are not
        assert measured.sent["all-reduce"] < 0.01 * measured.sent["reduce-scatter"], (
            measured.largest
        )


@pytest.mark.parametrize(("tensor", "operations"), [(1, 2.3e13), (2, 3.3e13)])
def test_only_the_chosen_experts_are_computed(tensor, operations):
    """1.7e14 operations if all were; a device with half of them has more empty blocks."""
    setting = Setting("h100:1x8", 1, 8 // tensor, tensor, 64, 2048)
    measured = update_costs("Qwen3-30B-A3B", setting, SMALL)
    assert measured.flops < operations
    assert measured.peak < 8.5 * GIB


@pytest.mark.parametrize(
    ("model", "setting"),
    [
        ("Qwen2.5-0.5B", Setting("h100:1x4", 1, 4, 1, 64, 256)),
        ("Qwen3-4B", Setting("h100:2x8", 1, 16, 1, 256, 256)),
    ],
)
def test_parameters_that_move_at_once_cross_the_wire_once(model, setting):
    """And so do gradients; memory is also for the buckets that they are put together in."""
    measured = update_costs(model, setting, SMALL, transfers="once")
    least = ideal(model, setting, SMALL, transfers="once")
    assert measured.wire < 1.001 * least.wire, (measured.wire / least.wire, measured.largest)
    assert measured.peak < 1.9 * least.memory, measured.peak / least.memory


@pytest.mark.parametrize("case", ["4 GPUs", "2 hosts", "tensor"])
def test_the_order_of_the_devices_does_not_matter(case):
    model, setting, _ = BUDGETS[case]
    listed, arranged = (update_costs(model, setting, SMALL, bare=bare) for bare in (True, False))
    assert arranged == listed


def test_a_long_row_holds_no_array_of_time_by_time():
    long = Setting("h100:1x4", 1, 4, 1, 4, 16384)
    text = compiled_update("Qwen3-4B", long, SMALL, bare=True, attention=None).as_text()
    assert "__cudnn$fmhaSoftmaxBackward" in text
    shapes = {tuple(extents) for _, extents in arrays(text)}
    assert any(16384 in extents for extents in shapes)
    assert not [extents for extents in shapes if extents.count(16384) > 1]


@pytest.mark.parametrize(
    ("model", "rows", "most"),
    [("Qwen3-4B", 64, 1.3), ("Qwen2.5-0.5B", 256, 1.6), ("Youtu-LLM-2B", 64, 1.3)],
)
def test_a_step_of_decoding_copies_neither_weights_nor_cache(model, rows, most):
    """Narrow heads and many rows: attention's logits are half as large as what it reads."""
    measured = rollout(model, "h100:1x4", rows, 2048)
    assert measured.total < most * measured.least, (
        measured.total / measured.least,
        measured.largest(),
    )
    assert measured.moved > 0.95 * measured.least
    assert measured.temporary < measured.weights + 0.1 * measured.cache, (
        measured.temporary / measured.cache
    )


@pytest.mark.parametrize(
    ("model", "rows", "filled", "most"),
    [
        ("Qwen3-4B", 64, 1024, 1.35),
        ("Qwen3-4B", 64, 2048, 1.4),
        ("Qwen2.5-0.5B", 256, 1024, 1.7),
        ("Qwen2.5-0.5B", 256, 2048, 1.55),
        ("Youtu-LLM-2B", 64, 1024, 1.8),  # by XLA: wider than the kernel takes
    ],
)
def test_rows_of_different_lengths_are_read_by_page(model, rows, filled, most):
    """Room for 8,192 tokens of a row; filled to an eighth, whole rows of 0.5B would cost 8.1."""
    measured = rollout(model, "h100:1x4", rows, 8192, filled=filled)
    assert measured.total < most * measured.least, (
        measured.total / measured.least,
        measured.largest(),
    )
    assert measured.moved > 0.95 * measured.least
    assert measured.cache < 1.35 * measured.filled
    assert measured.temporary < measured.weights + 0.1 * measured.cache, (
        measured.temporary / measured.cache
    )


def test_sliding_layers_read_and_hold_their_window_only():
    """22 of 26 layers see 512 tokens; with all tokens the cache is 6.5 GiB, not 1.86."""
    measured = rollout("gemma-3-1b", "h100:1x4", 64, 8192, filled=4096)
    all_tokens = rollout("gemma-3-1b", "h100:1x4", 64, 8192, filled=4096, windows=False)
    assert (measured.cache / 2**30, all_tokens.cache / 2**30) == pytest.approx((1.86, 6.5), 0.01)
    assert all_tokens.total > 1.9 * measured.total
    assert measured.total < 1.45 * measured.least, (
        measured.total / measured.least,
        measured.largest(),
    )
    assert measured.cache < 1.3 * measured.filled


def test_in_one_stack_layers_would_be_copied():
    """Why they lie one by one; if a compiler no longer does this, they need not."""
    by_layer, stacked = (
        rollout("Qwen3-4B", "h100:1x4", 64, 2048, stacked=x) for x in (False, True)
    )
    assert stacked.total > 2.5 * by_layer.total


def test_a_rollout_on_eight_hosts_gathers_parameters_once():
    check_fsdp("h100:8x8")


def test_a_rollout_on_eight_hosts_keeps_logits_where_they_are():
    check_tensor("h100:8x8")


def test_topologies_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="topology"):
        described_mesh("h100:eight", 1, 8, 1, bare=True)
    with pytest.raises(ValueError, match="fsdp"):
        described_mesh("h100:1x8", 1, 4, 1, bare=True)
