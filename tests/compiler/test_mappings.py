"""Batches that are mappings of other classes than dict are split; what hides tensors is refused."""

from __future__ import annotations

import copy
from collections import UserDict
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.utils import _pytree as pytree

import fxpipe
from fxpipe.torchtools.pytrees import flatten
from tests.oracles import loop

pytestmark = pytest.mark.traces


class Encoding(UserDict[str, Any]):
    """As tokenizers give it: its entries are attributes, too, and it has others of its own."""

    def __init__(self, data: dict[str, Any], source: str = "") -> None:
        super().__init__(data)
        self.source = source

    def __getattr__(self, name: str) -> Any:
        try:
            return vars(self)["data"][name]
        except KeyError:
            raise AttributeError(name) from None


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 6), nn.Linear(6, 3)

    def forward(self, batch: Any) -> Tensor:
        h = torch.tanh(self.first(batch["x"])) * batch["mask"]
        made: Tensor = self.last(h * 2 if getattr(batch, "source", "") == "second" else h)
        return made


def _loss(output: Tensor, target: Any) -> Tensor:
    return mse_loss(output, target["y"])


@pytest.mark.parametrize("kind", [UserDict, Encoding])
def test_a_mapping_trains_as_a_dict_does(kind: Any) -> None:
    torch.manual_seed(0)
    model = Net()
    alone = copy.deepcopy(model)
    x, mask, y = torch.randn(6, 4), torch.rand(6, 1), torch.randn(6, 3)
    with fxpipe.compile(
        model, ["cpu", "cpu"], partition=["last"], microbatches=3, loss=_loss
    ) as pipe:
        for source in ("first", "second", "first"):
            given = {"source": source} if kind is Encoding else {}
            loop.clear(model, alone)
            made = pipe.step(kind({"x": x, "mask": mask}, **given), target=kind({"y": y}))
            losses = []
            for rows in torch.arange(6).tensor_split(3):
                part = kind({"x": x[rows], "mask": mask[rows]}, **given)
                losses.append(_loss(alone(part), {"y": y[rows]}) / 3)
                losses[-1].backward()
            assert torch.equal(made, torch.stack(losses).detach().sum())
            loop.assert_same(loop.gradients(model), loop.gradients(alone))


class Cache:
    """Holds tensors of each sample where nothing can split them."""

    def __init__(self) -> None:
        self.layers = [(torch.randn(6, 2), torch.randn(6, 2))]


@pytest.mark.parametrize("in_target", [False, True])
def test_an_object_that_hides_tensors_is_refused_by_name(in_target: bool) -> None:
    x, y = torch.randn(6, 4), torch.randn(6, 3)
    batch: dict[str, Any] = {"x": x, "mask": torch.ones(6, 1)}
    target: dict[str, Any] = {"y": y}
    (target if in_target else batch)["past"] = Cache()
    with (
        fxpipe.compile(Net(), ["cpu"], microbatches=2, loss=_loss) as pipe,
        pytest.raises(fxpipe.InputError, match=r"has a Cache, which holds tensors \(layers\)"),
    ):
        pipe.step(batch, target=target)


def test_a_mapping_over_others_keeps_its_own_attributes() -> None:
    given = Encoding({"x": torch.ones(2)}, source="here")
    leaves, spec = flatten(given)
    made = pytree.tree_unflatten(leaves, spec)
    assert type(made) is Encoding and made.source == "here" and made.x is given.x
