"""Divide a graph by dynamic programming over all of its downsets, with links and limits.

The first k stages together hold a downset. What a stage sends, receives and keeps follows from the
downset where it begins and the one where it ends. So the best division is the best path through the
lattice of downsets. Only the cost of links is approximate: a value that several stages read counts
as sent once, over the link to the next stage for a good division, or over the fastest for a bound.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from fxpipe.extensions.exact_cut.downsets import members, stages_between
from fxpipe.extensions.exact_cut.flows import amounts_of, rates_of
from fxpipe.passes.partition.work import Machine, Work

_ROUNDING = 1 + 1e-9


class Lattice:
    """All downsets of a graph, and the best path through them."""

    def __init__(self, work: Work, machine: Machine, sets: Sequence[int]) -> None:
        self.work = work
        self.machine = machine
        digits = torch.tensor(
            [list(map(int, f"{downset:0{len(work)}b}"[::-1])) for downset in sets],
            dtype=torch.bool,
        ).T
        # summed in the same order for all sets, so that rounding makes no larger set lighter
        seconds = torch.tensor(work.seconds, dtype=torch.float64)
        done = torch.zeros(len(sets), dtype=torch.float64)
        for atom, row in enumerate(digits):
            done += row * seconds[atom]
        order = sorted(range(len(sets)), key=lambda i: (float(done[i]), sets[i].bit_count()))
        self.sets = [sets[i] for i in order]
        self.member = digits[:, order].contiguous()
        self.done = done[order]
        self.saved = torch.tensor(work.saved, dtype=torch.float64) @ self.member.double()
        self.resident = torch.tensor(work.resident, dtype=torch.float64) @ self.member.double()
        values, shape = work.transfers, (len(work.transfers), len(sets))
        self.unread = torch.zeros(shape, dtype=torch.int16)  # value × downset → readers outside
        made = torch.zeros(shape, dtype=torch.bool)
        for row, value in enumerate(values):
            read = self.member[list(value.readers)].sum(0)
            self.unread[row] = len(value.readers) - read
            made[row] = read > 0 if value.source is None else self.member[value.source]
        self.live = made & (self.unread > 0)
        held = torch.tensor([float(value.resident) for value in values], dtype=torch.float64)
        self.resident = self.resident + held @ made.double()

    def best(self, cap: float, *, fastest: bool) -> tuple[float, list[int]] | None:
        """Return the path with the fastest slowest stage, as that stage's seconds and atom → stage;
        None if no path takes at most ``cap`` seconds.

        With ``fastest``, as for ``rates_of``, the seconds are a lower bound for all divisions.
        """
        return _Path(self, cap * _ROUNDING, fastest).best_division()

    def tops(self, downset: int) -> list[int]:
        """The atoms of a downset that no atom in it reads; they determine the downset."""
        inside, after = self.sets[downset], self.work.after
        return [a for a in members(inside) if not any(inside >> r & 1 for r in after[a])]


class _Path:
    """One pass of the dynamic program over the downsets.

    Attributes:
        best: (number of stages, downset) → the least seconds of their slowest when they end there.
        parent: (number of stages, downset) → the downset where the last of these stages begins.
    """

    def __init__(self, lattice: Lattice, cap: float, fastest: bool) -> None:
        self.lattice = lattice
        self.cap = cap
        machine = lattice.machine
        rates = rates_of(machine, fastest)
        into, away = rates.rows.reshape(-1, 2, 4).unbind(1)
        amounts = amounts_of(lattice.work.transfers)
        bytes_there = amounts[:, :1].T
        self.into = torch.cat([into @ amounts.T, bytes_there])  # row × value; the last row: bytes
        self.away = torch.cat([away @ amounts.T, torch.zeros_like(bytes_there)])
        self.out = self.away @ lattice.live.double()
        self.mix = torch.cat([rates.mix, torch.zeros((machine.stages, 1))], dim=1).double()
        self.speeds = torch.tensor(machine.speeds, dtype=torch.float64)
        self.ahead = torch.cat([torch.zeros(1), self.speeds.cumsum(0)]).double()
        shape = (machine.stages + 1, len(lattice.sets))
        self.best = torch.full(shape, math.inf, dtype=torch.float64)
        self.best[0, 0] = 0
        self.parent = torch.zeros(shape, dtype=torch.int64)
        if machine.limited:
            self.rooms = torch.tensor(machine.rooms, dtype=torch.float64)[:, None]
            held = torch.tensor(machine.held, dtype=torch.float64)
            self.saving, self.receiving = held[:, :1], held[:, 1:]

    def best_division(self) -> tuple[float, list[int]] | None:
        sets = self.lattice.sets
        for begin in range(len(sets) - 1):
            self._runs_from(begin)
        stages = self.lattice.machine.stages
        slowest = float(self.best[stages, -1])
        if slowest == math.inf:
            return None
        ends = [len(sets) - 1]
        for stage in range(stages, 0, -1):
            ends.append(int(self.parent[stage, ends[-1]]))
        chain = (sets[end] for end in reversed(ends))
        return slowest, stages_between(chain, len(self.lattice.work))

    def _runs_from(self, begin: int) -> None:
        """Try every run that begins at a downset, for every stage."""
        lattice = self.lattice
        rest = lattice.done[-1] - lattice.done[begin]
        enough = (self.ahead[-1] - self.ahead[:-1]) * self.cap >= rest
        open_ = (enough & (self.best[:-1, begin] < math.inf)).nonzero()
        if not len(open_):
            return
        first, last = int(open_[0]), int(open_[-1])
        stages = slice(first, last + 1)
        reach = lattice.done[begin] + self.cap * self.speeds[stages].max()
        window = slice(begin + 1, int(torch.searchsorted(lattice.done, reach, right=True)))
        ends = lattice.member[lattice.tops(begin), window].all(0).nonzero()[:, 0] + begin + 1
        live = lattice.live[:, begin].nonzero()[:, 0]
        unread = lattice.unread[live][:, ends]
        flows = self.into[:, live] @ (unread < lattice.unread[live, begin, None]).double()
        flows += self.out[:, ends] - self.away[:, live] @ (unread > 0).double()
        seconds = (lattice.done[ends] - lattice.done[begin]) / self.speeds[stages, None]
        seconds = seconds + self.mix[stages] @ flows
        fits = seconds <= self.cap
        if lattice.machine.limited:
            saved, resident = (
                table[ends] - table[begin] for table in (lattice.saved, lattice.resident)
            )
            kept = self.saving[stages] * saved + self.receiving[stages] * flows[-1]
            # sums of whole numbers are exact
            fits &= resident + kept <= self.rooms[stages]
        slowest = torch.maximum(self.best[stages, begin, None], seconds)
        slowest.masked_fill_(~fits, math.inf)
        after = torch.arange(first + 1, last + 2)[:, None]
        better = slowest < self.best[after, ends]
        self.best[after, ends] = torch.where(better, slowest, self.best[after, ends])
        self.parent[after, ends] = self.parent[after, ends].masked_fill(better, begin)
