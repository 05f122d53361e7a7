"""The one optimizer of a pipe: what takes a torch optimizer takes it, as in a plain loop."""

from __future__ import annotations

import copy
import warnings
from collections import deque
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import (
    ExponentialLR,
    LambdaLR,
    LRScheduler,
    OneCycleLR,
    SequentialLR,
)
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import fxpipe
from tests.helpers.one_optimizer import FORMS, assert_same_state, loop_of, made_by
from tests.helpers.overlapping import ADAMW, MORE, OPTIMIZERS, compiled, make
from tests.helpers.profiles import deep
from tests.oracles.delayed_loop import MSE, Batch, DelayedLoop, Factory

SCHEDULERS: dict[str, Callable[[Optimizer], LRScheduler]] = {
    "one cycle": lambda o: OneCycleLR(o, [0.1] * len(o.param_groups), total_steps=12),
    "warm-up": lambda o: SequentialLR(
        o, [LambdaLR(o, lambda i: (i + 1) / 4), ExponentialLR(o, 0.8)], [3]
    ),
}


@pytest.mark.parametrize("schedule", [*deep("1f1b"), "2bw"])
@pytest.mark.parametrize("scheduler", SCHEDULERS)
@pytest.mark.parametrize("form", FORMS)
def test_every_form_trains_as_a_plain_loop_with_a_scheduler_made_before_the_first_step(
    form: str, scheduler: str, schedule: str
) -> None:
    model, data = make("mlp", 9, 4)
    given, plain = FORMS[form]
    expected = loop_of(model, plain, int(schedule == "2bw"))
    with (
        warnings.catch_warnings(),
        compiled(model, 3, 3, given(model), schedule=schedule) as pipe,
    ):
        warnings.simplefilter("error")  # such as that of a scheduler that steps too early
        ours = SCHEDULERS[scheduler](pipe.optimizer)
        theirs = SCHEDULERS[scheduler](expected.optimizer)
        for x, y in data:
            assert torch.equal(pipe.step(x, target=y), expected.step(x, y))
            ours.step()
            theirs.step()
            assert ours.get_last_lr() == theirs.get_last_lr()
        assert_same_state(pipe.optimizer.state_dict(), expected.optimizer.state_dict())
        names = {p: name for name, p in model.named_parameters()}
        alone = {p: name for name, p in expected.model.named_parameters()}
        order = [[names[p] for p in group["params"]] for group in pipe.optimizer.param_groups]
        assert order == [[alone[p] for p in g["params"]] for g in expected.optimizer.param_groups]
    expected.assert_same(model)


@pytest.mark.parametrize("name", [*MORE, "fused", "own"])
def test_any_optimizer_over_the_whole_model_is_parted(name: str) -> None:
    factory: Factory = {**MORE, **OPTIMIZERS}[name]
    model, data = make("mlp", 7, 4)
    mine = factory(model.parameters())
    expected = loop_of(model, lambda alone: factory(alone.parameters()), 1)
    decays = [ExponentialLR(each, 0.7) for each in (mine, expected.optimizer)]
    with compiled(model, 3, 3, mine) as pipe:
        assert pipe.optimizer is mine
        for x, y in data:
            assert torch.equal(pipe.step(x, target=y), expected.step(x, y))
            for each in decays:
                each.step()
        assert_same_state(mine.state_dict(), expected.optimizer.state_dict())
    expected.assert_same(model)


def test_a_scheduler_that_steps_before_any_batch_is_warned_of() -> None:
    model, [(x, y)] = make("mlp", 1, 4)
    with compiled(model, 2, 3, ADAMW) as pipe:
        pipe.prepare(x, target=y)
        decay = ExponentialLR(pipe.optimizer, 0.7)
        with pytest.warns(UserWarning, match=r"lr_scheduler.step\(\)` before `optimizer.step"):
            decay.step()


@pytest.mark.parametrize("form", ["itself", "of a stage"])
def test_its_own_step_updates_from_gradients_and_takes_a_scaler(form: str) -> None:
    model, data = make("mlp", 6, 4)
    alone = copy.deepcopy(model)
    given, plain = FORMS[form]
    theirs = plain(alone)
    scalers = [torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2) for _ in range(2)]

    def train(called: nn.Module, optimizer: Optimizer, scaler: Any, batch: Batch) -> Tensor:
        """A loop as in PyTorch's tutorials."""
        optimizer.zero_grad()
        loss = MSE(called(batch[0]), batch[1])
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(called.parameters(), 0.1)
        scaler.step(optimizer)
        scaler.update()
        return loss

    with compiled(model, 3, 1, given(model), schedule="1f1b") as pipe:
        for index, (x, y) in enumerate(data):
            if index % 3 == 2:  # the same optimizer in a step of the pipe
                theirs.zero_grad()
                pipe.optimizer.zero_grad()
                loss = MSE(alone(x), y)
                loss.backward()
                theirs.step()
                assert torch.equal(pipe.step(x, target=y), loss)
            else:
                batch = (x, y)
                ours = train(pipe, pipe.optimizer, scalers[0], batch)
                assert torch.equal(ours, train(alone, theirs, scalers[1], batch))
        assert_same_state(pipe.optimizer.state_dict(), theirs.state_dict())
    for mine, other in zip(model.parameters(), alone.parameters(), strict=True):
        assert torch.equal(mine, other)


def test_a_closure_may_train_the_pipe() -> None:
    model, data = make("mlp", 3, 4)
    alone = copy.deepcopy(model)
    theirs = ADAMW(alone.parameters())

    def closure_of(called: nn.Module, optimizer: Optimizer, batch: Batch) -> Callable[[], Any]:
        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = MSE(called(batch[0]), batch[1])
            loss.backward()
            return loss

        return closure

    with compiled(model, 2, 1, ADAMW, schedule="1f1b") as pipe:
        for batch in data:
            ours = pipe.optimizer.step(closure_of(pipe, pipe.optimizer, batch))
            other: Any = theirs.step(closure_of(alone, theirs, batch))
            assert torch.equal(torch.as_tensor(ours), other)
    for mine, its in zip(model.parameters(), alone.parameters(), strict=True):
        assert torch.equal(mine, its)


@pytest.mark.parametrize("of_pipe", [True, False])
def test_an_average_of_the_weights_follows_those_of_a_plain_loop(of_pipe: bool) -> None:
    model, data = make("mlp", 5, 4)
    expected = DelayedLoop.beside(model, ADAMW, 3, delay=1)
    how: dict[str, Any] = {"multi_avg_fn": get_ema_multi_avg_fn(0.9), "use_buffers": True}
    theirs = AveragedModel(expected.model, **how)
    with compiled(model, 3, 3, ADAMW) as pipe:
        ours = AveragedModel(pipe if of_pipe else model, **how)
        for x, y in data:
            pipe.step(x, target=y)
            expected.step(x, y)
            pipe.flush()
            ours.update_parameters(pipe if of_pipe else model)
            theirs.update_parameters(expected.model)
    assert isinstance(ours.module, nn.Sequential)
    for name, value in theirs.state_dict().items():
        assert torch.equal(ours.state_dict()[name], value), name


def test_settings_of_one_stage_are_its_own_until_those_of_all_change() -> None:
    model, [(x, y)] = make("mlp", 1, 4)
    with compiled(model, 2, 3, ADAMW, schedule="1f1b") as pipe:
        pipe.step(x, target=y)
        whole = pipe.optimizer
        parts = [each.param_groups[0] for each in made_by(pipe) if each is not None]
        parts[1]["lr"] = 0.5
        pipe.step(x, target=y)
        assert [part["lr"] for part in parts] == [0.01, 0.5]
        assert pipe.optimizer.param_groups[0]["lr"] == 0.5  # what was changed last
        pipe.step(x, target=y)
        assert [part["lr"] for part in parts] == [0.01, 0.5]
        whole.param_groups[0]["lr"] = 0.25
        pipe.step(x, target=y)
        assert [part["lr"] for part in parts] == [0.25, 0.25]


class Remembering(torch.optim.SGD):
    """It keeps tensors in attributes, and counts in place."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.1)
        self.seen: dict[str, Any] = {"steps": [torch.zeros(())], "last": deque([torch.zeros(2)], 3)}
        self.first = (parameters[0],)

    def step(self, closure: Any = None) -> Any:
        self.seen["steps"][0] += 1
        self.seen["last"][0] += 1
        return super().step(closure)


def test_each_stage_counts_on_its_own_in_tensors_of_its_optimizer() -> None:
    model, data = make("mlp", 2, 4)
    given = Remembering([*model.parameters()])
    with compiled(model, 2, 3, given, schedule="1f1b") as pipe:
        for x, y in data:
            pipe.step(x, target=y)
        parts = [each for each in made_by(pipe) if isinstance(each, Remembering)]
        assert len(parts) == 2
        for part in parts:
            assert (part.seen["steps"], part.seen["last"].maxlen) == ([2], 3)
            assert part.seen["last"][0].tolist() == [2, 2]
            assert part.first[0] is next(model.parameters())
        assert given.seen["steps"] == [0]


def test_what_fits_no_one_optimizer_is_refused() -> None:
    model, [(x, y)] = make("mlp", 1, 4)

    def refused(given: Any, part: str) -> None:
        with pytest.raises(fxpipe.InputError, match=part):
            compiled(model, 2, 3, given, schedule="1f1b")

    hooked = torch.optim.SGD(model.parameters(), lr=0.1)
    hooked.register_step_post_hook(lambda *_: None)
    refused(hooked, "the optimizer has a hook on its step")
    other = copy.deepcopy(model)
    refused(torch.optim.SGD(other.parameters()), "none of the Sequential's; make it over")
    outer = torch.optim.SGD(model.parameters())
    vars(outer)["base"] = torch.optim.Adam(model.parameters())
    refused(outer, r"SGD steps another optimizer, its \.base,")
    refused(torch.optim.LBFGS(model.parameters()), "evaluates the loss anew")
    refused(lambda named_parameters: torch.optim.SGD(other.parameters()), "what optimizer returns")
    refused(lambda named_parameters: 1 / 0, "optimizer fails .ZeroDivisionError")

    def hooking(parameters: Any) -> Optimizer:
        made = torch.optim.SGD(parameters, lr=0.1)
        made.register_step_pre_hook(lambda *_: None)
        return made

    with (
        compiled(model, 2, 3, hooking, schedule="1f1b") as pipe,
        pytest.raises(fxpipe.InputError, match="what optimizer returns has a hook"),
    ):
        pipe.step(x, target=y)
    first, *rest = model.parameters()
    mine = torch.optim.SGD([first], lr=0.1)
    with compiled(model, 2, 3, mine, schedule="1f1b") as pipe:
        pipe.step(x, target=y)
        mine.add_param_group({"params": rest})
        with pytest.raises(fxpipe.InputError, match="a parameter group of the optimizer has come"):
            pipe.step(x, target=y)
    before = [parameter.detach().clone() for parameter in rest]
    with compiled(model, 2, 3, mine, schedule="1f1b") as pipe:
        pipe.step(x, target=y)  # with that group
    assert not any(map(torch.equal, before, rest))
