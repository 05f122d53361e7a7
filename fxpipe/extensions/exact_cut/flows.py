"""Tabulate what the runs of a sequence receive and send, for many runs at once.

A run is a stretch of the sequence. A value arrives at a run that begins after the value's source
and holds one of its readers. A value leaves the run that holds its source if a reader comes after
the run's end. For a fixed begin, the totals are a step function of the end: they change where the
first reader of a value enters the run, and where the last one does. Moving the begin past an atom
only moves steps of that atom's values. So a table of all runs holds few changes, summed along both
axes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fxpipe.passes.partition.work import StageDevices, Transfer

_COLUMNS = 4
"""Bytes sent, messages sent, bytes of the gradient sent back, messages sent back."""


@dataclass(frozen=True)
class Rates:
    """The seconds that stages need for each byte and message.

    Attributes:
        rows: row × (columns of what arrives, then of what leaves) → seconds.
        mix: stage × row → the factor of the row in the stage's seconds.
    """

    rows: Tensor
    mix: Tensor


def rates_of(machine: StageDevices) -> Rates:
    """Return the rates of all stages, with a row for each kind of stage or for each column.

    Values take the link to the next stage.
    """
    stages = machine.stages
    rates = torch.zeros((stages, 2 * _COLUMNS), dtype=torch.float64)
    if not machine.linked:
        return Rates(rates[:0], rates[:, :0])
    for stage in range(stages):
        for row, table in enumerate((machine.per_byte, machine.per_message) * 2):
            back = row >= _COLUMNS // 2
            for column, other in ((row, stage - 1), (row + _COLUMNS, stage + 1)):
                if table and other in range(stages):
                    comes = (other < stage) != back  # whether this row's bytes come to the stage
                    rates[stage, column] = table[other][stage] if comes else table[stage][other]
    if stages > 1:
        # nothing arrives at the first stage and nothing leaves the last: any rate is right there,
        # and their neighbour's makes fewer kinds
        rates[0, :_COLUMNS] = rates[1, :_COLUMNS]
        rates[-1, _COLUMNS:] = rates[-2, _COLUMNS:]
    kinds, kind_of = rates.unique(dim=0, return_inverse=True)
    used = rates.any(0).nonzero()[:, 0]
    if len(kinds) <= len(used):
        return Rates(kinds, torch.eye(len(kinds), dtype=torch.float64)[kind_of])
    return Rates(torch.eye(2 * _COLUMNS, dtype=torch.float64)[used], rates[:, used])


class Steps:
    """The steps of the totals, for all values of a sequence.

    Attributes:
        places: step → the atom that the begin must move past for the step to count; -1 for none.
        columns: step → one more than the end from which on it counts.
        halves: step → twice the number of its value, and one more for what leaves.
        signs: step → 1 where more crosses, -1 where less.
        amounts: value × column → bytes or messages.
    """

    def __init__(self, uses: Sequence[tuple[Sequence[int], Transfer]], length: int) -> None:
        """Find the steps.

        Args:
            uses: for each value, the place of its source and then those of its readers in order.
            length: the number of atoms in the sequence.
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
            torch.tensor(numbers, dtype=torch.int64) for numbers in (places, following, counts)
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
            # what arrives: if the run begins behind a use and holds the next use
            (at, until, 2 * value_at, more),
            (at[reads], at[reads], 2 * value_at[reads], -more[reads]),
            # what leaves: if the run holds the source and not the last reader
            (nowhere, births, 2 * value + 1, ones),
            (nowhere, lasts, 2 * value + 1, -ones),
            (births, births, 2 * value + 1, -ones),
            (births, lasts, 2 * value + 1, ones),
        ]
        columns = [torch.cat(column) for column in zip(*parts, strict=True)]
        order = columns[0].argsort(stable=True)
        self.places, until, self.halves, signs = (column[order] for column in columns)
        self.columns, self.signs = until + 1, signs.double()
        self.amounts = amounts_of(used)


class Flows:
    """Makes the tables of totals, for one block of begins after the other."""

    def __init__(self, steps: Steps, length: int, rows: Tensor) -> None:
        """Start before the first atom; ``rows`` weigh what arrives, then what leaves."""
        self._steps = torch.zeros((len(rows), length + 2), dtype=torch.float64)
        self._places, self._columns = steps.places, steps.columns
        halves = rows.reshape(-1, 2, _COLUMNS)
        weights = torch.einsum("rhc,tc->rth", halves, steps.amounts).flatten(1)
        self._changes = weights[:, steps.halves] * steps.signs
        self._done = 0

    def table(self, first: int, last: int, end: int) -> Tensor:
        """Return row × begin × end → total, for begins ``first`` … ``last`` and ends
        ``first + 1`` … ``end``. Each call's block of begins comes after the block before.
        """
        passed = slice(self._done, int(torch.searchsorted(self._places, first)))
        self._steps.index_add_(1, self._columns[passed], self._changes[:, passed])
        self._done = passed.stop
        width = end - first
        table = torch.zeros((len(self._steps), last - first + 1, width), dtype=torch.float64)
        table[:, 0] = self._steps[:, first + 1 : end + 1]
        inside = slice(self._done, int(torch.searchsorted(self._places, last)))
        columns = self._columns[inside] - first - 1
        seen = columns < width
        at = ((self._places[inside] + 1 - first) * width + columns)[seen]
        table.flatten(1).index_add_(1, at, self._changes[:, inside][:, seen])
        return table.cumsum_(1).cumsum_(2)


def arriving_bytes() -> Tensor:
    """Return a row that weighs only the bytes that arrive."""
    row = torch.zeros((1, 2 * _COLUMNS), dtype=torch.float64)
    row[0, 0] = 1
    return row


def amounts_of(transfers: Sequence[Transfer]) -> Tensor:
    """Transfer × column → bytes or messages; a value without bytes takes no message either."""
    sent = ((t, float(t.bytes), float(t.bytes > 0)) for t in transfers)
    rows = [(size, count, size * t.returns, count * t.returns) for t, size, count in sent]
    return torch.tensor(rows, dtype=torch.float64).reshape(-1, _COLUMNS)
