"""Instructions of extensions: a sample of each, whether they are read back, and what is without."""

from __future__ import annotations

from typing import Any

import pytest

from fxpipe import extend
from fxpipe.ir import instruction as ins
from fxpipe.ir.program import Program
from fxpipe.text.program import print_instruction

HEAD = "program mine microbatches=4\nplace 0 | 1\npasses lower\ndevice 0\n  "


def of_extensions() -> dict[str, ins.Instruction]:
    """Opcode → an instruction with the operands of its class's example."""
    kinds = {word: k for word, k in ins.every_opcode().items() if word not in ins.OPCODES}
    return {word: _read(f"{word} {_operands(kind)}") for word, kind in kinds.items()}


def _operands(kind: type[ins.Instruction]) -> str:
    if issubclass(kind, ins.Move):
        return f"{(*kind.kinds, 'saved')[0]}:0[0]"
    return kind.form[1]


def _read(line: str) -> ins.Instruction:
    return Program.parse(f"{HEAD}{line}\ndevice 1\n").lists[0][0]


def assert_read_back(word: str, instruction: ins.Instruction, text: str) -> None:
    """Check that an instruction is printed as the text, and that the text reads as it."""
    assert ins.find_opcode(word) is type(instruction)
    assert print_instruction(instruction) == text
    assert _read(text) == instruction
    program = Program.parse(f"{HEAD}{text}\ndevice 1\n")
    assert Program.parse(str(program)) == program


def take_away(monkeypatch: pytest.MonkeyPatch, part: str, word: str) -> None:
    """Let the code of an extension's part and of one of its instructions be missing."""
    doors: Any = extend._REGISTRY
    for door, name in (("part", part), ("instruction", word)):
        assert name in doors[door]
        monkeypatch.setitem(doors[door], name, "fxpipe.extensions.gone:Gone")
