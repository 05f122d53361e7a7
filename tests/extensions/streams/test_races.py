"""Streams and events order every two accesses that conflict, however long each takes."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import Any

import pytest

from fxpipe import extend
from fxpipe.errors import VerificationError
from fxpipe.extensions.streams.events import Streams
from fxpipe.ir import instruction as ins
from fxpipe.ir.launch import Event, Launch
from fxpipe.ir.program import Program
from fxpipe.ir.recipe import RECIPES
from fxpipe.ir.schedule import Schedule
from fxpipe.passes.lowering.communicate import communicate
from fxpipe.passes.lowering.free import free
from fxpipe.passes.lowering.lower import Lower
from fxpipe.schedules import one_f_one_b
from tests.helpers.faults import faults_of
from tests.helpers.mutants import edits, launch_mutants
from tests.helpers.plans import add_clip, add_reduce, chain, run, skipping
from tests.helpers.profiles import DEEP, deep, some
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


def accepts(program: Program) -> bool:
    try:
        program.verify()
    except VerificationError:
        return False
    return True


@pytest.mark.parametrize("size", [(2, 2), *deep((3, 4))], ids=str)
@pytest.mark.parametrize("name", some(sorted(RECIPES)))
def test_lost_waits_and_records_are_refused_exactly_where_an_order_is_lost(
    name: str, size: tuple[int, int]
) -> None:
    mutants = [mutant for _, mutant in launch_mutants(launched(name, *size))]
    for mutant in random.Random(0).sample(mutants, min(len(mutants), 300 if DEEP else 30)):
        assert accepts(mutant) == (not unordered(mutant)), str(mutant)


@pytest.mark.parametrize("seed", range(200 if DEEP else 15))
def test_several_edits_are_refused_exactly_where_an_order_is_lost(seed: int) -> None:
    draw = random.Random(seed)
    program = launched(draw.choice(["1f1b", "gpipe", "zb-v", "2bw"]), 2, draw.choice([1, 2]))
    for _ in range(draw.randint(2, 4)):
        mutants = [mutant for _, mutant in launch_mutants(program)]
        ordered = [mutant for mutant in draw.sample(mutants, 8) if not unordered(mutant)]
        program = draw.choice(ordered or mutants)
    program = draw.choice([mutant for _, mutant in launch_mutants(program)])
    assert accepts(program) == (not unordered(program)), str(program)


@pytest.mark.parametrize("name", ["1f1b", *deep("zb-v", "2bw", "chimera")])
def test_what_moves_behind_the_streams_is_refused_where_an_order_is_lost(name: str) -> None:
    """Instructions that move with their launches, as by a pass of a user's."""
    program = launched(name, 2, 3)
    pairs = tuple(
        tuple(zip(own, launches, strict=True))
        for own, launches in zip(program.lists, program.launches, strict=True)
    )
    moved = [
        replace(
            program,
            lists=tuple(tuple(x for x, _ in own) for own in rows),
            launches=tuple(tuple(launch for _, launch in own) for own in rows),
        )
        for edit, _, rows in edits(pairs)
        if edit in ("swap", "move")
    ]
    judged = [(mutant, replace(mutant, launches=(), passes=mutant.passes[:-1])) for mutant in moved]
    judged = [(mutant, plain) for mutant, plain in judged if accepts(plain)]
    found = [(accepts(mutant), not unordered(mutant)) for mutant, _ in judged]
    assert all(accepted == ordered for accepted, ordered in found)
    assert {ordered for _, ordered in found} == {True, False}


@pytest.mark.parametrize("schedule", [one_f_one_b(2, 3), RECIPES["2bw"](3, 3)])
def test_sums_over_replicas_and_clips_are_in_order(schedule: Schedule) -> None:
    wide = add_clip(add_reduce(schedule))
    lower = Lower(chain(schedule.stages), replicas=2)
    program = Streams()(run(wide, lower, communicate, free))
    assert program.verify() is program


@dataclass(frozen=True, slots=True)
class Look(ins.OncePerStep):
    """Reads a stage's gradients beside its computations."""

    opcode = "look"
    stream = "side"
    takes = False
    reads_gradients = True


@dataclass(frozen=True, slots=True)
class Peek(ins.Instruction):
    """Reads a stage's weights beside its computations."""

    opcode = "peek"
    form = "s{stage}", "s0"
    stream = "side"
    takes = False
    counted = ("version",)
    stage: int
    version: int = 0


@pytest.mark.parametrize(("kind", "what"), [(Look, "gradients"), (Peek, "weights")])
def test_what_an_instruction_of_an_extension_reads_is_there_until_it_has_ended(
    kind: Any, what: str
) -> None:
    program = launched("1f1b", 1, 2)
    own, launches = list(program.lists[0]), list(program.launches[0])
    update = next(at for at, x in enumerate(own) if isinstance(x, ins.Update))
    before = own.index(ins.Barrier()) - 1
    launches[before] = replace(launches[before], record=Event(901))
    launches[update] = replace(launches[update], waits=(Event(902),))
    own.insert(update, kind(0))
    launches.insert(update, Launch("side", (Event(901),), Event(902)))
    right = replace(program, lists=(tuple(own),), launches=(tuple(launches),))
    assert right.verify() is right
    late = with_launch(right, 0, update + 1, replace(launches[update + 1], waits=()))
    (fault,) = faults_of(late)
    assert fault.what.startswith(f"it touches the {what} of stage 0, and may start before ")


def test_all_that_read_on_several_streams_must_have_ended() -> None:
    program = launched("1f1b", 1, 2)
    own, launches = list(program.lists[0]), list(program.launches[0])
    at = next(at for at, x in enumerate(own) if isinstance(x, ins.Update))
    own[at:at] = [Peek(0), Peek(0)]
    last = replace(launches[at], waits=(Event(901), Event(902)))
    launches[at : at + 1] = [Launch("one", (), Event(901)), Launch("two", (), Event(902)), last]
    right = replace(program, lists=(tuple(own),), launches=(tuple(launches),))
    assert right.verify() is right
    for left in last.waits:
        (fault,) = faults_of(with_launch(right, 0, at + 2, replace(last, waits=(left,))))
        assert fault.position == at + 2


def test_a_lost_order_names_both_accesses_and_what_to_do() -> None:
    program = launched("1f1b", 2, 2)
    at, forward = next(
        (at, x) for at, x in enumerate(program.lists[1]) if isinstance(x, ins.Forward)
    )
    arrived = program.lists[1].index(ins.Receive(next(iter(forward.uses(program)))))
    blind = with_launch(program, 1, at, replace(program.launches[1][at], waits=()))
    assert str(faults_of(blind)[0]) == (
        f"device 1, position {at}, forward s1[0] v0 keep: it touches act:y0:0->1[0], and may start "
        f"before recv act:y0:0->1[0] has ended: device 1, position {arrived}, stream in0; let that "
        "record an event, and this wait for it, or put both on one stream"
    )


def test_an_access_of_an_earlier_step_is_told() -> None:
    program = launched("2bw", 2, 2)
    faults = [
        str(fault)
        for edit, mutant in launch_mutants(program)
        if edit == "drop a wait" and not accepts(mutant)
        for fault in faults_of(mutant)
    ]
    assert any("of the step before has ended" in text for text in faults)


def test_events_that_nothing_records_in_time_are_refused() -> None:
    program = launched("1f1b", 2, 2)
    last, end = program.launches[0][-1], len(program.lists[0]) - 1
    lost = with_launch(program, 0, end, replace(last, waits=(Event(901),)))
    assert [fault.what for fault in faults_of(lost)] == ["it waits for e901, which nothing records"]
    own = with_launch(program, 0, end, replace(last, waits=(Event(901),), record=Event(901)))
    assert [fault.what for fault in faults_of(own)] == [
        f"it waits for e901, which is recorded only later: position {end}"
    ]
    twice = with_launch(program, 0, end, replace(last, record=Event(0)))
    assert "e0 is recorded already" in faults_of(twice)[0].what
    ahead = with_launch(program, 0, end, replace(last, record=Event(901, -1)))
    assert [fault.what for fault in faults_of(ahead)] == ["it records e901', of another step"]


def test_without_the_extension_order_is_not_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    program = launched("1f1b", 2, 2)
    blind = replace(program, launches=tuple(tuple(map(_blind, own)) for own in program.launches))
    assert not accepts(blind)
    monkeypatch.delitem(extend._REGISTRY["part"], "unordered")
    assert accepts(blind)


def _blind(launch: Launch) -> Launch:
    return replace(launch, waits=())


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
