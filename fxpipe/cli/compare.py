"""``fxpipe compare``: all schedules of the library in one table and one picture."""

from __future__ import annotations

import sys
from argparse import ArgumentParser, Namespace

from fxpipe.cli.read import DEVICES, MICROBATCHES, read_costs
from fxpipe.comparison import compare
from fxpipe.errors import InputError


def add_compare(parser: ArgumentParser) -> None:
    """Give the command's parser its arguments."""
    add = parser.add_argument
    add("-p", "--devices", type=int, metavar="N", default=DEVICES, help=f"by default {DEVICES}")
    given = f"of a step; by default {MICROBATCHES}"
    add("-m", "--microbatches", type=int, metavar="N", default=MICROBATCHES, help=given)
    add("--costs", metavar="F=1,B=2", help="how long tasks take on what one device has of a model")
    add("--memory", type=float, metavar="N", help="micro-batches that a device has room for")
    add("--draw", metavar="FILE", help="draw them: .svg, .png, .pdf")
    parser.set_defaults(run=run_compare)


def run_compare(given: Namespace) -> bool:
    """Compare the schedules, and show them."""
    costs: dict[str, float] = {}
    for key, time in (read_costs(given.costs) or {}).items():
        if not isinstance(key, str):
            raise InputError(
                f"--costs has {key[0]}@{key[1]}, and schedules have different stages; leave out "
                f"the stage: {key[0]}={time:g}"
            )
        costs[key] = time
    found = compare(
        devices=given.devices, microbatches=given.microbatches, costs=costs, memory=given.memory
    )
    if given.draw is not None:
        found.draw().render(given.draw)
        print(f"wrote {given.draw}", file=sys.stderr)
    print(found)
    return True
