"""Where more than two of the last ten steps compiled, one warning says so, and why."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fxpipe
from fxpipe.compiler.compiler import CallKey, Change
from fxpipe.extensions.recompiles.warning import Recompiles

pytestmark = [pytest.mark.traces, pytest.mark.smoke]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.width = nn.Linear(4, 3), 1

    def forward(self, x: Tensor, mode: Any = None) -> Tensor:
        x = x.flatten(0, -2)[:, : self.width].sum(1, keepdim=True) + x.flatten(0, -2)
        made: Tensor = self.layer(x)
        return made * 2 if mode == "wide" else made


def _width(model: Net, step: int) -> dict[str, Any]:
    model.width = 1 + step % 4
    return {}


def _eval(model: Net, step: int) -> dict[str, Any]:
    model.layer.train(step % 2 == 0)
    model.layer.weight.requires_grad_(step % 3 == 0)
    return {}


CASES: dict[str, tuple[Callable[[Net, int], dict[str, Any]], str]] = {
    "a size that the code reads": (_width, r"as model\.width had changed.*register_buffer"),
    "a string that it reads": (lambda model, step: {"mode": f"{step}"}, "as mode was another"),
    "modes": (_eval, "as the mode of a module, requires_grad"),
}


def _warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if "of the last" in r.getMessage()]


@pytest.mark.parametrize("what", CASES)
def test_steps_that_compile_again_and_again_are_warned_of_once(
    what: str, caplog: pytest.LogCaptureFixture
) -> None:
    change, message = CASES[what]
    model = Net()
    x, y = torch.randn(4, 4), torch.randn(4, 3)
    with fxpipe.compile(model, ["cpu"], microbatches=2, loss=F.mse_loss) as pipe:
        for step in range(2):
            pipe.step(x, target=y, **change(model, step))
        assert not _warnings(caplog)
        for step in range(2, 5):
            pipe.step(x, target=y, **change(model, step))
    (told,) = [r for r in caplog.records if "of the last" in r.getMessage()]
    assert told.levelno == logging.WARNING
    assert re.search(message, told.getMessage()), told.getMessage()


class Anneals(nn.Module):
    """Needs the value of a number, by its cosine, or takes it as the warning says."""

    rate: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.register_buffer("rate", torch.tensor(0.0))

    def forward(self, x: Tensor, share: Any = None) -> Tensor:
        scale = torch.cos(self.rate) if share is None else torch.cos(share)
        made: Tensor = self.layer(x) * scale
        return made


@pytest.mark.parametrize("way", ["a buffer that is written in place", "a tensor in the batch"])
def test_what_the_warning_says_to_write_compiles_once(
    way: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "fxpipe")
    model = Anneals()
    x, y = torch.randn(4, 4), torch.randn(4, 3)
    with fxpipe.compile(model, ["cpu"], microbatches=2, loss=F.mse_loss) as pipe:
        for step in range(4):
            if way == "a tensor in the batch":
                made = pipe.step(x, torch.tensor(step / 3), target=y)
            else:
                model.rate.fill_(step / 3)
                made = pipe.step(x, target=y)
            scale = torch.cos(torch.tensor(step / 3))
            expected = sum(
                F.mse_loss(model.layer(part) * scale, wanted).detach() / 2
                for part, wanted in zip(x.chunk(2), y.chunk(2), strict=True)
            )
            assert torch.equal(made, torch.as_tensor(expected))
    assert sum("compiled Anneals" in r.getMessage() for r in caplog.records) == 1


def test_the_first_two_compilations_of_ten_steps_are_told_to_nobody(
    caplog: pytest.LogCaptureFixture,
) -> None:
    old, new = (CallKey((1,), (), size, ()) for size in (8, 7))
    change = Change(old, new._replace(state=(2,)), ["x"], "model.scale")
    recompiles = Recompiles([1])
    recompiles.note("Net", 2, change)
    for step in range(11, 101, 10):
        recompiles.note("Net", step, change)
        recompiles.note("Net", step + 1, change)
    assert not _warnings(caplog)
    for step in (103, 104, 105):
        recompiles.note("Net", step, change)
    (told,) = _warnings(caplog)
    assert "3 of the last 10 steps compiled Net" in told


def test_sizes_that_one_graph_serves_are_no_compilations(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with fxpipe.compile(nn.Linear(4, 3), ["cpu"], microbatches=2, loss=F.mse_loss) as pipe:
        for length in (3, 5, 7, 9):
            pipe.step(torch.randn(4, length, 4), target=torch.randn(4, length, 3))
    assert not _warnings(caplog)
