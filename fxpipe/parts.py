"""What the core asks extensions for: the name of each part, the extension that has it, and, for
readers and type checkers, what it is. Nothing is imported before it is asked for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fxpipe.extend import Part

if TYPE_CHECKING:
    from fxpipe.extensions.clipping.arguments import check_clipping
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


class Parts:
    """The parts by name."""

    add_clip = Part("clipping.opcodes:add_clip", lambda: add_clip)
    add_reduce = Part("replicas.lowering:add_reduce", lambda: add_reduce)
    bind = Part("tensor_parallel.collectives:bound_to", lambda: bound_to)
    call = Part("differentiable.call:differentiable_call", lambda: differentiable_call)
    check_clipping = Part("clipping.arguments:check_clipping", lambda: check_clipping)
    check_copies = Part("copies.lowering:check_copies", lambda: check_copies)
    clipping = Part("clipping.clipping:Clipping", lambda: Clipping)
    collectives = Part("replicas.collectives:Collectives", lambda: Collectives)
    commit_moments = Part("deferred_batchnorm.moments:commit", lambda: commit)
    copies_faults = Part("copies.rules:copies_faults", lambda: copies_faults)
    coupled = Part("coupled.warning:warn_if_coupled", lambda: warn_if_coupled)
    delays = Part("overlapping.delays:too_small", lambda: too_small)
    divide = Part("tensor_parallel.extension:divided_model", lambda: divided_model)
    end_with_flush = Part("overlapping.delays:end_with_flush", lambda: end_with_flush)
    events = Part("streams.events:Streams", lambda: Streams)
    fitting = Part("planner.fitting:fitting_advice", lambda: fitting_advice)
    footprint = Part("memory_limits.footprint:estimate_footprint", lambda: estimate_footprint)
    gather_weights = Part("replicas.lowering:gather_weights", lambda: gather_weights)
    kept = Part("inductor.libraries:kept", lambda: kept)
    memory_budget = Part("memory_limits.budget:MemoryBudget", lambda: MemoryBudget)
    merged_moments = Part("deferred_batchnorm.moments:merged_moments", lambda: merged_moments)
    mesh = Part("ranks.mesh:ranks_of", lambda: ranks_of)
    misused = Part("resources.rules:misused", lambda: misused)
    metrics = Part("metrics.meter:metrics", lambda: metrics)
    offload = Part("offload.lowering:LowerOffload", lambda: LowerOffload)
    over_stages = Part("generation.generate:over_stages", lambda: over_stages)
    overlap = Part("overlapping.step:step", lambda: step)
    owners = Part("replicas.exchanges:owners", lambda: owners)
    part_gradients = Part("replicas.buckets:into_buckets", lambda: into_buckets)
    part_of = Part("replicas.exchanges:part_of", lambda: part_of)
    peaks = Part("simulator.pipe:peaks", lambda: peaks)
    place_devices = Part("streams.place_devices:place_devices", lambda: place_devices)
    rank_streams = Part("ranks.streams:StreamRanks", lambda: StreamRanks)
    recompiles = Part("recompiles.warning:Recompiles", lambda: Recompiles)
    refuse_copied = Part("copies.lowering:refuse_copied", lambda: refuse_copied)
    run_together = Part("copies.rules:run_together", lambda: run_together)
    seconds = Part("simulator.pipe:task_seconds", lambda: task_seconds)
    sharding = Part("sharding.placing:LowerShards", lambda: LowerShards)
    showing = Part("status_line.line:showing", lambda: showing)
    streams = Part("streams.launching:backend", lambda: backend)
    sum_copies = Part("copies.lowering:SumCopies", lambda: SumCopies)
    sum_replicas = Part("replicas.lowering:SumReplicas", lambda: SumReplicas)
    table = Part("stage_table.table:pipeline_table", lambda: pipeline_table)
    true_weights = Part("true_weights.true:true_weights", lambda: true_weights)
    unordered = Part("streams.clocks:unordered", lambda: unordered)
