"""The verifier of plans: each way to be wrong is reported, with stage, node and cure."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
import torch
from torch import fx, nn

from fxpipe.errors import VerificationError
from fxpipe.ir.plan import Argument, Plan, Stage, Write
from fxpipe.ir.value import HOST, Edge
from fxpipe.verify.plan import verify_plan
from tests.helpers import written
from tests.helpers.faults import changed, faults_of
from tests.helpers.lines import lines

TEXT = """\
plan stages=3
edge in x host->0
edge act p_tied 0->1
edge skip p_tied 0->2
edge act relu 0->1
edge skip relu 0->2
edge act size 0->1
edge act add 1->2
edge in t host->2
edge out sum_1 2->host
edge out mul 2->host
edge grad x 0->host
edge grad p_tied 1->0
edge grad p_tied 2->0
edge grad relu 1->0
edge grad relu 2->0
edge grad add 2->1
edge grad sum_1 host->2
stage 0
  parameter p_weight = conv.weight
  parameter p_tied = tied.weight
  buffer b_mean = bn.mean
  buffer b_shared = shared
  write bn.mean = mean
  graph
    p_weight = placeholder()
    p_tied = placeholder()
    b_mean = placeholder()
    b_shared = placeholder()
    x = placeholder()
    size = torch.ops.aten.sym_size.int(x, 0)
    conv2d = torch.ops.aten.conv2d.default(x, p_weight)
    max_1 = torch.ops.aten.max.dim(conv2d, 0)
    getitem = operator.getitem(max_1, 0)
    relu = torch.ops.aten.relu.default(getitem)
    mean = torch.ops.aten.mul.Tensor(b_mean, 0.9)
    return (p_tied, relu, size, mean)
stage 1
  buffer b_shared = shared
  graph
    p_tied = placeholder()
    relu = placeholder()
    size = placeholder()
    b_shared = placeholder()
    view = torch.ops.aten.view.default(relu, [size, -1])
    add = torch.ops.aten.addmm.default(b_shared, view, p_tied)
    return (add,)
stage 2
  graph
    add = placeholder()
    t = placeholder()
    p_tied = placeholder()
    relu = placeholder()
    head = torch.ops.aten.relu.default(relu)
    mul = torch.ops.aten.mul.Tensor(head, p_tied)
    sub = torch.ops.aten.sub.Tensor(mul, t)
    sum_1 = torch.ops.aten.sum.default(sub)
    return (sum_1, mul)
"""
ROOT = nn.Module()
ROOT.head = nn.ReLU()


def told(plan: Plan) -> list[str]:
    """The texts of a plan's faults."""
    return [str(fault) for fault in faults_of(plan)]


def valid() -> Plan:
    return written.plan(TEXT, ROOT)


def test_a_valid_plan_is_returned() -> None:
    plan = valid()
    assert verify_plan(plan) is plan
    assert plan.verify() is plan


MUTANTS = [
    ("stage 1\n", "stage 2\n", "stage 2: stands at place 1, but has the index 2"),
    # Edges
    ("0->2\nedge act relu", "0->3\nedge act relu", "stage 3 does not exist"),
    ("act add 1->2", "out add 3->host", "edge out add 3->host: stage 3 does not exist"),
    ("act add 1->2", "skip add 2->1", "edge skip add 2->1: runs backward"),
    ("act add 1->2", "skip add 1->1", "edge skip add 1->1: starts where it ends"),
    ("grad add 2->1", "grad add 1->2", "edge grad add 1->2: runs forward; make the gradient no"),
    ("grad add 2->1", "grad relu 1->0", "edge grad relu 1->0: is there twice"),
    ("edge in t host->2", "edge in t host->host", "edge in t host->host: starts where it ends"),
    ("edge act size 0->1", "edge act relu 0->1", "edge act relu 0->1: is there twice"),
    # Values
    ("edge in t host->2", "edge act relu 1->2", "value relu: comes from stage 0 and stage 1"),
    ("edge in t host->2", "edge in add host->2", "value add: comes from stage 1 and the host"),
    (
        "edge act size 0->1",
        "edge act gone 0->1",
        "stage 0: an edge takes 'gone', which no node makes",
    ),
    # Parameters and buffers
    (
        "  buffer b_shared = shared\n  graph\n    p_tied",
        "  parameter b_shared = tied.weight\n  graph\n    p_tied",
        "parameter tied.weight: is owned by stage 0 and stage 1; let the first stage",
    ),
    ("= conv.weight", "= tied.weight", "parameter tied.weight: is owned by stage 0 2 times"),
    (
        "  graph\n    p_tied = placeholder()\n    relu",
        "  write bn.mean = add\n  graph\n    p_tied = placeholder()\n    relu",
        "buffer bn.mean: is written by stage 0 and stage 1",
    ),
    (
        "  buffer b_shared = shared\n  graph\n    p_tied",
        "  buffer b_shared = bn.mean\n  graph\n    p_tied",
        "buffer bn.mean: is written by stage 0 and read by stage 1",
    ),
    # What a graph takes
    (
        "  parameter p_weight = conv.weight\n",
        "",
        "stage 0: its graph has a superfluous placeholder for 'p_weight'",
    ),
    (
        "  graph\n    p_weight",
        "  buffer b_new = new\n  graph\n    p_weight",
        "stage 0: its graph has no placeholder for 'b_new'; take exactly",
    ),
    (
        "buffer b_shared = shared\n  write",
        "buffer b_mean = shared\n  write",
        "stage 0: reads 2 things named 'b_mean'",
    ),
    ("edge in t host->2\n", "", "stage 2: its graph has a superfluous placeholder for 't'"),
    ("edge act size 0->1\n", "", "stage 1: its graph has a superfluous placeholder for 'size'"),
    (
        "edge act relu 0->1\n",
        "",
        "stage 1: its graph has a superfluous placeholder for 'relu'",
    ),
    (
        "    add = placeholder()\n    t = ",
        "    add = placeholder()\n    more = placeholder()\n    t = ",
        "stage 2: its graph has a superfluous placeholder for 'more'",
    ),
    (
        "p_tied = placeholder()\n    relu = placeholder()\n    head",
        "p_tied = placeholder()\n    relu = torch.relu(add)\n    head",
        "stage 2: its graph has no placeholder for 'relu'",
    ),
    (
        "edge skip relu 0->2\n",
        "",
        "stage 2: its graph has a superfluous placeholder for 'relu'",
    ),
    # What a graph gives
    (
        "return (p_tied, relu, size, mean)",
        "return (p_tied, size, relu, mean)",
        "stage 0: its graph returns (p_tied, size, relu, mean), but its edges and writes are "
        "(p_tied, relu, size, mean); return one tuple",
    ),
    ("relu, size, mean)", "relu, size)", "its graph returns (p_tied, relu, size), but"),
    ("return (add,)", "return (add, add)", "stage 1: its graph returns (add, add), but"),
    ("return (add,)", "return add", "stage 1: its graph returns no tuple of values"),
    ("return (add,)", "return (add, 1)", "stage 1: its graph returns no tuple of values"),
    ("edge out mul 2->host\n", "", "stage 2: its graph returns (sum_1, mul), but its edges"),
    ("  write bn.mean = mean\n", "", "stage 0: its graph returns (p_tied, relu, size, mean), but"),
    # What a graph may do
    (
        "aten.relu.default(getitem)",
        "aten.relu_.default(getitem)",
        "stage 0, node relu: torch.ops.aten.relu_.default writes in place; make the graph",
    ),
    (
        "torch.ops.aten.relu.default(relu)",
        "self.head(relu)",
        "stage 2, node head: calls the module head; call it by a function",
    ),
    (
        "torch.ops.aten.relu.default(getitem)",
        "getitem.relu_()",
        "stage 0, node relu: relu_ writes in place",
    ),
    (
        "torch.ops.aten.relu.default(getitem)",
        "operator.iadd(getitem, 1)",
        "stage 0, node relu: operator.iadd writes in place",
    ),
]


@pytest.mark.parametrize(("old", "new", "fault"), MUTANTS, ids=lambda part: part[:40])
def test_a_mutant_of_a_valid_plan_is_refused(old: str, new: str, fault: str) -> None:
    assert TEXT.count(old) == 1
    faults = told(written.plan(changed(TEXT, old, new), ROOT))
    assert any(fault in found for found in faults), faults


def test_a_plan_without_stages_is_refused() -> None:
    assert told(Plan((), ())) == ["there is no stage; give the plan at least one"]


def test_one_wrong_thing_gives_one_fault() -> None:
    for old, new in (
        ("stage 1\n", "stage 2\n"),
        ("aten.relu.default(getitem)", "aten.relu_.default(getitem)"),
        ("return (p_tied, relu, size, mean)", "return (p_tied, size, relu, mean)"),
        ("= conv.weight", "= tied.weight"),
    ):
        assert len(told(written.plan(changed(TEXT, old, new), ROOT))) == 1


def test_all_faults_are_reported_at_once() -> None:
    text = TEXT.replace("stage 1\n", "stage 9\n").replace("return (add,)", "return add")
    text = text.replace("= conv.weight", "= tied.weight")
    text = text.replace("aten.relu.default(relu)", "aten.relu_.default(relu)")
    text = text.replace("aten.mul.Tensor(head", "aten.mul_.Tensor(head")
    with pytest.raises(VerificationError, match="the plan has 5 faults:\n  stage 9: ") as caught:
        verify_plan(written.plan(text, ROOT))
    assert len(caught.value.faults) == 5


def with_graph(plan: Plan, index: int, change: Callable[[fx.Graph], None]) -> Plan:
    """The plan after a change of one stage's graph that no text can express."""
    change(plan.stages[index].graph.graph)
    return plan


def test_a_graph_that_uses_a_value_before_it_is_made_is_refused() -> None:
    def swap(graph: fx.Graph) -> None:
        view, add = (node for node in graph.nodes if node.op == "call_function")
        add.append(view)

    faults = told(with_graph(valid(), 1, swap))
    assert faults[0].startswith("stage 1: its graph is malformed: Argument 'view' of Node 'add'")
    assert "\n" not in faults[0]


def test_a_graph_without_an_end_is_refused() -> None:
    def behead(graph: fx.Graph) -> None:
        graph.erase_node(next(iter(reversed(graph.nodes))))

    assert told(with_graph(valid(), 1, behead)) == [
        "stage 1: its graph does not end with its one return; end it with one output node"
    ]


def test_a_module_that_does_not_exist_is_refused() -> None:
    plan = written.plan(changed(TEXT, "torch.ops.aten.relu.default(relu)", "self.head(relu)"), ROOT)
    del plan.stages[2].graph.head
    first, _ = told(plan)
    assert "stage 2: its graph is malformed: Node head target head references nonexistent" in first


def chain(stages: int) -> Plan:
    """A valid plan of many stages, each with a parameter."""
    edges: list[Edge] = [Edge(HOST, 0, "y")]
    built: list[Stage] = []
    for index in range(stages):
        graph = fx.Graph()
        weight = graph.placeholder(f"p_{index}x")
        last = graph.placeholder("y" if index == 0 else f"y_{index - 1}x")
        graph.call_function(torch.ops.aten.relu.default, (weight,))
        value = graph.create_node("call_function", torch.ops.aten.add.Tensor, (last, weight))
        value.name = f"y_{index}x"
        graph.output((value,))
        target = index + 1 if index + 1 < stages else HOST
        edges.append(Edge(index, target, value.name))
        parameters = (Argument(weight.name, f"layers.{index}.weight"),)
        built.append(Stage(index, parameters, (), (), fx.GraphModule(nn.Module(), graph)))
    return Plan(tuple(built), tuple(edges), tuple(edge.back for edge in edges[1:]))


def test_the_work_grows_with_the_size_of_the_plan_alone() -> None:
    small, large = chain(20), chain(320)
    assert lines(lambda: verify_plan(large)) < 18 * lines(lambda: verify_plan(small))


def test_writes_are_returned_after_the_values_of_edges_even_if_equal() -> None:
    plan = valid()
    first = dataclasses.replace(plan.stages[0], writes=(Write("bn.mean", "relu"),))
    (fault,) = told(dataclasses.replace(plan, stages=(first, *plan.stages[1:])))
    assert "are (p_tied, relu, size, relu)" in fault
