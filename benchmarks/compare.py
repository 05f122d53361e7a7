"""Compare fxpipe with its peers on two CPU devices, with equal models, batches and threads.

Each contender runs in its own processes, and they take turns step by step. If a contender cannot
run a case, the report shows its error. Run it with ``make compare`` on an idle machine; it takes
about ten minutes.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping
from importlib.metadata import PackageNotFoundError, version
from statistics import median, quantiles

from rich.progress import Progress

from benchmarks.machine import describe
from benchmarks.peers.case import CASES, DEVICES
from benchmarks.peers.contenders import (
    CONTENDERS,
    LATE_TURN,
    LIMIT,
    LOOP,
    PIPELINING,
    RANKS,
    THREADS,
)
from benchmarks.peers.contenders import OURS as ONE
from benchmarks.peers.contest import WARM_UP, Contest, Run, hold
from benchmarks.peers.picture import draw
from benchmarks.report import RESULTS, Figure, Grid, Report

OURS = "fxpipe"
PEERS = tuple(name for name in CONTENDERS if name.startswith("torch"))
MIB = 2**20


def main() -> int:
    """Run the benchmark; returns 1 if fxpipe's losses are not those of the loop."""
    parser = argparse.ArgumentParser(description="Time fxpipe beside its peers on a CPU.")
    parser.add_argument(
        "--rounds", type=int, help="timed steps per contender; by default those of the case"
    )
    parser.add_argument("--case", action="append", choices=list(CASES), help="by default all")
    arguments = parser.parse_args()
    machine = describe()
    contests: dict[str, Contest] = {}
    with Progress() as progress:
        for name in arguments.case or CASES:
            rounds = arguments.rounds or CASES[name].rounds
            task = progress.add_task(name, total=WARM_UP + rounds)
            for contest in hold(name, rounds):
                contests[name] = contest
                progress.advance(task)
    picture = f"compare-{machine.date}.svg"
    RESULTS.mkdir(parents=True, exist_ok=True)
    draw({CASES[name].title: bars(c) for name, c in contests.items()}, OURS, RESULTS / picture)
    Report(
        name="compare",
        title="fxpipe beside its peers, two CPU devices",
        settings=settings(contests),
        figures=[figure for name, contest in contests.items() for figure in figures(name, contest)],
        machine=machine,
        grids=[grid(name, contest) for name, contest in contests.items()],
        pictures=[picture],
        samples={
            f"{name}, {who}": [step.seconds for step in run.counted]
            for name, contest in contests.items()
            for who, run in contest.runs.items()
        },
    ).publish()
    ours = [who for who, it in CONTENDERS.items() if who.startswith(OURS)]
    return 0 if all(contest.same(who) for contest in contests.values() for who in ours) else 1


def seconds_of(run: Run) -> float | None:
    """The median of its steps, where it made them all."""
    return None if run.error else median(step.seconds for step in run.counted)


def figures(name: str, contest: Contest) -> Iterator[Figure]:
    """How much faster 1F1B is here than each peer, how near it comes to what the two cores can do,
    and what a peer said that cannot run it."""
    ours = seconds_of(contest.runs[ONE])
    for who in (*PEERS, LIMIT):
        theirs = seconds_of(contest.runs[who])
        if ours and theirs:
            yield Figure(f"{name}: {who} over {ONE}", theirs / ours)
    ranks = seconds_of(contest.runs[RANKS])
    for who in (PIPELINING, THREADS):
        theirs = seconds_of(contest.runs[who])
        if ranks and theirs:
            yield Figure(f"{name}: {who} over {RANKS}", theirs / ranks)
    for who, run in contest.runs.items():
        if run.error:
            yield Figure(f"{name}: {who} cannot run it", " ".join(run.error.split()))


def grid(name: str, contest: Contest) -> Grid:
    """A row for each contender."""
    headings = (
        name,
        "ms",
        "deciles",
        "speed",
        "cpu ms",
        "MiB",
        "own",
        "first s",
        "losses",
    )
    alone = seconds_of(contest.runs[LOOP])
    rows = []
    for who, run in contest.runs.items():
        middle = seconds_of(run)
        if middle is None or alone is None or run.memory is None:
            rows.append([who, "–", *[""] * (len(headings) - 2)])
            continue
        deciles = quantiles((step.seconds for step in run.counted), n=10, method="inclusive")
        memory = run.memory
        rows.append(
            [
                who,
                three(1e3 * middle),
                f"{three(1e3 * deciles[0])}–{three(1e3 * deciles[-1])}",
                f"{alone / middle:.2f}",
                three(1e3 * median(step.cpu for step in run.counted)),
                f"{memory.peak / MIB:.0f}",
                f"{(memory.peak - memory.imported) / MIB:.0f}",
                f"{run.set_up:.2f}",
                contest.losses(who),
            ]
        )
    return Grid(headings, rows)


def three(number: float) -> str:
    """Three digits, or all before the point."""
    return f"{number:.0f}" if number >= 100 else f"{number:.3g}"


def bars(contest: Contest) -> Mapping[str, list[float] | str]:
    """What is drawn."""
    return {
        who: "cannot run it" if run.error else [step.seconds for step in run.counted]
        for who, run in contest.runs.items()
    }


def settings(contests: Mapping[str, Contest]) -> dict[str, str | int]:
    """What ran, in words."""
    cases = {name: CASES[name] for name in contests}
    return {
        **{
            name: f"{case.title}, in {case.microbatches} micro-batches, mean squared error, "
            f"{len(contests[name].runs[LOOP].counted)} rounds"
            for name, case in cases.items()
        },
        "threads": f"{DEVICES} in all, and one where it says so; every process of "
        "torch.distributed.pipelining and every rank has one",
        "torch pipelining": "torch.distributed.pipelining, 1F1B, a process for each device; so is "
        f"{RANKS}; {THREADS}: a thread for each device, whatever is predicted",
        LIMIT: "in two processes of one thread, each of which makes whole steps by itself: half of "
        "the time of two steps. No pipeline over two cores can be much faster",
        "halves": "fxpipe cuts for itself; torchgpipe and torch.distributed.pipelining are given "
        "equal halves: "
        + ", ".join(f"{name} at {', '.join(case.cuts)}" for name, case in cases.items()),
        "ms": "of a step, median; deciles: the first and the last",
        "speed": "median of the loop of one thread over the contender's",
        "cpu ms": "processor time of all processes and threads, median",
        "MiB": "resident memory at most, added up over processes; own: above what it was after "
        "imports",
        "first s": "seconds until the first step is done, without imports",
        "torchgpipe": _version("torchgpipe") + ", checkpoint='never'",
        "2bw": f"{LATE_TURN} steps in a row and a flush, which counts for a {LATE_TURN}th",
        "losses": "the same bits, or the largest relative difference; of every step, beside those "
        "of the loop of one thread; 2BW's beside those of a loop whose gradients are one version "
        "late, as 2BW's are",
    }


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


if __name__ == "__main__":
    sys.exit(main())
