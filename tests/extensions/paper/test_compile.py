"""Compiling on paper: nothing of the model is run."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.functional import mse_loss

import fxpipe
from fxpipe.errors import InputError
from fxpipe.extensions.paper.presets import P40

pytestmark = [pytest.mark.smoke, pytest.mark.models]


class Watching(nn.Module):
    """Notes whether its forward computes data."""

    seen: tuple[str, ...] = ()

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x)
        if type(y) is Tensor:  # else it is fake, or wrapped while it is traced
            Watching.seen += (str(y.device),)
        return torch.relu(y)


def model_of(layers: int) -> nn.Sequential:
    return nn.Sequential(*(Watching() for _ in range(layers)))


def compiled(model: nn.Module, x: Tensor, **options: Any) -> fxpipe.Pipeline:
    return fxpipe.compile(
        model,
        2,
        microbatches=4,
        loss=mse_loss,
        example=((x,), {"target": x}),
        **{"costs": P40, **options},
    )


@pytest.mark.parametrize("device", ["meta", "cpu"])
def test_a_model_is_cut_and_predicted_by_flops_and_nothing_runs(
    device: str, caplog: pytest.LogCaptureFixture
) -> None:
    Watching.seen = ()
    with torch.device(device):
        model, x = model_of(4), torch.zeros(32, 64)
    with caplog.at_level("INFO", logger="fxpipe"), compiled(model, x) as pipe:
        found = pipe.simulate()
    assert not Watching.seen
    assert "nothing of the model is run, timed or compared" in caplog.text
    assert found.seconds
    stages = [stage.costs for stage in pipe.plan.stages]
    flops = 2 * 8 * 64 * 64
    tiles = 2 * 1  # of 64 columns, of 32 each
    product = max(flops / P40.flops * 30 / tiles, P40.launch)
    relu = max(2 * 8 * 64 * 4 / P40.bandwidth / P40.streaming, P40.launch)
    for costs in stages[:1]:
        assert costs is not None
        assert costs.forward == pytest.approx(2 * (product + relu), rel=0.01)
    assert all(memory.parts["besides"] == P40.context for memory in found.memory)


def test_times_are_the_same_each_time() -> None:
    def costs() -> list[Any]:
        with torch.device("meta"):
            model, x = model_of(5), torch.zeros(32, 64)
        with compiled(model, x, schedule="zb-h1") as pipe:
            return [stage.costs for stage in pipe.plan.stages]

    assert costs() == costs()


def test_the_example_may_be_fake_and_the_model_may_not() -> None:
    with FakeTensorMode():
        x = torch.zeros(32, 64)
    with compiled(model_of(3), x) as pipe:
        assert pipe.simulate().makespan > 0
    with FakeTensorMode():
        model = model_of(3)
    with pytest.raises(InputError, match=r"parameter '0.layer.weight' is a fake tensor"):
        compiled(model, x)


def test_costs_are_of_a_device() -> None:
    with pytest.raises(InputError, match="costs is 3; give a described device"):
        compiled(model_of(2), torch.zeros(8, 64), costs=3)
