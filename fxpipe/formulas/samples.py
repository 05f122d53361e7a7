"""What a schedule takes and keeps, exactly, for given counts and any times of its tasks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sympy.core.relational import Relational

from fxpipe.formulas.envelope import Envelope, Vector, envelope
from fxpipe.formulas.given import Basis, basis
from fxpipe.formulas.longest import Paths
from fxpipe.ir.program import Program
from fxpipe.ir.task import KINDS
from fxpipe.simulator.stash import peak_stash


@dataclass(frozen=True)
class Bases:
    """The basic times of the tasks of a schedule.

    Attributes:
        all: of all its tasks.
        tasks: of those that come for each micro-batch.
    """

    all: Basis
    tasks: Basis

    @staticmethod
    def of(kinds: frozenset[str], given: Sequence[Relational]) -> Bases:
        """Of the tasks of some letters, and what is known of their times."""
        letters = [letter for letter in KINDS if letter in kinds]
        each = [letter for letter in letters if KINDS[letter].per_microbatch]
        return Bases(basis(letters, given), basis(each, given))

    @property
    def apart(self) -> bool:
        """Whether nothing is known that relates what comes once a step to the rest."""
        kept, count = self.tasks.symbols, len(self.tasks.symbols)
        return self.all.symbols[:count] == kept and self.all.scale == self.tasks.scale


@dataclass(frozen=True)
class Sample:
    """One run, for all times of its tasks.

    Attributes:
        makespan: the linear forms of all basic times whose greatest it is; None for too many.
        through: of the times of micro-batches' tasks: until the last one is through.
        size: of the same: the most that a device idles between its first task and its last.
        work: of the same: the time of all these tasks.
        stash: stage → the most micro-batches that it keeps at once.
        peak: the most that a device's stages keep together.
    """

    makespan: Envelope | None
    through: Envelope | None
    size: Envelope | None
    work: Vector
    stash: Sequence[int]
    peak: int


def sample(program: Program, times: Bases) -> Sample:
    """Simulate a program at as many times as it takes to know it for all.

    Args:
        program: the lists of all its steps.
        times: the basic times of its tasks.

    Raises:
        InputError: the program gets stuck.
    """
    paths = Paths(program, times.tasks.columns)
    stash, devices = peak_stash(program)
    through = envelope(paths.through, times.tasks.walls)
    return Sample(
        _makespan(program, times, paths, through),
        through,
        envelope(paths.size, times.tasks.walls),
        paths.work(),
        stash,
        max(devices),
    )


def _makespan(
    program: Program, times: Bases, paths: Paths, through: Envelope | None
) -> Envelope | None:
    after = Paths(program, times.all.columns).after_all()
    if after is None or not times.apart:
        return envelope(Paths(program, times.all.columns).makespan, times.all.walls)
    if through is None:
        return None
    # what comes once a step comes after all else, and as much of it on every device
    count = len(times.tasks.symbols)
    rest = after[count:]
    units = [tuple(int(i == j) for j in range(count + len(rest))) for i in range(count, len(after))]
    zeros = (0,) * len(rest)
    return Envelope(
        frozenset((*form, *rest) for form in through.forms),
        frozenset({*((*ray, *zeros) for ray in through.rays), *units}),
    )
