"""Stages that read versions of their own: equal to loops that keep every version."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import fxpipe
from fxpipe.ir.recipe import find_recipe
from fxpipe.ir.schedule import Schedule
from tests.extensions.overlapping.most_versions import MostVersions
from tests.helpers.overlapping import OPTIMIZERS, SGD, compiled, make
from tests.helpers.profiles import DEEP
from tests.oracles.delayed_loop import MSE, RuledLoop

pytestmark = pytest.mark.smoke


def stage_of(name: str, stages: int) -> int:
    """The stage of a parameter of the six layers, which ``compiled`` cuts evenly."""
    starts = [stage * 6 // stages for stage in range(stages)]
    return sum(int(name.partition(".")[0]) >= start for start in starts) - 1


def rule_of(schedule: Schedule) -> Callable[[str, int], int]:
    """What a schedule says of a parameter."""
    return lambda name, i: schedule.delays[stage_of(name, schedule.stages)]


def ruled(model: nn.Module, schedule: Schedule, optimizer: Any = SGD) -> RuledLoop:
    """A loop over a copy of the layers that reads what a schedule says."""
    alone = copy.deepcopy(model)
    theirs = optimizer(alone.parameters())
    return RuledLoop(alone, theirs, MSE, schedule.microbatches, rule_of(schedule))


@st.composite
def schedules(draw: st.DrawFn) -> Schedule:
    """What each stage needs, and up to two more."""
    name = draw(st.sampled_from(["1f1b-async", "1f1b-async", "gpipe", "zb-h1", "zb-v"]))
    most = 3 if name == "zb-v" else 4  # which has two stages a device, of six layers
    devices, microbatches = draw(st.integers(1, most)), draw(st.integers(1, 4))
    schedule = find_recipe(name)(devices, microbatches)
    more = st.integers(0, 2)
    delay = tuple(least + draw(more) for least in schedule.versions().smallest)
    return replace(schedule, delay=delay)


@settings(max_examples=300 if DEEP else 4)
@given(
    schedules(),
    st.sampled_from(["never", "always", "except_last"]),
    st.sampled_from(["sgd", "adamw"]),
    st.sets(st.integers(0, 6), max_size=2),
)
def test_any_delays_train_as_the_loop_that_keeps_every_version(
    schedule: Schedule, recompute: Any, optimizer: str, flush_at: set[int]
) -> None:
    model, data = make("mlp", 7, schedule.microbatches + 1)
    expected = ruled(model, schedule, OPTIMIZERS[optimizer])
    cuts = [str(stage * 6 // schedule.stages) for stage in range(1, schedule.stages)]
    with fxpipe.compile(
        model,
        schedule.devices,
        schedule=schedule,
        loss=MSE,
        optimizer=OPTIMIZERS[optimizer],
        partition=cuts,
        recompute=recompute,
    ) as pipe:
        expected.assert_trained(pipe, model, data, flush_at)
        if schedule.overlaps:
            kept = [min(delay + 1, len(data) + 1) for delay in schedule.delays]
            assert pipe.weight_versions == kept
    expected.assert_same(model)


def test_a_flushed_schedule_keeps_only_the_versions_that_its_rule_reads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    most = MostVersions(monkeypatch)
    model, data = make("mlp", 8, 4)
    size = sum(p.numel() * p.element_size() for p in model.parameters()) // 3
    with compiled(model, 3, 3, schedule="pipedream") as pipe:
        for x, y in data:
            pipe.step(x, target=y)
        pipe.flush()
        assert pipe.weight_versions == [2, 2, 1]
        assert pipe.weight_bytes == [2 * size, 2 * size, size]
        assert most.of(pipe) == [2, 2, 1]


@pytest.mark.parametrize("name", ["1f1b-async", "pipedream"])
def test_a_short_batch_reads_the_oldest_version_kept_where_it_asks_for_an_earlier_one(
    name: str,
) -> None:
    model, data = make("mlp", 9, 4)
    counts = [4, 4, 4, 1, 1, 2, 4, 4, 1]
    recipe = find_recipe(name)
    expected = ruled(model, recipe(4, 4))
    kept = dict.fromkeys(range(4), 0)
    before = recipe(4, 4)
    with compiled(model, 4, 4, schedule=name) as pipe:
        for t, ((x, y), count) in enumerate(zip(data, counts, strict=True)):
            schedule = recipe(4, count)
            if schedule != before:  # a flush, after which the batches before it are not known
                for stage, delay in enumerate(before.delays):
                    kept[stage] = max(kept[stage], t - delay)
            before = schedule
            expected.microbatches = count
            expected.delays = rule_of(schedule)
            expected.oldest = {n: kept[stage_of(n, 4)] for n, _ in model.named_parameters()}
            ours = pipe.step(x[:count], target=y[:count])
            assert torch.equal(ours, expected.step(x[:count], y[:count])), f"loss of batch {t}"
    expected.assert_same(model)
