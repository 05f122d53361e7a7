"""The measured costs of a model, and those of its stages for any cut."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache

from fxpipe.extensions.planner.candidates import Affine
from fxpipe.extensions.simulator.sizes import Sizes
from fxpipe.passes.partition.work import Division, StageDevices, Work, default_partitioner

KINDS = "FBIW"


@dataclass(frozen=True)
class Profile:
    """The measured costs of a model as a sequence of atoms, which are never cut.

    Attributes:
        work: seconds and values of a micro-batch of ``samples``, for the partition; ``resident`` is
            the bytes of trained parameters only.
        samples: the samples of that micro-batch.
        seconds: samples of a micro-batch → letter of a task → atom → seconds.
        state: bytes of optimizer state per byte of a parameter.
        update: seconds of an update per byte of a parameter.
        layers: atom → the name of the layer that it belongs to.
        away: bytes per second at which a device offloads, and at which it fetches again; None if it
            cannot.
    """

    work: Work
    samples: int
    seconds: Mapping[int, Mapping[str, Sequence[float]]]
    state: float = 0.0
    update: float = 0.0
    layers: tuple[str, ...] = field(default=(), repr=False)
    away: tuple[float, float] | None = None

    def cut(self, stages: int, speed: float = 1.0) -> Cut | None:
        """Cut the model into stages whose times are as even as possible; None if it has fewer
        atoms. ``speed`` is that of the devices."""
        if len(self.work) < stages:
            return None
        division = default_partitioner().divide(self.work, StageDevices.equal(stages), self.layers)
        return None if division is None else Cut(self, division, stages, speed)


@dataclass(frozen=True, eq=False)
class Cut:
    """A model cut into stages.

    Attributes:
        profile: the model.
        division: the cut.
        count: how many stages there are.
        speed: the speed of the devices relative to the measured one.
    """

    profile: Profile
    division: Division
    count: int
    speed: float = 1.0

    def __post_init__(self) -> None:
        # a cache for each cut, as one for the class would keep all cuts alive
        object.__setattr__(self, "times", cache(self.times))
        object.__setattr__(self, "sizes", cache(self.sizes))

    @property
    def stage_of(self) -> tuple[int, ...]:
        """Atom → stage."""
        return self.division.stage_of

    @property
    def cuts(self) -> tuple[str, ...]:
        """Stage → the layer that its first atom belongs to."""
        layers = self.profile.layers or tuple(map(str, range(len(self.stage_of))))
        return tuple(layers[self.stage_of.index(stage)] for stage in range(self.count))

    def times(self, samples: int) -> dict[tuple[str, int], float]:
        """(letter, stage) → seconds, for micro-batches of so many samples."""
        known = {
            size: {kind: self._sums(seconds[kind]) for kind in KINDS}
            for size, seconds in self.profile.seconds.items()
        }
        times = {
            (kind, s): Affine({size: sums[kind][s] for size, sums in known.items()})(samples)
            / self.speed
            for kind in KINDS
            for s in range(self.count)
        }
        for s, size in enumerate(self._parameters):
            times["R", s], times["U", s] = times["F", s], self.profile.update * size / self.speed
            times["A", s] = 0.0  # its time is that of the link
        if self.profile.away is not None:
            for letter, rate in zip("OP", self.profile.away, strict=True):
                times |= {(letter, s): size / rate for s, size in self.sizes(samples).saved.items()}
        return times

    def sizes(self, samples: int) -> Sizes:
        """The bytes that the stages hold for micro-batches of so many samples. The workspace of
        operations is estimated as twice the largest value that an atom keeps or sends."""
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
        received = (load.received for load in self.division.loads)
        kept = {
            s: round((stashed + arrived) * share)
            for s, (stashed, arrived) in enumerate(zip(saved, received, strict=True))
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
        """Stage → the bytes of its trained parameters."""
        held = self._sums(self.profile.work.resident)
        for value in self.profile.work.transfers:
            if value.source is None:
                held[min(self.stage_of[reader] for reader in value.readers)] += value.resident
        return held

    def _sums(self, amounts: Sequence[float]) -> list[float]:
        """Stage → the sum of its atoms' amounts."""
        sums = [0.0] * self.count
        for stage, amount in zip(self.stage_of, amounts, strict=True):
            sums[stage] += amount
        return sums
