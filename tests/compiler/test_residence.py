"""Where parameters are while a model is compiled for devices with memory of their own.

Here devices are those of tensors without data, which refuse to mix as CUDA devices do; with real
ones see tests/gpu/test_compile_memory.py.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

import fxpipe
from fxpipe.kernels.serial import SerialResult, run_serially
from fxpipe.torchtools.following import Following
from fxpipe.torchtools.meta import lent


def placed(module: nn.Module, homes: dict[str, int]) -> nn.Module:
    """A module, each parameter of which is on one of the CUDA devices; without data."""
    for name, parameter in [*module.named_parameters()]:
        owner, _, last = name.rpartition(".")
        home = next(home for start, home in homes.items() if name.startswith(start))
        value = nn.Parameter(torch.empty(parameter.shape, device=f"cuda:{home}"), False)
        setattr(module.get_submodule(owner), last, value)
    return module


class Residual(nn.Module):
    """Reads its input once more where the layer's output is."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        h += x
        return torch.cat([h + torch.relu(self.second(h)), h])


@pytest.mark.parametrize("homes", [{"first": 0, "second": 1}, {"first": 1, "second": 0}])
def test_values_go_to_the_devices_of_weights(homes: dict[str, int]) -> None:
    model = Residual()
    with FakeTensorMode():
        placed(model, homes)
        x = torch.empty(4, 8, device="cuda:0")
        with pytest.raises(RuntimeError, match="device"):
            model(x)
        with Following(model):
            y = model(x)
        assert y.device == torch.device("cuda", list(homes.values())[-1])
        with pytest.raises(RuntimeError, match="device"):  # and no longer after it
            model(x)


def test_a_submodule_that_is_called_as_it_is_gets_what_it_reads() -> None:
    seen: list[Any] = []

    class Layer(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            seen.append(x.device)
            return super().forward(x)

    model = nn.Sequential(nn.Linear(8, 8), Layer(8, 8))
    with FakeTensorMode():
        placed(model, {"0": 0, "1": 1})
        with Following(model, [model[1]]):
            model(torch.empty(4, 8, device="cuda:0"))
    assert seen == [torch.device("cuda:1")]
    assert not model[1]._forward_pre_hooks


def test_lent_parameters_share_one_memory_and_get_their_own_data_back() -> None:
    model = nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16), nn.Linear(16, 4))
    weight = model[0].weight
    assert isinstance(weight, Tensor)
    weight.grad = torch.ones_like(weight)
    before = [
        (x, x.data_ptr(), x.detach().clone()) for x in (*model.parameters(), *model.buffers())
    ]
    with lent(model, [], torch.device("cpu")):
        assert len({x.data_ptr() for x in model.parameters()}) == 1
        assert model[0].weight is weight
        assert weight.grad is None
        assert not torch.equal(weight, before[0][2])
        model(torch.randn(8, 16)).sum().backward()
        assert model[1].num_batches_tracked == 1
    for tensor, place, value in before:
        assert tensor.data_ptr() == place
        assert torch.equal(tensor, value)
    assert weight.grad is not None
    assert torch.equal(weight.grad, torch.ones_like(weight))
    assert model[2].weight.grad is None


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_the_check_keeps_no_gradients_of_a_stage_beside_those_of_the_next(schedule: str) -> None:
    """Nor those of one run beside those of another."""
    alive: list[weakref.ref[Tensor]] = []
    most: list[int] = []

    def watched(*args: Any, take: Callable[[str, Tensor], None], **options: Any) -> SerialResult:
        def count(name: str, gradient: Tensor) -> None:
            alive.append(weakref.ref(gradient))
            most.append(sum(made() is not None for made in alive))
            take(name, gradient)

        return run_serially(*args, take=count, **options)

    model = nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(6)))
    module = "fxpipe.extensions.model_check.check.run_serially"
    with (
        patch(module, watched),
        fxpipe.compile(
            model,
            ["cpu"] * 3,
            microbatches=4,
            schedule=schedule,
            partition=["2", "4"],
            loss=nn.functional.mse_loss,
        ) as pipe,
    ):
        pipe.prepare(torch.randn(8, 8), target=torch.randn(8, 8))
    assert len(most) == (12 if schedule == "zb-h1" else 6)
    assert max(most) == 2
