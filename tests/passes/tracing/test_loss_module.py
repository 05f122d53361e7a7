"""The loss as a module, and the loss in what a model returns."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils import _pytree as pytree

from fxpipe.errors import InputError
from fxpipe.passes.tracing.loss_graph import graph_of_loss
from fxpipe.passes.tracing.loss_module import LossModule, in_loss, own_loss

OUTPUT = {"y": torch.randn(3, 2), "rest": [torch.ones(2)]}
LEAVES, SPEC = pytree.tree_flatten(OUTPUT)
TARGET = torch.randn(3, 2)


def module(function: Any, logged: tuple[str, ...] = ()) -> LossModule:
    def both(output: Any, *targets: Any) -> Any:
        made = function(output, *targets)
        return made if isinstance(made, tuple) else (made, {})

    return LossModule(both, function, SPEC, logged)


def mse(output: Any, target: Tensor) -> Any:
    return F.mse_loss(output["y"], target) + output["rest"][0].sum()


def test_it_takes_the_output_as_flat_tensors() -> None:
    assert torch.equal(module(mse)(*LEAVES, TARGET), mse(OUTPUT, TARGET))


def test_numbers_beside_it_are_returned_in_the_order_of_the_first_call() -> None:
    def loss(output: Any, target: Tensor) -> Any:
        return mse(output, target), {"b": torch.tensor(2.0), "a": torch.tensor(1.0)}

    made = module(loss, ("a", "b"))(*LEAVES, TARGET)
    assert [float(x) for x in made[1:]] == [1, 2]
    with pytest.raises(InputError, match="called 'b', 'a', and for the first micro-batch 'c'"):
        module(loss, ("c",))(*LEAVES, TARGET)


def test_an_error_of_the_loss_is_known_to_be_its_own() -> None:
    def fails(output: Any, target: Tensor) -> Tensor:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError) as raised:
        module(fails)(*LEAVES, TARGET)
    assert in_loss(raised.value)
    with pytest.raises(ZeroDivisionError) as raised:
        fails(OUTPUT, TARGET)
    assert not in_loss(raised.value) and not in_loss(None)


def test_the_loss_in_an_output_is_found() -> None:
    loss, other = torch.tensor(1.0), torch.ones(2)
    for output in (loss, {"loss": loss, "y": other}, SimpleNamespace(loss=loss, y=other)):
        assert own_loss(output) is loss
    assert own_loss({"y": other}) == {"y": other}


def test_the_graph_of_a_loss_has_whole_operations_and_names_its_targets() -> None:
    def loss(output: Any, targets: Any) -> Any:
        return F.cross_entropy(output["y"], targets["t"]) + output["rest"][0].sum()

    targets, spec = pytree.tree_flatten(({"t": torch.tensor([0, 1, 0]), "scale": 5},))
    names = [f"target_{index}" for index in range(len(targets))]
    graph, of = graph_of_loss(module(loss), LEAVES, targets, spec, names)
    operations = [node.target for node in graph.graph.nodes if node.op == "call_function"]
    assert torch.ops.aten.cross_entropy_loss.default in operations
    assert of.count(None) == len(LEAVES)
    place = [isinstance(x, Tensor) for x in targets].index(True)
    assert [name for name in of if name is not None] == [names[place]]
