"""The command line: arguments, commands and exit statuses of ``fxpipe``."""

from __future__ import annotations

import argparse
import inspect
import os
import re
import sys
from argparse import Namespace
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import fxpipe
from fxpipe.errors import FxpipeError, InputError, VerificationError
from fxpipe.extend import find, names, there
from fxpipe.extensions.tables import plain_table, screen_width, table_text, wrapped
from fxpipe.ir.program import Program
from fxpipe.ir.recipe import RECIPES, Recipe, find_recipe
from fxpipe.ir.schedule import Schedule

DONE, FAULTY, WRONG = 0, 1, 2
"""Exit statuses: no faults; faults were found; the command could not be carried out."""

_CLOSED = 141

DEVICES, MICROBATCHES = 4, 8
"""The default numbers of devices and micro-batches of a schedule that works with any."""

T = TypeVar("T")

_COST = re.compile(
    r"(?P<letter>\w(?:&\w)?)(?:(?P<microbatch>[0-9]{1,9})?@(?P<stage>[0-9]{1,9}))?=(?P<time>\S+)"
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command, by default with the process's arguments, and return its exit status."""
    try:
        given = make_parser().parse_args(arguments)
        sound = given.run(given)
        print(end="", flush=True)
    except FxpipeError as error:
        print(wrapped(f"fxpipe: {error}", "  ", whole_words=True), file=sys.stderr)
        return WRONG
    except UnicodeEncodeError as error:
        print(f"fxpipe: the output: {error}; set PYTHONIOENCODING=utf-8", file=sys.stderr)
        return WRONG
    except OSError as error:
        if error.filename is None:  # so that the flush at exit does not fail
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if isinstance(error, BrokenPipeError):  # what reads the output, such as ``head``, closed it
            return _CLOSED
        where = error.filename or "the output cannot be written"
        print(f"fxpipe: {where}: {error.strerror}", file=sys.stderr)
        return WRONG
    return DONE if sound else FAULTY


class _Parser(argparse.ArgumentParser):
    """A parser that raises InputError with one line, like the rest of the library."""

    def error(self, message: str) -> NoReturn:
        raise InputError(f"{message}; see '{self.prog} --help'")


def make_parser() -> argparse.ArgumentParser:
    """The parser. The parsed arguments have the command's function as ``run``, which returns True
    if the schedule or program has no faults."""
    parser = _Parser(prog="fxpipe", description="Show and check schedules.")
    parser.add_argument("--version", action="version", version=f"fxpipe {fxpipe.__version__}")
    added = parser.add_subparsers(metavar="COMMAND", required=True)

    named = added.add_parser("list", help="list the library's schedules")
    named.set_defaults(run=list_schedules)

    shown = added.add_parser(
        "schedule",
        help="show a schedule: its grid, figures, or a picture",
        description="Show a schedule over time, and its figures. Exits with 1 if it has faults.",
    )
    add = shown.add_argument
    given = "a name from 'fxpipe list', or a file with a schedule's text (- for standard input)"
    add("schedule", metavar="SCHEDULE", help=given)
    given = f"number of devices, if the schedule leaves it open; by default {DEVICES}"
    add("-p", "--devices", type=int, metavar="N", help=given)
    given = f"micro-batches per step, if it leaves them open; by default {MICROBATCHES}"
    add("-m", "--microbatches", type=int, metavar="N", help=given)
    add("--text", action="store_true", help="print only its text")
    add("--draw", metavar="FILE", help="draw it: .svg, .png, .pdf")
    given = "print only its makespan, bubble and memory in closed form, for any p and m"
    add("--formulas", action="store_true", help=given)
    given = "how long tasks take: all F=1, on stage 3 F@3=1.5, of micro-batch 0 there F0@3=2"
    add("--costs", metavar="F=1,B=2", help=given)
    add("--steps", type=int, metavar="N", help="the number of consecutive steps")
    given = "characters per line; by default the width of the terminal, and 80 in a pipe"
    add("--width", type=int, metavar="N", help=given)
    shown.set_defaults(run=show_schedule)

    checked = added.add_parser(
        "verify",
        help="check a schedule or a program",
        description="Check a schedule or a program. Exits with 1 if it has faults.",
    )
    checked.add_argument(
        "file",
        metavar="FILE",
        help="the text of a schedule or program (- for standard input)",
    )
    checked.set_defaults(run=verify_file)

    for name in names("command"):
        if name != "main" and there("command", name):
            find("command", name)(added)
    return parser


def list_schedules(given: Namespace) -> bool:
    """``fxpipe list``: the library's schedules."""
    table = plain_table()
    table.add_column("name", no_wrap=True)
    table.add_column("stages", justify="right")
    table.add_column("what it does", ratio=1)
    for name, recipe in sorted(RECIPES.items()):
        table.add_row(name, f"{recipe.stages(1)} a device", _summary(recipe))
    print(table_text(table))
    return True


def show_schedule(given: Namespace) -> bool:
    """``fxpipe schedule``: the grid and the figures of one schedule."""
    if given.formulas:
        print(find_recipe(given.schedule).formulas())
        return True
    schedule = named_schedule(given.schedule, given.devices, given.microbatches)
    costs = read_costs(given.costs)
    try:
        sound = bool(schedule.verify())
    except VerificationError:
        sound = False
    if given.draw is not None:
        path = schedule.draw(costs=costs, steps=given.steps).render(given.draw)
        print(f"wrote {path}", file=sys.stderr)  # apart from the command's output
    if given.text:
        print(schedule, end="")
        return sound
    width = screen_width() if given.width is None else given.width
    print(schedule.grid(costs=costs, steps=given.steps, width=width))
    if sound:
        print(f"\n{schedule.simulate(costs, steps=given.steps)}")
    return sound


def verify_file(given: Namespace) -> bool:
    """``fxpipe verify``: all faults of a schedule or program."""
    value = read_file(given.file)
    try:
        value.verify()
    except VerificationError as error:
        print(error)
        return False
    print(f"{given.file}: a valid {type(value).__name__.lower()}")
    return True


def _summary(recipe: Recipe) -> str:
    """The first sentence of the generator's description."""
    text = " ".join((inspect.getdoc(recipe.tasks) or "").split("\n\n")[0].split())
    return text.partition(". ")[0].rstrip(".:")


def read_costs(text: str | None) -> dict[Any, float] | None:
    """Parse ``F=1,B@3=2.5,F0@3=4``: the time of a kind of task, of those on stage 3, and of
    micro-batch 0 there.

    Raises:
        InputError: the text has another form, or gives the same time twice.
    """
    if text is None:
        return None
    costs: dict[Any, float] = {}
    for item in text.split(","):
        match = _COST.fullmatch(item.strip())
        try:
            assert match is not None
            time = float(match["time"])
        except (AssertionError, ValueError):
            raise InputError(
                f"--costs has {item.strip()!r:.99}; write a kind of task and its time, such as "
                "F=1, or of one stage alone, F@3=1.5, or of micro-batch 0 there, F0@3=2"
            ) from None
        letter, *at = match.group("letter", "stage", "microbatch")
        key = (letter, *map(int, filter(None, at))) if any(at) else letter
        if key in costs:
            raise InputError(f"--costs has {item.strip()!r} after another time of it; give one")
        costs[key] = time
    return costs


def named_schedule(named: str, devices: int | None, microbatches: int | None) -> Schedule:
    """Return the schedule that a name or the path of a text means.

    Raises:
        InputError: there is no such schedule, its text does not parse, or it is for other numbers.
    """
    path = Path(named)
    if named in RECIPES or not (path.exists() or path.suffix or path.name != named or named == "-"):
        return find_recipe(named)(
            DEVICES if devices is None else devices,
            MICROBATCHES if microbatches is None else microbatches,
        )
    schedule = _parsed(named, Schedule.parse, _text(path))
    for word, wanted, number in (
        ("devices", devices, schedule.devices),
        ("microbatches", microbatches, schedule.microbatches),
    ):
        if wanted not in (None, number):
            raise InputError(f"{named} is for {number} {word} and not {wanted}; leave that out")
    return schedule


def read_file(named: str) -> Schedule | Program:
    """Read a schedule or program from a file.

    Raises:
        InputError: its text does not parse, or is none of these.
    """
    text = _text(Path(named))
    lines = (line.split("#")[0].split() for line in text.splitlines())
    first = next((words[0] for words in lines if words), "")
    if first == "schedule":
        return _parsed(named, Schedule.parse, text)
    if first == "program":
        return _parsed(named, Program.parse, text)
    what = f"begins with {first!r}" if first else "is empty"
    raise InputError(f"{named} {what}; give a text that begins with 'schedule' or 'program'")


def _text(path: Path) -> str:
    try:
        if str(path) == "-":
            if sys.stdin is None:
                raise InputError("nothing is piped in; name a text file")
            return sys.stdin.read().removeprefix("\ufeff")
        return path.read_text(encoding="utf-8-sig")  # spreadsheets write a byte order mark
    except (OSError, ValueError) as error:
        raise InputError(f"{path} cannot be read: {error}; name a text file") from error


def _parsed(named: str, parse: Callable[[str], T], text: str) -> T:
    try:
        return parse(text)
    except FxpipeError as error:
        raise InputError(f"{named}: {error}") from error
