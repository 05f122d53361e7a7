"""What a user changes by hand in a pipe's one optimizer between steps counts, or is refused."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import StepLR

import fxpipe
from tests.helpers.one_optimizer import FORMS, assert_same_state, loop_of
from tests.helpers.overlapping import compiled, make


def clear(optimizer: Optimizer) -> None:
    optimizer.state.clear()


def replace(optimizer: Optimizer) -> None:
    optimizer.state = defaultdict(dict)


def drop_one(optimizer: Optimizer) -> None:
    del optimizer.state[optimizer.param_groups[0]["params"][0]]


def assign(optimizer: Optimizer) -> None:
    for kept in optimizer.state.values():
        kept["exp_avg"] = torch.zeros_like(kept["exp_avg"])


def write(optimizer: Optimizer) -> None:
    for kept in optimizer.state.values():
        kept["exp_avg"].zero_()


@pytest.mark.parametrize("schedule", ["1f1b", "2bw"])
@pytest.mark.parametrize("change", [clear, replace, drop_one, assign, write])
def test_changes_of_its_state_count_though_nobody_looked_at_it_before(
    change: Callable[[Optimizer], None], schedule: str
) -> None:
    model, data = make("mlp", 7, 4)
    given, plain = FORMS["itself"]
    expected = loop_of(model, plain, int(schedule == "2bw"))
    optimizer = given(model)
    with compiled(model, 3, 3, optimizer, schedule=schedule) as pipe:
        for number, (x, y) in enumerate(data):
            if number == 4:
                pipe.flush()
                change(optimizer)
                change(expected.optimizer)
            assert torch.equal(pipe.step(x, target=y), expected.step(x, y))
        assert_same_state(optimizer.state_dict(), expected.optimizer.state_dict())
    expected.assert_same(model)


def test_reading_its_state_between_batches_in_flight_changes_nothing() -> None:
    model, data = make("mlp", 5, 4)
    given, plain = FORMS["itself"]
    expected = loop_of(model, plain, 1)
    optimizer = given(model)
    with compiled(model, 3, 3, optimizer, schedule="2bw") as pipe:
        for x, y in data:
            pipe.step(x, target=y)
            expected.step(x, y)
            for parameter in model.parameters():
                optimizer.state[parameter].get("exp_avg")
    expected.assert_same(model)


def test_its_state_is_that_of_the_last_step_without_a_look_at_the_pipe() -> None:
    model, data = make("mlp", 2, 4)
    given, plain = FORMS["itself"]
    expected = loop_of(model, plain, 0)
    optimizer = given(model)
    with compiled(model, 3, 3, optimizer, schedule="1f1b") as pipe:
        for x, y in data:
            pipe.step(x, target=y)
            expected.step(x, y)
            theirs = expected.optimizer.state
            for own, other in zip(model.parameters(), expected.model.parameters(), strict=True):
                assert torch.equal(optimizer.state[own]["exp_avg"], theirs[other]["exp_avg"])


def test_a_copy_of_it_has_its_state() -> None:
    model, data = make("mlp", 1, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    with compiled(model, 2, 3, optimizer, schedule="1f1b") as pipe:
        pipe.step(data[0][0], target=data[0][1])
        made = copy.deepcopy(optimizer)
        assert len(made.state) == len([*model.parameters()])
        assert_same_state(made.state_dict(), optimizer.state_dict())


def test_the_state_of_a_parameter_that_no_stage_reads_is_kept() -> None:
    class TwoHeads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.first, self.second = (nn.Linear(4, 4) for _ in range(3))

        def forward(self, x: Any) -> Any:
            return self.first(torch.relu(self.body(x)))

    model, x = TwoHeads(), torch.ones(4, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    model.second(model.body(x)).sum().backward()
    optimizer.step()
    before = copy.deepcopy(optimizer.state_dict()["state"])
    with compiled(model, 2, 2, optimizer) as pipe:
        pipe.step(x, target=x)
        after = optimizer.state_dict()["state"]
    for number, (name, _) in enumerate(model.named_parameters()):
        if name.startswith("second"):
            assert torch.equal(after[number]["exp_avg"], before[number]["exp_avg"])
            assert optimizer.state_dict()["state"][number]["step"] == 1


def test_what_no_stage_would_call_is_refused_in_the_step_after_it_came() -> None:
    model, data = make("mlp", 1, 4)
    x, y = data[0]
    optimizer = torch.optim.AdamW(model.parameters())
    with compiled(model, 2, 3, optimizer, schedule="1f1b") as pipe:
        pipe.step(x, target=y)
        handle = optimizer.register_step_post_hook(lambda *_: None)
        with pytest.raises(fxpipe.InputError, match="the optimizer has a hook on its step"):
            pipe.step(x, target=y)
        handle.remove()
        StepLR(optimizer, 1)  # which wraps the step
        pipe.step(x, target=y)
        vars(optimizer)["step"] = lambda closure=None: None
        with pytest.raises(fxpipe.InputError, match=r"a step of its own .*del optimizer\.step"):
            pipe.step(x, target=y)
        del vars(optimizer)["step"]
        vars(optimizer)["step"] = optimizer.step
        pipe.step(x, target=y)
        removed = optimizer.param_groups[0]["params"].pop()
        with pytest.raises(fxpipe.InputError, match="or has other parameters than when"):
            pipe.step(x, target=y)
        optimizer.param_groups[0]["params"].append(removed)
        pipe.step(x, target=y)
        assert pipe.batches == 4


def test_an_optimizer_with_a_step_of_its_own_is_refused() -> None:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    vars(optimizer)["step"] = lambda closure=None: None
    with pytest.raises(fxpipe.InputError, match="the optimizer has a step of its own"):
        fxpipe.compile(model, 1, optimizer=optimizer)
