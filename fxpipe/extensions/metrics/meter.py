"""Numbers about the last step, for a logger. Instructions are not measured before somebody asks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from fxpipe.compiler.compiled import Compiled
from fxpipe.extensions.shares import tell_shares
from fxpipe.extensions.shown import predicted_peaks
from fxpipe.extensions.tasks import tasks_of
from fxpipe.ir.program import Program
from fxpipe.locks import locked
from fxpipe.pipeline import Pipeline

STEPS = 10
"""After so many steps whose figures were read, stages are compared with what was predicted."""


class Computing(NamedTuple):
    """An instruction that computes: its position in the list of its device, its stage, and whether
    it is of a micro-batch."""

    position: int
    stage: int
    through: bool


@dataclass
class Meter:
    """Measures steps; only the last one is kept for which the engine has it.

    Attributes:
        times: device → the start and end times of its instructions.
        stays: whether the engine keeps it, as somebody reads ``pipe.metrics``.
        program: the program that the last step ran; None before a step, and after a failure.
        found: what was measured in that step; empty before somebody reads it.
        compiled: the compiled step of ``peaks``.
        peaks: device → the most bytes that it is predicted to hold.
        read: of the steps of ``compiled`` whose figures were read, the times of tasks.
        steps: how many these are.
        computing: device → its instructions that compute, in the program ``known``.
    """

    times: list[list[Any]]
    stays: bool = False
    program: Program | None = None
    found: dict[str, Any] = field(default_factory=dict)
    compiled: Compiled | None = None
    peaks: Sequence[int] | None = None
    read: defaultdict[tuple[str, int], list[float]] = field(
        default_factory=lambda: defaultdict(list)
    )
    steps: int = 0
    computing: Sequence[Sequence[Computing]] = ()
    known: Program | None = None

    @classmethod
    def of(cls, pipe: Pipeline) -> Meter:
        """The meter that the engine has, or a new one that it does not have yet."""
        return pipe._engine.meter or cls([[] for _ in pipe.devices])

    def begin(self) -> None:
        """Begin to measure a step."""
        self.program, self.found = None, {}
        for times in self.times:
            times.clear()

    def figures(self, pipe: Pipeline) -> dict[str, Any]:
        """What was measured in the last step, see ``measured``; empty if nothing was. The first
        reading is noted, and after some of them ``tell_shares`` is called."""
        if self.found or self.program is None or not any(self.times):
            return self.found
        if self.known is not self.program:
            self.known, self.computing = self.program, [*map(computing, self.program.lists)]
        read = pipe._engine.backend.nanoseconds
        times = {device: read(device, marks) for device, marks in enumerate(self.times) if marks}
        self.found = measured(self.computing, times)
        if self.compiled is not None and self.steps < STEPS:
            self._note(times)
            if self.steps == STEPS:
                tell_shares(pipe, self.compiled, self.read)
        return self.found

    def _note(self, times: Mapping[int, Sequence[int]]) -> None:
        """Add the times of a step's tasks to those that were read; see ``measured``."""
        assert self.program is not None
        self.steps += 1
        for device, stamps in times.items():
            spans = zip(self.program.lists[device], stamps[::2], stamps[1::2], strict=True)
            for task, spent in tasks_of(
                (x, (end - start) / 1e9) for x, start, end in spans
            ).items():
                self.read[task] += spent


def computing(instructions: Iterable[Any]) -> list[Computing]:
    """The instructions of a device that compute."""
    return [
        Computing(at, x.stage, getattr(x, "microbatch", None) is not None)
        for at, x in enumerate(instructions)
        if x.letter is not None
    ]


def measured(
    computing: Sequence[Sequence[Computing]], times: Mapping[int, Sequence[int]]
) -> dict[str, Any]:
    """The bubble of a step, the share of the time until its last micro-batch is done in which the
    devices idle; and the seconds in which each stage computed.

    Args:
        computing: device → its instructions that compute.
        times: device → start and end of each of its instructions, in turn, in nanoseconds.
    """
    spent: dict[int, int] = {}
    first = min((stamps[0] for stamps in times.values()), default=0)
    through = 0
    for device, stamps in times.items():
        for at, stage, counts in computing[device]:
            end = stamps[2 * at + 1]
            spent[stage] = spent.get(stage, 0) + end - stamps[2 * at]
            if counts and end > through:
                through = end
    busy = 0
    for device, stamps in times.items():
        for at, _, _ in computing[device]:
            start, end = stamps[2 * at], stamps[2 * at + 1]
            if start < through:
                busy += (end if end < through else through) - start
    whole = len(times) * (through - first)
    bubble = max(0.0, 1 - busy / whole) if through else 0.0
    seconds = {stage: nanoseconds / 1e9 for stage, nanoseconds in sorted(spent.items())}
    return {"bubble": bubble, "stage_seconds": seconds}


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
    meter = pipe._engine.meter = Meter.of(pipe)
    meter.stays = True
    return figures_of(pipe, meter)


@locked
def figures_of(pipe: Pipeline, meter: Meter) -> dict[str, float]:
    """Figures of the last step as ``metrics`` has them, but ``bubble`` and ``stage_seconds`` are of
    the last step for which the engine had the meter."""
    engine, shown, last = pipe._engine, pipe._calls.shown, pipe._calls.last
    if shown is not None and shown is not meter.compiled:
        meter.compiled, meter.peaks = shown, predicted_peaks(engine, shown)
        meter.read.clear()
        meter.steps = 0
    found = meter.figures(pipe)
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
