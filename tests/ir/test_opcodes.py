"""Each opcode declares what it reads, makes and ends, as it really does when it runs."""

from __future__ import annotations

from itertools import chain
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fxpipe.ir import instruction as ins
from fxpipe.ir.opcodes.backward import Backward, InputGrad, WeightGrad, output_gradients
from fxpipe.ir.opcodes.base import Compute, Move, OncePerStep
from fxpipe.ir.opcodes.forward import Forward, Recompute
from fxpipe.ir.opcodes.moves import Free, Load, Output, Pop, Receive, Send, Stash
from fxpipe.ir.opcodes.update import Barrier, Pause, Update
from fxpipe.ir.program import Program
from fxpipe.ir.value import HOST, Buffer
from fxpipe.passes.lowering.communicate import communicate
from fxpipe.passes.lowering.free import free
from fxpipe.passes.lowering.lower import Lower
from fxpipe.schedules import gpipe, zb_h1
from tests.helpers.plans import chain_program, skipping

PROGRAM = chain_program(zb_h1(3, 3))
WAYS = {Load: "a", Output: "b", Send: "c", Stash: "c", Receive: "d", Pop: "d"}


def all_of(program: Program, *kinds: type[ins.Instruction]) -> list[tuple[int, ins.Instruction]]:
    lists = enumerate(program.lists)
    return [(device, x) for device, row in lists for x in row if isinstance(x, kinds)]


def test_every_opcode_of_the_core_is_of_one_of_the_kinds_that_it_may_be() -> None:
    known = {Forward, Recompute, Backward, InputGrad, WeightGrad, Update, Barrier, Pause}
    known |= {Load, Output, Send, Stash, Receive, Pop, Free}
    assert {*ins.OPCODES.values()} == known
    for kind in known - {Update, Barrier, Pause}:
        assert issubclass(kind, Move | Compute | OncePerStep)


def test_a_value_comes_to_a_device_once_and_goes_once() -> None:
    for row in PROGRAM.lists:
        made = [buffer for x in row for buffer in x.makes(PROGRAM)]
        ended = [buffer for x in row for buffer in x.ends(PROGRAM)]
        assert len(made) == len({*made}) and len(ended) == len({*ended})
        assert {*made} == {*ended}


def test_nothing_is_read_before_it_is_made() -> None:
    for row in PROGRAM.lists:
        there = set[Buffer]()
        for x in row:
            assert {*x.uses(PROGRAM)} <= there
            there |= {*x.makes(PROGRAM)}
            there -= {*x.ends(PROGRAM)}
        assert not there


def test_halves_hand_on_what_the_first_defers_to_the_second() -> None:
    for device, x in all_of(PROGRAM, InputGrad):
        assert isinstance(x, InputGrad)
        other = WeightGrad(x.stage, x.microbatch)
        (deferred,) = other.ends(PROGRAM)
        assert deferred in x.makes(PROGRAM) and deferred in other.uses(PROGRAM)
        assert any(there == device and y == other for there, y in all_of(PROGRAM, WeightGrad))
        frozen = InputGrad(x.stage, x.microbatch, frozen=True)
        assert deferred not in frozen.makes(PROGRAM)


@pytest.mark.parametrize("kind", WAYS)
def test_a_move_fits_one_way_alone(kind: type[Move]) -> None:
    buffer = Buffer("act", "y", 0, 1, 0)
    ways = {"a": (HOST, 0), "b": (0, HOST), "c": (0, 1), "d": (1, 0)}
    fits = [name for name, way in ways.items() if not kind(buffer).route(0, *way)]
    assert fits == [WAYS[kind]]
    assert kind(buffer).route(2, 0, 1)  # on a device that has no part in it


def test_what_is_counted_from_a_later_step_is_the_same_instruction() -> None:
    moved = [x.later(2) for x in chain(*PROGRAM.lists) if not isinstance(x, ins.Meeting)]
    assert [x.later(-2) for x in moved] == [
        x for x in chain(*PROGRAM.lists) if not isinstance(x, ins.Meeting)
    ]
    assert Backward(1, 2, version=-1, batch=-1).later(1) == Backward(1, 2)
    assert Update(0).later(1) == Update(0, 1, 2, 1)
    assert Barrier().later(3) == Barrier()


def test_a_forward_says_what_its_flags_lack() -> None:
    forward = Forward(0, 0)
    assert not [*forward.misfits({("B", 0, 0)}, True)]
    assert [cure for _, cure in forward.misfits(set(), False)] == ["remove 'keep'"]
    tasks = {("R", 0, 0)}
    assert [cure for _, cure in forward.misfits(tasks, True)] == ["write 'again'", "remove 'keep'"]
    again = Forward(0, 0, keeps=False, again=True)
    assert not [*again.misfits(tasks, True)]
    assert len([*again.misfits(set(), True)]) == 2


def test_gradients_come_before_the_barrier_and_updates_behind_it() -> None:
    for row in chain_program(gpipe(2, 2)).lists:
        (barrier,) = (n for n, x in enumerate(row) if isinstance(x, Barrier))
        assert all(n < barrier for n, x in enumerate(row) if x.before_barrier)
        assert all(n > barrier for n, x in enumerate(row) if x.after_barrier)
        assert any(x.after_barrier for x in row)


def test_a_backward_adds_the_gradients_of_a_value_from_all_of_its_consumers() -> None:
    program = free(communicate(Lower(skipping(3))(gpipe(3, 1))))
    (backward,) = (x for device, x in all_of(program, Backward) if device == 0)
    assert isinstance(backward, Backward)
    parts = {1: 1.0, 2: 4.0}
    values = {b: torch.tensor(parts[b.source]) for b in backward.uses(program) if b.kind == "grad"}
    assert len(values) == 3  # of h from both stages behind, of y0 from the next
    machine: Any = SimpleNamespace(program=program, store=SimpleNamespace(values=values))
    h, y0 = output_gradients(machine, backward)
    assert (h.item(), y0.item()) == (5.0, 1.0)
