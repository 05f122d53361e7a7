"""Gradients that no stage would compute, or hand on, are refused and never lost in silence."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fxpipe
from tests.oracles import loop

OUTSIDE = torch.ones(4, requires_grad=True)
TINY = 1e-6
"""A weight of a term whose gradient is too small to be noticed by the numbers."""


class Net(nn.Module):
    """Two layers, and something between them."""

    def __init__(self, between: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.last = nn.Linear(4, 3)
        self.held = [nn.Parameter(torch.ones(4))]
        self.between = between

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.last(self.between(self, self.first(x)).tanh())
        return made


def step(
    model: nn.Module,
    loss: Callable[..., Tensor] = F.cross_entropy,
    extensions: Any = (),
    **options: Any,
) -> None:
    with fxpipe.compile(
        model, 2 * ["cpu"], microbatches=2, loss=loss, extensions=extensions, **options
    ) as pipe:
        pipe.step(torch.randn(8, 4), target=torch.randint(3, (8,)))


@pytest.mark.parametrize(
    "between",
    [lambda net, x: x + TINY * net.held[0], lambda net, x: x + TINY * OUTSIDE],
    ids=["a parameter in a list", "a tensor from outside"],
)
def test_a_tensor_that_is_no_parameter_and_needs_a_gradient_is_refused(between: Any) -> None:
    message = r"Net reads a tensor of shape \(4,\) that requires a gradient.*register it"
    with pytest.raises(fxpipe.TraceError, match=message):
        step(Net(between))


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.held = [torch.ones(4, requires_grad=True)]

    def forward(self, x: Tensor) -> Tensor:
        return x * self.held[0]


def test_a_trained_tensor_that_only_a_leaf_module_reads_is_refused() -> None:
    model = nn.Sequential(nn.Linear(4, 4), Scaled(), nn.Linear(4, 3))
    leaves = fxpipe.LeafModules("1")
    with (
        fxpipe.compile(model, 2, loss=F.cross_entropy, extensions=[leaves]) as pipe,
        pytest.raises(fxpipe.TraceError, match="requires a gradient and is no parameter of it"),
    ):
        pipe.step(torch.randn(4, 4), target=torch.zeros(4, dtype=torch.long))


def test_a_loss_that_adds_the_models_weights_is_refused() -> None:
    model = Net(lambda net, x: x)
    message = r"the loss reads the model's parameter '.*', to which it would give no gradient"
    with pytest.raises(fxpipe.InputError, match=message):
        step(
            model,
            lambda output, target: (
                F.cross_entropy(output, target)
                + TINY * sum(p.square().sum() for p in model.parameters())
            ),
        )


def test_a_loss_with_a_trained_tensor_of_its_own_is_refused() -> None:
    with pytest.raises(fxpipe.InputError, match=r"the loss reads a tensor of shape \(4,\)"):
        step(
            nn.Linear(4, 3),
            lambda output, target: F.cross_entropy(output, target) + TINY * OUTSIDE.sum(),
        )


def test_a_value_may_be_made_to_require_a_gradient() -> None:
    def between(net: Any, x: Tensor) -> Tensor:
        with torch.no_grad():
            y: Tensor = net.first(x)
        return x + y.requires_grad_()

    step(Net(between))


def hooked(net: Any, x: Tensor) -> Tensor:
    x.register_hook(lambda gradient: gradient.clamp(-1e3, 1e3))
    return x


def hooked_in_training(net: Any, x: Tensor) -> Tensor:
    return hooked(net, x) if x.requires_grad else x


def retained(net: Any, x: Tensor) -> Tensor:
    x.retain_grad()
    return x


@pytest.mark.parametrize("between", [hooked_in_training, hooked, retained])
def test_a_hook_on_a_value_trains_as_in_the_loop(between: Any) -> None:
    step(Net(between))
    x = torch.ones(2, requires_grad=True)
    x.register_hook(lambda gradient: gradient * 2)  # elsewhere hooks work on
    x.sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [2.0, 2.0]


class Halved(nn.Module):
    """A layer whose input gets half of its gradient, and which keeps that of its result."""

    kept: Tensor | None = None

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x).tanh()
        y.register_hook(lambda gradient: 0.5 * gradient)
        self.kept = 2 * y
        self.kept.retain_grad()
        return self.kept


class Forces(nn.Module):
    """An energy and its gradient, as interatomic potentials have them."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        energy: Tensor = self.layer(x).tanh()
        force: Tensor = torch.autograd.grad(energy.sum(), x, create_graph=True)[0]
        return energy + force


LEAVES: list[tuple[Any, list[Any]]] = [
    (Halved, [Halved]),
    (Forces, [Forces]),
]


@pytest.mark.parametrize(("inner", "leaves"), LEAVES)
def test_a_leaf_that_needs_gradients_in_forward_trains_and_is_refused_without_them(
    inner: Any, leaves: Any
) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), inner(), nn.Linear(4, 4), nn.Linear(4, 3))
    alone = copy.deepcopy(model)
    x, target = torch.randn(8, 4), torch.randint(3, (8,))
    with fxpipe.compile(
        model,
        2 * ["cpu"],
        microbatches=2,
        loss=F.cross_entropy,
        extensions=[fxpipe.LeafModules(*leaves)],
    ) as pipe:
        pipe.step(x, target=target)
        loop.train(alone, 2, x, loss=F.cross_entropy, target=target)
        loop.assert_same(loop.gradients(model), loop.gradients(alone))
        if inner is Halved:
            assert model[1].kept.grad is not None
        message = r"fails on the first micro-batch without gradients, at .*test_lost_gradients"
        with torch.no_grad(), pytest.raises(fxpipe.InputError, match=message):
            pipe(x)


@pytest.mark.parametrize("name", ["register_hook", "register_post_accumulate_grad_hook"])
def test_a_hook_on_a_parameter_is_refused_and_works_again_once_removed(name: str) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3))
    x, target = torch.randn(8, 4), torch.randint(3, (8,))
    with fxpipe.compile(model, 2 * ["cpu"], microbatches=2, loss=F.cross_entropy) as pipe:
        pipe.step(x, target=target)
        handle = getattr(model[0].weight, name)(lambda gradient: None)
        with pytest.raises(fxpipe.TraceError, match=r"parameter '0\.weight' has a hook"):
            pipe.step(x, target=target)
        handle.remove()
        pipe.step(x, target=target)


@pytest.mark.parametrize("name", ["register_full_backward_hook", "register_full_backward_pre_hook"])
def test_a_backward_hook_on_a_submodule_is_refused_unless_it_is_a_leaf(name: str) -> None:
    called = []
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3))
    getattr(model[1], name)(lambda *given: called.append(given))
    with pytest.raises(
        fxpipe.TraceError, match=r"submodule '1' has a backward hook.*'1' as a leaf"
    ):
        step(model)
    step(model, extensions=[fxpipe.LeafModules("1")])
    assert len(called) >= 2
