"""Autocast around a step is that of every stage, in whatever way the model is traced."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxpipe
from tests.helpers.profiles import deep
from tests.oracles import loop

CAST: Callable[[], AbstractContextManager[Any]] = partial(torch.autocast, "cpu", torch.bfloat16)


class Branching(nn.Module):
    """A branch on values, so that it is called as it is; it reads its weight twice."""

    def __init__(self) -> None:
        super().__init__()
        self.twice = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.twice(self.twice(x if x.abs().max() < 9 else x / 2).tanh())
        return y


class Parted(nn.Module):
    """A part of it is in no autocast, or in one of its own; one weight is read twice."""

    def __init__(self, inside: bool) -> None:
        super().__init__()
        self.first, self.twice, self.last = nn.Linear(8, 32), nn.Linear(32, 32), nn.Linear(32, 3)
        self.weight = nn.Parameter(torch.randn(32, 32))
        self.inside = inside

    def forward(self, x: Tensor) -> Tensor:
        h = self.twice(self.twice(self.first(x)))
        with torch.autocast("cpu", torch.bfloat16, enabled=self.inside):
            h = torch.tanh(h.float() @ self.weight)
        y: Tensor = self.last(h.float())
        return y


class Forked(nn.Module):
    """A value in single precision is cast by two of its readers in the next stage."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.left, self.right = nn.Linear(8, 32), nn.Linear(32, 3), nn.Linear(32, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x).float().tanh()
        y: Tensor = self.left(h) * self.right(h)
        return y


class Shared(nn.Module):
    """Both stages read a weight, the second also its transpose."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)
        self.twice = nn.Parameter(torch.randn(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        h = (self.first(x) @ self.twice).tanh()
        h = self.last(h).tanh() @ self.twice
        y: Tensor = (h @ self.twice.t())[:, :3]
        return y


def layers() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 8), nn.Linear(8, 3))


def branching() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 8), Branching(), nn.Linear(8, 8), nn.Linear(8, 3))


@pytest.mark.parametrize("recompute", ["never", *deep("always")])
@pytest.mark.parametrize(
    ("make", "options", "around"),
    [
        (layers, {"partition": ["2"]}, CAST),
        (branching, {"partition": ["2"], "extensions": [fxpipe.LeafModules(Branching)]}, CAST),
        (Forked, {"partition": ["left"]}, CAST),
        (partial(Parted, inside=False), {"partition": ["last"]}, CAST),
        (partial(Parted, inside=True), {"partition": ["last"]}, CAST),
        (partial(Parted, inside=True), {"partition": ["last"]}, nullcontext),
    ],
)
def test_what_autocast_is_around_runs_under_it_and_backward_does_not(
    make: Callable[[], nn.Module],
    options: dict[str, Any],
    around: Callable[[], AbstractContextManager[Any]],
    recompute: str,
) -> None:
    torch.manual_seed(0)
    model = make()
    alone = copy.deepcopy(model)
    mse = nn.functional.mse_loss
    options = {**options, "recompute": recompute}
    with fxpipe.compile(model, ["cpu"] * 2, microbatches=2, loss=mse, **options) as pipe:
        for _ in range(2):
            x, y = torch.randn(6, 8), torch.randn(6, 3)
            with around():
                loss, output = pipe.step(x, target=y, return_output=True)
            expected = loop.train(alone, 2, x, loss=mse, target=y, around=around)
            assert torch.equal(loss, expected.loss)
            assert output.dtype == expected.output.dtype
            assert torch.equal(output, expected.output)
            loop.assert_same(loop.gradients(model), loop.gradients(alone))
        with around(), torch.no_grad():
            assert torch.equal(pipe(x), torch.cat([alone(part) for part in x.tensor_split(2)]))
        x.requires_grad_()
        loop.clear(model, alone)
        with around():
            called = pipe(x)
            plain = torch.cat([alone(part) for part in x.tensor_split(2)])
        assert torch.equal(called, plain)
        called.sum().backward()
        (theirs, x.grad) = (x.grad, None)
        plain.sum().backward()
        assert theirs is not None
        assert x.grad is not None
        assert torch.equal(theirs, x.grad)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_weight_that_two_stages_read_is_cast_once_for_both(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = Shared()
    alone = copy.deepcopy(model)
    around = partial(torch.autocast, "cpu", dtype)
    x, y = torch.randn(6, 8), torch.randn(6, 3)
    mse = nn.functional.mse_loss
    options: Any = {"microbatches": 2, "loss": mse, "partition": ["last"]}
    with fxpipe.compile(model, 2, **options) as pipe, around():
        loss = pipe.step(x, target=y)
    expected = loop.train(alone, 2, x, loss=mse, target=y, around=around)
    assert torch.equal(loss, expected.loss)
    loop.assert_same(loop.gradients(model), loop.gradients(alone))


def test_a_loss_that_is_called_as_it_is_runs_under_autocast_too() -> None:
    torch.manual_seed(0)
    model, weight = layers(), torch.randn(3, 3)
    alone = copy.deepcopy(model)

    def scored(output: Tensor, target: Tensor) -> Tensor:
        made = output @ weight if output.abs().max() < 99 else output
        return (made.float() - target).square().mean()

    x, y = torch.randn(6, 8), torch.randn(6, 3)
    with fxpipe.compile(model, ["cpu"] * 2, microbatches=2, loss=scored, partition=["2"]) as pipe:
        with CAST():
            loss = pipe.step(x, target=y)
        expected = loop.train(alone, 2, x, loss=scored, target=y, around=CAST)
        assert torch.equal(loss, expected.loss)
    loop.assert_same(loop.gradients(model), loop.gradients(alone))


def test_a_thread_that_leaves_first_takes_no_cast_weight_from_another() -> None:
    """The gradients of a weight that is cast twice are added in another order."""
    from fxpipe.torchtools.state import under

    casts = (("cpu", torch.bfloat16),)
    weight = nn.Parameter(torch.randn(4, 4))
    x = torch.randn(4, 4)

    def leave() -> None:
        with under(casts):
            pass

    with under(casts):
        first = torch.mm(x, weight)
        thread = threading.Thread(target=leave)
        thread.start()
        thread.join()
        second = torch.mm(x, weight)

    def cast_of(made: Tensor) -> Any:
        assert made.grad_fn is not None
        return made.grad_fn.next_functions[-1][0]

    assert cast_of(first) is cast_of(second)
    assert not torch.is_autocast_enabled("cpu")
