"""The check for races against every path and every pair: it tells the same of each mutant."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from fxpipe.errors import VerificationError
from fxpipe.ir.instruction import Forward, Receive
from fxpipe.ir.launch import Event, Launch
from fxpipe.ir.program import Program
from fxpipe.ir.recipe import RECIPES
from fxpipe.passes.lowering.communicate import communicate
from fxpipe.passes.lowering.free import free
from fxpipe.passes.lowering.lower import Lower
from fxpipe.passes.lowering.streams import Streams
from fxpipe.schedules import one_f_one_b
from tests.helpers.mutants import launch_mutants
from tests.helpers.plans import chain, run, skipping
from tests.helpers.profiles import deep
from tests.oracles.stream_ordering import Ordering

NAMES = ["1f1b", "zb-h1", "2bw", *deep("gpipe", "interleaved-1f1b", "pipedream")]
SIZES = [(2, 2), *deep((3, 2), (3, 4))]


def launched(name: str, devices: int, microbatches: int) -> Program:
    schedule = RECIPES[name](devices, microbatches)
    plan = (skipping if schedule.stages > 2 else chain)(schedule.stages)
    return Streams()(run(schedule, Lower(plan), communicate, free)).verify()


def refused(program: Program) -> bool:
    try:
        program.verify()
    except VerificationError:
        return True
    return False


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_a_mutant_is_refused_where_a_pair_is_not_ordered_and_only_there(
    name: str, size: tuple[int, int]
) -> None:
    """What is accepted is shown redundant: the remaining waits order every pair that conflicts."""
    program = launched(name, *size)
    steps = program.depth + 3 if program.depth else 1
    assert not list(Ordering(program, steps).races())
    caught: Counter[str] = Counter()
    for edit, mutant in launch_mutants(program):
        ordering = Ordering(mutant, steps)
        wrong = (
            not ordering.runs
            or any(True for _ in ordering.races())
            or edit == "drop a record"  # who waits for it would wait for ever
        )
        assert refused(mutant) == wrong, f"{edit}: refused {not wrong}\n{mutant}"
        caught[edit] += wrong
    assert all(caught[edit] for edit in ("drop a wait", "move a wait", "drop a record"))
    assert caught["move a record"]
    assert caught["another stream"]


def test_both_instructions_and_the_wait_that_is_missing_are_named() -> None:
    program = launched("1f1b", 2, 2)
    at = next(k for k, x in enumerate(program.lists[1]) if isinstance(x, Forward))
    launches = [list(own) for own in program.launches]
    launches[1][at] = replace(launches[1][at], waits=())
    broken = replace(program, launches=tuple(map(tuple, launches)))
    with pytest.raises(VerificationError) as caught:
        broken.verify()
    fault = caught.value.faults[0]
    record = program.launches[1][at - 2].record
    assert isinstance(program.lists[1][at - 2], Receive)
    assert (fault.device, fault.position, fault.subject) == (1, at, "forward s1[0] v0 keep")
    assert fault.what == (
        "on stream compute it reads what recv act:y0:0->1[0] writes, device 1, position "
        f"{at - 2}, stream in0, and may do so before that is done"
    )
    assert fault.cure == f"let it wait for {record} there"


def with_launch(program: Program, device: int, at: int, launch: Launch) -> Program:
    launches = [list(own) for own in program.launches]
    launches[device][at] = launch
    return replace(program, launches=tuple(map(tuple, launches)))


@pytest.mark.parametrize(
    ("launch", "message"),
    [
        (Launch(waits=(Event(99),)), "it waits for e99, which nothing records"),
        (Launch(waits=(Event(98),), record=Event(98)), "it waits for e98, which is recorded later"),
        (Launch(waits=(Event(0, -1),)), "it waits for e0' of another step"),
        (Launch(waits=(Event(0, 1),)), "it waits for e0[+], which is recorded later"),
        (Launch(record=Event(97, -1)), "it records e97'"),
        (Launch(record=Event(0)), "e0 is recorded already"),
    ],
)
def test_events_that_make_no_sense_are_refused(launch: Launch, message: str) -> None:
    program = launched("1f1b", 2, 2)
    at = len(program.lists[1]) - 1
    with pytest.raises(VerificationError, match=message):
        with_launch(program, 1, at, launch).verify()


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
