"""What a model is measured to cost, and what its stages take where it is cut into some of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache

from fxpipe.passes.partition.solver.solve import Solution, solve
from fxpipe.passes.partition.work import Machine, Work
from fxpipe.planner.candidates import Affine
from fxpipe.simulator.costs import Overheads
from fxpipe.simulator.sizes import Sizes

KINDS = "FBIW"


@dataclass(frozen=True)
class Profile:
    """A model as atoms, which are never cut, in an order in which values run forward.

    Attributes:
        work: what the partition sees: seconds and values of a micro-batch of ``samples``, and as
            ``resident`` the bytes of the trained parameters alone.
        samples: the size of that micro-batch.
        seconds: samples of a micro-batch → letter of a task → atom → seconds.
        state: bytes of optimizer state for each byte of a parameter.
        update: seconds of an update for each byte of a parameter.
        overheads: what a machine takes besides the operations of tasks.
        layers: atom → what it belongs to, for names.
        away: bytes a second that a device stores outside of its memory, and that it fetches again;
            None where it cannot.
    """

    work: Work
    samples: int
    seconds: Mapping[int, Mapping[str, Sequence[float]]]
    state: float = 0.0
    update: float = 0.0
    overheads: Overheads = field(default_factory=Overheads)
    layers: tuple[str, ...] = field(default=(), repr=False)
    away: tuple[float, float] | None = None

    def cut(self, stages: int, speed: float = 1.0) -> Stages | None:
        """The model in so many stages of times as even as can be; None if it has fewer atoms."""
        if len(self.work) < stages:
            return None
        found = solve(self.work, Machine.equal(stages), self.layers)
        return None if found is None else Stages(self, found, stages, speed)


@dataclass(frozen=True, eq=False)
class Stages:
    """A model cut into stages.

    Attributes:
        profile: the model.
        solution: the cut, and how good it is.
        count: how many stages there are.
        speed: of the devices.
    """

    profile: Profile
    solution: Solution
    count: int
    speed: float = 1.0

    def __post_init__(self) -> None:
        # of each cut, as a cache of the class would keep all of them for good
        object.__setattr__(self, "times", cache(self.times))
        object.__setattr__(self, "sizes", cache(self.sizes))

    @property
    def stage_of(self) -> tuple[int, ...]:
        """Atom → stage."""
        return self.solution.division.stage_of

    @property
    def cuts(self) -> tuple[str, ...]:
        """Stage → the layer that its first atom belongs to."""
        layers = self.profile.layers or tuple(map(str, range(len(self.stage_of))))
        return tuple(layers[self.stage_of.index(stage)] for stage in range(self.count))

    def times(self, samples: int) -> dict[tuple[str, int], float]:
        """Letter and stage → seconds for micro-batches of so many samples."""
        known = {
            size: {kind: self._sums(seconds[kind]) for kind in KINDS}
            for size, seconds in self.profile.seconds.items()
        }
        found = {
            (kind, s): self.profile.overheads.task
            + Affine({size: sums[kind][s] for size, sums in known.items()})(samples) / self.speed
            for kind in KINDS
            for s in range(self.count)
        }
        for s, size in enumerate(self._parameters):
            found["R", s], found["U", s] = found["F", s], self.profile.update * size / self.speed
            found["A", s] = 0.0  # the link takes its time
        if self.profile.away is not None:
            for letter, rate in zip("OP", self.profile.away, strict=True):
                found |= {(letter, s): size / rate for s, size in self.sizes(samples).saved.items()}
        return found

    def sizes(self, samples: int) -> Sizes:
        """What the stages hold for micro-batches of so many samples. What operations need while
        they run is taken for the largest value that one of the stage's atoms keeps or sends.
        """
        work, share = self.profile.work, samples / self.profile.samples
        saved, values = self._sums(work.saved), [0] * self.count
        largest = [0.0] * self.count
        for atom, stage in enumerate(self.stage_of):
            largest[stage] = max(largest[stage], work.saved[atom])
        for value in work.transfers:
            readers = {self.stage_of[reader] for reader in value.readers}
            source = min(readers) if value.source is None else self.stage_of[value.source]
            largest[source] = max(largest[source], value.bytes)
            if value.source is not None and readers - {source}:
                values[source] += value.bytes
        parameters = {s: round(size) for s, size in enumerate(self._parameters)}
        received = (load.received for load in self.solution.division.loads)
        kept = {
            s: round((own + more) * share)
            for s, (own, more) in enumerate(zip(saved, received, strict=True))
        }
        return Sizes(
            values={f"y{s}": round(size * share) for s, size in enumerate(values)},
            saved=kept,
            deferred=kept,
            parameters=parameters,
            gradients=parameters,
            optimizer={
                s: round(self.profile.state * size + 2 * largest[s] * share)
                for s, size in parameters.items()
            },
        )

    @property
    def _parameters(self) -> list[float]:
        held = self._sums(self.profile.work.resident)
        for value in self.profile.work.transfers:
            if value.source is None:
                held[min(self.stage_of[reader] for reader in value.readers)] += value.resident
        return held

    def _sums(self, each: Sequence[float]) -> list[float]:
        found = [0.0] * self.count
        for atom, stage in enumerate(self.stage_of):
            found[stage] += each[atom]
        return found
