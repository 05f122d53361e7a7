"""A leaf module is given objects of the classes that the model gives it."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from transformers.modeling_outputs import BaseModelOutput

import fxpipe
from tests.oracles import loop


@dataclass
class Pair:
    first: Any
    second: Any = None


pytree.register_dataclass(Pair, serialized_type_name="tests.Pair")


class Adds(nn.Linear):
    """A leaf that is given an object, with the name of the class that it is to have."""

    def forward(self, given: Any, kind: str = "") -> Any:
        assert type(given).__name__ == kind
        first, second = pytree.tree_leaves(given)
        return super().forward(first) + second


class Gives(nn.Module):
    """Gives two leaves, of two stages, the same object."""

    def __init__(self, made: Callable[[Tensor, Tensor], Any]) -> None:
        super().__init__()
        self.first, self.inner, self.last = nn.Linear(4, 4), Adds(4, 4), Adds(4, 4)
        self.made = made

    def forward(self, x: Tensor) -> Any:
        given = self.made(self.first(x), x)
        kind = type(given).__name__
        return self.inner(given, kind) * self.last(given, kind=kind)


@pytest.mark.parametrize(
    "made",
    [
        lambda y, x: OrderedDict(first=y, second=x),
        lambda y, x: BaseModelOutput(last_hidden_state=y, hidden_states=(x,)),
        Pair,
        lambda y, x: Pair([Pair(y)], {"x": OrderedDict(x=x)}),
    ],
)
def test_a_leaf_is_given_an_object_of_its_class(made: Callable[..., Any]) -> None:
    torch.manual_seed(0)
    model, x = Gives(made), torch.randn(4, 4)
    alone = copy.deepcopy(model)
    given = [fxpipe.LeafModules(Adds)]
    options: Any = {"extensions": given, "partition": ["last"]}
    with fxpipe.compile(model, 2, microbatches=2, loss=torch.sum, **options) as pipe:
        pipe.step(x)
    loop.train(alone, 2, x, loss=torch.sum)
    loop.assert_same(loop.gradients(model), loop.gradients(alone))
