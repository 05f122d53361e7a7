"""Forms in which a pipe is given one optimizer for its model, and the plain loop beside it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import fxpipe
from tests.helpers.overlapping import OPTIMIZERS
from tests.oracles.delayed_loop import MSE, DelayedLoop

Named = Iterable[tuple[str, nn.Parameter]]


def by_name(named: Named) -> list[dict[str, Any]]:
    """Biases do not decay, and the first layer learns more slowly; nothing is in model order."""
    listed = list(named)
    decayed = [p for name, p in listed if name.endswith("weight") and not name.startswith("0.")]
    return [
        {"params": [p for name, p in listed if name.endswith("bias")], "weight_decay": 0.0},
        {"params": decayed[::-1], "weight_decay": 0.1},
        {"params": [p for name, p in listed if name == "0.0.weight"], "lr": 1e-3},
    ]


def named_adamw(named_parameters: Named) -> Optimizer:
    return torch.optim.AdamW(by_name(named_parameters), lr=1e-2)


FORMS: dict[str, tuple[Callable[[nn.Module], Any], Callable[[nn.Module], Optimizer]]] = {
    "itself": (
        lambda model: named_adamw(model.named_parameters()),
        lambda model: named_adamw(model.named_parameters()),
    ),
    "of names": (lambda _: named_adamw, lambda model: named_adamw(model.named_parameters())),
    "of a stage": (
        lambda _: OPTIMIZERS["groups"],
        lambda model: OPTIMIZERS["groups"](model.parameters()),
    ),
    "pairs": (
        lambda model: torch.optim.SGD(model.named_parameters(), lr=0.05, momentum=0.9),
        lambda model: torch.optim.SGD(model.named_parameters(), lr=0.05, momentum=0.9),
    ),
}
"""Form of ``optimizer=`` → what the pipe is given, and the optimizer of the plain loop."""


def loop_of(model: nn.Module, make_it: Callable[[nn.Module], Optimizer], delay: int) -> DelayedLoop:
    alone = copy.deepcopy(model)
    return DelayedLoop(alone, make_it(alone), MSE, 3, lambda _: delay)


def assert_same_state(ours: Any, theirs: Any) -> None:
    """Two state dicts of optimizers are equal, to the bit."""
    assert ours["param_groups"] == theirs["param_groups"]
    assert ours["state"].keys() == theirs["state"].keys()
    for number, kept in theirs["state"].items():
        assert ours["state"][number].keys() == kept.keys()
        for key, value in kept.items():
            found = ours["state"][number][key]
            assert torch.equal(found, value) if isinstance(value, Tensor) else found == value


def made_by(pipe: fxpipe.Pipeline) -> Sequence[Optimizer | None]:
    """Stage → the optimizer that updates it, with copies of the groups' settings."""
    return pipe._engine.progress.optimizers_of(pipe.plan)
