"""The part of a program that one rank needs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from itertools import chain

from fxpipe.ir import instruction as ins
from fxpipe.ir.plan import Plan
from fxpipe.ir.program import Program
from fxpipe.ir.schedule import Schedule
from fxpipe.ir.value import HOST, Buffer

CROSSING = ("act", "skip", "grad")
"""The kinds of buffers that hold one value on its way between stages."""


@dataclass(frozen=True)
class OwnProgram(Program):
    """A program with the list of one device alone, and the depth and window of the whole.

    Attributes:
        confirmed: position of a receive → the last value that had gone the other way and was
            received before the sender sent this one. Batches count from the receiver's step.
    """

    confirmed: Mapping[int, Buffer] = field(default_factory=dict, compare=False)

    @classmethod
    def of(cls, whole: Program, device: int) -> OwnProgram:
        parts = {each.name: getattr(whole, each.name) for each in fields(whole)}
        for name in ("lists", "launches"):
            parts[name] = tuple(row if d == device else () for d, row in enumerate(parts[name]))
        own = cls(**parts, confirmed={} if whole.launches else _confirmed(whole, device))
        vars(own).update(depth=whole.depth, _elsewhere=whole._elsewhere)
        if whole.launches:
            vars(own)["window"] = whole.window
        return own

    @cached_property
    def receives(self) -> Mapping[int, Sequence[tuple[int, Buffer]]]:
        """Other device → the position and the buffer of each receive of a tensor from it."""
        found: dict[int, list[tuple[int, Buffer]]] = {}
        for at, x in enumerate(chain(*self.lists)):
            if isinstance(x, ins.Receive) and x.buffer.kind in CROSSING:
                found.setdefault(self.origin(x), []).append((at, x.buffer))
        return found

    @cached_property
    def pauses(self) -> Sequence[int]:
        """The positions of its pauses."""
        return [at for at, x in enumerate(chain(*self.lists)) if isinstance(x, ins.Pause)]

    @cached_property
    def links(self) -> tuple[tuple[int, int], ...]:
        """The devices of which one sends tensors to the other, where one of them is this rank's:
        each direction apart, sorted."""
        moves = (x for x in chain(*self.lists) if isinstance(x, ins.Send | ins.Receive))
        return tuple(sorted({self.ends_of(x.buffer) for x in moves if x.buffer.kind in CROSSING}))


def devices_near(schedule: Schedule, plan: Plan, device: int) -> frozenset[int]:
    """A device and those with which it exchanges values, whose lists decide what it does: none,
    which stands for all, where it may be any."""
    if schedule.overlaps or schedule.working or "C" in schedule.kinds:
        return frozenset()
    place = [*schedule.placement, HOST]  # the last one is that of HOST
    ends = ((place[e.source], place[e.target]) for e in (*plan.edges, *plan.gradients))
    return frozenset((device, *(end for pair in ends if device in pair for end in pair))) - {HOST}


def _confirmed(program: Program, device: int) -> dict[int, Buffer]:
    """See ``OwnProgram``."""
    before: dict[tuple[object, ...], Buffer] = {}
    for row in program.lists:
        latest: dict[int, Buffer] = {}  # other device → the last value that came from it
        for x in row:
            if isinstance(x, ins.Receive) and x.buffer.kind in CROSSING:
                latest[program.origin(x)] = x.buffer
            elif isinstance(x, ins.Send) and (last := latest.get(program.destination(x))):
                before[x.buffer[:5]] = last._replace(batch=last.batch - x.buffer.batch)
    return {
        at: last._replace(batch=last.batch + x.buffer.batch)
        for at, x in enumerate(program.lists[device])
        if isinstance(x, ins.Receive) and (last := before.get(x.buffer[:5]))
    }
