"""Print and parse schedules: a header, places, edges, what is frozen, and a row for each device."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from fxpipe.errors import near
from fxpipe.ir.schedule import Delay, Schedule, delay_text
from fxpipe.ir.task import KINDS, Task, TaskKind
from fxpipe.text.form import Form, options
from fxpipe.text.scan import Line, end_of, lines_of, print_title

_HEADER = Form(
    "schedule {name:title} stages={stages} microbatches={microbatches} delay={delay}",
    "schedule 1f1b stages=4 microbatches=8 delay=0",
)
_DIGITS = re.compile(r"[0-9]+")
_EARLIER = re.compile(r"'+")
_REST = re.compile(r"[^ \t\r#]+")


def print_schedule(schedule: Schedule) -> str:
    """Print a schedule; ``parse_schedule`` reads back an equal value if all tasks are in range.

    A task shows its stage unless that is the only stage of its device; a pair is ``F1&B0``::

        schedule 1f1b stages=2 microbatches=2 delay=0
        place 0 | 1
        0: F0 F1 B0 B1 U
        1: F0 B0 F1 B1 U

    See ``delay_text`` for delays that differ, and ``print_place`` for copies of stages. The header
    may end with ``slices=2``. Where stages are no chain, a line such as ``edges 0->2 1->2`` behind
    the places has the stages that feed others, ``edges -`` for none. ``frozen 1@0`` leaves out the
    weight gradient of micro-batch 1 on stage 0.
    """
    lines = [
        f"schedule {print_title(schedule.name)} stages={schedule.stages} "
        f"microbatches={schedule.microbatches} delay={delay_text(schedule.delay)}"
        + (f" slices={schedule.slices}" if schedule.slices > 1 else ""),
        print_place(schedule.placement, schedule.copies, schedule.devices),
    ]
    frozen = sorted(schedule.frozen) or None
    for word, mark, pairs in ("edges", "->", schedule.edges), ("frozen", "@", frozen):
        if pairs is not None:
            each = " ".join(f"{first}{mark}{second}" for first, second in pairs)
            lines.append(f"{word} {each or _EMPTY}")
    for device in range(schedule.devices):
        held = schedule.held_by(device)
        only = held[0] if len(held) == 1 else None
        units = [
            "&".join(str(replace(t, stage=None) if t.stage == only else t) for t in unit)
            for unit in schedule.units(device)
        ]
        lines.append(" ".join([f"{device}:", *units]))
    return "\n".join(lines) + "\n"


def parse_schedule(text: str) -> Schedule:
    """Read a schedule. Comments (``# …``) and blank lines are ignored; rows come in any order.

    Raises:
        ParseError: with the line and column of the first error.
    """
    whole = lines_of(text)
    end = end_of(whole)
    lines = [line for line in whole if not line.ended()]
    if not lines:
        raise end.error(f"expected a header such as {_HEADER.example}, got nothing")
    name, stages, microbatches, first = _HEADER.read(lines[0]).values()
    delay = _delay(lines[0], first, stages)
    slices = 1
    for _ in options(lines[0], "slices="):
        slices = lines[0].integer("the number of slices")
    if len(lines) < 2:
        raise end.error("expected 'place' and the stages of each device, got the end of the text")
    places = parse_place(lines[1], stages)
    held = places.held
    rest = lines[2:]
    edges, frozen = _pairs(rest, "edges", "->"), _pairs(rest, "frozen", "@")
    rows: dict[int, tuple[Task, ...]] = {}
    paired: set[Task] = set()
    for line in rest:
        start = line.at
        device = line.integer("a row such as 0: F0 B0 U, which starts with its device")
        if device >= len(held):
            raise line.error(
                f"there is no device {device}; the places name {len(held)} devices", start
            )
        if device in rows:
            raise line.error(f"device {device} has a row already; keep one", start)
        line.literal(":", "':' after the device")
        rows[device] = tuple(_tasks(line, held[device], stages, microbatches, paired))
    for device in range(len(held)):
        if device not in rows:
            raise end.error(f"device {device} has no row; add '{device}:' and its tasks")
    ordered = tuple(rows[device] for device in range(len(held)))
    return Schedule(
        name,
        microbatches,
        places.placement,
        ordered,
        delay,
        places.copies,
        frozenset(paired),
        slices,
        edges,
        frozenset(frozen or ()),
    )


def _pairs(lines: list[Line], word: str, mark: str) -> tuple[tuple[int, int], ...] | None:
    """Read a line such as ``edges 0->2 1->2``, if it comes next. Numbers may be out of range."""
    if not lines or not lines[0].starts(word):
        return None
    line, pairs, example = lines.pop(0), list[tuple[int, int]](), f"such as {word} 1{mark}2"
    line.literal(word)
    line.gap(f"pairs, {example}")
    while not (line.ended() or (not pairs and line.skip(_EMPTY))):
        first = line.integer(f"a number of a pair, {example}, or '-' for none")
        line.literal(mark)
        pairs.append((first, line.integer(f"the second number of a pair, {example}")))
    line.end()
    return tuple(pairs)


def _delay(line: Line, first: int, stages: int) -> Delay:
    """Read the rest of the delay, after its first number."""
    start = line.at
    delays = [first]
    while line.skip(","):
        delays.append(line.integer("the delay of the next stage"))
    if len(delays) == 1:
        return first
    if len(delays) != stages:
        raise line.error(f"there are {len(delays)} delays for {stages} stages", start - 1)
    return tuple(delays)


def _tasks(
    line: Line, held: Sequence[int], stages: int, microbatches: int, paired: set[Task]
) -> Iterator[Task]:
    """Read the tasks of a row; adds the second of each pair to ``paired``."""
    while not line.ended():
        start = line.at
        task = _task(line, held, stages, microbatches)
        if line.skip("&"):
            yield task
            if line.at == len(line.text) or line.text[line.at] not in KINDS:
                raise line.error("expected the backward of a pair behind '&', such as F1&B0")
            task = _task(line, held, stages, microbatches)
            paired.add(task)
        if rest := line.take(_REST):
            raise line.error(
                f"unexpected {rest!r} after {line.text[start : line.at - len(rest)]}; put a blank "
                "between tasks",
                line.at - len(rest),
            )
        yield task


def _task(line: Line, held: Sequence[int], stages: int, microbatches: int) -> Task:
    """Read a task, such as ``F2``, ``B3'`` or ``U@5``."""
    start = line.at
    letter = line.text[start]
    if letter not in KINDS:
        raise line.error(f"there is no kind of task {letter!r}; {near(letter, KINDS)}")
    line.at += 1
    index = _microbatch(line, KINDS[letter], microbatches)
    batch = -len(line.take(_EARLIER) or "")
    if line.skip("@"):
        at = line.at
        stage = line.integer("a stage after '@'")
        if stage >= stages:
            raise line.error(f"there is no stage {stage}; the header says stages={stages}", at)
    elif len(held) == 1:
        stage = held[0]
    else:
        task = line.text[start : line.at]
        cure = " or ".join(f"{task}@{stage}" for stage in held) or "name one after '@'"
        raise line.error(f"{task} needs a stage, as its device holds {len(held)}: {cure}", start)
    return Task(letter, index, stage, batch)


def _microbatch(line: Line, kind: TaskKind, microbatches: int) -> int | None:
    start = line.at
    digits = line.take(_DIGITS)
    if not kind.per_microbatch:
        if digits:
            raise line.error(
                f"{kind.name} comes once a step and has no micro-batch; write {kind.letter}", start
            )
        return None
    if digits is None:
        raise line.error(f"{kind.name} needs a micro-batch, such as {kind.letter}0")
    line.at = start
    index = line.integer("a micro-batch")
    if index >= microbatches:
        raise line.error(
            f"there is no micro-batch {index}; the header says microbatches={microbatches}, and "
            "they count from 0",
            start,
        )
    return index


_EMPTY = "-"


def print_place(
    placement: tuple[int, ...], copies: tuple[tuple[int, ...], ...], devices: int
) -> str:
    """Print the stages of each device: ``place 0 7 | 1 6 | -``, with ``-`` for an empty device.

    In ``place 0 +1 | 1 +0``, device 0 has a copy of stage 1, and device 1 has one of stage 0.
    """
    held: list[list[str]] = [[] for _ in range(devices)]
    for stage, home in enumerate(placement):
        others = copies[stage] if stage < len(copies) else ()
        for device, mark in ((home, ""), *((copy, "+") for copy in others)):
            if 0 <= device < devices:  # printing must not fail: the verifier reports the others
                held[device].append(f"{mark}{stage}")
    return "place " + " | ".join(" ".join(stages) or _EMPTY for stages in held)


class Places(NamedTuple):
    """A line of places.

    Attributes:
        held: device → its stages, including copies.
        placement: stage → its home device.
        copies: stage → the devices of its copies.
    """

    held: tuple[list[int], ...]
    placement: tuple[int, ...]
    copies: tuple[tuple[int, ...], ...]


def parse_place(line: Line, stages: int | None = None) -> Places:
    """Read a line of places, as ``print_place`` writes it.

    Args:
        line: the line.
        stages: the number of stages, if it is known.

    Raises:
        ParseError: a stage is out of range, or has no or two home devices.
    """
    line.literal("place", "'place' and the stages of each device, such as place 0 | 1")
    line.gap("the stages of device 0")
    homes: dict[int, int] = {}
    copies: defaultdict[int, list[int]] = defaultdict(list)
    held = [_cell(line, 0, stages, homes, copies)]
    while not line.ended():
        line.literal("|", "'|' between the stages of two devices")
        line.ended()
        held.append(_cell(line, len(held), stages, homes, copies))
    every = range(len({*homes, *copies}) if stages is None else stages)
    for stage in every:
        if stage not in homes:
            raise line.error(f"stage {stage} has no device; name it in one of the places")
    return Places(
        tuple(held), tuple(homes[s] for s in every), tuple(tuple(copies[s]) for s in every)
    )


def _cell(
    line: Line,
    device: int,
    stages: int | None,
    homes: dict[int, int],
    copies: dict[int, list[int]],
) -> list[int]:
    """Read and return the stages of one device; adds it to their ``homes`` or ``copies``."""
    cell: list[int] = []
    if line.skip(_EMPTY):
        return cell
    while not cell or not (line.ended() or line.text.startswith("|", line.at)):
        start = line.at
        copied = line.skip("+")
        stage = line.integer(f"a stage of device {device}, or '-' where it holds none")
        if stages is not None and stage >= stages:
            raise line.error(f"there is no stage {stage}; the header says stages={stages}", start)
        if stage in homes and not copied:
            raise line.error(
                f"stage {stage} is on device {homes[stage]} already; give it one device, or write "
                f"+{stage} for a copy of it",
                start,
            )
        if copied:
            copies[stage].append(device)
        else:
            homes[stage] = device
        cell.append(stage)
    return cell
