"""The table of stages that ``print(pipe)`` shows, against counts by hand."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.optim import SGD, Adam

import fxpipe
from fxpipe.units import bytes_text

SCHEDULES: list[tuple[str, Any, int]] = [
    # a version, a gradient and the state; then what a failure goes back to: weights and state
    ("1f1b", partial(SGD, lr=0.1), 2 + 1),
    ("1f1b", partial(SGD, lr=0.1, momentum=0.9), 3 + 2),
    ("gpipe", partial(Adam, lr=0.1), 4 + 3),
    # two versions, a gradient and the state, and the state before
    ("2bw", partial(SGD, lr=0.1), 3),
    ("2bw", partial(SGD, lr=0.1, momentum=0.9), 4 + 1),
    # that of Adam is assumed
    ("1f1b", None, 4),
]


def columns(pipe: fxpipe.Pipeline, heading: str) -> list[str]:
    """What a column says of each stage."""
    lines = str(pipe).splitlines()
    headings = next(line for line in lines if " stage " in line).split("┃")
    index = [each.strip() for each in headings].index(heading)
    rows = [line.split("│") for line in lines if line.startswith("│")]
    return [row[index].strip() for row in rows if row[1].strip()]


@pytest.mark.parametrize(("schedule", "optimizer", "times"), SCHEDULES)
def test_memory_counts_versions_gradients_and_what_the_optimizer_keeps(
    schedule: str, optimizer: Any, times: int
) -> None:
    model = nn.Sequential(nn.Linear(256, 512), nn.Linear(512, 256, bias=False))
    with fxpipe.compile(
        model,
        ["cpu", "cpu"],
        schedule=schedule,
        microbatches=2,
        partition=["1"],
        loss=mse_loss,
        optimizer=optimizer,
    ) as pipe:
        pipe.step(torch.randn(2, 256), target=torch.randn(2, 256))
        pipe.flush()
        weights = [sum(p.numel() for p in layer.parameters()) for layer in model]
        assert columns(pipe, "parameters") == [f"{number:,}" for number in weights]
        for text, number in zip(columns(pipe, "memory"), weights, strict=True):
            size, unit = text.split()
            assert unit == "MiB"  # of which the values of one sample are next to nothing
            assert float(size) == pytest.approx(4 * number * times / 2**20, abs=0.06)


def test_memory_counts_what_the_micro_batches_in_flight_keep() -> None:
    samples, width = 4096, 16
    model = nn.Sequential(nn.Linear(width, width, bias=False), nn.Tanh(), nn.Linear(width, width))
    with fxpipe.compile(
        model,
        ["cpu", "cpu"],
        schedule="1f1b",
        microbatches=4,
        partition=["2"],
        loss=mse_loss,
    ) as pipe:
        pipe.step(torch.randn(4 * samples, width), target=torch.randn(4 * samples, width))
        value, weights = samples * width * 4, [width**2 * 4, (width**2 + width) * 4]
        assert columns(pipe, "memory") == [
            bytes_text(4 * weights[0] + 2 * value),  # the output of Tanh
            bytes_text(4 * weights[1] + 2 * value),  # what it receives, and what the loss keeps
        ]
