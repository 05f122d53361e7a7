"""Partitioning: the slowest stage and the bytes that cross against a brute-force oracle."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_structure

from fxpipe.errors import PartitionError
from fxpipe.ir.plan import Argument, Write
from fxpipe.ir.traced import Traced, Value
from fxpipe.passes.partition.assignment import (
    Assignment,
    compute_nodes,
    first_readers,
    in_order,
    place_like,
    readers,
)
from fxpipe.passes.partition.atoms import Footprint, atoms_of
from fxpipe.passes.partition.balance import balance, cut_at
from fxpipe.passes.partition.cut import cut
from fxpipe.passes.partition.measure import NodeCost
from tests.helpers.fronted import front_end, in_stages
from tests.helpers.profiles import DEEP
from tests.helpers.tiny import Tiny
from tests.models.test_exactness import Language
from tests.partition.test_named_cuts import Nested


@dataclass(frozen=True)
class Recipe:
    """A graph as data: for each node its cost, its bytes and what it reads, by number.

    Numbers below 0 are placeholders: −1 the input, −2 and −3 parameters, −4 a buffer that the
    last node which reads it writes.
    """

    reads: tuple[tuple[int, ...], ...]
    seconds: tuple[float, ...]
    sizes: tuple[int, ...]
    stages: int


@st.composite
def recipes(draw: st.DrawFn) -> Recipe:
    count = draw(st.integers(2, 7))
    reads = tuple(
        tuple(sorted(draw(st.sets(st.integers(-4, i - 1), min_size=1, max_size=3))))
        for i in range(count)
    )
    seconds = tuple(draw(st.sampled_from([0.0, 1.0, 2.0, 2.005, 5.0])) for _ in range(count))
    sizes = tuple(draw(st.integers(0, 4)) for _ in range(count + 2))
    return Recipe(reads, seconds, sizes, draw(st.integers(1, 3)))


def built(recipe: Recipe) -> tuple[Traced, dict[str, NodeCost]]:
    graph = fx.Graph()
    held = {-1: graph.placeholder("x"), -2: graph.placeholder("p"), -3: graph.placeholder("q")}
    held[-4] = graph.placeholder("b")
    for node in held.values():
        node.meta["val"] = torch.ones(())
    nodes: dict[int, fx.Node] = dict(held)
    for index, reads in enumerate(recipe.reads):
        nodes[index] = graph.call_function(sum, ([nodes[i] for i in reads],))
        nodes[index].meta["val"] = torch.ones(())
    last = nodes[len(recipe.reads) - 1]
    writers = [i for i, reads in enumerate(recipe.reads) if -4 in reads]
    writes = (Write("b", nodes[writers[-1]].name),) if writers else ()
    graph.output((*(nodes[writers[-1]] for _ in writes), last))
    costs = {node.name: NodeCost(0.0, 0.0, 0) for node in graph.nodes}
    for index, seconds in enumerate(recipe.seconds):
        costs[nodes[index].name] = NodeCost(seconds / 4, seconds * 3 / 4, recipe.sizes[index])
    for number, size in zip((-2, -3), recipe.sizes[-2:], strict=True):
        costs[nodes[number].name] = NodeCost(0.0, 0.0, size)
    traced = Traced(
        module=fx.GraphModule(nn.Module(), graph),
        parameters=(Argument("p", "p"), Argument("q", "q")),
        buffers=(Argument("b", "b"),),
        constants={},
        inputs=("x",),
        writes=writes,
        outputs=(Value(last.name),),
        out_spec=tree_structure(0),
    )
    return traced, costs


def slowest(stages: Mapping[str, int], costs: Mapping[str, NodeCost]) -> float:
    totals: dict[int, float] = {}
    for name, stage in stages.items():
        totals[stage] = totals.get(stage, 0.0) + costs[name].seconds
    return max(totals.values())


def allowed(traced: Traced, stages: Mapping[str, int]) -> bool:
    """Whether every edge runs forward, and what is bound together is: a written buffer's users,
    a constant and its first use; and whether those that read a value come in order."""
    known = {"p", "q", "b"}
    ordered = in_order(traced)
    for node in ordered:
        sources = [source.name for source in node.all_input_nodes]
        if any(stages[name] > stages[node.name] for name in sources if name in stages):
            return False
        if all(name in known for name in sources):
            known.add(node.name)
            first = next((user for user in ordered if user in node.users), node)
            if stages[node.name] != stages[first.name]:
                return False
    # gradients of those that read one value add in the order of the stages
    trained = {"p", "q", "x"}
    for node in traced.graph.nodes:
        if any(source.name in trained for source in node.all_input_nodes):
            trained.add(node.name)
    for node in traced.graph.nodes:
        users = [u.name for u in ordered if u in node.users and u.name in trained]
        turns = [stages[name] for name in users if name in stages]
        if node.name in trained and turns != sorted(turns):
            return False
    group = {stages[u.name] for u in readers(traced).get("b", ()) if u.name in stages}
    group |= {stages[write.value] for write in traced.writes}
    return not traced.writes or len(group) <= 1


def every_assignment(traced: Traced, stages: int) -> list[dict[str, int]]:
    """All legal ways to give the nodes to so many stages, none of them empty."""
    names = [node.name for node in in_order(traced)]
    placed = (
        dict(zip(names, assigned, strict=True))
        for assigned in itertools.product(range(stages), repeat=len(names))
        if len(set(assigned)) == stages
    )
    return [each for each in placed if allowed(traced, each)]


@given(recipes())
def test_balance_is_within_a_hundredth_of_the_best_runs_in_order(
    recipe: Recipe,
) -> None:
    traced, costs = built(recipe)
    candidates = every_assignment(traced, recipe.stages)
    if not candidates:
        most = max(n for n in range(1, recipe.stages) if every_assignment(traced, n))
        with pytest.raises(PartitionError, match=f"at most {most} stages, not {recipe.stages}"):
            balance(traced, recipe.stages, costs)
        return
    ours = balance(traced, recipe.stages, costs)
    assert ours.stages == recipe.stages
    assert dict(ours.nodes) in candidates
    order = [nodes[0].name for nodes in atoms_of(traced, costs, Footprint()).nodes]
    runs = [c for c in candidates if is_run(c, order)]
    best = min(slowest(candidate, costs) for candidate in runs)
    assert slowest(ours.nodes, costs) <= best * 1.01 + 1e-9
    told = max(load.seconds for load in ours.loads)
    assert told == pytest.approx(slowest(ours.nodes, costs))


def is_run(stage_of: Mapping[str, int], order: Sequence[str]) -> bool:
    """Whether each stage has a stretch of an order."""
    stages = [stage_of[name] for name in order]
    return stages == sorted(stages)


def chain(length: int, *, skips: bool = True) -> tuple[Traced, dict[str, NodeCost]]:
    reads = tuple(
        (i - 1, *((i // 2,) if skips and i > 4 and i % 7 == 0 else ())) for i in range(length)
    )
    seconds = tuple(1.0 + (i * 37 % 11) for i in range(length))
    return built(Recipe(reads, seconds, tuple(1 + i % 5 for i in range(length + 2)), 8))


def test_two_thousand_nodes_are_cut_into_equal_shares() -> None:
    traced, costs = chain(2000)
    assignment = balance(traced, 8, costs)
    total = sum(cost.seconds for cost in costs.values())
    assert slowest(assignment.nodes, costs) < total / 8 * 1.02


def test_no_node_runs_twice_or_never() -> None:
    traced, costs = chain(30)
    assert set(balance(traced, 3, costs).nodes) == {n.name for n in compute_nodes(traced.graph)}


def free(traced: Traced) -> dict[str, NodeCost]:
    return {node.name: NodeCost(1.0, 1.0, 1) for node in traced.graph.nodes}


def forward_only(traced: Traced, assignment: Assignment) -> None:
    for node in compute_nodes(traced.graph):
        for source in node.all_input_nodes:
            if source.name in assignment.nodes:
                assert assignment.nodes[source.name] <= assignment.nodes[node.name]


class Shared(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.first = nn.Linear(4, 4)
        self.last = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.last(self.norm(self.first(self.norm(x))))
        return y


def test_all_calls_that_write_one_buffer_share_a_stage() -> None:
    model = Shared()
    traced = front_end(model, torch.randn(3, 4))
    # both calls of the norm, with all between them, are one; the last layer is the other
    assignment = balance(traced, 2, free(traced))
    with pytest.raises(PartitionError, match="into at most"):
        balance(traced, 9, free(traced))
    written = {write.target: write.value for write in traced.writes}
    for target, nodes in readers(traced).items():
        if target in written:
            stages = {assignment.nodes[n.name] for n in nodes} | {assignment.nodes[written[target]]}
            assert len(stages) == 1
    with pytest.raises(PartitionError, match=r"written buffer 'norm.*' must be in one stage"):
        cut_at(traced, 2, ["first"], model)
    assert cut_at(traced, 2, ["last"], model).stages == 2


def test_the_parts_of_a_result_stay_with_it() -> None:
    class Chunks(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            a, b, c = x.exp().chunk(3, 1)
            return a * b + c

    traced = front_end(Chunks(), torch.randn(4, 6))
    for stages in (1, 2, 3):
        assignment = balance(traced, stages, free(traced))
        for node in compute_nodes(traced.graph):
            if getattr(node.target, "__name__", "") == "getitem":
                source = node.args[0]
                assert isinstance(source, fx.Node)
                assert assignment.nodes[node.name] == assignment.nodes[source.name]


class Cast(nn.Module):
    """Casts its weight, whose product depends on no input, long before it is used."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4))
        self.front = nn.Linear(4, 4)
        self.back = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        cast = self.weight.double() * 2
        y: Tensor = self.back(self.front(x).relu().double().mm(cast).float())
        return y


def test_what_depends_on_no_input_goes_with_its_first_use() -> None:
    model = Cast()
    traced = front_end(model, torch.randn(3, 4))
    assignment = cut_at(traced, 2, ["back"], model)
    owner = first_readers(traced, assignment)
    assert owner["weight"] == owner["front.weight"] == 0
    names = [node.name for node in in_order(traced)]
    assert names.index("addmm") < names.index("mul") < names.index("mm")


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], Any]]] = {
    "nested": (Nested, lambda n: torch.randn(n, 4)),
    "shared norm": (Shared, lambda n: torch.randn(n, 4)),
    "tiny": (Tiny, lambda n: torch.randn(n, 4)),
    "cast": (Cast, lambda n: torch.randn(n, 4)),
    "tied transformer": (lambda: Language(3 if DEEP else 1), lambda n: torch.randint(11, (n, 5))),
    "dropout": (
        lambda: nn.Sequential(
            nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.1)
        ),
        lambda n: torch.randn(n, 4),
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_other_graphs_of_a_model_follow_the_first(name: str) -> None:
    factory, inputs = MODELS[name]
    model = factory().train()
    reference = front_end(model, inputs(4))
    others = [front_end(model.eval(), inputs(size)) for size in (4, 1)]
    if name in ("nested", "cast", "tied transformer"):
        others.append(front_end(model.train(), inputs(1)))
    for stages in (1, 2) if name == "shared norm" else (1, 2, 3):
        assignment = balance(reference, stages, free(reference))
        home = first_readers(reference, assignment)
        for traced in (*others, reference):
            placed = place_like(traced, reference, assignment)
            forward_only(traced, placed)
            assert set(placed.nodes) == {n.name for n in compute_nodes(traced.graph)}
            for target, stage in first_readers(traced, placed).items():
                if target in dict(model.named_parameters()):
                    # for one sample, PyTorch has other operations, which others may go with
                    single = any(traced is other for other in others[1:])
                    assert stage == home[target] or (single and stage > home[target]), target
            cut(traced, placed, home).verify()
        assert dict(place_like(reference, reference, assignment).nodes) == dict(assignment.nodes)


class Twice(nn.Module):
    """Two layers with one norm behind both."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.norm = nn.Linear(4, 4), nn.Linear(4, 4), nn.BatchNorm1d(4)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.norm(self.b(self.norm(self.a(x))))
        return out


def test_nodes_that_only_training_ties_together_share_a_stage_in_its_graph() -> None:
    """Of a norm that evaluates, each call may stand on a stage of its own; training writes."""
    model, x = Twice(), torch.randn(3, 4)
    reference, traced = front_end(model.eval(), x), front_end(model.train(), x)
    (second,) = readers(reference)["b.weight"]
    nodes = in_order(reference)
    place = nodes.index(second)
    stages = {node.name: int(index >= place) for index, node in enumerate(nodes)}
    placed = place_like(traced, reference, Assignment(2, stages))
    norms = [n.name for n in compute_nodes(traced.graph) if "batch_norm" in str(n.target)]
    assert len(norms) == 2 and {placed.nodes[name] for name in norms} == {1}
    assert {placed.nodes[node.name] for node in readers(traced)["a.weight"]} == {0}
    forward_only(traced, placed)


def test_a_simple_split_of_a_model_verifies() -> None:
    traced = front_end(Nested(), torch.randn(3, 4))
    assignment = in_stages(traced, 3)
    cut(traced, assignment, first_readers(traced, assignment)).verify()
