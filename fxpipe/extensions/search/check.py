"""Check a certificate independently of the search, with which it shares only ``Problem``.

The schedule is valid, is one of the problem, fits into the memory and takes at most ``value``. The
bound follows from the problem alone, and is not above ``value``. Bounds hold because:

- work: a device waits for its first micro-batch, computes all its tasks one at a time, and, until
  that micro-batch returns, has no more forwards than fit into its memory.
- device: some of its tasks all have at least ``before`` ahead of them and ``behind`` after them, on
  the longest paths over what every schedule must wait for. They run one at a time in between.
- chain: a micro-batch must reach a stage, all must pass that stage, and the last must come back.
- spread: however stages are put on devices, one device has at least so much to do.
- memory, room, cycle (batches may mix): a batch takes memory for a time, of which a device has only
  so much; so does each micro-batch; and a later batch waits for this one's update.

What CP-SAT proved cannot be checked like this, and is returned as taken on trust.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from graphlib import TopologicalSorter
from itertools import pairwise, product
from math import inf

from fxpipe.errors import Fault, VerificationError
from fxpipe.extensions.search.certificate import Certificate
from fxpipe.extensions.search.problem import Problem
from fxpipe.ir.schedule import Schedule

_CLOSE = 1e-9

_Node = tuple[str, int | None, int]
"""A task: F, I, W or U, its micro-batch and its stage. A whole backward counts as an I."""

_Edge = tuple[_Node, _Node, float]
"""The second task starts at least so long after the start of the first."""

_START: _Node = ("start", None, -1)
_END: _Node = ("end", None, -1)

_Rule = Callable[[Problem, int, Mapping[str, float]], float]
"""Problem, stage and terms of a bound → the greatest bound that follows for them."""


def check_certificate(certificate: Certificate) -> tuple[str, ...]:
    """See ``Certificate.check``."""
    problem, schedule, value = certificate.problem, certificate.schedule, certificate.value
    bound, wide = certificate.bound, certificate.wide or problem
    faults = []

    def refuse(what: str) -> None:
        faults.append(Fault(what, "do not trust it"))

    schedule.verify()
    faults += _shape(problem, schedule)
    if not faults:
        faults += _levels(problem, schedule)
        if not _takes(problem, schedule, value * (1 + _CLOSE)):
            refuse(f"the schedule takes longer than {value:g}")
    rules: dict[str, _Rule] = {"chain": _chain, "device": _device}
    if problem.delay:
        rules = {"memory": _memory, "room": _room, "cycle": _cycle}
    rules |= {"work": _work, "spread": partial(_spread, devices=problem.devices)}
    rule = rules.get(bound.why)
    stages = 0 <= bound.terms.get("end", 0) <= bound.stage < wide.stages
    if (rule is None and bound.why != "solver") or not stages:
        refuse("the bound is of no kind that holds here")
    if not _easier(problem, wide):
        refuse("the problem of all placements is not easier")
    elif rule and stages:
        least = rule(wide, bound.stage, bound.terms)
        if not bound.time <= least * (1 + _CLOSE):
            refuse(f"the bound is {bound.time:g}, and only {least:g} follows")
    if not bound.time <= value * (1 + _CLOSE):
        refuse("the bound is above the schedule's own time")
    if faults:
        raise VerificationError("the certificate", faults, schedule)
    return () if rule else (certificate.reason,)


# The schedule


def _shape(problem: Problem, schedule: Schedule) -> Iterator[Fault]:
    if schedule.placement != problem.placement or schedule.microbatches != problem.microbatches:
        yield Fault("the schedule has other stages or micro-batches", "give the problem's own")
    delay = max(schedule.delays)
    older = delay > problem.delay if problem.delay else schedule.depth or delay == problem.flush
    if older or schedule.kinds != set("FBU" if problem.whole else "FIWU"):
        yield Fault("the schedule has other tasks, or reads older weights", "search for it anew")


def _levels(problem: Problem, schedule: Schedule) -> Iterator[Fault]:
    """Yield a fault for each device that keeps more than its memory after some task."""
    for device, row in enumerate(schedule.rows):
        changes = []
        begun = []
        for task in row:
            saved, deferred = problem.saved[task.stage or 0], problem.deferred[task.stage or 0]
            kinds = {"F": saved, "I": deferred - saved, "B": -saved, "W": -deferred, "U": 0.0}
            first = task.kind == ("B" if problem.whole else "W") and task.microbatch == 0
            begun.append(problem.sums[task.stage or 0] if problem.sums and first else 0.0)
            changes.append(kinds[task.kind])
        # A task of the k-th batch before has run k times less often than one of this batch.
        kept = sum(task.batch * change for task, change in zip(row, changes, strict=True))
        for position, (task, sums, change) in enumerate(zip(row, begun, changes, strict=True)):
            most = kept + sums + max(change, 0.0)
            kept += sums + change
            if most > problem.memory[device] * (1 + _CLOSE):
                what = f"it keeps {most:g} of {problem.memory[device]:g}"
                yield Fault(what, "do not trust it", device, position, str(task))
                break


def _takes(problem: Problem, schedule: Schedule, most: float) -> bool:
    """Whether a step takes at most ``most``; without flush, whether every step can begin each task
    ``most`` after the step before."""
    took = _took(problem)
    if problem.flush:  # all devices update together, at the end
        took["U"] = (0.0,) * problem.stages
    edges: list[_Edge] = []
    around: list[_Edge] = []  # edges between different steps
    batch: dict[_Node, int] = {}
    for row in filter(None, schedule.rows):
        nodes = [(t.kind.replace("B", "I"), t.microbatch, t.stage or 0) for t in row]
        batch |= {node: task.batch for node, task in zip(nodes, row, strict=True)}
        edges += [(one, two, took[one[0]][one[2]]) for one, two in pairwise(nodes)]
        last = took[nodes[-1][0]][nodes[-1][2]]
        edges += [(_START, nodes[0], 0.0), (nodes[-1], _END, last)]
        if not problem.flush:
            around.append((nodes[-1], nodes[0], last - most))
    for node in batch:
        for needed, _, wait in _arrivals(problem, node):
            steps = batch[needed] - batch[node]  # the needed task runs so many steps before
            (around if steps else edges).append((needed, node, wait - steps * most))
    end = _longest(_START, edges, around).get(_END, inf)
    return end + problem.last[0] <= most if problem.flush else end < inf


# Longest paths


def _took(problem: Problem) -> dict[str, tuple[float, ...]]:
    """Kind of task → stage → its time."""
    times = problem.forward, problem.backward, problem.weight, problem.update
    return dict(zip("FIWU", times, strict=True))


def _arrivals(problem: Problem, node: _Node) -> Iterator[_Edge]:
    """Yield the edge to a task from the task that makes what it reads."""
    kind, i, stage = node
    if kind == "F" and stage:
        yield ("F", i, stage - 1), node, problem.forward[stage - 1] + problem.down[stage - 1]
    elif kind == "I" and stage < problem.stages - 1:
        yield ("I", i, stage + 1), node, problem.backward[stage + 1] + problem.up[stage]
    elif kind == "I":
        yield ("F", i, stage), node, problem.forward[stage]
    elif kind == "W":
        yield ("I", i, stage), node, problem.backward[stage]


def _longest(
    source: _Node, edges: Sequence[_Edge], around: Sequence[_Edge] = ()
) -> dict[_Node, float]:
    """Node → the longest path to it from a source.

    ``edges`` have no cycle. Those of ``around`` may close some; empty if one gets longer each time
    round. Otherwise a longest path takes each of them once at most, and each pass over all nodes
    in their order takes one more.
    """
    into: defaultdict[_Node, list[tuple[_Node, float]]] = defaultdict(list)
    for first, then, wait in edges:
        into[then].append((first, wait))
    needs = {node: [first for first, _ in waits] for node, waits in into.items()}
    order = list(TopologicalSorter(needs).static_order())
    for first, then, wait in around:
        into[then].append((first, wait))
    longest = dict.fromkeys(order, -inf) | {source: 0.0}
    for _ in range(len(around) + 2):
        before = dict(longest)
        for node in order:
            for first, wait in into[node]:
                longest[node] = max(longest[node], longest[first] + wait)
        if longest == before:
            return longest
    return {}


# The bounds


def _easier(problem: Problem, wide: Problem) -> bool:
    """Whether each schedule of ``problem`` is no slower in ``wide``: it has the same times, but no
    less memory for any stage, no slower links, and the same placement or a device for each stage.
    """
    given = {name: getattr(problem, name) for name in ("memory", "placement", "down", "up")}
    links = zip((*wide.down, *wide.up), (*problem.down, *problem.up), strict=True)
    homes = zip(wide.placement, problem.placement, strict=True)
    return (
        replace(wide, **given) == problem
        and wide.placement in (problem.placement, tuple(range(wide.stages)))
        and all(faster <= slower for faster, slower in links)
        and all(wide.memory[more] >= problem.memory[less] for more, less in homes)
    )


def _work(problem: Problem, stage: int, terms: Mapping[str, float]) -> float:
    """The wait for a device's first micro-batch, its work and its updates, and the time until its
    first input gradient in which it has no more forwards to compute."""
    m, device = problem.microbatches, problem.placement[stage]
    held, room, filled = problem.held[device], problem.memory[device], 0.0
    head = _down(problem, 0, held[0]) if problem.flush else 0.0
    wait = _down(problem, held[0]) + _up(problem, held[-1]) - problem.backward[held[-1]]
    # Where several stages share the memory, any parts of forwards, the longest for it first.
    for s in sorted(held, key=lambda s: problem.saved[s] / max(problem.forward[s], 1e-300)):
        saved = problem.saved[s]
        count = m if m * saved <= room else room / saved
        filled += problem.forward[s] * (_flying(problem, s) if len(held) == 1 else count)
        room -= count * saved
    idle = 0.0 if problem.delay else max(0.0, wait - filled)
    return head + problem.work[device] + idle + problem.last[device]


def _device(problem: Problem, stage: int, terms: Mapping[str, float]) -> float:
    """``before``, the work of all tasks of a device that have as much ahead of them and ``behind``
    after them, and ``behind``. Without flush, a step lasts from the device's own first forward to
    its own last task."""
    device, took = problem.placement[stage], _took(problem)
    first = 0 if problem.flush else problem.placement.index(device)
    edges: list[_Edge] = [(_START, ("F", 0, first), 0.0)]
    for s in range(first, problem.stages):
        waits = list(_waits(problem, s))
        for kind, i in product("FIW", range(problem.microbatches)):
            node = kind, i, s
            edges += [edge for edge in _arrivals(problem, node) if edge[0][2] >= first]
            if i:  # the micro-batches of a stage come in order
                edges.append(((kind, i - 1, s), node, took[kind][s]))
            if kind == "F":
                back = [(i - n, problem.backward[s] + more) for n, more in waits if n <= i]
                edges += [(("I", earlier, s), node, wait) for earlier, wait in back]
            if problem.flush or problem.placement[s] == device:
                edges.append((node, _END, took[kind][s]))
    heads = _longest(_START, edges)
    tails = _longest(_END, [(then, first, wait) for first, then, wait in edges])
    work = [
        took[kind][s]
        for kind, i, s in heads
        if s >= 0
        and problem.placement[s] == device
        and heads[kind, i, s] >= terms["before"] * (1 - _CLOSE)
        and tails[kind, i, s] >= (took[kind][s] + terms["behind"]) * (1 - _CLOSE)
    ]
    sums = terms["before"] + sum(work) + terms["behind"] + problem.last[device]
    return sums if work else 0.0


def _chain(problem: Problem, stage: int, terms: Mapping[str, float]) -> float:
    """The way to a stage, the least time there, and the way back to stage ``end``, where a weight
    gradient and the updates follow."""
    end = int(terms["end"])
    way = _down(problem, 0 if problem.flush else end, stage) + _up(problem, end, stage)
    after = problem.weight[end] + problem.last[problem.placement[end]]
    return way + _between(problem, stage) + after


def _spread(problem: Problem, stage: int, terms: Mapping[str, float], devices: int) -> float:
    """The claimed time, if it is at most the mean over the devices, or if all ways to put the
    stages on devices, tried in turn, have a device that takes as long; else 0."""
    m, time, after = problem.microbatches, terms["longest"], 0.0
    took = zip(problem.forward, problem.backward, problem.weight, strict=True)
    work, head = [m * sum(times) for times in took], [0.0] * problem.stages
    if problem.flush:
        head = [_down(problem, 0, s) for s in range(problem.stages)]
        after = max(max(problem.update), sum(problem.update) / devices)
    else:
        work = [before + update for before, update in zip(work, problem.update, strict=True)]
    mean = (sum(work) + sum(sorted(head)[:devices])) / devices
    if time <= mean * (1 + _CLOSE):
        return time + after
    ways: set[tuple[float, ...]] = {()}  # the devices' times, sorted, where all stay below
    for more, first in zip(work, head, strict=True):
        longer = {(*w[:at], w[at] + more, *w[at + 1 :]) for w in ways for at in range(len(w))}
        longer |= {(*w, first + more) for w in ways if len(w) < devices}
        ways = {tuple(sorted(w)) for w in longer if max(w) < time * (1 - _CLOSE)}
    return 0.0 if ways else time + after


def _memory(problem: Problem, stage: int, terms: Mapping[str, float]) -> float:
    """What a batch keeps on a device, times how long, over the device's memory."""
    device, kept = problem.placement[stage], 0.0
    for s in problem.held[device]:
        kept += problem.saved[s] * _trip(problem, s) + problem.deferred[s] * problem.weight[s]
    return problem.microbatches * kept / problem.memory[device]


def _room(problem: Problem, stage: int, terms: Mapping[str, float]) -> float:
    """The time of a batch's trips from a stage, as many at once as its memory has room for."""
    at_once = _most(problem, stage) // _saved(problem, stage)
    return problem.microbatches * _trip(problem, stage) / at_once


def _cycle(problem: Problem, stage: int, terms: Mapping[str, float]) -> float:
    """From a batch's first forward on a stage to its update, for which a later batch waits."""
    time = _between(problem, stage) + problem.weight[stage] + problem.update[stage]
    return time / (problem.delay + 1)


# What every schedule does at a stage


def _down(problem: Problem, first: int, last: int | None = None) -> float:
    """The time from a forward's start on ``first`` to its start on ``last``; without ``last``, to
    its end on the last stage."""
    return sum(problem.forward[first:last]) + sum(problem.down[first:last])


def _up(problem: Problem, first: int, last: int | None = None) -> float:
    """The time from an input gradient's end on ``last`` to its end on ``first``; without ``last``,
    from its start on the last stage."""
    return sum(problem.backward[first:last]) + sum(problem.up[first:last])


def _trip(problem: Problem, stage: int) -> float:
    """From a micro-batch's forward on a stage to the last stage and back."""
    return _down(problem, stage) + _up(problem, stage)


def _between(problem: Problem, stage: int) -> float:
    """The least time from a stage's first forward to its last input gradient: the longer of two.

    One is a path: trips that wait for one another, and a task for each micro-batch left.
    The other is the device's work on this stage, and the time in which it cannot work: before the
    first input gradient, once all micro-batches that fit are in flight; and after the last
    forward, until it returns. Before that last forward it may have to make room by weight
    gradients: the fewer micro-batches it has in flight then, the longer it idles afterwards.
    """
    m, trip, flying = problem.microbatches, _trip(problem, stage), _flying(problem, stage)
    f, b, w = problem.forward[stage], problem.backward[stage], problem.weight[stage]
    path = 0.0
    for apart, more in _waits(problem, stage):
        for rounds in (0, (m - 1) // apart):
            rest = (m - 1 - rounds * apart) * max(f, b)
            path = max(path, rounds * (trip + more) + trip + rest)
    work = m * (f + b) + max(0.0, trip - b - flying * f)
    if m <= flying:
        return max(path, work)
    least = inf
    for others in range(flying):  # in flight, beside the last one
        room = _most(problem, stage) - (others + 1) * _saved(problem, stage)
        returned, deferred = m - 1 - others, problem.deferred[stage]
        weights = next(n for n in range(m) if (returned - n) * deferred <= room)
        least = min(least, weights * w + max(0.0, trip - f - (others + 1) * b))
    return max(path, work + least)


def _waits(problem: Problem, stage: int) -> Iterator[tuple[int, float]]:
    """Yield (n, more): a forward waits for the input gradient of the n-th micro-batch before it,
    and for ``more`` after that.

    The memory has no room for the later one before the earlier one's input gradient. If it has none
    beside what that leaves either, a weight gradient or the next input gradient comes first. And if
    it has none even with the least that all between the two can keep, that weight gradient does.
    """
    m, most, flying = problem.microbatches, _most(problem, stage), _flying(problem, stage)
    saved, deferred = _saved(problem, stage), problem.deferred[stage]
    b, w = problem.backward[stage], problem.weight[stage]
    crowded = deferred and flying * saved + deferred > most
    yield flying, min(b, w) if crowded else 0.0
    least = min(saved, deferred)
    if saved + (m - 1) * least > most:
        yield 1 + int((most - saved) // least), w


def _flying(problem: Problem, stage: int) -> int:
    """The most micro-batches that fit between forward and input gradient of a stage."""
    m, most, saved = problem.microbatches, _most(problem, stage), _saved(problem, stage)
    return m if m * saved <= most else int(most // saved)


def _most(problem: Problem, stage: int) -> float:
    """The memory of a stage's device, with a tolerance."""
    return problem.memory[problem.placement[stage]] * (1 + _CLOSE)


def _saved(problem: Problem, stage: int) -> float:
    """What a micro-batch keeps on a stage's device until its input gradient there: for the stage,
    and for the earlier stages of the device, to which it has not come back."""
    held = problem.held[problem.placement[stage]]
    return sum(problem.saved[s] for s in held if s <= stage)
