"""Run GPU scripts, each in a process that is killed when its time is up.

``python -m benchmarks.gpu`` runs all scripts; ``python -m benchmarks.gpu right`` runs those of one
call, within minutes. ``--dry-run`` tries either on CPU devices.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from time import perf_counter
from typing import NamedTuple

from benchmarks.gpu.limited import limited
from benchmarks.gpu.setting import arguments
from benchmarks.gpu.workloads import NAMES


class Part(NamedTuple):
    """A script and how long it may take.

    Attributes:
        words: the script and its arguments.
        minutes: the time after which it begins no more rows.
        grace: further minutes in which it may finish its current row.
    """

    words: tuple[str, ...]
    minutes: float
    grace: float


def part(words: str, minutes: float = 6.5, grace: float = 1.0) -> Part:
    return Part(tuple(words.split()), minutes, grace)


EVERYTHING = (
    part("right", grace=2.0),
    part("spin"),
    *(part(f"stages --models {name}") for name in NAMES),
    part("overlap"),
    *(part(f"scaling --models {name}") for name in ("unet", "amoebanet")),
    part("ablation"),
    *(part(f"memory --models {name}") for name in ("unet", "gpt2")),
)


class Call(NamedTuple):
    """Scripts to run one after another, and the most minutes that they take together."""

    minutes: float
    parts: tuple[Part, ...]


CALLS = {
    "right": Call(5.5, (part("right --processes 12 --seconds 60", 4.0, 1.5),)),
    "figures": Call(
        7.0,
        (
            part("spin", 1.0, 0.5),
            part("overlap", 1.0, 0.5),
            part("memory --models gpt2 --schedules 1f1b 2bw --modes never always", 1.5, 0.5),
            part("stages --models gpt2 --dispatch thread --stages 1 2 8", 1.5, 0.5),
        ),
    ),
}
"""The first quarter of an hour on a GPU: are results right; and how long do devices wait for hosts,
what of the copies is hidden, is memory as predicted, and what do stages cost?"""


def main(given: Sequence[str] | None = None) -> int:
    """Run the scripts; returns exit status 0 if all of them do."""
    parser = arguments(str(__doc__).partition("\n")[0])
    parser.set_defaults(minutes=None)
    parser.add_argument("call", nargs="?", choices=CALLS, help="by default all scripts are run")
    parser.add_argument(
        "--sanitizer", action="store_true", help="for the tests: see benchmarks.gpu.right --help"
    )
    own = parser.parse_args(given)
    handed = ["--rounds", str(own.rounds), *(["--dry-run"] if own.dry_run else [])]
    if own.output is not None:
        handed += ["--output", str(own.output.resolve())]
    start = perf_counter()
    failed = []
    most, parts = CALLS.get(own.call, Call(math.inf, EVERYTHING))
    for words, usual, grace in parts:
        name = " ".join(words)
        minutes = usual if own.minutes is None else own.minutes
        limit = min(minutes + grace, most - (perf_counter() - start) / 60)
        if limit <= 0:
            failed.append(f"{name} (no time was left)")
            continue
        print(name, flush=True)
        module, *arguments_ = words
        if own.sanitizer and module == "right":
            arguments_.append("--sanitizer")
        command = [sys.executable, "-m", f"benchmarks.gpu.{module}", *arguments_, *handed]
        status, _ = limited([*command, "--minutes", str(minutes)], 60 * limit)
        if status is None:
            failed.append(f"{name} (killed after {limit:.1f} minutes)")
        elif status:
            failed.append(f"{name} (exit status {status})")
    print("not whole: " + "; ".join(failed) if failed else "all done")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
