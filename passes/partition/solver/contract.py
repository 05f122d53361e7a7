"""Merge atoms of a graph, light ones first, until it has few enough downsets to search them all.

before:  a (1 s) → b (1 s) → c (9 s), a → d (1 s) → c
after:   [a], [b, c], [d]; then [a, d], [b, c]; then [a, b, c, d]

An atom merges with its only reader, or with the only one that it reads: that closes no cycle. What
is divided so is a division of the graph itself, but not each is found: this helps to find good
ones, and bounds nothing.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import replace

from fxpipe.passes.partition.work import Transfer, Work, sorted_by_rank

_FINEST = 2.0**-12
_STEP = 2.0**0.5


def contractions(work: Work) -> Iterator[tuple[Work, list[int]]]:
    """Coarser and coarser graphs, each with the old atoms' new ones: atom → merged atom."""
    merging = _Merging(work)
    most = _FINEST * work.total
    while most < work.total:
        if merging.merge(most):
            yield merging.made()
        most *= _STEP


class _Merging:
    """Merges atoms, which are called by the first of them."""

    def __init__(self, work: Work) -> None:
        self._work = work
        self._into = list(range(len(work)))
        self.seconds = dict(enumerate(work.seconds))
        self.before = {atom: set(sources) for atom, sources in enumerate(work.before)}
        self.after = {atom: set(readers) for atom, readers in enumerate(work.after)}

    def merge(self, most: float) -> bool:
        """Merge what has at most so many seconds together, light ones first. Returns whether any
        was."""
        merged = False
        waiting = [(self.seconds[a], a) for a in self.seconds]
        heapq.heapify(waiting)
        while waiting:
            seconds, atom = heapq.heappop(waiting)
            if seconds != self.seconds.get(atom):
                continue  # it has merged since
            pairs = [(atom, r) for r in self.after[atom] if self._alone(atom, r)]
            pairs += [(s, atom) for s in self.before[atom] if self._alone(s, atom)]
            weights = [(self.seconds[a] + self.seconds[b], a, b) for a, b in pairs]
            together, source, reader = min(weights, default=(most + 1, 0, 0))
            if together <= most:
                self._unite(source, reader)
                heapq.heappush(waiting, (together, source))
                merged = True
        return merged

    def _alone(self, source: int, reader: int) -> bool:
        """Whether no other way leads from one to the other."""
        return len(self.after[source]) == 1 or len(self.before[reader]) == 1

    def _unite(self, source: int, reader: int) -> None:
        self._into[reader] = source
        self.seconds[source] += self.seconds.pop(reader)
        before, after = self.before.pop(reader) - {source}, self.after.pop(reader)
        for other in before:
            self.after[other].discard(reader)
            self.after[other].add(source)
        for other in after:
            self.before[other].discard(reader)
            self.before[other].add(source)
        self.before[source] |= before
        self.after[source] |= after
        self.after[source].discard(reader)

    def made(self) -> tuple[Work, list[int]]:
        """The merged graph, and atom → merged atom."""
        ordered = sorted_by_rank(self.before, lambda atom, _: atom)
        number = {atom: place for place, atom in enumerate(ordered)}
        merged_into = [number[self._first(atom)] for atom in range(len(self._work))]

        def summed(amounts: Sequence[int]) -> list[int]:
            sums = [0] * len(number)
            for atom, amount in zip(merged_into, amounts, strict=True):
                sums[atom] += amount
            return sums

        resident, undo = summed(self._work.resident), summed(self._work.undo)
        transfers: list[Transfer] = []
        for value in self._work.transfers:
            source = None if value.source is None else merged_into[value.source]
            readers = sorted({merged_into[reader] for reader in value.readers} - {source})
            if source is None and len(readers) == 1:
                resident[readers[0]] += value.resident
                undo[readers[0]] += value.undo
            elif readers:
                transfers.append(replace(value, source=source, readers=tuple(readers)))
        seconds = [0.0] * len(number)
        for atom, place in number.items():
            seconds[place] = self.seconds[atom]
        saved = tuple(summed(self._work.saved))
        merged = Work(tuple(seconds), tuple(resident), saved, tuple(transfers), tuple(undo))
        return merged, merged_into

    def _first(self, atom: int) -> int:
        while self._into[atom] != atom:
            self._into[atom] = atom = self._into[self._into[atom]]
        return atom
