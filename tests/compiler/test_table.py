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
from fxpipe.formatting import bytes_text

SCHEDULES: list[tuple[str, Any, int]] = [
    # a version and the state
    ("1f1b", partial(SGD, lr=0.1), 1),
    ("1f1b", partial(SGD, lr=0.1, momentum=0.9), 2),
    ("gpipe", partial(Adam, lr=0.1), 3),
    # two versions and the state
    ("2bw", partial(SGD, lr=0.1), 2),
    ("2bw", partial(SGD, lr=0.1, momentum=0.9), 3),
    # what .grad holds now
    ("1f1b", None, 2),
]
STANDING = ("parameters", "versions", "optimizer")


def columns(pipe: fxpipe.Pipeline, heading: str) -> list[str]:
    """What a column says of each stage."""
    lines = str(pipe).splitlines()
    headings = next(line for line in lines if " stage " in line).split("┃")
    index = [each.strip() for each in headings].index(heading)
    rows = [line.split("│") for line in lines if line.startswith("│")]
    return [row[index].strip() for row in rows if row[1].strip()]


@pytest.mark.parametrize(("schedule", "optimizer", "times"), SCHEDULES)
def test_memory_is_what_simulate_says_with_versions_and_what_the_optimizer_keeps(
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
        memory = pipe.simulate().memory
        assert columns(pipe, "memory") == [bytes_text(device.peak) for device in memory]
        for device, number in zip(memory, weights, strict=True):
            standing = sum(device.parts[part] for part in STANDING)
            assert standing == pytest.approx(4 * number * times, abs=64)  # a few scalars


def test_memory_counts_what_the_micro_batches_in_flight_keep() -> None:
    samples, width = 4096, 16
    peaks = []
    for schedule in ("1f1b", "gpipe"):
        with fxpipe.compile(
            nn.Sequential(nn.Linear(width, width, bias=False), nn.Tanh(), nn.Linear(width, width)),
            ["cpu", "cpu"],
            schedule=schedule,
            microbatches=4,
            partition=["2"],
            loss=mse_loss,
        ) as pipe:
            pipe.step(torch.randn(4 * samples, width), target=torch.randn(4 * samples, width))
            first = pipe.simulate().memory[0]
            assert columns(pipe, "memory")[0] == bytes_text(first.peak)
            peaks.append(first.peak)
    # of two more micro-batches the input, and the output of Tanh
    assert peaks[1] - peaks[0] == 2 * (2 * samples * width * 4)
