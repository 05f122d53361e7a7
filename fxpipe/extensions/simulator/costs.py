"""The inputs of a simulation: the times of tasks and the links between devices."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from math import inf
from numbers import Integral, Real

from fxpipe.errors import InputError, near
from fxpipe.ir.plan import Plan
from fxpipe.ir.task import BESIDE_FORWARD, KINDS, usual_cost

OfStage = str | tuple[str, int]
Key = OfStage | tuple[str, int, int]

Times = Mapping[tuple[str, int], float]
"""Letter and stage → time, for every stage."""

Each = Mapping[tuple[str, int, int], float]
"""Letter, stage and micro-batch → time, for those whose time is not that of the others."""

PAIRS = tuple(f"F&{letter}" for letter in BESIDE_FORWARD)
"""What times of pairs are called in costs."""


@dataclass(frozen=True)
class Link:
    """The link from one device to another.

    Values take it one after another: each occupies it for bytes / bandwidth, and arrives
    ``latency`` after that.

    Attributes:
        latency: in the unit of the tasks' times.
        bandwidth: bytes per unit of time.
        of: a name that links have in common that are one, such as those of all devices that share a
            network card: values of all of them take it one after another, those of sums over
            replicas, too.
        occupies: the share of a transfer's time, from 0 to 1, in which the device that sends
            computes nothing else.
    """

    latency: float = 0
    bandwidth: float = inf
    of: str = ""
    occupies: float = 0

    def __post_init__(self) -> None:
        if not isinstance(self.latency, Real) or not 0 <= self.latency < inf:
            raise InputError(f"a link's latency is {self.latency!r}; give a time of at least 0")
        if not isinstance(self.bandwidth, Real) or not self.bandwidth > 0:
            raise InputError(f"a link's bandwidth is {self.bandwidth!r}; give one above 0")
        if not isinstance(self.of, str):
            raise InputError(f"a link is of {self.of!r}; give the name that such links share")
        _check_share("the share of a transfer that occupies its device", self.occupies)
        object.__setattr__(self, "latency", _number(self.latency))
        object.__setattr__(self, "bandwidth", _number(self.bandwidth))

    def seconds(self, size: float, messages: float = 1) -> float:
        """The time of so many bytes in so many messages, one after another."""
        return messages * self.latency + (0 if self.bandwidth == inf else size / self.bandwidth)


@dataclass(frozen=True)
class Time:
    """The time of a task in which a device also exchanges values with others that work on the same
    stage, such as the sums of tensor parallelism.

    Attributes:
        compute: the time of computing alone.
        bytes: what the device sends for it.
        link: the way to the others; its values do not wait for those of tasks' transfers.
        hidden: the share of the exchange, from 0 to 1, beside which the device computes.
        messages: how often it sends, each time with the latency of the link.
    """

    compute: float
    bytes: float = 0
    link: Link = field(default_factory=Link)
    hidden: float = 0
    messages: float = 1

    def __post_init__(self) -> None:
        for name in ("compute", "bytes", "messages"):
            value = getattr(self, name)
            if not isinstance(value, Real) or not 0 <= _number(value) < inf:
                raise InputError(f"{name} of a Time is {value!r}; give a number of at least 0")
        if not isinstance(self.link, Link):
            raise InputError(f"the link of a Time is {self.link!r}; give Link(latency, bandwidth)")
        _check_share("the hidden share of a Time", self.hidden)

    @property
    def exchange(self) -> float:
        """The time of the exchange alone."""
        return self.link.seconds(self.bytes, self.messages) if self.bytes else 0

    @property
    def total(self) -> float:
        """How long the task takes: computing and what of the exchange does not hide, and at least
        the exchange."""
        shown = (1 - self.hidden) * self.exchange
        return max(self.compute + shown, self.exchange)


Cost = float | Time
"""How long a task takes."""

Costs = (
    Mapping[str, Cost]
    | Mapping[tuple[str, int], Cost]
    | Mapping[tuple[str, int, int], Cost]
    | Mapping[OfStage, Cost]
    | Mapping[Key, Cost]
    | Mapping[str, float]
    | Mapping[tuple[str, int], float]
    | Mapping[tuple[str, int, int], float]
    | Mapping[OfStage, float]
    | Mapping[Key, float]
)
"""Letter of a kind of task, or letter and stage, or letter, stage and micro-batch → its time. The
most particular time takes precedence. ``F&B`` is for pairs; its stage and micro-batch are those of
the forward."""


def _check_share(what: str, share: object) -> None:
    if not isinstance(share, Real) or not 0 <= _number(share) <= 1:
        raise InputError(f"{what} is {share!r}; give a number from 0 to 1")


def seconds_of(costs: Costs | None) -> dict[Key, float]:
    """Costs, each as the time that it takes in all."""
    given: Mapping[Key, Cost] = dict((costs or {}).items())
    return {key: cost.total if isinstance(cost, Time) else cost for key, cost in given.items()}


def _number(given: Real | float) -> float:
    """A number of any library as an int or a float of Python."""
    return int(given) if isinstance(given, Integral) else float(given)


_LONGEST = 1e100
"""The longest time of a task, so that no sum of times overflows."""

Links = Link | Mapping[tuple[int, int], Link]
"""One link for every pair of devices, or (from, to) → link. A link from a device to itself leads to
the same device of the other replicas."""


def check_links(links: object, devices: int | None = None) -> None:
    """Check that links are None, a Link, or a Link for each of some pairs of devices.

    Raises:
        InputError: they are something else, or a pair is not of ``devices``, if that is given.
    """
    if links is None or isinstance(links, Link):
        return
    if not isinstance(links, Mapping):
        raise InputError(
            f"links is {links!r}; give one Link(latency, bandwidth), or one for each pair of "
            "devices"
        )
    for pair, link in links.items():
        if not isinstance(link, Link):
            raise InputError(f"links[{pair!r}] is {link!r}; give Link(latency, bandwidth)")
        ends = pair if isinstance(pair, tuple) and len(pair) == 2 else (-1,)
        if devices is not None and not all(end in range(devices) for end in ends):
            raise InputError(
                f"links has the key {pair!r}; map pairs of the devices 0 to {devices - 1} to "
                "Link(latency, bandwidth)"
            )


def link_between(links: Links, source: int, target: int) -> Link:
    """The link from one device to another. Raises InputError if there is none."""
    if isinstance(links, Link):
        return links
    if (source, target) not in links:
        to = "its like in other replicas" if source == target else f"device {target}"
        raise InputError(
            f"device {source} sends to {to} and links has no such pair; add "
            f"links[{source}, {target}] = Link(latency, bandwidth)"
        )
    return links[source, target]


def each_of(costs: Costs | None, microbatches: int) -> Each:
    """The times of single micro-batches in costs whose keys are right.

    Raises:
        InputError: a time is of a micro-batch that there is not.
    """
    given = seconds_of(costs)
    each = {k: _number(time) for k, time in given.items() if isinstance(k, tuple) and len(k) == 3}
    for key in each:
        if key[2] not in range(microbatches):
            raise InputError(
                f"costs[{key!r}] is for micro-batch {key[2]}; the micro-batches are 0 to "
                f"{microbatches - 1}"
            )
    return each


def times_of(
    stages: int, letters: Iterable[str], costs: Costs | None = None
) -> dict[tuple[str, int], float]:
    """The time of every kind of task on every stage: from ``costs``, or else the kind's own cost.

    Args:
        stages: how many stages there are.
        letters: further kinds of tasks, which need not be in ``KINDS``.
        costs: letter, or letter and stage → time.

    Raises:
        InputError: a letter or a stage is unknown, or a time is negative or not finite.
    """
    check_keys(costs)
    known = seconds_of(costs)
    for key, time in known.items():
        stage = None if isinstance(key, str) else key[1]
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
    return {
        (letter, stage): known.get((letter, stage), known.get(letter, usual_cost(letter)))
        for letter in dict.fromkeys((*letters, *KINDS))
        for stage in range(stages)
    }


def check_keys(costs: object) -> None:
    """Check that the keys of costs are letters of tasks, or letters and stages.

    Raises:
        InputError: it is no mapping, or a key is something else.
    """
    if costs is not None and not isinstance(costs, Mapping):
        raise InputError(f"costs is {costs!r}; map letters of tasks to times, such as {{'F': 1.0}}")
    for key in costs or {}:
        match key:
            case str(letter) | (str(letter), Integral()) | (str(letter), Integral(), Integral()):
                if letter not in (*KINDS, *PAIRS):
                    raise InputError(f"costs has no kind of task {letter!r}: {near(letter, KINDS)}")
            case _:
                raise InputError(
                    f"costs has the key {key!r}; write a letter of a task, such as 'F', a letter "
                    "and a stage, such as ('F', 0), or also a micro-batch, such as ('F', 0, 3)"
                )


def measured_costs(plan: Plan) -> dict[tuple[str, int], float]:
    """Letter and stage → seconds of one micro-batch of the example.

    Tasks that were not measured take their kind's cost times the stage's forward; half backwards
    take their share of the whole one. Empty if nothing was measured.
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
            if seconds is None and letter in known:
                seconds = stage.costs.backward * kind.cost / KINDS["B"].cost
            usual = kind.cost * stage.costs.forward
            costs[letter, stage.index] = usual if seconds is None else seconds
    return costs
