"""A BatchNorm that averages over all its batches is traced, and equals PyTorch's to the bit."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

import fxpipe
from fxpipe.ir.traced import Value
from tests.helpers.fronted import (
    Answer,
    assert_equal,
    differentiated,
    front_end,
    in_stages,
    run_plan,
)
from tests.oracles import loop


def net(affine: bool = True) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(2, 4, 3),
        nn.BatchNorm2d(4, momentum=None, affine=affine),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(16, 4),
        nn.BatchNorm1d(4, momentum=None),
    )


@pytest.mark.parametrize("affine", [True, False])
def test_outputs_statistics_and_gradients_are_pytorchs(affine: bool) -> None:
    model = net(affine)
    model(torch.randn(5, 2, 4, 4))  # so that there are statistics to average with
    x = torch.randn(6, 2, 4, 4)
    traced = front_end(model, x)
    plan = differentiated(model, traced, in_stages(traced, 3), x)
    ran, answer = run_plan(model, traced, plan, x), Answer(model, x)
    (out,) = traced.outputs
    assert isinstance(out, Value)
    assert torch.equal(ran.values[out.name], answer.output)
    assert_equal(ran.state, answer.buffers)
    assert_equal(ran.gradients, answer.gradients)


@pytest.mark.parametrize(
    "options",
    [{"schedule": "zb-h1"}, {"leaf_modules": [nn.Conv2d]}],
    ids=["parted backwards", "leaf modules"],
)
def test_training_equals_the_loop(options: dict[str, Any]) -> None:
    model = net()
    alone = copy.deepcopy(model)
    with fxpipe.compile(model, ["cpu"] * 3, microbatches=3, loss=mse_loss, **options) as pipe:
        for seed in range(3):
            random = torch.Generator().manual_seed(seed)
            x = torch.randn(9, 2, 4, 4, generator=random)
            y = torch.randn(9, 4, generator=random)
            loop.clear(model, alone)
            loss = pipe.step(x, target=y)
            expected = loop.train(alone, 3, x, loss=mse_loss, target=y)
            assert torch.equal(loss, expected.loss)
            loop.assert_same(dict(model.named_buffers()), dict(alone.named_buffers()))
            loop.assert_same(loop.gradients(model), loop.gradients(alone))
        x = torch.randn(6, 2, 4, 4)
        assert torch.equal(pipe.eval()(x), torch.cat([alone.eval()(part) for part in x.chunk(3)]))


def test_tracing_leaves_the_module_as_it_was() -> None:
    model = net()
    before = [vars(module).keys() for module in model.modules()]
    front_end(model, torch.randn(6, 2, 4, 4))
    assert [vars(module).keys() for module in model.modules()] == before
    assert model[1].num_batches_tracked == 0
