"""What is frozen takes the time and the memory of an input gradient alone."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from torch.nn.functional import mse_loss

import fxpipe
from fxpipe import Schedule
from fxpipe.extensions.simulator.costs import measured_costs
from fxpipe.schedules import one_f_one_b, zb_h1
from tests.oracles.small_simulator import HALVES, makespan, simulate
from tests.schedules.test_frozen import freezing, made


@given(freezing())
def test_a_step_takes_as_long_as_its_tasks_and_keeps_until_their_end(schedule: Schedule) -> None:
    predicted = schedule.simulate(HALVES)
    assert predicted.kept == schedule.kept().stages
    assert predicted.makespan == makespan(simulate(schedule, HALVES))


@pytest.mark.smoke
def test_a_backward_of_a_frozen_stage_takes_the_time_of_an_input_gradient() -> None:
    spent = {"F": 1, "B": 5, "I": 3, "U": 0}
    frozen = replace(one_f_one_b, frozen=[0, (1, 1)])
    assert frozen(2, 2).simulate(spent).makespan == 1 + 1 + 5 + 1 + 3 + 3
    assert one_f_one_b(2, 2).simulate(spent).makespan == 1 + 1 + 5 + 1 + 5 + 5


@pytest.mark.smoke
@pytest.mark.models
def test_a_stage_whose_parameters_are_frozen_has_no_time_for_weight_gradients() -> None:
    model, x, y = made(3)
    model[2].requires_grad_(False)
    recipe = replace(zb_h1, frozen=[1])
    with fxpipe.compile(
        model, 3, schedule=recipe, microbatches=4, partition=["2", "4"], loss=mse_loss
    ) as pipe:
        pipe.step(x, target=y)
        predicted = pipe.simulate()
        assert pipe.kept == dict(enumerate(predicted.kept))
        costs = measured_costs(pipe.plan)
        assert [costs["W", stage] > 0 for stage in range(3)] == [True, False, True]
        ran = [span.instruction.letter for span in predicted.spans if span.device == 1]
        assert {*ran} == {"F", "I"}
