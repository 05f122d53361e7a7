"""An optimizer that computes across parameters is warned of where stages step by themselves."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import Optimizer

from fxpipe.extensions.coupled.warning import is_coupled
from fxpipe.torchtools.optimizers import Several
from tests.helpers.overlapping import MORE, OPTIMIZERS, compiled, make
from tests.helpers.own_optimizers import Nesterov, Orthogonal, groups
from tests.oracles import loop
from tests.oracles.delayed_loop import MSE


class Estimating(Optimizer):
    """As Prodigy does, estimates the length of its steps over all parameters from how far they
    have come, from the second step on."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"d": 1e-3})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        every = [p for group in self.param_groups for p in group["params"]]
        along = sum(float((p.grad * (self._first(p) - p)).sum()) for p in every)
        slopes = sum(float(p.grad.abs().sum()) for p in every)
        for group in self.param_groups:
            group["d"] = max(group["d"], along / (slopes + 1e-12))
            for parameter in group["params"]:
                parameter.sub_(parameter.grad, alpha=group["d"])

    def _first(self, parameter: Tensor) -> Tensor:
        first: Tensor = self.state[parameter].setdefault("first", parameter.clone())
        return first


class Clipping(torch.optim.SGD):
    """Clips by the norm of all gradients, as Lamb does."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        torch.nn.utils.clip_grad_norm_(
            [p for group in self.param_groups for p in group["params"]], 0.5
        )
        super().step()


class Noisy(Optimizer):
    """Draws a step for each parameter."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.01})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.sub_(parameter.grad * torch.rand_like(parameter), alpha=group["lr"])


class Failing(Optimizer):
    """Steps only parameters that it knows."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.01})
        self.known = {p for group in self.param_groups for p in group["params"]}

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter not in self.known:
                    raise KeyError(parameter.shape)


def parameters() -> list[torch.nn.Parameter]:
    return [*make("mlp", 0, 1)[0].parameters()]


@pytest.mark.smoke
@pytest.mark.parametrize("kind", [Estimating, Clipping])
def test_an_update_that_depends_on_other_gradients_is_told(kind: Any) -> None:
    assert is_coupled(kind(parameters()))
    assert is_coupled(kind(groups(parameters())))
    mine = parameters()
    assert is_coupled(Several([torch.optim.SGD(mine[:1]), kind(mine[1:])]))


ALONE: dict[str, Any] = {
    **OPTIMIZERS,
    **MORE,
    "noisy": Noisy,
    "failing": Failing,
    "diverging": lambda p: Nesterov(p, 1e30),
    "several": lambda p: Several([Orthogonal([*p][:2]), Nesterov([*p][2:], 0.1)]),
}


@pytest.mark.parametrize("name", ALONE)
def test_nothing_is_said_of_updates_that_depend_on_their_own_gradient(name: str) -> None:
    optimizer = ALONE[name](parameters())  # which seeds the generator
    before = torch.get_rng_state()
    assert not is_coupled(optimizer)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.smoke
def test_it_is_warned_of_once_and_stepped_by_hand_it_trains_as_in_the_loop() -> None:
    model, data = make("mlp", 4, 6)
    theirs = copy.deepcopy(model)
    text = r"Estimating computes .* of other ones, too, .* Leave out optimizer=, and step it yours"
    with compiled(copy.deepcopy(model), 2, 3, Estimating, schedule="1f1b") as pipe:
        with pytest.warns(UserWarning, match=text) as told:
            pipe.step(data[0][0], target=data[0][1])
        pipe.step(data[1][0], target=data[1][1])
        assert len(told) == 1 and told[0].filename == __file__
    with compiled(copy.deepcopy(model), 1, 3, Estimating, schedule="1f1b") as pipe:
        pipe.step(data[0][0], target=data[0][1])  # one stage steps all: a warning would be an error
    mine, its = Estimating(model.parameters()), Estimating(theirs.parameters())
    with compiled(model, 2, 3, None, schedule="1f1b") as pipe:  # type: ignore[arg-type]
        for x, y in data:
            made = pipe.step(x, target=y)
            assert torch.equal(made, loop.train(theirs, 3, x, loss=MSE, target=y).loss)
            for optimizer in (mine, its):
                optimizer.step()
                optimizer.zero_grad()
    loop.assert_same(model.state_dict(), theirs.state_dict())
    assert mine.param_groups[0]["d"] == its.param_groups[0]["d"]
