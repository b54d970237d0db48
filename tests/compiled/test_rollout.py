"""What the TPU compiler says a step of decoding costs: weights and cache, read about once.

Of whole models: layers are a loop, which the compiler treats otherwise where it runs only twice.
"""

import jax
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from tests.compiled.costs import arrays
from tests.compiled.described import described_mesh
from tests.compiled.marks import compiled_by
from tests.compiled.models import Cut, config_of
from tests.compiled.rollout import rollout
from tests.compiled.traffic import traffic
from twinkle_jax.model import extend, parameter_shapes, partition_rules, prefill
from twinkle_jax.sampler import sizes

pytestmark = [*compiled_by("tpu"), pytest.mark.usefixtures("as_users_compile")]
CAPACITY = 2048
CASES = {  # the model, the chip, rows
    "heads half as wide as a tile": ("Qwen2.5-0.5B", "v5e:2x2", 256, CAPACITY),
    "the same on v6e": ("Qwen2.5-0.5B", "v6e:2x2", 256, CAPACITY),
    "heads as wide as a tile": ("Qwen3-4B", "v5p:2x2x1", 64, CAPACITY),
}


@pytest.mark.parametrize("case", CASES)
def test_a_step_reads_weights_and_cache_once(case):
    measured = rollout(*CASES[case])
    assert measured.total < 1.25 * measured.least, (
        measured.total / measured.least,
        measured.largest(),
    )
    assert measured.moved > 0.95 * measured.least  # what is not seen would be cheap


@pytest.mark.parametrize(("filled", "most"), [(1024, 1.35), (2048, 1.27)])
def test_rows_of_different_lengths_are_read_once_too(filled, most):
    """Room for 8,192 tokens of a row; filled to an eighth, whole rows would cost 9.1."""
    measured = rollout("Qwen2.5-0.5B", "v5e:2x2", 256, 8192, filled=filled)
    assert measured.total < most * measured.least, (
        measured.total / measured.least,
        measured.largest(),
    )
    assert measured.moved > 0.95 * measured.least
    assert measured.cache < 1.2 * measured.filled
    assert measured.temporary < 0.3 * measured.cache, measured.temporary / measured.cache


@pytest.mark.parametrize("filled", [None, 1024])
def test_latent_attention_reads_its_narrow_vectors_once(filled):
    """For 16 heads at once; keys and values of each head would be 4.7 times as much."""
    measured = rollout(
        "Youtu-LLM-2B", "v5e:2x2", 64, 2048 if filled is None else 8192, filled=filled
    )
    assert measured.total < 1.3 * measured.least, (
        measured.total / measured.least,
        measured.largest(),
    )
    assert measured.moved > 0.95 * measured.least
    assert measured.cache < 1.3 * measured.filled


def test_the_prompt_of_a_group_is_held_and_read_once():
    """Half of a row's 2,048 tokens are the prompt of 8 rows."""
    options = {"filled": 2048, "samples": 8, "prompt": 1024}
    measured = rollout("Qwen2.5-0.5B", "v5e:2x2", 256, 8192, **options)
    alone = rollout("Qwen2.5-0.5B", "v5e:2x2", 256, 8192, **options, shared=False)
    assert measured.cache < 0.6 * alone.cache and measured.total < 0.66 * alone.total
    assert measured.total < 1.35 * measured.least, (
        measured.total / measured.least,
        measured.largest(),
    )
    assert measured.moved > 0.95 * measured.least
    assert measured.temporary < 0.2 * measured.cache, measured.temporary / measured.cache


def test_sliding_layers_read_and_hold_their_window_only():
    """22 of 26 layers see 512 tokens; with all tokens the cache is 6.5 GiB, not 1.86."""
    measured = rollout("gemma-3-1b", "v5e:2x2", 64, 8192, filled=4096)
    all_tokens = rollout("gemma-3-1b", "v5e:2x2", 64, 8192, filled=4096, windows=False)
    assert (measured.cache / 2**30, all_tokens.cache / 2**30) == pytest.approx((1.86, 6.5), 0.01)
    assert all_tokens.total > 1.9 * measured.total
    assert measured.total < 1.35 * measured.least, (
        measured.total / measured.least,
        measured.largest(),
    )
    assert measured.cache < 1.3 * measured.filled
    assert measured.temporary < 0.15 * measured.cache, measured.temporary / measured.cache


def test_experts_are_read_where_they_lie():
    """Not from a copy of each layer's, which would cost twice as much again."""
    measured = rollout("Qwen3-30B-A3B", "v5p:2x2x1", 64, CAPACITY)
    kernels, others = [], []
    for size, one in traffic(measured.program, measured.step):
        (kernels if one.opcode == "custom-call" else others).append(size)
    assert kernels  # the text counts the experts of all layers for each of them
    experts = 48 * 128 * 3 * 2048 * 768 * 2
    moved, least = sum(others) / sizes._STEPS_ON_MESH, measured.least - experts
    assert moved < 1.25 * least, (moved / least, measured.largest())


@pytest.mark.parametrize("rows", [8, 3], ids=["divided", "not divided"])
def test_prompts_go_through_experts_that_are_spread_over_devices(rows):
    """A kernel that were not told of the mesh would not compile: XLA does not split kernels."""
    config = config_of("Qwen3-30B-A3B", Cut(layers=2, vocab=8192))
    mesh = described_mesh("v5e:2x2", 1, 2, 2, bare=True)
    shapes = parameter_shapes(config, "bfloat16")
    whole = partition_rules(mesh)

    def on_mesh(path, leaf):
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        spec = [None if axis == "fsdp" else axis for axis in whole(name, leaf.shape)]
        where = NamedSharding(mesh, PartitionSpec(*spec))
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=where)

    def read(params, tokens, more):
        _, cache = prefill(params, config, tokens, max_length=512, mesh=mesh)
        return extend(params, config, more, cache, mesh=mesh)[0]

    params = jax.tree_util.tree_map_with_path(on_mesh, shapes)
    tokens, more = (
        jax.ShapeDtypeStruct((rows, time), "int32", sharding=NamedSharding(mesh, PartitionSpec()))
        for time in (256, 128)
    )
    compiled = jax.jit(read).lower(params, tokens, more).compile()
    assert compiled.as_text().count("tpu_custom_call") >= 4


@pytest.mark.parametrize("case", CASES)
def test_the_loop_holds_one_cache_and_copies_none(case):
    measured = rollout(*CASES[case])
    moved = [one for _, one in traffic(measured.program, measured.step)]
    kernels = [one for one in moved if "tpu_custom_call" in one.attributes]
    assert [CAPACITY in arrays(one.shape)[0][1] for one in kernels] == [True, True]
    copies = [one.shape for one in moved if one.opcode.startswith("copy")]
    shapes = [extents for shape in copies for _, extents in arrays(shape)]
    assert not [extents for extents in shapes if len(extents) > 3 and CAPACITY in extents]
    assert measured.temporary < 0.2 * measured.cache, measured.temporary / measured.cache
