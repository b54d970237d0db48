"""The reader of compiled programs, on programs whose costs are known beforehand."""

import functools
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from tests.compiled.arithmetic import CHIPS, ideal, least_seconds, sampling_memory
from tests.compiled.costs import costs, group_size, product_flops, size_of
from tests.compiled.models import MODELS, Cut, Setting, config_of
from tests.compiled.program import read_program, trips
from tests.compiled.table import main
from twinkle_jax.model import make_mesh


def test_products_in_a_loop_count_as_often_as_it_runs():
    def run(x, weights):
        return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, weights)[0]

    shapes = jax.ShapeDtypeStruct((32, 64), "float32"), jax.ShapeDtypeStruct((5, 64, 64), "float32")
    program_costs = costs(jax.jit(run).lower(*shapes).compile(), 1)
    assert program_costs.flops == 5 * 2 * 32 * 64 * 64
    assert program_costs.unknown_loops == 0
    assert program_costs.wire == 0
    assert program_costs.peak >= 4 * (32 * 64 + 5 * 64 * 64)


def test_a_loop_whose_trips_are_data_runs_as_often_as_is_said():
    def run(x, n):
        return jax.lax.fori_loop(0, n, lambda _, x: jnp.tanh(x @ x), x)

    shapes = jax.ShapeDtypeStruct((16, 16), "float32"), jax.ShapeDtypeStruct((), "int32")
    program_costs = costs(jax.jit(run).lower(*shapes).compile(), 1, unknown_trips=7)
    assert program_costs.flops == 7 * 2 * 16**3
    assert program_costs.unknown_loops == 1


COLLECTIVES = {
    # Of 4 devices in a group, each has an array of 1,024 bytes.
    "all-gather": (lambda x: jax.lax.all_gather(x, "fsdp", tiled=True), 3 * 1024),
    "all-reduce": (lambda x: jax.lax.psum(x, "fsdp"), 2 * 1024 * 3 / 4),
    "reduce-scatter": (lambda x: jax.lax.psum_scatter(x, "fsdp", tiled=True), 1024 * 3 / 4),
    "all-to-all": (lambda x: jax.lax.all_to_all(x, "fsdp", 0, 1, tiled=True), 1024 * 3 / 4),
    "collective-permute": (
        lambda x: jax.lax.ppermute(x, "fsdp", [(i, (i + 1) % 4) for i in range(4)]),
        1024,
    ),
}


@pytest.mark.parametrize("kind", COLLECTIVES)
def test_what_a_collective_sends(kind):
    """In a loop of three trips, among the four of eight devices that share a row of the mesh."""
    collective, sent = COLLECTIVES[kind]
    mesh = make_mesh(data=2, fsdp=4)
    spread = PartitionSpec(("data", "fsdp"))

    @functools.partial(jax.shard_map, mesh=mesh, in_specs=spread, out_specs=spread, check_vma=False)
    def run(x):
        def body(x, _):
            moved = jnp.sum(jnp.sin(collective(x)))
            return jnp.cos(x + moved), None

        return jax.lax.scan(body, x, length=3)[0]

    x = jax.ShapeDtypeStruct((64, 32), "float32", sharding=NamedSharding(mesh, spread))
    program_costs = costs(jax.jit(run).lower(x).compile(), 8)
    assert program_costs.sent == {kind: 3 * sent}
    assert program_costs.times == {kind: 3}
    assert program_costs.largest[0][1:3] == (kind, 3)


# What TPUs write: loops that start late and step by two, and sums whose slice a device keeps.
TEXT = """
HloModule by_hand

%fused_test (p0: s32[], p1: s32[]) -> pred[] {
  %p0 = s32[] parameter(0)
  %p1 = s32[] parameter(1)
  ROOT %less = pred[] compare(%p0, %p1), direction=LT
}

%condition (state.1: (s32[], f32[8,8])) -> pred[] {
  %state.1 = (s32[], f32[8,8]{1,0:T(8,128)}) parameter(0)
  %counter.1 = s32[] get-tuple-element(%state.1), index=0
  %bound = s32[]{:T(128)} constant(9)
  ROOT %test = pred[] fusion(%counter.1, %bound), kind=kLoop, calls=%fused_test
}

%sum_and_slice (p2: f32[8,8]) -> f32[2,8] {
  %p2 = f32[8,8]{1,0:T(8,128)} parameter(0)
  %all = f32[8,8]{1,0} all-reduce(%p2), channel_id=1, replica_groups=[2,4]<=[8], to_apply=%add
  %start = s32[] constant(0)
  ROOT %own = f32[2,8]{1,0} dynamic-slice(%all, %start, %start), dynamic_slice_sizes={2,8}
}

%body (state.2: (s32[], f32[8,8])) -> (s32[], f32[8,8]) {
  %state.2 = (s32[], f32[8,8]{1,0:T(8,128)}) parameter(0)
  %counter.2 = s32[] get-tuple-element(%state.2), index=0
  %two = s32[] constant(2)
  %next = s32[] add(%counter.2, %two)
  %x = f32[8,8]{1,0} get-tuple-element(%state.2), index=1
  %scattered = f32[2,8]{1,0} fusion(%x), kind=kCustom, calls=%sum_and_slice
  ROOT %out = (s32[], f32[8,8]{1,0}) tuple(%next, %x)
}

ENTRY %main (a: f32[8,8]) -> (s32[], f32[8,8]) {
  %a = f32[8,8]{1,0} parameter(0)
  %one = s32[] constant(1)
  %init = (s32[], f32[8,8]{1,0}) tuple(%one, %a)
  ROOT %loop = (s32[], f32[8,8]{1,0}) while(%init), condition=%condition, body=%body
}
"""


class Compiled:
    """A program that is only text."""

    def as_text(self):
        return TEXT

    def memory_analysis(self):
        return jax.jit(jnp.sin).lower(1.0).compile().memory_analysis()


def test_loops_and_sums_as_tpus_write_them():
    program = read_program(TEXT)
    loop = program.computations["main"].instructions["loop"]
    assert trips(program, "main", loop) == 4  # 1, 3, 5, 7
    program_costs = costs(Compiled(), 8)
    assert program_costs.sent == {"reduce-scatter": 4 * 8 * 8 * 4 * 3 / 4}


@pytest.mark.parametrize(
    ("kernel", "window", "places"),
    [
        (1, "", 8),
        (3, ", window={size=3 pad=1_1}", 3 * 8 - 2),  # at both ends, one place lies in padding
        (2, ", window={size=2 pad=0_1 rhs_dilate=2 lhs_dilate=1}", 8 + 6),
    ],
)
def test_places_in_padding_are_free(kernel, window, places):
    text = f"""
ENTRY %main (a: f32[2,8,4], b: f32[{kernel},4,6]) -> f32[2,8,6] {{
  %a = f32[2,8,4]{{2,1,0}} parameter(0)
  %b = f32[{kernel},4,6]{{2,1,0}} parameter(1)
  ROOT %c = f32[2,8,6]{{2,1,0}} convolution(%a, %b){window}, dim_labels=b0f_0io->b0f
}}
"""
    program = read_program(text)
    one = program.computations["main"].instructions["c"]
    assert product_flops(program, "main", one) == 2 * 2 * 6 * 4 * places


def test_groups_in_every_form():
    assert group_size("replica_groups={{0,1,2},{3,4,5}}", 6) == 3
    assert group_size("replica_groups=[2,4]<=[8]", 8) == 4
    assert group_size("replica_groups=mesh['data'=2,'fsdp'=4] {'fsdp'}", 8) == 4
    assert group_size("replica_groups={}, x", 8) == 8
    with pytest.raises(ValueError, match="replica_groups"):
        group_size("replica_groups=?", 8)


def test_bytes_of_shapes():
    assert size_of("(bf16[2,3]{1,0:T(8,128)(2,1)}, u32[], /*index=2*/pred[7])") == 12 + 4 + 7
    assert size_of("f8e4m3fn[10]") == 10


def test_the_least_by_hand():
    setting = Setting("v5p:2x2x2", 2, 4, 1, 16, 2048)
    least = ideal("Qwen2.5-7B", setting)
    assert least.parameters == 7_615_616_512
    # five numbers a parameter; what 4,096 tokens leave between 28 layers; the head and its gradient
    held = 4096 * 3584 * 28 * 2 + 2 * 2 * 152064 * 3584
    assert least.memory == 20 * least.parameters / 4 + held
    # 8 bytes three quarters of the way around, then a quarter there and back among two copies
    assert least.wire == pytest.approx(least.parameters * (8 * 3 / 4 + 2 * 4 / 4 / 2))
    tokens, inside = 16 * 2048 / 8, 7_615_616_512 - 152064 * 3584
    assert least.flops == tokens * (8 * inside + 16 * 28 * 3584 * 2048)
    assert least_seconds(CHIPS["v5e"], 197e12, 100e9) == (1.0, 0.5)
    # four numbers of 4 bytes on 8 devices, and 2 bytes of each parameter on 4 copies split in two
    cut = Setting("v5e:2x4", 1, 4, 2, 16, 2048)
    assert sampling_memory("Qwen2.5-7B", cut) == 16 * least.parameters / 8 + least.parameters


def test_the_page_shows_what_the_command_prints(capsys):
    main(["arithmetic"])
    printed = capsys.readouterr().out
    page = pathlib.Path(__file__).parents[2] / "docs" / "scaling.md"
    tables = printed.split("\n\n")
    assert len(tables) == 2 and all(len(table.splitlines()) > 10 for table in tables)
    assert [table for table in tables if table.rstrip() not in page.read_text()] == []


@pytest.mark.slow
def test_the_command_needs_no_pytest():
    block = "import sys; sys.modules['pytest'] = None; import tests.compiled.table"
    root = pathlib.Path(__file__).parents[2]
    subprocess.run([sys.executable, "-c", block], check=True, cwd=root, timeout=120)


def test_what_the_command_is_not_told():
    for arguments in (
        [],
        ["compiled", "Qwen2.5-7B"],
        ["compiled", "Qwen2.5-7B", "v5e:2x2", "1,4", "8", "9"],
        ["compiled", "a", "v5e:2x2", "1,4,1", "8", "9"],
        ["decoding", "Qwen2.5-7B", "v5e:2x2", "8", "many"],
        ["decoding", "a", "v5e:2x2", "8", "9"],
        ["decoding", "Qwen2.5-7B", "v5e:2x2", "8", "9", "unstacked"],
    ):
        with pytest.raises(SystemExit, match="arithmetic"):
            main(arguments)


def test_a_cut_model_keeps_its_widths():
    for model in MODELS:
        full, cut = config_of(model), config_of(model, Cut(layers=2, vocab=512))
        assert cut.intermediate_size == full.intermediate_size
        assert (cut.repeats, cut.vocab_size) == (2, 512)
