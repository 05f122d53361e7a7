"""A parameter that no optimizer of the pipe knows is refused, never left as it is in silence."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fxpipe


class TwoHeads(nn.Module):
    """Trains one head or the other."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(4, 4)
        self.heads = nn.ModuleList(nn.Linear(4, 3) for _ in range(2))

    def forward(self, x: Tensor, which: int = 0) -> Any:
        return self.heads[which](self.body(x).tanh())


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def other_module(model: Any) -> None:
    model.body = nn.Linear(4, 4)


def other_parameter(model: Any) -> None:
    model.body.weight = nn.Parameter(torch.randn(4, 4))


@pytest.mark.parametrize("schedule", ["1f1b", "2bw"])
@pytest.mark.parametrize("change", [other_module, other_parameter])
def test_a_parameter_that_was_exchanged_is_refused_until_it_is_back(
    change: Callable[[Any], None], schedule: str
) -> None:
    model = TwoHeads()
    x, target = torch.randn(8, 4), torch.randint(3, (8,))
    with fxpipe.compile(
        model, 2 * ["cpu"], schedule=schedule, microbatches=2, loss=F.cross_entropy, optimizer=sgd
    ) as pipe:
        pipe.step(x, target=target)
        pipe.flush()
        body, weight = model.body, model.body.weight
        change(model)
        with pytest.raises(fxpipe.InputError, match=r"'body\.weight' is not one that the optimi"):
            pipe.step(x, target=target)
        model.body, model.body.weight = body, weight
        before = weight.detach().clone()
        pipe.step(x, target=target)
        pipe.flush()
        assert not torch.equal(weight, before)


def test_a_state_that_is_assigned_is_refused() -> None:
    model = TwoHeads()
    x, target = torch.randn(8, 4), torch.randint(3, (8,))
    with fxpipe.compile(
        model, 2 * ["cpu"], microbatches=2, loss=F.cross_entropy, optimizer=sgd
    ) as pipe:
        pipe.step(x, target=target)
        pipe.load_state_dict(copy.deepcopy(model).state_dict(), assign=True)
        with pytest.raises(fxpipe.InputError, match="assign=True"):
            pipe.step(x, target=target)


def test_a_parameter_that_the_first_step_did_not_read_is_refused() -> None:
    model = TwoHeads()
    x, target = torch.randn(8, 4), torch.randint(3, (8,))
    with fxpipe.compile(
        model, 2 * ["cpu"], microbatches=2, loss=F.cross_entropy, optimizer=sgd
    ) as pipe:
        pipe.step(x, which=0, target=target)
        with pytest.raises(fxpipe.InputError, match=r"'heads\.1\.\w+' is not one .* did not read"):
            pipe.step(x, which=1, target=target)


def test_without_an_optimizer_parameters_may_be_exchanged() -> None:
    model = TwoHeads()
    x, target = torch.randn(8, 4), torch.randint(3, (8,))
    with fxpipe.compile(model, 2 * ["cpu"], microbatches=2, loss=F.cross_entropy) as pipe:
        pipe.step(x, which=0, target=target)
        other_module(model)
        pipe.step(x, which=1, target=target)
    assert model.body.weight.grad is not None
    assert model.heads[1].weight.grad is not None
