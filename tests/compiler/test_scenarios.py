"""How often each kind of call captures and measures a model, and that it is right."""

from __future__ import annotations

import copy
import logging
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import fxpipe

pytestmark = pytest.mark.traces

MICROBATCHES = 4
COUNTED = ("capture", "measure", "balance", "check")


class Net(nn.Module):
    """Takes sequences of any length."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            rows, length, width = x.shape
            x = x + layer(x.reshape(rows * length, width)).relu().view(rows, length, width)
        return x.mean(1)


class Passes(logging.Handler):
    """Counts the passes that run."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def emit(self, record: logging.LogRecord) -> None:
        self.counts[getattr(record, "fxpipe_pass", "")] += 1

    def taken(self) -> dict[str, int]:
        counts, self.counts = self.counts, Counter()
        return {name: counts[name] for name in COUNTED if counts[name]}


@pytest.fixture
def passes() -> Iterator[Passes]:
    logger, made = logging.getLogger("fxpipe"), Passes()
    level = logger.level
    logger.setLevel(logging.DEBUG)
    logger.addHandler(made)
    yield made
    logger.removeHandler(made)
    logger.setLevel(level)


def batch(rows: int, length: int = 5) -> tuple[Tensor, Tensor]:
    return torch.randn(rows, length, 6), torch.randn(rows, 6)


@pytest.fixture
def trained() -> Iterator[Any]:
    """A pipe, and what makes a step of it and of a loop over the same micro-batches."""
    torch.manual_seed(0)
    model = Net()
    alone = copy.deepcopy(model)

    def step(rows: int, length: int = 5) -> None:
        x, y = batch(rows, length)
        loss = pipe.step(x, target=y)
        total = 0.0
        for a, b in zip(x.tensor_split(MICROBATCHES), y.tensor_split(MICROBATCHES), strict=True):
            part = mse_loss(alone(a), b) * (len(a) / rows)
            part.backward()
            total += part.item()
        assert loss.item() == pytest.approx(total)
        for ours, theirs in zip(model.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(ours.grad, theirs.grad)

    with fxpipe.compile(model, ["cpu"] * 2, microbatches=MICROBATCHES, loss=mse_loss) as pipe:
        yield pipe, step


Step = Callable[..., None]


def test_each_graph_is_captured_once(trained: tuple[Any, Step], passes: Passes) -> None:
    pipe, step = trained
    step(16)
    first = {"capture": 1, "measure": 1, "balance": 1, "check": 1}
    assert passes.taken() == first
    step(16)
    assert passes.taken() == {}
    step(16, length=3)
    assert passes.taken() == {"capture": 1, "check": 1}
    pipe.eval()(batch(16)[0])
    assert passes.taken() == {"capture": 1, "check": 1}
    pipe.train()
    step(16)
    assert passes.taken() == {}


def test_lengths_after_the_second_are_not_captured(
    trained: tuple[Any, Step], passes: Passes
) -> None:
    _, step = trained
    step(16)
    step(16, length=3)
    passes.taken()
    for length in (7, 4, 9, 2):
        step(16, length)
    assert passes.taken() == {}


def test_a_partial_batch_uses_the_graph_of_whole_ones_where_it_has_micro_batches_of_their_size(
    trained: tuple[Any, Step], passes: Passes
) -> None:
    _, step = trained
    step(16)
    passes.taken()
    step(15)  # micro-batches of 4 and 3 samples
    assert passes.taken() == {"capture": 1, "check": 1}
    for rows in (13, 16, 15):
        step(rows)
    assert passes.taken() == {}


def test_a_partial_batch_traces_once_for_all_sizes(
    trained: tuple[Any, Step], passes: Passes
) -> None:
    _, step = trained
    step(16)
    passes.taken()
    step(10)  # micro-batches of 3 and 2 samples share one graph
    assert passes.taken() == {"capture": 1, "check": 1}
    step(8)  # of 2
    assert passes.taken() == {}
    step(24)  # of 6
    assert passes.taken() == {}
    for rows in (16, 10, 8, 24):
        step(rows)
    assert passes.taken() == {}
