"""Lower bounds: times that no schedule of a problem can be below, and why."""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass, field
from heapq import heappop, heappush
from math import floor, inf

from fxpipe.search.problem import Problem

_CLOSE = 1e-9

_FEW = 100_000
"""Micro-batches of stages, for all devices, up to which each device has heads and tails of its
own."""


@dataclass(frozen=True)
class Bound:
    """A time that no schedule can be below.

    Attributes:
        time: it.
        why: "work", "chain", "device" or "solver"; see ``Certificate.reason``.
        stage: the stage that a chain goes through, or the first of the device that works.
        terms: what ``time`` is the sum of, by name, and numbers that these rest on.
    """

    time: float
    why: str
    stage: int = 0
    terms: Mapping[str, float] = field(default_factory=dict)


def best_bound(problem: Problem) -> Bound:
    """The greatest of all that are known without a solver."""
    if problem.delay:
        found = tuple(mixing_bounds(problem))
    else:
        found = (*work_bounds(problem), *chain_bounds(problem), *device_bounds(problem))
    return max(found, key=lambda bound: bound.time)


def work_bounds(problem: Problem) -> Iterator[Bound]:
    """For each device: before its first task a micro-batch must reach it; then it has all its work
    to do, and before its first input gradient there is nothing but forwards, as many as find
    room, until that micro-batch comes back."""
    for device, own in enumerate(problem.held):
        if not own:
            continue
        head = way_down(problem, 0, own[0])
        wait = lag(problem, own[0]) - _way_up(problem, own[-1], own[0])
        wait -= problem.backward[own[-1]]
        idle = max(0.0, wait - _forwards(problem, device))
        terms = {
            "before": head if problem.flush else 0.0,
            "work": problem.work[device],
            "idle": idle,
            "update": problem.last[device],
        }
        yield Bound(sum(terms.values()), "work", own[0], terms)


def chain_bounds(problem: Problem) -> Iterator[Bound]:
    """For each stage: from its first forward to its last input gradient, with the way there and the
    way back to an earlier stage, where a weight gradient and an update follow."""
    for stage in range(problem.stages):
        between, terms = middle(problem, stage)
        for end in range(stage + 1):
            way = {
                "down": way_down(problem, 0 if problem.flush else end, stage),
                "between": between,
                "up": _way_up(problem, stage, end),
                "after": problem.weight[end] + problem.last[problem.placement[end]],
            }
            yield Bound(sum(way.values()), "chain", stage, {**way, "end": end, **terms})


def device_bounds(problem: Problem) -> Iterator[Bound]:
    """For each device: some of its tasks, none of which can start before a time (the least of their
    heads), and behind each of which another must still pass (the least of their tails).

    It computes one task at a time. So from the first of these tasks to the last it is at least as
    long as all of them, and head, work and tail are a bound: for every set of its tasks. The best
    set is the one that decides when the device does what has arrived in the order of tails, the
    longest first, each as soon as it is there, and interrupted where a longer one arrives
    (Jackson's preemptive schedule; Carlier 1982). A head is the longest way from the start to a
    task along what each task waits for, as if each stage and kind of task had a device of its own,
    and a tail the longest way from there to the end. So a device also waits for stages that hand
    it micro-batches more slowly than it takes them, which is what tells most where devices
    hold several stages. Where steps follow one another a device's own first forward is the start,
    its own last task the end, and the stages before it are left out, which may be a step ahead.
    """
    quick = problem.devices * problem.stages * problem.microbatches <= _FEW
    shared = _heads_and_tails(problem, 0, range(problem.devices)) if problem.flush else None
    for device, own in enumerate(problem.held):
        if not own or not (shared or quick):
            continue
        heads, tails = shared or _heads_and_tails(problem, own[0], (device,))
        jobs = [
            (heads[code, i], tails[code, i], problem.took[code])
            for code in _codes(problem, own[0])
            if problem.placement[code // 3] == device
            for i in range(problem.microbatches)
        ]
        tail = _deciding_tail(jobs)
        head, work = inf, 0.0
        found: list[tuple[float, float, float]] = []
        for start, behind, time in sorted(jobs, reverse=True):
            if behind >= tail:
                head, work = start, work + time
                found.append((head + work, head, work))
        time, head, work = max(found)
        terms = {"before": head, "work": work, "behind": tail, "update": problem.last[device]}
        yield Bound(time + tail + problem.last[device], "device", own[0], terms)


def mixing_bounds(problem: Problem) -> Iterator[Bound]:
    """Where batches mix. For each device: all its work; and what a batch keeps there, for the least
    time. For each stage: so many micro-batches find room at once, each for the time of a trip; and
    from a batch's first forward to its update, for which a later batch waits."""
    m = problem.microbatches
    for device, own in enumerate(problem.held):
        if not own:
            continue
        terms = {"before": 0.0, "work": problem.work[device], "idle": 0.0}
        terms["update"] = problem.last[device]
        yield Bound(sum(terms.values()), "work", own[0], terms)
        most = problem.memory[device]
        if most == inf:
            continue
        kept = sum(
            problem.saved[s] * lag(problem, s) + problem.deferred[s] * problem.weight[s]
            for s in own
        )
        yield Bound(m * kept / most, "memory", own[0], {"kept": m * kept, "memory": most})
        for s in own:
            saved = _saved(problem, s)
            if saved:
                at_once = float(floor(most / saved + _CLOSE))
                terms = {"at once": at_once, "trip": lag(problem, s)}
                yield Bound(m * terms["trip"] / at_once, "room", s, terms)
    for s in range(problem.stages):
        time = middle(problem, s)[0] + problem.weight[s] + problem.update[s]
        yield Bound(time / (problem.delay + 1), "cycle", s, {"time": time})


def _deciding_tail(jobs: list[tuple[float, float, float]]) -> float:
    """The tail of the task that is through last in Jackson's schedule of (head, tail, time)."""
    coming = sorted(jobs, reverse=True)
    there: list[tuple[float, float]] = []
    now, latest, tail = 0.0, -inf, 0.0
    while coming or there:
        if not there:
            now = max(now, coming[-1][0])
        while coming and coming[-1][0] <= now:
            _, behind, time = coming.pop()
            heappush(there, (-behind, time))
        behind, time = heappop(there)
        most = coming[-1][0] - now if coming else inf
        if time > most:
            heappush(there, (behind, time - most))
            now += most
        else:
            now += time
            if now - behind > latest:
                latest, tail = now - behind, -behind
    return tail


def _heads_and_tails(
    problem: Problem, first: int, ends: Container[int]
) -> tuple[dict[tuple[int, int], float], dict[tuple[int, int], float]]:
    """Task → the least time to its start from that of the first forward of a stage, and the least
    from its end to the end of the last task of some devices. Stages before that are left out."""
    took, codes, waits = problem.took, _codes(problem, first), _waits(problem)
    heads: dict[tuple[int, int], float] = {}
    edges = []
    for i in range(problem.microbatches):
        for code in codes:
            head = 0.0
            for other, earlier, more in waits[code]:
                before = other, i - earlier
                if before in heads:
                    edges.append((before, (code, i), more))
                    head = max(head, heads[before] + took[other] + more)
            heads[code, i] = head
    tails = {key: 0.0 if problem.placement[key[0] // 3] in ends else -inf for key in heads}
    for before, after, more in reversed(edges):
        tails[before] = max(tails[before], more + took[after[0]] + tails[after])
    return heads, tails


def _waits(problem: Problem) -> list[list[tuple[int, int, float]]]:
    """Kind of task → what it waits for: another kind, of so many micro-batches earlier, and how
    much longer than its end. Kinds are numbered as in an ``Order``."""
    waits: list[list[tuple[int, int, float]]] = []
    last = problem.stages - 1
    for s in range(problem.stages):
        f, b, w = 3 * s, 3 * s + 1, 3 * s + 2
        comes = [(f - 3, 0, problem.down[s - 1])] if s else []
        frees = [(b, apart, more) for apart, more in _rounds(problem, s)]
        returns = (b + 3, 0, problem.up[s]) if s < last else (f, 0, 0.0)
        waits += [[(f, 1, 0.0), *comes, *frees], [(b, 1, 0.0), returns], [(w, 1, 0.0), (b, 0, 0.0)]]
    return waits


def _codes(problem: Problem, first: int) -> list[int]:
    """The kinds of tasks of a stage and those behind it, in the order of a micro-batch."""
    stages = range(first, problem.stages)
    kinds = (1,) if problem.whole else (1, 2)
    return [3 * s for s in stages] + [3 * s + kind for s in reversed(stages) for kind in kinds]


def middle(problem: Problem, stage: int) -> tuple[float, dict[str, float]]:
    """The least time from a stage's first forward to its last input gradient.

    What else its device computes is left out. At most k micro-batches find room at once.
    """
    m, f, b, w = (
        problem.microbatches,
        problem.forward[stage],
        problem.backward[stage],
        problem.weight[stage],
    )
    r, k = lag(problem, stage), room(problem, stage)
    found: list[tuple[float, dict[str, float]]] = [(r + (m - 1) * max(f, b), {"rounds": 0.0})]
    for each, more in _rounds(problem, stage):
        rounds, trip = (m - 1) // each, r + more
        time = rounds * trip + r + (m - 1 - rounds * each) * max(f, b)
        found.append((time, {"rounds": float(rounds), "trip": trip}))
    first = max(0.0, r - b - k * f)
    if m <= k:
        found.append((m * (f + b) + first, {"first": first}))
    else:
        # Before the last forward the device makes room: with so many micro-batches in flight
        # besides, the input gradients of all others, and weight gradients as far as these do not
        # suffice. Behind it only so many input gradients can come until its own.
        options: list[tuple[float, dict[str, float]]] = []
        for more in range(k):
            made = _must_make(problem, stage, more)
            last = max(0.0, r - f - (more + 1) * b)
            options.append((made * w + last, {"weights": float(made), "last": last}))
        least, terms = min(options, key=lambda one: one[0])
        found.append((m * (f + b) + first + least, {"first": first, **terms}))
    return max(found, key=lambda one: one[0])


def _rounds(problem: Problem, stage: int) -> Iterator[tuple[int, float]]:
    """How many micro-batches later a forward has to wait for a trip, and for how long after it.

    The forward k later waits for the input gradient, as k are all that find room. Where what that
    leaves does not find room beside them, it waits for the weight gradient or the next input
    gradient, too. And some forward waits for the weight gradient, as each micro-batch between the
    two keeps at least the less of what a forward saves and what an input gradient leaves.
    """
    saved, deferred = _saved(problem, stage), problem.deferred[stage]
    b, w = problem.backward[stage], problem.weight[stage]
    most, k = problem.memory[problem.placement[stage]], room(problem, stage)
    if k < problem.microbatches:
        crowded = deferred and k * saved + deferred > most * (1 + _CLOSE)
        yield k, (min(b, w) if crowded else 0.0)
    kept = min(saved, deferred)
    if kept and most - saved < problem.microbatches * kept:
        yield 1 + floor((most - saved) / kept + _CLOSE), w


def room(problem: Problem, stage: int) -> int:
    """How many micro-batches a stage may have between forward and input gradient, at most."""
    saved, most = _saved(problem, stage), problem.memory[problem.placement[stage]]
    if saved * problem.microbatches <= most:
        return problem.microbatches
    return max(1, floor(most / saved + _CLOSE))


def _saved(problem: Problem, stage: int) -> float:
    """What a micro-batch keeps between a stage's forward and input gradient: also on the earlier
    stages of its device, to which it has not come back."""
    own = problem.held[problem.placement[stage]]
    return sum(problem.saved[s] for s in own if s <= stage)


def lag(problem: Problem, stage: int) -> float:
    """The least time from the start of a micro-batch's forward to the end of its input gradient."""
    later = range(stage, problem.stages)
    ways = sum(problem.down[stage:]) + sum(problem.up[stage:])
    return sum(problem.forward[s] + problem.backward[s] for s in later) + ways


def way_down(problem: Problem, first: int, last: int) -> float:
    """From the start of a forward on one stage to its start on a later one."""
    return sum(problem.forward[first:last]) + sum(problem.down[first:last])


def _way_up(problem: Problem, first: int, last: int) -> float:
    """From the end of an input gradient on one stage to its end on an earlier one."""
    return sum(problem.backward[last:first]) + sum(problem.up[last:first])


def _forwards(problem: Problem, device: int) -> float:
    """The longest that a device can compute forwards alone: what takes the longest for its room
    goes first, whole micro-batches where it has one stage."""
    own, left, time = problem.held[device], problem.memory[device], 0.0
    if len(own) == 1:
        return room(problem, own[0]) * problem.forward[own[0]]
    m, saved = problem.microbatches, problem.saved
    for s in sorted(own, key=lambda s: -problem.forward[s] / max(saved[s], 1e-300)):
        count = m if m * saved[s] <= left else left / saved[s]
        time, left = time + count * problem.forward[s], left - count * saved[s]
    return time


def _must_make(problem: Problem, stage: int, more: int) -> int:
    """Weight gradients that come before a stage's last forward, at which so many other
    micro-batches are between forward and input gradient."""
    m, saved, deferred = problem.microbatches, _saved(problem, stage), problem.deferred[stage]
    left = problem.memory[problem.placement[stage]] - (more + 1) * saved
    waiting = m - 1 - more  # have had their input gradients
    if problem.whole or not deferred or waiting * deferred <= left * (1 + _CLOSE):
        return 0
    return waiting - max(0, floor(left / deferred + _CLOSE))
