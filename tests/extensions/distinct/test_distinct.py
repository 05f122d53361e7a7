"""A graph is reduced to its different operations, which are measured in place of the whole."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

import fxpipe
from fxpipe import extend
from fxpipe.extensions.distinct.distinct import one_of_each
from fxpipe.ir.traced import Traced
from fxpipe.passes.differentiate import differentiate as differentiate_pass
from fxpipe.passes.differentiate.differentiate import Wanted, differentiate
from fxpipe.passes.differentiate.part_backward import part_backward
from fxpipe.passes.partition.assignment import compute_nodes, one_stage
from fxpipe.passes.partition.cut import cut
from fxpipe.passes.partition.measure import NodeCost, measure, spread
from tests.helpers.fronted import differentiated, front_end, values_of, whole

pytestmark = pytest.mark.traces


class Layer(nn.Module):
    def __init__(self, drop: float) -> None:
        super().__init__()
        self.norm, self.both = nn.LayerNorm(8), nn.Linear(8, 16)
        self.drop = nn.Dropout(drop)

    def forward(self, x: Tensor) -> Tensor:
        a, b = self.both(self.norm(x)).chunk(2, -1)
        y: Tensor = self.drop(F.gelu(a) * b)
        return x + y


class Net(nn.Module):
    def __init__(self, layers: int, drop: float = 0.1) -> None:
        super().__init__()
        self.begin = nn.Linear(4, 8)
        self.layers = nn.Sequential(*(Layer(drop) for _ in range(layers)))
        self.norm = nn.BatchNorm1d(8)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.norm(self.layers(self.begin(x)))
        return y.square().mean(), y.argmax(1)


X = torch.randn(6, 4)


def reduced(model: nn.Module, *args: Any, traced: Traced | None = None) -> Any:
    traced = traced or front_end(model, *args)
    first, *_ = (out.name for out in traced.outputs if hasattr(out, "name"))
    values, state = values_of(traced, *args), traced.state_of(model)
    return traced, *one_of_each(traced, values, state, Wanted(frozenset([first])))


def costs_of(model: nn.Module, *args: Any) -> dict[str, NodeCost]:
    traced, small, values, wanted, equal = reduced(model, *args)
    state = traced.state_of(model)
    plan = differentiate(cut(small, one_stage(small), {}), values, state, wanted)
    return spread(measure(small, part_backward(plan), values, state), equal)


def test_more_equal_layers_make_no_larger_a_graph() -> None:
    sizes = [len(reduced(Net(layers), X)[1].graph.nodes) for layers in (2, 7)]
    assert sizes[0] == sizes[1]
    traced, small, *_ = reduced(Net(7), X)
    assert len(compute_nodes(small.graph)) < len(compute_nodes(traced.graph)) / 3


def test_each_different_operation_computes_what_it_computes_in_the_model() -> None:
    model = Net(3)
    traced, small, values, _, equal = reduced(model, X)
    state = traced.state_of(model)

    def interpreted(graph: Traced, given: dict[str, Any]) -> dict[str, Any]:
        held = {a.name: state[a.target] for a in (*graph.parameters, *graph.buffers)}
        every: dict[str, Any] = {}

        class All(fx.Interpreter):
            def run_node(self, n: fx.Node) -> Any:
                every[n.name] = super().run_node(n)
                return every[n.name]

        names = [n.name for n in graph.graph.find_nodes(op="placeholder")]
        All(graph.module).run(*({**given, **held}[name] for name in names))
        return every

    there = interpreted(traced, values_of(traced, X))
    here = interpreted(small, values)
    first: dict[str, str] = {}
    for name, (like, _) in equal.items():
        if like and first.setdefault(like, name) == name and isinstance(here[like], Tensor):
            assert torch.equal(here[like], there[name])
    assert len(first) == len(compute_nodes(small.graph))


def test_each_node_costs_what_kind_of_time_it_costs_in_the_whole_graph() -> None:
    model = Net(3)
    model.begin.weight.requires_grad_(False)
    costs = costs_of(model, X)
    traced = front_end(model, X)
    values, state = values_of(traced, X), traced.state_of(model)
    alone = measure(
        traced, part_backward(differentiated(model, traced, whole(traced), X)), values, state
    )
    assert costs.keys() == alone.keys()
    for name, cost in costs.items():
        assert cost.bytes == alone[name].bytes
        assert (cost.forward > 0) == (alone[name].forward > 0), name
    ours = [cost for name, cost in costs.items() if name.startswith("gelu")]
    assert len(ours) == 3
    assert len(set(ours)) == 1
    assert ours[0].backward > 0
    assert ours[0].weight_grad == 0
    linears = [cost for name, cost in costs.items() if name.startswith("linear")]
    assert all(cost.input_grad > 0 and cost.weight_grad > 0 for cost in linears[1:])
    assert linears[0].input_grad == 0  # nobody wants the gradient of the model's input
    assert costs["argmax"].backward == 0


def test_operations_on_what_needs_gradients_are_told_from_others() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4).requires_grad_(False)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.a(x) + self.b(x)
            return y.sum()

    _, small, _, _, equal = reduced(Two(), X)
    assert equal["linear"] != equal["linear_1"]
    assert len(small.parameters) == 4


def test_what_is_not_differentiable_gets_no_gradient() -> None:
    """The second call of a BatchNorm reads the statistics that its first call computes."""

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.norm(self.norm(self.first(x)))
            return y.square().sum()

    costs = costs_of(Twice(), X)
    norms = [cost for name, cost in costs.items() if "batch_norm" in name]
    assert len(norms) == 2
    assert all(cost.backward > 0 for cost in norms)


def test_operations_run_under_the_models_autocast() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.layer(self.layer(x))
            return y.sum()

    model = Tied()
    with torch.autocast("cpu", torch.bfloat16):
        traced = front_end(model, X)
    _, _, values, *_ = reduced(model, X, traced=traced)
    dtypes = {x.dtype for name, x in values.items() if "linear" in name.split("_of_")[0]}
    assert dtypes == {torch.bfloat16}


def test_graphs_of_any_size_are_measured_at_the_size_of_the_example() -> None:
    class Flat(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            rows, columns = x.shape
            return x.reshape(rows * columns, 1).expand(rows * columns, rows).sum()

    x = torch.randn(6, 4, requires_grad=True)
    _, small, *_ = reduced(Flat(), x)
    assert not any(
        isinstance(a, fx.Node) and a.op != "placeholder"
        for n in compute_nodes(small.graph)
        for a in n.all_input_nodes
    )


def test_only_the_graphs_of_stages_are_differentiated_whole(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[int] = []
    run = differentiate_pass.OnFakes.run

    def counted(self: Any) -> Any:
        seen.append(sum(len(compute_nodes(stage.graph.graph)) for stage in self.plan.stages))
        return run(self)

    monkeypatch.setattr(differentiate_pass.OnFakes, "run", counted)
    measured = []
    for layers in (2, 8):
        seen.clear()
        with fxpipe.compile(Net(layers, 0.0), ["cpu"] * 2, microbatches=2, loss=first) as pipe:
            pipe.step(X)
        few, all_ = seen
        assert few < all_
        measured.append(few)
    assert measured[0] == measured[1]


def test_without_it_all_operations_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(extend._REGISTRY["option"], "reducible")
    with fxpipe.compile(Net(2, 0.0), ["cpu"] * 2, microbatches=2, loss=first) as pipe:
        pipe.step(X)
        assert all(stage.costs.forward > 0 for stage in pipe.plan.stages if stage.costs)
        assert all(stage.costs is not None for stage in pipe.plan.stages)


def first(output: tuple[Tensor, Tensor]) -> Tensor:
    return output[0]
