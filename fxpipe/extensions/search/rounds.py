"""Orders by rounds: in each, every device computes one input gradient and one forward.

List schedules decide when a device is free, so what is about to arrive comes too late for them,
and where a device holds several stages, forwards of one take the room of the others. Here the
turns decide, and times only tell where a weight gradient fills the wait. Zero bubble's schedules
for the V are of this kind (Qi et al., arXiv 2405.15362); here stages may take different times and
memory, and be placed in any way.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from itertools import product
from math import inf
from typing import NamedTuple

from fxpipe.extensions.search.problem import Problem

_APART = 2
"""While a micro-batch comes one stage further on its way back to the first device, that device has
time for about this many forwards."""


class Turns(NamedTuple):
    """How weight gradients are placed, beside those that fit into a wait or make room.

    A device that is to wait, but not long enough for a weight gradient, computes one nevertheless
    if its idle time would become the longest of all devices otherwise. Before an input gradient
    that was there when the round began it always does.

    Attributes:
        forwards: whether it does before forwards.
        gradients: whether it does before input gradients that arrive in the same round.
        idle: device → its idle time in an earlier try; devices that were idle for less than others
            may be idle for longer now.
    """

    forwards: bool
    gradients: bool
    idle: tuple[float, ...] = ()


def orders_by_turns(problem: Problem) -> Iterator[tuple[float, list[list[int]]]]:
    """Yield times that the problem minimizes, for one step, and their orders: by each way to place
    weight gradients, and by those again with their idle times, for as long as that gains."""
    each = product((True, False), repeat=2)
    tries = deque((Turns(forwards, gradients), inf) for forwards, gradients in each)
    while tries:
        turns, least = tries.popleft()
        value, order, idle = order_by_turns(problem, turns)
        yield value, order
        if value < least:
            tries.append((turns._replace(idle=idle), value))


def order_by_turns(
    problem: Problem, turns: Turns
) -> tuple[float, list[list[int]], tuple[float, ...]]:
    """Return the time that the problem minimizes, for one step, the order, and each device's idle
    time."""
    rounds = _Rounds(problem, turns)
    return rounds.run(), rounds.order, tuple(rounds.idle)


class _Rounds:
    def __init__(self, problem: Problem, turns: Turns) -> None:
        devices = problem.devices
        self.problem, self.turns = problem, turns
        parts = zip(problem.memory, problem.summing, problem.least_memory, strict=True)
        # room for sums of gradients is reserved, if a micro-batch fits beside them
        rooms = [most - more if most - more >= least else most for most, more, least in parts]
        self.most = [room * (1 + 1e-12) for room in rooms]
        longest = max(turns.idle, default=0.0)
        self.spare = [longest - idle for idle in turns.idle] or [0.0] * devices
        self.now, self.level, self.idle = [0.0] * devices, [0.0] * devices, [0.0] * devices
        self.begun = [0.0 if problem.flush else inf] * devices
        self.waiting: list[deque[int]] = [deque() for _ in range(devices)]
        """Device → the stages of its weight gradients that can run, the oldest first."""
        self.order: list[list[int]] = [[] for _ in range(devices)]
        self.forwards: list[list[float]] = [[] for _ in range(problem.stages)]
        """Stage → the ends of its forwards."""
        self.gradients: list[list[float]] = [[] for _ in range(problem.stages)]
        """Stage → the ends of its input gradients."""
        self.done = [0] * problem.stages
        """Stage → how many micro-batches keep nothing there any more."""

    def run(self) -> float:
        problem, last = self.problem, self.problem.last
        self._warm_up()
        progress, count = True, sum(map(len, self.order))
        while progress:
            self._backward_round()
            self._forward_round()
            before, count = count, sum(map(len, self.order))
            progress = count > before
        for device, waiting in enumerate(self.waiting):
            while waiting:
                self._weight(device)
        m = problem.microbatches
        assert all(done == m for done in self.done), "rounds got stuck"
        ends = [now + after for now, after in zip(self.now, last, strict=True)]
        return max(end - begun for end, begun in zip(ends, self.begun, strict=True))

    def _warm_up(self) -> None:
        """Follow the first micro-batch to the last stage. Where a device waits for it, further
        forwards go through the earlier stages, as many as fit into the time and leave room for
        those that devices later on the way start. Then all devices start as many."""
        problem, held = self.problem, self.problem.held
        for stage in range(problem.stages):
            device = problem.placement[stage]
            earlier = held[device][: held[device].index(stage)]
            if earlier:
                due, further = self._forward_due(stage), _APART * (problem.stages - 1 - stage)
                took = problem.forward[earlier[-1]]
                while self.now[device] + took <= due and self._push(earlier[-1], further):
                    pass
            self._put(stage, 0, self._forward_due(stage))
        begun = [sum(len(self.forwards[s]) for s in stages) for stages in held]
        most, turns = max(begun), max(map(len, held))
        turn, still = 0, 0
        while still < turns:
            still += 1
            for device in reversed(range(problem.devices)):
                if begun[device] < most and turn < len(held[device]):
                    stage = held[device][turn]
                    if self._forward_due(stage) < inf and self._has_room(stage):
                        self._put(stage, 0, self._forward_due(stage))
                        begun[device] += 1
                        still = 0
            turn = (turn + 1) % turns

    def _push(self, last: int, further: int) -> bool:
        """Start the next forward of the stages up to one; return whether there was room."""
        if len(self.forwards[last]) >= self.problem.microbatches:
            return False
        first = last
        while first and len(self.forwards[first - 1]) <= len(self.forwards[last]):
            first -= 1
        room = self._has_room(last, further)
        for stage in range(first, last + 1):
            room = room and self._has_room(stage)
            if room:
                self._put(stage, 0, self._forward_due(stage))
        return room

    def _backward_round(self) -> None:
        """An input gradient on each device: of the earliest stage for which one is there, or else
        of its last stage, if that arrives in this round."""
        m, chosen = self.problem.microbatches, []
        for stages in self.problem.held:
            left = [s for s in stages if len(self.gradients[s]) < m]
            there = [s for s in left if self._gradient_due(s) < inf]
            if left:
                stage = there[0] if there else left[-1] if left[-1] == stages[-1] else left[0]
                chosen.append((stage == stages[-1], -stage))
        for last, stage in sorted(chosen):
            due = self._gradient_due(-stage)
            if due < inf:
                self._wait(-stage, due, self.turns.gradients or not last)
                self._put(-stage, 1, due)

    def _forward_round(self) -> None:
        """A forward on each device that has room: of the latest stage for which one is there, or
        else of its first stage, if that arrives in this round."""
        m, chosen = self.problem.microbatches, []
        for stages in self.problem.held:
            left = [s for s in stages if len(self.forwards[s]) < m]
            there = [s for s in left if self._forward_due(s) < inf]
            if there or left[:1] == list(stages[:1]):
                chosen.append((stages[0], there[-1] if there else stages[0]))
        for _, stage in sorted(chosen):
            device = self.problem.placement[stage]
            due = self._forward_due(stage)
            if due == inf:
                continue
            room = self._has_room(stage)
            while self.waiting[device] and not room:
                self._weight(device)
                room = self._has_room(stage)
            if room:
                self._wait(stage, due, self.turns.forwards)
                self._put(stage, 0, due)

    def _has_room(self, stage: int, further: int = 0) -> bool:
        """Whether a forward fits, beside so many more, and no order gets stuck after it.

        None does if one micro-batch after the other, the oldest first, has room for its forwards on
        the device's later stages once those before it have left. That need only be seen for the
        oldest and for the first that each stage has not begun: what is begun of that one, and of
        later ones, has had no input gradient.
        """
        keeps, device = self.problem.keeps, self.problem.placement[stage]
        held, most = self.problem.held[device], self.most[device]
        level = self.level[device] + keeps[stage] * (1 + further)
        if len(held) == 1 or level > most:
            return level <= most
        begun = [len(self.forwards[s]) + (s == stage) for s in held]
        oldest = min([self.done[s] for s in held])
        for s, count in zip(held, begun, strict=True):
            if count <= oldest:
                level += keeps[s]
        if level > most:
            return False
        for first in begun:
            if first > oldest:
                level = 0.0
                for s, count in zip(held, begun, strict=True):
                    level += keeps[s] * (count - first if count > first else 1)
                if level > most:
                    return False
        return True

    def _forward_due(self, stage: int) -> float:
        """When the input of a stage's next forward is there; infinite if nothing tells."""
        i = len(self.forwards[stage])
        if not stage or i >= self.problem.microbatches:
            return 0.0 if i < self.problem.microbatches else inf
        before = self.forwards[stage - 1]
        return before[i] + self.problem.down[stage - 1] if i < len(before) else inf

    def _gradient_due(self, stage: int) -> float:
        """The same for its next input gradient."""
        i = len(self.gradients[stage])
        if stage == self.problem.stages - 1:
            own = self.forwards[stage]
            return own[i] if i < len(own) else inf
        after = self.gradients[stage + 1]
        return after[i] + self.problem.up[stage] if i < len(after) else inf

    def _wait(self, stage: int, due: float, eager: bool) -> None:
        """Compute weight gradients on the stage's device while it waits; where ``eager``, also one
        that delays what it waits for, if it was to be idle for longer than any device."""
        device = self.problem.placement[stage]
        waiting, weight = self.waiting[device], self.problem.weight
        while waiting and due >= self.now[device] + weight[waiting[0]]:
            self._weight(device)
        if waiting and eager and due > self.now[device]:
            idle = self.idle[device] + due - self.now[device]
            if idle > max(*self.idle, self.spare[device]):
                self._weight(device)

    def _weight(self, device: int) -> None:
        self._put(self.waiting[device].popleft(), 2, 0.0)

    def _put(self, stage: int, kind: int, due: float) -> None:
        """Let a device compute a task as soon as it can."""
        problem, device = self.problem, self.problem.placement[stage]
        start = max(self.now[device], due)
        if self.order[device]:
            self.idle[device] += start - self.now[device]
        else:
            self.begun[device] = min(self.begun[device], start)
        self.now[device] = end = start + problem.times[3 * stage + kind]
        self.order[device].append(3 * stage + kind)
        keeps, deferred = problem.keeps[stage], problem.deferred[stage]
        self.level[device] += (keeps, deferred - keeps, -deferred)[kind]
        if kind == 0:
            self.forwards[stage].append(end)
        elif kind == 1:
            self.gradients[stage].append(end)
        if kind == 1 and not problem.whole:
            self.waiting[device].append(stage)
        elif kind:
            self.done[stage] += 1
