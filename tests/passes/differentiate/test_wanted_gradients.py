"""Gradients that nobody wants: no graph makes them, and nothing is saved for them."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fxpipe.ir.value import HOST
from fxpipe.kernels.graph import GraphKernel
from fxpipe.passes.differentiate.divide import Wanted, divide
from fxpipe.passes.partition.cut import cut
from tests.helpers.fronted import (
    Answer,
    assert_equal,
    differentiated,
    front_end,
    in_stages,
    run_plan,
    whole,
)


def test_frozen_parameters_have_no_gradient() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    for parameter in model[0].parameters():
        parameter.requires_grad_(False)
    x = torch.randn(3, 4)
    traced = front_end(model, x)
    plan = differentiated(model, traced, in_stages(traced, 3), x)
    ran = run_plan(model, traced, plan, x)
    assert_equal(ran.gradients, Answer(model, x).gradients)
    assert set(ran.gradients) == {"2.weight", "2.bias"}
    assert plan.stages[0].backward is None
    assert not plan.gradients_into(0)


def test_nothing_differentiable_makes_no_backward_graph() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU()).requires_grad_(False)
    x = torch.randn(3, 4)
    traced = front_end(model, x)
    plan = differentiated(model, traced, whole(traced), x, inputs=True)
    assert plan.stages[0].backward is None
    assert not plan.gradients


def test_without_wanted_gradients_nothing_is_saved() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    x = torch.randn(3, 4)
    traced = front_end(model, x)
    plan = cut(traced, in_stages(traced, 2), {})
    plan = divide(plan, traced, traced.state_of(model), Wanted())
    for stage in plan.stages:
        assert stage.backward is None
        assert isinstance(stage.kernel, GraphKernel)
    ran = run_plan(model, traced, plan, x)
    assert ran.gradients == {}
    (out,) = (e.value for e in plan.edges if e.target == HOST)
    assert torch.equal(ran.values[out], model(x))


class Two(nn.Module):
    """A layer for each of its two inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.other = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        product: Tensor = self.first(x) * self.other(y)
        return product


def test_only_inputs_that_want_a_gradient_get_one() -> None:
    model = Two()
    args = torch.randn(3, 4, requires_grad=True), torch.randn(3, 4)
    traced = front_end(model, *args)
    for inputs in (True, False):
        plan = differentiated(model, traced, whole(traced), *args, inputs=inputs)
        carried = {e.value for e in plan.gradients_from(0)}
        assert carried == ({traced.inputs[0]} if inputs else set())
