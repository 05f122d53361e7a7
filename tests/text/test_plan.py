"""Plans as text: what is printed is read back equal, and what is malformed has a place."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import fx, nn

from fxpipe.errors import InputError, ParseError
from fxpipe.ir.plan import Argument, Plan, Stage, StageCosts, ValueSpec, Write
from fxpipe.ir.program import Program
from fxpipe.ir.schedule import Schedule
from fxpipe.ir.value import HOST, Edge
from fxpipe.text.graph import parse_graph
from fxpipe.text.plan import parse_plan, print_plan
from fxpipe.text.program import read_edge
from fxpipe.text.scan import Line
from tests.helpers.plans import skipping

TEXT = """\
plan stages=3
edge in x host->0
edge act relu 0->1 gradient
edge skip relu 0->2 gradient
edge act add 1->2 gradient
edge out linear 2->host gradient
stage 0
  parameter p_conv_weight = conv.weight
  buffer b_bn_mean = bn.running_mean
  write bn.running_mean = getitem_3
  graph
    p_conv_weight = placeholder()
    b_bn_mean = placeholder()
    x = placeholder()
    conv2d = torch.ops.aten.conv2d.default(x, p_conv_weight)
    relu = torch.ops.aten.relu.default(conv2d)
    stash_relu = stash('relu', relu)
    getitem_3 = torch.ops.aten.mul.Tensor(b_bn_mean, 0.9)
    return (relu, getitem_3)
stage 1
  graph
    relu = placeholder()
    add = torch.ops.aten.add.Tensor(relu, 1)
    return (add,)
stage 2 leaves
  parameter p_0 = 'my module.weight'
  graph
    p_0 = placeholder()
    add = placeholder()
    relu = pop('relu')
    mul = torch.ops.aten.mul.Tensor(add, relu)
    block = self.head[0](mul)
    linear = torch.ops.aten.linear.default(block, p_0)
    return (linear,)
"""
ROOT = nn.Module()
ROOT.head = nn.Sequential(nn.ReLU())


def stage(index: int, **fields: object) -> Stage:
    graph = parse_graph("return ()", None)
    return dataclasses.replace(Stage(index, (), (), (), graph), **fields)  # type: ignore[arg-type]


def test_a_plan_is_read_and_printed_as_it_was() -> None:
    plan = parse_plan(TEXT, ROOT)
    assert print_plan(plan) == TEXT
    assert str(plan) == TEXT
    assert Plan.parse(str(plan), ROOT) == plan
    assert hash(Plan.parse(TEXT, ROOT).stages) == hash(plan.stages)


def test_all_that_the_text_says_is_read() -> None:
    plan = parse_plan(TEXT, ROOT)
    assert plan.edges[2] == Edge(0, 2, "relu", gradient=True)
    assert plan.stages[0].parameters == (Argument("p_conv_weight", "conv.weight"),)
    assert plan.stages[0].buffers == (Argument("b_bn_mean", "bn.running_mean"),)
    assert plan.stages[0].writes == (Write("bn.running_mean", "getitem_3"),)
    assert [stage.leaves for stage in plan.stages] == [False, False, True]
    assert plan.stages[2].parameters == (Argument("p_0", "my module.weight"),)
    assert plan.stages[2].graph.get_submodule("head.0") is ROOT.get_submodule("head.0")


def test_what_was_read_differs_where_the_text_differs() -> None:
    plan = parse_plan(TEXT, ROOT)
    for old, new in (
        ("edge act add 1->2 gradient", "edge act add 1->2"),
        ("add.Tensor(relu, 1)", "add.Tensor(relu, 2)"),
        ("conv.weight", "conv.bias"),
        ("stage 2 leaves", "stage 2"),
        ("stage 1\n", "stage 7\n"),
        ("write bn.running_mean", "write bn.running_var"),
    ):
        assert old in TEXT
        assert parse_plan(TEXT.replace(old, new), ROOT) != plan


def test_shapes_costs_and_module_names_are_no_part_of_the_text() -> None:
    plan = parse_plan(TEXT, ROOT)
    first = dataclasses.replace(plan.stages[0], costs=StageCosts(1, 2), modules=("conv",))
    specs = {"relu": ValueSpec((2, 3), torch.float32)}
    richer = Plan((first, *plan.stages[1:]), plan.edges, specs)
    assert str(richer) == str(plan)
    assert richer == plan


@pytest.mark.parametrize("plan", [Plan((), ()), skipping(3), skipping(5)])
def test_plans_made_by_hand_are_read_back_equal(plan: Plan) -> None:
    assert parse_plan(str(plan)) == plan


def test_blank_lines_comments_and_line_ends_mean_nothing() -> None:
    plan = parse_plan(TEXT, ROOT)
    noisy = TEXT.replace("\n", "  # a note\n\n  # another\r\n")
    assert parse_plan(noisy, ROOT) == plan
    assert parse_plan("\n# a plan\n" + TEXT.replace("\n", "\r\n"), ROOT) == plan
    assert parse_plan(TEXT.replace("  ", "\t"), ROOT) == plan


targets = st.one_of(st.from_regex(r"[a-z_]+(\.[a-z0-9_]+)*", fullmatch=True), st.text())
names = st.from_regex(r"[a-z]_[a-z0-9_]{0,5}", fullmatch=True)
ends = st.integers(HOST, 4)


@given(
    st.lists(st.builds(Edge, ends, ends, names, st.booleans())),
    st.lists(st.builds(Argument, names, targets)),
    st.lists(st.builds(Argument, names, targets)),
    st.lists(st.builds(Write, targets, names)),
    st.integers(0, 9),
    st.booleans(),
)
def test_any_plan_is_read_back_equal(
    edges: list[Edge],
    parameters: list[Argument],
    buffers: list[Argument],
    writes: list[Write],
    index: int,
    leaves: bool,
) -> None:
    only = stage(
        index,
        parameters=tuple(parameters),
        buffers=tuple(buffers),
        writes=tuple(writes),
        leaves=leaves,
    )
    plan = Plan((only,), tuple(edges))
    assert parse_plan(print_plan(plan)) == plan


@pytest.mark.parametrize(
    ("text", "column", "message"),
    [
        ("", 5, "expected a blank and an edge such as act x 0->1"),
        (" act x", 11, "expected a blank and more, as in act x 0->1"),
        ("   axt x 0->1", 8, "expected a kind of edge, as in act x 0->1, got 'axt'"),
        (" act 0x 0->1", 10, "'0x' is no name of a value"),
        (" act class 0->1", 10, "'class' is no name of a value"),
        (" act é 0->1", 10, "'é' is no name of a value"),
        (" act x 0-1", 13, "expected '->', as in act x 0->1, got '-1'"),
        (" act x 0->01", 15, "a stage's number or 'host' after '->'"),
        (" act x 0->1x", 15, "a stage's number or 'host' after '->'"),
        (" act x -1->1", 12, "a stage's number or 'host', as in"),
        (" act x 0->99999999999999999999", 15, "a stage's number or 'host' after '->'"),
        (" act x 0->1 gradients", 17, "expected 'gradient' or the end of the line"),
        (" act x 0->1 gradient gradient", 26, "expected the end of the line, got 'gradient'"),
        (" act x 0->2", 6, "an edge 0->2 is of kind 'skip', not 'act'"),
        (" out x 0->1", 6, "an edge 0->1 is of kind 'act', not 'out'"),
    ],
)
def test_a_malformed_edge_is_refused_at_its_place(text: str, column: int, message: str) -> None:
    with pytest.raises(ParseError, match=message) as caught:
        read_edge(Line(f"edge{text}", 3))
    assert (caught.value.line, caught.value.column) == (3, column)


def changed(old: str, new: str) -> str:
    assert TEXT.count(old) == 1
    return TEXT.replace(old, new)


@pytest.mark.parametrize(
    ("text", "line", "column", "message"),
    [
        ("", 1, 1, "a plan starts with 'plan stages=<number>'"),
        ("plan stages=x", 1, 13, "expected a number after 'plan stages=', as in"),
        ("  plan stages=0", 1, 3, "a plan starts with"),
        ("plan stages=2\nstage 0\n  graph\n    return ()", 1, 13, "2 stages by this line, but 1"),
        ("plan stages=1\nstage 0", 2, 8, "stage 0 has no graph"),
        ("plan stages=1\nstage 0\n  graph", 3, 8, "the graph of stage 0 has no lines"),
        ("plan stages=1\nstage 0\n  graph\nstage 1", 3, 8, "the graph of stage 0 has no lines"),
        ("plan stages=1\nstage 0\nstage 1", 3, 1, "stage 0 has no graph above"),
        ("plan stages=0\n  edge in x host->0", 2, 3, "only a stage has indented lines"),
        ("plan stages=0\nfoo", 2, 1, "expected 'edge …' or 'stage <number>'"),
        ("plan stages=0\nstage 0 leave", 2, 9, "expected 'leaves' or the end of the line"),
        (TEXT + "edge in x host->0\n", 35, 1, "expected 'stage <number>'"),
        (TEXT + "    y = torch.relu(1)\n", 35, 5, "nothing may follow the graph's 'return'"),
        (changed("in x host->0", "in x host->1x"), 2, 17, "expected a stage's number or 'host'"),
        (changed("edge act add", "edge  acct add"), 5, 7, "expected a kind of edge, as in"),
        (changed("  parameter p_conv", "  param p_conv"), 8, 3, "a stage has 'parameter name"),
        (changed("= conv.weight", "= conv weight"), 8, 34, "unexpected 'weight'; remove it"),
        (changed("= conv.weight", "= 'conv.weight"), 8, 29, "expected a name of the model"),
        (changed("= conv.weight", r"= '\xg'"), 8, 29, "cannot be read as a string"),
        (changed("p_conv_weight = conv", "class = conv"), 8, 13, "'class' is no name of a value"),
        (changed("mean = getitem_3", "mean = None"), 10, 27, "'None' is no name of a value"),
        (changed("aten.conv2d", "aten.conv2dd"), 15, 29, "did you mean 'conv2d'"),
        (changed("(relu, getitem_3)", "(relu, getitem_4)"), 19, 19, "no line above makes a node"),
        (changed("self.head[0]", "self.head[1]"), 32, 23, "the root has nothing named '1' here"),
    ],
)
def test_what_is_malformed_is_refused_at_its_place(
    text: str, line: int, column: int, message: str
) -> None:
    with pytest.raises(ParseError, match=message) as caught:
        parse_plan(text, ROOT)
    assert (caught.value.line, caught.value.column) == (line, column)


def test_leaf_modules_need_a_root() -> None:
    with pytest.raises(ParseError, match=r"self.head\[0\] needs a root") as caught:
        parse_plan(TEXT)
    assert (caught.value.line, caught.value.column) == (32, 13)


def test_a_plan_from_elsewhere_starts_nothing(tmp_path: Path) -> None:
    path = str(tmp_path / "made")
    for lines in (
        ("f = torch._import_dotted_name('os.system')", f"y = operator.call(f, 'touch {path}')"),
        (f"y = torch.from_file({path!r}, True, 8)",),
        (f"y = torch.ops.aten.from_file.default({path!r}, True, 8)",),
        ("n = x.numpy()", f"y = n.tofile({path!r})"),
        ("n = getattr(x, 'numpy')", "y = operator.neg(n)"),
    ):
        text = (
            "plan stages=1\nedge in x host->0\nedge out y 0->host\nstage 0 leaves\n  graph\n"
            + "".join(f"    {line}\n" for line in ("x = placeholder()", *lines, "return (y,)"))
        )
        with pytest.raises(ParseError, match=r"that a text|is a method"):
            Plan.parse(text).verify().stages[0].graph(torch.ones(2))
    assert list(tmp_path.iterdir()) == []


def test_a_plan_may_call_what_the_caller_lists() -> None:
    graph = fx.Graph()
    y = graph.call_function(torch_free, (graph.placeholder("x"),))
    graph.output((y,))
    only = stage(0, graph=fx.GraphModule(nn.Module(), graph))
    plan = Plan((only,), (Edge(HOST, 0, "x"), Edge(0, HOST, y.name)))
    with pytest.raises(ParseError, match=r"functions=\[\.\.\.\]"):
        Plan.parse(str(plan))
    again = Plan.parse(str(plan), functions=[torch_free])
    assert again == plan
    assert again.verify().stages[0].graph(3) == (4,)


@pytest.mark.parametrize("kind", [Plan, Schedule, Program])
@pytest.mark.parametrize("text", [None, 1, b"plan stages=0", ["plan stages=0"]])
def test_what_is_no_string_is_refused(kind: Any, text: object) -> None:
    with pytest.raises(InputError, match=f"parse a {type(text).__name__}; give a string"):
        kind.parse(text)


def torch_free(x: int) -> int:
    return x + 1


pieces = st.sampled_from([*" \t\n\r\0'\"\\=#.->", "stage ", "graph", "edge", "leaves", "host", "é"])


@given(st.integers(0, len(TEXT)), st.integers(0, 30), st.one_of(st.text(), pieces))
def test_damaged_text_raises_a_parse_error_or_is_read(at: int, cut: int, put: str) -> None:
    text = TEXT[:at] + put + TEXT[at + cut :]
    try:
        plan = parse_plan(text, ROOT)
    except ParseError as error:
        lines = text.split("\n")
        assert 1 <= error.line <= len(lines)
        assert 1 <= error.column <= len(lines[error.line - 1]) + 1
    else:
        assert parse_plan(str(plan), ROOT) == plan


@given(st.permutations(TEXT.splitlines()), st.integers(0, 40))
def test_shuffled_lines_raise_nothing_but_a_parse_error(lines: list[str], count: int) -> None:
    text = "\n".join([*TEXT.splitlines()[: 40 - count], *lines[:count]])
    try:
        plan = parse_plan(text, ROOT)
    except ParseError:
        return
    assert parse_plan(str(plan), ROOT) == plan
