"""Cutting: any forward assignment makes a valid plan that computes the uncut graph."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import fxpipe
from examples.unet import UNet
from fxpipe.ir.plan import Plan
from fxpipe.ir.traced import Traced, Value
from fxpipe.ir.value import HOST
from fxpipe.passes.differentiate.extract import results
from fxpipe.passes.partition.assignment import (
    Assignment,
    compute_nodes,
    first_readers,
    in_order,
    is_part,
    place_like,
)
from fxpipe.passes.partition.cut import cut
from tests.helpers.exported import Sliced
from tests.helpers.fronted import Answer, differentiated, front_end, in_stages, run_plan, whole
from tests.helpers.profiles import LEVELS
from tests.helpers.tiny import Tiny
from tests.models.test_exactness import Language


class Skips(nn.Module):
    """``a`` is used by every later layer; the first and the third share their weight."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))
        self.layers[2].weight = self.layers[0].weight

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        a = self.layers[0](x)
        b = self.layers[1](a).relu()
        c = self.layers[2](b) * a
        return self.layers[3](c) + a + x, b


def linears(traced: Traced) -> Assignment:
    """A stage for each linear layer and what follows it."""
    stage, nodes = -1, {}
    for node in compute_nodes(traced.graph):
        stage += node.target is torch.ops.aten.t.default  # of its weight
        nodes[node.name] = max(stage, 0)
    return Assignment(stage + 1, nodes)


def cut_up(traced: Traced, assignment: Assignment) -> Plan:
    return cut(traced, assignment, first_readers(traced, assignment)).verify()


def test_a_value_is_sent_once_to_each_stage_that_reads_it() -> None:
    traced = front_end(Skips(), torch.randn(3, 4))
    plan = cut_up(traced, linears(traced))
    assert len(plan.stages) == 4
    ends = [(edge.source, edge.target) for edge in plan.edges if edge.value == "addmm"]
    assert ends == [(0, 1), (0, 2), (0, 3)]
    assert [e.target for e in plan.edges if e.value == traced.inputs[0]] == [0, 3]


def test_values_that_skip_stages_are_returned_once_and_taken_by_each() -> None:
    traced = front_end(Skips(), torch.randn(3, 4))
    plan = cut_up(traced, linears(traced))
    graphs = [stage.graph.graph for stage in plan.stages]
    returned = [[node.name for node in results(graph)] for graph in graphs]
    taken = [[node.name for node in graph.find_nodes(op="placeholder")] for graph in graphs]
    (weight,) = (a.name for a in traced.parameters if a.target == "layers.0.weight")
    assert [names.count("addmm") for names in returned] == [1, 0, 0, 0]
    assert [names.count(weight) for names in returned] == [1, 0, 0, 0]
    assert [names.count("addmm") for names in taken] == [0, 1, 1, 1]
    assert [names.count(weight) for names in taken] == [1, 0, 1, 0]


def test_a_shared_parameter_is_the_first_stages_and_reaches_others_as_a_value() -> None:
    traced = front_end(Skips(), torch.randn(3, 4))
    plan = cut_up(traced, linears(traced))
    owning = [
        (s.index, a.target) for s in plan.stages for a in s.parameters if "weight" in a.target
    ]
    assert owning == [(0, "layers.0.weight"), (1, "layers.1.weight"), (3, "layers.3.weight")]


def test_a_parameter_stays_with_its_owner_though_only_others_read_it() -> None:
    traced = front_end(Skips(), torch.randn(3, 4))
    assignment = Assignment(3, dict.fromkeys(linears(traced).nodes, 2))
    home = {argument.target: 1 for argument in traced.parameters}
    plan = cut(traced, assignment, home).verify()
    assert [len(stage.parameters) for stage in plan.stages] == [0, len(traced.parameters), 0]
    carried = {edge.value for edge in plan.edges if (edge.source, edge.target) == (1, 2)}
    assert carried == {argument.name for argument in traced.parameters}


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "skips": (Skips, lambda: torch.randn(3, 4)),
    "tiny": (Tiny, lambda: torch.randn(3, 4)),
    "slices": (Sliced, lambda: torch.randint(10, (3, 6))),
    "transformer": (Language, lambda: torch.randint(11, (3, 5))),
    "u-net": (lambda: UNet(channels=2, base=2, depth=LEVELS), lambda: torch.randn(3, 2, 8, 8)),
}


@functools.cache
def front(name: str) -> tuple[nn.Module, Tensor, Traced]:
    factory, inputs = MODELS[name]
    model, x = factory(), inputs()
    return model, x, front_end(model, x)


def settled(traced: Traced, wishes: list[int], stages: int) -> Assignment:
    """Any stage for each node, moved on until edges run forward and parts are together."""
    nodes = compute_nodes(traced.graph)
    wished = {n.name: wishes[i % len(wishes)] % stages for i, n in enumerate(nodes)}
    held = Assignment(stages, wished)
    # following itself settles an assignment, but what is unsettled has no owner to follow
    stage: dict[str, int] = {}
    for node in nodes:
        before = [stage[n.name] for n in node.all_input_nodes if n.name in stage]
        stage[node.name] = max([*before, held.nodes[node.name]])
        if is_part(node):
            stage[node.name] = before[0]
    written = {write.target for write in traced.writes}
    if written:  # the statistics' reads and writes must meet: let them by running in order
        order = in_order(traced)
        stage = {
            n.name: s for n, s in zip(order, sorted(stage[n.name] for n in order), strict=True)
        }
        stage = dict(place_like(traced, traced, Assignment(stages, stage)).nodes)
    return Assignment(stages, stage)


@given(
    st.sampled_from(sorted(MODELS)),
    st.lists(st.integers(0, 3), min_size=1, max_size=20),
    st.integers(1, 4),
)
def test_any_forward_assignment_makes_a_plan_that_verifies(
    name: str, wishes: list[int], stages: int
) -> None:
    _, _, traced = front(name)
    assignment = settled(traced, wishes, stages)
    plan = cut_up(traced, assignment)
    made: dict[str, int] = {}
    for edge in plan.edges:
        assert edge.target == HOST or edge.source < edge.target
        assert made.setdefault(edge.value, edge.source) == edge.source
    assert len(set(plan.edges)) == len(plan.edges)
    reached = {e.value for e in plan.edges if e.target == HOST}
    assert reached == {out.name for out in traced.outputs if isinstance(out, Value)}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("stages", [2, 4])
def test_a_cut_graph_computes_the_uncut_ones_bits(name: str, stages: int) -> None:
    model, x, traced = front(name)
    expected = Answer(model, x)
    uncut = run_plan(model, traced, differentiated(model, traced, whole(traced), x), x)
    parted = run_plan(model, traced, differentiated(model, traced, in_stages(traced, stages), x), x)
    for out, there in zip(traced.outputs, expected.leaves, strict=True):
        assert isinstance(out, Value)
        assert torch.equal(uncut.values[out.name], there)
        assert torch.equal(parted.values[out.name], there)
    assert sorted(parted.state) == sorted(uncut.state)
    for target, value in parted.state.items():
        assert torch.equal(value, uncut.state[target])
    assert sorted(parted.gradients) == sorted(uncut.gradients) == sorted(expected.gradients)
    for target, gradient in parted.gradients.items():
        assert torch.equal(gradient, uncut.gradients[target]), target
        assert torch.equal(gradient, expected.gradients[target]), target


@pytest.mark.parametrize("name", ["slices", "transformer"])
def test_no_size_crosses(name: str) -> None:
    _, _, traced = front(name)
    plan = cut_up(traced, in_stages(traced, 4))
    by_name = {node.name: node for node in traced.graph.nodes}
    for edge in plan.edges:
        assert isinstance(by_name[edge.value].meta["val"], Tensor)


def test_modules_are_named_where_all_their_work_is() -> None:
    model = Tiny()
    traced = front_end(model, torch.randn(3, 4))
    plan = cut_up(traced, whole(traced))
    assert plan.stages[0].modules == ("first", "middle", "last")


class _LateRow(nn.Module):
    """Makes a row of weights early, and needs the batch size for it late."""

    def __init__(self) -> None:
        super().__init__()
        self.row = nn.Parameter(torch.rand(4))
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        row = self.row.unsqueeze(0)
        h = self.first(x)
        out: Tensor = self.second(h) + row.expand(h.shape[0], -1)
        return out


def test_a_stage_takes_its_size_from_a_tensor_that_is_there_when_it_is_needed() -> None:
    model = _LateRow()
    pipe = fxpipe.compile(model, ["cpu", "cpu"], microbatches=2, partition=["second"])
    with torch.no_grad():
        made = pipe(x := torch.rand(6, 4))
        expected = torch.cat([model(part) for part in x.tensor_split(2)])
    assert torch.equal(made, expected)
    assert [edge.value for edge in pipe.plan.edges if edge.kind == "act"] == ["addmm"]
