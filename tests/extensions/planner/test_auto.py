"""What the first step decides by itself: a schedule, micro-batches and recomputation that fit."""

from __future__ import annotations

import copy
import itertools
import math
import re
from functools import partial
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import fxpipe
from benchmarks.counted import counted
from benchmarks.models.unet import UNet
from fxpipe.extensions.planner import stages
from fxpipe.extensions.planner.bounds import least_seconds
from fxpipe.extensions.planner.candidates import (
    Candidate,
    Predicted,
    best_of,
    evaluate,
    library_over,
)
from fxpipe.extensions.simulator import Sizes, simulate_schedule
from fxpipe.extensions.simulator.costs import (
    Key,
    Link,
    times_of,
)
from fxpipe.extensions.tables import time_text
from fxpipe.ir.recipe import Placement, find_recipe, one_each, round_robin, vee
from tests.helpers.profiles import DEEP, LEVELS, deep
from tests.oracles.delayed_loop import DelayedLoop
from tests.oracles.loop import train

SGD = partial(torch.optim.SGD, lr=0.05)
THREADS = fxpipe.Dispatch("device")


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[part for _ in range(4) for part in (nn.Linear(16, 16), nn.Tanh())])


def batch(samples: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(samples)
    return torch.randn(samples, 16, generator=generator), torch.zeros(samples, 16)


def pipe_of(model: nn.Module, **options: Any) -> fxpipe.Pipeline:
    return fxpipe.compile(model, ["cpu", "cpu"], loss=mse_loss, **options)


def assert_steps_like_the_loop(pipe: fxpipe.Pipeline, alone: nn.Module, samples: int) -> None:
    x, y = batch(samples)
    for parameter in (*pipe.parameters(), *alone.parameters()):
        parameter.grad = None
    pipe.step(x, target=y)
    train(alone, pipe.schedule.microbatches, x, loss=mse_loss, target=y)
    for (name, ours), theirs in zip(pipe.named_parameters(), alone.parameters(), strict=True):
        assert ours.grad is not None and theirs.grad is not None
        assert torch.equal(ours.grad, theirs.grad), name


def test_a_model_is_fitted_into_its_devices_or_what_is_missing_is_enough() -> None:
    x, y = batch(4)
    given: dict[str, Any] = {"optimizer": torch.optim.Adam}
    if not DEEP:
        given["microbatches"] = 2
    with pipe_of(layers(), **given, example=((x,), {"target": y})) as pipe:
        most = max(memory.peak for memory in pipe.simulate().memory)
    refused = 0
    given["schedule"] = "auto"
    for share in (*deep(1.5, 0.8), 0.3):
        limits: Any = int(most * share)
        for _ in range(2):
            with pipe_of(layers(), memory_limits=limits, **given) as pipe:
                try:
                    pipe.step(x, target=y)
                except fxpipe.PartitionError as error:
                    assert re.search(r"may take .*too little", str(error))
                    told = re.search(r"memory_limits=\[(.*?)\]", str(error))
                    assert told is not None
                    limits = [None if each == "None" else int(each) for each in told[1].split(", ")]
                    refused += 1
                    continue
                each = limits if isinstance(limits, list) else [limits] * 2
                for memory, limit in zip(pipe.simulate().memory, each, strict=True):
                    assert limit is None or memory.peak <= limit
                break
        else:
            pytest.fail(f"the limits of the error are not enough: {limits}")
    assert refused


def test_what_is_given_is_not_chosen() -> None:
    model = layers()
    alone = copy.deepcopy(model)
    with pipe_of(model, schedule="auto", microbatches=4, recompute={1: "always"}) as pipe:
        assert_steps_like_the_loop(pipe, alone, 8)
        again = {task.stage for row in pipe.schedule.rows for task in row if task.kind == "R"}
        assert (pipe.schedule.microbatches, again) == (4, {1})


def test_a_step_after_a_call_and_a_larger_batch_keep_the_stages() -> None:
    model = layers()
    alone = copy.deepcopy(model)
    with pipe_of(model, schedule="auto", memory_limits=2**30) as pipe:
        with torch.no_grad():
            pipe(batch(4)[0])
        held = []
        for samples in (4, 16, 4):
            assert_steps_like_the_loop(pipe, alone, samples)
            held.append([[a.target for a in stage.parameters] for stage in pipe.plan.stages])
        assert held[0] == held[1] == held[2]


def test_the_fastest_that_fits_is_that_of_all_candidates() -> None:
    """Against all of them simulated, over times and memory that are given."""
    unequal: dict[Key, float] = {("F", 1): 2.0, "B": 2.5, "I": 1.2, "W": 1.2, "R": 1.0}
    times = times_of(3, "FBIWRU", unequal)
    ways = [(recipe, m) for recipe in library_over(3) for m in (3, 6, 12)]
    tried: list[Candidate] = []

    def predict(candidate: Candidate) -> Predicted:
        tried.append(candidate)
        m = candidate.microbatches
        found = simulate_schedule(
            candidate.recipe(3, m), {key: time * 12 / m + 0.1 for key, time in times.items()}
        )
        kept = [
            kept * 12 / m / (4 if mode == "always" else 1)
            for kept, mode in zip(found.device_kept, candidate.recompute, strict=True)
        ]
        slow = 1 + 0.2 * candidate.recompute.count("always")
        return Predicted(candidate, found.makespan * slow, tuple(kept))

    class Least:
        def seconds(self, candidate: Candidate) -> float:
            m = candidate.microbatches
            at = {key: time * 12 / m + 0.1 for key, time in times.items()}
            return least_seconds(at, candidate.recipe(3, m))

        def peaks(self, candidate: Candidate) -> tuple[float, ...]:
            return (0.0,) * 3

    modes: Any = [*itertools.product(("never", "always"), repeat=3)]
    everything = [predict(Candidate(*way, each)) for way in ways for each in modes]
    all_tried = len(tried)
    for limit in (100.0, 6.0, 3.0, 1.5, 1.0, 0.3, 0.1):
        limits = (limit,) * 3
        tried.clear()
        found = best_of(evaluate(ways, None, limits, Least(), predict))
        fitting = [each for each in everything if each.fits(limits)]
        assert found.fits(limits) == bool(fitting)
        if fitting:
            assert found.seconds <= 1.02 * min(each.seconds for each in fitting)
        assert len(tried) < all_tried / 2


def test_half_of_the_memory_is_enough_with_what_is_recomputed_or_stored() -> None:
    torch.manual_seed(0)
    x, y = torch.randn(16, 3, 16, 16), torch.randn(16, 1, 16, 16)
    options: Any = {"microbatches": 8, "loss": mse_loss, "optimizer": torch.optim.Adam}

    def ran(**more: Any) -> tuple[list[int], list[int], list[str]]:
        with fxpipe.compile(UNet(2, 8, depth=LEVELS), ["cpu"] * 2, **options, **more) as pipe:
            pipe.prepare(x, target=y)
            predicted = [memory.peak for memory in pipe.simulate().memory]
            with counted(pipe) as found:
                for step in range(3):
                    if step == 2:
                        for device in found:
                            device.clear()
                    pipe.step(x, target=y)
            return predicted, [device.peak for device in found], sorted(pipe.schedule.kinds)

    all_kept, _, _ = ran(schedule="gpipe")
    limits = [peak // 2 for peak in all_kept]
    predicted, real, _ = ran(schedule="auto", memory_limits=limits)
    for peak, held, limit in zip(predicted, real, limits, strict=True):
        assert peak <= limit and peak == pytest.approx(held, rel=0.03)


def known(samples: int) -> dict[tuple[str, int], float]:
    """Seconds of tasks that cost something for any number of samples."""
    both = {("F", 0): 0.1 + 0.02 * samples, ("F", 1): 0.1 + 0.03 * samples}
    both |= {("B", s): 0.3 + 0.05 * samples for s in (0, 1)}
    both |= {(x, s): 0.18 + 0.025 * samples for x in "IW" for s in (0, 1)}
    return both | {("U", s): 0.0 for s in (0, 1)}


@pytest.mark.parametrize(
    ("links", "task"),
    [
        ({}, 0.0),
        ({}, 0.4),
        ({"link_bandwidth": 600.0}, 0.0),
        ({"link_bandwidth": 5e3, "link_latency": 4.0}, 0.0),
    ],
)
def test_it_takes_the_fastest_of_what_was_measured(
    links: dict[str, Any],
    task: float,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Against all schedules and numbers of micro-batches, simulated with the same times and links:
    a linear layer sends 16 floats for each sample, and gets as many back. Each task takes longer by
    the same time, which many micro-batches have many of."""
    monkeypatch.setattr(stages.Stages, "_known", lambda self, samples: known(samples))
    for name, seconds in (("TASK", task), ("HAND_OVER", 0.0), ("WAKE", 0.0)):
        monkeypatch.setattr(stages, name, seconds)
    x, y = batch(32)
    cut = fxpipe.Partition(at=["4"], **links)
    with (
        caplog.at_level("INFO", "fxpipe"),
        pipe_of(layers(), schedule="auto", partition=cut, extensions=[THREADS]) as pipe,
    ):
        pipe.step(x, target=y)
        taken = pipe.schedule.name, pipe.schedule.microbatches
    link = Link(links.get("link_latency", 0.0), links.get("link_bandwidth", math.inf))
    found = {}
    for recipe in library_over(2):
        for m in (2, 4, 8, 16, 32):
            made = recipe(2, m)
            costs = cast(dict[Key, float], known(32 // m))
            costs = {k: t + (task if k[0] != "U" else 0.0) for k, t in costs.items()}
            bytes_ = Sizes(values={"y0": 32 // m * 16 * 4})
            ran = simulate_schedule(made, costs, links=link, sizes=bytes_)
            found[recipe.name, m] = ran.makespan
    assert found[taken] <= 1.01 * min(found.values())
    told = re.search(r"takes .* \((.*), predicted\)", caplog.text)
    assert told is not None and told[1] == time_text(found[taken])


@pytest.mark.parametrize("fixed", [0.0, *deep(0.5)])
def test_without_a_flush_it_takes_the_fastest_micro_batches_and_trains_one_step_late(
    fixed: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Against 2BW with all numbers of micro-batches, simulated; and the loop with older weights."""

    def times(samples: int) -> dict[tuple[str, int], float]:
        return {k: t + fixed * (k[0] != "U") for k, t in known(samples).items()}

    monkeypatch.setattr(stages.Stages, "_known", lambda self, samples: times(samples))
    model, (x, y) = layers(), batch(32)
    expected = DelayedLoop.beside(model, SGD, 1)
    with pipe_of(model, schedule="auto-2bw", optimizer=SGD, extensions=[THREADS]) as pipe:
        pipe.prepare(x, target=y)
        taken, count = pipe.schedule.name, pipe.schedule.microbatches
        expected.microbatches = count
        batches = [(x + step, y) for step in range(4)]
        expected.assert_trained(pipe, model, batches)
    recipe = find_recipe("2bw")
    found = {
        m: simulate_schedule(recipe(2, m), cast(dict[Key, float], times(32 // m))).step_time
        for m in (2, 4, 8, 16, 32)
    }
    assert taken == "2bw" and found[count] <= 1.01 * min(found.values())


def test_without_a_flush_two_versions_and_what_is_kept_stay_within_the_limits() -> None:
    x, y = batch(64)
    options: Any = {"optimizer": torch.optim.Adam, "schedule": "2bw", "microbatches": 4}
    with pipe_of(layers(), **options, example=((x,), {"target": y})) as given:
        limits = [int(0.9 * memory.peak) for memory in given.simulate().memory]
    options = {"optimizer": torch.optim.Adam, "schedule": "auto-2bw", "memory_limits": limits}
    with pipe_of(layers(), **options) as chosen:
        chosen.prepare(x, target=y)
        with counted(chosen) as found:
            for step in range(5):
                if step == 3:
                    chosen.flush()
                    for device in found:
                        device.clear()
                chosen.step(x, target=y)
            chosen.flush()
        assert chosen.schedule.delay == 1
        for device, limit in zip(found, limits, strict=True):
            assert device.peak <= 1.03 * limit


@pytest.mark.parametrize(
    ("whole", "given", "place"),
    [
        ({"B": 2.0, "I": 1.0, "W": 1.0}, 0.0, vee),  # halves fill what is idle at the turn of a V
        ({"B": 2.0, "I": 1.0, "W": 1.0}, 9.0, one_each),  # whatever is handed over takes long
        # halves take twice as long
        *deep(({"B": 2.0, "I": 2.0, "W": 2.0}, 0.0, round_robin(2))),
    ],
)
def test_the_stages_are_where_the_fastest_step_has_them(
    whole: dict[str, float], given: float, place: Placement, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Against all schedules with one stage a device, the V and round robin, simulated with the same
    times; then the step is that of the loop, and a larger batch keeps the stages."""

    def times(stages: int, letters: str, samples: float) -> dict[tuple[str, int], float]:
        each = {"F": 1.0, **whole}
        return {(x, s): each[x] * samples / stages for x in letters for s in range(stages)}

    def ours_know(self: Any, samples: int) -> dict[tuple[str, int], float]:
        count = len(self._placement)
        return times(count, "FBIW", samples) | {("U", s): 0.0 for s in range(count)}

    monkeypatch.setattr(stages.Stages, "_known", ours_know)
    model = layers()
    alone = copy.deepcopy(model)
    ran = {}
    for at in (one_each, vee, round_robin(2)):
        for recipe in library_over(4, at):
            for m in (4, 8):
                made = recipe(4, m)
                costs = cast(dict[Key, float], times(made.stages, "FBIW", 8 / m))
                free = {("U", s): 0.0 for s in range(made.stages)}
                found = simulate_schedule(made, costs | free, links=Link(given))
                ran[recipe.name, m] = found.makespan
    links = fxpipe.Partition(link_latency=given)
    options: Any = {"loss": mse_loss, "partition": links, "extensions": [THREADS]}
    with fxpipe.compile(model, ["cpu"] * 4, schedule="auto", **options) as pipe:
        assert_steps_like_the_loop(pipe, alone, 8)
        taken = pipe.schedule
        held = [[a.target for a in stage.parameters] for stage in pipe.plan.stages]
        assert_steps_like_the_loop(pipe, alone, 16)
        assert held == [[a.target for a in stage.parameters] for stage in pipe.plan.stages]
    assert taken.placement == place(4)
    costs = cast(dict[Key, float], times(taken.stages, "FBIW", 8 / taken.microbatches))
    free = {("U", s): 0.0 for s in range(taken.stages)}
    ours = simulate_schedule(taken, costs | free, links=Link(given)).makespan
    assert ours <= 1.01 * min(ran.values())


def test_limits_that_are_given_twice_are_refused() -> None:
    partition = fxpipe.Partition(memory_limits=1e9)
    with pytest.raises(fxpipe.InputError, match="memory_limits is given twice"):
        pipe_of(layers(), schedule="auto", memory_limits=1e9, partition=partition)


class Windowed(nn.Module):
    """Reads a number that is a size, which no graph can take, and one that any can."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last, self.width, self.beta = nn.Linear(4, 4), nn.Linear(4, 3), 1, 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.last(self.first(x)[:, : self.width].sum(1, keepdim=True) * x)
        return made * self.beta


@pytest.mark.traces
def test_a_schedule_is_chosen_anew_while_numbers_change() -> None:
    torch.manual_seed(0)
    model = Windowed()
    with fxpipe.compile(model, ["cpu"] * 2, schedule="auto", loss=nn.functional.mse_loss) as pipe:
        for step, size in enumerate((4, 8, 8, *deep(16))):
            model.width, model.beta = 1 + step % 3, 1 + step / 4
            x, y = torch.randn(size, 4), torch.randn(size, 3)
            loss = pipe.step(x, target=y)
            assert torch.allclose(loss, nn.functional.mse_loss(model(x), y))
