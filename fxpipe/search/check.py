"""The checker of certificates: it shares nothing with the search but the problem itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from math import inf

from fxpipe.errors import Fault, VerificationError
from fxpipe.ir.schedule import Schedule
from fxpipe.ir.task import Task
from fxpipe.search.certificate import Certificate
from fxpipe.search.problem import Problem

_CLOSE = 1e-9


def check_certificate(certificate: Certificate) -> tuple[str, ...]:
    """See ``Certificate.check``."""
    problem, schedule, value = certificate.problem, certificate.schedule, certificate.value
    schedule.verify()
    faults = list(_shape(problem, schedule))
    if not faults:
        faults += _levels(problem, schedule)
        if not _takes(problem, schedule, value):
            faults.append(Fault(f"the schedule takes longer than {value:g}", "do not trust it"))
    ways: dict[str, Callable[[Certificate], float]] = {"chain": _chain, "device": _device}
    if problem.delay:
        ways = {"memory": _memory, "room": _room, "cycle": _cycle}
    ways |= {"work": _work, "spread": partial(_spread, devices=problem.devices)}
    shown = ways.get(certificate.bound.why)
    if shown is None and certificate.bound.why != "solver":
        faults.append(Fault("the bound is of no kind that holds here", "do not trust it"))
    wide = certificate.wide or problem
    if not _easier(problem, wide):
        faults.append(Fault("the problem of all placements is not easier", "do not trust it"))
    elif shown is not None:
        least = shown(replace(certificate, problem=wide))
        if certificate.bound.time > least * (1 + _CLOSE):
            what = f"the bound is {certificate.bound.time:g}, and only {least:g} follows"
            faults.append(Fault(what, "do not trust it"))
    if certificate.bound.time > value * (1 + _CLOSE):
        faults.append(Fault("the bound is above the schedule's own time", "do not trust it"))
    if faults:
        raise VerificationError("the certificate", faults, schedule)
    return () if shown else (certificate.reason,)


def _shape(problem: Problem, schedule: Schedule) -> Iterator[Fault]:
    kinds = {"F", "B", "U"} if problem.whole else {"F", "I", "W", "U"}
    if schedule.placement != problem.placement or schedule.microbatches != problem.microbatches:
        yield Fault("the schedule has other stages or micro-batches", "give the problem's own")
    delay = max(schedule.delays)
    older = delay > problem.delay if problem.delay else schedule.depth or delay == problem.flush
    if older or schedule.kinds != kinds:
        yield Fault("the schedule has other tasks, or reads older weights", "search for it anew")


def _levels(problem: Problem, schedule: Schedule) -> Iterator[Fault]:
    """Count what each device keeps, task by task; at first, of each batch that is not through."""
    for device, row in enumerate(schedule.rows):
        kept: dict[tuple[int | None, int, int], float] = {}
        begun = {(t.microbatch, t.stage): t.batch for t in row if t.kind == "F"}
        for task in sorted(row, key=lambda task: task.kind):
            if task.kind in "BIW":
                size = (problem.deferred if task.kind == "W" else problem.saved)[task.stage or 0]
                first = begun[task.microbatch, task.stage]
                for batch in range(task.batch, first):
                    kept[task.microbatch, task.stage or 0, batch] = size
                begun[task.microbatch, task.stage] = task.batch
        for position, task in enumerate(row):
            stage = task.stage or 0
            key = task.microbatch, stage, task.batch
            if task.kind in "FI":
                kept[key] = problem.saved[stage] if task.kind == "F" else problem.deferred[stage]
            elif task.kind in "BW":
                del kept[key]
            if sum(kept.values()) > problem.memory[device] * (1 + _CLOSE):
                what = f"it keeps {sum(kept.values()):g} of {problem.memory[device]:g}"
                yield Fault(what, "do not trust it", device, position, str(task))
                break


def _takes(problem: Problem, schedule: Schedule, value: float) -> bool:
    """Whether the schedule gets by with this time: of a step; or of each, where every step begins
    each task so long after the step before."""
    if not problem.flush:
        return _repeats(problem, schedule, value * (1 + _CLOSE))
    took = {"F": problem.forward, "I": problem.backward, "B": problem.backward}
    took |= {"W": problem.weight, "U": (0.0,) * problem.stages}
    end: dict[Task, float] = {}
    now, places = [0.0] * len(schedule.rows), [0] * len(schedule.rows)
    moved = True
    while moved:
        moved = False
        for device, row in enumerate(schedule.rows):
            while places[device] < len(row):
                task = row[places[device]]
                need = 0.0
                if (source := _source(problem, task)) is not None:
                    need = end.get(source[0], inf) + source[1]
                if need == inf:
                    break
                now[device] = end[task] = max(now[device], need) + took[task.kind][task.stage or 0]
                places[device] += 1
                moved = True
    return max(now) + _update(problem, 0) <= value * (1 + _CLOSE)


def _source(problem: Problem, task: Task) -> tuple[Task, float] | None:
    """The task of another stage that one needs, of the same step, and the way from there."""
    stage = task.stage or 0
    if task.kind == "F" and stage:
        return Task("F", task.microbatch, stage - 1), problem.down[stage - 1]
    if task.kind in "BI" and stage < problem.stages - 1:
        return Task(task.kind, task.microbatch, stage + 1), problem.up[stage]
    return None


def _repeats(problem: Problem, schedule: Schedule, period: float) -> bool:
    """Whether there are times for all tasks that allow it: the earliest ones, each put off as long
    as what it needs is, in this step or some steps before. Without them that would never end."""
    took = {"F": problem.forward, "I": problem.backward, "B": problem.backward}
    took |= {"W": problem.weight, "U": problem.update}
    rows, stages = schedule.rows, problem.stages
    batch = {replace(task, batch=0): task.batch for row in rows for task in row}
    end: dict[Task, float] = {}
    begins = [0.0] * len(rows)
    waiting = dict.fromkeys(range(len(rows)))
    for _ in range(len(rows) * len(batch)):
        if not waiting:
            return True
        device = next(iter(waiting))
        del waiting[device]
        now = begins[device]
        for task in rows[device]:
            if (source := _source(problem, task)) is not None:
                needed, way = source
                earlier = batch[needed] - task.batch
                now = max(now, end.get(needed, -inf) + way - earlier * period)
            now += took[task.kind][task.stage or 0]
            own = replace(task, batch=0)
            if now > end.get(own, -inf):
                end[own] = now
                reader = (task.stage or 0) + {"F": 1, "B": -1, "I": -1}.get(task.kind, stages)
                if 0 <= reader < stages:
                    waiting[problem.placement[reader]] = None
        if now - period > begins[device]:
            begins[device] = now - period
            waiting[device] = None
    return False


def _easier(problem: Problem, wide: Problem) -> bool:
    """Whether each schedule of a problem is no slower in another, which is it but for the memory
    and the ways, or has a device for each stage."""
    same = replace(wide, memory=problem.memory, placement=problem.placement)
    ways = zip((*wide.down, *wide.up), (*problem.down, *problem.up), strict=True)
    alone = wide.placement == tuple(range(wide.stages)) or wide.placement == problem.placement
    return (
        replace(same, down=problem.down, up=problem.up) == problem
        and all(one <= other for one, other in ways)
        and alone
        and all(
            wide.memory[wide.placement[s]] >= problem.memory[home]
            for s, home in enumerate(problem.placement)
        )
    )


def _spread(certificate: Certificate, devices: int) -> float:
    """The bound, if it is no more than the mean of all devices, or if no way to put the stages on
    devices, tried in turn, leaves them all below it."""
    problem, time = certificate.problem, certificate.bound.terms["longest"]
    work, head = [], []
    for s in range(problem.stages):
        each = problem.forward[s] + problem.backward[s] + problem.weight[s]
        work.append(problem.microbatches * each + (0.0 if problem.flush else problem.update[s]))
        head.append(sum(problem.forward[:s]) + sum(problem.down[:s]) if problem.flush else 0.0)
    after = max(max(problem.update), sum(problem.update) / devices) if problem.flush else 0.0
    mean = (sum(work) + sum(sorted(head)[:devices])) / devices
    if time <= mean * (1 + _CLOSE):
        return time + after
    level: set[tuple[float, ...]] = {()}  # the devices' times, sorted, of all ways that stay below
    for own, first in zip(work, head, strict=True):
        more = {
            (*full[:at], full[at] + own, *full[at + 1 :])
            for full in level
            for at in range(len(full))
        } | {(*full, first + own) for full in level if len(full) < devices}
        level = {tuple(sorted(full)) for full in more if max(full) < time * (1 - _CLOSE)}
    return 0.0 if level else time + after


def _work(certificate: Certificate) -> float:
    """A device's head start of others, its work, its updates, and the time in which it cannot but
    idle: before its first input gradient, less all forwards that find room."""
    problem, stage = certificate.problem, certificate.bound.stage
    m, device = problem.microbatches, problem.placement[stage]
    own = [s for s, home in enumerate(problem.placement) if home == device]
    head = sum(problem.forward[s] + problem.down[s] for s in range(own[0]))
    wait = sum(problem.forward[s] for s in range(own[0], problem.stages))
    wait += sum(problem.down[own[0] :]) + sum(problem.up[own[-1] :])
    wait += sum(problem.backward[s] for s in range(own[-1] + 1, problem.stages))
    work = m * sum(problem.forward[s] + problem.backward[s] + problem.weight[s] for s in own)
    room, filled = problem.memory[device], 0.0
    for s in sorted(own, key=lambda s: problem.saved[s] / max(problem.forward[s], 1e-300)):
        count = float(m) if m * problem.saved[s] <= room else room / problem.saved[s]
        if len(own) == 1:
            count = count // 1 if (count + 1e-9) // 1 == count // 1 else count // 1 + 1
        filled += count * problem.forward[s]
        room -= count * problem.saved[s]
    head = head if problem.flush else 0.0
    idle = 0.0 if problem.delay else max(0.0, wait - filled)
    return head + work + idle + _update(problem, device)


def _update(problem: Problem, device: int) -> float:
    """The time of a device's updates, or with a flush, before which all meet, of the longest."""
    own = [0.0] * len(problem.memory)
    for stage, home in enumerate(problem.placement):
        own[home] += problem.update[stage]
    return max(own) if problem.flush else own[device]


def _chain(certificate: Certificate) -> float:
    """The way to a stage, the least time there, the way back, a weight gradient and an update."""
    problem, stage = certificate.problem, certificate.bound.stage
    end = int(certificate.bound.terms["end"])
    begin = 0 if problem.flush else end
    way = sum(problem.forward[begin:stage]) + sum(problem.down[begin:stage])
    way += sum(problem.backward[end:stage]) + sum(problem.up[end:stage])
    way += problem.weight[end] + _update(problem, problem.placement[end])
    return way + _between(problem, stage)


def _trip(problem: Problem, stage: int) -> float:
    """From a micro-batch's forward on a stage to its input gradient there."""
    trip = sum(problem.forward[stage:]) + sum(problem.backward[stage:])
    return trip + sum(problem.down[stage:]) + sum(problem.up[stage:])


def _between(problem: Problem, stage: int) -> float:
    """The least time from a stage's first forward to its last input gradient."""
    m, trip = problem.microbatches, _trip(problem, stage)
    f, b, w = problem.forward[stage], problem.backward[stage], problem.weight[stage]
    saved, deferred = _saved(problem, stage), problem.deferred[stage]
    most = problem.memory[problem.placement[stage]]
    waits = list(_waits(problem, stage))
    flying = waits[0][0]  # micro-batches that find room at once
    found = [trip + (m - 1) * max(f, b)]
    for apart, more in waits:
        for rounds in range(1, (m - 1) // apart + 1):
            found.append(rounds * (trip + more) + trip + (m - 1 - rounds * apart) * max(f, b))
    idle = max(0.0, trip - b - flying * f)
    if m <= flying:
        found.append(m * (f + b) + idle)
    else:
        least = inf
        for others in range(flying):
            back = m - 1 - others
            weights = 0
            while weights < back and (
                (others + 1) * saved + (back - weights) * deferred > most * (1 + _CLOSE)
            ):
                weights += 1
            least = min(least, weights * w + max(0.0, trip - f - (others + 1) * b))
        found.append(m * (f + b) + idle + least)
    return max(found)


def _cycle(certificate: Certificate) -> float:
    """From a batch's first forward on a stage to its update, for which a later batch waits."""
    problem, stage = certificate.problem, certificate.bound.stage
    time = _between(problem, stage) + problem.weight[stage] + problem.update[stage]
    return time / (problem.delay + 1)


def _memory(certificate: Certificate) -> float:
    """What a batch keeps on a device, times how long, cannot be more than all of the memory, for as
    long as a batch takes."""
    problem = certificate.problem
    device = problem.placement[certificate.bound.stage]
    kept = 0.0
    for s, home in enumerate(problem.placement):
        if home == device:
            kept += problem.saved[s] * _trip(problem, s) + problem.deferred[s] * problem.weight[s]
    return problem.microbatches * kept / problem.memory[device]


def _room(certificate: Certificate) -> float:
    """So many micro-batches, each for the time of a trip, find room on a stage at once."""
    problem, stage = certificate.problem, certificate.bound.stage
    most = problem.memory[problem.placement[stage]] * (1 + _CLOSE)
    flying = most // _saved(problem, stage)
    return problem.microbatches * _trip(problem, stage) / flying


def _waits(problem: Problem, stage: int) -> Iterator[tuple[int, float]]:
    """A micro-batch begins its trip only when an earlier one has ended its own, and so much later:
    where all from there to here take all room; or, weight gradient included, where they do with the
    least that they can keep."""
    m, deferred = problem.microbatches, problem.deferred[stage]
    most = problem.memory[problem.placement[stage]] * (1 + _CLOSE)
    saved = _saved(problem, stage)
    apart = 1
    while apart < m and (apart + 1) * saved <= most:
        apart += 1
    crowded = deferred and apart * saved + deferred > most
    yield apart, min(problem.backward[stage], problem.weight[stage]) if crowded else 0.0
    least = min(saved, deferred)
    if least:
        apart = 1
        while apart < m and saved + apart * least <= most:
            apart += 1
        yield apart, problem.weight[stage]


def _saved(problem: Problem, stage: int) -> float:
    """What a micro-batch that has not come back to a stage keeps on its device: there, and on the
    stages before it."""
    home, places = problem.placement[stage], problem.placement[: stage + 1]
    return sum(one for one, place in zip(problem.saved, places, strict=False) if place == home)


def _device(certificate: Certificate) -> float:
    """A device's tasks that cannot start before a time, and behind which another one must pass: see
    which these are, and add up how long they take."""
    problem, terms = certificate.problem, certificate.bound.terms
    m, device = problem.microbatches, problem.placement[certificate.bound.stage]
    first = 0 if problem.flush else problem.placement.index(device)
    forward, backward, weight = problem.forward, problem.backward, problem.weight
    ended = [
        w if problem.flush or home == device else 0.0
        for w, home in zip(weight, problem.placement, strict=True)
    ]
    none = (0.0,) * problem.stages
    heads = _earliest(problem, first, (forward, backward), (problem.down, problem.up), none)
    # Backward in time, and from the last micro-batch to the first, all is alike, but for the weight
    # gradients, which then come ahead.
    tails = _earliest(problem, first, (backward, forward), (problem.up, problem.down), ended)
    head, tail = ((1 - _CLOSE) * terms[name] for name in ("before", "behind"))
    own = []
    for s in range(first, problem.stages):
        if problem.placement[s] != device:
            continue
        late = 0.0
        for i in range(m):
            late = max(late, heads[1][s][i] + backward[s])
            tasks = (
                (heads[0][s][i], forward[s], tails[1][s][m - 1 - i]),
                (heads[1][s][i], backward[s], tails[0][s][m - 1 - i]),
                (late, weight[s], (m - 1 - i) * weight[s]),
            )
            own += [took for ready, took, after in tasks if ready >= head and after >= tail]
            late += weight[s]
    if not own:
        return 0.0
    return terms["before"] + sum(own) + terms["behind"] + _update(problem, device)


def _earliest(
    problem: Problem,
    first: int,
    took: tuple[Sequence[float], Sequence[float]],
    ways: tuple[Sequence[float], Sequence[float]],
    ahead: Sequence[float],
) -> list[list[list[float]]]:
    """On the way there and on the way back, stage → micro-batch → the earliest that it can start,
    from one stage on, if each stage had a device for either way. On the way there the stage has so
    much to do ahead of each micro-batch."""
    m, last = problem.microbatches, problem.stages - 1
    there, back = start = [[[0.0] * m for _ in problem.placement] for _ in range(2)]
    waits = [list(_waits(problem, s)) for s in range(problem.stages)]
    for i in range(m):
        for s in range(first, last + 1):
            times = [(i + 1) * ahead[s]]
            times += [there[s][i - 1] + took[0][s]] if i else []
            times += [there[s - 1][i] + took[0][s - 1] + ways[0][s - 1]] if s > first else []
            times += [back[s][i - n] + took[1][s] + more for n, more in waits[s] if i >= n]
            there[s][i] = max(times)
        for s in range(last, first - 1, -1):
            times = [there[s][i] + took[0][s]]
            times += [back[s][i - 1] + took[1][s]] if i else []
            times += [back[s + 1][i] + took[1][s + 1] + ways[1][s]] if s < last else []
            back[s][i] = max(times)
    return start
