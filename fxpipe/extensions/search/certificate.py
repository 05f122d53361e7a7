"""A certificate: a schedule, its time, a bound that no schedule can beat, and a check of these."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

from fxpipe.extensions.search.bounds import Bound
from fxpipe.extensions.search.problem import Problem
from fxpipe.ir.schedule import Schedule


@dataclass(frozen=True)
class Certificate:
    """What a search knows about its problem.

    Attributes:
        problem: the times, the placement and the memory.
        schedule: the best schedule that was found.
        value: its time: of one step or, without flush, of each of many steps.
        bound: the time below which no schedule of the problem can be, and why.
        wide: only if the placement was searched, too: the same problem with each stage on a device
            of its own, with the most memory and the fastest links of all devices. The bound then
            holds for every placement that leaves no device empty.
    """

    problem: Problem
    schedule: Schedule
    value: float
    bound: Bound
    wide: Problem | None = None

    @property
    def gap(self) -> float:
        """How far the schedule is above the bound, as a share of the bound; 0 if it is optimal."""
        return gap_of(self.value, self.bound.time)

    @property
    def optimal(self) -> bool:
        return self.gap == 0

    @property
    def reason(self) -> str:
        """Why no schedule can be below the bound, in words and numbers."""
        bound, problem = self.bound, self.wide or self.problem
        device = f"device {problem.placement[bound.stage]}"
        if self.wide is not None:
            device = f"the device of stage {bound.stage}"
        own = {key: f"{number:.6g}" for key, number in bound.terms.items()}
        match bound.why:
            case "work":
                return (
                    f"{device} waits {own['before']} for its first micro-batch, idles "
                    f"{own['idle']} until it can go backward, computes {own['work']} and updates "
                    f"in {own['update']}"
                )
            case "device":
                return (
                    f"{own['work']} of {device}'s work cannot "
                    f"start before {own['before']}, {own['behind']} must follow on each part of "
                    f"it, and it updates in {own['update']}"
                )
            case "chain":
                end = int(bound.terms["end"])
                return (
                    f"it takes {own['down']} to stage {bound.stage}, {own['between']} there from "
                    f"the first forward to the last input gradient, {own['up']} back to stage "
                    f"{end}, and {own['after']} for what follows there"
                )
            case "memory":
                return (
                    f"{device} keeps what a batch needs for the least time: {own['kept']} in all, "
                    f"of {own['memory']} at any time"
                )
            case "room":
                return (
                    f"{own['at once']} micro-batches at once find room on stage {bound.stage}, and "
                    f"each is there for at least {own['trip']}"
                )
            case "cycle":
                return (
                    f"stage {bound.stage} takes {own['time']} from a batch's first forward to its "
                    f"update, which is there {problem.delay + 1} batches later"
                )
            case "spread":
                return (
                    f"however stages are put on {self.problem.devices} devices, one of them waits "
                    f"for its first micro-batch and computes for {own['longest']} in all, and "
                    f"updates take {own['update']}"
                )
        return "CP-SAT found no schedule below it, and searched them all"

    def __str__(self) -> str:
        what = "a step" if self.problem.flush else "each of many steps"
        gap = "optimal" if self.optimal else f"within {100 * self.gap:.2g}% of the best"
        gap = "which is all that is known" if self.gap == inf else gap
        none = "none" if self.wide is None else "on any placement none"
        return (
            f"{what} takes {self.value:.6g}; {none} takes less than {self.bound.time:.6g} ({gap}):"
            "\n"
            f"{self.reason}"
        )

    def check(self) -> tuple[str, ...]:
        """Check the schedule, its time and the bound anew, from the problem alone.

        Returns:
            What has to be taken on trust, as the check cannot show it: a bound from the solver.

        Raises:
            VerificationError: something is not as the certificate says; it lists all of that.
        """
        from fxpipe.extensions.search.check import check_certificate

        return check_certificate(self)


def gap_of(value: float, bound: float) -> float:
    """How far a time is above a bound, as a share of the bound; infinite above a bound of 0."""
    if value - bound <= 1e-9 * value:
        return 0.0
    return (value - bound) / bound if bound else inf
