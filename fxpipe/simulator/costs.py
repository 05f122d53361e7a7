"""What a simulation is given: the times of tasks and the links between devices."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import inf
from numbers import Integral, Real

from fxpipe.errors import InputError, near
from fxpipe.ir import instruction as ins
from fxpipe.ir.plan import Plan
from fxpipe.ir.program import Program
from fxpipe.ir.task import KINDS

Key = str | tuple[str, int]
Costs = Mapping[str, float] | Mapping[tuple[str, int], float] | Mapping[Key, float]
"""Letter of a kind of task, or letter and stage → its time. A stage's own time goes first."""

Times = Mapping[tuple[str, int], float]
"""Letter and stage → time, for every stage."""

_UNKNOWN_TIME = 1.0


@dataclass(frozen=True)
class Link:
    """The way from one device to another.

    Values take it one after another: each occupies it for its bytes / bandwidth, and arrives
    ``latency`` after that.

    Attributes:
        latency: in the unit of the tasks' times.
        bandwidth: bytes in that unit.
    """

    latency: float = 0
    bandwidth: float = inf

    def __post_init__(self) -> None:
        if not isinstance(self.latency, Real) or not 0 <= self.latency < inf:
            raise InputError(f"a link's latency is {self.latency!r}; give a time of at least 0")
        if not isinstance(self.bandwidth, Real) or not self.bandwidth > 0:
            raise InputError(f"a link's bandwidth is {self.bandwidth!r}; give one above 0")
        object.__setattr__(self, "latency", _number(self.latency))
        object.__setattr__(self, "bandwidth", _number(self.bandwidth))


def _number(given: Real | float) -> float:
    """A whole number as it is, any other as a float, whatever library it is of."""
    return int(given) if isinstance(given, Integral) else float(given)


@dataclass(frozen=True)
class Overheads:
    """What a machine takes besides the work of tasks, in seconds.

    Attributes:
        instruction: of an instruction that computes nothing, and does not wait.
        task: of a task besides its kernel.
        hand_over: from when a value is sent until a device that waits for it goes on.
        step: of a step besides its instructions: before the first, after the last, and what waits
            in between take that no simulation has.
        error: the share by which nine of ten steps differ from what was predicted of earlier ones.
    """

    instruction: float = 0.0
    task: float = 0.0
    hand_over: float = 0.0
    step: float = 0.0
    error: float = 0.0


@dataclass(frozen=True)
class Rehearsal:
    """How long a program's tasks take as they run.

    Attributes:
        costs: letter and stage → seconds.
        overheads: what comes to that, but for ``task``, which the costs contain.
        serial: whether one thread runs the lists of all devices.
        off: the share by which nine of ten steps differ from the prediction at most.
    """

    costs: Times
    overheads: Overheads = Overheads()
    serial: bool = False
    off: float = 0.0

    @property
    def links(self) -> Link | None:
        """The way between two devices: what a hand-over takes, where another thread waits."""
        return None if self.serial else Link(self.overheads.hand_over)

    @property
    def known(self) -> dict[tuple[str, int], float]:
        """The costs, and for a recompute that did not run that of its forward."""
        again = {("R", s): time for (letter, s), time in self.costs.items() if letter == "F"}
        return again | {**self.costs}


_LONGEST = 1e100
"""The longest time of a task: sums of as many as there can be are numbers still."""

Links = Link | Mapping[tuple[int, int], Link]
"""One link for every pair of devices, or (from, to) → link. That from a device to itself leads to
the same device of the other replicas."""


def task_times(program: Program, costs: Costs | None = None) -> dict[tuple[str, int], float]:
    """The time of every kind of task on every stage of a program.

    Raises:
        InputError: as ``times_of``.
    """
    instructions = (instruction for list_ in program.lists for instruction in list_)
    return times_of(program.stages, filter(None, map(ins.letter_of, instructions)), costs)


def times_of(
    stages: int, letters: Iterable[str], costs: Costs | None = None
) -> dict[tuple[str, int], float]:
    """The time of every kind of task on every stage: ``costs``, else the kind's own.

    Args:
        stages: how many stages there are.
        letters: kinds that may not be defined here, as they were read from a text.
        costs: letter, or letter and stage → time.

    Raises:
        InputError: a letter or a stage is unknown, or a time is negative or not finite.
    """
    check_keys(costs)
    known: dict[Key, float] = dict((costs or {}).items())
    for key, time in known.items():
        _, stage = (key, None) if isinstance(key, str) else key
        if stage is not None and stage not in range(stages):
            raise InputError(
                f"costs[{key!r}] is for stage {stage}; the stages are 0 to {stages - 1}"
            )
        if not isinstance(time, Real) or not 0 <= _number(time) <= _LONGEST:
            raise InputError(
                f"costs[{key!r}] is {time!r:.99}; a task takes a time of at least 0, and at most "
                f"{_LONGEST:g}"
            )
        known[key] = _number(time)
    own = dict.fromkeys(letters, _UNKNOWN_TIME)
    own |= {letter: kind.cost for letter, kind in KINDS.items()}
    return {
        (letter, stage): known.get((letter, stage), known.get(letter, time))
        for letter, time in own.items()
        for stage in range(stages)
    }


def check_keys(costs: object) -> None:
    """Check that costs map kinds of tasks, of all stages or of one, whichever stages there are.

    Raises:
        InputError: it is no mapping, or a key is neither a letter nor a letter and a stage.
    """
    if costs is not None and not isinstance(costs, Mapping):
        raise InputError(f"costs is {costs!r}; map letters of tasks to times, such as {{'F': 1.0}}")
    for key in costs or {}:
        match key:
            case str(letter) | (str(letter), Integral()):
                if letter not in KINDS:
                    raise InputError(f"costs has no kind of task {letter!r}: {near(letter, KINDS)}")
            case _:
                raise InputError(
                    f"costs has the key {key!r}; write a letter of a task, such as 'F', or a "
                    "letter and a stage, such as ('F', 0)"
                )


def measured_costs(plan: Plan) -> dict[tuple[str, int], float]:
    """Letter and stage → seconds of one micro-batch of the example.

    What was not measured takes its kind's own cost, in which the stage's forward takes 1. Empty
    where nothing was measured.
    """
    costs: dict[tuple[str, int], float] = {}
    for stage in plan.stages:
        if stage.costs is None:
            return {}
        known = {
            "F": stage.costs.forward,
            "R": stage.costs.forward,
            "B": stage.costs.backward,
            "I": stage.costs.input_grad,
            "W": stage.costs.weight_grad,
        }
        for letter, kind in KINDS.items():
            seconds = known.get(letter)
            own = kind.cost * stage.costs.forward
            costs[letter, stage.index] = own if seconds is None else seconds
    return costs
