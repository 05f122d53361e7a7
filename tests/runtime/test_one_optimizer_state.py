"""The state of a pipe's one optimizer: to plain PyTorch, to a checkpoint, and back."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import ExponentialLR, LRScheduler

import fxpipe
from tests.helpers.one_optimizer import FORMS, assert_same_state, loop_of, made_by
from tests.helpers.overlapping import ADAMW, MORE, compiled, make
from tests.helpers.own_optimizers import Nesterov
from tests.oracles.delayed_loop import MSE, DelayedLoop


@pytest.mark.parametrize("schedule", ["1f1b", "2bw"])
def test_its_state_goes_to_a_plain_optimizer_and_back(schedule: str) -> None:
    model, data = make("mlp", 9, 4)
    given, plain = FORMS["itself"]
    expected = loop_of(model, plain, int(schedule == "2bw"))
    with compiled(model, 3, 3, given(model), schedule=schedule) as pipe:
        for x, y in data[:3]:
            pipe.step(x, target=y)
            expected.step(x, y)
        saved = copy.deepcopy(pipe.optimizer.state_dict())
        weights = copy.deepcopy(pipe.state_dict())
    other = plain(expected.model)
    other.load_state_dict(copy.deepcopy(saved))  # from the pipe to plain PyTorch
    expected.optimizer = other
    expected.restart()
    losses = [expected.step(x, y) for x, y in data[3:6]]
    second = make("mlp", 0, 4)[0]
    with compiled(second, 2, 3, given(second), schedule=schedule) as pipe:
        pipe.load_state_dict(weights)
        pipe.optimizer.load_state_dict(saved)  # and to another pipe, before its first step
        assert [pipe.step(x, target=y) for x, y in data[3:6]] == losses
        pipe.load_state_dict(expected.model.state_dict())
        expected.restart()
        pipe.optimizer.load_state_dict(
            copy.deepcopy(other.state_dict())
        )  # from plain PyTorch, between steps
        for x, y in data[6:]:
            assert torch.equal(pipe.step(x, target=y), expected.step(x, y))
    expected.assert_same(second)


@pytest.mark.parametrize("known", ["before stages", "after stages"])
@pytest.mark.parametrize("form", ["itself", "of a stage"])
def test_a_checkpoint_brings_its_settings_and_state_back(
    form: str, known: str, tmp_path: Any
) -> None:
    data = make("mlp", 6, 4)[1]
    given, plain = FORMS[form]

    def start(devices: int) -> tuple[fxpipe.Pipeline, LRScheduler]:
        model = make("mlp", 0, 4)[0]
        pipe = compiled(model, devices, 3, given(model))
        return pipe, ExponentialLR(pipe.optimizer, 0.5)

    expected = loop_of(make("mlp", 0, 4)[0], plain, 1)
    decay = ExponentialLR(expected.optimizer, 0.5)
    pipe, ours = start(3)
    with pipe:
        for x, y in data[:3]:
            pipe.step(x, target=y)
            expected.step(x, y)
            ours.step()
            decay.step()
        pipe.checkpoint(tmp_path / "run", extra=ours.state_dict())
    pipe, ours = start(2)
    with pipe:
        if known == "after stages":
            pipe.step(*data[5][:1], target=data[5][1])
        ours.load_state_dict(pipe.restore(tmp_path / "run"))
        assert pipe.optimizer.param_groups[0]["lr"] == expected.optimizer.param_groups[0]["lr"]
        assert_same_state(pipe.optimizer.state_dict(), expected.optimizer.state_dict())
        for x, y in data[3:]:
            assert torch.equal(pipe.step(x, target=y), expected.step(x, y))
            ours.step()
            decay.step()
        assert_same_state(pipe.optimizer.state_dict(), expected.optimizer.state_dict())
        pipe.flush()
        ours_now = copy.deepcopy(pipe.state_dict())
    for name, value in expected.model.state_dict().items():
        assert torch.equal(ours_now[name], value)


def test_a_run_that_a_checkpoint_from_before_its_first_step_resets_is_saved_anew(
    tmp_path: Any,
) -> None:
    model, data = make("mlp", 3, 4)
    first = tmp_path / "first"
    with compiled(model, 2, 3, ADAMW) as pipe:
        pipe.checkpoint(first)
    for given in (ADAMW, torch.optim.AdamW(model.parameters(), lr=1e-2)):
        expected = loop_of(model, lambda alone: ADAMW(alone.parameters()), 1)
        with compiled(model, 2, 3, given) as pipe:
            for _ in range(2):
                for x, y in data:
                    pipe.step(x, target=y)
                pipe.restore(first)
            for x, y in data:
                assert torch.equal(pipe.step(x, target=y), expected.step(x, y))
            assert_same_state(pipe.optimizer.state_dict(), expected.optimizer.state_dict())
            pipe.checkpoint(tmp_path / "later")
            pipe.restore(tmp_path / "later")
            assert_same_state(pipe.optimizer.state_dict(), expected.optimizer.state_dict())
            pipe.restore(first)


def test_a_closed_pipe_leaves_the_optimizer_for_plain_pytorch() -> None:
    model, data = make("mlp", 6, 4)
    expected = loop_of(model, lambda alone: Nesterov(alone.parameters(), 0.05), 0)
    mine = Nesterov(model.parameters(), 0.05)
    for _ in range(2):  # and for another pipe
        with compiled(model, 3, 3, mine, schedule="1f1b") as pipe:
            for x, y in data:
                pipe.step(x, target=y)
                expected.step(x, y)
    after = DelayedLoop(model, mine, MSE, 3, lambda _: 0)
    for x, y in data:
        assert torch.equal(after.step(x, y), expected.step(x, y))
    assert mine.param_groups[0]["k"] == 18
    expected.assert_same(model)


def test_an_optimizer_is_made_before_a_model_has_data() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))
    full = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))
    expected = DelayedLoop.beside(full, ADAMW, 3, delay=0)
    given, adagrad = (make_it(model.parameters()) for make_it in (ADAMW, MORE["adagrad"]))
    x, y = torch.randn(4, 6), torch.randn(4, 6)
    with compiled(model, 2, 3, given, schedule="1f1b") as pipe:
        decays = [ExponentialLR(each, 0.5) for each in (pipe.optimizer, expected.optimizer)]
        pipe.load_state_dict(full.state_dict())
        for _ in range(3):
            assert torch.equal(pipe.step(x, target=y), expected.step(x, y))
            for each in decays:
                each.step()
        assert_same_state(pipe.optimizer.state_dict(), expected.optimizer.state_dict())
    expected.assert_same(model)
    with (
        compiled(model, 2, 3, adagrad, schedule="1f1b") as pipe,
        pytest.raises(fxpipe.InputError, match="Adagrad makes its state when it is made"),
    ):
        pipe.step(x, target=y)


def test_the_stages_take_over_the_memory_of_what_a_given_optimizer_kept() -> None:
    model, data = make("mlp", 2, 4)
    mine = ADAMW(model.parameters())
    for _ in range(2):
        with compiled(model, 2, 3, mine, schedule="1f1b") as pipe:
            for x, y in data:
                pipe.step(x, target=y)
            for part in filter(None, made_by(pipe)):
                assert part.state is mine.state
