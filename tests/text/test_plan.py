"""Plans as text: all that they hold is printed; edges are also read back."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import nn

from fxpipe.errors import InputError, ParseError
from fxpipe.ir.plan import Argument, Plan, StageCosts, ValueSpec, Write
from fxpipe.ir.program import Program
from fxpipe.ir.schedule import Schedule
from fxpipe.ir.value import Edge
from fxpipe.text.program import read_edge
from fxpipe.text.scan import Line
from tests.helpers import written

TEXT = """\
plan stages=3
edge in x host->0
edge act relu 0->1
edge skip relu 0->2
edge act add 1->2
edge out linear 2->host
edge grad relu 1->0
edge grad relu 2->0
edge grad add 2->1
edge grad linear host->2
stage 0
  stash relu -> 2
  parameter p_conv_weight = conv.weight
  buffer b_bn_mean = bn.running_mean
  write bn.running_mean = getitem_3
  graph
    p_conv_weight = placeholder()
    b_bn_mean = placeholder()
    x = placeholder()
    conv2d = torch.ops.aten.conv2d.default(x, p_conv_weight)
    relu = torch.ops.aten.relu.default(conv2d)
    getitem_3 = torch.ops.aten.mul.Tensor(b_bn_mean, 0.9)
    return (relu, getitem_3)
stage 1
  graph
    relu = placeholder()
    add = torch.ops.aten.add.Tensor(relu, 1)
    return (add,)
stage 2
  pop relu <- 0
  parameter p_0 = 'my module.weight'
  graph
    p_0 = placeholder()
    add = placeholder()
    relu = placeholder()
    mul = torch.ops.aten.mul.Tensor(add, relu)
    block = self.head[0](mul)
    linear = torch.ops.aten.linear.default(block, p_0)
    return (linear,)
"""
ROOT = nn.Module()
ROOT.head = nn.Sequential(nn.ReLU())


def test_a_plan_is_printed_with_all_that_it_holds() -> None:
    plan = written.plan(TEXT, ROOT)
    assert plan.edges[2] == Edge(0, 2, "relu")
    assert Edge(0, 2, "relu").back in plan.gradients
    assert plan.stages[0].parameters == (Argument("p_conv_weight", "conv.weight"),)
    assert plan.stages[0].buffers == (Argument("b_bn_mean", "bn.running_mean"),)
    assert plan.stages[0].writes == (Write("bn.running_mean", "getitem_3"),)
    assert plan.stages[2].parameters == (Argument("p_0", "my module.weight"),)
    assert str(plan) == TEXT


def test_plans_are_equal_where_their_texts_are() -> None:
    plan = written.plan(TEXT, ROOT)
    assert written.plan(TEXT, ROOT) == plan
    assert hash(written.plan(TEXT, ROOT).stages) == hash(plan.stages)
    for old, new in (
        ("edge grad add 2->1\n", ""),
        ("add.Tensor(relu, 1)", "add.Tensor(relu, 2)"),
        ("conv.weight", "conv.bias"),
        ("stage 1\n", "stage 7\n"),
        ("write bn.running_mean", "write bn.running_var"),
    ):
        assert old in TEXT
        assert written.plan(TEXT.replace(old, new), ROOT) != plan


def test_shapes_costs_and_module_names_are_no_part_of_the_text() -> None:
    plan = written.plan(TEXT, ROOT)
    first = dataclasses.replace(plan.stages[0], costs=StageCosts(1, 2), modules=("conv",))
    specs = {"relu": ValueSpec((2, 3), torch.float32)}
    richer = Plan((first, *plan.stages[1:]), plan.edges, plan.gradients, specs)
    assert str(richer) == str(plan)
    assert richer == plan


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
        (" act x 0->1 gradient", 17, "unexpected 'gradient'; remove it"),
        (" act x 0->2", 6, "an edge 0->2 is of kind 'skip', not 'act'"),
        (" out x 0->1", 6, "an edge 0->1 is of kind 'act', not 'out'"),
    ],
)
def test_a_malformed_edge_is_refused_at_its_place(text: str, column: int, message: str) -> None:
    with pytest.raises(ParseError, match=message) as caught:
        read_edge(Line(f"edge{text}", 3))
    assert (caught.value.line, caught.value.column) == (3, column)


@pytest.mark.parametrize("kind", [Schedule, Program])
@pytest.mark.parametrize("text", [None, 1, b"schedule", ["schedule"]])
def test_what_is_no_string_is_refused(kind: Any, text: object) -> None:
    with pytest.raises(InputError, match=f"parse a {type(text).__name__}; give a string"):
        kind.parse(text)
