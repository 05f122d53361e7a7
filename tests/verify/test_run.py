"""The abstract run of a batch: its order, versions and stores, apart from the verdicts."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fxpipe.ir import instruction as ins
from fxpipe.ir.program import Program
from fxpipe.ir.value import Buffer
from fxpipe.schedules import gpipe, inference, one_f_one_b, two_bw
from fxpipe.verify.alone import window_of, wrong_alone
from fxpipe.verify.run import AbstractRun, missing
from tests.helpers.plans import chain_program


def test_a_batch_runs_its_instructions_in_the_order_of_its_steps() -> None:
    program = chain_program(two_bw(2, 2))
    ran = AbstractRun(program)
    assert program.depth == 1
    for device, life in enumerate(ran.lives):
        moments = [ran.moment(device, position) for position, _ in life]
        assert moments == sorted(moments)
        assert all(x.batch == 0 for _, x in life)  # seen from its own batch
        assert len(life) == len(program.lists[device])


@pytest.mark.parametrize(
    ("recipe", "version"), [(gpipe, 0), (one_f_one_b, 0), (two_bw, -1), (two_bw.delayed(2), -2)]
)
def test_versions_are_those_that_forwards_read(recipe: object, version: int) -> None:
    ran = AbstractRun(chain_program(recipe(2, 4)))  # type: ignore[operator]
    assert {ran.versions[stage, i] for stage in (0, 1) for i in (None, 0, 3)} == {version}
    assert ran.complete.keys() == {0, 1} and ran.updates
    assert ran.parted == (version == 0)


def test_inference_updates_nothing() -> None:
    ran = AbstractRun(chain_program(inference(2, 2)))
    assert not ran.updates and not ran.complete and not ran.pauses
    assert not [*ran.faults()]


def edited(program: Program, device: int, *instructions: ins.Instruction) -> Program:
    lists = [*program.lists]
    lists[device] = tuple(instructions)
    return replace(program, lists=tuple(lists))


PROGRAM = chain_program(gpipe(2, 2))


def test_the_compute_instructions_are_the_tasks_of_the_schedule() -> None:
    assert window_of(PROGRAM).schedule.rows == gpipe(2, 2).rows
    assert not [*wrong_alone(PROGRAM)]


def test_an_instruction_that_is_wrong_by_itself_is_told_and_left_out_of_the_run() -> None:
    rows = PROGRAM.lists[1]
    unknown = ins.Free(Buffer("act", "nothing", 0, 1, 0))
    program = edited(PROGRAM, 1, *rows, unknown)
    ((place, (what, _)),) = wrong_alone(program)
    assert place == (1, len(rows)) and what == "no edge carries this value"
    ran = AbstractRun(program)
    assert (1, len(rows)) in ran.wrong
    assert len(ran.lives[1]) == len(rows)


def test_what_is_read_twice_made_twice_or_left_over_is_found() -> None:
    rows = PROGRAM.lists[0]
    (at, freed) = next((n, x) for n, x in enumerate(rows) if isinstance(x, ins.Free))
    without = edited(PROGRAM, 0, *rows[:at], *rows[at + 1 :])
    assert "still there" in str(next(AbstractRun(without).faults()))
    twice = edited(PROGRAM, 0, *rows[: at + 1], freed, *rows[at + 1 :])
    assert "is freed already" in str(next(AbstractRun(twice).faults()))
    (at, loaded) = next((n, x) for n, x in enumerate(rows) if isinstance(x, ins.Load))
    twice = edited(PROGRAM, 0, *rows[: at + 1], loaded, *rows[at + 1 :])
    assert "was made before" in str(next(AbstractRun(twice).faults()))


def test_outputs_that_the_caller_never_gets_are_missing_once_the_run_is_over() -> None:
    rows = PROGRAM.lists[1]
    program = edited(PROGRAM, 1, *(x for x in rows if not isinstance(x, ins.Output)))
    ran = AbstractRun(program)
    assert not [*ran.faults()]
    (fault,) = missing(ran)
    assert "the caller never gets out loss of micro-batches 0-1" in str(fault)
