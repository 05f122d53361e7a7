"""``fxpipe search``: finds the best schedule for given times and compares the library's."""

from __future__ import annotations

import sys
from argparse import BooleanOptionalAction, Namespace, _SubParsersAction
from pathlib import Path
from typing import Any

from fxpipe.errors import InputError
from fxpipe.extensions.cli.read import DEVICES, MICROBATCHES, read_costs
from fxpipe.extensions.search.search import Found, search_schedule
from fxpipe.extensions.simulator.costs import Link
from fxpipe.formatting import plain_table, screen_width, table_text, wrapped
from fxpipe.ir.recipe import Placement, one_each, round_robin, vee


def add_search(commands: _SubParsersAction[Any]) -> None:
    """Add the command to those of the command line."""
    parser = commands.add_parser(
        "search",
        help="find the best schedule for given times, and show how good it is",
        description="Search for the fastest schedule within a memory limit. Show it beside the "
        "library's schedules, with a lower bound for any schedule.",
    )
    add = parser.add_argument
    add("-p", "--devices", type=int, metavar="N", help=f"devices; by default {DEVICES}")
    given = f"micro-batches per step; by default {MICROBATCHES}"
    add("-m", "--microbatches", type=int, metavar="N", default=MICROBATCHES, help=given)
    add(
        "--costs",
        metavar="F=1,I=1,W=1",
        help="how long tasks take: F=1,F@3=1.5; B: whole backwards",
    )
    add(
        "--placement",
        metavar="each|v|loop=N",
        help="one stage per device, the V, or N stages per device round robin; by default the "
        "usual placements are searched",
    )
    given = "how many micro-batches a device may keep for backward"
    add("--memory", metavar="N[,N...]", help=given)
    add("--latency", type=float, default=0.0, metavar="T", help="time of a transfer")
    add(
        "--flush",
        action=BooleanOptionalAction,
        default=True,
        help="minimise the time of one step; with --no-flush, of each of many consecutive steps",
    )
    add("--seconds", type=float, default=10.0, metavar="T", help="time limit")
    given = "the number of list schedules to try, instead of --seconds"
    add("--work", type=int, metavar="N", help=given)
    add("--seed", type=int, default=0, metavar="N", help="seed of the random choices")
    add("--text", action="store_true", help="print only the schedule's text")
    add("--draw", metavar="FILE", help="draw it: .svg, .png, .pdf")
    add("--csv", metavar="FILE", help="write it as the CSV of torch.distributed.pipelining")
    parser.set_defaults(run=run_search)


def run_search(given: Namespace) -> bool:
    """Search, then print the schedule, its bound and the times of the library's schedules."""
    costs = read_costs(given.costs)
    placement = _placement(given.placement)
    devices = given.devices
    named = [key for key in costs or () if not isinstance(key, str)]
    if devices is None and (not named or placement is not None):
        devices = DEVICES
    found = search_schedule(
        costs or {},
        given.microbatches,
        devices=devices,
        placement=placement,
        memory=_memory(given.memory),
        links=Link(given.latency) if given.latency else None,
        flush=given.flush,
        seconds=given.seconds,
        work=given.work,
        seed=given.seed,
    )
    schedule = found.schedule
    if given.draw is not None:
        schedule.draw(costs=costs).render(given.draw)
        print(f"wrote {given.draw}", file=sys.stderr)
    if given.csv is not None:
        Path(given.csv).write_text(schedule.csv(), encoding="utf-8")
        print(f"wrote {given.csv}", file=sys.stderr)
    if given.text:
        print(schedule, end="")
    else:
        grid = schedule.grid(costs=costs, width=screen_width())
        print(f"{grid}\n\n{found}\n\n{library_table(found)}")
    return True


def library_table(found: Found) -> str:
    """Return a table of the times of the schedule found and of the library's schedules."""
    table = plain_table()
    table.add_column("schedule", no_wrap=True)
    table.add_column("time", justify="right")
    table.add_column("above the bound", justify="right")
    timed = [(found.schedule.name, found.value)]
    timed += [(name, time) for name, time in found.library.items() if not isinstance(time, str)]
    for name, time in sorted(timed, key=lambda row: row[1]):
        above = f"{time / found.bound - 1:.1%}" if found.bound else ""
        table.add_row(name, f"{time:.6g}", above)
    without: dict[str, list[str]] = {}
    for name, why in found.library.items():
        if isinstance(why, str):
            without.setdefault(why, []).append(name)
    rest = (wrapped(f"{why}: {', '.join(names)}", "  ") for why, names in without.items())
    return "\n".join([table_text(table), "", *rest])


def _placement(text: str | None) -> Placement | None:
    if text is None:
        return None
    word, _, count = text.partition("=")
    if text in ("each", "v"):
        return {"each": one_each, "v": vee}[text]
    if word == "loop" and count.isdecimal():
        return round_robin(int(count))
    raise InputError(f"--placement is {text!r}; write each, v, or loop=2 for two a device")


def _memory(text: str | None) -> float | list[float] | None:
    """Parse ``--memory``: one number, or one for each device."""
    if text is None:
        return None
    try:
        most = [float(number) for number in text.split(",")]
    except ValueError:
        raise InputError(
            f"--memory is {text!r}; write a number, or one for each device: 4,4,3"
        ) from None
    return most if len(most) > 1 else most[0]
