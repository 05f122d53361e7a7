"""Where parameters are while a model is compiled for devices with memory of their own.

With real ones see tests/gpu/test_compile_memory.py.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

import fxpipe
from fxpipe.kernels.serial import SerialResult, run_serially
from fxpipe.torchtools.meta import lent


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
