"""Simulate a program, or a schedule without a model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import partial
from math import inf
from numbers import Integral
from types import MappingProxyType
from typing import Any

from fxpipe.errors import InputError
from fxpipe.extensions.simulator.chain import chain_program
from fxpipe.extensions.simulator.costs import (
    Costs,
    Each,
    Links,
    Times,
    check_links,
    each_of,
    link_between,
    times_of,
)
from fxpipe.extensions.simulator.pairs import Backward, Pairs, backward, pairs_in
from fxpipe.extensions.simulator.simulation import Events, Simulation, TransferSpan
from fxpipe.extensions.simulator.sizes import Sizes
from fxpipe.extensions.simulator.sums import GATHERING, Sum, awaited_by, begins, begun_by
from fxpipe.extensions.simulator.sums import beside as awaits
from fxpipe.extensions.simulator.unroll import blocking, unroll
from fxpipe.ir import instruction as ins
from fxpipe.ir.program import Program, Turn
from fxpipe.ir.schedule import Schedule
from fxpipe.ir.value import COPIED, FURTHEST, Buffer
from fxpipe.ir.walk import waits_of, walk
from fxpipe.text.program import print_instruction

Saved = Mapping[Backward, tuple[int, int, float]]
"""The second task of each pair → stage and micro-batch of its forward, and the time by which the
pair is shorter than both tasks in turn."""


def simulate(
    program: Program,
    costs: Costs | None = None,
    *,
    links: Links | None = None,
    serial: bool = False,
    sizes: Sizes | None = None,
    steps: int | None = None,
    pairs: Pairs = MappingProxyType({}),
) -> Simulation:
    """Compute when each instruction of a program would run.

    Every device runs its list in order, each instruction as soon as the one before it is done and
    what it waits for is there. Instructions that compute nothing take no time of their own.

    If devices have streams, an arrival holds up only the tasks that use it.

    Args:
        program: a program with its communication in place.
        costs: letter of a kind of task, or (letter, stage), or (letter, stage, micro-batch) → time;
            by default the kind's own cost, in which a forward takes 1. Integers stay exact.
        links: the latency and bandwidth of the link from one device to another, one for all or
            (from, to) → Link, in the unit of the costs; None for transfers that take no time.
            Gradients go to the other replicas by the link from a device to itself.
        serial: whether one thread runs the lists of all devices in turns.
        sizes: bytes, for memory and for links of limited bandwidth.
        steps: how many steps in a row, with a flush after the last; by default one, or, if batches
            overlap, enough to show what goes on between them.
        pairs: the tasks that run together; see ``together``.

    Raises:
        InputError: costs, links, sizes or steps are not valid, the program's communication is not
            in place, or the program gets stuck.
    """
    if "communicate" not in program.passes:
        raise InputError(
            f"program {program.name!r} has no communication yet, and nothing would wait for "
            "anything; run it through communicate first"
        )
    given, program = program, blocking(program)
    letters = {x.letter for list_ in program.lists for x in list_ if x.letter}
    times = times_of(program.stages, sorted(letters), costs)
    each = each_of(costs, program.microbatches)
    usual = default_steps(program)
    count = usual if steps is None else steps
    if not isinstance(count, Integral):
        raise InputError(f"steps is {count!r}; give a whole number of at least 1")
    flat = program if count == usual == 1 else unroll(program, count)
    walked = walk([len(list_) for list_ in flat.lists], waits_of(flat))
    settings: dict[str, Any] = {"links": links, "serial": serial, "sizes": sizes}
    unpaired = [key for key in costs or {} if "&" in str(key)] if not pairs else []
    if unpaired:
        raise InputError(
            f"costs[{unpaired[0]!r}] is for pairs, and program {program.name!r} has none; leave it "
            "out, or simulate a schedule with pairs, such as F1&B0"
        )
    for device, (at, *_) in sorted(walked.stuck.items()):
        raise InputError(
            f"program {program.name!r} gets stuck: device {device} waits for ever at position "
            f"{at}, {print_instruction(flat.lists[device][at])}; Program.verify() tells why"
        )
    less = _saved(pairs, times, each, costs)
    events = _run(flat, walked.turns, times, each, less, **settings)
    same = partial(simulate, given, costs, pairs=pairs, **settings)
    return Simulation(
        flat,
        program,
        count,
        events,
        sizes,
        serial=serial,
        again=lambda more: same(steps=more),
        pairs=pairs,
        launched=unroll(given, count) if given.launches else None,
    )


def simulate_schedule(
    schedule: Schedule,
    costs: Costs | None = None,
    *,
    links: Links | None = None,
    sizes: Sizes | None = None,
    steps: int | None = None,
    replicas: int | None = None,
) -> Simulation:
    """Simulate a schedule for stages that each hand one value to those that they feed.

    The arguments are those of ``simulate``; in ``sizes``, stage s makes the value ``y<s>``. With
    several ``replicas``, each stage gets an A if the schedule has none; with one, an A does
    nothing. By default there are two if the schedule has an A, else one, as in its pictures.

    Raises:
        VerificationError: the schedule is not valid.
        InputError: as for ``simulate``, or ``replicas`` is no number of at least 1.
    """
    if replicas is not None and (not isinstance(replicas, Integral) or replicas < 1):
        raise InputError(f"replicas is {replicas!r}; give a whole number of at least 1")
    if sizes is not None and not isinstance(sizes, Sizes):
        raise InputError(f"sizes is {sizes!r}; give Sizes(...)")
    pairs = pairs_in(schedule.verify())
    # the sums of a paired backward begin at its end
    buckets = {} if sizes is None or pairs else sizes.buckets
    program = chain_program(schedule, replicas=replicas, buckets=buckets)
    found = simulate(program, costs, links=links, sizes=sizes, steps=steps, pairs=pairs)
    return replace(found, slices=schedule.slices)


def default_steps(program: Program) -> int:
    """One step if it ends with a flush, else enough to show what goes on between batches."""
    computes = (x for list_ in program.lists for x in list_ if isinstance(x, ins.Compute))
    delay = max((x.batch - x.version for x in computes), default=0)
    reach = max(program.depth, delay)
    if reach > FURTHEST:
        raise InputError(
            f"program {program.name!r} reaches {reach} batches back; at most {FURTHEST} are "
            "simulated"
        )
    return 4 * (reach + 1) if reach else 1


def _saved(pairs: Pairs, times: Times, each: Each, costs: Costs | None) -> Saved:
    """How much time pairs save; without a cost, as ``costs["F&B"]``, nothing.

    A cost may be of a stage or a micro-batch, those of the pair's forward.

    Raises:
        InputError: a pair is longer than its tasks in turn, or shorter than one of them.
    """
    known: Mapping[Any, float] = dict((costs or {}).items())
    found: dict[Backward, tuple[int, int, float]] = {}
    for (letter, stage, i), (there, j) in pairs.items():
        first = each.get(("F", there, j), times["F", there])
        then = each.get((letter, stage, i), times[letter, stage])
        key = f"F&{letter}"
        cost = known.get((key, there, j), known.get((key, there), known.get(key, first + then)))
        if not max(first, then) <= cost <= (first + then) * (1 + 1e-9):
            raise InputError(
                f"costs[{key!r}] is {cost!r} for F{j}@{there}&{letter}{i}@{stage}, whose tasks "
                f"take {first:g} and {then:g}; give a time from {max(first, then):g} to "
                f"{first + then:g}"
            )
        found[letter, stage, i] = there, j, first + then - cost
    return found


def _run(
    program: Program,
    turns: Iterable[Turn],
    times: Times,
    each: Each,
    less: Saved,
    *,
    links: Links | None,
    serial: bool,
    sizes: Sizes | None,
) -> Events:
    """Compute the start and end of every instruction, in an order in which they can run.

    ``turns`` has that order, and ``less`` the time that pairs save; all else is as for
    ``simulate``.
    """
    lists = program.lists
    events = Events(tuple([] for _ in lists), tuple([] for _ in lists))
    transfers = events.transfers
    ways = _Ways(program, links, sizes)
    met: list[dict[type[ins.Instruction], int]] = [{ins.Barrier: 0, ins.Pause: 0} for _ in lists]
    meetings: dict[tuple[type[ins.Instruction], int], float] = {}
    lanes: dict[tuple[int, type[ins.Instruction]], float] = {}
    last: dict[int, tuple[int, int]] = {}  # device → the forward that it has just run
    now: float = 0

    def end_of(awaited: Buffer | Sum) -> float:
        if awaited not in transfers:
            raise InputError(
                f"program {program.name!r}: device {device}, position {position}, "
                f"{print_instruction(x)}: nothing begins what it waits for; "
                "Program.verify() tells what is missing"
            )
        return transfers[awaited].end

    def move(what: Buffer | Sum, target: int, ready: float, start: float, end: float) -> None:
        transfers[what] = TransferSpan(what, device, target, position, ready, start, end)

    for device, stop in turns:
        starts, ends = events.starts[device], events.ends[device]
        now = now if serial else events.free(device)
        for position in range(len(ends), stop):
            x = lists[device][position]
            starts.append(now)
            if (letter := x.letter) is not None:
                stage: int = x.stage
                time = each.get((letter, stage, getattr(x, "microbatch", -1)), times[letter, stage])
                if less:
                    *forward, time_saved = less.get(backward(x), (-1, -1, 0))
                    if last.pop(device, None) == tuple(forward):
                        time -= time_saved
                    if isinstance(x, ins.Forward):
                        last[device] = stage, x.microbatch
                parted = x.partial or getattr(x, "rest", False)
                now += time / program.buckets[stage] if parted else time
                sums = begun_by(x, program) if x.partial or letter in "AU" else None
                if sums is not None:
                    move(sums, device, now, *ways.carry(sums, device, device, now))
            elif isinstance(x, ins.Send):
                target = program.destination(x)
                move(x.buffer, target, now, *ways.carry(x.buffer, device, target, now))
            elif isinstance(x, ins.Receive):
                now = max(now, transfers[x.buffer].end)
            elif x.opcode in GATHERING:
                now = max(now, end_of(awaited_by(x)))
            elif (copy := begins(x)) is not None:
                lane = device, type(x)
                letter, ready = "O", now
                if copy.kind == "fetching":
                    letter = "P"
                    ready = max(now, end_of(copy._replace(kind="offloaded")))
                start = max(ready, lanes.get(lane, ready))
                time = times[letter, copy.source]
                time = each.get((letter, copy.source, copy.microbatch), time)
                lanes[lane] = start + time
                move(copy, device, ready, start, start + time)
            elif (moved := awaits(x)) is not None:
                now = max(now, end_of(moved))
            elif isinstance(x, ins.Meeting):
                meeting = type(x), met[device][type(x)]
                met[device][type(x)] += 1
                if meeting not in meetings:  # no device is past it yet
                    meetings[meeting] = max(map(events.free, range(len(lists))))
                now = max(now, meetings[meeting])
            ends.append(now)
    return events


class _Ways:
    """The links, and until when each is occupied."""

    def __init__(self, program: Program, links: Links | None, sizes: Sizes | None) -> None:
        self._links = links
        self._sizes = sizes or Sizes()
        self._program = program
        self._taken: dict[tuple[int, int], float] = {}
        check_links(links, program.devices)

    def carry(
        self, buffer: Buffer | Sum, source: int, target: int, now: float
    ) -> tuple[float, float]:
        """When a value that is ready now has the link for itself, and when it has arrived."""
        if self._links is None:
            return now, now
        pair, link = (source, target), link_between(self._links, source, target)
        start = max(now, self._taken.get(pair, now))
        occupied = 0 if link.bandwidth == inf else self._bytes(buffer) / link.bandwidth
        self._taken[pair] = start + occupied
        back = isinstance(buffer, Sum) and buffer.what == "sum"
        ways = 2 if back else 1  # there as parts, and back as their sums
        return start, self._taken[pair] + ways * link.latency

    def _bytes(self, buffer: Buffer | Sum) -> int:
        """The bytes that cross. For sums, what the replica sends that sends the most: for parts of
        gradients the first, whose own part is the smallest, otherwise the last."""
        sizes, carried = self._sizes, str(buffer)
        known: Mapping[Any, object]
        key: str | int
        if isinstance(buffer, Sum):
            key, what, known = buffer.stage, "gradients", {**sizes.gradients, **sizes.elements}
            carried = f"the gradients of stage {key}"
        elif buffer.kind == "norm":
            return 0  # a few numbers
        elif buffer.kind in COPIED:
            key, what = buffer.source, "parameters" if buffer.kind == "weights" else "gradients"
            known = getattr(sizes, what)
        else:
            key, what, known = buffer.value, "values", sizes.values
        if key not in known:
            raise InputError(
                f"a link of limited bandwidth carries {carried}, whose size is not known; give "
                f"sizes=Sizes({what}={{{key!r}: bytes}})"
            )
        if not isinstance(buffer, Sum):
            return sizes.crossing(buffer)
        replicas, bucket = self._program.replicas, buffer.bucket_in(self._program)
        replica = 0 if buffer.what == "weights" else replicas - 1  # of those with the most bytes
        return sizes.summing(buffer.stage, replica, replicas, buffer.what, bucket)
