"""The two halves of a backward: equal to the whole to the bit, each with its own work alone."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable

import pytest
import torch
from hypothesis import HealthCheck, given, reject, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from examples.unet import UNet
from tests.helpers.fronted import differentiated, front_end, in_stages, whole
from tests.helpers.halves import compare, graphs, masks, operations, parted
from tests.helpers.profiles import DEEP, deep
from tests.helpers.random_models import RandomModel, Recipe, recipes
from tests.passes.differentiate.test_differentiate import cases as shared_cases
from tests.passes.differentiate.test_differentiate import made

aten = torch.ops.aten


CUTS = [(1, True), (1, False), (3, True), (3, False)] if DEEP else [(1, False), (3, True)]
"""How many stages, and whether the model's inputs get gradients."""


@shared_cases
@pytest.mark.parametrize(("stages", "inputs"), CUTS)
def test_halves_equal_the_whole_to_the_bit(name: str, stages: int, inputs: bool) -> None:
    model, args, traced = made(name)
    plan = differentiated(model, traced, in_stages(traced, stages), *args, inputs=inputs)
    compare(model, traced, plan, *args)


class Tied(nn.Module):
    """A language model whose head has the weight of its embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.places = nn.Parameter(torch.randn(6, 8))
        self.block = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True)
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, index: Tensor) -> Tensor:
        out: Tensor = self.head(self.norm(self.block(self.embedding(index) + self.places)))
        return out


class Twice(nn.Module):
    """One layer called twice, with others between."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.between = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(self.between(self.layer(x).tanh()).tanh())
        return out


class Predicted(nn.Module):
    """A convolution whose weight an input decides: its gradient is one of an input."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(2, 2, 3, padding=1)
        self.last = nn.Conv2d(2, 2, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        kernel = x[:2, :, :3, :3] * 0.1
        out: Tensor = self.last(nn.functional.conv2d(self.first(x), kernel, padding=1).relu())
        return out


def image(channels: int = 2) -> Tensor:
    return torch.randn(3, channels, 8, 8, requires_grad=True)


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "tied": (Tied, lambda: torch.randint(11, (3, 6))),
    "twice": (Twice, lambda: torch.randn(3, 4, requires_grad=True)),
    "predicted": (Predicted, image),
    "pre-norm, masked": (
        lambda: nn.TransformerEncoderLayer(8, 2, 16, norm_first=True, activation="gelu"),
        lambda: torch.randn(5, 3, 8, requires_grad=True),
    ),
    "group norm": (
        lambda: nn.Sequential(
            nn.Conv2d(2, 4, 3), nn.GroupNorm(2, 4), nn.SiLU(), nn.Conv2d(4, 4, 3, groups=4)
        ),
        image,
    ),
    "transposed and strided": (
        lambda: nn.Sequential(
            nn.Conv2d(2, 4, 2, stride=2), nn.ReLU(), nn.ConvTranspose2d(4, 2, 2, stride=2)
        ),
        image,
    ),
    "in eval": (lambda: UNet(channels=2, base=2, depth=1).eval(), image),
    "one dimension, in float64": (
        lambda: nn.Sequential(
            nn.Conv1d(2, 4, 3, bias=False), nn.ELU(), nn.Conv1d(4, 2, 3)
        ).double(),
        lambda: torch.randn(3, 2, 9, dtype=torch.float64, requires_grad=True),
    ),
    "weight norm": (
        lambda: nn.Sequential(
            parametrizations.weight_norm(nn.Conv2d(2, 4, 3)),
            nn.Tanh(),
            parametrizations.weight_norm(nn.Conv2d(4, 2, 3)),
        ),
        image,
    ),
}


@pytest.mark.parametrize("name", MODELS if DEEP else ("tied", "predicted", "in eval"))
def test_halves_of_further_models_equal_the_whole_to_the_bit(name: str) -> None:
    torch.manual_seed(1)
    factory, argument = MODELS[name]
    model, x = factory(), argument()
    traced = front_end(model, x)
    for stages, inputs in CUTS:
        plan = differentiated(model, traced, in_stages(traced, stages), x, inputs=inputs)
        compare(model, traced, plan, x)


@pytest.mark.parametrize("stages", [*deep(1, 3), 2])
def test_the_convolutions_of_a_unet_are_parted(stages: int) -> None:
    for index, stage in enumerate(parted(UNet(channels=2, base=2, depth=2), image(), stages)):
        first, then = graphs(stage)
        weights = sum(a.target.endswith("weight") for a in stage.parameters)
        norms = sum("running_var" in a.target for a in stage.buffers)
        assert masks(first) == [[True, False, False]] * (weights - norms - (index == 0))
        assert [mask[:2] for mask in masks(then)] == [[False, True]] * (weights - norms)
        # nothing but a weight is below the first norm
        first_norm = {"native_batch_norm_backward"} if index == 0 else set()
        assert set(operations(then)) == {"convolution_backward"} | first_norm


def test_the_first_stage_has_its_chain_in_the_first_half_and_the_weights_in_the_second() -> None:
    model = nn.Sequential(
        nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.LayerNorm(4)
    )
    (stage,) = parted(model, torch.randn(3, 4))
    first, then = graphs(stage)
    chain = ["native_layer_norm_backward", "mm", "tanh_backward", "mm", "tanh_backward"]
    assert [name for name in operations(first) if name != "t"] == chain
    assert operations(then).count("mm") == 3
    assert set(operations(then)) <= {"mm", "t", "sum", "reshape", "clone"}


def test_a_stages_own_gradient_is_in_the_first_half_though_no_weight_is_below() -> None:
    (stage,) = parted(
        nn.Sequential(nn.Tanh(), nn.Linear(4, 4)), torch.randn(3, 4).requires_grad_(), inputs=True
    )
    first, then = graphs(stage)
    assert [name for name in operations(first) if name != "t"] == ["mm", "tanh_backward"]
    assert operations(then).count("mm") == 1


def test_a_weight_made_of_several_parameters_waits_with_all_its_work() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        parametrizations.weight_norm(nn.Conv2d(2, 4, 3)),
        nn.Tanh(),
        parametrizations.weight_norm(nn.Conv2d(4, 2, 3)),
    )
    (stage,) = parted(model, image())
    first, then = graphs(stage)
    assert masks(first) == [[True, False, False]]
    assert masks(then) == [[False, True, True]] * 2
    assert set(operations(first)) == {"convolution_backward", "tanh_backward"}


def test_both_uses_of_a_tied_layer_wait() -> None:
    (stage,) = parted(Twice(), torch.randn(3, 4))
    first, then = graphs(stage)
    assert operations(first).count("mm") == 2
    assert operations(then).count("mm") == 3
    assert operations(then).count("add") == 2


def test_a_weight_that_an_input_decides_has_its_gradient_in_the_first_half() -> None:
    (stage,) = parted(Predicted(), image(), inputs=True)
    first, then = graphs(stage)
    assert sorted(masks(first)) == [[True, False, False]] * 2 + [[True, True, False]]
    assert masks(then) == [[False, True, True]] * 2


def test_what_only_the_first_half_reads_is_freed_by_it() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 4))
    x = torch.randn(3, 4, requires_grad=True)
    (stage,) = parted(model, x, inputs=True)
    kernel = stage.kernel
    assert kernel is not None
    state = front_end(model, x).state_of(model)
    parameters = [state[a.target].detach() for a in stage.parameters]
    saved = kernel.forward(parameters, [], [x.detach()]).saved
    before, activated = model[0](x).detach(), model[:2](x).detach()
    watched = {}
    for what, value in (("before", before), ("activated", activated)):
        (kept,) = (s for s in saved if s.shape == value.shape and torch.equal(s, value))
        watched[what] = weakref.ref(kept)
    del kept
    gradient = torch.ones(3, 4)
    gone = weakref.ref(gradient)
    gradients = [gradient]
    del gradient
    found = kernel.input_grad(saved, gradients)
    gc.collect()
    assert watched["before"]() is None
    assert watched["activated"]() is not None
    assert gone() is not None  # the last layer's weight is waiting for it
    assert sum(x.dim() > 0 for x in found.deferred) == 4  # both layers' inputs and gradients
    kernel.weight_grad(found.deferred)
    gc.collect()
    assert watched["activated"]() is None
    assert gone() is None


def test_a_stage_without_parameters_defers_nothing() -> None:
    x = torch.randn(3, 4, requires_grad=True)
    (stage,) = parted(nn.Sequential(nn.Tanh(), nn.Softmax(1)), x, inputs=True)
    kernel = stage.kernel
    assert kernel is not None
    assert stage.weight_grad is None
    found = kernel.input_grad(kernel.forward([], [], [x.detach()]).saved, [torch.ones(3, 4)])
    assert found.deferred == []
    assert kernel.weight_grad(found.deferred) == []


def test_a_stage_without_gradients_has_no_halves_and_runs() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    model[0].requires_grad_(False)
    first, *_ = parted(model, torch.randn(3, 4), 3)
    kernel = first.kernel
    assert kernel is not None
    assert first.input_grad is first.weight_grad is None
    assert kernel.input_grad([], []) == ([], [])
    assert kernel.weight_grad([]) == [None] * len(first.parameters)


def test_a_frozen_parameter_has_no_gradient_in_either_half() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    model[2].weight.requires_grad_(False)
    parted(model, torch.randn(3, 4), 2)


def test_a_kernel_that_is_not_parted_says_so() -> None:
    model, x = nn.Linear(4, 4), torch.randn(3, 4)
    traced = front_end(model, x)
    (stage,) = differentiated(model, traced, whole(traced), x).stages
    assert stage.kernel is not None
    with pytest.raises(AssertionError, match="run the plan through part_backward"):
        stage.kernel.input_grad([], [])
    with pytest.raises(AssertionError, match="run the plan through part_backward"):
        stage.kernel.weight_grad([])


@settings(max_examples=150 if DEEP else 4, suppress_health_check=[HealthCheck.too_slow])
@given(recipes(), st.integers(1, 4), st.booleans())
def test_halves_of_random_models_equal_the_whole(recipe: Recipe, stages: int, inputs: bool) -> None:
    torch.manual_seed(0)
    model = RandomModel(recipe)
    x, z, *rest = recipe.inputs(2, 0)
    args = (x.requires_grad_(inputs), z, *rest)
    copies = [a.detach().clone().requires_grad_(a.requires_grad) for a in args]
    try:
        copy.deepcopy(model)(*copies)["loss"].backward()
    except RuntimeError:
        reject()  # it changes a value in place that its backward needs
    if any(a._version for a in copies):
        reject()  # it writes into an input, which the front end refuses
    traced = front_end(model, *args)
    plan = differentiated(model, traced, in_stages(traced, stages), *args, inputs=inputs)
    compare(model, traced, plan, *args)
