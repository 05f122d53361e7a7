"""What is asked for is called as it is: by name, class or module, and else refused by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import fxpipe
from fxpipe.errors import InputError
from fxpipe.ir.called import calls_in


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Tanh(), nn.Linear(4, 4)), nn.Tanh())


def leaves(pipe: fxpipe.Pipeline) -> list[str]:
    """The leaf modules that the stages call, in order."""
    return [str(n.target) for s in pipe.plan.stages for n in calls_in(s.graph.graph.nodes)]


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("asked", "called"),
    [
        (["1.0"], ["1.0"]),
        ([nn.Tanh], ["1.0", "2"]),
        ([nn.Sequential, "2"], ["1", "2"]),
        ([], []),
    ],
)
def test_names_and_classes_are_called_as_they_are(asked: list[Any], called: list[str]) -> None:
    given, x = model(), torch.randn(4, 4)
    expected = given(x)
    with fxpipe.compile(given, 1, microbatches=1, extensions=[fxpipe.LeafModules(*asked)]) as pipe:
        pipe.prepare(x)
        assert leaves(pipe) == [f"called {name}" for name in called]
        assert torch.equal(pipe(x), expected)


@pytest.mark.smoke
def test_a_module_itself_is_called_as_it_is() -> None:
    given = model()
    leaf = fxpipe.LeafModules(given[1])
    with fxpipe.compile(given, 1, microbatches=1, extensions=[leaf]) as pipe:
        pipe(torch.randn(4, 4))
        assert leaves(pipe) == ["called 1"]


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ("1.11", r"no submodule '1.11'.*1\.1"),
        (nn.LSTM, "LSTM, which is no submodule"),
        (nn.Linear(4, 4), "a Linear, which is no submodule"),
        ("", "no submodule ''"),
        (["1"], "a list, which is no submodule"),
    ],
    ids=str,
)
def test_what_is_no_submodule_is_refused(asked: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        fxpipe.compile(model(), 1, extensions=[fxpipe.LeafModules(asked)])


@pytest.mark.smoke
def test_it_prints_what_is_asked_for() -> None:
    assert repr(fxpipe.LeafModules("1", "2")) == "LeafModules('1', '2')"
