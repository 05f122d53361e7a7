"""The table of stages that ``print(pipe)`` shows, against counts by hand."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.functional import mse_loss

import fxpipe


def columns(pipe: fxpipe.Pipeline, heading: str) -> list[str]:
    """What a column says of each stage."""
    lines = str(pipe).splitlines()
    top = next(at for at, line in enumerate(lines) if line.startswith("stage "))
    end = 0
    for each in lines[top].split():
        start, end = end, lines[top].index(each) + len(each)
        if each == heading:  # the columns are flush right
            break
    rows = lines[top + 2 : lines.index("stages and their modules")]
    return [row[start:end].strip() for row in rows]


def test_its_modules_are_the_models_own_also_after_a_smaller_batch() -> None:
    layer = nn.TransformerEncoderLayer(6, 2, 8, dropout=0.0, batch_first=True)
    model, x = nn.Sequential(layer, nn.Linear(6, 6)), torch.randn(8, 3, 6)
    with fxpipe.compile(model, ["cpu"], microbatches=4, loss=mse_loss) as pipe:
        for samples in (8, 7):  # 7: its graph for any size asks for sizes, in no module
            pipe.step(x[:samples], target=x[:samples])
            assert "\n0 on device 0 (cpu): 0–1\n" in str(pipe)


def test_it_fits_80_columns_and_a_common_prefix_is_told_once() -> None:
    class Wrapped(nn.Module):
        def __init__(self, model: nn.Module) -> None:
            super().__init__()
            self.base_model = model

        def forward(self, x: torch.Tensor) -> Any:
            return self.base_model(x)

    layers = nn.Sequential(*(nn.Linear(6, 6) for _ in range(6)))
    x = torch.randn(8, 6)
    with fxpipe.compile(Wrapped(Wrapped(layers)), 2, microbatches=4, loss=mse_loss) as pipe:
        pipe.step(x, target=x)
        text = str(pipe)
    assert max(map(len, text.splitlines())) <= 80
    assert "\nstages and their modules (of base_model.base_model)\n0 on device 0 (cpu): 0–" in text


def test_printing_measures_nothing() -> None:
    model, x = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6)), torch.randn(8, 6)
    with fxpipe.compile(model, 2, microbatches=4, loss=mse_loss, partition=["1"]) as pipe:
        pipe.step(x, target=x)
        assert columns(pipe, "forward") == columns(pipe, "share") == ["–", "–"]
        assert "not measured yet; pipe.simulate() measures it" in str(pipe)


class Uneven(nn.Module):
    """The second half takes several times as long as the first."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(width, width), nn.Linear(width, 16 * width)

    def forward(self, x: torch.Tensor) -> Any:
        return (self.second(self.first(x)) ** 2).mean()


def test_a_slow_stage_is_marked() -> None:
    with fxpipe.compile(Uneven(128), 2, microbatches=2) as pipe:
        pipe.step(torch.randn(256, 128))
        marked = [share.startswith("> ") for share in columns(pipe, "share")]
        assert marked == [False, True]
        assert "\n> the slowest stage takes 1." in str(pipe)


def test_it_says_what_was_balanced() -> None:
    model, x = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6)), torch.randn(8, 6)
    for linked in (False, True):
        partition = fxpipe.Partition(link_bandwidth=1e6 if linked else None)
        with fxpipe.compile(model, 2, microbatches=4, loss=mse_loss, partition=partition) as pipe:
            pipe.step(x, target=x)
            text = " ".join(str(pipe).split())
        assert "times the mean" in text
        assert ("(compute and transfers)" in text) == linked
