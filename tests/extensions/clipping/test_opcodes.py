"""Texts of the instructions that clip, and what becomes of programs without these."""

from __future__ import annotations

import pytest

from fxpipe.errors import InputError, ParseError
from fxpipe.extensions.clipping.opcodes import Clip, Norm, add_clip
from fxpipe.ir.program import Program
from fxpipe.schedules import one_f_one_b
from tests.helpers.opcodes import assert_read_back, take_away
from tests.helpers.plans import chain_program

LINES = {"norm": (Norm(2), "norm s2"), "clip": (Clip(2, -1), "clip s2'")}


@pytest.mark.smoke
@pytest.mark.parametrize("word", LINES)
def test_every_instruction_is_read_back(word: str) -> None:
    assert_read_back(word, *LINES[word])


@pytest.mark.smoke
def test_without_the_extension_its_tasks_and_opcodes_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    schedule = add_clip(one_f_one_b(2, 2))
    text = str(chain_program(schedule))
    take_away(monkeypatch, "add_clip", "norm")
    with pytest.raises(InputError, match="needs the extension"):
        chain_program(schedule)
    with pytest.raises(ParseError, match="norm"):
        Program.parse(text)
