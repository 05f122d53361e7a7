"""Training beside the plain loop, and the warnings that the library gives meanwhile."""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fxpipe
from tests.oracles import loop


@contextmanager
def told(caplog: pytest.LogCaptureFixture) -> Iterator[list[str]]:
    """The library's warnings so far."""
    caplog.clear()
    messages: list[str] = []
    with caplog.at_level(logging.WARNING, "fxpipe"):
        yield messages
    messages += [r.getMessage() for r in caplog.records if r.name == "fxpipe"]


def train_both(
    model: nn.Module, x: Tensor, target: Any, loss: Any = F.mse_loss, **options: Any
) -> None:
    """Three steps of a pipeline and the plain loop, with an optimizer."""
    options = {"partition": ["last"], **options}
    alone = copy.deepcopy(model)
    devices = len(options["partition"]) + 1
    theirs = torch.optim.SGD(alone.parameters(), lr=0.5)
    with fxpipe.compile(
        model,
        devices * ["cpu"],
        microbatches=2,
        loss=loss,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.5),
        **options,
    ) as pipe:
        for rows in (8, 8, 7):
            parts = tuple(t[:rows] for t in target) if isinstance(target, tuple) else target[:rows]
            made = pipe.step(x[:rows], target=parts)
            expected = loop.train(alone, 2, x[:rows], loss=loss, target=parts)
            theirs.step()
            theirs.zero_grad()
            assert torch.equal(made, expected.loss)
    loop.assert_same(model.state_dict(), alone.state_dict())
