"""Leaf modules whose stages several devices run, each with its weights in them."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

import fxpipe
from fxpipe.ir.recipe import find_recipe
from tests.extensions.copies.test_copies import copied
from tests.helpers.overlapping import ADAMW, compiled, make


@pytest.mark.parametrize("kinds", [(nn.Linear,), (nn.Linear, nn.Tanh)])
def test_leaf_modules_take_turns_on_their_devices(kinds: tuple[type[nn.Module], ...]) -> None:
    model, data = make("mlp", 4, 18)
    alone = copied(model, find_recipe("chimera")(2, 6), ADAMW)
    extensions = [fxpipe.Dispatch("device"), fxpipe.LeafModules(*kinds)]
    with compiled(model, 2, 6, ADAMW, schedule="chimera", extensions=extensions) as pipe:
        for x, y in data:
            assert torch.equal(pipe.step(x, target=y), alone.step(x, y))
        alone.assert_same(model)


class Alone(nn.Module):
    """It lets other threads run, and tells where one of them is inside, too."""

    inside: ClassVar[list[int]] = []

    def forward(self, x: Tensor) -> Tensor:
        self.inside.append(0)
        for _ in range(200):
            x = x + 0
        assert len(self.inside) == 1, "another device is inside"
        self.inside.pop()
        return x


@pytest.mark.smoke
def test_no_leaf_module_is_called_by_two_devices_at_once() -> None:
    model = nn.Sequential(nn.Sequential(nn.Linear(6, 6), Alone()), nn.Linear(6, 6))
    x, y = torch.randn(16, 6), torch.randn(16, 6)
    extensions = [fxpipe.LeafModules(Alone), fxpipe.Dispatch("device")]
    options: dict[str, Any] = {"extensions": extensions, "partition": ["1"]}
    with compiled(model, 2, 8, schedule="chimera", **options) as pipe:
        for _ in range(5):
            pipe.step(x, target=y)
