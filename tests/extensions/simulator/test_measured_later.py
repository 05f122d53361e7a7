"""A cut by names is measured once somebody asks what stages cost, and tells the same then."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import fxpipe
from fxpipe.compiler.placement import Placement
from fxpipe.errors import InputError
from fxpipe.extensions.shown import predicted_peaks
from fxpipe.extensions.simulator.costs import measured_costs

pytestmark = pytest.mark.models


class Middle(nn.Module):
    """Three layers, with an operation of the caller's before the last."""

    def __init__(self, operation: Callable[[Tensor], Tensor] = torch.relu) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 3)
        self.operation = operation

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.last(self.operation(self.norm(self.first(x))))
        return y


def pipe_of(model: nn.Module, partition: dict[str, Any] | None = None, **options: Any) -> Any:
    options = {"microbatches": 2, "loss": mse_loss, "schedule": "1f1b", **options}
    cut = fxpipe.Partition(at=["norm"], **(partition or {}))
    return fxpipe.compile(model, ["cpu"] * 2, partition=cut, **options)


def batch(samples: int = 8) -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    return torch.randn(samples, 4), torch.randn(samples, 3)


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[object]]:
    """What was measured so far."""
    seen: list[object] = []
    measure = Placement.node_costs

    def noting(self: Placement, facts: Any) -> Any:
        seen.append(facts["traced"])
        return measure(self, facts)

    monkeypatch.setattr(Placement, "node_costs", noting)
    return iter([seen])


def test_nothing_is_measured_until_somebody_asks(measured: Iterator[list[object]]) -> None:
    (seen,) = measured
    x, y = batch()
    with pipe_of(Middle()) as pipe:
        for size in (8, 6):
            pipe.step(x[:size], target=y[:size])
        pipe.eval()(x)
        pipe.train().step(x, target=y)
        assert pipe.schedule.stages == 2 and pipe.program and pipe.traced and not seen
        assert repr(pipe) and pipe.metrics and not pipe.plan.stages[0].costs and not seen
        pipe.simulate()
        costs = [stage.costs for stage in pipe.plan.stages]
        assert len(seen) == 1 and all(cost and cost.forward and cost.backward for cost in costs)
        repr(pipe), pipe.simulate(), pipe.metrics
        pipe.step(x, target=y)
        assert [stage.costs for stage in pipe.plan.stages] == costs and len(seen) == 1


@pytest.mark.parametrize(
    "around",
    [nullcontext, torch.inference_mode, torch.no_grad, lambda: torch.autocast("cpu")],
    ids=["nothing", "inference_mode", "no_grad", "autocast"],
)
def test_it_tells_what_it_would_at_once(
    around: Callable[[], AbstractContextManager[object]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The operations take equal times here, so that the tables are equal."""
    x, y = batch()
    with pipe_of(Middle()) as pipe, pipe_of(Middle()) as other:
        pipe.step(x, target=y)
        with monkeypatch.context() as patch:
            patch.setattr(Placement, "_can_measure_later", lambda *_: False)
            other.step(x, target=y)
        with around():
            pipe.simulate(), other.simulate()
            assert pipe.plan.stages[0].costs == other.plan.stages[0].costs
            told, like = ([*map(str.split, str(each).splitlines()[4:7])] for each in (pipe, other))
            assert told == like


def test_it_changes_neither_the_model_nor_the_numbers_that_are_drawn() -> None:
    x, y = batch()
    pipes = [pipe_of(Middle()) for _ in range(2)]
    states: list[dict[str, Tensor]] = []
    for asks, pipe in zip((False, True), pipes, strict=True):
        torch.manual_seed(0)
        for parameter in pipe.parameters():
            nn.init.normal_(parameter)
        with pipe:
            pipe.step(x, target=y)
            assert not asks or pipe.simulate()
            pipe.step(x, target=y)
        grads = {name: p.grad for name, p in pipe.named_parameters()}
        states.append({**pipe.state_dict(), **grads, "drawn": torch.rand(3)})
    assert states[0].keys() == states[1].keys()
    assert all(torch.equal(states[0][key], states[1][key]) for key in states[0])


@torch.library.custom_op("fxpipe_tests::checked", mutates_args=())
def checked(x: Tensor, least: float) -> Tensor:
    """Refuses numbers that are not whole, as random ones between 0 and 1, and small ones."""
    if bool((x != x.round()).any()) or bool((x < least).any()):
        raise ValueError("these are no numbers of the kind that it takes")
    return x.clone()


@checked.register_fake
def _(x: Tensor, least: float) -> Tensor:
    return torch.empty_like(x)


class Checking(nn.Module):
    def __init__(self, least: float) -> None:
        super().__init__()
        self.least, self.first, self.norm = least, nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.norm(self.first(checked(x, self.least)))
        return y


@pytest.mark.parametrize("least", [0, 5])
def test_numbers_stand_for_a_batch_that_is_gone(least: int) -> None:
    """Zeros where operations refuse random ones; where they refuse both, the table has no times,
    and all else is as before."""
    x, y = torch.full((4, 4), 9.0), torch.zeros(4, 3)
    with pipe_of(Checking(least)) as pipe:
        pipe.step(x, target=y)
        with nullcontext() if least == 0 else pytest.raises(InputError):
            pipe.simulate()
        assert [stage.costs is None for stage in pipe.plan.stages] == [least > 0] * 2
        assert ("not measured" in str(pipe)) is (least > 0)
        assert pipe.metrics["peak_memory/0"] and pipe.metrics["peak_memory/1"]
        if least:
            with pytest.raises(InputError, match="nothing was measured on this plan; give costs="):
                pipe.simulate()
        assert torch.isfinite(pipe.step(x, target=y))


def test_memory_is_predicted_before_times_are_known() -> None:
    x, y = batch()
    with pipe_of(Middle()) as pipe:
        pipe.prepare(x, target=y)
        shown = pipe._calls.shown
        peaks = predicted_peaks(pipe._engine, shown)
        assert not shown.plan.stages[0].costs
        assert peaks == [memory.peak for memory in pipe.simulate().memory]


def test_halves_that_were_not_measured_make_up_the_whole() -> None:
    x, y = batch()
    with pipe_of(Middle()) as pipe:
        pipe.prepare(x, target=y)
        pipe.simulate()
        known = measured_costs(pipe.plan)
        for stage in pipe.plan.stages:
            assert stage.costs is not None and stage.costs.input_grad is None
            halves = known["I", stage.index] + known["W", stage.index]
            assert halves == pytest.approx(known["B", stage.index])
