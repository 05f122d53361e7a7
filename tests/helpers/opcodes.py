"""A sample of each instruction of an extension that is there."""

from __future__ import annotations

from fxpipe.ir import instruction as ins
from fxpipe.ir.program import Program

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
