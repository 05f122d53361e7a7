"""The table of stages with what was measured and predicted, and the text of a simulation."""

from __future__ import annotations

import re
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn.functional import mse_loss
from torch.optim import SGD, Adam

import fxpipe
from fxpipe.extensions import tables
from fxpipe.extensions.simulator import Link
from fxpipe.extensions.tables import count_text
from fxpipe.formatting import bytes_text
from fxpipe.ir.recipe import find_recipe
from tests.extensions.stage_table.test_table import columns

pytestmark = pytest.mark.models

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
        assert columns(pipe, "params") == [count_text(number) for number in weights]
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
    # of two more micro-batches the input, and the output of Tanh; but at its peak 1F1B holds a
    # gradient that it adds to another, and GPipe, in its first backward, none
    assert peaks[1] - peaks[0] == 2 * (2 * samples * width * 4) - 4 * width**2


def test_a_table_and_a_simulation_fit_80_columns() -> None:
    layers = nn.Sequential(*(nn.Linear(6, 6) for _ in range(6)))
    x = torch.randn(8, 6)
    with fxpipe.compile(layers, 2, microbatches=4, loss=mse_loss) as pipe:
        pipe.step(x, target=x)
        text = f"{pipe}\n{pipe.simulate()}"
    assert max(map(len, text.splitlines())) <= 80


@pytest.mark.deep
def test_what_its_columns_mean_is_told_once_a_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "_told", set())  # as in a new process
    with fxpipe.compile(nn.Linear(6, 6), 1, microbatches=2, loss=mse_loss) as pipe:
        pipe.step(torch.ones(4, 6), target=torch.ones(4, 6))
        first, second = (f"{pipe} {pipe.simulate()}" for _ in range(2))
    for words in ("share: of the time", "bubble: the share"):
        assert words in first and words not in second


def test_the_table_shows_times_once_they_are_measured() -> None:
    model, x = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6)), torch.randn(8, 6)
    with fxpipe.compile(model, 2, microbatches=4, loss=mse_loss, partition=["1"]) as pipe:
        pipe.step(x, target=x)
        assert columns(pipe, "forward") == columns(pipe, "share") == ["–", "–"]
        pipe.simulate()
        assert "–" not in columns(pipe, "forward") + columns(pipe, "share")


WORDS = st.text("abcde: 0123456789.%–×", min_size=0, max_size=30).map(str.strip)


@given(st.data(), st.integers(1, 12), st.integers(1, 6), st.sampled_from([1, 2]))
def test_no_cell_is_wrapped_and_what_does_not_fit_comes_below(
    data: st.DataObject, columns_: int, rows: int, gap: int
) -> None:
    cells = [[data.draw(WORDS) or "x" for _ in range(columns_)] for _ in range(rows + 1)]
    table = tables.plain_table(gap)
    for heading in cells[0]:
        table.add_column(heading)
    for row in cells[1:]:
        table.add_row(*row)
    lines = tables.table_text(table).splitlines()
    blocks = len(lines) // (rows + 2)
    assert len(lines) == blocks * (rows + 2)
    found: list[str] = [""] * (rows + 1)
    for block in range(blocks):
        own = lines[block * (rows + 2) : (block + 1) * (rows + 2)]
        assert set(own.pop(1)) == {"─"}
        for at, line in enumerate(own):
            assert len(line) <= 80
            assert line.startswith(cells[at][0])  # the first column again
            found[at] += line.removeprefix(cells[at][0]) if columns_ > 1 else line
    expected = ["".join(row[1:] if columns_ > 1 else row) for row in cells]
    assert ["".join(line.split()) for line in found] == ["".join(e.split()) for e in expected]


def test_prose_alone_is_wrapped() -> None:
    table = tables.plain_table()
    table.add_column("name")
    table.add_column("what", ratio=1)
    table.add_row("a name of many words that stays in one line", "prose " * 20)
    lines = tables.table_text(table).splitlines()
    assert max(map(len, lines)) <= 80
    assert lines[2].startswith("a name of many words that stays in one line  prose")
    assert "".join(lines[2:]).count("prose") == 20


@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "interleaved-1f1b", "2bw", "chimera", "v-min"])
@pytest.mark.parametrize("devices", [4, 16])
def test_simulations_of_many_devices_fit_80_columns(name: str, devices: int) -> None:
    times = {"F": 1.12345, "B": 2.3456, "I": 1.2345, "W": 1.1234}
    schedule = find_recipe(name)(devices, 2 * devices)
    text = str(schedule.simulate(times, links=Link(0.31)))
    assert max(map(len, text.splitlines())) <= 80
    for device in range(devices):
        assert re.search(rf"^{device} .*\d%", text, re.M)
