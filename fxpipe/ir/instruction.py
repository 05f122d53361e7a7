"""The instructions of a Program, one class each. Other modules import this one as ``ins``."""

from __future__ import annotations

from fxpipe.extend import find, names, there
from fxpipe.ir.opcodes.backward import Backward as Backward
from fxpipe.ir.opcodes.backward import InputGrad as InputGrad
from fxpipe.ir.opcodes.backward import WeightGrad as WeightGrad
from fxpipe.ir.opcodes.base import Compute as Compute
from fxpipe.ir.opcodes.base import Instruction as Instruction
from fxpipe.ir.opcodes.base import Move as Move
from fxpipe.ir.opcodes.base import OncePerStep as OncePerStep
from fxpipe.ir.opcodes.base import Wrong as Wrong
from fxpipe.ir.opcodes.forward import Forward as Forward
from fxpipe.ir.opcodes.forward import Recompute as Recompute
from fxpipe.ir.opcodes.moves import Free as Free
from fxpipe.ir.opcodes.moves import Load as Load
from fxpipe.ir.opcodes.moves import Output as Output
from fxpipe.ir.opcodes.moves import Pop as Pop
from fxpipe.ir.opcodes.moves import Receive as Receive
from fxpipe.ir.opcodes.moves import Send as Send
from fxpipe.ir.opcodes.moves import Stash as Stash
from fxpipe.ir.opcodes.update import Barrier as Barrier
from fxpipe.ir.opcodes.update import Pause as Pause
from fxpipe.ir.opcodes.update import Update as Update

Arrival = Load | Receive
"""Instructions that bring a value to a device."""

Meeting = Barrier | Pause
"""Instructions at which all devices wait for each other."""

OPCODES: dict[str, type[Instruction]] = {
    made.opcode: made
    for made in (
        *(Load, Output, Send, Receive, Stash, Pop),
        *(Forward, Recompute, Backward, InputGrad, WeightGrad),
        *(Free, Barrier, Pause, Update),
    )
}
"""Opcode, as texts of programs have it → instruction of the core."""


def find_opcode(word: str) -> type[Instruction] | None:
    """The instruction of an opcode: of the core, of an extension that is there, or of your own."""
    if word not in OPCODES and there("instruction", word):
        made: type[Instruction] = find("instruction", word)
        return made
    return OPCODES.get(word)


def every_opcode() -> dict[str, type[Instruction]]:
    """All opcodes that ``find_opcode`` knows."""
    words = (*OPCODES, *names("instruction"))
    return {word: made for word in words if (made := find_opcode(word)) is not None}
