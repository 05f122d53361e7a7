"""An order in which a program's instructions can run, whatever time they take."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from fxpipe.ir.program import (
    Barrier,
    Buffer,
    Clip,
    Instruction,
    Norm,
    Pause,
    Pop,
    Receive,
    Send,
    Stash,
)

Lists = Sequence[Sequence[Instruction]]


@dataclass(frozen=True)
class Order:
    """Each instruction comes after all that it waits for.

    Attributes:
        runs: device, first position and the position after the last, one run after another.
        stuck: device → the position at which it waits for ever.
    """

    runs: tuple[tuple[int, int, int], ...]
    stuck: dict[int, int]


def find_order(lists: Lists) -> Order:
    """Run all lists as far as they go, each device until it waits for another.

    A receive or a pop waits for its send or stash; a barrier, and a pause, for all devices; a clip
    for the norms of all stages. Takes time in proportion to the number of instructions.
    """
    done = [0] * len(lists)
    sent: set[Buffer] = set()
    waiting: dict[Buffer, int] = {}
    met: list[dict[type[Instruction], int]] = [{Barrier: 0, Pause: 0} for _ in lists]
    meetings: dict[tuple[type[Instruction], int], set[int]] = {}
    untold = Counter(x.batch for own in lists for x in own if isinstance(x, Norm))
    clipping: defaultdict[int, list[int]] = defaultdict(list)
    runs: list[tuple[int, int, int]] = []
    ready = list(range(len(lists)))
    while ready:
        device = ready.pop()
        own = lists[device]
        first = position = done[device]
        while position < len(own):
            instruction = own[position]
            match instruction:
                case Send(buffer) | Stash(buffer):
                    sent.add(buffer)
                    if buffer in waiting:
                        ready.append(waiting.pop(buffer))
                case Receive(buffer) | Pop(buffer):
                    if buffer not in sent:
                        waiting[buffer] = device
                        break
                case Norm(_, batch):
                    untold[batch] -= 1
                    if not untold[batch]:
                        ready += clipping.pop(batch, ())
                case Clip(_, batch):
                    if untold[batch]:
                        clipping[batch].append(device)
                        break
                case Barrier() | Pause():
                    kind = type(instruction)
                    here = meetings.setdefault((kind, met[device][kind]), set())
                    if device not in here:
                        here.add(device)
                        if len(here) == len(lists):
                            ready += here - {device}
                    if len(here) < len(lists):
                        break
                    met[device][kind] += 1
            position += 1
        if position > first:
            runs.append((device, first, position))
        done[device] = position
    stuck = {d: at for d, at in enumerate(done) if at < len(lists[d])}
    return Order(tuple(runs), stuck)
