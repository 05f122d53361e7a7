"""A schedule as text: a header, a line of places, and a row a device."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from os import PathLike
from pathlib import Path

from fxpipe.errors import InputError, near
from fxpipe.ir.schedule import Schedule
from fxpipe.ir.task import KINDS, Task, TaskKind
from fxpipe.text.place import parse_place, placement_of, print_place
from fxpipe.text.scan import Scanner, print_title, scan_lines

_HEADER = "a header such as: schedule 1f1b stages=4 microbatches=8 delay=0"
_DIGITS = re.compile(r"[0-9]+")
_EARLIER = re.compile(r"'+")
_AT = re.compile(r"@")
_COMMA = re.compile(r",")
_REST = re.compile(r"[^ \t\r#]+")


def print_schedule(schedule: Schedule) -> str:
    """The text that ``parse_schedule`` reads back to an equal value, if its tasks are in range.

    A task's stage is written where the device does not hold exactly that one::

        schedule 1f1b stages=2 microbatches=2 delay=0
        place 0 | 1
        0: F0 F1 B0 B1 U
        1: F0 B0 F1 B1 U
    """
    lines = [
        f"schedule {print_title(schedule.name)} stages={schedule.stages} "
        f"microbatches={schedule.microbatches} delay={_delay_text(schedule.delay)}"
        + (" predict" if schedule.predict else ""),
        print_place(schedule.placement, schedule.devices),
    ]
    for device, row in enumerate(schedule.rows):
        held = schedule.held_by(device)
        own = held[0] if len(held) == 1 else None
        tasks = [Task(t.kind, t.microbatch, None, t.batch) if t.stage == own else t for t in row]
        lines.append(" ".join([f"{device}:", *map(str, tasks)]))
    return "\n".join(lines) + "\n"


def parse_schedule(text: str) -> Schedule:
    """Read a schedule. Comments (``# …``) and blank lines are left out; rows come in any order.

    Raises:
        ParseError: with the line and the column of the first thing that is wrong.
    """
    lines, end = scan_lines(text)
    if not lines:
        raise end.error(f"expected {_HEADER}, got nothing")
    name, stages, microbatches, delay, predict = _header(lines[0])
    if len(lines) < 2:
        raise end.error("expected 'place' and the stages of each device, got the end of the text")
    held = parse_place(lines[1], stages)
    rows: dict[int, tuple[Task, ...]] = {}
    for scan in lines[2:]:
        start = scan.at
        device = scan.number("a row such as 0: F0 B0 U, which starts with its device")
        if device >= len(held):
            raise scan.error(
                f"there is no device {device}; the places name {len(held)} devices", start
            )
        if device in rows:
            raise scan.error(f"device {device} has a row already; keep one", start)
        scan.literal(":", "':' after the device")
        rows[device] = tuple(_tasks(scan, held[device], stages, microbatches))
    for device in range(len(held)):
        if device not in rows:
            raise end.error(f"device {device} has no row; add '{device}:' and its tasks")
    ordered = tuple(rows[device] for device in range(len(held)))
    return Schedule(name, microbatches, placement_of(held), ordered, delay, predict)


def read_schedule(path: str | PathLike[str]) -> Schedule:
    """Read a schedule's text from a file. Raises ParseError, or InputError."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, ValueError, TypeError) as error:
        raise InputError(
            f"the schedule file {str(path)!r} cannot be read: {error}; name a text file"
        ) from error
    return parse_schedule(text)


def _header(scan: Scanner) -> tuple[str, int, int, int | tuple[int, ...], bool]:
    scan.literal("schedule", _HEADER)
    scan.gap("a name")
    name = scan.title("the schedule's name")
    stages = _count(scan, "stages=")
    microbatches = _count(scan, "microbatches=")
    start = scan.at
    delays = [_count(scan, "delay=")]
    while scan.take(_COMMA):
        delays.append(scan.number("the delay of the next stage"))
    if 1 < len(delays) != stages:
        raise scan.error(f"there are {len(delays)} delays for {stages} stages", start + 1)
    predict = not scan.ended() and scan.starts("predict")
    if predict:
        scan.literal("predict")
    scan.end()
    return name, stages, microbatches, tuple(delays) if len(delays) > 1 else delays[0], predict


def _count(scan: Scanner, word: str) -> int:
    scan.gap(f"{word!r} and a count")
    scan.literal(word, f"{word!r} and a count")
    return scan.number(f"a count after {word!r}")


def _delay_text(delay: int | tuple[int, ...]) -> str:
    return ",".join(map(str, delay)) if isinstance(delay, tuple) else str(delay)


def _tasks(scan: Scanner, held: Sequence[int], stages: int, microbatches: int) -> Iterator[Task]:
    while not scan.ended():
        start = scan.at
        task = _task(scan, held, stages, microbatches)
        if rest := scan.take(_REST):
            raise scan.error(
                f"unexpected {rest!r} after {scan.text[start : scan.at - len(rest)]}; put a blank "
                "between tasks",
                scan.at - len(rest),
            )
        yield task


def _task(scan: Scanner, held: Sequence[int], stages: int, microbatches: int) -> Task:
    """``F2``, ``B3'`` or ``U@5``, right here."""
    start = scan.at
    letter = scan.text[start]
    if letter not in KINDS:
        raise scan.error(f"there is no kind of task {letter!r}; {near(letter, KINDS)}")
    scan.at += 1
    index = _microbatch(scan, KINDS[letter], microbatches)
    batch = -len(scan.take(_EARLIER) or "")
    if scan.take(_AT):
        at = scan.at
        stage = scan.number("a stage after '@'")
        if stage >= stages:
            raise scan.error(f"there is no stage {stage}; the header says stages={stages}", at)
    elif len(held) == 1:
        stage = held[0]
    else:
        task = scan.text[start : scan.at]
        cure = " or ".join(f"{task}@{own}" for own in held) or "name one after '@'"
        raise scan.error(f"{task} needs a stage, as its device holds {len(held)}: {cure}", start)
    return Task(letter, index, stage, batch)


def _microbatch(scan: Scanner, kind: TaskKind, microbatches: int) -> int | None:
    start = scan.at
    digits = scan.take(_DIGITS)
    if not kind.per_microbatch:
        if digits:
            raise scan.error(
                f"{kind.name} comes once a step and has no micro-batch; write {kind.letter}", start
            )
        return None
    if digits is None:
        raise scan.error(f"{kind.name} needs a micro-batch, such as {kind.letter}0")
    scan.at = start
    index = scan.number("a micro-batch")
    if index >= microbatches:
        raise scan.error(
            f"there is no micro-batch {index}; the header says microbatches={microbatches}, and "
            "they count from 0",
            start,
        )
    return index
