"""Cut one order of atoms into runs, one for each stage, in the best way.

This is a dynamic program over the places between atoms. From one place after the other, it tries
all runs that begin there: of each stage that can, and to each place at once.

A value arrives at a run that begins after the value's source and holds one of its readers. A value
leaves the run that holds its source if a reader comes after the run's end. So for a fixed begin,
what crosses is a step function of the end: it changes where the first reader of a value enters the
run, and where the last one does. Moving the begin past an atom only moves steps of that atom's
values.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from itertools import accumulate, pairwise
from typing import Literal

import torch
from torch import Tensor

from fxpipe.passes.partition.work import StageDevices, Transfer, Work

Goal = Literal["seconds", "bytes", "memory"]

_ROUNDING = 1 + 1e-9


class Runs:
    """The cuts of an order of all atoms into runs."""

    def __init__(self, work: Work, machine: StageDevices, sequence: Sequence[int]) -> None:
        """Index a sequence of all atoms, each of which comes after those that it reads."""
        self.machine, self.length = machine, len(sequence)
        position = {atom: place for place, atom in enumerate(sequence)}
        resident = [work.resident[atom] for atom in sequence]
        uses: list[list[int]] = []
        for value in work.transfers:
            readers = sorted({position[reader] for reader in value.readers})
            if value.source is None:
                resident[readers[0]] += value.resident
                uses.append(readers)
            else:
                birth = position[value.source]
                uses.append([birth, *(reader for reader in readers if reader != birth)])
        self.ends = [0.0, *accumulate(work.seconds[atom] for atom in sequence)]
        self.seconds = torch.tensor(self.ends, dtype=torch.float64)
        self.resident = _summed(resident)
        self.saved = _summed(work.saved[atom] for atom in sequence)
        self._find_steps(uses, work.transfers)

    def _find_steps(self, uses: Sequence[Sequence[int]], values: Sequence[Transfer]) -> None:
        """Find the steps of what crosses, in the order of ``places``: the atom that the begin must
        move past for the step to count, or -1. ``columns`` has one more than the place from which
        on it counts. ``changes`` has its seconds for each stage, and the bytes that arrive."""
        steps: list[tuple[int, int, int, int]] = []
        for number, (birth, *readers) in enumerate(uses):
            if readers:
                arrives, leaves, last = 2 * number, 2 * number + 1, readers[-1]
                steps += [(-1, birth, leaves, 1), (-1, last, leaves, -1)]
                steps += [(birth, birth, leaves, -1), (birth, last, leaves, 1)]
                steps += [(use, after, arrives, 1) for use, after in pairwise((birth, *readers))]
                steps += [(reader, reader, arrives, -1) for reader in readers]
        steps.sort()
        self.places = [step[0] for step in steps]
        columns = torch.tensor(steps, dtype=torch.int64).reshape(-1, 4).T
        self.columns = columns[1] + 1
        # row 0 has what the first stage receives, the last row what the last one sends
        borders = torch.zeros((self.machine.stages + 1, len(values)), dtype=torch.float64)
        for stage in range(1, self.machine.stages if self.machine.linked else 0):
            seconds = [self.machine.transfer_seconds(stage - 1, stage, value) for value in values]
            borders[stage] = torch.tensor(seconds, dtype=torch.float64)
        size = torch.tensor([[float(value.bytes) for value in values]], dtype=torch.float64)
        arriving = torch.cat([borders[:-1], size])
        leaving = torch.cat([borders[1:], torch.zeros_like(size)])
        crossing = torch.stack([arriving, leaving], 2).flatten(1)
        self.changes = crossing[:, columns[2]] * columns[3]

    def cut(self, goal: Goal, cap: float) -> list[int] | None:
        """Return the places where the stages after the first begin, or None if no cut keeps ``cap``
        and the limits.

        Args:
            goal: what to minimise: the seconds of the slowest stage, the bytes that cross, or the
                memory of the fullest stage, as a share of its limit, which it may then exceed.
            cap: seconds that no stage may exceed.
        """
        machine, stages, cap = self.machine, self.machine.stages, cap * _ROUNDING
        limits = machine.limits or (math.inf,) * stages
        speeds, saving, receiving, reserved, most = (
            torch.tensor(numbers, dtype=torch.float64)[:, None]
            for numbers in (
                machine.speeds,
                machine.peaks,
                machine.arrived,
                machine.reserved,
                limits,
            )
        )
        # of each stage, before each place
        spent, held = self.seconds / speeds, self.resident + saving * self.saved
        limited = machine.limited and goal != "memory"
        # the best value of the goal when so many stages end at a place, and where the last begins
        best = torch.full((stages + 1, self.length + 1), math.inf, dtype=torch.float64)
        best[0, 0] = 0
        parent = torch.zeros(best.shape, dtype=torch.int64)
        steps = torch.zeros((stages + 1, self.length + 2), dtype=torch.float64)
        passed, begins = 0, self._begins(cap)
        for begin in range(self.length):
            able = [k for k, (first, last) in enumerate(begins) if first <= begin <= last]
            reached = best[:, begin].tolist() if able else []
            able = [k for k in able if reached[k] < math.inf]
            if not able:
                continue
            moved = slice(passed, bisect_left(self.places, begin))
            steps.index_add_(1, self.columns[moved], self.changes[:, moved])
            passed = moved.stop
            own, then = slice(able[0], able[-1] + 1), slice(able[0] + 1, able[-1] + 2)
            reach = self.ends[begin] + cap * max(machine.speeds[own])
            to = slice(begin + 1, bisect_right(self.ends, reach))
            crossing = steps[:, to].cumsum(1)
            seconds = spent[own, to] - spent[own, begin, None] + crossing[own]
            fits = seconds <= cap
            memory = reserved[own]
            if goal == "memory" or limited:
                memory = memory + held[own, to] - held[own, begin, None]
                memory += receiving[own] * crossing[-1]
            if limited:
                fits &= memory <= most[own]
            so_far = best[own, begin, None]
            if goal == "seconds":
                values = torch.maximum(so_far, seconds)
            elif goal == "memory":
                values = torch.maximum(so_far, memory / most[own])
            else:
                # among equal bytes, prefer balance: the last term stays below one byte in all
                values = so_far + crossing[-1] + (seconds / cap).square() / (2 * stages)
            better = fits.logical_and_(values < best[then, to])
            parent[then, to].masked_fill_(better, begin)
            best[then, to] = torch.where(better, values, best[then, to])
        if not best[stages, self.length] < math.inf:
            return None
        cuts = [self.length]
        for stage in range(stages, 1, -1):
            cuts.append(int(parent[stage, cuts[-1]]))
        return cuts[:0:-1]

    def _begins(self, cap: float) -> list[tuple[int, int]]:
        """Stage → the first and the last place where it can begin, by what the stages before it and
        from it on can compute."""
        speeds, ends, stages = self.machine.speeds, self.ends, self.machine.stages
        return [
            (
                max(k, bisect_left(ends, ends[-1] - cap * sum(speeds[k:]))),
                min(self.length - stages + k, bisect_right(ends, cap * sum(speeds[:k])) - 1),
            )
            for k in range(stages)
        ]


def _summed(amounts: Iterable[int]) -> Tensor:
    return torch.tensor([0, *accumulate(amounts)], dtype=torch.float64)
