"""Gradients of a value that several stages read meet in autograd's order."""

from __future__ import annotations

import copy
from collections.abc import Callable
from random import Random

import pytest
import torch
from torch import Tensor, nn

import fxpipe
from fxpipe.ir.traced import Traced, Value
from fxpipe.passes.graph.fit import relay
from fxpipe.passes.partition.assignment import Assignment, compute_nodes
from fxpipe.passes.partition.balance import balance
from fxpipe.passes.partition.measure import NodeCost
from tests.helpers.fronted import Answer, differentiated, front_end, run_plan
from tests.helpers.profiles import DEEP, deep
from tests.oracles import loop


class Shares(nn.Module):
    """A value that the layers of several stages read, each as often as it is told."""

    def __init__(self, reads: list[int]) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in reads)
        self.reads = reads

    def forward(self, x: Tensor) -> Tensor:
        shared = y = torch.tanh(self.first(x))
        for count, layer in zip(self.reads, self.layers, strict=True):
            y = layer(y)
            for power in range(count):
                y = torch.tanh(y) + shared * (0.3 + power)
        return y


class Reads(nn.Module):
    """Values that are read several times, by operations that do not read one another."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4).double() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        shared = torch.tanh(self.layers[0](x))
        parts = [layer(shared) * shared + x for layer in (*self.layers, self.layers[1])]
        return torch.stack(parts).sum(0)


def staged(reads: list[int]) -> tuple[Traced, Assignment, str]:
    """A graph with a stage a layer, and the name of its shared value."""
    traced = front_end(Shares(reads), torch.randn(3, 4))
    stages: dict[str, int] = {}
    for node in traced.graph.nodes:
        paths = [path for path, _ in (node.meta.get("nn_module_stack") or {}).values()]
        layer = next((int(p.split(".")[1]) for p in paths if p.startswith("layers.")), None)
        if node.op not in ("placeholder", "output"):
            stages[node.name] = layer if layer is not None else max(stages.values(), default=0)
    return traced, Assignment(len(reads), stages), "tanh"


def relayed(reads: list[int], trained: bool = True) -> tuple[Traced, Assignment]:
    traced, assignment, _ = staged(reads)
    names = {argument.name for argument in traced.parameters} if trained else set()
    return relay(traced, assignment, names, ())


def handed_on(traced: Traced) -> list[str]:
    return [n.name for n in traced.graph.nodes if n.target is torch.ops.aten.alias.default]


@pytest.mark.parametrize(
    ("reads", "expected"),
    [
        ([1, 1, 1], []),
        ([3, 1, 1], []),  # the stage that makes it
        ([1, 1, 3], []),  # the last to read it
        ([1, 2, 1], ["tanh_on_1"]),
        ([1, 2, 3, 1], ["tanh_on_1", "tanh_on_2"]),
        ([1, 2, 1, 1], ["tanh_on_1"]),
        ([1, 2, 0, 1], ["tanh_on_1"]),
        ([0, 2, 0, 0], []),
    ],
)
def test_a_stage_that_reads_a_value_often_and_is_not_the_last_hands_it_on(
    reads: list[int], expected: list[str]
) -> None:
    traced, assignment = relayed(reads)
    assert handed_on(traced) == expected
    assert [assignment.nodes[name] for name in expected] == [int(n[-1]) for n in expected]


@pytest.mark.parametrize("seed", range(8))
def test_readers_may_stand_in_stages_in_another_order(seed: int) -> None:
    """The gradients are then added in another order, and everything else is as before."""
    model, x, random = Reads(), torch.randn(3, 4, dtype=torch.float64), Random(seed)
    traced = front_end(model, x)
    stages: dict[str, int] = {}
    for node in compute_nodes(traced.graph):
        sources = [stages.get(source.name, 0) for source in node.all_input_nodes]
        stages[node.name] = max([*sources, random.choice((0, 0, 1, 2))])
    trained = {argument.name for argument in traced.parameters} | {*filter(None, traced.inputs)}
    outputs = {out.name for out in traced.outputs if isinstance(out, Value)}
    passed_on, assignment = relay(traced, Assignment(3, stages), trained, outputs)
    ours = run_plan(model, passed_on, differentiated(model, passed_on, assignment, x), x)
    torch.testing.assert_close(ours.gradients, Answer(model, x).gradients)


def test_who_reads_behind_reads_what_was_handed_on() -> None:
    traced, assignment = relayed([1, 2, 2, 1])
    nodes = {node.name: node for node in traced.graph.nodes}
    for name, sources in (("tanh", {0, 1}), ("tanh_on_1", {2}), ("tanh_on_2", {3})):
        assert {assignment.nodes[user.name] for user in nodes[name].users} == sources


def test_what_gets_no_gradient_is_not_handed_on() -> None:
    assert handed_on(relayed([1, 2, 1], trained=False)[0]) == []


def test_the_original_graph_stays() -> None:
    traced, assignment, _ = staged([1, 2, 1])
    before, nodes = str(traced.graph), dict(assignment.nodes)
    relay(traced, assignment, {a.name for a in traced.parameters}, ())
    assert (str(traced.graph), assignment.nodes) == (before, nodes)


@pytest.mark.parametrize("behind", [[], [1]])
def test_an_output_that_is_read_often_is_handed_to_the_caller_by_the_last_reader(
    behind: list[int],
) -> None:
    traced, assignment, name = staged([1, 2, *behind])
    (out,) = traced.outputs
    assert isinstance(out, Value)
    end = next(node for node in traced.graph.nodes if node.op == "output")
    shared = next(node for node in traced.graph.nodes if node.name == name)
    end.args = ((*end.args[0], shared),)
    both = Traced(**{**vars(traced), "outputs": (out, Value(name))})
    trained = {argument.name for argument in traced.parameters}
    given = relay(both, assignment, trained, {name})[0].outputs
    assert [value.name for value in given if isinstance(value, Value)] == [out.name, "tanh_on_1"]
    kept = relay(both, assignment, trained, ())[0].outputs  # no gradient comes for it
    assert kept == both.outputs


@pytest.mark.parametrize("reads", [[1, 2, 1], [2, 3, 2, 2], [1, 4, 0, 1], [0, 3, 3, 1]])
@pytest.mark.parametrize("times", [1.0, *deep(1e3)])
def test_gradients_equal_the_loops(reads: list[int], times: float) -> None:
    torch.manual_seed(0)
    model = Shares(reads)
    alone = copy.deepcopy(model)
    loss: Callable[..., Tensor] = lambda y, t: ((y - t) ** 2).mean() * times  # noqa: E731
    with fxpipe.compile(
        model,
        ["cpu"] * len(reads),
        microbatches=2,
        loss=loss,
        partition=[f"layers.{index}" for index in range(1, len(reads))],
    ) as pipe:
        for rows in (4, 7):
            x, y = torch.randn(rows, 4), torch.randn(rows, 4)
            pipe.step(x, target=y)
            loop.train(alone, 2, x, loss=loss, target=y)
    loop.assert_same(loop.gradients(model), loop.gradients(alone))


class Normed(nn.Module):
    """What a normalisation gives is read twice in a middle stage, and again behind it."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm
        self.i, self.a, self.b, self.c = (nn.Linear(4, 4) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.i(x))
        y: Tensor = self.c(self.a(x) + self.b(x)) * x
        return y


NORMS: list[Callable[[], nn.Module]] = [
    lambda: nn.BatchNorm1d(4),
    lambda: nn.BatchNorm1d(4, track_running_stats=False),
    lambda: nn.Dropout(0.5),
]


@pytest.mark.parametrize("make", NORMS)
def test_what_an_operation_with_several_results_gives_is_handed_on(
    make: Callable[[], nn.Module],
) -> None:
    traced = front_end(Normed(make()), torch.randn(8, 4))
    assert all(n.op == "output" or n.meta.get("val") is not None for n in traced.graph.nodes)
    stages: dict[str, int] = {}
    for node in traced.graph.nodes:
        paths = {path for path, _ in (node.meta.get("nn_module_stack") or {}).values()}
        before = max(stages.values(), default=0)
        if node.op not in ("placeholder", "output"):
            stages[node.name] = 2 if "c" in paths else 1 if paths & {"a", "b"} else before
    trained = {argument.name for argument in traced.parameters}
    assert len(handed_on(relay(traced, Assignment(3, stages), trained, ())[0])) == 1


@pytest.mark.parametrize("make", NORMS[:-1])
def test_gradients_behind_a_batchnorm_equal_the_loops(make: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    model = Normed(make()).double()
    alone = copy.deepcopy(model)
    loss: Callable[..., Tensor] = lambda y, t: ((y - t) ** 2).mean()  # noqa: E731
    with fxpipe.compile(model, 3, microbatches=2, loss=loss, partition=["a", "c"]) as pipe:
        for _ in range(5):
            x, y = torch.randn(8, 4).double(), torch.randn(8, 4).double()
            pipe.step(x, target=y)
            loop.train(alone, 2, x, loss=loss, target=y)
    loop.assert_same(loop.gradients(model), loop.gradients(alone))


class Parts(nn.Module):
    """Branches that read one value, none of which needs another."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(4))
        self.branches = nn.ModuleList(nn.Linear(4, 4) for _ in range(5))

    def forward(self, x: Tensor) -> Tensor:
        shared = torch.tanh(x * self.scale)
        return torch.stack([torch.tanh(branch(shared)) for branch in self.branches]).sum(0)


@pytest.mark.parametrize("seed", range(20 if DEEP else 4))
def test_readers_of_a_value_stand_in_stages_in_the_order_of_the_program(
    seed: int, trace: Callable[..., Traced] = front_end
) -> None:
    model, x, random = Parts(), torch.randn(3, 4), Random(seed)
    traced = trace(model, x)
    costs = {n.name: NodeCost(random.random() ** 4, 0.1, 1) for n in traced.graph.nodes}
    assignment = balance(traced, 3, costs)
    shared = next(node for node in traced.graph.nodes if node.name == "tanh")
    order = {node: place for place, node in enumerate(traced.graph.nodes)}
    stages = [assignment.nodes[n.name] for n in sorted(shared.users, key=order.__getitem__)]
    assert stages == sorted(stages)
