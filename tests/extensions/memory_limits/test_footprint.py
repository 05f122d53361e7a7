"""What the state of an optimizer takes, as a step tells."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from fxpipe.extensions.memory_limits.footprint import state_size
from fxpipe.runtime.weights.optimizer import GivenOptimizer


@pytest.mark.parametrize(
    ("factory", "copies"),
    [
        (torch.optim.Adam, 2.0),
        (torch.optim.SGD, 0.0),
        (lambda p: torch.optim.SGD(p, momentum=0.9), 1.0),
        (lambda p: torch.optim.Adam(p, amsgrad=True), 3.0),
        (lambda p: 1 / 0, 2.0),
    ],
)
def test_the_state_of_an_optimizer_is_known_from_a_step(factory: Any, copies: float) -> None:
    model = nn.Linear(2, 2)
    assert state_size(GivenOptimizer(factory, model)) == copies
    if copies != 2.0:
        given = GivenOptimizer(factory(model.parameters()), model)
        assert state_size(given) == copies
    assert state_size(None) == 2.0
