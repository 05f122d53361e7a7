"""Cut one order of atoms into runs, one for each stage, in the best way.

This is a dynamic program over the places between atoms. A tensor holds the costs of all runs that
begin in a block of places, so that Python works once for each block, not for each pair of places.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Literal

import torch
from torch import Tensor

from fxpipe.extensions.exact_cut.flows import Flows, Steps, arriving_bytes, rates_of
from fxpipe.passes.partition.work import StageDevices, Transfer, Work

Goal = Literal["seconds", "bytes"]

_ROUNDING = 1 + 1e-9


class Runs:
    """The cuts of an order of all atoms into runs."""

    def __init__(self, work: Work, machine: StageDevices, sequence: Sequence[int]) -> None:
        """Index a sequence of all atoms, each of which comes after those that it reads."""
        self.machine, self.length = machine, len(sequence)
        self.seconds = [0.0, *itertools.accumulate(work.seconds[atom] for atom in sequence)]
        position = {atom: place for place, atom in enumerate(sequence)}
        resident = [work.resident[atom] for atom in sequence]
        crossing: list[tuple[list[int], Transfer]] = []
        for transfer in work.transfers:
            uses = sorted(position[reader] for reader in transfer.readers)
            if transfer.source is None:
                resident[uses[0]] += transfer.resident
                crossing.append((uses, transfer))
            else:
                crossing.append(([position[transfer.source], *uses], transfer))
        self.steps = Steps(crossing, self.length)
        saved = [work.saved[atom] for atom in sequence]
        self.resident = _summed(resident)
        self.saved = _summed(saved)
        fewest = min(machine.peaks)
        held = (stays + fewest * kept for stays, kept in zip(resident, saved, strict=True))
        self.bytes = [0, *itertools.accumulate(held)]

    def cut(self, goal: Goal, cap: float) -> list[int] | None:
        """Return the places where the stages after the first begin, or None if no cut keeps ``cap``
        and the limits.

        Args:
            goal: what to minimise: the seconds of the slowest stage, or the bytes that cross.
            cap: seconds that no stage may exceed.
        """
        return _Sweep(self, goal, cap * _ROUNDING).cuts()


class _Sweep:
    """One pass of the dynamic program over the places, a block at a time.

    Within a block the stages go in order, because a stage begins where the one before it ends. All
    runs of a stage that begin in the block are tried at once.

    Attributes:
        best: (number of stages, place) → the best value of the goal when so many stages end there.
        parent: (number of stages, place) → where the last of these stages begins.
        begins: stage → the first and the last place where it can begin.
    """

    def __init__(self, runs: Runs, goal: Goal, cap: float) -> None:
        self.runs = runs
        self.goal = goal
        self.cap = cap
        machine = runs.machine
        self.stages, self.length = machine.stages, runs.length
        pairs = zip(machine.limits, machine.reserved, strict=False)
        self.rooms = tuple(limit - reserved for limit, reserved in pairs)  # empty without limits
        self.held = machine.held
        shape = (self.stages + 1, self.length + 1)
        self.best = torch.full(shape, math.inf, dtype=torch.float64)
        self.best[0, 0] = 0
        self.parent = torch.zeros(shape, dtype=torch.int32)
        self.seconds = torch.tensor(runs.seconds, dtype=torch.float64)
        self.begins = list(self._begins())
        rates = rates_of(machine)
        self.mix = rates.mix.tolist()
        self.counted = goal == "bytes" or machine.limited
        rows = torch.cat([rates.rows, *[arriving_bytes()] * self.counted])
        self.flows = Flows(runs.steps, self.length, rows)

    def cuts(self) -> list[int] | None:
        first = 0
        while first < self.length:
            width = max(self.end(first, stage) for stage in range(self.stages)) - first
            last = min(first + min(max(width // 2, 16), 256), self.length) - 1
            self._runs_from(first, last)
            first = last + 1
        if not self.best[self.stages, self.length] < math.inf:
            return None
        cuts = [self.length]
        for stage in range(self.stages, 1, -1):
            cuts.append(int(self.parent[stage, cuts[-1]]))
        return cuts[:0:-1]

    def _begins(self) -> Iterator[tuple[int, int]]:
        """Stage → the first and the last place where it can begin, by what the stages before it and
        from it on can take in."""
        runs = self.runs
        spans = [
            _span(runs.seconds, [self.cap * speed for speed in runs.machine.speeds]),
            _span(runs.bytes, self.rooms),
        ]
        for stage in range(self.stages):
            first, last = stage, self.length - self.stages + stage
            limits = [span[stage] for span in spans if span]
            yield max(first, *(a for a, _ in limits)), min(last, *(b for _, b in limits))

    def end(self, begin: int, stage: int) -> int:
        """Return the last place where a stage that begins at ``begin`` can end."""
        runs = self.runs
        reach = runs.seconds[begin] + self.cap * runs.machine.speeds[stage]
        end = bisect.bisect_right(runs.seconds, reach) - 1
        if runs.machine.limited:
            reach = runs.bytes[begin] + self.rooms[stage]
            end = min(end, bisect.bisect_right(runs.bytes, reach) - 1)
        return end

    def _runs_from(self, first: int, last: int) -> None:
        """Try every run that begins in the block ``first`` … ``last``, for every stage."""
        spans = [(max(a, first), min(b, last)) for a, b in self.begins]
        furthest = max((self.end(b, k) for k, (a, b) in enumerate(spans) if a <= b), default=0)
        table: Tensor | None = None
        for stage, span in enumerate(spans):
            if span[0] > span[1]:
                continue
            begins = slice(span[0], span[1] + 1)
            reached = (self.best[stage, begins] < math.inf).nonzero()
            if not len(reached):
                continue
            begins = slice(span[0] + int(reached[0]), span[0] + int(reached[-1]) + 1)
            ends = self._ends(stage, begins)
            if ends.start >= ends.stop:
                continue
            if table is None:
                table = self.flows.table(first, last, furthest)
            rows = slice(begins.start - first, begins.stop - first)
            columns = slice(ends.start - first - 1, ends.stop - first - 1)
            self._try(stage, begins, ends, table[:, rows, columns])

    def _ends(self, stage: int, begins: slice) -> slice:
        """The places where a stage that begins in ``begins`` can end and the next one can begin."""
        first, last = begins.start + 1, self.end(begins.stop - 1, stage)
        following = [*self.begins, (self.length, self.length)][stage + 1]
        return slice(max(first, following[0]), min(last, following[1]) + 1)

    def _try(self, stage: int, begins: slice, ends: slice, flows: Tensor) -> None:
        """Try all runs of a stage between ``begins`` and ``ends``."""
        machine = self.runs.machine
        seconds = (self.seconds[ends] - self.seconds[begins, None]).clamp_min_(0)
        seconds /= machine.speeds[stage]
        for row, part in zip(flows, self.mix[stage], strict=False):
            if part:
                seconds.add_(row, alpha=part)
        fits = seconds <= self.cap
        if begins.stop > ends.start:  # some pairs end before they begin
            fits.triu_(begins.start + 1 - ends.start)
        if machine.limited:
            saved, resident = (
                table[ends] - table[begins, None] for table in (self.runs.saved, self.runs.resident)
            )
            saving, receiving = self.held[stage]
            kept = saving * saved + receiving * flows[-1]
            fits &= resident + kept <= self.rooms[stage]
        reached = self.best[stage, begins, None]
        if self.goal == "seconds":
            values = torch.maximum(reached, seconds)
        else:
            # among equal bytes, prefer balance: the last term stays below one byte in all
            values = reached + flows[-1] + (seconds / self.cap).square() / (2 * self.stages)
        values.masked_fill_(~fits, math.inf)
        least, place = values.min(0)
        best = self.best[stage + 1, ends]
        better = least < best
        best[better] = least[better]
        parents = self.parent[stage + 1, ends]
        parents[better] = (place[better] + begins.start).to(parents.dtype)


def _span(amounts: Sequence[float], rooms: Sequence[float]) -> list[tuple[int, int]]:
    """Stage → the first and the last place where it can begin, if stages can take ``rooms``;
    ``amounts`` has what comes before each place."""
    before = [0.0, *itertools.accumulate(rooms)]
    after = [0.0, *itertools.accumulate(reversed(rooms))][:0:-1]
    return [
        (bisect.bisect_left(amounts, amounts[-1] - rest), bisect.bisect_right(amounts, done) - 1)
        for done, rest in zip(before, after, strict=False)
    ]


def _summed(amounts: Iterable[int]) -> Tensor:
    return torch.tensor([0, *itertools.accumulate(amounts)], dtype=torch.float64)
