"""Run the tests that need a GPU, each in its own process, so that one that hangs costs no other.

It needs pytest, but none of its plugins. Warnings do not fail tests here.
Run it with ``python -m benchmarks.gpu.right``; see the README beside it.
"""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from subprocess import PIPE, STDOUT
from time import perf_counter
from typing import Any, NamedTuple

from benchmarks.gpu.limited import ROOT, limited
from benchmarks.gpu.rows import Rows
from benchmarks.gpu.setting import Setting, arguments, read
from benchmarks.report import Figure, Grid

OF_EXTENSIONS = sorted(ROOT.glob("tests/extensions/*/test_gpu.py"))
FILES = ("tests/gpu/test_cuda.py", *(str(file.relative_to(ROOT)) for file in OF_EXTENSIONS))
OF_A_DRY_RUN = 16
"""In a dry run, in which all are skipped, one test in so many is run."""

# Its own settings: those of pyproject.toml name plugins, and turn warnings into errors.
PYTEST = (
    *(sys.executable, "-m", "pytest", "-c", os.devnull, "--rootdir", str(ROOT)),
    *("--import-mode=importlib", "-p", "no:cacheprovider"),
)

ENVIRONMENT = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
TOGETHER: dict[str, Any] = {"stdout": PIPE, "stderr": STDOUT, "env": ENVIRONMENT}


class Ran(NamedTuple):
    """A test, and how it ended."""

    test: str
    outcome: str
    seconds: float
    output: str


def main(given: Sequence[str] | None = None) -> int:
    """Run the benchmark; returns 1 if a test failed or was not run."""
    parser = arguments(str(__doc__).partition("\n")[0])
    parser.add_argument(
        "--files", nargs="+", default=FILES, help="test files, relative to the repository's root"
    )
    parser.add_argument("--processes", type=int, default=4, help="tests that run at once")
    parser.add_argument("--seconds", type=float, default=90.0, help="time limit of a test")
    parser.add_argument(
        "--sanitizer",
        action="store_true",
        help="let torch watch for streams that read or write the same memory in no order",
    )
    setting, own = read(parser, given)
    settings = {
        "processes": own.processes,
        "limit": f"{own.seconds:g} s a test",
        "TORCH_CUDA_SANITIZER": "1" if own.sanitizer else "not set",
    }
    name = "right-sanitizer" if own.sanitizer else "right"
    rows = Rows(setting, name, "The tests that need a GPU", settings)
    cells: list[tuple[str, ...]] = []
    rows.grids.append(Grid(("test", "outcome", "seconds"), cells))
    tests: list[str] = []
    for file in own.files:
        tests += rows.measure(file, partial(collect, file, own.seconds)) or []
    if setting.dry_run:
        tests = tests[::OF_A_DRY_RUN]
    count: Counter[str] = Counter()
    run_one = partial(run, seconds=own.seconds, setting=setting, sanitizer=own.sanitizer)
    with ThreadPoolExecutor(own.processes) as pool:
        for ran in pool.map(run_one, tests):
            count[ran.outcome] += 1
            cells.append((ran.test, ran.outcome, f"{ran.seconds:.1f}"))
            print(f"{ran.outcome:8} {ran.test}", flush=True)
            if ran.outcome not in ("passed", "skipped"):
                print(ran.output, flush=True)
                lines = ran.output.split("\n")
                rows.missing[ran.test] = next((x for x in lines if x[:2] == "E "), ran.outcome)
            rows.figures = [Figure(outcome, number) for outcome, number in count.items()]
            rows.publish()
    return rows.end()


def collect(file: str, seconds: float) -> list[str]:
    """The names of a file's tests.

    Raises:
        RuntimeError: they cannot be collected.
    """
    command = [*PYTEST, "--collect-only", "-q", file]
    status, output = limited(command, seconds, **TOGETHER)
    if status:
        raise RuntimeError(f"its tests cannot be collected: {output[-2000:]}")
    names = (line.partition("::")[2] for line in output.splitlines())
    return [f"{file}::{name}" for name in names if name]


def run(test: str, seconds: float, setting: Setting, sanitizer: bool = False) -> Ran:
    """Run one test, in a process that is killed when its time is up."""
    if setting.over:
        return Ran(test, "not run", 0.0, "no time was left")
    start = perf_counter()
    how = {**TOGETHER, "env": {**ENVIRONMENT, "TORCH_CUDA_SANITIZER": "1"}}
    try:
        status, output = limited(
            [*PYTEST, "-q", "-rs", test], seconds, **(how if sanitizer else TOGETHER)
        )
    except Exception as error:  # such as one of the system, which has no process left
        return Ran(test, "not run", 0.0, f"E {type(error).__name__}: {error}")
    match status:
        case None:
            outcome = f"took more than {seconds:g} s"
        case 0:
            outcome = "passed" if " passed" in output else "skipped"
        case 1:
            outcome = "failed"
        case _:
            outcome = f"ended with {status}"
    return Ran(test, outcome, perf_counter() - start, output)


if __name__ == "__main__":
    sys.exit(main())
