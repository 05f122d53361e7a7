"""What the core asks extensions for: the name of each part, the extension that has it, and, for
readers and type checkers, what it is. Nothing is imported before it is asked for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fxpipe.extend import Part

if TYPE_CHECKING:
    from fxpipe.extensions.clipping.clipping import Clipping
    from fxpipe.extensions.clipping.opcodes import add_clip
    from fxpipe.extensions.copies.lowering import SumCopies, check_copies, refuse_copied
    from fxpipe.extensions.copies.rules import copies_faults, run_together
    from fxpipe.extensions.coupled.warning import warn_if_coupled
    from fxpipe.extensions.deferred_batchnorm.moments import commit, merged_moments
    from fxpipe.extensions.differentiable.call import differentiable_call
    from fxpipe.extensions.generation.generate import over_stages
    from fxpipe.extensions.inductor.libraries import kept
    from fxpipe.extensions.memory_limits.budget import MemoryBudget
    from fxpipe.extensions.memory_limits.footprint import estimate_footprint
    from fxpipe.extensions.metrics.meter import metrics
    from fxpipe.extensions.offload.lowering import LowerOffload
    from fxpipe.extensions.overlapping.delays import end_with_flush, too_small
    from fxpipe.extensions.overlapping.step import step
    from fxpipe.extensions.planner.fitting import fitting_advice
    from fxpipe.extensions.ranks.mesh import ranks_of
    from fxpipe.extensions.ranks.streams import StreamRanks
    from fxpipe.extensions.recompiles.warning import Recompiles
    from fxpipe.extensions.replicas.buckets import into_buckets
    from fxpipe.extensions.replicas.collectives import Collectives
    from fxpipe.extensions.replicas.exchanges import owners, part_of
    from fxpipe.extensions.replicas.lowering import SumReplicas, add_reduce, gather_weights
    from fxpipe.extensions.resources.rules import misused
    from fxpipe.extensions.sharding.placing import LowerShards
    from fxpipe.extensions.simulator.pipe import peaks, task_seconds
    from fxpipe.extensions.stage_table.table import pipeline_table
    from fxpipe.extensions.status_line.line import showing
    from fxpipe.extensions.streams.clocks import unordered
    from fxpipe.extensions.streams.events import Streams
    from fxpipe.extensions.streams.launching import backend
    from fxpipe.extensions.streams.place_devices import place_devices
    from fxpipe.extensions.tensor_parallel.collectives import bound_to
    from fxpipe.extensions.tensor_parallel.extension import divided_model
    from fxpipe.extensions.true_weights.true import true_weights

_HERE = "fxpipe.extensions"


class Parts:
    """The parts by name."""

    add_clip = Part(f"{_HERE}.clipping.opcodes:add_clip", lambda: add_clip)
    add_reduce = Part(f"{_HERE}.replicas.lowering:add_reduce", lambda: add_reduce)
    bind = Part(f"{_HERE}.tensor_parallel.collectives:bound_to", lambda: bound_to)
    call = Part(f"{_HERE}.differentiable.call:differentiable_call", lambda: differentiable_call)
    check_copies = Part(f"{_HERE}.copies.lowering:check_copies", lambda: check_copies)
    clipping = Part(f"{_HERE}.clipping.clipping:Clipping", lambda: Clipping)
    collectives = Part(f"{_HERE}.replicas.collectives:Collectives", lambda: Collectives)
    commit_moments = Part(f"{_HERE}.deferred_batchnorm.moments:commit", lambda: commit)
    copies_faults = Part(f"{_HERE}.copies.rules:copies_faults", lambda: copies_faults)
    coupled = Part(f"{_HERE}.coupled.warning:warn_if_coupled", lambda: warn_if_coupled)
    delays = Part(f"{_HERE}.overlapping.delays:too_small", lambda: too_small)
    divide = Part(f"{_HERE}.tensor_parallel.extension:divided_model", lambda: divided_model)
    end_with_flush = Part(f"{_HERE}.overlapping.delays:end_with_flush", lambda: end_with_flush)
    events = Part(f"{_HERE}.streams.events:Streams", lambda: Streams)
    fitting = Part(f"{_HERE}.planner.fitting:fitting_advice", lambda: fitting_advice)
    footprint = Part(
        f"{_HERE}.memory_limits.footprint:estimate_footprint", lambda: estimate_footprint
    )
    gather_weights = Part(f"{_HERE}.replicas.lowering:gather_weights", lambda: gather_weights)
    kept = Part(f"{_HERE}.inductor.libraries:kept", lambda: kept)
    memory_budget = Part(f"{_HERE}.memory_limits.budget:MemoryBudget", lambda: MemoryBudget)
    merged_moments = Part(
        f"{_HERE}.deferred_batchnorm.moments:merged_moments", lambda: merged_moments
    )
    mesh = Part(f"{_HERE}.ranks.mesh:ranks_of", lambda: ranks_of)
    misused = Part(f"{_HERE}.resources.rules:misused", lambda: misused)
    metrics = Part(f"{_HERE}.metrics.meter:metrics", lambda: metrics)
    offload = Part(f"{_HERE}.offload.lowering:LowerOffload", lambda: LowerOffload)
    over_stages = Part(f"{_HERE}.generation.generate:over_stages", lambda: over_stages)
    overlap = Part(f"{_HERE}.overlapping.step:step", lambda: step)
    owners = Part(f"{_HERE}.replicas.exchanges:owners", lambda: owners)
    part_gradients = Part(f"{_HERE}.replicas.buckets:into_buckets", lambda: into_buckets)
    part_of = Part(f"{_HERE}.replicas.exchanges:part_of", lambda: part_of)
    peaks = Part(f"{_HERE}.simulator.pipe:peaks", lambda: peaks)
    place_devices = Part(f"{_HERE}.streams.place_devices:place_devices", lambda: place_devices)
    rank_streams = Part(f"{_HERE}.ranks.streams:StreamRanks", lambda: StreamRanks)
    recompiles = Part(f"{_HERE}.recompiles.warning:Recompiles", lambda: Recompiles)
    refuse_copied = Part(f"{_HERE}.copies.lowering:refuse_copied", lambda: refuse_copied)
    run_together = Part(f"{_HERE}.copies.rules:run_together", lambda: run_together)
    seconds = Part(f"{_HERE}.simulator.pipe:task_seconds", lambda: task_seconds)
    sharding = Part(f"{_HERE}.sharding.placing:LowerShards", lambda: LowerShards)
    showing = Part(f"{_HERE}.status_line.line:showing", lambda: showing)
    streams = Part(f"{_HERE}.streams.launching:backend", lambda: backend)
    sum_copies = Part(f"{_HERE}.copies.lowering:SumCopies", lambda: SumCopies)
    sum_replicas = Part(f"{_HERE}.replicas.lowering:SumReplicas", lambda: SumReplicas)
    table = Part(f"{_HERE}.stage_table.table:pipeline_table", lambda: pipeline_table)
    true_weights = Part(f"{_HERE}.true_weights.true:true_weights", lambda: true_weights)
    unordered = Part(f"{_HERE}.streams.clocks:unordered", lambda: unordered)
