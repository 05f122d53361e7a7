"""List scheduling: whenever a device is free, it takes a task that has arrived, by priorities."""

from __future__ import annotations

from heapq import heappop, heappush
from math import inf
from typing import NamedTuple

from fxpipe.extensions.search.problem import Problem

NEVER = 1e30


class Habit(NamedTuple):
    """How a device treats one of its stages.

    Of the forwards and input gradients that have arrived, the device takes the one whose
    micro-batch has the least number, plus ``turn`` for a forward or ``back`` for an input gradient.

    Attributes:
        limit: the most micro-batches between forward and input gradient.
        turn: by how many micro-batches forwards are put off.
        back: by how many micro-batches input gradients are put off.
        gap: a weight gradient fills an idle time that is at least this many times as long as the
            weight gradient itself.
        room: the same as ``gap``, for when a forward waits for memory.
        hold: a forward waits if an input gradient is to arrive before this share of the forward
            would be done; on a device's first stage also for a forward of its later stages.
    """

    limit: int
    turn: float
    back: float
    gap: float
    room: float
    hold: float


Policy = tuple[Habit, ...]
"""Stage → how its device treats it."""


def order_by_policy(
    problem: Problem, policy: Policy, cutoff: float
) -> tuple[float, list[list[int]]]:
    """Return the time that the problem minimizes, for one step, and the order.

    A forward starts only if one micro-batch still fits on each later stage of its device, so no
    order gets stuck. A list schedule that must take longer than ``cutoff`` is given up, with an
    infinite time.
    """
    m, last, flush = problem.microbatches, problem.stages - 1, problem.flush
    placement, held = problem.placement, problem.held
    deferred, keeps = problem.deferred, problem.keeps
    splits = not problem.whole
    took_f, took_i, took_w = problem.forward, problem.backward, problem.weight
    down, up = problem.down, problem.up
    need = _needs(problem)
    first = [stages[0] if stages else -1 for stages in held]
    # room for sums of gradients is reserved, if a micro-batch fits beside them; where a device has
    # one stage, only as much as what its micro-batches leave for the first weight gradient needs
    sums, full = problem.sums, [most * (1 + 1e-12) for most in problem.memory]
    parts = zip(full, problem.summing, problem.least_memory, strict=True)
    caps = [most - more if most - more >= least else most for most, more, least in parts]
    lone = [bool(sums) and splits and len(stages) == 1 for stages in held]
    caps = [most if one else cap for one, most, cap in zip(lone, full, caps, strict=True)]
    nf, ni, nw = [0] * (last + 1), [0] * (last + 1), [0] * (last + 1)

    def has_room(device: int, stage: int) -> bool:
        """Whether a forward fits, and the sums beside what it and those before it leave."""
        waiting = nf[stage] - nw[stage]
        if lone[device] and waiting:
            if (waiting + 1) * deferred[stage] + sums[stage] > full[device]:
                return False
        return level[device] + need[stage] <= caps[device]

    def sums_fit(device: int, stage: int) -> bool:
        """Whether the first weight gradient has room for its sums, or nothing will free any."""
        if not sums or nw[stage]:
            return True
        more = need[stage] if lone[device] and nf[stage] < m else 0.0  # for the forwards to come
        if max(level[device], more) + sums[stage] <= full[device]:
            return True
        s = first[device]
        room = nf[s] < m and has_room(device, s)
        return not room and all(nf[s] == ni[s] for s in held[device])

    at_f = [[inf] * m for _ in range(last + 1)]
    at_f[0] = [0.0] * m
    at_i = [[inf] * m for _ in range(last + 1)]
    level = [0.0] * problem.devices
    left = [work + more for work, more in zip(problem.work, problem.last, strict=True)]
    tasks = [(2 if problem.whole else 3) * m * len(stages) for stages in held]
    begun = [0.0 if flush else inf] * problem.devices
    since = [-1.0] * problem.devices
    done = [0.0] * problem.devices
    due = [0.0] * problem.devices
    order: list[list[int]] = [[] for _ in held]
    heap = [(0.0, device) for device in range(problem.devices)]
    while heap:
        now, d = heappop(heap)
        if due[d] != now:
            continue
        best, code, blocked, waits = inf, -1, -1, -1
        soon = soon_i = soon_f = inf
        for s in held[d]:
            habit = policy[s]
            i, j = nf[s], ni[s]
            if i < m and i - j < habit[0]:
                when = at_f[s][i]
                if when > now:
                    if when < soon:
                        soon = when
                    if s != first[d] and when < soon_f:
                        soon_f = when
                elif not has_room(d, s):
                    blocked = s
                elif i + habit[1] < best:
                    best, code = i + habit[1], 3 * s
            if j < i:
                when = at_i[s][j]
                if when > now:
                    if when < soon_i:
                        soon_i = when
                elif j + habit[2] <= best:
                    best, code = j + habit[2], 3 * s + 1
            if splits and nw[s] < j and (waits < 0 or nw[s] < nw[waits]) and sums_fit(d, s):
                waits = s
        soon = min(soon, soon_i)
        if code >= 0 and not code % 3:
            s = code // 3
            awaited = min(soon_i, soon_f) if s == first[d] else soon_i
            if awaited < now + policy[s][5] * took_f[s]:
                code = -1
        if waits >= 0 and code < 0:
            gap = soon - now
            least = policy[blocked][4] if blocked >= 0 else policy[waits][3]
            patient = least == NEVER and blocked < 0 and nf[waits] < m
            if gap >= least * took_w[waits] and not patient:
                code = 3 * waits + 2
        if code < 0:
            if since[d] < 0:
                since[d] = now
            due[d] = soon
            if soon < inf:
                heappush(heap, (soon, d))
            continue
        if since[d] >= 0:
            if order[d] and now + left[d] - begun[d] > cutoff:
                return inf, order
            since[d] = -1.0
        s, kind = divmod(code, 3)
        order[d].append(code)
        if begun[d] == inf and not flush:
            begun[d] = now
        if kind == 0:
            i = nf[s]
            took = took_f[s]
            end = now + took
            nf[s] = i + 1
            level[d] += keeps[s]
            if s == last:
                at_i[s][i] = end
                e, arrives = d, end
            else:
                e, arrives = placement[s + 1], end + down[s]
                at_f[s + 1][i] = arrives
        elif kind == 1:
            j = ni[s]
            took = took_i[s]
            end = now + took
            ni[s] = j + 1
            level[d] -= keeps[s] - deferred[s]
            e = d
            if s:
                e, arrives = placement[s - 1], end + up[s - 1]
                at_i[s - 1][j] = arrives
        else:
            took = took_w[s]
            end = now + took
            nw[s] += 1
            level[d] -= deferred[s]
            e = d
        left[d] -= took
        tasks[d] -= 1
        if e != d and since[e] >= 0 and arrives < due[e]:
            due[e] = arrives
            heappush(heap, (arrives, e))
        if tasks[d]:
            due[d] = end
            heappush(heap, (end, d))
        else:
            due[d] = -1.0
            done[d] = end + problem.last[d]
    assert not any(tasks), "a list schedule got stuck"
    value = max(done) if flush else max(e - b for e, b in zip(done, begun, strict=True))
    return (inf if value > cutoff else value), order


def _needs(problem: Problem) -> list[float]:
    """Stage → the free memory that its forward needs: its own, and that of one micro-batch on each
    later stage of its device."""
    need = [0.0] * problem.stages
    for stages in problem.held:
        more = 0.0
        for stage in reversed(stages):
            more += problem.keeps[stage]
            need[stage] = more
    return need
