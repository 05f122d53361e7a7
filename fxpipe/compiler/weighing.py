"""Weigh the losses of micro-batches, so that their sum is the loss of the batch."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

from fxpipe.compiler.compiled import Compiled
from fxpipe.compiler.options import Options
from fxpipe.ir.traced import Traced
from fxpipe.runtime.batch import MicroBatches


class Weighing:
    """Weighs the losses of a pipe's micro-batches by what its objective counts, which is samples.
    The extension that has the option "weighing" reads from a loss what it is a mean over."""

    def __init__(self, options: Options) -> None:
        self.options = options

    def terms(self, traced: Traced, split: Collection[int]) -> Sequence[Any]:
        """What has to be known of the loss of a graph, for ``Compiled.terms``; ``split`` are the
        flat inputs of which each micro-batch has a part."""
        return ()

    def weighed(self, compiled: Compiled, micro: MicroBatches) -> tuple[Compiled, MicroBatches]:
        """The same call, and micro-batches each with the weight of its loss in the batch's loss.

        In a step the batch is that of all replicas, and in a call, which has a loss only if the
        model returns one, that of this replica. Raises InputError as ``Objective.counts`` and
        ``Objective.weights``.
        """
        if self.options.objective.averages and self.replicas(compiled) == 1:
            return compiled, micro  # weighted by samples already
        return compiled, self.joined(compiled, micro)

    def joined(self, compiled: Compiled, micro: MicroBatches) -> MicroBatches:
        """The micro-batches, where they are not just weighted by their samples."""
        objective = self.options.objective
        parts = self.exchanged(compiled, objective.counts(micro))
        return with_weights(micro, objective.weights([x for part in parts for x in part]))

    def replicas(self, compiled: Compiled) -> int:
        """How many replicas share the batch of a call."""
        return self.options.group.replicas if compiled.purpose == "step" else 1

    def exchanged(self, compiled: Compiled, own: Any) -> Sequence[Any]:
        """Replica → what it has given; only ``own`` if there is no other."""
        group = self.options.group
        if self.replicas(compiled) == 1:
            return [own]
        by_rank = group.exchange("the weights", own)
        return [by_rank[rank] for rank in group.twins]


def with_weights(micro: MicroBatches, weights: Sequence[float]) -> MicroBatches:
    """The micro-batches of this replica, with the weights of those of all replicas."""
    if len(weights) == len(micro):
        return replace(micro, weights=weights)
    cut = [weights[first : first + len(micro)] for first in range(0, len(weights), len(micro))]
    return replace(micro, weights=cut[micro.replica], all_weights=cut)
