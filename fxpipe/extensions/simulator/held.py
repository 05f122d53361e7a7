"""The bytes that the stages of a plan hold, counted by storage from their graphs."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

from torch import Tensor, fx
from torch.optim import Optimizer

from fxpipe.extensions.simulator.liveness import Liveness, liveness
from fxpipe.extensions.simulator.optimizers import optimizer_memory
from fxpipe.extensions.simulator.sizes import Crossing, GraphInput, Left, Sizes, Storage, Workspace
from fxpipe.ir.plan import Plan, Stage
from fxpipe.ir.value import outputs_of
from fxpipe.kernels.graph import BucketGraph, GraphKernel, is_compiled
from fxpipe.torchtools.pytrees import size_in_bytes


def plan_sizes(
    plan: Plan,
    state: Mapping[str, Tensor],
    optimizers: Sequence[Optimizer | None],
    *,
    early: float = 0,
    elsewhere: Collection[int] = (),
) -> Sizes:
    """The bytes of everything that the stages of a differentiated plan hold, with the state of
    their optimizers after a step.

    They are for the example's micro-batch, and count whole storages. What a stage under autograd
    takes was counted when it ran.

    Args:
        plan: the plan, with kernels.
        state: name in the model → parameter or buffer.
        optimizers: stage → its optimizer.
        early: how many values from each other device may be in memory before their receives.
        elsewhere: stages of other processes. They have gradients if this process's stages have.
    """
    graphs = {
        stage.index: GraphMemory(plan, stage, stage.kernel)
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
    optimizing = {i: (0, 0) if o is None else optimizer_memory(o) for i, o in made.items()}
    gradients = {
        index: _bytes(x.grad for x in some if x.grad is not None) for index, some in trained.items()
    }
    if any(gradients.values()):
        gradients |= {index: _bytes(trained[index]) for index in elsewhere}
    return Sizes(
        {name: spec.bytes for name, spec in plan.specs.items()},
        early=early,
        saved={index: each.saved.bytes for index, each in graphs.items()},
        deferred={index: each.deferred.bytes for index, each in graphs.items()},
        state=written,
        saved_state={index: each.saved_state for index, each in graphs.items()},
        parameters={s.index: _bytes(tensors[s.index]) for s in plan.stages},
        buffers=buffers,
        gradients={index: _bytes(some) for index, some in trained.items()},
        elements={
            index: [(x.numel() * x.requires_grad, x.element_size()) for x in whole]
            for index, whole in tensors.items()
        },
        buckets={s.index: s.buckets for s in plan.stages if s.buckets},
        started={} if any(optimizers) else gradients,
        optimizer={
            # written buffers count twice, as a step reads copies of them
            index: keeps + gradients[index] + written[index] + buffers[index]
            for index, (keeps, _) in optimizing.items()
        },
        updating={index: step for index, (_, step) in optimizing.items()},
        holds={index: each.saved.values for index, each in graphs.items()},
        deferred_holds={index: each.deferred.values for index, each in graphs.items()},
        deferred_gradients={index: each.deferred.gradients for index, each in graphs.items()},
        places={key: place for each in graphs.values() for key, place in each.places.items()},
        laid_out={key: size for each in graphs.values() for key, size in each.laid_out.items()},
        runs={key: run for each in graphs.values() for key, run in each.runs.items()},
        adding={key: run for each in graphs.values() for key, run in each.adding.items()},
        left={key: left for each in graphs.values() for key, left in each.left.items()},
    )


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum(map(size_in_bytes, tensors))


class _Owner(NamedTuple):
    """The owner of a storage that is an argument of a graph.

    Attributes:
        kind: ``fixed`` is always allocated; ``value`` and ``gradient`` cross between stages;
            ``kept`` was kept for this graph only; ``sum`` is a sum of gradients.
        value: the name of the value that crosses.
    """

    kind: Literal["fixed", "value", "gradient", "kept", "sum"]
    value: str = ""


_FIXED, _KEPT, _SUM = _Owner("fixed"), _Owner("kept"), _Owner("sum")

_Owners = Mapping[int, _Owner]
"""Storage of a graph → its owner; the graph itself makes the storages that are missing."""


class Kept(NamedTuple):
    """The tensors that one graph keeps for another.

    Attributes:
        bytes: the bytes of their storages that nothing else holds, each counted once.
        values: the values between stages among them.
        gradients: the values whose gradients are among them.
        lies_in: kept tensor → its storages in the graph.
        owners: storage → its owner in the graph that gets it.
    """

    bytes: int = 0
    values: frozenset[str] = frozenset()
    gradients: frozenset[str] = frozenset()
    lies_in: tuple[tuple[int, ...], ...] = ()
    owners: _Owners = MappingProxyType({})


class StageMemory:
    """The memory of a stage for one micro-batch of the example, as it was counted when it ran; for
    the attributes see Sizes. ``saved`` is kept by forward for backward, and ``deferred`` by the
    first half of backward for the second. A stage under autograd keeps all inputs and outputs, and
    its first half computes all gradients."""

    def __init__(self, plan: Plan, stage: Stage) -> None:
        self._plan, self._stage = plan, stage
        self.places: dict[tuple[int, str, bool], Storage] = {}
        self.adding: dict[tuple[str, int], Workspace] = {}
        self.runs = {(letter, stage.index): Workspace((0,)) for letter in "FRBIW"}
        self.left: dict[tuple[str, int], Left] = {}
        self.laid_out: dict[tuple[int, str, bool], int] = {}
        self.saved_state = 0
        saved, forward, backward, gradients = getattr(stage.kernel, "counted", (0, 0, 0, 0))
        into = (edge.value for edge in plan.edges_into(stage.index))
        kept = frozenset([*into, *outputs_of(plan.edges_from(stage.index))])
        self.saved, self.deferred = Kept(saved, kept), Kept(gradients)
        for letter in "FRBI":
            most = forward if letter in "FR" else backward
            self.runs[letter, stage.index] = Workspace((most,))


class GraphMemory(StageMemory):
    """The same, told by the stage's graphs."""

    def __init__(self, plan: Plan, stage: Stage, kernel: GraphKernel) -> None:
        super().__init__(plan, stage)
        self._kernel = kernel
        self.saved, self.deferred = self._forward(), Kept()
        if kernel.backward_graph is not None:
            self._backward("B", kernel.backward_graph)
        if kernel.input_grad_graph is not None:
            self.deferred = self._backward("I", kernel.input_grad_graph)
        if kernel.weight_grad_graph is not None:
            self._run("W", kernel.weight_grad_graph, self.deferred)
        for letter, graphs in kernel.buckets.items():
            self._in_buckets(letter, graphs)

    def _forward(self) -> Kept:
        stage, kernel = self._stage, self._kernel
        graph = kernel.forward_graph.graph
        live, (arguments, returned) = liveness(graph), _ends(graph)
        constants = len(stage.parameters) + len(stage.buffers)
        owners = dict.fromkeys(live.lies_in(arguments[:constants]), _FIXED)
        inputs = arguments[constants:]
        crossings = [(edge.value, False) for edge in self._plan.edges_into(stage.index)]
        for (name, _), node in zip(crossings, inputs, strict=True):
            for storage in live.of[node]:
                owners.setdefault(storage, _Owner("value", name))
        laid_out = self._lay_out(live, crossings, inputs, kernel.input_strides)
        run = _workspace(live, owners, (), laid_out)
        self.runs["F", stage.index] = self.runs["R", stage.index] = run
        names = outputs_of(self._plan.edges_from(stage.index))
        for name, node in zip(names, returned, strict=False):
            self._place(name, False, live, node, owners)
        saved = returned[kernel.outputs + kernel.writes :]
        written = {write.target for write in stage.writes}
        buffers = zip(stage.buffers, arguments[len(stage.parameters) : constants], strict=True)
        changing = live.lies_in(node for buffer, node in buffers if buffer.target in written)
        kept = live.lies_in(saved)
        self.saved_state = sum(live.spans[each].bytes for each in changing if each in kept)
        return _kept(live, saved, owners)

    def _backward(self, letter: str, module: fx.GraphModule) -> Kept:
        """Count backward, or its first half. Returns what that keeps for the second half."""
        live, owners, returned = self._run(letter, module, self.saved, ends=True)
        into = [e for e in self._plan.edges_into(self._stage.index) if e.gradient]
        for edge, node in zip(into, returned, strict=False):
            self._place(edge.value, True, live, node, owners)
        return _kept(live, returned[self._kernel.input_gradients :], owners)

    def _in_buckets(self, letter: str, graphs: Sequence[BucketGraph]) -> None:
        """Count a backward that runs one bucket of gradients after the other."""
        kept = self.deferred if letter == "W" else self.saved
        for bucket, part in enumerate(graphs):
            name = f"{letter}{bucket if part is not graphs[-1] else -1}"
            live, owners, returned = self._run(name, part.graph, kept, ends=name == "B0")
            kept = _kept(live, returned[: part.left], owners)
            self.left[name, self._stage.index] = Left(kept.bytes, kept.values, kept.gradients)

    def _run(
        self, name: str, module: fx.GraphModule, kept: Kept, *, ends: bool = False
    ) -> tuple[Liveness, dict[int, _Owner], list[Any]]:
        """Count a backward graph with arguments ``[kept, output gradients, totals]`` under the
        letter ``name``, see ``Sizes.runs``. ``ends`` tells whether it gets the gradients of the
        stage's outputs."""
        arguments, returned = _ends(module.graph)
        names = outputs_of(self._plan.edges_from(self._stage.index))
        crossings = [(names[index], True) for index in self._kernel.gradient_outputs if ends]
        strides = self._kernel.gradient_strides if ends else ()
        first = len(kept.lies_in)
        gradients, totals = arguments[first:][: len(crossings)], arguments[first + len(crossings) :]
        live = liveness(module.graph, kept.lies_in, totals)
        owners = _given(live, arguments, kept)
        edges = [e for e in self._plan.edges_from(self._stage.index) if e.gradient]
        for (value, _), node in zip(crossings, gradients, strict=True):
            parts = sum(edge.value == value for edge in edges)
            owner = _Owner("gradient", value) if parts == 1 else _SUM
            owners.update(dict.fromkeys(live.of[node], owner))
        laid_out = self._lay_out(live, crossings, gradients, strides)
        key, used_up = (name, self._stage.index), ("value", "gradient")
        run = self.runs[key] = _workspace(live, owners, used_up, laid_out)
        if totals:
            later = liveness(module.graph, kept.lies_in)
            same = _carried(live, owners, later, arguments, totals)
            run = self.adding[key] = _workspace(later, same, used_up, laid_out)
        if is_compiled(module):  # it always adds, at first to zeros
            zeros = _bytes(node.meta["val"] for node in totals)
            self.runs[key] = replace(run, levels=tuple(zeros + level for level in run.levels))
        return live, owners, returned

    def _lay_out(
        self,
        live: Liveness,
        crossings: Iterable[Crossing],
        nodes: Iterable[fx.Node],
        strides: Iterable[tuple[int, ...] | None],
    ) -> tuple[GraphInput, ...]:
        """The arguments that the kernel has to copy, as they arrive in other strides than the graph
        needs."""
        copies = []
        for crossing, node, wanted in zip(crossings, nodes, strides, strict=True):
            value = node.meta.get("val")
            if not isinstance(value, Tensor) or wanted is None:
                continue
            # unlike ``clone``, ``empty_like`` gives a fake tensor other strides than a real one
            if value.clone().stride() != wanted:
                ends = zip(value.shape, wanted, strict=True)
                extent = 1 + sum((size - 1) * stride for size, stride in ends)
                size = extent * value.element_size() if value.numel() else 0
                self.laid_out[self._stage.index, *crossing] = size
                last = max(live.spans[storage].last for storage in live.of[node])
                copies.append(GraphInput(crossing, size, last))
        return tuple(copies)

    def _place(
        self, name: str, gradient: bool, live: Liveness, node: Any, owners: dict[int, _Owner]
    ) -> None:
        """Note the storage of a value or gradient that the stage makes."""
        for storage in live.lies_in([node]):
            owner = owners.get(storage, _KEPT)
            if owner.kind in ("kept", "sum"):
                owner = owners[storage] = _Owner("gradient" if gradient else "value", name)
            place = Storage(owner.value, owner.kind == "gradient", live.spans[storage].bytes)
            self.places[self._stage.index, name, gradient] = place


def _ends(graph: fx.Graph) -> tuple[list[fx.Node], list[Any]]:
    """The arguments of a graph, and what it returns."""
    *nodes, output = graph.nodes
    returned: Any = output.args[0]
    return [node for node in nodes if node.op == "placeholder"], list(returned)


def _kept(live: Liveness, nodes: Sequence[Any], owners: _Owners) -> Kept:
    """Those of a graph's values that it keeps for another graph."""
    alone = {_SUM: _KEPT}
    passed = {
        storage: alone.get(owner := owners.get(storage, _KEPT), owner)
        for storage in live.lies_in(nodes)
    }
    return Kept(
        sum(live.spans[each].bytes for each, owner in passed.items() if owner is _KEPT),
        frozenset(owner.value for owner in passed.values() if owner.kind == "value"),
        frozenset(owner.value for owner in passed.values() if owner.kind == "gradient"),
        tuple(live.lies_in([node]) for node in nodes),
        passed,
    )


def _given(live: Liveness, arguments: Iterable[fx.Node], kept: Kept) -> dict[int, _Owner]:
    """Storage → its owner, for a graph's first arguments, which another graph has kept."""
    return {
        storage: kept.owners[home]
        for node, homes in zip(arguments, kept.lies_in, strict=False)
        for storage, home in zip(live.of[node], homes, strict=True)
    }


def _carried(
    live: Liveness,
    owners: _Owners,
    later: Liveness,
    arguments: Iterable[fx.Node],
    totals: Iterable[fx.Node],
) -> _Owners:
    """Storage → its owner, in the graph's run ``later`` that adds to existing sums of gradients."""
    carried = {
        new: owners[old]
        for node in arguments
        for old, new in zip(live.of[node], later.of[node], strict=False)
        if old in owners
    }
    return carried | dict.fromkeys(later.lies_in(totals), _FIXED)


def _workspace(
    live: Liveness,
    owners: _Owners,
    used_up: Collection[str],
    laid_out: tuple[GraphInput, ...] = (),
) -> Workspace:
    """The memory that a graph needs while it runs, besides its arguments. Arguments that were kept
    or summed for this graph only are freed after their last use. So are those of the kinds
    ``used_up``, if nothing else holds them."""
    changes = [0] * (live.steps + 2)
    freed = []
    for storage, (size, first, last) in live.spans.items():
        owner = owners.get(storage)
        if owner is None or owner.kind == "sum":
            changes[max(first, 0)] += size
        if owner is None or owner.kind in ("kept", "sum"):
            changes[last + 1] -= size
        elif owner.kind in used_up:
            freed.append(GraphInput((owner.value, owner.kind == "gradient"), size, last))
    return Workspace(tuple(accumulate(changes[:-1])), tuple(freed), laid_out)
