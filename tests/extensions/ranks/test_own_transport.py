"""A transport of one's own between ranks: the one of docs/extensions.md, and one that fails."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import fxpipe
from fxpipe import ExecutionError
from fxpipe.extend import Extension
from fxpipe.extensions.ranks.transport import Direction
from tests.helpers.failing import Beside
from tests.helpers.ranks import DeviceMesh, on_ranks
from tests.oracles import loop
from tests.simcuda.process import simulated
from tests.simcuda.ranks import on_devices_of_ranks

PAGE = Path(__file__).parents[3] / "docs" / "extensions.md"


def of_the_page() -> Extension:
    """The extension of docs/extensions.md."""
    code = re.search(r"^### A transport$.*?^```python\n(.*?)^```$", PAGE.read_text(), re.M | re.S)
    assert code is not None and code[1].count("\n") <= 40
    names: dict[str, Any] = {"fxpipe": fxpipe, "torch": torch, "nn": nn, "Extension": Extension}
    exec(compile(code[1], str(PAGE), "exec"), names)
    made: Extension = names["SendsBfloat16"]()
    return made


class Rounded(torch.autograd.Function):
    """What goes over a boundary in bfloat16, and its gradient, too."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.bfloat16().float()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad.bfloat16().float()


class Rounding(nn.Sequential):
    """Rounds what goes to the last layer."""

    def forward(self, x: Tensor) -> Tensor:
        rounded: Tensor = self[2](Rounded.apply(self[1](self[0](x))))  # type: ignore[no-untyped-call]
        return rounded


def layers(kind: type[nn.Sequential] = nn.Sequential) -> nn.Sequential:
    torch.manual_seed(0)
    return kind(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))


def rounding(mesh: DeviceMesh) -> None:
    x, y = torch.randn(6, 4, generator=torch.manual_seed(1)), torch.tensor([0, 1, 2, 0, 1, 2])
    reference, optimizer = layers(Rounding), torch.optim.SGD
    updates = optimizer(reference.parameters(), lr=0.1)
    device = mesh.device_type
    pipe = fxpipe.compile(
        layers(),
        mesh,
        microbatches=3,
        partition=["2"],
        loss=functional.cross_entropy,
        optimizer=lambda parameters: optimizer(parameters, lr=0.1),
        extensions=[of_the_page()],
    )
    with pipe:
        for _ in range(3):
            updates.zero_grad()
            expected = loop.train(reference, 3, x, target=y, loss=functional.cross_entropy)
            updates.step()
            loss = pipe.step(x.to(device), target=y.to(device))
            assert torch.equal(loss.cpu(), expected.loss)
            state = reference.state_dict()
            for name, value in pipe.state_dict().items():
                assert torch.equal(value.cpu(), state[name]), name


def test_the_transport_of_the_page_sends_bfloat16_both_ways() -> None:
    on_ranks(2, rounding)


@simulated
def test_it_does_so_between_devices_with_streams() -> None:
    on_devices_of_ranks(2, rounding)


class Failing:
    """Sends as usual, until it is told to fail."""

    fails = False
    ends = 0

    def __init__(self, direction: Direction) -> None:
        Failing.ends += 1
        self.inner = direction.standard()
        self.sends, self.receive, self.abort = direction.sends, self.inner.receive, self.inner.abort
        assert (direction.source, direction.target) in ((0, 1), (1, 0))

    def send(self, value: Tensor) -> Any:
        if Failing.fails:
            raise OSError("the cable is broken")
        return self.inner.send(value)


class Fails(Extension):
    def transport(self) -> type[Failing]:
        return Failing


def failing(mesh: DeviceMesh) -> int:
    beside = Beside(mesh, extensions=[Fails()])
    beside.step()
    Failing.fails = mesh.get_local_rank() == 1
    x, y = beside.batch()
    with pytest.raises(ExecutionError, match="the cable is broken") as raised:
        beside.pipe.step(x, target=y)
    assert raised.value.device == 1
    Failing.fails = False
    beside.step()
    beside.pipe.close()
    return Failing.ends


def test_after_a_transport_has_failed_all_ranks_go_on_with_new_ones() -> None:
    assert on_ranks(2, failing) == [4, 4]  # two directions, made twice


def test_one_process_makes_no_transport() -> None:
    with fxpipe.compile(layers(), ["cpu"] * 2, partition=["2"], extensions=[Fails()]) as pipe:
        pipe(torch.ones(2, 4))
    assert Failing.ends == 0
