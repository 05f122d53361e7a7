"""What stages in parts draw: what one process draws, and for each part of a value other numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleOutput,
    RowwiseParallel,
    parallelize_module,
)

import fxpipe
from tests.extensions.tensor_parallel.models import near
from tests.helpers.profiles import deep
from tests.helpers.ranks import DeviceMesh, on_ranks

pytestmark = pytest.mark.usefixtures("one_thread")

WIDTH = 16
X = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(1))


class Block(nn.Module):
    """Draws for what is whole on all ranks: before, behind and beside what is in parts."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.behind = nn.Dropout(0.2), nn.Dropout(0.4)
        self.up, self.down = nn.Linear(WIDTH, 24), nn.Linear(24, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.down(torch.tanh(self.up(self.before(x))))
        out: Tensor = x + self.behind(y) + 0.1 * torch.randn_like(x)
        return out


def blocks() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Block() for _ in range(4)))


def trained(devices: DeviceMesh | int, schedule: str) -> dict[str, Tensor]:
    """The losses and weights of a model that draws, in parts over a mesh."""
    model, options = blocks(), dict[str, Any](schedule=schedule, recompute="always")
    if isinstance(devices, DeviceMesh):
        devices = init_device_mesh("cpu", (2, 2), mesh_dim_names=("tp", "pp"))
        plan: dict[str, Any] = {f"{i}.up": ColwiseParallel() for i in range(4)}
        plan |= {f"{i}.down": RowwiseParallel() for i in range(4)}
        parallelize_module(model, devices["tp"], plan)
    with fxpipe.compile(
        model,
        devices,
        microbatches=4,
        loss=nn.functional.mse_loss,
        partition=["2"],
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        **options,
    ) as pipe:
        torch.manual_seed(7)
        found = {f"loss {step}": pipe.step(X, target=X).clone() for step in range(3)}
        return found | dict(pipe.state_dict(full=True))


@pytest.mark.parametrize("schedule", ["1f1b", *deep("zb-h1")])
def test_what_all_ranks_of_a_stage_have_they_draw_for_as_one_process(schedule: str) -> None:
    expected = trained(2, schedule)
    for found in on_ranks(4, trained, schedule):
        near(found, expected, schedule)


class Shown(nn.Module):
    """Dropout of ones; what becomes of each is in the output."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.drop, self.down = (
            nn.Linear(WIDTH, 64),
            nn.Dropout(0.5),
            nn.Linear(64, 64, bias=False),
        )
        with torch.no_grad():
            self.up.weight.zero_()
            self.up.bias.fill_(1.0)
            self.down.weight.copy_(torch.eye(64))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(self.drop(self.up(x)))
        return out


def shown(_: DeviceMesh, way: str) -> tuple[Tensor, Tensor, Tensor]:
    """What a step drew, what its gradients were made of, and what the next one drew."""
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("pp", "tp"))
    model, plan = Shown(), {"up": ColwiseParallel(), "down": RowwiseParallel()}
    if way == "cut":  # each rank takes its part of what all have
        cut = PrepareModuleOutput(
            output_layouts=(Replicate(),), desired_output_layouts=(Shard(-1),)
        )
        plan = {"up": cut, "down": RowwiseParallel()}
    parallelize_module(model, mesh["tp"], plan)
    target = torch.randn(8, 64, generator=torch.Generator().manual_seed(2))
    with fxpipe.compile(
        model,
        mesh,
        microbatches=2,
        loss=lambda out, target: (out * target).sum(),
        reduction="sum",
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=1.0),
        recompute="always",
    ) as pipe:
        torch.manual_seed(3)
        _, drawn = pipe.step(X, target=target, return_output=True)
        drawn, weight = drawn.clone(), pipe.state_dict(full=True)["down.weight"].clone()
        pipe.load_state_dict(Shown().state_dict())
        _, again = pipe.step(X, target=target, return_output=True)
    assert torch.allclose(torch.eye(64) - weight, target.T @ drawn, atol=1e-5)
    return drawn, weight, again.clone()


@pytest.mark.parametrize("way", ["divided", *deep("cut")])
def test_parts_of_a_value_are_drawn_for_apart_and_alike_in_the_backward(way: str) -> None:
    first, second = on_ranks(2, shown, way)
    for one, other in zip(first, second, strict=True):
        assert torch.equal(one, other)
    drawn, _, again = first
    assert set(drawn.unique().tolist()) == {0.0, 2.0}
    assert 0.4 < drawn.mean() / 2 < 0.6
    for part in (drawn, again):
        left, right = part.chunk(2, 1)
        assert 0.3 < (left != right).float().mean() < 0.7
    assert not torch.equal(drawn, again)
