"""How each instruction of a program looks in a picture."""

from __future__ import annotations

from dataclasses import dataclass
from typing import assert_never

from fxpipe.draw.canvas import Look, Stroke
from fxpipe.draw.colours import (
    BACKWARD,
    FAINT,
    FORWARD,
    GRADIENT,
    INK,
    INPUT,
    OTHER,
    PAPER,
    PARAMETER,
    SKIP,
    UPDATE,
)
from fxpipe.program import (
    Backward,
    Barrier,
    Buffer,
    BufferKind,
    Forward,
    Free,
    Instruction,
    Load,
    Output,
    Pause,
    Pop,
    Program,
    Receive,
    Send,
    Stash,
    Update,
)

ACT_ARROW = Stroke(INK)
SKIP_ARROW = Stroke(SKIP, "dashed")
GRADIENT_ARROW = Stroke(GRADIENT)

MARK_HEIGHT = 0.55
"""Height of a mark's box over that of its row."""

_HOST = Look(INPUT, FAINT)
_MAIL = Look(PAPER, INK)
_SKIP = Look(PAPER, SKIP, 0.8)
_GRADIENT = Look(PAPER, GRADIENT)
_FREE = Look(OTHER, PAPER)
_BARRIER = Look(FAINT, PAPER)
_PAUSE = Look(PARAMETER, PAPER)


@dataclass(frozen=True)
class Glyph:
    """How an instruction is drawn.

    Attributes:
        label: what stands in its box.
        look: the look of its box.
        height: of its box, over that of a row.
        mark: whether it computes nothing: a narrow box, which large programs leave out.
    """

    label: str
    look: Look
    height: float = MARK_HEIGHT
    mark: bool = True


def glyph(instruction: Instruction, program: Program) -> Glyph:
    """The glyph of an instruction."""
    match instruction:
        case Forward(stage, i):
            return _compute(f"F{i}", stage, FORWARD, program)
        case Backward(stage, i):
            return _compute(f"B{i}", stage, BACKWARD, program)
        case Update(stage):
            return _compute("U", stage, UPDATE, program)
        case Load():
            return Glyph("L", _HOST)
        case Output():
            return Glyph("O", _HOST)
        case Send(buffer):
            return Glyph("S", _mail(buffer))
        case Receive(buffer):
            return Glyph("R", _mail(buffer))
        case Stash():
            return Glyph("s", _SKIP)
        case Pop():
            return Glyph("p", _SKIP)
        case Free():
            return Glyph("x", _FREE, height=0.4)
        case Barrier():
            return Glyph("|", _BARRIER, height=1.0)
        case Pause():
            return Glyph("||", _PAUSE, height=1.0)
        case _:
            assert_never(instruction)


def arrow(kind: BufferKind) -> Stroke:
    """The stroke of such a buffer's way to another device."""
    if kind == "grad":
        return GRADIENT_ARROW
    return SKIP_ARROW if kind == "skip" else ACT_ARROW


def _compute(name: str, stage: int, fill: str, program: Program) -> Glyph:
    label = f"{name}@{stage}" if program.stages > program.devices else name
    return Glyph(label, Look(fill, PAPER), height=1.0, mark=False)


def _mail(buffer: Buffer) -> Look:
    return _GRADIENT if buffer.kind == "grad" else _MAIL
