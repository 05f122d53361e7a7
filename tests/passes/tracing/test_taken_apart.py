"""Objects that a model returns: taken apart into tensors, and put together again."""

from __future__ import annotations

import copy
from collections import OrderedDict
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import fxpipe
from fxpipe.torchtools.pytrees import TakenApart, _Walk, taken_apart, together
from tests.oracles import loop


class Cache:
    """Some library's object, with objects of its own."""

    def __init__(self, layers: list[Layer], name: str) -> None:
        self.layers = layers
        self.name = name
        self.total = 0


@dataclass
class Layer:
    key: Tensor
    value: Tensor | None = None
    dtype: torch.dtype = torch.float32
    seen: dict[int, bool] = field(default_factory=dict)


@dataclass
class Found:
    """What a model returns."""

    scores: Tensor
    cache: Cache | None = None
    loss: Tensor | None = None


def test_what_is_put_together_is_what_was_taken_apart() -> None:
    a, b = torch.randn(2), torch.randn(3)
    cache = Cache([Layer(a, seen={0: True}), Layer(b, b)], "one")
    leaves, spec = pytree.tree_flatten(taken_apart({"x": a, "cache": (cache, None, 3)}))
    assert [leaf for leaf in leaves if isinstance(leaf, Tensor)] == [a, a, b, b]
    made = together(leaves, spec)
    found, nothing, three = made["cache"]
    assert (type(found), found.name, found.total, nothing, three) == (Cache, "one", 0, None, 3)
    assert found is not cache
    first, second = found.layers
    assert (type(first), first.key, first.value, first.seen) == (Layer, a, None, {0: True})
    assert first.dtype is torch.float32
    assert (second.key, second.value) == (b, b)


def test_the_path_of_a_part_names_its_attributes() -> None:
    given = {"cache": Cache([Layer(torch.randn(2))], "one")}
    found, _ = pytree.tree_flatten_with_path(taken_apart(given))
    paths = [pytree.keystr(path) for path, leaf in found if isinstance(leaf, Tensor)]
    assert paths == ["['cache'].layers[0].key"]


def test_other_tensors_can_be_put_in_their_places() -> None:
    leaves, spec = pytree.tree_flatten(taken_apart(Cache([Layer(torch.zeros(1))], "one")))
    doubled = [torch.ones(1) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    assert torch.equal(together(doubled, spec).layers[0].key, torch.ones(1))


@pytest.mark.parametrize(
    "value", [None, 3, "word", object(), nn.Linear(2, 2), Cache([], "empty"), int]
)
def test_what_holds_no_tensors_stays_as_it_is(value: Any) -> None:
    assert taken_apart(value) is value


def test_what_pytorch_knows_keeps_its_type() -> None:
    value = OrderedDict(a=[torch.zeros(1)], b=(torch.ones(1),))
    assert type(taken_apart(value)) is OrderedDict
    assert not any(isinstance(x, TakenApart) for x in pytree.tree_leaves(taken_apart(value)))


class Named(SimpleNamespace):
    """Of a class that is written in C."""


@pytest.mark.parametrize("kind", [SimpleNamespace, Named, ValueError])
def test_an_object_of_a_class_in_c_is_made_again(kind: Any) -> None:
    value = kind()
    value.scores, value.word = torch.ones(1), "best"
    made = together(*pytree.tree_flatten(taken_apart(value)))
    assert type(made) is kind
    assert made.word == "best"
    assert torch.equal(made.scores, torch.ones(1))


def test_an_object_that_holds_itself_is_no_trap() -> None:
    cache = Cache([Layer(torch.zeros(1))], "loop")
    cache.total = cache  # type: ignore[assignment]
    made = together(*pytree.tree_flatten(taken_apart(cache)))
    assert torch.equal(made.layers[0].key, torch.zeros(1))


def test_objects_that_share_what_they_hold_are_walked_once_each() -> None:
    inner = Cache([], "empty")
    for depth in range(100):  # 2**100 ways lead to the first
        inner = Cache([inner, inner], str(depth))  # type: ignore[list-item]
    made = taken_apart(Found(torch.zeros(1), inner))
    assert isinstance(made, TakenApart)
    assert made.others["cache"] is inner


def test_a_size_of_a_trace_is_not_walked() -> None:
    reached: list[Any] = []

    class Counted(nn.Module):
        def forward(self, x: Tensor) -> Any:
            walk = _Walk()
            assert walk(x.shape[0]) is not None
            reached.extend(walk._seen)
            reached.append(type(x.shape[0]))
            return x * 2

    batch = torch.export.Dim("batch", min=2)
    shapes = {"x": {0: batch}}
    torch.export.export(Counted(), (torch.randn(4, 2),), dynamic_shapes=shapes, strict=False)
    assert set(reached) == {torch.SymInt}


class Returns(nn.Module):
    """Returns an object, with its loss when it is told what to find."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor, label: Tensor | None = None) -> Found:
        h = torch.tanh(self.first(x))
        y = self.last(h)
        loss = None if label is None else (y - label).square().mean()
        return Found(y, Cache([Layer(h), Layer(h * 2, y)], "kept"), loss)


@pytest.mark.parametrize("own_loss", [True, False])
def test_a_model_that_returns_objects_trains_as_in_the_loop(own_loss: bool) -> None:
    torch.manual_seed(0)
    model = Returns()
    alone = copy.deepcopy(model)

    def squared(found: Found, label: Tensor) -> Tensor:
        assert isinstance(found, Found)
        assert found.cache is not None
        return (found.scores - label).square().mean() + found.cache.layers[0].key.mean()

    x, y = torch.randn(5, 4), torch.randn(5, 4)
    loss = None if own_loss else squared
    given: dict[str, Any] = {"label": y} if own_loss else {"target": y}
    with fxpipe.compile(model, ["cpu"] * 2, microbatches=2, loss=loss) as pipe:
        found = pipe.step(x, **given)
    expected = loop.train(alone, 2, x, loss=loss or (lambda found: found.loss), **given)
    assert torch.equal(found, expected.loss)
    loop.assert_same(loop.gradients(model), loop.gradients(alone))


@pytest.mark.parametrize("training", [True, False])
def test_a_call_gives_the_models_own_object_for_the_whole_batch(training: bool) -> None:
    torch.manual_seed(0)
    model = Returns().train(training)
    x = torch.randn(5, 4)
    parts = [copy.deepcopy(model)(part) for part in x.tensor_split(2)]
    with fxpipe.compile(model, ["cpu"] * 2, microbatches=2) as pipe:
        found = pipe(x)
    assert type(found) is Found
    assert type(found.cache) is Cache
    assert (found.loss, found.cache.name, found.cache.layers[0].value) == (None, "kept", None)
    assert torch.equal(found.scores, torch.cat([part.scores for part in parts]))
    for index in range(2):
        keys = [part.cache.layers[index].key for part in parts]
        assert torch.equal(found.cache.layers[index].key, torch.cat(keys))
