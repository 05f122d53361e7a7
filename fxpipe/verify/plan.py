"""The verifier of a Plan: edges, ownership, and each stage's graph against its edges.

It reports all faults at once, in time proportional to the numbers of nodes and edges.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from torch import fx
from torch._ops import OpOverload

from fxpipe.errors import Fault, VerificationError
from fxpipe.ir.plan import Argument, Plan, Stage, Write
from fxpipe.ir.value import HOST, Edge, outputs_of
from fxpipe.text.plan import print_function
from fxpipe.text.scan import is_name

_WRITING = frozenset(
    (
        *(operator.setitem, operator.delitem, operator.iadd, operator.isub, operator.imul),
        *(operator.itruediv, operator.ifloordiv, operator.imod, operator.ipow, operator.imatmul),
        *(operator.iand, operator.ior, operator.ixor, operator.ilshift, operator.irshift),
    )
)


_WAYS = (
    ("backward", "make the value no later than where it is used"),
    ("forward", "make the gradient no earlier in the pipeline than where it is used"),
)
"""Where an edge of a forward's value, and one of a backward's, must not run, and the cures."""


def verify_plan(plan: Plan) -> Plan:
    """Return the plan, or raise VerificationError with every fault in it."""
    faults = [
        *_stages(plan),
        *edge_faults((*plan.edges, *plan.gradients), len(plan.stages)),
        *_parameters(plan),
        *_buffers(plan),
    ]
    for position, stage in enumerate(plan.stages):
        faults += _StageGraph(plan, stage, position).faults()
    if faults:
        raise VerificationError("the plan", faults, plan)
    return plan


def _stages(plan: Plan) -> Iterator[Fault]:
    if not plan.stages:
        yield Fault("there is no stage", "give the plan at least one")
    for position, stage in enumerate(plan.stages):
        if stage.index != position:
            yield Fault(
                f"stands at place {position}, but has the index {stage.index}",
                "number the stages from 0 in pipeline order",
                subject=f"stage {stage.index}",
            )


def _runs_forward(edge: Edge, stages: int) -> bool:
    if not (HOST <= edge.source < stages and HOST <= edge.target < stages):
        return False
    if HOST in (edge.source, edge.target):
        return edge.source != edge.target
    return edge.source < edge.target


def edge_faults(edges: Sequence[Edge], stages: int) -> Iterator[Fault]:
    """Check the edges of a plan or a program: their ends, and that a value of forwards has one
    producer. That of backwards may be a sum of which each of several stages makes a part."""
    seen: set[Edge] = set()
    producers: dict[str, dict[int, None]] = {}
    for edge in edges:
        wrong: list[tuple[str, str]] = []
        if not is_name(edge.value):
            wrong.append((f"{edge.value!r} is no name of a value", "give it an identifier"))
        for end in dict.fromkeys((edge.source, edge.target)):
            if not HOST <= end < stages:
                cure = f"an edge goes between the host and the stages 0 to {stages - 1}"
                wrong.append((f"stage {end} does not exist", cure))
        if edge.source == edge.target:
            wrong.append(("starts where it ends", "remove it"))
        elif HOST not in (edge.source, edge.target) and (edge.source > edge.target) is not (
            edge.gradient
        ):
            way, cure = _WAYS[edge.gradient]
            wrong.append((f"runs {way}", cure))
        if edge in seen:
            wrong.append(("is there twice", "one edge carries a value to a stage"))
        seen.add(edge)
        if not edge.gradient:
            producers.setdefault(edge.value, {})[edge.source] = None
        for what, cure in wrong:
            yield Fault(what, cure, subject=f"edge {edge}")
    for value, sources in producers.items():
        if len(sources) > 1:
            names = ["the host" if source == HOST else f"stage {source}" for source in sources]
            yield Fault(
                f"comes from {' and '.join(names)}",
                "send a value straight from the stage that makes it, and give a copy of an input "
                "a name of its own",
                subject=f"value {value}",
            )


def _parameters(plan: Plan) -> Iterator[Fault]:
    for target, owners in _by_target(stage.parameters for stage in plan.stages).items():
        if len(owners) > 1:
            yield Fault(
                f"is owned {_by_stages(owners)}",
                "let the first stage that uses it own it, once, and send it to the others",
                subject=f"parameter {target}",
            )


def _buffers(plan: Plan) -> Iterator[Fault]:
    readers = _by_target(stage.buffers for stage in plan.stages)
    writers = _by_target(stage.writes for stage in plan.stages)
    for target, stages in writers.items():
        subject = f"buffer {target}"
        if len(stages) > 1:
            yield Fault(
                f"is written {_by_stages(stages)}",
                "put all that writes it into one stage, and write it once",
                subject=subject,
            )
        others = [reader for reader in readers.get(target, []) if reader not in stages]
        if others:
            yield Fault(
                f"is written {_by_stages(stages)} and read {_by_stages(others)}",
                "put all that reads it into the stage that writes it",
                subject=subject,
            )


def _by_target(stages: Iterable[tuple[Argument | Write, ...]]) -> dict[str, list[int]]:
    """Name in the model → the stages that hold it, one entry for each time."""
    holders: dict[str, list[int]] = {}
    for position, items in enumerate(stages):
        for item in items:
            holders.setdefault(item.target, []).append(position)
    return holders


def _by_stages(stages: Iterable[int]) -> str:
    counts = Counter(stages)
    parts = (f"stage {stage}" + (f" {n} times" if n > 1 else "") for stage, n in counts.items())
    return "by " + " and ".join(parts)


class _StageGraph:
    """The rules of one stage's graph."""

    def __init__(self, plan: Plan, stage: Stage, position: int) -> None:
        self.subject = f"stage {position}"
        self.stage, self.graph = stage, stage.graph.graph
        # those that run another way are reported as edges
        into, out_of = plan.edges_into(position), plan.edges_from(position)
        self.into = [edge for edge in into if _runs_forward(edge, len(plan.stages))]
        self.out_of = [edge for edge in out_of if _runs_forward(edge, len(plan.stages))]

    def faults(self) -> Iterator[Fault]:
        yield from self._lint()
        yield from self._functional()
        yield from self._placeholders()
        yield from self._returned()
        yield from self._crossing()

    def _fault(self, what: str, cure: str, node: str = "") -> Fault:
        subject = f"{self.subject}, node {node}" if node else self.subject
        return Fault(what, cure, subject=subject)

    def _lint(self) -> Iterator[Fault]:
        try:
            self.graph.lint()
        except (RuntimeError, ValueError) as error:
            what = str(error).partition("\n")[0]
            yield self._fault(f"its graph is malformed: {what}", "repair the pass that made it")

    def _functional(self) -> Iterator[Fault]:
        """Check that nothing is written in place and no module called."""
        for node in self.graph.nodes:
            if _writes_in_place(node):
                called = node.target if node.op == "call_method" else print_function(node.target)
                yield self._fault(
                    f"{called} writes in place",
                    "make the graph functional before it is cut",
                    node.name,
                )
            elif node.op == "call_module":
                yield self._fault(
                    f"calls the module {node.target}",
                    "call it by a function, see fxpipe/ir/called.py",
                    node.name,
                )

    def _placeholders(self) -> Iterator[Fault]:
        """Check that the graph has one placeholder for each thing that it reads, and no other."""
        held = [a.name for a in (*self.stage.parameters, *self.stage.buffers)]
        wanted = held + [edge.value for edge in self.into]
        found = [node.name for node in self.graph.nodes if node.op == "placeholder"]
        has, needs = Counter(found), Counter(wanted)
        cure = "take exactly the stage's parameters, buffers and the values of its edges"
        for name in dict.fromkeys((*wanted, *found)):
            if needs[name] > 1:
                yield self._fault(f"reads {needs[name]} things named {name!r}", "rename them")
            elif has[name] < needs[name]:
                yield self._fault(f"its graph has no placeholder for {name!r}", cure)
            elif has[name] > needs[name]:
                times = "more than one" if needs[name] else "a superfluous"
                yield self._fault(f"its graph has {times} placeholder for {name!r}", cure)

    def _returned(self) -> Iterator[Fault]:
        """Check that the graph ends with its one return, of one tuple of the right values."""
        ends = [node for node in self.graph.nodes if node.op == "output"]
        if len(ends) != 1 or next(iter(reversed(self.graph.nodes))) is not ends[0]:
            yield self._fault(
                "its graph does not end with its one return", "end it with one output node"
            )
            return
        value = ends[0].args[0]
        cure = "return one tuple: the values of its edges, each once, then its writes"
        if not isinstance(value, tuple) or not all(isinstance(item, fx.Node) for item in value):
            yield self._fault("its graph returns no tuple of values", cure)
            return
        found = ", ".join(item.name for item in value if isinstance(item, fx.Node))
        wanted = ", ".join(
            (*outputs_of(self.out_of), *(write.value for write in self.stage.writes))
        )
        if found != wanted:
            yield self._fault(
                f"its graph returns ({found}), but its edges and writes are ({wanted})", cure
            )

    def _crossing(self) -> Iterator[Fault]:
        """Check that the graph makes each value that leaves the stage."""
        made = {node.name for node in self.graph.nodes}
        for name in outputs_of(self.out_of):
            if name not in made:
                yield self._fault(
                    f"an edge takes {name!r}, which no node makes", "name the node that makes it"
                )


def _writes_in_place(node: fx.Node) -> bool:
    if node.op == "call_method":
        name = str(node.target)
        return name.endswith("_") and not name.endswith("__")
    if isinstance(node.target, OpOverload):
        return bool(node.target._schema.is_mutable)
    return node.op == "call_function" and node.target in _WRITING
