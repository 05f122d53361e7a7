"""Numbers about the last step, for a logger. Instructions are not measured before somebody asks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fxpipe.extensions.shares import tell_shares
from fxpipe.extensions.tasks import tasks_of
from fxpipe.ir.program import Program
from fxpipe.locks import locked
from fxpipe.pipeline import Pipeline

STEPS = 10
"""After so many steps whose figures were read, stages are compared with what was predicted."""


@dataclass
class Meter:
    """Measures steps; only the last one is kept.

    Attributes:
        times: device → the start and end times of its instructions.
        program: the program that the last step ran; None before a step, and after a failure.
        compiled: the compiled step of ``peaks``.
        peaks: device → the most bytes that it is predicted to hold.
        read: of the steps of ``compiled`` whose figures were read, the times of tasks.
        steps: how many these are.
    """

    times: list[list[Any]]
    program: Program | None = None
    compiled: object = None
    peaks: Sequence[int] | None = None
    read: defaultdict[tuple[str, int], list[float]] = field(
        default_factory=lambda: defaultdict(list)
    )
    steps: int = 0

    def begin(self) -> None:
        """Begin to measure a step."""
        self.program = None
        for times in self.times:
            times.clear()

    def note(self, times: Mapping[int, Sequence[int]]) -> None:
        """Add the times of a step's tasks to those that were read; see ``measured``."""
        assert self.program is not None
        self.steps += 1
        for device, stamps in times.items():
            spans = zip(self.program.lists[device], stamps[::2], stamps[1::2], strict=True)
            for task, spent in tasks_of(
                (x, (end - start) / 1e9) for x, start, end in spans
            ).items():
                self.read[task] += spent


def measured(program: Program, times: Mapping[int, Sequence[int]]) -> dict[str, Any]:
    """The bubble of a step, the share of the time until its last micro-batch is done in which the
    devices idle; and the seconds in which each stage computed.

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
    busy = sum(max(min(end, through) - start, 0) for start, end in spans)
    bubble = max(0.0, 1 - busy / (len(times) * through)) if through else 0.0
    return {"bubble": bubble, "stage_seconds": dict(sorted(seconds.items()))}


@locked
def metrics(pipe: Pipeline) -> dict[str, float]:
    """Figures of the last step.

    Instructions are timed from the first time that you read them; what needs these times, as
    ``bubble``, is known from then on. Figures that are not known, as before a step or after one
    that failed, are left out. Over several ranks, ``bubble`` and
    ``stage_seconds`` are of this rank's device; if batches overlap, both are left out, and
    ``profile`` measures them. After ten steps that were read, the logger "fxpipe" warns once of a
    stage whose share of them is far larger than predicted.

    Returns:
        ``batches``, ``loss`` and ``grad_norm``; ``loss/accuracy`` for a number that the loss
        returns beside it as "accuracy", weighted as the loss is; ``compile_seconds``, the time
        for which the last call of ``step`` compiled, usually 0, and ``seconds``, the rest of
        its time; ``bubble``, the share of the run for which the devices idle until the last
        micro-batch is done. Of each stage, by its number, such as ``stage_seconds/0``: the time
        for which it computed, and ``weight_versions/0`` if batches overlap. ``peak_memory/0``: the
        most bytes that device 0 is predicted to hold.
    """
    engine, shown, last = pipe._engine, pipe._calls.shown, pipe._calls.last
    meter = engine.meter
    if meter is None:
        meter = engine.meter = Meter([[] for _ in pipe.devices])
    if shown is not None and shown is not meter.compiled:
        meter.compiled, meter.peaks = shown, engine.peaks(shown)
        meter.read.clear()
        meter.steps = 0
    taken = [(device, marks) for device, marks in enumerate(meter.times) if marks]
    times = {device: engine.backend.nanoseconds(device, marks) for device, marks in taken}
    found = measured(meter.program, times) if times and meter.program else {}
    if found and shown is not None and meter.steps < STEPS:
        meter.note(times)
        if meter.steps == STEPS:
            tell_shares(pipe, shown, meter.read)
    figures = {
        "batches": pipe.batches,
        "loss": None if last is None else float(last.loss),
        "grad_norm": pipe.grad_norm,
        "seconds": None if last is None else last.seconds,
        "compile_seconds": None if last is None else last.compile_seconds,
        "bubble": found.get("bubble"),
    }
    several: dict[str, Mapping[Any, float]] = {
        "loss": {} if last is None or engine.logged is None else engine.logged.read(),
        "stage_seconds": found.get("stage_seconds", {}),
        "peak_memory": dict(enumerate(meter.peaks or ())),
        "weight_versions": dict(enumerate(pipe.weight_versions)),
    }
    known = {name: value for name, value in figures.items() if value is not None}
    return known | {
        f"{name}/{number}": value
        for name, values in several.items()
        for number, value in values.items()
    }
