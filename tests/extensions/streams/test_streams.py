"""Streams: every program gets them, copies overlap computations, memory goes early."""

from __future__ import annotations

import gc
import sys
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fxpipe.errors import InputError
from fxpipe.extensions.clipping.opcodes import add_clip
from fxpipe.extensions.streams.events import Streams
from fxpipe.ir import instruction as ins
from fxpipe.ir.launch import Event, Launch
from fxpipe.ir.program import Program
from fxpipe.ir.recipe import RECIPES, Recipe
from fxpipe.passes.lowering.communicate import communicate
from fxpipe.passes.lowering.free import free
from fxpipe.passes.lowering.lower import Lower
from fxpipe.schedules import gpipe, one_f_one_b
from tests.conftest import Golden
from tests.helpers.plans import chain, run, skipping
from tests.helpers.profiles import some
from tests.oracles.stream_times import Timed, timed
from tests.passes.lowering.test_lower import plans, schedules
from tests.text.test_program import LINES

LIBRARY = sorted(name for name, recipe in RECIPES.items() if isinstance(recipe, Recipe))


def plain(name: str, devices: int, microbatches: int, *, pause: bool = False) -> Program:
    schedule = RECIPES[name](devices, microbatches)
    plan = (skipping if schedule.stages > 2 else chain)(schedule.stages)
    return run(schedule, Lower(plan, pause=pause, updates=not pause), communicate, free)


@pytest.mark.parametrize("name", some(LIBRARY))
def test_every_schedule_of_the_library_gets_streams_that_cannot_race(name: str) -> None:
    for devices, microbatches in ((2, 4), (4, 4), (4, 9)):
        before = plain(name, devices, microbatches)
        for ahead in (0, 1, 2):
            program = run(before, Streams(ahead))
            assert Program.parse(str(program)) == program
            assert_same_work(before, program)
    assert Streams()(plain(name, 1, 3)).verify()


def assert_same_work(before: Program, after: Program) -> None:
    """The same instructions for each batch; those that compute and send in the same order."""
    for old, new in zip(before.lists, after.lists, strict=True):
        frees = [x.buffer[:5] for x in new if isinstance(x, ins.Free)]
        assert sorted(frees) == sorted(x.buffer[:5] for x in old if isinstance(x, ins.Free))
        moved = ins.Free, ins.Load, ins.Receive
        assert [x for x in new if not isinstance(x, moved)] == [
            x for x in old if not isinstance(x, moved)
        ]
        for kind in (ins.Load, ins.Receive):
            here, there = ([x for x in own if isinstance(x, kind)] for own in (new, old))
            assert set(here) == set(there)
            assert len(here) == len(there)


@given(st.data())
def test_any_schedule_over_any_edges_gets_streams_that_cannot_race(data: st.DataObject) -> None:
    plan, trains = data.draw(plans()), data.draw(st.booleans())
    schedule = data.draw(schedules(len(plan.stages), trains))
    before = run(schedule, Lower(plan, updates=trains), communicate, free)
    program = run(before, Streams(data.draw(st.integers(0, 3))))
    assert_same_work(before, program)


@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "interleaved-1f1b", "2bw"])
def test_norms_go_to_all_devices_on_streams_too(name: str) -> None:
    schedule = add_clip(RECIPES[name](3, 3))
    before = run(schedule, Lower(chain(schedule.stages)), communicate, free)
    assert_same_work(before, run(before, Streams()))


def test_a_paused_program_keeps_what_is_before_and_behind_its_pause() -> None:
    program = Streams()(plain("gpipe", 3, 3, pause=True)).verify()
    assert program.launches


def test_a_program_without_the_pass_has_no_launches() -> None:
    assert plain("1f1b", 2, 2).launches == ()


def test_a_device_with_streams_goes_by_itself_and_copies_beside_it() -> None:
    """Each way between two devices: on the receiver's stream of arrivals from that device."""
    program = Streams()(plain("1f1b", 3, 3))
    for own, launches in zip(program.lists, program.launches, strict=True):
        for x, launch in zip(own, launches, strict=True):
            if isinstance(x, ins.Receive):
                assert launch.stream == f"in{program.origin(x)}"
            else:
                assert launch.stream == ("in" if isinstance(x, ins.Load) else "compute")


def chained(name: str, devices: int, microbatches: int) -> Program:
    schedule = RECIPES[name](devices, microbatches)
    return run(schedule, Lower(chain(schedule.stages)), communicate, free)


FLUSHING = ["1f1b", "gpipe", "zb-h1", "interleaved-1f1b"]


@pytest.mark.parametrize("name", FLUSHING)
def test_copies_overlap_computations_in_both_directions(name: str) -> None:
    before = chained(name, 4, 16)
    beside = timed(Streams()(before), copy=0.4).makespan
    assert beside < timed(Streams(0)(before), copy=0.4).makespan


@pytest.mark.parametrize("name", FLUSHING)
def test_no_computation_waits_for_memory_while_copies_keep_up(name: str) -> None:
    """Only what is freed at the end of the step waits, when nothing else is to do."""
    program = Streams()(chained(name, 4, 8))
    behind = {
        x.buffer
        for own in program.lists
        for at, x in enumerate(own)
        if isinstance(x, ins.Free)
        and all(isinstance(y, ins.Move | ins.Barrier | ins.Update) for y in own[at:])
    }
    for x, late in timed(program, copy=0.3).stalls:
        assert not isinstance(x, ins.Free) or x.buffer in behind or late < 1e-9


@pytest.mark.parametrize("name", FLUSHING)
def test_what_was_sent_is_freed_early(name: str) -> None:
    """However many micro-batches there are, a device holds a few of the values that it sent."""

    def most(microbatches: int) -> int:
        peak = 0
        for own in Streams()(chained(name, 4, microbatches)).lists:
            sent = {x.buffer for x in own if isinstance(x, ins.Send)}
            held = 0
            for x in own:
                held += isinstance(x, ins.Send)
                held -= isinstance(x, ins.Free) and x.buffer in sent
                peak = max(peak, held)
        return peak

    assert most(32) == most(16) <= 4


def test_a_skip_goes_straight_from_its_producer_to_its_consumer() -> None:
    program = Streams()(plain("1f1b", 4, 4))
    sends = [
        (device, program.destination(x))
        for device, own in enumerate(program.lists)
        for x in own
        if isinstance(x, ins.Send) and x.buffer.kind == "skip"
    ]
    assert set(sends) == {(0, 3)}
    moves = [
        [x for x in own if isinstance(x, ins.Receive) and x.buffer.kind == "skip"]
        for own in program.lists
    ]
    assert {program.origin(x) for x in moves[3]} == {0}
    assert not any(moves[:3])


def launching(opcode: str) -> Program:
    """Two instructions with launches: a free, and one of this opcode."""
    launch = Launch("in0", (Event(0),), Event(1))
    first = Launch(record=Event(0))
    return Program(
        "mine",
        4,
        (0, 0, 0),
        plain("1f1b", 3, 2).edges,
        ((LINES["free"][0], LINES[opcode][0]),),
        ("lower", "communicate", "free", "streams"),
        ((first, launch),),
    )


@pytest.mark.parametrize("opcode", ins.OPCODES)
def test_every_consumer_takes_each_opcode_with_its_launch(opcode: str) -> None:
    _, text = LINES[opcode]
    program = launching(opcode)
    assert f"{' '.join(text.split())} stream=in0 wait=e0 record=e1" in " ".join(
        str(program).split()
    )
    assert Program.parse(str(program)) == program
    with pytest.raises(Exception, match=r"program 'mine'|version"):
        program.verify()


def test_streams_come_once_and_after_free() -> None:
    with pytest.raises(InputError, match="the passes done are: lower communicate"):
        Streams()(communicate(Lower(chain(2))(gpipe(2, 2))))
    program = Streams()(plain("gpipe", 2, 2))
    with pytest.raises(InputError, match="free streams"):
        Streams()(program)
    with pytest.raises(InputError, match="ahead is -1"):
        Streams(-1)(plain("gpipe", 2, 2))


def test_a_program_that_gets_stuck_is_refused() -> None:
    program = plain("1f1b", 2, 2)
    stuck = replace(program, lists=(program.lists[0][::-1], program.lists[1]))
    with pytest.raises(InputError, match="gets stuck"):
        Streams()(stuck)


def test_windows_free_in_the_window_in_which_a_value_arrives() -> None:
    program = Streams()(plain("2bw", 3, 3)).verify()
    late = [
        x
        for own in program.lists
        for x in own
        if isinstance(x, ins.Free) and x.batch < 0 and x.buffer.kind == "grad"
    ]
    assert late


def test_timing_knows_what_a_stall_is() -> None:
    """A copy that takes far longer than a forward holds its sender up at the free."""
    run_ = timed(Streams()(run(one_f_one_b(2, 8), Lower(chain(2)), communicate, free)), copy=5.0)
    assert isinstance(run_, Timed)
    assert any(isinstance(x, ins.Free) and late > 0 for x, late in run_.stalls)


def test_streams_and_events_read_as_in_their_golden_text(golden: Golden) -> None:
    program = free(communicate(Lower(chain(2))(one_f_one_b(2, 2))))
    golden("program_1f1b_streams_2x2.txt", str(Streams()(program)))


def calls_an_instruction(program: Program) -> float:
    """How many functions the pass calls for each instruction."""
    count = 0

    def counted(frame: Any, event: str, argument: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(counted)
    try:
        Streams()(program)
    finally:
        sys.setprofile(before)
    return count / sum(map(len, program.lists))


@pytest.mark.parametrize("name", ["1f1b", "interleaved-1f1b"])
def test_streams_take_as_long_for_an_instruction_of_many(name: str) -> None:
    few = calls_an_instruction(plain(name, 2, 8))
    assert calls_an_instruction(plain(name, 16, 8)) < 1.25 * few
    assert calls_an_instruction(plain(name, 2, 64)) < 1.25 * few


def test_streams_are_made_without_collecting_garbage() -> None:
    program, collections = plain("1f1b", 4, 64), []
    gc.callbacks.append(lambda phase, info: collections.append(phase))
    try:
        Streams()(program)
    finally:
        gc.callbacks.pop()
    assert not collections
