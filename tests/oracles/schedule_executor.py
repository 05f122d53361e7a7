"""A small executor that checks whether a schedule computes its steps, for tests of the verifier.

It shares only data classes with the library. It runs a few steps and the flush, and compares what
has run with a plain loop.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque

from fxpipe.ir.schedule import Schedule
from fxpipe.ir.task import KINDS, Task


def schedule_is_right(schedule: Schedule) -> bool:
    """Whether the rows, run together, do exactly what a plain loop does."""
    if any(task.batch > 0 or task.kind not in KINDS for row in schedule.rows for task in row):
        return False
    if schedule.copies and (schedule.depth or any(schedule.delays)):
        return False
    homes = zip(schedule.placement, schedule.copies, strict=False)
    every = {*range(schedule.devices)}
    if any(len({home, *own}) <= len(own) or {*own} - every for home, own in homes):
        return False
    overlap = schedule.depth + max(schedule.delays)
    run = _Run(schedule, steps=overlap + 2 if overlap else 1)
    return run.is_right()


class _Wrong(Exception):
    """A task has run that a plain loop would not run."""


class _Run:
    """A run of some steps and the flush.

    Attributes:
        done: kind, stage and batch → the micro-batches whose task has run, in order.
        newest: stage → its newest version.
        forwards: stage → device → batch and micro-batch of its forwards there, in order.
        added: stage and batch → device → micro-batches whose gradients have been added.
        summed: stage and batch → the devices that have sent their gradients to be summed.
        own: stage → device → the micro-batches that it computes there.
    """

    def __init__(self, schedule: Schedule, steps: int) -> None:
        self.schedule = schedule
        self.steps = steps
        self.every = list(range(schedule.microbatches))
        self.done: defaultdict[tuple[str, int, int], list[int | None]] = defaultdict(list)
        self.newest = [0] * schedule.stages
        self.forwards: defaultdict[int, defaultdict[int, list[tuple[int, int]]]]
        self.forwards = defaultdict(lambda: defaultdict(list))
        self.added: defaultdict[tuple[int, int], defaultdict[int, list[int]]]
        self.added = defaultdict(lambda: defaultdict(list))
        self.summed: defaultdict[tuple[int, int], set[int]] = defaultdict(set)
        self.own: defaultdict[int, defaultdict[int, list[int]]]
        self.own = defaultdict(lambda: defaultdict(list))
        for device, row in enumerate(schedule.rows):
            for task in row:
                if task.kind == "F" and task.stage is not None and task.microbatch is not None:
                    self.own[task.stage][device].append(task.microbatch)

    def is_right(self) -> bool:
        try:
            return all(map(self._step, range(self.steps + self.schedule.depth))) and self._whole()
        except _Wrong:
            return False

    def _step(self, step: int) -> bool:
        """Run a window; returns whether every device reaches its end."""
        rows = [
            deque((t, step + t.batch) for t in row if 0 <= step + t.batch < self.steps)
            for row in self.schedule.rows
        ]
        moved = True
        while moved:
            moved = False
            for device, row in enumerate(rows):
                while row and self._runs(device, *row[0]):
                    row.popleft()
                    moved = True
        return not any(rows)

    def _runs(self, device: int, task: Task, batch: int) -> bool:
        """Run a task; returns False if it has to wait."""
        s, i, kind, last = task.stage, task.microbatch, task.kind, self.schedule.stages - 1
        if s is None or not 0 <= s <= last:
            raise _Wrong
        copied = bool(self.schedule.copies) and device in self.schedule.copies[s]
        if self.schedule.placement[s] != device and not (copied and kind in "FBIWROPA"):
            raise _Wrong
        if KINDS[kind].per_microbatch and i not in self.own[s][device] and kind in "FBIWROP":
            raise _Wrong  # its forward did not run, or ran on another device
        if i not in (self.every if KINDS[kind].per_microbatch else [None]):
            raise _Wrong
        if self._reads(kind, s, i, batch) > self.newest[s]:
            raise _Wrong  # that version does not exist yet

        def has(letters: str, stage: int) -> bool:
            return any(i in self.done[letter, stage, batch] for letter in letters)

        if kind == "F":
            ready = s == 0 or has("F", s - 1)
        elif kind in "BI":
            ready = has("F", s) and (s == last or has("BI", s + 1))
            ready = ready and has("O", s) == has("P", s)
        elif kind == "W":
            ready = has("I", s)
        elif kind in "ROP":
            ready = has("O" if kind == "P" else "F", s)
            ready = ready and (kind != "R" or has("O", s) == has("P", s))
            if has("BIR", s) or (kind == "O" and has("O", s)):
                raise _Wrong
        elif kind == "A":
            ready = sorted(self.added[s, batch][device]) == sorted(self.own[s][device])
        elif kind == "U":
            parts = {*self.own[s], device}
            summed = "A" not in self.schedule.kinds or parts <= self.summed[s, batch]
            ready = summed and all(
                sorted(self.added[s, batch][d]) == sorted(self.own[s][d]) for d in parts
            )
        else:
            ready = self._own(kind, s, i, batch)
        if ready:
            self._note(device, kind, s, i, batch)
        return ready

    def _reads(self, kind: str, s: int, i: int | None, batch: int) -> int:
        """The version that a task reads: the newest for an update, none for a reduce."""
        if not self.schedule.trains:
            late = self.schedule.delays[s] > 0
            return self.steps if late else 0
        return max(batch - self.schedule.delays[s], 0) if kind not in "AU" else 0

    def _own(self, kind: str, s: int, i: int | None, batch: int) -> bool:
        """Run a user-defined task: its gradients must exist, and all that it follows be done."""
        if "gradients" in KINDS[kind].reads and self.done["U", s, batch]:
            raise _Wrong
        planned = Counter(
            (t.kind, t.microbatch) for row in self.schedule.rows for t in row if t.stage == s
        )
        before = {
            (letter, j)
            for letter, j in planned
            if letter in KINDS[kind].follows and (i is None or j in (i, None))
        }
        return all(j in self.done[letter, s, batch] for letter, j in before)

    def _note(self, device: int, kind: str, s: int, i: int | None, batch: int) -> None:
        if kind == "A":
            if device in self.summed[s, batch]:
                raise _Wrong  # twice
            self.summed[s, batch].add(device)
            return
        if i in self.done[kind, s, batch]:
            raise _Wrong  # twice
        self.done[kind, s, batch].append(i)
        if kind == "F":
            self.forwards[s][device].append((batch, i or 0))
        elif kind in "BW":
            self.added[s, batch][device].append(i or 0)
        elif kind == "U":
            self.newest[s] += 1

    def _whole(self) -> bool:
        """Whether everything that a plain loop does has run; its forwards in its order."""
        trains = self.schedule.trains
        for s in range(self.schedule.stages):
            every = [(b, i) for b in range(self.steps) for i in self.every]
            if sorted(each for own in self.forwards[s].values() for each in own) != every:
                return False
            if any(own != sorted(own) for own in self.forwards[s].values()):
                return False
            for b in range(self.steps):
                if {*self.done["O", s, b]} != {*self.done["P", s, b]}:
                    return False
                halves = self.done["I", s, b], self.done["W", s, b]
                if sorted(halves[0], key=str) != sorted(halves[1], key=str):
                    return False
                if set(halves[0]) & set(self.done["B", s, b]):
                    return False
                added = [i for own in self.added[s, b].values() for i in own]
                if sorted(added) != (self.every if trains else []):
                    return False
            if self.newest[s] != (self.steps if trains else 0):
                return False
        return True
