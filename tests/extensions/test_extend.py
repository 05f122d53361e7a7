"""The doors: names that are found when they are used, and what is said where nothing is behind."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any, get_args

import pytest
from torch import nn

import fxpipe
from fxpipe import extend
from fxpipe.compiler.options import Options
from fxpipe.errors import InputError
from fxpipe.ir.recipe import find_recipe
from fxpipe.ir.schedule import Schedule
from tests.helpers.registered import registry_restored

DOORS: tuple[extend.Door, ...] = get_args(extend.Door)
EVERY = [(door, name) for door in DOORS for name in extend.names(door)]


@pytest.fixture(autouse=True)
def same_registry_after_each_test() -> Iterator[None]:
    with registry_restored():
        yield


@pytest.fixture
def no_search(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python finds no module of the extension "search"."""
    for name in [name for name in sys.modules if name.startswith("fxpipe.extensions.search")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "fxpipe.extensions.search", None)


@pytest.mark.parametrize(("door", "name"), EVERY)
def test_every_name_is_there_and_callable(door: extend.Door, name: str) -> None:
    assert callable(extend.find(door, name))
    assert extend.there(door, name)


def test_public_names_of_extensions_are_attributes_of_fxpipe_and_listed() -> None:
    for name in extend.names("public"):
        assert getattr(fxpipe, name) is extend.find("public", name)
        assert name in fxpipe.__all__
    with pytest.raises(AttributeError, match="'fxpipe' has no attribute 'search_schedules'"):
        _ = fxpipe.search_schedules  # type: ignore[attr-defined]


def test_a_name_whose_extension_is_not_there_says_which(no_search: None) -> None:
    message = r"fxpipe.search_schedule needs the extension fxpipe.extensions.search, which is not"
    with pytest.raises(InputError, match=message):
        _ = fxpipe.search_schedule
    assert not extend.there("public", "search_schedule")


def test_a_package_that_an_extension_lacks_is_no_missing_extension(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    extend.register("public", "lacking", "fxpipe.extensions.search.lacking:nothing")
    with pytest.raises(InputError, match=r"needs the extension fxpipe\.extensions\.search"):
        extend.find("public", "lacking")
    monkeypatch.delitem(sys.modules, "fxpipe.extensions.overlapping.delays", raising=False)
    monkeypatch.setitem(sys.modules, "fxpipe.ir.task", None)
    with pytest.raises(ModuleNotFoundError, match=r"fxpipe\.ir\.task"):
        extend.find("view", "Schedule.versions")


def test_a_view_whose_extension_is_not_there_is_no_attribute_and_its_error_says_which() -> None:
    for name in ("Schedule.simulate", "Pipeline.simulate"):
        extend.register("view", name, "fxpipe.extensions.lost:simulate")
    with fxpipe.compile(nn.Linear(2, 2), ["cpu"]) as pipe:
        for owner in (find_recipe("gpipe")(2, 4), pipe):
            assert not hasattr(owner, "simulate")
            with pytest.raises(InputError, match=r"needs the extension fxpipe\.extensions\.lost"):
                _ = owner.simulate


def test_a_view_is_a_method_of_the_class() -> None:
    @extend.view(Schedule, "letters")
    def letters(schedule: Schedule, *, last: str = "") -> str:
        """The kinds of tasks."""
        return "".join(sorted(schedule.kinds)) + last

    schedule = find_recipe("zb-h1")(2, 3)
    assert schedule.letters(last="!") == "FIUW!"  # type: ignore[attr-defined]
    assert Schedule.letters.__doc__ == "The kinds of tasks."  # type: ignore[attr-defined]
    with pytest.raises(InputError, match="Schedule has an attribute 'rows' already"):
        extend.view(Schedule, "rows")(letters)


def test_a_schedule_of_ones_own_that_is_chosen_late_is_found_by_its_name() -> None:
    def mine() -> Any:
        raise InputError("no such schedule today")

    extend.register("schedule", "mine", mine)
    with pytest.raises(InputError, match="no such schedule today"):
        fxpipe.compile(nn.Linear(2, 2), ["cpu"], schedule="mine")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("doors", "a", print), "there is no door 'doors': "),
        (("public", "a", 3), "the target of 'a' is 3; give a function, or"),
        (("public", "a", "package.module"), 'give a function, or "package.module:attribute"'),
    ],
)
def test_bad_registrations_are_refused(arguments: tuple[object, ...], message: str) -> None:
    with pytest.raises(InputError, match=message):
        extend.register(*arguments)  # type: ignore[arg-type]


def test_an_unknown_name_gets_a_hint() -> None:
    with pytest.raises(InputError, match=r"no view .*did you mean 'Schedule\.versions'"):
        extend.find("view", "Schedule.version")


class Refusing(extend.Extension):
    def check(self, options: Options) -> None:
        raise InputError(f"not with {options.microbatches} micro-batches")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("cuda_graphs", r"extensions is 'cuda_graphs'; give a list, such as \['cuda_graphs'\]"),
        (["cuda_graph"], "there is no extension 'cuda_graph': .*'cuda_graphs'"),
        (
            [Refusing],
            "extensions has <class .*give an object of fxpipe.extend.Exten",
        ),
        ([extend.Extension(), extend.Extension()], "extensions has Extension twice"),
        ([Refusing()], "not with 2 micro-batches"),
    ],
)
def test_what_is_no_extension_or_refuses_the_options_is_refused(given: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        fxpipe.compile(nn.Linear(2, 2), ["cpu"], microbatches=2, extensions=given)
