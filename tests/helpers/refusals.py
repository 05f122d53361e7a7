"""Compiling, stepping and being refused, in one call each."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import fxpipe
from fxpipe import FxpipeError
from tests.helpers.tiny import Tiny, batch

X, Y = batch()
SGD = functools.partial(torch.optim.SGD, lr=0.1)


def compiled(
    model: nn.Module | None = None, devices: Any = ("cpu", "cpu"), **options: Any
) -> fxpipe.Pipeline:
    return fxpipe.compile(Tiny() if model is None else model, devices, **options)


def stepped(
    model: nn.Module | None = None, *inputs: Any, target: Any = Y, **options: Any
) -> fxpipe.Pipeline:
    """Compile, and run a step; the pipe is closed if that fails."""
    options = {"loss": functional.cross_entropy, "microbatches": 2, **options}
    with compiled(model, **options) as pipe:
        pipe.step(*(inputs or (X,)), target=target)
        return pipe


def refused(error: type[FxpipeError], call: Callable[[], Any], *parts: str) -> FxpipeError:
    """A call raises exactly this error, in one line with a cure, and the text has these parts."""
    with pytest.raises(FxpipeError) as raised:
        call()
    text = str(raised.value)
    assert type(raised.value) is error, text
    assert "\n" not in text and "; " in text, text
    for part in parts:
        assert part in text, text
    return raised.value
