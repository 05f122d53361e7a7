"""Graphs of stages on other devices than they were traced on; ``meta`` stands for any other."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

import fxpipe
from fxpipe.errors import PassError
from fxpipe.extensions.streams.place_devices import moved, place_devices
from fxpipe.ir.plan import Plan
from fxpipe.ir.value import outputs_of
from fxpipe.kernels.graph import GraphKernel

CPU, META = torch.device("cpu"), torch.device("meta")


class Masked(nn.Module):
    """Makes tensors of its own in every stage: positions, a mask, and a cast."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.last = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        positions = torch.arange(4, device=x.device)
        h = self.first(x) + positions
        mask = torch.full((4, 4), float("-inf"), device=x.device).triu(1)
        scores = self.last(h).unsqueeze(-1) + mask
        y: Tensor = scores.softmax(-1).sum(-1) * torch.ones(4, dtype=torch.float64).to(x)
        return y


def compiled(schedule: str = "1f1b") -> Plan:
    torch.manual_seed(0)
    with fxpipe.compile(
        Masked(),
        ["cpu"] * 2,
        schedule=schedule,
        microbatches=2,
        loss=nn.functional.mse_loss,
        partition=["last"],
        example=((torch.randn(4, 4),), {"target": torch.randn(4, 4)}),
    ) as pipe:
        return pipe.plan


def graphs(plan: Plan) -> list[fx.GraphModule]:
    found = []
    for stage in plan.stages:
        kernel = stage.kernel
        assert isinstance(kernel, GraphKernel)
        found += [stage.graph, kernel.forward_graph]
        halves = kernel.backward_graph, kernel.input_grad_graph, kernel.weight_grad_graph
        found += [each for each in halves if each is not None]
    return found


def devices(module: fx.GraphModule) -> list[torch.device]:
    found: list[torch.device] = []

    def note(value: Any) -> Any:
        if isinstance(value, torch.device):
            found.append(value)
        return value

    for node in module.graph.nodes:
        fx.node.map_aggregate((node.args, node.kwargs), note)
    return found


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_every_graph_of_a_stage_names_the_stages_device(schedule: str) -> None:
    plan = compiled(schedule)
    assert all(device == CPU for graph in graphs(plan) for device in devices(graph))
    assert any(devices(graph) for graph in graphs(plan))
    placed = place_devices(plan, CPU, (CPU, META))
    assert placed.stages[0] is plan.stages[0]
    named = [device for graph in graphs(placed) for device in devices(graph)]
    assert META in named
    for graph in graphs(Plan((placed.stages[1],), ())):
        assert all(device == META for device in devices(graph))
    # the plan that it was made of is as it was
    assert all(device == CPU for graph in graphs(plan) for device in devices(graph))


def test_a_stage_that_was_placed_runs_there_forward_and_backward() -> None:
    plan = place_devices(compiled(), CPU, (META, META))
    for stage in plan.stages:
        assert isinstance(stage.kernel, GraphKernel)
        parameters = [torch.empty(4, 4, device=META), torch.empty(4, device=META)]
        shapes = {"weight": parameters[0], "bias": parameters[1]}
        inputs = [
            torch.empty(2, 4, device=META) for edge in plan.edges if edge.target == stage.index
        ]
        with torch.no_grad():
            result = stage.kernel.forward(
                [shapes[argument.target.rpartition(".")[2]] for argument in stage.parameters],
                [],
                inputs,
            )
            tensors = [*result.outputs, *result.saved]
            assert all(x.device == META for x in tensors if isinstance(x, Tensor) and x.dim())
            wanted = outputs_of(plan.gradients_into(stage.index))
            gradients = [plan.specs[name].room(META) for name in wanted]
            back = stage.kernel.backward(result.saved, gradients)
        assert all(g is not None and g.device == META for g in back.parameters)


def test_tensors_that_a_graph_keeps_are_moved() -> None:
    class Keeps(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Buffer(torch.ones(3))

        def forward(self, x: Tensor) -> Tensor:
            return x + self.table

    module = fx.symbolic_trace(Keeps())
    placed = moved(module, CPU, META)
    assert placed(torch.empty(3, device=META)).device == META
    assert module(torch.ones(3)).device == CPU


def test_a_device_that_the_model_names_itself_is_refused() -> None:
    graph = fx.Graph()
    made = graph.call_function(
        torch.ops.aten.ones.default, ([2],), {"device": torch.device("cuda:3")}
    )
    graph.output(made)
    module = fx.GraphModule(nn.Module(), graph)
    with pytest.raises(PassError, match="names cuda:3, and the model was traced on cuda:0"):
        moved(module, torch.device("cuda:0"), torch.device("cuda:1"))


def test_what_is_made_on_the_cpu_beside_another_device_stays_there() -> None:
    graph = fx.Graph()
    made = graph.call_function(torch.ops.aten.ones.default, ([2],), {"device": CPU})
    other = graph.call_function(
        torch.ops.aten.ones.default, ([2],), {"device": torch.device("cuda")}
    )
    graph.output((made, other))
    placed = moved(
        fx.GraphModule(nn.Module(), graph), torch.device("cuda:0"), torch.device("cuda:1")
    )
    assert devices(placed) == [CPU, torch.device("cuda:1")]
