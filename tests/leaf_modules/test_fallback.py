"""Which submodules become leaf modules where a line cannot be traced, and what is told of it."""

from __future__ import annotations

import logging

import pytest
from torch import nn

from fxpipe.compiler.leaf_modules.fallback import Leaves
from fxpipe.compiler.leaf_modules.nests import UnfitLeaf
from fxpipe.errors import TraceError


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.body = nn.Linear(2, 2), nn.Linear(2, 2)

    def forward(self, x: object) -> None:
        raise UnfitLeaf("first.gate", "returns a number")


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Expert(), Expert()
        self.head = nn.Linear(2, 20)


def error(where: str, *submodules: str) -> TraceError:
    made = TraceError("cannot be traced", where)
    made.submodules = submodules
    return made


def test_the_innermost_submodule_around_a_line_becomes_a_leaf_and_all_of_its_class() -> None:
    model = Model()
    leaves = Leaves(model, {})
    leaves.take(error("model.py:5", "first"))
    assert leaves.called == {"first": model.first, "second": model.second}
    assert leaves.unasked == {"first": "model.py:5", "second": "model.py:5"}


def test_a_class_of_pytorch_says_nothing_of_its_other_submodules() -> None:
    leaves = Leaves(Model(), {})
    leaves.take(error("nn.py:5", "first", "first.gate"))
    assert [*leaves.called] == ["first.gate"]


def test_a_line_in_the_models_own_forward_is_refused() -> None:
    leaves, refused = Leaves(Model(), {}), error("model.py:9")
    with pytest.raises(TraceError) as raised:
        leaves.take(refused)
    assert raised.value is refused
    assert not leaves.called


def test_a_leaf_that_cannot_be_one_gives_way_to_what_is_around_it() -> None:
    model = Model()
    leaves = Leaves(model, {})
    leaves.take(error("model.py:5", "first", "first.gate"))
    with pytest.raises(UnfitLeaf) as raised:
        model.first(None)
    leaves.take(raised.value)
    assert "first" in leaves.called and leaves.unasked["first"] == "model.py:5"


def test_what_the_user_asked_for_stays_and_is_looked_up_again() -> None:
    model = Model()
    leaves = Leaves(model, {"head": model.head})
    leaves.take(error("model.py:5", "first"))
    with pytest.raises(TraceError):  # while no graph calls these yet
        leaves.take(error("model.py:9"))
    assert [*leaves.called] == ["head"]
    model.head = nn.Linear(2, 3)
    leaves.begin()
    assert leaves.called["head"] is model.head


def test_the_warning_has_the_line_the_share_and_what_to_write_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    leaves = Leaves(Model(), {})
    leaves.take(error("model.py:5", "first"))
    with caplog.at_level(logging.WARNING, "fxpipe"):
        leaves.tell()
        leaves.tell()
    (record,) = caplog.records
    said = record.getMessage()
    experts, head = 2 * 2 * (4 + 2), 20 * 3
    assert "cannot be traced at model.py:5. So this is called as it is: 'first', 'second'," in said
    assert f"{100 * experts / (experts + head):.0f} % of the parameters" in said
    assert "fxpipe.LeafModules('first', 'second')" in said


def test_a_loss_is_called_as_it_is_only_for_a_line_of_the_user() -> None:
    leaves = Leaves(Model(), {}, lambda y, t: y)
    with pytest.raises(TraceError):
        leaves.take_loss(error(""))
    leaves.take_loss(error("loss.py:3"))
    assert leaves.loss
