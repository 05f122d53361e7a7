"""The passes of the extension fit into the lists of the compiler."""

from __future__ import annotations

import inspect

import pytest
import torch
from torch import nn

import fxpipe
from fxpipe.compiler.options import Options
from fxpipe.passes.runner import Pass


@pytest.fixture
def options() -> Options:
    with fxpipe.compile(nn.Sequential(nn.Linear(4, 4)), [torch.device("cpu")]) as pipe:
        return pipe._options


def own(options: Options) -> list[Pass]:
    """The passes of the extension that ``compile`` has by itself."""
    *_, leaves = options.extensions
    return [each for placed in leaves.passes(options).values() for _, each in placed]


@pytest.mark.smoke
def test_they_require_what_they_take(options: Options) -> None:
    assert len(own(options)) == 3
    for each in own(options):
        taken, given = inspect.signature(each.function).parameters, {*each.needs}
        assert given <= taken.keys()
        assert {name for name, p in taken.items() if p.default is p.empty} <= given
