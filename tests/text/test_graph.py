"""Graphs as text: a line of Python for each node."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

import fxpipe.random
from fxpipe.text.plan import print_function, print_graph, print_value
from tests.helpers.written import graph as read


def calls(*args: Any, **kwargs: Any) -> fx.Graph:
    """A graph with one call that has these arguments."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    graph.output((graph.call_function(torch.stack, (x, *args), kwargs),))
    return graph


class Leaf(nn.Module):
    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        return x * scale


class WithLeaves(nn.Module):
    """Leaf modules under plain, numbered and odd names; methods; attributes; a default."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(Leaf(), Leaf())
        self.odd = nn.ModuleDict({"two words": Leaf(), "01": Leaf()})
        self.weight = nn.Parameter(torch.randn(3))
        self.register_buffer("offset", torch.randn(3))

    def forward(self, x: Tensor, input: int = 2) -> Tensor:
        h = self.blocks[1](self.blocks[0](x, scale=0.5)) * self.weight
        for leaf in self.odd.values():
            h = leaf(h)
        h = nn.functional.relu(h - self.offset).view(x.shape[0], -1).sum(dim=-1, keepdim=True)
        return torch.add(h, x, alpha=2) + input


class LeafTracer(fx.Tracer):
    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return isinstance(m, Leaf)


def test_a_path_reads_like_the_models_own_code() -> None:
    text = print_graph(LeafTracer().trace(WithLeaves()))
    assert "self.blocks[0](x, scale=0.5)" in text
    assert "self.odd['two words'](" in text
    assert "self.odd['01'](" in text
    assert "weight = self.weight\n" in text


def test_the_printed_form_is_the_documented_one() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    far = graph.placeholder("far")
    conv = graph.call_function(torch.ops.aten.conv2d.default, (x, far, None, [1, 1]))
    first = graph.call_function(operator.getitem, (conv, 0))
    seeded = graph.call_function(fxpipe.random.native_dropout, (first,), {"train": True})
    graph.output((seeded, first))
    assert print_graph(graph) == "\n".join(
        (
            "x = placeholder()",
            "far = placeholder()",
            "conv2d_default = torch.ops.aten.conv2d.default(x, far, None, [1, 1])",
            "getitem = operator.getitem(conv2d_default, 0)",
            "native_dropout = fxpipe.random.native_dropout(getitem, train=True)",
            "return (native_dropout, getitem)",
        )
    )


def test_placeholders_come_first_wherever_they_stood() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    y = graph.call_function(torch.relu, (x,))
    z = graph.placeholder("z")
    graph.output((y, z))
    assert [line.split()[0] for line in print_graph(graph).split("\n")] == [
        "x",
        "z",
        "relu",
        "return",
    ]


def test_metadata_and_types_mean_nothing() -> None:
    graph = calls(1)
    text = print_graph(graph)
    for node in graph.nodes:
        node.meta["val"] = object()
        node.type = Tensor
    assert print_graph(graph) == text


def test_a_default_and_another_name_of_an_argument_are_printed() -> None:
    graph = fx.Graph()
    graph.placeholder("scale", default_value=-0.0)
    graph.placeholder("*args")
    graph.output(())
    assert print_graph(graph) == (
        "scale = placeholder(default=-0.0)\n_args = placeholder('*args')\nreturn ()"
    )


FUNCTIONS = [
    *(getattr, max, len, torch.relu, torch.einsum, torch.sym_max),
    *(nn.functional.relu, nn.functional.linear, nn.functional.max_pool2d),
    *(nn.functional.scaled_dot_product_attention, operator.floordiv, operator.and_, math.ceil),
    *(fxpipe.random.native_dropout, torch.ops.aten.relu, torch.ops.higher_order.cond),
    *(torch.ops.aten.add.Tensor, torch.ops.aten.__and__.Scalar, torch.ops.fxpipe.uniform),
]


@pytest.mark.parametrize("function", FUNCTIONS, ids=print_function)
def test_a_function_is_called_by_a_name_under_which_python_finds_it(
    function: Callable[..., Any],
) -> None:
    code = f"x = placeholder()\ny = {print_function(function)}(x, 1)\nreturn (y,)"
    module = read(code)
    assert [n.target for n in module.graph.nodes][1] is function
    assert print_graph(module.graph) == code


def test_a_users_own_function_is_named_by_its_module() -> None:
    assert print_function(calls) == f"{__name__}.calls"


@pytest.mark.parametrize(
    "value",
    [
        *(None, True, 3, -0.0, 1e300, math.inf, -math.inf, complex(1, -0.0), "it's", ...),
        *(torch.float32, torch.sparse_coo, torch.channels_last, torch.device("cuda:1")),
        *((1,), (), [(), [1.5]], {"k": [1], (2,): None}, slice(None, 3), range(1, 9, 2)),
    ],
    ids=str,
)
def test_a_constant_is_printed_as_what_python_makes_it_of(value: Any) -> None:
    assert eval(print_value(value), {"torch": torch, "math": math}) == value


def test_a_value_that_is_not_a_number_is_printed_as_such() -> None:
    assert print_value(math.nan) == "math.nan"


def test_an_object_is_printed_without_its_address() -> None:
    assert "0x" not in print_value(object())


def test_nodes_inside_containers_are_printed_by_name() -> None:
    graph = calls()
    x = next(iter(graph.nodes))
    assert print_value([x, (x, {"k": [x]}), slice(x, None, x)]) == (
        "[x, (x, {'k': [x]}), slice(x, None, x)]"
    )
