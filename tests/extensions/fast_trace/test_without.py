"""PyTorch's own tracers, in the place of the extension's, give the same training."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import fxpipe
from fxpipe import extend


class Net(nn.Module):
    """With writes in place, a buffer, random numbers and a value that is read twice."""

    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(4, 6), nn.BatchNorm1d(6)
        self.drop, self.last = nn.Dropout(0.5), nn.Linear(6, 2)
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        h = self.norm(self.first(x)).relu_()
        y: Tensor = self.last(self.drop(h) + h.tanh())
        return y


def trained(model: Net, x: Tensor, y: Tensor) -> list[Tensor]:
    """The losses of three steps, and then the model's state."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with fxpipe.compile(
        model, ["cpu"] * 2, microbatches=2, loss=mse_loss, optimizer=optimizer, partition=["norm"]
    ) as pipe:
        losses = [pipe.step(x, target=y) for _ in range(3)]
        assert torch.equal(model.count, torch.tensor(6.0))
    return [*losses, *model.state_dict().values()]


@pytest.mark.traces
def test_training_is_the_same_without_the_extension(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model, x, y = Net(), torch.randn(8, 4), torch.randn(8, 2)
    other = copy.deepcopy(model)
    torch.manual_seed(1)
    expected = trained(model, x, y)
    known = extend._REGISTRY["option"]
    for name in ("recorder", "rewrite"):
        monkeypatch.delitem(known, name)
    torch.manual_seed(1)
    found = trained(other, x, y)
    assert all(map(torch.equal, found, expected))
