"""What a run of a model may change in Python, and what is refused with its name."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fxpipe.compiler.python_state.changes import refuse_changes
from fxpipe.errors import TraceError


class Does(nn.Module):
    """Does something in each call."""

    def __init__(self, what: Callable[[Any], Any]) -> None:
        super().__init__()
        self.count, self.log, self.table, self.cache = 0, [0], {"a": 1}, None
        self.what = what

    def forward(self, x: Tensor) -> Tensor:
        self.what(self)
        return x + 1


def fill(model: Any) -> None:
    model.cache = torch.ones(2) if model.cache is None else model.cache


def reads_what_it_has_left(model: Any) -> None:
    model.count = model.count + 1


REFUSED: dict[str, tuple[Callable[[Any], Any], str]] = {
    "a counter": (reads_what_it_has_left, r"Does\.count .*register_buffer"),
    "a list": (lambda m: m.log.append(1), r"Does\.log "),
    "a dictionary": (lambda m: m.table.update({len(m.table): 1}), r"Does\.table "),
    "Python's generator": (lambda m: random.random(), "draws from Python.*torch.rand"),
    "NumPy's generator": (lambda m: np.random.rand(), "draws from numpy.random.*torch.rand"),
}

ALLOWED: dict[str, Callable[[Any], Any]] = {
    "nothing": lambda m: None,
    "what only the first call makes": fill,
    "the same value": lambda m: setattr(m, "count", 0),
    "torch's generator": lambda m: torch.rand(1),
}


def refused(model: Does, passing: set[tuple[str, str]] | None = None) -> Any:
    passing = set() if passing is None else passing
    return refuse_changes(model, (), lambda: model(torch.ones(2)), passing)


@pytest.mark.parametrize("name", REFUSED)
def test_what_each_call_changes_is_refused_by_name(name: str) -> None:
    what, message = REFUSED[name]
    with pytest.raises(TraceError, match=message):
        refused(Does(what))


@pytest.mark.parametrize("name", ALLOWED)
def test_what_a_graph_can_do_without_is_allowed(name: str) -> None:
    assert torch.equal(refused(Does(ALLOWED[name])), torch.full((2,), 2.0))


def test_what_a_call_sets_before_it_reads_it_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    def sets(model: Any) -> None:
        model.cache = [torch.ones(1)]
        assert model.cache

    model, passing = Does(sets), set[tuple[str, str]]()
    with caplog.at_level(logging.WARNING, "fxpipe"):
        refused(model, passing)
        assert passing == {("", "cache")}
        refused(model, passing)
    assert [r.getMessage() for r in caplog.records if "sets Does.cache" in r.getMessage()] != []
    assert len(caplog.records) == 1


def test_what_another_kind_of_call_sets_may_not_be_read() -> None:
    model = Does(lambda m: m.cache)
    with pytest.raises(TraceError, match="read before it is set"):
        refused(Does(lambda m: m.log[0] + 1), {("", "log")})
    assert refused(model, {("", "table")}) is not None  # nothing reads that


def test_leaf_modules_may_change_their_own_attributes() -> None:
    model = nn.Sequential(Does(reads_what_it_has_left))
    with pytest.raises(TraceError):
        refuse_changes(model, (), lambda: model(torch.ones(2)), set())
    assert refuse_changes(model, ("0",), lambda: model(torch.ones(2)), set()) is not None
