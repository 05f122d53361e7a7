"""The commands. Each returns True if the schedule, plan or program that it read has no faults."""

from __future__ import annotations

import inspect
import re
import shutil
import sys
from argparse import Namespace
from collections.abc import Iterable

from rich import box
from rich.console import Console
from rich.table import Table

from fxpipe.cli.formulas import formulas_text
from fxpipe.cli.read import read_file, read_schedule
from fxpipe.errors import InputError, VerificationError
from fxpipe.ir.recipe import RECIPES, Recipe
from fxpipe.ir.schedule import Schedule
from fxpipe.simulator import simulate_schedule

_WIDTH = 100
_SHOWN = 200_000
_COST = re.compile(r"(?P<letter>\w)(?:@(?P<stage>[0-9]{1,9}))?=(?P<time>\S+)")


def list_schedules(given: Namespace) -> bool:
    """``fxpipe list``: every schedule that has a name."""
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    table.add_column("name", no_wrap=True)
    table.add_column("stages", justify="right")
    table.add_column("what it does")
    for name, recipe in sorted(RECIPES.items()):
        table.add_row(name, f"{recipe.stages(1)} a device", _summary(recipe))
    print(_plain(table))
    return True


def show_schedule(given: Namespace) -> bool:
    """``fxpipe schedule``: the grid, the figures and the formulas of one schedule."""
    schedule, recipe = read_schedule(given.schedule, given.devices, given.microbatches)
    costs = read_costs(given.costs)
    fault = _fault(schedule)
    sound = fault is None
    tasks = sum(map(len, schedule.rows)) * (given.steps or 1)
    shown = given.all or tasks <= _SHOWN
    if given.draw is not None:
        _wrote(schedule.draw(costs=costs, steps=given.steps).render(given.draw))
    simulation = None
    if sound and (given.trace is not None or (shown and not given.text)):
        simulation = simulate_schedule(schedule, costs, steps=given.steps)
    if given.trace is not None:
        if simulation is None:
            raise InputError(
                f"schedule {schedule.name!r} has faults, and never runs to its end; leave --trace "
                "out to see them"
            )
        simulation.trace(given.trace)
        _wrote(given.trace)
    if given.text:
        print(schedule, end="")
        return sound
    width = given.width
    if width is None and sys.stdout.isatty():
        width = shutil.get_terminal_size().columns
    if shown:
        print(schedule.grid(costs=costs, steps=given.steps, width=width))
    else:
        print(
            f"{schedule.name}: the grid and the figures of {tasks} tasks, more than {_SHOWN}, are "
            "left out; --all shows them"
        )
        if fault is not None:
            print(fault)
    if simulation is not None:
        print(f"\n{simulation}", flush=True)  # The formulas take a few seconds.
    if sound and given.formulas and (shown or recipe is not None):
        print(f"\n{formulas_text(schedule, recipe, costs)}")
    return sound


def verify_file(given: Namespace) -> bool:
    """``fxpipe verify``: all faults of a text or of a schedule."""
    value = read_file(given.file, given.devices, given.microbatches)
    try:
        value.verify()
    except VerificationError as error:
        print(error)
        return False
    print(f"{given.file}: a valid {type(value).__name__.lower()}")
    return True


def read_costs(text: str | None) -> dict[str | tuple[str, int], float] | None:
    """``F=1,B@3=2.5`` → the time of each kind of task, for all stages or for one.

    Raises:
        InputError: the text is not written like that.
    """
    if text is None:
        return None
    costs: dict[str | tuple[str, int], float] = {}
    for item in text.split(","):
        match = _COST.fullmatch(item.strip())
        try:
            assert match is not None
            time = float(match["time"])
        except (AssertionError, ValueError):
            raise InputError(
                f"--costs has {item.strip()!r}; write a kind of task and its time, such as F=1, "
                "or of one stage alone, F@3=1.5"
            ) from None
        costs[match["letter"] if match["stage"] is None else _key(match)] = time
    return costs


def _key(match: re.Match[str]) -> tuple[str, int]:
    return match["letter"], int(match["stage"])


def _wrote(path: str) -> None:
    """Report a written file on standard error, apart from the command's output."""
    print(f"wrote {path}", file=sys.stderr)


def _fault(schedule: Schedule) -> VerificationError | None:
    try:
        schedule.verify()
    except VerificationError as error:
        return error
    return None


def _summary(recipe: Recipe) -> str:
    """The first sentence of the generator's description."""
    text = " ".join((inspect.getdoc(recipe.tasks) or "").split("\n\n")[0].split())
    return text.partition(". ")[0].rstrip(".:")


def _plain(*renderables: object) -> str:
    """Rich renderables as plain text of a fixed width, independent of the terminal."""
    console = Console(width=_WIDTH, color_system=None)
    with console.capture() as capture:
        console.print(*renderables)
    return "\n".join(_stripped(capture.get().splitlines()))


def _stripped(lines: Iterable[str]) -> Iterable[str]:
    return (line.rstrip() for line in lines)
