"""Unrolled windows against what a drawing of prologue, steps and flush says; streams removed."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fxpipe.errors import InputError
from fxpipe.extensions.own_tasks.opcodes import Run
from fxpipe.extensions.simulator.unroll import absolute, blocking, unroll
from fxpipe.extensions.streams.events import Streams
from fxpipe.ir import instruction as ins
from fxpipe.ir.schedule import Schedule
from fxpipe.passes.lowering.communicate import communicate
from fxpipe.passes.lowering.free import free
from fxpipe.passes.lowering.lower import Lower
from fxpipe.schedules import one_f_one_b
from fxpipe.text.program import print_instruction
from tests.extensions.streams.test_streams import launching, plain
from tests.helpers.plans import chain, run
from tests.passes.lowering.test_lower import plans, schedules

TEXT = """\
schedule late stages=2 microbatches=1 delay=1
place 0 | 1
0: F0 B0' U'
1: F0 B0 U
"""


@pytest.mark.smoke
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
    assert absolute(Run("N", 0, version=-1), 2) == Run("N", 0, version=1, batch=2)


def test_a_run_without_a_step_is_refused() -> None:
    with pytest.raises(InputError, match="steps is 0"):
        unroll(Lower(chain(2))(Schedule.parse(TEXT)), 0)


@pytest.mark.smoke
def test_blocking_undoes_streams_but_for_late_frees() -> None:
    before = plain("zb-h1", 3, 5)
    after = blocking(Streams()(before)).verify()
    assert after.passes == before.passes
    assert not after.launches
    for old, new in zip(before.lists, after.lists, strict=True):
        computing = [x for x in old if not isinstance(x, ins.Move)]
        assert [x for x in new if not isinstance(x, ins.Move)] == computing
    assert blocking(before) is before


@pytest.mark.smoke
def test_unrolled_windows_wait_for_events_of_their_own_step() -> None:
    window = Streams()(plain("2bw", 2, 3))
    steps = 3
    whole = unroll(window, steps)
    recorded = [x.record for own in whole.launches for x in own if x.record is not None]
    assert len(recorded) == len(set(recorded))
    assert {event.batch for event in recorded} == set(range(steps + window.depth))
    for own in whole.launches:
        assert all(event in recorded for launch in own for event in launch.waits)
    assert [len(own) for own in whole.launches] == [len(own) for own in whole.lists]
    flush = Streams()(plain("1f1b", 2, 3))
    assert unroll(flush, 1) == flush


@given(st.data())
def test_any_program_without_its_streams_is_right(data: st.DataObject) -> None:
    plan, trains = data.draw(plans()), data.draw(st.booleans())
    schedule = data.draw(schedules(len(plan.stages), trains))
    before = run(schedule, Lower(plan, updates=trains), communicate, free)
    assert blocking(Streams(data.draw(st.integers(0, 3)))(before)).verify()


@pytest.mark.parametrize("opcode", ins.OPCODES)
def test_every_opcode_is_taken_with_its_launch(opcode: str) -> None:
    program = launching(opcode)
    assert len(unroll(program, 1).launches) == 1
    assert blocking(program).launches == ()
