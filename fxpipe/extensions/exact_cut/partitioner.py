"""The partitioner that ``compile`` uses where this extension is there."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from fxpipe.extensions.exact_cut.bound import lower_bound
from fxpipe.extensions.exact_cut.solve import least_limits, solve
from fxpipe.passes.partition.work import Division, Machine, Partitioner, Solution, Work


class ExactCut(Partitioner):
    """Looks at all legal divisions, within links and limits, and proves how good one is."""

    least = "at least "

    def divide(
        self, work: Work, machine: Machine, layers: Sequence[Hashable] = ()
    ) -> Solution | None:
        """See Partitioner. The slowest stage is within one hundredth of the best, where that can be
        proven; of those divisions it is the one that sends the fewest bytes."""
        return solve(work, machine, layers)

    def nearest(self, work: Work, machine: Machine) -> Division:
        """See Partitioner. It keeps the limits once all are scaled by the least common factor."""
        return least_limits(work, machine)

    def bound(self, work: Work, machine: Machine) -> float:
        """See Partitioner."""
        return lower_bound(work, machine)
