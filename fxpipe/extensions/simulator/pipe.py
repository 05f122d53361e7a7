"""What a pipe predicts, by simulation, and what it measures."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor
from torch.optim import Optimizer

from fxpipe.arguments import check_whole
from fxpipe.compiler.compiled import Compiled
from fxpipe.compiler.options import Options
from fxpipe.engine import Engine
from fxpipe.errors import InputError
from fxpipe.extensions.shares import tell_shares
from fxpipe.extensions.shown import is_serial
from fxpipe.extensions.simulator import Simulation, simulate
from fxpipe.extensions.simulator.away import away_costs
from fxpipe.extensions.simulator.costs import (
    Cost,
    Costs,
    Key,
    Link,
    Links,
    Times,
    check_keys,
    measured_costs,
)
from fxpipe.extensions.simulator.held import plan_sizes
from fxpipe.extensions.simulator.later import measured_call
from fxpipe.extensions.simulator.measured import measured_run
from fxpipe.extensions.simulator.sizes import Sizes
from fxpipe.ir.plan import Plan
from fxpipe.ir.program import Program
from fxpipe.ir.value import HOST
from fxpipe.locks import locked
from fxpipe.parts import Parts
from fxpipe.pipeline import Pipeline
from fxpipe.torchtools.pytrees import BLOCK
from fxpipe.torchtools.state import without_collection

_PROFILED: WeakKeyDictionary[Pipeline, tuple[Program, int, Times]] = WeakKeyDictionary()
"""Pipe → the program that was profiled last, the samples of its micro-batches, and the mean times
of its tasks."""


def simulate_pipe(
    pipe: Pipeline,
    costs: Costs | None = None,
    *,
    links: Links | None = None,
    steps: int | None = None,
) -> Simulation:
    """Predict the time and the memory of a training step.

    The times, in seconds, are those of each stage's operations, measured one by one when the model
    was cut, or of the last ``profile``. Neither has what a step takes besides its tasks.

    ``memory`` has the peak of each device in bytes, as the table shows it, and its parts: what
    is always allocated, by storage, and what the nodes of the running graph hold, or what a stage
    with leaf modules took in its first run. On devices with memory of their own each storage takes
    a multiple of 512 bytes, as CUDA's allocator hands out. It does not count the scratch memory of
    operations.
    Gradients that ``.grad`` holds now are counted in addition to the step's own. Every rank
    predicts the same for all devices, without asking the other ranks: it takes gradients to be
    where it has some itself, and calls ``optimizer`` for the stages of other ranks, too, for their
    memory.

    Args:
        costs: the costs to predict with, instead of the measured ones.
        links: the links between devices; by default those of a ``Partition``.
        steps: how many steps are simulated in a row; see there.

    Raises:
        InputError: nothing is compiled or measured yet, or an argument does not fit.
    """
    compiled, options = measured_call(pipe), pipe._options
    found = predict_step(
        compiled.plan,
        compiled.whole(),
        held(pipe, compiled),
        costs or _profiled(pipe, compiled),
        links=links or (None if costs else given_links(options)),
        serial=not costs and is_serial(pipe._engine, compiled),
        steps=steps,
        away=None if options.costs is None else (options.costs.host,) * 2,
    )
    return replace(found, slices=compiled.schedule.slices)


def _profiled(pipe: Pipeline, compiled: Compiled) -> Times | None:
    """The mean times of the tasks of a call, if it was profiled last."""
    program, samples, times = _PROFILED.get(pipe, (None, 0, None))
    return times if program is compiled.program and samples == compiled.samples else None


def task_seconds(pipe: Pipeline) -> Times:
    """Letter and stage → the seconds of such a task in the last training step, as far as they were
    measured, with which ``simulate`` predicts. Measures nothing."""
    compiled = pipe._calls.compiled()
    return {**measured_costs(compiled.plan), **(_profiled(pipe, compiled) or {})}


@locked
def profile_pipe(
    pipe: Pipeline, /, *args: Any, target: Any = None, steps: int = 1, **kwargs: Any
) -> Simulation:
    """Train on a batch as ``step`` does, and return the measured times of all instructions.

    ``simulate`` predicts such steps with the times of these tasks from then on. Python's cyclic
    garbage is collected only after the steps, as a collection may take longer than one. The logger
    "fxpipe" warns once of a stage whose share of a step is far larger than predicted.

    Args:
        *args: the model's positional inputs.
        target: what the loss compares the output with.
        steps: how many steps to run and measure.
        **kwargs: the model's keyword inputs.

    Returns:
        The same as ``simulate`` returns, with measured times in seconds; over replicas, with
        those of this replica. ``costs`` are the times of the stages while all of them run, and
        can be given to ``simulate``. ``memory`` is predicted, as in ``simulate``, from the
        measured times.

    Raises:
        InputError: as in ``step``, or ``steps`` is below 1.
    """
    options, engine = pipe._options, pipe._engine
    with options.group.calling("profile"):
        check_whole("steps", steps, 1)
        with without_collection(), _timed(engine) as times:
            for _ in range(steps):
                pipe.step(*args, target=target, **kwargs)
        compiled = pipe._calls.compiled()
        sizes, serial = held(pipe, compiled), is_serial(engine, compiled)
        found = measured_run(compiled.whole(), steps, times, sizes, serial=serial)
        # all replicas predict with the times of the first
        taught = options.group.share("the times of tasks", lambda: [*found.costs.items()])
        known = {(x, stage): time for (x, stage), time in taught}
        _PROFILED[pipe] = compiled.program, compiled.samples, known
        tell_shares(pipe, compiled, found.tasks)
    return replace(found, slices=compiled.schedule.slices)


@locked
def held(pipe: Pipeline, compiled: Compiled) -> Sizes:
    """The bytes of what the stages and their optimizers hold, on all ranks."""
    progress = pipe._engine.progress
    state, optimizers = progress.state_of(compiled.traced), progress.optimizers_of(compiled.plan)
    return held_sizes(compiled, pipe._options, state, optimizers)


@contextmanager
def _timed(engine: Engine) -> Iterator[list[list[int]]]:
    """Take the times of the instructions in the block. Yields a list that is filled at its end:
    device → start and end of each instruction, in nanoseconds of the first rank's clock."""
    engine.flush()
    times: list[list[int]] = []
    engine.times = [[] for _ in engine._options.devices]
    try:
        yield times
        engine.flush()
        marks = engine.times
    finally:
        engine.times = []
    local = [engine.backend.nanoseconds(device, of) for device, of in enumerate(marks)]
    times += engine.group.timed(local)


def predict_step(
    plan: Plan,
    program: Program,
    sizes: Sizes,
    costs: Costs | None = None,
    *,
    links: Links | None = None,
    serial: bool = False,
    steps: int | None = None,
    away: tuple[float, float] | None = None,
) -> Simulation:
    """Simulate a program with the costs that were measured on its plan.

    Args:
        costs: costs by kind of task; they replace the measured ones of that kind.
        serial: whether one thread runs the lists of all devices.
        away: the bytes per second that offloads store and fetch; by default as measured.

    Raises:
        InputError: nothing was measured and no costs are given, or the given costs do not fit.
    """
    check_keys(costs)
    given: dict[Key, Cost] = dict((costs or {}).items())
    place = next((spec.device for spec in plan.specs.values()), "cpu")
    measured = measured_costs(plan) | away_costs(plan, program, sizes, away or place)
    kept: dict[Key, Cost] = {key: t for key, t in measured.items() if key[0] not in given}
    if not (known := kept | given):
        raise InputError(
            "nothing was measured on this plan; give costs=, such as those of pipe.profile(...)"
        )
    found = simulate(program, known, links=links, serial=serial, sizes=sizes, steps=steps)
    return replace(found, seconds=True)


def given_links(options: Options) -> Links | None:
    """The links between devices of the ``Partition``; None if it has none."""
    links = options.partition.links(len(options.devices))
    return {pair: Link(*link) for pair, link in links.items()} or None


def peaks(
    compiled: Compiled,
    options: Options,
    state: Mapping[str, Tensor],
    own: Sequence[Optimizer | None] | None = None,
) -> list[int]:
    """Device → the most bytes that it is predicted to hold in a step; see ``held_sizes``. If
    nothing was measured, tasks take units of time."""
    sizes = held_sizes(compiled, options, state, own)
    costs = None if measured_costs(compiled.plan) else {"F": 1.0}
    predicted = predict_step(compiled.plan, compiled.whole(), sizes, costs)
    return [memory.peak for memory in predicted.memory]


def held_sizes(
    compiled: Compiled,
    options: Options,
    state: Mapping[str, Tensor],
    own: Sequence[Optimizer | None] | None = None,
) -> Sizes:
    """Count the bytes that the stages of all processes and their optimizers hold.

    Optimizers that this process does not have are made, only to be counted. If they are sharded,
    all are made, with the parameters of the replica that has the largest share.

    Args:
        state: name in the model → parameter or buffer.
        own: stage → the optimizer that this process has; None if it has none yet. Without
            ``optimizer=``, the state of an Adam that the caller steps is then included.
    """
    plan, given = compiled.plan, options.optimizer
    optimizers = [*(own or [None] * len(plan.stages))]
    elsewhere = {s.index for s in plan.stages if own is not None and not options.owns(s.index)}
    every = [{a.target: state[a.target] for a in stage.parameters} for stage in plan.stages]
    if options.shards:
        every = _largest_shares(every, compiled.schedule.placement, options.replicas)
    for stage, parameters in enumerate(every):
        missing = own is None or stage in elsewhere or options.shards
        if given is not None and plan.stages[stage].parameters and missing:
            optimizers[stage] = given.of(parameters)
    early = compiled.program.window if options.ranks else 0
    schedule = compiled.schedule  # of a stage with copies, some micro-batches come from elsewhere
    placement = () if any(schedule.working) else schedule.placement
    sizes = plan_sizes(
        plan,
        state,
        optimizers,
        early=early,
        elsewhere=elsewhere,
        placement=placement,
        block=BLOCK if options.places else 1,
    )
    if compiled.traced.loss is not None:
        sizes = replace(sizes, handed=frozenset({compiled.traced.loss}))
    if options.costs is not None:
        sizes = replace(sizes, context=options.costs.context)
    if options.ranks and (each := int(options.partition.communicator_bytes)):
        more = {s: each * count for s, count in communicators(compiled, options).items()}
        held = {s: size + more.get(s, 0) for s, size in sizes.optimizer.items()}
        sizes = replace(sizes, optimizer=held)
    if own is not None or given is not None:
        return sizes
    adam = {s: size + 2 * sizes.gradients[s] for s, size in sizes.optimizer.items()}
    return replace(sizes, optimizer=adam)


def communicators(compiled: Compiled, options: Options) -> dict[int, int]:
    """The first stage of each device → how many communicators its rank has: one for each direction
    in which it exchanges tensors, and for what it exchanges with other replicas and columns."""
    plan, placement = compiled.plan, compiled.schedule.placement
    edges = [e for e in (*plan.edges, *plan.gradients) if HOST not in (e.source, e.target)]
    ways = {(placement[edge.source], placement[edge.target]) for edge in edges}
    beside = (options.replicas > 1) + len(getattr(options.group, "columns", ()))
    return {
        placement.index(device): beside + sum(device in way and way[0] != way[1] for way in ways)
        for device in set(placement)
    }


def _largest_shares(
    stages: Sequence[Mapping[str, Tensor]], placement: Sequence[int], replicas: int
) -> list[dict[str, Tensor]]:
    """Stage → the parameters that the replica updates that has the most bytes of its device."""
    loads = {device: [0] * replicas for device in placement}
    by = [
        Parts.owners.find()([p.nbytes for p in stage.values()], loads[device])
        for stage, device in zip(stages, placement, strict=True)
    ]
    most = {device: each.index(max(each)) for device, each in loads.items()}
    return [
        {name: p for (name, p), of in zip(stage.items(), owner, strict=True) if of == most[device]}
        for stage, owner, device in zip(stages, by, placement, strict=True)
    ]
