"""A snapshot notices each change of what the code reads, and no change of anything else."""

from __future__ import annotations

import argparse
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fxpipe.compiler.options import Options
from fxpipe.compiler.python_state.reading import globals_of, note_code
from fxpipe.compiler.python_state.snapshot import CodeReads, StateSnapshot
from fxpipe.schedules import gpipe

SCALE = [1.0]
UNREAD = "nothing reads this"


class Config:
    def __init__(self) -> None:
        self.depth, self.unread = 3, "x"


class Model(nn.Module):
    kind = "a"

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)
        self.factor, self.flags, self.unread = 2.0, {"on": True}, 5
        self.config, self.names = Config(), deque(["a"])
        self.space = argparse.Namespace(rate=0.1)
        self.call = partial(torch.add, 1)
        offset = 1.0

        def shifted(x: Tensor) -> Tensor:
            return x + offset

        def shift(by: float) -> None:
            nonlocal offset
            offset = by

        self.shifted, self._shift = shifted, shift

    def forward(self, x: Tensor) -> Any:
        x = self.inner(x) * self.factor * SCALE[0] + self.space.rate
        x = self.call(self.shifted(x)) if self.flags["on"] else x
        return x, self.config.depth, self.names, self.kind


def reads_of(model: Model) -> CodeReads:
    reads = CodeReads()
    called: Any = nn.Module._call_impl
    for function in (Model.forward, model.shifted, called):
        note_code(function.__code__, globals(), reads)
    return reads


def snapshot(model: Model, **options: Any) -> StateSnapshot:
    cpu = torch.device("cpu")
    given = Options(model=model, devices=(cpu,), torch_devices=(cpu,), recipe=gpipe)
    return StateSnapshot(reads_of(model), given, (), **options)


CHANGES: dict[str, Callable[[Model], Any]] = {
    "a number": lambda m: setattr(m, "factor", 3.0),
    "an entry": lambda m: m.flags.update(on=False),
    "a new entry": lambda m: m.flags.update(more=True),
    "an attribute of an object": lambda m: setattr(m.config, "depth", 4),
    "a deque": lambda m: m.names.append("b"),
    "a record of Python's": lambda m: setattr(m.space, "rate", 0.2),
    "a partial": lambda m: setattr(m, "call", partial(torch.add, 2)),
    "a closure": lambda m: m._shift(2.0),
    "an attribute of the class": lambda m: setattr(Model, "kind", "b"),
    "a global's entry": lambda m: SCALE.__setitem__(0, 2.0),
    "a submodule": lambda m: setattr(m, "inner", nn.Linear(2, 2)),
    "another kind of submodule": lambda m: setattr(m, "inner", nn.Identity()),
    "a parameter of another shape": lambda m: setattr(
        m.inner, "weight", nn.Parameter(torch.ones(3, 2))
    ),
    "a parameter": lambda m: setattr(m.inner, "weight", nn.Parameter(torch.ones(2, 2))),
    "a hook": lambda m: m.inner.register_forward_hook(lambda *_: None),
    "a hook on a gradient": lambda m: m.inner.weight.register_hook(lambda g: g),
}

OTHERS: dict[str, Callable[[Model], Any]] = {
    "what nothing reads": lambda m: setattr(m, "unread", 6),
    "the same again": lambda m: setattr(m, "factor", 2.0),
    "what an object has besides": lambda m: setattr(m.config, "unread", "y"),
    "the data of a parameter": lambda m: m.inner.weight.data.add_(1),
    "a gradient": lambda m: setattr(m.inner.weight, "grad", torch.ones(2, 2)),
    "a global that nothing reads": lambda m: globals().__setitem__("UNREAD", "else"),
}


@pytest.fixture(autouse=True)
def _put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Model, "kind", "a")
    SCALE[0] = 1.0


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_of_what_is_read_is_noticed(name: str) -> None:
    model = Model()
    seen = snapshot(model)
    assert seen.holds() and seen.values == snapshot(model).values
    CHANGES[name](model)
    assert not seen.holds()
    # graphs serve another tensor of the same form as well
    alike = name in ("a submodule", "a parameter")
    assert (seen.values == snapshot(model).values) == alike


@pytest.mark.parametrize("name", OTHERS)
def test_a_change_of_anything_else_is_none(name: str) -> None:
    model = Model()
    seen = snapshot(model)
    OTHERS[name](model)
    assert seen.holds() and seen.values == snapshot(model).values


def test_numbers_that_may_be_any_are_no_change_and_have_a_place() -> None:
    model = Model()
    seen = snapshot(model, free=["model.factor"])
    assert seen.places["model.factor"].get() == 2.0
    model.factor = 7.0
    assert seen.holds()
    seen.places["model.factor"].set(8.0)
    assert model.factor == 8.0
    model.factor = "no number"  # type: ignore[assignment]
    assert not seen.holds()


def test_attributes_that_each_call_sets_are_not_watched() -> None:
    model = Model()
    seen = snapshot(model, passing=[("", "factor")])
    model.factor = 7.0
    assert seen.holds()


def test_the_globals_that_code_loads_are_its_own() -> None:
    assert {*globals_of(Model.forward.__code__)} == {"SCALE"}
    assert {*globals_of(Config.__init__.__code__)} == set()
