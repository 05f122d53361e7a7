"""A long compilation says on the terminal what it does, and leaves nothing there."""

from __future__ import annotations

import io
import re
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console
from rich.file_proxy import FileProxy
from torch import nn
from torch.nn.functional import mse_loss

import fxpipe
from fxpipe import extend, log
from fxpipe.extend import Extension
from fxpipe.extensions.status_line import line as progress
from fxpipe.passes.runner import Pass
from tests.helpers.tiny import soon

X = torch.randn(8, 4)


class Terminal(io.StringIO):
    """Standard error that is a terminal with one line."""

    terminal = True

    def isatty(self) -> bool:
        return self.terminal

    @property
    def line(self) -> str:
        """What is to be read on the line, where each carriage return goes back to its start."""
        cells: list[str] = []
        for text in self.getvalue().split("\r"):
            cells[: len(text)] = text
        return "".join(cells).rstrip()


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """A terminal, on which lines appear and change at once."""
    made = Terminal()
    monkeypatch.setattr(progress, "AFTER", 0.0)
    monkeypatch.setattr(progress, "_AGAIN", 0.001)
    monkeypatch.delenv("TERM", raising=False)
    for module in (log, progress):  # pytest sets sys's own
        monkeypatch.setattr(module, "sys", SimpleNamespace(stderr=made))
    return made


class Waiting(Extension):
    """A pass that waits until something holds."""

    def __init__(self, holds: Callable[[], bool]) -> None:
        self.holds, self.held = holds, False

    def passes(self, options: object) -> dict[str, list[tuple[str, Pass]]]:
        return {"program": [("lower", Pass(self.wait_a_while, "program", "program"))]}

    def wait_a_while(self, program: fxpipe.Program) -> fxpipe.Program:
        self.held = soon(self.holds)
        return program


def compile_and_step(*extensions: Extension) -> None:
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(2)))
    with fxpipe.compile(
        model, ["cpu"] * 2, microbatches=2, loss=mse_loss, extensions=[*extensions]
    ) as pipe:
        pipe.step(X, target=X)


@pytest.mark.smoke
def test_the_line_says_what_is_compiled_and_which_pass_runs(terminal: Terminal) -> None:
    pattern = r"fxpipe compiles Sequential for a step of 8 samples: wait_a_while … \d+ s"
    waiting = Waiting(lambda: re.fullmatch(pattern, terminal.line) is not None)
    compile_and_step(waiting)
    assert waiting.held
    assert terminal.line == ""
    assert "\n" not in terminal.getvalue()
    assert not [t for t in threading.enumerate() if t.name == "fxpipe-progress"]


def test_it_is_gone_after_an_error_too(terminal: Terminal) -> None:
    class Failing(Waiting):
        def wait_a_while(self, program: fxpipe.Program) -> fxpipe.Program:
            super().wait_a_while(program)
            raise fxpipe.InputError("no luck")

    failing = Failing(lambda: bool(terminal.line))
    with pytest.raises(fxpipe.InputError, match="no luck"):
        compile_and_step(failing)
    assert failing.held
    assert terminal.line == ""


def test_a_shorter_line_leaves_nothing_of_a_longer_one_and_none_is_wider_than_the_terminal(
    terminal: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    texts = ["long " * 30, "short", "longer than that"]
    with progress.showing(lambda: texts[0]):
        assert soon(lambda: terminal.line == (texts[0] * 2)[:39].rstrip())
        del texts[0]
        assert soon(lambda: terminal.line.startswith("short … "))
        assert terminal.line in ("short … 0 s", "short … 1 s")
        del texts[0]
        assert soon(lambda: terminal.line.startswith("longer than that … "))
    assert terminal.line == ""
    widths = [len(text) for text in terminal.getvalue().split("\r")]
    assert max(widths) == 39


def test_what_is_short_shows_nothing(terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "AFTER", 600.0)
    compile_and_step()
    assert terminal.getvalue() == ""


@pytest.mark.smoke
@pytest.mark.parametrize("where", ["file", "dumb", "closed", "none"])
def test_nothing_is_written_where_no_line_can_be_erased(
    where: str, terminal: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    terminal.terminal = where != "file"
    if where == "dumb":
        monkeypatch.setenv("TERM", "dumb")
    if where == "none":
        monkeypatch.setattr(progress, "sys", SimpleNamespace(stderr=None))
    before = threading.active_count()
    if where == "closed":
        terminal.close()
        monkeypatch.setattr(Terminal, "isatty", io.StringIO.isatty)
    with progress.showing(lambda: "something"):
        assert threading.active_count() == before
    assert where == "closed" or terminal.getvalue() == ""


def test_notebooks_show_it_although_their_streams_are_no_terminals(
    terminal: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    terminal.terminal = False
    monkeypatch.setattr(Terminal, "__module__", "ipykernel.iostream")
    with progress.showing(lambda: "something"):
        assert soon(lambda: terminal.line.startswith("something"))
    assert terminal.line == ""


@pytest.mark.parametrize("rank", [0, 1])
def test_the_first_rank_alone_shows_it(
    rank: int, terminal: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    with fxpipe.compile(nn.Linear(4, 4), 1, loss=mse_loss) as pipe:
        monkeypatch.setattr(pipe._options.group, "rank", rank)
        shown: list[str] = []

        def showing(line: Callable[[], str]) -> AbstractContextManager[None]:
            shown.append(line())
            return progress.showing(line)

        monkeypatch.setitem(extend._REGISTRY["part"], "showing", showing)
        with pipe._compiler.compiling("something"):
            pass
        monkeypatch.setattr(pipe._options.group, "rank", 0)
    assert shown == ["fxpipe compiles something"] * (rank == 0)


def test_nothing_is_shown_beside_a_live_line_of_rich(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    terminal = Terminal()
    assert progress.erases(terminal)
    live: Any = FileProxy(Console(file=terminal), terminal)
    assert not progress.erases(live)
