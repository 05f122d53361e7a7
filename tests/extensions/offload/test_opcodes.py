"""Texts of the instructions that store and fetch, and what becomes of programs without these."""

from __future__ import annotations

import pytest

from fxpipe.errors import InputError, ParseError
from fxpipe.extensions.offload.opcodes import Await, Offload, Prefetch
from fxpipe.extensions.simulator.unroll import blocking, unroll
from fxpipe.ir.program import Program
from fxpipe.ir.schedule import Schedule
from fxpipe.ir.value import own_buffer
from tests.helpers.opcodes import assert_read_back, take_away
from tests.helpers.plans import chain_program

LINES = {
    "offload": (Offload(own_buffer("offloaded", 1, 2)), "offload offloaded:1[2]"),
    "prefetch": (Prefetch(own_buffer("fetching", 1, 2, -1)), "prefetch fetching:1[2']"),
    "await": (Await(own_buffer("fetched", 1, 2)), "await fetched:1[2]"),
}

STORED = "schedule stored stages=1 microbatches=1 delay=0\nplace 0\n0: F0 O0 P0 B0 U\n"


@pytest.mark.smoke
@pytest.mark.parametrize("word", LINES)
@pytest.mark.parametrize("launch", ["", " stream=in0 wait=e0 record=e1"])
def test_every_instruction_is_read_back(word: str, launch: str) -> None:
    instruction, text = LINES[word]
    assert_read_back(word, instruction, text)
    head = "program mine microbatches=4\nplace 0 | 1\npasses lower\ndevice 0\n"
    first = f"  load in:x:host->0[0]{' record=e0' if launch else ''}\n"
    program = Program.parse(f"{head}{first}  {text}{launch}\ndevice 1\n")
    assert program.lists[0][1] == instruction
    assert Program.parse(str(program)) == program
    assert len(unroll(program, 1).launches) == (2 if launch else 0)
    assert blocking(program).launches == ()


@pytest.mark.smoke
def test_the_text_of_a_stored_micro_batch_is_read_back_and_verified() -> None:
    program = chain_program(Schedule.parse(STORED))
    assert [x.opcode for x in program.lists[0] if x.opcode in LINES] == [*LINES]
    assert Program.parse(str(program.verify())) == program


@pytest.mark.smoke
@pytest.mark.parametrize("word", ["offload", "prefetch", "await"])
def test_an_instruction_that_is_left_out_is_reported(word: str) -> None:
    lines = str(chain_program(Schedule.parse(STORED))).splitlines()
    text = "\n".join(line for line in lines if line.split()[0] != word)
    with pytest.raises(Exception, match="program 'stored'"):
        Program.parse(text).verify()


@pytest.mark.smoke
def test_without_the_extension_its_tasks_and_opcodes_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    schedule, text = Schedule.parse(STORED), str(chain_program(Schedule.parse(STORED)))
    take_away(monkeypatch, "offload", "offload")
    with pytest.raises(InputError, match="the O of schedule 'stored' needs the extension"):
        chain_program(schedule)
    with pytest.raises(ParseError, match="there is no instruction 'offload'"):
        Program.parse(text)
