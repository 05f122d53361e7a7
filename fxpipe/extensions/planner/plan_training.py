"""``plan_training``: measure a model, and rank the ways to train it on a cluster."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from math import ceil, inf
from typing import Any

import torch
from torch import nn

from fxpipe.arguments import check_flags, check_whole, read_example, read_extensions
from fxpipe.compiler.compiler import Compiler
from fxpipe.compiler.front_end import Call
from fxpipe.devices import read_devices
from fxpipe.entry import compile
from fxpipe.errors import InputError
from fxpipe.extensions.planner import offloading
from fxpipe.extensions.planner.candidates import Candidate, Modes
from fxpipe.extensions.planner.choices import TrainingPlan
from fxpipe.extensions.planner.cluster import Cluster
from fxpipe.extensions.planner.profile import Cut, Profile
from fxpipe.extensions.planner.ranking import choices
from fxpipe.extensions.planner.stages import Stages
from fxpipe.extensions.simulator.away import away_rates
from fxpipe.ir.recipe import find_recipe
from fxpipe.ir.traced import Traced
from fxpipe.passes.partition.assignment import Assignment
from fxpipe.passes.partition.atoms import Atoms, atoms_of, footprint_of
from fxpipe.passes.partition.measure import NodeCost
from fxpipe.pipeline import Pipeline
from fxpipe.runtime.choice import ThreadChoice as Threads
from fxpipe.runtime.devices.lanes import home
from fxpipe.runtime.weights.optimizer import state_size
from fxpipe.torchtools.state import untouched, without_collection

SIZES = (2, 8)
"""The sizes of micro-batches, in samples, for which a model is measured."""

_ELEMENTS = 1 << 20


def plan_training(
    model: nn.Module,
    cluster: Cluster | int | Sequence[str | torch.device],
    batch: int,
    *,
    example: Any,
    stale: bool = False,
    schedules: Sequence[str] | None = None,
    recompute: bool = True,
    offload: bool = True,
    keep: int = 10,
    device: str | torch.device | None = None,
    sizes: Sequence[int] = SIZES,
    **options: Any,
) -> TrainingPlan:
    """Rank the ways to train a model on a cluster by simulations with measured times.

    A way is: how many replicas and stages, where they are, the cuts, the number of micro-batches,
    the schedule, recomputation and offloading. Each stage has a device of its own, and all replicas
    are alike.

    The model is traced once, and cut once for each number of stages. It is measured, operation by
    operation, for a few sizes of micro-batches. Times for other sizes are interpolated linearly, so
    that the fixed costs of operations count. Ways whose lower bound is too slow are not simulated.
    Memory is predicted as for a pipe.

    Args:
        model: the model; it is not changed.
        cluster: the devices: a Cluster; or devices of this machine, as ``compile`` takes them,
            which ``Cluster.measured`` then measures.
        batch: samples of a step, over all replicas.
        example: a batch of any size, as ``compile`` takes it.
        stale: whether batches may read weights that are older than the newest, so that no flush is
            needed.
        schedules: names of the schedules to choose among; by default all of the library's training
            schedules with one stage on each device.
        recompute: whether stages may recompute if memory does not suffice.
        offload: whether they may then also offload.
        keep: how many choices to return.
        device: where the model is measured: by default on the first of this machine's devices that
            ``cluster`` names, else on a CPU device.
        sizes: the sizes of micro-batches, in samples, for which it is measured.
        **options: of ``fxpipe.compile``, such as ``loss`` and ``optimizer``. The choices compile
            with them, too.

    Raises:
        InputError: an argument is wrong, or the batch cannot be divided among the devices.
        TraceError: the model cannot be traced.
    """
    chosen = {"schedule", "microbatches", "partition", "devices", "memory_limits"} & options.keys()
    if chosen:
        raise InputError(f"{min(chosen)} is what plan_training chooses; leave it out")
    if isinstance(cluster, str):
        raise InputError(
            f"cluster is {cluster!r}, and texts are read no longer: write "
            'Cluster((Level("host", 8, Link(latency=2e-6, bandwidth=300e9)),), memory=16 * 2**30)'
        )
    if not isinstance(cluster, Cluster):
        places = [home(place) for place in read_devices(cluster)]
        cluster, device = Cluster.measured(places), device or places[0]
    check_whole("batch", batch, 1)
    check_whole("keep", keep, 1)
    check_flags(stale=stale, recompute=recompute, offload=offload)
    if not isinstance(sizes, Collection) or isinstance(sizes, str) or not sizes:
        raise InputError(f"sizes is {sizes!r}; give the samples of micro-batches, such as (2, 8)")
    for size in sizes:
        check_whole("a size of sizes", size, 1)
    names = [] if isinstance(schedules, str) else schedules
    if schedules is not None and not (names and all(isinstance(name, str) for name in names)):
        raise InputError(f'schedules is {schedules!r}; give a list of names, such as ["1f1b"]')
    recipes = None if schedules is None else [find_recipe(name) for name in schedules]
    pipe = compile(model, [device or "cpu"], microbatches=1, **options)
    with pipe, without_collection():
        cuts = _Cuts(pipe, example, [size for size in sizes if size <= batch] or [1], batch)
        plan = choices(
            cuts.profile,
            cluster,
            batch,
            stale=stale,
            halves=not cuts.under_autograd,
            recipes=recipes,
            recompute=recompute,
            offload=offload,
            keep=keep,
            peaks=cuts.peaks,
        )
    limits = {} if cluster.memory == inf else {"memory_limits": cluster.memory}
    ready = [
        replace(each, make=partial(_compile, model, {**options, **limits}, cuts.taken(each.cut)))
        for each in plan.choices
    ]
    return replace(plan, choices=tuple(ready))


def _compile(
    model: nn.Module,
    planned: dict[str, Any],
    cut: Any,
    devices: Any,
    *,
    offload: Modes,
    **options: Any,
) -> Pipeline:
    """Make the pipe of a choice from the ``planned`` options, which ``plan_training`` was given,
    and those of ``Choice.compile``. It has the chosen cut if this process runs all devices."""
    example = options.pop("example", None)
    options = {**planned, **options}
    extensions = read_extensions(options.pop("extensions", ()))
    extensions = offloading.with_modes(extensions, offload)
    pipe = compile(model, devices, extensions=extensions, **options)
    if pipe._options.group.size == 1:
        pipe._compiler.take(*cut)
    if example is not None:
        args, kwargs = read_example(example)
        pipe.prepare(*args, **kwargs)
    return pipe


class _Cuts:
    """A model that is measured for some sizes of micro-batches, and compiled for different cuts."""

    def __init__(self, pipe: Pipeline, example: Any, sizes: Sequence[int], batch: int) -> None:
        """Trace and measure the model of a pipe."""
        self._pipe, self._batch = pipe, batch
        self._made: dict[tuple[int, int], Stages] = {}
        args, kwargs = read_example(example)
        named = {name: value for name, value in kwargs.items() if name != "target"}
        micro = pipe._calls.taken(args, named, kwargs.get("target"), step=True)
        schedule = pipe._compiler.timetable.schedule(1, "step")
        leaves, size = micro.leaves[0], micro.batch.size
        call = Call(micro.batch, leaves, size, "step", (False,) * len(leaves), schedule)
        with untouched(pipe._options.model):
            self._measured = pipe._compiler.plans.measured(call, sizes)
            self.profile, self._atoms = _profile(pipe, self._measured)
        self._call = call.zeros()

    @property
    def under_autograd(self) -> bool:
        """Whether autograd runs the backwards, which are then not measured in halves."""
        return bool(self._measured[max(self._measured)]["traced"].under_autograd)

    def taken(self, cut: Cut) -> tuple[Traced, Assignment, Mapping[str, NodeCost]]:
        """The whole graph, the stages of its nodes, and the nodes' costs."""
        largest = self._measured[max(self._measured)]
        division = cut.division
        nodes = self._atoms.named(division.stage_of)
        assignment = Assignment(cut.count, nodes, division.loads)
        return largest["traced"], assignment, largest["costs"]

    def stages(self, cut: Cut, replicas: int, candidate: Candidate) -> Stages:
        """The stages of a cut, compiled as for a pipe. The first call compiles for the size of the
        candidate's micro-batches, as one size is the best for most schedules."""
        key, batch = (cut.count, replicas), self._batch // replicas
        if key not in self._made:
            single = self._pipe._options
            options = replace(
                single,
                devices=single.devices * cut.count,
                torch_devices=single.torch_devices * cut.count,
                places=single.places * cut.count,
                recipe=find_recipe("zb-h1"),
                microbatches=None,
                replicas=replicas,
                threads=max(1, torch.get_num_threads() // cut.count),
            )
            compiler = Compiler(options, Threads(cut.count, options.dispatch))
            compiler.plans.take_traces(self._pipe._compiler.plans)
            compiler.take(*self.taken(cut))
            call = self._call.resized(ceil(batch / candidate.microbatches))
            updates = self._pipe._engine.updates
            compiled = compiler.unchecked(call, updates)
            limits, measured = (inf,) * cut.count, max(self._measured)
            self._made[key] = Stages(compiler, limits, compiled, batch, updates, measured)
        return self._made[key]

    def peaks(self, cut: Cut, replicas: int, candidate: Candidate) -> tuple[float, ...]:
        """Device → the bytes that it is predicted to hold, as for a pipe."""
        return self.stages(cut, replicas, candidate).peaks(candidate)


def _profile(pipe: Pipeline, measured: Mapping[int, Mapping[str, Any]]) -> tuple[Profile, Atoms]:
    """The profile and the atoms of a model that was measured for some sizes of micro-batches."""
    options = pipe._options
    samples, largest = max(measured.items())
    traced, plan, state = largest["traced"], largest["plan"], largest["state"]
    footprint = footprint_of(traced, plan, largest["costs"], state, 1.0)
    trained = {k: n for k, n in footprint.resident.items() if state[k].requires_grad}
    atoms = atoms_of(traced, largest["costs"], replace(footprint, resident=trained))

    def seconds(size: int) -> dict[str, list[float]]:
        """Letter of a task → atom → seconds."""
        costs: dict[str, NodeCost] = measured[size]["costs"]
        by_atom = [[costs[node.name] for node in nodes] for nodes in atoms.nodes]
        return {
            "F": [sum(cost.forward for cost in atom) for atom in by_atom],
            "B": [sum(cost.backward for cost in atom) for atom in by_atom],
            "I": [sum(cost.input_grad for cost in atom) for atom in by_atom],
            "W": [sum(cost.weight_grad for cost in atom) for atom in by_atom],
        }

    ratio = state_size(options.optimizer)
    # an update moves 3 bytes per byte of a weight and 2 per byte of its state; adding moves 3
    update = (3 + 2 * ratio) / 3 * _adding(pipe.devices[0])
    profile = Profile(
        atoms.work,
        samples,
        {size: seconds(size) for size in measured},
        ratio,
        update,
        atoms.layers,
        None if options.holds_saved else away_rates(pipe.devices[0].type),
    )
    return profile, atoms


def _adding(device: torch.device) -> float:
    """Return the seconds to add one byte to another in memory."""
    first, second = (torch.zeros(_ELEMENTS, device=device) for _ in range(2))
    best = inf
    for _ in range(5):
        start = time.perf_counter()
        first.add_(second)
        if device.type != "cpu":
            torch.accelerator.synchronize(device)
        best = min(best, time.perf_counter() - start)
    return best / first.nbytes
