"""The page of the command line is complete. What its commands print, tests of all pages check."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from fxpipe.extensions.cli.commands import make_parser

PAGE = Path(__file__).parents[3] / "docs" / "schedules.md"


@pytest.mark.needs("paper")
@pytest.mark.smoke
def test_every_command_is_on_its_page_with_its_options() -> None:
    *_, commands = make_parser()._subparsers._group_actions  # type: ignore[union-attr]
    page = PAGE.read_text()
    told = dict(re.findall(r"^### fxpipe (\w+)(.*?)(?=^##|\Z)", page, re.MULTILINE | re.DOTALL))
    assert isinstance(commands.choices, dict)
    assert told.keys() == commands.choices.keys()
    for name, command in commands.choices.items():
        takes = any(not action.option_strings for action in command._actions)
        assert not takes or f"$ fxpipe {name} " in told[name]
        cells = " ".join(re.findall(r"^\| (`.*?`) \|", told[name], re.MULTILINE))
        said = set(re.findall(r"(?<![\w-])--?[a-z-]+", cells))
        options = [action.option_strings for action in command._actions]
        missing = [each for each in options if each and not said & set(each)]
        assert missing == [["-h", "--help"]]
        assert said <= {option for each in options for option in each}
