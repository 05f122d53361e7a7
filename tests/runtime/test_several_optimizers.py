"""A list of optimizers, each over parameters of its own, trains as one."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LinearLR

import fxpipe
from fxpipe import InputError
from tests.helpers.overlapping import compiled, make
from tests.helpers.own_optimizers import Nesterov
from tests.helpers.profiles import deep
from tests.oracles.delayed_loop import MSE, DelayedLoop


def both(parameters: Any) -> list[Optimizer]:
    """One for matrices with a counter in its group, and one for vectors with two groups."""
    listed = [*parameters]
    vectors = [p for p in listed if p.dim() < 2]
    groups: list[dict[str, Any]] = [{"params": vectors[:2], "lr": 5e-3}, {"params": vectors[2:]}]
    return [Nesterov([p for p in listed if p.dim() > 1], 0.05), torch.optim.AdamW(groups, lr=1e-2)]


class OneByOne:
    """Steps optimizers one after another, for the plain loop."""

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self.optimizers = optimizers

    def step(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()

    def zero_grad(self) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad()


def beside(model: nn.Module, delay: int = 0) -> tuple[DelayedLoop, list[Optimizer]]:
    alone = copy.deepcopy(model)
    optimizers = both(alone.parameters())
    stepped: Any = OneByOne(optimizers)
    return DelayedLoop(alone, stepped, MSE, 3, lambda _: delay), optimizers


@pytest.mark.parametrize("schedule", ["1f1b", *deep("zb-h1")])
@pytest.mark.parametrize("form", ["list", "function", "named"])
def test_they_train_as_one_by_one_with_a_scheduler_of_one_of_them(form: str, schedule: str) -> None:
    model, data = make("mlp", 4, 6)
    expected, theirs = beside(model)
    given: Any = both(model.parameters())
    if form == "function":
        given = both
    elif form == "named":
        given = lambda named_parameters: both(p for _, p in named_parameters)  # noqa: E731
    with compiled(model, 3, 3, given, schedule=schedule) as pipe:
        mine: Any = given[1] if form == "list" else pipe.optimizer
        schedulers = [LinearLR(mine, 0.5, total_iters=3), LinearLR(theirs[1], 0.5, total_iters=3)]
        if form != "list":
            schedulers.append(LinearLR(theirs[0], 0.5, total_iters=3))
        for x, y in data:
            assert torch.equal(pipe.step(x, target=y), expected.step(x, y))
            for scheduler in schedulers:
                scheduler.step()
        expected.assert_same(model)
        settings = [group for each in theirs for group in each.param_groups]
        for group, alone in zip(pipe.optimizer.param_groups, settings, strict=True):
            assert group["lr"] == alone["lr"] and group.get("k") == alone.get("k")


@pytest.mark.needs("overlapping")
def test_batches_that_overlap_train_with_several() -> None:
    model, data = make("mlp", 5, 6)
    expected, _ = beside(model, 1)
    with compiled(model, 3, 3, both(model.parameters())) as pipe:
        expected.assert_trained(pipe, model, data)


def test_their_states_go_around_as_one_and_are_theirs_at_the_end() -> None:
    model, data = make("mlp", 6, 6)
    expected, theirs = beside(model)
    mine = both(model.parameters())
    for part in (data[:2], data[2:4]):  # and in another pipe
        with compiled(model, 3, 3, mine, schedule="1f1b") as pipe:
            for x, y in part:
                pipe.step(x, target=y)
                expected.step(x, y)
            kept = copy.deepcopy(pipe.optimizer)
            saved = pipe.optimizer.state_dict()
            assert len(saved["state"]) == len(list(model.parameters()))
            pipe.optimizer.load_state_dict(saved)
            assert pipe.optimizer.param_groups[1] is mine[1].param_groups[0]
            assert _same(kept.state_dict(), saved)
    for own, its in zip(mine, theirs, strict=True):
        assert _same(own.state_dict(), its.state_dict())
    for x, y in data[4:]:
        expected.step(x, y)
    after = DelayedLoop(model, OneByOne(mine), MSE, 3, lambda _: 0)  # type: ignore[arg-type]
    for x, y in data[4:]:
        after.step(x, y)
    expected.assert_same(model)


def _same(first: Any, second: Any) -> bool:
    if isinstance(first, Tensor):
        return torch.equal(first, second)
    if isinstance(first, dict):
        return first.keys() == second.keys() and all(_same(first[k], second[k]) for k in first)
    if isinstance(first, list):
        return len(first) == len(second) and all(map(_same, first, second))
    return bool(first == second)


@pytest.mark.needs("checkpoint")
def test_a_checkpoint_goes_on_with_those_that_it_was_made_with(tmp_path: Path) -> None:
    model, data = make("mlp", 4, 6)
    expected, _ = beside(model)
    other = copy.deepcopy(model)
    with compiled(model, 2, 3, both(model.parameters()), schedule="1f1b") as pipe:
        for x, y in data[:2]:
            pipe.step(x, target=y)
            expected.step(x, y)
        pipe.checkpoint(tmp_path / "run.pt")
    with compiled(other, 3, 3, both, schedule="1f1b") as pipe:
        pipe.restore(tmp_path / "run.pt")
        for x, y in data[2:]:
            assert torch.equal(pipe.step(x, target=y), expected.step(x, y))
    one = torch.optim.AdamW(other.parameters())
    with (
        compiled(other, 3, 3, one, schedule="1f1b") as pipe,
        pytest.raises(fxpipe.errors.CheckpointError, match="state of Nesterov, AdamW, and the pi"),
    ):
        pipe.restore(tmp_path / "run.pt")


def test_what_one_alone_may_not_be_several_may_not_be() -> None:
    model, [(x, y)] = make("mlp", 1, 6)
    first, *rest = model.parameters()

    def refused(given: Any, part: str) -> None:
        with pytest.raises(InputError, match=part):
            compiled(model, 2, 3, given, schedule="1f1b")

    sgd = torch.optim.SGD
    refused([sgd([first]), sgd([*rest, first])], "has a parameter that an optimizer before it in")
    refused([sgd([first]), torch.optim.LBFGS(rest)], "evaluates the loss anew")
    refused([sgd([first]), "adam"], "optimizer is one list")
    refused([], r"optimizer is \[\]")
    hooked = sgd(rest)
    handle = hooked.register_step_post_hook(lambda *_: None)
    refused([sgd([first]), hooked], "the optimizer has a hook on its step")
    handle.remove()
    with compiled(model, 2, 3, [sgd([first]), hooked], schedule="1f1b") as pipe:
        pipe.step(x, target=y)
        hooked.register_step_post_hook(lambda *_: None)
        with pytest.raises(InputError, match="the optimizer has a hook on its step"):
            pipe.step(x, target=y)
