"""How each instruction of a program looks in a picture."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import assert_never

from fxpipe.draw.canvas import Look, Stroke
from fxpipe.draw.chart import Entry
from fxpipe.draw.colours import (
    FAINT,
    GRADIENT,
    INK,
    INPUT,
    OTHER,
    PAPER,
    PARAMETER,
    SKIP,
    TASKS,
)
from fxpipe.ir import instruction as ins
from fxpipe.ir.program import Program
from fxpipe.ir.value import Buffer, BufferKind, batch_mark

ACT_ARROW = Stroke(INK)
SKIP_ARROW = Stroke(SKIP, "dashed")
GRADIENT_ARROW = Stroke(GRADIENT)

MARK_HEIGHT = 0.55
"""Height of a mark's box as a fraction of the row's height."""

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
        label: the text in its box.
        look: the look of its box.
        height: the height of its box as a fraction of the row's height.
        mark: whether it computes nothing. It then is a narrow box, left out in large programs.
    """

    label: str
    look: Look
    height: float = MARK_HEIGHT
    mark: bool = True


def glyph(instruction: ins.Instruction, program: Program) -> Glyph:
    """The glyph of an instruction."""
    match instruction:
        case ins.Forward(stage, i, batch=batch):
            return _compute(f"F{i}", stage, batch, "F", program)
        case ins.Recompute(stage, i, batch=batch):
            return _compute(f"R{i}", stage, batch, "R", program)
        case ins.Backward(stage, i, batch=batch):
            return _compute(f"B{i}", stage, batch, "B", program)
        case ins.InputGrad(stage, i, batch=batch):
            return _compute(f"I{i}", stage, batch, "I", program)
        case ins.WeightGrad(stage, i, batch=batch):
            return _compute(f"W{i}", stage, batch, "W", program)
        case ins.Run(kind, stage, i, batch=batch):
            return _compute(f"{kind}{'' if i is None else i}", stage, batch, kind, program)
        case ins.Clip(stage, batch):
            return _compute("C", stage, batch, "C", program)
        case ins.Norm():
            return Glyph("n", _GRADIENT)
        case ins.Update(stage, batch=batch):
            return _compute("U", stage, batch, "U", program)
        case ins.Load():
            return Glyph("L", _HOST)
        case ins.Output():
            return Glyph("O", _HOST)
        case ins.Send(buffer):
            return Glyph("S", _mail(buffer))
        case ins.Receive(buffer):
            return Glyph("R", _mail(buffer))
        case ins.Stash():
            return Glyph("s", _SKIP)
        case ins.Pop():
            return Glyph("p", _SKIP)
        case ins.Free():
            return Glyph("x", _FREE, height=0.4)
        case ins.Barrier():
            return Glyph("|", _BARRIER, height=1.0)
        case ins.Pause():
            return Glyph("||", _PAUSE, height=1.0)
        case _:
            assert_never(instruction)


def arrow(kind: BufferKind) -> Stroke:
    """The stroke of an arrow for the transfer of such a buffer."""
    if kind == "grad":
        return GRADIENT_ARROW
    return SKIP_ARROW if kind == "skip" else ACT_ARROW


def arrow_entries(kinds: Collection[BufferKind]) -> list[Entry]:
    """The legend entries for the arrows of such buffers."""
    strokes = {arrow(kind) for kind in kinds}
    meanings = {
        ACT_ARROW: "value to the next stage",
        SKIP_ARROW: "value that skips stages",
        GRADIENT_ARROW: "gradient",
    }
    return [Entry(text, stroke) for stroke, text in meanings.items() if stroke in strokes]


def _compute(name: str, stage: int, batch: int, kind: str, program: Program) -> Glyph:
    label = name + batch_mark(batch)
    if program.stages > program.devices:
        label += f"@{stage}"
    look = Look(TASKS.get(kind, OTHER), PAPER)
    return Glyph(label, look, height=1.0, mark=False)


def _mail(buffer: Buffer) -> Look:
    return _GRADIENT if buffer.kind == "grad" else _MAIL
