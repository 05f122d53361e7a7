"""A joint graph is split into two that together compute what it does."""

from __future__ import annotations

import operator
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from fxpipe.passes.differentiate.split_joint import split_joint


def joint(function: Any, *examples: Tensor) -> fx.Graph:
    graph: fx.Graph = make_fx(function, tracing_mode="fake")(*examples).graph
    return graph


def layer(x: Tensor, w: Tensor, g: Tensor) -> tuple[Tensor, ...]:
    """``tanh(x w)`` and the gradients of x and w."""
    a = torch.tanh(x @ w)
    back = g * (1 - a * a)
    return a, back @ w.t(), x.t() @ back


def split(functional: bool = False) -> tuple[Any, Any, Any]:
    x, w, g = torch.randn(2, 3), torch.randn(3, 4), torch.randn(2, 4)
    return split_joint(joint(layer, x, w, g), 5, ["x", "w", "g"], 2, 1, [w], functional)


def test_forward_and_backward_compute_what_the_joint_graph_does() -> None:
    forward, backward, _ = split()
    x, w, g = torch.randn(2, 3), torch.randn(3, 4), torch.randn(2, 4)
    a, *saved = forward([x, w])
    expected = layer(x, w, g)
    assert torch.equal(a, expected[0])
    of_x, of_w = backward([*saved, g, None])
    torch.testing.assert_close((of_x, of_w), expected[1:])
    _, *saved = forward([x, w])
    total = torch.ones(3, 4)
    again = backward([*saved, g, total])[1]
    assert again is total  # the gradient is added in its place
    torch.testing.assert_close(total, expected[2] + 1)


def test_the_backward_computes_nothing_that_the_forward_has_computed() -> None:
    forward, backward, _ = split()
    tanh = torch.ops.aten.tanh.default, torch.ops.aten.tanh_.default
    assert any(node.target in tanh for node in forward.graph.nodes)
    assert not any(node.target in tanh for node in backward.graph.nodes)
    assert forward._get_name() == "Stage5Forward" and backward._get_name() == "Stage5Backward"


def test_a_functional_backward_writes_nothing() -> None:
    *_, functional = split(functional=True)
    assert functional is not None
    for node in functional.nodes:
        schema = getattr(node.target, "_schema", None)
        assert schema is None or not schema.is_mutable


def test_without_gradients_there_is_a_forward_alone() -> None:
    graph = joint(lambda x, w: (x @ w,), torch.randn(2, 3), torch.randn(3, 4))
    forward, backward, functional = split_joint(graph, 0, ["x", "w"], 2, 1, [], False)
    assert backward is None and functional is None
    x, w = torch.randn(2, 3), torch.randn(3, 4)
    assert torch.equal(forward([x, w])[0], x @ w)


@pytest.mark.parametrize(
    ("size", "dtype"), [(8, torch.int8), (16, torch.int16), (300, torch.int32)]
)
def test_places_of_maxima_are_saved_in_as_few_bytes_as_they_need(
    size: int, dtype: torch.dtype
) -> None:
    aten = torch.ops.aten

    def pooled(x: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
        a, places = aten.max_pool2d_with_indices.default(x, [2, 2], [2, 2])
        back = aten.max_pool2d_with_indices_backward.default
        return a, back(g, x, [2, 2], [2, 2], [0, 0], [1, 1], False, places)

    x, g = torch.randn(1, 1, size, size), torch.randn(1, 1, size // 2, size // 2)
    forward, backward, _ = split_joint(joint(pooled, x, g), 0, ["x", "g"], 1, 1, [], False)
    assert backward is not None
    a, *saved = forward([x])
    kinds = {each.dtype for each in saved}
    assert dtype in kinds and torch.int64 not in kinds
    for one, there in zip((a, *backward([*saved, g])), pooled(x, g), strict=True):
        assert torch.equal(one, there)


def test_two_gradients_of_parameters_never_share_memory() -> None:
    def shared(x: Tensor, v: Tensor, w: Tensor, g: Tensor) -> tuple[Tensor, ...]:
        return x + v + w, g.view(-1).view(3), g.view(3)

    examples = [torch.randn(3) for _ in range(4)]
    graph = joint(shared, *examples)
    names = ["x", "v", "w", "g"]
    forward, backward, _ = split_joint(graph, 0, names, 3, 1, examples[1:3], False)
    assert backward is not None
    g = torch.randn(3)
    _, *saved = forward(examples[:3])
    one, other = backward([*saved, g, None, None])
    assert torch.equal(one, g) and torch.equal(other, g)
    assert len({x.data_ptr() for x in (one, other, g)}) == 3


def test_a_part_that_nothing_reads_is_in_neither_graph() -> None:
    x, w, g = torch.randn(2, 3), torch.randn(3, 4), torch.randn(2, 4)
    graph = joint(lambda x, w, g: layer(x.sort().values, w, g), x, w, g)
    _, places = graph.find_nodes(op="call_function", target=operator.getitem)
    with graph.inserting_after(places):
        graph.call_function(torch.ops.aten.neg.default, (places,))
    forward, backward, _ = split_joint(graph, 5, ["x", "w", "g"], 2, 1, [w], False)
    assert backward is not None
    nodes = [node for module in (forward, backward) for node in module.graph.nodes]
    assert [node.args[1] for node in nodes if node.target is operator.getitem] == [0]
    assert not [node for node in nodes if node.target is torch.ops.aten.neg.default]
    a, *saved = forward([x, w])
    expected = layer(x.sort().values, w, g)
    assert torch.equal(a, expected[0])
    torch.testing.assert_close(tuple(backward([*saved, g, None])), expected[1:])
