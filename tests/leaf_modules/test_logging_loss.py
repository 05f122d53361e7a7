"""A loss that does more than compute is found by one run of it, which leaves nothing behind."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fxpipe.compiler.leaf_modules.fallback import Leaves
from fxpipe.compiler.leaf_modules.logging_loss import Readings, look_at_loss
from fxpipe.compiler.objective import Objective

Y, T = torch.randn(4, 3), torch.randn(4, 3)
LOG: list[Any] = []
TABLE: dict[int, int] = {}


def appends(y: Tensor, t: Tensor) -> Tensor:
    LOG.append(1)
    return F.mse_loss(y, t)


def reads(y: Tensor, t: Tensor) -> Tensor:
    loss = F.mse_loss(y, t)
    LOG.append(loss.item())
    return loss


def prints(y: Tensor, t: Tensor) -> Tensor:
    loss = F.mse_loss(y, t)
    assert f"{loss.detach():.2f}"
    return loss


def fills_a_table_once(y: Tensor, t: Tensor) -> Tensor:
    TABLE.setdefault(len(y), 1)
    return F.mse_loss(y, t)


def fails(y: Tensor, t: Tensor) -> Tensor:
    raise ZeroDivisionError


LOSSES: dict[str, tuple[Callable[..., Any], bool]] = {
    "appends to a list": (appends, True),
    "reads a number": (reads, True),
    "formats a number": (prints, True),
    "only computes": (F.mse_loss, False),
    "fills a table once": (fills_a_table_once, False),
    "fails": (fails, False),
}


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_is_called_as_it_is_if_it_does_more_than_compute(name: str) -> None:
    loss, called = LOSSES[name]
    LOG.clear()
    TABLE.clear()
    leaves = Leaves(nn.Identity(), {}, loss)
    with leaves.trying():
        look_at_loss(leaves, Objective(loss), Y, (T,))
        assert leaves.loss == called
    if called:
        assert not LOG  # no step has run


def test_readings_name_the_line_that_reads() -> None:
    y = torch.ones(2)
    with Readings([y]) as readings:
        torch.ones(2).sum().item()  # of another tensor
        assert not readings.where
        z = (y * 2).sum()
        z.item()
    assert "test_logging_loss.py" in readings.where and "z.item()" in readings.where
