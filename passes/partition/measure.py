"""Measure what each node of a graph costs.

before:  conv2d = aten.conv2d.default(x, weight)
after:   {"conv2d": NodeCost(forward=1.1e-3, backward=2.3e-3, bytes=262144)}

The graph is differentiated as a single stage. Every operation of its graphs (forward, backward, and
the halves of the backward) is timed while the graph runs, and counts for the node that it was made
from. Operations that differ only in the values of their operands share their times. Where values
share memory, later runs are of operations that lack times only, each once: a model of many equal
layers is timed as if it had one.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from fxpipe.ir.called import Called
from fxpipe.ir.plan import Plan
from fxpipe.ir.traced import BYTES, ORIGIN, Traced
from fxpipe.kernels.graph import GraphKernel
from fxpipe.torchtools.accelerator import timed_event
from fxpipe.torchtools.meta import Scratch

_ROUNDS = 5
"""The most runs of each graph; the first one warms up."""

_SAMPLES = 4
"""How often an operation is timed, unless runs end earlier because few operations lack times."""

_LONG = 0.02
"""Seconds after which an operation needs no more times: of long ones they differ little."""

_AGREE = 1.1
"""Nor does it if its times are on average at most so many times the least."""

_WARM = 0.04
"""Seconds that a first run takes on the host if warming up can only be a small part of it."""

_RARE = 0.1
"""Runs end once operations with fewer times make up at most this share of the total time."""

OPERANDS = 2
"""How many memories operands get in turn, where these do not get memory each."""

Operation = tuple[Any, Hashable, Hashable]
"""The function, and the properties of its arguments and keyword arguments."""


@dataclass(frozen=True)
class NodeCost:
    """What a node costs for one micro-batch. Each time is the least of several.

    Attributes:
        forward: seconds.
        backward: seconds; 0 if nothing needs a gradient.
        bytes: bytes of its value; 0 if that is no tensor.
        input_grad: seconds in the first half of the backward; 0 if it was measured whole only.
        weight_grad: seconds in the second half of the backward; likewise.
    """

    forward: float
    backward: float
    bytes: int
    input_grad: float = 0.0
    weight_grad: float = 0.0

    @property
    def seconds(self) -> float:
        return self.forward + self.backward


class GivenCosts(Protocol):
    """What nodes cost on a device that is described, so that nothing of a model has to run.

    Attributes:
        context: bytes that a device takes besides what stages hold.
        host: bytes a second between a device and the memory of its host.
    """

    @property
    def context(self) -> int: ...

    @property
    def host(self) -> float: ...

    def node_costs(self, traced: Traced, plan: Plan) -> Mapping[str, NodeCost]:
        """Node → its costs, by the graph and its plan of one stage; as ``measure``."""


def measure(
    traced: Traced,
    plan: Plan,
    values: Mapping[str, Any],
    state: Mapping[str, Tensor],
    watch: Stopwatch | None = None,
    share: bool = False,
) -> dict[str, NodeCost]:
    """Time the one stage of a plan, operation by operation.

    Args:
        plan: the graph as a single stage, differentiated; if its backward has halves, they are
            measured, too.
        values: input name → value.
        watch: the stopwatch; by default that of the values' device.
        share: whether values share memory: operations get stand-ins of the same shapes in it.
            Else all values of the stage are in memory at once.
    """
    (stage,) = plan.stages
    kernel = stage.kernel
    assert isinstance(kernel, GraphKernel)
    arguments = [
        *(state[argument.target] for argument in (*stage.parameters, *stage.buffers)),
        *(values[edge.value] for edge in plan.edges_into(0)),
    ]
    watch = watch or Stopwatch.of(arguments)
    times = _Times()
    numbers = [x.numel() for n in traced.graph.nodes if _is_plain(x := n.meta.get("val"))]
    shared = Scratch(watch.device or "cpu", turns=OPERANDS, least=max(numbers, default=0))
    scratch = shared if share else None
    forward = _Timer(kernel.forward_graph, watch, times, scratch)
    backward, input_grad, weight_grad = (
        None if graph is None else _Timer(graph, watch, times, scratch)
        for graph in (stage.backward, stage.input_grad, stage.weight_grad)
    )
    kept = kernel.outputs + kernel.writes
    trained = zip(stage.parameters, kernel.parameter_gradients, strict=True)
    summed = [state[argument.target] for argument, has_gradient in trained if has_gradient]
    totals = [shared.like(x) for x in summed]  # these and gradients share memory in any case
    examples: list[Any] = []  # the gradients that the backward reads
    if stage.backward is not None:
        given = stage.backward.graph.find_nodes(op="placeholder")
        end = len(given) - len(totals)
        examples = [n.meta["val"] for n in given[end - len(kernel.gradient_strides) : end]]
    with torch.no_grad():
        for _ in range(_ROUNDS):
            flat = forward.run(*arguments)
            if backward is not None:
                gradients = [shared.like(example) for example in examples]
                backward.run(*flat[kept:], *gradients, *totals)
                if input_grad is not None:
                    halfway = input_grad.run(*flat[kept:], *gradients)
                    if weight_grad is not None:
                        weight_grad.run(*halfway[kernel.input_gradients :], *totals)
            if times.enough():
                break
    sizes = {node.name: node.meta[BYTES] for node in stage.graph.graph.nodes}
    timers = forward, backward, input_grad, weight_grad
    parts = [{} if timer is None else timer.by_origin() for timer in timers]
    costs: dict[str, NodeCost] = {}
    for node in traced.graph.nodes:
        ahead, back, first, second = (part.get(node.name, 0.0) for part in parts)
        costs[node.name] = NodeCost(ahead, back, sizes.get(node.name, 0), first, second)
    return costs


@dataclass(frozen=True)
class Stopwatch:
    """Takes marks between operations, and later returns the times between them.

    On the host it reads the processor time of the calling thread, as other processes take turns
    with it on a busy machine. An operation with several intra-op threads counts once: they take
    equal parts of it, and the caller, which has one of them, spins until the others are done. Time
    in which the caller sleeps, as it waits for a file or for threads of a module's own, is missing.

    For a device with streams it marks the current stream. If an operation runs faster than the
    host can launch it, its launch time is measured.

    Attributes:
        device: the device; None for the host.
        clock: the host's clock, in seconds; by default ``host_clock``.
    """

    device: torch.device | None = None
    clock: Callable[[], float] | None = None

    @classmethod
    def of(cls, values: Iterable[Any]) -> Stopwatch:
        """Return the stopwatch for operations on these values."""
        places = (value.device for value in values if isinstance(value, Tensor))
        return cls(next((x for x in places if x.type not in ("cpu", "meta")), None))

    def mark(self) -> Any:
        """Return a mark after everything that was called so far."""
        if self.device is None:
            return (self.clock or host_clock())()
        return timed_event(torch.accelerator.current_stream(self.device))

    def seconds(self, spans: Sequence[tuple[Any, Any]]) -> list[float]:
        """Return the seconds between the marks of each pair, after waiting for the device."""
        if self.device is None:
            return [end - start for start, end in spans]
        torch.accelerator.synchronize(self.device)
        return [1e-3 * start.elapsed_time(end) for start, end in spans]


@cache
def host_clock() -> Callable[[], float]:
    """The clock of operations on the host: the thread's processor time, or wall time on systems
    that count the former in ticks, which are longer than operations."""
    fine = len({time.thread_time() for _ in range(100)}) > 50
    return time.thread_time if fine else time.perf_counter


class _Times:
    """The times of operations.

    Attributes:
        met: how often each operation occurs in the graphs.
        taken: how often it has run after the first run, which warms up.
        noted: how many times of it there are.
        best: the least of these.
        spent: their sum.
    """

    def __init__(self) -> None:
        self.met: Counter[Operation] = Counter()
        self.taken: Counter[Operation] = Counter()
        self.noted: Counter[Operation] = Counter()
        self.best: dict[Operation, float] = {}
        self.spent: Counter[Operation] = Counter()

    def note(self, operation: Operation, seconds: float) -> None:
        """Note a time of an operation."""
        self.noted[operation] += 1
        self.best[operation] = min(seconds, self.best.get(operation, seconds))
        self.spent[operation] += seconds  # type: ignore[assignment]

    def lacks(self, operation: Operation, more: int = 0) -> bool:
        """Whether an operation lacks times, after so many runs more than were noted."""
        noted, spent = self.noted[operation], self.spent[operation]
        agree = noted > 1 and spent <= _AGREE * noted * self.best[operation]
        return self.taken[operation] < _SAMPLES + more and spent < _LONG and not agree

    def enough(self) -> bool:
        """Whether operations with too few times make up little of the total time."""
        total = {operation: best * self.met[operation] for operation, best in self.best.items()}
        rare = sum(total[operation] for operation in total if self.lacks(operation))
        return len(total) == len(self.met) and rare <= _RARE * sum(total.values())


class _Again:
    """Stands for what a call of a part of the model keeps for its backward, and makes it again: it
    serves one backward only, and would keep memory until then."""

    def __init__(self, function: Any, args: Any, at: int) -> None:
        self._function, self._args, self._at = function, args, at

    def __call__(self) -> Any:
        return self._function(*pytree.tree_map_only(Tensor, Tensor.clone, self._args))[self._at]

    def __repr__(self) -> str:
        return f"{id(self._function)} again"  # which no other call's is


class _Timer(fx.Interpreter):
    """Runs a graph and times its operations, except in the first run, which warms up; with shared
    memory, what takes long on the host is timed there already."""

    def __init__(
        self, module: fx.GraphModule, watch: Stopwatch, times: _Times, scratch: Scratch | None
    ) -> None:
        super().__init__(module, garbage_collect_values=True)
        self.extra_traceback = False
        self._watch = watch
        self._times = times
        self._scratch = scratch
        self._operations: dict[fx.Node, Operation] = {}
        self._stand_ins: dict[fx.Node, Any] = {}
        self._calls: dict[Operation, tuple[fx.Node, Any, Any]] = {}  # the first of each, if shared
        self._value: Any = None
        if scratch is not None:
            # allocate these before the run: lasting small allocations between large temporary
            # ones would keep the allocator from reusing the memory of the large ones
            values = {n: n.meta.get("val") for n in module.graph.nodes if n.op == "call_function"}
            self._stand_ins.update((n, scratch.like(x)) for n, x in values.items() if _is_plain(x))
        self._spans: list[tuple[Operation, tuple[Any, Any]]] = []

    def run(self, *args: Any, **kwargs: Any) -> Any:
        calls = {**self._calls}
        value = self._value if calls else super().run(*args, **kwargs)
        for operation, call in calls.items():
            if self._times.lacks(operation):
                self._times.taken[operation] += 1
                self._call(*call)
        spans, self._spans = self._spans, []
        times = self._watch.seconds([span for _, span in spans])
        for (operation, _), seconds in zip(spans, times, strict=True):
            if calls or not self._calls or seconds > _WARM:
                self._times.note(operation, seconds)
        self._value = value if self._calls else None
        return value

    def run_node(self, n: fx.Node) -> Any:
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        if n.op != "call_function":
            return getattr(self, n.op)(n.target, args, kwargs)
        warms_up = n not in self._operations
        if warms_up:
            operation = self._operations[n] = n.target, _look(args), _look(kwargs)
            self._times.met[operation] += 1
        else:
            operation = self._operations[n]
            self._times.taken[operation] += 1
        if operation in self._calls:
            return self._kept(n, self._stand_ins[self._calls[operation][0]])
        # time all operations equally often: the least of more times would be smaller
        timed = not warms_up and self._times.lacks(operation, more=1)
        if self._scratch is not None:
            self._calls[operation] = n, args, kwargs
            timed = self._watch.device is None
        return self._kept(n, self._call(n, args, kwargs, timed))

    def _call(self, n: fx.Node, args: Any, kwargs: Any, timed: bool = True) -> Any:
        target: Any = n.target
        given, calls = args, isinstance(target, Called)
        if calls:
            args = pytree.tree_map_only(_Again, _Again.__call__, args)
            if self._scratch is not None:  # autograd notices that scratch memory is written
                args = pytree.tree_map_only(Tensor, Tensor.clone, args)
        start = self._watch.mark()
        with target.refusing() if calls else nullcontext():
            value = target(*args, **kwargs)
        if timed:
            self._spans.append((self._operations[n], (start, self._watch.mark())))
        if not calls:
            return value
        return [
            x if x is None or isinstance(x, Tensor) else _Again(target, given, at)
            for at, x in enumerate(value)
        ]

    def _kept(self, n: fx.Node, value: Any) -> Any:
        """What later operations read: the value, or its stand-in in shared memory."""
        if self._scratch is None:
            return value
        if n not in self._stand_ins or _look(self._stand_ins[n]) != _look(value):
            self._stand_ins[n] = pytree.tree_map_only(Tensor, self._scratch.like, value)
        return self._stand_ins[n]

    def by_origin(self) -> dict[str, float]:
        """Name of a node in the traced graph → seconds of all operations made from it."""
        total: dict[str, float] = {}
        for node, operation in self._operations.items():
            origin = node.meta.get("custom", {}).get(ORIGIN, "")
            total[origin] = total.get(origin, 0.0) + self._times.best[operation]
        return total


def _is_plain(value: Any) -> bool:
    """Whether a fake value of a graph is a tensor of known sizes."""
    if not isinstance(value, Tensor):
        return False
    return all(type(size) is int for size in (*value.shape, *value.stride()))


def _look(value: Any) -> Hashable:
    """The properties of an operand that an operation's time depends on."""
    if isinstance(value, Tensor):
        return value.shape, value.stride(), value.dtype, value.device
    if isinstance(value, list | tuple):
        return tuple(map(_look, value))
    if isinstance(value, dict):
        return tuple((key, _look(item)) for key, item in value.items())
    return type(value), repr(value)
