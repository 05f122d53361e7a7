"""When memory in a graph is alive: against runs that count what is really there, node by node."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, fx, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional
from torch.nn.functional import cross_entropy, mse_loss
from torch.utils import _pytree as pytree

import fxpipe
from benchmarks.models.gpt2 import GPT2, next_words
from fxpipe.extensions.simulator.liveness import liveness
from fxpipe.kernels.graph import GraphKernel
from fxpipe.passes.differentiate.extract import runnable
from tests.helpers.exported import UNet

pytestmark = pytest.mark.models

aten = torch.ops.aten


def counted(graph: fx.Graph, arguments: list[Any]) -> list[int]:
    """Step → the bytes of all storages that some value lies in that is still needed, by running
    the graph's nodes on real tensors; at the return last."""
    *nodes, output = graph.nodes
    values: dict[fx.Node, Any] = {}
    levels: list[int] = []
    given_ = iter(arguments)

    def count(needed: list[Any]) -> None:
        leaves = [x for x in pytree.tree_leaves(needed) if isinstance(x, Tensor)]
        storages = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in leaves}
        storages.pop(0, None)
        levels.append(sum(storages.values()))

    for place, node in enumerate(nodes):
        if node.op == "placeholder":
            values[node] = next(given_)
            continue
        args, kwargs = fx.map_arg((node.args, node.kwargs), values.__getitem__)
        values[node] = node.target(*args, **kwargs)
        later = {n for other in nodes[place:] for n in other.all_input_nodes}
        later |= {node, *output.all_input_nodes}
        unread = {n for n in values if n.op == "placeholder" and not n.users}
        count([value for n, value in values.items() if n in later | unread])
        for gone in [n for n in values if n not in later | unread]:
            del values[gone]
    unread = {n for n in values if n.op == "placeholder" and not n.users}
    count([v for n, v in values.items() if n in {*output.all_input_nodes} | unread])
    return levels


def predicted(
    graph: fx.Graph,
    shared: Sequence[Sequence[Hashable]] = (),
    absent: Collection[fx.Node] = (),
) -> list[int]:
    live = liveness(graph, shared, absent)
    return [
        sum(span.bytes for span in live.spans.values() if span.first <= step <= span.last)
        for step in range(live.steps + 1)
    ]


def examples(graph: fx.Graph) -> tuple[list[Any], list[list[int]]]:
    """Real arguments like a graph's own, and the numbers of the storages that they share."""
    values = [node.meta["val"] for node in graph.find_nodes(op="placeholder")]
    memory: dict[int, Tensor] = {}
    found: list[Any] = []
    for value in values:
        if isinstance(value, Tensor):
            storage, size = value.untyped_storage(), value.element_size()
            base = torch.ones(storage.nbytes() // size, dtype=value.dtype)
            base = memory.setdefault(storage._cdata, base)
            found.append(base.as_strided(value.shape, value.stride(), value.storage_offset()))
        else:
            found.append(value)
    shared = [[v.untyped_storage()._cdata] if isinstance(v, Tensor) else [] for v in values]
    return found, shared


Graphs = list[tuple[str, fx.Graph]]


def graphs_of(pipe: fxpipe.Pipeline) -> Graphs:
    found: Graphs = []
    for stage in pipe.plan.stages:
        kernel = stage.kernel
        assert isinstance(kernel, GraphKernel)
        for name in ("forward", "backward", "input_grad", "weight_grad"):
            module = getattr(kernel, f"{name}_graph")
            if module is not None:
                found.append((f"stage {stage.index}, {name}", module.graph))
    return found


def unet() -> tuple[nn.Module, Tensor, Tensor, Any]:
    return UNet(), torch.randn(4, 2, 8, 8), torch.randn(4, 1, 8, 8), mse_loss


def transformer() -> tuple[nn.Module, Tensor, Tensor, Any]:
    tokens = torch.randint(29, (4, 7))
    return GPT2(29, 6, 2, 8, 2), tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous(), next_words


def norms() -> tuple[nn.Module, Tensor, Tensor, Any]:
    layers = [nn.Linear(6, 16), nn.BatchNorm1d(16), nn.GELU(), nn.Dropout(0.5), nn.Linear(16, 16)]
    model = nn.Sequential(*layers, nn.LayerNorm(16), nn.SiLU(), nn.Linear(16, 3), nn.Softplus())
    return model, torch.randn(8, 6), torch.randint(3, (8,)), cross_entropy


@pytest.mark.parametrize("make", [unet, transformer, norms])
def test_the_bytes_alive_at_every_node_are_those_of_a_run(make: Any) -> None:
    torch.manual_seed(0)
    model, x, y, loss = make()
    with fxpipe.compile(
        model,
        ["cpu"] * 2,
        schedule="zb-h1",
        microbatches=2,
        loss=loss,
        example=((x,), {"target": y}),
    ) as pipe:
        found = graphs_of(pipe)
        assert len(found) == 8
        for name, graph in found:
            places = graph.find_nodes(op="placeholder")
            totals = {k for k, node in enumerate(places) if node.name.startswith("total_")}
            for absent in (totals, set()):  # the first micro-batch, and those after it
                arguments, shared = examples(graph)
                for k in totals:
                    shared[k] = [-1 - k]
                    arguments[k] = None if k in absent else arguments[k].clone()
                real = counted(graph, arguments)
                assert predicted(graph, shared, [places[k] for k in absent]) == real, (name, absent)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize(
    "loss",
    [
        *(mse_loss, cross_entropy, functional.smooth_l1_loss, functional.huber_loss),
        *(functional.binary_cross_entropy, functional.soft_margin_loss),
        *(functional.binary_cross_entropy_with_logits, functional.l1_loss),
    ],
)
def test_a_loss_takes_the_memory_of_all_its_elements(loss: Any, reduction: str) -> None:
    x, y = torch.rand(4, 6), torch.rand(4, 6)
    made = make_fx(lambda x, y: [2 * loss(x, y, reduction=reduction)], tracing_mode="fake")(x, y)
    assert predicted(made.graph) == counted(made.graph, [x, y])


@st.composite
def programs(draw: st.DrawFn) -> list[tuple[str, int, int]]:
    """Operations on the values before them, by number."""
    count = draw(st.integers(1, 12))
    kinds = st.sampled_from(["add", "exp", "view", "mm", "split", "cat", "clone"])
    return [
        (draw(kinds), draw(st.integers(0, 1 + place)), draw(st.integers(0, 1 + place)))
        for place in range(count)
    ]


@given(programs(), st.sets(st.integers(0, 12), min_size=1, max_size=3))
def test_any_graph_holds_what_a_run_of_it_holds(
    program: list[tuple[str, int, int]], returned: set[int]
) -> None:
    def run(x: Tensor, y: Tensor) -> list[Tensor]:
        values = [x, y]
        for kind, a, b in program:
            left, right = values[a], values[b]
            match kind:
                case "add":
                    values.append(left + right)
                case "exp":
                    values.append(left.exp())
                case "view":
                    values.append(left.t())
                case "mm":
                    values.append(left @ right)
                case "split":
                    halves = aten.split.Tensor(left, 2, 0)
                    values.append(aten.cat.default([halves[1], halves[0]]))
                case "cat":
                    values.append(aten.cat.default([left, right])[1:5])
                case "clone":
                    values.append(left.clone())
        return [values[i % len(values)] for i in sorted(returned)]

    traced = make_fx(run, tracing_mode="fake")(torch.randn(4, 4), torch.randn(4, 4))
    traced.graph.eliminate_dead_code()
    graph = runnable(traced.graph, "Drawn").graph
    assert predicted(graph) == counted(graph, [torch.randn(4, 4), torch.randn(4, 4)])


def test_arguments_share_memory_where_they_are_said_to() -> None:
    def run(x: Tensor) -> Tensor:
        return x.exp()

    graph = make_fx(lambda x, y: run(x) + y, tracing_mode="fake")(
        torch.randn(4), torch.randn(4)
    ).graph
    x, y = graph.find_nodes(op="placeholder")
    apart, shared = liveness(graph), liveness(graph, [("a",), ("a",)])
    assert apart.of[x] != apart.of[y]
    assert shared.of[x] == shared.of[y]
    assert len(shared.spans) == len(apart.spans) - 1
