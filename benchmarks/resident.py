"""Resident memory of fxpipe and its peers, while they compile and while they train.

Each contender trains in processes of its own. Linux counts what is resident there: at most until
the first step is done, which includes compiling; at most in later steps; and between two steps.
What the process had when it had imported everything does not count. CPU devices share the memory of
the machine, so the sum over all devices is shown beside what the devices' tensors must take.
Run it with ``python -m benchmarks.resident [case ...]``.
"""

from __future__ import annotations

import argparse
from contextlib import ExitStack
from statistics import median
from typing import NamedTuple

from benchmarks.machine import Machine, describe
from benchmarks.peers.case import RESIDENT
from benchmarks.peers.contenders import GPIPE, LOOP, META, OURS, PIPELINING, RANKS
from benchmarks.peers.group import Group, GroupError
from benchmarks.report import Figure, Grid, Report

WHO = (
    LOOP,
    GPIPE,
    "torchgpipe, recompute",
    PIPELINING,
    "fxpipe gpipe",
    OURS,
    RANKS,
    META,
    "fxpipe zb-h1",
    "fxpipe 2bw",
    "fxpipe 1f1b, recompute",
)

WARM_UP, STEPS = 3, 3
MIB = 2**20


class Resident(NamedTuple):
    """Bytes above what was resident after imports, summed over a contender's processes.

    Attributes:
        first: at most until the end of the first step.
        peak: at most in the steps after the warm-up.
        rest: after the last step.
    """

    first: int
    peak: int
    rest: int


def train(contender: str, case: str) -> Resident:
    """Let a contender train alone. Raises GroupError if it fails."""
    with ExitStack() as stack:
        group = Group(contender, case)
        stack.callback(group.close)
        group.imported()
        group.set_up()
        group.step()
        first = group.memory()
        for _ in range(WARM_UP - 1):
            group.step()
        group.reset()
        for _ in range(STEPS):
            group.step()
        last = group.memory()
        base = last.imported
        return Resident(first.peak - base, last.peak - base, last.now - base)


def measured(case: str, rounds: int) -> dict[str, Resident | str]:
    """Contender → the medians of its rounds, in which all take turns, or why it failed."""
    found: dict[str, list[Resident]] = {who: [] for who in WHO}
    errors: dict[str, str] = {}
    for _ in range(rounds):
        for who in WHO:
            try:
                found[who].append(train(who, case))
            except GroupError as error:
                errors[who] = str(error)
    return {
        who: errors[who]
        if who in errors
        else Resident(*(round(median(column)) for column in zip(*of, strict=True)))
        for who, of in found.items()
    }


def grid(case: str, found: dict[str, Resident | str]) -> Grid:
    """A row for each contender."""
    headings = [f"{case}: MiB above imports", "first step", "steps", "between steps"]
    rows = []
    for who, of in found.items():
        cells = [of, "", ""] if isinstance(of, str) else [f"{size / MIB:.0f}" for size in of]
        rows.append([who, *cells])
    return Grid(headings, rows)


def figures(case: str, found: dict[str, Resident | str]) -> list[Figure]:
    """How fxpipe compares with the peer of the same schedule."""
    pairs = [(OURS, PIPELINING), (RANKS, PIPELINING), ("fxpipe gpipe", GPIPE)]
    made = []
    for ours, theirs in pairs:
        mine, others = found[ours], found[theirs]
        if isinstance(mine, Resident) and isinstance(others, Resident):
            made.append(Figure(f"{case}: {ours} over {theirs}, steps", mine.peak / others.peak))
    for who in (OURS, META):
        mine = found[who]
        if isinstance(mine, Resident):
            made.append(Figure(f"{case}: {who}, first step over steps", mine.first / mine.peak))
    return made


def main() -> None:
    """Measure and write the report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cases", nargs="*", help=f"of {', '.join(RESIDENT)}; by default all")
    parser.add_argument("--rounds", type=int, default=3)
    own = parser.parse_args()
    machine: Machine = describe()
    made: dict[str, dict[str, Resident | str]] = {}
    for case in own.cases or RESIDENT:
        made[case] = measured(case, own.rounds)
        print("\n".join(grid(case, made[case]).markdown()), flush=True)
        report(made, own.rounds, machine).publish()  # a run that is stopped leaves what it has


def report(made: dict[str, dict[str, Resident | str]], rounds: int, machine: Machine) -> Report:
    """What is measured of these cases so far."""
    return Report(
        name="resident",
        title="Resident memory of fxpipe beside its peers, on CPU devices",
        settings={
            "memory": "of Linux, above what each process had after its imports (with all that an "
            "export imports, and fxpipe's first compilation), in MiB, summed "
            "over the processes; medians of the rounds, in which all take turns",
            "first step": "at most, with all compiling",
            "steps": f"at most in {STEPS} steps after {WARM_UP}",
            "rounds": rounds,
            **{name: RESIDENT[name].title for name in made},
        },
        figures=[figure for case, found in made.items() for figure in figures(case, found)],
        machine=machine,
        grids=[grid(case, found) for case, found in made.items()],
    )


if __name__ == "__main__":
    main()
