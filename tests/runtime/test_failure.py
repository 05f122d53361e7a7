"""The error of an instruction names it, its device, stage and micro-batch, and what to do."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fxpipe.errors import DeviceMemoryError, ExecutionError
from fxpipe.ir import instruction as ins
from fxpipe.ir.program import Program
from fxpipe.runtime.failure import explained_failure, running, whereabouts
from fxpipe.schedules import gpipe, inference
from tests.helpers.plans import chain_program


def at(program: Program, device: int, kind: type[ins.Instruction]) -> Any:
    """A machine that is running the first instruction of a kind."""
    row = program.lists[device]
    position = next((n for n, x in enumerate(row) if isinstance(x, kind)), len(row))
    done = position == len(row)
    return SimpleNamespace(program=program, device=device, position=position, at_end=done)


PROGRAM = chain_program(gpipe(2, 2))


def test_the_instruction_its_place_and_the_cause_are_told() -> None:
    machine, cause = at(PROGRAM, 1, ins.Backward), ValueError("no such row")
    error = explained_failure(machine, cause, "the weights are as before")
    text = running(machine)
    assert text.startswith("backward s1[")
    assert str(error).startswith(
        f"device 1, instruction {machine.position}: {text} (stage 1, micro"
    )
    assert str(error).endswith("failed (ValueError: no such row); the weights are as before")
    assert (error.device, error.stage, error.instruction) == (1, 1, text)
    assert error.__cause__ is cause


@pytest.mark.parametrize(
    ("kind", "stage"), [(ins.Send, 0), (ins.Load, 0), (ins.Update, 0), (ins.Barrier, None)]
)
def test_the_stage_is_the_one_at_whose_end_of_a_transfer_it_is(
    kind: type[ins.Instruction], stage: int | None
) -> None:
    assert explained_failure(at(PROGRAM, 0, kind), ValueError(), "").stage == stage


def test_what_fails_behind_the_last_instruction_is_told_too() -> None:
    machine, cause = at(PROGRAM, 1, ins.Recompute), ValueError("no link")
    error = explained_failure(machine, cause, "the weights are as before")
    assert str(error) == (
        f"device 1, instruction {len(PROGRAM.lists[1])}: the end of the list failed "
        "(ValueError: no link); the weights are as before"
    )
    assert (error.device, error.stage, error.microbatch) == (1, None, None)


def test_an_error_that_is_explained_already_stays() -> None:
    known = explained_failure(at(PROGRAM, 0, ins.Forward), ValueError(), "")
    assert explained_failure(at(PROGRAM, 1, ins.Forward), known, "more") is known
    assert type(known) is ExecutionError


def test_a_lack_of_memory_says_what_to_do_where_something_is_kept_and_where_not() -> None:
    lack = torch.OutOfMemoryError("no memory")
    error = explained_failure(at(PROGRAM, 0, ins.Forward), lack, "")
    assert isinstance(error, DeviceMemoryError) and "recompute" in str(error)
    error = explained_failure(at(chain_program(inference(2, 2)), 0, ins.Forward), lack, "")
    assert isinstance(error, DeviceMemoryError) and "nothing is kept here" in str(error)


def test_where_a_device_was_is_told_in_words() -> None:
    machine = at(PROGRAM, 0, ins.Update)
    assert whereabouts(machine) == (
        f"device 0 was at instruction {machine.position}, update s0 v0 -> v1"
    )
    assert whereabouts(at(PROGRAM, 0, ins.Pause)) == "device 0 was done"
