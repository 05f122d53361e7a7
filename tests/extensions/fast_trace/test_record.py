"""Recording a function gives the graph that ``make_fx`` gives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F

from fxpipe.extensions.fast_trace.record import GraphRecorder
from fxpipe.passes.differentiate.joint import NotRecorded


def _lines(graph: fx.Graph) -> list[Any]:
    """The graph with its nodes counted, without what nobody reads, or gives on what it is given."""
    for same in (torch.ops.aten.detach.default, torch.ops.aten.alias.default):
        for node in graph.find_nodes(op="call_function", target=same):
            node.replace_all_uses_with(node.args[0])
    graph.eliminate_dead_code()
    place = {node: f"%{index}" for index, node in enumerate(graph.nodes)}
    return [
        (
            node.op,
            node.target if node.op == "call_function" else "",
            *fx.map_arg((list(node.args), dict(node.kwargs)), lambda n: place[n]),
        )
        for node in graph.nodes
    ]


def _fake() -> list[Tensor]:
    with FakeTensorMode():
        return [torch.empty(3, 4).requires_grad_(), torch.empty(4, 4).requires_grad_()]


def _recorded(function: Callable[..., Tensor], arguments: list[Tensor]) -> fx.Graph:
    def both(flat: list[Tensor]) -> list[Tensor]:
        y = function(*flat)
        return [y, *torch.autograd.grad(y.sum(), flat)]

    recorder = GraphRecorder()
    given = recorder.place(arguments)
    with recorder:
        returned = both(given)
    return recorder.finish(returned)


def _product(x: Tensor, w: Tensor) -> Tensor:
    return F.silu(F.gelu(x @ w)) * 2 + x


def _attention(x: Tensor, w: Tensor) -> Tensor:
    q, k = (x @ w).view(1, 1, 3, 4), x.view(1, 1, 3, 4)
    return F.scaled_dot_product_attention(q, k, k, is_causal=True)


def _normalised(x: Tensor, w: Tensor) -> Tensor:
    values, index = F.layer_norm(x, (4,)).topk(2)
    return (values + torch.arange(2) * index) @ w[:2]


def _looked_up(x: Tensor, w: Tensor) -> Tensor:
    return F.cross_entropy(F.embedding(torch.zeros(3, dtype=torch.int64), w) + x, x.argmax(1))


@pytest.mark.parametrize(
    "function", [_product, _attention, _normalised, _looked_up], ids=lambda f: f.__name__
)
def test_forward_and_backward_are_recorded_as_make_fx_traces_them(
    function: Callable[..., Tensor],
) -> None:
    arguments = _fake()

    def both(flat: list[Tensor]) -> list[Tensor]:
        y = function(*flat)
        return [y, *torch.autograd.grad(y.sum(), flat)]

    with arguments[0].fake_mode:  # type: ignore[attr-defined]
        mine = _recorded(function, arguments)
        theirs = make_fx(both)(arguments).graph
    assert _lines(mine)[:-1] == _lines(theirs)[:-1]
    assert len(_lines(mine)) > 8


def test_what_is_written_in_place_is_the_result_of_the_functional_variant() -> None:
    def filled(x: Tensor, w: Tensor) -> Tensor:
        mask = torch.zeros(3, 4)
        mask.fill_(2)
        return mask.mul_(x.detach()) + mask * (x @ w)

    arguments = _fake()
    with arguments[0].fake_mode:  # type: ignore[attr-defined]
        graph = _recorded(filled, arguments)
    x, w = torch.randn(3, 4, requires_grad=True), torch.randn(4, 4, requires_grad=True)
    y = filled(x, w)
    expected = [y, *torch.autograd.grad(y.sum(), [x, w])]
    assert not any(
        getattr(n.target, "_schema", None) and n.target._schema.is_mutable for n in graph.nodes
    )
    found = fx.GraphModule({}, graph)(x, w)
    assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("way", ["an argument", "a view", "what has a view"])
def test_memory_that_others_see_is_not_written(way: str) -> None:
    def function(x: Tensor, w: Tensor) -> Tensor:
        y = x.detach() if way == "an argument" else x.detach() * 2
        view = y.view(-1)
        (view if way == "a view" else y).add_(1)
        return y * x @ w

    arguments = _fake()
    with arguments[0].fake_mode, pytest.raises(NotRecorded):  # type: ignore[attr-defined]
        _recorded(function, arguments)
