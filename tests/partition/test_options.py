"""What ``fxpipe.Partition`` asks for, from the user's call to the stages that come out."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxpipe
from fxpipe.ir.schedule import Schedule
from fxpipe.passes.partition.options import Partition


class Blocks(nn.Module):
    """Four blocks, the third much wider than the others, and a skip over two of them."""

    def __init__(self, wide: int = 256) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(32, 32), nn.ReLU())
        self.second = nn.Sequential(nn.Linear(32, 32), nn.ReLU())
        self.third = nn.Sequential(nn.Linear(32, wide), nn.ReLU(), nn.Linear(wide, 32))
        self.last = nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        y: Tensor = self.last(self.third(self.second(h)) + h)
        return y


def compiled(model: nn.Module, devices: int = 2, **options: Any) -> fxpipe.Pipeline:
    x = torch.randn(8, 32)
    return fxpipe.compile(
        model,
        ["cpu"] * devices,
        microbatches=4,
        loss=nn.functional.mse_loss,
        example=((x,), {"target": x}),
        partition=Partition(**options),
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"at": [3]}, r"at is \[3\]; give a list of submodule names"),
        ({"memory_limits": [1, 2, 3]}, "memory_limits is .*; give one number, or a list of 2"),
        ({"memory_limits": [1, -1]}, "memory_limits of device 1 is -1; give a positive number"),
        ({"memory_limits": 0}, "memory_limits of device 0 is 0; give a positive number"),
        ({"device_speeds": 2}, "device_speeds is 2; give a list of 2, one for each device"),
        ({"device_speeds": [1, math.nan]}, "device_speeds of device 1 is nan; give a positive"),
        ({"device_speeds": [1, None]}, "device_speeds of device 1 is None; give a positive"),
        ({"link_bandwidth": 0}, "link_bandwidth from device 0 to device 1 is 0; give a positive"),
        (
            {"link_bandwidth": [1, 2]},
            r"link_bandwidth is .*; give one number \(bytes a second\), or",
        ),
        ({"link_latency": [[0, -1], [0, 0]]}, "link_latency from device 0 to device 1 is -1"),
        ({"link_latency": math.inf}, "device 0 to device 1 is inf; give a positive and finite"),
    ],
)
def test_wrong_options_are_refused_with_a_cure(options: dict[str, Any], message: str) -> None:
    with pytest.raises(fxpipe.InputError, match=message):
        compiled(Blocks(), **options)


def test_stages_of_one_device_share_its_limit_and_send_for_nothing() -> None:
    schedule = Schedule("vee", 1, (0, 1, 1, 0), ((), ()))
    options = Partition(memory_limits=[100, None], link_latency=0.5, device_speeds=[1, 2])
    machine = options.machine(schedule, ["a", "b"])
    assert machine.limits == (50, math.inf, math.inf, 50)
    assert machine.speeds == (1, 2, 2, 1)
    assert machine.names == ("a", "b", "b", "a")
    assert machine.per_message[0] == (0, 0.5, 0.5, 0)
    assert machine.per_message[1] == (0.5, 0, 0, 0.5)


class Tied(nn.Module):
    """The head shows the embedding's weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 32)
        self.body = nn.Sequential(*(nn.Linear(32, 32) for _ in range(6)))
        self.head = nn.Linear(32, 50, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.head(self.body(self.embedding(x)))
        return y


def test_a_tied_weight_has_one_owner_and_its_way_is_counted() -> None:
    """Over a slow link the head is worth having beside the embedding: all but one layer is."""
    x = torch.randint(50, (8,))
    with fxpipe.compile(
        Tied(),
        ["cpu", "cpu"],
        microbatches=2,
        loss=nn.functional.cross_entropy,
        example=((x,), {"target": x}),
        partition=Partition(link_bandwidth=1e5),
    ) as pipe:
        owners = [
            s.index for s in pipe.plan.stages for a in s.parameters if "embedding" in a.target
        ]
        assert owners == [0]
        sent = {edge.value for edge in pipe.plan.edges if edge.source == 0 and edge.target == 1}
        assert not any("embedding_weight" in value for value in sent)
