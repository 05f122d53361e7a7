"""Sum the values that a run of a sequence receives and sends, for many runs at once.

A value arrives at a run that begins after it was made and holds a reader; it leaves the run that
made it if a reader comes later. Seen from one begin, moving the end changes what crosses by steps,
at the first reader that comes in and at the last. Moving the begin past an atom moves some of the
steps. So a table of runs is made of few numbers, summed along both ends.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fxpipe.passes.partition.work import Machine, Transfer

_COLUMNS = 4
"""Bytes there, messages there, bytes of the gradient back, messages back."""


@dataclass(frozen=True)
class Rates:
    """Seconds a byte and a message, as the stages have them.

    Attributes:
        rows: row × twice the columns → seconds for what arrives, then for what leaves.
        mix: stage × row → how much of the row the stage has.
    """

    rows: Tensor
    mix: Tensor


def rates_of(machine: Machine, fastest: bool) -> Rates:
    """The rates of the stages: a row for each stage of another kind, or for each column.

    With ``fastest`` every value takes the fastest link that its stage has, instead of the one to
    the next stage.
    """
    stages = machine.stages
    rates = torch.zeros((stages, 2 * _COLUMNS), dtype=torch.float64)
    if not machine.linked:
        return Rates(rates[:0], rates[:, :0])
    for stage in range(stages):
        # nothing arrives at the first stage and nothing leaves the last: they may be as the others
        earlier = range(stage) if fastest else range(max(stage - 1, 0), stage)
        later = range(stage + 1, stages if fastest else min(stage + 2, stages))
        for row, table in enumerate((machine.per_byte, machine.per_message) * 2):
            back = row >= _COLUMNS // 2
            for column, others, inward in ((row, earlier, True), (row + 4, later, False)):
                if table and others:
                    comes = inward != back  # whether this row's bytes come to the stage
                    rates[stage, column] = min(
                        table[other][stage] if comes else table[stage][other] for other in others
                    )
    if stages > 1:
        rates[0, :_COLUMNS] = rates[1, :_COLUMNS]
        rates[-1, _COLUMNS:] = rates[-2, _COLUMNS:]
    kinds, kind_of = rates.unique(dim=0, return_inverse=True)
    used = rates.any(0).nonzero()[:, 0]
    if len(kinds) <= len(used):
        return Rates(kinds, torch.eye(len(kinds), dtype=torch.float64)[kind_of])
    return Rates(torch.eye(2 * _COLUMNS, dtype=torch.float64)[used], rates[:, used])


class Steps:
    """Where what crosses changes by a step, for all values of a sequence.

    Attributes:
        places: step → the atom that a begin must move past for it to count; -1 for none.
        columns: step → the end from which on it counts, and one more.
        halves: step → twice the number of its value, and one more for what leaves.
        signs: step → 1 where more crosses, -1 where less.
        amounts: value × column → how many.
    """

    def __init__(self, uses: Sequence[tuple[Sequence[int], Transfer]], length: int) -> None:
        """Args:
        uses: for each value the place of the atom that makes it, and those of its readers in
            order.
        length: how many atoms the sequence has.
        """
        used: list[Transfer] = []
        places: list[int] = []
        following: list[int] = []
        counts: list[int] = []
        for (birth, *others), transfer in uses:
            readers = [reader for reader in dict.fromkeys(others) if reader != birth]
            if readers:
                places += [birth, *readers]
                following += [*readers, length]
                counts.append(1 + len(readers))
                used.append(transfer)
        at, until, count = (
            torch.tensor(each, dtype=torch.int64) for each in (places, following, counts)
        )
        ends = count.cumsum(0)
        starts, value = ends - count, torch.arange(len(used))
        births, lasts = at[starts], at[ends - 1]
        value_at = value.repeat_interleave(count)
        reads = torch.ones(len(at), dtype=torch.bool)
        reads[starts] = False
        nowhere = torch.full_like(births, -1)
        ones, more = torch.ones(len(used)), torch.ones(len(at))
        parts = [
            # what arrives: for a begin behind a use, where the next use is in the run
            (at, until, 2 * value_at, more),
            (at[reads], at[reads], 2 * value_at[reads], -more[reads]),
            # what leaves: where its source is in the run and its last reader is not
            (nowhere, births, 2 * value + 1, ones),
            (nowhere, lasts, 2 * value + 1, -ones),
            (births, births, 2 * value + 1, -ones),
            (births, lasts, 2 * value + 1, ones),
        ]
        found = [torch.cat(each) for each in zip(*parts, strict=True)]
        order = found[0].argsort(stable=True)
        self.places, columns, self.halves, signs = (each[order] for each in found)
        self.columns, self.signs = columns + 1, signs.double()
        self.amounts = amounts_of(used)


class Flows:
    """The sums of what crosses, for runs that begin in one block after the other."""

    def __init__(self, steps: Steps, length: int, rows: Tensor) -> None:
        """Let runs begin before the first atom; ``rows`` weigh what arrives, then what leaves."""
        self._steps = torch.zeros((len(rows), length + 2), dtype=torch.float64)
        self._places, self._columns = steps.places, steps.columns
        halves = rows.reshape(-1, 2, _COLUMNS)
        weights = torch.einsum("rhc,tc->rth", halves, steps.amounts).flatten(1)
        self._changes = weights[:, steps.halves] * steps.signs
        self._done = 0

    def table(self, first: int, last: int, end: int) -> Tensor:
        """Row × begin × end → the sum, for runs that begin in ``first`` … ``last`` and end in
        ``first + 1`` … ``end``. Each block is behind the one before.
        """
        self._apply(first)
        width = end - first
        made = torch.zeros((len(self._steps), last - first + 1, width), dtype=torch.float64)
        made[:, 0] = self._steps[:, first + 1 : end + 1]
        stop = int(torch.searchsorted(self._places, last))
        inside = slice(self._done, stop)
        columns = self._columns[inside] - first - 1
        seen = columns < width
        at = ((self._places[inside] + 1 - first) * width + columns)[seen]
        made.flatten(1).index_add_(1, at, self._changes[:, inside][:, seen])
        return made.cumsum_(1).cumsum_(2)

    def _apply(self, begin: int) -> None:
        """Let runs begin at a place."""
        stop = int(torch.searchsorted(self._places, begin))
        passed = slice(self._done, stop)
        self._steps.index_add_(1, self._columns[passed], self._changes[:, passed])
        self._done = stop


def arriving_bytes() -> Tensor:
    """The row that weighs bytes that arrive, and nothing else."""
    row = torch.zeros((1, 2 * _COLUMNS), dtype=torch.float64)
    row[0, 0] = 1
    return row


def amounts_of(transfers: Sequence[Transfer]) -> Tensor:
    """Transfer × column → how many; a value without bytes is no message either."""
    there = ((t, float(t.bytes), float(t.bytes > 0)) for t in transfers)
    rows = [(size, count, size * t.returns, count * t.returns) for t, size, count in there]
    return torch.tensor(rows, dtype=torch.float64).reshape(-1, _COLUMNS)
