"""The reader of what programs move, on lines as TPUs write them, whose bytes are known."""

import pytest

from tests.compiled.program import read_program
from tests.compiled.traffic import loop_of_steps, lying, traffic


@pytest.mark.parametrize(
    ("shape", "size"),
    [
        ("f32[8,128]{1,0:T(8,128)}", 8 * 128 * 4),
        ("bf16[3,2048,64]{2,1,0:T(8,128)(2,1)}", 3 * 2048 * 128 * 2),  # padded to 128 lanes
        ("bf16[3,2048,64]{1,2,0:T(8,128)(2,1)}", 3 * 2048 * 64 * 2),  # the longer axis along them
        ("bf16[5,2,64]{2,1,0:T(2,128)(2,1)}", 5 * 2 * 128 * 2),
        ("(f32[10]{0:T(256)}, pred[], u32[]{:S(2)})", 4 * 256 + 1),
        ("f32[8,128]{1,0:T(8,128)S(1)}", 0),  # in the chip's own memory
        ("f32[10]{0}", 40),
    ],
)
def test_arrays_take_whole_tiles(shape, size):
    assert lying(shape) == size


TEXT = """
HloModule by_hand

%cast (c0: f32[16,1024]) -> f32[16,1024] {
  %c0 = f32[16,1024]{1,0:T(8,128)} parameter(0)
  ROOT %c1 = f32[16,1024]{1,0:T(8,128)} bitcast(%c0)
}

%pick (s0: f32[4,16,1024], s1: s32[]) -> f32[1,16,1024] {
  %s0 = f32[4,16,1024]{2,1,0:T(8,128)} parameter(0)
  %s1 = s32[] parameter(1)
  %s2 = s32[] constant(0)
  ROOT %s3 = f32[1,16,1024]{2,1,0:T(8,128)} dynamic-slice(%s0, %s1, %s2, %s2)
}

%sum_of_one (f0: f32[4,16,1024], f1: s32[], f2: f32[16,1024]) -> f32[16,1024] {
  %f0 = f32[4,16,1024]{2,1,0:T(8,128)} parameter(0)
  %f1 = s32[] parameter(1)
  %f2 = f32[16,1024]{1,0:T(8,128)} parameter(2)
  %f3 = f32[1,16,1024]{2,1,0:T(8,128)} fusion(%f0, %f1), kind=kLoop, calls=%pick
  %f4 = f32[16,1024]{1,0:T(8,128)} fusion(%f2), kind=kLoop, calls=%cast
  %f5 = f32[16,1024]{1,0:T(8,128)} bitcast(%f3)
  ROOT %f6 = f32[16,1024]{1,0:T(8,128)} add(%f5, %f4)
}

%write (w0: f32[4,16,1024], w1: f32[1,8,128], w2: s32[]) -> f32[4,16,1024] {
  %w0 = f32[4,16,1024]{2,1,0:T(8,128)} parameter(0)
  %w1 = f32[1,8,128]{2,1,0:T(8,128)} parameter(1)
  %w2 = s32[] parameter(2)
  ROOT %w3 = f32[4,16,1024]{2,1,0:T(8,128)} dynamic-update-slice(%w0, %w1, %w2, %w2, %w2)
}

%rarely (r0: f32[16,1024]) -> f32[16,1024] {
  %r0 = f32[16,1024]{1,0:T(8,128)} parameter(0)
  ROOT %r1 = f32[16,1024]{1,0:T(8,128)} copy(%r0)
}

%mostly (m0: f32[16,1024]) -> f32[16,1024] {
  ROOT %m0 = f32[16,1024]{1,0:T(8,128)} parameter(0)
}

%step (p0: (f32[4,16,1024], s32[])) -> (f32[4,16,1024], s32[]) {
  %p0 = (f32[4,16,1024]{2,1,0:T(8,128)}, s32[]{:S(6)}) parameter(0)
  %stack = f32[4,16,1024]{2,1,0:T(8,128)} get-tuple-element(%p0), index=0
  %at = s32[]{:S(6)} get-tuple-element(%p0), index=1
  %one = f32[16,1024]{1,0:T(8,128)} constant(0)
  %part = f32[1,8,128]{2,1,0:T(8,128)} constant(0)
  %LINE
  ROOT %p9 = (f32[4,16,1024]{2,1,0:T(8,128)}, s32[]{:S(6)}) tuple(%stack, %at)
}

%on (g0: (f32[4,16,1024], s32[])) -> pred[] {
  %g0 = (f32[4,16,1024]{2,1,0:T(8,128)}, s32[]{:S(6)}) parameter(0)
  ROOT %g1 = pred[] custom-call(%g0)
}

ENTRY %main (e0: f32[4,16,1024], e1: s32[]) -> (f32[4,16,1024], s32[]) {
  %e0 = f32[4,16,1024]{2,1,0:T(8,128)} parameter(0)
  %e1 = s32[] parameter(1)
  %e2 = (f32[4,16,1024]{2,1,0:T(8,128)}, s32[]{:S(6)}) tuple(%e0, %e1)
  ROOT %e3 = (f32[4,16,1024]{2,1,0:T(8,128)}, s32[]{:S(6)}) while(%e2), condition=%on, body=%step
}
"""
PART, SLICE, STACK = 8 * 128 * 4, 16 * 1024 * 4, 4 * 16 * 1024 * 4
F32 = "f32[16,1024]{1,0:T(8,128)}"
WHOLE = "f32[4,16,1024]{2,1,0:T(8,128)}"
LINES = {  # what stands in the step, and what it moves
    "all of both": (f"%x = {F32} add(%one, %one)", 3 * SLICE),
    "result on the chip": (f"%x = {F32[:-1]}S(1)}} negate(%one)", SLICE),
    "one of four, and all": (
        f"%x = {F32} fusion(%stack, %at, %one), kind=kLoop, calls=%sum_of_one",
        3 * SLICE,
    ),
    "in its place": (
        f"%x = {WHOLE} fusion(%stack, %part, %at), kind=kLoop, calls=%write",
        2 * PART,
    ),
    "not fused": (f"%x = {WHOLE} dynamic-update-slice(%stack, %part, %at, %at, %at)", 2 * PART),
    "a slice": (
        "%x = f32[1,16,1024]{2,1,0:T(8,128)} slice(%stack), slice={[0:1], [0:16], [0:1024]}",
        2 * SLICE,
    ),
    "to the chip, meanwhile": (
        f"%x = ({F32}, {F32[:-1]}S(1)}}, u32[]{{:S(2)}}) copy-start(%one)",
        SLICE,
    ),
    "a kernel in its place": (
        f"%x = {WHOLE} custom-call(%part, %stack), output_to_operand_aliasing={{{{}}: (1, {{}})}}",
        PART,
    ),
    "nothing": (f"%x = {F32} bitcast(%one)", 0),
    "the branch for true": (
        f"%x = {F32} conditional(%at, %one, %one), branch_computations={{%mostly, %rarely}}",
        2 * SLICE,
    ),
}


def moved(line, true_share=1):
    program = read_program(TEXT.replace("%LINE", line))
    return sum(size for size, _ in traffic(program, loop_of_steps(program), 1, true_share))


@pytest.mark.parametrize("case", LINES)
def test_what_an_instruction_moves(case):
    line, size = LINES[case]
    assert moved(line) == size


def test_a_conditional_counts_its_branches_by_their_share():
    line = LINES["the branch for true"][0]
    only_false = moved(line, true_share=0)
    assert only_false != moved(line)
    assert moved(line, true_share=0.75) == 0.75 * moved(line) + 0.25 * only_false


def test_loops_count_as_often_as_they_run():
    known = '{"known_trip_count":{"n":"5"}}'
    line = f"%x = (s32[]) while(%p0), condition=%?, body=%layer, backend_config={known}"
    layer = f"""
%layer (l0: (s32[])) -> (s32[]) {{
  %l0 = (s32[]{{:S(6)}}) parameter(0)
  %l1 = {F32} constant(0)
  %l2 = {F32} negate(%l1)
  ROOT %l3 = (s32[]{{:S(6)}}) tuple(%l0)
}}
"""
    program = read_program(layer + TEXT.replace("%LINE", line))
    assert sum(size for size, _ in traffic(program, "step")) == 5 * 2 * SLICE


def test_a_program_without_such_a_loop_is_refused():
    program = read_program(TEXT.replace("while(%e2)", "copy(%e2)"))
    with pytest.raises(ValueError, match="program"):
        loop_of_steps(program)
