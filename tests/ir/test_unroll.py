"""Unrolled windows against what a drawing of prologue, steps and flush says."""

from __future__ import annotations

import pytest

from fxpipe.errors import InputError
from fxpipe.ir import instruction as ins
from fxpipe.ir.schedule import Schedule
from fxpipe.ir.unroll import absolute, unroll, unroll_schedule
from fxpipe.passes.lowering.communicate import communicate
from fxpipe.passes.lowering.free import free
from fxpipe.passes.lowering.lower import Lower
from fxpipe.schedules import one_f_one_b
from fxpipe.text.program import print_instruction
from tests.helpers.plans import chain

TEXT = """\
schedule late stages=2 microbatches=1 delay=1
place 0 | 1
0: F0 B0' U'
1: F0 B0 U
"""


def test_prologue_steps_and_flush_stand_one_after_another() -> None:
    rows = unroll_schedule(Schedule.parse(TEXT), 3).rows
    assert [" ".join(map(str, row)) for row in rows] == [
        "F0@0 F0+@0 B0@0 U@0 F0++@0 B0+@0 U+@0 B0++@0 U++@0",
        "F0@1 B0@1 U@1 F0+@1 B0+@1 U+@1 F0++@1 B0++@1 U++@1",
    ]


def test_a_program_is_unrolled_with_batches_and_versions_from_the_first_step() -> None:
    program = Lower(chain(2))(Schedule.parse(TEXT))
    first, second = unroll(program, 3).lists
    assert list(map(print_instruction, first)) == [
        "forward s0[0] v0 keep",
        "forward s0[0+] v0 keep",
        "backward s0[0] v0",
        "update s0 v0 -> v1",
        "forward s0[0++] v1 keep",
        "backward s0[0+] v0",
        "update s0+ v1 -> v2",
        "backward s0[0++] v1",
        "update s0++ v2 -> v3",
    ]
    assert list(map(print_instruction, second))[-3:] == [
        "forward s1[0++] v1 keep",
        "backward s1[0++] v1",
        "update s1++ v2 -> v3",
    ]


def test_every_batch_runs_all_of_its_instructions_once() -> None:
    program = free(communicate(Lower(chain(2))(Schedule.parse(TEXT))))
    for steps in range(1, 5):
        for own, window in zip(unroll(program, steps).lists, program.lists, strict=True):
            assert len(own) == steps * len(window)
            assert {x.batch for x in own} == set(range(steps))
            for batch in range(steps):
                names = sorted(type(x).__name__ for x in own if x.batch == batch)
                assert names == sorted(type(x).__name__ for x in window)


def test_a_step_with_a_flush_unrolls_to_itself_and_repeats_with_its_barriers() -> None:
    program = free(communicate(Lower(chain(2))(one_f_one_b(2, 3))))
    assert unroll(program, 1) == program
    twice = unroll(program, 2).lists[0]
    assert twice[: len(program.lists[0])] == program.lists[0]
    assert sum(isinstance(x, ins.Barrier) for x in twice) == 2
    assert [x for x in twice if isinstance(x, ins.Update)] == [
        ins.Update(0, 0, 1),
        ins.Update(0, 1, 2, 1),
    ]


def test_no_version_is_older_than_the_first() -> None:
    assert absolute(ins.Forward(0, 2, -3, batch=-1), 2) == ins.Forward(0, 2, 0, batch=1)
    assert absolute(ins.Run("N", 0, version=-1), 2) == ins.Run("N", 0, version=1, batch=2)


def test_a_run_without_a_step_is_refused() -> None:
    with pytest.raises(InputError, match="steps is 0"):
        unroll(Lower(chain(2))(Schedule.parse(TEXT)), 0)
