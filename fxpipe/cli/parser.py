"""The parser of the ``fxpipe`` command line."""

from __future__ import annotations

import argparse
from typing import NoReturn

from fxpipe.cli.commands import list_schedules, show_schedule, verify_file
from fxpipe.cli.read import DEVICES, MICROBATCHES
from fxpipe.errors import InputError

_WHAT = (
    "a name that 'fxpipe list' shows, a file with a schedule's text (- for what is piped in), or "
    "path/to/file.py:name for a schedule of your own: what @fxpipe.schedule made, a function or a "
    "Schedule"
)


class _Parser(argparse.ArgumentParser):
    """A parser that raises InputError with one line, like the rest of the library."""

    def error(self, message: str) -> NoReturn:
        raise InputError(f"{message}; see '{self.prog} --help'")


def make_parser() -> argparse.ArgumentParser:
    """The parser; its result has the function of the command as ``run``."""
    parser = _Parser(prog="fxpipe", description="Look at pipeline schedules, and check them.")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)

    named = commands.add_parser("list", help="the schedules that have a name")
    named.set_defaults(run=list_schedules)

    shown = commands.add_parser(
        "schedule",
        help="a schedule's grid, figures and formulas, or a picture of it",
        description="Show a schedule in time, and what it costs. Exits with 1 if it has faults.",
    )
    shown.add_argument("schedule", metavar="SCHEDULE", help=_WHAT)
    _add_counts(shown)
    shown.add_argument("--text", action="store_true", help="print its text and nothing else")
    shown.add_argument("--draw", metavar="FILE", help="draw it: .svg, .png, .pdf")
    shown.add_argument(
        "--trace", metavar="FILE", help="write a trace that https://ui.perfetto.dev opens"
    )
    shown.add_argument(
        "--costs",
        metavar="F=1,B=2",
        help="how long tasks take, of all stages or of one: F=1,F@3=1.5",
    )
    shown.add_argument(
        "--formulas",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="derive the formulas, which takes a few seconds",
    )
    shown.add_argument(
        "--all", action="store_true", help="the grid and the figures of a huge schedule, too"
    )
    shown.add_argument("--steps", type=int, metavar="N", help="how many steps in a row")
    shown.add_argument(
        "--width", type=int, metavar="N", help="characters a line; by default the terminal's"
    )
    shown.set_defaults(run=show_schedule)

    checked = commands.add_parser(
        "verify",
        help="check a schedule, a plan or a program",
        description="Check a text of any kind, or a schedule. Exits with 1 if it has faults.",
    )
    checked.add_argument(
        "file",
        metavar="FILE",
        help="the text of a schedule, plan or program (- for what is piped in), or path/to/file.py:"
        "name",
    )
    _add_counts(checked)
    checked.set_defaults(run=verify_file)
    return parser


def _add_counts(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "-p",
        "--devices",
        type=int,
        metavar="N",
        help=f"number of devices, where the schedule leaves it open; by default {DEVICES}",
    )
    parser.add_argument(
        "-m",
        "--microbatches",
        type=int,
        metavar="N",
        help=f"micro-batches a step, where it leaves them open; by default {MICROBATCHES}",
    )
