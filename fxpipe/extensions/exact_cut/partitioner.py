"""The partitioner that ``compile`` uses where this extension is there."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from fxpipe.extensions.exact_cut.solve import least_limits, solve
from fxpipe.passes.partition.work import Division, Partitioner, StageDevices, Work


class ExactCut(Partitioner):
    """Cuts several orders of the operations in the best way, within links and limits."""

    def divide(
        self, work: Work, machine: StageDevices, layers: Sequence[Hashable] = ()
    ) -> Division | None:
        """See Partitioner. Of divisions whose slowest stage is within one hundredth of the best
        found, it is the one that sends the fewest bytes."""
        return solve(work, machine, layers)

    def nearest(self, work: Work, machine: StageDevices) -> Division:
        """See Partitioner. It keeps the limits once all are scaled by the least common factor."""
        return least_limits(work, machine)
