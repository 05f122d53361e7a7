"""Cuts at named submodules: where a stage begins, and which names are refused."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn

from fxpipe.errors import PartitionError
from fxpipe.passes.partition.assignment import in_order
from fxpipe.passes.partition.balance import cut_at
from tests.helpers.fronted import front_end


class Nested(nn.Module):
    """``first`` runs before ``inner``, ``idle`` never."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.inner = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
        self.idle = nn.Linear(4, 4)
        self.last = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.last(self.inner(self.first(x)) + x)
        return y


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["iner"], "no submodule 'iner': did you mean 'inner'"),
        (["idle"], "submodule 'idle' computes nothing"),
        (["inner", "last"], "names 2 cuts, which make 3 stages, for 2 devices; name 1"),
        ([], "names 0 cuts, which make 1 stages, for 2 devices; name 1"),
        (["first"], "no stage can begin at 'first': nothing runs before it"),
    ],
)
def test_wrong_names_are_refused_with_a_cure(names: Sequence[str], message: str) -> None:
    model = Nested()
    with pytest.raises(PartitionError, match=message):
        cut_at(front_end(model, torch.randn(3, 4)), 2, names, model)


def test_names_out_of_order_are_refused() -> None:
    model = Nested()
    traced = front_end(model, torch.randn(3, 4))
    for names in (["last", "inner"], ["inner.2", "inner"]):
        with pytest.raises(PartitionError, match=r"run backward.*in the order in which they run"):
            cut_at(traced, 3, names, model)
    with pytest.raises(PartitionError, match=r"would be empty.*in the order"):
        cut_at(traced, 3, ["last", "last"], model)


@pytest.mark.parametrize("name", ["inner", "inner.0", "inner.1", "inner.2", "last"])
def test_a_stage_begins_where_its_submodule_does(name: str) -> None:
    model = Nested()
    traced = front_end(model, torch.randn(3, 4))
    assignment = cut_at(traced, 2, [name], model)
    first = next(
        node
        for node in in_order(traced)
        if any(
            path == name or path.startswith(name + ".")
            for path, _ in (node.meta.get("nn_module_stack") or {}).values()
        )
    )
    before = list(itertools.takewhile(lambda node: node is not first, in_order(traced)))
    assert {node.name for node in before} == {n for n, s in assignment.nodes.items() if s == 0}


class Given(nn.Module):
    """Multiplies by a weight that is made elsewhere."""

    def forward(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x @ weight)


class Doubled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), Given()
        self.weight = nn.Parameter(torch.randn(4, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.weight * 2
        out: torch.Tensor = self.second(self.first(x), weight)
        return out


def test_a_stage_can_begin_where_a_weight_that_is_made_elsewhere_is_first_used() -> None:
    model = Doubled()
    traced = front_end(model, torch.randn(3, 4))
    found = cut_at(traced, 2, ["second"], model)
    weight = next(n for n in traced.graph.nodes if n.target is torch.ops.aten.mul.Tensor)
    assert [found.nodes[node.name] for node in (weight, *weight.users)] == [1, 1]
    assert 0 in found.nodes.values()
