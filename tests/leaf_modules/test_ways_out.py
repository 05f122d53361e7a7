"""What errors and pages recommend where a line cannot be traced trains as the loop does."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, ctc_loss, mse_loss

import fxpipe
from fxpipe import TraceError
from tests.helpers.profiles import deep
from tests.oracles import loop

SCHEDULES = ["1f1b", *deep("zb-h1")]


def assert_trains(
    model: nn.Module, *args: Tensor, loss: Any = None, target: Any = None, **options: Any
) -> None:
    """Two steps over two devices have the loss and the gradients of the loop, bit for bit."""
    alone = copy.deepcopy(model)
    with fxpipe.compile(model, 2, microbatches=4, loss=loss, **options) as pipe:
        for _ in range(2):
            made = pipe.step(*args, target=target)
            looped = loop.train(alone, 4, *args, loss=loss, target=target)
            assert torch.equal(made, looped.loss)
    loop.assert_same(loop.gradients(model), loop.gradients(alone))
    loop.assert_same(dict(model.named_buffers()), dict(alone.named_buffers()))


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))


class Penalised(nn.Module):
    """A gradient penalty by ``torch.func.grad``."""

    def __init__(self) -> None:
        super().__init__()
        self.net = net()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        slope = torch.func.grad(lambda each: self.net(each).sum())(x)
        return self.net(x), slope


class Forces(Penalised):
    """The gradient of an energy, as in models of molecules."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        with torch.enable_grad():
            x = x.requires_grad_()
            energy = self.net(x)
            force = -torch.autograd.grad(energy.sum(), x, create_graph=True)[0]
        return energy, force


class Inside(nn.Module):
    """Has the other model as a submodule."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.first, self.inner, self.last = nn.Linear(8, 8), inner, nn.Linear(1, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y, slope = self.inner(self.first(x).tanh())
        return self.last(y), slope


def both(output: tuple[Tensor, Tensor], target: Tensor) -> Tensor:
    y, slope = output
    return mse_loss(y, target) + slope.square().mean()


@pytest.mark.smoke
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(
    ("inner", "given"), [(Penalised, []), (Penalised, ["inner"]), (Forces, ["inner"])]
)
def test_gradients_of_gradients_are_trained_in_a_submodule(
    inner: Callable[[], nn.Module], given: list[str], schedule: str
) -> None:
    torch.manual_seed(0)
    options: dict[str, Any] = {"extensions": [fxpipe.LeafModules(*given)], "schedule": schedule}
    x, target = torch.randn(8, 8), torch.randn(8, 1)
    assert_trains(Inside(inner()), x, loss=both, target=target, **options)


@pytest.mark.parametrize("model", [Penalised, Forces])
def test_in_the_forward_of_the_model_they_are_traced(model: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    assert_trains(model(), torch.randn(8, 8), loss=both, target=torch.randn(8, 1))


class OfALeaf(Forces):
    """The energy comes from a submodule that branches on values."""

    class Branches(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x if x.abs().max() < 9 else x / 9)

    def __init__(self) -> None:
        super().__init__()
        self.net[0] = self.Branches(8, 8)


def test_a_leaf_whose_gradient_is_differentiated_is_refused_and_one_around_both_trains() -> None:
    torch.manual_seed(0)
    x, target = torch.randn(8, 8), torch.randn(8, 1)
    with (
        fxpipe.compile(OfALeaf(), 2, microbatches=4, loss=both) as pipe,
        pytest.raises(TraceError, match=r"leaf module 'net.*' is differentiated in the model's"),
    ):
        pipe.step(x, target=target)
    assert_trains(Inside(OfALeaf()), x, loss=both, target=target)


class Experts(nn.Module):
    """Its auxiliary loss is left on the module, returned, written into a buffer or only kept."""

    load: Tensor

    def __init__(self, way: str) -> None:
        super().__init__()
        self.gate, self.expert, self.way = nn.Linear(8, 8), nn.Linear(8, 8), way
        self.auxiliary: Tensor | None = None
        if way == "buffer":
            self.register_buffer("load", torch.zeros(8))

    def forward(self, x: Tensor) -> Any:
        scores = self.gate(x).softmax(-1)
        y, auxiliary = self.expert(x) * scores, scores.square().mean()
        match self.way:
            case "left" | "kept":
                self.auxiliary = auxiliary if self.way == "left" else auxiliary.detach()
            case "returned":
                return y, auxiliary
            case "buffer":
                self.load.copy_(scores.detach().mean(0))
        return y


class Routed(nn.Module):
    def __init__(self, way: str) -> None:
        super().__init__()
        self.first, self.experts, self.last = nn.Linear(8, 8), Experts(way), nn.Linear(8, 4)

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        y = self.experts(self.first(x))
        auxiliary: Any = 0.0
        if self.experts.way == "returned":
            y, auxiliary = y
        elif self.experts.way == "left":
            auxiliary = self.experts.auxiliary
        return {"loss": cross_entropy(self.last(y), labels) + 0.1 * auxiliary}


def tokens() -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    return torch.randn(8, 8), torch.arange(8) % 4


@pytest.mark.smoke
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(
    ("way", "given"),
    [
        ("returned", []),
        ("returned", ["experts"]),
        ("buffer", []),
        ("kept", ["experts"]),
        ("left", []),
    ],
)
def test_the_ways_out_of_an_auxiliary_loss_on_a_module_train(
    way: str, given: list[str], schedule: str
) -> None:
    options: dict[str, Any] = {"extensions": [fxpipe.LeafModules(*given)], "schedule": schedule}
    x, y = tokens()
    assert_trains(Routed(way), x, y, **options)


@pytest.mark.smoke
def test_an_auxiliary_loss_that_the_model_reads_from_a_leaf_module_is_refused() -> None:
    text = "'experts' sets its attribute 'auxiliary' in every call, .* return it, too"
    options: dict[str, Any] = {"extensions": [fxpipe.LeafModules("experts")]}
    with (
        fxpipe.compile(Routed("left"), 2, microbatches=4, **options) as pipe,
        pytest.raises(TraceError, match=text),
    ):
        pipe.step(*tokens())


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.cells, self.last = nn.Linear(5, 6), nn.GRU(6, 6), nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.last(self.cells(self.first(x).transpose(0, 1))[0].transpose(0, 1))
        return y


def test_a_gru_that_is_a_leaf_module_has_the_bits_of_the_loop() -> None:
    torch.manual_seed(0)
    given = [fxpipe.LeafModules(nn.GRU)]
    target = torch.randn(8, 7, 4)
    assert_trains(Recurrent(), torch.randn(8, 7, 5), loss=mse_loss, target=target, extensions=given)


def picked(output: Tensor, target: Tensor) -> Tensor:
    kept = target > 0
    return (output[kept] - target[kept]).square().sum() / target.numel()


def aligned(output: Tensor, target: Tensor, lengths: Tensor) -> Tensor:
    whole = torch.full((len(output),), output.shape[1])
    scores = output.log_softmax(-1).transpose(0, 1)
    each = ctc_loss(scores, target, whole, lengths, reduction="none")
    return (each / lengths).mean()


@pytest.mark.smoke
def test_lines_that_depend_on_values_train_in_the_loss() -> None:
    torch.manual_seed(0)
    x = torch.randn(8, 7, 5)
    model = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 4))
    assert_trains(model, x, loss=picked, target=torch.randn(8, 7, 4))
    model.zero_grad()
    target = torch.randint(1, 4, (8, 3)), torch.tensor([3, 2, 1, 3, 3, 1, 2, 2])
    assert_trains(model, x, loss=aligned, target=target)


def halve(gradient: Tensor) -> Tensor:
    return gradient / 2


class Halving(nn.Module):
    """Has a hook on the gradient of a value."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x)
        if y.requires_grad:
            y.register_hook(halve)
        return y.tanh()


@pytest.mark.smoke
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_hook_on_a_gradient_is_called_in_a_leaf_module(schedule: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), Halving(), nn.Linear(8, 4))
    options: dict[str, Any] = {
        "extensions": [fxpipe.LeafModules(Halving)],
        "schedule": schedule,
    }
    target = torch.randn(8, 4)
    assert_trains(model, torch.randn(8, 8), loss=mse_loss, target=target, **options)


def test_what_a_hook_on_a_parameter_does_is_done_after_the_step() -> None:
    torch.manual_seed(0)
    model, x, y = net(), torch.randn(8, 8), torch.randn(8, 1)
    alone = copy.deepcopy(model)
    handles = [parameter.register_hook(halve) for parameter in model.parameters()]
    options: dict[str, Any] = {"microbatches": 4, "loss": mse_loss}
    with (
        fxpipe.compile(model, 2, **options) as pipe,
        pytest.raises(TraceError, match=r"has a hook on its gradient.*change \.grad after step"),
    ):
        pipe.step(x, target=y)
    for handle in handles:
        handle.remove()
    with fxpipe.compile(model, 2, **options) as pipe:
        pipe.step(x, target=y)
    for mine, its in zip(model.parameters(), alone.parameters(), strict=True):
        assert mine.grad is not None
        mine.grad = halve(mine.grad)
        its.register_hook(halve)
    loop.train(alone, 4, x, loss=mse_loss, target=y)
    loop.assert_same(loop.gradients(model), loop.gradients(alone), 1e-12)
