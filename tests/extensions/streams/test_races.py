"""Streams and events order every two accesses that conflict, however long each takes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fxpipe.errors import VerificationError
from fxpipe.extensions.streams.events import Streams
from fxpipe.ir.launch import Event, Launch
from fxpipe.ir.program import Program
from fxpipe.ir.recipe import RECIPES
from fxpipe.passes.lowering.communicate import communicate
from fxpipe.passes.lowering.free import free
from fxpipe.passes.lowering.lower import Lower
from fxpipe.schedules import one_f_one_b
from tests.helpers.mutants import launch_mutants
from tests.helpers.plans import chain, run, skipping
from tests.helpers.profiles import deep, some
from tests.oracles.stream_ordering import Ordering

SIZES = [(2, 2), (3, 4), *deep((4, 9))]


def launched(name: str, devices: int, microbatches: int, ahead: int = 1) -> Program:
    schedule = RECIPES[name](devices, microbatches)
    plan = (skipping if schedule.stages > 2 else chain)(schedule.stages)
    return Streams(ahead)(run(schedule, Lower(plan), communicate, free)).verify()


def unordered(program: Program) -> bool:
    """Whether some pair of accesses conflicts and may come in any order, in any path."""
    ordering = Ordering(program, program.depth + 3 if program.depth else 1)
    return not ordering.runs or any(True for _ in ordering.races())


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("name", some(sorted(RECIPES)))
def test_every_pair_that_conflicts_is_ordered(name: str, size: tuple[int, int]) -> None:
    for ahead in (0, 1, 2):
        assert not unordered(launched(name, *size, ahead))


def test_most_waits_are_needed() -> None:
    edits = [
        mutant for edit, mutant in launch_mutants(launched("1f1b", 3, 4)) if edit == "drop a wait"
    ]
    assert sum(map(unordered, edits)) > 0.8 * len(edits)


def with_launch(program: Program, device: int, at: int, launch: Launch) -> Program:
    launches = [list(own) for own in program.launches]
    launches[device][at] = launch
    return replace(program, launches=tuple(map(tuple, launches)))


def test_launches_for_other_lists_are_refused() -> None:
    program = launched("1f1b", 2, 2)
    with pytest.raises(VerificationError, match="launches for"):
        replace(program, launches=program.launches[:1]).verify()
    with pytest.raises(VerificationError, match="streams and no launches"):
        replace(program, launches=()).verify()


def test_devices_that_launch_nothing_before_each_other_are_stuck() -> None:
    """Each waits for an event that the other records only behind its own wait."""
    program = launched("1f1b", 2, 2)
    own = [len(x) - 1 for x in program.lists]
    program = with_launch(program, 0, 0, replace(program.launches[0][0], waits=(Event(901),)))
    program = with_launch(program, 1, own[1], Launch(record=Event(901)))
    with pytest.raises(VerificationError, match="deadlock"):
        program.verify()


def test_a_program_without_streams_is_not_asked() -> None:
    program = free(communicate(Lower(chain(3))(one_f_one_b(3, 3))))
    assert not program.launches
    assert program.verify() is program
