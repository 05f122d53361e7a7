"""What devices were given and are not known to have done."""

from __future__ import annotations

from typing import Any

import pytest

from fxpipe.ir import instruction as ins
from fxpipe.runtime.devices.launching import Trail
from fxpipe.runtime.failure import Launched


def given(trail: Trail, *instructions: ins.Instruction, stream: str = "compute") -> list[Launched]:
    found = [Launched(position, x, 0) for position, x in enumerate(instructions)]
    for each in found:
        trail.give(stream, each)
    return found


def test_what_is_behind_the_last_mark_that_was_reached_is_suspected() -> None:
    trail = Trail(2, "cuda:1")
    one, two = given(trail, ins.Forward(0, 0), ins.Forward(0, 1))
    trail.mark("compute", "a")
    three, four = given(trail, ins.Backward(0, 0), ins.Backward(0, 1))
    trail.mark("compute", "b")
    trail.look("compute", lambda mark: bool(mark == "a"))
    (left,) = trail.unfinished(lambda mark: False)
    assert (left.device, left.place, left.stream) == (2, "cuda:1", "compute")
    assert left.done == two != one
    assert left.since == (three, four)
    assert not trail.unfinished(lambda mark: True)


def test_a_mark_covers_what_came_before_it_alone() -> None:
    trail = Trail(0, "x")
    given(trail, ins.Forward(0, 0))
    trail.mark("compute", "a")
    (later,) = given(trail, ins.Forward(0, 1))
    (left,) = trail.unfinished(lambda mark: True)
    assert left.since == (later,)
    trail.mark("compute", "b")
    assert not trail.unfinished(lambda mark: True)


def test_streams_are_told_apart_and_marks_of_unknown_ones_are_nothing() -> None:
    trail = Trail(0, "x")
    trail.mark("in0", "nothing was given")
    given(trail, ins.Forward(0, 0))
    (copied,) = given(trail, ins.Forward(0, 1), stream="in0")
    trail.mark("compute", "a")
    trail.mark("in0", "b")
    (left,) = trail.unfinished(lambda mark: bool(mark == "a"))
    assert (left.stream, left.since) == ("in0", (copied,))


def test_a_device_that_has_failed_tells_nothing_more() -> None:
    def failed(mark: Any) -> bool:
        raise RuntimeError("an illegal memory access")

    trail = Trail(0, "x")
    own = given(trail, ins.Forward(0, 0))
    trail.mark("compute", "a")
    with pytest.raises(RuntimeError, match="illegal"):
        trail.look("compute", failed)
    (left,) = trail.unfinished(failed)
    assert left.since == tuple(own) and left.done is None
