"""The faults in a picture or a grid: their numbers, their positions, and the list of them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fxpipe.draw.canvas import Look, text_width
from fxpipe.draw.chart import Chart
from fxpipe.draw.colours import FAINT, FAULT, PAPER
from fxpipe.errors import Fault, VerificationError
from fxpipe.ir.plan import Plan
from fxpipe.ir.program import Program
from fxpipe.ir.schedule import Schedule
from fxpipe.ir.walk import Place

FAULTY = Look(PAPER, FAULT, 2.0)
"""A task or an instruction at fault; its own colour is kept where it runs at all."""

WAITING = Look(PAPER, FAULT, 0.8, "dashed")
"""The look of a task at which a device waits for ever."""

NEVER = Look(PAPER, FAINT, 0.6, "dotted")
"""The look of a task that never runs, as its device waits for ever before it."""

GAP = 0.55
"""Space between rows, as a fraction of their height, where fault numbers are above the boxes."""

_LISTED = 16
_SIZE, _NUMBER = 8.0, 7.0
_PITCH = 12.0


@dataclass(frozen=True)
class Marks:
    """The faults of a schedule or program, numbered from 1.

    Attributes:
        faults: all of them.
        at: (device, position) → the numbers of the faults there.
        rows: device → the numbers of its faults that have no position.
    """

    faults: tuple[Fault, ...]
    at: Mapping[Place, tuple[int, ...]]
    rows: Mapping[int, tuple[int, ...]]

    @property
    def count(self) -> str:
        """``1 fault``, ``2 faults``."""
        return f"{len(self.faults)} fault{'' if len(self.faults) == 1 else 's'}"

    @property
    def listed(self) -> list[str]:
        """The lines of the list: the faults, or the first ones of many."""
        shown = [f"{number}. {fault}" for number, fault in enumerate(self.faults, start=1)]
        if len(shown) > _LISTED:
            shown[_LISTED:] = [f"… and {len(shown) - _LISTED} more"]
        return shown

    def label(self, device: int, text: str) -> str:
        """A row's label with the numbers of its faults behind it."""
        numbers = self.rows.get(device)
        return f"{text} [{numbers_text(numbers)}]" if numbers else text

    def number(self, chart: Chart, place: Place, x: float) -> None:
        """Draw the numbers of the faults at a place above its box, whose left edge is ``x``."""
        numbers = self.at.get(place)
        if numbers:
            text = numbers_text(numbers)
            wide = text_width(text, _NUMBER, bold=True) + 1
            corner = (x, chart.y(place[0]) - _NUMBER - 2)
            chart.canvas.text(
                corner, wide, _NUMBER + 1, text, size=_NUMBER, bold=True, colour=FAULT
            )

    def list(self, chart: Chart, y: float) -> None:
        """Draw the list of the faults from y on."""
        for line, text in enumerate(self.listed):
            wide = text_width(text, _SIZE) + 2
            corner = (chart.x(0), y + line * _PITCH)
            chart.canvas.text(corner, wide, _PITCH, text, size=_SIZE, colour=FAULT)


def numbers_text(numbers: Sequence[int] | None) -> str:
    """``1, 3``; only the first ones of many."""
    numbers = numbers or ()
    return ", ".join(map(str, numbers[:3])) + (", …" if len(numbers) > 3 else "")


def mark(faults: Sequence[Fault]) -> Marks:
    """Number the faults and find the position of each."""
    at: dict[Place, list[int]] = defaultdict(list)
    rows: dict[int, list[int]] = defaultdict(list)
    for number, fault in enumerate(faults, start=1):
        if fault.device is not None and fault.position is not None:
            at[Place(fault.device, fault.position)].append(number)
        elif fault.device is not None:
            rows[fault.device].append(number)
    return Marks(
        tuple(faults),
        {place: tuple(numbers) for place, numbers in at.items()},
        {device: tuple(numbers) for device, numbers in rows.items()},
    )


def faults_of(verified: Plan | Schedule | Program) -> tuple[Fault, ...]:
    """The faults that the verifier finds."""
    try:
        verified.verify()
    except VerificationError as error:
        return error.faults
    return ()
