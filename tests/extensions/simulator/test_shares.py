"""A stage that takes far more of a step than was predicted is warned of, with an evener cut."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping
from contextlib import suppress

import pytest
import torch
from torch import nn

import fxpipe
from fxpipe.errors import PartitionError
from fxpipe.extensions.metrics.meter import STEPS
from fxpipe.extensions.shares import even_names, tell_shares
from fxpipe.passes.partition.balance import cut_at
from tests.helpers.fronted import front_end
from tests.helpers.unasked import told
from tests.oracles.delayed_loop import MSE

pytestmark = pytest.mark.models

X = torch.randn(8, 6)


def layers(count: int) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(6, 6) for _ in range(count)))


def pipe_of(model: nn.Module, stages: int) -> fxpipe.Pipeline:
    pipe = fxpipe.compile(model, stages, microbatches=4, loss=MSE, example=((X,), {"target": X}))
    costs = [stage.costs for stage in pipe.plan.stages]
    assert all(cost is not None and cost.forward > 0 for cost in costs)
    return pipe


def as_predicted(
    pipe: fxpipe.Pipeline, times: Mapping[int, float], samples: int = 4
) -> dict[tuple[str, int], list[float]]:
    """Tasks that take as long as predicted, those of some stages so many times that."""
    tasks: dict[tuple[str, int], list[float]] = {}
    for stage in pipe.plan.stages:
        assert stage.costs is not None
        for letter, seconds in (("F", stage.costs.forward), ("B", stage.costs.backward)):
            slowed = seconds * times.get(stage.index, 1.0)
            # only the least counts: the others were interrupted
            tasks[letter, stage.index] = [slowed, *[9 * seconds] * (samples - 1)]
    return tasks


@pytest.mark.parametrize(
    ("times", "samples", "warns"),
    [
        ({}, 4, None),
        ({0: 1.5}, 4, None),  # 1.2 times its share of the time of all
        ({0: 2.0}, 4, 0),
        ({1: 2.0}, 4, 1),
        ({0: 1.9, 1: 1.9, 2: 1.9}, 4, None),  # a slower machine
        ({1: 2.0}, 3, None),  # too few to judge by
    ],
)
def test_a_stage_is_warned_of_whose_share_is_far_larger_than_predicted(
    times: dict[int, float], samples: int, warns: int | None, caplog: pytest.LogCaptureFixture
) -> None:
    with pipe_of(layers(9), 3) as pipe, told(caplog) as messages:
        for _ in range(2):
            tell_shares(pipe, pipe._calls.compiled(), as_predicted(pipe, times, samples))
    assert [int(each.split()[1]) for each in messages] == ([] if warns is None else [warns])


def test_a_stage_below_the_mean_slows_no_pipe(caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Sequential(nn.Tanh(), *layers(9))
    with (
        fxpipe.compile(model, 2, microbatches=4, loss=MSE, partition=["1"]) as pipe,
        told(caplog) as messages,
    ):
        pipe.prepare(X, target=X)
        pipe.simulate()  # measures the stages
        tell_shares(pipe, pipe._calls.compiled(), as_predicted(pipe, {0: 3.0}))
    assert messages == []


def test_the_line_of_the_warning_cuts_evenly_by_the_times_of_steps(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = layers(8)
    with pipe_of(model, 2) as pipe, told(caplog) as messages:
        tell_shares(pipe, pipe._calls.compiled(), as_predicted(pipe, {0: 3.0}))
        seconds = {
            name: time * (3.0, 1.0)[stage.index]
            for stage in pipe.plan.stages
            if stage.costs is not None
            for name, time in stage.costs.nodes.items()
        }
    (line,) = re.findall(r"partition=(\[.*?\])", messages[0])
    names = [each.strip("'\"") for each in line[1:-1].split(", ")]
    stage_of = cut_at(pipe.traced, 2, names, model).nodes
    ahead = sum(time for node, time in seconds.items() if stage_of[node] == 0)
    slowest = max(ahead, sum(seconds.values()) - ahead)
    costs = pipe.plan.stages[0].costs
    assert costs is not None
    now = sum(seconds[node] for node in costs.nodes)
    assert f"{slowest / max(now, sum(seconds.values()) - now):.2f} times as long" in messages[0]
    with fxpipe.compile(model, 2, microbatches=4, loss=MSE, partition=names) as again:
        again.step(X, target=X)


@pytest.mark.parametrize("stages", [2, 3, 4])
@pytest.mark.parametrize("seed", range(4))
def test_names_are_as_even_as_those_of_all_that_can_be_named(stages: int, seed: int) -> None:
    class Skipping(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.outer = layers(4), layers(3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y: torch.Tensor = self.outer(self.inner(x) + x)
            return y.tanh()

    model = Skipping()
    traced = front_end(model, X)
    generator = torch.Generator().manual_seed(seed)
    nodes = cut_at(traced, 1, [], model).nodes
    seconds = {name: float(torch.rand((), generator=generator) ** 3) for name in nodes}
    least = sum(seconds.values())
    for names in itertools.permutations([n for n, _ in model.named_modules() if n], stages - 1):
        with suppress(PartitionError):
            made = cut_at(traced, stages, names, model).nodes
            sums = [sum(t for n, t in seconds.items() if made[n] == s) for s in range(stages)]
            least = min(least, max(sums))
    names_, slowest = even_names(model, traced, seconds, stages)
    assert slowest == pytest.approx(least)
    made = cut_at(traced, stages, names_, model).nodes
    sums = [sum(t for n, t in seconds.items() if made[n] == s) for s in range(stages)]
    assert max(sums) == pytest.approx(least)


def test_no_names_where_there_are_too_few_submodules() -> None:
    model = layers(3)
    traced = front_end(model, X)
    seconds = dict.fromkeys(cut_at(traced, 1, [], model).nodes, 1.0)
    assert even_names(model, traced, seconds, 4)[0] == []


@pytest.mark.parametrize("by", ["profile", "metrics"])
def test_what_steps_took_is_compared(
    by: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As if the operations of stage 1 had taken next to nothing when they were measured."""
    with pipe_of(layers(6), 2) as pipe, told(caplog) as messages:
        (costs,) = (stage.costs for stage in pipe.plan.stages if stage.index == 1)
        assert costs is not None
        object.__setattr__(costs, "forward", costs.forward / 1e3)
        object.__setattr__(costs, "backward", costs.backward / 1e3)
        # each instruction of device 0 takes a microsecond, and of device 1 two
        monkeypatch.setattr(
            pipe._engine.backend,
            "nanoseconds",
            lambda device, marks: [1000 * (device + 1) * i for i in range(len(marks))],
        )
        if by == "profile":
            pipe.profile(X, target=X)
        else:
            for _ in range(STEPS):
                assert pipe.metrics
                assert not [record for record in caplog.records if record.name == "fxpipe"]
                pipe.step(X, target=X)
            assert pipe.metrics
    assert len(messages) == 1
    assert "stage 1 takes" in messages[0]
