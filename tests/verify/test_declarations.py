"""An instruction of an extension is verified like the core's: by what its class declares."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest

from fxpipe import extend
from fxpipe.ir import instruction as ins
from fxpipe.ir.program import Program
from fxpipe.ir.task import TaskKind
from fxpipe.ir.value import Buffer, own_buffer
from fxpipe.schedules import one_f_one_b, two_bw, zb_h1
from tests.helpers.faults import faults_of
from tests.helpers.plans import add_reduce, chain
from tests.verify.test_program import lowered

pytestmark = pytest.mark.smoke


@dataclass(frozen=True, slots=True)
class Look(ins.OncePerStep):
    """Looks at the whole gradients of a stage."""

    opcode = "look"
    reads_gradients = True

    @property
    def needs(self) -> Sequence[str]:
        return ("gradients",)


@dataclass(frozen=True, slots=True)
class Note(ins.OncePerStep):
    """Makes a buffer behind a look; each stage has one, or none."""

    opcode = "note"
    stands_for = TaskKind("note", "note", per_microbatch=False, lacking="note them all")

    @property
    def needs(self) -> Sequence[str]:
        return ("look",)

    @classmethod
    def of_every_stage(cls, program: Program, there: Container[str]) -> bool:
        return "note" in there

    def makes(self, program: Program) -> tuple[Buffer, ...]:
        return (own_buffer("noted", self.stage, 0, self.batch),)


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    known = extend._REGISTRY["instruction"]
    monkeypatch.setitem(known, "look", Look)
    monkeypatch.setitem(known, "note", Note)


def around(
    program: Program, choose: Callable[[ins.Instruction], bool], make: Callable[[Any], Any]
) -> Program:
    """The program with others in place of the instructions that are chosen."""
    lists = [[y for x in row for y in (make(x) if choose(x) else (x,))] for row in program.lists]
    return replace(program, lists=tuple(map(tuple, lists)))


def update(x: ins.Instruction) -> bool:
    return isinstance(x, ins.Update)


PROGRAM = lowered(one_f_one_b(2, 2), chain(2))


def looking(program: Program) -> Program:
    return around(program, update, lambda x: (Look(x.stage, x.batch), x))


@pytest.mark.parametrize("recipe", [one_f_one_b, zb_h1, two_bw])
def test_one_that_is_in_its_place_is_accepted(recipe: Any) -> None:
    program = looking(lowered(recipe(2, 3), chain(2)))
    assert program.verify() is program
    assert Program.parse(str(program)) == program


def test_what_needs_the_gradients_comes_behind_all_that_sum_them() -> None:
    last = next(x for x in reversed(PROGRAM.lists[1]) if isinstance(x, ins.Backward))
    program = around(PROGRAM, lambda x: x == last, lambda x: (Look(1), x))
    at = program.lists[1].index(last)
    assert [str(fault) for fault in faults_of(program)] == [
        f"device 1, position {at - 1}, look s1: it comes before backward s1[1] v0, position {at}, "
        "which it needs; move it behind that"
    ]


def test_gradients_that_an_update_or_a_sum_has_taken_are_not_there_to_be_read() -> None:
    program = around(PROGRAM, update, lambda x: (x, Look(x.stage)))
    assert [fault.what.partition(", ")[0] for fault in faults_of(program)] == [
        "it needs gradients that update s0 v0 -> v1",
        "it needs gradients that update s1 v0 -> v1",
    ]
    summed = lowered(add_reduce(one_f_one_b(2, 2)), chain(2))
    early = around(summed, lambda x: x.opcode == "all_gather", lambda x: (Look(x.stage), x))
    assert {fault.what.rpartition(", ")[2] for fault in faults_of(early)} == {
        "which it needs",
        "has sent to be summed",
    }


def misplaced() -> Iterator[tuple[int, ins.Instruction, str]]:
    yield 0, Look(1), "stage 1 is on device 1"
    yield 0, Look(9), "there is no stage 9"
    yield 1, Look(1, 1), "it belongs to a later step's batch"
    yield 1, Note(0), "stage 0 is on device 0"


@pytest.mark.parametrize(("device", "wrong", "what"), [*misplaced()])
def test_its_stage_and_its_batch_are_checked(
    device: int, wrong: ins.Instruction, what: str
) -> None:
    lists = list(PROGRAM.lists)
    lists[device] = (*lists[device], wrong)
    assert what in [fault.what for fault in faults_of(replace(PROGRAM, lists=tuple(lists)))]


def test_its_task_its_order_and_its_buffers_are_checked() -> None:
    noted = around(looking(PROGRAM), update, lambda x: (Note(x.stage), x))
    leaks = [fault for fault in faults_of(noted) if fault.subject.startswith("note")]
    assert [fault.what for fault in leaks] == [
        "noted:0[0] is still there when its batch is through",
        "noted:1[0] is still there when its batch is through",
    ]
    right = around(noted, update, lambda x: (x, ins.Free(own_buffer("noted", x.stage, 0))))
    assert right.verify() is right
    once = around(right, lambda x: x == Note(1), lambda x: ())
    assert "device 1: stage 1 has no note; note them all" in map(str, faults_of(once))
    twice = around(right, lambda x: x == Note(1), lambda x: (x, x))
    assert any(fault.what.startswith("it is there already") for fault in faults_of(twice))
    early = around(right, lambda x: x == Look(0), lambda x: ())
    early = around(early, lambda x: x == Note(0), lambda x: (x, Look(0)))
    (fault,) = faults_of(early)
    assert fault.what.startswith("it comes before look s0")
