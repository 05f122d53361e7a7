"""Graphs as text: what is printed is read back, the same and computing the same."""

from __future__ import annotations

import copy
import math
import operator
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, fx, nn

import fxpipe.random
from fxpipe.errors import InputError, ParseError
from fxpipe.ir.plan import pop, stash
from fxpipe.text.graph import parse_graph, print_graph
from fxpipe.text.target import BARE, print_function
from tests.helpers.exported import cases, export

CASES = cases()


def calls(*args: Any, **kwargs: Any) -> fx.Graph:
    """A graph with one call that has these arguments."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    graph.output((graph.call_function(torch.stack, (x, *args), kwargs),))
    return graph


def call_of(module: fx.GraphModule) -> fx.Node:
    call: fx.Node = next(node for node in module.graph.nodes if node.op.startswith("call_"))
    return call


def round_trip(graph: fx.Graph, root: nn.Module | None = None) -> fx.GraphModule:
    text = print_graph(graph)
    module = parse_graph(text, root)
    assert print_graph(module.graph) == text
    module.graph.lint()
    return module


def same(a: Any, b: Any) -> bool:
    """Whether two arguments are equal in type and to the bit, whatever kind of sequence fx uses."""
    if isinstance(a, (list, tuple)):
        kind = list if isinstance(a, list) else tuple
        return isinstance(b, kind) and len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict):
        return isinstance(b, dict) and list(a) == list(b) and all(map(same, a.values(), b.values()))
    if isinstance(a, slice):
        return isinstance(b, slice) and same((a.start, a.stop, a.step), (b.start, b.stop, b.step))
    if isinstance(a, float):
        alike = isinstance(b, float) and math.copysign(1, a) == math.copysign(1, b) and a == b
        return alike or (math.isnan(a) and isinstance(b, float) and math.isnan(b))
    if isinstance(a, complex):
        return isinstance(b, complex) and same((a.real, a.imag), (b.real, b.imag))
    return type(a) is type(b) and bool(a == b)


# What is printed


@pytest.mark.models
@pytest.mark.parametrize("name", CASES)
def test_an_exported_graph_is_read_back_and_computes_the_same(name: str) -> None:
    graph, values = export(CASES[name])
    module = round_trip(graph)
    torch.manual_seed(1)
    expected = fx.GraphModule(nn.Module(), graph)(*copy.deepcopy(values))
    torch.manual_seed(1)
    found = module(*copy.deepcopy(values))
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


@pytest.mark.models
def test_node_names_targets_and_arguments_are_kept() -> None:
    graph, _ = export(CASES["u-net"])
    module = round_trip(graph)
    for old, new in zip(graph.nodes, module.graph.nodes, strict=True):
        assert (old.op, old.name) == (new.op, new.name)
        assert old.target is new.target or old.target == new.target
        assert str(old.args) == str(new.args)
        assert str(old.kwargs) == str(new.kwargs)


@pytest.mark.models
def test_a_dynamic_batch_shows_its_size_as_a_node() -> None:
    assert "torch.ops.aten.sym_size.int(index, 0)" in print_graph(export(CASES["slices"]).graph)


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


def test_a_symbolic_trace_with_leaf_modules_is_read_back_and_computes_the_same() -> None:
    model = WithLeaves()
    graph = LeafTracer().trace(model)
    module = round_trip(graph, model)
    x = torch.randn(4, 3)
    assert torch.equal(module(x), model(x))
    assert torch.equal(module(x=x, input=5), model(x, input=5))
    assert module.get_parameter("weight") is model.weight


def test_a_path_reads_like_the_models_own_code() -> None:
    text = print_graph(LeafTracer().trace(WithLeaves()))
    assert "self.blocks[0](x, scale=0.5)" in text
    assert "self.odd['two words'](" in text
    assert "self.odd['01'](" in text
    assert "weight = self.weight\n" in text


def test_the_printed_form_is_the_documented_one() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    far = graph.create_node("call_function", pop, ("far",), name="far")
    conv = graph.call_function(torch.ops.aten.conv2d.default, (x, far, None, [1, 1]))
    first = graph.call_function(operator.getitem, (conv, 0))
    graph.call_function(stash, ("getitem", first))
    seeded = graph.call_function(fxpipe.random.rrelu, (first,), {"training": True})
    graph.output((seeded, first))
    assert print_graph(graph) == "\n".join(
        (
            "x = placeholder()",
            "far = pop('far')",
            "conv2d_default = torch.ops.aten.conv2d.default(x, far, None, [1, 1])",
            "getitem = operator.getitem(conv2d_default, 0)",
            "stash = stash('getitem', getitem)",
            "rrelu = fxpipe.random.rrelu(getitem, training=True)",
            "return (rrelu, getitem)",
        )
    )
    round_trip(graph)


def test_a_node_may_be_named_as_a_builtin_or_as_the_root_of_a_path() -> None:
    graph = fx.Graph()
    nodes = [graph.placeholder(name) for name in ("a", "b", "c", "d", "e")]
    names = ("input", "operator", "self", "math", "inf")
    for node, name in zip(nodes, names, strict=True):
        node.name = node.target = name
    nodes[2].target = "own"
    views = [graph.call_method("add", (node, math.inf)) for node in nodes]
    graph.output(tuple(views))
    module = round_trip(graph)
    assert tuple(node.name for node in module.graph.nodes)[:5] == names
    assert all(node.args[1] == math.inf for node in module.graph.nodes if node.op == "call_method")


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
    round_trip(graph)


def test_variadic_and_defaulted_arguments_are_kept() -> None:
    text = (
        "x = placeholder()\n"
        "k = placeholder('scale', default=-0.0)\n"
        "args = placeholder('*args')\n"
        "kwargs = placeholder('**kwargs')\n"
        "return (x, k, args, kwargs)"
    )
    module = parse_graph(text, None)
    assert print_graph(module.graph) == text
    assert module(1, 2, 3, four=4) == (1, 2, (3,), {"four": 4})
    assert str(module(1)[1]) == "-0.0"


def test_metadata_and_types_mean_nothing() -> None:
    graph = calls(1)
    text = print_graph(graph)
    for node in graph.nodes:
        node.meta["val"] = object()
        node.type = Tensor
    assert print_graph(graph) == text


def test_a_users_own_function_is_shown_but_not_read_back() -> None:
    graph = fx.Graph()
    graph.output((graph.call_function(round_trip, (graph.placeholder("x"),)),))
    text = print_graph(graph)
    assert f"function('{__name__}.round_trip')(x)" in text
    with pytest.raises(ParseError, match="functions of torch, operator, math, fxpipe") as caught:
        parse_graph(text, None)
    assert (caught.value.line, caught.value.column) == (2, 14)


@pytest.mark.parametrize("value", [object(), torch.zeros(1), {1, 2}, b"bytes", sys])
def test_an_argument_without_text_names_its_node(value: object) -> None:
    graph = calls()
    call = next(node for node in graph.nodes if node.op == "call_function")
    call.kwargs = {"other": value}
    with pytest.raises(InputError, match=r"node 'stack': an argument of type \w+ has no text"):
        print_graph(graph)


@pytest.mark.parametrize(
    "function",
    [
        *BARE.values(),
        *(torch.relu, torch.einsum, torch.sym_max, nn.functional.relu, nn.functional.linear),
        *(nn.functional.max_pool2d, nn.functional.scaled_dot_product_attention, torch.linalg.norm),
        *(torch.fft.fft, torch.special.erf, operator.floordiv, operator.and_, math.ceil),
        *(fxpipe.random.native_dropout, torch.ops.aten.relu, torch.ops.higher_order.cond),
        *(torch.ops.aten.add.Tensor, torch.ops.aten.__and__.Scalar, torch.ops.fxpipe.uniform),
    ],
    ids=print_function,
)
def test_a_function_is_found_by_its_name(function: Callable[..., Any]) -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    graph.output((graph.call_function(function, (x, "T" if function is getattr else 1)),))
    assert call_of(round_trip(graph)).target is function


def test_what_the_caller_lists_is_read_too() -> None:
    with torch.library._scoped_library("tests_text", "DEF") as library:
        library.define("twice(Tensor x) -> Tensor")
        library.impl("twice", lambda x: 2 * x, "CompositeExplicitAutograd")
        packet = torch.ops.tests_text.twice
        graph = fx.Graph()
        x = graph.placeholder("x")
        graph.output((graph.call_function(tripled, (graph.call_function(packet.default, (x,)),)),))
        text = print_graph(graph)
        for known in ((), (tripled,), (packet.default,)):
            with pytest.raises(ParseError, match=r"Plan\.parse\(.*functions=\[\.\.\.\]\)"):
                parse_graph(text, None, known)
        for operator in (packet, packet.default):
            module = parse_graph(text, None, (tripled, operator))
            assert print_graph(module.graph) == text
            assert module(torch.ones(1)) == (6,)
    with pytest.raises(InputError, match=r"functions holds 'torch\.load'; list functions"):
        parse_graph(text, None, ["torch.load"])  # type: ignore[list-item]


def tripled(x: Tensor) -> Tensor:
    return 3 * x


# Arguments

floats = st.floats(allow_nan=True, allow_infinity=True)
scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    floats,
    st.builds(complex, floats, floats),
    st.text(),
    st.sampled_from([torch.float32, torch.bfloat16, torch.bool, torch.complex64]),
    st.sampled_from([torch.strided, torch.sparse_coo]),
    st.sampled_from([torch.channels_last, torch.preserve_format]),
    st.sampled_from([torch.device("cpu"), torch.device("cuda:1"), torch.device("meta")]),
    st.just(...),
    st.builds(range, st.integers(0, 9), st.integers(), st.integers(1, 9)),
)
keys = st.one_of(st.text(), st.integers(), st.booleans(), st.tuples(st.integers(), st.text()))
names = st.from_regex("arg_[a-z]{1,5}", fullmatch=True)
arguments = st.recursive(
    scalars,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.dictionaries(keys, inner, max_size=3),
        st.builds(slice, inner, inner, inner),
    ),
    max_leaves=12,
)


@given(st.lists(arguments, max_size=3), st.dictionaries(names, arguments))
def test_any_argument_is_read_back_equal(args: list[Any], kwargs: dict[str, Any]) -> None:
    call = call_of(round_trip(calls(*args, **kwargs)))
    assert same(tuple(args), call.args[1:])
    assert same(kwargs, dict(call.kwargs))


def test_nodes_inside_containers_are_read_back() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    nested = graph.call_function(torch.stack, ([x, (x, {"k": [x]})], slice(x, None, x)), {"k": x})
    graph.output({"out": [nested]})
    module = round_trip(graph)
    assert len(call_of(module).all_input_nodes) == 1
    assert str(call_of(module).args) == "([x, (x, {'k': [x]})], slice(x, None, x))"
