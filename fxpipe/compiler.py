"""From a model and a call to what runs: plans with kernels, schedules and programs, all kept."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from fxpipe import source
from fxpipe.batch import Batch
from fxpipe.errors import InputError
from fxpipe.kernel import Kernel
from fxpipe.passes import runner
from fxpipe.passes.attach_loss import (
    LossModule,
    attach_leaf_loss,
    attach_loss,
    own_loss,
    with_loss,
)
from fxpipe.passes.check import check
from fxpipe.passes.communicate import communicate
from fxpipe.passes.cut import cut
from fxpipe.passes.differentiate import Differentiate, Wanted
from fxpipe.passes.free import free
from fxpipe.passes.functionalise import functionalise
from fxpipe.passes.lower import Lower
from fxpipe.passes.partition import Assignment
from fxpipe.passes.randomness import seed_randomness
from fxpipe.passes.sizes import localise_sizes
from fxpipe.passes.symbolic import trace_symbolically
from fxpipe.passes.trace import accepts, trace
from fxpipe.placement import Placement
from fxpipe.plan import Plan
from fxpipe.program import Program
from fxpipe.schedule import Schedule
from fxpipe.traced import SEED, Traced, Value, with_batched
from fxpipe.tryout import batched_outputs, try_loss, try_model, try_own_loss
from fxpipe.untouched import assigned_in_place, intra_op_threads, untouched

Purpose = Literal["step", "call", "infer"]
"""A training step with its loss, a differentiable call, or a call without gradients."""

Loss = Callable[..., Any]
Tracer = Literal["export", "symbolic"]


@dataclass(frozen=True)
class Graph:
    """A traced graph with its place in the pipeline."""

    traced: Traced
    assignment: Assignment


@dataclass(frozen=True)
class Compiled:
    """What a call of one shape runs.

    Attributes:
        traced: the graph of the whole model, and its loss where there is one.
        plan: the plan for the first micro-batch's size.
        kernels: micro-batch → stage → kernel.
        schedule: the schedule.
        program: the program.
    """

    traced: Traced
    plan: Plan
    kernels: Sequence[Sequence[Kernel]]
    schedule: Schedule
    program: Program


class Compiler:
    """Runs the passes when a call needs them, and keeps what they make."""

    def __init__(
        self,
        model: nn.Module,
        devices: int,
        *,
        loss: Loss | None,
        partition: str | Sequence[str],
        tracer: Tracer,
        threads: int,
    ) -> None:
        """Nothing is traced yet.

        Args:
            model: the model, whose state is left alone.
            devices: how many; as many stages are cut.
            loss: ``loss(output, *targets)``, or None where the model returns it.
            partition: "auto", or the names of the submodules at which stages begin.
            tracer: "export" or "symbolic".
            threads: intra-op threads of a device, for the measurement of costs.
        """
        self.model = model
        self.devices = devices
        self.loss = loss
        self.tracer = tracer
        self.threads = threads
        self._placement = Placement(model, devices, partition, threads)
        self._graphs: dict[Any, Graph] = {}
        self._plans: dict[Any, Plan] = {}
        self._programs: dict[Any, tuple[Schedule, Program]] = {}
        self._checked: set[tuple[int, bool]] = set()

    def compile(
        self,
        batch: Batch,
        microbatches: int,
        recipe: Callable[[int, int], Schedule],
        purpose: Purpose,
        *,
        updates: bool = False,
        input_gradients: bool = False,
    ) -> Compiled:
        """Everything that a call needs; what an earlier call of its kind made is used again.

        Args:
            batch: the call's inputs, and its targets for a step.
            microbatches: into how many it is split.
            recipe: devices, micro-batches → schedule.
            purpose: what the call is for.
            updates: whether the step updates the weights.
            input_gradients: whether inputs that require gradients get them.
        """
        parts = batch.split(microbatches)
        sizes = batch.sizes(microbatches)
        first = {size: parts[sizes.index(size)] for size in sizes}
        wants = tuple(
            input_gradients and isinstance(leaf, Tensor) and leaf.requires_grad
            for leaf in batch.leaves
        )
        for fixed in (False, True):  # a graph for one size has other names than one for several
            plans = {
                size: self._plan(batch, leaves, size, purpose, wants, fixed)
                for size, leaves in first.items()
            }
            traced, plan = plans[sizes[0]]
            if all(_exchangeable(traced, plan, *other) for other in plans.values()):
                break
        else:
            raise InputError(
                f"micro-batches of {sizes[0]} and {sizes[-1]} samples take different ways "
                f"through the model; give a batch size that {microbatches} divides"
            )
        if purpose == "step" and not any(
            edge.value == traced.loss and edge.gradient for edge in plan.edges
        ):
            raise InputError(
                "the loss has a gradient to no parameter, so that a step would train nothing; "
                "let some parameter that it depends on require a gradient"
            )
        schedule, program = self._program(plan, microbatches, recipe, purpose, updates)
        kernels = [
            [stage.kernel for stage in plans[size][1].stages if stage.kernel is not None]
            for size in sizes
        ]
        return Compiled(traced, plan, kernels, schedule, program)

    def state(self, traced: Traced) -> dict[str, Tensor]:
        """Name in the model → parameter, buffer or lifted constant."""
        found: dict[str, Tensor] = dict(self.model.named_parameters(remove_duplicate=False))
        found.update(self.model.named_buffers(remove_duplicate=False))
        found.update(traced.constants)
        return found

    # plans

    def _plan(
        self,
        batch: Batch,
        leaves: list[Any],
        size: int,
        purpose: Purpose,
        wants: tuple[bool, ...],
        fixed: bool,
    ) -> tuple[Traced, Plan]:
        graph_key = (self._mode(), batch.key, purpose == "step", size if fixed else None)
        key = (graph_key, size, purpose, wants)
        graph = self._graph(graph_key, batch, leaves, size, purpose, fixed)
        if key in self._plans:
            return graph.traced, self._plans[key]
        traced = graph.traced
        values = _values(traced, leaves, wants)
        state = self.state(traced)
        plan = cut(traced, graph.assignment, self._placement.owners)
        wanted = _wanted(traced, purpose)
        with untouched(self.model), intra_op_threads(self.threads):
            plan = runner.run(plan, Differentiate(values, state, wanted))
            checked = (id(traced), purpose != "infer")
            if checked not in self._checked:
                check(
                    traced,
                    plan,
                    values,
                    state,
                    lambda: self._call(batch, leaves, purpose == "step"),
                    purpose != "infer",
                )
                self._checked.add(checked)
        plan = replace(
            plan,
            stages=tuple(replace(s, costs=self._placement.costs.get(s.index)) for s in plan.stages),
        )
        self._plans[key] = plan
        return traced, plan

    def _mode(self) -> tuple[Any, ...]:
        """All that a trace depends on besides its inputs."""
        flags = tuple(module.training for module in self.model.modules())
        trained = tuple(p.requires_grad for p in self.model.parameters())
        cast = torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu")
        return flags, trained, cast

    def _graph(
        self,
        key: Any,
        batch: Batch,
        leaves: list[Any],
        size: int,
        purpose: Purpose,
        fixed: bool,
    ) -> Graph:
        kept = self._graphs.get((key, size)) or next(
            (g for k, g in self._graphs.items() if k[0] == key and g.traced.accepts(size)), None
        )
        if kept is not None:
            return kept
        traced = self._traced(batch, leaves, size, purpose == "step", fixed)
        values = _values(traced, leaves)
        wanted = _wanted(traced, purpose)
        assignment = self._placement.place(traced, values, self.state(traced), wanted)
        graph = Graph(*localise_sizes(traced, assignment))
        self._graphs[key, size] = graph
        return graph

    def _traced(
        self, batch: Batch, leaves: list[Any], size: int, with_loss_: bool, fixed: bool
    ) -> Traced:
        args, kwargs, targets = batch.unflatten(leaves)
        with untouched(self.model), intra_op_threads(self.threads):
            output = try_model(self.model, args, kwargs)
            if with_loss_ and self.loss is not None:
                try_loss(self.loss, output, targets)
            elif with_loss_:
                try_own_loss(output)
            traced = self._front_end(self.model, args, kwargs, size, fixed)
            if any(isinstance(out, Value) and out.batched is None for out in traced.outputs):
                told = batched_outputs(self.model, args, kwargs, output, size)
                traced = traced if told is None else with_batched(traced, told)
            if not with_loss_:
                return seed_randomness(traced)
            if self.loss is None:
                name = own_loss(traced)
                if name is None:
                    raise InputError(
                        "there is no loss: the model returns neither one tensor nor something "
                        "with .loss; give compile(..., loss=function)"
                    )
                return with_loss(seed_randomness(traced), name)
            module = LossModule(self.loss)
            if traced.leaves:
                return attach_leaf_loss(traced, module, output, targets)
            loss = self._front_end(module, (output, *targets), {}, size, fixed)
            source.credit(loss.graph, self.loss)
        # seeded as one graph: no draw of the loss has the number of one of the model's
        return seed_randomness(attach_loss(traced, loss, dict(module.named_buffers())))

    def _front_end(
        self,
        model: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        size: int,
        fixed: bool,
    ) -> Traced:
        if self.tracer == "symbolic":
            return trace_symbolically(model, args, kwargs, size)
        program = trace(model, args, kwargs, size, fixed)
        return functionalise(program, accepts(program, args, kwargs, size))

    def _call(self, batch: Batch, leaves: list[Any], with_loss_: bool) -> tuple[Any, Tensor | None]:
        """The model itself, and its loss, on one micro-batch."""
        args, kwargs, targets = batch.unflatten(leaves)
        with assigned_in_place(self.model):
            output = self.model(*args, **kwargs)
        if not with_loss_:
            return output, None
        if self.loss is not None:
            return output, self.loss(output, *targets)
        found = output.get("loss", output) if isinstance(output, dict) else output
        return output, getattr(found, "loss", found)

    # programs

    def _program(
        self,
        plan: Plan,
        microbatches: int,
        recipe: Callable[[int, int], Schedule],
        purpose: Purpose,
        updates: bool,
    ) -> tuple[Schedule, Program]:
        key = (plan.edges, microbatches, recipe, purpose, updates)
        if key not in self._programs:
            schedule = recipe(self.devices, microbatches).verify()
            if purpose == "step" and not schedule.trains:
                raise InputError(
                    f"schedule {schedule.name!r} has no backward, and a step needs one; train "
                    'with another, such as "1f1b", and call the pipe for inference'
                )
            lower = Lower(plan, updates=updates, pause=purpose == "call")
            self._programs[key] = schedule, runner.run(schedule, lower, communicate, free)
        return self._programs[key]


def _exchangeable(traced: Traced, plan: Plan, other: Traced, other_plan: Plan) -> bool:
    """Whether one program can run micro-batches of both graphs: the same edges and outputs."""

    def outputs(graph: Traced) -> list[str | None]:
        return [out.name if isinstance(out, Value) else None for out in graph.outputs]

    return (
        plan.edges == other_plan.edges
        and traced.loss == other.loss
        and outputs(traced) == outputs(other)
    )


def _values(traced: Traced, leaves: Sequence[Any], wants: Sequence[bool] = ()) -> dict[str, Any]:
    """Input value → a micro-batch's leaf; those that want a gradient require it."""
    values: dict[str, Any] = {}
    for index, (name, leaf) in enumerate(zip(traced.inputs, leaves, strict=True)):
        if name is not None:
            wanted = index < len(wants) and wants[index]
            values[name] = leaf.detach().requires_grad_() if wanted else leaf
    if traced.seeded:
        values[SEED] = torch.zeros((), dtype=torch.int64)
    return values


def _wanted(traced: Traced, purpose: Purpose) -> Wanted:
    match purpose:
        case "step":
            assert traced.loss is not None
            return Wanted(frozenset((traced.loss,)))
        case "call":
            names = (out.name for out in traced.outputs if isinstance(out, Value))
            return Wanted(frozenset(names), inputs=True)
        case "infer":
            return Wanted()


__all__ = ["Compiled", "Compiler", "Loss", "Purpose", "Tracer"]
