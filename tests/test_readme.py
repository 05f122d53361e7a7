"""What the README shows runs as it stands, and gives what stands there.

A block of text right behind one of Python is what that prints, and the error that ends it. In a
block of a console, what stands behind a command is what that prints.
"""

from __future__ import annotations

import contextlib
import io
import re
import shlex
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from fxpipe.errors import FxpipeError
from fxpipe.extend import find
from fxpipe.extensions import tables

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"

PICTURE = "zb-v.svg"

BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.DOTALL | re.MULTILINE)


@dataclass(frozen=True)
class Block:
    """A fenced block of the README: its language, its text and where the text is."""

    language: str
    text: str
    start: int
    end: int
    follows: bool
    """Whether it stands right behind the block before it."""


def blocks(readme: str) -> Iterator[Block]:
    end = 0
    for match in BLOCK.finditer(readme):
        yield Block(match[1], match[2], *match.span(2), not readme[end : match.start()].strip())
        end = match.end()


def python_output(code: str, names: dict[str, Any], *, told: bool) -> str:
    """What code prints, and the error of ours that it ends with, where that is told."""
    shown = io.StringIO()
    with contextlib.redirect_stdout(shown):
        try:
            exec(compile(code, str(README), "exec"), names)
        except FxpipeError as error:
            if not told:
                raise
            kind = type(error)
            print(f"{kind.__module__}.{kind.__qualname__}: {error}", file=shown)
    return shown.getvalue()


def console_output(text: str) -> str:
    """The commands of a block with what they print."""
    shown = io.StringIO()
    for line in text.splitlines():
        if line.startswith("$ "):
            program, *arguments = shlex.split(line[2:])
            assert program == "fxpipe"
            if shown.tell():
                print(file=shown)
            print(line, file=shown)
            with (
                contextlib.redirect_stdout(shown),
                contextlib.redirect_stderr(shown),
                patch.object(tables, "_told", set()),  # a command is a process
            ):
                find("command", "main")(arguments)
    return shown.getvalue()


def run(page: str) -> Iterator[tuple[Block, str]]:
    """Every block of a page whose text is an output, with what it is in truth."""
    names: dict[str, Any] = {}
    found = list(blocks(page))
    printed = ""
    for block, after in zip_longest(found, found[1:]):
        told = after is not None and after.language == "text" and after.follows
        match block.language:
            case "python":
                printed = python_output(block.text, names, told=told)
            case "text" if block.follows:
                yield block, printed
            case "console" if block.text.startswith("$ fxpipe "):
                yield block, console_output(block.text)
    if "pipe" in names:
        names["pipe"].close()


@pytest.mark.pages
def test_the_code_of_the_readme_runs_and_gives_what_stands_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    monkeypatch.chdir(tmp_path)
    readme = README.read_text()
    outputs = list(run(readme))
    (command,) = re.findall(r"`(fxpipe schedule [^`]*)`", readme)
    console_output(f"$ {command}")
    if request.config.getoption("--update-golden"):
        for block, real in reversed(outputs):
            readme = readme[: block.start] + real + readme[block.end :]
        README.write_text(readme)
        shutil.copy(PICTURE, ROOT / "docs" / "pictures")
        return
    assert outputs
    for block, real in outputs:
        assert block.text == real
    made = {path.name for path in tmp_path.iterdir()}
    assert made == {"model.pt", "program.svg", PICTURE}


def test_the_picture_of_the_readme_is_there_and_small() -> None:
    (path,) = re.findall(r"!\[[^\]]*\]\(([^)]+)\)", README.read_text())
    assert path == f"docs/pictures/{PICTURE}"
    assert 0 < (ROOT / path).stat().st_size < 150_000
