"""Models whose parameters are on several devices, and what the check of a plan keeps of them.

Where no CUDA devices are needed, they are those of tensors without data, which refuse to mix as
real ones do.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

import fxpipe
from fxpipe.extensions.model_check.following import Following
from fxpipe.extensions.model_check.serial import SerialResult, run_serially


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


two_devices = pytest.mark.skipif(
    torch.cuda.device_count() < 2, reason="there are no two CUDA devices"
)


@two_devices
def test_a_function_that_reads_weights_of_two_devices_is_taken_apart() -> None:
    """``multi_head_attention_forward`` is written in Python and reads all weights of its module."""
    alone = nn.MultiheadAttention(16, 2, batch_first=True)
    model = copy.deepcopy(alone)
    model.cuda(0)
    model.out_proj.cuda(1)
    x = torch.randn(4, 3, 16)
    outputs = []
    for module, given in ((alone, x), (model, x.cuda(0))):
        with Following(module):
            output = module(given, given, given)[0]
        output.square().sum().backward()
        outputs.append(output.detach().cpu())
    assert torch.allclose(outputs[0], outputs[1], atol=1e-5)
    for here, there in zip(model.parameters(), alone.parameters(), strict=True):
        assert here.grad is not None
        assert there.grad is not None
        assert here.grad.device == here.device
        assert torch.allclose(here.grad.cpu(), there.grad, atol=1e-4)


@two_devices
def test_a_value_that_is_written_with_a_weight_of_another_device_stays_where_it_is() -> None:
    class Shifts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = (nn.Parameter(torch.arange(1.0, 5.0)) for _ in range(2))

        def forward(self, x: Tensor) -> Tensor:
            h = x * self.first
            h += self.second
            h[0] = self.second * 2
            return h

    model = Shifts()
    expected = model(torch.ones(2, 4))
    model.first.data, model.second.data = model.first.data.cuda(0), model.second.data.cuda(1)
    with Following(model):
        output = model(torch.ones(2, 4, device="cuda:0"))
    output.sum().backward()
    assert output.device == torch.device("cuda:0")
    assert torch.equal(output.cpu(), expected)
    assert model.second.grad is not None
    assert model.second.grad.tolist() == [3.0] * 4


@two_devices
@pytest.mark.parametrize("kind", [nn.BatchNorm1d, nn.InstanceNorm1d])
def test_statistics_are_written_where_they_are_if_weights_are_on_another_device(kind: Any) -> None:
    alone = kind(4, affine=True, track_running_stats=True)
    model = copy.deepcopy(alone)
    model.cuda(1)
    model.running_mean, model.running_var = model.running_mean.cuda(0), model.running_var.cuda(0)
    x = torch.randn(3, 4, 5) + 1
    with Following(model):
        made = model(x.cuda(0))
    assert torch.allclose(made.cpu(), alone(x), atol=1e-5)
    for name, buffer in model.named_buffers():
        assert torch.allclose(buffer.cpu(), alone.get_buffer(name)), name
    assert model.running_mean.device == torch.device("cuda:0")


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
