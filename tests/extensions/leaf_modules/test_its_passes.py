"""The passes of the extension fit into the lists of the compiler."""

from __future__ import annotations

import inspect

import pytest
import torch
from torch import nn

import fxpipe
from fxpipe.compiler import passes
from fxpipe.compiler.options import Options
from fxpipe.errors import PassError
from fxpipe.passes.runner import Pass, check_order


@pytest.fixture
def options() -> Options:
    with fxpipe.compile(nn.Sequential(nn.Linear(4, 4)), [torch.device("cpu")]) as pipe:
        return pipe._options


def own(options: Options) -> list[Pass]:
    """The passes of the extension that ``compile`` has by itself."""
    *_, leaves = options.extensions
    return [each for placed in leaves.passes(options).values() for _, each in placed]


@pytest.mark.smoke
def test_they_require_what_they_take_and_each_list_is_in_order_with_them(options: Options) -> None:
    assert len(own(options)) == 5
    for each in own(options):
        taken, given = inspect.signature(each.function).parameters, {name for name, _ in each.needs}
        assert given <= taken.keys()
        assert {name for name, p in taken.items() if p.default is p.empty} <= given
    for name in passes.LISTS:
        check_order(passes.of(options, name), ())


@pytest.mark.smoke
def test_what_calls_modules_needs_a_functional_graph(options: Options) -> None:
    given = [*passes.of(options, "trace")]
    (moved,) = [each for each in given if each.name == "call_leaves"]
    given.remove(moved)
    place = [each.name for each in given].index("functionalise")
    with pytest.raises(PassError, match=r"'call_leaves' requires .* put it behind 'functionalise'"):
        check_order([*given[:place], moved, *given[place:]], ())
