"""After a step nothing of it is alive, and during it no more than the schedule needs."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss
from torch.optim import Optimizer

import fxpipe
from examples.unet import UNet
from tests.helpers.profiles import DEEP, deep


def images() -> Tensor:
    return torch.randn(7, 1, 8, 8)


class Skipping(nn.Module):
    """Adds to what the last layer makes of an image what the first one does."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(1, 2, 3, padding=1), nn.Conv2d(2, 1, 3, padding=1)
        self.middle = nn.Sequential(nn.Conv2d(2, 2, 3, padding=1), nn.BatchNorm2d(2))

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x).relu()
        made: Tensor = self.last(self.middle(y).relu()) + y.mean(1, keepdim=True)
        return made


def compiled(schedule: str, optimizer: Callable[[Any], Optimizer] | None = None) -> fxpipe.Pipeline:
    """A model over three stages, with skips that pass over the middle one."""
    torch.manual_seed(0)
    return fxpipe.compile(
        UNet(channels=1, base=2, depth=2) if DEEP else Skipping(),
        ["cpu"] * 3,
        schedule=schedule,
        microbatches=3,
        loss=mse_loss,
        optimizer=optimizer,
        partition=["downs.1", "widens.1"] if DEEP else ["middle", "last"],
        example=((images(),), {"target": images()}),
    )


def alive() -> list[Tensor]:
    """Every tensor with data that Python knows of."""
    gc.collect()
    found = [x for x in gc.get_objects() if type(x) in (Tensor, nn.Parameter)]
    return [x for x in found if x.device.type != "meta" and x.numel()]


def left_over(before: list[Tensor], pipe: fxpipe.Pipeline) -> list[tuple[int, ...]]:
    """The shapes of the tensors that are new, but for the gradients that the user asked for, and
    the scalar loss of the last step, which ``pipe.metrics`` shows."""
    known = {id(x) for x in before} | {id(p.grad) for p in pipe.parameters()}
    if (last := pipe._calls.last) is not None:
        known.add(id(last.loss))
    return [tuple(x.shape) for x in alive() if id(x) not in known]


def train(pipe: fxpipe.Pipeline) -> None:
    pipe.step(images(), target=images())


def train_for_output(pipe: fxpipe.Pipeline) -> None:
    pipe.step(images(), target=images(), return_output=True)


def infer(pipe: fxpipe.Pipeline) -> None:
    with torch.no_grad():
        pipe(images())


def call_and_drain(pipe: fxpipe.Pipeline) -> None:
    x = images().requires_grad_()
    pipe(x).sum().backward()
    assert x.grad is not None


def call_and_drop(pipe: fxpipe.Pipeline) -> None:
    assert pipe(images()).requires_grad


USES = [train, train_for_output, infer, call_and_drain, call_and_drop]


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"] if DEEP else ["1f1b"])
def test_no_tensor_outlives_its_use(schedule: str) -> None:
    with compiled(schedule) as pipe:
        before = alive()
        for use in USES:
            use(pipe)
            assert left_over(before, pipe) == [], use.__name__


def test_with_an_optimizer_nothing_but_its_state_outlives_a_step() -> None:
    with compiled("1f1b", optimizer=lambda p: torch.optim.SGD(p, lr=0.1)) as pipe:
        before = alive()
        train(pipe)
        train(pipe)
        assert left_over(before, pipe) == []
        assert [p for p in pipe.parameters() if p.grad is not None] == []


def test_nothing_outlives_a_failed_step_but_its_error() -> None:
    model = nn.Sequential(*(nn.Linear(3, 3) for _ in range(3)))
    x, good = torch.randn(6, 3), torch.randint(3, (6,))
    bad = torch.tensor([0, 1, 2, 9, 0, 1])  # there is no class 9: the second micro-batch fails
    example = ((x,), {"target": good})
    with fxpipe.compile(
        model, ["cpu"] * 3, microbatches=3, loss=cross_entropy, example=example
    ) as pipe:
        before = alive()
        for _ in range(2):
            with pytest.raises(fxpipe.ExecutionError):
                pipe.step(x, target=bad)
            assert left_over(before, pipe) == []
        pipe.step(x, target=good)
        assert left_over(before, pipe) == []


@pytest.mark.parametrize(("stages", "microbatches"), [(1, 3), (3, 8), *deep((3, 2), (4, 3))])
@pytest.mark.parametrize(
    ("schedule", "most"),
    [
        ("gpipe", lambda stage, stages, microbatches: microbatches),
        ("1f1b", lambda stage, stages, microbatches: min(stages - stage, microbatches)),
    ],
)
def test_a_stage_keeps_as_many_microbatches_as_its_schedule_says(
    schedule: str, most: Callable[[int, int, int], int], stages: int, microbatches: int
) -> None:
    model = nn.Sequential(*(nn.Linear(3, 3) for _ in range(4)))
    x = torch.randn(8, 3)
    with fxpipe.compile(
        model, ["cpu"] * stages, schedule=schedule, microbatches=microbatches, loss=mse_loss
    ) as pipe:
        pipe.step(x, target=x)
        kept = pipe.kept
    assert kept == {stage: most(stage, stages, microbatches) for stage in range(stages)}
