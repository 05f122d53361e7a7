"""Short runs to write checkpoints of, and what they leave behind."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import fxpipe
from examples.unet import UNet
from tests.helpers.overlapping import ADAMW
from tests.oracles.delayed_loop import MSE, Batch

PLAIN: dict[str, Any] = {"microbatches": 4, "schedule": "2bw"}


@dataclass(frozen=True)
class Form:
    """A way to keep checkpoints.

    Attributes:
        write: writes one of a pipe.
        read: has a pipe go on from one.
    """

    write: Callable[..., None]
    read: Callable[..., Any]


FORMS = {
    "file": Form(fxpipe.Pipeline.checkpoint, fxpipe.Pipeline.restore),
    "folder": Form(fxpipe.Pipeline.save, fxpipe.Pipeline.load),
}


@dataclass
class Left:
    """What a run has left behind.

    Attributes:
        losses: of its batches.
        state: the model's.
        kept: name of a parameter → what the optimizer keeps for it, and its settings.
        draw: what torch's generator gives next.
        batches: the pipe's counter.
    """

    losses: list[float]
    state: dict[str, Tensor]
    kept: dict[str, dict[str, Any]]
    draw: float
    batches: int

    @staticmethod
    def by(pipe: fxpipe.Pipeline, losses: list[float]) -> Left:
        """What a pipe leaves; it draws from torch's generator."""
        state = {name: value.clone() for name, value in pipe.state_dict().items()}
        names = {parameter: name for name, parameter in pipe.named_parameters()}
        kept = {
            names[p]: copy.deepcopy({**group, **pipe.optimizer.state.get(p, {}), "params": None})
            for group in pipe.optimizer.param_groups
            for p in group["params"]
        }
        return Left(losses, state, kept, float(torch.rand(())), pipe.batches)

    def assert_same(self, other: Left) -> None:
        assert self.losses == other.losses
        assert (self.draw, self.batches) == (other.draw, other.batches)
        assert self.state.keys() == other.state.keys()
        assert self.kept.keys() == other.kept.keys()
        for name, value in self.state.items():
            assert torch.equal(value, other.state[name]), name
        for name, mine in self.kept.items():
            theirs = other.kept[name]
            assert mine.keys() == theirs.keys()
            for key, value in mine.items():
                found = theirs[key]
                same = torch.equal(value, found) if isinstance(value, Tensor) else value == found
                assert same, f"{key} of {name}"


def make(case: str, batches: int, samples: int) -> tuple[nn.Module, list[Batch]]:
    """A small model in double precision, and batches for it; the same ones at each call."""
    torch.manual_seed(0)
    if case == "unet":
        model: nn.Module = UNet(channels=1, base=2, depth=1)
        shape: tuple[int, ...] = (samples, 1, 4, 4)
    else:
        model = nn.Sequential(*(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(4)))
        shape = (samples, 6)
    data = [(torch.randn(shape).double(), torch.randn(shape).double()) for _ in range(batches)]
    return model.double(), data


def run(pipe: fxpipe.Pipeline, data: list[Batch]) -> list[float]:
    """The losses of batches."""
    return [float(pipe.step(x, target=y)) for x, y in data]


def write_one(path: Path) -> Path:
    """A checkpoint of three batches of the MLP, with AdamW."""
    model, data = make("mlp", 3, 4)
    with fxpipe.compile(model, 2, loss=MSE, optimizer=ADAMW, **PLAIN) as pipe:
        run(pipe, data)
        pipe.checkpoint(path)
    return path


def everything(pipe: fxpipe.Pipeline, scaler: torch.amp.GradScaler) -> list[Any]:
    """All that a restore could change."""
    pipe.flush()
    kept = pipe.optimizer.state_dict()
    made = [dict(pipe.state_dict()), kept, torch.get_rng_state(), pipe.batches]
    return copy.deepcopy([*made, pipe.grad_norm, scaler.get_scale(), pipe.weight_versions])


def same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return torch.equal(one, other)
    if isinstance(one, Mapping):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)
