"""Choose whether one thread or one per device runs the lists of CPU devices.

A thread releases the interpreter lock at every operation, and to get it back it may have to wait
for a hand-over, which costs microseconds. If operations take less than that, one thread runs them
faster one after another.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any, Literal

from torch import Tensor, fx

from fxpipe.ir.called import calls_in
from fxpipe.ir.plan import Plan, Stage
from fxpipe.ir.schedule import Schedule
from fxpipe.kernels.graph import is_compiled
from fxpipe.torchtools.state import processors

Dispatches = Literal["device", "thread"]
"""Which threads run or launch the devices' lists: one for each device, or one for all."""

HAND_OVER = 1e-5
"""The seconds by which an operation takes longer if each device has a thread of its own."""

TASK = 1.5e-5
"""The seconds by which a task takes longer than its operations."""

WAKE = 5e-5
"""The seconds until a thread goes on that waits for a value of another one."""

ELEMENTS = 2**14
"""An operation that was not measured is taken to last as long as a hand-over if its largest tensor
has this many elements: so does a product of 128 × 128 weights and 32 rows."""


class ThreadChoice:
    """For each plan, whether each device has its own thread.

    Attributes:
        most: the greatest number of threads that any plan may need.
    """

    def __init__(self, devices: int, dispatch: Dispatches | None) -> None:
        """Choose later for each plan, unless ``dispatch`` is given for all plans."""
        self.most = 1 if dispatch == "thread" else devices
        self._fixed = dispatch is not None or devices == 1

    def threads(self, plan: Plan, schedule: Schedule, larger: float = 1.0) -> int:
        """How many threads run the devices' lists: 1, or one for each device, whichever is
        predicted to be faster. Micro-batches are so many times ``larger`` than when the stages were
        measured."""
        if self._fixed:
            return self.most
        if processors() == 1:
            return 1
        one, each = step_seconds(plan, schedule, larger)
        return 1 if one < each else self.most


def step_seconds(plan: Plan, schedule: Schedule, larger: float = 1.0) -> tuple[float, float]:
    """The predicted seconds of a step whose devices are run by one thread, and by a thread each.

    Measured times count in proportion to the samples of a micro-batch: see ``threads``.

    With threads, the slowest device is never idle, but for one micro-batch that goes through the
    others, unless batches overlap; and not more of them compute at once than there are processors.
    """
    times, longer = [0.0] * schedule.devices, [0.0] * schedule.devices
    for stage, device in zip(plan.stages, schedule.placement, strict=True):
        seconds, operations = _work(stage, larger, trains=schedule.trains)
        times[device] += seconds
        longer[device] += seconds + HAND_OVER * operations
    count, slowest, together = schedule.microbatches, max(longer), sum(longer)
    way = 0.0 if schedule.overlaps else together - slowest
    return count * sum(times), max(count * slowest + way, count * together / processors())


def operations(stage: Stage) -> dict[str, int]:
    """Letter of a task of a stage → its operations, each of which hands over the lock."""
    return {
        letter: 1 if is_compiled(graph) else sum(_operations(graph))
        for letter, graph in _graphs(stage).items()
    }


def _graphs(stage: Stage) -> dict[str, fx.GraphModule]:
    graphs = {
        "F": stage.forward,
        "R": stage.forward,
        "B": stage.backward,
        "I": stage.input_grad,
        "W": stage.weight_grad,
    }
    return {letter: graph for letter, graph in graphs.items() if graph is not None}


def _work(stage: Stage, larger: float, *, trains: bool) -> tuple[float, int]:
    """The seconds of a stage for one micro-batch, and its operations. They are measured, or else by
    the sizes of tensors."""
    letters = "F" if not trains else "FB" if stage.backward else "FIW"
    seconds, counts = 0.0, operations(stage)
    for letter, graph in _graphs(stage).items():
        if letter in letters:
            sizes = [_largest(n) for n in graph.graph.nodes if _computes(n)]
            seconds += HAND_OVER * sum(sizes) / ELEMENTS
    if stage.costs is not None:
        seconds = larger * (stage.costs.forward + (stage.costs.backward if trains else 0.0))
    return seconds, sum(counts.get(letter, 0) for letter in letters)


def _operations(graph: fx.GraphModule) -> Iterator[int]:
    """Node → its operations; of a part of the model that is called, as many as its modules."""
    functions = calls_in(graph.graph.nodes)
    for node in graph.graph.nodes:
        if node in functions:
            yield len(functions[node].parts)
        elif _computes(node):
            yield 1


def _computes(node: fx.Node) -> bool:
    return node.op.startswith("call_") and node.target is not operator.getitem


def _largest(node: fx.Node) -> int:
    """The elements of the largest tensor that an operation reads or makes."""
    values: list[Any] = [each.meta.get("val") for each in (*node.all_input_nodes, node)]
    return max((int(x.numel()) for x in values if isinstance(x, Tensor)), default=0)
