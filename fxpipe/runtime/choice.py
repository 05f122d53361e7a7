"""Choose by measuring whether one thread or one per device runs the lists of CPU devices.

A thread releases the interpreter lock at every operation. If it has to wait to get the lock back,
the hand-over costs a few microseconds, on some machines tens of microseconds. Two threads that each
run an operation of time t at once and wait w for the lock take t + w; one thread takes 2t. So
operations shorter than a hand-over are faster one after another. More threads change nothing, as
all of them wait for one lock.
"""

from __future__ import annotations

import operator
import threading
from functools import cache
from itertools import pairwise
from queue import SimpleQueue
from time import perf_counter
from typing import Literal
from weakref import WeakKeyDictionary, WeakSet

from torch import fx

from fxpipe.ir.plan import Plan
from fxpipe.kernels.inductor import compiled
from fxpipe.kernels.kernel import Kernel
from fxpipe.log import noted
from fxpipe.torchtools.state import processors

Dispatch = Literal["device", "thread"]
"""Which threads run or launch the devices' lists: one for each device, or one for all."""

LONG = 5e-5
"""Operations of at least this many seconds are worth a hand-over on any machine."""

CLEARLY = 2.0
"""How many times longer than a hand-over an operation must be before one thread is given up for
several: the time of a step also contains updates and the work between operations."""

RUNS = 3
"""How many runs are timed; the best of them counts."""

_ROUNDS = 15
_TURNS = 40


class Choice:
    """For each plan, whether each device has its own thread.

    Attributes:
        most: the greatest number of threads that any plan may need.
        changes: how often a choice was revised.
        trials: the plans whose choice may be revised, because one thread runs them for now or their
            costs were not known: kernel of the first stage → seconds of an operation in each run
            so far, see ``took``.
    """

    def __init__(self, devices: int, dispatch: Dispatch | None) -> None:
        """Choose later for each plan, unless the user gave ``dispatch`` for all plans."""
        self.most = 1 if dispatch == "thread" else devices
        self._fixed = dispatch is not None or devices == 1
        # the kernel of the first stage identifies the plan
        self._threads: WeakKeyDictionary[Kernel, int] = WeakKeyDictionary()
        self.changes = 0
        self.trials: WeakKeyDictionary[Kernel, list[float]] = WeakKeyDictionary()
        self._unmeasured: WeakSet[Kernel] = WeakSet()

    def threads(self, plan: Plan) -> int:
        """How many threads run the devices' lists: 1, or one for each device."""
        first = plan.stages[0]
        kernel, measured = first.kernel, first.costs is not None
        if self._fixed or kernel is None:
            return self.most
        if kernel not in self._threads or (measured and kernel in self._unmeasured):
            self.trials.pop(kernel, None)
            self._take(kernel, self._choose(plan))
            if processors() > 1 and (self._threads[kernel] == 1 or not measured):
                self.trials[kernel] = []
            (self._unmeasured.discard if measured else self._unmeasured.add)(kernel)
        return self._threads[kernel]

    def _take(self, kernel: Kernel, threads: int) -> None:
        self.changes += self._threads.get(kernel, threads) != threads
        self._threads[kernel] = threads

    def took(self, plan: Plan, seconds: float, microbatches: int, *, backward: bool) -> None:
        """Note the time of a run, and revise the choice after some runs. The first choice may have
        been made for smaller micro-batches, or without any costs.

        Args:
            plan: the plan that ran.
            seconds: processor time of the threads.
            microbatches: how many micro-batches it ran.
            backward: whether it ran backwards, too.
        """
        kernel = plan.stages[0].kernel
        if kernel is None or kernel not in self.trials:
            return
        count = operations(plan, backward)
        if not count:
            return
        times = self.trials[kernel]
        times.append(seconds / microbatches / count)
        if len(times) < RUNS:
            return
        del self.trials[kernel]
        self._unmeasured.discard(kernel)
        several = min(times) > CLEARLY * hand_over()
        if several != (self._threads[kernel] > 1):
            self._take(kernel, self.most if several else 1)
            who = "a thread for each device" if several else "one thread for all devices"
            noted(f"{who} from now on: {_compared(min(times))}")

    def _choose(self, plan: Plan) -> int:
        if processors() == 1:
            noted("one thread runs the lists of all devices, as there is one processor")
            return 1
        costs = [stage.costs for stage in plan.stages if stage.costs is not None]
        back = any(stage.backward is not None or stage.leaves for stage in plan.stages)
        seconds = sum(cost.forward + cost.backward * back for cost in costs)
        count = operations(plan, back)
        if not costs or not count:
            return self.most
        mean = seconds / count
        if mean > LONG:
            noted(f"a thread for each device: an operation takes {1e6 * mean:.1f} µs on average")
            return self.most
        single = mean < hand_over()
        who = "one thread runs the lists of all devices" if single else "a thread for each device"
        noted(f"{who}: {_compared(mean)}")
        return 1 if single else self.most


def _compared(operation: float) -> str:
    return (
        f"an operation takes {1e6 * operation:.1f} µs on average, and {1e6 * hand_over():.1f} µs "
        "to hand the interpreter lock over"
    )


def operations(plan: Plan, backward: bool) -> int:
    """The number of operations that all stages run for a micro-batch."""
    count = 0
    for stage in plan.stages:
        if stage.forward is not None:
            count += _count(stage.forward)
        if backward and stage.backward is not None:
            count += _count(stage.backward)
        elif backward and stage.leaves and stage.forward is not None:
            count += _count(stage.forward)  # autograd runs about as many
    return count


def _count(graph: fx.GraphModule) -> int:
    """The operations of a graph: a leaf module counts as its number of modules, a compiled graph
    as one."""
    if compiled(graph) is not None:
        return 1
    return sum(
        len(list(graph.get_submodule(str(node.target)).modules()))
        if node.op == "call_module"
        else node.op in ("call_function", "call_method") and node.target is not operator.getitem
        for node in graph.graph.nodes
    )


@cache
def hand_over() -> float:
    """Seconds from when one thread starts to wait until the thread that it woke goes on.

    Measured once, which takes some hundredths of a second. The lower quartile of the rounds counts,
    so that other work on the machine matters little.
    """
    there, back = SimpleQueue[None](), SimpleQueue[None]()
    exchanges = range(_ROUNDS * _TURNS)

    def answer() -> None:
        for _ in exchanges:
            back.put(there.get())

    thread = threading.Thread(target=answer, name="fxpipe-measure", daemon=True)
    thread.start()
    times = [perf_counter()]
    for _ in range(_ROUNDS):
        for _ in range(_TURNS):
            there.put(None)
            back.get()
        times.append(perf_counter())
    thread.join()
    rounds = sorted(after - before for before, after in pairwise(times))
    return rounds[_ROUNDS // 4] / (2 * _TURNS)
