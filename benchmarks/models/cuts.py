"""Compare the default cut of every architecture that transformers has with cuts between layers.

Each architecture becomes a small model with random weights, as in ``benchmarks.models.many``, but
with four layers. It is traced as a pipe traces it, and each of its operations gets a cost: the time
of its floating-point operations and of writing its result, at a fixed rate of each, so that every
run gives the same numbers. By these costs the model is cut as by default, and at the best of all
borders between layers: a border is where a submodule of an ``nn.ModuleList`` begins, or one of an
``nn.Sequential`` whose submodules have one type, that is inside of no other such submodule. The
figure is the slowest stage of the default cut, relative to that of the best cut at borders; where
this ratio is less than 1, a cut inside of a layer is better.

Run it with ``python -m benchmarks.models.cuts``; it takes some fifteen minutes on one core. Kinds
and names of architectures choose some, whose rows replace those of the same day's results.
"""

from __future__ import annotations

import itertools
import json
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
import transformers
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop

import fxpipe
from benchmarks.machine import Machine
from benchmarks.models.cases import Batch
from benchmarks.models.exact import MICROBATCHES
from benchmarks.models.many import brief, limited, made, named, tried, warned
from benchmarks.report import RESULTS, Figure, Grid, Report
from examples.plain import one_thread
from fxpipe.compiler.front_end import Call
from fxpipe.ir.traced import Traced
from fxpipe.passes.graph.aliasing import is_view
from fxpipe.passes.partition.assignment import in_order, is_within
from fxpipe.passes.partition.balance import balance
from fxpipe.passes.partition.measure import NodeCost
from fxpipe.torchtools.pytrees import size_in_bytes
from fxpipe.torchtools.state import untouched

NAME = "models-cuts"
"""Of the results."""

STAGES = (2, 4)
LAYERS = 4
PROCESSES = 1
SECONDS = 120
"""How long one model may take."""

FLOPS, BYTES = 50e9, 10e9
"""Per second, of a core: of floating-point operations, and written by other operations."""

MOST = 1.05
"""How much slower than the best cut between layers a cut may be."""


@dataclass(frozen=True)
class Row:
    """One architecture.

    Attributes:
        kind: of model, one of ``KINDS`` of ``many``.
        name: of the architecture.
        ratios: for each number of ``STAGES``, the slowest stage relative to that of the best cut
            between layers; empty where there is none.
        remark: why a ratio is missing, or what is called as it is.
    """

    kind: str
    name: str
    ratios: tuple[str, ...]
    remark: str


def main() -> int:
    """Returns the exit status: 1 where a cut is slower than it may be."""
    told = "Compare cuts of models of transformers."
    return int(any(map(slow, tried(told, attempt, published, reported, PROCESSES))))


def published(machine: Machine) -> dict[tuple[str, str], Row]:
    """The rows of the same day's results, if there are any."""
    path = RESULTS / f"{NAME}-{machine.date}.json"
    grids = json.loads(path.read_text())["grids"] if path.exists() else [{"rows": []}]
    rows = (Row(kind, name, tuple(ratios), told) for kind, name, *ratios, told in grids[0]["rows"])
    return {(row.kind, row.name): row for row in rows}


def slow(row: Row) -> bool:
    """Whether a cut is slower than it may be."""
    return any(ratio and float(ratio) > MOST for ratio in row.ratios)


def reported(rows: Sequence[Row], machine: Machine) -> Report:
    told = {
        "transformers": transformers.__version__,
        "models": f"{LAYERS} layers, or as many as there are kinds of them",
        "costs": f"{FLOPS:.0e} floating-point operations, or {BYTES:.0e} bytes written, per second",
        "ratio": "the default cut's slowest stage relative to that of the best cut between layers",
        "rows": "all of one day; a later call replaces those that it tries again",
    }
    compared = [row for row in rows if any(row.ratios)]
    figures = [
        Figure("architectures", len(rows)),
        Figure("compared", len(compared)),
        Figure(f"more than {MOST} times as slow", sum(map(slow, rows))),
    ]
    for place, stages in enumerate(STAGES):
        ratios = [float(row.ratios[place]) for row in rows if row.ratios[place]]
        if ratios:
            figures.append(Figure(f"median ratio, {stages} stages", median(ratios)))
            figures.append(Figure(f"greatest ratio, {stages} stages", max(ratios)))
    headings = ("kind", "architecture", *(f"ratio, {n} stages" for n in STAGES), "remark")
    cells = [(row.kind, row.name, *row.ratios, row.remark) for row in rows]
    title = "The default cut of every architecture of transformers beside cuts between layers"
    return Report(NAME, title, told, figures, machine, [Grid(headings, cells)])


def attempt(architecture: tuple[str, str]) -> Row:
    """Compare the cuts of one architecture, whatever comes of it."""
    ratios, remarks = ("",) * len(STAGES), list[str]()
    with limited(SECONDS), one_thread(), warned() as leaves:
        try:
            model, batch = deep(*architecture)
            ratios, remarks = compared(model, batch)
        except Exception as error:
            remarks = [named(error)]
    return Row(*architecture, ratios, brief("; ".join([*remarks, *leaves])))


def deep(kind: str, name: str) -> tuple[nn.Module, Batch]:
    """A model with several layers, or with fewer where its configuration needs that."""
    try:
        model, batches = made(kind, name, LAYERS)
    except Exception:
        model, batches = made(kind, name)
    return model, batches[0]


def compared(model: nn.Module, batch: Batch) -> tuple[tuple[str, ...], list[str]]:
    """The ratios, and why one is missing."""
    traced, values = traced_for_step(model, batch)
    costs = costs_of(model, traced, values)
    ratios, remarks = [], []
    for stages in STAGES:
        best = between_layers(model, traced, costs, stages)
        try:
            slowest = max(load.seconds for load in balance(traced, stages, costs).loads)
        except fxpipe.PartitionError as error:
            best = math.inf
            remarks.append(named(error))
        if best < math.inf:
            ratios.append(f"{slowest / best:.3f}")
        else:
            ratios.append("")
    if not remarks and not all(ratios):
        remarks.append("there are too few borders between layers")
    return tuple(ratios), remarks


def traced_for_step(model: nn.Module, batch: Batch) -> tuple[Traced, Mapping[str, Any]]:
    """The graph that a pipe cuts, and its inputs for a micro-batch."""
    with fxpipe.compile(model, ["cpu"], microbatches=MICROBATCHES) as pipe:
        micro = pipe._taken((), batch.kwargs, None, step=True)
        leaves, plans = micro.leaves[0], pipe._compiler.plans
        size = micro.batch.size // MICROBATCHES
        schedule = pipe._compiler.timetable.schedule(MICROBATCHES, "step")
        call = Call(micro.batch, leaves, size, "step", (False,) * len(leaves), schedule)
        plans.look()
        traced = plans.front_end.trace(call)
        return traced, call.facts(traced, model)["values"]


def costs_of(model: nn.Module, traced: Traced, values: Mapping[str, Any]) -> dict[str, NodeCost]:
    """Node → its cost, which is the same in every run."""
    targets = {a.name: a.target for a in (*traced.parameters, *traced.buffers)}
    state = traced.state_of(model)
    given = [
        state[targets[node.name]] if node.name in targets else values.get(node.name, 0)
        for node in traced.graph.nodes
        if node.op == "placeholder"
    ]
    counter = _Counter(traced.module)
    with torch.no_grad(), untouched(model):
        counter.run(*given)
    return counter.costs


class _Counter(fx.Interpreter):
    """Runs a graph and counts what each node costs."""

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module)
        self.costs = {node.name: NodeCost(0.0, 0.0, 0) for node in module.graph.nodes}

    def run_node(self, n: fx.Node) -> Any:
        with FlopCounterMode(display=False, custom_mapping=_ATTENTION) as counter:
            value = super().run_node(n)
        sizes = [size_in_bytes(x) for x in pytree.tree_leaves(value) if isinstance(x, Tensor)]
        if n.op not in ("placeholder", "output", "get_attr"):
            written = 0 if is_view(n) else sum(sizes)
            seconds = counter.get_total_flops() / FLOPS + written / BYTES
            # the backward computes two products for each of the forward
            self.costs[n.name] = NodeCost(seconds, 2 * seconds, sum(sizes))
        return value


def _attention(query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> int:
    return int(sdpa_flop(query, key, value))


_ATTENTION = {torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default: _attention}
"""What the counter does not know."""


def between_layers(
    model: nn.Module, traced: Traced, costs: Mapping[str, NodeCost], stages: int
) -> float:
    """The slowest stage of the best cut at borders between layers; infinite if there is none."""
    nodes = in_order(traced)
    starts = (next((i for i, n in enumerate(nodes) if is_within(n, x)), 0) for x in layers(model))
    borders = sorted(set(starts) - {0})
    ahead = [0.0, *itertools.accumulate(costs[node.name].seconds for node in nodes)]
    places = [*borders, len(nodes)]
    slowest = {place: ahead[place] for place in places}  # of the stages up to a place
    for _ in range(stages - 1):
        slowest = {
            end: min(
                (max(slowest[p], ahead[end] - ahead[p]) for p in borders if p < end),
                default=math.inf,
            )
            for end in places
        }
    return slowest[len(nodes)]


def layers(model: nn.Module) -> list[str]:
    """The submodules in lists, and in sequences of one type, without those inside of others."""
    found: list[str] = []
    for name, module in model.named_modules():
        children = list(module.children())
        alike = isinstance(module, nn.Sequential) and len(set(map(type, children))) == 1
        inside = any(f"{name}.".startswith(f"{layer}.") for layer in found)
        if (isinstance(module, nn.ModuleList) or alike) and len(children) > 1 and not inside:
            found += [f"{name}.{child}".strip(".") for child, _ in module.named_children()]
    return found


if __name__ == "__main__":
    sys.exit(main())
