"""A mode that sees the operations of PyTorch, to change or watch them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fxpipe.errors import TraceError
from fxpipe.torchtools.draws import Draws


class Halved(Draws):
    """Lets every draw give a half."""

    def operation(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        made = super().operation(func, args, kwargs)
        if torch.Tag.nondeterministic_seeded in func.tags:
            return torch.full_like(made, 0.5)
        return made


def test_an_operation_is_what_the_mode_makes_of_it() -> None:
    with Halved():
        assert torch.equal(torch.rand(3), torch.full((3,), 0.5))
        assert torch.equal(torch.ones(3) + 1, torch.full((3,), 2.0))
    assert not torch.equal(torch.rand(3), torch.rand(3))


def test_torchs_own_control_flow_is_refused_with_what_to_write() -> None:
    def double(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    with Draws(), pytest.raises(TraceError, match=r"'cond', .*write an if"):
        torch.cond(torch.ones(()) > 0, double, double, (torch.ones(2),))
