"""A compilation that takes long says so, and leaves nothing behind on the terminal."""

from __future__ import annotations

import logging
import os
import pty
import re
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

import pytest

from fxpipe import log
from fxpipe.log import reported, telling

LONGEST = 20.0
"""Seconds to wait for what must come."""


class Terminal:
    """A terminal that is standard error, and what was written to it."""

    def __init__(self) -> None:
        self._reader, writer = pty.openpty()
        os.set_blocking(self._reader, False)
        self.file: TextIO = os.fdopen(writer, "w")
        self._shown = ""

    @property
    def shown(self) -> str:
        try:
            while part := os.read(self._reader, 1 << 16):
                self._shown += part.decode()
        except BlockingIOError:
            pass
        return self._shown

    def waits_for(self, text: str) -> None:
        until = time.monotonic() + LONGEST
        while text not in self.shown:
            assert time.monotonic() < until, f"{text!r} is not in {self.shown!r}"
            time.sleep(0.01)

    def close(self) -> None:
        self.file.close()
        os.close(self._reader)

    def screen(self) -> list[str]:
        """The lines that are left on the screen."""
        lines, row, column = [""], 0, 0
        for part in re.findall(r"\x1b\[[?\d]*[a-zA-Z]|[\r\n]|[^\x1b\r\n]+", self.shown):
            if part == "\n":
                row, column = row + 1, 0
                lines += [""] * (row + 1 - len(lines))
            elif part == "\r":
                column = 0
            elif up := re.fullmatch(r"\x1b\[(\d*)A", part):
                row -= int(up[1] or 1)
            elif part == "\x1b[2K":
                lines[row] = ""
            elif not part.startswith("\x1b"):
                lines[row] = lines[row].ljust(column)[:column] + part
                column += len(part)
        return [line for line in lines if line.strip()]


@contextmanager
def on_a_terminal() -> Iterator[Terminal]:
    made = Terminal()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TERM", "xterm")
        patch.setattr(sys, "stderr", made.file)
        try:
            yield made
        finally:
            made.close()


@pytest.fixture
def told(caplog: pytest.LogCaptureFixture) -> Iterator[list[str]]:
    """What the logger is told at level INFO and above, as it is told."""
    caplog.set_level(logging.INFO, "fxpipe")

    class Messages(list[str]):
        def __iter__(self) -> Iterator[str]:
            return iter([record.getMessage() for record in caplog.records])

    yield Messages()


def waits_for(told: list[str], text: str) -> None:
    until = time.monotonic() + LONGEST
    while not any(text in each for each in told):
        assert time.monotonic() < until, f"{text!r} is not told"
        time.sleep(0.01)


def test_a_terminal_shows_the_pass_that_runs_and_in_the_end_nothing(
    told: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log, "PATIENCE", 0.0)
    with on_a_terminal() as terminal:
        with reported("Net for a step"):
            with telling("export"):
                terminal.waits_for("Net for a step")
                terminal.waits_for("export")
            with telling("differentiate"):
                terminal.waits_for("differentiate")
        assert terminal.screen() == []
    still, done = told
    assert re.fullmatch(r"still compiling Net for a step, for \d+ s: (export)?", still)
    assert done.startswith("compiled Net for a step in ")


def test_an_error_removes_the_line_too(told: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log, "PATIENCE", 0.0)
    with on_a_terminal() as terminal:
        with pytest.raises(ValueError), reported("Net"), telling("export"):
            terminal.waits_for("export")
            raise ValueError
        assert terminal.screen() == []
    assert len([*told]) == 1


def test_nothing_is_shown_where_compiling_is_quick(told: list[str]) -> None:
    with on_a_terminal() as terminal:
        with reported("Net"), telling("export"):
            pass
        assert terminal.shown == ""
    (done,) = told
    assert done.startswith("compiled Net in ")


def test_elsewhere_than_on_a_terminal_only_the_logger_is_told(
    told: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(log, "PATIENCE", 0.0)
    monkeypatch.setenv("FORCE_COLOR", "1")  # for which rich takes any file for a terminal
    with reported("Net"), telling("export"):
        waits_for(told, "still compiling Net")
    assert capsys.readouterr() == ("", "")


def test_other_ranks_show_no_line(told: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log, "PATIENCE", 0.0)
    with on_a_terminal() as terminal:
        with reported("Net", line=False), telling("export"):
            waits_for(told, "still compiling Net")
        assert terminal.shown == ""


def test_a_compilation_inside_of_another_says_nothing_of_its_own(
    told: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log, "PATIENCE", 0.0)
    with reported("outer"), telling("search"):
        waits_for(told, "still compiling outer")
        with reported("inner"), telling("export"):
            time.sleep(0.05)
    assert [each.split()[0] for each in told] == ["still", "compiled", "compiled"]
