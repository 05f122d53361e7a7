"""Simulate a program with times that remember what they are made of."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from fxpipe.errors import InputError
from fxpipe.formulas.envelope import Vector, dot
from fxpipe.ir.program import Barrier, Instruction, Program, Turn, letter_of
from fxpipe.ir.task import KINDS
from fxpipe.ir.walk import waits_of, walk
from fxpipe.simulator.costs import task_times
from fxpipe.simulator.events import run


@dataclass(frozen=True)
class Paths:
    """The longest paths of a program, as counts of basic times.

    A time is simulated as a large integer: its leading digits are the time, and the ones behind
    count what it is made of. The simulator adds and compares them as they are.

    Attributes:
        program: the lists of all its steps.
        columns: letter → how often each basic time is in that of the task.
    """

    program: Program
    columns: Mapping[str, Vector]
    _known: dict[tuple[Vector, bool], list[list[int]]] = field(default_factory=dict)

    def work(self) -> Vector:
        """All tasks of micro-batches, on all devices."""
        own = [self._work(device) for device in range(self.program.devices)]
        return tuple(map(sum, zip(*own, strict=True)))

    def after_all(self) -> Vector | None:
        """What each device does after all else, behind a barrier: what comes once a step.

        None where that is not the same on all devices, or comes earlier.
        """
        found: set[Vector] = set()
        for list_ in self.program.lists:
            kinds = "".join(
                "|" if isinstance(x, Barrier) else "u" if _once(x) else "t"
                for x in list_
                if isinstance(x, Barrier) or letter_of(x) is not None
            )
            if "u" in kinds and kinds.strip("t").rstrip("u") != "|":
                return None
            found.add(self._counted([x for x in list_ if _once(x) and letter_of(x) is not None]))
        return found.pop() if len(found) == 1 else None

    def makespan(self, times: Vector) -> Vector:
        """Until everything is done."""
        ends = self._ends(times, once=True)
        return self._digits(max(own[-1] for own in ends if own))

    def through(self, times: Vector) -> Vector:
        """Until the last micro-batch is through, where what comes once a step takes no time."""
        ends, tasks = self._ends(times, once=False), self._tasks
        return self._digits(max(ends[d][at[-1]] for d, at in enumerate(tasks) if at))

    def size(self, times: Vector) -> Vector:
        """The most that a device idles between its first task and its last, such as −2 T_W.

        What comes once a step takes no time.
        """
        ends, tasks = self._ends(times, once=False), self._tasks
        return max(
            (
                self._idle(device, ends[device][at[0] - 1] if at[0] else 0, ends[device][at[-1]])
                for device, at in enumerate(tasks)
                if at
            ),
            key=lambda idle: (dot(idle, times), idle),
        )

    def _idle(self, device: int, start: int, end: int) -> Vector:
        first, last = self._digits(start), self._digits(end)
        work = self._work(device)
        return tuple(b - a - w for a, b, w in zip(first, last, work, strict=True))

    def _work(self, device: int) -> Vector:
        """A device's tasks of micro-batches."""
        own = self.program.lists[device]
        return self._counted([own[position] for position in self._tasks[device]])

    def _counted(self, tasks: Sequence[Instruction]) -> Vector:
        counts = Counter(letter for x in tasks if (letter := letter_of(x)) is not None)
        return tuple(
            sum(count * self.columns[letter][j] for letter, count in counts.items())
            for j in range(self._size)
        )

    def _ends(self, times: Vector, *, once: bool) -> list[list[int]]:
        """Device → the ends of its instructions."""
        if (times, once) not in self._known:
            costs: dict[str, float] = dict.fromkeys(KINDS, 0)
            for letter, column in self.columns.items():
                if once or KINDS[letter].per_microbatch:
                    costs[letter] = self._encoded(column, times)
            events = run(self.program, self._turns, task_times(self.program, costs))
            self._known[times, once] = [list(map(int, own)) for own in events.ends]
        return self._known[times, once]

    @cached_property
    def _tasks(self) -> list[list[int]]:
        """Device → the positions of its tasks of micro-batches."""
        return [
            [at for at, x in enumerate(own) if letter_of(x) is not None and not _once(x)]
            for own in self.program.lists
        ]

    @cached_property
    def _turns(self) -> list[Turn]:
        walked = walk([len(own) for own in self.program.lists], waits_of(self.program))
        if walked.stuck:
            raise InputError(
                f"program {self.program.name!r} gets stuck; Program.verify() tells why"
            )
        return walked.turns

    @property
    def _size(self) -> int:
        return len(next(iter(self.columns.values())))

    @cached_property
    def _shift(self) -> int:
        most = max(max(column) for column in self.columns.values())
        return (sum(map(len, self.program.lists)) * most + 1).bit_length()

    def _encoded(self, column: Vector, times: Vector) -> int:
        """The time of a task, and behind it the counts of what it is made of."""
        code = dot(column, times)
        for count in reversed(column):
            code = (code << self._shift) + count
        return code

    def _digits(self, time: int) -> Vector:
        mask = (1 << self._shift) - 1
        return tuple(time >> self._shift * j & mask for j in range(self._size))


def _once(instruction: object) -> bool:
    return getattr(instruction, "microbatch", None) is None
