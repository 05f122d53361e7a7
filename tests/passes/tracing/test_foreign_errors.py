"""What PyTorch's own tracers fail at is right, or refused with a way out that works."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fxpipe
from fxpipe.errors import InputError
from tests.oracles import loop


class Differentiates(nn.Module):
    """Returns an energy, and its gradient to the input."""

    def __init__(self, function: Callable[[Any, Tensor], tuple[Tensor, Tensor]]) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))
        self.head = nn.Linear(1, 1)
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        energy, force = self.function(self.body, x)
        return torch.cat([self.head(energy), force], 1)


def by_autograd(body: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    x = x.detach().requires_grad_()
    with torch.enable_grad():
        energy = body(x)
        force = torch.autograd.grad(energy.sum(), x, create_graph=True)[0]
    return energy, force


def by_vjp(body: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    energy, back = torch.func.vjp(body, x)[:2]
    return energy, back(torch.ones_like(energy))[0]


def by_vmap(body: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    force = torch.func.vmap(torch.func.grad(lambda row: body(row).squeeze(-1)))(x)
    return body(x), force


@pytest.mark.parametrize("function", [by_autograd, by_vjp, by_vmap])
def test_gradients_taken_in_the_forward_of_a_submodule_are_those_of_the_loop(function: Any) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3), Differentiates(function))
    alone = copy.deepcopy(model)
    leaves = fxpipe.LeafModules(Differentiates)
    x, y = torch.randn(4, 3), torch.randn(4, 4)
    with fxpipe.compile(model, 1, microbatches=2, loss=F.mse_loss, extensions=[leaves]) as pipe:
        assert pipe.step(x, target=y) == loop.train(alone, 2, x, loss=F.mse_loss, target=y).loss
    for mine, its in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, its.grad, rtol=0, atol=0)


class Nested(nn.Module):
    """Works on rows of different lengths."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.last = (nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        rows = [row[:2] for row in self.first(x)]
        nested = torch.nested.as_nested_tensor(rows, layout=torch.jagged)
        padded = torch.nested.to_padded_tensor(self.middle(nested), 0.0, (len(x), 3, 4))
        made: Tensor = self.last(padded)
        return made * (1.0 if x.sum() > 0 else 2.0)


def test_nested_tensors_in_the_forward_of_a_submodule_compute_what_the_loop_does() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), Nested())
    alone = copy.deepcopy(model)
    x = torch.randn(4, 3, 4)
    with fxpipe.compile(model, 1, microbatches=2, loss=F.mse_loss) as pipe:
        assert pipe.step(x, target=x) == loop.train(alone, 2, x, loss=F.mse_loss, target=x).loss
    for mine, its in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, its.grad, rtol=0, atol=0)


def test_a_lazy_buffer_is_refused_and_a_run_in_evaluation_mode_gives_it_a_shape() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.LazyLinear(5), nn.LazyBatchNorm1d(), nn.Linear(5, 4))
    x = torch.randn(4, 4)
    with (
        fxpipe.compile(model, 1, microbatches=2, loss=F.mse_loss) as pipe,
        pytest.raises(InputError, match=r"buffer '1\.running_mean' .* model\.eval\(\)"),
    ):
        pipe.step(x, target=x)
    model.eval()
    model(x[:2])
    model.train()
    alone = copy.deepcopy(model)
    with fxpipe.compile(model, 1, microbatches=2, loss=F.mse_loss) as pipe:
        assert pipe.step(x, target=x) == loop.train(alone, 2, x, loss=F.mse_loss, target=x).loss
    name = "1.running_mean"
    assert torch.equal(model.get_buffer(name), alone.get_buffer(name))


def test_a_nested_input_is_refused_and_its_padded_rows_are_taken() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    rows = [torch.randn(1 + index, 4) for index in range(4)]
    nested = torch.nested.nested_tensor(rows, layout=torch.jagged)
    with fxpipe.compile(model, 1, microbatches=2, loss=Tensor.mean) as pipe:
        with pytest.raises(InputError, match=r"input\.to_padded_tensor\(0\.0\)"):
            pipe.step(nested)
        assert pipe.step(nested.to_padded_tensor(0.0)).isfinite()
