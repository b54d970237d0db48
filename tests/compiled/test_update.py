"""What the TPU compiler says an update costs: no more than fully sharded training has to.

Real widths at two layers and a vocabulary that is cut, because that compiles in one or two minutes.
"""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from tests.compiled.arithmetic import ideal
from tests.compiled.costs import arrays, costs
from tests.compiled.described import described_mesh
from tests.compiled.marks import compiled_by
from tests.compiled.models import Cut, Setting, compiled_update, update_costs
from twinkle_jax.model.decoder.sharding import gather_in_steps, steps_of

pytestmark = [*compiled_by("tpu"), pytest.mark.usefixtures("as_users_compile")]
SMALL = Cut(layers=2, vocab=8192)
GIB = 2**30
# The model, where it runs, how much of it, and the most that a device may use of memory.
BUDGETS = {
    "v5e": ("Qwen2.5-0.5B", Setting("v5e:2x2", 1, 4, 1, 16, 1024), SMALL, 0.58),
    "v5p": ("Qwen2.5-7B", Setting("v5p:2x2x2", 1, 8, 1, 16, 2048), SMALL, 4.1),
    "v5e-16": ("Qwen3-4B", Setting("v5e:4x4", 1, 16, 1, 32, 2048), SMALL, 2.8),
    "v6e": ("Qwen3-4B", Setting("v6e:2x2", 1, 4, 1, 8, 2048), SMALL, 3.7),
    "v5p-64": ("Qwen2.5-7B", Setting("v5p:4x4x4", 1, 64, 1, 128, 2048), SMALL, 3.0),
    # Two repetitions, so that there is a loop over layers. The least counts attention in all.
    "linear": (
        "Qwen3.5-4B", Setting("v5p:2x2x2", 1, 8, 1, 16, 2048), Cut(layers=8, vocab=8192), 6.4,
    ),
    "copies": ("Qwen2.5-0.5B", Setting("v5e:2x2", 2, 2, 1, 16, 1024), SMALL, 1.2),
}  # fmt: skip


@pytest.mark.parametrize("case", BUDGETS)
def test_an_update_costs_what_it_must(case):
    model, setting, cut, memory = BUDGETS[case]
    # With XLA's attention, so that its products are counted.
    measured = update_costs(model, setting, cut, attention="xla")
    least = ideal(model, setting, cut)
    assert measured.flops < 1.05 * least.flops, measured.flops / least.flops
    assert measured.wire < 1.0 * least.wire, (measured.wire / least.wire, measured.largest)
    assert measured.peak < memory * GIB, measured.peak / GIB


def test_only_the_chosen_experts_are_computed_and_none_are_sent_but_their_parameters():
    """Experts are spread over tensor, and each is gathered over fsdp: 64 of 128 on a device."""
    setting = Setting("v5p:2x2x2", 1, 4, 2, 8, 1024)
    measured = update_costs("Qwen3-30B-A3B", setting, SMALL, attention="xla")
    experts = 64 * 3 * 2048 * 768 * 2  # bytes of a layer in bfloat16
    # Three quarters come from other devices, for two layers, forward and backward.
    assert measured.sent["all-gather"] < 1.06 * 4 * experts * 3 / 4
    assert measured.sent["all-reduce"] < 0.1 * measured.sent["all-gather"]
    # Without the kernels' products; gradients of all experts from all rows would be 2e13.
    assert measured.flops < 1e12
    assert measured.peak < 4.6 * GIB


def test_parameters_that_move_at_once_are_gathered_once():
    """The compiler makes the scattered sum of gradients a whole one, twice the least of it."""
    setting = Setting("v5e:2x2", 1, 4, 1, 64, 256)
    measured = update_costs("Qwen2.5-0.5B", setting, SMALL, transfers="once")
    least = ideal("Qwen2.5-0.5B", setting, SMALL, transfers="once")
    assert measured.wire < 1.51 * least.wire, (measured.wire / least.wire, measured.largest)
    assert measured.sent["all-gather"] < 0.501 * least.wire
    assert measured.peak < 1.2 * least.memory, measured.peak / least.memory


@functools.cache
def in_both_orders(attention):
    model, setting, cut, _ = BUDGETS["v5e"]
    return [
        update_costs(model, setting, cut, bare=bare, attention=attention) for bare in (True, False)
    ]


@pytest.mark.parametrize("attention", ["xla", None])
def test_either_order_of_the_devices_is_within_the_budget(attention):
    model, setting, cut, memory = BUDGETS["v5e"]
    least = ideal(model, setting, cut)
    for measured in in_both_orders(attention):
        assert measured.wire < 1.0 * least.wire
        assert measured.peak < memory * GIB
    listed, arranged = in_both_orders(attention)
    assert arranged.flops == listed.flops
    assert arranged.wire == pytest.approx(listed.wire, rel=0.1)


@pytest.mark.xfail(
    strict=True,
    reason="gradients are scattered in one order and go round in a ring in the other: 8 % more",
)
@pytest.mark.parametrize("attention", ["xla", None])
def test_the_order_of_the_devices_does_not_matter(attention):
    listed, arranged = in_both_orders(attention)
    assert arranged.wire == pytest.approx(listed.wire, rel=0.05)


@pytest.mark.parametrize("bare", [True, False])
@pytest.mark.parametrize(("cube", "fsdp"), [("v5p:2x4x4", 32), ("v5p:4x4x4", 64)])
def test_a_gather_over_a_cube_sends_each_share_once(cube, fsdp, bare):
    """And is not made a sum of shares that are padded with zeros, which sends them twice."""
    mesh = described_mesh(cube, 1, fsdp, 1, bare=bare)
    spread, replicated = PartitionSpec(None, "fsdp"), PartitionSpec()
    gather = functools.partial(gather_in_steps, axis="fsdp", dimension=1, steps=steps_of(fsdp))
    run = jax.shard_map(gather, mesh=mesh, in_specs=spread, out_specs=replicated, check_vma=False)
    kernel = jax.ShapeDtypeStruct((18944, 3584), jnp.bfloat16, sharding=NamedSharding(mesh, spread))
    measured = costs(jax.jit(run).lower(kernel).compile(), fsdp)
    assert set(measured.sent) == {"all-gather"}
    assert measured.wire == pytest.approx(2 * kernel.size * (fsdp - 1) / fsdp)


def test_a_long_row_holds_no_array_of_time_by_time():
    long = Setting("v5p:2x2x1", 1, 4, 1, 4, 16384)
    compiled = compiled_update("Qwen3-4B", long, SMALL, bare=True, attention=None)
    text = compiled.as_text()
    shapes = {tuple(extents) for _, extents in arrays(text)}
    assert any(16384 in extents for extents in shapes)
    assert not [extents for extents in shapes if extents.count(16384) > 1]
    measured, least = update_costs("Qwen3-4B", long, SMALL), ideal("Qwen3-4B", long, SMALL)
    assert measured.wire < 1.0 * least.wire, (measured.wire / least.wire, measured.largest)
    assert measured.peak < 6 * GIB, measured.peak / GIB


def test_topologies_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="topology"):
        described_mesh("v5e:3x5", 1, 15, 1, bare=True)
    with pytest.raises(ValueError, match="fsdp"):
        described_mesh("v5e:2x2", 1, 8, 1, bare=True)
