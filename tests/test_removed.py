"""What went away is refused by name, with what to do instead."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch import nn

import fxpipe
from fxpipe.ir.recipe import find_recipe
from fxpipe.removed import GONE, REMOVED, SCHEDULES

PAGE = (Path(__file__).parents[1] / "docs" / "removed.md").read_text()


@pytest.mark.parametrize("name", REMOVED)
def test_a_removed_argument_is_refused_with_what_to_do(name: str) -> None:
    given: Any = {name: True}
    with pytest.raises(fxpipe.InputError, match=f"takes {name} no longer: ") as raised:
        fxpipe.compile(nn.Linear(2, 2), ["cpu"], **given)
    assert REMOVED[name] in str(raised.value)
    assert f"`{name}" in PAGE


def test_an_argument_that_never_was_is_refused_as_by_python() -> None:
    given: Any = {"scedule": "1f1b"}
    with pytest.raises(TypeError, match="unexpected keyword argument 'scedule'"):
        fxpipe.compile(nn.Linear(2, 2), ["cpu"], **given)


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_schedule_that_went_away_says_what_to_do(name: str) -> None:
    with pytest.raises(fxpipe.InputError, match="was removed; write") as raised:
        fxpipe.compile(nn.Linear(2, 2), ["cpu"], schedule=name)
    told = str(raised.value)
    assert told.endswith(SCHEDULES[name])
    assert find_recipe(told.split('"')[1])
    assert f"`{name}`" in PAGE


@pytest.mark.parametrize("name", GONE)
def test_an_attribute_that_went_away_says_what_to_do(name: str) -> None:
    with fxpipe.compile(nn.Linear(2, 2), ["cpu"]) as pipe:
        owner, attribute = name.split(".")
        holder = {"fxpipe": fxpipe, "pipe": pipe}[owner]
        with pytest.raises(AttributeError, match="it was removed: ") as raised:
            getattr(holder, attribute)
        assert GONE[name] in str(raised.value)
        assert not hasattr(holder, "never")
    assert f"`{name}" in PAGE
