"""A contest on one case: a step of each contender in turn."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

from benchmarks.peers.contenders import CONTENDERS, LATE, LOOP
from benchmarks.peers.group import Group, GroupError, Memory, Step
from benchmarks.report import timed

SAME = "same"
WARM_UP = 3
"""Steps that count for nothing but their losses."""


@dataclass
class Run:
    """What one contender did.

    Attributes:
        contender: its name.
        set_up: seconds until its first step was done.
        steps: all of them, the first ones too.
        memory: at the end.
        error: why there is no more than that.
    """

    contender: str
    set_up: float = 0.0
    steps: list[Step] = field(default_factory=list)
    memory: Memory | None = None
    error: str | None = None

    @property
    def counted(self) -> list[Step]:
        """The steps after the warm-up."""
        return self.steps[WARM_UP:]

    @property
    def losses(self) -> list[float]:
        """Of all steps."""
        return [loss for step in self.steps for loss in step.losses]

    @contextmanager
    def noting(self) -> Iterator[None]:
        """Inside, an error of the group is written down; the first one stays."""
        try:
            yield
        except GroupError as error:
            self.error = self.error or str(error)


@dataclass(frozen=True)
class Contest:
    """What all did on one case: those that were timed, and the one with late gradients."""

    runs: dict[str, Run]
    late: Run

    def losses(self, who: str) -> str:
        """How its losses differ from those of the loop that has gradients of the same versions."""
        run = self.runs[who]
        other = self.late if CONTENDERS[who].late else self.runs[LOOP]
        if run.losses == other.losses:
            return SAME
        pairs = zip(run.losses, other.losses, strict=True)
        worst = max(abs(one - two) / abs(two) for one, two in pairs)
        return f"±{worst:.0e}"

    def same(self, who: str) -> bool:
        """Whether it ran, and its losses do not differ at all."""
        return self.runs[who].error is None and self.losses(who) == SAME


def hold(case: str, rounds: int) -> Iterator[Contest]:
    """The same contest after each round, until so many were timed."""
    contest = Contest({who: Run(who) for who in CONTENDERS}, Run(LATE))
    runs = [*contest.runs.values(), contest.late]
    with ExitStack() as stack:
        groups = {run.contender: Group(run.contender, case) for run in runs}
        for group in groups.values():
            stack.callback(group.close)
        for run in runs:
            with run.noting():
                groups[run.contender].imported()
        for run in runs:  # one after another: some measure while they set up
            with run.noting():
                _, run.set_up = timed(groups[run.contender].set_up)
                run.steps.append(groups[run.contender].step())
                run.set_up += run.steps[0].seconds
        for round_ in range(1, WARM_UP + rounds):
            at = round_ % len(runs)  # nobody always follows the same one
            for run in (*runs[at:], *runs[:at]):
                with run.noting():
                    run.steps.append(groups[run.contender].step())
            yield contest
        for run in runs:
            with run.noting():
                run.memory = groups[run.contender].memory()
        yield contest
