"""Texts of the instructions of copies, and what becomes of schedules without these."""

from __future__ import annotations

import pytest

from fxpipe.errors import InputError, ParseError
from fxpipe.extensions.copies.opcodes import Add, Give, Share
from fxpipe.ir.program import Program
from fxpipe.ir.recipe import find_recipe
from tests.helpers.opcodes import assert_read_back, take_away
from tests.helpers.plans import chain_program

LINES = {
    "share": (Share(2), "share s2"),
    "give": (Give(2, 1, -1), "give s2[1']"),
    "add": (Add(2, -1), "add s2'"),
}


@pytest.mark.smoke
@pytest.mark.parametrize("word", LINES)
def test_every_instruction_is_read_back(word: str) -> None:
    assert_read_back(word, *LINES[word])


@pytest.mark.smoke
def test_the_program_of_two_pipelines_is_read_back_and_verified() -> None:
    program = chain_program(find_recipe("chimera")(2, 2))
    assert {x.opcode for own in program.lists for x in own} >= {*LINES}
    assert Program.parse(str(program.verify())) == program


@pytest.mark.smoke
def test_without_the_extension_schedules_and_opcodes_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    schedule = find_recipe("chimera")(2, 2).verify()
    text = str(chain_program(schedule))
    take_away(monkeypatch, "sum_copies", "share")
    with pytest.raises(InputError, match="schedule 'chimera' needs the extension"):
        chain_program(schedule)
    with pytest.raises(ParseError, match="there is no instruction 'share'"):
        Program.parse(text)
