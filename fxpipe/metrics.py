"""What a step was, as numbers for a logger. Nothing is measured before somebody asks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from time import perf_counter, perf_counter_ns
from typing import Any

from fxpipe.ir import instruction as ins
from fxpipe.ir.program import Program
from fxpipe.runtime.ranks.group import RankGroup
from fxpipe.simulator.simulation import idle_share

_ROUNDS = 8
"""Of messages that compare clocks."""


@dataclass
class Meter:
    """Measures the steps from now on; only the last one is kept.

    Attributes:
        times: device → start and end of its instructions, as its machine takes them.
        seconds: how long the last call of ``step`` took; None before one, and after one that
            failed.
        loss: what it returned; likewise.
        program: what it ran; likewise.
        compiled: the compiled step whose peaks are known.
        peaks: device → the bytes that it is predicted to hold at most.
    """

    times: list[list[Any]]
    seconds: float | None = None
    loss: Any = None
    program: Program | None = None
    compiled: object = None
    peaks: list[int] | None = None
    _start: float = field(default=0.0, repr=False)

    def begin(self) -> None:
        """A step begins."""
        self._start = perf_counter()
        self.seconds = self.loss = self.program = None
        for own in self.times:
            own.clear()

    def end(self, loss: Any, program: Program) -> None:
        """It has ended."""
        self.seconds, self.loss, self.program = perf_counter() - self._start, loss, program


def measured(program: Program, times: Mapping[int, Sequence[int]]) -> dict[str, Any]:
    """The bubble of a step, and the seconds in which each stage computed.

    ``times`` has, for each device that was measured, start and end of its instructions in
    nanoseconds.
    """
    spans: list[tuple[float, float]] = []
    seconds: dict[int, float] = {}
    first = min((own[0] for own in times.values() if own), default=0)
    through = 0.0
    for device, own in times.items():
        for instruction, *span in zip(program.lists[device], own[::2], own[1::2], strict=True):
            if ins.letter_of(instruction) is not None:
                start, end = ((each - first) / 1e9 for each in span)
                spans.append((start, end))
                stage: int = instruction.stage  # type: ignore[union-attr]
                seconds[stage] = seconds.get(stage, 0.0) + end - start
                if getattr(instruction, "microbatch", None) is not None:
                    through = max(through, end)
    bubble = idle_share(len(times), spans, through)
    return {"bubble": bubble, "stage_seconds": dict(sorted(seconds.items()))}


def clocks(group: RankGroup) -> list[int]:
    """Rank → by how many nanoseconds its clock is ahead of the first one's.

    It is found by messages that cross, as the network's time protocol does. It is 0 where they do
    not show that the clocks differ, as on one host, whose processes have one clock. Otherwise it is
    wrong by half the time of a message at most.
    """
    least = [inf] * group.size
    for _ in range(_ROUNDS):
        sent = group.exchange("clock", perf_counter_ns())
        now = perf_counter_ns()
        least = [min(known, now - each) for known, each in zip(least, sent, strict=True)]
    # receiver → sender → the least time of a message, and by how far the receiver is ahead
    seen = group.exchange("delays", least)
    ways = [(own[0], seen[0][rank]) for rank, own in enumerate(seen)]
    return [0 if -back <= 0 <= there else (there - back) // 2 for there, back in ways]
