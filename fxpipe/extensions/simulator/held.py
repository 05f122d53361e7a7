"""The bytes that the stages of a plan hold, counted by storage from their graphs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

from torch import Tensor, fx
from torch.optim import Optimizer

from fxpipe.extensions.simulator.liveness import Liveness, liveness
from fxpipe.extensions.simulator.optimizers import optimizer_memory
from fxpipe.extensions.simulator.sizes import Crossing, GraphInput, Sizes, Storage, Workspace
from fxpipe.ir.plan import Plan, Stage
from fxpipe.ir.value import outputs_of
from fxpipe.kernels.graph import GraphKernel, is_compiled
from fxpipe.torchtools.pytrees import in_blocks, size_in_bytes


def plan_sizes(
    plan: Plan,
    state: Mapping[str, Tensor],
    optimizers: Sequence[Optimizer | None],
    *,
    early: int = 0,
    elsewhere: Collection[int] = (),
    placement: Sequence[int] = (),
    block: int = 1,
) -> Sizes:
    """The bytes of everything that the stages of a differentiated plan hold, with the state of
    their optimizers after a step.

    They are for the example's micro-batch, and count whole storages.

    Args:
        plan: the plan, with kernels.
        state: name in the model → parameter or buffer.
        optimizers: stage → its optimizer.
        early: how many values from each other device may be in memory before their receives.
        elsewhere: stages of other processes. They have gradients if this process's stages have.
        placement: stage → device; empty if each has its own.
        block: of how many bytes what the devices allocate is a multiple.
    """

    def _bytes(tensors: Iterable[Tensor]) -> int:
        return _in_blocks(tensors, block)

    homes = placement or range(len(plan.stages))
    graphs = {
        stage.index: GraphMemory(plan, stage, stage.kernel, homes, block)
        if isinstance(stage.kernel, GraphKernel)
        else StageMemory(plan, stage)
        for stage in plan.stages
    }
    by_stage = dict(enumerate(optimizers))
    tensors = {s.index: [state[a.target] for a in s.parameters] for s in plan.stages}
    buffers = {s.index: _bytes(state[a.target] for a in s.buffers) for s in plan.stages}
    written = {s.index: _bytes(state[w.target] for w in s.writes) for s in plan.stages}
    trained = {index: [x for x in whole if x.requires_grad] for index, whole in tensors.items()}
    made = {index: by_stage.get(index) for index in trained}
    optimizing = {i: (0, 0) if o is None else optimizer_memory(o, block) for i, o in made.items()}
    gradients = {
        index: _bytes(x.grad for x in some if x.grad is not None) for index, some in trained.items()
    }
    if any(gradients.values()):
        gradients |= {index: _bytes(trained[index]) for index in elsewhere}
    return Sizes(
        {name: spec.bytes for name, spec in plan.specs.items()},
        early=early,
        block=block,
        saved={index: each.saved.bytes for index, each in graphs.items()},
        deferred={index: each.deferred.bytes for index, each in graphs.items()},
        state=written,
        parameters={s.index: _bytes(tensors[s.index]) for s in plan.stages},
        each={i: [in_blocks(size_in_bytes(x), block) for x in own] for i, own in tensors.items()},
        buffers=buffers,
        gradients={index: _bytes(some) for index, some in trained.items()},
        elements={
            index: [(x.numel() * x.requires_grad, x.element_size()) for x in whole]
            for index, whole in tensors.items()
        },
        buckets={s.index: s.buckets for s in plan.stages if s.buckets},
        optimizer={
            # written buffers count twice, as a step reads copies of them
            index: keeps + gradients[index] + written[index] + buffers[index]
            for index, (keeps, _) in optimizing.items()
        },
        updating={index: step for index, (_, step) in optimizing.items()},
        holds={i: frozenset(value for value, _ in each.saved.holds) for i, each in graphs.items()},
        deferred_holds={index: each.deferred.holds for index, each in graphs.items()},
        places={key: place for each in graphs.values() for key, place in each.places.items()},
        runs={key: run for each in graphs.values() for key, run in each.runs.items()},
        adding={key: run for each in graphs.values() for key, run in each.adding.items()},
    )


def _in_blocks(tensors: Iterable[Tensor], block: int) -> int:
    return sum(in_blocks(size_in_bytes(tensor), block) for tensor in tensors)


_Owner = Crossing | Literal["fixed", "kept", "made"]
"""The owner of a storage that is an argument of a graph: a value that crosses between stages, or
its gradient; or ``fixed`` is always allocated, ``kept`` was kept for this graph only, and ``made``
is made for it before it begins."""

_Owners = Mapping[int, _Owner]
"""Storage of a graph → its owner; the graph itself makes the storages that are missing."""


class Kept(NamedTuple):
    """The tensors that one graph keeps for another.

    Attributes:
        bytes: the bytes of their storages that nothing else holds, each counted once.
        holds: the values between stages, and gradients of such, among them.
        lies_in: kept tensor → its storages in the graph.
        owners: storage → its owner in the graph that gets it.
    """

    bytes: int = 0
    holds: frozenset[Crossing] = frozenset()
    lies_in: tuple[tuple[int, ...], ...] = ()
    owners: _Owners = MappingProxyType({})


class StageMemory:
    """The memory of a stage for one micro-batch of the example; for the attributes see Sizes.
    ``saved`` is kept by forward for backward, and ``deferred`` by the first half of backward for
    the second. Of one without graphs it is known that it keeps its inputs and outputs."""

    def __init__(self, plan: Plan, stage: Stage) -> None:
        self._plan, self._stage = plan, stage
        self.places: dict[tuple[int, str, bool], Storage] = {}
        self.adding: dict[tuple[str, int], Workspace] = {}
        self.runs = {(letter, stage.index): Workspace((0,)) for letter in "FRBIW"}
        into = (edge.value for edge in plan.edges_into(stage.index))
        kept = frozenset((x, False) for x in (*into, *outputs_of(plan.edges_from(stage.index))))
        self.saved, self.deferred = Kept(0, kept), Kept()


class GraphMemory(StageMemory):
    """The same, told by the stage's graphs."""

    def __init__(
        self, plan: Plan, stage: Stage, kernel: GraphKernel, placement: Sequence[int], block: int
    ) -> None:
        super().__init__(plan, stage)
        self._block = block
        self._kernel = kernel
        home = placement[stage.index]
        self._beside = {stage for stage, device in enumerate(placement) if device == home}
        self.saved, self.deferred = self._forward(), Kept()
        if kernel.backward_graph is not None:
            self._backward("B", kernel.backward_graph)
        if kernel.input_grad_graph is not None:
            self.deferred = self._backward("I", kernel.input_grad_graph)
        if kernel.weight_grad_graph is not None:
            self._run("W", kernel.weight_grad_graph, self.deferred)

    def _forward(self) -> Kept:
        stage, kernel = self._stage, self._kernel
        graph = kernel.forward_graph.graph
        live, (arguments, returned) = liveness(graph, block=self._block), _ends(graph)
        constants = len(stage.parameters) + len(stage.buffers)
        owners: dict[int, _Owner] = dict.fromkeys(live.lies_in(arguments[:constants]), "fixed")
        inputs, edges = arguments[constants:], self._plan.edges_into(stage.index)
        for edge, node, wanted in zip(edges, inputs, kernel.input_strides, strict=True):
            arrives = None if edge.source in self._beside else wanted
            owner = _owner((edge.value, False), live, node, arrives, self._block)
            owners = dict.fromkeys(live.of[node], owner) | owners
        run = _workspace(live, owners)
        self.runs["F", stage.index] = self.runs["R", stage.index] = run
        names = outputs_of(self._plan.edges_from(stage.index))
        for name, node in zip(names, returned, strict=False):
            self._place((name, False), live, node, owners)
        saved = returned[kernel.outputs + kernel.writes :]
        kept = _kept(live, saved, owners)
        # buffers that are written anew for each micro-batch are kept as they were before
        written = {write.target for write in stage.writes}
        buffers = zip(stage.buffers, arguments[len(stage.parameters) : constants], strict=True)
        changing = live.lies_in(node for buffer, node in buffers if buffer.target in written)
        before = {*changing} & {*live.lies_in(saved)}
        return kept._replace(bytes=kept.bytes + sum(live.spans[each].bytes for each in before))

    def _backward(self, letter: str, module: fx.GraphModule) -> Kept:
        """Count backward, or its first half. Returns what that keeps for the second half."""
        live, owners, returned = self._run(letter, module, self.saved)
        names = outputs_of(self._plan.gradients_from(self._stage.index))
        for name, node in zip(names, returned, strict=False):
            self._place((name, True), live, node, owners)
        return _kept(live, returned[self._kernel.input_gradients :], owners)

    def _run(
        self, letter: str, module: fx.GraphModule, kept: Kept
    ) -> tuple[Liveness, dict[int, _Owner], list[Any]]:
        """Count a backward graph with arguments ``[kept, output gradients, totals]``, with sums of
        gradients that are there already and without. Returns what holds without."""
        stage, kernel, first = self._stage.index, self._kernel, len(kept.lies_in)
        edges = self._plan.gradients_into(stage)
        parts = Counter(edge.value for edge in edges)
        beside = {edge.value for edge in edges if edge.source in self._beside}
        crossing = [] if letter == "W" else [*parts]
        arguments, returned = _ends(module.graph)
        gradients, totals = arguments[first:][: len(crossing)], arguments[first + len(crossing) :]
        ways = [(self.adding, ()), (self.runs, totals)] if totals else [(self.runs, ())]
        for counted, absent in ways:
            live = liveness(module.graph, kept.lies_in, absent, self._block)
            owners: dict[int, _Owner] = dict.fromkeys(live.lies_in(totals), "fixed")
            for node, homes in zip(arguments, kept.lies_in, strict=False):
                for storage, home in zip(live.of[node], homes, strict=True):
                    owners[storage] = kept.owners[home]
            freed = []
            strides = zip(crossing, gradients, kernel.gradient_strides, strict=False)
            wanted: tuple[int, ...] | None
            for value, node, wanted in strides:
                wanted = None if value in beside else wanted
                owner = _owner((value, True), live, node, wanted, self._block)
                if parts[value] > 1:  # their sum
                    owner = "made"
                elif owner == "made":
                    freed.append(GraphInput((value, True), 0, -1))
                owners |= dict.fromkeys(live.of[node], owner)
            counted[letter, stage] = _workspace(live, owners, freed)
        if is_compiled(module):  # it always adds, at first to zeros
            zeros = _in_blocks((node.meta["val"] for node in totals), self._block)
            run = self.runs[letter, stage]
            levels = tuple(zeros + level for level in run.levels)
            self.runs[letter, stage] = replace(run, levels=levels)
        return live, owners, returned

    def _place(
        self, crossing: Crossing, live: Liveness, node: Any, owners: dict[int, _Owner]
    ) -> None:
        """Note the storage of a value or gradient that the stage makes."""
        for storage in live.lies_in([node]):
            owner = owners.get(storage, "kept")
            if owner in ("kept", "made"):
                owner = owners[storage] = crossing
            home = None if isinstance(owner, str) else owner
            place = Storage(home, live.spans[storage].bytes)
            self.places[self._stage.index, *crossing] = place


def _owner(
    crossing: Crossing,
    live: Liveness,
    node: fx.Node,
    wanted: tuple[int, ...] | None,
    block: int,
) -> _Owner:
    """The owner of an argument. One that comes from another device, where ``wanted`` has its
    strides, may arrive in others than these, with which the graph was traced: then a copy is made
    for the graph, and counts in place of it."""
    value = node.meta.get("val")
    # unlike ``clone``, ``empty_like`` gives a fake tensor other strides than a real one
    if not isinstance(value, Tensor) or wanted is None or value.clone().stride() == wanted:
        return crossing
    extent = 1 + sum((n - 1) * stride for n, stride in zip(value.shape, wanted, strict=True))
    size = in_blocks(extent * value.element_size() if value.numel() else 0, block)
    for storage in live.of[node]:
        live.spans[storage] = live.spans[storage]._replace(bytes=size)
    return "made"


def _ends(graph: fx.Graph) -> tuple[list[fx.Node], list[Any]]:
    """The arguments of a graph, and what it returns."""
    *nodes, output = graph.nodes
    returned: Any = output.args[0]
    return [node for node in nodes if node.op == "placeholder"], list(returned)


def _kept(live: Liveness, nodes: Sequence[Any], owners: _Owners) -> Kept:
    """Those of a graph's values that it keeps for another graph."""
    passed: dict[int, _Owner] = {}
    for storage in live.lies_in(nodes):
        owner = owners.get(storage, "kept")
        passed[storage] = "kept" if owner == "made" else owner
    return Kept(
        sum(live.spans[each].bytes for each, owner in passed.items() if owner == "kept"),
        frozenset(owner for owner in passed.values() if not isinstance(owner, str)),
        tuple(live.lies_in([node]) for node in nodes),
        passed,
    )


def _workspace(
    live: Liveness, owners: _Owners, freed: Sequence[GraphInput] | None = None
) -> Workspace:
    """The memory that a graph needs while it runs, besides its arguments. Arguments that were kept
    or made for this graph only are freed after their last use. So are, if nothing else holds them,
    those of ``freed``, and unless that is None all values and gradients."""
    changes = [0] * (live.steps + 2)
    frees = [*(freed or ())]
    for storage, (size, first, last) in live.spans.items():
        owner = owners.get(storage, "made")
        if owner == "made":
            changes[max(first, 0)] += size
        if owner in ("made", "kept"):
            changes[last + 1] -= size
        elif freed is not None and not isinstance(owner, str):
            frees.append(GraphInput(owner, size, last))
    return Workspace(tuple(accumulate(changes[:-1])), tuple(frees))
