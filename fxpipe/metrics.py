"""Numbers about the last step, for a logger. Nothing is measured before somebody asks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

from fxpipe.ir.program import Program


@dataclass
class Meter:
    """Measures steps; only the last one is kept.

    Attributes:
        times: device → the start and end times of its instructions.
        seconds: the time that the last call of ``step`` took, without compiling.
        compile_seconds: the time for which it compiled.
        loss: the loss that it returned.
        program: the program that it ran. These four are None before a step, and after a failure.
        compiled: the compiled step of ``peaks``.
        peaks: device → the most bytes that it is predicted to hold.
    """

    times: list[list[Any]]
    seconds: float | None = None
    compile_seconds: float | None = None
    loss: Any = None
    program: Program | None = None
    compiled: object = None
    peaks: Sequence[int] | None = None
    _start: float = field(default=0.0, repr=False)

    def begin(self) -> None:
        """Begin to measure a step."""
        self._start = perf_counter()
        self.seconds = self.compile_seconds = self.loss = self.program = None
        for times in self.times:
            times.clear()

    def end(self, loss: Any, program: Program, compile_seconds: float) -> None:
        """Keep the results of a step."""
        self.seconds = perf_counter() - self._start - compile_seconds
        self.compile_seconds, self.loss, self.program = compile_seconds, loss, program


def measured(program: Program, times: Mapping[int, Sequence[int]]) -> dict[str, Any]:
    """The bubble of a step, and the seconds in which each stage computed.

    Args:
        program: the program of the step.
        times: device → start and end of each of its instructions, in turn, in nanoseconds.
    """
    spans: list[tuple[float, float]] = []
    seconds: dict[int, float] = {}
    first = min((stamps[0] for stamps in times.values() if stamps), default=0)
    through = 0.0
    for device, stamps in times.items():
        pairs = zip(program.lists[device], stamps[::2], stamps[1::2], strict=True)
        for instruction, *span in pairs:
            if instruction.letter is not None:
                start, end = ((stamp - first) / 1e9 for stamp in span)
                spans.append((start, end))
                stage: int = instruction.stage
                seconds[stage] = seconds.get(stage, 0.0) + end - start
                if getattr(instruction, "microbatch", None) is not None:
                    through = max(through, end)
    bubble = idle_share(len(times), spans, through)
    return {"bubble": bubble, "stage_seconds": dict(sorted(seconds.items()))}


def idle_share(devices: int, times: Iterable[tuple[float, float]], through: float) -> float:
    """The share of the devices' time until ``through`` in which none of the tasks, given as (start,
    end), runs."""
    if not through:
        return 0.0
    busy = sum(max(min(end, through) - start, 0) for start, end in times)
    return 1 - busy / (devices * through)
