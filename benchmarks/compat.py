"""Run the tests on the oldest and newest supported versions of torch and Python, and between.

Each pair of versions has its own environment, ``.venv-2.11`` and so on, which is created if it is
missing and then kept. A pair whose Python this machine lacks is skipped with a remark; pyenv offers
its versions with ``PYENV_VERSION=3.11:3.12:3.13``. Arguments are passed to pytest.
Run it with ``make compat``.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.machine import describe
from benchmarks.report import RESULTS, Grid, Report

ROOT = Path(__file__).parents[1]
VERSIONS = (("2.11", "3.12"), ("2.13", "3.11"), ("2.15", "3.13"))
"""The versions of torch and Python."""

HEADINGS = ("torch", "Python", "passed", "failed", "skipped", "remarks")
OUTCOMES = ("passed", "failed", "skipped")
ASK = "import platform, torch; print(torch.__version__, platform.python_version())"


def main(given: Sequence[str] | None = None, root: Path = ROOT, results: Path = RESULTS) -> int:
    """Run the tests; returns 1 if a test failed, or an environment could not be made."""
    words = sys.argv[1:] if given is None else given
    rows, failed = list[Sequence[str]](), False
    for torch, python in VERSIONS:
        print(f"torch {torch}, Python {python}", flush=True)
        found = interpreter(python)
        if found is None:
            rows.append((torch, python, "–", "–", "–", f"python{python} was not found"))
            continue
        try:
            own = environment(root, torch, found)
            exact = subprocess.run([own, "-c", ASK], capture_output=True, text=True, check=True)
        except subprocess.CalledProcessError as error:
            rows.append((torch, python, "–", "–", "–", f"no environment: {error}"))
            failed = True
            continue
        status, output = shown([own, "-m", "pytest", "--quiet", *words], root)
        rows.append((*exact.stdout.split(), *counts(output), remark(status, output)))
        failed |= status != 0
    settings = {"commit": commit(root), "arguments of pytest": " ".join(words) or "none"}
    title = "The tests on the oldest torch, on the newest, and between"
    Report("compat", title, settings, [], describe(), [Grid(HEADINGS, rows)]).publish(results)
    return 1 if failed else 0


def interpreter(version: str) -> str | None:
    """Find a Python of a version that runs; a pyenv shim may exist and still fail."""
    ask = "import sys; print('%d.%d' % sys.version_info[:2])"
    for name in (f"python{version}", sys.executable):
        if found := shutil.which(name):
            told = subprocess.run([found, "-c", ask], capture_output=True, text=True)
            if told.stdout.strip() == version:
                return found
    return None


def environment(root: Path, torch: str, python: str) -> str:
    """The Python of an environment with this torch, and with the newest of all else."""
    folder, project = root / f".venv-{torch}", root / "pyproject.toml"
    own, ready = str(folder / "bin" / "python"), folder / "ready"
    if not ready.exists() or ready.stat().st_mtime < project.stat().st_mtime:
        install = [own, "-m", "pip", "install", "--quiet", f"torch=={torch}.*"]
        subprocess.run([python, "-m", "venv", str(folder)], check=True)
        subprocess.run([*install, "setuptools>=77"], check=True)
        words = ["--no-build-isolation", "--editable", f"{root}[test]"]
        subprocess.run([*install, *words], check=True)
        ready.touch()
    return own


def shown(command: Sequence[str], folder: Path) -> tuple[int, str]:
    """Run it; what it prints is shown at once, and returned."""
    lines = []
    with subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", flush=True)
            lines.append(line)
    return process.returncode, "".join(lines)


def counts(output: str) -> list[str]:
    """How many tests had each outcome; an error around a test is a failure."""
    last = output.strip().rpartition("\n")[2]
    found = {word: int(number) for number, word in re.findall(r"(\d+) ([a-z]+)", last)}
    found["failed"] = sum(found.get(word, 0) for word in ("failed", "error", "errors"))
    return [str(found.get(outcome, 0)) for outcome in OUTCOMES]


def remark(status: int, output: str) -> str:
    """The names of failed tests, or that pytest did not finish."""
    named = re.findall(r"^(?:FAILED|ERROR) (\S+)", output, re.MULTILINE)
    return ", ".join(named) or ("" if status in (0, 1) else f"pytest ended with {status}")


def commit(root: Path) -> str:
    """The checkout's commit, and whether files have changed since."""
    command = ["git", "describe", "--always", "--dirty=, with changes"]
    return subprocess.run(command, cwd=root, capture_output=True, text=True).stdout.strip()


if __name__ == "__main__":
    sys.exit(main())
