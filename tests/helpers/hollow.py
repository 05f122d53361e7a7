"""A model that may be built on the meta device, and what its training gives."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fxpipe
from tests.helpers.ranks import DeviceMesh

SEED = 5
CUTS = ["second", "norm", "head"]


class Layers(nn.Module):
    """Layers whose constructors draw: the first and the last share a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.first = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.2))
        self.second = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.LayerNorm(8))
        self.norm = nn.BatchNorm1d(8)
        self.head = nn.Linear(8, 11)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        h = self.second(self.first(self.embed(tokens)))
        logits: Tensor = self.head(self.norm(h[:, -1]))
        return logits


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(11, (8, 5), generator=generator), torch.arange(8)


def compiled(
    devices: DeviceMesh | int | list[str], model: nn.Module, **chosen: Any
) -> fxpipe.Pipeline:
    x, y = batch()
    defaults: dict[str, Any] = {
        "microbatches": 4,
        "loss": F.cross_entropy,
        "optimizer": lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
        "partition": ["second"],
        "example": ((x,), {"target": y}),
    }
    return fxpipe.compile(model, devices, **{**defaults, **chosen})


def without_data(make: Callable[[], nn.Module] = Layers) -> nn.Module:
    with torch.device("meta"):
        return make()


def with_data() -> Layers:
    torch.manual_seed(SEED)
    return Layers()


def trained(pipe: fxpipe.Pipeline) -> dict[str, Any]:
    torch.manual_seed(3)
    x, y = batch()
    losses = [float(pipe.step(x, target=y)) for _ in range(3)]
    pipe.eval()
    output = pipe(x)
    pipe.train()
    state = copy.deepcopy(pipe.state_dict())
    losses.append(float(pipe.step(x.repeat(2, 1), target=y.repeat(2))))  # larger micro-batches
    return {"losses": losses, "output": output, "state": state}


def assert_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found["losses"] == expected["losses"]
    assert torch.equal(found["output"], expected["output"])
    for name, value in found["state"].items():
        assert torch.equal(value, expected["state"][name]), name
