"""Plant one fault at a time in the order of what devices run, and see whether it is noticed.

    python -m tests.simcuda.mutants [--jobs N] [part of a name …]

Prints a table: each fault, and what noticed it: the verifier, races, other values, or waits of the
host. Ends with 1 if a fault goes unnoticed, or cannot be planted since the code has changed. Each
is planted in a process of its own, as new code of the functions that are there already.
"""

from __future__ import annotations

import argparse
import sys
from functools import cache
from multiprocessing import get_context

from tests.simcuda import planted
from tests.simcuda.faults import FAULTS
from tests.simcuda.process import on_devices


@cache
def wanted(scene: str) -> planted.Values:
    """What a scene computes on CPU devices."""
    values: planted.Values = on_devices(planted.on_cpu, scene)
    return values


def noticed(name: str) -> list[str]:
    """What a fault makes go wrong in its first scene where anything does. Raises LookupError."""
    fault = FAULTS[name]
    for scene in fault.scenes:
        try:
            found = on_devices(
                planted.problems, scene, wanted(scene), fault, **planted.SCENES[scene].options
            )
        except AssertionError as error:
            if "LookupError" in str(error):
                raise LookupError("cannot be planted, as the code has changed") from None
            if "its process has ended" not in str(error):
                raise
            found = [f"no end after {planted.PATIENCE} s"]
        if found:
            return [f"{scene}: {found[0]}"]
    return []


def _row(name: str) -> tuple[str, str, bool]:
    try:
        found = noticed(name)
    except LookupError as error:
        return name, str(error), False
    reason = FAULTS[name].equivalent
    if found:
        return name, found[0], not reason
    return name, f"equivalent: {reason}" if reason else "NOT NOTICED", bool(reason)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.simcuda.mutants")
    parser.add_argument("--jobs", type=int, default=1, help="how many faults at a time")
    parser.add_argument("names", nargs="*", help="parts of names of faults; by default all")
    given = parser.parse_args()
    names = [n for n in FAULTS if not given.names or any(part in n for part in given.names)]
    good = True
    with get_context("spawn").Pool(given.jobs) as pool:
        for name, told, right in pool.imap(_row, names, chunksize=1):
            print(f"{'' if right else '!! '}{name:<64}  {told[:200]}", flush=True)
            good &= right
    sys.exit(not good)


if __name__ == "__main__":
    main()
