"""What the verifier lets pass trains: accepted edits of library schedules give the same weights."""

from __future__ import annotations

import copy
import random
from collections import Counter, defaultdict
from collections.abc import Iterator
from itertools import islice

import pytest
import torch
from torch import Tensor, nn

import fxpipe
from fxpipe.errors import InputError, VerificationError
from fxpipe.ir.recipe import RECIPES
from fxpipe.ir.schedule import Schedule
from fxpipe.verify.schedule import verify_schedule
from tests.helpers.mutants import schedule_mutants
from tests.helpers.profiles import DEEP, some
from tests.helpers.tiny import within
from tests.oracles import loop
from tests.oracles.delayed_loop import RuledLoop

pytestmark = pytest.mark.models

TRAINING = sorted(RECIPES.keys() - {"inference"})
STEPS = 3


def model_of(stages: int) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Sequential(nn.Linear(3, 3), nn.Tanh()) for _ in range(stages))
    ).double()


def batches(rows: int) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    draw = [torch.randn(2, rows, 3, generator=generator).double() for _ in range(STEPS)]
    return [(x, y) for x, y in draw]


def assert_trains(schedule: Schedule) -> None:
    """Some steps and the flush, against a plain loop with the schedule's delays."""
    model = model_of(schedule.stages)
    alone = copy.deepcopy(model)
    with fxpipe.compile(
        model,
        schedule.devices,
        schedule=schedule,
        loss=nn.functional.mse_loss,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
        partition=[str(stage) for stage in range(1, schedule.stages)],
    ) as pipe:
        for x, y in batches(schedule.microbatches):
            pipe.step(x, target=y)
    expected = RuledLoop(
        alone,
        torch.optim.SGD(alone.parameters(), lr=0.1, momentum=0.9),
        nn.functional.mse_loss,
        schedule.microbatches,
        lambda name, i: schedule.delays[int(name.partition(".")[0])],
    )
    expected.run(batches(schedule.microbatches))
    loop.assert_same(model.state_dict(), alone.state_dict(), 1e-12)


def accepted(schedule: Schedule, each: int) -> Iterator[tuple[str, Schedule]]:
    """At most so many of each edit that the verifier lets pass, drawn from all of them."""
    found: defaultdict[str, list[Schedule]] = defaultdict(list)
    for edit, _, mutant in schedule_mutants(schedule):
        found[edit].append(mutant)
    draw = random.Random(0)
    for edit, mutants in found.items():
        draw.shuffle(mutants)
        for mutant in islice(filter(passes, mutants), each):
            yield edit, mutant


def passes(mutant: Schedule) -> bool:
    try:
        verify_schedule(mutant)
    except VerificationError:
        return False
    return True


@pytest.mark.parametrize("name", some(TRAINING))
def test_an_accepted_edit_trains_as_the_plain_loop(name: str) -> None:
    ran: Counter[str] = Counter()
    sizes = ((2, 3), (3, 2)) if DEEP else (((2, 3), (3, 2))[TRAINING.index(name) % 2],)
    for devices, microbatches in sizes:
        schedule = RECIPES[name](devices, microbatches)
        for edit, mutant in accepted(schedule, 20 if DEEP else 1):
            with within(20):
                try:
                    assert_trains(mutant)
                except InputError as error:
                    # the loss of an earlier batch's forward comes too late for its step
                    assert "runs forwards of an earlier batch" in str(error)
                else:
                    ran[edit] += 1
    assert ran["change delay"] or schedule.copies  # which ask for a flush
    assert ran["swap"] + ran["move"]
