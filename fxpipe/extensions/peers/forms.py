"""``parse_csv`` and ``schedule_csv``: the CSV of torch.distributed.pipelining, a row per rank:

0F0,0F1,0B0,0B1
,1F0,1B0,(1F1;1B1)OVERLAP_F_B
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from fxpipe.errors import InputError
from fxpipe.ir.schedule import Schedule
from fxpipe.ir.task import KINDS, Task
from fxpipe.ir.walk import Place, Wait, needs_of, walk
from fxpipe.text.scan import Line, lines_of

_COMPUTE = ("F", "B", "I", "W")
_TRANSFERS = ("SEND_F", "SEND_B", "RECV_F", "RECV_B", "WAIT_SEND_F", "WAIT_SEND_B")
_PER_STAGE = ("UNSHARD", "RESHARD", "REDUCE_GRAD", "WAIT_REDUCE_GRAD")
"""Actions of a whole stage, without a micro-batch. REDUCE_GRAD scales the stage's gradients and
sums them over the replicas."""

_KINDS = (*_COMPUTE, *_TRANSFERS, *_PER_STAGE)
_PAIR = "OVERLAP_F_B"
_STAGE = re.compile(r"[0-9]+")
_WORD = re.compile(r"[A-Z_]*")
_CELL = re.compile(r"[^,]*")
_SEPARATOR = re.compile(r"[;)]")
_TASKS = {**{kind: kind for kind in _COMPUTE}, "REDUCE_GRAD": "A"}
"""Action → letter of its task."""

_IMPLICIT = "UA"
"""Tasks without an action in "compute_only": torch's lowering adds the sum over replicas after a
stage's last backward, and updates are made in the user's own loop."""


@dataclass(frozen=True, slots=True)
class Action:
    """One action: ``2F0``, ``3SEND_B1`` or ``1REDUCE_GRAD``."""

    kind: str
    stage: int
    microbatch: int | None

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{'' if self.microbatch is None else self.microbatch}"


Cell = tuple[Action, ...]
"""No action in a bubble, one action, or the actions of an overlapped pair in order."""

Rows = tuple[tuple[Cell, ...], ...]
"""Rank → its cells."""


def looks_like_actions(text: str) -> bool:
    """Whether a text begins as a CSV of actions does."""
    return re.match(r"[\s,\"]*(\(|[0-9]+[A-Z])", text) is not None


def parse_actions(text: str) -> Rows:
    """Read the CSV that ``_dump_csv`` of torch.distributed.pipelining writes, in either format.

    Raises:
        ParseError: with line and column of the first cell that is no action. (torch's own reader
            is less strict: it reads ``0F0xyz`` as ``0F0``, and ``0F`` without a micro-batch.)
    """
    lines = lines_of(text)
    if len(lines) > 1 and not lines[-1].text:
        lines.pop()  # it only ends the last row; an empty line before it is a rank without actions
    return tuple(tuple(_cells(line)) for line in lines)


def _cells(line: Line) -> Iterator[Cell]:
    if not line.text.strip():
        return
    while True:
        line.take(re.compile(r'[ \t\r"]*'))
        yield tuple(_cell(line))
        rest = line.at
        if (unread := (line.take(_CELL) or "").strip(' \t\r"')) != "":
            raise line.error(f"unexpected {unread!r} behind an action; remove it", rest)
        if line.at == len(line.text):
            return
        line.literal(",")


def _cell(line: Line) -> Iterator[Action]:
    if line.at == len(line.text) or line.text[line.at] == ",":
        return
    if not line.skip("("):
        yield _action(line, _KINDS)
        return
    while True:
        line.take(re.compile(r" *"))
        yield _action(line, _COMPUTE)
        line.take(re.compile(r" *"))
        if line.need(_SEPARATOR, "';' or ')' behind an action of an overlapped pair") == ")":
            break
    line.literal(_PAIR, f"{_PAIR} behind ')'")


def _action(line: Line, kinds: Sequence[str]) -> Action:
    start = line.at
    if _STAGE.match(line.text, start) is None:
        raise line.error(f"expected an action such as 0F1: stage, {', '.join(kinds)}, micro-batch")
    stage = line.integer("a stage")
    at = line.at
    kind = line.take(_WORD) or ""
    if kind == "BW":
        raise line.error("an older form: write I for its B and B for its BW", at)
    if kind not in kinds:
        raise line.error(f"there is no action {kind!r} here; write one of {', '.join(kinds)}", at)
    if kind in _PER_STAGE:
        return Action(kind, stage, None)
    return Action(kind, stage, line.integer(f"a micro-batch, such as {stage}{kind}0"))


def parse_csv(text: str, *, name: str = "csv", check: bool = True) -> Schedule:
    """Read the CSV of torch.distributed.pipelining: a row a rank, cells such as ``2F0``.

    Overlapped actions become their tasks one after another. REDUCE_GRAD becomes ``A``, and each row
    ends with the updates of its stages. Sends and receives are dropped, as the compiler derives
    them: whether torch's runtime would match them is not checked.

    Args:
        text: what its ``_dump_csv`` writes, as "compute_only" or with sends and receives.
        name: the schedule's name.
        check: whether to refuse a CSV that is no valid schedule.

    Raises:
        ParseError: a cell is no action; with line and column.
        InputError: a stage is missing, or computes on two ranks.
        VerificationError: with all faults of the schedule.
    """
    rows = parse_actions(text)
    tasks = [
        [Task(_TASKS[a.kind], a.microbatch, a.stage) for c in row for a in c if a.kind in _TASKS]
        for row in rows
    ]
    schedule = _schedule(name, tasks)
    return schedule.verify() if check else schedule


def _schedule(name: str, rows: Sequence[list[Task]]) -> Schedule:
    """Make a schedule of these tasks; adds the updates of its stages to the end of each row.

    Raises:
        InputError: a stage is missing, or in two rows.
    """
    home: dict[int, int] = {}
    for rank, row in enumerate(rows):
        for task in row:
            assert task.stage is not None
            if home.setdefault(task.stage, rank) != rank:
                raise InputError(
                    f"row {rank + 1} holds {task}, and stage {task.stage} is in row "
                    f"{home[task.stage] + 1} already; give it one row"
                )
    missing = next((stage for stage in range(len(home)) if stage not in home), None)
    if missing is not None or not home:
        raise InputError(f"it holds no task of stage {missing or 0}; count the stages from 0")
    every = [task for row in rows for task in row]
    for stage in sorted(home) if any(task.kind in "BIW" for task in every) else ():
        rows[home[stage]].append(Task("U", None, stage))
    most = max(task.microbatch or 0 for task in every)
    placement = tuple(home[stage] for stage in sorted(home))
    return Schedule(name, most + 1, placement, tuple(map(tuple, rows)))


def schedule_csv(schedule: Schedule) -> str:
    """The CSV that torch.distributed.pipelining reads as "compute_only", bubbles included.

    Bubbles become empty cells, as if all tasks took the same time. Updates are left out: with torch
    they are in the loop around ``step``.

    Raises:
        VerificationError: something is wrong with the schedule.
        InputError: torch's runtime cannot run the schedule; the message names every reason.
    """
    schedule.verify()
    if reasons := list(_inexpressible(schedule)):
        raise InputError(
            f"schedule {schedule.name!r} cannot be written as the CSV of "
            f"torch.distributed.pipelining: {'; '.join(reasons)}"
        )
    rows = [[task for task in row if task.kind not in _IMPLICIT] for row in schedule.rows]
    places = {
        (t.kind, t.microbatch, t.stage or 0): Place(device, at)
        for device, row in enumerate(rows)
        for at, t in enumerate(row)
    }
    needs = needs_of(schedule)
    waits: list[list[Wait]] = [[] for _ in rows]
    needed: defaultdict[Place, list[Place]] = defaultdict(list)
    for key, here in places.items():
        for there in [places[need] for need in needs(key) if need in places]:
            if there.device != here.device:
                waits[here.device].append((here.position, *there))
                needed[here].append(there)
    columns: list[list[int]] = [[] for _ in rows]
    for device, end in walk([len(row) for row in rows], waits).turns:
        while (at := len(columns[device])) < end:
            before = [columns[place.device][place.position] for place in needed[Place(device, at)]]
            columns[device].append(1 + max((*columns[device][-1:], *before), default=-1))
    lines: list[str] = []
    for row, filled in zip(rows, columns, strict=True):
        cells = [""] * (filled[-1] + 1)
        for task, column in zip(row, filled, strict=True):
            cells[column] = f"{task.stage}{task.kind}{task.microbatch}"
        lines.append(",".join(cells) + "\n")
    return "".join(lines)


def _inexpressible(schedule: Schedule) -> Iterator[str]:
    if schedule.overlaps or schedule.predict:
        yield (
            "the runtime has no weight versions, and its batches never overlap: take a schedule "
            "that ends with a flush and has delay=0, such as 1f1b"
        )
    if not schedule.trains:
        yield (
            "the loader refuses forwards alone: write a schedule that trains, such as gpipe, and "
            "call eval() there"
        )
    if schedule.copies:
        yield (
            "it has each stage on one rank: take a schedule without copies, or, for replicas of a "
            "whole pipeline, torch's own data parallelism around one such as 1f1b"
        )
    for letter in sorted(schedule.kinds):
        kind = KINDS[letter]
        if letter == "R":
            yield "it has no recompute: leave R out, and let stages call torch.utils.checkpoint"
        elif letter == "O":
            yield "it offloads nothing: leave O and P out"
        elif letter == "C":
            yield "it has no clip: leave C out, and clip behind step() in the loop"
        elif kind.run is not None:
            yield f"it has no task {kind.name!r}: leave {letter} out, and call it behind step()"
    for device in range(schedule.devices):
        if not schedule.held_by(device):
            yield f"device {device} holds no stage, and each rank needs one: leave it out"
