"""Tracing with leaf modules: what holds several values crosses between stages by its items."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils import _pytree as pytree
from transformers.modeling_outputs import BaseModelOutput

import fxpipe
from tests.extensions.symbolic.test_symbolic import returned, rows, trained_alike, zeros
from tests.oracles import loop


class Thirds(nn.Linear):
    """A leaf that returns a tuple."""

    def forward(self, x: Tensor) -> Any:
        return super().forward(x).chunk(3, -1)


class Splits(nn.Module):
    """Makes something of a tuple, or of a shape, before a cut and reads it behind the cut."""

    def __init__(self, read: Callable[[Any, Any], Any]) -> None:
        super().__init__()
        self.thirds, self.cut, self.read = Thirds(4, 12), nn.Linear(4, 4), read

    def forward(self, x: Tensor) -> Any:
        return self.read(self.cut, self.thirds(x))


def _slice(cut: nn.Module, all: Any) -> Any:
    later = all[1:]
    return cut(later[0]) + later[1]


def _slice_of_a_slice(cut: nn.Module, all: Any) -> Any:
    second, first = all[:2][::-1]
    return cut(all[2] + first) * second


def _whole_slice(cut: nn.Module, all: Any) -> Any:
    later = all[1:]
    return cut(all[0]) + torch.stack(later).sum(0)


def _item_that_is_taken_late(cut: nn.Module, all: Any) -> Any:
    return cut(all[0]) + all[2]


def _slice_of_a_shape(cut: nn.Module, all: Any) -> Any:
    shape = all[0].shape[1:]
    return F.layer_norm(cut(all[0]), shape).view((-1,) + shape)  # noqa: RUF005 (no trace goes through a shape)


@pytest.mark.parametrize(
    "read", [_slice, _slice_of_a_slice, _whole_slice, _item_that_is_taken_late, _slice_of_a_shape]
)
def test_items_of_a_slice_cross_to_a_later_stage(read: Callable[[Any, Any], Any]) -> None:
    torch.manual_seed(0)
    trained_alike(Splits(read), rows, ["cut"], zeros, extensions=[fxpipe.LeafModules(Thirds)])


class Named(Thirds):
    """A leaf that returns a tuple in a dict."""

    def forward(self, x: Tensor) -> Any:
        first, *rest = super().forward(x)
        return {"first": first, "rest": tuple(rest)}


class Reads(nn.Module):
    """What a function makes of the dict, some of it behind a cut."""

    def __init__(self, read: Callable[[Any, Any], Any]) -> None:
        super().__init__()
        self.named, self.cut, self.read = Named(4, 12), nn.Linear(4, 4), read

    def forward(self, x: Tensor) -> Any:
        return self.read(self.cut, self.named(x))


def test_items_of_a_tuple_in_a_dict_cross_to_a_later_stage() -> None:
    torch.manual_seed(0)
    model = Reads(lambda cut, all: cut(all["first"]) + all["rest"][1])
    trained_alike(model, rows, ["cut"], zeros, extensions=[fxpipe.LeafModules(Named)])


@pytest.mark.parametrize(
    "read",
    [
        lambda cut, all: (cut(all["first"]), all),
        lambda cut, all: [cut(all["rest"][0]), all["rest"]],
        lambda cut, all: (cut(all["first"]), torch.max(all["rest"][1], 1)),
    ],
)
def test_outputs_may_hold_several_values_that_one_call_returns(read: Any) -> None:
    torch.manual_seed(0)
    model, x = Reads(read), rows(4)
    alone = copy.deepcopy(model)

    def loss(output: Any) -> Any:
        return output[0].square().mean()

    options: Any = {
        "partition": ["cut"],
        "extensions": [fxpipe.LeafModules(Named), fxpipe.Symbolic()],
    }
    with fxpipe.compile(model, 2, microbatches=2, loss=loss, **options) as pipe:
        _, found = pipe.step(x, return_output=True)
    loop.train(alone, 2, x, loss=loss)
    loop.assert_same(loop.gradients(model), loop.gradients(alone))
    leaves, spec = pytree.tree_flatten(found)
    wanted = [pytree.tree_flatten(alone(part)) for part in x.chunk(2)]
    assert spec == wanted[0][1]
    for leaf, *parts in zip(leaves, *(one[0] for one in wanted), strict=True):
        assert torch.equal(leaf, torch.cat(parts))


def _ordered(y: Tensor, h: Tensor, x: Tensor) -> Any:
    return OrderedDict(last=y, seen=(h, x))


def _of_transformers(y: Tensor, h: Tensor, x: Tensor) -> Any:
    return BaseModelOutput(last_hidden_state=y, hidden_states=(h, x))


@pytest.mark.parametrize("made", [_ordered, _of_transformers])
def test_dicts_of_other_classes_are_returned_as_by_the_model(made: Callable[..., Any]) -> None:
    def loss(output: Any) -> Any:
        return next(iter(output.values())).square().mean()

    found, wanted = returned(made, loss, rows(4))
    assert type(found) is type(wanted[0]) and list(found) == list(wanted[0])
    last = [next(iter(output.values())) for output in wanted]
    assert torch.equal(next(iter(found.values())), torch.cat(last))
