"""The verifier of a graph, as traced or as a stage of a Plan: against its edges, then."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Iterator, Sequence

import torch
from torch import fx
from torch._ops import OpOverload

from fxpipe.errors import Fault
from fxpipe.ir.plan import Stage, pop, stash
from fxpipe.ir.value import Edge, outputs_of
from fxpipe.text.target import print_function

_WRITING = frozenset(
    (
        *(operator.setitem, operator.delitem, operator.iadd, operator.isub, operator.imul),
        *(operator.itruediv, operator.ifloordiv, operator.imod, operator.ipow, operator.imatmul),
        *(operator.iand, operator.ior, operator.ixor, operator.ilshift, operator.irshift),
    )
)


def verify_graph(
    stage: Stage, position: int, into: Sequence[Edge], out_of: Sequence[Edge]
) -> list[Fault]:
    """Every fault of a stage's graph.

    Args:
        stage: the stage.
        position: its place in the plan, which its edges name.
        into: the edges that it reads, in the plan's order.
        out_of: the edges that it writes, in the plan's order.
    """
    return list(_StageGraph(stage, position, into, out_of).faults())


class GraphFaults:
    """The rules of every graph, whole or a stage's.

    Attributes:
        subject: whose graph it is, for messages; empty for the whole model's.
        graph: the graph.
        leaves: whether it calls leaf modules, and so runs under autograd.
        nodes: its nodes by name.
    """

    def __init__(self, subject: str, graph: fx.Graph, *, leaves: bool) -> None:
        self.subject = subject
        self.graph = graph
        self.leaves = leaves
        self.nodes = {node.name: node for node in graph.nodes}

    def _fault(self, what: str, cure: str, node: str = "") -> Fault:
        parts = (self.subject, f"node {node}" if node else "")
        return Fault(what, cure, subject=", ".join(filter(None, parts)))

    def _lint(self) -> Iterator[Fault]:
        try:
            self.graph.lint()
        except (RuntimeError, ValueError) as error:
            what = str(error).partition("\n")[0]
            yield self._fault(f"its graph is malformed: {what}", "repair the pass that made it")

    def _functional(self) -> Iterator[Fault]:
        """Nothing is written in place and no module is called, unless autograd runs the graph."""
        if self.leaves:
            return
        owner = "stage" if self.subject else "graph"
        for node in self.graph.nodes:
            if _writes_in_place(node):
                yield self._fault(
                    f"{_name(node)} writes in place",
                    "make the graph functional before it is cut",
                    node.name,
                )
            elif node.op == "call_module":
                yield self._fault(
                    f"calls the module {node.target}",
                    f"set the {owner}'s 'leaves', so that it runs under autograd",
                    node.name,
                )

    def _held_by_leaf(self, name: str, target: str) -> bool:
        """A tensor that a leaf module reads or writes itself goes by its name in the model."""
        return self.leaves and name == target

    def _same(
        self, word: str, found: Sequence[str], wanted: Sequence[str], cure: str
    ) -> Iterator[Fault]:
        """The graph has one of these nodes for each wanted name, and no other."""
        has, needs = Counter(found), Counter(wanted)
        for name in dict.fromkeys((*wanted, *found)):
            if needs[name] > 1:
                yield self._fault(f"reads {needs[name]} things named {name!r}", "rename them")
            elif has[name] < needs[name]:
                yield self._fault(f"its graph has no {word} for {name!r}", cure)
            elif has[name] > needs[name]:
                times = "more than one" if needs[name] else "a superfluous"
                yield self._fault(f"its graph has {times} {word} for {name!r}", cure)

    def _returns(self, wanted: Sequence[str], what: str, cure: str) -> Iterator[Fault]:
        """The graph ends with one return, of one tuple of these values.

        Args:
            wanted: the values.
            what: what they are, such as ``edges and writes``.
            cure: how to return them.
        """
        ends = [node for node in self.graph.nodes if node.op == "output"]
        if len(ends) != 1 or next(iter(reversed(self.graph.nodes))) is not ends[0]:
            yield self._fault(
                "its graph does not end with its one return", "end it with one output node"
            )
            return
        value = ends[0].args[0]
        if not isinstance(value, tuple) or not all(isinstance(item, fx.Node) for item in value):
            yield self._fault("its graph returns no tuple of values", cure)
            return
        found = [item.name for item in value if isinstance(item, fx.Node)]
        if found != [*wanted]:
            yield self._fault(
                f"its graph returns ({', '.join(found)}), but its {what} are ({', '.join(wanted)})",
                cure,
            )

    def _is_single(self, node: fx.Node) -> bool:
        """Whether a node gives one value, as far as can be known."""
        if isinstance(node.meta.get("val"), (tuple, list)):
            return False
        if isinstance(node.target, OpOverload):
            returns = node.target._schema.returns
            return len(returns) == 1 and not isinstance(returns[0].type, torch.ListType)
        # In a functional graph, items are taken of tuples alone.
        return self.leaves or all(user.target is not operator.getitem for user in node.users)


class _StageGraph(GraphFaults):
    """One stage's graph with its edges at hand."""

    def __init__(
        self, stage: Stage, position: int, into: Sequence[Edge], out_of: Sequence[Edge]
    ) -> None:
        super().__init__(f"stage {position}", stage.graph.graph, leaves=stage.leaves)
        self.stage = stage
        self.into = into
        self.out_of = out_of

    def faults(self) -> Iterator[Fault]:
        yield from self._lint()
        yield from self._functional()
        yield from self._placeholders()
        yield from self._pops()
        yield from self._stashes()
        yield from self._returned()
        yield from self._crossing()

    def _placeholders(self) -> Iterator[Fault]:
        held = [
            argument.name
            for argument in (*self.stage.parameters, *self.stage.buffers)
            if not self._held_by_leaf(argument.name, argument.target)
        ]
        arriving = [edge.value for edge in self.into if edge.kind != "skip"]
        found = [node.name for node in self.graph.nodes if node.op == "placeholder"]
        yield from self._same(
            "placeholder",
            found,
            held + arriving,
            "take exactly the stage's parameters, buffers and the values of its in and act edges",
        )

    def _pops(self) -> Iterator[Fault]:
        found = []
        for node in self.graph.nodes:
            if node.op == "call_function" and node.target is pop:
                if len(node.args) != 1 or not isinstance(node.args[0], str) or node.kwargs:
                    yield self._fault("is no pop('value')", "pop one value by its name", node.name)
                else:
                    found.append(node.args[0])
        arriving = [edge.value for edge in self.into if edge.kind == "skip"]
        yield from self._same(
            "pop", found, arriving, "pop exactly the values of the skip edges into the stage, once"
        )

    def _stashes(self) -> Iterator[Fault]:
        found = []
        for node in self.graph.nodes:
            if node.op == "call_function" and node.target is stash:
                match node.args:
                    case (str(name), fx.Node(name=value)) if name == value and not node.kwargs:
                        found.append(name)
                    case _:
                        yield self._fault(
                            "is no stash('value', value)",
                            "stash a node under its own name",
                            node.name,
                        )
        leaving = [edge.value for edge in self.out_of if edge.kind == "skip"]
        yield from self._same(
            "stash",
            found,
            list(dict.fromkeys(leaving)),
            "stash exactly the values of the skip edges from the stage, each once",
        )

    def _returned(self) -> Iterator[Fault]:
        leaving = tuple(edge for edge in self.out_of if edge.kind != "skip")
        writes = [w for w in self.stage.writes if not self._held_by_leaf(w.value, w.target)]
        yield from self._returns(
            (*outputs_of(leaving), *(write.value for write in writes)),
            "edges and writes",
            "return one tuple: the values of its act and out edges, each once, then its writes",
        )

    def _crossing(self) -> Iterator[Fault]:
        """What leaves the stage is one value that its graph makes."""
        for name in outputs_of(tuple(self.out_of)):
            node = self.nodes.get(name)
            if node is None:
                yield self._fault(
                    f"an edge takes {name!r}, which no node makes", "name the node that makes it"
                )
            elif not self._is_single(node):
                yield self._fault(
                    "crosses, but is no single value",
                    "send the items of it that are used, each by its own edge",
                    name,
                )


def _writes_in_place(node: fx.Node) -> bool:
    if node.op == "call_method":
        name = str(node.target)
        return name.endswith("_") and not name.endswith("__")
    if isinstance(node.target, OpOverload):
        return bool(node.target._schema.is_mutable)
    return node.op == "call_function" and node.target in _WRITING


def _name(node: fx.Node) -> str:
    """What a node calls."""
    return node.target if isinstance(node.target, str) else print_function(node.target)
