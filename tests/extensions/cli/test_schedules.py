"""Schedules on the command line: shown, drawn and compared."""

from __future__ import annotations

import io
import re
import sys
from pathlib import Path

import pytest

from fxpipe.extensions.cli import main
from fxpipe.schedules import gpipe
from tests.conftest import Golden
from tests.extensions.cli.command_line import run


@pytest.mark.smoke
@pytest.mark.parametrize(
    "line",
    [
        "schedule zb-h1 -p 4 -m 8",
        "schedule interleaved-1f1b -p 2 -m 4 --width 60",
        "schedule 2bw -p 2 -m 2 --steps 3",
        "schedule 1f1b -p 2 -m 3 --costs F=1,B=1.5,F@1=2",
        "schedule 1f1b -p 2 -m 3 --costs F=1,B=2,F1@1=3,B2@0=4",
        "schedule 1f1b -p 2 -m 3 --costs F=2,B=3",
        "schedule 1f1b -p 3 -m 4 --text",
    ],
)
def test_a_schedule_is_shown(
    line: str, capsys: pytest.CaptureFixture[str], golden: Golden, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "40")  # The output of a pipe is the same everywhere.
    status, out, err = run(capsys, *line.split())
    assert err == ""
    assert status == 0
    name = re.sub(r"[^\w.]+", "_", line.replace("schedule", "cli"))
    golden(f"{name}.txt", out)


def test_a_terminal_decides_how_wide_the_grid_is(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setenv("COLUMNS", "50")
    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    assert main(["schedule", "1f1b", "-p", "2", "-m", "8"]) == 0
    grid = terminal.getvalue().split("\n1f1b")[0]
    assert 40 < max(map(len, grid.splitlines())) <= 50


def test_the_text_can_be_read_back(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    _, text, _ = run(capsys, "schedule", "zb-v", "-p", "2", "-m", "3", "--text")
    path = tmp_path / "zb-v.txt"
    path.write_text(text)
    assert run(capsys, "schedule", path, "--text") == (0, text, "")
    assert run(capsys, "verify", path) == (0, f"{path}: a valid schedule\n", "")


# Not a PDF: it holds the second in which it was made.
@pytest.mark.parametrize("ending", ["svg", "png", "jpg"])
def test_a_picture_is_written(
    ending: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / f"picture.{ending}"
    status, out, err = run(
        capsys, "schedule", "gpipe", "-p", "1", "-m", "2", "--draw", path, "--text"
    )
    assert (status, err) == (0, f"wrote {path}\n")
    assert out == str(gpipe(1, 2))
    assert path.read_bytes() == gpipe(1, 2).draw().pipe(ending)


def test_a_schedule_with_faults_is_shown_with_them(
    capsys: pytest.CaptureFixture[str], faulty: Path, golden: Golden, tmp_path: Path
) -> None:
    line = ["schedule", str(faulty)]
    status, out, err = run(capsys, *line)
    assert (status, err) == (1, "")
    golden("cli_faults.txt", out)
    assert run(capsys, *line, "--text")[0] == 1
