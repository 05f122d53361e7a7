"""Gradients of a value that several stages read meet in autograd's order."""

from __future__ import annotations

import copy
from collections.abc import Callable
from random import Random

import pytest
import torch
from torch import Tensor, nn

import fxpipe
from fxpipe.ir.traced import Traced
from fxpipe.passes.partition.balance import balance
from fxpipe.passes.partition.measure import NodeCost
from tests.helpers.fronted import front_end
from tests.helpers.profiles import DEEP, deep
from tests.oracles import loop


class Shares(nn.Module):
    """A value that the layers of several stages read, each as often as it is told."""

    def __init__(self, reads: list[int]) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in reads)
        self.reads = reads

    def forward(self, x: Tensor) -> Tensor:
        shared = y = torch.tanh(self.first(x))
        for count, layer in zip(self.reads, self.layers, strict=True):
            y = layer(y)
            for power in range(count):
                y = torch.tanh(y) + shared * (0.3 + power)
        return y


@pytest.mark.parametrize("reads", [[1, 2, 1], [2, 3, 2, 2], [1, 4, 0, 1], [0, 3, 3, 1]])
@pytest.mark.parametrize("times", [1.0, *deep(1e3)])
def test_gradients_equal_the_loops(reads: list[int], times: float) -> None:
    torch.manual_seed(0)
    model = Shares(reads)
    alone = copy.deepcopy(model)
    loss: Callable[..., Tensor] = lambda y, t: ((y - t) ** 2).mean() * times  # noqa: E731
    with fxpipe.compile(
        model,
        ["cpu"] * len(reads),
        microbatches=2,
        loss=loss,
        partition=[f"layers.{index}" for index in range(1, len(reads))],
    ) as pipe:
        for rows in (4, 7) if DEEP or reads == [2, 3, 2, 2] else (4,):
            x, y = torch.randn(rows, 4), torch.randn(rows, 4)
            pipe.step(x, target=y)
            loop.train(alone, 2, x, loss=loss, target=y)
    loop.assert_same(loop.gradients(model), loop.gradients(alone))


class Normed(nn.Module):
    """What a normalisation gives is read twice in a middle stage, and again behind it."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm
        self.i, self.a, self.b, self.c = (nn.Linear(4, 4) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.i(x))
        y: Tensor = self.c(self.a(x) + self.b(x)) * x
        return y


NORMS: list[Callable[[], nn.Module]] = [
    lambda: nn.BatchNorm1d(4),
    lambda: nn.BatchNorm1d(4, track_running_stats=False),
]


@pytest.mark.parametrize("make", NORMS)
def test_gradients_behind_a_batchnorm_equal_the_loops(make: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    model = Normed(make()).double()
    alone = copy.deepcopy(model)
    loss: Callable[..., Tensor] = lambda y, t: ((y - t) ** 2).mean()  # noqa: E731
    with fxpipe.compile(model, 3, microbatches=2, loss=loss, partition=["a", "c"]) as pipe:
        for _ in range(5):
            x, y = torch.randn(8, 4).double(), torch.randn(8, 4).double()
            pipe.step(x, target=y)
            loop.train(alone, 2, x, loss=loss, target=y)
    loop.assert_same(loop.gradients(model), loop.gradients(alone))


class Parts(nn.Module):
    """Branches that read one value, none of which needs another."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(4))
        self.branches = nn.ModuleList(nn.Linear(4, 4) for _ in range(5))

    def forward(self, x: Tensor) -> Tensor:
        shared = torch.tanh(x * self.scale)
        return torch.stack([torch.tanh(branch(shared)) for branch in self.branches]).sum(0)


@pytest.mark.parametrize("seed", range(20 if DEEP else 4))
def test_readers_of_a_value_stand_in_stages_in_the_order_of_the_program(
    seed: int, trace: Callable[..., Traced] = front_end
) -> None:
    model, x, random = Parts(), torch.randn(3, 4), Random(seed)
    traced = trace(model, x)
    costs = {n.name: NodeCost(random.random() ** 4, 0.1, 1) for n in traced.graph.nodes}
    assignment = balance(traced, 3, costs)
    shared = next(node for node in traced.graph.nodes if node.name == "tanh")
    order = {node: place for place, node in enumerate(traced.graph.nodes)}
    stages = [assignment.nodes[n.name] for n in sorted(shared.users, key=order.__getitem__)]
    assert stages == sorted(stages)
