"""Schedules in the CSV of torch.distributed.pipelining: a row per rank, an action per cell.

Here ``B`` is a whole backward, as in torch; where a ``W`` follows for its stage and micro-batch, as
in files from when torch had no ``I``, it is the input gradient.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterable

from fxpipe import Schedule


def from_csv(lines: Iterable[str], name: str = "torch") -> Schedule:
    """Read a schedule that torch has written, with an update of each stage at the end.

    Everything but forwards and backwards is left out, as transfers are derived from these. Actions
    that overlap, ``(0F7;7B3)OVERLAP_F_B``, become a pair.

    Args:
        lines: the lines of the file.
        name: the name of the schedule.

    Raises:
        ParseError, VerificationError: it is no whole schedule, such as part of a file, or a stage
            is on several ranks.
    """
    cells = [[re.findall(r"(\d+)([FBIW])(\d+)", cell) for cell in row] for row in csv.reader(lines)]
    actions = [[action for cell in row for action in cell] for row in cells]
    halved = {(stage, i) for row in actions for stage, kind, i in row if kind == "W"}
    held = [sorted({int(stage) for stage, _, _ in row}) for row in actions]

    def text(stage: str, kind: str, i: str) -> str:
        return f"{'I' if kind == 'B' and (stage, i) in halved else kind}{i}@{stage}"

    rows = [
        [*("&".join(text(*action) for action in cell) for cell in row if cell)] for row in cells
    ]
    rows = [row + [f"U@{stage}" for stage in own] for row, own in zip(rows, held, strict=True)]
    microbatches = 1 + max((int(i) for row in actions for _, _, i in row), default=0)
    head = f"schedule {name} stages={sum(map(len, held))} microbatches={microbatches} delay=0"
    place = "place " + " | ".join(" ".join(map(str, own)) for own in held)
    lists = (f"{device}: {' '.join(row)}" for device, row in enumerate(rows))
    return Schedule.parse("\n".join([head, place, *lists])).verify()
