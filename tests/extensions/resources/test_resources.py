"""What a stage has besides buffers is there where an instruction requires it, in every step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fxpipe import extend
from fxpipe.errors import Fault, VerificationError
from fxpipe.ir import instruction as ins
from fxpipe.ir.effects import WEIGHTS, DeviceMemory, Piece, Spaces
from fxpipe.ir.program import Program
from fxpipe.schedules import one_f_one_b, two_bw
from tests.helpers.faults import faults_of
from tests.helpers.plans import chain
from tests.verify.test_program import lowered

pytestmark = pytest.mark.smoke


@dataclass(frozen=True, slots=True)
class Unpack(ins.OncePerStep):
    """Makes a stage's weights of half of their bytes."""

    opcode = "unpack"
    provides = (WEIGHTS,)
    removes = ("packed weights",)

    def spaces(self, memory: DeviceMemory) -> Spaces:
        return Spaces(first=(memory.weights(self.stage),), over=(packed(memory, self.stage),))


@dataclass(frozen=True, slots=True)
class Pack(ins.OncePerStep):
    """Keeps a stage's weights in half of their bytes."""

    opcode = "pack"
    provides = ("packed weights",)
    removes = (WEIGHTS,)

    def spaces(self, memory: DeviceMemory) -> Spaces:
        return Spaces(first=(packed(memory, self.stage),), over=(memory.weights(self.stage),))


def packed(memory: DeviceMemory, stage: int) -> Piece:
    return Piece("parameters", ("packed", stage), memory.sizes.parameters[stage] // 2)


@pytest.fixture(autouse=True, scope="module")
def registered() -> object:
    with pytest.MonkeyPatch.context() as patch:
        for kind in (Pack, Unpack):
            patch.setitem(extend._REGISTRY["instruction"], kind.opcode, kind)
        yield


def around(program: Program, make: Callable[[ins.Instruction], Sequence[object]]) -> Program:
    lists = [[y for x in row for y in make(x)] for row in program.lists]
    return replace(program, lists=tuple(map(tuple, lists)))  # type: ignore[arg-type]


def packing(program: Program) -> Program:
    """Weights are unpacked for each of a stage's computations alone."""

    def alone(x: ins.Instruction) -> Sequence[object]:
        if not isinstance(x, ins.Compute):
            return (x,)
        return Unpack(x.stage, x.batch), x, Pack(x.stage, x.batch)

    return around(program, alone)


PROGRAM = packing(lowered(one_f_one_b(2, 2), chain(2)))


@pytest.mark.parametrize("recipe", [one_f_one_b, two_bw])
def test_what_is_provided_before_each_use_and_removed_behind_it_is_accepted(recipe: object) -> None:
    program = packing(lowered(recipe(2, 3), chain(2)))  # type: ignore[operator]
    assert program.verify() is program
    assert Program.parse(str(program)) == program


def test_all_that_is_misused_is_told_at_once() -> None:
    without = around(PROGRAM, lambda x: () if x == Unpack(0) else (x,))
    computed = [x for x in PROGRAM.lists[0] if isinstance(x, ins.Compute)]
    assert len(faults_of(without)) == 2 * len(computed)
    assert {fault.what.partition(",")[0] for fault in faults_of(without)} == {
        "it needs the weights of stage 0"
    }
    early = around(PROGRAM, lambda x: (x, Pack(1)) if x == Unpack(1) else (x,))
    assert "it needs the weights of stage 1, which are gone: pack s1, position 2" in {
        fault.what for fault in faults_of(early)
    }
    twice = around(PROGRAM, lambda x: (x, x) if x == Unpack(1) else (x,))
    assert {fault.what for fault in faults_of(twice)} == {
        f"it needs the packed weights of stage 1, which are gone: unpack s1, position {at}"
        for at, x in enumerate(twice.lists[1])
        if x == Unpack(1) and twice.lists[1][at + 1] == x
    }
    late = around(PROGRAM, lambda x: () if x == Pack(1) else (x,))
    assert len(faults_of(late)) == len(computed)


def test_a_step_begins_with_what_the_one_before_has_left() -> None:
    once = lowered(one_f_one_b(1, 2), chain(1))
    behind = replace(once, lists=((*once.lists[0], Pack(0)),))
    (*_, fault) = faults_of(behind)
    assert "it needs the weights of stage 0, which are gone: pack s0" in fault.what
    right = replace(behind, lists=((Unpack(0), *behind.lists[0]),))
    assert right.verify() is right


@given(st.lists(st.sampled_from("UPF"), max_size=8))
def test_it_is_accepted_exactly_if_two_steps_run_on_a_flag(order: list[str]) -> None:
    """Beside a flag that is set and cleared, which begins as the first change wants it; the list
    repeats."""
    program = lowered(one_f_one_b(1, 1), chain(1))
    (row,) = program.lists
    made = {"U": Unpack(0), "P": Pack(0), "F": ins.Recompute(0, 0)}
    program = replace(program, passes=("lower",), lists=((*map(made.__getitem__, order), *row),))
    changes = [x for x in order if x != "F"]
    there = not changes or changes[0] == "P"
    wrong = set()
    for _ in range(2):
        for at, x in enumerate([*order, *("F" for y in row if isinstance(y, ins.Compute))]):
            if there != (x != "U") and (x != "U" or there):
                wrong.add(at)
            there = there if x == "F" else x == "U"
    found = {fault.position for fault in faults_of_or_none(program) if "weights" in fault.what}
    places = [*range(len(order)), *(len(order) + at for at, x in enumerate(row) if reads(x))]
    assert found == {places[at] for at in wrong}


def reads(x: ins.Instruction) -> bool:
    return isinstance(x, ins.Compute)


def faults_of_or_none(program: Program) -> Sequence[Fault]:
    try:
        program.verify()
    except VerificationError as error:
        return error.faults
    return ()
