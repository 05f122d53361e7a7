"""Gradients of parameters are added to their sums inside of a stage's backward."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import fxpipe
from fxpipe.ir.plan import Stage
from fxpipe.kernels.kernel import Totals
from fxpipe.passes.differentiate.part_backward import part_backward
from tests.helpers.fronted import differentiated, front_end, whole
from tests.oracles import loop


def mlp() -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 8)]
    return nn.Sequential(*layers).double()


def stage_of(model: nn.Module, x: Tensor) -> Stage:
    traced = front_end(model, x)
    (stage,) = part_backward(differentiated(model, traced, whole(traced), x)).stages
    return stage


def run(stage: Stage, model: nn.Module, x: Tensor, totals: Totals, halves: bool) -> Any:
    kernel = stage.kernel
    assert kernel is not None
    parameters = [model.get_parameter(argument.target) for argument in stage.parameters]
    with torch.no_grad():
        result = kernel.forward(parameters, [], [x])
        gradients = [torch.ones_like(out) for out in result.outputs]
        if halves:
            return kernel.weight_grad(kernel.input_grad(result.saved, gradients).deferred, totals)
        return kernel.backward(result.saved, gradients, totals).parameters


@pytest.mark.parametrize("halves", [False, True])
def test_sums_are_those_of_gradients_made_one_by_one(halves: bool) -> None:
    model = mlp()
    first, second = torch.randn(2, 3, 8, dtype=torch.float64)
    stage = stage_of(model, first)
    apart = [run(stage, model, x, (), halves) for x in (first, second)]
    expected = [a + b for a, b in zip(*apart, strict=True)]
    totals = run(stage, model, first, (), halves)
    held = [total.data_ptr() for total in totals]
    after = run(stage, model, second, totals, halves)
    assert [total.data_ptr() for total in after] == held
    for ours, theirs in zip(after, expected, strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("halves", [False, True])
def test_a_gradient_is_gone_before_the_next_one_is_made(halves: bool) -> None:
    model = nn.Sequential(*(nn.Linear(16, 16, bias=False) for _ in range(6)))
    x = torch.randn(4, 16)
    stage = stage_of(model, x)
    alive: list[int] = []
    made: list[weakref.ref[Tensor]] = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            found = func(*args, **(kwargs or {}))
            if func is torch.ops.aten.mm.default and found.shape == (16, 16):
                gc.collect()
                alive.append(sum(reference() is not None for reference in made))
                made.append(weakref.ref(found))
            return found

    totals = run(stage, model, x, (), halves)
    with Watch():  # type: ignore[no-untyped-call]
        run(stage, model, x, totals, halves)
    assert alive == [0] * 6


def test_no_copy_is_made_of_a_gradient_that_is_all_of_its_memory() -> None:
    model = mlp()
    stage = stage_of(model, torch.randn(3, 8, dtype=torch.float64))
    assert stage.backward is not None
    assert not stage.backward.graph.find_nodes(
        op="call_function", target=torch.ops.aten.clone.default
    )


class Sliced(nn.Module):
    """One product makes the gradients of two parameters; a third one is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.randn(4, 8, dtype=torch.float64))
        self.b = nn.Parameter(torch.randn(4, 8, dtype=torch.float64))
        self.c = nn.Parameter(torch.randn(8, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return (x @ torch.cat([self.a, self.b]).t() + self.c + self.c * self.c).square().mean()


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb-h1"])
def test_gradients_that_share_memory_have_sums_of_their_own(schedule: str) -> None:
    model, alone = Sliced(), Sliced()
    alone.load_state_dict(model.state_dict())
    x = torch.randn(6, 8, dtype=torch.float64)
    with fxpipe.compile(model, ["cpu"], schedule=schedule, microbatches=3) as pipe:
        pipe.step(x)
    loop.train(alone, 3, x, loss=lambda out: out)
    loop.assert_same(loop.gradients(model), loop.gradients(alone))
    storages = {
        p.grad.untyped_storage().data_ptr() for p in model.parameters() if p.grad is not None
    }
    assert len(storages) == 3


def test_gradients_of_before_are_what_the_sums_begin_with() -> None:
    model, alone = mlp(), mlp()
    x = torch.randn(6, 8, dtype=torch.float64)
    for each in (model, alone):
        for p in each.parameters():
            p.grad = torch.full_like(p, 0.1)

    def loss(out: Tensor) -> Tensor:
        return out.square().mean()

    with fxpipe.compile(model, ["cpu"] * 2, microbatches=3, loss=loss) as pipe:
        pipe.step(x)
    loop.train(alone, 3, x, loss=loss)
    loop.assert_same(loop.gradients(model), loop.gradients(alone))


class Laid(nn.Module):
    """Parameters that lie in the order of their dimensions, in another one, and with gaps."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.up, self.last = nn.ConvTranspose2d(8, 5, 2, 2), nn.Conv2d(5, 4, 1, bias=False)
        self.turned = nn.Parameter(torch.randn(4, 6).t())
        self.sparse = nn.Parameter(torch.randn(6, 10)[:, ::2])

    def forward(self, x: Tensor) -> Tensor:
        h = self.last(self.up(self.norm(self.first(x)).relu()).tanh()).mean((2, 3))
        out: Tensor = h @ self.turned.t() @ self.sparse
        return out


def strides(x: Tensor | None) -> list[int] | None:
    return None if x is None else [s for n, s in zip(x.shape, x.stride(), strict=True) if n > 1]


@pytest.mark.parametrize("microbatches", [1, 3])
@pytest.mark.parametrize(
    "options", [{}, {"schedule": "zb-h1"}, {"extensions": [fxpipe.LeafModules("first")]}], ids=str
)
def test_gradients_lie_as_the_loops_in_memory(options: Any, microbatches: int) -> None:
    """As norms are summed in that order."""
    model, alone = Laid(), Laid()
    x, y = torch.randn(6, 3, 8, 8).to(memory_format=torch.channels_last), torch.randn(6, 5)
    mse: Any = torch.nn.functional.mse_loss
    with fxpipe.compile(model, ["cpu"] * 2, microbatches=microbatches, loss=mse, **options) as pipe:
        pipe.step(x, target=y)
    loop.train(alone, microbatches, x, loss=mse, target=y)
    ours, theirs = loop.gradients(model), loop.gradients(alone)
    loop.assert_same(ours, theirs)
    assert {k: strides(v) for k, v in ours.items()} == {k: strides(v) for k, v in theirs.items()}
    for name, gradient in theirs.items():
        mine = ours[name]
        assert gradient is not None and mine is not None
        assert torch.equal(mine.norm(), gradient.norm()), name
