"""The loss of a step is a plain scalar in all but its ``backward``."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from fxpipe.errors import InputError
from fxpipe.runtime.loss import StepLoss

USES: dict[str, Callable[[Any], Any]] = {
    "item": lambda x: x.item(),
    "float": float,
    "format": lambda x: f"{x:.3f}",
    "repr": repr,
    "sum": lambda x: x + 1,
    "twice": lambda x: x * x,
    "stack": lambda x: torch.stack([x, x]),
    "out of place": lambda x: torch.add(input=x, other=2),
    "numpy": lambda x: x.numpy().tolist(),
    "compare": lambda x: bool(x > 1),
    "copy": copy.deepcopy,
    "pickle": lambda x: pickle.loads(pickle.dumps(x)),
    "detach": lambda x: x.detach(),
    "double": lambda x: x.double(),
    "hash": lambda x: isinstance(hash(x), int),
}


@pytest.mark.parametrize("name", USES)
def test_in_every_use_it_gives_what_a_plain_tensor_gives(name: str) -> None:
    plain = torch.tensor(1.25)
    expected, made = USES[name](plain), USES[name](plain.clone().as_subclass(StepLoss))
    if isinstance(expected, Tensor):
        assert torch.equal(made, expected) and made.dtype is expected.dtype
        if name not in ("copy", "pickle"):
            assert type(made) is Tensor
    else:
        assert made == expected


def test_it_is_in_the_memory_of_the_loss() -> None:
    loss = torch.tensor(1.0)
    made = loss.as_subclass(StepLoss)
    loss.fill_(3)
    assert made.item() == 3 and isinstance(made, StepLoss)
    assert made.data_ptr() == loss.data_ptr()
    made.add_(1)
    assert loss.item() == 4


def test_backward_says_that_the_step_has_run_it() -> None:
    with pytest.raises(InputError, match="has already run backward"):
        torch.tensor(1.0).as_subclass(StepLoss).backward()
