"""One host thread for all devices: an order in which no launch waits for a later one."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fxpipe.dispatch import dispatch_order
from fxpipe.errors import InputError
from fxpipe.passes.add_clip import add_clip
from fxpipe.passes.communicate import communicate
from fxpipe.passes.free import free
from fxpipe.passes.lower import Lower
from fxpipe.passes.runner import run
from fxpipe.passes.streams import Streams
from fxpipe.program import Barrier, Forward, Pause, Pop, Program, Receive, Send, Stash
from fxpipe.recipe import RECIPES
from tests.plans import chain
from tests.test_lower import plans, schedules
from tests.test_streams import LIBRARY, plain


def assert_never_waits(program: Program, order: tuple[int, ...]) -> None:
    """Replay the order over two windows, with what a host finds when it launches."""
    recorded: set[tuple[int, int]] = set()
    sent: set[object] = set()
    sends = {x.buffer for own in program.lists for x in own if isinstance(x, Send | Stash)}
    for step in range(2):
        at = [0] * program.devices
        meeting: list[int] = []
        for device in order:
            x = program.lists[device][at[device]]
            launch = program.launches[device][at[device]]
            for event in launch.waits:
                if step + event.batch >= 0:
                    assert (event.number, step + event.batch) in recorded
            if isinstance(x, Receive | Pop) and (step or x.buffer in sends):
                assert x.buffer._replace(batch=x.buffer.batch + step) in sent
            if isinstance(x, Send | Stash):
                sent.add(x.buffer._replace(batch=x.buffer.batch + step))
            if isinstance(x, Barrier | Pause):
                meeting.append(device)
                if len(meeting) == program.devices:
                    assert sorted(meeting) == list(range(program.devices))
                    meeting = []
            else:
                assert not meeting
            if launch.record is not None:
                recorded.add((launch.record.number, step + launch.record.batch))
            at[device] += 1
        assert at == [len(own) for own in program.lists]
        if not program.depth:
            break


@pytest.mark.parametrize("name", LIBRARY)
def test_a_thread_never_waits_for_itself(name: str) -> None:
    for devices, microbatches in ((1, 3), (2, 4), (4, 9)):
        program = Streams()(plain(name, devices, microbatches))
        assert_never_waits(program, dispatch_order(program))


@given(st.data())
def test_any_schedule_over_any_edges_has_an_order(data: st.DataObject) -> None:
    plan, trains = data.draw(plans()), data.draw(st.booleans())
    schedule = data.draw(schedules(len(plan.stages), trains))
    before = run(schedule, Lower(plan, updates=trains), communicate, free)
    program = run(before, Streams(data.draw(st.integers(0, 3))))
    assert_never_waits(program, dispatch_order(program))


def test_barriers_and_pauses_are_launched_on_all_devices_together() -> None:
    paused = Streams()(plain("gpipe", 3, 3, pause=True))
    assert any(isinstance(x, Pause) for own in paused.lists for x in own)
    assert_never_waits(paused, dispatch_order(paused))
    clips = run(add_clip(RECIPES["1f1b"](3, 3)), Lower(chain(3)), communicate, free)
    clipped = run(clips, Streams())
    assert_never_waits(clipped, dispatch_order(clipped))


def test_a_later_device_has_work_before_an_earlier_one_has_all_of_its_own() -> None:
    program = Streams()(plain("gpipe", 4, 8))
    order, at = dispatch_order(program), [0] * 4
    forwards: list[tuple[int, int]] = []
    for device in order:
        x = program.lists[device][at[device]]
        at[device] += 1
        if isinstance(x, Forward):
            forwards.append((device, x.microbatch))
    # wave by wave, as on devices that work at the same time
    assert all(i + device <= j + other + 1 for (device, i), (other, j) in ahead(forwards))


def ahead(
    forwards: list[tuple[int, int]],
) -> list[tuple[tuple[int, int], tuple[int, int]]]:
    """Each with what comes behind it."""
    return [(one, two) for k, one in enumerate(forwards) for two in forwards[k + 1 :]]


def test_a_program_without_launches_or_that_gets_stuck_is_refused() -> None:
    program = plain("1f1b", 2, 2)
    with pytest.raises(InputError, match="has no launches to order; run it through streams first"):
        dispatch_order(program)
    good = Streams()(program)
    position = next(k for k, x in enumerate(good.lists[0]) if isinstance(x, Send))
    late = tuple(good.lists[0][:position] + good.lists[0][position + 1 :])
    lists = ((*late, good.lists[0][position]), *good.lists[1:])
    with pytest.raises(InputError, match=r"gets stuck; Program.verify\(\) tells where"):
        dispatch_order(replace(good, lists=lists))
