"""Lower bounds: times below which no schedule of a problem can be, and why."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping
from dataclasses import dataclass, field
from heapq import heappop, heappush
from math import floor, inf

from fxpipe.extensions.search.problem import Problem

_CLOSE = 1e-9

_FEW = 100_000
"""Without flush, each device needs heads and tails of its own. They are computed if devices ×
stages × micro-batches is at most this."""


@dataclass(frozen=True)
class Bound:
    """A time below which no schedule can be.

    Attributes:
        time: the time.
        why: the rule that it follows from, such as "work" or "chain", or "solver"; see
            ``Certificate.reason``.
        stage: the stage that a chain goes through, or the first stage of the device that works.
        terms: name → a term of the sum that is ``time``, or a number that such a term rests on.
    """

    time: float
    why: str
    stage: int = 0
    terms: Mapping[str, float] = field(default_factory=dict)


def best_bound(problem: Problem) -> Bound:
    """The greatest bound that needs no solver."""
    rules: list[Callable[[Problem], Iterator[Bound]]] = [work_bounds]
    rules += [mixing_bounds] if problem.delay else [chain_bounds, device_bounds]
    return max((bound for rule in rules for bound in rule(problem)), key=lambda bound: bound.time)


def work_bounds(problem: Problem) -> Iterator[Bound]:
    """Yield a bound for each device: it waits for its first micro-batch and then does all its work.
    Until that micro-batch comes back it can only compute forwards, as many as fit into its memory;
    for the rest of that time it idles, unless batches mix."""
    for device, held in enumerate(problem.held):
        if not held:
            continue
        head = way_down(problem, 0, held[0])
        wait = lag(problem, held[0]) - _way_up(problem, held[-1], held[0])
        wait -= problem.backward[held[-1]]
        idle = 0.0 if problem.delay else max(0.0, wait - _forwards(problem, device))
        terms = {
            "before": head if problem.flush else 0.0,
            "work": problem.work[device],
            "idle": idle,
            "update": problem.last[device],
        }
        yield Bound(sum(terms.values()), "work", held[0], terms)


def chain_bounds(problem: Problem) -> Iterator[Bound]:
    """Yield bounds for each stage: the way to it, the time from its first forward to its last input
    gradient, and the way back to an earlier stage, where a weight gradient and an update follow."""
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
    """Yield a bound for each device: the work of some of its tasks, the time before which none of
    them can start, and the time that must pass after each of them.

    A device computes one task at a time. So for any set of its tasks, their work, the least of
    their heads and the least of their tails make a bound. A head is the longest path from the start
    to the task over what each task waits for, as if each stage and kind of task had a device of its
    own; a tail is the longest path from the task to the end. Without flush, the start is the
    device's own first forward and the end its own last task; earlier stages may be a step ahead.

    The best set of tasks is the critical one in Jackson's preemptive schedule (Carlier 1982): of
    the tasks that have arrived, the device does the one with the longest tail, and interrupts it
    when one with a longer tail arrives.
    """
    quick = problem.devices * problem.stages * problem.microbatches <= _FEW
    shared = _heads_and_tails(problem, 0, range(problem.devices)) if problem.flush else None
    for device, held in enumerate(problem.held):
        if not held or not (shared or quick):
            continue
        heads, tails = shared or _heads_and_tails(problem, held[0], (device,))
        jobs = [
            (heads[code, i], tails[code, i], problem.took[code])
            for code in _codes(problem, held[0])
            if problem.placement[code // 3] == device
            for i in range(problem.microbatches)
        ]
        tail = _deciding_tail(jobs)
        work = 0.0
        sets: list[tuple[float, float, float]] = []
        for head, behind, time in sorted(jobs, reverse=True):
            if behind >= tail:
                work += time
                sets.append((head + work, head, work))
        time, head, work = max(sets)
        terms = {"before": head, "work": work, "behind": tail, "update": problem.last[device]}
        yield Bound(time + tail + problem.last[device], "device", held[0], terms)


def mixing_bounds(problem: Problem) -> Iterator[Bound]:
    """Yield the bounds that hold only where batches mix.

    For each device: the memory that a batch takes there, times how long, over the device's memory.
    For each stage: the trips of a batch's micro-batches, as many at once as fit into the memory;
    and the time from a batch's first forward to its update, for which a later batch waits.
    """
    m = problem.microbatches
    for held, most in zip(problem.held, problem.memory, strict=True):
        if not held or most == inf:
            continue
        kept = sum(
            problem.saved[s] * lag(problem, s) + problem.deferred[s] * problem.weight[s]
            for s in held
        )
        yield Bound(m * kept / most, "memory", held[0], {"kept": m * kept, "memory": most})
        for s in held:
            saved = _saved(problem, s)
            if saved:
                at_once = float(floor(most / saved + _CLOSE))
                terms = {"at once": at_once, "trip": lag(problem, s)}
                yield Bound(m * terms["trip"] / at_once, "room", s, terms)
    for s in range(problem.stages):
        time = middle(problem, s)[0] + problem.weight[s] + problem.update[s]
        yield Bound(time / (problem.delay + 1), "cycle", s, {"time": time})


def _deciding_tail(jobs: list[tuple[float, float, float]]) -> float:
    """The tail of the job (head, tail, time) that decides the end of Jackson's preemptive schedule:
    its own end plus its tail is the greatest."""
    coming = sorted(jobs, reverse=True)
    arrived: list[tuple[float, float]] = []
    now, latest, deciding = 0.0, -inf, 0.0
    while coming or arrived:
        if not arrived:
            now = max(now, coming[-1][0])
        while coming and coming[-1][0] <= now:
            _, tail, time = coming.pop()
            heappush(arrived, (-tail, time))
        negative, time = heappop(arrived)
        until_next = coming[-1][0] - now if coming else inf
        if time > until_next:
            heappush(arrived, (negative, time - until_next))
            now += until_next
        else:
            now += time
            if now - negative > latest:
                latest, deciding = now - negative, -negative
    return deciding


def _heads_and_tails(
    problem: Problem, first: int, ends: Container[int]
) -> tuple[dict[tuple[int, int], float], dict[tuple[int, int], float]]:
    """Task → its head, and task → its tail: the longest path to its start from the first forward of
    stage ``first``, and from its end to the end of a task of the devices ``ends``. Earlier stages
    are left out."""
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
    """Kind of task → what it waits for: (kind, how many micro-batches earlier, how long after that
    has ended). Kinds are numbered as in an ``Order``."""
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
    """The kinds of tasks from stage ``first`` on, in the order in which a micro-batch has them."""
    stages = range(first, problem.stages)
    kinds = (1,) if problem.whole else (1, 2)
    return [3 * s for s in stages] + [3 * s + kind for s in reversed(stages) for kind in kinds]


def middle(problem: Problem, stage: int) -> tuple[float, dict[str, float]]:
    """The least time from a stage's first forward to its last input gradient, and its terms.

    It leaves out what else the stage's device computes.
    """
    m, f, b, w = (
        problem.microbatches,
        problem.forward[stage],
        problem.backward[stage],
        problem.weight[stage],
    )
    r, k = lag(problem, stage), room(problem, stage)
    times: list[tuple[float, dict[str, float]]] = [(r + (m - 1) * max(f, b), {"rounds": 0.0})]
    for apart, more in _rounds(problem, stage):
        rounds, trip = (m - 1) // apart, r + more
        time = rounds * trip + r + (m - 1 - rounds * apart) * max(f, b)
        times.append((time, {"rounds": float(rounds), "trip": trip}))
    first = max(0.0, r - b - k * f)
    if m <= k:
        times.append((m * (f + b) + first, {"first": first}))
    else:
        # Before the last forward, all micro-batches but it and ``others`` have had their input
        # gradients, and as many weight gradients as it takes to make room. After it, the device
        # has only the input gradients of ``others`` to compute until the last one's own.
        options: list[tuple[float, dict[str, float]]] = []
        for others in range(k):
            weights = _weights_before_last(problem, stage, others)
            last = max(0.0, r - f - (others + 1) * b)
            options.append((weights * w + last, {"weights": float(weights), "last": last}))
        least, terms = min(options, key=lambda option: option[0])
        times.append((m * (f + b) + first + least, {"first": first, **terms}))
    return max(times, key=lambda time: time[0])


def _rounds(problem: Problem, stage: int) -> Iterator[tuple[int, float]]:
    """Yield (n, more): a forward waits for the input gradient of the n-th micro-batch before it,
    and for ``more`` after that.

    At most k micro-batches fit between forward and input gradient, so a forward waits for the input
    gradient of the k-th before it. If what that leaves does not fit beside the k, a weight gradient
    or the next input gradient must come first, too. A forward also waits for a weight gradient, as
    each micro-batch in between keeps at least the less of ``saved`` and ``deferred``.
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
    """The most micro-batches that fit between a stage's forward and its input gradient."""
    saved, most = _saved(problem, stage), problem.memory[problem.placement[stage]]
    if saved * problem.microbatches <= most:
        return problem.microbatches
    return max(1, floor(most / saved + _CLOSE))


def _saved(problem: Problem, stage: int) -> float:
    """What a micro-batch keeps on a stage's device until its input gradient there: for the stage,
    and for the earlier stages of the device, to which it has not come back."""
    held = problem.held[problem.placement[stage]]
    return sum(problem.saved[s] for s in held if s <= stage)


def lag(problem: Problem, stage: int) -> float:
    """The least time from the start of a micro-batch's forward to the end of its input gradient."""
    later = range(stage, problem.stages)
    ways = sum(problem.down[stage:]) + sum(problem.up[stage:])
    return sum(problem.forward[s] + problem.backward[s] for s in later) + ways


def way_down(problem: Problem, first: int, last: int) -> float:
    """The least time from a forward's start on one stage to its start on a later one."""
    return sum(problem.forward[first:last]) + sum(problem.down[first:last])


def _way_up(problem: Problem, first: int, last: int) -> float:
    """The least time from an input gradient's end on one stage to its end on an earlier one."""
    return sum(problem.backward[last:first]) + sum(problem.up[last:first])


def _forwards(problem: Problem, device: int) -> float:
    """The longest time for which a device can compute nothing but forwards.

    With several stages, the memory is filled with parts of forwards, those first that take the
    longest for their memory.
    """
    held, left, time = problem.held[device], problem.memory[device], 0.0
    if len(held) == 1:
        return room(problem, held[0]) * problem.forward[held[0]]
    m, saved = problem.microbatches, problem.saved
    for s in sorted(held, key=lambda s: -problem.forward[s] / max(saved[s], 1e-300)):
        count = m if m * saved[s] <= left else left / saved[s]
        time, left = time + count * problem.forward[s], left - count * saved[s]
    return time


def _weights_before_last(problem: Problem, stage: int, others: int) -> int:
    """The least number of weight gradients before a stage's last forward, if that many other
    micro-batches are between forward and input gradient then."""
    m, saved, deferred = problem.microbatches, _saved(problem, stage), problem.deferred[stage]
    left = problem.memory[problem.placement[stage]] - (others + 1) * saved
    waiting = m - 1 - others  # have had their input gradients
    if problem.whole or not deferred or waiting * deferred <= left * (1 + _CLOSE):
        return 0
    return waiting - max(0, floor(left / deferred + _CLOSE))
