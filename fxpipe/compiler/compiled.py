"""The result of compiling a call: graph, plan, kernels, schedule and program."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from fxpipe.compiler.timetable import Purpose
from fxpipe.ir.plan import Plan, ValueSpec
from fxpipe.ir.program import Program
from fxpipe.ir.schedule import Schedule
from fxpipe.ir.traced import Traced, Value
from fxpipe.kernels.kernel import Kernel


class Kind(NamedTuple):
    """The kind of a call: what it is for, whether it updates the weights, and whether it returns
    the model's outputs for the whole batch."""

    purpose: Purpose
    updates: bool = False
    outputs: bool = True


@dataclass(frozen=True)
class Compiled:
    """Everything that runs a call of one kind and one batch shape.

    Attributes:
        traced: the graph of the whole model, and of its loss if there is one.
        plan: the plan for the first micro-batch's size.
        kernels: micro-batch → stage → kernel.
        schedule: the schedule.
        program: the program; on a rank it has only the list of the rank's own device.
        whole: makes the program with the lists of all devices.
        purpose: what the call is for.
        samples: the samples in the first micro-batch.
        threads: how many threads run the devices' instruction lists: 1, or one for each device.
        terms: micro-batch → what the weighing of losses knows of its loss; empty if the caller says
            how losses are weighted.
        specs: micro-batch → the specs of its values.
        call: the number of the ranks' call in which it was compiled.
        done: what is done once for it, and was.
    """

    traced: Traced
    plan: Plan
    kernels: Sequence[Sequence[Kernel]]
    schedule: Schedule
    program: Program
    whole: Callable[[], Program]
    purpose: Purpose
    samples: int
    threads: int
    terms: Sequence[Sequence[Any]] = ()
    specs: Sequence[Mapping[str, ValueSpec]] = ()
    call: int = 0
    done: set[str] = field(default_factory=set)

    @property
    def results(self) -> frozenset[str]:
        """The names of the model's outputs that the program returns to the caller."""
        values = {out.name for out in self.traced.outputs if isinstance(out, Value)}
        return self.plan.results & values

    def names(self, stage: int) -> frozenset[str]:
        """``Traced.touched`` of a stage."""
        return self.traced.touched(self.plan.stages[stage])


def exchanged(traced: Traced, plan: Plan) -> tuple[object, ...]:
    """The edges, buckets, loss and outputs of a graph. One program can run the micro-batches of two
    graphs if these are equal."""
    outputs = [out.name if isinstance(out, Value) else None for out in traced.outputs]
    return plan.edges, plan.gradients, plan.buckets, traced.loss, outputs
