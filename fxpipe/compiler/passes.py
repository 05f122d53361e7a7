"""Every pass from a model to a program, in the order in which they run.

Each ``Pass`` has a function, the facts that it requires, the facts that it provides, and ``when``,
the fact that says whether it runs at all. ``fxpipe.passes.runner`` runs the lists, verifies each
traced graph, plan, schedule and program that a pass makes, and tells the logger their times.
Results are kept: a call like an earlier one runs no pass.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from fxpipe.compiler.options import Options
from fxpipe.compiler.preflight import (
    refuse_hooks,
    refuse_tensors,
    run_loss,
    run_model,
    tell_checkpoints,
    try_own_loss,
)
from fxpipe.errors import PassError, near
from fxpipe.extend import Part
from fxpipe.ir.schedule import Schedule
from fxpipe.parts import Parts
from fxpipe.passes.differentiate.divide import divide
from fxpipe.passes.differentiate.part_backward import part_backward
from fxpipe.passes.graph.randomness import seed_randomness
from fxpipe.passes.lowering.communicate import communicate
from fxpipe.passes.lowering.free import free
from fxpipe.passes.lowering.lower import Lower
from fxpipe.passes.partition.assignment import one_stage, place_like
from fxpipe.passes.partition.balance import balance, cut_at, judge
from fxpipe.passes.partition.cut import cut
from fxpipe.passes.partition.measure import measure
from fxpipe.passes.runner import Pass
from fxpipe.passes.schedule import add_recompute, write_schedule
from fxpipe.passes.tracing.capture import capture
from fxpipe.passes.tracing.loss_graph import note_loss


def add_reduce(schedule: Schedule) -> Schedule:
    """Schedule → Schedule: a reduce right after each stage's last backward."""
    if "A" in schedule.kinds:
        return schedule
    reducing: Schedule = Parts.add_reduce.find("summing over replicas")(schedule)
    return reducing


@dataclass(frozen=True)
class FoundPass:
    """A pass that an extension has, which is found when it runs.

    Attributes:
        name: the name of the pass.
        part: the pass.
        what: the text in the error before "needs the extension".
    """

    name: str
    part: Part[Any]
    what: str

    def find(self) -> Callable[..., Any]:
        """The function, or the class of the pass."""
        found: Callable[..., Any] = self.part.find(self.what)
        return found

    def __call__(self, **facts: Any) -> Any:
        return Pass(self.find(), ", ".join(facts), "")(facts)


_CLIP = FoundPass("add_clip", Parts.add_clip, "compile(..., clip_norm=, scaler=)")
_PART = FoundPass("part_gradients", Parts.part_gradients, "a pipeline of several replicas")
_FOOTPRINT = FoundPass("footprint_of", Parts.footprint, "memory_limits=")
_PLACE = FoundPass("place_devices", Parts.place_devices, "a device with streams")
_STREAMS = FoundPass("streams", Parts.events, "a device with streams")

SCHEDULE = (
    Pass(write_schedule, "recipe, devices, microbatches, short", "schedule"),
    Pass(add_recompute, "schedule, recompute", "schedule", when="recomputes"),
    Pass(add_reduce, "schedule", "schedule", when="replicated"),
    Pass(_CLIP, "schedule", "schedule", when="clips"),
)
"""A recipe and a number of micro-batches → the schedule of a step or a call."""

ADMIT = (
    Pass(refuse_tensors, "model", ""),
    Pass(refuse_hooks, "model, called", ""),
)
"""Refuse buffers without shapes, sparse tensors, and hooks that no graph could hold."""

TRY = (
    Pass(run_model, "model, guard, args, kwargs", "output"),
    Pass(tell_checkpoints, "model, guard, called, told", "", when="keeps_all"),
    Pass(run_loss, "model, objective, output, targets, size", "logged", when="given_loss"),
    Pass(try_own_loss, "output", "", when="returned_loss"),
)
"""Run the model and its loss as they are on a micro-batch, before they are traced."""

CAPTURE = (
    Pass(
        capture,
        "model, loss_module, args, kwargs, targets, numbers, names, wants, step, calls",
        "traced",
    ),
    Pass(
        note_loss,
        "traced, loss_module, output, real_targets, numbers",
        "traced",
        when="given_loss",
    ),
    Pass(seed_randomness, "traced", "traced"),
)
"""A model, its loss and one micro-batch → the graph of both with its backward."""

SINGLE = (
    Pass(one_stage, "traced", "assignment"),
    Pass(cut, "traced, assignment, owners, stage_costs", "plan"),
    Pass(divide, "plan, traced, state, wanted, functional", "plan"),
    Pass(part_backward, "plan", "plan", when="functional"),
)
"""The first graph of a model → the plan of one stage that can be measured. Its backward has halves
if steps need them."""

MEASURE = (Pass(measure, "traced, plan, values, state, share", "costs"),)
"""A graph and that plan → what each node costs. Over several ranks, only rank 0 runs this."""

PARTITION = (
    Pass(_FOOTPRINT, "traced, plan, costs, state, options, schedule", "footprint", when="limited"),
    Pass(
        balance,
        "traced, stages, costs, machine, footprint, nearest, partitioner",
        "assignment",
        when="not named",
    ),
    Pass(cut_at, "traced, stages, at, model", "assignment", when="named"),
    Pass(
        judge,
        "traced, assignment, costs, machine, footprint, nearest",
        "assignment",
        when="judged",
    ),
)
"""Costs → the stage of every node of the first graph. A cut by names is judged if costs exist."""

FOLLOW = (Pass(place_like, "traced, reference, assignment", "assignment"),)
"""Give a further graph of the model the stages of the first graph."""

PLAN = (
    Pass(cut, "traced, assignment, owners, stage_costs", "plan"),
    Pass(divide, "plan, traced, state, wanted, functional", "plan"),
    Pass(part_backward, "plan", "plan", when="parted"),
    Pass(_PART, "plan, bucket_bytes", "plan", when="replicated"),
)
"""A graph → the plan with its kernels."""

COMPILE = ()
"""A plan → the same plan with other kernels, by extensions: of the stages ``own`` of this process,
and for ``threads`` intra-op threads."""

DEVICES = (Pass(_PLACE, "plan, device, stage_devices", "plan"),)
"""Let stages make their tensors on the devices where they run; for devices with streams."""

PROGRAM = (
    Pass(Lower, "schedule, plan, updates, pause, replicas, only", "program", apart=True),
    Pass(communicate, "program", "program", apart=True),
    Pass(free, "program", "program", apart=True),
    Pass(_STREAMS, "program", "program", when="streams"),
)
"""A schedule and a plan → what each device runs."""

LISTS = {
    "schedule": SCHEDULE,
    "admit": ADMIT,
    "try": TRY,
    "capture": CAPTURE,
    "single": SINGLE,
    "measure": MEASURE,
    "partition": PARTITION,
    "follow": FOLLOW,
    "plan": PLAN,
    "compile": COMPILE,
    "devices": DEVICES,
    "program": PROGRAM,
}
"""All lists, in order."""


def of(options: Options, name: str) -> Sequence[Pass]:
    """A list, with the passes that extensions put into it.

    Raises:
        PassError: one is to come after a pass that is not in the list.
    """
    passes: Sequence[Pass] = LISTS[name]
    for each in options.extensions:
        for after, own in each.passes(options).get(name, ()):
            names = ["", *(known.name for known in passes)]
            if after not in names:
                raise PassError(
                    f"{type(each).__name__} puts pass {own.name!r} after {after!r}, which is not "
                    f"in the list {name!r}: {near(after, names[1:])}"
                )
            place = names.index(after)
            passes = (*passes[:place], own, *passes[place:])
    return passes
