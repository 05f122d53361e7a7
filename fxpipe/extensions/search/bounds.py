"""Lower bounds: times below which no schedule of a problem can be."""

from __future__ import annotations

from collections.abc import Iterator
from math import floor

from fxpipe.extensions.search.problem import Problem

_CLOSE = 1e-9


def best_bound(problem: Problem) -> float:
    """The greatest lower bound."""
    return max(*work_bounds(problem), *chain_bounds(problem))


def work_bounds(problem: Problem) -> Iterator[float]:
    """Yield a bound for each device: it waits for its first micro-batch and then does all its work.
    Until that micro-batch comes back it can only compute forwards, as many as fit into its memory;
    for the rest of that time it idles."""
    for device, held in enumerate(problem.held):
        if held:
            head = way_down(problem, 0, held[0]) if problem.flush else 0.0
            wait = lag(problem, held[0]) - _way_up(problem, held[-1], held[0])
            wait -= problem.backward[held[-1]]
            idle = max(0.0, wait - _forwards(problem, device))
            yield head + problem.work[device] + idle + problem.last[device]


def chain_bounds(problem: Problem) -> Iterator[float]:
    """Yield bounds for each stage: the way to it, the time from its first forward to its last input
    gradient, and the way back to an earlier stage, where a weight gradient and an update follow."""
    for stage in range(problem.stages):
        between = middle(problem, stage)
        for end in range(stage + 1):
            down = way_down(problem, 0 if problem.flush else end, stage)
            after = problem.weight[end] + problem.last[problem.placement[end]]
            yield down + between + _way_up(problem, stage, end) + after


def middle(problem: Problem, stage: int) -> float:
    """The least time from a stage's first forward to its last input gradient.

    It leaves out what else the stage's device computes.
    """
    m, f, b, w = (
        problem.microbatches,
        problem.forward[stage],
        problem.backward[stage],
        problem.weight[stage],
    )
    r, k = lag(problem, stage), room(problem, stage)
    times = [r + (m - 1) * max(f, b)]
    for apart, more in _rounds(problem, stage):
        rounds = (m - 1) // apart
        times.append(rounds * (r + more) + r + (m - 1 - rounds * apart) * max(f, b))
    least = 0.0
    if m > k:
        # Before the last forward, all micro-batches but it and ``others`` have had their input
        # gradients, and as many weight gradients as it takes to make room. After it, the device
        # has only the input gradients of ``others`` to compute until the last one's own.
        least = min(
            _weights_before_last(problem, stage, others) * w + max(0.0, r - f - (others + 1) * b)
            for others in range(k)
        )
    times.append(m * (f + b) + max(0.0, r - b - k * f) + least)
    return max(times)


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
